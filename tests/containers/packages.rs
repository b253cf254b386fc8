//! Packages in live sessions in containers. What is the same everywhere is in `packages`.

use std::sync::Arc;

use cellblock::sandbox::container::{ContainerBind, ContainerNetwork, ContainerPackages};
use cellblock::sandbox::{Backend, Rules};
use serde_json::json;

use super::{on_docker, on_podman};
use crate::network::{names, network};
use crate::packages::index::{Index, Manner};
use crate::packages::sessions::{
    goes_the_way_of_its_session, install, installs_beyond_the_disk_of_sessions,
};
use crate::support::containers::{IMAGE, TestEngine};
use crate::support::native::host_python;
use crate::support::server::{Era, Server, program_below};
use crate::support::{PROGRAM, data_folder};

/// A server whose only index is ours, with sessions in containers of this engine.
async fn server(engine: &'static TestEngine, index: &Index, arguments: &[&str]) -> Server {
    server_with(engine, index, arguments, &[]).await
}

async fn server_with(
    engine: &'static TestEngine,
    index: &Index,
    arguments: &[&str],
    variables: &[(&str, &str)],
) -> Server {
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
            .envs(variables.iter().copied())
            .env("DOCKER_HOST", engine.address.to_string())
            .env("CONTAINER_HOST", engine.address.to_string())
            .env_remove("PIP_FIND_LINKS")
            .env("UV_DEFAULT_INDEX", index.url_without_password());
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    })
}

async fn a_package_goes_the_way_of_its_session(engine: &'static TestEngine) {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let server = server(engine, &index, &[]).await;
    tokio::task::block_in_place(|| goes_the_way_of_its_session(&server, "python3"));
}

#[test]
fn a_package_is_there_at_once_and_in_every_copy_and_goes_with_an_undo_on_docker() {
    on_docker(a_package_goes_the_way_of_its_session);
}

#[test]
fn a_package_is_there_at_once_and_in_every_copy_and_goes_with_an_undo_on_podman() {
    on_podman(a_package_goes_the_way_of_its_session);
}

async fn the_installer_has_a_disk_of_its_own(engine: &'static TestEngine) {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let runtime = tokio::runtime::Handle::current();
    tokio::task::block_in_place(|| {
        installs_beyond_the_disk_of_sessions(&|variables| {
            runtime.block_on(server_with(engine, &index, &[], variables))
        });
    });
}

#[test]
fn the_installer_has_a_disk_of_its_own_on_docker() {
    on_docker(the_installer_has_a_disk_of_its_own);
}

#[test]
fn the_installer_has_a_disk_of_its_own_on_podman() {
    on_podman(the_installer_has_a_disk_of_its_own);
}

#[test]
fn a_session_can_read_packages_but_neither_list_nor_change_them_and_reaches_no_index() {
    on_docker(async |engine| {
        let index = Index::start(&host_python("minimal"), Manner::Open);
        let server = server(engine, &index, &[]).await;
        tokio::task::block_in_place(|| {
            let session = server.session();
            assert!(
                session
                    .text("%pip install pure")
                    .contains("Successfully installed pure-2.0")
            );
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
print(may(lambda: os.listdir(store)), may(lambda: open(file, 'a')), may(lambda: os.chmod(file, \
0o777)))
print(may(lambda: os.unlink(file)), may(lambda: os.mkdir(store + '/mine')), may(lambda: \
os.listdir('/opt/cellblock/tools')))
print(may(lambda: urllib.request.urlopen('{}')))",
                index.url_without_password()
            );
            // The first line is the control.
            assert_eq!(
                session.text(&attempt),
                "True True\nFalse False False\nFalse False False\nFalse"
            );
            assert_eq!(index.requests(), Vec::<String>::new());
        });
    });
}

#[test]
fn an_engine_that_does_not_see_the_servers_folders_serves_sessions_without_packages() {
    on_docker(async |engine| {
        let folder = tempfile::tempdir().unwrap();
        let bind = |name: &str| ContainerBind {
            host: folder.path().join(name),
            inside: "/opt/cellblock/packages".into(),
            writable: false,
        };
        std::fs::create_dir(folder.path().join("seen")).unwrap();
        for (name, is_seen) in [("seen", true), ("unseen", false)] {
            let mut builder = engine.build();
            builder.settings.packages = Some(ContainerPackages {
                shown: vec![bind(name)],
                tools: Vec::new(),
                network: ContainerNetwork {
                    network: network(Rules::none(), names()),
                    program: PROGRAM.into(),
                    files: Vec::new(),
                    held: None,
                },
                ports: Arc::default(),
            });
            let containers = builder.start();
            let shown = containers
                .session()
                .ok("import os; print(os.path.isdir('/opt/cellblock/packages'))")
                .await;
            assert_eq!(shown, if is_seen { "True\n" } else { "False\n" });
            let why = containers
                .backend
                .launch_apart()
                .await
                .map(drop)
                .map_err(|error| error.to_string());
            match is_seen {
                true => why.unwrap(), // control
                false => assert!(
                    why.unwrap_err()
                        .contains("the engine cannot show folders of this server")
                ),
            }
            containers.end().await;
        }
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
            assert!(
                install(&session, json!("ipython"))
                    .text()
                    .contains("already satisfied: ipython")
            );
            let unknown = install(&session, json!("there-is-no-such-package"));
            assert!(
                unknown.is_error() && unknown.text().contains("not found"),
                "{}",
                unknown.text()
            );
            assert!(!install(&session, json!("pure")).is_error()); // control
        });
    });
}
