//! The operation `upload_size`.

use serde::{Deserialize, Serialize};

use crate::session::{InsidePath, SessionId};

/// Returns how many bytes of an unfinished upload have arrived, if there is one.
#[derive(Clone, Serialize, Deserialize)]
pub struct UploadSize {
    pub session: SessionId,
    pub path: InsidePath,
}
