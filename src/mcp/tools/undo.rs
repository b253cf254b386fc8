//! The tool `undo`.

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::json;

use super::schema::{
    Description, Reach, ToolEffect, checkpoints_schema, files_schema, object, result_schema,
    session_schema, switched_off,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::{BadArgument, MAX_CELLS};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::render::{carried_fields, checkpoint_fields, finished, not_carried_over};
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::{FilesCarried, SessionId, UndoReport, WorkFolder, most_undone};

pub(super) struct UndoTool;

impl ToolDefinition for UndoTool {
    type Call = ops::Undo;

    const ENTRY: Entry = Entry {
        name: "undo",
        scope: Scope::Execute,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Take cells back",
            text: format!(
                "Brings a session back to how it was before its last cells: variables{files}. Also \
                 after Python has died (out of memory, killed, os._exit): cells=1 is then the cell \
                 that killed it. Not while a cell is running; a reset cannot be undone.{off}",
                files = match settings.work_folder {
                    WorkFolder::Private => " and files",
                    WorkFolder::Shared => {
                        ", and files if the folder is small enough; the result says whether"
                    }
                },
                off = switched_off(settings),
            ),
            input: object(
                json!({
                    "session_id": session_schema(settings),
                    "cells": {"type": "integer", "minimum": 1, "maximum": MAX_CELLS, "default": 1},
                }),
                &[],
            ),
            output: result_schema(json!({
                "session_id": {"type": "string"},
                "undone": {"type": "integer"},
                "revived": {"type": "boolean"},
                "not_carried_over": {"type": "array"},
                "files": files_schema("restored, shared, left_alone"),
                "can_undo": checkpoints_schema(),
                "notes": {"type": "array"},
            })),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: false,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::Undo, BadArgument> {
        Ok(ops::Undo {
            session: arguments.session(),
            cells: arguments.take("cells").count(1..=MAX_CELLS, 1)? as u32,
        })
    }

    async fn run(op: ops::Undo, tool_context: ToolContext<'_>) -> CallToolResponse {
        let session = op.session.clone();
        let work = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op);
        let done = or_cancelled(tool_context.context, work).await;
        answer(done, |report| undone(&session, &report)).into()
    }
}

/// Renders a session that is back where it was.
fn undone(session: &SessionId, report: &UndoReport) -> CallToolResult {
    let cells = match report.undone {
        1 => "The last cell".to_owned(),
        cells => format!("The last {cells} cells"),
    };
    let verb = if report.undone == 1 { "is" } else { "are" };
    let files = match &report.files {
        FilesCarried::Restored | FilesCarried::Copied => {
            "Variables and files of the working folder are as they were before.".to_owned()
        }
        FilesCarried::Shared => {
            "Variables are as they were before. The working folder is shared by all sessions, and \
                                 its files were left as they are."
                .to_owned()
        }
        FilesCarried::LeftAlone { why } => {
            format!("Variables are as they were before. Files were left as they are: {why}.")
        }
    };
    let revived = if report.revived {
        " Python had ended and is back."
    } else {
        ""
    };
    let mut lines = vec![format!(
        "{cells} of session \"{session}\" {verb} undone.{revived} {files}"
    )];
    lines.extend(not_carried_over(&report.lost));
    lines.extend(report.notes.iter().cloned());
    lines.push(match most_undone(&report.left) {
        0 => "Nothing more can be undone.".to_owned(),
        1 => "1 more cell can be undone.".to_owned(),
        more => format!("{more} more cells can be undone."),
    });
    let structured = json!({
        "session_id": session.as_str(),
        "undone": report.undone,
        "revived": report.revived,
        "not_carried_over": report.lost,
        "files": carried_fields(&report.files),
        "can_undo": checkpoint_fields(&report.left),
        "notes": report.notes,
    });
    finished(
        vec![ContentBlock::text(lines.join("\n"))],
        structured,
        false,
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, described, parse, parts};
    use crate::session::CheckpointInfo;

    #[test]
    fn an_undo_takes_one_cell_back_unless_more_are_named() {
        let parsed = |arguments| {
            let op = parse::<UndoTool>(arguments).ok().unwrap();
            (op.session.to_string(), op.cells)
        };
        assert_eq!(parsed(json!({})), ("default".to_owned(), 1));
        let arguments = json!({"session_id": "s", "cells": 100});
        check_accepted::<UndoTool>(arguments.clone());
        assert_eq!(parsed(arguments), ("s".to_owned(), 100));
        for cells in [
            json!(0),
            json!(-1),
            json!(101),
            json!(1.5),
            json!("1"),
            json!(null),
        ] {
            check_refused::<UndoTool>(json!({"cells": cells}), &["\"cells\"", "1 to 100"]);
        }
        check_refused::<UndoTool>(json!({"cell": 1}), &["\"cells\"?"]);
    }

    #[test]
    fn a_server_that_cannot_undo_says_so() {
        let described = |can_undo| {
            described::<UndoTool>(&McpSettings {
                can_undo,
                ..McpSettings::default()
            })
        };
        assert!(described(true).starts_with("Brings") && !described(true).contains("Switched off"));
        assert!(described(false).contains("Switched off"));
    }

    fn undo_report(files: FilesCarried, lost: &[&str]) -> UndoReport {
        let checkpoint = |cells_back, before: &str| CheckpointInfo {
            cells_back,
            before: before.to_owned(),
            age: Duration::from_millis(2500),
        };
        UndoReport {
            undone: 1,
            revived: false,
            lost: lost.iter().map(|text| (*text).to_owned()).collect(),
            files,
            left: vec![checkpoint(1, "x = 2"), checkpoint(3, "x = 1")],
            notes: Vec::new(),
        }
    }

    #[test]
    fn an_undo_tells_what_is_back_and_what_more_could_be() {
        let session: SessionId = "s".parse().unwrap();
        let (text, structured) =
            parts::<UndoTool>(undone(&session, &undo_report(FilesCarried::Restored, &[])));
        assert!(
            text.starts_with("The last cell of session \"s\" is undone. Variables and files"),
            "{text}"
        );
        assert!(text.ends_with("3 more cells can be undone."), "{text}");
        assert_eq!(
            structured["can_undo"][1],
            json!({"cells": 3, "before": "x = 1", "age_seconds": 2.5})
        );
        assert_eq!(
            structured["files"],
            json!({"state": "restored", "why": null})
        );
        let why = FilesCarried::LeftAlone {
            why: "the folder holds more than 64 MiB".to_owned(),
        };
        let crashed = UndoReport {
            undone: 2,
            revived: true,
            left: vec![],
            ..undo_report(why, &["1 connection"])
        };
        let (text, structured) = parts::<UndoTool>(undone(&session, &crashed));
        for words in [
            "The last 2 cells",
            "are undone",
            "Python had ended and is back",
            "Files were left as they are: the folder holds more than 64 MiB.",
            "Not carried over: 1 connection.",
            "Nothing more can be undone.",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text:?}");
        }
        assert_eq!(structured["revived"], true);
        assert_eq!(
            structured["files"]["why"],
            "the folder holds more than 64 MiB"
        );
    }
}
