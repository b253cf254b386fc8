//! Eviction: which trees are removed when the store exceeds its limit, and which are kept.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, SystemTime};

use super::uses::Removing;
use super::{INDEX, RECORDS, Sharing, Store, StoreError, Tree, TreeName, remove_tree, while_doing};

/// After an eviction at least this fraction of the limit is free (1/10), so that not every
/// installation has to evict.
const FREE_AFTERWARDS: u64 = 10;

/// Result of an eviction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Number of removed trees.
    pub removed: usize,
    /// Bytes of the removed files.
    pub freed: u64,
    /// Bytes of the remaining files.
    pub left: u64,
}

impl Store {
    /// Removes unused trees if the total size exceeds `limit`, least recently used first. Fails if
    /// that is not enough.
    pub fn make_room(&self, limit: u64) -> Result<Room, StoreError> {
        let room = self.remove_unused(|total| total > limit, limit - limit / FREE_AFTERWARDS)?;
        if room.left > limit {
            Err(StoreError::Full { limit })
        } else {
            Ok(room)
        }
    }

    /// Removes every unused tree.
    pub fn clean(&self) -> Result<Room, StoreError> {
        self.remove_unused(|_| true, 0)
    }

    /// Releases all trees of this server's sessions except `used`. Trees that were handed out
    /// within `grace` are kept too, because they may not have reached their session yet. Private
    /// trees that are released are removed.
    pub fn release_all_but(
        &self,
        used: &BTreeSet<TreeName>,
        grace: Duration,
    ) -> Result<(), StoreError> {
        if !self.uses.can_release(used, grace) {
            return Ok(());
        }
        let removing = self.removing()?;
        let released = self
            .uses
            .release(&removing, used, grace)
            .map_err(while_doing("note which packages are used"))?;
        drop(removing);
        let is_private = |name: &&TreeName| {
            self.tree(name)
                .is_some_and(|tree| tree.record.sharing == Sharing::Private)
        };
        released
            .iter()
            .filter(is_private)
            .try_for_each(|name| self.remove(name))
    }

    /// Returns the trees that a session of any server may be using.
    pub fn in_use(&self) -> Result<BTreeSet<TreeName>, StoreError> {
        self.marked(&self.removing()?)
    }

    /// Returns when a tree was last given to a session.
    pub fn last_use(&self, name: &TreeName) -> Option<SystemTime> {
        fs::metadata(self.root.join(RECORDS).join(name.as_str()))
            .and_then(|record| record.modified())
            .ok()
    }

    /// Removes unused trees until at most `enough` bytes are left, if the total size is `too_much`.
    fn remove_unused(
        &self,
        too_much: impl FnOnce(u64) -> bool,
        enough: u64,
    ) -> Result<Room, StoreError> {
        let removing = self.removing()?;
        let trees = self.list()?;
        let mut room = Room {
            left: trees.iter().map(|tree| tree.record.bytes).sum(),
            ..Room::default()
        };
        if !too_much(room.left) {
            return Ok(room);
        }
        let mut doomed = Vec::new();
        for tree in self.unused(&removing, trees)? {
            if room.left <= enough {
                break;
            }
            doomed.push(self.move_away(&tree.name)?);
            let _ = fs::remove_file(self.root.join(RECORDS).join(tree.name.as_str()));
            room.removed += 1;
            room.freed += tree.record.bytes;
            room.left -= tree.record.bytes;
        }
        self.forget_keys_without_trees();
        drop(removing);
        // Moved-away trees can no longer be found. Deleting many files may take a while, so it
        // happens without the lock.
        for folder in doomed {
            remove_tree(folder.path()).map_err(while_doing("remove a package"))?;
        }
        Ok(room)
    }

    /// Returns the unused trees: private ones first, because no session can find them any more,
    /// then by time of last use.
    fn unused(&self, removing: &Removing, trees: Vec<Tree>) -> Result<Vec<Tree>, StoreError> {
        let in_use = self.marked(removing)?;
        let mut unused: Vec<Tree> = trees
            .into_iter()
            .filter(|tree| !in_use.contains(&tree.name))
            .collect();
        unused.sort_by_cached_key(|tree| {
            (
                tree.record.sharing == Sharing::Shared,
                self.last_use(&tree.name),
            )
        });
        Ok(unused)
    }

    fn forget_keys_without_trees(&self) {
        for entry in fs::read_dir(self.root.join(INDEX))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = fs::read_to_string(entry.path())
                .ok()
                .and_then(|text| TreeName::new(text.trim()));
            if name.is_none_or(|name| !self.root.join(RECORDS).join(name.as_str()).exists()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn removing(&self) -> Result<Removing, StoreError> {
        self.uses
            .removing()
            .map_err(while_doing("wait for others who use the package store"))
    }

    fn marked(&self, removing: &Removing) -> Result<BTreeSet<TreeName>, StoreError> {
        self.uses
            .in_use(removing)
            .map_err(while_doing("see which packages are used"))
    }
}
