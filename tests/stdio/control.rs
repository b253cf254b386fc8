//! Time, cancellation, reset, death: who may stop what, and what is left afterwards.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::json;

use crate::support::server::{Era, MINIMAL, Server, TEST_TIMEOUT, program, with_timeout};

/// Something that happens inside and is waited for outside, through a FIFO in a shared workspace.
/// Both sides wait for each other.
pub(crate) struct Flag {
    path: PathBuf,
    name: String,
}

impl Flag {
    pub(crate) fn new(workspace: &Path, name: &str) -> Flag {
        let path = workspace.join(name);
        assert!(
            Command::new("mkfifo")
                .args(["-m", "666"])
                .arg(&path)
                .status()
                .unwrap()
                .success()
        );
        Flag {
            path,
            name: name.to_owned(),
        }
    }

    /// The line of Python that raises it.
    pub(crate) fn raise(&self) -> String {
        format!("open({:?}, 'w').close()", self.name)
    }

    /// The line of Python that waits for it.
    pub(crate) fn await_inside(&self) -> String {
        format!("open({:?}).read()", self.name)
    }

    pub(crate) fn wait(&self) {
        let path = self.path.clone();
        with_timeout(move || fs::read(path).unwrap());
    }

    pub(crate) fn raise_outside(&self) {
        let path = self.path.clone();
        with_timeout(move || File::options().write(true).open(path).unwrap());
    }
}

/// A server whose sessions share a folder with the test.
struct Shared {
    folder: tempfile::TempDir,
    server: Server,
}

fn shared_workspace(era: Era, more: &[&str]) -> Shared {
    let folder = tempfile::tempdir().unwrap();
    let workspace = folder.path().to_str().unwrap().to_owned();
    let server = Server::start_in(era, &[MINIMAL, &["--workspace", &workspace], more].concat());
    Shared { folder, server }
}

#[test]
fn a_time_out_names_its_value_and_keeps_the_state() {
    let session = Server::shared().session();
    session.text("kept = 1");
    let result = session.run_with(
        "kept = 2\nprint('before')\nwhile True: pass",
        json!({"timeout": 1.5}),
    );
    result.assert_refused(&[
        "before",
        "time-out of 1.5 s",
        "Variables and files are kept",
    ]);
    assert_eq!(result.status(), "timeout");
    assert_eq!(session.text("kept"), "2");
    // The same for code that waits in a system call, and the default limit is said in seconds too.
    let result = session.run_with("import time; time.sleep(100)", json!({"timeout": 1}));
    result.assert_refused(&["time-out of 1 s"]);
    assert_eq!(session.text("kept"), "2");
}

#[test]
fn code_that_ignores_the_interrupt_is_killed_and_the_reply_says_what_is_gone() {
    let session = Server::shared().session();
    session.text("kept = 1; open('file', 'w').write('here'); None");
    let code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    let started = Instant::now();
    let result = session.run_with(code, json!({"timeout": 2}));
    result.assert_refused(&[
        "time-out of 2 s",
        "ignored the interrupt",
        "Variables and imports",
        "gone",
        "files",
        "reset",
    ]);
    assert!(started.elapsed() < TEST_TIMEOUT, "{:?}", started.elapsed());
    session
        .run("1")
        .assert_refused(&["this session ended because", "reset"]);
    assert!(!session.call("reset", json!({})).is_error());
    assert_eq!(session.text("open('file').read()"), "'here'");
    session.run("kept").assert_refused(&["NameError"]);
}

#[test]
fn a_loop_in_c_that_never_looks_at_signals_is_killed_too() {
    let session = Server::shared().session();
    let started = Instant::now();
    // One call of a C function that holds the interpreter for ages.
    let result = session.run_with("sum(range(10**15))", json!({"timeout": 2}));
    result.assert_refused(&["time-out of 2 s"]);
    assert!(started.elapsed() < TEST_TIMEOUT, "{:?}", started.elapsed());
}

#[test]
fn reset_works_in_the_middle_of_a_cell() {
    let Shared { folder, server } = shared_workspace(Era::Initialize, &[]);
    let session = server.session();
    let begun = Flag::new(folder.path(), "begun");
    let running = session.begin(
        &format!(
            "kept = 1\nprint('so far')\n{}\nwhile True: pass",
            begun.raise()
        ),
        json!({}),
    );
    begun.wait();
    let reset = session.call("reset", json!({}));
    assert_eq!(reset.structured()["interrupted_running_cell"], true);
    running
        .result()
        .assert_refused(&["so far", "the session was reset"]);
    session.run("kept").assert_refused(&["NameError"]);
}

#[test]
fn closing_a_session_ends_its_running_cell_with_an_answer() {
    let Shared { folder, server } = shared_workspace(Era::Initialize, &[]);
    let session = server.session();
    let begun = Flag::new(folder.path(), "begun");
    let running = session.begin(
        &format!("print('so far')\n{}\nwhile True: pass", begun.raise()),
        json!({}),
    );
    begun.wait();
    assert!(!session.call("close_session", json!({})).is_error());
    running.result().assert_refused(&["so far", "closed"]);
}

#[test]
fn two_sessions_run_at_the_same_time() {
    let Shared { folder, server } = shared_workspace(Era::Initialize, &[]);
    let (there, back) = (
        Flag::new(folder.path(), "there"),
        Flag::new(folder.path(), "back"),
    );
    let (one, other) = (server.session(), server.session());
    // Each waits for the other, so neither could end if they took turns.
    let first = one.begin(
        &format!("{}; {}; 1", there.raise(), back.await_inside()),
        json!({}),
    );
    let second = other.begin(
        &format!("{}; {}; 2", there.await_inside(), back.raise()),
        json!({}),
    );
    assert_eq!((first.result().text(), second.result().text()), ("1", "2"));
}

#[test]
fn one_session_takes_its_cells_in_turn() {
    let Shared { folder, server } = shared_workspace(Era::Initialize, &[]);
    let go = Flag::new(folder.path(), "go");
    let session = server.session();
    let first = session.begin(
        &format!("order = []; {}; order.append(1)", go.await_inside()),
        json!({}),
    );
    let second = session.begin("order.append(2)", json!({}));
    let third = session.begin("order.append(3); order", json!({}));
    // Another session is served meanwhile, so the queue is the session's own.
    assert_eq!(server.session().text("1"), "1");
    assert!(!second.is_answered() && !third.is_answered());
    go.raise_outside();
    assert!(!first.result().is_error() && !second.result().is_error());
    assert_eq!(third.result().text(), "[1, 2, 3]");
}

#[test]
fn every_way_to_die_is_answered_at_once_and_by_name() {
    let cases = [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "SIGKILL",
        ),
        ("import os; os.abort()", "SIGABRT"),
    ];
    let server = Server::shared();
    let neighbour = server.session();
    neighbour.text("alive = True");
    for (code, word) in cases {
        let session = server.session();
        session.text("kept = 1; open('file', 'w').write('here'); None");
        let started = Instant::now();
        let result = session.run(&format!("print('before', flush=True)\n{code}"));
        result.assert_refused(&[
            "before",
            word,
            "Variables and imports of this session are gone",
            "files",
            "reset",
        ]);
        assert!(
            started.elapsed() < TEST_TIMEOUT,
            "{code} took {:?}",
            started.elapsed()
        );
        session
            .run("kept")
            .assert_refused(&["this session ended because", "reset", &session.id]);
        let listed = server.call("list_sessions", json!({}));
        assert!(
            listed.text().contains(&format!("{}: ended", session.id)),
            "{}",
            listed.text()
        );
        assert!(!session.call("reset", json!({})).is_error());
        assert_eq!(
            session.text("open('file').read()"),
            "'here'",
            "files outlive the interpreter"
        );
        session.run("kept").assert_refused(&["NameError"]);
    }
    assert_eq!(neighbour.text("alive"), "True");
}

#[test]
fn memory_beyond_the_limit_is_answered_by_name_and_neighbours_live() {
    let server = Server::start(&[MINIMAL, &["--memory", "256M"]].concat());
    let (greedy, neighbour) = (server.session(), server.session());
    neighbour.text("alive = True");
    let result = greedy.run(
        "print('before', flush=True)\nblocks = []\nwhile True: blocks.append(bytearray(16 << 20))",
    );
    result.assert_refused(&["before"]);
    if result.status() == "out_of_memory" {
        result.assert_refused(&[
            "more than this session's 256 MiB of memory",
            "smaller parts",
            "reset",
        ]);
        greedy
            .run("1")
            .assert_refused(&["ended because", "256 MiB"]);
        assert!(!greedy.call("reset", json!({})).is_error());
    } else {
        // Without control groups the limit is one of the process, and Python itself can say it.
        result.assert_refused(&["MemoryError"]);
    }
    assert_eq!(greedy.text("1"), "1");
    assert_eq!(neighbour.text("alive"), "True");
}

#[test]
fn a_full_disk_is_an_error_of_the_code_and_space_returns() {
    let mut command = program();
    command
        .env("CELLBLOCK_DISK", "64M")
        .arg("mcp")
        .args(MINIMAL);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    let session = server.session();
    let code = "
import os
try:
    for number in range(1000):
        with open(f'big{number}', 'wb', buffering=0) as file:
            file.write(b'x' * (8 << 20))
except OSError as error:
    print(error.strerror)
";
    assert_eq!(session.text(code), "No space left on device");
    session
        .run("open('other', 'wb', buffering=0).write(b'x' * (8 << 20)) == 8 << 20 or 1 / 0")
        .assert_refused(&["Error"]);
    assert_eq!(
        session.text("for name in os.listdir(): os.remove(name)\nopen('small', 'w').write('fits')"),
        "4"
    );
}

#[test]
fn a_fork_bomb_hurts_nobody_else_and_can_be_reset() {
    let server = Server::shared();
    let (bomb, neighbour) = (server.session(), server.session());
    neighbour.text("alive = True");
    let code = "
import os, signal
try:
    while True:
        if os.fork() == 0:
            signal.pause()
except OSError as error:
    print(error.strerror)
";
    let result = bomb.run_with(code, json!({"timeout": 20}));
    assert!(
        result.text().contains("Resource temporarily unavailable"),
        "{}",
        result.text()
    );
    assert_eq!(neighbour.text("alive"), "True");
    assert!(!bomb.call("reset", json!({})).is_error());
    assert_eq!(
        bomb.text("import subprocess; subprocess.run(['true']).returncode"),
        "0"
    );
}

#[test]
fn a_runner_that_talks_nonsense_ends_its_session_and_no_other() {
    let server = Server::start(MINIMAL);
    let neighbour = server.session();
    neighbour.text("alive = True");
    // Any descriptor that is a socket may be the channel; all get the same rubbish: a frame of one
    // gibibyte is announced.
    let code = r"
import os, stat
for number in range(3, 1010):
    try:
        if stat.S_ISSOCK(os.fstat(number).st_mode):
            os.write(number, b'\x40\0\0\0' + b'garbage' * 100)
    except OSError:
        pass
while True: pass
";
    let session = server.session();
    let before = server.resident_bytes();
    let result = session.run_with(code, json!({"timeout": 20}));
    result.assert_refused(&[
        "broke the connection",
        "Variables and imports of this session are gone",
    ]);
    assert!(server.resident_bytes() < before + (64 << 20));
    assert!(!session.call("reset", json!({})).is_error());
    assert_eq!(session.text("1"), "1");
    assert_eq!(neighbour.text("alive"), "True");
}

#[test]
fn sessions_beyond_the_limit_are_refused_until_one_is_closed() {
    let server = Server::start(&[MINIMAL, &["--max-sessions", "2"]].concat());
    let (one, two, three) = (server.session(), server.session(), server.session());
    one.text("1");
    two.text("1");
    three
        .run("1")
        .assert_refused(&["2 sessions exist", "close_session", &one.id]);
    assert!(!one.call("close_session", json!({})).is_error());
    assert_eq!(three.text("1"), "1");
}

#[test]
fn an_unused_session_ends_and_says_why_until_it_is_reset() {
    let server = Server::start(&[MINIMAL, &["--idle-timeout", "1s"]].concat());
    let session = server.session();
    session.text("kept = 1");
    // The list is the only place where the end of a session can be seen without using it.
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !server
        .call("list_sessions", json!({}))
        .text()
        .contains("ended")
    {
        assert!(Instant::now() < deadline, "the session did not end");
    }
    session.run("kept").assert_refused(&[
        "this session ended because",
        "not used for 1 s",
        "reset",
        &session.id,
    ]);
    assert!(!session.call("reset", json!({})).is_error());
    session.run("kept").assert_refused(&["NameError"]);
}
