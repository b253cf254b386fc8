//! What a container is made of, as the engine is told. Pure: settings in, a request out.
//!
//! Everything that separates a session from the host is written here, and nothing that a setting says can take any of it away: settings choose the image, the
//! runtime, sizes, variables and folders, and have no other field to write to. `verify` reads the same facts back from what the engine says it has made.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, ContainerInspectResponse, HostConfig, HostConfigCgroupnsModeEnum, HostConfigLogConfig, Mount,
    MountType, ResourcesUlimits,
};

use super::profile;
use crate::sandbox::SandboxLimits;

/// The working folder inside; that of the native backend.
pub const WORK: &str = cellblock_jail::root::WORK;
/// Where forks have their folders.
pub(super) const FORKS: &str = "/forks";
/// Where the runner is inside.
pub(super) const RUNNER: &str = "/opt/cellblock";

/// Labels by which our objects are found again. Nothing that a user writes becomes a label.
pub(super) const LABEL_SERVER: &str = "cellblock.server";
pub(super) const LABEL_PLACE: &str = "cellblock.place";
pub(super) const LABEL_ROLE: &str = "cellblock.role";

/// Processes of ours in each container: the supervisor, the warm one, a steward per session, checkpoints that stand still.
const OWN_PROCESSES: i64 = 48;
/// Descriptors a process may have open.
const OPEN_FILES: i64 = 4_096;

/// A host folder that sessions see below their working folder, or in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerBind {
    pub host: PathBuf,
    /// An absolute path inside.
    pub inside: PathBuf,
    pub writable: bool,
}

/// Who a session is. Never root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// What differs between the containers of a server.
pub(super) struct Wanted<'a> {
    pub(super) image: &'a str,
    pub(super) runtime: Option<&'a str>,
    pub(super) limits: &'a SandboxLimits,
    pub(super) binds: &'a [ContainerBind],
    pub(super) user: User,
    /// The volume that holds the runner.
    pub(super) volume: &'a str,
    pub(super) command: Vec<String>,
    pub(super) labels: HashMap<String, String>,
}

/// Returns the request for a container of sessions.
pub(super) fn session(wanted: Wanted<'_>) -> ContainerCreateBody {
    let limits = wanted.limits;
    let scratch = format!("rw,exec,nosuid,nodev,mode=1777,size={},nr_inodes={}", limits.disk, limits.files.max(16));
    let mut tmpfs = HashMap::from([(FORKS.to_owned(), scratch.clone()), ("/tmp".to_owned(), scratch.clone())]);
    if !wanted.binds.iter().any(|bind| bind.inside == Path::new(WORK)) {
        tmpfs.insert(WORK.to_owned(), scratch);
    }
    let mut mounts = vec![runner_mount(wanted.volume, true)];
    mounts.extend(wanted.binds.iter().map(|bind| Mount {
        target: Some(bind.inside.to_string_lossy().into_owned()),
        source: Some(bind.host.to_string_lossy().into_owned()),
        typ: Some(MountType::BIND),
        read_only: Some(!bind.writable),
        ..Mount::default()
    }));
    let mut body = common(wanted.image, wanted.command, wanted.labels);
    body.user = Some(format!("{}:{}", wanted.user.uid, wanted.user.gid));
    let host = body.host_config.get_or_insert_default();
    host.runtime = wanted.runtime.map(str::to_owned);
    host.memory = Some(signed(limits.memory));
    // The same again: no swap beside it.
    host.memory_swap = host.memory;
    host.nano_cpus = Some((limits.cpus * 1e9) as i64);
    host.pids_limit = Some(i64::from(limits.processes) + OWN_PROCESSES);
    host.shm_size = Some(signed(limits.memory / 2));
    host.tmpfs = Some(tmpfs);
    host.mounts = Some(mounts);
    host.ulimits = Some(vec![
        ulimit("nofile", OPEN_FILES),
        // One, not zero: with zero the kernel still hands a crash to the host's handler when that is a program.
        ulimit("core", 1),
        ulimit("fsize", signed(limits.disk.saturating_add(1))),
        ulimit("memlock", 64 * 1024),
        ulimit("msgqueue", 0),
        ulimit("sigpending", 1_024),
    ]);
    body
}

/// Returns the request for a container that looks at the image and fills the volume of the runner. It runs our code only, and is root inside because a new
/// volume belongs to root; it has no capability either.
pub(super) fn helper(
    image: &str,
    volume: &str,
    command: Vec<String>,
    labels: HashMap<String, String>,
) -> ContainerCreateBody {
    let mut body = common(image, command, labels);
    body.user = Some("0:0".to_owned());
    let host = body.host_config.get_or_insert_default();
    host.mounts = Some(vec![runner_mount(volume, false)]);
    host.tmpfs = Some(HashMap::from([("/tmp".to_owned(), "rw,nosuid,nodev,mode=1777,size=67108864".to_owned())]));
    host.memory = Some(512 * 1024 * 1024);
    host.pids_limit = Some(OWN_PROCESSES);
    body
}

/// What every container of ours has.
fn common(image: &str, command: Vec<String>, labels: HashMap<String, String>) -> ContainerCreateBody {
    let (program, arguments) = command.split_first().expect("a container runs something");
    ContainerCreateBody {
        image: Some(image.to_owned()),
        // The image's own would run before us.
        entrypoint: Some(vec![program.clone()]),
        cmd: Some(arguments.to_vec()),
        hostname: Some("cellblock".to_owned()),
        working_dir: Some("/".to_owned()),
        labels: Some(labels),
        tty: Some(false),
        // Standard input is the lifeline: when its one reader goes, it ends, and with it the container.
        open_stdin: Some(true),
        stdin_once: Some(true),
        attach_stdin: Some(true),
        attach_stdout: Some(true),
        attach_stderr: Some(true),
        network_disabled: None,
        host_config: Some(HostConfig {
            auto_remove: Some(true),
            network_mode: Some("none".to_owned()),
            readonly_rootfs: Some(true),
            cap_drop: Some(vec!["ALL".to_owned()]),
            security_opt: Some(vec!["no-new-privileges".to_owned(), format!("seccomp={}", profile::text())]),
            privileged: Some(false),
            ipc_mode: Some("private".to_owned()),
            cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
            // What is said on the stream is for us, not for a log on somebody's disk.
            log_config: Some(HostConfigLogConfig { typ: Some("none".to_owned()), config: None }),
            oom_score_adj: Some(0),
            init: Some(false),
            ..HostConfig::default()
        }),
        ..ContainerCreateBody::default()
    }
}

fn runner_mount(volume: &str, read_only: bool) -> Mount {
    Mount {
        target: Some(RUNNER.to_owned()),
        source: Some(volume.to_owned()),
        typ: Some(MountType::VOLUME),
        read_only: Some(read_only),
        ..Mount::default()
    }
}

fn ulimit(name: &str, value: i64) -> ResourcesUlimits {
    ResourcesUlimits { name: Some(name.to_owned()), soft: Some(value), hard: Some(value) }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Returns the first thing about a container that the engine made otherwise than it was asked to, if there is one.
pub(super) fn verify(asked: &ContainerCreateBody, made: &ContainerInspectResponse) -> Option<&'static str> {
    let (Some(asked_host), Some(host), Some(config)) = (&asked.host_config, &made.host_config, &made.config) else {
        return Some("the engine does not tell what it has made");
    };
    let is_all = |capability: &String| capability.eq_ignore_ascii_case("all") || capability.starts_with("CAP_");
    let has = |option: &str| host.security_opt.iter().flatten().any(|given| given.starts_with(option));
    let facts = [
        (host.privileged != Some(true), "it is privileged"),
        (host.readonly_rootfs == Some(true), "its root file system can be written to"),
        (host.cap_add.as_ref().is_none_or(Vec::is_empty), "it has capabilities"),
        (
            host.cap_drop.as_ref().is_some_and(|dropped| !dropped.is_empty() && dropped.iter().all(is_all)),
            "its capabilities were not taken",
        ),
        (has("no-new-privileges"), "it could gain privileges"),
        (has("seccomp="), "it has no filter of system calls of ours"),
        (!host.security_opt.iter().flatten().any(|given| given.contains("unconfined")), "a layer was switched off"),
        (host.network_mode.as_deref() == Some("none"), "it has a network"),
        (
            host.pid_mode.as_deref().is_none_or(|mode| mode.is_empty() || mode == "private"),
            "it shares processes with others",
        ),
        (host.ipc_mode.as_deref() != Some("host"), "it shares memory with the host"),
        (
            host.uts_mode.as_deref().is_none_or(|mode| mode.is_empty() || mode == "private"),
            "it shares its name with the host",
        ),
        (host.userns_mode.as_deref() != Some("host"), "it has given up the engine's user namespace"),
        (host.devices.as_ref().is_none_or(Vec::is_empty), "it has devices"),
        (config.user == asked.user, "it runs as another user"),
        (host.memory == asked_host.memory, "its memory is not limited as it must be"),
        (host.pids_limit == asked_host.pids_limit, "its processes are not limited"),
    ];
    facts.into_iter().find(|(holds, _)| !holds).map(|(_, what)| what)
}
