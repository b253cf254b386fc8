//! Interprets the bytes of a stream as a terminal would, as far as it matters for a reader of text.
//!
//! Bytes become text: code points split between two reads are joined, invalid ones replaced, colour
//! codes and other escape sequences removed, including those that start with a control character
//! from U+0080 to U+009F. Carriage return and backspace are reported separately, because the line
//! that they act on belongs to the caller. Characters that change the text direction are shown by
//! number, so that text cannot look like other text.
//!
//! The state is a few bytes, regardless of the input. An unterminated escape sequence swallows at
//! most the rest of its line.

/// A piece of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Text without control characters except newline and tab, and without characters that change
    /// the text direction.
    Text(&'a str),
    CarriageReturn,
    Backspace,
}

/// The decoder of one stream.
#[derive(Debug, Default)]
pub(super) struct Terminal {
    /// The first bytes of an incomplete code point.
    unfinished: Vec<u8>,
    escape: Escape,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After the escape character.
    Begun,
    /// In a control sequence, which is terminated by a letter.
    Control,
    /// In a title, a link or another string, which is terminated by BEL or `ESC \`.
    String,
    /// After an escape character in a string.
    StringEnding,
}

impl Terminal {
    pub(super) fn read(&mut self, bytes: &[u8], mut emit: impl FnMut(Piece<'_>)) {
        let joined;
        let bytes = if self.unfinished.is_empty() {
            bytes
        } else {
            joined = [&std::mem::take(&mut self.unfinished)[..], bytes].concat();
            &joined
        };
        let mut position = 0;
        for chunk in bytes.utf8_chunks() {
            self.read_text(chunk.valid(), &mut emit);
            position += chunk.valid().len() + chunk.invalid().len();
            if chunk.invalid().is_empty() {
                continue;
            }
            let may_go_on =
                str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none());
            if position == bytes.len() && may_go_on {
                self.unfinished.extend_from_slice(chunk.invalid());
            } else {
                self.read_text("\u{fffd}", &mut emit);
            }
        }
    }

    /// Emits the remaining input at the end of the stream.
    pub(super) fn finish(&mut self, mut emit: impl FnMut(Piece<'_>)) {
        if !self.unfinished.is_empty() {
            self.unfinished.clear();
            self.read_text("\u{fffd}", &mut emit);
        }
        self.escape = Escape::None;
    }

    fn read_text(&mut self, text: &str, emit: &mut impl FnMut(Piece<'_>)) {
        let mut rest = text;
        while !rest.is_empty() {
            if self.escape != Escape::None {
                rest = self.skip_escape(rest);
                continue;
            }
            let plain = plain_length(rest);
            if plain > 0 {
                emit(Piece::Text(&rest[..plain]));
            }
            let mut characters = rest[plain..].chars();
            match characters.next() {
                Some('\r') => emit(Piece::CarriageReturn),
                Some('\x08') => emit(Piece::Backspace),
                Some('\x1b') => self.escape = Escape::Begun,
                // The single-character form of ESC and a letter.
                Some('\u{9b}') => self.escape = Escape::Control,
                Some('\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}') => self.escape = Escape::String,
                Some(character) if turns_direction(character) => {
                    emit(Piece::Text(&format!("\\u{{{:x}}}", u32::from(character))));
                }
                // The other control characters (bell and similar) are dropped.
                _ => {}
            }
            rest = characters.as_str();
        }
    }

    /// Skips one character of an escape sequence, or leaves the sequence before a character that
    /// cannot be part of it.
    fn skip_escape<'a>(&mut self, text: &'a str) -> &'a str {
        let mut characters = text.chars();
        let character = characters.next().unwrap_or_default();
        self.escape = match (self.escape, character) {
            (Escape::String | Escape::StringEnding, '\n')
            | (
                Escape::Begun | Escape::Control,
                '\0'..='\x1a' | '\x1c'..='\x1f' | '\u{80}'..='\u{9f}',
            ) => {
                self.escape = Escape::None;
                return text;
            }
            (Escape::Control, '\x1b') | (Escape::Begun, '\x1b') => Escape::Begun,
            (Escape::Begun, '[') => Escape::Control,
            (Escape::Begun, ']' | 'P' | 'X' | '^' | '_') => Escape::String,
            (Escape::Begun, ' '..='/') => Escape::Begun,
            (Escape::Control, ' '..='?') => Escape::Control,
            (Escape::String, '\x07' | '\u{9c}') => Escape::None,
            (Escape::String, '\x1b') => Escape::StringEnding,
            (Escape::String, _) => Escape::String,
            (Escape::StringEnding, _) | (Escape::Begun | Escape::Control | Escape::None, _) => {
                Escape::None
            }
        };
        characters.as_str()
    }
}

/// Returns the number of bytes at the start of a text that are shown unchanged.
fn plain_length(text: &str) -> usize {
    // Nearly all text has none of these bytes: control characters, and the first bytes of the
    // characters that are checked below.
    let suspicious = |byte: &u8| {
        (*byte < 0x20 && *byte != b'\n' && *byte != b'\t')
            || matches!(*byte, 0x7f | 0xc2 | 0xd8 | 0xe2)
    };
    let mut from = 0;
    while let Some(at) = text.as_bytes()[from..].iter().position(suspicious) {
        let at = from + at;
        let character = text[at..].chars().next().unwrap_or_default();
        if character.is_control() || turns_direction(character) {
            return at;
        }
        from = at + character.len_utf8();
    }
    text.len()
}

/// Returns whether a character changes the direction of the text around it. Right-to-left letters
/// are not among these.
fn turns_direction(character: char) -> bool {
    matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}'
        | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(parts: &[&[u8]]) -> String {
        let mut terminal = Terminal::default();
        let mut seen = String::new();
        let mut note = |piece: Piece<'_>| match piece {
            Piece::Text(text) => seen.push_str(text),
            Piece::CarriageReturn => seen.push('\r'),
            Piece::Backspace => seen.push('\x08'),
        };
        for part in parts {
            terminal.read(part, &mut note);
        }
        terminal.finish(note);
        seen
    }

    #[test]
    fn escape_sequences_vanish_and_tabs_stay() {
        for (bytes, text) in [
            ("\x1b[31mred\x1b[0m", "red"),
            ("\x1b[38;5;196mx\x1b[K\ty", "x\ty"),
            ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link", "alink"),
            ("\x1b(Ba\x1b=b\x1b7c", "abc"),
            ("a\x07b\0c\x7fd", "abcd"),
            ("100%\r\nnext", "100%\r\nnext"),
        ] {
            assert_eq!(read(&[bytes.as_bytes()]), text, "{bytes:?}");
            let single = bytes.as_bytes().chunks(1).collect::<Vec<_>>();
            assert_eq!(read(&single), text, "{bytes:?} byte by byte");
        }
    }

    #[test]
    fn control_characters_of_one_code_point_act_as_their_sequences() {
        for (bytes, text) in [
            ("\u{9b}31mred\u{9b}0m", "red"),
            ("\u{9d}0;title\u{9c}a\u{90}x\x1b\\b", "ab"),
            ("a\u{85}b\u{8d}c\u{80}", "abc"),
            ("\x1b[1\u{9b}2Kx", "x"),
            ("\u{9d}title\nnext", "\nnext"),
            // Control: characters with the same first bytes.
            ("£ é € “x” ؀ا", "£ é € “x” ؀ا"),
        ] {
            assert_eq!(read(&[bytes.as_bytes()]), text, "{bytes:?}");
            let single = bytes.as_bytes().chunks(1).collect::<Vec<_>>();
            assert_eq!(read(&single), text, "{bytes:?} byte by byte");
        }
    }

    #[test]
    fn characters_that_turn_the_direction_are_shown_by_number() {
        assert_eq!(
            read(&["admin\u{202e}txt.exe\u{2066}\u{200f}".as_bytes()]),
            r"admin\u{202e}txt.exe\u{2066}\u{200f}"
        );
        assert_eq!(read(&["\u{61c}a".as_bytes()]), r"\u{61c}a");
        // Control: right-to-left letters, and joiners that words and emoji need.
        for text in ["שלום", "سلام", "می\u{200c}خواهم", "👩\u{200d}💻"] {
            assert_eq!(read(&[text.as_bytes()]), text);
        }
        for unseen in "\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2066}\u{2069}".chars() {
            assert!(
                turns_direction(unseen) && cellblock_typed::is_unseen(unseen),
                "{unseen:?} is in the list of all"
            );
        }
    }

    #[test]
    fn a_sequence_that_never_ends_loses_only_its_line() {
        assert_eq!(read(&[b"\x1b]title\nnext"]), "\nnext");
        assert_eq!(read(&[b"\x1b[12\nnext"]), "\nnext");
    }

    #[test]
    fn split_code_points_are_joined_and_invalid_ones_replaced() {
        let bytes = "aä€😀".as_bytes();
        for cut in 0..bytes.len() {
            assert_eq!(
                read(&[&bytes[..cut], &bytes[cut..]]),
                "aä€😀",
                "cut at {cut}"
            );
        }
        assert_eq!(read(&[b"a\xffb"]), "a\u{fffd}b");
        assert_eq!(read(&[b"a\xe2\x82", b"b"]), "a\u{fffd}b");
        assert_eq!(read(&[b"a\xe2\x82"]), "a\u{fffd}");
    }

    proptest! {
        #[test]
        fn the_way_bytes_are_cut_makes_no_difference(
            bytes in prop::collection::vec(any::<u8>(), 0..80), cut in 0usize..80,
        ) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(read(&[&bytes]), read(&[&bytes[..cut], &bytes[cut..]]));
        }

        #[test]
        fn nothing_that_is_shown_controls_a_terminal(text in any::<String>()) {
            let shown = read(&[text.as_bytes()]);
            let allowed = |character: char| matches!(character, '\n' | '\t' | '\r' | '\x08');
            prop_assert!(!shown
                .chars()
                .any(|shown| (shown.is_control() && !allowed(shown)) || turns_direction(shown)));
        }
    }
}
