//! Refusals, reported to the user.
//!
//! A program inside sees only a connection reset or a name that does not exist. The result of its
//! cell reports the reason, in words that a model can act on.
//!
//! The program controls what it tries and how often, so the list is bounded: 50 different lines,
//! each with a count, and one line for all others. Every text in it is ours, a checked name or an
//! address.

use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};

use crate::dial::{DialError, Objection};
use crate::name::HostName;

/// A connection, name or request that the gateway refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The destination: `example.org:443`, or `example.org` if only its address was queried.
    pub target: String,
    pub reason: Reason,
    /// Number of refusals since the list was last taken.
    pub times: u32,
}

/// Reason for a refusal.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("not in the allowed list")]
    NotListed,
    #[error("no longer in the allowed list")]
    NoLongerListed,
    #[error("could not be resolved: {0}")]
    Unresolved(String),
    #[error("{0}")]
    Address(Objection),
    #[error("could not be reached: {0}")]
    Unreachable(io::ErrorKind),
    #[error("only TLS may pass at this port")]
    NotTls,
    #[error("the TLS client does not say which name it wants")]
    NoServerName,
    #[error("the TLS client asks for {0}")]
    OtherServerName(HostName),
    #[error("what the TLS client asks for is no host's name")]
    UnreadableServerName,
    #[error("the TLS client hides the name it wants (encrypted client hello)")]
    EncryptedHello,
    #[error("{0}")]
    Request(String),
    #[error("more than {0} connections at a time")]
    TooManyConnections(usize),
    #[error("too many to list")]
    TooManyToList,
    /// A reason that another process reported.
    #[error("{0}")]
    Told(String),
}

impl fmt::Display for Blocked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "blocked: {} ({})", self.target, self.reason)?;
        if self.times > 1 {
            write!(formatter, ", {} times", self.times)
        } else {
            Ok(())
        }
    }
}

impl From<DialError> for Reason {
    fn from(error: DialError) -> Reason {
        match error {
            DialError::NotListed => Reason::NotListed,
            DialError::Unresolved(cause) => Reason::Unresolved(cause.to_string()),
            DialError::Special(objection) => Reason::Address(objection),
            // Only the kind: the full text of a system error describes our side.
            DialError::Unreachable(cause) => Reason::Unreachable(cause.kind()),
        }
    }
}

/// The list of refusals while a cell runs.
#[derive(Default)]
pub(crate) struct NoteSink {
    ledger: Mutex<Ledger>,
}

#[derive(Default)]
struct Ledger {
    lines: Vec<Blocked>,
    others: u32,
}

/// Limit of different lines. More than fifty do not help a model.
const MAX_LINES: usize = 50;

impl NoteSink {
    /// Records one refusal.
    pub(crate) fn add(&self, target: String, reason: Reason) {
        self.note(target, reason, 1);
    }

    /// Records a refusal that accompanies another one: it adds a line but does not count as an
    /// attempt.
    pub(crate) fn mention(&self, target: String, reason: Reason) {
        self.note(target, reason, 0);
    }

    /// Returns the list and starts a new one.
    pub(crate) fn take(&self) -> Vec<Blocked> {
        let Ledger { mut lines, others } =
            std::mem::take(&mut *self.ledger.lock().unwrap_or_else(PoisonError::into_inner));
        if others > 0 {
            lines.push(Blocked {
                target: "other targets".to_owned(),
                reason: Reason::TooManyToList,
                times: others,
            });
        }
        lines
    }

    fn note(&self, target: String, reason: Reason, times: u32) {
        tracing::debug!(target, %reason, "blocked");
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        let known = ledger
            .lines
            .iter_mut()
            .find(|line| line.target == target && line.reason == reason);
        if let Some(line) = known {
            line.times = line.times.saturating_add(times);
        } else if ledger.lines.len() < MAX_LINES {
            ledger.lines.push(Blocked {
                target,
                reason,
                times: times.max(1),
            });
        } else {
            ledger.others = ledger.others.saturating_add(times);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(notes: &NoteSink) -> Vec<String> {
        notes.take().iter().map(Blocked::to_string).collect()
    }

    #[test]
    fn a_note_reads_as_a_line_of_the_result() {
        let notes = NoteSink::default();
        notes.add("example.org:443".to_owned(), Reason::NotListed);
        assert_eq!(
            texts(&notes),
            ["blocked: example.org:443 (not in the allowed list)"]
        );
        assert!(texts(&notes).is_empty());
    }

    #[test]
    fn the_same_refusal_is_counted_and_what_goes_along_with_it_is_not() {
        let notes = NoteSink::default();
        for _ in 0..3 {
            notes.add("example.org".to_owned(), Reason::NotListed);
            notes.mention("example.org".to_owned(), Reason::NotListed);
        }
        notes.mention("v6.example.org".to_owned(), Reason::NotListed);
        let expected = [
            "blocked: example.org (not in the allowed list), 3 times",
            "blocked: v6.example.org (not in the allowed list)",
        ];
        assert_eq!(texts(&notes), expected);
    }

    #[test]
    fn the_list_is_bounded_and_says_how_much_is_missing() {
        let notes = NoteSink::default();
        for number in 0..MAX_LINES + 7 {
            notes.add(format!("host{number}.example.org"), Reason::NotListed);
        }
        let lines = texts(&notes);
        assert_eq!(lines.len(), MAX_LINES + 1);
        assert_eq!(
            lines[MAX_LINES],
            "blocked: other targets (too many to list), 7 times"
        );
    }
}
