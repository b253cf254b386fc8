//! What one execution gave: the vocabulary between sessions and whoever shows results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Others;
use super::tools::ToolCalls;
use crate::sandbox::{Blocked, Exit, Isolation, MemoryUse};

/// Everything about one finished execution.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// Names the execution within this server; the full output is found by it.
    pub execution: ExecutionId,
    pub status: Status,
    /// Text, values and rich output in the order in which they were produced.
    pub output: Output,
    pub duration: Duration,
    pub memory: MemoryUse,
    /// Processor time of everything in the sandbox while it ran, as the kernel counts it.
    pub processor_time: Duration,
    /// As the runner claims; `None` when it could not say (it died, or was killed).
    pub variables: Option<VariableChanges>,
    /// As the runner claims; `None` when it could not say or there are too many files to follow.
    pub files: Option<FileChanges>,
    pub isolation: Isolation,
    /// How many cells of the session can be taken back, this one included, when the outcome is told.
    pub can_undo: u32,
    /// Connections that were refused since the execution before.
    #[serde(with = "super::serial::blocked")]
    pub blocked: Vec<Blocked>,
    /// Tools of other MCP servers that it called.
    pub tool_calls: ToolCalls,
    /// What was decided about its wishes without a person: denied by the policy, or because nobody could be asked or answered.
    #[serde(default)]
    pub rulings: Vec<super::Ruling>,
    /// Sentences the reader must know, such as "this is a new session".
    pub notes: Vec<String>,
    /// The first line of its code.
    #[serde(default)]
    pub first_line: String,
    /// What else the session has to tell, when the outcome is told.
    #[serde(default)]
    pub others: Others,
}

#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct ExecutionId(pub u64);

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Status {
    Completed,
    /// The user's code raised; that is not an error of ours.
    Raised(PythonError),
    TimedOut {
        limit: Duration,
        state: StateAfter,
    },
    Cancelled {
        state: StateAfter,
    },
    /// The interpreter ended under the code.
    Died {
        exit: Exit,
    },
    /// The runner said something that is no frame; the interpreter was ended.
    Nonsense {
        what: String,
    },
    /// Somebody reset the session under the code: variables are gone, files are kept.
    Reset,
    /// The session was closed under the code, or the server is ending: variables and files are gone.
    Closed,
}

impl Status {
    /// The word used in structured results.
    pub fn name(&self) -> &'static str {
        match self {
            Status::Completed => "ok",
            Status::Raised(_) => "error",
            Status::TimedOut { .. } => "timeout",
            Status::Cancelled { .. } => "cancelled",
            Status::Died {
                exit: Exit::OutOfMemory { .. } | Exit::OutOfMemoryOutside { .. },
            } => "out_of_memory",
            Status::Died { .. } => "died",
            Status::Nonsense { .. } => "protocol_error",
            Status::Reset => "reset",
            Status::Closed => "closed",
        }
    }
}

/// What became of the variables after an execution was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StateAfter {
    Kept,
    /// The code ignored the interrupt and the interpreter was killed. Files are kept.
    Lost,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonError {
    pub name: String,
    pub message: String,
    pub traceback: String,
    pub line: Option<u32>,
}

/// Output in true order, already bounded.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Output {
    pub parts: Vec<Part>,
    /// Characters of text produced in all, including what was cut.
    pub total_chars: u64,
    /// Lines of text produced in all.
    pub total_lines: u64,
    /// Characters that were cut between head and tail; zero when nothing was.
    pub cut_chars: u64,
    /// What code of earlier cells has printed since the last result: threads, tasks, processes.
    #[serde(default)]
    pub late: Option<LateOutput>,
}

/// Text of earlier code, the newest part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateOutput {
    pub text: String,
    /// Older characters that were dropped.
    pub omitted: u64,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Part {
    Text {
        stream: Stream,
        text: String,
    },
    /// Where text was cut.
    Cut {
        chars: u64,
        lines: u64,
    },
    Image(Image),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stream {
    Stdout,
    Stderr,
    /// The value of the last expression.
    Value,
    /// Rich output as text.
    Display,
    /// The traceback of an error.
    Traceback,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// `image/png` or `image/jpeg`.
    #[serde(with = "super::serial::word")]
    pub mime: super::Word,
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    pub width: u32,
    pub height: u32,
    /// The size before it was scaled down, when it was.
    pub scaled_from: Option<(u32, u32)>,
    /// How many pictures the animation has of which this is the first, if it is one.
    pub frames: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VariableChanges {
    pub created: Vec<Variable>,
    pub changed: Vec<Variable>,
    pub deleted: Vec<String>,
    pub omitted: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variable {
    pub name: String,
    pub kind: String,
    pub shape: Option<String>,
    pub size: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChanges {
    pub created: Vec<FileNote>,
    pub changed: Vec<FileNote>,
    pub deleted: Vec<String>,
    pub omitted: u64,
}

/// Files below a session's working folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileList {
    /// In the order of their paths, at most 1,000.
    pub files: Vec<FileNote>,
    /// Files that are there, at least, and are not listed.
    pub omitted: u64,
}

/// A part of a file that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// Bytes of the whole file.
    pub total: u64,
    /// Bytes of this part. Fewer than were asked for when the file ends there, or when the part was larger than is sent at once.
    pub sent: u64,
    /// Another text when the file has changed. As the session claims.
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileNote {
    pub path: String,
    pub size: u64,
}
