//! Sessions: Python state that outlives a call.
//!
//!     Starting → Idle ⇄ (Waiting →) Running         Idle ⇄ Copying                 (for a later undo, or for forks)
//!                  ↘     ↙
//!                   Ended → (reset) → Starting                         (the sandbox and its files outlive the interpreter)
//!                     ↓  ↘ (undo) → Replacing → Idle                   (an undo begins in Idle too)
//!                    Gone                                              (expired, closed, or the sandbox itself was lost)
//!
//! Each session has one task, the driver, and only the driver changes its state. Everyone else goes through `Sessions`, which finds,
//! creates and limits them. Who goes away finds its execution on the `docket`. `accounts` knows who uses how much, `turns` whose cell runs next. `state` decides, `driver` acts, `output` gathers what a cell prints within bounds.
//!
//! A session can branch. Before a cell changes its state, the state is copied (`history` knows which copy precedes which cell): `undo`
//! puts a copy in the session's place. A fork is a copy in a sandbox of its own, and from then on a session like any other; `explore`
//! tries several cells in forks that nobody else sees.
//!
//! A session does not know which backend it runs on. A session that lost its state says so until somebody resets it; it is never
//! replaced in silence.

mod access;
mod accounts;
#[cfg(test)]
mod approval_behaviour;
mod approvals;
#[cfg(test)]
mod behaviour;
mod branch;
#[cfg(test)]
mod branching_behaviour;
mod docket;
mod driver;
mod explore;
#[cfg(test)]
mod file_behaviour;
mod follow;
#[cfg(test)]
mod following_behaviour;
mod hidden;
mod history;
mod html;
mod images;
pub mod install;
mod kept_outputs;
mod late;
mod ledger;
mod manager;
mod outcome;
mod output;
#[cfg(test)]
mod quota_behaviour;
mod rich;
mod serial;
pub mod servers;
pub mod shell;
#[cfg(test)]
mod shell_behaviour;
mod spool;
mod state;
mod terminal;
#[cfg(test)]
mod tool_behaviour;
pub mod tools;
#[cfg(test)]
mod turn_behaviour;
mod turns;
mod underway;
mod uploads;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::runner_client::Trouble;
use crate::sandbox::{LaunchError, Rules};
pub use access::{Load, News, SessionAccess, Slice};
pub use accounts::{LimitSetup, Quota, Quotas, Usage};
pub use approvals::{
    ApprovalSetup, Approvals, AskId, Asked, Asking, Decided, DecidedBy, Decision, InForce, Ruling,
};
pub use branch::*;
pub use hidden::Hidden;
pub(crate) use ledger::Attached;
pub use ledger::{ExecutionEnded, Ledger, RecordEnding, RecorderId};
pub use manager::Sessions;
pub use outcome::*;
pub use serial::Word;
pub use spool::FullOutput;
pub use underway::*;
pub use uploads::{UploadPart, Uploaded};

/// Code longer than this is refused. A cell is typed or generated text; data belongs in a file.
pub const LARGEST_CODE: usize = 8 * 1024 * 1024;

/// Whose session it is. Ids belong to their owner: two owners' `a` are two sessions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Principal(pub String);

impl Principal {
    /// The one caller of a stdio server.
    pub fn local() -> Principal {
        Principal("local".to_owned())
    }
}

/// A session's name: 1 to 64 of letters, digits, `_`, `.` and `-`; never `.` or `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct SessionId(String);

impl SessionId {
    /// The name of the session that is meant when none is named.
    pub const DEFAULT: &str = "default";

    /// The session that callers mean who name none.
    pub fn default_session() -> SessionId {
        SessionId(SessionId::DEFAULT.to_owned())
    }

    /// Without the letters that are taken for digits.
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    const RANDOM_LETTERS: usize = 26;

    /// A name that nobody else has and nobody can guess: 130 random bits. For callers who name none and share a server with others.
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

    /// Tells whether a name has the form of those that `random` makes.
    pub fn looks_generated(&self) -> bool {
        let is_of_alphabet = |byte: u8| SessionId::ALPHABET.contains(&byte);
        let letters = self.0.strip_prefix("s-").map(str::as_bytes);
        letters.is_some_and(|letters| {
            letters.len() == SessionId::RANDOM_LETTERS
                && letters.iter().copied().all(is_of_alphabet)
        })
    }

    /// What sessions are called in the log that nobody can name.
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

/// A text that cannot name a session. The text itself is not repeated, because it may hold control characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session id is 1 to 64 letters, digits, `_`, `.` or `-`, and not `.` or `..`")]
pub struct BadSessionId;

/// A path below a session's working folder, checked for form only: relative, no `..`, no control characters, parts of at most 255 bytes.
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

/// Why a text cannot be a path below the working folder.
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

/// What the working folder of a session is. Sandboxes have it mounted; here it is only told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkFolder {
    /// Each session has its own, which ends with it.
    Private,
    /// A folder of the operator that all sessions share and that outlives them.
    Shared,
}

#[derive(Debug, Clone)]
pub struct SessionSettings {
    pub work_folder: WorkFolder,
    pub max_sessions: usize,
    pub idle_timeout: Duration,
    /// How long code may ignore an interrupt before it is killed. Time in which it waits for a
    /// processor does not count, up to nine times as much.
    pub grace: Duration,
    pub undo: Undo,
    /// Variants of one exploration that run at the same time, at least one.
    pub explore_parallel: usize,
    /// Bytes of memory a sandbox may hold, where that is limited. Old copies are given up before it is reached.
    pub memory_limit: Option<u64>,
    pub packages: install::Source,
    pub approvals: InForce,
    pub tools: tools::Tools,
    /// What one principal may use.
    pub quotas: Quotas,
    /// Cells that run at once in the whole server; zero is no limit. Others wait, and principals take turns.
    pub max_running: usize,
}

impl Default for SessionSettings {
    fn default() -> SessionSettings {
        SessionSettings {
            work_folder: WorkFolder::Private,
            max_sessions: 20,
            idle_timeout: Duration::from_secs(3600),
            grace: Duration::from_millis(1500),
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
    /// Counted from the moment the code starts, not while it waits for its turn.
    pub timeout: Duration,
    pub max_output_chars: usize,
    /// Whether a person can be asked what the code may do.
    #[serde(default)]
    pub asking: Asking,
    /// What the session may reach from this cell on, within what the operator allows. Applied when
    /// the cell starts.
    #[serde(default, with = "serial::optional_rules")]
    pub rules: Option<Rules>,
    /// Who records how it ended.
    #[serde(skip)]
    pub recorder: RecorderId,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SessionInfo {
    pub id: SessionId,
    /// `starting`, `idle`, `waiting`, `running`, `ended`.
    #[serde(with = "serial::word")]
    pub state: Word,
    /// Why it ended, when it did.
    pub ended: Option<String>,
    pub executions: u64,
    pub age: Duration,
    pub idle: Duration,
    /// As last measured: at the end of an execution.
    pub memory: Option<u64>,
    /// What it can reach.
    #[serde(with = "serial::rules")]
    pub rules: Rules,
    /// Requirements that were installed into it by a call, or found to be there already.
    #[serde(default)]
    pub requested: Vec<String>,
}

/// A session and whose it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resident {
    pub owner: Principal,
    pub id: SessionId,
    /// Code runs in it, or waits for its turn.
    pub running: bool,
}

/// What a reset did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetReport {
    pub interrupted_running_cell: bool,
    pub files_kept: bool,
    /// Nothing was started, because there was no session: the next cell makes one.
    #[serde(default)]
    pub had_no_session: bool,
}

/// Why a request to a session was not carried out. Nothing of the request has happened unless the text says so.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
pub enum Refused {
    #[error(
        "there is no session `{id}`. Run a cell with this session_id to create it, or use `list_sessions` to see the existing ones"
    )]
    Unknown { id: SessionId },
    #[error("this session ended because {why}. {}", way_back(.id, *.undo))]
    Ended {
        id: SessionId,
        why: String,
        /// Whether its earlier state can be brought back.
        undo: bool,
    },
    #[error("the process that keeps the sessions does not answer at present. {}", unanswered(*.sent))]
    Unresponsive {
        /// The request was sent before that was noticed, so that it may have been carried out.
        sent: bool,
    },
    #[error(
        "there is no such execution. It is not known here, its session is gone, or it ended too long ago; `list_sessions` shows the sessions that exist"
    )]
    UnknownExecution,
    #[error("{}", too_many(*.limit, *.own, .oldest_idle))]
    TooManySessions {
        limit: usize,
        /// Sessions of the caller among them.
        own: usize,
        oldest_idle: Vec<SessionId>,
    },
    #[error("{}", accounts::Told { which, limit: *limit, used: *used, retry_after: *retry_after })]
    Quota {
        which: Quota,
        limit: u64,
        used: u64,
        /// When there will be room again, where time alone makes room.
        retry_after: Option<Duration>,
    },
    #[error(
        "{waiting} requests are already waiting for this session. Wait for some of them to finish, or use another session_id"
    )]
    Busy { waiting: usize },
    #[error(
        "the server is too busy: {waiting} cells already wait for a place to run. This one has not run; try again in {} s",
        .retry_after.as_secs().max(1)
    )]
    Crowded {
        waiting: usize,
        retry_after: Duration,
    },
    #[error(
        "the code has {size} bytes and at most {LARGEST_CODE} are accepted. Upload the data as a file and read it from a short cell"
    )]
    CodeTooLarge { size: usize },
    #[error("no Python could be started: {}{}", .0, next_attempt(.0))]
    Launch(#[from] LaunchError),
    #[error("the request was cancelled while it waited for its turn. It has not run")]
    CancelledWhileWaiting,
    #[error(
        "the session was reset while this request waited for its turn. It has not run; send it again if it is still wanted"
    )]
    ResetWhileWaiting,
    #[error("the session was closed while this request waited for its turn. It has not run")]
    ClosedWhileWaiting,
    #[error(
        "the session was reset during the file transfer. Nothing can be said about the file; look at it before you rely on it"
    )]
    ResetDuringTransfer,
    #[error("`{path}`: {}", file_trouble(*.reason, .detail))]
    File {
        path: InsidePath,
        reason: Trouble,
        detail: String,
    },
    #[error("the file could not be read or stored on the server's side: {why}")]
    Transfer { why: String },
    #[error(
        "the upload stands at byte {expected}, and this part begins elsewhere. Send the part that begins there, or begin anew at 0"
    )]
    UploadOffset { expected: u64 },
    #[error("the upload is larger than may be stored, and was given up")]
    UploadTooLarge,
    #[error(
        "{limit} uploads are unfinished already. Finish one, or wait an hour until they are forgotten"
    )]
    TooManyUploads { limit: usize },
    #[error("a cell is running in `{id}`; wait for it or interrupt it, then {then}")]
    CellRunning {
        id: SessionId,
        #[serde(with = "serial::word")]
        then: Word,
    },
    #[error("`{id}` is busy with a file, a fork or a restart; wait for it, then {then}")]
    Occupied {
        id: SessionId,
        #[serde(with = "serial::word")]
        then: Word,
    },
    #[error("{count} forks were asked for; between 1 and {MOST_FORKS} can be made at once")]
    ForkCount { count: usize },
    #[error(
        "no session was forked, because the name `{id}` is in use. Choose another name, or close that session first"
    )]
    NameTaken { id: SessionId },
    #[error("`{id}` could not be copied: {why}. It goes on as before")]
    CannotCopy { id: SessionId, why: String },
    #[error("undo is switched off on this server, so no earlier state of `{id}` was kept")]
    UndoOff { id: SessionId },
    #[error("{}", nothing_to_undo(.id, *.cells, .possible, .why))]
    NothingToUndo {
        id: SessionId,
        /// As many as were asked for.
        cells: u32,
        /// The numbers of cells that can be undone.
        possible: Vec<u32>,
        /// Why earlier states could not be kept, when that is known.
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
        "the session's network was not changed: `{rule}` goes beyond what this server allows. Ask for less, or have the operator allow it"
    )]
    BeyondRules { rule: String },
    #[error("other MCP servers cannot be used on this server")]
    NoServers,
    #[error("{why}")]
    Server { why: String },
    #[error("the approvals were not taken over: {why}")]
    Approvals { why: String },
    #[error(
        "the session has no MCP server or tool `{name}`, so no fork of it can have it; `list_mcp_servers` names those that are registered"
    )]
    NoServer { name: String },
    #[error(
        "nothing was executed, because the server cannot record what is done. Try again later; its operator has been told"
    )]
    NotRecorded,
    #[error("the server is shutting down; no new requests are accepted")]
    ShuttingDown,
    #[error("the server is ending, and this session with it: what runs in it is stopped, and {}", lost_with_server(*.files_kept))]
    EndsWithServer {
        /// The working folder is the operator's.
        files_kept: bool,
    },
}

fn lost_with_server(files_kept: bool) -> &'static str {
    match files_kept {
        true => "its variables are lost; files in the working folder are kept",
        false => "its variables and files are lost",
    }
}

/// Says that a preparation that failed is tried again.
fn next_attempt(error: &LaunchError) -> &'static str {
    match error {
        LaunchError::Preparation { .. } => {
            "\nNothing was executed. The server prepares Python again by itself and with the next call; if this stays, its \
             operator must act"
        }
        _ => "",
    }
}

fn unanswered(sent: bool) -> &'static str {
    match sent {
        true => {
            "Whether this was carried out is not known, and nothing is known to be lost. Try again in a moment; `check_execution` \
             tells what became of a cell"
        }
        false => "Nothing of this was carried out. Try again in a moment",
    }
}

/// Says how to go on with a session that ended.
fn way_back(id: &SessionId, undo: bool) -> String {
    if undo {
        format!(
            "Call `undo` with session_id `{id}` to bring back its last kept state, or `reset` to start it anew"
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
        0 => "None of them is yours: try again later, or ask the server's operator to raise `max_sessions`".to_owned(),
        _ if names.is_empty() => format!(
            "{own} of them are yours, and none of yours is idle: wait for a running cell to finish, then close its session with `close_session`"
        ),
        _ => format!("Close one with `close_session` (idle the longest: {names}), or go on in an existing session"),
    };
    format!(
        "no new session was created, because {limit} sessions exist on this server and no more are allowed. {cure}"
    )
}

fn file_trouble(reason: Trouble, detail: &str) -> String {
    let what = match reason {
        Trouble::Missing => "there is no such file in the working folder",
        Trouble::NotAFile => "it is not a regular file, and only regular files can be copied",
        // The detail says the same.
        Trouble::Exists => {
            return "it exists already. Choose another name, or give `overwrite: true`".to_owned();
        }
        Trouble::Outside => "the path leads out of the working folder, and links are not followed",
        Trouble::TooLarge => "the file is larger than may be copied",
        Trouble::NoSpace => "the working folder has no space left. Delete some files and try again",
        Trouble::Denied => "the session may not access this file",
        Trouble::Other => "the file could not be copied",
    };
    if detail.is_empty() {
        what.to_owned()
    } else {
        format!("{what} ({detail})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_ids_that_could_be_paths_or_are_unprintable_are_refused() {
        for good in ["a", "default", "A-1_b.c", "...", &"x".repeat(64)] {
            assert!(SessionId::from_str(good).is_ok(), "{good:?}");
        }
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "../a",
            "a b",
            "a\n",
            "a\0",
            "ä",
            &"x".repeat(65),
        ] {
            assert_eq!(SessionId::from_str(bad), Err(BadSessionId), "{bad:?}");
        }
    }

    #[test]
    fn a_random_session_id_is_a_name_like_any_other_and_comes_once() {
        let ids = (0..1000)
            .map(|_| SessionId::random())
            .collect::<std::collections::HashSet<_>>();
        assert_eq!(ids.len(), 1000);
        for id in ids {
            assert!(id.looks_generated());
            assert_eq!(
                (id.as_str().len(), SessionId::from_str(id.as_str()).unwrap()),
                (28, id)
            );
        }
        for chosen in [
            "default",
            "s-1",
            "s-0000000000000000000000000",
            "s-OOOOOOOOOOOOOOOOOOOOOOOOOO",
        ] {
            assert!(
                !SessionId::from_str(chosen).unwrap().looks_generated(),
                "{chosen}"
            );
        }
    }

    #[test]
    fn paths_stay_below_the_working_folder() {
        for good in ["a", "data/table.csv", "..a", "ä/ö", &"x".repeat(255)] {
            assert!(InsidePath::from_str(good).is_ok(), "{good:?}");
        }
        let cases = [
            ("", BadInsidePath::Empty),
            ("/etc/passwd", BadInsidePath::Absolute),
            ("a/../b", BadInsidePath::Parent),
            ("..", BadInsidePath::Parent),
            ("a//b", BadInsidePath::EmptyPart),
            ("a/", BadInsidePath::EmptyPart),
            ("./a", BadInsidePath::EmptyPart),
            ("a\nb", BadInsidePath::ControlCharacter),
            ("a\0", BadInsidePath::ControlCharacter),
        ];
        for (bad, why) in cases {
            assert_eq!(InsidePath::from_str(bad), Err(why), "{bad:?}");
        }
        assert_eq!(
            InsidePath::from_str(&"x".repeat(256)),
            Err(BadInsidePath::TooLong)
        );
        assert_eq!(
            InsidePath::from_str(&"x/".repeat(2100)),
            Err(BadInsidePath::TooLong)
        );
    }

    #[test]
    fn a_refused_undo_says_what_can_be_undone() {
        let id = SessionId::from_str("a").unwrap();
        let text = |possible: &[u32]| {
            let why = None;
            Refused::NothingToUndo {
                id: id.clone(),
                cells: 5,
                possible: possible.to_vec(),
                why,
            }
            .to_string()
        };
        assert_eq!(
            text(&[]),
            "nothing in `a` can be undone: no earlier state of it is kept"
        );
        assert_eq!(
            text(&[1, 2]),
            "5 cells of `a` cannot be undone; at most 2 cells can"
        );
        assert_eq!(
            text(&[1, 3]),
            "5 cells of `a` cannot be undone. These numbers of cells can: 1, 3"
        );
    }

    #[test]
    fn an_ended_session_offers_undo_only_when_there_is_something_to_go_back_to() {
        let text = |undo: bool| {
            Refused::Ended {
                id: SessionId::from_str("a").unwrap(),
                why: "it crashed".to_owned(),
                undo,
            }
            .to_string()
        };
        assert!(text(true).contains("`undo`") && text(true).contains("`reset`"));
        assert!(!text(false).contains("`undo`") && text(false).contains("`reset`"));
    }

    #[test]
    fn a_refusal_for_too_many_sessions_names_what_to_close() {
        let idle = vec![SessionId::from_str("old").unwrap()];
        let text = |own, oldest_idle| {
            Refused::TooManySessions {
                limit: 3,
                own,
                oldest_idle,
            }
            .to_string()
        };
        assert!(text(3, idle).contains("`old`"));
        assert!(text(2, vec![]).contains("2 of them are yours, and none of yours is idle"));
        let others = text(0, vec![]);
        assert!(
            others.contains("None of them is yours") && !others.contains("close_session"),
            "{others}"
        );
    }
}
