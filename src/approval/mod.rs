//! Approvals: which actions of running code are allowed, denied, or need a person's decision.
//!
//! ```text
//!   rules of the operator, in order   ┐
//!   defaults                          ├─ Policy ─▶ Verdict: allow
//!   rules of one registered server    ┘                     deny (by this line)
//!                                                           ask  (because of this line)
//!                                                             │
//!         SessionGrants, ApprovalStore: was it granted before? ◀┘
//! ```
//!
//! A `Subject` is an action that is about to happen: a call of another server's tool, a shell
//! command, an installation, a connection to a name. `Policy` decides about it by the first
//! matching rule. `SessionGrants` holds the grants for one session, `ApprovalStore` the permanent
//! ones. Both only turn *ask* into *allow*: no grant overrides a `deny`. A grant for a tool is
//! bound to that tool's `Fingerprint`, and does not apply to another tool of its name. `shown`
//! renders the text that the person reads, in which nothing is hidden.
//!
//! Everything except the file of the approval store is pure. This module does not depend on
//! sessions, on MCP, or on how a person is asked.

mod fingerprint;
mod grants;
mod pattern;
mod policy;
mod rule;
mod shown;
mod store;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use fingerprint::Fingerprint;
pub use grants::{PermissionScope, SessionGrants};
pub use pattern::{BadPattern, Pattern};
pub use policy::{Defaults, Policy};
pub use rule::{BadRule, PolicyRule, registered_rules, registration};
pub use shown::{Rendering, digest, visible};
pub use store::{ApprovalStore, ApprovalStoreError};

/// An action that is about to happen.
#[derive(Debug, Clone, PartialEq)]
pub enum Subject {
    /// A call of a tool of another MCP server. `fingerprint` is the identity of the tool when the
    /// call was inspected, if it is known.
    Tool {
        server: String,
        tool: String,
        arguments: Map<String, Value>,
        fingerprint: Option<Fingerprint>,
    },
    /// A command line, or the body of a cell that a program runs. `kind` is the syntax it was
    /// written in, such as `!` or `%%bash`.
    Shell { command: String, kind: String },
    /// Packages, in pip's syntax.
    Install { requirements: Vec<String> },
    /// A connection to a name that no rule of the network lists.
    Domain { name: String, port: u16 },
}

impl Subject {
    /// Its name in records.
    pub fn kind(&self) -> &'static str {
        match self {
            Subject::Tool { .. } => "tool",
            Subject::Shell { .. } => "shell",
            Subject::Install { .. } => "packages",
            Subject::Domain { .. } => "domain",
        }
    }

    /// Bytes of text in it. The arguments of a tool are counted where they are parsed.
    pub fn text_bytes(&self) -> usize {
        match self {
            Subject::Tool { server, tool, .. } => server.len() + tool.len(),
            Subject::Shell { command, kind } => command.len() + kind.len(),
            Subject::Install { requirements } => requirements.iter().map(String::len).sum(),
            Subject::Domain { name, .. } => name.len(),
        }
    }

    /// The setting by which the operator can change the decision.
    pub fn setting(&self) -> &'static str {
        match self {
            Subject::Tool { .. } => "approve_tools",
            Subject::Shell { .. } => "approve_shell",
            Subject::Install { .. } => "approve_packages",
            Subject::Domain { .. } => "approve_domains",
        }
    }
}

/// The effect of a rule, ordered from least to most strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Effect {
    Allow,
    Ask,
    Deny,
}

impl Effect {
    pub const ALL: [Effect; 3] = [Effect::Allow, Effect::Ask, Effect::Deny];

    /// Its name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Effect::Allow => "allow",
            Effect::Ask => "ask",
            Effect::Deny => "deny",
        }
    }

    pub fn from_name(name: &str) -> Option<Effect> {
        Effect::ALL.into_iter().find(|effect| effect.name() == name)
    }
}

/// The decision of the policy on a subject. `line` is the deciding rule, as the operator wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    Ask { line: String },
    Deny { line: String },
}

impl Verdict {
    fn new(effect: Effect, line: impl FnOnce() -> String) -> Verdict {
        match effect {
            Effect::Allow => Verdict::Allow,
            Effect::Ask => Verdict::Ask { line: line() },
            Effect::Deny => Verdict::Deny { line: line() },
        }
    }

    fn effect(&self) -> Effect {
        match self {
            Verdict::Allow => Effect::Allow,
            Verdict::Ask { .. } => Effect::Ask,
            Verdict::Deny { .. } => Effect::Deny,
        }
    }

    /// Returns the stricter of two verdicts; the first one when they are equally strict.
    pub fn or_stricter(self, other: Verdict) -> Verdict {
        if other.effect() > self.effect() {
            other
        } else {
            self
        }
    }
}

/// A person's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ApprovalAnswer {
    Once,
    /// Also for everything else in this session that its `Scope` covers.
    Session,
    /// Also for everything of that kind in every later session of the same owner.
    Always,
    Deny,
}

impl ApprovalAnswer {
    pub const ALL: [ApprovalAnswer; 4] = [
        ApprovalAnswer::Once,
        ApprovalAnswer::Session,
        ApprovalAnswer::Always,
        ApprovalAnswer::Deny,
    ];

    /// Its name in forms and records.
    pub fn name(self) -> &'static str {
        match self {
            ApprovalAnswer::Once => "once",
            ApprovalAnswer::Session => "session",
            ApprovalAnswer::Always => "always",
            ApprovalAnswer::Deny => "deny",
        }
    }

    pub fn from_name(name: &str) -> Option<ApprovalAnswer> {
        ApprovalAnswer::ALL
            .into_iter()
            .find(|answer| answer.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_of_two_verdicts_counts_and_the_first_of_two_alike() {
        let ask = |line: &str| Verdict::Ask {
            line: line.to_owned(),
        };
        let deny = Verdict::Deny {
            line: "d".to_owned(),
        };
        assert_eq!(Verdict::Allow.or_stricter(ask("a")), ask("a"));
        assert_eq!(ask("a").or_stricter(Verdict::Allow), ask("a"));
        assert_eq!(ask("a").or_stricter(ask("b")), ask("a"));
        assert_eq!(ask("a").or_stricter(deny.clone()), deny);
    }

    #[test]
    fn every_word_names_what_it_was_made_from() {
        for effect in Effect::ALL {
            assert_eq!(Effect::from_name(effect.name()), Some(effect));
        }
        for answer in ApprovalAnswer::ALL {
            assert_eq!(ApprovalAnswer::from_name(answer.name()), Some(answer));
        }
        assert_eq!(
            (Effect::from_name("Allow"), ApprovalAnswer::from_name("")),
            (None, None)
        );
    }
}
