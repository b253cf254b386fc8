//! The operation `list_files`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;

/// Lists the files of a session, while no cell runs in it.
#[derive(Clone, Serialize, Deserialize)]
pub struct ListFiles {
    pub session: SessionId,
}
