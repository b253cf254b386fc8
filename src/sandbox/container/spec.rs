//! The container configuration sent to the engine. Pure: settings in, a request out.
//!
//! Everything that separates a session from the host is set here, and no setting can remove any of
//! it: settings choose the image, the runtime, sizes, variables and folders, and cannot write to
//! other fields. `verify` checks the same facts in the engine's description of the container it
//! made.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bollard::models::{
    ContainerCreateBody, ContainerInspectResponse, HostConfig, HostConfigCgroupnsModeEnum,
    HostConfigLogConfig, Mount, MountType, ResourcesUlimits,
};

use crate::sandbox::SandboxLimits;

/// The working folder inside; the same as in the native backend.
pub const WORK: &str = cellblock_jail::root::WORK;
/// Parent of the folders of forks.
pub(super) const FORKS: &str = "/forks";
/// Path of the runner inside; beside it are folders of the server that containers show.
pub(super) const RUNNER: &str = "/opt/cellblock/runner";

/// Labels by which our objects are found again. User input never becomes a label.
pub(super) const LABEL_SERVER: &str = "cellblock.server";
pub(super) const LABEL_PLACE: &str = "cellblock.place";
pub(super) const LABEL_ROLE: &str = "cellblock.role";
/// The role of containers that have sessions.
pub(super) const ROLE_SESSION: &str = "session";
/// The role of containers that open the listeners of another. It is visible outside, like the names
/// of these containers and of their image.
pub(super) const ROLE_NETNS_HELPER: &str = "porter";
/// The role of volumes that hold a runner.
pub(super) const ROLE_RUNNER: &str = "runner";
/// Contents of a volume: which runner, and for which image.
pub(super) const LABEL_RUNNER: &str = "cellblock.runner";
pub(super) const LABEL_IMAGE: &str = "cellblock.image";

/// Processes of ours in each container: the supervisor, the warm one, a subreaper per session,
/// suspended checkpoints.
const OWN_PROCESSES: i64 = 48;
/// Maximum number of open descriptors of a process.
const OPEN_FILES: i64 = 4_096;

/// A host folder that sessions see below their working folder, or in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerBind {
    pub host: PathBuf,
    /// An absolute path inside.
    pub inside: PathBuf,
    pub writable: bool,
}

/// The user of a session. Never root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl User {
    /// Returns the owner of a folder, if sessions may be that user. The group root is left out.
    pub(super) fn owner_of(folder: &Metadata) -> Option<User> {
        let (uid, gid) = (folder.uid(), folder.gid());
        (uid != 0).then_some(User {
            uid,
            gid: if gid == 0 { uid } else { gid },
        })
    }

    /// Returns whether this user may list and open the contents of a folder, and change them if
    /// `writing`.
    pub(super) fn may_use(self, folder: &Metadata, writing: bool) -> bool {
        let needed = if writing { 0o7 } else { 0o5 };
        let shift = match () {
            () if folder.uid() == self.uid => 6,
            () if folder.gid() == self.gid => 3,
            () => 0,
        };
        folder.mode() >> shift & needed == needed
    }
}

/// The parameters that differ between the containers of a server.
pub(super) struct SessionContainer<'a> {
    pub(super) image: &'a str,
    pub(super) runtime: Option<&'a str>,
    pub(super) limits: &'a SandboxLimits,
    pub(super) binds: &'a [ContainerBind],
    pub(super) user: User,
    /// The volume that holds the runner.
    pub(super) volume: &'a str,
    pub(super) command: Vec<String>,
    pub(super) labels: HashMap<String, String>,
    /// The seccomp profile: its text, or its path on the engine's machine.
    pub(super) seccomp: &'a str,
    /// Whether the engine knows the option that limits the number of files.
    pub(super) can_count_files: bool,
}

/// Returns the request for a container of sessions.
pub(super) fn session(wanted: SessionContainer<'_>) -> ContainerCreateBody {
    let limits = wanted.limits;
    // Where the engine cannot limit the number of files, their number is limited by the memory each
    // of them takes.
    let files = if wanted.can_count_files {
        format!(",nr_inodes={}", limits.files.max(16))
    } else {
        String::new()
    };
    let scratch = format!("rw,exec,nosuid,nodev,mode=1777,size={}{files}", limits.disk);
    let mut tmpfs = HashMap::from([
        (FORKS.to_owned(), scratch.clone()),
        ("/tmp".to_owned(), scratch.clone()),
    ]);
    if !wanted
        .binds
        .iter()
        .any(|bind| bind.inside == Path::new(WORK))
    {
        tmpfs.insert(WORK.to_owned(), scratch);
    }
    let mut mounts = vec![runner_mount(wanted.volume, true)];
    mounts.extend(self::mounts(wanted.binds));
    let mut body = common(
        wanted.image,
        wanted.command,
        wanted.labels,
        Some(wanted.seccomp),
    );
    body.user = Some(format!("{}:{}", wanted.user.uid, wanted.user.gid));
    let host = body.host_config.get_or_insert_default();
    host.runtime = wanted.runtime.map(str::to_owned);
    host.memory = Some(signed(limits.memory));
    // The same value: no swap in addition.
    host.memory_swap = host.memory;
    host.nano_cpus = Some((limits.cpus * 1e9) as i64);
    host.pids_limit = Some(i64::from(limits.processes) + OWN_PROCESSES);
    host.shm_size = Some(signed(limits.memory / 2));
    host.tmpfs = Some(tmpfs);
    host.mounts = Some(mounts);
    host.ulimits = Some(vec![
        ulimit("nofile", OPEN_FILES),
        // In addition to the limit of the container: this one applies to its user, who is in no
        // other container.
        ulimit("nproc", i64::from(limits.processes) + OWN_PROCESSES),
        // One, not zero: with zero the kernel still passes a crash to the host's core handler if
        // that is a program.
        ulimit("core", 1),
        ulimit("fsize", signed(limits.disk.saturating_add(1))),
        ulimit("memlock", 64 * 1024),
        ulimit("msgqueue", 0),
        ulimit("sigpending", 1_024),
    ]);
    body
}

/// Returns the request for a container that inspects the image and fills the volume of the runner.
/// It runs our code and the image's own, as every container does before its first session. It is
/// root inside because a new volume belongs to root, but it has no capability either.
pub(super) fn helper(
    image: &str,
    volume: &str,
    command: Vec<String>,
    labels: HashMap<String, String>,
    seccomp: &str,
) -> ContainerCreateBody {
    let mut body = common(image, command, labels, Some(seccomp));
    body.user = Some("0:0".to_owned());
    let host = body.host_config.get_or_insert_default();
    host.mounts = Some(vec![runner_mount(volume, false)]);
    host.tmpfs = Some(HashMap::from([(
        "/tmp".to_owned(),
        "rw,nosuid,nodev,mode=1777,size=67108864".to_owned(),
    )]));
    host.memory = Some(512 * 1024 * 1024);
    host.pids_limit = Some(OWN_PROCESSES);
    // Without these values some engines ask for more than their machine grants.
    host.ulimits = Some(vec![
        ulimit("nofile", OPEN_FILES),
        ulimit("nproc", OPEN_FILES),
    ]);
    body
}

/// The parameters of a network helper.
pub(super) struct NetnsHelper<'a> {
    /// An empty image.
    pub(super) image: &'a str,
    /// The container whose network it joins.
    pub(super) container: &'a str,
    /// Everything that it sees: files of this server, and the socket to which it connects.
    pub(super) binds: &'a [ContainerBind],
    pub(super) command: Vec<String>,
    pub(super) variables: Vec<(String, String)>,
    pub(super) labels: HashMap<String, String>,
}

/// Returns the request for a container that opens the listeners of another and ends. It runs only
/// our program. It is the only one with capabilities: over a network that leads nowhere, and over
/// ports. It needs system calls that our own profile does not allow, so it has the engine's
/// profile.
pub(super) fn netns_helper(wanted: NetnsHelper<'_>) -> ContainerCreateBody {
    let mut body = common(wanted.image, wanted.command, wanted.labels, None);
    body.user = Some("0:0".to_owned());
    body.env = Some(
        wanted
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect(),
    );
    // The host name comes with the network; engines do not accept another one.
    body.hostname = None;
    let host = body.host_config.get_or_insert_default();
    host.network_mode = Some(format!("container:{}", wanted.container));
    host.cap_add = Some(
        ["NET_ADMIN", "NET_BIND_SERVICE"]
            .map(str::to_owned)
            .to_vec(),
    );
    host.mounts = Some(mounts(wanted.binds).collect());
    host.memory = Some(512 * 1024 * 1024);
    host.memory_swap = host.memory;
    host.pids_limit = Some(OWN_PROCESSES);
    host.ulimits = Some(vec![
        ulimit("nofile", OPEN_FILES),
        ulimit("nproc", OPEN_FILES),
        ulimit("core", 1),
    ]);
    body
}

/// Returns the configuration that all our containers share. Without a seccomp profile of ours, the
/// engine's applies.
fn common(
    image: &str,
    command: Vec<String>,
    labels: HashMap<String, String>,
    seccomp: Option<&str>,
) -> ContainerCreateBody {
    let seccomp = seccomp.map(|seccomp| format!("seccomp={seccomp}"));
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
        // An engine that stops, or that stops a container, need not wait: no state inside is saved
        // at the end.
        stop_signal: Some("SIGKILL".to_owned()),
        // Standard input is the lifeline: when its only client disconnects, it closes, and with it
        // the container ends.
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
            security_opt: Some(
                std::iter::once("no-new-privileges".to_owned())
                    .chain(seccomp)
                    .collect(),
            ),
            privileged: Some(false),
            ipc_mode: Some("private".to_owned()),
            cgroupns_mode: Some(HostConfigCgroupnsModeEnum::PRIVATE),
            // The stream is for us and must not be logged to a disk.
            log_config: Some(HostConfigLogConfig {
                typ: Some("none".to_owned()),
                config: None,
            }),
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

/// Returns the host folders that a container shows.
pub(super) fn mounts(binds: &[ContainerBind]) -> impl Iterator<Item = Mount> {
    binds.iter().map(|bind| Mount {
        target: Some(bind.inside.to_string_lossy().into_owned()),
        source: Some(bind.host.to_string_lossy().into_owned()),
        typ: Some(MountType::BIND),
        read_only: Some(!bind.writable),
        ..Mount::default()
    })
}

fn ulimit(name: &str, value: i64) -> ResourcesUlimits {
    ResourcesUlimits {
        name: Some(name.to_owned()),
        soft: Some(value),
        hard: Some(value),
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Capabilities that engines give to containers by default.
const USUAL_CAPABILITIES: [&str; 10] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
];

/// Returns the first property of a container that differs from the request, if there is one.
pub(super) fn verify(
    asked: &ContainerCreateBody,
    made: &ContainerInspectResponse,
) -> Option<&'static str> {
    let (Some(asked_host), Some(host), Some(config)) =
        (&asked.host_config, &made.host_config, &made.config)
    else {
        return Some("the engine does not tell what it has made");
    };
    let dropped = |name: &str| {
        let mut all = host.cap_drop.iter().flatten();
        all.any(|given| {
            given.eq_ignore_ascii_case("all") || given.strip_prefix("CAP_").unwrap_or(given) == name
        })
    };
    let has = |option: &str| {
        host.security_opt
            .iter()
            .flatten()
            .any(|given| given.starts_with(option))
    };
    let facts = [
        (host.privileged != Some(true), "it is privileged"),
        (
            host.readonly_rootfs == Some(true),
            "its root file system can be written to",
        ),
        (
            host.cap_add.as_ref().is_none_or(Vec::is_empty),
            "it has capabilities",
        ),
        (
            USUAL_CAPABILITIES.into_iter().all(dropped),
            "its capabilities were not taken",
        ),
        (has("no-new-privileges"), "it could gain privileges"),
        (has("seccomp="), "it has no filter of system calls of ours"),
        (
            !host
                .security_opt
                .iter()
                .flatten()
                .any(|given| given.contains("unconfined")),
            "a layer was switched off",
        ),
        (
            host.network_mode.as_deref() == Some("none"),
            "it has a network",
        ),
        (
            host.pid_mode
                .as_deref()
                .is_none_or(|mode| mode.is_empty() || mode == "private"),
            "it shares processes with others",
        ),
        (
            host.ipc_mode.as_deref() != Some("host"),
            "it shares memory with the host",
        ),
        (
            host.uts_mode
                .as_deref()
                .is_none_or(|mode| mode.is_empty() || mode == "private"),
            "it shares its name with the host",
        ),
        (
            host.userns_mode.as_deref() != Some("host"),
            "it has given up the engine's user namespace",
        ),
        (
            host.devices.as_ref().is_none_or(Vec::is_empty),
            "it has devices",
        ),
        (config.user == asked.user, "it runs as another user"),
        (
            asked_host.runtime.is_none() || host.runtime == asked_host.runtime,
            "it has another runtime",
        ),
        (
            host.memory == asked_host.memory,
            "its memory is not limited as it must be",
        ),
        (
            host.pids_limit == asked_host.pids_limit,
            "its processes are not limited",
        ),
    ];
    facts
        .into_iter()
        .find(|(holds, _)| !holds)
        .map(|(_, what)| what)
}

#[cfg(test)]
mod tests {
    use bollard::models::{ContainerConfig, HostConfig};
    use proptest::prelude::*;

    use super::*;

    fn limits() -> SandboxLimits {
        SandboxLimits {
            memory: 1 << 30,
            family_memory: 2 << 30,
            cpus: 1.5,
            processes: 64,
            disk: 1 << 20,
            files: 100,
        }
    }

    #[test]
    fn folders_that_sessions_could_not_use_are_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let with_mode = |mode: u32| {
            std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            folder.path().metadata().unwrap()
        };
        let found = with_mode(0o700);
        let owner = User {
            uid: found.uid(),
            gid: found.gid(),
        };
        let friend = User {
            uid: found.uid() + 1,
            gid: found.gid(),
        };
        let other = User {
            uid: found.uid() + 1,
            gid: found.gid() + 1,
        };
        // The mode, the users who may write, the users who may read.
        for (mode, writers, readers) in [
            (0o700, &[owner][..], &[owner][..]),
            (0o750, &[owner], &[owner, friend]),
            (0o755, &[owner], &[owner, friend, other]),
            (0o777, &[owner, friend, other], &[owner, friend, other]),
            (0o500, &[], &[owner]),
        ] {
            let found = with_mode(mode);
            for user in [owner, friend, other] {
                assert_eq!(
                    user.may_use(&found, true),
                    writers.contains(&user),
                    "{mode:o} {user:?}"
                );
                assert_eq!(
                    user.may_use(&found, false),
                    readers.contains(&user),
                    "{mode:o} {user:?}"
                );
            }
        }
        with_mode(0o700);
        assert_eq!(
            User::owner_of(&std::fs::metadata("/").unwrap()),
            None,
            "sessions are never root"
        );
    }

    fn wanted<'a>(limits: &'a SandboxLimits, binds: &'a [ContainerBind]) -> SessionContainer<'a> {
        SessionContainer {
            image: "sha256:1",
            runtime: Some("runsc"),
            limits,
            binds,
            user: User { uid: 7, gid: 8 },
            volume: "runner",
            command: vec!["python3".to_owned(), "-I".to_owned()],
            labels: HashMap::from([(LABEL_ROLE.to_owned(), "session".to_owned())]),
            seccomp: "{}",
            can_count_files: true,
        }
    }

    /// Returns how an engine that follows the request describes the container.
    fn made(body: &ContainerCreateBody) -> ContainerInspectResponse {
        ContainerInspectResponse {
            host_config: body.host_config.clone(),
            config: Some(ContainerConfig {
                user: body.user.clone(),
                ..ContainerConfig::default()
            }),
            ..ContainerInspectResponse::default()
        }
    }

    #[test]
    fn the_request_holds_everything_that_separates_a_session() {
        let limits = limits();
        let body = session(wanted(&limits, &[]));
        let host = body.host_config.clone().unwrap();
        let text = serde_json::to_value(&host).unwrap();
        assert_eq!(body.user.as_deref(), Some("7:8"));
        assert_eq!(body.entrypoint, Some(vec!["python3".to_owned()]));
        assert_eq!(
            (body.open_stdin, body.stdin_once, body.tty),
            (Some(true), Some(true), Some(false))
        );
        for (member, expected) in [
            ("NetworkMode", serde_json::json!("none")),
            ("ReadonlyRootfs", serde_json::json!(true)),
            ("CapDrop", serde_json::json!(["ALL"])),
            (
                "SecurityOpt",
                serde_json::json!(["no-new-privileges", "seccomp={}"]),
            ),
            ("Privileged", serde_json::json!(false)),
            ("Runtime", serde_json::json!("runsc")),
            ("AutoRemove", serde_json::json!(true)),
            ("IpcMode", serde_json::json!("private")),
            ("CgroupnsMode", serde_json::json!("private")),
            ("Memory", serde_json::json!(1 << 30)),
            ("MemorySwap", serde_json::json!(1 << 30)),
            ("NanoCpus", serde_json::json!(1_500_000_000)),
            ("PidsLimit", serde_json::json!(64 + OWN_PROCESSES)),
            ("LogConfig", serde_json::json!({"Type": "none"})),
        ] {
            assert_eq!(text[member], expected, "{member}");
        }
        assert_eq!(
            host.tmpfs.unwrap()[WORK],
            "rw,exec,nosuid,nodev,mode=1777,size=1048576,nr_inodes=100"
        );
        assert_eq!(host.mounts.unwrap().len(), 1);
    }

    #[test]
    fn a_network_helper_has_two_capabilities_and_nothing_that_it_could_change() {
        let bind = |name: &str| ContainerBind {
            host: name.into(),
            inside: name.into(),
            writable: false,
        };
        let body = netns_helper(NetnsHelper {
            image: "sha256:1",
            container: "c0ffee",
            binds: &[bind("/program"), bind("/lodge")],
            command: vec!["/loader".to_owned(), "/program".to_owned()],
            variables: vec![("A".to_owned(), "b".to_owned())],
            labels: HashMap::from([(LABEL_ROLE.to_owned(), ROLE_NETNS_HELPER.to_owned())]),
        });
        assert_eq!(
            (body.entrypoint, body.cmd),
            (
                Some(vec!["/loader".to_owned()]),
                Some(vec!["/program".to_owned()])
            )
        );
        assert_eq!(
            (body.hostname, body.env),
            (None, Some(vec!["A=b".to_owned()]))
        );
        assert_eq!(body.labels.unwrap()[LABEL_ROLE], ROLE_NETNS_HELPER);
        let host = body.host_config.unwrap();
        assert!(
            host.mounts
                .iter()
                .flatten()
                .all(|mount| mount.read_only == Some(true))
        );
        assert_eq!(
            (
                host.binds.as_ref(),
                host.tmpfs.as_ref(),
                host.devices.as_ref()
            ),
            (None, None, None)
        );
        let text = serde_json::to_value(&host).unwrap();
        for (member, expected) in [
            ("NetworkMode", serde_json::json!("container:c0ffee")),
            (
                "CapAdd",
                serde_json::json!(["NET_ADMIN", "NET_BIND_SERVICE"]),
            ),
            ("CapDrop", serde_json::json!(["ALL"])),
            ("SecurityOpt", serde_json::json!(["no-new-privileges"])),
            ("ReadonlyRootfs", serde_json::json!(true)),
            ("Privileged", serde_json::json!(false)),
            ("AutoRemove", serde_json::json!(true)),
        ] {
            assert_eq!(text[member], expected, "{member}");
        }
    }

    #[test]
    fn a_container_that_was_made_otherwise_is_noticed() {
        let limits = limits();
        let body = session(wanted(&limits, &[]));
        assert_eq!(verify(&body, &made(&body)), None); // control
        let weaken: [fn(&mut HostConfig); 12] = [
            |host| host.privileged = Some(true),
            |host| host.readonly_rootfs = Some(false),
            |host| host.cap_add = Some(vec!["NET_ADMIN".to_owned()]),
            |host| host.cap_drop = Some(vec!["CHOWN".to_owned()]),
            |host| {
                host.security_opt = Some(vec![
                    "no-new-privileges".to_owned(),
                    "seccomp=unconfined".to_owned(),
                ])
            },
            |host| host.security_opt = Some(vec!["seccomp={}".to_owned()]),
            |host| host.network_mode = Some("bridge".to_owned()),
            |host| host.pid_mode = Some("host".to_owned()),
            |host| host.userns_mode = Some("host".to_owned()),
            |host| host.memory = Some(0),
            |host| host.runtime = Some("runc".to_owned()),
            // Podman's description, which omits the name of the runtime.
            |host| host.runtime = Some("oci".to_owned()),
        ];
        for change in weaken {
            let mut weakened = made(&body);
            change(weakened.host_config.as_mut().unwrap());
            assert!(
                verify(&body, &weakened).is_some(),
                "{:?}",
                weakened.host_config
            );
        }
        let mut other = made(&body);
        other.config.as_mut().unwrap().user = Some("0:0".to_owned());
        assert!(verify(&body, &other).is_some());
        assert!(verify(&body, &ContainerInspectResponse::default()).is_some());
    }

    proptest! {
        #[test]
        fn no_setting_can_write_to_what_separates(
            image in ".{0,40}", runtime in proptest::option::of(".{0,20}"), volume in ".{0,20}",
            paths in proptest::collection::vec((".{1,30}", ".{1,30}", any::<bool>()), 0..4),
            memory in any::<u64>(), cpus in 0.0..1e6f64, processes in any::<u32>(),
        ) {
            let limits = SandboxLimits {
                memory,
                family_memory: memory,
                cpus,
                processes,
                disk: memory,
                files: memory,
            };
            let binds: Vec<ContainerBind> = paths
                .into_iter()
                .map(|(host, inside, writable)| ContainerBind {
                    host: host.into(),
                    inside: inside.into(),
                    writable,
                })
                .collect();
            let body = session(SessionContainer {
                image: &image,
                runtime: runtime.as_deref(),
                volume: &volume,
                ..wanted(&limits, &binds)
            });
            prop_assert_eq!(verify(&body, &made(&body)), None);
            let host = body.host_config.unwrap();
            prop_assert_eq!(host.binds, None);
            prop_assert_eq!(host.volumes_from, None);
            prop_assert_eq!(host.devices, None);
            prop_assert_eq!(host.mounts.unwrap().len(), 1 + binds.len());
        }
    }
}
