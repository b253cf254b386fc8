//! Approvals, as seen by the code between a session and a person: approval requests, decisions, and
//! their origin.
//!
//! A request that a person must decide blocks the code that made it. `Underway` and
//! `ExecutionReport` report it, and `decide` answers it. Ids are scoped to one execution and are
//! known only on the host.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::driver::{DriverCommand, SharedSession};
use super::{ExecutionHandle, ExecutionRef, Principal, Refused, SessionId, Sessions};
use crate::approval::{
    self, ApprovalAnswer, ApprovalStore, ApprovalStoreError, PermissionScope, Policy, Rendering,
    Subject, Verdict,
};

/// Decisions made without a person that an outcome lists.
const MAX_RULINGS: usize = 100;
/// Limit in characters for the text of one request, and for all requests together. Longer texts are
/// shortened and shown with their digest.
const MAX_SHOWN: usize = 6000;
const MAX_SHOWN_TOGETHER: usize = 24_000;
/// Installations of one session that may wait for approval.
const MAX_INSTALLATIONS: usize = 16;

/// The policy and stored permissions that apply to code, and the approval timeout.
#[derive(Debug, Clone)]
pub struct Approvals {
    pub policy: Arc<Policy>,
    /// Permanent permissions.
    pub store: Arc<ApprovalStore>,
    /// How long a request waits for its answer.
    pub timeout: Duration,
}

impl Default for Approvals {
    fn default() -> Approvals {
        Approvals {
            policy: Arc::default(),
            store: Arc::default(),
            timeout: Duration::from_secs(600),
        }
    }
}

/// The approvals that are in force. Clones share one value: a replacement takes effect immediately
/// in all sessions, for later requests.
#[derive(Debug, Clone)]
pub struct InForce {
    now: Arc<Mutex<Approvals>>,
    /// Whether code in sandboxes cannot start programs by itself, so that commands can be subject
    /// to approval.
    programs_are_refused: bool,
}

impl Default for InForce {
    fn default() -> InForce {
        Approvals::default().into()
    }
}

impl From<Approvals> for InForce {
    /// Sandboxes are set up for the initial approvals.
    fn from(approvals: Approvals) -> InForce {
        let programs_are_refused = !approvals.policy.shell_is_open();
        InForce {
            now: Arc::new(Mutex::new(approvals)),
            programs_are_refused,
        }
    }
}

/// Serializable form of the approvals that replace those in force.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApprovalSetup {
    pub policy: Policy,
    /// Path of the approval store, if it is a file.
    pub store: Option<PathBuf>,
    pub timeout: Duration,
}

impl ApprovalSetup {
    /// Opens the approval store.
    pub fn open(self) -> Result<Approvals, ApprovalStoreError> {
        let ApprovalSetup {
            policy,
            store,
            timeout,
        } = self;
        let store = store
            .map(|path| ApprovalStore::open(&path))
            .transpose()?
            .unwrap_or_default();
        Ok(Approvals {
            policy: Arc::new(policy),
            store: Arc::new(store),
            timeout,
        })
    }
}

impl InForce {
    /// Returns the approvals in force.
    pub(super) fn now(&self) -> Approvals {
        self.lock().clone()
    }

    /// Replaces the approvals, all of them or none.
    pub(super) fn replace(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        let refused = |why: String| Refused::Approvals { why };
        if !self.programs_are_refused && !setup.policy.shell_is_open() {
            return Err(refused(
                "commands cannot be asked about or denied in sandboxes that were made to run them \
                 freely; that needs a restart"
                    .to_owned(),
            ));
        }
        let before = self.now().store;
        let ApprovalSetup {
            policy,
            store,
            timeout,
        } = setup;
        // One store per file: two would overwrite each other's changes.
        let approvals = if store.as_deref() == before.path() {
            Approvals {
                policy: Arc::new(policy),
                store: before,
                timeout,
            }
        } else {
            let setup = ApprovalSetup {
                policy,
                store,
                timeout,
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
pub enum Approver {
    /// The client that started the execution can ask a person.
    Person,
    /// The client cannot ask a person.
    #[default]
    Nobody,
    /// It is one of several variants, which have no follower.
    Exploration,
}

/// Id of an approval request within its execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ApprovalId(pub u64);

/// A pending approval request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApprovalRequest {
    pub id: ApprovalId,
    /// `tool`, `shell`, `packages` or `domain`.
    pub kind: String,
    /// Exactly what runs if it is allowed. Bounded, and without hidden characters.
    pub text: String,
    /// Scope of a permission for the whole session.
    pub covers: String,
    /// The policy rule that requires the approval.
    pub line: String,
    /// Whether a permanent permission can be given.
    pub can_last: bool,
    /// Time left until it expires.
    pub timeout: Duration,
}

/// The texts of an approval request. They are built once, however often the request is shown.
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
            rendering: subject.rendering(MAX_SHOWN),
            covers: PermissionScope::words(subject),
            line: line.to_owned(),
        }
    }

    /// Describes the request, as one of several that are shown together.
    pub(super) fn asked(
        &self,
        id: ApprovalId,
        together: usize,
        approvals: &Approvals,
        timeout: Duration,
    ) -> ApprovalRequest {
        let most = (MAX_SHOWN_TOGETHER / together.max(1)).min(MAX_SHOWN);
        ApprovalRequest {
            id,
            kind: self.kind.to_owned(),
            text: self.rendering.shown(most),
            covers: self.covers.clone(),
            line: self.line.clone(),
            can_last: approvals.store.is_kept(),
            timeout,
        }
    }
}

/// The answer to one approval request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    pub id: ApprovalId,
    pub answer: ApprovalAnswer,
}

/// Result of some answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecideReport {
    pub session: SessionId,
    /// Rulings on requests that were still pending.
    pub rulings: Vec<Ruling>,
}

/// The decision about one subject, for records.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ruling {
    pub kind: String,
    /// Digest of the complete subject.
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

/// Origin of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DecidedBy {
    Person(ApprovalAnswer),
    /// A policy rule denies it.
    Policy,
    /// Approval was required, and there was no way to ask a person.
    NobodyToAsk,
    NobodyAnswered,
}

impl DecidedBy {
    pub fn is_allowed(self) -> bool {
        matches!(self, DecidedBy::Person(answer) if answer != ApprovalAnswer::Deny)
    }

    /// Returns the word used in records.
    pub fn word(self) -> &'static str {
        match self {
            DecidedBy::Person(answer) => answer.name(),
            DecidedBy::Policy => "policy",
            DecidedBy::NobodyToAsk => "nobody_to_ask",
            DecidedBy::NobodyAnswered => "nobody_answered",
        }
    }
}

/// Appends to a bounded list of rulings.
pub(super) fn note(rulings: &mut Vec<Ruling>, ruling: Ruling) {
    if rulings.len() < MAX_RULINGS {
        rulings.push(ruling);
    }
}

/// Returns the message for the requester of an action that was not allowed.
pub(super) fn refusal(subject: &Subject, line: &str, why: Why) -> String {
    let setting = subject.setting();
    match why {
        Why::Policy => format!(
            "this is not allowed on this server: {line} forbids it. Do it without this, or have \
             the server's operator change that line"
        ),
        Why::NoClient => format!(
            "this needs a person's approval ({line}), and this client has no way to ask one: it \
             does not support elicitation. \
             Use a client that does, or have the server's operator allow it with a rule under \
             `approvals` or with `{setting}: allow`"
        ),
        Why::Exploration => format!(
            "this needs a person's approval ({line}), and nobody can be asked from a variant of \
             `explore`. Run it in a cell of a session instead"
        ),
        Why::Hidden => format!(
            "this needs a person's approval ({line}), and this code is the \
                                server's own"
        ),
        Why::NoCell => format!(
            "this needs a person's approval ({line}), and nobody can be asked \
                                while no cell runs"
        ),
        Why::Person => "the person who was asked did not allow this. Do not try it again in \
                        another way; ask them what they want instead"
            .to_owned(),
        Why::TimedOut(timeout) => format!(
            "this needs a person's approval ({line}), and nobody answered within {} s. Nothing \
             else of this cell is asked",
            timeout.as_secs()
        ),
        Why::TooMany => format!(
            "this needs a person's approval ({line}), and too many questions \
                                 of this cell wait for an answer already"
        ),
        Why::Interrupted => "the code was interrupted while this waited for a person's \
                             approval"
            .to_owned(),
    }
}

/// Reason why an action was not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Policy,
    NoClient,
    Exploration,
    Hidden,
    NoCell,
    Person,
    TimedOut(Duration),
    TooMany,
    Interrupted,
}

/// An installation that waits for approval.
pub(super) struct WaitingInstall {
    id: ApprovalId,
    requirements: Vec<String>,
    line: String,
    until: Instant,
}

impl Sessions {
    /// Replaces the approvals. Pending requests stay pending.
    pub fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        self.settings().approvals.replace(setup)
    }

    /// Answers approval requests of a running execution. Requests that are no longer pending are
    /// ignored. Returns the rulings.
    pub async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
    ) -> Result<DecideReport, Refused> {
        let (session, entry) = self.locate(owner, &ExecutionRef::Handle(handle.clone()))?;
        let execution = entry
            .shared
            .registry
            .find(handle)
            .ok_or(Refused::UnknownExecution)?;
        let (reply, answer) = oneshot::channel();
        let command = DriverCommand::Decide {
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
        Ok(DecideReport { session, rulings })
    }

    /// Decides whether a call may install packages. A given answer must match a request for exactly
    /// these packages.
    pub(super) fn approve_install(
        &self,
        (owner, id): (&Principal, &SessionId),
        shared: &SharedSession,
        requirements: &[String],
        asking: Approver,
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
        if shared.facts().granted.covers(&subject) || approvals.store.covers(&owner.0, &subject) {
            return Ok(None);
        }
        let now = Instant::now();
        if let Some(Decision { id, answer }) = answer
            && shared.take_install(id, requirements, now)
        {
            if answer == ApprovalAnswer::Deny {
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
            Approver::Nobody => refuse(&line, Why::NoClient, DecidedBy::NobodyToAsk),
            Approver::Exploration => refuse(&line, Why::Exploration, DecidedBy::NobodyToAsk),
            Approver::Person => {
                let ask = ApprovalId(self.next_number());
                let asked =
                    Wording::new(&subject, &line).asked(ask, 1, &approvals, approvals.timeout);
                let (requirements, until) = (requirements.to_vec(), now + approvals.timeout);
                shared.wait_with_install(
                    WaitingInstall {
                        id: ask,
                        requirements,
                        line,
                        until,
                    },
                    now,
                );
                Err(Refused::ApprovalNeeded {
                    session: id.clone(),
                    asked: Box::new(asked),
                })
            }
        }
    }
}

impl SharedSession {
    fn wait_with_install(&self, install: WaitingInstall, now: Instant) {
        let mut waiting = self.installs();
        waiting.retain(|known| known.until > now);
        if waiting.len() == MAX_INSTALLATIONS {
            waiting.remove(0);
        }
        waiting.push(install);
    }

    /// Takes the request with this id, if it was for exactly these requirements and is still
    /// pending.
    fn take_install(&self, id: ApprovalId, requirements: &[String], now: Instant) -> bool {
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

/// Stores a permission for the duration that the person chose.
pub(super) fn keep(
    shared: &SharedSession,
    approvals: &Approvals,
    owner: &Principal,
    subject: &Subject,
    answer: ApprovalAnswer,
) {
    if matches!(answer, ApprovalAnswer::Session | ApprovalAnswer::Always) {
        shared.facts().granted.allow(subject);
    }
    if answer == ApprovalAnswer::Always && approvals.store.is_kept() {
        let (store, owner, subject) = (approvals.store.clone(), owner.0.clone(), subject.clone());
        // This writes a file; the caller does not wait for it.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = store.remember(&owner, &subject) {
                tracing::error!(%error, "an approval could not be remembered");
            }
        });
    }
}
