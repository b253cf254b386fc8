//! The driver's part in copies, forks and undo.
//!
//! A copy is made in three steps. The sandbox is asked for it and says when it watches the interpreter; then the runner gets a `branch` frame
//! and comes to its branch point; the sandbox copies it there, and the runner goes on and answers `branched`. The loop stays free all the
//! while, because the sandbox is lent to a future that gives it back. Whoever needs it earlier has the copying given up.
//!
//! A copy that was made is a fact and comes from the sandbox. What the copy lacks is a claim, told and not acted upon.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::{Command, Driver, Finished, Inheritance, Live, Work, all, greet};
use crate::runner_client::{Branched, Carried, CarriedFiles};
use crate::sandbox::{CheckpointError, CheckpointId, ForkTerms, LaunchError, Sandbox};
use crate::session::history::Copy;
use crate::session::late::LateText;
use crate::session::output::bounded_text;
use crate::session::state::{Answer, Event, RequestId, State};
use crate::session::tools::{Grant, Grants};
use crate::session::{FilesCarried, Refused, Undo, UndoReport, WorkFolder};

/// How long the runner may take to answer after it was copied. It goes on where it stood, so only a machine out of breath needs this; the answer
/// is not waited for any longer because it only informs.
const BRANCHED_PATIENCE: Duration = Duration::from_secs(2);

/// How much is told of a runner's own reason: a line.
const LONGEST_REASON: usize = 200;

/// Where the reader learns what can be undone when kept states were given up.
const WHAT_IS_LEFT: &str = "`list_checkpoints` tells what can still be undone.";

/// A copy of a session in a sandbox of its own, before a driver has it. Dropped, it is destroyed.
pub(in crate::session) struct Fork {
    sandbox: Option<Box<dyn Sandbox>>,
    live: Option<Box<Live>>,
}

impl Fork {
    fn new(sandbox: Box<dyn Sandbox>) -> Fork {
        Fork {
            sandbox: Some(sandbox),
            live: None,
        }
    }

    fn carried(&self) -> Carried {
        match self.live.as_ref().map(|live| &live.connection) {
            Some(Ok(connection)) => connection.carried().clone(),
            _ => Carried::default(),
        }
    }

    /// Takes away from it what is not in this list of tools.
    pub(in crate::session) fn grant_only(&mut self, list: &[Grant]) {
        if let Some(live) = &mut self.live {
            let inherited = live.inheritance.grants.take().unwrap_or_default();
            // Who asked has been told if there are too many lists; should that have changed meanwhile, nothing is safer than too much.
            live.inheritance.grants =
                Some(inherited.narrowed(list).unwrap_or_else(Grants::nothing));
        }
    }

    /// Gives the parts away. `None` when the fork never came to life.
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

impl Drop for Fork {
    fn drop(&mut self) {
        // Without a runtime the server has ended, and the backend has destroyed everything it made.
        if let Some(mut sandbox) = self.sandbox.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { sandbox.destroy().await });
        }
    }
}

/// What forks are asked for.
#[derive(Debug, Clone, Copy)]
pub(in crate::session) struct ForksWanted {
    pub(in crate::session) count: usize,
    /// Their cells can be undone.
    pub(in crate::session) undoable: bool,
}

/// What came of a request for forks.
pub(in crate::session) struct Forked {
    pub(in crate::session) forks: Vec<Fork>,
    pub(in crate::session) lost: Vec<String>,
    pub(in crate::session) files: FilesCarried,
    /// A sentence about the random numbers of the forks.
    pub(in crate::session) draws: String,
}

/// A copy that is being made.
pub(super) struct Copying {
    /// Names the `branch` frame.
    id: RequestId,
    /// Whether forks are made of it.
    for_forks: bool,
    give_up: CancellationToken,
    /// Fires when the sandbox watches the interpreter.
    pub(super) told: Option<oneshot::Receiver<()>>,
    branched: Option<Branched>,
    /// Why the runner says that there will be no copy.
    declined: Option<String>,
    product: Option<Product>,
    /// How long the runner's answer is waited for once there is a product.
    until: Instant,
}

enum Product {
    Copy(Result<CheckpointId, CheckpointError>),
    Forks(Result<Vec<Fork>, String>),
}

impl Product {
    /// A failure that the runner has given a reason for has that reason.
    fn or_declined(self, declined: Option<String>) -> Product {
        match (self, declined) {
            (Product::Copy(Err(_)), Some(why)) => {
                Product::Copy(Err(CheckpointError::Failed { why }))
            }
            (Product::Forks(Err(_)), Some(why)) => Product::Forks(Err(why)),
            (product, _) => product,
        }
    }
}

/// What takes the place of the present interpreter.
pub(super) enum Replacement {
    Undo {
        cells: u32,
        copy: Copy,
        revived: bool,
        reply: oneshot::Sender<Result<UndoReport, Refused>>,
    },
    Fork {
        fork: Option<Box<Fork>>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<Fork>>>,
    },
}

/// Copies the interpreter, unless that is given up.
async fn copy(
    mut sandbox: Box<dyn Sandbox>,
    told: oneshot::Sender<()>,
    give_up: CancellationToken,
) -> Finished {
    let copied = tokio::select! {
        copied = sandbox.checkpoint(told) => copied,
        () = give_up.cancelled() => Err(CheckpointError::Failed { why: "it was given up".to_owned() }),
    };
    Finished::Copied(sandbox, copied)
}

/// Copies the interpreter and makes forks of the copy, all or none.
async fn fork(
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

/// Makes forks of a copy that is kept, all or none.
async fn fork_kept(
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
) -> Result<Vec<Fork>, String> {
    let made = all((0..count)
        .map(|_| fork_once(sandbox, checkpoint, terms))
        .collect());
    let made = tokio::select! {
        made = made => made,
        () = give_up.cancelled() => vec![Err(LaunchError::Start { why: "it was given up".to_owned() })],
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
            all(forks.into_iter().map(Fork::destroy).collect()).await;
            Err(why)
        }
    }
}

async fn fork_once(
    sandbox: &dyn Sandbox,
    checkpoint: CheckpointId,
    terms: ForkTerms,
) -> Result<Fork, LaunchError> {
    let (sandbox, interpreter) = sandbox.fork(checkpoint, terms).await?;
    let mut fork = Fork::new(sandbox);
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

async fn restore(mut sandbox: Box<dyn Sandbox>, checkpoint: CheckpointId) -> Finished {
    match sandbox.restore(checkpoint).await {
        Ok(interpreter) => {
            let live = greet(interpreter).await;
            Finished::Started(Some(sandbox), live)
        }
        Err(error) => Finished::Started(Some(sandbox), Err(error)),
    }
}

/// Starts a session with a fork that is still being made.
pub(super) async fn arrive(fork: oneshot::Receiver<Box<Fork>>) -> Finished {
    match fork.await.ok().and_then(|fork| fork.into_parts()) {
        Some((sandbox, live)) => Finished::Started(Some(sandbox), Ok(live)),
        None => Finished::Started(
            None,
            Err(LaunchError::Start {
                why: "the fork was not made".to_owned(),
            }),
        ),
    }
}

impl Driver {
    /// Begins to copy the interpreter, for a later undo or for forks.
    pub(super) fn copy(&mut self, forks: Option<ForksWanted>) {
        if forks.is_none() && self.is_full() {
            self.give_up_for_memory();
            self.notes.push(
                "The state before this cell was not kept, because the session holds nearly all the memory it may; so this \
                 cell cannot be undone by itself."
                    .to_owned(),
            );
            return self.happen(Event::Copied);
        }
        let Some(sandbox) = self.sandbox.take() else {
            return self.happen(Event::Copied);
        };
        let id = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        let (mut told, mut branched) = (Some(told), None);
        let give_up = CancellationToken::new();
        let future: std::pin::Pin<Box<dyn Future<Output = Finished> + Send>> =
            match (forks, self.history.whole()) {
                (None, _) => Box::pin(copy(sandbox, tell, give_up.clone())),
                (Some(wanted), None) => Box::pin(fork(sandbox, tell, give_up.clone(), wanted)),
                (Some(wanted), Some(kept)) => {
                    told = None;
                    branched = Some(Branched {
                        lost: kept.lost.clone(),
                        whole: true,
                    });
                    Box::pin(fork_kept(sandbox, kept.checkpoint, give_up.clone(), wanted))
                }
            };
        self.work = Some(Work {
            starts_first: false,
            future,
        });
        self.copying = Some(Copying {
            id,
            for_forks: forks.is_some(),
            give_up,
            told,
            branched,
            declined: None,
            product: None,
            until: Instant::now(),
        });
    }

    /// Asks the runner to come to its branch point, when the sandbox watches it.
    pub(super) fn told(&mut self, watched: bool) {
        let Some(copying) = &mut self.copying else {
            return;
        };
        copying.told = None;
        if !watched {
            return;
        }
        let undo_files = match self.settings.undo {
            Undo::On { files, .. } => files,
            Undo::Off => 0,
        };
        let frame = json!({
            "type": "branch",
            "id": copying.id,
            "undo_files": undo_files,
            "fork": copying.for_forks,
            "work_is_shared": self.settings.work_folder == WorkFolder::Shared,
        });
        self.send(&frame, b"");
    }

    /// Takes the runner's answer.
    pub(super) fn branched(&mut self, id: RequestId, branched: Branched) {
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.id == id) else {
            return;
        };
        copying.branched = Some(branched);
        if copying.product.is_some() {
            self.copied();
        }
    }

    /// Takes the runner's word that it cannot be copied. What it says is believed, because nobody else loses by it. Tells whether it is about this.
    pub(super) fn declined(&mut self, id: RequestId, why: &str) -> bool {
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.id == id) else {
            return false;
        };
        if copying.product.is_none() {
            copying.declined = Some(bounded_text(why, LONGEST_REASON));
            copying.give_up.cancel();
        }
        true
    }

    /// Takes what came of a copy for a later undo.
    pub(super) fn copy_made(
        &mut self,
        sandbox: Box<dyn Sandbox>,
        copy: Result<CheckpointId, CheckpointError>,
    ) {
        self.sandbox = Some(sandbox);
        let is_made = copy.is_ok();
        self.made(Product::Copy(copy), is_made);
    }

    /// Takes what came of a copy for forks.
    pub(super) fn forks_made(
        &mut self,
        sandbox: Box<dyn Sandbox>,
        forks: Result<Vec<Fork>, String>,
    ) {
        self.sandbox = Some(sandbox);
        let are_made = forks.is_ok();
        self.made(Product::Forks(forks), are_made);
    }

    fn made(&mut self, product: Product, success: bool) {
        let Some(copying) = &mut self.copying else {
            return;
        };
        copying.product = Some(product);
        copying.until = Instant::now() + BRANCHED_PATIENCE;
        // After a failure, and from an interpreter that is gone, no answer is awaited.
        if !success || copying.branched.is_some() || self.live.is_none() {
            self.copied();
        }
    }

    /// Has the work that copies end soon and give the sandbox back, because nobody wants what it makes.
    pub(super) fn give_copying_up(&mut self) {
        if let Some(copying) = self.copying.take() {
            copying.give_up.cancel();
        }
    }

    /// Returns until when the runner's answer is waited for.
    pub(super) fn answer_due(&self) -> Option<Instant> {
        self.copying
            .as_ref()
            .filter(|copying| copying.product.is_some())
            .map(|copying| copying.until)
    }

    /// Ends the copying: the copy is kept or its forks are handed out, and the session goes on.
    pub(super) fn copied(&mut self) {
        let Some(Copying {
            product: Some(product),
            branched,
            declined,
            ..
        }) = self.copying.take()
        else {
            return;
        };
        let Branched { lost, whole } = branched.unwrap_or_default();
        match product.or_declined(declined) {
            Product::Copy(Ok(checkpoint)) => {
                let packages = self.shared.facts().packages.clone();
                self.keep(Copy {
                    whole,
                    lost,
                    packages,
                    ..Copy::new(checkpoint)
                });
            }
            Product::Copy(Err(error)) => self.copy_failed(error),
            Product::Forks(forks) => {
                let inheritance = self.inheritance();
                self.forked = Some(forks.map(|forks| forked(forks, lost, &inheritance)));
            }
        }
        for command in std::mem::take(&mut self.postponed) {
            match command {
                Command::Undo { cells, reply } => self.undo_now(cells, reply),
                Command::Adopt { fork, note, reply } => self.adopt_now(fork, note, reply),
                other => self.command(other),
            }
        }
        self.happen(Event::Copied);
        // Nobody wants forks whose request is gone.
        self.forked = None;
    }

    fn keep(&mut self, copy: Copy) {
        let Undo::On { checkpoints, .. } = self.settings.undo else {
            return;
        };
        let forgotten = self.history.copied(copy, checkpoints);
        self.forget(forgotten);
        self.look_after_copies();
        self.show_history();
        self.give_up_for_memory();
    }

    /// Keeps the copy of the state in which a session began, if there is one. Tells whether there is.
    pub(super) fn keep_beginning(
        &mut self,
        beginning: Option<CheckpointId>,
        carried: &Carried,
    ) -> bool {
        let (Some(checkpoint), Undo::On { .. }) = (beginning, self.settings.undo) else {
            return false;
        };
        if carried.mapped {
            // It would hold files of the source for as long as it is kept.
            self.forget(vec![checkpoint]);
            return false;
        }
        let packages = self.shared.facts().packages.clone();
        self.keep(Copy {
            lacked: carried.lost.clone(),
            packages,
            ..Copy::new(checkpoint)
        });
        true
    }

    fn copy_failed(&mut self, error: CheckpointError) {
        // The end of the interpreter is told elsewhere.
        if !matches!(self.machine.state(), State::Copying { .. }) {
            return;
        }
        match error {
            CheckpointError::Unsupported { why } => {
                debug!(
                    session = self.id.as_str(),
                    why, "sessions cannot be copied here"
                );
                self.notes
                    .push(format!("Cells cannot be undone here: {why}."));
                self.no_copies = Some(why);
                self.happen(Event::CopiesImpossible);
            }
            CheckpointError::Failed { why } => {
                warn!(
                    session = self.id.as_str(),
                    why, "a session could not be copied"
                );
                self.notes.push(format!(
                    "The state before this cell could not be kept ({why}), so this cell cannot be undone by itself."
                ));
            }
        }
    }

    /// Forgets what the kernel took, with a word to the reader.
    pub(super) fn look_after_copies(&mut self) {
        let Some(sandbox) = &self.sandbox else { return };
        let taken = self.history.retain(|checkpoint| sandbox.has(checkpoint));
        if taken > 0 {
            let states = if taken == 1 {
                "1 kept state was".to_owned()
            } else {
                format!("{taken} kept states were")
            };
            self.notes.push(format!(
                "Memory ran out, and {states} given up for it. {WHAT_IS_LEFT}"
            ));
            self.show_history();
        }
    }

    /// Tells whether a copy could take the last memory that the session needs for itself.
    fn is_full(&self) -> bool {
        let (Some(sandbox), Some(limit)) = (&self.sandbox, self.settings.memory_limit) else {
            return false;
        };
        sandbox.memory().now > limit / 10 * 9
    }

    /// Gives up the oldest copy when the sandbox holds much of what it may.
    ///
    /// One at a time: the kernel takes its memory back a little later, and the next look sees whether that was enough.
    pub(super) fn give_up_for_memory(&mut self) {
        let (Some(sandbox), Some(limit)) = (&self.sandbox, self.settings.memory_limit) else {
            return;
        };
        if sandbox.memory().now > limit / 4 * 3
            && let Some(checkpoint) = self.history.give_up_oldest()
        {
            sandbox.forget(checkpoint);
            self.notes.push(format!(
                "The oldest kept state was given up to save memory. {WHAT_IS_LEFT}"
            ));
            self.show_history();
        }
    }

    pub(super) fn forget(&self, checkpoints: Vec<CheckpointId>) {
        if let Some(sandbox) = &self.sandbox {
            for checkpoint in checkpoints {
                sandbox.forget(checkpoint);
            }
        }
    }

    /// Lets others see what can be undone.
    pub(super) fn show_history(&self) {
        self.shared.facts().undoable = self.history.undoable();
    }

    /// Notes that the state is no longer the one that was copied last.
    pub(super) fn changed(&mut self) {
        self.history.changed();
        self.happen(Event::Changed);
    }

    /// Undoes cells, or says why not. A copy under way is waited for; a cell is not.
    pub(super) fn undo(&mut self, cells: u32, reply: oneshot::Sender<Result<UndoReport, Refused>>) {
        let id = self.id.clone();
        if self.settings.undo == Undo::Off {
            let _ = reply.send(Err(Refused::UndoOff { id }));
        } else if self.machine.has_cell() {
            let _ = reply.send(Err(Refused::CellRunning { id, then: "undo" }));
        } else if self.is_copying_for_itself() {
            self.postponed.push(Command::Undo { cells, reply });
        } else {
            self.undo_now(cells, reply);
        }
    }

    fn undo_now(&mut self, cells: u32, reply: oneshot::Sender<Result<UndoReport, Refused>>) {
        self.look_after_copies();
        let Some(copy) = self.history.before(cells).cloned() else {
            let possible = self
                .history
                .undoable()
                .into_iter()
                .map(|entry| entry.cells_back)
                .collect();
            let refused = Refused::NothingToUndo {
                id: self.id.clone(),
                cells,
                possible,
                why: self.why_nothing_is_kept(),
            };
            let _ = reply.send(Err(refused));
            return;
        };
        let revived = self.machine.state() == State::Ended;
        self.replacement = Some(Replacement::Undo {
            cells,
            copy,
            revived,
            reply,
        });
        self.happen(Event::ReplaceAsked);
    }

    fn why_nothing_is_kept(&self) -> Option<String> {
        match &self.no_copies {
            Some(why) => Some(why.clone()),
            None if !self.history.has_cells() => {
                Some("no cell has run since it began or was reset".to_owned())
            }
            None => None,
        }
    }

    /// Puts a fork in the place of this session's interpreter and sandbox, or gives it back.
    pub(super) fn adopt(
        &mut self,
        fork: Box<Fork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<Fork>>>,
    ) {
        if self.machine.has_cell() {
            let _ = reply.send(Err(fork));
        } else if self.is_copying_for_itself() {
            self.postponed.push(Command::Adopt { fork, note, reply });
        } else {
            self.adopt_now(fork, note, reply);
        }
    }

    fn adopt_now(
        &mut self,
        fork: Box<Fork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<Fork>>>,
    ) {
        self.replacement = Some(Replacement::Fork {
            fork: Some(fork),
            note,
            reply,
        });
        self.happen(Event::ReplaceAsked);
    }

    fn is_copying_for_itself(&self) -> bool {
        self.copying.is_some() && !matches!(self.machine.state(), State::Copying { fork: Some(_) })
    }

    /// Gives sandbox and interpreter away, if they are at rest.
    pub(super) fn surrender(&mut self) -> Option<Box<Fork>> {
        let at_rest = matches!(
            &self.live,
            Some(Live {
                connection: Ok(_),
                ..
            })
        );
        if self.machine.state() != State::Idle || !at_rest {
            return None;
        }
        let (sandbox, mut live) = (self.sandbox.take()?, self.live.take()?);
        live.inheritance = self.inheritance();
        self.metered = None;
        Some(Box::new(Fork {
            sandbox: Some(sandbox),
            live: Some(Box::new(live)),
        }))
    }

    /// Begins to put the replacement in its place.
    pub(super) fn replace(&mut self) {
        self.live = None;
        match &mut self.replacement {
            Some(Replacement::Undo { copy, .. }) => {
                let checkpoint = copy.checkpoint;
                if let Some(sandbox) = self.sandbox.take() {
                    self.work = Some(Work {
                        starts_first: false,
                        future: Box::pin(restore(sandbox, checkpoint)),
                    });
                }
            }
            Some(Replacement::Fork { fork, .. }) => {
                let parts = fork.take().and_then(|fork| fork.into_parts());
                self.history.clear();
                self.show_history();
                self.metered = None;
                let old = self.sandbox.take();
                let future = async move {
                    if let Some(mut old) = old {
                        old.destroy().await;
                    }
                    match parts {
                        Some((sandbox, live)) => Finished::Started(Some(sandbox), Ok(live)),
                        None => Finished::Started(
                            None,
                            Err(LaunchError::Start {
                                why: "the kept variant was gone".to_owned(),
                            }),
                        ),
                    }
                };
                self.work = Some(Work {
                    starts_first: false,
                    future: Box::pin(future),
                });
            }
            None => {}
        }
    }

    /// Says that this is not the moment.
    pub(super) fn refuse_replacement(&mut self) {
        match self.replacement.take() {
            Some(Replacement::Undo { reply, .. }) => {
                let _ = reply.send(Err(Refused::Occupied {
                    id: self.id.clone(),
                    then: "undo",
                }));
            }
            Some(Replacement::Fork {
                fork: Some(fork),
                reply,
                ..
            }) => {
                let _ = reply.send(Err(fork));
            }
            _ => {}
        }
    }

    /// Says that the replacement is in its place.
    pub(super) fn replaced(&mut self, carried: &Carried) {
        // What the interpreter before has printed is not of this one.
        self.late = LateText::default();
        match self.replacement.take() {
            Some(Replacement::Undo {
                cells,
                copy,
                revived,
                reply,
            }) => {
                self.shared.facts().packages = copy.packages.clone();
                let forgotten = self.history.undone(cells);
                self.forget(forgotten);
                self.show_history();
                let now = Instant::now();
                let _ = reply.send(Ok(UndoReport {
                    undone: cells,
                    revived,
                    lost: without(united([&copy.lost, &carried.lost]), &copy.lacked),
                    files: files_carried(carried, FilesCarried::Restored),
                    left: self
                        .history
                        .undoable()
                        .into_iter()
                        .map(|entry| entry.info(now))
                        .collect(),
                    notes: seeded(carried)
                        .map(|seeded| format!("{seeded}, as they did before."))
                        .into_iter()
                        .collect(),
                }));
            }
            Some(Replacement::Fork { note, reply, .. }) => {
                self.notes = vec![note];
                self.happen(Event::Changed);
                let _ = reply.send(Ok(()));
            }
            None => {}
        }
    }

    /// Says that the replacement could not be started.
    pub(super) fn replacement_failed(&mut self, error: &LaunchError) {
        match self.replacement.take() {
            Some(Replacement::Undo { reply, .. }) => {
                self.look_after_copies();
                let _ = reply.send(Err(Refused::Launch(error.clone())));
            }
            // A fork that is adopted lives already.
            Some(Replacement::Fork { .. }) | None => {}
        }
    }

    /// Gives up every copy and whatever waits for one, because the session is reset.
    pub(super) fn forget_the_past(&mut self) -> Vec<CheckpointId> {
        self.give_copying_up();
        for command in std::mem::take(&mut self.postponed) {
            match command {
                Command::Undo { reply, .. } => drop(reply.send(Err(Refused::ResetWhileWaiting))),
                Command::Adopt { fork, reply, .. } => drop(reply.send(Err(fork))),
                _ => {}
            }
        }
        match self.replacement.take() {
            Some(Replacement::Undo { reply, .. }) => {
                drop(reply.send(Err(Refused::ResetWhileWaiting)))
            }
            // It is in its place already, and is reset there.
            Some(Replacement::Fork { reply, .. }) => drop(reply.send(Ok(()))),
            None => {}
        }
        let copies = self.history.clear();
        self.show_history();
        copies
    }

    /// Answers a request for forks.
    pub(super) fn answer_fork(
        &mut self,
        answer: Answer,
        reply: oneshot::Sender<Result<Forked, Refused>>,
    ) {
        let result = match (answer, self.forked.take()) {
            (Answer::Finished, Some(Ok(forked))) => Ok(forked),
            (Answer::Finished, Some(Err(why))) => Err(Refused::CannotCopy {
                id: self.id.clone(),
                why,
            }),
            (Answer::Reset, _) => Err(Refused::ResetWhileWaiting),
            (Answer::Closed, _) => Err(Refused::ClosedWhileWaiting),
            (answer, _) => Err(self.refusal(answer)),
        };
        // A caller that is gone leaves the forks to their destroyer.
        let _ = reply.send(result);
    }
}

fn forked(mut forks: Vec<Fork>, lost: Vec<String>, inheritance: &Inheritance) -> Forked {
    for live in forks.iter_mut().filter_map(|fork| fork.live.as_mut()) {
        live.inheritance = inheritance.clone();
    }
    let carried = forks.iter().map(Fork::carried).collect::<Vec<_>>();
    let lost = united(std::iter::once(&lost).chain(carried.iter().map(|carried| &carried.lost)));
    let files = carried
        .iter()
        .map(|carried| files_carried(carried, FilesCarried::Copied));
    // One fork without the files is what the reader must know.
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
    Forked {
        forks,
        lost,
        files,
        draws,
    }
}

/// The beginning of a sentence about the random generators that go on from a seed; `None` when none does.
fn seeded(carried: &Carried) -> Option<String> {
    let names = carried
        .seeded
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    (!names.is_empty()).then(|| format!("Random numbers of {names} go on from their seed"))
}

fn files_carried(carried: &Carried, whole: FilesCarried) -> FilesCarried {
    match carried.files {
        Some(CarriedFiles::Restored) => whole,
        Some(CarriedFiles::Shared) => FilesCarried::Shared,
        Some(CarriedFiles::LeftAlone) => FilesCarried::LeftAlone {
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

fn without(mut list: Vec<String>, others: &[String]) -> Vec<String> {
    list.retain(|text| !others.contains(text));
    list
}

/// Puts lists together, each text once.
fn united<'a>(lists: impl IntoIterator<Item = &'a Vec<String>>) -> Vec<String> {
    let mut all = Vec::new();
    for text in lists.into_iter().flatten() {
        if !all.contains(text) {
            all.push(text.clone());
        }
    }
    all
}
