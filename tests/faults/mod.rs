//! Faults: what callers see when something below a server ends, hangs or runs out, what recovers by
//! itself, and what is left behind.
//!
//! A row names a fault, what the caller is told, what works afterwards without a restart of the
//! server, and then checks that nothing is left when the server ends: no process, no control group,
//! no entry in the runtime folder.
//!
//! - `signals` kills and stops the processes of a jail. Its rows are `signals::ROWS`, and each is
//!   run twice: with sessions in the server itself and in a daemon.
//! - All other rows are in `table.md`, with their tests. `frontends` kills, stops and misleads the
//!   server and its daemon, `resources` takes descriptors, processes, memory and turns away,
//!   `disks` disk space and files. Some rows have their test beside the thing that they are about.
//! - `processes` finds the processes of a server.

mod disks;
mod frontends;
mod processes;
mod resources;
mod signals;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use self::processes::wait_for;
use crate::support::server::{Era, MINIMAL, Server, ToolResult, finished, program};
use crate::support::service::runtime_folder;

/// Where the sessions of a server live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// In the server itself.
    Inside,
    /// In a daemon of its own name.
    SessionDaemon,
}

/// When the fault comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Idle,
    MidCell,
}

/// A server whose client tries to live through a fault.
struct Scene {
    server: Option<Server>,
    home: Home,
    daemon: String,
    /// The process that holds the sessions.
    holder: u32,
}

impl Scene {
    fn new(home: Home) -> Scene {
        Scene::of(home, &[], |command| command)
    }

    /// A server that keeps no sessions ready.
    fn without_pool(change: impl Fn(Command) -> Command) -> Scene {
        Scene::of(Home::Inside, &[], |mut command| {
            command.env("CELLBLOCK_POOL", "0");
            change(command)
        })
    }

    /// Starts a server whose command is changed first.
    fn of(home: Home, more: &[&str], change: impl Fn(Command) -> Command) -> Scene {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let daemon = format!(
            "f{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let mut command = command(home, &daemon);
        command.args(more);
        let server = Server::spawn(&mut change(command), Era::Initialize);
        server.greet();
        let mut scene = Scene {
            server: Some(server),
            home,
            daemon,
            holder: 0,
        };
        scene.holder = match home {
            Home::Inside => scene.server().process_id(),
            Home::SessionDaemon => scene.daemon_process(),
        };
        scene
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("the scene is not over")
    }

    /// The daemon that the present server has started.
    fn daemon_process(&self) -> u32 {
        processes::daemon_of(self.server().process_id())
    }

    /// Starts another server of the same settings, also after the first one has ended.
    fn another(&self) -> Server {
        let server = Server::spawn(&mut command(self.home, &self.daemon), Era::Initialize);
        server.greet();
        server
    }

    /// The interpreter that runs the cells of a session. It says which one it is by its process id
    /// inside.
    fn interpreter_of(&self, session: &str) -> processes::Process {
        let inside = self.text(session, "__import__('os').getpid()");
        processes::inside(self.holder, inside.trim().parse().expect("a process id"))
    }

    fn run(&self, session: &str, code: &str) -> ToolResult {
        self.server().call(
            "execute_ipython_cell",
            json!({"code": code, "session_id": session}),
        )
    }

    #[track_caller]
    fn text(&self, session: &str, code: &str) -> String {
        let result = self.run(session, code);
        assert!(!result.is_error(), "{session}: {}", result.text());
        result.text().to_owned()
    }

    fn call(&self, tool: &str, session: &str) -> ToolResult {
        self.server().call(tool, json!({"session_id": session}))
    }

    /// Checks that a new session works.
    #[track_caller]
    fn assert_new_session_works(&self, name: &str) {
        assert_eq!(self.text(name, "6 * 7"), "42", "a new session works");
        assert!(!self.call("close_session", name).is_error());
    }

    /// Ends the server and checks that nothing of it is left. Returns its log, unless a daemon
    /// shares it.
    #[track_caller]
    fn finish(mut self) -> String {
        let holder = self.holder;
        let family = processes::below(holder);
        let entries = entries_of(holder);
        let groups = groups_of(&entries);
        assert!(entries.len() == 1, "one jail has one entry: {entries:?}");
        let server = self.server.take().expect("it is over once");
        let log = match self.home {
            Home::Inside => server.finish(),
            Home::SessionDaemon => {
                server.close_input();
                assert!(server.ended().success());
                self.stop_daemon();
                String::new()
            }
        };
        for process in family.values() {
            wait_for("the end of every process", || {
                process.state().is_none().then_some(())
            });
        }
        wait_for("the end of every control group", || {
            groups.iter().all(|group| !group.exists()).then_some(())
        });
        assert_eq!(entries_of(holder), Vec::<PathBuf>::new());
        log
    }

    fn stop_daemon(&self) {
        if self.home == Home::SessionDaemon {
            finished(program().args(["daemon", "stop", &self.daemon, "--now"]));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if self.server.is_some() {
            if self.home == Home::SessionDaemon {
                // A test that failed may have stopped it; then it would not hear anything.
                let _ = Pid::from_raw(self.holder as i32)
                    .map(|daemon| kill_process(daemon, Signal::CONT));
            }
            self.stop_daemon();
        }
    }
}

/// A server that has its sessions there.
fn command(home: Home, daemon: &str) -> Command {
    let mut command = program();
    command.arg("mcp").args(MINIMAL);
    match home {
        Home::Inside => command.args(["--keep-sessions", "off"]),
        Home::SessionDaemon => command.args(["--keep-sessions", "on", "--daemon-name", daemon]),
    };
    command
}

/// Asks whether a service is ready: the status and the text.
fn readiness(address: SocketAddr) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET /readyz HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    (
        text.split_whitespace().nth(1).unwrap().parse().unwrap(),
        text,
    )
}

/// The entries of one server in the runtime folder.
fn entries_of(server: u32) -> Vec<PathBuf> {
    let own = format!("cellblock-{server}-");
    let entries = fs::read_dir(runtime_folder().join("instances"))
        .into_iter()
        .flatten()
        .flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&own))
        .map(|entry| entry.path())
        .collect()
}

fn groups_of(entries: &[PathBuf]) -> Vec<PathBuf> {
    let lists = entries
        .iter()
        .map(|entry| fs::read_to_string(entry).unwrap_or_default());
    lists
        .flat_map(|list| list.lines().map(PathBuf::from).collect::<Vec<_>>())
        .collect()
}

/// The rows of `table.md`: fault, told, recovers, test.
fn table() -> Vec<[&'static str; 4]> {
    let lines = include_str!("table.md")
        .lines()
        .filter(|line| line.starts_with("| "))
        .skip(1);
    let cells = |line: &'static str| {
        line.trim_matches('|')
            .split('|')
            .map(str::trim)
            .collect::<Vec<_>>()
    };
    lines
        .map(|line| {
            cells(line)
                .try_into()
                .unwrap_or_else(|cells| panic!("four cells: {cells:?}"))
        })
        .collect()
}

#[test]
fn there_are_at_least_seventy_rows_and_each_has_its_test() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let table = table();
    for [fault, told, recovers, test] in &table {
        assert!(
            ![fault, told, recovers].iter().any(|cell| cell.is_empty()),
            "{fault}"
        );
        let (file, name) = test
            .trim_matches('`')
            .rsplit_once("::")
            .expect("a module and a name");
        let file = tests.join(file.replace("::", "/"));
        let text = fs::read_to_string(file.with_extension("rs"))
            .or_else(|_| fs::read_to_string(file.join("mod.rs")));
        let text = text.unwrap_or_else(|error| panic!("{test}: {error}"));
        assert!(
            text.contains(&format!("fn {name}()")),
            "there is no test {test}"
        );
    }
    let faults: std::collections::BTreeSet<&str> = table.iter().map(|[fault, ..]| *fault).collect();
    assert_eq!(faults.len(), table.len(), "each row is another fault");
    assert!(
        2 * signals::ROWS.len() + table.len() >= 70 && table.len() >= 40,
        "{}",
        table.len()
    );
}
