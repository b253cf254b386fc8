//! The frames between a frontend and its daemon.
//!
//! ```text
//!  length of the payload   kind     request   payload
//!  4 bytes                 1 byte   8 bytes   at most MAX_FRAME_BYTES
//! ```
//!
//! Numbers are big-endian. `Message` and `Reply` carry MessagePack with named fields, so that a
//! type can grow; `Chunk` carries bytes of a file as they are. A payload that is larger than a
//! frame is split into `Part` frames, so that frames of other requests can be sent in between.

use std::collections::HashMap;
use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a payload. Large enough for nearly every message, small enough that others wait for
/// less than a millisecond.
pub(super) const MAX_FRAME_BYTES: usize = 256 * 1024;
/// Bytes of a whole message: the sixteen variants of one exploration, each with 20 MB of pictures,
/// and their text.
pub(super) const MAX_MESSAGE_BYTES: usize = 400 << 20;
const HEADER: usize = 13;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A part of a payload that a later frame of the same request completes.
    Part,
    Message,
    Reply,
    Chunk,
}

impl FrameKind {
    const ALL: [FrameKind; 4] = [
        FrameKind::Part,
        FrameKind::Message,
        FrameKind::Reply,
        FrameKind::Chunk,
    ];

    fn from_byte(byte: u8) -> Option<FrameKind> {
        FrameKind::ALL.get(usize::from(byte)).copied()
    }
}

/// One frame as it was read, or a whole message assembled from several.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct IpcFrame {
    /// The number of the request; zero for the connection itself.
    pub(super) id: u64,
    pub(super) kind: FrameKind,
    pub(super) payload: Vec<u8>,
}

/// A frame in its encoded form.
pub(super) type EncodedFrame = Vec<u8>;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum IpcError {
    #[error("a frame of {0} bytes exceeds the limit")]
    FrameTooLarge(usize),
    #[error("a message exceeds the limit")]
    MessageTooLarge,
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    #[error("the connection ended within a frame")]
    Truncated,
    #[error("a message could not be decoded")]
    Content(#[source] rmp_serde::decode::Error),
    #[error("unexpected message: {0}")]
    Unexpected(&'static str),
    #[error("the connection failed")]
    Connection(#[source] io::Error),
}

/// Writes a value as frames: one, or several when it is large.
pub(super) fn encode<T: Serialize>(
    id: u64,
    kind: FrameKind,
    value: &T,
) -> Result<Vec<EncodedFrame>, IpcError> {
    let mut whole = vec![0; HEADER];
    rmp_serde::encode::write_named(&mut whole, value)
        .expect("values of this room can be written to memory");
    let size = whole.len() - HEADER;
    if size > MAX_MESSAGE_BYTES {
        return Err(IpcError::MessageTooLarge);
    }
    if size <= MAX_FRAME_BYTES {
        put_header(&mut whole, id, kind);
        return Ok(vec![whole]);
    }
    let parts = whole[HEADER..].chunks(MAX_FRAME_BYTES);
    let last = parts.len() - 1;
    Ok(parts
        .enumerate()
        .map(|(at, part)| encode_raw(id, if at == last { kind } else { FrameKind::Part }, part))
        .collect())
}

/// Writes a frame whose payload is as it is. It fits into a frame.
pub(super) fn encode_raw(id: u64, kind: FrameKind, payload: &[u8]) -> EncodedFrame {
    debug_assert!(payload.len() <= MAX_FRAME_BYTES);
    let mut whole = Vec::with_capacity(HEADER + payload.len());
    whole.resize(HEADER, 0);
    whole.extend_from_slice(payload);
    put_header(&mut whole, id, kind);
    whole
}

fn put_header(whole: &mut [u8], id: u64, kind: FrameKind) {
    let size = u32::try_from(whole.len() - HEADER).expect("a frame is small");
    whole[..4].copy_from_slice(&size.to_be_bytes());
    whole[4] = kind as u8;
    whole[5..HEADER].copy_from_slice(&id.to_be_bytes());
}

/// Reads the content of a message.
pub(super) fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, IpcError> {
    rmp_serde::from_slice(payload).map_err(IpcError::Content)
}

/// Reads the next frame, or nothing when the other side has closed the connection between two of
/// them.
pub(super) async fn read(
    source: &mut (impl AsyncRead + Unpin),
) -> Result<Option<IpcFrame>, IpcError> {
    let mut header = [0; HEADER];
    let mut got = 0;
    while got < HEADER {
        match source
            .read(&mut header[got..])
            .await
            .map_err(IpcError::Connection)?
        {
            0 if got == 0 => return Ok(None),
            0 => return Err(IpcError::Truncated),
            more => got += more,
        }
    }
    let size = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if size > MAX_FRAME_BYTES {
        return Err(IpcError::FrameTooLarge(size));
    }
    let kind = FrameKind::from_byte(header[4]).ok_or(IpcError::UnknownKind(header[4]))?;
    let id = u64::from_be_bytes(header[5..].try_into().expect("eight bytes are left"));
    let mut payload = vec![0; size];
    source
        .read_exact(&mut payload)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => IpcError::Truncated,
            _ => IpcError::Connection(error),
        })?;
    Ok(Some(IpcFrame { id, kind, payload }))
}

/// Assembles messages from their parts.
#[derive(Default)]
pub(super) struct MessageAssembler(HashMap<u64, Vec<u8>>);

impl MessageAssembler {
    /// Adds a frame, and returns the message that it completes.
    pub(super) fn add(&mut self, mut frame: IpcFrame) -> Result<Option<IpcFrame>, IpcError> {
        match frame.kind {
            FrameKind::Chunk => Ok(Some(frame)),
            FrameKind::Part => {
                let parts = self.0.entry(frame.id).or_default();
                if parts.len() + frame.payload.len() > MAX_MESSAGE_BYTES {
                    return Err(IpcError::MessageTooLarge);
                }
                parts.append(&mut frame.payload);
                Ok(None)
            }
            FrameKind::Message | FrameKind::Reply => {
                if let Some(mut parts) = self.0.remove(&frame.id) {
                    parts.append(&mut frame.payload);
                    frame.payload = parts;
                }
                Ok(Some(frame))
            }
        }
    }

    /// Discards the parts of a request.
    pub(super) fn forget(&mut self, id: u64) {
        self.0.remove(&id);
    }
}
