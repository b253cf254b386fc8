//! Cells as tasks, for clients that know the extension.
//!
//! A task is an execution that goes on, and its id is the execution's handle: unguessable, bound to
//! its owner, and known to whoever keeps the sessions. So nothing is kept here, and tasks outlive
//! this process with their sessions.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, SecondsFormat, Utc};
use rmcp::RoleServer;
use rmcp::model::{
    CallToolResponse, CreateTaskResult, DetailedTask, ErrorData, GetTaskResult, InputResponses,
    JsonObject, ProtocolVersion, Task, TaskPayload, TaskStatus,
};
use rmcp::service::RequestContext;
use serde_json::{Value, json};

use super::asking::{ElicitationMode, all_decisions, input_requests};
use super::render::Occasion;
use super::{Server, render};
use crate::ops::{self, HostExt};
use crate::session::{
    ExecutionHandle, ExecutionRef, ExecutionReport, Principal, Refused, Status, Underway,
};

/// How long a call waits before it becomes a task. Most cells are over by then, and a plain result
/// is one message.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// How often a client should look.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Tells whether a caller can be answered with a task: the request itself says so, and in the
/// revision that has them.
pub(super) fn are_known_to(context: &RequestContext<RoleServer>) -> bool {
    let is_modern = context
        .protocol_version()
        .is_some_and(|version| version.as_str() >= ProtocolVersion::V_2026_07_28.as_str());
    is_modern
        && context
            .client_capabilities()
            .is_some_and(|capabilities| capabilities.supports_tasks())
}

/// Answers a call with the task that it has become.
pub(super) fn created(underway: &Underway) -> CallToolResponse {
    CallToolResponse::Task(CreateTaskResult::new(task(
        &underway.handle,
        TaskStatus::Working,
        Some(underway),
    )))
}

impl Server {
    /// Tells how a task goes on.
    pub(super) async fn task(
        &self,
        owner: &Principal,
        id: &str,
        context: &RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        let handle = known(id)?;
        let which = ExecutionRef::Handle(handle.clone());
        let max_chars = self.shared.most_compared_chars;
        let checked = self.check_now(owner, which.clone(), max_chars).await;
        let (underway, payload) = match checked {
            Ok(ExecutionReport::Underway(underway))
                if ElicitationMode::of(context) != ElicitationMode::Nobody
                    && !underway.approvals.is_empty() =>
            {
                let input_requests = input_requests(&underway.session, &underway.approvals);
                (
                    Some(underway),
                    TaskPayload::InputRequired { input_requests },
                )
            }
            Ok(ExecutionReport::Underway(underway)) => (Some(underway), TaskPayload::Working),
            Ok(ExecutionReport::Finished { outcome, .. })
                if matches!(outcome.status, Status::Cancelled { .. }) =>
            {
                (None, TaskPayload::Cancelled)
            }
            Ok(ExecutionReport::Finished {
                session, outcome, ..
            }) => {
                let mut result = self.told(owner, &session, &outcome, Occasion::Answer).await;
                // Nobody gave it this name, and the call that became a task could not tell it.
                if session.looks_generated() {
                    result = render::naming(&session, result);
                }
                let result = match json!(result) {
                    Value::Object(result) => result,
                    _ => JsonObject::new(),
                };
                (None, TaskPayload::Completed { result })
            }
            Err(Refused::CancelledWhileWaiting) => (None, TaskPayload::Cancelled),
            Ok(ExecutionReport::Nothing) | Err(_) => return Err(unknown()),
        };
        let task = task(&handle, payload.status(), underway.as_ref());
        Ok(GetTaskResult::new(DetailedTask::new(task, payload)))
    }

    /// Answers what a task has to ask. Answers to what is not asked any more do nothing.
    pub(super) async fn answer_task(
        &self,
        owner: &Principal,
        id: &str,
        responses: &InputResponses,
    ) -> Result<(), ErrorData> {
        let decided = self
            .shared
            .sessions
            .run(
                owner,
                ops::Decide {
                    execution: known(id)?,
                    decisions: all_decisions(responses),
                    asked_by: "task".to_owned(),
                },
            )
            .await;
        decided.map(drop).map_err(|_| unknown())
    }

    /// Interrupts a task. It ends by itself soon after.
    pub(super) async fn stop_task(&self, owner: &Principal, id: &str) -> Result<(), ErrorData> {
        let which = ExecutionRef::Handle(known(id)?);
        self.shared
            .sessions
            .run(
                owner,
                ops::Interrupt {
                    execution: which.clone(),
                },
            )
            .await
            .map_err(|_| unknown())
    }
}

fn task(handle: &ExecutionHandle, status: TaskStatus, underway: Option<&Underway>) -> Task {
    let now = SystemTime::now();
    let created = underway
        .and_then(|underway| now.checked_sub(underway.elapsed))
        .unwrap_or(now);
    let task = Task::new(handle.as_str(), status, stamp(created), stamp(now))
        .with_poll_interval_ms(POLL_INTERVAL.as_millis() as u64);
    let latest = underway.and_then(|underway| {
        let printed = underway
            .text
            .lines()
            .next_back()
            .filter(|line| !line.is_empty());
        printed.or(underway.waits_for.as_deref())
    });
    match latest {
        Some(line) => task.with_status_message(line.chars().take(200).collect::<String>()),
        None => task,
    }
}

fn stamp(time: SystemTime) -> String {
    DateTime::<Utc>::from(time).to_rfc3339_opts(SecondsFormat::Millis, true)
}

fn known(id: &str) -> Result<ExecutionHandle, ErrorData> {
    id.parse().map_err(|_| unknown())
}

/// The same words whether a task never was, is forgotten, or is somebody else's.
fn unknown() -> ErrorData {
    ErrorData::invalid_params("there is no such task", None)
}
