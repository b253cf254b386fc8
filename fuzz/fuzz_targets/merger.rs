//! Any text and markers on two pipes, any frames, in any order of arrival: no byte is lost, each
//! pipe keeps its own order, and the merger never asks for ever.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;

// The merger is private to its room; its file needs nothing of the rest.
#[path = "../../src/runner_client/merge.rs"]
#[allow(dead_code)]
mod merge;

use merge::{Merger, Need, Pipe};

const MARKER: [u8; 16] = *b"0123456789abcdef";

#[derive(Arbitrary, Debug)]
enum Step {
    Text {
        error: bool,
        bytes: Vec<u8>,
    },
    Marker {
        error: bool,
        seq: u8,
        frame: bool,
    },
    /// Half a marker, which may be text or the start of one.
    Torn {
        error: bool,
        seq: u8,
        length: u8,
    },
    Expect {
        seq: u8,
    },
    Pass,
    /// Look where the merger wants to look, and find nothing there.
    Dry,
}

fuzz_target!(|steps: Vec<Step>| {
    let mut merger = Merger::new(MARKER);
    let mut sent = [0, 0];
    let mut received = [0, 0];
    for step in steps {
        match step {
            Step::Text { error, bytes } => {
                sent[usize::from(error)] += bytes.len();
                merger.feed(pipe(error), &bytes);
            }
            Step::Marker { error, seq, frame } => {
                let bytes = marker(seq, frame);
                sent[usize::from(error)] += bytes.len();
                merger.feed(pipe(error), &bytes);
            }
            Step::Torn { error, seq, length } => {
                let bytes = marker(seq, true);
                let bytes = &bytes[..usize::from(length) % bytes.len()];
                sent[usize::from(error)] += bytes.len();
                merger.feed(pipe(error), bytes);
            }
            Step::Expect { seq } => merger.expect(u32::from(seq)),
            Step::Pass => {
                settle(&mut merger);
                merger.pass();
            }
            Step::Dry => {
                if let Some(need) = merger.need() {
                    merger.dry(need);
                }
            }
        }
        take(&mut merger, &mut received);
    }
    settle(&mut merger);
    merger.pass();
    settle(&mut merger);
    merger.finish();
    take(&mut merger, &mut received);
    assert!(merger.pop().is_none());
    for side in [0, 1] {
        // Whole markers are taken out; everything else arrives.
        assert!(received[side] <= sent[side], "bytes were made up");
        assert_eq!(
            (sent[side] - received[side]) % marker(0, true).len(),
            0,
            "text was lost on pipe {side}"
        );
    }
});

/// Answers every need with "nothing there" until the merger needs nothing. It must not need for
/// ever.
fn settle(merger: &mut Merger) {
    for _ in 0..10_000 {
        let Some(need) = merger.need() else { return };
        merger.dry(match need {
            Need::Pipe(pipe) => Need::Pipe(pipe),
            Need::Channel => Need::Channel,
        });
    }
    panic!("the merger never stops asking");
}

fn take(merger: &mut Merger, received: &mut [usize; 2]) {
    while let Some((pipe, bytes)) = merger.pop() {
        received[pipe as usize] += bytes.len();
    }
}

fn pipe(error: bool) -> Pipe {
    if error { Pipe::Err } else { Pipe::Out }
}

fn marker(seq: u8, frame: bool) -> Vec<u8> {
    let mut bytes = b"\0\x1bCB".to_vec();
    bytes.extend_from_slice(&MARKER);
    bytes.extend_from_slice(&u32::from(seq).to_be_bytes());
    bytes.push(if frame { b'F' } else { b'P' });
    bytes.push(b'\n');
    bytes
}
