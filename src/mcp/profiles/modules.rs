//! Modules that code may import: a policy for honest mistakes, checked on parsed code inside the
//! sandbox, by `imports` of the runner.
//!
//! It protects nothing. The sandbox does that, whatever is imported; the lists tell code early and
//! clearly what an operator does not want it to use. Text that only looks like an import (in a
//! comment or a string) is left alone. Packages that were installed into the session, or asked for
//! and found to be there already, may be imported unless they are blocked by name.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::wire;
use super::{ToolContext, started_anew};
use crate::ops::{self, HostExt};
use crate::session::{Outcome, Part, Refused, SessionId, Status, Stream};

/// How long the check may take. It reads the code once.
const CHECK_TIME: Duration = Duration::from_secs(10);

/// Characters of the answer: a word and a name.
const CHECK_CHARS: usize = 10_000;

/// What code may import.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Modules {
    /// If any are named, only these.
    pub allowed: Vec<String>,
    pub blocked: Vec<String>,
    /// Functions that may not be called by name.
    pub calls: Vec<String>,
    /// Where packages are, inside, that were installed into a session. They need not be listed.
    pub installed: String,
    /// Packages that the caller asked for by name may be imported although their modules are
    /// blocked.
    pub requested_wins: bool,
}

/// What is wrong with code. Its text is written for a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("Import '{0}' is blocked for security reasons")]
    Blocked(String),
    #[error("Import '{0}' is not in the allowed list")]
    NotListed(String),
    #[error("Calling '{0}' is blocked for security reasons")]
    Call(String),
    #[error("Shell commands and magics are blocked for security reasons")]
    Command,
    #[error("The code could not be checked: {0}")]
    Unchecked(String),
}

impl Modules {
    pub(super) fn is_empty(&self) -> bool {
        self.allowed.is_empty() && self.blocked.is_empty() && self.calls.is_empty()
    }

    /// Looks at code before it runs in a session. `first` is run before, in the same cell.
    pub(super) async fn check(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        code: &str,
        first: &str,
    ) -> Result<Option<Problem>, Refused> {
        let word = SessionId::random();
        let sessions = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, ops::ListSessions {})
            .await?;
        let requested = sessions
            .into_iter()
            .find(|known| known.id == *session)
            .map(|known| known.requested);
        let cell = format!(
            "{first}\n{}",
            self.cell(code, &requested.unwrap_or_default(), word.as_str())
        );
        let outcome = tool_context
            .run(session, cell, CHECK_TIME, CHECK_CHARS)
            .await?;
        Ok(verdict(&outcome, word.as_str()))
    }

    /// The same for a session that may have lost its Python, which is started anew then: the second
    /// value says so.
    pub(super) async fn check_anew(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        code: &str,
    ) -> Result<(Option<Problem>, Option<String>), Refused> {
        if self.is_empty() {
            return Ok((None, None));
        }
        match self.check(tool_context, session, code, "").await {
            Err(Refused::Ended { why, .. }) => {
                tool_context
                    .server
                    .shared
                    .sessions
                    .run(
                        tool_context.owner,
                        ops::Reset {
                            session: session.clone(),
                        },
                    )
                    .await?;
                Ok((
                    self.check(tool_context, session, code, "").await?,
                    Some(started_anew(&why)),
                ))
            }
            checked => Ok((checked?, None)),
        }
    }

    fn cell(&self, code: &str, requested: &[String], word: &str) -> String {
        let Modules {
            allowed,
            blocked,
            calls,
            installed,
            requested_wins,
        } = self;
        let request = json!({
            "code": code, "allowed": allowed, "blocked": blocked, "calls": calls,
            "packages": installed, "requested": requested, "requested_wins": requested_wins,
            "word": word,
        });
        runners_own("imports", "check", &[], &request)
    }
}

/// Returns a cell that calls a function of the runner with a request. No name of the session is
/// used on the way.
pub(super) fn runners_own(
    module: &str,
    function: &str,
    arguments: &[&str],
    request: &Value,
) -> String {
    // A text in JSON is a text in Python too.
    let request = Value::from(request.to_string()).to_string();
    let arguments = arguments
        .iter()
        .map(|argument| (*argument).to_owned())
        .chain([request])
        .collect::<Vec<_>>();
    format!(
        "__import__('cellblock_runner.{module}', fromlist=['']).{function}({})",
        arguments.join(", ")
    )
}

/// Finds the answer of a function of the runner: the line that begins with the word that only it
/// was told.
pub(super) fn answer(outcome: &Outcome, word: &str) -> Option<Value> {
    let told = outcome.output.parts.iter().filter_map(|part| match part {
        Part::Text {
            stream: Stream::Stdout,
            text,
        } => Some(text.as_str()),
        _ => None,
    });
    let told: String = told.collect();
    let line = told.lines().find_map(|line| line.strip_prefix(word))?;
    cellblock_json::read(line.as_bytes(), wire::MESSAGE).ok()
}

fn verdict(outcome: &Outcome, word: &str) -> Option<Problem> {
    let unchecked = |why: &str| Some(Problem::Unchecked(why.to_owned()));
    match (answer(outcome, word), &outcome.status) {
        (Some(Value::Null), _) => None,
        (Some(Value::Array(parts)), _) => {
            match (parts.first().and_then(Value::as_str), parts.get(1)) {
                (Some("blocked"), Some(Value::String(name))) => {
                    Some(Problem::Blocked(name.clone()))
                }
                (Some("not listed"), Some(Value::String(name))) => {
                    Some(Problem::NotListed(name.clone()))
                }
                (Some("call"), Some(Value::String(name))) => Some(Problem::Call(name.clone())),
                (Some("command"), _) => Some(Problem::Command),
                _ => unchecked("the answer makes no sense"),
            }
        }
        (_, Status::Raised(error)) => {
            Some(Problem::Unchecked(super::super::render::summary(error)))
        }
        (_, Status::TimedOut { .. }) => unchecked("that took too long"),
        _ => unchecked("Python gave no answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::examples::{outcome, raised, text};
    use super::*;

    fn judged(status: Status, printed: &str) -> Option<Problem> {
        verdict(
            &outcome(status, vec![text(Stream::Stdout, printed)]),
            "word",
        )
    }

    #[test]
    fn an_answer_is_the_line_that_begins_with_the_word() {
        assert_eq!(judged(Status::Completed, "noise\nwordnull\n"), None);
        let blocked = judged(
            Status::Completed,
            "noise[\"blocked\", \"x\"]\nword[\"blocked\", \"os\"]\n",
        );
        assert_eq!(blocked, Some(Problem::Blocked("os".to_owned())));
        let problem = |answer: &str| {
            judged(Status::Completed, &format!("word{answer}\n"))
                .unwrap()
                .to_string()
        };
        assert_eq!(
            problem("[\"blocked\", \"os\"]"),
            "Import 'os' is blocked for security reasons"
        );
        assert_eq!(
            problem("[\"not listed\", \"abc\"]"),
            "Import 'abc' is not in the allowed list"
        );
        assert_eq!(
            problem("[\"call\", \"eval\"]"),
            "Calling 'eval' is blocked for security reasons"
        );
        assert!(problem("[\"command\", \"\"]").starts_with("Shell commands"));
    }

    #[test]
    fn code_that_was_not_checked_does_not_run() {
        let limit = Duration::from_secs(1);
        for (status, printed) in [
            (Status::Completed, ""),
            (Status::Completed, "word[\"what\"]"),
            (Status::Completed, "word{broken"),
            (Status::Raised(raised()), ""),
            (
                Status::TimedOut {
                    limit,
                    state: crate::session::StateAfter::Kept,
                },
                "",
            ),
        ] {
            assert!(
                matches!(judged(status, printed), Some(Problem::Unchecked(_))),
                "{printed}"
            );
        }
    }

    #[test]
    fn a_request_is_one_line_of_python() {
        let cell = runners_own("state", "tell", &["names"], &json!({"code": "\"x\"\n"}));
        let expected = concat!(
            r#"__import__('cellblock_runner.state', fromlist=['']).tell("#,
            r#"names, "{\"code\":\"\\\"x\\\"\\n\"}")"#
        );
        assert_eq!(cell, expected);
    }
}
