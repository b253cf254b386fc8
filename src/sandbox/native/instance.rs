//! The traces of one server on the host, recorded for cleanup after a crash.
//!
//! Each server holds a lock on its own file in the runtime folder; the file lists its control
//! groups. A file whose lock is free belongs to a server that died together with its guardian. The
//! next server to start removes the listed groups.
//!
//! Control groups that no file lists are removed as well if they cannot be in use: their name is
//! ours and names the process of a server that is gone, they belong to this user, they were not
//! touched for a while, and no process is in them or below them. This never kills a process.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use cellblock_jail::cgroup;
use rustix::fs::FlockOperation;
use tracing::info;

use super::groups;

/// The age from which an empty control group may be an orphan. A starting server has no process in
/// its groups for a moment.
const ORPHAN_AGE: Duration = Duration::from_secs(60);

/// Number of entries made by this process.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// This server's entry in the runtime folder.
pub(super) struct Instance {
    /// A name that is unique among servers.
    name: String,
    file: PathBuf,
    /// Locked as long as the server lives.
    lock: File,
    cgroups: Result<cgroup::CgroupTree, String>,
}

impl Instance {
    /// Removes the remains of dead servers, then registers this one.
    pub(super) fn register(runtime_dir: &Path) -> io::Result<Instance> {
        let folder = runtime_dir.join("instances");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        // Two servers that start at the same moment must not take each other's unlocked file for a
        // dead server's.
        let turn = File::open(&folder)?;
        rustix::fs::flock(&turn, FlockOperation::LockExclusive)?;
        sweep(&folder)?;
        // Names are never reused: the cleanup of an earlier instance must not affect this one.
        let number = REGISTERED.fetch_add(1, Ordering::Relaxed);
        let name = format!("cellblock-{}-{number}", std::process::id());
        let path = folder.join(&name);
        let file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(&path)?;
        // From here on, dropping it removes what was made, even if the next step fails.
        let cgroups = Err("no control groups were made yet".to_owned());
        let instance = Instance {
            name,
            file: path,
            lock: file,
            cgroups,
        };
        rustix::fs::flock(&instance.lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(instance)
    }

    /// Makes the control groups, which the guardian will enter. Removes those that dead servers
    /// left beside them.
    pub(super) async fn make_cgroups(&mut self, guardian: u32) -> io::Result<()> {
        self.cgroups = groups::make(&self.name, guardian).await;
        let groups = self
            .tree()
            .map(cgroup::CgroupTree::traces)
            .unwrap_or_default();
        for group in &groups {
            writeln!(self.lock, "{}", group.display())?;
        }
        for parent in groups.iter().filter_map(|group| group.parent()) {
            sweep_orphans(parent, self.file.parent().unwrap_or(Path::new("/")));
        }
        Ok(())
    }

    pub(super) fn tree(&self) -> Option<&cgroup::CgroupTree> {
        self.cgroups.as_ref().ok()
    }

    /// Returns the control groups, or why there are none.
    pub(super) fn cgroups(&self) -> Result<&cgroup::CgroupTree, &str> {
        self.cgroups.as_ref().map_err(String::as_str)
    }

    /// Removes the entry. The guardian has already removed the control groups; doing it again is
    /// harmless.
    pub(super) fn remove(&self) {
        if let Ok(tree) = &self.cgroups {
            tree.remove();
        }
        let _ = fs::remove_file(&self.file);
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.remove();
    }
}

fn sweep(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // A folder or a pipe is not a server's entry.
        if !entry.file_type()?.is_file() {
            continue;
        }
        let path = entry.path();
        if let Ok(file) = File::open(&path) {
            sweep_entry(&path, &file)?;
        }
    }
    Ok(())
}

fn sweep_entry(path: &Path, file: &File) -> io::Result<()> {
    if rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(());
    }
    let listed = fs::read_to_string(path).unwrap_or_default();
    for group in listed.lines().map(Path::new).filter(|group| is_ours(group)) {
        cgroup::remove_trace(group);
    }
    match fs::remove_file(path) {
        // Its server has just exited cleanly.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => {
            result?;
            info!("removed what a server that died had left");
        }
    }
    Ok(())
}

/// Removes control groups below `parent` that dead servers left without an entry in `entries`.
fn sweep_orphans(parent: &Path, entries: &Path) {
    for group in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = group.file_name();
        let name = name.to_string_lossy();
        if is_orphan(
            &group.path(),
            &entries.join(name.trim_end_matches(cgroup::SERVER_SUFFIX)),
        ) {
            remove_empty(&group.path());
            info!("removed a control group that a dead server had left");
        }
    }
}

fn is_orphan(group: &Path, entry: &Path) -> bool {
    let Some(server) = group
        .file_name()
        .and_then(|name| server_of(&name.to_string_lossy()))
    else {
        return false;
    };
    let Ok(metadata) = group.metadata() else {
        return false;
    };
    let is_own = metadata.uid() == rustix::process::geteuid().as_raw();
    let age = metadata
        .modified()
        .ok()
        .and_then(|time| SystemTime::now().duration_since(time).ok());
    metadata.is_dir()
        && is_own
        && age.is_some_and(|age| age >= ORPHAN_AGE)
        && !entry.exists()
        && !Path::new("/proc").join(server.to_string()).exists()
        && is_empty(group)
}

/// Returns the process that a control group of ours is named after: `cellblock-PROCESS-NUMBER`,
/// also with `-server`.
fn server_of(name: &str) -> Option<u32> {
    let (process, number) = name
        .trim_end_matches(cgroup::SERVER_SUFFIX)
        .strip_prefix("cellblock-")?
        .split_once('-')?;
    number.parse::<u32>().ok()?;
    process.parse().ok()
}

/// Returns whether no process is in a control group or below it. An unreadable group counts as
/// used.
fn is_empty(group: &Path) -> bool {
    let Ok(processes) = fs::read_to_string(group.join("cgroup.procs")) else {
        return false;
    };
    let Ok(entries) = fs::read_dir(group) else {
        return false;
    };
    let mut below = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    processes.trim().is_empty() && below.all(|entry| is_empty(&entry.path()))
}

/// Removes a control group and those below it. The kernel refuses to remove one that has a process.
fn remove_empty(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_empty(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}

/// Guards against a damaged file: nothing else may be removed.
fn is_ours(group: &Path) -> bool {
    group.starts_with("/sys/fs/cgroup")
        && group
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("cellblock-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_of_a_dead_server_is_removed_and_that_of_a_live_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let live = Instance::register(folder.path()).unwrap();
        let dead = folder.path().join("instances/cellblock-0-0");
        fs::write(&dead, "/sys/fs/cgroup/nothing/cellblock-0-0\n").unwrap();
        let second = Instance::register(folder.path()).unwrap();
        assert!(!dead.exists());
        assert!(live.file.exists());
        drop(live);
        drop(second);
        assert_eq!(
            fs::read_dir(folder.path().join("instances"))
                .unwrap()
                .count(),
            0
        );
    }

    #[test]
    fn a_folder_or_a_pipe_among_the_entries_does_not_keep_a_server_from_starting() {
        let folder = tempfile::tempdir().unwrap();
        let entries = folder.path().join("instances");
        fs::create_dir_all(entries.join("folder/deep")).unwrap();
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            entries.join("pipe"),
            rustix::fs::Mode::RUSR,
        )
        .unwrap();
        fs::write(entries.join("cellblock-0-0"), "").unwrap();
        let live = Instance::register(folder.path()).unwrap();
        assert!(live.file.exists() && entries.join("folder/deep").exists());
        assert!(
            !entries.join("cellblock-0-0").exists(),
            "what a dead server left is still removed"
        ); // control
    }

    #[test]
    fn a_server_that_ends_while_another_starts_is_no_trouble() {
        let folder = tempfile::tempdir().unwrap();
        let ending = Instance::register(folder.path()).unwrap();
        let (path, file) = (ending.file.clone(), File::open(&ending.file).unwrap());
        drop(ending);
        sweep_entry(&path, &file).unwrap();
        // Control: what exists is removed.
        fs::write(&path, "").unwrap();
        sweep_entry(&path, &file).unwrap();
        assert!(!path.exists());
    }

    /// Makes a folder that looks like a control group with these processes and this age.
    fn group(folder: &Path, name: &str, processes: &str, age: Duration) -> PathBuf {
        let path = folder.join(name);
        fs::create_dir(&path).unwrap();
        fs::create_dir(path.join("warden")).unwrap();
        fs::write(path.join("cgroup.procs"), "").unwrap();
        fs::write(path.join("warden/cgroup.procs"), processes).unwrap();
        File::open(&path)
            .unwrap()
            .set_modified(SystemTime::now() - age)
            .unwrap();
        path
    }

    #[test]
    fn a_group_is_an_orphan_only_if_nobody_can_need_it() {
        let folder = tempfile::tempdir().unwrap();
        let entries = folder.path().join("instances");
        fs::create_dir(&entries).unwrap();
        fs::write(entries.join("cellblock-4000000001-0"), "").unwrap();
        let own = format!("cellblock-{}-0", std::process::id());
        // The kernel never assigns such pids.
        let cases = [
            ("cellblock-4000000000-0", "", 61, true),
            ("cellblock-4000000004-0-server", "", 61, true),
            ("cellblock-4000000001-0", "", 61, false),
            ("cellblock-4000000002-0", "1\n", 61, false),
            ("cellblock-4000000003-0", "", 30, false),
            (own.as_str(), "", 61, false),
            ("cellblock-mine", "", 61, false),
            ("system.slice", "", 61, false),
        ];
        for (name, processes, age, expected) in cases {
            let path = group(folder.path(), name, processes, Duration::from_secs(age));
            assert_eq!(is_orphan(&path, &entries.join(name)), expected, "{name}");
        }
        sweep_orphans(folder.path(), &entries);
        // A folder of a real file system keeps its files; the groups below are gone.
        assert!(folder.path().join("cellblock-4000000002-0/warden").exists());
    }

    #[test]
    fn only_our_own_control_groups_are_ever_removed() {
        assert!(is_ours(Path::new("/sys/fs/cgroup/memory/cellblock-7-0")));
        for other in [
            "/",
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/memory/system",
            "/tmp/cellblock-7-0",
            "",
        ] {
            assert!(!is_ours(Path::new(other)), "{other}");
        }
    }
}
