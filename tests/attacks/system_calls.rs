//! Results of system calls: the kernel's surface as a session sees it.
//!
//! One list holds everywhere, but results differ between backends. Natively a call that is not
//! listed does not exist (ENOSYS), unless it is needed to enter the sandbox, which a second filter
//! refuses (EPERM), or programs handle another errno, which the list defines. Engines do the same,
//! and old ones always return EPERM.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use cellblock_jail::seccomp;
use cellblock_jail::wire::OmittedLayer;
use serde_json::{Value, json};

use crate::support::native::{self, Builder, Native, run};
use crate::support::places::{Place, in_every_place};
use crate::support::{is_root, skipped};

const EPERM: i64 = 1;
const EINVAL: i64 = 22;
const ENOSPC: i64 = 28;
const ENOSYS: i64 = 38;
const EOPNOTSUPP: i64 = 95;

/// Numbers and names of this architecture, from the kernel's headers.
const CALLS: &str = include_str!("calls_x86_64.txt");

/// Calls by number, from Python. A result is zero or the errno. Addresses are those of `room`,
/// where one is needed.
pub(super) const CALLER: &str = "
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
room = ctypes.create_string_buffer(4096)
def call(number, *arguments):
    ctypes.set_errno(0)
    arguments = [ctypes.addressof(room) if argument == 'room' else argument for argument in \
    arguments]
    answer = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(argument) for argument in \
    arguments])
    return 0 if answer >= 0 else ctypes.get_errno()
def in_child(work):
    # Whatever a call does to its process, it does to a child.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, 'rb') as answers:
        text = answers.read()
    os.waitpid(child, 0)
    return json.loads(text)
";

fn numbers() -> Option<BTreeMap<&'static str, i64>> {
    if !cfg!(target_arch = "x86_64") {
        skipped("x86-64 (the table of calls is of that architecture)");
        return None;
    }
    let pair = |line: &'static str| {
        line.split_once(' ')
            .map(|(number, name)| (name, number.parse().expect("a number")))
    };
    Some(CALLS.lines().filter_map(pair).collect())
}

/// A backend whose sessions have every layer but the filter: the control. The kernel is the same on
/// every backend.
fn without_filter() -> &'static Native {
    static BACKEND: OnceLock<Native> = OnceLock::new();
    BACKEND.get_or_init(|| {
        Builder::new("minimal")
            .leave_out(&[OmittedLayer::Seccomp])
            .start()
    })
}

fn is_refused(answer: &Value) -> bool {
    [json!(ENOSYS), json!(EPERM), json!(EOPNOTSUPP)].contains(answer)
}

/// Returns whether the list defines an errno for a call.
fn is_answered(name: &str) -> bool {
    let rules = seccomp::rules();
    rules
        .answers
        .iter()
        .chain(&rules.answers_x86_64)
        .any(|answer| answer.syscall == name)
}

/// Calls that must be refused, with arguments that are harmless where they are not.
const REFUSED: &[(&str, &str)] = &[
    // A second way to make almost every call, around the filter.
    ("io_uring_setup", "1, 'room'"),
    ("io_uring_enter", "-1, 0, 0, 0, 0, 0"),
    ("io_uring_register", "-1, 0, 0, 0"),
    // Programs and probes inside the kernel.
    ("bpf", "0, 'room', 0"),
    ("perf_event_open", "'room', 0, -1, -1, 0"),
    ("userfaultfd", "0"),
    // Keyrings are not part of any namespace.
    ("keyctl", "0, -3, 0"),
    ("add_key", "0, 0, 0, 0, 0"),
    ("request_key", "0, 0, 0, 0"),
    // The memory and descriptors of other processes.
    ("ptrace", "16, 0, 0, 0"),
    ("process_vm_readv", "1, 0, 0, 0, 0, 0"),
    ("process_vm_writev", "1, 0, 0, 0, 0, 0"),
    ("process_madvise", "-1, 0, 0, 0, 0"),
    ("kcmp", "1, 1, 0, 0, 0"),
    ("pidfd_getfd", "-1, 0, 0"),
    // Files without a path.
    ("open_by_handle_at", "-1, 'room', 0"),
    ("name_to_handle_at", "-1, 'room', 'room', 'room', 0"),
    // Mounts and roots.
    ("mount", "0, 0, 0, 0, 0"),
    ("umount2", "0, 0"),
    ("pivot_root", "0, 0"),
    ("chroot", "0"),
    ("move_mount", "-1, 'room', -1, 'room', 0"),
    ("open_tree", "-1, 'room', 0"),
    ("fsopen", "'room', 0"),
    ("fsconfig", "-1, 0, 0, 0, 0"),
    ("fsmount", "-1, 0, 0"),
    ("fspick", "-1, 'room', 0"),
    ("mount_setattr", "-1, 'room', 0, 'room', 32"),
    // Namespaces.
    ("setns", "-1, 0"),
    ("unshare", "0"),
    ("clone3", "'room', 0"),
    // The kernel as a whole.
    ("init_module", "0, 0, 0"),
    ("finit_module", "-1, 0, 0"),
    ("delete_module", "'room', 0"),
    ("kexec_load", "0, 0, 0, 0"),
    ("kexec_file_load", "-1, -1, 0, 0, 0"),
    ("swapon", "'room', 0"),
    ("swapoff", "'room'"),
    ("reboot", "0, 0, 0, 0"),
    ("acct", "0"),
    ("quotactl", "0, 0, 0, 0"),
    ("syslog", "3, 'room', 0"),
    ("settimeofday", "0, 0"),
    ("clock_settime", "0, 'room'"),
    ("adjtimex", "'room'"),
    ("iopl", "0"),
    ("ioperm", "0, 1, 0"),
    ("modify_ldt", "0, 'room', 16"),
    ("sethostname", "'room', 0"),
    ("setdomainname", "'room', 0"),
    ("fanotify_init", "0, 0"),
    ("vhangup", ""),
    ("migrate_pages", "0, 0, 0, 0"),
    ("move_pages", "0, 0, 0, 0, 0, 0"),
    // Objects with names of their own.
    ("mq_open", "'room', 0, 0, 0"),
    ("msgget", "0, 512"),
    // Identity and restrictions of the process itself.
    ("setgroups", "-1, 0"),
    ("seccomp", "2, 0, 'room'"),
    ("landlock_create_ruleset", "0, 0, 1"),
    ("personality", "0x0040000"),
    ("prctl", "8, 0, 0, 0, 0"),
    // Around the checks of `openat`.
    ("openat2", "-1, 'room', 0, 0"),
    ("setxattr", "'room', 'room', 'room', 0, 0"),
    // Input into a terminal, and related calls.
    ("ioctl", "0, 0x5412, 'room'"),
    ("ioctl", "0, 0x541C, 'room'"),
    ("ioctl", "0, 0x541D, 0"),
    ("ioctl", "0, 0x5423, 'room'"),
    // Devices.
    ("mknodat", "-100, 'room', 0o020666, 0x103"),
];

/// Calls that an engine's filter allows, because it is loaded before the supervisor starts: with
/// these a process can only drop its own rights.
const OPEN_IN_CONTAINERS: [&str; 3] = [
    "landlock_create_ruleset",
    "landlock_add_rule",
    "landlock_restrict_self",
];

fn is_open(place: Place, name: &str) -> bool {
    !place.is_native() && OPEN_IN_CONTAINERS.contains(&name)
}

/// `uretprobe` and `uprobe` (Linux 6.11 and 6.18) are called by code that the kernel itself puts
/// into a traced process. No filter applies to them, and a call from any other place gets SIGILL or
/// an error.
const KERNEL_TRAMPOLINES: [i64; 2] = [335, 336];

/// Name, allowed arguments, altered arguments.
const CONDITIONS: &[(&str, &str, &str)] = &[
    (
        "openat",
        "-100, 'room', 0o101, 0o644",
        "-100, 'room', 0o101, 0o4755",
    ),
    (
        "openat",
        "-100, 'room', 0o101, 0o644",
        "-100, 'room', 0o101, 0o2755",
    ),
    ("open", "'room', 0o101, 0o644", "'room', 0o101, 0o4755"),
    ("creat", "'room', 0o644", "'room', 0o4755"),
    ("chmod", "'room', 0o755", "'room', 0o4755"),
    ("fchmodat", "-100, 'room', 0o755", "-100, 'room', 0o2755"),
    (
        "fchmodat2",
        "-100, 'room', 0o755, 0",
        "-100, 'room', 0o4755, 0",
    ),
    ("prlimit64", "0, 4, 0, 'room'", "0, 4, 'room', 'room'"),
    ("personality", "0xffffffff", "8"),
    ("socket", "1, 1, 0", "17, 3, 0"),
    ("socket", "16, 3, 0", "16, 3, 15"),
    ("socketpair", "1, 1, 0, 'room'", "2, 1, 0, 'room'"),
    ("prctl", "3, 0, 0, 0, 0", "8, 0, 0, 0, 0"),
    ("prctl", "39, 0, 0, 0, 0", "22, 2, 'room', 0, 0"),
];

/// Which processes may access its memory, and that no privilege is gained: the processes of a
/// container set these for themselves, so its filter allows them.
const NATIVE_CONDITIONS: &[(&str, &str, &str)] = &[
    ("prctl", "3, 0, 0, 0, 0", "4, 1, 0, 0, 0"),
    ("prctl", "39, 0, 0, 0, 0", "38, 1, 0, 0, 0"),
];

/// Every flag of `clone` and `unshare` that requests a namespace.
const NAMESPACE_FLAGS: [u64; 8] = [
    0x0000_0080, // time
    0x0002_0000, // mount
    0x0200_0000, // cgroup
    0x0400_0000, // uts
    0x0800_0000, // ipc
    0x1000_0000, // user
    0x2000_0000, // pid
    0x4000_0000, // network
];

/// Lists interfaces, tries to add an address, a route and an interface, and to open other families
/// of netlink, after `begin`.
fn netlink(begin: &str) -> String {
    format!(
        "{CALLER}
import errno, socket, struct
def ask(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.bind((0, 0))
        kernel.send(struct.pack('=IHHII', 16 + len(body), kind, 1 | 4 | flags, 1, 0) + body)
        return -struct.unpack_from('=i', kernel.recv(65536), 16)[0]
def attribute(kind, value):
    return struct.pack('=HH', 4 + len(value), kind) + value + bytes(-len(value) % 4)
def changes():
    address = bytes((10, 9, 8, 7))
    return [
        ask(20, 0x600, struct.pack('=BBBBI', 2, 32, 0, 0, 1) + attribute(1, address) + \
        attribute(2, address)),
        ask(16, 0, struct.pack('=BBHiII', 0, 0, 0, 1, 1, 1)),
        ask(24, 0x400, struct.pack('=BBBBBBBBI', 2, 32, 0, 0, 255, 3, 254, 2, 0) + attribute(1, \
        bytes((10, 9, 8, 6)))
            + attribute(4, struct.pack('=i', 1))),
    ]
def families():
    made = []
    for family in range(1, 32):
        try:
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family).close()
            made.append(family)
        except OSError:
            pass
    return made
def all_of_it():
    ({begin})()
    return {{'interfaces': sorted(name for _, name in socket.if_nameindex()), 'changes': \
    changes(), 'other families': families()}}
print(json.dumps(in_child(all_of_it)))"
    )
}

/// Sets its own ids in every way, then others.
const IDS: &str = "
def facts():
    wanted = ('Uid', 'Gid', 'CapEff', 'CapPrm')
    return [line.rstrip() for line in open('/proc/self/status') if line.startswith(wanted)]
def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.errno
    return 0
def attempts():
    user, group = os.getuid(), os.getgid()
    before = facts()
    own = [attempt(os.setuid, user), attempt(os.setgid, group), attempt(os.setreuid, user, user), \
    attempt(os.setregid, group, group),
           attempt(os.setresuid, -1, user, -1), attempt(os.setresgid, -1, group, -1)]
    others = [attempt(os.setresgid, 65534, 65534, 65534), attempt(os.setgid, group + 1), \
    attempt(os.setgroups, [0]),
              attempt(os.setresuid, 65534, 65534, 65534), attempt(os.setuid, 0), \
              attempt(os.setreuid, user + 1, user + 1)]
    return {'own': own, 'others': others, 'before': before, 'after': facts()}
";

/// Requests each namespace, by `unshare` and by `clone`; prints all results in one list.
fn namespaces(numbers: &BTreeMap<&str, i64>) -> String {
    format!(
        "{CALLER}
def cloned(flags):
    answer = libc.syscall(ctypes.c_long({clone}), ctypes.c_long(flags | 17), 0, 0, 0, 0)
    if answer == 0: os._exit(0)
    return 0 if answer > 0 else ctypes.get_errno()
flags = {NAMESPACE_FLAGS:?}
# The time namespace has no flag in clone: its bit is part of the signal there.
print(json.dumps(in_child(lambda: [call({unshare}, flag) for flag in flags] + [cloned(flag) for \
flag in flags[1:]])))",
        clone = numbers["clone"],
        unshare = numbers["unshare"],
    )
}

in_every_place! {
    async fn calls_that_could_reach_past_the_sandbox_are_refused_by_the_filter(place) {
        let Some(numbers) = numbers() else { return };
        let calls: String = REFUSED
            .iter()
            .map(|(name, arguments)| format!("    ({}, {arguments}),\n", numbers[name]))
            .collect();
        let code = format!(
            "{CALLER}\ncalls = [\n{calls}]\nprint(json.dumps(in_child(lambda: [call(*each) for \
             each in calls])))"
        )
        .replace(", )", ",)");
        let inside = place.session().json(&code).await;
        let control = without_filter().session().json(&code).await;
        let mut missing = Vec::new();
        for (index, (name, arguments)) in REFUSED.iter().enumerate() {
            let (answer, without) = (&inside[index], &control[index]);
            if is_open(place, name) {
                assert_eq!(answer, without, "{name}({arguments})");
                continue;
            }
            assert!(is_refused(answer), "{name}({arguments}) answered {answer}");
            if without == ENOSYS {
                missing.push(*name);
                continue;
            }
            // Where an engine returns EPERM for everything, the kernel also returns it for a
            // missing privilege. The next case has numbers that the kernel does not know. So this
            // case is one where the list returns EPERM on purpose; that the filter returns it is a
            // test of the jail.
            if (!place.is_native() || is_answered(name)) && answer == EPERM && without == EPERM {
                continue;
            }
            assert_ne!(answer, without, "{name}({arguments}): without the filter the answer is the \
                                         same");
        }
        if !missing.is_empty() {
            skipped(&format!("a kernel with {} (their controls)", missing.join(", ")));
        }
        assert!(missing.len() < 12, "{missing:?}");
    }

    async fn every_number_that_is_not_listed_is_refused(place) {
        let Some(numbers) = numbers() else { return };
        let rules = seccomp::rules();
        let rules = rules.common.iter().chain(&rules.x86_64).map(|rule| rule.syscall.as_str());
        let open = OPEN_IN_CONTAINERS.into_iter().filter(|name| is_open(place, name));
        let listed: BTreeSet<i64> =
            rules.chain(open).map(|name| numbers[name]).chain(KERNEL_TRAMPOLINES).collect();
        let unlisted: Vec<i64> = (0..1024).filter(|number| !listed.contains(number)).collect();
        let code = format!(
            "{CALLER}\nprint(json.dumps(in_child(lambda: {{n: call(n, -1, -1, -1, -1, -1, -1) for \
             n in {unlisted:?}}})))"
        );
        let session = place.session();
        let answers = session.json(&code).await;
        let answers = answers.as_object().unwrap();
        assert_eq!(answers.len(), unlisted.len());
        let open: Vec<_> = answers.iter().filter(|(_, answer)| !is_refused(answer)).collect();
        assert!(open.is_empty(), "{open:?}");
        // Control: the same attempt with a listed call has another result.
        let control =
            format!("{CALLER}\nprint(json.dumps(in_child(lambda: [call(n, -1, -1, -1) for n in (0, \
                     1, 3, 5)])))");
        assert_eq!(session.json(&control).await, json!([9, 9, 9, 9]));
    }

    async fn arguments_decide_where_a_call_is_listed_with_conditions(place) {
        let Some(numbers) = numbers() else { return };
        let of_place = if place.is_native() { NATIVE_CONDITIONS } else { &[] };
        let pairs: Vec<_> = CONDITIONS.iter().chain(of_place).collect();
        let line = |name: &str, arguments: &str| format!("call({}, {arguments})", numbers[name]);
        let calls: Vec<String> = pairs
            .iter()
            .map(|(name, allowed, altered)| {
                format!("fresh([lambda: {}, lambda: {}])", line(name, allowed), line(name, altered))
            })
            .collect();
        let code = format!(
            "{CALLER}
room.value = b'/tmp/conditional'
def fresh(calls):
    def one_by_one():
        answers = []
        for each in calls:
            room.value = b'/tmp/conditional'
            open('/tmp/conditional', 'w').close()
            answers.append(each())
            if os.path.exists('/tmp/conditional'): os.unlink('/tmp/conditional')
        return answers
    return in_child(one_by_one)
print(json.dumps([{}]))",
            calls.join(", ")
        );
        let answers = place.session().json(&code).await;
        for (index, (name, allowed, altered)) in pairs.iter().enumerate() {
            assert_eq!(answers[index][0], json!(0), "{name}({allowed})");
            assert!(is_refused(&answers[index][1]), "{name}({altered}) answered \
                 {}", answers[index][1]);
        }
    }

    async fn only_internet_unix_and_route_sockets_can_be_made(place) {
        let code = format!(
            "{CALLER}
import socket
def families(make):
    made = []
    for family in range(64):
        for kind in (1, 2, 3, 5):
            try:
                make(family, kind)
            except OSError:
                continue
            made.append(family)
            break
    return made
print(json.dumps([families(lambda family, kind: socket.socket(family, kind).close()),
                  families(lambda family, kind: [end.close() for end in socket.socketpair(family, \
                  kind)])]))"
        );
        assert_eq!(place.session().json(&code).await, json!([[1, 2, 10, 16], [1]]));
        // Control: outside there are more, such as those for packets (17) for root.
        let outside: Value = serde_json::from_str(&native::outside(&code)).unwrap();
        let outside: Vec<u64> = serde_json::from_value(outside[0].clone()).unwrap();
        if is_root() {
            assert!(outside.len() > 4, "{outside:?}");
        } else {
            skipped("root (the control that other families can be made)");
        }
    }

    async fn netlink_lists_the_network_of_the_sandbox_and_changes_nothing(place) {
        let Some(numbers) = numbers() else { return };
        let session = place.session();
        let code = netlink("lambda: None");
        let inside = session.json(&code).await;
        assert_eq!(inside["changes"], json!([EPERM, EPERM, EPERM]));
        assert_eq!(inside["other families"], json!([]));
        let interfaces: Vec<String> = serde_json::from_value(inside["interfaces"].clone()).unwrap();
        // Some kernels put tunnels that are down into every new network.
        let expected = if place.is_native() {
            interfaces == ["lo"]
        } else {
            interfaces.contains(&"lo".to_owned())
        };
        assert!(expected, "{interfaces:?}");
        // Control: a process with rights over a network can change it this way, and there are other
        // families.
        let own_network = format!("lambda: call({}, 0x10000000 | 0x40000000)", numbers["unshare"]);
        let outside: Value =
            serde_json::from_str(&native::outside(&netlink(&own_network))).unwrap();
        assert_eq!(outside["changes"], json!([0, 0, 0]));
        assert!(outside["other families"].as_array().unwrap().contains(&json!(15)), "{outside}");
    }

    async fn a_process_can_take_the_ids_that_it_has_and_no_others(place) {
        let code = format!("{CALLER}{IDS}\nprint(json.dumps(in_child(attempts)))");
        let answer = place.session().json(&code).await;
        assert_eq!(answer["own"], json!([0, 0, 0, 0, 0, 0]), "{answer}");
        let refused = |answer: &Value| [json!(EPERM), json!(EINVAL)].contains(answer);
        assert!(answer["others"].as_array().unwrap().iter().all(refused), "{answer}");
        assert_eq!(answer["before"], answer["after"]);
        assert_eq!(answer["after"][2], "CapPrm:\t0000000000000000");
        assert_eq!(answer["after"][3], "CapEff:\t0000000000000000");
        // Control: outside, root can set others.
        let outside: Value = serde_json::from_str(&native::outside(&code)).unwrap();
        if is_root() {
            assert!(outside["others"].as_array().unwrap().contains(&json!(0)), "{outside}");
            assert_ne!(outside["before"], outside["after"]);
        } else {
            skipped("root (the control that ids can be changed)");
        }
    }

    async fn the_core_limit_stays_one_whatever_it_is_set_to(place) {
        let code = "
import json, resource
def limit(which, *value):
    try:
        resource.setrlimit(which, value)
    except (OSError, ValueError) as error:
        return str(error)
    return list(resource.getrlimit(which))
try:
    told = resource.prlimit(0, resource.RLIMIT_CORE, (0, 0))
except OSError as error:
    told = error.errno
core = resource.RLIMIT_CORE
print(json.dumps([limit(core, 0, 0), limit(core, 1, 1), limit(core, -1, -1), told, \
limit(resource.RLIMIT_NOFILE, 100, 200)]))";
        // With zero, a host whose core handler is a program would start it. The last one is a
        // control: others can be lowered.
        let expected = json!([[1, 1], [1, 1], [1, 1], EPERM, [100, 200]]);
        assert_eq!(place.session().json(code).await, expected);
    }

    async fn code_cannot_hide_its_memory_from_the_jail(place) {
        if !place.is_native() {
            skipped("a jail that reads its interpreters (containers have none)");
            return;
        }
        let code = "
import ctypes, json
prctl = ctypes.CDLL(None).prctl
before, told = prctl(3), prctl(4, 0, 0, 0, 0)
print(json.dumps([before, told, prctl(3)]))";
        assert_eq!(place.session().json(code).await, json!([1, 0, 1]));
        // Control: outside it takes effect.
        assert_eq!(native::outside(code).trim(), "[1, 0, 0]");
    }

    async fn no_namespace_can_be_made_inside(place) {
        let Some(numbers) = numbers() else { return };
        let answers = place.session().json(&namespaces(&numbers)).await;
        assert!(answers.as_array().unwrap().iter().all(is_refused), "{answers}");
        // Control: outside the same calls make namespaces.
        let control = format!(
            "{CALLER}\nprint(json.dumps([in_child(lambda: call({unshare}, 0x10000000)), \
             in_child(lambda: call({unshare}, 0x10000000 | 0x40000000))]))",
            unshare = numbers["unshare"],
        );
        assert_eq!(native::outside(&control).trim(), "[0, 0]");
    }

    async fn threads_subprocesses_and_process_pools_work_although_clone3_answers_enosys(place) {
        let Some(numbers) = numbers() else { return };
        let code = format!(
            "{CALLER}
import multiprocessing, subprocess, threading, concurrent.futures, asyncio
heard = []
thread = threading.Thread(target=lambda: heard.append('thread')); thread.start(); thread.join()
heard.append(subprocess.run(['/bin/sh', '-c', 'echo shell'], capture_output=True, \
text=True).stdout.strip())
with multiprocessing.get_context('fork').Pool(2) as pool: heard.append(pool.map(abs, [-1, -2]))
with concurrent.futures.ThreadPoolExecutor(4) as pool: heard.append(sum(pool.map(abs, range(-10, \
0))))
heard.append(call({}, 'room', 88))
print(json.dumps(heard))",
            numbers["clone3"]
        );
        let expected = json!(["thread", "shell", [1, 2], 55, ENOSYS]);
        assert_eq!(place.session().json(&code).await, expected);
    }

    async fn calls_of_another_architecture_end_the_process(place) {
        if numbers().is_none() {
            return;
        }
        // mov eax, 20; int 0x80; ret: getpid as a 32-bit program calls it. mov eax, 0x40000027;
        // syscall; ret: getpid of x32.
        let code = "
import subprocess, sys, json
program = '''
import ctypes, mmap, sys
code = bytes.fromhex(sys.argv[1])
room = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
room.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(room))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
'''
def run(code): return subprocess.run([sys.executable, '-I', '-c', program, code], \
capture_output=True).returncode
print(json.dumps([run(code) for code in ('b8270000000f05c3', 'b814000000cd80c3', \
'b8270000400f05c3')]))";
        // The first is getpid of this very architecture, a control that the machine code runs. 31
        // is SIGSYS.
        assert_eq!(place.session().json(code).await, json!([0, -31, -31]));
        let outside: Value = serde_json::from_str(&native::outside(code)).unwrap();
        if outside[1] != json!(0) {
            skipped("a kernel that runs 32-bit calls (the control)");
        }
        // Where the host's kernel has no x32, it answers ENOSYS, and the process lives.
        assert_eq!((&outside[0], &outside[2]), (&json!(0), &json!(0)));
    }

    async fn a_setuid_program_gives_nothing_and_cannot_be_made(place) {
        let code = "
import json, os, subprocess
open('/work/own', 'w').write('x')
refused = []
for attempt in (lambda: os.chmod('/work/own', 0o4755), lambda: os.chmod('/work/own', 0o2755), \
lambda: os.open('/work/new', os.O_CREAT | os.O_WRONLY, 0o4755)):
    try:
        attempt()
        refused.append(0)
    except OSError as error:
        refused.append(error.errno)
os.chmod('/work/own', 0o755)
print(json.dumps([refused, oct(os.stat('/work/own').st_mode)]))";
        let answer = place.session().json(code).await;
        assert!(answer[0].as_array().unwrap().iter().all(is_refused), "{answer}");
        // Control: bits without effect can be set.
        assert_eq!(answer[1], "0o100755");
    }
}

/// Natively only: engines make no sandbox without their filter for us, and set no limit of user
/// namespaces for one. In a container only the filter refuses those.
#[test]
fn no_namespace_can_be_made_inside_without_the_filter_either() {
    let Some(numbers) = numbers() else { return };
    run(async {
        let answers = without_filter().session().json(&namespaces(&numbers)).await;
        // The second guard: no right to create any, and a limit of zero user namespaces.
        let answers = answers.as_array().unwrap();
        assert!(
            answers
                .iter()
                .all(|answer| [json!(EPERM), json!(ENOSPC)].contains(answer)),
            "{answers:?}"
        );
        assert_eq!(
            answers[5],
            json!(ENOSPC),
            "the kernel itself counts no user namespace"
        );
    });
}
