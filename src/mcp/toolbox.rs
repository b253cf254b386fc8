//! A toolbox: the tools that clients of one profile see, and how their calls are carried out.
//!
//! The handler knows no tool. It finds one here by its name and hands the call over; whoever is
//! calling, order, progress and sessions are the same for all profiles. `tools` has the
//! toolbox of the default profile, `profiles` has those of other servers.

use async_trait::async_trait;
use rmcp::RoleServer;
use rmcp::model::{
    CallToolResponse, ErrorData, GetPromptRequestMethod, GetPromptResult, JsonObject, Prompt, Tool,
};
use rmcp::service::RequestContext;

use super::Server;
use super::arguments::nearest;
use super::turns::Extent;
use crate::auth::Scope;
use crate::session::Principal;

/// What the transports and the handler need to know of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: &'static str,
    /// The right that a call needs.
    pub(super) scope: Scope,
    /// How much of a call must be over before the next call to its session begins.
    pub(super) extent: Extent,
}

/// How a server of another profile presents itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Introduction {
    /// The name by which clients know the server that this one stands in for.
    pub(super) name: &'static str,
    pub(super) instructions: Option<&'static str>,
}

/// One call: who wants it of which server.
#[derive(Clone, Copy)]
pub(super) struct ToolContext<'a> {
    pub(super) server: &'a Server,
    pub(super) owner: &'a Principal,
    pub(super) context: &'a RequestContext<RoleServer>,
}

#[async_trait]
pub(super) trait Toolbox: Send + Sync {
    /// All tools, as they are listed.
    fn tools(&self) -> &[Tool];

    fn find(&self, name: &str) -> Option<Entry>;

    /// Carries out a call of a tool that `find` has found.
    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse;

    /// Answers a call to an unknown tool.
    fn unknown(&self, name: &str) -> Result<CallToolResponse, ErrorData> {
        let shown: String = name.chars().take(128).collect();
        let text = match nearest(name, self.tools().iter().map(|tool| tool.name.as_ref())) {
            Some(nearest) => format!("there is no tool \"{shown}\"; did you mean \"{nearest}\"?"),
            None => format!("there is no tool \"{shown}\""),
        };
        Err(ErrorData::invalid_params(text, None))
    }

    /// How the server presents itself, unless as what it is.
    fn introduction(&self) -> Option<Introduction> {
        None
    }

    /// Prompts, for the one profile that has some.
    fn prompts(&self) -> Vec<Prompt> {
        Vec::new()
    }

    fn prompt(
        &self,
        _name: &str,
        _arguments: Option<&JsonObject>,
    ) -> Result<GetPromptResult, ErrorData> {
        Err(ErrorData::method_not_found::<GetPromptRequestMethod>())
    }
}
