//! The official Python client with every profile, and with ipybox itself beside the profile that stands in for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::clients::installed;
use crate::support::server::{data_dir, finished, folders};
use crate::support::{PROGRAM, skipped};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/profiles").join(name)
}

/// Runs a script to its good end and returns what it said.
#[track_caller]
fn said(command: &mut Command) -> String {
    command.envs(folders(data_dir())).env_remove("CELLBLOCK_CONFIG");
    let (status, output, errors) = finished(command);
    assert_eq!(status, Some(0), "{errors}");
    output.trim().to_owned()
}

#[test]
fn the_official_client_goes_through_every_profile() {
    let Some(python) = installed("python_v1", &["mcp>=1.26,<2"]) else { return skipped("a package index") };
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
    // Without an upper bound that server is installed with a client library that it cannot be started with.
    let Some(python) = installed("ipybox", &["ipybox==0.9.2", "mcp<2"]) else { return skipped("a package index") };
    let (theirs, ours) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new(&python);
    command.arg(script("beside.py"));
    command.arg(python.with_file_name("ipybox")).arg("--workspace").arg(theirs.path());
    command
        .args(["--", PROGRAM, "mcp", "--profile", "ipybox", "--environment", "minimal", "--workspace"])
        .arg(ours.path());
    match said(&mut command).as_str() {
        "it does not start" => skipped("a machine on which ipybox starts"),
        said => assert_eq!(said, "all passed"),
    }
}

#[test]
fn python_docker_mcp_and_its_profile_agree_without_an_engine() {
    // It imports a module that newer versions of setuptools do not have.
    let requirements = ["python-docker-mcp==0.2.5", "mcp<2", "setuptools<80"];
    let Some(python) = installed("python-docker-mcp", &requirements) else { return skipped("a package index") };
    let mut command = Command::new(&python);
    command.arg(script("beside_python_docker.py")).arg(python.with_file_name("python-docker-mcp"));
    command.args(["--", PROGRAM, "mcp", "--profile", "python-docker-mcp", "--environment", "minimal"]);
    // Neither reads a configuration of whoever runs the tests.
    let home = tempfile::tempdir().unwrap();
    assert_eq!(said(command.env("HOME", home.path())), "all passed");
}
