//! The operation `set_approvals`.

use serde::{Deserialize, Serialize};

use crate::session::ApprovalSetup;

/// Replaces the approval policy. It holds for what is asked from then on.
#[derive(Clone, Serialize, Deserialize)]
pub struct SetApprovals {
    pub setup: ApprovalSetup,
}
