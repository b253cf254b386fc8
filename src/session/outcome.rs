//! The outcome of one execution: types shared by sessions and the code that renders results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::tools::ToolCalls;
use super::{Others, Remedy};
use crate::sandbox::{Blocked, Exit, Isolation, MemoryUse};

/// Everything about one finished execution.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// Id of the execution within this server; also the key of the full output.
    pub execution: ExecutionId,
    pub status: Status,
    /// Text, values and rich output in the order in which they were produced.
    pub output: Output,
    pub duration: Duration,
    pub memory: MemoryUse,
    /// Processor time of all processes in the sandbox during the execution, measured by the kernel.
    pub processor_time: Duration,
    /// Claimed by the runner; `None` if it did not report it (it died, or was killed).
    pub variables: Option<VariableChanges>,
    /// Claimed by the runner; `None` if it did not report it or there are too many files to track.
    pub files: Option<FileChanges>,
    pub isolation: Isolation,
    /// Number of cells of the session that can be undone when the outcome is reported, this one
    /// included.
    pub can_undo: u32,
    /// Connections that were refused since the previous execution.
    #[serde(with = "super::serial::blocked")]
    pub blocked: Vec<Blocked>,
    /// Tools of other MCP servers that it called.
    pub tool_calls: ToolCalls,
    /// Decisions about its actions made without a person: denied by the policy, or because no
    /// person could be asked or none answered.
    #[serde(default)]
    pub rulings: Vec<super::Ruling>,
    /// Notes for the reader, such as "this is a new session".
    pub notes: Vec<OutcomeNote>,
    /// The first line of its code.
    #[serde(default)]
    pub first_line: String,
    /// The session's other executions when the outcome is reported.
    #[serde(default)]
    pub others: Others,
}

/// A note about the session in the outcome of a cell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeNote {
    /// Sentences that state facts.
    pub text: String,
    /// What the caller can do about it. A front words it with the names of its tools.
    #[serde(default)]
    pub remedy: Option<Remedy>,
}

impl From<String> for OutcomeNote {
    fn from(text: String) -> OutcomeNote {
        OutcomeNote { text, remedy: None }
    }
}

#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct ExecutionId(pub u64);

/// Data that can be kept in full for an execution, in addition to its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputId {
    pub execution: ExecutionId,
    pub part: OutputPart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OutputPart {
    /// All text output.
    Text,
    /// The JSON of a figure, counted from 1.
    Figure(u32),
}

impl From<ExecutionId> for OutputId {
    fn from(execution: ExecutionId) -> OutputId {
        OutputId {
            execution,
            part: OutputPart::Text,
        }
    }
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Status {
    Completed,
    /// The user's code raised an exception, which is not an error of ours.
    Raised(PythonError),
    TimedOut {
        limit: Duration,
        state: StateAfter,
    },
    Cancelled {
        state: StateAfter,
    },
    /// The interpreter ended while the code ran.
    Died {
        exit: Exit,
    },
    /// The runner sent an invalid frame; the interpreter was killed.
    ProtocolError {
        what: String,
    },
    /// The session was reset while the code ran: variables are gone, files are kept.
    Reset,
    /// The session was closed while the code ran, or the server is ending: variables and files are
    /// gone.
    Closed,
}

impl Status {
    pub fn kind(&self) -> StatusKind {
        match self {
            Status::Completed => StatusKind::Completed,
            Status::Raised(_) => StatusKind::Raised,
            Status::TimedOut { .. } => StatusKind::TimedOut,
            Status::Cancelled { .. } => StatusKind::Cancelled,
            Status::Died {
                exit: Exit::OutOfMemory { .. } | Exit::OutOfMemoryOutside { .. },
            } => StatusKind::OutOfMemory,
            Status::Died { .. } => StatusKind::Died,
            Status::ProtocolError { .. } => StatusKind::ProtocolError,
            Status::Reset => StatusKind::Reset,
            Status::Closed => StatusKind::Closed,
        }
    }

    /// Returns the word used in structured results.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }
}

/// How an execution ended, without its details.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusKind {
    Completed,
    Raised,
    TimedOut,
    Cancelled,
    OutOfMemory,
    Died,
    ProtocolError,
    Reset,
    Closed,
}

impl StatusKind {
    /// Returns the word used in structured results, audit records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            StatusKind::Completed => "ok",
            StatusKind::Raised => "error",
            StatusKind::TimedOut => "timeout",
            StatusKind::Cancelled => "cancelled",
            StatusKind::OutOfMemory => "out_of_memory",
            StatusKind::Died => "died",
            StatusKind::ProtocolError => "protocol_error",
            StatusKind::Reset => "reset",
            StatusKind::Closed => "closed",
        }
    }
}

/// State of the variables after an execution was stopped.
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

/// Output in the order in which it was produced, already bounded.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Output {
    pub parts: Vec<Part>,
    /// Total number of characters of text, including text that was cut.
    pub total_chars: u64,
    /// Total number of lines of text.
    pub total_lines: u64,
    /// Characters that were cut between head and tail; zero if none were.
    pub cut_chars: u64,
    /// Figures whose JSON is kept, see `OutputPart::Figure`.
    #[serde(default)]
    pub figures: u32,
    /// Output of code of earlier cells since the last result: threads, tasks, processes.
    #[serde(default)]
    pub late: Option<LateOutput>,
}

/// The newest part of late output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateOutput {
    pub text: String,
    /// Older characters that were dropped.
    pub omitted: u64,
}

/// An item of output.
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

/// Encoding of an image. Other encodings are converted to one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageType {
    Png,
    Jpeg,
}

impl ImageType {
    pub fn mime(self) -> &'static str {
        match self {
            ImageType::Png => "image/png",
            ImageType::Jpeg => "image/jpeg",
        }
    }

    /// Returns the file name extension.
    pub fn extension(self) -> &'static str {
        match self {
            ImageType::Png => "png",
            ImageType::Jpeg => "jpeg",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Image {
    pub kind: ImageType,
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    pub width: u32,
    pub height: u32,
    /// The size before scaling, if it was scaled down.
    pub scaled_from: Option<(u32, u32)>,
    /// Number of frames of the animation, if this is the first frame of one.
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
    /// Lower bound of the number of files that are not listed.
    pub omitted: u64,
}

/// A part of a file that was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// Bytes of the whole file.
    pub total: u64,
    /// Bytes of this part. Fewer than requested if the file ends there, or if the part exceeds the
    /// limit of one call.
    pub sent: u64,
    /// A text that differs when the file has changed. Claimed by the session.
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileNote {
    pub path: String,
    pub size: u64,
}
