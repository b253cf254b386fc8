//! The public conformance suite of the protocol against our own stack: every server scenario of
//! both revisions, no failure excused.
//!
//! The suite wants tools, prompts and resources of its own choosing; `fixture` has them. They are
//! served by the transport of the program, in this process. `suite` installs the suite, runs it and
//! reads what it found.

mod catalogue;
mod fixture;
mod long;
mod questions;
mod suite;

use self::fixture::Fixture;
use self::suite::{Revision, check_all, check_one};
use crate::support::server::MINIMAL;
use crate::support::service::Service;
use crate::support::stack::Stack;
use crate::support::{npm, skipped};

const SUITE: &str = "npm (the conformance suite)";

/// The suite has a few connections open at a time.
const MAX_CONNECTIONS: usize = 64;

#[test]
fn every_scenario_of_2026_07_28_passes() {
    check(Revision::Stateless);
}

#[test]
fn every_scenario_of_2025_11_25_passes() {
    check(Revision::Initialize);
}

#[test]
fn our_own_tools_pass_every_scenario_that_asks_for_nothing_special() {
    let Some(folder) = npm::folder() else {
        return skipped(SUITE);
    };
    let service = Service::without_tokens(MINIMAL);
    let both = [
        "dns-rebinding-protection",
        "resources-list",
        "server-sse-multiple-streams",
        "tools-list",
    ];
    let initialize = ["ping", "server-initialize", "server-session-lifecycle"];
    let stateless = [
        "http-custom-header-server-validation",
        "http-header-validation",
        "input-required-result-unsupported-methods",
        "sep-2164-resource-not-found",
    ];
    for scenario in both.into_iter().chain(initialize) {
        check_one(folder, &service.url(), Revision::Initialize, scenario);
    }
    for scenario in both.into_iter().chain(stateless) {
        check_one(folder, &service.url(), Revision::Stateless, scenario);
    }
}

fn check(revision: Revision) {
    let Some(folder) = npm::folder() else {
        return skipped(SUITE);
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let stack = runtime.block_on(Stack::serve(Fixture::new(), MAX_CONNECTIONS));
    check_all(folder, &format!("http://{}/mcp", stack.address), revision);
}
