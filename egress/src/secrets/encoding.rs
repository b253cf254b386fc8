//! Encodings of a value for the place where it appears: percent-encoded, in a JSON string, in XML,
//! in base64.

use base64::alphabet;
use base64::engine::general_purpose::{
    GeneralPurpose, GeneralPurposeConfig, STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD,
};
use base64::engine::{DecodePaddingMode, Engine};
use zeroize::Zeroizing;

const HEXADECIMAL: &[u8; 16] = b"0123456789ABCDEF";

/// Decodes base64 of any encoder, including one that leaves trailing bits set.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Returns `byte` as a percent sign and two digits.
pub(super) fn percent_byte(byte: u8) -> [u8; 3] {
    [
        b'%',
        HEXADECIMAL[usize::from(byte >> 4)],
        HEXADECIMAL[usize::from(byte & 15)],
    ]
}

/// Returns `byte` as JSON's `\u00…`. It represents the byte only if that is ASCII.
pub(super) fn json_unicode(byte: u8) -> [u8; 6] {
    let [_, high, low] = percent_byte(byte);
    [b'\\', b'u', b'0', b'0', high, low]
}

/// Encodes `value` for a query or a form: only letters, digits and `-._~` are kept.
pub(super) fn for_query(value: &str) -> Vec<u8> {
    percent(value, b"-._~")
}

/// Encodes `value` for one segment of a path, where more characters are allowed unescaped.
pub(super) fn for_path(value: &str) -> Vec<u8> {
    percent(value, b"-._~:@!$&'()*+,;=")
}

/// Escapes `value`, which has no control characters, for the inside of a JSON string.
pub(super) fn for_json(value: &str) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        if matches!(byte, b'"' | b'\\') {
            escaped.push(b'\\');
        }
        escaped.push(byte);
    }
    escaped
}

/// Escapes `value` for text or an attribute in XML.
pub(super) fn for_xml(value: &str) -> Vec<u8> {
    let mut escaped = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        match xml_entities(byte).first() {
            Some(entity) => escaped.extend_from_slice(entity),
            None => escaped.push(byte),
        }
    }
    escaped
}

/// Returns `value` unchanged.
pub(super) fn verbatim(value: &str) -> Vec<u8> {
    value.as_bytes().to_vec()
}

/// Returns the XML and HTML entities for `byte`, the usual one first.
pub(super) fn xml_entities(byte: u8) -> &'static [&'static [u8]] {
    match byte {
        b'&' => &[b"&amp;", b"&#38;", b"&#x26;"],
        b'<' => &[b"&lt;", b"&#60;", b"&#x3c;"],
        b'>' => &[b"&gt;", b"&#62;", b"&#x3e;"],
        b'"' => &[b"&quot;", b"&#34;", b"&#x22;"],
        b'\'' => &[b"&#39;", b"&#x27;", b"&apos;"],
        _ => &[],
    }
}

/// Encodes in base64 with the standard alphabet and padding.
pub(super) fn base64(bytes: &[u8]) -> Vec<u8> {
    STANDARD.encode(bytes).into_bytes()
}

/// Decodes base64 of either alphabet, with or without padding.
pub(super) fn base64_decoded(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.trim_ascii_end();
    let digits = digits
        .strip_suffix(b"==")
        .or_else(|| digits.strip_suffix(b"="))
        .unwrap_or(digits);
    let standard = |digit: &u8| match digit {
        b'-' => b'+',
        b'_' => b'/',
        other => *other,
    };
    LENIENT
        .decode(digits.iter().map(standard).collect::<Vec<u8>>())
        .ok()
}

/// Returns the forms of `value` in the middle of longer base64 text: one for each offset within a
/// group of three bytes, in both alphabets. A form has only those characters that depend on the
/// value alone, so it lacks up to four bits of the value at either end.
pub(super) fn base64_forms(value: &[u8]) -> Vec<Vec<u8>> {
    let mut forms = Vec::new();
    for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
        for (bytes_before, mixed_characters) in [(0, 0), (1, 2), (2, 3)] {
            let text = Zeroizing::new([&[0; 2][..bytes_before], value].concat());
            let last = text.len() * 8 / 6;
            let form = engine.encode(&*text).as_bytes()[mixed_characters..last].to_vec();
            if !forms.contains(&form) {
                forms.push(form);
            }
        }
    }
    forms
}

fn percent(value: &str, kept: &[u8]) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(value.len());
    for byte in value.bytes() {
        match byte.is_ascii_alphanumeric() || kept.contains(&byte) {
            true => encoded.push(byte),
            false => encoded.extend_from_slice(&percent_byte(byte)),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded.as_bytes());
            assert_eq!(
                base64_decoded(encoded.as_bytes()).unwrap(),
                plain.as_bytes()
            );
            assert_eq!(
                base64_decoded(encoded.trim_end_matches('=').as_bytes()).unwrap(),
                plain.as_bytes()
            );
        }
        assert_eq!(base64(&[0xfb, 0xff]), b"+/8=");
        assert_eq!(base64_decoded(b"-_8").unwrap(), [0xfb, 0xff]);
        assert_eq!(base64_decoded(b"Zm9v!"), None);
        assert_eq!(base64_decoded(b"Z"), None);
    }

    #[test]
    fn each_place_has_its_spelling() {
        assert_eq!(for_query("a b/c+d:e~"), b"a%20b%2Fc%2Bd%3Ae~");
        assert_eq!(for_path("12:ab/c?d"), b"12:ab%2Fc%3Fd");
        assert_eq!(for_json(r#"a"b\c"#), br#"a\"b\\c"#);
        assert_eq!(for_xml("a<b&c"), b"a&lt;b&amp;c");
        assert_eq!(for_query("ä"), b"%C3%A4");
    }

    proptest! {
        #[test]
        fn base64_comes_back_and_one_form_is_always_in_it(
            before in prop::collection::vec(any::<u8>(), 0..5),
            value in prop::collection::vec(any::<u8>(), 8..40),
            after in prop::collection::vec(any::<u8>(), 0..5),
        ) {
            let text = [before, value.clone(), after].concat();
            let encoded = base64(&text);
            prop_assert_eq!(base64_decoded(&encoded).unwrap(), text);
            prop_assert!(
                base64_forms(&value)
                    .iter()
                    .any(|form| encoded.windows(form.len()).any(|part| part == form))
            );
        }
    }
}
