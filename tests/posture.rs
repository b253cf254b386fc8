//! The kernel's facts about a live session, compared with `posture/native.json`.
//!
//! `posture/probe.py` collects the facts inside; the host reads its own side of them. The
//! expectation is written for the limits of `native::ROOMY`. Changing it changes a promise of
//! Cellblock.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use cellblock::sandbox::{LayerKind, LayerState};
use cellblock::session::Outcome;
use cellblock_jail::posture::{NAMESPACES, Posture};
use cellblock_jail::wire::Bind;
use serde_json::{Value, json};

use crate::support::native::{self, Builder, HostProcess, Session, run};
use crate::support::server::{Era, Server};
use crate::support::{PROGRAM, data_folder, is_root, skipped};

const PROBE: &str = include_str!("posture/probe.py");
const EXPECTED: &str = include_str!("posture/native.json");

/// The user and group that stand for "an ordinary user" when the tests run as root; they own
/// nothing.
const ORDINARY: u32 = 65_534;

fn expected() -> Value {
    let mut expected = everything_expected();
    // A session does not see its mounts; `the_mounts_of_a_session_are_as_written_down` checks them.
    expected["mounts"] = json!({});
    expected
}

fn everything_expected() -> Value {
    serde_json::from_str(EXPECTED).expect("the expectation is JSON")
}

/// Compares fact by fact, so that a failure names the fact.
fn compare(when: &str, found: &Value, expected: &Value) {
    let (found, expected) = (
        found.as_object().expect("facts"),
        expected.as_object().expect("facts"),
    );
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        expected.keys().collect::<Vec<_>>()
    );
    for (name, fact) in expected {
        assert_eq!(&found[name], fact, "{when}: {name}");
    }
}

/// Without control groups a limit per process applies, and an ordinary user cannot drop its groups.
fn adapt(expected: &mut Value, found: &mut Value, limited_by_groups: bool, ordinary: bool) {
    if !limited_by_groups {
        expected["limits"]["RLIMIT_DATA"] = json!([native::ROOMY.memory, native::ROOMY.memory]);
    }
    if ordinary {
        for thread in found["threads"].as_array_mut().expect("a list") {
            thread["Groups"] = json!("");
        }
    }
}

fn has_control_groups(outcome: &Outcome) -> bool {
    matches!(
        outcome.isolation.layers[&LayerKind::Resources],
        LayerState::Enforced { .. }
    )
}

async fn probe(session: &Session) -> Value {
    session.json(PROBE).await
}

#[test]
fn the_posture_is_as_written_down_in_the_first_cell_in_threads_after_exec_and_after_a_reset() {
    run(async {
        let session = native::shared().session();
        let first = session.execute(PROBE).await.unwrap();
        let mut found: Value = serde_json::from_str(&native::printed(&first)).expect("facts");
        let mut expected = expected();
        adapt(
            &mut expected,
            &mut found,
            has_control_groups(&first),
            !is_root(),
        );
        compare("in the first cell", &found, &expected);

        let in_threads = "
import threading
gate = threading.Barrier(5)
def wait():
    gate.wait()
    gate.wait()
started = [threading.Thread(target=wait) for _ in range(4)]
for thread in started: thread.start()
gate.wait()
import os, json
print(json.dumps([len(os.listdir('/proc/self/task')), facts()]))
gate.wait()
for thread in started: thread.join()";
        let mut threaded = session.json(in_threads).await;
        // numpy has its own threads where it was imported.
        assert!(threaded[0].as_u64().unwrap() >= 5, "{}", threaded[0]);
        adapt(
            &mut json!({"limits": {}}),
            &mut threaded[1],
            true,
            !is_root(),
        );
        compare("with five threads", &threaded[1], &expected);

        session.upload("probe.py", PROBE.as_bytes()).await.unwrap();
        let after_exec = "import subprocess, sys; print(subprocess.run([sys.executable, '-I', \
                          'probe.py'], capture_output=True, check=True, text=True).stdout)";
        let mut executed = session.json(after_exec).await;
        // A child gets the three standard descriptors and nothing else.
        assert_eq!(
            executed["descriptors"],
            json!([["/dev/null", "pipe", "pipe"], []])
        );
        executed["descriptors"] = expected["descriptors"].clone();
        adapt(&mut json!({"limits": {}}), &mut executed, true, !is_root());
        compare("after exec", &executed, &expected);

        session.reset().await;
        let mut again = probe(&session).await;
        adapt(&mut json!({"limits": {}}), &mut again, true, !is_root());
        compare("after a reset", &again, &expected);
    });
}

#[test]
fn the_mounts_of_a_session_are_as_written_down() {
    run(async {
        // Without this step an interpreter has the same mounts, and sees the mount table.
        let backend = Builder::new("minimal").skip_step("chroot").start();
        let found = probe(&backend.session()).await;
        let (found, expected) = (
            found["mounts"].clone(),
            everything_expected()["mounts"].clone(),
        );
        compare("mounts", &found, &expected);
        backend.end().await;
    });
}

#[test]
fn a_member_of_the_pool_has_the_same_posture() {
    run(async {
        let backend = Builder::new("minimal").pool(1).start();
        let session = backend.session();
        let first = session.execute(PROBE).await.unwrap();
        let mut found: Value = serde_json::from_str(&native::printed(&first)).expect("facts");
        let mut expected = expected();
        adapt(
            &mut expected,
            &mut found,
            has_control_groups(&first),
            !is_root(),
        );
        compare("in a member of the pool", &found, &expected);
        backend.end().await;
    });
}

#[test]
fn a_copy_of_a_session_has_the_same_posture() {
    run(async {
        let source = native::shared().session();
        let first = source.execute(PROBE).await.unwrap();
        let mut expected = expected();
        adapt(
            &mut expected,
            &mut json!({"threads": []}),
            has_control_groups(&first),
            !is_root(),
        );
        let compare = |when, mut found: Value| {
            adapt(&mut json!({"limits": {}}), &mut found, true, !is_root());
            compare(when, &found, &expected);
        };
        let fork = source.fork().await;
        compare("in a fork", probe(&fork).await);
        let grandchild = fork.fork().await;
        compare("in a fork of a fork", probe(&grandchild).await);
        grandchild.undo(1).await;
        compare("in a fork of a fork after undo", probe(&grandchild).await);
        compare("in the source of forks", probe(&source).await);
        source.undo(1).await;
        compare("after undo", probe(&source).await);
        source.execute("import os; os._exit(3)").await.unwrap();
        assert!(source.undo(1).await.revived);
        compare("after undo of a crash", probe(&source).await);
        for session in [&source, &fork, &grandchild] {
            session.assert_locked_down().await;
        }
    });
}

#[test]
fn before_its_first_cell_a_session_is_locked_down_as_the_host_sees_it() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let backend = Builder::new("minimal").bind(marked(&mark)).start();
        let (mut sandbox, _interpreter) = backend.backend.launch().await.expect("a sandbox");
        let all = native::marked_processes(mark.path());
        let own = Posture::read(std::process::id()).unwrap();
        // Only root may read everything about an init, which is not dumpable.
        let readable = |process: &&HostProcess| {
            is_session(process) && (is_root() || process.name != "cb-init")
        };
        for process in all.iter().filter(readable) {
            let posture = Posture::read(process.pid).unwrap();
            assert!(
                posture.uids.iter().chain(&posture.gids).all(|id| *id != 0),
                "{posture:?}"
            );
            assert_eq!(posture.capabilities, [0; 5]);
            assert!(posture.no_new_privs);
            assert_eq!(posture.seccomp, 2);
            for name in NAMESPACES {
                assert_ne!(
                    posture.namespaces[name], own.namespaces[name],
                    "{name} of {}",
                    process.name
                );
            }
        }
        let names: Vec<&str> = all.iter().map(|process| process.name.as_str()).collect();
        assert_eq!(
            all.iter().filter(|process| is_session(process)).count(),
            2,
            "init and interpreter: {names:?}"
        );

        let interpreter = all
            .iter()
            .find(|process| is_session(process) && process.name != "cb-init")
            .unwrap();
        if is_root() {
            limits_are_set(interpreter.pid);
        } else {
            skipped("root (control groups of a session)");
        }
        sandbox.destroy().await;
        assert!(
            native::marked_processes(mark.path())
                .iter()
                .all(|process| !is_session(process))
        );
        backend.end().await;
        assert!(
            native::marked_processes(mark.path()).is_empty(),
            "nothing is left when the backend has ended"
        );
    });
}

/// Sessions are three pid namespaces deep, their family with its twins two, the warden and the
/// zygote one.
fn is_session(process: &HostProcess) -> bool {
    process.depth == native::own_depth() + 3
}

fn marked(mark: &tempfile::TempDir) -> Bind {
    Bind {
        host: mark.path().to_owned(),
        inside: PathBuf::from("/opt/mark"),
    }
}

fn limits_are_set(pid: u32) {
    let folders = native::control_groups(pid);
    let value = |names: &[&str]| {
        let path = folders
            .iter()
            .flat_map(|folder| names.iter().map(|name| folder.join(name)))
            .find(|path| path.exists());
        fs::read_to_string(path.unwrap_or_else(|| panic!("{names:?} in {folders:?}")))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(
        value(&["memory.limit_in_bytes", "memory.max"]),
        native::ROOMY.memory.to_string()
    );
    // Init, the twin and checkpoints count too; the session's own processes have a separate limit.
    assert_eq!(
        value(&["pids.max"]),
        (native::ROOMY.processes + 128).to_string()
    );
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let processes = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max processes"))
        .unwrap();
    assert_eq!(
        processes.split_whitespace().next(),
        Some(native::ROOMY.processes.to_string().as_str())
    );
    let quota = value(&["cpu.cfs_quota_us", "cpu.max"]);
    assert_eq!(
        quota.split(' ').next(),
        Some("200000"),
        "two CPUs of a period of 100,000"
    );
    assert_eq!(
        fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))
            .unwrap()
            .trim(),
        "500"
    );
}

#[test]
fn the_processes_that_make_sandboxes_have_filters_of_their_own() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let backend = Builder::new("minimal").bind(marked(&mark)).start();
        let session = backend.session();
        session.ok("1").await;
        let of_name = |name: &str| {
            let mut all = native::marked_processes(mark.path()).into_iter();
            all.find(|process| process.name == name)
                .unwrap_or_else(|| panic!("there is no {name}"))
                .pid
        };
        let warden = of_name("cb-warden");
        let status = fs::read_to_string(format!("/proc/{warden}/status")).unwrap();
        let guardian = status
            .lines()
            .find_map(|line| line.strip_prefix("PPid:"))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert_eq!(
            fs::read_to_string(format!("/proc/{guardian}/comm"))
                .unwrap()
                .trim(),
            "cb-guardian"
        );
        let inherited = Posture::read(std::process::id()).unwrap().seccomp_filters;
        for (pid, own_filters) in [
            (guardian, 1),
            (warden, 1),
            (of_name("cb-family"), 1),
            (of_name("cb-init"), 2),
        ] {
            let posture = Posture::read(pid).unwrap();
            assert!(posture.no_new_privs, "{posture:?}");
            assert_eq!(
                (posture.seccomp, posture.seccomp_filters),
                (2, inherited + own_filters),
                "{posture:?}"
            );
        }
        backend.end().await;
    });
}

#[test]
fn the_warm_interpreter_has_one_thread_known_descriptors_and_nothing_of_the_host() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let backend = Builder::new("default").bind(marked(&mark)).start();
        let session = backend.session();
        session.ok("1").await;
        let all = native::marked_processes(mark.path());
        let zygotes: Vec<_> = all.iter().filter(|process| process.is_zygote()).collect();
        let [zygote] = zygotes[..] else {
            panic!("{all:?}")
        };
        let folder = PathBuf::from(format!("/proc/{}", zygote.pid));
        assert_eq!(fs::read_dir(folder.join("task")).unwrap().count(), 1);
        let posture = Posture::read(zygote.pid).unwrap();
        let own = Posture::read(std::process::id()).unwrap();
        assert!(posture.uids.iter().all(|uid| *uid != 0));
        assert_eq!((posture.seccomp, posture.seccomp_filters), (2, 2));
        for name in NAMESPACES.iter().filter(|name| **name != "cgroup") {
            assert_ne!(posture.namespaces[name], own.namespaces[name], "{name}");
        }
        let mut kinds: Vec<String> = fs::read_dir(folder.join("fd"))
            .unwrap()
            .flatten()
            .map(|entry| kind_of(&fs::read_link(entry.path()).unwrap()))
            .collect();
        kinds.sort();
        kinds.dedup();
        assert_eq!(kinds, ["/dev/null", "pipe", "socket"]);
        let environment = fs::read(folder.join("environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let names: Vec<&str> = environment
            .split('\0')
            .filter_map(|pair| Some(pair.split_once('=')?.0))
            .collect();
        assert!(
            !names.is_empty() && !names.contains(&"CARGO_MANIFEST_DIR"),
            "{names:?}"
        );
        // Control: this process, which started it, has that name in its environment.
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
        backend.end().await;
    });
}

#[test]
fn the_memory_of_python_inside_holds_no_path_and_no_variable_of_the_host() {
    if !is_root() {
        skipped("root (to read the memory of other users' processes)");
        return;
    }
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let backend = Builder::new("minimal").bind(marked(&mark)).start();
        let session = backend.session();
        session.ok("1").await;
        // The real path of the environment and of this checkout, which is in the server's
        // environment too.
        let words = [
            data_folder().display().to_string(),
            env!("CARGO_MANIFEST_DIR").to_owned() + "/",
        ];
        let all = native::marked_processes(mark.path());
        let has_python =
            |process: &&HostProcess| !process.name.starts_with("cb-") || process.name == "cb-twin";
        let pythons: Vec<_> = all.iter().filter(has_python).collect();
        assert!(
            pythons.len() >= 3,
            "the warm interpreter, a session, its twin: {all:?}"
        );
        for process in pythons {
            for word in &words {
                assert!(!memory_holds(process.pid, word), "{process:?} holds {word}");
            }
        }
        // Control: this process holds them.
        for word in &words {
            assert!(memory_holds(std::process::id(), word));
        }
        backend.end().await;
    });
}

/// Looks through the private, writable memory of a process.
fn memory_holds(pid: u32, word: &str) -> bool {
    use std::os::unix::fs::FileExt;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let ranges = maps
        .lines()
        .filter(|line| line.contains(" rw-p "))
        .filter_map(|line| {
            let (from, to) = line.split(' ').next()?.split_once('-')?;
            Some((
                u64::from_str_radix(from, 16).ok()?,
                u64::from_str_radix(to, 16).ok()?,
            ))
        });
    for (from, to) in ranges {
        let mut bytes = vec![0; (to - from) as usize];
        // A region may be gone since the list was read.
        let Ok(size) = memory.read_at(&mut bytes, from) else {
            continue;
        };
        if String::from_utf8_lossy(&bytes[..size]).contains(word) {
            return true;
        }
    }
    false
}

fn kind_of(link: &Path) -> String {
    if link.starts_with("/opt/cellblock/env") {
        // Fonts that matplotlib keeps open.
        return "environment".to_owned();
    }
    link.to_string_lossy()
        .split([':', '['])
        .next()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn an_ordinary_user_gets_the_same_posture() {
    let Some(ordinary) = Ordinary::new() else {
        return;
    };
    let script = ordinary.home.path().join("probe.py");
    let output = ordinary.command("run").arg(&script).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("user namespaces") || complaint.contains("AppArmor") {
        skipped("user namespaces for ordinary users");
        return;
    }
    assert!(output.status.success(), "{complaint}");
    let mut found: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {complaint}"));
    let mut expected = expected();
    adapt(&mut expected, &mut found, false, true);
    compare("as an ordinary user", &found, &expected);

    // Where that works, so do forks and undo.
    let server = Server::spawn(&mut ordinary.command("mcp"), Era::Initialize);
    server.greet();
    let session = server.session();
    let probe = |when: &str, id: &str| {
        let code = json!({"session_id": id, "code": PROBE, "max_output_chars": 1_000_000});
        let answer = server.call("execute_ipython_cell", code);
        let text = answer.structured()["stdout"]
            .as_str()
            .unwrap_or(answer.text());
        let mut found: Value =
            serde_json::from_str(text.trim()).unwrap_or_else(|error| panic!("{error}: {text}"));
        adapt(&mut json!({"limits": {}}), &mut found, true, true);
        compare(when, &found, &expected);
    };
    session.text("x = 1");
    let forked = session.call("fork_session", json!({"names": ["copy"]}));
    assert!(!forked.is_error(), "{}", forked.text());
    probe("in an ordinary user's fork", "copy");
    let undone = session.call("undo", json!({}));
    assert!(!undone.is_error(), "{}", undone.text());
    probe("after an ordinary user's undo", &session.id);
    drop(session);
    server.finish();
}

/// A user who owns nothing but a folder with copies of the program and of an environment: such a
/// user may have no access to the checkout.
pub(crate) struct Ordinary {
    home: tempfile::TempDir,
}

impl Ordinary {
    pub(crate) fn new() -> Option<Ordinary> {
        if !is_root() {
            // The other tests of this file have run as one.
            skipped("root (to become another user)");
            return None;
        }
        if !others_can_reach(&native::host_python("minimal")) {
            skipped("a Python that other users may run");
            return None;
        }
        let home = tempfile::Builder::new()
            .prefix("cellblock-ordinary-")
            .tempdir()
            .unwrap();
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let environments = home.path().join("data/environments");
        fs::copy(PROGRAM, home.path().join("program")).unwrap();
        fs::write(home.path().join("probe.py"), PROBE).unwrap();
        fs::create_dir_all(&environments).unwrap();
        for entry in fs::read_dir(data_folder().join("environments"))
            .unwrap()
            .flatten()
        {
            if entry.file_name().to_string_lossy().starts_with("minimal-") {
                let copied = Command::new("cp")
                    .arg("-a")
                    .arg(entry.path())
                    .arg(&environments)
                    .status();
                assert!(copied.unwrap().success());
            }
        }
        let owned = Command::new("chown")
            .arg("-R")
            .arg(format!("{ORDINARY}:{ORDINARY}"))
            .arg(home.path())
            .status();
        assert!(owned.unwrap().success());
        chown(home.path(), Some(ORDINARY), Some(ORDINARY)).unwrap();
        Some(Ordinary { home })
    }

    /// The program as this user runs it, with the limits that the expectation is written for.
    pub(crate) fn command(&self, name: &str) -> Command {
        let home = self.home.path();
        let mut command = Command::new(home.join("program"));
        command
            .args([
                name,
                "--environment",
                "minimal",
                "--env-var",
                "GIVEN=by the operator",
            ])
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", home)
            .env("XDG_RUNTIME_DIR", home)
            .env("CELLBLOCK_DATA_DIR", home.join("data"))
            .env("CELLBLOCK_MEMORY", native::ROOMY.memory.to_string())
            .env("CELLBLOCK_PROCESSES", native::ROOMY.processes.to_string())
            .env("CELLBLOCK_DISK", native::ROOMY.disk.to_string())
            .env("CELLBLOCK_FILES", native::ROOMY.files.to_string())
            .current_dir(home)
            .uid(ORDINARY)
            .gid(ORDINARY);
        command
    }
}

fn others_can_reach(path: &Path) -> bool {
    let real = path.canonicalize().unwrap();
    real.ancestors()
        .all(|part| fs::metadata(part).is_ok_and(|found| found.permissions().mode() & 0o001 != 0))
}
