//! Forks, undo and exploration: the vocabulary between sessions and whoever shows results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Outcome, RecorderId, Refused, SessionId};

/// Forks made by one request.
pub const MOST_FORKS: u32 = 16;
/// Variants explored by one request.
pub const MOST_VARIANTS: usize = 16;

/// Whether cells can be undone, and what is kept for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    On {
        /// Copies kept of one session, at least one. The oldest are forgotten first.
        checkpoints: usize,
        /// Bytes of the working folder that are kept with a copy. With more than this in it, files are left alone; with zero, always.
        files: u64,
    },
    /// No copies are made and nothing is paid for them.
    Off,
}

impl Default for Undo {
    fn default() -> Undo {
        Undo::On {
            checkpoints: 10,
            files: 64 * 1024 * 1024,
        }
    }
}

/// How forks are called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForkNames {
    /// So many, called after the source: `<source>-1`, `<source>-2`, the next free ones.
    Count(u32),
    Named(Vec<SessionId>),
}

/// What forks are asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkRequest {
    pub names: ForkNames,
    /// What the forks may use of what the source may: MCP servers by name, or some of their tools (`server.tool`, with `*` for any text); `None` is all of it.
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

/// What a fork gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkReport {
    pub forks: Vec<SessionId>,
    /// What the forks do not have of their source, as the runner claims: "2 threads", "1 connection".
    pub lost: Vec<String>,
    pub files: FilesCarried,
    /// Sentences the reader must know.
    pub notes: Vec<String>,
}

/// What became of the files, as the runner claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FilesCarried {
    /// Each fork has its own copy of them.
    Copied,
    /// They are as they were before the cells that were undone.
    Restored,
    /// The working folder is one for all sessions, so a fork sees the same files as its source.
    Shared,
    LeftAlone {
        why: String,
    },
}

/// What an undo did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoReport {
    /// Cells that were undone.
    pub undone: u32,
    /// The interpreter had ended and is back.
    pub revived: bool,
    /// What the session does not have of its earlier state, as the runner claims.
    pub lost: Vec<String>,
    pub files: FilesCarried,
    /// What can be undone further.
    pub left: Vec<CheckpointInfo>,
    /// Sentences the reader must know.
    pub notes: Vec<String>,
}

/// A state that a session can go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// The number of cells to undo to reach it.
    pub cells_back: u32,
    /// The first line of the cell it precedes, at most 80 characters.
    pub before: String,
    /// How long ago it was kept.
    pub age: Duration,
}

/// How many cells can be taken back in all.
pub fn most_undone(checkpoints: &[CheckpointInfo]) -> u32 {
    checkpoints
        .iter()
        .map(|checkpoint| checkpoint.cells_back)
        .max()
        .unwrap_or(0)
}

/// Several cells to be tried, each in a fork of its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExploreRequest {
    pub variants: Vec<Variant>,
    /// For each variant, counted from the moment its code starts.
    pub timeout: Duration,
    /// For each variant.
    pub max_output_chars: usize,
    pub keep: Keep,
    /// The one variant that is kept takes the place of the source instead of becoming a session of its own.
    pub replace: bool,
    /// Who records how the variants ended.
    #[serde(skip)]
    pub recorder: RecorderId,
}

/// One of the cells that are tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Different from the others' names.
    pub name: String,
    pub code: String,
}

/// Which forks become sessions when all variants are over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    Nothing,
    All,
    Named(String),
    /// The one in which this Python expression is largest.
    Best {
        by: String,
    },
}

/// What an exploration gave, variants in the order in which they were asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExploreReport {
    pub variants: Vec<VariantReport>,
    /// Variants that were kept, with the sessions they are now.
    pub kept: Vec<(String, SessionId)>,
    /// Whether the kept one took the source's place.
    pub replaced: bool,
    /// Sentences the reader must know.
    pub notes: Vec<String>,
    /// What the forks do not have of their source, as the runner claims.
    pub lost: Vec<String>,
}

/// How one variant ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VariantReport {
    pub name: String,
    pub ended: Result<Outcome, Refused>,
    /// The value of the expression that variants are compared by, or why there is none. `None` when nobody asked.
    pub score: Option<Result<f64, String>>,
}
