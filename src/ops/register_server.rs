//! The operation `register_server`.

use serde::{Deserialize, Serialize};

use crate::session::servers::ServerRequest;

/// Connects to another MCP server and makes its tools available to the caller's sessions.
#[derive(Clone, Serialize, Deserialize)]
pub struct RegisterServer {
    pub server: ServerRequest,
}
