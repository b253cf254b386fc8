//! What others ask of sessions, and nothing more.
//!
//! `Sessions` is the real answerer. The keeper's client asks it from another process; the tests of `mcp` have one of their own, so
//! that the wire can be tested without a sandbox.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::install::{InstallReport, Leave};
use super::servers::{ServerReport, ServerRequest, ServerSetup};
use super::{
    ApprovalSetup, Checked, CheckpointInfo, Decided, Decision, ExecuteRequest, Executed,
    ExecutionEnded, ExecutionHandle, ExecutionId, ExploreReport, ExploreRequest, FileList,
    FileRange, ForkReport, ForkRequest, InsidePath, LimitSetup, Principal, RecordEnding,
    RecorderId, Refused, ResetReport, SessionId, SessionInfo, Sessions, UndoReport, UploadPart,
    Uploaded, Which, Word,
};
use crate::sandbox::Preparation;

/// Where a call tells what it is at, as a sentence or the latest line of output. Nobody needs to listen.
pub type News = watch::Sender<String>;

/// How busy a house of sessions is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    pub sessions: usize,
    /// Cells that run.
    pub running: usize,
    /// Cells that wait for a place in the whole server.
    pub waiting: usize,
}

/// A part of an execution's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    /// Bytes that are kept in all.
    pub total: u64,
    /// There was more text than is kept.
    pub kept_in_part: bool,
}

#[async_trait]
pub trait SessionAccess: Send + Sync {
    fn preparation(&self) -> watch::Receiver<Preparation>;

    /// Runs code, and answers when it has finished or after `wait`. A cancelled token interrupts the code; dropping the future does
    /// not, and its outcome can be checked.
    async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        cancel: CancellationToken,
        news: News,
    ) -> Result<Executed, Refused>;

    /// Tells how an execution that was not answered at once goes on, after `wait` or when it has finished. Texts have at most
    /// `max_chars`, the newest.
    async fn check(
        &self,
        owner: &Principal,
        which: &Which,
        wait: Duration,
        max_chars: usize,
        news: News,
    ) -> Result<Checked, Refused>;

    /// Answers questions of an execution. Those that are not open any more are left alone; what was decided comes back.
    async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
        how: Word,
    ) -> Result<Decided, Refused>;

    /// Interrupts an execution, or takes it out of the queue. It ends with an outcome that can be checked.
    async fn stop(&self, owner: &Principal, which: &Which) -> Result<(), Refused>;

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused>;

    async fn undo(
        &self,
        owner: &Principal,
        id: &SessionId,
        cells: u32,
    ) -> Result<UndoReport, Refused>;

    async fn checkpoints(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<Vec<CheckpointInfo>, Refused>;

    async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ForkRequest,
    ) -> Result<ForkReport, Refused>;

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        news: News,
    ) -> Result<ExploreReport, Refused>;

    /// Installs packages; `news` hears what it is at. What a person must allow first is refused with the question, and comes again with its answer.
    async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        leave: Leave,
        cancel: CancellationToken,
        news: News,
    ) -> Result<InstallReport, Refused>;

    async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused>;

    async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused>;

    /// Copies a part of a file to `sink`: from `offset` on, to the end or at most `length` bytes, and not more than 1 GiB at once.
    async fn read_file_range(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        offset: u64,
        length: Option<u64>,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<FileRange, Refused>;

    /// Names the files of a session, while no cell runs in it.
    async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused>;

    /// Takes a part of a file that arrives in several. What arrived is kept when the source fails or the future is dropped.
    async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused>;

    /// Returns how many bytes of an unfinished upload have arrived, or nothing when there is none.
    async fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64>;

    /// Has `record` called for each execution that ends, before its caller is told, and whether or
    /// not its outcome is ever collected.
    ///
    /// With `takes_over`, also for those that a server submitted which is gone. Each is handed out
    /// once, or again under the same name when a connection broke just then.
    fn record_endings(&self, takes_over: bool, record: RecordEnding);

    /// Connects to another MCP server and makes its tools known to the owner's sessions.
    async fn register_server(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, Refused>;

    async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused>;

    /// Tells which servers the owner's sessions may use.
    async fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused>;

    /// Takes over the servers of the operator, which everybody's sessions may use. Nothing is waited for.
    async fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused>;

    /// Takes over other approvals, which hold at once for what is asked from then on.
    async fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused>;

    /// Takes over other limits of callers, which hold at once.
    async fn set_up_limits(&self, setup: LimitSetup) -> Result<(), Refused>;

    /// Tells how busy the whole house is. Names nobody.
    async fn load(&self) -> Load;

    async fn list(&self, owner: &Principal) -> Result<Vec<SessionInfo>, Refused>;

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused>;

    /// Returns how many bytes of an execution's output are kept, or nothing when it is not kept.
    async fn output_size(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
    ) -> Option<u64>;

    /// Reads a part of an execution's output, or nothing when it is not kept.
    async fn read_output(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
        offset: u64,
        length: usize,
    ) -> Option<io::Result<Slice>>;
}

#[async_trait]
impl SessionAccess for Sessions {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.preparation()
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
        self.begin(owner, id, request, wait, cancel, news).await
    }

    async fn check(
        &self,
        owner: &Principal,
        which: &Which,
        wait: Duration,
        max_chars: usize,
        news: News,
    ) -> Result<Checked, Refused> {
        self.check(owner, which, wait, max_chars, news).await
    }

    async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
        _how: Word,
    ) -> Result<Decided, Refused> {
        self.decide(owner, handle, decisions).await
    }

    async fn stop(&self, owner: &Principal, which: &Which) -> Result<(), Refused> {
        self.stop(owner, which).await
    }

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused> {
        self.reset(owner, id).await
    }

    async fn undo(
        &self,
        owner: &Principal,
        id: &SessionId,
        cells: u32,
    ) -> Result<UndoReport, Refused> {
        self.undo(owner, id, cells).await
    }

    async fn checkpoints(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<Vec<CheckpointInfo>, Refused> {
        Sessions::checkpoints(self, owner, id)
    }

    async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ForkRequest,
    ) -> Result<ForkReport, Refused> {
        self.fork(owner, id, request).await
    }

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        news: News,
    ) -> Result<ExploreReport, Refused> {
        self.explore(owner, id, request, cancel, news).await
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
        self.install(owner, id, requirements, leave, cancel, &|step| {
            drop(news.send_replace(step))
        })
        .await
    }

    async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        self.write_file(owner, id, path, source, overwrite).await
    }

    async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        self.read_file(owner, id, path, limit, sink).await
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
        self.read_file_range(owner, id, path, offset, length, sink)
            .await
    }

    async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused> {
        self.list_files(owner, id).await
    }

    async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused> {
        self.upload(owner, id, path, part, source).await
    }

    async fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        Sessions::uploaded(self, owner, id, path)
    }

    fn record_endings(&self, takes_over: bool, record: RecordEnding) {
        let ledger = Arc::clone(self.ledger());
        let confirming = Arc::downgrade(&ledger);
        let hand_over = move |number, ended: ExecutionEnded| {
            record(&ended);
            if let Some(ledger) = confirming.upgrade() {
                ledger.confirm(number);
            }
        };
        ledger
            .attach(RecorderId::default(), takes_over, Arc::new(hand_over))
            .forever();
    }

    async fn register_server(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, Refused> {
        Sessions::register_server(self, owner, request).await
    }

    async fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused> {
        Sessions::set_up_servers(self, setup)
    }

    async fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        Sessions::set_up_approvals(self, setup)
    }

    async fn set_up_limits(&self, setup: LimitSetup) -> Result<(), Refused> {
        Sessions::set_up_limits(self, setup);
        Ok(())
    }

    async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        Sessions::unregister_server(self, owner, name).await
    }

    async fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        Sessions::servers(self, owner)
    }

    async fn load(&self) -> Load {
        Sessions::load(self)
    }

    async fn list(&self, owner: &Principal) -> Result<Vec<SessionInfo>, Refused> {
        Ok(Sessions::list(self, owner))
    }

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused> {
        self.close(owner, id).await
    }

    async fn output_size(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
    ) -> Option<u64> {
        self.full_output(owner, id, execution)
            .map(|output| output.total_bytes())
    }

    async fn read_output(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
        offset: u64,
        length: usize,
    ) -> Option<io::Result<Slice>> {
        let output = self.full_output(owner, id, execution)?;
        let (total, kept_in_part) = (output.total_bytes(), output.is_cut());
        let reading = tokio::task::spawn_blocking(move || output.read_range(offset, length));
        let bytes = reading
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        Some(bytes.map(|bytes| Slice {
            bytes,
            total,
            kept_in_part,
        }))
    }
}
