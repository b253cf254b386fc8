//! python-docker-mcp: state in and out, sessions that last, the policy on modules, its file and
//! variables.

use std::fs;

use serde_json::{Value, json};

use super::{
    call, exactly, fails, go_through, listed, local_index, start, start_with_index, text, words,
};
use crate::support::server::{Era, MINIMAL, Server, program};

const TRANSIENT: &str = "execute-transient";
const PERSISTENT: &str = "execute-persistent";

fn code(code: &str) -> Value {
    json!({"code": code})
}

fn within(session: &str, code: &str) -> Value {
    json!({"code": code, "session_id": session})
}

/// Runs code in a sandbox of its own and returns the state after it.
#[track_caller]
fn state_after(server: &Server, arguments: Value) -> Value {
    let (blocks, _) = call(server, TRANSIENT, arguments);
    let state = blocks[0]
        .rsplit_once("\n\nState: ")
        .unwrap_or_else(|| panic!("{blocks:?}"))
        .1;
    serde_json::from_str(state).expect("the state is JSON")
}

#[test]
fn the_tools_have_their_names_and_arguments() {
    let server = start("python-docker-mcp", MINIMAL);
    let expected = json!([
        ["execute-transient", ["code", "state"], ["code"]],
        ["execute-persistent", ["code", "session_id"], ["code"]],
        [
            "install-package",
            ["package_name", "session_id"],
            ["package_name"]
        ],
        ["cleanup-session", ["session_id"], ["session_id"]],
    ]);
    assert_eq!(listed(&server), expected);
}

#[test]
fn calls_answer_as_documented() {
    calls(&start("python-docker-mcp", MINIMAL));
}

/// Goes through the calls that the documents show, on any backend.
pub(super) fn calls(server: &Server) {
    let empty = r#"State: {"__error__":null,"__stderr__":"","__stdout__":""#;
    go_through(
        server,
        vec![
            exactly(
                TRANSIENT,
                code("print('hi')"),
                &[&format!("Execution Result:\n\nhi\n\n{empty}hi\\n\"}}")],
            ),
            // A script shows no values.
            exactly(
                TRANSIENT,
                code("1 + 1"),
                &[&format!("Execution Result:\n\n\n\n{empty}\"}}")],
            ),
            words(TRANSIENT, code("print('error: none')"), &["error: none"]),
            fails(
                TRANSIENT,
                code("print('before'); 1 / 0"),
                &[
                    "Execution Result:\n\nbefore\n",
                    "\n\nError: Python execution error: ZeroDivisionError: division by zero\n",
                ],
            ),
            fails(
                TRANSIENT,
                code("def f(:"),
                &["\n\nError: Python execution error: SyntaxError: "],
            ),
            words(
                PERSISTENT,
                within("s", "a = 41"),
                &["Session ID: s\n\nExecution Result:\n\n"],
            ),
            words(
                PERSISTENT,
                within("s", "print(a + 1)\nprint('a\\nb')"),
                &["\n\n42\na\nb\n\nState: ", "\"a\":41"],
            ),
            words(
                PERSISTENT,
                within("s", "def double(n): return 2 * n"),
                &["Session ID: s\n\nExecution Result:\n\n"],
            ),
            words(PERSISTENT, within("s", "print(double(a))"), &["\n\n82\n\n"]),
            fails(PERSISTENT, within("other", "print(a)"), &["NameError"]),
            words(
                "cleanup-session",
                json!({"session_id": "s"}),
                &["Session s cleaned up successfully"],
            ),
            fails(
                "cleanup-session",
                json!({"session_id": "s"}),
                &["Error executing cleanup-session: Session s does not exist"],
            ),
            fails(PERSISTENT, within("s", "print(a)"), &["NameError"]),
            fails(
                TRANSIENT,
                json!({}),
                &["Error executing execute-transient: Missing arguments"],
            ),
            fails(
                TRANSIENT,
                json!({"state": {}}),
                &["Error executing execute-transient: Missing code"],
            ),
            fails(
                "install-package",
                json!({"session_id": "s"}),
                &["Error executing install-package: Missing package name"],
            ),
            fails(
                "cleanup-session",
                json!({"session_id": ""}),
                &["Error executing cleanup-session: Missing session ID"],
            ),
            fails(
                PERSISTENT,
                within("../x", "1"),
                &["Error executing execute-persistent: ", "session id"],
            ),
            fails(
                "no-such-tool",
                json!({}),
                &["Error executing no-such-tool: Unknown tool: no-such-tool"],
            ),
        ],
    );
}

#[test]
fn a_session_without_a_name_gets_one_that_the_reply_tells() {
    let server = start("python-docker-mcp", MINIMAL);
    let told = text(&server, PERSISTENT, code("kept = 7"));
    let id = told
        .strip_prefix("Session ID: ")
        .unwrap()
        .split('\n')
        .next()
        .unwrap()
        .to_owned();
    assert!(text(&server, PERSISTENT, within(&id, "print(kept)")).contains("\n\n7\n\n"));
}

#[test]
fn state_goes_in_and_comes_out_as_json() {
    state_in_and_out(&start("python-docker-mcp", MINIMAL));
}

pub(super) fn state_in_and_out(server: &Server) {
    let lines = "import math\nstate['seen'] = True\nx = state['a'] + 1\nlist_ = [1, {'b': \
                 None}]\nnan = float('nan')\n_one = 1\n__two = 2\ndef f(): pass\nprint('out')";
    let state = state_after(
        server,
        json!({"code": lines, "state": {"a": 1, "deep": {"b": [1, 2]}}}),
    );
    for (name, value) in [
        ("a", json!(1)),
        ("deep", json!({"b": [1, 2]})),
        ("seen", json!(true)),
        ("x", json!(2)),
        ("list_", json!([1, {"b": null}])),
        ("nan", json!("nan")),
        ("_one", json!(1)),
        ("__stdout__", json!("out\n")),
        ("__error__", json!(null)),
    ] {
        assert_eq!(state[name], value, "{name}: {state}");
    }
    assert!(
        state["math"]
            .as_str()
            .unwrap()
            .starts_with("<module 'math'")
    );
    assert!(state["f"].as_str().unwrap().starts_with("<function f"));
    for hidden in ["__two", "state", "In", "Out", "get_ipython", "_i", "exit"] {
        assert!(state.get(hidden).is_none(), "{hidden}: {state}");
    }
    // What came out goes in again.
    let again = state_after(
        server,
        json!({"code": "y = state['x'] * 21", "state": state}),
    );
    assert_eq!((&again["y"], &again["x"]), (&json!(42), &json!(2)));
    // Code that is not run gives the state back.
    let refused = state_after(server, json!({"code": "import os", "state": {"a": [1]}}));
    let why = "Validation error: Import 'os' is blocked for security reasons";
    assert_eq!(
        (&refused["a"], &refused["__error__"]),
        (&json!([1]), &json!(why))
    );
    assert!(text(server, PERSISTENT, within("state", "kept = 5")).contains("\"kept\":5"));
    let (blocks, failed) = call(server, PERSISTENT, within("state", "import os"));
    assert!(
        failed && blocks[0].contains("\n\nState: {") && blocks[0].contains("\"kept\":5"),
        "{blocks:?}"
    );
    let failed = state_after(server, json!({"code": "z = 1\nraise ValueError('bad')"}));
    assert_eq!(
        (&failed["z"], &failed["__error__"]),
        (&json!(1), &json!("Python execution error: ValueError: bad"))
    );
}

#[test]
fn what_does_not_fit_into_a_state_is_named() {
    let server = start("python-docker-mcp", MINIMAL);
    let state = state_after(
        &server,
        code(
            "small = 1\nlarge = 'x' * 1_000_000\nclass Odd:\n    def __str__(self): raise \
             OSError\nodd = Odd()",
        ),
    );
    assert_eq!(
        (&state["small"], &state["__omitted__"]),
        (&json!(1), &json!(["large"]))
    );
    assert_eq!(state["odd"], "<Odd>");
}

#[test]
fn nothing_passes_from_one_transient_run_to_the_next() {
    nothing_passes(&start(
        "python-docker-mcp",
        &[MINIMAL, &["--timeout", "20s"]].concat(),
    ));
}

pub(super) fn nothing_passes(server: &Server) {
    let leave = "open('left', 'w').write('x'); open('/tmp/left', 'w').write('x'); name = \
                 1\nprint(open('left').read())";
    assert!(text(server, TRANSIENT, code(leave)).contains("\n\nx\n\n")); // control
    let look = "for path in ('left', '/tmp/left'):\n    try: open(path); print('found', path)\n    \
                except OSError: pass\nprint('name' in globals())";
    assert!(text(server, TRANSIENT, code(look)).starts_with("Execution Result:\n\nFalse\n"));
}

#[test]
fn many_transient_runs_leave_no_session_behind() {
    let server = start(
        "python-docker-mcp",
        &[MINIMAL, &["--max-sessions", "4"]].concat(),
    );
    // More than fit at once: every one is gone before long.
    for number in 0..12 {
        assert!(
            text(&server, TRANSIENT, code(&format!("print({number})")))
                .contains(&format!("\n\n{number}\n\n"))
        );
    }
    let log = server.finish();
    // The last one may end with the server.
    assert!(log.matches("session gone").count() >= 11, "{log}");
}

#[test]
fn modules_are_a_policy_on_parsed_code() {
    let server = start("python-docker-mcp", &[]);
    let blocked = |name: &'static str| name;
    go_through(
        &server,
        vec![
            words(
                TRANSIENT,
                code("from math import sqrt\nprint(sqrt(4))"),
                &["\n\n2.0\n\n"],
            ),
            words(
                TRANSIENT,
                code("import numpy, pandas, matplotlib.pyplot\nprint('all')"),
                &["all"],
            ),
            // The code is looked at as a whole, and ends before it needs what the environment of
            // tests lacks.
            fails(
                TRANSIENT,
                code("raise SystemExit('passed')\nimport scipy, sympy, sklearn"),
                &["SystemExit: passed"],
            ),
            words(
                TRANSIENT,
                code("# import os\ntext = 'import sys; os.system'\nprint(text)"),
                &["import sys; os.system"],
            ),
            words(
                TRANSIENT,
                code("class pathos: y = 1\nprint(pathos.y)"),
                &["\n\n1\n\n"],
            ),
            fails(
                TRANSIENT,
                code(blocked("import os")),
                &[
                    "Execution Result:\n\n\n\nError: Validation error: Import 'os' is blocked for \
                     security reasons",
                ],
            ),
            fails(
                TRANSIENT,
                code("import math, os"),
                &["Import 'os' is blocked"],
            ),
            fails(
                TRANSIENT,
                code("def f():\n    from os.path import join"),
                &["Import 'os' is blocked"],
            ),
            fails(
                TRANSIENT,
                code("__import__('os').system('ls')"),
                &["Import 'os' is blocked"],
            ),
            fails(
                TRANSIENT,
                code("import urllib.request"),
                &["Import 'urllib' is not in the allowed list"],
            ),
            fails(
                TRANSIENT,
                code("!ls"),
                &["Shell commands and magics are blocked"],
            ),
            fails(
                PERSISTENT,
                within("s", "import socket"),
                &[
                    "Session ID: s\n\nExecution Result:",
                    "Import 'socket' is blocked",
                ],
            ),
        ],
    );
}

#[test]
fn lists_of_modules_come_from_the_file_and_can_be_empty() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    fs::write(
        &file,
        "docker: {timeout: 2, memory_limit: 128m}\nallowed_modules: []\nblocked_modules: [json]\n",
    )
    .unwrap();
    let mut command = program();
    command
        .env("PYTHON_DOCKER_MCP_CONFIG", &file)
        .args(["mcp", "--profile", "python-docker-mcp"])
        .args(MINIMAL);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    go_through(
        &server,
        vec![
            words(
                TRANSIENT,
                code("import os, urllib.request\nprint('fine', os.getcwd())"),
                &["\n\nfine /work\n"],
            ),
            fails(
                TRANSIENT,
                code("import json"),
                &["Import 'json' is blocked"],
            ),
            fails(
                TRANSIENT,
                code("while True: pass"),
                &["Error: Execution timed out after 2 seconds"],
            ),
            // Between what the file gives and the usual 256 MiB.
            fails(
                TRANSIENT,
                code("print(len(bytearray(150 << 20)) >> 20)"),
                &["Error: "],
            ),
            words(
                TRANSIENT,
                code("print(len(bytearray(20 << 20)) >> 20)"),
                &["\n\n20\n\n"],
            ), // control
            words(PERSISTENT, within("s", "x = 1"), &["\"x\":1"]),
            fails(
                PERSISTENT,
                within("s", "while True: pass"),
                &["Error: Execution timed out after 2 seconds", "\"x\":1"],
            ),
            words(PERSISTENT, within("s", "print(x)"), &["\n\n1\n\n"]),
        ],
    );
}

#[test]
fn a_session_whose_python_ended_goes_on_with_a_new_one_and_says_so() {
    let mut command = program();
    command
        .env("CELLBLOCK_BLOCKED_MODULES", "")
        .env("CELLBLOCK_ALLOWED_MODULES", "");
    let server = Server::spawn(
        command
            .args(["mcp", "--profile", "python-docker-mcp"])
            .args(MINIMAL),
        Era::Initialize,
    );
    server.greet();
    go_through(
        &server,
        vec![
            words(
                PERSISTENT,
                within("s", "open('kept', 'w').write('file'); x = 1"),
                &["\"x\":1"],
            ),
            fails(
                PERSISTENT,
                within("s", "import os; os._exit(9)"),
                &["exit code 9", "starts Python anew"],
            ),
            words(
                PERSISTENT,
                within("s", "print(open('kept').read(), 'x' in globals())"),
                &["(Python was started anew, because ", "\nfile False\n"],
            ),
        ],
    );
}

#[test]
fn packages_are_installed_into_sessions_from_the_index_of_the_file() {
    let index = local_index();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let url = index.url_without_password();
    let package =
        format!("package:\n  installer: uv\n  index_url: {url}\n  trusted_hosts: [127.0.0.1]\n");
    // The lists of that server's own example file.
    let allowed = "allowed_modules: [math, datetime, random, json, re, collections]\n";
    fs::write(
        &file,
        format!("{package}{allowed}blocked_modules: [os, sys, subprocess, shutil, pathlib]\n"),
    )
    .unwrap();
    let server = start_with_index("python-docker-mcp", &index, |command| {
        command
            .env_remove("CELLBLOCK_PACKAGE_INDEX")
            .env("PYTHON_DOCKER_MCP_CONFIG", &file);
    });
    packages(&server);
    // What that server brings along passes its own list; the code ends before it needs what the
    // environment of tests lacks.
    let bundled =
        "raise SystemExit('passed')\nimport numpy, pandas, scipy, matplotlib, sklearn, sympy";
    go_through(
        &server,
        vec![fails(TRANSIENT, code(bundled), &["SystemExit: passed"])],
    );
    assert!(
        index.requests().iter().any(|path| path.contains("pure")),
        "the index of the file was asked"
    );
}

/// Installs packages of the index on this machine, on any backend.
pub(super) fn packages(server: &Server) {
    let package = |name: &str, session: &str| json!({"package_name": name, "session_id": session});
    go_through(
        server,
        vec![
            fails(
                PERSISTENT,
                within("s", "import pure"),
                &["Import 'pure' is not in the allowed list"],
            ),
            words(
                "install-package",
                package("pure>=2", "s"),
                &["Package installation result:\n\n"],
            ),
            words(
                PERSISTENT,
                within("s", "import pure\nprint(pure.value)"),
                &["\n\n2\n\n"],
            ),
            fails(
                PERSISTENT,
                within("t", "import pure"),
                &["Import 'pure' is not in the allowed list"],
            ),
            fails(
                "install-package",
                package("no-such-package", "s"),
                &["Error executing install-package: Error installing package: "],
            ),
            words(
                "install-package",
                json!({"package_name": "leaf"}),
                &["Package installation result:", "No session was named"],
            ),
            fails(TRANSIENT, code("import leaf"), &["not in the allowed list"]),
            // As the document's example has it: the package first, in a session that is not there
            // yet.
            words(
                "install-package",
                package("leaf", "my_math_session"),
                &["Package installation result:\n\n"],
            ),
            words(
                PERSISTENT,
                within("my_math_session", "import leaf\nprint(leaf.name)"),
                &["\n\nleaf\n\n"],
            ),
            // One that the environment has already.
            fails(
                PERSISTENT,
                within("s", "import IPython"),
                &["Import 'IPython' is not in the allowed list"],
            ),
            words(
                "install-package",
                package("ipython", "s"),
                &["already satisfied"],
            ),
            words(
                PERSISTENT,
                within("s", "import IPython\nprint('there')"),
                &["\n\nthere\n\n"],
            ),
            fails(
                PERSISTENT,
                within("t", "import IPython"),
                &["Import 'IPython' is not in the allowed list"],
            ),
        ],
    );
}
