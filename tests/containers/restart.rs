//! Engines that go away under sessions, and come back.

use std::time::{Duration, Instant};

use cellblock::sandbox::Exit;
use cellblock::session::{Outcome, Refused, Status};
use rustix::process::Signal;

use crate::support::containers::Containers;
use crate::support::daemon::Daemon;
use crate::support::native::{self, Session};

/// How soon a cell is told that its engine is gone. It takes far less; a cell that waits for its
/// own end would take ten minutes.
const SOON: Duration = Duration::from_secs(30);

const LOST: Status = Status::Died {
    exit: Exit::SandboxGone { files_kept: false },
};

/// Begins a cell that would run for ten minutes.
async fn begin(session: &Session) -> tokio::task::JoinHandle<Result<Outcome, Refused>> {
    let running = session.clone();
    let cell = tokio::spawn(async move {
        let code = "open('kept', 'w').write('x'); print('begun'); import time; time.sleep(600)";
        running
            .execute_with(code, Duration::from_secs(900), Default::default())
            .await
    });
    session.runs().await;
    cell
}

/// The end of a cell whose engine ends now.
async fn told(cell: tokio::task::JoinHandle<Result<Outcome, Refused>>) -> Outcome {
    let ended = tokio::time::timeout(SOON, cell)
        .await
        .expect("the cell is told soon");
    ended.unwrap().unwrap()
}

/// Why nothing runs in a session that was lost.
async fn refusal(session: &Session) -> String {
    session.execute("1").await.unwrap_err().to_string()
}

/// Waits until the engine has no container.
async fn is_empty(daemon: &Daemon) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !daemon.engine.containers().is_empty() {
        assert!(Instant::now() < deadline, "{}", left_over(daemon));
        tokio::task::yield_now().await;
    }
}

/// The containers that are there, and what the engine says when it is to remove them.
fn left_over(daemon: &Daemon) -> String {
    let there =
        daemon
            .engine
            .command(&["ps", "--all", "--format", "{{.ID}} {{.Status}} {{.Names}}"]);
    let removed = daemon
        .engine
        .containers()
        .into_iter()
        .map(|id| daemon.engine.run(&["rm", "--force", &id]));
    format!("{there}{:?}", removed.collect::<Vec<_>>())
}

/// A session before, in and after each end of its engine.
async fn loses_and_begins_anew(daemon: &mut Daemon, containers: &Containers, signal: Signal) {
    let session = containers.session();
    session.ok("x = 1").await;
    let cell = begin(&session).await;
    daemon.end(signal);
    assert_eq!(told(cell).await.status, LOST);
    let why = refusal(&session).await;
    assert!(
        why.contains("the container engine went away") && why.contains("files are gone"),
        "{why}"
    );

    // As long as the engine is away, everybody is told so, soon.
    let asked = Instant::now();
    let why = containers
        .session()
        .execute("1")
        .await
        .unwrap_err()
        .to_string();
    assert!(
        why.contains("cannot be reached at") && asked.elapsed() < SOON,
        "{why}"
    );
    assert!(
        session
            .try_reset()
            .await
            .unwrap_err()
            .to_string()
            .contains("cannot be reached at")
    );
    let why = refusal(&session).await;
    assert!(why.contains("files are gone"), "{why}");

    daemon.begin();
    assert_eq!(containers.session().ok("print('there')").await, "there\n");
    assert!(!session.reset().await.files_kept);
    assert_eq!(
        session
            .ok("import os; print('x' in globals(), os.listdir())")
            .await,
        "False []\n"
    );
    session.close().await;
}

#[test]
fn a_docker_daemon_that_restarts_takes_sessions_along_and_new_ones_work_once_it_is_back() {
    let Some(mut daemon) = Daemon::docker(&[]) else {
        return;
    };
    native::run(async {
        let containers = daemon.engine.build().start();
        loses_and_begins_anew(&mut daemon, &containers, Signal::TERM).await;
        loses_and_begins_anew(&mut daemon, &containers, Signal::KILL).await;

        // It may also come back without what was prepared.
        is_empty(&daemon).await;
        let volumes = daemon.engine.command(&["volume", "ls", "--quiet"]);
        for volume in volumes.lines() {
            daemon.engine.command(&["volume", "rm", volume]);
        }
        assert_eq!(
            containers.session().ok("print('filled again')").await,
            "filled again\n"
        );
        containers.end().await;
        is_empty(&daemon).await;
    });
}

#[test]
fn containers_that_outlive_their_daemon_are_removed_when_it_is_back() {
    let Some(mut daemon) = Daemon::docker(&["--live-restore"]) else {
        return;
    };
    native::run(async {
        let containers = daemon.engine.build().start();
        let session = containers.session();
        session.ok("x = 1").await;
        let host_pid = session.host_pid().await;
        let cell = begin(&session).await;
        daemon.end(Signal::TERM);
        assert_eq!(told(cell).await.status, LOST);
        daemon.begin();
        assert!(!session.reset().await.files_kept);
        assert_eq!(session.ok("print('x' in globals())").await, "False\n");
        let kept = daemon.engine.container_of(&session).await;
        let deadline = Instant::now() + Duration::from_secs(30);
        while daemon.engine.containers() != [kept.as_str()] {
            assert!(
                Instant::now() < deadline,
                "{:?}",
                daemon.engine.containers()
            );
            tokio::task::yield_now().await;
        }
        assert!(!std::path::Path::new(&format!("/proc/{host_pid}/root/opt/cellblock")).exists());
        containers.end().await;
    });
}

#[test]
fn a_podman_service_that_restarts_takes_sessions_along_and_new_ones_work_once_it_is_back() {
    let Some(mut daemon) = Daemon::podman() else {
        return;
    };
    native::run(async {
        let containers = daemon.engine.build().start();
        loses_and_begins_anew(&mut daemon, &containers, Signal::TERM).await;
        containers.end().await;
    });
}
