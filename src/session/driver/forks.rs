//! Copies and forks: the work that makes them, and the reports about them.
//!
//! A copy is made in three steps. The sandbox is asked for a copy and signals when it is ready to
//! copy the interpreter. Then the runner receives a `branch` frame and goes to its branch point.
//! The sandbox copies it there, and the runner continues and answers `branched`. The driver's loop
//! is not blocked meanwhile, because the sandbox is lent to a future that returns it. If the
//! sandbox is needed earlier, the copying is cancelled.
//!
//! The existence of a copy is a fact and comes from the sandbox. The list of things that the copy
//! lacks is a claim: it is reported and not acted upon.

use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::launch::{Finished, Inheritance, Live, greet};
use crate::runner_client::{CopiedFiles, CopyReport};
use crate::sandbox::{CheckpointError, CheckpointId, ForkTerms, LaunchError, Sandbox};
use crate::session::FilesCarried;
use crate::session::tools::{Grant, Grants};

/// A copy of a session in its own sandbox, before it has a driver. It is destroyed when dropped.
pub(in crate::session) struct UnstartedFork {
    sandbox: Option<Box<dyn Sandbox>>,
    live: Option<Box<Live>>,
}

impl UnstartedFork {
    fn new(sandbox: Box<dyn Sandbox>) -> UnstartedFork {
        UnstartedFork {
            sandbox: Some(sandbox),
            live: None,
        }
    }

    /// Makes a fork from a session that hands over its sandbox.
    pub(super) fn of(sandbox: Box<dyn Sandbox>, live: Live) -> UnstartedFork {
        UnstartedFork {
            sandbox: Some(sandbox),
            live: Some(Box::new(live)),
        }
    }

    fn carried(&self) -> CopyReport {
        match self.live.as_ref().map(|live| &live.connection) {
            Some(Ok(connection)) => connection.copy_report().clone(),
            _ => CopyReport::default(),
        }
    }

    /// Revokes all tools that are not in this list.
    pub(in crate::session) fn grant_only(&mut self, list: &[Grant]) {
        if let Some(live) = &mut self.live {
            let inherited = live.inheritance.grants.take().unwrap_or_default();
            // The caller has already been told if there are too many lists. If that has changed
            // since, granting nothing is safer than granting too much.
            live.inheritance.grants =
                Some(inherited.narrowed(list).unwrap_or_else(Grants::nothing));
        }
    }

    /// Returns the parts, or `None` if the fork was never started.
    pub(super) fn into_parts(mut self) -> Option<(Box<dyn Sandbox>, Box<Live>)> {
        let live = self.live.take()?;
        self.sandbox.take().map(|sandbox| (sandbox, live))
    }

    async fn destroy(mut self) {
        if let Some(mut sandbox) = self.sandbox.take() {
            sandbox.destroy().await;
        }
    }
}

impl Drop for UnstartedFork {
    fn drop(&mut self) {
        // Without a runtime the server has ended, and the backend has destroyed all its sandboxes.
        if let Some(mut sandbox) = self.sandbox.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { sandbox.destroy().await });
        }
    }
}

/// Parameters of a fork request.
#[derive(Debug, Clone, Copy)]
pub(in crate::session) struct ForksWanted {
    pub(in crate::session) count: usize,
    /// Whether their cells can be undone.
    pub(in crate::session) undoable: bool,
}

/// Result of a fork request.
pub(in crate::session) struct ForkedSession {
    pub(in crate::session) forks: Vec<UnstartedFork>,
    pub(in crate::session) lost: Vec<String>,
    pub(in crate::session) files: FilesCarried,
    /// A sentence about the random numbers of the forks.
    pub(in crate::session) draws: String,
}

/// Copies the interpreter, unless cancelled.
pub(super) async fn copy(
    mut sandbox: Box<dyn Sandbox>,
    told: oneshot::Sender<()>,
    give_up: CancellationToken,
) -> Finished {
    let copied = tokio::select! {
        copied = sandbox.checkpoint(told) => copied,
        () = give_up.cancelled() => {
            let why = "it was given up".to_owned();
            Err(CheckpointError::Failed { why })
        }
    };
    Finished::Copied(sandbox, copied)
}

/// Copies the interpreter and makes forks of the copy, all or none.
pub(super) async fn fork(
    sandbox: Box<dyn Sandbox>,
    told: oneshot::Sender<()>,
    give_up: CancellationToken,
    wanted: ForksWanted,
) -> Finished {
    match copy(sandbox, told, give_up.clone()).await {
        Finished::Copied(sandbox, Ok(checkpoint)) => {
            let terms = ForkTerms {
                keep_beginning: wanted.undoable,
                last: wanted.count == 1,
            };
            let forks = forks_of(&*sandbox, checkpoint, give_up, wanted.count, terms).await;
            sandbox.forget(checkpoint);
            Finished::Forked(sandbox, forks)
        }
        Finished::Copied(
            sandbox,
            Err(CheckpointError::Unsupported { why } | CheckpointError::Failed { why }),
        ) => Finished::Forked(sandbox, Err(why)),
        other => other,
    }
}

/// Makes forks of a kept copy, all or none.
pub(super) async fn fork_kept(
    sandbox: Box<dyn Sandbox>,
    checkpoint: CheckpointId,
    give_up: CancellationToken,
    wanted: ForksWanted,
) -> Finished {
    let terms = ForkTerms {
        keep_beginning: wanted.undoable,
        last: false,
    };
    let forks = forks_of(&*sandbox, checkpoint, give_up, wanted.count, terms).await;
    Finished::Forked(sandbox, forks)
}

async fn forks_of(
    sandbox: &dyn Sandbox,
    checkpoint: CheckpointId,
    give_up: CancellationToken,
    count: usize,
    terms: ForkTerms,
) -> Result<Vec<UnstartedFork>, String> {
    let made = join_all((0..count).map(|_| fork_once(sandbox, checkpoint, terms)));
    let made = tokio::select! {
        made = made => made,
        () = give_up.cancelled() => {
            let why = "it was given up".to_owned();
            vec![Err(LaunchError::Start { why })]
        }
    };
    let mut forks = Vec::with_capacity(count);
    let mut failure = None;
    for attempt in made {
        match attempt {
            Ok(fork) => forks.push(fork),
            Err(error) => failure = Some(error.to_string()),
        }
    }
    match failure {
        None => Ok(forks),
        Some(why) => {
            join_all(forks.into_iter().map(UnstartedFork::destroy)).await;
            Err(why)
        }
    }
}

async fn fork_once(
    sandbox: &dyn Sandbox,
    checkpoint: CheckpointId,
    terms: ForkTerms,
) -> Result<UnstartedFork, LaunchError> {
    let (sandbox, interpreter) = sandbox.fork(checkpoint, terms).await?;
    let mut fork = UnstartedFork::new(sandbox);
    match greet(interpreter).await {
        Ok(live) => {
            fork.live = Some(live);
            Ok(fork)
        }
        Err(error) => {
            fork.destroy().await;
            Err(error)
        }
    }
}

pub(super) async fn restore(mut sandbox: Box<dyn Sandbox>, checkpoint: CheckpointId) -> Finished {
    match sandbox.restore(checkpoint).await {
        Ok(interpreter) => {
            let live = greet(interpreter).await;
            Finished::Started(Some(sandbox), live)
        }
        Err(error) => Finished::Started(Some(sandbox), Err(error)),
    }
}

/// Starts a session with a fork that is still being made.
pub(super) async fn arrive(fork: oneshot::Receiver<Box<UnstartedFork>>) -> Finished {
    match fork.await.ok().and_then(|fork| fork.into_parts()) {
        Some((sandbox, live)) => Finished::Started(Some(sandbox), Ok(live)),
        None => Finished::failed("the fork was not made"),
    }
}

/// Builds the report about forks that were made.
pub(super) fn forked(
    mut forks: Vec<UnstartedFork>,
    lost: Vec<String>,
    inheritance: &Inheritance,
) -> ForkedSession {
    for live in forks.iter_mut().filter_map(|fork| fork.live.as_mut()) {
        live.inheritance = inheritance.clone();
    }
    let carried = forks.iter().map(UnstartedFork::carried).collect::<Vec<_>>();
    let lost = united(std::iter::once(&lost).chain(carried.iter().map(|carried| &carried.lost)));
    let files = carried
        .iter()
        .map(|carried| files_carried(carried, FilesCarried::Copied));
    // One fork without the files is enough for the reader to be warned.
    let files = files
        .reduce(|known, next| {
            if matches!(known, FilesCarried::LeftAlone { .. }) {
                known
            } else {
                next
            }
        })
        .unwrap_or(FilesCarried::Copied);
    let draws = match carried.first().and_then(seeded) {
        Some(seeded) => format!(
            "{seeded} in each copy; generators without a seed draw other numbers in each copy."
        ),
        None => "Random generators without a seed draw other numbers in each copy.".to_owned(),
    };
    ForkedSession {
        forks,
        lost,
        files,
        draws,
    }
}

/// Returns the start of a sentence about the random generators that continue from a seed; `None` if
/// there are none.
pub(super) fn seeded(carried: &CopyReport) -> Option<String> {
    let names = carried
        .seeded
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    (!names.is_empty()).then(|| format!("Random numbers of {names} go on from their seed"))
}

pub(super) fn files_carried(carried: &CopyReport, whole: FilesCarried) -> FilesCarried {
    match carried.files {
        Some(CopiedFiles::Restored) => whole,
        Some(CopiedFiles::Shared) => FilesCarried::Shared,
        Some(CopiedFiles::LeftAlone) => FilesCarried::LeftAlone {
            why: carried
                .why
                .clone()
                .unwrap_or_else(|| "the session did not say why".to_owned()),
        },
        None => FilesCarried::LeftAlone {
            why: "the session did not say what it did with files".to_owned(),
        },
    }
}

pub(super) fn without(mut list: Vec<String>, others: &[String]) -> Vec<String> {
    list.retain(|text| !others.contains(text));
    list
}

/// Merges lists without duplicates.
pub(super) fn united<'a>(lists: impl IntoIterator<Item = &'a Vec<String>>) -> Vec<String> {
    let mut all = Vec::new();
    for text in lists.into_iter().flatten() {
        if !all.contains(text) {
            all.push(text.clone());
        }
    }
    all
}
