//! The settings of a profile: the defaults of the server that it replaces, and that server's own
//! files and variables.
//!
//! ```text
//! defaults of the profile  <  its own file  <  its own variables
//!                          <  file  <  CELLBLOCK_… variables  <  flags
//! ```
//!
//! Everything becomes a layer of ordinary settings with the lowest precedence, so `checks` needs no
//! special cases. A setting without a meaning here becomes a notice, because its author expects an
//! effect.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::checks::{NamedFile, ReadNamedFile};
use super::folders;
use super::layers::{self, SettingOrigin, SettingsLayer, WrittenMember, WrittenValue};
use super::table::Key;
use super::{ConfigError, InvalidValue, ProfileName};
use crate::sandbox::masks::MaskRule;

/// Packages that python-docker-mcp includes. They are missing in its list, but its documentation
/// promises them.
const BUNDLED_MODULES: [&str; 6] = ["matplotlib", "numpy", "pandas", "scipy", "sklearn", "sympy"];

/// Modules that python-docker-mcp lists.
const LISTED_MODULES: [&str; 22] = [
    "abc",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "time",
    "typing",
];

/// Modules that python-docker-mcp rejects.
const BLOCKED_MODULES: [&str; 12] = [
    "asyncio",
    "multiprocessing",
    "os",
    "pathlib",
    "platform",
    "pty",
    "shutil",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
];

/// Modules that Containerized Code Executer rejects.
const DANGEROUS_MODULES: [&str; 9] = [
    "base64",
    "multiprocessing",
    "os",
    "requests",
    "shutil",
    "socket",
    "subprocess",
    "sys",
    "threading",
];

/// The sources of a profile's settings.
pub(super) struct Surroundings<'a> {
    pub variables: &'a BTreeMap<String, String>,
    pub current_dir: &'a Path,
    pub read: ReadNamedFile<'a>,
    /// Whether sandboxes are containers, if it was set.
    pub containers: Option<bool>,
    /// Whether an image was named.
    pub image: bool,
}

impl Surroundings<'_> {
    fn variable(&self, name: &str) -> Option<&str> {
        self.variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.trim().is_empty())
    }

    fn absolute(&self, path: &str) -> PathBuf {
        folders::absolute(
            path,
            self.current_dir,
            self.variables.get("HOME").map(String::as_str),
        )
    }

    fn text(&self, path: &Path) -> Result<Option<String>, ConfigError> {
        (self.read)(NamedFile::ByOperator(path)).map_err(|cause| ConfigError::Unreadable {
            path: path.to_owned(),
            cause,
        })
    }
}

/// Returns the settings of a profile, lowest precedence first. Settings without effect are added to
/// `notices`.
pub(super) fn layer(
    profile: ProfileName,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<SettingsLayer, ConfigError> {
    let mut layer = usual(profile);
    // An image named to ipybox implies a container.
    if profile == ProfileName::Ipybox && surroundings.image && surroundings.containers.is_none() {
        layer.push(
            Key::Backend,
            SettingOrigin::Flag("--profile"),
            WrittenValue::Text("docker".to_owned()),
        );
    }
    if profile == ProfileName::PythonDocker {
        let without_pool = own_file(surroundings, &mut layer, notices)?;
        own_variables(surroundings, without_pool, &mut layer, notices)?;
    }
    Ok(layer)
}

/// The default settings of each server. None of these profiles has an undo tool.
fn usual(profile: ProfileName) -> SettingsLayer {
    let text = |key: Key, value: &str| {
        (
            key,
            SettingOrigin::Flag("--profile"),
            WrittenValue::Text(value.to_owned()),
        )
    };
    let list = |key: Key, values: &[&str]| {
        let values = values
            .iter()
            .map(|value| WrittenValue::Text((*value).to_owned()))
            .collect();
        (
            key,
            SettingOrigin::Flag("--profile"),
            WrittenValue::List(values),
        )
    };
    SettingsLayer::of(match profile {
        ProfileName::Default => Vec::new(),
        // ipybox keeps a kernel as long as its server runs. A day without a call is equivalent.
        ProfileName::Ipybox => vec![text(Key::Undo, "off"), text(Key::IdleTimeout, "24h")],
        ProfileName::PythonDocker => vec![
            text(Key::Undo, "off"),
            text(Key::Memory, "256M"),
            text(Key::Cpus, "0.5"),
            text(Key::Timeout, "30s"),
            text(Key::IdleTimeout, "24h"),
            text(Key::PoolMaxAge, "300s"),
            text(Key::PoolCreations, "5"),
            list(
                Key::AllowedModules,
                &[&LISTED_MODULES[..], &BUNDLED_MODULES].concat(),
            ),
            list(Key::BlockedModules, &BLOCKED_MODULES),
        ],
        ProfileName::CodeExecuter => {
            vec![
                text(Key::Undo, "off"),
                text(Key::IdleTimeout, "24h"),
                list(Key::BlockedModules, &DANGEROUS_MODULES),
            ]
        }
        ProfileName::Pyexec => vec![
            text(Key::Undo, "off"),
            text(Key::Memory, "512M"),
            text(Key::Cpus, "0.5"),
            text(Key::Timeout, "30s"),
            text(Key::IdleTimeout, "24h"),
        ],
    })
}

/// Reads the configuration file of python-docker-mcp. Returns where it disables the pool, if it
/// does.
fn own_file(
    surroundings: &Surroundings<'_>,
    layer: &mut SettingsLayer,
    notices: &mut Vec<String>,
) -> Result<Option<SettingOrigin>, ConfigError> {
    let named = surroundings
        .variable(CONFIG)
        .map(|path| surroundings.absolute(path));
    let path = named
        .clone()
        .unwrap_or_else(|| surroundings.absolute("~/.python-docker-mcp/config.yaml"));
    let text = match surroundings.text(&path)? {
        Some(text) => text,
        None if named.is_none() => return Ok(None),
        // The missing file may have been meant to restrict something.
        None => {
            let origin = SettingOrigin::Variable(CONFIG.to_owned());
            let given = surroundings.variable(CONFIG).unwrap_or_default();
            return Err(refused_value(&origin, given, "a file that exists"));
        }
    };
    let containers = surroundings.containers == Some(true);
    PythonDockerFile {
        path: &path,
        layer,
        notices,
        without_pool: None,
        containers,
    }
    .read(&text)
}

struct PythonDockerFile<'a> {
    path: &'a Path,
    layer: &'a mut SettingsLayer,
    notices: &'a mut Vec<String>,
    /// Where the pool is disabled, whatever its size.
    without_pool: Option<SettingOrigin>,
    /// Sandboxes are containers.
    containers: bool,
}

impl PythonDockerFile<'_> {
    fn read(mut self, text: &str) -> Result<Option<SettingOrigin>, ConfigError> {
        for member in layers::members_of(self.path, text)? {
            let origin = SettingOrigin::File {
                path: self.path.to_owned(),
                line: member.line,
            };
            match member.name.as_str() {
                "docker" | "package" => {
                    for inner in self.table(&member, &origin)? {
                        let origin = origin.at(inner.line);
                        self.setting(
                            &format!("{}.{}", member.name, inner.name),
                            origin,
                            inner.value,
                        )?;
                    }
                }
                _ => self.setting(&member.name.clone(), origin, member.value)?,
            }
        }
        Ok(self.without_pool)
    }

    fn table(
        &self,
        member: &WrittenMember,
        origin: &SettingOrigin,
    ) -> Result<Vec<WrittenMember>, ConfigError> {
        match &member.value {
            WrittenValue::Table(members) => Ok(members.clone()),
            WrittenValue::Nothing => Ok(Vec::new()),
            _ => Err(layers::wrong_shape(
                &member.name,
                origin,
                "a table of \"key: value\" lines",
            )),
        }
    }

    fn setting(
        &mut self,
        name: &str,
        origin: SettingOrigin,
        mut value: WrittenValue,
    ) -> Result<(), ConfigError> {
        let is =
            |word: bool| matches!(&value, WrittenValue::Text(text) if truth(text) == Some(word));
        let key = match name {
            "docker.memory_limit" => Key::Memory,
            "docker.cpu_limit" => Key::Cpus,
            "docker.timeout" => Key::Timeout,
            "docker.image" if self.containers => Key::ContainerTag,
            "docker.pool_max_age" => Key::PoolMaxAge,
            "docker.max_concurrent_creations" => Key::PoolCreations,
            "docker.pool_size" => Key::Pool,
            "package.index_url" => Key::PackageIndex,
            "package.trusted_hosts" => Key::PackageTrustedHosts,
            "allowed_modules" => {
                // An empty list counts as not set.
                if let WrittenValue::List(listed) = &mut value
                    && !listed.is_empty()
                {
                    listed.extend(
                        BUNDLED_MODULES.map(|module| WrittenValue::Text(module.to_owned())),
                    );
                }
                Key::AllowedModules
            }
            "blocked_modules" => Key::BlockedModules,
            "docker.pool_enabled" if is(false) => {
                self.without_pool = Some(origin);
                return Ok(());
            }
            "docker.network_disabled" if is(false) => {
                self.layer.push(
                    Key::AllowNetwork,
                    origin,
                    WrittenValue::Text("all".to_owned()),
                );
                return Ok(());
            }
            "docker.pool_enabled" | "docker.network_disabled" if is(true) => return Ok(()),
            "docker.pool_enabled" | "docker.network_disabled" => {
                return Err(layers::wrong_shape(name, &origin, "true or false"));
            }
            "docker.read_only" if is(true) => return Ok(()),
            "package.installer" if matches!(&value, WrittenValue::Text(text) if text == "uv") => {
                return Ok(());
            }
            _ => {
                self.notices
                    .push(format!("{origin}: {name} has no effect here{}", why(name)));
                return Ok(());
            }
        };
        self.layer.push(key, origin, value);
        Ok(())
    }
}

/// Returns why a setting of python-docker-mcp has no effect.
fn why(name: &str) -> &'static str {
    match name {
        "docker.image" => {
            ": code runs in the environment that --environment names, and in a container only with \
             --backend docker"
        }
        "docker.working_dir" => ": code works in a folder of its own, which is its current folder",
        "docker.read_only" => {
            ": the system that code sees is always read-only, its working folder never"
        }
        "package.installer" => ": packages are installed by uv",
        _ => ", because it is not known",
    }
}

const VARIABLES: &str = "PYTHON_DOCKER_MCP_";
const CONFIG: &str = "PYTHON_DOCKER_MCP_CONFIG";
const DEBUG: &str = "PYTHON_DOCKER_MCP_DEBUG";
const POOL_ENABLED: &str = "PYTHON_DOCKER_MCP_POOL_ENABLED";

/// Variables of python-docker-mcp that are settings here.
const SETTINGS: [(&str, Key); 5] = [
    ("PYTHON_DOCKER_MCP_MEMORY_LIMIT", Key::Memory),
    ("PYTHON_DOCKER_MCP_CPU_LIMIT", Key::Cpus),
    ("PYTHON_DOCKER_MCP_POOL_SIZE", Key::Pool),
    ("PYTHON_DOCKER_MCP_POOL_MAX_AGE", Key::PoolMaxAge),
    (
        "PYTHON_DOCKER_MCP_MAX_CONCURRENT_CREATIONS",
        Key::PoolCreations,
    ),
];

/// Reads the variables of python-docker-mcp, which take precedence over its file. `without_pool` is
/// where that file disables the pool.
fn own_variables(
    surroundings: &Surroundings<'_>,
    without_pool: Option<SettingOrigin>,
    layer: &mut SettingsLayer,
    notices: &mut Vec<String>,
) -> Result<(), ConfigError> {
    let known = || {
        let names = [CONFIG, DEBUG, POOL_ENABLED]
            .into_iter()
            .chain(SETTINGS.map(|(name, _)| name));
        names.filter_map(|name| name.strip_prefix(VARIABLES))
    };
    for (variable, name) in surroundings
        .variables
        .keys()
        .filter_map(|all| Some((all, all.strip_prefix(VARIABLES)?)))
    {
        if known().any(|known| known == name) {
            continue;
        }
        let Some(near) = layers::nearest(name, known()) else {
            // It may have been set for another purpose, as with our own variables.
            notices.push(format!(
                "the variable {variable} is no setting of python-docker-mcp and is ignored"
            ));
            continue;
        };
        let (origin, nearest) = (
            SettingOrigin::Variable(variable.clone()),
            Some(format!("{VARIABLES}{near}")),
        );
        return Err(ConfigError::UnknownKey {
            key: variable.clone(),
            origin,
            nearest,
        });
    }
    for (name, key) in SETTINGS {
        if let Some(value) = surroundings.variable(name) {
            layer.push(
                key,
                SettingOrigin::Variable(name.to_owned()),
                WrittenValue::Text(value.to_owned()),
            );
        }
    }
    let switch = |name: &str| match surroundings.variable(name) {
        None => Ok(None),
        Some(value) => truth(value).map(Some).ok_or_else(|| {
            refused_value(
                &SettingOrigin::Variable(name.to_owned()),
                value,
                "1, true, yes or on, or 0, false, no or off",
            )
        }),
    };
    let without_pool = match switch(POOL_ENABLED)? {
        Some(is_on) => (!is_on).then(|| SettingOrigin::Variable(POOL_ENABLED.to_owned())),
        None => without_pool,
    };
    if let Some(origin) = without_pool {
        layer.push(Key::Pool, origin, WrittenValue::Text("0".to_owned()));
    }
    if switch(DEBUG)? == Some(true) {
        layer.push(
            Key::LogLevel,
            SettingOrigin::Variable(DEBUG.to_owned()),
            WrittenValue::Text("debug".to_owned()),
        );
    }
    Ok(())
}

/// Returns the error for a variable with an invalid value.
fn refused_value(origin: &SettingOrigin, given: &str, allowed: &str) -> ConfigError {
    ConfigError::Invalid(Box::new(InvalidValue {
        key: "it".to_owned(),
        origin: origin.clone(),
        given: format!("\"{given}\""),
        allowed: allowed.to_owned(),
        why: None,
    }))
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Paths that code must not read or change, from the sandbox configuration of ipybox. Relative
/// paths start at the working folder.
pub(super) type ProtectedPaths = Vec<(MaskRule, PathBuf)>;

/// Reads the sandbox configuration of ipybox: what code may reach, read and write. The network part
/// is returned as settings.
pub(super) fn sandbox_config(
    path: &Path,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<(SettingsLayer, ProtectedPaths), ConfigError> {
    let mut layer = SettingsLayer::of(Vec::new());
    let mut protected = ProtectedPaths::new();
    let Some(text) = surroundings.text(path)? else {
        notices.push(format!(
            "the sandbox configuration {} does not exist; code has no network",
            path.display()
        ));
        return Ok((layer, protected));
    };
    let unreadable = |why: String| ConfigError::Unreadable {
        path: path.to_owned(),
        cause: io::Error::other(why),
    };
    let Value::Object(sections) =
        serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))?
    else {
        return Err(unreadable("it must hold an object".to_owned()));
    };
    for (section, value) in &sections {
        let (Value::Object(members), "network" | "filesystem") = (value, section.as_str()) else {
            notices.push(format!("{}: {section} has no effect here", path.display()));
            continue;
        };
        for (name, value) in members {
            let texts = || {
                let texts = value
                    .as_array()
                    .and_then(|texts| texts.iter().map(Value::as_str).collect());
                texts.ok_or_else(|| unreadable(format!("{section}.{name} must be a list of texts")))
            };
            let key = match (section.as_str(), name.as_str()) {
                ("network", "allowedDomains") => Key::AllowedDomains,
                ("network", "deniedDomains") => Key::DeniedDomains,
                ("filesystem", "denyRead" | "denyWrite") => {
                    let rule = if name == "denyRead" {
                        MaskRule::Hidden
                    } else {
                        MaskRule::ReadOnly
                    };
                    let written: Vec<&str> = texts()?;
                    for text in written {
                        let path = protected_path(text, surroundings).map_err(|why| {
                            unreadable(format!("{section}.{name} holds {text:?}, which {why}"))
                        })?;
                        protected.push((rule, path));
                    }
                    continue;
                }
                _ => {
                    notices.push(format!(
                        "{}: {section}.{name} has no effect here{}",
                        path.display(),
                        why_not(section, name)
                    ));
                    continue;
                }
            };
            let written: Vec<&str> = texts()?;
            let rules = written
                .into_iter()
                .map(|rule| WrittenValue::Text(rule_of_sandbox(rule, key)))
                .collect();
            layer.push(
                key,
                SettingOrigin::File {
                    path: path.to_owned(),
                    line: None,
                },
                WrittenValue::List(rules),
            );
        }
    }
    Ok((layer, protected))
}

/// Parses a path that code must not read or change. A pattern is rejected: a matching file that is
/// created later could not be hidden.
fn protected_path(text: &str, surroundings: &Surroundings<'_>) -> Result<PathBuf, &'static str> {
    // A folder is protected with all its contents.
    let text = text.strip_suffix("/**").unwrap_or(text);
    if text.is_empty() || text.contains('\0') {
        return Err("is not a path");
    }
    if text.contains(['*', '?', '[']) {
        return Err("is a pattern; patterns cannot be held, so name each file or folder");
    }
    match text.starts_with(['/', '~']) {
        true => Ok(surroundings.absolute(text)),
        false => Ok(Path::new(text)
            .components()
            .filter(|part| *part != Component::CurDir)
            .collect()),
    }
}

/// Converts a rule of that file with its meaning there: a wildcard matches any number of labels,
/// and a name applies to all its ports.
fn rule_of_sandbox(rule: &str, key: Key) -> String {
    let rule = rule
        .strip_prefix("*.")
        .map_or_else(|| rule.to_owned(), |base| format!("**.{base}"));
    match key {
        Key::AllowedDomains if !rule.contains(':') => format!("{rule}:*"),
        _ => rule,
    }
}

fn why_not(section: &str, name: &str) -> &'static str {
    match (section, name) {
        ("filesystem", _) => {
            ": code sees its working folder and what --mount shows, and nothing else of this \
             machine"
        }
        _ => ": code has a network of its own",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::checks::tests::{Case, case};
    use super::super::{BackendChoice, Settings, UndoSettings};
    use super::*;

    const FILE: &str = "/home/me/.python-docker-mcp/config.yaml";

    fn python_docker() -> Case {
        case().flag(Key::Profile, "python-docker-mcp")
    }

    fn told(settings: &Settings, words: &str) -> bool {
        settings.notices.iter().any(|notice| notice.contains(words))
    }

    #[test]
    fn each_profile_brings_its_usual_limits() {
        let limits = |profile: &str| {
            let settings = case().flag(Key::Profile, profile).settings();
            let hours = settings.idle_timeout.as_secs() / 3600;
            (
                settings.limits.memory >> 20,
                settings.limits.cpus,
                settings.timeout.as_secs(),
                hours,
                settings.undo == UndoSettings::Off,
            )
        };
        assert_eq!(limits("default"), (2048, 2.0, 120, 1, false));
        assert_eq!(limits("ipybox"), (2048, 2.0, 120, 24, true));
        assert_eq!(limits("python-docker-mcp"), (256, 0.5, 30, 24, true));
        assert_eq!(limits("code-executer"), (2048, 2.0, 120, 24, true));
        assert_eq!(limits("pyexec"), (512, 0.5, 30, 24, true));
        assert!(
            case()
                .flag(Key::Profile, "pyexce")
                .refusal()
                .contains("pyexec")
        );
    }

    #[test]
    fn no_profile_opens_the_network() {
        for profile in ["ipybox", "python-docker-mcp", "code-executer", "pyexec"] {
            let of_profile = || case().flag(Key::Profile, profile);
            assert!(
                of_profile().settings().network.rules.is_empty(),
                "{profile}"
            );
            let open = of_profile().flag(Key::AllowNetwork, "all").settings();
            assert!(open.network.rules.is_everything(), "{profile}"); // control
        }
    }

    #[test]
    fn what_an_operator_says_is_stronger_than_a_profile() {
        let settings = python_docker()
            .variable("CELLBLOCK_MEMORY", "1G")
            .flag(Key::Timeout, "5s")
            .settings();
        assert_eq!(
            (settings.limits.memory, settings.timeout),
            (1 << 30, Duration::from_secs(5))
        );
    }

    #[test]
    fn every_key_of_the_file_is_taken_or_told() {
        let text = "docker:\n  image: x\n  working_dir: /app\n  memory_limit: 512m\n  cpu_limit: \
                    1.5\n  timeout: 60\n  \
                    network_disabled: false\n  read_only: false\n  pool_enabled: true\n  \
                    pool_size: 4\n  pool_max_age: 1\n  \
                    max_concurrent_creations: 2\npackage:\n  installer: pip\n  index_url: \
                    https://user:hush@index.test/simple\n  \
                    trusted_hosts: [index.test]\nallowed_modules: [math]\nblocked_modules: \
                    []\nfuture: 1\n";
        let settings = python_docker().file(FILE, text).settings();
        assert_eq!(
            (
                settings.limits.memory >> 20,
                settings.limits.cpus,
                settings.timeout.as_secs()
            ),
            (512, 1.5, 60)
        );
        assert!(
            settings
                .network
                .rules
                .iter()
                .any(|rule| rule.is_everything())
        );
        assert_eq!(settings.pool, 4);
        assert_eq!(
            settings.package_index.url.as_deref(),
            Some("https://user:hush@index.test/simple")
        );
        assert_eq!(settings.package_index.trusted_hosts, ["index.test"]);
        let allowed = [
            "math",
            "matplotlib",
            "numpy",
            "pandas",
            "scipy",
            "sklearn",
            "sympy",
        ];
        assert_eq!(
            settings.allowed_modules, allowed,
            "what it brings along can be imported under any list"
        );
        assert!(settings.blocked_modules.is_empty());
        for words in [
            "line 2: docker.image",
            "working_dir",
            "read_only",
            "uv",
            "future",
        ] {
            assert!(told(&settings, words), "{words}: {:?}", settings.notices);
        }
        assert!(
            !format!("{settings:?}").contains("hush"),
            "an index may hold a password"
        );
    }

    /// The example in that server's documentation: its keys with its values.
    #[test]
    fn the_example_file_of_the_document_is_taken_as_it_is() {
        let text = "docker:\n  image: python:3.12.2-slim\n  working_dir: /app\n  \
                    memory_limit: 256m\n  cpu_limit: 0.5\n  timeout: 30\n  \
                    network_disabled: true\n  read_only: true\n\npackage:\n  installer: uv\n  \
                    index_url: null\n  trusted_hosts: []\n\nallowed_modules:\n  - math\n  - \
                    datetime\n  - random\n  - json\n  - re\n  - collections\n\n\
                    blocked_modules:\n  - os\n  - sys\n  - subprocess\n  - shutil\n  - pathlib\n";
        let (written, usual) = (
            python_docker().file(FILE, text).settings(),
            python_docker().settings(),
        );
        assert_eq!(
            (&written.limits, written.timeout, written.pool),
            (&usual.limits, usual.timeout, usual.pool)
        );
        assert!(written.network.rules.is_empty());
        assert_eq!(written.package_index.url, usual.package_index.url);
        assert!(written.package_index.trusted_hosts.is_empty());
        let listed = ["math", "datetime", "random", "json", "re", "collections"];
        assert_eq!(
            written.allowed_modules,
            [&listed[..], &BUNDLED_MODULES].concat()
        );
        assert_eq!(
            written.blocked_modules,
            ["os", "sys", "subprocess", "shutil", "pathlib"]
        );
        assert!(told(&written, "docker.image") && told(&written, "docker.working_dir"));
        assert_eq!(written.notices.len(), 2, "{:?}", written.notices);
        // Control: another value is another setting.
        let other = text
            .replace("256m", "300m")
            .replace("null", "https://i.test");
        let other = python_docker().file(FILE, &other).settings();
        assert_eq!(other.limits.memory >> 20, 300);
        assert_eq!(other.package_index.url.as_deref(), Some("https://i.test"));
    }

    #[test]
    fn without_a_file_the_documented_values_hold() {
        let settings = python_docker().settings();
        assert!(settings.network.rules.is_empty(), "closed, as documented");
        assert_eq!(settings.pool, 2, "and not the documented 32");
        for module in ["math", "numpy", "sklearn"] {
            assert!(
                settings
                    .allowed_modules
                    .iter()
                    .any(|listed| listed == module),
                "{module}"
            );
        }
        assert!(
            settings
                .blocked_modules
                .iter()
                .any(|blocked| blocked == "os")
        );
        assert!(settings.notices.is_empty(), "{:?}", settings.notices);
    }

    #[test]
    fn a_named_file_is_read_instead_and_variables_win_over_files() {
        let named = || {
            python_docker()
                .file(FILE, "docker: {memory_limit: 100m}")
                .file(
                    "/here/mine.yaml",
                    "docker: {memory_limit: 200m, pool_enabled: no, pool_size: 9}",
                )
                .variable("PYTHON_DOCKER_MCP_CONFIG", "mine.yaml")
        };
        let settings = named().settings();
        assert_eq!((settings.limits.memory >> 20, settings.pool), (200, 0));
        let settings = named()
            .variable("PYTHON_DOCKER_MCP_MEMORY_LIMIT", "300m")
            .variable("PYTHON_DOCKER_MCP_CPU_LIMIT", "0.25")
            .variable("PYTHON_DOCKER_MCP_POOL_SIZE", "3")
            .variable("PYTHON_DOCKER_MCP_POOL_MAX_AGE", "1")
            .variable("PYTHON_DOCKER_MCP_MAX_CONCURRENT_CREATIONS", "1")
            .variable("PYTHON_DOCKER_MCP_DEBUG", "1")
            .settings();
        assert_eq!(
            (
                settings.limits.memory >> 20,
                settings.limits.cpus,
                settings.pool
            ),
            (300, 0.25, 0)
        );
        let on = named().variable("PYTHON_DOCKER_MCP_POOL_ENABLED", "1");
        assert_eq!(
            on.settings().pool,
            9,
            "a variable wins over the file, and the file has the size"
        );
        let on = named()
            .variable("PYTHON_DOCKER_MCP_POOL_ENABLED", "1")
            .variable("PYTHON_DOCKER_MCP_POOL_SIZE", "3");
        assert_eq!(on.settings().pool, 3);
        assert_eq!(settings.log_filter.as_deref(), Some("debug"));
        let off = python_docker()
            .variable("PYTHON_DOCKER_MCP_POOL_SIZE", "3")
            .variable("PYTHON_DOCKER_MCP_POOL_ENABLED", "0");
        assert_eq!(off.settings().pool, 0);
    }

    #[test]
    fn variables_that_make_no_sense_are_refused_with_what_was_meant() {
        let refusal = |name: &str, value: &str| {
            let case = python_docker()
                .file(FILE, "docker: {memory_limit: 100m}")
                .variable(name, value);
            let refusal = case.refusal();
            assert!(refusal.contains(name), "{refusal}");
            refusal
        };
        assert!(refusal("PYTHON_DOCKER_MCP_POOL_ENABLED", "maybe").contains("true"));
        assert!(refusal("PYTHON_DOCKER_MCP_DEBUG", "perhaps").contains("true"));
        assert!(
            refusal("PYTHON_DOCKER_MCP_POOL_SIZ", "3").contains("\"PYTHON_DOCKER_MCP_POOL_SIZE\"")
        );
        assert!(refusal("PYTHON_DOCKER_MCP_MEMORY", "1g").contains("no setting"));
        assert!(refusal("PYTHON_DOCKER_MCP_CONFIG", "/nope.yaml").contains("/nope.yaml"));
        assert!(refusal("PYTHON_DOCKER_MCP_POOL_SIZE", "x").contains("number"));
        // Controls: valid values, and another profile, which never reads them.
        python_docker()
            .variable("PYTHON_DOCKER_MCP_POOL_ENABLED", "yes")
            .settings();
        python_docker()
            .file("/nope.yaml", "")
            .variable("PYTHON_DOCKER_MCP_CONFIG", "/nope.yaml")
            .settings();
        case()
            .variable("PYTHON_DOCKER_MCP_POOL_SIZ", "3")
            .settings();
        let other = python_docker()
            .variable("PYTHON_DOCKER_MCP_SERVICE_HOST", "10.0.0.1")
            .settings();
        assert!(
            told(&other, "PYTHON_DOCKER_MCP_SERVICE_HOST"),
            "nothing is like it, so it is only told"
        );
    }

    #[test]
    fn an_empty_list_of_modules_stays_empty() {
        assert!(
            python_docker()
                .file(FILE, "allowed_modules: []")
                .settings()
                .allowed_modules
                .is_empty()
        );
    }

    #[test]
    fn an_image_means_containers() {
        let image = |case: Case| match case.settings().backend {
            BackendChoice::Containers(containers) => Some((
                containers.image,
                containers.pool_max_age.as_secs(),
                containers.pool_creations,
            )),
            BackendChoice::Native => None,
        };
        let ipybox = || {
            case()
                .flag(Key::Profile, "ipybox")
                .flag(Key::ContainerTag, "mine:1")
        };
        assert_eq!(image(ipybox()).unwrap().0, "mine:1");
        assert_eq!(image(case().flag(Key::Profile, "ipybox")), None); // control
        assert!(
            ipybox()
                .flag(Key::Backend, "native")
                .refusal()
                .contains("--backend docker")
        );
        let file = "docker: {image: 'python-docker-mcp:latest', pool_max_age: 60, \
                    max_concurrent_creations: 7}";
        let docker = python_docker()
            .file(FILE, file)
            .flag(Key::Backend, "docker");
        assert_eq!(
            image(docker),
            Some(("python-docker-mcp:latest".to_owned(), 60, 7))
        );
        let by_variables = python_docker()
            .file(FILE, file)
            .variable("PYTHON_DOCKER_MCP_POOL_MAX_AGE", "90")
            .variable("PYTHON_DOCKER_MCP_MAX_CONCURRENT_CREATIONS", "2")
            .flag(Key::Backend, "docker");
        assert_eq!(
            image(by_variables),
            Some(("python-docker-mcp:latest".to_owned(), 90, 2))
        );
        let usual = image(python_docker().flag(Key::Backend, "docker")).unwrap();
        assert_eq!((usual.1, usual.2), (300, 5));
        assert_eq!(
            image(python_docker().file(FILE, file)),
            None,
            "that server's usual file names an image"
        );
    }

    #[test]
    fn a_broken_file_is_refused_and_other_profiles_never_look() {
        for (text, words) in [
            ("docker: [1", "config.yaml line"),
            ("docker: 5", "docker"),
            ("docker: {network_disabled: maybe}", "true or false"),
            ("docker: {memory_limit: lots}", "memory"),
            ("package: {index_url: index.test}", "https://"),
            ("allowed_modules: [\"os; rm\"]", "allowed_modules"),
        ] {
            let refusal = python_docker().file(FILE, text).refusal();
            assert!(refusal.contains(words), "{text}: {refusal}");
            assert!(
                case().file(FILE, text).result().is_ok(),
                "the control: {text}"
            );
        }
    }

    #[test]
    fn a_sandbox_file_says_what_may_be_reached() {
        let ipybox = |text: &str| {
            let case = case()
                .flag(Key::Profile, "ipybox")
                .flag(Key::SandboxConfig, "sandbox.json");
            if text.is_empty() {
                case
            } else {
                case.file("/here/sandbox.json", text)
            }
        };
        let text = r#"{"network": {"allowedDomains": ["example.com", "*.test"], "deniedDomains": ["a.test"], "allowLocalBinding": true},
                       "filesystem": {"denyRead": [".env"], "allowWrite": ["."]}, "allowPty": true}"#;
        let settings = ipybox(text).settings();
        let rules: Vec<String> = settings
            .network
            .rules
            .iter()
            .map(ToString::to_string)
            .collect();
        for rule in ["example.com:*", "**.test:*", "!a.test"] {
            assert!(
                rules.iter().any(|written| written == rule),
                "{rule}: {rules:?}"
            );
        }
        for words in ["allowLocalBinding", "allowWrite", "allowPty"] {
            assert!(told(&settings, words), "{words}: {:?}", settings.notices);
        }
        assert!(
            !told(&settings, "denyRead") && settings.masks.is_empty(),
            "without a workspace nothing can be read"
        );
        let missing = ipybox("").settings();
        assert!(missing.network.rules.is_empty() && told(&missing, "does not exist"));
        for broken in [
            "[",
            "[]",
            r#"{"network": {"allowedDomains": "example.com"}}"#,
        ] {
            assert!(ipybox(broken).result().is_err(), "{broken}");
        }
    }

    #[test]
    fn a_sandbox_file_says_what_must_not_be_read_or_changed() {
        let protected = |lists: &str| {
            let text = format!(r#"{{"filesystem": {{{lists}}}}}"#);
            let case = case()
                .flag(Key::Profile, "ipybox")
                .flag(Key::SandboxConfig, "sandbox.json");
            case.flag(Key::Workspace, "space")
                .file("/here/sandbox.json", &text)
        };
        let lists =
            r#""denyRead": [".env", "./secrets/**", "~/.ssh", "/etc/x"], "denyWrite": ["data"]"#;
        let masks = protected(lists).settings().masks;
        let written: Vec<(MaskRule, &Path)> = masks
            .iter()
            .map(|mask| (mask.rule, mask.host.as_path()))
            .collect();
        let expected = [
            (MaskRule::Hidden, "/here/space/.env"),
            (MaskRule::Hidden, "/here/space/secrets"),
            (MaskRule::Hidden, "/home/me/.ssh"),
            (MaskRule::Hidden, "/etc/x"),
            (MaskRule::ReadOnly, "/here/space/data"),
        ];
        assert_eq!(
            written,
            expected.map(|(rule, path)| (rule, Path::new(path)))
        );
        for (lists, words) in [
            (r#""denyRead": ["**/*.pem"]"#, "is a pattern"),
            (r#""denyWrite": ["a?"]"#, "is a pattern"),
            (r#""denyRead": [""]"#, "is not a path"),
            (r#""denyRead": ".env""#, "must be a list of texts"),
            (r#""denyWrite": [1]"#, "must be a list of texts"),
        ] {
            // The text is in the cause.
            let refusal = format!("{:?}", protected(lists).result().map(drop).unwrap_err());
            assert!(refusal.contains(words), "{lists}: {refusal}");
        }
    }

    #[test]
    fn variables_of_the_workspace_fill_parameters_of_servers_and_the_environment_wins() {
        let settings = case()
            .flag(Key::Workspace, "space")
            .file(
                "/here/space/.env",
                "KEY=from_file\nBOTH=from_file\nKERNEL_ENV_SEEN=1\n",
            )
            .variable("BOTH", "from_environment")
            .settings();
        let known = &settings.upstreams.variables;
        assert_eq!(
            (known["KEY"].as_str(), known["BOTH"].as_str()),
            ("from_file", "from_environment")
        );
        let inside: Vec<(&str, &str)> = settings.variables.iter().collect();
        assert_eq!(
            inside,
            [("SEEN", "1")],
            "nothing but what was meant for code goes inside"
        );
    }

    #[test]
    fn pictures_are_kept_below_the_working_folder() {
        let folder = |value: &str| {
            case()
                .flag(Key::Workspace, "/space")
                .flag(Key::ImagesDir, value)
        };
        assert_eq!(case().settings().images_dir, Path::new("images"));
        assert_eq!(
            folder("plots/new").settings().images_dir,
            Path::new("plots/new")
        );
        assert_eq!(
            folder("/space/plots").settings().images_dir,
            Path::new("plots")
        );
        for outside in ["/elsewhere", "../up", "/space", &"x/".repeat(600)] {
            assert!(
                folder(outside).refusal().contains("images_dir"),
                "{outside}"
            );
        }
    }

    #[test]
    fn levels_of_the_log_may_have_pythons_names() {
        for (given, level) in [("CRITICAL", "error"), ("WARNING", "warn"), ("INFO", "info")] {
            assert_eq!(
                case()
                    .flag(Key::LogLevel, given)
                    .settings()
                    .log_filter
                    .as_deref(),
                Some(level)
            );
        }
    }
}
