//! Arguments of a call: from what a client wrote to values. All profiles read them here.
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

use crate::sandbox::Rules;
use crate::session::{InsidePath, SessionId};

/// More text than this helps no model, and the whole of it can be read as a resource.
pub(super) const MAX_OUTPUT_CHARS: u64 = 1_000_000;

/// Bytes of code in one cell. Larger inputs are data, and data belongs in an uploaded file.
pub(super) const MAX_CODE_BYTES: usize = 4 * 1024 * 1024;

/// The longest path the kernel takes, without the zero at its end.
pub(super) const MAX_PATH_LENGTH: usize = 4095;

/// Cells that one `undo` may name: no operator can have more checkpoints kept.
pub(super) const MAX_CELLS: u64 = 100;

/// Bytes of the name of another MCP server. What it may say is checked by whoever registers it.
pub(super) const MAX_SERVER_NAME_LENGTH: usize = 200;

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
        let text = self.text(MAX_PATH_LENGTH, 1)?;
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

pub(super) fn decoded(
    tool: &'static str,
    name: &'static str,
    value: &Value,
) -> Result<Vec<u8>, BadArgument> {
    let expected = || "bytes in base64".to_owned();
    let Value::String(text) = value else {
        return Err(wrong(tool, name, shown(value), expected()));
    };
    STANDARD
        .decode(text)
        .map_err(|cause| wrong(tool, name, format!("something else ({cause})"), expected()))
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

pub(super) fn at_odds(tool: &'static str, name: &'static str, why: String) -> BadArgument {
    BadArgument::AtOdds { tool, name, why }
}

pub(super) fn wrong(
    tool: &'static str,
    name: &'static str,
    given: String,
    expected: String,
) -> BadArgument {
    BadArgument::Wrong {
        tool,
        name,
        given,
        expected,
    }
}

/// Says what a value is, briefly: a refused value is quoted back and may be as large as a message.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null (leave an argument out to get its default)".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

pub(super) fn quoted(text: &str) -> String {
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
const MIN_SIMILARITY: f64 = 0.7;

pub(super) fn nearest<'a>(
    given: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let given = given.to_lowercase();
    candidates
        .map(|candidate| (strsim::jaro_winkler(&given, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, candidate)| candidate)
}
