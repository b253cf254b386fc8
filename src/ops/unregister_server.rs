//! The operation `unregister_server`.

use serde::{Deserialize, Serialize};

/// Removes a registered MCP server from the caller's sessions.
#[derive(Clone, Serialize, Deserialize)]
pub struct UnregisterServer {
    pub name: String,
}
