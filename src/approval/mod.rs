//! Approvals: what running code may do at once, never, or when a person has said so.
//!
//! ```text
//!   rules of the operator, in order   ┐
//!   what is so without a rule         ├─ Policy ─ verdict ─▶ allow · deny (by this line) · ask (because of this line)
//!   rules of one registered server    ┘                                                       │
//!                                                       Memory, Book: was it allowed before? ◀┘
//! ```
//!
//! A `Subject` is what is about to happen: a call of another server's tool, a shell command, an installation, a connection to a name. `Policy` decides
//! about it, and the first rule that fits wins. `Memory` holds what a person has allowed for one session, `Book` what they have allowed for good. Both only turn
//! *ask* into *allow*: nobody can be talked out of a `deny`. A permission for a tool counts for what that tool was, its `Fingerprint`, and for no other tool of its name. `shown` writes the words that the person reads, in which nothing is hidden.
//!
//! Everything but the file of the book is pure. This room knows nothing of sessions, of MCP, or of how a person is asked.

mod book;
mod fingerprint;
mod memory;
mod pattern;
mod policy;
mod rule;
mod shown;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use book::{Book, BookError};
pub use fingerprint::Fingerprint;
pub use memory::{Memory, Scope};
pub use pattern::{BadPattern, Pattern};
pub use policy::{Defaults, Policy};
pub use rule::{BadRule, Rule, registered_rules, registration};
pub use shown::{Rendering, digest, visible};

/// What is about to happen.
#[derive(Debug, Clone, PartialEq)]
pub enum Subject {
    /// A call of a tool of another MCP server. `fingerprint` is what the tool was when the call was looked at, where that is known.
    Tool {
        server: String,
        tool: String,
        arguments: Map<String, Value>,
        fingerprint: Option<Fingerprint>,
    },
    /// A command line, or the body of a cell that a program runs. `kind` is how it was written, such as `!` or `%%bash`.
    Shell { command: String, kind: String },
    /// Packages, as pip takes them.
    Install { requirements: Vec<String> },
    /// A connection to a name that no rule of the network lists.
    Domain { name: String, port: u16 },
}

impl Subject {
    /// The word for it in records.
    pub fn kind(&self) -> &'static str {
        match self {
            Subject::Tool { .. } => "tool",
            Subject::Shell { .. } => "shell",
            Subject::Install { .. } => "packages",
            Subject::Domain { .. } => "domain",
        }
    }

    /// Bytes of text in it. The arguments of a tool are counted by whoever has read them.
    pub fn text_bytes(&self) -> usize {
        match self {
            Subject::Tool { server, tool, .. } => server.len() + tool.len(),
            Subject::Shell { command, kind } => command.len() + kind.len(),
            Subject::Install { requirements } => requirements.iter().map(String::len).sum(),
            Subject::Domain { name, .. } => name.len(),
        }
    }

    /// What the operator can change so that it is decided otherwise.
    pub fn setting(&self) -> &'static str {
        match self {
            Subject::Tool { .. } => "approve_tools",
            Subject::Shell { .. } => "approve_shell",
            Subject::Install { .. } => "approve_packages",
            Subject::Domain { .. } => "approve_domains",
        }
    }
}

/// What a rule says. The order is from loose to strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Effect {
    Allow,
    Ask,
    Deny,
}

impl Effect {
    pub const ALL: [Effect; 3] = [Effect::Allow, Effect::Ask, Effect::Deny];

    /// The word for it in settings.
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

/// What the policy says about a subject. `line` is the rule that decided, as the operator wrote it.
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

    /// Returns the stricter of two verdicts; the first one when they are alike.
    pub fn or_stricter(self, other: Verdict) -> Verdict {
        if other.effect() > self.effect() {
            other
        } else {
            self
        }
    }
}

/// What a person answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Once,
    /// Also for everything else in this session that `Scope` says.
    Session,
    /// Also for everything of that kind in every later session of the same owner.
    Always,
    Deny,
}

impl Answer {
    pub const ALL: [Answer; 4] = [Answer::Once, Answer::Session, Answer::Always, Answer::Deny];

    /// The word for it in forms and records.
    pub fn name(self) -> &'static str {
        match self {
            Answer::Once => "once",
            Answer::Session => "session",
            Answer::Always => "always",
            Answer::Deny => "deny",
        }
    }

    pub fn from_name(name: &str) -> Option<Answer> {
        Answer::ALL.into_iter().find(|answer| answer.name() == name)
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
        for answer in Answer::ALL {
            assert_eq!(Answer::from_name(answer.name()), Some(answer));
        }
        assert_eq!(
            (Effect::from_name("Allow"), Answer::from_name("")),
            (None, None)
        );
    }
}
