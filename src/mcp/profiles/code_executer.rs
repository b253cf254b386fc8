//! `Containerized Code Executer`: services that are started with dependencies, used, stopped, and
//! used again by name.
//!
//! A service is a session whose name begins with `code_executer-`. Code runs in the one that was
//! started or reused last, because calls do not name one; when that one is stopped, the youngest
//! other one takes its place, and the next reply names it. A service that was stopped and kept has
//! its files and packages, and a new Python when it is reused. Which sessions exist is asked of the
//! sessions themselves; only which one is meant, and which are stopped, is remembered here.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rmcp::model::{
    CallToolResponse, CallToolResult, ErrorData, GetPromptResult, JsonObject, Prompt,
    PromptArgument, PromptMessage, Role, Tool,
};
use serde_json::{Value, json};

use super::super::arguments::{Given, MAX_CODE_BYTES};
use super::super::toolbox::{Entry, Introduction, ToolContext, Toolbox};
use super::super::tools::requirements;
use super::super::turns::Extent;
use super::super::{McpSettings, render};
use super::{Modules, Ran, Written, failed, said, schema, telling, unknown_tool};
use crate::auth::Scope;
use crate::ops::{self, HostExt};
use crate::session::{Outcome, Principal, Refused, SessionId, SessionInfo, Status, Stream};

/// Functions that run text as code, which a reader of that code does not see.
const DANGEROUS_CALLS: [&str; 2] = ["eval", "exec"];

const PREFIX: &str = "code_executer-";

/// Characters of output. That server lost replies over 4096 bytes.
const MAX_OUTPUT: usize = 100_000;

/// How long Python may take to be there.
const START_TIME: Duration = Duration::from_secs(60);

/// Characters of an expression to be solved. It is typed.
const MAX_EXPRESSION_LENGTH: usize = 10_000;

const WAY_BACK: &str = "The next call starts Python anew.";

const START: Entry = Entry {
    name: "start_code_executer",
    scope: Scope::Install,
    extent: Extent::Whole,
};
const EXECUTE: Entry = Entry {
    name: "execute_code",
    scope: Scope::Execute,
    extent: Extent::FirstStep,
};
const STOP: Entry = Entry {
    name: "stop_code_executer",
    scope: Scope::Execute,
    extent: Extent::Whole,
};
const REUSE: Entry = Entry {
    name: "reuse_code_executer",
    scope: Scope::Execute,
    extent: Extent::Whole,
};

const STOPPED: &str = "Code execution service stopped.";
const RESTARTED: &str = "Code execution service restarted.";
const NOT_RUNNING: &str = "Code execution service is not running.";
const NO_SERVICE: &str = "Failed to connect to the code execution service. There is none; start \
                          one with start_code_executer.";

pub(super) struct CodeExecuter {
    tools: Vec<Tool>,
    modules: Modules,
    timeout: Duration,
    services: Mutex<HashMap<Principal, Services>>,
}

/// What is remembered of one owner's services.
#[derive(Default)]
struct Services {
    current: Option<SessionId>,
    stopped: HashSet<SessionId>,
}

/// The service that calls mean.
struct Current {
    name: SessionId,
    /// No reply has named it as the one in which code runs.
    is_new: bool,
}

impl CodeExecuter {
    pub(super) fn new(settings: &McpSettings, modules: Modules) -> CodeExecuter {
        // Whoever blocks nothing wants nothing to be blocked.
        let calls = if modules.blocked.is_empty() {
            &[][..]
        } else {
            &DANGEROUS_CALLS
        };
        let calls = calls.iter().map(|call| (*call).to_owned()).collect();
        let modules = Modules {
            calls,
            requested_wins: true,
            ..modules
        };
        CodeExecuter {
            tools: tools(),
            modules,
            timeout: settings.default_timeout,
            services: Mutex::default(),
        }
    }

    async fn carry_out(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> Result<CallToolResult, String> {
        let _slot = tool_context
            .server
            .call_slot(tool_context.owner)
            .map_err(|busy| format!("Error: {busy}"))?;
        let mut written = Written::new(tool.name, &self.tools, arguments)
            .map_err(|bad| format!("Error: {bad}"))?;
        match tool.name {
            "start_code_executer" => {
                let dependencies = written.take_leniently("dependencies");
                let dependencies = match &dependencies.value {
                    None => Vec::new(),
                    Some(Value::Array(items)) if items.is_empty() => Vec::new(),
                    Some(_) => requirements(dependencies).map_err(|bad| format!("Error: {bad}"))?,
                };
                self.start(tool_context, dependencies).await
            }
            "execute_code" => {
                let code = written
                    .take("code")
                    .text(MAX_CODE_BYTES, 0)
                    .map_err(|bad| format!("Error: {bad}"))?;
                self.execute(tool_context, &code).await
            }
            "stop_code_executer" => {
                let named = match written.take("name") {
                    given if matches!(given.value, None | Some(Value::Null)) => None,
                    given => Some(name(given)?),
                };
                // The document calls it without a name: the service in which code runs is meant.
                let name = match named {
                    Some(name) => name,
                    None => {
                        self.current(tool_context)
                            .await
                            .map_err(refusal)?
                            .ok_or(NOT_RUNNING)?
                            .name
                    }
                };
                let delete = written.take_leniently("delete_service");
                let delete = delete.value.is_none()
                    || delete.flag().map_err(|bad| format!("Error: {bad}"))?;
                self.stop(tool_context, &name, delete).await
            }
            _ => {
                let name = name(written.take("name"))?;
                self.reuse(tool_context, &name).await
            }
        }
    }

    async fn start(
        &self,
        tool_context: ToolContext<'_>,
        dependencies: Vec<String>,
    ) -> Result<CallToolResult, String> {
        let name = self.free_name(tool_context).await.map_err(refusal)?;
        tool_context
            .run(&name, String::new(), START_TIME, MAX_OUTPUT)
            .await
            .map_err(refusal)?;
        if !dependencies.is_empty() {
            let installed = tool_context
                .server
                .install_to_end(
                    tool_context.owner,
                    &name,
                    dependencies,
                    tool_context.context,
                )
                .await;
            if let Err(refused) = installed {
                // Half a service is none.
                let _ = tool_context
                    .server
                    .shared
                    .sessions
                    .run(
                        tool_context.owner,
                        ops::CloseSession {
                            session: name.clone(),
                        },
                    )
                    .await;
                return Err(refusal(refused));
            }
        }
        self.change(tool_context.owner, |services| {
            services.current = Some(name.clone())
        });
        Ok(said(format!(
            "Code execution service started with the name: {name}"
        )))
    }

    async fn execute(
        &self,
        tool_context: ToolContext<'_>,
        code: &str,
    ) -> Result<CallToolResult, String> {
        let Current {
            name: session,
            is_new,
        } = self
            .current(tool_context)
            .await
            .map_err(refusal)?
            .ok_or(NO_SERVICE)?;
        let place = is_new.then(|| format!("({})", code_runs_in(&session)));
        self.change(tool_context.owner, |services| {
            services.current = Some(session.clone())
        });
        match code.trim() {
            "clear" => {
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
                    .await
                    .map_err(refusal)?;
                return Ok(said("Globals cleared"));
            }
            "exit" => return Ok(said("Goodbye!")),
            _ => {}
        }
        let (problem, anew) = self
            .modules
            .check_anew(tool_context, &session, code)
            .await
            .map_err(refusal)?;
        if let Some(problem) = problem {
            let notes: String = place
                .into_iter()
                .chain(anew)
                .map(|note| format!(" {note}"))
                .collect();
            return Err(format!(
                "Error: The code contains dangerous operations and cannot be executed. \
                 ({problem}.){notes}"
            ));
        }
        let Ran {
            outcome,
            anew: later,
        } = tool_context
            .run_anew(&session, code, self.timeout, MAX_OUTPUT)
            .await
            .map_err(refusal)?;
        let notes: Vec<String> = place.into_iter().chain(anew.or(later)).collect();
        Ok(result(&outcome, &notes))
    }

    async fn stop(
        &self,
        tool_context: ToolContext<'_>,
        name: &SessionId,
        delete: bool,
    ) -> Result<CallToolResult, String> {
        let sessions = &tool_context.server.shared.sessions;
        let is_there = self
            .all(tool_context)
            .await
            .map_err(refusal)?
            .iter()
            .any(|service| service.id == *name);
        let is_stopped = self.is_stopped(tool_context.owner, name);
        if !is_there || (is_stopped && !delete) {
            return Err(NOT_RUNNING.to_owned());
        }
        let done = match delete {
            true => {
                sessions
                    .run(
                        tool_context.owner,
                        ops::CloseSession {
                            session: name.clone(),
                        },
                    )
                    .await
            }
            // What ran is over and its memory is free; files and packages wait.
            false => sessions
                .run(
                    tool_context.owner,
                    ops::Reset {
                        session: name.clone(),
                    },
                )
                .await
                .map(drop),
        };
        done.map_err(refusal)?;
        self.change(tool_context.owner, |services| {
            services.current.take_if(|current| current == name);
            match delete {
                true => services.stopped.remove(name),
                false => services.stopped.insert(name.clone()),
            };
        });
        let Some(Current {
            name: next,
            is_new: true,
        }) = self.current(tool_context).await.map_err(refusal)?
        else {
            return Ok(said(STOPPED));
        };
        self.change(tool_context.owner, |services| {
            services.current = Some(next.clone())
        });
        Ok(said(format!("{STOPPED} {}", code_runs_in(&next))))
    }

    async fn reuse(
        &self,
        tool_context: ToolContext<'_>,
        name: &SessionId,
    ) -> Result<CallToolResult, String> {
        let services = self.all(tool_context).await.map_err(refusal)?;
        let service = services
            .iter()
            .find(|service| service.id == *name)
            .ok_or(NOT_RUNNING)?;
        if service.ended.is_some() {
            tool_context
                .server
                .shared
                .sessions
                .run(
                    tool_context.owner,
                    ops::Reset {
                        session: name.clone(),
                    },
                )
                .await
                .map_err(refusal)?;
        }
        self.change(tool_context.owner, |services| {
            services.stopped.remove(name);
            services.current = Some(name.clone());
        });
        Ok(said(RESTARTED))
    }

    /// Returns the service that calls mean: the one that was started or reused last. When that one
    /// is gone, or this server is new, it is the youngest one that runs.
    async fn current(&self, tool_context: ToolContext<'_>) -> Result<Option<Current>, Refused> {
        let services = self.all(tool_context).await?;
        let remembered = self
            .services()
            .get(tool_context.owner)
            .and_then(|services| services.current.clone());
        if let Some(name) =
            remembered.filter(|current| services.iter().any(|service| service.id == *current))
        {
            return Ok(Some(Current {
                name,
                is_new: false,
            }));
        }
        let running = services
            .into_iter()
            .filter(|service| !self.is_stopped(tool_context.owner, &service.id));
        let youngest = running.min_by_key(|service| service.age);
        Ok(youngest.map(|service| Current {
            name: service.id,
            is_new: true,
        }))
    }

    async fn all(&self, tool_context: ToolContext<'_>) -> Result<Vec<SessionInfo>, Refused> {
        let sessions = tool_context
            .server
            .shared
            .sessions
            .run(tool_context.owner, ops::ListSessions {})
            .await?;
        Ok(sessions
            .into_iter()
            .filter(|session| session.id.as_str().starts_with(PREFIX))
            .collect())
    }

    /// Returns the time as a name, or with a number behind it when two services are started within
    /// a second.
    async fn free_name(&self, tool_context: ToolContext<'_>) -> Result<SessionId, Refused> {
        let taken: HashSet<String> = self
            .all(tool_context)
            .await?
            .iter()
            .map(|service| service.id.to_string())
            .collect();
        let now = DateTime::<Utc>::from(SystemTime::now()).format("%Y%m%d%H%M%S");
        let names = (1..).map(|number| match number {
            1 => format!("{PREFIX}{now}"),
            number => format!("{PREFIX}{now}-{number}"),
        });
        let free = names
            .into_iter()
            .find(|name| !taken.contains(name))
            .expect("there are more numbers than services");
        Ok(free.parse().expect("letters, digits and dashes are a name"))
    }

    fn is_stopped(&self, owner: &Principal, name: &SessionId) -> bool {
        self.services()
            .get(owner)
            .is_some_and(|services| services.stopped.contains(name))
    }

    fn change(&self, owner: &Principal, change: impl FnOnce(&mut Services)) {
        let mut all = self.services();
        let services = all.entry(owner.clone()).or_default();
        change(services);
        if services.current.is_none() && services.stopped.is_empty() {
            all.remove(owner);
        }
    }

    fn services(&self) -> MutexGuard<'_, HashMap<Principal, Services>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Toolbox for CodeExecuter {
    fn tools(&self) -> &[Tool] {
        &self.tools
    }

    fn find(&self, name: &str) -> Option<Entry> {
        [START, EXECUTE, STOP, REUSE]
            .into_iter()
            .find(|entry| entry.name == name)
    }

    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse {
        self.carry_out(tool_context, tool, arguments)
            .await
            .unwrap_or_else(failed)
            .into()
    }

    fn unknown(&self, name: &str) -> Result<CallToolResponse, ErrorData> {
        Ok(unknown_tool(name))
    }

    fn introduction(&self) -> Option<Introduction> {
        Some(Introduction {
            name: "Code Execution Service",
            instructions: None,
        })
    }

    fn prompts(&self) -> Vec<Prompt> {
        let expression = PromptArgument::new("expression")
            .with_description("What to evaluate.")
            .with_required(true);
        let description = "Evaluates a mathematical expression with code";
        vec![
            Prompt::new("math_evaluation", Some(description), Some(vec![expression]))
                .with_title("Mathematics Solver"),
        ]
    }

    fn prompt(
        &self,
        name: &str,
        arguments: Option<&JsonObject>,
    ) -> Result<GetPromptResult, ErrorData> {
        if name != "math_evaluation" {
            return Err(ErrorData::invalid_params(
                "there is no such prompt; there is math_evaluation",
                None,
            ));
        }
        let expression = arguments
            .and_then(|arguments| arguments.get("expression"))
            .and_then(Value::as_str);
        let expression = expression
            .filter(|text| text.chars().count() <= MAX_EXPRESSION_LENGTH)
            .ok_or_else(|| {
                let text = format!(
                    "math_evaluation needs \"expression\", a text of at most \
                         {MAX_EXPRESSION_LENGTH} characters"
                );
                ErrorData::invalid_params(text, None)
            })?;
        let text = format!(
            "Evaluate this mathematical expression by running Python code, with SymPy where an \
             exact result is possible, and say \
             what the result is: {expression}"
        );
        Ok(GetPromptResult::new(vec![PromptMessage::new_text(
            Role::User,
            text,
        )]))
    }
}

fn code_runs_in(name: &SessionId) -> String {
    format!("Code runs in the service {name} now.")
}

fn name(given: Given) -> Result<SessionId, String> {
    let text = given.text(64, 1).map_err(|bad| format!("Error: {bad}"))?;
    // Whatever else the text is, no service has such a name.
    text.parse()
        .ok()
        .filter(|name: &SessionId| name.as_str().starts_with(PREFIX))
        .ok_or(NOT_RUNNING.to_owned())
}

fn refusal(refused: Refused) -> String {
    format!("Error: {}", telling::refusal(&refused, WAY_BACK))
}

/// Writes what code gave: its output, or why it failed and then its output.
fn result(outcome: &Outcome, notes: &[String]) -> CallToolResult {
    let note: String = notes.iter().map(|note| format!("{note}\n")).collect();
    let why = match &outcome.status {
        Status::Completed => None,
        Status::Raised(error) => {
            let traceback = telling::text_of(outcome, |stream| stream == Stream::Traceback);
            Some(
                format!("{}\n{}", render::summary(error), traceback.trim_end())
                    .trim_end()
                    .to_owned(),
            )
        }
        other => telling::ending(other, WAY_BACK),
    };
    let printed = telling::printed(outcome);
    let mut result = match why {
        None => said(format!("{note}{}", printed.trim_end_matches('\n'))),
        Some(why) => failed(format!(
            "Error: {note}{why}{}",
            telling::before_the_error(outcome, str::to_owned)
        )),
    };
    result
        .content
        .extend(telling::images(outcome).map(telling::image_block));
    result
}

fn tools() -> Vec<Tool> {
    let name = json!({"type": "string", "description": "The name that start_code_executer told."});
    vec![
        Tool::new(
            START.name,
            "Starts a service that runs Python code, with the packages that it needs. Stop it when \
             the work is done.",
            schema(
                json!({"dependencies": {
                    "type": "array", "items": {"type": "string"}, "default": [],
                    "description": "Packages to install, such as `sympy`.",
                }}),
                &[],
            ),
        ),
        Tool::new(
            EXECUTE.name,
            "Runs Python code in the service that was started or reused last, and returns what it \
             printed and the value of its last \
             expression. Variables stay for the next call.",
            schema(
                json!({"code": {"type": "string", "description": "Python code."}}),
                &["code"],
            ),
        ),
        Tool::new(
            STOP.name,
            "Stops a service. It is deleted, or kept with its files and packages for \
             reuse_code_executer.",
            schema(
                json!({
                    "name": {
                        "type": "string",
                        "description": "The name that start_code_executer told. Without one, the \
                                        service in which code runs is stopped.",
                    },
                    "delete_service": {
                        "type": "boolean",
                        "default": true,
                        "description": "False keeps it.",
                    },
                }),
                &[],
            ),
        ),
        Tool::new(
            REUSE.name,
            "Starts a service again that was stopped and kept.",
            schema(json!({"name": name}), &["name"]),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::examples::{outcome, picture, raised, text, told};
    use super::*;

    #[test]
    fn code_that_ends_well_is_told_by_its_output() {
        let parts = vec![
            text(Stream::Stdout, "a\n"),
            text(Stream::Stderr, "b\n"),
            text(Stream::Value, "3"),
            picture(),
        ];
        let (failed, blocks) = told(&result(&outcome(Status::Completed, parts), &[]));
        assert_eq!(
            (failed, blocks),
            (false, vec!["a\nb\n3".to_owned(), "<picture>".to_owned()])
        );
        let (failed, blocks) = told(&result(&outcome(Status::Completed, vec![]), &[]));
        assert_eq!((failed, blocks), (false, vec![String::new()]));
    }

    #[test]
    fn code_that_fails_is_told_by_the_error_and_then_its_output() {
        let parts = vec![
            text(Stream::Stdout, "a\n"),
            text(Stream::Traceback, "trace\n"),
        ];
        let (failed, blocks) = told(&result(
            &outcome(Status::Raised(raised()), parts),
            &["(anew)".to_owned()],
        ));
        assert!(failed);
        assert_eq!(
            blocks,
            ["Error: (anew)\nValueError: bad\ntrace\n\nOutput before the error:\na"]
        );
    }

    #[test]
    fn the_prompt_holds_the_expression_and_refuses_to_go_without() {
        let toolbox = CodeExecuter::new(&McpSettings::default(), Modules::default());
        let arguments = |value: Value| value.as_object().cloned().unwrap();
        let given = arguments(json!({"expression": "2 ** 10"}));
        let prompt = json!(toolbox.prompt("math_evaluation", Some(&given)).unwrap());
        assert!(
            prompt["messages"][0]["content"]["text"]
                .as_str()
                .unwrap()
                .contains("2 ** 10")
        );
        let long = arguments(json!({"expression": "1".repeat(10_001)}));
        for (name, given) in [
            ("math_evaluation", None),
            ("math_evaluation", Some(&long)),
            ("other", Some(&given)),
        ] {
            assert!(toolbox.prompt(name, given).is_err());
        }
    }

    #[test]
    fn calls_are_dangerous_only_where_modules_are() {
        let blocked = Modules {
            blocked: vec!["os".to_owned()],
            ..Modules::default()
        };
        assert_eq!(
            CodeExecuter::new(&McpSettings::default(), blocked)
                .modules
                .calls,
            ["eval", "exec"]
        );
        assert!(
            CodeExecuter::new(&McpSettings::default(), Modules::default())
                .modules
                .is_empty()
        );
    }
}
