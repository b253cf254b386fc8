//! Limits for whole sandboxes: control groups, version 2 and version 1.
//!
//! A server has its own folder, which contains one group for the guardian and the warden and one
//! per sandbox. On a version 1 system each controller has its own tree, so a group is several
//! folders. Under version 2 the folder is in one of these places:
//!
//! ```text
//! UNIT/cellblock-PID-N         the unit of the server, if systemd has delegated it
//! UNIT/cellblock-PID-N-server  the server itself, if it was directly in UNIT
//! SCOPE/cellblock-PID-N        a scope that systemd has created for the guardian
//! cellblock-PID-N              the top of the tree, for root, if systemd cannot be asked
//! OWN/cellblock-PID-N          the group of the server, if there is no systemd
//! ```
//!
//! A group that contains processes cannot enable controllers for its children, so a server that is
//! in UNIT or OWN moves into a leaf. The leaf is beside the folder and not below it, because
//! removing the folder kills every process in it.
//!
//! Everything here is plain files. The last of these removes the groups: the server, the guardian,
//! or the sweep at the next start.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The controllers used on a version 1 system.
const V1_CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "freezer"];
/// The controller of a version 1 system that counts CPU time. It often shares the tree of `cpu`; if
/// it is missing, CPU time is not counted.
const V1_CPU_ACCOUNTING: &str = "cpuacct";
/// The controllers used on a version 2 system.
const V2_CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];
/// The group of the guardian and the warden.
pub const WARDEN_GROUP: &str = "warden";
/// Suffix of the group that a server moves into under version 2.
pub const SERVER_SUFFIX: &str = "-server";
/// Exists if systemd manages the machine, as documented in `sd_booted(3)`.
const SYSTEMD_MARKER: &str = "/run/systemd/system";

/// The scheduler's period for CPU time, in microseconds.
pub(crate) const CPU_PERIOD: u64 = 100_000;

/// Returns the CPU time per period for a group that may use this many CPUs.
pub(crate) fn cpu_quota(cpus: f64) -> u64 {
    // The kernel refuses less than a millisecond.
    (cpus * CPU_PERIOD as f64).max(1_000.0) as u64
}

/// Limits of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CgroupLimits {
    pub memory: u64,
    pub processes: u32,
    pub cpus: f64,
}

/// Location of a server's groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupTree {
    /// One folder for everything.
    V2 {
        folder: PathBuf,
        /// The group that the server had to move into, beside the folder.
        server: Option<PathBuf>,
        /// Whether CPU time can be limited. systemd may delegate only memory and processes.
        limits_cpu: bool,
    },
    /// One folder per controller, in the order of `V1_CONTROLLERS`, followed by the one of
    /// `V1_CPU_ACCOUNTING` if it has its own tree.
    V1 { folders: Vec<PathBuf> },
}

/// One group: the limits of one sandbox.
#[derive(Debug, Clone)]
pub struct Group {
    version: Version,
    folders: Vec<PathBuf>,
}

/// A session, its checkpoints and its forks. Their memory counts against one common limit,
/// whichever of them still exist.
///
/// Under version 1 only memory has such a group. It is removed with the last holder of this value.
#[derive(Debug)]
pub struct FamilyGroup {
    tree: CgroupTree,
    group: Group,
}

/// Out-of-memory counters of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Processes of the group that were killed so far, because of this limit or of one further up.
    kills: u64,
    /// Whether the group's own limit was reached.
    at_own_limit: bool,
}

impl OutOfMemory {
    pub fn new(kills: u64, at_own_limit: bool) -> OutOfMemory {
        OutOfMemory {
            kills,
            at_own_limit,
        }
    }

    /// Returns whether the group's own limit has caused a kill since `before`. A kill because of a
    /// limit further up does not count.
    pub fn happened_since(self, before: OutOfMemory) -> bool {
        self.kills > before.kills && self.at_own_limit
    }

    /// Returns whether a process was killed since `before` although the group's own limit was never
    /// reached: memory ran out further up.
    pub fn happened_outside_since(self, before: OutOfMemory) -> bool {
        self.kills > before.kills && !self.at_own_limit
    }

    /// Returns whether the group's own limit was reached.
    pub fn is_at_own_limit(self) -> bool {
        self.at_own_limit
    }
}

/// Counts the out-of-memory kills around this process, for sessions without their own groups: those
/// of its group, or those of the machine if the kernel does not count them for the group.
pub fn kills_around_this_process() -> u64 {
    let own = Group::of_process(std::process::id())
        .ok()
        .and_then(|group| group.counted_kills());
    let machine = || {
        field_of(
            &fs::read_to_string("/proc/vmstat").unwrap_or_default(),
            "oom_kill",
        )
    };
    own.or_else(machine).unwrap_or(0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Why a server's groups cannot be created without help.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupRefusal {
    pub why: String,
    /// The unit of this process, if systemd manages the tree and can be asked for a scope.
    pub unit: Option<Unit>,
}

/// A systemd unit that contains a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    group: PathBuf,
    /// Whether the user's own systemd manages it.
    pub of_user_manager: bool,
    /// The slice of a service.
    pub slice: Option<String>,
}

impl CgroupTree {
    /// Creates the folder of one server, named `name`, in a place that needs no permission: below
    /// the unit of this process if it is delegated, below its group if there is no systemd.
    /// `guardian` was started by this process and will enter the folder.
    pub fn make(name: &str, guardian: u32) -> Result<CgroupTree, CgroupRefusal> {
        let without_unit = |why: String| CgroupRefusal { why, unit: None };
        let (membership, located) = locate_self().map_err(without_unit)?;
        let (own, top) = match located {
            Located::V1(parents) => return make_v1(&parents, name).map_err(without_unit),
            Located::V2 { own, top } => (own, top),
            Located::Unknown(why) => return Err(without_unit(why)),
        };
        let Some(unit) = Unit::of(&membership, &own).filter(|_| Path::new(SYSTEMD_MARKER).exists())
        else {
            return make_v2(&own, name, &[guardian], &[std::process::id()]).or_else(|why| {
                // Root may still create its own group at the top.
                if is_root() {
                    make_v2(&top, name, &[], &[])
                } else {
                    Err(why)
                }
                .map_err(without_unit)
            });
        };
        if !unit.is_delegated() {
            return Err(CgroupRefusal {
                why: "no control group is delegated to this process".to_owned(),
                unit: Some(unit),
            });
        }
        CgroupTree::make_in_unit(&unit, name, guardian).map_err(|why| CgroupRefusal {
            why,
            unit: Some(unit),
        })
    }

    /// Creates the folder below the unit of this process, which is delegated.
    pub fn make_in_unit(unit: &Unit, name: &str, guardian: u32) -> Result<CgroupTree, String> {
        // A session daemon (`daemon`) is started by a server that stays in the same scope. In a
        // service that server must stay where systemd puts it: a group that enables controllers for
        // its children accepts no process, so the service could not be restarted while sessions are
        // kept.
        let starter = parent_of_same_program().filter(|_| unit.is_scope());
        let servers: Vec<u32> = std::iter::once(std::process::id()).chain(starter).collect();
        make_v2(&unit.group, name, &[guardian], &servers)
    }

    /// Creates the folder in the scope that systemd has moved the guardian into.
    pub fn make_in_scope(name: &str, guardian: u32) -> Result<CgroupTree, String> {
        let group = Group::of_process(guardian).map_err(|error| error.to_string())?;
        make_v2(&group.folders[0], name, &[guardian], &[])
    }

    /// Creates the folder at the top of the tree, which belongs to systemd; for root, if systemd
    /// cannot be asked.
    pub fn make_at_top(name: &str) -> Result<CgroupTree, String> {
        match locate_self()?.1 {
            Located::V2 { top, .. } => make_v2(&top, name, &[], &[]),
            _ => Err("there is no tree of version 2".to_owned()),
        }
    }

    /// Returns whether CPU time is limited.
    pub fn limits_cpu(&self) -> bool {
        match self {
            CgroupTree::V2 { limits_cpu, .. } => *limits_cpu,
            CgroupTree::V1 { .. } => true,
        }
    }

    /// Returns everything that may be left when the server is gone.
    pub fn traces(&self) -> Vec<PathBuf> {
        let server = match self {
            CgroupTree::V2 { server, .. } => server.clone(),
            CgroupTree::V1 { .. } => None,
        };
        self.folders().into_iter().chain(server).collect()
    }

    /// Removes the folders when the guardian is gone, and moves this process back to its previous
    /// group. Removing twice is harmless.
    pub fn remove(&self) {
        for folder in self.folders() {
            remove_tree(&folder);
        }
        if let CgroupTree::V2 {
            server: Some(server),
            ..
        } = self
            && let Some(parent) = server.parent().filter(|_| server.exists())
        {
            let _ = disable_controllers(parent);
            let _ = move_process(std::process::id(), parent);
            // The server that started this one may still be in it.
            let _ = fs::remove_dir(server);
        }
    }

    /// Returns the folders that must be removed when the server is gone.
    pub fn folders(&self) -> Vec<PathBuf> {
        match self {
            CgroupTree::V2 { folder, .. } => vec![folder.clone()],
            CgroupTree::V1 { folders } => folders.clone(),
        }
    }

    /// Returns a display name of the kind.
    pub fn kind(&self) -> &'static str {
        match self {
            CgroupTree::V2 { .. } => "cgroup v2",
            CgroupTree::V1 { .. } => "cgroup v1",
        }
    }

    fn version(&self) -> Version {
        match self {
            CgroupTree::V2 { .. } => Version::V2,
            CgroupTree::V1 { .. } => Version::V1,
        }
    }

    /// Creates a group without limits.
    pub fn group(&self, name: &str) -> io::Result<Group> {
        Group::make(
            self.version(),
            self.folders()
                .iter()
                .map(|folder| folder.join(name))
                .collect(),
        )
    }

    /// Creates a family with this memory limit.
    pub fn family(&self, name: &str, memory: u64) -> io::Result<FamilyGroup> {
        let folder = match self {
            CgroupTree::V2 { folder, .. } => folder,
            // Memory is the first controller.
            CgroupTree::V1 { folders } => &folders[0],
        };
        let group = Group::make(self.version(), vec![folder.join(name)])?;
        let family = FamilyGroup {
            tree: self.clone(),
            group,
        };
        if self.version() == Version::V2 {
            enable_controllers(&folder.join(name))?;
        }
        family.group.limit_memory(memory)?;
        Ok(family)
    }
}

impl FamilyGroup {
    /// Creates the group of one member.
    pub fn group(&self, name: &str, limits: &CgroupLimits) -> io::Result<Group> {
        let mut folders: Vec<PathBuf> = self
            .tree
            .folders()
            .iter()
            .map(|folder| folder.join(name))
            .collect();
        folders[0] = self.group.folders[0].join(name);
        let group = Group::make(self.group.version, folders)?;
        group.limit(limits)?;
        Ok(group)
    }

    /// Reads the out-of-memory counters of all members together.
    pub fn out_of_memory(&self) -> OutOfMemory {
        self.group.out_of_memory()
    }
}

impl Drop for FamilyGroup {
    fn drop(&mut self) {
        self.group.remove();
    }
}

impl Group {
    /// Finds the group of another process, which this process neither created nor removes.
    /// Read-only.
    pub fn of_process(pid: u32) -> io::Result<Group> {
        let membership = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        match locate(&membership, &mounts) {
            Located::V1(folders) => Ok(Group {
                version: Version::V1,
                folders,
            }),
            Located::V2 { own, .. } => Ok(Group {
                version: Version::V2,
                folders: vec![own],
            }),
            Located::Unknown(why) => Err(io::Error::other(why)),
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
            Version::V2 => {
                self.write("memory.max", &bytes.to_string())?;
                self.write_if_there("memory.swap.max", "0")
            }
            Version::V1 => {
                self.write("memory.limit_in_bytes", &bytes.to_string())?;
                self.write_if_there("memory.memsw.limit_in_bytes", &bytes.to_string())
            }
        }
    }

    fn limit(&self, limits: &CgroupLimits) -> io::Result<()> {
        let (quota, period) = (cpu_quota(limits.cpus), CPU_PERIOD);
        match self.version {
            Version::V2 => {
                self.limit_memory(limits.memory)?;
                // An out-of-memory kill must end the sandbox's interpreter but keep its files: no
                // memory.oom.group.
                self.write("pids.max", &limits.processes.to_string())?;
                self.write_if_there("cpu.max", &format!("{quota} {period}"))
            }
            Version::V1 => {
                self.limit_memory(limits.memory)?;
                self.write("pids.max", &limits.processes.to_string())?;
                self.write("cpu.cfs_period_us", &period.to_string())?;
                self.write("cpu.cfs_quota_us", &quota.to_string())
            }
        }
    }

    /// Opens the entry files of the group, one per folder, for a single-threaded process that
    /// enters by itself by writing a zero. Its later children start in the group.
    ///
    /// Moving another process makes the kernel wait until every core has passed a quiescent point:
    /// 5 to 15 ms. Under version 1 a single thread that moves itself through `tasks` does not wait.
    pub fn open_procs(&self) -> io::Result<Vec<OwnedFd>> {
        let file = match self.version {
            Version::V1 => "tasks",
            Version::V2 => "cgroup.procs",
        };
        let open = |folder: &PathBuf| {
            fs::OpenOptions::new()
                .write(true)
                .open(folder.join(file))
                .map(OwnedFd::from)
        };
        self.folders.iter().map(open).collect()
    }

    /// Returns whether the process is in the group, in every tree.
    pub fn contains(&self, pid: u32) -> io::Result<bool> {
        for folder in &self.folders {
            let inside = fs::read_to_string(folder.join("cgroup.procs"))?;
            if !inside.lines().any(|line| line.parse() == Ok(pid)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the processes in the group, by their host pids.
    pub fn processes(&self) -> io::Result<Vec<u32>> {
        let folder = self.folders.first().ok_or(io::ErrorKind::NotFound)?;
        let inside = fs::read_to_string(folder.join("cgroup.procs"))?;
        Ok(inside
            .lines()
            .filter_map(|line| line.parse().ok())
            .collect())
    }

    /// Returns the bytes in use now, without cached files, which the kernel reclaims when needed,
    /// and the peak since the last `forget_peak`, with cached files.
    pub fn memory(&self) -> (u64, u64) {
        let (now, peak) = match self.version {
            Version::V2 => ("memory.current", "memory.peak"),
            Version::V1 => ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
        };
        let cached =
            self.field("memory.stat", "inactive_file") + self.field("memory.stat", "active_file");
        (self.number(now).saturating_sub(cached), self.number(peak))
    }

    /// Returns the CPU time used since the group was created, if the kernel counts it.
    pub fn processor_time(&self) -> Option<Duration> {
        match self.version {
            Version::V2 => self
                .find("cpu.stat")
                .map(|_| Duration::from_micros(self.field("cpu.stat", "usage_usec"))),
            Version::V1 => self
                .find("cpuacct.usage")
                .map(|_| Duration::from_nanos(self.number("cpuacct.usage"))),
        }
    }

    /// Returns the bytes of files in memory, which are the sandbox's own folders. `memory` includes
    /// them.
    pub fn files_in_memory(&self) -> u64 {
        self.field("memory.stat", "shmem")
    }

    /// Resets the peak, if the kernel supports it.
    pub fn forget_peak(&self) {
        let name = match self.version {
            Version::V2 => return,
            Version::V1 => "memory.max_usage_in_bytes",
        };
        // A missing measurement is shown as zero and is not worth an error.
        let _ = self.write(name, "0");
    }

    /// Reads the out-of-memory counters of this group.
    pub fn out_of_memory(&self) -> OutOfMemory {
        match self.version {
            Version::V2 => OutOfMemory {
                kills: self.field("memory.events.local", "oom_kill"),
                at_own_limit: self.field("memory.events.local", "oom") > 0,
            },
            Version::V1 => OutOfMemory {
                kills: self.field("memory.oom_control", "oom_kill"),
                // The failure counters stay zero if the combined limit of memory and swap is
                // reached first (seen on Linux 6.18). A group that was killed by its own limit had
                // reached it.
                at_own_limit: self.was_full(),
            },
        }
    }

    /// Reads a value from a file with one name and number per line. Returns zero if there is none.
    fn field(&self, file: &str, name: &str) -> u64 {
        let text = self
            .find(file)
            .and_then(|path| fs::read_to_string(path).ok())
            .unwrap_or_default();
        field_of(&text, name).unwrap_or(0)
    }

    /// Returns the number of out-of-memory kills in the group, if the kernel counts them.
    fn counted_kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::V2 => "memory.events.local",
            Version::V1 => "memory.oom_control",
        };
        field_of(&fs::read_to_string(self.find(file)?).ok()?, "oom_kill")
    }

    /// Returns whether the peak of a version 1 group came within 1/32 of its limit.
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
        self.folders
            .iter()
            .map(|folder| folder.join(name))
            .find(|path| path.exists())
    }

    fn number(&self, name: &str) -> u64 {
        let text = self
            .find(name)
            .and_then(|path| fs::read_to_string(path).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.find(name).ok_or_else(|| {
            io::Error::other(format!("this kernel's control groups have no {name}"))
        })?;
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
    V1(Vec<PathBuf>),
    /// The group of this process, and the top of the tree.
    V2 {
        own: PathBuf,
        top: PathBuf,
    },
    Unknown(String),
}

/// Finds the folders of the group of this process.
fn locate(membership: &str, mounts: &str) -> Located {
    // A line of mountinfo: id parent device root mountpoint options … - type source superoptions
    let mut hierarchies: Vec<(&str, &str, &str, &str)> = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        if let ([_, _, _, root, place, ..], [kind @ ("cgroup" | "cgroup2"), _, options, ..]) =
            (&left[..], &right[..])
        {
            hierarchies.push((kind, root, place, options));
        }
    }
    let path_in = |controller: &str| {
        membership.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (names, path) = (parts.next()?, parts.next()?);
            let matches = if controller.is_empty() {
                names.is_empty()
            } else {
                names.split(',').any(|name| name == controller)
            };
            matches.then_some(path)
        })
    };
    let folder = |root: &str, place: &str, path: &str| {
        let below = path
            .strip_prefix(root.trim_end_matches('/'))
            .unwrap_or(path);
        Path::new(place).join(below.trim_start_matches('/'))
    };
    let folder_of = |controller: &str| {
        let (_, root, place, _) = hierarchies.iter().find(|(kind, .., options)| {
            *kind == "cgroup" && options.split(',').any(|name| name == controller)
        })?;
        Some(folder(root, place, path_in(controller)?))
    };
    let controllers: Option<Vec<PathBuf>> = V1_CONTROLLERS.into_iter().map(folder_of).collect();
    if let Some(mut folders) = controllers {
        folders.extend(folder_of(V1_CPU_ACCOUNTING).filter(|counter| !folders.contains(counter)));
        return Located::V1(folders);
    }
    match hierarchies.iter().find(|(kind, ..)| *kind == "cgroup2") {
        Some((_, root, place, _)) => Located::V2 {
            own: folder(root, place, path_in("").unwrap_or("/")),
            top: PathBuf::from(place),
        },
        None => Located::Unknown("no control groups are mounted".to_owned()),
    }
}

fn make_folder(folder: &Path) -> Result<(), String> {
    match fs::create_dir(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied
                || error.kind() == io::ErrorKind::ReadOnlyFilesystem =>
        {
            Err("no control group is delegated to this user".to_owned())
        }
        Err(error) => Err(format!("a control group could not be made: {error}")),
    }
}

impl Unit {
    /// Finds the innermost unit in `/proc/PID/cgroup` of a process whose group is `own`.
    fn of(membership: &str, own: &Path) -> Option<Unit> {
        let path = membership
            .lines()
            .find_map(|line| line.strip_prefix("0::"))?;
        let names: Vec<&str> = path.trim_matches('/').split('/').collect();
        let ends = |name: &str, suffix: &str| name.len() > suffix.len() && name.ends_with(suffix);
        let position = names
            .iter()
            .rposition(|name| ends(name, ".service") || ends(name, ".scope"))?;
        let is_scope = ends(names[position], ".scope");
        let manager = names[..position]
            .iter()
            .rposition(|name| name.starts_with("user@") && ends(name, ".service"));
        let slices = &names[manager.map_or(0, |manager| manager + 1)..position];
        let slice = slices
            .last()
            .filter(|name| !is_scope && ends(name, ".slice"));
        Some(Unit {
            group: own.ancestors().nth(names.len() - 1 - position)?.to_owned(),
            of_user_manager: manager.is_some(),
            slice: slice.map(|name| (*name).to_owned()),
        })
    }

    /// Returns its name, such as `cellblock.service`.
    pub fn name(&self) -> &str {
        self.group
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
    }

    /// A scope is created once, around existing processes. systemd starts processes in the group of
    /// a service.
    fn is_scope(&self) -> bool {
        self.name().ends_with(".scope")
    }

    /// Returns whether systemd has delegated this group to us. It marks such groups, for root since
    /// version 236 and for all users since 251. Before that, only the owner shows it: the system
    /// manager gives a group to a user when it delegates it, but all groups of the user's own
    /// manager belong to that user.
    pub fn is_delegated(&self) -> bool {
        let marked = ["user.delegate", "trusted.delegate"].iter().any(|name| {
            let mut value = [0; 1];
            rustix::fs::getxattr(&self.group, *name, &mut value) == Ok(1) && value == *b"1"
        });
        let owned = || {
            use std::os::unix::fs::MetadataExt;
            fs::metadata(&self.group)
                .is_ok_and(|found| found.uid() == rustix::process::geteuid().as_raw())
        };
        marked || !is_root() && !self.of_user_manager && owned()
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Reads the location of this process.
fn locate_self() -> Result<(String, Located), String> {
    let membership = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let located = locate(&membership, &mounts);
    Ok((membership, located))
}

/// Returns the parent of this process, if it runs the same program.
fn parent_of_same_program() -> Option<u32> {
    let parent = rustix::process::getppid()?.as_raw_pid() as u32;
    let program = |process: &str| fs::read_link(format!("/proc/{process}/exe")).ok();
    (program("self").is_some() && program(&parent.to_string()) == program("self")).then_some(parent)
}

fn make_v1(parents: &[PathBuf], name: &str) -> Result<CgroupTree, String> {
    let folders: Vec<PathBuf> = parents.iter().map(|parent| parent.join(name)).collect();
    for folder in &folders {
        make_folder(folder)?;
    }
    Ok(CgroupTree::V1 { folders })
}

/// Enables the controllers of this group for the groups below it.
fn enable_controllers(folder: &Path) -> io::Result<()> {
    let available = fs::read_to_string(folder.join("cgroup.controllers"))?;
    let wanted = available
        .split_whitespace()
        .filter(|found| V2_CONTROLLERS.contains(found));
    let text: Vec<String> = wanted.map(|name| format!("+{name}")).collect();
    fs::write(folder.join("cgroup.subtree_control"), text.join(" "))
}

/// Undoes `enable_controllers`, so that processes may enter the group again. The kernel refuses
/// while a group below still enables them.
fn disable_controllers(folder: &Path) -> io::Result<()> {
    let enabled = fs::read_to_string(folder.join("cgroup.subtree_control"))?;
    let text: Vec<String> = enabled
        .split_whitespace()
        .map(|name| format!("-{name}"))
        .collect();
    fs::write(folder.join("cgroup.subtree_control"), text.join(" "))
}

fn processes_in(folder: &Path) -> Vec<u32> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn move_process(pid: u32, folder: &Path) -> io::Result<()> {
    fs::write(folder.join("cgroup.procs"), pid.to_string())
}

/// Creates the folder below `parent`. Our own processes in `parent` move out of it: guardians into
/// the folder, servers into a leaf beside it.
fn make_v2(
    parent: &Path,
    name: &str,
    guardians: &[u32],
    servers: &[u32],
) -> Result<CgroupTree, String> {
    let available =
        fs::read_to_string(parent.join("cgroup.controllers")).map_err(|error| error.to_string())?;
    let has = |controller: &str| {
        available
            .split_whitespace()
            .any(|found| found == controller)
    };
    if !has("memory") || !has("pids") {
        return Err("the control group has no memory and pids controllers".to_owned());
    }
    let folder = parent.join(name);
    let leaf = leaf_of(&folder);
    make_folder(&folder)?;
    let made = match enable_controllers(parent) {
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => move_processes_out(
            parent,
            &folder.join(WARDEN_GROUP),
            guardians,
            &leaf,
            servers,
        )
        .and_then(|()| {
            enable_controllers(parent).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    "other processes are in the control group of this one".to_owned()
                }
                _ => format!("controllers could not be enabled: {error}"),
            })
        }),
        Err(error) => Err(format!("controllers could not be enabled: {error}")),
        Ok(()) => Ok(()),
    };
    let made = made.and_then(|()| {
        enable_controllers(&folder)
            .map_err(|error| format!("controllers could not be enabled: {error}"))
    });
    if let Err(why) = made {
        for moved in [folder.join(WARDEN_GROUP), leaf.clone()] {
            processes_in(&moved)
                .into_iter()
                .for_each(|pid| drop(move_process(pid, parent)));
            remove_folder(&moved);
        }
        remove_folder(&folder);
        return Err(why);
    }
    let server = Some(leaf).filter(|leaf| leaf.exists());
    Ok(CgroupTree::V2 {
        folder,
        server,
        limits_cpu: has("cpu"),
    })
}

/// Moves our own processes out of a group.
fn move_processes_out(
    group: &Path,
    warden: &Path,
    guardians: &[u32],
    leaf: &Path,
    servers: &[u32],
) -> Result<(), String> {
    let inside = processes_in(group);
    for (pids, target) in [(guardians, warden), (servers, leaf)] {
        for pid in pids.iter().filter(|pid| inside.contains(pid)) {
            make_folder(target)?;
            move_process(*pid, target)
                .map_err(|error| format!("a process could not be moved: {error}"))?;
        }
    }
    Ok(())
}

/// Moves this single-threaded process into a group, through `cgroup.procs` or `tasks` descriptors
/// that another process opened.
pub(crate) fn enter(procs: &[OwnedFd]) -> io::Result<()> {
    // A zero means the writing process.
    procs
        .iter()
        .try_for_each(|file| rustix::io::write(file, b"0").map(drop))?;
    Ok(())
}

/// Returns the group that a guardian was in before it entered a server's folder, under version 2.
pub(crate) fn home(folders: &[PathBuf]) -> Option<PathBuf> {
    let (_, located) = locate_self().ok()?;
    let Located::V2 { own, .. } = located else {
        return None;
    };
    let folder = folders.first()?;
    // The server has moved it already, because a group with processes cannot enable controllers for
    // its children.
    if own.starts_with(folder) {
        folder.parent().map(Path::to_owned)
    } else {
        Some(own)
    }
}

/// Kills the remaining processes in a server's folders and removes the folders. For the guardian,
/// which is in one of the groups and has a single thread.
pub(crate) fn clean_up(folders: &[PathBuf], home: Option<&Path>) {
    match home {
        None => {
            for folder in folders {
                // A process that moves itself through `tasks` does not wait.
                let _ = folder
                    .parent()
                    .map(|parent| fs::write(parent.join("tasks"), "0"));
                remove_tree(folder);
            }
        }
        Some(home) => {
            for folder in folders {
                clean_up_v2(folder, home);
            }
        }
    }
}

fn clean_up_v2(folder: &Path, home: &Path) {
    let warden = folder.join(WARDEN_GROUP);
    for group in groups_in(folder)
        .into_iter()
        .filter(|group| *group != warden)
    {
        remove_tree(&group);
    }
    let pid = std::process::id();
    let is_parent = folder.parent() == Some(home);
    if move_process(pid, home).is_err() && is_parent {
        // It enables controllers only for this folder; otherwise the kernel refuses this.
        let _ = disable_controllers(folder);
        let _ = disable_controllers(home);
        let _ = move_process(pid, home);
    }
    // If it could not leave, the next start or systemd removes the rest.
    if !processes_in(&warden).contains(&pid) {
        remove_tree(folder);
    }
    if is_parent {
        // A live server is still in it, and leaves it by itself.
        let _ = fs::remove_dir(leaf_of(folder));
    }
}

/// Returns the group that the server of a folder may have moved into.
fn leaf_of(folder: &Path) -> PathBuf {
    let mut name = folder.as_os_str().to_owned();
    name.push(SERVER_SUFFIX);
    PathBuf::from(name)
}

/// Removes a path returned by `CgroupTree::traces` after its server has died. Processes in the
/// server's own group are not killed.
pub fn remove_trace(trace: &Path) {
    if trace.to_string_lossy().ends_with(SERVER_SUFFIX) {
        let _ = fs::remove_dir(trace);
    } else {
        remove_tree(trace);
    }
}

fn groups_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Removes a server's folder with all groups below it, and kills the processes that are still in
/// them.
fn remove_tree(folder: &Path) {
    for group in groups_in(folder) {
        remove_tree(&group);
    }
    for pid in processes_in(folder)
        .into_iter()
        .filter_map(|pid| rustix::process::Pid::from_raw(pid as i32))
    {
        if pid != rustix::process::getpid() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    remove_folder(folder);
}

/// Finds a number in a text with one name and number per line.
fn field_of(text: &str, name: &str) -> Option<u64> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    value.trim().parse().ok()
}

fn remove_folder(folder: &Path) {
    // A process that has just died leaves its group slightly later.
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

    const V1_MOUNTS: &str = "\
30 25 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 25 0:29 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
34 25 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup rw";

    #[test]
    fn each_controller_of_version_one_is_found_in_its_own_tree() {
        let membership = "5:memory:/jobs/7\n4:cpu,cpuacct:/\n3:pids:/user\n2:freezer:/\n0::/";
        let Located::V1(folders) = locate(membership, V1_MOUNTS) else {
            panic!("expected version one")
        };
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
        let mounts = V1_MOUNTS.replace("cpu,cpuacct", "cpu");
        let mounts =
            format!("{mounts}\n35 25 0:31 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct");
        let membership =
            "5:memory:/jobs/7\n4:cpu:/\n3:pids:/user\n2:freezer:/\n1:cpuacct:/counted\n0::/";
        let Located::V1(folders) = locate(membership, &mounts) else {
            panic!("expected version one")
        };
        assert_eq!(folders.len(), 5);
        assert_eq!(folders[4], Path::new("/sys/fs/cgroup/cpuacct/counted"));
    }

    #[test]
    fn version_two_is_taken_when_controllers_have_no_trees_of_their_own() {
        let mounts = "34 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup rw";
        let Located::V2 { own, top } = locate("0::/user.slice/app", mounts) else {
            panic!("expected version two")
        };
        assert_eq!(own, Path::new("/sys/fs/cgroup/user.slice/app"));
        assert_eq!(top, Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn a_mount_that_shows_only_a_part_of_the_tree_is_taken_into_account() {
        let mounts = "34 25 0:30 /box /sys/fs/cgroup rw - cgroup2 cgroup rw";
        let Located::V2 { own, .. } = locate("0::/box/inner", mounts) else {
            panic!("expected version two")
        };
        assert_eq!(own, Path::new("/sys/fs/cgroup/inner"));
    }

    fn unit_of(path: &str) -> Option<Unit> {
        Unit::of(
            &format!("0::{path}\n"),
            &Path::new("/top").join(path.trim_start_matches('/')),
        )
    }

    #[test]
    fn the_unit_of_a_process_is_the_innermost_one() {
        let service = unit_of("/system.slice/cells.slice/cellblock.service/server").unwrap();
        assert_eq!(
            service.group,
            Path::new("/top/system.slice/cells.slice/cellblock.service")
        );
        assert_eq!(
            (service.name(), service.is_scope()),
            ("cellblock.service", false)
        );
        assert_eq!(
            (service.slice.as_deref(), service.of_user_manager),
            (Some("cells.slice"), false)
        );

        let users = "/user.slice/user-7.slice/user@7.service";
        let app = unit_of(&format!("{users}/app.slice/app-7.service")).unwrap();
        assert_eq!(
            (app.slice.as_deref(), app.of_user_manager),
            (Some("app.slice"), true)
        );
        let scope = unit_of(&format!(
            "{users}/app.slice/run-7.scope/cellblock-7-0-server"
        ))
        .unwrap();
        assert_eq!(
            (scope.name(), scope.is_scope(), scope.of_user_manager),
            ("run-7.scope", true, true)
        );
        // The slice of a login session contains everything that the user runs.
        let login = unit_of("/user.slice/user-7.slice/session-3.scope").unwrap();
        assert_eq!(
            (login.name(), login.slice.as_deref(), login.of_user_manager),
            ("session-3.scope", None, false)
        );
        assert_eq!(unit_of("/"), None);
        assert_eq!(unit_of("/docker/0123/.scope"), None);
    }

    #[test]
    fn the_server_is_never_below_the_folder_that_is_removed() {
        let folder = Path::new("/sys/fs/cgroup/unit/cellblock-7-0");
        let leaf = leaf_of(folder);
        assert_eq!(leaf, Path::new("/sys/fs/cgroup/unit/cellblock-7-0-server"));
        assert!(!leaf.starts_with(folder));
        let tree = CgroupTree::V2 {
            folder: folder.to_owned(),
            server: Some(leaf.clone()),
            limits_cpu: true,
        };
        assert_eq!(tree.traces(), [folder.to_owned(), leaf]);
        assert_eq!(tree.folders(), [folder]);
    }

    #[test]
    fn removing_a_dead_servers_traces_ends_what_it_left_and_nobody_beside_it() {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts
            .lines()
            .find(|line| line.contains(" - cgroup2 "))
            .and_then(|line| line.split(' ').nth(4));
        let name = format!("cellblock-test-{}", std::process::id());
        let Some(folder) = mount
            .map(|mount| Path::new(mount).join(name))
            .filter(|folder| fs::create_dir(folder).is_ok())
        else {
            println!("skipped: needs cgroup v2 and the right to make groups at its top");
            return;
        };
        let leaf = leaf_of(&folder);
        let inner = folder.join("session-0");
        for group in [&leaf, &inner] {
            fs::create_dir(group).unwrap();
        }
        let [mut inside, mut beside] = [&inner, &leaf].map(|group| {
            let child = std::process::Command::new("sleep")
                .arg("1000")
                .spawn()
                .unwrap();
            move_process(child.id(), group).unwrap();
            child
        });
        remove_trace(&leaf);
        // A zombie keeps its group alive, so the child is reaped while its group is being removed.
        let collected = std::thread::spawn(move || inside.wait().unwrap());
        remove_trace(&folder);
        assert!(!collected.join().unwrap().success());
        assert!(!folder.exists());
        assert!(leaf.exists(), "the group of the server has a process in it");
        assert_eq!(beside.try_wait().unwrap(), None);
        beside.kill().unwrap();
        beside.wait().unwrap();
        remove_trace(&leaf);
        assert!(!leaf.exists());
    }

    #[test]
    fn a_kill_counts_only_when_the_groups_own_limit_was_reached() {
        let before = OutOfMemory {
            kills: 1,
            at_own_limit: true,
        };
        assert!(
            OutOfMemory {
                kills: 2,
                at_own_limit: true
            }
            .happened_since(before)
        );
        assert!(
            !OutOfMemory {
                kills: 2,
                at_own_limit: false
            }
            .happened_since(before)
        );
        assert!(
            !OutOfMemory {
                kills: 1,
                at_own_limit: true
            }
            .happened_since(before)
        );
        assert!(
            OutOfMemory {
                kills: 2,
                at_own_limit: false
            }
            .happened_outside_since(before)
        );
        assert!(
            !OutOfMemory {
                kills: 2,
                at_own_limit: true
            }
            .happened_outside_since(before)
        );
        assert!(
            !OutOfMemory {
                kills: 1,
                at_own_limit: false
            }
            .happened_outside_since(before)
        );
    }

    #[test]
    fn without_any_mount_there_is_a_reason() {
        assert!(matches!(locate("0::/", ""), Located::Unknown(_)));
    }
}
