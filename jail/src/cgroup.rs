//! Limits for whole sandboxes: control groups, version 2 and version 1.
//!
//! A server makes one folder of its own below the group it was started in, and in it one group for the warden and one per sandbox. On a
//! version 1 system each controller has its own tree, so a group is several folders. The server itself stays where it is, except under version 2,
//! where a group with processes cannot hand controllers on: there it moves into a leaf first.
//!
//! Everything here is plain files. Removing is done by whoever comes last: the server, the guardian, or the sweep at the next start.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The controllers we use on a version 1 system.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "freezer"];
/// The controller of a version 1 system that counts processor time. Often it shares the tree of `cpu`; where it is missing, nothing is counted.
const COUNTER: &str = "cpuacct";

/// What a group may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    pub memory: u64,
    pub processes: u32,
    pub cpus: f64,
}

/// Where a server's groups are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tree {
    /// One folder for everything.
    Two { folder: PathBuf },
    /// One folder per controller, in the order of `CONTROLLERS`; then that of `COUNTER`, if it has a tree of its own.
    One { folders: Vec<PathBuf> },
}

/// One group: the limits of one sandbox.
#[derive(Debug, Clone)]
pub struct Group {
    version: Version,
    folders: Vec<PathBuf>,
}

/// A session, its checkpoints and its forks together: what they hold in memory counts against one limit, whoever of them is still there.
///
/// Under version 1 only memory has such a group. It is removed with the last holder of this value.
#[derive(Debug)]
pub struct Family {
    tree: Tree,
    group: Group,
}

/// What a group says about running out of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Processes of the group that were killed so far, by this limit or by one further out.
    kills: u64,
    /// Whether the group's own limit was reached.
    at_own_limit: bool,
}

impl OutOfMemory {
    /// Tells whether the group's own limit has cost a process since `before`. A kill for the limit of somebody further out is not its doing.
    pub fn happened_since(self, before: OutOfMemory) -> bool {
        self.kills > before.kills && self.at_own_limit
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Tree {
    /// Makes the folder of one server, named `name`, below the group this process is in. Says why when that is not possible here.
    pub fn make(name: &str) -> Result<Tree, String> {
        let membership = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        Tree::make_from(&membership, &mounts, name)
    }

    fn make_from(membership: &str, mounts: &str, name: &str) -> Result<Tree, String> {
        match locate(membership, mounts) {
            Located::One(parents) => {
                let folders: Vec<PathBuf> = parents.iter().map(|parent| parent.join(name)).collect();
                for folder in &folders {
                    make_folder(folder)?;
                }
                Ok(Tree::One { folders })
            }
            Located::Two { own, top } => make_version_two(&own, name).or_else(|why| {
                // Where nothing is delegated to it, root may still have a group of its own at the top, as container engines have.
                if rustix::process::geteuid().is_root() { make_version_two(&top, name) } else { Err(why) }
            }),
            Located::Nothing(why) => Err(why),
        }
    }

    /// The folders that must be removed when the server is gone.
    pub fn folders(&self) -> Vec<PathBuf> {
        match self {
            Tree::Two { folder } => vec![folder.clone()],
            Tree::One { folders } => folders.clone(),
        }
    }

    /// Names the kind for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Tree::Two { .. } => "cgroup v2",
            Tree::One { .. } => "cgroup v1",
        }
    }

    fn version(&self) -> Version {
        match self {
            Tree::Two { .. } => Version::Two,
            Tree::One { .. } => Version::One,
        }
    }

    /// Makes a group without limits.
    pub fn group(&self, name: &str) -> io::Result<Group> {
        Group::make(self.version(), self.folders().iter().map(|folder| folder.join(name)).collect())
    }

    /// Makes a family that may hold this much memory.
    pub fn family(&self, name: &str, memory: u64) -> io::Result<Family> {
        let folder = match self {
            Tree::Two { folder } => folder,
            // Memory is the first controller.
            Tree::One { folders } => &folders[0],
        };
        let group = Group::make(self.version(), vec![folder.join(name)])?;
        let family = Family { tree: self.clone(), group };
        if self.version() == Version::Two {
            hand_on_controllers(&folder.join(name))?;
        }
        family.group.limit_memory(memory)?;
        Ok(family)
    }
}

impl Family {
    /// Makes the group of one member.
    pub fn group(&self, name: &str, limits: &Limits) -> io::Result<Group> {
        let mut folders: Vec<PathBuf> = self.tree.folders().iter().map(|folder| folder.join(name)).collect();
        folders[0] = self.group.folders[0].join(name);
        let group = Group::make(self.group.version, folders)?;
        group.limit(limits)?;
        Ok(group)
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        self.group.remove();
    }
}

impl Group {
    /// Finds the group that another process is in, which somebody else made and removes. For reading only.
    pub fn of_process(pid: u32) -> io::Result<Group> {
        let membership = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        match locate(&membership, &mounts) {
            Located::One(folders) => Ok(Group { version: Version::One, folders }),
            Located::Two { own, .. } => Ok(Group { version: Version::Two, folders: vec![own] }),
            Located::Nothing(why) => Err(io::Error::other(why)),
        }
    }

    fn make(version: Version, folders: Vec<PathBuf>) -> io::Result<Group> {
        for folder in &folders {
            match fs::create_dir(folder) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Group { version, folders })
    }

    fn limit_memory(&self, bytes: u64) -> io::Result<()> {
        match self.version {
            Version::Two => {
                self.write("memory.max", &bytes.to_string())?;
                self.write_if_there("memory.swap.max", "0")
            }
            Version::One => {
                self.write("memory.limit_in_bytes", &bytes.to_string())?;
                self.write_if_there("memory.memsw.limit_in_bytes", &bytes.to_string())
            }
        }
    }

    fn limit(&self, limits: &Limits) -> io::Result<()> {
        /// The scheduler gives out CPU time once per period.
        const PERIOD: u64 = 100_000;
        let quota = (limits.cpus * PERIOD as f64).max(1_000.0) as u64;
        match self.version {
            Version::Two => {
                self.limit_memory(limits.memory)?;
                // One process out of memory ends the sandbox's interpreter, not its files: no memory.oom.group.
                self.write("pids.max", &limits.processes.to_string())?;
                self.write_if_there("cpu.max", &format!("{quota} {PERIOD}"))
            }
            Version::One => {
                self.limit_memory(limits.memory)?;
                self.write("pids.max", &limits.processes.to_string())?;
                self.write("cpu.cfs_period_us", &PERIOD.to_string())?;
                self.write("cpu.cfs_quota_us", &quota.to_string())
            }
        }
    }

    /// Opens the ways into the group for a process of one thread that enters by itself, one per folder, by writing a zero. What it forks
    /// later is born there.
    ///
    /// Moving another process makes the kernel wait until every core has passed a quiet point: 5 to 15 ms. Under version 1 a single thread that
    /// moves itself through `tasks` waits for nothing.
    pub fn doors(&self) -> io::Result<Vec<OwnedFd>> {
        let door = match self.version {
            Version::One => "tasks",
            Version::Two => "cgroup.procs",
        };
        let open = |folder: &PathBuf| fs::OpenOptions::new().write(true).open(folder.join(door)).map(OwnedFd::from);
        self.folders.iter().map(open).collect()
    }

    /// Tells whether the process is in the group, in every tree.
    pub fn holds(&self, pid: u32) -> io::Result<bool> {
        for folder in &self.folders {
            let inside = fs::read_to_string(folder.join("cgroup.procs"))?;
            if !inside.lines().any(|line| line.parse() == Ok(pid)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the processes in the group, by their numbers on this machine.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let folder = self.folders.first().ok_or(io::ErrorKind::NotFound)?;
        let inside = fs::read_to_string(folder.join("cgroup.procs"))?;
        Ok(inside.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Bytes held now, without cached files, which the kernel gives up when it needs to; and at most since the last `forget_peak`, with them.
    pub fn memory(&self) -> (u64, u64) {
        let (now, peak) = match self.version {
            Version::Two => ("memory.current", "memory.peak"),
            Version::One => ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
        };
        let cached = self.field("memory.stat", "inactive_file") + self.field("memory.stat", "active_file");
        (self.number(now).saturating_sub(cached), self.number(peak))
    }

    /// Processor time that was used here since the group was made, if the kernel counts it.
    pub fn processor_time(&self) -> Option<Duration> {
        match self.version {
            Version::Two => self.find("cpu.stat").map(|_| Duration::from_micros(self.field("cpu.stat", "usage_usec"))),
            Version::One => self.find("cpuacct.usage").map(|_| Duration::from_nanos(self.number("cpuacct.usage"))),
        }
    }

    /// Bytes of files in memory: a sandbox's own folders are nothing else. They are a part of what `memory` tells.
    pub fn files_in_memory(&self) -> u64 {
        self.field("memory.stat", "shmem")
    }

    /// Starts a new measurement of the peak, where the kernel can.
    pub fn forget_peak(&self) {
        let name = match self.version {
            Version::Two => return,
            Version::One => "memory.max_usage_in_bytes",
        };
        // A missing measurement is shown as zero and is not worth an error.
        let _ = self.write(name, "0");
    }

    /// Reads how often memory ran out here.
    pub fn out_of_memory(&self) -> OutOfMemory {
        match self.version {
            Version::Two => OutOfMemory {
                kills: self.field("memory.events.local", "oom_kill"),
                at_own_limit: self.field("memory.events.local", "oom") > 0,
            },
            Version::One => OutOfMemory {
                kills: self.field("memory.oom_control", "oom_kill"),
                // The counters of failures stay zero when the limit of memory and swap together is met first (seen on Linux 6.18). A group
                // that was killed by its own limit was at it.
                at_own_limit: self.was_full(),
            },
        }
    }

    /// Reads a line of a file that has one name and number in each. Zero when there is none.
    fn field(&self, file: &str, name: &str) -> u64 {
        let text = self.find(file).and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    }

    /// Whether the peak of a version 1 group came within a hair of its limit.
    fn was_full(&self) -> bool {
        let limit = self.number("memory.limit_in_bytes");
        self.number("memory.max_usage_in_bytes") >= limit - limit / 32
    }

    /// Removes the group, which must be empty. Removing twice is harmless.
    pub fn remove(&self) {
        for folder in &self.folders {
            remove_folder(folder);
        }
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        self.folders.iter().map(|folder| folder.join(name)).find(|path| path.exists())
    }

    fn number(&self, name: &str) -> u64 {
        let text = self.find(name).and_then(|path| fs::read_to_string(path).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        let path =
            self.find(name).ok_or_else(|| io::Error::other(format!("this kernel's control groups have no {name}")))?;
        fs::write(path, value)
    }

    fn write_if_there(&self, name: &str, value: &str) -> io::Result<()> {
        match self.find(name) {
            Some(path) => fs::write(path, value),
            None => Ok(()),
        }
    }
}

enum Located {
    One(Vec<PathBuf>),
    /// The group of this process, and the top of the tree.
    Two {
        own: PathBuf,
        top: PathBuf,
    },
    Nothing(String),
}

/// Finds the folders of the group this process is in.
fn locate(membership: &str, mounts: &str) -> Located {
    // A line of mountinfo: id parent device root mountpoint options … - type source superoptions
    let mut hierarchies: Vec<(&str, &str, &str, &str)> = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        if let ([_, _, _, root, place, ..], [kind @ ("cgroup" | "cgroup2"), _, options, ..]) = (&left[..], &right[..]) {
            hierarchies.push((kind, root, place, options));
        }
    }
    let path_in = |controller: &str| {
        membership.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (names, path) = (parts.next()?, parts.next()?);
            let matches =
                if controller.is_empty() { names.is_empty() } else { names.split(',').any(|name| name == controller) };
            matches.then_some(path)
        })
    };
    let folder = |root: &str, place: &str, path: &str| {
        let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
        Path::new(place).join(below.trim_start_matches('/'))
    };
    let folder_of = |controller: &str| {
        let (_, root, place, _) = hierarchies
            .iter()
            .find(|(kind, .., options)| *kind == "cgroup" && options.split(',').any(|name| name == controller))?;
        Some(folder(root, place, path_in(controller)?))
    };
    let controllers: Option<Vec<PathBuf>> = CONTROLLERS.into_iter().map(folder_of).collect();
    if let Some(mut folders) = controllers {
        folders.extend(folder_of(COUNTER).filter(|counter| !folders.contains(counter)));
        return Located::One(folders);
    }
    match hierarchies.iter().find(|(kind, ..)| *kind == "cgroup2") {
        Some((_, root, place, _)) => {
            Located::Two { own: folder(root, place, path_in("").unwrap_or("/")), top: PathBuf::from(place) }
        }
        None => Located::Nothing("no control groups are mounted".to_owned()),
    }
}

fn make_folder(folder: &Path) -> Result<(), String> {
    match fs::create_dir(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied || error.kind() == io::ErrorKind::ReadOnlyFilesystem =>
        {
            Err("no control group is delegated to this user".to_owned())
        }
        Err(error) => Err(format!("a control group could not be made: {error}")),
    }
}

/// Lets the groups below this one have the controllers that it has itself.
fn hand_on_controllers(folder: &Path) -> io::Result<()> {
    const WANTED: [&str; 3] = ["memory", "pids", "cpu"];
    let available = fs::read_to_string(folder.join("cgroup.controllers"))?;
    let wanted = available.split_whitespace().filter(|found| WANTED.contains(found));
    let text: Vec<String> = wanted.map(|name| format!("+{name}")).collect();
    fs::write(folder.join("cgroup.subtree_control"), text.join(" "))
}

fn make_version_two(parent: &Path, name: &str) -> Result<Tree, String> {
    let available = fs::read_to_string(parent.join("cgroup.controllers")).map_err(|error| error.to_string())?;
    let has = |controller: &str| available.split_whitespace().any(|found| found == controller);
    if !has("memory") || !has("pids") {
        return Err("the control group of this process has no memory and pids controllers".to_owned());
    }
    let own = parent.join(name);
    make_folder(&own)?;
    if hand_on_controllers(parent).is_err() {
        // A group that has processes of its own cannot hand controllers on: this process moves into a leaf first.
        let leaf = own.join("server");
        make_folder(&leaf)?;
        let moved = fs::write(leaf.join("cgroup.procs"), std::process::id().to_string());
        if let Err(error) = moved.and_then(|()| hand_on_controllers(parent)) {
            let _ = fs::write(parent.join("cgroup.procs"), std::process::id().to_string());
            remove_folder(&leaf);
            remove_folder(&own);
            return Err(format!("the control group of this process is not delegated to it: {error}"));
        }
    }
    hand_on_controllers(&own).map_err(|error| format!("controllers could not be handed on: {error}"))?;
    Ok(Tree::Two { folder: own })
}

/// Moves this process, which has a single thread, through doors that somebody else opened.
pub(crate) fn enter(doors: &[OwnedFd]) -> io::Result<()> {
    // A zero stands for the writer.
    doors.iter().try_for_each(|door| rustix::io::write(door, b"0").map(drop))?;
    Ok(())
}

/// Moves this process, which has a single thread, out of a server's folder, which could not be removed otherwise.
pub fn leave(folder: &Path) {
    if let Some(parent) = folder.parent() {
        let tasks = parent.join("tasks");
        // Version 2 has no such file.
        let door = if tasks.exists() { tasks } else { parent.join("cgroup.procs") };
        let _ = fs::write(door, "0");
    }
}

/// Removes a server's folder with all groups below it, ending processes that are still in them.
pub fn remove_tree(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    for pid in processes.lines().filter_map(|line| line.parse::<i32>().ok()).filter_map(rustix::process::Pid::from_raw)
    {
        if pid != rustix::process::getpid() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    remove_folder(folder);
}

fn remove_folder(folder: &Path) {
    // A process that has just died leaves its group a moment later.
    for attempt in 0..50 {
        match fs::remove_dir(folder) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                std::thread::sleep(Duration::from_millis(attempt.min(10)))
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS_ONE: &str = "\
30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 25 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
34 25 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup rw";

    #[test]
    fn each_controller_of_version_one_is_found_in_its_own_tree() {
        let membership = "5:memory:/jobs/7\n4:cpu,cpuacct:/\n3:pids:/user\n2:freezer:/\n0::/";
        let Located::One(folders) = locate(membership, MOUNTS_ONE) else { panic!("expected version one") };
        let expected = [
            "/sys/fs/cgroup/memory/jobs/7",
            "/sys/fs/cgroup/pids/user",
            "/sys/fs/cgroup/cpu,cpuacct",
            "/sys/fs/cgroup/freezer",
        ];
        assert_eq!(folders, expected.map(PathBuf::from));
    }

    #[test]
    fn the_counter_of_processor_time_is_found_when_it_has_a_tree_of_its_own() {
        let mounts = MOUNTS_ONE.replace("cpu,cpuacct", "cpu");
        let mounts = format!("{mounts}\n35 25 0:31 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct");
        let membership = "5:memory:/jobs/7\n4:cpu:/\n3:pids:/user\n2:freezer:/\n1:cpuacct:/counted\n0::/";
        let Located::One(folders) = locate(membership, &mounts) else { panic!("expected version one") };
        assert_eq!(folders.len(), 5);
        assert_eq!(folders[4], Path::new("/sys/fs/cgroup/cpuacct/counted"));
    }

    #[test]
    fn version_two_is_taken_when_controllers_have_no_trees_of_their_own() {
        let mounts = "34 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup rw";
        let Located::Two { own, top } = locate("0::/user.slice/app", mounts) else { panic!("expected version two") };
        assert_eq!(own, Path::new("/sys/fs/cgroup/user.slice/app"));
        assert_eq!(top, Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn a_mount_that_shows_only_a_part_of_the_tree_is_taken_into_account() {
        let mounts = "34 25 0:30 /box /sys/fs/cgroup rw - cgroup2 cgroup rw";
        let Located::Two { own, .. } = locate("0::/box/inner", mounts) else { panic!("expected version two") };
        assert_eq!(own, Path::new("/sys/fs/cgroup/inner"));
    }

    #[test]
    fn a_kill_counts_only_when_the_groups_own_limit_was_reached() {
        let before = OutOfMemory { kills: 1, at_own_limit: true };
        assert!(OutOfMemory { kills: 2, at_own_limit: true }.happened_since(before));
        assert!(!OutOfMemory { kills: 2, at_own_limit: false }.happened_since(before));
        assert!(!OutOfMemory { kills: 1, at_own_limit: true }.happened_since(before));
    }

    #[test]
    fn without_any_mount_there_is_a_reason() {
        assert!(matches!(locate("0::/", ""), Located::Nothing(_)));
    }
}
