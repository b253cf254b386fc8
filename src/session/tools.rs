//! Tools of other MCP servers for sessions: what code asks for, what comes back, and who does it.
//!
//! A session knows servers and tools by name. Connections, credentials and schemas are the broker's, on the host. Whose rights a call has is
//! decided by the session's owner as the host knows it, never by anything that the code says.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cellblock_typed::Package;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;

use super::servers::{ServerReport, ServerRequest, ServerSetup};
use super::{Principal, SessionId};
use crate::approval::Policy;

/// Calls of one cell of which an outcome tells. The rest is counted.
const MOST_NOTED: usize = 100;
/// Bytes kept of a name that code has chosen.
const LONGEST_NAME: usize = 128;

/// A call that code in a session wants to make. All of it is the code's own words.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub server: String,
    /// As the server knows it.
    pub tool: String,
    pub arguments: Map<String, Value>,
}

/// What a tool answered. With `is_error` that is an error of its own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolReply {
    /// Content blocks as MCP has them.
    pub content: Vec<Value>,
    pub structured: Option<Value>,
    pub is_error: bool,
}

/// Why a tool was not called, or did not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ToolRefused {
    pub reason: ToolReason,
    /// A sentence for whoever reads the traceback: what happened and what to do.
    pub text: String,
}

impl ToolRefused {
    pub fn new(reason: ToolReason, text: impl Into<String>) -> ToolRefused {
        ToolRefused { reason, text: text.into() }
    }

    /// The answer for a server that is not there and for one that the session was not granted. They must be the same to the letter.
    pub fn no_server(server: &str) -> ToolRefused {
        let name = shortened(server);
        ToolRefused::new(
            ToolReason::Unknown,
            format!(
                "there is no MCP server {name:?} for this session; `list_mcp_servers` names those that are registered"
            ),
        )
    }
}

/// The words of `runner/PROTOCOL.md`, "Tools".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolReason {
    Denied,
    Timeout,
    Unknown,
    Invalid,
    Unavailable,
    Protocol,
    TooLarge,
    Cancelled,
    Budget,
    Other,
}

impl ToolReason {
    pub fn word(self) -> &'static str {
        match self {
            ToolReason::Denied => "denied",
            ToolReason::Timeout => "timeout",
            ToolReason::Unknown => "unknown",
            ToolReason::Invalid => "invalid",
            ToolReason::Unavailable => "unavailable",
            ToolReason::Protocol => "protocol",
            ToolReason::TooLarge => "too_large",
            ToolReason::Cancelled => "cancelled",
            ToolReason::Budget => "budget",
            ToolReason::Other => "other",
        }
    }
}

/// Who knows other MCP servers.
#[async_trait]
pub trait Broker: Send + Sync {
    /// Calls a tool for a session of this owner. Dropping the future cancels the call; `tell` hears how it gets on, a sentence each.
    async fn call(
        &self,
        owner: &Principal,
        session: &SessionId,
        call: ToolCall,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<ToolReply, ToolRefused>;

    /// Returns what the registration of a server says about calls of its tools, if it says something. It can only make things stricter.
    fn policy(&self, _owner: &Principal, _server: &str) -> Option<Arc<Policy>> {
        None
    }

    /// Returns the packages that this owner's sessions may have, in the order of their names.
    fn packages(&self, owner: &Principal) -> Vec<Arc<Package>>;

    /// Tells whenever `packages` may have changed for somebody.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Connects to a server and keeps it for this owner. What it refuses, it refuses in a sentence without secrets.
    async fn register(&self, owner: &Principal, request: ServerRequest) -> Result<ServerReport, String>;

    /// Forgets a server of this owner.
    async fn unregister(&self, owner: &Principal, name: &str) -> Result<(), String>;

    /// Returns what is known of the servers that this owner may use, in the order of their names.
    fn servers(&self, owner: &Principal) -> Vec<ServerReport>;

    /// Takes over the servers of the operator: connects to new and changed ones in the background, and forgets those that are not among them.
    fn set_up(&self, setup: ServerSetup);
}

/// Which servers a session may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Grants {
    /// All that its owner has, also those that are registered later.
    #[default]
    All,
    /// Those of these names that its owner has.
    Only(BTreeSet<String>),
}

impl Grants {
    pub fn allow(&self, server: &str) -> bool {
        match self {
            Grants::All => true,
            Grants::Only(names) => names.contains(server),
        }
    }

    /// Returns what is left of these grants for somebody who is to have no more than `names`.
    #[must_use]
    pub fn narrowed(&self, names: &[String]) -> Grants {
        Grants::Only(names.iter().filter(|name| self.allow(name)).cloned().collect())
    }
}

/// Where sessions find tools, if anywhere.
#[derive(Clone, Default)]
pub struct Tools(pub Option<Arc<dyn Broker>>);

impl fmt::Debug for Tools {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() { "Tools(a broker)" } else { "Tools(nothing)" })
    }
}

/// The calls that one cell has made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCalls {
    /// The first of them, in the order in which they ended.
    pub noted: Vec<NotedCall>,
    /// All of them.
    pub total: u64,
    /// Those that did not end well.
    pub failed: u64,
}

/// One call, for a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedCall {
    /// As the code named it, cut to its bound.
    pub server: String,
    pub tool: String,
    /// The SHA-256 of the arguments as JSON.
    pub arguments: [u8; 32],
    pub ended: CallEnd,
    pub duration: Duration,
}

/// A call that was begun, for a record.
pub(super) struct Begun {
    server: String,
    tool: String,
    arguments: [u8; 32],
    since: Instant,
}

impl Begun {
    pub(super) fn now(call: &ToolCall) -> Begun {
        let arguments = serde_json::to_vec(&call.arguments).expect("a JSON value can be written");
        Begun {
            server: shortened(&call.server),
            tool: shortened(&call.tool),
            arguments: Sha256::digest(arguments).into(),
            since: Instant::now(),
        }
    }
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallEnd {
    Answered,
    /// The tool reported an error of its own.
    ToolError,
    Refused(ToolReason),
}

impl CallEnd {
    pub fn word(self) -> &'static str {
        match self {
            CallEnd::Answered => "ok",
            CallEnd::ToolError => "tool_error",
            CallEnd::Refused(reason) => reason.word(),
        }
    }

    pub(super) fn of(result: &Result<ToolReply, ToolRefused>) -> CallEnd {
        match result {
            Ok(ToolReply { is_error: false, .. }) => CallEnd::Answered,
            Ok(_) => CallEnd::ToolError,
            Err(refused) => CallEnd::Refused(refused.reason),
        }
    }
}

impl ToolCalls {
    pub(super) fn note(&mut self, call: Begun, ended: CallEnd) {
        self.total += 1;
        self.failed += u64::from(ended != CallEnd::Answered);
        if self.noted.len() < MOST_NOTED {
            let Begun { server, tool, arguments, since } = call;
            self.noted.push(NotedCall { server, tool, arguments, ended, duration: since.elapsed() });
        }
    }
}

fn shortened(name: &str) -> String {
    let name = &name[..name.floor_char_boundary(LONGEST_NAME)];
    name.replace(char::is_control, " ")
}
