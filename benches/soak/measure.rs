//! What the server holds, as the kernel tells it: memory, descriptors and threads of its own
//! processes, and how many processes, control groups and mounts there are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The processes of the server that last as long as it does.
pub(crate) const LASTING: [&str; 4] = ["frontend", "daemon", "guardian", "warden"];

/// What one of them holds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Held {
    pub(crate) memory: u64,
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
}

/// A look at everything.
#[derive(Debug, Clone, Default)]
pub(crate) struct Look {
    pub(crate) held: [Held; LASTING.len()],
    pub(crate) processes: u64,
    pub(crate) groups: u64,
    /// In the jail, and of the server's own folder.
    pub(crate) mounts: u64,
}

impl Look {
    pub(crate) fn memory(&self) -> u64 {
        self.held.iter().map(|held| held.memory).sum()
    }

    /// Everything but memory.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 5] {
        [
            ("processes", self.processes),
            ("control groups", self.groups),
            ("mounts", self.mounts),
            (
                "descriptors",
                self.held.iter().map(|held| held.descriptors).sum(),
            ),
            ("threads", self.held.iter().map(|held| held.threads).sum()),
        ]
    }
}

/// Where to look.
pub(crate) struct Places {
    frontend: u32,
    daemon: u32,
    folder: String,
    /// The control groups that hold those of all sandboxes.
    groups: BTreeSet<PathBuf>,
}

impl Places {
    /// Finds the places of a server that has begun to make sandboxes.
    pub(crate) fn of(frontend: u32, daemon: u32, folder: &Path) -> Places {
        let mut groups = BTreeSet::new();
        for pid in descendants(daemon).keys() {
            let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            groups.extend(membership.lines().filter_map(top_group));
        }
        Places {
            frontend,
            daemon,
            folder: folder.display().to_string(),
            groups,
        }
    }

    /// All processes of the server, with their names.
    pub(crate) fn processes(&self) -> BTreeMap<u32, String> {
        let mut found = descendants(self.frontend);
        found.extend(descendants(self.daemon));
        found
    }

    pub(crate) fn look(&self) -> Look {
        let processes = self.processes();
        let named = |name: &str| {
            processes
                .iter()
                .find(|(_, found)| *found == name)
                .map(|(pid, _)| *pid)
        };
        let warden = named("cb-warden");
        let lasting = [
            Some(self.frontend),
            Some(self.daemon),
            named("cb-guardian"),
            warden,
        ];
        Look {
            held: lasting.map(|pid| pid.map(held).unwrap_or_default()),
            processes: processes.len() as u64,
            groups: self.groups.iter().map(|group| folders(group)).sum(),
            mounts: mounts(std::process::id(), &self.folder)
                + warden.map_or(0, |pid| mounts(pid, "")),
        }
    }

    /// Which of these groups there still are.
    pub(crate) fn groups_left(&self) -> Vec<&Path> {
        self.groups
            .iter()
            .map(PathBuf::as_path)
            .filter(|group| group.exists())
            .collect()
    }
}

/// How much a value grows in an hour: the slope of the line that fits best. Times are in seconds.
pub(crate) fn growth_per_hour(values: &[(f64, f64)]) -> f64 {
    let count = values.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| values.iter().map(of).sum::<f64>() / count;
    let (time, value) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = values
        .iter()
        .map(|point| (point.0 - time) * (point.1 - value))
        .sum();
    let variance: f64 = values.iter().map(|point| (point.0 - time).powi(2)).sum();
    if variance > 0.0 {
        covariance / variance * 3600.0
    } else {
        0.0
    }
}

fn held(pid: u32) -> Held {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name: &str| -> u64 {
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count) as u64;
    // Pages of the program itself are left out: how many of them are resident is up to the kernel.
    let memory = (field("RssAnon:") + field("RssShmem:")) * 1024;
    Held {
        memory,
        descriptors,
        threads: field("Threads:"),
    }
}

/// Mounts that a process sees and that have this in them.
fn mounts(pid: u32, word: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    text.lines().filter(|line| line.contains(word)).count() as u64
}

/// A process and all that descend from it.
fn descendants(of: u32) -> BTreeMap<u32, String> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut names = BTreeMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        let (Some(name), Some(parent)) = (field("Name:"), field("PPid:")) else {
            continue;
        };
        names.insert(pid, name.to_owned());
        children
            .entry(parent.parse().unwrap_or(0))
            .or_default()
            .push(pid);
    }
    let (mut found, mut waiting) = (BTreeMap::new(), vec![of]);
    while let Some(pid) = waiting.pop() {
        if let Some(name) = names.remove(&pid) {
            found.insert(pid, name);
            waiting.extend(children.get(&pid).into_iter().flatten());
        }
    }
    found
}

/// The folder of our topmost group in a line such as `4:memory:/user/cellblock-7-0/3`.
fn top_group(line: &str) -> Option<PathBuf> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let start = path.find("/cellblock-")?;
    let end = path[start + 1..]
        .find('/')
        .map_or(path.len(), |length| start + 1 + length);
    let mut places = controllers.split(',').map(|controller| {
        Path::new("/sys/fs/cgroup")
            .join(controller)
            .join(path[..end].trim_start_matches('/'))
    });
    places.find(|place| place.is_dir())
}

/// How many folders there are below this one.
fn folders(folder: &Path) -> u64 {
    let inner = fs::read_dir(folder).into_iter().flatten().flatten();
    inner
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| 1 + folders(&entry.path()))
        .sum()
}
