//! Room in the store: what goes when there is too much, and what stays.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, SystemTime};

use super::uses::Removing;
use super::{INDEX, RECORDS, Sharing, Store, StoreError, Tree, TreeName, remove_tree, while_doing};

/// One part in so many of the limit is free at least after something had to go. So not every installation has to make room.
const FREE_AFTERWARDS: u64 = 10;

/// What was done for room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Trees that were removed.
    pub removed: usize,
    /// Bytes of their files.
    pub freed: u64,
    /// Bytes of the files that are left.
    pub left: u64,
}

impl Store {
    /// Removes trees that nobody uses if all together are larger than `limit`, those first that were not used for the longest time. Fails
    /// if that is not enough.
    pub fn make_room(&self, limit: u64) -> Result<Room, StoreError> {
        let room = self.remove_unused(|total| total > limit, limit - limit / FREE_AFTERWARDS)?;
        if room.left > limit {
            Err(StoreError::Full { limit })
        } else {
            Ok(room)
        }
    }

    /// Removes every tree that nobody uses.
    pub fn clean(&self) -> Result<Room, StoreError> {
        self.remove_unused(|_| true, 0)
    }

    /// Tells that this server's sessions use only these trees. Those that were given out within `grace` may be on their way to one. What was
    /// private to a session that has ended is removed.
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

    /// Returns the trees that some session of some server may be using.
    pub fn in_use(&self) -> Result<BTreeSet<TreeName>, StoreError> {
        self.marked(&self.removing()?)
    }

    /// Returns when a tree was given to a session last.
    pub fn last_use(&self, name: &TreeName) -> Option<SystemTime> {
        fs::metadata(self.root.join(RECORDS).join(name.as_str()))
            .and_then(|record| record.modified())
            .ok()
    }

    /// If all trees together are `too_much`, removes unused ones until at most `enough` bytes are left.
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
        // What is out of its place is nobody's any more; removing many files may take a while, and nobody has to wait for it.
        for folder in doomed {
            remove_tree(folder.path()).map_err(while_doing("remove a package"))?;
        }
        Ok(room)
    }

    /// The trees that nobody uses: private ones first, which nobody can find any more, then by the time of their last use.
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
