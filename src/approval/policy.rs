//! The policy: ordered rules and defaults.

use serde::{Deserialize, Serialize};

use super::grants::package_of;
use super::{Effect, PolicyRule, Subject, Verdict};

/// Decides about subjects.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// Each with the place where it was written.
    rules: Vec<(PolicyRule, String)>,
    defaults: Defaults,
}

/// The effects when no rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defaults {
    pub tools: Effect,
    pub shell: Effect,
    pub packages: Effect,
    /// Names that the rules of the network do not list.
    pub domains: Effect,
}

impl Default for Defaults {
    /// Allows everything that code in a sandbox can do anyway; network access is as restricted as
    /// the network's own rules.
    fn default() -> Defaults {
        Defaults {
            tools: Effect::Allow,
            shell: Effect::Allow,
            packages: Effect::Allow,
            domains: Effect::Deny,
        }
    }
}

impl Policy {
    pub fn new(defaults: Defaults) -> Policy {
        Policy {
            rules: Vec::new(),
            defaults,
        }
    }

    /// Adds a rule after all others. `place` describes where it was written, and is shown to
    /// everyone.
    pub fn add(&mut self, rule: PolicyRule, place: &str) {
        self.rules.push((rule, place.to_owned()));
    }

    /// The effects when no rule matches.
    pub fn defaults(&self) -> Defaults {
        self.defaults
    }

    /// The number of rules.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Returns the verdict on a subject. The first matching rule decides; of several packages, the
    /// strictest verdict counts.
    pub fn verdict(&self, subject: &Subject) -> Verdict {
        match subject {
            Subject::Install { requirements } => {
                let each = requirements.iter().map(|requirement| {
                    let package = package_of(requirement);
                    self.first(|rule| rule.fits_package(&package), subject)
                });
                each.fold(Verdict::Allow, Verdict::or_stricter)
            }
            other => self.first(|rule| rule.fits(other), subject),
        }
    }

    /// Returns whether every command may run without an approval.
    pub fn shell_is_open(&self) -> bool {
        let is_about_commands =
            |rule: &PolicyRule| !matches!(rule.effect, Effect::Allow) && rule.is_about_commands();
        self.defaults.shell == Effect::Allow
            && !self.rules.iter().any(|(rule, _)| is_about_commands(rule))
    }

    /// Returns whether some name that the network's rules do not list may be reachable.
    pub fn opens_domains(&self) -> bool {
        let opens = |rule: &PolicyRule| rule.is_about_domains() && rule.effect != Effect::Deny;
        self.defaults.domains != Effect::Deny || self.rules.iter().any(|(rule, _)| opens(rule))
    }

    /// Returns whether this name may be reachable at some port, at once or after an approval.
    pub fn may_open(&self, name: &str) -> bool {
        let opens = |rule: &PolicyRule| rule.fits_name(name) && rule.effect != Effect::Deny;
        // A rule for one port may deny before another one asks; the verdict on the connection is
        // authoritative.
        let denied = self
            .rules
            .iter()
            .map(|(rule, _)| rule)
            .take_while(|rule| !opens(rule));
        let all_ports = Subject::Domain {
            name: name.to_owned(),
            port: 0,
        };
        let is_denied = denied
            .clone()
            .any(|rule| rule.fits(&all_ports) && rule.effect == Effect::Deny);
        let asked =
            self.rules.iter().any(|(rule, _)| opens(rule)) || self.defaults.domains != Effect::Deny;
        asked && !is_denied
    }

    fn first(&self, fits: impl Fn(&PolicyRule) -> bool, subject: &Subject) -> Verdict {
        match self.rules.iter().find(|(rule, _)| fits(rule)) {
            Some((rule, place)) => Verdict::new(rule.effect, || format!("`{rule}` ({place})")),
            None => {
                let effect = self.defaults.of(subject);
                Verdict::new(effect, || {
                    format!("`{}: {}`", subject.setting(), effect.name())
                })
            }
        }
    }
}

impl Defaults {
    fn of(self, subject: &Subject) -> Effect {
        match subject {
            Subject::Tool { .. } => self.tools,
            Subject::Shell { .. } => self.shell,
            Subject::Install { .. } => self.packages,
            Subject::Domain { .. } => self.domains,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, json};

    use super::super::rule::tests::rule;
    use super::*;

    fn policy(rules: &[&str]) -> Policy {
        let mut policy = Policy::default();
        for (number, text) in (1..).zip(rules) {
            policy.add(rule(text), &format!("line {number}"));
        }
        policy
    }

    fn tool(server: &str, name: &str) -> Subject {
        Subject::Tool {
            server: server.to_owned(),
            tool: name.to_owned(),
            arguments: Map::new(),
            fingerprint: None,
        }
    }

    fn install(requirements: &[&str]) -> Subject {
        Subject::Install {
            requirements: requirements.iter().map(ToString::to_string).collect(),
        }
    }

    fn ask(line: &str) -> Verdict {
        Verdict::Ask {
            line: line.to_owned(),
        }
    }

    fn deny(line: &str) -> Verdict {
        Verdict::Deny {
            line: line.to_owned(),
        }
    }

    #[test]
    fn without_rules_only_the_network_is_closed() {
        let policy = Policy::default();
        let command = Subject::Shell {
            command: "ls".to_owned(),
            kind: "!".to_owned(),
        };
        for subject in [tool("s", "t"), command, install(&["numpy"])] {
            assert_eq!(policy.verdict(&subject), Verdict::Allow, "{subject:?}");
        }
        let domain = Subject::Domain {
            name: "example.com".to_owned(),
            port: 443,
        };
        assert_eq!(policy.verdict(&domain), deny("`approve_domains: deny`"));
        assert!(
            policy.shell_is_open() && !policy.opens_domains() && !policy.may_open("example.com")
        );
    }

    #[test]
    fn what_is_so_without_a_rule_names_the_setting() {
        let policy = Policy::new(Defaults {
            tools: Effect::Ask,
            shell: Effect::Deny,
            ..Defaults::default()
        });
        assert_eq!(policy.verdict(&tool("s", "t")), ask("`approve_tools: ask`"));
        let command = Subject::Shell {
            command: "ls".to_owned(),
            kind: "!".to_owned(),
        };
        assert_eq!(policy.verdict(&command), deny("`approve_shell: deny`"));
        assert!(!policy.shell_is_open());
    }

    #[test]
    fn the_first_rule_that_fits_decides_and_is_named() {
        let policy = policy(&[
            "allow: {server: a, tool: get}",
            "ask: {server: a}",
            "deny: {tool: '*'}",
        ]);
        assert_eq!(policy.verdict(&tool("a", "get")), Verdict::Allow);
        assert_eq!(
            policy.verdict(&tool("a", "put")),
            ask(r#"`ask: {server: "a", tool: "*"}` (line 2)"#)
        );
        assert_eq!(
            policy.verdict(&tool("b", "get")),
            deny(r#"`deny: {tool: "*"}` (line 3)"#)
        );
    }

    #[test]
    fn of_several_packages_the_strictest_verdict_counts() {
        let policy = policy(&[
            "allow: {package: numpy}",
            "deny: {package: evil}",
            "ask: {package: '*'}",
        ]);
        assert_eq!(
            policy.verdict(&install(&["numpy", "NumPy>=2"])),
            Verdict::Allow
        );
        assert_eq!(
            policy.verdict(&install(&["numpy", "pandas"])),
            ask(r#"`ask: {package: "*"}` (line 3)"#)
        );
        assert_eq!(
            policy.verdict(&install(&["pandas", "evil"])),
            deny(r#"`deny: {package: "evil"}` (line 2)"#)
        );
    }

    #[test]
    fn a_package_from_an_address_is_not_the_package_of_that_name() {
        let policy = policy(&["allow: {package: numpy}", "deny: {package: '*'}"]);
        for hidden in [
            "numpy @ https://example.com/x.whl",
            "https://example.com/numpy.whl",
            "numpy evil",
            "numpy;evil",
        ] {
            assert_ne!(
                policy.verdict(&install(&[hidden])),
                Verdict::Allow,
                "{hidden}"
            );
        }
        for plain in [
            "numpy",
            "numpy[extra]==2.0",
            "numpy>=1,<3",
            " Num_Py ".replace('_', "").as_str(),
        ] {
            assert_eq!(
                policy.verdict(&install(&[plain])),
                Verdict::Allow,
                "{plain}"
            );
        }
    }

    #[test]
    fn the_shell_is_closed_as_soon_as_one_rule_wants_to_look() {
        assert!(policy(&["allow: {command: ls}"]).shell_is_open());
        assert!(!policy(&["deny: {command: 'rm *'}"]).shell_is_open());
        assert!(!policy(&["ask: {command: '*'}"]).shell_is_open());
    }

    #[test]
    fn names_are_known_inside_when_somebody_could_be_asked_about_them() {
        let one = policy(&["ask: {domain: '*.example.com'}"]);
        assert!(
            one.opens_domains() && one.may_open("api.example.com") && !one.may_open("example.org")
        );
        let but = policy(&[
            "deny: {domain: evil.example.com}",
            "ask: {domain: '*.example.com'}",
        ]);
        assert!(but.may_open("api.example.com") && !but.may_open("evil.example.com"));
        let other_port = policy(&["deny: {domain: a.com, port: 25}", "ask: {domain: '*'}"]);
        assert!(other_port.may_open("a.com"));
        let mut all = Policy::new(Defaults {
            domains: Effect::Ask,
            ..Defaults::default()
        });
        assert!(all.may_open("anything.example"));
        all.add(rule("deny: {domain: anything.example}"), "later");
        assert!(!all.may_open("anything.example"));
    }

    #[test]
    fn a_policy_that_is_handed_on_says_the_same() {
        let mut policy = policy(&[
            r#"allow: {server: a, tool: "get\\\\*", arguments: {path: "/tmp/*"}}"#,
            "deny: {command: 'rm *', kind: '!'}",
            "ask: {domain: '*.example.com', port: 443}",
            "ask: {package: Num_Py}",
        ]);
        policy.defaults.tools = Effect::Deny;
        let handed = rmp_serde::to_vec_named(&policy).unwrap();
        assert_eq!(rmp_serde::from_slice::<Policy>(&handed).unwrap(), policy);
    }

    proptest! {
        #[test]
        fn a_more_specific_rule_that_comes_earlier_wins(
            server in any::<String>(),
            name in any::<String>(),
            first in 0..3_usize,
            second in 0..3_usize,
        ) {
            let (first, second) = (Effect::ALL[first], Effect::ALL[second]);
            let mut policy = Policy::default();
            let scope = super::super::PermissionScope::Tool {
                server: server.clone(),
                tool: name.clone(),
                fingerprint: None,
            };
            policy.add(PolicyRule::exactly(first, &scope), "one");
            policy.add(PolicyRule::parse(&json!({second.name(): {"tool": "*"}})).unwrap(), "two");
            prop_assert_eq!(policy.verdict(&tool(&server, &name)).effect(), first);
            let other = format!("{name}x");
            prop_assert_eq!(policy.verdict(&tool(&server, &other)).effect(), second);
        }
    }
}
