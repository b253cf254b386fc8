//! What a container is made of, from inside and out. What it must withstand is in `attacks`, the
//! same as natively.

use cellblock::sandbox::{Exit, LayerKind, SandboxLimits};
use cellblock::session::{Refused, Status};
use cellblock_jail::posture::Posture;

use super::{on_docker, on_every_engine};
use crate::support::native::ROOMY;

#[test]
fn a_session_in_a_container_has_given_up_everything() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let interpreter = Posture::read(session.host_pid().await).unwrap();
        let own = Posture::read(std::process::id()).unwrap();
        assert!(
            interpreter
                .uids
                .iter()
                .chain(&interpreter.gids)
                .all(|id| *id >= 0x7000_0000),
            "{interpreter:?}"
        );
        assert_eq!(interpreter.capabilities, [0; 5]);
        assert!(interpreter.no_new_privs);
        assert_eq!(interpreter.seccomp, 2);
        for name in ["cgroup", "ipc", "mnt", "net", "pid", "uts"] {
            assert_ne!(interpreter.namespaces[name], own.namespaces[name], "{name}");
        }
    });
}

#[test]
fn the_engine_made_what_it_was_asked_for() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let id = engine.container_of(&session).await;
        let made: serde_json::Value =
            serde_json::from_str(&engine.command(&["inspect", &id])).unwrap();
        let host = &made[0]["HostConfig"];
        assert_eq!(
            (&host["Privileged"], &host["ReadonlyRootfs"]),
            (&false.into(), &true.into())
        );
        assert_eq!(
            (&host["NetworkMode"], &host["AutoRemove"]),
            (&"none".into(), &true.into())
        );
        assert_eq!(
            (&host["CapDrop"], &host["CapAdd"]),
            (&serde_json::json!(["ALL"]), &serde_json::Value::Null)
        );
        assert_eq!(host["LogConfig"]["Type"], "none");
        assert_eq!(host["Memory"], ROOMY.memory);
        let mounts = made[0]["Mounts"].as_array().unwrap();
        assert_eq!(
            mounts
                .iter()
                .map(|mount| &mount["Type"])
                .collect::<Vec<_>>(),
            ["volume"]
        );
        assert_eq!(mounts[0]["RW"], false);
    });
}

#[test]
fn a_session_can_neither_end_nor_look_into_what_watches_it() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let attempt = "
import os, signal
def may(act):
    try:
        act()
        return True
    except OSError as error:
        return False
others = [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]
print(len(others) >= 3, [may(lambda: open(f'/proc/{other}/mem', 'rb')) for other in others if \
other == 1])
print(any(may(lambda: os.kill(other, signal.SIGKILL)) for other in others if other != 1))
child = os.fork()
if child == 0:
    signal.pause()
print(may(lambda: os.kill(child, signal.SIGKILL)))";
        let printed = session.ok(attempt).await;
        // A kernel without the sixth landlock lets a session end its own family; everything else
        // holds everywhere.
        let has_signals = engine.shared().isolation().await.contains("signals");
        let expected = format!(
            "True [False]\n{}\nTrue\n",
            if has_signals { "False" } else { "True" }
        );
        assert_eq!(printed, expected);
        assert_eq!(session.ok("print('alive')").await, "alive\n");
    });
}

/// The kernel chooses by size and by score; here the host has given the highest to the first
/// process.
#[test]
fn a_container_that_ends_for_want_of_memory_says_that_its_files_are_gone() {
    on_every_engine(async |engine| {
        let limits = SandboxLimits {
            memory: 160 << 20,
            family_memory: 160 << 20,
            ..ROOMY
        };
        let containers = engine.build().limits(limits).start();
        let session = containers.session();
        session.ok("open('data', 'w').write('here')").await;
        let container = engine.container_of(&session).await;
        let first = engine.command(&["inspect", "--format", "{{.State.Pid}}", &container]);
        for (process, score) in [
            (first.trim(), "1000"),
            (&session.host_pid().await.to_string(), "0"),
        ] {
            std::fs::write(format!("/proc/{process}/oom_score_adj"), score).unwrap();
        }
        let outcome = session
            .execute("data = bytearray(400 << 20)")
            .await
            .unwrap();
        let exit = Exit::OutOfMemory {
            limit: 160 << 20,
            files_kept: false,
        };
        assert_eq!(outcome.status, Status::Died { exit });
        let refused = session.execute("1").await.unwrap_err();
        assert!(
            matches!(&refused, Refused::Ended { why, .. } if why.contains("variables and files are \
                 gone")),
            "{refused}"
        );
        assert!(!session.reset().await.files_kept);
        assert_eq!(session.ok("import os; print(os.listdir())").await, "[]\n");
        // Control: when the interpreter is chosen, as usual, they are kept.
        session.ok("open('data', 'w').write('here')").await;
        let outcome = session
            .execute("data = bytearray(400 << 20)")
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::Died {
                exit: Exit::OutOfMemory {
                    limit: 160 << 20,
                    files_kept: true
                }
            }
        );
        assert!(session.reset().await.files_kept);
        assert_eq!(session.ok("print(open('data').read())").await, "here\n");
        containers.end().await;
    });
}

#[test]
fn every_layer_of_a_container_is_told() {
    on_docker(async |engine| {
        let told = engine.shared().isolation().await;
        for kind in LayerKind::ALL {
            assert!(told.contains(kind.name()), "{told}");
        }
        assert!(told.contains("forks share the container"), "{told}");
    });
}
