//! Images that are fetched: from a registry of this machine, with progress, and with credentials.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::support::containers::{self, TestEngine};
use crate::support::daemon::free_port;
use crate::support::server::{Era, Server, finished, program_below};
use crate::support::{data_folder, skipped};

/// Who may fetch from a registry that asks, and the hash of their password as the registry takes
/// it.
const USER: &str = "somebody";
const PASSWORD: &str = "secret of tests";
const HASH: &str = "$2b$04$PmTGNN2f3g2HbjYNa2MUG.ZP77uehZUQ9Vn3RaoySGFssRzaOK17e";

/// What is said of an image that was fetched and looked at: it holds nothing.
const FETCHED: &str = "has no Python that could be started";

/// A registry of images on this machine.
struct Registry {
    port: u16,
    process: Child,
    folder: tempfile::TempDir,
}

impl Registry {
    /// Starts one for everybody, or for whoever has the password. None where the program is
    /// missing.
    fn start(asks: bool) -> Option<Registry> {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut settings = json!({
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": folder.path().join("images")}},
            "http": {"addr": format!("127.0.0.1:{port}")},
        });
        if asks {
            let file = folder.path().join("passwords");
            fs::write(&file, format!("{USER}:{HASH}\n")).unwrap();
            settings["auth"] = json!({"htpasswd": {"realm": "tests", "path": file}});
        }
        let file = folder.path().join("config.yml");
        fs::write(&file, settings.to_string()).unwrap();
        let mut command = Command::new("docker-registry");
        command
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let process = command.spawn().ok()?;
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < deadline, "the registry does not listen");
            std::thread::yield_now();
        }
        Some(Registry {
            port,
            process,
            folder,
        })
    }

    /// Puts an image of nothing into the registry, and nowhere else. `config` has the credentials
    /// for that.
    fn fill(&self, engine: &TestEngine, config: Option<&str>) -> String {
        let image = format!("127.0.0.1:{}/nothing:1", self.port);
        engine.import(&image);
        let mut push = Command::new("docker");
        push.args(
            config
                .map(|config| ["--config", config])
                .into_iter()
                .flatten(),
        );
        let pushed = push
            .args(["-H", &engine.address.to_string(), "push", &image])
            .output()
            .unwrap();
        assert!(
            pushed.status.success(),
            "{}",
            String::from_utf8_lossy(&pushed.stderr)
        );
        engine.command(&["rmi", &image]);
        image
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a cell in a container of this image, with these settings of Docker's command line.
fn run(engine: &TestEngine, image: &str, variables: &[(&str, &str)]) -> String {
    let mut command = program_below(&data_folder());
    command.args([
        "run",
        "-c",
        "1",
        "--backend",
        "docker",
        "--container-tag",
        image,
    ]);
    command
        .env("DOCKER_HOST", engine.address.to_string())
        .envs(variables.iter().copied());
    let (status, output, errors) = finished(&mut command);
    assert_ne!(status, Some(0), "{output}");
    errors
}

#[test]
fn a_registry_that_asks_gets_the_credentials_of_a_login() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let Some(registry) = Registry::start(true) else {
        return skipped("docker-registry");
    };
    let below = |name: &str| {
        registry
            .folder
            .path()
            .join(name)
            .to_string_lossy()
            .into_owned()
    };
    let config = |name: &str, text: Value| {
        let folder = below(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(format!("{folder}/config.json"), text.to_string()).unwrap();
        folder
    };
    let key = format!("127.0.0.1:{}", registry.port);
    let pair = |password: &str| json!({"auth": STANDARD.encode(format!("{USER}:{password}"))});
    let right = config("right", json!({"auths": {&key: pair(PASSWORD)}}));
    let image = registry.fill(engine, Some(&right));

    let nobody = config("nobody", json!({}));
    let said = run(engine, &image, &[("DOCKER_CONFIG", &nobody)]);
    assert!(
        said.contains("could not be fetched") && said.contains("no basic auth credentials"),
        "{said}"
    );
    let wrong = config("wrong", json!({"auths": {&key: pair("something else")}}));
    let said = run(engine, &image, &[("DOCKER_CONFIG", &wrong)]);
    assert!(
        said.contains("could not be fetched") && said.contains("unauthorized"),
        "{said}"
    );
    let said = run(engine, &image, &[("DOCKER_CONFIG", &right)]);
    assert!(said.contains(FETCHED), "{said}");
    engine.command(&["rmi", &image]);

    // A program that keeps them is asked for this registry, by its standard input.
    let answer = json!({"ServerURL": key, "Username": USER, "Secret": PASSWORD}).to_string();
    let program = below("docker-credential-test");
    let script =
        format!("#!/bin/sh\n[ \"$1\" = get ] && [ \"$(cat)\" = {key} ] && printf %s '{answer}'\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!(
        "{}:{}",
        registry.folder.path().display(),
        std::env::var("PATH").unwrap()
    );
    let kept = config("kept", json!({"credHelpers": {&key: "test"}}));
    let said = run(engine, &image, &[("DOCKER_CONFIG", &kept)]);
    assert!(
        said.contains("docker-credential-test could not be asked"),
        "{said}"
    ); // control: it is not in the path
    let said = run(engine, &image, &[("DOCKER_CONFIG", &kept), ("PATH", &path)]);
    assert!(said.contains(FETCHED), "{said}");
    engine.command(&["rmi", &image]);
    let store = config("store", json!({"credsStore": "test"}));
    let said = run(
        engine,
        &image,
        &[("DOCKER_CONFIG", &store), ("PATH", &path)],
    );
    assert!(said.contains(FETCHED), "{said}");
    engine.command(&["rmi", &image]);
}

/// Passes connections on to a port, the first of them when it is told to.
fn held_back(port: u16) -> (u16, mpsc::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    let (open, gate) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = gate.recv();
        for client in listener.incoming().flatten() {
            let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (own, open)
}

#[test]
fn a_client_is_told_that_an_image_is_being_fetched() {
    let Some(engine) = containers::docker() else {
        return;
    };
    let Some(registry) = Registry::start(false) else {
        return skipped("docker-registry");
    };
    let image = registry.fill(engine, None);
    let (port, open) = held_back(registry.port);
    let image = image.replace(&registry.port.to_string(), &port.to_string());
    let mut command = program_below(&data_folder());
    command.args([
        "mcp",
        "--backend",
        "docker",
        "--container-tag",
        &image,
        "--keep-sessions",
        "off",
    ]);
    let server = Server::spawn(
        command.env("DOCKER_HOST", engine.address.to_string()),
        Era::Initialize,
    );
    server.greet();
    let cell = server.begin("execute_ipython_cell", json!({"code": "1"}));
    let step = format!("fetching the image {image}");
    let told = server.notification(|message| {
        message["params"]["progressToken"] == cell.id()
            && message["params"]["message"]
                .as_str()
                .is_some_and(|text| text.contains(&step))
    });
    assert_eq!(told["method"], "notifications/progress");
    open.send(()).unwrap();
    let result = cell.result();
    assert!(
        result.is_error() && result.text().contains(FETCHED),
        "{}",
        result.text()
    );
    engine.command(&["rmi", &image]);
}
