//! `cellblock serve`: serves many clients over HTTP.
//!
//! ```text
//! names and tokens → routes → MCP endpoint, files → sessions, in a keeper or here
//! ```
//!
//! Asked to end, it takes no new connections, tells those who wait for code that it goes on, and leaves.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::keeper::{Home, KeepByDefault};
use super::recorded::Recorded;
use super::{asked_to_end, mcp_settings, open_audit};
use crate::audit::{Event, ServerStarted, ServerStopped};
use crate::auth::Authenticator;
use crate::config::Settings;
use crate::http::routes::{Access, Routes};
use crate::http::{Allowed, Reception, connections, tls};
use crate::mcp::http::Endpoint;
use crate::mcp::{self, Front, HostFiles};
use crate::telemetry::{Health, Metrics};

/// How long requests under way may take after the server was asked to end.
const GRACE: Duration = Duration::from_secs(10);

/// Serves until a signal asks to end.
pub(super) async fn serve(settings: Settings) -> anyhow::Result<ExitCode> {
    let service = &settings.service;
    let authenticator = Authenticator::from_settings(&settings.auth).await?;
    authenticator.may_listen(service.listen.ip())?;
    let tls = service.tls.as_ref().map(|files| tls::acceptor(&files.certificates, &files.key)).transpose()?;
    let audit = open_audit(&settings)?;
    audit.record(Event::new(ServerStarted { version: env!("CARGO_PKG_VERSION").into(), serving: "http".into() }))?;
    let listener =
        TcpListener::bind(service.listen).await.with_context(|| format!("could not listen at {}", service.listen))?;
    let address = listener.local_addr().context("the listening address cannot be read")?;
    let home = Home::of(&settings, KeepByDefault::Yes, "serve").await?;

    let health = Health::new();
    let (metrics, end) = (Metrics::new(&health), CancellationToken::new());
    let no_files = HostFiles::new(&[], 0).context("no folder is no trouble")?;
    let server = mcp::Server::new(
        Arc::new(Recorded::new(home.sessions(), audit.clone(), metrics.clone())),
        no_files,
        mcp_settings(&settings, Front::Http),
    );
    let public_url = service.public_url.clone().unwrap_or_else(|| own_url(address, tls.is_some()));
    let routes = Routes {
        endpoint: Endpoint::of(server.clone(), settings.idle_timeout, end.clone()),
        allowed: Allowed::new(address, service.allowed_hosts.clone(), service.allowed_origins.clone()),
        access: Access::Tokens(authenticator.clone()),
        public_url: public_url.clone(),
        more: Router::new(),
        health: health.clone(),
        metrics: metrics.clone(),
        audit: audit.clone(),
    };
    announce(&authenticator, &public_url);

    let stop = CancellationToken::new();
    let (_reception, current) = watch::channel(Reception { routes: routes.router(), tls });
    let serving = connections::serve(listener, current, service.max_connections, metrics, stop.clone(), GRACE);
    let mut serving = std::pin::pin!(serving);
    let signal = tokio::select! {
        () = &mut serving => unreachable!("it ends when it is told to"),
        signal = asked_to_end() => signal,
    };
    info!(signal, "asked to end");
    health.drain();
    stop.cancel();
    server.drain();
    tokio::select! {
        () = serving => {}
        again = asked_to_end() => warn!(signal = again, "asked again; ending at once"),
    }
    end.cancel();
    home.leave().await;
    audit.note(Event::new(ServerStopped { reason: signal.into() }));
    Ok(ExitCode::SUCCESS)
}

fn own_url(address: SocketAddr, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    format!("{scheme}://{address}")
}

/// Says where the server is and how to get in, without the token itself.
fn announce(authenticator: &Authenticator, public_url: &str) {
    info!(url = format!("{public_url}{}", crate::http::routes::ENDPOINT), "serving MCP over HTTP");
    if let Some(file) = authenticator.development_token() {
        warn!(file = %file.display(), "no issuer of tokens is configured: development mode, with a token in this file");
    }
}
