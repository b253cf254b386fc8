//! Messages to parts of the kernel that speak netlink.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A conversation with a part of the kernel.
pub(crate) struct Netlink(OwnedFd);

impl Netlink {
    pub(crate) fn open(part: i32) -> io::Result<Netlink> {
        let protocol =
            u32::try_from(part).ok().and_then(std::num::NonZeroU32::new).map(rustix::net::Protocol::from_raw);
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        Ok(Netlink(socket))
    }

    /// Sends messages in one go and waits for the answers to those that are answered.
    pub(crate) fn ask(&self, messages: &[Message]) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut awaited = 0;
        for (number, message) in messages.iter().enumerate() {
            awaited += usize::from(message.is_answered());
            message.write(number as u32 + 1, &mut bytes);
        }
        rustix::net::send(&self.0, &bytes, SendFlags::empty())?;
        let mut buffer = [0; 8192];
        while awaited > 0 {
            let (length, _) = rustix::net::recv(&self.0, &mut buffer, RecvFlags::empty())?;
            for answer in answers(&buffer[..length]) {
                answer?;
                awaited = awaited.saturating_sub(1);
            }
        }
        Ok(())
    }
}

/// Reads what the kernel says to each message.
fn answers(mut bytes: &[u8]) -> Vec<io::Result<()>> {
    let mut found = Vec::new();
    let number =
        |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|four| four.try_into().ok()).map(i32::from_ne_bytes);
    while let (Some(length), Some(code)) = (number(bytes, 0), number(bytes, HEADER)) {
        found.push(if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-code)) });
        let length = (length.max(HEADER as i32) as usize).next_multiple_of(4);
        bytes = bytes.get(length..).unwrap_or_default();
    }
    found
}

const HEADER: usize = 16;

/// A message to the kernel: a header, something of its kind, attributes.
pub(crate) struct Message {
    kind: u16,
    flags: i32,
    body: Vec<u8>,
}

impl Message {
    pub(crate) fn new(kind: u16, flags: i32) -> Message {
        Message { kind, flags, body: Vec::new() }
    }

    /// The borders of a batch are not.
    fn is_answered(&self) -> bool {
        self.kind != libc::NFNL_MSG_BATCH_BEGIN as u16 && self.kind != libc::NFNL_MSG_BATCH_END as u16
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

    pub(crate) fn nested(&mut self, kind: u16, write: impl FnOnce(&mut Message)) {
        let mut inner = Message::new(0, 0);
        write(&mut inner);
        self.attribute(kind | libc::NLA_F_NESTED as u16, &inner.body);
    }

    fn write(&self, number: u32, bytes: &mut Vec<u8>) {
        let answer = if self.is_answered() { libc::NLM_F_ACK } else { 0 };
        bytes.extend((HEADER as u32 + self.body.len() as u32).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(((self.flags | libc::NLM_F_REQUEST | answer) as u16).to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(0_u32.to_ne_bytes());
        bytes.extend(&self.body);
    }
}
