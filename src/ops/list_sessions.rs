//! The operation `list_sessions`.

use serde::{Deserialize, Serialize};

/// Lists the caller's sessions, including ended ones that are remembered.
#[derive(Clone, Serialize, Deserialize)]
pub struct ListSessions {}
