//! What users of the four servers rely on beyond the first calls of their documents: sizes, limits,
//! names, and what happens at the edges.

use std::fs;

use serde_json::{Value, json};

use super::{Case, call, exactly, fails, go_through, start, text, words};
use crate::support::server::{Era, MINIMAL, Server, finished, program};

const CELL: &str = "execute_ipython_cell";
const TRANSIENT: &str = "execute-transient";
const PERSISTENT: &str = "execute-persistent";
const PYTHON: &str = "execute_python";

fn cell(code: &str) -> Value {
    json!({"code": code})
}

fn cell_with(code: &str, name: &str, value: Value) -> Value {
    let mut arguments = cell(code);
    arguments[name] = value;
    arguments
}

/// Starts a call and waits until its code says that it runs.
fn begun<'a>(
    server: &'a Server,
    tool: &str,
    arguments: Value,
) -> crate::support::server::Pending<'a> {
    let running = server.begin(tool, arguments);
    server.notification(|message| {
        message["params"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("begun"))
    });
    running
}

#[test]
fn cells_of_ipybox_are_those_of_a_notebook() {
    go_through(
        &start("ipybox", MINIMAL),
        vec![
            exactly(
                CELL,
                cell("import math\ndef area(r):\n    return round(math.pi * r * r, 2)"),
                &[""],
            ),
            exactly(CELL, cell("area(1)"), &["3.14"]),
            exactly(
                CELL,
                cell("lines = !printf 'a\\nb\\n'\nlines"),
                &["['a', 'b']"],
            ),
            exactly(
                CELL,
                cell("%%bash\necho from bash\necho again >&2"),
                &["from bash\nagain"],
            ),
            fails(
                CELL,
                cell("%%bash\nexit 3"),
                &["CalledProcessError", "exit status 3"],
            ),
            words(CELL, cell("%pwd"), &["/"]),
            exactly(CELL, cell("print('10 %\\r20 %\\r30 %')"), &["30 %"]),
            exactly(
                CELL,
                cell(
                    "from IPython.display import clear_output\nprint('old'); clear_output(); \
                     print('new')",
                ),
                &["new"],
            ),
            exactly(CELL, cell("print('\\x1b[31mred\\x1b[0m')"), &["red"]),
            exactly(
                CELL,
                cell(
                    "import threading\ngo = threading.Event()\nlate = \
                     threading.Thread(target=lambda: go.wait() and print('late')); late.start()",
                ),
                &[""],
            ),
            exactly(
                CELL,
                cell("go.set(); late.join(); print('mine')"),
                &["mine"],
            ),
        ],
    );
}

#[test]
fn texts_of_any_size_cross_whole_where_the_caller_wants_them() {
    let all = |code: &str| cell_with(code, "max_output_chars", json!(1_000_000));
    let long_input: String = (0..10_000)
        .map(|number| format!("v{number} = {number}\n"))
        .collect::<String>()
        + "v9999";
    let lines = "x\n".repeat(500_000);
    let pieces: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let slow = "import time\nfor n in range(100):\n    print(n, flush=True); time.sleep(0.005)";
    go_through(
        &start("ipybox", MINIMAL),
        vec![
            exactly(CELL, all("print('x' * 500_000)"), &[&"x".repeat(500_000)]),
            exactly(CELL, all("print('x\\n' * 500_000)"), &[lines.trim_end()]),
            exactly(CELL, cell(&long_input), &["9999"]),
            exactly(CELL, cell(slow), &[&pieces.join("\n")]),
            // An error is cut where text is, and says so.
            fails(
                CELL,
                cell_with(
                    "raise ValueError('x' * 9000)",
                    "max_output_chars",
                    json!(100),
                ),
                &[
                    "ValueError: xxx",
                    "[Output truncated: exceeded 100 character limit]",
                ],
            ),
        ],
    );
}

#[test]
fn limits_that_make_no_sense_are_refused_and_name_those_that_do() {
    let timeout = |value: Value| cell_with("1", "timeout", value);
    let characters = |value: Value| cell_with("1", "max_output_chars", value);
    let mut cases = Vec::new();
    for value in [
        json!(0),
        json!(-1),
        json!(1e12),
        json!("soon"),
        json!(true),
        json!([]),
    ] {
        cases.push(fails(
            CELL,
            timeout(value),
            &["Error executing tool execute_ipython_cell: ", "\"timeout\""],
        ));
    }
    for value in [json!(0), json!(-1), json!(1e12), json!("many"), json!(1.5)] {
        cases.push(fails(
            CELL,
            characters(value),
            &["\"max_output_chars\"", "1000000"],
        ));
    }
    // Controls.
    cases.push(exactly(CELL, timeout(json!(0.5)), &["1"]));
    cases.push(exactly(CELL, characters(json!(1)), &["1"]));
    go_through(&start("ipybox", MINIMAL), cases);
}

#[test]
fn code_that_ignores_its_time_limit_is_ended_and_the_answer_says_what_is_lost() {
    let stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    go_through(
        &start("ipybox", MINIMAL),
        vec![
            exactly(CELL, cell("kept = open('kept', 'w').write('file')"), &[""]),
            fails(
                CELL,
                cell_with(stubborn, "timeout", json!(0.5)),
                &[
                    "exceeded timeout of 0.50s. The code ignored the interrupt",
                    "files in the working folder are kept",
                ],
            ),
            exactly("reset", json!({}), &[]),
            exactly(CELL, cell("open('kept').read()"), &["'file'"]),
        ],
    );
    let pyexec = start("pyexec", &[MINIMAL, &["--timeout", "1s"]].concat());
    go_through(
        &pyexec,
        vec![
            fails(
                PYTHON,
                cell(stubborn),
                &["✗ Execution timed out after 1 seconds. The code ignored the interrupt"],
            ),
            words(
                PYTHON,
                cell("1 + 1"),
                &["(Python was started anew, because ", "2"],
            ),
        ],
    );
}

#[test]
fn a_call_that_is_cancelled_stops_its_code_in_every_profile() {
    let arguments = |more: Value| {
        let mut arguments =
            cell("state_of_it = 'begun'\nprint('begun', flush=True)\nwhile True: pass");
        arguments
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        arguments
    };
    // Later calls of a session are served when the cancelled one has ended.
    for (profile, tool, more, after) in [
        (
            "ipybox",
            CELL,
            json!({}),
            exactly(CELL, cell("state_of_it"), &["'begun'"]),
        ),
        (
            "pyexec",
            PYTHON,
            json!({}),
            exactly(PYTHON, cell("state_of_it"), &["'begun'"]),
        ),
        (
            "python-docker-mcp",
            PERSISTENT,
            json!({"session_id": "s"}),
            words(
                PERSISTENT,
                json!({"code": "print(state_of_it)", "session_id": "s"}),
                &["\n\nbegun\n"],
            ),
        ),
        (
            "code-executer",
            "execute_code",
            json!({}),
            exactly("execute_code", cell("state_of_it"), &["'begun'"]),
        ),
    ] {
        let server = start(profile, MINIMAL);
        if profile == "code-executer" {
            text(&server, "start_code_executer", json!({}));
        }
        let running = begun(&server, tool, arguments(more));
        running.cancel();
        go_through(&server, vec![after]);
        assert!(
            !running.is_answered(),
            "nothing is sent for a cancelled request"
        );
    }
}

#[test]
fn sessions_run_side_by_side_and_each_takes_its_calls_in_turn() {
    let server = start("pyexec", MINIMAL);
    let within = |session: &str, code: &str| json!({"code": code, "session_id": session});
    let running = begun(
        &server,
        PYTHON,
        within("a", "print('begun', flush=True)\nwhile True: pass"),
    );
    go_through(
        &server,
        vec![exactly(PYTHON, within("b", "order = [1]; order"), &["[1]"])],
    );
    assert!(!running.is_answered(), "`b` was answered while `a` ran");
    running.cancel();
    let first = server.begin(
        PYTHON,
        within("b", "n = sum(range(3_000_000)); order.append(2)"),
    );
    let second = server.begin(PYTHON, within("b", "order.append(3); order"));
    assert_eq!(second.result().text(), "[1, 2, 3]");
    assert!(!first.result().is_error());
}

#[test]
fn names_that_are_no_names_of_sessions_are_refused_in_every_profile() {
    let long = "x".repeat(65);
    for name in [
        "..", ".", "../x", "a/b", "/etc", "a b", "a\nb", "a\u{0}b", "ä", &long,
    ] {
        for (profile, cases) in [
            (
                "python-docker-mcp",
                vec![
                    fails(
                        PERSISTENT,
                        json!({"code": "1", "session_id": name}),
                        &["Error executing execute-persistent: "],
                    ),
                    fails(
                        "cleanup-session",
                        json!({"session_id": name}),
                        &["Error executing cleanup-session: a session id is 1 to 64 letters"],
                    ),
                ],
            ),
            (
                "pyexec",
                vec![fails(
                    PYTHON,
                    json!({"code": "1", "session_id": name}),
                    &["✗ Error: ", "1 to 64 letters"],
                )],
            ),
            (
                "code-executer",
                vec![fails("reuse_code_executer", json!({"name": name}), &[])],
            ),
        ] {
            go_through(shared(profile), cases);
        }
    }
    let longest = "x".repeat(64);
    go_through(
        shared("pyexec"),
        vec![exactly(
            PYTHON,
            json!({"code": "1", "session_id": longest}),
            &["1"],
        )],
    ); // control
}

/// One server for each profile, for tests that start no sessions that could be in their way.
fn shared(profile: &str) -> &'static Server {
    use std::sync::LazyLock;
    static SERVERS: [LazyLock<Server>; 3] = [
        LazyLock::new(|| start("python-docker-mcp", MINIMAL)),
        LazyLock::new(|| start("pyexec", MINIMAL)),
        LazyLock::new(|| start("code-executer", MINIMAL)),
    ];
    let names = ["python-docker-mcp", "pyexec", "code-executer"];
    &SERVERS[names
        .iter()
        .position(|name| *name == profile)
        .expect("it is one of these")]
}

#[test]
fn sessions_beyond_the_limit_are_refused_in_the_words_of_the_profile() {
    let one = [MINIMAL, &["--max-sessions", "1"]].concat();
    let within = |session: &str| json!({"code": "print(1)", "session_id": session});
    go_through(
        &start("python-docker-mcp", &one),
        vec![
            words(PERSISTENT, within("a"), &["\n\n1\n"]),
            fails(
                PERSISTENT,
                within("b"),
                &["Error executing execute-persistent: no new session was created, because 1"],
            ),
            words(
                "cleanup-session",
                json!({"session_id": "a"}),
                &["cleaned up"],
            ),
            words(PERSISTENT, within("b"), &["\n\n1\n"]),
        ],
    );
    go_through(
        &start("pyexec", &one),
        vec![
            exactly(PYTHON, within("a"), &["1"]),
            fails(
                PYTHON,
                within("b"),
                &["✗ Error executing code: no new session was created, because 1"],
            ),
        ],
    );
    go_through(
        &start("code-executer", &one),
        vec![
            words("start_code_executer", json!({}), &["started with the name"]),
            fails(
                "start_code_executer",
                json!({}),
                &["Error: no new session was created, because 1"],
            ),
        ],
    );
}

#[test]
fn no_process_and_no_package_of_a_transient_run_is_there_in_the_next() {
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
    let see = "import os\nseen = [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc') \
               if p.isdigit()]\nprint(any('4321' in line for line in seen), \
               os.path.exists('/tmp/mine.py'))";
    // The kernel lets `Popen` return before the new program's arguments can be read, so the program
    // itself reports that it runs.
    let leave = format!(
        "import subprocess\nleft = subprocess.Popen(['sh', '-c', 'echo runs; sleep 4321; :'], \
         stdout=subprocess.PIPE, start_new_session=True)\nleft.stdout.readline()\n\
         open('/tmp/mine.py', 'w').close()\n{see}"
    );
    go_through(
        &server,
        vec![
            words(TRANSIENT, cell(&leave), &["\n\nTrue True\n"]), // control
            words(TRANSIENT, cell(see), &["\n\nFalse False\n"]),
            words(TRANSIENT, cell(see), &["\n\nFalse False\n"]),
        ],
    );
}

#[test]
fn mistakes_in_the_options_of_other_servers_end_the_start_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken.yaml");
    fs::write(&broken, "docker: [").unwrap();
    let cases: [(&str, &[&str], &str); 7] = [
        (
            "ipybox",
            &["--container-env-var", "NAME"],
            "must be KEY=VALUE",
        ),
        ("ipybox", &["--container-bind", "only-one"], "only-one"),
        (
            "ipybox",
            &["--container-env-file", "missing.env"],
            "missing.env",
        ),
        ("ipybox", &["--allowed-domain", "not a name"], "not a name"),
        ("ipybox", &["--images-dir", "../up"], "images_dir"),
        ("python-docker-mcp", &[], "broken.yaml"),
        ("pyexce", &[], "pyexec"),
    ];
    for (profile, flags, words) in cases {
        let mut command = program();
        command
            .current_dir(folder.path())
            .env("PYTHON_DOCKER_MCP_CONFIG", &broken);
        command.args(["mcp", "--profile", profile]).args(flags);
        let (status, output, errors) = finished(&mut command);
        assert!(
            status != Some(0) && output.is_empty(),
            "{profile} {flags:?}: {status:?} {output}"
        );
        assert!(errors.contains(words), "{profile} {flags:?}: {errors}");
    }
}

#[test]
fn folders_that_options_name_are_made_when_they_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program();
    command
        .current_dir(folder.path())
        .args(["mcp", "--profile", "ipybox"])
        .args(MINIMAL);
    command.args([
        "--workspace",
        "new/space",
        "--container-bind",
        "new/bound:inner",
    ]);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    text(
        &server,
        CELL,
        cell("open('inner/file', 'w').write('x'); open('own', 'w').write('y')"),
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("new/bound/file")).unwrap(),
        "x"
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("new/space/own")).unwrap(),
        "y"
    );
}

/// What a profile says never holds codes that colour a terminal.
#[test]
fn failures_have_no_colours_in_any_profile() {
    let wrong = "def outer():\n    return undefined_name\nouter()";
    let cases: [(&str, Case); 4] = [
        (
            "code-executer",
            fails(
                "execute_code",
                cell(wrong),
                &["NameError: name 'undefined_name' is not defined"],
            ),
        ),
        (
            "python-docker-mcp",
            fails(
                TRANSIENT,
                cell(wrong),
                &["NameError: name 'undefined_name' is not defined"],
            ),
        ),
        (
            "pyexec",
            fails(
                PYTHON,
                cell(wrong),
                &["NameError: name 'undefined_name' is not defined"],
            ),
        ),
        (
            "ipybox",
            fails(
                CELL,
                cell(wrong),
                &["NameError: name 'undefined_name' is not defined"],
            ),
        ),
    ];
    for (profile, case) in cases {
        let server = start(profile, MINIMAL);
        if profile == "code-executer" {
            text(&server, "start_code_executer", json!({}));
        }
        let (blocks, _) = call(&server, case.tool, case.arguments.clone());
        assert!(
            !blocks[0].contains('\u{1b}') && blocks[0].contains("Traceback"),
            "{blocks:?}"
        );
        go_through(&server, vec![case]);
    }
}
