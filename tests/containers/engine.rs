//! Engines that are not there, end, or lack something.

use std::time::{Duration, Instant};

use cellblock::sandbox::container::EngineAddress;
use cellblock::sandbox::{Exit, LaunchError};
use cellblock::session::{Refused, Status};
use serde_json::json;

use super::{on_docker, on_podman};
use crate::support::containers::{IMAGE, TestEngine};
use crate::support::daemon::Daemon;
use crate::support::server::{Era, Server, program_below};
use crate::support::{data_folder, native};

/// Where the engine's socket is.
pub(super) fn socket(engine: &TestEngine) -> &std::path::Path {
    let EngineAddress::Unix(socket) = &engine.address else {
        unreachable!("tests use a socket")
    };
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
        let containers = engine
            .build()
            .address(EngineAddress::Unix(later.clone()))
            .start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(
            why.contains("Docker cannot be reached at") && why.contains("DOCKER_HOST"),
            "{why}"
        );
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
        assert!(
            why.contains(
                "the image 127.0.0.1:9/nobody/nothing:1 is not here and could not be fetched"
            ),
            "{why}"
        );
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
        assert!(
            why.ends_with("the image cellblock-test:empty has no Python that could be started"),
            "{why}"
        );
        containers.end().await;
    });
}

#[test]
fn an_image_with_an_old_python_is_refused_with_what_is_needed() {
    on_docker(async |engine| {
        let old = "cellblock-test:old";
        engine.import_with_python(
            old,
            "#!/bin/sh\necho '{\"version\": [3, 9], \"ipython\": false, \"ready\": false}'\n",
        );
        let containers = engine.build().image(old).start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(
            why.contains("has Python 3.9; sessions need 3.10 or newer"),
            "{why}"
        );
        containers.end().await;
    });
}

#[test]
fn an_image_for_another_machine_is_refused_with_what_would_fit() {
    on_docker(async |engine| {
        let foreign = "cellblock-test:foreign";
        engine.load_for(foreign, "s390x");
        let containers = engine.build().image(foreign).start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(
            why.contains("is for s390x, and the engine's machine is"),
            "{why}"
        );
        containers.end().await;
    });
}

#[test]
fn a_full_work_folder_is_an_error_inside_and_the_session_goes_on() {
    on_docker(async |engine| {
        let session = engine.shared().session();
        let fill = "
def fill(name):
    with open(name, 'wb', buffering=0) as file:
        while True:
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise OSError('no more')
kept = 'kept'
open('small', 'w').write('x')
fill('large')";
        let outcome = session.execute(fill).await.unwrap();
        assert!(
            matches!(&outcome.status, Status::Raised(_)),
            "{:?}",
            outcome.status
        );
        let again = "
import os
try:
    open('more', 'wb').write(bytes(1 << 20))
except OSError as error:
    print(error.strerror)
os.remove('large')
print(kept, open('small').read(), open('more', 'wb').write(bytes(1 << 20)) > 0)";
        assert_eq!(
            session.ok(again).await,
            "No space left on device\nkept x True\n"
        );
    });
}

#[test]
fn an_engine_whose_disk_is_full_says_so_and_works_once_there_is_room() {
    let Some(daemon) = Daemon::docker_with_disk(700 << 20) else {
        return;
    };
    native::run(async {
        let containers = daemon.engine.build().start();
        containers.session().ok("1").await; // control
        let rubbish = daemon.disk().join("rubbish");
        let mut file = std::fs::File::create(&rubbish).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 1 << 12]).is_ok() {}
        drop(file);
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(why.contains("no room left on its disk"), "{why}");
        std::fs::remove_file(&rubbish).unwrap();
        assert_eq!(containers.session().ok("print('room')").await, "room\n");
        containers.end().await;
    });
}

#[test]
fn a_runtime_that_the_engine_does_not_know_is_refused_with_those_it_does() {
    on_docker(async |engine| {
        let containers = engine.build().runtime("no-such-runtime").start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(
            why.contains("does not know the runtime no-such-runtime") && why.contains("runc"),
            "{why}"
        );
        containers.end().await;
    });
}

#[test]
fn podman_is_not_taken_to_use_a_runtime_that_it_does_not() {
    on_podman(async |engine| {
        // Podman's API takes any name for a runtime, and passes over it.
        let containers = engine.build().runtime("runsc").start();
        let why = failure(containers.session().execute("1").await.unwrap_err());
        assert!(
            why.contains("Podman makes all containers with") && why.contains("containers.conf"),
            "{why}"
        );
        containers.end().await;
        // Control: the one that the service has.
        let usual = engine.command(&["info", "--format", "{{.DefaultRuntime}}"]);
        let containers = engine
            .build()
            .runtime(usual.trim().rsplit('/').next().unwrap())
            .start();
        assert_eq!(containers.session().ok("print('there')").await, "there\n");
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
            tokio::spawn(async move {
                session
                    .execute("print('begun'); import time; time.sleep(600)")
                    .await
            })
        };
        session.runs().await;
        engine.command(&["kill", &container]);
        let outcome = cell.await.unwrap().unwrap();
        assert_eq!(
            outcome.status,
            Status::Died {
                exit: Exit::SandboxGone { files_kept: false }
            }
        );
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
            .args([
                "mcp",
                "--backend",
                "docker",
                "--container-tag",
                IMAGE,
                "--keep-sessions",
                "off",
            ])
            .env("DOCKER_HOST", engine.address.to_string());
        let server = tokio::task::block_in_place(|| {
            let server = Server::spawn(&mut command, Era::Initialize);
            server.greet();
            server
        });
        let code = "import os; print(os.readlink('/proc/self/ns/pid'))";
        let result = tokio::task::block_in_place(|| {
            server.call("execute_ipython_cell", json!({"code": code}))
        });
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
