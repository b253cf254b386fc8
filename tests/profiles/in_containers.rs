//! Every profile with sessions in containers: what native sandboxes go through, on Docker and on
//! Podman.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::{
    call, code_executer, env_file, exactly, fails, go_through, ipybox, local_index, pyexec,
    python_docker, start_with_index, text, words,
};
use crate::network::Web;
use crate::support::containers::{IMAGE, TestEngine, docker, podman};
use crate::support::server::{Era, Server, finished, program};
use crate::support::{is_root, skipped};

/// A picture of one point, shown by what every session has.
const DRAW: &str = "from IPython.display import Image, display\nshow = lambda: \
                    display(Image(__import__('binascii').a2b_base64(\
                    'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGA\
                    WjR9awAAAABJRU5ErkJggg==')))\n\
                    print('one'); show(); print('two'); show(); 'three'";

/// Those of this machine; each that is missing says that it is skipped.
fn engines() -> impl Iterator<Item = &'static TestEngine> {
    [docker, podman].into_iter().filter_map(|engine| engine())
}

/// Has the sessions of a server be containers of an engine.
fn on(engine: &TestEngine, command: &mut Command) {
    let (name, host) = if engine.is_podman() {
        ("podman", "CONTAINER_HOST")
    } else {
        ("docker", "DOCKER_HOST")
    };
    command.env(host, engine.address.to_string()).args([
        "--backend",
        name,
        "--container-tag",
        IMAGE,
    ]);
}

/// Starts a server of a profile whose sessions are containers.
fn start(engine: &TestEngine, profile: &str, arguments: &[&str]) -> Server {
    let mut command = program();
    command.args(["mcp", "--profile", profile]).args(arguments);
    on(engine, &mut command);
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    server
}

#[test]
fn ipybox_runs_cells_and_moves_files_in_containers() {
    for engine in engines() {
        let server = start(engine, "ipybox", &[]);
        ipybox::reset_at_any_time(&server);
        ipybox::cells(&server);
        ipybox::death_and_reset(&server);
        let (blocks, failed) = call(&server, "execute_ipython_cell", json!({"code": DRAW}));
        assert!(
            !failed && blocks[1..] == ["<image>", "<image>"],
            "{blocks:?}"
        );
        assert!(
            blocks[0].starts_with("one\ntwo\n'three'\n\nGenerated images:\n\n- ["),
            "{blocks:?}"
        );
        ipybox::files_cross(|arguments| start(engine, "ipybox", arguments));
    }
}

/// The full configuration of ipybox's document: every option, and those that may be repeated,
/// repeated.
#[test]
fn every_option_of_the_docker_generation_works_beside_the_others() {
    let Some(engine) = docker() else { return };
    let web = Web::start();
    let port = web.port();
    let folder = tempfile::tempdir().unwrap();
    for name in ["one", "two", "three", "models", "data"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("old"), name).unwrap();
    }
    let file = folder.path().join("more.env");
    fs::write(file, "FROM_FILE=file\nBOTH=file\n").unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let mut command = program();
    command
        .current_dir(folder.path())
        .env("DOCKER_HOST", engine.address.to_string())
        // No backend: the image says which.
        .args(["mcp", "--profile", "ipybox", "--container-tag", IMAGE]);
    for (option, value) in [
        ("--allowed-dir", at("one")),
        ("--allowed-dir", at("two")),
        ("--allowed-domain", format!("web.localhost:{port}")),
        ("--allowed-domain", format!("127.0.0.1:{port}")),
        ("--allowed-domain", format!("[::1]:{port}")),
        ("--container-env-var", "ONE=1".to_owned()),
        ("--container-env-var", "BOTH=flag".to_owned()),
        ("--container-env-file", "more.env".to_owned()),
        ("--container-bind", "models:models".to_owned()),
        ("--container-bind", format!("{}:deep/data", at("data"))),
    ] {
        command.args([option, &value]);
    }
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    const CELL: &str = "execute_ipython_cell";
    let cell = |code: &str| json!({"code": code});
    let variables = "import os; print(*(os.environ.get(name) for name in ('ONE', 'BOTH', \
                     'FROM_FILE')), os.getcwd())";
    let binds = "print(open('/work/models/old').read(), open('/work/deep/data/old').read(), \
                 open('models/new', 'w').write('x'), os.path.exists('/app'))";
    let upload = |name: &str| json!({"relpath": name, "local_path": at(&format!("{name}/old"))});
    let fetch = |name: &str| {
        cell(&format!(
            "import urllib.request\ntry: \
             print(urllib.request.urlopen('http://{name}:{port}/').read())\nexcept OSError as \
             error: print(type(error.reason).__name__)"
        ))
    };
    go_through(
        &server,
        vec![
            exactly(CELL, cell(variables), &["1 flag file /work"]),
            exactly(CELL, cell(binds), &["models data 1 False"]),
            exactly("upload_file", upload("one"), &[]),
            exactly("upload_file", upload("two"), &[]),
            exactly(
                CELL,
                cell("print(open('one').read(), open('two').read())"),
                &["one two"],
            ),
            exactly(CELL, fetch("web.localhost"), &["b'hello'"]),
            // What no option names.
            fails(
                "upload_file",
                upload("three"),
                &["is not within allowed directories for upload"],
            ),
            words(CELL, fetch("other.localhost"), &["gaierror"]),
        ],
    );
    assert_eq!(web.asked(), 1);
    assert_eq!(fs::read_to_string(at("models/new")).unwrap(), "x");
}

#[test]
fn build_with_the_options_of_ipybox_describes_the_same_image_as_image_build() {
    let Some(engine) = docker() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "\"six\",\n\"iniconfig>=2\",\n").unwrap();
    // The steps of the build, which is not begun.
    let recipe = |words: &[&str]| {
        let mut command = program();
        command
            .env("DOCKER_HOST", engine.address.to_string())
            .args(words)
            .args(["--base", IMAGE, "--no-science", "--dockerfile"]);
        let (status, recipe, errors) = finished(&mut command);
        assert_eq!(status, Some(0), "{words:?}: {errors}");
        recipe
    };
    let theirs = ["build", "-t", "a/b:c", "-d", file.path().to_str().unwrap()];
    let ours = ["image", "build", "--tag", "a/b:c", "--packages", "six"];
    assert_eq!(
        recipe(&theirs),
        recipe(&[&ours[..], &["iniconfig>=2"]].concat())
    );
    assert_ne!(recipe(&theirs), recipe(&ours)); // control
}

#[test]
fn files_of_a_folder_belong_to_its_owner_also_if_that_is_root() {
    if !is_root() {
        skipped("root (folders of other users)");
        return;
    }
    let write = "import os\n\
                 for name in ('new', 'models/new'):\n    print(open(name, 'w').write('x'), \
                 os.stat(name).st_uid == os.getuid())\n\
                 print(open('old').read(), open('models/old').read(), os.getuid() > 0)";
    for engine in engines() {
        for owners in [(0, 0), (1000, 1000), (0, 1000), (1000, 0)] {
            let (space, models) = (folder_of(owners.0), folder_of(owners.1));
            let bind = format!("{}:models", models.path().display());
            let folders = [
                "--workspace",
                space.path().to_str().unwrap(),
                "--container-bind",
                &bind,
            ];
            let server = without_pool(engine, "ipybox", &folders);
            let cell = json!({"code": write});
            go_through(
                &server,
                vec![exactly(
                    "execute_ipython_cell",
                    cell,
                    &["1 True\n1 True\nold old True"],
                )],
            );
            let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            for folder in [&space, &models] {
                let left = mounts
                    .lines()
                    .find(|line| line.contains(folder.path().to_str().unwrap()));
                assert_eq!(left, None, "the container has mounts of its own");
            }
            server.finish();
            let owner =
                |folder: &tempfile::TempDir| folder.path().join("new").metadata().unwrap().uid();
            assert_eq!((owner(&space), owner(&models)), owners, "what code wrote");
        }
    }
}

/// A folder that only its owner may use, with a file.
fn folder_of(owner: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("old"), "old").unwrap();
    for path in [folder.path(), &folder.path().join("old")] {
        chown(path, Some(owner), Some(owner)).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    folder
}

#[test]
fn workspaces_hide_what_they_must_in_containers() {
    for engine in engines() {
        // Folders of whoever runs the tests, who may be root.
        let start_in = |space: &Path, more: &[&str]| {
            start(
                engine,
                "ipybox",
                &[&["--workspace", space.to_str().unwrap()], more].concat(),
            )
        };
        env_file::hides_the_file_of_variables(&start_in);
        env_file::takes_the_name_of_the_file(&start_in);
        env_file::holds_the_lists(&start_in);
    }
}

#[test]
fn python_docker_mcp_keeps_and_forgets_in_containers_as_it_promises() {
    for engine in engines() {
        let server = start(engine, "python-docker-mcp", &["--timeout", "20s"]);
        python_docker::calls(&server);
        python_docker::state_in_and_out(&server);
        python_docker::nothing_passes(&server);
    }
}

#[test]
fn a_container_lasts_as_long_as_what_it_was_made_for() {
    const MEMORY: u64 = 223 << 20;
    for engine in engines() {
        let server = without_pool(
            engine,
            "python-docker-mcp",
            &["--memory", "223M", "--timeout", "20s"],
        );
        let there = || engine.containers_with_memory(MEMORY).len();
        text(
            &server,
            "execute-persistent",
            json!({"code": "kept = 1", "session_id": "s"}),
        );
        assert_eq!(there(), 1);
        // Nobody cleans this one up, although a client has named it.
        text(
            &server,
            "execute-persistent",
            json!({"code": "left = 1", "session_id": "left"}),
        );
        text(&server, "execute-transient", json!({"code": "print(1)"}));
        text(&server, "cleanup-session", json!({"session_id": "s"}));
        server.finish();
        assert_eq!(there(), 0, "nothing is left behind");
    }
}

/// Like `start`, without containers that wait.
fn without_pool(engine: &TestEngine, profile: &str, arguments: &[&str]) -> Server {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("config.yaml");
    std::fs::write(&file, "pool: 0\n").expect("a file can be written");
    start(
        engine,
        profile,
        &[
            &["--config", file.to_str().expect("a path of letters")],
            arguments,
        ]
        .concat(),
    )
}

#[test]
fn code_executer_starts_keeps_and_deletes_services_in_containers() {
    for engine in engines() {
        code_executer::life_of_a_service(&start(engine, "code-executer", &[]));
    }
}

#[test]
fn a_service_is_a_container_of_the_named_image_without_ports_until_it_is_deleted() {
    const MEMORY: u64 = 227 << 20;
    for engine in engines() {
        // What the image lacks of our own comes from the usual index, once.
        text(
            &start(engine, "pyexec", &[]),
            "execute_python",
            json!({"code": "1"}),
        );
        let index = local_index();
        let server = start_with_index("code-executer", &index, |command| {
            on(engine, command);
            command
                .env("CELLBLOCK_POOL", "0")
                .args(["--memory", "227M"]);
        });
        assert!(engine.containers_with_memory(MEMORY).is_empty()); // control
        let told = text(
            &server,
            "start_code_executer",
            json!({"dependencies": ["pure"]}),
        );
        let name = told.rsplit(' ').next().unwrap();
        let running = engine.containers_with_memory(MEMORY);
        let [service] = &running[..] else {
            panic!("a service is one container: {running:?}")
        };
        let about = |format: &str| {
            let told = engine.command(&["inspect", "--format", format, service]);
            told.trim().to_owned()
        };
        let image = engine.command(&["image", "inspect", "--format", "{{.Id}}", IMAGE]);
        assert_eq!(about("{{.Image}}"), image.trim(), "none was built for it");
        for ports in [
            "{{json .HostConfig.PortBindings}}",
            "{{json .NetworkSettings.Ports}}",
        ] {
            let ports = about(ports);
            assert!(["{}", "null"].contains(&ports.as_str()), "{ports}");
        }
        let stop = |arguments| text(&server, "stop_code_executer", arguments);
        stop(json!({"delete_service": false}));
        assert!(engine.containers().contains(service)); // control
        text(&server, "reuse_code_executer", json!({"name": name}));
        stop(json!({}));
        assert!(
            !engine.containers().contains(service),
            "it is gone when the stop is answered"
        );
    }
}

#[test]
fn packages_are_installed_into_sessions_in_containers() {
    for engine in engines() {
        // What the image lacks of our own comes from the usual index, once.
        text(
            &start(engine, "pyexec", &[]),
            "execute_python",
            json!({"code": "1"}),
        );
        let index = local_index();
        let server =
            |profile: &str| start_with_index(profile, &index, |command| on(engine, command));
        code_executer::dependencies(&server("code-executer"));
        ipybox::packages(&server("ipybox"));
        python_docker::packages(&server("python-docker-mcp"));
        assert!(
            index.requests().iter().any(|path| path.contains("pure")),
            "the index of the setting was asked"
        );
    }
}

#[test]
fn pyexec_answers_in_order_in_containers() {
    for engine in engines() {
        let server = start(engine, "pyexec", &["--timeout", "2s"]);
        pyexec::calls(&server);
        go_through(
            &server,
            vec![
                exactly(
                    "execute_python",
                    json!({"code": DRAW}),
                    &["one", "<image>", "two", "<image>", "'three'"],
                ),
                words(
                    "execute_python",
                    json!({"code": "len(bytearray(100 << 20)) >> 20"}),
                    &["100"],
                ),
            ],
        );
    }
}
