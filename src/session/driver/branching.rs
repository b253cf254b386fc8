//! The driver's steps for copies, forks and undo. They connect `branches`, the sandbox and the
//! machine.

use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::branches::{ForkReply, Product, Replacement};
use super::forks::{ForkedSession, ForksWanted, UnstartedFork, restore};
use super::launch::{Finished, Live};
use super::{Driver, DriverCommand};
use crate::runner_client::{Branched, CopyReport};
use crate::sandbox::{CheckpointError, LaunchError, Sandbox};
use crate::session::late::LateText;
use crate::session::state::{RequestEnd, RequestId, SessionEvent, State};
use crate::session::{Refused, Retry, UndoPolicy, UndoReport};

impl Driver {
    /// Starts to copy the interpreter, for a later undo or for forks.
    pub(super) fn copy(&mut self, forks: Option<ForksWanted>) {
        let sandbox = self.launch.sandbox();
        if forks.is_none() && self.branches.is_full(sandbox) {
            self.notes.extend(self.branches.give_up_for_memory(sandbox));
            self.notes.push(
                "The state before this cell was not kept, because the session holds nearly all the \
                 memory it may; so this cell cannot be undone by itself."
                    .to_owned()
                    .into(),
            );
            return self.happen(SessionEvent::Copied);
        }
        let Some(sandbox) = self.launch.take_sandbox() else {
            return self.happen(SessionEvent::Copied);
        };
        let work = self.branches.begin_copy(sandbox, forks);
        self.launch.begin(work);
    }

    /// Asks the runner to go to its branch point, if the sandbox is ready.
    pub(super) fn watched(&mut self, watched: bool) {
        if let Some(request) = self.branches.ask_runner(watched) {
            self.send(&request, b"");
        }
    }

    pub(super) fn branched(&mut self, id: RequestId, branched: Branched) {
        if self.branches.branched(id, branched) {
            self.copied();
        }
    }

    /// Takes the result of a copy.
    pub(super) fn made(&mut self, sandbox: Box<dyn Sandbox>, product: Product) {
        self.launch.give_back(Some(sandbox));
        if self.branches.made(product, self.live.is_some()) {
            self.copied();
        }
    }

    /// Ends the copying. The copy is kept or its forks are handed out, and the session continues.
    pub(super) fn copied(&mut self) {
        let Some((product, branched)) = self.branches.end_copying() else {
            return;
        };
        match product {
            Product::Copy(Ok(checkpoint)) => {
                let sandbox = self.launch.sandbox();
                let notes = self.branches.keep_copy(checkpoint, branched, sandbox);
                self.notes.extend(notes);
            }
            Product::Copy(Err(error)) => self.copy_failed(error),
            Product::Forks(forks) => {
                let inheritance = self.inheritance();
                self.branches.forks_made(forks, branched.lost, &inheritance);
            }
        }
        for command in self.branches.take_postponed() {
            match command {
                DriverCommand::Undo { cells, reply } => self.undo_now(cells, reply),
                DriverCommand::Adopt { fork, note, reply } => self.adopt_now(fork, note, reply),
                other => self.command(other),
            }
        }
        self.happen(SessionEvent::Copied);
        self.branches.drop_forks();
    }

    fn copy_failed(&mut self, error: CheckpointError) {
        // The end of the interpreter is reported elsewhere.
        if !matches!(self.machine.state(), State::Copying { .. }) {
            return;
        }
        match error {
            CheckpointError::Unsupported { why } => {
                debug!(
                    session = self.id.as_str(),
                    why, "sessions cannot be copied here"
                );
                let note = self.branches.copies_are_impossible(why);
                self.notes.push(note.into());
                self.happen(SessionEvent::CopiesImpossible);
            }
            CheckpointError::Failed { why } => {
                warn!(
                    session = self.id.as_str(),
                    why, "a session could not be copied"
                );
                let note = format!(
                    "The state before this cell could not be kept ({why}), so this cell cannot be \
                     undone by itself."
                );
                self.notes.push(note.into());
            }
        }
    }

    /// Undoes cells, or returns why not. Waits for a copy in progress, but not for a cell.
    pub(super) fn undo(&mut self, cells: u32, reply: oneshot::Sender<Result<UndoReport, Refused>>) {
        let id = self.id.clone();
        if self.settings.undo == UndoPolicy::Off {
            let _ = reply.send(Err(Refused::UndoOff { id }));
        } else if self.machine.has_cell() {
            let _ = reply.send(Err(Refused::CellRunning {
                id,
                then: Retry::Undo,
            }));
        } else if self.is_copying_for_itself() {
            self.branches.postpone(DriverCommand::Undo { cells, reply });
        } else {
            self.undo_now(cells, reply);
        }
    }

    fn undo_now(&mut self, cells: u32, reply: oneshot::Sender<Result<UndoReport, Refused>>) {
        self.notes
            .extend(self.branches.drop_lost(self.launch.sandbox()));
        match self.branches.prepare_undo(cells) {
            Err(refused) => drop(reply.send(Err(refused))),
            Ok(copy) => {
                self.branches.replacement = Some(Replacement::Undo {
                    cells,
                    copy,
                    revived: self.machine.state() == State::Ended,
                    reply,
                });
                self.happen(SessionEvent::ReplaceAsked);
            }
        }
    }

    /// Replaces this session's interpreter and sandbox with a fork, or returns the fork.
    pub(super) fn adopt(
        &mut self,
        fork: Box<UnstartedFork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<UnstartedFork>>>,
    ) {
        if self.machine.has_cell() {
            let _ = reply.send(Err(fork));
        } else if self.is_copying_for_itself() {
            self.branches
                .postpone(DriverCommand::Adopt { fork, note, reply });
        } else {
            self.adopt_now(fork, note, reply);
        }
    }

    fn adopt_now(
        &mut self,
        fork: Box<UnstartedFork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<UnstartedFork>>>,
    ) {
        self.branches.replacement = Some(Replacement::Fork {
            fork: Some(fork),
            note,
            reply,
        });
        self.happen(SessionEvent::ReplaceAsked);
    }

    fn is_copying_for_itself(&self) -> bool {
        self.branches.is_copying()
            && !matches!(self.machine.state(), State::Copying { fork: Some(_) })
    }

    /// Hands over sandbox and interpreter, if they are idle.
    pub(super) fn surrender(&mut self) -> Option<Box<UnstartedFork>> {
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
        let sandbox = self.launch.take_sandbox()?;
        let mut live = self.live.take()?;
        live.inheritance = self.inheritance();
        self.metered = None;
        Some(Box::new(UnstartedFork::of(sandbox, live)))
    }

    /// Starts the replacement.
    pub(super) fn replace(&mut self) {
        self.live = None;
        match &mut self.branches.replacement {
            Some(Replacement::Undo { copy, .. }) => {
                let checkpoint = copy.checkpoint;
                if let Some(sandbox) = self.launch.take_sandbox() {
                    self.launch.begin(Box::pin(restore(sandbox, checkpoint)));
                }
            }
            Some(Replacement::Fork { fork, .. }) => {
                let parts = fork.take().and_then(|fork| fork.into_parts());
                self.branches.clear();
                self.metered = None;
                let old = self.launch.take_sandbox();
                self.launch.begin(Box::pin(async move {
                    if let Some(mut old) = old {
                        old.destroy().await;
                    }
                    match parts {
                        Some((sandbox, live)) => Finished::Started(Some(sandbox), Ok(live)),
                        None => Finished::failed("the kept variant was gone"),
                    }
                }));
            }
            None => {}
        }
    }

    /// Reports that the replacement is in place.
    pub(super) fn replaced(&mut self, carried: &CopyReport) {
        // Late output of the previous interpreter does not belong to this one.
        self.late = LateText::default();
        match self.branches.replacement.take() {
            Some(Replacement::Undo {
                cells,
                copy,
                revived,
                reply,
            }) => {
                let (undo, sandbox) = ((cells, copy, revived), self.launch.sandbox());
                let _ = reply.send(Ok(self.branches.undone(undo, carried, sandbox)));
            }
            Some(Replacement::Fork { note, reply, .. }) => {
                self.notes = vec![note.into()];
                self.happen(SessionEvent::Changed);
                let _ = reply.send(Ok(()));
            }
            None => {}
        }
    }

    /// Reports that the replacement could not be started.
    pub(super) fn replacement_failed(&mut self, error: &LaunchError) {
        let sandbox = self.launch.sandbox();
        self.notes
            .extend(self.branches.replacement_failed(error, sandbox));
    }

    /// Answers a request for forks.
    pub(super) fn answer_fork(
        &mut self,
        answer: RequestEnd,
        reply: ForkReply,
        forked: Option<Result<ForkedSession, Refused>>,
    ) {
        let result = match (answer, forked) {
            (RequestEnd::Finished, Some(forked)) => forked,
            (RequestEnd::Reset, _) => Err(Refused::ResetWhileWaiting),
            (RequestEnd::Closed, _) => Err(Refused::ClosedWhileWaiting),
            (answer, _) => Err(self.refusal(answer)),
        };
        // If the caller is gone, the forks are destroyed when dropped.
        let _ = reply.send(result);
    }
}
