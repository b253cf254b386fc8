//! Carries out operations: one match arm per operation.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{ExecutionEnded, FullOutput, Principal, RecordEnding, RecorderId, Refused, Sessions};
use crate::ops::{Host, Io, Op, Reply, Ticket};
use crate::sandbox::Preparation;

/// Load of the sessions on this server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    pub sessions: usize,
    /// Running cells.
    pub running: usize,
    /// Cells that wait for a server-wide run permit.
    pub waiting: usize,
}

/// A part of an execution's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    /// Total number of kept bytes.
    pub total: u64,
    /// Whether there was more text than is kept.
    pub kept_in_part: bool,
}

impl Host for Sessions {
    fn submit<'a>(&self, owner: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        let (sessions, owner) = (self.clone(), owner.clone());
        Ticket::admit(async move { sessions.carry_out(&owner, op, io).await })
    }

    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.preparation()
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
}

impl Sessions {
    async fn carry_out(&self, owner: &Principal, op: Op, io: Io<'_>) -> Result<Reply, Refused> {
        let Io {
            cancel,
            progress,
            body,
            recorder,
        } = io;
        Ok(match op {
            Op::Execute(mut op) => {
                op.request.recorder = recorder;
                let running = self.begin(owner, &op.session, op.request, op.wait, cancel, progress);
                Reply::Execute(running.await?)
            }
            Op::Check(op) => Reply::Check(
                self.check(owner, &op.execution, op.wait, op.max_chars, progress)
                    .await?,
            ),
            Op::Decide(op) => Reply::Decide(self.decide(owner, &op.execution, op.decisions).await?),
            Op::Interrupt(op) => Reply::Interrupt(self.stop(owner, &op.execution).await?),
            Op::Reset(op) => Reply::Reset(self.reset(owner, &op.session).await?),
            Op::Undo(op) => Reply::Undo(self.undo(owner, &op.session, op.cells).await?),
            Op::ListCheckpoints(op) => {
                Reply::ListCheckpoints(self.checkpoints(owner, &op.session)?)
            }
            Op::Fork(op) => Reply::Fork(self.fork(owner, &op.session, op.request).await?),
            Op::Explore(mut op) => {
                op.request.recorder = recorder;
                let exploring = self.explore(owner, &op.session, op.request, cancel, progress);
                Reply::Explore(Box::pin(exploring).await?)
            }
            Op::Install(op) => {
                let report = |step| drop(progress.send_replace(step));
                let installing = self.install(
                    owner,
                    &op.session,
                    op.requirements,
                    op.approval,
                    cancel,
                    &report,
                );
                Reply::Install(Box::pin(installing).await?)
            }
            Op::RegisterServer(op) => {
                Reply::RegisterServer(self.register_server(owner, op.server).await?)
            }
            Op::UnregisterServer(op) => {
                Reply::UnregisterServer(self.unregister_server(owner, &op.name).await?)
            }
            Op::ListServers(_) => Reply::ListServers(self.servers(owner)?),
            Op::SetServers(op) => Reply::SetServers(self.set_up_servers(op.setup)?),
            Op::SetApprovals(op) => Reply::SetApprovals(self.set_up_approvals(op.setup)?),
            Op::SetLimits(op) => {
                self.set_up_limits(op.setup);
                Reply::SetLimits(())
            }
            Op::WriteFile(op) => {
                let mut source = body.into_source();
                let written =
                    self.write_file(owner, &op.session, &op.path, &mut source, op.overwrite);
                Reply::WriteFile(written.await?)
            }
            Op::ReadFile(op) => {
                let mut sink = body.into_sink();
                let read = self.read_file(owner, &op.session, &op.path, op.limit, &mut sink);
                Reply::ReadFile(read.await?)
            }
            Op::ReadFileRange(op) => {
                let mut sink = body.into_sink();
                let read = self.read_file_range(
                    owner,
                    &op.session,
                    &op.path,
                    op.offset,
                    op.length,
                    &mut sink,
                );
                Reply::ReadFileRange(read.await?)
            }
            Op::ListFiles(op) => Reply::ListFiles(self.list_files(owner, &op.session).await?),
            Op::Upload(op) => {
                let mut source = body.into_source();
                let uploaded = self.upload(owner, &op.session, &op.path, op.part, &mut source);
                Reply::Upload(uploaded.await?)
            }
            Op::UploadSize(op) => Reply::UploadSize(self.uploaded(owner, &op.session, &op.path)),
            Op::GetLoad(_) => Reply::GetLoad(self.load()),
            Op::ListSessions(_) => Reply::ListSessions(self.list(owner)),
            Op::CloseSession(op) => Reply::CloseSession(self.close(owner, &op.session).await?),
            Op::OutputSize(op) => {
                let output = self.full_output(owner, &op.session, op.output);
                Reply::OutputSize(output.map(|output| output.total_bytes()))
            }
            Op::ReadOutput(op) => match self.full_output(owner, &op.session, op.output) {
                Some(output) => {
                    Reply::ReadOutput(Some(read_output(output, op.offset, op.length).await?))
                }
                None => Reply::ReadOutput(None),
            },
        })
    }
}

async fn read_output(output: FullOutput, offset: u64, length: usize) -> Result<Slice, Refused> {
    let (total, kept_in_part) = (output.total_bytes(), output.is_cut());
    let reading = tokio::task::spawn_blocking(move || output.read_range(offset, length));
    let bytes = reading
        .await
        .unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let bytes = bytes.map_err(|error| Refused::Transfer {
        why: error.kind().to_string(),
    })?;
    Ok(Slice {
        bytes,
        total,
        kept_in_part,
    })
}
