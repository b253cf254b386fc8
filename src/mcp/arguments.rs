//! Arguments of a call: the one door through which what a client wrote becomes values.
//!
//! Nothing is guessed: an argument of the wrong type, out of range or at odds with another one is
//! refused with a sentence a model can act on. Names are checked against the schemas by `tools`;
//! the ranges here and there are the same constants.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::wire;
use crate::sandbox::Rules;
use crate::session::{
    ForkNames, ForkRequest, InsidePath, Keep, MOST_FORKS, MOST_VARIANTS, SessionId, Variant,
};

/// More text than this helps no model, and the whole of it can be read as a resource.
pub(super) const MOST_OUTPUT_CHARS: u64 = 1_000_000;

/// Bytes of code in one cell. Larger inputs are data, and data belongs in an uploaded file.
pub(super) const LARGEST_CODE: usize = 4 * 1024 * 1024;

/// The longest path the kernel takes, without the zero at its end.
pub(super) const LONGEST_PATH: usize = 4095;

/// Cells that one `undo` may name: no operator can have more checkpoints kept.
pub(super) const MOST_CELLS: u64 = 100;

/// Bytes of the expression that chooses a variant. It is one number, not a program.
pub(super) const LONGEST_EXPRESSION: usize = 4096;

/// Characters of a variant's name: with the name of its source before it, it names the session that
/// is kept.
pub(super) const LONGEST_VARIANT: usize = 40;

/// Bytes of the name of another MCP server. What it may say is checked by whoever registers it.
pub(super) const LONGEST_SERVER_NAME: usize = 200;

/// Words that `keep` has a meaning for, so that no variant can be called by them.
const KEEP_WORDS: [&str; 3] = ["none", "all", "best"];

/// A call whose arguments have been checked.
#[derive(Debug, PartialEq)]
pub(super) enum Call {
    Execute {
        session: SessionId,
        code: String,
        timeout: Duration,
        max_output_chars: usize,
        rules: Option<Rules>,
    },
    Install {
        session: SessionId,
        requirements: Vec<String>,
    },
    Reset {
        session: SessionId,
    },
    Undo {
        session: SessionId,
        cells: u32,
    },
    Checkpoints {
        session: SessionId,
    },
    Fork {
        session: SessionId,
        request: ForkRequest,
    },
    Explore {
        session: SessionId,
        variants: Vec<Variant>,
        timeout: Duration,
        keep: Keep,
        replace: bool,
    },
    Check {
        session: SessionId,
        wait: Duration,
        interrupt: bool,
    },
    Upload {
        session: SessionId,
        relpath: InsidePath,
        source: Source,
        overwrite: bool,
    },
    Download {
        session: SessionId,
        relpath: InsidePath,
        target: Target,
    },
    List,
    Close {
        session: SessionId,
    },
    Register {
        name: String,
        params: Value,
    },
    Servers,
    Unregister {
        name: String,
    },
}

impl Call {
    /// Returns the session that the call makes if there is none of that name.
    pub(super) fn made_session(&self) -> Option<&SessionId> {
        match self {
            Call::Execute { session, .. }
            | Call::Install { session, .. }
            | Call::Upload { session, .. } => Some(session),
            _ => None,
        }
    }
}

/// Where an uploaded file comes from.
#[derive(Debug, PartialEq)]
pub(super) enum Source {
    /// A path on the caller's own machine, which is this one.
    Local(String),
    Content(Vec<u8>),
}

/// Where a downloaded file goes.
#[derive(Debug, PartialEq)]
pub(super) enum Target {
    /// A path on the caller's own machine, which is this one.
    Local { path: String, overwrite: bool },
    /// The result itself.
    Inline,
}

/// Which session is meant by a call that names none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unnamed {
    /// The one called `default`.
    Default,
    /// A new one, whose name the result tells.
    New,
    /// None: the call makes no sense without.
    Refused,
}

/// Why a call was refused before anything happened. Its text is written for a model.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(super) enum BadArgument {
    #[error(
        "{tool} has no argument \"{given}\".{} Nothing was executed.",
        suggestion(nearest, allowed)
    )]
    Unknown {
        tool: &'static str,
        given: String,
        nearest: Option<String>,
        allowed: Vec<String>,
    },
    #[error("{tool} needs the argument \"{name}\" ({expected}). Nothing was executed.")]
    Missing {
        tool: &'static str,
        name: &'static str,
        expected: String,
    },
    #[error(
        "The argument \"{name}\" of {tool} must be {expected}, but it was {given}. Nothing was \
         executed."
    )]
    Wrong {
        tool: &'static str,
        name: &'static str,
        given: String,
        expected: String,
    },
    /// Fine by itself, but not beside another argument.
    #[error("The argument \"{name}\" of {tool} {why}. Nothing was executed.")]
    AtOdds {
        tool: &'static str,
        name: &'static str,
        why: String,
    },
}

fn suggestion(nearest: &Option<String>, allowed: &[String]) -> String {
    match (nearest, allowed) {
        (_, []) => " It takes no arguments.".to_owned(),
        (Some(nearest), _) => format!(
            " Did you mean \"{nearest}\"? It takes: {}.",
            allowed.join(", ")
        ),
        (None, _) => format!(" It takes: {}.", allowed.join(", ")),
    }
}

/// One argument as the caller gave it, or did not.
pub(super) struct Given {
    pub(super) tool: &'static str,
    pub(super) name: &'static str,
    pub(super) value: Option<Value>,
}

impl Given {
    /// Reads an object. What may be in it is not known here.
    pub(super) fn object(self) -> Result<Value, BadArgument> {
        let expected = || "an object".to_owned();
        match self.value {
            Some(value @ Value::Object(_)) => Ok(value),
            Some(other) => Err(wrong(self.tool, self.name, shown(&other), expected())),
            None => Err(BadArgument::Missing {
                tool: self.tool,
                name: self.name,
                expected: expected(),
            }),
        }
    }

    pub(super) fn text(self, most_bytes: usize, fewest: usize) -> Result<String, BadArgument> {
        let expected = match fewest {
            0 => format!("a string of at most {most_bytes} bytes"),
            _ => format!("a string of {fewest} to {most_bytes} bytes"),
        };
        match self.value {
            Some(Value::String(text)) if (fewest..=most_bytes).contains(&text.len()) => Ok(text),
            Some(Value::String(text)) => Err(wrong(
                self.tool,
                self.name,
                format!("a string of {} bytes", text.len()),
                expected,
            )),
            Some(other) => Err(wrong(self.tool, self.name, shown(&other), expected)),
            None => Err(BadArgument::Missing {
                tool: self.tool,
                name: self.name,
                expected,
            }),
        }
    }

    pub(super) fn session(self, unnamed: Unnamed) -> Result<SessionId, BadArgument> {
        let (tool, name) = (self.tool, self.name);
        match self.value {
            None => match unnamed {
                Unnamed::Default => Ok(SessionId::default_session()),
                Unnamed::New => Ok(SessionId::random()),
                Unnamed::Refused => {
                    let expected =
                        "the session_id of an earlier result; list_sessions tells which there are"
                            .to_owned();
                    Err(BadArgument::Missing {
                        tool,
                        name,
                        expected,
                    })
                }
            },
            Some(Value::String(text)) => SessionId::from_str(&text).map_err(|cause| {
                wrong(
                    tool,
                    name,
                    quoted(&text),
                    format!("the name of a session ({cause})"),
                )
            }),
            Some(other) => Err(wrong(
                tool,
                name,
                shown(&other),
                "a string that names a session".to_owned(),
            )),
        }
    }

    pub(super) fn inside_path(self) -> Result<InsidePath, BadArgument> {
        let (tool, name) = (self.tool, self.name);
        let text = self.text(LONGEST_PATH, 1)?;
        InsidePath::from_str(&text).map_err(|cause| {
            wrong(
                tool,
                name,
                quoted(&text),
                format!("a path below the working folder ({cause})"),
            )
        })
    }

    /// Reads how long the caller wants to wait; zero is a look without waiting.
    pub(super) fn wait(self, most: Duration) -> Result<Duration, BadArgument> {
        let Some(value) = self.value else {
            return Ok(most);
        };
        match value.as_f64() {
            Some(seconds) if (0.0..=most.as_secs_f64()).contains(&seconds) => {
                Ok(Duration::from_secs_f64(seconds))
            }
            _ => {
                let expected = format!("a number of seconds from 0 to {}", most.as_secs_f64());
                Err(wrong(self.tool, self.name, shown(&value), expected))
            }
        }
    }

    pub(super) fn timeout(
        self,
        default: Duration,
        most: Duration,
    ) -> Result<Duration, BadArgument> {
        let most = most.as_secs_f64();
        let expected = || format!("a number of seconds greater than 0 and at most {most}");
        let Some(value) = self.value else {
            return Ok(default);
        };
        match value.as_f64() {
            Some(seconds) if seconds > 0.0 && seconds <= most => {
                Ok(Duration::from_secs_f64(seconds))
            }
            _ => Err(wrong(self.tool, self.name, shown(&value), expected())),
        }
    }

    /// Reads a whole number.
    pub(super) fn count(
        self,
        range: RangeInclusive<u64>,
        default: u64,
    ) -> Result<u64, BadArgument> {
        let Some(value) = self.value else {
            return Ok(default);
        };
        // JSON has one kind of number: 5000.0 is an integer too.
        let whole = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|number| number.fract() == 0.0)
                .map(|n| n as u64)
        });
        match whole {
            Some(number) if range.contains(&number) => Ok(number),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(wrong(self.tool, self.name, shown(&value), expected))
            }
        }
    }

    pub(super) fn flag(self) -> Result<bool, BadArgument> {
        match self.value {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(wrong(
                self.tool,
                self.name,
                shown(&other),
                "true or false".to_owned(),
            )),
        }
    }
}

/// Reads the content of a file in the one way in which it was given.
pub(super) fn content(text: Given, base64: Given, resource: Given) -> Result<Vec<u8>, BadArgument> {
    let tool = text.tool;
    match (text.value, base64.value, resource.value) {
        (Some(Value::String(text)), None, None) => Ok(text.into_bytes()),
        (Some(other), None, None) => Err(wrong(tool, "text", shown(&other), "a string".to_owned())),
        (None, Some(encoded), None) => decoded(tool, "base64", &encoded),
        (None, None, Some(resource)) => match (resource.get("text"), resource.get("blob")) {
            (Some(Value::String(text)), None) => Ok(text.clone().into_bytes()),
            (None, Some(blob)) => decoded(tool, "resource", blob),
            _ => Err(wrong(
                tool,
                "resource",
                shown(&resource),
                "an object with \"text\" or \"blob\" (base64)".to_owned(),
            )),
        },
        (None, None, None) => {
            let expected = "or \"base64\" or \"resource\": the content of the file".to_owned();
            Err(BadArgument::Missing {
                tool,
                name: "text",
                expected,
            })
        }
        _ => Err(at_odds(
            tool,
            "text",
            "is one of three ways to give the content; give only one of them".to_owned(),
        )),
    }
}

fn decoded(tool: &'static str, name: &'static str, value: &Value) -> Result<Vec<u8>, BadArgument> {
    let expected = || "bytes in base64".to_owned();
    let Value::String(text) = value else {
        return Err(wrong(tool, name, shown(value), expected()));
    };
    STANDARD
        .decode(text)
        .map_err(|cause| wrong(tool, name, format!("something else ({cause})"), expected()))
}

/// Reads how many forks are wanted, and what they are to be called.
pub(super) fn fork_names(
    source: &SessionId,
    count: Given,
    names: Given,
) -> Result<ForkNames, BadArgument> {
    let (tool, written) = (count.tool, count.value.is_some());
    let wanted = count.count(1..=u64::from(MOST_FORKS), 1)?;
    let Some(value) = names.value else {
        return Ok(ForkNames::Count(wanted as u32));
    };
    let refuse = |given: String| {
        wrong(
            tool,
            "names",
            given,
            format!("a list of 1 to {MOST_FORKS} names for the new sessions"),
        )
    };
    let Value::Array(items) = value else {
        return Err(refuse(shown(&value)));
    };
    if items.is_empty() || items.len() > MOST_FORKS as usize {
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
pub(super) fn server_names(given: Given) -> Result<Option<Vec<String>>, BadArgument> {
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

/// Reads what a session is to reach from now on. Whether that may be is for the session to say.
pub(super) fn rules(given: Given) -> Result<Option<Rules>, BadArgument> {
    let (tool, name) = (given.tool, given.name);
    let expected =
        || "a list of rules such as \"api.example.com\" or \"*.example.com:8443\"".to_owned();
    let Some(value) = given.value else {
        return Ok(None);
    };
    let Value::Array(items) = &value else {
        return Err(wrong(tool, name, shown(&value), expected()));
    };
    let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
    let texts = texts.ok_or_else(|| {
        wrong(
            tool,
            name,
            "a list with something else in it".to_owned(),
            expected(),
        )
    })?;
    Rules::parse(&texts)
        .map(Some)
        .map_err(|cause| at_odds(tool, name, format!("cannot be used: {cause}")))
}

/// Reads one requirement or a list of them, also one written as text. What they may say is checked
/// by whoever installs them.
pub(super) fn requirements(given: Given) -> Result<Vec<String>, BadArgument> {
    let (tool, name) = (given.tool, given.name);
    // No requirement begins with a bracket, so that nothing else can be meant.
    let list = match &given.value {
        Some(Value::String(text)) if text.trim_start().starts_with('[') => {
            cellblock_json::read::<Value>(text.as_bytes(), wire::MESSAGE)
                .ok()
                .filter(Value::is_array)
        }
        _ => None,
    };
    let given = Given {
        value: list.or(given.value),
        ..given
    };
    let expected = "a requirement such as \"polars>=1\", or a list of requirements".to_owned();
    let text = |value: Value| match value {
        Value::String(text) if !text.trim().is_empty() => Ok(text),
        other => Err(other),
    };
    match given.value {
        None => Err(BadArgument::Missing {
            tool,
            name,
            expected,
        }),
        Some(Value::Array(items)) if !items.is_empty() => items
            .into_iter()
            .map(|item| {
                text(item).map_err(|other| {
                    wrong(
                        tool,
                        name,
                        format!("a list with {} in it", shown(&other)),
                        expected.clone(),
                    )
                })
            })
            .collect(),
        Some(value) => text(value)
            .map(|text| vec![text])
            .map_err(|other| wrong(tool, name, shown(&other), expected)),
    }
}

/// Reads the variants of an `explore`.
pub(super) fn variants(given: Given) -> Result<Vec<Variant>, BadArgument> {
    let (tool, name) = (given.tool, given.name);
    let expected = format!("a list of 1 to {MOST_VARIANTS} objects {{\"name\": …, \"code\": …}}");
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
    if items.is_empty() || items.len() > MOST_VARIANTS {
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
        if label.is_empty() || label.len() > LONGEST_VARIANT || !label.bytes().all(allowed) {
            let rule = format!(
                "variants whose names have 1 to {LONGEST_VARIANT} letters, digits, `_`, `.` or `-`"
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
        if code.len() > LARGEST_CODE {
            let why = format!(
                "has {} bytes of code in {}; at most {LARGEST_CODE} are accepted",
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
pub(super) fn keep(
    variants: &[Variant],
    keep: Given,
    best_by: Given,
    replace: Given,
) -> Result<(Keep, bool), BadArgument> {
    let tool = keep.tool;
    let best_by = match best_by.value {
        Some(_) => Some(best_by.text(LONGEST_EXPRESSION, 1)?),
        None => None,
    };
    let replace = replace.flag()?;
    let word = match keep.value {
        None => "none".to_owned(),
        Some(_) => keep.text(LONGEST_VARIANT, 1)?,
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

fn at_odds(tool: &'static str, name: &'static str, why: String) -> BadArgument {
    BadArgument::AtOdds { tool, name, why }
}

fn wrong(tool: &'static str, name: &'static str, given: String, expected: String) -> BadArgument {
    BadArgument::Wrong {
        tool,
        name,
        given,
        expected,
    }
}

/// Says what a value is, briefly: a refused value is quoted back and may be as large as a message.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null (leave an argument out to get its default)".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text))
}

pub(super) fn shortened(text: &str) -> String {
    const SHOWN_CHARS: usize = 60;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Names further away than this are another word, not a slip.
const LEAST_SIMILARITY: f64 = 0.7;

pub(super) fn nearest<'a>(
    given: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let given = given.to_lowercase();
    candidates
        .map(|candidate| (strsim::jaro_winkler(&given, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= LEAST_SIMILARITY)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::McpSettings;
    use super::super::tools::{Catalogue, ToolName};
    use super::*;

    fn parse(tool: ToolName, arguments: Value) -> Result<Call, BadArgument> {
        let Value::Object(arguments) = arguments else {
            panic!("arguments are an object")
        };
        Catalogue::new(&McpSettings::default()).parse(tool, arguments)
    }

    #[track_caller]
    fn check_refused(tool: ToolName, arguments: Value, words: &[&str]) {
        let text = parse(tool, arguments)
            .expect_err("the call should be refused")
            .to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        assert!(text.ends_with("Nothing was executed."), "{text:?}");
        assert!(text.len() < 500, "{} bytes", text.len());
    }

    fn id(text: &str) -> SessionId {
        text.parse().unwrap()
    }

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
    fn an_undo_takes_one_cell_back_unless_more_are_named() {
        assert_eq!(
            parse(ToolName::Undo, json!({})).unwrap(),
            Call::Undo {
                session: id("default"),
                cells: 1
            }
        );
        let arguments = json!({"session_id": "s", "cells": 100.0});
        assert_eq!(
            parse(ToolName::Undo, arguments).unwrap(),
            Call::Undo {
                session: id("s"),
                cells: 100
            }
        );
        for cells in [
            json!(0),
            json!(-1),
            json!(101),
            json!(1.5),
            json!("1"),
            json!(null),
        ] {
            check_refused(
                ToolName::Undo,
                json!({"cells": cells}),
                &["\"cells\"", "1 to 100"],
            );
        }
        check_refused(ToolName::Undo, json!({"cell": 1}), &["\"cells\"?"]);
    }

    #[test]
    fn forks_are_counted_or_named() {
        let forks = |arguments| match parse(ToolName::Fork, arguments).unwrap() {
            Call::Fork { request, .. } => request.names,
            other => panic!("{other:?}"),
        };
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
            |arguments: Value, words: &[&str]| check_refused(ToolName::Fork, arguments, words);
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
    fn an_exploration_with_only_variants_gets_the_defaults() {
        assert_eq!(
            parse(ToolName::Explore, explore(json!({}))).unwrap(),
            Call::Explore {
                session: id("default"),
                variants: vec![variant("a", "1"), variant("b.2", "2")],
                timeout: Duration::from_secs(120),
                keep: Keep::Nothing,
                replace: false
            }
        );
    }

    #[test]
    fn every_way_to_keep_is_understood() {
        let kept = |more| match parse(ToolName::Explore, explore(more)).unwrap() {
            Call::Explore { keep, replace, .. } => (keep, replace),
            other => panic!("{other:?}"),
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
            |more: Value, words: &[&str]| check_refused(ToolName::Explore, explore(more), words);
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
            check_refused(
                ToolName::Explore,
                json!({"variants": variants}),
                &[&["\"variants\""], words].concat(),
            );
        };
        let many = |count: usize| {
            (0..count)
                .map(|number| json!({"name": format!("v{number}"), "code": ""}))
                .collect::<Vec<_>>()
        };
        parse(ToolName::Explore, json!({"variants": many(16)})).unwrap();
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
            json!([{"name": "a", "code": "x".repeat(LARGEST_CODE + 1)}]),
            &["4194305 bytes"],
        );
        check_refused(
            ToolName::Explore,
            json!({}),
            &["needs the argument \"variants\""],
        );
    }
}
