//! Frames: the binary layout of messages on the channel.
//!
//! The decoder is total: any bytes yield frames, a request for more bytes, or a typed error. It
//! never allocates memory for a claimed length; it holds only bytes that have arrived.

use bytes::Bytes;
use serde::Serialize;

/// Limit in bytes for a frame after its first four. A large plot with its source is well below.
pub const MAX_FRAME_BYTES: usize = 32 * 1024 * 1024;

/// Capacity above which the decoder releases memory after a large frame.
const KEPT_CAPACITY: usize = 256 * 1024;

/// A frame with a valid layout. Its header has not been parsed. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) header: Bytes,
    pub(super) payload: Bytes,
}

/// Violation of the layout or the meaning of a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}")]
    TooLarge { length: usize },
    #[error("a frame of {length} bytes is too short for the length of its header")]
    TooShort { length: usize },
    #[error("a header of {header} bytes does not fit into a frame of {length} bytes")]
    HeaderTooLong { header: usize, length: usize },
    #[error("invalid frame header: {why}")]
    Header { why: String },
    #[error("the parts of a frame do not match its payload")]
    Payload,
}

/// Splits a byte stream into frames.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    held: Vec<u8>,
    from: usize,
}

impl Decoder {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        if self.from == self.held.len() {
            self.held.clear();
            self.from = 0;
        } else if self.from > KEPT_CAPACITY {
            self.held.drain(..self.from);
            self.from = 0;
        }
        self.held.extend_from_slice(bytes);
    }

    /// Returns whether there are no bytes of an incomplete frame.
    pub(super) fn is_empty(&self) -> bool {
        self.from == self.held.len()
    }

    /// Returns the next whole frame, or `None` if more bytes are needed.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let bytes = &self.held[self.from..];
        let Some((length, rest)) = take_length(bytes) else {
            return Ok(None);
        };
        if length > MAX_FRAME_BYTES {
            return Err(FrameError::TooLarge { length });
        }
        if length < 4 {
            return Err(FrameError::TooShort { length });
        }
        let Some((header, _)) = take_length(rest) else {
            return Ok(None);
        };
        if header > length - 4 {
            return Err(FrameError::HeaderTooLong { header, length });
        }
        let Some(body) = rest.get(4..length) else {
            return Ok(None);
        };
        let end = self.from + 4 + length;
        let mut body = if length > KEPT_CAPACITY && end == self.held.len() {
            // A large frame keeps the buffer in which it arrived, so that it is never held twice.
            let start = end - body.len();
            self.from = 0;
            Bytes::from(std::mem::take(&mut self.held)).slice(start..)
        } else {
            let body = Bytes::copy_from_slice(body);
            self.from = end;
            if end == self.held.len() {
                self.from = 0;
                self.held.clear();
                self.held.shrink_to(KEPT_CAPACITY);
            }
            body
        };
        let header = body.split_to(header);
        Ok(Some(Frame {
            header,
            payload: body,
        }))
    }
}

fn take_length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    Some((u32::from_be_bytes(*length) as usize, rest))
}

/// Appends one frame to `buffer`.
///
/// The caller keeps header and payload below `MAX_FRAME_BYTES`: code and chunks of files are
/// limited long before they reach this function.
pub fn encode(header: &impl Serialize, payload: &[u8], buffer: &mut Vec<u8>) {
    let start = buffer.len();
    buffer.extend_from_slice(&[0; 8]);
    serde_json::to_writer(&mut *buffer, header)
        .expect("headers are plain structures with text keys");
    let header_length = buffer.len() - start - 8;
    buffer.extend_from_slice(payload);
    let length = buffer.len() - start - 4;
    debug_assert!(
        length <= MAX_FRAME_BYTES,
        "the host's own frames are bounded by their makers"
    );
    buffer[start..start + 4].copy_from_slice(&(length as u32).to_be_bytes());
    buffer[start + 4..start + 8].copy_from_slice(&(header_length as u32).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn decode_all(bytes: &[u8]) -> Result<Vec<Frame>, FrameError> {
        let mut decoder = Decoder::default();
        decoder.feed(bytes);
        let mut frames = Vec::new();
        while let Some(frame) = decoder.next()? {
            frames.push(frame);
        }
        Ok(frames)
    }

    #[test]
    fn a_frame_is_laid_out_as_the_protocol_says() {
        let mut bytes = Vec::new();
        encode(&json!({"id": 7}), b"code", &mut bytes);
        assert_eq!(bytes, b"\0\0\0\x10\0\0\0\x08{\"id\":7}code");
        assert_eq!(
            decode_all(&bytes).unwrap(),
            [Frame {
                header: Bytes::from_static(b"{\"id\":7}"),
                payload: Bytes::from_static(b"code")
            }]
        );
    }

    #[test]
    fn a_frame_that_is_too_large_is_refused_before_its_bytes_arrive() {
        let announced = (MAX_FRAME_BYTES as u32 + 1).to_be_bytes();
        assert_eq!(
            decode_all(&announced),
            Err(FrameError::TooLarge {
                length: MAX_FRAME_BYTES + 1
            })
        );
        assert_eq!(
            decode_all(&(MAX_FRAME_BYTES as u32).to_be_bytes()),
            Ok(vec![])
        );
    }

    #[test]
    fn lengths_that_contradict_each_other_are_refused() {
        assert_eq!(
            decode_all(b"\0\0\0\x03abc"),
            Err(FrameError::TooShort { length: 3 })
        );
        assert_eq!(
            decode_all(b"\0\0\0\x05\0\0\0\x02ab"),
            Err(FrameError::HeaderTooLong {
                header: 2,
                length: 5
            })
        );
        assert!(decode_all(b"\0\0\0\x06\0\0\0\x02ab").is_ok());
    }

    #[test]
    fn an_empty_header_and_payload_make_a_frame() {
        assert_eq!(
            decode_all(b"\0\0\0\x04\0\0\0\0").unwrap(),
            [Frame {
                header: Bytes::new(),
                payload: Bytes::new()
            }]
        );
    }

    #[test]
    fn a_large_frame_is_not_copied_and_what_follows_it_is_kept() {
        let large = vec![b'x'; 2 * KEPT_CAPACITY];
        let mut bytes = Vec::new();
        encode(&json!({"id": 1}), &large, &mut bytes);
        let mut decoder = Decoder::default();
        decoder.feed(&bytes);
        let place = decoder.held.as_ptr();
        let frame = decoder.next().unwrap().unwrap();
        assert_eq!(frame.payload, large);
        assert_eq!(frame.header.as_ptr(), place.wrapping_add(8));
        assert!(decoder.is_empty() && decoder.held.capacity() == 0);
        // Control: with more bytes behind it, it is copied.
        bytes.extend_from_slice(b"\0\0\0\x04\0\0");
        decoder.feed(&bytes);
        assert_eq!(decoder.next().unwrap().unwrap().payload, large);
        decoder.feed(b"\0\0");
        assert_eq!(decoder.next().unwrap().unwrap().header, "");
        assert!(decoder.is_empty());
    }

    proptest! {
        #[test]
        fn frames_survive_any_way_of_cutting_the_stream(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            cuts in prop::collection::vec(1usize..50, 1..20),
        ) {
            let mut bytes = Vec::new();
            for (number, payload) in payloads.iter().enumerate() {
                encode(&json!({ "id": number }), payload, &mut bytes);
            }
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break; }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                decoder.feed(now);
                rest = later;
                while let Some(frame) = decoder.next().unwrap() {
                    seen.push(frame.payload.to_vec());
                }
            }
            prop_assert_eq!(seen, payloads);
        }

        #[test]
        fn any_bytes_are_decoded_or_refused_without_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let _ = decode_all(&bytes);
        }
    }
}
