//! Approvals, as those see them who stand between a session and a person: what is asked, what was decided, and by whom.
//!
//! A question that a person must decide parks the code that asked it; `Underway` and `Checked` tell of it, and `decide` answers it. Ids count for one
//! execution and are known on this side of the wall only.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::driver::{Command, Shared};
use super::{ExecutionHandle, Principal, Refused, SessionId, Sessions, Which};
use crate::approval::{self, Answer, Book, BookError, Policy, Rendering, Scope, Subject, Verdict};

/// Decisions without a question that an outcome tells of.
const MOST_RULINGS: usize = 100;
/// Characters that one question shows at most, and all of them together. What is longer is shown with its digest.
const MOST_SHOWN: usize = 6000;
const MOST_SHOWN_TOGETHER: usize = 24_000;
/// Installations of one session that wait for somebody's answer.
const MOST_INSTALLATIONS: usize = 16;

/// What decides about what code may do, and for how long somebody is asked.
#[derive(Debug, Clone)]
pub struct Approvals {
    pub policy: Arc<Policy>,
    /// What was allowed for good.
    pub book: Arc<Book>,
    /// How long a question waits for its answer.
    pub patience: Duration,
}

impl Default for Approvals {
    fn default() -> Approvals {
        Approvals {
            policy: Arc::default(),
            book: Arc::default(),
            patience: Duration::from_secs(600),
        }
    }
}

/// The approvals that hold now. Clones are the same: what is taken over holds at once in all sessions, for what is asked from then on.
#[derive(Debug, Clone)]
pub struct InForce {
    now: Arc<Mutex<Approvals>>,
    /// Code in sandboxes can start no programs by itself, so that commands can be asked about.
    programs_are_refused: bool,
}

impl Default for InForce {
    fn default() -> InForce {
        Approvals::default().into()
    }
}

impl From<Approvals> for InForce {
    /// Sandboxes are made for what holds at first.
    fn from(approvals: Approvals) -> InForce {
        let programs_are_refused = !approvals.policy.shell_is_open();
        InForce {
            now: Arc::new(Mutex::new(approvals)),
            programs_are_refused,
        }
    }
}

/// Approvals as they are handed on, in the place of those that hold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApprovalSetup {
    pub policy: Policy,
    /// Where the book is kept, if anywhere.
    pub book: Option<PathBuf>,
    pub patience: Duration,
}

impl ApprovalSetup {
    /// Opens the book.
    pub fn open(self) -> Result<Approvals, BookError> {
        let ApprovalSetup {
            policy,
            book,
            patience,
        } = self;
        let book = book
            .map(|path| Book::open(&path))
            .transpose()?
            .unwrap_or_default();
        Ok(Approvals {
            policy: Arc::new(policy),
            book: Arc::new(book),
            patience,
        })
    }
}

impl InForce {
    /// Returns what holds at this moment.
    pub(super) fn now(&self) -> Approvals {
        self.lock().clone()
    }

    /// Takes others over, all of them or none.
    pub(super) fn replace(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        let refused = |why: String| Refused::Approvals { why };
        if !self.programs_are_refused && !setup.policy.shell_is_open() {
            return Err(refused(
                "commands cannot be asked about or denied in sandboxes that were made to run them freely; that needs a restart"
                    .to_owned(),
            ));
        }
        let before = self.now().book;
        let ApprovalSetup {
            policy,
            book,
            patience,
        } = setup;
        // One book for one file: two would write over each other.
        let approvals = if book.as_deref() == before.path() {
            Approvals {
                policy: Arc::new(policy),
                book: before,
                patience,
            }
        } else {
            let setup = ApprovalSetup {
                policy,
                book,
                patience,
            };
            setup.open().map_err(|error| refused(error.to_string()))?
        };
        *self.lock() = approvals;
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Approvals> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a person can be asked while code runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Asking {
    /// Whoever began it can ask somebody.
    Person,
    /// The client has no way to ask.
    #[default]
    Nobody,
    /// It is one of several variants that nobody follows.
    Exploration,
}

/// Names a question within its execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AskId(pub u64);

/// A question that waits for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    pub id: AskId,
    /// `tool`, `shell`, `packages` or `domain`.
    pub kind: String,
    /// Exactly what runs if it is allowed. Bounded, and nothing in it hides.
    pub text: String,
    /// What a permission for the whole session would cover.
    pub covers: String,
    /// The rule because of which it is asked.
    pub line: String,
    /// A permission for good can be given.
    pub can_last: bool,
    /// How long it goes on waiting.
    pub patience: Duration,
}

/// What a question says. It is made once, however often the question is shown.
pub(super) struct Wording {
    kind: &'static str,
    rendering: Rendering,
    covers: String,
    line: String,
}

impl Wording {
    pub(super) fn new(subject: &Subject, line: &str) -> Wording {
        Wording {
            kind: subject.kind(),
            rendering: subject.rendering(MOST_SHOWN),
            covers: Scope::words(subject),
            line: line.to_owned(),
        }
    }

    /// Describes the question, as one of so many that are asked together.
    pub(super) fn asked(
        &self,
        id: AskId,
        together: usize,
        approvals: &Approvals,
        patience: Duration,
    ) -> Asked {
        let most = (MOST_SHOWN_TOGETHER / together.max(1)).min(MOST_SHOWN);
        Asked {
            id,
            kind: self.kind.to_owned(),
            text: self.rendering.shown(most),
            covers: self.covers.clone(),
            line: self.line.clone(),
            can_last: approvals.book.is_kept(),
            patience,
        }
    }
}

/// The answer to one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    pub id: AskId,
    pub answer: Answer,
}

/// What came of some answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    pub session: SessionId,
    /// Questions that were open.
    pub rulings: Vec<Ruling>,
}

/// What was decided about one subject, for records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ruling {
    pub kind: String,
    /// The digest of everything that was asked about.
    pub digest: String,
    pub line: String,
    pub by: DecidedBy,
}

impl Ruling {
    pub(super) fn new(subject: &Subject, line: &str, by: DecidedBy) -> Ruling {
        Ruling {
            kind: subject.kind().to_owned(),
            digest: approval::digest(subject),
            line: line.to_owned(),
            by,
        }
    }
}

/// Who or what decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecidedBy {
    Person(Answer),
    /// A rule denies it.
    Policy,
    /// A person had to be asked, and there was no way to.
    NobodyToAsk,
    NobodyAnswered,
}

impl DecidedBy {
    pub fn is_allowed(self) -> bool {
        matches!(self, DecidedBy::Person(answer) if answer != Answer::Deny)
    }

    /// The word for it in records.
    pub fn word(self) -> &'static str {
        match self {
            DecidedBy::Person(answer) => answer.name(),
            DecidedBy::Policy => "policy",
            DecidedBy::NobodyToAsk => "nobody_to_ask",
            DecidedBy::NobodyAnswered => "nobody_answered",
        }
    }
}

/// Adds to a list of rulings that is bounded.
pub(super) fn note(rulings: &mut Vec<Ruling>, ruling: Ruling) {
    if rulings.len() < MOST_RULINGS {
        rulings.push(ruling);
    }
}

/// Says why something was not allowed, to whoever wanted it.
pub(super) fn refusal(subject: &Subject, line: &str, why: Why) -> String {
    let setting = subject.setting();
    match why {
        Why::Policy => format!(
            "this is not allowed on this server: {line} forbids it. Do it without this, or have the server's operator change that line"
        ),
        Why::NoClient => format!(
            "this needs a person's approval ({line}), and this client has no way to ask one: it does not support elicitation. \
             Use a client that does, or have the server's operator allow it with a rule under `approvals` or with `{setting}: allow`"
        ),
        Why::Exploration => format!(
            "this needs a person's approval ({line}), and nobody can be asked from a variant of `explore`. Run it in a cell of a session instead"
        ),
        Why::Hidden => format!("this needs a person's approval ({line}), and this code is the server's own"),
        Why::NoCell => format!("this needs a person's approval ({line}), and nobody can be asked while no cell runs"),
        Why::Person => "the person who was asked did not allow this. Do not try it again in another way; ask them what they want instead".to_owned(),
        Why::Silence(patience) => format!(
            "this needs a person's approval ({line}), and nobody answered within {} s. Nothing else of this cell is asked",
            patience.as_secs()
        ),
        Why::TooMany => format!("this needs a person's approval ({line}), and too many questions of this cell wait for an answer already"),
        Why::Interrupted => "the code was interrupted while this waited for a person's approval".to_owned(),
    }
}

/// Why something was not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Policy,
    NoClient,
    Exploration,
    Hidden,
    NoCell,
    Person,
    Silence(Duration),
    TooMany,
    Interrupted,
}

/// An installation that somebody has to allow first.
pub(super) struct WaitingInstall {
    id: AskId,
    requirements: Vec<String>,
    line: String,
    until: Instant,
}

impl Sessions {
    /// Takes over other approvals. Questions that wait for an answer go on waiting.
    pub fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        self.settings().approvals.replace(setup)
    }

    /// Answers questions of an execution that runs. Questions that are not open any more are left alone; what was decided comes back.
    pub async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
    ) -> Result<Decided, Refused> {
        let (session, entry) = self.locate(owner, &Which::This(handle.clone()))?;
        let execution = entry
            .shared
            .docket
            .find(handle)
            .ok_or(Refused::UnknownExecution)?;
        let (reply, answer) = oneshot::channel();
        let command = Command::Decide {
            request: execution.request,
            decisions,
            reply,
        };
        entry
            .commands
            .send(command)
            .await
            .map_err(|_| Refused::UnknownExecution)?;
        let rulings = answer.await.map_err(|_| Refused::UnknownExecution)?;
        Ok(Decided { session, rulings })
    }

    /// Decides whether packages may be installed by a call of their own. An answer that is given must be to a question that was asked about exactly these.
    pub(super) fn leave_to_install(
        &self,
        (owner, id): (&Principal, &SessionId),
        shared: &Shared,
        requirements: &[String],
        asking: Asking,
        answer: Option<Decision>,
    ) -> Result<Option<Ruling>, Refused> {
        let approvals = self.settings().approvals.now();
        let subject = Subject::Install {
            requirements: requirements.to_vec(),
        };
        let refuse = |line: &str, why: Why, by: DecidedBy| {
            let text = format!("nothing was installed: {}", refusal(&subject, line, why));
            Err(Refused::NotApproved {
                text,
                ruling: Box::new(Ruling::new(&subject, line, by)),
            })
        };
        let line = match approvals.policy.verdict(&subject) {
            Verdict::Allow => return Ok(None),
            Verdict::Deny { line } => return refuse(&line, Why::Policy, DecidedBy::Policy),
            Verdict::Ask { line } => line,
        };
        if shared.facts().granted.covers(&subject) || approvals.book.covers(&owner.0, &subject) {
            return Ok(None);
        }
        let now = Instant::now();
        if let Some(Decision { id, answer }) = answer
            && shared.take_install(id, requirements, now)
        {
            if answer == Answer::Deny {
                return refuse(&line, Why::Person, DecidedBy::Person(answer));
            }
            keep(shared, &approvals, owner, &subject, answer);
            return Ok(Some(Ruling::new(
                &subject,
                &line,
                DecidedBy::Person(answer),
            )));
        }
        match asking {
            Asking::Nobody => refuse(&line, Why::NoClient, DecidedBy::NobodyToAsk),
            Asking::Exploration => refuse(&line, Why::Exploration, DecidedBy::NobodyToAsk),
            Asking::Person => {
                let ask = AskId(self.next_number());
                let asked =
                    Wording::new(&subject, &line).asked(ask, 1, &approvals, approvals.patience);
                let (requirements, until) = (requirements.to_vec(), now + approvals.patience);
                shared.wait_with_install(
                    WaitingInstall {
                        id: ask,
                        requirements,
                        line,
                        until,
                    },
                    now,
                );
                Err(Refused::Ask {
                    session: id.clone(),
                    asked: Box::new(asked),
                })
            }
        }
    }
}

impl Shared {
    fn wait_with_install(&self, install: WaitingInstall, now: Instant) {
        let mut waiting = self.installs();
        waiting.retain(|known| known.until > now);
        if waiting.len() == MOST_INSTALLATIONS {
            waiting.remove(0);
        }
        waiting.push(install);
    }

    /// Takes the question with this id, if it was about exactly this and is still open.
    fn take_install(&self, id: AskId, requirements: &[String], now: Instant) -> bool {
        let mut waiting = self.installs();
        let fits = |known: &WaitingInstall| {
            known.id == id && known.requirements == requirements && known.until > now
        };
        let place = waiting.iter().position(fits);
        place
            .map(|place| waiting.remove(place))
            .is_some_and(|install| !install.line.is_empty())
    }
}

/// Keeps a permission as long as the person said.
pub(super) fn keep(
    shared: &Shared,
    approvals: &Approvals,
    owner: &Principal,
    subject: &Subject,
    answer: Answer,
) {
    if matches!(answer, Answer::Session | Answer::Always) {
        shared.facts().granted.allow(subject);
    }
    if answer == Answer::Always && approvals.book.is_kept() {
        let (book, owner, subject) = (approvals.book.clone(), owner.0.clone(), subject.clone());
        // A file is written, and nobody waits for it.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = book.remember(&owner, &subject) {
                tracing::error!(%error, "an approval could not be remembered");
            }
        });
    }
}
