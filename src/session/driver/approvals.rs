//! The driver's part in approvals: what the running cell may do is decided here, and what a person must decide is parked.
//!
//! ```text
//!  a question of the cell ─▶ verdict ─┬─ allow ─▶ goes on
//!                                     ├─ deny ──▶ refused, with the line of the policy
//!                                     └─ ask ───▶ parked ─┬─ decided ─▶ goes on, or refused
//!                                                         ├─ nobody answers in time ─▶ refused
//!                                                         └─ withdrawn, interrupted, over ─▶ gone
//! ```
//!
//! What goes on is the subject itself that was shown, so it cannot have become another one meanwhile. While anything is parked, the cell's clock stands still;
//! so that no code gains time by asking, a cell whose question nobody answered is not asked about again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use cellblock_egress::name::HostName;
use cellblock_egress::resolve::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{debug, info};

use super::shell::CommandWanted;
use super::{Driver, RequestId, Running, Task};
use crate::approval::{Answer, Policy, Subject, Verdict};
use crate::sandbox::Asker;
use crate::session::approvals::{
    AskId, Asking, DecidedBy, Decision, InForce, Ruling, Why, Wording, keep, note, refusal,
};
use crate::session::state::State;
use crate::session::tools::{ToolCall, ToolReason, ToolRefused};

/// Questions of one cell that wait for a person at the same time. A person who is shown more than this reads none of them.
const MOST_PARKED: usize = 100;
/// Bytes of everything that is parked.
const MOST_PARKED_BYTES: usize = 64 * 1024 * 1024;
/// Bytes of a question beside its text.
const SIZE_OF_A_QUESTION: usize = 1024;

/// What is to happen with a subject when it is allowed.
pub(super) enum Wanted {
    Install {
        ask: u64,
        upgrade: bool,
    },
    Call {
        ask: u64,
        size: usize,
    },
    Command(Box<CommandWanted>),
    /// Connections to the same name and port that the gateway holds.
    Connections(Vec<oneshot::Sender<bool>>),
}

impl Wanted {
    /// The number of the question, when the code itself asked.
    fn ask(&self) -> Option<u64> {
        match self {
            Wanted::Install { ask, .. } | Wanted::Call { ask, .. } => Some(*ask),
            Wanted::Command(wanted) => Some(wanted.ask),
            Wanted::Connections(_) => None,
        }
    }

    /// Bytes that are held while it waits, about.
    fn size(&self, subject: &Subject) -> usize {
        let own = match self {
            Wanted::Call { size, .. } => *size,
            Wanted::Command(wanted) => wanted.size(),
            Wanted::Install { .. } | Wanted::Connections(_) => 0,
        };
        SIZE_OF_A_QUESTION + subject.text_bytes() + own
    }
}

/// A connection that the gateway holds.
pub(super) struct ConnectionWanted {
    name: String,
    port: u16,
    reply: oneshot::Sender<bool>,
}

/// What the gateway of a session asks about names.
pub(super) struct NameAsker {
    approvals: InForce,
    wanted: mpsc::Sender<ConnectionWanted>,
}

impl NameAsker {
    pub(super) fn new(approvals: &InForce, wanted: &mpsc::Sender<ConnectionWanted>) -> NameAsker {
        NameAsker {
            approvals: approvals.clone(),
            wanted: wanted.clone(),
        }
    }
}

impl Asker for NameAsker {
    fn may_allow(&self, name: &HostName) -> bool {
        self.approvals.now().policy.may_open(name.as_ref())
    }

    fn ask(&self, name: &HostName, port: u16, _from: SocketAddr) -> BoxFuture<'static, bool> {
        let (wanted, name) = (self.wanted.clone(), name.to_string());
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            // A session that is gone allows nothing.
            wanted
                .send(ConnectionWanted { name, port, reply })
                .await
                .is_ok()
                && answer.await.unwrap_or(false)
        })
    }
}

fn answer_all(replies: Vec<oneshot::Sender<bool>>, allowed: bool) {
    for reply in replies {
        let _ = reply.send(allowed);
    }
}

/// Questions that wait for a person.
#[derive(Default)]
pub(super) struct Parking {
    parked: Vec<Parked>,
    bytes: usize,
    /// What was decided without a person, for the outcome.
    rulings: Vec<Ruling>,
    /// Nobody answered a question of this cell, for so long.
    unanswered: Option<Duration>,
    /// What is left of the cell's time while its clock stands still.
    left: Option<Duration>,
}

struct Parked {
    id: AskId,
    subject: Subject,
    size: usize,
    wording: Wording,
    line: String,
    until: Instant,
    /// How long it waits in all.
    patience: Duration,
    wanted: Wanted,
}

impl Parking {
    /// Tells whether the clock stands still.
    pub(super) fn holds_the_clock(&self) -> bool {
        self.left.is_some()
    }

    /// When the next question has waited long enough.
    pub(super) fn due(&self) -> Option<Instant> {
        self.parked.iter().map(|parked| parked.until).min()
    }

    pub(super) fn knows(&self, ask: u64) -> bool {
        self.parked
            .iter()
            .any(|parked| parked.wanted.ask() == Some(ask))
    }

    /// Ends with the cell. Whoever still holds a connection learns from the silence that it may not.
    pub(super) fn clear(&mut self) -> Vec<Ruling> {
        std::mem::take(self).rulings
    }

    fn take(&mut self, fits: impl Fn(&Parked) -> bool) -> Vec<Parked> {
        let taken = self
            .parked
            .extract_if(.., |parked| fits(parked))
            .collect::<Vec<_>>();
        self.bytes -= taken.iter().map(|parked| parked.size).sum::<usize>();
        taken
    }
}

impl Driver {
    /// Lets a subject go on, refuses it, or parks it until a person has decided.
    pub(super) fn consider(&mut self, subject: Subject, wanted: Wanted) {
        match self.verdict(&subject) {
            Verdict::Allow => self.go_on(subject, wanted),
            Verdict::Deny { line } => {
                note(
                    &mut self.parking.rulings,
                    Ruling::new(&subject, &line, DecidedBy::Policy),
                );
                self.turn_down(subject, wanted, &line, Why::Policy);
            }
            Verdict::Ask { line } => match self.why_not_asked(wanted.size(&subject)) {
                Some(why) => {
                    note(
                        &mut self.parking.rulings,
                        Ruling::new(&subject, &line, DecidedBy::NobodyToAsk),
                    );
                    self.turn_down(subject, wanted, &line, why);
                }
                None => self.park(subject, wanted, line),
            },
        }
    }

    /// Looks at a connection that the gateway holds. Several to the same place are one question.
    pub(super) fn wants_name(&mut self, ConnectionWanted { name, port, reply }: ConnectionWanted) {
        // Whoever has narrowed the network of this session meant it.
        if self.narrowed.is_some() {
            let _ = reply.send(false);
            return;
        }
        let subject = Subject::Domain { name, port };
        let same = self
            .parking
            .parked
            .iter_mut()
            .find(|parked| parked.subject == subject);
        if let Some(Parked {
            wanted: Wanted::Connections(replies),
            ..
        }) = same
        {
            replies.push(reply);
            return;
        }
        self.consider(subject, Wanted::Connections(vec![reply]));
    }

    /// Returns what the operator and the server's registration say, and whether a person has said it before.
    fn verdict(&self, subject: &Subject) -> Verdict {
        let verdict = self.said(subject);
        let Verdict::Ask { .. } = verdict else {
            return verdict;
        };
        let book = self.settings.approvals.now().book;
        let remembered = self.customer.as_ref().is_some_and(|customer| {
            self.shared.facts().granted.covers(subject) || book.covers(&customer.owner.0, subject)
        });
        if remembered { Verdict::Allow } else { verdict }
    }

    /// Returns what the operator and the server's registration say at this moment.
    fn said(&self, subject: &Subject) -> Verdict {
        self.settings
            .approvals
            .now()
            .policy
            .verdict(subject)
            .or_stricter(self.registered(subject))
    }

    /// A registration can only make things stricter.
    fn registered(&self, subject: &Subject) -> Verdict {
        let policy = match (subject, &self.settings.tools.0, &self.customer) {
            (Subject::Tool { server, .. }, Some(broker), Some(customer)) => {
                broker.policy(&customer.owner, server)
            }
            _ => None,
        };
        policy.map_or(Verdict::Allow, |policy: Arc<Policy>| {
            policy.verdict(subject)
        })
    }

    fn why_not_asked(&self, size: usize) -> Option<Why> {
        if self.customer.is_none() {
            return Some(Why::Hidden);
        }
        let Some(Running {
            task: Task::Cell { request, .. },
            ..
        }) = &self.running
        else {
            return Some(Why::NoCell);
        };
        let Parking {
            parked,
            bytes,
            unanswered,
            ..
        } = &self.parking;
        match request.asking {
            Asking::Nobody => Some(Why::NoClient),
            Asking::Exploration => Some(Why::Exploration),
            Asking::Person if self.is_stopping() => Some(Why::Interrupted),
            Asking::Person if unanswered.is_some() => unanswered.map(Why::Silence),
            Asking::Person if parked.len() >= MOST_PARKED || bytes + size > MOST_PARKED_BYTES => {
                Some(Why::TooMany)
            }
            Asking::Person => None,
        }
    }

    fn is_stopping(&self) -> bool {
        matches!(
            self.machine.state(),
            State::Running {
                stopping: Some(_),
                ..
            }
        )
    }

    fn park(&mut self, subject: Subject, wanted: Wanted, line: String) {
        let now = Instant::now();
        let Some(running) = &self.running else { return };
        debug!(
            session = self.id.as_str(),
            kind = subject.kind(),
            "a person is asked"
        );
        self.parking
            .left
            .get_or_insert(running.deadline.saturating_duration_since(now));
        let (size, wording) = (wanted.size(&subject), Wording::new(&subject, &line));
        self.parking.bytes += size;
        let id = AskId(
            self.numbers
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed),
        );
        let patience = self.settings.approvals.now().patience;
        self.parking.parked.push(Parked {
            id,
            subject,
            size,
            wording,
            line,
            until: now + patience,
            patience,
            wanted,
        });
        self.show_questions();
    }

    /// Tells those who follow the cell what waits, and lets the clock run when nothing does.
    fn show_questions(&mut self) {
        let now = Instant::now();
        let (approvals, together) = (self.settings.approvals.now(), self.parking.parked.len());
        let asked = |parked: &Parked| {
            let left = parked.until.saturating_duration_since(now);
            parked.wording.asked(parked.id, together, &approvals, left)
        };
        let all = self.parking.parked.iter().map(asked).collect::<Vec<_>>();
        let is_over = all.is_empty();
        if let Some(Running {
            task: Task::Cell { teller, .. },
            deadline,
            ..
        }) = &mut self.running
        {
            teller.ask(all);
            if is_over && let Some(left) = self.parking.left.take() {
                *deadline = now + left;
            }
        }
    }

    /// Carries out what a person has decided. What is not open any more is left alone.
    pub(super) fn decide(&mut self, request: RequestId, decisions: Vec<Decision>) -> Vec<Ruling> {
        if self
            .running
            .as_ref()
            .is_none_or(|running| running.id != request)
        {
            return Vec::new();
        }
        let mut rulings = Vec::new();
        for Decision { id, answer } in decisions {
            for parked in self.parking.take(|parked| parked.id == id) {
                let Parked {
                    subject,
                    line,
                    wanted,
                    ..
                } = parked;
                // What was asked stays asked, but nobody can allow what the operator has forbidden meanwhile.
                if let Verdict::Deny { line } = self.said(&subject) {
                    rulings.push(Ruling::new(&subject, &line, DecidedBy::Policy));
                    self.turn_down(subject, wanted, &line, Why::Policy);
                    continue;
                }
                info!(
                    session = self.id.as_str(),
                    kind = subject.kind(),
                    answer = answer.name(),
                    "a person has decided"
                );
                rulings.push(Ruling::new(&subject, &line, DecidedBy::Person(answer)));
                if answer == Answer::Deny {
                    self.turn_down(subject, wanted, &line, Why::Person);
                    continue;
                }
                if let Some(customer) = &self.customer {
                    keep(
                        &self.shared,
                        &self.settings.approvals.now(),
                        &customer.owner,
                        &subject,
                        answer,
                    );
                }
                self.go_on(subject, wanted);
            }
        }
        if rulings.iter().any(|ruling| {
            matches!(
                ruling.by,
                DecidedBy::Person(Answer::Session | Answer::Always)
            )
        }) {
            self.let_go_what_is_covered();
        }
        self.show_questions();
        rulings
    }

    /// Lets questions go on that a permission for the session answers as well.
    fn let_go_what_is_covered(&mut self) {
        let granted = self.shared.facts().granted.clone();
        for Parked {
            subject, wanted, ..
        } in self.parking.take(|parked| granted.covers(&parked.subject))
        {
            self.go_on(subject, wanted);
        }
    }

    /// Refuses what has waited long enough.
    pub(super) fn nobody_answered(&mut self) {
        let now = Instant::now();
        let late = self.parking.take(|parked| parked.until <= now);
        for Parked {
            subject,
            line,
            patience,
            wanted,
            ..
        } in late
        {
            self.parking.unanswered = Some(patience);
            note(
                &mut self.parking.rulings,
                Ruling::new(&subject, &line, DecidedBy::NobodyAnswered),
            );
            self.turn_down(subject, wanted, &line, Why::Silence(patience));
        }
        self.show_questions();
    }

    /// Forgets a question that the code has withdrawn. Returns whether there was one.
    pub(super) fn withdraw_parked(&mut self, ask: u64) -> bool {
        let withdrawn = self.parking.take(|parked| parked.wanted.ask() == Some(ask));
        let found = !withdrawn.is_empty();
        for Parked {
            subject,
            line,
            wanted,
            ..
        } in withdrawn
        {
            self.turn_down(subject, wanted, &line, Why::Interrupted);
        }
        if found {
            self.show_questions();
        }
        found
    }

    /// Gives up all questions, because the code is being stopped. Its clock is the grace time from now on.
    pub(super) fn give_up_questions(&mut self) {
        for Parked {
            subject,
            line,
            wanted,
            ..
        } in self.parking.take(|_| true)
        {
            self.turn_down(subject, wanted, &line, Why::Interrupted);
        }
        self.parking.left = None;
        self.show_questions();
    }

    /// Does what was wanted, with the subject that was looked at.
    fn go_on(&mut self, subject: Subject, wanted: Wanted) {
        match (subject, wanted) {
            (Subject::Install { requirements }, Wanted::Install { ask, upgrade }) => {
                self.install_packages(ask, requirements, upgrade);
            }
            (
                Subject::Tool {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                },
                Wanted::Call { ask, size },
            ) => {
                self.line_up_call(
                    ask,
                    ToolCall {
                        server,
                        tool,
                        arguments,
                        fingerprint,
                    },
                    size,
                );
            }
            (_, Wanted::Command(wanted)) => {
                let CommandWanted {
                    ask,
                    command,
                    outlets,
                } = *wanted;
                self.run_command(ask, command, outlets);
            }
            (_, Wanted::Connections(replies)) => answer_all(replies, true),
            // Each kind of wish is made with its own kind of subject, a few lines from where it is considered.
            (_, Wanted::Install { ask, .. } | Wanted::Call { ask, .. }) => {
                self.refuse_question(ask, "the server failed to do this");
            }
        }
    }

    fn turn_down(&mut self, subject: Subject, wanted: Wanted, line: &str, why: Why) {
        let text = refusal(&subject, line, why);
        match (subject, wanted) {
            (
                Subject::Tool {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                },
                Wanted::Call { ask, .. },
            ) => {
                let reason = if why == Why::Interrupted {
                    ToolReason::Cancelled
                } else {
                    ToolReason::Denied
                };
                let call = ToolCall {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                };
                self.refuse_call(ask, &call, &ToolRefused::new(reason, text));
            }
            (_, Wanted::Command(wanted)) => {
                let reason = if why == Why::Interrupted {
                    "cancelled"
                } else {
                    "denied"
                };
                self.refuse_command(wanted.ask, reason, &text);
            }
            (_, Wanted::Connections(replies)) => answer_all(replies, false),
            (_, Wanted::Install { ask, .. } | Wanted::Call { ask, .. }) => {
                self.refuse_question(ask, &text)
            }
        }
    }
}
