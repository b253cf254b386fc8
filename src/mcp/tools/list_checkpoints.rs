//! The tool `list_checkpoints`.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::json;

use super::schema::{
    Description, Reach, ToolEffect, checkpoints_schema, object, result_schema, session_schema,
    switched_off,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::BadArgument;
use crate::mcp::calls::answer;
use crate::mcp::render::{checkpoint_fields, finished};
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::{CheckpointInfo, SessionId};

pub(super) struct ListCheckpointsTool;

impl ToolDefinition for ListCheckpointsTool {
    type Call = ops::ListCheckpoints;

    const ENTRY: Entry = Entry {
        name: "list_checkpoints",
        scope: Scope::Read,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "List what can be undone",
            text: format!(
                "Lists how many cells of a session undo can take back, and what each was.{}",
                switched_off(settings)
            ),
            input: object(json!({"session_id": session_schema(settings)}), &[]),
            output: result_schema(json!({
                "session_id": {"type": "string"}, "can_undo": checkpoints_schema(),
            })),
            effect: ToolEffect::ReadsOnly,
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::ListCheckpoints, BadArgument> {
        Ok(ops::ListCheckpoints {
            session: arguments.session(),
        })
    }

    async fn run(op: ops::ListCheckpoints, tool_context: ToolContext<'_>) -> CallToolResponse {
        let session = op.session.clone();
        let done = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op)
            .await;
        answer(done, |list| checkpoints(&session, &list)).into()
    }
}

/// Renders what can be undone.
fn checkpoints(session: &SessionId, checkpoints: &[CheckpointInfo]) -> CallToolResult {
    let line = |checkpoint: &CheckpointInfo| {
        let CheckpointInfo {
            cells_back,
            before,
            age,
        } = checkpoint;
        let seconds = age.as_secs();
        format!("cells={cells_back}: as it was before `{before}`, {seconds} s ago")
    };
    let text = if checkpoints.is_empty() {
        format!("Nothing can be undone in session \"{session}\".")
    } else {
        checkpoints.iter().map(line).collect::<Vec<_>>().join("\n")
    };
    let structured =
        json!({"session_id": session.as_str(), "can_undo": checkpoint_fields(checkpoints)});
    finished(vec![ContentBlock::text(text)], structured, false)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::mcp::tools::tests::{check_accepted, described, parts};

    #[test]
    fn what_can_be_undone_is_listed_with_the_argument_that_does_it() {
        check_accepted::<ListCheckpointsTool>(json!({"session_id": "a"}));
        let session: SessionId = "s".parse().unwrap();
        let checkpoint = |cells_back, before: &str| CheckpointInfo {
            cells_back,
            before: before.to_owned(),
            age: Duration::from_millis(2500),
        };
        let list = [checkpoint(1, "x = 2"), checkpoint(3, "x = 1")];
        let (text, structured) = parts::<ListCheckpointsTool>(checkpoints(&session, &list));
        assert!(
            text.starts_with("cells=1: as it was before `x = 2`, 2 s ago\ncells=3"),
            "{text}"
        );
        assert_eq!(structured["can_undo"][0]["cells"], 1);
        let (text, _) = parts::<ListCheckpointsTool>(checkpoints(&session, &[]));
        assert!(text.contains("Nothing can be undone"), "{text}");
    }

    #[test]
    fn a_server_that_cannot_undo_says_so() {
        let described = |can_undo| {
            described::<ListCheckpointsTool>(&McpSettings {
                can_undo,
                ..McpSettings::default()
            })
        };
        assert!(described(true).starts_with("Lists") && !described(true).contains("Switched off"));
        assert!(described(false).contains("Switched off"));
    }
}
