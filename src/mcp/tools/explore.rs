//! The tool `explore`. `comparison` renders the result.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::CallToolResponse;
use serde_json::{Value, json};

use super::comparison::comparison;
use super::schema::{
    Description, Reach, ToolEffect, object, result_schema, session_schema, timeout_schema,
};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{BadArgument, Given, MAX_CODE_BYTES, at_odds, quoted, shown, wrong};
use crate::mcp::jobs::{Job, JobKind};
use crate::mcp::progress::Reporter;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{McpSettings, render};
use crate::ops::{self, HostExt, Io};
use crate::session::{
    ExploreRequest, Keep, MAX_VARIANTS, ProgressChannel, RecorderId, SessionId, Variant,
};

/// Bytes of the expression that chooses a variant. It is one number, not a program.
const MAX_EXPRESSION_LENGTH: usize = 4096;

/// Characters of a variant's name: with the name of its source before it, it names the session that
/// is kept.
const MAX_VARIANT_LENGTH: usize = 40;

/// Words that `keep` has a meaning for, so that no variant can be called by them.
const KEEP_WORDS: [&str; 3] = ["none", "all", "best"];

pub(super) struct ExploreTool;

#[derive(Debug, PartialEq)]
pub(super) struct ExploreCall {
    session: SessionId,
    variants: Vec<Variant>,
    timeout: Duration,
    keep: Keep,
    replace: bool,
}

impl ToolDefinition for ExploreTool {
    type Call = ExploreCall;

    const ENTRY: Entry = Entry {
        name: "explore",
        scope: Scope::Execute,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::Existing;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Try variants side by side",
            text: "Runs several pieces of code at the same time, each in its own copy of the \
                   session, and compares status, value, output, time, memory and changed \
                   variables. The session itself is not changed unless replace is true."
                .to_owned(),
            input: object(
                json!({
                    "variants": {
                        "type": "array", "minItems": 1, "maxItems": MAX_VARIANTS,
                        "items": object(
                            json!({
                                "name": {"type": "string", "maxLength": MAX_VARIANT_LENGTH},
                                "code": {"type": "string"},
                            }),
                            &["name", "code"],
                        ),
                    },
                    "session_id": session_schema(settings),
                    "timeout": timeout_schema(settings, "Seconds for each variant."),
                    "keep": {
                        "type": "string", "default": "none",
                        "description": "Which copies stay as sessions: none, all, best, or a \
                                        variant's name.",
                    },
                    "best_by": {
                        "type": "string",
                        "description": "For best: Python expression, evaluated in each copy; the \
                                        largest wins.",
                    },
                    "replace": {
                        "type": "boolean", "default": false,
                        "description": "The one kept copy takes the session's place.",
                    },
                }),
                &["variants"],
            ),
            output: result_schema(json!({
                "session_id": {"type": "string"},
                "variants": {
                    "type": "array",
                    "description": "Each: name, status, value, text, duration_ms, memory_bytes, \
                                    variables, error, score.",
                },
                "kept": {"type": "array"},
                "replaced": {"type": "boolean"},
                "images": {"type": "array"},
                "not_carried_over": {"type": "array"},
                "notes": {"type": "array"},
            })),
            effect: ToolEffect::Changes {
                destructive: true,
                idempotent: false,
            },
            reach: Reach::AsCode,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<ExploreCall, BadArgument> {
        let session = arguments.session();
        let variants = variants(arguments.take("variants"))?;
        let timeout = arguments.timeout()?;
        let (keep, best_by) = (arguments.take("keep"), arguments.take("best_by"));
        let (keep, replace) = kept(&variants, keep, best_by, arguments.take("replace"))?;
        Ok(ExploreCall {
            session,
            variants,
            timeout,
            keep,
            replace,
        })
    }

    async fn run(call: ExploreCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let sessions = Arc::clone(&server.shared.sessions);
        let most_chars = server.shared.most_compared_chars;
        let request = ExploreRequest {
            variants: call.variants,
            timeout: call.timeout,
            max_output_chars: most_chars,
            keep: call.keep,
            replace: call.replace,
            recorder: RecorderId::default(),
        };
        let news = ProgressChannel::default();
        let reporter = Reporter::new(sessions.preparation(), call.timeout, &news);
        let (whose, session, told) = (owner.clone(), call.session.clone(), news.clone());
        let job = Job::begin(JobKind::Exploration, &news, |cancel| async move {
            let op = ops::Explore {
                session: session.clone(),
                request,
            };
            let io = Io {
                cancel,
                progress: told,
                ..Io::default()
            };
            match sessions.run_with(&whose, op, io).await {
                Ok(report) => comparison(&session, &report, most_chars),
                Err(refused) => render::refused(&refused),
            }
        })
        .await;
        server
            .wait_for_job(owner, call.session, job, reporter, context)
            .await
            .into()
    }
}

/// Reads the variants of an `explore`.
fn variants(given: Given) -> Result<Vec<Variant>, BadArgument> {
    let (tool, name) = (given.tool, given.name);
    let expected = format!("a list of 1 to {MAX_VARIANTS} objects {{\"name\": …, \"code\": …}}");
    let refuse = |what: String| wrong(tool, name, what, expected.clone());
    let Some(value) = given.value else {
        return Err(BadArgument::Missing {
            tool,
            name,
            expected,
        });
    };
    let Value::Array(items) = value else {
        return Err(refuse(shown(&value)));
    };
    if items.is_empty() || items.len() > MAX_VARIANTS {
        return Err(refuse(format!("a list of {}", items.len())));
    }
    let mut variants: Vec<Variant> = Vec::new();
    for item in items {
        let Value::Object(mut fields) = item else {
            return Err(refuse(format!("a list with {} in it", shown(&item))));
        };
        let (label, code) = match (
            fields.remove("name"),
            fields.remove("code"),
            fields.keys().next(),
        ) {
            (Some(Value::String(label)), Some(Value::String(code)), None) => (label, code),
            (_, _, Some(other)) => {
                return Err(refuse(format!(
                    "a list with an object that has {}",
                    quoted(other)
                )));
            }
            _ => {
                return Err(refuse(
                    "a list with an object whose name or code is missing or no string".to_owned(),
                ));
            }
        };
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if label.is_empty() || label.len() > MAX_VARIANT_LENGTH || !label.bytes().all(allowed) {
            let rule = format!(
                "variants whose names have 1 to {MAX_VARIANT_LENGTH} letters, digits, `_`, `.` or \
                 `-`"
            );
            return Err(wrong(
                tool,
                name,
                format!("a list with the name {}", quoted(&label)),
                rule,
            ));
        }
        if KEEP_WORDS.contains(&label.as_str()) {
            let why = format!(
                "has one called {}, which is a word of \"keep\"; call it something else",
                quoted(&label)
            );
            return Err(at_odds(tool, name, why));
        }
        if variants.iter().any(|other| other.name == label) {
            return Err(at_odds(
                tool,
                name,
                format!("has two called {}", quoted(&label)),
            ));
        }
        if code.len() > MAX_CODE_BYTES {
            let why = format!(
                "has {} bytes of code in {}; at most {MAX_CODE_BYTES} are accepted",
                code.len(),
                quoted(&label)
            );
            return Err(at_odds(tool, name, why));
        }
        variants.push(Variant { name: label, code });
    }
    Ok(variants)
}

/// Reads which variants are kept, and whether the kept one takes the place of its source.
fn kept(
    variants: &[Variant],
    keep: Given,
    best_by: Given,
    replace: Given,
) -> Result<(Keep, bool), BadArgument> {
    let tool = keep.tool;
    let best_by = match best_by.value {
        Some(_) => Some(best_by.text(MAX_EXPRESSION_LENGTH, 1)?),
        None => None,
    };
    let replace = replace.flag()?;
    let word = match keep.value {
        None => "none".to_owned(),
        Some(_) => keep.text(MAX_VARIANT_LENGTH, 1)?,
    };
    let keep = match (word.as_str(), best_by) {
        ("best", Some(by)) => Keep::Best { by },
        ("best", None) => {
            let expected =
                "a Python expression such as \"score\"; the variant where it is largest is kept"
                    .to_owned();
            return Err(BadArgument::Missing {
                tool,
                name: "best_by",
                expected,
            });
        }
        (_, Some(_)) => {
            return Err(at_odds(
                tool,
                "best_by",
                "chooses what to keep, so it needs \"keep\" to be \"best\"".to_owned(),
            ));
        }
        ("none", None) => Keep::Nothing,
        ("all", None) => Keep::All,
        (name, None) if variants.iter().any(|variant| variant.name == name) => {
            Keep::Named(name.to_owned())
        }
        (other, None) => {
            let names: Vec<&str> = variants
                .iter()
                .map(|variant| variant.name.as_str())
                .collect();
            let expected = format!(
                "none, all, best or the name of a variant ({})",
                names.join(", ")
            );
            return Err(wrong(tool, "keep", quoted(other), expected));
        }
    };
    if replace && matches!(keep, Keep::Nothing | Keep::All) {
        let why = "needs exactly one variant to be kept: give \"keep\" as \"best\" or the name of \
                   a variant";
        return Err(at_odds(tool, "replace", why.to_owned()));
    }
    Ok((keep, replace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::{check_accepted, check_refused, parse};

    fn variant(name: &str, code: &str) -> Variant {
        Variant {
            name: name.to_owned(),
            code: code.to_owned(),
        }
    }

    /// Arguments of `explore` with two variants and whatever a case adds.
    fn explore(more: Value) -> Value {
        let mut arguments =
            json!({"variants": [{"name": "a", "code": "1"}, {"name": "b.2", "code": "2"}]});
        for (name, value) in more.as_object().unwrap() {
            arguments[name] = value.clone();
        }
        arguments
    }

    #[test]
    fn an_exploration_with_only_variants_gets_the_defaults() {
        assert_eq!(
            parse::<ExploreTool>(explore(json!({}))).unwrap(),
            ExploreCall {
                session: "default".parse().unwrap(),
                variants: vec![variant("a", "1"), variant("b.2", "2")],
                timeout: Duration::from_secs(120),
                keep: Keep::Nothing,
                replace: false
            }
        );
    }

    #[test]
    fn every_way_to_keep_is_understood() {
        let kept = |more| {
            let call = parse::<ExploreTool>(explore(more)).unwrap();
            (call.keep, call.replace)
        };
        assert_eq!(kept(json!({"keep": "none"})), (Keep::Nothing, false));
        assert_eq!(kept(json!({"keep": "all"})), (Keep::All, false));
        assert_eq!(
            kept(json!({"keep": "b.2", "replace": true})),
            (Keep::Named("b.2".to_owned()), true)
        );
        let best = Keep::Best {
            by: "-error".to_owned(),
        };
        assert_eq!(
            kept(json!({"keep": "best", "best_by": "-error", "replace": true})),
            (best, true)
        );
    }

    #[test]
    fn what_is_kept_must_be_one_of_the_variants_and_make_sense() {
        let refused =
            |more: Value, words: &[&str]| check_refused::<ExploreTool>(explore(more), words);
        refused(
            json!({"keep": "c"}),
            &["\"keep\"", "none, all, best", "(a, b.2)", "\"c\""],
        );
        refused(json!({"keep": 1}), &["\"keep\"", "but it was 1"]);
        refused(
            json!({"keep": "best"}),
            &["needs the argument \"best_by\"", "largest"],
        );
        refused(
            json!({"best_by": "x"}),
            &["\"best_by\"", "\"keep\" to be \"best\""],
        );
        refused(json!({"keep": "all", "best_by": "x"}), &["\"best_by\""]);
        refused(
            json!({"keep": "best", "best_by": ""}),
            &["\"best_by\"", "0 bytes"],
        );
        refused(
            json!({"keep": "best", "best_by": "x".repeat(5000)}),
            &["\"best_by\"", "5000 bytes"],
        );
        refused(
            json!({"replace": true}),
            &["\"replace\"", "exactly one variant"],
        );
        refused(
            json!({"keep": "all", "replace": true}),
            &["\"replace\"", "exactly one variant"],
        );
        refused(
            json!({"keep": "a", "replace": "yes"}),
            &["\"replace\"", "true or false"],
        );
        refused(json!({"timeout": 0}), &["\"timeout\""]);
        refused(json!({"variant": 1}), &["\"variants\"?"]);
    }

    #[test]
    fn variants_are_one_to_sixteen_with_different_names() {
        let refused = |variants: Value, words: &[&str]| {
            check_refused::<ExploreTool>(
                json!({"variants": variants}),
                &[&["\"variants\""], words].concat(),
            );
        };
        let many = |count: usize| {
            (0..count)
                .map(|number| json!({"name": format!("v{number}"), "code": ""}))
                .collect::<Vec<_>>()
        };
        parse::<ExploreTool>(json!({"variants": many(16)})).unwrap();
        refused(json!(many(17)), &["1 to 16", "a list of 17"]);
        refused(json!([]), &["a list of 0"]);
        refused(json!({"a": "1"}), &["an object"]);
        refused(json!(["1"]), &["the string \"1\" in it"]);
        refused(json!([{"name": "a"}]), &["name or code is missing"]);
        refused(json!([{"name": "a", "code": 1}]), &["no string"]);
        refused(
            json!([{"name": "a", "code": "1", "timeout": 1}]),
            &["an object that has \"timeout\""],
        );
        refused(
            json!([{"name": "a", "code": "1"}, {"name": "a", "code": "2"}]),
            &["two called \"a\""],
        );
        for word in ["none", "all", "best"] {
            refused(
                json!([{"name": word, "code": "1"}]),
                &[word, "something else"],
            );
        }
        for name in ["", "a b", "a/b", "ä", &"x".repeat(41), &"x".repeat(10_000)] {
            refused(json!([{"name": name, "code": "1"}]), &["1 to 40 letters"]);
        }
        refused(
            json!([{"name": "a", "code": "x".repeat(MAX_CODE_BYTES + 1)}]),
            &["4194305 bytes"],
        );
        check_refused::<ExploreTool>(json!({}), &["needs the argument \"variants\""]);
    }

    #[test]
    fn the_schema_accepts_what_the_parser_accepts() {
        check_accepted::<ExploreTool>(
            json!({"variants": [{"name": "a".repeat(40), "code": ""}], "timeout": 3_600}),
        );
        check_accepted::<ExploreTool>(json!({
            "variants": [{"name": "a", "code": "1"}],
            "keep": "best", "best_by": "x", "replace": true,
        }));
    }
}
