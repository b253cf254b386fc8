//! An engine that belongs to one test, which may end it, start it again, and have it listen in
//! other ways.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cellblock::sandbox::container::{EngineAddress, EngineKind};
use rustix::process::{Pid, Signal, kill_process};

use super::containers::{self, IMAGE, TestEngine};

/// How long an engine may take to start or to end on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A free port of this machine. Somebody else could take it before it is used; nobody here does.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// Paths of sockets are short by nature.
fn new_folder() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("cb-")
        .tempdir_in("/tmp")
        .unwrap()
}

/// An engine of one test. It ends with the test, also if that one is killed.
pub(crate) struct Daemon {
    pub(crate) engine: TestEngine,
    /// Its program and arguments.
    words: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts a Docker daemon with these arguments and the image of the tests, or says that the
    /// test is skipped.
    pub(crate) fn docker(more: &[&str]) -> Option<Daemon> {
        containers::docker()?;
        Some(Daemon::docker_in(new_folder(), &["dockerd"], more))
    }

    /// The same, with a user namespace in which nobody is a user of the host.
    pub(crate) fn docker_with_user_namespace() -> Option<Daemon> {
        containers::docker()?;
        // A user and a group that every system has; their numbers inside are in two files that the
        // engine alone sees.
        let folder = new_folder();
        std::fs::set_permissions(
            folder.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o711),
        )
        .unwrap();
        let numbers = folder.path().join("numbers");
        std::fs::write(&numbers, "daemon:1610612736:65536\n").unwrap();
        let numbers = numbers.to_string_lossy().into_owned();
        let shown =
            "mount --bind \"$0\" /etc/subuid && mount --bind \"$0\" /etc/subgid && exec \"$@\"";
        let program = ["unshare", "--mount", "sh", "-c", shown, &numbers, "dockerd"];
        if !Path::new("/etc/subuid").exists() || !Path::new("/etc/subgid").exists() {
            super::skipped("/etc/subuid and /etc/subgid");
            return None;
        }
        Some(Daemon::docker_in(
            folder,
            &program,
            &["--userns-remap=daemon"],
        ))
    }

    /// The same, with all its data on a disk of so many bytes.
    pub(crate) fn docker_with_disk(bytes: u64) -> Option<Daemon> {
        containers::docker()?;
        let folder = new_folder();
        let disk = folder.path().join("data");
        std::fs::create_dir(&disk).unwrap();
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(&disk);
        assert!(mount.status().unwrap().success());
        Some(Daemon::docker_in(folder, &["dockerd"], &[]))
    }

    fn docker_in(folder: tempfile::TempDir, program: &[&str], more: &[&str]) -> Daemon {
        let below = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        std::fs::write(below("daemon.json"), "{}").unwrap();
        let host = format!("unix://{}", below("docker.sock"));
        let (data, exec, pid, config) = (
            below("data"),
            below("exec"),
            below("pid"),
            below("daemon.json"),
        );
        let own = [
            ["--data-root", &data],
            ["--exec-root", &exec],
            ["--pidfile", &pid],
            ["--config-file", &config],
            ["-H", &host],
        ];
        let quiet = ["--iptables=false", "--ip6tables=false", "--bridge=none"];
        let program = program.iter().copied();
        let words = program
            .chain(own.into_iter().flatten())
            .chain(quiet)
            .chain(more.iter().copied());
        let words = words.map(str::to_owned).collect();
        let daemon = Daemon::start(EngineKind::Docker, words, folder, "docker.sock");
        let archive = containers::archive();
        daemon
            .engine
            .command(&["import", &archive.to_string_lossy(), IMAGE]);
        daemon
    }

    /// Where its data are.
    pub(crate) fn disk(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Starts one more service of the Podman that tests share, or says that the test is skipped.
    pub(crate) fn podman() -> Option<Daemon> {
        containers::podman()?;
        let folder = new_folder();
        let socket = folder.path().join("podman.sock");
        let words = [containers::script(), containers::folder(), socket.clone()]
            .map(|path| path.to_string_lossy().into_owned());
        let [script, shared, socket] = words;
        let words = vec![script, "podman-service".to_owned(), shared, socket];
        Some(Daemon::start(
            EngineKind::Podman,
            words,
            folder,
            "podman.sock",
        ))
    }

    fn start(
        kind: EngineKind,
        words: Vec<String>,
        folder: tempfile::TempDir,
        socket: &str,
    ) -> Daemon {
        let address = EngineAddress::Unix(folder.path().join(socket));
        let log = folder.path().join("log");
        let engine = TestEngine::new(kind, address);
        let mut daemon = Daemon {
            engine,
            words,
            log,
            process: None,
            folder,
        };
        daemon.begin();
        daemon
    }

    /// Starts it, and waits until it answers.
    pub(crate) fn begin(&mut self) {
        assert!(self.process.is_none(), "it runs already");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .unwrap();
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "TERM", "--"])
            .args(&self.words);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.process = Some(command.spawn().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while self.engine.try_command(&["version"]).is_none() {
            assert!(
                Instant::now() < deadline,
                "{}",
                std::fs::read_to_string(&self.log).unwrap_or_default()
            );
        }
    }

    /// Ends it as a service manager does, or at once, and waits until it has ended.
    pub(crate) fn end(&mut self, signal: Signal) {
        let Some(mut process) = self.process.take() else {
            return;
        };
        let pid = Pid::from_raw(process.id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
        process.wait().unwrap();
        // One that starts while the helper of its predecessor is ending would rely on that one.
        let helper =
            std::fs::read_to_string(self.folder.path().join("exec/containerd/containerd.pid"));
        let helper = helper
            .ok()
            .and_then(|pid| pid.trim().parse::<u32>().ok())
            .map(|pid| format!("/proc/{pid}"));
        let deadline = Instant::now() + PATIENCE;
        while helper
            .as_ref()
            .is_some_and(|helper| Path::new(helper).exists())
        {
            assert!(Instant::now() < deadline, "containerd outlives dockerd");
            std::thread::yield_now();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.process.is_none() && !std::thread::panicking() {
            // Its helpers outlive one that was killed; the next one finds them and ends them.
            self.begin();
        }
        self.end(Signal::TERM);
        // It leaves its folders mounted, for the next one.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        for place in places.filter(|place| Path::new(place).starts_with(self.folder.path())) {
            let _ = Command::new("umount").args(["-l", place]).status();
        }
    }
}
