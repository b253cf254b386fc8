//! Tests of shell commands in sessions, with the fake backend and a paused clock.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, request, setting_with, text, without_undo};
use crate::approval::{Defaults, Effect, Policy};
use crate::sandbox::fake::FakeBackend;
use crate::session::*;

fn allowing() -> Setting {
    setting_with(FakeBackend::new(), without_undo())
}

fn denying() -> Setting {
    let policy = Policy::new(Defaults {
        shell: Effect::Deny,
        ..Defaults::default()
    });
    let approvals = Approvals {
        policy: Arc::new(policy),
        ..Approvals::default()
    }
    .into();
    setting_with(
        FakeBackend::new(),
        SessionSettings {
            approvals,
            ..without_undo()
        },
    )
}

/// Returns the answer that a cell printed last.
fn answer(outcome: &Outcome) -> Value {
    let text = text(outcome);
    serde_json::from_str(
        text.lines()
            .rfind(|line| line.starts_with('{'))
            .expect("an answer"),
    )
    .expect("JSON")
}

impl Setting {
    /// Waits until `count` programs are alive.
    async fn until_alive(&self, count: usize) {
        while self.backend.programs() != count {
            // Time on the paused clock passes meanwhile.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_runs_from_the_words_that_were_asked_for_and_its_output_is_the_cells() {
    let setting = allowing();
    let outcome = setting.ok("a", r"run echo out\ncomplain err\nexit 3").await;
    let (printed, told) = (text(&outcome), answer(&outcome));
    assert!(
        printed.starts_with("out\n") && printed.contains("err\n"),
        "{printed}"
    );
    assert_eq!((&told["ok"], &told["code"]), (&json!(true), &json!(3)));
    assert_eq!(
        setting.backend.launched(),
        [["/bin/bash", "-c", "echo out\ncomplain err\nexit 3"]]
    );
}

#[tokio::test(start_paused = true)]
async fn words_input_folder_and_variables_are_handed_on_whole() {
    let setting = allowing();
    let question = json!({
        "what": "shell", "words": ["perl", "-w", "cat\nvariable A\nvariable B"],
        "stdin": "read\n", "folder": "/tmp",
        "environment": {"A": "1", "B": null}, "with_pipes": true,
    });
    let outcome = setting.ok("a", &format!("ask {question}")).await;
    assert!(
        text(&outcome).starts_with("read\nSome(Some(\"1\"))\nSome(None)\n"),
        "{}",
        text(&outcome)
    );
    assert_eq!(answer(&outcome)["code"], 0);
    assert_eq!(
        setting.backend.launched(),
        [["perl", "-w", "cat\nvariable A\nvariable B"]]
    );
}

#[tokio::test(start_paused = true)]
async fn a_denied_command_is_not_launched() {
    let setting = denying();
    let told = answer(&setting.ok("a", "run echo out").await);
    assert_eq!(
        (&told["ok"], &told["reason"]),
        (&json!(false), &json!("denied"))
    );
    assert!(
        told["text"]
            .as_str()
            .unwrap()
            .contains("`approve_shell: deny`"),
        "{told}"
    );
    assert!(setting.backend.launched().is_empty());
}

#[tokio::test(start_paused = true)]
async fn commands_that_cannot_run_say_so() {
    let setting = allowing();
    let shell = |members: Value| {
        let mut question =
            json!({"what": "shell", "folder": "/", "environment": {}, "with_pipes": true});
        question
            .as_object_mut()
            .unwrap()
            .extend(members.as_object().cloned().unwrap());
        format!("ask {question}")
    };
    for (members, reason) in [
        (json!({"words": ["nothing"]}), "missing"),
        (json!({"words": []}), "invalid"),
        (json!({"command": "echo a\0b"}), "invalid"),
        (json!({"command": "x".repeat(100_001)}), "invalid"),
        (json!({"command": "echo x", "with_pipes": false}), "invalid"),
        (json!({"command": "sleep 100", "timeout": 2.0}), "timeout"),
    ] {
        let told = answer(&setting.ok("a", &shell(members.clone())).await);
        assert_eq!(
            (&told["ok"], told["reason"].as_str()),
            (&json!(false), Some(reason)),
            "{members}"
        );
        assert!(!told["text"].as_str().unwrap().is_empty());
    }
    // Control.
    let told = answer(
        &setting
            .ok("a", &shell(json!({"command": "echo x", "timeout": 2.0})))
            .await,
    );
    assert_eq!((&told["ok"], &told["code"]), (&json!(true), &json!(0)));
    setting.until_alive(0).await;
}

#[tokio::test(start_paused = true)]
async fn only_so_many_commands_are_under_way() {
    let setting = allowing();
    let code = "run-on sleep 1\n".repeat(16) + "run echo one more";
    let told = answer(&setting.ok("a", &code).await);
    assert_eq!(told["reason"], "budget");
    assert_eq!(setting.backend.launched().len(), 16);
    // The next cell starts afresh.
    assert_eq!(answer(&setting.ok("a", "run echo x").await)["code"], 0);
}

#[tokio::test(start_paused = true)]
async fn a_command_that_nobody_waits_for_is_interrupted_and_then_ended() {
    let setting = allowing();
    for (command, patience) in [("run sleep 1000", 0), ("run stubborn", 300)] {
        let mut slow = request(command);
        slow.timeout = Duration::from_secs(1);
        let outcome = setting
            .sessions
            .execute(&owner(), &id("a"), slow, CancellationToken::new())
            .await
            .unwrap();
        assert!(
            matches!(
                outcome.status,
                Status::TimedOut {
                    state: StateAfter::Kept,
                    ..
                }
            ),
            "{:?}",
            outcome.status
        );
        let begun = Instant::now();
        setting.until_alive(0).await;
        let took = begun.elapsed().as_millis();
        assert!(
            (patience..patience + 100).contains(&took),
            "{command}: {took} ms"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_ends_with_its_cell_its_interpreter_and_its_session() {
    let setting = allowing();
    setting.ok("a", "run-on stubborn").await;
    setting.until_alive(0).await;
    let cell = setting
        .begin("a", "run stubborn", CancellationToken::new())
        .await;
    setting.until_alive(1).await;
    setting.sessions.reset(&owner(), &id("a")).await.unwrap();
    assert_eq!(cell.await.unwrap().unwrap().status, Status::Reset);
    setting.until_alive(0).await;
    let cell = setting
        .begin("a", "run stubborn", CancellationToken::new())
        .await;
    setting.until_alive(1).await;
    setting.sessions.close(&owner(), &id("a")).await.unwrap();
    assert_eq!(cell.await.unwrap().unwrap().status, Status::Closed);
    setting.until_alive(0).await;
}
