//! The operation `read_file_range`.

use serde::{Deserialize, Serialize};

use crate::session::{InsidePath, SessionId};

/// Copies a part of a file to the call's sink, at most 1 GiB at once.
#[derive(Clone, Serialize, Deserialize)]
pub struct ReadFileRange {
    pub session: SessionId,
    pub path: InsidePath,
    pub offset: u64,
    /// `None` copies to the end.
    pub length: Option<u64>,
}
