//! Where programs need an approval, code cannot start one in any way, and an approved one is
//! exactly the approved program, confined like the session.
//!
//! `shared()` of `native` is the control: there the same attempts work.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock::approval::{Defaults, Effect, Policy};
use cellblock::sandbox::{LaunchError, Rules};
use cellblock::session::Approvals;
use cellblock::session::{StateAfter, Status};
use cellblock_jail::posture::Posture;
use cellblock_jail::wire::{Bind, OmittedLayer};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Builder, Native, Session, run};
use crate::support::{is_root, skipped};

/// A backend whose sessions may not start programs, and whose policy allows all commands.
fn closed() -> &'static Native {
    static BACKEND: OnceLock<Native> = OnceLock::new();
    BACKEND.get_or_init(|| Builder::new("minimal").refuse_programs().start())
}

/// The same, with a policy that allows none.
fn denying() -> &'static Native {
    static BACKEND: OnceLock<Native> = OnceLock::new();
    let policy = Policy::new(Defaults {
        shell: Effect::Deny,
        ..Defaults::default()
    });
    let approvals = Approvals {
        policy: Arc::new(policy),
        ..Approvals::default()
    }
    .into();
    BACKEND.get_or_init(|| {
        Builder::new("minimal")
            .refuse_programs()
            .sessions(|sessions| sessions.approvals = approvals)
            .start()
    })
}

/// Tries to become `sh -c "exit 42"` in every way, each in a child; prints the exit status of each,
/// which is the kernel's errno if it was refused.
const ATTEMPTS: &str = r#"
import _posixsubprocess, ctypes, json, os, platform, posix, threading
libc = ctypes.CDLL(None, use_errno=True)
WORDS = [b"sh", b"-c", b"exit 42"]
EXECVE, EXECVEAT = (59, 322) if platform.machine() == "x86_64" else (221, 281)

def vector(words):
    return (ctypes.c_char_p * (len(words) + 1))(*words, None)

def end():
    os._exit(ctypes.get_errno())

def by_python(): posix.execv("/bin/sh", WORDS)
def by_path(): posix.execve("/proc/self/root/bin/sh", WORDS, {})
def by_descriptor(): posix.execve(os.open("/bin/sh", os.O_RDONLY), WORDS, {})
def by_library(): libc.execve(b"/bin/sh", vector(WORDS), vector([])); end()
def by_number(): libc.syscall(EXECVE, b"/bin/sh", vector(WORDS), vector([])); end()

def by_execveat():
    shell = os.open("/bin/sh", os.O_RDONLY)
    libc.syscall(EXECVEAT, shell, b"", vector(WORDS), vector([]), 0x1000)
    end()

def by_memory():
    copy = os.memfd_create("sh")
    with open("/bin/sh", "rb") as shell:
        os.write(copy, shell.read())
    libc.fexecve(copy, vector(WORDS), vector([]))
    end()

def by_thread():
    thread = threading.Thread(target=by_library)
    thread.start()
    thread.join()

def by_spawn():
    pid = ctypes.c_int()
    error = libc.posix_spawn(ctypes.byref(pid), b"/bin/sh", None, None, vector(WORDS), vector([]))
    os._exit(error or os.waitstatus_to_exitcode(os.waitpid(pid.value, 0)[1]))

def by_system():
    os._exit(os.waitstatus_to_exitcode(libc.system(b"exit 42")))

def by_grandchild():
    child = os.fork()
    if child == 0:
        by_library()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def result_of(attempt):
    child = os.fork()
    if child == 0:
        try:
            attempt()
        except OSError as refused:
            os._exit(refused.errno)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def results():
    return {
        name: result_of(attempt)
        for name, attempt in globals().items() if name.startswith("by_")
    }
"#;

pub(crate) async fn attempts(session: &Session) -> Value {
    session.ok(ATTEMPTS).await;
    session.json("print(json.dumps(results()))").await
}

/// All attempts with this status; the C library's `system` reports a refusal as 127.
pub(crate) fn all(status: i32, of_system: i32) -> Value {
    let names = [
        "by_python",
        "by_path",
        "by_descriptor",
        "by_library",
        "by_number",
        "by_execveat",
        "by_memory",
        "by_thread",
        "by_spawn",
        "by_grandchild",
    ];
    let mut all = json!({"by_system": of_system});
    for name in names {
        all[name] = json!(status);
    }
    all
}

#[test]
fn the_kernel_refuses_to_start_programs_on_every_road_and_in_every_copy() {
    run(async {
        // Control.
        assert_eq!(attempts(&native::shared().session()).await, all(42, 42));

        let refused = all(libc_eperm(), 127);
        let session = closed().session();
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

        let pooled = Builder::new("minimal").refuse_programs().pool(1).start();
        assert_eq!(
            attempts(&pooled.session()).await,
            refused,
            "in a member of the pool"
        );
        pooled.end().await;
    });
}

pub(crate) fn libc_eperm() -> i32 {
    rustix::io::Errno::PERM.raw_os_error()
}

#[test]
fn every_interpreter_is_seen_to_have_the_filter_before_it_runs() {
    run(async {
        let backend = Builder::new("minimal")
            .refuse_programs()
            .skip_step("refuse programs")
            .start();
        let failure = backend
            .failure()
            .await
            .expect("a session that may start programs was started");
        assert!(
            failure.contains("it has 3 of 4 seccomp filters"),
            "{failure}"
        );
        backend.end().await;
        // Control: where programs are free, the step does not exist, so skipping it has no effect.
        let backend = Builder::new("minimal").skip_step("refuse programs").start();
        assert_eq!(backend.session().ok("print(1)").await, "1\n");
        backend.end().await;
    });
}

#[test]
fn without_filters_there_is_no_approval_of_programs() {
    run(async {
        let backend = Builder::new("minimal")
            .refuse_programs()
            .leave_out(&[OmittedLayer::Seccomp])
            .start();
        let error = backend
            .backend
            .launch()
            .await
            .err()
            .expect("nothing would refuse programs");
        assert!(
            matches!(&error, LaunchError::Preparation { why } if why.contains("approval")),
            "{error}"
        );
        backend.end().await;
    });
}

#[test]
fn without_landlock_programs_are_refused_and_none_is_launched() {
    run(async {
        let backend = Builder::new("minimal")
            .refuse_programs()
            .leave_out(&[OmittedLayer::Landlock])
            .start();
        let session = backend.session();
        assert_eq!(attempts(&session).await, all(libc_eperm(), 127));
        let refused = session.execute("!echo x").await.unwrap();
        assert!(
            matches!(&refused.status, Status::Raised(error) if error.message.contains("landlock")),
            "{refused:?}"
        );
        // Control.
        assert_eq!(closed().session().ok("!echo x").await, "x\n");
        backend.end().await;
    });
}

#[test]
fn commands_run_in_all_their_forms() {
    run(async {
        let session = closed().session();
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
            session
                .ok("%%python\nimport sys; print(sys.stdin.read(), 1 + 1)")
                .await,
            " 2\n"
        );
        assert_eq!(session.ok("%%script sh -e\ntrue\necho $0").await, "sh\n");
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
        let called = "import subprocess; print(subprocess.run(['wc', '-c'], input='four', \
                      capture_output=True, text=True).stdout)";
        assert_eq!(session.ok(called).await, "4\n\n");
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
        assert_eq!(session.ok("!seq 200000 | tail -n 1").await, "200000\n");
        let large = session.ok("!seq 200000").await;
        assert!(large.ends_with("\n199999\n200000\n") && large.starts_with("1\n2\n"));
        let stopped = session.execute("!kill -9 $$").await.unwrap();
        assert_eq!(stopped.status, Status::Completed);
        assert_eq!(session.ok("print(_exit_code)").await, "-9\n");
    });
}

#[test]
fn a_command_has_the_variables_of_the_session_and_what_the_code_changed() {
    run(async {
        let session = closed().session();
        let compare = "
import os, subprocess
text = subprocess.run(['/usr/bin/env', '-0'], capture_output=True).stdout.decode()
of_command = dict(line.split('=', 1) for line in text.split('\\0') if line)
print(sorted(set(of_command.items()) ^ set(os.environ.items())))";
        assert_eq!(session.ok(compare).await, "[]\n");
        session
            .ok("os.environ['NEW'] = 'x y'; del os.environ['LANG']")
            .await;
        assert_eq!(session.ok(compare).await, "[]\n");
        // Control: the runner has reported the difference, and nothing else.
        let told =
            "from cellblock_runner import commands; print(commands._differences(os.environ))";
        assert_eq!(session.ok(told).await, "{'NEW': 'x y', 'LANG': None}\n");
    });
}

#[test]
fn a_denied_command_does_not_run_and_says_why() {
    run(async {
        let session = denying().session();
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
        assert_eq!(
            session.ok("import os; print(os.path.exists('ran'))").await,
            "False\n"
        );
        let allowed = closed().session();
        allowed.ok("!touch ran").await;
        assert_eq!(
            allowed.ok("import os; print(os.path.exists('ran'))").await,
            "True\n",
            "control"
        );
    });
}

/// Writes a request for a command to the channel by hand, as code that shares a process with the
/// runner can.
pub(crate) const FORGE: &str = r#"
import json, os, socket, struct
from cellblock_runner import host_calls, commands

def forge(words, write_ends=None, **more):
    class Given:
        def __init__(self):
            self.write_ends = write_ends or [os.dup(1001), os.dup(1002)]
        def close_sent(self): pass
        def descriptors(self): return ()
        def take(self): pass
    members = {"words": words, "folder": "/", "environment": {}, **more}
    answer = host_calls._active.ask_for_command(members, Given())
    return answer.get("ok"), answer.get("reason"), answer.get("code")
"#;

#[test]
fn a_question_that_code_forges_is_decided_about_like_any_other() {
    run(async {
        let (allowed, denied) = (closed().session(), denying().session());
        for session in [&allowed, &denied] {
            session.ok(FORGE).await;
        }
        let forged = "print(forge(['/bin/touch', '/work/ran']), os.path.exists('/work/ran'))";
        assert_eq!(
            allowed.ok(forged).await,
            "(True, None, 0) True\n",
            "control"
        );
        assert_eq!(denied.ok(forged).await, "(False, 'denied', None) False\n");
        // Members that claim an approval change nothing.
        let claimed =
            "print(forge(['/bin/touch', '/work/ran'], approved=True, ok=True, decision='allow'))";
        assert_eq!(denied.ok(claimed).await, "(False, 'denied', None)\n");
    });
}

#[test]
fn a_command_never_reads_from_where_it_writes_to() {
    run(async {
        let session = closed().session();
        session.ok(FORGE).await;
        let offered = "
reader, writer = os.pipe()
both = os.open(f'/proc/self/fd/{reader}', os.O_RDWR)
for write_ends in ([writer, writer], [reader, writer], [writer, both]):
    print(forge(['/bin/true'], write_ends))";
        let expected = "(True, None, 0)\n(False, 'invalid', None)\n(False, 'invalid', None)\n";
        assert_eq!(session.ok(offered).await, expected);
        // A descriptor that is not a pipe breaks the protocol: it could be anything.
        let socket = "pair = socket.socketpair(); forge(['/bin/true'], [pair[0].fileno(), \
                      pair[1].fileno()])";
        assert!(matches!(
            session.execute(socket).await.unwrap().status,
            Status::ProtocolError { .. }
        ));
    });
}

#[test]
fn unfit_commands_are_refused_whole() {
    run(async {
        let session = closed().session();
        session.ok(FORGE).await;
        let forged = "
for words, more in (
    (['/bin/true'], {}),
    ([], {}),
    (['a\\0b'], {}),
    (['x' * 200_000], {}),
    (['/bin/true'], {'stdin': 'x' * 2_000_000}),
    (['/bin/true'], {'environment': {'A=B': '1'}}),
    (['/bin/true'], {'folder': '/no/such/folder'}),
    (['/etc/passwd'], {}),
):
    print(forge(words, **more)[:2])";
        let answers = session.ok(forged).await;
        let answers: Vec<&str> = answers.lines().collect();
        assert_eq!(answers[0], "(True, None)");
        assert!(
            answers[1..6]
                .iter()
                .all(|answer| *answer == "(False, 'invalid')"),
            "{answers:?}"
        );
        assert_eq!(
            answers[6..],
            ["(False, 'unavailable')", "(False, 'refused')"]
        );
    });
}

/// Waits in a cell until a program with this name exists; its pid is `found`.
pub(crate) const FIND: &str = r#"
import os
def find(name):
    while True:
        for number in os.listdir('/proc'):
            try:
                if number.isdigit() and open(f'/proc/{number}/comm').read().strip() == name:
                    return int(number)
            except OSError:
                pass
"#;

/// Makes a session access one of its own processes, which works, and a command, which must not, in
/// the first `roads` of five ways. The last one is a signal.
pub(crate) async fn reaches_into_no_command(session: &Session, roads: usize) {
    session.ok(FIND).await;
    session.ok(&format!("roads = {roads}")).await;
    let code = r#"
import signal, subprocess, threading
def attempts(process):
    def tried(attempt):
        try:
            attempt()
            return 'done'
        except OSError as error:
            return type(error).__name__
    all_roads = (
        lambda: open(f'/proc/{process}/mem', 'rb'),
        lambda: open(f'/proc/{process}/environ', 'rb').read(),
        lambda: os.readlink(f'/proc/{process}/fd/0'),
        lambda: os.readlink(f'/proc/{process}/exe'),
        lambda: os.kill(process, signal.SIGCONT),
    )
    return [tried(attempt) for attempt in all_roads[:roads]]
own = os.fork()
if own == 0:
    signal.pause()
print(attempts(own))
os.kill(own, signal.SIGKILL)
threading.Thread(target=lambda: subprocess.run(['sleep', '1000'])).start()
print(attempts(find('sleep')))"#;
    let expected = format!(
        "{:?}\n{:?}\n",
        vec!["done"; roads],
        vec!["PermissionError"; roads]
    )
    .replace('"', "'");
    assert_eq!(session.ok(code).await, expected);
}

#[test]
fn the_code_of_a_session_cannot_reach_into_a_command() {
    run(async {
        let session = closed().session();
        reaches_into_no_command(&session, 5).await;
        // A command cannot access the session's code either.
        let code = "
reach = f'''
import os
for attempt in (lambda: open('/proc/{os.getpid()}/mem', 'rb'), lambda: os.kill({os.getpid()}, 0)):
    try:
        attempt()
        print('done')
    except OSError as error:
        print(type(error).__name__)
'''
import sys
x = subprocess.run([sys.executable, '-I', '-c', reach], capture_output=True, text=True)
print(x.stdout)";
        assert_eq!(
            session.ok(code).await,
            "PermissionError\nPermissionError\n\n"
        );
    });
}

#[test]
fn a_command_is_confined_like_the_session_as_the_host_sees_it() {
    run(async {
        let session = closed().session();
        let interpreter = session.host_pid().await;
        session.ok(FIND).await;
        let begin = "
import subprocess, threading
thread = threading.Thread(target=lambda: subprocess.run(['sleep', '1000']))
thread.start()
print(find('sleep'))";
        let cancel = CancellationToken::new();
        let code = format!("{begin}\nthread.join()");
        let running = session.execute_with(&code, Duration::from_secs(60), cancel.clone());
        let looked = async {
            let command = loop {
                let inside = std::fs::read_link(format!("/proc/{interpreter}/ns/pid")).unwrap();
                let found = native::processes().into_iter().find(|process| {
                    let namespace =
                        std::fs::read_link(format!("/proc/{}/ns/pid", process.pid)).ok();
                    process.name == "sleep" && namespace.as_ref() == Some(&inside)
                });
                match found {
                    Some(process) => break process.pid,
                    None => tokio::task::yield_now().await,
                }
            };
            let (of_command, of_session) = (
                Posture::read(command).unwrap(),
                Posture::read(interpreter).unwrap(),
            );
            assert_eq!(
                (of_command.seccomp_filters, of_session.seccomp_filters),
                (3, 4)
            );
            let alike = |mut posture: Posture| {
                posture.seccomp_filters = 0;
                // Each creates its own, with the same group as its root.
                posture.namespaces.remove("cgroup");
                posture
            };
            assert_eq!(alike(of_command), alike(of_session));
            if is_root() {
                assert_eq!(
                    native::control_groups(command),
                    native::control_groups(interpreter)
                );
            } else {
                skipped("root (control groups of a session)");
            }
            native::assert_locked_down(command, &native::OURS);
            let limits = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
            assert_eq!(limits(command), limits(interpreter));
            cancel.cancel();
            command
        };
        let (outcome, command) = tokio::join!(running, looked);
        assert_eq!(
            outcome.unwrap().status,
            Status::Cancelled {
                state: StateAfter::Kept
            }
        );
        gone(command).await;
        assert_eq!(session.ok("!echo again").await, "again\n");
    });
}

/// Waits until a process has ended.
async fn gone(process: u32) {
    let ended = async {
        while std::path::Path::new(&format!("/proc/{process}")).exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended)
        .await
        .expect("a program outlived its time");
}

#[test]
fn a_command_sees_no_more_than_the_session() {
    run(async {
        let session = closed().session();
        let probe = include_str!("../posture/probe.py");
        session.upload("probe.py", probe.as_bytes()).await.unwrap();
        let mut of_session = session.json(probe).await;
        let command = "import subprocess, sys; print(subprocess.run([sys.executable, '-I', \
                       'probe.py'], capture_output=True, text=True).stdout)";
        let mut of_command = session.json(command).await;
        assert_eq!(
            of_command["descriptors"],
            json!([["/dev/null", "pipe", "pipe"], []])
        );
        for facts in [&mut of_session, &mut of_command] {
            facts["descriptors"] = Value::Null;
            for thread in facts["threads"].as_array_mut().unwrap() {
                assert!(["3", "4"].contains(&thread["Seccomp_filters"].as_str().unwrap()));
                thread["Seccomp_filters"] = Value::Null;
            }
        }
        for (name, fact) in of_session.as_object().unwrap() {
            assert_eq!(&of_command[name], fact, "{name}");
        }
    });
}

#[test]
fn nothing_of_a_command_is_left_after_a_time_limit_a_reset_and_the_end_of_the_session() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let bind = Bind {
            host: mark.path().to_owned(),
            inside: "/opt/mark".into(),
        };
        let backend = Builder::new("minimal").refuse_programs().bind(bind).start();
        let sleeping = || {
            native::marked_processes(mark.path())
                .into_iter()
                .filter(|process| process.name == "sleep")
        };
        let session = backend.session();
        let limit = Duration::from_secs(1);
        let outcome = session
            .execute_with("!sleep 1000", limit, CancellationToken::new())
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::TimedOut {
                limit,
                state: StateAfter::Kept
            }
        );
        for process in sleeping() {
            gone(process.pid).await;
        }

        // One that ignores signals, and its children.
        let deaf = "!trap '' INT; sleep 1000 & sleep 1000";
        session
            .execute_with(deaf, limit, CancellationToken::new())
            .await
            .unwrap();
        for process in sleeping() {
            gone(process.pid).await;
        }

        session.ok("!sleep 1000 > /dev/null 2>&1 &").await;
        let left: Vec<u32> = sleeping().map(|process| process.pid).collect();
        assert_eq!(left.len(), 1, "control: it goes on in the background");
        session.reset().await;
        gone(left[0]).await;

        session
            .ok("!setsid sleep 1000 > /dev/null 2>&1 &\nimport time")
            .await;
        session.close().await;
        assert_eq!(sleeping().count(), 0);
        backend.end().await;
        assert!(
            native::marked_processes(mark.path()).is_empty(),
            "nothing is left when the backend has ended"
        );
    });
}

#[test]
fn a_command_that_prints_for_ever_fills_nothing() {
    run(async {
        let session = closed().session();
        let limit = Duration::from_secs(1);
        let outcome = session
            .execute_with("!yes", limit, CancellationToken::new())
            .await
            .unwrap();
        assert_eq!(
            outcome.status,
            Status::TimedOut {
                limit,
                state: StateAfter::Kept
            }
        );
        assert!(native::printed(&outcome).starts_with("y\ny\n"));
        // This pipe has no reader; the command waits, and the cell can be ended.
        session.ok(FORGE).await;
        let unread = "reader, writer = os.pipe(); forge(['/usr/bin/yes'], [writer, writer])";
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

#[test]
fn work_of_the_servers_own_may_start_programs() {
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let bind = Bind {
            host: mark.path().to_owned(),
            inside: "/opt/mark".into(),
        };
        let backend = Builder::new("minimal").refuse_programs().bind(bind).start();
        let filters = || {
            let sessions = native::marked_processes(mark.path()).into_iter();
            let sessions = sessions.filter(|process| {
                process.depth == native::own_depth() + 3 && process.name != "cb-init"
            });
            sessions
                .map(|process| Posture::read(process.pid).unwrap().seccomp_filters)
                .collect::<Vec<_>>()
        };
        let (mut own, _own) = backend.backend.launch_apart().await.unwrap();
        assert_eq!(filters(), [3]);
        own.destroy().await;
        // No approval is requested either, although there is a policy that denies everything.
        let hidden = denying().sessions.hidden(Rules::none()).unwrap();
        let code =
            "import subprocess; print(subprocess.Popen(['sh', '-c', 'exit 42']).wait())\n!echo x";
        let outcome = hidden
            .execute(code, Duration::from_secs(60), 1000)
            .await
            .unwrap();
        assert_eq!(native::everything(&outcome), "42\nx\n");
        let (mut of_session, _of_session) = backend.backend.launch().await.unwrap();
        assert_eq!(filters(), [4], "control");
        of_session.destroy().await;
        backend.end().await;
    });
}
