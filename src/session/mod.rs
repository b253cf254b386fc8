//! Sessions: Python state that outlives a call.
//!
//!     Starting → Idle ⇄ (Waiting →) Running   Idle ⇄ Copying  (for a later undo, or for forks)
//!                  ↘     ↙
//!                   Ended → (reset) → Starting        (sandbox and files outlive the interpreter)
//!                     ↓  ↘ (undo) → Replacing → Idle  (an undo can also start in Idle)
//!                    Gone                             (expired, closed, or the sandbox was lost)
//!
//! Each session has one task, the driver, and only the driver changes its state. All other code
//! goes through `Sessions`, which finds, creates and limits sessions. A caller that disconnects can
//! pick its execution up again from the execution registry (`docket`). `accounts` tracks usage per
//! principal, `turns` schedules cells. `state` decides, `driver` acts, `output` collects a cell's
//! output within limits.
//!
//! A session can branch. Before a cell changes its state, the state is copied (`history` records
//! which copy precedes which cell), and `undo` replaces the session's state with a copy. A fork is
//! a copy in its own sandbox and from then on an ordinary session. `explore` tries several cells in
//! forks that only it can see.
//!
//! A session does not know which backend it runs on. A session that lost its state reports this
//! until it is reset; it is never replaced silently.

mod accounts;
mod approvals;
mod branch;
mod docket;
mod driver;
mod explore;
mod follow;
mod hidden;
mod history;
mod host;
mod html;
mod images;
pub mod install;
mod kept_outputs;
mod late;
mod ledger;
mod manager;
mod outcome;
mod output;
mod rich;
mod serial;
pub mod servers;
pub mod shell;
mod spool;
mod state;
mod terminal;
#[cfg(test)]
mod tests;
pub mod tools;
mod turns;
mod underway;
mod uploads;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use crate::ops::News;
use crate::runner_client::FileFailure;
use crate::sandbox::{LaunchError, Rules};
pub use accounts::{LimitSetup, Quota, Quotas, Usage};
pub use approvals::{
    ApprovalSetup, Approvals, AskId, Asked, Asking, Decided, DecidedBy, Decision, InForce, Ruling,
};
pub use branch::*;
pub use hidden::Hidden;
pub use host::{Load, Slice};
pub(crate) use ledger::Attached;
pub use ledger::{ExecutionEnded, Ledger, RecordEnding, RecorderId};
pub use manager::Sessions;
pub use outcome::*;
pub use spool::FullOutput;
pub use underway::*;
pub use uploads::{UploadPart, Uploaded};

/// Code longer than this is refused. A cell is typed or generated text; data belongs in a file.
pub const LARGEST_CODE: usize = 8 * 1024 * 1024;

/// Owner of a session. Ids are scoped to their owner: two owners' `a` are two sessions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Principal(pub String);

impl Principal {
    /// The one caller of a stdio server.
    pub fn local() -> Principal {
        Principal("local".to_owned())
    }

    /// The principal for requests that belong to no caller: settings, and the load of the whole
    /// host.
    pub fn operator() -> Principal {
        Principal("operator".to_owned())
    }
}

/// A session id: 1 to 64 letters, digits, `_`, `.` and `-`; never `.` or `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct SessionId(String);

impl SessionId {
    /// The id of the session that is used when a call names none.
    pub const DEFAULT: &str = "default";

    /// Returns the session that is used when a call names none.
    pub fn default_session() -> SessionId {
        SessionId(SessionId::DEFAULT.to_owned())
    }

    /// Excludes letters that are easily confused with digits.
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    const RANDOM_LETTERS: usize = 26;

    /// Returns a unique id that cannot be guessed: 130 random bits. For callers that name no
    /// session and share a server with others.
    pub fn random() -> SessionId {
        let mut bytes = [0; SessionId::RANDOM_LETTERS];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .expect("the kernel has random bytes");
        let letters = bytes
            .iter()
            .map(|byte| char::from(SessionId::ALPHABET[usize::from(byte % 32)]));
        SessionId(
            std::iter::once("s-".to_owned())
                .chain(letters.map(String::from))
                .collect(),
        )
    }

    /// Returns whether the id has the form that `random` generates.
    pub fn looks_generated(&self) -> bool {
        let is_of_alphabet = |byte: u8| SessionId::ALPHABET.contains(&byte);
        let letters = self.0.strip_prefix("s-").map(str::as_bytes);
        letters.is_some_and(|letters| {
            letters.len() == SessionId::RANDOM_LETTERS
                && letters.iter().copied().all(is_of_alphabet)
        })
    }

    /// The log name of hidden sessions, which cannot be addressed.
    fn hidden() -> SessionId {
        SessionId("(hidden)".to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SessionId {
    type Err = BadSessionId;

    fn from_str(text: &str) -> Result<SessionId, BadSessionId> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        if text.is_empty()
            || text.len() > 64
            || text == "."
            || text == ".."
            || !text.bytes().all(allowed)
        {
            return Err(BadSessionId);
        }
        Ok(SessionId(text.to_owned()))
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A text that is not a valid session id. The text itself is not repeated, because it may contain
/// control characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session id is 1 to 64 letters, digits, `_`, `.` or `-`, and not `.` or `..`")]
pub struct BadSessionId;

/// A path below a session's working folder, checked for form only: relative, no `..`, no control
/// characters, parts of at most 255 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct InsidePath(String);

impl InsidePath {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InsidePath {
    type Err = BadInsidePath;

    fn from_str(text: &str) -> Result<InsidePath, BadInsidePath> {
        if text.is_empty() {
            return Err(BadInsidePath::Empty);
        }
        // The kernel's own limit for a whole path.
        if text.len() > 4095 {
            return Err(BadInsidePath::TooLong);
        }
        if text.starts_with('/') {
            return Err(BadInsidePath::Absolute);
        }
        if text.chars().any(char::is_control) {
            return Err(BadInsidePath::ControlCharacter);
        }
        for part in text.split('/') {
            match part {
                "" | "." => return Err(BadInsidePath::EmptyPart),
                ".." => return Err(BadInsidePath::Parent),
                _ if part.len() > 255 => return Err(BadInsidePath::TooLong),
                _ => {}
            }
        }
        Ok(InsidePath(text.to_owned()))
    }
}

impl fmt::Display for InsidePath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Reason why a text is not a valid path below the working folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadInsidePath {
    #[error("the path is empty; name a file below the working folder, such as `data/table.csv`")]
    Empty,
    #[error(
        "the path is absolute; give it relative to the working folder, such as `data/table.csv`"
    )]
    Absolute,
    #[error("the path contains `..`; only files below the working folder can be reached")]
    Parent,
    #[error("the path has an empty part or a `.`; write it as `data/table.csv`")]
    EmptyPart,
    #[error("the path contains a control character")]
    ControlCharacter,
    #[error("the path is too long; a part may have 255 bytes and the whole path 4095")]
    TooLong,
}

/// Kind of a session's working folder. The backend mounts it; this value is only reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkFolder {
    /// Each session has its own folder, which is deleted with the session.
    Private,
    /// One folder of the operator that all sessions share and that outlives them.
    Shared,
}

#[derive(Debug, Clone)]
pub struct SessionSettings {
    pub work_folder: WorkFolder,
    pub max_sessions: usize,
    pub idle_timeout: Duration,
    /// How long code may ignore an interrupt before it is killed. Time spent waiting for a
    /// processor does not count, up to nine times this duration.
    pub grace: Duration,
    pub undo: Undo,
    /// Variants of one exploration that run concurrently, at least one.
    pub explore_parallel: usize,
    /// Memory limit of a sandbox in bytes, if there is one. Old copies are discarded before it is
    /// reached.
    pub memory_limit: Option<u64>,
    pub packages: install::Source,
    pub approvals: InForce,
    pub tools: tools::Tools,
    /// Limits per principal.
    pub quotas: Quotas,
    /// Cells that run concurrently in the whole server; zero means unlimited. Others wait, and
    /// principals take turns.
    pub max_running: usize,
}

/// How long code may ignore an interrupt before it is killed.
pub const INTERRUPT_GRACE: Duration = Duration::from_millis(1500);

/// Small values for tests. A server takes all of them from its settings.
impl Default for SessionSettings {
    fn default() -> SessionSettings {
        SessionSettings {
            work_folder: WorkFolder::Private,
            max_sessions: 20,
            idle_timeout: Duration::from_secs(3600),
            grace: INTERRUPT_GRACE,
            undo: Undo::default(),
            explore_parallel: 4,
            memory_limit: None,
            packages: install::Source::default(),
            approvals: InForce::default(),
            tools: tools::Tools::default(),
            quotas: Quotas::default(),
            max_running: 0,
        }
    }
}

/// One run of code.
#[derive(Clone, Serialize, Deserialize)]
pub struct ExecuteRequest {
    pub code: String,
    /// Measured from the start of the code. Time in the queue does not count.
    pub timeout: Duration,
    pub max_output_chars: usize,
    /// Whether a person can be asked to approve actions of the code.
    #[serde(default)]
    pub asking: Asking,
    /// Network rules of the session from this cell on, within the operator's rules. Applied when
    /// the cell starts.
    #[serde(default, with = "serial::optional_rules")]
    pub rules: Option<Rules>,
    /// Receives the record of how the execution ended.
    #[serde(skip)]
    pub recorder: RecorderId,
}

/// Activity of a session, as reported to its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    Starting,
    Idle,
    /// A cell waits for a run permit, because the whole server runs its maximum of cells.
    Waiting,
    Running,
    Ended,
}

impl SessionState {
    pub fn name(self) -> &'static str {
        match self {
            SessionState::Starting => "starting",
            SessionState::Idle => "idle",
            SessionState::Waiting => "waiting",
            SessionState::Running => "running",
            SessionState::Ended => "ended",
        }
    }
}

/// The action to retry once the session is free; the last part of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Retry {
    Fork,
    Undo,
    ListFiles,
    SendUploadPart,
}

impl fmt::Display for Retry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Retry::Fork => "fork",
            Retry::Undo => "undo",
            Retry::ListFiles => "list its files",
            Retry::SendUploadPart => "send this part again",
        })
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionInfo {
    pub id: SessionId,
    pub state: SessionState,
    /// Reason why the session ended, if it has.
    pub ended: Option<String>,
    pub executions: u64,
    pub age: Duration,
    pub idle: Duration,
    /// Last measurement, taken at the end of an execution.
    pub memory: Option<u64>,
    /// Network rules of the session.
    #[serde(with = "serial::rules")]
    pub rules: Rules,
    /// Requirements that calls installed, or that were already present.
    #[serde(default)]
    pub requested: Vec<String>,
}

/// A session and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    pub owner: Principal,
    pub id: SessionId,
    /// Whether code runs in it or is queued.
    pub running: bool,
}

/// Effect of a reset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetReport {
    pub interrupted_running_cell: bool,
    pub files_kept: bool,
    /// Nothing was started, because there was no session. The next cell creates one.
    #[serde(default)]
    pub had_no_session: bool,
}

/// Reason why a request to a session was not carried out. The request had no effect unless the text
/// says so.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
pub enum Refused {
    #[error(
        "there is no session `{id}`. Run a cell with this session_id to create it, or use \
         `list_sessions` to see the existing ones"
    )]
    Unknown { id: SessionId },
    #[error("this session ended because {why}. {}", way_back(.id, *.undo))]
    Ended {
        id: SessionId,
        why: String,
        /// Whether an earlier state can be restored.
        undo: bool,
    },
    #[error("the process that keeps the sessions does not answer at present. \
             {}", unanswered(*.sent))]
    Unresponsive {
        /// The request was sent before the failure was noticed, so it may have been carried out.
        sent: bool,
    },
    #[error(
        "there is no such execution. It is not known here, its session is gone, or it ended too \
         long ago; `list_sessions` shows the sessions that exist"
    )]
    UnknownExecution,
    #[error("{}", too_many(*.limit, *.own, .oldest_idle))]
    TooManySessions {
        limit: usize,
        /// How many of them belong to the caller.
        own: usize,
        oldest_idle: Vec<SessionId>,
    },
    #[error("{}", accounts::Told { which, limit: *limit, used: *used, retry_after: *retry_after })]
    Quota {
        which: Quota,
        limit: u64,
        used: u64,
        /// When capacity becomes available again, if that only takes time.
        retry_after: Option<Duration>,
    },
    #[error(
        "{waiting} requests are already waiting for this session. Wait for some of them to finish, \
         or use another session_id"
    )]
    Busy { waiting: usize },
    #[error(
        "the server is too busy: {waiting} cells already wait for a place to run. This one has not \
         run; try again in {} s",
        .retry_after.as_secs().max(1)
    )]
    Crowded {
        waiting: usize,
        retry_after: Duration,
    },
    #[error(
        "the code has {size} bytes and at most {LARGEST_CODE} are accepted. Upload the data as a \
         file and read it from a short cell"
    )]
    CodeTooLarge { size: usize },
    #[error("no Python could be started: {}{}", .0, next_attempt(.0))]
    Launch(#[from] LaunchError),
    #[error("the request was cancelled while it waited for its turn. It has not run")]
    CancelledWhileWaiting,
    #[error(
        "the session was reset while this request waited for its turn. It has not run; send it \
         again if it is still wanted"
    )]
    ResetWhileWaiting,
    #[error("the session was closed while this request waited for its turn. It has not run")]
    ClosedWhileWaiting,
    #[error(
        "the session was reset during the file transfer. Nothing can be said about the file; look \
         at it before you rely on it"
    )]
    ResetDuringTransfer,
    #[error("`{path}`: {}", file_trouble(*.reason, .detail))]
    File {
        path: InsidePath,
        reason: FileFailure,
        detail: String,
    },
    #[error("the file could not be read or stored on the server's side: {why}")]
    Transfer { why: String },
    #[error(
        "the upload stands at byte {expected}, and this part begins elsewhere. Send the part that \
         begins there, or begin anew at 0"
    )]
    UploadOffset { expected: u64 },
    #[error("the upload is larger than may be stored, and was given up")]
    UploadTooLarge,
    #[error(
        "{limit} uploads are unfinished already. Finish one, or wait an hour until they are \
         forgotten"
    )]
    TooManyUploads { limit: usize },
    #[error("a cell is running in `{id}`; wait for it or interrupt it, then {then}")]
    CellRunning { id: SessionId, then: Retry },
    #[error("`{id}` is busy with a file, a fork or a restart; wait for it, then {then}")]
    Occupied { id: SessionId, then: Retry },
    #[error("{count} forks were asked for; between 1 and {MOST_FORKS} can be made at once")]
    ForkCount { count: usize },
    #[error(
        "no session was forked, because the name `{id}` is in use. Choose another name, or close \
         that session first"
    )]
    NameTaken { id: SessionId },
    #[error("`{id}` could not be copied: {why}. It goes on as before")]
    CannotCopy { id: SessionId, why: String },
    #[error("undo is switched off on this server, so no earlier state of `{id}` was kept")]
    UndoOff { id: SessionId },
    #[error("{}", nothing_to_undo(.id, *.cells, .possible, .why))]
    NothingToUndo {
        id: SessionId,
        /// The number of cells that the call asked to undo.
        cells: u32,
        /// The numbers of cells that can be undone.
        possible: Vec<u32>,
        /// Why earlier states could not be kept, if known.
        why: Option<String>,
    },
    #[error("nothing was explored: {why}")]
    Explore { why: String },
    #[error(
        "packages cannot be installed on this server; sessions have what its environment holds"
    )]
    NoPackages,
    #[error("{0}")]
    Install(install::InstallError),
    #[error("nothing was done yet: a person must allow it first, because of {}", .asked.line)]
    Ask {
        session: SessionId,
        asked: Box<Asked>,
    },
    #[error("{text}")]
    NotApproved { text: String, ruling: Box<Ruling> },
    #[error("the packages could not be added to the session: {why}")]
    NotAdded { why: String },
    #[error(
        "the session's network was not changed: `{rule}` goes beyond what this server allows. Ask \
         for less, or have the operator allow it"
    )]
    BeyondRules { rule: String },
    #[error("other MCP servers cannot be used on this server")]
    NoServers,
    #[error("{why}")]
    Server { why: String },
    #[error("the approvals were not taken over: {why}")]
    Approvals { why: String },
    #[error(
        "the session has no MCP server or tool `{name}`, so no fork of it can have it; \
         `list_mcp_servers` names those that are registered"
    )]
    NoServer { name: String },
    #[error(
        "nothing was executed, because the server cannot record what is done. Try again later; its \
         operator has been told"
    )]
    NotRecorded,
    #[error("the server is shutting down; no new requests are accepted")]
    ShuttingDown,
    #[error("the server is ending, and this session with it: what runs in it is stopped, and \
             {}", lost_with_server(*.files_kept))]
    EndsWithServer {
        /// The working folder belongs to the operator.
        files_kept: bool,
    },
}

fn lost_with_server(files_kept: bool) -> &'static str {
    match files_kept {
        true => "its variables are lost; files in the working folder are kept",
        false => "its variables and files are lost",
    }
}

/// Returns the hint that a failed preparation is retried.
fn next_attempt(error: &LaunchError) -> &'static str {
    match error {
        LaunchError::Preparation { .. } => {
            "\nNothing was executed. The server prepares Python again by itself and with the next \
             call; if this stays, its \
             operator must act"
        }
        _ => "",
    }
}

fn unanswered(sent: bool) -> &'static str {
    match sent {
        true => {
            "Whether this was carried out is not known, and nothing is known to be lost. Try again \
             in a moment; `check_execution` \
             tells what became of a cell"
        }
        false => "Nothing of this was carried out. Try again in a moment",
    }
}

/// Returns the instructions for continuing with a session that ended.
fn way_back(id: &SessionId, undo: bool) -> String {
    if undo {
        format!(
            "Call `undo` with session_id `{id}` to bring back its last kept state, or `reset` to \
             start it anew"
        )
    } else {
        format!("Call `reset` with session_id `{id}` to start it anew")
    }
}

fn nothing_to_undo(id: &SessionId, cells: u32, possible: &[u32], why: &Option<String>) -> String {
    let why = why
        .as_ref()
        .map(|why| format!(" ({why})"))
        .unwrap_or_default();
    let plural = |cells: u32| {
        if cells == 1 {
            "1 cell".to_owned()
        } else {
            format!("{cells} cells")
        }
    };
    let gapless = possible
        .iter()
        .zip(1..)
        .all(|(number, place)| *number == place);
    match possible.last() {
        None => format!("nothing in `{id}` can be undone: no earlier state of it is kept{why}"),
        Some(most) if gapless => {
            format!(
                "{} of `{id}` cannot be undone; at most {} can{why}",
                plural(cells),
                plural(*most)
            )
        }
        Some(_) => {
            let numbers = possible
                .iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(", ");
            format!(
                "{} of `{id}` cannot be undone{why}. These numbers of cells can: {numbers}",
                plural(cells)
            )
        }
    }
}

fn too_many(limit: usize, own: usize, oldest_idle: &[SessionId]) -> String {
    let names = oldest_idle
        .iter()
        .map(|id| format!("`{id}`"))
        .collect::<Vec<_>>()
        .join(", ");
    let cure = match own {
        0 => "None of them is yours: try again later, or ask the server's operator to raise \
              `max_sessions`"
            .to_owned(),
        _ if names.is_empty() => format!(
            "{own} of them are yours, and none of yours is idle: wait for a running cell to \
             finish, then close its session with `close_session`"
        ),
        _ => format!(
            "Close one with `close_session` (idle the longest: {names}), or go on in an \
                      existing session"
        ),
    };
    format!(
        "no new session was created, because {limit} sessions exist on this server and no more are \
         allowed. {cure}"
    )
}

fn file_trouble(reason: FileFailure, detail: &str) -> String {
    let what = match reason {
        FileFailure::Missing => "there is no such file in the working folder",
        FileFailure::NotAFile => "it is not a regular file, and only regular files can be copied",
        // The runner's detail repeats this reason.
        FileFailure::Exists => {
            return "it exists already. Choose another name, or give `overwrite: true`".to_owned();
        }
        FileFailure::Outside => {
            "the path leads out of the working folder, and links are not followed"
        }
        FileFailure::TooLarge => "the file is larger than may be copied",
        FileFailure::NoSpace => {
            "the working folder has no space left. Delete some files and try again"
        }
        FileFailure::Denied => "the session may not access this file",
        FileFailure::Other => "the file could not be copied",
    };
    if detail.is_empty() {
        what.to_owned()
    } else {
        format!("{what} ({detail})")
    }
}
