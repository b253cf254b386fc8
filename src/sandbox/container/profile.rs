//! The seccomp profile of a container, in the format that engines read.
//!
//! It is generated from the jail's list, `jail/src/seccomp.json`. An engine loads one filter for
//! the whole container, so the calls that the supervisor and the runtime need during startup remain
//! allowed; `FOR_OURSELVES` states why each of these is harmless.
//!
//! Engines compare whole registers, while most arguments are half as wide. So "is not" is never
//! used with them: a register that differs in its upper half would pass. It is expanded into the
//! remaining values.

use cellblock_jail::seccomp::{self, SyscallRule};
use cellblock_jail::wire::Programs;
use serde_json::{Value, json};

/// The errno of a call that does not exist; libraries then use their fallback.
const ENOSYS: u32 = 38;

/// From `linux/prctl.h`.
const PR_SET_DUMPABLE: u64 = 4;
const PR_SET_SECCOMP: u64 = 22;
const PR_SET_NO_NEW_PRIVS: u64 = 38;

/// The range of resource limit numbers; the fourth is the size of core files.
const RESOURCES: std::ops::Range<u64> = 0..16;

/// Calls that the jail does not need, but the processes of a container do.
const FOR_OURSELVES: [(&str, Option<u64>, &str); 5] = [
    (
        "landlock_create_ruleset",
        None,
        "a process can only take rights from itself",
    ),
    (
        "landlock_add_rule",
        None,
        "a process can only take rights from itself",
    ),
    (
        "landlock_restrict_self",
        None,
        "a process can only take rights from itself",
    ),
    (
        "prctl",
        Some(PR_SET_DUMPABLE),
        "says who of the same user may look into one's own memory",
    ),
    (
        "prctl",
        Some(PR_SET_NO_NEW_PRIVS),
        "cannot be undone, and is set already",
    ),
];

/// Also needed where sessions may not start programs. The filter that it loads refuses it from then
/// on (`confine.py`).
const TO_REFUSE_PROGRAMS: (&str, Option<u64>, &str) = (
    "prctl",
    Some(PR_SET_SECCOMP),
    "a process can only take rights from itself",
);

/// Calls that libraries try first. Older engines answer every refused call with "not permitted", on
/// which libraries do not fall back.
const TRIED_FIRST: [&str; 12] = [
    "clone3",
    "openat2",
    "io_uring_setup",
    "cachestat",
    "map_shadow_stack",
    "statmount",
    "listmount",
    "pidfd_getfd",
    "process_madvise",
    "userfaultfd",
    "perf_event_open",
    "memfd_secret",
];

/// Returns the profile as JSON text, for this architecture, and for sessions that may or may not
/// start programs.
pub(super) fn text(programs: Programs) -> String {
    let rules = seccomp::rules();
    let (mut listed, mut answers) = (rules.common, rules.answers);
    let architecture = match std::env::consts::ARCH {
        "x86_64" => {
            listed.extend(rules.x86_64);
            answers.extend(rules.answers_x86_64);
            "SCMP_ARCH_X86_64"
        }
        _ => "SCMP_ARCH_AARCH64",
    };
    let mut calls: Vec<Value> = listed
        .iter()
        .flat_map(|rule| written(rule, &json!({"action": "SCMP_ACT_ALLOW"})))
        .collect();
    // Calls allowed for the runner need no errno rule, and an engine rejects a second rule for
    // them.
    answers.retain(|answer| {
        FOR_OURSELVES
            .iter()
            .all(|(name, ..)| answer.syscall != *name)
    });
    for answer in &answers {
        let action = json!({"action": "SCMP_ACT_ERRNO", "errnoRet": answer.errno.number()});
        calls.extend(written(&answer.rule(), &action));
    }
    let to_refuse = (programs == Programs::Refused).then_some(TO_REFUSE_PROGRAMS);
    for (name, argument, _) in FOR_OURSELVES.into_iter().chain(to_refuse) {
        let checks = argument
            .map(|value| vec![check(0, "SCMP_CMP_EQ", value, 0)])
            .unwrap_or_default();
        calls.push(line(name, &checks, &json!({"action": "SCMP_ACT_ALLOW"})));
    }
    calls.push(json!({"names": TRIED_FIRST, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": [architecture],
        "syscalls": calls,
    })
    .to_string()
}

/// Converts one rule of the list to the engine's format. An "is not" check becomes several lines.
fn written(rule: &SyscallRule, action: &Value) -> Vec<Value> {
    let mut lines: Vec<Vec<Value>> = vec![Vec::new()];
    for argument in &rule.args {
        let choices = checks(argument);
        lines = lines
            .iter()
            .flat_map(|line| {
                choices.iter().map(move |choice| {
                    line.iter()
                        .chain(std::iter::once(choice))
                        .cloned()
                        .collect()
                })
            })
            .collect();
    }
    lines
        .iter()
        .map(|checks| line(&rule.syscall, checks, action))
        .collect()
}

/// Returns alternative checks for an argument of the list, one of which must match.
fn checks(argument: &Value) -> Vec<Value> {
    let number = |name: &str| {
        argument[name]
            .as_u64()
            .expect("the list is checked by a test of the jail")
    };
    let (index, value) = (number("index"), number("val"));
    match (&argument["op"], argument["op"].as_str()) {
        (_, Some("eq")) => vec![check(index, "SCMP_CMP_EQ", value, 0)],
        // "Is not" can only be compared for a whole register.
        (_, Some("ne")) if argument["type"] == "qword" => {
            vec![check(index, "SCMP_CMP_NE", value, 0)]
        }
        (_, Some("ne")) => RESOURCES
            .filter(|other| *other != value)
            .map(|other| check(index, "SCMP_CMP_EQ", other, 0))
            .collect(),
        (op, _) => {
            let mask = op["masked_eq"]
                .as_u64()
                .expect("the list has no other comparison");
            vec![check(index, "SCMP_CMP_MASKED_EQ", mask, value)]
        }
    }
}

fn check(index: u64, operation: &str, value: u64, second: u64) -> Value {
    json!({"index": index, "value": value, "valueTwo": second, "op": operation})
}

fn line(name: &str, checks: &[Value], action: &Value) -> Value {
    let mut line = action.clone();
    line["names"] = json!([name]);
    line["args"] = json!(checks);
    line
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn profile() -> Value {
        serde_json::from_str(&text(Programs::Free)).unwrap()
    }

    fn names(action: &str) -> BTreeSet<String> {
        let profile = profile();
        let lines = profile["syscalls"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|line| line["action"] == action);
        lines
            .flat_map(|line| line["names"].as_array().unwrap())
            .map(|name| name.as_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn everything_that_the_jail_allows_is_allowed_and_little_else() {
        let rules = seccomp::rules();
        let listed: BTreeSet<String> = rules
            .common
            .iter()
            .chain(&rules.x86_64)
            .map(|rule| rule.syscall.clone())
            .collect();
        let more: BTreeSet<String> = names("SCMP_ACT_ALLOW")
            .difference(&listed)
            .cloned()
            .collect();
        assert_eq!(
            more,
            [
                "landlock_add_rule",
                "landlock_create_ruleset",
                "landlock_restrict_self"
            ]
            .map(str::to_owned)
            .into()
        );
        for name in &listed {
            assert!(
                names("SCMP_ACT_ALLOW").contains(name) || std::env::consts::ARCH != "x86_64",
                "{name}"
            );
        }
    }

    #[test]
    fn what_opens_ways_out_of_containers_is_refused() {
        let allowed = names("SCMP_ACT_ALLOW");
        for name in [
            "mount",
            "unshare",
            "setns",
            "ptrace",
            "bpf",
            "keyctl",
            "add_key",
            "process_vm_writev",
            "clone3",
            "seccomp",
        ] {
            assert!(!allowed.contains(name), "{name}");
        }
        assert!(allowed.contains("read")); // control
        assert_eq!(profile()["defaultAction"], "SCMP_ACT_ERRNO");
    }

    #[test]
    fn refused_calls_answer_what_the_list_says() {
        let profile = profile();
        let lines = profile["syscalls"].as_array().unwrap();
        let answers = |name: &str| {
            let about = |line: &&Value| {
                line["names"] == json!([name]) && line["action"] == "SCMP_ACT_ERRNO"
            };
            lines
                .iter()
                .filter(about)
                .map(|line| line["errnoRet"].as_i64().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(answers("setxattr"), [95]);
        assert_eq!(answers("sethostname"), [1]);
        assert_eq!(answers("fchmodat"), [1, 1]);
        assert_eq!(answers("prlimit64"), [0, 1]);
        assert!(answers("read").is_empty()); // control
        assert_eq!(profile["defaultErrnoRet"], ENOSYS);
    }

    #[test]
    fn a_filter_can_be_loaded_only_where_programs_are_refused() {
        let loads = |programs| {
            let profile: Value = serde_json::from_str(&text(programs)).unwrap();
            let lines = profile["syscalls"].as_array().unwrap().clone();
            lines
                .iter()
                .any(|line| line["names"][0] == "prctl" && line["args"][0]["value"] == 22)
        };
        assert!(loads(Programs::Refused)); // control
        assert!(!loads(Programs::Free));
    }

    #[test]
    fn the_limit_of_core_files_cannot_be_named_with_other_upper_bits() {
        let profile = profile();
        let lines = profile["syscalls"].as_array().unwrap();
        let is_about = |line: &&Value, name: &str| {
            line["names"][0] == name && line["action"] == "SCMP_ACT_ALLOW"
        };
        let about = |name: &str| {
            lines
                .iter()
                .filter(|line| is_about(line, name))
                .cloned()
                .collect::<Vec<_>>()
        };
        assert!(
            about("setrlimit")
                .iter()
                .all(|line| line["args"][0]["op"] == "SCMP_CMP_EQ")
        );
        assert!(
            about("setrlimit")
                .iter()
                .all(|line| line["args"][0]["value"] != 4)
        );
        assert_eq!(about("setrlimit").len(), 15); // control: all others are there
    }

    #[test]
    fn no_namespace_can_be_made_by_clone() {
        let profile = profile();
        let clone = profile["syscalls"]
            .as_array()
            .unwrap()
            .iter()
            .find(|line| line["names"][0] == "clone")
            .unwrap();
        assert_eq!(clone["args"][0]["op"], "SCMP_CMP_MASKED_EQ");
        assert_eq!(
            clone["args"][0]["value"].as_u64().unwrap() & 0x7e02_0000,
            0x7e02_0000
        );
        assert_eq!(clone["args"][0]["valueTwo"], 0);
    }
}
