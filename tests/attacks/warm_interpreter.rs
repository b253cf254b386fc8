//! What happens when the warm interpreter dies, hangs, or lets a fork go without one step of its lock-down.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cellblock::sandbox::Exit;
use cellblock::session::Status;
use cellblock_jail::wire::Bind;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::native::{self, Builder, HostProcess, Native, run};
use crate::support::{is_root, skipped};

/// A backend of its own, whose processes can be found by a folder that only they see.
fn marked() -> (TempDir, Native) {
    let mark = tempfile::Builder::new().prefix("cellblock-mark-").tempdir().unwrap();
    let bind = Bind { host: mark.path().to_owned(), inside: PathBuf::from("/opt/mark") };
    let backend = Builder::new("minimal").bind(bind).start();
    (mark, backend)
}

fn zygote(mark: &TempDir) -> Pid {
    let zygotes: Vec<HostProcess> =
        native::marked_processes(mark.path()).into_iter().filter(HostProcess::is_zygote).collect();
    let [zygote] = &zygotes[..] else { panic!("one warm interpreter: {zygotes:?}") };
    Pid::from_raw(zygote.pid as i32).unwrap()
}

#[test]
fn a_killed_warm_interpreter_harms_no_session_and_is_replaced() {
    run(async {
        let (mark, backend) = marked();
        let session = backend.session();
        session.ok("x = 'alive'").await;
        let running = session.clone();
        let cell = tokio::spawn(async move { running.ok("import sys\nfor line in sys.stdin: pass\nprint(x)").await });
        let first = zygote(&mark);
        kill_process(first, Signal::KILL).unwrap();
        assert_eq!(cell.await.unwrap(), "alive\n");
        let begun = Instant::now();
        assert_eq!(backend.session().ok("print(1)").await, "1\n");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert_ne!(zygote(&mark), first);
        // The old session is an orphan now, and still gets resets and a true account of its end.
        assert_eq!(session.ok("print(x)").await, "alive\n");
        let outcome = session.execute("import os; os._exit(3)").await.unwrap();
        assert_eq!(outcome.status, Status::Died { exit: Exit::Code(3) });
        session.reset().await;
        assert_eq!(session.ok("print(2)").await, "2\n");
        backend.end().await;
    });
}

#[test]
fn a_warm_interpreter_that_hangs_is_replaced() {
    run(async {
        let (mark, backend) = marked();
        let session = backend.session();
        session.ok("x = 'alive'").await;
        let first = zygote(&mark);
        kill_process(first, Signal::STOP).unwrap();
        let begun = Instant::now();
        let late = backend.session();
        // It starts late, by a fresh one, and nobody else notices.
        assert_eq!(late.ok("print(1)").await, "1\n");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        assert_eq!(session.ok("print(x)").await, "alive\n");
        assert_ne!(zygote(&mark), first);
        backend.end().await;
        assert!(native::marked_processes(mark.path()).is_empty());
    });
}

/// A copy of the runner in which one piece of text is replaced.
fn altered_runner(from: &Path, piece: &str, other: &str) -> TempDir {
    let copy = tempfile::Builder::new().prefix("cellblock-runner-").tempdir().unwrap();
    let package = copy.path().join("cellblock_runner");
    fs::create_dir(&package).unwrap();
    let mut changed = 0;
    for entry in fs::read_dir(from.join("cellblock_runner")).unwrap().flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "py") {
            let text = fs::read_to_string(entry.path()).unwrap();
            changed += text.matches(piece).count();
            fs::write(package.join(entry.file_name()), text.replace(piece, other)).unwrap();
        }
    }
    fs::set_permissions(copy.path(), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(changed, 1, "{piece:?} is there once");
    copy
}

#[test]
fn a_fork_that_misses_one_step_of_its_lock_down_never_gets_a_cell() {
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("runner");
    // What is left out or broken, and by what. (`no_new_privs` is not here: the fork has it from the warm interpreter already.)
    let steps = [
        ("self._call(\"capset\", self._capability_header, self._no_capabilities)", "pass"),
        ("os.setresuid(self._id, self._id, self._id)", "pass"),
        ("os.setresgid(self._id, self._id, self._id)", "pass"),
        (
            "            if not self._try(\"prctl\", _PR_CAPBSET_DROP, capability, 0, 0, 0):\n                break",
            "            break",
        ),
        ("self._call(\"seccomp\", _SECCOMP_SET_MODE_FILTER, 0, self._program)", "pass"),
        ("for namespace in namespaces:", "for namespace in namespaces[:-1]:"),
        ("os.setsid()", "pass"),
        ("self._call(\"landlock_restrict_self\", rules, 0)", "self._call(\"landlock_restrict_self\", -1, 0)"),
        ("resource.setrlimit(which, (value, value))", "raise OSError('no limits')"),
    ];
    run(async {
        for (piece, other) in steps {
            if piece.starts_with("os.setres") && !is_root() {
                // The warm interpreter is the same user of the host already.
                skipped("root (sessions with a user of their own)");
                continue;
            }
            let altered = altered_runner(&runner, piece, other);
            let backend = Builder::new("minimal").runner(altered.path()).start();
            let failure = backend.failure().await.unwrap_or_else(|| panic!("a session without `{piece}` was started"));
            assert!(
                failure.contains("isolation is not as it must be") || failure.contains("did not enter its sandbox"),
                "{piece}: {failure}"
            );
            backend.end().await;
        }
        // Control: a copy that says the same in other words is fine.
        let same = altered_runner(
            &runner,
            "nothing = os.open(\"/dev/null\", os.O_RDWR)",
            "nothing = os.open('/dev/null', os.O_RDWR)",
        );
        let backend = Builder::new("minimal").runner(same.path()).start();
        assert_eq!(backend.failure().await, None);
        backend.end().await;
    });
}
