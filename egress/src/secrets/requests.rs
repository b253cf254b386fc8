//! Placeholders become values: in the headers, the target and the body of requests to one host.
//!
//! Placeholders consist of characters that no encoding changes, so they are found by plain search,
//! except within `Basic` credentials, which are decoded first. The value is encoded for the place
//! where it is inserted. A placeholder that may not be replaced stays unchanged, and a
//! [`RequestNote`] reports it.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

use super::encoding::{base64, base64_decoded, for_json, for_path, for_query, for_xml, verbatim};
use super::mask::{Masker, Patterns};
use super::{Entry, PLACEHOLDER_START, patterns};
use crate::name::HostName;

/// The data for requests to one host: its own secrets, and the placeholders of all others, in order
/// to detect their use in the wrong place.
pub(crate) struct HostSecrets {
    entries: Vec<(Arc<Entry>, Belongs)>,
    patterns: Arc<Patterns>,
}

#[derive(Clone, Copy, PartialEq)]
enum Belongs {
    Here,
    Elsewhere,
}

/// A remark about a request for the author of the program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RequestNote {
    /// The placeholder of a secret that belongs to other hosts was sent unchanged.
    OtherHost { secret: Arc<str> },
    /// The placeholder was in a place where this secret may not appear, and was sent unchanged.
    OtherPlace { secret: Arc<str>, header: Arc<str> },
}

/// The encoding of text within a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyKind {
    Form,
    Json,
    Xml,
    Text,
}

impl fmt::Display for RequestNote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestNote::OtherHost { secret } => {
                write!(formatter, "secret {secret} does not belong to this host")
            }
            RequestNote::OtherPlace { secret, header } => {
                write!(
                    formatter,
                    "secret {secret} may only stand in the header {header}"
                )
            }
        }
    }
}

impl BodyKind {
    /// Parses a `Content-Type`. Returns `None` for types that are not text.
    pub(crate) fn of(content_type: &str) -> Option<BodyKind> {
        let media_type = content_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        let (kind, subtype) = media_type.split_once('/')?;
        match (kind, subtype) {
            ("application", "x-www-form-urlencoded") => Some(BodyKind::Form),
            ("application", "json" | "x-ndjson" | "jsonl") => Some(BodyKind::Json),
            (_, subtype) if subtype.ends_with("+json") => Some(BodyKind::Json),
            ("application" | "text", "xml") => Some(BodyKind::Xml),
            (_, subtype) if subtype.ends_with("+xml") => Some(BodyKind::Xml),
            ("text", _) | ("multipart", "form-data") | ("application", "graphql") => {
                Some(BodyKind::Text)
            }
            _ => None,
        }
    }
}

/// The position of a placeholder in a request.
#[derive(Clone, Copy)]
enum Place<'a> {
    Header(&'a HeaderName),
    Elsewhere,
}

impl HostSecrets {
    pub(super) fn new(host: &HostName, entries: &[Arc<Entry>]) -> HostSecrets {
        let belongs = |entry: &Arc<Entry>| match entry.secret.hosts.contains(host) {
            true => Belongs::Here,
            false => Belongs::Elsewhere,
        };
        let here = entries
            .iter()
            .filter(|entry| belongs(entry) == Belongs::Here);
        HostSecrets {
            patterns: Arc::new(patterns(here)),
            entries: entries
                .iter()
                .map(|entry| (entry.clone(), belongs(entry)))
                .collect(),
        }
    }

    /// Inserts values into all `headers`.
    pub(crate) fn fill_headers(&self, headers: &mut HeaderMap, notes: &mut BTreeSet<RequestNote>) {
        for (name, value) in headers.iter_mut() {
            let place = Place::Header(name);
            let filled = match basic_credentials(value.as_bytes()) {
                Some(credentials) => self
                    .fill(&credentials, place, verbatim, notes)
                    .map(|filled| [b"Basic ", &base64(&filled)[..]].concat()),
                None => self.fill(value.as_bytes(), place, verbatim, notes),
            };
            if let Some(filled) = filled {
                *value = HeaderValue::from_maybe_shared(bytes::Bytes::from(filled))
                    .expect("a value has no control characters, and neither had the header");
                value.set_sensitive(true);
            }
        }
    }

    /// Returns the path and query with values inserted, or `None` if nothing changes.
    pub(crate) fn fill_target(
        &self,
        target: &str,
        notes: &mut BTreeSet<RequestNote>,
    ) -> Option<Vec<u8>> {
        let (path, query) = target.split_at(target.find('?').unwrap_or(target.len()));
        let filled_path = self.fill(path.as_bytes(), Place::Elsewhere, for_path, notes);
        let filled_query = self.fill(query.as_bytes(), Place::Elsewhere, for_query, notes);
        if filled_path.is_none() && filled_query.is_none() {
            return None;
        }
        let mut filled = filled_path.unwrap_or_else(|| path.into());
        filled.extend(filled_query.unwrap_or_else(|| query.into()));
        Some(filled)
    }

    /// Returns the body with values inserted, or `None` if nothing changes.
    pub(crate) fn fill_body(
        &self,
        kind: BodyKind,
        body: &[u8],
        notes: &mut BTreeSet<RequestNote>,
    ) -> Option<Vec<u8>> {
        let spell = match kind {
            BodyKind::Form => for_query,
            BodyKind::Json => for_json,
            BodyKind::Xml => for_xml,
            BodyKind::Text => verbatim,
        };
        self.fill(body, Place::Elsewhere, spell, notes)
    }

    /// Removes values from the headers of a response.
    pub(crate) fn mask_headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            let masked = self.patterns.mask(value.as_bytes());
            if masked != value.as_bytes() {
                *value = HeaderValue::from_bytes(&masked)
                    .expect("a placeholder has only visible characters");
            }
        }
    }

    /// Returns a masker for the body of one response.
    pub(crate) fn masker(&self) -> Masker {
        Masker::new(self.patterns.clone())
    }

    fn fill(
        &self,
        text: &[u8],
        place: Place<'_>,
        spell: fn(&str) -> Vec<u8>,
        notes: &mut BTreeSet<RequestNote>,
    ) -> Option<Vec<u8>> {
        let mut filled = Vec::new();
        let mut copied = 0;
        let mut at = 0;
        while let Some(start) = find(text, PLACEHOLDER_START.as_bytes(), at) {
            at = start + PLACEHOLDER_START.len();
            let Some((entry, belongs)) = self.entry_at(&text[start..]) else {
                continue;
            };
            match wrong_place(entry, *belongs, place) {
                Some(note) => {
                    notes.insert(note);
                }
                None => {
                    filled.extend_from_slice(&text[copied..start]);
                    filled.extend(spell(&entry.secret.value));
                    copied = start + entry.placeholder.len();
                    at = copied;
                }
            }
        }
        if copied == 0 {
            return None;
        }
        filled.extend_from_slice(&text[copied..]);
        Some(filled)
    }

    fn entry_at(&self, text: &[u8]) -> Option<&(Arc<Entry>, Belongs)> {
        self.entries
            .iter()
            .find(|(entry, _)| text.starts_with(entry.placeholder.as_bytes()))
    }
}

fn wrong_place(entry: &Entry, belongs: Belongs, place: Place<'_>) -> Option<RequestNote> {
    let secret = entry.secret.name.clone();
    match (belongs, &entry.secret.header, place) {
        (Belongs::Elsewhere, ..) => Some(RequestNote::OtherHost { secret }),
        (Belongs::Here, None, _) => None,
        (Belongs::Here, Some(only), Place::Header(header)) if only == header => None,
        (Belongs::Here, Some(only), _) => Some(RequestNote::OtherPlace {
            secret,
            header: Arc::from(only.as_str()),
        }),
    }
}

fn basic_credentials(header: &[u8]) -> Option<Vec<u8>> {
    let (scheme, credentials) = header.split_at_checked("Basic ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Basic ")
        .then(|| base64_decoded(credentials.trim_ascii_start()))
        .flatten()
}

fn find(text: &[u8], wanted: &[u8], from: usize) -> Option<usize> {
    text[from..]
        .windows(wanted.len())
        .position(|part| part == wanted)
        .map(|position| from + position)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::{Secret, Vault};
    use hyper::header;

    const VALUE: &str = r#"va/lue "1"+"#;

    struct Case {
        vault: Vault,
        here: Arc<HostSecrets>,
        notes: BTreeSet<RequestNote>,
    }

    impl Case {
        fn new(secrets: &[&str]) -> Case {
            let parse = |text: &&str| Secret::parse(text, |_| Some(VALUE.to_owned())).unwrap();
            let vault = Vault::new(secrets.iter().map(parse).collect()).unwrap();
            let here = vault
                .for_host(&HostName::parse("here.example.com").unwrap())
                .unwrap();
            Case {
                vault,
                here,
                notes: BTreeSet::new(),
            }
        }

        fn placeholder(&self, index: usize) -> String {
            self.vault.variables()[index].1.clone()
        }

        fn header(&mut self, name: HeaderName, value: &str) -> Vec<u8> {
            let mut headers = HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())]);
            self.here.fill_headers(&mut headers, &mut self.notes);
            headers.values().next().unwrap().as_bytes().to_vec()
        }

        fn body(&mut self, content_type: &str, body: &str) -> String {
            let filled = BodyKind::of(content_type)
                .and_then(|kind| self.here.fill_body(kind, body.as_bytes(), &mut self.notes));
            String::from_utf8(filled.unwrap_or_else(|| body.into())).unwrap()
        }

        fn target(&mut self, target: &str) -> Option<String> {
            self.here
                .fill_target(target, &mut self.notes)
                .map(|filled| String::from_utf8(filled).unwrap())
        }
    }

    #[test]
    fn a_value_is_spelled_for_its_place() {
        let mut case = Case::new(&["ONE=env:X@here.example.com"]);
        let one = case.placeholder(0);
        assert_eq!(
            case.header(header::AUTHORIZATION, &format!("Bearer {one}")),
            format!("Bearer {VALUE}").as_bytes()
        );
        assert_eq!(
            case.target(&format!("/a/{one}/b?key={one}&x=1")).unwrap(),
            "/a/va%2Flue%20%221%22+/b?key=va%2Flue%20%221%22%2B&x=1"
        );
        assert_eq!(
            case.body("application/x-www-form-urlencoded", &format!("k={one}&x")),
            "k=va%2Flue%20%221%22%2B&x"
        );
        assert_eq!(
            case.body("application/json; charset=utf-8", &format!(r#"["{one}"]"#)),
            r#"["va/lue \"1\"+"]"#
        );
        assert_eq!(
            case.body("text/plain", &format!("{one}{one}")),
            format!("{VALUE}{VALUE}")
        );
        assert_eq!(
            case.body("text/xml", &format!("<a>{one}</a>")),
            "<a>va/lue &quot;1&quot;+</a>"
        );
        assert_eq!(case.body("application/octet-stream", &one), one);
        assert!(case.notes.is_empty());
    }

    #[test]
    fn what_has_no_placeholder_stays_as_it_is() {
        let mut case = Case::new(&["ONE=env:X@here.example.com"]);
        let almost = &case.placeholder(0)[..case.placeholder(0).len() - 1].to_owned();
        assert_eq!(
            case.header(header::AUTHORIZATION, almost),
            almost.as_bytes()
        );
        assert_eq!(case.target(&format!("/a?{almost}")), None);
        assert_eq!(
            case.header(header::AUTHORIZATION, "Basic not base64!"),
            b"Basic not base64!"
        );
    }

    #[test]
    fn basic_credentials_are_decoded_and_encoded() {
        let mut case = Case::new(&["ONE=env:X@here.example.com:Authorization"]);
        let inside = base64(format!("user:{}", case.placeholder(0)).as_bytes());
        let filled = case.header(
            header::AUTHORIZATION,
            &format!("basic {}", String::from_utf8(inside).unwrap()),
        );
        assert_eq!(
            filled,
            [b"Basic ", &base64(format!("user:{VALUE}").as_bytes())[..]].concat()
        );
    }

    #[test]
    fn a_placeholder_of_another_host_stays_and_is_noted() {
        let mut case = Case::new(&["ONE=env:X@here.example.com", "TWO=env:X@there.example.com"]);
        let (one, two) = (case.placeholder(0), case.placeholder(1));
        assert_eq!(
            case.header(header::COOKIE, &format!("{two};{one}")),
            format!("{two};{VALUE}").as_bytes()
        );
        assert_eq!(
            case.notes.pop_first().unwrap().to_string(),
            "secret TWO does not belong to this host"
        );
        assert_eq!(case.notes.len(), 0);
    }

    #[test]
    fn a_value_that_belongs_into_one_header_stands_only_there() {
        let mut case = Case::new(&["ONE=env:X@here.example.com:X-Key"]);
        let one = case.placeholder(0);
        assert_eq!(
            case.header(HeaderName::from_static("x-key"), &one),
            VALUE.as_bytes()
        );
        assert!(case.notes.is_empty());
        assert_eq!(case.header(header::COOKIE, &one), one.as_bytes());
        assert_eq!(case.target(&format!("/?{one}")), None);
        assert_eq!(case.body("text/plain", &one), one);
        assert_eq!(
            case.notes.pop_first().unwrap().to_string(),
            "secret ONE may only stand in the header x-key"
        );
    }
}
