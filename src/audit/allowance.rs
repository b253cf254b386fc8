//! Limits the records per session and hour.
//!
//! Code that calls tools in a loop must not fill the disk or bury the records of others. Events
//! over the limit are only counted. The log states where suppression starts and, at the end of the
//! hour, how many records are missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::event::{Event, Kind};

const HOUR: Duration = Duration::from_secs(3600);

/// Limit of separately counted sessions and principals. Beyond it they share one count, so that
/// memory is bounded.
const MAX_COUNTED: usize = 50_000;

/// What to do with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    Write,
    /// Write that suppression starts, and not the event.
    Announce,
    /// Count it.
    Suppress,
}

/// The party whose records are counted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RecordOwner {
    Session {
        session: String,
        principal: Option<String>,
    },
    Principal(String),
    /// Unauthenticated callers.
    Unknown,
    /// All owners beyond the limit of separate counts.
    Others,
}

/// The counts of the current hour.
pub(super) struct Allowance {
    limit: u64,
    since: Instant,
    counts: BTreeMap<RecordOwner, u64>,
}

impl Allowance {
    pub(super) fn new(limit: u64, now: Instant) -> Allowance {
        Allowance {
            limit,
            since: now,
            counts: BTreeMap::new(),
        }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Counts an event and returns what to do with it.
    pub(super) fn admit(&mut self, event: &Event) -> Admission {
        let Some(mut owner) = owner_of(event) else {
            return Admission::Write;
        };
        if self.counts.len() >= MAX_COUNTED && !self.counts.contains_key(&owner) {
            owner = RecordOwner::Others;
        }
        let count = self.counts.entry(owner).or_default();
        *count += 1;
        match *count {
            within if within <= self.limit => Admission::Write,
            first if first == self.limit + 1 => Admission::Announce,
            _ => Admission::Suppress,
        }
    }

    /// At the end of the hour, returns whose records were suppressed and how many, and starts the
    /// next.
    pub(super) fn turn(&mut self, now: Instant) -> Vec<(RecordOwner, u64)> {
        if now.saturating_duration_since(self.since) < HOUR {
            return Vec::new();
        }
        self.since = now;
        self.settle()
    }

    /// Returns whose records were suppressed and how many, and resets the counts.
    pub(super) fn settle(&mut self) -> Vec<(RecordOwner, u64)> {
        let limit = self.limit;
        let counts = std::mem::take(&mut self.counts);
        counts
            .into_iter()
            .filter(|(_, count)| *count > limit)
            .map(|(owner, count)| (owner, count - limit))
            .collect()
    }
}

/// Returns the owner whose limit an event counts against. `None` for actions of the server itself,
/// and for the few events that make the history of a session complete.
fn owner_of(event: &Event) -> Option<RecordOwner> {
    match &event.kind {
        Kind::ServerStarted(_)
        | Kind::ServerStopped(_)
        | Kind::ServerReloaded(_)
        | Kind::SessionEnded(_) => None,
        _ => Some(match (&event.session, &event.principal) {
            (Some(session), principal) => RecordOwner::Session {
                session: session.to_string(),
                principal: principal.as_ref().map(|principal| principal.to_string()),
            },
            (None, Some(principal)) => RecordOwner::Principal(principal.to_string()),
            (None, None) => RecordOwner::Unknown,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{QuotaRefused, SessionEnded};
    use super::*;

    fn call(session: &str) -> Event {
        Event::new(QuotaRefused {
            quota: "cells".into(),
            retry_after: None,
        })
        .by("anna")
        .in_session(session)
    }

    #[test]
    fn a_flood_is_announced_once_counted_and_leaves_others_alone() {
        let now = Instant::now();
        let mut allowance = Allowance::new(3, now);
        let flood: Vec<Admission> = (0..6).map(|_| allowance.admit(&call("loud"))).collect();
        use Admission::{Announce, Suppress, Write};
        assert_eq!(flood, [Write, Write, Write, Announce, Suppress, Suppress]);
        assert_eq!(allowance.admit(&call("quiet")), Write);
        assert_eq!(allowance.turn(now + HOUR - Duration::from_secs(1)), []);
        let owner = RecordOwner::Session {
            session: "loud".to_owned(),
            principal: Some("anna".to_owned()),
        };
        assert_eq!(allowance.turn(now + HOUR), [(owner, 3)]);
        assert_eq!(allowance.admit(&call("loud")), Write);
    }

    #[test]
    fn the_end_of_a_session_is_always_written() {
        let mut allowance = Allowance::new(1, Instant::now());
        assert_eq!(allowance.admit(&call("s")), Admission::Write);
        assert_eq!(allowance.admit(&call("s")), Admission::Announce); // control
        let end = Event::new(SessionEnded {
            reason: "idle".into(),
        })
        .in_session("s");
        assert_eq!(allowance.admit(&end), Admission::Write);
    }

    #[test]
    fn callers_that_are_not_known_share_one_count() {
        let mut allowance = Allowance::new(1, Instant::now());
        let unknown = || {
            Event::new(QuotaRefused {
                quota: "x".into(),
                retry_after: None,
            })
        };
        assert_eq!(allowance.admit(&unknown()), Admission::Write);
        assert_eq!(allowance.admit(&unknown()), Admission::Announce);
        assert_eq!(allowance.settle(), [(RecordOwner::Unknown, 1)]);
    }

    #[test]
    fn memory_is_bounded_however_many_sessions_there_are() {
        let mut allowance = Allowance::new(1_000_000, Instant::now());
        for number in 0..MAX_COUNTED + 100 {
            allowance.admit(&call(&number.to_string()));
        }
        assert_eq!(allowance.counts.len(), MAX_COUNTED + 1);
        assert_eq!(allowance.counts[&RecordOwner::Others], 100);
    }
}
