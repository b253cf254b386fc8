//! All tests that need the real program, in one binary so that it is linked once.
//!
//! `support` holds the mechanics. `contract` runs the same cases on every backend, `containers`
//! what only containers have; `expectations` has what programs rely on; `posture` and `attacks`
//! look at a session from inside and out; `approvals` has a person behind the client, who decides;
//! `cancellation` has what interrupts a cell and what does not; `tasks` has cells as MCP tasks;
//! `auth` meets a real issuer of tokens; `branching` copies sessions; `faults` takes processes and
//! resources away under a server; `network` reaches out of them, with `secrets` in its hands;
//! `order` sends calls without waiting;
//! `stdio`, `cli`, `cli_words`, `audit`, `daemon`, `leaks`, `images` and `profiles` use the built
//! program as its users do; `upstream` has sessions call tools of another MCP server; `clients` and
//! `conformance` are other people's programs; `tidy` reads the tree; `release` shows
//! what release builds lack.

// Release builds have neither the fake backend nor the switches of the jail.
#[cfg(not(debug_assertions))]
compile_error!("tests need a profile with debug-assertions");

mod approvals;
mod attacks;
mod audit;
mod auth;
mod branching;
mod cancellation;
mod cli;
mod cli_words;
mod clients;
mod conformance;
mod containers;
mod contract;
mod daemon;
mod expectations;
mod faults;
mod http;
mod images;
mod leaks;
mod network;
mod order;
mod packages;
mod posture;
mod profiles;
mod release;
mod runner;
mod secrets;
mod stdio;
mod support;
mod tasks;
mod tidy;
mod upstream;
