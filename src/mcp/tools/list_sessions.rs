//! The tool `list_sessions`.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::json;

use super::schema::{Description, Reach, ToolEffect, object, result_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::BadArgument;
use crate::mcp::calls::answer;
use crate::mcp::render::{bytes_text, finished};
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::SessionInfo;

pub(super) struct ListSessionsTool;

impl ToolDefinition for ListSessionsTool {
    type Call = ops::ListSessions;

    const ENTRY: Entry = Entry {
        name: "list_sessions",
        scope: Scope::Read,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::None;

    fn describe(_settings: &McpSettings) -> Description {
        Description {
            title: "List sessions",
            text: "Lists the sessions with their state, age and memory; also those that ended, \
                   with the reason."
                .to_owned(),
            input: object(json!({}), &[]),
            output: result_schema(json!({"sessions": {
                "type": "array",
                "description": "Each: session_id, state, ended (why), executions, age_seconds, \
                                idle_seconds, memory_bytes.",
            }})),
            effect: ToolEffect::ReadsOnly,
            reach: Reach::Nothing,
        }
    }

    fn parse(_arguments: &mut Arguments<'_>) -> Result<ops::ListSessions, BadArgument> {
        Ok(ops::ListSessions {})
    }

    async fn run(op: ops::ListSessions, tool_context: ToolContext<'_>) -> CallToolResponse {
        let done = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op)
            .await;
        answer(done, |list| sessions(&list)).into()
    }
}

/// Renders the list of sessions.
fn sessions(sessions: &[SessionInfo]) -> CallToolResult {
    let lines: Vec<String> = sessions.iter().map(session_line).collect();
    let text = if lines.is_empty() {
        "There are no sessions.".to_owned()
    } else {
        lines.join("\n")
    };
    let structured = json!({
        "sessions": sessions
            .iter()
            .map(|session| {
                json!({
                    "session_id": session.id.as_str(),
                    "state": session.state,
                    "ended": session.ended,
                    "executions": session.executions,
                    "age_seconds": session.age.as_secs_f64(),
                    "idle_seconds": session.idle.as_secs_f64(),
                    "memory_bytes": session.memory,
                    "network": session.rules.iter().map(ToString::to_string).collect::<Vec<_>>(),
                })
            })
            .collect::<Vec<_>>(),
    });
    finished(vec![ContentBlock::text(text)], structured, false)
}

fn session_line(session: &SessionInfo) -> String {
    let mut line = format!(
        "{}: {}, {} executions",
        session.id.as_str(),
        session.state.name(),
        session.executions
    );
    if let Some(memory) = session.memory {
        line.push_str(&format!(", {}", bytes_text(memory)));
    }
    line.push_str(&format!(", idle for {} s", session.idle.as_secs()));
    let reached: Vec<String> = session.rules.iter().map(ToString::to_string).collect();
    if !reached.is_empty() {
        line.push_str(&format!(", reaches {}", reached.join(", ")));
    }
    if let Some(why) = &session.ended {
        line.push_str(&format!(" (ended: {why})"));
    }
    line
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, parts};
    use crate::sandbox::Rules;
    use crate::session::SessionState;

    #[test]
    fn it_takes_no_arguments() {
        check_accepted::<ListSessionsTool>(json!({}));
        check_refused::<ListSessionsTool>(json!({"x": 1}), &["\"x\"", "takes no arguments"]);
    }

    #[test]
    fn each_session_has_a_line() {
        let info = SessionInfo {
            id: "s".parse().unwrap(),
            state: SessionState::Ended,
            ended: Some("it ran out of memory".to_owned()),
            executions: 2,
            age: Duration::from_secs(9),
            idle: Duration::from_millis(1500),
            memory: None,
            rules: Rules::parse(&["example.com"]).unwrap(),
            requested: Vec::new(),
        };
        let (text, structured) = parts::<ListSessionsTool>(sessions(&[info]));
        assert_eq!(
            text,
            "s: ended, 2 executions, idle for 1 s, reaches example.com (ended: it ran out of \
             memory)"
        );
        assert_eq!(structured["sessions"][0]["network"], json!(["example.com"]));
        assert_eq!(
            parts::<ListSessionsTool>(sessions(&[])).0,
            "There are no sessions."
        );
    }
}
