//! Memory as the kernel counts it: of a control group, of processes, of the whole machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

pub(crate) const MIB: u64 = 1024 * 1024;

/// A control group for a whole server. It counts what the kernel holds for its processes too: page
/// tables, namespaces, sockets.
pub(crate) struct MemoryGroup {
    folder: PathBuf,
    names: &'static Names,
}

/// What the files are called in the two versions of control groups.
struct Names {
    used: &'static str,
    peak: &'static str,
    limit: &'static str,
    events: &'static str,
}

const VERSION_ONE: Names = Names {
    used: "memory.usage_in_bytes",
    peak: "memory.max_usage_in_bytes",
    limit: "memory.limit_in_bytes",
    events: "memory.oom_control",
};
const VERSION_TWO: Names = Names {
    used: "memory.current",
    peak: "memory.peak",
    limit: "memory.max",
    events: "memory.events",
};

impl MemoryGroup {
    /// Makes a group below the one of this process, which needs the right to do so.
    pub(crate) fn make(limit: Option<u64>) -> anyhow::Result<MemoryGroup> {
        let (parent, names) = parent_group()?;
        let folder = parent.join(format!("benchmark-{}", std::process::id()));
        fs::create_dir(&folder).context("a control group cannot be made here")?;
        let group = MemoryGroup { folder, names };
        ensure!(
            group.folder.join(names.used).exists(),
            "the control group of this process does not count memory"
        );
        if let Some(limit) = limit {
            fs::write(group.folder.join(names.limit), limit.to_string())
                .context("the limit was not taken")?;
        }
        Ok(group)
    }

    /// Returns a command that enters the group and then becomes `command`.
    pub(crate) fn wrap(&self, command: &Command) -> Command {
        let mut wrapped = Command::new("/bin/sh");
        wrapped
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(self.folder.join("cgroup.procs"));
        wrapped.arg(command.get_program()).args(command.get_args());
        wrapped
    }

    /// Bytes held now. The group holds those of the sandboxes' own groups, which are below it.
    pub(crate) fn used(&self) -> u64 {
        self.number(self.names.used)
    }

    pub(crate) fn peak(&self) -> u64 {
        self.number(self.names.peak)
    }

    /// Processes killed in the group, and below it, because memory ran out.
    pub(crate) fn kills(&self) -> u64 {
        fn below(folder: &Path, events: &str) -> u64 {
            let inner = fs::read_dir(folder)
                .into_iter()
                .flatten()
                .flatten()
                .filter(|entry| entry.path().is_dir());
            let own = fs::read_to_string(folder.join(events)).unwrap_or_default();
            let own = own
                .lines()
                .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
                .unwrap_or(0);
            own + inner.map(|entry| below(&entry.path(), events)).sum::<u64>()
        }
        below(&self.folder, self.names.events)
    }

    fn number(&self, name: &str) -> u64 {
        fs::read_to_string(self.folder.join(name))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.folder) {
            eprintln!(
                "the control group {} stays behind: {error}",
                self.folder.display()
            );
        }
    }
}

fn parent_group() -> anyhow::Result<(PathBuf, &'static Names)> {
    let membership = fs::read_to_string("/proc/self/cgroup")?;
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let below = path.trim_start_matches('/');
        if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            return Ok((Path::new("/sys/fs/cgroup/memory").join(below), &VERSION_ONE));
        }
        if controllers.is_empty() && Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            return Ok((Path::new("/sys/fs/cgroup").join(below), &VERSION_TWO));
        }
    }
    anyhow::bail!("no control groups that count memory are mounted")
}

/// Bytes that programs could still get on this machine.
pub(crate) fn available() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    kilobytes(&text, "MemAvailable:")
        .context("the kernel does not tell how much memory is available")
}

/// The memory of these processes; what several of them share is divided among them.
pub(crate) fn of_processes(processes: &BTreeSet<u32>) -> u64 {
    let share = |pid: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
        kilobytes(&text, "Pss:")
    };
    processes.iter().filter_map(share).sum()
}

/// What of a process is in memory.
pub(crate) fn resident(process: u32) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/status"))?;
    kilobytes(&text, "VmRSS:").context("a process has memory")
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value
        .trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<u64>()
        .ok()
        .map(|kilobytes| kilobytes * 1024)
}
