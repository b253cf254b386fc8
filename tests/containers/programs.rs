//! Commands that need an approval, in containers. The native cases are in `attacks::programs`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock::approval::{Defaults, Effect, Policy, PolicyRule};
use cellblock::sandbox::container::EngineKind;
use cellblock::session::{Approvals, StateAfter, Status};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{on_docker, on_podman};
use crate::attacks::programs::{FORGE, all, attempts, libc_eperm, reaches_into_no_command};
use crate::support::containers::{Containers, IMAGE, TestEngine};
use crate::support::server::{Era, Server, program_below};
use crate::support::{data_folder, skipped};

/// A backend whose sessions may start no programs, and whose policy lets all commands run.
fn closed(engine: &'static TestEngine) -> &'static Containers {
    static DOCKER: OnceLock<Containers> = OnceLock::new();
    static PODMAN: OnceLock<Containers> = OnceLock::new();
    let place = if engine.kind == EngineKind::Docker {
        &DOCKER
    } else {
        &PODMAN
    };
    place.get_or_init(|| engine.build().refuse_programs(Approvals::default()).start())
}

/// Says that a test is skipped where containers have no landlock: programs are refused there, and
/// none is launched.
async fn has_landlock(engine: &'static TestEngine) -> bool {
    let has = engine
        .shared()
        .isolation()
        .await
        .contains("landlock for files");
    if !has {
        skipped("landlock");
    }
    has
}

#[test]
fn the_kernel_refuses_to_start_programs_on_every_road_and_in_every_copy() {
    on_docker(async |engine| {
        assert_eq!(attempts(&engine.shared().session()).await, all(42, 42)); // control
        let refused = all(libc_eperm(), 127);
        let session = closed(engine).session();
        assert_eq!(attempts(&session).await, refused, "fresh");
        session.ok("x = 1").await;
        session.undo(1).await;
        assert_eq!(attempts(&session).await, refused, "after undo");
        let fork = session.fork().await;
        assert_eq!(attempts(&fork).await, refused, "in a fork");
        assert_eq!(
            attempts(&fork.fork().await).await,
            refused,
            "in a fork of a fork"
        );
        session.reset().await;
        assert_eq!(attempts(&session).await, refused, "after a reset");
        session.execute("import os; os._exit(3)").await.unwrap();
        session.undo(1).await;
        assert_eq!(attempts(&session).await, refused, "after undo of a crash");
        let pooled = engine
            .build()
            .refuse_programs(Approvals::default())
            .pool(1, Duration::from_secs(600))
            .start();
        assert_eq!(
            attempts(&pooled.session()).await,
            refused,
            "in a member of the pool"
        );
        pooled.end().await;
    });
}

#[test]
fn programs_are_refused_and_launched_on_podman_too() {
    on_podman(async |engine| {
        let session = closed(engine).session();
        assert_eq!(attempts(&session).await, all(libc_eperm(), 127));
        if has_landlock(engine).await {
            assert_eq!(
                session.ok("!echo one; exit 3\nprint(_exit_code)").await,
                "one\n3\n"
            );
        }
    });
}

#[test]
fn all_processes_but_the_first_have_the_filter_and_none_can_add_another() {
    on_docker(async |engine| {
        let session = closed(engine).session();
        let count = "
import os
def filters(process):
    lines = open(f'/proc/{process}/status').read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith('Seccomp_filters')))
others = [int(name) for name in os.listdir('/proc') if name.isdigit() and name != '1']
print(len(others) >= 3, {filters(process) - filters(1) for process in others})
import ctypes
library = ctypes.CDLL(None, use_errno=True)
print(library.prctl(22, 2, 0, 0, 0), ctypes.get_errno(), library.prctl(3, 0, 0, 0, 0))";
        assert_eq!(session.ok(count).await, "True {1}\n-1 1 1\n");
    });
}

#[test]
fn commands_run_in_all_their_forms() {
    on_docker(async |engine| {
        if !has_landlock(engine).await {
            return;
        }
        let session = closed(engine).session();
        assert_eq!(
            session
                .ok("print('before')\n!echo out; exit 3\nprint(_exit_code)")
                .await,
            "before\nout\n3\n"
        );
        assert_eq!(
            session
                .ok("name = 'X'\nx = !echo $name {name.lower()}; echo err >&2\nprint(list(x))")
                .await,
            "['X x', 'err']\n"
        );
        assert_eq!(
            session
                .ok("%%bash --out o\nread line; echo got $line\nignored\necho two")
                .await,
            ""
        );
        assert_eq!(session.ok("print(o)").await, "got ignored\ntwo\n\n");
        assert_eq!(
            session.ok("%%script no-such-thing\nx").await,
            "Couldn't find program: 'no-such-thing'\n"
        );
        assert_eq!(
            session
                .ok("import os; print(os.system('exit 4') >> 8)")
                .await,
            "4\n"
        );
        let called = "import subprocess; print(subprocess.run(['wc', '-c'], input='x' * 500_000, \
                      capture_output=True, text=True).stdout)";
        assert_eq!(session.ok(called).await, "500000\n\n");
        assert_eq!(
            session.ok("!yes | head -n 2").await,
            "y\ny\n",
            "a broken pipe ends a program"
        );
        assert_eq!(
            session
                .ok("os.makedirs('sub'); os.chdir('sub')\n!pwd; touch here; ls")
                .await,
            "/work/sub\nhere\n"
        );
        let large = session.ok("!seq 200000").await;
        assert!(large.ends_with("\n199999\n200000\n") && large.starts_with("1\n2\n"));
        session.execute("!kill -9 $$").await.unwrap();
        assert_eq!(session.ok("print(_exit_code)").await, "-9\n");
        let fork = session.fork().await;
        assert_eq!(
            fork.ok("!touch mine && echo made; touch /work/theirs 2> /dev/null || echo refused")
                .await,
            "made\nrefused\n"
        );
    });
}

#[test]
fn a_command_has_the_variables_of_the_session_and_what_the_code_changed() {
    on_docker(async |engine| {
        if !has_landlock(engine).await {
            return;
        }
        let session = closed(engine).session();
        let compare = "
import os, subprocess
text = subprocess.run(['/usr/bin/env', '-0'], capture_output=True).stdout.decode()
of_command = dict(line.split('=', 1) for line in text.split('\\0') if line)
print(sorted(set(of_command.items()) ^ set(os.environ.items())), 'GIVEN' in of_command)";
        assert_eq!(session.ok(compare).await, "[] True\n");
        session
            .ok("os.environ['NEW'] = 'x y'; del os.environ['LANG']")
            .await;
        assert_eq!(session.ok(compare).await, "[] True\n");
    });
}

#[test]
fn a_denied_command_does_not_run_and_says_why() {
    on_docker(async |engine| {
        let policy = Policy::new(Defaults {
            shell: Effect::Deny,
            ..Defaults::default()
        });
        let approvals = Approvals {
            policy: Arc::new(policy),
            ..Approvals::default()
        };
        let denying = engine.build().refuse_programs(approvals).start();
        let session = denying.session();
        for cell in [
            "!touch ran",
            "x = !touch ran",
            "%%bash\ntouch ran",
            "import os; os.system('touch ran')",
        ] {
            let outcome = session.execute(cell).await.unwrap();
            let Status::Raised(error) = &outcome.status else {
                panic!("{cell}: {outcome:?}")
            };
            assert_eq!(error.name, "CommandRefused", "{cell}");
            assert!(
                error.message.contains("`approve_shell: deny`"),
                "{cell}: {}",
                error.message
            );
        }
        session.ok(FORGE).await;
        let forged =
            "print(forge(['/bin/touch', '/work/ran'], approved=True), os.path.exists('/work/ran'))";
        assert_eq!(session.ok(forged).await, "(False, 'denied', None) False\n");
        // Pipes that were handed over for nothing are let go of: there are never more than 64
        // pairs.
        let many = "print({forge(['/bin/true'])[1] for _ in range(200)})";
        assert_eq!(session.ok(many).await, "{'denied'}\n");
        if has_landlock(engine).await {
            let allowed = closed(engine).session();
            allowed.ok(FORGE).await;
            assert_eq!(
                allowed.ok(forged).await,
                "(True, None, 0) True\n",
                "control"
            );
        }
        denying.end().await;
    });
}

#[test]
fn the_code_of_a_session_and_a_command_cannot_reach_into_each_other() {
    on_docker(async |engine| {
        if !has_landlock(engine).await {
            return;
        }
        let session = closed(engine).session();
        // Between sessions and commands, older kernels let signals pass.
        reaches_into_no_command(&session, 4).await;
        let code = "
reach = f'''
try:
    open('/proc/{os.getpid()}/mem', 'rb')
    print('done')
except OSError as error:
    print(type(error).__name__)
'''
import sys
print(subprocess.run([sys.executable, '-I', '-c', reach], capture_output=True, text=True).stdout)";
        assert_eq!(session.ok(code).await, "PermissionError\n\n");
    });
}

#[test]
fn a_rule_about_a_command_holds_in_forks_too_whatever_their_folder_is_called() {
    on_docker(async |engine| {
        if !has_landlock(engine).await {
            return;
        }
        let mut policy = Policy::new(Defaults {
            shell: Effect::Deny,
            ..Defaults::default()
        });
        policy.add(
            PolicyRule::parse(&json!({"allow": {"command": "pwd"}})).unwrap(),
            "the test",
        );
        let approvals = Approvals {
            policy: Arc::new(policy),
            ..Approvals::default()
        };
        let backend = engine.build().refuse_programs(approvals).start();
        let session = backend.session();
        assert_eq!(session.ok("!pwd").await, "/work\n");
        let fork = session.fork().await;
        assert!(fork.ok("!pwd").await.starts_with("/forks/"));
        let elsewhere = fork
            .execute("import os; os.chdir('/tmp')\n!pwd")
            .await
            .unwrap();
        assert!(
            matches!(elsewhere.status, Status::Raised(_)),
            "{elsewhere:?}"
        );
        backend.end().await;
    });
}

#[test]
fn the_program_denies_commands_in_containers() {
    on_docker(async |engine| {
        tokio::task::block_in_place(|| {
            let mut command = program_below(&data_folder());
            command
                .args([
                    "mcp",
                    "--backend",
                    "docker",
                    "--container-tag",
                    IMAGE,
                    "--keep-sessions",
                    "off",
                ])
                .args(["--approve-shell", "deny", "--approve-domains", "ask"])
                .env("DOCKER_HOST", engine.address.to_string());
            let server = Server::spawn(&mut command, Era::Initialize);
            server.greet();
            let session = server.session();
            let refused = session.call("execute_ipython_cell", json!({"code": "!echo ran"}));
            assert!(
                refused.text().contains("`approve_shell: deny`"),
                "{}",
                refused.text()
            );
            let started = "
import posix
try:
    print(posix.posix_spawn('/bin/true', ['true'], {}))
except PermissionError as error:
    print('refused', error.errno)";
            assert_eq!(session.text(started), "refused 1");
            // A name that somebody could allow is known inside; this client has nobody who could be
            // asked.
            let connect = "
import socket
print(socket.gethostbyname('api.example.com').startswith('198.18.'))
try:
    socket.create_connection(('api.example.com', 443), 20).recv(1)
except OSError as error:
    print(type(error).__name__)";
            let tried = session.call("execute_ipython_cell", json!({"code": connect}));
            assert!(
                tried.text().starts_with("True\nConnectionResetError"),
                "{}",
                tried.text()
            );
            assert!(
                tried.text().contains("blocked: api.example.com:443"),
                "{}",
                tried.text()
            );
        });
    });
}

/// How many processes of this name there are, as a session sees its container.
const COUNT: &str = "
import os
def count(name):
    found = 0
    for number in os.listdir('/proc'):
        try:
            found += number.isdigit() and open(f'/proc/{number}/comm').read().strip() == name
        except OSError:
            pass
    return found
";

#[test]
fn nothing_of_a_command_is_left_after_a_time_limit_and_a_reset() {
    on_docker(async |engine| {
        if !has_landlock(engine).await {
            return;
        }
        let session = closed(engine).session();
        session.ok("pass").await;
        let watcher = session.fork().await;
        watcher.ok(COUNT).await;
        let wait = "
import time
deadline = time.monotonic() + 20
while count('sleep') and time.monotonic() < deadline:
    os.sched_yield()
print(count('sleep'))";
        let limit = Duration::from_secs(1);
        for cell in ["!sleep 1000", "!trap '' INT; sleep 1000 & sleep 1000"] {
            let outcome = session
                .execute_with(cell, limit, CancellationToken::new())
                .await
                .unwrap();
            assert_eq!(
                outcome.status,
                Status::TimedOut {
                    limit,
                    state: StateAfter::Kept
                },
                "{cell}"
            );
            assert_eq!(watcher.ok(wait).await, "0\n", "{cell}");
        }
        session
            .ok("!sleep 1000 > /dev/null 2>&1 &\n!setsid sleep 1000 > /dev/null 2>&1 &")
            .await;
        // A shell that has ended may not have become what it starts in the background yet.
        let begun = wait.replace("while count('sleep') and", "while count('sleep') < 2 and");
        assert_eq!(
            watcher.ok(&begun).await,
            "2\n",
            "control: they go on in the background"
        );
        session.reset().await;
        assert_eq!(watcher.ok(wait).await, "0\n");
        let unread = "reader, writer = os.pipe(); forge(['/usr/bin/yes'], [writer, writer])";
        session.ok(FORGE).await;
        let outcome = session
            .execute_with(unread, limit, CancellationToken::new())
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::TimedOut {
                limit,
                state: StateAfter::Kept
            }
        );
        assert_eq!(session.ok("!echo again").await, "again\n");
    });
}
