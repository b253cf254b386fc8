//! Rules of the operator, one per line.
//!
//! ```yaml
//! approvals:
//!   - ask:   {server: "github", tool: "create_*"}
//!   - allow: {server: "files", tool: "write_file", arguments: {path: "/tmp/*"}}
//!   - deny:  {command: "rm *"}
//!   - allow: {package: "numpy"}
//!   - ask:   {domain: "*.example.com", port: 443}
//! ```
//!
//! A rule is read from a parsed tree of texts, independent of the parser, and prints in a form that
//! can be parsed again.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::shown::quoted;
use super::{BadPattern, Effect, Pattern, Policy, Subject};

/// Limit of rules in one registration.
const MAX_REGISTERED: usize = 100;

/// An effect and the subjects it applies to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRule {
    pub effect: Effect,
    about: About,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum About {
    Tools {
        server: Pattern,
        tool: Pattern,
        arguments: Vec<(String, Pattern)>,
    },
    Shell {
        command: Pattern,
        kind: Option<Pattern>,
    },
    Packages {
        name: Pattern,
    },
    Domains {
        name: Pattern,
        port: Option<u16>,
    },
}

/// A malformed rule. The error repeats the written text, since an operator wrote it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRule {
    #[error(
        "a rule is one of `allow`, `ask` and `deny` with what it is about, such as `ask: \
         {{server: \"github\", tool: \"create_*\"}}`"
    )]
    Form,
    #[error(
        "`{0}` is nothing that a rule can be about; there are server, tool, arguments, command, \
         kind, package, domain and port"
    )]
    UnknownKey(String),
    #[error(
        "a rule is about tools (server, tool, arguments), or commands (command, kind), or a \
         package, or a domain (domain, port), and not about several of them"
    )]
    Mixed,
    #[error("`{key}` must be a text")]
    NoText { key: String },
    #[error("`arguments` must name arguments, such as `{{path: \"/tmp/*\"}}`")]
    Arguments,
    #[error("`port` must be a number between 1 and 65535")]
    Port,
    #[error("`{key}`: {cause}")]
    Pattern { key: String, cause: BadPattern },
    #[error(
        "the rules of a registered server are about its own tools: only `tool` and `arguments` can \
         be named"
    )]
    NotItsTools,
    #[error("`fingerprint` must be 64 hexadecimal digits")]
    Fingerprint,
    #[error("{0} rules are too many; a registration may carry {MAX_REGISTERED}")]
    TooMany(usize),
}

impl PolicyRule {
    /// Parses a rule.
    pub fn parse(written: &Value) -> Result<PolicyRule, BadRule> {
        let (effect, about) = one_member(written).ok_or(BadRule::Form)?;
        let effect = Effect::from_name(effect).ok_or(BadRule::Form)?;
        let about = about
            .as_object()
            .filter(|about| !about.is_empty())
            .ok_or(BadRule::Form)?;
        Ok(PolicyRule {
            effect,
            about: About::parse(about)?,
        })
    }

    /// Returns a rule for one tool, one command line, one package or one domain, and nothing else.
    pub(super) fn exactly(effect: Effect, scope: &super::PermissionScope) -> PolicyRule {
        let about = match scope {
            super::PermissionScope::Tool { server, tool, .. } => About::Tools {
                server: Pattern::exactly(server),
                tool: Pattern::exactly(tool),
                arguments: Vec::new(),
            },
            super::PermissionScope::Command { command, kind } => About::Shell {
                command: Pattern::exactly(command),
                kind: Some(Pattern::exactly(kind)),
            },
            super::PermissionScope::Package { name } => About::Packages {
                name: Pattern::exactly(name),
            },
            super::PermissionScope::Domain { name, port } => About::Domains {
                name: Pattern::exactly(name),
                port: Some(*port),
            },
        };
        PolicyRule { effect, about }
    }

    /// Returns whether the rule matches a subject that is not an installation.
    pub(super) fn fits(&self, subject: &Subject) -> bool {
        match (&self.about, subject) {
            (
                About::Tools {
                    server,
                    tool,
                    arguments,
                },
                Subject::Tool {
                    server: of,
                    tool: called,
                    arguments: given,
                    ..
                },
            ) => {
                server.fits(of)
                    && tool.fits(called)
                    && arguments
                        .iter()
                        .all(|(key, pattern)| self.fits_argument(pattern, given.get(key)))
            }
            (
                About::Shell { command, kind },
                Subject::Shell {
                    command: line,
                    kind: how,
                },
            ) => command.fits(line) && kind.as_ref().is_none_or(|kind| kind.fits(how)),
            (
                About::Domains { name, port },
                Subject::Domain {
                    name: wanted,
                    port: at,
                },
            ) => name.fits(&wanted.to_ascii_lowercase()) && port.is_none_or(|port| port == *at),
            _ => false,
        }
    }

    /// Returns whether the rule matches one requirement of an installation.
    pub(super) fn fits_package(&self, package: &str) -> bool {
        matches!(&self.about, About::Packages { name } if name.fits(package))
    }

    pub(super) fn is_about_tools(&self) -> bool {
        matches!(self.about, About::Tools { .. })
    }

    pub(super) fn is_about_commands(&self) -> bool {
        matches!(self.about, About::Shell { .. })
    }

    /// Returns whether the rule is about network names.
    pub(super) fn is_about_domains(&self) -> bool {
        matches!(self.about, About::Domains { .. })
    }

    /// Returns whether the rule may match this name, at any port.
    pub(super) fn fits_name(&self, wanted: &str) -> bool {
        matches!(
            &self.about,
            About::Domains { name, .. } if name.fits(&wanted.to_ascii_lowercase())
        )
    }

    /// Matches an argument. A value that is not a text is compared in its JSON form.
    ///
    /// `/tmp/*` means paths below `/tmp`. So a star of a rule that allows does not match `..`,
    /// which a rule that asks or denies must not miss.
    fn fits_argument(&self, pattern: &Pattern, value: Option<&Value>) -> bool {
        let Some(value) = value else { return false };
        let text = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let climbs = text.split(['/', '\\']).any(|part| part == "..");
        let overlooks =
            climbs && self.effect == Effect::Allow && pattern.is_open() && !pattern.spells("..");
        !overlooks && pattern.fits(&text)
    }

    /// Returns the same rule for the tools of one server only. `None` when it is about something
    /// else.
    fn of_server(self, name: &str) -> Option<PolicyRule> {
        match self.about {
            About::Tools {
                server,
                tool,
                arguments,
            } if server == Pattern::anything() => {
                let about = About::Tools {
                    server: Pattern::exactly(name),
                    tool,
                    arguments,
                };
                Some(PolicyRule {
                    effect: self.effect,
                    about,
                })
            }
            _ => None,
        }
    }
}

/// Parses the `approval` of a registered server: one word for all its tools, or rules for them.
pub fn registered_rules(server: &str, written: &Value) -> Result<Vec<PolicyRule>, BadRule> {
    let rules = match written {
        Value::String(word) => {
            let effect = Effect::from_name(word).ok_or(BadRule::Form)?;
            let about = About::Tools {
                server: Pattern::anything(),
                tool: Pattern::anything(),
                arguments: Vec::new(),
            };
            vec![PolicyRule { effect, about }]
        }
        Value::Array(rules) if rules.len() > MAX_REGISTERED => {
            return Err(BadRule::TooMany(rules.len()));
        }
        Value::Array(rules) => rules
            .iter()
            .map(PolicyRule::parse)
            .collect::<Result<_, _>>()?,
        _ => return Err(BadRule::Form),
    };
    rules
        .into_iter()
        .map(|rule| rule.of_server(server).ok_or(BadRule::NotItsTools))
        .collect()
}

/// Removes `approval` from the parameters of a server. Returns the remaining parameters, and the
/// server's own policy if it has one.
pub fn registration(server: &str, params: &Value) -> Result<(Value, Option<Policy>), BadRule> {
    let mut params = params.clone();
    let Some(written) = params
        .as_object_mut()
        .and_then(|members| members.remove("approval"))
    else {
        return Ok((params, None));
    };
    let mut policy = Policy::default();
    let place = format!("the registration of `{server}`");
    registered_rules(server, &written)?
        .into_iter()
        .for_each(|rule| policy.add(rule, &place));
    Ok((params, Some(policy)))
}

impl About {
    fn parse(written: &Map<String, Value>) -> Result<About, BadRule> {
        const KINDS: [&[&str]; 4] = [
            &["server", "tool", "arguments"],
            &["command", "kind"],
            &["package"],
            &["domain", "port"],
        ];
        if let Some(unknown) = written
            .keys()
            .find(|key| !KINDS.iter().any(|kind| kind.contains(&key.as_str())))
        {
            return Err(BadRule::UnknownKey(unknown.clone()));
        }
        let kind = KINDS
            .iter()
            .position(|kind| written.keys().all(|key| kind.contains(&key.as_str())));
        let text = |key: &str| {
            written
                .get(key)
                .map(|value| pattern(key, value))
                .transpose()
        };
        let lower = |key: &str| {
            written
                .get(key)
                .map(|value| pattern(key, &in_lower_case(value)))
                .transpose()
        };
        Ok(match kind.ok_or(BadRule::Mixed)? {
            0 => About::Tools {
                server: text("server")?.unwrap_or_else(Pattern::anything),
                tool: text("tool")?.unwrap_or_else(Pattern::anything),
                arguments: written
                    .get("arguments")
                    .map(arguments)
                    .transpose()?
                    .unwrap_or_default(),
            },
            1 => About::Shell {
                command: text("command")?.unwrap_or_else(Pattern::anything),
                kind: text("kind")?,
            },
            2 => About::Packages {
                name: pattern("package", &as_one_name(&written["package"]))?,
            },
            _ => About::Domains {
                name: lower("domain")?.unwrap_or_else(Pattern::anything),
                port: written.get("port").map(port).transpose()?,
            },
        })
    }
}

fn one_member(written: &Value) -> Option<(&String, &Value)> {
    let members = written.as_object()?;
    if members.len() == 1 {
        members.iter().next()
    } else {
        None
    }
}

fn pattern(key: &str, written: &Value) -> Result<Pattern, BadRule> {
    let text = match written {
        Value::String(text) => text.clone(),
        // A bare number or `true` in a file is an unquoted text.
        Value::Number(_) | Value::Bool(_) => written.to_string(),
        _ => {
            return Err(BadRule::NoText {
                key: key.to_owned(),
            });
        }
    };
    Pattern::parse(&text).map_err(|cause| BadRule::Pattern {
        key: key.to_owned(),
        cause,
    })
}

fn in_lower_case(written: &Value) -> Value {
    written.as_str().map_or_else(
        || written.clone(),
        |text| Value::String(text.to_ascii_lowercase()),
    )
}

/// Normalizes a package name. A text that is not a name, such as a URL, is unchanged.
fn as_one_name(written: &Value) -> Value {
    match written.as_str() {
        Some(text) if !text.contains([':', '/', '@', ' ']) => {
            Value::String(super::grants::normal_name(text))
        }
        _ => written.clone(),
    }
}

fn arguments(written: &Value) -> Result<Vec<(String, Pattern)>, BadRule> {
    let members = written
        .as_object()
        .filter(|members| !members.is_empty())
        .ok_or(BadRule::Arguments)?;
    members
        .iter()
        .map(|(key, value)| Ok((key.clone(), pattern(key, value)?)))
        .collect()
}

fn port(written: &Value) -> Result<u16, BadRule> {
    let number = match written {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    number
        .and_then(|number| u16::try_from(number).ok())
        .filter(|port| *port > 0)
        .ok_or(BadRule::Port)
}

impl fmt::Display for PolicyRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.effect.name(), self.about)
    }
}

impl fmt::Display for About {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |pattern: &Pattern| quoted(&pattern.to_string());
        let mut members = Vec::new();
        match self {
            About::Tools {
                server,
                tool,
                arguments,
            } => {
                if *server != Pattern::anything() {
                    members.push(format!("server: {}", text(server)));
                }
                members.push(format!("tool: {}", text(tool)));
                if !arguments.is_empty() {
                    let pairs = arguments
                        .iter()
                        .map(|(key, pattern)| format!("{}: {}", quoted(key), text(pattern)));
                    members.push(format!(
                        "arguments: {{{}}}",
                        pairs.collect::<Vec<_>>().join(", ")
                    ));
                }
            }
            About::Shell { command, kind } => {
                members.push(format!("command: {}", text(command)));
                members.extend(kind.iter().map(|kind| format!("kind: {}", text(kind))));
            }
            About::Packages { name } => members.push(format!("package: {}", text(name))),
            About::Domains { name, port } => {
                members.push(format!("domain: {}", text(name)));
                members.extend(port.iter().map(|port| format!("port: {port}")));
            }
        }
        write!(formatter, "{{{}}}", members.join(", "))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    pub(in crate::approval) fn rule(yaml: &str) -> PolicyRule {
        PolicyRule::parse(&serde_saphyr::from_str::<Value>(yaml).unwrap())
            .unwrap_or_else(|bad| panic!("{yaml}: {bad}"))
    }

    fn tool(server: &str, tool: &str, arguments: Value) -> Subject {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        Subject::Tool {
            server: server.to_owned(),
            tool: tool.to_owned(),
            arguments,
            fingerprint: None,
        }
    }

    #[test]
    fn a_rule_about_tools_names_server_tool_and_arguments() {
        let written =
            rule(r#"allow: {server: "files", tool: "write_*", arguments: {path: "/tmp/*"}}"#);
        assert!(written.fits(&tool(
            "files",
            "write_file",
            json!({"path": "/tmp/a", "more": 1})
        )));
        for other in [
            tool("other", "write_file", json!({"path": "/tmp/a"})),
            tool("files", "read_file", json!({"path": "/tmp/a"})),
            tool("files", "write_file", json!({"path": "/etc/passwd"})),
            tool("files", "write_file", json!({})),
        ] {
            assert!(!written.fits(&other), "{other:?}");
        }
    }

    #[test]
    fn an_argument_that_is_no_text_is_compared_as_json() {
        let written = rule("deny: {tool: t, arguments: {count: 5, list: '[1,*]'}}");
        assert!(written.fits(&tool("s", "t", json!({"count": 5, "list": [1, 2]}))));
        assert!(!written.fits(&tool("s", "t", json!({"count": 6, "list": [1, 2]}))));
    }

    #[test]
    fn a_star_that_allows_does_not_climb_out_and_one_that_denies_sees_it() {
        let climbing = tool("files", "read", json!({"path": "/tmp/../etc/passwd"}));
        let below = tool("files", "read", json!({"path": "/tmp/..a/b"}));
        let allowing = rule(r#"allow: {tool: read, arguments: {path: "/tmp/*"}}"#);
        let denying = rule(r#"deny: {tool: read, arguments: {path: "/tmp/*"}}"#);
        assert!(!allowing.fits(&climbing) && allowing.fits(&below));
        assert!(denying.fits(&climbing));
        assert!(rule(r#"allow: {tool: read, arguments: {path: "/tmp/../*"}}"#).fits(&climbing));
    }

    #[test]
    fn rules_about_commands_and_domains_fit_what_they_name() {
        let shell = |command: &str, kind: &str| Subject::Shell {
            command: command.to_owned(),
            kind: kind.to_owned(),
        };
        assert!(rule("deny: {command: 'rm *'}").fits(&shell("rm -rf x", "!")));
        assert!(!rule("deny: {command: 'rm *'}").fits(&shell("ls", "!")));
        assert!(rule("ask: {kind: '%%*'}").fits(&shell("ls", "%%bash")));
        assert!(!rule("ask: {kind: '%%*'}").fits(&shell("ls", "!")));
        let domain = |name: &str, port| Subject::Domain {
            name: name.to_owned(),
            port,
        };
        assert!(
            rule("ask: {domain: '*.Example.com', port: 443}").fits(&domain("API.example.com", 443))
        );
        assert!(
            !rule("ask: {domain: '*.example.com', port: 443}").fits(&domain("api.example.com", 80))
        );
        assert!(rule("ask: {port: 443}").fits(&domain("anything", 443)));
    }

    #[test]
    fn a_package_has_one_name_however_it_is_spelt() {
        let written = rule("allow: {package: 'Ruamel.Yaml_Clib'}");
        assert!(written.fits_package("ruamel-yaml-clib"));
        assert!(!written.fits_package("ruamel-yaml"));
        assert!(
            rule("deny: {package: '* @ *'}").fits_package("numpy @ https://example.com/numpy.whl")
        );
    }

    #[test]
    fn what_is_no_rule_is_refused_with_its_reason() {
        let bad = |yaml: &str| {
            PolicyRule::parse(&serde_saphyr::from_str::<Value>(yaml).unwrap()).unwrap_err()
        };
        for form in [
            "ask",
            "[]",
            "{}",
            "ask: {}",
            "ask: x",
            "maybe: {tool: x}",
            "{ask: {tool: x}, deny: {tool: x}}",
        ] {
            assert_eq!(bad(form), BadRule::Form, "{form}");
        }
        assert_eq!(bad("ask: {tol: x}"), BadRule::UnknownKey("tol".to_owned()));
        assert_eq!(bad("ask: {tool: x, command: y}"), BadRule::Mixed);
        assert_eq!(
            bad("ask: {tool: [x]}"),
            BadRule::NoText {
                key: "tool".to_owned()
            }
        );
        assert_eq!(bad("ask: {tool: x, arguments: y}"), BadRule::Arguments);
        assert_eq!(bad("ask: {tool: x, arguments: {}}"), BadRule::Arguments);
        for port in ["0", "65536", "-1", "x"] {
            assert_eq!(
                bad(&format!("ask: {{domain: x, port: {port}}}")),
                BadRule::Port,
                "{port}"
            );
        }
        let pattern = BadRule::Pattern {
            key: "tool".to_owned(),
            cause: BadPattern::Backslash,
        };
        assert_eq!(bad(r"ask: {tool: 'a\b'}"), pattern);
    }

    #[test]
    fn a_registration_carries_rules_for_its_own_tools_only() {
        let all = registered_rules("github", &json!("ask")).unwrap();
        assert_eq!(all, [rule(r#"ask: {server: github, tool: "*"}"#)]);
        assert!(
            all[0].fits(&tool("github", "x", json!({})))
                && !all[0].fits(&tool("other", "x", json!({})))
        );
        let some = registered_rules("github", &json!([{"deny": {"tool": "delete_*"}}])).unwrap();
        assert_eq!(some, [rule("deny: {server: github, tool: delete_*}")]);
        for foreign in [
            json!([{"allow": {"server": "other"}}]),
            json!([{"allow": {"command": "*"}}]),
        ] {
            assert_eq!(
                registered_rules("github", &foreign),
                Err(BadRule::NotItsTools),
                "{foreign}"
            );
        }
        assert_eq!(
            registered_rules("github", &json!("maybe")),
            Err(BadRule::Form)
        );
        let many = vec![json!({"ask": {"tool": "x"}}); MAX_REGISTERED + 1];
        assert_eq!(
            registered_rules("github", &json!(many)),
            Err(BadRule::TooMany(MAX_REGISTERED + 1))
        );
    }

    #[test]
    fn what_a_registration_says_about_approvals_is_taken_out_of_how_to_reach_the_server() {
        let (params, policy) =
            registration("github", &json!({"command": "x", "approval": "deny"})).unwrap();
        assert_eq!(params, json!({"command": "x"}));
        let verdict = policy.unwrap().verdict(&tool("github", "any", json!({})));
        let line =
            "`deny: {server: \"github\", tool: \"*\"}` (the registration of `github`)".to_owned();
        assert_eq!(verdict, crate::approval::Verdict::Deny { line });
        let (params, policy) = registration("github", &json!({"command": "x"})).unwrap();
        assert_eq!((params, policy), (json!({"command": "x"}), None));
        assert!(registration("github", &json!({"command": "x", "approval": "perhaps"})).is_err());
        assert_eq!(
            registration("github", &json!("x")),
            Ok((json!("x"), None)),
            "others say what is wrong with it"
        );
    }

    #[test]
    fn a_server_whose_name_has_stars_is_one_server() {
        let rules = registered_rules("a*", &json!("allow")).unwrap();
        assert!(
            rules[0].fits(&tool("a*", "x", json!({})))
                && !rules[0].fits(&tool("ab", "x", json!({})))
        );
    }

    fn texts() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            r#"[a-z*"'{}:,#\n\t\u{202e}\u{85}\u{feff}]{0,8}"#
        ]
    }

    fn rules() -> impl Strategy<Value = PolicyRule> {
        let pattern = || texts().prop_map(|text| Pattern::exactly(&text));
        let open = || {
            texts()
                .prop_map(|text| Pattern::parse(&format!("{}*", Pattern::exactly(&text))).unwrap())
        };
        let either = move || prop_oneof![pattern(), open()];
        let arguments = proptest::collection::btree_map(texts(), either(), 0..3);
        let about = prop_oneof![
            (either(), either(), arguments).prop_map(|(server, tool, arguments)| About::Tools {
                server,
                tool,
                arguments: arguments.into_iter().collect()
            }),
            (either(), proptest::option::of(either()))
                .prop_map(|(command, kind)| About::Shell { command, kind }),
            "[a-z0-9]{1,8}".prop_map(|name| About::Packages {
                name: Pattern::exactly(&name)
            }),
            ("[a-z.]{1,9}", proptest::option::of(1_u16..)).prop_map(|(name, port)| {
                About::Domains {
                    name: Pattern::exactly(&name),
                    port,
                }
            }),
        ];
        (proptest::sample::select(Effect::ALL.to_vec()), about)
            .prop_map(|(effect, about)| PolicyRule { effect, about })
    }

    proptest! {
        #[test]
        fn what_is_printed_is_one_line_of_yaml_for_the_same_rule(written in rules()) {
            let printed = written.to_string();
            prop_assert!(!printed.contains('\n'));
            let read = serde_saphyr::from_str::<Value>(&printed);
            prop_assert!(read.is_ok(), "{}: {:?}", printed, read);
            prop_assert_eq!(PolicyRule::parse(&read.unwrap()), Ok(written));
        }
    }
}
