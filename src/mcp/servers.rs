//! Other MCP servers as a model reads of them: what was registered, what can be imported, what went
//! wrong.
//!
//! Names and summaries are what a stranger's server says of itself. They are cut, put on one line
//! each, and never say more than a list entry.

use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Value, json};

use super::render::finished;
use crate::session::servers::{Registrar, ServerReport, ServerState, ServerTool};

/// Modules that are listed with what they do. The rest is named by Python.
const MOST_LISTED: usize = 60;
/// Characters of what a module does.
const LONGEST_SUMMARY: usize = 100;
/// Notes that are told.
const MOST_NOTES: usize = 20;

/// Renders a server that was registered.
pub(super) fn registered(server: &ServerReport) -> CallToolResult {
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
    lines.extend(tools.iter().take(MOST_LISTED).map(tool_line));
    if tools.len() > MOST_LISTED {
        lines.push(format!(
            "  … and {} more: dir(mcptools.{package})",
            tools.len() - MOST_LISTED
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

/// Renders the servers that a caller's sessions may use.
pub(super) fn listed(servers: &[ServerReport]) -> CallToolResult {
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

/// Renders a server that is gone.
pub(super) fn unregistered(name: &str) -> CallToolResult {
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

fn tool_line(tool: &ServerTool) -> String {
    let summary = one_line(&tool.summary, LONGEST_SUMMARY);
    format!("  {}  {summary}", tool.module)
        .trim_end()
        .to_owned()
}

fn notes(server: &ServerReport) -> Vec<String> {
    let mut lines: Vec<String> = server
        .notes
        .iter()
        .take(MOST_NOTES)
        .map(|note| format!("Note: {}", one_line(note, 300)))
        .collect();
    if server.notes.len() > MOST_NOTES {
        lines.push(format!(
            "… and {} more notes.",
            server.notes.len() - MOST_NOTES
        ));
    }
    lines
}

fn fields(server: &ServerReport) -> Value {
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
            .take(MOST_NOTES)
            .map(|note| one_line(note, 300))
            .collect::<Vec<_>>(),
    })
}

fn counted(count: usize, what: &str) -> String {
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
    use crate::mcp::tools::ToolName;
    use crate::mcp::tools::tests::assert_valid_output;

    fn text(result: &CallToolResult) -> &str {
        result.content[0]
            .as_text()
            .map(|text| text.text.as_str())
            .unwrap()
    }

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
        let result = registered(&server_report("notes"));
        let expected = "The MCP server \"notes\" (stdio) is registered: 1 tool in \
                        mcptools.notes.\n  read_note  Reads a note.\n\
                        In a cell of any session: `from mcptools.notes.read_note import Params, \
                        run`, then `run(Params(…))`, or \
                        `await run_async(Params(…))`; help() of a module tells its arguments and \
                        result.\n\
                        Note: the tool \"x\" is left out: its name is odd";
        assert_eq!(text(&result), expected);
        assert_valid_output(
            ToolName::Register,
            result.structured_content.as_ref().unwrap(),
        );
    }

    #[test]
    fn a_large_server_does_not_fill_the_answer() {
        let result = registered(&many(1000));
        assert!(text(&result).contains("… and 940 more: dir(mcptools.many)"));
        assert!(
            text(&result).len() < 9000 && text(&result).lines().count() == 64,
            "{}",
            text(&result)
        );
    }

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
        let result = listed(&[failed, changed]);
        let expected = "slow (stdio, by the operator), failed: it did not answer; 0 tools in \
                        mcptools.slow\n\
                        notes (stdio), connected; 1 tool in mcptools.notes\n  read_note cannot be \
                        called: its schema changed";
        assert_eq!(text(&result), expected);
        assert_valid_output(
            ToolName::Servers,
            result.structured_content.as_ref().unwrap(),
        );
        assert_eq!(text(&listed(&[])), "No MCP server is registered.");
        assert_valid_output(
            ToolName::Unregister,
            unregistered("a").structured_content.as_ref().unwrap(),
        );
    }
}
