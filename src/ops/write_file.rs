//! The operation `write_file`.

use serde::{Deserialize, Serialize};

use crate::session::{InsidePath, SessionId};

/// Stores a file from the call's source. It appears whole or not at all.
///
/// The session is created if its id is new. The reply is the size of the file.
#[derive(Clone, Serialize, Deserialize)]
pub struct WriteFile {
    pub session: SessionId,
    pub path: InsidePath,
    pub overwrite: bool,
}
