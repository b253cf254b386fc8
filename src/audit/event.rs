//! The audit events: one type per kind, none of which can hold code, output or a token.

use std::time::Duration;

use serde::{Serialize, Serializer};
use sha2::Digest as _;

use super::text::{List, Text};

/// A decision or an action.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub kind: Kind,
    /// The principal; `None` when the caller is unknown, or the server itself acts.
    pub principal: Option<Text>,
    pub session: Option<Text>,
    /// Correlates records, log lines and traces of one request.
    pub request: Option<Text>,
    pub decision: PolicyDecision,
}

/// Whether it was allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyDecision {
    Allowed,
    Denied { rule: Text },
}

impl Event {
    /// Creates an allowed event without a principal.
    pub fn new(kind: impl Into<Kind>) -> Event {
        Event {
            kind: kind.into(),
            principal: None,
            session: None,
            request: None,
            decision: PolicyDecision::Allowed,
        }
    }

    pub fn by(mut self, principal: impl Into<Text>) -> Event {
        self.principal = Some(principal.into());
        self
    }

    pub fn in_session(mut self, session: impl Into<Text>) -> Event {
        self.session = Some(session.into());
        self
    }

    pub fn for_request(mut self, request: impl Into<Text>) -> Event {
        self.request = Some(request.into());
        self
    }

    /// Marks the event as denied by this rule.
    pub fn denied(mut self, rule: impl Into<Text>) -> Event {
        self.decision = PolicyDecision::Denied { rule: rule.into() };
        self
    }
}

/// Defines the enum of kinds, their names, and the conversions from their details.
macro_rules! kinds {
    ($($(#[$note:meta])* $name:ident = $word:literal,)*) => {
        /// The kinds of events, each with its details.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(untagged)]
        pub enum Kind {
            $($(#[$note])* $name($name),)*
        }

        impl Kind {
            /// The names of all kinds.
            pub const NAMES: &'static [&'static str] = &[$($word,)*];

            /// Its name in a record.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Kind::$name(_) => $word,)*
                }
            }
        }

        $(impl From<$name> for Kind {
            fn from(details: $name) -> Kind {
                Kind::$name(details)
            }
        })*
    };
}

kinds! {
    /// Authentication failed.
    AuthenticationRefused = "authentication_refused",
    ToolCall = "tool_call",
    Execution = "execution",
    Packages = "packages",
    /// A file was copied into a session or out of it.
    FileMoved = "file",
    SessionCreated = "session_created",
    SessionEnded = "session_ended",
    /// Code in a session called a tool of another MCP server.
    UpstreamCall = "upstream_call",
    /// An approval was requested.
    Approval = "approval",
    QuotaRefused = "quota_refused",
    ServerStarted = "server_started",
    ServerStopped = "server_stopped",
    ServerReloaded = "server_reloaded",
    /// The first record of a chain.
    LogBegun = "log_begun",
    /// The first record of a file that continues the chain of another.
    LogContinued = "log_continued",
    /// A crash left an incomplete line.
    TornLine = "torn_line",
    /// A session or principal exceeded the hourly limit of records.
    Suppressed = "suppressed",
    /// The log could not be written for a while.
    Unrecorded = "unrecorded",
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AuthenticationRefused {
    /// Such as "expired" or "unknown key". Never a part of the token.
    pub reason: Text,
    /// The peer address of the connection.
    pub peer: Option<Text>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    pub tool: Text,
    pub outcome: CallOutcome,
    #[serde(rename = "elapsed_ms", serialize_with = "milliseconds")]
    pub elapsed: Duration,
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallOutcome {
    Succeeded,
    /// It was executed and failed.
    Failed,
    /// It was not executed.
    Refused,
    Cancelled,
    /// It was answered before it ended.
    Underway,
}

impl CallOutcome {
    /// Its name in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            CallOutcome::Succeeded => "succeeded",
            CallOutcome::Failed => "failed",
            CallOutcome::Refused => "refused",
            CallOutcome::Cancelled => "cancelled",
            CallOutcome::Underway => "underway",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Execution {
    /// Unique among all executions.
    pub execution: Text,
    pub code: Digest,
    /// The result: `ok`, `error`, `timeout` …
    pub status: Text,
    #[serde(rename = "elapsed_ms", serialize_with = "milliseconds")]
    pub elapsed: Duration,
    #[serde(rename = "cpu_ms", serialize_with = "maybe_milliseconds")]
    pub cpu: Option<Duration>,
    /// Peak memory of the session, in bytes.
    pub memory_peak: Option<u64>,
    /// Hosts that the code could not reach, with the reason.
    pub blocked: List,
    /// Calls of tools of other MCP servers. The first of them have their own records.
    pub tool_calls: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Packages {
    /// As they were requested.
    pub requirements: List,
    /// Names with versions.
    pub installed: List,
    pub outcome: CallOutcome,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FileMoved {
    /// As the caller named it.
    pub path: Text,
    pub direction: FileDirection,
    pub bytes: u64,
    pub contents: Option<Digest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FileDirection {
    Into,
    OutOf,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionCreated {
    /// The session it is a copy of.
    pub copy_of: Option<Text>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionEnded {
    pub reason: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UpstreamCall {
    pub server: Text,
    pub tool: Text,
    pub arguments: Digest,
    pub outcome: CallOutcome,
    #[serde(rename = "elapsed_ms", serialize_with = "milliseconds")]
    pub elapsed: Duration,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Approval {
    /// The kind of action: `tool`, `shell`, `packages` or `domain`.
    pub subject: Text,
    /// Of the complete subject.
    pub digest: Text,
    /// The line of the policy that required the approval, or denied it.
    pub rule: Text,
    pub answer: Answer,
    /// The scope of a grant (`once`, `session`, `always`), or why there is none.
    pub reach: Text,
    /// How a person was asked; `None` if no person was asked.
    pub asked_by: Option<Text>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Granted,
    Refused,
    /// There was no decision in time.
    Expired,
}

impl Answer {
    /// Its name in records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Answer::Granted => "granted",
            Answer::Refused => "refused",
            Answer::Expired => "expired",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QuotaRefused {
    /// The name: "sessions", "cells per minute" …
    pub quota: Text,
    #[serde(rename = "retry_after_ms", serialize_with = "maybe_milliseconds")]
    pub retry_after: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerStarted {
    pub version: Text,
    /// `stdio` or `http`, with the address.
    pub serving: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerStopped {
    pub reason: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerReloaded {
    /// Names of settings, never their values.
    pub changed: List,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LogBegun {
    pub version: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LogContinued {
    /// The name of the file with the previous records.
    pub after: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TornLine {
    pub bytes: u64,
    pub digest: Digest,
    /// The name of the file that it was moved to.
    pub set_aside: Text,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Suppressed {
    /// Records that were not written; zero where suppression starts.
    pub count: u64,
    pub limit_per_hour: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unrecorded {
    /// Events that were rejected, or happened without a record.
    pub count: u64,
    pub cause: Text,
}

/// Replaces contents that a record must not hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Digest(String);

impl Digest {
    /// Returns the SHA-256 of `contents`.
    pub fn of(contents: impl AsRef<[u8]>) -> Digest {
        Digest::from_hash(&sha2::Sha256::digest(contents.as_ref()).into())
    }

    /// Wraps a SHA-256 that was computed while the contents were streamed.
    pub fn from_hash(hash: &[u8; 32]) -> Digest {
        Digest(format!("sha256:{}", hex(hash)))
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| DIGITS[digit as usize] as char)
        .collect()
}

fn milliseconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_micros() as f64 / 1000.0)
}

fn maybe_milliseconds<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => milliseconds(duration, serializer),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// One event of every kind; each field with a caller's value is set to `text`.
    pub(in crate::audit) fn one_of_each(text: &str) -> Vec<Event> {
        let list = || std::iter::repeat_n(text, 40).collect::<List>();
        let elapsed = Duration::from_micros(1_234_567);
        let kinds: Vec<Kind> = vec![
            AuthenticationRefused {
                reason: text.into(),
                peer: Some(text.into()),
            }
            .into(),
            ToolCall {
                tool: text.into(),
                outcome: CallOutcome::Failed,
                elapsed,
            }
            .into(),
            Execution {
                execution: text.into(),
                code: Digest::of(text),
                status: text.into(),
                elapsed,
                cpu: Some(elapsed),
                memory_peak: Some(u64::MAX),
                blocked: list(),
                tool_calls: 1,
            }
            .into(),
            Packages {
                requirements: list(),
                installed: list(),
                outcome: CallOutcome::Refused,
            }
            .into(),
            FileMoved {
                path: text.into(),
                direction: FileDirection::OutOf,
                bytes: u64::MAX,
                contents: Some(Digest::of(text)),
            }
            .into(),
            SessionCreated {
                copy_of: Some(text.into()),
            }
            .into(),
            SessionEnded {
                reason: text.into(),
            }
            .into(),
            UpstreamCall {
                server: text.into(),
                tool: text.into(),
                arguments: Digest::of(text),
                outcome: CallOutcome::Cancelled,
                elapsed,
            }
            .into(),
            Approval {
                subject: text.into(),
                digest: text.into(),
                rule: text.into(),
                answer: Answer::Expired,
                reach: text.into(),
                asked_by: Some(text.into()),
            }
            .into(),
            QuotaRefused {
                quota: text.into(),
                retry_after: Some(elapsed),
            }
            .into(),
            ServerStarted {
                version: text.into(),
                serving: text.into(),
            }
            .into(),
            ServerStopped {
                reason: text.into(),
            }
            .into(),
            ServerReloaded { changed: list() }.into(),
            LogBegun {
                version: text.into(),
            }
            .into(),
            LogContinued { after: text.into() }.into(),
            TornLine {
                bytes: 1,
                digest: Digest::of(text),
                set_aside: text.into(),
            }
            .into(),
            Suppressed {
                count: 1,
                limit_per_hour: 1,
            }
            .into(),
            Unrecorded {
                count: 1,
                cause: text.into(),
            }
            .into(),
        ];
        let event = |kind: Kind| {
            Event::new(kind)
                .by(text)
                .in_session(text)
                .for_request(text)
                .denied(text)
        };
        kinds.into_iter().map(event).collect()
    }

    #[test]
    fn every_kind_has_its_own_word() {
        let words: Vec<&str> = one_of_each("x")
            .iter()
            .map(|event| event.kind.name())
            .collect();
        assert_eq!(
            words,
            Kind::NAMES,
            "the list of examples is complete and in order"
        );
        let mut distinct = words.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), words.len());
    }

    #[test]
    fn the_word_of_an_outcome_is_the_same_everywhere() {
        for outcome in [
            CallOutcome::Succeeded,
            CallOutcome::Failed,
            CallOutcome::Refused,
            CallOutcome::Cancelled,
            CallOutcome::Underway,
        ] {
            assert_eq!(serde_json::to_value(outcome).unwrap(), outcome.name());
        }
    }

    #[test]
    fn a_digest_is_the_hash_of_the_contents() {
        let of_nothing = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of("").0, of_nothing);
        assert_ne!(Digest::of("a"), Digest::of("b"));
    }
}
