//! Nothing stays: whatever ends a server, its processes, control groups, mounts and temporary
//! folders end with it.
//!
//! Each case starts a server that has something to leave behind (a busy cell, a process that has
//! cut itself loose, spooled output), notes all of it, ends the server in one way, and waits for
//! the end of every noted process.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::json;

use crate::support::server::{Era, MINIMAL, Server, TEST_TIMEOUT, program, with_timeout};
use crate::support::{ends_within, is_root, signal, stop};

/// A server with all it could leave behind, and the places where that would be found.
struct Scene {
    folder: tempfile::TempDir,
    server: Server,
    processes: Vec<(u32, String, OwnedFd)>,
    groups: Vec<PathBuf>,
}

/// Folders of one server or, where a case starts several, of all of them.
fn scene_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["workspace", "temporary", "runtime"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    folder
}

fn command_in(folder: &Path) -> Command {
    let mut command = program();
    command
        .env("TMPDIR", folder.join("temporary"))
        .env("XDG_RUNTIME_DIR", folder.join("runtime"));
    command
        .arg("mcp")
        .arg("--workspace")
        .arg(folder.join("workspace"))
        .args(MINIMAL);
    command
}

impl Scene {
    fn new() -> Scene {
        let folder = scene_folder();
        let server = Server::spawn(&mut command_in(folder.path()), Era::Initialize);
        server.greet();
        let (one, busy) = (server.session(), server.session());
        one.text("open('kept.txt', 'w').write('kept'); None");
        // A process that belongs to nobody any more, and output that is kept in a file of the host.
        one.text(
            "import subprocess; subprocess.Popen('setsid sleep 100000 & exit', shell=True).wait()",
        );
        one.run_with("print('x' * 3_000_000)", json!({"max_output_chars": 10}));
        let fifo = folder.path().join("workspace/begun");
        assert!(
            Command::new("mkfifo")
                .args(["-m", "666"])
                .arg(&fifo)
                .status()
                .unwrap()
                .success()
        );
        drop(busy.begin("open('begun', 'w').close()\nwhile True: pass", json!({})));
        with_timeout(move || fs::read(fifo).unwrap());
        // The sessions are not closed: ending the server must be enough.
        std::mem::forget(one);
        std::mem::forget(busy);

        let processes = descendants(server.process_id());
        assert!(
            processes.len() >= 6,
            "guardian, warden, zygote, inits, interpreters: {processes:?}"
        );
        let names: BTreeSet<&str> = processes.iter().map(|(_, name, _)| name.as_str()).collect();
        assert!(
            ["cb-guardian", "cb-warden", "cb-init", "sleep"]
                .iter()
                .all(|name| names.contains(name)),
            "{names:?}"
        );
        let groups = groups_of(&instance_files(folder.path(), server.process_id()));
        assert!(groups.iter().all(|group| group.is_dir()), "{groups:?}");
        assert!(
            !is_root() || !groups.is_empty(),
            "root's sessions have control groups"
        );
        Scene {
            folder,
            server,
            processes,
            groups,
        }
    }

    fn process_named(&self, name: &str) -> u32 {
        self.processes
            .iter()
            .find(|(_, found, _)| found == name)
            .expect("there is such a process")
            .0
    }

    /// Checks that everything is gone but the files of the workspace.
    #[track_caller]
    fn assert_nothing_left(&self) {
        self.assert_processes_end();
        self.assert_groups_gone();
        let temporary = entries(&self.folder.path().join("temporary"));
        assert!(temporary.is_empty(), "temporary files stay: {temporary:?}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = self.folder.path().to_str().unwrap();
        assert!(
            !mounts.contains(path) && !mounts.contains("/opt/cellblock"),
            "{mounts}"
        );
        assert_eq!(
            fs::read_to_string(self.folder.path().join("workspace/kept.txt")).unwrap(),
            "kept"
        );
    }

    #[track_caller]
    fn assert_processes_end(&self) {
        let deadline = Instant::now() + TEST_TIMEOUT;
        for (id, name, handle) in &self.processes {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                ends_within(handle, left),
                "the process {id} ({name}) lives on"
            );
        }
    }

    #[track_caller]
    fn assert_groups_gone(&self) {
        // Another test's server that starts at this moment may find the dead server's entry first,
        // and end the guardian while it removes them itself.
        let deadline = Instant::now() + TEST_TIMEOUT;
        while self.groups.iter().any(|group| group.exists()) {
            let left: Vec<_> = self.groups.iter().filter(|group| group.exists()).collect();
            assert!(Instant::now() < deadline, "control groups stay: {left:?}");
            std::thread::yield_now();
        }
    }

    fn instances(&self) -> Vec<PathBuf> {
        instance_files(self.folder.path(), self.server.process_id())
    }

    /// Starts another server, which sweeps, and ends it again.
    fn start_another(&self) {
        let next = Server::spawn(&mut command_in(self.folder.path()), Era::Initialize);
        next.greet();
        assert_eq!(next.session().text("1"), "1");
        next.finish();
    }
}

#[test]
fn nothing_stays_when_the_client_leaves() {
    let scene = Scene::new();
    scene.server.close_input();
    assert!(scene.server.ended().success());
    scene.assert_nothing_left();
    assert_eq!(scene.instances(), Vec::<PathBuf>::new());
}

#[test]
fn nothing_stays_when_the_server_is_asked_to_end() {
    for asking in [Signal::TERM, Signal::INT] {
        let scene = Scene::new();
        let asked = Instant::now();
        signal(scene.server.process_id(), asking);
        assert!(scene.server.ended().success());
        assert!(
            asked.elapsed() < Duration::from_secs(15),
            "{:?}",
            asked.elapsed()
        );
        scene.assert_nothing_left();
        assert_eq!(scene.instances(), Vec::<PathBuf>::new());
    }
}

#[test]
fn nothing_stays_when_the_server_is_killed() {
    let scene = Scene::new();
    signal(scene.server.process_id(), Signal::KILL);
    scene.server.ended();
    scene.assert_nothing_left();
    scene.start_another();
    assert_eq!(
        scene.instances(),
        Vec::<PathBuf>::new(),
        "the next server sweeps the entry"
    );
}

#[test]
fn a_killed_guardian_takes_the_sandboxes_along_and_the_server_says_so() {
    let scene = Scene::new();
    signal(scene.process_named("cb-guardian"), Signal::KILL);
    scene.assert_processes_end();
    let answer = scene.server.call(
        "execute_ipython_cell",
        json!({"code": "1", "session_id": "session-1"}),
    );
    assert!(
        answer.is_error(),
        "a session that lost its sandbox is never replaced in silence: {}",
        answer.text()
    );
    scene.server.close_input();
    scene.server.ended();
    scene.assert_nothing_left();
    assert_eq!(scene.instances(), Vec::<PathBuf>::new());
}

#[test]
fn what_a_server_and_its_guardian_leave_when_both_are_killed_is_swept_by_the_next() {
    let scene = Scene::new();
    let guardian = scene.process_named("cb-guardian");
    // Stopped first, so that neither sees the other's end.
    let both = [guardian, scene.server.process_id()];
    both.iter().for_each(|process| stop(*process));
    both.iter()
        .for_each(|process| signal(*process, Signal::KILL));
    scene.server.ended();
    scene.assert_processes_end();
    assert!(!is_root() || !scene.groups.is_empty());
    scene.start_another();
    scene.assert_nothing_left();
    assert_eq!(scene.instances(), Vec::<PathBuf>::new());
}

#[test]
fn servers_side_by_side_leave_each_other_alone() {
    let folder = scene_folder();
    let start = || {
        let server = Server::spawn(&mut command_in(folder.path()), Era::Initialize);
        server.greet();
        server
    };
    let first = start();
    let session = first.session();
    session.text("state = 'kept'");
    let second = start();
    assert_eq!(second.session().text("2"), "2");
    assert_eq!(
        session.text("state"),
        "'kept'",
        "a start sweeps nothing that lives"
    );
    signal(second.process_id(), Signal::KILL);
    second.ended();
    let third = start();
    assert_eq!(third.session().text("3"), "3");
    assert_eq!(session.text("state"), "'kept'");
    third.finish();
    assert_eq!(
        session.text("state"),
        "'kept'",
        "an end removes nothing of others"
    );
    let groups = groups_of(&instance_files(folder.path(), first.process_id()));
    assert!(groups.iter().all(|group| group.is_dir()));
    drop(session);
    first.finish();
    assert!(groups.iter().all(|group| !group.exists()));
}

#[test]
fn a_runtime_folder_with_rubbish_in_it_stops_nobody() {
    if is_root() {
        // Root's folder is the machine's own; the same code is tried with a folder of its own in
        // the unit tests.
        return crate::support::skipped("an ordinary user (root's runtime folder is shared)");
    }
    let folder = scene_folder();
    let instances = folder.path().join("runtime/cellblock/instances");
    fs::create_dir_all(&instances).unwrap();
    fs::write(instances.join("cellblock-1-0"), [0, 255, 10, 1]).unwrap();
    fs::write(instances.join("cellblock-1-1"), "/\n/tmp\n").unwrap();
    let server = Server::spawn(&mut command_in(folder.path()), Era::Initialize);
    server.greet();
    assert_eq!(server.session().text("1"), "1");
    server.finish();
    assert_eq!(entries(&instances), Vec::<PathBuf>::new());
}

/// The entries of one server in the runtime folder.
fn instance_files(folder: &Path, process: u32) -> Vec<PathBuf> {
    let runtime = if is_root() {
        PathBuf::from("/run/cellblock")
    } else {
        folder.join("runtime/cellblock")
    };
    let name = |path: &PathBuf| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let own = format!("cellblock-{process}-");
    entries(&runtime.join("instances"))
        .into_iter()
        .filter(|path| name(path).starts_with(&own))
        .collect()
}

fn groups_of(instances: &[PathBuf]) -> Vec<PathBuf> {
    let read = |path: &PathBuf| fs::read_to_string(path).unwrap();
    instances
        .iter()
        .map(read)
        .flat_map(|text| text.lines().map(PathBuf::from).collect::<Vec<_>>())
        .collect()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Everything a process has started, directly or not: id, name, and a handle that tells of its end.
fn descendants(of: u32) -> Vec<(u32, String, OwnedFd)> {
    let numbers = entries(Path::new("/proc"))
        .into_iter()
        .filter_map(|path| path.file_name()?.to_str()?.parse::<u32>().ok())
        .collect::<Vec<_>>();
    // A process that ends while we look was none of ours, or is gone as it should be.
    let parents: Vec<(u32, u32, String)> = numbers
        .into_iter()
        .filter_map(|id| {
            let status = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
            let (name, rest) = status.split_once('(')?.1.rsplit_once(')')?;
            let parent = rest.split_whitespace().nth(1)?.parse().ok()?;
            Some((id, parent, name.to_owned()))
        })
        .collect();
    let mut family = BTreeSet::from([of]);
    loop {
        let size = family.len();
        family.extend(
            parents
                .iter()
                .filter(|(_, parent, _)| family.contains(parent))
                .map(|(id, _, _)| *id)
                .collect::<Vec<_>>(),
        );
        if family.len() == size {
            break;
        }
    }
    let open =
        |id: u32| rustix::process::pidfd_open(Pid::from_raw(id as i32)?, PidfdFlags::empty()).ok();
    parents
        .into_iter()
        .filter(|(id, _, _)| *id != of && family.contains(id))
        .filter_map(|(id, _, name)| Some((id, name, open(id)?)))
        .collect()
}
