//! HTTP: connections, checks of requests, and routes.
//!
//! ```text
//! connection (bounded, TLS) → guard (Host, Origin) → route → token → scope → handler
//! ```
//!
//! `connections` accepts and limits connections, `table` decides which one is closed when it is
//! full, `guard` checks names, `routes` has the only table of paths, `files` transfers files of
//! sessions. Messages are not interpreted here: `/mcp` passes requests to `mcp::http`.
//!
//! No header that a proxy may have written is trusted: the caller is identified by the token alone.

pub mod connections;
pub mod files;
pub mod guard;
pub mod routes;
mod table;
pub mod tls;

pub use connections::{Peer, Reception};
pub use guard::{Allowed, AllowedHost, Origin};
pub use routes::Routes;
