//! The session daemon: sessions in a process that outlives the frontend that serves clients.
//!
//! ```text
//!  frontend (HTTP, tokens, MCP)              session daemon (sessions, sandboxes, egress)
//!    DaemonClient: Host      ── Unix socket ──   serve(): any SessionHost
//!      daemon_connection     ── frames ───────     frontend_connection, one per frontend
//!      start: finds or starts a daemon
//!      known_sessions: which sessions a dead daemon had
//! ```
//!
//! When a frontend dies, its calls are dropped and not cancelled: cells continue and their results
//! are kept; an upload that was not complete is discarded. The next frontend finds everything. When
//! the daemon dies, its guardian ends every sandbox; the client starts another daemon for the next
//! call, and answers calls for the lost sessions by name. A daemon without a frontend and without a
//! session exits. Nothing is written to disk but the socket.
//!
//! Both sides are the same program of the same user: the kernel reports the user at the other end,
//! and other users are refused. `frame` has the form of what is sent, `message` its content,
//! `frame_sender` sends it, `file_stream` sends files in chunks. Operations pass through as values,
//! see `ops`.

mod client;
mod daemon_connection;
mod file_stream;
mod frame;
mod frame_sender;
mod frontend_connection;
mod known_sessions;
mod message;
mod serve;
mod socket;
mod start;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

pub use client::DaemonClient;
pub use message::{DaemonStatus, PROTOCOL, StopReply};
pub use serve::{DaemonInfo, ExitReason, report_startup_failure, serve};
#[cfg(test)]
pub(crate) use socket::socket_folder;
pub use socket::{
    DaemonName, DaemonSocket, InvalidDaemonName, SocketNotInherited, daemons_in, listening_daemons,
};
pub use start::{AttachError, attach, different_settings, query_status, request_stop};

use crate::ops::Host;
use crate::session::{Ledger, SessionSummary, Sessions};

/// How a frontend finds its daemon or starts one.
#[derive(Clone)]
pub struct DaemonSettings {
    pub runtime_dir: PathBuf,
    pub name: DaemonName,
    /// The program, and the arguments with which it is a daemon.
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// What the daemon reads from its standard input. It may hold secrets, so it is in no argument,
    /// file or log.
    pub hand_over: Vec<u8>,
    /// The settings that sessions depend on, one per line: the name, `=`, and a digest.
    pub digest: String,
    /// Files of sessions outlive them, because the working folder is the operator's.
    pub files_outlive_sessions: bool,
}

impl fmt::Debug for DaemonSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("DaemonSettings")
            .field("runtime_dir", &self.runtime_dir)
            .field("name", &self.name)
            .field("hand_over", &format_args!("[redacted]"))
            .finish_non_exhaustive()
    }
}

/// What a daemon serves.
#[async_trait]
pub trait SessionHost: Host {
    /// Lists the sessions of all owners.
    fn residents(&self) -> Vec<SessionSummary>;

    /// Executions that have ended and are not recorded yet.
    fn ledger(&self) -> Arc<Ledger>;

    /// Follows the number of sessions.
    fn session_count(&self) -> watch::Receiver<usize>;

    /// Ends every session.
    async fn shut_down(&self);
}

#[async_trait]
impl SessionHost for Sessions {
    fn residents(&self) -> Vec<SessionSummary> {
        Sessions::summaries(self)
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(Sessions::ledger(self))
    }

    fn session_count(&self) -> watch::Receiver<usize> {
        Sessions::session_count(self)
    }

    async fn shut_down(&self) {
        Sessions::shut_down(self).await;
    }
}
