//! The store: unpacked packages on the host, shared read-only by all sessions.
//!
//! ```text
//! <store>/trees/<name>      what one distribution installs. Its name is the hash of its content; a private one has a random name
//! <store>/records/<name>    what is known of that tree: package, version, hash of its file list, hash of its content
//! <store>/index/<key>       which tree answers (index, Python, package, version, hashes of its files)
//! <store>/incoming/         trees that are being written
//! <store>/in-use.lock       shared by every server that uses the store
//! ```
//!
//! Only `trees` is shown to sandboxes. Nobody can list it, not even a session that has the server's own user id: a session can use a path
//! that it was told, and whoever does not know the name of a private tree cannot find it.
//!
//! A tree is written into `incoming`, made read-only and renamed. A tree that exists is never written to: who comes second keeps the
//! first. So servers that share a store need no lock among each other, except to clean up: that is done by whoever opens the store alone.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::stream::{self, Bounds, StreamError, hash_of};

const TREES: &str = "trees";
const RECORDS: &str = "records";
const INDEX: &str = "index";
const INCOMING: &str = "incoming";
const LOCK: &str = "in-use.lock";

/// Packages on the host. While this value lives, no other process removes a tree.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    _in_use: File,
}

/// The name of a tree: 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreeName(String);

/// What a tree is looked up by. It follows from everything that decides what an installer would put into the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key(String);

/// Whether others may use a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Made without running any code of a package, and found by everybody.
    Shared,
    /// Made where a package's code ran. Only who is told its name can use it, and it goes when the last server ends.
    Private,
}

/// What is known of a tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The distribution's name in its normalised spelling.
    pub package: String,
    pub version: String,
    pub files: u64,
    pub bytes: u64,
    pub sharing: Sharing,
    /// Seconds since 1970.
    pub created: u64,
    listing: String,
    content: String,
}

/// A tree of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    pub name: TreeName,
    pub record: Record,
}

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error("the package holds no description of itself, or more than one")]
    NoDescription,
    #[error(
        "a stored package was changed on disk; the operator should remove it from the package store: {package} {version} ({name})"
    )]
    Damaged { name: TreeName, package: String, version: String },
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
        let fits = text.len() == 64 && text.chars().all(|digit| matches!(digit, '0'..='9' | 'a'..='f'));
        fits.then(|| TreeName(text.to_owned()))
    }

    fn random() -> io::Result<TreeName> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(TreeName(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Returns the digits, which are the name of the folder.
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

impl Key {
    /// Makes a key of parts. Different parts give different keys, also where their texts joined would be the same.
    pub fn new(parts: &[&str]) -> Key {
        let text = serde_json::to_vec(parts).expect("texts can always be written as JSON");
        Key(Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl Store {
    /// Opens the store in this folder, making it if need be. Whoever opens it alone cleans up: unfinished and private trees go.
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
            // The owner may not list it either: without root's rights, sessions have the owner's user id.
            folder(&root.join(TREES), 0o311)?;
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(root.join(LOCK))
        };
        let lock = prepare().map_err(while_doing("make the package store"))?;
        let alone = match lock.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(cause)) => return Err(while_doing("lock the package store")(cause)),
        };
        let store = Store { root: root.to_owned(), _in_use: lock };
        if alone {
            store.clean_up();
        }
        // The lock changes its kind; nobody can have come in between who would mind.
        store._in_use.lock_shared().map_err(while_doing("lock the package store"))?;
        Ok(store)
    }

    /// Returns the host folder to show read-only to sandboxes.
    pub fn trees(&self) -> PathBuf {
        self.root.join(TREES)
    }

    /// Finds the tree for a key, and looks whether its file list is still what it was.
    pub fn find(&self, key: &Key) -> Result<Option<Tree>, StoreError> {
        let Ok(text) = fs::read_to_string(self.root.join(INDEX).join(&key.0)) else { return Ok(None) };
        let Some(tree) = TreeName::new(text.trim()).and_then(|name| self.tree(&name)) else { return Ok(None) };
        if !self.path(&tree.name).is_dir() {
            return Ok(None);
        }
        self.check(&tree)?;
        Ok(Some(tree))
    }

    /// Reads a stream that came out of a sandbox and keeps what it holds.
    pub fn add(&self, stream: impl Read, bounds: Bounds, sharing: Sharing) -> Result<Tree, StoreError> {
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
            Sharing::Private => TreeName::random().map_err(while_doing("choose a name for the package"))?,
        };
        let record = Record {
            package,
            version,
            files: listing.len() as u64,
            bytes: listing.values().map(|entry| entry.size).sum(),
            sharing,
            created: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            listing: hash_of(&without_contents(listing)),
            content,
        };
        let tree = Tree { name, record };
        self.keep(&place, &tree)?;
        Ok(tree)
    }

    /// Lets everybody find a tree under a key. Private trees are never found.
    pub fn remember(&self, key: &Key, tree: &Tree) -> Result<(), StoreError> {
        if tree.record.sharing == Sharing::Private {
            return Ok(());
        }
        self.write(INDEX, &key.0, tree.name.as_str().as_bytes()).map_err(while_doing("remember the package"))
    }

    /// Looks whether names, kinds and sizes of a tree's files are what they were.
    pub fn check(&self, tree: &Tree) -> Result<(), StoreError> {
        let found = stream::list(&self.path(&tree.name), false);
        self.compare(tree, found, &tree.record.listing)
    }

    /// Reads every byte of a tree and compares it with what was written. It is for `doctor`: it takes as long as reading takes.
    pub fn verify(&self, tree: &Tree) -> Result<(), StoreError> {
        let found = stream::list(&self.path(&tree.name), true);
        self.compare(tree, found, &tree.record.content)
    }

    /// Lists all trees by package and version.
    pub fn list(&self) -> Result<Vec<Tree>, StoreError> {
        let entries = fs::read_dir(self.root.join(RECORDS)).map_err(while_doing("list the package store"))?;
        let names = entries.flatten().filter_map(|entry| TreeName::new(entry.file_name().to_str()?));
        let mut trees: Vec<Tree> =
            names.filter_map(|name| self.tree(&name)).filter(|tree| self.path(&tree.name).is_dir()).collect();
        let order = |tree: &Tree| (tree.record.package.clone(), tree.record.version.clone(), tree.name.clone());
        trees.sort_by_key(order);
        Ok(trees)
    }

    /// Removes a tree. Sessions that use it lose it, so it is for private trees whose session has ended, and for damaged ones.
    pub fn remove(&self, name: &TreeName) -> Result<(), StoreError> {
        let doomed = tempfile::Builder::new()
            .prefix("removed-")
            .tempdir_in(self.root.join(INCOMING))
            .map_err(while_doing("remove a package"))?;
        let path = self.path(name);
        // Renaming a folder elsewhere needs the right to write into it.
        let moved = fs::set_permissions(&path, Permissions::from_mode(0o755))
            .and_then(|()| fs::rename(&path, doomed.path().join("tree")));
        match moved {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(while_doing("remove a package")(error));
            }
            _ => {}
        }
        let _ = fs::remove_file(self.root.join(RECORDS).join(name.as_str()));
        remove_tree(doomed.path()).map_err(while_doing("remove a package"))
    }

    /// Gives a finished tree its place and its record.
    fn keep(&self, place: &Path, tree: &Tree) -> Result<(), StoreError> {
        make_read_only(place).map_err(while_doing("make the package read-only"))?;
        let record = serde_json::to_vec(&tree.record).expect("a record can always be written as JSON");
        // The record comes first: a tree without one could not be checked, a record without a tree is not found.
        self.write(RECORDS, tree.name.as_str(), &record).map_err(while_doing("write down the package"))?;
        let path = self.path(&tree.name);
        match fs::rename(place, &path) {
            Ok(()) => fs::set_permissions(&path, Permissions::from_mode(0o555))
                .map_err(while_doing("make the package read-only")),
            // Somebody else put the same content there first.
            Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty) => {
                let _ = remove_tree(place);
                self.check(tree)
            }
            Err(cause) => {
                let _ = remove_tree(place);
                Err(while_doing("put the package in its place")(cause))
            }
        }
    }

    fn compare(&self, tree: &Tree, found: io::Result<stream::Listing>, expected: &str) -> Result<(), StoreError> {
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

    /// Returns what is known of a tree, if there is one of this name.
    pub fn tree(&self, name: &TreeName) -> Option<Tree> {
        let text = fs::read(self.root.join(RECORDS).join(name.as_str())).ok()?;
        Some(Tree { name: name.clone(), record: serde_json::from_slice(&text).ok()? })
    }

    /// Writes a small file in one step.
    fn write(&self, folder: &str, name: &str, content: &[u8]) -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(self.root.join(INCOMING))?;
        io::Write::write_all(&mut file, content)?;
        file.persist(self.root.join(folder).join(name))?;
        Ok(())
    }

    /// Removes what nobody can be using. Only who holds the lock alone may call it.
    fn clean_up(&self) {
        let leftovers = fs::read_dir(self.root.join(INCOMING)).into_iter().flatten().flatten();
        let unfinished: Vec<io::Result<()>> = leftovers.map(|entry| remove_tree(&entry.path())).collect();
        let private =
            self.list().unwrap_or_default().into_iter().filter(|tree| tree.record.sharing == Sharing::Private);
        let failures = private.filter_map(|tree| self.remove(&tree.name).err()).count()
            + unfinished.into_iter().filter(Result::is_err).count();
        if failures > 0 {
            tracing::warn!(failures, "could not remove everything that earlier servers left in the package store");
        }
    }
}

/// Finds which distribution a tree is, by the name of the one folder that describes it.
fn described(listing: &stream::Listing) -> Option<(String, String)> {
    let folders = listing.keys().filter_map(|path| path.split_once('/')?.0.strip_suffix(".dist-info"));
    let mut folders: Vec<&str> = folders.collect();
    folders.dedup();
    let [folder] = folders[..] else { return None };
    let (name, version) = folder.split_once('-')?;
    let fits = super::requirement::is_name(name) && super::requirement::is_version(version);
    fits.then(|| (super::requirement::normalised(name), version.to_owned()))
}

fn without_contents(mut listing: stream::Listing) -> stream::Listing {
    listing.values_mut().for_each(|entry| entry.content = None);
    listing
}

/// Takes the right to write from every folder below `place`, but not from itself: a folder that is to be renamed must be writable.
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

/// Removes a file or a folder whose folders may be read-only.
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
pub(super) mod tests {
    use super::super::stream::tests::stream;
    use super::*;

    const ROOMY: Bounds = Bounds { files: 100, bytes: 1 << 20 };
    const PURE: [(&str, &str); 3] =
        [("pure/__init__.py", "x = 1\n"), ("pure-1.0.dist-info/METADATA", "Name: pure\n"), ("bin/pure", "#!x\n")];

    /// A store in a folder of its own, which can be removed again without root's rights.
    pub(crate) struct Bench {
        folder: tempfile::TempDir,
    }

    impl Bench {
        pub(crate) fn new() -> Bench {
            Bench { folder: tempfile::tempdir().unwrap() }
        }

        pub(crate) fn open(&self) -> Store {
            Store::open(&self.folder.path().join("packages")).unwrap()
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = remove_tree(self.folder.path());
        }
    }

    fn key(version: &str) -> Key {
        Key::new(&["index", "cp311", "pure", version])
    }

    fn add(store: &Store, files: &[(&str, &str)], sharing: Sharing) -> Tree {
        store.add(stream(files).as_slice(), ROOMY, sharing).unwrap()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn unfinished(store: &Store) -> usize {
        fs::read_dir(store.root.join(INCOMING)).unwrap().count()
    }

    #[test]
    fn a_tree_is_named_after_its_content_and_cannot_be_written_to() {
        let bench = Bench::new();
        let store = bench.open();
        let tree = add(&store, &PURE, Sharing::Shared);
        assert_eq!((tree.record.package.as_str(), tree.record.version.as_str()), ("pure", "1.0"));
        assert_eq!((tree.record.files, tree.record.bytes), (3, 21));
        let path = store.path(&tree.name);
        let modes = ["", "pure", "pure/__init__.py", "bin/pure"].map(|part| mode(&path.join(part)));
        assert_eq!(modes, [0o555, 0o555, 0o444, 0o555]);
        assert_eq!(add(&store, &PURE, Sharing::Shared).name, tree.name, "the same content has the same name");
        let other = [PURE[0], PURE[1], ("bin/pure", "#!y\n")];
        assert_ne!(add(&store, &other, Sharing::Shared).name, tree.name);
        assert_eq!(unfinished(&store), 0);
    }

    #[test]
    fn sessions_can_use_a_path_but_not_list_the_store() {
        let bench = Bench::new();
        let store = bench.open();
        assert_eq!(mode(&store.trees()), 0o311);
        assert_eq!(mode(&store.root), 0o711);
        let others = [RECORDS, INDEX, INCOMING].map(|name| mode(&store.root.join(name)));
        assert_eq!(others, [0o700; 3]);
    }

    #[test]
    fn a_tree_is_found_by_its_key_in_every_server() {
        let bench = Bench::new();
        let (store, neighbour) = (bench.open(), bench.open());
        assert_eq!(store.find(&key("1.0")).unwrap(), None);
        let tree = add(&store, &PURE, Sharing::Shared);
        store.remember(&key("1.0"), &tree).unwrap();
        assert_eq!(neighbour.find(&key("1.0")).unwrap(), Some(tree));
        assert_eq!(store.find(&key("1.1")).unwrap(), None);
        assert_ne!(Key::new(&["a", "b"]), Key::new(&["ab", ""]));
    }

    #[test]
    fn a_private_tree_has_a_name_that_nobody_can_guess_and_is_in_no_index() {
        let bench = Bench::new();
        let store = bench.open();
        let (one, two) = (add(&store, &PURE, Sharing::Private), add(&store, &PURE, Sharing::Private));
        let shared = add(&store, &PURE, Sharing::Shared);
        assert!(one.name != two.name && one.name != shared.name);
        store.remember(&key("1.0"), &one).unwrap();
        assert_eq!(store.find(&key("1.0")).unwrap(), None);
        store.remember(&key("1.0"), &shared).unwrap();
        assert_eq!(store.find(&key("1.0")).unwrap(), Some(shared)); // control
        store.verify(&one).unwrap();
    }

    #[test]
    fn who_opens_the_store_alone_removes_private_and_unfinished_trees() {
        let bench = Bench::new();
        let store = bench.open();
        let (private, shared) = (add(&store, &PURE, Sharing::Private), add(&store, &PURE, Sharing::Shared));
        fs::create_dir(store.root.join(INCOMING).join("tree-interrupted")).unwrap();
        drop(bench.open());
        assert_eq!((store.list().unwrap().len(), unfinished(&store)), (2, 1), "another server is using it");
        drop(store);
        let store = bench.open();
        assert_eq!((store.list().unwrap(), unfinished(&store)), (vec![shared], 0));
        assert!(!store.path(&private.name).exists());
    }

    #[test]
    fn a_changed_file_is_noticed_by_size_at_once_and_by_content_when_everything_is_read() {
        let bench = Bench::new();
        let store = bench.open();
        let tree = add(&store, &PURE, Sharing::Shared);
        store.remember(&key("1.0"), &tree).unwrap();
        store.verify(&tree).unwrap(); // control
        let file = store.path(&tree.name).join("pure/__init__.py");
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        fs::write(&file, "x = 2\n").unwrap();
        store.find(&key("1.0")).unwrap().unwrap();
        assert!(matches!(store.verify(&tree), Err(StoreError::Damaged { .. })));
        fs::write(&file, "x = 10\n").unwrap();
        let said = store.find(&key("1.0")).unwrap_err().to_string();
        assert!(said.contains("pure 1.0"), "{said}");
        let again = store.add(stream(&PURE).as_slice(), ROOMY, Sharing::Shared);
        assert!(matches!(again, Err(StoreError::Damaged { .. })), "what exists is not touched");
        store.remove(&tree.name).unwrap();
        assert_eq!(store.find(&key("1.0")).unwrap(), None);
        assert_eq!(add(&store, &PURE, Sharing::Shared).name, tree.name);
        store.find(&key("1.0")).unwrap().unwrap();
    }

    #[test]
    fn an_added_or_missing_file_is_noticed() {
        let bench = Bench::new();
        let store = bench.open();
        for change in
            [|path: &Path| fs::write(path.join("evil.py"), ""), |path: &Path| fs::remove_file(path.join("bin/pure"))]
        {
            let tree = add(&store, &PURE, Sharing::Private);
            let path = store.path(&tree.name);
            for folder in [path.clone(), path.join("bin")] {
                fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
            }
            store.check(&tree).unwrap(); // control
            change(&path).unwrap();
            assert!(matches!(store.check(&tree), Err(StoreError::Damaged { .. })));
        }
    }

    #[test]
    fn a_refused_stream_leaves_nothing() {
        let bench = Bench::new();
        let store = bench.open();
        let hostile = [PURE[0], PURE[1], ("../../index/x", "x")];
        store.add(stream(&hostile).as_slice(), ROOMY, Sharing::Shared).unwrap_err();
        let whole = stream(&PURE);
        store.add(&whole[..whole.len() - 1], ROOMY, Sharing::Shared).unwrap_err();
        assert_eq!((store.list().unwrap(), unfinished(&store)), (Vec::new(), 0));
        assert_eq!(fs::read_dir(store.root.join(INDEX)).unwrap().count(), 0);
    }

    #[test]
    fn a_tree_must_say_which_package_it_is() {
        let bench = Bench::new();
        let store = bench.open();
        for descriptions in [&[] as &[&str], &["a-1.0", "b-1.0"], &["-1.0"], &["a-"], &["a b-1"], &["a-1 0"]] {
            let paths = descriptions.iter().map(|name| format!("{name}.dist-info/METADATA")).collect::<Vec<_>>();
            let files: Vec<_> = paths.iter().map(|path| (path.as_str(), "")).chain([("x.py", "")]).collect();
            let refused = store.add(stream(&files).as_slice(), ROOMY, Sharing::Shared);
            assert!(matches!(refused, Err(StoreError::NoDescription)), "{descriptions:?}");
        }
        let tree = add(&store, &[("Zope.Event_x-1.0+cpu.dist-info/METADATA", "")], Sharing::Shared);
        assert_eq!((tree.record.package.as_str(), tree.record.version.as_str()), ("zope-event-x", "1.0+cpu"));
    }

    #[test]
    fn many_who_add_the_same_at_once_share_one_tree() {
        let bench = Bench::new();
        let stores: Vec<Store> = (0..4).map(|_| bench.open()).collect();
        let names: Vec<TreeName> = std::thread::scope(|scope| {
            let adding: Vec<_> =
                stores.iter().map(|store| scope.spawn(|| add(store, &PURE, Sharing::Shared).name)).collect();
            adding.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(names.iter().all(|name| *name == names[0]));
        assert_eq!((stores[0].list().unwrap().len(), unfinished(&stores[0])), (1, 0));
        stores[0].verify(&stores[0].list().unwrap()[0]).unwrap();
    }
}
