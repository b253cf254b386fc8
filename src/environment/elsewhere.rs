//! Packages for a Python that is not on this machine, such as the one of an image.
//!
//! uv can resolve and unpack wheels for another version and platform, because unpacking runs no
//! code. The result is a virtual environment whose links and configuration refer to the remote
//! Python. The caller transfers it there.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::interpreter::BasePython;
use super::resolve::{Audience, Wanted};
use super::{
    EnvironmentError, EnvironmentProgress, Input, Lockfile, Progress, PythonRequest, build,
    own_variables, resolve, spec, while_doing,
};

/// A remote Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elsewhere {
    /// Such as `3.12.4`.
    pub version: String,
    pub platform: Platform,
    /// Its path on the remote system.
    pub executable: PathBuf,
}

impl Elsewhere {
    /// Returns its minor version, such as `3.12`.
    pub fn line(&self) -> String {
        self.version
            .splitn(3, '.')
            .take(2)
            .collect::<Vec<_>>()
            .join(".")
    }

    /// Returns the arguments that make uv target this Python instead of the one that it was started
    /// with.
    pub(super) fn arguments(&self) -> [&str; 4] {
        [
            "--python-version",
            &self.version,
            "--python-platform",
            &self.platform.0,
        ]
    }
}

/// A machine architecture and C library, by uv's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform(String);

/// The newest glibc that uv has a name for. Wheels for an older glibc work with a newer one.
const NEWEST_GLIBC: u32 = 40;
/// From this version on, uv has a name for every glibc.
const FIRST_OF_EVERY_GLIBC: u32 = 31;

impl Platform {
    /// Returns the platform of an architecture such as `x86_64`, with the version of its glibc such
    /// as `2.36`, or with musl if it has none.
    ///
    /// Returns `None` if hardly any wheels exist for the architecture.
    pub fn new(machine: &str, glibc: Option<&str>) -> Option<Platform> {
        let machine = match machine {
            "x86_64" | "amd64" => "x86_64",
            "aarch64" | "arm64" => "aarch64",
            _ => return None,
        };
        let Some(glibc) = glibc else {
            return Some(Platform(format!("{machine}-unknown-linux-musl")));
        };
        let minor: u32 = glibc.strip_prefix("2.")?.parse().ok()?;
        let named = match minor {
            0..17 => return None,
            17..28 => 17,
            28..FIRST_OF_EVERY_GLIBC => 28,
            _ => minor.min(NEWEST_GLIBC),
        };
        Some(Platform(format!("{machine}-manylinux_2_{named}")))
    }

    pub fn name(&self) -> &str {
        &self.0
    }
}

/// The packages to install for a remote Python.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    pub packages: &'a [String],
    pub files: Option<&'a Input>,
}

/// Resolves exact versions for a remote Python. Packages that the runner needs are added if they
/// are missing. Nothing is installed.
pub async fn lock_elsewhere(
    contents: Contents<'_>,
    elsewhere: &Elsewhere,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<Lockfile, EnvironmentError> {
    let variables = own_variables();
    let (interpreter, uv) = tools(data_dir, &variables, progress).await?;
    if let Some(input) = contents.files {
        input.check_python(&elsewhere.version)?;
    }
    let mut packages = contents.packages.to_vec();
    for needed in spec::RUNNER_NEEDS {
        spec::add_missing(&mut packages, needed);
    }
    let wanted = Wanted {
        packages: &packages,
        files: contents.files,
    };
    let audience = Audience {
        interpreter: &interpreter,
        elsewhere: Some(elsewhere),
    };
    resolve::resolve(wanted, audience, &uv, &variables, progress).await
}

/// Creates a virtual environment at `tree`, which must not exist yet, with the content of the lock,
/// for a remote Python.
///
/// It works at any path. Its scripts find the Python in their own directory, with the help of
/// `/bin/sh`. It contains no bytecode: only the remote Python could compile it.
pub async fn install_elsewhere(
    lockfile: &Lockfile,
    elsewhere: &Elsewhere,
    tree: &Path,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<(), EnvironmentError> {
    let variables = own_variables();
    let (interpreter, uv) = tools(data_dir, &variables, progress).await?;
    let audience = Audience {
        interpreter: &interpreter,
        elsewhere: Some(elsewhere),
    };
    build::install(lockfile, tree, audience, &uv, &variables, progress).await?;
    turn_elsewhere(tree, &interpreter, elsewhere)
        .map_err(while_doing("prepare the packages for the other Python"))
}

/// Finds any Python and uv. uv needs an interpreter to start with; its version does not matter.
async fn tools(
    data_dir: &Path,
    variables: &BTreeMap<String, String>,
    progress: Progress<'_>,
) -> Result<(BasePython, PathBuf), EnvironmentError> {
    progress(EnvironmentProgress::step("looking for uv"));
    build::find_tools(&PythonRequest::Any, data_dir, variables, progress).await
}

/// Replaces every reference in the tree to the Python that it was made with.
fn turn_elsewhere(tree: &Path, interpreter: &BasePython, elsewhere: &Elsewhere) -> io::Result<()> {
    let bin = tree.join("bin");
    for entry in std::fs::read_dir(&bin)? {
        let path = entry?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let leads_to_python = path.is_symlink() && name.starts_with("python");
        if leads_to_python || name.starts_with("activate") || name.ends_with(".bat") {
            std::fs::remove_file(&path)?;
        }
    }
    symlink(&elsewhere.executable, bin.join("python"))?;
    for name in ["python3".to_owned(), format!("python{}", elsewhere.line())] {
        symlink("python", bin.join(name))?;
    }
    let (here, there) = (interpreter.line(), elsewhere.line());
    if here != there {
        std::fs::rename(
            tree.join(format!("lib/python{here}")),
            tree.join(format!("lib/python{there}")),
        )?;
    }
    // Files that uv creates for itself and for backup tools.
    for name in [".lock", ".gitignore", "CACHEDIR.TAG"] {
        match std::fs::remove_file(tree.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let home = elsewhere.executable.parent().unwrap_or(Path::new("/"));
    std::fs::write(
        tree.join("pyvenv.cfg"),
        build::pyvenv_cfg(home, &elsewhere.version),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_named_as_uv_names_it() {
        let name = |machine: &str, glibc: Option<&str>| {
            Platform::new(machine, glibc).map(|platform| platform.0)
        };
        assert_eq!(
            name("x86_64", Some("2.36")).as_deref(),
            Some("x86_64-manylinux_2_36")
        );
        assert_eq!(
            name("arm64", Some("2.41")).as_deref(),
            Some("aarch64-manylinux_2_40")
        );
        assert_eq!(
            name("x86_64", Some("2.30")).as_deref(),
            Some("x86_64-manylinux_2_28")
        );
        assert_eq!(
            name("x86_64", Some("2.17")).as_deref(),
            Some("x86_64-manylinux_2_17")
        );
        assert_eq!(
            name("x86_64", None).as_deref(),
            Some("x86_64-unknown-linux-musl")
        );
        for (machine, glibc) in [
            ("armv7l", Some("2.36")),
            ("x86_64", Some("2.12")),
            ("x86_64", Some("3")),
        ] {
            assert_eq!(name(machine, glibc), None, "{machine} {glibc:?}");
        }
    }

    #[test]
    fn a_tree_leads_to_the_other_python_only() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path();
        for made in ["bin", "lib/python3.11/site-packages"] {
            std::fs::create_dir_all(tree.join(made)).unwrap();
        }
        for file in [
            "bin/activate",
            "bin/pydoc.bat",
            "bin/ipython",
            ".lock",
            ".gitignore",
        ] {
            std::fs::write(tree.join(file), "").unwrap();
        }
        symlink("/home/me/bin/python3.11", tree.join("bin/python")).unwrap();
        symlink("python", tree.join("bin/python3.11")).unwrap();
        let here = BasePython {
            executable: "/home/me/bin/python3.11".into(),
            version: "3.11.7".to_owned(),
            base_prefix: "/home/me".into(),
            library_dir: None,
        };
        let there = Elsewhere {
            version: "3.13.1".to_owned(),
            platform: Platform::new("x86_64", None).unwrap(),
            executable: "/usr/local/bin/python3.13".into(),
        };
        turn_elsewhere(tree, &here, &there).unwrap();
        let mut programs: Vec<String> = std::fs::read_dir(tree.join("bin"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        programs.sort();
        assert_eq!(programs, ["ipython", "python", "python3", "python3.13"]);
        assert_eq!(
            std::fs::read_link(tree.join("bin/python")).unwrap(),
            Path::new("/usr/local/bin/python3.13")
        );
        assert!(
            tree.join("lib/python3.13/site-packages").is_dir()
                && !tree.join("lib/python3.11").exists()
        );
        let configuration = std::fs::read_to_string(tree.join("pyvenv.cfg")).unwrap();
        assert!(
            configuration.starts_with("home = /usr/local/bin\n"),
            "{configuration}"
        );
        assert!(!tree.join(".lock").exists() && !tree.join(".gitignore").exists());
    }
}
