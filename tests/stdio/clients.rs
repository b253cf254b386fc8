//! Clients of other makers, as they are installed from a package index: each runs a script against the built program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::control::Flag;
use super::protocol::real_uv;
use crate::support::native::host_python;
use crate::support::server::{data_dir, finished, folders};
use crate::support::{PROGRAM, skipped};

#[test]
fn the_python_client_of_the_first_generation_works() {
    run_script("python_v1.py", "mcp>=1.26,<2");
}

#[test]
fn the_python_client_of_the_second_generation_works_in_both_eras() {
    run_script("python_v2.py", "mcp>=2,<3");
}

fn run_script(script: &str, requirement: &str) {
    let Some(python) = installed(script, requirement) else {
        return skipped("a package index");
    };
    let workspace = tempfile::tempdir().unwrap();
    let _begun = Flag::new(workspace.path(), "begun");
    let mut command = Command::new(python);
    command.envs(folders(data_dir())).env_remove("CELLBLOCK_CONFIG");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(script)).arg(workspace.path());
    command.args([PROGRAM, "mcp", "--workspace"]).arg(workspace.path());
    let (status, output, errors) = finished(&mut command);
    assert_eq!((status, output.trim()), (Some(0), "all passed"), "{errors}");
}

/// Returns the interpreter of an environment with the client in it, made once, or nothing when no index answers.
fn installed(script: &str, requirement: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("client-{}", script.trim_end_matches(".py")));
    let (python, complete) = (folder.join("bin/python"), folder.join("complete"));
    if complete.exists() {
        return Some(python);
    }
    let uv = real_uv();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&uv);
        command.args(arguments).env_remove("VIRTUAL_ENV").current_dir("/");
        finished(&mut command)
    };
    let (status, _, errors) =
        run(&["venv", "--quiet", "--clear", "--python", host_python("minimal").to_str()?, folder.to_str()?]);
    assert_eq!(status, Some(0), "{errors}");
    let (status, _, _) = run(&["pip", "install", "--quiet", "--python", python.to_str()?, requirement]);
    if status != Some(0) {
        return None;
    }
    fs::write(complete, "").unwrap();
    Some(python)
}
