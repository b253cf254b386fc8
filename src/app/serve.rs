//! `cellblock mcp`: serves one client over standard input and output.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use tracing::info;

use super::{Warmth, house, open_audit, work_folder};
use crate::audit::{Event, ServerStarted, ServerStopped};
use crate::config::{Settings, Undo};
use crate::mcp::{self, HostFiles, McpSettings};

/// The largest file that `upload_file` and `download_file` copy.
const LARGEST_FILE: u64 = 1 << 30;

/// Serves until the client closes standard input or a signal asks to end.
pub(super) async fn stdio(settings: Settings) -> anyhow::Result<ExitCode> {
    let files = HostFiles::new(&settings.allowed_dirs, LARGEST_FILE).context("an allowed directory cannot be used")?;
    let audit = open_audit(&settings)?;
    let house = house(&settings, Warmth::Full)?;
    audit.record(Event::new(ServerStarted { version: env!("CARGO_PKG_VERSION").into(), serving: "stdio".into() }))?;
    let server = mcp::Server::local(
        Arc::new(house.sessions.clone()),
        files,
        McpSettings {
            default_timeout: settings.timeout,
            max_timeout: settings.max_timeout,
            idle_timeout: settings.idle_timeout,
            work_folder: work_folder(&settings),
            can_undo: settings.undo != Undo::Off,
            network: settings.network.rules.clone(),
            can_install: house.packages.is_some(),
            ..McpSettings::default()
        },
    );
    let served = tokio::select! {
        served = mcp::serve_stdio(server) => served.map(|()| "end of input").map_err(anyhow::Error::from),
        signal = asked_to_end() => {
            info!(signal, "asked to end");
            Ok(signal)
        }
    };
    house.shut_down().await;
    let reason = served.as_ref().map_or("the connection failed", |reason| *reason);
    audit.note(Event::new(ServerStopped { reason: reason.into() }));
    served.map(|_| ExitCode::SUCCESS)
}

/// Waits for SIGTERM or SIGINT and returns its name.
pub(super) async fn asked_to_end() -> &'static str {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}
