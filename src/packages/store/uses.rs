//! Tracks which trees are in use, across all servers that share a store.
//!
//! ```text
//! <store>/uses/<random>   one file for each server: the names of trees that it gave to sessions.
//!                         Locked while the server lives
//! <store>/uses.lock       held shared while a tree is looked up and marked, exclusively while
//!                         trees are removed
//! ```
//!
//! Why a tree that is about to be given to a session is never removed:
//! 1. Lookup and marking happen under one shared lock ([`Marking`]), which any number of processes
//!    may hold.
//! 2. Removal reads all marks and moves trees out of their places under an exclusive lock
//!    ([`Removing`]), which excludes the shared one.
//! 3. So a tree is either marked before the marks are read, or looked up after it was removed.
//!
//! The kernel releases a server's lock however the server ends. Its marks are then ignored.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TreeName;

const USES: &str = "uses";
const LOCK: &str = "uses.lock";

/// The marks of this server, and access to those of other servers.
#[derive(Debug)]
pub(super) struct Uses {
    folder: PathBuf,
    lock: PathBuf,
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    path: PathBuf,
    file: File,
    /// Trees with the time of their latest mark.
    names: HashMap<TreeName, Instant>,
}

/// Guard that permits marking trees.
pub(super) struct Marking(#[expect(dead_code, reason = "it is held, not read")] Held);

/// Guard that permits removing unmarked trees. No tree can be marked while it is held.
pub(super) struct Removing(#[expect(dead_code, reason = "it is held, not read")] Held);

/// A lock that is released on drop, even if a process that was just forked briefly holds a copy of
/// the descriptor.
struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl Uses {
    /// Creates an empty list of marks for this server.
    pub(super) fn open(root: &Path) -> io::Result<Uses> {
        let (folder, lock) = (root.join(USES), root.join(LOCK));
        fs::create_dir_all(&folder)?;
        // Until the new file is locked, another server could mistake it for one of a server that
        // has ended.
        let marking = shared(&lock)?;
        let (file, path) = tempfile::Builder::new()
            .prefix("server-")
            .tempfile_in(&folder)?
            .keep()?;
        file.lock()?;
        drop(marking);
        Ok(Uses {
            folder,
            lock,
            own: Mutex::new(Own {
                path,
                file,
                names: HashMap::new(),
            }),
        })
    }

    /// Waits until no process removes trees.
    pub(super) fn marking(&self) -> io::Result<Marking> {
        Ok(Marking(shared(&self.lock)?))
    }

    /// Waits until no process marks or removes trees.
    pub(super) fn removing(&self) -> io::Result<Removing> {
        let file = opened(&self.lock)?;
        file.lock()?;
        Ok(Removing(Held(file)))
    }

    /// Marks a tree as used by this server.
    pub(super) fn mark(&self, _: &Marking, name: &TreeName) -> io::Result<()> {
        let mut own = self.own();
        if own.names.insert(name.clone(), Instant::now()).is_none() {
            writeln!(own.file, "{name}")?;
        }
        Ok(())
    }

    /// Releases this server's trees except those in `used` and those marked within `grace`. Returns
    /// the released trees.
    pub(super) fn release(
        &self,
        _: &Removing,
        used: &BTreeSet<TreeName>,
        grace: Duration,
    ) -> io::Result<Vec<TreeName>> {
        let mut own = self.own();
        let released: Vec<TreeName> = own.released(used, grace);
        if !released.is_empty() {
            own.names.retain(|name, _| !released.contains(name));
            let text: String = own.names.keys().map(|name| format!("{name}\n")).collect();
            own.file.set_len(0)?;
            own.file.rewind()?;
            own.file.write_all(text.as_bytes())?;
        }
        Ok(released)
    }

    /// Returns whether [`Uses::release`] would release a tree.
    pub(super) fn can_release(&self, used: &BTreeSet<TreeName>, grace: Duration) -> bool {
        !self.own().released(used, grace).is_empty()
    }

    /// Returns all trees that a running server has marked, and removes the lists of servers that
    /// have ended.
    pub(super) fn in_use(&self, _: &Removing) -> io::Result<BTreeSet<TreeName>> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let mut file = OpenOptions::new().read(true).write(true).open(&path)?;
            match file.try_lock() {
                Ok(()) => fs::remove_file(&path)?,
                Err(fs::TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    file.read_to_string(&mut text)?;
                    names.extend(text.lines().filter_map(TreeName::new));
                }
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(names)
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        // No code under this lock panics in the middle of a change, so poisoning is harmless.
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Own {
    fn released(&self, used: &BTreeSet<TreeName>, grace: Duration) -> Vec<TreeName> {
        let is_old = |(name, marked): &(&TreeName, &Instant)| {
            !used.contains(*name) && marked.elapsed() >= grace
        };
        self.names
            .iter()
            .filter(is_old)
            .map(|(name, _)| name.clone())
            .collect()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

fn shared(lock: &Path) -> io::Result<Held> {
    let file = opened(lock)?;
    file.lock_shared()?;
    Ok(Held(file))
}

fn opened(lock: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(lock)
}
