//! The operation `read_output`.

use serde::{Deserialize, Serialize};

use crate::session::{OutputId, SessionId};

/// Reads a part of an output, or `None` if it is not kept.
#[derive(Clone, Serialize, Deserialize)]
pub struct ReadOutput {
    pub session: SessionId,
    pub output: OutputId,
    pub offset: u64,
    pub length: usize,
}
