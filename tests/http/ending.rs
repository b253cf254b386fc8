//! A server that is asked to end while a cell runs, and takes its sessions along.

use serde_json::json;

use super::client::Raw;
use crate::support::service::{SESSIONS_INSIDE, Service};

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

#[tokio::test]
async fn a_server_that_takes_its_sessions_along_promises_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, SESSIONS_INSIDE);
    let mut alice = Raw::with_key(&service, "alice").await;
    alice
        .result(
            "execute_ipython_cell",
            json!({"code": "x = 1", "session_id": "a"}),
        )
        .await;
    let cell = "print('begun', flush=True)\nimport time\ntime.sleep(60)";
    alice
        .call(
            "execute_ipython_cell",
            json!({"code": cell, "session_id": "a"}),
        )
        .await;
    // It runs when another call is told so.
    let mut other = Raw::with_key(&service, "alice").await;
    loop {
        let list = other.result("list_sessions", json!({})).await.to_string();
        if list.contains("running") {
            break;
        }
    }
    let ending = tokio::task::spawn_blocking(move || service.finish());
    let answer = alice.answer().await;
    assert!(
        answer
            .body
            .contains("the server is ending, and this session with it"),
        "{answer:?}"
    );
    assert!(!answer.body.contains("goes on"), "{answer:?}");
    ending.await.unwrap();
}
