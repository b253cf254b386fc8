//! What this room asks of sessions, and nothing more.
//!
//! `Sessions` is the real answerer; the tests of this room have another, so that the wire can be tested without a
//! sandbox.

use std::io;

use async_trait::async_trait;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::resources::Slice;
use crate::sandbox::Preparation;
use crate::session::install::InstallReport;
use crate::session::{
    CheckpointInfo, ExecuteRequest, ExecutionId, ExploreReport, ExploreRequest, ForkNames, ForkReport, InsidePath,
    Outcome, Principal, ProgressSink, Refused, ResetReport, SessionId, SessionInfo, Sessions, UndoReport,
};

#[async_trait]
pub(super) trait SessionAccess: Send + Sync {
    fn preparation(&self) -> watch::Receiver<Preparation>;

    async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused>;

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused>;

    async fn undo(&self, owner: &Principal, id: &SessionId, cells: u32) -> Result<UndoReport, Refused>;

    fn checkpoints(&self, owner: &Principal, id: &SessionId) -> Result<Vec<CheckpointInfo>, Refused>;

    async fn fork(&self, owner: &Principal, id: &SessionId, names: ForkNames) -> Result<ForkReport, Refused>;

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        progress: ProgressSink,
    ) -> Result<ExploreReport, Refused>;

    /// Installs packages; `steps` hears what it is at.
    async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        cancel: CancellationToken,
        steps: watch::Sender<String>,
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

    fn list(&self, owner: &Principal) -> Vec<SessionInfo>;

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused>;

    /// Returns how many bytes of an execution's output are kept, or nothing when it is not kept.
    fn output_size(&self, owner: &Principal, id: &SessionId, execution: ExecutionId) -> Option<u64>;

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
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        self.execute(owner, id, request, cancel).await
    }

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused> {
        self.reset(owner, id).await
    }

    async fn undo(&self, owner: &Principal, id: &SessionId, cells: u32) -> Result<UndoReport, Refused> {
        self.undo(owner, id, cells).await
    }

    fn checkpoints(&self, owner: &Principal, id: &SessionId) -> Result<Vec<CheckpointInfo>, Refused> {
        self.checkpoints(owner, id)
    }

    async fn fork(&self, owner: &Principal, id: &SessionId, names: ForkNames) -> Result<ForkReport, Refused> {
        self.fork(owner, id, names).await
    }

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        progress: ProgressSink,
    ) -> Result<ExploreReport, Refused> {
        self.explore(owner, id, request, cancel, progress).await
    }

    async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        cancel: CancellationToken,
        steps: watch::Sender<String>,
    ) -> Result<InstallReport, Refused> {
        self.install(owner, id, requirements, cancel, &|step| drop(steps.send_replace(step))).await
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

    fn list(&self, owner: &Principal) -> Vec<SessionInfo> {
        self.list(owner)
    }

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused> {
        self.close(owner, id).await
    }

    fn output_size(&self, owner: &Principal, id: &SessionId, execution: ExecutionId) -> Option<u64> {
        self.full_output(owner, id, execution).map(|output| output.total_bytes())
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
        let bytes = reading.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        Some(bytes.map(|bytes| Slice { bytes, total, kept_in_part }))
    }
}
