//! Engines that are not there, end, or lack something.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cellblock::sandbox::container::EngineAddress;
use cellblock::sandbox::{Exit, LaunchError};
use cellblock::session::{Refused, Status};
use serde_json::json;

use super::on_docker;
use crate::support::containers::{IMAGE, TestEngine};
use crate::support::server::{Era, Server, program_below};
use crate::support::{data_folder, native, skipped};

/// Where the engine's socket is.
fn socket(engine: &TestEngine) -> &std::path::Path {
    let EngineAddress::Unix(socket) = &engine.address else { unreachable!("tests use a socket") };
    socket
}

/// Why a session could not be started.
fn failure(refused: Refused) -> String {
    match refused {
        Refused::Launch(LaunchError::Preparation { why } | LaunchError::Start { why }) => why,
        other => other.to_string(),
    }
}

#[test]
fn an_engine_that_is_not_there_is_named_and_used_once_it_comes() {
    on_docker(async |engine| {
        let folder = tempfile::tempdir().unwrap();
        let later = folder.path().join("later.sock");
        let containers = engine.build().address(EngineAddress::Unix(later.clone())).start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(why.contains("Docker cannot be reached at") && why.contains("DOCKER_HOST"), "{why}");
        std::os::unix::fs::symlink(socket(engine), &later).unwrap();
        assert_eq!(containers.session().ok("print('there')").await, "there\n");
        containers.end().await;
    });
}

#[test]
fn an_image_that_is_nowhere_is_named() {
    on_docker(async |engine| {
        let containers = engine.build().image("127.0.0.1:9/nobody/nothing:1").start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(why.contains("the image 127.0.0.1:9/nobody/nothing:1 is not here and could not be fetched"), "{why}");
        containers.end().await;
    });
}

#[test]
fn an_image_without_python_is_refused() {
    on_docker(async |engine| {
        let empty = "cellblock-test:empty";
        engine.import(empty);
        let containers = engine.build().image(empty).start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(why.contains("has no Python that could be started"), "{why}");
        containers.end().await;
    });
}

#[test]
fn an_image_is_fetched_when_the_engine_has_none() {
    on_docker(async |engine| {
        let Some(registry) = Registry::start() else { return skipped("docker-registry") };
        let image = format!("127.0.0.1:{}/nothing:1", registry.port);
        engine.import(&image);
        engine.command(&["push", &image]);
        engine.command(&["rmi", &image]);
        let containers = engine.build().image(&image).start();
        let session = containers.session();
        let refused = session.execute("1").await;
        let why = failure(refused.unwrap_err());
        assert!(why.contains("has no Python that could be started"), "{why}");
        engine.command(&["rmi", &image]); // control: it is there now
        containers.end().await;
    });
}

/// A registry of images on this machine.
struct Registry {
    port: u16,
    process: Child,
    _folder: tempfile::TempDir,
}

impl Registry {
    fn start() -> Option<Registry> {
        let folder = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let images = folder.path().join("images");
        let settings = json!({
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": images}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        let file = folder.path().join("config.yml");
        std::fs::write(&file, settings.to_string()).unwrap();
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().ok()?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "the registry does not listen");
            std::thread::yield_now();
        }
        Some(Registry { port, process, _folder: folder })
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_runtime_that_the_engine_does_not_know_is_refused_with_those_it_does() {
    on_docker(async |engine| {
        let containers = engine.build().runtime("no-such-runtime").start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(why.contains("no runtime \"no-such-runtime\"") && why.contains("runc"), "{why}");
        containers.end().await;
    });
}

#[test]
fn a_container_that_somebody_ends_takes_its_session_along_and_a_reset_begins_anew() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        session.ok("x = 1").await;
        let container = engine.container_of(&session).await;
        let cell = {
            let session = session.clone();
            tokio::spawn(async move { session.execute("print('begun'); import time; time.sleep(600)").await })
        };
        session.runs().await;
        engine.command(&["kill", &container]);
        let outcome = cell.await.unwrap().unwrap();
        assert_eq!(outcome.status, Status::Died { exit: Exit::Signal(9) });
        let refused = session.execute("x").await.unwrap_err();
        assert!(matches!(refused, Refused::Ended { .. }), "{refused}");
        session.reset().await;
        assert_eq!(session.ok("print('x' in globals())").await, "False\n");
        assert_ne!(engine.container_of(&session).await, container);
    });
}

#[test]
fn a_server_that_is_killed_leaves_no_container() {
    on_docker(async |engine| {
        let mut command = program_below(&data_folder());
        command
            .args(["mcp", "--backend", "docker", "--container-tag", IMAGE, "--keep-sessions", "off"])
            .env("DOCKER_HOST", engine.address.to_string());
        let server = tokio::task::block_in_place(|| {
            let server = Server::spawn(&mut command, Era::Initialize);
            server.greet();
            server
        });
        let code = "import os; print(os.readlink('/proc/self/ns/pid'))";
        let result = tokio::task::block_in_place(|| server.call("execute_ipython_cell", json!({"code": code})));
        let namespace = result.text();
        let lives = || {
            native::processes().iter().any(|process| {
                std::fs::read_link(format!("/proc/{}/ns/pid", process.pid))
                    .is_ok_and(|found| found.to_string_lossy() == namespace.trim())
            })
        };
        assert!(lives(), "{namespace}"); // control
        let pid = rustix::process::Pid::from_raw(server.process_id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while lives() {
            assert!(Instant::now() < deadline, "the container is still there");
            tokio::task::yield_now().await;
        }
    });
}
