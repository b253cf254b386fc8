//! Invisible characters. The one list for all code that shows or compares untrusted text.

/// Returns whether a character is not visible as what it is: controls, formats, direction marks,
/// fillers, separators, tags, and spaces other than the ASCII space.
pub fn is_unseen(letter: char) -> bool {
    letter.is_control()
        || (letter.is_whitespace() && letter != ' ')
        || matches!(
            u32::from(letter),
            0xad | 0x34f
                | 0x600..=0x605
                | 0x61c
                | 0x6dd
                | 0x70f
                | 0x890..=0x891
                | 0x8e2
                | 0x115f..=0x1160
                | 0x17b4..=0x17b5
                | 0x180b..=0x180f
                | 0x200b..=0x200f
                | 0x2028..=0x202e
                | 0x2060..=0x206f
                | 0x2800
                | 0x3164
                | 0xe000..=0xf8ff
                | 0xfe00..=0xfe0f
                | 0xfeff
                | 0xffa0
                | 0xfff0..=0xfffb
                | 0xfffe..=0xffff
                | 0x110bd
                | 0x110cd
                | 0x13430..=0x1343f
                | 0x1bca0..=0x1bca3
                | 0x1d173..=0x1d17a
                | 0xe0000..=0x10ffff
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_seen_is_left_alone_and_what_hides_is_not() {
        for seen in [' ', 'a', 'é', '中', '😀', '\'', '\u{301}'] {
            assert!(!is_unseen(seen), "{seen:?}");
        }
        for hidden in [
            '\0',
            '\n',
            '\t',
            '\u{1b}',
            '\u{7f}',
            '\u{85}',
            '\u{a0}',
            '\u{ad}',
            '\u{200b}',
            '\u{200f}',
            '\u{2028}',
            '\u{202e}',
            '\u{2066}',
            '\u{2800}',
            '\u{3000}',
            '\u{3164}',
            '\u{e000}',
            '\u{fe0f}',
            '\u{feff}',
            '\u{e0041}',
            '\u{f0000}',
            '\u{10ffff}',
        ] {
            assert!(is_unseen(hidden), "{hidden:?}");
        }
    }
}
