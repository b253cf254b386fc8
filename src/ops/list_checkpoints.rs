//! The operation `list_checkpoints`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;

/// Lists what can be undone, the nearest first.
#[derive(Clone, Serialize, Deserialize)]
pub struct ListCheckpoints {
    pub session: SessionId,
}
