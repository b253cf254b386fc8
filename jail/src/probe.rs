//! What this machine can enforce, found out by looking and by trying.

use std::fs;

use landlock::{ABI, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};

/// Answers of the machine, with the cure where something is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub works: bool,
    /// What an older kernel does not cover, when it works otherwise.
    pub but: Option<String>,
    /// What is there, or what is missing and why.
    pub what: String,
    /// The exact cure, when there is one.
    pub cure: Option<String>,
}

impl Finding {
    fn works(what: impl Into<String>) -> Finding {
        Finding { works: true, but: None, what: what.into(), cure: None }
    }

    fn missing(what: impl Into<String>, cure: &str) -> Finding {
        Finding { works: false, but: None, what: what.into(), cure: Some(cure.to_owned()) }
    }
}

/// Whether user namespaces can be made, and if not, which switch forbids it.
pub fn user_namespaces() -> Finding {
    let setting = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let is_root = rustix::process::geteuid().is_root();
    if setting("/proc/sys/user/max_user_namespaces").is_some_and(|most| most == "0") {
        return Finding::missing("user namespaces are switched off", "sysctl -w user.max_user_namespaces=10000");
    }
    if !is_root && setting("/proc/sys/kernel/unprivileged_userns_clone").is_some_and(|value| value == "0") {
        return Finding::missing(
            "only root may make user namespaces on this machine",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        );
    }
    // A program with a profile of its own is restricted by that profile only; whether it grants enough, a launch will tell.
    let has_profile = setting("/proc/self/attr/current").is_some_and(|profile| profile != "unconfined");
    if !is_root
        && !has_profile
        && setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").is_some_and(|value| value == "1")
    {
        return Finding::missing(
            "AppArmor takes the rights out of user namespaces made by ordinary programs (Ubuntu 23.10 and newer)",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that grants `userns` to the cellblock binary",
        );
    }
    Finding::works("user namespaces can be made")
}

/// Whether the jail may trace its own processes, which is how interpreters enter their sandboxes.
pub fn tracing() -> Finding {
    // The other values of this switch restrict whom one may trace; the jail has the rights that they ask for.
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) if scope.trim() == "3" => Finding::missing(
            "tracing is switched off until the next start of the machine (kernel.yama.ptrace_scope=3)",
            "start the machine with kernel.yama.ptrace_scope=2 or less",
        ),
        _ => Finding::works("processes can be traced"),
    }
}

/// Whether the kernel has landlock, and a version that covers what we need.
pub fn landlock() -> Finding {
    let supported = |abi: ABI| {
        Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(<AccessFs as landlock::Access>::from_all(abi))
            .and_then(|rules| rules.create())
            .is_ok()
    };
    let cure = "use Linux 6.2 or newer with landlock in the kernel's `lsm=` list";
    if supported(ABI::V3) {
        Finding::works("landlock")
    } else if supported(ABI::V1) {
        Finding {
            but: Some("this kernel's landlock does not refuse truncation, which Linux 6.2 added".to_owned()),
            cure: Some(cure.to_owned()),
            ..Finding::works("landlock")
        }
    } else {
        Finding::missing("the kernel has no landlock", cure)
    }
}

/// Whether filters can be loaded.
pub fn seccomp() -> Finding {
    let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    if actions.split_whitespace().any(|action| action == "errno") {
        Finding::works("seccomp allowlist")
    } else {
        Finding::missing("the kernel has no seccomp filters", "use a kernel with CONFIG_SECCOMP_FILTER")
    }
}
