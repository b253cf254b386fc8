//! Late text: output of code of earlier cells that belongs to no running cell.
//!
//! A thread, a task or a process can outlive the cell that started it. Its text is kept until the
//! next result reports it. Only the newest part is kept, so memory use is bounded, and dropped
//! characters are counted. Every session has its own.

use crate::runner_client::Pipe;

use super::LateOutput;
use super::terminal::{Piece, Terminal};

/// Minimum number of bytes kept, if there are that many. Up to twice as many are kept, to amortize
/// the cost of dropping.
const KEPT: usize = 64 * 1024;

/// Late text within bounds.
#[derive(Debug, Default)]
pub(super) struct LateText {
    terminals: [Terminal; 2],
    text: String,
    omitted: u64,
    /// The next character restarts the last line.
    returned: bool,
}

impl LateText {
    /// Adds bytes written by a process.
    pub(super) fn write(&mut self, pipe: Pipe, bytes: &[u8]) {
        let LateText {
            terminals,
            text,
            omitted,
            returned,
        } = self;
        terminals[pipe as usize].read(bytes, |piece| {
            match piece {
                Piece::CarriageReturn => *returned = true,
                Piece::Backspace if text.ends_with('\n') => {}
                Piece::Backspace => {
                    text.pop();
                }
                Piece::Text(more) => {
                    // Before a newline, a carriage return is only the first half of the line
                    // ending.
                    if std::mem::take(returned) && !more.starts_with('\n') {
                        text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
                    }
                    text.push_str(more);
                }
            }
            if text.len() > 2 * KEPT {
                *omitted = omitted.saturating_add(drop_oldest(text, KEPT));
            }
        });
    }

    /// Adds text kept by the runner, and the number of characters that it dropped.
    pub(super) fn add(&mut self, text: &str, omitted: u64) {
        self.write(Pipe::Out, text.as_bytes());
        self.omitted = self.omitted.saturating_add(omitted);
    }

    /// Returns the newest part, at most `max_chars` characters, and clears the text. `None` if
    /// nothing was printed.
    pub(super) fn take(&mut self, max_chars: usize) -> Option<LateOutput> {
        let LateText {
            mut text,
            mut omitted,
            ..
        } = std::mem::take(self);
        let excess = text.chars().count().saturating_sub(max_chars);
        let at = text
            .char_indices()
            .nth(excess)
            .map_or(text.len(), |(at, _)| at);
        text.drain(..at);
        omitted = omitted.saturating_add(excess as u64);
        (!text.is_empty() || omitted > 0).then_some(LateOutput { text, omitted })
    }
}

/// Keeps the last `kept` bytes, plus a few up to a character boundary. Returns the number of
/// removed characters.
fn drop_oldest(text: &mut String, kept: usize) -> u64 {
    let at = text.floor_char_boundary(text.len().saturating_sub(kept));
    text.drain(..at).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(text: &str, omitted: u64) -> Option<LateOutput> {
        Some(LateOutput {
            text: text.to_owned(),
            omitted,
        })
    }

    #[test]
    fn text_is_told_once() {
        let mut text = LateText::default();
        assert_eq!(text.take(100), None);
        text.write(Pipe::Out, b"one\n");
        text.add("two\n", 0);
        assert_eq!(text.take(100), late("one\ntwo\n", 0));
        assert_eq!(text.take(100), None);
    }

    #[test]
    fn a_progress_bar_leaves_its_last_state_and_colours_vanish() {
        let mut text = LateText::default();
        text.write(Pipe::Err, b"begin\n 10%\r 20%\r\x1b[31m 30%");
        text.write(Pipe::Err, b"\r\nend\x08\x08\x08\x08.");
        assert_eq!(text.take(100), late("begin\n 30%\n.", 0));
    }

    #[test]
    fn a_flood_leaves_the_newest_part_and_everything_is_counted() {
        let mut text = LateText::default();
        for _ in 0..1000 {
            text.write(Pipe::Out, "ż".repeat(1000).as_bytes());
            assert!(text.text.len() <= 2 * KEPT + 2000);
        }
        text.add("end", 7);
        let told = text.take(5).unwrap();
        assert_eq!(
            (told.text.as_str(), told.omitted),
            ("żżend", 1_000_000 + 3 + 7 - 5)
        );
    }

    #[test]
    fn a_character_that_comes_in_two_reads_is_whole() {
        let mut text = LateText::default();
        text.write(Pipe::Out, &"ż".as_bytes()[..1]);
        text.write(Pipe::Out, &"ż".as_bytes()[1..]);
        assert_eq!(text.take(100), late("ż", 0));
    }

    #[test]
    fn a_claim_of_nothing_but_dropped_text_is_told() {
        let mut text = LateText::default();
        text.add("", u64::MAX);
        text.add("x", 1);
        assert_eq!(text.take(0), late("", u64::MAX));
    }
}
