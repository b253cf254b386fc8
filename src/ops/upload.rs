//! The operation `upload`.

use serde::{Deserialize, Serialize};

use crate::session::{InsidePath, SessionId, UploadPart};

/// Takes one part of a file from the call's source. The last part stores the file.
///
/// Bytes that arrived are kept when the source fails or the call is dropped.
#[derive(Clone, Serialize, Deserialize)]
pub struct Upload {
    pub session: SessionId,
    pub path: InsidePath,
    pub part: UploadPart,
}
