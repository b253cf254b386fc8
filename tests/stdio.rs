//! `cellblock mcp` over its pipes: the protocol, and everything a session promises its user.
//!
//! One file for each kind of promise. Most cases share one server and have a session each; a case
//! that needs other settings, or that harms its server, starts its own.

mod branching;
pub(crate) mod control;
mod files;
mod output;
pub(crate) mod protocol;
mod settings;
