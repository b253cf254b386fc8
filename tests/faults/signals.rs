//! Processes that are killed or stopped, one at a time, while nothing runs and in the middle of a
//! cell.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::processes::{self, Role, wait_for};
use super::{Home, Moment, Scene};
use crate::support::server::ToolResult;

/// What becomes of the session whose process, or whose jail, was hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It goes on as if nothing had happened.
    Unharmed,
    /// Its variables are gone and its files are kept; undo brings the variables back.
    PythonEnded,
    /// Its variables and its files are gone, and it is told so; reset makes a new sandbox.
    SandboxEnded,
}

/// One fault and its consequences.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    role: Role,
    signal: Signal,
    moment: Moment,
    victim: Fate,
    /// What becomes of a session beside it.
    neighbour: Fate,
}

const fn row(role: Role, signal: Signal, moment: Moment, victim: Fate, neighbour: Fate) -> Row {
    Row {
        role,
        signal,
        moment,
        victim,
        neighbour,
    }
}

pub(super) const ROWS: [Row; 28] = {
    use Fate::{PythonEnded, SandboxEnded, Unharmed};
    use Moment::{Idle, MidCell};
    use Role::{Family, Guardian, Init, Interpreter, Twin, Warden, Zygote};
    const KILL: Signal = Signal::KILL;
    const STOP: Signal = Signal::STOP;
    [
        row(Warden, KILL, Idle, SandboxEnded, SandboxEnded),
        row(Warden, KILL, MidCell, SandboxEnded, SandboxEnded),
        row(Warden, STOP, Idle, SandboxEnded, SandboxEnded),
        row(Warden, STOP, MidCell, SandboxEnded, SandboxEnded),
        row(Guardian, KILL, Idle, SandboxEnded, SandboxEnded),
        row(Guardian, KILL, MidCell, SandboxEnded, SandboxEnded),
        row(Guardian, STOP, Idle, SandboxEnded, SandboxEnded),
        row(Guardian, STOP, MidCell, SandboxEnded, SandboxEnded),
        row(Zygote, KILL, Idle, Unharmed, Unharmed),
        row(Zygote, KILL, MidCell, Unharmed, Unharmed),
        row(Zygote, STOP, Idle, Unharmed, Unharmed),
        row(Zygote, STOP, MidCell, Unharmed, Unharmed),
        row(Family, KILL, Idle, SandboxEnded, Unharmed),
        row(Family, KILL, MidCell, SandboxEnded, Unharmed),
        row(Family, STOP, Idle, Unharmed, Unharmed),
        row(Family, STOP, MidCell, Unharmed, Unharmed),
        row(Init, KILL, Idle, SandboxEnded, Unharmed),
        row(Init, KILL, MidCell, SandboxEnded, Unharmed),
        row(Init, STOP, Idle, Unharmed, Unharmed),
        row(Init, STOP, MidCell, Unharmed, Unharmed),
        row(Interpreter, KILL, Idle, PythonEnded, Unharmed),
        row(Interpreter, KILL, MidCell, PythonEnded, Unharmed),
        row(Interpreter, STOP, Idle, PythonEnded, Unharmed),
        row(Interpreter, STOP, MidCell, PythonEnded, Unharmed),
        row(Twin, KILL, Idle, Unharmed, Unharmed),
        row(Twin, KILL, MidCell, Unharmed, Unharmed),
        row(Twin, STOP, Idle, Unharmed, Unharmed),
        row(Twin, STOP, MidCell, Unharmed, Unharmed),
    ]
};

/// Tries the rows of one role.
#[track_caller]
fn check_rows(role: Role, home: Home) {
    for row in ROWS.iter().filter(|row| row.role == role) {
        eprintln!("{row:?} {home:?}");
        check(row, home);
    }
}

#[track_caller]
fn check(row: &Row, home: Home) {
    let scene = Scene::new(home);
    assert_eq!(
        scene.text("neighbour", "x = 1; open('kept', 'w').write('kept'); x"),
        "1"
    );
    assert_eq!(
        scene.text("victim", "x = 1; open('kept', 'w').write('kept'); x"),
        "1"
    );
    let interpreter = scene.interpreter_of("victim");
    let target = match row.role {
        Role::Guardian | Role::Warden | Role::Zygote => processes::one(scene.holder, row.role),
        Role::Interpreter => interpreter.clone(),
        Role::Family => interpreter.init(scene.holder).family(scene.holder),
        Role::Init => interpreter.init(scene.holder),
        Role::Twin => interpreter.twin(scene.holder),
        Role::Other => unreachable!("no row names it"),
    };

    let pending = (row.moment == Moment::MidCell).then(|| {
        // One that is to end must not end by itself before the fault is noticed.
        let length = if row.victim == Fate::Unharmed { 2 } else { 40 };
        let code = format!(
            "import time; begun = time.time()\nwhile time.time() < begun + {length}: pass\nx"
        );
        let timeout = if row.role == Role::Interpreter { 3 } else { 50 };
        let arguments = json!({"code": code, "session_id": "victim", "timeout": timeout});
        let pending = scene.server().begin("execute_ipython_cell", arguments);
        interpreter.wait_until_busy();
        pending
    });
    if (row.role, row.signal, row.moment) == (Role::Interpreter, Signal::STOP, Moment::Idle) {
        // While the state after the last cell is being copied, the warden holds it and takes the
        // signal away.
        wait_for("a stopped interpreter", || {
            target.send(Signal::STOP);
            (target.state() == Some('T')).then_some(())
        });
    } else {
        target.send(row.signal);
    }
    let ends = row.signal == Signal::KILL || matches!(row.role, Role::Guardian | Role::Warden);
    if ends {
        wait_for("the end of the process", || {
            target.state().is_none().then_some(())
        });
    }
    if row.victim == Fate::SandboxEnded {
        // The kernel ends what was below the process a moment later.
        wait_for("the end of the interpreter", || {
            interpreter.state().is_none().then_some(())
        });
    }
    if let Some(pending) = pending {
        let told = pending.result();
        match row.victim {
            Fate::Unharmed => assert_eq!(told.text().lines().next(), Some("1"), "{row:?}"),
            Fate::PythonEnded => assert_python_ended(&told),
            Fate::SandboxEnded => assert_sandbox_ended(&told),
        }
    }
    check_fate(&scene, "victim", row.victim, row.moment, row.signal);
    check_fate(&scene, "neighbour", row.neighbour, Moment::Idle, row.signal);
    scene.assert_new_session_works("new");
    if row.role == Role::Family && row.signal == Signal::STOP {
        check_stopped_family(&scene, &target, row.moment);
    }
    if row.role == Role::Init && row.signal == Signal::STOP {
        // Nothing of it can be reached any more, so that the session gets a new sandbox.
        let reset = scene.call("reset", "victim");
        assert_eq!(
            (reset.is_error(), &reset.structured()["files_kept"]),
            (false, &json!(false)),
            "{}",
            reset.text()
        );
        assert_eq!(scene.text("victim", "2"), "2");
    }
    let log = scene.finish();
    if home == Home::Inside {
        let expected = usize::from(row.neighbour == Fate::SandboxEnded);
        let errors: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
        assert_eq!(errors.len(), expected, "{row:?}: {log}");
    }
}

/// A family whose first process is stopped gets no fork, is told so within seconds, and keeps
/// nobody waiting.
#[track_caller]
fn check_stopped_family(scene: &Scene, first: &processes::Process, moment: Moment) {
    let fork = |name: &str| {
        let arguments = json!({"session_id": "victim", "names": [name]});
        scene.server().begin("fork_session", arguments)
    };
    let begun = Instant::now();
    let forked = fork("fork");
    assert_eq!(scene.text("neighbour", "x"), "1", "others do not wait");
    scene.assert_new_session_works("meanwhile");
    let refused = forked.result();
    assert!(
        refused.is_error() && refused.text().contains("was stopped"),
        "{}",
        refused.text()
    );
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    let reset = scene.call("reset", "victim");
    assert_eq!(
        (reset.is_error(), &reset.structured()["files_kept"]),
        (false, &json!(true)),
        "{}",
        reset.text()
    );
    assert_eq!(scene.text("victim", "x = 2; open('kept').read()"), "'kept'");
    match moment {
        Moment::Idle => {
            first.send(Signal::CONT);
            let forked = fork("fork").result();
            assert!(!forked.is_error(), "{}", forked.text());
            assert_eq!(scene.text("fork", "x"), "2");
        }
        // It ends with its last session, also without having been continued.
        Moment::MidCell => {
            assert!(!scene.call("close_session", "victim").is_error());
            wait_for("the end of the family", || {
                first.state().is_none().then_some(())
            });
        }
    }
}

#[track_caller]
fn check_fate(scene: &Scene, session: &str, fate: Fate, moment: Moment, signal: Signal) {
    match fate {
        // A note may say that this cell cannot be undone.
        Fate::Unharmed => assert_eq!(scene.text(session, "x").lines().next(), Some("1")),
        Fate::PythonEnded => {
            if moment == Moment::Idle {
                // Short, because an interpreter that was stopped says nothing until its time is up.
                let arguments = json!({"code": "x", "session_id": session, "timeout": 3});
                let told = scene.server().call("execute_ipython_cell", arguments);
                if signal == Signal::STOP && told.text() == "1" {
                    // The warden began to copy the last state after the signal, and with that the
                    // interpreter goes on.
                    return;
                }
                assert_python_ended(&told);
            }
            let undone = scene.call("undo", session);
            if undone.is_error() {
                // The fault came before the state after the last cell was copied, and the answer
                // says which ones are kept.
                assert!(
                    undone.text().contains("These numbers of cells can"),
                    "{}",
                    undone.text()
                );
                assert!(!scene.call("reset", session).is_error());
                assert_eq!(scene.text(session, "open('kept').read()"), "'kept'");
                return;
            }
            assert_eq!(scene.text(session, "open('kept').read(), x"), "('kept', 1)");
        }
        Fate::SandboxEnded => {
            assert_sandbox_ended(&scene.run(session, "x"));
            assert!(
                scene.call("undo", session).is_error(),
                "nothing is left to undo"
            );
            let reset = scene.call("reset", session);
            assert!(!reset.is_error(), "{}", reset.text());
            assert_eq!(
                reset.structured()["files_kept"],
                json!(false),
                "{}",
                reset.text()
            );
            assert_eq!(
                scene.text(session, "import os; os.listdir(), 'x' in globals()"),
                "([], False)"
            );
        }
    }
}

#[track_caller]
fn assert_python_ended(told: &ToolResult) {
    assert!(
        told.is_error() && told.text().contains("files in the working folder are kept"),
        "{}",
        told.text()
    );
}

#[track_caller]
fn assert_sandbox_ended(told: &ToolResult) {
    let text = told.text();
    assert!(
        told.is_error() && text.contains("files are gone") && !text.contains("are kept"),
        "{text}"
    );
}

#[test]
fn a_lost_warden_is_replaced() {
    check_rows(Role::Warden, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_warden_is_replaced() {
    check_rows(Role::Warden, Home::SessionDaemon);
}

#[test]
fn a_lost_guardian_is_replaced() {
    check_rows(Role::Guardian, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_guardian_is_replaced() {
    check_rows(Role::Guardian, Home::SessionDaemon);
}

#[test]
fn a_lost_zygote_is_replaced_unnoticed() {
    check_rows(Role::Zygote, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_zygote_is_replaced_unnoticed() {
    check_rows(Role::Zygote, Home::SessionDaemon);
}

#[test]
fn a_lost_family_costs_its_sessions_and_a_stopped_one_its_forks() {
    check_rows(Role::Family, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_family_costs_its_sessions_and_a_stopped_one_its_forks() {
    check_rows(Role::Family, Home::SessionDaemon);
}

#[test]
fn a_lost_init_costs_one_session_which_can_be_reset() {
    check_rows(Role::Init, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_init_costs_one_session_which_can_be_reset() {
    check_rows(Role::Init, Home::SessionDaemon);
}

#[test]
fn a_lost_interpreter_can_be_undone() {
    check_rows(Role::Interpreter, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_interpreter_can_be_undone() {
    check_rows(Role::Interpreter, Home::SessionDaemon);
}

#[test]
fn a_lost_twin_is_not_noticed() {
    check_rows(Role::Twin, Home::Inside);
}

#[test]
fn in_a_daemon_a_lost_twin_is_not_noticed() {
    check_rows(Role::Twin, Home::SessionDaemon);
}
