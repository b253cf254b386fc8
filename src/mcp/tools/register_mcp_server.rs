//! The tool `register_mcp_server`.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::{Value, json};

use super::list_mcp_servers::{MAX_LISTED, counted, fields, notes, tool_line};
use super::schema::{Description, Reach, ToolEffect, object, result_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{BadArgument, MAX_SERVER_NAME_LENGTH};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{Front, McpSettings};
use crate::ops::{self, HostExt};
use crate::session::servers::{ServerReport, ServerRequest};

pub(super) struct RegisterTool;

#[derive(Debug, PartialEq)]
pub(super) struct RegisterCall {
    name: String,
    params: Value,
}

impl ToolDefinition for RegisterTool {
    type Call = RegisterCall;

    const ENTRY: Entry = Entry {
        name: "register_mcp_server",
        scope: Scope::Register,
        // A cell that follows finds the modules.
        extent: Extent::Whole,
    };
    const SESSION: SessionArgument = SessionArgument::None;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Use another MCP server",
            text: "Connects to an MCP server, outside the sandbox, and makes its tools Python \
                   modules of your sessions: mcptools.<server>.<tool> with Params, run and \
                   run_async."
                .to_owned(),
            input: object(
                json!({
                    "server_name": {"type": "string"},
                    "server_params": {
                        "type": "object",
                        "description": match settings.front {
                            Front::Stdio => "As clients are configured: command, args, env, cwd; \
                                             or url, headers, type. ${VAR} is \
                                             filled from the environment.",
                            Front::Http => "As clients are configured: url, headers, type.",
                        },
                    },
                }),
                &["server_name", "server_params"],
            ),
            output: result_schema(json!({
                "server_name": {"type": "string"},
                "package": {"type": "string"},
                "tools": {"type": "array"},
                "notes": {"type": "array"},
            })),
            effect: ToolEffect::Changes {
                destructive: false,
                idempotent: true,
            },
            reach: Reach::OtherServers,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<RegisterCall, BadArgument> {
        Ok(RegisterCall {
            name: arguments
                .take("server_name")
                .text(MAX_SERVER_NAME_LENGTH, 1)?,
            params: arguments.take("server_params").object()?,
        })
    }

    async fn run(call: RegisterCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let shared = &tool_context.server.shared;
        let server = ServerRequest {
            name: call.name,
            params: call.params,
            trust: shared.front.trust(),
        };
        let work = shared
            .sessions
            .run(tool_context.owner, ops::RegisterServer { server });
        let done = or_cancelled(tool_context.context, work).await;
        answer(done, |server| registered(&server)).into()
    }
}

/// Renders a server that was registered.
fn registered(server: &ServerReport) -> CallToolResult {
    let ServerReport {
        name,
        package,
        transport,
        tools,
        ..
    } = server;
    let count = counted(tools.len(), "tool");
    let mut lines = vec![format!(
        "The MCP server \"{name}\" ({transport}) is registered: {count} in mcptools.{package}."
    )];
    lines.extend(tools.iter().take(MAX_LISTED).map(tool_line));
    if tools.len() > MAX_LISTED {
        lines.push(format!(
            "  … and {} more: dir(mcptools.{package})",
            tools.len() - MAX_LISTED
        ));
    }
    if let Some(tool) = tools.first() {
        lines.push(format!(
            "In a cell of any session: `from mcptools.{package}.{} import Params, run`, then \
             `run(Params(…))`, or `await \
             run_async(Params(…))`; help() of a module tells its arguments and result.",
            tool.module
        ));
    }
    lines.extend(notes(server));
    finished(
        vec![ContentBlock::text(lines.join("\n"))],
        fields(server),
        false,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tests::server_report;
    use crate::mcp::tools::tests::parts;
    use crate::session::servers::ServerTool;

    fn many(count: usize) -> ServerReport {
        let tool = |number: usize| ServerTool {
            name: format!("tool-{number}"),
            module: format!("tool_{number}"),
            summary: format!("Does\nsomething {}", "long ".repeat(100)),
            disabled: None,
        };
        ServerReport {
            tools: (0..count).map(tool).collect(),
            ..server_report("many")
        }
    }

    #[test]
    fn a_registered_server_names_its_modules_and_how_to_use_them() {
        let (text, structured) = parts::<RegisterTool>(registered(&server_report("notes")));
        let expected = "The MCP server \"notes\" (stdio) is registered: 1 tool in \
                        mcptools.notes.\n  read_note  Reads a note.\n\
                        In a cell of any session: `from mcptools.notes.read_note import Params, \
                        run`, then `run(Params(…))`, or \
                        `await run_async(Params(…))`; help() of a module tells its arguments and \
                        result.\n\
                        Note: the tool \"x\" is left out: its name is odd";
        assert_eq!(text, expected);
        assert_eq!(structured["package"], "mcptools.notes");
    }

    #[test]
    fn a_large_server_does_not_fill_the_answer() {
        let (text, _) = parts::<RegisterTool>(registered(&many(1000)));
        assert!(text.contains("… and 940 more: dir(mcptools.many)"));
        assert!(text.len() < 9000 && text.lines().count() == 64, "{text}");
    }
}
