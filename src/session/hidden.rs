//! Hidden sessions: for the server's internal work in a sandbox.
//!
//! Such a session cannot be found by callers and counts against no limit. Nothing of it is kept,
//! and it ends with its creator.

use std::fs::File;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::driver::{ReadExtent, SessionJob, SessionOrigin};
use super::manager::{DriverHandle, Sessions};
use super::{Approver, ExecuteRequest, InsidePath, Outcome, Refused, SessionId};
use crate::sandbox::Rules;

/// A session that only its creator can access. Dropping it destroys it.
pub struct Hidden {
    sessions: Sessions,
    entry: DriverHandle,
}

impl Sessions {
    /// Creates a fresh hidden session whose network access is limited to `rules`.
    pub fn hidden(&self, rules: Rules) -> Result<Hidden, Refused> {
        let origin = SessionOrigin::Hidden {
            backend: self.backend(),
            rules,
        };
        let entry = self.hide_as(SessionId::hidden(), None, origin)?;
        Ok(Hidden {
            sessions: self.clone(),
            entry,
        })
    }
}

impl Hidden {
    /// Runs a cell.
    pub async fn execute(
        &self,
        code: &str,
        timeout: Duration,
        max_output_chars: usize,
    ) -> Result<Outcome, Refused> {
        let request = ExecuteRequest {
            code: code.to_owned(),
            timeout,
            max_output_chars,
            asking: Approver::Nobody,
            rules: None,
            recorder: Default::default(),
        };
        self.sessions
            .execute_in(&self.entry, request, &CancellationToken::new())
            .await
    }

    /// Writes a file into the working folder.
    pub async fn write(&self, path: &InsidePath, content: &[u8]) -> Result<u64, Refused> {
        let staged = super::manager::stage(&mut &content[..]).await;
        let (source, _) = staged.map_err(|error| Refused::Transfer {
            why: error.kind().to_string(),
        })?;
        let (reply, answer) = oneshot::channel();
        self.ask(
            SessionJob::Write {
                path: path.clone(),
                overwrite: true,
                source,
                reply,
            },
            answer,
        )
        .await
    }

    /// Copies a file of at most `limit` bytes from the working folder.
    pub async fn read(&self, path: &InsidePath, limit: u64) -> Result<File, Refused> {
        let (reply, answer) = oneshot::channel();
        let what = ReadExtent::Whole { limit };
        let received = self
            .ask(
                SessionJob::Read {
                    path: path.clone(),
                    what,
                    reply,
                },
                answer,
            )
            .await?;
        let file = tokio::task::spawn_blocking(move || received.bytes.into_file()).await;
        match file {
            Ok(Ok(file)) => Ok(file),
            Ok(Err(error)) => Err(Refused::Transfer {
                why: error.to_string(),
            }),
            Err(_) => Err(Refused::ShuttingDown),
        }
    }

    async fn ask<T>(
        &self,
        job: SessionJob,
        answer: oneshot::Receiver<Result<T, Refused>>,
    ) -> Result<T, Refused> {
        let asked = self
            .sessions
            .ask(&self.entry, job, answer, &CancellationToken::new())
            .await;
        asked.unwrap_or(Err(Refused::ClosedWhileWaiting))
    }
}
