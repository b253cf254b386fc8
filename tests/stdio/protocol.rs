//! Both protocol eras: greetings, the list of tools, bad requests, and answers while Python is
//! still being prepared.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::server::{
    Era, MINIMAL, Server, data_dir, program, program_below, with_timeout,
};

/// A model reads about this many bytes of the list as one token: the tokenizer o200k makes 2,759
/// tokens of 11,791 bytes.
const BYTES_IN_A_TOKEN: f64 = 4.2;

#[test]
fn both_eras_can_list_run_reset_copy_and_close() {
    for era in Era::BOTH {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let server = Server::start_in(era, &[MINIMAL, &["--allowed-dir", path]].concat());
        let session = server.session();
        assert_eq!(session.text("x = 6 * 7; x"), "42");
        assert_eq!(session.text("print(x)"), "42");

        fs::write(folder.path().join("in.bin"), (0..=255).collect::<Vec<u8>>()).unwrap();
        session.call(
            "upload_file",
            json!({"relpath": "a/b.bin", "local_path": "in.bin"}),
        );
        assert_eq!(
            session.text("open('a/b.bin', 'rb').read() == bytes(range(256))"),
            "True"
        );
        session.call(
            "download_file",
            json!({"relpath": "a/b.bin", "local_path": "out.bin"}),
        );
        assert_eq!(
            fs::read(folder.path().join("out.bin")).unwrap(),
            (0..=255).collect::<Vec<u8>>()
        );

        let reset = session.call("reset", json!({}));
        assert_eq!(reset.structured()["files_kept"], true);
        session.run("x").assert_refused(&["NameError"]);
        assert_eq!(session.text("import os; os.path.exists('a/b.bin')"), "True");

        let listed = server.call("list_sessions", json!({}));
        assert_eq!(
            listed.structured()["sessions"][0]["session_id"],
            session.id.as_str()
        );
        assert!(!session.call("close_session", json!({})).is_error());
        let listed = server.call("list_sessions", json!({}));
        assert_eq!(listed.structured()["sessions"], json!([]), "{era:?}");
        session
            .call("close_session", json!({}))
            .assert_refused(&["there is no session"]);
        drop(session);
        server.finish();
    }
}

#[test]
fn the_version_that_is_reported_is_our_own() {
    let server = Server::spawn(program().arg("mcp").args(MINIMAL), Era::Initialize);
    let info = server.greet();
    assert_eq!(
        info["result"]["serverInfo"]["version"],
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(info["result"]["serverInfo"]["name"], "cellblock");
    let modern = Server::spawn(program().arg("mcp").args(MINIMAL), Era::Stateless);
    let info = modern.greet();
    let versions = info["result"]["supportedVersions"].as_array().unwrap();
    assert!(versions.contains(&json!("2026-07-28")), "{info}");
    assert!(info["result"]["ttlMs"].is_u64(), "{info}");
}

#[test]
fn the_list_of_tools_is_short_and_says_all_a_client_may_ask() {
    let answer = Server::shared().request("tools/list", json!({}));
    let tokens = answer["result"].to_string().len() as f64 / BYTES_IN_A_TOKEN;
    assert!(tokens < 3000.0, "{tokens} tokens");
    let tools = answer["result"]["tools"].as_array().unwrap();
    let names: Vec<&str> = tools
        .iter()
        .map(|tool| tool["name"].as_str().unwrap())
        .collect();
    let expected = [
        "execute_ipython_cell",
        "check_execution",
        "install_package",
        "reset",
        "undo",
        "list_checkpoints",
        "fork_session",
        "explore",
        "upload_file",
        "download_file",
        "list_sessions",
        "close_session",
        "register_mcp_server",
        "list_mcp_servers",
        "unregister_mcp_server",
    ];
    assert_eq!(names, expected);
    for tool in tools {
        assert!(
            tool["title"].is_string() && tool["description"].is_string(),
            "{tool}"
        );
        for schema in ["inputSchema", "outputSchema"] {
            assert_eq!(tool[schema]["type"], "object", "{tool}");
        }
        // The others are said only where they differ from the protocol's defaults.
        assert!(tool["annotations"]["openWorldHint"].is_boolean(), "{tool}");
    }
    let text = tools[0]["description"].as_str().unwrap();
    for truth in [
        "stay for the next call",
        "lost at reset",
        "without network",
        "not rolled back",
    ] {
        assert!(text.contains(truth), "{truth:?} is not in {text:?}");
    }
}

#[test]
fn malformed_messages_are_answered_and_nothing_is_lost() {
    let server = Server::start(MINIMAL);
    let session = server.session();
    assert_eq!(session.text("x = 1; x"), "1");
    for (line, code) in [
        ("{not json", -32700),
        ("[]", -32600),
        ("7", -32600),
        (r#"{"jsonrpc": "1.0", "id": 1, "method": "ping"}"#, -32600),
        (r#"{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}"#, -32600),
    ] {
        server.send_line(line);
        let error = match line.contains("\"id\": 1,") {
            true => server.reply_to(1),
            false => server.error_without_id(),
        };
        assert_eq!(
            error["error"]["code"], code,
            "{line} was answered with {error}"
        );
    }
    server.send_line("");
    assert_eq!(
        server.request("no/such/method", json!({}))["error"]["code"],
        -32601
    );
    assert_eq!(
        server.request("prompts/get", json!({"name": "a"}))["error"]["code"],
        -32601
    );
    assert_eq!(
        server.request("tools/call", json!({"name": 5}))["error"]["code"],
        -32602
    );
    let unknown = server.request(
        "tools/call",
        json!({"name": "execute_python_cell", "arguments": {}}),
    );
    assert_eq!(unknown["error"]["code"], -32602);
    assert!(
        unknown["error"]["message"]
            .as_str()
            .unwrap()
            .contains("execute_ipython_cell"),
        "{unknown}"
    );
    assert_eq!(session.text("x"), "1");
}

#[test]
fn a_line_over_the_cap_is_skipped_and_the_connection_lives() {
    let server = Server::start(MINIMAL);
    server.send_line(&"x".repeat(17 * 1024 * 1024));
    assert_eq!(server.error_without_id()["error"]["code"], -32600);
    assert_eq!(server.session().text("1"), "1");
}

#[test]
fn a_modern_request_without_its_metadata_or_of_an_unknown_version_is_refused() {
    let server = Server::start_in(Era::Stateless, MINIMAL);
    let version = "io.modelcontextprotocol/protocolVersion";
    let wrong = json!({"jsonrpc": "2.0", "id": 900, "method": "tools/list", "params": {"_meta": {
        version: "2099-01-01", "io.modelcontextprotocol/clientCapabilities": {}}}});
    server.send_line(&wrong.to_string());
    let error = server.reply_to(900);
    assert_eq!(error["error"]["code"], -32022, "{error}");
    let result = server.session().run("1");
    assert_eq!(result.0["resultType"], "complete");
    assert!(
        result.0["_meta"]["io.modelcontextprotocol/serverInfo"].is_object(),
        "{}",
        result.0
    );
}

#[test]
fn bad_arguments_are_results_that_say_what_to_do() {
    let server = Server::shared();
    let refused = |arguments: Value, words: &[&str]| {
        server
            .call("execute_ipython_cell", arguments)
            .assert_refused(words);
    };
    refused(
        json!({"code": "1", "sesion_id": "a"}),
        &["\"sesion_id\"", "session_id", "Nothing was executed"],
    );
    refused(json!({}), &["\"code\""]);
    refused(json!({"code": 5}), &["\"code\""]);
    for timeout in [json!(0), json!(-1), json!(1e12), json!("5")] {
        refused(json!({"code": "1", "timeout": timeout}), &["\"timeout\""]);
    }
    for chars in [json!(0), json!(-1), json!(1.5), json!(1e12)] {
        refused(
            json!({"code": "1", "max_output_chars": chars}),
            &["\"max_output_chars\""],
        );
    }
    for id in [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "a\nb",
        "a\u{0}b",
        "ä",
        &"x".repeat(65),
    ] {
        refused(
            json!({"code": "1", "session_id": id}),
            &["\"session_id\"", "1 to 64"],
        );
    }
    for tool in [
        "reset",
        "upload_file",
        "download_file",
        "list_sessions",
        "close_session",
    ] {
        server
            .call(tool, json!({"unknown": 1}))
            .assert_refused(&["\"unknown\""]);
    }
    let longest = "x".repeat(64);
    for id in ["...", longest.as_str()] {
        let good = server.call(
            "execute_ipython_cell",
            json!({"code": "1", "session_id": id, "timeout": 0.5e2}),
        );
        assert!(!good.is_error(), "{}", good.text());
        server.call("close_session", json!({"session_id": id}));
    }
}

#[test]
fn sessions_that_do_not_exist_are_named_and_never_made_by_asking() {
    let server = Server::shared();
    let folder = tempfile::tempdir().unwrap();
    let local = folder.path().join("x").to_str().unwrap().to_owned();
    for (tool, more) in [
        ("reset", json!({})),
        ("close_session", json!({})),
        (
            "download_file",
            json!({"relpath": "a", "local_path": local}),
        ),
    ] {
        let mut arguments = json!({"session_id": "never-made"});
        arguments
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        assert!(server.call(tool, arguments).is_error(), "{tool}");
    }
    let listed = server.call("list_sessions", json!({}));
    assert!(!listed.text().contains("never-made"));
}

#[test]
fn a_probe_of_the_newer_era_may_be_followed_by_initialize() {
    let server = Server::spawn(program().arg("mcp").args(MINIMAL), Era::Initialize);
    // A client that gives up its probe cancels it; neither may end the connection.
    server.request(
        "server/discover",
        json!({"_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        }}),
    );
    server.notify("notifications/cancelled", json!({"requestId": 1}));
    server.greet();
    assert_eq!(server.session().text("1 + 1"), "2");
}

#[test]
fn requests_are_answered_while_the_environment_is_being_built_and_a_cell_waits_with_progress() {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("gate");
    let reached = folder.path().join("reached");
    for fifo in [&gate, &reached] {
        assert!(Command::new("mkfifo").arg(fifo).status().unwrap().success());
    }
    // A stand-in for uv that tells when it is called, waits to be let through, and then does what
    // uv does.
    let uv = folder.path().join("uv");
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = venv ]; then echo > '{}'; read line < '{}'; fi\nexec \
         '{}' \"$@\"\n",
        reached.display(),
        gate.display(),
        real_uv().display()
    );
    fs::write(&uv, script).unwrap();
    fs::set_permissions(&uv, Permissions::from_mode(0o755)).unwrap();

    let mut command = program_below(&folder.path().join("data"));
    let server = Server::spawn(
        command.env("CELLBLOCK_UV", &uv).arg("mcp").args(MINIMAL),
        Era::Initialize,
    );
    server.greet();
    with_timeout(move || fs::read(reached).unwrap());
    let session = server.session();
    let waiting = session.begin("print('at last')", json!({}));
    let told = server.notification(|message| message["params"]["progressToken"] == waiting.id());
    assert_eq!(told["method"], "notifications/progress");
    assert!(
        told["params"]["message"]
            .as_str()
            .is_some_and(|text| !text.is_empty()),
        "{told}"
    );
    assert_eq!(
        server.request("tools/list", json!({}))["result"]["tools"]
            .as_array()
            .unwrap()
            .len(),
        15
    );
    assert!(!waiting.is_answered());

    with_timeout(move || {
        OpenOptions::new()
            .write(true)
            .open(gate)
            .unwrap()
            .write_all(b"go\n")
            .unwrap()
    });
    assert_eq!(waiting.result().text(), "at last");
}

#[test]
fn an_environment_that_cannot_be_built_is_said_in_the_answer_and_the_server_stays() {
    let folder = tempfile::tempdir().unwrap();
    let uv = folder.path().join("uv");
    fs::write(&uv, "#!/bin/sh\necho 'the index is on fire' >&2\nexit 1\n").unwrap();
    fs::set_permissions(&uv, Permissions::from_mode(0o755)).unwrap();
    let mut command = program_below(&folder.path().join("data"));
    let server = Server::spawn(
        command.env("CELLBLOCK_UV", &uv).arg("mcp").args(MINIMAL),
        Era::Initialize,
    );
    server.greet();
    server
        .session()
        .run("1")
        .assert_refused(&["no Python could be started", "the index is on fire"]);
    assert!(!server.call("list_sessions", json!({})).is_error());
}

#[test]
fn the_end_of_the_input_ends_the_server_at_once_even_while_code_runs() {
    for era in Era::BOTH {
        let folder = tempfile::tempdir().unwrap();
        let workspace = folder.path().to_str().unwrap();
        let server = Server::start_in(era, &[MINIMAL, &["--workspace", workspace]].concat());
        let begun = super::control::Flag::new(folder.path(), "begun");
        let session = server.session();
        let _running = session.begin(&format!("{}\nwhile True: pass", begun.raise()), json!({}));
        begun.wait();
        server.close_input();
        let asked = std::time::Instant::now();
        assert!(server.ended().success());
        assert!(asked.elapsed().as_secs() < 10, "{:?}", asked.elapsed());
    }
}

#[test]
fn code_output_and_secrets_are_in_no_log() {
    let server = Server::start(
        &[
            MINIMAL,
            &["--env-var", "TOKEN=hush-env", "--log-level", "debug"],
        ]
        .concat(),
    );
    let session = server.session();
    session.run("print('hush-' + 'output'); secret = 'hush-code'");
    session.run("raise ValueError('hush-error')");
    session.run("import sys; sys.__stderr__.write('hush-stderr')");
    drop(session);
    let log = server.finish();
    assert!(
        log.contains("tool call answered"),
        "the log has something in it: {log}"
    ); // control
    assert!(!log.contains("hush-"), "{log}");
}

/// The uv that built the shared environments.
pub(crate) fn real_uv() -> std::path::PathBuf {
    let own = data_dir().join("tools/uv");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("uv"));
    on_path
        .chain([own])
        .find(|candidate| candidate.is_file())
        .expect("the shared environments were built with a uv")
}
