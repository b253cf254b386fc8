//! Who is calling, and what they may do.
//!
//! A leaf: it knows nothing of MCP, sessions or HTTP connections.

mod caller;

pub use caller::{Caller, Scope, Scopes};
