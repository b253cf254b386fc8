//! The operation `fork`.

use serde::{Deserialize, Serialize};

use crate::session::{ForkRequest, SessionId};

/// Creates sessions with the state of this one. All are created, or none.
#[derive(Clone, Serialize, Deserialize)]
pub struct Fork {
    pub session: SessionId,
    pub request: ForkRequest,
}
