//! The operation `install`.

use serde::{Deserialize, Serialize};

use crate::session::SessionId;
use crate::session::install::InstallApproval;

/// Installs packages into a session, which is created if its id is new.
///
/// If a person must approve first, the call is refused with the request and can be repeated with
/// the answer.
#[derive(Clone, Serialize, Deserialize)]
pub struct Install {
    pub session: SessionId,
    /// As pip takes them, unchecked.
    pub requirements: Vec<String>,
    pub approval: InstallApproval,
}
