//! The operation `list_servers`.

use serde::{Deserialize, Serialize};

/// Lists the MCP servers that the caller's sessions may use.
#[derive(Clone, Serialize, Deserialize)]
pub struct ListServers {}
