//! Every profile with sessions in containers: what native sandboxes go through, on Docker and on Podman.

use std::process::Command;

use serde_json::json;

use super::{
    call, code_executer, exactly, go_through, ipybox, local_index, pyexec, python_docker,
    start_with_index, text, words,
};
use crate::support::containers::{IMAGE, TestEngine, docker, podman};
use crate::support::server::{Era, Server, program};

/// A picture of one point, shown by what every session has.
const DRAW: &str = "from IPython.display import Image, display\nshow = lambda: display(Image(__import__('binascii').a2b_base64('iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==')))\nprint('one'); show(); print('two'); show(); 'three'";

/// Those of this machine; each that is missing says that it is skipped.
fn engines() -> impl Iterator<Item = &'static TestEngine> {
    [docker, podman].into_iter().filter_map(|engine| engine())
}

/// Has the sessions of a server be containers of an engine.
fn on(engine: &TestEngine, command: &mut Command) {
    let (name, host) = if engine.is_podman() {
        ("podman", "CONTAINER_HOST")
    } else {
        ("docker", "DOCKER_HOST")
    };
    command.env(host, engine.address.to_string()).args([
        "--backend",
        name,
        "--container-tag",
        IMAGE,
    ]);
}

/// Starts a server of a profile whose sessions are containers.
fn start(engine: &TestEngine, profile: &str, arguments: &[&str]) -> Server {
    let mut command = program();
    command.args(["mcp", "--profile", profile]).args(arguments);
    on(engine, &mut command);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    server
}

#[test]
fn ipybox_runs_cells_and_moves_files_in_containers() {
    for engine in engines() {
        let server = start(engine, "ipybox", &[]);
        ipybox::reset_at_any_time(&server);
        ipybox::cells(&server);
        ipybox::death_and_reset(&server);
        let (blocks, failed) = call(&server, "execute_ipython_cell", json!({"code": DRAW}));
        assert!(
            !failed && blocks[1..] == ["<image>", "<image>"],
            "{blocks:?}"
        );
        assert!(
            blocks[0].starts_with("one\ntwo\n'three'\n\nGenerated images:\n\n- ["),
            "{blocks:?}"
        );
        ipybox::files_cross(|arguments| start(engine, "ipybox", arguments));
    }
}

#[test]
fn python_docker_mcp_keeps_and_forgets_in_containers_as_it_promises() {
    for engine in engines() {
        let server = start(engine, "python-docker-mcp", &["--timeout", "20s"]);
        python_docker::calls(&server);
        python_docker::state_in_and_out(&server);
        python_docker::nothing_passes(&server);
    }
}

#[test]
fn a_container_lasts_as_long_as_what_it_was_made_for() {
    const MEMORY: u64 = 223 << 20;
    for engine in engines() {
        let server = without_pool(
            engine,
            "python-docker-mcp",
            &["--memory", "223M", "--timeout", "20s"],
        );
        let there = || engine.containers_with_memory(MEMORY).len();
        text(
            &server,
            "execute-persistent",
            json!({"code": "kept = 1", "session_id": "s"}),
        );
        assert_eq!(there(), 1);
        // Nobody cleans this one up, although a client has named it.
        text(
            &server,
            "execute-persistent",
            json!({"code": "left = 1", "session_id": "left"}),
        );
        text(&server, "execute-transient", json!({"code": "print(1)"}));
        text(&server, "cleanup-session", json!({"session_id": "s"}));
        server.finish();
        assert_eq!(there(), 0, "nothing is left behind");
    }
}

/// Like `start`, without containers that wait.
fn without_pool(engine: &TestEngine, profile: &str, arguments: &[&str]) -> Server {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "pool: 0\n").expect("a file can be written");
    start(
        engine,
        profile,
        &[
            &["--config", file.to_str().expect("a path of letters")],
            arguments,
        ]
        .concat(),
    )
}

#[test]
fn code_executer_starts_keeps_and_deletes_services_in_containers() {
    for engine in engines() {
        code_executer::life_of_a_service(&start(engine, "code-executer", &[]));
    }
}

#[test]
fn packages_are_installed_into_sessions_in_containers() {
    for engine in engines() {
        // What the image lacks of our own comes from the usual index, once.
        text(
            &start(engine, "pyexec", &[]),
            "execute_python",
            json!({"code": "1"}),
        );
        let index = local_index();
        let server =
            |profile: &str| start_with_index(profile, &index, |command| on(engine, command));
        code_executer::dependencies(&server("code-executer"));
        ipybox::packages(&server("ipybox"));
        python_docker::packages(&server("python-docker-mcp"));
        assert!(
            index.requests().iter().any(|path| path.contains("pure")),
            "the index of the setting was asked"
        );
    }
}

#[test]
fn pyexec_answers_in_order_in_containers() {
    for engine in engines() {
        let server = start(engine, "pyexec", &["--timeout", "2s"]);
        pyexec::calls(&server);
        go_through(
            &server,
            vec![
                exactly(
                    "execute_python",
                    json!({"code": DRAW}),
                    &["one", "<image>", "two", "<image>", "'three'"],
                ),
                words(
                    "execute_python",
                    json!({"code": "len(bytearray(100 << 20)) >> 20"}),
                    &["100"],
                ),
            ],
        );
    }
}
