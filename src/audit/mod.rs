//! The audit log: who did what, when, in which session, and with which result.
//!
//! ```text
//! event (typed, bounded)  →  allowance: a limit per session and hour
//!                         →  chain: one line of JSON, numbered, sealed with the hash of itself and
//!                            of the previous line
//!                         →  sink: appended to the file, whole or not at all; rotated when the
//!                            file is large
//! ```
//!
//! `record` returns when the line was passed to the kernel, so a recorded event survives a
//! `kill -9`. [`Sync`] decides what a power failure may lose. There is no queue between caller and
//! file, so no accepted record can be lost in one, and a failing sink is known to the very call
//! that must be rejected.
//!
//! `verify` finds records that were changed, cut, moved or inserted. It needs only the files and,
//! to find a truncated end, a head that was noted elsewhere: the log on standard error names one at
//! every start, rotation and end.
//!
//! This is a leaf module: it does not depend on sessions, MCP or HTTP. It never holds code, output,
//! file contents or tokens, only digests.

mod allowance;
mod book;
mod chain;
mod event;
mod recent;
mod sink;
mod text;
pub mod verify;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use book::Book;
pub use chain::{Head, MAX_LINE_BYTES};
pub use event::{
    Answer, Approval, AuthenticationRefused, CallOutcome, Digest, Event, Execution, FileDirection,
    FileMoved, Kind, Packages, PolicyDecision, QuotaRefused, ServerReloaded, ServerStarted,
    ServerStopped, SessionCreated, SessionEnded, ToolCall, UpstreamCall,
};
pub use text::{List, Text, plain_json};

/// How an audit log is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditSettings {
    pub sync: Sync,
    pub failure: OnFailure,
    /// Bytes after which a file is rotated and the chain continues in the next.
    pub turn_over_at: u64,
    /// Limit of records per hour of one session (or of one principal outside of sessions); further
    /// records are counted and not written.
    pub records_per_hour: u64,
}

impl Default for AuditSettings {
    fn default() -> AuditSettings {
        AuditSettings {
            sync: Sync::Interval,
            failure: OnFailure::Refuse,
            turn_over_at: 64 << 20,
            records_per_hour: 10_000,
        }
    }
}

/// When records are synced to the disk. A killed server loses nothing either way; a power failure
/// may lose records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// Before `record` returns. Concurrent calls share one sync.
    Always,
    /// Once a second.
    Interval,
}

/// What happens to new work while records cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// It is rejected: `record` returns an error.
    Refuse,
    /// It continues, and the log states afterwards how many records are missing.
    Continue,
}

/// Why an audit log could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("could not open the audit log {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the audit log {} cannot be trusted: {why}", path.display())]
    Untrusted { path: PathBuf, why: &'static str },
    #[error("the audit log {} is being written by another process", path.display())]
    InUse { path: PathBuf },
    #[error(
        "the audit log {} is damaged at its end: {why}. Look at it with \"cellblock audit \
         verify\", then move it away",
        path.display()
    )]
    Damaged { path: PathBuf, why: String },
}

/// An event could not be recorded, so the action must not happen.
#[derive(Debug, thiserror::Error)]
#[error("the audit log cannot be written")]
pub struct AuditUnavailable {
    #[source]
    pub cause: io::Error,
}

/// Interval of the periodic work: syncing records to the disk, summarizing suppressed records,
/// retrying a failed sink.
const TICK: Duration = Duration::from_secs(1);

/// An open audit log, or none. Clones write to the same one; dropping the last one closes it.
#[derive(Clone)]
pub struct Audit(Option<Arc<Open>>);

/// A reference to the audit log that does not keep it open.
#[derive(Clone)]
pub struct WeakAudit(Option<Weak<Open>>);

struct Open {
    book: Book,
    recent_executions: Vec<String>,
    /// Dropping it stops the thread.
    _thread: SyncSender<()>,
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(if self.0.is_some() {
            "Audit(on)"
        } else {
            "Audit(off)"
        })
    }
}

impl Audit {
    /// Records nothing, at no cost.
    pub fn off() -> Audit {
        Audit(None)
    }

    /// Opens the log at `path`, or creates it, and continues its chain.
    ///
    /// The last record of an existing log must be complete; a line torn by a crash is moved to
    /// another file, which is recorded. A file that others can write is rejected, and so is one
    /// that another process writes.
    pub fn open(path: &Path, settings: AuditSettings) -> Result<Audit, AuditError> {
        let (sink, found) = sink::FileSink::open(path)?;
        // Only used to skip duplicates, so the log opens even if it cannot be read again.
        let recent_executions = recent::executions(path).unwrap_or_default();
        let book = Book::new(Box::new(sink), found, settings);
        book.begin().map_err(|unavailable| AuditError::Open {
            path: path.to_owned(),
            cause: unavailable.cause,
        })?;
        let head = book.head();
        tracing::info!(
            sequence = head.sequence,
            hash = head.hash,
            "audit log opened"
        );
        Ok(Audit::over(book, recent_executions))
    }

    fn over(book: Book, recent_executions: Vec<String>) -> Audit {
        let (sender, receiver) = sync_channel::<()>(1);
        let open = Arc::new(Open {
            book,
            recent_executions,
            _thread: sender,
        });
        let watched = Arc::downgrade(&open);
        let look_after = move || {
            while receiver.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                let Some(open) = watched.upgrade() else {
                    return;
                };
                open.book.tick(Instant::now());
            }
        };
        // Without its thread the log still holds every record; only the kernel decides when they
        // reach the disk.
        if let Err(error) = std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(look_after)
        {
            tracing::error!(%error, "the audit log has no thread to look after it");
        }
        Audit(Some(open))
    }

    /// Records an event, in the order of calls. An error means that the action must not happen.
    ///
    /// With [`Sync::Always`] it waits for the disk; on a multi-threaded runtime other tasks
    /// continue meanwhile.
    pub fn record(&self, event: Event) -> Result<(), AuditUnavailable> {
        let Some(open) = &self.0 else { return Ok(()) };
        open.book.record(event, Instant::now())
    }

    /// Records an action that has already happened and cannot be rejected any more. A failure shows
    /// in [`Audit::failing`] and in the log.
    pub fn note(&self, event: Event) {
        // The writer has logged the failure once on standard error, and counts the missing records.
        let _ = self.record(event);
    }

    pub fn downgrade(&self) -> WeakAudit {
        WeakAudit(self.0.as_ref().map(Arc::downgrade))
    }

    /// Returns whether events are recorded at all.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns why new work must not start: records cannot be written, and the operator has not
    /// allowed to continue without them.
    pub fn refuses(&self) -> Option<String> {
        self.0
            .as_ref()
            .filter(|open| open.book.on_failure() == OnFailure::Refuse)
            .and_then(|_| self.failing())
    }

    /// Returns the ids of the last executions recorded before the log was opened.
    pub fn recent_executions(&self) -> Vec<String> {
        self.0
            .as_ref()
            .map(|open| open.recent_executions.clone())
            .unwrap_or_default()
    }

    /// Returns why records cannot be written at present.
    pub fn failing(&self) -> Option<String> {
        self.0.as_ref().and_then(|open| open.book.failing())
    }

    /// Returns the number and hash of the last record.
    pub fn head(&self) -> Option<Head> {
        self.0.as_ref().map(|open| open.book.head())
    }
}

impl WeakAudit {
    /// Returns the log unless it was closed.
    pub fn upgrade(&self) -> Option<Audit> {
        match &self.0 {
            None => Some(Audit::off()),
            Some(open) => open.upgrade().map(|open| Audit(Some(open))),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.book.close();
        let head = self.book.head();
        tracing::info!(
            sequence = head.sequence,
            hash = head.hash,
            "audit log closed"
        );
    }
}
