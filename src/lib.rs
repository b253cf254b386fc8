//! Cellblock: an MCP server that runs untrusted Python in fresh, locked-down Linux sandboxes.
//!
//! `ARCHITECTURE.md` has the module map, the invariants, and the path of one request.

#![forbid(unsafe_code)]

pub mod app;
pub mod approval;
pub mod audit;
pub mod auth;
pub mod config;
pub mod daemon;
pub mod environment;
pub mod http;
pub mod image;
pub mod mcp;
pub mod ops;
pub mod packages;
pub mod quotas;
pub mod reaction;
pub mod runner_client;
pub mod sandbox;
pub mod session;
pub mod telemetry;
