//! Netlink messages to the kernel.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A netlink socket.
pub(crate) struct Netlink(OwnedFd);

impl Netlink {
    pub(crate) fn open(family: i32) -> io::Result<Netlink> {
        let protocol = u32::try_from(family)
            .ok()
            .and_then(std::num::NonZeroU32::new)
            .map(rustix::net::Protocol::from_raw);
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        Ok(Netlink(socket))
    }

    /// Sends messages in one write and waits for the replies to those that get one.
    pub(crate) fn transact(&self, messages: &[NetlinkMessage]) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut unacknowledged = 0;
        for (number, message) in messages.iter().enumerate() {
            unacknowledged += usize::from(message.is_acknowledged());
            message.write(number as u32 + 1, &mut bytes);
        }
        rustix::net::send(&self.0, &bytes, SendFlags::empty())?;
        let mut buffer = [0; 8192];
        while unacknowledged > 0 {
            let (length, _) = rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty())?;
            for (_, body) in split_messages(&buffer[..length]) {
                check_ack(body)?;
                unacknowledged = unacknowledged.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// Requests a list, and returns its entries without their headers.
    pub(crate) fn list(&self, message: NetlinkMessage) -> io::Result<Vec<Vec<u8>>> {
        let mut bytes = Vec::new();
        message.write(1, &mut bytes);
        rustix::net::send(&self.0, &bytes, SendFlags::empty())?;
        // The kernel never writes larger parts of a list.
        let mut buffer = [0; 32768];
        let mut entries = Vec::new();
        loop {
            let (length, _) = rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty())?;
            for (kind, body) in split_messages(&buffer[..length]) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(entries),
                    libc::NLMSG_ERROR => check_ack(body)?,
                    _ => entries.push(body.to_vec()),
                }
            }
        }
    }
}

/// Splits the kernel's data into messages: the type and the body of each.
fn split_messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let (Some(length), Some(kind)) = (read_i32(bytes, 0), bytes.get(4..6)) {
        let length = length.max(NLMSG_HDRLEN as i32) as usize;
        found.push((
            u16::from_ne_bytes([kind[0], kind[1]]),
            bytes.get(NLMSG_HDRLEN..length).unwrap_or_default(),
        ));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Reads the result of a message.
fn check_ack(body: &[u8]) -> io::Result<()> {
    match read_i32(body, 0) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Reads a four-byte number in the kernel's byte order.
pub(crate) fn read_i32(bytes: &[u8], at: usize) -> Option<i32> {
    bytes
        .get(at..at + 4)
        .and_then(|four| four.try_into().ok())
        .map(i32::from_ne_bytes)
}

/// The size of `struct nlmsghdr`.
const NLMSG_HDRLEN: usize = 16;

/// A message to the kernel: a header, a type-specific structure, attributes.
pub(crate) struct NetlinkMessage {
    kind: u16,
    flags: i32,
    body: Vec<u8>,
}

impl NetlinkMessage {
    pub(crate) fn new(kind: u16, flags: i32) -> NetlinkMessage {
        NetlinkMessage {
            kind,
            flags,
            body: Vec::new(),
        }
    }

    /// Returns whether the kernel replies. It does not for the borders of a batch.
    fn is_acknowledged(&self) -> bool {
        self.kind != libc::NFNL_MSG_BATCH_BEGIN as u16
            && self.kind != libc::NFNL_MSG_BATCH_END as u16
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.body.extend(bytes);
    }

    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.bytes(&(4 + value.len() as u16).to_ne_bytes());
        self.bytes(&kind.to_ne_bytes());
        self.bytes(value);
        self.body.resize(self.body.len().next_multiple_of(4), 0);
    }

    pub(crate) fn nested(&mut self, kind: u16, write: impl FnOnce(&mut NetlinkMessage)) {
        let mut inner = NetlinkMessage::new(0, 0);
        write(&mut inner);
        self.attribute(kind | libc::NLA_F_NESTED as u16, &inner.body);
    }

    fn write(&self, number: u32, bytes: &mut Vec<u8>) {
        let answer = if self.is_acknowledged() {
            libc::NLM_F_ACK
        } else {
            0
        };
        bytes.extend((NLMSG_HDRLEN as u32 + self.body.len() as u32).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(((self.flags | libc::NLM_F_REQUEST | answer) as u16).to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(&self.body);
    }
}
