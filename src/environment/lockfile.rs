//! The lock file: every package of an environment with its exact version and file hashes.
//!
//! It is a requirements file that uv and pip can read as well. The lock beside an environment
//! records what was installed there. The same environment can be built from it again, here or
//! elsewhere; files with other hashes are rejected.
//!
//! A lock never contains the source of packages. An index named in a file is used for the current
//! build and not saved, because its URL may contain a password.

use std::collections::{BTreeMap, BTreeSet};

use super::spec::project_name;
use super::{PythonRequest, record};

/// Name of the lock file beside an environment.
pub(super) const LOCK_FILE: &str = "requirements.lock";

const HEADER: &str = "# Locked by Cellblock for Python ";

/// File hashes by package name.
pub(super) type Hashes = BTreeMap<String, BTreeSet<String>>;

/// Exact versions with hashes, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lockfile {
    /// Such as `3.12`, if the lock contains it.
    python: Option<String>,
    pins: Vec<Pin>,
    /// Index options. They belong to one build and not to the lock.
    options: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Pin {
    /// Such as `numpy==2.4.0` or `colorama==0.4.6 ; sys_platform == 'win32'`.
    requirement: String,
    /// Such as `sha256:…`.
    hashes: BTreeSet<String>,
}

/// Error of an invalid lock.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LockfileError {
    #[error("\"{0}\" has no place in a lock, which holds exact versions with hashes")]
    Option(String),
    #[error("\"{0}\" is not an exact version, such as numpy==2.4.0")]
    NotExact(String),
    #[error(
        "\"{0}\" has no hash (\"uv pip compile --generate-hashes\" and \"cellblock env show\" \
         write them)"
    )]
    NoHash(String),
    #[error(
        "IPython is not among the packages, and Cellblock needs it: add ipython to what is locked"
    )]
    NoIpython,
    #[error("none of the hashes that are asked for belongs to {0}")]
    OtherHashes(String),
}

/// Options that select the package index, or demand hashes, which are always required here.
const INDEX_OPTIONS: [&str; 6] = [
    "--index-url",
    "-i",
    "--extra-index-url",
    "--find-links",
    "-f",
    "--no-index",
];
const IDLE_OPTIONS: [&str; 1] = ["--require-hashes"];

impl Lockfile {
    /// Parses a lock that Cellblock, uv or pip-tools wrote.
    pub fn parse(text: &str) -> Result<Lockfile, LockfileError> {
        let header = text.lines().find_map(|line| line.strip_prefix(HEADER));
        let python = header
            .and_then(|rest| rest.split_whitespace().next())
            .map(str::to_owned);
        let mut lockfile = Lockfile {
            python,
            pins: Vec::new(),
            options: Vec::new(),
        };
        for line in logical_lines(text) {
            if line.starts_with('-') {
                let name = line.split([' ', '=']).next().unwrap_or_default();
                match name {
                    _ if INDEX_OPTIONS.contains(&name) => lockfile.options.push(line),
                    _ if IDLE_OPTIONS.contains(&name) => {}
                    _ => return Err(LockfileError::Option(line)),
                }
            } else {
                lockfile.pins.push(Pin::parse(&line)?);
            }
        }
        lockfile.pins.sort();
        if !lockfile
            .pins
            .iter()
            .any(|pin| project_name(&pin.requirement) == "ipython")
        {
            return Err(LockfileError::NoIpython);
        }
        Ok(lockfile)
    }

    /// Returns every package with its exact version.
    pub fn requirements(&self) -> Vec<String> {
        self.pins
            .iter()
            .map(|pin| pin.requirement.clone())
            .collect()
    }

    /// Returns the Python that the versions were chosen for, if the lock contains it.
    pub fn python(&self) -> Option<PythonRequest> {
        PythonRequest::parse(self.python.as_deref()?)
    }

    /// Returns the lock as a file. The same packages always give the same text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if let Some(python) = &self.python {
            let (system, machine) = (std::env::consts::OS, std::env::consts::ARCH);
            text.push_str(&format!("{HEADER}{python} on {system} {machine}.\n"));
            text.push_str(
                "# \"cellblock env build NAME --locked FILE\" makes the same environment again.\n",
            );
        }
        text + &self.body()
    }

    fn body(&self) -> String {
        let mut text = String::new();
        for pin in &self.pins {
            text.push_str(&pin.requirement);
            for hash in &pin.hashes {
                text.push_str(&format!(" \\\n    --hash={hash}"));
            }
            text.push('\n');
        }
        text
    }

    /// Returns the installer's input: the lock, and the indexes of this build.
    pub(super) fn for_installer(&self) -> String {
        self.options
            .iter()
            .map(|option| format!("{option}\n"))
            .chain([self.body()])
            .collect()
    }

    /// Returns a hash of the content. Comments and order do not matter; every file hash does.
    pub fn digest(&self) -> String {
        record::short_hash(self.body().as_bytes())
    }

    /// Sets the minor version of Python, such as `3.12`, that the versions were chosen for.
    pub(super) fn chosen_for(mut self, python: &str) -> Lockfile {
        self.python = Some(python.to_owned());
        self
    }

    /// Keeps only the hashes that `wanted` also lists, for the packages that it lists.
    pub(super) fn narrowed(mut self, wanted: &Hashes) -> Result<Lockfile, LockfileError> {
        for pin in &mut self.pins {
            if let Some(wanted) = wanted.get(&project_name(&pin.requirement)) {
                pin.hashes.retain(|hash| wanted.contains(hash));
                if pin.hashes.is_empty() {
                    return Err(LockfileError::OtherHashes(pin.requirement.clone()));
                }
            }
        }
        Ok(self)
    }
}

impl Pin {
    fn parse(line: &str) -> Result<Pin, LockfileError> {
        let (requirement, hashes) = split_hashes(line);
        let version = requirement.split(';').next().unwrap_or_default();
        let is_exact = match version.split_once("==") {
            Some((_, version)) => !version.contains(['*', ',']) && !version.trim().is_empty(),
            None => version.contains(" @ "),
        };
        match (is_exact, hashes.is_empty()) {
            (false, _) => Err(LockfileError::NotExact(requirement)),
            (true, true) => Err(LockfileError::NoHash(requirement)),
            (true, false) => Ok(Pin {
                requirement,
                hashes,
            }),
        }
    }
}

/// Separates a requirement from the hashes that follow it.
pub(super) fn split_hashes(line: &str) -> (String, BTreeSet<String>) {
    let mut words = line.split_whitespace();
    let (mut requirement, mut hashes) = (Vec::new(), BTreeSet::new());
    while let Some(word) = words.next() {
        if word == "--hash" {
            hashes.extend(words.next().map(str::to_owned));
        } else if let Some(hash) = word.strip_prefix("--hash=") {
            hashes.insert(hash.to_owned());
        } else {
            requirement.push(word);
        }
    }
    (requirement.join(" "), hashes)
}

/// Returns the lines of a requirements file without comments, with continued lines joined.
pub(super) fn logical_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut current = String::new();
    for line in text.lines() {
        let line = without_comment(line).trim_end();
        match line.strip_suffix('\\') {
            Some(beginning) => current.push_str(beginning),
            None => {
                current.push_str(line);
                lines.push(std::mem::take(&mut current));
            }
        }
    }
    lines.push(current);
    lines
        .iter()
        .map(|line| line.trim().to_owned())
        .filter(|line| !line.is_empty())
        .collect()
}

/// Removes a comment. A number sign starts a comment at the beginning of a line or after a space;
/// elsewhere it belongs to a URL.
fn without_comment(line: &str) -> &str {
    let is_comment = |place: &usize| {
        line[..*place]
            .chars()
            .next_back()
            .is_none_or(char::is_whitespace)
    };
    line.match_indices('#')
        .map(|(place, _)| place)
        .find(is_comment)
        .map_or(line, |place| &line[..place])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "--index-url https://user:password@example.com/simple\n\n# a comment\n\
        six==1.17.0 \\\n    --hash=sha256:bb \\\n    --hash=sha256:aa\n    # via something\n\
        ipython==9.0 --hash sha256:cc\ncolorama==0.4.6 ; sys_platform == 'win32' --hash=sha256:dd \
        # why\n";

    fn lockfile(text: &str) -> Result<Lockfile, LockfileError> {
        Lockfile::parse(text)
    }

    #[test]
    fn the_same_packages_always_give_the_same_text() {
        let read = lockfile(LOCK).unwrap().chosen_for("3.12");
        let requirements = [
            "colorama==0.4.6 ; sys_platform == 'win32'",
            "ipython==9.0",
            "six==1.17.0",
        ];
        assert_eq!(read.requirements(), requirements);
        let text = read.text();
        assert!(
            text.starts_with("# Locked by Cellblock for Python 3.12 on linux"),
            "{text}"
        );
        assert!(
            text.ends_with("six==1.17.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"),
            "{text}"
        );
        let again = lockfile(&text).unwrap();
        assert_eq!((again.text(), again.digest()), (text, read.digest()));
        assert_eq!(
            again.python(),
            Some(PythonRequest::Version("3.12".to_owned()))
        );
    }

    #[test]
    fn an_index_is_used_and_not_written_down() {
        let read = lockfile(LOCK).unwrap();
        assert!(
            read.for_installer()
                .starts_with("--index-url https://user:password@example.com/simple\n")
        );
        assert!(!read.text().contains("password"));
    }

    #[test]
    fn another_hash_is_another_lock() {
        let digest = |text: &str| lockfile(text).unwrap().digest();
        assert_eq!(
            digest("ipython==9 --hash=sha256:aa # x"),
            digest("ipython==9 \\\n  --hash=sha256:aa")
        );
        assert_ne!(
            digest("ipython==9 --hash=sha256:aa"),
            digest("ipython==9 --hash=sha256:ab")
        );
    }

    #[test]
    fn whatever_is_not_exact_with_a_hash_is_refused() {
        let ipython = "ipython==9.0 --hash=sha256:aa\n";
        assert!(lockfile(ipython).is_ok());
        assert!(
            lockfile(&format!(
                "{ipython}x @ https://example.com/x.whl#egg=x --hash=sha256:ab"
            ))
            .is_ok()
        );
        for (line, error) in [
            (
                "numpy --hash=sha256:aa",
                LockfileError::NotExact("numpy".to_owned()),
            ),
            (
                "numpy>=2 --hash=sha256:aa",
                LockfileError::NotExact("numpy>=2".to_owned()),
            ),
            (
                "numpy==2.* --hash=sha256:aa",
                LockfileError::NotExact("numpy==2.*".to_owned()),
            ),
            (
                "numpy ; extra == 'x' --hash=sha256:aa",
                LockfileError::NotExact("numpy ; extra == 'x'".to_owned()),
            ),
            ("numpy==2.0", LockfileError::NoHash("numpy==2.0".to_owned())),
            ("-e .", LockfileError::Option("-e .".to_owned())),
            (
                "-r other.txt",
                LockfileError::Option("-r other.txt".to_owned()),
            ),
            (
                "--no-binary=:all:",
                LockfileError::Option("--no-binary=:all:".to_owned()),
            ),
        ] {
            assert_eq!(
                lockfile(&format!("{ipython}{line}\n")),
                Err(error),
                "{line}"
            );
        }
        assert_eq!(
            lockfile("six==1.17.0 --hash=sha256:aa"),
            Err(LockfileError::NoIpython)
        );
    }

    #[test]
    fn hashes_that_were_asked_for_stay_and_others_go() {
        let wanted =
            |hash: &str| Hashes::from([("six".to_owned(), BTreeSet::from([hash.to_owned()]))]);
        let narrowed = lockfile(LOCK)
            .unwrap()
            .narrowed(&wanted("sha256:aa"))
            .unwrap()
            .text();
        assert!(
            narrowed.contains("sha256:aa")
                && !narrowed.contains("sha256:bb")
                && narrowed.contains("sha256:cc")
        );
        let refusal = lockfile(LOCK)
            .unwrap()
            .narrowed(&wanted("sha256:00"))
            .unwrap_err();
        assert_eq!(
            refusal,
            LockfileError::OtherHashes("six==1.17.0".to_owned())
        );
    }

    #[test]
    fn comments_end_and_lines_continue_as_in_requirements_files() {
        let text = "a \\\n  b # c \\\n#d\n\nx @ https://e/x#frag\n e\\";
        assert_eq!(logical_lines(text), ["a   b", "x @ https://e/x#frag", "e"]);
    }
}
