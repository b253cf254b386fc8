//! The `/sys` of sandboxes: plain files with the number of CPUs and the limits of a session.
//!
//! Libraries size their pools, caches and heaps by these files: `lscpu`, loky and psutil by the CPU
//! topology, DuckDB, Polars and Ray by the limits of control groups. None of the files are the
//! kernel's. They are written once, into the read-only root of all sandboxes, and contain no
//! information beyond `/proc/cpuinfo` and the settings of the session.
//!
//! Values that change while a session runs (`memory.current`) are left out: a constant number would
//! be wrong. `/proc/meminfo`, which programs require, shows all memory as free: programs read it to
//! find out how much they may use.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Further lines of `/proc/meminfo` that `free`, `top` and psutil read.
const MEMORY_NOT_USED: [&str; 14] = [
    "Buffers",
    "Cached",
    "SwapCached",
    "Active",
    "Inactive",
    "Active(file)",
    "Inactive(file)",
    "SwapTotal",
    "SwapFree",
    "Dirty",
    "Mapped",
    "Shmem",
    "Slab",
    "SReclaimable",
];

/// The limits of a session, as shown inside.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ShownLimits {
    pub memory: u64,
    /// `None` if CPU time is not limited.
    pub cpus: Option<f64>,
}

/// One CPU that sessions may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cpu {
    number: usize,
    core: i64,
    package: i64,
}

/// The versions of control groups that `/proc/self/cgroup` shows inside. Programs look there first,
/// and then for the files of that version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupVersions {
    V2,
    V1AndV2,
}

/// Writes the tree into the folder that becomes `/sys`.
pub(crate) fn write(folder: &Path, limits: &ShownLimits) -> io::Result<()> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    fs::create_dir_all(folder)?;
    for (path, content) in files(&processors()?, limits, versions(&groups)) {
        let path = folder.join(path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, content)?;
        fs::set_permissions(&path, Permissions::from_mode(0o444))?;
    }
    Ok(())
}

/// Returns the `/proc/meminfo` of sandboxes: the memory limit of a session, or the machine's memory
/// if that is smaller.
pub(crate) fn memory_info(limits: &ShownLimits) -> io::Result<String> {
    Ok(memory_lines(limits, &fs::read_to_string("/proc/meminfo")?))
}

fn memory_lines(limits: &ShownLimits, of_machine: &str) -> String {
    let value = |line: &str| line.split_whitespace().nth(1)?.parse().ok();
    let total = of_machine
        .lines()
        .find(|line| line.starts_with("MemTotal:"))
        .and_then(value);
    let kib = (limits.memory / 1024).min(total.unwrap_or(u64::MAX));
    let line = |(name, kib): (&str, u64)| format!("{:<16}{kib:>8} kB\n", format!("{name}:"));
    let whole = ["MemTotal", "MemFree", "MemAvailable"].map(|name| line((name, kib)));
    let nothing = MEMORY_NOT_USED.map(|name| line((name, 0)));
    whole.into_iter().chain(nothing).collect()
}

/// Returns the CPUs that this process, and everything it starts, may run on.
fn processors() -> io::Result<Vec<Cpu>> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let numbers = (0..rustix::thread::CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
    Ok(numbers
        .map(|number| {
            let value = |name: &str| {
                let path = format!("/sys/devices/system/cpu/cpu{number}/topology/{name}");
                fs::read_to_string(path).ok()?.trim().parse().ok()
            };
            // If the host does not report it, each CPU is its own core.
            let core = value("core_id").unwrap_or(number as i64);
            Cpu {
                number,
                core,
                package: value("physical_package_id").unwrap_or(0),
            }
        })
        .collect())
}

fn versions(groups: &str) -> CgroupVersions {
    // Format of a line: number of the hierarchy, controllers, path.
    let has_memory = |line: &str| {
        line.split(':')
            .nth(1)
            .is_some_and(|names| names.split(',').any(|name| name == "memory"))
    };
    if groups.lines().any(has_memory) {
        CgroupVersions::V1AndV2
    } else {
        CgroupVersions::V2
    }
}

fn files(cpus: &[Cpu], limits: &ShownLimits, versions: CgroupVersions) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut put = |path: String, content: String| files.insert(path, content + "\n");
    let all: Vec<usize> = cpus.iter().map(|cpu| cpu.number).collect();
    for name in ["online", "possible", "present"] {
        put(format!("devices/system/cpu/{name}"), list(&all));
    }
    put("devices/system/cpu/offline".to_owned(), String::new());
    let last = all.last().copied().unwrap_or(0);
    put("devices/system/cpu/kernel_max".to_owned(), last.to_string());
    for cpu in cpus {
        let with = |is_near: &dyn Fn(&Cpu) -> bool| -> Vec<usize> {
            cpus.iter()
                .filter(|other| is_near(other))
                .map(|other| other.number)
                .collect()
        };
        let core = with(&|other| (other.package, other.core) == (cpu.package, cpu.core));
        let package = with(&|other| other.package == cpu.package);
        let mut put = |name: &str, content: String| {
            put(
                format!("devices/system/cpu/cpu{}/topology/{name}", cpu.number),
                content,
            );
        };
        put("core_id", cpu.core.to_string());
        put("physical_package_id", cpu.package.to_string());
        put("thread_siblings", mask(&core, last));
        put("thread_siblings_list", list(&core));
        put("core_siblings", mask(&package, last));
        put("core_siblings_list", list(&package));
    }

    let quota = limits.cpus.map(crate::cgroup::cpu_quota);
    let period = crate::cgroup::CPU_PERIOD;
    let mut put = |name: &str, content: String| put(format!("fs/cgroup/{name}"), content);
    put("cgroup.controllers", "cpu memory".to_owned());
    put("memory.max", limits.memory.to_string());
    // The memory limit includes swap.
    put("memory.swap.max", "0".to_owned());
    put(
        "cpu.max",
        quota.map_or(format!("max {period}"), |quota| format!("{quota} {period}")),
    );
    if versions == CgroupVersions::V1AndV2 {
        put("memory/memory.limit_in_bytes", limits.memory.to_string());
        put(
            "cpu/cpu.cfs_quota_us",
            quota.map_or("-1".to_owned(), |quota| quota.to_string()),
        );
        put("cpu/cpu.cfs_period_us", period.to_string());
    }
    files
}

/// Formats numbers as a kernel list: `0-3,8`.
fn list(numbers: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, end)) if *end + 1 == number => *end = number,
            _ => parts.push((number, number)),
        }
    }
    let text = |(from, to): &(usize, usize)| {
        if from == to {
            from.to_string()
        } else {
            format!("{from}-{to}")
        }
    };
    parts.iter().map(text).collect::<Vec<_>>().join(",")
}

/// Formats numbers as a mask in hexadecimal groups of 32 bits, highest first, wide enough for
/// `last`.
fn mask(numbers: &[usize], last: usize) -> String {
    let mut groups = vec![0_u32; last / 32 + 1];
    for number in numbers {
        groups[number / 32] |= 1 << (number % 32);
    }
    groups
        .iter()
        .rev()
        .map(|group| format!("{group:08x}"))
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ShownLimits = ShownLimits {
        memory: 2 << 30,
        cpus: Some(1.5),
    };

    fn cpu(number: usize, core: i64, package: i64) -> Cpu {
        Cpu {
            number,
            core,
            package,
        }
    }

    #[test]
    fn memory_is_what_a_session_may_use_and_the_machine_has() {
        let machine = "MemTotal:       24000000 kB\nMemFree:         9000000 kB\n";
        let text = memory_lines(&LIMITS, machine);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..4],
            [
                "MemTotal:        2097152 kB",
                "MemFree:         2097152 kB",
                "MemAvailable:    2097152 kB",
                "Buffers:               0 kB",
            ]
        );
        let small = memory_lines(&LIMITS, "MemTotal:        1000000 kB\n");
        assert!(
            small.starts_with("MemTotal:        1000000 kB\n"),
            "{small}"
        );
    }

    #[test]
    fn processors_are_listed_with_their_cores() {
        let cpus = [cpu(0, 0, 0), cpu(1, 0, 0), cpu(2, 1, 0), cpu(35, 0, 1)];
        let files = files(&cpus, &LIMITS, CgroupVersions::V2);
        let content = |name: &str| files[&format!("devices/system/cpu/{name}")].as_str();
        assert_eq!(content("online"), "0-2,35\n");
        assert_eq!(content("cpu1/topology/thread_siblings_list"), "0-1\n");
        assert_eq!(
            content("cpu1/topology/thread_siblings"),
            "00000000,00000003\n"
        );
        assert_eq!(content("cpu2/topology/thread_siblings_list"), "2\n");
        assert_eq!(content("cpu2/topology/core_siblings_list"), "0-2\n");
        assert_eq!(
            content("cpu35/topology/core_siblings"),
            "00000008,00000000\n"
        );
        assert_eq!(content("cpu35/topology/physical_package_id"), "1\n");
    }

    #[test]
    fn limits_are_written_as_control_groups_do() {
        let written = files(&[cpu(0, 0, 0)], &LIMITS, CgroupVersions::V2);
        assert_eq!(written["fs/cgroup/memory.max"], "2147483648\n");
        assert_eq!(written["fs/cgroup/cpu.max"], "150000 100000\n");
        assert!(!written.contains_key("fs/cgroup/memory.current"));
        assert!(!written.keys().any(|name| name.contains("limit_in_bytes")));
        let unlimited = ShownLimits {
            cpus: None,
            ..LIMITS
        };
        let written = files(&[cpu(0, 0, 0)], &unlimited, CgroupVersions::V1AndV2);
        assert_eq!(written["fs/cgroup/cpu.max"], "max 100000\n");
        assert_eq!(written["fs/cgroup/cpu/cpu.cfs_quota_us"], "-1\n");
        assert_eq!(
            written["fs/cgroup/memory/memory.limit_in_bytes"],
            "2147483648\n"
        );
    }

    #[test]
    fn the_version_is_that_of_the_memory_controller() {
        assert_eq!(versions("0::/user.slice\n"), CgroupVersions::V2);
        assert_eq!(versions("4:memory:/\n0::/\n"), CgroupVersions::V1AndV2);
        assert_eq!(versions("4:cpu,memory:/\n"), CgroupVersions::V1AndV2);
        assert_eq!(versions("4:name=memory:/\n0::/\n"), CgroupVersions::V2);
    }
}
