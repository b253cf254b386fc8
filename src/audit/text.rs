//! Texts in records: bounded, and escaped so that they cannot break a line, control a terminal or
//! mislead a reader.
//!
//! Names, paths and reasons come from callers and may be hostile. A [`Text`] is truncated when it
//! is created, so that no record can exceed the limit of a line, and `plain_json` escapes every
//! character that is not printable.

use std::fmt;
use std::io;

use cellblock_typed::is_unseen;
use serde::Serialize;
use serde::ser::{SerializeSeq, Serializer};
use sha2::Digest as _;

use super::event::hex;

/// Limit of a text in a record in bytes, without its truncation mark.
const MAX_TEXT_LENGTH: usize = 512;

/// Limit of a list entry in bytes.
const MAX_ENTRY_LENGTH: usize = 256;

/// Limit of written list entries. Two full lists and every other field still fit into a line.
const MAX_ENTRIES: usize = 16;

/// A text that fits into a record; a longer one is truncated and marked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Text(String);

impl Text {
    fn within(text: &str, longest: usize) -> Text {
        let mut length = 0;
        for (at, letter) in text.char_indices() {
            length += written_length(letter);
            if length > longest {
                // Two long texts with the same beginning must not look the same.
                let digest = hex(&sha2::Sha256::digest(text)[..8]);
                return Text(format!(
                    "{}…(cut, {} bytes in all, sha256 {digest}…)",
                    &text[..at],
                    text.len()
                ));
            }
        }
        Text(text.to_owned())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Text {
        Text::within(text, MAX_TEXT_LENGTH)
    }
}

impl From<String> for Text {
    fn from(text: String) -> Text {
        Text::from(text.as_str())
    }
}

/// A list that fits into a record; of a longer one the first entries are kept and the others
/// counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct List {
    entries: Vec<Text>,
    left_out: usize,
}

impl<T: AsRef<str>> FromIterator<T> for List {
    fn from_iter<I: IntoIterator<Item = T>>(entries: I) -> List {
        let mut entries = entries.into_iter();
        let kept = entries
            .by_ref()
            .take(MAX_ENTRIES)
            .map(|entry| Text::within(entry.as_ref(), MAX_ENTRY_LENGTH));
        List {
            entries: kept.collect(),
            left_out: entries.count(),
        }
    }
}

impl Serialize for List {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sequence = serializer.serialize_seq(None)?;
        for entry in &self.entries {
            sequence.serialize_element(entry)?;
        }
        if self.left_out > 0 {
            sequence.serialize_element(&format!("…(and {} more)", self.left_out))?;
        }
        sequence.end()
    }
}

/// Serializes `value` as one line of JSON in which every character that is not printable is
/// escaped.
pub fn plain_json(value: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(512);
    value.serialize(&mut serde_json::Serializer::with_formatter(
        &mut line, Plain,
    ))?;
    Ok(line)
}

struct Plain;

impl serde_json::ser::Formatter for Plain {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut printed = 0;
        for (at, letter) in fragment
            .char_indices()
            .filter(|(_, letter)| is_unseen(*letter))
        {
            writer.write_all(&fragment.as_bytes()[printed..at])?;
            for unit in letter.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
            printed = at + letter.len_utf8();
        }
        writer.write_all(&fragment.as_bytes()[printed..])
    }
}

fn written_length(letter: char) -> usize {
    match letter {
        '"' | '\\' => 2,
        _ if is_unseen(letter) => 6 * letter.len_utf16(),
        _ => letter.len_utf8(),
    }
}

impl fmt::Display for Text {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(text: &str) -> String {
        String::from_utf8(plain_json(&Text::from(text)).unwrap()).unwrap()
    }

    #[test]
    fn what_does_not_print_is_an_escape() {
        assert_eq!(written("plain ä 漢 😀"), "\"plain ä 漢 😀\"");
        assert_eq!(
            written("a\nb\r\u{1b}[2J\u{7f}"),
            r#""a\nb\r\u001b[2J\u007f""#
        );
        assert_eq!(
            written("\u{85}\u{2028}\u{202e}\u{feff}"),
            r#""\u0085\u2028\u202e\ufeff""#
        );
        assert_eq!(written("\u{e0041}"), r#""\udb40\udc41""#);
        assert_eq!(written("\",\"hash\":\""), r#""\",\"hash\":\"""#);
    }

    #[test]
    fn a_long_text_is_cut_and_says_so() {
        let whole = "a".repeat(MAX_TEXT_LENGTH);
        assert_eq!(Text::from(whole.as_str()).as_str(), whole);
        let cut = Text::from(format!("{whole}b"));
        let mark = cut.as_str().strip_prefix(whole.as_str()).unwrap();
        assert!(
            mark.starts_with("…(cut, 513 bytes in all, sha256 "),
            "{mark}"
        );
        assert_ne!(
            cut,
            Text::from(format!("{whole}c")),
            "they differ only behind the cut"
        );
    }

    #[test]
    fn a_long_list_counts_what_it_leaves_out() {
        let list: List = (0..20).map(|number| number.to_string()).collect();
        let written = String::from_utf8(plain_json(&list).unwrap()).unwrap();
        assert!(written.ends_with(r#""15","…(and 4 more)"]"#), "{written}");
        assert_eq!(
            plain_json(&(0..2).map(|number| number.to_string()).collect::<List>()).unwrap(),
            br#"["0","1"]"#
        );
    }

    proptest! {
        #[test]
        fn any_text_stays_on_its_line_and_within_its_bound(
            text in any::<String>(),
            times in 1_usize..200,
        ) {
            let text = text.repeat(times);
            let line = plain_json(&Text::from(text.as_str())).unwrap();
            prop_assert!(line.len() <= MAX_TEXT_LENGTH + 80, "{} bytes", line.len());
            let line = String::from_utf8(line).unwrap();
            prop_assert!(!line.chars().any(is_unseen));
            let back: String = serde_json::from_str(&line).unwrap();
            prop_assert!(back == text || back.contains("…(cut, "));
        }
    }
}
