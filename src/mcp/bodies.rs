//! Bytes of message bodies under way, shared fairly among callers.
//!
//! A request takes its bytes before it reads them and gives them back when it was answered. One
//! caller may hold half as much as is left for everybody else: alone a third of all, with others
//! less. A little is every caller's own: however many bodies others leave unfinished, there is room
//! for a caller's small messages.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes that every caller may hold, whatever others do.
const OWN: usize = 256 * 1024;

/// All bodies under way.
pub(super) struct Bodies {
    most: usize,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    all: usize,
    by_caller: HashMap<String, usize>,
}

/// Why a body must wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Crowded {
    /// The caller has too much under way.
    ByCaller,
    /// All callers together have.
    ByOthers,
}

impl Bodies {
    pub(super) fn new(most: usize) -> Arc<Bodies> {
        Arc::new(Bodies {
            most,
            held: Mutex::default(),
        })
    }

    /// Begins a body, of which nothing is held yet.
    pub(super) fn begin(self: &Arc<Bodies>, principal: &str) -> BodyBytes {
        BodyBytes {
            bodies: self.clone(),
            principal: principal.to_owned(),
            size: 0,
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of one body. They are given back when this is dropped.
pub(super) struct BodyBytes {
    bodies: Arc<Bodies>,
    principal: String,
    size: usize,
}

impl BodyBytes {
    /// Takes as many bytes as are missing to `size`.
    pub(super) fn grow(&mut self, size: usize) -> Result<(), Crowded> {
        let more = size.saturating_sub(self.size);
        if more == 0 {
            return Ok(());
        }
        let most = self.bodies.most;
        let mut held = self.bodies.held();
        let own = held.by_caller.get(&self.principal).copied().unwrap_or(0) + more;
        if own > OWN {
            if own > most / 3 {
                return Err(Crowded::ByCaller);
            }
            if own > most.saturating_sub(held.all + more) / 2 {
                return Err(Crowded::ByOthers);
            }
        }
        held.all += more;
        held.by_caller.insert(self.principal.clone(), own);
        self.size = size;
        Ok(())
    }
}

impl Drop for BodyBytes {
    fn drop(&mut self) {
        let mut held = self.bodies.held();
        held.all -= self.size;
        if let Entry::Occupied(mut own) = held.by_caller.entry(std::mem::take(&mut self.principal))
        {
            *own.get_mut() -= self.size;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(bodies: &Arc<Bodies>, principal: &str, size: usize) -> Result<BodyBytes, Crowded> {
        let mut body = bodies.begin(principal);
        body.grow(size).map(|()| body)
    }

    #[test]
    fn one_caller_has_a_third_and_it_comes_back() {
        let bodies = Bodies::new(300 * OWN);
        let held = (0..10)
            .map(|_| take(&bodies, "a", 10 * OWN).unwrap())
            .collect::<Vec<_>>();
        assert_eq!(take(&bodies, "a", 1).err(), Some(Crowded::ByCaller));
        assert!(
            take(&bodies, "b", 50 * OWN).is_ok(),
            "the control: another caller"
        );
        drop(held);
        assert!(take(&bodies, "a", 100 * OWN).is_ok());
        assert!(bodies.held().by_caller.is_empty());
        assert_eq!(bodies.held().all, 0);
    }

    #[test]
    fn however_many_callers_hold_all_they_can_another_has_room_for_small_messages() {
        let bodies = Bodies::new(100 * OWN);
        let mut held = Vec::new();
        for caller in 0..100 {
            while let Ok(body) = take(&bodies, &format!("{caller}"), OWN) {
                held.push(body);
            }
        }
        assert!(bodies.held().all <= 200 * OWN);
        assert_eq!(
            take(&bodies, "newcomer", OWN + 1).err(),
            Some(Crowded::ByOthers)
        );
        let own = take(&bodies, "newcomer", OWN).unwrap();
        assert_eq!(take(&bodies, "newcomer", 1).err(), Some(Crowded::ByOthers));
        drop((held, own));
        assert!(take(&bodies, "newcomer", OWN + 1).is_ok(), "the control");
    }

    #[test]
    fn a_body_grows_by_what_is_missing_and_stays_as_it_was_when_it_may_not() {
        let bodies = Bodies::new(3 * OWN);
        let mut body = bodies.begin("a");
        for size in [10, 10, 5, 60] {
            body.grow(size).unwrap();
        }
        assert_eq!(bodies.held().all, 60);
        assert_eq!(body.grow(OWN + 1), Err(Crowded::ByCaller));
        assert_eq!(bodies.held().all, 60);
        drop(body);
        assert_eq!(bodies.held().all, 0);
    }
}
