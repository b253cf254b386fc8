//! The operation `output_size`.

use serde::{Deserialize, Serialize};

use crate::session::{OutputId, SessionId};

/// Returns how many bytes of an output are kept, or `None` if it is not kept.
#[derive(Clone, Serialize, Deserialize)]
pub struct OutputSize {
    pub session: SessionId,
    pub output: OutputId,
}
