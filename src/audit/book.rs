//! The audit log writer (`Book`): decides what is written, when it is durable, and what a failure
//! means.
//!
//! Locks, always in this order: `durable`, then `state`. A record is appended under `state` alone.
//! A caller that needs it on the disk takes `durable`, reads the end of the log, and syncs
//! everything up to it; callers that waited for the lock find their record already synced.

use std::io;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use super::allowance::{Admission, Allowance, RecordOwner};
use super::chain::{Head, Moment, seal};
use super::event::{Event, LogBegun, LogContinued, Suppressed, Unrecorded};
use super::sink::{Found, Sink, Start};
use super::{AuditSettings, AuditUnavailable, OnFailure, Sync};

pub(super) struct Book {
    settings: AuditSettings,
    state: Mutex<State>,
    /// The last record that is known to be on the disk.
    durable: Mutex<u64>,
}

struct State {
    sink: Box<dyn Sink>,
    head: Head,
    /// The number of the first record in the current file.
    first_sequence: u64,
    allowance: Allowance,
    health: Health,
    /// Events without a record since the last record.
    unrecorded: u64,
    turn_over_at: u64,
    /// A failed rotation was already logged.
    told: bool,
    /// Events from opening the log, to be written first.
    opening: Vec<Event>,
}

/// Whether lines can be written.
enum Health {
    Good,
    /// The last attempt failed; the next may succeed.
    Failing(String),
    /// Accepted records may be lost. This cannot be determined, so nothing is accepted until an
    /// operator has checked the log.
    Broken(String),
}

impl Book {
    pub(super) fn new(sink: Box<dyn Sink>, found: Found, settings: AuditSettings) -> Book {
        let version = env!("CARGO_PKG_VERSION");
        let (first_sequence, opening) = match found.start {
            Start::New => (
                1,
                Some(Event::new(LogBegun {
                    version: version.into(),
                })),
            ),
            Start::Within { first_sequence } => (first_sequence, None),
            Start::After { name } => (
                found.head.sequence + 1,
                Some(Event::new(LogContinued { after: name.into() })),
            ),
        };
        let torn = found.torn.map(Event::new);
        let state = State {
            sink,
            head: found.head,
            first_sequence,
            allowance: Allowance::new(settings.records_per_hour, Instant::now()),
            health: Health::Good,
            unrecorded: 0,
            turn_over_at: settings.turn_over_at,
            told: false,
            opening: opening.into_iter().chain(torn).collect(),
        };
        Book {
            settings,
            state: Mutex::new(state),
            durable: Mutex::new(0),
        }
    }

    /// Writes the events from opening the log.
    pub(super) fn begin(&self) -> Result<(), AuditUnavailable> {
        let written = {
            let mut state = self.state();
            let opening = std::mem::take(&mut state.opening);
            state.append(&opening)
        };
        let sequence = self.head().sequence;
        written
            .and_then(|()| self.make_durable(sequence))
            .map_err(|cause| AuditUnavailable { cause })
    }

    pub(super) fn record(&self, event: Event, now: Instant) -> Result<(), AuditUnavailable> {
        let recorded = self
            .write(event, now)
            .and_then(|sequence| match self.settings.sync {
                Sync::Always => while_others_go_on(|| self.make_durable(sequence)),
                Sync::Interval => Ok(()),
            });
        match (recorded, self.settings.failure) {
            (Ok(()), _) | (Err(_), OnFailure::Continue) => Ok(()),
            (Err(cause), OnFailure::Refuse) => Err(AuditUnavailable { cause }),
        }
    }

    /// Does the periodic work: summarizes the hour, retries a failed sink, checks the file, and
    /// syncs records to the disk.
    pub(super) fn tick(&self, now: Instant) {
        let sequence = {
            let mut state = self.state();
            state.sum_up(now);
            state.recover();
            if let Err(error) = state.sink.look() {
                state.break_down(&error);
            }
            state.head.sequence
        };
        // The error is in the state and was logged; no caller waits for this result.
        let _ = self.make_durable(sequence);
    }

    /// Writes the pending events, and syncs everything to the disk.
    pub(super) fn close(&self) {
        let sequence = {
            let mut state = self.state();
            let suppressed = state.allowance.settle();
            state.write_suppressed(suppressed);
            state.recover();
            state.head.sequence
        };
        let _ = self.make_durable(sequence);
    }

    pub(super) fn on_failure(&self) -> OnFailure {
        self.settings.failure
    }

    pub(super) fn failing(&self) -> Option<String> {
        match &self.state().health {
            Health::Good => None,
            Health::Failing(why) | Health::Broken(why) => Some(why.clone()),
        }
    }

    pub(super) fn head(&self) -> Head {
        self.state().head.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("nobody panics while holding the state")
    }

    /// Appends an event and returns the number that must be on the disk for it.
    fn write(&self, event: Event, now: Instant) -> io::Result<u64> {
        let mut state = self.state();
        state.sum_up(now);
        let admission = state.allowance.admit(&event);
        let must_refuse = match &state.health {
            Health::Good => None,
            // Even a suppressed record must not let work pass that is rejected for others.
            Health::Failing(why) if admission == Admission::Suppress => Some(why.clone()),
            Health::Failing(_) => None,
            Health::Broken(why) => Some(why.clone()),
        };
        if let (Some(why), OnFailure::Refuse) = (must_refuse, self.settings.failure) {
            state.unrecorded += 1;
            return Err(io::Error::other(why));
        }
        let event = match admission {
            Admission::Write => event,
            Admission::Announce => Event {
                kind: Suppressed {
                    count: 0,
                    limit_per_hour: state.allowance.limit(),
                }
                .into(),
                ..event
            },
            Admission::Suppress => return Ok(state.head.sequence),
        };
        match state.write(event) {
            Ok(()) => Ok(state.head.sequence),
            Err(error) => {
                state.unrecorded += 1;
                state.fail(&error);
                Err(error)
            }
        }
    }

    fn make_durable(&self, sequence: u64) -> io::Result<()> {
        let mut durable = self
            .durable
            .lock()
            .expect("nobody panics while holding the number");
        if *durable >= sequence {
            return Ok(());
        }
        let (reached, syncing) = {
            let state = self.state();
            (state.head.sequence, state.sink.syncing())
        };
        match syncing() {
            Ok(()) => {
                *durable = reached;
                Ok(())
            }
            Err(error) => {
                // The kernel may have dropped unwritten data, and reports that only once. A later
                // success would prove nothing.
                self.state().break_down(&error);
                Err(error)
            }
        }
    }
}

impl State {
    /// Appends an event, preceded by the number of unrecorded ones, if any. Both lines are written,
    /// or none.
    fn write(&mut self, event: Event) -> io::Result<()> {
        let missing = self.missing();
        self.append(&missing.into_iter().chain([event]).collect::<Vec<_>>())?;
        self.caught_up();
        Ok(())
    }

    /// Appends lines, in the next file if the current one is large.
    fn append(&mut self, events: &[Event]) -> io::Result<()> {
        let (mut lines, mut head) = self.sealed(events);
        let is_large = self.sink.length() + lines.len() as u64 > self.turn_over_at;
        // A file that holds only its first record is not rotated, or a limit below two lines would
        // rotate forever.
        if is_large && self.head.sequence > self.first_sequence {
            self.turn_over();
            (lines, head) = self.sealed(events);
        }
        self.sink.append(&lines)?;
        self.head = head;
        Ok(())
    }

    fn sealed(&self, events: &[Event]) -> (Vec<u8>, Head) {
        let (mut lines, mut head) = (Vec::new(), self.head.clone());
        for event in events {
            let (line, next) = seal(&head, Moment::now(), event);
            lines.extend_from_slice(&line);
            head = next;
        }
        (lines, head)
    }

    /// Rotates the log. If that fails, the current file continues to grow: a record matters more
    /// than a size limit.
    fn turn_over(&mut self) {
        let after = self.sink.name_when_turned_over(self.first_sequence);
        let (line, head) = seal(
            &self.head,
            Moment::now(),
            &Event::new(LogContinued {
                after: after.into(),
            }),
        );
        match self.sink.turn_over(self.first_sequence, &line) {
            Ok(()) => {
                let before = &self.head;
                tracing::info!(
                    sequence = before.sequence,
                    hash = before.hash,
                    "audit log turned over"
                );
                self.first_sequence = head.sequence;
                self.head = head;
                self.told = false;
            }
            Err(error) if !self.told => {
                tracing::warn!(%error, "the audit log could not be turned over; its file grows on");
                self.told = true;
            }
            Err(_) => {}
        }
    }

    /// Returns an event with the number of unrecorded events, if any.
    fn missing(&self) -> Option<Event> {
        match &self.health {
            Health::Failing(why) | Health::Broken(why) if self.unrecorded > 0 => {
                Some(Event::new(Unrecorded {
                    count: self.unrecorded,
                    cause: why.as_str().into(),
                }))
            }
            _ => None,
        }
    }

    fn caught_up(&mut self) {
        self.unrecorded = 0;
        if let Health::Failing(_) = self.health {
            tracing::info!("the audit log can be written again");
            self.health = Health::Good;
        }
    }

    /// Retries a failed sink, so that the service recovers without a call from a client.
    fn recover(&mut self) {
        if let (Health::Failing(_), Some(missing)) = (&self.health, self.missing()) {
            // The failure is known and was logged; this was only a retry.
            if self.append(&[missing]).is_ok() {
                self.caught_up();
            }
        }
    }

    fn fail(&mut self, error: &io::Error) {
        if let Health::Good = self.health {
            tracing::error!(%error, "the audit log cannot be written");
            self.health = Health::Failing(error.to_string());
        }
    }

    fn break_down(&mut self, error: &io::Error) {
        if !matches!(self.health, Health::Broken(_)) {
            tracing::error!(%error, "the audit log may have lost records; look at it and restart \
                                     the server");
            self.health = Health::Broken(error.to_string());
        }
    }

    fn sum_up(&mut self, now: Instant) {
        let suppressed = self.allowance.turn(now);
        self.write_suppressed(suppressed);
    }

    fn write_suppressed(&mut self, suppressed: Vec<(RecordOwner, u64)>) {
        for (owner, count) in suppressed {
            let event = Event::new(Suppressed {
                count,
                limit_per_hour: self.allowance.limit(),
            });
            let event = match owner {
                RecordOwner::Session { session, principal } => Event {
                    principal: principal.map(Into::into),
                    ..event.in_session(session)
                },
                RecordOwner::Principal(principal) => event.by(principal),
                RecordOwner::Unknown | RecordOwner::Others => event,
            };
            if let Err(error) = self.write(event) {
                self.unrecorded += 1;
                self.fail(&error);
            }
        }
    }
}

/// Waits for the disk without blocking other tasks of this thread.
fn while_others_go_on<T>(wait: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        _ => wait(),
    }
}

#[cfg(test)]
#[path = "book/tests.rs"]
mod tests;
