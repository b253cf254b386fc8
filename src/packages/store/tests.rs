//! Tests of the store on a real disk: visibility of trees, detection of changes, eviction.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::stream::tests::stream;
use super::*;

const ROOMY: Bounds = Bounds {
    files: 100,
    bytes: 1 << 20,
};
const PURE: [(&str, &str); 3] = [
    ("pure/__init__.py", "x = 1\n"),
    ("pure-1.0.dist-info/METADATA", "Name: pure\n"),
    ("bin/pure", "#!x\n"),
];

/// A store in its own directory, which can be removed without root.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench {
            folder: tempfile::tempdir().unwrap(),
        }
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

fn key(version: &str) -> TreeKey {
    TreeKey::new(&["index", "cp311", "pure", version])
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
    assert_eq!(
        (tree.record.package.as_str(), tree.record.version.as_str()),
        ("pure", "1.0")
    );
    assert_eq!((tree.record.files, tree.record.bytes), (3, 21));
    let path = store.path(&tree.name);
    let modes = ["", "pure", "pure/__init__.py", "bin/pure"].map(|part| mode(&path.join(part)));
    assert_eq!(modes, [0o555, 0o555, 0o444, 0o555]);
    assert_eq!(
        add(&store, &PURE, Sharing::Shared).name,
        tree.name,
        "the same content has the same name"
    );
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
    assert_ne!(TreeKey::new(&["a", "b"]), TreeKey::new(&["ab", ""]));
}

#[test]
fn a_private_tree_has_a_name_that_nobody_can_guess_and_is_in_no_index() {
    let bench = Bench::new();
    let store = bench.open();
    let (one, two) = (
        add(&store, &PURE, Sharing::Private),
        add(&store, &PURE, Sharing::Private),
    );
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
    let (private, shared) = (
        add(&store, &PURE, Sharing::Private),
        add(&store, &PURE, Sharing::Shared),
    );
    fs::create_dir(store.root.join(INCOMING).join("tree-interrupted")).unwrap();
    drop(bench.open());
    assert_eq!(
        (store.list().unwrap().len(), unfinished(&store)),
        (2, 1),
        "another server is using it"
    );
    drop(store);
    let store = bench.open();
    assert_eq!(
        (store.list().unwrap(), unfinished(&store)),
        (vec![shared], 0)
    );
    assert!(!store.path(&private.name).exists());
}

#[test]
fn a_changed_tree_counts_as_missing_and_is_replaced_by_the_next_who_brings_it() {
    let bench = Bench::new();
    let (store, neighbour) = (bench.open(), bench.open());
    let tree = add(&store, &PURE, Sharing::Shared);
    store.remember(&key("1.0"), &tree).unwrap();
    store.verify(&tree).unwrap(); // control
    let file = store.path(&tree.name).join("pure/__init__.py");
    let change = |content: &str| {
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        fs::write(&file, content).unwrap();
    };
    for content in ["x = 2\n", "x = 10\n"] {
        change(content);
        assert_eq!(
            neighbour.find(&key("1.0")).unwrap(),
            None,
            "same size or not: {content:?}"
        );
        assert!(matches!(
            store.verify(&tree),
            Err(StoreError::Damaged { .. })
        ));
        assert_eq!(add(&store, &PURE, Sharing::Shared).name, tree.name);
        assert_eq!(fs::read_to_string(&file).unwrap(), "x = 1\n");
        store.find(&key("1.0")).unwrap().unwrap();
        assert_eq!(unfinished(&store), 0);
    }
}

#[test]
fn a_tree_that_was_copied_or_written_by_an_older_version_is_read_once_and_then_known() {
    let bench = Bench::new();
    let store = bench.open();
    let tree = add(&store, &PURE, Sharing::Shared);
    store.remember(&key("1.0"), &tree).unwrap();
    let mut older = tree.clone();
    older.record.stamp.clear();
    store.write_record(&older).unwrap();
    let record = store.find(&key("1.0")).unwrap().unwrap().record;
    assert_eq!(record, older.record);
    assert_eq!(store.tree(&tree.name).unwrap(), tree);
}

#[test]
fn an_added_or_missing_file_is_noticed() {
    let bench = Bench::new();
    let store = bench.open();
    for change in [
        |path: &Path| fs::write(path.join("evil.py"), ""),
        |path: &Path| fs::remove_file(path.join("bin/pure")),
    ] {
        let tree = add(&store, &PURE, Sharing::Private);
        let path = store.path(&tree.name);
        for folder in [path.clone(), path.join("bin")] {
            fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
        }
        store.check(&tree).unwrap(); // control
        change(&path).unwrap();
        assert!(matches!(
            store.check(&tree),
            Err(StoreError::Damaged { .. })
        ));
    }
}

#[test]
fn a_refused_stream_leaves_nothing() {
    let bench = Bench::new();
    let store = bench.open();
    let hostile = [PURE[0], PURE[1], ("../../index/x", "x")];
    store
        .add(stream(&hostile).as_slice(), ROOMY, Sharing::Shared)
        .unwrap_err();
    let whole = stream(&PURE);
    store
        .add(&whole[..whole.len() - 1], ROOMY, Sharing::Shared)
        .unwrap_err();
    assert_eq!((store.list().unwrap(), unfinished(&store)), (Vec::new(), 0));
    assert_eq!(fs::read_dir(store.root.join(INDEX)).unwrap().count(), 0);
}

#[test]
fn a_tree_must_say_which_package_it_is() {
    let bench = Bench::new();
    let store = bench.open();
    for descriptions in [
        &[] as &[&str],
        &["a-1.0", "b-1.0"],
        &["-1.0"],
        &["a-"],
        &["a b-1"],
        &["a-1 0"],
    ] {
        let paths = descriptions
            .iter()
            .map(|name| format!("{name}.dist-info/METADATA"))
            .collect::<Vec<_>>();
        let files: Vec<_> = paths
            .iter()
            .map(|path| (path.as_str(), ""))
            .chain([("x.py", "")])
            .collect();
        let refused = store.add(stream(&files).as_slice(), ROOMY, Sharing::Shared);
        assert!(
            matches!(refused, Err(StoreError::NoDescription)),
            "{descriptions:?}"
        );
    }
    let tree = add(
        &store,
        &[("Zope.Event_x-1.0+cpu.dist-info/METADATA", "")],
        Sharing::Shared,
    );
    assert_eq!(
        (tree.record.package.as_str(), tree.record.version.as_str()),
        ("zope-event-x", "1.0+cpu")
    );
}

#[test]
fn many_who_add_the_same_at_once_share_one_tree() {
    let bench = Bench::new();
    let stores: Vec<Store> = (0..4).map(|_| bench.open()).collect();
    let names: Vec<TreeName> = std::thread::scope(|scope| {
        let adding: Vec<_> = stores
            .iter()
            .map(|store| scope.spawn(|| add(store, &PURE, Sharing::Shared).name))
            .collect();
        adding
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(names.iter().all(|name| *name == names[0]));
    assert_eq!(
        (stores[0].list().unwrap().len(), unfinished(&stores[0])),
        (1, 0)
    );
    stores[0].verify(&stores[0].list().unwrap()[0]).unwrap();
}

fn sized(store: &Store, name: &str, bytes: usize) -> Tree {
    let (description, content) = (format!("{name}-1.0.dist-info/METADATA"), "x".repeat(bytes));
    let tree = add(store, &[(&description, &content)], Sharing::Shared);
    store.remember(&TreeKey::new(&[name]), &tree).unwrap();
    tree
}

fn names(store: &Store) -> Vec<String> {
    store
        .list()
        .unwrap()
        .into_iter()
        .map(|tree| tree.record.package)
        .collect()
}

/// Sets the times of last use to this order.
fn were_used(store: &Store, trees: &[&Tree]) {
    for (number, tree) in trees.iter().enumerate() {
        let record = File::options()
            .write(true)
            .open(store.root.join(RECORDS).join(tree.name.as_str()))
            .unwrap();
        record
            .set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(number as u64))
            .unwrap();
    }
}

#[test]
fn what_was_not_used_for_the_longest_time_goes_first_and_only_as_much_as_needed() {
    let bench = Bench::new();
    let store = bench.open();
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| sized(&store, name, 100));
    drop(store);
    let store = bench.open();
    were_used(&store, &[&c, &a, &d, &b]);
    assert_eq!(
        store.make_room(400).unwrap(),
        Room {
            removed: 0,
            freed: 0,
            left: 400
        }
    ); // control
    assert_eq!(
        store.make_room(399).unwrap(),
        Room {
            removed: 1,
            freed: 100,
            left: 300
        }
    );
    assert_eq!(names(&store), ["a", "b", "d"]);
    // A lookup counts as a use.
    store.find(&TreeKey::new(&["a"])).unwrap().unwrap();
    drop(store);
    let store = bench.open();
    assert_eq!(store.make_room(150).unwrap().removed, 2);
    assert_eq!(names(&store), ["a"]);
    assert_eq!(
        fs::read_dir(store.root.join(INDEX)).unwrap().count(),
        1,
        "keys go with their trees"
    );
    assert_eq!(unfinished(&store), 0);
}

#[test]
fn a_tree_that_a_server_has_given_out_stays_until_it_lets_go_or_ends() {
    let bench = Bench::new();
    let (store, neighbour) = (bench.open(), bench.open());
    let (mine, theirs) = (sized(&store, "mine", 100), sized(&neighbour, "theirs", 100));
    let full = store.make_room(150).unwrap_err();
    assert!(matches!(full, StoreError::Full { limit: 150 }), "{full}");
    assert_eq!(names(&store), ["mine", "theirs"]);
    assert_eq!(
        store.in_use().unwrap(),
        BTreeSet::from([mine.name.clone(), theirs.name.clone()])
    );

    // The tree was handed out but is not yet in the list of used trees.
    store
        .release_all_but(&BTreeSet::new(), Duration::from_secs(60))
        .unwrap();
    store.make_room(150).unwrap_err();
    store
        .release_all_but(&BTreeSet::from([mine.name.clone()]), Duration::ZERO)
        .unwrap();
    store.make_room(150).unwrap_err();
    store
        .release_all_but(&BTreeSet::new(), Duration::ZERO)
        .unwrap();
    assert_eq!(store.make_room(150).unwrap().removed, 1);
    assert_eq!(names(&store), ["theirs"]);

    drop(neighbour);
    assert_eq!(
        store.clean().unwrap(),
        Room {
            removed: 1,
            freed: 100,
            left: 0
        }
    );
    assert!(names(&store).is_empty());
}

#[test]
fn a_private_tree_goes_when_its_server_lets_go_of_it() {
    let bench = Bench::new();
    let (store, _neighbour) = (bench.open(), bench.open());
    let (kept, gone) = (
        add(&store, &PURE, Sharing::Private),
        add(&store, &PURE, Sharing::Private),
    );
    let shared = add(&store, &PURE, Sharing::Shared);
    store
        .release_all_but(&BTreeSet::from([kept.name.clone()]), Duration::ZERO)
        .unwrap();
    let left: BTreeSet<TreeName> = store
        .list()
        .unwrap()
        .into_iter()
        .map(|tree| tree.name)
        .collect();
    assert_eq!(left, BTreeSet::from([kept.name, shared.name]));
    assert!(!store.path(&gone.name).exists());
}

#[test]
fn nothing_that_is_found_while_others_make_room_is_missing_afterwards() {
    let bench = Bench::new();
    let store = bench.open();
    for name in ["a", "b", "c"] {
        sized(&store, name, 10);
    }
    drop(store);
    let (finder, remover) = (bench.open(), bench.open());
    std::thread::scope(|scope| {
        let finding = scope.spawn(|| {
            for round in 0..200 {
                let name = ["a", "b", "c"][round % 3];
                let tree = finder
                    .find(&TreeKey::new(&[name]))
                    .unwrap()
                    .unwrap_or_else(|| sized(&finder, name, 10));
                assert!(
                    finder
                        .path(&tree.name)
                        .join(format!("{name}-1.0.dist-info/METADATA"))
                        .is_file(),
                    "{name}"
                );
                finder
                    .release_all_but(&BTreeSet::new(), Duration::ZERO)
                    .unwrap();
            }
        });
        while !finding.is_finished() {
            remover.clean().unwrap();
        }
        finding.join().unwrap();
    });
}
