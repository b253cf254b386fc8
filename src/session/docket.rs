//! The docket of a session: which executions wait or run, and the endings that somebody may still ask for.
//!
//! Every execution is entered before it is submitted. The driver holds its `Teller` and says when it begins, what it prints and how it ends;
//! whoever waits for it listens. So a call may go away, and another one finds the execution by its handle or as the first of the session that
//! nobody has heard the end of.
//!
//! What is kept is bounded: executions under way are (the queue is), endings that nobody has collected are limited in number and in bytes, and of
//! those that were collected only the last is kept, for a caller whose connection broke while its answer was on the way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::watch;
use tokio::time::Instant;

use super::history::first_line;
use super::output::bounded_text;
use super::state::RequestId;
use super::{
    Asked, ExecutionHandle, ExecutionId, Others, Outcome, Part, Refused, Status, Uncollected,
};

/// Endings that are kept for somebody to collect.
const MOST_UNCOLLECTED: usize = 16;
/// Bytes of all kept endings together. One with as many pictures as are shown fits.
const MOST_KEPT_BYTES: usize = 32 * 1024 * 1024;

/// Characters of what is told while something is done for an execution.
const LONGEST_NEWS: usize = 200;

/// How an execution ended: with an outcome, or without having run.
pub(super) type Ending = Result<Outcome, Refused>;

/// What is known of an execution while it goes on.
#[derive(Debug, Clone)]
pub(super) enum Stage {
    Waiting {
        /// Executions of the same session that come first.
        ahead: usize,
        /// It is the first of its session, and as many cells run in the whole server as may.
        held: bool,
    },
    Running {
        since: Instant,
    },
    Ended(Arc<Ending>),
}

/// One run of code, as those see it who wait for it.
#[derive(Debug)]
pub(super) struct Execution {
    pub(super) handle: ExecutionHandle,
    pub(super) request: RequestId,
    pub(super) entered: Instant,
    /// The first line of its code.
    pub(super) first_line: String,
    stage: watch::Sender<Stage>,
    /// The latest line that it printed.
    line: watch::Sender<String>,
    /// What a person has to decide before it goes on.
    asks: watch::Sender<Vec<Asked>>,
}

impl Execution {
    /// Follows what becomes of it.
    pub(super) fn follow(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Follows the latest line that it prints.
    pub(super) fn lines(&self) -> watch::Receiver<String> {
        self.line.subscribe()
    }

    /// Follows what a person has to decide.
    pub(super) fn questions(&self) -> watch::Receiver<Vec<Asked>> {
        self.asks.subscribe()
    }

    /// Waits for its end.
    pub(super) async fn ended(&self) -> Arc<Ending> {
        let mut stage = self.follow();
        let ended = stage
            .wait_for(|stage| matches!(stage, Stage::Ended(_)))
            .await;
        match ended.as_deref() {
            Ok(Stage::Ended(ending)) => ending.clone(),
            // Whoever waits holds the sender.
            _ => Arc::new(Err(Refused::ClosedWhileWaiting)),
        }
    }

    /// Returns when it began to run, or how it ended.
    pub(super) fn stage(&self) -> Stage {
        self.stage.borrow().clone()
    }

    fn tell(&self, latest: String) {
        self.line.send_if_modified(|line| {
            let is_new = *line != latest;
            *line = latest;
            is_new
        });
    }

    /// Describes it to whoever has not heard its end; nothing while it goes on or somebody waits for it.
    fn uncollected(&self) -> Option<Uncollected> {
        // Whoever waits for it follows it until it is collected.
        if self.stage.receiver_count() > 0 {
            return None;
        }
        let stage = self.stage.borrow();
        let Stage::Ended(ending) = &*stage else {
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
        matches!(*self.stage.borrow(), Stage::Ended(_))
    }

    fn weight(&self) -> usize {
        match &*self.stage.borrow() {
            Stage::Ended(ending) => ending.as_ref().as_ref().map_or(0, weight),
            _ => 0,
        }
    }
}

/// The executions of one session.
#[derive(Debug, Default)]
pub(super) struct Docket {
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    /// In the order of their arrival: those under way, and those that ended and were not collected.
    open: VecDeque<Arc<Execution>>,
    /// The last one that was collected.
    last: Option<Arc<Execution>>,
    /// Endings that were discarded before anybody collected them, since this was last told.
    discarded: usize,
}

/// What somebody who asks for the end of an execution is told.
#[derive(Debug)]
pub(super) struct Collected {
    pub(super) ending: Ending,
    /// It was told before.
    pub(super) again: bool,
}

impl Docket {
    /// Enters an execution. Its teller goes to the driver.
    pub(super) fn enter(
        self: &Arc<Docket>,
        request: RequestId,
        first_line: String,
    ) -> (Arc<Execution>, Teller) {
        let mut lists = self.lists();
        let ahead = lists
            .open
            .iter()
            .filter(|execution| !execution.is_over())
            .count();
        let execution = Arc::new(Execution {
            handle: ExecutionHandle::random(),
            request,
            entered: Instant::now(),
            first_line,
            stage: watch::Sender::new(Stage::Waiting { ahead, held: false }),
            line: watch::Sender::new(String::new()),
            asks: watch::Sender::default(),
        });
        lists.open.push_back(execution.clone());
        drop(lists);
        (
            execution.clone(),
            Teller {
                docket: self.clone(),
                execution,
            },
        )
    }

    /// Forgets an execution whose caller was refused at once.
    pub(super) fn withdraw(&self, execution: &Arc<Execution>) {
        self.lists()
            .open
            .retain(|known| !Arc::ptr_eq(known, execution));
    }

    /// Returns the first execution that nobody has heard the end of, or else the last one.
    pub(super) fn first(&self) -> Option<Arc<Execution>> {
        let lists = self.lists();
        lists.open.front().or(lists.last.as_ref()).cloned()
    }

    /// Returns the first execution that is not over.
    pub(super) fn first_under_way(&self) -> Option<Arc<Execution>> {
        self.lists()
            .open
            .iter()
            .find(|execution| !execution.is_over())
            .cloned()
    }

    pub(super) fn find(&self, handle: &ExecutionHandle) -> Option<Arc<Execution>> {
        let lists = self.lists();
        lists
            .open
            .iter()
            .chain(&lists.last)
            .find(|execution| execution.handle == *handle)
            .cloned()
    }

    /// Tells what the session has beside an execution.
    pub(super) fn others(&self, execution: &Execution) -> Others {
        self.lists().others(execution)
    }

    /// Hands out how an execution ended. Tells with it what else there is, and how many endings were discarded.
    pub(super) fn collect(&self, execution: &Arc<Execution>, ending: &Ending) -> Collected {
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

    /// Tells whether there is something that nobody has heard of.
    pub(super) fn has_uncollected(&self) -> bool {
        !self.lists().open.is_empty()
    }

    /// Returns the bytes that are kept.
    pub(super) fn kept_bytes(&self) -> u64 {
        let lists = self.lists();
        lists
            .open
            .iter()
            .chain(&lists.last)
            .map(|execution| execution.weight() as u64)
            .sum()
    }

    /// Tells those that wait how many are ahead of them, and discards what is too much.
    fn ended(&self) {
        let mut lists = self.lists();
        let mut ahead = 0;
        for execution in &lists.open {
            execution.stage.send_if_modified(|stage| match stage {
                Stage::Waiting { ahead: known, .. } if *known != ahead => {
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
            .expect("nothing panics while it holds the docket")
    }
}

impl Lists {
    fn others(&self, told: &Execution) -> Others {
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

    /// Discards the oldest endings when there are too many. What was collected goes first, and the newest stays in any case.
    fn discard(&mut self) {
        loop {
            let over = self.open.iter().filter(|execution| execution.is_over());
            let count = over.clone().count();
            let bytes = over.map(|execution| execution.weight()).sum::<usize>();
            if self
                .last
                .as_ref()
                .is_some_and(|last| count > 0 && bytes + last.weight() > MOST_KEPT_BYTES)
            {
                self.last = None;
            }
            if count <= 1 || (count <= MOST_UNCOLLECTED && bytes <= MOST_KEPT_BYTES) {
                return;
            }
            let oldest = self.open.iter().position(|execution| execution.is_over());
            self.open.remove(oldest.expect("there is more than one"));
            self.discarded += 1;
        }
    }
}

/// The driver's end of an execution. Dropped without an ending, it tells that the session is gone.
pub(super) struct Teller {
    docket: Arc<Docket>,
    execution: Arc<Execution>,
}

impl Teller {
    /// Tells that it waits for a place in the whole server.
    pub(super) fn hold(&self) {
        self.execution.stage.send_if_modified(|stage| match stage {
            Stage::Waiting { held, .. } => !std::mem::replace(held, true),
            _ => false,
        });
    }

    /// Tells that the code begins.
    pub(super) fn begin(&self, since: Instant) {
        self.execution.stage.send_replace(Stage::Running { since });
    }

    /// Returns what lets others tell how the execution gets on.
    pub(super) fn crier(&self) -> Crier {
        Crier(self.execution.clone())
    }

    /// Tells whether somebody listens, so that a line is worth finding.
    pub(super) fn is_heard(&self) -> bool {
        self.execution.line.receiver_count() > 0
    }

    /// Tells the latest line that was printed.
    pub(super) fn print(&self, latest: String) {
        self.execution.tell(latest);
    }

    /// Tells what a person has to decide, now.
    pub(super) fn ask(&self, asks: Vec<Asked>) {
        self.execution.asks.send_if_modified(|known| {
            let is_new = *known != asks;
            *known = asks;
            is_new
        });
    }

    /// Tells how it ended. Only the first ending counts.
    pub(super) fn end(self, ending: Ending) {
        self.settle(ending);
    }

    fn settle(&self, ending: Ending) {
        self.ask(Vec::new());
        let first = self.execution.stage.send_if_modified(|stage| {
            let first = !matches!(stage, Stage::Ended(_));
            if first {
                *stage = Stage::Ended(Arc::new(ending));
            }
            first
        });
        if first {
            self.docket.ended();
        }
    }
}

/// Tells the listeners of an execution what somebody does for it.
pub(super) struct Crier(Arc<Execution>);

impl Crier {
    pub(super) fn say(&self, news: String) {
        self.0.tell(bounded_text(
            &news.replace(char::is_control, " "),
            LONGEST_NEWS,
        ));
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.settle(Err(Refused::ClosedWhileWaiting));
    }
}

/// Says in a few words why an ending is not a good one; nothing when it is.
fn failure(ending: &Ending) -> Option<String> {
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

/// Returns about how many bytes an outcome holds.
fn weight(outcome: &Outcome) -> usize {
    let parts = outcome.output.parts.iter().map(|part| match part {
        Part::Text { text, .. } => text.len(),
        Part::Image(image) => image.bytes.len(),
        Part::Cut { .. } => 0,
    });
    parts.sum::<usize>() + outcome.notes.iter().map(String::len).sum::<usize>()
}
