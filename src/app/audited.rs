//! Audited sessions: every call is recorded in the audit log and in metrics.
//!
//! This layer is between the frontend and the sessions, so every tool, route and task passes
//! through it. When the audit log cannot be written and the operator has not allowed to continue
//! without it, new work is rejected.
//!
//! Calls are recorded when they are answered, executions when they end. The process that holds the
//! sessions reports the end of each execution, whether or not its result is ever collected, and
//! reports it again if a server died before it had recorded one.
//!
//! Records hold digests of code and contents, never the data itself.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use crate::audit::{
    Answer, Approval, Audit, CallOutcome, Digest, Event, Execution, FileDirection, FileMoved, Kind,
    Packages, QuotaRefused, SessionCreated, SessionEnded, ToolCall, UpstreamCall,
};
use crate::ops::{Host, Io, Op, OpSubject, Reply, Ticket};
use crate::sandbox::Preparation;
use crate::session::tools::{CallEnd, NotedCall, ToolReason};
use crate::session::{
    DecideReport, DecidedBy, ExecutionEnded, ExecutionRef, ExecutionReport, InsidePath, Principal,
    RecordEnding, Refused, Ruling, SessionId, Status, Uploaded,
};
use crate::telemetry::{self, Metrics};

/// Number of recorded execution ids that are remembered. Only those whose confirmation was lost are
/// reported again: the last few.
const RECENT_EXECUTIONS: usize = 1_000;
/// Number of sessions remembered as recorded. Sessions beyond it count as new again.
const MAX_SEEN: usize = 10_000;

/// Sessions with an audit log. Cheap to clone.
#[derive(Clone)]
pub(super) struct AuditedSessions {
    sessions: Arc<dyn Host>,
    recorder: AuditRecorder,
}

/// Writes records. Cheap to clone.
#[derive(Clone)]
pub(super) struct AuditRecorder {
    audit: Audit,
    metrics: Metrics,
    recorded_ids: Arc<Mutex<RecordedIds>>,
}

impl std::ops::Deref for AuditedSessions {
    type Target = AuditRecorder;

    fn deref(&self) -> &AuditRecorder {
        &self.recorder
    }
}

type Key = (Principal, SessionId);

#[derive(Default)]
struct RecordedIds {
    sessions: HashSet<Key>,
    /// Ids of recorded executions, the newest last. An execution that is reported again is not
    /// recorded again.
    executions: VecDeque<String>,
}

impl AuditedSessions {
    pub(super) fn new(sessions: Arc<dyn Host>, audit: Audit, metrics: Metrics) -> AuditedSessions {
        let executions = audit.recent_executions().into();
        let recorded_ids = Arc::new(Mutex::new(RecordedIds {
            executions,
            ..RecordedIds::default()
        }));
        let recorder = AuditRecorder {
            audit,
            metrics,
            recorded_ids,
        };
        let (audit, metrics, recorded_ids) = (
            recorder.audit.downgrade(),
            recorder.metrics.clone(),
            Arc::clone(&recorder.recorded_ids),
        );
        // The sessions may outlive this value briefly, and must not keep the log from being closed.
        let record = move |ended: &ExecutionEnded| {
            if let Some(audit) = audit.upgrade() {
                AuditRecorder {
                    audit,
                    metrics: metrics.clone(),
                    recorded_ids: Arc::clone(&recorded_ids),
                }
                .executed(ended);
            }
        };
        sessions.record_endings(recorder.audit.is_on(), Arc::new(record));
        AuditedSessions { sessions, recorder }
    }
}

impl AuditRecorder {
    fn recorded_ids(&self) -> MutexGuard<'_, RecordedIds> {
        self.recorded_ids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Rejects new work while nothing can be recorded.
    fn may_begin(&self) -> Result<(), Refused> {
        match self.audit.refuses() {
            None => Ok(()),
            Some(_) => Err(Refused::NotRecorded),
        }
    }

    fn event(
        &self,
        owner: &Principal,
        session: Option<&SessionId>,
        kind: impl Into<Kind>,
    ) -> Event {
        let event = Event::new(kind).by(owner.0.as_str());
        match session {
            Some(session) => event.in_session(session.as_str()),
            None => event,
        }
    }

    fn call_ended(
        &self,
        owner: &Principal,
        session: Option<&SessionId>,
        tool: &'static str,
        begun: Instant,
        outcome: CallOutcome,
    ) {
        let elapsed = begun.elapsed();
        self.metrics.tool_called(tool, outcome.name(), elapsed);
        self.audit.note(self.event(
            owner,
            session,
            ToolCall {
                tool: tool.into(),
                outcome,
                elapsed,
            },
        ));
    }

    /// Records the parts of a refusal that concern a session or its owner.
    fn refused(&self, owner: &Principal, session: Option<&SessionId>, refused: &Refused) {
        match refused {
            Refused::Ended { id, why, .. } => self.ended(owner, id, why),
            Refused::Quota {
                which, retry_after, ..
            } => {
                self.metrics.quota_refused(which.name());
                let details = QuotaRefused {
                    quota: which.name().into(),
                    retry_after: *retry_after,
                };
                self.audit
                    .note(self.event(owner, session, details).denied(which.name()));
            }
            _ => {}
        }
    }

    /// Records a session when it is first seen.
    fn met(&self, owner: &Principal, id: &SessionId, copy_of: Option<&SessionId>) {
        {
            let mut recorded_ids = self.recorded_ids();
            if recorded_ids.sessions.len() >= MAX_SEEN {
                recorded_ids.sessions.clear();
            }
            if !recorded_ids.sessions.insert((owner.clone(), id.clone())) {
                return;
            }
        }
        self.metrics.session_created();
        let details = SessionCreated {
            copy_of: copy_of.map(|id| id.as_str().into()),
        };
        self.audit.note(self.event(owner, Some(id), details));
    }

    fn ended(&self, owner: &Principal, id: &SessionId, why: &str) {
        let key = (owner.clone(), id.clone());
        {
            if !self.recorded_ids().sessions.remove(&key) {
                return;
            }
        }
        self.metrics.session_ended("ended");
        self.audit
            .note(self.event(owner, Some(id), SessionEnded { reason: why.into() }));
    }

    /// Records the end of an execution, once.
    fn executed(&self, ended: &ExecutionEnded) {
        {
            let mut recorded_ids = self.recorded_ids();
            if recorded_ids.executions.contains(&ended.name) {
                return;
            }
            recorded_ids.executions.push_back(ended.name.clone());
            if recorded_ids.executions.len() > RECENT_EXECUTIONS {
                recorded_ids.executions.pop_front();
            }
        }
        let (owner, id) = (&ended.owner, &ended.session);
        if !ended.taken_over {
            self.met(owner, id, None);
        }
        self.metrics.executed(ended.status.name(), ended.duration);
        let details = Execution {
            execution: ended.name.as_str().into(),
            code: Digest::from_hash(&ended.code),
            status: ended.status.name().into(),
            elapsed: ended.duration,
            cpu: Some(ended.processor_time),
            memory_peak: Some(ended.memory_peak),
            blocked: ended.blocked.iter().map(ToString::to_string).collect(),
            tool_calls: ended.tool_calls.total,
        };
        self.audit.note(self.event(owner, Some(id), details));
        ended
            .rulings
            .iter()
            .for_each(|ruling| self.ruled(owner, id, ruling, None));
        for call in &ended.tool_calls.noted {
            self.called(owner, id, call);
        }
    }

    /// Records the decision on a request of code or of a caller.
    fn ruled(&self, owner: &Principal, id: &SessionId, ruling: &Ruling, how: Option<&str>) {
        let answer = match ruling.by {
            DecidedBy::NobodyAnswered => Answer::Expired,
            by if by.is_allowed() => Answer::Granted,
            _ => Answer::Refused,
        };
        self.metrics.approved(answer.name());
        let details = Approval {
            subject: ruling.kind.as_str().into(),
            digest: ruling.digest.as_str().into(),
            rule: ruling.line.as_str().into(),
            answer,
            reach: ruling.by.word().into(),
            asked_by: how.map(Into::into),
        };
        let event = self.event(owner, Some(id), details);
        self.audit.note(if ruling.by.is_allowed() {
            event
        } else {
            event.denied(ruling.line.as_str())
        });
    }

    /// Records a call from code to a tool of another MCP server.
    fn called(&self, owner: &Principal, id: &SessionId, call: &NotedCall) {
        let outcome = match call.ended {
            CallEnd::Answered => CallOutcome::Succeeded,
            CallEnd::Refused(ToolReason::Cancelled) => CallOutcome::Cancelled,
            CallEnd::Refused(
                ToolReason::Denied | ToolReason::Unknown | ToolReason::Invalid | ToolReason::Budget,
            ) => CallOutcome::Refused,
            CallEnd::ToolError | CallEnd::Refused(_) => CallOutcome::Failed,
        };
        let details = UpstreamCall {
            server: call.server.as_str().into(),
            tool: call.tool.as_str().into(),
            arguments: Digest::from_hash(&call.arguments),
            outcome,
            elapsed: call.duration,
        };
        let event = self.event(owner, Some(id), details);
        self.audit.note(if outcome == CallOutcome::Refused {
            event.denied(call.ended.word())
        } else {
            event
        });
    }
}

/// The parts of an operation that its record needs after the operation was consumed.
struct CallRecord {
    /// The name of the call in the audit log. Operations without one are not recorded as calls.
    tool: Option<&'static str>,
    session: Option<SessionId>,
    path: Option<InsidePath>,
    /// What is to be installed.
    requirements: Option<Vec<String>>,
    asked_by: Option<String>,
    begun: Instant,
}

impl CallRecord {
    fn of(op: &Op) -> CallRecord {
        let mut call = CallRecord {
            tool: tool_name(op),
            session: match op.subject() {
                OpSubject::Session(id) | OpSubject::Execution(ExecutionRef::InSession(id)) => {
                    Some(id.clone())
                }
                OpSubject::Execution(ExecutionRef::Handle(_))
                | OpSubject::Handle(_)
                | OpSubject::Other => None,
            },
            path: None,
            requirements: None,
            asked_by: None,
            begun: Instant::now(),
        };
        match op {
            Op::WriteFile(op) => call.path = Some(op.path.clone()),
            Op::ReadFile(op) => call.path = Some(op.path.clone()),
            Op::ReadFileRange(op) => call.path = Some(op.path.clone()),
            Op::Upload(op) => call.path = Some(op.path.clone()),
            Op::Install(op) => call.requirements = Some(op.requirements.clone()),
            Op::Decide(op) => call.asked_by = Some(op.asked_by.clone()),
            _ => {}
        }
        call
    }
}

/// The name under which calls of an operation are recorded.
fn tool_name(op: &Op) -> Option<&'static str> {
    Some(match op {
        Op::Execute(_) => "execute_ipython_cell",
        Op::Interrupt(_) => "interrupt",
        Op::Reset(_) => "reset",
        Op::Undo(_) => "undo",
        Op::Fork(_) => "fork_session",
        Op::Explore(_) => "explore",
        Op::Install(_) => "install_package",
        Op::RegisterServer(_) => "register_mcp_server",
        Op::UnregisterServer(_) => "unregister_mcp_server",
        Op::WriteFile(_) | Op::Upload(_) => "upload_file",
        Op::ReadFile(_) => "download_file",
        Op::CloseSession(_) => "close_session",
        _ => return None,
    })
}

/// Returns whether an operation must not start while nothing can be recorded. Ending, undoing and
/// reading are always possible.
fn begins_work(op: &Op) -> bool {
    matches!(
        op,
        Op::Execute(_)
            // A grant starts new work.
            | Op::Decide(_)
            | Op::Fork(_)
            | Op::Explore(_)
            | Op::Install(_)
            | Op::RegisterServer(_)
            | Op::UnregisterServer(_)
            | Op::WriteFile(_)
            | Op::ReadFile(_)
            | Op::ReadFileRange(_)
            | Op::Upload(_)
    )
}

impl Host for AuditedSessions {
    fn submit<'a>(&self, owner: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        if begins_work(&op) {
            self.may_begin()?;
        }
        let call = CallRecord::of(&op);
        let ticket = match self.sessions.submit(owner, op, io) {
            Ok(ticket) => ticket,
            Err(refused) => {
                self.answered(owner, &call, &Err(refused.clone()));
                return Err(refused);
            }
        };
        let (recorder, owner) = (self.recorder.clone(), owner.clone());
        Ok(Ticket::new(async move {
            let done = ticket.await;
            recorder.answered(&owner, &call, &done);
            done
        }))
    }

    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.sessions.preparation()
    }

    fn record_endings(&self, takes_over: bool, record: RecordEnding) {
        self.sessions.record_endings(takes_over, record);
    }
}

impl AuditRecorder {
    /// Records an answered call, and the effects in its reply on sessions, files, packages and
    /// approvals.
    fn answered(&self, owner: &Principal, call: &CallRecord, done: &Result<Reply, Refused>) {
        let session = call.session.as_ref();
        match (done, session) {
            (Ok(reply), Some(id)) => self.replied(owner, id, call, reply),
            (Ok(Reply::Decide(DecideReport { session, rulings })), None) => {
                let asked_by = call.asked_by.as_deref();
                rulings
                    .iter()
                    .for_each(|ruling| self.ruled(owner, session, ruling, asked_by));
            }
            // Only an approval was requested.
            (Err(Refused::ApprovalNeeded { .. }), _) => return,
            (Err(refused), Some(id)) => {
                if let Refused::NotApproved { ruling, .. } = refused {
                    let by_person = matches!(ruling.by, DecidedBy::Person(_));
                    self.ruled(owner, id, ruling, by_person.then_some("install_package"));
                }
                if let Some(requirements) = &call.requirements {
                    self.installed(owner, id, requirements, None);
                }
            }
            _ => {}
        }
        let outcome = match done {
            Ok(Reply::Execute(ExecutionReport::Finished { outcome, .. })) => match outcome.status {
                Status::Completed => CallOutcome::Succeeded,
                Status::Cancelled { .. } => CallOutcome::Cancelled,
                _ => CallOutcome::Failed,
            },
            Ok(Reply::Execute(ExecutionReport::Underway(_))) => CallOutcome::Underway,
            Ok(_) => CallOutcome::Succeeded,
            Err(Refused::CancelledWhileWaiting) => CallOutcome::Cancelled,
            // It is unknown whether the operation was executed.
            Err(Refused::Unresponsive { sent: true }) => CallOutcome::Failed,
            Err(_) => CallOutcome::Refused,
        };
        if let Some(tool) = call.tool {
            self.call_ended(owner, session, tool, call.begun, outcome);
        }
        if let Err(refused) = done {
            self.refused(owner, session, refused);
        }
    }

    /// Records the reply of an operation on a session.
    fn replied(&self, owner: &Principal, id: &SessionId, call: &CallRecord, reply: &Reply) {
        let moved = |direction, bytes| {
            if let Some(path) = &call.path {
                self.moved(owner, id, path, direction, bytes);
            }
        };
        match reply {
            Reply::Execute(_) => self.met(owner, id, None),
            Reply::Fork(report) => {
                let forks = report.forks.iter();
                forks.for_each(|fork| self.met(owner, fork, Some(id)));
            }
            Reply::Explore(report) => {
                let kept = report.kept.iter();
                kept.for_each(|(_, kept)| self.met(owner, kept, Some(id)));
            }
            Reply::Install(report) => {
                if let Some(ruling) = &report.ruling {
                    self.ruled(owner, id, ruling, Some("install_package"));
                }
                self.met(owner, id, None);
                let requirements = call.requirements.as_deref().unwrap_or_default();
                self.installed(owner, id, requirements, Some(&report.text));
            }
            Reply::WriteFile(bytes) => {
                self.met(owner, id, None);
                moved(FileDirection::Into, *bytes);
            }
            Reply::Upload(Uploaded {
                size,
                finished: true,
            }) => {
                self.met(owner, id, None);
                moved(FileDirection::Into, *size);
            }
            Reply::ReadFile(bytes) => moved(FileDirection::OutOf, *bytes),
            // A query of the size alone transfers nothing.
            Reply::ReadFileRange(range) if range.sent > 0 => {
                moved(FileDirection::OutOf, range.sent)
            }
            Reply::CloseSession(()) => self.ended(owner, id, "it was closed"),
            _ => {}
        }
    }

    /// Records an installation: the request, and the installer's result if it succeeded.
    fn installed(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: &[String],
        report: Option<&str>,
    ) {
        let details = Packages {
            requirements: requirements.iter().cloned().collect(),
            installed: report
                .unwrap_or_default()
                .lines()
                .map(str::to_owned)
                .collect(),
            outcome: match report {
                Some(_) => CallOutcome::Succeeded,
                None => CallOutcome::Failed,
            },
        };
        self.audit.note(self.event(owner, Some(id), details));
    }

    fn moved(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        direction: FileDirection,
        bytes: u64,
    ) {
        self.metrics.file_moved(
            match direction {
                FileDirection::Into => telemetry::Direction::Into,
                FileDirection::OutOf => telemetry::Direction::OutOf,
            },
            bytes,
        );
        let details = FileMoved {
            path: path.as_str().into(),
            direction,
            bytes,
            contents: None,
        };
        self.audit.note(self.event(owner, Some(id), details));
    }
}
