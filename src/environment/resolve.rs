//! Resolves requirements to a lock with exact versions.
//!
//! uv resolves for the given Python, from wheels only, and records the hashes of every file of each
//! chosen version.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::elsewhere::Elsewhere;
use super::inputs::Input;
use super::interpreter::BasePython;
use super::lockfile::{Hashes, Lockfile};
use super::{EnvironmentError, EnvironmentProgress, Progress, uv, while_doing};

/// The packages to resolve, and the requirements of input files. They must include what the runner
/// needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) packages: &'a [String],
    pub(super) files: Option<&'a Input>,
}

/// The target Python: the local interpreter, or a remote one that uv resolves for with the help of
/// the local one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Audience<'a> {
    pub(super) interpreter: &'a BasePython,
    pub(super) elsewhere: Option<&'a Elsewhere>,
}

impl Audience<'_> {
    /// Returns the minor version of the target Python, such as `3.12`.
    fn line(self) -> String {
        self.elsewhere
            .map_or_else(|| self.interpreter.line(), Elsewhere::line)
    }
}

/// Chooses versions of all wanted packages and their dependencies.
pub(super) async fn resolve(
    wanted: Wanted<'_>,
    audience: Audience<'_>,
    uv: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<Lockfile, EnvironmentError> {
    progress(EnvironmentProgress::step("resolving packages"));
    let hashes = wanted
        .files
        .map_or_else(|| Ok(Hashes::new()), Input::hashes)?;
    let workshop = tempfile::tempdir().map_err(while_doing("make a folder to resolve in"))?;
    let (list, output) = (
        workshop.path().join("requirements.in"),
        workshop.path().join("resolved"),
    );
    std::fs::write(&list, wanted.packages.join("\n") + "\n")
        .map_err(while_doing("write the requirements"))?;
    uv::run(
        uv,
        arguments(wanted, audience, list, &output),
        &uv::installer_variables(variables),
        &mut |_| {},
    )
    .await
    .map_err(|failure| failure.during("resolve the packages with uv"))?;
    let resolved =
        std::fs::read_to_string(&output).map_err(while_doing("read what uv resolved"))?;
    Ok(Lockfile::parse(&resolved)?
        .chosen_for(&audience.line())
        .narrowed(&hashes)?)
}

fn arguments(
    wanted: Wanted<'_>,
    audience: Audience<'_>,
    list: PathBuf,
    output: &Path,
) -> Vec<OsString> {
    let fixed = [
        "pip",
        "compile",
        "--quiet",
        "--no-build",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
    ];
    let mut arguments: Vec<OsString> = fixed.iter().map(OsString::from).collect();
    arguments.extend([
        "--python".into(),
        audience.interpreter.executable.clone().into_os_string(),
    ]);
    arguments.extend(
        audience
            .elsewhere
            .iter()
            .flat_map(|elsewhere| elsewhere.arguments())
            .map(OsString::from),
    );
    arguments.extend(["--output-file".into(), output.into()]);
    if let Some(input) = wanted.files {
        // A file may name its own indexes, which the installation needs as well.
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
