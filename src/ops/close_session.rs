//! The operation `close_session`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;

/// Destroys a session with its private files. Its id can be used again.
#[derive(Clone, Serialize, Deserialize)]
pub struct CloseSession {
    pub session: SessionId,
}
