//! Which server a container belongs to, and whether that server is still alive.
//!
//! A container ends with its standard input, so a dead server leaves nothing running. Containers
//! that it was just making, and those that an engine had not yet removed, are found by labels. Each
//! server holds a lock on a file in the runtime folder; the next server to start removes the
//! containers of servers whose lock is free. Servers check only servers with the same runtime
//! folder on the same machine.
//!
//! Volumes outlive servers on purpose, and are shared by them. A server records the volume it uses
//! in its file. A volume is removed if no living server uses it, no container has it, and it holds
//! another version of the runner or is for an image that is gone.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use tracing::info;

use super::engine::{Engine, EngineError, ListedContainer, ListedVolume};
use super::id_mapped;
use super::image::fresh_number;
use super::spec::{LABEL_IMAGE, LABEL_PLACE, LABEL_ROLE, LABEL_RUNNER, LABEL_SERVER, ROLE_RUNNER};

/// Lock file, held while volumes are removed, and briefly before one is used. It is not a valid
/// server name.
const VOLUMES: &str = "volumes";

pub(super) struct Tenancy {
    server: String,
    place: String,
    folder: PathBuf,
    /// Held as long as the server lives.
    _lock: File,
}

impl Tenancy {
    /// Registers this server.
    pub(super) fn register(runtime_dir: &Path) -> io::Result<Tenancy> {
        let folder = runtime_dir.join("containers");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        let server = format!("{:016x}", fresh_number());
        let file = OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o600)
            .open(folder.join(&server))?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let place = place(&folder.canonicalize()?);
        Ok(Tenancy {
            server,
            place,
            folder,
            _lock: file,
        })
    }

    /// Returns the folder in which servers register.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the name of this server in labels.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Returns the name of this machine and runtime folder in labels.
    pub(super) fn place(&self) -> &str {
        &self.place
    }

    /// Writes a text to a file of this server and returns its path.
    pub(super) fn keep(&self, name: &str, text: &str) -> io::Result<String> {
        let file = self.file(name);
        fs::write(&file, text)?;
        Ok(file.to_string_lossy().into_owned())
    }

    /// Returns the path of a file of this server. Paths with this prefix are removed with the
    /// server, or by the next one.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{}-{name}", self.server))
    }

    /// Removes everything that dead servers of this place left behind.
    pub(super) async fn sweep(&self, engine: &Engine) {
        let Ok(listed) = engine.list(LABEL_PLACE, &self.place).await else {
            return;
        };
        self.remove_of_dead(engine, listed).await;
        self.forget_dead();
    }

    /// Removes containers whose server is dead, and returns their number.
    async fn remove_of_dead(&self, engine: &Engine, listed: Vec<ListedContainer>) -> usize {
        let mut removed = 0;
        for container in listed {
            let Some(server) = container.labels.get(LABEL_SERVER) else {
                continue;
            };
            if *server != self.server && !self.lives(server) {
                info!("a container of a server that is gone is removed");
                engine.remove(&container.id).await;
                removed += 1;
            }
        }
        removed
    }

    /// Records that this server uses a volume, before it checks whether the volume exists. Waits
    /// while another process removes volumes.
    pub(super) async fn claim(&self, volume: &str) -> io::Result<()> {
        let (turn, file, volume) = (
            self.turn()?,
            self.folder.join(&self.server),
            volume.to_owned(),
        );
        let claiming = tokio::task::spawn_blocking(move || {
            rustix::fs::flock(&turn, FlockOperation::LockShared)?;
            fs::write(file, volume)
        });
        claiming.await.map_err(io::Error::other)?
    }

    fn turn(&self) -> io::Result<File> {
        OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.folder.join(VOLUMES))
    }

    /// Removes volumes of this place that no server needs any more, now that sessions have this
    /// runner.
    pub(super) async fn sweep_volumes(&self, engine: &Engine, runner: &str) {
        let Ok(turn) = self.turn() else { return };
        if rustix::fs::flock(&turn, FlockOperation::NonBlockingLockExclusive).is_err() {
            // Another process removes volumes or is about to use one; the next start is soon
            // enough.
            return;
        }
        let Ok(listed) = engine.volumes(LABEL_PLACE, &self.place).await else {
            return;
        };
        let used = self.used();
        for volume in listed {
            if !is_runner(&volume) || used.contains(&volume.name) {
                continue;
            }
            let holds_another = volume
                .labels
                .get(LABEL_RUNNER)
                .is_none_or(|held| held != runner);
            if (holds_another || is_for_nothing(&volume, engine).await)
                && engine.remove_volume(&volume.name).await
            {
                info!(
                    volume = volume.name,
                    "a volume that nothing needs any more is removed"
                );
            }
        }
    }

    /// Returns the volumes that living servers of this place use.
    fn used(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_server = |name: &str| {
            name.len() == self.server.len() && name.chars().all(|letter| letter.is_ascii_hexdigit())
        };
        let living = entries.filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (is_server(&name) && (name == self.server || self.lives(&name))).then_some(entry.path())
        });
        living
            .filter_map(|file| fs::read_to_string(file).ok())
            .collect()
    }

    fn lives(&self, server: &str) -> bool {
        // A label is untrusted text.
        if !server.chars().all(|letter| letter.is_ascii_hexdigit()) {
            return true;
        }
        match File::open(self.folder.join(server)) {
            Ok(file) => rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        }
    }

    fn forget_dead(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            // The name of a server's file starts with the server's name.
            let name = entry.file_name().to_string_lossy().into_owned();
            let server = name.split('-').next().unwrap_or_default();
            if server != self.server && !self.lives(server) {
                remove(&entry.path());
            }
        }
    }

    /// Removes the registration. Doing it twice is harmless.
    pub(super) fn end(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry
                .file_name()
                .to_string_lossy()
                .starts_with(&self.server)
            {
                remove(&entry.path());
            }
        }
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        self.end();
    }
}

/// Removes a file, or a folder without the contents that may be mounted on it.
fn remove(path: &Path) {
    let _ = if path.is_dir() {
        id_mapped::remove(path)
    } else {
        fs::remove_file(path)
    };
}

/// Removes containers of an image that dead servers of this place left behind, and returns their
/// number.
pub async fn remove_left_containers(
    engine: &Engine,
    runtime_dir: &Path,
    image: &str,
) -> anyhow::Result<usize> {
    let tenancy = Tenancy::register(runtime_dir)?;
    let listed = engine
        .list_of_image(LABEL_PLACE, &tenancy.place, image)
        .await?;
    Ok(tenancy.remove_of_dead(engine, listed).await)
}

/// Labels are untrusted text, so the name must match too.
fn is_runner(volume: &ListedVolume) -> bool {
    volume.name.starts_with(super::image::VOLUME_PREFIX)
        && volume
            .labels
            .get(LABEL_ROLE)
            .is_some_and(|role| role == ROLE_RUNNER)
}

/// Returns whether the image of a volume is gone. If that is unknown, returns false.
async fn is_for_nothing(volume: &ListedVolume, engine: &Engine) -> bool {
    match volume.labels.get(LABEL_IMAGE) {
        Some(image) => matches!(engine.image(image).await, Err(EngineError::Missing(_))),
        None => false,
    }
}

fn place(folder: &Path) -> String {
    let machine = fs::read("/etc/machine-id").unwrap_or_default();
    let host = rustix::system::uname();
    let mut hash = Sha256::new();
    hash.update(machine);
    hash.update(host.nodename().to_bytes());
    hash.update(folder.as_os_str().as_encoded_bytes());
    hash.finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_lives_as_long_as_it_holds_its_lock() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (
            Tenancy::register(folder.path()).unwrap(),
            Tenancy::register(folder.path()).unwrap(),
        );
        assert_eq!(one.place(), other.place());
        assert_ne!(one.server(), other.server());
        assert!(one.lives(other.server())); // control
        let name = other.server().to_owned();
        drop(other);
        assert!(!one.lives(&name));
    }

    #[test]
    fn a_crashed_server_leaves_a_file_whose_lock_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let tenancy = Tenancy::register(folder.path()).unwrap();
        fs::write(folder.path().join("containers/00000000deadbeef"), "").unwrap();
        assert!(!tenancy.lives("00000000deadbeef"));
        tenancy.forget_dead();
        assert!(!folder.path().join("containers/00000000deadbeef").exists());
        assert!(
            folder
                .path()
                .join("containers")
                .join(tenancy.server())
                .exists()
        ); // control
    }

    #[test]
    fn a_mount_of_a_crashed_server_goes_and_the_operators_files_stay() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root (mounts)");
            return;
        }
        let (folder, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(theirs.path().join("file"), "kept").unwrap();
        let tenancy = Tenancy::register(folder.path()).unwrap();
        let place = folder.path().join("containers/00000000deadbeef-mount-0");
        fs::create_dir(&place).unwrap();
        cellblock_jail::idmap::attach(theirs.path(), &place, (4711, 4711)).unwrap();
        // Control: it is mounted.
        assert_eq!(fs::read_to_string(place.join("file")).unwrap(), "kept");
        tenancy.forget_dead();
        assert!(!place.exists());
        assert_eq!(
            fs::read_to_string(theirs.path().join("file")).unwrap(),
            "kept"
        );
    }

    #[tokio::test]
    async fn volumes_of_servers_that_live_are_used_and_those_of_dead_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (
            Tenancy::register(folder.path()).unwrap(),
            Tenancy::register(folder.path()).unwrap(),
        );
        one.claim("mine").await.unwrap();
        other.claim("theirs").await.unwrap();
        fs::write(
            folder.path().join("containers/00000000deadbeef"),
            "of the dead",
        )
        .unwrap();
        let mut used = one.used();
        used.sort_unstable();
        assert_eq!(used, ["mine", "theirs"]);
        drop(other);
        assert_eq!(one.used(), ["mine"]);
    }

    #[test]
    fn a_label_that_is_no_name_of_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let tenancy = Tenancy::register(folder.path()).unwrap();
        assert!(tenancy.lives("../../etc/passwd"));
        assert!(!tenancy.lives("0123456789abcdef")); // control
    }
}
