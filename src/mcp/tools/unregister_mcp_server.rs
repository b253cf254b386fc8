//! The tool `unregister_mcp_server`.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::json;

use super::schema::{Description, Reach, ToolEffect, object, result_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::{BadArgument, MAX_SERVER_NAME_LENGTH};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};

pub(super) struct UnregisterTool;

impl ToolDefinition for UnregisterTool {
    type Call = ops::UnregisterServer;

    const ENTRY: Entry = Entry {
        name: "unregister_mcp_server",
        scope: Scope::Register,
        // A cell that follows does not find the modules.
        extent: Extent::Whole,
    };
    const SESSION: SessionArgument = SessionArgument::None;

    fn describe(_settings: &McpSettings) -> Description {
        Description {
            title: "Forget an MCP server",
            text: "Disconnects from a registered MCP server and removes its modules.".to_owned(),
            input: object(json!({"server_name": {"type": "string"}}), &["server_name"]),
            output: result_schema(json!({"server_name": {"type": "string"}})),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: true,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::UnregisterServer, BadArgument> {
        Ok(ops::UnregisterServer {
            name: arguments
                .take("server_name")
                .text(MAX_SERVER_NAME_LENGTH, 1)?,
        })
    }

    async fn run(op: ops::UnregisterServer, tool_context: ToolContext<'_>) -> CallToolResponse {
        let name = op.name.clone();
        let work = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op);
        let done = or_cancelled(tool_context.context, work).await;
        answer(done, |()| unregistered(&name)).into()
    }
}

/// Renders a server that is gone.
fn unregistered(name: &str) -> CallToolResult {
    let text = format!(
        "The MCP server \"{name}\" is not registered any more; its modules are removed from the \
         sessions."
    );
    finished(
        vec![ContentBlock::text(text)],
        json!({"server_name": name}),
        false,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::parts;

    #[test]
    fn a_server_that_is_gone_is_named() {
        let (text, structured) = parts::<UnregisterTool>(unregistered("a"));
        assert!(text.contains("\"a\" is not registered any more"), "{text}");
        assert_eq!(structured["server_name"], "a");
    }
}
