//! Any bytes, in any pieces: the decoder gives frames, asks for more, or refuses. What it accepts
//! is exactly what was sent.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

// The decoder is private to its room; its file needs nothing of the rest.
#[path = "../../src/runner_client/frame.rs"]
#[allow(dead_code)]
mod frame;

use frame::{Decoder, MAX_FRAME_BYTES};

#[derive(Arbitrary, Debug)]
struct Input {
    pieces: Vec<Vec<u8>>,
    /// Frames of our own, sent before the rubbish.
    payloads: Vec<Vec<u8>>,
}

fuzz_target!(|input: Input| {
    let mut decoder = Decoder::default();
    for payload in &input.payloads {
        let mut bytes = Vec::new();
        frame::encode(&serde_json::json!({"type": "test"}), payload, &mut bytes);
        // Cut anywhere, a good frame comes out whole and once.
        let middle = bytes.len() / 2;
        decoder.feed(&bytes[..middle]);
        assert_eq!(decoder.next(), Ok(None));
        decoder.feed(&bytes[middle..]);
        let decoded = decoder.next().expect("the frame is good").expect("the frame is whole");
        assert_eq!(&decoded.payload, payload);
        assert_eq!(decoded.header, br#"{"type":"test"}"#);
        assert!(decoder.is_empty());
    }

    let mut fed = 0;
    let mut taken = 0;
    for piece in &input.pieces {
        decoder.feed(piece);
        fed += piece.len();
        loop {
            match decoder.next() {
                Ok(Some(frame)) => {
                    taken += 8 + frame.header.len() + frame.payload.len();
                    assert!(taken <= fed, "a frame was made of bytes that never came");
                    assert!(frame.header.len() + frame.payload.len() <= MAX_FRAME_BYTES);
                }
                Ok(None) => break,
                // The conversation is over; the decoder must refuse again and not go on.
                Err(refusal) => {
                    assert_eq!(decoder.next(), Err(refusal));
                    return;
                }
            }
        }
    }
    assert_eq!(decoder.is_empty(), taken == fed);
});
