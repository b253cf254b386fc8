//! Python environments: an interpreter with packages, ready to be mounted read-only into sandboxes.
//!
//! ```text
//! <data folder>/environments/<name>-<hash>/
//!     tree                         mounted at /opt/cellblock/env
//!     cellblock-environment.json   the record of its content; present only if it is complete
//!     requirements.lock            exact versions and hashes that it was installed from
//!     in-use.lock                  held shared by every server that uses it
//! <data folder>/runner/<hash>      our own Python code, mounted at /opt/cellblock/runner
//! <data folder>/tools/uv           the installer, if the machine has none
//! ```
//!
//! The hash is derived from everything that determines the content. So a finished environment never
//! changes, and a changed spec makes a new one. Only `tree` is mounted into sandboxes: user code
//! could lock a lock file inside it, and the record contains host paths.
//!
//! `spec` describes an environment, `inputs` reads the description from files, and `matching`
//! derives it from the dependencies of a session. `interpreter` finds Python, `resolve` chooses
//! exact versions, `lockfile` saves them with their hashes, `uv` runs the installer, `build`
//! combines these steps, and `record` stores the metadata. `elsewhere` does the same for the Python
//! of an image, which is not on this machine.
//!
//! This module never runs code of an installed package.

mod build;
mod elsewhere;
mod inputs;
mod interpreter;
mod lock;
mod lockfile;
mod matching;
mod pip_files;
mod record;
mod resolve;
pub mod runner_files;
pub mod spec;
pub mod supplies;
mod uv;
mod versions;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub use elsewhere::{Contents, Elsewhere, Platform, install_elsewhere, lock_elsewhere};
pub use inputs::Input;
pub use lockfile::{Lockfile, LockfileError};
pub use matching::{DependencyError, matching};
pub use record::Record;
pub use spec::{EnvironmentName, EnvironmentSpec, PythonRequest};

/// Mount point of an environment inside.
pub const ENVIRONMENT_INSIDE: &str = "/opt/cellblock/env";
/// Mount point of the interpreter's prefix inside, unless it is in the system directories.
pub const PYTHON_INSIDE: &str = "/opt/cellblock/python";
/// Mount point of the runner inside.
pub const RUNNER_INSIDE: &str = "/opt/cellblock/runner";

const TREE: &str = "tree";
const IN_USE_FILE: &str = "in-use.lock";

/// A finished environment. While this value lives, no process can remove the environment.
#[derive(Debug)]
pub struct Environment {
    pub name: EnvironmentName,
    /// The host directory to mount at `ENVIRONMENT_INSIDE`.
    pub root: PathBuf,
    /// The interpreter's prefix on the host.
    pub base_prefix: PathBuf,
    /// The interpreter on the host. The links in `root` are dangling on the host: they contain
    /// inside paths.
    pub base_executable: PathBuf,
    /// The interpreter's path inside.
    pub python_inside: String,
    /// Such as `3.12.4`.
    pub python_version: String,
    /// Modules that the warm interpreter imports before it is forked.
    pub preload: Vec<String>,
    /// The installed packages, as `name==version`.
    pub packages: Vec<String>,
    /// The `LD_LIBRARY_PATH` that the interpreter needs inside to start, if any.
    pub library_path: Option<String>,
    _in_use: lock::Lock,
}

impl Environment {
    /// Returns the host directory to mount at `PYTHON_INSIDE`, or `None` if the system directories
    /// already contain the interpreter.
    pub fn prefix_to_mount(&self) -> Option<&Path> {
        Some(self.base_prefix.as_path()).filter(|prefix| !interpreter::is_system(prefix))
    }

    /// Returns the variables that every process inside needs to find this environment.
    pub fn variables_inside(&self) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            (
                "PATH",
                format!("{ENVIRONMENT_INSIDE}/bin:/usr/local/bin:/usr/bin:/bin"),
            ),
            ("VIRTUAL_ENV", ENVIRONMENT_INSIDE.to_owned()),
        ];
        variables.extend(
            self.library_path
                .clone()
                .map(|path| ("LD_LIBRARY_PATH", path)),
        );
        variables
    }
}

/// Progress of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentProgress {
    /// A phrase for users, such as "downloading numpy".
    pub step: String,
    pub done: u64,
    pub total: Option<u64>,
}

impl EnvironmentProgress {
    fn step(step: &str) -> EnvironmentProgress {
        EnvironmentProgress {
            step: step.to_owned(),
            done: 0,
            total: None,
        }
    }
}

/// Callback that receives progress.
pub type Progress<'a> = &'a (dyn Fn(EnvironmentProgress) + Send + Sync);

/// Error while building, opening or removing an environment.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    #[error(
        "no usable Python was found for {request}{}\nInstall Python 3.10 or newer (Debian, Ubuntu: \
         apt install python3), or install uv, \
         which can download one",
        each_on_a_line(tried)
    )]
    NoPython {
        request: PythonRequest,
        tried: Vec<String>,
    },
    #[error(
        "packages cannot be installed: uv was not found, and {} has neither pip nor venv\nDebian, \
         Ubuntu: apt install python3-venv\n\
         Or install uv and put it on the PATH. What Python said:\n{output}", python.display()
    )]
    NoInstaller { python: PathBuf, output: String },
    #[error("CELLBLOCK_UV names {}, which is not a program", .0.display())]
    NoSuchInstaller(PathBuf),
    #[error("could not {attempt}:\n{output}")]
    Installer { attempt: String, output: String },
    #[error("{}: {why}", file.display())]
    Input { file: PathBuf, why: String },
    #[error("the packages cannot be locked")]
    Lockfile(#[from] LockfileError),
    #[error("the environment was built but cannot be used inside a sandbox: {why}")]
    Unusable { why: String },
    #[error("there is no environment \"{name}\" to remove; built are: {built}")]
    NotBuilt {
        name: EnvironmentName,
        built: String,
    },
    #[error(
        "the environment \"{name}\" is in use{}; stop the servers that use it, then try again",
        by_processes(processes)
    )]
    InUse {
        name: EnvironmentName,
        processes: Vec<u32>,
    },
    #[error("the environment \"{name}\" is being built right now")]
    BeingBuilt { name: EnvironmentName },
    #[error("could not {attempt}")]
    Files {
        attempt: &'static str,
        #[source]
        cause: io::Error,
    },
}

fn each_on_a_line(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

fn by_processes(processes: &[u32]) -> String {
    match processes {
        [] => String::new(),
        [one] => format!(" by process {one}"),
        many => format!(
            " by processes {}",
            many.iter()
                .map(u32::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}

/// Converts a file system error into an error that names the attempt.
fn while_doing(attempt: &'static str) -> impl FnOnce(io::Error) -> EnvironmentError {
    move |cause| EnvironmentError::Files { attempt, cause }
}

/// Returns the environment for `spec` and builds it first if necessary.
///
/// A finished environment is found without running a program. After a build, older unused
/// environments of the same name are removed.
pub async fn ensure(
    spec: &EnvironmentSpec,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<Environment, EnvironmentError> {
    ensure_with(spec, None, data_dir, &own_variables(), progress).await
}

/// Like [`ensure`], with exactly the content of `lockfile`. The packages of `spec` are those of the
/// lock.
pub async fn ensure_locked(
    spec: &EnvironmentSpec,
    lockfile: &Lockfile,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<Environment, EnvironmentError> {
    ensure_with(spec, Some(lockfile), data_dir, &own_variables(), progress).await
}

/// Chooses exact versions for the requirements in files, and the matching Python. Nothing is
/// installed.
pub async fn resolve(
    input: &Input,
    python: Option<&PythonRequest>,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<(Lockfile, PythonRequest), EnvironmentError> {
    resolve_with(input, python, data_dir, &own_variables(), progress).await
}

async fn resolve_with(
    input: &Input,
    python: Option<&PythonRequest>,
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<(Lockfile, PythonRequest), EnvironmentError> {
    let python = input.python(python)?;
    progress(EnvironmentProgress::step("looking for Python"));
    let (interpreter, uv) = build::find_tools(&python, data_dir, variables, progress).await?;
    input.check_python(&interpreter.version)?;
    let wanted = resolve::Wanted {
        packages: &spec::RUNNER_NEEDS.map(str::to_owned),
        files: Some(input),
    };
    let audience = resolve::Audience {
        interpreter: &interpreter,
        elsewhere: None,
    };
    Ok((
        resolve::resolve(wanted, audience, &uv, variables, progress).await?,
        python,
    ))
}

async fn ensure_with(
    spec: &EnvironmentSpec,
    lockfile: Option<&Lockfile>,
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<Environment, EnvironmentError> {
    loop {
        if let Some(directory) = find_built(spec, lockfile, data_dir)
            && let Some(environment) = open(&directory, spec)?
        {
            return Ok(environment);
        }
        let directory = build::build(spec, lockfile, data_dir, variables, progress).await?;
        // Another process may have removed it since the build; then it is built again.
        if let Some(environment) = open(&directory, spec)? {
            remove_older(data_dir, &spec.name, &directory);
            return Ok(environment);
        }
    }
}

/// The package installer and its environment variables.
#[derive(Debug, Clone)]
pub struct InstallerTools {
    /// The path of uv, which may not exist before [`InstallerTools::uv`] was called.
    place: PathBuf,
    pub variables: BTreeMap<String, String>,
}

impl InstallerTools {
    /// Finds the package installer on this machine. Nothing is installed yet.
    pub fn find(data_dir: &Path) -> Result<InstallerTools, EnvironmentError> {
        let variables = own_variables();
        let place = uv::find(&variables, data_dir)?.unwrap_or_else(|| uv::own_uv(data_dir));
        Ok(InstallerTools {
            place,
            variables: uv::installer_variables(&variables),
        })
    }

    /// Returns the host file or directory to mount and its inside path, so that uv is at `uv` in
    /// `folder`.
    pub fn to_show(&self, data_dir: &Path, folder: &str) -> (PathBuf, PathBuf) {
        match uv::own_uv(data_dir).parent() {
            // uv may not be installed yet, but its directory can already be mounted.
            Some(tools) if self.place.parent() == Some(tools) => {
                (tools.to_owned(), PathBuf::from(folder))
            }
            _ => (self.place.clone(), Path::new(folder).join("uv")),
        }
    }

    /// Returns uv if it is already installed.
    pub fn uv_at_hand(&self) -> Option<&Path> {
        self.place.is_file().then_some(self.place.as_path())
    }

    /// Returns any Python of this machine, for uv commands that need some interpreter.
    pub async fn python(&self) -> Result<PathBuf, EnvironmentError> {
        let request = PythonRequest::Any;
        match interpreter::find(&request, &own_variables()).await {
            Ok(found) => Ok(found.executable),
            Err(tried) => Err(EnvironmentError::NoPython { request, tried }),
        }
    }

    /// Returns uv, and installs it below our own directory if there is none.
    pub async fn uv(&self, data_dir: &Path) -> Result<PathBuf, EnvironmentError> {
        let variables = own_variables();
        if let Some(uv) = uv::find(&variables, data_dir)? {
            return Ok(uv);
        }
        let request = PythonRequest::Any;
        let found = interpreter::find(&request, &variables).await;
        let interpreter = found.map_err(|tried| EnvironmentError::NoPython { request, tried })?;
        uv::install(&interpreter, &variables, data_dir, &|_| ()).await
    }
}

/// Returns the server's variables, with the settings of pip's files added.
///
/// Variables that are not UTF-8 are left out, because they could not be shown in an error either.
fn own_variables() -> BTreeMap<String, String> {
    let all = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut variables: BTreeMap<String, String> = all.collect();
    for (name, value) in pip_files::read(&variables, Path::new("/")) {
        variables.entry(name.to_owned()).or_insert(value);
    }
    variables
}

/// A built environment, as returned by `list`.
#[derive(Debug, Clone)]
pub struct Built {
    pub record: Record,
    pub directory: PathBuf,
    /// Whether any process uses it.
    pub in_use: bool,
    /// The processes that use it, as far as they are visible.
    pub processes: Vec<u32>,
}

impl Built {
    /// Returns the text of the lock that it was installed from. Environments of older versions have
    /// none.
    pub fn lock(&self) -> Option<String> {
        std::fs::read_to_string(self.directory.join(lockfile::LOCK_FILE)).ok()
    }
}

/// Lists the environments on this machine, ordered by name, newest first.
pub fn list(data_dir: &Path) -> Vec<Built> {
    let mut built: Vec<Built> = directories(data_dir)
        .into_iter()
        .filter_map(|(_, directory)| {
            let record = Record::read(&directory)?;
            let lock = directory.join(IN_USE_FILE);
            let in_use = matches!(lock::try_exclusive(&lock), Ok(None));
            let processes = if in_use {
                lock::holders(&lock)
            } else {
                Vec::new()
            };
            Some(Built {
                record,
                directory,
                in_use,
                processes,
            })
        })
        .collect();
    built.sort_by(|left, right| {
        (&left.record.name, right.record.created).cmp(&(&right.record.name, left.record.created))
    });
    built
}

/// Returns the spec of the newest environment of each name.
pub fn built_specs(data_dir: &Path) -> Vec<EnvironmentSpec> {
    let mut records: Vec<Record> = directories(data_dir)
        .into_iter()
        .filter_map(|(_, directory)| Record::read(&directory))
        .collect();
    records.sort_by(|left, right| (&left.name, right.created).cmp(&(&right.name, left.created)));
    records.dedup_by(|later, earlier| later.name == earlier.name);
    records.iter().map(Record::spec).collect()
}

/// Removes all environments of a name, or none if any of them is in use. Returns the number of
/// freed bytes.
pub fn remove(data_dir: &Path, name: &EnvironmentName) -> Result<u64, EnvironmentError> {
    let folder = environments_dir(data_dir);
    let wanted: Vec<PathBuf> = directories(data_dir)
        .into_iter()
        .filter(|(found, _)| found == name)
        .map(|(_, directory)| directory)
        .collect();
    if wanted.is_empty() {
        let mut built: Vec<String> = directories(data_dir)
            .into_iter()
            .map(|(name, _)| name.to_string())
            .collect();
        built.sort();
        built.dedup();
        let built = if built.is_empty() {
            "none".to_owned()
        } else {
            built.join(", ")
        };
        return Err(EnvironmentError::NotBuilt {
            name: name.clone(),
            built,
        });
    }
    let lock_path = build::build_lock(&folder, name);
    let Some(_building) =
        lock::try_exclusive(&lock_path).map_err(while_doing("lock the environment"))?
    else {
        return Err(EnvironmentError::BeingBuilt { name: name.clone() });
    };
    let mut locks = Vec::new();
    for directory in &wanted {
        let path = directory.join(IN_USE_FILE);
        match lock::try_exclusive(&path).map_err(while_doing("lock the environment"))? {
            Some(lock) => locks.push(lock),
            None => {
                return Err(EnvironmentError::InUse {
                    name: name.clone(),
                    processes: lock::holders(&path),
                });
            }
        }
    }
    let mut freed = 0;
    for directory in &wanted {
        freed += Record::read(directory).map_or(0, |record| record.size);
        discard(directory).map_err(while_doing("remove the environment"))?;
    }
    build::remove_leftovers(&folder, name);
    Ok(freed)
}

fn environments_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("environments")
}

fn directories(data_dir: &Path) -> Vec<(EnvironmentName, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(environments_dir(data_dir)) else {
        return Vec::new();
    };
    let named = |entry: std::fs::DirEntry| {
        Some((record::name_in(entry.file_name().to_str()?)?, entry.path()))
    };
    entries.flatten().filter_map(named).collect()
}

/// Finds a finished environment that matches `spec` and, if given, `lockfile`, and whose
/// interpreter is unchanged.
fn find_built(
    spec: &EnvironmentSpec,
    lockfile: Option<&Lockfile>,
    data_dir: &Path,
) -> Option<PathBuf> {
    let digest = lockfile.map(Lockfile::digest);
    let is_it = |record: Record| {
        record.answers(spec)
            && record.interpreter_is_unchanged()
            && (digest.is_none() || record.locked == digest)
    };
    let of_this_name = directories(data_dir)
        .into_iter()
        .filter(|(name, _)| *name == spec.name);
    of_this_name
        .map(|(_, directory)| directory)
        .find(|directory| Record::read(directory).is_some_and(is_it))
}

/// Opens a finished environment and marks it as in use. Returns `None` if it was just removed.
fn open(directory: &Path, spec: &EnvironmentSpec) -> Result<Option<Environment>, EnvironmentError> {
    let lock = lock::shared(&directory.join(IN_USE_FILE))
        .map_err(while_doing("mark the environment as used"))?;
    let (Some(in_use), Some(record)) = (lock, Record::read(directory)) else {
        return Ok(None);
    };
    let inside = |host: &Path| {
        interpreter::path_inside(&record.base_prefix, host)
            .to_string_lossy()
            .into_owned()
    };
    Ok(Some(Environment {
        name: record.name.clone(),
        root: directory.join(TREE),
        python_inside: format!("{ENVIRONMENT_INSIDE}/bin/python"),
        library_path: record.library_dir.as_deref().map(inside),
        python_version: record.python_version,
        preload: spec.preload.clone(),
        packages: record.installed,
        base_executable: record.executable,
        base_prefix: record.base_prefix,
        _in_use: in_use,
    }))
}

/// Removes unused environments of the same name that a newer one has replaced.
fn remove_older(data_dir: &Path, name: &EnvironmentName, newest: &Path) {
    for (_, directory) in directories(data_dir)
        .into_iter()
        .filter(|(found, path)| found == name && path != newest)
    {
        if let Ok(Some(_lock)) = lock::try_exclusive(&directory.join(IN_USE_FILE))
            && let Err(error) = discard(&directory)
        {
            tracing::warn!(%error, environment = name.as_str(), "could not remove an older \
                 environment");
        }
    }
}

/// Removes a directory atomically: a partly removed one is never mistaken for a complete one. The
/// caller must hold its lock.
fn discard(directory: &Path) -> io::Result<()> {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let doomed = directory.with_file_name(format!(".removing-{name}"));
    std::fs::rename(directory, &doomed)?;
    std::fs::remove_dir_all(doomed)
}

#[cfg(test)]
mod tests;
