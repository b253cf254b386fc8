//! The operation `decide`.

use serde::{Deserialize, Serialize};

use crate::session::{Decision, ExecutionHandle};

/// Answers approval requests of an execution. Requests that are not open any more are ignored.
#[derive(Clone, Serialize, Deserialize)]
pub struct Decide {
    pub execution: ExecutionHandle,
    pub decisions: Vec<Decision>,
    /// How the person was asked. The audit log records it.
    pub asked_by: String,
}
