//! The operation `execute`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::session::{ExecuteRequest, SessionId};

/// Runs a cell. The session is created if its id is new.
///
/// A cancelled call interrupts the cell. A call that is dropped does not: its result can be
/// checked.
#[derive(Clone, Serialize, Deserialize)]
pub struct Execute {
    pub session: SessionId,
    pub request: ExecuteRequest,
    /// Time after which the reply says that the cell goes on. `None` waits for its end.
    pub wait: Option<Duration>,
}
