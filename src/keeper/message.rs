//! What a front and its keeper say to each other.
//!
//! `Hello`, `Welcome`, `Status` and `StopAnswer` are understood by every version, since an operator must be able to stop an older keeper: they may gain fields, and
//! nothing else about them changes. Everything else belongs to one `PROTOCOL`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::sandbox::Preparation;
use crate::session::install::Leave;
use crate::session::servers::{ServerRequest, ServerSetup};
use crate::session::{
    ApprovalSetup, Decision, ExecuteRequest, ExecutionEnded, ExecutionHandle, ExecutionId,
    ExploreRequest, ForkRequest, InsidePath, LimitSetup, Principal, Refused, Resident, SessionId,
    UploadPart, Which,
};

/// Counts changes that an older peer would not understand.
pub const PROTOCOL: u32 = 6;

/// What every call is answered with.
pub(super) type Answer<T> = Result<T, Refused>;

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

/// From a front to its keeper. Those behind `Request` are about the request with the frame's number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromFront {
    Hello(Hello),
    Request(Box<Call>),
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

/// `FromFront::Request` without owning the call, so that it can be sent again.
#[derive(Serialize)]
pub(super) enum Asking<'a> {
    Request(&'a Call),
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

/// One method of `SessionAccess`, with what it is given.
#[derive(Serialize, Deserialize)]
pub(super) enum Call {
    Execute {
        owner: Principal,
        id: SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
    },
    Check {
        owner: Principal,
        which: Which,
        wait: Duration,
        max_chars: usize,
    },
    Decide {
        owner: Principal,
        handle: ExecutionHandle,
        decisions: Vec<Decision>,
    },
    Stop {
        owner: Principal,
        which: Which,
    },
    Reset {
        owner: Principal,
        id: SessionId,
    },
    Undo {
        owner: Principal,
        id: SessionId,
        cells: u32,
    },
    Checkpoints {
        owner: Principal,
        id: SessionId,
    },
    Fork {
        owner: Principal,
        id: SessionId,
        request: ForkRequest,
    },
    Explore {
        owner: Principal,
        id: SessionId,
        request: ExploreRequest,
    },
    Install {
        owner: Principal,
        id: SessionId,
        requirements: Vec<String>,
        leave: Leave,
    },
    RegisterServer {
        owner: Principal,
        request: ServerRequest,
    },
    SetUpServers {
        setup: ServerSetup,
    },
    SetUpApprovals {
        setup: ApprovalSetup,
    },
    SetUpLimits {
        setup: LimitSetup,
    },
    UnregisterServer {
        owner: Principal,
        name: String,
    },
    Servers {
        owner: Principal,
    },
    WriteFile {
        owner: Principal,
        id: SessionId,
        path: InsidePath,
        overwrite: bool,
    },
    ReadFile {
        owner: Principal,
        id: SessionId,
        path: InsidePath,
        limit: u64,
    },
    ReadFileRange {
        owner: Principal,
        id: SessionId,
        path: InsidePath,
        offset: u64,
        length: Option<u64>,
    },
    ListFiles {
        owner: Principal,
        id: SessionId,
    },
    Upload {
        owner: Principal,
        id: SessionId,
        path: InsidePath,
        part: UploadPart,
    },
    Uploaded {
        owner: Principal,
        id: SessionId,
        path: InsidePath,
    },
    Load,
    List {
        owner: Principal,
    },
    Close {
        owner: Principal,
        id: SessionId,
    },
    OutputSize {
        owner: Principal,
        id: SessionId,
        execution: ExecutionId,
    },
    ReadOutput {
        owner: Principal,
        id: SessionId,
        execution: ExecutionId,
        offset: u64,
        length: usize,
    },
}

impl Call {
    /// The word for it in logs and tests.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Call::Execute { .. } => "execute",
            Call::Check { .. } => "check",
            Call::Decide { .. } => "decide",
            Call::Stop { .. } => "stop",
            Call::Reset { .. } => "reset",
            Call::Undo { .. } => "undo",
            Call::Checkpoints { .. } => "checkpoints",
            Call::Fork { .. } => "fork",
            Call::Explore { .. } => "explore",
            Call::Install { .. } => "install",
            Call::RegisterServer { .. } => "register_server",
            Call::SetUpServers { .. } => "set_up_servers",
            Call::SetUpApprovals { .. } => "set_up_approvals",
            Call::SetUpLimits { .. } => "set_up_limits",
            Call::UnregisterServer { .. } => "unregister_server",
            Call::Servers { .. } => "servers",
            Call::WriteFile { .. } => "write_file",
            Call::ReadFile { .. } => "read_file",
            Call::ReadFileRange { .. } => "read_file_range",
            Call::ListFiles { .. } => "list_files",
            Call::Upload { .. } => "upload",
            Call::Uploaded { .. } => "uploaded",
            Call::Load => "load",
            Call::List { .. } => "list",
            Call::Close { .. } => "close",
            Call::OutputSize { .. } => "output_size",
            Call::ReadOutput { .. } => "read_output",
        }
    }
}

// Code and names of files are nobody's business in a log.
impl std::fmt::Debug for Call {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}
