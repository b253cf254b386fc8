//! What a profile brings along: the usual settings of the server that it stands in for, and that server's own files and variables.
//!
//! ```text
//! usual settings of the profile  <  its own file  <  its own variables  <  file  <  CELLBLOCK_… variables  <  flags
//! ```
//!
//! Everything becomes a layer of ordinary settings, the weakest, so that `checks` sees nothing new. What has no meaning here becomes a
//! notice: it was written by somebody who expects something of it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::checks::{NamedFile, ReadFile};
use super::folders;
use super::layers::{self, Key, Layer, Member, Origin, Written};
use super::{ConfigError, Profile};

/// Modules that python-docker-mcp lists, and the packages that it brings along, which its list forgot.
const LISTED_MODULES: [&str; 28] = [
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
    "matplotlib",
    "numpy",
    "pandas",
    "scipy",
    "sklearn",
    "sympy",
];

/// Modules that python-docker-mcp refuses.
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

/// Modules that Containerized Code Executer refuses.
const DANGEROUS_MODULES: [&str; 9] =
    ["base64", "multiprocessing", "os", "requests", "shutil", "socket", "subprocess", "sys", "threading"];

/// Where settings of a profile come from.
pub(super) struct Surroundings<'a> {
    pub variables: &'a BTreeMap<String, String>,
    pub current_dir: &'a Path,
    pub read: ReadFile<'a>,
}

impl Surroundings<'_> {
    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.trim().is_empty())
    }

    fn absolute(&self, path: &str) -> PathBuf {
        folders::absolute(path, self.current_dir, self.variables.get("HOME").map(String::as_str))
    }

    fn text(&self, path: &Path) -> Result<Option<String>, ConfigError> {
        (self.read)(NamedFile::ByOperator(path))
            .map_err(|cause| ConfigError::Unreadable { path: path.to_owned(), cause })
    }
}

/// Returns what a profile says about settings, weakest first. `notices` gets what was written in vain.
pub(super) fn layer(
    profile: Profile,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<Layer, ConfigError> {
    let mut layer = usual(profile);
    if profile == Profile::PythonDocker {
        own_file(surroundings, &mut layer, notices)?;
        own_variables(surroundings, &mut layer, notices)?;
    }
    Ok(layer)
}

/// The settings that each server has when nobody says otherwise. None of these profiles has a tool that takes cells back.
fn usual(profile: Profile) -> Layer {
    let text = |key: Key, value: &str| (key, Origin::Flag("--profile"), Written::Text(value.to_owned()));
    let list = |key: Key, values: &[&str]| {
        let values = values.iter().map(|value| Written::Text((*value).to_owned())).collect();
        (key, Origin::Flag("--profile"), Written::List(values))
    };
    Layer::of(match profile {
        Profile::Default => Vec::new(),
        Profile::Ipybox => vec![text(Key::Undo, "off")],
        Profile::PythonDocker => vec![
            text(Key::Undo, "off"),
            text(Key::Memory, "256M"),
            text(Key::Cpus, "0.5"),
            text(Key::Timeout, "30s"),
            text(Key::IdleTimeout, "24h"),
            list(Key::AllowedModules, &LISTED_MODULES),
            list(Key::BlockedModules, &BLOCKED_MODULES),
        ],
        Profile::CodeExecuter => {
            vec![text(Key::Undo, "off"), text(Key::IdleTimeout, "24h"), list(Key::BlockedModules, &DANGEROUS_MODULES)]
        }
        Profile::Pyexec => {
            vec![text(Key::Undo, "off"), text(Key::Memory, "512M"), text(Key::Cpus, "0.5"), text(Key::Timeout, "30s")]
        }
    })
}

/// Reads the configuration file of python-docker-mcp.
fn own_file(surroundings: &Surroundings<'_>, layer: &mut Layer, notices: &mut Vec<String>) -> Result<(), ConfigError> {
    let named = surroundings.variable("PYTHON_DOCKER_MCP_CONFIG").map(|path| surroundings.absolute(path));
    let usual = surroundings.absolute("~/.python-docker-mcp/config.yaml");
    // A file that is named and missing is passed over, as that server does.
    for path in named.into_iter().chain([usual]) {
        if let Some(text) = surroundings.text(&path)? {
            return PythonDockerFile { path: &path, layer, notices, pool_off: false }.read(&text);
        }
    }
    Ok(())
}

struct PythonDockerFile<'a> {
    path: &'a Path,
    layer: &'a mut Layer,
    notices: &'a mut Vec<String>,
    /// The pool was switched off, whatever its size.
    pool_off: bool,
}

impl PythonDockerFile<'_> {
    fn read(mut self, text: &str) -> Result<(), ConfigError> {
        for member in layers::members_of(self.path, text)? {
            let origin = Origin::File { path: self.path.to_owned(), line: member.line };
            match member.name.as_str() {
                "docker" | "package" => {
                    for inner in self.table(&member, &origin)? {
                        let origin = origin.at(inner.line);
                        self.setting(&format!("{}.{}", member.name, inner.name), origin, inner.value)?;
                    }
                }
                _ => self.setting(&member.name.clone(), origin, member.value)?,
            }
        }
        Ok(())
    }

    fn table(&self, member: &Member, origin: &Origin) -> Result<Vec<Member>, ConfigError> {
        match &member.value {
            Written::Table(members) => Ok(members.clone()),
            Written::Nothing => Ok(Vec::new()),
            _ => Err(layers::wrong_shape(&member.name, origin, "a table of \"key: value\" lines")),
        }
    }

    fn setting(&mut self, name: &str, origin: Origin, value: Written) -> Result<(), ConfigError> {
        let is = |word: bool| matches!(&value, Written::Text(text) if truth(text) == Some(word));
        let key = match name {
            "docker.memory_limit" => Key::Memory,
            "docker.cpu_limit" => Key::Cpus,
            "docker.timeout" => Key::Timeout,
            "docker.pool_size" if self.pool_off => return Ok(()),
            "docker.pool_size" => Key::Pool,
            "package.index_url" => Key::PackageIndex,
            "package.trusted_hosts" => Key::PackageTrustedHosts,
            "allowed_modules" => Key::AllowedModules,
            "blocked_modules" => Key::BlockedModules,
            "docker.pool_enabled" if is(false) => {
                self.pool_off = true;
                self.layer.push(Key::Pool, origin, Written::Text("0".to_owned()));
                return Ok(());
            }
            "docker.network_disabled" if is(false) => {
                self.layer.push(Key::AllowNetwork, origin, Written::Text("all".to_owned()));
                return Ok(());
            }
            "docker.pool_enabled" | "docker.network_disabled" if is(true) => return Ok(()),
            "docker.pool_enabled" | "docker.network_disabled" => {
                return Err(layers::wrong_shape(name, &origin, "true or false"));
            }
            "docker.read_only" if is(true) => return Ok(()),
            "package.installer" if matches!(&value, Written::Text(text) if text == "uv") => return Ok(()),
            _ => {
                self.notices.push(format!("{origin}: {name} has no effect here{}", why(name)));
                return Ok(());
            }
        };
        self.layer.push(key, origin, value);
        Ok(())
    }
}

/// Says why a setting of python-docker-mcp has no effect.
fn why(name: &str) -> &'static str {
    match name {
        "docker.image" => ": code runs in the environment that --environment names",
        "docker.working_dir" => ": code works in a folder of its own, which is its current folder",
        "docker.read_only" => ": the system that code sees is always read-only, its working folder never",
        "docker.pool_max_age" | "docker.max_concurrent_creations" => {
            ": ready sandboxes are made as they are needed and do not grow old"
        }
        "package.installer" => ": packages are installed by uv",
        _ => ", because it is not known",
    }
}

fn own_variables(
    surroundings: &Surroundings<'_>,
    layer: &mut Layer,
    notices: &mut Vec<String>,
) -> Result<(), ConfigError> {
    const SETTINGS: [(&str, Key); 3] = [
        ("PYTHON_DOCKER_MCP_MEMORY_LIMIT", Key::Memory),
        ("PYTHON_DOCKER_MCP_CPU_LIMIT", Key::Cpus),
        ("PYTHON_DOCKER_MCP_POOL_SIZE", Key::Pool),
    ];
    for (name, key) in SETTINGS {
        if let Some(value) = surroundings.variable(name) {
            layer.push(key, Origin::Variable(name.to_owned()), Written::Text(value.to_owned()));
        }
    }
    if let Some(value) = surroundings.variable("PYTHON_DOCKER_MCP_POOL_ENABLED")
        && truth(value) != Some(true)
    {
        let origin = Origin::Variable("PYTHON_DOCKER_MCP_POOL_ENABLED".to_owned());
        layer.push(Key::Pool, origin, Written::Text("0".to_owned()));
    }
    if surroundings.variable("PYTHON_DOCKER_MCP_DEBUG").is_some_and(|value| truth(value) == Some(true)) {
        let origin = Origin::Variable("PYTHON_DOCKER_MCP_DEBUG".to_owned());
        layer.push(Key::LogLevel, origin, Written::Text("debug".to_owned()));
    }
    for (name, setting) in [
        ("PYTHON_DOCKER_MCP_POOL_MAX_AGE", "docker.pool_max_age"),
        ("PYTHON_DOCKER_MCP_MAX_CONCURRENT_CREATIONS", "docker.max_concurrent_creations"),
    ] {
        if surroundings.variable(name).is_some() {
            notices.push(format!("{name} has no effect here{}", why(setting)));
        }
    }
    Ok(())
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Some(true),
        "0" | "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

/// Reads the file that ipybox hands to its sandbox: what code may reach. Returns it as settings.
pub(super) fn sandbox_config(
    path: &Path,
    surroundings: &Surroundings<'_>,
    notices: &mut Vec<String>,
) -> Result<Layer, ConfigError> {
    let mut layer = Layer::of(Vec::new());
    let Some(text) = surroundings.text(path)? else {
        notices.push(format!("the sandbox configuration {} does not exist; code has no network", path.display()));
        return Ok(layer);
    };
    let unreadable = |why: String| ConfigError::Unreadable { path: path.to_owned(), cause: io::Error::other(why) };
    let Value::Object(sections) = serde_json::from_str(&text).map_err(|error| unreadable(error.to_string()))? else {
        return Err(unreadable("it must hold an object".to_owned()));
    };
    for (section, value) in &sections {
        let (Value::Object(members), "network" | "filesystem") = (value, section.as_str()) else {
            notices.push(format!("{}: {section} has no effect here", path.display()));
            continue;
        };
        for (name, value) in members {
            let key = match name.as_str() {
                "allowedDomains" => Key::AllowedDomains,
                "deniedDomains" => Key::DeniedDomains,
                _ => {
                    notices.push(format!(
                        "{}: {section}.{name} has no effect here{}",
                        path.display(),
                        why_not(section)
                    ));
                    continue;
                }
            };
            let rules: Option<Vec<Written>> = value.as_array().and_then(|rules| {
                rules.iter().map(|rule| rule.as_str().map(|rule| Written::Text(rule.to_owned()))).collect()
            });
            let rules = rules.ok_or_else(|| unreadable(format!("{section}.{name} must be a list of texts")))?;
            layer.push(key, Origin::File { path: path.to_owned(), line: None }, Written::List(rules));
        }
    }
    Ok(layer)
}

fn why_not(section: &str) -> &'static str {
    match section {
        "filesystem" => ": code sees its working folder and what --mount shows, and nothing else of this machine",
        _ => ": code has a network of its own",
    }
}
