//! Multiplexing of many streams over one: the frames between the host and the supervisor of a
//! container. Pure.
//!
//! `runner/cellblock_runner/mux.py` is the other end and describes the layout. `messages` gives the
//! bodies their meaning.

/// Maximum bytes in the body of a frame.
const MAX_BODY_BYTES: usize = 1024 * 1024;
/// Data is split into pieces of this size, so that a busy stream does not block the others.
pub(super) const PIECE: usize = 32 * 1024;
/// Bytes that may be in flight on a channel, in each direction, before the reader has taken some.
pub(super) const CHANNEL_CREDIT: usize = 256 * 1024;
/// The same for a pipe.
pub(super) const PIPE_CREDIT: usize = 64 * 1024;

const HEAD: usize = 9;

/// Kinds of frames, in their first byte.
pub(super) mod kind {
    pub(in crate::sandbox::container) const DATA: u8 = 0;
    pub(in crate::sandbox::container) const CREDIT: u8 = 1;
    pub(in crate::sandbox::container) const CONTROL: u8 = 2;
    pub(in crate::sandbox::container) const INPUT: u8 = 3;
    pub(in crate::sandbox::container) const PIPES: u8 = 4;
    pub(in crate::sandbox::container) const PROGRAM_PIPES: u8 = 5;
}

/// A frame from inside. Its kind may be unknown.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MuxFrame {
    pub(super) kind: u8,
    /// The number of a stream, or of what the kind says.
    pub(super) number: u32,
    pub(super) body: Vec<u8>,
}

/// Bytes that are not a frame. Nothing after them can be decoded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the supervisor sent a frame of {0} bytes")]
pub(super) struct FrameTooLarge(usize);

/// Encodes a frame.
pub(super) fn encode(kind: u8, number: u32, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEAD + body.len());
    frame.push(kind);
    frame.extend(number.to_be_bytes());
    frame.extend(
        u32::try_from(body.len())
            .expect("frames are small")
            .to_be_bytes(),
    );
    frame.extend(body);
    frame
}

fn number_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes
        .get(offset..offset + 4)?
        .try_into()
        .ok()
        .map(u32::from_be_bytes)
}

/// Splits a stream of bytes into frames, however they arrive.
#[derive(Default)]
pub(super) struct MuxDecoder {
    buffer: Vec<u8>,
    /// Number of bytes already read.
    start: usize,
}

impl MuxDecoder {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend(bytes);
    }

    /// Returns the next complete frame. One that is too large is rejected before its bytes arrive.
    pub(super) fn next(&mut self) -> Result<Option<MuxFrame>, FrameTooLarge> {
        let waiting = &self.buffer[self.start..];
        let (Some(number), Some(length)) = (number_at(waiting, 1), number_at(waiting, 5)) else {
            return Ok(None);
        };
        let length = length as usize;
        if length > MAX_BODY_BYTES {
            return Err(FrameTooLarge(length));
        }
        let Some(body) = waiting.get(HEAD..HEAD + length) else {
            return Ok(None);
        };
        let frame = MuxFrame {
            kind: waiting[0],
            number,
            body: body.to_vec(),
        };
        self.start += HEAD + length;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_however_they_are_cut() {
        let stream = [
            encode(kind::DATA, 7, b"text"),
            encode(kind::CONTROL, 0xffff_ffff, b""),
            encode(kind::CREDIT, 3, &70_000_u32.to_be_bytes()),
        ]
        .concat();
        let frame = |kind, number, body: &[u8]| MuxFrame {
            kind,
            number,
            body: body.to_vec(),
        };
        for size in 1..stream.len() {
            let mut decoder = MuxDecoder::default();
            let mut found = Vec::new();
            for piece in stream.chunks(size) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    found.push(frame);
                }
            }
            assert_eq!(
                found,
                [
                    frame(kind::DATA, 7, b"text"),
                    frame(kind::CONTROL, 0xffff_ffff, b""),
                    frame(kind::CREDIT, 3, &[0, 1, 0x11, 0x70]),
                ]
            );
        }
    }

    #[test]
    fn a_frame_that_is_too_large_is_refused_by_its_head() {
        let mut decoder = MuxDecoder::default();
        decoder.feed(&[kind::DATA, 0, 0, 0, 1, 0, 0x10, 0, 0]);
        assert_eq!(decoder.next(), Ok(None)); // control: the largest that may come
        let mut decoder = MuxDecoder::default();
        decoder.feed(&[kind::DATA, 0, 0, 0, 1, 0, 0x10, 0, 1]);
        assert_eq!(decoder.next(), Err(FrameTooLarge(MAX_BODY_BYTES + 1)));
    }
}
