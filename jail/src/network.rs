//! The network of a sandbox: an isolated namespace in which every address is local.
//!
//! No traffic leaves such a namespace; its only interface is loopback. With one route per address
//! family, every address is an address of this machine, so a connection to anywhere arrives at a
//! socket in the namespace or is refused immediately. The sockets are created here, before any user
//! code runs, and sent to the server, which accepts on them from outside and decides
//! (`cellblock-egress`). The kernel refuses connections to ports without a listener.
//!
//! If every port is wanted, nftables rules redirect all connections to one socket; the kernel keeps
//! their original destination.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, sockopt};
use serde::{Deserialize, Serialize};

use crate::netlink::{self, Netlink, NetlinkMessage};
use crate::nftables;

/// The destination ports for which a sandbox's network has egress listeners. Without listeners,
/// user code can reach only the sandbox itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EgressPorts {
    /// DNS queries, and connections to these ports.
    Ports(Vec<u16>),
    /// DNS queries, and connections to every port.
    All,
}

/// The purpose of a listener in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ListenerKind {
    Dns,
    Port(u16),
    AnyPort,
}

impl EgressPorts {
    /// Returns the listeners, in the order in which they are opened.
    pub(crate) fn listener_kinds(&self) -> Vec<ListenerKind> {
        let others = match self {
            EgressPorts::Ports(ports) => ports.iter().copied().map(ListenerKind::Port).collect(),
            EgressPorts::All => vec![ListenerKind::AnyPort],
        };
        std::iter::once(ListenerKind::Dns).chain(others).collect()
    }
}

const DNS_PORT: u16 = 53;
/// Limit of connections that are waiting for an accept. The server accepts immediately.
const BACKLOG: i32 = 128;

/// Isolates this network namespace and opens its listeners.
pub(crate) fn open(ports: &EgressPorts) -> io::Result<(Vec<ListenerKind>, Vec<OwnedFd>)> {
    make_every_address_local()?;
    let mut sockets = vec![bound_socket(SocketType::DGRAM, DNS_PORT)?];
    match ports {
        EgressPorts::Ports(ports) => {
            for port in ports {
                sockets.push(listening_socket(*port)?);
            }
        }
        EgressPorts::All => {
            let socket = listening_socket(0)?;
            let port = match rustix::net::getsockname(&socket)?.try_into() {
                Ok(SocketAddr::V6(address)) => address.port(),
                Ok(SocketAddr::V4(address)) => address.port(),
                Err(error) => return Err(io::Error::from(error)),
            };
            nftables::redirect_everything_to(port)?;
            sockets.push(socket);
        }
    }
    Ok((ports.listener_kinds(), sockets))
}

/// Verifies that a connection to an unused address is refused immediately: an address reserved for
/// documentation, at a port without a listener.
///
/// If all connections are redirected, the accepting process decides.
pub(crate) fn verify_isolated(ports: Option<&EgressPorts>) -> io::Result<()> {
    let Some(port) = port_without_listener(ports) else {
        return Ok(());
    };
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let unused = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), port));
    match rustix::net::connect(&socket, &unused) {
        Err(rustix::io::Errno::NETUNREACH | rustix::io::Errno::CONNREFUSED) => Ok(()),
        Ok(()) => Err(io::Error::other("an unused address accepted a connection")),
        Err(error) => Err(io::Error::other(format!(
            "a connection to an unused address was not refused: {error}"
        ))),
    }
}

fn port_without_listener(ports: Option<&EgressPorts>) -> Option<u16> {
    match ports {
        None => Some(1),
        Some(EgressPorts::Ports(ports)) => (1..=u16::MAX).find(|port| !ports.contains(port)),
        Some(EgressPorts::All) => None,
    }
}

/// Returns the names of the interfaces of this namespace that are up, except loopback. Any such
/// interface may let traffic bypass the listeners.
pub(crate) fn other_interfaces() -> io::Result<Vec<String>> {
    let mut message = NetlinkMessage::new(libc::RTM_GETLINK, libc::NLM_F_DUMP);
    // struct ifinfomsg: any family, all interfaces.
    message.bytes(&[0; 16]);
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut names = Vec::new();
    for entry in Netlink::open(libc::NETLINK_ROUTE)?.list(message)? {
        let (Some(index), Some(flags)) =
            (netlink::read_i32(&entry, 4), netlink::read_i32(&entry, 8))
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if flags & libc::IFF_UP != 0 && index.cast_unsigned() != LOOPBACK_IFINDEX {
            names.push(netdevice::index_to_name(&socket, index.cast_unsigned())?);
        }
    }
    Ok(names)
}

fn listening_socket(port: u16) -> io::Result<OwnedFd> {
    let socket = bound_socket(SocketType::STREAM, port)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Returns a socket for IPv6 and IPv4, or only IPv4 if the kernel has no IPv6.
fn bound_socket(kind: SocketType, port: u16) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    match rustix::net::socket_with(AddressFamily::INET6, kind, flags, None) {
        Ok(socket) => {
            sockopt::set_ipv6_v6only(&socket, false)?;
            rustix::net::bind(&socket, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
            Ok(socket)
        }
        Err(rustix::io::Errno::AFNOSUPPORT) => {
            let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None)?;
            rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
            Ok(socket)
        }
        Err(error) => Err(error.into()),
    }
}

/// The loopback interface is the first one of every namespace.
const LOOPBACK_IFINDEX: u32 = 1;

fn make_every_address_local() -> io::Result<()> {
    let kernel = Netlink::open(libc::NETLINK_ROUTE)?;
    for (family, scope) in [
        (libc::AF_INET, libc::RT_SCOPE_HOST),
        (libc::AF_INET6, libc::RT_SCOPE_UNIVERSE),
    ] {
        let mut message = NetlinkMessage::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE);
        // struct rtmsg: any destination, in the table of local addresses.
        message.bytes(&[
            family as u8,
            0,
            0,
            0,
            libc::RT_TABLE_LOCAL,
            libc::RTPROT_BOOT,
            scope,
            libc::RTN_LOCAL,
            0,
            0,
            0,
            0,
        ]);
        message.attribute(libc::RTA_OIF, &LOOPBACK_IFINDEX.to_ne_bytes());
        match kernel.transact(&[message]) {
            // Without IPv6 there is no IPv6 address to reach.
            Err(error) if family == libc::AF_INET6 && lacks_address_family(&error) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Returns whether the kernel lacks the address family, or it is disabled on the interface
/// (`EACCES`; missing rights would be `EPERM`).
fn lacks_address_family(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probed_port_has_no_listener() {
        assert_eq!(port_without_listener(None), Some(1));
        assert_eq!(
            port_without_listener(Some(&EgressPorts::Ports(vec![80, 443]))),
            Some(1)
        );
        assert_eq!(
            port_without_listener(Some(&EgressPorts::Ports((1..=9).collect()))),
            Some(10)
        );
        assert_eq!(port_without_listener(Some(&EgressPorts::All)), None);
    }

    #[test]
    fn listeners_are_returned_in_the_order_in_which_they_are_opened() {
        assert_eq!(
            EgressPorts::Ports(vec![443, 80]).listener_kinds(),
            [
                ListenerKind::Dns,
                ListenerKind::Port(443),
                ListenerKind::Port(80)
            ]
        );
        assert_eq!(
            EgressPorts::All.listener_kinds(),
            [ListenerKind::Dns, ListenerKind::AnyPort]
        );
    }
}
