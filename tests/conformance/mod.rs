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

use self::fixture::Fixture;
use self::suite::{Revision, check_all};
use crate::support::skipped;

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

/// Serves a handler on a free port for as long as the runtime lives.
async fn serve(fixture: Fixture) -> SocketAddr {
    use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = StreamableHttpServerConfig::default().with_allowed_origins([format!("http://{address}")]);
    let service = StreamableHttpService::new(
        move || Ok(fixture.clone()),
        std::sync::Arc::new(LocalSessionManager::default()),
        config,
    );
    let router = axum::Router::new().nest_service("/mcp", service);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}
