//! Files that describe the content of an environment: requirements files and `pyproject.toml`.
//!
//! uv parses them. This module extracts only what uv does not handle: the hashes that a
//! requirements file demands, and the Python version that a project requires. Building a project
//! would run its code, so only declared dependencies count.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::lockfile::{Hashes, logical_lines, split_hashes};
use super::spec::project_name;
use super::{EnvironmentError, PythonRequest};

/// Source of the dependencies. All paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Requirements files. They may include others (`-r`), constraints (`-c`), markers and hashes.
    Requirements(Vec<PathBuf>),
    /// A `pyproject.toml` and the selected optional dependencies.
    Project { file: PathBuf, extras: Vec<String> },
}

impl Input {
    pub(super) fn files(&self) -> &[PathBuf] {
        match self {
            Input::Requirements(files) => files,
            Input::Project { file, .. } => std::slice::from_ref(file),
        }
    }

    pub(super) fn extras(&self) -> &[String] {
        match self {
            Input::Requirements(_) => &[],
            Input::Project { extras, .. } => extras,
        }
    }

    /// Returns the hashes that the files demand.
    pub(super) fn hashes(&self) -> Result<Hashes, EnvironmentError> {
        let mut hashes = Hashes::new();
        if let Input::Requirements(files) = self {
            let mut seen = BTreeSet::new();
            for file in files {
                collect_hashes(file, &mut seen, &mut hashes)?;
            }
        }
        Ok(hashes)
    }

    /// Returns the requested Python: `asked`, or else the one that the project requires.
    pub(super) fn python(
        &self,
        asked: Option<&PythonRequest>,
    ) -> Result<PythonRequest, EnvironmentError> {
        Ok(asked
            .cloned()
            .or(self.required_python()?)
            .unwrap_or(PythonRequest::Any))
    }

    /// Rejects a Python version that the project does not support.
    pub(super) fn check_python(&self, version: &str) -> Result<(), EnvironmentError> {
        match self.required_python()? {
            Some(required) if !required.accepts_version(version) => Err(refused(
                &self.files()[0],
                format!("it requires {required}, and {version} was asked for"),
            )),
            _ => Ok(()),
        }
    }

    fn required_python(&self) -> Result<Option<PythonRequest>, EnvironmentError> {
        let Input::Project { file, .. } = self else {
            return Ok(None);
        };
        let Some(written) = requires_python(&read(file)?) else {
            return Ok(None);
        };
        let range = PythonRequest::range(&written);
        range.map(Some).ok_or_else(|| {
            refused(
                file,
                format!("requires-python \"{written}\" is not understood"),
            )
        })
    }
}

fn read(file: &Path) -> Result<String, EnvironmentError> {
    std::fs::read_to_string(file)
        .map_err(|error| refused(file, format!("it cannot be read: {error}")))
}

fn refused(file: &Path, why: String) -> EnvironmentError {
    EnvironmentError::Input {
        file: file.to_owned(),
        why,
    }
}

fn collect_hashes(
    file: &Path,
    seen: &mut BTreeSet<PathBuf>,
    hashes: &mut Hashes,
) -> Result<(), EnvironmentError> {
    if !seen.insert(file.to_owned()) {
        return Ok(());
    }
    for line in logical_lines(&read(file)?) {
        if let Some(named) = other_file(&line) {
            if named.contains("://") {
                return Err(refused(
                    file,
                    format!("{named} is not a file; files of requirements must be local"),
                ));
            }
            let other = file.parent().unwrap_or(Path::new("/")).join(named);
            collect_hashes(&other, seen, hashes)?;
        } else if !line.starts_with('-') {
            let (requirement, found) = split_hashes(&line);
            if !found.is_empty() {
                hashes
                    .entry(project_name(&requirement))
                    .or_default()
                    .extend(found);
            }
        }
    }
    Ok(())
}

/// Returns the file named in a line such as `-r FILE`, `-c FILE` or `--requirement=FILE`.
fn other_file(line: &str) -> Option<&str> {
    let rest = ["--requirement", "--constraint", "-r", "-c"]
        .iter()
        .find_map(|option| line.strip_prefix(option))?;
    Some(rest.trim_start_matches(['=', ' ', '\t']).trim()).filter(|file| !file.is_empty())
}

/// Finds `requires-python` in a `pyproject.toml`. TOML and Python packaging require it to be a
/// string on one line of the table `project`.
fn requires_python(text: &str) -> Option<String> {
    let mut table = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[') {
            table = name.split(']').next().unwrap_or_default().trim().to_owned();
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            continue;
        };
        let key = key.replace([' ', '"', '\''], "");
        let is_it = table == "project" && key == "requires-python"
            || table.is_empty() && key == "project.requires-python";
        let value = value.trim();
        if let (true, Some(quote @ ('"' | '\''))) = (is_it, value.chars().next()) {
            return value[1..].split(quote).next().map(str::to_owned);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn hashes_are_found_in_every_file_that_is_named() {
        let folder = folder(&[
            (
                "a.txt",
                "-r b.txt\n--constraint=c.txt\nnumpy\nSix==1 --hash=sha256:aa \\\n  \
                 --hash=sha256:ab\n-i https://x",
            ),
            ("b.txt", "-r a.txt\nidna==3 --hash=sha256:bb"),
            ("c.txt", "pytz==1 --hash=sha256:cc"),
        ]);
        let found = Input::Requirements(vec![folder.path().join("a.txt")])
            .hashes()
            .unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(name, hashes)| (name.as_str(), hashes.len()))
            .collect();
        assert_eq!(found, [("idna", 1), ("pytz", 1), ("six", 2)]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let folder = folder(&[
            ("a.txt", "-r missing.txt"),
            ("b.txt", "-r https://example.com/r.txt"),
        ]);
        let failure = |name: &str| {
            Input::Requirements(vec![folder.path().join(name)])
                .hashes()
                .unwrap_err()
                .to_string()
        };
        assert!(
            failure("a.txt").contains("missing.txt"),
            "{}",
            failure("a.txt")
        );
        assert!(
            failure("b.txt").contains("must be local"),
            "{}",
            failure("b.txt")
        );
    }

    #[test]
    fn the_python_of_a_project_is_found_where_it_belongs() {
        for text in [
            "[project]\nname = 'x'\nrequires-python = \">=3.11\"  # why\n",
            "[tool.x]\nrequires-python = '<3'\n[ project ]\n'requires-python'='>=3.11'",
            "project.requires-python = '>=3.11'\n[project.scripts]\nrequires-python = '<3'",
        ] {
            assert_eq!(requires_python(text).as_deref(), Some(">=3.11"), "{text}");
        }
        assert_eq!(
            requires_python("[tool.poetry]\nrequires-python = '>=3.11'"),
            None
        );
    }

    #[test]
    fn a_project_decides_its_python_unless_asked_and_then_it_is_checked() {
        let folder = folder(&[(
            "pyproject.toml",
            "[project]\nrequires-python = '>=3.11, <3.13'",
        )]);
        let project = Input::Project {
            file: folder.path().join("pyproject.toml"),
            extras: Vec::new(),
        };
        assert_eq!(
            project.python(None).unwrap(),
            PythonRequest::Range(">=3.11,<3.13".to_owned())
        );
        let asked = PythonRequest::Version("3.13".to_owned());
        assert_eq!(project.python(Some(&asked)).unwrap(), asked);
        assert!(project.check_python("3.12.1").is_ok());
        let refusal = project.check_python("3.13.0").unwrap_err().to_string();
        assert!(
            refusal.contains("it requires Python >=3.11,<3.13, and 3.13.0 was asked for"),
            "{refusal}"
        );
    }

    #[test]
    fn a_range_that_is_not_understood_is_said() {
        let folder = folder(&[("pyproject.toml", "[project]\nrequires-python = '^3.11'")]);
        let project = Input::Project {
            file: folder.path().join("pyproject.toml"),
            extras: Vec::new(),
        };
        assert!(
            project
                .python(None)
                .unwrap_err()
                .to_string()
                .contains("\"^3.11\" is not understood")
        );
    }
}
