//! Packages in live sessions of the built program: installed by the tool and by `pip`, kept over a
//! reset, carried by forks, taken back by undo.

use serde_json::json;

use super::index::{Index, Manner};
use crate::support::native::host_python;
use crate::support::server::{Era, MINIMAL, Server, Session, ToolResult, program};

/// Names and values of environment variables.
pub(crate) type Variables<'a> = &'a [(&'a str, &'a str)];

/// A server whose only index is ours.
fn server(index: &Index, arguments: &[&str]) -> Server {
    server_with(index, arguments, &[])
}

fn server_with(index: &Index, arguments: &[&str], variables: Variables<'_>) -> Server {
    let mut command = program();
    command.arg("mcp").args(MINIMAL).args(arguments);
    command.envs(variables.iter().copied());
    command
        .env_remove("PIP_FIND_LINKS")
        .env("UV_DEFAULT_INDEX", index.url_without_password());
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    server
}

pub(crate) fn install(session: &Session<'_>, packages: serde_json::Value) -> ToolResult {
    session.call("install_package", json!({"package_name": packages}))
}

fn lacks(session: &Session<'_>, module: &str) -> bool {
    session.text(&format!(
        "from importlib.util import find_spec; print(find_spec('{module}') is None)"
    )) == "True"
}

/// Follows a package through the life of sessions: it is there at once, after a reset and in a
/// fork, and goes with an undo. `python` is what the sandbox calls its Python.
pub(crate) fn goes_the_way_of_its_session(server: &Server, python: &str) {
    let session = server.session();
    assert!(lacks(&session, "tool_kit")); // control
    let installed = install(&session, json!("tool-kit"));
    assert!(!installed.is_error(), "{}", installed.text());
    assert_eq!(
        installed.text(),
        "Successfully installed pure-2.0 tool-kit-1.5"
    );
    assert_eq!(installed.structured()["reset_needed_for"], json!([]));
    assert_eq!(session.text("import tool_kit; tool_kit.main()"), "tool 2");
    let programs = format!("!{python} -c 'import tool_kit; tool_kit.main()'; tool-kit");
    assert_eq!(session.text(&programs), "tool 2\ntool 2");

    let fork = session.call("fork_session", json!({"names": ["copy"]}));
    assert!(!fork.is_error(), "{}", fork.text());
    let fork = Session {
        server,
        id: "copy".to_owned(),
    };
    assert_eq!(fork.text("tool_kit.main()"), "tool 2");
    for each in [&session, &fork] {
        assert!(!each.call("reset", json!({})).is_error());
        assert_eq!(
            each.text("import tool_kit; tool_kit.main()"),
            "tool 2",
            "{}",
            each.id
        );
    }

    // Back before the installation: the package is gone, and a reset does not bring it back.
    let by_tool = |session: &Session<'_>| assert!(!install(session, json!(["pure"])).is_error());
    let by_pip = |session: &Session<'_>| {
        assert!(
            session
                .text("!pip install pure")
                .contains("Successfully installed pure-2.0")
        );
    };
    for installs in [&by_tool as &dyn Fn(&Session<'_>), &by_pip] {
        let other = server.session();
        other.text("x = 1");
        other.text("x = 2");
        installs(&other);
        other.text("import pure; x = 3");
        assert!(!other.call("undo", json!({"cells": 2})).is_error());
        assert!(lacks(&other, "pure"));
        assert!(!other.call("reset", json!({})).is_error());
        assert!(lacks(&other, "pure"));
    }
}

#[test]
fn a_package_is_there_at_once_and_in_every_copy_and_goes_with_an_undo() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    goes_the_way_of_its_session(&server(&index, &[]), "python");
}

#[test]
fn the_installer_has_a_disk_of_its_own_and_fetches_what_does_not_fit_at_once_one_by_one() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    installs_beyond_the_disk_of_sessions(&|variables| server_with(&index, &[], variables));
}

/// Installs packages that are larger than a session's disk. `start` starts a server with these
/// limits of sessions and of the installer.
pub(crate) fn installs_beyond_the_disk_of_sessions(start: &dyn Fn(Variables<'_>) -> Server) {
    let with_disk =
        |disk: &str| start(&[("CELLBLOCK_DISK", "8M"), ("CELLBLOCK_PACKAGE_DISK", disk)]);
    // Each is 12 MiB, and twice that while it is packed.
    let server = with_disk("16M");
    let refused = install(&server.session(), json!("large"));
    assert!(refused.is_error(), "{}", refused.text());
    let said = refused.text();
    assert!(
        said.contains("more than 16 MiB of disk") && said.contains("package_disk"),
        "{said}"
    );
    drop(server);

    let server = with_disk("30M");
    let session = server.session();
    let installed = install(&session, json!("large"));
    assert_eq!(
        installed.text(),
        "Successfully installed large-1.0 larger-1.0"
    );
    let full = "try:\n    for name in 'ab':\n        open(name, 'wb').write(bytes(6 << 20))\n\
                except OSError as error:\n    print(name, error.strerror)";
    assert_eq!(
        session.text(full),
        "b No space left on device",
        "the session keeps its own limit"
    );
}

#[test]
fn pip_in_a_cell_does_the_same_and_says_what_pip_says() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(&index, &[]);
    let ways = [
        "!pip install pure",
        "%pip install pure",
        "!uv pip install pure",
        "import subprocess, sys; subprocess.check_call([sys.executable, '-m', 'pip', 'install', \
         'pure'])",
    ];
    for way in ways {
        let session = server.session();
        let said = session.text(way);
        assert!(
            said.contains("Successfully installed pure-2.0"),
            "{way}: {said}"
        );
        assert_eq!(
            session.text("import pure; print('imported')"),
            "imported",
            "{way}"
        );
        assert!(session.text("!pip list").contains("pure"), "{way}");
    }
    let session = server.session();
    let unknown = session.text("!pip install there-is-no-such-package");
    assert!(
        unknown.contains("there-is-no-such-package") && unknown.contains("not found"),
        "{unknown}"
    );
    for refused in [
        "!pip install --index-url http://192.0.2.1/simple pure",
        "!pip install ./pure.whl",
    ] {
        assert!(!session.text(refused).contains("Successfully"), "{refused}");
    }
    assert!(lacks(&session, "pure"));
}

#[test]
fn what_cannot_be_installed_is_an_error_with_the_resolvers_words() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(&index, &[]);
    let session = server.session();
    for (request, words) in [
        (json!("there-is-no-such-package"), "not found"),
        (json!("pure>99"), "pure"),
        (
            json!("--index-url=http://192.0.2.1"),
            "options are not accepted",
        ),
        (json!(["pure", "-e ."]), "cannot be installed"),
        (json!("pure @ file:///etc/passwd"), "cannot be installed"),
        (
            json!("https://192.0.2.1/pure-1.0-py3-none-any.whl"),
            "not in the allowed list",
        ),
        (json!([]), "must be"),
        (json!(7), "must be"),
    ] {
        let refused = install(&session, request.clone());
        assert!(
            refused.is_error() && refused.text().contains(words),
            "{request}: {}",
            refused.text()
        );
    }
    assert!(!install(&session, json!("pure")).is_error()); // control
}

#[test]
fn an_answer_says_what_a_reader_must_know_about_versions() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(&index, &[]);
    let session = server.session();
    assert_eq!(
        install(&session, json!("[\"pure\"]")).text(),
        "Successfully installed pure-2.0",
        "a list as text"
    );
    let older = install(&session, json!("modest"));
    assert_eq!(
        older.text(),
        "Successfully installed modest-1.0\nmodest 1.0 is not the newest version: 2.0 cannot be \
         used with pure 2.0, \
         which the session has. To get it and replace what is in its way, \
         install \"modest==2.0\", \"pure==1.0\" \
         together."
    );
    let together = install(&session, json!(["modest==2.0", "pure==1.0"]));
    assert_eq!(
        together.text(),
        "Successfully installed modest-2.0 pure-1.0",
        "the way out leads there"
    );
    let newest = install(&server.session(), json!("modest"));
    assert_eq!(
        newest.text(),
        "Successfully installed modest-2.0 pure-1.0",
        "nothing was in the way"
    );
    let preloaded = install(&session, json!("ipython==0.0"));
    assert!(
        preloaded
            .text()
            .contains("IPython is preloaded here; a reset does not change that."),
        "{}",
        preloaded.text()
    );
    assert_eq!(preloaded.structured()["reset_needed_for"], json!([]));
}

#[test]
fn a_session_without_network_installs_and_still_reaches_nothing() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(&index, &[]);
    let session = server.session();
    assert!(!install(&session, json!("pure")).is_error());
    index.forget_requests();
    let url = index.url_without_password();
    let tried = session.text(&format!(
        "import urllib.request\ntry:\n    \
                                       urllib.request.urlopen('{url}')\n    \
                                       print('reached')\nexcept OSError as error:\n    \
                                       print('refused')"
    ));
    assert!(tried.starts_with("refused"), "{tried}");
    assert_eq!(index.requests(), Vec::<String>::new());
}

#[test]
fn nothing_of_an_installation_is_seen_in_a_workspace_that_sessions_share() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let workspace = tempfile::tempdir().unwrap();
    let server = server(&index, &["--workspace", workspace.path().to_str().unwrap()]);
    let (watcher, session) = (server.session(), server.session());
    watcher.text(
        "import os, threading
seen, over = set(), threading.Event()
def watch():
    while not over.is_set():
        seen.update(os.listdir())
watching = threading.Thread(target=watch)
watching.start()
open('control', 'w').close()",
    );
    assert!(!install(&session, json!("tool-kit")).is_error());
    assert_eq!(session.text("import tool_kit; tool_kit.main()"), "tool 2");
    assert_eq!(
        watcher.text("over.set(); watching.join(); print(sorted(seen))"),
        "['.env', 'control']"
    );
}

#[test]
fn where_installing_is_switched_off_it_says_so() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(&index, &["--install-packages", "off"]);
    let session = server.session();
    let refused = install(&session, json!("pure"));
    assert!(
        refused.is_error()
            && refused
                .text()
                .contains("cannot be installed on this server"),
        "{}",
        refused.text()
    );
    assert!(
        session
            .text("!pip install pure")
            .contains("cannot be installed on this server")
    );
}
