//! Descriptors, processes and disk space that run out, and come back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::json;

use super::processes::{self, Role, wait_for};
use super::{Home, Scene, readiness};
use crate::support::server::{MINIMAL, finished, program};
use crate::support::service::Service;
use crate::support::{is_root, skipped};

/// Has a shell do something before it becomes the command.
fn after(script: &str, command: Command) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{script}; exec \"$0\" \"$@\""));
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

#[test]
fn a_limit_of_open_files_that_is_too_low_is_refused_at_the_start() {
    for limit in [32, 64, 128, 256, 512, 1023] {
        for command in [
            vec!["mcp", "--keep-sessions", "off"],
            vec!["mcp", "--keep-sessions", "on"],
            vec!["run", "-c", "1"],
        ] {
            let mut program = program();
            program.args(command).args(MINIMAL);
            let (status, _, errors) = finished(&mut after(&format!("ulimit -n {limit}"), program));
            assert_eq!(status, Some(2), "{limit}: {errors}");
            assert!(
                errors.contains(&format!("only {limit} files may be open"))
                    && errors.contains("ulimit -Hn"),
                "{errors}"
            );
        }
    }
    let mut control = program();
    control.args(["run", "-c", "print(6 * 7)"]).args(MINIMAL);
    let (status, printed, errors) = finished(&mut after("ulimit -n 1024", control));
    assert_eq!((status, printed.trim()), (Some(0), "42"), "{errors}");
}

#[test]
fn fewer_sessions_are_allowed_where_fewer_files_may_be_open() {
    let scene = Scene::of(Home::Inside, &["--max-sessions", "250"], |command| {
        after("ulimit -n 1024", command)
    });
    assert_eq!(scene.text("a", "6 * 7"), "42");
    let log = scene.finish();
    assert!(
        log.contains("fewer sessions than max_sessions are allowed"),
        "{log}"
    );
}

/// Sets how many files a process may have open, and returns the limit that it had.
fn limit_files(process: u32, current: Option<u64>, limit: &Rlimit) -> Rlimit {
    let pid = Pid::from_raw(process as i32).expect("a process id is positive");
    prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit {
            current,
            maximum: limit.maximum,
        },
    )
    .unwrap()
}

fn open_files(process: u32) -> u64 {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count() as u64
}

#[test]
fn a_session_for_which_the_warden_has_no_descriptors_is_refused_alone() {
    let scene = Scene::without_pool(|command| command);
    assert_eq!(scene.text("first", "x = 1; x"), "1");
    let warden = processes::one(scene.holder, Role::Warden);
    let usual = rustix::process::getrlimit(Resource::Nofile);
    // Room in the reserve only, then none at all.
    for room in [30, 0] {
        limit_files(warden.pid, Some(open_files(warden.pid) + room), &usual);
        for name in ["second", "third", "fourth", "fifth"] {
            // Sandboxes that waited are used up first.
            let told = scene.run(name, "1");
            if told.is_error() {
                assert!(
                    told.text().contains("Too many open files"),
                    "{}",
                    told.text()
                );
            }
        }
        let refused = scene.run("sixth", "1");
        assert!(
            refused.is_error() && refused.text().contains("Too many open files"),
            "{}",
            refused.text()
        );
        assert_eq!(scene.text("first", "x"), "1", "the others go on");
        limit_files(warden.pid, usual.current, &usual);
        scene.assert_new_session_works("new");
    }
    assert_eq!(
        processes::one(scene.holder, Role::Warden).pid,
        warden.pid,
        "the warden is the same"
    );
    assert!(!scene.call("reset", "first").is_error());
    scene.finish();
}

#[test]
fn a_server_without_descriptors_recovers_when_it_has_some() {
    let scene = Scene::without_pool(|command| command);
    assert_eq!(scene.text("first", "x = 1; x"), "1");
    let usual = rustix::process::getrlimit(Resource::Nofile);
    limit_files(scene.holder, Some(open_files(scene.holder)), &usual);
    for name in ["second", "third", "fourth", "fifth"] {
        let told = scene.run(name, "1");
        assert!(told.is_error() || told.text() == "1", "{}", told.text());
    }
    assert!(scene.run("sixth", "1").is_error());
    assert_eq!(scene.text("first", "x"), "1", "the others go on");
    limit_files(scene.holder, usual.current, &usual);
    scene.assert_new_session_works("new");
    assert_eq!(scene.text("first", "x"), "1");
    scene.finish();
}

#[test]
fn sessions_that_start_at_once_wait_for_each_other() {
    let scene = Scene::without_pool(|command| command);
    let begin = |number: usize| {
        let arguments = json!({"code": "6 * 7", "session_id": format!("session-{number}")});
        scene.server().begin("execute_ipython_cell", arguments)
    };
    let all: Vec<_> = (0..30).map(begin).collect();
    for pending in all {
        let told = pending.result();
        assert_eq!((told.is_error(), told.text()), (false, "42"));
    }
    let log = scene.finish();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
}

/// A control group that limits the number of processes.
struct Crowd(PathBuf);

impl Crowd {
    fn new() -> Option<Crowd> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = membership
            .lines()
            .find_map(|line| line.split_once(":pids:"))?
            .1
            .trim_start_matches('/');
        let folder = Path::new("/sys/fs/cgroup/pids")
            .join(own)
            .join(format!("faults-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        Some(Crowd(folder))
    }

    fn limit(&self, most: &str) {
        fs::write(self.0.join("pids.max"), most).unwrap();
    }

    /// Lets nothing more begin.
    fn close(&self) {
        self.limit(
            fs::read_to_string(self.0.join("pids.current"))
                .unwrap()
                .trim(),
        );
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_server_that_may_start_no_process_recovers_when_it_may() {
    let Some(crowd) = Some(()).filter(|()| is_root()).and_then(|()| Crowd::new()) else {
        return skipped("root and a pids controller of version 1");
    };
    let enter = format!("echo $$ > {}/tasks", crowd.0.display());
    let scene = Scene::without_pool(|command| after(&enter, command));
    assert_eq!(scene.text("first", "x = 1; x"), "1");
    wait_for("empty sandboxes", || {
        let inits = processes::below(scene.holder)
            .into_values()
            .filter(|process| process.role == Role::Init);
        (inits.count() >= 3).then_some(())
    });
    for kill_zygote in [false, true] {
        crowd.close();
        if kill_zygote {
            processes::one(scene.holder, Role::Zygote).send(Signal::KILL);
        }
        let refused = scene.run("second", "1");
        assert!(
            refused.is_error() && refused.text().contains("no Python could be started"),
            "{}",
            refused.text()
        );
        assert_eq!(scene.text("first", "x"), "1", "the others go on");
        crowd.limit("max");
        scene.assert_new_session_works("new");
        assert!(!scene.call("reset", "first").is_error());
        assert_eq!(scene.text("first", "x = 1; x"), "1");
    }
    scene.finish();
}

/// The control groups of a server, wherever they are.
fn groups_named_after(server: u32) -> Vec<PathBuf> {
    let name = format!("cellblock-{server}-");
    let (_, found, _) = finished(
        Command::new("find")
            .args(["/sys/fs/cgroup", "-type", "d", "-name"])
            .arg(name + "*"),
    );
    found.lines().map(PathBuf::from).collect()
}

#[test]
fn a_full_runtime_folder_leaves_no_groups_and_is_tried_again() {
    if !is_root() {
        return skipped("root (a mount namespace)");
    }
    fs::create_dir_all("/run/cellblock").unwrap();
    // A file system of one page that is full: files can be made in it, but not written.
    let fill = "mount -t tmpfs -o size=4k,mode=700 none /run/cellblock && head -c 4096 /dev/zero > \
                /run/cellblock/filler";
    let mut command = program();
    command
        .args(["mcp", "--keep-sessions", "off"])
        .args(MINIMAL);
    let mut inner = Command::new("unshare");
    inner
        .arg("-m")
        .args(["sh", "-c", &format!("{fill}; exec \"$0\" \"$@\"")]);
    inner.arg(command.get_program()).args(command.get_args());
    for (name, value) in command
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)))
    {
        inner.env(name, value);
    }
    let server =
        crate::support::server::Server::spawn(&mut inner, crate::support::server::Era::Initialize);
    server.greet();
    let run = || server.call("execute_ipython_cell", json!({"code": "6 * 7"}));
    let refused = run();
    assert!(
        refused.is_error() && refused.text().contains("No space left on device"),
        "{}",
        refused.text()
    );
    assert_eq!(
        groups_named_after(server.process_id()),
        Vec::<PathBuf>::new()
    );
    let inside = format!("/proc/{}/root/run/cellblock/filler", server.process_id());
    fs::remove_file(inside).unwrap();
    let again = run();
    assert_eq!(
        (again.is_error(), again.text()),
        (false, "42"),
        "a preparation that failed is tried again"
    );
    assert!(
        !groups_named_after(server.process_id()).is_empty(),
        "the control: it has groups now"
    );
    let process = server.process_id();
    server.finish();
    assert_eq!(groups_named_after(process), Vec::<PathBuf>::new());
}

#[test]
fn a_service_is_not_ready_while_its_jail_is_gone_and_says_why() {
    let service = Service::without_tokens(MINIMAL);
    let is_ready = || (readiness(service.address).0 == 200).then_some(());
    wait_for("a service that is ready", is_ready);
    let holder = service.daemon_process();
    for (role, signal) in [(Role::Warden, Signal::KILL), (Role::Guardian, Signal::STOP)] {
        processes::one(holder, role).send(signal);
        let why = wait_for("a service that is not ready", || {
            let (status, text) = readiness(service.address);
            (status == 503).then_some(text)
        });
        assert!(why.contains("python: "), "{why}");
        wait_for("a service that is ready again", is_ready);
    }
    let log = service.finish();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
    assert_eq!(errors.len(), 2, "{log}");
    assert!(
        errors[0].contains("the jail ended") && errors[1].contains("guardian was stopped"),
        "{errors:?}"
    );
}

#[test]
fn of_a_hundred_cells_for_one_session_those_that_find_no_place_are_refused() {
    let scene = Scene::new(Home::Inside);
    assert_eq!(scene.text("a", "count = 0; count"), "0");
    let cell = |code: &str| {
        scene.server().begin(
            "execute_ipython_cell",
            json!({"code": code, "session_id": "a"}),
        )
    };
    let interpreter = scene.interpreter_of("a");
    let first =
        cell("import time; begun = time.time()\nwhile time.time() < begun + 3: pass\ncount += 1");
    interpreter.wait_until_busy();
    let others: Vec<_> = (0..99).map(|_| cell("count += 1")).collect();
    assert!(!first.result().is_error());
    let told: Vec<_> = others.iter().map(|pending| pending.result()).collect();
    let (refused, ran): (Vec<_>, Vec<_>) = told.iter().partition(|told| told.is_error());
    assert_eq!((ran.len(), refused.len()), (64, 35));
    assert!(
        refused
            .iter()
            .all(|told| told.text().contains("64 requests are already waiting"))
    );
    assert_eq!(scene.text("a", "count"), "65");
    scene.finish();
}

#[test]
fn twenty_cells_that_ignore_the_interrupt_are_ended_and_undone() {
    let scene = Scene::new(Home::Inside);
    let names: Vec<String> = (0..20).map(|number| format!("session-{number}")).collect();
    for name in &names {
        assert_eq!(scene.text(name, "x = 1; x"), "1");
    }
    let deaf =
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); x = 2\nwhile True: pass";
    let begin = |name: &String| {
        let arguments = json!({"code": deaf, "session_id": name, "timeout": 2});
        scene.server().begin("execute_ipython_cell", arguments)
    };
    let all: Vec<_> = names.iter().map(begin).collect();
    for (name, pending) in names.iter().zip(all) {
        let mut told = pending.result();
        // On a busy machine a call ends before the time of its cell is up.
        wait_for("the end of a cell", || {
            let ended = !told.text().contains("still running");
            if !ended {
                told = scene
                    .server()
                    .call("check_execution", json!({"session_id": name, "wait": 10}));
            }
            ended.then_some(())
        });
        assert!(
            told.is_error() && told.text().contains("ignored the interrupt"),
            "{}",
            told.text()
        );
    }
    for name in &names {
        let undone = scene.call("undo", name);
        assert!(!undone.is_error(), "{}", undone.text());
        assert_eq!(scene.text(name, "x"), "1");
    }
    scene.finish();
}

/// A control group in which a whole server has little memory.
struct Tight(PathBuf);

impl Tight {
    fn new(bytes: u64) -> Option<Tight> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = membership
            .lines()
            .find_map(|line| line.split_once(":memory:"))?
            .1
            .trim_start_matches('/');
        let folder = Path::new("/sys/fs/cgroup/memory")
            .join(own)
            .join(format!("faults-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let tight = Tight(folder);
        fs::write(tight.0.join("memory.limit_in_bytes"), bytes.to_string()).ok()?;
        Some(tight)
    }
}

impl Drop for Tight {
    fn drop(&mut self) {
        // The kernel takes a moment to let go of groups below it that were just removed.
        if !std::thread::panicking() {
            wait_for("the end of the group", || fs::remove_dir(&self.0).ok());
        }
    }
}

#[test]
fn a_server_with_little_memory_lives_and_undo_brings_a_neighbour_back() {
    let Some(tight) = Some(())
        .filter(|()| is_root())
        .and_then(|()| Tight::new(400 << 20))
    else {
        return skipped("root and a memory controller of version 1");
    };
    let enter = format!("echo $$ > {}/tasks", tight.0.display());
    for home in [Home::Inside, Home::SessionDaemon] {
        let scene = Scene::of(home, &["--memory", "4GiB"], |command| {
            after(&enter, command)
        });
        assert_eq!(scene.text("neighbour", "x = 1; x"), "1");
        assert_eq!(scene.text("victim", "x = 1; x"), "1");
        let warden = processes::one(scene.holder, Role::Warden);
        let told = scene.run("victim", "y = b'x' * (1500 << 20)");
        let why = "of the control group that the server is in, ran out";
        assert!(
            told.is_error() && told.text().contains(why),
            "{}",
            told.text()
        );
        // Before the first process has given its memory back, the kernel may choose another one.
        let neighbour = scene.run("neighbour", "x");
        if neighbour.is_error() {
            assert!(neighbour.text().contains(why), "{}", neighbour.text());
            assert!(!scene.call("undo", "neighbour").is_error());
        }
        assert_eq!(scene.text("neighbour", "x").lines().next(), Some("1"));
        assert_eq!(
            processes::one(scene.holder, Role::Warden).pid,
            warden.pid,
            "the warden is the same"
        );
        assert!(!scene.call("reset", "victim").is_error());
        assert_eq!(scene.text("victim", "6 * 7"), "42");
        scene.finish();
    }
}

/// A process that the kernel does not schedule, although nobody has stopped it. It continues when
/// this is dropped.
struct Frozen {
    group: PathBuf,
    /// The group that the process was in.
    before: PathBuf,
    process: u32,
}

impl Frozen {
    /// Returns `None` where the machine has no freezer of version 1.
    fn new(process: u32) -> Option<Frozen> {
        let root = Path::new("/sys/fs/cgroup/freezer");
        let membership = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap();
        let path = membership
            .lines()
            .find_map(|line| line.split_once(":freezer:/"))?
            .1;
        let frozen = Frozen {
            group: root.join(format!("cellblock-test-{process}")),
            before: root.join(path),
            process,
        };
        fs::create_dir(&frozen.group).ok()?;
        fs::write(frozen.group.join("cgroup.procs"), process.to_string()).unwrap();
        fs::write(frozen.group.join("freezer.state"), "FROZEN").unwrap();
        let state = || fs::read_to_string(frozen.group.join("freezer.state")).unwrap();
        wait_for("a frozen process", || {
            (state().trim() == "FROZEN").then_some(())
        });
        Some(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.group.join("freezer.state"), "THAWED");
        let _ = fs::write(self.before.join("cgroup.procs"), self.process.to_string());
        let members = || fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        // What it made meanwhile may still be on its way to its own group.
        wait_for("an empty group", || members().is_empty().then_some(()));
        let _ = fs::remove_dir(&self.group);
    }
}

#[test]
fn a_fork_whose_sandbox_is_late_delays_nobody_and_is_made_once_it_is_ready() {
    let scene = Scene::new(Home::Inside);
    assert_eq!(scene.text("neighbour", "x = 1; x"), "1");
    assert_eq!(scene.text("victim", "x = 2; x"), "2");
    let family = scene
        .interpreter_of("victim")
        .init(scene.holder)
        .family(scene.holder);
    let Some(frozen) = Frozen::new(family.pid) else {
        skipped("a freezer of control groups version 1, and the right to use it");
        return;
    };
    let forked = scene.server().begin(
        "fork_session",
        json!({"session_id": "victim", "names": ["fork"]}),
    );
    assert_eq!(scene.text("neighbour", "x"), "1");
    for name in ["second", "third", "fourth"] {
        scene.assert_new_session_works(name);
    }
    drop(frozen);
    let forked = forked.result();
    assert!(!forked.is_error(), "{}", forked.text());
    assert_eq!(scene.text("fork", "x"), "2");
    assert_eq!(scene.text("victim", "x"), "2");
    scene.finish();
}
