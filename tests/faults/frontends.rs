//! The server process that clients speak to, the frontend, and the daemon of its sessions: killed,
//! stopped, misled.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::processes::{self, Process, wait_for};
use super::{Home, Moment, Scene, command, entries_of, groups_of, readiness};
use crate::http::client::Raw;
use crate::support;
use crate::support::server::{Era, Pending, Server, finished, program};
use crate::support::service::{Service, runtime_folder};

/// A cell that computes for three seconds.
const CELL: &str =
    "import time; begun = time.time()\nwhile time.time() < begun + 3: pass\nx += 1\n'the result'";

/// Makes a session with `x = 41` and begins a cell in it, if that is the moment. The cell adds 1.
fn begin(scene: &Scene, moment: Moment) -> (Process, Option<Pending<'_>>) {
    assert_eq!(scene.text("a", "x = 41; x"), "41");
    let interpreter = scene.interpreter_of("a");
    let pending = (moment == Moment::MidCell).then(|| {
        let pending = scene.server().begin(
            "execute_ipython_cell",
            json!({"code": CELL, "session_id": "a"}),
        );
        interpreter.wait_until_busy();
        pending
    });
    (interpreter, pending)
}

/// The text of the execution that runs in a session or ran last.
fn outcome(server: &Server, session: &str) -> String {
    let told = server.call(
        "check_execution",
        json!({"session_id": session, "wait": 30}),
    );
    assert!(!told.is_error(), "{}", told.text());
    told.text().to_owned()
}

/// A frontend is gone; the next one finds everything.
#[track_caller]
fn check_taken_over(signal: Signal, moment: Moment) {
    let mut scene = Scene::new(Home::SessionDaemon);
    let (_, pending) = begin(&scene, moment);
    support::signal(scene.server().process_id(), signal);
    if let Some(told) = pending.map(|pending| pending.result()) {
        assert!(told.text().contains("It goes on"), "{}", told.text());
    }
    let frontend = scene.server.take().expect("the scene is not over");
    let ended = frontend.ended();
    assert_eq!(ended.success(), signal == Signal::TERM, "{ended}");
    scene.server = Some(scene.another());
    if moment == Moment::MidCell {
        assert!(outcome(scene.server(), "a").contains("the result"));
    }
    assert_eq!(
        scene.text("a", "x"),
        if moment == Moment::MidCell {
            "42"
        } else {
            "41"
        }
    );
    scene.assert_new_session_works("new");
    scene.finish();
}

#[test]
fn a_killed_frontend_leaves_its_variables() {
    check_taken_over(Signal::KILL, Moment::Idle);
}

#[test]
fn a_frontend_that_is_asked_to_end_leaves_its_sessions() {
    check_taken_over(Signal::TERM, Moment::Idle);
    check_taken_over(Signal::TERM, Moment::MidCell);
}

#[test]
fn a_frontend_takes_its_own_sessions_along() {
    for (signal, moment) in [
        (Signal::KILL, Moment::Idle),
        (Signal::KILL, Moment::MidCell),
        (Signal::TERM, Moment::Idle),
        (Signal::TERM, Moment::MidCell),
    ] {
        let mut scene = Scene::new(Home::Inside);
        let (_, pending) = begin(&scene, moment);
        let (family, entries) = (processes::below(scene.holder), entries_of(scene.holder));
        let groups = groups_of(&entries);
        assert!(
            family.len() > 4 && entries.len() == 1,
            "the control: {family:?} {entries:?}"
        );
        support::signal(scene.holder, signal);
        let asked = Instant::now();
        if let Some(pending) = pending.filter(|_| signal == Signal::TERM) {
            let told = pending.result();
            let words = ["the server is ending, and this session with it"];
            told.assert_refused(&words);
            assert!(!told.text().contains("goes on"), "{}", told.text());
        }
        let frontend = scene.server.take().expect("the scene is not over");
        assert_eq!(frontend.ended().success(), signal == Signal::TERM);
        assert!(
            asked.elapsed() < Duration::from_secs(20),
            "{:?}",
            asked.elapsed()
        );
        for process in family.values() {
            wait_for("the end of every process", || {
                process.state().is_none().then_some(())
            });
        }
        // After a kill the next server sweeps groups and entry.
        let next = scene.another();
        let told = next.call(
            "execute_ipython_cell",
            json!({"code": "'x' in globals()", "session_id": "a"}),
        );
        assert_eq!((told.is_error(), told.text()), (false, "False"));
        wait_for("the end of every control group", || {
            groups.iter().all(|group| !group.exists()).then_some(())
        });
        assert_eq!(entries_of(scene.holder), Vec::<PathBuf>::new());
        next.finish();
    }
}

/// A daemon is gone, and a session that it had says so.
#[track_caller]
fn check_lost(signal: Signal, moment: Moment) {
    let mut scene = Scene::new(Home::SessionDaemon);
    let (_, pending) = begin(&scene, moment);
    let (family, entries) = (processes::below(scene.holder), entries_of(scene.holder));
    support::signal(scene.holder, signal);
    if let Some(pending) = pending {
        let told = pending.result();
        assert!(told.is_error(), "{}", told.text());
        let why = ["the session daemon ended", "shutting down", "is ending"];
        assert!(
            why.iter().any(|why| told.text().contains(why)),
            "{}",
            told.text()
        );
    }
    for process in family.values() {
        wait_for("the end of every process", || {
            process.state().is_none().then_some(())
        });
    }
    // A daemon that is about to end says that, and one that has ended is told about.
    let told = wait_for("a session that has ended", || {
        let told = scene.run("a", "x");
        assert!(
            told.is_error(),
            "it is never replaced in silence: {}",
            told.text()
        );
        let text = told.text().to_owned();
        (!text.contains("shutting down")).then_some(text)
    });
    assert!(told.contains("the session daemon ended"), "{told}");
    assert!(!scene.call("reset", "a").is_error());
    assert_eq!(scene.text("a", "'x' in globals()"), "False");
    scene.assert_new_session_works("new");
    // The next daemon sweeps what a killed one left.
    wait_for("the end of its entry", || {
        entries.iter().all(|entry| !entry.exists()).then_some(())
    });
    let next = scene.daemon_process();
    assert_ne!(
        std::mem::replace(&mut scene.holder, next),
        next,
        "another daemon was started"
    );
    scene.finish();
}

#[test]
fn a_daemon_that_is_killed_mid_cell_is_replaced() {
    check_lost(Signal::KILL, Moment::MidCell);
}

#[test]
fn a_daemon_that_is_asked_to_end_is_replaced() {
    check_lost(Signal::TERM, Moment::Idle);
    check_lost(Signal::TERM, Moment::MidCell);
}

#[test]
fn a_daemon_that_hangs_mid_cell_has_the_result_when_it_goes_on() {
    let scene = Scene::new(Home::SessionDaemon);
    let (interpreter, pending) = begin(&scene, Moment::MidCell);
    support::stop(scene.holder);
    let begun = Instant::now();
    // Another server is told which daemon it is, and how to end it.
    let (status, _, errors) = finished(&mut command(Home::SessionDaemon, &scene.daemon));
    assert_eq!(status, Some(2), "{errors}");
    let named = format!(
        "the session daemon `{}` (process {}) does not answer",
        scene.daemon, scene.holder
    );
    assert!(
        errors.contains(&named) && errors.contains("cellblock daemon stop"),
        "{errors}"
    );
    let list = scene.server().call("list_sessions", json!({}));
    assert!(
        list.is_error() && list.text().contains("does not answer"),
        "{}",
        list.text()
    );
    assert!(
        begun.elapsed() < Duration::from_secs(50),
        "{:?}",
        begun.elapsed()
    );
    interpreter.wait_until_asleep();
    support::signal(scene.holder, Signal::CONT);
    let told = pending.expect("a cell runs").result();
    // It was given up while the daemon hung, unless it came a moment before.
    let is_known = told.text().contains("the result");
    assert!(
        is_known
            || told
                .text()
                .contains("Whether this was carried out is not known"),
        "{}",
        told.text()
    );
    wait_for("a daemon that answers", || {
        (!scene.server().call("list_sessions", json!({})).is_error()).then_some(())
    });
    if !is_known {
        assert!(outcome(scene.server(), "a").contains("the result"));
    }
    assert_eq!(scene.text("a", "x"), "42");
    scene.finish();
}

#[test]
fn a_frontend_or_daemon_that_stands_still_for_a_moment_loses_nothing() {
    for (home, stop_frontend, stop_daemon) in [
        (Home::Inside, true, false),
        (Home::SessionDaemon, true, false),
        (Home::SessionDaemon, false, true),
        (Home::SessionDaemon, true, true),
    ] {
        let scene = Scene::new(home);
        let (interpreter, pending) = begin(&scene, Moment::MidCell);
        let frontend = stop_frontend.then(|| scene.server().process_id());
        let stopped: Vec<u32> = frontend
            .into_iter()
            .chain(stop_daemon.then_some(scene.holder))
            .collect();
        stopped.iter().for_each(|process| support::stop(*process));
        // The cell ends meanwhile, and nobody hears it.
        interpreter.wait_until_asleep();
        stopped
            .iter()
            .for_each(|process| support::signal(*process, Signal::CONT));
        let told = pending.expect("a cell runs").result();
        assert_eq!(
            (told.is_error(), told.text()),
            (false, "'the result'"),
            "{home:?} {stop_frontend} {stop_daemon}"
        );
        assert_eq!(scene.text("a", "x"), "42");
        scene.finish();
    }
}

#[test]
fn of_two_frontends_of_one_daemon_one_is_killed_and_the_other_goes_on() {
    let scene = Scene::new(Home::SessionDaemon);
    let (_, pending) = begin(&scene, Moment::MidCell);
    let other = scene.another();
    assert!(other.call("list_sessions", json!({})).text().contains('a'));
    other.call(
        "execute_ipython_cell",
        json!({"code": "y = 2", "session_id": "b"}),
    );
    support::signal(other.process_id(), Signal::KILL);
    other.ended();
    let told = pending.expect("a cell runs").result();
    assert_eq!((told.is_error(), told.text()), (false, "'the result'"));
    assert_eq!(scene.text("a", "x"), "42");
    assert_eq!(
        scene.text("b", "y"),
        "2",
        "sessions of the other one are kept too"
    );
    scene.finish();
}

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

#[test]
fn a_service_is_not_ready_while_its_daemon_hangs_and_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, &[]);
    let is_ready = || (readiness(service.address).0 == 200).then_some(());
    wait_for("a service that is ready", is_ready);
    let daemon = processes::daemon_of(service.process_id());
    support::stop(daemon);
    let why = wait_for("a service that is not ready", || {
        let (status, text) = readiness(service.address);
        (status == 503).then_some(text)
    });
    assert!(why.contains("the session daemon does not answer"), "{why}");
    support::signal(daemon, Signal::CONT);
    wait_for("a service that is ready again", is_ready);
    drop(service.kill());
}

#[tokio::test]
async fn signals_to_read_settings_again_disturb_no_cell_and_a_broken_file_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, &[]);
    let file = folder.path().join("config.yaml");
    let whole = fs::read_to_string(&file).unwrap();
    let mut alice = Raw::with_key(&service, "alice").await;
    let process = service.process_id();
    for number in 1..=30 {
        // The last third finds a file that makes no sense.
        if number == 21 {
            fs::write(&file, "auth: [").unwrap();
        }
        (0..10).for_each(|_| support::signal(process, Signal::HUP));
        let code = format!("x = globals().get('x', 0) + 1; print(x == {number})");
        let told = alice
            .result(
                "execute_ipython_cell",
                json!({"code": code, "session_id": "a"}),
            )
            .await;
        assert!(
            told["structuredContent"]["text"]
                .as_str()
                .unwrap_or_default()
                .contains("True"),
            "{told}"
        );
    }
    // Whoever could call before can still call, and nobody else can.
    let mut again = Raw::with_key(&service, "alice").await;
    let told = again
        .result(
            "execute_ipython_cell",
            json!({"code": "x", "session_id": "a"}),
        )
        .await;
    assert_eq!(told["structuredContent"]["text"], "30", "{told}");
    fs::write(&file, whole).unwrap();
    let log = tokio::task::spawn_blocking(move || service.finish())
        .await
        .unwrap();
    assert!(log.contains("the settings were read again"), "{log}");
    assert!(
        log.contains("the settings were not read again; the old ones hold"),
        "{log}"
    );
}

/// The place of a daemon's socket.
fn socket_of(name: &str) -> PathBuf {
    let folder = runtime_folder().join("keeper");
    fs::create_dir_all(&folder).unwrap();
    folder.join(format!("{name}.socket"))
}

#[test]
fn whatever_is_in_the_place_of_a_socket_is_replaced() {
    for (number, leave) in [fs_socket as fn(&std::path::Path), plain_file]
        .into_iter()
        .enumerate()
    {
        let name = format!("place{number}-{}", std::process::id());
        let socket = socket_of(&name);
        leave(&socket);
        let server = Server::spawn(&mut command(Home::SessionDaemon, &name), Era::Initialize);
        server.greet();
        let told = server.call("execute_ipython_cell", json!({"code": "6 * 7"}));
        assert_eq!((told.is_error(), told.text()), (false, "42"));
        server.close_input();
        assert!(server.ended().success());
        let (ended, _, errors) = finished(program().args(["daemon", "stop", &name, "--now"]));
        assert_eq!((ended, socket.exists()), (Some(0), false), "{errors}");
    }
}

/// What a daemon leaves that was killed: a socket that nobody listens to.
fn fs_socket(path: &std::path::Path) {
    drop(UnixListener::bind(path).unwrap());
}

fn plain_file(path: &std::path::Path) {
    fs::write(path, "no socket").unwrap();
}

#[test]
fn an_entry_of_rubbish_that_names_a_folder_of_the_machine_is_swept_and_the_folder_stays() {
    // No process has this number: it is above what any kernel gives out.
    let entry = runtime_folder()
        .join("instances")
        .join(format!("cellblock-{}-7", 1 << 23));
    fs::create_dir_all(entry.parent().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::write(&entry, format!("/etc\n{}\n", folder.path().display())).unwrap();
    let scene = Scene::new(Home::Inside);
    assert_eq!(scene.text("a", "6 * 7"), "42");
    wait_for("the end of the entry", || (!entry.exists()).then_some(()));
    assert!(folder.path().exists() && PathBuf::from("/etc/passwd").exists());
    scene.finish();
}

/// Answers the connections of one test in the place of a daemon.
fn impostor(
    name: &str,
    answer: impl Fn(std::os::unix::net::UnixStream) + Send + 'static,
) -> PathBuf {
    let socket = socket_of(name);
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || listener.incoming().flatten().for_each(answer));
    socket
}

/// Starts a server whose daemon is an impostor: what it says, and how long that took.
fn refused_by(
    kind: &str,
    answer: impl Fn(std::os::unix::net::UnixStream) + Send + 'static,
) -> (String, Duration) {
    let name = format!("{kind}-{}", std::process::id());
    let socket = impostor(&name, answer);
    let begun = Instant::now();
    let (status, printed, errors) = finished(&mut command(Home::SessionDaemon, &name));
    assert_eq!((status, printed.as_str()), (Some(2), ""), "{errors}");
    fs::remove_file(socket).unwrap();
    assert!(
        errors.contains("--keep-sessions off does without"),
        "the cure: {errors}"
    );
    (errors, begun.elapsed())
}

#[test]
fn a_daemon_that_says_nothing_is_refused_in_time() {
    let (errors, elapsed) = refused_by("silent", |mut stream| {
        // Until the other side gives up.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(errors.contains("does not answer"), "{errors}");
    assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
}

#[test]
fn a_daemon_that_talks_nonsense_is_refused_at_once() {
    let (errors, elapsed) = refused_by("nonsense", |mut stream| {
        let _ = stream.write_all(&[0xff; 64]);
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(errors.contains("unexpected reply"), "{errors}");
    assert!(elapsed < Duration::from_secs(9), "{elapsed:?}");
}

#[test]
fn a_daemon_that_closes_every_connection_is_refused_at_once() {
    let (errors, elapsed) = refused_by("closing", drop);
    assert!(errors.contains("daemon"), "{errors}");
    assert!(elapsed < Duration::from_secs(9), "{elapsed:?}");
}
