//! Sessions of somebody who may use an engine that runs as root and is not root: the doors of their
//! containers are brought by porters.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::SystemTime;

use serde_json::json;

use super::{on_docker, on_podman};
use crate::network::Web;
use crate::packages::index::{Index, Manner};
use crate::support::containers::{IMAGE, TestEngine};
use crate::support::daemon::Daemon;
use crate::support::native::{self, host_python};
use crate::support::ordinary::Ordinary;
use crate::support::server::{Era, Server, Session, finished, with_timeout};

/// Starts the program as such a user.
async fn server(
    engine: &'static TestEngine,
    ordinary: &Ordinary,
    arguments: &[&str],
    index: Option<&Index>,
) -> Server {
    // The volume of the runner is filled once for all servers.
    engine.shared().session().ok("1").await;
    tokio::task::block_in_place(|| {
        let mut command = ordinary.command("mcp");
        command.args(["--keep-sessions", "off"]).args(arguments);
        command.envs(index.map(|index| ("UV_DEFAULT_INDEX", index.url_without_password())));
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    })
}

/// What lets sessions reach a web server as `web.localhost`.
fn here(web: &Web) -> [String; 3] {
    ["web.localhost", "127.0.0.1", "[::1]"]
        .map(|name| format!("--allowed-domain={name}:{}", web.port()))
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The first process of the container that a session is in, and the name of its server in labels.
fn container_of(engine: &TestEngine, session: &Session<'_>) -> (String, String) {
    let namespace = session.text("import os; print(os.readlink('/proc/self/ns/pid'))");
    let found = engine.containers().into_iter().find_map(|id| {
        let format = "{{.State.Pid}} {{index .Config.Labels \"cellblock.server\"}}";
        let told = engine.try_command(&["inspect", "--format", format, &id])?;
        let (process, server) = told.trim().split_once(' ')?;
        let is_it = fs::read_link(format!("/proc/{process}/ns/pid"))
            .ok()?
            .to_str()?
            == namespace.trim();
        is_it.then(|| (process.to_owned(), server.to_owned()))
    });
    found.expect("the session is in a container of this engine")
}

/// Follows what an engine tells about porters, from a moment on. Of what was, engines forget the
/// most.
struct Witness {
    told: BufReader<ChildStdout>,
    child: Child,
}

impl Witness {
    fn call(engine: &TestEngine) -> Witness {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs()
            .to_string();
        let format = "{{.Action}} {{index .Actor.Attributes \"cellblock.server\"}}";
        let mut command = Command::new("setpriv");
        command.args([
            "--pdeathsig",
            "KILL",
            "docker",
            "-H",
            &engine.address.to_string(),
            "events",
            "--since",
            &now,
        ]);
        command.args([
            "--filter",
            "label=cellblock.role=porter",
            "--format",
            format,
        ]);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Witness {
            told: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    /// Waits until a porter of this server is seen to start.
    fn sees_porter_of(mut self, server: &str) {
        let wanted = format!("start {server}");
        with_timeout(move || {
            let seen = (&mut self.told)
                .lines()
                .map_while(Result::ok)
                .any(|line| line == wanted);
            self.child.kill().unwrap();
            self.child.wait().unwrap();
            assert!(seen, "the engine tells nothing more");
        });
    }
}

/// The containers of a server that have this role.
fn containers(engine: &TestEngine, server: &str, role: &str) -> usize {
    let (role, format) = (
        format!("label=cellblock.role={role}"),
        "{{.Label \"cellblock.server\"}}",
    );
    let listed = engine.command(&["ps", "--all", "--filter", &role, "--format", format]);
    listed.lines().filter(|line| *line == server).count()
}

async fn reaches_what_is_listed(engine: &'static TestEngine) {
    let (ordinary, web, witness) = (Ordinary::of(engine), Web::start(), Witness::call(engine));
    let allowed = here(&web);
    let server = server(
        engine,
        &ordinary,
        &[&allowed[0], &allowed[1], &allowed[2]],
        None,
    )
    .await;
    tokio::task::block_in_place(|| {
        let session = server.session();
        let fetch = |name: &str| {
            session.run(&format!(
                "import urllib.request\nprint(urllib.request.urlopen('http://{name}:{}/').read())",
                web.port()
            ))
        };
        assert_eq!(fetch("web.localhost").text(), "b'hello'"); // control
        let refused = fetch("other.localhost");
        assert!(refused.is_error());
        let blocked = &refused.structured()["blocked"][0];
        assert!(
            blocked.to_string().contains("other.localhost"),
            "{}",
            refused.structured()
        );
        // Nothing but the doors answers, and at once, in either family.
        for address in ["192.0.2.1", "2001:db8::1"] {
            let code = format!(
                "import socket\ntry:\n    socket.create_connection(('{address}', {}), \
                 20).recv(1)\n    print('closed')\nexcept TimeoutError:\n    print('too \
                 late')\nexcept OSError:\n    print('refused')",
                web.port()
            );
            assert!(
                ["refused", "closed"].contains(&first_line(&session.text(&code))),
                "{address}"
            );
        }
        assert_eq!(web.asked(), 1);

        // It was not the server who entered: it may not.
        let (process, name) = container_of(engine, &session);
        let looked = ordinary.run("readlink", &[&format!("/proc/{process}/ns/net")]);
        assert_ne!(looked.0, Some(0), "{}", looked.1);
        witness.sees_porter_of(&name);
        assert_eq!(
            (
                containers(engine, &name, "session") > 0,
                containers(engine, &name, "porter")
            ),
            (true, 0)
        );

        // The same in a fork, and after a reset.
        let forked = session.call("fork_session", json!({"names": ["fork"]}));
        assert!(!forked.is_error(), "{}", forked.text());
        let fork = Session {
            server: &server,
            id: "fork".to_owned(),
        };
        session.call("reset", json!({}));
        for each in [&session, &fork] {
            let code = format!(
                "import socket; print(socket.create_connection(('web.localhost', {})))",
                web.port()
            );
            assert!(each.text(&code).contains("raddr=('198.18."));
        }
        drop(fork);
        drop(session);
        server.finish();
        assert_eq!(
            (
                containers(engine, &name, "session"),
                containers(engine, &name, "porter")
            ),
            (0, 0)
        );
    });
}

#[test]
fn an_ordinary_user_of_docker_reaches_what_is_listed_and_nothing_else() {
    on_docker(reaches_what_is_listed);
}

#[test]
fn an_ordinary_user_of_podman_reaches_what_is_listed_and_nothing_else() {
    on_podman(reaches_what_is_listed);
}

async fn installs_packages(engine: &'static TestEngine) {
    let (ordinary, index) = (
        Ordinary::of(engine),
        Index::start(&host_python("minimal"), Manner::Open),
    );
    let witness = Witness::call(engine);
    let server = server(engine, &ordinary, &[], Some(&index)).await;
    tokio::task::block_in_place(|| {
        let session = server.session();
        let (_, name) = container_of(engine, &session);
        assert!(
            session
                .text("%pip install pure")
                .contains("Successfully installed pure-2.0")
        );
        assert_eq!(
            session
                .text("import pure; print(pure.__file__.startswith('/opt/cellblock/packages/'))"),
            "True"
        );
        witness.sees_porter_of(&name);
        assert_eq!(containers(engine, &name, "porter"), 0);
        drop(session);
        server.finish();
    });
}

#[test]
fn an_ordinary_user_of_docker_installs_packages() {
    on_docker(installs_packages);
}

#[test]
fn an_ordinary_user_of_podman_installs_packages() {
    on_podman(installs_packages);
}

/// Fetches a page with these rules, in a session of its own, and returns the exit status, what was
/// printed and what was told.
fn fetched(ordinary: &Ordinary, web: &Web, ports: &str) -> (Option<i32>, String, String) {
    let fetch = format!(
        "import urllib.request\nprint(urllib.request.urlopen('http://web.localhost:{}/').read())",
        web.port()
    );
    let allowed = ["web.localhost", "127.0.0.1", "[::1]"]
        .map(|name| format!("--allowed-domain={name}:{ports}"));
    finished(ordinary.command("run").args(allowed).args(["-c", &fetch]))
}

#[test]
fn a_porter_opens_one_door_for_all_ports_too() {
    on_docker(async |engine| {
        let (ordinary, web) = (Ordinary::of(engine), Web::start());
        engine.shared().session().ok("1").await;
        tokio::task::block_in_place(|| {
            let (_, printed, told) = fetched(&ordinary, &web, "*");
            assert_eq!(printed, "b'hello'\n", "{told}");
            // Control.
            let (_, printed, told) =
                fetched(&ordinary, &web, if web.port() == 9 { "10" } else { "9" });
            assert!(
                printed.is_empty() && told.contains("Connection refused"),
                "{told}"
            );
        });
    });
}

#[test]
fn a_porter_of_an_engine_with_a_user_namespace_reaches_its_server_and_is_made_of_nothing_else() {
    let Some(daemon) = Daemon::docker_with_user_namespace() else {
        return;
    };
    native::run(async {
        let engine = &daemon.engine;
        let filled = engine.build().start();
        filled.session().ok("1").await;
        filled.end().await;
        let (ordinary, web) = (Ordinary::of(engine), Web::start());
        tokio::task::block_in_place(|| {
            engine.command(&["tag", IMAGE, "cellblock-porter"]);
            let (_, printed, told) = fetched(&ordinary, &web, &web.port().to_string());
            assert!(
                printed.is_empty() && told.contains("is not the empty one"),
                "{told}"
            );
            engine.command(&["rmi", "cellblock-porter"]);
            let (_, printed, told) = fetched(&ordinary, &web, &web.port().to_string()); // control
            assert_eq!(printed, "b'hello'\n", "{told}");
            assert_eq!(engine.containers(), Vec::<String>::new());
        });
    });
}

#[test]
fn what_kept_a_porter_from_its_work_is_told_and_no_session_starts() {
    on_docker(async |engine| {
        let ordinary = Ordinary::of(engine);
        engine.shared().session().ok("1").await;
        tokio::task::block_in_place(|| {
            let run = || {
                let arguments = ["--allowed-domain", "example.com", "-c", "print('it runs')"];
                finished(ordinary.command("run").args(arguments))
            };
            fs::set_permissions(ordinary.program(), Permissions::from_mode(0o711)).unwrap();
            let (status, printed, told) = run();
            assert_ne!((status, printed.as_str()), (Some(0), "it runs\n"), "{told}");
            assert!(
                told.contains("may not enter") && told.contains("chmod a+rx"),
                "{told}"
            );
            fs::set_permissions(ordinary.program(), Permissions::from_mode(0o755)).unwrap();
            assert_eq!(run().1, "it runs\n"); // control
        });
    });
}
