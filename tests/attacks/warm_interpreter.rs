//! The warm interpreter dies or receives signals, or an interpreter misses one step of its
//! lock-down.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use cellblock::sandbox::Exit;
use cellblock::session::Status;
use cellblock_jail::wire::Bind;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::native::{self, Builder, HostProcess, Native, run};
use crate::support::{is_root, skipped};

/// A separate backend, whose processes can be found by a folder that only they see.
fn marked() -> (TempDir, Native) {
    let mark = tempfile::Builder::new()
        .prefix("cellblock-mark-")
        .tempdir()
        .unwrap();
    let bind = Bind {
        host: mark.path().to_owned(),
        inside: PathBuf::from("/opt/mark"),
    };
    let backend = Builder::new("minimal").bind(bind).start();
    (mark, backend)
}

fn zygote(mark: &TempDir) -> Pid {
    let zygotes: Vec<HostProcess> = native::marked_processes(mark.path())
        .into_iter()
        .filter(HostProcess::is_zygote)
        .collect();
    let [zygote] = &zygotes[..] else {
        panic!("one warm interpreter: {zygotes:?}")
    };
    Pid::from_raw(zygote.pid as i32).unwrap()
}

#[test]
fn a_killed_warm_interpreter_harms_no_session_and_is_replaced() {
    run(async {
        let (mark, backend) = marked();
        let session = backend.session();
        session.ok("x = 'alive'").await;
        let running = session.clone();
        let cell = tokio::spawn(async move {
            running
                .ok("import sys\nfor line in sys.stdin: pass\nprint(x)")
                .await
        });
        let first = zygote(&mark);
        kill_process(first, Signal::KILL).unwrap();
        assert_eq!(cell.await.unwrap(), "alive\n");
        let begun = Instant::now();
        assert_eq!(backend.session().ok("print(1)").await, "1\n");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
        assert_ne!(zygote(&mark), first);
        // The old session is an orphan now, and still gets resets and a correct report of its end.
        assert_eq!(session.ok("print(x)").await, "alive\n");
        let outcome = session.execute("import os; os._exit(3)").await.unwrap();
        assert_eq!(
            outcome.status,
            Status::Died {
                exit: Exit::Code(3)
            }
        );
        session.reset().await;
        assert_eq!(session.ok("print(2)").await, "2\n");
        backend.end().await;
    });
}

#[test]
fn signals_neither_wake_the_warm_interpreter_nor_stop_sessions_from_being_made() {
    run(async {
        let (mark, backend) = marked();
        let session = backend.session();
        session.ok("x = 'alive'").await;
        for signal in [Signal::STOP, Signal::CONT, Signal::USR1, Signal::TERM] {
            kill_process(zygote(&mark), signal).unwrap();
            assert_eq!(
                backend.session().ok("print(1)").await,
                "1\n",
                "after {signal:?}"
            );
        }
        assert_eq!(session.ok("print(x)").await, "alive\n");
        backend.end().await;
        assert!(native::marked_processes(mark.path()).is_empty());
    });
}

#[test]
fn an_interpreter_that_misses_one_step_of_its_lock_down_never_gets_a_cell() {
    // Steps that the kernel does not report (landlock, limits) fail the launch when they fail; see
    // `twin`. (`no_new_privs` is not here: the interpreter inherits it from the warm one.)
    let steps = [
        "capset",
        "setns family",
        "setresuid",
        "setresgid",
        "bounding set",
        "seccomp",
        "setns mnt",
        "setns net",
        "setns ipc",
        "setns uts",
        "unshare cgroup",
        "setns user",
        "setsid",
    ];
    run(async {
        for step in steps {
            if step.starts_with("setres") && !is_root() {
                // The warm interpreter already has the same host user.
                skipped("root (sessions with a user of their own)");
                continue;
            }
            let backend = Builder::new("minimal").skip_step(step).start();
            let failure = backend
                .failure()
                .await
                .unwrap_or_else(|| panic!("a session without `{step}` was started"));
            assert!(
                failure.contains("isolation is not as it must be")
                    || failure.contains("could not enter its sandbox"),
                "{step}: {failure}"
            );
            backend.end().await;
        }
        // Control: it starts without a step that is not part of the lock-down.
        let backend = Builder::new("minimal").skip_step("name").start();
        assert_eq!(backend.session().ok("print(1)").await, "1\n");
        backend.end().await;
    });
}
