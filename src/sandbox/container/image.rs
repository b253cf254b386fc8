//! The image that sessions run in, and additions to it that leave it unchanged.
//!
//! Our runner gets into containers in a volume, which is filled once for each image and each
//! version of ours. The engine may be on another machine, so nothing is mounted from here: a helper
//! container writes the files that it reads from its standard input. The engine never unpacks an
//! archive, and a container that has run user code is never written to from outside. Finally the
//! helper builds a cache (`import_cache`) of the modules that every session imports first.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use bollard::container::LogOutput;
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tracing::debug;

use super::engine::{AttachedStreams, Engine, EngineError};
use super::spec::{self, LABEL_IMAGE, LABEL_ROLE, LABEL_RUNNER, ROLE_RUNNER};
use super::tenancy::Tenancy;

/// Timeout for inspecting an image and filling the volume on a slow disk.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The oldest Python that the runner supports.
pub(super) const OLDEST: (u32, u32) = (3, 10);
/// Name prefix of volumes that hold a runner.
pub(super) const VOLUME_PREFIX: &str = "cellblock-runner-";
/// Names under which an image may have Python.
pub(super) const NAMES: [&str; 2] = ["python3", "python"];

/// The module of the runner that the first process of a container runs, and the one that builds the
/// import cache.
const BOOTSTRAP: &str = "bootstrap";
const IMPORT_CACHE: &str = "import_cache";

/// Provides the files that we put beside an image.
#[async_trait]
pub trait BundledFiles: Send + Sync + 'static {
    /// Returns the files of the runner: their paths below its folder, and their text.
    fn runner(&self) -> Vec<(String, Vec<u8>)>;

    /// Returns a folder of the host that holds IPython and its dependencies, for a Python such as
    /// `3.11`.
    async fn ipython(&self, python: &str) -> Result<PathBuf, String>;
}

/// An image that is ready for sessions.
#[derive(Debug, Clone)]
pub(super) struct PreparedImage {
    /// The id of the image, not its name, which may move.
    pub(super) image: String,
    pub(super) volume: String,
    /// The runner that the volume holds.
    pub(super) runner: String,
    /// Starts the supervisor.
    pub(super) command: Vec<String>,
}

/// The helper's report about an image.
#[derive(Debug, Deserialize)]
struct Found {
    version: (u32, u32),
    ipython: bool,
    /// The volume is filled.
    ready: bool,
}

/// The inputs for inspecting an image.
pub(super) struct ImageInspection<'a> {
    pub(super) engine: &'a Engine,
    pub(super) bundled_files: &'a dyn BundledFiles,
    pub(super) tenancy: &'a Tenancy,
    /// Labels of the objects made meanwhile.
    pub(super) labels: HashMap<String, String>,
    pub(super) seccomp: &'a str,
    pub(super) report: &'a (dyn Fn(&str, u64, Option<u64>) + Send + Sync),
}

/// Inspects an image, pulls it if the engine does not have it, and fills the volume.
pub(super) async fn prepare(
    look: &ImageInspection<'_>,
    name: &str,
) -> Result<PreparedImage, String> {
    let ImageInspection { engine, report, .. } = look;
    let image = match engine.image(name).await {
        Err(EngineError::Missing(_)) => {
            let step = format!("fetching the image {name} (MiB)");
            report(&step, 0, None);
            engine
                .pull(name, &|done, total| {
                    report(&step, done >> 20, total.map(|total| total >> 20))
                })
                .await
                .map_err(|error| {
                    format!("the image {name} is not here and could not be fetched: {error}")
                })?;
            engine
                .image(name)
                .await
                .map_err(|error| error.to_string())?
        }
        found => found.map_err(|error| error.to_string())?,
    };
    let machine = engine
        .info()
        .await
        .map_err(|error| error.to_string())?
        .architecture
        .unwrap_or_default();
    let (os, architecture) = (
        image.os.unwrap_or_default(),
        image.architecture.unwrap_or_default(),
    );
    if let Some(why) = wrong_platform(name, &os, &architecture, &machine) {
        return Err(why);
    }
    let identity = image
        .id
        .ok_or("the engine does not report the identity of the image")?;
    let runner = look.bundled_files.runner();
    let digest = runner_digest(&runner);
    let volume = volume_name(&identity, &digest);
    let mut volume_labels = look.labels.clone();
    let about = [
        (LABEL_ROLE, ROLE_RUNNER),
        (LABEL_RUNNER, &digest),
        (LABEL_IMAGE, &identity),
    ];
    volume_labels.extend(about.map(|(label, value)| (label.to_owned(), value.to_owned())));
    look.tenancy
        .claim(&volume)
        .await
        .map_err(|error| format!("the runtime folder cannot be written to: {error}"))?;
    engine
        .volume(&volume, volume_labels)
        .await
        .map_err(|error| error.to_string())?;
    report("looking at the image", 0, None);
    let mut failures = Vec::new();
    for python in NAMES {
        let work = fill(look, &identity, &volume, python, &runner);
        match tokio::time::timeout(TIMEOUT, work).await {
            Ok(Ok(found)) => {
                let command = command(python, &found, BOOTSTRAP);
                return Ok(PreparedImage {
                    image: identity,
                    volume,
                    runner: digest,
                    command,
                });
            }
            Ok(Err(Failure::NoPython(why))) => failures.push(why),
            Ok(Err(Failure::Other(why))) => return Err(why),
            Err(_) => {
                return Err(format!(
                    "looking at the image {name} took longer than {} s",
                    TIMEOUT.as_secs()
                ));
            }
        }
    }
    debug!(
        image = name,
        failures = failures.join("; "),
        "no Python in the image"
    );
    Err(format!(
        "the image {name} has no Python that could be started"
    ))
}

enum Failure {
    /// The image has no program of this name.
    NoPython(String),
    Other(String),
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        match error {
            EngineError::Refused(why)
                if why.contains("executable file not found") || why.contains("no such file") =>
            {
                Failure::NoPython(why)
            }
            other => Failure::Other(other.to_string()),
        }
    }
}

/// Returns why an image cannot run on the engine's machine, if it cannot.
pub(super) fn wrong_platform(
    name: &str,
    os: &str,
    architecture: &str,
    machine: &str,
) -> Option<String> {
    let machine = match machine {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    // Images made from an archive may not state it.
    if !os.is_empty() && os != "linux" {
        return Some(format!(
            "the image {name} is for {os}; sessions need one for linux"
        ));
    }
    let is_other = ![architecture, machine].contains(&"") && architecture != machine;
    is_other.then(|| {
        format!(
            "the image {name} is for {architecture}, and the engine's machine is {machine}; name \
             an image for {machine}"
        )
    })
}

/// Returns a digest of the contents of a volume.
fn runner_digest(runner: &[(String, Vec<u8>)]) -> String {
    let mut hash = Sha256::new();
    hash.update(HELPER);
    for (path, text) in runner {
        hash.update((path.len() as u64).to_be_bytes());
        hash.update(path);
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    }
    shortened(hash)
}

fn volume_name(image: &str, runner: &str) -> String {
    let hash = Sha256::new().chain_update(image).chain_update(runner);
    format!("{VOLUME_PREFIX}{}", shortened(hash))
}

fn shortened(hash: Sha256) -> String {
    hash.finalize()
        .iter()
        .take(10)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Returns the command that starts a module of the runner. Every Python of ours in containers of
/// this image is started this way.
fn command(python: &str, found: &Found, file: &str) -> Vec<String> {
    let ready = format!("{}/ready", spec::RUNNER);
    // The image's own packages take precedence over ours.
    let ipython = if found.ipython {
        String::new()
    } else {
        format!("sys.path.append('{ready}/ipython'); ")
    };
    let start = format!(
        "import sys; sys.path.insert(0, '{ready}/runner'); {ipython}from cellblock_runner.{file} \
         import main; main()"
    );
    vec![python.to_owned(), "-I".to_owned(), "-c".to_owned(), start]
}

/// Reports the contents of the image. Then reads a list of files, as JSON in one line, and their
/// bytes, and renames the result into place in one step. Finally builds the import cache if there
/// is none, with a command given in one line. Without the cache, sessions import normally.
const HELPER: &str = r#"
import compileall, importlib.util, json, os, shutil, subprocess, sys
from py_compile import PycInvalidationMode
root = sys.argv[1]
ready = os.path.join(root, "ready")
print(json.dumps({
    "version": sys.version_info[:2],
    "ipython": importlib.util.find_spec("IPython") is not None,
    "ready": os.path.isdir(ready),
}), flush=True)
line = sys.stdin.buffer.readline()
files = json.loads(line) if line.strip() else []
if files:
    new = os.path.join(root, ".new-" + os.urandom(8).hex())
    for path, size in files:
        path = os.path.join(new, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(sys.stdin.buffer.read(size))
    compileall.compile_dir(new, quiet=2, stripdir=new, prependdir=ready, workers=1,
                           invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    for folder, folders, names in os.walk(new):
        os.chmod(folder, 0o755)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o644)
    try:
        os.rename(new, ready)
    except OSError:
        shutil.rmtree(new)
        if not os.path.isdir(ready):
            raise
command = json.loads(sys.stdin.buffer.readline())
if not os.path.exists(os.path.join(ready, "import_cache")):
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
print("filled", flush=True)
"#;

async fn fill(
    look: &ImageInspection<'_>,
    image: &str,
    volume: &str,
    python: &str,
    runner: &[(String, Vec<u8>)],
) -> Result<Found, Failure> {
    let command = vec![
        python.to_owned(),
        "-I".to_owned(),
        "-c".to_owned(),
        HELPER.to_owned(),
        spec::RUNNER.to_owned(),
    ];
    let mut labels = look.labels.clone();
    labels.insert(LABEL_ROLE.to_owned(), "helper".to_owned());
    let name = format!("cellblock-helper-{:016x}", fresh_number());
    let body = spec::helper(image, volume, command, labels, look.seccomp);
    let id = look.engine.create(&name, &body).await?;
    let done = converse(look, &id, python, runner).await;
    look.engine.remove(&id).await;
    done
}

async fn converse(
    look: &ImageInspection<'_>,
    id: &str,
    python: &str,
    runner: &[(String, Vec<u8>)],
) -> Result<Found, Failure> {
    let ImageInspection {
        engine,
        bundled_files,
        report,
        ..
    } = look;
    let AttachedStreams { output, mut input } = engine.attach(id).await?;
    let mut lines = Lines {
        output,
        text: String::new(),
        error_output: String::new(),
    };
    engine.start(id).await?;
    let first = lines.next().await.map_err(Failure::Other)?;
    let found: Found = serde_json::from_str(&first).map_err(|_| {
        Failure::Other("Python in the image says something else than what it was asked".to_owned())
    })?;
    if found.version < OLDEST {
        let ((major, minor), (oldest, oldest_minor)) = (found.version, OLDEST);
        return Err(Failure::Other(format!(
            "the image has Python {major}.{minor}; sessions need {oldest}.{oldest_minor} or newer"
        )));
    }
    let broken = |error: std::io::Error| {
        Failure::Other(format!("the helper container does not listen: {error}"))
    };
    if found.ready {
        input.write_all(b"\n").await.map_err(broken)?;
    } else {
        let mut files: Vec<(String, Vec<u8>)> = runner
            .iter()
            .map(|(path, text)| (format!("runner/{path}"), text.clone()))
            .collect();
        if !found.ipython {
            report("getting IPython for the image", 0, None);
            let version = format!("{}.{}", found.version.0, found.version.1);
            let folder = bundled_files
                .ipython(&version)
                .await
                .map_err(Failure::Other)?;
            read_tree(&folder, "ipython", &mut files).map_err(|error| {
                Failure::Other(format!("the files of IPython cannot be read: {error}"))
            })?;
        }
        report(
            "filling the volume of the runner",
            0,
            Some(files.len() as u64),
        );
        let list: Vec<(&str, usize)> = files
            .iter()
            .map(|(path, bytes)| (path.as_str(), bytes.len()))
            .collect();
        let list = serde_json::to_vec(&list).expect("texts and numbers can be written as JSON");
        input.write_all(&list).await.map_err(broken)?;
        input.write_all(b"\n").await.map_err(broken)?;
        for (_, bytes) in &files {
            input.write_all(bytes).await.map_err(broken)?;
        }
    }
    let import_cache = serde_json::to_vec(&command(python, &found, IMPORT_CACHE))
        .expect("texts can be written as JSON");
    input.write_all(&import_cache).await.map_err(broken)?;
    input.write_all(b"\n").await.map_err(broken)?;
    input.flush().await.map_err(broken)?;
    match lines.next().await.map_err(Failure::Other)?.as_str() {
        "filled" => Ok(found),
        other => Err(Failure::Other(format!(
            "the volume of the runner could not be filled: {other}"
        ))),
    }
}

/// Folders of packages that no session needs. The last one holds thousands of files for the
/// completion of code that is being typed.
const NOT_NEEDED: [&str; 4] = ["__pycache__", "bin", "tests", "third_party"];

fn read_tree(folder: &Path, name: &str, files: &mut Vec<(String, Vec<u8>)>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let inner = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            if !NOT_NEEDED.contains(&&*entry.file_name().to_string_lossy()) {
                read_tree(&entry.path(), &inner, files)?;
            }
        } else if entry.file_type()?.is_file() {
            files.push((inner, std::fs::read(entry.path())?));
        }
    }
    Ok(())
}

/// The lines that a helper prints.
struct Lines {
    output: Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>,
    text: String,
    error_output: String,
}

impl Lines {
    async fn next(&mut self) -> Result<String, String> {
        loop {
            if let Some((line, rest)) = self.text.split_once('\n') {
                let line = line.to_owned();
                self.text = rest.to_owned();
                return Ok(line);
            }
            match self.output.next().await {
                Some(Ok(LogOutput::StdErr { message })) => self
                    .error_output
                    .push_str(&String::from_utf8_lossy(&message)),
                Some(Ok(LogOutput::StdOut { message } | LogOutput::Console { message })) => {
                    self.text.push_str(&String::from_utf8_lossy(&message));
                }
                Some(Ok(LogOutput::StdIn { .. })) => {}
                Some(Err(error)) => {
                    return Err(format!("the helper container cannot be heard: {error}"));
                }
                None => {
                    let last = self
                        .error_output
                        .trim()
                        .lines()
                        .last()
                        .unwrap_or("it said nothing")
                        .to_owned();
                    if last.contains("No space left on device") {
                        return Err(EngineError::DiskFull.to_string());
                    }
                    return Err(format!("the helper container ended early: {last}"));
                }
            }
            if self.text.len() + self.error_output.len() > 64 * 1024 {
                return Err("the helper container says too much".to_owned());
            }
        }
    }
}

/// Returns a number that no other container has.
pub(super) fn fresh_number() -> u64 {
    let mut bytes = [0; 8];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_for_another_machine_is_refused_with_what_would_fit() {
        assert_eq!(wrong_platform("x", "linux", "amd64", "x86_64"), None); // control
        assert_eq!(wrong_platform("x", "", "", "x86_64"), None);
        assert_eq!(wrong_platform("x", "linux", "riscv64", "riscv64"), None);
        let why = wrong_platform("x", "linux", "s390x", "aarch64").unwrap();
        assert!(
            why.contains("is for s390x") && why.contains("for arm64"),
            "{why}"
        );
        assert!(
            wrong_platform("x", "windows", "amd64", "x86_64")
                .unwrap()
                .contains("for windows")
        );
    }

    #[test]
    fn another_runner_or_image_has_another_volume() {
        let files = |text: &str| vec![("a.py".to_owned(), text.as_bytes().to_vec())];
        let named = |image, text| volume_name(image, &runner_digest(&files(text)));
        let one = named("sha256:1", "1");
        assert_eq!(one, named("sha256:1", "1"));
        assert_ne!(one, named("sha256:2", "1"));
        assert_ne!(one, named("sha256:1", "2"));
    }

    #[test]
    fn the_packages_of_the_image_come_before_ours() {
        let command = |ipython| {
            command(
                "python3",
                &Found {
                    version: (3, 12),
                    ipython,
                    ready: true,
                },
                BOOTSTRAP,
            )
            .concat()
        };
        assert!(command(false).contains("sys.path.append('/opt/cellblock/runner/ready/ipython')"));
        assert!(!command(true).contains("ipython"));
    }
}
