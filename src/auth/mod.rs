//! Who is calling, and what they may do.
//!
//! A leaf: it knows nothing of MCP, sessions or HTTP connections.

mod caller;
mod denied;

pub use caller::{Caller, Scope, Scopes};
pub use denied::{Authenticator, Denied, require};
