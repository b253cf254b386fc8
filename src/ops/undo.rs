//! The operation `undo`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;

/// Restores the state before the last `cells` cells.
#[derive(Clone, Serialize, Deserialize)]
pub struct Undo {
    pub session: SessionId,
    pub cells: u32,
}
