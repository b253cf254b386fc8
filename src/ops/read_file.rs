//! The operation `read_file`.

use serde::{Deserialize, Serialize};

use crate::session::{InsidePath, SessionId};

/// Copies a file of at most `limit` bytes to the call's sink.
///
/// The reply is the size of the file.
#[derive(Clone, Serialize, Deserialize)]
pub struct ReadFile {
    pub session: SessionId,
    pub path: InsidePath,
    pub limit: u64,
}
