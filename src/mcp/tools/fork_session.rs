//! The tool `fork_session`.

use std::str::FromStr;

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use serde_json::{Value, json};

use super::schema::{
    Description, Reach, ToolEffect, files_schema, object, result_schema, session_schema,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::McpSettings;
use crate::mcp::arguments::{BadArgument, Given, at_odds, quoted, shown, wrong};
use crate::mcp::calls::{answer, or_cancelled};
use crate::mcp::render::{carried_fields, finished, not_carried_over};
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::ops::{self, HostExt};
use crate::session::{
    FilesCarried, ForkNames, ForkReport, ForkRequest, MAX_FORKS, SessionId, WorkFolder,
};

pub(super) struct ForkTool;

impl ToolDefinition for ForkTool {
    type Call = ops::Fork;

    const ENTRY: Entry = Entry {
        name: "fork_session",
        scope: Scope::Execute,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Copy a live session",
            text: format!(
                "Copies a session with its {what} into new sessions, in milliseconds; the source \
                 goes on untouched. Not while a cell is running. Threads and connections are not \
                 copied; not_carried_over says what.",
                what = match settings.work_folder {
                    WorkFolder::Private => "variables, imports and files",
                    WorkFolder::Shared => "variables and imports (files stay shared)",
                }
            ),
            input: object(
                json!({
                    "session_id": session_schema(settings),
                    "count": {"type": "integer", "minimum": 1, "maximum": MAX_FORKS, "default": 1},
                    "names": {
                        "type": "array", "minItems": 1, "maxItems": MAX_FORKS,
                        "items": {"type": "string"},
                        "description": "session_ids of the forks, instead of count.",
                    },
                    "mcp_servers": {
                        "type": "array", "items": {"type": "string"},
                        "description": "All that the forks may use: \"server\" or \"server.tool\", \
                                        * is any text.",
                    },
                }),
                &[],
            ),
            output: result_schema(json!({
                "forks": {"type": "array"},
                "source": {"type": "string"},
                "not_carried_over": {"type": "array"},
                "files": files_schema("copied, shared, left_alone"),
                "notes": {"type": "array"},
            })),
            effect: ToolEffect::Changes {
                destructive: false,
                idempotent: false,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ops::Fork, BadArgument> {
        let session = arguments.session();
        let (count, names) = (arguments.take("count"), arguments.take("names"));
        let names = fork_names(&session, count, names)?;
        let servers = server_names(arguments.take("mcp_servers"))?;
        Ok(ops::Fork {
            session,
            request: ForkRequest { names, servers },
        })
    }

    async fn run(op: ops::Fork, tool_context: ToolContext<'_>) -> CallToolResponse {
        let session = op.session.clone();
        let work = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, op);
        let done = or_cancelled(tool_context.context, work).await;
        answer(done, |report| forked(&session, &report)).into()
    }
}

/// Reads how many forks are wanted, and what they are to be called.
fn fork_names(source: &SessionId, count: Given, names: Given) -> Result<ForkNames, BadArgument> {
    let (tool, written) = (count.tool, count.value.is_some());
    let wanted = count.count(1..=u64::from(MAX_FORKS), 1)?;
    let Some(value) = names.value else {
        return Ok(ForkNames::Count(wanted as u32));
    };
    let refuse = |given: String| {
        wrong(
            tool,
            "names",
            given,
            format!("a list of 1 to {MAX_FORKS} names for the new sessions"),
        )
    };
    let Value::Array(items) = value else {
        return Err(refuse(shown(&value)));
    };
    if items.is_empty() || items.len() > MAX_FORKS as usize {
        return Err(refuse(format!("a list of {}", items.len())));
    }
    let mut ids: Vec<SessionId> = Vec::new();
    for item in items {
        let Value::String(text) = &item else {
            return Err(refuse(format!("a list with {} in it", shown(&item))));
        };
        let id = SessionId::from_str(text).map_err(|cause| {
            wrong(
                tool,
                "names",
                quoted(text),
                format!("names of sessions ({cause})"),
            )
        })?;
        if id == *source {
            return Err(at_odds(
                tool,
                "names",
                format!("holds {}, which is the session to fork", quoted(text)),
            ));
        }
        if ids.contains(&id) {
            return Err(at_odds(
                tool,
                "names",
                format!("holds {} twice", quoted(text)),
            ));
        }
        ids.push(id);
    }
    if written && wanted != ids.len() as u64 {
        let why = format!(
            "is {wanted}, but \"names\" has {}; leave one of them out",
            ids.len()
        );
        return Err(at_odds(tool, "count", why));
    }
    Ok(ForkNames::Named(ids))
}

/// Reads the names of MCP servers.
fn server_names(given: Given) -> Result<Option<Vec<String>>, BadArgument> {
    let (tool, name) = (given.tool, given.name);
    let Some(value) = given.value else {
        return Ok(None);
    };
    let refuse = |given: String| {
        wrong(
            tool,
            name,
            given,
            "a list of MCP servers (\"github\") or of some of their tools (\"github.list_*\")"
                .to_owned(),
        )
    };
    let Value::Array(items) = &value else {
        return Err(refuse(shown(&value)));
    };
    let names: Option<Vec<String>> = items
        .iter()
        .map(|item| item.as_str().map(str::to_owned))
        .collect();
    names
        .map(Some)
        .ok_or_else(|| refuse("a list with something else in it".to_owned()))
}

/// Renders new sessions that are copies of another.
fn forked(source: &SessionId, report: &ForkReport) -> CallToolResult {
    let names: Vec<String> = report
        .forks
        .iter()
        .map(|fork| format!("\"{fork}\""))
        .collect();
    let what = match &report.files {
        FilesCarried::Copied | FilesCarried::Restored => "variables, imports and files".to_owned(),
        FilesCarried::Shared => {
            "variables and imports; the working folder is the same for all sessions".to_owned()
        }
        FilesCarried::LeftAlone { why } => {
            format!("variables and imports, but not its files ({why})")
        }
    };
    let mut lines = vec![format!(
        "Session \"{source}\" was copied to {}. A copy starts with the source's {what}. From now \
         on \
         they do not affect each other. Close those that are not needed any more with \
         close_session.",
        names.join(", ")
    )];
    lines.extend(not_carried_over(&report.lost));
    lines.extend(report.notes.iter().cloned());
    let structured = json!({
        "forks": report.forks.iter().map(SessionId::as_str).collect::<Vec<_>>(),
        "source": source.as_str(),
        "not_carried_over": report.lost,
        "files": carried_fields(&report.files),
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
    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, parse, parts};

    #[test]
    fn forks_are_counted_or_named() {
        let forks = |arguments| parse::<ForkTool>(arguments).ok().unwrap().request.names;
        let id = |text: &str| text.parse().unwrap();
        assert_eq!(forks(json!({})), ForkNames::Count(1));
        assert_eq!(forks(json!({"count": 16})), ForkNames::Count(16));
        assert_eq!(
            forks(json!({"names": ["a", "b"]})),
            ForkNames::Named(vec![id("a"), id("b")])
        );
        assert_eq!(
            forks(json!({"names": ["a", "b"], "count": 2})),
            ForkNames::Named(vec![id("a"), id("b")])
        );
    }

    #[test]
    fn forks_that_make_no_sense_are_refused_with_the_reason() {
        let refused =
            |arguments: Value, words: &[&str]| check_refused::<ForkTool>(arguments, words);
        refused(json!({"count": 0}), &["\"count\"", "1 to 16"]);
        refused(json!({"count": 17}), &["\"count\"", "1 to 16", "17"]);
        refused(
            json!({"count": 3, "names": ["a", "b"]}),
            &["\"count\"", "is 3", "\"names\" has 2", "leave one"],
        );
        refused(json!({"names": []}), &["\"names\"", "a list of 0"]);
        refused(
            json!({"names": (0..17).map(|n| format!("n{n}")).collect::<Vec<_>>()}),
            &["\"names\"", "a list of 17"],
        );
        refused(json!({"names": "a"}), &["\"names\"", "the string \"a\""]);
        refused(json!({"names": [1]}), &["\"names\"", "a list with 1 in it"]);
        refused(
            json!({"names": ["a/b"]}),
            &["\"names\"", "\"a/b\"", "letters, digits"],
        );
        refused(json!({"names": ["a", "a"]}), &["\"names\"", "\"a\" twice"]);
        refused(
            json!({"session_id": "s", "names": ["s"]}),
            &["\"s\"", "the session to fork"],
        );
        refused(json!({"name": "a"}), &["\"names\"?"]);
    }

    #[test]
    fn the_schema_accepts_what_the_parser_accepts() {
        check_accepted::<ForkTool>(json!({"count": 16}));
        check_accepted::<ForkTool>(json!({"count": 2, "names": ["a", "b"]}));
    }

    fn fork_report(files: FilesCarried, lost: &[&str]) -> ForkReport {
        ForkReport {
            forks: ["s-1", "s-2"].map(|fork| fork.parse().unwrap()).to_vec(),
            lost: lost.iter().map(|text| (*text).to_owned()).collect(),
            files,
            notes: vec!["A note.".to_owned()],
        }
    }

    #[test]
    fn a_fork_names_the_copies_and_what_they_lack() {
        let session: SessionId = "s".parse().unwrap();
        let (text, structured) = parts::<ForkTool>(forked(
            &session,
            &fork_report(FilesCarried::Copied, &["2 threads", "1 pipe"]),
        ));
        for words in [
            "\"s-1\", \"s-2\"",
            "imports and files.",
            "Not carried over: 2 threads, 1 pipe.",
            "A note.",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text:?}");
        }
        assert_eq!(
            structured,
            json!({
                "forks": ["s-1", "s-2"],
                "source": "s",
                "not_carried_over": ["2 threads", "1 pipe"],
                "files": {"state": "copied", "why": null},
                "notes": ["A note."],
            })
        );
        let (text, structured) =
            parts::<ForkTool>(forked(&session, &fork_report(FilesCarried::Shared, &[])));
        assert!(
            text.contains("the same for all sessions") && !text.contains("Not carried over"),
            "{text}"
        );
        assert_eq!(structured["files"]["state"], "shared");
    }
}
