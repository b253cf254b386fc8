//! The keeper: sessions in a process of their own, which outlives the front that serves clients.
//!
//! ```text
//!  front (HTTP, tokens, MCP)                         keeper (sessions, sandboxes, the way out)
//!    Client: Host  ── Unix socket, frames ──  keep(): any Host
//!      link     one connection                    desk     one front's connection
//!      start    finds a keeper or starts one
//!      seen     which sessions a dead keeper had
//! ```
//!
//! When a front dies, its calls are dropped and not cancelled: cells go on and their outcomes wait;
//! an upload in the middle is dropped whole. The next front finds everything. When the keeper dies,
//! its guardian ends every sandbox; the client starts another keeper for the next call, and answers
//! for the lost sessions by name. A keeper that has neither a front nor a session ends. Nothing is
//! written to disk but the socket.
//!
//! Both sides are the same program of the same user: the kernel says who is at the other end, and
//! anybody else is refused. `frame` has the form of what is sent, `message` its content, `outgoing`
//! its way, `stream` files in chunks. Operations pass through as values, see `ops`.

mod client;
mod desk;
mod frame;
mod link;
mod message;
mod outgoing;
mod post;
mod seen;
mod serve;
mod start;
mod stream;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

pub use client::Client;
pub use message::{PROTOCOL, Status, StopAnswer};
pub use post::{KeeperName, NameError, NotHandedOver, Post, keepers_in};
pub use serve::{Ended, Terms, apologise, keep};
pub use start::{AttachError, ask_status, ask_to_stop, attach, different_settings};

use crate::ops::Host;
use crate::session::{Ledger, Resident, Sessions};

/// What a front must know to find its keeper, or to start one.
#[derive(Clone)]
pub struct KeeperSettings {
    pub runtime_dir: PathBuf,
    pub name: KeeperName,
    /// The program, and what makes a keeper of it.
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// What the keeper reads from its standard input. It may hold secrets, so it is in no argument,
    /// file or log.
    pub hand_over: Vec<u8>,
    /// The settings that matter to a keeper, a line for each: its name, `=`, and a digest.
    pub digest: String,
    /// Files of sessions outlive them, because the working folder is the operator's.
    pub files_outlive_sessions: bool,
}

impl fmt::Debug for KeeperSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("KeeperSettings")
            .field("runtime_dir", &self.runtime_dir)
            .field("name", &self.name)
            .field("hand_over", &format_args!("[redacted]"))
            .finish_non_exhaustive()
    }
}

/// What a keeper keeps.
#[async_trait]
pub trait Kept: Host {
    /// Names everybody's sessions.
    fn residents(&self) -> Vec<Resident>;

    /// Executions that have ended and are not recorded yet.
    fn ledger(&self) -> Arc<Ledger>;

    /// Follows how many sessions there are.
    fn population(&self) -> watch::Receiver<usize>;

    /// Ends every session.
    async fn shut_down(&self);
}

#[async_trait]
impl Kept for Sessions {
    fn residents(&self) -> Vec<Resident> {
        Sessions::residents(self)
    }

    fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(Sessions::ledger(self))
    }

    fn population(&self) -> watch::Receiver<usize> {
        Sessions::population(self)
    }

    async fn shut_down(&self) {
        Sessions::shut_down(self).await;
    }
}
