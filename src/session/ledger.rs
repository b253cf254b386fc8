//! The ledger: executions that have ended and are not recorded yet.
//!
//! The driver enters each execution when it ends, before the caller is answered. The recorder that
//! the execution belongs to (the audit log of the server that submitted it) receives the entry and
//! confirms it. While that recorder is disconnected, the entry waits: for its return under another
//! id, or for any recorder that takes over entries of others. An entry leaves the ledger when it is
//! confirmed. An execution is therefore recorded whether or not its result was ever collected, and
//! also when its session is closed.
//!
//! A confirmation can be lost with the connection that carried it. The entry is then handed out
//! again under the same name, and the recorder, which knows the names that it has written, skips
//! it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::tools::ToolCalls;
use super::{Principal, Ruling, SessionId, StatusKind};
use crate::sandbox::Blocked;

/// Entries that may wait for a recorder. Only executions that outlive their server wait, so more
/// than this means that no server with an audit log returns; the oldest are then dropped.
const MAX_UNRECORDED: usize = 10_000;

/// An execution that has ended, with the data that a record needs. It contains a digest of the
/// code, never the code.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExecutionEnded {
    /// Unique among all executions, including those of other processes.
    pub name: String,
    pub owner: Principal,
    pub session: SessionId,
    /// SHA-256.
    pub code: [u8; 32],
    pub status: StatusKind,
    pub duration: Duration,
    pub processor_time: Duration,
    /// Peak memory use of the session in bytes.
    pub memory_peak: u64,
    #[serde(with = "super::serial::blocked")]
    pub blocked: Vec<Blocked>,
    pub tool_calls: ToolCalls,
    pub rulings: Vec<Ruling>,
    /// The recorder did not submit it, but has taken it over.
    pub taken_over: bool,
}

/// Id of a recorder while it is attached. Zero is the recorder of the process itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecorderId(pub u64);

/// Records an execution. When it returns, the execution is recorded.
pub type RecordEnding = Arc<dyn Fn(&ExecutionEnded) + Send + Sync>;

/// Callback of a recorder: receives the number to confirm and the execution. It must not block for
/// long.
pub(crate) type HandOver = Arc<dyn Fn(u64, ExecutionEnded) + Send + Sync>;

/// Executions that have ended and are not recorded yet.
pub struct Ledger {
    /// The first part of every execution's name.
    name: String,
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    next: u64,
    entries: BTreeMap<u64, Entry>,
    recorders: HashMap<RecorderId, Recorder>,
}

struct Entry {
    submitted_by: RecorderId,
    handed_to: Option<RecorderId>,
    ended: ExecutionEnded,
}

#[derive(Clone)]
struct Recorder {
    takes_over: bool,
    hand_over: HandOver,
}

/// A recorder's attachment to the ledger. When it is dropped, unconfirmed entries go to other
/// recorders.
pub(crate) struct Attached {
    ledger: Weak<Ledger>,
    id: RecorderId,
}

impl Attached {
    /// Stays attached for the lifetime of the ledger.
    pub(crate) fn forever(self) {
        std::mem::forget(self);
    }
}

impl Ledger {
    pub(crate) fn new() -> Ledger {
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .expect("the kernel has random bytes");
        Ledger {
            name: format!("{:016x}", u64::from_ne_bytes(bytes)),
            lists: Mutex::default(),
        }
    }

    /// Returns the name of an execution, which is permanent and unique among all processes.
    pub(super) fn name_of(&self, execution: u64) -> String {
        format!("{}-{execution}", self.name)
    }

    /// Enters an execution that has ended. If its recorder is attached, the recorder has been
    /// called when this returns.
    pub(crate) fn enter(&self, submitted_by: RecorderId, ended: ExecutionEnded) {
        let handed = {
            let mut lists = self.lists();
            lists.next += 1;
            let number = lists.next;
            lists.entries.insert(
                number,
                Entry {
                    submitted_by,
                    handed_to: None,
                    ended,
                },
            );
            if lists.entries.len() > MAX_UNRECORDED {
                lists.entries.pop_first();
                warn!("an execution was not recorded: no server with an audit log has come back");
            }
            lists.hand_out()
        };
        call(handed);
    }

    /// Attaches a recorder. It receives the executions that it submits; with `takes_over`, also
    /// those left by recorders that are gone.
    pub(crate) fn attach(
        self: &Arc<Ledger>,
        id: RecorderId,
        takes_over: bool,
        hand_over: HandOver,
    ) -> Attached {
        let handed = {
            let mut lists = self.lists();
            lists.recorders.insert(
                id,
                Recorder {
                    takes_over,
                    hand_over,
                },
            );
            lists.hand_out()
        };
        call(handed);
        Attached {
            ledger: Arc::downgrade(self),
            id,
        }
    }

    /// Removes an entry that is recorded.
    pub(crate) fn confirm(&self, number: u64) {
        self.lists().entries.remove(&number);
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists
            .lock()
            .expect("nothing panics while it holds the ledger")
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let Some(ledger) = self.ledger.upgrade() else {
            return;
        };
        let handed = {
            let mut lists = ledger.lists();
            lists.recorders.remove(&self.id);
            let left = lists
                .entries
                .values_mut()
                .filter(|entry| entry.handed_to == Some(self.id));
            left.for_each(|entry| entry.handed_to = None);
            lists.hand_out()
        };
        call(handed);
    }
}

impl Lists {
    /// Assigns every unassigned entry to a recorder, if there is one. Returns the calls to make, in
    /// the order of the entries.
    fn hand_out(&mut self) -> Vec<(HandOver, u64, ExecutionEnded)> {
        // The newest one: if several recorders take over, a server that has just started replaces
        // one that is about to end.
        let successor = self
            .recorders
            .iter()
            .filter(|(_, recorder)| recorder.takes_over)
            .max_by_key(|(id, _)| **id);
        let successor = successor.map(|(id, recorder)| (*id, recorder.clone()));
        let mut handed = Vec::new();
        for (number, entry) in self
            .entries
            .iter_mut()
            .filter(|(_, entry)| entry.handed_to.is_none())
        {
            let own = self
                .recorders
                .get(&entry.submitted_by)
                .map(|recorder| (entry.submitted_by, recorder.clone()));
            let taken_over = own.is_none();
            let Some((id, recorder)) = own.or_else(|| successor.clone()) else {
                continue;
            };
            entry.handed_to = Some(id);
            handed.push((
                recorder.hand_over,
                *number,
                ExecutionEnded {
                    taken_over,
                    ..entry.ended.clone()
                },
            ));
        }
        handed
    }
}

/// Calls recorders. The ledger must not be locked meanwhile: a recorder may wait for a disk.
fn call(handed: Vec<(HandOver, u64, ExecutionEnded)>) {
    for (hand_over, number, ended) in handed {
        hand_over(number, ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(ledger: &Ledger, execution: u64) -> ExecutionEnded {
        ExecutionEnded {
            name: ledger.name_of(execution),
            owner: Principal("ann".to_owned()),
            session: SessionId::default_session(),
            code: [7; 32],
            status: StatusKind::Completed,
            duration: Duration::ZERO,
            processor_time: Duration::ZERO,
            memory_peak: 0,
            blocked: Vec::new(),
            tool_calls: ToolCalls::default(),
            rulings: Vec::new(),
            taken_over: false,
        }
    }

    type Handed = Arc<Mutex<Vec<(u64, String, bool)>>>;

    /// Attaches a recorder that stores entries and confirms nothing.
    fn attach(ledger: &Arc<Ledger>, id: u64, takes_over: bool) -> (Attached, Handed) {
        let handed = Handed::default();
        let noted = Arc::clone(&handed);
        let hand_over: HandOver = Arc::new(move |number, ended| {
            let execution = ended.name.rsplit('-').next().unwrap().to_owned();
            noted
                .lock()
                .unwrap()
                .push((number, execution, ended.taken_over));
        });
        (ledger.attach(RecorderId(id), takes_over, hand_over), handed)
    }

    fn executions(handed: &Handed) -> Vec<(String, bool)> {
        handed
            .lock()
            .unwrap()
            .iter()
            .map(|(_, execution, taken_over)| (execution.clone(), *taken_over))
            .collect()
    }

    fn own(execution: &str) -> (String, bool) {
        (execution.to_owned(), false)
    }

    #[test]
    fn an_ending_goes_to_the_recorder_that_submitted_the_execution() {
        let ledger = Arc::new(Ledger::new());
        let (_first, at_first) = attach(&ledger, 1, true);
        let (_second, at_second) = attach(&ledger, 2, true);
        ledger.enter(RecorderId(1), ended(&ledger, 10));
        ledger.enter(RecorderId(2), ended(&ledger, 20));
        assert_eq!(
            (executions(&at_first), executions(&at_second)),
            (vec![own("10")], vec![own("20")])
        );
    }

    #[test]
    fn what_was_not_confirmed_goes_to_a_recorder_that_takes_over_and_what_was_does_not() {
        let ledger = Arc::new(Ledger::new());
        let (first, at_first) = attach(&ledger, 1, true);
        ledger.enter(RecorderId(1), ended(&ledger, 10));
        ledger.enter(RecorderId(1), ended(&ledger, 11));
        ledger.confirm(at_first.lock().unwrap()[0].0);
        drop(first);
        ledger.enter(RecorderId(1), ended(&ledger, 12));
        let (_without_a_log, at_second) = attach(&ledger, 2, false);
        assert_eq!(
            executions(&at_second),
            [],
            "a recorder that keeps no log takes nothing over"
        );
        let (_third, at_third) = attach(&ledger, 3, true);
        assert_eq!(
            executions(&at_third),
            [("11".to_owned(), true), ("12".to_owned(), true)]
        );
        ledger.enter(RecorderId(2), ended(&ledger, 20));
        assert_eq!(
            executions(&at_second),
            [own("20")],
            "the control: its own it does get"
        );
    }

    #[test]
    fn what_nobody_records_is_bounded() {
        let ledger = Arc::new(Ledger::new());
        for execution in 0..=MAX_UNRECORDED as u64 {
            ledger.enter(RecorderId(1), ended(&ledger, execution));
        }
        let (_late, handed) = attach(&ledger, 2, true);
        assert_eq!(handed.lock().unwrap().len(), MAX_UNRECORDED);
        assert_eq!(executions(&handed)[0].0, "1", "the oldest was dropped");
    }
}
