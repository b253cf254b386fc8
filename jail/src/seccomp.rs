//! The system calls that a sandbox may make, and those that the processes of the jail may make.
//!
//! The list is data, `seccomp.json`: one line per call, with the allowed arguments and the reason.
//! It is compiled into filters that combine to an allowlist (the kernel applies the strictest
//! result):
//!
//! - the *jail* filter allows the list and the calls of the jail itself. The guardian loads it at
//!   its start; warden, families, inits and everything below inherit it;
//! - the *wide* filter allows the list and the calls needed to enter a sandbox. The zygote loads it
//!   once and every fork inherits it;
//! - the *closing* filter refuses the entry calls. A fork loads it as the last step of its
//!   lock-down. It is short, because every session pays for loading it.
//!
//! The *no-exec* filter refuses to start programs, with EPERM. An interpreter gets it if programs
//! need approval. It is a separate filter, so that the number of filters shows that it is loaded.
//!
//! A refused call returns ENOSYS, so that libraries use their fallback, unless programs handle
//! another errno better: the list of *answers* defines which. Calls that the list allows are not
//! affected by it. Calls of another architecture, and x32 calls, kill the process: their argument
//! checks would mean something else.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, TargetArch, sock_filter};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const SYSCALL_LIST: &str = include_str!("seccomp.json");

/// The calls that replace a process with another program.
const EXEC_CALLS: [&str; 2] = ["execve", "execveat"];

/// Calls that are frequent and whose result depends on their arguments. The kernel caches the
/// result for other calls and runs the filters for these each time, so they come first.
const FREQUENT_CALLS: [&str; 2] = ["openat", "ioctl"];

/// Set in the numbers of x32 calls, which use the same architecture number as x86-64.
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

/// BPF instructions, named after the kernel's constants that they combine.
const BPF_LD_W_ABS: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const BPF_JMP_JA: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const BPF_JMP_JGE_K: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const BPF_RET_K: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// One line of the list.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyscallRule {
    pub syscall: String,
    /// All of these must hold; an empty list allows every argument.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<Value>,
    pub comment: String,
}

/// Result of a refused call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Errno {
    /// No error, but the call is not executed.
    Success,
    Eperm,
    Eopnotsupp,
}

impl Errno {
    pub fn number(self) -> i32 {
        match self {
            Errno::Success => 0,
            Errno::Eperm => libc::EPERM,
            Errno::Eopnotsupp => libc::EOPNOTSUPP,
        }
    }
}

/// A line about a refused call that does not return ENOSYS.
///
/// Its conditions exclude every call that the list allows: an engine that reads the list does not
/// preserve the order of its lines.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrnoRule {
    pub syscall: String,
    #[serde(default)]
    pub args: Vec<Value>,
    pub errno: Errno,
    pub comment: String,
}

impl ErrnoRule {
    /// Returns the calls to which it applies.
    pub fn rule(&self) -> SyscallRule {
        SyscallRule {
            syscall: self.syscall.clone(),
            args: self.args.clone(),
            comment: self.comment.clone(),
        }
    }
}

/// The list in its file format.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyscallRules {
    pub common: Vec<SyscallRule>,
    /// Calls that exist only on x86-64.
    pub x86_64: Vec<SyscallRule>,
    /// Results of refused calls other than ENOSYS.
    pub answers: Vec<ErrnoRule>,
    /// The same for calls that exist only on x86-64.
    pub answers_x86_64: Vec<ErrnoRule>,
    /// Calls that a fork makes while it enters the sandbox, and never again.
    pub entry: Vec<SyscallRule>,
    /// Calls that guardian, warden, families and inits make, but no interpreter.
    jail: Vec<SyscallRule>,
}

/// The filters, ready for the kernel.
#[derive(Debug)]
pub struct Filters {
    pub(crate) jail: BpfProgram,
    pub(crate) wide: BpfProgram,
    pub(crate) closing: BpfProgram,
    no_exec: BpfProgram,
}

/// Reads the list.
pub fn rules() -> SyscallRules {
    serde_json::from_str(SYSCALL_LIST).expect("the list is checked by a test")
}

/// Compiles the list for this architecture.
pub fn filters() -> Filters {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .expect("Cellblock is built for x86-64 and aarch64 only");
    filters_for(arch)
}

fn filters_for(arch: TargetArch) -> Filters {
    let rules = rules();
    let is_x86_64 = matches!(arch, TargetArch::x86_64);
    let (mut allowed, mut answers) = (rules.common, rules.answers);
    if is_x86_64 {
        allowed.extend(rules.x86_64);
        answers.extend(rules.answers_x86_64);
    }
    allowed.extend(rules.entry.iter().cloned());
    let wide = allowlist(&allowed, &answers, arch);
    // If a call has rules with and without conditions, the one without conditions applies.
    let is_free = |call: &SyscallRule| rules.jail.iter().any(|rule| rule.syscall == call.syscall);
    let of_jail: Vec<SyscallRule> = allowed
        .iter()
        .filter(|call| !is_free(call))
        .chain(&rules.jail)
        .cloned()
        .collect();
    // If the jail's filter refuses a call, the result comes from the newer filter, if there is one.
    let jail = allowlist(&of_jail, &[], arch);
    let eperm = json!({ "errno": libc::EPERM });
    // The wide filter allows the entry calls, so the closing filter must return their answers,
    // unless the answer equals its own.
    let closes = |answer: &ErrnoRule| {
        rules
            .entry
            .iter()
            .any(|entry| entry.syscall == answer.syscall)
    };
    answers.retain(|answer| closes(answer) && answer.errno != Errno::Eperm);
    let closing = compile(&rules.entry, eperm.clone(), json!("allow"), arch);
    let closing = answered(&answers, &json!("allow"), closing, arch);
    // The closing filter does not affect these calls.
    let free = FREQUENT_CALLS.map(|name| SyscallRule {
        syscall: name.to_owned(),
        args: Vec::new(),
        comment: String::new(),
    });
    let closing = frequent_first(&free, closing, arch);
    let no_exec = compile(&exec_rules(), eperm, json!("allow"), arch);
    Filters {
        jail,
        wide,
        closing,
        no_exec,
    }
}

/// Returns the calls that replace a process with another program, with all arguments.
fn exec_rules() -> Vec<SyscallRule> {
    let starts = |rule: &SyscallRule| EXEC_CALLS.contains(&rule.syscall.as_str());
    rules().common.into_iter().filter(starts).collect()
}

/// Returns the filters with which processes in containers forbid themselves to start programs, by
/// machine name (`uname -m`). An engine may be on another machine than this program.
///
/// Each is the array of `struct sock_filter` that the kernel reads. It differs from the no-exec
/// filter because it is the only filter: it also refuses to load another one, and kills x32 calls.
pub fn program_filters() -> BTreeMap<&'static str, Vec<u8>> {
    let load_filter = SyscallRule {
        syscall: "prctl".to_owned(),
        args: vec![json!({
            "index": 0, "type": "dword", "op": "eq", "val": libc::PR_SET_SECCOMP,
        })],
        comment: String::new(),
    };
    let refused = [exec_rules(), vec![load_filter]].concat();
    let program = |arch| {
        let eperm = json!({ "errno": libc::EPERM });
        compile(&refused, eperm, json!("allow"), arch)
    };
    let mut x86_64 = program(TargetArch::x86_64);
    x86_64.splice(0..0, refuse_x32());
    BTreeMap::from([
        ("aarch64", as_bytes(&program(TargetArch::aarch64))),
        ("x86_64", as_bytes(&x86_64)),
    ])
}

/// Returns a filter that refuses every call that is not in the list.
fn allowlist(rules: &[SyscallRule], answers: &[ErrnoRule], arch: TargetArch) -> BpfProgram {
    let enosys = json!({ "errno": libc::ENOSYS });
    let end = vec![sock_filter {
        code: BPF_RET_K,
        jt: 0,
        jf: 0,
        k: seccomp_ret(&enosys),
    }];
    let refusals = answered(answers, &enosys, end, arch);
    let list = compile(rules, json!("allow"), enosys.clone(), arch);
    // Behind the list, so that allowed calls do not pay for the answers to refused ones.
    let mut program = frequent_first(rules, followed_by(list, &enosys, refusals), arch);
    if matches!(arch, TargetArch::x86_64) {
        // Jumps are relative, so instructions can be inserted in front.
        program.splice(0..0, refuse_x32());
    }
    program
}

/// Returns a program that first checks for frequent calls that the list allows, one name after the
/// other, and otherwise continues with the next program.
fn frequent_first(rules: &[SyscallRule], next: BpfProgram, arch: TargetArch) -> BpfProgram {
    let enosys = json!({ "errno": libc::ENOSYS });
    FREQUENT_CALLS.iter().rev().fold(next, |next, name| {
        let about: Vec<SyscallRule> = rules
            .iter()
            .filter(|rule| rule.syscall == *name)
            .cloned()
            .collect();
        followed_by(
            compile(&about, json!("allow"), enosys.clone(), arch),
            &enosys,
            next,
        )
    })
}

/// Returns a program that gives these answers, and continues with the next one if none of them
/// applies. `otherwise` is an action that none of them has.
fn answered(
    answers: &[ErrnoRule],
    otherwise: &Value,
    next: BpfProgram,
    arch: TargetArch,
) -> BpfProgram {
    let mut groups: BTreeMap<Errno, Vec<SyscallRule>> = BTreeMap::new();
    for answer in answers {
        groups.entry(answer.errno).or_default().push(answer.rule());
    }
    groups.into_iter().fold(next, |next, (errno, rules)| {
        let program = compile(
            &rules,
            json!({ "errno": errno.number() }),
            otherwise.clone(),
            arch,
        );
        followed_by(program, otherwise, next)
    })
}

/// Makes a program continue with another one wherever it would return this action.
fn followed_by(mut program: BpfProgram, action: &Value, next: BpfProgram) -> BpfProgram {
    let (length, action) = (program.len(), seccomp_ret(action));
    for (index, step) in program.iter_mut().enumerate() {
        if step.code == BPF_RET_K && step.k == action {
            *step = sock_filter {
                code: BPF_JMP_JA,
                jt: 0,
                jf: 0,
                k: (length - index - 1) as u32,
            };
        }
    }
    program.extend(next);
    program
}

/// Encodes an action for the kernel: "allow" or an error.
fn seccomp_ret(action: &Value) -> u32 {
    match action["errno"].as_u64() {
        Some(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
        None => libc::SECCOMP_RET_ALLOW,
    }
}

impl Filters {
    /// Returns the closing filter as the array of `struct sock_filter` that the kernel reads.
    pub fn closing_bytes(&self) -> Vec<u8> {
        as_bytes(&self.closing)
    }

    /// Returns the no-exec filter in the same format.
    pub fn no_exec_bytes(&self) -> Vec<u8> {
        as_bytes(&self.no_exec)
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

fn compile(
    rules: &[SyscallRule],
    on_match: Value,
    otherwise: Value,
    arch: TargetArch,
) -> BpfProgram {
    let source = json!({
        "filter": {
            "mismatch_action": otherwise,
            "match_action": on_match,
            "filter": rules,
        }
    });
    seccompiler::compile_from_json(source.to_string().as_bytes(), arch)
        .expect("the list is checked by a test")
        .remove("filter")
        .expect("the filter was given this name")
}

fn refuse_x32() -> [sock_filter; 3] {
    // Offset 0 of seccomp_data is the number of the call.
    let load_number = sock_filter {
        code: BPF_LD_W_ABS,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let if_at_least_x32 = sock_filter {
        code: BPF_JMP_JGE_K,
        jt: 0,
        jf: 1,
        k: X32_SYSCALL_BIT,
    };
    let kill_process = sock_filter {
        code: BPF_RET_K,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_KILL_PROCESS,
    };
    [load_number, if_at_least_x32, kill_process]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Calls that neither a session nor the jail makes.
    const NEVER_LISTED: &[&str] = &[
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
    ];

    #[test]
    fn the_list_compiles_and_the_closing_filter_is_short() {
        let filters = filters();
        let length = filters.closing_bytes().len() / 8;
        assert!(
            length < 140,
            "{length} steps, and loading it is paid per session"
        );
        assert!(
            filters.wide.len().max(filters.jail.len()) < 4096,
            "the kernel's limit for one program"
        );
    }

    #[test]
    fn a_frequent_call_is_answered_within_a_few_steps() {
        let filters = filters_for(TargetArch::x86_64);
        let steps = |number, arguments| {
            let all = [&filters.jail, &filters.wide, &filters.closing];
            all.map(|filter| verdict_after(filter, number, arguments).1)
                .into_iter()
                .sum::<usize>()
        };
        let open = steps(libc::SYS_openat, [0, 4096, libc::O_RDONLY as u64, 0, 0, 0]);
        let is_terminal = steps(libc::SYS_ioctl, [0, libc::TCGETS, 4096, 0, 0, 0]);
        assert!(open < 40 && is_terminal < 60, "{open}, {is_terminal} steps");
        let rare = steps(
            libc::SYS_mknodat,
            [0, 4096, u64::from(libc::S_IFIFO), 0, 0, 0],
        );
        assert!(rare > 160, "control: a rare call takes {rare} steps");
    }

    #[test]
    fn the_no_exec_filter_covers_every_call_that_starts_programs() {
        let rules = rules();
        let listed = rules
            .common
            .iter()
            .chain(&rules.x86_64)
            .map(|rule| rule.syscall.as_str());
        // Other calls of the kernel for this are not in the list, and so are refused to every
        // process.
        let starts = |name: &&str| name.starts_with("exec") || *name == "uselib";
        assert_eq!(
            listed.filter(starts).collect::<BTreeSet<_>>(),
            BTreeSet::from(EXEC_CALLS)
        );
        let filters = filters();
        // Two calls need only a few instructions more than none.
        assert!(
            (6..24).contains(&(filters.no_exec_bytes().len() / 8)),
            "{}",
            filters.no_exec_bytes().len()
        );
    }

    #[test]
    fn the_filter_for_containers_refuses_programs_and_further_filters() {
        let filters = program_filters();
        let step = |bytes: &[u8]| sock_filter {
            code: u16::from_ne_bytes([bytes[0], bytes[1]]),
            jt: bytes[2],
            jf: bytes[3],
            k: u32::from_ne_bytes(bytes[4..].try_into().unwrap()),
        };
        let program: Vec<_> = filters["x86_64"].chunks_exact(8).map(step).collect();
        let result_of = |number, argument| verdict(&program, number, [argument, 0, 0, 0, 0, 0]);
        let eperm = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        assert_eq!(result_of(libc::SYS_execve, 4096), eperm);
        assert_eq!(result_of(libc::SYS_execveat, 3), eperm);
        let load = libc::PR_SET_SECCOMP as u64;
        assert_eq!(result_of(libc::SYS_prctl, load), eperm);
        // The kernel uses only the lower half.
        assert_eq!(result_of(libc::SYS_prctl, load | 1 << 32), eperm);
        let x32 = i64::from(X32_SYSCALL_BIT);
        for number in [libc::SYS_read | x32, libc::SYS_execve | x32] {
            assert_eq!(result_of(number, 0), libc::SECCOMP_RET_KILL_PROCESS);
        }
        // Controls.
        for (number, argument) in [
            (libc::SYS_read, 0),
            (libc::SYS_prctl, libc::PR_SET_NAME as u64),
            (libc::SYS_clone, 0),
        ] {
            assert_eq!(result_of(number, argument), libc::SECCOMP_RET_ALLOW);
        }
    }

    #[test]
    fn the_runners_tests_have_the_filters_for_containers() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../runner/tests/program_filters.json"
        );
        let theirs: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(theirs, json!(program_filters()), "{path} is out of date");
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
        let answers = rules
            .answers
            .iter()
            .chain(&rules.answers_x86_64)
            .map(ErrnoRule::rule);
        let answers = answers.map(|rule| SyscallRule {
            syscall: format!("answer of {}", rule.syscall),
            ..rule
        });
        let lines = [rules.common, rules.x86_64, rules.entry, rules.jail].concat();
        for rule in lines.into_iter().chain(answers) {
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
        let listed: BTreeSet<&str> = rules
            .common
            .iter()
            .chain(&rules.x86_64)
            .map(|rule| rule.syscall.as_str())
            .collect();
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
            "setgroups",
            "chroot",
            "openat2",
            "setxattr",
            "lsetxattr",
            "fsetxattr",
            "landlock_create_ruleset",
            "mq_open",
            "move_pages",
            "migrate_pages",
        ];
        for call in NEVER_LISTED.iter().chain(&others) {
            assert!(!listed.contains(call), "{call} must not be in the list");
        }
    }

    #[test]
    fn calls_that_the_jail_must_never_make_are_not_listed_for_it() {
        let rules = rules();
        for call in NEVER_LISTED {
            assert!(
                !rules.jail.iter().any(|rule| rule.syscall == *call),
                "{call} must not be in the list"
            );
        }
    }

    #[test]
    fn the_jails_filter_refuses_what_is_not_listed() {
        use rustix::mount::{FsPickFlags, fspick};
        let attempt = || {
            fspick(rustix::fs::CWD, "", FsPickFlags::empty())
                .unwrap_err()
                .raw_os_error()
        };
        // A filter belongs to the thread that loads it.
        let refused = std::thread::spawn(move || {
            let before = attempt();
            seccompiler::apply_filter(&filters().jail).unwrap();
            let open = std::fs::read("/proc/self/status").is_ok();
            (before, attempt(), open)
        });
        assert_eq!(refused.join().unwrap(), (libc::ENOENT, libc::ENOSYS, true));
        assert_eq!(attempt(), libc::ENOENT, "control: another thread");
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

    const AUDIT_ARCH_X86_64: u32 = 0xC000_003E;
    const BPF_ALU_AND_K: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
    const BPF_JMP_JEQ_K: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const BPF_JMP_JGT_K: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;

    /// Returns the result of a filter for an x86-64 call, evaluated like the kernel.
    fn verdict(program: &[sock_filter], number: i64, arguments: [u64; 6]) -> u32 {
        verdict_after(program, number, arguments).0
    }

    /// Like `verdict`, and returns the number of instructions executed.
    fn verdict_after(program: &[sock_filter], number: i64, arguments: [u64; 6]) -> (u32, usize) {
        // struct seccomp_data: number, architecture, instruction pointer, arguments.
        let mut data = Vec::new();
        data.extend((number as u32).to_ne_bytes());
        data.extend(AUDIT_ARCH_X86_64.to_ne_bytes());
        data.extend([0; 8]);
        data.extend(arguments.iter().flat_map(|argument| argument.to_ne_bytes()));
        let (mut accumulator, mut at) = (0_u32, 0);
        for taken in 1.. {
            let step = &program[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { step.jt } else { step.jf });
            match step.code {
                BPF_LD_W_ABS => {
                    let place = step.k as usize;
                    accumulator = u32::from_ne_bytes(data[place..place + 4].try_into().unwrap());
                }
                BPF_ALU_AND_K => accumulator &= step.k,
                BPF_JMP_JA => at += step.k as usize,
                BPF_JMP_JEQ_K => at += jump(accumulator == step.k),
                BPF_JMP_JGT_K => at += jump(accumulator > step.k),
                BPF_JMP_JGE_K => at += jump(accumulator >= step.k),
                BPF_RET_K => return (step.k, taken),
                other => panic!("instruction {other:#x}"),
            }
        }
        unreachable!("a filter ends with an answer")
    }

    /// Returns the result for an interpreter: the newest of the strictest results.
    fn answer(number: i64, arguments: [u64; 6]) -> Result<(), i32> {
        let filters = filters_for(TargetArch::x86_64);
        let verdicts = [&filters.closing, &filters.wide, &filters.jail]
            .map(|each| verdict(each, number, arguments));
        match verdicts
            .into_iter()
            .find(|verdict| *verdict != libc::SECCOMP_RET_ALLOW)
        {
            None => Ok(()),
            Some(errno) if errno & 0xffff_0000 == libc::SECCOMP_RET_ERRNO => {
                Err((errno & 0xffff) as i32)
            }
            Some(other) => panic!("verdict {other:#x}"),
        }
    }

    fn check(number: i64, arguments: &[u64], expected: Result<(), i32>) {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        assert_eq!(
            answer(number, all),
            expected,
            "call {number} with {arguments:?}"
        );
    }

    const DONE_WITHOUT_EFFECT: Result<(), i32> = Err(0);

    #[test]
    fn netlink_is_open_for_routes_and_for_no_other_family() {
        let (netlink, raw) = (
            libc::AF_NETLINK as u64,
            (libc::SOCK_RAW | libc::SOCK_CLOEXEC) as u64,
        );
        check(
            libc::SYS_socket,
            &[netlink, raw, libc::NETLINK_ROUTE as u64],
            Ok(()),
        );
        for family in 1..32 {
            check(libc::SYS_socket, &[netlink, raw, family], Err(libc::ENOSYS));
        }
        check(
            libc::SYS_socket,
            &[libc::AF_VSOCK as u64, raw, 0],
            Err(libc::ENOSYS),
        );
        check(
            libc::SYS_socket,
            &[libc::AF_PACKET as u64, raw, 0],
            Err(libc::ENOSYS),
        );
    }

    #[test]
    fn ids_are_left_to_the_kernel_and_groups_are_not() {
        for call in [
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_setresgid,
            libc::SYS_setregid,
        ] {
            check(call, &[0, 0, 0], Ok(()));
        }
        check(libc::SYS_setgroups, &[0, 0], Err(libc::EPERM));
        check(libc::SYS_capset, &[0, 0], Err(libc::EPERM));
    }

    #[test]
    fn the_core_limit_is_reported_as_set_and_never_set() {
        let core = u64::from(libc::RLIMIT_CORE);
        check(
            libc::SYS_prlimit64,
            &[0, core, 4096, 0],
            DONE_WITHOUT_EFFECT,
        );
        check(libc::SYS_setrlimit, &[core, 4096], DONE_WITHOUT_EFFECT);
        check(
            libc::SYS_prlimit64,
            &[0, core, 4096, 8192],
            Err(libc::EPERM),
        );
        // Controls: reading it, and other limits.
        check(libc::SYS_prlimit64, &[0, core, 0, 8192], Ok(()));
        check(
            libc::SYS_prlimit64,
            &[0, u64::from(libc::RLIMIT_NOFILE), 4096, 0],
            Ok(()),
        );
    }

    #[test]
    fn refusals_answer_what_programs_handle() {
        for mode in [0o4755, 0o2755, 0o6755] {
            check(libc::SYS_chmod, &[4096, mode], Err(libc::EPERM));
            check(libc::SYS_fchmodat, &[0, 4096, mode], Err(libc::EPERM));
            check(libc::SYS_openat, &[0, 4096, 0o101, mode], Err(libc::EPERM));
        }
        check(libc::SYS_chmod, &[4096, 0o1755], Ok(())); // control
        let device = u64::from(libc::S_IFCHR | 0o666);
        check(
            libc::SYS_mknodat,
            &[0, 4096, device, 0x103],
            Err(libc::EPERM),
        );
        check(
            libc::SYS_mknodat,
            &[0, 4096, u64::from(libc::S_IFIFO | 0o666), 0],
            Ok(()),
        ); // control
        for call in [
            libc::SYS_setxattr,
            libc::SYS_fsetxattr,
            libc::SYS_lremovexattr,
        ] {
            check(call, &[4096, 4096, 4096, 0], Err(libc::EOPNOTSUPP));
        }
        for call in [
            libc::SYS_clock_settime,
            libc::SYS_sethostname,
            libc::SYS_mount,
            libc::SYS_chroot,
        ] {
            check(call, &[], Err(libc::EPERM));
        }
        check(
            libc::SYS_ioctl,
            &[3, libc::SIOCETHTOOL, 4096],
            Err(libc::EOPNOTSUPP),
        );
        // Calls that are in no list.
        for call in [
            libc::SYS_io_uring_setup,
            libc::SYS_clone3,
            libc::SYS_openat2,
            4000,
        ] {
            check(call, &[], Err(libc::ENOSYS));
        }
    }

    #[test]
    fn terminals_can_be_used_and_nothing_can_be_typed_into_them() {
        for request in [
            libc::TIOCSTI,
            libc::TIOCLINUX,
            libc::TIOCCONS,
            libc::TIOCSETD,
        ] {
            check(libc::SYS_ioctl, &[0, request, 4096], Err(libc::EPERM));
            // The kernel uses only the lower half.
            check(
                libc::SYS_ioctl,
                &[0, request | 1 << 32, 4096],
                Err(libc::EPERM),
            );
        }
        for request in [
            libc::TIOCSCTTY,
            libc::TIOCGPTN,
            libc::TIOCSPTLCK,
            libc::TCSETS,
            libc::TIOCSWINSZ,
        ] {
            check(libc::SYS_ioctl, &[0, request, 4096], Ok(()));
        }
    }

    #[test]
    fn no_answer_is_given_to_a_call_that_the_list_allows() {
        let rules = rules();
        let listed = [rules.common, rules.x86_64].concat();
        for answer in rules.answers.iter().chain(&rules.answers_x86_64) {
            // A line without conditions would hide all others from an engine, in either list.
            let about: Vec<_> = listed
                .iter()
                .filter(|rule| rule.syscall == answer.syscall)
                .collect();
            assert!(
                about.is_empty() || !answer.args.is_empty(),
                "{}",
                answer.syscall
            );
            assert!(
                about.iter().all(|rule| !rule.args.is_empty()),
                "{}",
                answer.syscall
            );
        }
    }
}
