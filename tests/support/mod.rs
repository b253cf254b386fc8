//! The mechanics of all tests: the shared Python environment, backends, the built program.
//!
//! `native` and `containers` make sandboxes inside the test process, `places` is both, `daemon` has
//! engines of one test, `ordinary` somebody who may use one, `server` starts the program as its
//! users do. What a test shows belongs to the test.

pub(crate) mod containers;
pub(crate) mod daemon;
pub(crate) mod native;
pub(crate) mod npm;
pub(crate) mod ordinary;
pub(crate) mod places;
pub(crate) mod server;
pub(crate) mod service;
pub(crate) mod stack;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cellblock::environment::EnvironmentSpec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_cellblock");

/// Where all tests keep Python environments, so that each is built once per checkout. Building
/// locks, so several test processes may ask.
pub(crate) fn data_folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("data")
}

/// What tests have instead of the packages of the environment `default`: those that they use. It is
/// less than half of the size.
const PACKAGES: [&str; 8] = [
    "ipython",
    "numpy",
    "pandas",
    "matplotlib",
    "pillow",
    "jinja2",
    "plotly",
    "resvg-py",
];

/// Describes an environment of the tests: a built-in one, of which `default` has fewer packages.
pub(crate) fn environment_spec(name: &str) -> EnvironmentSpec {
    let mut built_in = EnvironmentSpec::built_in().into_iter();
    let spec = built_in
        .find(|spec| spec.name.as_str() == name)
        .expect("a built-in environment");
    match name {
        "default" => EnvironmentSpec {
            packages: PACKAGES.map(str::to_owned).to_vec(),
            ..spec
        },
        _ => spec,
    }
}

/// Says the same in a configuration file.
fn configuration() -> String {
    let EnvironmentSpec {
        packages, preload, ..
    } = environment_spec("default");
    serde_json::json!({"environments": {"default": {"packages": packages, "preload": preload}}})
        .to_string()
}

/// Says aloud that a case cannot run here; continuous integration counts these lines.
pub(crate) fn skipped(why: &str) {
    // Not `eprintln`: the test harness keeps that to itself when a test passes.
    let _ = writeln!(std::io::stderr(), "skipped: needs {why}");
}

/// Waits for the end of a process, and tells whether it came in time. Children of other tests end
/// meanwhile, and their signals interrupt waiting.
pub(crate) fn ends_within(process: &OwnedFd, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return ended.expect("a process can be waited for") == 1,
        }
    }
}

/// Whether the tests run as root, which decides what identities sessions get.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A small file system, gone when it is dropped.
pub(crate) struct SmallDisk {
    path: PathBuf,
    /// Made for it, and removed after it.
    folder: Option<tempfile::TempDir>,
}

impl SmallDisk {
    /// Takes options of `tmpfs`. Returns none, and says so, where file systems cannot be mounted.
    pub(crate) fn new(options: &str) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mut disk = SmallDisk::on(folder.path(), &format!("{options},mode=0700"))?;
        disk.folder = Some(folder);
        Some(disk)
    }

    /// The same in a folder that exists.
    pub(crate) fn on(folder: &Path, options: &str) -> Option<SmallDisk> {
        let options = std::ffi::CString::new(options).unwrap();
        let mounted = is_root()
            && mount(
                "tmpfs",
                folder,
                "tmpfs",
                MountFlags::empty(),
                Some(options.as_c_str()),
            )
            .is_ok();
        if !mounted {
            skipped("root (a small file system)");
            return None;
        }
        Some(SmallDisk {
            path: folder.to_owned(),
            folder: None,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes all room that is left, until the file is removed.
    pub(crate) fn fill(&self) -> PathBuf {
        let ballast = self.path().join("ballast");
        let mut file = std::fs::File::create(&ballast).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
        ballast
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(&self.path, UnmountFlags::DETACH);
        drop(self.folder.take());
    }
}

/// Tells whether this process can give sessions control groups; says so when it cannot.
pub(crate) fn has_control_groups() -> bool {
    if !is_root() {
        skipped("root (control groups)");
    }
    is_root()
}

/// The ports of TCP at which a process listens, in what the kernel tells of its sockets.
pub(crate) fn listening_ports(process: u32) -> Vec<u16> {
    let links = std::fs::read_dir(format!("/proc/{process}/fd"));
    let sockets: Vec<String> = links
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|link| Some(std::fs::read_link(link.path()).ok()?.to_str()?.to_owned()))
        .collect();
    let tables = ["tcp", "tcp6"].map(|table| {
        std::fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default()
    });
    // Local address, state and inode are the second, fourth and tenth column; 0A is a socket that
    // listens.
    let port = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let inode = format!("socket:[{}]", columns.get(9)?);
        let (_, port) = columns[1].rsplit_once(':')?;
        let listens = columns[3] == "0A" && sockets.contains(&inode);
        listens.then(|| u16::from_str_radix(port, 16).ok())?
    };
    tables
        .iter()
        .flat_map(|table| table.lines())
        .filter_map(port)
        .collect()
}

/// Sends a signal to a process.
#[track_caller]
pub(crate) fn signal(process: u32, signal: Signal) {
    let pid = Pid::from_raw(process as i32).expect("a process id is positive");
    kill_process(pid, signal).unwrap_or_else(|error| panic!("{process}: {error}"));
}

/// Stops a process, and waits until every thread of it has stopped: threads that run on another
/// processor go on for a moment after the signal was sent.
#[track_caller]
pub(crate) fn stop(process: u32) {
    signal(process, Signal::STOP);
    let is_stopped = |thread: &std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest.as_bytes()[0]);
        state == Some(b'T')
    };
    let deadline = Instant::now() + server::TEST_TIMEOUT;
    loop {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        if threads.flatten().all(|thread| is_stopped(&thread)) {
            return;
        }
        assert!(Instant::now() < deadline, "{process} does not stop");
        std::thread::sleep(Duration::from_millis(5));
    }
}
