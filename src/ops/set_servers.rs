//! The operation `set_servers`.

use serde::{Deserialize, Serialize};

use crate::session::servers::ServerSetup;

/// Replaces the operator's MCP servers, which all sessions may use.
#[derive(Clone, Serialize, Deserialize)]
pub struct SetServers {
    pub setup: ServerSetup,
}
