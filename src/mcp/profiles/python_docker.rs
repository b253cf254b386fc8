//! `python-docker-mcp`: runs that leave nothing behind, and sessions that last.
//!
//! ```text
//! execute-transient    a session of its own: state in → check → code → state out → closed
//! execute-persistent   a session by its id: check → code → state out
//! ```
//!
//! Both do what that server's documentation promised: `state` goes in and comes out as JSON,
//! variables of a session stay, packages are installed where the session finds them. Code is a
//! script, so that the value of a last expression is not shown. Every transient run has a fresh
//! sandbox, which is destroyed behind it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, ErrorData, JsonObject, Tool};
use serde_json::{Value, json};

use super::super::arguments::{MAX_CODE_BYTES, MAX_PATH_LENGTH};
use super::super::toolbox::{Entry, Introduction, ToolContext, Toolbox};
use super::super::turns::Extent;
use super::super::{McpSettings, refusals, render};
use super::modules::{Modules, Problem, answer, runners_own};
use super::{MAX_NAME_LENGTH, Ran, Written, failed, said, schema, telling};
use crate::auth::Scope;
use crate::ops::{self, Host, HostExt};
use crate::session::{Outcome, Principal, Refused, SessionId, StateAfter, Status, Stream};

/// How long the names of a run may take to be told. Their own `__str__` may be asked.
const STATE_TIME: Duration = Duration::from_secs(10);

/// Characters of all values together. More than a model reads, and the way back in has a limit too.
const MAX_STATE: usize = 200_000;

/// Characters of a value that is told as its text.
const MAX_TEXT_LENGTH: usize = 2000;

/// Characters of output. That server had no limit; the whole can be read as a resource.
const MAX_OUTPUT: usize = 100_000;

const WAY_BACK: &str = "The next call with this session_id starts Python anew.";

const TRANSIENT: Entry = Entry {
    name: "execute-transient",
    scope: Scope::Execute,
    extent: Extent::FirstStep,
};
const PERSISTENT: Entry = Entry {
    name: "execute-persistent",
    scope: Scope::Execute,
    extent: Extent::FirstStep,
};
const INSTALL: Entry = Entry {
    name: "install-package",
    scope: Scope::Install,
    extent: Extent::FirstStep,
};
const CLEANUP: Entry = Entry {
    name: "cleanup-session",
    scope: Scope::Execute,
    extent: Extent::FirstStepSoon,
};

pub(super) struct PythonDocker {
    tools: Vec<Tool>,
    modules: Modules,
    timeout: Duration,
}

impl PythonDocker {
    pub(super) fn new(settings: &McpSettings, modules: Modules) -> PythonDocker {
        PythonDocker {
            tools: tools(),
            modules,
            timeout: settings.default_timeout,
        }
    }

    async fn carry_out(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> Result<CallToolResult, Failure> {
        let _slot = tool_context
            .server
            .call_slot(tool_context.owner)
            .map_err(|busy| Failure(busy.to_string()))?;
        if arguments.is_empty() {
            return Err(Failure("Missing arguments".to_owned()));
        }
        let mut written = Written::new(tool.name, &self.tools, arguments).map_err(Failure::of)?;
        match tool.name {
            "execute-transient" => {
                let code = needed(&mut written, "code", "Missing code")?;
                let state = match written.take_leniently("state").value {
                    None | Some(Value::Null) => json!({}),
                    Some(state @ Value::Object(_)) => state,
                    Some(_) => {
                        return Err(Failure(
                            "The argument \"state\" must be an object".to_owned(),
                        ));
                    }
                };
                self.transient(tool_context, &code, &state).await
            }
            "execute-persistent" => {
                let code = needed(&mut written, "code", "Missing code")?;
                let session = session(&mut written)?.unwrap_or_else(SessionId::random);
                self.persistent(tool_context, &session, &code).await
            }
            "install-package" => {
                let name = needed(&mut written, "package_name", "Missing package name")?;
                let session = session(&mut written)?;
                self.install(tool_context, name, session).await
            }
            _ => {
                let session = session(&mut written)?
                    .ok_or_else(|| Failure("Missing session ID".to_owned()))?;
                match tool_context
                    .server
                    .shared
                    .sessions
                    .run(
                        tool_context.owner,
                        ops::CloseSession {
                            session: session.clone(),
                        },
                    )
                    .await
                {
                    Ok(()) => Ok(said(format!("Session {session} cleaned up successfully"))),
                    Err(Refused::Unknown { .. }) => {
                        Err(Failure(format!("Session {session} does not exist")))
                    }
                    Err(refused) => Err(refused.into()),
                }
            }
        }
    }

    async fn transient(
        &self,
        tool_context: ToolContext<'_>,
        code: &str,
        state: &Value,
    ) -> Result<CallToolResult, Failure> {
        let fresh = Fresh::new(tool_context);
        let given = format!(
            "state = __import__('json').loads({})",
            Value::from(state.to_string())
        );
        if let Some(problem) = self.check(tool_context, &fresh.id, code, &given).await? {
            let state = state.as_object().cloned().unwrap_or_default();
            return Ok(refused_code(&problem, "", state));
        }
        let outcome = tool_context
            .run(&fresh.id, code.to_owned(), self.timeout, MAX_OUTPUT)
            .await?;
        let told = self.state_of(tool_context, &fresh.id, &outcome, true).await;
        Ok(result(&outcome, None, "", &told, ""))
    }

    async fn persistent(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        code: &str,
    ) -> Result<CallToolResult, Failure> {
        let before = format!("Session ID: {session}\n\n");
        let (problem, anew) = self.modules.check_anew(tool_context, session, code).await?;
        if let Some(problem) = problem {
            let anew = anew.map(|note| format!("{note}\n\n")).unwrap_or_default();
            let state = self.names_of(tool_context, session, false).await;
            return Ok(refused_code(&problem, &format!("{before}{anew}"), state));
        }
        let Ran {
            outcome,
            anew: later,
        } = tool_context
            .run_anew(session, code, self.timeout, MAX_OUTPUT)
            .await?;
        let told = self.state_of(tool_context, session, &outcome, false).await;
        Ok(result(&outcome, anew.or(later), &before, &told, WAY_BACK))
    }

    async fn install(
        &self,
        tool_context: ToolContext<'_>,
        name: String,
        session: Option<SessionId>,
    ) -> Result<CallToolResult, Failure> {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        let Some(session) = session else {
            let fresh = Fresh::new(tool_context);
            let report = server
                .install_to_end(owner, &fresh.id, vec![name], context)
                .await
                .map_err(not_installed)?;
            return Ok(said(format!(
                "Package installation result:\n\n{}\n\nNo session was named, so that nothing \
                 lasts; give the session_id in which \
                 the package is needed.",
                report.text.trim_end()
            )));
        };
        // A session that is not there yet is made, as the example of that server's document has it.
        let report = server
            .install_to_end(owner, &session, vec![name], context)
            .await
            .map_err(not_installed)?;
        Ok(said(format!(
            "Package installation result:\n\n{}",
            report.text.trim_end()
        )))
    }

    /// Looks at code before it runs. Without a policy only `first` is run, if there is something to
    /// run.
    async fn check(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        code: &str,
        first: &str,
    ) -> Result<Option<Problem>, Refused> {
        if self.modules.is_empty() {
            if !first.is_empty() {
                tool_context
                    .run(session, first.to_owned(), STATE_TIME, MAX_TEXT_LENGTH)
                    .await?;
            }
            return Ok(None);
        }
        self.modules.check(tool_context, session, code, first).await
    }

    /// Asks a session what its names hold now. `given` says that a dictionary called `state` went
    /// in.
    async fn state_of(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        outcome: &Outcome,
        given: bool,
    ) -> JsonObject {
        let is_alive = match &outcome.status {
            Status::Completed | Status::Raised(_) => true,
            Status::TimedOut { state, .. } | Status::Cancelled { state } => {
                *state == StateAfter::Kept
            }
            Status::Died { .. } | Status::ProtocolError { .. } | Status::Reset | Status::Closed => {
                false
            }
        };
        let mut told = if is_alive {
            self.names_of(tool_context, session, given).await
        } else {
            JsonObject::new()
        };
        let of = |wanted: Stream| telling::text_of(outcome, |stream| stream == wanted);
        tell_run(
            &mut told,
            of(Stream::Stdout),
            of(Stream::Stderr),
            error_of(outcome, ""),
        );
        told
    }

    /// Asks a live session what its names hold.
    async fn names_of(
        &self,
        tool_context: ToolContext<'_>,
        session: &SessionId,
        given: bool,
    ) -> JsonObject {
        let word = SessionId::random();
        let request = json!({
            "given": given, "longest_text": MAX_TEXT_LENGTH, "most_characters": MAX_STATE,
            "word": word.as_str(),
        });
        // Twice the size leaves room for what threads of the cell still print.
        let cell = runners_own(
            "state",
            "tell",
            &["__import__('builtins').globals()"],
            &request,
        );
        let asked = tool_context
            .run(session, cell, STATE_TIME, 2 * MAX_STATE)
            .await;
        match asked.ok().and_then(|asked| answer(&asked, word.as_str())) {
            Some(Value::Object(state)) => state,
            _ => JsonObject::new(),
        }
    }
}

/// Adds to a state what a run printed and how it failed.
fn tell_run(state: &mut JsonObject, stdout: String, stderr: String, error: Option<String>) {
    state.insert("__stdout__".to_owned(), Value::from(stdout));
    state.insert("__stderr__".to_owned(), Value::from(stderr));
    state.insert(
        "__error__".to_owned(),
        error.map_or(Value::Null, Value::from),
    );
}

#[async_trait]
impl Toolbox for PythonDocker {
    fn tools(&self) -> &[Tool] {
        &self.tools
    }

    fn find(&self, name: &str) -> Option<Entry> {
        [TRANSIENT, PERSISTENT, INSTALL, CLEANUP]
            .into_iter()
            .find(|entry| entry.name == name)
    }

    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse {
        let done = self.carry_out(tool_context, tool, arguments).await;
        done.unwrap_or_else(|Failure(why)| failed(format!("Error executing {}: {why}", tool.name)))
            .into()
    }

    fn unknown(&self, name: &str) -> Result<CallToolResponse, ErrorData> {
        let name = telling::head(name, MAX_NAME_LENGTH).0;
        Ok(failed(format!("Error executing {name}: Unknown tool: {name}")).into())
    }

    fn introduction(&self) -> Option<Introduction> {
        Some(Introduction {
            name: "python-docker-mcp",
            instructions: None,
        })
    }
}

/// A session for one call. Whatever becomes of the call, it is closed, and nobody waits for that.
struct Fresh {
    sessions: Arc<dyn Host>,
    owner: Principal,
    id: SessionId,
}

impl Fresh {
    fn new(tool_context: ToolContext<'_>) -> Fresh {
        let sessions = Arc::clone(&tool_context.server.shared.sessions);
        Fresh {
            sessions,
            owner: tool_context.owner.clone(),
            id: SessionId::random(),
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let (sessions, owner, id) = (
            Arc::clone(&self.sessions),
            self.owner.clone(),
            self.id.clone(),
        );
        tokio::spawn(async move {
            // It may never have begun.
            let _ = sessions
                .run(
                    &owner,
                    ops::CloseSession {
                        session: id.clone(),
                    },
                )
                .await;
        });
    }
}

/// Why a call failed, without the words before it.
struct Failure(String);

impl Failure {
    fn of(error: impl std::error::Error + 'static) -> Failure {
        Failure(refusals::with_causes(&error))
    }
}

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Failure {
        Failure(match &refused {
            Refused::Ended { id, .. } => format!("Session {id} has expired or was deleted"),
            other => telling::refusal(other, ""),
        })
    }
}

fn not_installed(refused: Refused) -> Failure {
    Failure(format!(
        "Error installing package: {}",
        Failure::from(refused).0
    ))
}

fn needed(written: &mut Written, name: &'static str, missing: &str) -> Result<String, Failure> {
    let given = written.take(name);
    match &given.value {
        None | Some(Value::Null) => Err(Failure(missing.to_owned())),
        Some(Value::String(text)) if text.is_empty() => Err(Failure(missing.to_owned())),
        Some(_) => given
            .text(
                if name == "code" {
                    MAX_CODE_BYTES
                } else {
                    MAX_PATH_LENGTH
                },
                1,
            )
            .map_err(Failure::of),
    }
}

fn session(written: &mut Written) -> Result<Option<SessionId>, Failure> {
    match written.take("session_id").value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => text
            .parse()
            .map(Some)
            .map_err(|bad: crate::session::BadSessionId| Failure(bad.to_string())),
        Some(_) => Err(Failure(
            "The argument \"session_id\" must be a string".to_owned(),
        )),
    }
}

/// Says that code was not run. The state comes back as it was, so that a chain of runs does not
/// lose it.
fn refused_code(problem: &Problem, before: &str, mut state: JsonObject) -> CallToolResult {
    let error = format!("Validation error: {problem}");
    tell_run(
        &mut state,
        String::new(),
        String::new(),
        Some(error.clone()),
    );
    failed(format!(
        "{before}Execution Result:\n\n\n\nError: {error}\n\nState: {}",
        Value::Object(state)
    ))
}

/// Says how code failed, if it did.
fn error_of(outcome: &Outcome, way_back: &str) -> Option<String> {
    match &outcome.status {
        Status::Completed => None,
        Status::Raised(error) => Some(format!(
            "Python execution error: {}",
            render::summary(error)
        )),
        Status::TimedOut { limit, state } => {
            let seconds = limit.as_secs_f64();
            let lost = match state {
                StateAfter::Kept => String::new(),
                StateAfter::Lost => format!(". Variables are gone; files are kept. {way_back}")
                    .trim_end()
                    .to_owned(),
            };
            Some(format!("Execution timed out after {seconds} seconds{lost}"))
        }
        other => telling::ending(other, way_back),
    }
}

fn result(
    outcome: &Outcome,
    anew: Option<String>,
    before: &str,
    state: &JsonObject,
    way_back: &str,
) -> CallToolResult {
    let output = telling::text_of(outcome, |stream| stream != Stream::Value);
    let mut text = format!("{before}Execution Result:\n\n");
    if let Some(anew) = anew {
        text.push_str(&format!("{anew}\n"));
    }
    text.push_str(output.trim_end());
    if let Some(error) = error_of(outcome, way_back) {
        text.push_str(&format!("\n\nError: {error}"));
    }
    text.push_str(&format!("\n\nState: {}", Value::Object(state.clone())));
    let mut content = vec![ContentBlock::text(text)];
    content.extend(telling::images(outcome).map(telling::image_block));
    match outcome.status {
        Status::Completed => CallToolResult::success(content),
        _ => CallToolResult::error(content),
    }
}

fn tools() -> Vec<Tool> {
    let code = json!({"type": "string", "description": "Python code."});
    let id = |description: &str| json!({"type": "string", "description": description});
    vec![
        Tool::new(
            TRANSIENT.name,
            "Runs Python code in a fresh sandbox that is destroyed afterwards. `state` is a \
             dictionary that the code finds under that \
             name; the result ends with the state after it: that dictionary and all names of the \
             code.",
            schema(
                json!({
                    "code": code,
                    "state": {"type": "object", "description": "What the code finds in the \
                         dictionary `state`."},
                }),
                &["code"],
            ),
        ),
        Tool::new(
            PERSISTENT.name,
            "Runs Python code in a session, whose variables, files and packages stay for the next \
             call with its id.",
            schema(
                json!({
                    "code": code,
                    "session_id": id("The session; without one a new session is made, and the \
                                      result names it."),
                }),
                &["code"],
            ),
        ),
        Tool::new(
            INSTALL.name,
            "Installs a Python package into a session.",
            schema(
                json!({
                    "package_name": id("A requirement such as `polars` or `polars>=1`."),
                    "session_id": id("The session in which it is needed. It is made if it is not \
                                      there."),
                }),
                &["package_name"],
            ),
        ),
        Tool::new(
            CLEANUP.name,
            "Ends a session: its variables and files are gone.",
            schema(json!({"session_id": id("The session.")}), &["session_id"]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::examples::{outcome, picture, raised, text, told};
    use super::*;

    fn state() -> JsonObject {
        json!({"x": 1}).as_object().cloned().unwrap()
    }

    #[test]
    fn a_result_is_output_then_error_then_state() {
        let parts = vec![
            text(Stream::Stdout, "a\n"),
            text(Stream::Value, "hidden"),
            picture(),
        ];
        let (failed, blocks) = told(&result(
            &outcome(Status::Completed, parts),
            None,
            "",
            &state(),
            "",
        ));
        assert!(!failed);
        assert_eq!(
            blocks,
            ["Execution Result:\n\na\n\nState: {\"x\":1}", "<picture>"]
        );
        let parts = vec![
            text(Stream::Stdout, "error: none\n"),
            text(Stream::Traceback, "trace\n"),
        ];
        let (failed, blocks) = told(&result(
            &outcome(Status::Raised(raised()), parts),
            None,
            "Session ID: s\n\n",
            &state(),
            "",
        ));
        let expected = "Session ID: s\n\nExecution Result:\n\nerror: none\ntrace\n\n\
                        Error: Python execution error: ValueError: bad\n\nState: {\"x\":1}";
        assert_eq!((failed, &blocks[0][..]), (true, expected));
    }

    #[test]
    fn a_time_out_tells_its_value_and_what_is_lost() {
        let limit = Duration::from_secs(30);
        let error = |state| {
            error_of(
                &outcome(Status::TimedOut { limit, state }, vec![]),
                "Begin again.",
            )
            .unwrap()
        };
        assert_eq!(
            error(StateAfter::Kept),
            "Execution timed out after 30 seconds"
        );
        let lost = "Execution timed out after 30 seconds. Variables are gone; files are kept. \
                    Begin again.";
        assert_eq!(error(StateAfter::Lost), lost);
    }

    #[test]
    fn missing_arguments_are_told_in_the_words_of_that_server() {
        let tools = tools();
        let written = |arguments: Value| {
            Written::new(
                "execute-transient",
                &tools,
                arguments.as_object().cloned().unwrap(),
            )
            .unwrap()
        };
        for missing in [json!({}), json!({"code": null}), json!({"code": ""})] {
            assert_eq!(
                needed(&mut written(missing), "code", "Missing code")
                    .err()
                    .unwrap()
                    .0,
                "Missing code"
            );
        }
        assert_eq!(
            needed(&mut written(json!({"code": "1"})), "code", "Missing code")
                .ok()
                .unwrap(),
            "1"
        ); // control
    }

    #[test]
    fn session_ids_are_names_and_no_paths() {
        let tools = tools();
        let read = |id: Value| {
            let arguments = json!({"session_id": id}).as_object().cloned().unwrap();
            session(&mut Written::new("cleanup-session", &tools, arguments).unwrap())
                .map_err(|failure| failure.0)
        };
        assert_eq!(read(json!("a-1")).unwrap().unwrap().as_str(), "a-1");
        assert_eq!(read(json!("")), Ok(None));
        for bad in [
            json!("../x"),
            json!("a/b"),
            json!("a\n"),
            json!(5),
            json!("x".repeat(65)),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }
}
