//! Locks between processes, as advisory locks on files.
//!
//! The kernel releases them when a process ends, however it ends. A lock file may be removed or
//! replaced while a process waits for it, so a lock is valid only if the path still refers to the
//! locked file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// A held lock. Dropping it releases the lock, even if a process that was just forked briefly holds
/// a copy of the descriptor.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough: the lock belongs to all copies of the descriptor until one of them
        // unlocks it.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the lock exclusively, or returns `None` if it is held.
pub(super) fn try_exclusive(path: &Path) -> io::Result<Option<Lock>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let lock = Lock(file);
                if leads_to(path, &lock.0)? {
                    return Ok(Some(lock));
                }
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes the lock shared and waits for an exclusive holder to release it. Returns `None` if the
/// file is gone.
pub(super) fn shared(path: &Path) -> io::Result<Option<Lock>> {
    loop {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        flock(&file, FlockOperation::LockShared)?;
        let lock = Lock(file);
        if leads_to(path, &lock.0)? {
            return Ok(Some(lock));
        }
    }
}

/// Returns the processes that hold the lock. Use it only for messages: the list may be outdated
/// immediately, or empty in a container.
pub(super) fn holders(path: &Path) -> Vec<u32> {
    match (
        std::fs::metadata(path),
        std::fs::read_to_string("/proc/locks"),
    ) {
        (Ok(found), Ok(table)) => holders_in(&table, found.ino()),
        _ => Vec::new(),
    }
}

fn holders_in(table: &str, inode: u64) -> Vec<u32> {
    let holder = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, _, process, place, ..]
                if place.rsplit(':').next()?.parse() == Ok(inode) =>
            {
                process.parse().ok()
            }
            _ => None,
        }
    };
    let mut holders: Vec<u32> = table.lines().filter_map(holder).collect();
    holders.sort_unstable();
    holders.dedup();
    holders
}

fn leads_to(path: &Path, file: &File) -> io::Result<bool> {
    let locked = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (locked.dev(), locked.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_share_a_lock_and_one_excludes_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        assert!(
            shared(&path).unwrap().is_none(),
            "a missing file cannot be shared"
        );
        let single = try_exclusive(&path).unwrap().unwrap();
        assert!(try_exclusive(&path).unwrap().is_none());
        drop(single);
        let first = shared(&path).unwrap().unwrap();
        let second = shared(&path).unwrap().unwrap();
        assert!(try_exclusive(&path).unwrap().is_none());
        assert_eq!(holders(&path), [std::process::id()]);
        drop((first, second));
        assert!(try_exclusive(&path).unwrap().is_some());
    }

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_a_lock_that_was_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = try_exclusive(&path).unwrap().unwrap();
        let _copy = lock.0.try_clone().unwrap();
        drop(lock);
        assert!(try_exclusive(&path).unwrap().is_some());
    }

    #[test]
    fn holders_are_found_by_the_file_they_lock() {
        let table = "1: FLOCK  ADVISORY  READ 17 08:01:42 0 EOF\n2: POSIX  ADVISORY  WRITE 18 \
                     08:01:42 0 EOF\n\
                     3: FLOCK  ADVISORY  READ 16 08:01:42 0 EOF\n4: FLOCK  ADVISORY  READ 19 \
                     08:01:142 0 EOF\n";
        assert_eq!(holders_in(table, 42), [16, 17]);
    }
}
