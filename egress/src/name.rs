//! Host names, parsed once.
//!
//! Every host name from outside (a rule, a DNS query, the SNI of a TLS client, the Host of an HTTP
//! request) becomes a [`HostName`] here, and only those are compared, resolved and dialled. Two
//! spellings of one name are one value. A text that two programs could interpret differently (a
//! NUL, a space, `%`, userinfo, `127.1`) is not a valid name.
//!
//! An address is never a name: [`HostName::parse`] rejects it, and [`parse_authority`]
//! distinguishes the two.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};

/// Maximum length of a name. The protocol's 255 bytes include the first length byte and the root.
const MAX_NAME_LENGTH: usize = 253;

/// Maximum length of a label: its length has six bits on the wire.
const MAX_LABEL_LENGTH: usize = 63;

/// A host name: lower-case A-labels separated by single dots, at most 253 characters, never an IP
/// address in any spelling.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostName(Arc<str>);

/// The host of an authority (`host[:port]`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum UrlHost {
    /// A name, which must be resolved.
    Name(HostName),
    /// An address as written. It may embed another one: see [`crate::address::unwrap`].
    Address(IpAddr),
}

/// Reason why a text is not a valid host name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("the name is empty")]
    Empty,
    #[error("the name has two dots in a row, or a dot at its start")]
    EmptyLabel,
    #[error("a part of the name has more than {MAX_LABEL_LENGTH} characters")]
    LongLabel,
    #[error("the name has more than {MAX_NAME_LENGTH} characters")]
    TooLong,
    #[error("a name cannot contain {0:?}")]
    Character(char),
    #[error("a part of the name begins or ends with a hyphen")]
    Hyphen,
    #[error(
        "the name ends in a number, so it could be read as an IPv4 address; an address has four \
         decimal numbers"
    )]
    Number,
    #[error("this is an address and not a name")]
    Address,
    #[error("the name is not a valid internationalised name")]
    International,
    #[error("a user name or password before `@` is not allowed")]
    UserInfo,
    #[error("an IPv6 address must stand in brackets, without a zone")]
    Brackets,
    #[error("a port is a number from 1 to 65535")]
    Port,
}

impl HostName {
    /// Parses a name in any spelling: upper case, Unicode, one trailing dot. Rejects addresses and
    /// texts that only look like a name.
    pub fn parse(text: &str) -> Result<HostName, NameError> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        // Reports the exact problem of an ASCII text first: UTS #46 only reports that there is one.
        if let Some(character) = text
            .chars()
            .find(|character| character.is_ascii() && !is_name_character(*character))
        {
            return Err(if text.parse::<Ipv6Addr>().is_ok() {
                NameError::Address
            } else {
                NameError::Character(character)
            });
        }
        // The mapping can turn other characters into dots and digits, so all checks apply to its
        // result.
        let name = Uts46::new()
            .to_ascii(
                text.as_bytes(),
                AsciiDenyList::STD3,
                Hyphens::Allow,
                DnsLength::Ignore,
            )
            .map_err(|_| NameError::International)?;
        check(&name)?;
        Ok(HostName(Arc::from(name.as_ref())))
    }

    /// Returns the name in its canonical spelling.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the labels, from left to right.
    pub fn labels(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.split('.')
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl AsRef<str> for HostName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UrlHost {
    /// Writes an IPv6 address in brackets, so that `:port` can follow.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UrlHost::Name(name) => name.fmt(formatter),
            UrlHost::Address(IpAddr::V4(address)) => address.fmt(formatter),
            UrlHost::Address(IpAddr::V6(address)) => write!(formatter, "[{address}]"),
        }
    }
}

/// Parses `host[:port]` from a `Host` header, an absolute request target or `:authority`.
///
/// Stricter than [`HostName::parse`]: text on the wire must be ASCII, since a peer could interpret
/// other bytes differently. An IPv6 address is in brackets, an IPv4 address has four decimal
/// numbers, there is no userinfo, and a colon is followed by a port.
pub fn parse_authority(text: &str) -> Result<(UrlHost, Option<u16>), NameError> {
    if let Some(character) = text.chars().find(|character| !character.is_ascii()) {
        return Err(NameError::Character(character));
    }
    if text.contains('@') {
        return Err(NameError::UserInfo);
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (address, rest) = rest.split_once(']').ok_or(NameError::Brackets)?;
        let address: Ipv6Addr = address.parse().map_err(|_| NameError::Brackets)?;
        let port = match rest.strip_prefix(':') {
            Some(port) => Some(parse_port(port)?),
            None if rest.is_empty() => None,
            None => return Err(NameError::Brackets),
        };
        return Ok((UrlHost::Address(address.into()), port));
    }
    let (host, port) = match text.split_once(':') {
        Some((_, port)) if port.contains(':') => return Err(NameError::Brackets),
        Some((host, port)) => (host, Some(parse_port(port)?)),
        None => (text, None),
    };
    if let Ok(address) = host.parse::<Ipv4Addr>() {
        return Ok((UrlHost::Address(address.into()), port));
    }
    Ok((UrlHost::Name(HostName::parse(host)?), port))
}

/// Parses a port in its only valid spelling: decimal, no sign, no leading zero.
pub(crate) fn parse_port(text: &str) -> Result<u16, NameError> {
    if text.starts_with('0') || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(NameError::Port);
    }
    text.parse().map_err(|_| NameError::Port)
}

fn is_name_character(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-' || character == '.'
}

/// Checks the result of the mapping without trusting it: accepts exactly the names that this module
/// guarantees.
fn check(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > MAX_NAME_LENGTH {
        return Err(NameError::TooLong);
    }
    for label in name.split('.') {
        if label.is_empty() {
            return Err(NameError::EmptyLabel);
        }
        if label.len() > MAX_LABEL_LENGTH {
            return Err(NameError::LongLabel);
        }
        if label.starts_with('-') || label.ends_with('-') {
            return Err(NameError::Hyphen);
        }
        if let Some(character) = label
            .chars()
            .find(|c| !matches!(c, 'a'..='z' | '0'..='9' | '-'))
        {
            return Err(NameError::Character(character));
        }
    }
    if name.parse::<Ipv4Addr>().is_ok() {
        return Err(NameError::Address);
    }
    let last = name.rsplit('.').next().unwrap_or(name);
    if is_number(last) {
        Err(NameError::Number)
    } else {
        Ok(())
    }
}

/// Returns whether the C library's `inet_aton`, or a browser, would accept a label as a number:
/// decimal, octal or hexadecimal.
fn is_number(label: &str) -> bool {
    match label.strip_prefix("0x") {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => label.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> String {
        HostName::parse(text)
            .unwrap_or_else(|error| panic!("{text:?}: {error}"))
            .to_string()
    }

    fn refused(text: &str) -> NameError {
        match HostName::parse(text) {
            Err(error) => error,
            Ok(name) => panic!("{text:?} was taken for {name}"),
        }
    }

    #[test]
    fn one_name_has_one_spelling() {
        for (text, name) in [
            ("example.com", "example.com"),
            ("EXAMPLE.Com", "example.com"),
            ("example.com.", "example.com"),
            ("localhost", "localhost"),
            ("r3---sn-abc.example.com", "r3---sn-abc.example.com"),
            ("1.example.com", "1.example.com"),
            ("3com.example", "3com.example"),
            ("0x7f.example", "0x7f.example"),
            ("example.0xyz", "example.0xyz"),
            // Internationalised names, their A-labels, and characters that are mapped to plain
            // ones.
            ("bücher.example", "xn--bcher-kva.example"),
            ("BÜCHER.example", "xn--bcher-kva.example"),
            ("bu\u{308}cher.example", "xn--bcher-kva.example"),
            ("xn--bcher-kva.example", "xn--bcher-kva.example"),
            ("XN--BCHER-KVA.EXAMPLE", "xn--bcher-kva.example"),
            ("ｅｘａｍｐｌｅ.com", "example.com"),
            ("example。com", "example.com"),
            ("exam\u{ad}ple.com", "example.com"),
            ("faß.example", "xn--fa-hia.example"),
        ] {
            assert_eq!(parsed(text), name, "{text:?}");
        }
    }

    #[test]
    fn what_two_programs_could_read_differently_is_no_name() {
        for (text, error) in [
            ("", NameError::Empty),
            (".", NameError::Empty),
            ("..", NameError::EmptyLabel),
            (".example.com", NameError::EmptyLabel),
            ("example..com", NameError::EmptyLabel),
            ("example.com..", NameError::EmptyLabel),
            ("example.com.\u{3002}", NameError::EmptyLabel),
            ("example.com\0.attacker.example", NameError::Character('\0')),
            ("example.com\0", NameError::Character('\0')),
            ("example .com", NameError::Character(' ')),
            (" example.com", NameError::Character(' ')),
            ("example.com\n", NameError::Character('\n')),
            ("example.com\r\nHost: x", NameError::Character('\r')),
            ("ex%61mple.com", NameError::Character('%')),
            ("user@example.com", NameError::Character('@')),
            ("example.com:443", NameError::Character(':')),
            ("example.com/", NameError::Character('/')),
            ("example.com\\", NameError::Character('\\')),
            ("example.com#", NameError::Character('#')),
            ("*.example.com", NameError::Character('*')),
            ("my_host.example.com", NameError::Character('_')),
            ("-example.com", NameError::Hyphen),
            ("example-.com", NameError::Hyphen),
            ("ex\u{ff05}61mple.com", NameError::International),
            ("example.com\u{ff0f}x", NameError::International),
            ("xn--\u{ff0f}.com", NameError::International),
            ("xn--example.com", NameError::International),
            ("xn--.com", NameError::International),
            ("a\u{200b}\u{2028}.com", NameError::International),
        ] {
            assert_eq!(refused(text), error, "{text:?}");
        }
    }

    #[test]
    fn no_spelling_of_an_address_is_a_name() {
        for text in [
            "127.0.0.1",
            "127.0.0.1.",
            "１２７.0.0.1",
            "127。0。0。1",
            "::1",
            "2001:db8::1",
            "::ffff:127.0.0.1",
        ] {
            assert_eq!(refused(text), NameError::Address, "{text:?}");
        }
        for text in [
            "127.1",
            "127.0.1",
            "2130706433",
            "017700000001",
            "0x7f.1",
            "0x7f000001",
            "0X7F.0.0.0X1",
            "1.0x",
            "127.0.0.01",
            "999.1.1.1",
            "1.2.3.4.5",
            "example.1",
            "127.１",
            "①",
        ] {
            assert_eq!(refused(text), NameError::Number, "{text:?}");
        }
        assert_eq!(refused("[::1]"), NameError::Character('['));
        // Control: numbers elsewhere in a name are allowed.
        assert_eq!(parsed("127.0.0.1.example"), "127.0.0.1.example");
    }

    #[test]
    fn lengths_are_those_of_the_protocol() {
        let label = "a".repeat(63);
        assert_eq!(parsed(&label), label);
        assert_eq!(refused(&format!("{label}a")), NameError::LongLabel);
        let longest = format!("{label}.{label}.{label}.{}", "a".repeat(61));
        assert_eq!(longest.len(), 253);
        assert_eq!(parsed(&format!("{longest}.")), longest);
        assert_eq!(refused(&format!("{longest}a")), NameError::TooLong);
        // The limit applies to the A-label.
        assert_eq!(
            refused(&format!("{}.example", "ü".repeat(63))),
            NameError::LongLabel
        );
    }

    #[test]
    fn labels_are_given_from_left_to_right() {
        let name = HostName::parse("a.b.example").unwrap();
        assert_eq!(name.labels().collect::<Vec<_>>(), ["a", "b", "example"]);
        assert_eq!(name.labels().next_back(), Some("example"));
    }

    #[test]
    fn an_authority_is_a_host_with_or_without_a_port() {
        let named = |text: &str| UrlHost::Name(HostName::parse(text).unwrap());
        let address = |text: &str| UrlHost::Address(text.parse().unwrap());
        for (text, host, port) in [
            ("example.com", named("example.com"), None),
            ("Example.com.:8080", named("example.com"), Some(8080)),
            ("192.0.2.7", address("192.0.2.7"), None),
            ("192.0.2.7:80", address("192.0.2.7"), Some(80)),
            ("[2001:db8::1]", address("2001:db8::1"), None),
            ("[2001:DB8:0::1]:65535", address("2001:db8::1"), Some(65535)),
            ("[::ffff:127.0.0.1]:1", address("::ffff:127.0.0.1"), Some(1)),
        ] {
            assert_eq!(parse_authority(text), Ok((host, port)), "{text:?}");
        }
    }

    #[test]
    fn an_authority_that_could_mean_two_things_is_refused() {
        for (text, error) in [
            ("", NameError::Empty),
            (":80", NameError::Empty),
            ("user@example.com", NameError::UserInfo),
            ("example.com:80@attacker.example", NameError::UserInfo),
            ("example.com:", NameError::Port),
            ("example.com:0", NameError::Port),
            ("example.com:080", NameError::Port),
            ("example.com:+80", NameError::Port),
            ("example.com:80 ", NameError::Port),
            ("example.com:65536", NameError::Port),
            ("example.com:80:80", NameError::Brackets),
            ("2001:db8::1", NameError::Brackets),
            ("[2001:db8::1", NameError::Brackets),
            ("[2001:db8::1]80", NameError::Brackets),
            ("[2001:db8::1]:", NameError::Port),
            ("[fe80::1%25eth0]", NameError::Brackets),
            ("[fe80::1%eth0]", NameError::Brackets),
            ("[127.0.0.1]", NameError::Brackets),
            ("[example.com]", NameError::Brackets),
            ("127.1:80", NameError::Number),
            ("127.0.0.01", NameError::Number),
            ("127.0.0.1.", NameError::Address),
            ("example.com,example.org", NameError::Character(',')),
            ("example.com/", NameError::Character('/')),
            ("http://example.com", NameError::Port),
            // Valid in a rule. On the wire, a server would see other bytes than those that were
            // compared.
            ("bücher.example", NameError::Character('ü')),
        ] {
            assert_eq!(parse_authority(text), Err(error), "{text:?}");
        }
    }

    #[test]
    fn a_host_is_written_so_that_a_port_can_follow() {
        for text in ["example.com", "192.0.2.7", "[2001:db8::1]"] {
            assert_eq!(parse_authority(text).unwrap().0.to_string(), text);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_taken_for_a_name_keeps_the_promise(
            text in "\\PC{0,80}|[a-zA-Z0-9.:@%*\\[\\]\\-ü。]{0,40}|\
                     (xn--)?[a-z0-9-]{1,12}(\\.[a-z0-9]{1,5}){0,3}"
        ) {
            if let Ok(name) = HostName::parse(&text) {
                let name = name.as_str();
                prop_assert!((1..=253).contains(&name.len()));
                for label in name.split('.') {
                    prop_assert!((1..=63).contains(&label.len()));
                    prop_assert!(label.bytes().all(
                        |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'
                    ));
                }
                // Neither grammar reads it as an address: the standard library's strict one, and
                // the C library's loose one, which needs a number last.
                prop_assert!(name.parse::<IpAddr>().is_err());
                prop_assert!(
                    !name.rsplit('.').next().unwrap().bytes().all(|byte| byte.is_ascii_digit())
                );
                // Parsing the result again changes nothing.
                prop_assert_eq!(parsed(name), name);
                prop_assert_eq!(
                    parse_authority(&format!("{name}:80")).unwrap(),
                    (UrlHost::Name(HostName::parse(name).unwrap()), Some(80))
                );
            }
        }

        #[test]
        fn an_authority_that_is_taken_has_one_canonical_form(
            text in "\\PC{0,40}|[a-z0-9.:\\[\\]@%]{0,30}|\
                     \\[[0-9a-f:.]{2,20}\\](:[0-9]{1,5})?"
        ) {
            if let Ok((host, port)) = parse_authority(&text) {
                let written =
                    port.map_or_else(|| host.to_string(), |port| format!("{host}:{port}"));
                prop_assert_eq!(parse_authority(&written), Ok((host, port)));
                prop_assert!(!text.contains(['@', '%', ' ', '/', '\0']));
            }
        }
    }
}
