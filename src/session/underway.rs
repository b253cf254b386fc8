//! Executions that outlive the call that began them: the vocabulary between sessions and whoever shows results.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Asked, ExecutionId, Outcome, SessionId};

/// How a call that runs code ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Executed {
    Finished(Box<Outcome>),
    /// The caller's patience ended first. The code goes on, and `check` tells how.
    Underway(Underway),
}

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
    /// Executions of the same session that come first; zero when it runs.
    pub ahead: usize,
    /// Why it has not begun, as the end of "it has not begun: …", unless others before it are the only reason.
    #[serde(default)]
    pub waits_for: Option<String>,
    /// Since it began to run, or to wait.
    pub elapsed: Duration,
    /// What was printed since the last answer about it, the newest part of it.
    pub text: String,
    /// Characters that were printed since then and are not in `text`. The whole output can be read when it has finished.
    pub omitted: u64,
    /// What a person has to decide before all of it goes on. Its clock stands still meanwhile.
    #[serde(default)]
    pub asks: Vec<Asked>,
    /// Boxed, because it is empty nearly always.
    #[serde(default)]
    pub others: Box<Others>,
}

/// The other executions of a session, as far as the reader of one result must know of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others {
    /// Results that nobody has collected and nobody waits for, the oldest first.
    pub uncollected: Vec<Uncollected>,
    /// Executions that run or wait for their turn.
    pub under_way: usize,
    /// Results that were discarded before anybody collected them, since this was last told.
    pub discarded: usize,
}

/// A result that waits to be collected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uncollected {
    pub execution: ExecutionId,
    /// The first line of its code.
    pub first_line: String,
    /// Why it is not a good one, in a few words.
    pub failure: Option<String>,
}

/// What is known of an execution that was asked about.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Checked {
    Finished {
        session: SessionId,
        outcome: Box<Outcome>,
        /// It was told before.
        again: bool,
    },
    Underway(Underway),
    /// The session has run nothing, or it is too long ago.
    Nothing,
}

/// Which execution is meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Which {
    /// The first of a session that nobody has heard the end of, or else the last one.
    Of(SessionId),
    This(ExecutionHandle),
}

/// Names an execution for its owner: 128 random bits, so that nobody can guess it.
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

/// A text that names no execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this names no execution")]
pub struct BadHandle;
