//! The egress side of sandboxes: their network rules, and the gateway of each.
//!
//! The listeners of a native sandbox are made by its init; `container` opens those of a container
//! from outside.

mod container;

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cellblock_egress::authority::Authority;
use cellblock_egress::gateway::{self, Gateway, Limits};
use cellblock_egress::resolve::Resolver;
use cellblock_egress::rules::{Listens, Rules};
use cellblock_egress::secrets::Vault;
use cellblock_jail::network::{EgressPorts, ListenerKind};

pub(in crate::sandbox) use container::random_token;
pub use container::{EgressError, TOKEN_ADDRESS, UnverifiedListeners};

/// The network of a backend's sandboxes.
#[derive(Clone)]
pub struct SandboxNetwork {
    /// The default rules of each sandbox.
    pub rules: Rules,
    /// Ports of destinations that some sandboxes may be allowed to reach later. They are open in
    /// all sandboxes, but connections are refused in those without permission.
    pub ports: BTreeSet<u16>,
    pub vault: Arc<Vault>,
    /// Signs certificates for the hosts that have a secret, if there are any.
    pub authority: Option<Arc<Authority>>,
    pub limits: Limits,
    pub resolver: Arc<dyn Resolver>,
}

impl fmt::Debug for SandboxNetwork {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SandboxNetwork")
            .field("rules", &self.rules)
            .field("ports", &self.ports)
            .finish_non_exhaustive()
    }
}

impl SandboxNetwork {
    /// Returns the listeners that every sandbox needs.
    pub(in crate::sandbox) fn listeners(&self) -> EgressPorts {
        match self.rules.listens() {
            Listens::Ports(ports) => {
                EgressPorts::Ports(ports.union(&self.ports).copied().collect())
            }
            Listens::All => EgressPorts::All,
        }
    }

    /// Opens the gateway of a sandbox.
    pub(in crate::sandbox) fn open(
        &self,
        listeners: Vec<(ListenerKind, OwnedFd)>,
    ) -> io::Result<Gateway> {
        let listeners = listeners.into_iter().map(|(door, socket)| match door {
            ListenerKind::Dns => gateway::Door::Names(UdpSocket::from(socket)),
            ListenerKind::Port(port) => gateway::Door::Port(port, TcpListener::from(socket)),
            ListenerKind::AnyPort => gateway::Door::AnyPort(TcpListener::from(socket)),
        });
        Gateway::open(
            listeners.collect(),
            self.rules.clone(),
            Arc::clone(&self.vault),
            self.authority.clone(),
            self.limits,
            Arc::clone(&self.resolver),
        )
    }
}

#[cfg(test)]
pub(super) mod tests {
    use cellblock_egress::resolve::SystemResolver;

    use super::*;

    /// Returns a network with empty rules.
    pub(in crate::sandbox) fn closed() -> SandboxNetwork {
        SandboxNetwork {
            rules: Rules::none(),
            ports: BTreeSet::new(),
            vault: Arc::new(Vault::none()),
            authority: None,
            limits: Limits::default(),
            resolver: Arc::new(SystemResolver::new()),
        }
    }

    #[test]
    fn listeners_are_made_for_listed_ports_and_for_those_that_may_be_listed_later() {
        let network = SandboxNetwork {
            rules: Rules::parse(&["a.test:8080"]).unwrap(),
            ports: BTreeSet::from([443]),
            ..closed()
        };
        assert_eq!(network.listeners(), EgressPorts::Ports(vec![443, 8080]));
        let network = SandboxNetwork {
            rules: Rules::parse(&["a.test:*"]).unwrap(),
            ..closed()
        };
        assert_eq!(network.listeners(), EgressPorts::All);
    }
}
