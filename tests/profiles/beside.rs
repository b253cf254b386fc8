//! The official Python client with every profile, and with ipybox itself beside the profile that stands in for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::clients::installed;
use crate::support::server::{data_dir, finished, folders};
use crate::support::{PROGRAM, skipped};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/profiles").join(name)
}

#[track_caller]
fn check_passed(command: &mut Command) {
    command.envs(folders(data_dir())).env_remove("CELLBLOCK_CONFIG");
    let (status, output, errors) = finished(command);
    assert_eq!((status, output.trim()), (Some(0), "all passed"), "{errors}");
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
        check_passed(&mut command);
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
    check_passed(&mut command);
}
