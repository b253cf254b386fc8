//! A running service is told to read its policy again: it holds at once in sessions that are there,
//! with and without a daemon.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::http::client::Raw;
use crate::support::native::host_python;
use crate::support::service::{SESSIONS_INSIDE, Service};

const ECHO: &str = "import mcptools\nprint(mcptools.call('notes', 'echo', {'text': 'x'}))";

/// A service with one caller and one server of the operator's, whose policy is in its configuration
/// file.
struct Scene {
    service: Service,
    folder: tempfile::TempDir,
    /// The file without a policy.
    plain: String,
}

impl Scene {
    fn new(flags: &[&str]) -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let start = || {
            Service::with_keys(
                folder.path(),
                &[("alice", &["python:execute"])],
                &[flags, &["--max-wait", "20s"]].concat(),
            )
        };
        // The first one makes the file.
        drop(start());
        let file = folder.path().join("config.yaml");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/notes_server.py");
        let notes =
            json!({"command": host_python("minimal"), "args": [script, folder.path().join("log")]});
        let plain = format!(
            "{}\nmcp_servers: {{notes: {notes}}}\n",
            fs::read_to_string(&file).unwrap()
        );
        fs::write(&file, &plain).unwrap();
        let service = start();
        Scene {
            service,
            folder,
            plain,
        }
    }

    /// Writes another policy and has it read. Returns what the log says.
    fn policy(&self, lines: &str) -> String {
        fs::write(
            self.folder.path().join("config.yaml"),
            format!("{}{lines}\n", self.plain),
        )
        .unwrap();
        self.service.read_again()
    }

    async fn run(&self, client: &mut Raw, code: &str, more: Value) -> Value {
        let arguments = json!({"code": code, "session_id": "a"});
        client
            .result_with_a_person("execute_ipython_cell", arguments, more)
            .await
    }
}

fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_default()
}

fn answer_to(asked: &Value, decision: &str) -> Value {
    assert_eq!(asked["resultType"], "input_required", "{asked}");
    let key = asked["inputRequests"]
        .as_object()
        .unwrap()
        .keys()
        .next()
        .unwrap()
        .clone();
    let answer = json!({"action": "accept", "content": {"decision": decision}});
    json!({"inputResponses": {key: answer}, "requestState": asked["requestState"]})
}

async fn a_policy_is_read_again(flags: &[&str]) {
    let scene = Scene::new(flags);
    let mut alice = Raw::with_key(&scene.service, "alice").await;
    // A call connects to the server first; the module comes with the next cell.
    let first = "from cellblock_runner import host_calls\nprint(host_calls.ask('call_tool', \
                 server='notes', tool='echo', arguments={'text': 'x'})['ok'])";
    assert_eq!(text(&scene.run(&mut alice, first, json!({})).await), "True");
    assert_eq!(
        text(&scene.run(&mut alice, ECHO, json!({})).await),
        "first: x",
        "nothing is asked at first"
    );

    assert!(
        scene
            .policy("approve_tools: ask")
            .contains("the settings were read again")
    );
    let asked = scene.run(&mut alice, ECHO, json!({})).await;
    let answer = answer_to(&asked, "once");

    // Settings that make no sense change nothing, and what was asked stays asked.
    let said = scene.policy("approve_tools: perhaps");
    assert!(
        said.contains("the settings were not read again; the old ones hold"),
        "{said}"
    );
    assert!(
        scene
            .policy("approve_tools: allow")
            .contains("the settings were read again")
    );
    let mut later = Raw::with_key(&scene.service, "alice").await;
    let arguments = json!({"code": ECHO, "session_id": "b"});
    let told = later
        .result_with_a_person("execute_ipython_cell", arguments.clone(), json!({}))
        .await;
    assert!(
        told["resultType"] != "input_required",
        "what is new is not asked about: {told}"
    );
    assert_eq!(text(&scene.run(&mut alice, ECHO, answer).await), "first: x");

    assert!(
        scene
            .policy("approvals:\n  - deny: {server: notes, tool: \"e*\"}")
            .contains("the settings were read again")
    );
    let denied = scene.run(&mut alice, ECHO, json!({})).await;
    assert!(
        text(&denied).contains("`deny: {server: \"notes\", tool: \"e*\"}` (line"),
        "{denied}"
    );

    // Sandboxes that start programs freely cannot have commands looked at; the rest of such a
    // policy is not taken over either.
    let said = scene.policy("approve_shell: ask");
    assert!(
        said.contains("the approvals were not read again; the old ones hold"),
        "{said}"
    );
    assert!(text(&scene.run(&mut alice, ECHO, json!({})).await).contains("ToolCallDenied"));
}

#[tokio::test]
async fn a_policy_that_is_read_again_holds_at_once() {
    a_policy_is_read_again(SESSIONS_INSIDE).await;
}

#[tokio::test]
async fn a_policy_that_is_read_again_holds_at_once_where_sessions_are_kept() {
    a_policy_is_read_again(&[]).await;
}
