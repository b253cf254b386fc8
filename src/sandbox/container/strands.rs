//! Multiplexing of many streams over one: the messages between the host and the supervisor of a
//! container. Pure.
//!
//! `runner/cellblock_runner/strands.py` is the other end and describes the layout; the kinds are in
//! `runner/PROTOCOL.md`, "Containers".

/// Maximum bytes after the header of a message.
const LARGEST_MESSAGE: usize = 1024 * 1024;
/// Data is split into pieces of this size, so that a busy strand does not block the others.
pub(super) const PIECE: usize = 32 * 1024;
/// Bytes that may be in flight on a channel, in each direction, before the reader has taken some.
pub(super) const CHANNEL_CREDIT: usize = 256 * 1024;
/// The same for a pipe.
pub(super) const PIPE_CREDIT: usize = 64 * 1024;

const HEAD: usize = 9;

/// A message from inside.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: u8,
    /// The number of an interpreter, a strand, a member or a request.
    pub(super) number: u32,
    pub(super) rest: Vec<u8>,
}

/// Bytes that are not a message. Nothing after them can be decoded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the supervisor sent a message of {0} bytes")]
pub(super) struct Broken(usize);

/// Encodes a message.
pub(super) fn encode(kind: u8, number: u32, rest: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEAD + rest.len());
    message.push(kind);
    message.extend(number.to_be_bytes());
    message.extend(
        u32::try_from(rest.len())
            .expect("messages are small")
            .to_be_bytes(),
    );
    message.extend(rest);
    message
}

/// Encodes a grant of more credit for the other side of a strand.
pub(super) fn encode_credit(number: u32, amount: usize) -> Vec<u8> {
    encode(
        b'w',
        number,
        &u32::try_from(amount)
            .expect("credits are small")
            .to_be_bytes(),
    )
}

/// Reads a number at an offset of a message.
pub(super) fn number_at(rest: &[u8], place: usize) -> Option<u32> {
    rest.get(place..place + 4)?
        .try_into()
        .ok()
        .map(u32::from_be_bytes)
}

/// Splits a stream of bytes into messages, however they arrive.
#[derive(Default)]
pub(super) struct Decoder {
    buffer: Vec<u8>,
    /// Number of bytes already read.
    start: usize,
}

impl Decoder {
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend(bytes);
    }

    /// Returns the next complete message. One that is too large is rejected before its bytes
    /// arrive.
    pub(super) fn next(&mut self) -> Result<Option<Message>, Broken> {
        let waiting = &self.buffer[self.start..];
        let (Some(number), Some(length)) = (number_at(waiting, 1), number_at(waiting, 5)) else {
            return Ok(None);
        };
        let length = length as usize;
        if length > LARGEST_MESSAGE {
            return Err(Broken(length));
        }
        let Some(rest) = waiting.get(HEAD..HEAD + length) else {
            return Ok(None);
        };
        let message = Message {
            kind: waiting[0],
            number,
            rest: rest.to_vec(),
        };
        self.start += HEAD + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_however_they_are_cut() {
        let stream = [
            encode(b'd', 7, b"text"),
            encode(b'h', 0xffff_ffff, b""),
            encode_credit(3, 70_000),
        ]
        .concat();
        for size in 1..stream.len() {
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for piece in stream.chunks(size) {
                decoder.feed(piece);
                while let Some(message) = decoder.next().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found.len(), 3);
            assert_eq!(
                found[0],
                Message {
                    kind: b'd',
                    number: 7,
                    rest: b"text".to_vec()
                }
            );
            assert_eq!((found[1].number, found[1].rest.len()), (0xffff_ffff, 0));
            assert_eq!(number_at(&found[2].rest, 0), Some(70_000));
        }
    }

    #[test]
    fn a_message_that_is_too_large_is_refused_by_its_head() {
        let mut decoder = Decoder::default();
        decoder.feed(&[b'd', 0, 0, 0, 1, 0, 0x10, 0, 0]);
        assert_eq!(decoder.next(), Ok(None)); // control: the largest that may come
        let mut decoder = Decoder::default();
        decoder.feed(&[b'd', 0, 0, 0, 1, 0, 0x10, 0, 1]);
        assert_eq!(decoder.next(), Err(Broken(LARGEST_MESSAGE + 1)));
    }
}
