//! Frames: what travels between a front and its keeper.
//!
//! ```text
//!  length of the payload   kind     request   payload
//!  4 bytes                 1 byte   8 bytes   at most LARGEST_FRAME
//! ```
//!
//! Numbers are big-endian. `Message` and `Answer` carry MessagePack with named fields, so that a
//! type can grow; `Chunk` carries bytes of a file as they are. What is larger than a frame comes as
//! `Part` frames first, so that it holds nobody up: frames of other requests go in between.

use std::collections::HashMap;
use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of a payload. Large enough for nearly every message, small enough that others wait for
/// less than a millisecond.
pub(super) const LARGEST_FRAME: usize = 256 * 1024;
/// Bytes of a whole message: the sixteen variants of one exploration, each with 20 MB of pictures,
/// and their text.
pub(super) const LARGEST_MESSAGE: usize = 400 << 20;
const HEADER: usize = 13;

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The beginning of what a later frame of the same request ends.
    Part,
    Message,
    Answer,
    Chunk,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Part, Kind::Message, Kind::Answer, Kind::Chunk];

    fn from_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.get(usize::from(byte)).copied()
    }
}

/// One frame as it was read, or a whole message put together from several.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The request it is about; zero for the connection itself.
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) payload: Vec<u8>,
}

/// A frame in its written form.
pub(super) type Written = Vec<u8>;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of {0} bytes is larger than a frame may be")]
    FrameTooLarge(usize),
    #[error("a message is larger than a message may be")]
    MessageTooLarge,
    #[error("there is no frame of kind {0}")]
    UnknownKind(u8),
    #[error("the connection ended within a frame")]
    Truncated,
    #[error("a message could not be understood")]
    Content(#[source] rmp_serde::decode::Error),
    #[error("{0}")]
    OutOfTurn(&'static str),
    #[error("the connection failed")]
    Connection(#[source] io::Error),
}

/// Writes a value as frames: one, or several when it is large.
pub(super) fn write<T: Serialize>(
    id: u64,
    kind: Kind,
    value: &T,
) -> Result<Vec<Written>, FrameError> {
    let mut whole = vec![0; HEADER];
    rmp_serde::encode::write_named(&mut whole, value)
        .expect("values of this room can be written to memory");
    let size = whole.len() - HEADER;
    if size > LARGEST_MESSAGE {
        return Err(FrameError::MessageTooLarge);
    }
    if size <= LARGEST_FRAME {
        put_header(&mut whole, id, kind);
        return Ok(vec![whole]);
    }
    let parts = whole[HEADER..].chunks(LARGEST_FRAME);
    let last = parts.len() - 1;
    Ok(parts
        .enumerate()
        .map(|(at, part)| raw(id, if at == last { kind } else { Kind::Part }, part))
        .collect())
}

/// Writes a frame whose payload is as it is. It fits into a frame.
pub(super) fn raw(id: u64, kind: Kind, payload: &[u8]) -> Written {
    debug_assert!(payload.len() <= LARGEST_FRAME);
    let mut whole = Vec::with_capacity(HEADER + payload.len());
    whole.resize(HEADER, 0);
    whole.extend_from_slice(payload);
    put_header(&mut whole, id, kind);
    whole
}

fn put_header(whole: &mut [u8], id: u64, kind: Kind) {
    let size = u32::try_from(whole.len() - HEADER).expect("a frame is small");
    whole[..4].copy_from_slice(&size.to_be_bytes());
    whole[4] = kind as u8;
    whole[5..HEADER].copy_from_slice(&id.to_be_bytes());
}

/// Reads the content of a message.
pub(super) fn content<T: DeserializeOwned>(payload: &[u8]) -> Result<T, FrameError> {
    rmp_serde::from_slice(payload).map_err(FrameError::Content)
}

/// Reads the next frame, or nothing when the other side has closed the connection between two of
/// them.
pub(super) async fn read(
    source: &mut (impl AsyncRead + Unpin),
) -> Result<Option<Frame>, FrameError> {
    let mut header = [0; HEADER];
    let mut got = 0;
    while got < HEADER {
        match source
            .read(&mut header[got..])
            .await
            .map_err(FrameError::Connection)?
        {
            0 if got == 0 => return Ok(None),
            0 => return Err(FrameError::Truncated),
            more => got += more,
        }
    }
    let size = u32::from_be_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if size > LARGEST_FRAME {
        return Err(FrameError::FrameTooLarge(size));
    }
    let kind = Kind::from_byte(header[4]).ok_or(FrameError::UnknownKind(header[4]))?;
    let id = u64::from_be_bytes(header[5..].try_into().expect("eight bytes are left"));
    let mut payload = vec![0; size];
    source
        .read_exact(&mut payload)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => FrameError::Truncated,
            _ => FrameError::Connection(error),
        })?;
    Ok(Some(Frame { id, kind, payload }))
}

/// Puts messages together that came in parts.
#[derive(Default)]
pub(super) struct Assembly(HashMap<u64, Vec<u8>>);

impl Assembly {
    /// Takes a frame, and returns what is whole with it.
    pub(super) fn add(&mut self, mut frame: Frame) -> Result<Option<Frame>, FrameError> {
        match frame.kind {
            Kind::Chunk => Ok(Some(frame)),
            Kind::Part => {
                let begun = self.0.entry(frame.id).or_default();
                if begun.len() + frame.payload.len() > LARGEST_MESSAGE {
                    return Err(FrameError::MessageTooLarge);
                }
                begun.append(&mut frame.payload);
                Ok(None)
            }
            Kind::Message | Kind::Answer => {
                if let Some(mut begun) = self.0.remove(&frame.id) {
                    begun.append(&mut frame.payload);
                    frame.payload = begun;
                }
                Ok(Some(frame))
            }
        }
    }

    /// Gives up what was begun for a request.
    pub(super) fn forget(&mut self, id: u64) {
        self.0.remove(&id);
    }
}
