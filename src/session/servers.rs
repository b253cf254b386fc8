//! Registrations of other MCP servers: what is told of them, and where they are asked for.
//!
//! A registration belongs to its owner, or to the operator, and then everybody may use it. What it takes to reach a server (a command, an address, headers, variables)
//! goes to the broker and never comes back.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manager::Sessions;
use super::tools::Broker;
use super::{Principal, Refused};

/// What is known of a registered server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerReport {
    pub name: String,
    /// The Python package below `mcptools`.
    pub package: String,
    /// `stdio`, `streamable_http` or `sse`.
    pub transport: String,
    pub registrar: Registrar,
    pub state: ServerState,
    /// Those that have a module, in the order of their names.
    pub tools: Vec<ServerTool>,
    /// What is not as the server said it, and why.
    pub notes: Vec<String>,
}

/// Who has registered a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registrar {
    /// In the configuration; everybody may use it, and nobody can take it away.
    Operator,
    /// The caller.
    Owner,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerState {
    /// It has not answered yet.
    Connecting,
    Connected,
    /// The next call connects again.
    Disconnected,
    /// It could not be reached, so its tools are not known.
    Failed {
        why: String,
    },
}

impl ServerState {
    pub fn word(&self) -> &'static str {
        match self {
            ServerState::Connecting => "connecting",
            ServerState::Connected => "connected",
            ServerState::Disconnected => "disconnected",
            ServerState::Failed { .. } => "failed",
        }
    }
}

/// A tool that has a module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerTool {
    /// As the server knows it.
    pub name: String,
    /// The module.
    pub module: String,
    pub summary: String,
    /// Why it cannot be called until the server is registered again.
    pub disabled: Option<String>,
}

impl Sessions {
    /// Connects to a server and makes its tools known to the owner's sessions, in the place of one of the same name.
    pub async fn register_server(
        &self,
        owner: &Principal,
        name: &str,
        params: &Value,
    ) -> Result<ServerReport, Refused> {
        self.broker()?.register(owner, name, params).await.map_err(|why| Refused::Server { why })
    }

    /// Takes a server away from the owner's sessions.
    pub async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        self.broker()?.unregister(owner, name).await.map_err(|why| Refused::Server { why })
    }

    /// Tells which servers the owner's sessions may use, in the order of their names.
    pub fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        Ok(self.broker()?.servers(owner))
    }

    fn broker(&self) -> Result<&dyn Broker, Refused> {
        self.settings().tools.0.as_deref().ok_or(Refused::NoServers)
    }
}
