//! The sandbox of a session and the work on it. Starting, restarting and copying are futures that
//! the driver polls beside everything else. Each one owns the sandbox while it runs and returns it
//! at the end.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::SessionOrigin;
use super::forks::{UnstartedFork, arrive};
use crate::approval::SessionGrants;
use crate::reaction::within;
use crate::runner_client::Connection;
use crate::sandbox::{
    Backend, CheckpointError, CheckpointId, Interpreter, LaunchError, Process, Rules, Sandbox,
};
use crate::session::tools::Grants;

/// How long a fresh interpreter may take to send its greeting. It has already been started; only a
/// broken one needs longer.
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// Work on the sandbox that does not block the loop.
pub(super) type WorkFuture = Pin<Box<dyn Future<Output = Finished> + Send>>;

struct Work {
    starts_first: bool,
    future: WorkFuture,
}

/// The sandbox, or the work that holds it.
pub(super) struct Launch {
    /// `None` while work holds it.
    sandbox: Option<Box<dyn Sandbox>>,
    work: Option<Work>,
    /// Why the last attempt to start an interpreter failed, if it did.
    pub(super) failure: Option<LaunchError>,
}

impl Launch {
    /// Starts the first interpreter of a session.
    pub(super) fn first(origin: SessionOrigin) -> Launch {
        let future: WorkFuture = match origin {
            SessionOrigin::Launch(backend) => Box::pin(launch(backend)),
            SessionOrigin::Hidden { backend, rules } => Box::pin(launch_hidden(backend, rules)),
            SessionOrigin::Fork { fork, .. } | SessionOrigin::Variant { fork, .. } => {
                Box::pin(arrive(fork))
            }
        };
        Launch {
            sandbox: None,
            work: Some(Work {
                starts_first: true,
                future,
            }),
            failure: None,
        }
    }

    pub(super) fn sandbox(&self) -> Option<&dyn Sandbox> {
        self.sandbox.as_deref()
    }

    /// Takes the sandbox, for work that returns it or for another session.
    pub(super) fn take_sandbox(&mut self) -> Option<Box<dyn Sandbox>> {
        self.sandbox.take()
    }

    /// Begins work that holds the sandbox.
    pub(super) fn begin(&mut self, future: WorkFuture) {
        self.work = Some(Work {
            starts_first: false,
            future,
        });
    }

    /// Ends the work. It returned the sandbox if there is one.
    pub(super) fn give_back(&mut self, sandbox: Option<Box<dyn Sandbox>>) {
        self.work = None;
        self.sandbox = sandbox;
    }

    /// Waits for the end of the work. Pending forever if there is none.
    pub(super) async fn next(&mut self) -> Finished {
        match &mut self.work {
            Some(work) => (&mut work.future).await,
            None => std::future::pending().await,
        }
    }

    /// Starts a fresh interpreter in the sandbox, after any work that holds it. The given copies
    /// are dropped.
    pub(super) fn restart(&mut self, copies: Vec<CheckpointId>) {
        let (sandbox, work) = (self.sandbox.take(), self.work.take());
        self.begin(Box::pin(async move {
            let sandbox = match (sandbox, work) {
                (Some(sandbox), _) => Some(sandbox),
                (None, Some(work)) => work.future.await.into_sandbox(),
                (None, None) => None,
            };
            let Some(sandbox) = sandbox else {
                return Finished::failed("its sandbox is gone");
            };
            for checkpoint in copies {
                sandbox.forget(checkpoint);
            }
            restart(sandbox).await
        }));
    }

    /// Destroys the sandbox, after any work that holds it.
    pub(super) async fn destroy(&mut self) {
        match self.work.take() {
            // A first start may wait a long time for the preparation. It is not dropped half-way;
            // the sandbox that it creates is destroyed.
            Some(work) if work.starts_first => {
                tokio::spawn(async move {
                    if let Some(mut sandbox) = work.future.await.into_sandbox() {
                        sandbox.destroy().await;
                    }
                });
            }
            Some(work) => self.sandbox = work.future.await.into_sandbox(),
            None => {}
        }
        if let Some(mut sandbox) = self.sandbox.take() {
            sandbox.destroy().await;
        }
    }
}

/// Result of the work.
pub(super) enum Finished {
    /// The started interpreter or the reason why there is none, and the sandbox, if there is one.
    Started(Option<Box<dyn Sandbox>>, Result<Box<Live>, LaunchError>),
    Copied(Box<dyn Sandbox>, Result<CheckpointId, CheckpointError>),
    Forked(Box<dyn Sandbox>, Result<Vec<UnstartedFork>, String>),
}

impl Finished {
    /// Builds the result for a start that produced neither interpreter nor sandbox.
    pub(super) fn failed(why: &str) -> Finished {
        let why = why.to_owned();
        Finished::Started(None, Err(LaunchError::Start { why }))
    }

    /// Discards everything but the sandbox.
    pub(super) fn into_sandbox(self) -> Option<Box<dyn Sandbox>> {
        match self {
            Finished::Started(sandbox, _) => sandbox,
            Finished::Copied(sandbox, _) | Finished::Forked(sandbox, _) => Some(sandbox),
        }
    }
}

pub(super) struct Live {
    pub(super) process: Box<dyn Process>,
    /// `Err` once the channel is closed: the exit is then awaited until the given time.
    pub(super) connection: Result<Connection, Instant>,
    /// A copy of its initial state, until it is in the history.
    pub(super) beginning: Option<CheckpointId>,
    /// State that a copy has from its source.
    pub(super) inheritance: Inheritance,
    /// Whether the session's files were lost with its previous sandbox.
    pub(super) files_lost: bool,
}

/// State of a copy that its interpreter does not know.
#[derive(Clone, Default)]
pub(super) struct Inheritance {
    /// Package folders, the latest first.
    pub(super) packages: Vec<String>,
    /// Network rules of the operator.
    pub(super) ceiling: Option<Rules>,
    /// Permissions given by a person.
    pub(super) granted: SessionGrants,
    /// Tools that it may use; `None` if the interpreter is not a copy.
    pub(super) grants: Option<Grants>,
    /// Whether packages of servers are in its working folder.
    pub(super) tools: bool,
}

async fn launch(backend: Arc<dyn Backend>) -> Finished {
    begin(backend.launch().await).await
}

async fn begin(launched: Result<(Box<dyn Sandbox>, Interpreter), LaunchError>) -> Finished {
    match launched {
        Ok((mut sandbox, interpreter)) => match greet(interpreter).await {
            Ok(live) => Finished::Started(Some(sandbox), Ok(live)),
            Err(error) => {
                sandbox.destroy().await;
                Finished::Started(None, Err(error))
            }
        },
        Err(error) => Finished::Started(None, Err(error)),
    }
}

async fn launch_hidden(backend: Arc<dyn Backend>, rules: Rules) -> Finished {
    let launched = begin(backend.launch_apart().await).await;
    if let Finished::Started(Some(sandbox), Ok(_)) = &launched {
        sandbox.set_rules(rules);
    }
    launched
}

async fn restart(mut sandbox: Box<dyn Sandbox>) -> Finished {
    match sandbox.restart().await {
        Ok(interpreter) => {
            let live = greet(interpreter).await;
            Finished::Started(Some(sandbox), live)
        }
        Err(error) => Finished::Started(Some(sandbox), Err(error)),
    }
}

pub(super) async fn greet(interpreter: Interpreter) -> Result<Box<Live>, LaunchError> {
    match within(
        GREETING_TIMEOUT,
        Connection::open(interpreter.channel, interpreter.skew),
    )
    .await
    {
        Some(Ok(connection)) => Ok(Box::new(Live {
            process: interpreter.process,
            connection: Ok(connection),
            beginning: interpreter.beginning,
            inheritance: Inheritance::default(),
            files_lost: interpreter.files_lost,
        })),
        Some(Err(error)) => {
            interpreter.process.kill();
            Err(LaunchError::Start {
                why: error.to_string(),
            })
        }
        None => {
            interpreter.process.kill();
            Err(LaunchError::TimedOut(GREETING_TIMEOUT))
        }
    }
}
