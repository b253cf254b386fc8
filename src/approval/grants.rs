//! Grants of one session, and the scope of a grant.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::shown::visible;
use super::{Fingerprint, PolicyRule, Subject};

/// Limit of grants per session. Beyond it, the person is asked again.
const MAX_HELD: usize = 1000;

/// What a grant beyond a single use covers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PermissionScope {
    /// Every call of this tool, whatever its arguments, as long as the tool is unchanged.
    Tool {
        server: String,
        tool: String,
        fingerprint: Option<Fingerprint>,
    },
    /// Exactly this command, written in this way.
    Command { command: String, kind: String },
    /// Every version of this package.
    Package { name: String },
    /// Every connection to this name at this port.
    Domain { name: String, port: u16 },
}

impl PermissionScope {
    /// Returns the grants that a subject needs; if there are several, all of them are needed.
    pub fn of(subject: &Subject) -> Vec<PermissionScope> {
        match subject {
            Subject::Tool {
                server,
                tool,
                fingerprint,
                ..
            } => {
                let (server, tool, fingerprint) =
                    (server.clone(), tool.clone(), fingerprint.clone());
                vec![PermissionScope::Tool {
                    server,
                    tool,
                    fingerprint,
                }]
            }
            Subject::Shell { command, kind } => {
                vec![PermissionScope::Command {
                    command: command.clone(),
                    kind: kind.clone(),
                }]
            }
            Subject::Install { requirements } => requirements
                .iter()
                .map(|requirement| PermissionScope::Package {
                    name: package_of(requirement),
                })
                .collect(),
            Subject::Domain { name, port } => {
                vec![PermissionScope::Domain {
                    name: name.to_ascii_lowercase(),
                    port: *port,
                }]
            }
        }
    }

    /// Describes briefly what a grant covers, for the person who gives it.
    pub fn words(subject: &Subject) -> String {
        match subject {
            Subject::Tool { server, tool, .. } => {
                format!(
                    "every call of {}.{}, whatever its arguments",
                    visible(server),
                    visible(tool)
                )
            }
            Subject::Shell { .. } => "exactly this command".to_owned(),
            Subject::Install { requirements } => {
                let mut names = requirements
                    .iter()
                    .map(|requirement| package_of(requirement))
                    .collect::<Vec<_>>();
                names.dedup();
                let all = names.join(", ");
                let shown: String = all.chars().take(200).collect();
                let more = if shown.len() < all.len() { " …" } else { "" };
                format!("every version of {}{more}", visible(&shown))
            }
            Subject::Domain { name, port } => {
                format!("every connection to {} at port {port}", visible(name))
            }
        }
    }

    /// Returns the equivalent rule.
    pub(super) fn rule(&self) -> PolicyRule {
        PolicyRule::exactly(super::Effect::Allow, self)
    }
}

/// Grants of one session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionGrants(BTreeSet<PermissionScope>);

impl SessionGrants {
    pub fn allow(&mut self, subject: &Subject) {
        for scope in PermissionScope::of(subject) {
            if self.0.len() < MAX_HELD {
                self.0.insert(scope);
            }
        }
    }

    /// Returns whether everything about a subject is granted.
    pub fn covers(&self, subject: &Subject) -> bool {
        let needed = PermissionScope::of(subject);
        !needed.is_empty() && needed.iter().all(|scope| self.0.contains(scope))
    }

    /// Takes over the grants of another session.
    pub fn inherit(&mut self, other: &SessionGrants) {
        let room = MAX_HELD.saturating_sub(self.0.len());
        self.0.extend(other.0.iter().take(room).cloned());
    }

    /// Drops the grants for the tools of a server, because the name may now belong to another
    /// server.
    pub fn forget_server(&mut self, name: &str) {
        self.0.retain(
            |scope| !matches!(scope, PermissionScope::Tool { server, .. } if server == name),
        );
    }
}

/// Returns the key of a requirement: its normalized name if it is a name with extras and versions,
/// otherwise the whole text. A name with a URL is not the package of that name.
pub(super) fn package_of(requirement: &str) -> String {
    let text = requirement.trim();
    let name_ends = text
        .find(|letter: char| !is_of_a_name(letter))
        .unwrap_or(text.len());
    let (name, rest) = text.split_at(name_ends);
    let is_version = |letter: char| {
        is_of_a_name(letter) || matches!(letter, '<' | '>' | '=' | '!' | '~' | ',' | '*' | '+')
    };
    let rest = match rest
        .strip_prefix('[')
        .and_then(|extras| extras.split_once(']'))
    {
        Some((extras, rest))
            if extras
                .chars()
                .all(|letter| is_of_a_name(letter) || letter == ',') =>
        {
            rest
        }
        _ => rest,
    };
    let is_plain = rest.is_empty()
        || (rest.starts_with(['<', '>', '=', '!', '~']) && rest.chars().all(is_version));
    if !name.is_empty() && is_plain {
        normal_name(name)
    } else {
        text.to_owned()
    }
}

fn is_of_a_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.')
}

/// Normalizes a package name.
pub(super) fn normal_name(name: &str) -> String {
    let mut normal = String::with_capacity(name.len());
    for letter in name.trim().chars() {
        match letter {
            '-' | '_' | '.' if normal.ends_with('-') => {}
            '-' | '_' | '.' => normal.push('-'),
            other => normal.push(other.to_ascii_lowercase()),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn call(tool: &str, arguments: serde_json::Value) -> Subject {
        call_of(tool, arguments, None)
    }

    fn call_of(
        tool: &str,
        arguments: serde_json::Value,
        fingerprint: Option<Fingerprint>,
    ) -> Subject {
        let arguments = arguments.as_object().cloned().unwrap_or_default();
        Subject::Tool {
            server: "s".to_owned(),
            tool: tool.to_owned(),
            arguments,
            fingerprint,
        }
    }

    fn shell(command: &str) -> Subject {
        Subject::Shell {
            command: command.to_owned(),
            kind: "!".to_owned(),
        }
    }

    fn install(requirements: &[&str]) -> Subject {
        Subject::Install {
            requirements: requirements.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_permission_covers_the_tool_the_exact_command_the_name_and_the_port() {
        let mut memory = SessionGrants::default();
        let domain = |port| Subject::Domain {
            name: "A.com".to_owned(),
            port,
        };
        for subject in [
            call("t", json!({"a": 1})),
            shell("ls -l"),
            install(&["numpy>=2"]),
            domain(443),
        ] {
            assert!(!memory.covers(&subject));
            memory.allow(&subject);
            assert!(memory.covers(&subject));
        }
        assert!(
            memory.covers(&call("t", json!({"a": 2}))) && !memory.covers(&call("u", json!({})))
        );
        assert!(!memory.covers(&shell("ls -l ")));
        assert!(
            memory.covers(&install(&["NumPy"])) && !memory.covers(&install(&["numpy", "pandas"]))
        );
        assert!(!memory.covers(&install(&["numpy @ https://example.com/n.whl"])));
        assert!(
            memory.covers(&Subject::Domain {
                name: "a.COM".to_owned(),
                port: 443
            }) && !memory.covers(&domain(80))
        );
    }

    #[test]
    fn nothing_is_covered_by_an_empty_question() {
        assert!(!SessionGrants::default().covers(&install(&[])));
    }

    #[test]
    fn a_tool_that_is_another_one_is_asked_about_again() {
        let made = |text: &str| call_of("t", json!({}), Some(Fingerprint::of(&[text.as_bytes()])));
        let mut memory = SessionGrants::default();
        memory.allow(&made("one"));
        assert!(memory.covers(&made("one"))); // Control.
        assert!(!memory.covers(&made("other")) && !memory.covers(&call("t", json!({}))));
    }

    #[test]
    fn another_server_of_the_same_name_is_asked_about_again() {
        let mut memory = SessionGrants::default();
        memory.allow(&call("t", json!({})));
        memory.allow(&shell("ls"));
        memory.forget_server("other");
        assert!(memory.covers(&call("t", json!({}))));
        memory.forget_server("s");
        assert!(!memory.covers(&call("t", json!({}))) && memory.covers(&shell("ls")));
    }

    #[test]
    fn a_session_holds_so_many_permissions_and_its_forks_have_the_same() {
        let mut memory = SessionGrants::default();
        (0..=MAX_HELD).for_each(|number| memory.allow(&shell(&number.to_string())));
        assert!(memory.covers(&shell("0")) && !memory.covers(&shell(&MAX_HELD.to_string())));
        let mut fork = SessionGrants::default();
        fork.inherit(&memory);
        assert_eq!(fork, memory);
    }

    #[test]
    fn a_permission_says_the_same_as_its_rule() {
        for subject in [
            call("t*", Map::new().into()),
            shell("rm *"),
            Subject::Domain {
                name: "a".to_owned(),
                port: 1,
            },
        ] {
            let rule = PermissionScope::of(&subject)[0].rule();
            assert!(rule.fits(&subject), "{rule}");
        }
        assert!(
            !PermissionScope::of(&shell("rm *"))[0]
                .rule()
                .fits(&shell("rm -rf /"))
        );
    }
}
