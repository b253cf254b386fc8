//! The tool `list_mcp_servers`: which servers there are, what can be imported, what went wrong.
//!
//! Names and summaries are what a stranger's server says of itself. They are cut, put on one line
//! each, and never say more than a list entry.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::{Value, json};

use super::schema::{Description, Reach, ToolEffect, object, result_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::BadArgument;
use crate::mcp::calls::answer;
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::servers::{Registrar, ServerReport, ServerState, ServerTool};

/// Modules that are listed with what they do. The rest is named by Python.
pub(super) const MAX_LISTED: usize = 60;
/// Characters of what a module does.
const MAX_SUMMARY_LENGTH: usize = 100;
/// Notes that are told.
const MAX_NOTES: usize = 20;

pub(super) struct ListServersTool;

impl ToolDefinition for ListServersTool {
    type Call = ops::ListServers;

    const ENTRY: Entry = Entry {
        name: "list_mcp_servers",
        scope: Scope::Read,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::None;

    fn describe(_settings: &McpSettings) -> Description {
        Description {
            title: "List MCP servers",
            text: "Lists the registered MCP servers, their state and modules.".to_owned(),
            input: object(json!({}), &[]),
            output: result_schema(json!({"servers": {"type": "array"}})),
            effect: ToolEffect::ReadsOnly,
            reach: Reach::Nothing,
        }
    }

    fn parse(_arguments: &mut Arguments<'_>) -> Result<ops::ListServers, BadArgument> {
        Ok(ops::ListServers {})
    }

    async fn run(op: ops::ListServers, tool_context: ToolContext<'_>) -> CallToolResponse {
        let done = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op)
            .await;
        answer(done, |list| listed(&list)).into()
    }
}

/// Renders the servers that a caller's sessions may use.
fn listed(servers: &[ServerReport]) -> CallToolResult {
    let text = if servers.is_empty() {
        "No MCP server is registered.".to_owned()
    } else {
        servers
            .iter()
            .map(server_lines)
            .collect::<Vec<_>>()
            .join("\n")
    };
    let structured = json!({"servers": servers.iter().map(fields).collect::<Vec<_>>()});
    finished(vec![ContentBlock::text(text)], structured, false)
}

fn server_lines(server: &ServerReport) -> String {
    let ServerReport {
        name,
        package,
        transport,
        registrar,
        state,
        tools,
        ..
    } = server;
    let whose = match registrar {
        Registrar::Operator => ", by the operator",
        Registrar::Owner => "",
    };
    let state = match state {
        ServerState::Failed { why } => format!("failed: {}", one_line(why, 300)),
        other => other.word().to_owned(),
    };
    let mut lines = vec![format!(
        "{name} ({transport}{whose}), {state}; {} in mcptools.{package}",
        counted(tools.len(), "tool")
    )];
    lines.extend(tools.iter().filter_map(|tool| {
        let why = tool.disabled.as_ref()?;
        Some(format!(
            "  {} cannot be called: {}",
            tool.module,
            one_line(why, 200)
        ))
    }));
    lines.extend(notes(server));
    lines.join("\n")
}

pub(super) fn tool_line(tool: &ServerTool) -> String {
    let summary = one_line(&tool.summary, MAX_SUMMARY_LENGTH);
    format!("  {}  {summary}", tool.module)
        .trim_end()
        .to_owned()
}

pub(super) fn notes(server: &ServerReport) -> Vec<String> {
    let mut lines: Vec<String> = server
        .notes
        .iter()
        .take(MAX_NOTES)
        .map(|note| format!("Note: {}", one_line(note, 300)))
        .collect();
    if server.notes.len() > MAX_NOTES {
        lines.push(format!(
            "… and {} more notes.",
            server.notes.len() - MAX_NOTES
        ));
    }
    lines
}

pub(super) fn fields(server: &ServerReport) -> Value {
    let tool = |tool: &ServerTool| {
        let mut fields = json!({"name": one_line(&tool.name, 256), "module": tool.module});
        if let Some(why) = &tool.disabled {
            fields["disabled"] = json!(one_line(why, 300));
        }
        fields
    };
    json!({
        "server_name": server.name,
        "package": format!("mcptools.{}", server.package),
        "transport": server.transport,
        "state": server.state.word(),
        "why": match &server.state {
            ServerState::Failed { why } => json!(one_line(why, 300)),
            _ => Value::Null,
        },
        "by_operator": server.registrar == Registrar::Operator,
        "tools": server.tools.iter().map(tool).collect::<Vec<_>>(),
        "notes": server
            .notes
            .iter()
            .take(MAX_NOTES)
            .map(|note| one_line(note, 300))
            .collect::<Vec<_>>(),
    })
}

pub(super) fn counted(count: usize, what: &str) -> String {
    if count == 1 {
        format!("1 {what}")
    } else {
        format!("{count} {what}s")
    }
}

fn one_line(text: &str, most: usize) -> String {
    let text = text
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace(char::is_control, " ");
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tests::server_report;
    use crate::mcp::tools::tests::parts;

    #[test]
    fn the_list_tells_what_is_wrong_with_each_server() {
        let failed = ServerReport {
            state: ServerState::Failed {
                why: "it did not\nanswer".to_owned(),
            },
            registrar: Registrar::Operator,
            tools: Vec::new(),
            notes: Vec::new(),
            ..server_report("slow")
        };
        let mut changed = server_report("notes");
        changed.notes.clear();
        changed.tools[0].disabled = Some("its schema changed".to_owned());
        let (text, _) = parts::<ListServersTool>(listed(&[failed, changed]));
        let expected = "slow (stdio, by the operator), failed: it did not answer; 0 tools in \
                        mcptools.slow\n\
                        notes (stdio), connected; 1 tool in mcptools.notes\n  read_note cannot be \
                        called: its schema changed";
        assert_eq!(text, expected);
        let (text, _) = parts::<ListServersTool>(listed(&[]));
        assert_eq!(text, "No MCP server is registered.");
    }
}
