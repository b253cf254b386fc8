//! What one server leaves traces of, so that a crash can be cleaned up after.
//!
//! Each server holds a lock on a file of its own in the runtime folder; the file lists its control groups. A file whose lock is free belongs to
//! a server that died together with its guardian. The next server to start removes what it lists.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use cellblock_jail::cgroup;
use rustix::fs::FlockOperation;
use tracing::info;

/// How many entries this process has made.
static REGISTERED: AtomicU32 = AtomicU32::new(0);

/// This server's entry in the runtime folder.
pub(super) struct Instance {
    file: PathBuf,
    /// Locked as long as the server lives.
    _lock: File,
    cgroups: Result<cgroup::Tree, String>,
}

impl Instance {
    /// Sweeps what dead servers left, then registers this one.
    pub(super) fn register(runtime_dir: &Path) -> io::Result<Instance> {
        let folder = runtime_dir.join("instances");
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        // Two servers that start at the same moment must not take each other's unlocked file for a dead one.
        let turn = File::open(&folder)?;
        rustix::fs::flock(&turn, FlockOperation::LockExclusive)?;
        sweep(&folder)?;
        // Never the same twice: whoever still cleans up after an earlier one must not find this one.
        let number = REGISTERED.fetch_add(1, Ordering::Relaxed);
        let name = format!("cellblock-{}-{number}", std::process::id());
        let path = folder.join(&name);
        let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let cgroups = cgroup::Tree::make(&name);
        if let Ok(tree) = &cgroups {
            for folder in tree.folders() {
                writeln!(file, "{}", folder.display())?;
            }
        }
        Ok(Instance { file: path, _lock: file, cgroups })
    }

    pub(super) fn tree(&self) -> Option<&cgroup::Tree> {
        self.cgroups.as_ref().ok()
    }

    /// Why there are no control groups, when there are none.
    pub(super) fn cgroup_failure(&self) -> Option<&str> {
        self.cgroups.as_ref().err().map(String::as_str)
    }

    /// Removes the entry. The guardian has removed the control groups by now; doing it again is harmless.
    pub(super) fn remove(&self) {
        if let Ok(tree) = &self.cgroups {
            for folder in tree.folders() {
                cgroup::remove_tree(&folder);
            }
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
        let path = entry?.path();
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
        cgroup::remove_tree(group);
    }
    match fs::remove_file(path) {
        // Its server ended in good order a moment ago.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        result => {
            result?;
            info!("removed what a server that died had left");
        }
    }
    Ok(())
}

/// A damaged file must not make us remove anything else.
fn is_ours(group: &Path) -> bool {
    group.starts_with("/sys/fs/cgroup")
        && group.file_name().is_some_and(|name| name.to_string_lossy().starts_with("cellblock-"))
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
        assert_eq!(fs::read_dir(folder.path().join("instances")).unwrap().count(), 0);
    }

    #[test]
    fn a_server_that_ends_while_another_starts_is_no_trouble() {
        let folder = tempfile::tempdir().unwrap();
        let ending = Instance::register(folder.path()).unwrap();
        let (path, file) = (ending.file.clone(), File::open(&ending.file).unwrap());
        drop(ending);
        sweep_entry(&path, &file).unwrap();
        // Control: what is there is removed.
        fs::write(&path, "").unwrap();
        sweep_entry(&path, &file).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn only_our_own_control_groups_are_ever_removed() {
        assert!(is_ours(Path::new("/sys/fs/cgroup/memory/cellblock-7-0")));
        for other in ["/", "/sys/fs/cgroup", "/sys/fs/cgroup/memory/system", "/tmp/cellblock-7-0", ""] {
            assert!(!is_ours(Path::new(other)), "{other}");
        }
    }
}
