//! The execution registry of a session: queued and running executions, and results that
//! can still be collected.
//!
//! Every execution is registered before it is submitted. The driver holds its `ExecutionReporter`
//! and reports its start, its output and its result; callers follow these reports. A call can
//! therefore disconnect, and another one finds the execution by its handle, or as the session's
//! first execution whose result was not collected.
//!
//! The registry is bounded. The queue limits the number of executions in progress. Uncollected
//! results are limited in number and in bytes. Of the collected results only the last one is kept,
//! for a caller whose connection broke while the answer was being sent.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::watch;
use tokio::time::Instant;

use super::history::first_line;
use super::output::bounded_text;
use super::state::RequestId;
use super::{
    ApprovalRequest, ExecutionHandle, ExecutionId, Others, Outcome, Part, Refused, Status,
    Uncollected,
};

/// Results kept for collection.
const MAX_UNCOLLECTED: usize = 16;
/// Total bytes of kept results. One result with the maximum number of images fits.
const MAX_KEPT_BYTES: usize = 32 * 1024 * 1024;

/// Limit in characters for a progress message.
const MAX_PROGRESS_LENGTH: usize = 200;

/// Result of an execution: an outcome, or a refusal if it did not run.
pub(super) type ExecutionResult = Result<Outcome, Refused>;

/// Progress of an execution.
#[derive(Debug, Clone)]
pub(super) enum ExecutionStage {
    Waiting {
        /// Executions of the same session that are ahead of it in the queue.
        ahead: usize,
        /// It is the first of its session, and the whole server runs its maximum of cells.
        held: bool,
    },
    Running {
        since: Instant,
    },
    Ended(Arc<ExecutionResult>),
}

/// One run of code, as seen by its followers.
#[derive(Debug)]
pub(super) struct RegisteredExecution {
    pub(super) handle: ExecutionHandle,
    pub(super) request: RequestId,
    pub(super) entered: Instant,
    /// The first line of its code.
    pub(super) first_line: String,
    stage: watch::Sender<ExecutionStage>,
    /// The latest line that it printed.
    line: watch::Sender<String>,
    /// Pending approval requests that must be decided before it continues.
    approvals: watch::Sender<Vec<ApprovalRequest>>,
}

impl RegisteredExecution {
    /// Returns a watch on its progress.
    pub(super) fn follow(&self) -> watch::Receiver<ExecutionStage> {
        self.stage.subscribe()
    }

    /// Returns a watch on the latest line that it prints.
    pub(super) fn lines(&self) -> watch::Receiver<String> {
        self.line.subscribe()
    }

    /// Returns a watch on its pending approval requests.
    pub(super) fn approvals(&self) -> watch::Receiver<Vec<ApprovalRequest>> {
        self.approvals.subscribe()
    }

    /// Waits for its result.
    pub(super) async fn ended(&self) -> Arc<ExecutionResult> {
        let mut stage = self.follow();
        let ended = stage
            .wait_for(|stage| matches!(stage, ExecutionStage::Ended(_)))
            .await;
        match ended.as_deref() {
            Ok(ExecutionStage::Ended(ending)) => ending.clone(),
            // Unreachable: the caller's own reference keeps the sender alive.
            _ => Arc::new(Err(Refused::ClosedWhileWaiting)),
        }
    }

    /// Returns its progress, including its start time or its result.
    pub(super) fn stage(&self) -> ExecutionStage {
        self.stage.borrow().clone()
    }

    fn set_line(&self, latest: String) {
        self.line.send_if_modified(|line| {
            let is_new = *line != latest;
            *line = latest;
            is_new
        });
    }

    /// Returns a description of its uncollected result; `None` while it is in progress or a caller
    /// waits for it.
    fn uncollected(&self) -> Option<Uncollected> {
        // A waiting caller holds a receiver until it has collected the result.
        if self.stage.receiver_count() > 0 {
            return None;
        }
        let stage = self.stage.borrow();
        let ExecutionStage::Ended(ending) = &*stage else {
            return None;
        };
        let (execution, first_line) = (ExecutionId(self.request), self.first_line.clone());
        Some(Uncollected {
            execution,
            first_line,
            failure: failure(ending),
        })
    }

    fn is_over(&self) -> bool {
        matches!(*self.stage.borrow(), ExecutionStage::Ended(_))
    }

    fn weight(&self) -> usize {
        match &*self.stage.borrow() {
            ExecutionStage::Ended(ending) => ending.as_ref().as_ref().map_or(0, weight),
            _ => 0,
        }
    }
}

/// The executions of one session.
#[derive(Debug, Default)]
pub(super) struct ExecutionRegistry {
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    /// Executions in progress and uncollected ones, in the order of their arrival.
    open: VecDeque<Arc<RegisteredExecution>>,
    /// The last collected execution.
    last: Option<Arc<RegisteredExecution>>,
    /// Results discarded before they were collected, since this was last reported.
    discarded: usize,
}

/// Answer to a request for the result of an execution.
#[derive(Debug)]
pub(super) struct Collected {
    pub(super) ending: ExecutionResult,
    /// The result was collected before.
    pub(super) again: bool,
}

impl ExecutionRegistry {
    /// Registers an execution. Its `ExecutionReporter` goes to the driver.
    pub(super) fn register(
        self: &Arc<ExecutionRegistry>,
        request: RequestId,
        first_line: String,
    ) -> (Arc<RegisteredExecution>, ExecutionReporter) {
        let mut lists = self.lists();
        let ahead = lists
            .open
            .iter()
            .filter(|execution| !execution.is_over())
            .count();
        let execution = Arc::new(RegisteredExecution {
            handle: ExecutionHandle::random(),
            request,
            entered: Instant::now(),
            first_line,
            stage: watch::Sender::new(ExecutionStage::Waiting { ahead, held: false }),
            line: watch::Sender::new(String::new()),
            approvals: watch::Sender::default(),
        });
        lists.open.push_back(execution.clone());
        drop(lists);
        (
            execution.clone(),
            ExecutionReporter {
                registry: self.clone(),
                execution,
            },
        )
    }

    /// Removes an execution whose submission was refused immediately.
    pub(super) fn withdraw(&self, execution: &Arc<RegisteredExecution>) {
        self.lists()
            .open
            .retain(|known| !Arc::ptr_eq(known, execution));
    }

    /// Returns the first execution whose result was not collected, or else the last one.
    pub(super) fn first(&self) -> Option<Arc<RegisteredExecution>> {
        let lists = self.lists();
        lists.open.front().or(lists.last.as_ref()).cloned()
    }

    /// Returns the first execution in progress.
    pub(super) fn first_in_progress(&self) -> Option<Arc<RegisteredExecution>> {
        self.lists()
            .open
            .iter()
            .find(|execution| !execution.is_over())
            .cloned()
    }

    pub(super) fn find(&self, handle: &ExecutionHandle) -> Option<Arc<RegisteredExecution>> {
        let lists = self.lists();
        lists
            .open
            .iter()
            .chain(&lists.last)
            .find(|execution| execution.handle == *handle)
            .cloned()
    }

    /// Returns a summary of the session's other executions.
    pub(super) fn others(&self, execution: &RegisteredExecution) -> Others {
        self.lists().others(execution)
    }

    /// Hands out the result of an execution, together with a summary of the other executions and
    /// the number of discarded results.
    pub(super) fn collect(
        &self,
        execution: &Arc<RegisteredExecution>,
        ending: &ExecutionResult,
    ) -> Collected {
        let mut lists = self.lists();
        let place = lists
            .open
            .iter()
            .position(|known| Arc::ptr_eq(known, execution));
        if let Some(place) = place {
            lists.last = lists.open.remove(place);
        }
        let mut ending = ending.clone();
        if let Ok(outcome) = &mut ending {
            outcome.first_line = execution.first_line.clone();
            outcome.others = Others {
                discarded: std::mem::take(&mut lists.discarded),
                ..lists.others(execution)
            };
        }
        Collected {
            ending,
            again: place.is_none(),
        }
    }

    /// Returns whether there are uncollected results.
    pub(super) fn has_uncollected(&self) -> bool {
        !self.lists().open.is_empty()
    }

    /// Returns the number of bytes kept.
    pub(super) fn kept_bytes(&self) -> u64 {
        let lists = self.lists();
        lists
            .open
            .iter()
            .chain(&lists.last)
            .map(|execution| execution.weight() as u64)
            .sum()
    }

    /// Updates the queue positions of waiting executions, and discards results beyond the limits.
    fn ended(&self) {
        let mut lists = self.lists();
        let mut ahead = 0;
        for execution in &lists.open {
            execution.stage.send_if_modified(|stage| match stage {
                ExecutionStage::Waiting { ahead: known, .. } if *known != ahead => {
                    *known = ahead;
                    true
                }
                _ => false,
            });
            ahead += usize::from(!execution.is_over());
        }
        lists.discard();
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists
            .lock()
            .expect("nothing panics while it holds the registry")
    }
}

impl Lists {
    fn others(&self, told: &RegisteredExecution) -> Others {
        let others = || {
            self.open
                .iter()
                .filter(|other| other.request != told.request)
        };
        Others {
            uncollected: others().filter_map(|other| other.uncollected()).collect(),
            under_way: others().filter(|other| !other.is_over()).count(),
            discarded: 0,
        }
    }

    /// Discards the oldest results when there are too many. The collected one goes first, and the
    /// newest always stays.
    fn discard(&mut self) {
        loop {
            let over = self.open.iter().filter(|execution| execution.is_over());
            let count = over.clone().count();
            let bytes = over.map(|execution| execution.weight()).sum::<usize>();
            if self
                .last
                .as_ref()
                .is_some_and(|last| count > 0 && bytes + last.weight() > MAX_KEPT_BYTES)
            {
                self.last = None;
            }
            if count <= 1 || (count <= MAX_UNCOLLECTED && bytes <= MAX_KEPT_BYTES) {
                return;
            }
            let oldest = self.open.iter().position(|execution| execution.is_over());
            self.open.remove(oldest.expect("there is more than one"));
            self.discarded += 1;
        }
    }
}

/// The driver's handle of an execution. If it is dropped without a result, it reports that the
/// session is gone.
pub(super) struct ExecutionReporter {
    registry: Arc<ExecutionRegistry>,
    execution: Arc<RegisteredExecution>,
}

impl ExecutionReporter {
    /// Reports that it waits for a server-wide run permit.
    pub(super) fn hold(&self) {
        self.execution.stage.send_if_modified(|stage| match stage {
            ExecutionStage::Waiting { held, .. } => !std::mem::replace(held, true),
            _ => false,
        });
    }

    /// Reports that the code starts.
    pub(super) fn begin(&self, since: Instant) {
        self.execution
            .stage
            .send_replace(ExecutionStage::Running { since });
    }

    /// Returns a progress sender for the execution.
    pub(super) fn progress_sender(&self) -> ProgressSender {
        ProgressSender(self.execution.clone())
    }

    /// Returns whether there are followers, so that finding the latest line is worthwhile.
    pub(super) fn has_followers(&self) -> bool {
        self.execution.line.receiver_count() > 0
    }

    /// Reports the latest line that was printed.
    pub(super) fn print(&self, latest: String) {
        self.execution.set_line(latest);
    }

    /// Reports the approval requests that are pending now.
    pub(super) fn ask(&self, asks: Vec<ApprovalRequest>) {
        self.execution.approvals.send_if_modified(|known| {
            let is_new = *known != asks;
            *known = asks;
            is_new
        });
    }

    /// Reports the result. Only the first result counts.
    pub(super) fn end(self, ending: ExecutionResult) {
        self.settle(ending);
    }

    fn settle(&self, ending: ExecutionResult) {
        self.ask(Vec::new());
        let first = self.execution.stage.send_if_modified(|stage| {
            let first = !matches!(stage, ExecutionStage::Ended(_));
            if first {
                *stage = ExecutionStage::Ended(Arc::new(ending));
            }
            first
        });
        if first {
            self.registry.ended();
        }
    }
}

/// Sends progress messages to the followers of an execution.
pub(super) struct ProgressSender(Arc<RegisteredExecution>);

impl ProgressSender {
    pub(super) fn send(&self, message: String) {
        self.0.set_line(bounded_text(
            &message.replace(char::is_control, " "),
            MAX_PROGRESS_LENGTH,
        ));
    }
}

impl Drop for ExecutionReporter {
    fn drop(&mut self) {
        self.settle(Err(Refused::ClosedWhileWaiting));
    }
}

/// Summarizes why a result is not a success; `None` if it is one.
fn failure(ending: &ExecutionResult) -> Option<String> {
    let words = match ending {
        Ok(Outcome {
            status: Status::Completed,
            ..
        }) => return None,
        Ok(Outcome {
            status: Status::Raised(error),
            ..
        }) => {
            let name = error.name.as_str();
            match error.message.lines().next() {
                Some(message) if !message.is_empty() => format!("{name}: {message}"),
                _ => name.to_owned(),
            }
        }
        Ok(outcome) => outcome.status.name().replace('_', " "),
        Err(refused) => refused.to_string(),
    };
    Some(first_line(&words))
}

/// Returns the approximate number of bytes that an outcome holds.
fn weight(outcome: &Outcome) -> usize {
    let parts = outcome.output.parts.iter().map(|part| match part {
        Part::Text { text, .. } => text.len(),
        Part::Image(image) => image.bytes.len(),
        Part::Cut { .. } => 0,
    });
    parts.sum::<usize>()
        + outcome
            .notes
            .iter()
            .map(|note| note.text.len())
            .sum::<usize>()
}
