//! `cellblock mcp`: serves one client over standard input and output.

use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use tracing::info;

use super::audited::AuditedSessions;
use super::daemon::{KeepByDefault, SessionsHandle};
use super::{asked_to_end, mcp_settings, open_audit};
use crate::audit::{Event, ServerStarted, ServerStopped};
use crate::config::Settings;
use crate::mcp::{self, Front, HostFiles};
use crate::telemetry::{Health, Metrics};

/// The largest file that `upload_file` and `download_file` copy.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Serves until the client closes standard input or a signal asks the server to stop.
pub(super) async fn serve(settings: Settings) -> anyhow::Result<ExitCode> {
    let files = HostFiles::new(&settings.allowed_dirs, MAX_FILE_BYTES)
        .context("an allowed directory cannot be used")?;
    let audit = open_audit(&settings)?;
    audit.record(Event::new(ServerStarted {
        version: env!("CARGO_PKG_VERSION").into(),
        serving: "stdio".into(),
    }))?;
    let handle = SessionsHandle::of(&settings, KeepByDefault::No, "mcp").await?;
    handle.set_up_servers(&settings);
    let told = mcp_settings(&settings, Front::Stdio, KeepByDefault::No)?;
    // A server on standard input and output exports no metrics.
    let metrics = Metrics::new(&Health::new());
    let sessions = Arc::new(AuditedSessions::new(
        handle.sessions(),
        audit.clone(),
        metrics,
    ));
    let server = mcp::Server::new(sessions, files, told);
    let mut serving = pin!(mcp::serve_stdio(server.clone()));
    let served = tokio::select! {
        served = &mut serving => served.map(|()| "end of input"),
        signal = asked_to_end() => {
            info!(signal, "asked to end");
            server.drain();
            serving.await.map(|()| signal)
        }
    };
    let served = served.map_err(anyhow::Error::from);
    handle.release(&settings.runtime_dir).await;
    let reason = served
        .as_ref()
        .map_or("the connection failed", |reason| *reason);
    audit.note(Event::new(ServerStopped {
        reason: reason.into(),
    }));
    served.map(|_| ExitCode::SUCCESS)
}
