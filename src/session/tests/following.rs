//! Tests of following executions that outlive the call that started them, with the fake backend and
//! a paused clock.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, request, setting, setting_with, text, without_undo};
use crate::ops::Host;
use crate::sandbox::Preparation;
use crate::sandbox::fake::FakeBackend;
use crate::session::*;

const SECOND: Duration = Duration::from_secs(1);

fn nobody() -> ProgressChannel {
    ProgressChannel::new(String::new())
}

impl Setting {
    /// Starts a cell and waits for it at most `wait`.
    async fn start(
        &self,
        session: &str,
        code: &str,
        wait: Duration,
    ) -> Result<ExecutionReport, Refused> {
        let request = ExecuteRequest {
            timeout: Duration::from_secs(1000),
            ..request(code)
        };
        self.sessions
            .begin(
                &owner(),
                &id(session),
                request,
                Some(wait),
                CancellationToken::new(),
                nobody(),
            )
            .await
    }

    /// Starts a cell that continues after `wait`.
    async fn leave_running(&self, session: &str, code: &str, wait: Duration) -> Underway {
        match self.start(session, code, wait).await.unwrap() {
            ExecutionReport::Underway(underway) => underway,
            other => panic!("it is not under way: {other:?}"),
        }
    }

    async fn check_for(
        &self,
        which: &ExecutionRef,
        wait: Duration,
    ) -> Result<ExecutionReport, Refused> {
        self.sessions
            .check(&owner(), which, wait, 1000, nobody())
            .await
    }

    async fn underway(&self, which: &ExecutionRef, wait: Duration) -> Underway {
        match self.check_for(which, wait).await.unwrap() {
            ExecutionReport::Underway(underway) => underway,
            other => panic!("it is not under way: {other:?}"),
        }
    }

    async fn finished(&self, which: &ExecutionRef, wait: Duration) -> (Outcome, bool) {
        match self.check_for(which, wait).await.unwrap() {
            ExecutionReport::Finished { outcome, again, .. } => (*outcome, again),
            other => panic!("it has not finished: {other:?}"),
        }
    }
}

fn of(session: &str) -> ExecutionRef {
    ExecutionRef::InSession(id(session))
}

#[tokio::test(start_paused = true)]
async fn a_long_cell_is_followed_to_its_end_and_can_be_asked_for_again() {
    let setting = setting();
    let before = Instant::now();
    let underway = setting
        .leave_running(
            "a",
            "print one\nsleep 5\nprint two\nsleep 5\nprint three",
            2 * SECOND,
        )
        .await;
    assert_eq!(
        (underway.text.as_str(), underway.omitted, underway.ahead),
        ("one\n", 0, 0)
    );
    assert_eq!(underway.waits_for, None);
    assert_eq!(
        (before.elapsed(), underway.elapsed),
        (2 * SECOND, 2 * SECOND)
    );
    assert_eq!(underway.session, id("a"));
    let this = ExecutionRef::Handle(underway.handle);
    let later = setting.underway(&this, 4 * SECOND).await;
    assert_eq!((later.text.as_str(), later.elapsed), ("two\n", 6 * SECOND));
    assert_eq!(setting.underway(&of("a"), Duration::ZERO).await.text, "");
    let (outcome, again) = setting.finished(&of("a"), 100 * SECOND).await;
    assert_eq!(
        (text(&outcome).as_str(), again, before.elapsed()),
        ("one\ntwo\nthree\n", false, 10 * SECOND)
    );
    for which in [this, of("a")] {
        let (same, again) = setting.finished(&which, 100 * SECOND).await;
        assert_eq!((same.execution, again), (outcome.execution, true));
    }
    assert_eq!(before.elapsed(), 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_cell_that_ends_in_time_is_answered_at_once() {
    let setting = setting();
    let ExecutionReport::Finished { outcome, .. } =
        setting.start("a", "print done", 10 * SECOND).await.unwrap()
    else {
        panic!()
    };
    assert_eq!(text(&outcome), "done\n");
    let (same, again) = setting.finished(&of("a"), SECOND).await;
    assert_eq!((same.execution, again), (outcome.execution, true));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_has_run_nothing_has_nothing_to_tell() {
    let setting = setting();
    assert!(matches!(
        setting.check_for(&of("a"), SECOND).await,
        Err(Refused::Unknown { .. })
    ));
    setting.upload("a", "data", b"x", false).await.unwrap();
    assert!(matches!(
        setting.check_for(&of("a"), SECOND).await,
        Ok(ExecutionReport::Nothing)
    ));
    setting.sessions.stop(&owner(), &of("a")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn code_goes_on_when_its_caller_goes_away() {
    let setting = setting();
    let call = setting.start("a", "set x 1\nsleep 5\nprint here", 100 * SECOND);
    assert!(tokio::time::timeout(SECOND, call).await.is_err());
    let (outcome, again) = setting.finished(&of("a"), 10 * SECOND).await;
    assert_eq!((text(&outcome).as_str(), again), ("here\n", false));
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_token_interrupts_the_code() {
    let setting = setting();
    let cancel = CancellationToken::new();
    let sessions = setting.sessions.clone();
    let token = cancel.clone();
    let call = tokio::spawn(async move {
        sessions
            .begin(
                &owner(),
                &id("a"),
                request("sleep 9"),
                Some(100 * SECOND),
                token,
                nobody(),
            )
            .await
    });
    setting
        .wait_until(|info| info.state == SessionState::Running)
        .await;
    cancel.cancel();
    let ExecutionReport::Finished { outcome, .. } = call.await.unwrap().unwrap() else {
        panic!()
    };
    assert_eq!(
        outcome.status,
        Status::Cancelled {
            state: StateAfter::Kept
        }
    );
}

#[tokio::test(start_paused = true)]
async fn texts_are_told_once_and_the_newest_first() {
    let setting = setting();
    let request = ExecuteRequest {
        max_output_chars: 14,
        ..request("flood 3\nsleep 2\nflood 100\nsleep 2")
    };
    let (owner, session, cancel) = (owner(), id("a"), CancellationToken::new());
    let begun = setting
        .sessions
        .begin(&owner, &session, request, Some(SECOND), cancel, nobody())
        .await;
    let ExecutionReport::Underway(first) = begun.unwrap() else {
        panic!()
    };
    assert_eq!(
        (first.text.as_str(), first.omitted),
        ("line 1\nline 2\n", 7)
    );
    let checked = setting
        .sessions
        .check(&owner, &of("a"), 2 * SECOND, 10, nobody())
        .await
        .unwrap();
    let ExecutionReport::Underway(second) = checked else {
        panic!()
    };
    assert_eq!(
        (second.text.as_str(), second.omitted),
        ("8\nline 99\n", 780)
    );
}

#[tokio::test(start_paused = true)]
async fn executions_wait_in_line_and_are_heard_of_in_their_order() {
    let setting = setting();
    let first = setting
        .leave_running("a", "sleep 5\nprint first", SECOND)
        .await;
    let second = setting
        .leave_running("a", "sleep 5\nprint second", SECOND)
        .await;
    let third = setting.leave_running("a", "print third", SECOND).await;
    assert_eq!((first.ahead, second.ahead, third.ahead), (0, 1, 2));
    assert_eq!((third.text.as_str(), third.elapsed), ("", SECOND));
    let (outcome, _) = setting
        .finished(&ExecutionRef::Handle(third.handle), 100 * SECOND)
        .await;
    assert_eq!(text(&outcome), "third\n");
    for expected in ["first\n", "second\n"] {
        let (outcome, again) = setting.finished(&of("a"), SECOND).await;
        assert_eq!((text(&outcome).as_str(), again), (expected, false));
    }
    let (outcome, again) = setting.finished(&of("a"), SECOND).await;
    assert_eq!((text(&outcome).as_str(), again), ("second\n", true));
}

#[tokio::test(start_paused = true)]
async fn stopping_interrupts_what_runs_and_takes_what_waits_out_of_the_queue() {
    let setting = setting();
    let running = setting
        .leave_running("a", "print begun\nsleep 100", SECOND)
        .await;
    let waiting = setting.leave_running("a", "set x 2", SECOND).await;
    let waiting = ExecutionRef::Handle(waiting.handle);
    setting.sessions.stop(&owner(), &waiting).await.unwrap();
    assert!(matches!(
        setting.check_for(&waiting, SECOND).await,
        Err(Refused::CancelledWhileWaiting)
    ));
    assert!(matches!(
        setting.check_for(&waiting, SECOND).await,
        Err(Refused::CancelledWhileWaiting)
    ));
    setting.sessions.stop(&owner(), &of("a")).await.unwrap();
    let (outcome, _) = setting
        .finished(&ExecutionRef::Handle(running.handle.clone()), SECOND)
        .await;
    assert_eq!(
        outcome.status,
        Status::Cancelled {
            state: StateAfter::Kept
        }
    );
    // An execution that has ended is not affected.
    setting
        .sessions
        .stop(&owner(), &ExecutionRef::Handle(running.handle))
        .await
        .unwrap();
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test(start_paused = true)]
async fn two_who_ask_at_once_are_both_answered_and_told_each_text_once() {
    let setting = setting();
    setting
        .leave_running("a", "sleep 2\nprint x\nsleep 2\nprint y", SECOND)
        .await;
    let which = of("a");
    let (one, other) = tokio::join!(
        setting.underway(&which, 2 * SECOND),
        setting.underway(&which, 2 * SECOND)
    );
    assert_eq!([one.text, other.text].concat(), "x\n");
    let (one, other) = tokio::join!(
        setting.finished(&which, 9 * SECOND),
        setting.finished(&which, 9 * SECOND)
    );
    assert_eq!(one.0.execution, other.0.execution);
    assert!(
        one.1 != other.1,
        "exactly one of them is the first to hear it"
    );
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_hears_of_a_reset_a_close_and_a_death() {
    let setting = setting();
    for (session, code, ending) in [
        ("reset", "sleep 100", "reset"),
        ("close", "sleep 100", "closed"),
        ("death", "sleep 5\nexit 3", "died"),
    ] {
        let running = setting
            .leave_running(session, &format!("print begun\n{code}"), SECOND)
            .await;
        let waiting = setting
            .leave_running(session, "print never", Duration::ZERO)
            .await;
        let (running, waiting) = (
            ExecutionRef::Handle(running.handle),
            ExecutionRef::Handle(waiting.handle),
        );
        let act = async {
            match session {
                "reset" => drop(
                    setting
                        .sessions
                        .reset(&owner(), &id(session))
                        .await
                        .unwrap(),
                ),
                "close" => setting
                    .sessions
                    .close(&owner(), &id(session))
                    .await
                    .unwrap(),
                _ => {}
            }
        };
        let checks = async {
            tokio::join!(
                setting.finished(&running, 100 * SECOND),
                setting.check_for(&waiting, 100 * SECOND)
            )
        };
        let (((outcome, again), refused), ()) = tokio::join!(checks, act);
        assert_eq!(
            (outcome.status.name(), text(&outcome).as_str(), again),
            (ending, "begun\n", false)
        );
        match (session, refused) {
            ("reset", Err(Refused::ResetWhileWaiting)) => {}
            ("close", Err(Refused::ClosedWhileWaiting)) => {}
            ("death", Err(Refused::Ended { .. })) => {}
            (_, other) => panic!("{session}: {other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_nobody_collected_outlives_reset_and_death() {
    let setting = setting();
    for end in ["reset", "exit"] {
        setting
            .leave_running(end, "sleep 2\nprint kept", SECOND)
            .await;
        tokio::time::sleep(2 * SECOND).await;
        match end {
            "reset" => drop(setting.sessions.reset(&owner(), &id(end)).await.unwrap()),
            _ => drop(
                setting
                    .leave_running(end, "sleep 1\nexit 1", Duration::ZERO)
                    .await,
            ),
        }
        tokio::time::sleep(2 * SECOND).await;
        let (outcome, again) = setting.finished(&of(end), SECOND).await;
        assert_eq!((text(&outcome).as_str(), again), ("kept\n", false));
    }
    assert_eq!(
        setting.finished(&of("exit"), SECOND).await.0.status.name(),
        "died"
    );
}

#[tokio::test(start_paused = true)]
async fn the_oldest_endings_give_way_and_the_next_answer_says_so() {
    let setting = setting();
    for number in 0..18 {
        setting
            .leave_running("a", &format!("print {number}\nsleep 1"), Duration::ZERO)
            .await;
    }
    tokio::time::sleep(100 * SECOND).await;
    let (outcome, _) = setting.finished(&of("a"), SECOND).await;
    assert_eq!(text(&outcome), "2\n");
    assert_eq!(
        (outcome.others.discarded, outcome.others.uncollected.len()),
        (2, 15)
    );
    let (outcome, _) = setting.finished(&of("a"), SECOND).await;
    assert_eq!(text(&outcome), "3\n");
    assert_eq!(
        (outcome.others.discarded, outcome.others.uncollected.len()),
        (0, 14),
        "it is told once"
    );
}

#[tokio::test(start_paused = true)]
async fn the_next_result_tells_which_ones_nobody_collected() {
    let setting = setting();
    let first = setting
        .leave_running("a", "\nsleep 5\nget nothing", SECOND)
        .await;
    assert_eq!(
        (first.first_line.as_str(), &*first.others),
        ("sleep 5", &Others::default())
    );
    let second = setting.leave_running("a", "print two", SECOND).await;
    assert_eq!(
        (second.others.under_way, &second.others.uncollected[..]),
        (1, &[][..])
    );
    tokio::time::sleep(10 * SECOND).await;
    let third = setting.ok("a", "print three").await;
    let waiting = |outcome: &Outcome| {
        let told = outcome.others.uncollected.iter();
        told.map(|one| (one.execution, one.first_line.clone(), one.failure.is_some()))
            .collect::<Vec<_>>()
    };
    let expected = [
        (first.execution, "sleep 5".to_owned(), true),
        (second.execution, "print two".to_owned(), false),
    ];
    assert_eq!(waiting(&third), expected);
    let (one, _) = setting.finished(&of("a"), SECOND).await;
    assert_eq!(
        (one.execution, one.first_line.as_str()),
        (first.execution, "sleep 5")
    );
    assert_eq!(waiting(&one), expected[1..]);
    let (two, _) = setting.finished(&of("a"), SECOND).await;
    assert_eq!((two.execution, waiting(&two)), (second.execution, vec![]));
    assert_eq!(waiting(&setting.ok("a", "print four").await), []);
}

#[tokio::test(start_paused = true)]
async fn a_result_that_somebody_waits_for_is_not_told_to_others() {
    let setting = setting();
    let first = setting.leave_running("a", "sleep 5", SECOND).await;
    // Followed like a call that has not been polled since the end of the cell.
    let (_, entry) = setting.sessions.locate(&owner(), &of("a")).unwrap();
    let follows = entry.shared.registry.find(&first.handle).unwrap().follow();
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!(setting.ok("a", "print x").await.others, Others::default());
    drop(follows);
    assert_eq!(
        setting.ok("a", "print x").await.others.uncollected.len(),
        1,
        "the control"
    );
}

#[tokio::test(start_paused = true)]
async fn a_handle_is_good_for_its_owner_alone() {
    let setting = setting();
    let underway = setting.leave_running("a", "sleep 100", SECOND).await;
    let this = ExecutionRef::Handle(underway.handle);
    let stranger = Principal("somebody else".to_owned());
    let unknown = ExecutionRef::Handle("0".repeat(32).parse().unwrap());
    let foreign = setting
        .sessions
        .check(&stranger, &this, SECOND, 10, nobody())
        .await
        .unwrap_err();
    let strange = setting
        .sessions
        .check(&stranger, &unknown, SECOND, 10, nobody())
        .await
        .unwrap_err();
    assert_eq!(foreign.to_string(), strange.to_string());
    assert!(matches!(foreign, Refused::UnknownExecution));
    assert!(matches!(
        setting.sessions.stop(&stranger, &this).await,
        Err(Refused::UnknownExecution)
    ));
    assert_eq!(
        setting.underway(&this, Duration::ZERO).await.session,
        id("a")
    );
}

#[tokio::test(start_paused = true)]
async fn a_running_cell_never_counts_as_idle_and_its_outcome_waits_as_long_as_any_session_does() {
    let settings = SessionSettings {
        idle_timeout: 60 * SECOND,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting
        .leave_running("a", "sleep 500\nprint late", SECOND)
        .await;
    tokio::time::sleep(558 * SECOND).await;
    let (outcome, _) = setting.finished(&of("a"), SECOND).await;
    assert_eq!(text(&outcome), "late\n");
    // Asking for it counts as use of the session.
    tokio::time::sleep(59 * SECOND).await;
    setting.finished(&of("a"), SECOND).await;
    tokio::time::sleep(61 * SECOND).await;
    assert!(matches!(
        setting.check_for(&of("a"), SECOND).await,
        Err(Refused::Ended { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_after_the_caller_left_can_be_asked_about() {
    let setting = setting_with(FakeBackend::unprepared(), SessionSettings::default());
    let underway = setting.leave_running("a", "print x", SECOND).await;
    assert_eq!(
        underway.waits_for.as_deref(),
        Some("Python is being prepared (preparing)")
    );
    let behind = setting.leave_running("a", "print y", SECOND).await;
    assert_eq!(
        (behind.ahead, behind.waits_for),
        (1, underway.waits_for),
        "those behind it wait for the same"
    );
    setting.backend.prepare(Preparation::Failed {
        why: "no network".to_owned(),
    });
    for which in [ExecutionRef::Handle(underway.handle), of("a")] {
        let refused = setting.check_for(&which, SECOND).await.unwrap_err();
        assert!(refused.to_string().contains("no network"), "{refused}");
    }
}

/// An installer that never finishes.
struct Waiter;

impl install::PackageInstaller for Waiter {
    fn install<'a>(
        &'a self,
        _request: install::InstallRequest,
        _tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<install::Installed, install::InstallError>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test(start_paused = true)]
async fn an_installation_into_a_session_that_cannot_start_says_why() {
    let packages = install::PackageSource(Some(Arc::new(Waiter)));
    let settings = SessionSettings {
        packages,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::unprepared(), settings);
    let (owner, session, cancel) = (owner(), id("a"), CancellationToken::new());
    let wanted = vec!["numpy".to_owned()];
    let mut call = Box::pin(setting.sessions.install(
        &owner,
        &session,
        wanted,
        install::InstallApproval::default(),
        cancel,
        &|_| (),
    ));
    assert!(
        tokio::time::timeout(SECOND, &mut call).await.is_err(),
        "it waits for the preparation"
    );
    setting.backend.prepare(Preparation::Failed {
        why: "no network".to_owned(),
    });
    let refused = call.await.unwrap_err();
    assert!(matches!(refused, Refused::Launch(_)), "{refused:?}");
    let text = refused.to_string();
    assert!(
        text.contains("no network") && text.contains("prepares Python again by itself"),
        "{text}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_news_are_the_place_in_the_queue_and_then_the_latest_line() {
    let setting = setting_with(FakeBackend::new(), without_undo());
    setting.leave_running("a", "sleep 5", SECOND).await;
    setting.leave_running("a", "sleep 5", SECOND).await;
    let news = ProgressChannel::new(String::new());
    let mut heard = news.subscribe();
    let long = "y".repeat(300);
    let code =
        format!("print \u{7}first\nsleep 1\nerr {long}\nsleep 1\nprint last\nprint  \nsleep 1");
    let sessions = setting.sessions.clone();
    let call = tokio::spawn(async move {
        sessions
            .begin(
                &owner(),
                &id("a"),
                request(&code),
                None,
                CancellationToken::new(),
                news,
            )
            .await
    });
    let expected = [
        "waiting: 2 executions are ahead",
        "waiting: 1 execution is ahead",
        "first",
        &long[..200],
        "last",
    ];
    for expected in expected {
        next(&mut heard, expected).await;
    }
    assert!(matches!(
        call.await.unwrap().unwrap(),
        ExecutionReport::Finished { .. }
    ));
}

/// Waits for the next progress message and compares it.
async fn next(heard: &mut watch::Receiver<String>, expected: &str) {
    heard.changed().await.unwrap();
    assert_eq!(heard.borrow_and_update().as_str(), expected);
}

/// The code digest, the session and the status of each recorded execution.
type Records = Arc<Mutex<Vec<([u8; 32], String, StatusKind)>>>;

/// Records executions that end.
fn recorded(setting: &Setting) -> Records {
    let all = Arc::<Mutex<Vec<_>>>::default();
    let noted = Arc::clone(&all);
    let record = move |ended: &ExecutionEnded| {
        noted
            .lock()
            .unwrap()
            .push((ended.code, ended.session.to_string(), ended.status));
    };
    setting.sessions.record_endings(true, Arc::new(record));
    all
}

fn record(code: &str, session: &str, status: StatusKind) -> ([u8; 32], String, StatusKind) {
    (Sha256::digest(code).into(), session.to_owned(), status)
}

#[tokio::test(start_paused = true)]
async fn each_execution_is_recorded_when_it_ends_with_its_own_code_whoever_collects_it() {
    let setting = setting();
    let all = recorded(&setting);
    let mut handles = Vec::new();
    // More than are kept for collection.
    for number in 0..20 {
        handles.push(
            setting
                .leave_running("a", &format!("sleep 1\nprint {number}"), Duration::ZERO)
                .await
                .handle,
        );
    }
    assert!(all.lock().unwrap().is_empty(), "nothing has ended");
    let last = setting
        .finished(&ExecutionRef::Handle(handles[19].clone()), 100 * SECOND)
        .await
        .0;
    assert_eq!(text(&last), "19\n");
    setting
        .finished(&ExecutionRef::Handle(handles[10].clone()), SECOND)
        .await;
    let expected: Vec<_> = (0..20)
        .map(|number| {
            record(
                &format!("sleep 1\nprint {number}"),
                "a",
                StatusKind::Completed,
            )
        })
        .collect();
    assert_eq!(*all.lock().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn an_execution_that_nobody_collects_is_recorded_also_when_its_session_is_closed_or_reset() {
    let setting = setting();
    let all = recorded(&setting);
    setting.leave_running("a", "sleep 100", SECOND).await;
    setting
        .leave_running("a", "sleep 200", Duration::ZERO)
        .await;
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    setting.leave_running("b", "sleep 300", SECOND).await;
    setting.sessions.reset(&owner(), &id("b")).await.unwrap();
    setting
        .leave_running("c", "print done", Duration::ZERO)
        .await;
    setting
        .wait_until(|info| {
            info.id == id("c") && info.executions == 1 && info.state == SessionState::Idle
        })
        .await;
    setting.sessions.close(&owner(), &id("c")).await.unwrap();
    let expected = [
        record("sleep 100", "a", StatusKind::Closed),
        record("sleep 300", "b", StatusKind::Reset),
        record("print done", "c", StatusKind::Completed),
    ];
    assert_eq!(
        *all.lock().unwrap(),
        expected,
        "what never began has no record"
    );
}

#[tokio::test(start_paused = true)]
async fn variants_are_recorded_under_the_session_that_they_are_copies_of() {
    let setting = setting();
    let all = recorded(&setting);
    setting.ok("a", "set x 1").await;
    all.lock().unwrap().clear();
    let variant = |name: &str, code: &str| Variant {
        name: name.to_owned(),
        code: code.to_owned(),
    };
    let request = ExploreRequest {
        variants: vec![variant("one", "set x 2"), variant("two", "get nothing")],
        timeout: 10 * SECOND,
        max_output_chars: 100,
        keep: Keep::Nothing,
        replace: false,
        recorder: RecorderId::default(),
    };
    setting
        .sessions
        .explore(
            &owner(),
            &id("a"),
            request,
            CancellationToken::new(),
            nobody(),
        )
        .await
        .unwrap();
    let mut all = all.lock().unwrap().clone();
    all.sort_by_key(|(_, _, status)| status.name());
    assert_eq!(
        all,
        [
            record("get nothing", "a", StatusKind::Raised),
            record("set x 2", "a", StatusKind::Completed)
        ]
    );
}
