//! `cellblock mcp`: serves one client over standard input and output.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use tracing::info;

use super::{Warmth, asked_to_end, house, mcp_settings};
use crate::config::Settings;
use crate::mcp::{self, Front, HostFiles};

/// The largest file that `upload_file` and `download_file` copy.
const LARGEST_FILE: u64 = 1 << 30;

/// Serves until the client closes standard input or a signal asks to end.
pub(super) async fn serve(settings: Settings) -> anyhow::Result<ExitCode> {
    let files = HostFiles::new(&settings.allowed_dirs, LARGEST_FILE).context("an allowed directory cannot be used")?;
    let house = house(&settings, Warmth::Full)?;
    let told = mcp_settings(&settings, Front::Stdio, house.packages.is_some());
    let server = mcp::Server::new(Arc::new(house.sessions.clone()), files, told);
    let served = tokio::select! {
        served = mcp::serve_stdio(server) => served.map_err(anyhow::Error::from),
        signal = asked_to_end() => {
            info!(signal, "asked to end");
            Ok(())
        }
    };
    house.shut_down().await;
    served.map(|()| ExitCode::SUCCESS)
}
