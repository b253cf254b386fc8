//! The store: unpacked packages on the host, shared read-only by all sessions.
//!
//! ```text
//! <store>/trees/<name>      the files of one distribution. The name is the hash of the content; a
//!                           private tree has a random name
//! <store>/records/<name>    metadata of that tree: package, version, hash of its file list,
//!                           hash of its content
//! <store>/index/<key>       the tree for one (index, Python, package, version, hashes of its
//!                           files)
//! <store>/incoming/         trees that are being written
//! <store>/uses/             the trees that each server has given to sessions: `uses`
//! <store>/in-use.lock       held shared by every server that uses the store
//! ```
//!
//! Only `trees` is mounted into sandboxes. Its permissions forbid listing, even for a session that
//! runs under the server's own user id. A session can open only the paths that it was given, so it
//! cannot find a private tree without knowing its name.
//!
//! A tree is written into `incoming`, made read-only and renamed. An existing tree is never written
//! to: if two writers add the same tree, the first one is kept. A tree that was modified on disk is
//! detected on lookup and counts as missing. The next fetch replaces the whole tree.
//!
//! Trees that no session uses are evicted when space is needed, least recently used first (`room`).
//! Leftovers of servers that have ended are removed when a server opens the store while no other
//! server uses it.

mod room;
mod uses;

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::stream::{self, Bounds, StreamError, hash_of, stamp_of};
use uses::{Marking, Uses};

pub use room::Room;

const TREES: &str = "trees";
const RECORDS: &str = "records";
const INDEX: &str = "index";
const INCOMING: &str = "incoming";
const LOCK: &str = "in-use.lock";

/// Packages on the host. While this value lives, no process removes a tree that it has found or
/// added, until it releases the tree.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    uses: Uses,
    _in_use: File,
}

/// The name of a tree: 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreeName(String);

/// Lookup key of a tree. It is derived from every input that determines what an installer would put
/// into the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TreeKey(String);

/// Whether other sessions may use a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Produced without running package code. Every session can find it.
    Shared,
    /// Produced in a sandbox where package code ran. Only sessions that know its name can use it.
    /// It is removed together with its last user.
    Private,
}

/// Metadata of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeRecord {
    /// Normalised name of the distribution.
    pub package: String,
    pub version: String,
    pub files: u64,
    pub bytes: u64,
    pub sharing: Sharing,
    /// Seconds since 1970.
    pub created: u64,
    listing: String,
    content: String,
    /// Hash of the change times of all files. While it is unchanged, so is the content. Older
    /// records do not have it.
    #[serde(default)]
    stamp: String,
}

/// A tree of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    pub name: TreeName,
    pub record: TreeRecord,
}

/// Error of a store operation.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the package holds no description of itself, or more than one")]
    NoDescription,
    #[error("a stored package was changed on disk: {package} {version} ({name})")]
    Damaged {
        name: TreeName,
        package: String,
        version: String,
    },
    #[error(
        "the package store is full: sessions use all of its {}; close sessions that are not \
         needed, or have the operator raise package_store_size",
        stream::mebibytes(*.limit)
    )]
    Full { limit: u64 },
    #[error("could not {attempt}")]
    Files {
        attempt: &'static str,
        #[source]
        cause: io::Error,
    },
}

fn while_doing(attempt: &'static str) -> impl FnOnce(io::Error) -> StoreError {
    move |cause| StoreError::Files { attempt, cause }
}

impl TreeName {
    fn new(text: &str) -> Option<TreeName> {
        let fits = text.len() == 64
            && text
                .chars()
                .all(|digit| matches!(digit, '0'..='9' | 'a'..='f'));
        fits.then(|| TreeName(text.to_owned()))
    }

    fn random() -> io::Result<TreeName> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(TreeName(
            bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        ))
    }

    /// Returns the digits, which are also the directory name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TreeName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl TryFrom<String> for TreeName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<TreeName, &'static str> {
        TreeName::new(&text).ok_or("the name of a tree has 64 hexadecimal digits")
    }
}

impl From<TreeName> for String {
    fn from(name: TreeName) -> String {
        name.0
    }
}

impl TreeKey {
    /// Makes a key from parts. Different parts give different keys, even if their concatenations
    /// are equal.
    pub fn new(parts: &[&str]) -> TreeKey {
        let text = serde_json::to_vec(parts).expect("texts can always be written as JSON");
        TreeKey(
            Sha256::digest(text)
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }
}

impl Store {
    /// Opens the store in this directory and creates it if necessary. If no other server has it
    /// open, unfinished and private trees are removed.
    pub fn open(root: &Path) -> Result<Store, StoreError> {
        let folder = |path: &Path, mode| -> io::Result<()> {
            fs::create_dir_all(path)?;
            fs::set_permissions(path, Permissions::from_mode(mode))
        };
        let prepare = || -> io::Result<File> {
            folder(root, 0o711)?;
            for private in [RECORDS, INDEX, INCOMING] {
                folder(&root.join(private), 0o700)?;
            }
            // Listing is denied to the owner too: without root, sessions run under the owner's user
            // id.
            folder(&root.join(TREES), 0o311)?;
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(root.join(LOCK))
        };
        let lock = prepare().map_err(while_doing("make the package store"))?;
        let alone = match lock.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(cause)) => {
                return Err(while_doing("lock the package store")(cause));
            }
        };
        let uses = Uses::open(root).map_err(while_doing("note who uses the package store"))?;
        let store = Store {
            root: root.to_owned(),
            uses,
            _in_use: lock,
        };
        if alone {
            store.clean_up();
        }
        // An exclusive lock is downgraded here. The downgrade is not atomic, but a server that
        // opens the store in between does no harm.
        store
            ._in_use
            .lock_shared()
            .map_err(while_doing("lock the package store"))?;
        Ok(store)
    }

    /// Returns the host directory to mount read-only into sandboxes.
    pub fn trees(&self) -> PathBuf {
        self.root.join(TREES)
    }

    /// Finds the tree for a key, unless it was modified on disk. Marks the tree as in use.
    pub fn find(&self, key: &TreeKey) -> Result<Option<Tree>, StoreError> {
        let Ok(text) = fs::read_to_string(self.root.join(INDEX).join(&key.0)) else {
            return Ok(None);
        };
        let Some(name) = TreeName::new(text.trim()) else {
            return Ok(None);
        };
        let marking = self
            .uses
            .marking()
            .map_err(while_doing("note which packages are used"))?;
        // The tree is looked up only under the marking lock; before, it could still be removed.
        let Some(tree) = self
            .tree(&name)
            .filter(|tree| self.path(&tree.name).is_dir())
        else {
            return Ok(None);
        };
        if self.check(&tree).is_err() {
            let TreeRecord {
                package, version, ..
            } = &tree.record;
            tracing::warn!(
                package,
                version,
                "a stored package was changed on disk, and will be replaced"
            );
            return Ok(None);
        }
        self.mark(&marking, &tree.name)?;
        Ok(Some(tree))
    }

    /// Reads a stream that came out of a sandbox and stores its files.
    pub fn add(
        &self,
        stream: impl Read,
        bounds: Bounds,
        sharing: Sharing,
    ) -> Result<Tree, StoreError> {
        let incoming = tempfile::Builder::new()
            .prefix("tree-")
            .tempdir_in(self.root.join(INCOMING))
            .map_err(while_doing("make a folder for the package"))?;
        let place = incoming.path().join("tree");
        fs::create_dir(&place).map_err(while_doing("make a folder for the package"))?;
        let listing = stream::unpack(stream, &place, bounds)?;
        let (package, version) = described(&listing).ok_or(StoreError::NoDescription)?;
        let content = hash_of(&listing);
        let name = match sharing {
            Sharing::Shared => TreeName(content.clone()),
            Sharing::Private => {
                TreeName::random().map_err(while_doing("choose a name for the package"))?
            }
        };
        let record = TreeRecord {
            package,
            version,
            files: listing.len() as u64,
            bytes: listing.values().map(|entry| entry.size).sum(),
            sharing,
            created: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            listing: hash_of(&without_contents(listing)),
            content,
            stamp: String::new(),
        };
        self.keep(&place, Tree { name, record })
    }

    /// Makes a tree available to all sessions under a key. Private trees are not registered.
    pub fn remember(&self, key: &TreeKey, tree: &Tree) -> Result<(), StoreError> {
        if tree.record.sharing == Sharing::Private {
            return Ok(());
        }
        self.write(INDEX, &key.0, tree.name.as_str().as_bytes())
            .map_err(while_doing("remember the package"))
    }

    /// Checks that a tree is unmodified. The content is read only if the change time of a file
    /// differs, even if the file was changed back.
    pub fn check(&self, tree: &Tree) -> Result<(), StoreError> {
        let found = stream::list(&self.path(&tree.name), false);
        let stamp = found.as_ref().map_or(String::new(), stamp_of);
        self.compare(tree, found, &tree.record.listing)?;
        if stamp == tree.record.stamp {
            return Ok(());
        }
        self.verify(tree)?;
        let record = TreeRecord {
            stamp,
            ..tree.record.clone()
        };
        // If this fails, the next check reads the content again.
        let _ = self.write_record(&Tree {
            name: tree.name.clone(),
            record,
        });
        Ok(())
    }

    /// Compares the whole content of a tree with what was written. It reads every byte.
    pub fn verify(&self, tree: &Tree) -> Result<(), StoreError> {
        let found = stream::list(&self.path(&tree.name), true);
        self.compare(tree, found, &tree.record.content)
    }

    /// Lists all trees, ordered by package and version.
    pub fn list(&self) -> Result<Vec<Tree>, StoreError> {
        let entries =
            fs::read_dir(self.root.join(RECORDS)).map_err(while_doing("list the package store"))?;
        let names = entries
            .flatten()
            .filter_map(|entry| TreeName::new(entry.file_name().to_str()?));
        let mut trees: Vec<Tree> = names
            .filter_map(|name| self.tree(&name))
            .filter(|tree| self.path(&tree.name).is_dir())
            .collect();
        let order = |tree: &Tree| {
            (
                tree.record.package.clone(),
                tree.record.version.clone(),
                tree.name.clone(),
            )
        };
        trees.sort_by_key(order);
        Ok(trees)
    }

    /// Removes a tree. Sessions that use it lose it, so call this only for private trees whose
    /// session has ended.
    pub fn remove(&self, name: &TreeName) -> Result<(), StoreError> {
        let doomed = self.move_away(name)?;
        let _ = fs::remove_file(self.root.join(RECORDS).join(name.as_str()));
        remove_tree(doomed.path()).map_err(while_doing("remove a package"))
    }

    /// Moves a tree out of its place atomically.
    fn move_away(&self, name: &TreeName) -> Result<tempfile::TempDir, StoreError> {
        let doomed = tempfile::Builder::new()
            .prefix("removed-")
            .tempdir_in(self.root.join(INCOMING))
            .map_err(while_doing("remove a package"))?;
        let path = self.path(name);
        // Renaming a directory to another parent requires write permission on it.
        let moved = fs::set_permissions(&path, Permissions::from_mode(0o755))
            .and_then(|()| fs::rename(&path, doomed.path().join("tree")));
        match moved {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(while_doing("remove a package")(error))
            }
            _ => Ok(doomed),
        }
    }

    /// Moves a finished tree into place and writes its record. Marks the tree as in use.
    fn keep(&self, place: &Path, mut tree: Tree) -> Result<Tree, StoreError> {
        make_read_only(place).map_err(while_doing("make the package read-only"))?;
        let listing =
            stream::list(place, false).map_err(while_doing("make the package read-only"))?;
        tree.record.stamp = stamp_of(&listing);
        let marking = self
            .uses
            .marking()
            .map_err(while_doing("note which packages are used"))?;
        self.mark(&marking, &tree.name)?;
        let path = self.path(&tree.name);
        if let Some(there) = self.tree(&tree.name).filter(|_| path.is_dir()) {
            if self.check(&there).is_ok() {
                let _ = remove_tree(place);
                return Ok(there);
            }
            // The existing tree was modified on disk. Processes that have its files open keep them;
            // a new lookup by name finds the correct content.
            let damaged = self.move_away(&tree.name)?;
            remove_tree(damaged.path()).map_err(while_doing("remove a package"))?;
        }
        // The record is written first: a tree without a record could not be checked, whereas a
        // record without a tree is ignored by lookups.
        self.write_record(&tree)
            .map_err(while_doing("write down the package"))?;
        match fs::rename(place, &path) {
            Ok(()) => fs::set_permissions(&path, Permissions::from_mode(0o555))
                .map_err(while_doing("make the package read-only"))?,
            // Another process has stored the same content first.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty
                ) =>
            {
                let _ = remove_tree(place);
                self.check(&tree)?;
            }
            Err(cause) => {
                let _ = remove_tree(place);
                return Err(while_doing("put the package in its place")(cause));
            }
        }
        Ok(tree)
    }

    /// Marks a tree as in use and updates its time of last use.
    fn mark(&self, marking: &Marking, name: &TreeName) -> Result<(), StoreError> {
        self.uses
            .mark(marking, name)
            .map_err(while_doing("note which packages are used"))?;
        let record = OpenOptions::new()
            .write(true)
            .open(self.root.join(RECORDS).join(name.as_str()));
        // The record's modification time is the tree's time of last use. A tree that is being added
        // has no record yet.
        let _ = record.and_then(|record| record.set_modified(SystemTime::now()));
        Ok(())
    }

    fn write_record(&self, tree: &Tree) -> io::Result<()> {
        let record =
            serde_json::to_vec(&tree.record).expect("a record can always be written as JSON");
        self.write(RECORDS, tree.name.as_str(), &record)
    }

    fn compare(
        &self,
        tree: &Tree,
        found: io::Result<stream::TreeListing>,
        expected: &str,
    ) -> Result<(), StoreError> {
        match found {
            Ok(listing) if hash_of(&listing) == expected => Ok(()),
            _ => Err(StoreError::Damaged {
                name: tree.name.clone(),
                package: tree.record.package.clone(),
                version: tree.record.version.clone(),
            }),
        }
    }

    fn path(&self, name: &TreeName) -> PathBuf {
        self.root.join(TREES).join(name.as_str())
    }

    /// Returns a tree and its metadata, if a tree with this name exists.
    pub fn tree(&self, name: &TreeName) -> Option<Tree> {
        let text = fs::read(self.root.join(RECORDS).join(name.as_str())).ok()?;
        Some(Tree {
            name: name.clone(),
            record: serde_json::from_slice(&text).ok()?,
        })
    }

    /// Writes a small file atomically.
    fn write(&self, folder: &str, name: &str, content: &[u8]) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(self.root.join(INCOMING))?;
        io::Write::write_all(&mut file, content)?;
        file.persist(self.root.join(folder).join(name))?;
        Ok(())
    }

    /// Removes everything that cannot be in use. The caller must hold the lock exclusively.
    fn clean_up(&self) {
        // Reading the marks of other servers removes those of servers that have ended.
        let _ = self.in_use();
        let leftovers = fs::read_dir(self.root.join(INCOMING))
            .into_iter()
            .flatten()
            .flatten();
        let unfinished: Vec<io::Result<()>> =
            leftovers.map(|entry| remove_tree(&entry.path())).collect();
        let private = self
            .list()
            .unwrap_or_default()
            .into_iter()
            .filter(|tree| tree.record.sharing == Sharing::Private);
        let failures = private
            .filter_map(|tree| self.remove(&tree.name).err())
            .count()
            + unfinished.into_iter().filter(Result::is_err).count();
        if failures > 0 {
            tracing::warn!(
                failures,
                "could not remove everything that earlier servers left in the package store"
            );
        }
    }
}

/// Determines the distribution of a tree from the name of its only `.dist-info` directory.
fn described(listing: &stream::TreeListing) -> Option<(String, String)> {
    let folders = listing
        .keys()
        .filter_map(|path| path.split_once('/')?.0.strip_suffix(".dist-info"));
    let mut folders: Vec<&str> = folders.collect();
    folders.dedup();
    let [folder] = folders[..] else { return None };
    let (name, version) = folder.split_once('-')?;
    let fits = super::requirement::is_name(name) && super::requirement::is_version(version);
    fits.then(|| (super::requirement::normalised(name), version.to_owned()))
}

fn without_contents(mut listing: stream::TreeListing) -> stream::TreeListing {
    listing.values_mut().for_each(|entry| entry.content = None);
    listing
}

/// Removes write permission from every directory below `place`, but not from `place` itself: a
/// directory must be writable to be renamed.
fn make_read_only(place: &Path) -> io::Result<()> {
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_read_only(&entry.path())?;
            fs::set_permissions(entry.path(), Permissions::from_mode(0o555))?;
        }
    }
    Ok(())
}

/// Removes a file or a directory tree, including read-only directories.
fn remove_tree(path: &Path) -> io::Result<()> {
    fn open_up(folder: &Path) -> io::Result<()> {
        fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open_up(&entry.path())?;
            }
        }
        Ok(())
    }
    if !fs::symlink_metadata(path)?.is_dir() {
        return fs::remove_file(path);
    }
    open_up(path)?;
    fs::remove_dir_all(path)
}

#[cfg(test)]
pub(super) mod tests;
