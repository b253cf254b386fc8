//! Sessions that outlive their server, with the built program: a server is killed and its sessions
//! are not, a daemon is killed and nothing stays.
//!
//! Each case has a daemon of its own name, so that none meets another's.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::{Value, json};

use crate::support::server::{Era, MINIMAL, Server, TEST_TIMEOUT, finished, program, with_timeout};
use crate::support::service::SessionDaemon;
use crate::support::{ends_within, signal, stop};

/// A daemon, and a folder that its sessions share. What is left of it ends with the scene.
struct Scene {
    daemon: SessionDaemon,
    workspace: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        Scene {
            daemon: SessionDaemon::new(),
            workspace: tempfile::tempdir().unwrap(),
        }
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = program();
        command
            .args([
                "mcp",
                "--keep-sessions",
                "on",
                "--daemon-name",
                self.daemon.name(),
            ])
            .args(MINIMAL);
        command
            .arg("--workspace")
            .arg(self.workspace.path())
            .args(more);
        command
    }

    fn server(&self) -> Server {
        self.server_with(&[])
    }

    fn server_with(&self, more: &[&str]) -> Server {
        let server = Server::spawn(&mut self.command(more), Era::Initialize);
        server.greet();
        server
    }

    /// What the daemon says about itself, if there is one.
    fn status(&self) -> Option<Value> {
        let (code, printed, errors) = finished(program().args(["daemon", "status", "--json"]));
        assert_eq!(code, Some(0), "{errors}");
        let all: Value = serde_json::from_str(&printed).unwrap();
        all.as_array()
            .unwrap()
            .iter()
            .find(|daemon| daemon["name"] == self.daemon.name())
            .cloned()
    }

    /// The same, once it has noticed that its servers are gone.
    fn status_without_servers(&self) -> Option<Value> {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let status = self.status()?;
            if status["servers"] == json!(0) {
                return Some(status);
            }
            assert!(
                Instant::now() < deadline,
                "it still counts servers: {status}"
            );
        }
    }

    fn process(&self) -> u32 {
        self.status().expect("there is a daemon")["process"]
            .as_u64()
            .unwrap() as u32
    }

    fn stop(&self, more: &[&str]) -> (Option<i32>, String, String) {
        finished(
            program()
                .args(["daemon", "stop", self.daemon.name()])
                .args(more),
        )
    }

    /// Begins a cell that runs until `release`, and returns when it runs.
    fn begin_long_cell(&self, server: &Server, session: &str, then: &str) {
        for name in ["begun", "go"] {
            let fifo = self.workspace.path().join(name);
            assert!(
                Command::new("mkfifo")
                    .args(["-m", "666"])
                    .arg(&fifo)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        let code = format!("open('begun', 'w').close()\nopen('go').read()\n{then}");
        drop(server.begin(
            "execute_ipython_cell",
            json!({"code": code, "session_id": session}),
        ));
        let begun = self.workspace.path().join("begun");
        with_timeout(move || fs::read(begun).unwrap());
    }

    fn release(&self) {
        let go = self.workspace.path().join("go");
        with_timeout(move || fs::write(go, "go").unwrap());
    }
}

fn run(server: &Server, session: &str, code: &str) -> String {
    server
        .call(
            "execute_ipython_cell",
            json!({"code": code, "session_id": session}),
        )
        .text()
        .to_owned()
}

fn kill(process: u32) {
    signal(process, Signal::KILL);
}

fn handle(process: u32) -> OwnedFd {
    rustix::process::pidfd_open(Pid::from_raw(process as i32).unwrap(), PidfdFlags::empty())
        .unwrap()
}

#[track_caller]
fn ends(handle: &OwnedFd, within: Duration) {
    assert!(ends_within(handle, within), "the process lives on");
}

/// Every process that a daemon has started, directly or not.
fn descendants(of: u32) -> Vec<OwnedFd> {
    let mut found = Vec::new();
    let mut parents = vec![of];
    while let Some(parent) = parents.pop() {
        let threads = fs::read_dir(format!("/proc/{parent}/task"))
            .into_iter()
            .flatten();
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            for child in children
                .split_whitespace()
                .map(|id| id.parse::<u32>().unwrap())
            {
                parents.push(child);
                found.push(handle(child));
            }
        }
    }
    found
}

#[test]
fn a_killed_server_leaves_its_sessions_and_its_running_cell_to_the_next() {
    let scene = Scene::new();
    let first = scene.server();
    assert_eq!(run(&first, "a", "x = 41; x"), "41");
    scene.begin_long_cell(&first, "a", "y = x + 1\n'told to the next server'");
    let daemon = scene.process();
    kill(first.process_id());
    first.ended();

    let second = scene.server();
    assert_eq!(scene.process(), daemon, "the daemon is the same");
    assert_eq!(
        run(&second, "b", "'others are not held up'"),
        "'others are not held up'"
    );
    scene.release();
    let told = second.call("check_execution", json!({"session_id": "a", "wait": 30}));
    assert!(
        told.text().contains("told to the next server"),
        "{}",
        told.text()
    );
    assert_eq!(run(&second, "a", "x, y"), "(41, 42)");
    second.close_input();
    assert!(second.ended().success());
    let status = scene
        .status_without_servers()
        .expect("the sessions stay when a server ends in good order");
    assert_eq!(status["sessions"], json!(2));
}

#[test]
fn a_killed_daemon_takes_everything_along_and_its_sessions_say_so() {
    let scene = Scene::new();
    let server = scene.server();
    assert_eq!(run(&server, "a", "x = 1; x"), "1");
    let daemon = scene.process();
    let family = descendants(daemon);
    assert!(
        family.len() >= 3,
        "guardian, warden, interpreters: {}",
        family.len()
    );
    kill(daemon);
    let deadline = Instant::now() + TEST_TIMEOUT;
    for process in &family {
        ends(process, deadline.saturating_duration_since(Instant::now()));
    }

    let lost = server.call(
        "execute_ipython_cell",
        json!({"code": "x", "session_id": "a"}),
    );
    assert!(
        lost.is_error() && lost.text().contains("the session daemon ended"),
        "{}",
        lost.text()
    );
    assert!(
        lost.text().contains("files in the working folder are kept"),
        "{}",
        lost.text()
    );
    assert_ne!(scene.process(), daemon, "another daemon was started");
    assert_eq!(run(&server, "b", "1 + 1"), "2");
    assert!(!server.call("reset", json!({"session_id": "a"})).is_error());
    assert_eq!(run(&server, "a", "'x' in globals()"), "False");
}

#[test]
fn a_daemon_that_nobody_needs_ends_and_leaves_nothing() {
    let scene = Scene::new();
    let server = scene.server();
    assert_eq!(run(&server, "a", "1"), "1");
    let daemon = handle(scene.process());
    let family = descendants(scene.process());
    assert!(
        !server
            .call("close_session", json!({"session_id": "a"}))
            .is_error()
    );
    assert!(scene.status().is_some(), "it stays for its server");
    server.close_input();
    assert!(server.ended().success());
    for process in family.iter().chain([&daemon]) {
        ends(process, TEST_TIMEOUT);
    }
    assert_eq!(scene.status(), None);
}

#[test]
fn a_daemon_without_a_server_ends_when_its_sessions_have_been_idle() {
    let scene = Scene::new();
    let server = scene.server_with(&["--idle-timeout", "1s"]);
    assert_eq!(run(&server, "a", "1"), "1");
    let daemon = handle(scene.process());
    kill(server.process_id());
    server.ended();
    ends(&daemon, TEST_TIMEOUT);
    assert_eq!(scene.status(), None);
}

#[test]
fn an_operator_cannot_stop_a_daemon_at_work_by_accident() {
    let scene = Scene::new();
    let server = scene.server();
    scene.begin_long_cell(&server, "a", "'done'");
    let (code, _, errors) = scene.stop(&[]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--now"), "{errors}");
    let daemon = handle(scene.process());
    let (code, printed, errors) = scene.stop(&["--now"]);
    assert_eq!(
        (code, printed.contains("has ended")),
        (Some(0), true),
        "{errors}"
    );
    ends(&daemon, TEST_TIMEOUT);
    assert_eq!(scene.status(), None);
    let (code, printed, errors) = scene.stop(&[]);
    assert_eq!(
        (code, printed.as_str()),
        (Some(2), ""),
        "there is nothing left to stop"
    );
    assert!(
        errors.contains(&format!(
            "there is no session daemon {}",
            scene.daemon.name()
        )),
        "{errors}"
    );
}

#[test]
fn a_server_that_ends_says_which_sessions_go_on_and_how_to_end_them() {
    let scene = Scene::new();
    // The daemon writes to the log of the first server, which started it.
    let first = scene.server();
    assert_eq!(run(&first, "a", "1"), "1");
    let second = scene.server();
    assert_eq!(run(&second, "b", "2"), "2");
    let log = second.finish();
    let told = format!(
        "2 sessions go on; `cellblock daemon stop {}` ends them",
        scene.daemon.name()
    );
    assert!(log.contains(&told), "{log}");
}

#[test]
fn servers_that_start_at_once_share_one_daemon() {
    let scene = Scene::new();
    let servers = std::thread::scope(|scope| {
        let started = (0..3)
            .map(|_| scope.spawn(|| scene.server()))
            .collect::<Vec<_>>();
        started
            .into_iter()
            .map(|server| server.join().unwrap())
            .collect::<Vec<_>>()
    });
    assert_eq!(run(&servers[0], "a", "x = 5; x"), "5");
    assert_eq!(run(&servers[1], "a", "x"), "5");
    assert_eq!(scene.status().unwrap()["servers"], json!(3));
}

#[test]
fn daemons_of_other_names_have_other_sessions_and_leave_each_other_alone() {
    let (one, other) = (Scene::new(), Scene::new());
    let (first, second) = (one.server(), other.server());
    assert_eq!(run(&first, "a", "x = 1; x"), "1");
    assert_eq!(run(&second, "a", "'x' in globals()"), "False");
    kill(other.process());
    let lost = second.call(
        "execute_ipython_cell",
        json!({"code": "1", "session_id": "a"}),
    );
    assert!(lost.is_error());
    assert_eq!(
        run(&second, "b", "2"),
        "2",
        "the next daemon sweeps what the dead one left"
    );
    assert_eq!(run(&first, "a", "x"), "1");
}

#[test]
fn what_the_operator_gave_reaches_the_daemon_and_is_in_no_argument() {
    let scene = Scene::new();
    let server = scene.server_with(&["--env-var", "GIVEN=canary-of-the-operator"]);
    assert_eq!(
        run(&server, "a", "import os; os.environ['GIVEN']"),
        "'canary-of-the-operator'"
    );
    let read = |process: u32, file: &str| {
        fs::read(Path::new("/proc").join(process.to_string()).join(file)).unwrap()
    };
    let holds = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).contains("canary-of-the-operator");
    assert!(holds(read(server.process_id(), "cmdline"))); // control
    assert!(!holds(read(scene.process(), "cmdline")));
    assert!(!holds(read(scene.process(), "environ")));
}

#[test]
fn a_server_with_other_settings_is_warned_and_told_the_cure() {
    let scene = Scene::new();
    let first = scene.server();
    assert_eq!(run(&first, "a", "x = 1; x"), "1");
    let second = scene.server_with(&["--max-sessions", "7"]);
    assert_eq!(run(&second, "a", "x"), "1");
    // The daemon writes to the log of the first server, which started it.
    let written = second.finish();
    assert!(
        written.contains(&format!("cellblock daemon stop {}", scene.daemon.name())),
        "{written}"
    );
}

#[test]
fn a_server_with_the_former_flag_finds_the_same_daemon_and_warns_once() {
    let scene = Scene::new();
    let name = scene.daemon.name();
    let mut former = program();
    former
        .args(["mcp", "--keep-sessions", "on", "--keeper", name])
        .args(MINIMAL)
        .arg("--workspace")
        .arg(scene.workspace.path());
    let first = Server::spawn(&mut former, Era::Initialize);
    first.greet();
    assert_eq!(run(&first, "a", "x = 6; x"), "6");
    let second = scene.server();
    assert_eq!(run(&second, "a", "x * 7"), "42");
    assert_eq!(scene.stop(&["--now"]).0, Some(0));
    // The daemon writes to the log of the server that started it, so the log ends with it.
    let log = first.finish();
    assert_eq!(log.matches("is now called").count(), 1, "{log}");
    assert!(!second.finish().contains("is now called")); // control
}

#[test]
fn the_command_of_a_daemon_is_not_for_people() {
    let (code, _, errors) = finished(program().args(["daemon", "hold"]));
    assert_eq!(code, Some(2));
    assert!(errors.contains("the server itself"), "{errors}");
}

#[test]
fn a_daemon_that_hangs_is_noticed_and_everything_goes_on_when_it_recovers() {
    let scene = Scene::new();
    let server = scene.server();
    run(&server, "a", "x = 41");
    let daemon = scene.process();
    stop(daemon);
    let begun = Instant::now();
    let cell = server.begin(
        "execute_ipython_cell",
        json!({"code": "x += 1", "session_id": "a"}),
    );
    let list = server.call("list_sessions", json!({}));
    assert!(
        list.is_error() && list.text().contains("does not answer"),
        "{}",
        list.text()
    );
    let cell = cell.result();
    assert!(
        cell.is_error()
            && cell
                .text()
                .contains("Whether this was carried out is not known"),
        "{}",
        cell.text()
    );
    assert!(
        begun.elapsed() < Duration::from_secs(52),
        "{:?}",
        begun.elapsed()
    );
    signal(daemon, Signal::CONT);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while server.call("list_sessions", json!({})).is_error() {
        assert!(Instant::now() < deadline, "it does not recover");
    }
    let told = server.call("check_execution", json!({"session_id": "a", "wait": 10}));
    assert!(!told.is_error(), "{}", told.text());
    assert_eq!(run(&server, "a", "x"), "42", "what was sent before has run");
}

/// The executions in a log: the digest of their code, and their status.
fn executions(log: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(log).unwrap();
    let records = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    records
        .filter(|record| record["kind"] == "execution")
        .map(|record| {
            (
                word(&record["details"]["code"]),
                word(&record["details"]["status"]),
            )
        })
        .collect()
}

#[test]
fn an_execution_that_ended_without_a_server_is_recorded_once_by_the_next_one() {
    let scene = Scene::new();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.jsonl");
    let audited = || scene.server_with(&["--audit-file", log.to_str().unwrap()]);
    let first = audited();
    run(&first, "a", "before = 1");
    scene.begin_long_cell(&first, "a", "'nobody collects this'");
    kill(first.process_id());
    first.ended();
    scene.release();
    let long = "open('begun', 'w').close()\nopen('go').read()\n'nobody collects this'";
    let ok = |code: &str| (cellblock::audit::Digest::of(code), "ok".to_owned());
    let expected = [ok("before = 1"), ok(long), ok("after = 1")];
    let expected = expected.map(|(digest, status)| (serde_json::to_value(digest).unwrap(), status));
    for _ in 0..2 {
        let server = audited();
        if executions(&log).len() < 3 {
            run(&server, "a", "after = 1");
        }
        let deadline = Instant::now() + TEST_TIMEOUT;
        while executions(&log).len() < 3 {
            assert!(
                Instant::now() < deadline,
                "not all were recorded: {:?}",
                executions(&log)
            );
        }
        server.close_input();
        assert!(server.ended().success());
        let recorded: Vec<_> = executions(&log)
            .into_iter()
            .map(|(code, status)| (json!(code), status))
            .collect();
        assert_eq!(recorded, expected);
    }
    let (code, printed, errors) = finished(program().args(["audit", "verify"]).arg(&log));
    assert_eq!(code, Some(0), "{printed}{errors}");
}

#[test]
fn a_server_names_the_settings_that_its_daemon_has_differently_and_its_quotas_hold_at_once() {
    let scene = Scene::new();
    let first = scene.server();
    run(&first, "a", "1");
    first.close_input();
    assert!(first.ended().success());
    let mut command = scene.command(&["--memory", "777MiB"]);
    command
        .env("CELLBLOCK_QUOTA_SESSIONS", "1")
        .env("CELLBLOCK_PACKAGE_INDEX", "https://index.test/simple");
    let second = Server::spawn(&mut command, Era::Initialize);
    second.greet();
    let refused = second.call(
        "execute_ipython_cell",
        json!({"code": "1", "session_id": "b"}),
    );
    assert!(
        refused.is_error() && refused.text().contains("session"),
        "{}",
        refused.text()
    );
    assert_eq!(run(&second, "a", "2"), "2"); // control
    let log = second.finish();
    let warning = log
        .lines()
        .find(|line| line.contains("earlier values of these settings"))
        .expect(&log);
    assert!(
        warning.contains("memory") && warning.contains("package_index"),
        "{warning}"
    );
    assert!(!warning.contains("quota"), "{warning}");
    let third = scene.server();
    assert_eq!(
        run(&third, "b", "3"),
        "3",
        "a quota that is lifted refuses nothing"
    );
}
