//! Servers that die while sessions in containers live, and daemons that die with them.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::http::client::Raw;
use crate::support::containers::{self, IMAGE};
use crate::support::service::Service;
use crate::support::signal;

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

fn status(result: &Value) -> &str {
    result["structuredContent"]["status"]
        .as_str()
        .unwrap_or_default()
}

/// Follows a cell until it is told to be so. Its container may still be starting.
async fn becomes(wanted: &str, mut told: Value, caller: &mut Raw) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    while status(&told) != wanted {
        assert!(
            ["waiting", "running"].contains(&status(&told)) && Instant::now() < deadline,
            "{told}"
        );
        told = caller
            .result("check_execution", json!({"session_id": "a"}))
            .await;
    }
    told
}

#[tokio::test]
async fn sessions_in_containers_survive_their_server_and_end_with_their_daemon() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let address = engine.address.to_string();
    let arguments = [
        "--max-wait",
        "1s",
        "--backend",
        "docker",
        "--container-tag",
        IMAGE,
    ];
    let start = || {
        Service::with_keys_and(
            folder.path(),
            CALLERS,
            &arguments,
            &[("DOCKER_HOST", &address)],
        )
    };
    let service = start();
    let mut alice = Raw::with_key(&service, "alice").await;
    let call = |code: &str| json!({"code": code, "session_id": "a"});
    let begun = alice
        .result(
            "execute_ipython_cell",
            call("import os, time; x = 41; os.readlink('/proc/self/ns/pid')"),
        )
        .await;
    let begun = becomes("ok", begun, &mut alice).await;
    let namespace = last_line(&begun).trim_matches('\'').to_owned();
    let running = alice
        .result(
            "execute_ipython_cell",
            call("y = x + 1\nwhile True: time.sleep(0.01)"),
        )
        .await;
    becomes("running", running, &mut alice).await;
    let _daemon = service.kill();

    let service = start();
    let mut alice = Raw::with_key(&service, "alice").await;
    let goes_on = alice
        .result("check_execution", json!({"session_id": "a", "wait": 0}))
        .await;
    assert_eq!(status(&goes_on), "running", "{goes_on}");
    let ended = alice
        .result(
            "check_execution",
            json!({"session_id": "a", "interrupt": true}),
        )
        .await;
    becomes("cancelled", ended, &mut alice).await;
    let kept = alice.result("execute_ipython_cell", call("(x, y)")).await;
    let kept = becomes("ok", kept, &mut alice).await;
    assert_eq!(last_line(&kept), "(41, 42)");

    let daemon = service.daemon_process();
    let container = container_of(engine, &namespace).expect("it lives"); // control
    signal(daemon, Signal::KILL);
    let _daemon = service.kill();
    let deadline = Instant::now() + Duration::from_secs(30);
    while engine.containers().contains(&container) {
        assert!(Instant::now() < deadline, "the container is still there");
    }
    assert_eq!(container_of(engine, &namespace), None);
}

/// The value of a cell. `check_execution` says before it which execution it is.
fn last_line(result: &Value) -> &str {
    result["structuredContent"]["text"]
        .as_str()
        .and_then(|text| text.lines().last())
        .unwrap_or_default()
}

/// The container whose first process has this pid namespace.
fn container_of(engine: &containers::TestEngine, namespace: &str) -> Option<String> {
    engine.containers().into_iter().find(|id| {
        let pid = engine
            .try_command(&["inspect", "--format", "{{.State.Pid}}", id])
            .unwrap_or_default();
        let found = std::fs::read_link(format!("/proc/{}/ns/pid", pid.trim()));
        found.is_ok_and(|found| found.to_string_lossy() == namespace)
    })
}
