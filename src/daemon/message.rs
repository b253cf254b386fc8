//! The messages between a frontend and its session daemon.
//!
//! `Hello`, `Welcome`, `Status` and `Stop` are understood by every version, since an operator must
//! be able to stop an older daemon: they may gain fields, and nothing else about them changes on
//! the wire. The rest belongs to one `PROTOCOL`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ops::{Op, Reply};
use crate::sandbox::Preparation;
use crate::session::{ExecutionEnded, Principal, Refused, SessionSummary};

/// Counts changes that an older peer would not understand.
pub const PROTOCOL: u32 = 8;

/// The answer to every request.
pub(super) type ReplyResult = Result<Reply, Refused>;

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DaemonHello {
    pub(super) protocol: u32,
    pub(super) build: String,
    /// The digest of its settings.
    pub(super) settings: String,
    pub(super) purpose: HelloPurpose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum HelloPurpose {
    Serve,
    Status,
    Stop {
        /// Also when code is running.
        now: bool,
    },
}

/// The daemon's reply to a frontend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) protocol: u32,
    pub(super) build: String,
    pub(super) settings: String,
    /// Identifies this daemon process. The name on the wire is that of earlier versions.
    #[serde(rename = "keeper")]
    pub(super) instance: String,
    pub(super) process: u32,
    /// Empty if the protocols differ.
    #[serde(default)]
    pub(super) residents: Vec<SessionSummary>,
    /// Why this daemon cannot serve sessions. It exits.
    #[serde(default)]
    pub(super) unfit: Option<String>,
}

/// The state of a daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    pub protocol: u32,
    pub build: String,
    pub process: u32,
    pub age: Duration,
    pub sessions: usize,
    /// Sessions in which code runs.
    pub running: usize,
    /// Servers that are connected. The name on the wire is that of earlier versions.
    #[serde(rename = "fronts")]
    pub frontends: usize,
}

/// The reply to a request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReply {
    /// The daemon ends all its sessions and exits.
    Stopping,
    /// Refused: code is running in this many sessions and `now` was not set.
    Busy { running: usize },
}

/// Messages from a frontend to its daemon. Those after `Request` are about the request with the
/// frame's number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToDaemon {
    Hello(DaemonHello),
    Request {
        owner: Principal,
        op: Box<Op>,
    },
    /// The file is complete.
    EndOfFile,
    /// The file could not be read to its end.
    FileFailed,
    /// This many more chunks of a file may be sent.
    Credit(u32),
    /// Cancels the operation. A reply follows all the same.
    Cancel,
    /// The caller does not wait for a reply any more.
    Forget,
    /// Asks whether the daemon responds. It replies with a heartbeat.
    Heartbeat,
    /// The frontend records executions that end. With `takes_over`, also those that were left by
    /// frontends that are gone.
    RecordEndings {
        takes_over: bool,
    },
    /// The execution with this number is recorded.
    Recorded(u64),
}

/// `ToDaemon::Request` without owning the operation, so that it can be sent again.
#[derive(Serialize)]
pub(super) enum RequestRef<'a> {
    Request { owner: &'a Principal, op: &'a Op },
}

/// Messages from a daemon to a frontend. `Progress` and `Credit` are about the request with the
/// frame's number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromDaemon {
    Welcome(Welcome),
    Status(DaemonStatus),
    Stop(StopReply),
    Preparation(Preparation),
    Progress(String),
    Credit(u32),
    Heartbeat,
    /// An execution has ended, and the frontend is to record it.
    ExecutionEnded {
        number: u64,
        ended: Box<ExecutionEnded>,
    },
}
