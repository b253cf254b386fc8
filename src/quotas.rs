//! The quotas of a caller: the operator sets them (`config`), sessions enforce them (`session`).
//! A leaf.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Limits per principal. `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// Sessions that exist at the same time.
    pub sessions: Option<usize>,
    /// Bytes of memory used by all its sandboxes together. Above this limit, no new work starts.
    pub memory: Option<u64>,
    /// Processor time within `processor_window`.
    pub processor_time: Option<Duration>,
    pub processor_window: Duration,
    pub cells_per_minute: Option<u32>,
    /// Sandboxes started per minute: new sessions, forks and variants.
    pub starts_per_minute: Option<u32>,
    /// Bytes of files in sessions' private folders, of kept outputs and of unfinished uploads.
    /// Above this limit, no session or file is added.
    pub stored: Option<u64>,
}

impl Default for Quotas {
    fn default() -> Quotas {
        Quotas {
            sessions: None,
            memory: None,
            processor_time: None,
            processor_window: Duration::from_secs(3600),
            cells_per_minute: None,
            starts_per_minute: None,
            stored: None,
        }
    }
}
