//! The tool `execute_ipython_cell`.

use std::time::Duration;

use rmcp::model::CallToolResponse;
use serde_json::{Value, json};

use super::schema::{
    Description, Reach, ToolEffect, object, result_schema, session_schema, timeout_schema,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{self, BadArgument, MAX_CODE_BYTES, MAX_OUTPUT_CHARS};
use crate::mcp::asking::ElicitationMode;
use crate::mcp::duration::Seconds;
use crate::mcp::resuming::ReplyMode;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{Front, McpSettings};
use crate::sandbox::Rules;
use crate::session::{ExecuteRequest, RecorderId, SessionId, WorkFolder};

pub(super) struct ExecuteTool;

#[derive(Debug, PartialEq)]
pub(super) struct ExecuteCall {
    session: SessionId,
    code: String,
    timeout: Duration,
    max_output_chars: usize,
    rules: Option<Rules>,
}

impl ToolDefinition for ExecuteTool {
    type Call = ExecuteCall;

    const ENTRY: Entry = Entry {
        name: "execute_ipython_cell",
        scope: Scope::Execute,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::MayBegin;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Run Python",
            text: format!(
                "Runs one IPython cell (magics, `!commands`, top-level `await`, plots) in a \
                 private Linux sandbox {reach} and returns what it printed, the value of its last \
                 expression and its images. Variables, imports and files stay for the next call \
                 with the same session_id; {new}. {files} After the timeout the code is \
                 interrupted; if it ignores that, it is killed and variables are lost. A failed \
                 cell is not rolled back{undo}. A cell that takes longer than {wait} goes on; \
                 check_execution tells how.{packages}",
                reach = settings.reach(),
                new = match settings.front {
                    Front::Stdio => "a new session_id starts a new session without variables",
                    Front::Http => "without one a new session is started, and the result names it",
                },
                files = what_lasts(settings),
                undo = if settings.can_undo { ": see undo" } else { "" },
                wait = Seconds(settings.max_wait),
                packages = settings.packages_told(),
            ),
            input: object(
                json!({
                    "code": {"type": "string", "description": "The cell."},
                    "session_id": session_schema(settings),
                    "timeout": timeout_schema(settings, "Seconds until the code is interrupted."),
                    "max_output_chars": {
                        "type": "integer", "minimum": 1, "maximum": MAX_OUTPUT_CHARS,
                        "default": settings.default_max_output_chars,
                        "description": "Longer text keeps its head and tail; the rest can be read \
                                        as a resource.",
                    },
                    "allowed_domains": {
                        "type": "array", "items": {"type": "string"},
                        "description": "Narrows what the session can reach, from now on.",
                    },
                }),
                &["code"],
            ),
            output: output_schema(),
            // Code can overwrite and delete the session's own files, so it is destructive within
            // the session.
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: false,
            },
            reach: Reach::AsCode,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ExecuteCall, BadArgument> {
        let default_chars = arguments.defaults.max_output_chars as u64;
        Ok(ExecuteCall {
            session: arguments.session(),
            code: arguments.take("code").text(MAX_CODE_BYTES, 0)?,
            timeout: arguments.timeout()?,
            max_output_chars: arguments
                .take("max_output_chars")
                .count(1..=MAX_OUTPUT_CHARS, default_chars)? as usize,
            rules: arguments::rules(arguments.take("allowed_domains"))?,
        })
    }

    async fn run(call: ExecuteCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let session = &call.session;
        let mode = ReplyMode {
            max_chars: call.max_output_chars,
            ..server.reply_mode(context)
        };
        let request = ExecuteRequest {
            code: call.code,
            timeout: call.timeout,
            max_output_chars: call.max_output_chars,
            asking: ElicitationMode::of(context).asking(),
            rules: call.rules,
            recorder: RecorderId::default(),
        };
        let told = server
            .begin(owner, session, request, Some(mode.wait), context)
            .await;
        server
            .answer_or_ask(owner, session, told, mode, context)
            .await
    }
}

/// Says truthfully how long variables and files last, which depends on where the working folder is.
fn what_lasts(settings: &McpSettings) -> String {
    let idle = Seconds(settings.idle_timeout);
    match settings.work_folder {
        WorkFolder::Private => format!(
            "Variables are lost at reset; files too when the session is closed, is not used for \
             {idle}, or the server \
             ends. Files are in the current folder, private to the session: nothing of the user's \
             computer is visible \
             until uploaded."
        ),
        WorkFolder::Shared => format!(
            "Variables are lost at reset, when the session is closed, is not used for {idle}, or \
             the server ends. The \
             current folder is one of the user's own: all sessions share it and its files stay; \
             nothing else of the \
             user's computer is visible."
        ),
    }
}

fn output_schema() -> Value {
    result_schema(json!({
        "session_id": {"type": "string"},
        "execution": {"type": "integer"},
        "status": {"type": "string"},
        "text": {"type": "string"},
        "images": {"type": "array"},
        "error": {"description": "null, or name, message, traceback, line"},
        "duration_ms": {"type": "number"},
        "memory_bytes": {"type": "integer"},
        "peak_memory_bytes": {"type": "integer"},
        "variables": {"description": "null, or created, changed, deleted, omitted"},
        "files": {"description": "the same"},
        "output": {"type": "object", "description": "chars, lines, cut_chars, resource, \
             figures, late_chars, late_omitted_chars"},
        "can_undo": {"type": "integer"},
        "isolation": {"type": "object"},
        "blocked": {"type": "array"},
        "tool_calls": {"type": "object", "description": "total, failed"},
        "notes": {"type": "array"},
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::OtherHosts;
    use crate::mcp::render::{self, Occasion};
    use crate::mcp::tools::Catalogue;
    use crate::mcp::tools::properties;
    use crate::mcp::tools::tests::{
        catalogue, check_accepted, check_refused, described, parse, parse_with, violations,
    };
    use crate::session::{ExecutionId, Underway};

    #[test]
    fn what_is_told_of_a_cell_that_goes_on_fits_the_schema_of_results() {
        let underway = Underway {
            handle: "0123456789abcdef0123456789abcdef".parse().unwrap(),
            session: SessionId::default_session(),
            execution: ExecutionId(3),
            first_line: "train()".to_owned(),
            ahead: 0,
            waits_for: None,
            elapsed: Duration::from_secs(50),
            text: "epoch 1\n".to_owned(),
            omitted: 3,
            approvals: Vec::new(),
            others: Box::default(),
        };
        let told = render::underway(&underway, Occasion::Answer)
            .structured_content
            .unwrap();
        let catalogue = catalogue();
        let schema = catalogue
            .get("execute_ipython_cell")
            .output_schema
            .as_deref()
            .unwrap();
        assert_eq!(
            violations(&Value::Object(schema.clone()), &told, ""),
            Vec::<String>::new()
        );
        assert_eq!(told["status"], "running");

        let waits_for = Some("its session is still starting".to_owned());
        let told = render::underway(
            &Underway {
                waits_for,
                ..underway
            },
            Occasion::Answer,
        );
        let told = told.structured_content.unwrap();
        assert_eq!(
            violations(&Value::Object(schema.clone()), &told, ""),
            Vec::<String>::new()
        );
        assert_eq!(told["status"], "waiting");
        let text = told["text"].as_str().unwrap();
        assert!(
            text.contains("has not begun after 50 s: its session is still starting."),
            "{text}"
        );
        assert!(!text.contains("still running"), "{text}");
    }

    #[test]
    fn the_network_is_described_as_it_is() {
        let described = |network| {
            let settings = McpSettings {
                network,
                ..McpSettings::default()
            };
            described::<ExecuteTool>(&settings)
        };
        assert!(described(Rules::none()).contains("without network"));
        assert!(described(Rules::everything()).contains("with network"));
        let few =
            described(Rules::parse(&["example.com", "10.0.0.0/8:5432", "!b.example.com"]).unwrap());
        assert!(
            few.contains("only example.com, 10.0.0.0/8:5432, but not b.example.com"),
            "{few}"
        );
        let many: Vec<String> = (0..100)
            .map(|number| format!("host{number}.example.com"))
            .collect();
        assert!(described(Rules::parse(&many).unwrap()).contains("only 100 listed places"));
    }

    #[test]
    fn hosts_that_can_be_asked_about_are_not_called_out_of_reach() {
        let described = |network| {
            let settings = McpSettings {
                network,
                other_hosts: OtherHosts::AskedAbout,
                ..McpSettings::default()
            };
            described::<ExecuteTool>(&settings)
        };
        let nothing = described(Rules::none());
        assert!(
            nothing.contains("needs a permission for every host")
                && !nothing.contains("without network"),
            "{nothing}"
        );
        let some = described(Rules::parse(&["example.com", "!b.example.com"]).unwrap());
        assert!(
            some.contains(
                "only example.com (other hosts need a permission), but not b.example.com"
            ),
            "{some}"
        );
    }

    #[test]
    fn the_description_names_the_configured_idle_time() {
        let settings = McpSettings {
            idle_timeout: Duration::from_secs(5400),
            ..McpSettings::default()
        };
        let text = described::<ExecuteTool>(&settings);
        assert!(text.contains("not used for 90 min"), "{text}");
    }

    #[test]
    fn the_description_names_packages_that_are_there() {
        let described = |packages: &[String], can_install| {
            let settings = McpSettings {
                packages: packages.to_vec(),
                can_install,
                ..McpSettings::default()
            };
            described::<ExecuteTool>(&settings)
        };
        let two = ["numpy".to_owned(), "pandas".to_owned()];
        assert!(
            described(&two, true)
                .ends_with(" Installed: numpy, pandas; install_package adds others.")
        );
        assert!(described(&two, false).ends_with(" Installed: numpy, pandas."));
        let many: Vec<String> = (0..50).map(|number| format!("p{number}")).collect();
        assert!(described(&many, false).ends_with("p29 and 20 more."));
        assert!(
            !described(&[], true).contains("Installed"),
            "nothing is known of an image"
        );
    }

    #[test]
    fn a_call_with_only_code_gets_the_defaults() {
        assert_eq!(
            parse::<ExecuteTool>(json!({"code": ""})).unwrap(),
            ExecuteCall {
                session: "default".parse().unwrap(),
                code: String::new(),
                timeout: Duration::from_secs(120),
                max_output_chars: 5000,
                rules: None,
            }
        );
    }

    #[test]
    fn every_argument_is_used_when_it_is_given() {
        let arguments = json!({
            "code": "1", "session_id": "a.b-c", "timeout": 0.5, "max_output_chars": 7.0,
            "allowed_domains": ["a.test"],
        });
        assert_eq!(
            parse::<ExecuteTool>(arguments).unwrap(),
            ExecuteCall {
                session: "a.b-c".parse().unwrap(),
                code: "1".to_owned(),
                timeout: Duration::from_millis(500),
                max_output_chars: 7,
                rules: Some(Rules::parse(&["a.test"]).unwrap()),
            }
        );
    }

    #[test]
    fn a_misspelt_argument_is_answered_with_the_nearest_name() {
        check_refused::<ExecuteTool>(
            json!({"code": "1", "time_out": 3}),
            &["\"time_out\"", "\"timeout\"?"],
        );
        check_refused::<ExecuteTool>(
            json!({"code": "1", "sessionId": "a"}),
            &["\"sessionId\"", "\"session_id\"?"],
        );
    }

    #[test]
    fn an_argument_unlike_any_other_is_answered_with_the_list() {
        check_refused::<ExecuteTool>(
            json!({"code": "1", "zzz": 3}),
            &[
                "\"zzz\"",
                "It takes: allowed_domains, code, max_output_chars",
            ],
        );
    }

    #[test]
    fn missing_code_is_named() {
        check_refused::<ExecuteTool>(json!({}), &["needs the argument \"code\""]);
    }

    #[test]
    fn wrong_types_are_named_with_what_was_given() {
        check_refused::<ExecuteTool>(json!({"code": 5}), &["\"code\"", "but it was 5"]);
        check_refused::<ExecuteTool>(
            json!({"code": "1", "timeout": "9"}),
            &["\"timeout\"", "the string \"9\""],
        );
        check_refused::<ExecuteTool>(
            json!({"code": "1", "session_id": null}),
            &["\"session_id\"", "null", "default"],
        );
        check_refused::<ExecuteTool>(json!({"code": ["a"]}), &["\"code\"", "a list"]);
    }

    #[test]
    fn numbers_out_of_range_are_refused_and_the_bounds_themselves_are_not() {
        for timeout in [json!(0), json!(-1), json!(3_600.5), json!(1e300)] {
            check_refused::<ExecuteTool>(
                json!({"code": "1", "timeout": timeout}),
                &["\"timeout\"", "at most 3600"],
            );
        }
        for chars in [json!(0), json!(-5), json!(1.5), json!(1_000_001)] {
            let arguments = json!({"code": "1", "max_output_chars": chars});
            check_refused::<ExecuteTool>(arguments, &["\"max_output_chars\"", "1 to 1000000"]);
        }
        for (timeout, chars) in [(3_600, 1), (1, 1_000_000)] {
            parse::<ExecuteTool>(
                json!({"code": "1", "timeout": timeout, "max_output_chars": chars}),
            )
            .unwrap();
        }
    }

    #[test]
    fn the_longest_time_out_is_the_operators() {
        let settings = McpSettings {
            max_timeout: Duration::from_secs(10),
            ..McpSettings::default()
        };
        let catalogue = Catalogue::new(&settings);
        let parse = |timeout: u64| {
            parse_with::<ExecuteTool>(&catalogue, json!({"code": "1", "timeout": timeout}))
        };
        parse(10).unwrap();
        assert!(parse(11).unwrap_err().to_string().contains("at most 10"));
        assert_eq!(
            properties(catalogue.get("execute_ipython_cell"))["timeout"]["maximum"],
            json!(10.0)
        );
    }

    #[test]
    fn code_over_four_mebibytes_is_refused_and_exactly_that_is_not() {
        parse::<ExecuteTool>(json!({"code": "a".repeat(MAX_CODE_BYTES)})).unwrap();
        check_refused::<ExecuteTool>(
            json!({"code": "a".repeat(MAX_CODE_BYTES + 1)}),
            &["4194305 bytes"],
        );
    }

    #[test]
    fn the_schema_accepts_what_the_parser_accepts() {
        check_accepted::<ExecuteTool>(
            json!({"code": "", "session_id": "a", "timeout": 0.001, "max_output_chars": 1}),
        );
        check_accepted::<ExecuteTool>(
            json!({"code": "x", "timeout": 3_600, "max_output_chars": 1_000_000}),
        );
    }
}
