//! The network of a sandbox: a dead end in which every address is local.
//!
//! Nothing leaves such a namespace; it has no interface but the loopback one. With one route per family, every address is an address of this machine, so
//! a connection to anywhere arrives at a socket in here, or at none and is refused at once. The sockets are made here, before any of a user's code, and
//! handed to the server, which accepts on them from outside and decides (`cellblock-egress`). Ports that nobody listens on are refused by the kernel.
//!
//! Where every port is wanted, nftables redirect all connections to one socket; the kernel remembers where they were going.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, sockopt};
use serde::{Deserialize, Serialize};

use crate::netlink::{self, Message, Netlink};
use crate::nftables;

/// What a sandbox's network lets its user's code reach: nothing but itself, or the doors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Doors {
    /// Questions about names, and connections to these ports.
    Ports(Vec<u16>),
    /// Questions about names, and connections to every port.
    All,
}

/// What a socket that came out of a sandbox is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Door {
    Names,
    Port(u16),
    AnyPort,
}

impl Doors {
    /// What they are, in the order in which they are opened.
    pub(crate) fn kinds(&self) -> Vec<Door> {
        let others = match self {
            Doors::Ports(ports) => ports.iter().copied().map(Door::Port).collect(),
            Doors::All => vec![Door::AnyPort],
        };
        std::iter::once(Door::Names).chain(others).collect()
    }
}

const NAMES_PORT: u16 = 53;
/// Connections that wait to be accepted. The server accepts at once.
const BACKLOG: i32 = 128;

/// Makes this network namespace a dead end and opens its doors.
pub(crate) fn open(doors: &Doors) -> io::Result<(Vec<Door>, Vec<OwnedFd>)> {
    make_every_address_local()?;
    let mut sockets = vec![bound(SocketType::DGRAM, NAMES_PORT)?];
    match doors {
        Doors::Ports(ports) => {
            for port in ports {
                sockets.push(listening(*port)?);
            }
        }
        Doors::All => {
            let socket = listening(0)?;
            let port = match rustix::net::getsockname(&socket)?.try_into() {
                Ok(SocketAddr::V6(address)) => address.port(),
                Ok(SocketAddr::V4(address)) => address.port(),
                Err(error) => return Err(io::Error::from(error)),
            };
            nftables::redirect_everything_to(port)?;
            sockets.push(socket);
        }
    }
    Ok((doors.kinds(), sockets))
}

/// Makes sure that what is meant for an address of nobody is refused at once, here and now: one that is set aside for examples, at a port without a door.
///
/// Where everything is redirected, whoever accepts decides.
pub(crate) fn leads_nowhere(doors: Option<&Doors>) -> io::Result<()> {
    let Some(port) = port_without_door(doors) else {
        return Ok(());
    };
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let nobody = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), port));
    match rustix::net::connect(&socket, &nobody) {
        Err(rustix::io::Errno::NETUNREACH | rustix::io::Errno::CONNREFUSED) => Ok(()),
        Ok(()) => Err(io::Error::other("an address of nobody answered")),
        Err(error) => Err(io::Error::other(format!(
            "an address of nobody is not refused but: {error}"
        ))),
    }
}

fn port_without_door(doors: Option<&Doors>) -> Option<u16> {
    match doors {
        None => Some(1),
        Some(Doors::Ports(ports)) => (1..=u16::MAX).find(|port| !ports.contains(port)),
        Some(Doors::All) => None,
    }
}

/// Names the interfaces of this namespace that are up, the loopback one aside. Where there is one, something may leave beside the doors.
pub(crate) fn other_interfaces() -> io::Result<Vec<String>> {
    let mut message = Message::new(libc::RTM_GETLINK, libc::NLM_F_DUMP);
    // struct ifinfomsg: of any family, all of them.
    message.bytes(&[0; 16]);
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut names = Vec::new();
    for entry in Netlink::open(libc::NETLINK_ROUTE)?.list(message)? {
        let (Some(index), Some(flags)) = (netlink::number(&entry, 4), netlink::number(&entry, 8))
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        if flags & libc::IFF_UP != 0 && index.cast_unsigned() != LOOPBACK {
            names.push(netdevice::index_to_name(&socket, index.cast_unsigned())?);
        }
    }
    Ok(names)
}

fn listening(port: u16) -> io::Result<OwnedFd> {
    let socket = bound(SocketType::STREAM, port)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A socket for both families, or for the older one where the kernel has no other.
fn bound(kind: SocketType, port: u16) -> io::Result<OwnedFd> {
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

/// The loopback interface is the first of every namespace.
const LOOPBACK: u32 = 1;

fn make_every_address_local() -> io::Result<()> {
    let kernel = Netlink::open(libc::NETLINK_ROUTE)?;
    for (family, scope) in [
        (libc::AF_INET, libc::RT_SCOPE_HOST),
        (libc::AF_INET6, libc::RT_SCOPE_UNIVERSE),
    ] {
        let mut message = Message::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE);
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
        message.attribute(libc::RTA_OIF, &LOOPBACK.to_ne_bytes());
        match kernel.ask(&[message]) {
            // Where there is no newer family there is no address in it to reach.
            Err(error) if family == libc::AF_INET6 && no_such_family(&error) => {}
            result => result?,
        }
    }
    Ok(())
}

/// The kernel has no such family, or it is switched off on the interface (`EACCES`; for want of rights it would be `EPERM`).
fn no_such_family(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rule_is_in_the_way_of_the_port_at_which_nobody_is() {
        assert_eq!(port_without_door(None), Some(1));
        assert_eq!(
            port_without_door(Some(&Doors::Ports(vec![80, 443]))),
            Some(1)
        );
        assert_eq!(
            port_without_door(Some(&Doors::Ports((1..=9).collect()))),
            Some(10)
        );
        assert_eq!(port_without_door(Some(&Doors::All)), None);
    }

    #[test]
    fn doors_are_named_in_the_order_in_which_they_are_opened() {
        assert_eq!(
            Doors::Ports(vec![443, 80]).kinds(),
            [Door::Names, Door::Port(443), Door::Port(80)]
        );
        assert_eq!(Doors::All.kinds(), [Door::Names, Door::AnyPort]);
    }
}
