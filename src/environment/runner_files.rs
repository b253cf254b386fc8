//! The runner's Python files, carried in our own binary.
//!
//! They are written once for each content and Python version, compiled, and mounted read-only into every sandbox.

use std::path::{Path, PathBuf};

use super::interpreter::Interpreter;
use super::{Environment, EnvironmentError, RUNNER_INSIDE, build, record, while_doing};

/// The name of the Python package.
pub const PACKAGE: &str = "cellblock_runner";

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../runner/cellblock_runner/", $name)))),*]
    };
}

/// Every file of the runner: name and text.
pub(super) const FILES: &[(&str, &str)] = embedded![
    "__init__.py",
    "__main__.py",
    "asking.py",
    "branch.py",
    "bundles.py",
    "called.py",
    "channel.py",
    "commands.py",
    "descriptors.py",
    "errands.py",
    "family.py",
    "fences.py",
    "files.py",
    "first.py",
    "folders.py",
    "frames.py",
    "harmless.py",
    "imports.py",
    "interrupts.py",
    "lanes.py",
    "luggage.py",
    "mappings.py",
    "mcptools.py",
    "packages.py",
    "pages.py",
    "pip_answers.py",
    "pip_client.py",
    "pip_lines.py",
    "pip_programs.py",
    "processes.py",
    "reseed.py",
    "serve.py",
    "shell.py",
    "sockets.py",
    "state.py",
    "stock.py",
    "strands.py",
    "supervisor.py",
    "tool_files.py",
    "tool_models.py",
    "tool_modules.py",
    "tool_values.py",
    "variables.py",
    "zygote.py",
];

/// Returns the host folder to mount at `RUNNER_INSIDE`, writing it first if need be.
pub async fn ensure_runner(data_dir: &Path, environment: &Environment) -> Result<PathBuf, EnvironmentError> {
    let folder = data_dir.join("runner");
    let directory = folder.join(content_hash(FILES, &environment.python_version));
    if directory.is_dir() {
        return Ok(directory);
    }
    std::fs::create_dir_all(&folder).map_err(while_doing("make the folder for the runner"))?;
    let staging = tempfile::Builder::new()
        .prefix(".writing-")
        .tempdir_in(&folder)
        .map_err(while_doing("make a folder to write the runner in"))?;
    let package = staging.path().join(PACKAGE);
    std::fs::create_dir(&package).map_err(while_doing("make the folder of the runner"))?;
    for (name, text) in FILES {
        std::fs::write(package.join(name), text).map_err(while_doing("write the runner"))?;
    }
    let interpreter = Interpreter {
        executable: environment.base_executable.clone(),
        version: environment.python_version.clone(),
        base_prefix: environment.base_prefix.clone(),
        library_dir: None,
    };
    build::compile(&interpreter, staging.path(), RUNNER_INSIDE).await?;
    build::make_readable(staging.path()).map_err(while_doing("make the runner readable"))?;
    match std::fs::rename(staging.path(), &directory) {
        Ok(()) => {
            // The folder has its own name now; there is nothing left to clean up under the old one.
            let _ = staging.keep();
            Ok(directory)
        }
        // Another process was faster. Its content is the same, because the name follows from it.
        Err(_) if directory.is_dir() => Ok(directory),
        Err(cause) => Err(while_doing("put the runner in its place")(cause)),
    }
}

fn content_hash(files: &[(&str, &str)], python_version: &str) -> String {
    let content = serde_json::to_vec(&(files, python_version)).expect("texts can always be written as JSON");
    record::short_hash(&content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_runner_is_embedded() {
        let folder = Path::new(file!()).parent().unwrap().join("../../runner").join(PACKAGE);
        let folder =
            if folder.is_dir() { folder } else { Path::new(env!("CARGO_MANIFEST_DIR")).join("runner").join(PACKAGE) };
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| name.ends_with(".py"))
            .collect();
        there.sort();
        assert_eq!(FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>(), there);
    }

    #[test]
    fn another_text_or_python_makes_another_folder() {
        let one = content_hash(&[("a.py", "1")], "3.12.1");
        assert_eq!(one, content_hash(&[("a.py", "1")], "3.12.1"));
        assert_ne!(one, content_hash(&[("a.py", "2")], "3.12.1"));
        assert_ne!(one, content_hash(&[("b.py", "1")], "3.12.1"));
        assert_ne!(one, content_hash(&[("a.py", "1")], "3.12.2"));
    }
}
