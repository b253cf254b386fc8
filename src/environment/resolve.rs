//! Choosing exact versions: from requirements to a lock.
//!
//! uv decides, for the Python at hand and from wheels only, and writes down the hashes of every file of each version it chose.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::inputs::Input;
use super::interpreter::Interpreter;
use super::lockfile::{Hashes, Lockfile};
use super::spec::RUNNER_NEEDS;
use super::{EnvironmentError, EnvironmentProgress, Progress, uv, while_doing};

/// What is to be resolved.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted<'a> {
    Packages(&'a [String]),
    /// Files, and what the runner needs.
    Files(&'a Input),
}

/// Chooses a version of everything that is wanted and of everything that it needs.
pub(super) async fn resolve(
    wanted: Wanted<'_>,
    interpreter: &Interpreter,
    uv: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<Lockfile, EnvironmentError> {
    progress(EnvironmentProgress::step("resolving packages"));
    let hashes = match wanted {
        Wanted::Packages(_) => Hashes::new(),
        Wanted::Files(input) => input.hashes()?,
    };
    let workshop = tempfile::tempdir().map_err(while_doing("make a folder to resolve in"))?;
    let (list, output) = (workshop.path().join("requirements.in"), workshop.path().join("resolved"));
    let listed = match wanted {
        Wanted::Packages(packages) => packages.join("\n"),
        Wanted::Files(_) => RUNNER_NEEDS.join("\n"),
    };
    std::fs::write(&list, listed + "\n").map_err(while_doing("write the requirements"))?;
    uv::run(uv, arguments(wanted, interpreter, list, &output), &uv::installer_variables(variables), &mut |_| {})
        .await
        .map_err(|failure| failure.during("resolve the packages with uv"))?;
    let resolved = std::fs::read_to_string(&output).map_err(while_doing("read what uv resolved"))?;
    Ok(Lockfile::parse(&resolved)?.chosen_for(&interpreter.line()).narrowed(&hashes)?)
}

fn arguments(wanted: Wanted<'_>, interpreter: &Interpreter, list: PathBuf, output: &Path) -> Vec<OsString> {
    let fixed = ["pip", "compile", "--quiet", "--no-build", "--generate-hashes", "--no-header", "--no-annotate"];
    let mut arguments: Vec<OsString> = fixed.iter().map(OsString::from).collect();
    arguments.extend(["--python".into(), interpreter.executable.clone().into_os_string()]);
    arguments.extend(["--output-file".into(), output.into()]);
    if let Wanted::Files(input) = wanted {
        // A file may name indexes of its own, and the installation needs them as well.
        arguments.extend(["--emit-index-url".into(), "--emit-find-links".into()]);
        for extra in input.extras() {
            arguments.extend(["--extra".into(), extra.into()]);
        }
        arguments.push("--".into());
        arguments.extend(input.files().iter().map(OsString::from));
    } else {
        arguments.push("--".into());
    }
    arguments.push(list.into_os_string());
    arguments
}
