//! Finds, creates and limits sessions, and remembers those that ended.
//!
//! The table is locked for lookups only, never across an await. An expired session leaves a
//! tombstone, so that calls with its id receive the reason instead of an empty new session. A
//! session that was closed explicitly leaves none.
//!
//! `files` copies files in and out, `forks` reserves and creates forks.

mod files;
mod forks;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::accounts::{Accounts, Starts};
use super::driver::{
    self, DriverCommand, DriverSetup, QuotaScope, SessionJob, SessionOrigin, SharedSession,
};
use super::install::PackageSource;
use super::kept_outputs::KeptOutputs;
use super::scheduler::FairScheduler;
use super::uploads::Uploads;
use super::{
    CheckpointInfo, ExecutionRef, FullOutput, Ledger, LimitSetup, Load, OutputId, Principal,
    Refused, ResetReport, SessionId, SessionInfo, SessionSettings, SessionState, SessionSummary,
    UndoPolicy, UndoReport, Usage, WorkFolder,
};
use crate::sandbox::{Backend, LaunchError, Preparation, Rules};
pub(super) use files::stage;

/// Tombstones kept per owner.
const MAX_TOMBSTONES: usize = 1000;
/// How long a tombstone is kept, unless there are too many. An agent that returns the next day
/// starts over anyway.
const TOMBSTONE_AGE: Duration = Duration::from_secs(24 * 3600);
/// Sessions per owner that failed to start and whose executions can still be queried. They hold
/// only the reason.
const MAX_FAILED_STARTS: usize = 100;
/// Number of idle sessions named in the error about too many sessions.
const IDLE_NAMED: usize = 3;
/// Capacity of a driver's command queue. A driver reads commands at once, so only a flood fills it.
const MAX_COMMANDS: usize = 256;

/// All sessions of one server.
#[derive(Clone)]
pub struct Sessions {
    inner: Arc<Inner>,
}

type Key = (Principal, SessionId);

struct Inner {
    backend: Arc<dyn Backend>,
    settings: SessionSettings,
    table: Mutex<Table>,
    /// Number of sessions, not counting hidden ones.
    session_count: watch::Sender<usize>,
    next_number: Arc<AtomicU64>,
    accounts: Arc<Accounts>,
    scheduler: FairScheduler,
    uploads: Arc<Uploads>,
    outputs: Arc<KeptOutputs>,
    ledger: Arc<Ledger>,
}

#[derive(Default)]
struct Table {
    sessions: HashMap<Key, DriverHandle>,
    tombstones: HashMap<Key, Tombstone>,
    /// Sessions that only their creator can see. They end when their creator drops them, or with
    /// the server.
    hidden: HashMap<u64, (mpsc::WeakSender<DriverCommand>, Weak<SharedSession>)>,
    /// Sessions that failed to start before anyone collected the error.
    failed_starts: VecDeque<(Key, DriverHandle)>,
    closing: bool,
}

/// Access to a session's driver.
#[derive(Clone)]
pub(super) struct DriverHandle {
    pub(super) commands: mpsc::Sender<DriverCommand>,
    pub(super) shared: Arc<SharedSession>,
}

struct Tombstone {
    why: String,
    at: Instant,
    age: Duration,
    executions: u64,
}

impl Sessions {
    pub fn new(backend: Arc<dyn Backend>, settings: SessionSettings) -> Sessions {
        let accounts = Arc::new(Accounts::new(settings.quotas));
        let next_number = Arc::new(AtomicU64::new(1));
        let scheduler = FairScheduler::new(settings.max_running);
        let (table, uploads, outputs) = (Mutex::default(), Arc::default(), Arc::default());
        let (session_count, ledger) = (watch::Sender::new(0), Arc::new(Ledger::new()));
        let inner = Inner {
            backend,
            settings,
            table,
            session_count,
            next_number,
            accounts,
            scheduler,
            uploads,
            outputs,
            ledger,
        };
        Sessions {
            inner: Arc::new(inner),
        }
    }

    /// Applies new caller limits.
    pub fn set_up_limits(&self, setup: LimitSetup) {
        self.inner.accounts.set_quotas(setup.quotas);
        self.inner.scheduler.set_permits(setup.max_running);
    }

    /// Returns the status of the one-time preparation before the first session. Requests wait for
    /// it.
    pub fn preparation(&self) -> watch::Receiver<Preparation> {
        self.inner.backend.preparation()
    }

    /// Returns a watch on the number of sessions.
    pub fn session_count(&self) -> watch::Receiver<usize> {
        self.inner.session_count.subscribe()
    }

    /// Returns the sessions of all owners.
    pub fn summaries(&self) -> Vec<SessionSummary> {
        let table = self.table();
        let summary = |((owner, id), entry): (&Key, &DriverHandle)| SessionSummary {
            owner: owner.clone(),
            id: id.clone(),
            running: matches!(
                entry.shared.facts().state,
                SessionState::Running | SessionState::Waiting
            ),
        };
        table.sessions.iter().map(summary).collect()
    }

    /// Restores the state before the last `cells` cells, also after the interpreter has ended.
    pub async fn undo(
        &self,
        owner: &Principal,
        id: &SessionId,
        cells: u32,
    ) -> Result<UndoReport, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        entry
            .commands
            .send(DriverCommand::Undo { cells, reply })
            .await
            .map_err(|_| self.gone(owner, id))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Returns the states that can be restored, the most recent first.
    pub fn checkpoints(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<Vec<CheckpointInfo>, Refused> {
        let entry = self.find(owner, id)?;
        if self.inner.settings.undo == UndoPolicy::Off {
            return Err(Refused::UndoOff { id: id.clone() });
        }
        let now = Instant::now();
        let undoable = entry.shared.facts().undoable.clone();
        Ok(undoable.into_iter().map(|entry| entry.info(now)).collect())
    }

    /// Starts a fresh interpreter, also in the middle of a cell. Files are kept.
    ///
    /// For the id of an expired session, a reset allows a new, empty session.
    pub async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused> {
        let entry = {
            let mut table = self.table();
            let key = (owner.clone(), id.clone());
            if table.closing {
                return Err(Refused::ShuttingDown);
            }
            match table.sessions.get(&key).cloned() {
                Some(entry) => entry,
                None if table.tombstones.remove(&key).is_some() => {
                    let files_kept = self.inner.settings.work_folder == WorkFolder::Shared;
                    return Ok(ResetReport {
                        interrupted_running_cell: false,
                        files_kept,
                        had_no_session: true,
                    });
                }
                // A client that starts with a reset wants a clean state, and a missing session is
                // one.
                None if *id == SessionId::default_session() => {
                    return Ok(ResetReport {
                        interrupted_running_cell: false,
                        files_kept: true,
                        had_no_session: true,
                    });
                }
                None => return Err(Refused::Unknown { id: id.clone() }),
            }
        };
        let (reply, answer) = oneshot::channel();
        entry
            .commands
            .send(DriverCommand::Reset(reply))
            .await
            .map_err(|_| self.gone(owner, id))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Returns an owner's sessions, including those that ended and are remembered.
    pub fn list(&self, owner: &Principal) -> Vec<SessionInfo> {
        let table = self.table();
        let now = Instant::now();
        let alive = table
            .sessions
            .iter()
            .filter(|((of, _), _)| of == owner)
            .map(|((_, id), entry)| {
                let facts = entry.shared.facts().clone();
                SessionInfo {
                    id: id.clone(),
                    state: facts.state,
                    ended: facts.ended,
                    executions: facts.executions,
                    age: now - entry.shared.created,
                    idle: if matches!(facts.state, SessionState::Running | SessionState::Waiting) {
                        Duration::ZERO
                    } else {
                        now - facts.last_used
                    },
                    memory: facts.memory,
                    rules: facts.rules,
                    requested: facts.requested,
                }
            });
        let ended = table
            .tombstones
            .iter()
            .filter(|((of, _), _)| of == owner)
            .map(|((_, id), tombstone)| SessionInfo {
                id: id.clone(),
                state: SessionState::Ended,
                ended: Some(tombstone.why.clone()),
                executions: tombstone.executions,
                age: tombstone.age,
                idle: now - tombstone.at,
                memory: None,
                rules: Rules::none(),
                requested: Vec::new(),
            });
        let mut all = alive.chain(ended).collect::<Vec<_>>();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// Destroys a session with its files. Its id may be reused.
    pub async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused> {
        let key = (owner.clone(), id.clone());
        let entry = {
            let mut table = self.table();
            match table.sessions.get(&key).cloned() {
                Some(entry) => entry,
                None if table.tombstones.remove(&key).is_some() => return Ok(()),
                None => return Err(Refused::Unknown { id: id.clone() }),
            }
        };
        shut_down(&entry).await;
        self.table().tombstones.remove(&key);
        Ok(())
    }

    /// Returns the full text of an execution, or the source of a figure, while it is kept: the last
    /// ones of a live session.
    pub fn full_output(
        &self,
        owner: &Principal,
        id: &SessionId,
        output: OutputId,
    ) -> Option<FullOutput> {
        self.find(owner, id).ok()?.shared.outputs.find(output)
    }

    /// Ends all sessions and destroys all sandboxes.
    pub async fn shut_down(&self) {
        let entries = {
            let mut table = self.table();
            table.closing = true;
            let Table {
                sessions, hidden, ..
            } = &*table;
            let visible = sessions.values().map(|entry| entry.commands.clone());
            visible
                .chain(
                    hidden
                        .values()
                        .filter_map(|(commands, _)| commands.upgrade()),
                )
                .collect::<Vec<_>>()
        };
        let leaving = entries
            .into_iter()
            .map(|entry| tokio::spawn(async move { shut_down_by(&entry).await }))
            .collect::<Vec<_>>();
        for left in leaving {
            let _ = left.await;
        }
        self.inner.backend.shut_down().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.inner.table()
    }

    pub(super) fn find(&self, owner: &Principal, id: &SessionId) -> Result<DriverHandle, Refused> {
        let key = (owner.clone(), id.clone());
        self.table()
            .look_up(&key)?
            .ok_or_else(|| Refused::Unknown { id: id.clone() })
    }

    /// Returns the session of an execution. For a session that failed to start, the results of its
    /// executions are known for a while.
    pub(super) fn locate(
        &self,
        owner: &Principal,
        which: &ExecutionRef,
    ) -> Result<(SessionId, DriverHandle), Refused> {
        let table = self.table();
        match which {
            ExecutionRef::InSession(id) => {
                let key = (owner.clone(), id.clone());
                let failed = || {
                    table
                        .failed_starts
                        .iter()
                        .rev()
                        .find(|(known, _)| *known == key)
                        .map(|(_, entry)| entry.clone())
                };
                let found = table.look_up(&key)?.or_else(failed);
                found
                    .map(|entry| (id.clone(), entry))
                    .ok_or_else(|| Refused::Unknown { id: id.clone() })
            }
            ExecutionRef::Handle(handle) => {
                let alive = table
                    .sessions
                    .iter()
                    .chain(table.failed_starts.iter().map(|(key, entry)| (key, entry)));
                let mut of_owner = alive.filter(|((of, _), _)| of == owner);
                let found =
                    of_owner.find(|(_, entry)| entry.shared.registry.find(handle).is_some());
                found
                    .map(|((_, id), entry)| (id.clone(), entry.clone()))
                    .ok_or(Refused::UnknownExecution)
            }
        }
    }

    pub(super) fn find_or_create(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<DriverHandle, Refused> {
        let key = (owner.clone(), id.clone());
        self.inner.accounts.refresh(owner);
        let mut table = self.table();
        if let Some(entry) = table.look_up(&key)? {
            return Ok(entry);
        }
        self.take_room(&table, owner, 1)?;
        Ok(self.open(
            &mut table,
            key,
            SessionOrigin::Launch(self.inner.backend.clone()),
            self.new_shared(),
        ))
    }

    pub(super) fn backend(&self) -> Arc<dyn Backend> {
        self.inner.backend.clone()
    }

    /// Returns the source of packages.
    pub(super) fn packages(&self) -> PackageSource {
        self.inner.settings.packages.clone()
    }

    fn new_shared(&self) -> SharedSession {
        SharedSession::new(self.inner.outputs.of_session())
    }

    /// Checks that `more` additional sessions may exist on this server.
    fn check_room(&self, table: &Table, owner: &Principal, more: usize) -> Result<(), Refused> {
        let limit = self.inner.settings.max_sessions;
        if table.sessions.len() + more > limit {
            let (own, oldest_idle) = (table.starts(owner, 0, 0).live, table.oldest_idle(owner));
            return Err(Refused::TooManySessions {
                limit,
                own,
                oldest_idle,
            });
        }
        Ok(())
    }

    /// Checks that `more` additional sessions may exist, and counts them as started.
    fn take_room(&self, table: &Table, owner: &Principal, more: usize) -> Result<(), Refused> {
        self.check_room(table, owner, more)?;
        self.inner
            .accounts
            .count_starts(owner, table.starts(owner, more, more))
    }

    /// Checks that variants may start, `kept` of which become sessions, and counts the variants and
    /// their cells. Turning a variant into a session may still be refused later.
    pub(super) fn take_room_for_variants(
        &self,
        owner: &Principal,
        variants: usize,
        kept: usize,
    ) -> Result<(), Refused> {
        self.inner.accounts.refresh(owner);
        let table = self.table();
        self.check_room(&table, owner, kept)?;
        let starts = table.starts(owner, variants, kept);
        self.inner.accounts.check_starts(owner, starts)?;
        self.inner.accounts.count_cells(owner, variants as u64)?;
        self.inner.accounts.count_starts(owner, starts)
    }

    /// Checks that one more cell may run, before any work is done for it.
    pub(super) fn check_cell(&self, owner: &Principal) -> Result<(), Refused> {
        self.inner.accounts.refresh(owner);
        self.inner.accounts.check_cells(owner, 1)
    }

    /// Counts a cell, or returns the quota that it would exceed.
    pub(super) fn count_cell(&self, owner: &Principal) -> Result<(), Refused> {
        self.inner.accounts.count_cells(owner, 1)
    }

    /// Checks that `more` additional bytes may be stored.
    fn check_stored(&self, owner: &Principal, more: u64) -> Result<(), Refused> {
        self.inner.accounts.refresh(owner);
        self.inner
            .accounts
            .check_stored(owner, self.kept(owner), more)
    }

    /// Returns how many more bytes an owner may store.
    fn room_to_store(&self, owner: &Principal) -> u64 {
        self.inner.accounts.room_to_store(owner, self.kept(owner))
    }

    /// Returns the bytes kept for an owner outside of sandboxes.
    fn kept(&self, owner: &Principal) -> u64 {
        self.table().starts(owner, 0, 0).kept + self.inner.uploads.bytes_of(owner)
    }

    /// Returns the number of sessions, of running cells in the whole server, and of cells waiting
    /// for a run permit.
    pub fn load(&self) -> Load {
        let (running, waiting) = self.inner.scheduler.load();
        Load {
            sessions: *self.inner.session_count.borrow(),
            running,
            waiting,
        }
    }

    /// Returns the package folders in use by sessions, including hidden copies.
    pub fn package_folders(&self) -> BTreeSet<String> {
        let table = self.table();
        let visible = table.sessions.values().map(|entry| entry.shared.clone());
        let hidden = table
            .hidden
            .values()
            .filter_map(|(_, shared)| shared.upgrade());
        visible
            .chain(hidden)
            .flat_map(|shared| shared.facts().packages.clone())
            .collect()
    }

    /// Revokes, in all sessions of an owner, a person's permissions for the tools of a server. From
    /// now on its name refers to another server, or to none.
    pub(super) fn forget_approvals_of(&self, owner: &Principal, server: &str) {
        for (_, entry) in self
            .table()
            .sessions
            .iter()
            .filter(|((of, _), _)| of == owner)
        {
            entry.shared.facts().granted.forget_server(server);
        }
    }

    /// Returns an owner's current usage.
    pub fn usage(&self, owner: &Principal) -> Usage {
        let usage = self.inner.accounts.usage(owner);
        let sessions = self.table().starts(owner, 0, 0).live;
        Usage {
            sessions,
            stored: usage.stored + self.kept(owner),
            ..usage
        }
    }

    /// Adds a session to the table and starts its driver.
    fn open(
        &self,
        table: &mut Table,
        key: Key,
        origin: SessionOrigin,
        shared: impl Into<Arc<SharedSession>>,
    ) -> DriverHandle {
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let entry = DriverHandle {
            commands,
            shared: shared.into(),
        };
        table.sessions.insert(key.clone(), entry.clone());
        self.inner.session_count.send_replace(table.sessions.len());
        let (owner, id) = key.clone();
        let inner = self.inner.clone();
        let on_gone = Box::new(move |why| {
            inner.uploads.forget(&key.0, &key.1);
            let mut table = inner.table();
            table.retire(key, why);
            inner.session_count.send_replace(table.sessions.len());
        });
        let (settings, numbers) = (self.inner.settings.clone(), self.inner.next_number.clone());
        let (quota_scope, shared) = (Some(self.quota_scope(&owner, &id)), entry.shared.clone());
        let beginning = DriverSetup {
            id,
            quota_scope,
            origin,
            settings,
            numbers,
            shared,
        };
        tokio::spawn(driver::drive(beginning, receiver, on_gone));
        entry
    }

    fn quota_scope(&self, owner: &Principal, session: &SessionId) -> QuotaScope {
        let Inner {
            accounts,
            scheduler,
            ledger,
            ..
        } = &*self.inner;
        QuotaScope {
            owner: owner.clone(),
            session: session.clone(),
            accounts: accounts.clone(),
            scheduler: scheduler.clone(),
            ledger: ledger.clone(),
        }
    }

    /// Returns the executions that have ended and are not recorded yet.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.inner.ledger
    }

    /// Starts a driver that only the caller can see.
    pub(super) fn hide_as(
        &self,
        id: SessionId,
        quota_scope: Option<QuotaScope>,
        origin: SessionOrigin,
    ) -> Result<DriverHandle, Refused> {
        let (commands, receiver) = mpsc::channel(MAX_COMMANDS);
        let entry = DriverHandle {
            commands,
            shared: Arc::new(self.new_shared()),
        };
        let number = self.inner.next_number.fetch_add(1, Ordering::Relaxed);
        {
            let mut table = self.table();
            if table.closing {
                return Err(Refused::ShuttingDown);
            }
            table.hidden.insert(
                number,
                (entry.commands.downgrade(), Arc::downgrade(&entry.shared)),
            );
        }
        let inner = self.inner.clone();
        let on_gone = Box::new(move |_| drop(inner.table().hidden.remove(&number)));
        let settings = SessionSettings {
            undo: UndoPolicy::Off,
            idle_timeout: Duration::MAX,
            ..self.inner.settings.clone()
        };
        let (numbers, shared) = (self.inner.next_number.clone(), entry.shared.clone());
        let beginning = DriverSetup {
            id,
            quota_scope,
            origin,
            settings,
            numbers,
            shared,
        };
        tokio::spawn(driver::drive(beginning, receiver, on_gone));
        Ok(entry)
    }

    /// Sends a job to a driver and waits for its answer. A cancelled token is forwarded, and the
    /// answer is still awaited.
    pub(super) async fn ask<T>(
        &self,
        entry: &DriverHandle,
        job: SessionJob,
        mut answer: oneshot::Receiver<Result<T, Refused>>,
        cancel: &CancellationToken,
    ) -> Result<Result<T, Refused>, SubmitError> {
        let number = self.submit(entry, job)?;
        let answer = tokio::select! {
            answer = &mut answer => answer,
            () = cancel.cancelled() => {
                // A driver that is gone has already answered.
                let _ = entry.commands.send(DriverCommand::Cancel(number)).await;
                answer.await
            }
        };
        answer.map_err(|_| SubmitError::Gone(None))
    }

    fn submit(&self, entry: &DriverHandle, job: SessionJob) -> Result<u64, SubmitError> {
        let number = self.next_number();
        self.submit_as(entry, number, job).map(|()| number)
    }

    /// Returns a request number that is unique in this server.
    pub(super) fn next_number(&self) -> u64 {
        self.inner.next_number.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn submit_as(
        &self,
        entry: &DriverHandle,
        number: u64,
        job: SessionJob,
    ) -> Result<(), SubmitError> {
        match entry.commands.try_send(DriverCommand::Submit(number, job)) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(SubmitError::Flooded),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                Err(SubmitError::Gone(entry.shared.facts().failure.clone()))
            }
        }
    }

    pub(super) fn explained(
        &self,
        owner: &Principal,
        id: &SessionId,
        error: SubmitError,
    ) -> Refused {
        match error {
            SubmitError::Flooded => Refused::Busy {
                waiting: MAX_COMMANDS,
            },
            SubmitError::Gone(Some(failure)) => Refused::Launch(failure),
            SubmitError::Gone(None) => self.gone(owner, id),
        }
    }

    pub(super) fn settings(&self) -> &SessionSettings {
        &self.inner.settings
    }

    /// Returns the reason why a session that existed a moment ago is gone.
    fn gone(&self, owner: &Principal, id: &SessionId) -> Refused {
        match self.find(owner, id) {
            Err(refused) => refused,
            Ok(_) => Refused::ClosedWhileWaiting,
        }
    }
}

impl Inner {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table
            .lock()
            .expect("nothing panics while it holds the table")
    }
}

impl Table {
    fn look_up(&self, key: &Key) -> Result<Option<DriverHandle>, Refused> {
        if self.closing {
            return Err(Refused::ShuttingDown);
        }
        if let Some(tombstone) = self.tombstones.get(key) {
            return Err(Refused::Ended {
                id: key.1.clone(),
                why: tombstone.why.clone(),
                undo: false,
            });
        }
        Ok(self.sessions.get(key).cloned())
    }

    /// Returns whether an id is in use, also by a session that ended and is remembered.
    fn knows(&self, owner: &Principal, id: &SessionId) -> bool {
        let key = (owner.clone(), id.clone());
        self.sessions.contains_key(&key) || self.tombstones.contains_key(&key)
    }

    /// Describes the sandboxes that an owner is about to start, together with its current usage.
    fn starts(&self, owner: &Principal, sandboxes: usize, lasting: usize) -> Starts {
        let mut starts = Starts {
            sandboxes,
            lasting,
            live: 0,
            kept: 0,
        };
        for (_, entry) in self.sessions.iter().filter(|((of, _), _)| of == owner) {
            starts.live += 1;
            starts.kept += entry.shared.kept_bytes();
        }
        starts
    }

    /// Returns the sessions that could be closed with the least loss.
    fn oldest_idle(&self, owner: &Principal) -> Vec<SessionId> {
        let mut idle = self
            .sessions
            .iter()
            .filter(|((of, _), _)| of == owner)
            .filter_map(|((_, id), entry)| {
                let facts = entry.shared.facts();
                matches!(facts.state, SessionState::Idle | SessionState::Ended)
                    .then(|| (facts.last_used, id.clone()))
            })
            .collect::<Vec<_>>();
        idle.sort();
        idle.into_iter()
            .take(IDLE_NAMED)
            .map(|(_, id)| id)
            .collect()
    }

    /// Removes a session. With a reason, leaves a tombstone.
    fn retire(&mut self, key: Key, why: Option<String>) {
        let Some(entry) = self.sessions.remove(&key) else {
            return;
        };
        let Some(why) = why else {
            if entry.shared.registry.has_uncollected() {
                let of_owner = |((of, _), _): &(Key, DriverHandle)| *of == key.0;
                if self
                    .failed_starts
                    .iter()
                    .filter(|failed| of_owner(failed))
                    .count()
                    >= MAX_FAILED_STARTS
                {
                    self.failed_starts
                        .iter()
                        .position(of_owner)
                        .map(|oldest| self.failed_starts.remove(oldest));
                }
                self.failed_starts.push_back((key, entry));
            }
            return;
        };
        let now = Instant::now();
        self.tombstones
            .retain(|_, tombstone| now - tombstone.at < TOMBSTONE_AGE);
        let of_owner = || self.tombstones.iter().filter(|((of, _), _)| *of == key.0);
        if of_owner().count() >= MAX_TOMBSTONES {
            let oldest = of_owner()
                .min_by_key(|(_, tombstone)| tombstone.at)
                .map(|(key, _)| key.clone());
            oldest.and_then(|key| self.tombstones.remove(&key));
        }
        let executions = entry.shared.facts().executions;
        self.tombstones.insert(
            key,
            Tombstone {
                why,
                at: now,
                age: now - entry.shared.created,
                executions,
            },
        );
    }
}

/// Reason why a driver did not answer.
#[derive(Debug, Clone)]
pub(super) enum SubmitError {
    /// Its command queue is full.
    Flooded,
    /// It has ended, possibly because it failed to start, and before it received the request.
    Gone(Option<LaunchError>),
}

/// Ends a session and waits until all its resources are released.
pub(super) async fn shut_down(entry: &DriverHandle) {
    shut_down_by(&entry.commands).await;
}

async fn shut_down_by(commands: &mpsc::Sender<DriverCommand>) {
    let (reply, left) = oneshot::channel();
    if commands.send(DriverCommand::Shutdown(reply)).await.is_ok() {
        let _ = left.await;
    }
}
