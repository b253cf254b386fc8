//! `cellblock serve`: serves many clients over HTTP.
//!
//! ```text
//! names and tokens → routes → MCP endpoint, files → sessions, in a session daemon or here
//! ```
//!
//! On SIGHUP the server reads its settings again and applies those that can change at run time.
//! When asked to stop, it accepts no new connections, informs waiting callers that their code
//! continues, and exits.

use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::audited::AuditedSessions;
use super::daemon::{KeepByDefault, SessionsHandle};
use super::settings_diff::changed_beyond_reload;
use super::{asked_to_end, mcp_settings, open_audit};
use crate::audit::{Audit, Event, ServerReloaded, ServerStarted, ServerStopped};
use crate::auth::Authenticator;
use crate::config::{ConfigError, Settings};
use crate::http::routes::Routes;
use crate::http::{Allowed, Reception, connections, tls};
use crate::mcp::http::{Endpoint, Keeping};
use crate::mcp::{self, Front, HostFiles};
use crate::sandbox::Preparation;
use crate::telemetry::{Health, HealthPart, Metrics};

/// Grace period for open requests after the server was asked to stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until a signal asks the server to stop.
pub(super) async fn serve(
    settings: Settings,
    reload: impl Fn() -> Result<Settings, ConfigError>,
) -> anyhow::Result<ExitCode> {
    // Installed first: without a handler the signal would kill the process. An early signal is
    // kept.
    let mut hang_up = signal(SignalKind::hangup()).context("signals cannot be received")?;
    let audit = open_audit(&settings)?;
    audit.record(Event::new(ServerStarted {
        version: env!("CARGO_PKG_VERSION").into(),
        serving: "http".into(),
    }))?;
    let authenticator = Authenticator::from_settings(&settings.auth).await?;
    authenticator.may_listen(settings.service.listen.ip())?;
    let listen = settings.service.listen;
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("could not listen at {listen}"))?;
    let address = listener
        .local_addr()
        .context("the listening address cannot be read")?;
    let handle = SessionsHandle::of(&settings, KeepByDefault::Yes, "serve").await?;

    handle.set_up_servers(&settings);
    let health = Health::new();
    watch_parts(&health, &handle, &audit);
    let (metrics, end) = (Metrics::new(&health), CancellationToken::new());
    let sessions = Arc::new(AuditedSessions::new(
        handle.sessions(),
        audit.clone(),
        metrics.clone(),
    ));
    let no_files = HostFiles::new(&[], 0).context("host files cannot be set up")?;
    let server = mcp::Server::new(
        sessions.clone(),
        no_files,
        mcp_settings(&settings, Front::Http, KeepByDefault::Yes)?,
    );
    let endpoint = Endpoint::of(server.clone(), keeping(&settings), end.clone());
    let state = ServiceState {
        handle: &handle,
        address,
        endpoint,
        sessions,
        health: health.clone(),
        metrics: metrics.clone(),
        audit: audit.clone(),
    };
    let (reception, current) = watch::channel(state.reception(&settings, authenticator.clone())?);
    announce(&authenticator, &public_url(&settings, address));

    let stop = CancellationToken::new();
    let most = settings.service.max_connections;
    let mut serving = pin!(connections::serve(
        listener,
        current,
        most,
        metrics,
        stop.clone(),
        DRAIN_TIMEOUT
    ));
    let mut ending = pin!(asked_to_end());
    let signal = loop {
        tokio::select! {
            () = &mut serving => unreachable!("it ends when it is told to"),
            signal = &mut ending => break signal,
            _ = hang_up.recv() => state.reload(&settings, &reload, &reception).await,
        }
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
    handle.release(&settings.runtime_dir).await;
    audit.note(Event::new(ServerStopped {
        reason: signal.into(),
    }));
    Ok(ExitCode::SUCCESS)
}

/// Reports to the health check why new work should go elsewhere, when it should.
fn watch_parts(health: &Health, handle: &SessionsHandle, audit: &Audit) {
    let preparation = handle.sessions().preparation();
    health.ask(HealthPart::Python, move || match &*preparation.borrow() {
        Preparation::Ready => None,
        Preparation::Working { step, .. } => Some(step.clone()),
        Preparation::Failed { why } => Some(why.clone()),
    });
    let audit = audit.clone();
    health.ask(HealthPart::Audit, move || audit.refuses());
    if let SessionsHandle::Daemon(client) = handle {
        let client = client.clone();
        health.ask(HealthPart::SessionDaemon, move || client.problem());
    }
}

/// The state that requests use.
struct ServiceState<'a> {
    handle: &'a SessionsHandle,
    address: SocketAddr,
    endpoint: Endpoint<mcp::Server>,
    sessions: Arc<AuditedSessions>,
    health: Health,
    metrics: Metrics,
    audit: Audit,
}

impl ServiceState<'_> {
    fn reception(
        &self,
        settings: &Settings,
        authenticator: Authenticator,
    ) -> anyhow::Result<Reception> {
        let service = &settings.service;
        let tls = service
            .tls
            .as_ref()
            .map(|files| tls::acceptor(&files.certificates, &files.key))
            .transpose()?;
        let routes = Routes {
            endpoint: self.endpoint.clone(),
            allowed: Allowed::new(
                self.address,
                service.allowed_hosts.clone(),
                service.allowed_origins.clone(),
            ),
            authenticator,
            public_url: public_url(settings, self.address),
            sessions: Some(self.sessions.clone()),
            health: self.health.clone(),
            metrics: self.metrics.clone(),
            audit: self.audit.clone(),
        };
        Ok(Reception {
            routes: routes.router(),
            tls,
        })
    }

    /// Applies the settings that can change at run time: who may call, names, origins,
    /// certificates, other MCP servers, approvals and quotas. Invalid settings change nothing.
    async fn reload(
        &self,
        before: &Settings,
        read: &impl Fn() -> Result<Settings, ConfigError>,
        reception: &watch::Sender<Reception>,
    ) {
        let made = async {
            let settings = read()?;
            let authenticator = Authenticator::from_settings(&settings.auth).await?;
            authenticator.may_listen(self.address.ip())?;
            let made = self.reception(&settings, authenticator)?;
            anyhow::Ok((settings, made))
        };
        match made.await {
            Ok((settings, made)) => {
                reception.send_replace(made);
                self.handle.update_settings(&settings);
                let mut changed = vec![
                    "auth",
                    "allowed_hosts",
                    "allowed_origins",
                    "tls_cert",
                    "tls_key",
                    "mcp_servers",
                ];
                match self.handle.set_up_approvals(&settings).await {
                    Ok(()) => changed.push("approvals"),
                    Err(refused) => {
                        warn!(error = %refused, "the approvals were not read again; the old ones \
                             hold")
                    }
                }
                match self.handle.set_up_limits(&settings).await {
                    Ok(()) => changed.extend(["quotas", "max_running"]),
                    Err(refused) => {
                        warn!(error = %refused, "the quotas were not read again; the old ones hold")
                    }
                }
                let others = changed_beyond_reload(before, &settings);
                if !others.is_empty() {
                    warn!(
                        settings = others.join(", "),
                        "other settings changed too; they hold after a restart of the server, \
                         those of sessions after \"cellblock daemon stop\""
                    );
                }
                info!("the settings were read again");
                self.audit.note(Event::new(ServerReloaded {
                    changed: changed.into_iter().collect(),
                }));
            }
            Err(error) => warn!(
                error = format!("{error:#}"),
                "the settings were not read again; the old ones hold"
            ),
        }
    }
}

/// Connections of older clients outlive the server if sessions do.
fn keeping(settings: &Settings) -> Keeping {
    let outlive = settings.keep_sessions.unwrap_or(true);
    let name = settings
        .daemon_name
        .as_ref()
        .map_or("serve", |name| name.as_str());
    let folder = settings.runtime_dir.join("connections").join(name);
    Keeping {
        idle: settings.idle_timeout,
        folder: outlive.then_some(folder),
    }
}

fn public_url(settings: &Settings, address: SocketAddr) -> String {
    settings
        .service
        .public_url
        .clone()
        .unwrap_or_else(|| own_url(address, settings.service.tls.is_some()))
}

fn own_url(address: SocketAddr, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    format!("{scheme}://{address}")
}

/// Logs the address of the server and how to authenticate, without the token itself.
fn announce(authenticator: &Authenticator, public_url: &str) {
    info!(
        url = format!("{public_url}{}", crate::http::routes::ENDPOINT),
        "serving MCP over HTTP"
    );
    if let Some(file) = authenticator.development_token() {
        warn!(file = %file.display(), "no issuer of tokens is configured: development mode, with a \
                                       token in this file");
    }
}
