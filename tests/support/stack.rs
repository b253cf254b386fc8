//! The HTTP stack of the program, in this process, over a handler of the test's own.
//!
//! Sessions, tokens and the command line are left out: what is tested is everything between the socket and a handler.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use cellblock::http::routes::Access;
use cellblock::http::{Allowed, Open, Routes, connections};
use cellblock::mcp::http::Endpoint;
use rmcp::ServerHandler;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// After how long a connection of an older client is forgotten. No test lasts so long.
const IDLE: Duration = Duration::from_secs(300);

/// A stack that serves until its runtime ends.
pub(crate) struct Stack {
    pub(crate) address: SocketAddr,
    /// How many connections are open.
    pub(crate) open: Open,
}

impl Stack {
    /// Serves a handler on a free port; no more than `most` connections at once. Everybody may do everything.
    pub(crate) async fn serve<H>(handler: H, most: usize) -> Stack
    where
        H: ServerHandler + Clone + Send + Sync + 'static,
    {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, open) = (CancellationToken::new(), Open::default());
        let routes = Routes {
            endpoint: Endpoint::new(handler, |_| None, IDLE, end.clone()),
            allowed: Allowed::new(address, Vec::new(), Vec::new()),
            access: Access::Open,
            public_url: format!("http://{address}"),
            more: Router::new(),
            ready: Arc::new(|| Ok(())),
            metrics: Arc::new(String::new),
        };
        tokio::spawn(connections::serve(listener, None, routes.router(), most, open.clone(), end, IDLE));
        Stack { address, open }
    }
}
