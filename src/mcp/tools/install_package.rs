//! The tool `install_package`.
//!
//! An installation may need a person's permission. The session refuses it with the question; the
//! question is shown, and the installation is asked for again with the answer.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock};
use rmcp::service::RequestContext;
use serde_json::{Value, json};

use super::schema::{Description, Reach, ToolEffect, object, result_schema, session_schema};
use super::{Arguments, SessionArgument, ToolDefinition};
use crate::auth::Scope;
use crate::mcp::arguments::{BadArgument, Given, shown, wrong};
use crate::mcp::asking::ElicitationMode;
use crate::mcp::calls::with_progress;
use crate::mcp::jobs::{Job, JobKind};
use crate::mcp::progress::Reporter;
use crate::mcp::render::finished;
use crate::mcp::toolbox::{Entry, ToolContext};
use crate::mcp::turns::Extent;
use crate::mcp::{McpSettings, Server, render, wire};
use crate::ops::{self, HostExt, Io};
use crate::session::install::{InstallApproval, InstallReport};
use crate::session::{ApprovalRequest, Decision, Principal, ProgressChannel, Refused, SessionId};

/// How long an installation takes at most, as far as its progress is told.
const INSTALL_TIME: Duration = Duration::from_secs(300);

pub(super) struct InstallTool;

#[derive(Debug, PartialEq)]
pub(super) struct InstallCall {
    session: SessionId,
    requirements: Vec<String>,
}

impl ToolDefinition for InstallTool {
    type Call = InstallCall;

    const ENTRY: Entry = Entry {
        name: "install_package",
        scope: Scope::Install,
        extent: Extent::FirstStep,
    };
    const SESSION: SessionArgument = SessionArgument::MayBegin;

    fn describe(settings: &McpSettings) -> Description {
        Description {
            title: "Install packages",
            text: format!(
                "Installs Python packages into a session, also when it has no network; they are \
                 there at once and stay after a reset. `!pip install` in a cell does the \
                 same.{off}",
                off = if settings.can_install {
                    ""
                } else {
                    " Switched off on this server."
                },
            ),
            input: object(
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
            output: result_schema(json!({
                "session_id": {"type": "string"},
                "text": {"type": "string"},
                "reset_needed_for": {"type": "array"},
            })),
            effect: ToolEffect::Changes {
                destructive: false,
                idempotent: true,
            },
            reach: Reach::Nothing,
        }
    }

    fn parse(arguments: &mut Arguments<'_>) -> Result<InstallCall, BadArgument> {
        Ok(InstallCall {
            session: arguments.session(),
            requirements: requirements(arguments.take("package_name"))?,
        })
    }

    async fn run(call: InstallCall, tool_context: ToolContext<'_>) -> CallToolResponse {
        let ToolContext {
            server,
            owner,
            context,
        } = tool_context;
        server
            .install(owner, call.session, call.requirements, None, context)
            .await
    }
}

/// Reads one requirement or a list of them, also one written as text. What they may say is checked
/// by whoever installs them.
pub(in crate::mcp) fn requirements(given: Given) -> Result<Vec<String>, BadArgument> {
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

impl Server {
    /// Installs packages. `answer` is a person's, when they were asked before.
    pub(in crate::mcp) async fn install(
        &self,
        owner: &Principal,
        session: SessionId,
        requirements: Vec<String>,
        answer: Option<Decision>,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let mut approval = InstallApproval {
            asking: ElicitationMode::of(context).asking(),
            answer,
        };
        loop {
            let question = Question::default();
            let done = self
                .install_or_ask(owner, &session, &requirements, approval, &question, context)
                .await;
            let asked = question
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let Some(asked) = asked else {
                return done.into();
            };
            approval = match self
                .ask_to_install(&session, &requirements, asked, context)
                .await
            {
                Ok(approval) => approval,
                Err(response) => return response,
            };
        }
    }

    async fn install_or_ask(
        &self,
        owner: &Principal,
        session: &SessionId,
        requirements: &[String],
        approval: InstallApproval,
        question: &Question,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let requirements = requirements.to_vec();
        let session = session.clone();
        let question = question.clone();
        let sessions = Arc::clone(&self.shared.sessions);
        let news = ProgressChannel::default();
        let reporter = Reporter::new(sessions.preparation(), INSTALL_TIME, &news);
        let (whose, which, told) = (owner.clone(), session.clone(), news.clone());
        let job = Job::begin(JobKind::Installation, &news, |cancel| async move {
            let done = sessions
                .run_with(
                    &whose,
                    ops::Install {
                        session: which.clone(),
                        requirements,
                        approval,
                    },
                    Io {
                        cancel,
                        progress: told,
                        ..Io::default()
                    },
                )
                .await;
            installed_or_asked(&which, done, &question)
        })
        .await;
        self.wait_for_job(owner, session, job, reporter, context)
            .await
    }

    /// Installs packages and waits for the end of it.
    pub(in crate::mcp) async fn install_to_end(
        &self,
        owner: &Principal,
        session: &SessionId,
        requirements: Vec<String>,
        context: &RequestContext<RoleServer>,
    ) -> Result<InstallReport, Refused> {
        let sessions = &self.shared.sessions;
        let mut approval = InstallApproval {
            asking: ElicitationMode::of(context).asking_meanwhile(),
            answer: None,
        };
        loop {
            let news = ProgressChannel::default();
            let reporter = Reporter::new(sessions.preparation(), INSTALL_TIME, &news);
            let work = sessions.run_with(
                owner,
                ops::Install {
                    session: session.clone(),
                    requirements: requirements.clone(),
                    approval,
                },
                Io {
                    cancel: context.ct.clone(),
                    progress: news,
                    ..Io::default()
                },
            );
            let asked = match with_progress(work, reporter, context).await {
                Err(Refused::ApprovalNeeded { asked, .. }) => asked,
                done => return done,
            };
            approval = match self
                .ask_to_install(session, &requirements, *asked, context)
                .await
            {
                Ok(approval) => approval,
                Err(_) => return Err(Refused::CancelledWhileWaiting),
            };
        }
    }
}

/// Where an installation puts its question, since its work runs in a task of its own.
type Question = Arc<Mutex<Option<ApprovalRequest>>>;

/// Renders what came of an installation, unless it has to be asked about.
fn installed_or_asked(
    session: &SessionId,
    done: Result<InstallReport, Refused>,
    question: &Question,
) -> CallToolResult {
    match done {
        Ok(report) => installed(session, &report),
        Err(refused) => {
            let result = render::refused(&refused);
            if let Refused::ApprovalNeeded { asked, .. } = refused {
                *question.lock().unwrap_or_else(PoisonError::into_inner) = Some(*asked);
            }
            result
        }
    }
}

/// Renders an installation.
fn installed(session: &SessionId, report: &InstallReport) -> CallToolResult {
    let mut lines = vec![report.text.trim_end().to_owned()];
    let needs_reset = |module: &&String| !report.preloaded.contains(module);
    let imported = report
        .loaded
        .iter()
        .filter(needs_reset)
        .map(String::as_str)
        .collect::<Vec<_>>();
    if !imported.is_empty() {
        lines.push(format!(
            "Imported before, from elsewhere: {}. After a reset the new version is used; a new \
             process (`!python`) uses \
             it now.",
            imported.join(", ")
        ));
    }
    if !report.preloaded.is_empty() {
        let verb = if report.preloaded.len() == 1 {
            "is"
        } else {
            "are"
        };
        lines.push(format!(
            "{} {verb} preloaded here; a reset does not change that. Only a new process \
             (`!python`) uses the new \
             version; for the session itself the server needs an environment that has it.",
            report.preloaded.join(", ")
        ));
    }
    let text = lines.join("\n");
    let structured = json!({
        "session_id": session.as_str(),
        "text": text,
        "reset_needed_for": imported,
    });
    finished(vec![ContentBlock::text(text)], structured, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::tests::{check_refused, parse, parts};

    #[test]
    fn a_list_of_requirements_may_be_written_as_text() {
        let requirements = |written: &str| {
            parse::<InstallTool>(json!({"package_name": written}))
                .unwrap()
                .requirements
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
        check_refused::<InstallTool>(json!({"package_name": "[]"}), &["must be"]);
    }

    #[test]
    fn an_installation_says_for_which_modules_a_reset_helps() {
        let told = |loaded: &[&str], preloaded: &[&str]| {
            let texts = |names: &[&str]| {
                names
                    .iter()
                    .map(|name| (*name).to_owned())
                    .collect::<Vec<_>>()
            };
            let text = "Successfully installed numpy-1.26.4\n".to_owned();
            let report = InstallReport {
                text,
                loaded: texts(loaded),
                preloaded: texts(preloaded),
                ruling: None,
            };
            parts::<InstallTool>(installed(&"s".parse().unwrap(), &report))
        };
        let (text, structured) = told(&["numpy", "yaml"], &["numpy"]);
        assert!(
            text.contains("\nnumpy is preloaded here; a reset does not change that."),
            "{text}"
        );
        assert!(
            text.contains("\nImported before, from elsewhere: yaml. After a reset"),
            "{text}"
        );
        assert_eq!(structured["reset_needed_for"], json!(["yaml"]));
        let (text, structured) = told(&["numpy"], &["numpy"]);
        assert!(!text.contains("After a reset"), "{text}");
        assert_eq!(structured["reset_needed_for"], json!([]));
        assert_eq!(told(&[], &[]).0, "Successfully installed numpy-1.26.4");
    }
}
