//! Egress rules: which destinations a session may reach.
//!
//! ```text
//!  example.com              this name                      192.168.1.0/24     these addresses
//!  *.example.com            one more label                 192.0.2.7          this address
//!  **.example.com           one or more labels             2001:db8::/32      [2001:db8::1]:8080
//!  …:8443   …:8000,8443   …:8000-8010   …:*                ports; without them 80 and 443
//!  !ads.example.com         denied, whatever else is listed; without ports at every port
//! ```
//!
//! A list permits a destination if one of its rules permits it and none of its denials covers it.
//! So a longer list never permits less, denials aside, and an empty list permits nothing. Names and
//! addresses are permitted separately: a name rule does not permit addresses, and an address rule
//! does not permit names. In addition, a permitted name may lead to a special address only if that
//! address is listed as well ([`Rules::refuses_answer`]).
//!
//! An IPv6 address that embeds an IPv4 address is permitted only by a rule that lists it *as it
//! is*, since it may lead elsewhere; if the embedded address is special, that must be listed too.
//! Denials apply to everything that an address may stand for.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

mod parse;
mod ports;

use crate::address;
use crate::name::HostName;
pub use parse::RuleProblem;
use parse::{parse_target, shortened};
use ports::Ports;

/// Limit of ports with a listener of their own in each session. Beyond that, one listener that gets
/// every port costs less.
pub const MAX_LISTENERS: usize = 32;

/// Limit of rules in a list. Every new connection is checked against all of them.
pub const MAX_RULES: usize = 1_000;

/// A list of rules. Clones share their content.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(Arc<Lists>);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Lists {
    permits: Vec<Rule>,
    denials: Vec<Rule>,
}

/// One rule. Its text form is canonical: parsing it returns the same rule (except for `all`, which
/// is not valid in a list).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    effect: Effect,
    target: Target,
    ports: Ports,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Effect {
    Permit,
    Deny,
}

/// The ports that a session must listen on so that every permitted connection arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listens {
    /// One listener per port, at most [`MAX_LISTENERS`].
    Ports(BTreeSet<u16>),
    /// One listener to which every port is redirected.
    All,
}

/// An invalid rule, and what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the rule `{rule}` cannot be used: {problem}")]
pub struct RuleError {
    /// The rule as written, shortened.
    pub rule: String,
    pub problem: RuleProblem,
}

impl Rules {
    /// Returns the list that permits nothing.
    pub fn none() -> Rules {
        Rules::default()
    }

    /// Returns the list without restrictions: every name, every address (special ones too), every
    /// port.
    pub fn everything() -> Rules {
        let all = Rule {
            effect: Effect::Permit,
            target: Target::Everything,
            ports: Ports::all(),
        };
        Rules(Arc::new(Lists {
            permits: vec![all],
            denials: Vec::new(),
        }))
    }

    /// Parses a list. Items that begin with `!` are denials. The first invalid item is the error.
    pub fn parse<S: AsRef<str>>(rules: &[S]) -> Result<Rules, RuleError> {
        Rules::none().with(rules.iter().map(|rule| Rule::parse(rule.as_ref())))
    }

    /// Parses the text forms of rules. Unlike [`Rules::parse`], which reads user input, it accepts
    /// `all`.
    pub fn from_texts<S: AsRef<str>>(rules: &[S]) -> Result<Rules, RuleError> {
        let everything = || Rule {
            effect: Effect::Permit,
            target: Target::Everything,
            ports: Ports::all(),
        };
        let rule = |text: &str| {
            if text == "all" {
                Ok(everything())
            } else {
                Rule::parse(text)
            }
        };
        Rules::none().with(rules.iter().map(|text| rule(text.as_ref())))
    }

    /// Returns the same list with denials added. They are written like rules, with or without a
    /// leading `!`.
    pub fn deny<S: AsRef<str>>(&self, rules: &[S]) -> Result<Rules, RuleError> {
        self.with(rules.iter().map(|rule| Rule::parse_denial(rule.as_ref())))
    }

    /// Returns the same list plus all denials of `ceiling`. The rules that a session requests pass
    /// through here before they are compared with the ceiling.
    pub fn under_denials_of(&self, ceiling: &Rules) -> Rules {
        let mut lists = Lists::clone(&self.0);
        ceiling
            .0
            .denials
            .iter()
            .for_each(|denial| lists.add(denial.clone()));
        Rules(Arc::new(lists))
    }

    /// Returns these rules plus one for this name at this port. Denials still apply.
    pub fn with_name(&self, name: &HostName, port: u16) -> Rules {
        let mut texts = self.iter().map(ToString::to_string).collect::<Vec<_>>();
        texts.push(format!("{name}:{port}"));
        // A name and a port always form a valid rule. If they ever did not, nothing more would be
        // allowed.
        Rules::from_texts(&texts).unwrap_or_else(|_| self.clone())
    }

    /// Returns whether the list permits nothing, regardless of its denials.
    pub fn is_empty(&self) -> bool {
        self.0.permits.is_empty()
    }

    /// Returns whether there is no restriction at all. Use the `allows` functions for decisions:
    /// they are correct for every list.
    pub fn is_everything(&self) -> bool {
        self.0.denials.is_empty()
            && self
                .0
                .permits
                .iter()
                .any(|rule| rule.target == Target::Everything)
    }

    /// Returns whether a name may be reached at some port.
    pub fn lists_name(&self, name: &HostName) -> bool {
        let ports = |rules: &[Rule]| {
            Ports::union(
                rules
                    .iter()
                    .filter(|rule| rule.target.has_name(name))
                    .map(|rule| &rule.ports),
            )
        };
        !ports(&self.0.permits)
            .minus(&ports(&self.0.denials))
            .is_empty()
    }

    /// Returns whether a name may be reached at a port. The addresses it resolves to are checked
    /// separately: [`Rules::refuses_answer`].
    pub fn allows_name(&self, name: &HostName, port: u16) -> bool {
        let has = |rule: &Rule| rule.ports.contains(port) && rule.target.has_name(name);
        self.0.permits.iter().any(has) && !self.0.denials.iter().any(has)
    }

    /// Returns whether an address may be reached at a port because it is listed itself.
    pub fn allows_address(&self, address: IpAddr, port: u16) -> bool {
        self.permits_address(address, port, |_| true)
    }

    /// Does the same as [`Rules::allows_address`], but counts only rules for addresses, not the
    /// rule for everything.
    pub fn lists_address(&self, address: IpAddr, port: u16) -> bool {
        self.permits_address(address, port, |rule| rule.target != Target::Everything)
    }

    /// Returns whether a denial covers an address or anything that it may stand for.
    pub fn denies_address(&self, address: IpAddr, port: u16) -> bool {
        address::meanings(address).any(|meaning| {
            self.0
                .denials
                .iter()
                .any(|rule| rule.has_address(meaning, port))
        })
    }

    /// Returns the reason why an address that a permitted name resolved to must not be dialled, or
    /// `None` if it may be.
    ///
    /// An ordinary address may be dialled unless it is denied, a special one only if it is listed.
    pub fn refuses_answer(&self, address: IpAddr, port: u16) -> Option<&'static str> {
        if self.denies_address(address, port) {
            return Some("a denied address");
        }
        address::special(address).filter(|_| !self.allows_address(address, port))
    }

    /// Returns the ports to listen on.
    pub fn listens(&self) -> Listens {
        let ports = Ports::union(self.0.permits.iter().map(|rule| &rule.ports));
        if ports.count() > MAX_LISTENERS {
            return Listens::All;
        }
        Listens::Ports(ports.iter().collect())
    }

    /// Returns the first rule that may permit something that `ceiling` does not, or `None` if there
    /// is certainly no such rule.
    ///
    /// Rules are compared in pairs: two rules of the ceiling that cover a third only together do
    /// not count as covering it. Denials of the ceiling must be in this list too
    /// ([`Rules::under_denials_of`]).
    pub fn beyond(&self, ceiling: &Rules) -> Option<Rule> {
        self.0
            .permits
            .iter()
            .find(|rule| !self.is_within(rule, ceiling))
            .cloned()
    }

    /// Returns a list that permits nothing that one of the two does not permit. It may permit less
    /// than both do, because rules are compared in pairs.
    pub fn common(&self, other: &Rules) -> Rules {
        let mut lists = Lists::default();
        for (rules, ceiling) in [(self, other), (other, self)] {
            let narrowed = rules.under_denials_of(ceiling);
            let within = rules
                .0
                .permits
                .iter()
                .filter(|rule| narrowed.is_within(rule, ceiling));
            within
                .chain(&rules.0.denials)
                .for_each(|rule| lists.add(rule.clone()));
        }
        Rules(Arc::new(lists))
    }

    /// Returns the rules, denials last.
    pub fn iter(&self) -> impl Iterator<Item = &Rule> {
        self.0.permits.iter().chain(&self.0.denials)
    }

    fn with(
        &self,
        rules: impl Iterator<Item = Result<Rule, RuleError>>,
    ) -> Result<Rules, RuleError> {
        let mut lists = Lists::clone(&self.0);
        for rule in rules {
            let rule = rule?;
            if lists.permits.len() + lists.denials.len() == MAX_RULES {
                return Err(RuleError {
                    rule: rule.to_string(),
                    problem: RuleProblem::TooMany,
                });
            }
            lists.add(rule);
        }
        Ok(Rules(Arc::new(lists)))
    }

    fn permits_address(&self, address: IpAddr, port: u16, counts: impl Fn(&Rule) -> bool) -> bool {
        let lists = |address| {
            self.0
                .permits
                .iter()
                .any(|rule| counts(rule) && rule.has_address(address, port))
        };
        lists(address::canonical(address))
            && address::meanings(address)
                .all(|meaning| address::special(meaning).is_none() || lists(meaning))
            && !self.denies_address(address, port)
    }

    /// Returns whether everything that `rule`, one of these, permits is permitted by `ceiling`.
    ///
    /// 1. Ports at which the whole target is denied here are ignored. At all others some rule of
    ///    the ceiling must cover the whole target.
    /// 2. Where a denial of the ceiling overlaps the target, a denial of this list must cover the
    ///    overlap.
    fn is_within(&self, rule: &Rule, ceiling: &Rules) -> bool {
        let open = rule
            .ports
            .minus(&ports_covering(&self.0.denials, &rule.target));
        if !open
            .minus(&ports_covering(&ceiling.0.permits, &rule.target))
            .is_empty()
        {
            return false;
        }
        ceiling.0.denials.iter().all(|denial| {
            let Some(shared) = rule.target.touched_by(&denial.target) else {
                return true;
            };
            open.common(&denial.ports)
                .minus(&ports_covering(&self.0.denials, shared))
                .is_empty()
        })
    }
}

impl Lists {
    fn add(&mut self, rule: Rule) {
        let list = match rule.effect {
            Effect::Permit => &mut self.permits,
            Effect::Deny => &mut self.denials,
        };
        if !list.contains(&rule) {
            list.push(rule);
        }
    }
}

/// Returns the ports at which a single rule of the list covers the whole target.
fn ports_covering(rules: &[Rule], target: &Target) -> Ports {
    Ports::union(
        rules
            .iter()
            .filter(|rule| rule.target.covers(target))
            .map(|rule| &rule.ports),
    )
}

impl Rule {
    /// Parses one rule. A leading `!` makes it a denial.
    pub fn parse(text: &str) -> Result<Rule, RuleError> {
        match text.trim().strip_prefix('!') {
            Some(_) => Rule::parse_denial(text),
            None => Rule::parse_as(Effect::Permit, text, text.trim()),
        }
    }

    /// Returns whether it covers every name and every address.
    pub fn is_everything(&self) -> bool {
        self.target == Target::Everything
    }

    /// Returns whether this rule is a denial.
    pub fn is_denial(&self) -> bool {
        self.effect == Effect::Deny
    }

    /// Returns whether the rule covers names that it does not spell out, so that an operator should
    /// be warned.
    pub fn is_wildcard(&self) -> bool {
        match &self.target {
            Target::Everything => true,
            Target::Names(pattern) => pattern.depth != Depth::Itself,
            Target::Addresses(_) => false,
        }
    }

    fn parse_denial(text: &str) -> Result<Rule, RuleError> {
        let rule = text.trim();
        Rule::parse_as(
            Effect::Deny,
            text,
            rule.strip_prefix('!').unwrap_or(rule).trim_start(),
        )
    }

    fn parse_as(effect: Effect, written: &str, text: &str) -> Result<Rule, RuleError> {
        let parsed = parse_target(text).and_then(|(target, ports)| match ports {
            Some(ports) => Ok(Rule {
                effect,
                target,
                ports: Ports::parse(ports)?,
            }),
            None => Ok(Rule {
                effect,
                target,
                ports: Ports::default_of(effect),
            }),
        });
        parsed.map_err(|problem| RuleError {
            rule: shortened(written),
            problem,
        })
    }

    fn has_address(&self, address: IpAddr, port: u16) -> bool {
        self.ports.contains(port) && self.target.has_address(address)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_denial() {
            formatter.write_str("!")?;
        }
        if self.target == Target::Everything {
            return formatter.write_str("all");
        }
        if self.ports == Ports::default_of(self.effect) {
            return self.target.fmt(formatter);
        }
        match &self.target {
            Target::Addresses(IpNet::V6(_)) => {
                write!(formatter, "[{}]:{}", self.target, self.ports)
            }
            target => write!(formatter, "{target}:{}", self.ports),
        }
    }
}

/// The target of a rule, without ports. Two targets are disjoint, or one covers the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Target {
    Everything,
    Names(Pattern),
    /// Never a range of IPv4-mapped addresses: those are written as IPv4 addresses.
    Addresses(IpNet),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Pattern {
    base: HostName,
    depth: Depth,
}

/// The number of labels that a name has before the base of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Depth {
    Itself,
    OneLabel,
    Labels,
}

impl Target {
    fn has_name(&self, name: &HostName) -> bool {
        match self {
            Target::Everything => true,
            Target::Names(pattern) => pattern.has(name),
            Target::Addresses(_) => false,
        }
    }

    fn has_address(&self, address: IpAddr) -> bool {
        match self {
            Target::Everything => true,
            Target::Names(_) => false,
            Target::Addresses(network) => network.contains(&address),
        }
    }

    fn covers(&self, other: &Target) -> bool {
        match (self, other) {
            (Target::Everything, _) => true,
            (Target::Names(pattern), Target::Names(other)) => pattern.covers(other),
            (Target::Addresses(network), Target::Addresses(other)) => network.contains(other),
            _ => false,
        }
    }

    /// Returns the part of a denied target that affects what this target permits, or `None` if
    /// there is none.
    fn touched_by<'a>(&'a self, denied: &'a Target) -> Option<&'a Target> {
        match (self, denied) {
            _ if denied.covers(self) => Some(self),
            _ if self.covers(denied) => Some(denied),
            // A name may resolve to any address, and an IPv6 address may embed any IPv4 address.
            (Target::Names(_), Target::Addresses(_)) => Some(denied),
            (Target::Addresses(IpNet::V6(_)), Target::Addresses(IpNet::V4(_))) => Some(denied),
            _ => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Everything => formatter.write_str("all"),
            Target::Names(Pattern {
                base,
                depth: Depth::Itself,
            }) => write!(formatter, "{base}"),
            Target::Names(Pattern {
                base,
                depth: Depth::OneLabel,
            }) => write!(formatter, "*.{base}"),
            Target::Names(Pattern {
                base,
                depth: Depth::Labels,
            }) => write!(formatter, "**.{base}"),
            Target::Addresses(network) if network.prefix_len() == network.max_prefix_len() => {
                network.addr().fmt(formatter)
            }
            Target::Addresses(network) => network.fmt(formatter),
        }
    }
}

impl Pattern {
    fn has(&self, name: &HostName) -> bool {
        match self.depth {
            Depth::Itself => *name == self.base,
            Depth::OneLabel => {
                labels_before(name, &self.base).is_some_and(|labels| !labels.contains('.'))
            }
            Depth::Labels => labels_before(name, &self.base).is_some(),
        }
    }

    fn covers(&self, other: &Pattern) -> bool {
        match (self.depth, other.depth) {
            (_, Depth::Itself) => self.has(&other.base),
            (Depth::Labels, _) => self.base == other.base || self.has(&other.base),
            (depth, other_depth) => depth == other_depth && self.base == other.base,
        }
    }
}

/// Returns the labels before `.base` in a name, or `None` if there are none.
fn labels_before<'a>(name: &'a HostName, base: &HostName) -> Option<&'a str> {
    name.as_str().strip_suffix(base.as_str())?.strip_suffix('.')
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn rules(list: &[&str]) -> Rules {
        Rules::parse(list).unwrap_or_else(|error| panic!("{error}"))
    }

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Returns whether a list permits `name:port`, `address:port` or `[address]:port`.
    fn permits(list: &[&str], target: &str) -> bool {
        match crate::name::parse_authority(target).unwrap() {
            (crate::name::UrlHost::Name(name), port) => {
                rules(list).allows_name(&name, port.unwrap())
            }
            (crate::name::UrlHost::Address(address), port) => {
                rules(list).allows_address(address, port.unwrap())
            }
        }
    }

    #[test]
    fn an_empty_list_permits_nothing() {
        assert!(!permits(&[], "example.com:443"));
        assert!(!permits(&[], "8.8.8.8:443"));
        assert!(Rules::none().is_empty());
        assert_eq!(Rules::none().listens(), Listens::Ports(BTreeSet::new()));
        assert_eq!(Rules::none(), rules(&[]));
        // A list of denials alone permits nothing either.
        assert!(rules(&["!example.com"]).is_empty());
        assert!(!rules(&["example.com"]).is_empty());
    }

    #[test]
    fn a_rule_permits_exactly_what_it_says() {
        for (rule, permitted, refused) in [
            (
                "example.com",
                &["example.com:443", "example.com:80", "EXAMPLE.com.:80"][..],
                &[
                    "example.com:8080",
                    "www.example.com:443",
                    "badexample.com:443",
                    "example.com.attacker.net:443",
                    "com:443",
                ][..],
            ),
            (
                "*.example.com",
                &["www.example.com:443", "a-b.example.com:80"],
                &[
                    "example.com:443",
                    "a.b.example.com:443",
                    "badexample.com:443",
                    "www.example.com:22",
                ],
            ),
            (
                "**.example.com",
                &["www.example.com:443", "a.b.c.example.com:443"],
                &[
                    "example.com:443",
                    "badexample.com:443",
                    "www.example.com.attacker.net:443",
                ],
            ),
            (
                "example.com:8443",
                &["example.com:8443"],
                &["example.com:443", "example.com:80"],
            ),
            (
                "example.com:8000,8443,9000-9002",
                &[
                    "example.com:8000",
                    "example.com:8443",
                    "example.com:9000",
                    "example.com:9001",
                    "example.com:9002",
                ],
                &["example.com:443", "example.com:8999", "example.com:9003"],
            ),
            (
                "example.com:*",
                &["example.com:1", "example.com:22", "example.com:65535"],
                &["www.example.com:22"],
            ),
            (
                "Bücher.example",
                &["xn--bcher-kva.example:443"],
                &["bucher.example:443"],
            ),
            (
                "192.168.1.0/24",
                &[
                    "192.168.1.0:80",
                    "192.168.1.255:443",
                    "[::ffff:192.168.1.7]:443",
                ],
                &[
                    "192.168.2.0:443",
                    "192.168.1.7:22",
                    "example.com:443",
                    "[64:ff9b::192.168.1.7]:443",
                    "[2a00::5efe:192.168.1.7]:443",
                ],
            ),
            (
                "192.168.1.0/24:*",
                &["192.168.1.7:22", "192.168.1.7:443"],
                &["192.168.2.7:22"],
            ),
            (
                "93.184.216.34",
                &["93.184.216.34:443", "93.184.216.34:80"],
                &[
                    "93.184.216.35:443",
                    "93.184.216.34:22",
                    "93.184.216.34:8080",
                ],
            ),
            (
                "93.184.216.34:*",
                &["93.184.216.34:22", "93.184.216.34:65535"],
                &["93.184.216.35:22"],
            ),
            (
                "93.184.216.34:22",
                &["93.184.216.34:22"],
                &["93.184.216.34:443"],
            ),
            (
                "2001:db8::/32",
                &["[2001:db8::1]:443", "[2001:db8:ffff::]:80"],
                &["[2001:db9::1]:443", "[2001:db8::1]:22"],
            ),
            (
                "[2001:db8::1]:8080",
                &["[2001:db8::1]:8080"],
                &["[2001:db8::1]:443", "[2001:db8::2]:8080"],
            ),
            (
                "2001:db8::1",
                &["[2001:db8::1]:443"],
                &["[2001:db8::2]:443"],
            ),
            (
                "[2001:db8::/32]:22",
                &["[2001:db8::1]:22"],
                &["[2001:db8::1]:443"],
            ),
            (
                "0.0.0.0/0:*",
                &["8.8.8.8:53", "127.0.0.1:1"],
                &["[2a00::1]:53", "example.com:443", "[2002:808:808::1]:53"],
            ),
            // A rule for all of IPv6 does not permit special IPv4 addresses that are embedded in
            // it.
            (
                "::/0",
                &["[2a00::1]:443", "[::1]:443", "[64:ff9b::8.8.8.8]:443"],
                &[
                    "[64:ff9b::a9fe:a9fe]:443",
                    "[2002:7f00:1::]:443",
                    "[2a00::5efe:10.0.0.1]:443",
                    "[::ffff:8.8.8.8]:443",
                ],
            ),
        ] {
            for target in permitted {
                assert!(permits(&[rule], target), "{rule} should permit {target}");
            }
            for target in refused {
                assert!(
                    !permits(&[rule], target),
                    "{rule} should not permit {target}"
                );
            }
        }
    }

    #[test]
    fn an_address_that_carries_a_special_one_needs_both_listed() {
        let hidden = "[64:ff9b::10.0.0.1]:443";
        assert!(!permits(&["64:ff9b::/96"], hidden));
        assert!(!permits(&["10.0.0.0/8"], hidden));
        assert!(!permits(&["64:ff9b::/96", "10.0.0.0/8:22"], hidden));
        assert!(permits(&["64:ff9b::/96", "10.0.0.0/8"], hidden));
    }

    #[test]
    fn everything_is_everything() {
        let all = Rules::everything();
        assert!(all.is_everything() && !all.is_empty());
        assert!(all.allows_name(&name("anything.example"), 22));
        assert!(all.lists_name(&name("anything.example")));
        for text in [
            "8.8.8.8",
            "127.0.0.1",
            "169.254.169.254",
            "64:ff9b::a00:1",
            "ff02::1",
        ] {
            assert!(all.allows_address(address(text), 22), "{text}");
            assert_eq!(all.refuses_answer(address(text), 22), None, "{text}");
            assert!(!all.lists_address(address(text), 22), "{text}");
        }
        assert_eq!(all.listens(), Listens::All);
        assert_eq!(all.iter().map(Rule::to_string).collect::<Vec<_>>(), ["all"]);
        assert!(!rules(&["0.0.0.0/0:*", "::/0:*"]).is_everything());
    }

    #[test]
    fn a_denial_wins_wherever_it_stands() {
        for list in [
            ["**.example.com", "!ads.example.com"],
            ["!ads.example.com", "**.example.com"],
        ] {
            assert!(permits(&list, "www.example.com:443"));
            assert!(!permits(&list, "ads.example.com:443"));
            assert!(!rules(&list).lists_name(&name("ads.example.com")));
            assert!(permits(&list, "x.ads.example.com:443"));
        }
        assert!(!permits(&["10.0.0.0/8", "!10.0.0.1"], "10.0.0.1:443"));
        assert!(permits(&["10.0.0.0/8", "!10.0.0.1"], "10.0.0.2:443"));
        let all = Rules::everything()
            .deny(&["**.example.com", "!10.0.0.0/8"])
            .unwrap();
        assert!(!all.is_everything());
        assert!(
            all.allows_name(&name("example.com"), 22)
                && !all.allows_name(&name("www.example.com"), 22)
        );
        assert!(
            all.allows_address(address("192.168.0.1"), 22)
                && !all.allows_address(address("10.0.0.1"), 22)
        );
        assert_eq!(
            all.iter().map(Rule::to_string).collect::<Vec<_>>(),
            ["all", "!**.example.com", "!10.0.0.0/8"]
        );
    }

    #[test]
    fn a_denial_without_ports_is_for_every_port() {
        let list = ["example.com:*", "!example.com"];
        assert!(!permits(&list, "example.com:22") && !permits(&list, "example.com:443"));
        let list = ["example.com", "!example.com:80"];
        assert!(!permits(&list, "example.com:80") && permits(&list, "example.com:443"));
        assert!(rules(&list).lists_name(&name("example.com")));
        assert!(!rules(&["example.com:80", "!example.com:1-100"]).lists_name(&name("example.com")));
    }

    #[test]
    fn a_denied_address_is_denied_in_all_its_forms_and_for_every_name() {
        let list = rules(&["example.com", "::/0", "0.0.0.0/0", "!8.8.0.0/16"]);
        for text in [
            "8.8.8.8",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2002:808:808::1",
            "2a00::5efe:808:808",
        ] {
            assert!(!list.allows_address(address(text), 443), "{text}");
            assert_eq!(
                list.refuses_answer(address(text), 443),
                Some("a denied address"),
                "{text}"
            );
        }
        for text in [
            "8.9.8.8",
            "::ffff:8.9.8.8",
            "64:ff9b::8.9.8.8",
            "2002:809:808::1",
        ] {
            assert!(list.allows_address(address(text), 443), "{text}");
            assert_eq!(list.refuses_answer(address(text), 443), None, "{text}");
        }
    }

    #[test]
    fn a_name_leads_to_special_addresses_only_where_they_are_listed() {
        let named = rules(&["example.com"]);
        let listed = rules(&["example.com", "10.0.0.0/8", "127.0.0.1:8080"]);
        for (text, port, refused) in [
            ("10.0.0.1", 443, "a private address"),
            ("::ffff:10.0.0.1", 443, "a private address"),
            ("127.0.0.1", 8080, "a loopback address"),
        ] {
            assert_eq!(
                named.refuses_answer(address(text), port),
                Some(refused),
                "{text}"
            );
            assert_eq!(listed.refuses_answer(address(text), port), None, "{text}");
        }
        assert_eq!(
            listed.refuses_answer(address("127.0.0.1"), 443),
            Some("a loopback address")
        );
        assert_eq!(
            listed.refuses_answer(address("64:ff9b::10.0.0.1"), 443),
            Some("a private address")
        );
        assert_eq!(named.refuses_answer(address("93.184.216.34"), 443), None);
        assert!(!named.allows_address(address("93.184.216.34"), 443));
        assert!(
            listed.lists_address(address("10.0.0.1"), 443)
                && !listed.lists_address(address("10.0.0.1"), 22)
        );
    }

    #[test]
    fn an_error_names_the_rule_and_stays_short() {
        let error = Rules::parse(&["example.com", "http://example.com/"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the rule `http://example.com/` cannot be used: a rule is a name, not an address of a \
             page: write example.com"
        );
        let error = Rules::parse(&["a\u{1b}[31m".repeat(1000)])
            .unwrap_err()
            .to_string();
        assert!(error.len() < 2_000 && !error.contains('\u{1b}'), "{error}");
        let many: Vec<String> = (0..=MAX_RULES)
            .map(|number| format!("host{number}.example.com"))
            .collect();
        assert_eq!(
            Rules::parse(&many).unwrap_err().problem,
            RuleProblem::TooMany
        );
        assert!(Rules::parse(&many[1..]).is_ok());
    }

    #[test]
    fn wildcards_are_known_as_such() {
        for (rule, is_wildcard) in [
            ("example.com", false),
            ("*.example.com", true),
            ("**.com", true),
            ("0.0.0.0/0", false),
        ] {
            assert_eq!(
                Rule::parse(rule).unwrap().is_wildcard(),
                is_wildcard,
                "{rule}"
            );
        }
    }

    #[test]
    fn the_ports_to_listen_on_are_those_of_the_rules() {
        let ports = |list: &[&str]| rules(list).listens();
        assert_eq!(
            ports(&["example.com"]),
            Listens::Ports(BTreeSet::from([80, 443]))
        );
        assert_eq!(
            ports(&["a.com:8080", "10.0.0.1:22", "!b.com:25"]),
            Listens::Ports(BTreeSet::from([22, 8080]))
        );
        assert_eq!(
            ports(&["a.com:1001-1032"]),
            Listens::Ports((1001..=1032).collect())
        );
        assert_eq!(ports(&["a.com:1001-1033"]), Listens::All);
        assert_eq!(ports(&["a.com:*"]), Listens::All);
        assert_eq!(
            ports(&["a.com:65535"]),
            Listens::Ports(BTreeSet::from([65535]))
        );
    }

    #[test]
    fn a_list_is_compared_with_a_ceiling_rule_by_rule() {
        for (list, ceiling, beyond) in [
            (&["example.com"][..], &["example.com"][..], None),
            (&["example.com:443"], &["example.com"], None),
            (&["example.com"], &["example.com:443"], Some("example.com")),
            (
                &["example.com"],
                &["example.com:443", "example.com:80"],
                None,
            ),
            (&["www.example.com"], &["*.example.com"], None),
            (
                &["a.b.example.com"],
                &["*.example.com"],
                Some("a.b.example.com"),
            ),
            (&["a.b.example.com"], &["**.example.com"], None),
            (&["*.example.com"], &["**.example.com"], None),
            (
                &["**.example.com"],
                &["*.example.com"],
                Some("**.example.com"),
            ),
            (
                &["*.b.example.com", "**.b.example.com"],
                &["**.example.com"],
                None,
            ),
            (
                &["*.b.example.com"],
                &["*.example.com"],
                Some("*.b.example.com"),
            ),
            (&["example.com"], &["**.example.com"], Some("example.com")),
            (&["10.1.0.0/16", "10.0.0.1:80"], &["10.0.0.0/8"], None),
            (&["10.0.0.0/8"], &["10.1.0.0/16"], Some("10.0.0.0/8")),
            (&["::/0"], &["0.0.0.0/0"], Some("::/0")),
            (
                &["example.com"],
                &["0.0.0.0/0:*", "::/0:*"],
                Some("example.com"),
            ),
            (
                &["example.com", "example.org"],
                &["example.com"],
                Some("example.org"),
            ),
            (&[], &[], None),
            (&["example.com"], &[], Some("example.com")),
            // Denials of the ceiling must be repeated where they overlap.
            (
                &["**.example.com"],
                &["**.example.com", "!ads.example.com"],
                Some("**.example.com"),
            ),
            (
                &["**.example.com", "!ads.example.com"],
                &["**.example.com", "!ads.example.com"],
                None,
            ),
            (
                &["**.example.com", "!*.example.com"],
                &["**.example.com", "!ads.example.com"],
                None,
            ),
            (
                &["**.example.com", "!ads.example.com:80"],
                &["**.example.com", "!ads.example.com"],
                Some("**.example.com"),
            ),
            (
                &["www.example.com"],
                &["**.example.com", "!ads.example.com"],
                None,
            ),
            (&["10.0.0.0/8"], &["10.0.0.0/8", "!ads.example.com"], None),
            (
                &["example.com"],
                &["example.com", "!10.0.0.0/8"],
                Some("example.com"),
            ),
            (
                &["example.com", "!10.0.0.0/8"],
                &["example.com", "!10.0.0.0/8"],
                None,
            ),
            (
                &["2002::/16"],
                &["2002::/16", "!8.8.8.8"],
                Some("2002::/16"),
            ),
            (&["9.0.0.0/8"], &["0.0.0.0/0", "!8.8.8.8"], None),
            // The ceiling need not permit what the list itself denies.
            (
                &["example.com", "!example.com:80"],
                &["example.com:443"],
                None,
            ),
        ] {
            let found = rules(list)
                .beyond(&rules(ceiling))
                .map(|rule| rule.to_string());
            assert_eq!(found.as_deref(), beyond, "{list:?} under {ceiling:?}");
        }
        assert_eq!(
            rules(&["example.com:*", "::/0:*"]).beyond(&Rules::everything()),
            None
        );
        assert!(
            Rules::everything()
                .beyond(&rules(&["0.0.0.0/0:*", "::/0:*", "**.com:*"]))
                .is_some()
        );
        assert_eq!(Rules::everything().beyond(&Rules::everything()), None);
    }

    #[test]
    fn a_list_that_takes_over_the_denials_of_its_ceiling_is_within() {
        let ceiling = rules(&["**.example.com", "!ads.example.com", "!10.0.0.0/8"]);
        let asked = rules(&["*.example.com"]);
        assert!(asked.beyond(&ceiling).is_some());
        let granted = asked.under_denials_of(&ceiling);
        assert_eq!(granted.beyond(&ceiling), None);
        assert!(
            granted.allows_name(&name("www.example.com"), 443)
                && !granted.allows_name(&name("ads.example.com"), 443)
        );
    }

    /// Names and addresses for which random lists give different verdicts.
    static NAMES: LazyLock<Vec<HostName>> = LazyLock::new(|| {
        let below = |names: &[String]| {
            names
                .iter()
                .flat_map(|name| [format!("a.{name}"), format!("b.{name}")])
                .collect::<Vec<_>>()
        };
        let first = below(&["test".to_owned()]);
        let second = below(&first);
        let third = below(&second);
        ["test".to_owned()]
            .iter()
            .chain(&first)
            .chain(&second)
            .chain(&third)
            .map(|text| name(text))
            .collect()
    });
    static ADDRESSES: LazyLock<Vec<IpAddr>> = LazyLock::new(|| {
        let ordinary = [
            "8.8.8.8",
            "11.0.0.1",
            "64:ff9b::808:808",
            "2002:808:808::1",
            "2a00::5efe:808:808",
            "2a00::1",
        ];
        let special = [
            "10.0.0.1",
            "10.1.2.3",
            "127.0.0.1",
            "::ffff:10.0.0.1",
            "::1",
            "fd00::1",
        ];
        let hidden = [
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "2002:808:808::5efe:a00:1",
            "2001:0:808:808:0:0:f5ff:fffe",
        ];
        ordinary
            .iter()
            .chain(&special)
            .chain(&hidden)
            .map(|text| address(text))
            .collect()
    });
    const PORTS: [u16; 7] = [1, 79, 80, 81, 443, 8080, 65535];

    /// Everything that a list permits: names, addresses, and addresses reached through a name.
    fn permissions(rules: &Rules) -> BTreeSet<String> {
        let mut permitted = BTreeSet::new();
        for port in PORTS {
            let names: Vec<_> = NAMES
                .iter()
                .filter(|name| rules.allows_name(name, port))
                .collect();
            permitted.extend(names.iter().map(|name| format!("{name} {port}")));
            for address in ADDRESSES.iter() {
                if rules.allows_address(*address, port) {
                    permitted.insert(format!("{address} {port}"));
                }
                if !names.is_empty() && rules.refuses_answer(*address, port).is_none() {
                    permitted.insert(format!("{address} {port} by way of a name"));
                }
            }
        }
        permitted
    }

    fn permits_no_more(less: &Rules, more: &Rules) -> Result<(), TestCaseError> {
        let (permitted, ceiling) = (permissions(less), permissions(more));
        let excess: Vec<_> = permitted.difference(&ceiling).collect();
        prop_assert!(
            excess.is_empty(),
            "{:?} are permitted by {:?} and not by {:?}",
            excess,
            less,
            more
        );
        Ok(())
    }

    fn some_target() -> impl Strategy<Value = String> {
        let names = (
            select(vec!["", "*.", "**."]),
            select(vec![
                "test",
                "a.test",
                "b.test",
                "a.a.test",
                "b.a.test",
                "a.b.a.test",
            ]),
        );
        let networks = select(vec![
            "0.0.0.0/0",
            "10.0.0.0/8",
            "10.1.0.0/16",
            "10.0.0.1",
            "8.8.8.8",
            "127.0.0.1",
            "[::/0]",
            "[64:ff9b::/96]",
            "[2002::/16]",
            "[2002:808:808::/48]",
            "[2001::/32]",
            "[2a00::/64]",
            "[fd00::/8]",
        ]);
        prop_oneof![
            names.prop_map(|(star, base)| format!("{star}{base}")),
            networks.prop_map(str::to_owned)
        ]
    }

    fn some_permit() -> impl Strategy<Value = String> {
        (
            some_target(),
            select(vec![
                "",
                ":*",
                ":80",
                ":443",
                ":80-100",
                ":1-1000",
                ":81,443,8080",
            ]),
        )
            .prop_map(|(target, ports)| format!("{target}{ports}"))
    }

    fn some_rule() -> impl Strategy<Value = String> {
        let denies = prop::bool::weighted(0.25);
        (some_permit(), denies)
            .prop_map(|(rule, denies)| if denies { format!("!{rule}") } else { rule })
    }

    fn some_list() -> impl Strategy<Value = Vec<String>> {
        proptest::collection::vec(some_rule(), 0..6)
    }

    /// A list that shares many rules with its ceiling, so that it is often within it.
    fn a_list_and_a_ceiling() -> impl Strategy<Value = (Vec<String>, Vec<String>)> {
        proptest::collection::vec(some_rule(), 1..6).prop_flat_map(|ceiling| {
            let rule = prop_oneof![2 => select(ceiling.clone()), 1 => some_rule()];
            (proptest::collection::vec(rule, 0..4), Just(ceiling))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn a_longer_list_never_permits_less(
            list in proptest::collection::vec(some_permit(), 0..5), added in some_permit(),
            place: prop::sample::Index
        ) {
            let shorter = Rules::parse(&list).unwrap();
            let mut longer = list.clone();
            longer.insert(place.index(list.len() + 1), added);
            permits_no_more(&shorter, &Rules::parse(&longer).unwrap())?;
            permits_no_more(&Rules::none(), &shorter)?;
            permits_no_more(&shorter, &Rules::everything())?;
        }

        #[test]
        fn a_denial_never_permits_more(list in some_list(), denied in some_target()) {
            let list = Rules::parse(&list).unwrap();
            permits_no_more(&list.deny(&[denied]).unwrap(), &list)?;
        }

        #[test]
        fn what_is_not_beyond_a_ceiling_permits_nothing_that_the_ceiling_does_not(
            (list, ceiling) in a_list_and_a_ceiling()
        ) {
            let (list, ceiling) = (Rules::parse(&list).unwrap(), Rules::parse(&ceiling).unwrap());
            let granted = list.under_denials_of(&ceiling);
            for list in [list, granted] {
                if list.beyond(&ceiling).is_none() {
                    permits_no_more(&list, &ceiling)?;
                }
            }
        }

        #[test]
        fn what_two_lists_have_in_common_neither_refuses(one in some_list(), other in some_list()) {
            let (one, other) = (Rules::parse(&one).unwrap(), Rules::parse(&other).unwrap());
            let both = one.common(&other);
            permits_no_more(&both, &one)?;
            permits_no_more(&both, &other)?;
            permits_no_more(&one, &one.common(&one))?;
        }

        #[test]
        fn a_part_of_a_list_is_not_beyond_it(
            list in some_list(), part in any::<prop::sample::Index>()
        ) {
            let whole = Rules::parse(&list).unwrap();
            prop_assert_eq!(whole.beyond(&whole), None);
            let part = Rules::parse(&list[..part.index(list.len() + 1)])
                .unwrap()
                .under_denials_of(&whole);
            prop_assert_eq!(part.beyond(&whole), None);
            prop_assert_eq!(part.beyond(&Rules::everything()), None);
        }

        #[test]
        fn a_name_is_listed_if_some_port_is_allowed(list in some_list()) {
            let list = Rules::parse(&list).unwrap();
            for name in NAMES.iter() {
                // Every port list generated here contains one of these ports or a neighbour of
                // one, and so does what other lists leave of it.
                let at_some_port = (1..=1001)
                    .chain([8080, 65535])
                    .any(|port| list.allows_name(name, port));
                prop_assert_eq!(list.lists_name(name), at_some_port);
            }
        }

        #[test]
        fn every_permitted_connection_is_listened_for(list in some_list()) {
            let list = Rules::parse(&list).unwrap();
            if let Listens::Ports(ports) = list.listens() {
                prop_assert!(ports.len() <= MAX_LISTENERS);
                for port in PORTS.into_iter().filter(|port| !ports.contains(port)) {
                    prop_assert!(!NAMES.iter().any(|name| list.allows_name(name, port)));
                    prop_assert!(
                        !ADDRESSES.iter().any(|address| list.allows_address(*address, port))
                    );
                }
            }
        }

        #[test]
        fn a_rule_is_what_its_text_says(rule in some_list()) {
            for rule in Rules::parse(&rule).unwrap().iter() {
                prop_assert_eq!(&Rule::parse(&rule.to_string()).unwrap(), rule);
            }
        }

        /// An independent implementation of the patterns: label by label instead of by suffix.
        #[test]
        fn two_readings_of_a_pattern_agree(
            star in select(vec!["", "*.", "**."]), base in "[ab](\\.[ab]){0,2}",
            asked in "[ab](\\.[ab]){0,4}"
        ) {
            let rule = format!("{star}{base}");
            let (base, labels): (Vec<_>, Vec<_>) =
                (base.split('.').rev().collect(), asked.split('.').rev().collect());
            let more = labels.len().checked_sub(base.len()).filter(|_| labels.starts_with(&base));
            let expected = match star {
                "" => more == Some(0),
                "*." => more == Some(1),
                _ => more.is_some_and(|more| more > 0),
            };
            prop_assert_eq!(rules(&[&rule]).allows_name(&name(&asked), 443), expected);
        }
    }
}
