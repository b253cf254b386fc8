//! The pool of containers that wait to be used, each with a session that has run nothing.
//!
//! A member is handed out once, and never returns. One that has died or is too old is removed
//! instead.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::sandbox::ContainerSandbox;
use crate::sandbox::Interpreter;

/// Settings of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSettings {
    /// Number of waiting containers.
    pub size: usize,
    /// Maximum waiting time of a container before it is replaced.
    pub max_age: Duration,
    /// Number of containers that are made at the same time.
    pub creations: usize,
}

struct Waiting {
    since: Instant,
    member: (ContainerSandbox, Interpreter),
}

#[derive(Default)]
pub(super) struct ContainerPool {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Members that are being made.
    starting: usize,
    closed: bool,
}

impl ContainerPool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the pool panics")
    }

    /// Takes the member that has waited longest. Dead ones are dropped, and thereby removed.
    pub(super) fn take(&self, settings: &PoolSettings) -> Option<(ContainerSandbox, Interpreter)> {
        let taken = loop {
            let Some(waiting) = self.state().waiting.pop_front() else {
                break None;
            };
            if waiting.member.0.is_alive() && waiting.since.elapsed() < settings.max_age {
                break Some(waiting.member);
            }
        };
        self.changed.notify_one();
        taken
    }

    /// Reserves the creation of one more member, if one is missing and not too many are being made.
    pub(super) fn reserve(&self, settings: &PoolSettings) -> bool {
        let mut state = self.state();
        let lacks = state.waiting.len() + state.starting < settings.size;
        let may = !state.closed && lacks && state.starting < settings.creations;
        state.starting += usize::from(may);
        may
    }

    /// Adds the reserved member, or cancels the reservation. After `close` a member is dropped, and
    /// thereby removed.
    pub(super) fn add(&self, member: Option<(ContainerSandbox, Interpreter)>) {
        let mut state = self.state();
        state.starting -= 1;
        if let (Some(member), false) = (member, state.closed) {
            state.waiting.push_back(Waiting {
                since: Instant::now(),
                member,
            });
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Drops members that are dead or too old.
    pub(super) fn remove_stale(&self, settings: &PoolSettings) {
        let mut stale = Vec::new();
        let mut state = self.state();
        for waiting in std::mem::take(&mut state.waiting) {
            if waiting.member.0.is_alive() && waiting.since.elapsed() < settings.max_age {
                state.waiting.push_back(waiting);
            } else {
                stale.push(waiting);
            }
        }
        // Dropping one starts its removal, which must not happen while the pool is locked.
        drop(state);
        drop(stale);
    }

    pub(super) fn len(&self) -> usize {
        self.state().waiting.len()
    }

    /// Waits until a member was taken or added.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Closes the pool, and returns the waiting members.
    pub(super) fn close(&self) -> Vec<ContainerSandbox> {
        let mut state = self.state();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.changed.notify_one();
        waiting
            .into_iter()
            .map(|waiting| waiting.member.0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_members_are_made_at_once_than_was_said_and_none_beyond_the_size() {
        let settings = PoolSettings {
            size: 3,
            max_age: Duration::from_secs(60),
            creations: 2,
        };
        let pool = ContainerPool::default();
        let claimed = |settings: &PoolSettings| (0..9).filter(|_| pool.reserve(settings)).count();
        assert_eq!(claimed(&settings), 2);
        pool.add(None); // It could not be made.
        assert_eq!(claimed(&settings), 1);
        let hasty = PoolSettings {
            creations: 64,
            ..settings
        };
        assert_eq!(claimed(&hasty), 1, "those that are being made count too");
        pool.close();
        pool.add(None);
        assert_eq!(claimed(&hasty), 0);
    }
}
