//! Client side of MCP: other MCP servers that sessions call.
//!
//!     params, variables   client configuration of a server; `${VAR}` is expanded on the host
//!     child, lines        a program on this machine, and line-based messages over its pipes
//!     web, events         HTTP requests to remote servers, and the events of their responses
//!     streamable, sse     streamable HTTP, and the older HTTP with an event stream
//!     addresses           which addresses may be dialled
//!     wire                one message, within limits
//!     greeting            the handshake over any transport, in both eras of the protocol
//!     connection          listing tools, and calls
//!     watched, handler    notifications of a server, and the end of a connection
//!     tools               tools pinned at registration
//!     upstream, driver    a registered server, with reconnects
//!     registry            all servers and their owners
//!
//! Everything that a server sends is hostile: limited in size, checked, and used only as data. A
//! tool is pinned when it is registered; a tool that changed is not called until it is registered
//! again. Values of variables, headers and environments are sent only to their server. They never
//! appear in an error, a log or `Debug` output. Values of variables are also masked in results.
//!
//! This crate does not know sessions, sandboxes or our own MCP server. It does not decide who may
//! call which tool.

#![forbid(unsafe_code)]

mod addresses;
mod call;
mod child;
mod connection;
mod driver;
mod events;
mod greeting;
mod handler;

mod lines;
mod params;
mod registry;
mod sse;
mod streamable;
mod tools;
mod upstream;
mod variables;
mod watched;
mod web;
mod wire;

pub use addresses::AddressPolicy;
pub use call::{CallError, CallErrorCode, CallOptions, CallProgress, CallReply, ProgressSink};
pub use cellblock_typed::{Package, ServerName, ServerNameError};
pub use child::{WrapperCommand, exec_with_parent};
pub use greeting::{ConnectError, Era};
pub use params::{BadParams, ServerKind, ServerParams};
pub use registry::{Owner, RegisterError, Registry};
pub use upstream::{ConnectSettings, ServerLimits, ToolInfo, ToolState, Upstream, UpstreamInfo};
pub use variables::Variables;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
