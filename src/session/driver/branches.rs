//! The history of a session and its copies: the states that can be restored, the copy that is being
//! made, and the replacement of the current interpreter.
//!
//! Nothing here changes the session's state. Methods return results to the driver, and the driver
//! feeds them to the machine. The sandbox is lent for each step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::DriverCommand;
use super::forks::{
    self, ForkedSession, ForksWanted, UnstartedFork, copy, files_carried, fork, fork_kept, seeded,
    united, without,
};
use super::launch::{Inheritance, WorkFuture};
use super::shared::SharedSession;
use crate::runner_client::{Branched, Claim, CopyReport, Request};
use crate::sandbox::{CheckpointError, CheckpointId, LaunchError, Sandbox};
use crate::session::history::{History, KeptState};
use crate::session::output::bounded_text;
use crate::session::state::RequestId;
use crate::session::{
    FilesCarried, OutcomeNote, Refused, Remedy, Retry, SessionId, SessionSettings, UndoPolicy,
    UndoReport, WorkFolder,
};

/// How long the runner may take to answer after it was copied. It continues where it was, so only
/// an overloaded machine needs this. The wait is this short because the answer is only
/// informational.
const BRANCHED_TIMEOUT: Duration = Duration::from_secs(2);

/// Limit in characters for a reason given by the runner: one line.
const MAX_REASON_LENGTH: usize = 200;

/// A copy that is being made.
struct Copying {
    /// Id of the `branch` frame.
    id: RequestId,
    /// Whether the copy is for forks.
    for_forks: bool,
    give_up: CancellationToken,
    /// Fires when the sandbox is ready to copy the interpreter.
    watched: Option<oneshot::Receiver<()>>,
    branched: Option<Branched>,
    /// The runner's reason for refusing to be copied.
    declined: Option<String>,
    product: Option<Product>,
    /// Deadline for the runner's answer once there is a product.
    until: Instant,
}

/// Result of a copy.
pub(super) enum Product {
    Copy(Result<CheckpointId, CheckpointError>),
    Forks(Result<Vec<UnstartedFork>, String>),
}

impl Product {
    fn is_ok(&self) -> bool {
        matches!(self, Product::Copy(Ok(_)) | Product::Forks(Ok(_)))
    }

    /// Replaces the reason of a failure with the runner's own, if it gave one.
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

/// Replacement of the current interpreter.
pub(super) enum Replacement {
    Undo {
        cells: u32,
        copy: KeptState,
        revived: bool,
        reply: oneshot::Sender<Result<UndoReport, Refused>>,
    },
    Fork {
        fork: Option<Box<UnstartedFork>>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<UnstartedFork>>>,
    },
}

/// Receiver of requested forks.
pub(super) type ForkReply = oneshot::Sender<Result<ForkedSession, Refused>>;

/// The copies of a session.
pub(super) struct Branches {
    id: SessionId,
    undo: UndoPolicy,
    work_folder: WorkFolder,
    memory_limit: Option<u64>,
    shared: Arc<SharedSession>,
    numbers: Arc<AtomicU64>,
    history: History,
    copying: Option<Copying>,
    /// Why sessions cannot be copied here, once known.
    no_copies: Option<String>,
    /// The fork request in progress, and its result.
    forking: Option<(RequestId, ForkReply)>,
    forked: Option<Result<ForkedSession, String>>,
    pub(super) replacement: Option<Replacement>,
    /// Commands waiting for the end of an automatic copy.
    postponed: Vec<DriverCommand>,
}

impl Branches {
    pub(super) fn new(
        id: &SessionId,
        settings: &SessionSettings,
        shared: &Arc<SharedSession>,
        numbers: &Arc<AtomicU64>,
    ) -> Branches {
        Branches {
            id: id.clone(),
            undo: settings.undo,
            work_folder: settings.work_folder,
            memory_limit: settings.memory_limit,
            shared: shared.clone(),
            numbers: numbers.clone(),
            history: History::default(),
            copying: None,
            no_copies: None,
            forking: None,
            forked: None,
            replacement: None,
            postponed: Vec::new(),
        }
    }

    // History

    /// Adds a starting cell to the history. Returns notes for the outcome.
    pub(super) fn begin_cell(
        &mut self,
        code: &str,
        sandbox: Option<&dyn Sandbox>,
    ) -> Vec<OutcomeNote> {
        let UndoPolicy::On { checkpoints, .. } = self.undo else {
            return Vec::new();
        };
        let mut notes = Vec::from_iter(self.drop_lost(sandbox));
        notes.extend(self.give_up_for_memory(sandbox));
        let forgotten = self.history.began(code, checkpoints);
        forget(sandbox, forgotten);
        self.publish();
        notes
    }

    /// Records that the state differs from the last copy.
    pub(super) fn changed(&mut self) {
        self.history.changed();
    }

    /// Returns whether the state before the last cell is kept.
    pub(super) fn can_undo_last(&self) -> bool {
        self.history.before(1).is_some()
    }

    pub(super) fn can_undo(&self) -> bool {
        !self.history.undoable().is_empty()
    }

    /// Clears the history and returns its copies.
    pub(super) fn clear(&mut self) -> Vec<CheckpointId> {
        let copies = self.history.clear();
        self.publish();
        copies
    }

    /// Publishes the states that can be restored.
    fn publish(&self) {
        self.shared.facts().undoable = self.history.undoable();
    }

    fn keep(&mut self, copy: KeptState, sandbox: Option<&dyn Sandbox>) -> Vec<OutcomeNote> {
        let UndoPolicy::On { checkpoints, .. } = self.undo else {
            return Vec::new();
        };
        let forgotten = self.history.copied(copy, checkpoints);
        forget(sandbox, forgotten);
        let mut notes = Vec::from_iter(self.drop_lost(sandbox));
        self.publish();
        notes.extend(self.give_up_for_memory(sandbox));
        notes
    }

    /// Keeps a copy. Returns notes for the outcome.
    pub(super) fn keep_copy(
        &mut self,
        checkpoint: CheckpointId,
        Branched { lost, whole }: Branched,
        sandbox: Option<&dyn Sandbox>,
    ) -> Vec<OutcomeNote> {
        let packages = self.shared.facts().packages.clone();
        let copy = KeptState {
            whole,
            lost,
            packages,
            ..KeptState::new(checkpoint)
        };
        self.keep(copy, sandbox)
    }

    /// Keeps the copy of a session's initial state. Returns whether it is kept, and notes for the
    /// outcome.
    pub(super) fn keep_beginning(
        &mut self,
        beginning: Option<CheckpointId>,
        carried: &CopyReport,
        sandbox: Option<&dyn Sandbox>,
    ) -> (bool, Vec<OutcomeNote>) {
        let (Some(checkpoint), UndoPolicy::On { .. }) = (beginning, self.undo) else {
            return (false, Vec::new());
        };
        if carried.mapped {
            // It would pin files of the source for as long as it is kept.
            forget(sandbox, vec![checkpoint]);
            return (false, Vec::new());
        }
        let packages = self.shared.facts().packages.clone();
        let copy = KeptState {
            lacked: carried.lost.clone(),
            packages,
            ..KeptState::new(checkpoint)
        };
        (true, self.keep(copy, sandbox))
    }

    /// Drops copies that the kernel killed. Returns a note about them.
    pub(super) fn drop_lost(&mut self, sandbox: Option<&dyn Sandbox>) -> Option<OutcomeNote> {
        let sandbox = sandbox?;
        let taken = self.history.retain(|checkpoint| sandbox.has(checkpoint));
        if taken == 0 {
            return None;
        }
        self.publish();
        let states = match taken {
            1 => "1 kept state was".to_owned(),
            _ => format!("{taken} kept states were"),
        };
        Some(OutcomeNote {
            text: format!("Memory ran out, and {states} given up for it."),
            remedy: Some(Remedy::ListCheckpoints),
        })
    }

    /// Returns whether a copy could use up memory that the session itself needs.
    pub(super) fn is_full(&self, sandbox: Option<&dyn Sandbox>) -> bool {
        let (Some(sandbox), Some(limit)) = (sandbox, self.memory_limit) else {
            return false;
        };
        sandbox.memory().now > limit / 10 * 9
    }

    /// Discards the oldest copy when the sandbox is close to its memory limit. Returns a note about
    /// it.
    ///
    /// One copy at a time: the kernel reclaims its memory a little later, and the next check sees
    /// whether that was enough.
    pub(super) fn give_up_for_memory(
        &mut self,
        sandbox: Option<&dyn Sandbox>,
    ) -> Option<OutcomeNote> {
        let (sandbox, limit) = (sandbox?, self.memory_limit?);
        if sandbox.memory().now <= limit / 4 * 3 {
            return None;
        }
        sandbox.forget(self.history.give_up_oldest()?);
        self.publish();
        Some(OutcomeNote {
            text: "The oldest kept state was given up to save memory.".to_owned(),
            remedy: Some(Remedy::ListCheckpoints),
        })
    }

    // Copying

    /// Starts to copy the interpreter, for a later undo or for forks. Returns the work to be done.
    pub(super) fn begin_copy(
        &mut self,
        sandbox: Box<dyn Sandbox>,
        forks: Option<ForksWanted>,
    ) -> WorkFuture {
        let id = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (tell, watched) = oneshot::channel();
        let (mut watched, mut branched) = (Some(watched), None);
        let give_up = CancellationToken::new();
        let work: WorkFuture = match (forks, self.history.whole()) {
            (None, _) => Box::pin(copy(sandbox, tell, give_up.clone())),
            (Some(wanted), None) => Box::pin(fork(sandbox, tell, give_up.clone(), wanted)),
            (Some(wanted), Some(kept)) => {
                watched = None;
                branched = Some(Branched {
                    lost: kept.lost.clone(),
                    whole: true,
                });
                Box::pin(fork_kept(sandbox, kept.checkpoint, give_up.clone(), wanted))
            }
        };
        self.copying = Some(Copying {
            id,
            for_forks: forks.is_some(),
            give_up,
            watched,
            branched,
            declined: None,
            product: None,
            until: Instant::now(),
        });
        work
    }

    /// Waits until the sandbox is ready to copy the interpreter, or will not copy it. Pending
    /// forever when nothing is being copied.
    pub(super) async fn watched(&mut self) -> bool {
        match self
            .copying
            .as_mut()
            .and_then(|copying| copying.watched.as_mut())
        {
            Some(watched) => watched.await.is_ok(),
            None => std::future::pending().await,
        }
    }

    /// Returns the request that brings the runner to its branch point, if the sandbox is ready.
    pub(super) fn ask_runner(&mut self, watched: bool) -> Option<Request> {
        let copying = self.copying.as_mut()?;
        copying.watched = None;
        let undo_files = match self.undo {
            UndoPolicy::On { files, .. } => files,
            UndoPolicy::Off => 0,
        };
        watched.then_some(Request::Branch {
            id: copying.id,
            undo_files,
            fork: copying.for_forks,
            work_is_shared: self.work_folder == WorkFolder::Shared,
        })
    }

    /// Takes the runner's answer. Returns whether the copying can end.
    pub(super) fn branched(&mut self, id: RequestId, branched: Branched) -> bool {
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.id == id) else {
            return false;
        };
        copying.branched = Some(branched);
        copying.product.is_some()
    }

    /// Handles a claim of the runner that it cannot be copied. The claim is believed, because a
    /// false one only harms this session. Returns whether the claim is about this copy.
    pub(super) fn declined(&mut self, claim: &Claim) -> bool {
        let Claim::Failed { id, message, .. } = claim else {
            return false;
        };
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.id == *id) else {
            return false;
        };
        if copying.product.is_none() {
            copying.declined = Some(bounded_text(message, MAX_REASON_LENGTH));
            copying.give_up.cancel();
        }
        true
    }

    /// Takes the result of the copying. Returns whether it can end: after a failure, or if the
    /// interpreter is gone, no answer is awaited.
    pub(super) fn made(&mut self, product: Product, is_alive: bool) -> bool {
        let Some(copying) = &mut self.copying else {
            return false;
        };
        let can_end = !product.is_ok() || copying.branched.is_some() || !is_alive;
        copying.product = Some(product);
        copying.until = Instant::now() + BRANCHED_TIMEOUT;
        can_end
    }

    /// Cancels the work that copies, so that it ends soon and returns the sandbox. Its result is no
    /// longer needed.
    pub(super) fn give_up_copying(&mut self) {
        if let Some(copying) = self.copying.take() {
            copying.give_up.cancel();
        }
    }

    /// Returns the deadline for the runner's answer.
    pub(super) fn answer_due(&self) -> Option<Instant> {
        let copying = self.copying.as_ref()?;
        copying.product.is_some().then_some(copying.until)
    }

    /// Ends the copying, if there is a product.
    pub(super) fn end_copying(&mut self) -> Option<(Product, Branched)> {
        let copying = self.copying.take()?;
        let product = copying.product?.or_declined(copying.declined);
        Some((product, copying.branched.unwrap_or_default()))
    }

    pub(super) fn is_copying(&self) -> bool {
        self.copying.is_some()
    }

    /// Records that copies are impossible here. Returns a note for the outcome.
    pub(super) fn copies_are_impossible(&mut self, why: String) -> String {
        let note = format!("Cells cannot be undone here: {why}.");
        self.no_copies = Some(why);
        note
    }

    // Forks

    pub(super) fn begin_forking(&mut self, id: RequestId, reply: ForkReply) {
        self.forking = Some((id, reply));
    }

    /// Stores forks for the request that asked for them.
    pub(super) fn forks_made(
        &mut self,
        forks: Result<Vec<UnstartedFork>, String>,
        lost: Vec<String>,
        inheritance: &Inheritance,
    ) {
        self.forked = Some(forks.map(|made| forks::forked(made, lost, inheritance)));
    }

    /// Drops forks whose request is gone.
    pub(super) fn drop_forks(&mut self) {
        self.forked = None;
    }

    /// Returns the receiver of this fork request and its result.
    pub(super) fn end_forking(
        &mut self,
        id: RequestId,
    ) -> Option<(ForkReply, Option<Result<ForkedSession, Refused>>)> {
        let (_, reply) = self.forking.take_if(|(forking, _)| *forking == id)?;
        let forked = self.forked.take().map(|forked| {
            forked.map_err(|why| Refused::CannotCopy {
                id: self.id.clone(),
                why,
            })
        });
        Some((reply, forked))
    }

    // Replacement

    pub(super) fn postpone(&mut self, command: DriverCommand) {
        self.postponed.push(command);
    }

    pub(super) fn take_postponed(&mut self) -> Vec<DriverCommand> {
        std::mem::take(&mut self.postponed)
    }

    /// Prepares to undo cells, or returns why that is not possible.
    pub(super) fn prepare_undo(&self, cells: u32) -> Result<KeptState, Refused> {
        self.history.before(cells).cloned().ok_or_else(|| {
            let undoable = self.history.undoable().into_iter();
            let why = match &self.no_copies {
                None if !self.history.has_cells() => {
                    Some("no cell has run since it began or was reset".to_owned())
                }
                known => known.clone(),
            };
            Refused::NothingToUndo {
                id: self.id.clone(),
                cells,
                possible: undoable.map(|entry| entry.cells_back).collect(),
                why,
            }
        })
    }

    /// Refuses the replacement, because the session is not in a state that allows it.
    pub(super) fn refuse_replacement(&mut self) {
        match self.replacement.take() {
            Some(Replacement::Undo { reply, .. }) => {
                let _ = reply.send(Err(Refused::Occupied {
                    id: self.id.clone(),
                    then: Retry::Undo,
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

    /// Reports a completed undo.
    pub(super) fn undone(
        &mut self,
        (cells, copy, revived): (u32, KeptState, bool),
        carried: &CopyReport,
        sandbox: Option<&dyn Sandbox>,
    ) -> UndoReport {
        self.shared.facts().packages = copy.packages.clone();
        let forgotten = self.history.undone(cells);
        forget(sandbox, forgotten);
        self.publish();
        let now = Instant::now();
        let left = self.history.undoable().into_iter();
        let seeded = seeded(carried).map(|seeded| format!("{seeded}, as they did before."));
        UndoReport {
            undone: cells,
            revived,
            lost: without(united([&copy.lost, &carried.lost]), &copy.lacked),
            files: files_carried(carried, FilesCarried::Restored),
            left: left.map(|entry| entry.info(now)).collect(),
            notes: seeded.into_iter().collect(),
        }
    }

    /// Reports that the replacement could not be started. Returns a note for the outcome.
    pub(super) fn replacement_failed(
        &mut self,
        error: &LaunchError,
        sandbox: Option<&dyn Sandbox>,
    ) -> Option<OutcomeNote> {
        // An adopted fork is already running, so only an undo can fail here.
        let Some(Replacement::Undo { reply, .. }) = self.replacement.take() else {
            return None;
        };
        let note = self.drop_lost(sandbox);
        let _ = reply.send(Err(Refused::Launch(error.clone())));
        note
    }

    /// Discards all copies and everything that waits for one, because the session is reset.
    pub(super) fn reset(&mut self) -> Vec<CheckpointId> {
        self.give_up_copying();
        for command in self.take_postponed() {
            match command {
                DriverCommand::Undo { reply, .. } => {
                    drop(reply.send(Err(Refused::ResetWhileWaiting)))
                }
                DriverCommand::Adopt { fork, reply, .. } => drop(reply.send(Err(fork))),
                _ => {}
            }
        }
        match self.replacement.take() {
            Some(Replacement::Undo { reply, .. }) => {
                drop(reply.send(Err(Refused::ResetWhileWaiting)))
            }
            // The fork is already in place, and is reset there.
            Some(Replacement::Fork { reply, .. }) => drop(reply.send(Ok(()))),
            None => {}
        }
        self.clear()
    }

    /// Forgets the history, because the session ends. This is not published: a session that was
    /// kept has the same facts.
    pub(super) fn forget_history(&mut self) {
        self.history.clear();
    }

    /// Releases everything else, because the session ends. Senders of waiting commands learn it
    /// from the dropped channel.
    pub(super) fn end(&mut self) {
        self.postponed.clear();
        self.replacement = None;
        self.give_up_copying();
    }
}

fn forget(sandbox: Option<&dyn Sandbox>, checkpoints: Vec<CheckpointId>) {
    if let Some(sandbox) = sandbox {
        for checkpoint in checkpoints {
            sandbox.forget(checkpoint);
        }
    }
}
