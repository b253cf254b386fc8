//! What separates a container from the host and from other containers.

use std::time::Duration;

use cellblock::sandbox::container::ContainerBind;
use cellblock::sandbox::{Exit, LayerKind, SandboxLimits};
use cellblock::session::{Refused, Status};
use cellblock_jail::posture::Posture;

use super::{on_docker, on_every_engine};
use crate::support::native::{self, ROOMY};

#[test]
fn a_session_in_a_container_has_given_up_everything() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let interpreter = Posture::read(session.host_pid().await).unwrap();
        let own = Posture::read(std::process::id()).unwrap();
        assert!(interpreter.uids.iter().chain(&interpreter.gids).all(|id| *id >= 0x7000_0000), "{interpreter:?}");
        assert_eq!(interpreter.capabilities, [0; 5]);
        assert!(interpreter.no_new_privileges);
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
        let made: serde_json::Value = serde_json::from_str(&engine.command(&["inspect", &id])).unwrap();
        let host = &made[0]["HostConfig"];
        assert_eq!((&host["Privileged"], &host["ReadonlyRootfs"]), (&false.into(), &true.into()));
        assert_eq!((&host["NetworkMode"], &host["AutoRemove"]), (&"none".into(), &true.into()));
        assert_eq!((&host["CapDrop"], &host["CapAdd"]), (&serde_json::json!(["ALL"]), &serde_json::Value::Null));
        assert_eq!(host["LogConfig"]["Type"], "none");
        assert_eq!(host["Memory"], ROOMY.memory);
        let mounts = made[0]["Mounts"].as_array().unwrap();
        assert_eq!(mounts.iter().map(|mount| &mount["Type"]).collect::<Vec<_>>(), ["volume"]);
        assert_eq!(mounts[0]["RW"], false);
    });
}

#[test]
fn two_containers_are_two_users() {
    on_docker(async |engine| {
        let (one, other) = (engine.shared().session(), engine.shared().session());
        let who = "import os; print(os.getuid())";
        assert_eq!(one.ok(who).await, one.ok(who).await); // control
        assert_ne!(one.ok(who).await, other.ok(who).await);
    });
}

#[test]
fn nothing_can_be_written_but_the_folders_of_the_session() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let attempt = "
import os
def writes(path):
    try:
        with open(path, 'w') as file:
            file.write('x')
        return True
    except OSError as error:
        return type(error).__name__
print([writes(path) for path in ('/work/a', '/tmp/a', '/dev/shm/a')])
print([writes(path) is True for path in ('/a', '/etc/passwd', '/opt/cellblock/a', '/usr/a', '/proc/sys/kernel/core_pattern', '/sys/a', '/run/a')])";
        assert_eq!(
            session.ok(attempt).await,
            "[True, True, True]\n[False, False, False, False, False, False, False]\n"
        );
    });
}

#[test]
fn there_is_no_network_and_no_engine_inside() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let attempt = "
import os, socket
def reaches(*address):
    try:
        socket.create_connection(address, 2).close()
        return True
    except OSError as error:
        return error.strerror or type(error).__name__
server = socket.create_server(('127.0.0.1', 0))
print(reaches('127.0.0.1', server.getsockname()[1]))
print(reaches('192.0.2.1', 80))
print([path for path in ('/var/run/docker.sock', '/run/docker.sock', '/run/podman/podman.sock') if os.path.exists(path)])";
        let printed = native::everything(&session.execute(attempt).await.unwrap());
        let mut lines = printed.lines();
        assert_eq!(lines.next(), Some("True"), "{printed}"); // control
        assert_eq!(lines.next(), Some("Network is unreachable"), "{printed}");
        assert!(!printed.contains("docker.sock") && !printed.contains("podman.sock"), "{printed}");
    });
}

#[test]
fn calls_that_open_ways_out_are_refused() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let attempt = "
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
def refused(number, *arguments):
    return library.syscall(number, *arguments) == -1 and ctypes.get_errno() in (1, 38)
# mount, unshare, setns, ptrace, bpf, keyctl, process_vm_writev, io_uring_setup, userfaultfd, clone3, and getpid as a control
print([refused(number, 0, 0, 0, 0) for number in (165, 272, 308, 101, 321, 250, 311, 425, 323, 435)], refused(39))";
        let all = ["True"; 10].join(", ");
        assert_eq!(session.ok(attempt).await, format!("[{all}] False\n"));
    });
}

#[test]
fn a_session_can_neither_end_nor_look_into_what_watches_it() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session.ok("pass").await;
        session.reset().await; // Since then there is a warm process too.
        let attempt = "
import os, signal
def may(act):
    try:
        act()
        return True
    except OSError as error:
        return False
others = [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]
print(len(others) >= 3, [may(lambda: open(f'/proc/{other}/mem', 'rb')) for other in others if other == 1])
print(any(may(lambda: os.kill(other, signal.SIGKILL)) for other in others if other != 1))
child = os.fork()
if child == 0:
    signal.pause()
print(may(lambda: os.kill(child, signal.SIGKILL)))";
        let printed = session.ok(attempt).await;
        // A kernel without the sixth landlock lets a session end its own family; everything else holds everywhere.
        let has_signals = engine.shared().isolation().await.contains("signals");
        let expected = format!("True [False]\n{}\nTrue\n", if has_signals { "False" } else { "True" });
        assert_eq!(printed, expected);
        assert_eq!(session.ok("print('alive')").await, "alive\n");
    });
}

/// The kernel chooses by size and by score; here the host has given the highest to the first process.
#[test]
fn a_container_that_ends_for_want_of_memory_says_that_its_files_are_gone() {
    on_every_engine(async |engine| {
        let limits = SandboxLimits { memory: 160 << 20, family_memory: 160 << 20, ..ROOMY };
        let containers = engine.build().limits(limits).start();
        let session = containers.session();
        session.ok("open('data', 'w').write('here')").await;
        let container = engine.container_of(&session).await;
        let first = engine.command(&["inspect", "--format", "{{.State.Pid}}", &container]);
        for (process, score) in [(first.trim(), "1000"), (&session.host_pid().await.to_string(), "0")] {
            std::fs::write(format!("/proc/{process}/oom_score_adj"), score).unwrap();
        }
        let outcome = session.execute("data = bytearray(400 << 20)").await.unwrap();
        let exit = Exit::OutOfMemory { limit: 160 << 20, files_kept: false };
        assert_eq!(outcome.status, Status::Died { exit });
        let refused = session.execute("1").await.unwrap_err();
        assert!(
            matches!(&refused, Refused::Ended { why, .. } if why.contains("variables and files are gone")),
            "{refused}"
        );
        assert!(!session.reset().await.files_kept);
        assert_eq!(session.ok("import os; print(os.listdir())").await, "[]\n");
        // Control: when the interpreter is chosen, as usual, they are kept.
        session.ok("open('data', 'w').write('here')").await;
        let outcome = session.execute("data = bytearray(400 << 20)").await.unwrap();
        assert_eq!(outcome.status, Status::Died { exit: Exit::OutOfMemory { limit: 160 << 20, files_kept: true } });
        assert!(session.reset().await.files_kept);
        assert_eq!(session.ok("print(open('data').read())").await, "here\n");
        containers.end().await;
    });
}

#[test]
fn processes_are_limited_and_a_bomb_of_them_ends_with_its_session() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let bomb = "
import os
count = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        count += 1
except OSError:
    print('refused')";
        let outcome = session.execute_with(bomb, Duration::from_secs(5), Default::default()).await.unwrap();
        assert!(native::everything(&outcome).contains("refused"), "{outcome:?}");
        session.reset().await;
        assert_eq!(session.ok("print('alive')").await, "alive\n");
        let processes = session.ok("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))").await;
        assert!(processes.trim().parse::<u32>().unwrap() < 10, "{processes}");
    });
}

#[test]
fn a_folder_of_the_operator_is_shown_as_it_was_meant() {
    on_docker(async |engine| {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("open", "o"), ("closed", "c")] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("file"), text).unwrap();
            std::os::unix::fs::chown(folder.path().join(name), Some(12_345), Some(12_345)).unwrap();
        }
        let bind = |name: &str, writable| ContainerBind {
            host: folder.path().join(name),
            inside: format!("/work/{name}").into(),
            writable,
        };
        let containers = engine.build().bind(bind("open", true)).bind(bind("closed", false)).start();
        let session = containers.session();
        let attempt = "
print(open('open/file').read(), open('closed/file').read())
open('open/new', 'w').write('from inside')
try:
    open('closed/new', 'w')
except OSError as error:
    print(error.strerror)";
        assert_eq!(session.ok(attempt).await, "o c\nRead-only file system\n");
        assert_eq!(std::fs::read_to_string(folder.path().join("open/new")).unwrap(), "from inside");
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
