//! Finds, creates and limits sessions, and remembers those that ended.
//!
//! The table is locked for lookups only, never across an await. A session that expired leaves a tombstone, so that its id is answered with
//! the reason and not with an empty new session; one that was closed on purpose leaves nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tempfile::SpooledTempFile;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::driver::{self, Command, Job, STAGED_IN_MEMORY, Shared};
use super::{
    ExecuteRequest, ExecutionId, FullOutput, InsidePath, LARGEST_CODE, Outcome, Principal, Refused, ResetReport,
    SessionId, SessionInfo, SessionSettings, WorkFolder,
};
use crate::sandbox::{Backend, Preparation};

/// Ended sessions that are remembered.
const MOST_TOMBSTONES: usize = 1000;
/// How long an ended session is remembered, unless there are too many. An agent that comes back the next day begins anew anyway.
const TOMBSTONE_AGE: Duration = Duration::from_secs(24 * 3600);
/// Idle sessions named when there are too many.
const IDLE_NAMED: usize = 3;
/// Commands on their way to one driver. It reads them at once, so only a flood fills this.
const MOST_COMMANDS: usize = 256;
/// Bytes of a file moved in one step.
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
    next_request: AtomicU64,
}

#[derive(Default)]
struct Table {
    sessions: HashMap<Key, Entry>,
    tombstones: HashMap<Key, Tombstone>,
    closing: bool,
}

#[derive(Clone)]
struct Entry {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

struct Tombstone {
    why: String,
    at: Instant,
    age: Duration,
    executions: u64,
}

impl Sessions {
    pub fn new(backend: Arc<dyn Backend>, settings: SessionSettings) -> Sessions {
        let house = House { backend, settings, table: Mutex::default(), next_request: AtomicU64::new(1) };
        Sessions { house: Arc::new(house) }
    }

    /// Follows the work that must be done once before the first session. Requests wait for it.
    pub fn preparation(&self) -> watch::Receiver<Preparation> {
        self.house.backend.preparation()
    }

    /// Runs code, creating the session if its id is new. A cancelled token interrupts the code.
    ///
    /// Dropping the future does not stop the code.
    pub async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        if request.code.len() > LARGEST_CODE {
            return Err(Refused::CodeTooLarge { size: request.code.len() });
        }
        if cancel.is_cancelled() {
            return Err(Refused::CancelledWhileWaiting);
        }
        let entry = self.find_or_create(owner, id)?;
        let (reply, answer) = oneshot::channel();
        let number = self.submit(owner, id, &entry, Job::Execute { request, reply })?;
        tokio::pin!(answer);
        let answer = tokio::select! {
            answer = &mut answer => answer,
            () = cancel.cancelled() => {
                // A driver that is gone has answered already.
                let _ = entry.commands.send(Command::Cancel(number)).await;
                answer.await
            }
        };
        answer.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Starts the interpreter anew, also in the middle of a cell; files stay.
    ///
    /// For an id whose session expired, this is the word that allows a new, empty one.
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
                    return Ok(ResetReport { interrupted_running_cell: false, files_kept });
                }
                // A client that begins with a reset means "from a clean state", and that is what it has.
                None if *id == SessionId::default_session() => {
                    return Ok(ResetReport { interrupted_running_cell: false, files_kept: true });
                }
                None => return Err(Refused::Unknown { id: id.clone() }),
            }
        };
        let (reply, answer) = oneshot::channel();
        entry.commands.send(Command::Reset(reply)).await.map_err(|_| self.gone(owner, id))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Stores a file, creating the session if its id is new. It appears whole or not at all.
    ///
    /// The source is read to its end first, so that a slow or failing one neither holds the session nor leaves half a file.
    pub async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let source = stage(source).await.map_err(|error| Refused::Transfer { why: error.kind().to_string() })?;
        let entry = self.find_or_create(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(owner, id, &entry, Job::Write { path: path.clone(), overwrite, source, reply })?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Copies a file of at most `limit` bytes to `sink`. Nothing is written to the sink unless the whole file was read.
    pub async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(owner, id, &entry, Job::Read { path: path.clone(), limit, reply })?;
        let staged = answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))?;
        unstage(staged, sink).await.map_err(|error| Refused::Transfer { why: error.kind().to_string() })
    }

    /// Tells about an owner's sessions, also those that ended and are remembered.
    pub fn list(&self, owner: &Principal) -> Vec<SessionInfo> {
        let table = self.table();
        let now = Instant::now();
        let alive = table.sessions.iter().filter(|((of, _), _)| of == owner).map(|((_, id), entry)| {
            let facts = entry.shared.facts().clone();
            SessionInfo {
                id: id.clone(),
                state: facts.state,
                ended: facts.ended,
                executions: facts.executions,
                age: now - entry.shared.created,
                idle: if facts.state == "running" { Duration::ZERO } else { now - facts.last_used },
                memory: facts.memory,
            }
        });
        let ended =
            table.tombstones.iter().filter(|((of, _), _)| of == owner).map(|((_, id), tombstone)| SessionInfo {
                id: id.clone(),
                state: "ended",
                ended: Some(tombstone.why.clone()),
                executions: tombstone.executions,
                age: tombstone.age,
                idle: now - tombstone.at,
                memory: None,
            });
        let mut all = alive.chain(ended).collect::<Vec<_>>();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// Destroys a session with its files. Its id may be used anew.
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

    /// The whole text of an execution, as long as it is kept: the last ones of a session that lives.
    pub fn full_output(&self, owner: &Principal, id: &SessionId, execution: ExecutionId) -> Option<FullOutput> {
        self.find(owner, id).ok()?.shared.full_output(execution)
    }

    /// Ends every session and destroys every sandbox.
    pub async fn shut_down(&self) {
        let entries = {
            let mut table = self.table();
            table.closing = true;
            table.sessions.values().cloned().collect::<Vec<_>>()
        };
        let leaving =
            entries.into_iter().map(|entry| tokio::spawn(async move { leave(&entry).await })).collect::<Vec<_>>();
        for left in leaving {
            let _ = left.await;
        }
        self.house.backend.shut_down().await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.house.table()
    }

    fn find(&self, owner: &Principal, id: &SessionId) -> Result<Entry, Refused> {
        let key = (owner.clone(), id.clone());
        self.table().look_up(&key)?.ok_or_else(|| Refused::Unknown { id: id.clone() })
    }

    fn find_or_create(&self, owner: &Principal, id: &SessionId) -> Result<Entry, Refused> {
        let key = (owner.clone(), id.clone());
        let mut table = self.table();
        if let Some(entry) = table.look_up(&key)? {
            return Ok(entry);
        }
        let limit = self.house.settings.max_sessions;
        if table.sessions.len() >= limit {
            return Err(Refused::TooManySessions { limit, oldest_idle: table.oldest_idle(owner) });
        }
        let (commands, receiver) = mpsc::channel(MOST_COMMANDS);
        let shared = Arc::new(Shared::new());
        let entry = Entry { commands, shared: shared.clone() };
        table.sessions.insert(key.clone(), entry.clone());
        drop(table);
        let house = self.house.clone();
        let on_gone = Box::new(move |why| house.table().bury(key, why));
        let (backend, settings) = (self.house.backend.clone(), self.house.settings.clone());
        tokio::spawn(driver::drive(id.clone(), backend, settings, receiver, shared, on_gone));
        Ok(entry)
    }

    fn submit(&self, owner: &Principal, id: &SessionId, entry: &Entry, job: Job) -> Result<u64, Refused> {
        let number = self.house.next_request.fetch_add(1, Ordering::Relaxed);
        match entry.commands.try_send(Command::Submit(number, job)) {
            Ok(()) => Ok(number),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Refused::Busy { waiting: MOST_COMMANDS }),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(self.gone(owner, id)),
        }
    }

    /// Says why a session that was there a moment ago is not.
    fn gone(&self, owner: &Principal, id: &SessionId) -> Refused {
        match self.find(owner, id) {
            Err(refused) => refused,
            Ok(_) => Refused::ClosedWhileWaiting,
        }
    }
}

impl House {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("nothing panics while it holds the table")
    }
}

impl Table {
    fn look_up(&self, key: &Key) -> Result<Option<Entry>, Refused> {
        if self.closing {
            return Err(Refused::ShuttingDown);
        }
        if let Some(tombstone) = self.tombstones.get(key) {
            return Err(Refused::Ended { id: key.1.clone(), why: tombstone.why.clone() });
        }
        Ok(self.sessions.get(key).cloned())
    }

    /// Names the sessions that could be closed with the least loss.
    fn oldest_idle(&self, owner: &Principal) -> Vec<SessionId> {
        let mut idle = self
            .sessions
            .iter()
            .filter(|((of, _), _)| of == owner)
            .filter_map(|((_, id), entry)| {
                let facts = entry.shared.facts();
                matches!(facts.state, "idle" | "ended").then(|| (facts.last_used, id.clone()))
            })
            .collect::<Vec<_>>();
        idle.sort();
        idle.into_iter().take(IDLE_NAMED).map(|(_, id)| id).collect()
    }

    /// Forgets a session; with a reason, remembers that it was there.
    fn bury(&mut self, key: Key, why: Option<String>) {
        let Some(entry) = self.sessions.remove(&key) else { return };
        let Some(why) = why else { return };
        let now = Instant::now();
        self.tombstones.retain(|_, tombstone| now - tombstone.at < TOMBSTONE_AGE);
        if self.tombstones.len() >= MOST_TOMBSTONES {
            let oldest = self.tombstones.iter().min_by_key(|(_, tombstone)| tombstone.at).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.tombstones.remove(&key));
        }
        let executions = entry.shared.facts().executions;
        self.tombstones.insert(key, Tombstone { why, at: now, age: now - entry.shared.created, executions });
    }
}

async fn leave(entry: &Entry) {
    let (reply, left) = oneshot::channel();
    if entry.commands.send(Command::Leave(reply)).await.is_ok() {
        let _ = left.await;
    }
}

async fn stage(source: &mut (dyn AsyncRead + Send + Unpin)) -> std::io::Result<SpooledTempFile> {
    use std::io::{Seek, Write};
    let mut staged = SpooledTempFile::new(STAGED_IN_MEMORY);
    let mut buffer = vec![0; CHUNK];
    loop {
        let size = source.read(&mut buffer).await?;
        if size == 0 {
            staged.rewind()?;
            return Ok(staged);
        }
        staged.write_all(&buffer[..size])?;
    }
}

async fn unstage(mut staged: SpooledTempFile, sink: &mut (dyn AsyncWrite + Send + Unpin)) -> std::io::Result<u64> {
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
