//! Tests of branching, with the fake backend and a paused clock.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lifecycle::{
    Setting, futures_are_pending, id, owner, request, setting, setting_with, text, without_undo,
};
use crate::sandbox::Exit;
use crate::sandbox::fake::{FakeBackend, FakeCopying};
use crate::session::*;

impl Setting {
    async fn undo(&self, session: &str, cells: u32) -> Result<UndoReport, Refused> {
        self.sessions.undo(&owner(), &id(session), cells).await
    }

    async fn fork(&self, session: &str, count: u32) -> Result<ForkReport, Refused> {
        self.sessions
            .fork(&owner(), &id(session), ForkNames::Count(count))
            .await
    }

    async fn fork_named(&self, session: &str, names: &[&str]) -> Result<ForkReport, Refused> {
        let names = names.iter().map(|name| id(name)).collect();
        self.sessions
            .fork(&owner(), &id(session), ForkNames::Named(names))
            .await
    }

    async fn reset(&self, session: &str) -> Result<ResetReport, Refused> {
        self.sessions.reset(&owner(), &id(session)).await
    }

    async fn explore(
        &self,
        session: &str,
        request: ExploreRequest,
    ) -> Result<ExploreReport, Refused> {
        self.explore_with(session, request, CancellationToken::new())
            .await
    }

    async fn explore_with(
        &self,
        session: &str,
        request: ExploreRequest,
        cancel: CancellationToken,
    ) -> Result<ExploreReport, Refused> {
        self.sessions
            .explore(
                &owner(),
                &id(session),
                request,
                cancel,
                watch::Sender::default(),
            )
            .await
    }

    /// Starts an exploration and returns when its forks exist.
    async fn begin_exploring(
        &self,
        session: &str,
        request: ExploreRequest,
        cancel: CancellationToken,
    ) -> JoinHandle<Result<ExploreReport, Refused>> {
        let sandboxes = self.backend.sandboxes() + request.variants.len();
        let (sessions, session) = (self.sessions.clone(), id(session));
        let exploration = tokio::spawn(async move {
            sessions
                .explore(
                    &owner(),
                    &session,
                    request,
                    cancel,
                    watch::Sender::default(),
                )
                .await
        });
        self.wait_for_sandboxes(sandboxes).await;
        exploration
    }

    async fn wait_for_sandboxes(&self, count: usize) {
        while self.backend.sandboxes() != count {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the copy after the last cell is made, or the attempt has failed.
    async fn at_rest(&self, session: &str) {
        // A file request waits for the end of the copying.
        let _ = self.download(session, "none", 0).await;
    }

    fn undoable(&self, session: &str) -> Vec<(u32, String)> {
        let checkpoints = self.sessions.checkpoints(&owner(), &id(session)).unwrap();
        checkpoints
            .into_iter()
            .map(|checkpoint| (checkpoint.cells_back, checkpoint.before))
            .collect()
    }

    fn names(&self) -> Vec<String> {
        self.sessions
            .list(&owner())
            .into_iter()
            .map(|info| info.id.to_string())
            .collect()
    }
}

fn undo_of(checkpoints: usize, files: u64) -> SessionSettings {
    SessionSettings {
        undo: UndoPolicy::On { checkpoints, files },
        ..SessionSettings::default()
    }
}

fn exploration(variants: &[(&str, &str)], keep: Keep) -> ExploreRequest {
    let variants = variants
        .iter()
        .map(|(name, code)| Variant {
            name: (*name).to_owned(),
            code: (*code).to_owned(),
        })
        .collect();
    ExploreRequest {
        variants,
        timeout: Duration::from_secs(10),
        max_output_chars: 5000,
        keep,
        replace: false,
        recorder: Default::default(),
    }
}

fn by(expression: &str) -> Keep {
    Keep::Best {
        by: expression.to_owned(),
    }
}

fn kept(report: &ExploreReport) -> Vec<(&str, &str)> {
    report
        .kept
        .iter()
        .map(|(variant, session)| (variant.as_str(), session.as_str()))
        .collect()
}

#[tokio::test]
async fn an_undo_brings_back_variables_and_files() {
    let setting = setting();
    setting.ok("a", "set x 1\nkeep f one").await;
    setting.ok("a", "set x 2\nkeep f two\nkeep g new").await;
    assert_eq!(
        text(&setting.ok("a", "get x\nfile f\nfile g").await),
        "2\ntwo\nnew\n"
    );
    let report = setting.undo("a", 2).await.unwrap();
    assert_eq!(
        (report.undone, report.revived, report.files),
        (2, false, FilesCarried::Restored)
    );
    assert_eq!(text(&setting.ok("a", "get x\nfile f").await), "1\none\n");
    assert!(matches!(
        setting.ok("a", "file g").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn undoing_cell_by_cell_is_the_same_as_undoing_them_at_once() {
    let setting = setting();
    for session in ["once", "stepwise"] {
        for number in 1..=4 {
            setting
                .ok(session, &format!("set x {number}\nkeep f {number}"))
                .await;
        }
        setting.ok(session, "print nothing changes").await;
    }
    let at_once = setting.undo("once", 4).await.unwrap();
    for _ in 0..3 {
        setting.undo("stepwise", 1).await.unwrap();
    }
    let stepwise = setting.undo("stepwise", 1).await.unwrap();
    let left = |report: &UndoReport| {
        report
            .left
            .iter()
            .map(|left| left.before.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (left(&at_once), left(&stepwise)),
        (vec!["set x 1".to_owned()], left(&at_once))
    );
    for session in ["once", "stepwise"] {
        assert_eq!(text(&setting.ok(session, "get x\nfile f").await), "1\n1\n");
    }
}

#[tokio::test]
async fn a_session_goes_on_after_an_undo_and_can_be_undone_again() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2").await;
    setting.undo("a", 1).await.unwrap();
    setting.ok("a", "set x 3").await;
    assert_eq!(
        setting.undoable("a"),
        [(1, "set x 3".to_owned()), (2, "set x 1".to_owned())]
    );
    setting.undo("a", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
    setting.undo("a", 2).await.unwrap();
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn cells_that_change_nothing_make_no_copies_and_count_as_cells() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.at_rest("a").await;
    assert_eq!(setting.backend.checkpoints_made(), 2);
    for _ in 0..5 {
        setting.ok("a", "get x").await;
    }
    setting.at_rest("a").await;
    assert_eq!(setting.backend.checkpoints_made(), 2);
    setting.undo("a", 6).await.unwrap();
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
    setting.ok("a", "set x 1").await;
    setting.at_rest("a").await;
    assert_eq!(
        setting.backend.checkpoints_made(),
        3,
        "the control: a cell that changes something is copied"
    );
}

#[tokio::test]
async fn an_upload_belongs_to_the_state_before_the_next_cell() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.upload("a", "f", b"up", false).await.unwrap();
    setting.upload("a", "g", b"up", false).await.unwrap();
    setting.ok("a", "keep f changed").await;
    setting.at_rest("a").await;
    assert_eq!(
        setting.backend.checkpoints_made(),
        4,
        "uploads in a row are copied once, before the cell"
    );
    setting.undo("a", 1).await.unwrap();
    assert_eq!(setting.download("a", "f", 10).await.unwrap(), b"up");
    setting.undo("a", 1).await.unwrap();
    assert!(setting.download("a", "f", 10).await.is_err());
}

#[tokio::test]
async fn copies_are_bounded_and_the_oldest_go_first() {
    let setting = setting_with(FakeBackend::new(), undo_of(3, 1000));
    for number in 1..=9 {
        setting.ok("a", &format!("set x {number}")).await;
    }
    setting.at_rest("a").await;
    assert_eq!(
        setting.backend.checkpoints(),
        4,
        "three to go back to, and the present"
    );
    let cells = [
        (1, "set x 9".to_owned()),
        (2, "set x 8".to_owned()),
        (3, "set x 7".to_owned()),
    ];
    assert_eq!(setting.undoable("a"), cells);
    let refused = setting.undo("a", 4).await.unwrap_err().to_string();
    assert!(refused.contains("at most 3 cells"), "{refused}");
    setting.undo("a", 3).await.unwrap();
    assert_eq!(text(&setting.ok("a", "get x").await), "6\n");
}

#[tokio::test]
async fn variants_of_one_exploration_have_one_seed_and_other_sessions_have_none() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let variants = [("one", "get seed"), ("two", "get seed")];
    let mut seeds = Vec::new();
    for _ in 0..2 {
        let report = setting
            .explore("a", exploration(&variants, Keep::All))
            .await
            .unwrap();
        let told = report
            .variants
            .iter()
            .map(|variant| text(variant.ended.as_ref().unwrap()))
            .collect::<Vec<_>>();
        assert_eq!(told[0], told[1]);
        seeds.push(told[0].trim().parse::<u64>().unwrap());
    }
    assert_ne!(seeds[0], seeds[1]);
    // Not in a variant that was kept either.
    for session in ["a", "a-one"] {
        assert_eq!(text(&setting.ok(session, "get seed").await), "none\n");
    }
}

#[tokio::test(start_paused = true)]
async fn an_undo_is_refused_while_a_cell_runs_or_nothing_is_kept() {
    let setting = setting();
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::Unknown { .. })
    ));
    setting.upload("a", "f", b"", false).await.unwrap();
    let refused = setting.undo("a", 1).await.unwrap_err().to_string();
    assert!(refused.contains("no cell has run"), "{refused}");
    assert_eq!(setting.undoable("a"), []);
    let running = setting
        .begin("a", "sleep 5", CancellationToken::new())
        .await;
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::CellRunning { .. })
    ));
    running.await.unwrap().unwrap();
    assert!(matches!(
        setting.undo("a", 0).await,
        Err(Refused::NothingToUndo { .. })
    ));
    assert_eq!(
        setting.undo("a", 1).await.unwrap().undone,
        1,
        "the control: afterwards it works"
    );

    let off = setting_with(FakeBackend::new(), without_undo());
    off.ok("a", "set x 1").await;
    assert!(matches!(
        off.undo("a", 1).await,
        Err(Refused::UndoOff { .. })
    ));
    assert!(matches!(
        off.sessions.checkpoints(&owner(), &id("a")),
        Err(Refused::UndoOff { .. })
    ));
    assert_eq!(off.backend.checkpoints_made(), 0, "nothing is paid for it");
}

#[tokio::test(start_paused = true)]
async fn a_crash_is_undone() {
    for (code, name) in [
        ("exit 3", "died"),
        ("crash", "died"),
        ("oom", "out_of_memory"),
        ("ignore-interrupt", "timeout"),
    ] {
        let setting = setting();
        setting.ok("a", "set x 1\nkeep f one").await;
        let outcome = setting.ok("a", &format!("keep f broken\n{code}")).await;
        assert_eq!(outcome.status.name(), name);
        assert!(
            outcome
                .notes
                .iter()
                .any(|note| note.remedy == Some(Remedy::Undo)),
            "{:?}",
            outcome.notes
        );
        let refused = setting.refused("a", "get x").await;
        assert_eq!(refused.remedies(), [Remedy::Undo, Remedy::Reset]);
        let refused = setting.fork("a", 1).await.unwrap_err();
        assert!(refused.remedies().contains(&Remedy::Undo), "{refused}");
        let report = setting.undo("a", 1).await.unwrap();
        assert_eq!((report.revived, report.left.len()), (true, 1));
        assert_eq!(text(&setting.ok("a", "get x\nfile f").await), "1\none\n");
    }
}

#[tokio::test]
async fn an_interpreter_that_ended_between_cells_comes_back_by_an_undo() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2\nexit-later 4").await;
    setting
        .wait_until(|info| info.state == SessionState::Ended)
        .await;
    assert!(setting.undo("a", 1).await.unwrap().revived);
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test]
async fn a_reset_forgets_everything_that_could_be_undone() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.at_rest("a").await;
    setting.reset("a").await.unwrap();
    assert_eq!(
        (setting.undoable("a"), setting.backend.checkpoints()),
        (vec![], 0)
    );
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::NothingToUndo { .. })
    ));
    setting.ok("a", "set x 2").await;
    setting.undo("a", 1).await.unwrap();
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn a_copy_that_fails_is_told_and_the_cell_runs_all_the_same() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.at_rest("a").await;
    setting.backend.set_copying(FakeCopying::Fails);
    setting.ok("a", "set x 2").await;
    setting.at_rest("a").await;
    setting.backend.set_copying(FakeCopying::Works);
    let outcome = setting.ok("a", "set x 3").await;
    assert_eq!(outcome.status, Status::Completed);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("could not be kept")),
        "{:?}",
        outcome.notes
    );
    assert!(setting.ok("a", "set x 4").await.notes.is_empty());
    assert_eq!(
        setting
            .undoable("a")
            .into_iter()
            .map(|entry| entry.0)
            .collect::<Vec<_>>(),
        [1, 3, 4]
    );
    let refused = setting.undo("a", 2).await.unwrap_err().to_string();
    assert!(refused.contains("1, 3, 4"), "{refused}");
    setting.undo("a", 3).await.unwrap();
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test]
async fn where_sessions_cannot_be_copied_it_is_said_once_and_not_tried_again() {
    let setting = setting();
    setting.backend.set_copying(FakeCopying::Unsupported);
    let outcome = setting.ok("a", "set x 1").await;
    assert_eq!(outcome.status, Status::Completed);
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("cannot be undone here")),
        "{:?}",
        outcome.notes
    );
    setting.backend.set_copying(FakeCopying::Works);
    assert!(setting.ok("a", "set x 2").await.notes.is_empty());
    setting.at_rest("a").await;
    assert_eq!(setting.backend.checkpoints_made(), 0);
    let refused = setting.undo("a", 1).await.unwrap_err().to_string();
    assert!(refused.contains("the switch says so"), "{refused}");
}

#[tokio::test]
async fn copies_that_the_kernel_took_are_told_and_no_longer_offered() {
    let setting = setting();
    for number in 1..=4 {
        setting.ok("a", &format!("set x {number}")).await;
    }
    setting.at_rest("a").await;
    setting.backend.take_oldest_checkpoints(2);
    let outcome = setting.ok("a", "get x").await;
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("2 kept states")),
        "{:?}",
        outcome.notes
    );
    assert_eq!(setting.undoable("a").last().unwrap().1, "set x 3");
    setting.backend.take_oldest_checkpoints(99);
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::NothingToUndo { .. })
    ));
    assert_eq!(
        text(&setting.ok("a", "get x").await),
        "4\n",
        "a refused undo changes nothing"
    );
    setting.ok("a", "set x 5").await;
    setting
        .undo("a", 1)
        .await
        .expect_err("there was no copy of the state before that cell");
    setting.ok("a", "set x 6").await;
    setting.undo("a", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a", "get x").await), "5\n");
}

#[tokio::test]
async fn old_copies_are_given_up_before_memory_runs_out() {
    let settings = SessionSettings {
        memory_limit: Some(10_000),
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.backend.set_memory_of_checkpoint(2000);
    let mut notes = Vec::new();
    for number in 1..=8 {
        notes.extend(setting.ok("a", &format!("set x {number}")).await.notes);
    }
    setting.at_rest("a").await;
    assert_eq!(setting.backend.checkpoints(), 3);
    assert!(
        notes
            .iter()
            .any(|note| note.text.contains("to save memory")),
        "{notes:?}"
    );
    assert_eq!(setting.undoable("a").len(), 2);
    setting.backend.set_memory_of_checkpoint(100_000);
    let (made, mut notes) = (setting.backend.checkpoints_made(), Vec::new());
    for number in 1..=8 {
        notes.extend(setting.ok("a", &format!("set x {number}")).await.notes);
    }
    setting.at_rest("a").await;
    assert_eq!(setting.backend.checkpoints(), 1, "the last one stays");
    assert_eq!(
        setting.backend.checkpoints_made(),
        made,
        "the session needs its memory for itself"
    );
    assert!(
        notes
            .iter()
            .any(|note| note.text.contains("nearly all the memory")),
        "{notes:?}"
    );
}

#[tokio::test]
async fn files_beyond_the_budget_are_left_alone_and_that_is_said() {
    let setting = setting_with(FakeBackend::new(), undo_of(10, 3));
    setting.ok("a", "keep f one").await;
    setting.ok("a", "keep f longer").await;
    assert_eq!(
        setting.undo("a", 1).await.unwrap().files,
        FilesCarried::Restored
    );
    setting.ok("a", "keep f longer").await;
    setting.ok("a", "set x 1\nkeep f more").await;
    let files = setting.undo("a", 1).await.unwrap().files;
    assert!(
        matches!(&files, FilesCarried::LeftAlone { why } if why.contains("too much")),
        "{files:?}"
    );
    assert_eq!(text(&setting.ok("a", "file f").await), "more\n");
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));
}

#[tokio::test]
async fn what_a_copy_lacks_is_told() {
    let setting = setting();
    setting.ok("a", "lose 2 threads\nlose 1 connection").await;
    setting.ok("a", "set x 1").await;
    let lost = ["2 threads", "1 connection"];
    assert_eq!(setting.fork("a", 2).await.unwrap().lost, lost);
    assert_eq!(setting.undo("a", 1).await.unwrap().lost, lost);
}

#[tokio::test]
async fn a_session_that_comes_with_a_copy_of_its_beginning_needs_no_other_before_its_first_cell() {
    let setting = setting();
    setting.backend.keep_beginnings();
    setting.ok("a", "set x 1\nkeep f one").await;
    assert_eq!(setting.backend.checkpoints_made(), 0);
    setting.at_rest("a").await;
    assert_eq!(
        setting.backend.checkpoints_made(),
        1,
        "the control: the state after the cell is copied"
    );
    assert_eq!(
        setting.undo("a", 1).await.unwrap().files,
        FilesCarried::Restored
    );
    for gone in ["get x", "file f"] {
        assert!(matches!(
            setting.ok("a", gone).await.status,
            Status::Raised(_)
        ));
    }
}

#[tokio::test]
async fn what_was_uploaded_before_the_first_cell_is_there_after_its_undo() {
    let setting = setting();
    setting.backend.keep_beginnings();
    setting.upload("a", "f", b"uploaded", false).await.unwrap();
    setting.ok("a", "keep f changed").await;
    setting.undo("a", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a", "file f").await), "uploaded\n");
}

#[tokio::test]
async fn a_reset_leaves_no_beginning_to_go_back_to() {
    let setting = setting();
    setting.backend.keep_beginnings();
    setting.ok("a", "keep f one").await;
    setting.reset("a").await.unwrap();
    setting.ok("a", "keep f two").await;
    setting.undo("a", 1).await.unwrap();
    assert_eq!(
        text(&setting.ok("a", "file f").await),
        "one\n",
        "files live through a reset"
    );
}

#[tokio::test]
async fn a_fork_can_go_back_to_its_beginning_without_a_copy_of_its_own() {
    let setting = setting();
    setting.ok("a", "set x 1\nkeep f one\nlose 1 thread").await;
    setting.at_rest("a").await;
    let report = setting.fork_named("a", &["b"]).await.unwrap();
    assert_eq!(report.lost, ["1 thread"]);
    let made = setting.backend.checkpoints_made();
    setting.ok("b", "set x 2\nkeep f two").await;
    assert_eq!(setting.backend.checkpoints_made(), made);
    let undone = setting.undo("b", 1).await.unwrap();
    assert_eq!(
        (undone.lost, undone.files),
        (vec![], FilesCarried::Restored),
        "the fork never had the thread"
    );
    assert_eq!(text(&setting.ok("b", "get x\nfile f").await), "1\none\n");
}

#[tokio::test]
async fn forks_are_made_of_the_copy_that_is_there_when_nothing_is_lacking_in_it() {
    let setting = setting();
    for (session, cell, copies) in [
        ("whole", "set x 1", 0),
        ("lacking", "set x 1\nlose 1 thread", 1),
    ] {
        setting.ok(session, cell).await;
        setting.at_rest(session).await;
        let made = setting.backend.checkpoints_made();
        let forks = setting.fork(session, 2).await.unwrap().forks;
        assert_eq!(
            setting.backend.checkpoints_made(),
            made + copies,
            "{session}"
        );
        for fork in forks {
            assert_eq!(text(&setting.ok(fork.as_str(), "get x").await), "1\n");
        }
        setting.upload(session, "f", b"new", false).await.unwrap();
        let fork = setting.fork(session, 1).await.unwrap().forks.remove(0);
        assert_eq!(
            text(&setting.ok(fork.as_str(), "file f").await),
            "new\n",
            "what changed since is in a fork"
        );
        // The copy still exists for an undo.
        setting.undo(session, 1).await.unwrap();
        assert!(matches!(
            setting.ok(session, "get x").await.status,
            Status::Raised(_)
        ));
    }
}

#[tokio::test]
async fn an_undo_that_fails_ends_the_session_and_may_be_tried_again() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2").await;
    setting.at_rest("a").await;
    setting.backend.set_copying(FakeCopying::NoReturn);
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::Launch(_))
    ));
    let refused = setting.refused("a", "get x").await;
    let words = refused.to_string();
    assert!(words.contains("could not be started again"), "{words}");
    assert_eq!(refused.remedies()[0], Remedy::Undo);
    setting.backend.set_copying(FakeCopying::Works);
    assert!(setting.undo("a", 1).await.unwrap().revived);
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn an_undo_does_not_come_between_a_file_and_its_answer() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2\nmute").await;
    let download = setting.download("a", "f", 1);
    tokio::pin!(download);
    assert!(futures_are_pending(&mut download).await);
    // By then the copying has been cancelled, and the file request runs.
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(matches!(
        setting.undo("a", 1).await,
        Err(Refused::Occupied { .. })
    ));
    download.await.expect_err("a mute interpreter is ended");
    assert!(
        setting.undo("a", 1).await.unwrap().revived,
        "the control: afterwards it works"
    );
}

/// A session whose copying hangs, with a cell that waits for it.
async fn stuck() -> (
    Setting,
    JoinHandle<Result<Outcome, Refused>>,
    CancellationToken,
) {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "stand").await;
    let cancel = CancellationToken::new();
    let (sessions, token) = (setting.sessions.clone(), cancel.clone());
    let waiting = tokio::spawn(async move {
        sessions
            .execute(&owner(), &id("a"), request("set x 2"), token)
            .await
    });
    tokio::task::yield_now().await;
    (setting, waiting, cancel)
}

#[tokio::test(start_paused = true)]
async fn a_session_that_says_it_cannot_be_copied_is_not_waited_for() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "decline").await;
    let before = Instant::now();
    let outcome = setting.ok("a", "get x").await;
    assert_eq!(text(&outcome), "1\n");
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("no copy today")),
        "{:?}",
        outcome.notes
    );
    let refused = setting.fork("a", 1).await.unwrap_err();
    assert!(
        matches!(&refused, Refused::CannotCopy { why, .. } if why == "no copy today"),
        "{refused}"
    );
    assert!(
        before.elapsed() < Duration::from_secs(1),
        "{:?}",
        before.elapsed()
    );
    // Control: a copy without a refusal is waited for.
    setting.reset("a").await.unwrap();
    setting.ok("a", "stand").await;
    setting.ok("a", "print x").await;
    assert!(
        before.elapsed() > Duration::from_secs(1),
        "{:?}",
        before.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_cell_that_waits_for_a_copy_is_cancelled_at_once() {
    let (setting, waiting, cancel) = stuck().await;
    let before = Instant::now();
    cancel.cancel();
    assert!(matches!(
        waiting.await.unwrap(),
        Err(Refused::CancelledWhileWaiting)
    ));
    assert_eq!(before.elapsed(), Duration::ZERO);
    let outcome = setting.ok("a", "get x").await;
    assert_eq!(text(&outcome), "1\n");
    assert!(
        outcome
            .notes
            .iter()
            .any(|note| note.text.contains("in time")),
        "{:?}",
        outcome.notes
    );
}

#[tokio::test(start_paused = true)]
async fn a_reset_and_a_close_act_at_once_while_a_copy_is_made() {
    let (setting, waiting, _) = stuck().await;
    let before = Instant::now();
    setting.reset("a").await.unwrap();
    assert!(matches!(
        waiting.await.unwrap(),
        Err(Refused::ResetWhileWaiting)
    ));
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert!(matches!(
        setting.ok("a", "get x").await.status,
        Status::Raised(_)
    ));

    let (setting, waiting, _) = stuck().await;
    let before = Instant::now();
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    assert!(matches!(
        waiting.await.unwrap(),
        Err(Refused::ClosedWhileWaiting)
    ));
    assert_eq!(
        (
            before.elapsed(),
            setting.backend.sandboxes(),
            setting.backend.checkpoints()
        ),
        (Duration::ZERO, 0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn an_undo_waits_for_the_copy_that_is_being_made_and_comes_before_later_cells() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a", "set x 2\nstand").await;
    let undo = setting.undo("a", 1);
    tokio::pin!(undo);
    assert!(futures_are_pending(&mut undo).await);
    let later = setting.run("a", "get x");
    let (undone, later) = tokio::join!(undo, later);
    assert_eq!(
        (undone.unwrap().undone, text(&later.unwrap())),
        (1, "1\n".to_owned())
    );

    setting.ok("a", "stand").await;
    let undo = setting.undo("a", 1);
    tokio::pin!(undo);
    assert!(futures_are_pending(&mut undo).await);
    setting.reset("a").await.unwrap();
    assert!(matches!(undo.await, Err(Refused::ResetWhileWaiting)));
}

#[tokio::test]
async fn forks_have_what_their_source_has_and_go_their_own_ways() {
    let setting = setting();
    setting.ok("a", "set x 1\nkeep f one").await;
    let report = setting.fork("a", 2).await.unwrap();
    assert_eq!(report.forks, [id("a-1"), id("a-2")]);
    assert_eq!((report.files, report.lost.len()), (FilesCarried::Copied, 0));
    setting.ok("a-1", "set x 2\nkeep f two").await;
    setting.ok("a", "set x 3").await;
    for (session, expected) in [("a", "3\none\n"), ("a-1", "2\ntwo\n"), ("a-2", "1\none\n")] {
        assert_eq!(text(&setting.ok(session, "get x\nfile f").await), expected);
    }
    assert_eq!(setting.backend.sandboxes(), 3);
}

#[tokio::test]
async fn a_fork_says_what_it_is_and_begins_its_own_past() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.fork_named("a", &["b"]).await.unwrap();
    let info = setting
        .sessions
        .list(&owner())
        .into_iter()
        .find(|info| info.id == id("b"))
        .unwrap();
    assert_eq!(info.executions, 0);
    assert_eq!(setting.undoable("b"), []);
    let outcome = setting.ok("b", "set x 2").await;
    assert_eq!(outcome.notes[0].text, "This session is a fork of `a`.");
    assert_eq!(outcome.notes.len(), 1);
    assert!(setting.ok("b", "get x").await.notes.is_empty());
    setting.undo("b", 2).await.unwrap();
    assert_eq!(text(&setting.ok("b", "get x").await), "1\n");
    setting.fork_named("b", &["c"]).await.unwrap();
    assert_eq!(
        text(&setting.ok("c", "get x").await),
        "1\n",
        "a fork of a fork"
    );
}

#[tokio::test]
async fn closing_or_killing_a_member_of_a_family_leaves_the_others_alive() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.fork("a", 3).await.unwrap();
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    setting.ok("a-1", "crash").await;
    setting.sessions.close(&owner(), &id("a-2")).await.unwrap();
    assert_eq!(text(&setting.ok("a-3", "get x").await), "1\n");
    setting.undo("a-1", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a-1", "get x").await), "1\n");
    setting.sessions.shut_down().await;
    assert_eq!(
        (setting.backend.sandboxes(), setting.backend.checkpoints()),
        (0, 0)
    );
}

#[tokio::test]
async fn a_shared_working_folder_is_shared_by_forks() {
    let settings = SessionSettings {
        work_folder: WorkFolder::Shared,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.ok("a", "set x 1").await;
    assert_eq!(
        setting.fork("a", 1).await.unwrap().files,
        FilesCarried::Shared
    );
}

#[tokio::test]
async fn forks_are_made_without_undo_too_and_their_copy_is_not_kept() {
    let setting = setting_with(FakeBackend::new(), without_undo());
    setting.ok("a", "set x 1").await;
    setting.fork("a", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a-1", "get x").await), "1\n");
    assert_eq!(
        (
            setting.backend.checkpoints_made(),
            setting.backend.checkpoints()
        ),
        (1, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn a_fork_is_refused_while_a_cell_runs() {
    let setting = setting();
    let running = setting
        .begin("a", "set x 1\nsleep 5", CancellationToken::new())
        .await;
    let refused = setting.fork("a", 1).await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a cell is running in `a`; wait for it or interrupt it, then fork"
    );
    assert_eq!(setting.names(), ["a"]);
    running.await.unwrap().unwrap();
    setting
        .fork("a", 1)
        .await
        .expect("the control: afterwards it works");
}

#[tokio::test]
async fn names_of_forks_are_free_and_none_is_taken_twice() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a-2", "set x 1").await;
    assert_eq!(
        setting.fork("a", 2).await.unwrap().forks,
        [id("a-1"), id("a-3")]
    );
    let long = "x".repeat(64);
    setting.ok(&long, "set x 1").await;
    assert_eq!(
        setting.fork(&long, 1).await.unwrap().forks,
        [id(&format!("{}-1", "x".repeat(62)))]
    );
    let before = setting.names();
    assert!(matches!(
        setting.fork_named("a", &["b", "a"]).await,
        Err(Refused::NameTaken { .. })
    ));
    assert!(matches!(
        setting.fork_named("a", &["b", "b"]).await,
        Err(Refused::NameTaken { .. })
    ));
    assert!(matches!(
        setting.fork_named("a", &[]).await,
        Err(Refused::ForkCount { count: 0 })
    ));
    assert!(matches!(
        setting.fork("a", 17).await,
        Err(Refused::ForkCount { count: 17 })
    ));
    assert!(matches!(
        setting.fork("unknown", 1).await,
        Err(Refused::Unknown { .. })
    ));
    assert_eq!(setting.names(), before);
    setting
        .fork_named("a", &["b", "c"])
        .await
        .expect("the control: free names are given");
}

#[tokio::test]
async fn forks_count_as_sessions() {
    let settings = SessionSettings {
        max_sessions: 3,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.ok("a", "set x 1").await;
    assert!(matches!(
        setting.fork("a", 3).await,
        Err(Refused::TooManySessions { limit: 3, .. })
    ));
    setting.fork("a", 2).await.unwrap();
    assert!(matches!(
        setting.fork("a", 1).await,
        Err(Refused::TooManySessions { .. })
    ));
}

#[tokio::test]
async fn when_one_fork_cannot_be_made_none_is() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.backend.set_copying(FakeCopying::Forks(2));
    let refused = setting.fork("a", 3).await.unwrap_err();
    assert!(
        matches!(&refused, Refused::CannotCopy { why, .. } if why.contains("no room")),
        "{refused}"
    );
    assert_eq!(
        (setting.names(), setting.backend.sandboxes()),
        (vec!["a".to_owned()], 1)
    );
    setting.backend.set_copying(FakeCopying::Fails);
    setting
        .upload("a", "f", b"so that there is no copy yet", false)
        .await
        .unwrap();
    assert!(matches!(
        setting.fork("a", 1).await,
        Err(Refused::CannotCopy { .. })
    ));
    setting.backend.set_copying(FakeCopying::Works);
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
    setting
        .fork("a", 3)
        .await
        .expect("the control: with room they are made");
}

#[tokio::test(start_paused = true)]
async fn a_fork_that_nobody_waits_for_any_more_leaves_nothing() {
    let (setting, waiting, cancel) = stuck().await;
    cancel.cancel();
    let _ = waiting.await;
    {
        let fork = setting.fork("a", 2);
        tokio::pin!(fork);
        assert!(futures_are_pending(&mut fork).await);
        assert_eq!(setting.names(), ["a", "a-1", "a-2"]);
    }
    setting.at_rest("a").await;
    assert_eq!(
        (setting.names(), setting.backend.sandboxes()),
        (vec!["a".to_owned()], 1)
    );
}

#[tokio::test(start_paused = true)]
async fn a_reset_of_the_source_ends_a_fork_that_is_being_made() {
    let (setting, waiting, cancel) = stuck().await;
    cancel.cancel();
    let _ = waiting.await;
    setting.at_rest("a").await;
    let fork = setting.fork("a", 2);
    tokio::pin!(fork);
    assert!(futures_are_pending(&mut fork).await);
    let before = Instant::now();
    let (fork, reset) = tokio::join!(fork, setting.reset("a"));
    assert!(matches!(fork, Err(Refused::ResetWhileWaiting)) && reset.is_ok());
    assert_eq!(
        (
            before.elapsed(),
            setting.names(),
            setting.backend.sandboxes()
        ),
        (Duration::ZERO, vec!["a".to_owned()], 1)
    );
}

#[tokio::test]
async fn two_forks_of_one_session_wait_for_each_other() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let (first, second) = tokio::join!(setting.fork("a", 2), setting.fork("a", 2));
    assert_eq!(
        (first.unwrap().forks.len(), second.unwrap().forks.len()),
        (2, 2)
    );
    assert_eq!(setting.names(), ["a", "a-1", "a-2", "a-3", "a-4"]);
}

#[tokio::test]
async fn an_exploration_compares_variants_and_keeps_nothing_by_itself() {
    let setting = setting();
    setting.ok("a", "set x 1\nkeep f one\nlose 1 thread").await;
    let variants = [
        ("good", "get x\nset x 2\nkeep f two"),
        ("bad", "raise broken"),
        ("dead", "print last\noom"),
    ];
    let report = setting
        .explore("a", exploration(&variants, Keep::Nothing))
        .await
        .unwrap();
    let [good, bad, dead] = &report.variants[..] else {
        panic!("{report:?}")
    };
    let good = good.ended.as_ref().unwrap();
    assert_eq!(
        (good.status.clone(), text(good)),
        (Status::Completed, "1\n".to_owned())
    );
    assert!(good.notes.is_empty());
    assert!(matches!(
        bad.ended.as_ref().unwrap().status,
        Status::Raised(_)
    ));
    assert!(matches!(
        dead.ended.as_ref().unwrap().status,
        Status::Died {
            exit: Exit::OutOfMemory { .. }
        }
    ));
    assert_eq!(
        (&report.kept[..], report.replaced, &report.lost[..]),
        (&[][..], false, &["1 thread".to_owned()][..])
    );
    assert_eq!(text(&setting.ok("a", "get x\nfile f").await), "1\none\n");
    assert_eq!(
        (setting.names(), setting.backend.sandboxes()),
        (vec!["a".to_owned()], 1)
    );
}

#[tokio::test(start_paused = true)]
async fn so_many_variants_run_at_the_same_time_as_the_settings_say() {
    let settings = SessionSettings {
        explore_parallel: 3,
        max_sessions: 1,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.ok("a", "set x 1").await;
    let names = (0..7)
        .map(|number| format!("v{number}"))
        .collect::<Vec<_>>();
    let variants = names
        .iter()
        .map(|name| (name.as_str(), "sleep 4\nget x"))
        .collect::<Vec<_>>();
    let (progress, mut told) = watch::channel(String::new());
    let before = Instant::now();
    let request = exploration(&variants, Keep::Nothing);
    let report = setting
        .sessions
        .explore(
            &owner(),
            &id("a"),
            request,
            CancellationToken::new(),
            progress,
        )
        .await
        .unwrap();
    assert!(
        report
            .variants
            .iter()
            .all(|variant| variant.ended.as_ref().unwrap().status == Status::Completed)
    );
    assert_eq!(before.elapsed().as_secs(), 12, "three, three and one");
    assert_eq!(*told.borrow_and_update(), "7 of 7 variants finished");
}

#[tokio::test(start_paused = true)]
async fn the_source_is_free_while_its_variants_run() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let exploring = setting
        .begin_exploring(
            "a",
            exploration(&[("v", "sleep 5\nget x")], Keep::Nothing),
            CancellationToken::new(),
        )
        .await;
    assert_eq!(setting.ok("a", "set x 2").await.status, Status::Completed);
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    let report = exploring.await.unwrap().unwrap();
    assert_eq!(
        text(report.variants[0].ended.as_ref().unwrap()),
        "1\n",
        "the end of the source does not end it"
    );
    assert_eq!(setting.backend.sandboxes(), 0);
}

#[tokio::test]
async fn kept_variants_become_sessions() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    setting.ok("a-one", "print taken").await;
    let variants = [("one", "set x 11"), ("t w", "set x 12"), ("dead", "crash")];
    let report = setting
        .explore("a", exploration(&variants, Keep::All))
        .await
        .unwrap();
    assert_eq!(kept(&report), [("one", "a-one-2"), ("t w", "a-t-w")]);
    assert!(report.notes[0].contains("`dead`"), "{:?}", report.notes);
    let outcome = setting.ok("a-one-2", "get x").await;
    assert_eq!((text(&outcome).as_str(), outcome.notes.len()), ("11\n", 1));
    assert!(
        outcome.notes[0].text.contains("variant `one`"),
        "{:?}",
        outcome.notes
    );
    let execution = report.variants[1].ended.as_ref().unwrap().execution;
    assert!(
        setting
            .sessions
            .full_output(&owner(), &id("a-t-w"), execution.into())
            .is_some()
    );
    assert_eq!(setting.backend.sandboxes(), 4);

    let report = setting
        .explore("a", exploration(&variants, Keep::Named("t w".to_owned())))
        .await
        .unwrap();
    assert_eq!(
        (kept(&report), setting.backend.sandboxes()),
        (vec![("t w", "a-t-w-2")], 5)
    );
    setting.ok("a-t-w-2", "set x 13").await;
    setting.undo("a-t-w-2", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a-t-w-2", "get x").await), "12\n");
}

#[tokio::test]
async fn the_best_variant_is_the_one_with_the_largest_value() {
    let setting = setting();
    setting.ok("a", "set score 0").await;
    let variants = [
        ("low", "set score 1.5"),
        ("high", "set score 20"),
        ("text", "set score many"),
        ("raises", "raise broken"),
        ("nan", "set score nan"),
        ("equal", "set score 20"),
    ];
    let report = setting
        .explore("a", exploration(&variants, by("score")))
        .await
        .unwrap();
    assert_eq!(kept(&report), [("high", "a-high")]);
    let scores = report
        .variants
        .iter()
        .map(|variant| variant.score.clone().unwrap())
        .collect::<Vec<_>>();
    assert_eq!((&scores[0], &scores[1]), (&Ok(1.5), &Ok(20.0)));
    let [.., Err(text), Err(raises), Err(nan), Ok(_)] = &scores[..] else {
        panic!("{scores:?}")
    };
    assert!(
        text.contains("ValueError") && raises.contains("did not complete") && nan.contains("nan"),
        "{scores:?}"
    );
    assert_eq!(setting.backend.sandboxes(), 2);

    let report = setting
        .explore("a", exploration(&variants, by("absent")))
        .await
        .unwrap();
    assert!(
        report.kept.is_empty() && report.notes[0].contains("none is kept"),
        "{:?}",
        report.notes
    );
}

#[tokio::test]
async fn the_kept_variant_can_take_the_place_of_the_source() {
    let setting = setting();
    setting.ok("a", "set score 0\nkeep f zero").await;
    let variants = [("low", "set score 1"), ("high", "set score 2\nkeep f two")];
    let request = ExploreRequest {
        replace: true,
        ..exploration(&variants, by("score"))
    };
    let report = setting.explore("a", request).await.unwrap();
    assert_eq!(
        (kept(&report), report.replaced),
        (vec![("high", "a")], true)
    );
    assert_eq!(
        (setting.names(), setting.backend.sandboxes()),
        (vec!["a".to_owned()], 1)
    );
    let outcome = setting.ok("a", "get score\nfile f").await;
    assert_eq!(text(&outcome), "2\ntwo\n");
    assert!(
        outcome.notes[0].text.contains("variant `high`"),
        "{:?}",
        outcome.notes
    );
    assert_eq!(setting.undoable("a").len(), 1);
    setting.ok("a", "set score 3").await;
    setting.undo("a", 1).await.unwrap();
    assert_eq!(text(&setting.ok("a", "get score").await), "2\n");
    setting.reset("a").await.unwrap();
    assert_eq!(text(&setting.ok("a", "file f").await), "two\n");
}

#[tokio::test(start_paused = true)]
async fn a_source_that_is_in_use_is_not_replaced() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let named = Keep::Named("v".to_owned());
    let request = ExploreRequest {
        replace: true,
        ..exploration(&[("v", "set x 2\nsleep 5")], named)
    };
    let exploring = setting
        .begin_exploring("a", request, CancellationToken::new())
        .await;
    let running = setting
        .begin("a", "sleep 9", CancellationToken::new())
        .await;
    let report = exploring.await.unwrap().unwrap();
    assert_eq!(
        (kept(&report), report.replaced),
        (vec![("v", "a-v")], false)
    );
    assert!(report.notes[0].contains("in use"), "{:?}", report.notes);
    assert_eq!(running.await.unwrap().unwrap().status, Status::Completed);
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
    assert_eq!(text(&setting.ok("a-v", "get x").await), "2\n");
}

#[tokio::test(start_paused = true)]
async fn cancelling_an_exploration_ends_its_variants_and_keeps_nothing() {
    let settings = SessionSettings {
        explore_parallel: 1,
        ..SessionSettings::default()
    };
    let setting = setting_with(FakeBackend::new(), settings);
    setting.ok("a", "set x 1").await;
    let variants = [("first", "sleep 9"), ("second", "sleep 9")];
    let cancel = CancellationToken::new();
    let exploring = setting
        .begin_exploring("a", exploration(&variants, Keep::All), cancel.clone())
        .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = Instant::now();
    cancel.cancel();
    let report = exploring.await.unwrap().unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(
        report.variants[0].ended.as_ref().unwrap().status,
        Status::Cancelled {
            state: StateAfter::Kept
        }
    );
    assert!(matches!(
        report.variants[1].ended,
        Err(Refused::CancelledWhileWaiting)
    ));
    assert!(
        report.kept.is_empty() && report.notes[0].contains("cancelled"),
        "{:?}",
        report.notes
    );
    assert_eq!(
        (setting.names(), setting.backend.sandboxes()),
        (vec!["a".to_owned()], 1)
    );
    let refused = setting.explore_with("a", exploration(&variants, Keep::All), cancel);
    assert!(matches!(refused.await, Err(Refused::CancelledWhileWaiting)));
}

#[tokio::test(start_paused = true)]
async fn an_exploration_is_cancelled_at_once_while_its_forks_are_made() {
    let (setting, waiting, cancel_waiting) = stuck().await;
    cancel_waiting.cancel();
    let _ = waiting.await;
    setting.at_rest("a").await;
    let cancel = CancellationToken::new();
    let exploring = setting.explore_with(
        "a",
        exploration(&[("v", "set x 2")], Keep::All),
        cancel.clone(),
    );
    tokio::pin!(exploring);
    assert!(futures_are_pending(&mut exploring).await);
    let before = Instant::now();
    cancel.cancel();
    assert!(matches!(
        exploring.await,
        Err(Refused::CancelledWhileWaiting)
    ));
    assert_eq!(
        (before.elapsed(), setting.backend.sandboxes()),
        (Duration::ZERO, 1)
    );
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn an_exploration_that_nobody_waits_for_any_more_leaves_nothing() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let variants = [
        ("first", "ignore-interrupt"),
        ("second", "ignore-interrupt"),
    ];
    let exploring = setting
        .begin_exploring(
            "a",
            exploration(&variants, Keep::All),
            CancellationToken::new(),
        )
        .await;
    exploring.abort();
    assert!(exploring.await.unwrap_err().is_cancelled());
    setting.wait_for_sandboxes(1).await;
    assert_eq!(text(&setting.ok("a", "get x").await), "1\n");
}

#[tokio::test(start_paused = true)]
async fn shutting_down_ends_an_exploration() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let request = exploration(
        &[("quick", "print x"), ("endless", "ignore-interrupt")],
        Keep::All,
    );
    let (progress, mut told) = watch::channel(String::new());
    let sessions = setting.sessions.clone();
    let exploring = tokio::spawn(async move {
        sessions
            .explore(
                &owner(),
                &id("a"),
                request,
                CancellationToken::new(),
                progress,
            )
            .await
    });
    told.wait_for(|news| news.starts_with("1 of"))
        .await
        .unwrap();
    setting.sessions.shut_down().await;
    assert_eq!(setting.backend.sandboxes(), 0);
    let report = exploring.await.unwrap().unwrap();
    assert_eq!(
        report.variants[1].ended.as_ref().unwrap().status,
        Status::Closed
    );
    assert!(report.kept.is_empty());
}

#[tokio::test(start_paused = true)]
async fn shutting_down_ends_an_exploration_whose_forks_are_just_made() {
    let setting = setting();
    setting.ok("a", "set x 1").await;
    let variants = [
        ("first", "ignore-interrupt"),
        ("second", "ignore-interrupt"),
    ];
    let exploring = setting
        .begin_exploring(
            "a",
            exploration(&variants, Keep::All),
            CancellationToken::new(),
        )
        .await;
    setting.sessions.shut_down().await;
    setting.wait_for_sandboxes(0).await;
    assert!(
        exploring
            .await
            .unwrap()
            .map_or(true, |report| report.kept.is_empty())
    );
}

#[tokio::test]
async fn an_exploration_that_makes_no_sense_is_refused() {
    let setting = setting_with(
        FakeBackend::new(),
        SessionSettings {
            max_sessions: 2,
            ..SessionSettings::default()
        },
    );
    setting.ok("a", "set x 1").await;
    let two = [("v", "print 1"), ("w", "print 2")];
    let many = vec![("v", ""); 17];
    let replacing = |keep: Keep| ExploreRequest {
        replace: true,
        ..exploration(&two, keep)
    };
    let cases = [
        (exploration(&[], Keep::Nothing), "between 1 and 16"),
        (exploration(&many, Keep::Nothing), "between 1 and 16"),
        (
            exploration(&[("v", ""), ("v", "")], Keep::Nothing),
            "two variants",
        ),
        (
            exploration(&two, Keep::Named("x".to_owned())),
            "no variant is called so",
        ),
        (exploration(&two, by(" ")), "empty"),
        (replacing(Keep::All), "only one variant"),
        (replacing(Keep::Nothing), "only one variant"),
        (exploration(&two, Keep::All), "no more are allowed"),
    ];
    for (request, words) in cases {
        let refused = setting.explore("a", request).await.unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    assert!(matches!(
        setting.explore("b", exploration(&two, Keep::Nothing)).await,
        Err(Refused::Unknown { .. })
    ));
    assert_eq!(setting.backend.sandboxes(), 1);
    setting
        .explore("a", exploration(&two, Keep::Nothing))
        .await
        .expect("the control: forks do not count as sessions");
    setting
        .explore("a", exploration(&two, Keep::Named("v".to_owned())))
        .await
        .expect("the control: one may be kept");
}

#[tokio::test]
async fn hundreds_of_branches_leave_nothing() {
    let setting = setting();
    for number in 0..200 {
        setting.ok("a", &format!("set x {number}")).await;
        let fork = setting.fork("a", 1).await.unwrap().forks.remove(0);
        setting.sessions.close(&owner(), &fork).await.unwrap();
    }
    setting.at_rest("a").await;
    assert_eq!(
        (setting.backend.sandboxes(), setting.backend.checkpoints()),
        (1, 11)
    );
}
