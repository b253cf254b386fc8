//! The operation `reset`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;

/// Restarts the interpreter of a session, also in the middle of a cell. Files stay.
#[derive(Clone, Serialize, Deserialize)]
pub struct Reset {
    pub session: SessionId,
}
