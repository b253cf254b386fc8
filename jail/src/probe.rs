//! Probes what this machine can enforce, by reading its settings and by attempts.

use std::fs;
use std::io;
use std::path::Path;

use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};

/// Result of a probe, with the fix if something is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeResult {
    pub works: bool,
    /// A gap of an older kernel in a feature that otherwise works.
    pub limitation: Option<String>,
    /// The feature that was found, or what is missing and why.
    pub what: String,
    /// The exact fix, if there is one.
    pub cure: Option<String>,
}

impl ProbeResult {
    fn works(what: impl Into<String>) -> ProbeResult {
        ProbeResult {
            works: true,
            limitation: None,
            what: what.into(),
            cure: None,
        }
    }

    fn missing(what: impl Into<String>, cure: &str) -> ProbeResult {
        ProbeResult {
            works: false,
            limitation: None,
            what: what.into(),
            cure: Some(cure.to_owned()),
        }
    }
}

/// Probes whether user namespaces can be created, and if not, which setting forbids it.
pub fn user_namespaces() -> ProbeResult {
    let setting = |path: &str| {
        fs::read_to_string(path)
            .ok()
            .map(|text| text.trim().to_owned())
    };
    let is_root = rustix::process::geteuid().is_root();
    if setting("/proc/sys/user/max_user_namespaces").is_some_and(|most| most == "0") {
        return ProbeResult::missing(
            "user namespaces are switched off",
            "sysctl -w user.max_user_namespaces=10000",
        );
    }
    if !is_root
        && setting("/proc/sys/kernel/unprivileged_userns_clone").is_some_and(|value| value == "0")
    {
        return ProbeResult::missing(
            "only root may make user namespaces on this machine",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        );
    }
    // A program with its own AppArmor profile is restricted only by that profile; whether it
    // permits enough is found out at launch.
    let has_profile =
        setting("/proc/self/attr/current").is_some_and(|profile| profile != "unconfined");
    if !is_root
        && !has_profile
        && setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
            .is_some_and(|value| value == "1")
    {
        return ProbeResult::missing(
            "AppArmor takes the rights out of user namespaces made by ordinary programs (Ubuntu \
             23.10 and newer)",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that \
             grants `userns` to the cellblock binary",
        );
    }
    ProbeResult::works("user namespaces can be made")
}

/// A kind of namespace that the jail needs: its flag, its name, and the setting that limits how
/// many a user may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NamespaceKind {
    pub(crate) flag: libc::c_int,
    name: &'static str,
    limit: &'static str,
}

pub(crate) const USER_NAMESPACE: NamespaceKind = NamespaceKind {
    flag: libc::CLONE_NEWUSER,
    name: "user",
    limit: "user.max_user_namespaces",
};
/// The other namespaces of every sandbox.
pub(crate) const OTHER_NAMESPACES: [NamespaceKind; 6] = [
    NamespaceKind {
        flag: libc::CLONE_NEWNS,
        name: "mount",
        limit: "user.max_mnt_namespaces",
    },
    NamespaceKind {
        flag: libc::CLONE_NEWPID,
        name: "pid",
        limit: "user.max_pid_namespaces",
    },
    NamespaceKind {
        flag: libc::CLONE_NEWNET,
        name: "network",
        limit: "user.max_net_namespaces",
    },
    NamespaceKind {
        flag: libc::CLONE_NEWIPC,
        name: "ipc",
        limit: "user.max_ipc_namespaces",
    },
    NamespaceKind {
        flag: libc::CLONE_NEWUTS,
        name: "uts",
        limit: "user.max_uts_namespaces",
    },
    NamespaceKind {
        flag: libc::CLONE_NEWCGROUP,
        name: "cgroup",
        limit: "user.max_cgroup_namespaces",
    },
];

impl NamespaceKind {
    /// Returns which namespace was refused, why, and how to fix it.
    pub(crate) fn refusal(self, error: &io::Error) -> String {
        self.refusal_in(error, container(Path::new("/")), is_filtered())
    }

    fn refusal_in(self, error: &io::Error, container: Option<&str>, filtered: bool) -> String {
        let NamespaceKind { name, limit, .. } = self;
        let cure = match error.raw_os_error() {
            // The kernel's errno for an exhausted limit.
            Some(libc::ENOSPC) => format!("sysctl -w {limit}=10000"),
            Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => match container {
                Some(cure) => cure.to_owned(),
                None if filtered => format!(
                    "a seccomp filter inherited from the parent process forbids it. In a unit of \
                     systemd, remove \
                     RestrictNamespaces= and SystemCallFilter=, or allow {name} namespaces there"
                ),
                None => "a security module such as AppArmor or SELinux forbids it; allow \
                     `userns_create` to this program"
                    .to_owned(),
            },
            _ => return format!("could not make a {name} namespace: {error}"),
        };
        format!("could not make a {name} namespace: {error}; cure: {cure}")
    }
}

/// Returns whether this process already runs under a seccomp filter.
fn is_filtered() -> bool {
    fs::read_to_string("/proc/self/status")
        .is_ok_and(|text| text.lines().any(|line| line == "Seccomp:\t2"))
}

/// Returns how to allow namespaces in the kind of container that this process is in, if it is in
/// one.
pub fn container(root: &Path) -> Option<&'static str> {
    // The kubelet writes this line into every pod, even without a service account.
    let hosts = fs::read_to_string(root.join("etc/hosts")).unwrap_or_default();
    if hosts.starts_with("# Kubernetes-managed hosts file") {
        Some(
            "in Kubernetes, set `seccompProfile: {type: Unconfined}` and `procMount: Unmasked` in \
             the container's securityContext, and \
             `hostUsers: false` in the pod",
        )
    } else if root.join("run/.containerenv").exists() {
        Some(
            "inside Podman, start the container with --security-opt seccomp=unconfined \
             --security-opt unmask=ALL",
        )
    } else if root.join(".dockerenv").exists() {
        Some(
            "inside Docker, start the container with --security-opt seccomp=unconfined \
             --security-opt systempaths=unconfined",
        )
    } else {
        None
    }
}

/// Probes whether the jail may trace its own processes, which interpreters need to enter sandboxes.
pub fn tracing() -> ProbeResult {
    // The other values of this setting restrict which processes can be traced; the jail has the
    // rights that they require.
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) if scope.trim() == "3" => ProbeResult::missing(
            "tracing is switched off until the next start of the machine \
             (kernel.yama.ptrace_scope=3)",
            "start the machine with kernel.yama.ptrace_scope=2 or less",
        ),
        _ => ProbeResult::works("processes can be traced"),
    }
}

/// Probes whether the kernel has landlock.
pub fn landlock() -> ProbeResult {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::WriteFile)
        .and_then(|rules| rules.create());
    match rules {
        Ok(_) => ProbeResult::works("landlock"),
        Err(_) => ProbeResult::missing(
            "the kernel has no landlock",
            "use Linux 5.13 or newer with landlock in the kernel's `lsm=` list",
        ),
    }
}

/// Probes whether filters can be loaded.
pub fn seccomp() -> ProbeResult {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        ProbeResult::works("seccomp allowlist")
    } else {
        ProbeResult::missing(
            "the kernel has no seccomp filters",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> NamespaceKind {
        *OTHER_NAMESPACES
            .iter()
            .find(|kind| kind.flag == libc::CLONE_NEWNET)
            .unwrap()
    }

    #[test]
    fn a_namespace_that_is_used_up_names_its_own_limit() {
        let error = io::Error::from_raw_os_error(libc::ENOSPC);
        let text = network().refusal_in(&error, None, false);
        assert!(
            text.contains("could not make a network namespace"),
            "{text}"
        );
        assert!(
            text.ends_with("cure: sysctl -w user.max_net_namespaces=10000"),
            "{text}"
        );
        assert!(
            USER_NAMESPACE
                .refusal_in(&error, None, false)
                .ends_with("user.max_user_namespaces=10000")
        );
    }

    #[test]
    fn a_forbidden_namespace_names_who_forbids_it() {
        let error = io::Error::from_raw_os_error(libc::EPERM);
        assert!(
            network()
                .refusal_in(&error, None, true)
                .contains("RestrictNamespaces=")
        );
        assert!(
            network()
                .refusal_in(&error, None, false)
                .contains("AppArmor")
        );
        assert!(
            network()
                .refusal_in(&error, Some("leave the container"), true)
                .ends_with("cure: leave the container")
        );
        // Control: an error of another kind gets no unsuitable fix.
        let other = io::Error::from_raw_os_error(libc::ENOMEM);
        assert!(!network().refusal_in(&other, None, true).contains("cure"));
    }

    #[test]
    fn each_kind_of_container_has_a_cure_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(container(root), None);
        fs::write(root.join(".dockerenv"), "").unwrap();
        assert!(container(root).unwrap().contains("Docker"));
        fs::create_dir(root.join("run")).unwrap();
        fs::write(root.join("run/.containerenv"), "").unwrap();
        assert!(container(root).unwrap().contains("Podman"));
        fs::create_dir(root.join("etc")).unwrap();
        fs::write(
            root.join("etc/hosts"),
            "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n",
        )
        .unwrap();
        assert!(container(root).unwrap().contains("Kubernetes"));
    }
}
