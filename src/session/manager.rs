//! Finds, creates and limits sessions, and remembers those that ended.
//!
//! The table is locked for lookups only, never across an await. An expired session leaves a
//! tombstone, so that calls with its id receive the reason instead of an empty new session. A
//! session that was closed explicitly leaves none.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tempfile::SpooledTempFile;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::accounts::{Accounts, Starts};
use super::driver::{
    self, Beginning, Command, Customer, Extent, Fork, Forked, ForksWanted, Job, Origin, Received,
    STAGED_IN_MEMORY, Shared,
};
use super::install::Source;
use super::kept_outputs::KeptOutputs;
use super::tools::Grant;
use super::turns::Turns;
use super::uploads::{UploadPart, Uploaded, Uploads};
use super::{
    CheckpointInfo, FileList, FileRange, ForkNames, ForkReport, ForkRequest, FullOutput,
    InsidePath, Ledger, LimitSetup, Load, MOST_FORKS, OutputId, Principal, Refused, ResetReport,
    Resident, SessionId, SessionInfo, SessionSettings, SessionState, Undo, UndoReport, Usage,
    Which, WorkFolder,
};
use crate::sandbox::{Backend, LaunchError, Preparation, Rules};

/// Tombstones kept per owner.
const MOST_TOMBSTONES: usize = 1000;
/// How long a tombstone is kept, unless there are too many. An agent that returns the next day
/// starts over anyway.
const TOMBSTONE_AGE: Duration = Duration::from_secs(24 * 3600);
/// Sessions per owner that failed to start and whose executions can still be queried. They hold
/// only the reason.
const MOST_UNBORN: usize = 100;
/// Number of idle sessions named in the error about too many sessions.
const IDLE_NAMED: usize = 3;
/// Limit in characters for the suffix added to a source's name, so that part of that name remains.
const LONGEST_SUFFIX: usize = 48;
/// Capacity of a driver's command queue. A driver reads commands at once, so only a flood fills it.
const MOST_COMMANDS: usize = 256;
/// The largest part of a file that one call returns. Callers request the rest in further calls.
const LARGEST_PART: u64 = 1024 * 1024 * 1024;
/// Bytes of a file copied in one step.
const CHUNK: usize = 256 * 1024;

/// All sessions of one server.
#[derive(Clone)]
pub struct Sessions {
    house: Arc<House>,
}

type Key = (Principal, SessionId);

struct House {
    backend: Arc<dyn Backend>,
    settings: SessionSettings,
    table: Mutex<Table>,
    /// Number of sessions, not counting hidden ones.
    population: watch::Sender<usize>,
    next_number: Arc<AtomicU64>,
    accounts: Arc<Accounts>,
    turns: Turns,
    uploads: Arc<Uploads>,
    outputs: Arc<KeptOutputs>,
    ledger: Arc<Ledger>,
}

#[derive(Default)]
struct Table {
    sessions: HashMap<Key, Entry>,
    tombstones: HashMap<Key, Tombstone>,
    /// Sessions that only their creator can see. They end when their creator drops them, or with
    /// the server.
    hidden: HashMap<u64, (mpsc::WeakSender<Command>, Weak<Shared>)>,
    /// Sessions that failed to start before anyone collected the error.
    unborn: VecDeque<(Key, Entry)>,
    closing: bool,
}

/// Access to a session's driver.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) shared: Arc<Shared>,
}

/// A session that waits for its fork. If it is dropped without one, the session is removed.
pub(super) struct Seat {
    pub(super) id: SessionId,
    entry: Entry,
    fork: oneshot::Sender<Box<Fork>>,
}

impl Seat {
    /// Gives the session its interpreter and sandbox.
    pub(super) fn take(self, fork: Box<Fork>) -> SessionId {
        // If the session was closed in the meantime, the fork is destroyed when dropped.
        let _ = self.fork.send(fork);
        self.id
    }
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
        let turns = Turns::new(settings.max_running);
        let (table, uploads, outputs) = (Mutex::default(), Arc::default(), Arc::default());
        let (population, ledger) = (watch::Sender::new(0), Arc::new(Ledger::new()));
        let house = House {
            backend,
            settings,
            table,
            population,
            next_number,
            accounts,
            turns,
            uploads,
            outputs,
            ledger,
        };
        Sessions {
            house: Arc::new(house),
        }
    }

    /// Applies new caller limits.
    pub fn set_up_limits(&self, setup: LimitSetup) {
        self.house.accounts.set_quotas(setup.quotas);
        self.house.turns.set_places(setup.max_running);
    }

    /// Returns the status of the one-time preparation before the first session. Requests wait for
    /// it.
    pub fn preparation(&self) -> watch::Receiver<Preparation> {
        self.house.backend.preparation()
    }

    /// Returns a watch on the number of sessions.
    pub fn population(&self) -> watch::Receiver<usize> {
        self.house.population.subscribe()
    }

    /// Returns the sessions of all owners.
    pub fn residents(&self) -> Vec<Resident> {
        let table = self.table();
        let resident = |((owner, id), entry): (&Key, &Entry)| Resident {
            owner: owner.clone(),
            id: id.clone(),
            running: matches!(
                entry.shared.facts().state,
                SessionState::Running | SessionState::Waiting
            ),
        };
        table.sessions.iter().map(resident).collect()
    }

    /// Creates sessions with a copy of everything this one has, each in its own sandbox. All are
    /// created or none.
    ///
    /// Dropping the future removes the sessions that are not finished.
    pub async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: impl Into<ForkRequest>,
    ) -> Result<ForkReport, Refused> {
        let ForkRequest { names, servers } = request.into();
        let source = self.find(owner, id)?;
        let granted = servers
            .map(|entries| self.grants_named(owner, id, &source, &entries))
            .transpose()?;
        let count = match &names {
            ForkNames::Count(count) => *count as usize,
            ForkNames::Named(names) => names.len(),
        };
        if count == 0 || count > MOST_FORKS as usize {
            return Err(Refused::ForkCount { count });
        }
        let seats = self.seats(owner, id, names)?;
        let wanted = ForksWanted {
            count,
            undoable: self.house.settings.undo != Undo::Off,
        };
        let forked = match self
            .fork_of(owner, id, &source, wanted, &CancellationToken::new())
            .await
        {
            Ok(forked) => forked,
            Err(refused) => {
                for Seat { entry, fork, .. } in seats {
                    drop(fork);
                    leave(&entry).await;
                }
                return Err(refused);
            }
        };
        let mut forked = forked;
        if let Some(granted) = &granted {
            forked
                .forks
                .iter_mut()
                .for_each(|fork| fork.grant_only(granted));
        }
        let forks = seats
            .into_iter()
            .zip(forked.forks)
            .map(|(seat, fork)| seat.take(Box::new(fork)))
            .collect();
        Ok(ForkReport {
            forks,
            lost: forked.lost,
            files: forked.files,
            notes: vec![forked.draws],
        })
    }

    /// Parses the tools that forks may use; each entry is a server or some of its tools. A tool
    /// that the source may not use looks the same as one that does not exist.
    fn grants_named(
        &self,
        owner: &Principal,
        id: &SessionId,
        source: &Entry,
        entries: &[String],
    ) -> Result<Vec<Grant>, Refused> {
        let packages = self
            .house
            .settings
            .tools
            .0
            .as_ref()
            .map(|broker| broker.packages(owner))
            .unwrap_or_default();
        let held = source.shared.facts().grants.clone();
        let has = |server: &str, fits: &dyn Fn(&str) -> bool| {
            let package = packages
                .iter()
                .find(|package| package.server.as_str() == server);
            package.is_some_and(|package| {
                package
                    .tools
                    .iter()
                    .any(|tool| fits(&tool.original) && held.allow(server, &tool.original))
            })
        };
        let read = |entry: &String| {
            let known = packages.iter().map(|package| package.server.as_str());
            let known = known.filter(|server| has(server, &|_| true) || held.allow_all_of(server));
            let grant = Grant::parse(entry, known);
            let grant = grant.filter(|grant| {
                grant.tool.is_anything() || has(&grant.server, &|tool| grant.tool.fits(tool))
            });
            grant.ok_or_else(|| Refused::NoServer {
                name: entry.clone(),
            })
        };
        let list = entries
            .iter()
            .map(read)
            .collect::<Result<Vec<Grant>, Refused>>()?;
        if held.narrowed(&list).is_none() {
            let why = "its tools were narrowed too many times already; name them without stars"
                .to_owned();
            return Err(Refused::CannotCopy {
                id: id.clone(),
                why,
            });
        }
        Ok(list)
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
            .send(Command::Undo { cells, reply })
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
        if self.house.settings.undo == Undo::Off {
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
                    let files_kept = self.house.settings.work_folder == WorkFolder::Shared;
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
            .send(Command::Reset(reply))
            .await
            .map_err(|_| self.gone(owner, id))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Stores a file, and creates the session if its id is new. The file appears whole or not at
    /// all.
    ///
    /// The source is read to its end first, so that a slow or failing source neither blocks the
    /// session nor leaves a partial file.
    pub async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let (source, size) = stage(source).await.map_err(|error| Refused::Transfer {
            why: error.kind().to_string(),
        })?;
        self.check_stored(owner, size)?;
        self.write_staged(owner, id, path, source, overwrite).await
    }

    async fn write_staged(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: SpooledTempFile,
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let entry = self.find_or_create(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(
            &entry,
            Job::Write {
                path: path.clone(),
                overwrite,
                source,
                reply,
            },
        )
        .map_err(|silence| self.explained(owner, id, silence))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Copies a file of at most `limit` bytes to `sink`. Nothing is written to the sink unless the
    /// whole file was read.
    pub async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        let received = self.read(owner, id, path, Extent::Whole { limit }).await?;
        unstage(received.bytes, sink)
            .await
            .map_err(|error| Refused::Transfer {
                why: error.kind().to_string(),
            })
    }

    /// Copies a part of a file to `sink`: from `offset` to the end or at most `length` bytes, and
    /// at most 1 GiB per call. An offset beyond the end yields no bytes, which is not an error.
    pub async fn read_file_range(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        offset: u64,
        length: Option<u64>,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<FileRange, Refused> {
        let length = length.unwrap_or(LARGEST_PART).min(LARGEST_PART);
        // The runner uses signed numbers.
        let offset = offset.min(i64::MAX as u64);
        let Received {
            bytes,
            sent,
            total,
            version,
        } = self
            .read(owner, id, path, Extent::Part { offset, length })
            .await?;
        unstage(bytes, sink)
            .await
            .map_err(|error| Refused::Transfer {
                why: error.kind().to_string(),
            })?;
        Ok(FileRange {
            total,
            sent,
            version,
        })
    }

    async fn read(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        what: Extent,
    ) -> Result<Received, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(
            &entry,
            Job::Read {
                path: path.clone(),
                what,
                reply,
            },
        )
        .map_err(|silence| self.explained(owner, id, silence))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Lists the files of a session, while no cell runs in it.
    pub async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(&entry, Job::List { reply })
            .map_err(|silence| self.explained(owner, id, silence))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Accepts one part of a file that is uploaded in several. The last part stores the file as
    /// `write_file` does.
    ///
    /// If the source of a part fails or the future is dropped, the bytes that arrived are kept;
    /// `uploaded` returns their number.
    pub async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused> {
        self.check_stored(owner, 1)?;
        let room = self.room_to_store(owner);
        let taken = self
            .house
            .uploads
            .take(owner, id, path, part, room, source)
            .await;
        if let Err(Refused::UploadTooLarge) = taken {
            // Name the quota if it was the limiting factor.
            self.check_stored(owner, part.offset.saturating_add(room).saturating_add(1))?;
        }
        let (size, file) = taken?;
        let Some(source) = file else {
            return Ok(Uploaded {
                size,
                finished: false,
            });
        };
        let size = self
            .write_staged(owner, id, path, source, part.overwrite)
            .await?;
        Ok(Uploaded {
            size,
            finished: true,
        })
    }

    /// Returns how many bytes of an unfinished upload have arrived.
    pub fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        self.house.uploads.size(owner, id, path)
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
        leave(&entry).await;
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
            .map(|entry| tokio::spawn(async move { leave_by(&entry).await }))
            .collect::<Vec<_>>();
        for left in leaving {
            let _ = left.await;
        }
        self.house.backend.shut_down().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.house.table()
    }

    pub(super) fn find(&self, owner: &Principal, id: &SessionId) -> Result<Entry, Refused> {
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
        which: &Which,
    ) -> Result<(SessionId, Entry), Refused> {
        let table = self.table();
        match which {
            Which::Of(id) => {
                let key = (owner.clone(), id.clone());
                let unborn = || {
                    table
                        .unborn
                        .iter()
                        .rev()
                        .find(|(known, _)| *known == key)
                        .map(|(_, entry)| entry.clone())
                };
                let found = table.look_up(&key)?.or_else(unborn);
                found
                    .map(|entry| (id.clone(), entry))
                    .ok_or_else(|| Refused::Unknown { id: id.clone() })
            }
            Which::This(handle) => {
                let alive = table
                    .sessions
                    .iter()
                    .chain(table.unborn.iter().map(|(key, entry)| (key, entry)));
                let mut of_owner = alive.filter(|((of, _), _)| of == owner);
                let found = of_owner.find(|(_, entry)| entry.shared.docket.find(handle).is_some());
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
    ) -> Result<Entry, Refused> {
        let key = (owner.clone(), id.clone());
        self.house.accounts.refresh(owner);
        let mut table = self.table();
        if let Some(entry) = table.look_up(&key)? {
            return Ok(entry);
        }
        self.take_room(&table, owner, 1)?;
        Ok(self.open(
            &mut table,
            key,
            Origin::Launch(self.house.backend.clone()),
            self.new_shared(),
        ))
    }

    pub(super) fn backend(&self) -> Arc<dyn Backend> {
        self.house.backend.clone()
    }

    /// Returns the source of packages.
    pub(super) fn packages(&self) -> Source {
        self.house.settings.packages.clone()
    }

    fn new_shared(&self) -> Shared {
        Shared::new(self.house.outputs.of_session())
    }

    /// Checks that `more` additional sessions may exist on this server.
    fn check_room(&self, table: &Table, owner: &Principal, more: usize) -> Result<(), Refused> {
        let limit = self.house.settings.max_sessions;
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
        self.house
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
        self.house.accounts.refresh(owner);
        let table = self.table();
        self.check_room(&table, owner, kept)?;
        let starts = table.starts(owner, variants, kept);
        self.house.accounts.check_starts(owner, starts)?;
        self.house.accounts.count_cells(owner, variants as u64)?;
        self.house.accounts.count_starts(owner, starts)
    }

    /// Checks that one more cell may run, before any work is done for it.
    pub(super) fn check_cell(&self, owner: &Principal) -> Result<(), Refused> {
        self.house.accounts.refresh(owner);
        self.house.accounts.check_cells(owner, 1)
    }

    /// Counts a cell, or returns the quota that it would exceed.
    pub(super) fn count_cell(&self, owner: &Principal) -> Result<(), Refused> {
        self.house.accounts.count_cells(owner, 1)
    }

    /// Checks that `more` additional bytes may be stored.
    fn check_stored(&self, owner: &Principal, more: u64) -> Result<(), Refused> {
        self.house.accounts.refresh(owner);
        self.house
            .accounts
            .check_stored(owner, self.kept(owner), more)
    }

    /// Returns how many more bytes an owner may store.
    fn room_to_store(&self, owner: &Principal) -> u64 {
        self.house.accounts.room_to_store(owner, self.kept(owner))
    }

    /// Returns the bytes kept for an owner outside of sandboxes.
    fn kept(&self, owner: &Principal) -> u64 {
        self.table().starts(owner, 0, 0).kept + self.house.uploads.bytes_of(owner)
    }

    /// Returns the number of sessions, of running cells in the whole server, and of cells waiting
    /// for a run permit.
    pub fn load(&self) -> Load {
        let (running, waiting) = self.house.turns.load();
        Load {
            sessions: *self.house.population.borrow(),
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
        let usage = self.house.accounts.usage(owner);
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
        origin: Origin,
        shared: impl Into<Arc<Shared>>,
    ) -> Entry {
        let (commands, receiver) = mpsc::channel(MOST_COMMANDS);
        let entry = Entry {
            commands,
            shared: shared.into(),
        };
        table.sessions.insert(key.clone(), entry.clone());
        self.house.population.send_replace(table.sessions.len());
        let (owner, id) = key.clone();
        let house = self.house.clone();
        let on_gone = Box::new(move |why| {
            house.uploads.forget(&key.0, &key.1);
            let mut table = house.table();
            table.bury(key, why);
            house.population.send_replace(table.sessions.len());
        });
        let (settings, numbers) = (self.house.settings.clone(), self.house.next_number.clone());
        let (customer, shared) = (Some(self.customer(&owner, &id)), entry.shared.clone());
        let beginning = Beginning {
            id,
            customer,
            origin,
            settings,
            numbers,
            shared,
        };
        tokio::spawn(driver::drive(beginning, receiver, on_gone));
        entry
    }

    /// Reserves sessions for forks that are still being made, so that their names and their
    /// capacity are taken.
    fn seats(
        &self,
        owner: &Principal,
        source: &SessionId,
        names: ForkNames,
    ) -> Result<Vec<Seat>, Refused> {
        let mut table = self.table();
        let names = match names {
            ForkNames::Count(count) => {
                let free = (1..).map(|number| named_after(source, &number.to_string()));
                free.filter(|id| !table.knows(owner, id))
                    .take(count as usize)
                    .collect()
            }
            ForkNames::Named(names) => {
                let mut seen = HashSet::new();
                if let Some(taken) = names
                    .iter()
                    .find(|id| table.knows(owner, id) || !seen.insert(*id))
                {
                    return Err(Refused::NameTaken { id: taken.clone() });
                }
                names
            }
        };
        if table.closing {
            return Err(Refused::ShuttingDown);
        }
        self.take_room(&table, owner, names.len())?;
        let note = format!("This session is a fork of `{source}`.");
        let seat = |id| {
            self.seat(
                &mut table,
                owner,
                id,
                note.clone(),
                Arc::new(self.new_shared()),
            )
        };
        Ok(names.into_iter().map(seat).collect())
    }

    fn seat(
        &self,
        table: &mut Table,
        owner: &Principal,
        id: SessionId,
        note: String,
        shared: Arc<Shared>,
    ) -> Seat {
        let (fork, arrival) = oneshot::channel();
        let origin = Origin::Fork {
            fork: arrival,
            note: Some(note),
        };
        let entry = self.open(table, (owner.clone(), id.clone()), origin, shared);
        Seat { id, entry, fork }
    }

    /// Creates a session for an existing fork, named after its source and `name`.
    pub(super) fn seat_for(
        &self,
        owner: &Principal,
        source: &SessionId,
        name: &str,
        note: String,
        shared: Arc<Shared>,
    ) -> Result<Seat, Refused> {
        let mut table = self.table();
        if table.closing {
            return Err(Refused::ShuttingDown);
        }
        self.check_room(&table, owner, 1)?;
        // The sandbox was counted when the variant started.
        self.house
            .accounts
            .check_starts(owner, table.starts(owner, 0, 1))?;
        let others = (2..).map(|number| named_after(source, &format!("{name}-{number}")));
        let id = std::iter::once(named_after(source, name))
            .chain(others)
            .find(|id| !table.knows(owner, id))
            .expect("the numbers do not end");
        Ok(self.seat(&mut table, owner, id, note, shared))
    }

    /// Starts a driver for a variant that only the caller can see. It ends when the caller drops
    /// it. Nothing in it is kept for an undo.
    pub(super) fn hide(
        &self,
        owner: &Principal,
        source: &SessionId,
        name: &str,
        fork: Fork,
        seed: u64,
    ) -> Result<Entry, Refused> {
        let (hand, arrival) = oneshot::channel();
        let _ = hand.send(Box::new(fork));
        let origin = Origin::Variant {
            fork: arrival,
            seed,
        };
        self.hide_as(
            named_after(source, name),
            Some(self.customer(owner, source)),
            origin,
        )
    }

    fn customer(&self, owner: &Principal, session: &SessionId) -> Customer {
        let House {
            accounts,
            turns,
            ledger,
            ..
        } = &*self.house;
        Customer {
            owner: owner.clone(),
            session: session.clone(),
            accounts: accounts.clone(),
            turns: turns.clone(),
            ledger: ledger.clone(),
        }
    }

    /// Returns the executions that have ended and are not recorded yet.
    pub(crate) fn ledger(&self) -> &Arc<Ledger> {
        &self.house.ledger
    }

    /// Starts a driver that only the caller can see.
    pub(super) fn hide_as(
        &self,
        id: SessionId,
        customer: Option<Customer>,
        origin: Origin,
    ) -> Result<Entry, Refused> {
        let (commands, receiver) = mpsc::channel(MOST_COMMANDS);
        let entry = Entry {
            commands,
            shared: Arc::new(self.new_shared()),
        };
        let number = self.house.next_number.fetch_add(1, Ordering::Relaxed);
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
        let house = self.house.clone();
        let on_gone = Box::new(move |_| drop(house.table().hidden.remove(&number)));
        let settings = SessionSettings {
            undo: Undo::Off,
            idle_timeout: Duration::MAX,
            ..self.house.settings.clone()
        };
        let (numbers, shared) = (self.house.next_number.clone(), entry.shared.clone());
        let beginning = Beginning {
            id,
            customer,
            origin,
            settings,
            numbers,
            shared,
        };
        tokio::spawn(driver::drive(beginning, receiver, on_gone));
        Ok(entry)
    }

    /// Requests forks of a session. They have no owner until they are taken.
    pub(super) async fn fork_of(
        &self,
        owner: &Principal,
        id: &SessionId,
        source: &Entry,
        wanted: ForksWanted,
        cancel: &CancellationToken,
    ) -> Result<Forked, Refused> {
        let (reply, answer) = oneshot::channel();
        let forked = self
            .ask(source, Job::Fork { wanted, reply }, answer, cancel)
            .await;
        forked.unwrap_or_else(|silence| Err(self.explained(owner, id, silence)))
    }

    /// Sends a job to a driver and waits for its answer. A cancelled token is forwarded, and the
    /// answer is still awaited.
    pub(super) async fn ask<T>(
        &self,
        entry: &Entry,
        job: Job,
        mut answer: oneshot::Receiver<Result<T, Refused>>,
        cancel: &CancellationToken,
    ) -> Result<Result<T, Refused>, Silence> {
        let number = self.submit(entry, job)?;
        let answer = tokio::select! {
            answer = &mut answer => answer,
            () = cancel.cancelled() => {
                // A driver that is gone has already answered.
                let _ = entry.commands.send(Command::Cancel(number)).await;
                answer.await
            }
        };
        answer.map_err(|_| Silence::Gone(None))
    }

    fn submit(&self, entry: &Entry, job: Job) -> Result<u64, Silence> {
        let number = self.next_number();
        self.submit_as(entry, number, job).map(|()| number)
    }

    /// Returns a request number that is unique in this server.
    pub(super) fn next_number(&self) -> u64 {
        self.house.next_number.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn submit_as(&self, entry: &Entry, number: u64, job: Job) -> Result<(), Silence> {
        match entry.commands.try_send(Command::Submit(number, job)) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Silence::Flooded),
            Err(mpsc::error::TrySendError::Closed(_)) => {
                Err(Silence::Gone(entry.shared.facts().failure.clone()))
            }
        }
    }

    pub(super) fn explained(&self, owner: &Principal, id: &SessionId, silence: Silence) -> Refused {
        match silence {
            Silence::Flooded => Refused::Busy {
                waiting: MOST_COMMANDS,
            },
            Silence::Gone(Some(failure)) => Refused::Launch(failure),
            Silence::Gone(None) => self.gone(owner, id),
        }
    }

    pub(super) fn settings(&self) -> &SessionSettings {
        &self.house.settings
    }

    /// Returns the reason why a session that existed a moment ago is gone.
    fn gone(&self, owner: &Principal, id: &SessionId) -> Refused {
        match self.find(owner, id) {
            Err(refused) => refused,
            Ok(_) => Refused::ClosedWhileWaiting,
        }
    }
}

impl House {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table
            .lock()
            .expect("nothing panics while it holds the table")
    }
}

impl Table {
    fn look_up(&self, key: &Key) -> Result<Option<Entry>, Refused> {
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
    fn bury(&mut self, key: Key, why: Option<String>) {
        let Some(entry) = self.sessions.remove(&key) else {
            return;
        };
        let Some(why) = why else {
            if entry.shared.docket.has_uncollected() {
                let of_owner = |((of, _), _): &(Key, Entry)| *of == key.0;
                if self.unborn.iter().filter(|unborn| of_owner(unborn)).count() >= MOST_UNBORN {
                    self.unborn
                        .iter()
                        .position(of_owner)
                        .map(|oldest| self.unborn.remove(oldest));
                }
                self.unborn.push_back((key, entry));
            }
            return;
        };
        let now = Instant::now();
        self.tombstones
            .retain(|_, tombstone| now - tombstone.at < TOMBSTONE_AGE);
        let of_owner = || self.tombstones.iter().filter(|((of, _), _)| *of == key.0);
        if of_owner().count() >= MOST_TOMBSTONES {
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
pub(super) enum Silence {
    /// Its command queue is full.
    Flooded,
    /// It has ended, possibly because it failed to start, and before it received the request.
    Gone(Option<LaunchError>),
}

/// Ends a session and waits until all its resources are released.
pub(super) async fn leave(entry: &Entry) {
    leave_by(&entry.commands).await;
}

async fn leave_by(commands: &mpsc::Sender<Command>) {
    let (reply, left) = oneshot::channel();
    if commands.send(Command::Shutdown(reply)).await.is_ok() {
        let _ = left.await;
    }
}

/// Returns the id of a session derived from another one: `<source>-<suffix>`. The source's name is
/// shortened if necessary. Characters that an id may not contain become `-`.
fn named_after(source: &SessionId, suffix: &str) -> SessionId {
    let allowed =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '.' | '-');
    let safe = |character: char| if allowed(character) { character } else { '-' };
    let suffix = suffix
        .chars()
        .map(safe)
        .take(LONGEST_SUFFIX)
        .collect::<String>();
    let room = 64 - 1 - suffix.len();
    let base = source.as_str().get(..room).unwrap_or(source.as_str());
    format!("{base}-{suffix}")
        .parse()
        .expect("its characters are allowed and its length is bounded")
}

/// Reads a source to its end. Returns the staged data and its size in bytes.
pub(super) async fn stage(
    source: &mut (dyn AsyncRead + Send + Unpin),
) -> std::io::Result<(SpooledTempFile, u64)> {
    use std::io::{Seek, Write};
    let mut staged = SpooledTempFile::new(STAGED_IN_MEMORY);
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        let size = source.read(&mut buffer).await?;
        if size == 0 {
            staged.rewind()?;
            return Ok((staged, total));
        }
        staged.write_all(&buffer[..size])?;
        total += size as u64;
    }
}

async fn unstage(
    mut staged: SpooledTempFile,
    sink: &mut (dyn AsyncWrite + Send + Unpin),
) -> std::io::Result<u64> {
    use std::io::Read;
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        let size = staged.read(&mut buffer)?;
        if size == 0 {
            sink.flush().await?;
            return Ok(total);
        }
        sink.write_all(&buffer[..size]).await?;
        total += size as u64;
    }
}
