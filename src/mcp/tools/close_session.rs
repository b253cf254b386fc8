//! The tool `close_session`.

use std::error::Error;

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::json;

use super::schema::{Description, Reach, ToolEffect, object, result_schema, session_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::BadArgument;
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::{Refused, SessionId, WorkFolder};

pub(super) struct CloseTool;

impl ToolDefinition for CloseTool {
    type Call = ops::CloseSession;

    const ENTRY: Entry = Entry {
        name: "close_session",
        scope: Scope::Execute,
        extent: Extent::FirstStepSoon,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Close a session",
            text: match settings.work_folder {
                WorkFolder::Private => {
                    "Ends a session and deletes its variables and files. Download what should be \
                     kept."
                }
                WorkFolder::Shared => {
                    "Ends a session and deletes its variables. Files in the current folder stay."
                }
            }
            .to_owned(),
            input: object(json!({"session_id": session_schema(settings)}), &[]),
            output: result_schema(json!({"session_id": {"type": "string"}})),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: true,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::CloseSession, BadArgument> {
        Ok(ops::CloseSession {
            session: arguments.session(),
        })
    }

    async fn run(op: ops::CloseSession, tool_context: ToolContext<'_>) -> CallToolResponse {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let session = op.session.clone();
        let work = server.shared.sessions.run(owner, op);
        let closing = async {
            work.await.map_err(|refused| match refused {
                Refused::Unknown { id } => NothingToClose(id).into(),
                other => Box::<dyn Error + Send + Sync>::from(other),
            })
        };
        let done = or_cancelled(context, closing).await;
        answer(done, |()| closed(&session, server.shared.work_folder)).into()
    }
}

/// The session was closed by another caller, has ended, or never existed.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no session `{0}`, so there was nothing to close. `list_sessions` shows the existing \
     ones"
)]
struct NothingToClose(SessionId);

/// Renders a closed session.
fn closed(session: &SessionId, work_folder: WorkFolder) -> CallToolResult {
    let lost = match work_folder {
        WorkFolder::Private => "its variables and files are gone",
        WorkFolder::Shared => "its variables are gone, files in the working folder are kept",
    };
    let text = format!("Session \"{}\" is closed; {lost}.", session.as_str());
    finished(
        vec![ContentBlock::text(text)],
        json!({"session_id": session.as_str()}),
        false,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::parts;

    #[test]
    fn a_closed_session_says_what_is_lost() {
        let told = |folder| parts::<CloseTool>(closed(&"s".parse().unwrap(), folder)).0;
        assert!(told(WorkFolder::Private).ends_with("its variables and files are gone."));
        assert!(told(WorkFolder::Shared).ends_with("files in the working folder are kept."));
    }
}
