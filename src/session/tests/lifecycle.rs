//! Tests of the session lifecycle, with the fake backend and a paused clock.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runner_client::FileFailure;
use crate::sandbox::fake::FakeBackend;
use crate::sandbox::{Exit, LayerState, OuterMemory, Preparation};
use crate::session::driver::SessionJob;
use crate::session::images::tests::png;
use crate::session::*;

pub(super) struct Setting {
    pub(super) backend: Arc<FakeBackend>,
    pub(super) sessions: Sessions,
}

pub(super) fn setting() -> Setting {
    setting_with(FakeBackend::new(), SessionSettings::default())
}

pub(super) fn setting_with(backend: FakeBackend, settings: SessionSettings) -> Setting {
    let backend = Arc::new(backend);
    Setting {
        sessions: Sessions::new(backend.clone(), settings),
        backend,
    }
}

/// Settings without copies, for tests of the steps around a cell.
pub(super) fn without_undo() -> SessionSettings {
    SessionSettings {
        undo: UndoPolicy::Off,
        ..SessionSettings::default()
    }
}

pub(super) fn owner() -> Principal {
    Principal::local()
}

pub(super) fn id(name: &str) -> SessionId {
    SessionId::from_str(name).unwrap()
}

fn path(name: &str) -> InsidePath {
    InsidePath::from_str(name).unwrap()
}

pub(super) fn request(code: &str) -> ExecuteRequest {
    ExecuteRequest {
        code: code.to_owned(),
        timeout: Duration::from_secs(10),
        max_output_chars: 5000,
        asking: Approver::Nobody,
        rules: None,
        recorder: Default::default(),
    }
}

impl Setting {
    pub(super) async fn run(&self, session: &str, code: &str) -> Result<Outcome, Refused> {
        self.run_with(session, code, CancellationToken::new()).await
    }

    pub(super) async fn run_with(
        &self,
        session: &str,
        code: &str,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        self.sessions
            .execute(&owner(), &id(session), request(code), cancel)
            .await
    }

    pub(super) async fn ok(&self, session: &str, code: &str) -> Outcome {
        self.run(session, code).await.unwrap()
    }

    pub(super) async fn refused(&self, session: &str, code: &str) -> Refused {
        self.run(session, code)
            .await
            .expect_err("the request should be refused")
    }

    /// Starts a cell and returns when it is running.
    pub(super) async fn begin(
        &self,
        session: &str,
        code: &str,
        cancel: CancellationToken,
    ) -> JoinHandle<Result<Outcome, Refused>> {
        let (sessions, session, request) = (self.sessions.clone(), id(session), request(code));
        let name = session.clone();
        let call =
            tokio::spawn(
                async move { sessions.execute(&owner(), &session, request, cancel).await },
            );
        self.wait_until(|info| info.id == name && info.state == SessionState::Running)
            .await;
        call
    }

    pub(super) async fn wait_until(&self, seen: impl Fn(&SessionInfo) -> bool) {
        while !self.sessions.list(&owner()).iter().any(&seen) {
            tokio::task::yield_now().await;
        }
    }

    pub(super) async fn upload(
        &self,
        session: &str,
        name: &str,
        bytes: &[u8],
        overwrite: bool,
    ) -> Result<u64, Refused> {
        self.sessions
            .write_file(
                &owner(),
                &id(session),
                &path(name),
                &mut &bytes[..],
                overwrite,
            )
            .await
    }

    pub(super) async fn download(
        &self,
        session: &str,
        name: &str,
        limit: u64,
    ) -> Result<Vec<u8>, Refused> {
        let mut bytes = Vec::new();
        self.sessions
            .read_file(&owner(), &id(session), &path(name), limit, &mut bytes)
            .await?;
        Ok(bytes)
    }
}

pub(super) fn text(outcome: &Outcome) -> String {
    let texts = outcome.output.parts.iter().filter_map(|part| match part {
        Part::Text { text, .. } => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

#[tokio::test]
async fn text_values_and_errors_come_back_in_order() {
    let setting = setting();
    let outcome = setting
        .ok("a", "print one\nerr two\nprint three\nvalue 4")
        .await;
    assert_eq!(
        (text(&outcome).as_str(), &outcome.status),
        ("one\ntwo\nthree\n4", &Status::Completed)
    );
    assert!(outcome.notes[0].text.contains("new session"));
    let outcome = setting.ok("a", "print before\nraise broken").await;
    let Status::Raised(error) = &outcome.status else {
        panic!("{:?}", outcome.status)
    };
    assert_eq!(
        (error.name.as_str(), error.message.as_str(), error.line),
        ("ValueError", "broken", Some(2))
    );
    assert_eq!(text(&outcome), "before\nline 2\nValueError: broken");
    assert!(outcome.notes.is_empty());
}

#[tokio::test]
async fn variables_live_between_cells_and_sessions_do_not_share_them() {
    let setting = setting();
    setting.ok("a", "set x 5").await;
    assert_eq!(text(&setting.ok("a", "get x").await), "5\n");
    assert!(matches!(
        setting.ok("b", "get x").await.status,
        Status::Raised(_)
    ));
    let other = Principal("somebody else".to_owned());
    let outcome = setting
        .sessions
        .execute(&other, &id("a"), request("get x"), CancellationToken::new())
        .await
        .unwrap();
    assert!(matches!(outcome.status, Status::Raised(_)));
}

#[tokio::test]
async fn a_thousand_short_cells_lose_nothing() {
    let setting = setting();
    for number in 0..1000 {
        let outcome = setting
            .ok(
                "a",
                &format!("print {number}\nerr e{number}\nlate l{number}"),
            )
            .await;
        assert_eq!(text(&outcome), format!("{number}\ne{number}\n"));
    }
}

#[tokio::test]
async fn late_text_is_told_by_the_next_outcome_once_and_only_in_its_session() {
    let setting = setting();
    let late = |outcome: Outcome| outcome.output.late.map(|late| (late.text, late.omitted));
    let first = setting.ok("a", "print mine\nlate between cells\n").await;
    assert_eq!((text(&first), late(first)), ("mine\n".to_owned(), None));
    assert_eq!(late(setting.ok("b", "print 1").await), None);
    // Text printed between cells comes before the text kept by the runner.
    let next = setting
        .ok("a", "print mine\nlate-claim , and the rest")
        .await;
    assert_eq!(text(&next), "mine\n");
    assert_eq!(
        late(next),
        Some(("between cells, and the rest".to_owned(), 2))
    );
    assert_eq!(late(setting.ok("a", "print 1").await), None);
}

#[tokio::test]
async fn late_text_has_a_share_of_the_room_and_ends_with_its_interpreter() {
    let setting = setting();
    setting
        .ok("a", &format!("late {}end", "x".repeat(10_000)))
        .await;
    let late = setting.ok("a", "print 1").await.output.late.unwrap();
    assert_eq!(
        (late.text.len(), late.omitted),
        (5000 / 4, 10_003 - 5000 / 4)
    );
    assert!(late.text.ends_with("xend"));
    setting.ok("a", "late of the interpreter before").await;
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(setting.ok("a", "print 1").await.output.late, None);
}

#[tokio::test]
async fn a_flood_keeps_head_tail_and_the_whole_text() {
    let setting = setting();
    let outcome = setting.ok("a", "flood 100000").await;
    assert_eq!(outcome.output.total_lines, 100_000);
    let shown = text(&outcome);
    assert_eq!(shown.chars().count(), 5000);
    assert!(shown.starts_with("line 0\n") && shown.ends_with("line 99999\n"));
    let full = setting
        .sessions
        .full_output(&owner(), &id("a"), outcome.execution.into())
        .unwrap();
    assert_eq!(full.total_bytes(), outcome.output.total_chars);
    assert_eq!(full.read_range(7, 7).unwrap(), b"line 1\n");
}

#[tokio::test]
async fn the_whole_text_of_the_last_twenty_executions_is_kept() {
    let setting = setting();
    let first = setting.ok("a", "print first").await.execution;
    for _ in 0..19 {
        setting.ok("a", "print more").await;
    }
    assert!(
        setting
            .sessions
            .full_output(&owner(), &id("a"), first.into())
            .is_some()
    );
    setting.ok("a", "print more").await;
    assert!(
        setting
            .sessions
            .full_output(&owner(), &id("a"), first.into())
            .is_none()
    );
}

#[tokio::test(start_paused = true)]
async fn a_time_out_interrupts_and_keeps_the_state() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let before = Instant::now();
    let outcome = setting.ok("a", "print begun\nsleep 100").await;
    assert_eq!(
        outcome.status,
        Status::TimedOut {
            limit: Duration::from_secs(10),
            state: StateAfter::Kept
        }
    );
    assert_eq!(before.elapsed().as_secs(), 10);
    assert!(text(&outcome).starts_with("begun\n") && text(&outcome).contains("KeyboardInterrupt"));
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn code_that_ignores_the_interrupt_is_killed_and_files_stay() {
    let setting = setting();
    setting.upload("a", "data", b"kept", false).await.unwrap();
    let before = Instant::now();
    let outcome = setting.ok("a", "print begun\nignore-interrupt").await;
    assert_eq!(
        outcome.status,
        Status::TimedOut {
            limit: Duration::from_secs(10),
            state: StateAfter::Lost
        }
    );
    assert_eq!(text(&outcome), "begun\n");
    assert!(before.elapsed() < Duration::from_secs(12));
    let refused = setting.refused("a", "print x").await;
    assert!(
        refused.to_string().contains("ignored the interrupt")
            && refused.remedies().contains(&Remedy::Reset),
        "{refused}"
    );
    let report = setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(
        report,
        ResetReport {
            interrupted_running_cell: false,
            files_kept: true,
            had_no_session: false
        }
    );
    assert_eq!(setting.download("a", "data", 100).await.unwrap(), b"kept");
}

#[tokio::test(start_paused = true)]
async fn code_that_waits_for_a_processor_has_more_time_to_stop() {
    let timed_out = |state| Status::TimedOut {
        limit: Duration::from_secs(10),
        state,
    };
    for (milliseconds, state) in [(0, StateAfter::Lost), (750, StateAfter::Kept)] {
        let setting = setting();
        setting.backend.starve(milliseconds);
        setting.ok("a", "set x 1").await;
        let outcome = setting.ok("a", "stop-after 4").await;
        assert_eq!(
            outcome.status,
            timed_out(state),
            "waits {milliseconds} ms of each second"
        );
    }
    // However starved for processor time, code that does not stop is killed.
    let setting = setting();
    setting.backend.starve(1000);
    let before = Instant::now();
    assert_eq!(
        setting.ok("a", "ignore-interrupt").await.status,
        timed_out(StateAfter::Lost)
    );
    assert_eq!(before.elapsed().as_secs(), 10 + 15 + 2);
}

#[tokio::test(start_paused = true)]
async fn code_that_did_not_notice_the_interrupt_is_interrupted_again_before_it_is_killed() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let outcome = setting.ok("a", "miss-interrupt").await;
    assert_eq!(
        outcome.status,
        Status::TimedOut {
            limit: Duration::from_secs(10),
            state: StateAfter::Kept
        }
    );
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn the_clock_of_a_cell_starts_when_the_cell_starts() {
    let setting = setting();
    let first = setting
        .begin("a", "sleep 8", CancellationToken::new())
        .await;
    let second = setting.ok("a", "sleep 8\nprint done").await;
    assert_eq!(
        (second.status.name(), text(&second).as_str()),
        ("ok", "done\n")
    );
    assert_eq!(first.await.unwrap().unwrap().status, Status::Completed);
}

#[tokio::test(start_paused = true)]
async fn cells_of_one_session_queue_and_two_sessions_run_side_by_side() {
    let setting = setting();
    let before = Instant::now();
    let one = setting
        .begin("a", "sleep 5\nset x 1", CancellationToken::new())
        .await;
    let other = setting
        .begin("b", "sleep 5", CancellationToken::new())
        .await;
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
    one.await.unwrap().unwrap();
    other.await.unwrap().unwrap();
    assert_eq!(before.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn cancelling_stops_a_running_cell_and_removes_a_waiting_one() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let (cancel_running, cancel_waiting) = (CancellationToken::new(), CancellationToken::new());
    let running = setting.begin("a", "sleep 9", cancel_running.clone()).await;
    let waiting = setting.run_with("a", "set x 2", cancel_waiting.clone());
    tokio::pin!(waiting);
    assert!(futures_are_pending(&mut waiting).await);
    cancel_waiting.cancel();
    assert!(matches!(waiting.await, Err(Refused::CancelledWhileWaiting)));
    cancel_running.cancel();
    assert_eq!(
        running.await.unwrap().unwrap().status,
        Status::Cancelled {
            state: StateAfter::Kept
        }
    );
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");

    let cancel = CancellationToken::new();
    let stubborn = setting.begin("a", "ignore-interrupt", cancel.clone()).await;
    let before = Instant::now();
    cancel.cancel();
    assert_eq!(
        stubborn.await.unwrap().unwrap().status,
        Status::Cancelled {
            state: StateAfter::Lost
        }
    );
    assert!(before.elapsed() < Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn an_interrupt_that_comes_before_the_code_has_begun_is_not_lost() {
    let setting = setting_with(FakeBackend::new(), without_undo());
    setting.ok("a", "set x 1").await;
    let cancel = CancellationToken::new();
    let call = setting.run_with("a", "sleep 9", cancel.clone());
    tokio::pin!(call);
    assert!(futures_are_pending(&mut call).await);
    cancel.cancel();
    let before = Instant::now();
    assert_eq!(
        call.await.unwrap().status,
        Status::Cancelled {
            state: StateAfter::Kept
        }
    );
    assert_eq!(before.elapsed(), Duration::ZERO);
}

/// Polls a future once, so that its first step is done.
pub(super) async fn futures_are_pending<F: Future + Unpin>(future: &mut F) -> bool {
    std::future::poll_fn(|context| {
        std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(context).is_pending())
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn a_reset_acts_in_the_middle_of_a_cell() {
    let setting = setting();
    setting.upload("a", "data", b"kept", false).await.unwrap();
    setting.ok("a", "set x 1").await;
    let running = setting
        .begin(
            "a",
            "print begun\nignore-interrupt",
            CancellationToken::new(),
        )
        .await;
    let waiting = setting.run_with("a", "print y", CancellationToken::new());
    tokio::pin!(waiting);
    assert!(futures_are_pending(&mut waiting).await);
    let before = Instant::now();
    let report = setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(
        report,
        ResetReport {
            interrupted_running_cell: true,
            files_kept: true,
            had_no_session: false
        }
    );
    assert_eq!(running.await.unwrap().unwrap().status, Status::Reset);
    assert!(matches!(waiting.await, Err(Refused::ResetWhileWaiting)));
    assert_eq!(before.elapsed(), Duration::ZERO);
    let outcome = setting.ok("a", "get x").await;
    assert!(
        matches!(outcome.status, Status::Raised(_))
            && outcome.notes[0].text.contains("started anew")
    );
    assert_eq!(setting.download("a", "data", 100).await.unwrap(), b"kept");
}

#[tokio::test(start_paused = true)]
async fn a_dead_interpreter_is_reported_at_once_with_what_it_printed() {
    for (code, exit, word) in [
        ("exit 3", Exit::Code(3), "exit code 3"),
        ("crash", Exit::Signal(11), "signal 11"),
        (
            "oom",
            Exit::OutOfMemory {
                limit: 512 << 20,
                files_kept: true,
            },
            "512 MiB of memory; variables are gone, files",
        ),
        (
            "oom everywhere",
            Exit::OutOfMemory {
                limit: 512 << 20,
                files_kept: false,
            },
            "variables and files are gone",
        ),
        (
            "oom outside",
            Exit::OutOfMemoryOutside {
                whose: OuterMemory::Machine,
                files_kept: true,
            },
            "memory of the machine, or of the control group that the server is in, ran out; \
             variables are gone, files",
        ),
    ] {
        let setting = setting();
        setting.ok("other", "set x 1").await;
        let before = Instant::now();
        let outcome = setting.ok("a", &format!("print last words\n{code}")).await;
        assert_eq!(
            (outcome.status, text_of_parts(&outcome.output)),
            (Status::Died { exit }, "last words\n".to_owned())
        );
        assert!(before.elapsed() < Duration::from_secs(1));
        let refused = setting.refused("a", "print x").await.to_string();
        assert!(refused.contains(word), "{refused}");
        assert_eq!(text(&setting.ok("other", "get x").await), "1\n");
        setting.sessions.reset(&owner(), &id("a")).await.unwrap();
        assert_eq!(text(&setting.ok("a", "print back").await), "back\n");
    }
}

#[tokio::test]
async fn an_interpreter_that_ends_between_cells_is_remembered_with_its_reason() {
    let setting = setting();
    assert_eq!(text(&setting.ok("a", "print x\nexit-later 4").await), "x\n");
    setting
        .wait_until(|info| info.state == SessionState::Ended)
        .await;
    assert!(
        setting.sessions.list(&owner())[0]
            .ended
            .as_ref()
            .unwrap()
            .contains("exit code 4")
    );
    let refused = setting.refused("a", "print y").await;
    assert!(
        matches!(&refused, Refused::Ended { why, .. } if why.contains("exit code 4")),
        "{refused}"
    );
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(text(&setting.ok("a", "print y").await), "y\n");
}

#[tokio::test]
async fn pictures_come_back_between_the_texts() {
    let setting = setting();
    let picture = STANDARD.encode(png(30, 20, false));
    let outcome = setting
        .ok(
            "a",
            &format!("print before\npicture {picture}\nprint after\npicture AAAA"),
        )
        .await;
    let [
        Part::Text { .. },
        Part::Image(image),
        Part::Text { .. },
        Part::Text { text: broken, .. },
    ] = &outcome.output.parts[..]
    else {
        panic!("{:?}", outcome.output.parts)
    };
    assert_eq!(
        (image.kind, image.width, image.height),
        (ImageType::Png, 30, 20)
    );
    assert!(broken.contains("not shown because"));
}

fn text_of_parts(output: &Output) -> String {
    output
        .parts
        .iter()
        .map(|part| {
            if let Part::Text { text, .. } = part {
                text.as_str()
            } else {
                ""
            }
        })
        .collect()
}

#[tokio::test]
async fn an_interpreter_that_speaks_nonsense_is_ended() {
    let setting = setting();
    let outcome = setting.ok("a", "print before\ngarbage\nsleep 5").await;
    assert!(
        matches!(outcome.status, Status::ProtocolError { .. }),
        "{:?}",
        outcome.status
    );
    assert!(
        setting
            .refused("a", "print x")
            .await
            .to_string()
            .contains("protocol")
    );
}

#[tokio::test]
async fn lies_about_other_requests_change_nothing() {
    let setting = setting();
    let outcome = setting
        .ok(
            "a",
            "other-done\nunknown\nprint one\nforge 4000000000\nprint two\ndone-twice",
        )
        .await;
    assert_eq!(
        (text(&outcome).as_str(), outcome.status.name()),
        ("one\ntwo\n", "ok")
    );
    assert_eq!(text(&setting.ok("a", "print three").await), "three\n");
}

#[tokio::test]
async fn displays_are_updated_and_cleared() {
    let setting = setting();
    let outcome = setting
        .ok(
            "a",
            "print gone\nclear\ndisplay d first\nprint between\nupdate d second",
        )
        .await;
    assert_eq!(text(&outcome), "second\nbetween\n");
}

#[tokio::test(start_paused = true)]
async fn files_travel_both_ways_in_pieces() {
    let setting = setting();
    let large = (0..3_000_000u32)
        .map(|number| number as u8)
        .collect::<Vec<_>>();
    assert_eq!(
        setting
            .upload("a", "folder/large", &large, false)
            .await
            .unwrap(),
        3_000_000
    );
    assert_eq!(
        setting
            .download("a", "folder/large", 3_000_000)
            .await
            .unwrap(),
        large
    );
    assert_eq!(setting.upload("a", "empty", b"", false).await.unwrap(), 0);
    assert_eq!(setting.download("a", "empty", 0).await.unwrap(), b"");

    let trouble = |refused: Refused| match refused {
        Refused::File { reason, .. } => reason,
        other => panic!("{other}"),
    };
    assert_eq!(
        trouble(
            setting
                .download("a", "folder/large", 2_999_999)
                .await
                .unwrap_err()
        ),
        FileFailure::TooLarge
    );
    assert_eq!(
        trouble(setting.download("a", "none", 10).await.unwrap_err()),
        FileFailure::Missing
    );
    assert_eq!(
        trouble(setting.download("a", "folder", 10).await.unwrap_err()),
        FileFailure::NotAFile
    );
    assert_eq!(
        trouble(setting.upload("a", "empty", b"x", false).await.unwrap_err()),
        FileFailure::Exists
    );
    assert_eq!(setting.upload("a", "empty", b"x", true).await.unwrap(), 1);
    assert!(matches!(
        setting.download("unknown", "x", 1).await,
        Err(Refused::Unknown { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn a_runner_that_stops_answering_a_file_request_is_ended_after_a_minute() {
    let setting = setting_with(FakeBackend::new(), without_undo());
    setting.ok("a", "mute").await;
    let before = Instant::now();
    let refused = setting.download("a", "x", 1).await.unwrap_err();
    assert!(refused.to_string().contains("no progress"), "{refused}");
    assert_eq!(before.elapsed().as_secs(), 60);
}

#[tokio::test(start_paused = true)]
async fn an_idle_session_expires_and_its_id_says_so_until_a_reset() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    tokio::time::sleep(Duration::from_secs(3599)).await;
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
    assert_eq!(setting.backend.sandboxes(), 1);
    tokio::time::sleep(Duration::from_secs(3601)).await;
    assert_eq!(setting.backend.sandboxes(), 0);
    assert!(
        setting
            .refused("a", "print x")
            .await
            .to_string()
            .contains("not used for 3600 s")
    );
    assert_eq!(
        setting.sessions.list(&owner())[0].state,
        SessionState::Ended
    );
    let report = setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(
        report,
        ResetReport {
            interrupted_running_cell: false,
            files_kept: false,
            had_no_session: true
        }
    );
    assert_eq!(text(&setting.ok("a", "print new").await), "new\n");
}

#[tokio::test(start_paused = true)]
async fn a_running_cell_is_not_idle() {
    let settings = SessionSettings {
        idle_timeout: Duration::from_secs(2),
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    assert_eq!(
        text(&setting.ok("a", "sleep 9\nprint done").await),
        "done\n"
    );
}

#[tokio::test]
async fn too_many_sessions_are_refused_with_the_oldest_idle_ones() {
    let settings = SessionSettings {
        max_sessions: 2,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.ok("first", "print x").await;
    setting.ok("second", "print x").await;
    let refused = setting.refused("third", "print x").await;
    assert!(
        matches!(&refused, Refused::TooManySessions { limit: 2, own: 2, oldest_idle }
            if oldest_idle[0] == id("first")),
        "{refused}"
    );
    // Another owner is told that none of them is its own, without their names.
    let other = Principal("other".to_owned());
    let refused = setting
        .sessions
        .execute(
            &other,
            &id("a"),
            request("print x"),
            CancellationToken::new(),
        )
        .await;
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("None of them is yours") && !refused.contains("first"),
        "{refused}"
    );
    setting
        .sessions
        .close(&owner(), &id("first"))
        .await
        .unwrap();
    setting.ok("third", "print x").await;
}

#[tokio::test]
async fn a_closed_session_leaves_nothing_and_its_id_is_free() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let running = setting
        .begin("a", "ignore-interrupt", CancellationToken::new())
        .await;
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap().status, Status::Closed);
    assert_eq!(setting.backend.sandboxes(), 0);
    assert!(matches!(
        setting.sessions.close(&owner(), &id("a")).await,
        Err(Refused::Unknown { .. })
    ));
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn a_reset_of_an_unknown_session_says_so_except_for_the_default_one() {
    let setting = setting();
    assert!(matches!(
        setting.sessions.reset(&owner(), &id("a")).await,
        Err(Refused::Unknown { .. })
    ));
    assert!(
        setting
            .sessions
            .reset(&owner(), &SessionId::default_session())
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn shutting_down_destroys_every_sandbox_and_answers_everybody() {
    let setting = setting();
    setting.ok("a", "print x").await;
    let running = setting
        .begin("b", "ignore-interrupt", CancellationToken::new())
        .await;
    setting.sessions.shut_down().await;
    assert_eq!(running.await.unwrap().unwrap().status, Status::Closed);
    assert_eq!(setting.backend.sandboxes(), 0);
    assert!(matches!(
        setting.refused("c", "print x").await,
        Refused::ShuttingDown
    ));
}

#[tokio::test]
async fn a_request_waits_for_the_preparation_and_can_be_cancelled_meanwhile() {
    let setting = setting_with(FakeBackend::unprepared(), SessionSettings::default());
    let cancel = CancellationToken::new();
    let waiting = setting.run_with("a", "print x", cancel.clone());
    tokio::pin!(waiting);
    assert!(futures_are_pending(&mut waiting).await);
    cancel.cancel();
    assert!(matches!(waiting.await, Err(Refused::CancelledWhileWaiting)));
    let patient = setting.run("a", "print x");
    tokio::pin!(patient);
    assert!(futures_are_pending(&mut patient).await);
    setting.backend.prepare(Preparation::Ready);
    assert_eq!(text(&patient.await.unwrap()), "x\n");
}

#[tokio::test]
async fn a_failed_start_is_told_and_may_be_tried_again() {
    let setting = setting_with(FakeBackend::unprepared(), SessionSettings::default());
    setting.backend.prepare(Preparation::Failed {
        why: "no Python here".to_owned(),
    });
    assert!(
        setting
            .refused("a", "print x")
            .await
            .to_string()
            .contains("no Python here")
    );
    setting.backend.prepare(Preparation::Ready);
    assert_eq!(text(&setting.ok("a", "print x").await), "x\n");
}

#[tokio::test(start_paused = true)]
async fn who_asks_a_session_that_could_not_begin_and_is_gone_already_is_told_why() {
    let setting = setting_with(FakeBackend::unprepared(), SessionSettings::default());
    let entry = setting.sessions.find_or_create(&owner(), &id("a")).unwrap();
    setting.backend.prepare(Preparation::Failed {
        why: "no Python here".to_owned(),
    });
    entry.commands.closed().await;
    let (reply, _answer) = tokio::sync::oneshot::channel();
    let error = setting
        .sessions
        .submit_as(&entry, 1, SessionJob::List { reply })
        .unwrap_err();
    let refused = setting.sessions.explained(&owner(), &id("a"), error);
    assert!(
        matches!(&refused, Refused::Launch(_)) && refused.to_string().contains("no Python here"),
        "{refused}"
    );
}

#[tokio::test]
async fn bad_input_is_refused_with_what_to_do() {
    let setting = setting();
    let huge = format!("print {}", "x".repeat(MAX_CODE_BYTES));
    assert!(matches!(
        setting.refused("a", &huge).await,
        Refused::CodeTooLarge { .. }
    ));
    assert_eq!(setting.backend.sandboxes(), 0);
    let large = "x".repeat(1_000_000);
    assert_eq!(
        setting
            .ok("a", &format!("print {large}"))
            .await
            .output
            .total_chars,
        1_000_001
    );
}

#[tokio::test]
async fn the_fake_backend_admits_that_it_isolates_nothing() {
    let outcome = setting().ok("a", "print x").await;
    assert!(
        outcome
            .isolation
            .layers
            .values()
            .all(|layer| matches!(layer, LayerState::Missing { .. }))
    );
    assert_eq!(outcome.isolation.layers.len(), 7);
}

fn rules(list: &[&str]) -> Rules {
    Rules::parse(list).unwrap()
}

fn listed(rules: &Rules) -> Vec<String> {
    rules.iter().map(ToString::to_string).collect()
}

impl Setting {
    /// Runs a cell that narrows the session's network to these rules.
    pub(super) async fn narrow(&self, session: &str, rules: Rules) -> Result<Outcome, Refused> {
        let request = ExecuteRequest {
            rules: Some(rules),
            ..request("print x")
        };
        self.sessions
            .execute(&owner(), &id(session), request, CancellationToken::new())
            .await
    }

    fn rules_of(&self, session: &str) -> Rules {
        self.sessions
            .list(&owner())
            .into_iter()
            .find(|info| info.id == id(session))
            .unwrap()
            .rules
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_may_reach_less_than_the_operator_allows_and_never_more() {
    let setting = setting();
    setting.backend.set_rules(rules(&[
        "*.example.com",
        "!secret.example.com",
        "10.0.0.0/8:80",
    ]));
    let narrow = async |list: &[&str]| setting.narrow("a", rules(list)).await;
    narrow(&["api.example.com"]).await.unwrap();
    assert_eq!(
        setting.rules_of("a"),
        rules(&["api.example.com"]).under_denials_of(&rules(&["!secret.example.com"]))
    );
    let refused = narrow(&["api.example.com", "example.org"])
        .await
        .unwrap_err();
    assert!(
        matches!(&refused, Refused::BeyondRules { rule } if rule.contains("example.org")),
        "{refused}"
    );
    assert_eq!(
        listed(&setting.rules_of("a"))[0],
        "api.example.com",
        "a refused change changes nothing"
    );
    // Within the operator's rules, it can be widened again.
    narrow(&["*.example.com"]).await.unwrap();
    assert_eq!(
        listed(&setting.rules_of("a")),
        ["*.example.com", "!secret.example.com"]
    );
    narrow(&[]).await.unwrap();
    assert!(setting.rules_of("a").is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_a_session_may_reach_outlives_reset_and_undo_and_is_carried_by_forks() {
    let setting = setting();
    setting.backend.set_rules(rules(&["*.example.com"]));
    let narrowed = rules(&["api.example.com"]);
    let first = ExecuteRequest {
        rules: Some(narrowed.clone()),
        ..request("set x 1")
    };
    setting
        .sessions
        .execute(&owner(), &id("a"), first, CancellationToken::new())
        .await
        .unwrap();
    setting
        .sessions
        .fork(&owner(), &id("a"), ForkNames::Named(vec![id("b")]))
        .await
        .unwrap();
    setting.sessions.undo(&owner(), &id("a"), 1).await.unwrap();
    assert_eq!(setting.rules_of("a"), narrowed);
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    setting.ok("b", "get x").await;
    assert_eq!(
        [setting.rules_of("a"), setting.rules_of("b")],
        [narrowed.clone(), narrowed]
    );
    // The fork has the operator's rules.
    setting
        .narrow("b", rules(&["www.example.com"]))
        .await
        .unwrap();
    assert!(setting.narrow("b", rules(&["example.org"])).await.is_err());
    setting.ok("c", "print x").await;
    assert_eq!(setting.rules_of("c"), rules(&["*.example.com"]));
}

#[tokio::test(start_paused = true)]
async fn the_rules_of_a_cell_hold_from_its_start_and_not_while_the_cell_before_runs() {
    let setting = setting();
    setting.backend.set_rules(rules(&["*.example.com"]));
    setting.narrow("a", rules(&[])).await.unwrap();
    let closed = setting
        .begin("a", "sleep 5", CancellationToken::new())
        .await;
    let mut next = std::pin::pin!(setting.narrow("a", rules(&["api.example.com"])));
    tokio::select! {
        biased;
        _ = &mut next => panic!("it waits for the cell before it"),
        () = tokio::time::sleep(Duration::from_secs(4)) => {}
    }
    assert!(
        setting.rules_of("a").is_empty(),
        "the cell that runs gains nothing because another one was sent"
    );
    closed.await.unwrap().unwrap();
    next.await.unwrap();
    assert_eq!(setting.rules_of("a"), rules(&["api.example.com"]));
    setting.ok("a", "print x").await;
    assert_eq!(
        setting.rules_of("a"),
        rules(&["api.example.com"]),
        "it holds from that cell on"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cell_whose_rules_are_refused_does_not_run_and_the_next_one_does() {
    let setting = setting();
    let refused = ExecuteRequest {
        rules: Some(rules(&["example.org"])),
        ..request("set x 1")
    };
    let cancel = CancellationToken::new();
    let refused = setting
        .sessions
        .execute(&owner(), &id("a"), refused, cancel)
        .await
        .unwrap_err();
    assert!(matches!(&refused, Refused::BeyondRules { .. }), "{refused}");
    let next = setting.ok("a", "get x").await;
    assert!(
        matches!(next.status, Status::Raised(_)),
        "{:?}",
        next.status
    );
    setting.ok("a", "set x 2").await;
    assert_eq!(setting.ok("a", "get x").await.status, Status::Completed); // control
}
