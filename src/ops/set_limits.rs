//! The operation `set_limits`.

use serde::{Deserialize, Serialize};

use crate::session::LimitSetup;

/// Replaces the quotas of callers and the limit of running cells.
#[derive(Clone, Serialize, Deserialize)]
pub struct SetLimits {
    pub setup: LimitSetup,
}
