//! Running and following code: calls that wait for an execution to its end or for a limited time,
//! or return to it later.
//!
//! An execution belongs to its session, not to the call that started it. A call only follows it, so
//! a call can end, be dropped or be repeated without affecting the code. A cancelled token and
//! `stop` are the two ways to interrupt it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::driver::{DriverCommand, SessionJob};
use super::executions::{Collected, ExecutionResult, ExecutionStage, RegisteredExecution};
use super::history::first_line;
use super::manager::{DriverHandle, SubmitError};
use super::output::OutputDelta;
use super::{
    ExecuteRequest, ExecutionId, ExecutionRef, ExecutionReport, MAX_CODE_BYTES, Outcome, Principal,
    ProgressChannel, Refused, SessionId, SessionState, Sessions, Underway, most_undone,
};
use crate::sandbox::Preparation;

/// Quiet period after an approval request. Requests of several threads or tasks are then shown
/// together.
const BATCH_DELAY: Duration = Duration::from_millis(50);
/// Upper bound of that delay: the first request is shown after this time, even if more keep
/// arriving.
const MAX_BATCH_TIME: Duration = Duration::from_millis(500);

impl Sessions {
    /// Runs code to its end, and creates the session if its id is new. A cancelled token interrupts
    /// the code.
    ///
    /// Dropping the future does not stop the code.
    pub async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        let (entry, execution) = self.submit_code(owner, id, request, &cancel)?;
        let _waits_for_it = execution.follow();
        let ending = to_the_end(&entry, &execution, &cancel).await;
        answer_at_once(&entry, &execution, &ending)
    }

    /// Runs code like `execute`, but waits for at most `wait`, or until an approval is requested;
    /// the code continues after that. `progress` receives the latest line of output.
    pub async fn begin(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        cancel: CancellationToken,
        progress: ProgressChannel,
    ) -> Result<ExecutionReport, Refused> {
        let max_chars = request.max_output_chars;
        let (entry, execution) = self.submit_code(owner, id, request, &cancel)?;
        let _waits_for_it = execution.follow();
        match ended(&entry, &execution, wait, Some(&cancel), &progress).await {
            Some(ending) => {
                let outcome = answer_at_once(&entry, &execution, &ending)?;
                Ok(ExecutionReport::Finished {
                    session: id.clone(),
                    outcome: self.told(owner, id, outcome),
                    again: false,
                })
            }
            None => Ok(ExecutionReport::Underway(
                self.underway(id, &entry, &execution, max_chars).await,
            )),
        }
    }

    /// Returns the status of an execution after `wait`, when it has ended, or when an approval is
    /// requested. An execution that ended without having run is a refusal.
    pub async fn check(
        &self,
        owner: &Principal,
        which: &ExecutionRef,
        wait: Duration,
        max_chars: usize,
        progress: ProgressChannel,
    ) -> Result<ExecutionReport, Refused> {
        let (id, entry) = self.locate(owner, which)?;
        let execution = match which {
            ExecutionRef::InSession(_) => entry.shared.registry.first(),
            ExecutionRef::Handle(handle) => entry.shared.registry.find(handle),
        };
        let Some(execution) = execution else {
            return Ok(ExecutionReport::Nothing);
        };
        entry.shared.touch();
        let _waits_for_it = execution.follow();
        let Some(ending) = ended(&entry, &execution, Some(wait), None, &progress).await else {
            return Ok(ExecutionReport::Underway(
                self.underway(&id, &entry, &execution, max_chars).await,
            ));
        };
        let Collected { ending, again } = entry.shared.registry.collect(&execution, &ending);
        let outcome = self.told(owner, &id, ending?);
        Ok(ExecutionReport::Finished {
            session: id,
            outcome,
            again,
        })
    }

    /// Adds values to an outcome that are only known when it is reported. A session that was closed
    /// in the meantime has nothing to undo.
    fn told(&self, owner: &Principal, id: &SessionId, outcome: Outcome) -> Box<Outcome> {
        let can_undo = self
            .checkpoints(owner, id)
            .map_or(0, |left| most_undone(&left));
        Box::new(Outcome {
            can_undo,
            ..outcome
        })
    }

    /// Interrupts a running execution, or removes it from the queue. An execution that has ended is
    /// not affected.
    pub async fn stop(&self, owner: &Principal, which: &ExecutionRef) -> Result<(), Refused> {
        let (_, entry) = self.locate(owner, which)?;
        let execution = match which {
            ExecutionRef::InSession(_) => entry.shared.registry.first_in_progress(),
            ExecutionRef::Handle(handle) => entry.shared.registry.find(handle),
        };
        if let Some(execution) = execution {
            // A driver that is gone has already ended it.
            let _ = entry
                .commands
                .send(DriverCommand::Cancel(execution.request))
                .await;
        }
        Ok(())
    }

    fn submit_code(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        cancel: &CancellationToken,
    ) -> Result<(DriverHandle, Arc<RegisteredExecution>), Refused> {
        if request.code.len() > MAX_CODE_BYTES {
            return Err(Refused::CodeTooLarge {
                size: request.code.len(),
            });
        }
        if cancel.is_cancelled() {
            return Err(Refused::CancelledWhileWaiting);
        }
        self.check_cell(owner)?;
        let entry = self.find_or_create(owner, id)?;
        self.count_cell(owner)?;
        let execution = self
            .enter(&entry, request)
            .map_err(|error| self.explained(owner, id, error))?;
        Ok((entry, execution))
    }

    /// Describes an execution in progress, with its output since the last description.
    async fn underway(
        &self,
        id: &SessionId,
        entry: &DriverHandle,
        execution: &RegisteredExecution,
        max_chars: usize,
    ) -> Underway {
        let (reply, answer) = oneshot::channel();
        let look = DriverCommand::ReadNewOutput {
            request: execution.request,
            max_chars,
            reply,
        };
        let delta = match entry.commands.send(look).await {
            Ok(()) => answer.await.ok().flatten().unwrap_or_default(),
            Err(_) => OutputDelta::default(),
        };
        let mut waits_for = None;
        let (ahead, since) = match execution.stage() {
            ExecutionStage::Waiting { ahead, held } => {
                let is_starting = entry.shared.facts().state == SessionState::Starting;
                let preparation = self.preparation();
                waits_for = waiting_reason(ahead, held, is_starting, &preparation.borrow());
                (ahead, execution.entered)
            }
            ExecutionStage::Running { since } => (0, since),
            ExecutionStage::Ended(_) => (0, execution.entered),
        };
        Underway {
            handle: execution.handle.clone(),
            session: id.clone(),
            execution: ExecutionId(execution.request),
            first_line: execution.first_line.clone(),
            ahead,
            waits_for,
            elapsed: since.elapsed(),
            text: delta.text,
            omitted: delta.omitted,
            approvals: execution.approvals().borrow().clone(),
            others: Box::new(entry.shared.registry.others(execution)),
        }
    }

    /// Registers code in a session's registry and submits it.
    fn enter(
        &self,
        entry: &DriverHandle,
        request: ExecuteRequest,
    ) -> Result<Arc<RegisteredExecution>, SubmitError> {
        let number = self.next_number();
        let (execution, reporter) = entry
            .shared
            .registry
            .register(number, first_line(&request.code));
        match self.submit_as(entry, number, SessionJob::Execute { request, reporter }) {
            Ok(()) => Ok(execution),
            Err(error) => {
                entry.shared.registry.withdraw(&execution);
                Err(error)
            }
        }
    }

    /// Runs code in a session that only the caller can see.
    pub(super) async fn execute_in(
        &self,
        entry: &DriverHandle,
        request: ExecuteRequest,
        cancel: &CancellationToken,
    ) -> Result<Outcome, Refused> {
        let execution = self
            .enter(entry, request)
            .map_err(|_| Refused::ClosedWhileWaiting)?;
        let ending = to_the_end(entry, &execution, cancel).await;
        answer_at_once(entry, &execution, &ending)
    }
}

/// Waits for the end of an execution for at most `wait`, or until an approval is requested. A
/// cancelled token is forwarded, and the end is still awaited.
async fn ended(
    entry: &DriverHandle,
    execution: &RegisteredExecution,
    wait: Option<Duration>,
    cancel: Option<&CancellationToken>,
    progress: &ProgressChannel,
) -> Option<Arc<ExecutionResult>> {
    let timeout = async {
        match wait.and_then(|wait| Instant::now().checked_add(wait)) {
            Some(until) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    };
    let cancelled = async {
        match cancel {
            Some(cancel) => forward_cancel(entry, execution, cancel).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        ending = follow_to_end(execution, progress) => Some(ending),
        never = cancelled => match never {},
        () = timeout => None,
        () = asked(execution) => None,
    }
}

/// Waits until an approval is requested, and a moment longer for other requests made at the same
/// time.
async fn asked(execution: &RegisteredExecution) {
    let mut approvals = execution.approvals();
    loop {
        // The execution holds the sender, and the caller holds the execution.
        let _ = approvals.wait_for(|asks| !asks.is_empty()).await;
        let latest = Instant::now() + MAX_BATCH_TIME;
        let mut is_quiet = false;
        while !is_quiet && Instant::now() < latest {
            is_quiet = tokio::time::timeout(BATCH_DELAY, approvals.changed())
                .await
                .is_err();
        }
        if !approvals.borrow_and_update().is_empty() {
            return;
        }
    }
}

/// Waits for the end of an execution without a time limit.
async fn to_the_end(
    entry: &DriverHandle,
    execution: &RegisteredExecution,
    cancel: &CancellationToken,
) -> Arc<ExecutionResult> {
    tokio::select! {
        biased;
        ending = execution.ended() => ending,
        never = forward_cancel(entry, execution, cancel) => match never {},
    }
}

/// Interrupts an execution when the token is cancelled. Its end is still awaited.
async fn forward_cancel(
    entry: &DriverHandle,
    execution: &RegisteredExecution,
    cancel: &CancellationToken,
) -> Infallible {
    cancel.cancelled().await;
    // A driver that is gone has already ended it.
    let _ = entry
        .commands
        .send(DriverCommand::Cancel(execution.request))
        .await;
    std::future::pending().await
}

/// Follows an execution to its end and forwards its progress to `progress`.
async fn follow_to_end(
    execution: &RegisteredExecution,
    progress: &ProgressChannel,
) -> Arc<ExecutionResult> {
    let (mut stage, mut lines) = (execution.follow(), execution.lines());
    loop {
        let told = match &*stage.borrow_and_update() {
            ExecutionStage::Ended(ending) => return ending.clone(),
            ExecutionStage::Waiting { ahead, held } => waiting_news(*ahead, *held),
            ExecutionStage::Running { .. } => lines.borrow_and_update().clone(),
        };
        progress.send_if_modified(|known| {
            let is_new = !told.is_empty() && *known != told;
            if is_new {
                *known = told;
            }
            is_new
        });
        // The execution holds both senders, and the caller holds the execution.
        tokio::select! {
            _ = stage.changed() => {}
            _ = lines.changed() => {}
        }
    }
}

/// Returns why an execution has not started, unless other executions ahead of it are the only
/// reason.
fn waiting_reason(
    ahead: usize,
    held: bool,
    is_starting: bool,
    preparation: &Preparation,
) -> Option<String> {
    let step = preparation.step_text().filter(|_| is_starting);
    Some(match (ahead, held, step) {
        (_, _, Some(step)) => format!("Python is being prepared ({step})"),
        (0, true, None) => "the server runs as many cells as it may".to_owned(),
        (0, false, None) if is_starting => "its session is still starting".to_owned(),
        (0, false, None) => "its session is not ready yet".to_owned(),
        (_, _, None) => return None,
    })
}

fn waiting_news(ahead: usize, held: bool) -> String {
    match ahead {
        0 if held => "waiting: the server runs as many cells as it may".to_owned(),
        0 => String::new(),
        1 => "waiting: 1 execution is ahead".to_owned(),
        _ => format!("waiting: {ahead} executions are ahead"),
    }
}

/// Returns the result to the call that started the execution. An execution that never ran is then
/// removed from the registry.
fn answer_at_once(
    entry: &DriverHandle,
    execution: &Arc<RegisteredExecution>,
    ending: &ExecutionResult,
) -> Result<Outcome, Refused> {
    if let Err(refused) = ending {
        entry.shared.registry.withdraw(execution);
        return Err(refused.clone());
    }
    entry.shared.registry.collect(execution, ending).ending
}
