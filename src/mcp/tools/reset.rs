//! The tool `reset`.

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
use crate::sandbox::Preparation;
use crate::session::{ResetReport, SessionId};

pub(super) struct ResetTool;

impl ToolDefinition for ResetTool {
    type Call = ops::Reset;

    const ENTRY: Entry = Entry {
        name: "reset",
        scope: Scope::Execute,
        extent: Extent::FirstStepSoon,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Restart Python",
            text: "Starts Python anew in a session, also while a cell is running (that cell is \
                   stopped) and after Python has died. Variables and imports are lost; files are \
                   kept."
                .to_owned(),
            input: object(json!({"session_id": session_schema(settings)}), &[]),
            output: result_schema(json!({
                "session_id": {"type": "string"},
                "interrupted_running_cell": {"type": "boolean"},
                "files_kept": {"type": "boolean"},
            })),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: true,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::Reset, BadArgument> {
        Ok(ops::Reset {
            session: arguments.session(),
        })
    }

    async fn run(op: ops::Reset, tool_context: ToolContext<'_>) -> CallToolResponse {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let sessions = &server.shared.sessions;
        let session = op.session.clone();
        let work = or_cancelled(context, sessions.run(owner, op));
        let result = match tokio::time::timeout(server.shared.max_wait, work).await {
            Ok(done) => answer(done, |report| {
                reset(&session, &report, &sessions.preparation().borrow())
            }),
            // The session itself goes on with it.
            Err(_) => resetting(&session, server.being_prepared()),
        };
        result.into()
    }
}

/// Renders a reset.
fn reset(session: &SessionId, report: &ResetReport, preparation: &Preparation) -> CallToolResult {
    let running = if report.interrupted_running_cell {
        " The cell that was running was stopped."
    } else {
        ""
    };
    let files = if report.files_kept {
        "files in the working folder are kept"
    } else {
        "files are gone too"
    };
    let begun = match report.had_no_session {
        true => format!("Session \"{session}\" has no Python now; the next cell starts one anew."),
        false => format!("Python was started anew in session \"{session}\"."),
    };
    let mut text = format!("{begun}{running} Variables and imports are gone; {files}.");
    match preparation {
        Preparation::Failed { why } if report.had_no_session => {
            text.push_str(&format!(
                "\nPython could not be started when this was last tried: {why}\nThe server tries \
                 it again by itself and \
                 with the next cell."
            ));
        }
        other if report.had_no_session => {
            let step = other
                .step_text()
                .map(|step| format!(" Python is being prepared ({step})."));
            text.push_str(&step.unwrap_or_default());
        }
        _ => {}
    }
    let structured = json!({
        "session_id": session.as_str(),
        "interrupted_running_cell": report.interrupted_running_cell,
        "files_kept": report.files_kept,
    });
    finished(vec![ContentBlock::text(text)], structured, false)
}

/// Renders a reset that waits for something.
fn resetting(session: &SessionId, waits_for: Option<String>) -> CallToolResult {
    let why = waits_for.map_or(String::new(), |why| format!(" ({why})"));
    let text = format!(
        "Session \"{session}\" is not ready yet{why}. Cells that waited in it will not run. The \
         next cell waits until it \
         is ready."
    );
    let structured = json!({
        "session_id": session.as_str(),
        "interrupted_running_cell": false,
        "files_kept": true,
        "status": "waiting",
    });
    finished(vec![ContentBlock::text(text)], structured, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, parse, parts};

    #[test]
    fn a_reset_tells_what_it_stopped_and_kept() {
        let session: SessionId = "s".parse().unwrap();
        let told = |interrupted_running_cell, files_kept| {
            let report = ResetReport {
                interrupted_running_cell,
                files_kept,
                had_no_session: false,
            };
            parts::<ResetTool>(reset(&session, &report, &Preparation::Ready)).0
        };
        assert!(told(true, true).contains("was stopped") && told(true, true).contains("are kept"));
        assert!(
            !told(false, false).contains("was stopped")
                && told(false, false).contains("files are gone too")
        );
    }

    #[test]
    fn a_reset_that_waits_says_for_what() {
        let why = Some("Python is being prepared".to_owned());
        let (text, _) = parts::<ResetTool>(resetting(&"s".parse().unwrap(), why));
        assert!(
            text.contains("not ready yet (Python is being prepared)"),
            "{text}"
        );
    }

    #[test]
    fn a_reset_of_nothing_does_not_claim_that_python_was_started() {
        let report = ResetReport {
            interrupted_running_cell: false,
            files_kept: true,
            had_no_session: true,
        };
        let told = |preparation: &Preparation| {
            parts::<ResetTool>(reset(&"s".parse().unwrap(), &report, preparation)).0
        };
        let ready = told(&Preparation::Ready);
        assert!(
            !ready.contains("was started") && ready.contains("the next cell starts one"),
            "{ready}"
        );
        let working = Preparation::Working {
            step: "downloading packages".to_owned(),
            done: 3,
            total: Some(54),
        };
        assert!(
            told(&working).ends_with("Python is being prepared (downloading packages, 3 of 54).")
        );
        let failed = told(&Preparation::Failed {
            why: "no network".to_owned(),
        });
        assert!(
            failed.contains("could not be started") && failed.contains("no network"),
            "{failed}"
        );
        assert!(failed.contains("tries it again"), "{failed}");
    }

    #[test]
    fn bad_names_of_sessions_are_refused() {
        check_accepted::<ResetTool>(json!({"session_id": "a".repeat(64)}));
        check_refused::<ResetTool>(json!({"session_id": "a/b"}), &["\"session_id\"", "\"a/b\""]);
        check_refused::<ResetTool>(json!({"session_id": ".."}), &["\"session_id\""]);
    }

    #[test]
    fn a_long_refused_value_is_not_sent_back_whole() {
        let text = parse::<ResetTool>(json!({"session_id": "x".repeat(100_000)}))
            .err()
            .unwrap()
            .to_string();
        assert!(text.len() < 400, "{} bytes", text.len());
    }
}
