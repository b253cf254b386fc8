//! Registrations of other MCP servers: the reports about them, and the calls that manage them.
//!
//! A registration belongs to its owner, or to the operator, in which case all callers may use it.
//! The parameters for reaching a server (a command, an address, headers, variables) go to the
//! broker and are never returned.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manager::Sessions;
use super::tools::Broker;
use super::{Principal, Refused};

/// A server to register.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerRequest {
    pub name: String,
    /// In the format of client configurations, unchecked.
    pub params: Value,
    pub trust: Trust,
}

// Parameters contain secrets.
impl fmt::Debug for ServerRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ServerRequest")
            .field("name", &self.name)
            .field("trust", &self.trust)
            .finish()
    }
}

/// Rights on this machine of the caller that registers a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trust {
    /// The caller started the server: it may name programs, use the server's environment variables
    /// and reach everything the server reaches.
    Local,
    /// The caller may name addresses that are public or listed by the operator. It may not use the
    /// server's environment variables.
    Remote,
}

/// The servers of the operator. They replace the previous ones.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSetup {
    /// Names and parameters, checked.
    pub servers: BTreeMap<String, Value>,
    /// Hosts without a public address that remote callers may name.
    pub allowed_hosts: Vec<String>,
    /// Values for `${VAR}`.
    pub variables: BTreeMap<String, String>,
}

/// Report about a registered server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerReport {
    pub name: String,
    /// The Python package below `mcptools`.
    pub package: String,
    /// `stdio` or `http`.
    pub transport: String,
    pub registrar: Registrar,
    pub state: ServerState,
    /// Tools that have a module, sorted by name.
    pub tools: Vec<ServerTool>,
    /// Deviations from the server's own description, with reasons.
    pub notes: Vec<String>,
}

/// Origin of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Registrar {
    /// The configuration; all callers may use the server, and none can remove it.
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
    /// Name on the server.
    pub name: String,
    /// The module.
    pub module: String,
    pub summary: String,
    /// Why it cannot be called until the server is registered again.
    pub disabled: Option<String>,
}

impl Sessions {
    /// Connects to a server and makes its tools available to the owner's sessions. It replaces a
    /// server of the same name.
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

    /// Removes a server from the owner's sessions.
    pub async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        self.broker()?
            .unregister(owner, name)
            .await
            .map_err(|why| Refused::Server { why })?;
        self.forget_approvals_of(owner, name);
        Ok(())
    }

    /// Returns the servers that the owner's sessions may use, sorted by name.
    pub fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        Ok(self.broker()?.servers(owner))
    }

    /// Replaces the servers of the operator. They are connected in the background.
    pub fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused> {
        self.broker()?.set_up(setup);
        Ok(())
    }

    fn broker(&self) -> Result<&dyn Broker, Refused> {
        self.settings().tools.0.as_deref().ok_or(Refused::NoServers)
    }
}
