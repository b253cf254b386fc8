//! Tools of another MCP server in cells, with the built program: typed values in and out, many at
//! once, and what a sandbox cannot do.
//!
//! The other server is `tests/tools/notes_server.py`, a program of the standard library. It logs
//! what it is asked, so that a test can see what reached it. `faults` has servers that do not
//! behave, `records` what operators see and change, `real` servers of other makers; `elsewhere` are
//! servers behind HTTP.

mod elsewhere;
mod faults;
mod real;
mod records;

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::client::Raw;
use crate::support::ends_within;
use crate::support::native::host_python;
use crate::support::server::{Era, MINIMAL, Server, Session, TEST_TIMEOUT, program};
use crate::support::service::Service;

/// A server of another maker, and the log of what it was asked.
struct Notes {
    folder: TempDir,
}

impl Notes {
    fn new() -> Notes {
        Notes {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn params(&self) -> Value {
        self.params_of("first")
    }

    fn params_of(&self, edition: &str) -> Value {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/notes_server.py");
        let log = self.folder.path().join("log");
        json!({"command": host_python("minimal"), "args": [script, log, edition]})
    }

    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn count(&self, line: &str) -> usize {
        self.lines().iter().filter(|found| *found == line).count()
    }

    /// The process that was started last.
    fn process(&self) -> OwnedFd {
        let lines = self.lines();
        let started = lines
            .iter()
            .rev()
            .find(|line| line.starts_with("started"))
            .expect("it was started");
        let process = started
            .rsplit(' ')
            .next()
            .and_then(|word| word.parse().ok())
            .and_then(Pid::from_raw);
        rustix::process::pidfd_open(process.unwrap(), PidfdFlags::empty()).expect("it runs")
    }

    /// A file in the form of other clients, with servers beside this one.
    fn file(&self, more: Value) -> PathBuf {
        let mut servers = json!({"notes": self.params()});
        servers
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let file = self.folder.path().join("servers.json");
        fs::write(&file, json!({"mcpServers": servers}).to_string()).unwrap();
        file
    }
}

/// Waits for the end of a process.
fn wait_for_the_end_of(process: &OwnedFd) {
    assert!(ends_within(process, TEST_TIMEOUT), "the process goes on");
}

fn register(server: &Server, name: &str, params: Value) {
    let result = server.call(
        "register_mcp_server",
        json!({"server_name": name, "server_params": params}),
    );
    assert!(!result.is_error(), "{}", result.text());
}

/// A server with `notes` registered.
fn with_notes(notes: &Notes) -> Server {
    let server = Server::start(MINIMAL);
    register(&server, "notes", notes.params());
    server
}

/// Runs a cell that must raise, and returns its text.
fn raised(session: &Session<'_>, code: &str, error: &str) -> String {
    let result = session.run(code);
    assert_eq!(
        result.structured()["error"]["name"],
        error,
        "{}",
        result.text()
    );
    result.text().to_owned()
}

#[test]
fn a_cell_calls_a_tool_with_typed_values_and_gets_typed_values() {
    let notes = Notes::new();
    let server = Server::start(MINIMAL);
    let registered = server.call(
        "register_mcp_server",
        json!({"server_name": "notes", "server_params": notes.params()}),
    );
    assert!(
        registered
            .text()
            .contains("from mcptools.notes.add_up import Params, run"),
        "{}",
        registered.text()
    );
    assert_eq!(
        registered.structured()["tools"].as_array().unwrap().len(),
        7
    );
    let session = server.session();
    let sum = session.text(
        "from mcptools.notes.add_up import Params, Result, run\nr = \
                            run(Params(first=40, second=2))\n(r, type(r) is Result)",
    );
    assert_eq!(sum, "(Result(sum=42), True)");
    assert_eq!(
        session.text("from mcptools.notes import echo\nstr(echo.run(echo.Params(text='żółw')))"),
        "'first: żółw'"
    );
    let picture = session.run("from mcptools.notes import picture\npicture.run(picture.Params())");
    assert_eq!(picture.images()[0].0, "image/png");
    let failed = raised(
        &session,
        "from mcptools.notes import fail\nfail.run(fail.Params())",
        "ToolError",
    );
    assert!(failed.contains("ToolError: the disk is full"), "{failed}");
    assert!(
        failed.contains("[1 of 1 calls of MCP tools failed: notes.fail (tool_error)]"),
        "{failed}"
    );
    // Pydantic refuses before anything is asked, and the host refuses what goes around Pydantic.
    raised(&session, "Params(first='x', second=2)", "ValidationError");
    let around = "import mcptools\nmcptools.call('notes', 'add-up', {'first': 'x', 'second': 2})";
    raised(&session, around, "ToolCallError");
    let caught = "try:\n    mcptools.call('notes', 'add-up', {'first': 'x'})\nexcept \
                  mcptools.ToolCallError as e: print(e.reason)";
    let said = "invalid\n[1 of 1 calls of MCP tools failed: notes.add-up (invalid)]";
    assert_eq!(
        session.text(caught),
        said,
        "what the code keeps to itself is told"
    );
    assert_eq!(
        notes.count("call add-up"),
        1,
        "what does not fit is not sent"
    );
    let listed = server.call("list_mcp_servers", json!({}));
    assert_eq!(
        listed.text(),
        "notes (stdio), connected; 7 tools in mcptools.notes"
    );
}

#[test]
fn calls_of_tasks_and_threads_are_under_way_at_once() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let tasks = "import asyncio\nfrom mcptools.notes import echo\n\
                 said = await asyncio.gather(*(echo.run_async(echo.Params(text=str(n))) for n in \
                 range(150)))\n\
                 [str(each) for each in said] == [f'first: {n}' for n in range(150)]";
    assert_eq!(session.text(tasks), "True");
    let threads = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(20) \
                   as pool:\n    \
                   said = list(pool.map(lambda n: str(echo.run(echo.Params(text=str(n)))), \
                   range(60)))\n\
                   said == [f'first: {n}' for n in range(60)]";
    assert_eq!(session.text(threads), "True");
    let result = session.run("str(echo.run(echo.Params(text='one more')))");
    assert_eq!(
        result.structured()["tool_calls"],
        json!({"total": 1, "failed": 0})
    );
    assert_eq!(notes.count("call echo"), 211);
}

#[test]
fn a_cell_that_is_cancelled_cancels_its_calls_and_progress_is_told() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let pending = session.begin(
        "from mcptools.notes import wait\nwait.run(wait.Params())",
        json!({}),
    );
    server.notification(|message| {
        let told = message["params"]["message"].as_str().unwrap_or_default();
        message["params"]["progressToken"] == pending.id()
            && told.contains("waiting to be cancelled")
    });
    pending.cancel();
    assert!(session.text("'goes on'").contains("goes on"));
    // The session is asked for what only happens after the server has heard of it.
    let heard = "from mcptools.notes import echo\nstr(echo.run(echo.Params(text='after')))";
    assert_eq!(session.text(heard), "'first: after'");
    crate::support::server::with_timeout({
        let log = notes.folder.path().join("log");
        move || {
            while !fs::read_to_string(&log).unwrap().contains("cancelled wait") {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn a_module_is_imported_with_well_under_a_second_of_work() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    // The time of the processor, which a busy machine does not lengthen.
    let code = "import time\nbegun = time.process_time()\nfrom mcptools.notes.add_up import \
                Params, run\ntime.process_time() - begun < 0.9";
    assert_eq!(server.session().text(code), "True");
}

#[test]
fn a_server_that_is_registered_again_takes_effect_without_a_reset() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let said = "from mcptools.notes import echo\nstr(echo.run(echo.Params(text='x')))";
    assert_eq!(session.text(said), "'first: x'");
    raised(&session, "from mcptools.notes import newer", "ImportError");
    register(&server, "notes", notes.params_of("second"));
    assert_eq!(session.text(said), "'second: x'");
    assert_eq!(
        session.text("from mcptools.notes import newer\nstr(newer.run())"),
        "'new'"
    );
    assert!(
        session
            .text("print(echo.run.__doc__)")
            .contains("second edition")
    );
}

#[test]
fn a_server_that_dies_is_connected_again_and_its_call_is_not_repeated() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let died = raised(
        &session,
        "from mcptools.notes import crash\ncrash.run()",
        "ToolCallError",
    );
    assert!(
        died.contains("is not repeated") && died.contains("(unavailable)"),
        "{died}"
    );
    assert_eq!(
        session.text("from mcptools.notes import echo\nstr(echo.run(echo.Params(text='x')))"),
        "'first: x'"
    );
    assert_eq!(notes.count("call crash"), 1);
    assert_eq!(
        notes
            .lines()
            .iter()
            .filter(|line| line.starts_with("started"))
            .count(),
        2
    );
}

#[test]
fn a_fork_can_be_given_fewer_servers() {
    let (notes, others) = (Notes::new(), Notes::new());
    let server = with_notes(&notes);
    register(&server, "others", others.params());
    let session = server.session();
    let use_both = "import mcptools\n[str(mcptools.call(name, 'echo', {'text': 'x'})) for name in \
                    ('notes', 'others')]";
    assert_eq!(session.text(use_both), "['first: x', 'first: x']");
    let fork = |name: &str, arguments: Value| {
        let mut all = json!({"names": [name]});
        all.as_object_mut()
            .unwrap()
            .extend(arguments.as_object().unwrap().clone());
        session.call("fork_session", all)
    };
    assert!(!fork("whole", json!({})).is_error());
    assert!(!fork("less", json!({"mcp_servers": ["others"]})).is_error());
    let whole = Session {
        server: &server,
        id: "whole".to_owned(),
    };
    assert_eq!(
        whole.text(use_both),
        "['first: x', 'first: x']",
        "the control"
    );
    let less = Session {
        server: &server,
        id: "less".to_owned(),
    };
    assert!(raised(&less, use_both, "ToolCallError").contains("there is no MCP server \"notes\""));
    assert_eq!(
        less.text("import os\nsorted(os.listdir('mcptools'))[-1]"),
        "'others'"
    );
    assert_eq!(
        notes.count("call echo"),
        2,
        "what is not granted reaches nobody"
    );
    fork("wrong", json!({"mcp_servers": ["absent"]})).assert_refused(&["`absent`"]);
}

#[test]
fn a_sandbox_names_servers_and_nothing_else() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let mark = notes.folder.path().join("mark");
    let code = format!(
        "from cellblock_runner import host_calls\n\
         def attempt(**more):\n    return host_calls.ask('call_tool', **{{'server': 'notes', \
         'tool': 'echo', 'arguments': {{'text': 'x'}}, **more}})\n\
         outside = dict(command='/bin/sh', args=['-c', 'touch {mark}'], url='http://127.0.0.1:9/', \
         headers={{'a': 'b'}}, env={{'A': 'b'}}, owner='somebody')\n\
         print([attempt(server=name, **outside).get('reason') for name in ('/bin/sh', '../notes', \
         'http://127.0.0.1:9/', 'absent')])\n\
         print(attempt(**outside)['ok'], attempt(tool='../echo').get('reason'), \
         host_calls.ask('register', **outside)['ok'])",
        mark = mark.display()
    );
    let said = session.text(&code);
    assert!(
        said.starts_with("['unknown', 'unknown', 'unknown', 'unknown']\nTrue unknown False\n"),
        "{said}"
    );
    assert!(!mark.exists());
    assert_eq!(
        notes.count("call echo"),
        1,
        "the control: what is registered is called, with nothing of what was added"
    );
}

#[test]
fn credentials_are_filled_in_outside_and_are_never_inside() {
    let notes = Notes::new();
    let mut command = program();
    command
        .arg("mcp")
        .args(MINIMAL)
        .env("NOTES_TOKEN", "canary-4711");
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    let mut params = notes.params();
    params["env"] = json!({"TOKEN": "Bearer ${NOTES_TOKEN}"});
    register(&server, "notes", params.clone());
    let session = server.session();
    let found = "import os, pathlib\nfrom mcptools.notes import variable\n\
                 told = str(variable.run(variable.Params(name='TOKEN')))\n\
                 texts = [path.read_text() for path in pathlib.Path('mcptools').rglob('*') if \
                 path.suffix == '.py']\n\
                 (told, any('canary' in text for text in texts), any('canary' in value for value \
                 in os.environ.values()))";
    assert_eq!(
        session.text(found),
        "('Bearer [hidden]', False, False)",
        "nor does it come back"
    );
    assert_eq!(
        notes.count("variable Bearer canary-4711"),
        1,
        "the control: the server has it"
    );
    params["env"] = json!({"TOKEN": "${NOTES_TOKEN}", "A": "${ABSENT_A}", "B": "${ABSENT_B}"});
    let refused = server.call(
        "register_mcp_server",
        json!({"server_name": "more", "server_params": params}),
    );
    refused.assert_refused(&["ABSENT_A, ABSENT_B"]);
    assert!(!refused.text().contains("canary"));
    drop(session);
    assert!(!server.finish().contains("canary"), "nor is it in the log");
}

#[test]
fn an_unregistered_server_leaves_nothing_but_what_the_user_made() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let session = server.session();
    let mine = "import os\nfrom mcptools.notes import echo\nos.makedirs('gentools/report')\n\
                open('gentools/report/api.py', 'w').write('x = 1')\nopen('mcptools/notes/mine.py', \
                'w').write('y = 2')";
    session.text(mine);
    let process = notes.process();
    assert!(
        !server
            .call("unregister_mcp_server", json!({"server_name": "notes"}))
            .is_error()
    );
    wait_for_the_end_of(&process);
    let left = "import pathlib\nsorted(str(path) for path in pathlib.Path('.').rglob('*.py'))";
    assert_eq!(
        session.text(left),
        "['gentools/report/api.py', 'mcptools/notes/mine.py']"
    );
    raised(&session, "from mcptools.notes import echo", "ImportError");
    server
        .call("unregister_mcp_server", json!({"server_name": "notes"}))
        .assert_refused(&["there is no server"]);
    assert_eq!(
        server.call("list_mcp_servers", json!({})).text(),
        "No MCP server is registered."
    );
}

#[test]
fn a_program_of_another_maker_ends_with_the_server_however_that_ends() {
    let notes = Notes::new();
    let server = with_notes(&notes);
    let process = notes.process();
    rustix::process::kill_process(
        Pid::from_raw(server.process_id() as i32).unwrap(),
        Signal::KILL,
    )
    .unwrap();
    wait_for_the_end_of(&process);
}

#[test]
fn servers_of_the_configuration_are_there_without_being_asked_for() {
    let notes = Notes::new();
    let file = notes.file(json!({"broken": {"command": "/nowhere/at-all"}}));
    let server =
        Server::start(&[MINIMAL, &["--mcp-servers-file", file.to_str().unwrap()]].concat());
    let session = server.session();
    let said = "import mcptools\nstr(mcptools.call('notes', 'echo', {'text': 'x'}))";
    // The first cell does not wait for servers; a call does.
    let called = "from cellblock_runner import host_calls\nhost_calls.ask('call_tool', \
                  server='notes', tool='echo', arguments={'text': 'x'})['ok']";
    assert_eq!(session.text(called), "True");
    assert_eq!(session.text(said), "'first: x'");
    let listed = server.call("list_mcp_servers", json!({}));
    assert!(
        listed
            .text()
            .contains("notes (stdio, by the operator), connected"),
        "{}",
        listed.text()
    );
    assert!(
        listed
            .text()
            .contains("broken (stdio, by the operator), failed: "),
        "{}",
        listed.text()
    );
    server
        .call("unregister_mcp_server", json!({"server_name": "notes"}))
        .assert_refused(&["only the configuration can take it away"]);
    let again = json!({"server_name": "notes", "server_params": notes.params()});
    server
        .call("register_mcp_server", again)
        .assert_refused(&["of the operator"]);
}

#[tokio::test]
async fn callers_over_http_name_no_commands_and_no_private_addresses() {
    let notes = Notes::new();
    let file = notes.file(json!({}));
    let service = Service::without_tokens(
        &[MINIMAL, &["--mcp-servers-file", file.to_str().unwrap()]].concat(),
    );
    let mut client = Raw::connect(service.address).await;
    let register = |params: Value| json!({"server_name": "mine", "server_params": params});
    let refused = client
        .result("register_mcp_server", register(notes.params()))
        .await;
    assert_eq!(refused["isError"], true);
    let text = refused["content"][0]["text"].as_str().unwrap();
    assert!(
        text.contains("only the operator's configuration may name commands"),
        "{text}"
    );
    for url in [
        "http://127.0.0.1:9/mcp",
        "http://localhost:9/mcp",
        "http://169.254.169.254/latest",
        "http://[::1]:9/",
    ] {
        let refused = client
            .result("register_mcp_server", register(json!({"url": url})))
            .await;
        let text = refused["content"][0]["text"].as_str().unwrap();
        assert!(
            text.contains("only public addresses may be used"),
            "{url}: {text}"
        );
    }
    // The control: the operator's command is there for everybody.
    let code = "from cellblock_runner import host_calls\nprint(host_calls.ask('call_tool', \
                server='notes', tool='echo', arguments={'text': 'x'})['ok'])";
    let result = client
        .result(
            "execute_ipython_cell",
            json!({"code": code, "session_id": "a"}),
        )
        .await;
    assert_eq!(result["content"][0]["text"], "True", "{result}");
    assert_eq!(notes.count("call echo"), 1);
}

#[test]
fn connections_live_where_sessions_are_kept() {
    let notes = Notes::new();
    let daemon = format!("u{}", std::process::id());
    let start = || {
        let mut command = program();
        command
            .args(["mcp", "--keep-sessions", "on", "--daemon-name", &daemon])
            .args(MINIMAL);
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    };
    // The log of a server whose daemon lives on does not end.
    let leave = |server: &Server| {
        server.close_input();
        assert!(server.ended().success());
    };
    let first = start();
    register(&first, "notes", notes.params());
    let called = "import mcptools\nstr(mcptools.call('notes', 'echo', {'text': 'x'}))";
    let run = |server: &Server| {
        server
            .call("execute_ipython_cell", json!({"code": called}))
            .text()
            .to_owned()
    };
    assert_eq!(run(&first), "'first: x'");
    leave(&first);
    let second = start();
    assert_eq!(run(&second), "'first: x'");
    assert_eq!(
        second.call("list_mcp_servers", json!({})).structured()["servers"][0]["server_name"],
        "notes"
    );
    assert_eq!(
        notes
            .lines()
            .iter()
            .filter(|line| line.starts_with("started"))
            .count(),
        1,
        "it is the same connection"
    );
    leave(&second);
    let stopped = program()
        .args(["daemon", "stop", &daemon, "--now"])
        .output()
        .unwrap();
    assert!(stopped.status.success(), "{stopped:?}");
}
