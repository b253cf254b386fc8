//! Which sessions a front has seen, so that those of a keeper that died are answered for by name
//! and never replaced in silence.
//!
//! Each owner's are kept apart: whatever one caller does, what is known of another's sessions
//! stays. Sessions that live are kept without a bound of this room, because the keeper bounds them;
//! those that ended unnoticed are found by comparing with the keeper's list when an owner's have
//! become many. Those of keepers that died are bounded, and the oldest are forgotten first.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use crate::session::{ExecutionHandle, Principal, SessionId};

/// Lost sessions of one owner that are remembered, and executions. A lost one beyond that looks
/// unknown.
const MAX_PER_OWNER: usize = 1_000;
/// Sessions of one owner that are taken to live before the keeper is asked which of them do.
const MAX_UNCHECKED: usize = 1_000;

/// What is known of sessions without asking.
#[derive(Default)]
pub(super) struct Seen {
    owners: HashMap<Principal, OfOwner>,
    /// Counts what was noted, so that a list of the keeper is not held against what is newer.
    clock: u64,
}

/// A moment between two notes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Noted(u64);

struct OfOwner {
    /// Of the keeper that lives, with when each was noted last.
    present: HashMap<SessionId, u64>,
    /// How many may be present before they are compared with the keeper's list.
    unchecked: usize,
    /// Of keepers that died.
    lost: Bounded<SessionId, ()>,
    /// The sessions of executions that were told of.
    executions: Bounded<ExecutionHandle, SessionId>,
}

impl Default for OfOwner {
    fn default() -> OfOwner {
        let (present, lost, executions) = (HashMap::new(), Bounded::default(), Bounded::default());
        OfOwner {
            present,
            unchecked: MAX_UNCHECKED,
            lost,
            executions,
        }
    }
}

impl OfOwner {
    fn is_empty(&self) -> bool {
        self.present.is_empty() && self.lost.items.is_empty() && self.executions.items.is_empty()
    }
}

impl Seen {
    /// Remembers a session that exists.
    pub(super) fn note(&mut self, owner: &Principal, id: &SessionId) {
        self.clock += 1;
        let now = self.clock;
        self.of(owner).present.insert(id.clone(), now);
    }

    /// Tells whether an owner's sessions are so many that the keeper should be asked which of them
    /// exist, and what the time is.
    pub(super) fn must_check(&self, owner: &Principal) -> Option<Noted> {
        let of = self.owners.get(owner)?;
        (of.present.len() > of.unchecked).then_some(Noted(self.clock))
    }

    /// Forgets the sessions of an owner that the keeper does not know, as far as they were noted
    /// until `asked`.
    pub(super) fn check(&mut self, owner: &Principal, known: &HashSet<&SessionId>, asked: Noted) {
        let of = self.of(owner);
        of.present
            .retain(|id, noted| *noted > asked.0 || known.contains(id));
        of.unchecked = MAX_UNCHECKED.max(2 * of.present.len());
        self.tidy(owner);
    }

    /// Remembers which session an execution belongs to.
    pub(super) fn note_execution(
        &mut self,
        owner: &Principal,
        handle: &ExecutionHandle,
        id: &SessionId,
    ) {
        let executions = &mut self.of(owner).executions;
        executions.add(handle.clone(), id.clone());
        executions.shrink_to(MAX_PER_OWNER);
    }

    pub(super) fn session_of(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
    ) -> Option<SessionId> {
        self.owners.get(owner)?.executions.get(handle).cloned()
    }

    /// The keeper has died, and all its sessions with it.
    pub(super) fn lose_all(&mut self) {
        for of in self.owners.values_mut() {
            let mut present: Vec<_> = std::mem::take(&mut of.present).into_iter().collect();
            present.sort_by_key(|(_, noted)| *noted);
            let newly_lost = present.len();
            present.into_iter().for_each(|(id, _)| of.lost.add(id, ()));
            // What lived until now is answered for, however much it is.
            of.lost.shrink_to(MAX_PER_OWNER.max(newly_lost));
            of.unchecked = MAX_UNCHECKED;
        }
    }

    /// A session was lost while it was asked for something, whether or not it had been seen.
    pub(super) fn lose(&mut self, owner: &Principal, id: &SessionId) {
        let of = self.of(owner);
        of.present.remove(id);
        let most = MAX_PER_OWNER.max(of.lost.items.len());
        of.lost.add(id.clone(), ());
        of.lost.shrink_to(most);
    }

    pub(super) fn is_lost(&self, owner: &Principal, id: &SessionId) -> bool {
        self.owners
            .get(owner)
            .is_some_and(|of| of.lost.get(id).is_some())
    }

    /// Returns whether the session was lost, and lets its id be used anew.
    pub(super) fn forgive(&mut self, owner: &Principal, id: &SessionId) -> bool {
        let was_lost = self
            .owners
            .get_mut(owner)
            .is_some_and(|of| of.lost.remove(id));
        self.tidy(owner);
        was_lost
    }

    /// Forgets a session that was closed.
    pub(super) fn forget(&mut self, owner: &Principal, id: &SessionId) {
        if let Some(of) = self.owners.get_mut(owner) {
            of.present.remove(id);
        }
        self.tidy(owner);
    }

    /// Names what an owner has lost.
    pub(super) fn lost_by(&self, owner: &Principal) -> Vec<SessionId> {
        self.owners
            .get(owner)
            .map(|of| of.lost.items.keys().cloned().collect())
            .unwrap_or_default()
    }

    fn of(&mut self, owner: &Principal) -> &mut OfOwner {
        self.owners.entry(owner.clone()).or_default()
    }

    fn tidy(&mut self, owner: &Principal) {
        if self.owners.get(owner).is_some_and(OfOwner::is_empty) {
            self.owners.remove(owner);
        }
    }
}

/// A map that can forget what was added first.
struct Bounded<K, V> {
    items: HashMap<K, (u64, V)>,
    /// The keys of `items` in the order of arrival.
    order: BTreeMap<u64, K>,
    next: u64,
}

impl<K, V> Default for Bounded<K, V> {
    fn default() -> Bounded<K, V> {
        Bounded {
            items: HashMap::new(),
            order: BTreeMap::new(),
            next: 0,
        }
    }
}

impl<K: Clone + Eq + Hash, V> Bounded<K, V> {
    fn get(&self, key: &K) -> Option<&V> {
        self.items.get(key).map(|(_, value)| value)
    }

    /// Adds an item, as the newest one.
    fn add(&mut self, key: K, value: V) {
        self.remove(&key);
        self.next += 1;
        self.order.insert(self.next, key.clone());
        self.items.insert(key, (self.next, value));
    }

    fn remove(&mut self, key: &K) -> bool {
        let removed = self.items.remove(key);
        removed
            .map(|(place, _)| self.order.remove(&place))
            .is_some()
    }

    fn shrink_to(&mut self, most: usize) {
        while self.order.len() > most {
            if let Some((_, oldest)) = self.order.pop_first() {
                self.items.remove(&oldest);
            }
        }
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
        assert!(
            !seen.is_lost(&owner("ann"), &id("closed")),
            "what was closed is not missed"
        );
        assert!(
            !seen.is_lost(&owner("bob"), &id("a")),
            "another owner's id is another session"
        );
        assert_eq!(seen.lost_by(&owner("ann")), [id("a")]);
        assert!(seen.forgive(&owner("ann"), &id("a")) && !seen.forgive(&owner("ann"), &id("a")));
        assert!(
            seen.owners.is_empty(),
            "an owner without a session leaves nothing"
        );
    }

    #[test]
    fn one_caller_cannot_push_out_what_another_has() {
        let mut seen = Seen::default();
        let handle: ExecutionHandle = "0123456789abcdef0123456789abcdef".parse().unwrap();
        seen.note(&owner("ann"), &id("a"));
        seen.note_execution(&owner("ann"), &handle, &id("a"));
        for number in 0..20 * MAX_PER_OWNER {
            let session = id(&format!("s{number}"));
            seen.note(&owner("bob"), &session);
            seen.note_execution(
                &owner("bob"),
                &format!("{number:032x}").parse().unwrap(),
                &session,
            );
            seen.lose(&owner("bob"), &session);
        }
        seen.lose_all();
        assert!(seen.is_lost(&owner("ann"), &id("a")));
        assert_eq!(seen.session_of(&owner("ann"), &handle), Some(id("a")));
        assert_eq!(
            seen.session_of(&owner("bob"), &handle),
            None,
            "a handle is its owner's"
        );
        assert_eq!(
            seen.lost_by(&owner("bob")).len(),
            MAX_PER_OWNER,
            "the control: a caller's own are bounded"
        );
    }

    #[test]
    fn opening_and_closing_sessions_pushes_out_none_that_lives() {
        let mut seen = Seen::default();
        seen.note(&owner("ann"), &id("lives"));
        for number in 0..20 * MAX_PER_OWNER {
            let session = id(&format!("s{number}"));
            seen.note(&owner("ann"), &session);
            seen.forget(&owner("ann"), &session);
        }
        assert_eq!(
            seen.owners[&owner("ann")].present.len(),
            1,
            "what was removed leaves"
        );
        seen.lose_all();
        assert_eq!(seen.lost_by(&owner("ann")), [id("lives")]);
    }

    #[test]
    fn all_that_lived_is_lost_however_many_and_the_oldest_losses_give_way() {
        let mut seen = Seen::default();
        seen.lose(&owner("ann"), &id("before"));
        for number in 0..=MAX_PER_OWNER {
            seen.note(&owner("ann"), &id(&format!("s{number}")));
        }
        seen.lose_all();
        assert!(!seen.is_lost(&owner("ann"), &id("before")));
        assert!(
            (0..=MAX_PER_OWNER)
                .all(|number| seen.is_lost(&owner("ann"), &id(&format!("s{number}"))))
        );
    }

    #[test]
    fn sessions_that_ended_unnoticed_leave_when_the_keeper_was_asked() {
        let mut seen = Seen::default();
        let ann = owner("ann");
        for number in 0..=MAX_UNCHECKED {
            assert_eq!(seen.must_check(&ann), None);
            seen.note(&ann, &id(&format!("s{number}")));
        }
        let asked = seen.must_check(&ann).unwrap();
        seen.note(&ann, &id("newer"));
        seen.check(&ann, &HashSet::from([&id("s7")]), asked);
        let mut left: Vec<_> = seen.owners[&ann].present.keys().cloned().collect();
        left.sort();
        assert_eq!(left, [id("newer"), id("s7")]);
        assert_eq!(seen.must_check(&ann), None);
    }
}
