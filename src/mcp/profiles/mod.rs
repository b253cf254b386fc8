//! Profiles: the tools of other servers, name for name, over the same sessions.
//!
//! ```text
//! ipybox          one session; both generations' tools
//! code_executer   services that are started and stopped
//! python_docker   runs with state in and out, sessions, packages
//! pyexec          one tool, text and images in order
//! ```
//!
//! Whoever used one of those servers changes the command in the client's configuration and nothing
//! else. Each file here has the table of its tools, reads their arguments, and writes results in
//! that server's words; sessions, sandboxes, order and progress are those of the default profile.
//! Where a server's documentation promised more than its program did, the promise is kept; what was
//! a defect is not imitated. `docs/migrate` lists the differences.
//!
//! `telling` is what all of them say alike: what a cell printed, how it ended, why a session
//! refuses. `modules` checks, inside the sandbox, which modules code wants to import.

mod code_executer;
#[cfg(test)]
mod examples;
mod ipybox;
mod modules;
mod pyexec;
mod python_docker;
mod telling;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, JsonObject, Tool};
use serde_json::Value;

use super::McpSettings;
use super::arguments::{BadArgument, Given, nearest, shortened};
use super::asking::ElicitationMode;
use super::toolbox::{ToolContext, Toolbox};
use super::tools::Catalogue;
use super::wire;
use crate::ops::{self, HostExt};
use crate::session::{ExecuteRequest, InsidePath, Outcome, RecorderId, Refused, SessionId};

pub use modules::Modules;

/// Which tools clients see, with what only those tools need to know.
#[derive(Debug, Clone, Default)]
pub enum Profile {
    #[default]
    Default,
    Ipybox {
        /// Where pictures are kept, below the working folder.
        images: InsidePath,
        /// The working folder as the host knows it, if it is one of the host's.
        workspace: Option<PathBuf>,
    },
    PythonDocker {
        modules: Modules,
    },
    CodeExecuter {
        modules: Modules,
    },
    Pyexec,
}

/// Makes the toolbox of a profile.
pub(super) fn toolbox(settings: &McpSettings) -> Arc<dyn Toolbox> {
    match &settings.profile {
        Profile::Default => Arc::new(Catalogue::new(settings)),
        Profile::Ipybox { images, workspace } => Arc::new(ipybox::Ipybox::new(
            settings,
            images.clone(),
            workspace.clone(),
        )),
        Profile::PythonDocker { modules } => {
            Arc::new(python_docker::PythonDocker::new(settings, modules.clone()))
        }
        Profile::CodeExecuter { modules } => {
            Arc::new(code_executer::CodeExecuter::new(settings, modules.clone()))
        }
        Profile::Pyexec => Arc::new(pyexec::Pyexec::new(settings)),
    }
}

/// Characters that are shown of the name of a tool that there is not.
const MAX_NAME_LENGTH: usize = 128;

/// The arguments of one call, whose names are known to be those of its schema.
struct Written {
    tool: &'static str,
    arguments: JsonObject,
}

impl Written {
    fn new(
        tool: &'static str,
        tools: &[Tool],
        arguments: JsonObject,
    ) -> Result<Written, BadArgument> {
        let schema = tools
            .iter()
            .find(|listed| listed.name == tool)
            .expect("every tool that is found is listed");
        let properties = schema
            .input_schema
            .get("properties")
            .and_then(Value::as_object);
        let allowed: Vec<String> = properties
            .map(|names| names.keys().cloned().collect())
            .unwrap_or_default();
        match arguments.keys().find(|name| !allowed.contains(name)) {
            Some(given) => Err(BadArgument::Unknown {
                tool,
                given: shortened(given),
                nearest: nearest(given, allowed.iter().map(String::as_str)).map(str::to_owned),
                allowed,
            }),
            None => Ok(Written { tool, arguments }),
        }
    }

    fn take(&mut self, name: &'static str) -> Given {
        Given {
            tool: self.tool,
            name,
            value: self.arguments.remove(name),
        }
    }

    /// Takes an argument that is no text. Some models write numbers, lists and flags as text, and
    /// these servers took that.
    fn take_leniently(&mut self, name: &'static str) -> Given {
        let mut given = self.take(name);
        if let Some(Value::String(text)) = &given.value
            && let Ok(value) = cellblock_json::read::<Value>(text.as_bytes(), wire::MESSAGE)
        {
            given.value = Some(value);
        }
        given
    }
}

/// How a cell went, and what its reader must know before.
struct Ran {
    outcome: Outcome,
    /// Says that Python had to be started anew for it, and why.
    anew: Option<String>,
}

/// Says that Python was started anew, so that nobody looks for variables in vain.
fn started_anew(why: &str) -> String {
    format!("(Python was started anew, because {why}.)")
}

impl ToolContext<'_> {
    /// Runs a cell to its end.
    async fn run(
        &self,
        session: &SessionId,
        code: String,
        timeout: Duration,
        max_output_chars: usize,
    ) -> Result<Outcome, Refused> {
        let asking = ElicitationMode::of(self.context).asking_meanwhile();
        let request = ExecuteRequest {
            code,
            timeout,
            max_output_chars,
            asking,
            rules: None,
            recorder: RecorderId::default(),
        };
        self.server
            .run_to_end(self.owner, session, request, self.context)
            .await
    }

    /// Runs a cell to its end, in a new Python if the session has lost its own. For profiles
    /// without a tool that starts it anew: the result says that it happened.
    async fn run_anew(
        &self,
        session: &SessionId,
        code: &str,
        timeout: Duration,
        max_output_chars: usize,
    ) -> Result<Ran, Refused> {
        match self
            .run(session, code.to_owned(), timeout, max_output_chars)
            .await
        {
            Err(Refused::Ended { why, .. }) => {
                self.server
                    .shared
                    .sessions
                    .run(
                        self.owner,
                        ops::Reset {
                            session: session.clone(),
                        },
                    )
                    .await?;
                let outcome = self
                    .run(session, code.to_owned(), timeout, max_output_chars)
                    .await?;
                Ok(Ran {
                    outcome,
                    anew: Some(started_anew(&why)),
                })
            }
            ran => ran.map(|outcome| Ran {
                outcome,
                anew: None,
            }),
        }
    }
}

/// A result of one text.
fn said(text: impl Into<String>) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text)])
}

/// A result of one text that tells of a failure.
fn failed(text: impl Into<String>) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(text)])
}

/// Answers a call of a tool that there is not, as most of these servers do.
fn unknown_tool(name: &str) -> CallToolResponse {
    failed(format!(
        "Unknown tool: {}",
        telling::head(name, MAX_NAME_LENGTH).0
    ))
    .into()
}

/// A table of arguments as JSON Schema.
fn schema(properties: Value, required: &[&str]) -> Arc<JsonObject> {
    let mut schema = JsonObject::new();
    schema.insert("type".to_owned(), Value::from("object"));
    schema.insert("properties".to_owned(), properties);
    if !required.is_empty() {
        schema.insert("required".to_owned(), Value::from(required.to_vec()));
    }
    Arc::new(schema)
}
