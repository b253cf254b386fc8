//! Tools of other MCP servers for sessions: what code asks for, what comes back, and who does it.
//!
//! A session knows servers and tools by name. Connections, credentials and schemas are the broker's, on the host. Whose rights a call has is
//! decided by the session's owner as the host knows it, never by anything that the code says.

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

/// Calls of one cell of which an outcome tells. The rest is counted.
const MOST_NOTED: usize = 100;
/// Bytes kept of a name that code has chosen.
const LONGEST_NAME: usize = 128;

/// A call that code in a session wants to make. All of it is the code's own words, but for the fingerprint.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub server: String,
    /// As the server knows it.
    pub tool: String,
    pub arguments: Map<String, Value>,
    /// What the tool was when the call was looked at. Nothing else is called.
    pub fingerprint: Option<Fingerprint>,
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
        ToolRefused {
            reason,
            text: text.into(),
        }
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

impl ToolRefused {
    /// The answer for a tool that is not there and for one that the session was not granted. They must be the same to the letter.
    pub fn no_tool(server: &str, tool: &str) -> ToolRefused {
        let (server, tool) = (shortened(server), shortened(tool));
        ToolRefused::new(
            ToolReason::Unknown,
            format!("the server {server} has no tool {tool:?}"),
        )
    }

    /// The answer for a tool that is not any more what it was when the call was looked at.
    pub fn another_tool(server: &str) -> ToolRefused {
        let server = shortened(server);
        let text = format!(
            "the server {server} was registered anew while this call waited, so nothing was called; call it again"
        );
        ToolRefused::new(ToolReason::Unavailable, text)
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

    /// Returns what a tool is at this moment, if that can be told; permissions are bound to it. Refuses what is not there, about which nobody is asked.
    fn fingerprint(
        &self,
        _owner: &Principal,
        _server: &str,
        _tool: &str,
    ) -> Result<Option<Fingerprint>, ToolRefused> {
        Ok(None)
    }

    /// Returns what the registration of a server says about calls of its tools, if it says something. It can only make things stricter.
    fn policy(&self, _owner: &Principal, _server: &str) -> Option<Arc<Policy>> {
        None
    }

    /// Returns the packages that this owner's sessions may have, in the order of their names.
    fn packages(&self, owner: &Principal) -> Vec<Arc<Package>>;

    /// Tells whenever `packages` may have changed for somebody.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Connects to a server and keeps it for this owner. What it refuses, it refuses in a sentence without secrets.
    async fn register(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, String>;

    /// Forgets a server of this owner.
    async fn unregister(&self, owner: &Principal, name: &str) -> Result<(), String>;

    /// Returns what is known of the servers that this owner may use, in the order of their names.
    fn servers(&self, owner: &Principal) -> Vec<ServerReport>;

    /// Takes over the servers of the operator: connects to new and changed ones in the background, and forgets those that are not among them.
    fn set_up(&self, setup: ServerSetup);
}

/// Which tools a session may use: those that every one of these lists has. Without a list, all that its owner has, also those that are registered later.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grants(Vec<Vec<Grant>>);

/// A server, or some of its tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub server: String,
    pub tool: Pattern,
}

/// A list within a list within a list: forks of forks that were each given fewer tools by other patterns.
const MOST_LISTS: usize = 16;

impl Grant {
    /// Reads `server`, `server.tool` or `server.pattern`. Names of servers may have dots, so the longest of `known` is meant.
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
    /// No tool of any server.
    pub fn nothing() -> Grants {
        Grants(vec![Vec::new()])
    }

    pub fn allow(&self, server: &str, tool: &str) -> bool {
        self.0
            .iter()
            .all(|list| list.iter().any(|grant| grant.allows(server, tool)))
    }

    /// Tells whether every tool of a server is granted, whichever it has.
    pub fn allow_all_of(&self, server: &str) -> bool {
        self.0.iter().all(|list| {
            list.iter()
                .any(|grant| grant.server == server && grant.tool.is_anything())
        })
    }

    /// Returns what is left of these grants for somebody who is to have no more than `list`. `None` when that cannot be held any more.
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
        (lists.len() <= MOST_LISTS).then_some(Grants(lists))
    }
}

/// Where sessions find tools, if anywhere.
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
        if self.noted.len() < MOST_NOTED {
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
    let name = &name[..name.floor_char_boundary(LONGEST_NAME)];
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
        for number in 2..=MOST_LISTS {
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
        let name = (0..=MOST_LISTS)
            .map(|number| format!("a{number}"))
            .collect::<String>();
        let exact = narrower
            .narrowed(&grants(&[&format!("git.{name}")]))
            .unwrap();
        assert!(exact.allow("git", &name) && exact.0.len() == 1);
    }
}
