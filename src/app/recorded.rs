//! Sessions whose every call is recorded: for the audit log, and in figures.
//!
//! It stands between the front and the sessions, so that nothing reaches a session by another way, whichever tool, route or task asked for
//! it. When the audit log cannot be written and the operator has not allowed to go on without, no new work is begun.
//!
//! Calls are recorded when they are answered, executions when they end: the process that holds the
//! sessions reports each end, whether or not its result is ever collected, and again if a server
//! died before it had recorded one.
//!
//! Records hold digests of code and contents, never the things themselves.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::audit::{
    Answer, Approval, Audit, Digest, Direction, Event, Execution, FileMoved, Kind, Outcome,
    Packages, QuotaRefused, SessionCreated, SessionEnded, ToolCall, UpstreamCall,
};
use crate::sandbox::Preparation;
use crate::session::install::{InstallReport, Leave};
use crate::session::servers::{ServerReport, ServerRequest, ServerSetup};
use crate::session::tools::{CallEnd, NotedCall, ToolReason};
use crate::session::{
    ApprovalSetup, Checked, CheckpointInfo, Decided, DecidedBy, Decision, ExecuteRequest, Executed,
    ExecutionEnded, ExecutionHandle, ExecutionId, ExploreReport, ExploreRequest, FileList,
    FileRange, ForkReport, ForkRequest, InsidePath, LimitSetup, Load, News, Principal,
    RecordEnding, Refused, ResetReport, Ruling, SessionAccess, SessionId, SessionInfo, Slice,
    Status, UndoReport, UploadPart, Uploaded, Which, Word,
};
use crate::telemetry::{self, Metrics};

/// Executions whose names are remembered as recorded. Only those whose confirmation was lost are
/// reported again: the last few.
const RECENT_EXECUTIONS: usize = 1_000;
/// Sessions that are remembered as having been seen. Those beyond are seen again for the first time.
const MOST_SEEN: usize = 10_000;

/// Sessions, recorded. Cheap to clone.
#[derive(Clone)]
pub(super) struct Recorded {
    sessions: Arc<dyn SessionAccess>,
    recorder: Recorder,
}

/// Writes records. Cheap to clone.
#[derive(Clone)]
pub(super) struct Recorder {
    audit: Audit,
    metrics: Metrics,
    seen: Arc<Mutex<Seen>>,
}

impl std::ops::Deref for Recorded {
    type Target = Recorder;

    fn deref(&self) -> &Recorder {
        &self.recorder
    }
}

type Key = (Principal, SessionId);

#[derive(Default)]
struct Seen {
    sessions: HashSet<Key>,
    /// Names of executions that were recorded, the newest last. One that is reported again is not
    /// recorded again.
    executions: VecDeque<String>,
}

impl Recorded {
    pub(super) fn new(
        sessions: Arc<dyn SessionAccess>,
        audit: Audit,
        metrics: Metrics,
    ) -> Recorded {
        let executions = audit.recent_executions().into();
        let seen = Arc::new(Mutex::new(Seen {
            executions,
            ..Seen::default()
        }));
        let recorder = Recorder {
            audit,
            metrics,
            seen,
        };
        let (audit, metrics, seen) = (
            recorder.audit.downgrade(),
            recorder.metrics.clone(),
            Arc::clone(&recorder.seen),
        );
        // The sessions may outlive this value by a moment, and must not keep the log from being
        // closed.
        let record = move |ended: &ExecutionEnded| {
            if let Some(audit) = audit.upgrade() {
                Recorder {
                    audit,
                    metrics: metrics.clone(),
                    seen: Arc::clone(&seen),
                }
                .executed(ended);
            }
        };
        sessions.record_endings(recorder.audit.is_on(), Arc::new(record));
        Recorded { sessions, recorder }
    }
}

impl Recorder {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses new work while nothing can be recorded.
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

    /// Records a call and how it ended.
    fn call<T>(
        &self,
        owner: &Principal,
        session: Option<&SessionId>,
        tool: &'static str,
        begun: Instant,
        done: &Result<T, Refused>,
    ) {
        let outcome = match done {
            Ok(_) => Outcome::Succeeded,
            Err(Refused::CancelledWhileWaiting) => Outcome::Cancelled,
            // Nobody can say whether it was carried out.
            Err(Refused::Unresponsive { sent: true }) => Outcome::Failed,
            Err(_) => Outcome::Refused,
        };
        self.call_ended(owner, session, tool, begun, outcome);
        if let Err(refused) = done {
            self.refused(owner, session, refused);
        }
    }

    fn call_ended(
        &self,
        owner: &Principal,
        session: Option<&SessionId>,
        tool: &'static str,
        begun: Instant,
        outcome: Outcome,
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

    /// Records what a refusal says about a session or about its owner.
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

    /// Records a session that is seen for the first time.
    fn met(&self, owner: &Principal, id: &SessionId, copy_of: Option<&SessionId>) {
        {
            let mut seen = self.seen();
            if seen.sessions.len() >= MOST_SEEN {
                seen.sessions.clear();
            }
            if !seen.sessions.insert((owner.clone(), id.clone())) {
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
            if !self.seen().sessions.remove(&key) {
                return;
            }
        }
        self.metrics.session_ended("ended");
        self.audit
            .note(self.event(owner, Some(id), SessionEnded { reason: why.into() }));
    }

    /// Records an execution that has ended, once.
    fn executed(&self, ended: &ExecutionEnded) {
        {
            let mut seen = self.seen();
            if seen.executions.contains(&ended.name) {
                return;
            }
            seen.executions.push_back(ended.name.clone());
            if seen.executions.len() > RECENT_EXECUTIONS {
                seen.executions.pop_front();
            }
        }
        let (owner, id) = (&ended.owner, &ended.session);
        if !ended.taken_over {
            self.met(owner, id, None);
        }
        self.metrics.executed(ended.status, ended.duration);
        let details = Execution {
            execution: ended.name.as_str().into(),
            code: Digest::from_hash(&ended.code),
            status: ended.status.into(),
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

    /// Records what was decided about something that code or a caller wanted.
    fn ruled(&self, owner: &Principal, id: &SessionId, ruling: &Ruling, how: Option<Word>) {
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

    /// Records that code called a tool of another MCP server.
    fn called(&self, owner: &Principal, id: &SessionId, call: &NotedCall) {
        let outcome = match call.ended {
            CallEnd::Answered => Outcome::Succeeded,
            CallEnd::Refused(ToolReason::Cancelled) => Outcome::Cancelled,
            CallEnd::Refused(
                ToolReason::Denied | ToolReason::Unknown | ToolReason::Invalid | ToolReason::Budget,
            ) => Outcome::Refused,
            CallEnd::ToolError | CallEnd::Refused(_) => Outcome::Failed,
        };
        let details = UpstreamCall {
            server: call.server.as_str().into(),
            tool: call.tool.as_str().into(),
            arguments: Digest::from_hash(&call.arguments),
            outcome,
            elapsed: call.duration,
        };
        let event = self.event(owner, Some(id), details);
        self.audit.note(if outcome == Outcome::Refused {
            event.denied(call.ended.word())
        } else {
            event
        });
    }
}

/// Tells how a call that ran code ended.
fn outcome_of(status: &Status) -> Outcome {
    match status {
        Status::Completed => Outcome::Succeeded,
        Status::Cancelled { .. } => Outcome::Cancelled,
        _ => Outcome::Failed,
    }
}

#[async_trait]
impl SessionAccess for Recorded {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.sessions.preparation()
    }

    async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        cancel: CancellationToken,
        news: News,
    ) -> Result<Executed, Refused> {
        const TOOL: &str = "execute_ipython_cell";
        self.may_begin()?;
        let begun = Instant::now();
        let executed = self
            .sessions
            .execute(owner, id, request, wait, cancel, news)
            .await;
        match &executed {
            Ok(Executed::Finished(outcome)) => {
                self.met(owner, id, None);
                self.call_ended(owner, Some(id), TOOL, begun, outcome_of(&outcome.status));
            }
            Ok(Executed::Underway(_)) => {
                self.met(owner, id, None);
                self.call_ended(owner, Some(id), TOOL, begun, Outcome::Underway);
            }
            Err(_) => self.call(owner, Some(id), TOOL, begun, &executed),
        }
        executed
    }

    async fn check(
        &self,
        owner: &Principal,
        which: &Which,
        wait: Duration,
        max_chars: usize,
        news: News,
    ) -> Result<Checked, Refused> {
        // Looking changes nothing.
        self.sessions
            .check(owner, which, wait, max_chars, news)
            .await
    }

    async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
        how: Word,
    ) -> Result<Decided, Refused> {
        // A permission is the beginning of new work.
        self.may_begin()?;
        let decided = self.sessions.decide(owner, handle, decisions, how).await;
        if let Ok(Decided { session, rulings }) = &decided {
            rulings
                .iter()
                .for_each(|ruling| self.ruled(owner, session, ruling, Some(how)));
        }
        decided
    }

    async fn stop(&self, owner: &Principal, which: &Which) -> Result<(), Refused> {
        let begun = Instant::now();
        let stopped = self.sessions.stop(owner, which).await;
        let session = match which {
            Which::Of(session) => Some(session),
            Which::This(_) => None,
        };
        self.call(owner, session, "interrupt", begun, &stopped);
        stopped
    }

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused> {
        let begun = Instant::now();
        let done = self.sessions.reset(owner, id).await;
        self.call(owner, Some(id), "reset", begun, &done);
        done
    }

    async fn undo(
        &self,
        owner: &Principal,
        id: &SessionId,
        cells: u32,
    ) -> Result<UndoReport, Refused> {
        let begun = Instant::now();
        let done = self.sessions.undo(owner, id, cells).await;
        self.call(owner, Some(id), "undo", begun, &done);
        done
    }

    async fn checkpoints(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<Vec<CheckpointInfo>, Refused> {
        self.sessions.checkpoints(owner, id).await
    }

    async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ForkRequest,
    ) -> Result<ForkReport, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self.sessions.fork(owner, id, request).await;
        if let Ok(report) = &done {
            report
                .forks
                .iter()
                .for_each(|fork| self.met(owner, fork, Some(id)));
        }
        self.call(owner, Some(id), "fork_session", begun, &done);
        done
    }

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        news: News,
    ) -> Result<ExploreReport, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self
            .sessions
            .explore(owner, id, request, cancel, news)
            .await;
        if let Ok(report) = &done {
            report
                .kept
                .iter()
                .for_each(|(_, kept)| self.met(owner, kept, Some(id)));
        }
        self.call(owner, Some(id), "explore", begun, &done);
        done
    }

    async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        leave: Leave,
        cancel: CancellationToken,
        news: News,
    ) -> Result<InstallReport, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let wanted = requirements.iter().cloned().collect();
        let done = self
            .sessions
            .install(owner, id, requirements, leave, cancel, news)
            .await;
        match &done {
            // Nothing has happened but a question.
            Err(Refused::Ask { .. }) => return done,
            Ok(InstallReport {
                ruling: Some(ruling),
                ..
            }) => self.ruled(owner, id, ruling, Some("install_package")),
            Err(Refused::NotApproved { ruling, .. }) => {
                let how = matches!(ruling.by, DecidedBy::Person(_)).then_some("install_package");
                self.ruled(owner, id, ruling, how);
            }
            _ => {}
        }
        let (outcome, installed) = match &done {
            Ok(report) => (
                Outcome::Succeeded,
                report.text.lines().map(str::to_owned).collect(),
            ),
            Err(_) => (Outcome::Failed, std::iter::empty::<String>().collect()),
        };
        if done.is_ok() {
            self.met(owner, id, None);
        }
        self.audit.note(self.event(
            owner,
            Some(id),
            Packages {
                requirements: wanted,
                installed,
                outcome,
            },
        ));
        self.call(owner, Some(id), "install_package", begun, &done);
        done
    }

    async fn register_server(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self.sessions.register_server(owner, request).await;
        self.call(owner, None, "register_mcp_server", begun, &done);
        done
    }

    async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self.sessions.unregister_server(owner, name).await;
        self.call(owner, None, "unregister_mcp_server", begun, &done);
        done
    }

    async fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        self.sessions.servers(owner).await
    }

    async fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused> {
        self.sessions.set_up_servers(setup).await
    }

    async fn set_up_limits(&self, setup: LimitSetup) -> Result<(), Refused> {
        self.sessions.set_up_limits(setup).await
    }

    async fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        self.sessions.set_up_approvals(setup).await
    }

    async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self
            .sessions
            .write_file(owner, id, path, source, overwrite)
            .await;
        if let Ok(bytes) = done {
            self.met(owner, id, None);
            self.moved(owner, id, path, Direction::Into, bytes);
        }
        self.call(owner, Some(id), "upload_file", begun, &done);
        done
    }

    async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self.sessions.read_file(owner, id, path, limit, sink).await;
        if let Ok(bytes) = done {
            self.moved(owner, id, path, Direction::OutOf, bytes);
        }
        self.call(owner, Some(id), "download_file", begun, &done);
        done
    }

    async fn read_file_range(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        offset: u64,
        length: Option<u64>,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<FileRange, Refused> {
        self.may_begin()?;
        let done = self
            .sessions
            .read_file_range(owner, id, path, offset, length, sink)
            .await;
        // A look at the size alone moves nothing.
        match &done {
            Ok(range) if range.sent > 0 => {
                self.moved(owner, id, path, Direction::OutOf, range.sent)
            }
            Ok(_) => {}
            Err(refused) => self.refused(owner, Some(id), refused),
        }
        done
    }

    async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused> {
        self.sessions.list_files(owner, id).await
    }

    async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused> {
        self.may_begin()?;
        let begun = Instant::now();
        let done = self.sessions.upload(owner, id, path, part, source).await;
        if let Ok(Uploaded {
            size,
            finished: true,
        }) = done
        {
            self.met(owner, id, None);
            self.moved(owner, id, path, Direction::Into, size);
        }
        self.call(owner, Some(id), "upload_file", begun, &done);
        done
    }

    async fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        self.sessions.uploaded(owner, id, path).await
    }

    fn record_endings(&self, takes_over: bool, record: RecordEnding) {
        self.sessions.record_endings(takes_over, record);
    }

    async fn load(&self) -> Load {
        self.sessions.load().await
    }

    async fn list(&self, owner: &Principal) -> Result<Vec<SessionInfo>, Refused> {
        self.sessions.list(owner).await
    }

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused> {
        let begun = Instant::now();
        let done = self.sessions.close(owner, id).await;
        if done.is_ok() {
            self.ended(owner, id, "it was closed");
        }
        self.call(owner, Some(id), "close_session", begun, &done);
        done
    }

    async fn output_size(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
    ) -> Option<u64> {
        self.sessions.output_size(owner, id, execution).await
    }

    async fn read_output(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
        offset: u64,
        length: usize,
    ) -> Option<io::Result<Slice>> {
        self.sessions
            .read_output(owner, id, execution, offset, length)
            .await
    }
}

impl Recorder {
    fn moved(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        direction: Direction,
        bytes: u64,
    ) {
        self.metrics.file_moved(
            match direction {
                Direction::Into => telemetry::Direction::Into,
                Direction::OutOf => telemetry::Direction::OutOf,
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
