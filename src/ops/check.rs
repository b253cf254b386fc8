//! The operation `check`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::session::ExecutionRef;

/// Reports how an execution goes on: after `wait`, when it has ended, or when a person has to
/// decide something.
#[derive(Clone, Serialize, Deserialize)]
pub struct Check {
    pub execution: ExecutionRef,
    pub wait: Duration,
    /// Characters of output in the reply; the newest are kept.
    pub max_chars: usize,
}
