//! What goes into containers beside their image: the runner's files, and IPython for images that have none.
//!
//! IPython and everything it needs are pure Python, so wheels for the version of the image can be unpacked here, whatever Python this machine has. Nothing of
//! them is run on the host.

use std::path::{Path, PathBuf};

use super::runner_files::{FILES, PACKAGE};
use super::{EnvironmentError, InstallerTools, record, uv, while_doing};

/// The IPython that images without one get. The bound is that of the environments that we build ourselves.
const REQUIREMENT: &str = "ipython>=8";

/// Returns the files of the runner: their paths below its folder, and their content.
pub fn runner() -> Vec<(String, Vec<u8>)> {
    FILES
        .iter()
        .map(|(name, content)| (format!("{PACKAGE}/{name}"), content.to_vec()))
        .collect()
}

/// Returns a folder with IPython for a Python such as `3.11`, filling it first if need be.
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
    // Only wheels, because building a source package runs its code.
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
            // The folder has its own name now; there is nothing left to clean up under the old one.
            let _ = staging.keep();
            Ok(directory)
        }
        // Another process was faster.
        Err(_) if directory.is_dir() => Ok(directory),
        Err(cause) => Err(while_doing("put IPython in its place")(cause)),
    }
}
