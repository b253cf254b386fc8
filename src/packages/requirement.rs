//! Requirements that a caller may request.
//!
//! ```text
//! polars                              a name in the index, with optional extras, versions and
//!                                     marker
//! polars[numpy]>=1,<2 ; python_version >= "3.10"
//! name @ https://host/name-1.0-py3-none-any.whl          a wheel or a source archive, from a host
//!                                                        that the policy allows
//! git+https://host/project.git@v1.0#subdirectory=python  a repository, likewise
//! ```
//!
//! A requirement becomes a line of a requirements file. That format allows more than requirements:
//! options, comments, variables (`${NAME}`), continued lines, local paths. So a text is accepted
//! only if every character of it is recognised here. The installer checks whether versions and
//! markers make sense.

use std::fmt;

/// Maximum number of requirements in one request.
pub const MAX_REQUIREMENTS: usize = 100;
/// Maximum length of a requirement. Only URLs are long, and none in common use comes near it.
pub const MAX_REQUIREMENT_LENGTH: usize = 500;

/// A requirement that cannot be read as anything else in a requirements file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    text: String,
    name: Option<String>,
    source: RequirementSource,
    is_plain: bool,
}

/// Source of a requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequirementSource {
    /// The configured index.
    Index,
    /// One wheel on a host that the policy allows. Installing it runs none of its code.
    Wheel(Location),
    /// Source code on a host that the policy allows. It must be built, which runs its code.
    Code(Location),
}

/// A host named in a requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    pub host: String,
    pub port: u16,
}

impl Location {
    /// Returns the egress rule that allows it. A rule without a port covers the default ports.
    fn rule(&self) -> String {
        if self.port == 443 {
            self.host.clone()
        } else {
            self.to_string()
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.host, self.port)
    }
}

/// Error of a rejected requirement.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequirementError {
    #[error("no package was named; give a requirement such as \"polars\" or \"polars>=1\"")]
    Nothing,
    #[error("{0} requirements are too many; at most {MAX_REQUIREMENTS} can be installed at once")]
    TooMany(usize),
    #[error("a requirement of {0} characters is too long; the limit is {MAX_REQUIREMENT_LENGTH}")]
    TooLong(usize),
    #[error("\"{}\" cannot be installed: {why}", text.escape_debug())]
    Malformed { text: String, why: &'static str },
    #[error(
        "\"{text}\" cannot be installed: it comes from {location}, which is not in the allowed \
         list. The operator of the server \
         can allow it with `--allowed-domain {}`; packages of the index can be installed by name",
        .location.rule()
    )]
    HostNotAllowed { text: String, location: Location },
}

impl Requirement {
    /// Parses one requirement. `allows_host` returns whether the policy lets the session reach a
    /// host at a port.
    pub fn parse(
        text: &str,
        allows_host: &impl Fn(&str, u16) -> bool,
    ) -> Result<Requirement, RequirementError> {
        let text = text.trim_matches([' ', '\t']);
        if text.is_empty() {
            return Err(RequirementError::Nothing);
        }
        if text.len() > MAX_REQUIREMENT_LENGTH {
            return Err(RequirementError::TooLong(text.len()));
        }
        let read = read(text).map_err(|why| RequirementError::Malformed {
            text: text.to_owned(),
            why,
        })?;
        match &read.source {
            RequirementSource::Wheel(location) | RequirementSource::Code(location)
                if !allows_host(&location.host, location.port) =>
            {
                Err(RequirementError::HostNotAllowed {
                    text: text.to_owned(),
                    location: location.clone(),
                })
            }
            _ => Ok(read),
        }
    }

    /// Parses all requirements of a request, or reports the first invalid one.
    pub fn parse_all<S: AsRef<str>>(
        texts: &[S],
        allows_host: impl Fn(&str, u16) -> bool,
    ) -> Result<Vec<Requirement>, RequirementError> {
        match texts.len() {
            0 => Err(RequirementError::Nothing),
            1..=MAX_REQUIREMENTS => texts
                .iter()
                .map(|text| Requirement::parse(text.as_ref(), &allows_host))
                .collect(),
            many => Err(RequirementError::TooMany(many)),
        }
    }

    /// Returns the requirement as one line for the installer.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns the normalised name, or `None` for a URL without a name.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the source.
    pub fn source(&self) -> &RequirementSource {
        &self.source
    }

    /// Returns whether this is only a name, so that any version of the package satisfies it.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }
}

/// Returns the normalised form of a project name: lower case, single dashes.
pub fn normalised(name: &str) -> String {
    let words = name.split(['-', '_', '.']).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_ascii_lowercase()
}

/// Returns whether `text` is a project name: ASCII letters, digits, and `.`, `_`, `-` between them.
pub(super) fn is_name(text: &str) -> bool {
    let alphanumeric = |letter: char| letter.is_ascii_alphanumeric();
    text.starts_with(alphanumeric)
        && text.ends_with(alphanumeric)
        && text.chars().all(is_name_letter)
}

fn is_name_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || "._-".contains(letter)
}

fn read(text: &str) -> Result<Requirement, &'static str> {
    if text.starts_with('-') {
        return Err("options are not accepted, only packages");
    }
    if !text.chars().all(|letter| (' '..='~').contains(&letter)) {
        return Err("it holds a line break, a control character or a letter outside ASCII");
    }
    if text.contains(['$', '\\', '`', '{', '}', '|']) {
        return Err("it holds a character that no requirement needs ($ \\ ` { } |)");
    }
    if text.split(' ').any(|word| word.starts_with('-')) {
        return Err("options are not accepted, only packages");
    }
    if text.starts_with(['.', '/', '~']) {
        return Err(
            "files cannot be installed; upload a package's modules instead, or name a package of \
             the index",
        );
    }
    if looks_like_an_address(text) {
        read_address(text, None, text)
    } else {
        read_named(text)
    }
}

/// Returns whether a text starts with a scheme. `name @ https://…` does not count.
fn looks_like_an_address(text: &str) -> bool {
    let scheme_end =
        text.find(|letter: char| !(letter.is_ascii_alphanumeric() || "+.-".contains(letter)));
    scheme_end.is_some_and(|end| text[end..].starts_with(':'))
}

fn read_named(text: &str) -> Result<Requirement, &'static str> {
    let name_end = text
        .find(|letter| !is_name_letter(letter))
        .unwrap_or(text.len());
    let (name, rest) = text.split_at(name_end);
    if rest.starts_with('/') {
        return Err("files cannot be installed; name a package of the index");
    }
    if !is_name(name) {
        return Err("it does not begin with the name of a package");
    }
    let lower = name.to_ascii_lowercase();
    if [".whl", ".gz", ".zip", ".bz2", ".tgz", ".txt", ".toml"]
        .iter()
        .any(|end| lower.ends_with(end))
    {
        return Err("files cannot be installed; name a package of the index");
    }
    let rest = rest.trim_start();
    let (has_extras, rest) = match rest.strip_prefix('[') {
        Some(inner) => (true, without_extras(inner)?),
        None => (false, rest),
    };
    let rest = rest.trim_start();
    if let Some(address) = rest.strip_prefix('@') {
        return read_address(address.trim_start(), Some(normalised(name)), text);
    }
    let (versions, marker) = rest
        .split_once(';')
        .map_or((rest, None), |(before, after)| (before, Some(after)));
    check_versions(versions.trim())?;
    marker.map_or(Ok(()), check_marker)?;
    Ok(Requirement {
        text: text.to_owned(),
        name: Some(normalised(name)),
        source: RequirementSource::Index,
        is_plain: !has_extras && rest.is_empty(),
    })
}

fn without_extras(inner: &str) -> Result<&str, &'static str> {
    let (extras, rest) = inner
        .split_once(']')
        .ok_or("the list of extras has no end")?;
    let fits = extras.trim().is_empty() || extras.split(',').all(|extra| is_name(extra.trim()));
    if fits {
        Ok(rest)
    } else {
        Err("an extra is a name, such as excel in pandas[excel]")
    }
}

fn check_versions(versions: &str) -> Result<(), &'static str> {
    const ADVICE: &str = "what follows the name is not a version, such as >=2,<3; to install \
                          several packages give a list";
    let inner = match versions.strip_prefix('(') {
        Some(inner) => inner.strip_suffix(')').ok_or(ADVICE)?,
        None => versions,
    };
    let fits = |clause: &str| {
        let version = clause.trim().trim_start_matches(['=', '<', '>', '!', '~']);
        let operator = &clause.trim()[..clause.trim().len() - version.len()];
        ["==", "===", "!=", "~=", "<", "<=", ">", ">="].contains(&operator)
            && is_version(version.trim())
    };
    if versions.is_empty() || inner.split(',').all(fits) {
        Ok(())
    } else {
        Err(ADVICE)
    }
}

/// Returns whether `text` has only characters of a version, such as `1.0`, `2!1.0.post1`, `1.0+cpu`
/// or `1.*`.
pub(super) fn is_version(text: &str) -> bool {
    (1..=100).contains(&text.len())
        && text.starts_with(|letter: char| letter.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|letter| letter.is_ascii_alphanumeric() || "._-+!*".contains(letter))
}

fn check_marker(marker: &str) -> Result<(), &'static str> {
    let fits = marker
        .chars()
        .all(|letter| letter.is_ascii_alphanumeric() || " _.-+*<>=!~()'\",".contains(letter));
    if fits && !marker.trim().is_empty() {
        Ok(())
    } else {
        Err("what follows the semicolon is not a marker, such as python_version >= \"3.10\"")
    }
}

/// Parses a URL with an optional marker after it. `whole` is the requirement that contains it.
fn read_address(
    address: &str,
    name: Option<String>,
    whole: &str,
) -> Result<Requirement, &'static str> {
    let (address, marker) = address
        .split_once(" ;")
        .map_or((address, None), |(before, after)| (before, Some(after)));
    marker.map_or(Ok(()), check_marker)?;
    let address = address.trim_end();
    if address.contains([' ', ';', '"', '\'', '<', '>', '^']) {
        return Err("an address holds no spaces or quotation marks");
    }
    let (is_git, rest) = match (
        address.strip_prefix("git+https://"),
        address.strip_prefix("https://"),
    ) {
        (Some(rest), _) => (true, rest),
        (_, Some(rest)) => (false, rest),
        _ => return Err("only https:// and git+https:// addresses can be installed"),
    };
    let (authority, path) = rest.split_once('/').ok_or("the address names no file")?;
    let location = read_authority(authority)?;
    let (path, fragment) = path
        .split_once('#')
        .map_or((path, None), |(before, after)| (before, Some(after)));
    fragment.map_or(Ok(()), check_fragment)?;
    let source = if is_git {
        check_repository(path)?;
        RequirementSource::Code(location)
    } else {
        let file = path.split('?').next().unwrap_or(path);
        match file {
            _ if file.ends_with(".whl") => RequirementSource::Wheel(location),
            _ if file.ends_with(".tar.gz") => RequirementSource::Code(location),
            _ => return Err("an https:// address must lead to a .whl or .tar.gz file"),
        }
    };
    Ok(Requirement {
        text: whole.to_owned(),
        name,
        source,
        is_plain: false,
    })
}

fn read_authority(authority: &str) -> Result<Location, &'static str> {
    if authority.contains('@') {
        return Err("an address with a user name or password is not accepted");
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) => {
            let is_number = !port.is_empty() && port.chars().all(|digit| digit.is_ascii_digit());
            let port = port.parse().ok().filter(|port| is_number && *port > 0);
            (
                host,
                port.ok_or("the port in the address is not a number from 1 to 65535")?,
            )
        }
        None => (authority, 443),
    };
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_')
    };
    if host.len() > 253 || !host.split('.').all(is_label) {
        return Err("the address has no valid host name");
    }
    Ok(Location {
        host: host.to_ascii_lowercase(),
        port,
    })
}

fn check_fragment(fragment: &str) -> Result<(), &'static str> {
    let fits = fragment.split('&').all(|part| match part.split_once('=') {
        Some(("egg", name)) => is_name(name),
        Some(("sha256", hash)) => {
            hash.len() == 64 && hash.chars().all(|digit| digit.is_ascii_hexdigit())
        }
        Some(("subdirectory", folder)) => folder
            .split('/')
            .all(|part| is_name_like(part) && !part.starts_with('.') && !part.starts_with('-')),
        _ => false,
    });
    if fits {
        Ok(())
    } else {
        Err("after # an address can have egg=, sha256= or subdirectory= only")
    }
}

fn is_name_like(part: &str) -> bool {
    !part.is_empty() && part.chars().all(is_name_letter)
}

/// Checks the path of a repository. A revision with a leading dash would be an option of git.
fn check_repository(path: &str) -> Result<(), &'static str> {
    let (repository, revision) = path
        .rsplit_once('@')
        .map_or((path, None), |(before, after)| (before, Some(after)));
    let fits = |text: &str, more: &str| {
        let letters = |letter: char| is_name_letter(letter) || more.contains(letter);
        !text.is_empty()
            && !text.starts_with('-')
            && !text.contains("..")
            && text.chars().all(letters)
    };
    if !fits(repository, "/~+%") {
        return Err("the address names no repository");
    }
    match revision {
        Some(revision) if !fits(revision, "/+") => {
            Err("what follows @ is not a branch, tag or commit")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Requirement, RequirementError> {
        Requirement::parse(text, &|host, port| host == "example.com" && port == 443)
    }

    #[track_caller]
    fn refusal(text: &str) -> String {
        parse(text).expect_err("it should be refused").to_string()
    }

    #[test]
    fn names_versions_extras_and_markers_are_taken() {
        let good = [
            ("polars", "polars"),
            (" Polars ", "polars"),
            ("discord.py", "discord-py"),
            ("ruamel__yaml", "ruamel-yaml"),
            ("7zip", "7zip"),
            ("numpy>=2,<3", "numpy"),
            ("numpy >= 2 , != 2.1.*", "numpy"),
            ("numpy (>=2)", "numpy"),
            ("torch==2.1.0+cpu", "torch"),
            ("x===1!2.0-rc1", "x"),
            ("pandas[excel, parquet]~=2.2", "pandas"),
            ("pandas[]", "pandas"),
            (
                "tomli ; python_version < '3.11' and (sys_platform == \"linux\" or extra == 'a-b')",
                "tomli",
            ),
            ("tomli>=1;python_version<'3.11'", "tomli"),
        ];
        for (text, name) in good {
            let read = parse(text).unwrap_or_else(|why| panic!("{text:?}: {why}"));
            assert_eq!(
                (read.name(), read.source(), read.text()),
                (Some(name), &RequirementSource::Index, text.trim())
            );
        }
    }

    #[test]
    fn only_a_bare_name_is_satisfied_by_any_version() {
        assert!(parse("numpy").unwrap().is_plain());
        for more in [
            "numpy>=1",
            "numpy[a]",
            "numpy; python_version>'3'",
            "numpy @ https://example.com/numpy-1.whl",
        ] {
            assert!(!parse(more).unwrap().is_plain(), "{more:?}");
        }
    }

    #[test]
    fn options_are_refused_wherever_they_stand() {
        for text in [
            "-r requirements.txt",
            "--index-url=https://example.com",
            "-e .",
            "numpy --index-url https://example.com",
            "numpy  -f /tmp",
            "numpy ; python_version > '3' --hash=sha256:00",
            "x @ https://example.com/x.whl --no-deps",
        ] {
            assert!(
                refusal(text).contains("options are not accepted"),
                "{text:?}: {}",
                refusal(text)
            );
        }
        assert!(refusal("numpy\t--pre").contains("control character"));
        parse("numpy ; python_version > '3'").unwrap(); // control
        parse("name-with-dashes>=1.0-1").unwrap(); // control
    }

    #[test]
    fn what_a_requirements_file_would_understand_otherwise_is_refused() {
        for text in [
            "numpy\n-r x",
            "numpy\r\nx",
            "numpy\0",
            "numpy \\",
            "${HOME}",
            "x @ https://example.com/${UV_DEFAULT_INDEX}/x.whl",
            "numpy # comment",
            "numpy\u{85}x",
            "numpy\u{2028}x",
            "nümpy",
            "numpy`id`",
        ] {
            refusal(text);
        }
    }

    #[test]
    fn files_and_other_schemes_are_refused_with_what_is_possible() {
        for text in [
            ".",
            "./x",
            "../x",
            "/etc/passwd",
            "~/x",
            "dir/x",
            "x.whl",
            "X-1.0.TAR.GZ",
            "requirements.txt",
            "pyproject.toml",
        ] {
            let said = refusal(text);
            assert!(
                said.contains("files cannot be installed") || said.contains("does not begin"),
                "{text:?}: {said}"
            );
        }
        for text in [
            "file:///etc/passwd",
            "file:x.whl",
            "http://example.com/x.whl",
            "git+ssh://git@example.com/x",
            "git+file:///x",
            "hg+https://example.com/x",
            "HTTPS://example.com/x.whl",
            "c:/x.whl",
            "x @ file:///x.whl",
            "x @ ./x.whl",
            "x @ http://example.com/x.whl",
        ] {
            assert!(
                refusal(text).contains("https://"),
                "{text:?}: {}",
                refusal(text)
            );
        }
    }

    #[test]
    fn addresses_are_taken_from_allowed_hosts_only() {
        let wheel = parse("https://example.com/a/x-1.0-py3-none-any.whl").unwrap();
        assert_eq!(
            (wheel.name(), wheel.source()),
            (None, &RequirementSource::Wheel(here()))
        );
        let named = parse(
            "X_y[fast] @ https://EXAMPLE.com:443/x.tar.gz#sha256="
                .to_owned()
                .as_str(),
        );
        assert!(named.is_err(), "a hash has 64 digits");
        let named =
            parse("X_y[fast] @ https://EXAMPLE.com:443/x.tar.gz ; python_version > '3'").unwrap();
        assert_eq!(
            (named.name(), named.source()),
            (Some("x-y"), &RequirementSource::Code(here()))
        );
        for good in [
            "git+https://example.com/a/b.git@v1.0#subdirectory=py/x&egg=b",
            "b @ git+https://example.com/a/b",
        ] {
            assert_eq!(
                parse(good).unwrap().source(),
                &RequirementSource::Code(here()),
                "{good:?}"
            );
        }
        for elsewhere in [
            "https://example.org/x.whl",
            "https://example.com:8443/x.whl",
            "git+https://example.org/x",
            "x @ https://sub.example.com/x.whl",
        ] {
            assert!(
                refusal(elsewhere).contains("not in the allowed list"),
                "{elsewhere:?}"
            );
        }
        let cure = |text: &str| refusal(text).split('`').nth(1).unwrap().to_owned();
        assert_eq!(
            cure("git+https://example.org/x"),
            "--allowed-domain example.org"
        );
        assert_eq!(
            cure("https://example.com:8443/x.whl"),
            "--allowed-domain example.com:8443"
        );
    }

    fn here() -> Location {
        Location {
            host: "example.com".to_owned(),
            port: 443,
        }
    }

    #[test]
    fn an_address_has_one_reading() {
        for text in [
            "https://user:pw@example.com/x.whl",
            "https://example.com@example.org/x.whl",
            "https://example.com",
            "https:///x.whl",
            "https://example.com:/x.whl",
            "https://example.com:0/x.whl",
            "https://example.com:+443/x.whl",
            "https://example.com%2eorg/x.whl",
            "https://[::1]/x.whl",
            "https://example..com/x.whl",
            "https://example.com./x.whl",
            "https://example.com/x.exe",
            "https://example.com/x y.whl",
            "https://example.com/x.whl#evil=1",
            "https://example.com/x.whl;x",
            "git+https://example.com/",
            "git+https://example.com/x@--upload-pack=id",
            "git+https://example.com/x@",
            "git+https://example.com/../x",
            "git+https://example.com/x#subdirectory=../y",
            "git+https://example.com/x#subdirectory=/y",
        ] {
            refusal(text);
        }
    }

    #[test]
    fn several_packages_in_one_text_are_refused_with_advice() {
        for text in [
            "numpy pandas",
            "numpy,pandas",
            "numpy==",
            "numpy>=1 2",
            "numpy=1",
            "numpy[",
            "numpy[-x]",
            "numpy;",
        ] {
            refusal(text);
        }
        assert!(refusal("numpy pandas").contains("give a list"));
    }

    #[test]
    fn count_and_length_are_bounded() {
        let all = |count: usize| Requirement::parse_all(&vec!["x"; count], |_, _| false);
        assert_eq!(all(0), Err(RequirementError::Nothing));
        assert_eq!(all(100).unwrap().len(), 100);
        assert_eq!(all(101), Err(RequirementError::TooMany(101)));
        assert!(parse(&"x".repeat(500)).is_ok());
        assert_eq!(parse(&"x".repeat(501)), Err(RequirementError::TooLong(501)));
        assert_eq!(parse("  "), Err(RequirementError::Nothing));
        assert!(Requirement::parse_all(&["x", "-r y"], |_, _| true).is_err());
    }

    #[test]
    fn a_refusal_shows_control_characters_harmlessly() {
        assert!(refusal("numpy\u{1b}[2J").contains("\\u{1b}"));
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_taken_is_one_line_of_plain_text_without_options(
            text in "[ -~\\t\\n]{0,40}",
        ) {
            if let Ok(read) = parse(&text) {
                proptest::prop_assert!(
                    read.text().chars().all(|letter| (' '..='~').contains(&letter))
                );
                proptest::prop_assert!(
                    !read.text().split_whitespace().any(|word| word.starts_with('-'))
                );
                proptest::prop_assert!(!read.text().contains(['$', '\\']));
            }
        }
    }
}
