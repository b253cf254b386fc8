//! Callers and their scopes.

use std::time::SystemTime;

/// An authenticated caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// Identifies the caller permanently and uniquely.
    pub principal: String,
    pub scopes: Scopes,
    /// When the credentials expire; `None` if they do not.
    pub expires: Option<SystemTime>,
}

impl Caller {
    /// The only caller of a stdio server: the user who started it, with all scopes.
    pub fn local() -> Caller {
        Caller {
            principal: "local".to_owned(),
            scopes: Scopes::everything(),
            expires: None,
        }
    }
}

/// A right that a token can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Run code: everything about one's own sessions except installing packages and registering
    /// servers.
    Execute,
    /// See one's own sessions, their output and files, without changing anything.
    Read,
    /// Install packages into one's own sessions.
    Install,
    /// Register MCP servers for one's own sessions.
    Register,
    /// See the metrics of the whole server. Implies all others.
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [
        Scope::Execute,
        Scope::Read,
        Scope::Install,
        Scope::Register,
        Scope::Admin,
    ];

    /// The name used in tokens.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Execute => "python:execute",
            Scope::Read => "sessions:read",
            Scope::Install => "packages:install",
            Scope::Register => "mcp:register",
            Scope::Admin => "admin",
        }
    }

    pub fn from_name(name: &str) -> Option<Scope> {
        Scope::ALL.into_iter().find(|scope| scope.name() == name)
    }
}

/// A set of scopes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scopes(u8);

impl Scopes {
    pub fn everything() -> Scopes {
        Scope::ALL.into_iter().collect()
    }

    /// Returns whether an action that needs `scope` is allowed. `admin` implies all scopes, and the
    /// scope to run code implies the scope to read.
    pub fn allow(self, scope: Scope) -> bool {
        self.contain(scope)
            || self.contain(Scope::Admin)
            || (scope == Scope::Read && self.contain(Scope::Execute))
    }

    /// Returns whether exactly this scope is among them.
    pub fn contain(self, scope: Scope) -> bool {
        self.0 & (1 << scope as u8) != 0
    }
}

impl FromIterator<Scope> for Scopes {
    fn from_iter<I: IntoIterator<Item = Scope>>(scopes: I) -> Scopes {
        Scopes(
            scopes
                .into_iter()
                .fold(0, |set, scope| set | 1 << scope as u8),
        )
    }
}
