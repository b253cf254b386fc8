//! The runner's files, embedded in our binary: Python, and an emoji font with its licence.
//!
//! They are written once for each content and Python version, compiled, and mounted read-only into
//! every sandbox.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::interpreter::BasePython;
use super::{Environment, EnvironmentError, RUNNER_INSIDE, build, record, while_doing};

/// Name of the Python package.
pub const PACKAGE: &str = "cellblock_runner";

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../runner/cellblock_runner/", $name)))),*]
    };
}

/// Every file of the runner: name and content.
pub(super) const FILES: &[(&str, &[u8])] = embedded![
    "__init__.py",
    "__main__.py",
    "bootstrap.py",
    "branch.py",
    "bundles.py",
    "channel.py",
    "commands.py",
    "confine.py",
    "descriptors.py",
    "displays.py",
    "files.py",
    "folders.py",
    "fonts.py",
    "fork_state.py",
    "forkserver.py",
    "frames.py",
    "host_calls.py",
    "import_cache.py",
    "import_hooks.py",
    "imports.py",
    "interrupts.py",
    "launcher.py",
    "loops.py",
    "mappings.py",
    "mcptools.py",
    "messages.py",
    "mux.py",
    "mux_connection.py",
    "noto_emoji.LICENSE",
    "noto_emoji.ttf",
    "packages.py",
    "pip_arguments.py",
    "pip_client.py",
    "pip_commands.py",
    "pip_shim.py",
    "plotly_figures.py",
    "poller.py",
    "pools.py",
    "prefault.py",
    "private_descriptors.py",
    "process_table.py",
    "processes.py",
    "readonly_cells.py",
    "reseed.py",
    "seeds.py",
    "serve.py",
    "shell.py",
    "side_process.py",
    "sockets.py",
    "state.py",
    "streams.py",
    "subprocess_shim.py",
    "supervisor.py",
    "threads.py",
    "tool_files.py",
    "tool_models.py",
    "tool_modules.py",
    "tool_values.py",
    "variables.py",
    "zygote.py",
];

/// The file that records the sizes of all other files of a runner.
const SIZES: &str = "sizes.json";

/// Returns the host directory to mount at `RUNNER_INSIDE`, and writes it first if necessary. A
/// directory that is incomplete after a full disk or a crash of the machine is written again.
pub async fn ensure_runner(
    data_dir: &Path,
    environment: &Environment,
) -> Result<PathBuf, EnvironmentError> {
    let folder = data_dir.join("runner");
    let directory = folder.join(content_hash(FILES, &environment.python_version));
    if is_whole(&directory) {
        return Ok(directory);
    }
    std::fs::create_dir_all(&folder).map_err(while_doing("make the folder for the runner"))?;
    let staging = tempfile::Builder::new()
        .prefix(".writing-")
        .tempdir_in(&folder)
        .map_err(while_doing("make a folder to write the runner in"))?;
    let package = staging.path().join(PACKAGE);
    std::fs::create_dir(&package).map_err(while_doing("make the folder of the runner"))?;
    for (name, content) in FILES {
        std::fs::write(package.join(name), content).map_err(while_doing("write the runner"))?;
    }
    let interpreter = BasePython {
        executable: environment.base_executable.clone(),
        version: environment.python_version.clone(),
        base_prefix: environment.base_prefix.clone(),
        library_dir: None,
    };
    build::compile(&interpreter, staging.path(), RUNNER_INSIDE).await?;
    let sizes = sizes_in(&package).map_err(while_doing("look at the runner"))?;
    let sizes =
        serde_json::to_vec(&sizes).expect("names and numbers can always be written as JSON");
    std::fs::write(staging.path().join(SIZES), sizes).map_err(while_doing("write the runner"))?;
    build::make_readable(staging.path()).map_err(while_doing("make the runner readable"))?;
    if directory.is_dir() && !is_whole(&directory) {
        // Processes that use the damaged directory keep the files that are left.
        let torn = folder.join(format!(".torn-{}", std::process::id()));
        if std::fs::rename(&directory, &torn).is_ok() {
            let _ = std::fs::remove_dir_all(torn);
        }
    }
    match std::fs::rename(staging.path(), &directory) {
        Ok(()) => {
            // The directory was renamed; nothing is left to clean up under the old name.
            let _ = staging.keep();
            Ok(directory)
        }
        // Another process was faster. Its content is the same, because the name is derived from it.
        Err(_) if directory.is_dir() => Ok(directory),
        Err(cause) => Err(while_doing("put the runner in its place")(cause)),
    }
}

/// Returns whether all files of a runner still have the sizes that were written.
fn is_whole(directory: &Path) -> bool {
    let written = std::fs::read(directory.join(SIZES)).ok();
    let written =
        written.and_then(|text| serde_json::from_slice::<BTreeMap<String, u64>>(&text).ok());
    written.is_some_and(|written| {
        sizes_in(&directory.join(PACKAGE)).is_ok_and(|found| found == written)
    })
}

/// Returns the sizes of the package's source and bytecode files.
fn sizes_in(package: &Path) -> std::io::Result<BTreeMap<String, u64>> {
    let mut sizes = BTreeMap::new();
    for folder in [package.to_owned(), package.join("__pycache__")] {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let found = entry.metadata()?;
            if found.is_file() {
                sizes.insert(
                    entry.file_name().to_string_lossy().into_owned(),
                    found.len(),
                );
            }
        }
    }
    Ok(sizes)
}

fn content_hash(files: &[(&str, &[u8])], python_version: &str) -> String {
    let mut all = python_version.as_bytes().to_vec();
    for (name, content) in files {
        // The lengths ensure that two different lists of files never give the same bytes.
        all.extend(format!("\n{name} {}\n", content.len()).into_bytes());
        all.extend_from_slice(content);
    }
    record::short_hash(&all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_runner_is_embedded() {
        let folder = Path::new(file!())
            .parent()
            .unwrap()
            .join("../../runner")
            .join(PACKAGE);
        let folder = if folder.is_dir() {
            folder
        } else {
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("runner")
                .join(PACKAGE)
        };
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| name != "__pycache__")
            .collect();
        there.sort();
        assert_eq!(
            FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            there
        );
    }

    #[test]
    fn another_text_or_python_makes_another_folder() {
        let one = content_hash(&[("a.py", b"1")], "3.12.1");
        assert_eq!(one, content_hash(&[("a.py", b"1")], "3.12.1"));
        assert_ne!(one, content_hash(&[("a.py", b"2")], "3.12.1"));
        assert_ne!(one, content_hash(&[("b.py", b"1")], "3.12.1"));
        assert_ne!(one, content_hash(&[("a.py", b"1")], "3.12.2"));
    }
}
