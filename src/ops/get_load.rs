//! The operation `get_load`.

use serde::{Deserialize, Serialize};

/// Reports how busy the host is, without naming any session.
#[derive(Clone, Serialize, Deserialize)]
pub struct GetLoad {}
