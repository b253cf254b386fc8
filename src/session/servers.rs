//! Registrations of other MCP servers: what is told of them, and where they are asked for.
//!
//! A registration belongs to its owner, or to the operator, and then everybody may use it. What it takes to reach a server (a command, an address, headers, variables)
//! goes to the broker and never comes back.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manager::Sessions;
use super::tools::Broker;
use super::{Principal, Refused};

/// A server that somebody wants to use.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerRequest {
    pub name: String,
    /// In the form of client configurations, unchecked.
    pub params: Value,
    pub trust: Trust,
}

// Parameters hold secrets.
impl fmt::Debug for ServerRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ServerRequest")
            .field("name", &self.name)
            .field("trust", &self.trust)
            .finish()
    }
}

/// What whoever names a server may do on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trust {
    /// They started the server: they may name programs, use its variables and reach what it reaches.
    Local,
    /// They may name addresses that are public, or that the operator has listed, and none of the server's variables.
    Remote,
}

/// The servers of the operator, in the place of those that were told before.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSetup {
    /// Names and parameters, checked.
    pub servers: BTreeMap<String, Value>,
    /// Hosts that remote callers may name although they are at no public address.
    pub allowed_hosts: Vec<String>,
    /// What `${VAR}` is filled from.
    pub variables: BTreeMap<String, String>,
}

/// What is known of a registered server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerReport {
    pub name: String,
    /// The Python package below `mcptools`.
    pub package: String,
    /// `stdio` or `http`.
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
        request: ServerRequest,
    ) -> Result<ServerReport, Refused> {
        let name = request.name.clone();
        let report = self
            .broker()?
            .register(owner, request)
            .await
            .map_err(|why| Refused::Server { why })?;
        self.forget_approvals_of(owner, &name);
        Ok(report)
    }

    /// Takes a server away from the owner's sessions.
    pub async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        self.broker()?
            .unregister(owner, name)
            .await
            .map_err(|why| Refused::Server { why })?;
        self.forget_approvals_of(owner, name);
        Ok(())
    }

    /// Tells which servers the owner's sessions may use, in the order of their names.
    pub fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        Ok(self.broker()?.servers(owner))
    }

    /// Takes over the servers of the operator. They are connected in the background.
    pub fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused> {
        self.broker()?.set_up(setup);
        Ok(())
    }

    fn broker(&self) -> Result<&dyn Broker, Refused> {
        self.settings().tools.0.as_deref().ok_or(Refused::NoServers)
    }
}
