//! The official Python client with every profile, and with two of the servers themselves beside the
//! profiles that stand in for them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::clients::installed;
use crate::support::containers::{IMAGE, TestEngine, docker};
use crate::support::server::{data_dir, finished, folders};
use crate::support::{PROGRAM, skipped};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/profiles")
        .join(name)
}

/// Runs a script to its good end and returns what it said.
#[track_caller]
fn said(command: &mut Command) -> String {
    command
        .envs(folders(data_dir()))
        .env_remove("CELLBLOCK_CONFIG");
    let (status, output, errors) = finished(command);
    assert_eq!(status, Some(0), "{errors}");
    output.trim().to_owned()
}

#[test]
fn the_official_client_goes_through_every_profile() {
    let Some(python) = installed("python_v1", &["mcp>=1.26,<2"]) else {
        return skipped("a package index");
    };
    for profile in ["ipybox", "python-docker-mcp", "code-executer", "pyexec"] {
        let mut command = Command::new(&python);
        command.arg(script("client.py")).arg(profile).args([
            PROGRAM,
            "mcp",
            "--environment",
            "minimal",
            "--profile",
            profile,
        ]);
        assert_eq!(said(&mut command), "all passed");
    }
}

#[test]
fn ipybox_and_its_profile_agree_where_they_should() {
    // Without an upper bound that server is installed with a client library that it cannot be
    // started with.
    let Some(python) = installed("ipybox", &["ipybox==0.9.2", "mcp<2"]) else {
        return skipped("a package index");
    };
    let (theirs, ours) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new(&python);
    command.arg(script("beside.py"));
    command
        .arg(python.with_file_name("ipybox"))
        .arg("--workspace")
        .arg(theirs.path());
    command
        .args([
            "--",
            PROGRAM,
            "mcp",
            "--profile",
            "ipybox",
            "--environment",
            "minimal",
            "--workspace",
        ])
        .arg(ours.path());
    match said(&mut command).as_str() {
        "it does not start" => skipped("a machine on which ipybox starts"),
        said => assert_eq!(said, "all passed"),
    }
}

/// Prepares a comparison with python-docker-mcp, as far as that server can be had.
fn beside_python_docker(engine: &str) -> Option<Command> {
    // It imports a module that newer versions of setuptools do not have.
    let requirements = ["python-docker-mcp==0.2.5", "mcp<2", "setuptools<80"];
    let python = installed("python-docker-mcp", &requirements)?;
    let mut command = Command::new(&python);
    command
        .arg(script("beside_python_docker.py"))
        .arg(engine)
        .arg(python.with_file_name("python-docker-mcp"));
    command.args(["--", PROGRAM, "mcp", "--profile", "python-docker-mcp"]);
    Some(command)
}

#[test]
fn python_docker_mcp_and_its_profile_agree_without_an_engine() {
    let Some(mut command) = beside_python_docker("none") else {
        return skipped("a package index");
    };
    // Neither reads a configuration of whoever runs the tests, nor fills an engine with containers.
    let home = tempfile::tempdir().unwrap();
    command
        .env("HOME", home.path())
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock");
    assert_eq!(
        said(command.args(["--environment", "minimal"])),
        "all passed"
    );
}

/// An image as python-docker-mcp wants it: with `python`, a user of its own and a folder for it.
const THEIR_IMAGE: &str = "cellblock-beside";

fn make_their_image(engine: &TestEngine) {
    if !engine
        .command(&["images", "--quiet", THEIR_IMAGE])
        .is_empty()
    {
        return;
    }
    let change = "ln -s python3 /usr/bin/python && useradd -m -u 1000 appuser && mkdir /app && \
                  chown appuser /app";
    let made = engine.command(&["create", "--network", "none", IMAGE, "sh", "-c", change]);
    let made = made.trim();
    engine.command(&["start", "--attach", made]);
    let latest = format!("{THEIR_IMAGE}:latest");
    engine.command(&[
        "commit",
        "--change",
        "USER appuser",
        "--change",
        "WORKDIR /app",
        made,
        &latest,
    ]);
    // The tag that it looks for first. Without it, it builds another.
    engine.command(&["tag", &latest, &format!("{THEIR_IMAGE}:0.2.3")]);
    engine.command(&["rm", made]);
}

#[test]
fn python_docker_mcp_and_its_profile_agree_on_docker() {
    let Some(engine) = docker() else { return };
    let Some(mut command) = beside_python_docker("engine") else {
        return skipped("a package index");
    };
    make_their_image(engine);
    // One file for both. That server's pool would be 32 containers.
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("config.yaml");
    let settings = format!(
        "docker: {{image: '{THEIR_IMAGE}:latest', network_disabled: true, pool_size: 2}}\n"
    );
    std::fs::write(&file, settings).unwrap();
    command
        .env("HOME", home.path())
        .env("PYTHON_DOCKER_MCP_CONFIG", &file);
    command
        .env("DOCKER_HOST", engine.address.to_string())
        .args(["--backend", "docker"]);
    let _leftovers = Leftovers(engine);
    assert_eq!(said(&mut command), "all passed");
}

/// Removes the containers that python-docker-mcp leaves behind.
struct Leftovers(&'static TestEngine);

impl Drop for Leftovers {
    fn drop(&mut self) {
        let left = self.0.command(&[
            "ps",
            "--all",
            "--quiet",
            "--filter",
            &format!("ancestor={THEIR_IMAGE}:latest"),
        ]);
        for container in left.lines() {
            self.0.try_command(&["rm", "--force", container]);
        }
    }
}
