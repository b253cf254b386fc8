//! Description of an environment before it is built.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::versions::VersionRange;

/// Name of an environment: 1 to 40 lower-case letters, digits, `_` and `-`, starting with a letter.
///
/// It becomes part of a directory name, so it must not contain a separator or a dot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EnvironmentName(String);

impl EnvironmentName {
    /// Rules for a name, for messages.
    pub const ALLOWED: &str =
        "1 to 40 lower-case letters, digits, \"_\" and \"-\", starting with a letter";

    pub fn new(name: &str) -> Option<EnvironmentName> {
        let fits = (1..=40).contains(&name.len())
            && name.starts_with(|letter: char| letter.is_ascii_lowercase())
            && name.chars().all(|letter| {
                letter.is_ascii_lowercase() || letter.is_ascii_digit() || "_-".contains(letter)
            });
        fits.then(|| EnvironmentName(name.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EnvironmentName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl TryFrom<String> for EnvironmentName {
    type Error = String;

    fn try_from(name: String) -> Result<EnvironmentName, String> {
        EnvironmentName::new(&name)
            .ok_or_else(|| format!("an environment's name is {}", EnvironmentName::ALLOWED))
    }
}

impl From<EnvironmentName> for String {
    fn from(name: EnvironmentName) -> String {
        name.0
    }
}

/// Description of an environment's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentSpec {
    pub name: EnvironmentName,
    /// Requirements as written by the user, such as `numpy>=2`.
    pub packages: Vec<String>,
    /// Modules that the warm interpreter imports before it is forked.
    pub preload: Vec<String>,
    pub python: PythonRequest,
}

/// Packages for user code in the default environment: those that models use most often.
const SCIENCE: [&str; 22] = [
    "numpy",
    "pandas",
    "scipy",
    "matplotlib",
    "scikit-learn",
    "sympy",
    "seaborn",
    "statsmodels",
    "plotly",
    "pillow",
    "duckdb",
    "pyarrow",
    "openpyxl",
    "requests",
    "httpx",
    "beautifulsoup4",
    "lxml",
    "pyyaml",
    "jinja2",
    "tqdm",
    "networkx",
    "tabulate",
];

/// Other packages in the default environment: they run cells and display results. Plotly requires
/// nbformat, resvg converts drawings to images, and the last one has a font with Chinese, Japanese
/// and Korean characters.
const DISPLAY: [&str; 4] = ["ipython", "nbformat", "resvg-py", "notojp-matplotlib"];

/// Upper bounds on versions, for compatibility with popular packages that users install in
/// addition. botocore, and so boto3, needs the old python-dateutil.
const HELD: [&str; 1] = ["python-dateutil<3"];

/// Packages that the runner needs: IPython to run cells, Pydantic for the modules of MCP servers.
pub(super) const RUNNER_NEEDS: [&str; 2] = ["ipython", "pydantic>=2.9"];

impl EnvironmentSpec {
    /// Returns the environments that exist without any configuration.
    pub fn built_in() -> [EnvironmentSpec; 2] {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        [
            EnvironmentSpec {
                name: EnvironmentName("default".to_owned()),
                packages: words(&[&SCIENCE[..], &DISPLAY[..], &HELD[..]].concat()),
                // Only modules that most sessions need: every module costs memory in the warm
                // interpreter and page tables in every copy of it.
                preload: words(&["numpy", "pandas", "matplotlib.pyplot"]),
                python: PythonRequest::Any,
            },
            EnvironmentSpec {
                name: EnvironmentName("minimal".to_owned()),
                packages: words(&["ipython"]),
                preload: Vec::new(),
                python: PythonRequest::Any,
            },
        ]
    }

    /// Returns the requirements to install: the packages as written, and those of the runner.
    pub fn requirements(&self) -> Vec<String> {
        let mut requirements = self.packages.clone();
        if self.is_locked() {
            return requirements;
        }
        for needed in RUNNER_NEEDS {
            add_missing(&mut requirements, needed);
        }
        requirements
    }

    /// Returns the names of packages that user code may import, in their original order. Packages
    /// that only run cells, display results or bound a version are left out.
    pub fn packages_for_code(&self) -> Vec<String> {
        let wanted = self
            .packages
            .iter()
            .filter(|requirement| !HELD.contains(&requirement.as_str()));
        let names = wanted.map(|requirement| project_name(requirement));
        names
            .filter(|name| !DISPLAY.contains(&name.as_str()))
            .collect()
    }

    /// Returns whether the packages are the full content of a lock. Such a list is complete, and
    /// its author may leave out Pydantic.
    fn is_locked(&self) -> bool {
        let has_ipython = self
            .packages
            .iter()
            .any(|requirement| project_name(requirement) == "ipython");
        has_ipython
            && self
                .packages
                .iter()
                .all(|requirement| requirement.contains("=="))
    }
}

/// Adds a requirement unless the list has one for the same project.
pub(super) fn add_missing(requirements: &mut Vec<String>, needed: &str) {
    if !requirements
        .iter()
        .any(|requirement| project_name(requirement) == project_name(needed))
    {
        requirements.push(needed.to_owned());
    }
}

/// The Python to build an environment with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PythonRequest {
    /// The best one found.
    Any,
    /// A version such as `3.12` or `3.12.4`.
    Version(String),
    /// A range of versions such as `>=3.11,<3.14`, in the form of `requires-python`.
    Range(String),
    /// The path of an interpreter.
    Path(PathBuf),
}

impl PythonRequest {
    /// Rules for a request, for messages.
    pub const ALLOWED: &str = "a version from 3.10 on (such as 3.12 or 3.12.4) or the absolute \
                               path of a Python interpreter";

    pub fn parse(text: &str) -> Option<PythonRequest> {
        if text.starts_with('/') {
            return Some(PythonRequest::Path(PathBuf::from(text)));
        }
        let parts = text
            .split('.')
            .map(|part| part.parse::<u32>().ok())
            .collect::<Option<Vec<_>>>()?;
        match parts[..] {
            [3, minor] | [3, minor, _] if minor >= 10 => {
                Some(PythonRequest::Version(text.to_owned()))
            }
            _ => None,
        }
    }

    /// Parses a range such as `>=3.11, <3.14`.
    pub fn range(text: &str) -> Option<PythonRequest> {
        VersionRange::parse(text).map(|_| PythonRequest::Range(text.replace(' ', "")))
    }

    /// Returns whether an interpreter of this full version, such as `3.12.4`, satisfies the
    /// request.
    pub fn accepts_version(&self, full: &str) -> bool {
        match self {
            PythonRequest::Version(wanted) => {
                full == wanted
                    || full
                        .strip_prefix(wanted.as_str())
                        .is_some_and(|rest| rest.starts_with('.'))
            }
            PythonRequest::Range(range) => {
                VersionRange::parse(range).is_some_and(|range| range.contains(full))
            }
            PythonRequest::Any | PythonRequest::Path(_) => true,
        }
    }
}

impl fmt::Display for PythonRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PythonRequest::Any => formatter.write_str("any Python"),
            PythonRequest::Version(version) | PythonRequest::Range(version) => {
                write!(formatter, "Python {version}")
            }
            PythonRequest::Path(path) => write!(formatter, "{}", path.display()),
        }
    }
}

/// Rules for a requirement, for messages.
pub const REQUIREMENT_ALLOWED: &str =
    "a requirement such as numpy, numpy>=2 or pandas[excel], not an option, not empty, on one line";

/// Returns whether `text` may be passed to the installer. It checks only the form: an option must
/// not be accepted as a package.
pub fn is_requirement(text: &str) -> bool {
    text.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        && !text.contains(char::is_control)
        && text.len() <= 500
}

/// Returns whether `text` is a dotted module name.
pub fn is_module_name(text: &str) -> bool {
    !text.is_empty()
        && text.split('.').all(|part| {
            part.starts_with(|letter: char| letter.is_alphabetic() || letter == '_')
                && part
                    .chars()
                    .all(|letter| letter.is_alphanumeric() || letter == '_')
        })
}

/// Returns the project name of a requirement, in lower case and with dashes.
pub(super) fn project_name(requirement: &str) -> String {
    let end = requirement
        .find(|letter: char| !(letter.is_ascii_alphanumeric() || "-_.".contains(letter)));
    requirement[..end.unwrap_or(requirement.len())]
        .to_ascii_lowercase()
        .replace(['_', '.'], "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(packages: &[&str]) -> EnvironmentSpec {
        EnvironmentSpec {
            name: EnvironmentName::new("x").unwrap(),
            packages: packages
                .iter()
                .map(|package| (*package).to_owned())
                .collect(),
            preload: Vec::new(),
            python: PythonRequest::Any,
        }
    }

    #[test]
    fn a_name_cannot_leave_its_folder() {
        assert!(EnvironmentName::new("data-science_2").is_some());
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a.b",
            "A",
            "1a",
            "-a",
            "a b",
            "ä",
            &"a".repeat(41),
        ] {
            assert!(EnvironmentName::new(name).is_none(), "{name:?}");
        }
    }

    #[test]
    fn what_the_runner_needs_is_added_once_and_only_when_it_is_missing() {
        assert_eq!(
            spec(&["numpy"]).requirements(),
            ["numpy", "ipython", "pydantic>=2.9"]
        );
        assert_eq!(
            spec(&["IPython>=8", "numpy"]).requirements(),
            ["IPython>=8", "numpy", "pydantic>=2.9"]
        );
        assert_eq!(
            spec(&["ipython", "Pydantic[email]"]).requirements(),
            ["ipython", "Pydantic[email]"]
        );
        assert_eq!(
            spec(&["ipython==9.0", "six==1.17.0"]).requirements(),
            ["ipython==9.0", "six==1.17.0"],
            "a lock"
        );
        assert_eq!(
            spec(&["ipython-extra"]).requirements(),
            ["ipython-extra", "ipython", "pydantic>=2.9"]
        );
    }

    #[test]
    fn packages_for_code_are_names_without_what_shows_results() {
        let names = spec(&[
            "IPython>=8",
            "numpy>=2",
            "pandas[excel]",
            "nbformat",
            "Scikit_Learn",
        ])
        .packages_for_code();
        assert_eq!(names, ["numpy", "pandas", "scikit-learn"]);
        let [default, minimal] = EnvironmentSpec::built_in();
        assert_eq!(default.packages_for_code(), SCIENCE);
        assert_eq!(
            default.packages.len(),
            SCIENCE.len() + DISPLAY.len() + HELD.len()
        );
        assert!(minimal.packages_for_code().is_empty());
    }

    #[test]
    fn an_option_does_not_pass_for_a_package() {
        for good in [
            "numpy",
            "numpy>=2,<3",
            "pandas[excel]==2.2",
            "x @ https://example.com/x.whl",
            "7zip",
        ] {
            assert!(is_requirement(good), "{good:?}");
        }
        for bad in [
            "",
            "-r file",
            "--index-url=x",
            "./local",
            "/etc",
            "a\nb",
            " numpy",
            "@x",
        ] {
            assert!(!is_requirement(bad), "{bad:?}");
        }
    }

    #[test]
    fn module_names_are_dotted_words() {
        assert!(is_module_name("matplotlib.pyplot"));
        for bad in ["", ".", "a.", ".a", "a-b", "a b", "1a", "os;x"] {
            assert!(!is_module_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_version_request_accepts_its_own_line_only() {
        let request = PythonRequest::parse("3.12").unwrap();
        assert!(request.accepts_version("3.12.4"));
        assert!(request.accepts_version("3.12"));
        assert!(!request.accepts_version("3.1.2"));
        assert!(!request.accepts_version("3.120.0"));
        assert!(
            !PythonRequest::parse("3.12.4")
                .unwrap()
                .accepts_version("3.12.40")
        );
        let range = PythonRequest::range(">=3.11, <3.13").unwrap();
        assert_eq!(range.to_string(), "Python >=3.11,<3.13");
        assert!(range.accepts_version("3.12.4") && !range.accepts_version("3.13.0"));
    }

    #[test]
    fn requests_are_versions_or_absolute_paths() {
        assert_eq!(
            PythonRequest::parse("/usr/bin/python3"),
            Some(PythonRequest::Path("/usr/bin/python3".into()))
        );
        for bad in [
            "", "3", "3.9", "2.7", "4.0", "python3", "./python", "3.12.1.1", "3.x",
        ] {
            assert_eq!(PythonRequest::parse(bad), None, "{bad:?}");
        }
    }
}
