//! Which sessions a front has seen, so that those of a keeper that died are answered for by name and never replaced in silence.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

use crate::session::{ExecutionHandle, Principal, SessionId};

/// Sessions and executions that are remembered. With more, the oldest are forgotten: a lost one then looks unknown.
const MOST_SEEN: usize = 10_000;

type Key = (Principal, SessionId);

/// What is known of sessions without asking.
#[derive(Default)]
pub(super) struct Seen {
    /// Of the keeper that lives.
    present: Bounded<Key>,
    /// Of keepers that died.
    lost: Bounded<Key>,
    /// The sessions of executions that were told of.
    executions: HashMap<ExecutionHandle, SessionId>,
    told: VecDeque<ExecutionHandle>,
}

impl Seen {
    /// Remembers a session that exists.
    pub(super) fn note(&mut self, owner: &Principal, id: &SessionId) {
        let key = (owner.clone(), id.clone());
        if !self.present.has(&key) {
            self.present.add(key);
        }
    }

    /// Remembers which session an execution belongs to.
    pub(super) fn note_execution(&mut self, handle: &ExecutionHandle, id: &SessionId) {
        if self.executions.insert(handle.clone(), id.clone()).is_none() {
            self.told.push_back(handle.clone());
            if self.told.len() > MOST_SEEN {
                self.told.pop_front().map(|oldest| self.executions.remove(&oldest));
            }
        }
    }

    pub(super) fn session_of(&self, handle: &ExecutionHandle) -> Option<SessionId> {
        self.executions.get(handle).cloned()
    }

    /// The keeper has died, and all its sessions with it.
    pub(super) fn lose_all(&mut self) {
        for key in std::mem::take(&mut self.present).into_items() {
            self.lost.add(key);
        }
    }

    /// A session was lost while it was asked for something, whether or not it had been seen.
    pub(super) fn lose(&mut self, owner: &Principal, id: &SessionId) {
        self.forget(owner, id);
        self.lost.add((owner.clone(), id.clone()));
    }

    pub(super) fn is_lost(&self, owner: &Principal, id: &SessionId) -> bool {
        self.lost.has(&(owner.clone(), id.clone()))
    }

    /// Returns whether the session was lost, and lets its id be used anew.
    pub(super) fn forgive(&mut self, owner: &Principal, id: &SessionId) -> bool {
        self.lost.remove(&(owner.clone(), id.clone()))
    }

    /// Forgets a session that was closed.
    pub(super) fn forget(&mut self, owner: &Principal, id: &SessionId) {
        self.present.remove(&(owner.clone(), id.clone()));
    }

    /// Names what an owner has lost.
    pub(super) fn lost_by(&self, owner: &Principal) -> Vec<SessionId> {
        self.lost.known.iter().filter(|(of, _)| of == owner).map(|(_, id)| id.clone()).collect()
    }
}

/// A set that forgets what was added first when it is full.
struct Bounded<T> {
    known: HashSet<T>,
    /// In the order of arrival; may name what was removed meanwhile.
    order: VecDeque<T>,
}

impl<T> Default for Bounded<T> {
    fn default() -> Bounded<T> {
        Bounded { known: HashSet::new(), order: VecDeque::new() }
    }
}

impl<T: Clone + Eq + Hash> Bounded<T> {
    fn has(&self, item: &T) -> bool {
        self.known.contains(item)
    }

    fn add(&mut self, item: T) {
        if self.known.insert(item.clone()) {
            self.order.push_back(item);
        }
        while self.order.len() > MOST_SEEN {
            self.order.pop_front().map(|oldest| self.known.remove(&oldest));
        }
    }

    fn remove(&mut self, item: &T) -> bool {
        self.known.remove(item)
    }

    fn into_items(self) -> impl Iterator<Item = T> {
        let Bounded { mut known, order } = self;
        order.into_iter().filter(move |item| known.remove(item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Principal {
        Principal(name.to_owned())
    }

    fn id(name: &str) -> SessionId {
        name.parse().unwrap()
    }

    #[test]
    fn what_was_there_when_the_keeper_died_is_lost_until_it_is_forgiven() {
        let mut seen = Seen::default();
        seen.note(&owner("ann"), &id("a"));
        seen.note(&owner("ann"), &id("closed"));
        seen.forget(&owner("ann"), &id("closed"));
        assert!(!seen.is_lost(&owner("ann"), &id("a")));
        seen.lose_all();
        assert!(seen.is_lost(&owner("ann"), &id("a")));
        assert!(!seen.is_lost(&owner("ann"), &id("closed")), "what was closed is not missed");
        assert!(!seen.is_lost(&owner("bob"), &id("a")), "another owner's id is another session");
        assert_eq!(seen.lost_by(&owner("ann")), [id("a")]);
        assert!(seen.forgive(&owner("ann"), &id("a")) && !seen.forgive(&owner("ann"), &id("a")));
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut seen = Seen::default();
        for number in 0..=MOST_SEEN {
            seen.note(&owner("ann"), &id(&format!("s{number}")));
        }
        seen.lose_all();
        assert!(!seen.is_lost(&owner("ann"), &id("s0")));
        assert!(seen.is_lost(&owner("ann"), &id("s1")));
        assert_eq!(seen.lost_by(&owner("ann")).len(), MOST_SEEN);
    }
}
