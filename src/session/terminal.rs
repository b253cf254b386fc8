//! What a terminal would do with the bytes of a stream, as far as a reader of text cares.
//!
//! Bytes become text: code points that were split between two reads are joined, invalid ones replaced, colour codes and other escape
//! sequences removed. Carriage return and backspace are told apart, because the line they act on belongs to the caller.
//!
//! The state is a few bytes, whatever is fed. An escape sequence that never ends swallows at most the rest of its line.

/// A piece of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Text with no control characters but newline and tab.
    Text(&'a str),
    CarriageReturn,
    Backspace,
}

/// The reader of one stream.
#[derive(Debug, Default)]
pub(super) struct Terminal {
    /// The first bytes of a code point whose rest has not arrived.
    unfinished: Vec<u8>,
    escape: Escape,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After the escape character.
    Begun,
    /// In a control sequence, which a letter ends.
    Control,
    /// In a title, a link or another string, which BEL or `ESC \` ends.
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
            let may_go_on = str::from_utf8(chunk.invalid()).is_err_and(|error| error.error_len().is_none());
            if position == bytes.len() && may_go_on {
                self.unfinished.extend_from_slice(chunk.invalid());
            } else {
                self.read_text("\u{fffd}", &mut emit);
            }
        }
    }

    /// Says what is left when no more will come.
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
            let special = |byte: &u8| (*byte < 0x20 && *byte != b'\n' && *byte != b'\t') || *byte == 0x7f;
            let plain = rest.as_bytes().iter().position(special).unwrap_or(rest.len());
            if plain > 0 {
                emit(Piece::Text(&rest[..plain]));
            }
            match rest.as_bytes().get(plain) {
                Some(b'\r') => emit(Piece::CarriageReturn),
                Some(0x08) => emit(Piece::Backspace),
                Some(0x1b) => self.escape = Escape::Begun,
                // The other control characters ring bells and the like.
                _ => {}
            }
            rest = rest.get(plain + 1..).unwrap_or_default();
        }
    }

    /// Passes over one character of an escape sequence, or leaves the sequence in front of a character that cannot be part of it.
    fn skip_escape<'a>(&mut self, text: &'a str) -> &'a str {
        let mut characters = text.chars();
        let character = characters.next().unwrap_or_default();
        self.escape = match (self.escape, character) {
            (Escape::String | Escape::StringEnding, '\n')
            | (Escape::Begun | Escape::Control, '\0'..='\x1a' | '\x1c'..='\x1f') => {
                self.escape = Escape::None;
                return text;
            }
            (Escape::Control, '\x1b') | (Escape::Begun, '\x1b') => Escape::Begun,
            (Escape::Begun, '[') => Escape::Control,
            (Escape::Begun, ']' | 'P' | 'X' | '^' | '_') => Escape::String,
            (Escape::Begun, ' '..='/') => Escape::Begun,
            (Escape::Control, ' '..='?') => Escape::Control,
            (Escape::String, '\x07') => Escape::None,
            (Escape::String, '\x1b') => Escape::StringEnding,
            (Escape::String, _) => Escape::String,
            (Escape::StringEnding, _) | (Escape::Begun | Escape::Control | Escape::None, _) => Escape::None,
        };
        characters.as_str()
    }
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
    fn a_sequence_that_never_ends_loses_only_its_line() {
        assert_eq!(read(&[b"\x1b]title\nnext"]), "\nnext");
        assert_eq!(read(&[b"\x1b[12\nnext"]), "\nnext");
    }

    #[test]
    fn split_code_points_are_joined_and_invalid_ones_replaced() {
        let bytes = "aä€😀".as_bytes();
        for cut in 0..bytes.len() {
            assert_eq!(read(&[&bytes[..cut], &bytes[cut..]]), "aä€😀", "cut at {cut}");
        }
        assert_eq!(read(&[b"a\xffb"]), "a\u{fffd}b");
        assert_eq!(read(&[b"a\xe2\x82", b"b"]), "a\u{fffd}b");
        assert_eq!(read(&[b"a\xe2\x82"]), "a\u{fffd}");
    }

    proptest! {
        #[test]
        fn the_way_bytes_are_cut_makes_no_difference(bytes in prop::collection::vec(any::<u8>(), 0..80), cut in 0usize..80) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(read(&[&bytes]), read(&[&bytes[..cut], &bytes[cut..]]));
        }
    }
}
