//! Requests: the jobs of a session, the destination of their answers, and the running request.
//!
//! A cell has output and host calls of its own (`cell`). Any other request that the runner carries
//! out is a transfer (`transfers`): it ends with one claim and interprets that claim itself.

use std::io;
use std::time::Duration;

use tempfile::SpooledTempFile;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::FILE_TIMEOUT;
use super::cell::Cell;
use super::forks::{ForkedSession, ForksWanted};
use crate::reaction::ReactionLimit;
use crate::runner_client::{Claim, Request};
use crate::session::executions::ExecutionReporter;
use crate::session::install::LoadedModules;
use crate::session::state::{RequestId, RequestKind};
use crate::session::{ExecuteRequest, FileList, InsidePath, Refused};

/// A request and the destination of its answer.
pub(in crate::session) enum SessionJob {
    Execute {
        request: ExecuteRequest,
        reporter: ExecutionReporter,
    },
    Write {
        path: InsidePath,
        overwrite: bool,
        source: SpooledTempFile,
        reply: oneshot::Sender<Result<u64, Refused>>,
    },
    Read {
        path: InsidePath,
        what: ReadExtent,
        reply: oneshot::Sender<Result<FileData, Refused>>,
    },
    List {
        reply: oneshot::Sender<Result<FileList, Refused>>,
    },
    /// Adds package folders. The answer names modules that were imported from elsewhere before.
    Packages {
        paths: Vec<String>,
        reply: oneshot::Sender<Result<LoadedModules, Refused>>,
    },
    Fork {
        wanted: ForksWanted,
        reply: oneshot::Sender<Result<ForkedSession, Refused>>,
    },
}

/// The requested part of a file.
#[derive(Debug, Clone, Copy)]
pub(in crate::session) enum ReadExtent {
    /// The whole file, if it is not larger than this.
    Whole {
        limit: u64,
    },
    Part {
        offset: u64,
        length: u64,
    },
}

/// Data read from a file.
pub(in crate::session) struct FileData {
    pub(in crate::session) bytes: SpooledTempFile,
    pub(in crate::session) sent: u64,
    /// The size of the whole file, and a text that differs when the file has changed. Claimed by
    /// the runner, and only for a partial read.
    pub(in crate::session) total: u64,
    pub(in crate::session) version: String,
}

impl SessionJob {
    pub(super) fn kind(&self) -> RequestKind {
        match self {
            SessionJob::Execute { .. } => RequestKind::Cell,
            SessionJob::Write { .. }
            | SessionJob::Read { .. }
            | SessionJob::List { .. }
            | SessionJob::Packages { .. } => RequestKind::File,
            SessionJob::Fork { .. } => RequestKind::Fork,
        }
    }

    /// Answers a request that was never started.
    pub(super) fn refuse(self, refused: Refused) {
        match self {
            SessionJob::Execute { reporter, .. } => reporter.end(Err(refused)),
            SessionJob::Write { reply, .. } => drop(reply.send(Err(refused))),
            SessionJob::Read { reply, .. } => drop(reply.send(Err(refused))),
            SessionJob::List { reply } => drop(reply.send(Err(refused))),
            SessionJob::Packages { reply, .. } => drop(reply.send(Err(refused))),
            SessionJob::Fork { reply, .. } => drop(reply.send(Err(refused))),
        }
    }
}

/// A request other than a cell that the runner carries out.
pub(super) trait Transfer: Send {
    /// Takes a claim of the runner about it. An error is a protocol violation.
    fn take(&mut self, claim: Claim) -> Result<(), String>;

    /// Returns whether the runner has claimed its end.
    fn is_over(&self) -> bool;

    /// Returns whether the session's state has changed.
    fn has_changed(&self) -> bool {
        false
    }

    /// Returns the next frame to send, once the channel accepts it without blocking.
    fn next_frame(&mut self) -> io::Result<Option<(Request, Vec<u8>)>> {
        Ok(None)
    }

    /// Sends the answer: the result if it is over, or the reason why there is none. Returns the
    /// package folders that the session has from now on.
    fn answer(self: Box<Self>, ended: Result<(), Refused>) -> Vec<String>;
}

/// The running request.
pub(super) struct Running {
    pub(super) id: RequestId,
    pub(super) task: Task,
    pub(super) begun: Instant,
    /// Next deadline: the timeout, then the grace period; for a transfer, the time without
    /// progress.
    pub(super) deadline: Instant,
    /// Time left until the deadline while the clock is paused.
    paused: Option<Duration>,
    /// How long the code may take to react to the interrupt, once it has been asked to stop.
    pub(super) reaction: Option<ReactionLimit>,
    /// Whether it was interrupted for the last time.
    pub(super) has_last_chance: bool,
}

pub(super) enum Task {
    Cell(Box<Cell>),
    Transfer(Box<dyn Transfer>),
}

impl Running {
    pub(super) fn new(id: RequestId, task: Task, begun: Instant, deadline: Instant) -> Running {
        Running {
            id,
            task,
            begun,
            deadline,
            paused: None,
            reaction: None,
            has_last_chance: false,
        }
    }

    pub(super) fn cell(&self) -> Option<&Cell> {
        match &self.task {
            Task::Cell(cell) => Some(cell),
            Task::Transfer(_) => None,
        }
    }

    pub(super) fn cell_mut(&mut self) -> Option<&mut Cell> {
        match &mut self.task {
            Task::Cell(cell) => Some(cell),
            Task::Transfer(_) => None,
        }
    }

    /// Takes a claim, if it is about this request. An error is a protocol violation.
    pub(super) fn take(&mut self, claim: Claim) -> Result<(), String> {
        if claim.request() != Some(self.id) {
            return Ok(());
        }
        match &mut self.task {
            Task::Cell(cell) => {
                cell.take(claim);
                Ok(())
            }
            Task::Transfer(transfer) => {
                self.deadline = Instant::now() + FILE_TIMEOUT;
                transfer.take(claim)
            }
        }
    }

    /// Returns whether the runner has claimed its end.
    pub(super) fn is_over(&self) -> bool {
        match &self.task {
            Task::Cell(cell) => cell.is_over(),
            Task::Transfer(transfer) => transfer.is_over(),
        }
    }

    /// Returns whether it may have changed the session's state.
    pub(super) fn has_changed(&self) -> bool {
        match &self.task {
            Task::Cell(cell) => cell.may_have_changed(),
            Task::Transfer(transfer) => transfer.has_changed(),
        }
    }

    /// Pauses the clock, unless it is paused.
    pub(super) fn pause(&mut self, now: Instant) {
        self.paused
            .get_or_insert(self.deadline.saturating_duration_since(now));
    }

    /// Resumes the clock, if it is paused.
    pub(super) fn resume(&mut self, now: Instant) {
        if let Some(left) = self.paused.take() {
            self.deadline = now + left;
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }
}
