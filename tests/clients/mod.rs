//! Clients of other makers, as they are installed from package indexes: each tells the same story
//! to the built program.
//!
//! Every client lists tools, runs cells, gets a plot, and cancels a cell whose session must then be
//! free. The scripts are beside this file; a client that knows both protocol eras goes through the
//! story in each.

mod inspector;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::stdio::protocol::real_uv;
use crate::support::native::host_python;
use crate::support::server::{data_dir, finished, folders};
use crate::support::service::Service;
use crate::support::{PROGRAM, npm, skipped};

#[test]
fn the_python_client_of_the_first_generation_works() {
    python("python_v1.py", "mcp>=1.26,<2");
}

#[test]
fn the_python_client_of_the_second_generation_works_in_both_eras() {
    python("python_v2.py", "mcp>=2,<3");
}

#[test]
fn the_typescript_client_of_the_first_generation_works() {
    typescript("typescript_v1.mjs");
}

#[test]
fn the_typescript_client_of_the_second_generation_works_in_both_eras() {
    typescript("typescript_v2.mjs");
}

/// What has a server ask about commands and packages.
const ASK: [&str; 4] = ["--approve-shell", "ask", "--approve-packages", "ask"];

#[test]
fn the_person_behind_the_python_client_of_the_first_generation_is_asked() {
    python_with("python_v1", "approvals_v1.py", "mcp>=1.26,<2", &ASK);
}

#[test]
fn the_person_behind_the_python_client_of_the_second_generation_is_asked_in_both_eras() {
    python_with("python_v2", "approvals_v2.py", "mcp>=2,<3", &ASK);
}

fn python(script: &str, requirement: &str) {
    python_with(script.trim_end_matches(".py"), script, requirement, &[]);
}

/// Has a Python client tell its story to a server with these flags.
fn python_with(environment: &str, script: &str, requirement: &str, flags: &[&str]) {
    let Some(python) = installed(environment, &[requirement]) else {
        return skipped("a package index");
    };
    tell_with(flags, || {
        let mut command = Command::new(&python);
        command.arg(scripts().join(script));
        command
    });
}

fn typescript(script: &str) {
    let Some(folder) = npm::folder() else {
        return skipped("npm");
    };
    // A script finds packages beside itself.
    let copies = tempfile::tempdir_in(folder).unwrap();
    for name in ["story.mjs", script] {
        fs::copy(scripts().join(name), copies.path().join(name)).unwrap();
    }
    tell(|| {
        let mut command = npm::node(folder);
        command.arg(copies.path().join(script));
        command
    });
}

/// Lets a client tell its story over every transport.
fn tell(client: impl Fn() -> Command) {
    tell_with(&[], client);
}

fn tell_with(flags: &[&str], client: impl Fn() -> Command) {
    let mut over_pipes = client();
    over_pipes
        .envs(folders(data_dir()))
        .env_remove("CELLBLOCK_CONFIG")
        .args(["stdio", PROGRAM, "mcp"])
        .args(flags);
    check_told(&mut over_pipes);
    let service = Service::start(flags);
    let mut over_http = client();
    check_told(
        over_http
            .env("CELLBLOCK_TOKEN", &service.token)
            .args(["http", &service.url()]),
    );
}

fn check_told(client: &mut Command) {
    let (status, output, errors) = finished(client);
    assert_eq!((status, output.trim()), (Some(0), "all passed"), "{errors}");
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients")
}

/// Returns the interpreter of an environment with what is required in it, made once, or nothing
/// when no index answers.
pub(crate) fn installed(name: &str, requirements: &[&str]) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("client-{name}"));
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    if complete.exists() {
        return Some(python);
    }
    let uv = real_uv();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&uv);
        command
            .args(arguments)
            .env_remove("VIRTUAL_ENV")
            .current_dir("/");
        finished(&mut command)
    };
    let (status, _, errors) = run(&[
        "venv",
        "--quiet",
        "--clear",
        "--python",
        host_python("minimal").to_str()?,
        folder.to_str()?,
    ]);
    assert_eq!(status, Some(0), "{errors}");
    let install = ["pip", "install", "--quiet", "--python", python.to_str()?];
    let (status, _, _) = run(&[&install[..], requirements].concat());
    if status != Some(0) {
        return None;
    }
    fs::write(complete, "").unwrap();
    Some(python)
}
