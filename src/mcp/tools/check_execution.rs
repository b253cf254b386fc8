//! The tool `check_execution`.

use std::time::Duration;

use rmcp::model::CallToolResponse;
use serde_json::json;

use super::schema::{Description, Reach, ToolEffect, object, session_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::BadArgument;
use crate::mcp::calls::with_progress;
use crate::mcp::progress::Reporter;
use crate::mcp::resuming::ReplyMode;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{McpSettings, Shared, render};
use crate::ops::{self, HostExt, Io};
use crate::session::{ExecutionRef, ProgressChannel, SessionId};

pub(super) struct CheckTool;

#[derive(Debug, PartialEq)]
pub(super) struct CheckCall {
    session: SessionId,
    wait: Duration,
    interrupt: bool,
}

impl ToolDefinition for CheckTool {
    type Call = CheckCall;

    const ENTRY: Entry = Entry {
        name: "check_execution",
        scope: Scope::Execute,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        let max_wait = settings.max_wait.as_secs_f64();
        Description {
            title: "Go on with a long cell",
            text: "Waits for a cell that was still running: new output, or its result. After a \
                   lost connection it tells the last result again."
                .to_owned(),
            input: object(
                json!({
                    "session_id": session_schema(settings),
                    "wait": {
                        "type": "number", "minimum": 0, "maximum": max_wait, "default": max_wait,
                    },
                    "interrupt": {"type": "boolean", "default": false},
                }),
                &[],
            ),
            output: json!({"type": "object", "description": "As of execute_ipython_cell."}),
            effect: ToolEffect::Changes {
                destructive: false,
                idempotent: false,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<CheckCall, BadArgument> {
        Ok(CheckCall {
            session: arguments.session(),
            wait: arguments.take("wait").wait(arguments.defaults.max_wait)?,
            interrupt: arguments.take("interrupt").flag()?,
        })
    }

    async fn run(call: CheckCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let CheckCall {
            session,
            wait,
            interrupt,
        } = call;
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let Shared {
            sessions,
            jobs,
            most_compared_chars,
            ..
        } = &*server.shared;
        if let Some(mut job) = jobs.get(owner, &session) {
            if interrupt {
                job.cancel.cancel();
            }
            return match job.result(wait).await {
                Some(result) => {
                    jobs.clear(owner, &session);
                    result.into()
                }
                None => server.at_work(&session, &job).into(),
            };
        }
        let which = ExecutionRef::InSession(session.clone());
        if interrupt {
            let execution = which.clone();
            if let Err(refused) = sessions.run(owner, ops::Interrupt { execution }).await {
                return render::refused(&refused).into();
            }
        }
        let news = ProgressChannel::default();
        let reporter = Reporter::new(sessions.preparation(), wait, &news);
        let checking = sessions.run_with(
            owner,
            ops::Check {
                execution: which,
                wait,
                max_chars: *most_compared_chars,
            },
            Io {
                progress: news,
                ..Io::default()
            },
        );
        let told = with_progress(checking, reporter, context).await;
        let mode = ReplyMode {
            wait,
            max_chars: *most_compared_chars,
            as_task: false,
            is_check: true,
        };
        server
            .answer_or_ask(owner, &session, told, mode, context)
            .await
    }
}
