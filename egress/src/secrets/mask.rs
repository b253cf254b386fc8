//! The mask: removes real values from responses.
//!
//! It finds a value in any mix of encodings, character by character: plain, percent-encoded,
//! escaped for JSON, XML or HTML; and the value in base64 at any offset of longer text. It works on
//! a stream: bytes that may be the beginning of a value are held back until the next bytes decide,
//! so chunk boundaries hide nothing.
//!
//! It cannot find a value that a server changes on purpose, for example one that it reverses, or
//! splits over two responses.

use std::sync::Arc;

use bytes::Bytes;
use zeroize::Zeroizing;

use super::encoding::{base64_forms, json_unicode, percent_byte, xml_entities};

/// Values to search for and their replacements.
#[derive(Default)]
pub(super) struct Patterns {
    patterns: Vec<Pattern>,
    beginnings: Beginnings,
}

/// The bytes, and the pairs of bytes, with which an encoding of some pattern can begin. This alone
/// skips nearly all text.
#[derive(Default)]
struct Beginnings {
    bytes: Vec<bool>,
    /// One bit for each pair.
    pairs: Vec<u64>,
}

struct Pattern {
    bytes: Zeroizing<Vec<u8>>,
    placeholder: Arc<str>,
}

impl Patterns {
    /// Makes the patterns for pairs of a value and its placeholder.
    pub(super) fn new<'a>(pairs: impl Iterator<Item = (&'a str, &'a Arc<str>)>) -> Patterns {
        let mut patterns = Vec::new();
        for (value, placeholder) in pairs {
            let mut forms = base64_forms(value.as_bytes());
            forms.push(value.as_bytes().to_vec());
            patterns.extend(forms.into_iter().map(|form| Pattern {
                bytes: Zeroizing::new(form),
                placeholder: placeholder.clone(),
            }));
        }
        let beginnings = Beginnings::new(&patterns);
        Patterns {
            patterns,
            beginnings,
        }
    }

    /// Returns whether a value is in `text`.
    pub(super) fn finds_something(&self, text: &[u8]) -> bool {
        // Most servers have no secrets, and their responses may be large.
        if self.patterns.is_empty() {
            return false;
        }
        let mut at = self.beginnings.next(text, 0);
        while at < text.len() {
            if let Found::Value(..) = find_at(&self.patterns, text, at, true) {
                return true;
            }
            at = self.beginnings.next(text, at + 1);
        }
        false
    }

    /// Returns `text` with every value in it replaced.
    pub(super) fn mask(self: &Arc<Self>, text: &[u8]) -> Vec<u8> {
        let mut masker = Masker::new(self.clone());
        let mut masked = masker.push(Bytes::copy_from_slice(text)).to_vec();
        masked.extend_from_slice(&masker.finish());
        masked
    }
}

impl Beginnings {
    fn new(patterns: &[Pattern]) -> Beginnings {
        let mut beginnings = Beginnings {
            bytes: vec![false; 256],
            pairs: vec![0; 1024],
        };
        for pattern in patterns {
            let (first, second) = (pattern.bytes[0], pattern.bytes[1]);
            for next in [second].iter().chain(&ESCAPES) {
                beginnings.add(first, *next);
            }
            spellings(first, |spelling| {
                beginnings.add(spelling[0], spelling[1].to_ascii_lowercase());
                beginnings.add(spelling[0], spelling[1].to_ascii_uppercase());
            });
        }
        beginnings
    }

    fn add(&mut self, first: u8, second: u8) {
        let pair = usize::from(first) << 8 | usize::from(second);
        self.bytes[usize::from(first)] = true;
        self.pairs[pair / 64] |= 1 << (pair % 64);
    }

    /// Returns the first position from `at` on where a match may begin.
    fn next(&self, text: &[u8], mut at: usize) -> usize {
        if self.bytes.is_empty() {
            return text.len();
        }
        while let [first, second, ..] = text[at..] {
            let pair = usize::from(first) << 8 | usize::from(second);
            if self.bytes[usize::from(first)] && self.pairs[pair / 64] >> (pair % 64) & 1 == 1 {
                return at;
            }
            at += 1;
        }
        let is_beginning = text
            .get(at)
            .is_some_and(|last| self.bytes[usize::from(*last)]);
        if is_beginning { at } else { text.len() }
    }
}

/// Masks one stream.
pub(crate) struct Masker {
    patterns: Arc<Patterns>,
    /// Bytes that may become a value. Bounded by the longest encoding of the longest value.
    held: Vec<u8>,
}

impl Masker {
    pub(super) fn new(patterns: Arc<Patterns>) -> Masker {
        Masker {
            patterns,
            held: Vec::new(),
        }
    }

    /// Takes the next bytes and returns those that can be forwarded.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Bytes {
        if self.held.is_empty() {
            return self.scan(chunk, false);
        }
        self.held.extend_from_slice(&chunk);
        let text = Bytes::from(std::mem::take(&mut self.held));
        self.scan(text, false)
    }

    /// Returns other `text` masked, independently of the held bytes.
    pub(crate) fn mask(&self, text: &[u8]) -> Vec<u8> {
        self.patterns.mask(text)
    }

    /// Returns the held bytes at the end of the stream. The masker can then be used for another
    /// stream.
    pub(crate) fn finish(&mut self) -> Bytes {
        let text = Bytes::from(std::mem::take(&mut self.held));
        self.scan(text, true)
    }

    fn scan(&mut self, text: Bytes, is_last: bool) -> Bytes {
        let mut masked = Vec::new();
        let mut copied = 0;
        let mut at = self.patterns.beginnings.next(&text, 0);
        while at < text.len() {
            match find_at(&self.patterns.patterns, &text, at, is_last) {
                Found::Nothing => at += 1,
                Found::Beginning => {
                    self.held = text[at..].to_vec();
                    break;
                }
                Found::Value(end, placeholder) => {
                    masked.extend_from_slice(&text[copied..at]);
                    masked.extend_from_slice(placeholder.as_bytes());
                    (at, copied) = (end, end);
                }
            }
            at = self.patterns.beginnings.next(&text, at);
        }
        if copied == 0 {
            return text.slice(..at);
        }
        masked.extend_from_slice(&text[copied..at]);
        Bytes::from(masked)
    }
}

enum Found<'a> {
    Nothing,
    /// The text ends in bytes that may become a value.
    Beginning,
    Value(usize, &'a str),
}

/// Returns the match at `at`. The longest value wins, so a shorter one waits while a longer one is
/// possible.
fn find_at<'a>(patterns: &'a [Pattern], text: &[u8], at: usize, is_last: bool) -> Found<'a> {
    let mut found = Found::Nothing;
    for pattern in patterns {
        let spelled = spelled_at(&pattern.bytes, text, at);
        if spelled.is_open && !is_last {
            return Found::Beginning;
        }
        let longest = if let Found::Value(end, _) = found {
            end
        } else {
            at
        };
        if let Some(end) = spelled.end.filter(|end| *end > longest) {
            found = Found::Value(end, &pattern.placeholder);
        }
    }
    found
}

struct Spelled {
    /// Where the longest encoding of the whole pattern ends.
    end: Option<usize>,
    /// Whether the text ended before some encoding was complete or ruled out.
    is_open: bool,
}

/// Follows all encodings of `pattern` at once. A character such as `%` may be literal or begin an
/// escape, hence several positions.
fn spelled_at(pattern: &[u8], text: &[u8], at: usize) -> Spelled {
    // Almost always the first characters decide, and without an escape there is only one position.
    let text_here = &text[at..];
    let plain = pattern
        .iter()
        .zip(text_here)
        .take_while(|(byte, found)| byte == found && !is_escape(**found))
        .count();
    match text_here.get(plain) {
        _ if plain == pattern.len() => {
            return Spelled {
                end: Some(at + plain),
                is_open: false,
            };
        }
        None => {
            return Spelled {
                end: None,
                is_open: true,
            };
        }
        Some(found) if *found != pattern[plain] && !is_escape(*found) => {
            return Spelled {
                end: None,
                is_open: false,
            };
        }
        Some(_) => {}
    }
    let mut is_open = false;
    let mut places = vec![at + plain];
    let mut next = Vec::new();
    for &byte in &pattern[plain..] {
        for &place in &places {
            is_open |= step(byte, &text[place..], |length| {
                if !next.contains(&(place + length)) {
                    next.push(place + length);
                }
            });
        }
        std::mem::swap(&mut places, &mut next);
        next.clear();
        if places.is_empty() {
            return Spelled { end: None, is_open };
        }
    }
    Spelled {
        end: places.into_iter().max(),
        is_open,
    }
}

/// The bytes with which an encoding other than the byte itself can begin.
const ESCAPES: [u8; 4] = [b'%', b'\\', b'&', b'+'];

fn is_escape(byte: u8) -> bool {
    ESCAPES.contains(&byte)
}

/// Calls `with` for each way to escape `byte`. The case of its letters does not matter.
fn spellings(byte: u8, mut with: impl FnMut(&[u8])) {
    with(&percent_byte(byte));
    if byte.is_ascii() {
        with(&json_unicode(byte));
    }
    if byte.is_ascii_punctuation() {
        with(&[b'\\', byte]);
    }
    xml_entities(byte).iter().for_each(|entity| with(entity));
}

/// Calls `accept` with the length of each encoding of `byte` that `text` begins with. Returns
/// whether the text is too short to rule out another one.
fn step(byte: u8, text: &[u8], mut accept: impl FnMut(usize)) -> bool {
    let Some(&first) = text.first() else {
        return true;
    };
    if first == byte || (first == b'+' && byte == b' ') {
        accept(1);
    }
    let mut is_open = false;
    if is_escape(first) {
        spellings(byte, |spelling| {
            let length = spelling.len().min(text.len());
            if text[..length].eq_ignore_ascii_case(&spelling[..length]) {
                match length == spelling.len() {
                    true => accept(length),
                    false => is_open = true,
                }
            }
        });
    }
    is_open
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::encoding::{base64, for_json, for_path, for_query, for_xml};
    use proptest::prelude::*;

    const VALUE: &str = r#"sk/9+a "b"\c%25&d<e"#;

    fn patterns(values: &[&str]) -> Arc<Patterns> {
        let placeholders: Vec<Arc<str>> = (0..values.len())
            .map(|number| Arc::from(format!("<{number}>")))
            .collect();
        Arc::new(Patterns::new(values.iter().copied().zip(&placeholders)))
    }

    fn masked(values: &[&str], text: &[u8]) -> String {
        String::from_utf8(patterns(values).mask(text)).unwrap()
    }

    #[test]
    fn a_value_is_found_in_every_spelling() {
        let spellings = [
            VALUE.as_bytes().to_vec(),
            for_query(VALUE),
            for_path(VALUE),
            for_json(VALUE),
            for_xml(VALUE),
            base64(VALUE.as_bytes()),
        ];
        for spelling in spellings {
            let text = [b"x=", &spelling[..], b"; y"].concat();
            let masked = masked(&[VALUE], &text);
            assert!(
                masked.starts_with("x=<0>") && masked.ends_with("; y"),
                "{masked}"
            );
        }
        let lower_case = String::from_utf8(for_query(VALUE))
            .unwrap()
            .replace("%2F", "%2f")
            .replace("%20", "+");
        assert_eq!(masked(&[VALUE], lower_case.as_bytes()), "<0>");
        assert_eq!(masked(&["abcdefgh"], br"\u0061bcd%65fgh"), "<0>");
    }

    #[test]
    fn what_is_not_the_value_stays() {
        let text = r"sk/9+a 100% \ \u00 &amp &am; + abcdefg abcdefgX %41 %";
        assert_eq!(masked(&[VALUE, "abcdefgh"], text.as_bytes()), text);
        assert_eq!(masked(&[], b"anything"), "anything");
    }

    #[test]
    fn the_longer_of_two_values_counts() {
        assert_eq!(
            masked(&["abcdefgh", "abcdefghijkl"], b"abcdefghijkl abcdefghij"),
            "<1> <0>ij"
        );
    }

    #[test]
    fn only_what_may_become_a_value_is_held_back() {
        let mut masker = Masker::new(patterns(&["abcdefgh"]));
        assert_eq!(
            masker.push(Bytes::from_static(b"data: 1\n\n")),
            "data: 1\n\n"
        );
        assert_eq!(masker.push(Bytes::from_static(b"xabcd")), "x");
        assert_eq!(masker.push(Bytes::from_static(b"e")), "");
        assert_eq!(masker.push(Bytes::from_static(b"fgh!")), "<0>!");
        assert_eq!(masker.push(Bytes::from_static(b"abcd")), "");
        assert_eq!(masker.finish(), "abcd");
    }

    proptest! {
        #[test]
        fn borders_between_chunks_change_nothing(
            pieces in prop::collection::vec(prop::sample::select(vec![
                "abcdefgh", "abcd", "efgh", "%61", "YWJjZGVmZ2g=", "YWJj", "x", "%", "\\u0061",
                "bcdefgh", "\n",
            ]), 0..20),
            size in 1_usize..9,
        ) {
            let text = pieces.concat();
            let patterns = patterns(&["abcdefgh"]);
            let mut masker = Masker::new(patterns.clone());
            let mut masked = Vec::new();
            for chunk in text.as_bytes().chunks(size) {
                masked.extend_from_slice(&masker.push(Bytes::copy_from_slice(chunk)));
            }
            masked.extend_from_slice(&masker.finish());
            prop_assert_eq!(&masked, &patterns.mask(text.as_bytes()));
            prop_assert!(!String::from_utf8(masked).unwrap().contains("abcdefgh"));
        }
    }
}
