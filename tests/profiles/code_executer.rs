//! Containerized Code Executer: services from their start to their end, and its prompt.

use std::net::TcpListener;

use serde_json::{Value, json};

use super::{
    Case, exactly, fails, go_through, listed, local_index, start, start_with_index, text, words,
};
use crate::support::listening_ports;
use crate::support::native::{HostProcess, processes};
use crate::support::server::{MINIMAL, Server};

const START: &str = "start_code_executer";
const EXECUTE: &str = "execute_code";
const STOP: &str = "stop_code_executer";
const REUSE: &str = "reuse_code_executer";

fn code(code: &str) -> Value {
    json!({"code": code})
}

#[track_caller]
fn started(server: &Server, arguments: Value) -> String {
    let told = text(server, START, arguments);
    told.strip_prefix("Code execution service started with the name: ")
        .unwrap_or_else(|| panic!("{told}"))
        .to_owned()
}

fn no_service() -> Case {
    fails(
        EXECUTE,
        code("1"),
        &["Failed to connect to the code execution service."],
    )
}

#[test]
fn the_tools_have_their_names_and_arguments() {
    let server = start("code-executer", MINIMAL);
    let expected = json!([
        [START, ["dependencies"], []],
        [EXECUTE, ["code"], ["code"]],
        [STOP, ["delete_service", "name"], []],
        [REUSE, ["name"], ["name"]],
    ]);
    assert_eq!(listed(&server), expected);
}

#[test]
fn a_service_is_started_used_stopped_kept_and_used_again() {
    life_of_a_service(&start("code-executer", MINIMAL));
}

/// Goes through the life of a service, on any backend.
pub(super) fn life_of_a_service(server: &Server) {
    go_through(server, vec![no_service()]);
    let name = started(server, json!({}));
    let digits = name.strip_prefix("code_executer-").unwrap();
    assert!(
        digits.len() == 14 && digits.chars().all(|digit| digit.is_ascii_digit()),
        "{name}"
    );
    go_through(
        server,
        vec![
            exactly(EXECUTE, code("a = 5"), &[""]),
            exactly(EXECUTE, code("a + 1"), &["6"]),
            exactly(
                EXECUTE,
                code("import pathlib; str(pathlib.Path.cwd())"),
                &["'/work'"],
            ),
            exactly(
                EXECUTE,
                code("import math\nprint('printed')\nmath.sqrt(4)"),
                &["printed\n2.0"],
            ),
            fails(
                EXECUTE,
                code("print('before'); 1 / 0"),
                &[
                    "Error: ZeroDivisionError: division by zero\n",
                    "Traceback",
                    "before",
                ],
            ),
            words(EXECUTE, code("print('x' * 9000)"), &["xxxx"]),
            exactly(EXECUTE, code("clear"), &["Globals cleared"]),
            fails(EXECUTE, code("a"), &["NameError"]),
            exactly(EXECUTE, code("exit"), &["Goodbye!"]),
            exactly(
                EXECUTE,
                code("with open('kept', 'w') as file: file.write('content')"),
                &[""],
            ),
            exactly(
                STOP,
                json!({"name": name, "delete_service": false}),
                &["Code execution service stopped."],
            ),
            no_service(),
            fails(
                STOP,
                json!({"name": name, "delete_service": false}),
                &["is not running."],
            ),
            exactly(
                REUSE,
                json!({"name": name}),
                &["Code execution service restarted."],
            ),
            exactly(EXECUTE, code("open('kept').read()"), &["'content'"]),
            exactly(
                STOP,
                json!({"name": name}),
                &["Code execution service stopped."],
            ),
            no_service(),
            fails(
                REUSE,
                json!({"name": name}),
                &["Code execution service is not running."],
            ),
            fails(
                STOP,
                json!({"name": name}),
                &["Code execution service is not running."],
            ),
            fails(
                STOP,
                json!({"name": "default"}),
                &["Code execution service is not running."],
            ),
            fails(STOP, json!({}), &["Code execution service is not running."]),
        ],
    );
    // As the document has it: without a name.
    started(server, json!({}));
    go_through(
        server,
        vec![
            exactly(EXECUTE, code("print('Hello, World!')"), &["Hello, World!"]),
            exactly(STOP, json!({}), &["Code execution service stopped."]),
            no_service(),
        ],
    );
}

#[test]
fn several_services_can_be_started_and_the_last_one_is_meant() {
    let server = start("code-executer", MINIMAL);
    let first = started(&server, json!({"dependencies": []}));
    text(&server, EXECUTE, code("where = 'first'"));
    let second = started(&server, json!({"dependencies": "[]"}));
    assert_ne!(first, second);
    go_through(
        &server,
        vec![
            fails(EXECUTE, code("where"), &["NameError"]),
            exactly(
                REUSE,
                json!({"name": first}),
                &["Code execution service restarted."],
            ),
            exactly(EXECUTE, code("where"), &["'first'"]),
            exactly(
                STOP,
                json!({"name": first, "delete_service": "true"}),
                &[&format!(
                    "Code execution service stopped. Code runs in the service {second} now."
                )],
            ),
            fails(EXECUTE, code("where"), &["NameError"]),
            exactly(EXECUTE, code("where = 'second'"), &[""]),
        ],
    );
    let third = started(&server, json!({}));
    go_through(
        &server,
        vec![
            // Another one than that in which code runs.
            exactly(
                STOP,
                json!({"name": second, "delete_service": false}),
                &["Code execution service stopped."],
            ),
            exactly(
                REUSE,
                json!({"name": second}),
                &["Code execution service restarted."],
            ),
            // Without a name the one is meant in which code runs.
            exactly(
                STOP,
                json!({}),
                &[&format!(
                    "Code execution service stopped. Code runs in the service {third} now."
                )],
            ),
            fails(REUSE, json!({"name": second}), &["is not running."]),
            exactly(
                STOP,
                json!({"name": null}),
                &["Code execution service stopped."],
            ),
            no_service(),
        ],
    );
}

#[test]
fn dependencies_are_there_from_the_start_or_there_is_no_service() {
    let index = local_index();
    dependencies(&start_with_index("code-executer", &index, |_| {}));
}

/// Starts services with packages of the index on this machine, on any backend.
pub(super) fn dependencies(server: &Server) {
    server
        .call(START, json!({"dependencies": ["no-such-package"]}))
        .assert_refused(&["Error: "]);
    server
        .call(START, json!({"dependencies": ["pure; touch x"]}))
        .assert_refused(&["Error: "]);
    go_through(server, vec![no_service()]);
    started(server, json!({"dependencies": ["pure", "leaf"]}));
    go_through(
        server,
        vec![
            exactly(
                EXECUTE,
                code("import pure, leaf; (pure.value, leaf.name)"),
                &["(2, 'leaf')"],
            ),
            fails(
                EXECUTE,
                code("import requests"),
                &["dangerous operations", "Import 'requests' is blocked"],
            ),
        ],
    );
    // A dependency can be imported although the list of that server blocks it; what Python itself
    // has cannot.
    started(server, json!({"dependencies": ["requests"]}));
    go_through(
        server,
        vec![
            exactly(EXECUTE, code("import requests; requests.value"), &["9"]),
            fails(EXECUTE, code("import os"), &["'os'"]),
            exactly(EXECUTE, code("clear"), &["Globals cleared"]),
            exactly(EXECUTE, code("import requests; requests.value"), &["9"]),
        ],
    );
}

#[test]
fn the_example_with_numpy_works() {
    // With the packages that users have by default, and the dependencies of the document.
    let server = start("code-executer", &[]);
    let dependencies = ["numpy", "pandas", "matplotlib"];
    started(&server, json!({"dependencies": dependencies}));
    let example = "import numpy as np\nvalues = np.array([1, 2, 3, 4, 5])\nprint(values.mean())";
    let others = "import pandas, matplotlib.pyplot\nint(pandas.Series([1, 2]).sum())";
    go_through(
        &server,
        vec![
            exactly(EXECUTE, code(example), &["3.0"]),
            exactly(EXECUTE, code(others), &["3"]),
        ],
    );
}

#[test]
fn no_port_is_opened_for_a_service() {
    let server = start("code-executer", MINIMAL);
    started(&server, json!({}));
    // A name by which the host finds the process of the service (15 is PR_SET_NAME).
    let name = "import ctypes; ctypes.CDLL(None).prctl(15, b'the-service', 0, 0, 0)";
    go_through(&server, vec![exactly(EXECUTE, code(name), &["0"])]);
    let started = descendants(server.process_id());
    assert!(
        started.iter().any(|process| process.name == "the-service"),
        "{started:?}"
    );
    for process in started {
        assert_eq!(listening_ports(process.pid), [0; 0], "{process:?}");
    }
    // Control: a port that is open.
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = own.local_addr().unwrap().port();
    assert!(listening_ports(std::process::id()).contains(&port));
}

/// A process, and everything that it has started.
fn descendants(process: u32) -> Vec<HostProcess> {
    let (mut found, mut others): (Vec<_>, Vec<_>) = processes()
        .into_iter()
        .partition(|each| each.pid == process);
    let mut next = 0;
    while let Some(parent) = found.get(next).map(|each| each.pid) {
        let (children, rest) = others.into_iter().partition(|each| each.parent == parent);
        found.extend::<Vec<_>>(children);
        others = rest;
        next += 1;
    }
    found
}

#[test]
fn dangerous_code_is_refused_by_what_it_means() {
    let server = start("code-executer", MINIMAL);
    started(&server, json!({}));
    let refused = "Error: The code contains dangerous operations and cannot be executed.";
    go_through(
        &server,
        vec![
            fails(
                EXECUTE,
                code("import os"),
                &[
                    "Error: The code contains dangerous operations and cannot be executed.",
                    "'os'",
                ],
            ),
            fails(
                EXECUTE,
                code("from  subprocess import run"),
                &["'subprocess'"],
            ),
            fails(EXECUTE, code("eval('1')"), &["'eval'"]),
            fails(EXECUTE, code("!ls"), &["Shell commands"]),
            exactly(
                EXECUTE,
                code("print('import os; eval(1)')"),
                &["import os; eval(1)"],
            ),
            exactly(
                EXECUTE,
                code("model = lambda: 1\nmodel.eval = lambda: 'method'\nmodel.eval()"),
                &["'method'"],
            ),
        ],
    );
    assert!(
        server
            .call(EXECUTE, code("import sys"))
            .text()
            .starts_with(refused)
    );
}

#[test]
fn a_service_whose_python_ended_goes_on_with_a_new_one_and_says_so() {
    let server = start("code-executer", MINIMAL);
    started(&server, json!({}));
    go_through(
        &server,
        vec![
            fails(
                EXECUTE,
                code("import signal; signal.raise_signal(9)"),
                &["Error: Python ended", "starts Python anew"],
            ),
            words(
                EXECUTE,
                code("1 + 1"),
                &["(Python was started anew, because ", "\n2"],
            ),
            fails(
                EXECUTE,
                code("import signal; signal.raise_signal(9)"),
                &["Error: Python ended"],
            ),
            // The first call after that is looked at too.
            fails(
                EXECUTE,
                code("import os"),
                &[
                    "dangerous operations",
                    "'os'",
                    "(Python was started anew, because ",
                ],
            ),
            exactly(EXECUTE, code("1 + 1"), &["2"]),
        ],
    );
}

#[test]
fn the_prompt_is_listed_and_holds_the_expression() {
    let server = start("code-executer", MINIMAL);
    let prompts = server.request("prompts/list", json!({}))["result"]["prompts"].clone();
    assert_eq!(
        (&prompts[0]["name"], &prompts[0]["title"]),
        (&json!("math_evaluation"), &json!("Mathematics Solver"))
    );
    assert_eq!(prompts[0]["arguments"][0]["name"], "expression");
    let answer = server.request(
        "prompts/get",
        json!({"name": "math_evaluation", "arguments": {"expression": "2 ** 0.5"}}),
    );
    let said = answer["result"]["messages"][0]["content"]["text"]
        .as_str()
        .unwrap();
    assert!(
        said.contains("2 ** 0.5") && said.contains("SymPy"),
        "{said}"
    );
    let refused = server.request("prompts/get", json!({"name": "math_evaluation"}));
    assert!(
        refused["error"]["message"]
            .as_str()
            .unwrap()
            .contains("expression"),
        "{refused}"
    );
}
