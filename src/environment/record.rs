//! Metadata of a built environment: the record file beside it, and the directory name derived from
//! its content.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::interpreter::BasePython;
use super::{EnvironmentName, EnvironmentSpec, PythonRequest};

/// Increased when the layout of environments changes, so that older ones are rebuilt.
pub(super) const FORMAT: u32 = 2;

/// Name of the record file. It is written last, before the directory is renamed to its final name.
pub(super) const RECORD_FILE: &str = "cellblock-environment.json";

/// Metadata of a built environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub format: u32,
    pub name: EnvironmentName,
    /// The requested packages.
    pub packages: Vec<String>,
    pub preload: Vec<String>,
    pub python_request: PythonRequest,
    /// The lock that was required for the build. Without one, versions were resolved at build time.
    /// The environment's own lock is beside it in both cases.
    #[serde(default)]
    pub locked: Option<String>,
    /// The installed packages, as `name==version`.
    pub installed: Vec<String>,
    pub python_version: String,
    pub executable: PathBuf,
    pub base_prefix: PathBuf,
    pub library_dir: Option<PathBuf>,
    /// Changes when the interpreter is replaced, for example by a system update.
    pub executable_stamp: Stamp,
    /// Seconds since 1970.
    pub created: u64,
    /// Total size of all files.
    pub size: u64,
}

/// Properties of a file that are known without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    size: u64,
    seconds: i64,
    nanoseconds: i64,
}

impl Stamp {
    pub(super) fn of(path: &Path) -> io::Result<Stamp> {
        let found = std::fs::metadata(path)?;
        Ok(Stamp {
            size: found.len(),
            seconds: found.mtime(),
            nanoseconds: found.mtime_nsec(),
        })
    }
}

impl Record {
    pub(super) fn read(directory: &Path) -> Option<Record> {
        serde_json::from_slice(&std::fs::read(directory.join(RECORD_FILE)).ok()?).ok()
    }

    /// Writes the record file atomically.
    pub(super) fn write(&self, directory: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        let temporary = directory.join(format!(".{RECORD_FILE}"));
        std::fs::write(&temporary, text)?;
        std::fs::rename(temporary, directory.join(RECORD_FILE))
    }

    /// Returns whether this environment matches `spec`. The modules to preload do not affect any
    /// file, so they may differ.
    pub(super) fn answers(&self, spec: &EnvironmentSpec) -> bool {
        self.format == FORMAT
            && self.name == spec.name
            && self.packages == spec.requirements()
            && self.python_request == spec.python
    }

    /// Returns whether the interpreter is still the one that it was built with.
    pub(super) fn interpreter_is_unchanged(&self) -> bool {
        Stamp::of(&self.executable).is_ok_and(|stamp| stamp == self.executable_stamp)
    }

    /// Returns the spec that this environment was built from.
    pub(super) fn spec(&self) -> EnvironmentSpec {
        EnvironmentSpec {
            name: self.name.clone(),
            packages: self.packages.clone(),
            preload: self.preload.clone(),
            python: self.python_request.clone(),
        }
    }
}

/// Returns the directory name of an environment, derived from everything that determines its
/// content. `locked` is the lock that it must be built from.
pub(super) fn directory_name(
    spec: &EnvironmentSpec,
    interpreter: &BasePython,
    locked: Option<&str>,
) -> String {
    let builder = env!("CARGO_PKG_VERSION");
    let content = (
        FORMAT,
        builder,
        spec.requirements(),
        &spec.python,
        &interpreter.version,
        interpreter.executable.to_string_lossy(),
        locked,
    );
    let content =
        serde_json::to_vec(&content).expect("texts and numbers can always be written as JSON");
    format!("{}-{}", spec.name, short_hash(&content))
}

/// Returns the environment name in a directory name, if there is one.
pub(super) fn name_in(directory_name: &str) -> Option<EnvironmentName> {
    let (name, hash) = directory_name.rsplit_once('-')?;
    let is_hash = hash.len() == HASH_LENGTH && hash.chars().all(|digit| digit.is_ascii_hexdigit());
    EnvironmentName::new(name).filter(|_| is_hash)
}

const HASH_LENGTH: usize = 12;

/// Returns twelve hexadecimal digits of SHA-256. The name is not a target of attacks, so these are
/// enough, and they are short enough to read.
pub(super) fn short_hash(content: &[u8]) -> String {
    Sha256::digest(content)
        .iter()
        .take(HASH_LENGTH / 2)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Lists the packages in a `site-packages` directory, from the names of their metadata directories.
pub(super) fn installed_packages(site_packages: &Path) -> io::Result<Vec<String>> {
    let mut installed = Vec::new();
    for entry in std::fs::read_dir(site_packages)? {
        let name = entry?.file_name();
        if let Some((package, version)) = name
            .to_str()
            .and_then(|name| name.strip_suffix(".dist-info"))
            .and_then(|name| name.rsplit_once('-'))
        {
            installed.push(format!("{}=={version}", package.replace('_', "-")));
        }
    }
    installed.sort_by_key(|package| package.to_ascii_lowercase());
    Ok(installed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpreter(version: &str, executable: &str) -> BasePython {
        BasePython {
            executable: executable.into(),
            version: version.to_owned(),
            base_prefix: "/usr".into(),
            library_dir: None,
        }
    }

    #[test]
    fn the_folder_is_named_after_everything_that_decides_its_content() {
        let [spec, _] = EnvironmentSpec::built_in();
        let python = interpreter("3.11.2", "/usr/bin/python3.11");
        let name = directory_name(&spec, &python, None);
        assert_eq!(name_in(&name), Some(spec.name.clone()));
        assert_eq!(name, directory_name(&spec.clone(), &python, None));
        let mut other_packages = spec.clone();
        other_packages.packages.push("scipy".to_owned());
        let mut other_request = spec.clone();
        other_request.python = PythonRequest::Version("3.11".to_owned());
        let mut other_preload = spec.clone();
        other_preload.preload.clear();
        assert_ne!(name, directory_name(&other_packages, &python, None));
        assert_ne!(name, directory_name(&other_request, &python, None));
        assert_ne!(
            name,
            directory_name(&spec, &interpreter("3.11.3", "/usr/bin/python3.11"), None)
        );
        assert_ne!(
            name,
            directory_name(&spec, &interpreter("3.11.2", "/opt/bin/python3.11"), None)
        );
        assert_eq!(name, directory_name(&other_preload, &python, None));
        assert_ne!(name, directory_name(&spec, &python, Some("0123456789ab")));
    }

    #[test]
    fn only_folders_of_environments_have_a_name() {
        assert_eq!(name_in("a-b-0123456789ab").unwrap().as_str(), "a-b");
        for other in [
            "a",
            "a-0123",
            ".building-a-0123456789ab",
            "a-0123456789xy",
            "-0123456789ab",
            "A-0123456789ab",
        ] {
            assert_eq!(name_in(other), None, "{other:?}");
        }
    }

    #[test]
    fn installed_packages_are_read_from_their_descriptions() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "numpy-2.1.0.dist-info",
            "numpy",
            "Jinja2-3.1.dist-info",
            "matplotlib_inline-0.1.7.dist-info",
            "six.py",
        ] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(
            installed_packages(folder.path()).unwrap(),
            ["Jinja2==3.1", "matplotlib-inline==0.1.7", "numpy==2.1.0"]
        );
    }
}
