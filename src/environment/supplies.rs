//! Files that are added to containers beside their image: the runner, and IPython for images
//! without it.
//!
//! IPython and its dependencies are pure Python, so wheels for the image's Python version can be
//! unpacked here, whatever Python this machine has. None of their code runs on the host.

use std::path::{Path, PathBuf};

use super::runner_files::{FILES, PACKAGE};
use super::{EnvironmentError, InstallerTools, record, uv, while_doing};

/// The IPython for images without one. Environments that we build have the same lower bound.
const REQUIREMENT: &str = "ipython>=8";

/// Returns the runner's files: paths below its directory, and contents.
pub fn runner() -> Vec<(String, Vec<u8>)> {
    FILES
        .iter()
        .map(|(name, content)| (format!("{PACKAGE}/{name}"), content.to_vec()))
        .collect()
}

/// Returns a directory with IPython for a Python such as `3.11`, and fills it first if necessary.
pub async fn ipython(data_dir: &Path, python: &str) -> Result<PathBuf, EnvironmentError> {
    let folder = data_dir.join("containers");
    let name = format!(
        "ipython-{python}-{}",
        record::short_hash(REQUIREMENT.as_bytes())
    );
    let directory = folder.join(name);
    if directory.is_dir() {
        return Ok(directory);
    }
    std::fs::create_dir_all(&folder)
        .map_err(while_doing("make the folder for what containers get"))?;
    let staging = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(&folder)
        .map_err(while_doing("make a folder to unpack IPython in"))?;
    let tools = InstallerTools::find(data_dir)?;
    let program = tools.uv(data_dir).await?;
    let target = staging.path().to_string_lossy().into_owned();
    let mut arguments = vec![
        "pip",
        "install",
        "--quiet",
        "--target",
        &target,
        "--python-version",
        python,
    ];
    // Wheels only, because building a source package runs its code.
    arguments.extend([
        "--only-binary",
        ":all:",
        "--no-compile-bytecode",
        "--link-mode",
        "copy",
        REQUIREMENT,
    ]);
    let installed = uv::run(&program, arguments, &tools.variables, &mut |_| ()).await;
    installed.map_err(|failure| failure.during("get IPython for the image"))?;
    match std::fs::rename(staging.path(), &directory) {
        Ok(()) => {
            // The directory was renamed; nothing is left to clean up under the old name.
            let _ = staging.keep();
            Ok(directory)
        }
        // Another process was faster.
        Err(_) if directory.is_dir() => Ok(directory),
        Err(cause) => Err(while_doing("put IPython in its place")(cause)),
    }
}
