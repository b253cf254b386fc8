//! Settings for approvals: which actions of code are allowed, denied, or need a person's decision.

use serde_json::{Map, Value};

use super::{Check, has_default, invalid};
use crate::approval::{Defaults, Effect, Policy, PolicyRule};
use crate::config::layers::{SettingOrigin, WrittenValue};
use crate::config::table::Key;
use crate::config::{ApprovalSettings, ConfigError};

/// Limit of the operator's rules. Each is evaluated for every call.
const MAX_RULES: usize = 1000;

const RULES: &str = "a list of rules such as \"- ask: {server: github, tool: create_*}\"";

impl Check<'_> {
    pub(super) fn approvals(&self) -> Result<ApprovalSettings, ConfigError> {
        let mut policy = Policy::new(Defaults {
            tools: self.effect(Key::ApproveTools)?,
            shell: self.effect(Key::ApproveShell)?,
            packages: self.effect(Key::ApprovePackages)?,
            domains: self.domains()?,
        });
        for (origin, written) in self.written.all(Key::Approvals) {
            self.add_rules(&mut policy, origin, written)?;
        }
        Ok(ApprovalSettings {
            policy,
            timeout: self.duration(Key::ApprovalTimeout)?,
            remember: self.switch(Key::RememberApprovals)?,
        })
    }

    fn effect(&self, key: Key) -> Result<Effect, ConfigError> {
        let effect = self.value(key, |text| Effect::from_name(text.trim()).ok_or(None));
        effect.map(has_default)
    }

    /// Allowing every name is left to `allow_network`, whose name is explicit about it.
    fn domains(&self) -> Result<Effect, ConfigError> {
        let all = "allow_network: all opens the network".to_owned();
        let effect = self.value(Key::ApproveDomains, |text| {
            match Effect::from_name(text.trim()) {
                Some(Effect::Allow) => Err(Some(all.clone())),
                Some(effect) => Ok(effect),
                None => Err(None),
            }
        });
        effect.map(has_default)
    }

    fn add_rules(
        &self,
        policy: &mut Policy,
        origin: &SettingOrigin,
        written: &WrittenValue,
    ) -> Result<(), ConfigError> {
        let key = Key::Approvals.name();
        let rules = match written {
            WrittenValue::Nothing => return Ok(()),
            WrittenValue::List(rules) => rules,
            WrittenValue::Text(_) | WrittenValue::Table(_) => {
                return Err(invalid(key, origin, "a single value", RULES, None));
            }
        };
        if rules.len() > MAX_RULES {
            return Err(invalid(
                key,
                origin,
                &format!("{} rules", rules.len()),
                &format!("up to {MAX_RULES}"),
                None,
            ));
        }
        for (number, written) in (1..).zip(rules) {
            let line = first_line(written);
            let rule = PolicyRule::parse(&value(written)).map_err(|bad| {
                invalid(
                    key,
                    &origin.at(line),
                    &format!("rule {number}"),
                    RULES,
                    Some(bad.to_string()),
                )
            })?;
            // The reader of an approval request need not know the path of the file.
            let place = match line {
                Some(line) => format!("line {line} of the configuration file"),
                None => format!("rule {number} of `approvals`"),
            };
            policy.add(rule, &place);
        }
        Ok(())
    }
}

fn first_line(written: &WrittenValue) -> Option<u64> {
    match written {
        WrittenValue::Table(members) => members.first().and_then(|member| member.line),
        _ => None,
    }
}

fn value(written: &WrittenValue) -> Value {
    match written {
        WrittenValue::Nothing => Value::Null,
        WrittenValue::Text(text) => Value::String(text.clone()),
        WrittenValue::List(items) => Value::Array(items.iter().map(value).collect()),
        WrittenValue::Table(members) => {
            let members = members
                .iter()
                .map(|member| (member.name.clone(), value(&member.value)));
            Value::Object(members.collect::<Map<_, _>>())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::case;
    use super::*;
    use crate::approval::{Subject, Verdict};

    fn tool(server: &str, name: &str) -> Subject {
        Subject::Tool {
            server: server.to_owned(),
            tool: name.to_owned(),
            arguments: Map::new(),
            fingerprint: None,
        }
    }

    #[test]
    fn without_a_word_nothing_is_asked() {
        let approvals = case().settings().approvals;
        assert_eq!(
            (approvals.policy, approvals.remember),
            (Policy::default(), false)
        );
        assert_eq!(approvals.timeout, Duration::from_secs(600));
    }

    #[test]
    fn rules_are_named_by_the_line_on_which_they_were_written() {
        let yaml = "approve_tools: ask\napprovals:\n  - allow: {server: time, tool: '*'}\n  - \
                    deny:\n      tool: delete_*\n";
        let policy = case().yaml(yaml).settings().approvals.policy;
        assert_eq!(policy.verdict(&tool("time", "now")), Verdict::Allow);
        let line = "`deny: {tool: \"delete_*\"}` (line 4 of the configuration file)".to_owned();
        assert_eq!(
            policy.verdict(&tool("github", "delete_all")),
            Verdict::Deny { line }
        );
        let line = "`approve_tools: ask`".to_owned();
        assert_eq!(
            policy.verdict(&tool("github", "get")),
            Verdict::Ask { line }
        );
    }

    #[test]
    fn the_simple_cases_are_flags_and_variables_too() {
        let asks = |case: super::super::tests::Case, subject: Subject| {
            matches!(
                case.settings().approvals.policy.verdict(&subject),
                Verdict::Ask { .. }
            )
        };
        let shell = || Subject::Shell {
            command: "ls".to_owned(),
            kind: "!".to_owned(),
        };
        let domain = || Subject::Domain {
            name: "example.com".to_owned(),
            port: 443,
        };
        assert!(asks(case().flag(Key::ApproveTools, "ask"), tool("s", "t")));
        assert!(asks(
            case().variable("CELLBLOCK_APPROVE_SHELL", "ask"),
            shell()
        ));
        assert!(asks(
            case().yaml("approve_packages: ask"),
            Subject::Install {
                requirements: vec!["x".to_owned()]
            }
        ));
        assert!(asks(case().flag(Key::ApproveDomains, "ask"), domain()));
        assert!(!asks(
            case()
                .yaml("approve_shell: ask")
                .flag(Key::ApproveShell, "allow"),
            shell()
        ));
    }

    #[test]
    fn mistakes_are_refused_with_their_place() {
        let refusal = |yaml: &str| case().yaml(yaml).refusal();
        for (yaml, words) in [
            ("approve_tools: maybe", "allow, ask or deny"),
            ("approve_domains: allow", "allow_network"),
            ("approvals: ask", "a list of rules"),
            (
                "approvals:\n  - ask: {tool: x}\n  - ask: {tol: x}\n",
                "line 3",
            ),
            (
                "approvals:\n  - ask: {tool: x, command: y}\n",
                "not about several",
            ),
            ("approval_timeout: 1s", "5"),
            ("remember_approvals: perhaps", "on or off"),
        ] {
            assert!(refusal(yaml).contains(words), "{yaml}: {}", refusal(yaml));
        }
    }

    #[test]
    fn how_long_somebody_may_think_and_what_is_remembered_can_be_chosen() {
        let approvals = case()
            .yaml("approval_timeout: 2m\nremember_approvals: on")
            .settings()
            .approvals;
        assert_eq!(
            (approvals.timeout, approvals.remember),
            (Duration::from_secs(120), true)
        );
    }
}
