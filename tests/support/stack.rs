//! The HTTP stack of the program, in this process, over a handler of the test's own.
//!
//! Sessions, tokens and the command line are left out: what is tested is everything between the
//! socket and a handler.

use std::net::SocketAddr;
use std::time::Duration;

use cellblock::audit::Audit;
use cellblock::auth::{AuthChoice, AuthSettings, Authenticator};
use cellblock::http::{Allowed, Reception, Routes, connections};
use cellblock::mcp::http::{Endpoint, Keeping};
use cellblock::telemetry::{Health, Metrics};
use rmcp::ServerHandler;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// After how long a connection of an older client is forgotten. No test lasts so long.
const IDLE: Duration = Duration::from_secs(300);

/// A stack that serves until its runtime ends.
pub(crate) struct Stack {
    pub(crate) address: SocketAddr,
    metrics: Metrics,
}

impl Stack {
    /// Serves a handler on a free port; no more than `most` connections at once. Everybody may do
    /// everything.
    pub(crate) async fn serve<H>(handler: H, most: usize) -> Stack
    where
        H: ServerHandler + Clone + Send + Sync + 'static,
    {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (end, health) = (CancellationToken::new(), Health::new());
        let metrics = Metrics::new(&health);
        let off = AuthSettings {
            choice: AuthChoice::Off,
            ..AuthSettings::default()
        };
        let authenticator = Authenticator::from_settings(&off).await.unwrap();
        let routes = Routes {
            endpoint: Endpoint::new(
                handler,
                |_| None,
                Keeping {
                    idle: IDLE,
                    folder: None,
                },
                end.clone(),
            ),
            allowed: Allowed::new(address, Vec::new(), Vec::new()),
            authenticator,
            public_url: format!("http://{address}"),
            sessions: None,
            health,
            metrics: metrics.clone(),
            audit: Audit::off(),
        };
        let (_, reception) = watch::channel(Reception {
            routes: routes.router(),
            tls: None,
        });
        tokio::spawn(connections::serve(
            listener,
            reception,
            most,
            metrics.clone(),
            end,
            IDLE,
        ));
        Stack { address, metrics }
    }

    /// How many connections are open.
    pub(crate) fn open(&self) -> usize {
        let figures = self.metrics.render();
        let line = figures
            .lines()
            .find_map(|line| line.strip_prefix("cellblock_http_connections "));
        line.and_then(|count| count.parse().ok())
            .unwrap_or_else(|| panic!("it is not in {figures}"))
    }
}
