//! Syntax of rules, and error messages for invalid ones.
//!
//! An invalid rule usually has a clear intent. The parser looks for common mistakes (a URL, a range
//! with host bits, `192.168.*`) and suggests what to write instead. It never guesses: a text has
//! one meaning or is rejected.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::{Depth, MAX_RULES, Pattern, Target};
use crate::address;
use crate::name::{HostName, NameError};

/// The problem with a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleProblem {
    #[error("it is empty; leave it out")]
    Empty,
    #[error("a rule is a name, not an address of a page: write {0}")]
    Page(String),
    #[error("a rule has no user name or password: write {0}")]
    UserInfo(String),
    #[error(
        "it would be everything, which is not a rule but a choice of its own: allow the network \
         `all`"
    )]
    Everything,
    #[error("it names several hosts; write one rule for each")]
    Several,
    #[error(
        "a name does not begin with a dot: write **.{0} for all names below it, and {0} for itself"
    )]
    LeadingDot(String),
    #[error(
        "`*` stands for whole labels and only at the start: write *.example.com for one more \
         label, **.example.com for one or more"
    )]
    Star,
    #[error("addresses have no `*`: write a range such as {0}")]
    AddressStar(String),
    #[error(
        "an IPv4 address has four decimal numbers without leading zeros: write it like 192.0.2.7 \
         or 192.0.2.0/24"
    )]
    ShortAddress,
    #[error(
        "it is not an IPv6 address: write it like 2001:db8::1, and with a port like \
         [2001:db8::1]:443"
    )]
    Address,
    #[error("a zone such as %eth0 has no meaning in a rule: write the address without it")]
    Zone,
    #[error("it is an IPv4 address in IPv6 form: write {0}")]
    Mapped(String),
    #[error(
        "the address does not fit its prefix length: write {network} for the range, or {address} \
         for the one address"
    )]
    HostBits {
        /// The range that contains the address.
        network: String,
        /// The address alone.
        address: String,
    },
    #[error("a prefix length is a number from 0 to {most}: write {example}")]
    Prefix {
        /// The number of bits in an address of this family.
        most: u8,
        /// A valid spelling.
        example: String,
    },
    #[error(
        "{0:?} is not a port: write a number from 1 to 65535, a list such as 8000,8443, a range \
         such as 8000-8010, or *"
    )]
    Port(String),
    #[error("a range of ports begins with the lower one: write {0}")]
    PortOrder(String),
    #[error("{0}")]
    Name(#[from] NameError),
    #[error("the list has more than {MAX_RULES} rules")]
    TooMany,
}

/// Splits a rule into its target and the text of its ports.
pub(super) fn parse_target(text: &str) -> Result<(Target, Option<&str>), RuleProblem> {
    if text.is_empty() {
        return Err(RuleProblem::Empty);
    }
    if text.contains("://") {
        return Err(page(text));
    }
    if let Some((_, host)) = text.split_once('@') {
        return Err(parse_target(host).map_or_else(
            |problem| problem,
            |_| RuleProblem::UserInfo(shortened(host)),
        ));
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (address, rest) = rest.split_once(']').ok_or(RuleProblem::Address)?;
        return parse_bracketed(address, rest);
    }
    if let Some((address, rest)) = text.split_once('/') {
        let Ok(address) = parse_address(address) else {
            return Err(not_a_range(text, address));
        };
        let (prefix, ports) = split_ports(rest);
        return Ok((network(address, prefix)?, ports));
    }
    if text.bytes().filter(|byte| *byte == b':').count() > 1 {
        return Ok((single(parse_address(text)?)?, None));
    }
    let (host, ports) = split_ports(text);
    match host.parse::<Ipv4Addr>() {
        Ok(address) => Ok((single(address.into())?, ports)),
        Err(_) => Ok((Target::Names(parse_pattern(host)?), ports)),
    }
}

fn split_ports(text: &str) -> (&str, Option<&str>) {
    text.split_once(':')
        .map_or((text, None), |(before, ports)| (before, Some(ports)))
}

/// Parses `[address]:ports`, `[address/prefix]:ports` and `[address]/prefix:ports`.
fn parse_bracketed<'a>(
    inside: &str,
    behind: &'a str,
) -> Result<(Target, Option<&'a str>), RuleProblem> {
    let (before_ports, ports) = split_ports(behind);
    let (address, prefix) = match (inside.split_once('/'), before_ports.strip_prefix('/')) {
        (Some((address, prefix)), None) => (address, Some(prefix)),
        (None, prefix) => (inside, prefix),
        (Some(_), Some(_)) => return Err(RuleProblem::Address),
    };
    if !before_ports.is_empty() && !before_ports.starts_with('/') {
        return Err(RuleProblem::Address);
    }
    let address = parse_address(address)?;
    let target = match prefix {
        Some(prefix) => network(address, prefix)?,
        None => single(address)?,
    };
    Ok((target, ports))
}

fn parse_address(text: &str) -> Result<IpAddr, RuleProblem> {
    if text.contains(':') && text.contains('%') {
        return Err(RuleProblem::Zone);
    }
    text.parse().map_err(|_| RuleProblem::Address)
}

fn single(address: IpAddr) -> Result<Target, RuleProblem> {
    match address::canonical(address) {
        canonical if canonical != address => Err(RuleProblem::Mapped(canonical.to_string())),
        address => Ok(Target::Addresses(address.into())),
    }
}

fn network(address: IpAddr, prefix: &str) -> Result<Target, RuleProblem> {
    let most = if address.is_ipv4() { 32 } else { 128 };
    let Some(bits) = prefix_length(prefix).filter(|bits| *bits <= most) else {
        // A netmask has an equivalent prefix. For anything else, the example is the prefix of the
        // single address.
        let bits = prefix
            .parse()
            .ok()
            .and_then(|mask| ipnet::ip_mask_to_prefix(mask).ok())
            .filter(|bits| *bits <= most);
        let example = IpNet::new(address, bits.unwrap_or(most))
            .map_or_else(|_| address.to_string(), |net| net.trunc().to_string());
        return Err(RuleProblem::Prefix { most, example });
    };
    let written = IpNet::new(address, bits).map_err(|_| RuleProblem::Address)?;
    let network = written.trunc();
    if let Some(mapped) = unmapped(&network) {
        return Err(RuleProblem::Mapped(mapped.to_string()));
    }
    if network != written {
        return Err(RuleProblem::HostBits {
            network: network.to_string(),
            address: address.to_string(),
        });
    }
    Ok(Target::Addresses(network))
}

fn prefix_length(text: &str) -> Option<u8> {
    let is_plain =
        text == "0" || (!text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit()));
    text.parse().ok().filter(|_| is_plain)
}

/// Returns the IPv4 range for a range of IPv4-mapped addresses.
fn unmapped(network: &IpNet) -> Option<Ipv4Net> {
    let IpNet::V6(network) = network else {
        return None;
    };
    let mapped = Ipv6Net::new(Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), 96)
        .expect("96 is a prefix length of IPv6");
    let address = network
        .addr()
        .to_ipv4_mapped()
        .filter(|_| mapped.contains(network))?;
    Ipv4Net::new(address, network.prefix_len() - 96).ok()
}

fn parse_pattern(text: &str) -> Result<Pattern, RuleProblem> {
    if matches!(text, "*" | "**" | "all") {
        return Err(RuleProblem::Everything);
    }
    if text.contains(',') {
        return Err(RuleProblem::Several);
    }
    let (depth, base) = match (text.strip_prefix("**."), text.strip_prefix("*.")) {
        (Some(base), _) => (Depth::Labels, base),
        (None, Some(base)) => (Depth::OneLabel, base),
        (None, None) => (Depth::Itself, text),
    };
    if let Some(range) = starred_range(text) {
        return Err(RuleProblem::AddressStar(range));
    }
    if base.contains('*') {
        return Err(RuleProblem::Star);
    }
    if let Some(name) = base
        .strip_prefix('.')
        .and_then(|name| HostName::parse(name).ok())
    {
        return Err(RuleProblem::LeadingDot(name.to_string()));
    }
    match HostName::parse(base) {
        Ok(base) => Ok(Pattern { base, depth }),
        Err(NameError::Number | NameError::Address) => Err(RuleProblem::ShortAddress),
        Err(NameError::Character('%')) if base.contains(':') => Err(RuleProblem::Zone),
        Err(problem) => Err(RuleProblem::Name(problem)),
    }
}

/// Returns the range for an address with trailing stars, such as `192.168.*` or `192.168.1.*`.
fn starred_range(text: &str) -> Option<String> {
    let numbers: Vec<&str> = text.split('.').collect();
    let stars = numbers
        .iter()
        .rev()
        .take_while(|part| **part == "*")
        .count();
    let known: Vec<u8> = numbers[..numbers.len() - stars]
        .iter()
        .map(|part| part.parse().ok())
        .collect::<Option<_>>()?;
    if stars == 0 || known.is_empty() || known.len() > 3 {
        return None;
    }
    let mut bytes = [0; 4];
    bytes[..known.len()].copy_from_slice(&known);
    Some(format!("{}/{}", Ipv4Addr::from(bytes), 8 * known.len()))
}

/// Returns the problem for a text with a slash that does not begin with an address.
fn not_a_range(text: &str, before: &str) -> RuleProblem {
    match parse_pattern(split_ports(before).0) {
        Err(problem @ (RuleProblem::ShortAddress | RuleProblem::AddressStar(_))) => problem,
        _ if before.contains(':') && before.contains('%') => RuleProblem::Zone,
        _ => page(text),
    }
}

/// Returns the problem for a URL: suggests the rule for its host.
fn page(text: &str) -> RuleProblem {
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or(rest);
    let host = authority.rsplit('@').next().unwrap_or(authority);
    match parse_target(host) {
        Ok(_) => RuleProblem::Page(shortened(host)),
        Err(_) => RuleProblem::Page("example.com".to_owned()),
    }
}

/// Returns the text as written, cut to 100 characters, with invisible characters escaped.
pub(super) fn shortened(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(100)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(100).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rules::{Rule, Rules};

    fn problem(text: &str) -> String {
        let error = Rules::parse(&[text])
            .err()
            .unwrap_or_else(|| panic!("{text:?} was taken for a rule"));
        assert_eq!(error.rule, shortened(text));
        error.problem.to_string()
    }

    #[test]
    fn a_rule_that_cannot_be_used_says_what_to_write() {
        for (text, says) in [
            ("", "it is empty; leave it out"),
            ("  ", "it is empty; leave it out"),
            ("!", "it is empty; leave it out"),
            (
                "http://example.com/",
                "a rule is a name, not an address of a page: write example.com",
            ),
            (
                "https://example.com:8443/a?b#c",
                "a rule is a name, not an address of a page: write example.com:8443",
            ),
            (
                "https://user:word@example.com",
                "a rule is a name, not an address of a page: write example.com",
            ),
            (
                "https://[2001:db8::1]:8443/",
                "a rule is a name, not an address of a page: write [2001:db8::1]:8443",
            ),
            (
                "example.com/path",
                "a rule is a name, not an address of a page: write example.com",
            ),
            (
                "example.com/24",
                "a rule is a name, not an address of a page: write example.com",
            ),
            (
                "user@example.com",
                "a rule has no user name or password: write example.com",
            ),
            (
                "*",
                "it would be everything, which is not a rule but a choice of its own: allow the \
                 network `all`",
            ),
            (
                "**:443",
                "it would be everything, which is not a rule but a choice of its own: allow the \
                 network `all`",
            ),
            (
                "all",
                "it would be everything, which is not a rule but a choice of its own: allow the \
                 network `all`",
            ),
            (
                "a.com,b.com",
                "it names several hosts; write one rule for each",
            ),
            (
                "a.com:443,b.com",
                "it names several hosts; write one rule for each",
            ),
            (
                ".example.com",
                "a name does not begin with a dot: write **.example.com for all names below it, \
                 and example.com for itself",
            ),
            (
                "192.168.*",
                "addresses have no `*`: write a range such as 192.168.0.0/16",
            ),
            (
                "192.168.1.*:443",
                "addresses have no `*`: write a range such as 192.168.1.0/24",
            ),
            (
                "fe80::1%eth0",
                "a zone such as %eth0 has no meaning in a rule: write the address without it",
            ),
            (
                "[fe80::1%eth0]:80",
                "a zone such as %eth0 has no meaning in a rule: write the address without it",
            ),
            (
                "fe80::%eth0/64",
                "a zone such as %eth0 has no meaning in a rule: write the address without it",
            ),
            (
                "::ffff:10.0.0.1",
                "it is an IPv4 address in IPv6 form: write 10.0.0.1",
            ),
            (
                "::ffff:10.0.0.0/104",
                "it is an IPv4 address in IPv6 form: write 10.0.0.0/8",
            ),
            (
                "192.168.1.5/24",
                "the address does not fit its prefix length: write 192.168.1.0/24 for the range, \
                 or 192.168.1.5 for the one address",
            ),
            (
                "2001:db8::1/32",
                "the address does not fit its prefix length: write 2001:db8::/32 for the range, or \
                 2001:db8::1 for the one address",
            ),
            (
                "192.168.1.0/33",
                "a prefix length is a number from 0 to 32: write 192.168.1.0/32",
            ),
            (
                "192.168.1.0/",
                "a prefix length is a number from 0 to 32: write 192.168.1.0/32",
            ),
            (
                "192.168.1.0/024",
                "a prefix length is a number from 0 to 32: write 192.168.1.0/32",
            ),
            (
                "192.168.1.0/255.255.255.0",
                "a prefix length is a number from 0 to 32: write 192.168.1.0/24",
            ),
            (
                "2001:db8::/129",
                "a prefix length is a number from 0 to 128: write 2001:db8::/128",
            ),
            (
                "example.com:9000-8000",
                "a range of ports begins with the lower one: write 8000-9000",
            ),
            ("my_host.example.com", "a name cannot contain '_'"),
            (
                "example..com",
                "the name has two dots in a row, or a dot at its start",
            ),
            ("example com", "a name cannot contain ' '"),
            ("ex%61mple.com", "a name cannot contain '%'"),
        ] {
            assert_eq!(problem(text), says, "{text:?}");
        }
        for text in [
            "*.*.example.com",
            "ex*mple.com",
            "*example.com",
            "www.*.com",
            "***.example.com",
            "example.*",
        ] {
            assert_eq!(problem(text), RuleProblem::Star.to_string(), "{text:?}");
        }
        for text in [
            "127.1",
            "0x7f.1",
            "017700000001",
            "127.0.0.01",
            "10/8",
            "10.0/16",
            "010.0.0.0/8",
            "256.1.1.1",
            "*.0.0.1",
        ] {
            assert_eq!(
                problem(text),
                RuleProblem::ShortAddress.to_string(),
                "{text:?}"
            );
        }
        for text in [
            "2001:db8:::1",
            "2001:zz::1",
            "[2001:db8::1",
            "[2001:db8::1]443",
            "[2001:db8::/32]/32",
            "[example.com]:443",
            "a:b:c",
        ] {
            assert_eq!(problem(text), RuleProblem::Address.to_string(), "{text:?}");
        }
        for (text, port) in [
            ("example.com:", ""),
            ("example.com:0", "0"),
            ("example.com:65536", "65536"),
            ("example.com:http", "http"),
            ("example.com:80,", ""),
            ("example.com:80-", ""),
            ("example.com:080", "080"),
            ("example.com:80,*", "*"),
            ("10.0.0.1:+80", "+80"),
            ("10.0.0.0/8:x", "x"),
            ("[::1]:", ""),
        ] {
            assert_eq!(
                problem(text),
                RuleProblem::Port(port.to_owned()).to_string(),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_rule_has_one_text() {
        for (written, text) in [
            ("EXAMPLE.com.", "example.com"),
            (" example.com ", "example.com"),
            ("example.com:443,80", "example.com"),
            ("example.com:443", "example.com:443"),
            ("example.com:1-65535", "example.com:*"),
            ("example.com:82,80,81,81-90,443", "example.com:80-90,443"),
            ("**.Example.com:8000-8000", "**.example.com:8000"),
            ("10.0.0.1/32", "10.0.0.1"),
            ("10.0.0.0/8:22", "10.0.0.0/8:22"),
            ("2001:DB8:0::/32", "2001:db8::/32"),
            ("2001:db8::/32:22", "[2001:db8::/32]:22"),
            ("[2001:db8::]/32:22", "[2001:db8::/32]:22"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1/128]:8080", "[2001:db8::1]:8080"),
            ("! ads.example.com:*", "!ads.example.com"),
            ("!ads.example.com:80,443", "!ads.example.com:80,443"),
            ("0.0.0.0/0", "0.0.0.0/0"),
        ] {
            assert_eq!(Rule::parse(written).unwrap().to_string(), text);
            assert_eq!(Rule::parse(text), Rule::parse(written));
        }
        assert_eq!(
            Rules::parse(&["example.com", "Example.com:80,443"])
                .unwrap()
                .iter()
                .count(),
            1
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn any_text_is_a_rule_or_has_a_problem(text in "\\PC{0,60}|[a-z0-9.:/*@%,!\\[\\]-]{0,40}") {
            match Rules::parse(&[&text]) {
                Ok(rules) => prop_assert_eq!(
                    Rules::parse(&rules.iter().map(Rule::to_string).collect::<Vec<_>>()),
                    Ok(rules)
                ),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }
    }
}
