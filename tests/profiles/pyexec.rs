//! mcp-pyexec: one tool over both transports, with tokens and scopes over the second.

use serde_json::{Value, json};

use super::{call, exactly, fails, go_through, listed, start, words};
use crate::http::client::Raw;
use crate::support::server::{MINIMAL, Server};
use crate::support::service::Service;

const EXECUTE: &str = "execute_python";

fn code(code: &str) -> Value {
    json!({"code": code})
}

#[test]
fn the_tool_has_its_name_and_arguments() {
    let server = start("pyexec", MINIMAL);
    assert_eq!(
        listed(&server),
        json!([[EXECUTE, ["code", "session_id"], ["code"]]])
    );
    let all = server.request("tools/list", json!({}));
    assert_eq!(
        all["result"]["tools"][0]["inputSchema"]["properties"]["session_id"]["default"],
        "default"
    );
}

#[test]
fn calls_answer_as_documented() {
    calls(&start("pyexec", &[MINIMAL, &["--timeout", "2s"]].concat()));
}

/// Goes through the calls that the documents show, on any backend, with a time-out of two seconds.
pub(super) fn calls(server: &Server) {
    go_through(
        server,
        vec![
            exactly(EXECUTE, code("2 + 2"), &["4"]),
            exactly(
                EXECUTE,
                code("x = 1"),
                &["✓ Execution successful (no output)"],
            ),
            exactly(EXECUTE, code("print('printed'); x"), &["printed\n1"]),
            exactly(
                EXECUTE,
                json!({"code": "x", "session_id": "default"}),
                &["1"],
            ),
            fails(
                EXECUTE,
                json!({"code": "x", "session_id": "other"}),
                &["NameError", "\nERROR: NameError: "],
            ),
            exactly(
                EXECUTE,
                code("import sys; print('o'); print('e', file=sys.stderr); print('o')"),
                &["o\nERROR: e\no"],
            ),
            fails(
                EXECUTE,
                code("print('before'); 1 / 0"),
                &["before\n", "\nERROR: ZeroDivisionError: division by zero"],
            ),
            fails(EXECUTE, code("  "), &["Error: No Python code provided"]),
            fails(
                EXECUTE,
                code("while True: pass"),
                &["✗ Execution timed out after 2 seconds", "are kept"],
            ),
            exactly(EXECUTE, code("x"), &["1"]),
            words(
                EXECUTE,
                code("print('x' * 3_000_000)"),
                &["xxx", "characters cut here"],
            ),
            fails(
                EXECUTE,
                json!({"code": "1", "session_id": "../../etc"}),
                &["✗ Error: ", "session"],
            ),
            fails(EXECUTE, json!({}), &["✗ Error: ", "\"code\""]),
            fails("other", json!({}), &["Unknown tool: other"]),
            fails(
                EXECUTE,
                code("import os; os._exit(1)"),
                &["✗ Error: Python ended while the code ran"],
            ),
            words(
                EXECUTE,
                code("print('x' in globals())"),
                &["(Python was started anew, because ", "\nFalse"],
            ),
        ],
    );
}

#[test]
fn text_and_pictures_come_in_order() {
    let server = start("pyexec", &[]);
    let draw = "import matplotlib.pyplot as plt\nprint('one'); plt.plot([1]); plt.show(); print('two'); plt.plot([2]); plt.show(); 'three'";
    let (blocks, failed) = call(&server, EXECUTE, code(draw));
    assert!(!failed);
    assert_eq!(blocks, ["one", "<image>", "two", "<image>", "'three'"]);
}

#[test]
fn its_usual_limits_hold() {
    let server = start("pyexec", MINIMAL);
    let limit = "int(open('/sys/fs/cgroup/memory.max').read())";
    let (blocks, failed) = call(&server, EXECUTE, code("x = bytearray(700 << 20)"));
    assert!(
        failed && (blocks[0].contains("512 MiB") || blocks[0].contains("MemoryError")),
        "{limit}: {blocks:?}"
    );
    let (blocks, failed) = call(
        &server,
        EXECUTE,
        code("x = bytearray(100 << 20); len(x) >> 20"),
    );
    assert!(
        !failed && blocks[0].ends_with("100"),
        "the control: {blocks:?}"
    );
}

#[tokio::test]
async fn over_http_a_token_is_needed_and_sessions_belong_to_callers() {
    let folder = tempfile::tempdir().unwrap();
    let callers: [(&str, &[&str]); 3] = [
        ("anna", &["python:execute"]),
        ("ben", &["python:execute"]),
        ("cara", &["sessions:read"]),
    ];
    let service = Service::with_keys(folder.path(), &callers, false, &["--profile", "pyexec"]);
    let mut anna = Raw::with_key(&service, "anna").await;
    let told = anna.result(EXECUTE, code("mine = 'secret'; mine")).await;
    assert_eq!(told["content"][0]["text"], "'secret'");
    assert_eq!(
        anna.result(EXECUTE, code("mine")).await["content"][0]["text"],
        "'secret'"
    ); // control
    let mut ben = Raw::with_key(&service, "ben").await;
    assert_eq!(ben.result(EXECUTE, code("mine")).await["isError"], true);
    let mut cara = Raw::with_key(&service, "cara").await;
    cara.call(EXECUTE, code("1")).await;
    let refused = cara.answer().await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.head.contains("insufficient_scope"), "{refused:?}");
    let mut nobody = Raw::connect(service.address).await;
    nobody.call(EXECUTE, code("1")).await;
    assert_eq!(nobody.answer().await.status, 401);
}
