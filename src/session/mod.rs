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
//! pick its execution up again from the execution registry (`executions`). `accounts` tracks usage
//! per principal, `scheduler` decides which cell runs next. `state` decides, `driver` acts,
//! `output` collects a cell's output within limits.
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
mod driver;
mod executions;
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
mod refused;
mod rich;
mod scheduler;
mod serial;
pub mod servers;
pub mod shell;
mod spool;
mod state;
mod terminal;
#[cfg(test)]
mod tests;
pub mod tools;
mod underway;
mod uploads;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use crate::ops::ProgressChannel;
use crate::sandbox::Rules;
pub use accounts::{LimitSetup, Quota, Quotas, Usage};
pub use approvals::{
    ApprovalId, ApprovalRequest, ApprovalSetup, Approvals, Approver, DecideReport, DecidedBy,
    Decision, InForce, Ruling,
};
pub use branch::*;
pub use hidden::Hidden;
pub use host::{Load, Slice};
pub(crate) use ledger::Attached;
pub use ledger::{ExecutionEnded, Ledger, RecordEnding, RecorderId};
pub use manager::Sessions;
pub use outcome::*;
pub use refused::{Refused, Remedy, Retry};
pub use spool::FullOutput;
pub use underway::*;
pub use uploads::{UploadPart, Uploaded};

/// Code longer than this is refused. A cell is typed or generated text; data belongs in a file.
pub const MAX_CODE_BYTES: usize = 8 * 1024 * 1024;

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
    pub undo: UndoPolicy,
    /// Variants of one exploration that run concurrently, at least one.
    pub explore_parallel: usize,
    /// Memory limit of a sandbox in bytes, if there is one. Old copies are discarded before it is
    /// reached.
    pub memory_limit: Option<u64>,
    pub packages: install::PackageSource,
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
            undo: UndoPolicy::default(),
            explore_parallel: 4,
            memory_limit: None,
            packages: install::PackageSource::default(),
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
    pub asking: Approver,
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
pub struct SessionSummary {
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
