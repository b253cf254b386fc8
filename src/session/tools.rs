//! Tools of other MCP servers in sessions: calls, results, and the broker that performs them.
//!
//! A session knows servers and tools by name. Connections, credentials and schemas belong to the
//! broker on the host. The rights of a call are those of the session's owner as known to the host,
//! never of anything that the code claims.

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
use crate::approval::{Fingerprint, Pattern, Policy};

/// Calls of one cell that an outcome lists. Further calls are only counted.
const MAX_NOTED: usize = 100;
/// Limit in bytes for a name chosen by code.
const MAX_NAME_LENGTH: usize = 128;

/// A call that code in a session wants to make. All fields except the fingerprint are claims of the
/// code.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamToolCall {
    pub server: String,
    /// Name on the server.
    pub tool: String,
    pub arguments: Map<String, Value>,
    /// Fingerprint of the tool when the call was checked. If it differs at call time, the call is
    /// refused.
    pub fingerprint: Option<Fingerprint>,
}

/// Reply of a tool. With `is_error`, it describes an error of the tool itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolReply {
    /// Content blocks in the MCP format.
    pub content: Vec<Value>,
    pub structured: Option<Value>,
    pub is_error: bool,
}

/// Reason why a tool was not called, or did not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ToolRefused {
    pub reason: ToolReason,
    /// A sentence for the traceback: what happened and what to do.
    pub text: String,
}

impl ToolRefused {
    pub fn new(reason: ToolReason, text: impl Into<String>) -> ToolRefused {
        ToolRefused {
            reason,
            text: text.into(),
        }
    }

    /// Returns the refusal for an unknown server and for one that the session was not granted. The
    /// two texts must be identical.
    pub fn no_server(server: &str) -> ToolRefused {
        let name = shortened(server);
        ToolRefused::new(
            ToolReason::Unknown,
            format!(
                "there is no MCP server {name:?} for this session; `list_mcp_servers` names those \
                 that are registered"
            ),
        )
    }
}

impl ToolRefused {
    /// Returns the refusal for an unknown tool and for one that the session was not granted. The
    /// two texts must be identical.
    pub fn no_tool(server: &str, tool: &str) -> ToolRefused {
        let (server, tool) = (shortened(server), shortened(tool));
        ToolRefused::new(
            ToolReason::Unknown,
            format!("the server {server} has no tool {tool:?}"),
        )
    }

    /// Returns the refusal for a tool that has changed since the call was checked.
    pub fn another_tool(server: &str) -> ToolRefused {
        let server = shortened(server);
        let text = format!(
            "the server {server} was registered anew while this call waited, so nothing was \
             called; call it again"
        );
        ToolRefused::new(ToolReason::Unavailable, text)
    }
}

/// Reasons as defined in `runner/PROTOCOL.md`, "Tools".
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

/// Access to other MCP servers.
#[async_trait]
pub trait Broker: Send + Sync {
    /// Calls a tool for a session of this owner. Dropping the future cancels the call. `tell`
    /// receives progress messages, one sentence each.
    async fn call(
        &self,
        owner: &Principal,
        session: &SessionId,
        call: UpstreamToolCall,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<ToolReply, ToolRefused>;

    /// Returns the current fingerprint of a tool, if it can be determined; permissions are bound to
    /// it. Refuses an unknown tool, for which no approval is requested.
    fn fingerprint(
        &self,
        _owner: &Principal,
        _server: &str,
        _tool: &str,
    ) -> Result<Option<Fingerprint>, ToolRefused> {
        Ok(None)
    }

    /// Returns the policy in the registration of a server for calls of its tools, if there is one.
    /// It can only be stricter than the operator's policy.
    fn policy(&self, _owner: &Principal, _server: &str) -> Option<Arc<Policy>> {
        None
    }

    /// Returns the packages available to this owner's sessions, sorted by name.
    fn packages(&self, owner: &Principal) -> Vec<Arc<Package>>;

    /// Returns a watch that changes whenever `packages` may have changed for any owner.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Connects to a server and keeps it for this owner. A refusal is a sentence without secrets.
    async fn register(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, String>;

    /// Removes a server of this owner.
    async fn unregister(&self, owner: &Principal, name: &str) -> Result<(), String>;

    /// Returns reports about the servers that this owner may use, sorted by name.
    fn servers(&self, owner: &Principal) -> Vec<ServerReport>;

    /// Replaces the servers of the operator: connects to new and changed ones in the background,
    /// and removes those that are not in the setup.
    fn set_up(&self, setup: ServerSetup);
}

/// The tools that a session may use: those that are in every one of these lists. Without a list,
/// all tools of its owner, including those registered later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grants(Vec<Vec<Grant>>);

/// A server, or some of its tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub server: String,
    pub tool: Pattern,
}

/// Limit for nested lists: forks of forks, each of which was given fewer tools by other patterns.
const MAX_LISTS: usize = 16;

impl Grant {
    /// Parses `server`, `server.tool` or `server.pattern`. Server names may contain dots, so the
    /// longest match in `known` is used.
    pub fn parse<'a>(text: &str, known: impl Iterator<Item = &'a str>) -> Option<Grant> {
        let rest_of = |server: &'a str| {
            let rest = text.strip_prefix(server)?;
            let pattern = if rest.is_empty() {
                Some(Pattern::anything())
            } else {
                Pattern::parse(rest.strip_prefix('.')?).ok()
            };
            pattern.map(|tool| Grant {
                server: server.to_owned(),
                tool,
            })
        };
        known
            .filter_map(rest_of)
            .max_by_key(|grant| grant.server.len())
    }

    pub fn allows(&self, server: &str, tool: &str) -> bool {
        self.server == server && self.tool.fits(tool)
    }
}

impl Grants {
    /// Grants no tool of any server.
    pub fn nothing() -> Grants {
        Grants(vec![Vec::new()])
    }

    pub fn allow(&self, server: &str, tool: &str) -> bool {
        self.0
            .iter()
            .all(|list| list.iter().any(|grant| grant.allows(server, tool)))
    }

    /// Returns whether every tool of a server is granted, including unknown ones.
    pub fn allow_all_of(&self, server: &str) -> bool {
        self.0.iter().all(|list| {
            list.iter()
                .any(|grant| grant.server == server && grant.tool.is_anything())
        })
    }

    /// Returns these grants restricted to `list`. `None` if the limit of nested lists is exceeded.
    pub fn narrowed(&self, list: &[Grant]) -> Option<Grants> {
        let is_settled = |grant: &Grant| match grant.tool.text() {
            Some(tool) => self.allow(&grant.server, tool),
            None => self.allow_all_of(&grant.server),
        };
        if list.iter().all(is_settled) {
            return Some(Grants(vec![list.to_vec()]));
        }
        let mut lists = self.0.clone();
        if !lists.iter().any(|other| other == list) {
            lists.push(list.to_vec());
        }
        (lists.len() <= MAX_LISTS).then_some(Grants(lists))
    }
}

/// Source of tools for sessions, if there is one.
#[derive(Clone, Default)]
pub struct Tools(pub Option<Arc<dyn Broker>>);

impl fmt::Debug for Tools {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() {
            "Tools(a broker)"
        } else {
            "Tools(nothing)"
        })
    }
}

/// The tool calls of one cell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCalls {
    /// The first calls, in the order in which they ended.
    pub noted: Vec<NotedCall>,
    /// Number of all calls.
    pub total: u64,
    /// Number of calls that failed.
    pub failed: u64,
}

/// One call, for a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotedCall {
    /// As named by the code, cut to the limit.
    pub server: String,
    pub tool: String,
    /// SHA-256 of the arguments as JSON.
    pub arguments: [u8; 32],
    pub ended: CallEnd,
    pub duration: Duration,
}

/// A call that was started, for a record.
pub(super) struct Begun {
    server: String,
    tool: String,
    arguments: [u8; 32],
    since: Instant,
}

impl Begun {
    pub(super) fn now(call: &UpstreamToolCall) -> Begun {
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
            Ok(ToolReply {
                is_error: false, ..
            }) => CallEnd::Answered,
            Ok(_) => CallEnd::ToolError,
            Err(refused) => CallEnd::Refused(refused.reason),
        }
    }
}

impl ToolCalls {
    pub(super) fn note(&mut self, call: Begun, ended: CallEnd) {
        self.total += 1;
        self.failed += u64::from(ended != CallEnd::Answered);
        if self.noted.len() < MAX_NOTED {
            let Begun {
                server,
                tool,
                arguments,
                since,
            } = call;
            self.noted.push(NotedCall {
                server,
                tool,
                arguments,
                ended,
                duration: since.elapsed(),
            });
        }
    }
}

fn shortened(name: &str) -> String {
    let name = &name[..name.floor_char_boundary(MAX_NAME_LENGTH)];
    name.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grants(texts: &[&str]) -> Vec<Grant> {
        let known = ["git", "git.hub", "files"];
        texts
            .iter()
            .map(|text| Grant::parse(text, known.into_iter()).unwrap())
            .collect()
    }

    #[test]
    fn a_grant_names_a_server_or_some_of_its_tools() {
        let known = || ["git", "git.hub"].into_iter();
        let parsed = |text: &str| {
            Grant::parse(text, known()).map(|grant| (grant.server, grant.tool.to_string()))
        };
        let pair = |server: &str, tool: &str| Some((server.to_owned(), tool.to_owned()));
        assert_eq!(parsed("git"), pair("git", "*"));
        assert_eq!(parsed("git.list_*"), pair("git", "list_*"));
        assert_eq!(parsed("git.hub"), pair("git.hub", "*"));
        assert_eq!(parsed("git.hub.list_*"), pair("git.hub", "list_*"));
        for unknown in ["gi", "gith", "other.x", "", "git.\\x"] {
            assert_eq!(parsed(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn whoever_is_given_fewer_never_gets_more() {
        let all = Grants::default();
        assert!(all.allow("files", "read") && all.allow_all_of("files")); // Control.
        let some = all.narrowed(&grants(&["git.list_*", "files"])).unwrap();
        assert!(some.allow("git", "list_issues") && some.allow("files", "read"));
        assert!(!some.allow("git", "create_issue") && !some.allow("git.hub", "list_issues"));
        assert!(!some.allow_all_of("git") && some.allow_all_of("files"));
        for wider in [
            &["git"][..],
            &["git.*", "git.hub"],
            &["git.create_*", "git.list_*"],
        ] {
            let again = some.narrowed(&grants(wider)).unwrap();
            assert!(
                again.allow("git", "list_issues") && !again.allow("git", "create_issue"),
                "{wider:?}"
            );
            assert!(
                !again.allow("files", "read") && !again.allow("git.hub", "x"),
                "{wider:?}"
            );
        }
        assert!(
            !some
                .narrowed(&grants(&["git.create_issue"]))
                .unwrap()
                .allow("git", "create_issue")
        );
        assert!(!some.narrowed(&[]).unwrap().allow("git", "list_issues"));
    }

    #[test]
    fn lists_that_say_less_and_less_are_bounded_and_plain_ones_replace_all_others() {
        let mut narrower = Grants::default().narrowed(&grants(&["git.*a*"])).unwrap();
        for number in 2..=MAX_LISTS {
            narrower = narrower
                .narrowed(&grants(&[&format!("git.*a{number}*")]))
                .unwrap();
        }
        assert_eq!(narrower.narrowed(&grants(&["git.b*"])), None);
        assert_eq!(
            narrower.narrowed(&grants(&["git.*a2*"])),
            Some(narrower.clone()),
            "what is there already costs nothing"
        );
        let name = (0..=MAX_LISTS)
            .map(|number| format!("a{number}"))
            .collect::<String>();
        let exact = narrower
            .narrowed(&grants(&[&format!("git.{name}")]))
            .unwrap();
        assert!(exact.allow("git", &name) && exact.0.len() == 1);
    }
}
