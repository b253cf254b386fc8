//! Other MCP servers, as sessions call them.
//!
//!     params, variables   what a client configuration says; `${VAR}` filled on this side of the wall
//!     child, lines        a program on this machine, and the lines that come and go
//!     web, events         requests to servers elsewhere, and the events of their answers
//!     streamable, sse     streamable HTTP, and the older HTTP with an event stream
//!     addresses           which addresses may be dialled
//!     wire                one message, within bounds
//!     greeting            any of these as a connection, in both eras of the protocol
//!     connection          the list of tools, and calls
//!     watched, handler    what a server tells beside its answers, and when a connection ends
//!     tools               the tools as they were when they were registered
//!     upstream, driver    a server that is called, and connected again when it was lost
//!     registry            which servers there are, and whose they are
//!
//! Everything that a server says is hostile: bounded, checked, and never more than data. A tool is what it was when it was registered; one that
//! changed is not called until it is registered again. Values of variables, headers and environments are sent to the server they are for, and are
//! in no error, no log and no `Debug`; values of variables are taken out of results, too.
//!
//! This crate knows nothing of sessions, of sandboxes or of our own MCP server. Nothing here decides who may call what.

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
pub use call::{CallError, CallOptions, CallReply, Progress, ProgressSink, Reason};
pub use cellblock_typed::{Package, ServerName, ServerNameError};
pub use child::{WrapperCommand, exec_with_parent};
pub use greeting::{ConnectError, Era};
pub use params::{BadParams, ServerKind, ServerParams};
pub use registry::{Owner, RegisterError, Registry};
pub use upstream::{Limits, Settings, ToolInfo, ToolState, Upstream, UpstreamInfo};
pub use variables::Variables;

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
