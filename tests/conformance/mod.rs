//! The public conformance suite of the protocol against our own stack: every server scenario of both revisions, no failure excused.
//!
//! The suite wants tools, prompts and resources of its own choosing; `fixture` has them. They are served by the transport of the program,
//! in this process. `suite` installs the suite, runs it and reads what it found.

mod catalogue;
mod fixture;
mod long;
mod questions;
mod suite;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use cellblock::http::routes::Access;
use cellblock::http::{Allowed, Open, Routes, connections};
use cellblock::mcp::http::Endpoint;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::fixture::Fixture;
use self::suite::{Revision, check_all};
use crate::support::server::PATIENCE;
use crate::support::skipped;

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
    let address = runtime.block_on(serve(Fixture::new()));
    check_all(folder, &format!("http://{address}/mcp"), revision);
}

/// Serves a handler on a free port, as the program serves its own, for as long as the runtime lives.
async fn serve(fixture: Fixture) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let end = CancellationToken::new();
    let routes = Routes {
        endpoint: Endpoint::new(fixture, |_| None, PATIENCE, end.clone()),
        allowed: Allowed::new(address, Vec::new(), Vec::new()),
        access: Access::Open,
        public_url: format!("http://{address}"),
        more: Router::new(),
        ready: Arc::new(|| Ok(())),
        metrics: Arc::new(String::new),
    };
    tokio::spawn(connections::serve(listener, None, routes.router(), MOST_CONNECTIONS, Open::default(), end, PATIENCE));
    address
}
