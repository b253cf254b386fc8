//! Approvals: decides whether actions of the running cell are allowed, and holds those that a
//! person must decide.
//!
//! ```text
//!  a host call of the cell ─▶ verdict ─┬─ allow ─▶ proceeds
//!                                      ├─ deny ──▶ refused, with the line of the policy
//!                                      └─ ask ───▶ waits ──┬─ decided ─▶ proceeds, or refused
//!                                                          ├─ no answer in time ─▶ refused
//!                                                          └─ withdrawn, interrupted, over ─▶ gone
//! ```
//!
//! The subject that proceeds is the same value that was shown to the person, so it cannot change in
//! between. While an approval is pending, the cell's clock is paused. To keep code from gaining
//! time this way, no further approvals are requested for a cell after one of its requests timed
//! out.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, info};

use super::host_calls::{CallOrigin, HostCalls};
use super::network::ConnectionRequest;
use super::shell::CommandRequest;
use crate::approval::{ApprovalAnswer, Policy, Subject, Verdict};
use crate::session::approvals::{
    ApprovalId, Approver, DecidedBy, Decision, Ruling, Why, Wording, keep, note, refusal,
};
use crate::session::tools::{ToolReason, ToolRefused, UpstreamToolCall};

/// Approval requests of one cell that may be pending at the same time. A person who is shown more
/// than this reads none of them.
const MAX_PENDING: usize = 100;
/// Total bytes of pending approval requests.
const MAX_PENDING_BYTES: usize = 64 * 1024 * 1024;
/// Bytes accounted per request in addition to its text.
const APPROVAL_OVERHEAD: usize = 1024;

/// Action to perform when a subject is allowed.
pub(super) enum PendingAction {
    Install {
        ask: u64,
        upgrade: bool,
    },
    Call {
        ask: u64,
        size: usize,
    },
    Command(Box<CommandRequest>),
    /// Connections to the same name and port, held by the gateway.
    Connections(Vec<oneshot::Sender<bool>>),
}

impl PendingAction {
    /// Returns the number of the host call, if the code itself made one.
    fn ask(&self) -> Option<u64> {
        match self {
            PendingAction::Install { ask, .. } | PendingAction::Call { ask, .. } => Some(*ask),
            PendingAction::Command(wanted) => Some(wanted.ask),
            PendingAction::Connections(_) => None,
        }
    }

    /// Returns the approximate number of bytes held while it is pending.
    fn size(&self, subject: &Subject) -> usize {
        let own = match self {
            PendingAction::Call { size, .. } => *size,
            PendingAction::Command(wanted) => wanted.size(),
            PendingAction::Install { .. } | PendingAction::Connections(_) => 0,
        };
        APPROVAL_OVERHEAD + subject.text_bytes() + own
    }
}

fn answer_all(replies: Vec<oneshot::Sender<bool>>, allowed: bool) {
    for reply in replies {
        let _ = reply.send(allowed);
    }
}

/// Pending approval requests.
#[derive(Default)]
pub(super) struct PendingApprovals {
    list: Vec<PendingApproval>,
    bytes: usize,
    /// Decisions made without a person, for the outcome.
    rulings: Vec<Ruling>,
    /// Set when an approval request of this cell timed out: how long it was pending.
    unanswered: Option<Duration>,
}

struct PendingApproval {
    id: ApprovalId,
    subject: Subject,
    size: usize,
    wording: Wording,
    line: String,
    until: Instant,
    /// Total time that it may be pending.
    timeout: Duration,
    wanted: PendingAction,
}

impl PendingApprovals {
    /// Returns the deadline of the next pending request.
    pub(super) fn due(&self) -> Option<Instant> {
        self.list.iter().map(|pending| pending.until).min()
    }

    pub(super) fn knows(&self, ask: u64) -> bool {
        self.list
            .iter()
            .any(|pending| pending.wanted.ask() == Some(ask))
    }

    /// Discards everything when the cell ends. Connections still held by the gateway are refused
    /// when their channel is dropped.
    pub(super) fn clear(&mut self) -> Vec<Ruling> {
        std::mem::take(self).rulings
    }

    fn take(&mut self, fits: impl Fn(&PendingApproval) -> bool) -> Vec<PendingApproval> {
        let taken = self
            .list
            .extract_if(.., |pending| fits(pending))
            .collect::<Vec<_>>();
        self.bytes -= taken.iter().map(|pending| pending.size).sum::<usize>();
        taken
    }
}

impl HostCalls {
    /// Allows a subject, refuses it, or holds it until a person has decided.
    pub(super) fn consider(
        &mut self,
        subject: Subject,
        wanted: PendingAction,
        caller: &mut CallOrigin<'_>,
    ) {
        match self.verdict(&subject) {
            Verdict::Allow => self.proceed(subject, wanted, caller),
            Verdict::Deny { line } => {
                note(
                    &mut self.pending.rulings,
                    Ruling::new(&subject, &line, DecidedBy::Policy),
                );
                self.refuse(subject, wanted, &line, Why::Policy);
            }
            Verdict::Ask { line } => match self.why_not_asked(wanted.size(&subject), caller) {
                Some(why) => {
                    note(
                        &mut self.pending.rulings,
                        Ruling::new(&subject, &line, DecidedBy::NobodyToAsk),
                    );
                    self.refuse(subject, wanted, &line, why);
                }
                None => self.ask_person(subject, wanted, line, caller),
            },
        }
    }

    /// Handles a connection held by the gateway. Connections to the same destination share one
    /// approval request.
    pub(super) fn wants_name(&mut self, wanted: ConnectionRequest, caller: &mut CallOrigin<'_>) {
        let ConnectionRequest { name, port, reply } = wanted;
        let subject = Subject::Domain { name, port };
        let same = self
            .pending
            .list
            .iter_mut()
            .find(|pending| pending.subject == subject);
        if let Some(PendingApproval {
            wanted: PendingAction::Connections(replies),
            ..
        }) = same
        {
            replies.push(reply);
            return;
        }
        self.consider(subject, PendingAction::Connections(vec![reply]), caller);
    }

    /// Returns the verdict of the operator's policy and the server's registration, taking earlier
    /// decisions of a person into account.
    fn verdict(&self, subject: &Subject) -> Verdict {
        let verdict = self.said(subject);
        let Verdict::Ask { .. } = verdict else {
            return verdict;
        };
        let store = self.approvals.now().store;
        let remembered = self.owner.as_ref().is_some_and(|owner| {
            self.shared.facts().granted.covers(subject) || store.covers(&owner.0, subject)
        });
        if remembered { Verdict::Allow } else { verdict }
    }

    /// Returns the current verdict of the operator's policy and the server's registration.
    fn said(&self, subject: &Subject) -> Verdict {
        self.approvals
            .now()
            .policy
            .verdict(subject)
            .or_stricter(self.registered(subject))
    }

    /// Returns the verdict of the registration, which can only be stricter than the policy.
    fn registered(&self, subject: &Subject) -> Verdict {
        let policy = match (subject, &self.tools.0, &self.owner) {
            (Subject::Tool { server, .. }, Some(broker), Some(owner)) => {
                broker.policy(owner, server)
            }
            _ => None,
        };
        policy.map_or(Verdict::Allow, |policy: Arc<Policy>| {
            policy.verdict(subject)
        })
    }

    fn why_not_asked(&self, size: usize, caller: &CallOrigin<'_>) -> Option<Why> {
        if self.owner.is_none() {
            return Some(Why::Hidden);
        }
        let Some(cell) = caller.cell() else {
            return Some(Why::NoCell);
        };
        let PendingApprovals {
            list,
            bytes,
            unanswered,
            ..
        } = &self.pending;
        match cell.request.asking {
            Approver::Nobody => Some(Why::NoClient),
            Approver::Exploration => Some(Why::Exploration),
            Approver::Person if caller.is_stopping => Some(Why::Interrupted),
            Approver::Person if unanswered.is_some() => unanswered.map(Why::TimedOut),
            Approver::Person if list.len() >= MAX_PENDING || bytes + size > MAX_PENDING_BYTES => {
                Some(Why::TooMany)
            }
            Approver::Person => None,
        }
    }

    fn ask_person(
        &mut self,
        subject: Subject,
        wanted: PendingAction,
        line: String,
        caller: &mut CallOrigin<'_>,
    ) {
        let now = Instant::now();
        let Some(running) = &mut caller.running else {
            return;
        };
        debug!(
            session = self.id.as_str(),
            kind = subject.kind(),
            "a person is asked"
        );
        running.pause(now);
        let (size, wording) = (wanted.size(&subject), Wording::new(&subject, &line));
        self.pending.bytes += size;
        let id = ApprovalId(
            self.numbers
                .fetch_add(1, std::sync::atomic::Ordering::Relaxed),
        );
        let timeout = self.approvals.now().timeout;
        self.pending.list.push(PendingApproval {
            id,
            subject,
            size,
            wording,
            line,
            until: now + timeout,
            timeout,
            wanted,
        });
        self.show(caller);
    }

    /// Publishes pending requests to the followers of the cell, and resumes the clock when none is
    /// left.
    fn show(&mut self, caller: &mut CallOrigin<'_>) {
        let now = Instant::now();
        let (approvals, together) = (self.approvals.now(), self.pending.list.len());
        let asked = |pending: &PendingApproval| {
            let left = pending.until.saturating_duration_since(now);
            pending
                .wording
                .asked(pending.id, together, &approvals, left)
        };
        let all = self.pending.list.iter().map(asked).collect::<Vec<_>>();
        let Some(running) = &mut caller.running else {
            return;
        };
        if all.is_empty() {
            running.resume(now);
        }
        if let Some(cell) = running.cell() {
            cell.reporter.ask(all);
        }
    }

    /// Applies the decisions of a person. Requests that are no longer pending are ignored.
    pub(super) fn decide(
        &mut self,
        decisions: Vec<Decision>,
        caller: &mut CallOrigin<'_>,
    ) -> Vec<Ruling> {
        let mut rulings = Vec::new();
        for Decision { id, answer } in decisions {
            for pending in self.pending.take(|pending| pending.id == id) {
                let PendingApproval {
                    subject,
                    line,
                    wanted,
                    ..
                } = pending;
                // The policy may have changed since the request was made. A person cannot allow an
                // action that the operator now forbids.
                if let Verdict::Deny { line } = self.said(&subject) {
                    rulings.push(Ruling::new(&subject, &line, DecidedBy::Policy));
                    self.refuse(subject, wanted, &line, Why::Policy);
                    continue;
                }
                info!(
                    session = self.id.as_str(),
                    kind = subject.kind(),
                    answer = answer.name(),
                    "a person has decided"
                );
                rulings.push(Ruling::new(&subject, &line, DecidedBy::Person(answer)));
                if answer == ApprovalAnswer::Deny {
                    self.refuse(subject, wanted, &line, Why::Person);
                    continue;
                }
                if let Some(owner) = &self.owner {
                    let approvals = self.approvals.now();
                    keep(&self.shared, &approvals, owner, &subject, answer);
                }
                self.proceed(subject, wanted, caller);
            }
        }
        if rulings.iter().any(|ruling| {
            matches!(
                ruling.by,
                DecidedBy::Person(ApprovalAnswer::Session | ApprovalAnswer::Always)
            )
        }) {
            self.proceed_with_covered(caller);
        }
        self.show(caller);
        rulings
    }

    /// Allows other pending requests that a session-wide permission also covers.
    fn proceed_with_covered(&mut self, caller: &mut CallOrigin<'_>) {
        let granted = self.shared.facts().granted.clone();
        for PendingApproval {
            subject, wanted, ..
        } in self
            .pending
            .take(|pending| granted.covers(&pending.subject))
        {
            self.proceed(subject, wanted, caller);
        }
    }

    /// Refuses requests that have reached their deadline.
    pub(super) fn expire(&mut self, caller: &mut CallOrigin<'_>) {
        let now = Instant::now();
        let late = self.pending.take(|pending| pending.until <= now);
        for PendingApproval {
            subject,
            line,
            timeout,
            wanted,
            ..
        } in late
        {
            self.pending.unanswered = Some(timeout);
            note(
                &mut self.pending.rulings,
                Ruling::new(&subject, &line, DecidedBy::NobodyAnswered),
            );
            self.refuse(subject, wanted, &line, Why::TimedOut(timeout));
        }
        self.show(caller);
    }

    /// Discards a request that the code has withdrawn. Returns whether there was one.
    pub(super) fn withdraw_pending(&mut self, ask: u64, caller: &mut CallOrigin<'_>) -> bool {
        let withdrawn = self
            .pending
            .take(|pending| pending.wanted.ask() == Some(ask));
        let found = !withdrawn.is_empty();
        for PendingApproval {
            subject,
            line,
            wanted,
            ..
        } in withdrawn
        {
            self.refuse(subject, wanted, &line, Why::Interrupted);
        }
        if found {
            self.show(caller);
        }
        found
    }

    /// Discards all requests, because the code is being stopped. From now on its clock is the grace
    /// period.
    pub(super) fn give_up(&mut self, caller: &mut CallOrigin<'_>) {
        for PendingApproval {
            subject,
            line,
            wanted,
            ..
        } in self.pending.take(|_| true)
        {
            self.refuse(subject, wanted, &line, Why::Interrupted);
        }
        self.show(caller);
    }

    /// Performs the action with the subject that was approved.
    fn proceed(&mut self, subject: Subject, wanted: PendingAction, caller: &CallOrigin<'_>) {
        match (subject, wanted) {
            (Subject::Install { requirements }, PendingAction::Install { ask, upgrade }) => {
                self.install_packages(ask, requirements, upgrade);
            }
            (
                Subject::Tool {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                },
                PendingAction::Call { ask, size },
            ) => {
                self.enqueue_call(
                    ask,
                    UpstreamToolCall {
                        server,
                        tool,
                        arguments,
                        fingerprint,
                    },
                    size,
                    caller,
                );
            }
            (_, PendingAction::Command(wanted)) => {
                let CommandRequest {
                    ask,
                    command,
                    outlets,
                } = *wanted;
                self.run_command(ask, command, outlets, caller);
            }
            (_, PendingAction::Connections(replies)) => answer_all(replies, true),
            // Each kind of action is created with its own kind of subject, a few lines from where
            // it is considered.
            (_, PendingAction::Install { ask, .. } | PendingAction::Call { ask, .. }) => {
                self.refuse_host_call(ask, "the server failed to do this");
            }
        }
    }

    fn refuse(&mut self, subject: Subject, wanted: PendingAction, line: &str, why: Why) {
        let text = refusal(&subject, line, why);
        match (subject, wanted) {
            (
                Subject::Tool {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                },
                PendingAction::Call { ask, .. },
            ) => {
                let reason = if why == Why::Interrupted {
                    ToolReason::Cancelled
                } else {
                    ToolReason::Denied
                };
                let call = UpstreamToolCall {
                    server,
                    tool,
                    arguments,
                    fingerprint,
                };
                self.refuse_call(ask, &call, ToolRefused::new(reason, text));
            }
            (_, PendingAction::Command(wanted)) => {
                let reason = if why == Why::Interrupted {
                    "cancelled"
                } else {
                    "denied"
                };
                self.refuse_command(wanted.ask, reason, &text);
            }
            (_, PendingAction::Connections(replies)) => answer_all(replies, false),
            (_, PendingAction::Install { ask, .. } | PendingAction::Call { ask, .. }) => {
                self.refuse_host_call(ask, &text)
            }
        }
    }
}
