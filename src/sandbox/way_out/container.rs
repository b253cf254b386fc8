//! The network of a container: listeners (`doors`) opened from outside, and trusted only after a
//! message has arrived through them.
//!
//! ```text
//! Network::enter ──► Unproven ── word goes inside, on the backend's channel ──► heard ──► Gateway
//! ```
//!
//! The listeners are sockets of this kernel. A runtime may have its own network stack (gVisor in
//! its usual setting, a virtual machine), from which no connection would ever reach them; and the
//! process that the engine names as the container's may be on another machine. So a random token
//! (`word`) that was given only to the inside of this container must first arrive at a listener. No
//! other claim about a runtime is trusted.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use cellblock_egress::gateway::Gateway;
use cellblock_jail::netns_listeners::{self, Namespace, NetnsError};
use cellblock_jail::network::ListenerKind;

use super::Network;
use crate::reaction::within;

/// The address to which the inside must send its token: the DNS listener, by UDP.
pub const KNOCK_AT: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 53);

/// Bytes of a token before they are encoded as text. It cannot be guessed.
const WORD: usize = 16;

/// Why the network of a container could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum WayOutError {
    #[error("no way out of the container can be opened")]
    Doors(#[from] NetnsError),
    #[error(
        "what is sent inside the container does not arrive here; its runtime has a network of its \
         own"
    )]
    Unheard,
    #[error("the gateway of the container cannot be opened")]
    Gateway(#[source] io::Error),
}

impl Network {
    /// Opens the listeners of a container that has no network, before any user code runs in it.
    /// `program` is the binary of this server.
    pub async fn enter(
        &self,
        program: &Path,
        namespace: Namespace,
    ) -> Result<Unproven, WayOutError> {
        let (program, wanted) = (program.to_owned(), self.doors());
        let opened = tokio::task::spawn_blocking(move || {
            netns_listeners::open(&program, &namespace, &wanted)
        })
        .await;
        self.unproven(opened.map_err(|error| WayOutError::Gateway(io::Error::other(error)))??)
    }

    /// Takes listeners that another process opened for this network.
    pub(in crate::sandbox) fn unproven(
        &self,
        doors: Vec<(ListenerKind, OwnedFd)>,
    ) -> Result<Unproven, WayOutError> {
        Ok(Unproven {
            network: self.clone(),
            doors,
            word: random_word().map_err(WayOutError::Gateway)?,
        })
    }
}

/// Listeners through which nothing has arrived yet.
pub struct Unproven {
    network: Network,
    doors: Vec<(ListenerKind, OwnedFd)>,
    word: String,
}

impl Unproven {
    /// Returns the token that the inside must send to `KNOCK_AT`, in one datagram.
    pub fn word(&self) -> &str {
        &self.word
    }

    /// Waits for the token, and opens the gateway.
    pub async fn heard(self, limit: Duration) -> Result<Gateway, WayOutError> {
        let names = self
            .doors
            .iter()
            .find(|(door, _)| *door == ListenerKind::Dns)
            .map(|(_, socket)| socket.try_clone());
        let names = names
            .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
            .map_err(WayOutError::Gateway)?;
        let names = tokio::net::UdpSocket::from_std(UdpSocket::from(names))
            .map_err(WayOutError::Gateway)?;
        match within(limit, arrival(&names, self.word.as_bytes())).await {
            Some(arrived) => arrived.map_err(WayOutError::Gateway)?,
            None => return Err(WayOutError::Unheard),
        }
        // Otherwise both sockets would be woken by queries.
        drop(names);
        self.network.open(self.doors).map_err(WayOutError::Gateway)
    }
}

/// Waits until exactly this token arrives. Any other datagram is a query that came too early, and
/// its sender will repeat it.
async fn arrival(door: &tokio::net::UdpSocket, word: &[u8]) -> io::Result<()> {
    let mut buffer = [0; 512];
    loop {
        let length = door.recv(&mut buffer).await?;
        if &buffer[..length] == word {
            return Ok(());
        }
    }
}

/// Makes a token that cannot be guessed.
pub(in crate::sandbox) fn random_word() -> io::Result<String> {
    let mut bytes = [0; WORD];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| io::Error::other("the system gave no random numbers"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
