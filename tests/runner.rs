//! The runner's own tests, run with the Python and the packages that sessions have.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::native::host_python;
use crate::support::server::{data_dir, finished};

#[test]
fn the_runners_own_tests_pass() {
    let runner = Path::new(env!("CARGO_MANIFEST_DIR")).join("runner");
    let environment = turned_to_the_host("default");
    let mut command = Command::new(environment.path().join("bin/python"));
    command.args([
        "-m",
        "unittest",
        "discover",
        "--start-directory",
        "tests",
        "--top-level-directory",
        ".",
    ]);
    command
        .current_dir(&runner)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let (status, _, report) = finished(&mut command);
    assert_eq!(status, Some(0), "{report}");
    let count = report.lines().find_map(|line| {
        line.strip_prefix("Ran ")?
            .split(' ')
            .next()?
            .parse::<u32>()
            .ok()
    });
    assert!(
        count.is_some_and(|count| count > 0),
        "no test of the runner ran: {report}"
    );
}

/// Makes a virtual environment of the host from one that is made for the inside: the same packages,
/// the interpreter where it really is.
fn turned_to_the_host(name: &str) -> tempfile::TempDir {
    let (python, packages) = (host_python(name), site_packages(name));
    let folder = tempfile::tempdir().unwrap();
    let library = packages.parent().unwrap().file_name().unwrap();
    let library = folder.path().join("lib").join(library);
    fs::create_dir_all(&library).unwrap();
    fs::create_dir(folder.path().join("bin")).unwrap();
    symlink(&packages, library.join("site-packages")).unwrap();
    symlink(&python, folder.path().join("bin/python")).unwrap();
    let home = python.parent().unwrap().display();
    fs::write(
        folder.path().join("pyvenv.cfg"),
        format!("home = {home}\ninclude-system-site-packages = false\n"),
    )
    .unwrap();
    folder
}

/// The packages of an environment that is built.
fn site_packages(name: &str) -> PathBuf {
    let folders = |folder: &Path| {
        let entries = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect::<Vec<_>>()
    };
    let is_named = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with(&format!("{name}-"))
            && path.join("cellblock-environment.json").is_file()
    };
    let built = folders(&data_dir().join("environments"))
        .into_iter()
        .find(is_named)
        .expect("it was built");
    let library = folders(&built.join("tree/lib"))
        .into_iter()
        .next()
        .expect("an environment has a library folder");
    library.join("site-packages")
}
