//! A server that dies while sessions live.

use serde_json::{Value, json};

use super::client::Raw;
use crate::support::service::Service;

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"]), ("bob", &["python:execute"])];

fn status(result: &Value) -> &str {
    result["structuredContent"]["status"]
        .as_str()
        .unwrap_or_default()
}

/// Whether a cell has not ended: it runs, or waits until Python is warm.
fn goes_on(result: &Value) -> bool {
    ["running", "waiting"].contains(&status(result))
}

#[tokio::test]
async fn sessions_and_running_cells_survive_the_death_of_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let start = || Service::with_keys(folder.path(), CALLERS, &["--max-wait", "1s"]);
    let service = start();
    let mut alice = Raw::with_key(&service, "alice").await;
    let cell = "import os, time\nx = 41\nprint('begun', flush=True)\nwhile not \
                os.path.exists('go'): time.sleep(0.01)\nx + 1";
    let answer = alice
        .result(
            "execute_ipython_cell",
            json!({"code": cell, "session_id": "a"}),
        )
        .await;
    assert!(goes_on(&answer), "{answer}");
    let mut told = answer["structuredContent"]["text"]
        .as_str()
        .unwrap()
        .to_owned();
    // Python may have taken longer than a call waits.
    while !told.contains("begun\n") {
        let answer = alice
            .result("check_execution", json!({"session_id": "a", "wait": 1}))
            .await;
        assert!(goes_on(&answer), "{answer}");
        told = answer["structuredContent"]["text"]
            .as_str()
            .unwrap()
            .to_owned();
    }
    let _daemon = service.kill();

    let service = start();
    let mut bob = Raw::with_key(&service, "bob").await;
    let his = bob
        .result("check_execution", json!({"session_id": "a", "wait": 0}))
        .await;
    assert_eq!(his["isError"], true, "it is not his: {his}");
    let mut alice = Raw::with_key(&service, "alice").await;
    let still = alice
        .result("check_execution", json!({"session_id": "a", "wait": 0}))
        .await;
    assert_eq!(status(&still), "running", "{still}");
    // A file goes in beside the running cell only by the cell's own hand, so another session cannot
    // let it go on: it is interrupted.
    let ended = alice
        .result(
            "check_execution",
            json!({"session_id": "a", "interrupt": true}),
        )
        .await;
    assert_eq!(status(&ended), "cancelled", "{ended}");
    let kept = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "x", "session_id": "a"}),
        )
        .await;
    assert_eq!(kept["structuredContent"]["text"], "41");
}
