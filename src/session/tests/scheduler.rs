//! Tests of scheduling when more cells are submitted than may run concurrently, with the fake
//! backend and a paused clock.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lifecycle::{
    Setting, futures_are_pending, id, owner, request, setting_with, text, without_undo,
};
use crate::sandbox::fake::FakeBackend;
use crate::session::*;

const SECOND: Duration = Duration::from_secs(1);

fn places(max_running: usize) -> Setting {
    setting_with(
        FakeBackend::new(),
        SessionSettings {
            max_running,
            ..without_undo()
        },
    )
}

fn other() -> Principal {
    Principal("somebody else".to_owned())
}

impl Setting {
    /// Submits a cell and returns when it has a run permit or waits for one.
    async fn submit(
        &self,
        owner: &Principal,
        session: &str,
        code: &str,
    ) -> JoinHandle<(Outcome, Instant)> {
        let (sessions, owner, session) = (self.sessions.clone(), owner.clone(), id(session));
        let request = ExecuteRequest {
            timeout: 10 * SECOND,
            ..request(code)
        };
        let before = load(self);
        let call = tokio::spawn(async move {
            let outcome = sessions
                .execute(&owner, &session, request, CancellationToken::new())
                .await
                .unwrap();
            (outcome, Instant::now())
        });
        while load(self) == before {
            tokio::task::yield_now().await;
        }
        call
    }
}

/// Returns how many cells run, and how many wait for a permit.
fn load(setting: &Setting) -> (usize, usize) {
    let load = setting.sessions.load();
    (load.running, load.waiting)
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_one_principal_holds_up_nobody_else() {
    let setting = places(1);
    let begun = Instant::now();
    let mut flood = Vec::new();
    for number in 0..5 {
        flood.push(
            setting
                .submit(&owner(), &format!("a{number}"), "sleep 5")
                .await,
        );
    }
    assert_eq!(load(&setting), (1, 4));
    let (_, ended) = setting
        .submit(&other(), "b", "sleep 3")
        .await
        .await
        .unwrap();
    assert_eq!(ended - begun, 3 * SECOND);
    let mut ends = Vec::new();
    for call in flood {
        ends.push((call.await.unwrap().1 - begun).as_secs());
    }
    assert_eq!(ends, [5, 10, 15, 20, 25]);
    assert_eq!(load(&setting), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_place_is_not_a_part_of_the_time_limit() {
    let setting = places(1);
    let first = setting.submit(&owner(), "a", "sleep 9").await;
    let (outcome, _) = setting
        .submit(&owner(), "b", "sleep 9\nprint done")
        .await
        .await
        .unwrap();
    assert_eq!(
        (outcome.status.name(), text(&outcome).as_str()),
        ("ok", "done\n")
    );
    assert_eq!(outcome.duration, 9 * SECOND);
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn as_many_cells_run_at_once_as_there_are_places() {
    for (limit, seconds) in [(1, 15), (2, 10), (3, 5), (0, 5)] {
        let setting = places(limit);
        let begun = Instant::now();
        let calls = ["a", "b", "c"].map(|session| setting.run(session, "sleep 5"));
        let [a, b, c] = calls;
        let (a, b, c) = tokio::join!(a, b, c);
        assert!(a.is_ok() && b.is_ok() && c.is_ok());
        assert_eq!(
            begun.elapsed(),
            Duration::from_secs(seconds),
            "{limit} places"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_cell_that_waits_for_a_place_can_be_cancelled_reset_and_closed() {
    let setting = places(1);
    for session in ["cancelled", "reset", "closed"] {
        setting.upload(session, "data", b"x", false).await.unwrap();
    }
    let running = setting.submit(&owner(), "a", "sleep 5").await;
    let cancel = CancellationToken::new();
    let waiting = setting.run_with("cancelled", "print x", cancel.clone());
    tokio::pin!(waiting);
    assert!(futures_are_pending(&mut waiting).await);
    setting
        .wait_until(|info| info.id == id("cancelled") && info.state == SessionState::Waiting)
        .await;
    cancel.cancel();
    assert!(matches!(waiting.await, Err(Refused::CancelledWhileWaiting)));

    let reset = async {
        setting
            .wait_until(|info| info.id == id("reset") && info.state == SessionState::Waiting)
            .await;
        setting
            .sessions
            .reset(&owner(), &id("reset"))
            .await
            .unwrap();
    };
    let (refused, ()) = tokio::join!(setting.run("reset", "print x"), reset);
    assert!(matches!(refused, Err(Refused::ResetWhileWaiting)));

    let close = async {
        setting
            .wait_until(|info| info.id == id("closed") && info.state == SessionState::Waiting)
            .await;
        setting
            .sessions
            .close(&owner(), &id("closed"))
            .await
            .unwrap();
    };
    let (refused, ()) = tokio::join!(setting.run("closed", "print x"), close);
    assert!(matches!(refused, Err(Refused::ClosedWhileWaiting)));
    assert_eq!(load(&setting), (1, 0));
    running.await.unwrap();
    setting.ok("reset", "print x").await;
}

#[tokio::test(start_paused = true)]
async fn a_place_is_given_back_however_a_cell_ends() {
    let setting = places(1);
    for code in [
        "print x",
        "raise x",
        "exit 1",
        "crash",
        "garbage",
        "sleep 100",
        "ignore-interrupt",
    ] {
        setting.ok(code.split(' ').next().unwrap(), code).await;
        assert_eq!(load(&setting), (0, 0), "after {code}");
    }
}

#[tokio::test(start_paused = true)]
async fn work_of_the_servers_own_needs_no_place_and_variants_do() {
    let setting = places(1);
    setting.ok("b", "set x 1").await;
    let running = setting.submit(&owner(), "a", "sleep 5").await;
    let begun = Instant::now();
    let hidden = setting.sessions.hidden(Rules::none()).unwrap();
    hidden.execute("print x", SECOND, 100).await.unwrap();
    assert_eq!(begun.elapsed(), Duration::ZERO);
    let variant = |name: &str| Variant {
        name: name.to_owned(),
        code: "sleep 2".to_owned(),
    };
    let explore = ExploreRequest {
        variants: vec![variant("one"), variant("two")],
        keep: Keep::Nothing,
        replace: false,
        recorder: Default::default(),
        timeout: 10 * SECOND,
        max_output_chars: 100,
    };
    let news = ProgressChannel::new(String::new());
    setting
        .sessions
        .explore(&owner(), &id("b"), explore, CancellationToken::new(), news)
        .await
        .unwrap();
    assert_eq!(begun.elapsed(), 9 * SECOND);
    running.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_a_place_is_told_so() {
    let setting = places(1);
    let running = setting.submit(&owner(), "a", "sleep 5").await;
    let news = ProgressChannel::new(String::new());
    let mut heard = news.subscribe();
    let sessions = setting.sessions.clone();
    let call = tokio::spawn(async move {
        sessions
            .begin(
                &owner(),
                &id("b"),
                request("print x"),
                Some(SECOND),
                CancellationToken::new(),
                news,
            )
            .await
    });
    heard.changed().await.unwrap();
    assert_eq!(
        heard.borrow().as_str(),
        "waiting: the server runs as many cells as it may"
    );
    let ExecutionReport::Underway(underway) = call.await.unwrap().unwrap() else {
        panic!()
    };
    assert_eq!((underway.ahead, underway.elapsed), (0, SECOND));
    running.await.unwrap();
}
