//! The operation `interrupt`.

use serde::{Deserialize, Serialize};

use crate::session::ExecutionRef;

/// Interrupts an execution, or takes it out of the queue. Its outcome can be checked.
#[derive(Clone, Serialize, Deserialize)]
pub struct Interrupt {
    pub execution: ExecutionRef,
}
