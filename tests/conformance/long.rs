//! Tools whose work goes on as a task when the client allows it.

use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CreateTaskResult, ErrorData,
};
use rmcp::service::RequestContext;
use rmcp::task_manager::{TaskContext, TaskExit, TaskFuture, TaskManager, TaskOptions};
use serde_json::json;

use super::catalogue;
use super::fixture::{from_json, is_modern, missing};
use super::questions::form_of_one;

/// The tool that asks first and becomes a task afterwards.
pub(super) const AFTER_QUESTIONS: &str = "test_tool_with_task";

/// How often clients are told to look; the suite waits that long between two looks.
const LOOK_EVERY_MS: u64 = 100;

/// Begins the task of a tool that has one; returns nothing for all other tools.
pub(super) async fn call(
    tasks: &TaskManager,
    request: &CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Option<Result<CallToolResponse, ErrorData>> {
    let seconds = request
        .arguments
        .as_ref()
        .and_then(|all| all.get("seconds")?.as_f64())
        .unwrap_or_default();
    let lasting = Duration::from_secs_f64(seconds.max(0.0));
    let operation: fn(TaskContext) -> TaskFuture = match &*request.name {
        "slow_compute" if !allows_tasks(context) => {
            tokio::time::sleep(lasting).await;
            return Some(Ok(catalogue::text("computed while you waited").into()));
        }
        "slow_compute" => {
            return Some(Ok(begin(tasks, move |task| {
                Box::pin(compute(task, lasting))
            })));
        }
        "failing_job" => |_| {
            Box::pin(async {
                Ok(CallToolResult::error(
                    catalogue::text("the job failed").content,
                ))
            })
        },
        "protocol_error_job" => {
            |_| Box::pin(async { Err(ErrorData::internal_error("the job broke", None).into()) })
        }
        "confirm_delete" => |task| Box::pin(ask_once(task)),
        "multi_input" => |task| Box::pin(ask_twice(task)),
        _ => return None,
    };
    Some(match allows_tasks(context) {
        true => Ok(begin(tasks, operation)),
        false => Err(missing(
            json!({"extensions": {"io.modelcontextprotocol/tasks": {}}}),
        )),
    })
}

/// Goes on as a task with what was answered.
pub(super) fn after_questions(
    tasks: &TaskManager,
    answered: String,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    match allows_tasks(context) {
        true => Ok(begin(tasks, |_| {
            Box::pin(async move { Ok(catalogue::text(&answered)) })
        })),
        false => Err(missing(
            json!({"extensions": {"io.modelcontextprotocol/tasks": {}}}),
        )),
    }
}

fn allows_tasks(context: &RequestContext<RoleServer>) -> bool {
    is_modern(context)
        && context
            .client_capabilities()
            .is_some_and(|declared| declared.supports_tasks())
}

fn begin(
    tasks: &TaskManager,
    operation: impl FnOnce(TaskContext) -> TaskFuture,
) -> CallToolResponse {
    let options = TaskOptions::new().with_poll_interval_ms(LOOK_EVERY_MS);
    CreateTaskResult::new(tasks.spawn(options, operation)).into()
}

async fn compute(task: TaskContext, lasting: Duration) -> Result<CallToolResult, TaskExit> {
    tokio::select! {
        () = tokio::time::sleep(lasting) => Ok(catalogue::text("computed in the background")),
        () = task.cancelled() => Err(TaskExit::Cancelled),
    }
}

async fn ask_once(task: TaskContext) -> Result<CallToolResult, TaskExit> {
    let question = form_of_one("Shall the file be deleted?", "confirm", "boolean");
    let answer = task.request_input("confirm", from_json(question)).await?;
    Ok(catalogue::text(&format!("the client answered {answer}")))
}

async fn ask_twice(task: TaskContext) -> Result<CallToolResult, TaskExit> {
    let (first, second) = tokio::try_join!(
        task.request_input(
            "first",
            from_json(form_of_one("Who are you?", "name", "string"))
        ),
        task.request_input(
            "second",
            from_json(form_of_one("Who else is there?", "name", "string"))
        ),
    )?;
    Ok(catalogue::text(&format!(
        "the client answered {first} and {second}"
    )))
}
