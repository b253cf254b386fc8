//! The sessions that a frontend knows, so that calls for those of a dead daemon are refused by name
//! and the sessions are never replaced silently.
//!
//! Each owner has a separate record, so one caller cannot displace what is known of another's
//! sessions. The number of live sessions is not bounded here, because the daemon bounds it;
//! sessions that ended without notice are found by comparison with the daemon's list when an owner
//! has many. The number of lost sessions is bounded, and the oldest are forgotten first.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;

use crate::session::{ExecutionHandle, Principal, SessionId};

/// Lost sessions, and executions, that are remembered for one owner. Older ones appear unknown.
const MAX_PER_OWNER: usize = 1_000;
/// Sessions of one owner that are assumed to exist before they are compared with the daemon's list.
const MAX_UNCHECKED: usize = 1_000;

/// The sessions that are known without asking the daemon.
#[derive(Default)]
pub(super) struct KnownSessions {
    owners: HashMap<Principal, OwnerSessions>,
    /// Counts additions, so that a list does not remove sessions that are newer than it.
    clock: u64,
}

/// When a list was requested, in terms of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ListedAt(u64);

struct OwnerSessions {
    /// Sessions of the present daemon, with the time of their last addition.
    present: HashMap<SessionId, u64>,
    /// The number of present sessions above which they are compared with the daemon's list.
    unchecked: usize,
    /// Sessions of dead daemons.
    lost: Bounded<SessionId, ()>,
    /// The sessions of executions.
    executions: Bounded<ExecutionHandle, SessionId>,
}

impl Default for OwnerSessions {
    fn default() -> OwnerSessions {
        let (present, lost, executions) = (HashMap::new(), Bounded::default(), Bounded::default());
        OwnerSessions {
            present,
            unchecked: MAX_UNCHECKED,
            lost,
            executions,
        }
    }
}

impl OwnerSessions {
    fn is_empty(&self) -> bool {
        self.present.is_empty() && self.lost.items.is_empty() && self.executions.items.is_empty()
    }
}

impl KnownSessions {
    /// Remembers a session that exists.
    pub(super) fn add(&mut self, owner: &Principal, id: &SessionId) {
        self.clock += 1;
        let now = self.clock;
        self.of(owner).present.insert(id.clone(), now);
    }

    /// Returns the present time if an owner has so many sessions that they should be compared with
    /// the daemon's list.
    pub(super) fn needs_check(&self, owner: &Principal) -> Option<ListedAt> {
        let of = self.owners.get(owner)?;
        (of.present.len() > of.unchecked).then_some(ListedAt(self.clock))
    }

    /// Forgets the sessions of an owner that the daemon does not know and that were added before
    /// its list was requested.
    pub(super) fn check(
        &mut self,
        owner: &Principal,
        known: &HashSet<&SessionId>,
        listed_at: ListedAt,
    ) {
        let of = self.of(owner);
        of.present
            .retain(|id, added| *added > listed_at.0 || known.contains(id));
        of.unchecked = MAX_UNCHECKED.max(2 * of.present.len());
        self.tidy(owner);
    }

    /// Remembers which session an execution belongs to.
    pub(super) fn add_execution(
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

    /// Marks all present sessions as lost, because their daemon has died.
    pub(super) fn mark_all_lost(&mut self) {
        for of in self.owners.values_mut() {
            let mut present: Vec<_> = std::mem::take(&mut of.present).into_iter().collect();
            present.sort_by_key(|(_, added)| *added);
            let newly_lost = present.len();
            present.into_iter().for_each(|(id, _)| of.lost.add(id, ()));
            // Sessions that were lost together are all remembered, even above the limit.
            of.lost.shrink_to(MAX_PER_OWNER.max(newly_lost));
            of.unchecked = MAX_UNCHECKED;
        }
    }

    /// Marks a session as lost that was in use when the daemon died, whether or not it was known.
    pub(super) fn mark_lost(&mut self, owner: &Principal, id: &SessionId) {
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

    /// Returns whether the session was lost, and allows its id to be used again.
    pub(super) fn clear_lost(&mut self, owner: &Principal, id: &SessionId) -> bool {
        let was_lost = self
            .owners
            .get_mut(owner)
            .is_some_and(|of| of.lost.remove(id));
        self.tidy(owner);
        was_lost
    }

    /// Forgets a session that was closed.
    pub(super) fn remove(&mut self, owner: &Principal, id: &SessionId) {
        if let Some(of) = self.owners.get_mut(owner) {
            of.present.remove(id);
        }
        self.tidy(owner);
    }

    /// Returns the lost sessions of an owner.
    pub(super) fn lost_sessions(&self, owner: &Principal) -> Vec<SessionId> {
        self.owners
            .get(owner)
            .map(|of| of.lost.items.keys().cloned().collect())
            .unwrap_or_default()
    }

    fn of(&mut self, owner: &Principal) -> &mut OwnerSessions {
        self.owners.entry(owner.clone()).or_default()
    }

    fn tidy(&mut self, owner: &Principal) {
        if self.owners.get(owner).is_some_and(OwnerSessions::is_empty) {
            self.owners.remove(owner);
        }
    }
}

/// A map that can drop its oldest items.
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

    /// Adds an item as the newest one.
    fn add(&mut self, key: K, value: V) {
        self.remove(&key);
        self.next += 1;
        self.order.insert(self.next, key.clone());
        self.items.insert(key, (self.next, value));
    }

    fn remove(&mut self, key: &K) -> bool {
        let removed = self.items.remove(key);
        removed
            .map(|(number, _)| self.order.remove(&number))
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
    fn what_was_there_when_the_daemon_died_is_lost_until_it_is_forgiven() {
        let mut known_sessions = KnownSessions::default();
        known_sessions.add(&owner("ann"), &id("a"));
        known_sessions.add(&owner("ann"), &id("closed"));
        known_sessions.remove(&owner("ann"), &id("closed"));
        assert!(!known_sessions.is_lost(&owner("ann"), &id("a")));
        known_sessions.mark_all_lost();
        assert!(known_sessions.is_lost(&owner("ann"), &id("a")));
        assert!(
            !known_sessions.is_lost(&owner("ann"), &id("closed")),
            "what was closed is not missed"
        );
        assert!(
            !known_sessions.is_lost(&owner("bob"), &id("a")),
            "another owner's id is another session"
        );
        assert_eq!(known_sessions.lost_sessions(&owner("ann")), [id("a")]);
        assert!(
            known_sessions.clear_lost(&owner("ann"), &id("a"))
                && !known_sessions.clear_lost(&owner("ann"), &id("a"))
        );
        assert!(
            known_sessions.owners.is_empty(),
            "an owner without a session leaves nothing"
        );
    }

    #[test]
    fn one_caller_cannot_push_out_what_another_has() {
        let mut known_sessions = KnownSessions::default();
        let handle: ExecutionHandle = "0123456789abcdef0123456789abcdef".parse().unwrap();
        known_sessions.add(&owner("ann"), &id("a"));
        known_sessions.add_execution(&owner("ann"), &handle, &id("a"));
        for number in 0..20 * MAX_PER_OWNER {
            let session = id(&format!("s{number}"));
            known_sessions.add(&owner("bob"), &session);
            known_sessions.add_execution(
                &owner("bob"),
                &format!("{number:032x}").parse().unwrap(),
                &session,
            );
            known_sessions.mark_lost(&owner("bob"), &session);
        }
        known_sessions.mark_all_lost();
        assert!(known_sessions.is_lost(&owner("ann"), &id("a")));
        assert_eq!(
            known_sessions.session_of(&owner("ann"), &handle),
            Some(id("a"))
        );
        assert_eq!(
            known_sessions.session_of(&owner("bob"), &handle),
            None,
            "a handle is its owner's"
        );
        assert_eq!(
            known_sessions.lost_sessions(&owner("bob")).len(),
            MAX_PER_OWNER,
            "the control: a caller's own are bounded"
        );
    }

    #[test]
    fn opening_and_closing_sessions_pushes_out_none_that_lives() {
        let mut known_sessions = KnownSessions::default();
        known_sessions.add(&owner("ann"), &id("lives"));
        for number in 0..20 * MAX_PER_OWNER {
            let session = id(&format!("s{number}"));
            known_sessions.add(&owner("ann"), &session);
            known_sessions.remove(&owner("ann"), &session);
        }
        assert_eq!(
            known_sessions.owners[&owner("ann")].present.len(),
            1,
            "what was removed leaves"
        );
        known_sessions.mark_all_lost();
        assert_eq!(known_sessions.lost_sessions(&owner("ann")), [id("lives")]);
    }

    #[test]
    fn all_that_lived_is_lost_however_many_and_the_oldest_losses_give_way() {
        let mut known_sessions = KnownSessions::default();
        known_sessions.mark_lost(&owner("ann"), &id("before"));
        for number in 0..=MAX_PER_OWNER {
            known_sessions.add(&owner("ann"), &id(&format!("s{number}")));
        }
        known_sessions.mark_all_lost();
        assert!(!known_sessions.is_lost(&owner("ann"), &id("before")));
        assert!(
            (0..=MAX_PER_OWNER)
                .all(|number| known_sessions.is_lost(&owner("ann"), &id(&format!("s{number}"))))
        );
    }

    #[test]
    fn sessions_that_ended_unnoticed_leave_when_the_daemon_was_asked() {
        let mut known_sessions = KnownSessions::default();
        let ann = owner("ann");
        for number in 0..=MAX_UNCHECKED {
            assert_eq!(known_sessions.needs_check(&ann), None);
            known_sessions.add(&ann, &id(&format!("s{number}")));
        }
        let listed_at = known_sessions.needs_check(&ann).unwrap();
        known_sessions.add(&ann, &id("newer"));
        known_sessions.check(&ann, &HashSet::from([&id("s7")]), listed_at);
        let mut left: Vec<_> = known_sessions.owners[&ann]
            .present
            .keys()
            .cloned()
            .collect();
        left.sort();
        assert_eq!(left, [id("newer"), id("s7")]);
        assert_eq!(known_sessions.needs_check(&ann), None);
    }
}
