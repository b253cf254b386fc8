//! The tools a client sees: names, descriptions, schemas.
//!
//! The schemas are written by hand and are the only list of argument names: `parse` takes the
//! allowed names from them and hands each argument to `arguments`, which checks it. Nothing is
//! executed here.
//!
//! A model pays for every byte of this list in every conversation. So output schemas have one
//! level, every field of it is always there, and a field that may be null has no type;
//! `docs/results.md` has the rest.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::arguments::{
    self, BadArgument, Call, Given, LARGEST_CODE, LONGEST_PATH, LONGEST_SERVER_NAME,
    LONGEST_VARIANT, MOST_CELLS, MOST_OUTPUT_CHARS, Source, Target, Unnamed, nearest, shortened,
};
use super::turns::Extent;
use super::{Front, McpSettings, OtherHosts};
use crate::auth::Scope;
use crate::session::{ForkRequest, MOST_FORKS, MOST_VARIANTS, SessionId, WorkFolder};

/// A tool of the default profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ToolName {
    Execute,
    Check,
    Install,
    Reset,
    Undo,
    Checkpoints,
    Fork,
    Explore,
    Upload,
    Download,
    List,
    Close,
    Register,
    Servers,
    Unregister,
}

impl ToolName {
    /// All tools, in the order in which they are listed.
    pub(super) const ALL: [ToolName; 15] = [
        ToolName::Execute,
        ToolName::Check,
        ToolName::Install,
        ToolName::Reset,
        ToolName::Undo,
        ToolName::Checkpoints,
        ToolName::Fork,
        ToolName::Explore,
        ToolName::Upload,
        ToolName::Download,
        ToolName::List,
        ToolName::Close,
        ToolName::Register,
        ToolName::Servers,
        ToolName::Unregister,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            ToolName::Execute => "execute_ipython_cell",
            ToolName::Check => "check_execution",
            ToolName::Install => "install_package",
            ToolName::Reset => "reset",
            ToolName::Undo => "undo",
            ToolName::Checkpoints => "list_checkpoints",
            ToolName::Fork => "fork_session",
            ToolName::Explore => "explore",
            ToolName::Upload => "upload_file",
            ToolName::Download => "download_file",
            ToolName::List => "list_sessions",
            ToolName::Close => "close_session",
            ToolName::Register => "register_mcp_server",
            ToolName::Servers => "list_mcp_servers",
            ToolName::Unregister => "unregister_mcp_server",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<ToolName> {
        ToolName::ALL.into_iter().find(|tool| tool.as_str() == name)
    }

    /// The right that a call needs.
    pub(super) fn scope(self) -> Scope {
        match self {
            ToolName::Checkpoints | ToolName::Download | ToolName::List | ToolName::Servers => {
                Scope::Read
            }
            ToolName::Register | ToolName::Unregister => Scope::Register,
            ToolName::Install => Scope::Install,
            ToolName::Execute
            | ToolName::Check
            | ToolName::Reset
            | ToolName::Undo
            | ToolName::Fork
            | ToolName::Explore
            | ToolName::Upload
            | ToolName::Close => Scope::Execute,
        }
    }

    /// How much of a call must be over before the next call to its session begins.
    pub(super) fn extent(self) -> Extent {
        match self {
            ToolName::Execute
            | ToolName::Check
            | ToolName::Install
            | ToolName::List
            | ToolName::Undo
            | ToolName::Checkpoints
            | ToolName::Fork
            | ToolName::Explore
            | ToolName::Servers => Extent::FirstStep,
            // A cell that follows finds the modules.
            ToolName::Register | ToolName::Unregister => Extent::Whole,
            // They open a file of the host first.
            ToolName::Upload | ToolName::Download => Extent::Whole,
            ToolName::Reset | ToolName::Close => Extent::FirstStepSoon,
        }
    }
}

/// The tools as they are listed to clients.
#[derive(Debug, Clone)]
pub(super) struct Catalogue {
    tools: Arc<Vec<Tool>>,
    default_timeout: Duration,
    max_timeout: Duration,
    default_max_output_chars: usize,
    max_wait: Duration,
    front: Front,
}

impl Catalogue {
    pub(super) fn new(settings: &McpSettings) -> Catalogue {
        Catalogue {
            tools: Arc::new(
                ToolName::ALL
                    .into_iter()
                    .map(|tool| describe(tool, settings))
                    .collect(),
            ),
            default_timeout: settings.default_timeout,
            max_timeout: settings.max_timeout,
            default_max_output_chars: settings.default_max_output_chars,
            max_wait: settings.max_wait,
            front: settings.front,
        }
    }

    pub(super) fn all(&self) -> &[Tool] {
        &self.tools
    }

    pub(super) fn get(&self, tool: ToolName) -> &Tool {
        &self.tools[tool as usize]
    }

    /// Checks the arguments of a call. Refuses names that are not in the schema, and everything the
    /// schema would refuse.
    pub(super) fn parse(
        &self,
        tool: ToolName,
        mut arguments: JsonObject,
    ) -> Result<Call, BadArgument> {
        let allowed: Vec<String> = properties(self.get(tool)).keys().cloned().collect();
        if let Some(given) = arguments.keys().find(|name| !allowed.contains(name)) {
            return Err(BadArgument::Unknown {
                tool: tool.as_str(),
                given: shortened(given),
                nearest: nearest(given, allowed.iter().map(String::as_str)).map(str::to_owned),
                allowed,
            });
        }
        // Whoever shares a server with others has no session that goes without saying.
        let unnamed = match (self.front, tool) {
            (Front::Stdio, _) => Unnamed::Default,
            (Front::Http, ToolName::Execute | ToolName::Install | ToolName::Upload) => Unnamed::New,
            (Front::Http, _) => Unnamed::Refused,
        };
        let mut take = |name| Given {
            tool: tool.as_str(),
            name,
            value: arguments.remove(name),
        };
        Ok(match tool {
            ToolName::Execute => Call::Execute {
                session: take("session_id").session(unnamed)?,
                code: take("code").text(LARGEST_CODE, 0)?,
                timeout: take("timeout").timeout(self.default_timeout, self.max_timeout)?,
                max_output_chars: take("max_output_chars")
                    .count(1..=MOST_OUTPUT_CHARS, self.default_max_output_chars as u64)?
                    as usize,
                rules: arguments::rules(take("allowed_domains"))?,
            },
            ToolName::Check => Call::Check {
                session: take("session_id").session(unnamed)?,
                wait: take("wait").wait(self.max_wait)?,
                interrupt: take("interrupt").flag()?,
            },
            ToolName::Install => Call::Install {
                session: take("session_id").session(unnamed)?,
                requirements: arguments::requirements(take("package_name"))?,
            },
            ToolName::Reset => Call::Reset {
                session: take("session_id").session(unnamed)?,
            },
            ToolName::Undo => Call::Undo {
                session: take("session_id").session(unnamed)?,
                cells: take("cells").count(1..=MOST_CELLS, 1)? as u32,
            },
            ToolName::Checkpoints => Call::Checkpoints {
                session: take("session_id").session(unnamed)?,
            },
            ToolName::Fork => {
                let session = take("session_id").session(unnamed)?;
                let names = arguments::fork_names(&session, take("count"), take("names"))?;
                let servers = arguments::server_names(take("mcp_servers"))?;
                Call::Fork {
                    session,
                    request: ForkRequest { names, servers },
                }
            }
            ToolName::Explore => {
                let session = take("session_id").session(unnamed)?;
                let variants = arguments::variants(take("variants"))?;
                let timeout = take("timeout").timeout(self.default_timeout, self.max_timeout)?;
                let (keep, replace) =
                    arguments::keep(&variants, take("keep"), take("best_by"), take("replace"))?;
                Call::Explore {
                    session,
                    variants,
                    timeout,
                    keep,
                    replace,
                }
            }
            ToolName::Upload => Call::Upload {
                session: take("session_id").session(unnamed)?,
                relpath: take("relpath").inside_path()?,
                source: match self.front {
                    Front::Stdio => Source::Local(take("local_path").text(LONGEST_PATH, 1)?),
                    Front::Http => Source::Content(arguments::content(
                        take("text"),
                        take("base64"),
                        take("resource"),
                    )?),
                },
                overwrite: take("overwrite").flag()?,
            },
            ToolName::Download => Call::Download {
                session: take("session_id").session(unnamed)?,
                relpath: take("relpath").inside_path()?,
                target: match self.front {
                    Front::Stdio => Target::Local {
                        path: take("local_path").text(LONGEST_PATH, 1)?,
                        overwrite: take("overwrite").flag()?,
                    },
                    Front::Http => Target::Inline,
                },
            },
            ToolName::List => Call::List,
            ToolName::Close => Call::Close {
                session: take("session_id").session(unnamed)?,
            },
            ToolName::Register => Call::Register {
                name: take("server_name").text(LONGEST_SERVER_NAME, 1)?,
                params: take("server_params").object()?,
            },
            ToolName::Servers => Call::Servers,
            ToolName::Unregister => Call::Unregister {
                name: take("server_name").text(LONGEST_SERVER_NAME, 1)?,
            },
        })
    }
}

/// Returns the session that a call names, unchecked: calls with the same words keep their order.
pub(super) fn session_as_written(arguments: Option<&JsonObject>) -> Option<&str> {
    arguments
        .and_then(|arguments| arguments.get("session_id"))
        .and_then(Value::as_str)
}

fn properties(tool: &Tool) -> &JsonObject {
    tool.input_schema
        .get("properties")
        .and_then(Value::as_object)
        .expect("every input schema here has properties")
}

fn describe(tool: ToolName, settings: &McpSettings) -> Tool {
    let (title, description, input, output, annotations) = match tool {
        ToolName::Execute => (
            "Run Python",
            format!(
                "Runs one IPython cell (magics, `!commands`, top-level `await`, plots) in a \
                 private Linux sandbox \
                 {reach} and returns what it printed, the value of its last expression and its \
                 images. Variables, imports \
                 and files stay for the next call with the same session_id; {new}. {files} After \
                 the timeout the code is interrupted; if it \
                 ignores that, it is killed and variables are lost. A failed cell is not rolled \
                 back{undo}. A cell that takes longer than {wait} goes on; check_execution tells \
                 how.{packages}",
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
            object(
                json!({
                    "code": {"type": "string", "description": "The cell."},
                    "session_id": session_schema(settings),
                    "timeout": timeout_schema(settings, "Seconds until the code is interrupted."),
                    "max_output_chars": {
                        "type": "integer", "minimum": 1, "maximum": MOST_OUTPUT_CHARS,
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
            execution_schema(),
            // Code can overwrite and delete the session's own files, so it is destructive within
            // the session.
            hints(Effect::Changes { destructive: true, idempotent: false }),
        ),
        ToolName::Check => (
            "Go on with a long cell",
            "Waits for a cell that was still running: new output, or its result. After a lost \
             connection it tells the last \
             result again."
                .to_owned(),
            object(
                json!({
                    "session_id": session_schema(settings),
                    "wait": {
                        "type": "number", "minimum": 0, "maximum": settings.max_wait.as_secs_f64(),
                        "default": settings.max_wait.as_secs_f64(),
                    },
                    "interrupt": {"type": "boolean", "default": false},
                }),
                &[],
            ),
            json!({"type": "object", "description": "As of execute_ipython_cell."}),
            hints(Effect::Changes { destructive: false, idempotent: false }),
        ),
        ToolName::Install => (
            "Install packages",
            format!(
                "Installs Python packages into a session, also when it has no network; they are \
                 there at once and \
                 stay after a reset. `!pip install` in a cell does the same.{off}",
                off = if settings.can_install { "" } else { " Switched off on this server." },
            ),
            object(
                json!({
                    "package_name": {
                        "description": "Such as `polars>=1`, or a list.",
                        "anyOf": [
                            {"type": "string"}, {"type": "array", "items": {"type": "string"}},
                        ],
                    },
                    "session_id": session_schema(settings),
                }),
                &["package_name"],
            ),
            result_schema(json!({
                "session_id": {"type": "string"},
                "text": {"type": "string"},
                "reset_needed_for": {"type": "array"},
            })),
            hints(Effect::Changes { destructive: false, idempotent: true }),
        ),
        ToolName::Reset => (
            "Restart Python",
            "Starts Python anew in a session, also while a cell is running (that cell is stopped) \
             and after Python \
             has died. Variables and imports are lost; files are kept."
                .to_owned(),
            object(json!({"session_id": session_schema(settings)}), &[]),
            result_schema(json!({
                "session_id": {"type": "string"},
                "interrupted_running_cell": {"type": "boolean"},
                "files_kept": {"type": "boolean"},
            })),
            hints(Effect::Changes { destructive: true, idempotent: true }),
        ),
        ToolName::Undo => (
            "Take cells back",
            format!(
                "Brings a session back to how it was before its last cells: variables{files}. Also \
                 after Python has \
                 died (out of memory, killed, os._exit): cells=1 is then the cell that killed it. \
                 Not while a cell is \
                 running; a reset cannot be undone.{off}",
                files = match settings.work_folder {
                    WorkFolder::Private => " and files",
                    WorkFolder::Shared => ", and files if the folder is small enough; the result \
                                           says whether",
                },
                off = switched_off(settings),
            ),
            object(
                json!({
                    "session_id": session_schema(settings),
                    "cells": {"type": "integer", "minimum": 1, "maximum": MOST_CELLS, "default": 1},
                }),
                &[],
            ),
            result_schema(json!({
                "session_id": {"type": "string"},
                "undone": {"type": "integer"},
                "revived": {"type": "boolean"},
                "not_carried_over": {"type": "array"},
                "files": files_schema("restored, shared, left_alone"),
                "can_undo": checkpoints_schema(),
                "notes": {"type": "array"},
            })),
            hints(Effect::Changes { destructive: true, idempotent: false }),
        ),
        ToolName::Checkpoints => (
            "List what can be undone",
            format!(
                "Lists how many cells of a session undo can take back, and what each was.{}",
                switched_off(settings)
            ),
            object(json!({"session_id": session_schema(settings)}), &[]),
            result_schema(json!({
                "session_id": {"type": "string"}, "can_undo": checkpoints_schema(),
            })),
            hints(Effect::ReadsOnly),
        ),
        ToolName::Fork => (
            "Copy a live session",
            format!(
                "Copies a session with its {what} into new sessions, in milliseconds; the source \
                 goes \
                 on untouched. \
                 Not while a cell is running. Threads and connections are not copied; \
                 not_carried_over says what.",
                what = match settings.work_folder {
                    WorkFolder::Private => "variables, imports and files",
                    WorkFolder::Shared => "variables and imports (files stay shared)",
                }
            ),
            object(
                json!({
                    "session_id": session_schema(settings),
                    "count": {"type": "integer", "minimum": 1, "maximum": MOST_FORKS, "default": 1},
                    "names": {
                        "type": "array", "minItems": 1, "maxItems": MOST_FORKS,
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
            result_schema(json!({
                "forks": {"type": "array"},
                "source": {"type": "string"},
                "not_carried_over": {"type": "array"},
                "files": files_schema("copied, shared, left_alone"),
                "notes": {"type": "array"},
            })),
            hints(Effect::Changes { destructive: false, idempotent: false }),
        ),
        ToolName::Explore => (
            "Try variants side by side",
            "Runs several pieces of code at the same time, each in its own copy of the session, \
             and compares status, \
             value, output, time, memory and changed variables. The session itself is not changed \
             unless replace is \
             true."
                .to_owned(),
            object(
                json!({
                    "variants": {
                        "type": "array", "minItems": 1, "maxItems": MOST_VARIANTS,
                        "items": object(
                            json!({
                                "name": {"type": "string", "maxLength": LONGEST_VARIANT},
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
            result_schema(json!({
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
            hints(Effect::Changes { destructive: true, idempotent: false }),
        ),
        ToolName::Upload => (
            "Copy a file into a session",
            match settings.front {
                Front::Stdio => {
                    "Copies a file from the user's computer, out of a directory the user has \
                     allowed, into a session's \
                     working folder."
                }
                Front::Http => {
                    "Writes a file into a session's working folder; folders on the way are made. \
                     Large files: PUT \
                     /sessions/{session_id}/files/{relpath} with the same token."
                }
            }
            .to_owned(),
            match settings.front {
                Front::Stdio => object(
                    json!({
                        "relpath": path_schema("Where to put it, relative to the working folder."),
                        "local_path": path_schema("The file to copy; relative: below the first \
                             allowed directory."),
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath", "local_path"],
                ),
                Front::Http => object(
                    json!({
                        "relpath": path_schema("Where to put it, relative to the working folder."),
                        "text": path_schema("The content; or one of the next two."),
                        "base64": {"type": "string"},
                        "resource": {"type": "object", "description": "As in a result: text or \
                             blob."},
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath"],
                ),
            },
            transfer_schema(),
            hints(Effect::Changes { destructive: true, idempotent: true }),
        ),
        ToolName::Download => (
            "Copy a file out of a session",
            match settings.front {
                Front::Stdio => {
                    "Copies a file from a session's working folder to the user's computer, into a \
                     directory the user has \
                     allowed; never onto configuration files such as .bashrc, .git or .ssh."
                }
                Front::Http => {
                    "Returns a file of a session's working folder as a resource. Large files: GET \
                     /sessions/{session_id}/files/{relpath} with the same token."
                }
            }
            .to_owned(),
            match settings.front {
                Front::Stdio => object(
                    json!({
                        "relpath": path_schema("The file to copy, relative to the working folder."),
                        "local_path": path_schema("Where to put it; relative: below the first \
                             allowed directory."),
                        "session_id": session_schema(settings),
                        "overwrite": overwrite_schema(),
                    }),
                    &["relpath", "local_path"],
                ),
                Front::Http => object(
                    json!({
                        "relpath": path_schema("Relative to the working folder."),
                        "session_id": session_schema(settings),
                    }),
                    &["relpath", "session_id"],
                ),
            },
            transfer_schema(),
            match settings.front {
                Front::Stdio => hints(Effect::Changes { destructive: true, idempotent: true }),
                Front::Http => hints(Effect::ReadsOnly),
            },
        ),
        ToolName::List => (
            "List sessions",
            "Lists the sessions with their state, age and memory; also those that ended, with the \
             reason.".to_owned(),
            object(json!({}), &[]),
            result_schema(json!({"sessions": {
                "type": "array",
                "description": "Each: session_id, state, ended (why), executions, age_seconds, \
                                idle_seconds, memory_bytes.",
            }})),
            hints(Effect::ReadsOnly),
        ),
        ToolName::Close => (
            "Close a session",
            match settings.work_folder {
                WorkFolder::Private => {
                    "Ends a session and deletes its variables and files. Download what should be \
                     kept."
                }
                WorkFolder::Shared => "Ends a session and deletes its variables. Files in the \
                                       current folder stay.",
            }
            .to_owned(),
            object(json!({"session_id": session_schema(settings)}), &[]),
            result_schema(json!({"session_id": {"type": "string"}})),
            hints(Effect::Changes { destructive: true, idempotent: true }),
        ),
        ToolName::Register => (
            "Use another MCP server",
            "Connects to an MCP server, outside the sandbox, and makes its tools Python modules of \
             your sessions: \
             mcptools.<server>.<tool> with Params, run and run_async."
                .to_owned(),
            object(
                json!({
                    "server_name": {"type": "string"},
                    "server_params": {
                        "type": "object",
                        "description": match settings.front {
                            Front::Stdio => "As clients are configured: command, args, env, cwd; \
                                             or url, headers, type. ${VAR} is \
                                             filled from the environment.",
                            Front::Http => "As clients are configured: url, headers, type.",
                        },
                    },
                }),
                &["server_name", "server_params"],
            ),
            result_schema(json!({
                "server_name": {"type": "string"},
                "package": {"type": "string"},
                "tools": {"type": "array"},
                "notes": {"type": "array"},
            })),
            hints(Effect::Changes { destructive: false, idempotent: true }),
        ),
        ToolName::Servers => (
            "List MCP servers",
            "Lists the registered MCP servers, their state and modules.".to_owned(),
            object(json!({}), &[]),
            result_schema(json!({"servers": {"type": "array"}})),
            hints(Effect::ReadsOnly),
        ),
        ToolName::Unregister => (
            "Forget an MCP server",
            "Disconnects from a registered MCP server and removes its modules.".to_owned(),
            object(json!({"server_name": {"type": "string"}}), &["server_name"]),
            result_schema(json!({"server_name": {"type": "string"}})),
            hints(Effect::Changes { destructive: true, idempotent: true }),
        ),
    };
    // Files and lists stay here; code reaches what the operator has opened.
    let runs_code = matches!(tool, ToolName::Execute | ToolName::Explore);
    let is_open = !settings.network.is_empty() || settings.other_hosts == OtherHosts::AskedAbout;
    let reaches_out = tool == ToolName::Register || (runs_code && is_open);
    let annotations = annotations.open_world(reaches_out);
    let input = if needs_session(tool, settings.front) {
        requiring_session(input)
    } else {
        input
    };
    Tool::new(tool.as_str(), description, map(input))
        .with_title(title)
        .with_raw_output_schema(Arc::new(map(output)))
        .with_annotations(annotations)
}

/// On HTTP no session goes without saying, except for what may begin one.
fn needs_session(tool: ToolName, front: Front) -> bool {
    let begins = matches!(
        tool,
        ToolName::Execute | ToolName::Install | ToolName::Upload
    );
    let has_none = matches!(
        tool,
        ToolName::List | ToolName::Register | ToolName::Servers | ToolName::Unregister
    );
    front == Front::Http && !begins && !has_none
}

fn requiring_session(mut schema: Value) -> Value {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let others = required.into_iter().filter(|name| name != "session_id");
    schema["required"] = others.chain([json!("session_id")]).collect();
    schema
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

/// What the descriptions of undo's tools add when the operator does not want it.
fn switched_off(settings: &McpSettings) -> &'static str {
    if settings.can_undo {
        ""
    } else {
        " Switched off on this server."
    }
}

/// What a tool does to the world, as far as the protocol can say it.
enum Effect {
    ReadsOnly,
    Changes { destructive: bool, idempotent: bool },
}

/// Says only what differs from the protocol's defaults: a tool changes things, destructively, and
/// not the same twice.
fn hints(effect: Effect) -> ToolAnnotations {
    let hints = ToolAnnotations::new();
    match effect {
        Effect::ReadsOnly => hints.read_only(true),
        Effect::Changes {
            destructive,
            idempotent,
        } => {
            let hints = if destructive {
                hints
            } else {
                hints.destructive(false)
            };
            if idempotent {
                hints.idempotent(true)
            } else {
                hints
            }
        }
    }
}

fn execution_schema() -> Value {
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

fn transfer_schema() -> Value {
    result_schema(json!({
        "session_id": {"type": "string"},
        "relpath": {"type": "string"},
        "bytes": {"type": "integer"},
    }))
}

fn checkpoints_schema() -> Value {
    json!({"type": "array", "description": "Each: cells, before (its first line), age_seconds."})
}

/// What became of the files when a session was copied or brought back.
fn files_schema(states: &str) -> Value {
    json!({"type": "object", "description": format!("state ({states}), why")})
}

fn timeout_schema(settings: &McpSettings, description: &str) -> Value {
    json!({
        "type": "number", "exclusiveMinimum": 0, "maximum": settings.max_timeout.as_secs_f64(),
        "default": settings.default_timeout.as_secs_f64(), "description": description,
    })
}

/// On HTTP a gateway may route by the session without reading bodies.
fn session_schema(settings: &McpSettings) -> Value {
    match settings.front {
        Front::Stdio => json!({"type": "string", "default": SessionId::DEFAULT}),
        Front::Http => json!({"type": "string", "x-mcp-header": "Session-Id"}),
    }
}

fn path_schema(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

fn overwrite_schema() -> Value {
    json!({"type": "boolean", "default": false, "description": "Replace an existing file."})
}

/// The schema of a result. It does not say that there is nothing else: that costs a model its
/// attention and tells it nothing.
fn result_schema(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

/// The schema of arguments. That others are refused is not said thirteen times; whoever tries one
/// is told, with the nearest name.
fn object(properties: Value, required: &[&str]) -> Value {
    match required {
        [] => json!({"type": "object", "properties": properties}),
        _ => json!({"type": "object", "properties": properties, "required": required}),
    }
}

fn map(schema: Value) -> JsonObject {
    match schema {
        Value::Object(map) => map,
        _ => unreachable!("schemas are written as objects above"),
    }
}

/// A duration as people say it: `90 s`, `15 min`, `2 h`.
pub(super) struct Seconds(pub(super) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        if self.0.subsec_nanos() > 0 && seconds < 60 {
            let text = format!("{:.3}", self.0.as_secs_f64());
            write!(
                formatter,
                "{} s",
                text.trim_end_matches('0').trim_end_matches('.')
            )
        } else if seconds >= 3600 && seconds.is_multiple_of(3600) {
            write!(formatter, "{} h", seconds / 3600)
        } else if seconds >= 120 && seconds.is_multiple_of(60) {
            write!(formatter, "{} min", seconds / 60)
        } else {
            write!(formatter, "{seconds} s")
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::render::Occasion;
    use super::*;
    use crate::sandbox::Rules;
    use crate::session::{ExecutionId, Underway};

    fn catalogue() -> Catalogue {
        Catalogue::new(&McpSettings::default())
    }

    fn parse(tool: ToolName, arguments: Value) -> Result<Call, BadArgument> {
        catalogue().parse(tool, map(arguments))
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
    }

    /// Checks a value against the part of JSON Schema that this file uses. Panics on a keyword it
    /// does not know, so that no rule goes unchecked.
    pub(in crate::mcp) fn violations(schema: &Value, value: &Value, at: &str) -> Vec<String> {
        let mut found = Vec::new();
        let schema = schema.as_object().expect("a schema is an object");
        for (keyword, rule) in schema {
            let holds = match keyword.as_str() {
                "description" | "default" => true,
                "type" => match rule.as_str().expect("type is one word, never a list") {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    "number" => value.is_number(),
                    "integer" => value.is_u64() || value.is_i64(),
                    other => panic!("unknown type {other}"),
                },
                "minimum" => value
                    .as_f64()
                    .is_none_or(|number| number >= rule.as_f64().unwrap()),
                "maximum" => value
                    .as_f64()
                    .is_none_or(|number| number <= rule.as_f64().unwrap()),
                "exclusiveMinimum" => value
                    .as_f64()
                    .is_none_or(|number| number > rule.as_f64().unwrap()),
                "minLength" => value
                    .as_str()
                    .is_none_or(|text| text.chars().count() as u64 >= rule.as_u64().unwrap()),
                "maxLength" => value
                    .as_str()
                    .is_none_or(|text| text.chars().count() as u64 <= rule.as_u64().unwrap()),
                "minItems" => value
                    .as_array()
                    .is_none_or(|items| items.len() as u64 >= rule.as_u64().unwrap()),
                "maxItems" => value
                    .as_array()
                    .is_none_or(|items| items.len() as u64 <= rule.as_u64().unwrap()),
                "required" => rule
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|name| value.get(name.as_str().unwrap()).is_some()),
                "properties" => {
                    for (name, inner) in rule.as_object().unwrap() {
                        if let Some(field) = value.get(name) {
                            found.extend(violations(inner, field, &format!("{at}/{name}")));
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    let known = schema.get("properties").and_then(Value::as_object);
                    let extra = value.as_object().into_iter().flatten();
                    let mut extra = extra
                        .filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)));
                    match rule {
                        Value::Bool(false) => extra.next().is_none(),
                        inner => {
                            found.extend(extra.flat_map(|(name, field)| {
                                violations(inner, field, &format!("{at}/{name}"))
                            }));
                            true
                        }
                    }
                }
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        found.extend(violations(rule, item, &format!("{at}/{index}")));
                    }
                    true
                }
                "anyOf" => rule
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|inner| violations(inner, value, at).is_empty()),
                other => panic!("the validator does not know the keyword {other}"),
            };
            if !holds {
                found.push(format!("{at}: {keyword} {rule} does not hold for {value}"));
            }
        }
        found
    }

    /// Checks a structured result against the output schema of its tool.
    #[track_caller]
    pub(in crate::mcp) fn assert_valid_output(tool: ToolName, value: &Value) {
        let catalogue = catalogue();
        let schema = catalogue
            .get(tool)
            .output_schema
            .as_deref()
            .expect("every tool has an output schema");
        assert_eq!(
            violations(&Value::Object(schema.clone()), value, ""),
            Vec::<String>::new()
        );
        let named = schema["properties"].as_object().unwrap().keys();
        let missing: Vec<&String> = named
            .filter(|name| value.get(name.as_str()).is_none())
            .collect();
        assert_eq!(
            missing,
            Vec::<&String>::new(),
            "every field is always there"
        );
    }

    #[test]
    fn a_list_of_requirements_may_be_written_as_text() {
        let requirements =
            |written: &str| match parse(ToolName::Install, json!({"package_name": written})) {
                Ok(Call::Install { requirements, .. }) => requirements,
                other => panic!("{other:?}"),
            };
        assert_eq!(
            requirements(r#" ["tabulate", "httpx>=1"]"#),
            ["tabulate", "httpx>=1"]
        );
        assert_eq!(
            requirements("[broken"),
            ["[broken"],
            "whoever installs it says what is wrong"
        );
        check_refused(
            ToolName::Install,
            json!({"package_name": "[]"}),
            &["must be"],
        );
    }

    #[test]
    fn the_whole_list_of_tools_is_short_enough_for_a_model() {
        // 3,000 tokens: a tokenizer (o200k) makes 2,759 of the 11,791 bytes on stdio, 4.27 bytes
        // each.
        let packages = crate::environment::EnvironmentSpec::built_in()[0].packages_for_code();
        for front in [Front::Stdio, Front::Http] {
            let settings = McpSettings {
                front,
                packages: packages.clone(),
                ..McpSettings::default()
            };
            let catalogue = Catalogue::new(&settings);
            let bytes = serde_json::to_vec(catalogue.all()).unwrap().len();
            assert!(bytes < 12_500, "{bytes} bytes on {front:?}");
        }
    }

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
            asks: Vec::new(),
            others: Box::default(),
        };
        let told = super::super::render::underway(&underway, Occasion::Answer)
            .structured_content
            .unwrap();
        let catalogue = catalogue();
        let schema = catalogue
            .get(ToolName::Execute)
            .output_schema
            .as_deref()
            .unwrap();
        assert_eq!(
            violations(&Value::Object(schema.clone()), &told, ""),
            Vec::<String>::new()
        );
        assert_eq!(told["status"], "running");

        let waits_for = Some("its session is still starting".to_owned());
        let told = super::super::render::underway(
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
    fn tools_are_listed_in_one_fixed_order() {
        let names: Vec<_> = catalogue()
            .all()
            .iter()
            .map(|tool| tool.name.to_string())
            .collect();
        let expected = [
            "execute_ipython_cell",
            "check_execution",
            "install_package",
            "reset",
            "undo",
            "list_checkpoints",
            "fork_session",
            "explore",
            "upload_file",
            "download_file",
            "list_sessions",
            "close_session",
            "register_mcp_server",
            "list_mcp_servers",
            "unregister_mcp_server",
        ];
        assert_eq!(names, expected);
        for tool in ToolName::ALL {
            assert_eq!(catalogue().get(tool).name, tool.as_str());
            assert_eq!(ToolName::from_name(tool.as_str()), Some(tool));
        }
    }

    #[test]
    fn every_schema_has_an_object_root_and_no_list_of_types() {
        fn walk(value: &Value) {
            match value {
                Value::Object(map) => {
                    assert!(!map.get("type").is_some_and(Value::is_array), "{map:?}");
                    map.values().for_each(walk);
                }
                Value::Array(items) => items.iter().for_each(walk),
                _ => {}
            }
        }
        for tool in catalogue().all() {
            for schema in [&tool.input_schema, tool.output_schema.as_ref().unwrap()] {
                assert_eq!(schema["type"], "object");
                walk(&Value::Object(schema.as_ref().clone()));
            }
            assert!(
                tool.title.is_some() && tool.description.is_some() && tool.annotations.is_some()
            );
        }
    }

    #[test]
    fn only_listing_is_read_only_and_only_code_and_registration_reach_out() {
        let listed = Rules::parse(&["example.com"]).unwrap();
        for (network, other_hosts, is_open) in [
            (Rules::none(), OtherHosts::Closed, false),
            (listed, OtherHosts::Closed, true),
            (Rules::none(), OtherHosts::AskedAbout, true),
        ] {
            let settings = McpSettings {
                network,
                other_hosts,
                ..McpSettings::default()
            };
            for tool in ToolName::ALL {
                let annotations = describe(tool, &settings).annotations.unwrap();
                let runs_code = matches!(tool, ToolName::Execute | ToolName::Explore);
                let reaches_out = tool == ToolName::Register || (runs_code && is_open);
                assert_eq!(annotations.open_world_hint, Some(reaches_out));
                let lists = matches!(
                    tool,
                    ToolName::List | ToolName::Checkpoints | ToolName::Servers
                );
                assert_eq!(annotations.read_only_hint, lists.then_some(true));
            }
        }
    }

    #[test]
    fn the_network_is_described_as_it_is() {
        let described = |network| {
            let settings = McpSettings {
                network,
                ..McpSettings::default()
            };
            describe(ToolName::Execute, &settings)
                .description
                .unwrap_or_default()
                .into_owned()
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
            describe(ToolName::Execute, &settings)
                .description
                .unwrap_or_default()
                .into_owned()
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
    fn a_shared_working_folder_is_described_as_one() {
        let described = |work_folder| {
            let settings = McpSettings {
                work_folder,
                ..McpSettings::default()
            };
            ToolName::ALL
                .map(|tool| {
                    describe(tool, &settings)
                        .description
                        .unwrap_or_default()
                        .into_owned()
                })
                .join("\n")
        };
        let (private, shared) = (
            described(WorkFolder::Private),
            described(WorkFolder::Shared),
        );
        assert!(
            private.contains("private to the session")
                && private.contains("deletes its variables and files")
        );
        assert!(
            shared.contains("all sessions share it and its files stay")
                && shared.contains("Files in the current folder stay")
        );
        assert!(!shared.contains("private to the session"));
        assert!(
            private.contains("variables and files. Also after")
                && private.contains("imports and files into")
        );
        assert!(
            shared.contains("files if the folder is small enough")
                && shared.contains("files stay shared")
        );
    }

    #[test]
    fn a_server_that_cannot_undo_says_so() {
        let described = |can_undo| {
            let settings = McpSettings {
                can_undo,
                ..McpSettings::default()
            };
            [ToolName::Execute, ToolName::Undo, ToolName::Checkpoints].map(|tool| {
                describe(tool, &settings)
                    .description
                    .unwrap_or_default()
                    .into_owned()
            })
        };
        for (tool, words) in described(true).iter().zip(["see undo", "brings", "lists"]) {
            assert!(
                tool.to_lowercase().contains(words) && !tool.contains("Switched off"),
                "{tool}"
            );
        }
        let [execute, undo, checkpoints] = described(false);
        assert!(!execute.contains("undo"));
        assert!(undo.contains("Switched off") && checkpoints.contains("Switched off"));
    }

    #[test]
    fn the_description_names_the_configured_idle_time() {
        let settings = McpSettings {
            idle_timeout: Duration::from_secs(5400),
            ..McpSettings::default()
        };
        let text = Catalogue::new(&settings)
            .get(ToolName::Execute)
            .description
            .clone()
            .unwrap();
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
            Catalogue::new(&settings)
                .get(ToolName::Execute)
                .description
                .clone()
                .unwrap()
                .to_string()
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
            parse(ToolName::Execute, json!({"code": ""})).unwrap(),
            Call::Execute {
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
            parse(ToolName::Execute, arguments).unwrap(),
            Call::Execute {
                session: "a.b-c".parse().unwrap(),
                code: "1".to_owned(),
                timeout: Duration::from_millis(500),
                max_output_chars: 7,
                rules: Some(Rules::parse(&["a.test"]).unwrap()),
            }
        );
        let arguments =
            json!({"relpath": "a/b", "local_path": "c", "session_id": "s", "overwrite": true});
        assert_eq!(
            parse(ToolName::Upload, arguments).unwrap(),
            Call::Upload {
                session: "s".parse().unwrap(),
                relpath: "a/b".parse().unwrap(),
                source: Source::Local("c".to_owned()),
                overwrite: true
            }
        );
    }

    #[test]
    fn a_misspelt_argument_is_answered_with_the_nearest_name() {
        check_refused(
            ToolName::Execute,
            json!({"code": "1", "time_out": 3}),
            &["\"time_out\"", "\"timeout\"?"],
        );
        check_refused(
            ToolName::Execute,
            json!({"code": "1", "sessionId": "a"}),
            &["\"sessionId\"", "\"session_id\"?"],
        );
        check_refused(
            ToolName::List,
            json!({"x": 1}),
            &["\"x\"", "takes no arguments"],
        );
    }

    #[test]
    fn an_argument_unlike_any_other_is_answered_with_the_list() {
        check_refused(
            ToolName::Execute,
            json!({"code": "1", "zzz": 3}),
            &[
                "\"zzz\"",
                "It takes: allowed_domains, code, max_output_chars",
            ],
        );
    }

    #[test]
    fn missing_code_is_named() {
        check_refused(
            ToolName::Execute,
            json!({}),
            &["needs the argument \"code\""],
        );
    }

    #[test]
    fn wrong_types_are_named_with_what_was_given() {
        check_refused(
            ToolName::Execute,
            json!({"code": 5}),
            &["\"code\"", "but it was 5"],
        );
        check_refused(
            ToolName::Execute,
            json!({"code": "1", "timeout": "9"}),
            &["\"timeout\"", "the string \"9\""],
        );
        check_refused(
            ToolName::Execute,
            json!({"code": "1", "session_id": null}),
            &["\"session_id\"", "null", "default"],
        );
        check_refused(
            ToolName::Execute,
            json!({"code": ["a"]}),
            &["\"code\"", "a list"],
        );
        let arguments = json!({"relpath": "a", "local_path": "b", "overwrite": "yes"});
        check_refused(
            ToolName::Download,
            arguments,
            &["\"overwrite\"", "true or false"],
        );
    }

    #[test]
    fn numbers_out_of_range_are_refused_and_the_bounds_themselves_are_not() {
        for timeout in [json!(0), json!(-1), json!(3_600.5), json!(1e300)] {
            check_refused(
                ToolName::Execute,
                json!({"code": "1", "timeout": timeout}),
                &["\"timeout\"", "at most 3600"],
            );
        }
        for chars in [json!(0), json!(-5), json!(1.5), json!(1_000_001)] {
            let arguments = json!({"code": "1", "max_output_chars": chars});
            check_refused(
                ToolName::Execute,
                arguments,
                &["\"max_output_chars\"", "1 to 1000000"],
            );
        }
        for (timeout, chars) in [(3_600, 1), (1, 1_000_000)] {
            parse(
                ToolName::Execute,
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
            catalogue.parse(
                ToolName::Execute,
                map(json!({"code": "1", "timeout": timeout})),
            )
        };
        parse(10).unwrap();
        assert!(parse(11).unwrap_err().to_string().contains("at most 10"));
        assert_eq!(
            properties(catalogue.get(ToolName::Execute))["timeout"]["maximum"],
            json!(10.0)
        );
    }

    #[test]
    fn code_over_four_mebibytes_is_refused_and_exactly_that_is_not() {
        parse(ToolName::Execute, json!({"code": "a".repeat(LARGEST_CODE)})).unwrap();
        check_refused(
            ToolName::Execute,
            json!({"code": "a".repeat(LARGEST_CODE + 1)}),
            &["4194305 bytes"],
        );
    }

    #[test]
    fn bad_names_of_sessions_and_paths_are_refused() {
        check_refused(
            ToolName::Reset,
            json!({"session_id": "a/b"}),
            &["\"session_id\"", "\"a/b\""],
        );
        check_refused(
            ToolName::Reset,
            json!({"session_id": ".."}),
            &["\"session_id\""],
        );
        check_refused(
            ToolName::Upload,
            json!({"relpath": "../a", "local_path": "b"}),
            &["\"relpath\"", "\"../a\""],
        );
        check_refused(
            ToolName::Upload,
            json!({"relpath": "a", "local_path": ""}),
            &["\"local_path\"", "0 bytes"],
        );
    }

    #[test]
    fn a_long_refused_value_is_not_sent_back_whole() {
        let text = parse(ToolName::Reset, json!({"session_id": "x".repeat(100_000)}))
            .unwrap_err()
            .to_string();
        assert!(text.len() < 400, "{} bytes", text.len());
    }

    #[test]
    fn whatever_the_parser_takes_the_schema_takes_too() {
        let samples = [
            (
                ToolName::Execute,
                json!({"code": "", "session_id": "a", "timeout": 0.001, "max_output_chars": 1}),
            ),
            (
                ToolName::Execute,
                json!({"code": "x", "timeout": 3_600, "max_output_chars": 1_000_000}),
            ),
            (ToolName::Reset, json!({"session_id": "a".repeat(64)})),
            (ToolName::Undo, json!({"session_id": "a", "cells": 100})),
            (ToolName::Checkpoints, json!({"session_id": "a"})),
            (ToolName::Fork, json!({"count": 16})),
            (ToolName::Fork, json!({"count": 2, "names": ["a", "b"]})),
            (
                ToolName::Explore,
                json!({"variants": [{"name": "a".repeat(40), "code": ""}], "timeout": 3_600}),
            ),
            (
                ToolName::Explore,
                json!({
                    "variants": [{"name": "a", "code": "1"}],
                    "keep": "best", "best_by": "x", "replace": true,
                }),
            ),
            (
                ToolName::Download,
                json!({"relpath": "a", "local_path": "b", "overwrite": true}),
            ),
            (ToolName::List, json!({})),
        ];
        for (tool, arguments) in samples {
            let schema = Value::Object(catalogue().get(tool).input_schema.as_ref().clone());
            assert_eq!(violations(&schema, &arguments, ""), Vec::<String>::new());
            parse(tool, arguments).unwrap();
        }
    }

    #[test]
    fn the_validator_of_these_tests_finds_violations() {
        let schema = Value::Object(
            catalogue()
                .get(ToolName::Execute)
                .input_schema
                .as_ref()
                .clone(),
        );
        for arguments in [
            json!({}),
            json!({"code": 1}),
            json!({"code": "", "timeout": 0}),
        ] {
            assert!(
                !violations(&schema, &arguments, "").is_empty(),
                "{arguments}"
            );
        }
        let schema = Value::Object(
            catalogue()
                .get(ToolName::Explore)
                .input_schema
                .as_ref()
                .clone(),
        );
        let variant = |name: &str| json!({"name": name, "code": ""});
        for variants in [
            json!([]),
            json!(vec![variant("a"); 17]),
            json!([{"name": "a"}]),
            json!([variant(&"a".repeat(41))]),
        ] {
            assert!(
                !violations(&schema, &json!({"variants": variants}), "").is_empty(),
                "{variants}"
            );
        }
    }

    #[test]
    fn durations_read_as_people_say_them() {
        for (duration, text) in [
            (Duration::from_millis(1500), "1.5 s"),
            (Duration::from_secs(90), "90 s"),
            (Duration::from_secs(120), "2 min"),
            (Duration::from_secs(5400), "90 min"),
            (Duration::from_secs(7200), "2 h"),
        ] {
            assert_eq!(Seconds(duration).to_string(), text);
        }
    }
}
