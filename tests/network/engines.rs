//! What sessions in containers of a real engine reach. The rules are those of `reach` and the rest;
//! these cases show that they hold here too.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cellblock::approval::{ApprovalAnswer, Defaults, Effect, Policy};
use cellblock::sandbox::container::ContainerBind;
use cellblock::sandbox::{Backend, LaunchError, LayerKind};
use cellblock::session::{
    Approvals, Approver, Decision, ExecuteRequest, ExecutionRef, ExecutionReport, Outcome,
    Principal, ProgressChannel,
};
use tokio_util::sync::CancellationToken;

use super::{CONNECT, HERE, Web, blocked, listed, names, network};
use crate::support::containers::{Containers, TestEngine, docker, podman};
use crate::support::native::{Session, printed, run};
use crate::support::server::{finished, program};
use crate::support::{PROGRAM, skipped};

/// The engines of this machine.
fn engines() -> impl Iterator<Item = &'static TestEngine> {
    docker().into_iter().chain(podman())
}

/// A backend from whose containers a server can be reached as `web.test`.
fn opened(engine: &TestEngine, web: &Web) -> Containers {
    let rules = listed(&[
        format!("web.test:{}", web.port()),
        format!("{HERE}:{}", web.port()),
    ]);
    engine.build().network(network(rules, names()), &[]).start()
}

const REFUSED: [&str; 3] = [
    "ConnectionRefusedError\n",
    "ConnectionResetError\n",
    "closed\n",
];

#[test]
fn sessions_in_containers_reach_listed_names_and_nothing_else() {
    run(async {
        for engine in engines() {
            let web = Web::start();
            let backend = opened(engine, &web);
            let session = backend.session();
            let port = web.port();
            session.ok(CONNECT).await;
            assert_eq!(
                session
                    .ok(&format!("print(connect('web.test', {port}))"))
                    .await,
                "HTTP/1.1 200 OK\n"
            ); // control
            // By another program too.
            let other = format!(
                "import subprocess, sys\ncode = \"import urllib.request; \
                 print(urllib.request.urlopen('http://web.test:{port}/').read())\"\n\
                 print(subprocess.run([sys.executable, '-c', code], capture_output=True, \
                 text=True).stdout, end='')"
            );
            assert_eq!(session.ok(&other).await, "b'hello'\n");
            assert_eq!(web.asked(), 2);

            let refused = session
                .execute(&format!("print(connect('other.test', {port}))"))
                .await
                .unwrap();
            assert_eq!(printed(&refused), "gaierror\n");
            assert_eq!(
                blocked(&refused),
                ["blocked: other.test (not in the allowed list)"]
            );
            for target in [
                format!("'web.test', {}", if port == 9 { 10 } else { 9 }),
                format!("'192.0.2.1', {port}"),
                format!("'169.254.169.254', {port}"),
                format!("'2001:db8::1', {port}"),
                "'10.0.0.1', 22".to_owned(),
            ] {
                let answer = session.ok(&format!("print(connect({target}))")).await;
                assert!(REFUSED.contains(&answer.as_str()), "{target}: {answer}");
            }
            assert_eq!(web.asked(), 2);

            // The same after a reset, and from a fork.
            session.reset().await;
            session.ok(CONNECT).await;
            let fork = session.fork().await;
            for each in [&session, &fork] {
                assert_eq!(
                    each.ok(&format!("print(connect('web.test', {port}))"))
                        .await,
                    "HTTP/1.1 200 OK\n"
                );
                assert_eq!(
                    each.ok(&format!("print(connect('other.test', {port}))"))
                        .await,
                    "gaierror\n"
                );
            }
            backend.end().await;
        }
    });
}

#[test]
fn containers_without_a_rule_reach_nothing() {
    run(async {
        for engine in engines() {
            let web = Web::start();
            let session = engine.shared().session();
            session.ok(CONNECT).await;
            for target in [
                format!("'127.0.0.1', {}", web.port()),
                "'192.0.2.1', 80".to_owned(),
                "'web.test', 80".to_owned(),
            ] {
                let answer = session.ok(&format!("print(connect({target}))")).await;
                assert!(
                    ["ConnectionRefusedError\n", "OSError\n", "gaierror\n"]
                        .contains(&answer.as_str()),
                    "{target}: {answer}"
                );
            }
            assert_eq!(web.asked(), 0);
        }
    });
}

#[test]
fn code_in_a_container_changes_nothing_about_its_network() {
    run(async {
        for engine in engines() {
            let web = Web::start();
            let backend = opened(engine, &web);
            let session = backend.session();
            session.ok(CONNECT).await;
            // Takes the route away by which all addresses are local; adds an interface; listens
            // where a door is.
            let answer = session
                .ok("
import struct
def kernel(kind, flags, body):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as caller:
        caller.send(struct.pack('=IHHII', 16 + len(body), kind, flags | 5, 1, 0) + body)
        code = struct.unpack('=i', caller.recv(4096)[16:20])[0]
        if code:
            raise OSError(-code, 'the kernel refuses')
def attempt(deed):
    try:
        deed()
        print('done')
    except OSError as error:
        print(type(error).__name__)
attempt(lambda: kernel(25, 0, struct.pack('=8BI', 2, 0, 0, 0, 255, 3, 254, 2, 0)))
attempt(lambda: kernel(16, 0x400, struct.pack('=BBHiII', 0, 0, 0, 0, 0, 0) + struct.pack('=HH', 8, \
3) + b'new\\0'))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt(lambda: open('/proc/sys/net/ipv4/conf/all/forwarding', 'w'))
attempt(lambda: open('/etc/resolv.conf', 'w'))
")
                .await;
            assert!(
                answer.lines().count() == 6 && !answer.contains("done"),
                "{answer}"
            );
            let port = web.port();
            let thief = session
                .ok(&format!(
                    "attempt(lambda: socket.create_server(('0.0.0.0', {port})))"
                ))
                .await;
            assert_eq!(thief, "OSError\n");
            assert_eq!(
                session
                    .ok(&format!("print(connect('web.test', {port}))"))
                    .await,
                "HTTP/1.1 200 OK\n"
            );
            backend.end().await;
        }
    });
}

#[test]
fn a_session_reaches_no_more_than_each_fork_that_shares_its_container_may() {
    run(async {
        let Some(engine) = docker() else { return };
        let (one, other) = (Web::start(), Web::start());
        let rules = [
            format!("web.test:{}", one.port()),
            format!("other.test:{}", other.port()),
            format!("{HERE}:*"),
        ];
        let backend = engine
            .build()
            .network(network(listed(&rules), names()), &[])
            .start();
        let session = backend.session();
        session.ok(CONNECT).await;
        let fork = session.fork().await;
        let to_one = format!("print(connect('web.test', {}))", one.port());
        let to_other = format!("print(connect('other.test', {}))", other.port());
        for each in [&session, &fork] {
            assert_eq!(each.ok(&to_other).await, "HTTP/1.1 200 OK\n"); // control
        }
        let narrow = listed(&[rules[0].clone(), rules[2].clone()]);
        let request = ExecuteRequest {
            code: String::new(),
            timeout: Duration::from_secs(60),
            max_output_chars: 1000,
            asking: Approver::Nobody,
            rules: Some(narrow),
            recorder: Default::default(),
        };
        backend
            .sessions
            .execute(
                &Principal::local(),
                &fork.id,
                request,
                CancellationToken::new(),
            )
            .await
            .unwrap();
        for each in [&session, &fork] {
            assert_eq!(each.ok(&to_one).await, "HTTP/1.1 200 OK\n");
            assert_eq!(each.ok(&to_other).await, "gaierror\n");
        }
        fork.close().await;
        assert_eq!(session.ok(&to_other).await, "HTTP/1.1 200 OK\n");
        backend.end().await;
    });
}

/// Runs a cell about which a person is asked; returns what they were asked, and how the cell ended
/// after this answer.
async fn answered(
    backend: &Containers,
    session: &Session,
    code: &str,
    answer: ApprovalAnswer,
) -> (Vec<String>, Outcome) {
    let (sessions, owner, long) = (
        &backend.sessions,
        Principal::local(),
        Duration::from_secs(60),
    );
    let request = ExecuteRequest {
        code: code.to_owned(),
        timeout: long,
        max_output_chars: 1000,
        asking: Approver::Person,
        rules: None,
        recorder: Default::default(),
    };
    let news = || ProgressChannel::new(String::new());
    let begun = sessions
        .begin(
            &owner,
            &session.id,
            request,
            Some(long),
            CancellationToken::new(),
            news(),
        )
        .await;
    let underway = match begun.unwrap() {
        ExecutionReport::Underway(underway) => underway,
        ExecutionReport::Finished { outcome, .. } => return (Vec::new(), *outcome),
        ExecutionReport::Nothing => unreachable!("it was submitted"),
    };
    let decisions = underway
        .approvals
        .iter()
        .map(|asked| Decision {
            id: asked.id,
            answer,
        })
        .collect();
    sessions
        .decide(&owner, &underway.handle, decisions)
        .await
        .unwrap();
    match sessions
        .check(
            &owner,
            &ExecutionRef::Handle(underway.handle),
            long,
            1000,
            news(),
        )
        .await
        .unwrap()
    {
        ExecutionReport::Finished { outcome, .. } => (
            underway
                .approvals
                .into_iter()
                .map(|asked| asked.text)
                .collect(),
            *outcome,
        ),
        other => panic!("it has not finished: {other:?}"),
    }
}

#[test]
fn a_person_is_asked_about_a_name_in_the_session_that_wants_it() {
    run(async {
        for engine in engines() {
            let web = Web::start();
            let policy = Policy::new(Defaults {
                domains: Effect::Ask,
                ..Defaults::default()
            });
            let approvals = Approvals {
                policy: Arc::new(policy),
                ..Approvals::default()
            };
            let rules = listed(&[format!("{HERE}:{}", web.port())]);
            let backend = engine
                .build()
                .network(network(rules, names()), &[])
                .approvals(approvals)
                .start();
            let session = backend.session();
            session.ok(CONNECT).await;
            let connect = format!("print(connect('web.test', {}))", web.port());
            let question = format!("connect to web.test at port {}", web.port());
            assert!(
                !session.ok(&connect).await.contains("200"),
                "nobody can be asked"
            ); // control
            let (asked, outcome) =
                answered(&backend, &session, &connect, ApprovalAnswer::Once).await;
            assert_eq!(
                (asked, printed(&outcome)),
                (vec![question.clone()], "HTTP/1.1 200 OK\n".to_owned())
            );

            // While its source runs a cell too, in which nobody can be asked.
            let fork = session.fork().await;
            let waits = "import os\nwhile not os.path.exists('/tmp/over'):\n    os.sched_yield()";
            let waiting = {
                let session = session.clone();
                tokio::spawn(async move { session.execute(waits).await })
            };
            session.runs().await;
            let (asked, outcome) = answered(&backend, &fork, &connect, ApprovalAnswer::Once).await;
            assert_eq!(
                (asked, printed(&outcome)),
                (vec![question.clone()], "HTTP/1.1 200 OK\n".to_owned())
            );
            let (asked, outcome) = answered(&backend, &fork, &connect, ApprovalAnswer::Deny).await;
            assert_eq!(asked, [question]);
            assert!(!printed(&outcome).contains("200"));
            assert!(
                blocked(&outcome).concat().contains("web.test"),
                "{:?}",
                blocked(&outcome)
            );
            fork.ok("open('/tmp/over', 'w').close()").await;
            let outcome = waiting.await.unwrap().unwrap();
            assert!(
                blocked(&outcome).concat().contains("shares its container"),
                "{:?}",
                blocked(&outcome)
            );
            backend.end().await;
        }
    });
}

#[test]
fn another_runtime_is_held_to_the_rules_or_refused() {
    run(async {
        let Some(engine) = docker() else { return };
        if !engine
            .command(&[
                "info",
                "--format",
                "{{range $name, $_ := .Runtimes}}{{$name}} {{end}}",
            ])
            .contains("runsc")
        {
            return skipped("gVisor (package runsc)");
        }
        let closed = engine.build().runtime("runsc").start();
        if closed.backend.launch().await.is_err() {
            return skipped("a gVisor that starts on this kernel");
        }
        let web = Web::start();
        let port = web.port();
        let rules = listed(&[format!("web.test:{port}"), format!("{HERE}:{port}")]);
        let backend = engine
            .build()
            .runtime("runsc")
            .network(network(rules, names()), &[])
            .start();
        let launched = backend.backend.launch().await.map(drop);
        match launched {
            // It was set up to use the network that the engine gives it.
            Ok(()) => {
                let session = backend.session();
                session.ok(CONNECT).await;
                assert_eq!(
                    session
                        .ok(&format!("print(connect('web.test', {port}))"))
                        .await,
                    "HTTP/1.1 200 OK\n"
                );
                assert_eq!(
                    session
                        .ok(&format!("print(connect('other.test', {port}))"))
                        .await,
                    "gaierror\n"
                );
            }
            Err(refused) => {
                assert!(
                    matches!(
                        refused,
                        LaunchError::LayerMissing {
                            kind: LayerKind::Network,
                            ..
                        }
                    ),
                    "{refused}"
                );
            }
        }
        backend.end().await;
        closed.end().await;
    });
}

#[test]
fn a_container_is_not_started_where_its_doors_cannot_be_opened() {
    run(async {
        let Some(engine) = docker() else { return };
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("without-rights");
        let script = format!(
            "#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=-all {PROGRAM} \"$@\"\n"
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(
            &program,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        // By what it shows, the container of this backend is known among others.
        let mark = format!(
            "/work/{}",
            folder.path().file_name().unwrap().to_string_lossy()
        );
        let bind = ContainerBind {
            host: folder.path().to_owned(),
            inside: PathBuf::from(&mark),
            writable: false,
        };
        let marked = || {
            engine.command(&[
                "ps",
                "--all",
                "--quiet",
                "--filter",
                &format!("volume={mark}"),
            ])
        };
        let mut builder = engine
            .build()
            .bind(bind)
            .network(network(listed(&["web.test"]), names()), &[]);
        builder.settings.network.as_mut().unwrap().program = program;
        let backend = builder.start();
        let refused = backend.backend.launch().await.err().unwrap();
        assert!(
            matches!(
                refused,
                LaunchError::LayerMissing {
                    kind: LayerKind::Network,
                    ..
                }
            ),
            "{refused}"
        );
        assert!(refused.to_string().contains("may not enter"), "{refused}");
        assert_eq!(marked(), "", "nothing is left of it");
        // Control: the same with the right.
        let bind = ContainerBind {
            host: folder.path().to_owned(),
            inside: PathBuf::from(&mark),
            writable: false,
        };
        let able = engine
            .build()
            .bind(bind)
            .network(network(listed(&["web.test"]), names()), &[])
            .start();
        let _made = able.backend.launch().await.unwrap();
        assert_eq!(marked().lines().count(), 1);
        able.end().await;
        backend.end().await;
    });
}

#[test]
fn an_engine_elsewhere_is_refused_where_something_is_listed() {
    let flags = [
        "run",
        "--backend",
        "docker",
        "--allowed-domain",
        "example.com",
        "-c",
        "1",
    ];
    let (status, _, told) = finished(
        program()
            .args(flags)
            .env("DOCKER_HOST", "tcp://192.0.2.1:2375"),
    );
    assert_ne!(status, Some(0));
    assert!(
        told.contains("not on this machine") && told.contains("tcp://192.0.2.1:2375"),
        "{told}"
    );
}

#[test]
fn the_program_opens_containers_to_allowed_domains() {
    let Some(engine) = docker() else { return };
    let web = Web::start();
    let port = web.port();
    let fetch = |name: &str| {
        format!(
            "import urllib.request\nprint(urllib.request.urlopen('http://{name}:{port}/').read())"
        )
    };
    let run = |name: &str| {
        let mut command = program();
        command.args([
            "run",
            "--backend",
            "docker",
            "--container-tag",
            crate::support::containers::IMAGE,
        ]);
        command.args([
            format!("--allowed-domain=web.localhost:{port}"),
            format!("--allowed-domain=127.0.0.1:{port}"),
        ]);
        command.args([
            format!("--allowed-domain=[::1]:{port}"),
            "-c".to_owned(),
            fetch(name),
        ]);
        finished(command.env("DOCKER_HOST", engine.address.to_string()))
    };
    let (_, printed, errors) = run("web.localhost");
    assert_eq!(printed, "b'hello'\n", "{errors}"); // control
    let (_, _, errors) = run("other.localhost");
    assert!(
        errors.contains("blocked: other.localhost (not in the allowed list)"),
        "{errors}"
    );
    assert_eq!(web.asked(), 1);
}
