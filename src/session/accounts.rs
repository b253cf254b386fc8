//! Resource usage per principal, and the quotas on it.
//!
//! Counts of the last minute and processor time of the last window are kept in slots, so that an
//! account has a fixed size regardless of its owner's activity. Processor time, memory and files
//! are read from the kernel through the gauges of the owner's sandboxes: on request, at most once a
//! second, and a last time before a sandbox is destroyed. No value here comes from inside a
//! sandbox.
//!
//! Memory counts as it is used, not as it is allowed: every session has the same limit, so a sum of
//! limits would only count sessions again. A running session can therefore exceed the quota, by at
//! most its own limit. No session is killed because of a quota.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{Principal, Refused};
pub use crate::quotas::Quotas;
use crate::sandbox::Gauge;

/// Number of slots in a window. Counted amounts leave the window one slot at a time, up to one slot
/// late.
const SLOTS: u32 = 60;
const MINUTE: Duration = Duration::from_secs(60);
/// Maximum age of a reading of the gauges.
const FRESH_FOR: Duration = Duration::from_secs(1);
/// Number of accounts above which empty accounts are removed.
const MANY_ACCOUNTS: usize = 1000;

/// New caller limits that a server applies to existing sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitSetup {
    pub quotas: Quotas,
    /// Cells that run concurrently in the whole server; zero means unlimited.
    pub max_running: usize,
}

/// One of the quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Quota {
    Sessions,
    /// In bytes.
    Memory,
    /// In seconds.
    ProcessorTime,
    CellsPerMinute,
    StartsPerMinute,
    /// In bytes.
    Stored,
}

impl Quota {
    /// Returns the word used in structured results.
    pub fn name(self) -> &'static str {
        match self {
            Quota::Sessions => "sessions",
            Quota::Memory => "memory",
            Quota::ProcessorTime => "cpu_seconds",
            Quota::CellsPerMinute => "cells_per_minute",
            Quota::StartsPerMinute => "starts_per_minute",
            Quota::Stored => "stored_bytes",
        }
    }
}

/// Current usage of one principal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub sessions: usize,
    pub memory: u64,
    /// In the last window.
    pub processor_time: Duration,
    /// In the last minute.
    pub cells: u64,
    pub starts: u64,
    pub stored: u64,
}

/// The accounts of all principals.
pub(super) struct Accounts {
    quotas: Mutex<Quotas>,
    epoch: Instant,
    accounts: Mutex<HashMap<Principal, Account>>,
}

struct Account {
    cells: Window,
    starts: Window,
    /// In microseconds.
    processor_time: Window,
    gauges: HashMap<u64, Reading>,
    read: Option<Instant>,
}

/// The last reading of a gauge.
struct Reading {
    gauge: Arc<dyn Gauge>,
    processor_time: Duration,
    memory: u64,
    stored: u64,
}

impl Accounts {
    pub(super) fn new(quotas: Quotas) -> Accounts {
        Accounts {
            quotas: Mutex::new(quotas),
            epoch: Instant::now(),
            accounts: Mutex::default(),
        }
    }

    /// Changes the quotas. Earlier usage counts against the new ones.
    pub(super) fn set_quotas(&self, quotas: Quotas) {
        *self
            .quotas
            .lock()
            .expect("nothing panics while it holds the quotas") = quotas;
        for account in self.accounts().values_mut() {
            account.processor_time.set_width(quotas.processor_window);
        }
    }

    fn quotas(&self) -> Quotas {
        *self
            .quotas
            .lock()
            .expect("nothing panics while it holds the quotas")
    }

    /// Counts a sandbox against its owner until the guard is dropped.
    pub(super) fn follow(
        self: &Arc<Accounts>,
        owner: &Principal,
        number: u64,
        gauge: Arc<dyn Gauge>,
    ) -> Metered {
        // Usage from before this owner had the sandbox does not count.
        let reading = Reading {
            processor_time: gauge.processor_time(),
            memory: 0,
            stored: 0,
            gauge,
        };
        self.with(owner, |account, _| account.gauges.insert(number, reading));
        Metered {
            accounts: self.clone(),
            owner: owner.clone(),
            number,
        }
    }

    /// Reads the gauges of an owner, if a quota needs it and the last reading is too old.
    pub(super) fn refresh(&self, owner: &Principal) {
        let Quotas {
            memory,
            processor_time,
            stored,
            ..
        } = &self.quotas();
        if memory.is_some() || processor_time.is_some() || stored.is_some() {
            self.read(owner);
        }
    }

    fn read(&self, owner: &Principal) {
        let now = Instant::now();
        let gauges = self.with(owner, |account, _| {
            let is_fresh = account.read.is_some_and(|read| now - read < FRESH_FOR);
            if is_fresh {
                return Vec::new();
            }
            account.read = Some(now);
            account
                .gauges
                .iter()
                .map(|(number, reading)| (*number, reading.gauge.clone()))
                .collect()
        });
        // The kernel is queried without holding the lock.
        for (number, gauge) in gauges {
            let (processor_time, memory, stored) =
                (gauge.processor_time(), gauge.memory(), gauge.stored());
            self.with(owner, |account, at| {
                account.take_reading(number, processor_time, memory, stored, at)
            });
        }
    }

    /// Checks that more sandboxes may start, `lasting` of which become sessions beside the `live`
    /// ones. Counts nothing.
    pub(super) fn check_starts(&self, owner: &Principal, terms: Starts) -> Result<(), Refused> {
        self.with(owner, |account, at| self.may_start(account, at, &terms))
    }

    /// Like `check_starts`, and counts them.
    pub(super) fn count_starts(&self, owner: &Principal, terms: Starts) -> Result<(), Refused> {
        self.with(owner, |account, at| {
            self.may_start(account, at, &terms)?;
            account.starts.add(at, terms.sandboxes as u64);
            Ok(())
        })
    }

    /// Checks that cells may be submitted. Counts nothing.
    pub(super) fn check_cells(&self, owner: &Principal, cells: u64) -> Result<(), Refused> {
        self.with(owner, |account, at| self.may_run(account, at, cells))
    }

    /// Like `check_cells`, and counts them.
    pub(super) fn count_cells(&self, owner: &Principal, cells: u64) -> Result<(), Refused> {
        self.with(owner, |account, at| {
            self.may_run(account, at, cells)?;
            account.cells.add(at, cells);
            Ok(())
        })
    }

    /// Checks that more bytes may be kept outside of sandboxes.
    pub(super) fn check_stored(
        &self,
        owner: &Principal,
        kept: u64,
        more: u64,
    ) -> Result<(), Refused> {
        self.with(owner, |account, _| self.may_store(account, kept, more))
    }

    /// Returns how many more bytes an owner may store.
    pub(super) fn room_to_store(&self, owner: &Principal, kept: u64) -> u64 {
        let Some(limit) = self.quotas().stored else {
            return u64::MAX;
        };
        self.with(owner, |account, _| {
            limit.saturating_sub(account.stored() + kept)
        })
    }

    /// Returns an owner's usage. Fields that only the caller knows are left empty.
    pub(super) fn usage(&self, owner: &Principal) -> Usage {
        self.read(owner);
        self.with(owner, |account, at| Usage {
            sessions: 0,
            memory: account.memory(),
            processor_time: Duration::from_micros(account.processor_time.sum(at)),
            cells: account.cells.sum(at),
            starts: account.starts.sum(at),
            stored: account.stored(),
        })
    }

    fn may_start(
        &self,
        account: &mut Account,
        at: Duration,
        terms: &Starts,
    ) -> Result<(), Refused> {
        if let Some(limit) = self.quotas().sessions
            && terms.live + terms.lasting > limit
        {
            return Err(refused(
                Quota::Sessions,
                limit as u64,
                terms.live as u64,
                None,
            ));
        }
        if let Some(limit) = self.quotas().starts_per_minute {
            let room = account
                .starts
                .room(at, terms.sandboxes as u64, u64::from(limit));
            room.map_err(|full| full.refused(Quota::StartsPerMinute))?;
        }
        self.may_use_processor(account, at)?;
        self.may_use_memory(account)?;
        self.may_store(account, terms.kept, 1)
    }

    fn may_run(&self, account: &mut Account, at: Duration, cells: u64) -> Result<(), Refused> {
        self.may_use_processor(account, at)?;
        self.may_use_memory(account)?;
        let Some(limit) = self.quotas().cells_per_minute else {
            return Ok(());
        };
        account
            .cells
            .room(at, cells, u64::from(limit))
            .map_err(|full| full.refused(Quota::CellsPerMinute))
    }

    fn may_use_processor(&self, account: &mut Account, at: Duration) -> Result<(), Refused> {
        let Some(limit) = self.quotas().processor_time else {
            return Ok(());
        };
        let room = account.processor_time.room(at, 1, micros(limit));
        room.map_err(|full| {
            let used = Duration::from_micros(full.used).as_secs();
            refused(
                Quota::ProcessorTime,
                limit.as_secs(),
                used,
                full.retry_after,
            )
        })
    }

    fn may_use_memory(&self, account: &Account) -> Result<(), Refused> {
        match self.quotas().memory {
            Some(limit) if account.memory() >= limit => {
                Err(refused(Quota::Memory, limit, account.memory(), None))
            }
            _ => Ok(()),
        }
    }

    fn may_store(&self, account: &Account, kept: u64, more: u64) -> Result<(), Refused> {
        let used = account.stored() + kept;
        match self.quotas().stored {
            Some(limit) if used.saturating_add(more) > limit => {
                Err(refused(Quota::Stored, limit, used, None))
            }
            _ => Ok(()),
        }
    }

    /// Calls `act` with an account and the time since the accounts were created.
    fn with<T>(&self, owner: &Principal, act: impl FnOnce(&mut Account, Duration) -> T) -> T {
        let (at, processor_window) = (self.epoch.elapsed(), self.quotas().processor_window);
        let mut accounts = self.accounts();
        if accounts.len() >= MANY_ACCOUNTS && !accounts.contains_key(owner) {
            accounts.retain(|_, account| account.counts_something(at));
        }
        let account = accounts.entry(owner.clone()).or_insert_with(|| Account {
            cells: Window::new(MINUTE),
            starts: Window::new(MINUTE),
            processor_time: Window::new(processor_window),
            gauges: HashMap::new(),
            read: None,
        });
        act(account, at)
    }

    fn accounts(&self) -> MutexGuard<'_, HashMap<Principal, Account>> {
        self.accounts
            .lock()
            .expect("nothing panics while it holds the accounts")
    }
}

/// Sandboxes that are about to start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starts {
    pub(super) sandboxes: usize,
    /// How many of them become sessions.
    pub(super) lasting: usize,
    /// Existing sessions.
    pub(super) live: usize,
    /// Bytes kept outside of sandboxes.
    pub(super) kept: u64,
}

impl Account {
    fn take_reading(
        &mut self,
        number: u64,
        processor_time: Duration,
        memory: u64,
        stored: u64,
        at: Duration,
    ) {
        let Some(reading) = self.gauges.get_mut(&number) else {
            return;
        };
        self.processor_time.add(
            at,
            micros(processor_time.saturating_sub(reading.processor_time)),
        );
        reading.processor_time = reading.processor_time.max(processor_time);
        (reading.memory, reading.stored) = (memory, stored);
    }

    fn memory(&self) -> u64 {
        self.gauges.values().map(|reading| reading.memory).sum()
    }

    fn stored(&self) -> u64 {
        self.gauges.values().map(|reading| reading.stored).sum()
    }

    fn counts_something(&mut self, at: Duration) -> bool {
        let windows = [&mut self.cells, &mut self.starts, &mut self.processor_time];
        !self.gauges.is_empty() || windows.into_iter().any(|window| window.sum(at) > 0)
    }
}

/// Counts a sandbox against its owner while it is held.
pub(super) struct Metered {
    accounts: Arc<Accounts>,
    owner: Principal,
    number: u64,
}

impl Drop for Metered {
    fn drop(&mut self) {
        let Metered {
            accounts,
            owner,
            number,
        } = self;
        let gauge = accounts.with(owner, |account, _| {
            account
                .gauges
                .get(number)
                .map(|reading| reading.gauge.clone())
        });
        let Some(gauge) = gauge else { return };
        let last = gauge.processor_time();
        accounts.with(owner, |account, at| {
            account.take_reading(*number, last, 0, 0, at);
            account.gauges.remove(number);
        });
    }
}

/// Amounts counted in a sliding window.
#[derive(Debug, Clone)]
struct Window {
    width: Duration,
    /// Non-empty slots with their numbers, the oldest first.
    slots: VecDeque<(u64, u64)>,
}

/// A window that has no room for more.
#[derive(Debug, PartialEq, Eq)]
struct Full {
    limit: u64,
    used: u64,
    retry_after: Option<Duration>,
}

impl Full {
    fn refused(self, quota: Quota) -> Refused {
        refused(quota, self.limit, self.used, self.retry_after)
    }
}

impl Window {
    fn new(width: Duration) -> Window {
        Window {
            width,
            slots: VecDeque::new(),
        }
    }

    /// Changes the width of the window. Counted amounts keep their time.
    fn set_width(&mut self, width: Duration) {
        let slot_width = self.slot_width();
        self.width = width;
        for (number, amount) in std::mem::take(&mut self.slots) {
            self.add(
                slot_width.saturating_mul(u32::try_from(number).unwrap_or(u32::MAX)),
                amount,
            );
        }
    }

    fn slot_width(&self) -> Duration {
        (self.width / SLOTS).max(Duration::from_millis(1))
    }

    fn add(&mut self, at: Duration, amount: u64) {
        if amount == 0 {
            return;
        }
        let number = (at.as_millis() / self.slot_width().as_millis()) as u64;
        match self.slots.back_mut() {
            Some((last, sum)) if *last == number => *sum += amount,
            _ => self.slots.push_back((number, amount)),
        }
    }

    /// Returns when a slot leaves the window: when its end is as old as the window is wide.
    fn leaves(&self, number: u64) -> Duration {
        self.slot_width() * u32::try_from(number + 1).unwrap_or(u32::MAX) + self.width
    }

    fn sum(&mut self, at: Duration) -> u64 {
        while self
            .slots
            .front()
            .is_some_and(|(number, _)| self.leaves(*number) <= at)
        {
            self.slots.pop_front();
        }
        self.slots.iter().map(|(_, sum)| sum).sum()
    }

    /// Checks that there is room for `more`. The error contains when there will be room, if ever.
    fn room(&mut self, at: Duration, more: u64, limit: u64) -> Result<(), Full> {
        let used = self.sum(at);
        if used.saturating_add(more) <= limit {
            return Ok(());
        }
        let mut left = used;
        let when = self.slots.iter().find_map(|(number, sum)| {
            left -= sum;
            (left.saturating_add(more) <= limit).then(|| self.leaves(*number).saturating_sub(at))
        });
        Err(Full {
            limit,
            used,
            retry_after: when,
        })
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn refused(which: Quota, limit: u64, used: u64, retry_after: Option<Duration>) -> Refused {
    Refused::Quota {
        which,
        limit,
        used,
        retry_after,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_window_forgets_and_says_when_there_is_room_again() {
        let mut window = Window::new(MINUTE);
        window.add(SECOND, 2);
        window.add(10 * SECOND, 1);
        assert_eq!(window.sum(11 * SECOND), 3);
        assert_eq!(window.room(11 * SECOND, 1, 4), Ok(()));
        let full = |used, seconds: u32| {
            Err(Full {
                limit: 3,
                used,
                retry_after: Some(seconds * SECOND),
            })
        };
        assert_eq!(window.room(11 * SECOND, 1, 3), full(3, 51));
        assert_eq!(window.room(11 * SECOND, 3, 3), full(3, 60));
        assert_eq!(
            window.room(11 * SECOND, 4, 3),
            Err(Full {
                limit: 3,
                used: 3,
                retry_after: None
            })
        );
        assert_eq!((window.sum(62 * SECOND), window.sum(71 * SECOND)), (1, 0));
    }

    proptest! {
        #[test]
        fn a_window_never_lets_more_through_than_its_limit(
            steps in prop::collection::vec(0u64..5_000, 1..300), limit in 1u64..20,
        ) {
            let mut window = Window::new(MINUTE);
            let mut at = Duration::ZERO;
            let mut passed: Vec<Duration> = Vec::new();
            for step in steps {
                at += Duration::from_millis(step);
                match window.room(at, 1, limit) {
                    Ok(()) => {
                        window.add(at, 1);
                        passed.push(at);
                        let recent =
                            passed.iter().filter(|passed| at - **passed < MINUTE).count() as u64;
                        prop_assert!(recent <= limit);
                        prop_assert!(window.slots.len() <= SLOTS as usize + 2);
                    }
                    Err(full) => {
                        let wait = full.retry_after.expect("one has room in an empty window");
                        prop_assert!(wait <= MINUTE + 2 * SECOND);
                        prop_assert_eq!(
                            window.clone().room(at + wait, 1, limit),
                            Ok(()),
                            "the promise is kept"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_window_that_becomes_wider_or_narrower_keeps_what_was_counted_in_it() {
        let minutes = |count: u64| Duration::from_secs(60 * count);
        let mut window = Window::new(minutes(60));
        window.add(minutes(100), 5);
        window.add(minutes(130), 7);
        window.set_width(minutes(600));
        assert_eq!(window.sum(minutes(131)), 12);
        window.set_width(minutes(20));
        assert_eq!(window.sum(minutes(131)), 7);
    }

    #[test]
    fn quotas_that_change_hold_at_once_and_what_was_used_before_counts() {
        let accounts = Accounts::new(Quotas::default());
        let ann = Principal("ann".to_owned());
        for _ in 0..5 {
            accounts.count_cells(&ann, 1).unwrap();
        }
        accounts.set_quotas(Quotas {
            cells_per_minute: Some(5),
            ..Quotas::default()
        });
        assert!(matches!(
            accounts.count_cells(&ann, 1),
            Err(Refused::Quota { .. })
        ));
        accounts.set_quotas(Quotas::default());
        accounts.count_cells(&ann, 1).unwrap();
    }
}
