//! Which system calls a sandbox may make, and which the processes that make sandboxes.
//!
//! The list is data, `seccomp.json`: one line per call, with the arguments it may have and the
//! reason. It is compiled into filters that add up to an allowlist (the kernel takes the stricter
//! answer):
//!
//! - the *jail* filter allows the list and what the jail itself calls. The guardian loads it at its
//!   start; warden, families, inits and everything below inherit it;
//! - the *wide* filter allows the list and the calls needed to enter a sandbox. The zygote loads it once and every fork inherits it;
//! - the *closing* filter refuses the entry calls. A fork loads it as the last step of its lock-down. It is short, because loading is paid per session.
//!
//! One more, the *still* filter, refuses to start programs, with EPERM. An interpreter gets it where programs need somebody's approval; it is one of its own, so
//! that the number of filters shows that it is there.
//!
//! A refused call answers ENOSYS, so that libraries take their fallback. Calls of another architecture, and x32 calls, end the process:
//! their argument checks would mean something else.

use seccompiler::{BpfProgram, TargetArch, sock_filter};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const LIST: &str = include_str!("seccomp.json");

/// The calls that turn a process into another program.
const STARTING: [&str; 2] = ["execve", "execveat"];

/// Set in the numbers of x32 calls, which use the same architecture number as x86-64.
const X32_BIT: u32 = 0x4000_0000;

/// One line of the list.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub syscall: String,
    /// All of these must hold; without any, every argument is allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<Value>,
    /// The reason.
    pub comment: String,
}

/// The list as it is written down.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rules {
    pub common: Vec<Rule>,
    /// Calls that exist only there.
    pub x86_64: Vec<Rule>,
    /// Calls a fork makes on its way into the sandbox, and never again.
    pub entry: Vec<Rule>,
    /// Calls that guardian, warden, families and inits make, and no interpreter.
    jail: Vec<Rule>,
}

/// The filters, ready for the kernel.
#[derive(Debug)]
pub struct Filters {
    pub(crate) jail: BpfProgram,
    pub(crate) wide: BpfProgram,
    pub(crate) closing: BpfProgram,
    still: BpfProgram,
}

/// Reads the list.
pub fn rules() -> Rules {
    serde_json::from_str(LIST).expect("the list is checked by a test")
}

/// Compiles the list for this architecture.
pub fn filters() -> Filters {
    let arch = TargetArch::try_from(std::env::consts::ARCH).expect("Cellblock is built for x86-64 and aarch64 only");
    filters_for(arch)
}

fn filters_for(arch: TargetArch) -> Filters {
    let rules = rules();
    let is_x86_64 = matches!(arch, TargetArch::x86_64);
    let mut allowed = rules.common;
    if is_x86_64 {
        allowed.extend(rules.x86_64);
    }
    allowed.extend(rules.entry.iter().cloned());
    let wide = allowlist(&allowed, arch);
    // A call with and one without conditions is one without.
    let is_free = |call: &Rule| rules.jail.iter().any(|rule| rule.syscall == call.syscall);
    let of_jail: Vec<Rule> = allowed.iter().filter(|call| !is_free(call)).chain(&rules.jail).cloned().collect();
    let jail = allowlist(&of_jail, arch);
    let not_permitted = json!({ "errno": libc::EPERM });
    let closing = compile(&rules.entry, not_permitted.clone(), json!("allow"), arch);
    let starting = allowed.iter().filter(|rule| STARTING.contains(&rule.syscall.as_str()));
    let still = compile(&starting.cloned().collect::<Vec<_>>(), not_permitted, json!("allow"), arch);
    Filters { jail, wide, closing, still }
}

/// A filter that refuses whatever is not in the list.
fn allowlist(rules: &[Rule], arch: TargetArch) -> BpfProgram {
    let mut program = compile(rules, json!("allow"), json!({ "errno": libc::ENOSYS }), arch);
    if matches!(arch, TargetArch::x86_64) {
        // Jumps are relative, so instructions may be put in front.
        program.splice(0..0, refuse_x32());
    }
    program
}

impl Filters {
    /// The closing filter as the array of `struct sock_filter` that the kernel reads.
    pub fn closing_bytes(&self) -> Vec<u8> {
        as_bytes(&self.closing)
    }

    /// The still filter, likewise.
    pub fn still_bytes(&self) -> Vec<u8> {
        as_bytes(&self.still)
    }
}

fn as_bytes(program: &BpfProgram) -> Vec<u8> {
    let step_bytes = |step: &sock_filter| {
        let mut bytes = [0; 8];
        bytes[..2].copy_from_slice(&step.code.to_ne_bytes());
        bytes[2] = step.jt;
        bytes[3] = step.jf;
        bytes[4..].copy_from_slice(&step.k.to_ne_bytes());
        bytes
    };
    program.iter().flat_map(step_bytes).collect()
}

fn compile(rules: &[Rule], on_match: Value, otherwise: Value, arch: TargetArch) -> BpfProgram {
    let source = json!({ "filter": { "mismatch_action": otherwise, "match_action": on_match, "filter": rules } });
    seccompiler::compile_from_json(source.to_string().as_bytes(), arch)
        .expect("the list is checked by a test")
        .remove("filter")
        .expect("the filter was given this name")
}

fn refuse_x32() -> [sock_filter; 3] {
    // Offset 0 of seccomp_data is the call's number.
    let load_number = sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 };
    let if_at_least_x32 = sock_filter { code: 0x35, jt: 0, jf: 1, k: X32_BIT };
    let kill_process = sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS };
    [load_number, if_at_least_x32, kill_process]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Calls that neither a session nor the jail makes.
    const NOBODYS: &[&str] = &[
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "io_uring_setup",
        "keyctl",
        "add_key",
        "request_key",
        "open_by_handle_at",
        "init_module",
        "finit_module",
        "delete_module",
        "kexec_load",
        "kexec_file_load",
        "swapon",
        "reboot",
        "settimeofday",
        "clock_settime",
        "syslog",
        "iopl",
        "ioperm",
        "fanotify_init",
        "modify_ldt",
        "process_vm_writev",
        "chroot",
    ];

    #[test]
    fn the_list_compiles_and_the_closing_filter_is_short() {
        let filters = filters();
        assert!(filters.closing_bytes().len() / 8 < 120, "loading it is paid per session");
        assert!(filters.wide.len().max(filters.jail.len()) < 4096, "the kernel's limit for one program");
    }

    #[test]
    fn the_still_filter_is_there_for_every_call_that_starts_programs() {
        let rules = rules();
        let listed = rules.common.iter().chain(&rules.x86_64).map(|rule| rule.syscall.as_str());
        // Whatever else the kernel has for it is not in the list, and so refused to everybody.
        let starts = |name: &&str| name.starts_with("exec") || *name == "uselib";
        assert_eq!(listed.filter(starts).collect::<BTreeSet<_>>(), BTreeSet::from(STARTING));
        let filters = filters();
        // Two calls are few steps more than none.
        assert!((6..24).contains(&(filters.still_bytes().len() / 8)), "{}", filters.still_bytes().len());
    }

    #[test]
    fn the_list_compiles_for_both_architectures() {
        for arch in [TargetArch::x86_64, TargetArch::aarch64] {
            let filters = filters_for(arch);
            assert!(filters.wide.len() > 200 && filters.jail.len() > 200);
        }
    }

    #[test]
    fn every_line_has_a_reason_and_no_line_is_there_twice() {
        let rules = rules();
        let mut seen = BTreeSet::new();
        for rule in rules.common.iter().chain(&rules.x86_64).chain(&rules.entry).chain(&rules.jail) {
            assert!(rule.comment.len() > 5, "{} has no reason", rule.syscall);
            assert!(
                seen.insert((rule.syscall.clone(), json!(rule.args).to_string())),
                "{} is listed twice",
                rule.syscall
            );
        }
    }

    #[test]
    fn calls_that_must_never_be_listed_are_not() {
        let rules = rules();
        let listed: BTreeSet<&str> =
            rules.common.iter().chain(&rules.x86_64).map(|rule| rule.syscall.as_str()).collect();
        let others = [
            "io_uring_enter",
            "io_uring_register",
            "ptrace",
            "process_vm_readv",
            "process_madvise",
            "kcmp",
            "pidfd_getfd",
            "name_to_handle_at",
            "mount",
            "umount2",
            "pivot_root",
            "move_mount",
            "open_tree",
            "fsopen",
            "fsmount",
            "fsconfig",
            "fspick",
            "mount_setattr",
            "unshare",
            "setns",
            "clone3",
            "swapoff",
            "quotactl",
            "quotactl_fd",
            "acct",
            "adjtimex",
            "clock_adjtime",
            "vhangup",
            "sethostname",
            "setdomainname",
            "lookup_dcookie",
            "seccomp",
            "capset",
            "setresuid",
            "setuid",
            "setgroups",
            "openat2",
            "setxattr",
            "lsetxattr",
            "fsetxattr",
            "landlock_create_ruleset",
            "mq_open",
            "move_pages",
            "migrate_pages",
        ];
        for call in NOBODYS.iter().chain(&others) {
            assert!(!listed.contains(call), "{call} must not be in the list");
        }
    }

    #[test]
    fn calls_that_the_jail_must_never_make_are_not_listed_for_it() {
        let rules = rules();
        for call in NOBODYS {
            assert!(!rules.jail.iter().any(|rule| rule.syscall == *call), "{call} must not be in the list");
        }
    }

    #[test]
    fn the_jails_filter_refuses_what_is_not_listed() {
        use std::os::unix::fs::chroot;
        // A filter belongs to the thread that loads it.
        let refused = std::thread::spawn(|| {
            let before = chroot("").unwrap_err().raw_os_error();
            seccompiler::apply_filter(&filters().jail).unwrap();
            let open = std::fs::read("/proc/self/status").is_ok();
            (before, chroot("").unwrap_err().raw_os_error(), open)
        });
        assert_eq!(refused.join().unwrap(), (Some(libc::ENOENT), Some(libc::ENOSYS), true));
        assert_eq!(chroot("").unwrap_err().raw_os_error(), Some(libc::ENOENT), "control: another thread");
    }

    #[test]
    fn entry_calls_are_closed_with_the_very_conditions_they_were_opened_with() {
        let rules = rules();
        for entry in &rules.entry {
            assert!(
                !rules
                    .common
                    .iter()
                    .chain(&rules.x86_64)
                    .any(|rule| rule.syscall == entry.syscall && rule.args.is_empty()),
                "{} would stay open",
                entry.syscall
            );
        }
    }
}
