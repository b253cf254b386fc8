//! WebSocket frames from the host to the inside, masked.
//!
//! A frame states its length, and a placeholder has another length than its value, so frames are
//! rebuilt. A message stays one message and text stays text, but the fragment boundaries may move.
//! At the end of a message nothing is held back, so the receiver gets the whole message.

use std::io;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::secrets::Masker;

const READ_AT_ONCE: usize = 64 * 1024;

/// The protocol's size limit for pings, pongs and the close reason.
const MAX_CONTROL_BYTES: usize = 125;

const FINAL: u8 = 0x80;
const RESERVED: u8 = 0x70;
const OPERATION: u8 = 0x0f;
const CONTROL: u8 = 0x08;
const CONTINUATION: u8 = 0;
const ENCRYPTED: u8 = 0x80;

/// Copies frames until `from` ends. Malformed frames are an error. An end without TLS close_notify
/// is not, since each frame states its own length.
pub(super) async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    masker: Masker,
) -> io::Result<()> {
    let mut frames = Frames::new(masker);
    let mut buffer = BytesMut::with_capacity(READ_AT_ONCE);
    loop {
        match from.read_buf(&mut buffer).await {
            Ok(0) => return to.shutdown().await,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return to.shutdown().await;
            }
            Err(error) => return Err(error),
            Ok(_) => {}
        }
        let masked = frames.push(&buffer)?;
        buffer.clear();
        to.write_all(&masked).await?;
        to.flush().await?;
    }
}

struct Frames {
    masker: Masker,
    /// Bytes not parsed yet: less than a header, or than a control frame.
    unread: BytesMut,
    /// The data frame being read.
    current: Option<Current>,
    /// The opcode of the next frame of this message: its type first, then continuation.
    operation: u8,
}

struct Current {
    is_final: bool,
    remaining: u64,
}

struct Head {
    is_final: bool,
    operation: u8,
    length: u64,
    size: usize,
}

impl Frames {
    fn new(masker: Masker) -> Frames {
        Frames {
            masker,
            unread: BytesMut::new(),
            current: None,
            operation: CONTINUATION,
        }
    }

    /// Takes bytes of frames and returns bytes of masked frames.
    fn push(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.unread.extend_from_slice(bytes);
        let mut masked = Vec::with_capacity(bytes.len());
        loop {
            let has_moved = match self.current.take() {
                Some(current) => self.push_payload(current, &mut masked),
                None => self.push_head(&mut masked)?,
            };
            if !has_moved {
                return Ok(masked);
            }
        }
    }

    /// Parses a frame header, or a whole control frame. Returns false if there are too few bytes.
    fn push_head(&mut self, masked: &mut Vec<u8>) -> io::Result<bool> {
        let Some(head) = read_head(&self.unread)? else {
            return Ok(false);
        };
        if head.operation & CONTROL == 0 {
            self.unread.advance(head.size);
            if head.operation != CONTINUATION {
                self.operation = head.operation;
            }
            self.current = Some(Current {
                is_final: head.is_final,
                remaining: head.length,
            });
            return Ok(true);
        }
        let end = head.size + head.length as usize;
        if self.unread.len() < end {
            return Ok(false);
        }
        let payload = self.unread.split_to(end).freeze().slice(head.size..);
        let mut payload = self.masker.mask(&payload);
        payload.truncate(MAX_CONTROL_BYTES);
        write_frame(masked, true, head.operation, &payload);
        Ok(true)
    }

    /// Forwards the available part of the current frame. Returns whether its end was reached.
    fn push_payload(&mut self, mut current: Current, masked: &mut Vec<u8>) -> bool {
        let length = current.remaining.min(self.unread.len() as u64);
        current.remaining -= length;
        let is_end = current.remaining == 0;
        let mut payload = self
            .masker
            .push(self.unread.split_to(length as usize).freeze());
        if is_end && current.is_final {
            payload = Bytes::from([payload, self.masker.finish()].concat());
            write_frame(masked, true, self.operation, &payload);
            self.operation = CONTINUATION;
        } else if !payload.is_empty() {
            write_frame(masked, false, self.operation, &payload);
            self.operation = CONTINUATION;
        }
        if !is_end {
            self.current = Some(current);
        }
        is_end
    }
}

/// Parses a frame header. Returns `None` if there are too few bytes.
fn read_head(bytes: &[u8]) -> io::Result<Option<Head>> {
    let broken = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let [first, second, rest @ ..] = bytes else {
        return Ok(None);
    };
    let (length, size) = match (second & !ENCRYPTED, rest) {
        (126, [high, low, ..]) => (u64::from(u16::from_be_bytes([*high, *low])), 4),
        (127, _) => match rest.first_chunk::<8>() {
            Some(length) => (u64::from_be_bytes(*length), 10),
            None => return Ok(None),
        },
        (126, _) => return Ok(None),
        (length, _) => (u64::from(length), 2),
    };
    let head = Head {
        is_final: first & FINAL != 0,
        operation: first & OPERATION,
        length,
        size,
    };
    let is_control = head.operation & CONTROL != 0;
    if first & RESERVED != 0 || second & ENCRYPTED != 0 {
        return broken("a frame uses an extension that was not asked for");
    }
    if is_control && (!head.is_final || length > MAX_CONTROL_BYTES as u64) {
        return broken("a control frame is too long or in fragments");
    }
    Ok(Some(head))
}

fn write_frame(frames: &mut Vec<u8>, is_final: bool, operation: u8, payload: &[u8]) {
    frames.push(if is_final {
        FINAL | operation
    } else {
        operation
    });
    match payload.len() {
        length @ ..126 => frames.push(length as u8),
        length @ 126..=0xffff => {
            frames.push(126);
            frames.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            frames.push(127);
            frames.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    frames.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::HostName;
    use crate::secrets::{Secret, Vault};

    const TEXT: u8 = 1;
    const PING: u8 = 9;
    const VALUE: &str = "canary-value";

    /// Final flag, opcode and payload.
    type Frame = (bool, u8, String);

    /// Returns the resulting frames and the placeholder.
    fn masked(chunks: &[&[u8]]) -> (io::Result<Vec<Frame>>, String) {
        let secret =
            Secret::parse("KEY=env:X@api.example.com", |_| Some(VALUE.to_owned())).unwrap();
        let vault = Vault::new(vec![secret]).unwrap();
        let host = HostName::parse("api.example.com").unwrap();
        let mut frames = Frames::new(vault.for_host(&host).unwrap().masker());
        let bytes: io::Result<Vec<Vec<u8>>> =
            chunks.iter().map(|chunk| frames.push(chunk)).collect();
        (
            bytes.map(|bytes| parsed(&bytes.concat())),
            vault.variables()[0].1.clone(),
        )
    }

    fn parsed(mut bytes: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(head) = read_head(bytes).unwrap() {
            let end = head.size + head.length as usize;
            frames.push((
                head.is_final,
                head.operation,
                String::from_utf8(bytes[head.size..end].to_vec()).unwrap(),
            ));
            bytes = &bytes[end..];
        }
        frames
    }

    fn frame(is_final: bool, operation: u8, payload: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, is_final, operation, payload.as_bytes());
        bytes
    }

    #[test]
    fn a_message_is_masked_and_complete_at_its_end() {
        let (frames, placeholder) = masked(&[&frame(true, TEXT, &format!("<{VALUE}> can"))]);
        assert_eq!(
            frames.unwrap(),
            [(true, TEXT, format!("<{placeholder}> can"))]
        );
        let (frames, _) = masked(&[&frame(true, TEXT, "")]);
        assert_eq!(frames.unwrap(), [(true, TEXT, String::new())]);
    }

    #[test]
    fn a_value_in_two_fragments_with_a_ping_between_them_is_masked() {
        let (first, second) = VALUE.split_at(5);
        let bytes = [
            frame(false, TEXT, &format!("a{first}")),
            frame(true, PING, "ping"),
            frame(true, 0, &format!("{second}b")),
        ];
        let (frames, placeholder) = masked(&[&bytes.concat()]);
        let expected = [
            (false, TEXT, "a".to_owned()),
            (true, PING, "ping".to_owned()),
            (true, 0, format!("{placeholder}b")),
        ];
        assert_eq!(frames.unwrap(), expected);

        let one_by_one = bytes.concat();
        let (frames, placeholder) = masked(&one_by_one.chunks(1).collect::<Vec<_>>());
        let frames = frames.unwrap();
        let message: String = frames
            .iter()
            .filter(|frame| frame.1 != PING)
            .map(|frame| frame.2.as_str())
            .collect();
        assert_eq!(message, format!("a{placeholder}b"));
        assert_eq!(
            frames.iter().map(|frame| frame.0).collect::<Vec<_>>(),
            [false, true, false, true]
        );
    }

    #[test]
    fn frames_of_every_length_come_through() {
        for length in [0, 1, 125, 126, 65_535, 65_536, 200_000] {
            let payload = "x".repeat(length);
            let (frames, _) = masked(&[&frame(true, TEXT, &payload)]);
            assert_eq!(frames.unwrap(), [(true, TEXT, payload)]);
        }
    }

    #[test]
    fn frames_that_nobody_asked_for_end_the_connection() {
        for broken in [
            &[FINAL | 0x40 | TEXT, 0][..],
            &[FINAL | TEXT, ENCRYPTED],
            &[PING, 0],
            &[FINAL | PING, 126, 0, 126],
        ] {
            assert!(masked(&[broken]).0.is_err(), "{broken:?}");
        }
        assert!(masked(&[&[FINAL | TEXT, 0]]).0.is_ok());
    }
}
