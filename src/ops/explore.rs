//! The operation `explore`.

use serde::{Deserialize, Serialize};

use crate::session::{ExploreRequest, SessionId};

/// Runs several cells side by side, each in a fork of its own.
///
/// A cancelled call interrupts the variants, and none is kept.
#[derive(Clone, Serialize, Deserialize)]
pub struct Explore {
    pub session: SessionId,
    pub request: ExploreRequest,
}
