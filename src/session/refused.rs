//! Refusals: why a request to a session was not carried out.
//!
//! A refusal states facts: what happened, and what is lost. Callers act on it through different
//! interfaces, so what they can do about it is a value, [`Remedy`]; a front words it with the
//! names of its own tools.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    ApprovalRequest, InsidePath, MAX_CODE_BYTES, MAX_FORKS, Quota, Ruling, SessionId, install,
};
use crate::runner_client::FileFailure;
use crate::sandbox::LaunchError;

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

/// What a caller can do about a refusal or a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remedy {
    /// Run a cell, which creates the session.
    RunCell,
    ListSessions,
    CloseSession,
    /// Start the session's interpreter anew.
    Reset,
    /// Restore the last kept state of the session.
    Undo,
    /// List the states that can be restored.
    ListCheckpoints,
    /// Ask what became of an execution.
    CheckExecution,
    UseAnotherSession,
    /// Choose another name for the file, or allow that it is replaced.
    OverwriteFile,
    DeleteFiles,
    ListServers,
}

/// Reason why a request to a session was not carried out. The request had no effect unless the text
/// says so.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
pub enum Refused {
    #[error("there is no session `{id}`")]
    Unknown { id: SessionId },
    #[error("this session ended because {why}")]
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
         long ago"
    )]
    UnknownExecution,
    #[error("{}", too_many(*.limit, *.own))]
    TooManySessions {
        limit: usize,
        /// How many of them belong to the caller.
        own: usize,
        /// Those of the caller that could be closed with the least loss.
        oldest_idle: Vec<SessionId>,
    },
    #[error("{}", quota_used_up(*.which, *.limit, *.used, *.retry_after))]
    Quota {
        which: Quota,
        limit: u64,
        used: u64,
        /// When capacity becomes available again, if that only takes time.
        retry_after: Option<Duration>,
    },
    #[error(
        "{waiting} requests are already waiting for this session. Wait for some of them to finish"
    )]
    Busy { waiting: usize },
    #[error(
        "the server is too busy: {waiting} cells already wait for a place to run. This one has not \
         run; try again in {} s",
        .retry_after.as_secs().max(1)
    )]
    Overloaded {
        waiting: usize,
        retry_after: Duration,
    },
    #[error(
        "the code has {size} bytes and at most {MAX_CODE_BYTES} are accepted. Upload the data as a \
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
    #[error("{count} forks were asked for; between 1 and {MAX_FORKS} can be made at once")]
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
    ApprovalNeeded {
        session: SessionId,
        asked: Box<ApprovalRequest>,
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
    #[error("the session has no MCP server or tool `{name}`, so no fork of it can have it")]
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

impl Refused {
    /// Returns what the caller can do about it with other requests, the most useful first. What
    /// the text itself says, such as to try again later, is not repeated here.
    pub fn remedies(&self) -> &'static [Remedy] {
        use Remedy::*;
        match self {
            Refused::Unknown { .. } => &[RunCell, ListSessions],
            Refused::Ended { undo: true, .. } => &[Undo, Reset],
            Refused::Ended { undo: false, .. } => &[Reset],
            Refused::Unresponsive { sent: true } => &[CheckExecution],
            Refused::UnknownExecution => &[ListSessions],
            Refused::TooManySessions { own: 0, .. } => &[],
            Refused::TooManySessions { oldest_idle, .. } if oldest_idle.is_empty() => {
                &[CloseSession]
            }
            Refused::TooManySessions { .. } => &[CloseSession, UseAnotherSession],
            Refused::Quota {
                which,
                retry_after: None,
                ..
            } => match which {
                Quota::Sessions => &[CloseSession, UseAnotherSession],
                Quota::Memory => &[CloseSession, Reset],
                Quota::Stored => &[DeleteFiles, CloseSession],
                Quota::ProcessorTime | Quota::CellsPerMinute | Quota::StartsPerMinute => &[],
            },
            Refused::Busy { .. } => &[UseAnotherSession],
            Refused::File {
                reason: FileFailure::Exists,
                ..
            } => &[OverwriteFile],
            Refused::NoServer { .. } => &[ListServers],
            _ => &[],
        }
    }
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
             in a moment"
        }
        false => "Nothing of this was carried out. Try again in a moment",
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

fn too_many(limit: usize, own: usize) -> String {
    let others = match own {
        0 => {
            ". None of them is yours: try again later, or ask the server's operator to raise \
             `max_sessions`"
        }
        _ => "",
    };
    format!(
        "no new session was created, because {limit} sessions exist on this server and no more are \
         allowed{others}"
    )
}

fn quota_used_up(quota: Quota, limit: u64, used: u64, retry_after: Option<Duration>) -> String {
    let mebibytes = |bytes: u64| bytes.div_ceil(1024 * 1024);
    let what = match quota {
        Quota::Sessions => format!("you have {used} sessions, and {limit} are allowed"),
        Quota::Memory => format!(
            "your sessions hold {} MiB of memory, and {} are allowed",
            mebibytes(used),
            limit / (1024 * 1024)
        ),
        Quota::ProcessorTime => {
            format!("your cells have used {used} s of processor time, and {limit} s are allowed")
        }
        Quota::CellsPerMinute => {
            format!("you have run {used} cells in the last minute, and {limit} are allowed")
        }
        Quota::StartsPerMinute => {
            format!("you have started {used} sandboxes in the last minute, and {limit} are allowed")
        }
        Quota::Stored => format!(
            "{} MiB of your files and outputs are stored, and {} are allowed",
            mebibytes(used),
            limit / (1024 * 1024)
        ),
    };
    let then = match (quota, retry_after) {
        (_, Some(wait)) => format!(". Try again in {} s", wait.as_secs() + 1),
        (Quota::Sessions | Quota::Memory | Quota::Stored, None) => String::new(),
        (_, None) => ". Ask for fewer at once".to_owned(),
    };
    format!("nothing was done, because a quota is used up: {what}{then}")
}

fn file_trouble(reason: FileFailure, detail: &str) -> String {
    let what = match reason {
        FileFailure::Missing => "there is no such file in the working folder",
        FileFailure::NotAFile => "it is not a regular file, and only regular files can be copied",
        // The runner's detail repeats this reason.
        FileFailure::Exists => {
            return "it exists already".to_owned();
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
