//! Packages in live sessions in containers. What is the same everywhere is in `packages`.

use serde_json::json;

use super::{on_docker, on_podman};
use crate::packages::index::{Index, Manner};
use crate::support::containers::{IMAGE, TestEngine};
use crate::support::data_folder;
use crate::support::native::host_python;
use crate::support::server::{Era, Server, Session, ToolResult, program_below};

/// A server whose only index is ours, with sessions in containers of this engine.
async fn server(engine: &'static TestEngine, index: &Index, arguments: &[&str]) -> Server {
    // The volume of the runner is filled from the usual index, once.
    engine.shared().session().ok("1").await;
    tokio::task::block_in_place(|| {
        let mut command = program_below(&data_folder());
        command
            .args([
                "mcp",
                "--backend",
                &engine.kind.name().to_lowercase(),
                "--container-tag",
                IMAGE,
                "--keep-sessions",
                "off",
            ])
            .args(arguments)
            .env("DOCKER_HOST", engine.address.to_string())
            .env("CONTAINER_HOST", engine.address.to_string())
            .env_remove("PIP_FIND_LINKS")
            .env("UV_DEFAULT_INDEX", index.url_without_password());
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    })
}

fn install(session: &Session<'_>, packages: serde_json::Value) -> ToolResult {
    session.call("install_package", json!({"package_name": packages}))
}

fn lacks(session: &Session<'_>, module: &str) -> bool {
    session.text(&format!("from importlib.util import find_spec; print(find_spec('{module}') is None)")) == "True"
}

async fn a_package_goes_the_way_of_its_session(engine: &'static TestEngine) {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(engine, &index, &[]).await;
    tokio::task::block_in_place(|| {
        let session = server.session();
        assert!(lacks(&session, "tool_kit")); // control
        let installed = install(&session, json!("tool-kit"));
        assert!(!installed.is_error(), "{}", installed.text());
        assert_eq!(installed.text(), "Successfully installed pure-2.0 tool-kit-1.5");
        assert_eq!(session.text("import tool_kit; tool_kit.main()"), "tool 2");
        assert_eq!(session.text("!python3 -c 'import tool_kit; tool_kit.main()'; tool-kit"), "tool 2\ntool 2");

        let fork = session.call("fork_session", json!({"names": ["copy"]}));
        assert!(!fork.is_error(), "{}", fork.text());
        let fork = Session { server: &server, id: "copy".to_owned() };
        assert_eq!(fork.text("tool_kit.main()"), "tool 2");
        for each in [&session, &fork] {
            assert!(!each.call("reset", json!({})).is_error());
            assert_eq!(each.text("import tool_kit; tool_kit.main()"), "tool 2", "{}", each.id);
        }

        // Back before the installation: the package is gone, and a reset does not bring it back.
        let other = server.session();
        other.text("x = 1");
        other.text("x = 2");
        assert!(other.text("!pip install pure").contains("Successfully installed pure-2.0"));
        other.text("import pure; x = 3");
        assert!(!other.call("undo", json!({"cells": 2})).is_error());
        assert!(lacks(&other, "pure"));
        assert!(!other.call("reset", json!({})).is_error());
        assert!(lacks(&other, "pure"));
    });
}

#[test]
fn a_package_is_there_at_once_and_in_every_copy_and_goes_with_an_undo_on_docker() {
    on_docker(a_package_goes_the_way_of_its_session);
}

#[test]
fn a_package_is_there_at_once_and_in_every_copy_and_goes_with_an_undo_on_podman() {
    on_podman(a_package_goes_the_way_of_its_session);
}

#[test]
fn a_session_can_read_packages_but_neither_list_nor_change_them_and_reaches_no_index() {
    on_docker(async |engine| {
        let index = Index::start(&host_python("minimal"), Manner::Open);
        let server = server(engine, &index, &[]).await;
        tokio::task::block_in_place(|| {
            let session = server.session();
            assert!(session.text("%pip install pure").contains("Successfully installed pure-2.0"));
            index.forget_requests();
            let attempt = format!(
                "
import os, pure, urllib.request
def may(act):
    try:
        act()
        return True
    except OSError:
        return False
file = pure.__file__
tree = os.path.dirname(os.path.dirname(file))
store = os.path.dirname(tree)
print(may(lambda: open(file)), may(lambda: os.listdir(tree)))
print(may(lambda: os.listdir(store)), may(lambda: open(file, 'a')), may(lambda: os.chmod(file, 0o777)))
print(may(lambda: os.unlink(file)), may(lambda: os.mkdir(store + '/mine')), may(lambda: os.listdir('/opt/cellblock/tools')))
print(may(lambda: urllib.request.urlopen('{}')))",
                index.url_without_password()
            );
            // The first line is the control.
            assert_eq!(session.text(&attempt), "True True\nFalse False False\nFalse False False\nFalse");
            assert_eq!(index.requests(), Vec::<String>::new());
        });
    });
}

#[test]
fn what_the_image_has_is_kept_and_what_cannot_be_installed_says_why() {
    on_docker(async |engine| {
        let index = Index::start(&host_python("minimal"), Manner::Open);
        let server = server(engine, &index, &[]).await;
        tokio::task::block_in_place(|| {
            let session = server.session();
            // IPython was put beside the image; a bare name is satisfied with what is there.
            assert!(install(&session, json!("ipython")).text().contains("already satisfied: ipython"));
            let unknown = install(&session, json!("there-is-no-such-package"));
            assert!(unknown.is_error() && unknown.text().contains("not found"), "{}", unknown.text());
            assert!(!install(&session, json!("pure")).is_error()); // control
        });
    });
}
