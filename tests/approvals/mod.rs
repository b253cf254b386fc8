//! A person behind the client decides what code may do, with the built program: tools, hosts, and
//! what becomes of a question when a process ends.
//!
//! `hosts` holds connections until somebody has decided, `reload` changes the policy of a running
//! service, `lost` ends clients and servers in the middle of a question.

mod hosts;
mod lost;
mod reload;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::native::host_python;
use crate::support::server::{Era, MINIMAL, Server, Session, data_dir, program};

/// A server of another maker and its log, and a data folder of its own for what is remembered.
pub(crate) struct Scene {
    folder: TempDir,
}

impl Scene {
    pub(crate) fn new() -> Scene {
        Scene {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn notes(&self, edition: &str) -> Value {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/notes_server.py");
        let log = self.folder.path().join("log");
        json!({"command": host_python("minimal"), "args": [script, log, edition]})
    }

    /// How often the tool `echo` was called.
    pub(crate) fn echoes(&self) -> usize {
        let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        log.lines().filter(|line| *line == "call echo").count()
    }

    /// The program with a data folder of its own, in which the environments of all tests are.
    fn program(&self) -> Command {
        let data = self.folder.path().join("data");
        fs::create_dir_all(&data).unwrap();
        for entry in fs::read_dir(data_dir()).unwrap().flatten() {
            let place = data.join(entry.file_name());
            if entry.path().is_dir() && !place.exists() {
                std::os::unix::fs::symlink(entry.path(), place).unwrap();
            }
        }
        let mut command = program();
        command.env("CELLBLOCK_DATA_DIR", data);
        command
    }

    fn book(&self) -> String {
        fs::read_to_string(self.folder.path().join("data/approvals.yaml")).unwrap_or_default()
    }

    /// A server whose client has a person behind it.
    pub(crate) fn server(&self, flags: &[&str]) -> Server {
        started(self.program().arg("mcp").args(MINIMAL).args(flags))
    }
}

/// Starts a server whose client has a person behind it.
fn started(command: &mut Command) -> Server {
    let server = Server::spawn(command, Era::Initialize);
    server.greet_with_a_person();
    server
}

pub(crate) fn register(server: &Server, params: Value) {
    let result = server.call(
        "register_mcp_server",
        json!({"server_name": "notes", "server_params": params}),
    );
    assert!(!result.is_error(), "{}", result.text());
}

const ECHO: &str = "import mcptools\nprint(mcptools.call('notes', 'echo', {'text': 'x'}))";

#[test]
fn what_is_always_allowed_is_asked_again_when_the_server_or_the_tool_is_another_one() {
    let scene = Scene::new();
    let flags = ["--approve-tools", "ask", "--remember-approvals", "on"];
    let server = scene.server(&flags);
    register(&server, scene.notes("first"));
    let session = server.session();
    let pending = session.begin(ECHO, json!({}));
    let form = server.form();
    assert!(
        form.text().contains("notes.echo(text=\"x\")"),
        "{}",
        form.text()
    );
    form.decide("always");
    assert_eq!(pending.result().text(), "first: x");
    drop(session);
    server.finish();
    assert!(scene.book().contains("fingerprint: "), "{}", scene.book());

    // The same server is not asked about in the next process.
    let server = scene.server(&flags);
    register(&server, scene.notes("first"));
    let session = server.session();
    assert_eq!(
        (session.text(ECHO).as_str(), server.forms()),
        ("first: x", 0)
    );
    // Another command under the same name is another server, whose tools look alike here.
    let mut elsewhere = scene.notes("first");
    elsewhere["env"] = json!({"A": "b"});
    register(&server, elsewhere);
    let pending = session.begin(ECHO, json!({}));
    server.form().decide("deny");
    assert!(pending.result().text().contains("ToolCallDenied"));
    // So is a tool that describes itself otherwise.
    register(&server, scene.notes("second"));
    let pending = session.begin(ECHO, json!({}));
    server.form().decide("once");
    assert_eq!(pending.result().text(), "second: x");
    assert_eq!(scene.echoes(), 3);
}

#[test]
fn fifty_calls_of_threads_are_one_form_and_each_can_be_answered_otherwise() {
    let scene = Scene::new();
    let server = scene.server(&["--approve-tools", "ask"]);
    register(&server, scene.notes("first"));
    let session = server.session();
    let code = "
import mcptools, threading
from concurrent.futures import ThreadPoolExecutor
together = threading.Barrier(50)
def one(number):
    together.wait()
    try:
        return str(mcptools.call('notes', 'echo', {'text': f'n{number:02}'}))
    except mcptools.ToolCallDenied:
        return 'denied'
with ThreadPoolExecutor(50) as pool:
    told = list(pool.map(one, range(50)))
print([number for number, text in enumerate(told) if text == 'denied'], {text for text in told if \
text != 'denied'} <= {f'first: n{number:02}' for number in range(50)})";
    let pending = session.begin(code, json!({}));
    let form = server.form();
    assert!(form.text().contains("these 50 things"), "{}", form.text());
    assert_eq!(form.fields().len(), 51);
    // Which number is which call is written in the form.
    let numbered = |call: usize| {
        let line = format!("notes.echo(text=\"n{call:02}\")");
        let line = form
            .text()
            .lines()
            .find(|found| found.contains(&line))
            .unwrap_or_else(|| panic!("{}", form.text()));
        line.split('.')
            .next()
            .and_then(|number| number.parse::<usize>().ok())
            .unwrap()
    };
    let mut content = json!({"decision": "once"});
    for denied in [7, 21, 42] {
        content[format!("request_{:02}", numbered(denied))] = json!("deny");
    }
    form.fill_in(content);
    assert!(pending.result().text().starts_with("[7, 21, 42] True\n"));
    assert_eq!((scene.echoes(), server.forms()), (47, 0));
}

#[test]
fn a_fork_can_be_given_some_tools_of_a_server() {
    let scene = Scene::new();
    let server = scene.server(&[]);
    register(&server, scene.notes("first"));
    let session = server.session();
    session.text("from mcptools.notes import echo, fail");
    let forked = session.call(
        "fork_session",
        json!({"names": ["some"], "mcp_servers": ["notes.e*", "notes.add-up"]}),
    );
    assert!(!forked.is_error(), "{}", forked.text());
    let some = Session {
        server: &server,
        id: "some".to_owned(),
    };
    assert_eq!(some.text(ECHO), "first: x");
    let listed =
        "import os\nsorted(name for name in os.listdir('mcptools/notes') if name.endswith('.py'))";
    assert_eq!(some.text(listed), "['__init__.py', 'add_up.py', 'echo.py']");
    let refused = |tool: &str| {
        let code = format!(
            "import mcptools\ntry:\n    mcptools.call('notes', '{tool}', {{}})\nexcept \
             mcptools.ToolCallError as error:\n    print(error.reason, error)"
        );
        some.text(&code).replace(tool, "?")
    };
    assert_eq!(
        refused("picture"),
        refused("absent"),
        "what is not granted looks like what is not there"
    );
    assert!(
        refused("picture").starts_with("unknown "),
        "{}",
        refused("picture")
    );
    assert!(
        session.text("import mcptools\nlen(mcptools.call('notes', 'picture', {}).content)") == "1",
        "the control"
    );
    some.call(
        "fork_session",
        json!({"names": ["more"], "mcp_servers": ["notes.picture"]}),
    )
    .assert_refused(&["`notes.picture`"]);
}
