//! Which trees are in use, in all servers that share a store.
//!
//! ```text
//! <store>/uses/<random>   one file for each server: the names of trees that it gave to sessions. Locked as long as the server lives
//! <store>/uses.lock       shared while somebody finds and marks a tree, alone while somebody removes trees
//! ```
//!
//! Why a tree that a session is about to get is never removed:
//! 1. Who gives a tree looks for it and marks it under one lock ([`Marking`]), which any number may hold.
//! 2. Who removes trees reads all marks and takes trees out of their places under the other lock ([`Removing`]), which excludes the first.
//! 3. So a tree is either marked before the marks are read, or looked for after it has gone.
//!
//! The kernel lets go of a server's lock however the server ends, and its marks count no longer.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TreeName;

const USES: &str = "uses";
const LOCK: &str = "uses.lock";

/// The marks of this server, and the way to those of others.
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
    /// With the time of the latest mark.
    names: HashMap<TreeName, Instant>,
}

/// The right to mark trees.
pub(super) struct Marking(#[expect(dead_code, reason = "it is held, not read")] Held);

/// The right to remove trees that are not marked. Nobody marks one meanwhile.
pub(super) struct Removing(#[expect(dead_code, reason = "it is held, not read")] Held);

/// A lock that is let go when this is dropped, also where a process that was just forked has a copy of the descriptor for a moment.
struct Held(File);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl Uses {
    /// Makes an empty list for this server.
    pub(super) fn open(root: &Path) -> io::Result<Uses> {
        let (folder, lock) = (root.join(USES), root.join(LOCK));
        fs::create_dir_all(&folder)?;
        // Nobody may take the new file for one of a server that is gone before it is locked.
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

    /// Waits until nobody removes trees.
    pub(super) fn marking(&self) -> io::Result<Marking> {
        Ok(Marking(shared(&self.lock)?))
    }

    /// Waits until nobody marks or removes trees.
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

    /// Lets go of all trees of this server but those in `used`, and those that were marked within `grace`. Returns which.
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

    /// Tells whether [`Uses::release`] would let go of something.
    pub(super) fn can_release(&self, used: &BTreeSet<TreeName>, grace: Duration) -> bool {
        !self.own().released(used, grace).is_empty()
    }

    /// Returns all trees that a living server has marked, and removes the lists of others.
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
        // Nothing under this lock panics halfway through a change.
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
