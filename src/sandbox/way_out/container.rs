//! The way out of a container: doors opened from outside, and relied on only once something came through them.
//!
//! ```text
//! Network::enter ──► Unproven ── its word goes inside, on the backend's own channel ──► heard ──► Gateway
//! ```
//!
//! The doors are sockets of this kernel. A runtime may have a network of its own (gVisor in its usual setting, a virtual machine), in which nobody would
//! ever come to them; and the engine's word for which process is the container's may be about another machine. So a random word that only the inside of this
//! container was told must arrive at a door first. Nothing else that is said about a runtime is believed.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use cellblock_egress::gateway::Gateway;
use cellblock_jail::doors::{self, DoorsError, Namespace};
use cellblock_jail::network::Door;

use super::Network;
use crate::reaction::within;

/// Where the inside has to send its word: the door for names, by UDP.
pub const KNOCK_AT: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 53);

/// Bytes of a word before they are written as text. Nobody guesses that many.
const WORD: usize = 16;

/// Why a container has no way out.
#[derive(Debug, thiserror::Error)]
pub enum WayOutError {
    #[error("no way out of the container can be opened")]
    Doors(#[from] DoorsError),
    #[error(
        "what is sent inside the container does not arrive here; its runtime has a network of its own"
    )]
    Unheard,
    #[error("the gateway of the container cannot be opened")]
    Gateway(#[source] io::Error),
}

impl Network {
    /// Opens the doors of a container that has no network, before any code of a user runs in it. `program` is the binary of this server.
    pub async fn enter(
        &self,
        program: &Path,
        namespace: Namespace,
    ) -> Result<Unproven, WayOutError> {
        let (program, wanted) = (program.to_owned(), self.doors());
        let opened =
            tokio::task::spawn_blocking(move || doors::open(&program, &namespace, &wanted)).await;
        self.unproven(opened.map_err(|error| WayOutError::Gateway(io::Error::other(error)))??)
    }

    /// Takes doors that were opened for this network by somebody else.
    pub(in crate::sandbox) fn unproven(
        &self,
        doors: Vec<(Door, OwnedFd)>,
    ) -> Result<Unproven, WayOutError> {
        Ok(Unproven {
            network: self.clone(),
            doors,
            word: random_word().map_err(WayOutError::Gateway)?,
        })
    }
}

/// Doors through which nothing has come yet.
pub struct Unproven {
    network: Network,
    doors: Vec<(Door, OwnedFd)>,
    word: String,
}

impl Unproven {
    /// Returns what the inside has to send to `KNOCK_AT`, in one datagram.
    pub fn word(&self) -> &str {
        &self.word
    }

    /// Waits for the word, and opens the gateway.
    pub async fn heard(self, limit: Duration) -> Result<Gateway, WayOutError> {
        let names = self
            .doors
            .iter()
            .find(|(door, _)| *door == Door::Names)
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
        // Both would be told of questions otherwise.
        drop(names);
        self.network.open(self.doors).map_err(WayOutError::Gateway)
    }
}

/// Waits until exactly this arrives. Whatever else does was asked too early, and is asked again by whoever asked.
async fn arrival(door: &tokio::net::UdpSocket, word: &[u8]) -> io::Result<()> {
    let mut buffer = [0; 512];
    loop {
        let length = door.recv(&mut buffer).await?;
        if &buffer[..length] == word {
            return Ok(());
        }
    }
}

/// Makes a word that nobody guesses.
pub(in crate::sandbox) fn random_word() -> io::Result<String> {
    let mut bytes = [0; WORD];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| io::Error::other("the system gave no random numbers"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
