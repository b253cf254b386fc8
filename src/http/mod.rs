//! HTTP: connections, and who may come in.
//!
//! ```text
//! connection (bounded, TLS) → guard (Host, Origin) → route → token → scope → what answers
//! ```
//!
//! `connections` accepts and bounds, `table` decides who gives way, `guard` decides by names,
//! `routes` has the one table of paths, `files` moves files of sessions.
//! What a message means is not known here: `/mcp` hands requests to `mcp::http`.
//!
//! Nothing is taken from a header that a proxy may have written: who is calling comes from the token alone.

pub(crate) mod arrivals;
pub mod connections;
pub mod files;
pub mod guard;
pub mod routes;
mod table;
pub mod tls;

pub use connections::{Peer, Reception};
pub use guard::{Allowed, AllowedHost, Origin};
pub use routes::Routes;
