//! Questions whose client or server ends before the answer.

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{ECHO, Scene, register, started};
use crate::http::client::Raw;
use crate::support::ends_within;
use crate::support::server::{MINIMAL, TEST_TIMEOUT, finished, program};
use crate::support::service::Service;

#[test]
fn a_question_of_a_killed_server_is_asked_by_the_next_one_and_nothing_runs_twice() {
    let scene = Scene::new();
    let daemon = format!("a{}", std::process::id());
    let start = || {
        let mut command = scene.program();
        command
            .args([
                "mcp",
                "--keep-sessions",
                "on",
                "--daemon-name",
                &daemon,
                "--approve-tools",
                "ask",
            ])
            .args(MINIMAL);
        started(&mut command)
    };
    let first = start();
    register(&first, scene.notes("first"));
    let code = format!("runs = globals().get('runs', 0) + 1\n{ECHO}\nprint('ran', runs)");
    drop(first.begin(
        "execute_ipython_cell",
        json!({"code": code, "session_id": "a"}),
    ));
    let words = first.form().text().to_owned();
    kill_process(
        Pid::from_raw(first.process_id() as i32).unwrap(),
        Signal::KILL,
    )
    .unwrap();
    first.ended();
    assert_eq!(scene.echoes(), 0);

    let second = start();
    let checked = second.begin("check_execution", json!({"session_id": "a", "wait": 30}));
    let form = second.form();
    assert_eq!(form.text(), words, "the same question");
    form.decide("once");
    let told = checked.result();
    assert!(
        told.text().contains("first: x") && told.text().contains("ran 1"),
        "{}",
        told.text()
    );
    let after = second.call(
        "execute_ipython_cell",
        json!({"code": "runs", "session_id": "a"}),
    );
    assert_eq!((after.text(), scene.echoes(), second.forms()), ("1", 1, 0));
    second.finish();
    let (ended, _, errors) = finished(program().args(["daemon", "stop", "--now", &daemon]));
    assert_eq!(ended, Some(0), "{errors}");
}

#[tokio::test]
async fn a_question_of_a_killed_service_is_answered_at_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--approve-shell", "ask", "--max-wait", "20s"];
    let start = || Service::with_keys(folder.path(), &[("alice", &["python:execute"])], &flags);
    let service = start();
    let mut alice = Raw::with_key(&service, "alice").await;
    let cell = json!({"code": "runs = globals().get('runs', 0) + 1\n!echo said \
                               {runs}", "session_id": "a"});
    let asked = alice
        .result_with_a_person("execute_ipython_cell", cell.clone(), json!({}))
        .await;
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let _daemon = service.kill();

    let service = start();
    let mut alice = Raw::with_key(&service, "alice").await;
    // Whoever looks is shown the question again.
    let check = json!({"session_id": "a", "wait": 0});
    let shown = alice
        .result_with_a_person("check_execution", check, json!({}))
        .await;
    assert_eq!(shown["inputRequests"], asked["inputRequests"], "{shown}");
    // And the answer to the first form counts too: the state that its server sealed is good at the
    // next one.
    let key = asked["inputRequests"]
        .as_object()
        .unwrap()
        .keys()
        .next()
        .unwrap()
        .clone();
    let answer = json!({"action": "accept", "content": {"decision": "once"}});
    let more = json!({"inputResponses": {key: answer}, "requestState": asked["requestState"]});
    let told = alice
        .result_with_a_person("execute_ipython_cell", cell, more)
        .await;
    assert!(
        told["content"][0]["text"]
            .as_str()
            .unwrap_or_default()
            .contains("said 1"),
        "{told}"
    );
    let after = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "runs", "session_id": "a"}),
        )
        .await;
    assert_eq!(after["content"][0]["text"], "1", "it ran once");
}

/// Every process below another one, by its command.
fn family(of: u32) -> Vec<u32> {
    let mut found = vec![of];
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        next += 1;
        for thread in fs::read_dir(format!("/proc/{parent}/task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(
                children
                    .split_whitespace()
                    .filter_map(|id| id.parse::<u32>().ok()),
            );
        }
    }
    found.split_off(1)
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_question_leaves_nothing_behind() {
    let scene = Scene::new();
    let server = scene.server(&["--approve-tools", "ask"]);
    register(&server, scene.notes("first"));
    drop(server.begin(
        "execute_ipython_cell",
        json!({"code": ECHO, "session_id": "a"}),
    ));
    let _unanswered = server.form();
    let handles: Vec<_> = family(server.process_id())
        .into_iter()
        .filter_map(|id| {
            rustix::process::pidfd_open(
                Pid::from_raw(id as i32)?,
                rustix::process::PidfdFlags::empty(),
            )
            .ok()
        })
        .collect();
    assert!(
        handles.len() > 3,
        "guardian, warden, interpreters, the other server"
    );
    server.close_input();
    assert!(server.ended().success());
    assert!(
        handles
            .iter()
            .all(|handle| ends_within(handle, TEST_TIMEOUT)),
        "a process goes on"
    );
    assert_eq!(scene.echoes(), 0, "what nobody allowed was not done");
}
