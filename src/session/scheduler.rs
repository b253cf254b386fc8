//! The scheduler of cells: decides which cell runs next when more are submitted than may run
//! concurrently.
//!
//! Principals take turns. A free run permit goes to the waiting principal with the fewest
//! running cells; among equals, to the one that has waited longest for its turn. A principal
//! without a running cell does not wait for others to finish: the same number of permits again is
//! reserved for the first cells of principals. A principal that floods the server with long cells
//! therefore does not delay others.
//!
//! A permit is never left unused while a cell waits.
//!
//! `RunQueue` decides, without time or tasks; `FairScheduler` connects it with the waiting tasks.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Principal;

/// Cells that may wait for a permit in the whole server. Each session has at most one here; its
/// other cells wait behind it in the session's own queue.
const MAX_WAITING: usize = 4096;
/// Cells of one principal that may wait.
const MAX_WAITING_OF_ONE: usize = 256;
/// The longest retry delay suggested to a rejected caller.
const MAX_HINT_TIME: Duration = Duration::from_secs(60);

/// The run permits, and the queue of waiting cells.
#[derive(Clone)]
pub(super) struct FairScheduler(Arc<Mutex<SchedulerState>>);

struct SchedulerState {
    queue: RunQueue,
    next_ticket: u64,
    waiting: HashMap<u64, oneshot::Sender<()>>,
    /// Moving estimate of how long a permit is held.
    usual: Duration,
}

/// A run permit for a cell, or a ticket for one. It is returned when dropped.
pub(super) struct RunPermit {
    scheduler: FairScheduler,
    owner: Principal,
    ticket: u64,
    /// Fires when the permit is granted; `None` once it is.
    grant: Option<oneshot::Receiver<()>>,
    since: Instant,
}

/// Too many cells are waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Overloaded {
    pub(super) waiting: usize,
    /// Estimated time until there is room.
    pub(super) retry_after: Duration,
}

impl FairScheduler {
    /// Creates a scheduler for this many concurrent cells; zero means unlimited.
    pub(super) fn new(permits: usize) -> FairScheduler {
        let queue = RunQueue::new(if permits == 0 { usize::MAX } else { permits });
        FairScheduler(Arc::new(Mutex::new(SchedulerState {
            queue,
            next_ticket: 0,
            waiting: HashMap::new(),
            usual: Duration::ZERO,
        })))
    }

    /// Changes the number of concurrent cells. Running cells continue; if the number is lowered,
    /// waiting cells start once enough of them have ended.
    pub(super) fn set_permits(&self, permits: usize) {
        let mut state = self.state();
        for next in state
            .queue
            .set_permits(if permits == 0 { usize::MAX } else { permits })
        {
            if let Some(grant) = state.waiting.remove(&next) {
                // A ticket that was dropped in the meantime returns the permit.
                let _ = grant.send(());
            }
        }
    }

    /// Requests a permit.
    pub(super) fn ask(&self, owner: &Principal) -> Result<RunPermit, Overloaded> {
        let mut state = self.state();
        if state.queue.is_overloaded_for(owner) {
            return Err(state.overloaded());
        }
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let grant = if state.queue.arrive(owner, ticket) {
            None
        } else {
            let (sender, grant) = oneshot::channel();
            state.waiting.insert(ticket, sender);
            Some(grant)
        };
        drop(state);
        Ok(RunPermit {
            scheduler: self.clone(),
            owner: owner.clone(),
            ticket,
            grant,
            since: Instant::now(),
        })
    }

    /// Returns how many cells run and how many wait for a permit.
    pub(super) fn load(&self) -> (usize, usize) {
        let state = self.state();
        (state.queue.running, state.queue.waiting)
    }

    fn state(&self) -> MutexGuard<'_, SchedulerState> {
        self.0
            .lock()
            .expect("nothing panics while it holds the queue")
    }
}

impl RunPermit {
    /// Returns whether the permit was granted.
    pub(super) fn is_granted(&self) -> bool {
        self.grant.is_none()
    }

    /// Waits for the permit. Returns at once if it was already granted.
    pub(super) async fn granted(&mut self) {
        if let Some(grant) = &mut self.grant {
            // The queue holds the sender until it grants the permit.
            let _ = grant.await;
            self.grant = None;
            self.since = Instant::now();
        }
    }
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        let mut state = self.scheduler.state();
        if state.waiting.remove(&self.ticket).is_some() {
            state.queue.leave(&self.owner, self.ticket);
            return;
        }
        // It holds a permit, even if it was dropped before it noticed.
        if self.grant.is_none() {
            state.usual = (state.usual * 7 + self.since.elapsed()) / 8;
        }
        if let Some(next) = state.queue.free(&self.owner)
            && let Some(grant) = state.waiting.remove(&next)
        {
            // A ticket that was dropped in the meantime returns the permit.
            let _ = grant.send(());
        }
    }
}

impl SchedulerState {
    fn overloaded(&self) -> Overloaded {
        let waiting = self.queue.waiting;
        let rounds = u32::try_from(waiting / self.queue.permits.max(1) + 1).unwrap_or(u32::MAX);
        let hint = self
            .usual
            .saturating_mul(rounds)
            .clamp(Duration::from_secs(1), MAX_HINT_TIME);
        Overloaded {
            waiting,
            retry_after: hint,
        }
    }
}

/// The queue of waiting principals.
#[derive(Debug)]
struct RunQueue {
    permits: usize,
    running: usize,
    /// Number of running cells per principal, for those that have any.
    running_of: HashMap<Principal, usize>,
    waiting: usize,
    /// Waiting principals, in the order of their turns.
    order: VecDeque<Principal>,
    tickets: HashMap<Principal, VecDeque<u64>>,
}

impl RunQueue {
    fn new(permits: usize) -> RunQueue {
        RunQueue {
            permits,
            running: 0,
            running_of: HashMap::new(),
            waiting: 0,
            order: VecDeque::new(),
            tickets: HashMap::new(),
        }
    }

    fn is_overloaded_for(&self, owner: &Principal) -> bool {
        let own = self.tickets.get(owner).map_or(0, VecDeque::len);
        !self.has_permit_for(owner) && (self.waiting >= MAX_WAITING || own >= MAX_WAITING_OF_ONE)
    }

    fn has_permit_for(&self, owner: &Principal) -> bool {
        let permits = if self.runs_of(owner) == 0 {
            self.permits.saturating_mul(2)
        } else {
            self.permits
        };
        self.running < permits
    }

    fn runs_of(&self, owner: &Principal) -> usize {
        self.running_of.get(owner).copied().unwrap_or(0)
    }

    fn begin(&mut self, owner: &Principal) {
        self.running += 1;
        *self.running_of.entry(owner.clone()).or_default() += 1;
    }

    /// Takes a permit, or joins the queue. Returns whether a permit was free.
    fn arrive(&mut self, owner: &Principal, ticket: u64) -> bool {
        if self.has_permit_for(owner) {
            self.begin(owner);
            return true;
        }
        let tickets = self.tickets.entry(owner.clone()).or_default();
        if tickets.is_empty() {
            self.order.push_back(owner.clone());
        }
        tickets.push_back(ticket);
        self.waiting += 1;
        false
    }

    /// Leaves the queue.
    fn leave(&mut self, owner: &Principal, ticket: u64) {
        let Some(tickets) = self.tickets.get_mut(owner) else {
            return;
        };
        let before = tickets.len();
        tickets.retain(|known| *known != ticket);
        self.waiting -= before - tickets.len();
        if tickets.is_empty() {
            self.tickets.remove(owner);
            self.order.retain(|known| known != owner);
        }
    }

    /// Changes the number of permits. Returns the tickets that receive the new ones.
    fn set_permits(&mut self, permits: usize) -> Vec<u64> {
        self.permits = permits;
        std::iter::from_fn(|| self.grant_next()).collect()
    }

    /// Returns a permit. The result is the ticket that receives it, if a cell waits and the number
    /// of permits was not lowered.
    fn free(&mut self, owner: &Principal) -> Option<u64> {
        self.running -= 1;
        if let Entry::Occupied(mut runs) = self.running_of.entry(owner.clone()) {
            *runs.get_mut() -= 1;
            if *runs.get() == 0 {
                runs.remove();
            }
        }
        self.grant_next()
    }

    /// Returns the next ticket, if there is a permit for it.
    fn grant_next(&mut self) -> Option<u64> {
        // The first of those with the fewest running cells.
        let next = (0..self.order.len()).min_by_key(|at| self.runs_of(&self.order[*at]))?;
        if !self.has_permit_for(&self.order[next]) {
            return None;
        }
        let owner = self.order.remove(next)?;
        let tickets = self
            .tickets
            .get_mut(&owner)
            .expect("a waiting principal has a ticket");
        let ticket = tickets
            .pop_front()
            .expect("a waiting principal has a ticket");
        let has_more = !tickets.is_empty();
        self.begin(&owner);
        self.waiting -= 1;
        if has_more {
            self.order.push_back(owner);
        } else {
            self.tickets.remove(&owner);
        }
        Some(ticket)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn principal(number: usize) -> Principal {
        Principal(format!("p{number}"))
    }

    #[test]
    fn a_principal_that_runs_nothing_does_not_wait_for_one_that_floods() {
        let (flood, other, third) = (principal(0), principal(1), principal(2));
        let mut queue = RunQueue::new(1);
        assert!(queue.arrive(&flood, 0));
        assert!(!queue.arrive(&flood, 1) && !queue.arrive(&flood, 2));
        assert!(
            queue.arrive(&other, 10),
            "as many permits again for those that run nothing"
        );
        assert!(!queue.arrive(&other, 11), "a second cell waits");
        assert!(
            !queue.arrive(&third, 20),
            "there are twice as many permits, and no more"
        );
        assert_eq!(
            queue.free(&flood),
            Some(1),
            "both run nothing now, and the flood waited first"
        );
        assert_eq!(
            queue.free(&flood),
            Some(20),
            "then it is the turn of the third"
        );
    }

    #[test]
    fn a_free_place_goes_to_whoever_runs_the_least_then_in_turns() {
        let (flood, other, third) = (principal(0), principal(1), principal(2));
        let mut queue = RunQueue::new(3);
        assert!((0..3).all(|ticket| queue.arrive(&flood, ticket)));
        assert!((3..6).all(|ticket| !queue.arrive(&flood, ticket)));
        assert!(queue.arrive(&other, 10) && queue.arrive(&third, 20));
        assert!(!queue.arrive(&other, 11) && !queue.arrive(&third, 21));
        // Five run on three places, so that two must end first.
        assert_eq!([queue.free(&flood), queue.free(&flood)], [None, None]);
        assert_eq!(queue.free(&flood), Some(3), "it runs nothing now");
        assert_eq!(queue.free(&flood), Some(4), "again");
        assert_eq!(queue.free(&third), Some(21), "it runs nothing now");
        assert_eq!(queue.free(&third), Some(11), "one each: the next in turn");
    }

    #[test]
    fn who_leaves_the_line_is_not_called() {
        let mut queue = RunQueue::new(1);
        for (owner, ticket) in [(0, 0), (1, 1), (2, 2), (3, 3)] {
            queue.arrive(&principal(owner), ticket);
        }
        queue.leave(&principal(2), 2);
        queue.leave(&principal(2), 2);
        assert_eq!(queue.free(&principal(0)), Some(3));
        assert_eq!(
            (
                queue.free(&principal(1)),
                queue.free(&principal(3)),
                queue.running
            ),
            (None, None, 0)
        );
    }

    #[test]
    fn more_places_are_given_out_at_once_and_fewer_as_cells_end() {
        let (one, other) = (principal(0), principal(1));
        let mut queue = RunQueue::new(1);
        assert!(queue.arrive(&one, 0));
        for ticket in 1..=4 {
            assert!(!queue.arrive(&one, ticket));
        }
        assert_eq!(queue.set_permits(3), [1, 2]);
        assert_eq!((queue.running, queue.waiting), (3, 2));
        assert!(queue.set_permits(1).is_empty());
        assert!(
            !queue.arrive(&other, 10),
            "three run, which is more than two"
        );
        assert_eq!(
            queue.free(&one),
            None,
            "three ran, and two are still more than one"
        );
        assert_eq!(queue.free(&one), Some(10), "it runs nothing");
        assert_eq!(
            (queue.free(&one), queue.free(&other), queue.running),
            (Some(3), None, 1)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_is_passed_on_and_never_lost() {
        let scheduler = FairScheduler::new(1);
        let first = scheduler.ask(&principal(0)).unwrap();
        let mut second = scheduler.ask(&principal(0)).unwrap();
        let third = scheduler.ask(&principal(0)).unwrap();
        let mut fourth = scheduler.ask(&principal(0)).unwrap();
        assert!(first.is_granted() && !second.is_granted());
        drop(first);
        second.granted().await;
        drop(second);
        // It was granted a permit and did not notice.
        drop(third);
        fourth.granted().await;
        assert_eq!(scheduler.load(), (1, 0));
        drop(fourth);
        assert_eq!(scheduler.load(), (0, 0));
        assert!(scheduler.ask(&principal(0)).unwrap().is_granted());
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_that_is_too_long_turns_people_away_with_a_hint() {
        let scheduler = FairScheduler::new(1);
        let place = scheduler.ask(&principal(0)).unwrap();
        tokio::time::sleep(Duration::from_secs(8)).await;
        drop(place);
        let _place = scheduler.ask(&principal(0)).unwrap();
        let waiting = (0..MAX_WAITING_OF_ONE)
            .map(|_| scheduler.ask(&principal(0)).unwrap())
            .collect::<Vec<_>>();
        let overloaded = scheduler.ask(&principal(0)).err().unwrap();
        assert_eq!(
            overloaded,
            Overloaded {
                waiting: MAX_WAITING_OF_ONE,
                retry_after: MAX_HINT_TIME
            }
        );
        // Another principal still finds room.
        let other = scheduler.ask(&principal(1)).unwrap();
        drop((waiting, other));
        assert!(scheduler.ask(&principal(0)).is_ok());
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let scheduler = FairScheduler::new(0);
        let all = (0..1000)
            .map(|_| scheduler.ask(&principal(0)).unwrap())
            .collect::<Vec<_>>();
        assert!(all.iter().all(RunPermit::is_granted));
        assert_eq!(scheduler.load(), (1000, 0));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Arrive(usize),
        /// A waiting cell leaves the queue.
        Leave(usize),
        /// A running cell ends.
        Free(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            // The first principal floods.
            3 => Just(Step::Arrive(0)),
            2 => (0usize..5).prop_map(Step::Arrive),
            1 => (0usize..50).prop_map(Step::Leave),
            3 => (0usize..50).prop_map(Step::Free),
        ]
    }

    proptest! {
        #[test]
        fn nobody_starves_and_no_place_stays_free(
            steps in prop::collection::vec(step(), 0..400), permits in 1usize..6,
        ) {
            let mut queue = RunQueue::new(permits);
            let mut waiting: Vec<(usize, u64)> = Vec::new();
            let mut running: Vec<usize> = Vec::new();
            let runs_of = |running: &[usize], owner: usize| {
                running.iter().filter(|known| **known == owner).count()
            };
            // For each principal that waits and runs nothing: the permits granted since then.
            let mut called: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
            for (ticket, step) in steps.into_iter().enumerate() {
                let ticket = ticket as u64;
                match step {
                    Step::Arrive(owner) => {
                        if queue.arrive(&principal(owner), ticket) {
                            running.push(owner);
                        } else {
                            waiting.push((owner, ticket));
                        }
                    }
                    Step::Leave(place) if place < waiting.len() => {
                        let (owner, ticket) = waiting.remove(place);
                        queue.leave(&principal(owner), ticket);
                    }
                    Step::Free(place) if place < running.len() => {
                        let freed = running.remove(place);
                        if let Some(next) = queue.free(&principal(freed)) {
                            let place = waiting
                                .iter()
                                .position(|(_, ticket)| *ticket == next)
                                .expect("it waits");
                            let (owner, _) = waiting[place];
                            prop_assert!(
                                waiting[..place].iter().all(|(known, _)| *known != owner),
                                "first come, first served"
                            );
                            let least =
                                waiting.iter().map(|(known, _)| runs_of(&running, *known)).min();
                            prop_assert_eq!(
                                Some(runs_of(&running, owner)),
                                least,
                                "others run less"
                            );
                            waiting.remove(place);
                            running.push(owner);
                            called.remove(&owner);
                            for others in called.values_mut() {
                                prop_assert!(!others.contains(&owner), "called twice while another \
                                     one waited and ran nothing");
                                others.push(owner);
                            }
                        }
                    }
                    Step::Leave(_) | Step::Free(_) => {}
                }
                let idle = |owner: usize| {
                    runs_of(&running, owner) == 0
                        && waiting.iter().any(|(known, _)| *known == owner)
                };
                called.retain(|owner, _| idle(*owner));
                for owner in (0..5).filter(|owner| idle(*owner)) {
                    called.entry(owner).or_default();
                }
                prop_assert_eq!((queue.running, queue.waiting), (running.len(), waiting.len()));
                prop_assert!(
                    running.len() >= permits || waiting.is_empty(),
                    "a place is free although somebody waits"
                );
                prop_assert!(
                    called.is_empty() || running.len() >= 2 * permits,
                    "somebody without a cell waits"
                );
            }
        }
    }
}
