//! Cells as MCP tasks, with the built program, with and without a daemon.

use std::fs;
use std::path::Path;
use std::time::Instant;

use cellblock::audit::Digest;
use serde_json::{Value, json};

use crate::stdio::control::Flag;
use crate::support::server::{CAPABILITIES, Era, MINIMAL, Pending, Server, TEST_TIMEOUT};
use crate::support::service::{SESSIONS_INSIDE, SESSIONS_KEPT, SessionDaemon};

/// A server whose client knows tasks, and a folder with its workspace and its audit log.
struct Scene {
    server: Server,
    folder: tempfile::TempDir,
    // Dropped after the server.
    _daemon: SessionDaemon,
}

impl Scene {
    fn new(flags: &[&str]) -> Scene {
        let (daemon, folder) = (SessionDaemon::new(), tempfile::tempdir().unwrap());
        // Sessions must not reach the log.
        let (workspace, log) = (folder.path().join("workspace"), folder.path().join("log"));
        fs::create_dir(&workspace).unwrap();
        let more = [
            "--daemon-name",
            daemon.name(),
            "--workspace",
            workspace.to_str().unwrap(),
            "--audit-file",
            log.to_str().unwrap(),
        ];
        let server = Server::start_in(Era::Stateless, &[MINIMAL, flags, &more].concat());
        Scene {
            server,
            folder,
            _daemon: daemon,
        }
    }

    fn flag(&self, name: &str) -> Flag {
        Flag::new(&self.folder.path().join("workspace"), name)
    }

    fn begin(&self, method: &str, mut parameters: Value) -> Pending<'_> {
        let extensions = json!({"io.modelcontextprotocol/tasks": {}});
        parameters["_meta"] = json!({CAPABILITIES: {"extensions": extensions}});
        self.server.begin_request(method, parameters)
    }

    fn begin_cell(&self, code: &str) -> Pending<'_> {
        let arguments = json!({"code": code, "session_id": "a"});
        self.begin(
            "tools/call",
            json!({"name": "execute_ipython_cell", "arguments": arguments}),
        )
    }

    /// Follows a task until it has ended.
    fn ended(&self, task: &str) -> Value {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let mut told = self.begin("tasks/get", json!({"taskId": task})).answer();
            assert!(told["error"].is_null(), "{told}");
            if told["result"]["status"] != "working" {
                return told["result"].take();
            }
            assert!(Instant::now() < deadline, "it does not end: {told}");
        }
    }
}

/// The id of the task that a call has become.
fn task_of(call: &Pending<'_>) -> String {
    let answer = call.answer();
    let id = answer["result"]["taskId"].as_str();
    id.unwrap_or_else(|| panic!("it is no task: {answer}"))
        .to_owned()
}

/// The value of a cell, without what else its result tells.
fn value(task: &Value) -> &str {
    task["result"]["structuredContent"]["text"]
        .as_str()
        .and_then(|text| text.lines().next())
        .unwrap_or_else(|| panic!("it has no result: {task}"))
}

/// The digests and states of the executions in a log.
fn executions(log: &Path) -> Vec<(Value, Value)> {
    let records = fs::read_to_string(log).unwrap();
    let records = records
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    records
        .filter(|record| record["kind"] == "execution")
        .map(|record| {
            let details = &record["details"];
            (details["code"].clone(), details["status"].clone())
        })
        .collect()
}

fn check_digests(flags: &[&str]) {
    let scene = Scene::new(flags);
    let go = scene.flag("go");
    let codes = [
        format!("{}\n'first'", go.await_inside()),
        "'second'".to_owned(),
        "raise ValueError('third')".to_owned(),
    ];
    let calls = [&codes[0], &codes[1]].map(|code| scene.begin_cell(code));
    let tasks = calls.each_ref().map(task_of);
    go.raise_outside();
    let [first, second] = &tasks;
    assert_eq!(value(&scene.ended(second)), "'second'");
    assert_eq!(value(&scene.ended(first)), "'first'");
    // Records of later executions are those of their own code too.
    let third = scene.begin_cell(&codes[2]).answer();
    assert_eq!(third["result"]["isError"], true, "{third}");
    let log = scene.folder.path().join("log");
    scene.server.close_input();
    assert!(scene.server.ended().success());
    let recorded = codes
        .iter()
        .zip(["ok", "ok", "error"])
        .map(|(code, status)| {
            let digest = serde_json::to_value(Digest::of(code.as_str())).unwrap();
            (digest, json!(status))
        });
    assert_eq!(executions(&log), recorded.collect::<Vec<_>>());
}

#[test]
fn tasks_collected_in_reverse_order_are_recorded_with_their_own_code() {
    check_digests(SESSIONS_INSIDE);
}

#[test]
fn tasks_collected_in_reverse_order_are_recorded_with_their_own_code_with_a_daemon() {
    check_digests(SESSIONS_KEPT);
}

fn check_cancelled(flags: &[&str]) {
    let scene = Scene::new(flags);
    let begun = scene.flag("begun");
    let endless = scene.begin_cell(&format!("x = 1\n{}\nwhile True: pass", begun.raise()));
    begun.wait();
    let waiting = scene.begin_cell("x = 2");
    let (endless, waiting) = (task_of(&endless), task_of(&waiting));
    // One that waits is cancelled first, so that it cannot begin.
    for task in [&waiting, &endless] {
        let answer = scene.begin("tasks/cancel", json!({"taskId": task}));
        assert!(answer.answer()["error"].is_null());
    }
    assert_eq!(scene.ended(&endless)["status"], "cancelled");
    assert_eq!(scene.ended(&waiting)["status"], "cancelled");
    let after = scene.begin_cell("x").answer();
    assert_eq!(after["result"]["structuredContent"]["text"], "1", "{after}");
}

#[test]
fn a_cancelled_task_is_interrupted_or_does_not_begin() {
    check_cancelled(SESSIONS_INSIDE);
}

#[test]
fn a_cancelled_task_is_interrupted_or_does_not_begin_with_a_daemon() {
    check_cancelled(SESSIONS_KEPT);
}
