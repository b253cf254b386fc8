//! Forks, undo and exploration: types shared by sessions and the code that renders results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Outcome, RecorderId, Refused, SessionId};

/// Limit of forks per request.
pub const MAX_FORKS: u32 = 16;
/// Limit of variants per request.
pub const MAX_VARIANTS: usize = 16;

/// Whether cells can be undone, and how much is kept for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UndoPolicy {
    On {
        /// Number of copies kept per session, at least one. The oldest are dropped first.
        checkpoints: usize,
        /// Bytes of the working folder that are kept with a copy. If the folder holds more, an undo
        /// leaves files unchanged; with zero, always.
        files: u64,
    },
    /// No copies are made, and they have no cost.
    Off,
}

impl Default for UndoPolicy {
    fn default() -> UndoPolicy {
        UndoPolicy::On {
            checkpoints: 10,
            files: 64 * 1024 * 1024,
        }
    }
}

/// Names of forks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForkNames {
    /// A number of forks, named after the source: `<source>-1`, `<source>-2`, skipping names in
    /// use.
    Count(u32),
    Named(Vec<SessionId>),
}

/// Parameters of a fork request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkRequest {
    pub names: ForkNames,
    /// The subset of the source's tools that the forks may use: MCP servers by name, or some of
    /// their tools (`server.tool`, with `*` for any text). `None` means all of them.
    pub servers: Option<Vec<String>>,
}

impl From<ForkNames> for ForkRequest {
    fn from(names: ForkNames) -> ForkRequest {
        ForkRequest {
            names,
            servers: None,
        }
    }
}

/// Result of a fork request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkReport {
    pub forks: Vec<SessionId>,
    /// Parts of the source that the forks lack, as claimed by the runner: "2 threads", "1
    /// connection".
    pub lost: Vec<String>,
    pub files: FilesCarried,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// Treatment of the files, as claimed by the runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FilesCarried {
    /// Each fork has its own copy.
    Copied,
    /// They are as they were before the undone cells.
    Restored,
    /// All sessions share the working folder, so a fork sees the same files as its source.
    Shared,
    LeftAlone {
        why: String,
    },
}

/// Result of an undo.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoReport {
    /// Cells that were undone.
    pub undone: u32,
    /// The interpreter had ended and was restored.
    pub revived: bool,
    /// Parts of the earlier state that the session lacks, as claimed by the runner.
    pub lost: Vec<String>,
    pub files: FilesCarried,
    /// Remaining states that can be restored.
    pub left: Vec<CheckpointInfo>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// A state that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// The number of cells to undo to reach it.
    pub cells_back: u32,
    /// The first line of the cell that it precedes, at most 80 characters.
    pub before: String,
    /// How long ago it was kept.
    pub age: Duration,
}

/// Returns the largest number of cells that can be undone.
pub fn most_undone(checkpoints: &[CheckpointInfo]) -> u32 {
    checkpoints
        .iter()
        .map(|checkpoint| checkpoint.cells_back)
        .max()
        .unwrap_or(0)
}

/// Several cells to try, each in its own fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExploreRequest {
    pub variants: Vec<Variant>,
    /// Per variant, measured from the start of its code.
    pub timeout: Duration,
    /// Per variant.
    pub max_output_chars: usize,
    pub keep: Keep,
    /// The one kept variant replaces the source instead of becoming a session of its own.
    pub replace: bool,
    /// Receives the records of how the variants ended.
    #[serde(skip)]
    pub recorder: RecorderId,
}

/// One of the cells to try.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Unique among the variants.
    pub name: String,
    pub code: String,
}

/// Which forks become sessions when all variants have ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    Nothing,
    All,
    Named(String),
    /// The one for which this Python expression is largest.
    Best {
        by: String,
    },
}

/// Result of an exploration, with the variants in the order of the request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExploreReport {
    pub variants: Vec<VariantReport>,
    /// Kept variants and their sessions.
    pub kept: Vec<(String, SessionId)>,
    /// Whether the kept variant replaced the source.
    pub replaced: bool,
    /// Notes for the reader.
    pub notes: Vec<String>,
    /// Parts of the source that the forks lack, as claimed by the runner.
    pub lost: Vec<String>,
}

/// Result of one variant.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VariantReport {
    pub name: String,
    pub ended: Result<Outcome, Refused>,
    /// The value of the expression by which variants are compared, or why there is none. `None` if
    /// no expression was given.
    pub score: Option<Result<f64, String>>,
}
