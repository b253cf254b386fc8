//! The public conformance suite of the protocol against our own stack: every server scenario of both revisions, no failure excused.
//!
//! The suite wants tools, prompts and resources of its own choosing; `fixture` has them. They are served by the transport of the program,
//! in this process. `suite` installs the suite, runs it and reads what it found.

mod catalogue;
mod fixture;
mod long;
mod questions;
mod suite;

use self::fixture::Fixture;
use self::suite::{Revision, check_all};
use crate::support::skipped;
use crate::support::stack::Stack;

/// The suite has a few connections open at a time.
const MOST_CONNECTIONS: usize = 64;

#[test]
fn every_scenario_of_2026_07_28_passes() {
    check(Revision::Stateless);
}

#[test]
fn every_scenario_of_2025_11_25_passes() {
    check(Revision::Initialize);
}

fn check(revision: Revision) {
    let Some(folder) = crate::support::npm::folder() else {
        return skipped("npm (the conformance suite)");
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let stack = runtime.block_on(Stack::serve(Fixture::new(), MOST_CONNECTIONS));
    check_all(folder, &format!("http://{}/mcp", stack.address), revision);
}
