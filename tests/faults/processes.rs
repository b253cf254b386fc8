//! The processes of a server, found in `/proc` and named by their role.
//!
//! ```text
//! server ─ guardian ─ warden ─┬─ zygote              the warden's pid namespace
//!                             │   └─ twin            that of its family, one below
//!                             │       └─ interpreter that of its sandbox, two below
//!                             └─ family              the first process of its family
//!                                 └─ init            the first process of its sandbox
//! ```
//!
//! With a daemon, "server" is the daemon.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::server::TEST_TIMEOUT;

/// What a process does for its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Guardian,
    Warden,
    Zygote,
    Family,
    Init,
    Interpreter,
    Twin,
    /// Something else, such as a program that a session has started.
    Other,
}

/// A process as `/proc/PID/status` and `stat` show it.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) role: Role,
    parent: u32,
    name: String,
    /// Its numbers in the pid namespaces that it is in, the host's first.
    numbers: Vec<u32>,
}

impl Process {
    fn read(pid: u32) -> Option<Process> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        if field("State:")?.starts_with('Z') {
            return None;
        }
        Some(Process {
            pid,
            role: Role::Other,
            parent: field("PPid:")?.parse().ok()?,
            name: field("Name:")?.to_owned(),
            numbers: field("NSpid:")?
                .split_whitespace()
                .map(|number| number.parse().ok())
                .collect::<Option<_>>()?,
        })
    }

    /// The kernel's letter for its state; `None` when it is gone.
    pub(super) fn state(&self) -> Option<char> {
        stat(self.pid).map(|(state, _)| state)
    }

    #[track_caller]
    pub(super) fn send(&self, signal: Signal) {
        crate::support::signal(self.pid, signal);
    }

    /// The first process of the pid namespace that it is in.
    pub(super) fn init(&self, server: u32) -> Process {
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = namespace(self.pid);
        let mut all = below(server).into_values();
        all.find(|found| found.role == Role::Init && namespace(found.pid) == own)
            .expect("every sandbox has an init")
    }

    /// The first process of the family of an init: its parent.
    pub(super) fn family(&self, server: u32) -> Process {
        below(server)
            .remove(&self.parent)
            .filter(|found| found.role == Role::Family)
            .expect("it has a family")
    }

    /// The twin of an interpreter: its parent.
    pub(super) fn twin(&self, server: u32) -> Process {
        below(server)
            .remove(&self.parent)
            .filter(|found| found.role == Role::Twin)
            .expect("it has a twin")
    }

    /// Waits until it computes: a cell that loops has begun.
    pub(super) fn wait_until_busy(&self) {
        let before = stat(self.pid).map_or(0, |(_, ticks)| ticks);
        wait_for("a cell that computes", || {
            stat(self.pid)
                .is_none_or(|(_, ticks)| ticks > before + 5)
                .then_some(())
        });
    }

    /// Waits until it waits for something: a cell that loops has ended.
    pub(super) fn wait_until_asleep(&self) {
        wait_for("the end of a cell", || {
            stat(self.pid)
                .is_none_or(|(state, _)| state == 'S')
                .then_some(())
        });
    }
}

/// The state of a process and the processor time that it has used, in hundredths of a second.
fn stat(pid: u32) -> Option<(char, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let state = fields.first()?.chars().next()?;
    (state != 'Z').then_some(())?;
    Some((
        state,
        fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?,
    ))
}

/// All processes below `server`, by process id.
pub(super) fn below(server: u32) -> BTreeMap<u32, Process> {
    let pids = fs::read_dir("/proc").expect("there is /proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all: BTreeMap<u32, Process> = pids
        .filter_map(|pid| Some((pid, Process::read(pid)?)))
        .collect();
    let is_below = |process: &Process| {
        let mut parent = process.parent;
        while let Some(next) = all.get(&parent).filter(|_| parent != server) {
            parent = next.parent;
        }
        parent == server
    };
    // What they fork has their names for a moment.
    let is_guardian = |process: &Process| process.name == "cb-guardian" && process.parent == server;
    let is_warden = |process: &Process| {
        process.name == "cb-warden" && all.get(&process.parent).is_some_and(is_guardian)
    };
    let warden = all.values().find(|found| is_warden(found));
    let warden_depth = warden.map(|found| found.numbers.len());
    let role = |process: &Process| match (process.name.as_str(), warden_depth) {
        ("cb-guardian", _) if is_guardian(process) => Role::Guardian,
        ("cb-warden", _) if is_warden(process) => Role::Warden,
        ("cb-family", _) => Role::Family,
        ("cb-init", _) => Role::Init,
        ("cb-twin", _) => Role::Twin,
        (name, Some(depth)) if name.starts_with("py") => match process.numbers.len() == depth {
            true => Role::Zygote,
            false => Role::Interpreter,
        },
        _ => Role::Other,
    };
    let found = all.values().filter(|process| is_below(process));
    found
        .map(|process| {
            (
                process.pid,
                Process {
                    role: role(process),
                    ..process.clone()
                },
            )
        })
        .collect()
}

/// The daemon that a frontend has started. Not asked for on the command line: that would wait for
/// every daemon that another test has stopped.
pub(super) fn daemon_of(frontend: u32) -> u32 {
    wait_for("a daemon", || {
        let mut all = below(frontend)
            .into_values()
            .filter(|process| process.parent == frontend);
        let is_daemon = |process: &Process| {
            let arguments = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            arguments
                .split(|byte| *byte == 0)
                .skip(1)
                .take(2)
                .eq([b"daemon".as_slice(), b"hold"])
        };
        all.find(is_daemon).map(|process| process.pid)
    })
}

/// Waits until a process of this role is there.
pub(super) fn one(server: u32, role: Role) -> Process {
    wait_for(&format!("the process that is {role:?}"), || {
        below(server)
            .into_values()
            .find(|process| process.role == role)
    })
}

/// The interpreter that has this process id inside. Sandboxes of one server count from different
/// numbers.
pub(super) fn inside(server: u32, number: u32) -> Process {
    let mut all = below(server)
        .into_values()
        .filter(|process| process.role == Role::Interpreter);
    all.find(|process| process.numbers.last() == Some(&number))
        .expect("there is such an interpreter")
}

/// Looks again and again until there is an answer; fails when that takes too long.
#[track_caller]
pub(super) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "{what} did not come within {TEST_TIMEOUT:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
