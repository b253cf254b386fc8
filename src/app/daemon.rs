//! Where the sessions of a command are, and the session daemon: `cellblock daemon`.
//!
//! A server that keeps sessions starts this program again as `cellblock daemon hold`, the session
//! daemon. The daemon creates the same `LocalSessions` as the server would and serves them on a
//! socket. It receives the configuration file and the flags as the server has read them through its
//! standard input, and inherits the environment; no secret is in an argument or a file.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::join_all;
use tracing::{error, info};

use super::cli::DaemonCommand;
use super::output::{print, say};
use super::{
    LocalSessions, StartMode, approvals, asked_to_end, local_sessions, set_up_servers,
    settings_diff,
};
use crate::config::{Settings, SettingsHandOver};
use crate::daemon::{
    self, AttachError, DaemonClient, DaemonInfo, DaemonName, DaemonSettings, DaemonSocket,
    DaemonStatus, SessionHost, StopReply,
};
use crate::ops::{self, Host, HostExt};
use crate::session::{LimitSetup, Principal, Refused};

/// A configuration file with all its environments has a few kilobytes.
const MAX_HAND_OVER_BYTES: u64 = 16 << 20;

/// Timeout for the daemon's status when a server stops. The daemon answers from memory.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether a command keeps sessions if the setting is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeepByDefault {
    /// For servers with many clients.
    Yes,
    No,
}

impl KeepByDefault {
    /// Returns whether sessions are kept with these settings.
    pub(super) fn decides(self, settings: &Settings) -> bool {
        settings.keep_sessions.unwrap_or(self == KeepByDefault::Yes)
    }
}

/// Where the sessions of a command are.
pub(super) enum SessionsHandle {
    /// In this process; they end with it.
    Local(LocalSessions),
    /// In a session daemon, where they stay when this process ends.
    Daemon(DaemonClient),
}

impl SessionsHandle {
    /// Creates the sessions, or connects to kept ones. `name` is the daemon's default name; a name
    /// set by the operator takes precedence.
    pub(super) async fn of(
        settings: &Settings,
        keep: KeepByDefault,
        name: &str,
    ) -> anyhow::Result<SessionsHandle> {
        if !keep.decides(settings) {
            return Ok(SessionsHandle::Local(local_sessions(
                settings,
                StartMode::Full,
            )?));
        }
        let attached = daemon::attach(&daemon_settings(settings, name)?).await;
        let handle = SessionsHandle::Daemon(
            attached.context("sessions cannot be kept; --keep-sessions off does without")?,
        );
        handle
            .set_up_limits(settings)
            .await
            .context("the sessions that are kept cannot have these quotas")?;
        handle.set_up_approvals(settings).await.context(
            "the sessions that are kept cannot have these approvals; `cellblock daemon stop` ends \
             them, and the present settings hold from then on",
        )?;
        Ok(handle)
    }

    /// Passes the operator's MCP servers to the sessions.
    pub(super) fn set_up_servers(&self, settings: &Settings) {
        set_up_servers(self.sessions(), settings);
    }

    pub(super) fn sessions(&self) -> Arc<dyn Host> {
        match self {
            SessionsHandle::Local(local) => Arc::new(local.sessions.clone()),
            SessionsHandle::Daemon(client) => Arc::new(client.clone()),
        }
    }

    /// Passes the approval policy to the sessions. Sessions of this process have it from the start.
    /// Kept sessions may have another one, and must be updated before the first client is served.
    pub(super) async fn set_up_approvals(&self, settings: &Settings) -> Result<(), Refused> {
        self.sessions()
            .run(
                &Principal::operator(),
                ops::SetApprovals {
                    setup: approvals::setup(settings),
                },
            )
            .await
    }

    /// Passes the quotas of callers and the limit of concurrent cells to the sessions.
    pub(super) async fn set_up_limits(&self, settings: &Settings) -> Result<(), Refused> {
        let setup = LimitSetup {
            quotas: settings.quotas,
            max_running: settings.max_running,
        };
        self.sessions()
            .run(&Principal::operator(), ops::SetLimits { setup })
            .await
    }

    /// Uses these settings for the next daemon, if this one ends; the operator's MCP servers change
    /// at once.
    pub(super) fn update_settings(&self, settings: &Settings) {
        self.set_up_servers(settings);
        if let SessionsHandle::Daemon(client) = self {
            match daemon_settings(settings, client.daemon_name().as_str()) {
                Ok(settings) => client.update_settings(settings),
                Err(error) => error!(
                    error = format!("{error:#}"),
                    "the next session daemon will have the old settings"
                ),
            }
        }
    }

    /// Ends the sessions of this process. Kept sessions and their cells continue unchanged.
    pub(super) async fn release(&self, runtime_dir: &Path) {
        match self {
            SessionsHandle::Local(local) => local.shut_down().await,
            SessionsHandle::Daemon(client) => {
                let name = client.daemon_name();
                let status =
                    tokio::time::timeout(STATUS_TIMEOUT, daemon::query_status(runtime_dir, &name))
                        .await;
                client.disconnect();
                if let Ok(Ok(Some(status))) = status
                    && let Some(told) = what_goes_on(&name, &status)
                {
                    info!(sessions = status.sessions, "{told}");
                }
            }
        }
    }
}

/// Returns how the daemon of these settings is found and started.
pub(super) fn daemon_settings(settings: &Settings, name: &str) -> anyhow::Result<DaemonSettings> {
    let name = match &settings.daemon_name {
        Some(name) => name.clone(),
        None => name.parse::<DaemonName>()?,
    };
    Ok(DaemonSettings {
        runtime_dir: settings.runtime_dir.clone(),
        name,
        program: std::env::current_exe().context("could not find this program")?,
        arguments: vec!["daemon".to_owned(), "hold".to_owned()],
        hand_over: rmp_serde::to_vec_named(&settings.hand_over)
            .context("the settings cannot be handed over")?,
        digest: settings_diff::digests(settings),
        files_outlive_sessions: settings.workspace.is_some(),
    })
}

/// What a daemon receives from the server that starts it.
pub(super) struct InheritedState {
    listener: UnixListener,
    pub(super) settings: SettingsHandOver,
}

/// Detaches this process and takes over the descriptors that the server has put in the place of
/// standard input and output.
pub(super) fn inherit() -> anyhow::Result<InheritedState> {
    let listener = DaemonSocket::inherited()?;
    // Signals to the server's terminal or process group are not meant for this process. The call
    // fails for a group leader, which is detached enough.
    let _ = rustix::process::setsid();
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_HAND_OVER_BYTES)
        .read_to_end(&mut bytes)
        .context("no settings were handed over")?;
    let settings = rmp_serde::from_slice(&bytes)
        .context("the settings that were handed over make no sense")?;
    Ok(InheritedState { listener, settings })
}

/// Executes `cellblock daemon …`.
pub(super) async fn execute(
    command: DaemonCommand,
    settings: Settings,
    inheritance: Option<InheritedState>,
) -> anyhow::Result<ExitCode> {
    match (command, inheritance) {
        (DaemonCommand::Hold, Some(inheritance)) => hold(&settings, inheritance.listener).await,
        (DaemonCommand::Hold, None) => bail!(daemon::SocketNotInherited),
        (DaemonCommand::Status { json }, _) => status(&settings, json).await,
        (DaemonCommand::Stop { name, now }, _) => stop(&settings, &name, now).await,
    }
}

async fn hold(settings: &Settings, listener: UnixListener) -> anyhow::Result<ExitCode> {
    // The daemon must not pin the folder that the server was started in for days.
    std::env::set_current_dir("/").context("the root folder cannot be entered")?;
    let socket =
        DaemonSocket::new(listener).context("the socket that was handed over cannot be used")?;
    let local = match local_sessions(settings, StartMode::Full) {
        Ok(local) => local,
        Err(cause) => {
            error!(
                error = format!("{cause:#}"),
                "this session daemon cannot serve sessions"
            );
            daemon::report_startup_failure(socket, format!("{cause:#}")).await;
            return Ok(ExitCode::from(2));
        }
    };
    // The servers of the process that started this daemon. Every later server sends its own.
    set_up_servers(Arc::new(local.sessions.clone()), settings);
    info!("the session daemon runs");
    let host: Arc<dyn SessionHost> = Arc::new(local.sessions.clone());
    let info = DaemonInfo {
        settings: settings_diff::digests(settings),
        build: env!("CARGO_PKG_VERSION").to_owned(),
    };
    daemon::serve(socket, host, info, asked_to_end()).await;
    local.shut_down().await;
    Ok(ExitCode::SUCCESS)
}

async fn status(settings: &Settings, json: bool) -> anyhow::Result<ExitCode> {
    let mut alive = Vec::new();
    for (name, answer) in ask_all(settings).await {
        match answer {
            Ok(Some(status)) => alive.push((name, status)),
            // The daemon died and left its socket, which the next one replaces.
            Ok(None) => {}
            Err(error) => say(format_args!("cellblock: {:#}", anyhow::Error::new(error))),
        }
    }
    print(&if json {
        as_json(&alive)
    } else {
        as_text(&alive)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Queries all daemons concurrently, so that all unresponsive ones together cost one timeout.
async fn ask_all(
    settings: &Settings,
) -> Vec<(DaemonName, Result<Option<DaemonStatus>, AttachError>)> {
    let ask = async |name: DaemonName| {
        let answer = daemon::query_status(&settings.runtime_dir, &name).await;
        (name, answer)
    };
    join_all(
        daemon::daemons_in(&settings.runtime_dir)
            .into_iter()
            .map(ask),
    )
    .await
}

fn as_json(alive: &[(DaemonName, DaemonStatus)]) -> String {
    let row = |(name, status): &(DaemonName, DaemonStatus)| {
        serde_json::json!({
            "name": name.as_str(),
            "process": status.process,
            "age_seconds": status.age.as_secs(),
            "sessions": status.sessions,
            "running": status.running,
            "servers": status.frontends,
            "version": status.build,
            "protocol": status.protocol,
        })
    };
    format!(
        "{:#}\n",
        serde_json::Value::from(alive.iter().map(row).collect::<Vec<_>>())
    )
}

fn as_text(alive: &[(DaemonName, DaemonStatus)]) -> String {
    if alive.is_empty() {
        return "no sessions are kept\n".to_owned();
    }
    let row = |(name, status): &(DaemonName, DaemonStatus)| {
        format!(
            "{name}: process {}, for {} s, {} sessions ({} running), {} servers connected, version \
             {}\n",
            status.process,
            status.age.as_secs(),
            status.sessions,
            status.running,
            status.frontends,
            status.build
        )
    };
    alive.iter().map(row).collect()
}

async fn stop(settings: &Settings, name: &DaemonName, now: bool) -> anyhow::Result<ExitCode> {
    match daemon::request_stop(&settings.runtime_dir, name, now).await? {
        Some(StopReply::Stopping) => {
            print(&format!("{name} has ended, and its sessions with it\n"))?
        }
        None => {
            // Only their names are needed, so an unresponsive one is not waited for.
            let others = daemon::listening_daemons(&settings.runtime_dir).await;
            bail!("there is no session daemon {name}; {}", known(&others))
        }
        Some(StopReply::Busy { running }) => {
            bail!("code is running in {running} sessions; wait for it, or interrupt it with --now")
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the names of the existing daemons.
fn known(names: &[DaemonName]) -> String {
    match names {
        [] => "no sessions are kept".to_owned(),
        names => {
            let names: Vec<&str> = names.iter().map(DaemonName::as_str).collect();
            format!("there are: {}", names.join(", "))
        }
    }
}

/// Returns which sessions outlive their server and how to end them; `None` if there are none.
fn what_goes_on(name: &DaemonName, status: &DaemonStatus) -> Option<String> {
    let sessions = match status.sessions {
        0 => return None,
        1 => "1 session goes on".to_owned(),
        many => format!("{many} sessions go on"),
    };
    let running = match status.running {
        0 => String::new(),
        running => format!(" ({running} running)"),
    };
    Some(format!(
        "{sessions}{running}; `cellblock daemon stop {name}` ends {}",
        if status.sessions == 1 { "it" } else { "them" }
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests_support::settings_below;

    /// Daemons that accept connections and never reply, as stopped ones do, cost one timeout
    /// together.
    #[tokio::test(start_paused = true)]
    async fn daemons_that_do_not_answer_are_queried_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings_below(folder.path());
        let sockets = daemon::socket_folder(&settings.runtime_dir);
        std::fs::create_dir_all(&sockets).unwrap();
        let silent = ["a", "b", "c"]
            .map(|name| UnixListener::bind(sockets.join(format!("{name}.socket"))).unwrap());
        let before = tokio::time::Instant::now();
        let first = ask_all(&settings).await;
        let together = before.elapsed();
        assert_eq!(
            first
                .iter()
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>(),
            ["a", "b", "c"]
        );
        assert!(
            first
                .iter()
                .all(|(_, answer)| matches!(answer, Err(AttachError::Unresponsive { .. })))
        );
        std::fs::remove_file(sockets.join("b.socket")).unwrap();
        std::fs::remove_file(sockets.join("c.socket")).unwrap();
        let before = tokio::time::Instant::now();
        assert_eq!(ask_all(&settings).await.len(), 1);
        assert_eq!(together, before.elapsed(), "three take as long as one");
        drop(silent);
    }

    #[tokio::test(start_paused = true)]
    async fn stopping_an_unknown_daemon_names_those_that_run_and_waits_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings_below(folder.path());
        let sockets = daemon::socket_folder(&settings.runtime_dir);
        std::fs::create_dir_all(&sockets).unwrap();
        let bind = |name: &str| UnixListener::bind(sockets.join(format!("{name}.socket"))).unwrap();
        let _unresponsive = bind("hangs");
        drop(bind("dead"));
        let before = tokio::time::Instant::now();
        let stopped = stop(&settings, &"unknown".parse().unwrap(), false).await;
        assert_eq!(
            stopped.unwrap_err().to_string(),
            "there is no session daemon unknown; there are: hangs"
        );
        assert_eq!(before.elapsed(), Duration::ZERO);
    }

    #[test]
    fn sessions_that_outlive_their_server_are_told_with_the_way_to_end_them() {
        let told = |sessions, running| {
            let (protocol, build, process, frontends) = (daemon::PROTOCOL, String::new(), 1, 1);
            let status = DaemonStatus {
                protocol,
                build,
                process,
                age: Duration::ZERO,
                sessions,
                running,
                frontends,
            };
            what_goes_on(&"serve".parse().unwrap(), &status)
        };
        assert_eq!(told(0, 0), None);
        assert_eq!(
            told(1, 0).unwrap(),
            "1 session goes on; `cellblock daemon stop serve` ends it"
        );
        assert_eq!(
            told(3, 2).unwrap(),
            "3 sessions go on (2 running); `cellblock daemon stop serve` ends them"
        );
    }

    #[test]
    fn what_is_handed_over_is_not_printed() {
        let settings = settings_below(std::path::Path::new("/base"));
        assert!(format!("{settings:?}").contains("SettingsHandOver([redacted])"));
        let daemon = daemon_settings(&settings, "serve").unwrap();
        assert!(format!("{daemon:?}").contains("[redacted]"));
    }
}
