//! Environments for the dependencies of a session. Sessions with the same dependencies share an
//! environment.
//!
//! Dependency lists come from clients, and the build runs on the host with the host's network. So
//! only names from the configured index are accepted, with versions, extras and markers, but no
//! files, URLs or repositories.

use super::{EnvironmentName, EnvironmentSpec, PythonRequest, record};

/// Maximum number of dependencies of one session.
const MAX_REQUIREMENTS: usize = 100;

/// Error of a rejected list of dependencies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DependencyError {
    #[error(
        "\"{0}\" cannot be a dependency: it must be a name with versions, extras and a marker, \
         such as numpy, numpy>=2 or \
         pandas[excel], not a path or a URL"
    )]
    NotARequirement(String),
    #[error("{0} dependencies are too many; {MAX_REQUIREMENTS} are the most")]
    TooMany(usize),
}

/// Returns the spec of the environment for `requirements`. The same list gives the same
/// environment, regardless of order and spelling.
pub fn matching<S: AsRef<str>>(requirements: &[S]) -> Result<EnvironmentSpec, DependencyError> {
    if requirements.len() > MAX_REQUIREMENTS {
        return Err(DependencyError::TooMany(requirements.len()));
    }
    let normal = |text: &S| {
        let text = text.as_ref();
        normalised(text).ok_or_else(|| DependencyError::NotARequirement(text.to_owned()))
    };
    let mut packages = requirements
        .iter()
        .map(normal)
        .collect::<Result<Vec<_>, _>>()?;
    packages.sort();
    packages.dedup();
    let hash = record::short_hash(packages.join("\n").as_bytes());
    let name = EnvironmentName::new(&format!("{NAME_BEGINNING}{hash}"))
        .expect("letters and digits are a name");
    Ok(EnvironmentSpec {
        name,
        packages,
        preload: Vec::new(),
        python: PythonRequest::Any,
    })
}

const NAME_BEGINNING: &str = "dependencies-";

/// Returns the normalised form of a requirement, such as
/// `pandas[excel]>=2,<4;python_version>'3.10'`, or `None` if it is invalid.
fn normalised(text: &str) -> Option<String> {
    let (requirement, marker) = match text.split_once(';') {
        Some((requirement, marker)) => (requirement, Some(normal_marker(marker)?)),
        None => (text, None),
    };
    let compact: String = requirement
        .chars()
        .filter(|letter| *letter != ' ')
        .collect();
    // Removing the space between two words would join them into one.
    let words_run_together = requirement
        .trim()
        .split(' ')
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>();
    if words_run_together
        .windows(2)
        .any(|pair| ends_in_word(pair[0]) && begins_with_word(pair[1]))
    {
        return None;
    }
    let end = compact
        .find(|letter: char| !is_name_letter(letter))
        .unwrap_or(compact.len());
    let name = normal_name(&compact[..end])?;
    let rest = &compact[end..];
    let (extras, specifiers) = match rest.strip_prefix('[') {
        Some(rest) => rest
            .split_once(']')
            .map(|(extras, specifiers)| (Some(extras), specifiers))?,
        None => (None, rest),
    };
    let extras = match extras.filter(|extras| !extras.is_empty()) {
        Some(extras) => format!("[{}]", sorted(extras, normal_name)?),
        None => String::new(),
    };
    let specifiers = if specifiers.is_empty() {
        String::new()
    } else {
        sorted(specifiers, specifier)?
    };
    let marker = marker.map_or_else(String::new, |marker| format!("; {marker}"));
    Some(format!("{name}{extras}{specifiers}{marker}"))
}

fn begins_with_word(text: &str) -> bool {
    text.starts_with(|letter: char| letter.is_ascii_alphanumeric())
}

fn ends_in_word(text: &str) -> bool {
    text.ends_with(|letter: char| letter.is_ascii_alphanumeric())
}

fn is_name_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "-_.".contains(letter)
}

/// Normalises a name: case and the kind of dashes do not matter.
fn normal_name(name: &str) -> Option<String> {
    let fits = begins_with_word(name)
        && ends_in_word(name)
        && name.chars().all(is_name_letter)
        && name.len() <= 100;
    let words = name.split(['-', '_', '.']).filter(|word| !word.is_empty());
    fits.then(|| words.collect::<Vec<_>>().join("-").to_ascii_lowercase())
}

fn sorted(list: &str, normal: impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut parts = list.split(',').map(normal).collect::<Option<Vec<_>>>()?;
    parts.sort();
    parts.dedup();
    Some(parts.join(","))
}

fn specifier(text: &str) -> Option<String> {
    let version = ["===", "==", ">=", "<=", "!=", "~=", ">", "<"]
        .iter()
        .find_map(|sign| text.strip_prefix(sign))?;
    let fits = begins_with_word(version)
        && version.len() <= 100
        && version
            .chars()
            .all(|letter| is_name_letter(letter) || "*+!".contains(letter));
    fits.then(|| text.to_owned())
}

fn normal_marker(marker: &str) -> Option<String> {
    let fits = marker.len() <= 300
        && marker
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || " '\"_.-<>=!~()".contains(letter));
    let words: Vec<String> = marker
        .split(' ')
        .filter(|word| !word.is_empty())
        .map(|word| word.replace('"', "'"))
        .collect();
    (fits && !words.is_empty()).then(|| words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_list_gives_the_same_environment_whatever_its_order_and_spelling() {
        let one = matching(&[
            "Typing_Extensions",
            "pandas[Excel,aws] >=2, <4",
            "numpy; python_version > \"3.8\"",
        ])
        .unwrap();
        let two = matching(&[
            "numpy ;  python_version > '3.8'",
            "pandas[aws, excel]<4,>=2",
            "typing-extensions",
            "typing.extensions",
        ]);
        assert_eq!(one, two.unwrap());
        let packages = [
            "numpy; python_version > '3.8'",
            "pandas[aws,excel]<4,>=2",
            "typing-extensions",
        ];
        assert_eq!(one.packages, packages);
        assert!(one.name.as_str().starts_with("dependencies-"));
    }

    #[test]
    fn another_list_gives_another_environment() {
        let name = |list: &[&str]| matching(list).unwrap().name;
        assert_ne!(name(&["numpy"]), name(&["numpy>=2"]));
        assert_ne!(name(&["numpy"]), name(&["numpy", "pandas"]));
        assert_ne!(name(&["numpy"]), name(&[]));
    }

    #[test]
    fn only_names_from_the_index_are_taken() {
        for good in [
            "numpy",
            "7zip",
            "a==1.0+local",
            "a~=1!2.0",
            "zope.interface>=5",
            "a[b]",
            "a == 1.*",
            " a ",
        ] {
            assert!(normalised(good).is_some(), "{good:?}");
        }
        for bad in [
            "",
            "-r file",
            "--index-url=x",
            "a --index-url=x",
            "./local",
            "folder/x.whl",
            "/etc/x",
            "x @ https://example.com/x.whl",
            "x@file:///etc/x",
            "git+https://example.com/x",
            "a b",
            "a==1 2",
            "a==",
            "a=1",
            "a[b",
            "a[b]c",
            "a>=${SECRET}",
            "a; x == '${SECRET}'",
            "a;",
            "a\nb",
            "a # b",
            "a --hash=sha256:00",
            "ä",
        ] {
            assert_eq!(normalised(bad), None, "{bad:?}");
        }
        let refusal = matching(&["numpy", "./x"]).unwrap_err();
        assert_eq!(refusal, DependencyError::NotARequirement("./x".to_owned()));
        assert_eq!(
            matching(&vec!["a"; 101]),
            Err(DependencyError::TooMany(101))
        );
    }
}
