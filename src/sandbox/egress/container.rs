//! The network of a container: listeners opened from outside, and trusted only after a token has
//! arrived through them.
//!
//! ```text
//! SandboxNetwork::enter ──► UnverifiedListeners ── token goes inside, on the backend's channel
//!                                   └──► verify ──► Gateway
//! ```
//!
//! The listeners are sockets of this kernel. A runtime may have its own network stack (gVisor in
//! its usual setting, a virtual machine), from which no connection would ever reach them; and the
//! process that the engine names as the container's may be on another machine. So a random token
//! that was given only to the inside of this container must first arrive at a listener. No
//! other claim about a runtime is trusted.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use cellblock_egress::gateway::Gateway;
use cellblock_jail::netns_listeners::{self, Namespace, NetnsError};
use cellblock_jail::network::ListenerKind;

use super::SandboxNetwork;
use crate::reaction::within;

/// The address to which the inside must send its token: the DNS listener, by UDP.
pub const TOKEN_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 53);

/// Bytes of a token before they are encoded as text. It cannot be guessed.
const TOKEN_BYTES: usize = 16;

/// Why the network of a container could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    #[error("no way out of the container can be opened")]
    Doors(#[from] NetnsError),
    #[error(
        "what is sent inside the container does not arrive here; its runtime has a network of its \
         own"
    )]
    TokenNotReceived,
    #[error("the gateway of the container cannot be opened")]
    Gateway(#[source] io::Error),
}

impl SandboxNetwork {
    /// Opens the listeners of a container that has no network, before any user code runs in it.
    /// `program` is the binary of this server.
    pub async fn enter(
        &self,
        program: &Path,
        namespace: Namespace,
    ) -> Result<UnverifiedListeners, EgressError> {
        let (program, wanted) = (program.to_owned(), self.listeners());
        let opened = tokio::task::spawn_blocking(move || {
            netns_listeners::open(&program, &namespace, &wanted)
        })
        .await;
        self.unverified(opened.map_err(|error| EgressError::Gateway(io::Error::other(error)))??)
    }

    /// Takes listeners that another process opened for this network.
    pub(in crate::sandbox) fn unverified(
        &self,
        listeners: Vec<(ListenerKind, OwnedFd)>,
    ) -> Result<UnverifiedListeners, EgressError> {
        Ok(UnverifiedListeners {
            network: self.clone(),
            listeners,
            token: random_token().map_err(EgressError::Gateway)?,
        })
    }
}

/// Listeners through which nothing has arrived yet.
pub struct UnverifiedListeners {
    network: SandboxNetwork,
    listeners: Vec<(ListenerKind, OwnedFd)>,
    token: String,
}

impl UnverifiedListeners {
    /// Returns the token that the inside must send to `TOKEN_ADDRESS`, in one datagram.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Waits for the token, and opens the gateway.
    pub async fn verify(self, timeout: Duration) -> Result<Gateway, EgressError> {
        let names = self
            .listeners
            .iter()
            .find(|(door, _)| *door == ListenerKind::Dns)
            .map(|(_, socket)| socket.try_clone());
        let names = names
            .unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
            .map_err(EgressError::Gateway)?;
        let names = tokio::net::UdpSocket::from_std(UdpSocket::from(names))
            .map_err(EgressError::Gateway)?;
        match within(timeout, arrival(&names, self.token.as_bytes())).await {
            Some(arrived) => arrived.map_err(EgressError::Gateway)?,
            None => return Err(EgressError::TokenNotReceived),
        }
        // Otherwise both sockets would be woken by queries.
        drop(names);
        self.network
            .open(self.listeners)
            .map_err(EgressError::Gateway)
    }
}

/// Waits until exactly this token arrives. Any other datagram is a query that came too early, and
/// its sender will repeat it.
async fn arrival(listener: &tokio::net::UdpSocket, token: &[u8]) -> io::Result<()> {
    let mut buffer = [0; 512];
    loop {
        let length = listener.recv(&mut buffer).await?;
        if &buffer[..length] == token {
            return Ok(());
        }
    }
}

/// Makes a token that cannot be guessed.
pub(in crate::sandbox) fn random_token() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| io::Error::other("the system gave no random numbers"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
