//! Executions that outlive the call that started them: types shared by sessions and the code that
//! renders results.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ApprovalRequest, ExecutionId, Outcome, SessionId};

/// An execution that has not finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Underway {
    pub handle: ExecutionHandle,
    pub session: SessionId,
    #[serde(default)]
    pub execution: ExecutionId,
    /// The first line of its code.
    #[serde(default)]
    pub first_line: String,
    /// Executions of the same session ahead of it; zero when it runs.
    pub ahead: usize,
    /// Why it has not started, as the end of "it has not begun: …", unless other executions ahead
    /// of it are the only reason.
    #[serde(default)]
    pub waits_for: Option<String>,
    /// Time since it started to run, or to wait.
    pub elapsed: Duration,
    /// The newest part of the output since the last answer about it.
    pub text: String,
    /// Characters of the output since then that are not in `text`. The full output can be read when
    /// it has finished.
    pub omitted: u64,
    /// Approval requests that must be decided before all of it continues. Its clock is paused
    /// meanwhile.
    #[serde(default)]
    pub approvals: Vec<ApprovalRequest>,
    /// Boxed, because it is nearly always empty.
    #[serde(default)]
    pub others: Box<Others>,
}

/// The other executions of a session, as far as they matter to the reader of one result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others {
    /// Results that were not collected and that no caller waits for, the oldest first.
    pub uncollected: Vec<Uncollected>,
    /// Executions that run or are queued.
    pub under_way: usize,
    /// Results discarded before they were collected, since this was last reported.
    pub discarded: usize,
}

/// A result that waits to be collected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uncollected {
    pub execution: ExecutionId,
    /// The first line of its code.
    pub first_line: String,
    /// A short description of its failure, if it failed.
    pub failure: Option<String>,
}

/// Status of an execution, as reported to a caller.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ExecutionReport {
    Finished {
        session: SessionId,
        outcome: Box<Outcome>,
        /// The result was collected before.
        again: bool,
    },
    /// The caller's wait ended first. The code continues, and `check` reports on it.
    Underway(Underway),
    /// The session has no execution, or it was too long ago. Only for `check`.
    Nothing,
}

/// Reference to an execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecutionRef {
    /// The first of a session whose result was not collected, or else the last one.
    InSession(SessionId),
    Handle(ExecutionHandle),
}

/// Id of an execution for its owner: 128 random bits, so that it cannot be guessed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct ExecutionHandle(String);

impl ExecutionHandle {
    pub(super) fn random() -> ExecutionHandle {
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .expect("the kernel has random bytes");
        ExecutionHandle(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ExecutionHandle {
    type Err = BadHandle;

    fn from_str(text: &str) -> Result<ExecutionHandle, BadHandle> {
        let sound = text.len() == 32
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if sound {
            Ok(ExecutionHandle(text.to_owned()))
        } else {
            Err(BadHandle)
        }
    }
}

impl fmt::Display for ExecutionHandle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A text that is not a valid execution id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this names no execution")]
pub struct BadHandle;
