//! What a front and its keeper say to each other.
//!
//! `Hello`, `Welcome`, `Status` and `StopAnswer` are understood by every version, since an operator
//! must be able to stop an older keeper: they may gain fields, and nothing else about them changes.
//! Everything else belongs to one `PROTOCOL`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ops::{Op, Reply};
use crate::sandbox::Preparation;
use crate::session::{ExecutionEnded, Principal, Refused, Resident};

/// Counts changes that an older peer would not understand.
pub const PROTOCOL: u32 = 8;

/// What every request is answered with.
pub(super) type Answer = Result<Reply, Refused>;

/// The first message of whoever connects to a keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    pub(super) build: String,
    /// The digest of the settings that it has.
    pub(super) settings: String,
    pub(super) purpose: Purpose,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    Serve,
    Status,
    Stop {
        /// Also when code is running.
        now: bool,
    },
}

/// What a keeper answers to a front that wants to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) protocol: u32,
    pub(super) build: String,
    pub(super) settings: String,
    /// Tells this keeper from every other one.
    pub(super) keeper: String,
    pub(super) process: u32,
    /// Nobody, when the protocols differ.
    #[serde(default)]
    pub(super) residents: Vec<Resident>,
    /// Why this keeper cannot keep anything. It ends.
    #[serde(default)]
    pub(super) unfit: Option<String>,
}

/// What a keeper says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub protocol: u32,
    pub build: String,
    pub process: u32,
    pub age: Duration,
    pub sessions: usize,
    /// Sessions in which code runs.
    pub running: usize,
    /// Servers that are connected.
    pub fronts: usize,
}

/// What became of the wish that a keeper end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopAnswer {
    /// It ends, and all its sessions with it.
    Stopping,
    /// Code is running in so many sessions, and the wish was not urgent. Nothing has happened.
    Busy { running: usize },
}

/// From a front to its keeper. Those behind `Request` are about the request with the frame's
/// number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromFront {
    Hello(Hello),
    Request {
        owner: Principal,
        op: Box<Op>,
    },
    /// The file is complete.
    NoMore,
    /// The file could not be read to its end.
    SourceFailed,
    /// So many more chunks of a file may be sent.
    Credit(u32),
    /// Whoever asked wants it to stop. An answer comes all the same.
    Cancel,
    /// Nobody waits for an answer any more.
    Forget,
    /// Is the keeper there? It answers with a beat.
    Beat,
    /// The front records executions that end. With `takes_over`, also those that fronts have left
    /// that are gone.
    Records {
        takes_over: bool,
    },
    /// The execution with this number is recorded.
    Recorded(u64),
}

/// `FromFront::Request` without owning the operation, so that it can be sent again.
#[derive(Serialize)]
pub(super) enum Asking<'a> {
    Request { owner: &'a Principal, op: &'a Op },
}

/// From a keeper to a front. `News` and `Credit` are about the request with the frame's number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromKeeper {
    Welcome(Welcome),
    Status(Status),
    Stop(StopAnswer),
    Preparation(Preparation),
    News(String),
    Credit(u32),
    Beat,
    /// An execution has ended, and the front is to record it.
    Ended {
        number: u64,
        ended: Box<ExecutionEnded>,
    },
}
