//! Building an environment.
//!
//! ```text
//! .building-<name>-<hash>/tree     uv resolves exact versions, creates a virtual environment and
//!                                  installs wheels with matching hashes
//!                                  links and pyvenv.cfg are rewritten to inside paths, bytecode is
//!                                  compiled, everything is checked
//! <name>-<hash>/tree               … then the whole directory is renamed in one step
//! ```
//!
//! No code of an installed package runs on the host. Only wheels are used, because building a
//! source package runs its code. Python always runs on the finished tree without `site`, because a
//! `.pth` file in a package is code too.

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::interpreter::{self, BasePython};
use super::lockfile::{LOCK_FILE, Lockfile};
use super::record::{self, FORMAT, Record, Stamp};
use super::resolve::{self, Audience, Wanted};
use super::{
    ENVIRONMENT_INSIDE, EnvironmentError, EnvironmentName, EnvironmentProgress, EnvironmentSpec,
    IN_USE_FILE, Progress, PythonRequest, TREE, environments_dir, lock, uv, while_doing,
};

/// The Python that uv downloads if none is found and no version was requested.
const DOWNLOADED_PYTHON: &str = "3.13";

/// Polling interval while waiting for another process's build. Compared to a build, a fifth of a
/// second is not noticeable.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Builds the environment for `spec` and returns its directory. Waits first for another process
/// that builds under the same name.
///
/// The versions come from `given`, or from the lock of an environment that was built earlier for
/// the same spec, or from uv's resolution now.
pub(super) async fn build(
    spec: &EnvironmentSpec,
    given: Option<&Lockfile>,
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<PathBuf, EnvironmentError> {
    let folder = environments_dir(data_dir);
    std::fs::create_dir_all(&folder).map_err(while_doing("make the folder for environments"))?;
    let _building = wait_for_turn(&folder, &spec.name, progress).await?;
    if let Some(directory) = super::find_built(spec, given, data_dir) {
        return Ok(directory);
    }

    progress(EnvironmentProgress::step("looking for Python"));
    let (interpreter, uv) = find_tools(&spec.python, data_dir, variables, progress).await?;
    let kept = if given.is_none() {
        kept_lock(spec, &interpreter, data_dir)
    } else {
        None
    };
    let locked = match (given, &kept) {
        (Some(given), _) => Some(given.digest()),
        (None, Some((_, locked))) => locked.clone(),
        (None, None) => None,
    };
    let directory_name = record::directory_name(spec, &interpreter, locked.as_deref());
    let directory = folder.join(&directory_name);
    if let Some(mut known) = Record::read(&directory) {
        // The same interpreter was reinstalled: only its file is newer.
        known.executable_stamp = stamp(&interpreter)?;
        known
            .write(&directory)
            .map_err(while_doing("renew the record of the environment"))?;
        return Ok(directory);
    }

    let lockfile = match given.cloned().or(kept.map(|(lockfile, _)| lockfile)) {
        Some(lockfile) => lockfile.chosen_for(&interpreter.line()),
        None => {
            let wanted = Wanted {
                packages: &spec.requirements(),
                files: None,
            };
            let audience = Audience {
                interpreter: &interpreter,
                elsewhere: None,
            };
            resolve::resolve(wanted, audience, &uv, variables, progress).await?
        }
    };
    remove_leftovers(&folder, &spec.name);
    let staging = folder.join(format!(".building-{directory_name}"));
    let tree = staging.join(TREE);
    std::fs::create_dir(&staging).map_err(while_doing("make a folder to build in"))?;
    let audience = Audience {
        interpreter: &interpreter,
        elsewhere: None,
    };
    install(&lockfile, &tree, audience, &uv, variables, progress).await?;
    progress(EnvironmentProgress::step("compiling bytecode"));
    turn_to_the_inside(&tree, &interpreter)
        .map_err(while_doing("prepare the environment for the inside"))?;
    compile(&interpreter, &tree, ENVIRONMENT_INSIDE).await?;
    progress(EnvironmentProgress::step("checking the environment"));
    check(spec, &staging, &interpreter).await?;

    let size = {
        let tree = tree.clone();
        tokio::task::spawn_blocking(move || make_readable(&tree)).await
    };
    let size = size
        .expect("walking a folder does not panic")
        .map_err(while_doing("make the environment readable"))?;
    let record = Record {
        format: FORMAT,
        name: spec.name.clone(),
        packages: spec.requirements(),
        preload: spec.preload.clone(),
        python_request: spec.python.clone(),
        locked,
        installed: record::installed_packages(&site_packages(&tree, &interpreter))
            .map_err(while_doing("list the packages"))?,
        python_version: interpreter.version.clone(),
        executable_stamp: stamp(&interpreter)?,
        executable: interpreter.executable,
        base_prefix: interpreter.base_prefix,
        library_dir: interpreter.library_dir,
        created: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        size,
    };
    std::fs::set_permissions(&staging, Permissions::from_mode(0o755))
        .map_err(while_doing("open the environment's folder"))?;
    File::create(staging.join(IN_USE_FILE)).map_err(while_doing("make the environment's lock"))?;
    std::fs::write(staging.join(LOCK_FILE), lockfile.text())
        .map_err(while_doing("write the lock beside the environment"))?;
    record
        .write(&staging)
        .map_err(while_doing("write the record of the environment"))?;
    std::fs::rename(&staging, &directory)
        .map_err(while_doing("put the environment in its place"))?;
    Ok(directory)
}

/// Finds the lock of an environment that was built for the same spec and minor version of Python.
/// An update of the interpreter does not change the packages.
///
/// Also returns the lock that the environment was required to use, if any.
fn kept_lock(
    spec: &EnvironmentSpec,
    interpreter: &BasePython,
    data_dir: &Path,
) -> Option<(Lockfile, Option<String>)> {
    let mut built = super::list(data_dir).into_iter().filter(|built| {
        built.record.answers(spec)
            && built
                .record
                .python_version
                .starts_with(&format!("{}.", interpreter.line()))
    });
    built.find_map(|built| Some((Lockfile::parse(&built.lock()?).ok()?, built.record.locked)))
}

async fn wait_for_turn(
    folder: &Path,
    name: &EnvironmentName,
    progress: Progress<'_>,
) -> Result<lock::Lock, EnvironmentError> {
    let path = build_lock(folder, name);
    let mut told = false;
    loop {
        if let Some(lock) =
            lock::try_exclusive(&path).map_err(while_doing("lock the environment for building"))?
        {
            return Ok(lock);
        }
        if !told {
            progress(EnvironmentProgress::step(&format!(
                "waiting for another process that builds \"{name}\""
            )));
            told = true;
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

pub(super) fn build_lock(folder: &Path, name: &EnvironmentName) -> PathBuf {
    folder.join(format!(".{name}.lock"))
}

/// Finds the interpreter and uv. Each can provide the other: Python installs uv, and uv downloads
/// Python.
pub(super) async fn find_tools(
    python: &PythonRequest,
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<(BasePython, PathBuf), EnvironmentError> {
    let uv = uv::find(variables, data_dir)?;
    match (interpreter::find(python, variables).await, uv) {
        (Ok(interpreter), Some(uv)) => Ok((interpreter, uv)),
        (Ok(interpreter), None) => {
            let uv = uv::install(&interpreter, variables, data_dir, progress).await?;
            Ok((interpreter, uv))
        }
        (Err(tried), uv) => {
            let no_python = |tried| EnvironmentError::NoPython {
                request: python.clone(),
                tried,
            };
            if matches!(python, PythonRequest::Path(_)) {
                return Err(no_python(tried));
            }
            let uv = match uv {
                Some(uv) => uv,
                // Any other Python can install uv, which then provides the right one.
                None => match interpreter::find(&PythonRequest::Any, variables).await {
                    Ok(helper) => uv::install(&helper, variables, data_dir, progress).await?,
                    Err(tried) => return Err(no_python(tried)),
                },
            };
            let interpreter = download_python(python, &uv, data_dir, variables, progress).await?;
            Ok((interpreter, uv))
        }
    }
}

/// Returns the version to download. Most ranges have no upper bound, and the newest Python has the
/// fewest wheels, so our default is preferred if the range accepts it.
fn version_to_download(python: &PythonRequest) -> &str {
    let accepts_line = || {
        ["0", "999"]
            .iter()
            .all(|patch| python.accepts_version(&format!("{DOWNLOADED_PYTHON}.{patch}")))
    };
    match python {
        PythonRequest::Version(version) => version,
        PythonRequest::Range(range) if !accepts_line() => range,
        PythonRequest::Range(_) | PythonRequest::Any | PythonRequest::Path(_) => DOWNLOADED_PYTHON,
    }
}

/// Uses uv to find a Python that is not on the path, or to download one into our own directory.
async fn download_python(
    python: &PythonRequest,
    uv: &Path,
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<BasePython, EnvironmentError> {
    let version = version_to_download(python);
    let mut variables = uv::installer_variables(variables);
    let mut found = String::new();
    let find = [
        "python",
        "find",
        "--system",
        "--no-project",
        "--no-python-downloads",
        version,
    ];
    if uv::run(uv, find, &variables, &mut |line| found = line.to_owned())
        .await
        .is_ok()
        && let Ok(interpreter) = interpreter::examine(Path::new(&found), python).await
    {
        return Ok(interpreter);
    }

    progress(EnvironmentProgress::step(&format!(
        "downloading Python {version}"
    )));
    let place = data_dir.join("python").to_string_lossy().into_owned();
    variables.insert("UV_PYTHON_INSTALL_DIR".to_owned(), place);
    uv::run(
        uv,
        ["python", "install", "--no-bin", version],
        &variables,
        &mut |_| {},
    )
    .await
    .map_err(|failure| failure.during(&format!("download Python {version}")))?;
    let find = [
        "python",
        "find",
        "--managed-python",
        "--no-project",
        "--no-python-downloads",
        version,
    ];
    uv::run(uv, find, &variables, &mut |line| found = line.to_owned())
        .await
        .map_err(|failure| failure.during(&format!("find the downloaded Python {version}")))?;
    interpreter::examine(Path::new(&found), python)
        .await
        .map_err(|why| EnvironmentError::NoPython {
            request: python.clone(),
            tried: vec![format!("{found}: {why}")],
        })
}

/// Creates a virtual environment with exactly the packages in the lock.
pub(super) async fn install(
    lockfile: &Lockfile,
    tree: &Path,
    audience: Audience<'_>,
    uv: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<(), EnvironmentError> {
    let variables = uv::installer_variables(variables);
    let (tree_text, executable) = (
        tree.to_string_lossy(),
        audience.interpreter.executable.to_string_lossy(),
    );
    let venv = [
        "venv",
        "--relocatable",
        "--no-project",
        "--no-python-downloads",
        "--python",
        &*executable,
        &*tree_text,
    ];
    uv::run(uv, venv, &variables, &mut |_| {})
        .await
        .map_err(|failure| failure.during("make a virtual environment with uv"))?;

    // The list may contain an index password, so it is readable only by us and is temporary.
    let beside = tree.parent().unwrap_or(Path::new("/"));
    let mut list = tempfile::NamedTempFile::new_in(beside)
        .map_err(while_doing("make a list for the installer"))?;
    list.write_all(lockfile.for_installer().as_bytes())
        .map_err(while_doing("write a list for the installer"))?;
    let (python, list_text) = (tree.join("bin/python"), list.path().to_string_lossy());
    let python = python.to_string_lossy();
    // Copies, not links into uv's cache: later changes to the cache must not affect a finished
    // environment.
    let mut install = vec![
        "pip",
        "install",
        "--require-hashes",
        "--no-build",
        "--link-mode",
        "copy",
    ];
    install.extend(
        audience
            .elsewhere
            .iter()
            .flat_map(|elsewhere| elsewhere.arguments()),
    );
    install.extend(["--python", &*python, "--requirements", &*list_text]);
    let mut following = uv::Following::default();
    let mut tell = |line: &str| {
        if let Some(told) = following.read(line) {
            progress(told);
        }
    };
    uv::run(uv, install, &variables, &mut tell)
        .await
        .map_err(|failure| failure.during("install the packages with uv"))
}

/// Rewrites every host path in the tree to its inside path.
fn turn_to_the_inside(tree: &Path, interpreter: &BasePython) -> io::Result<()> {
    let bin = tree.join("bin");
    for entry in std::fs::read_dir(&bin)? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_symlink()
            && name.starts_with("python")
            && std::fs::read_link(&path)?.is_absolute()
        {
            std::fs::remove_file(&path)?;
            symlink(interpreter.inside(&interpreter.executable), &path)?;
        } else if name.starts_with("activate") || name.ends_with(".bat") {
            std::fs::remove_file(&path)?;
        }
    }
    let home = interpreter.executable.parent().unwrap_or(Path::new("/"));
    // The installer's lock file is not needed any more, and inside all sessions could lock it.
    match std::fs::remove_file(tree.join(".lock")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::write(
        tree.join("pyvenv.cfg"),
        pyvenv_cfg(&interpreter.inside(home), &interpreter.version),
    )
}

pub(super) fn pyvenv_cfg(home: &Path, version: &str) -> String {
    format!(
        "home = {}\nimplementation = CPython\nversion_info = \
         {version}\ninclude-system-site-packages = false\n",
        home.display()
    )
}

/// Modules that are compiled only on import: tests of packages. They are a third of all modules and
/// of the compile time.
const NOT_COMPILED: &str = "/tests/";

/// Compiles the modules below `tree`. The bytecode contains inside paths and is never checked
/// against its source.
pub(super) async fn compile(
    interpreter: &BasePython,
    tree: &Path,
    inside: &str,
) -> Result<(), EnvironmentError> {
    let tree = tree.to_string_lossy();
    let arguments = [
        "-I",
        "-S",
        "-m",
        "compileall",
        "-qq",
        "-j",
        "0",
        "--invalidation-mode",
        "unchecked-hash",
    ];
    let status = tokio::process::Command::new("/bin/sh")
        .args(["-c", "umask 022; exec \"$@\"", "sh"])
        .arg(&interpreter.executable)
        .args(arguments)
        .args(["-x", NOT_COMPILED, "-s", &*tree, "-p", inside, &*tree])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .status()
        .await
        .map_err(while_doing("compile bytecode"))?;
    // Status 1 means that only some files failed. Some packages contain files that are not valid
    // Python for this version, such as templates.
    match status.code() {
        Some(0 | 1) => Ok(()),
        _ => Err(EnvironmentError::Unusable {
            why: format!("compiling its bytecode ended with {status}"),
        }),
    }
}

/// Checks that the finished tree works after it has been moved, as far as possible without a
/// sandbox.
///
/// A second directory links to the interpreter's prefix, as it will be mounted, and has a
/// `pyvenv.cfg` that refers to it. Python must find its standard library through it. The modules to
/// preload are located, not imported.
async fn check(
    spec: &EnvironmentSpec,
    staging: &Path,
    interpreter: &BasePython,
) -> Result<(), EnvironmentError> {
    let stand_in = tempfile::Builder::new()
        .prefix("check-")
        .tempdir_in(staging)
        .map_err(while_doing("make a folder to check in"))?;
    let moved_prefix = stand_in.path().join("python");
    let moved = |host: &Path| match host.strip_prefix(&interpreter.base_prefix) {
        Ok(rest) if !interpreter::is_system(&interpreter.base_prefix) => {
            interpreter::below(&moved_prefix, rest)
        }
        _ => host.to_owned(),
    };
    let environment = stand_in.path().join("env");
    let python = environment.join("bin/python");
    let home = moved(interpreter.executable.parent().unwrap_or(Path::new("/")));
    let prepare = || -> io::Result<()> {
        symlink(&interpreter.base_prefix, &moved_prefix)?;
        std::fs::create_dir_all(environment.join("bin"))?;
        symlink(moved(&interpreter.executable), &python)?;
        std::fs::write(
            environment.join("pyvenv.cfg"),
            pyvenv_cfg(&home, &interpreter.version),
        )
    };
    prepare().map_err(while_doing("prepare the check of the environment"))?;

    let packages = site_packages(&staging.join(TREE), interpreter);
    let modules = spec.preload.iter().map(String::as_str).chain(["IPython"]);
    let mut arguments = vec![
        "-I".to_owned(),
        "-S".to_owned(),
        "-B".to_owned(),
        "-c".to_owned(),
        CHECK.to_owned(),
    ];
    arguments.extend(
        [moved(&interpreter.base_prefix), packages].map(|path| path.to_string_lossy().into_owned()),
    );
    arguments.extend(modules.map(str::to_owned));
    let mut variables = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
    if let Some(libraries) = &interpreter.library_dir {
        variables.insert(
            "LD_LIBRARY_PATH".to_owned(),
            moved(libraries).to_string_lossy().into_owned(),
        );
    }
    uv::run(&python, arguments, &variables, &mut |_| {})
        .await
        .map_err(|failure| EnvironmentError::Unusable {
            why: failure.output,
        })
}

const CHECK: &str = r#"
import sys, importlib.machinery, json, hashlib, socket, ctypes
prefix, packages, *modules = sys.argv[1:]
if sys.base_prefix != prefix:
    sys.exit("Python does not find its standard library when its folder is mounted elsewhere (it looks in %s)" % sys.base_prefix)
for module in modules:
    where = [packages]
    if module.split(".")[0] in sys.stdlib_module_names:
        continue
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        spec = importlib.machinery.PathFinder.find_spec(name, where) if where else None
        if spec is None:
            sys.exit("the module %s is not in the environment" % name)
        where = spec.submodule_search_locations
"#;

pub(super) fn site_packages(tree: &Path, interpreter: &BasePython) -> PathBuf {
    tree.join(format!("lib/python{}/site-packages", interpreter.line()))
}

/// Makes a tree readable by all users and writable by its owner only. Returns the total size of its
/// files.
pub(super) fn make_readable(path: &Path) -> io::Result<u64> {
    let found = std::fs::symlink_metadata(path)?;
    if found.is_symlink() {
        return Ok(0);
    }
    let is_program = found.permissions().mode() & 0o100 != 0;
    let mode = if found.is_dir() || is_program {
        0o755
    } else {
        0o644
    };
    if found.permissions().mode() & 0o7777 != mode {
        std::fs::set_permissions(path, Permissions::from_mode(mode))?;
    }
    if !found.is_dir() {
        return Ok(found.len());
    }
    std::fs::read_dir(path)?
        .map(|entry| make_readable(&entry?.path()))
        .sum()
}

/// Removes leftovers of interrupted builds or removals of this name. The caller must hold the build
/// lock.
pub(super) fn remove_leftovers(folder: &Path, name: &EnvironmentName) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let file_name = entry.file_name();
        let rest = file_name.to_str().and_then(|text| {
            text.strip_prefix(".building-")
                .or(text.strip_prefix(".removing-"))
        });
        if rest.and_then(record::name_in).as_ref() == Some(name)
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::warn!(%error, environment = name.as_str(), "could not remove what an \
                 interrupted build left behind");
        }
    }
}

fn stamp(interpreter: &BasePython) -> Result<Stamp, EnvironmentError> {
    Stamp::of(&interpreter.executable).map_err(while_doing("look at the interpreter"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_configuration_name_only_the_inside() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        symlink("/home/me/py/bin/python3", bin.join("python")).unwrap();
        symlink("python", bin.join("python3")).unwrap();
        std::fs::write(bin.join("activate"), "VIRTUAL_ENV=/home/me").unwrap();
        std::fs::write(bin.join("ipython"), "#!/bin/sh").unwrap();
        let interpreter = BasePython {
            executable: "/home/me/py/bin/python3.12".into(),
            version: "3.12.1".to_owned(),
            base_prefix: "/home/me/py".into(),
            library_dir: None,
        };
        turn_to_the_inside(folder.path(), &interpreter).unwrap();
        assert_eq!(
            std::fs::read_link(bin.join("python")).unwrap(),
            Path::new("/opt/cellblock/python/bin/python3.12")
        );
        assert_eq!(
            std::fs::read_link(bin.join("python3")).unwrap(),
            Path::new("python")
        );
        let written = std::fs::read_to_string(folder.path().join("pyvenv.cfg")).unwrap();
        assert!(
            written.starts_with("home = /opt/cellblock/python/bin\n")
                && !written.contains("/home/me")
        );
        assert!(!bin.join("activate").exists() && bin.join("ipython").exists());
    }

    #[test]
    fn a_range_leads_to_the_usual_python_if_it_may_be_any_of_its_line() {
        let range =
            |text: &str| version_to_download(&PythonRequest::range(text).unwrap()).to_owned();
        assert_eq!(range(">=3.11"), DOWNLOADED_PYTHON);
        assert_eq!(range(">=3.11,<3.13"), ">=3.11,<3.13");
        assert_eq!(range("<=3.13"), "<=3.13", "3.13.1 would not do");
        assert_eq!(
            version_to_download(&PythonRequest::Version("3.11".to_owned())),
            "3.11"
        );
        assert_eq!(version_to_download(&PythonRequest::Any), DOWNLOADED_PYTHON);
    }

    #[test]
    fn a_tree_becomes_readable_and_its_size_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (closed, file, program) = (
            folder.path().join("d"),
            folder.path().join("d/f"),
            folder.path().join("d/p"),
        );
        std::fs::create_dir(&closed).unwrap();
        std::fs::write(&file, "12345").unwrap();
        std::fs::write(&program, "123").unwrap();
        symlink("/etc/passwd", closed.join("link")).unwrap();
        for (path, mode) in [(&file, 0o600), (&program, 0o700), (&closed, 0o700)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(make_readable(folder.path()).unwrap(), 8);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(
            (mode(&closed), mode(&file), mode(&program)),
            (0o755, 0o644, 0o755)
        );
    }

    #[test]
    fn leftovers_of_one_name_are_removed_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let names = [
            ".building-a-0123456789ab",
            ".removing-a-0123456789ab",
            ".building-a-b-0123456789ab",
            "a-0123456789ab",
        ];
        for name in names {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        remove_leftovers(folder.path(), &EnvironmentName::new("a").unwrap());
        assert_eq!(
            names.map(|name| folder.path().join(name).exists()),
            [false, false, true, true]
        );
    }
}
