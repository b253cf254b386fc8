//! Where settings are written, and which writing wins.
//!
//! A file, the environment and the flags are each turned into the same form: keys with what was written for them and where. Then
//! they are laid over each other. Nothing here knows what a value means; `checks` does.
//!
//! `Key::TABLE` is the one list of all settings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::{ConfigError, InvalidValue};

/// A setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, serde::Deserialize)]
pub enum Key {
    Workspace,
    AllowedDirs,
    Environment,
    Environments,
    Mounts,
    Variables,
    EnvFiles,
    Memory,
    Cpus,
    Processes,
    Disk,
    Files,
    Timeout,
    MaxTimeout,
    MaxSessions,
    IdleTimeout,
    Pool,
    PoolMaxAge,
    PoolCreations,
    Backend,
    Runtime,
    ContainerTag,
    Undo,
    UndoCheckpoints,
    UndoFiles,
    ExploreParallel,
    MaxRunning,
    QuotaSessions,
    QuotaMemory,
    QuotaCpu,
    QuotaCpuWindow,
    QuotaCells,
    QuotaStarts,
    QuotaStored,
    FamilyMemory,
    AllowNetwork,
    AllowedDomains,
    DeniedDomains,
    Secrets,
    NetworkConnections,
    NetworkBandwidth,
    NetworkQuestions,
    InstallPackages,
    PackageSize,
    PackageDisk,
    PackageMemory,
    PackageStoreSize,
    PackageTimeout,
    Approvals,
    ApproveTools,
    ApproveShell,
    ApprovePackages,
    ApproveDomains,
    ApprovalTimeout,
    RememberApprovals,
    PackageIndex,
    PackageTrustedHosts,
    Listen,
    PublicUrl,
    AllowedHosts,
    AllowedOrigins,
    TlsCert,
    TlsKey,
    MaxConnections,
    MaxWait,
    KeepSessions,
    Keeper,
    Profile,
    AllowedModules,
    BlockedModules,
    ImagesDir,
    SandboxConfig,
    AllowMissing,
    Auth,
    DataDir,
    LogLevel,
    LogFormat,
    OtlpEndpoint,
    AuditFile,
    AuditSync,
    AuditFailure,
    AuditFileSize,
    AuditRecords,
    McpServers,
    McpServersFile,
    McpAllowedHosts,
}

/// How a setting is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    Single,
    /// Several texts; separated by commas in an environment variable.
    List,
    /// The same, but a text may hold commas itself. A variable is kept whole, and whoever knows what the texts mean takes it apart.
    Phrases,
    /// Names and values. A stronger source adds to a weaker one instead of replacing it.
    Pairs,
    /// Nested, so only the file can hold it.
    FileOnly,
}

impl Key {
    /// Every setting: its name in the file, its flag, its shape. `CELLBLOCK_` and the name in capitals is its variable.
    const TABLE: &'static [(Key, &'static str, &'static str, Shape)] = &[
        (Key::Workspace, "workspace", "--workspace", Shape::Single),
        (
            Key::AllowedDirs,
            "allowed_dirs",
            "--allowed-dir",
            Shape::List,
        ),
        (
            Key::Environment,
            "environment",
            "--environment",
            Shape::Single,
        ),
        (Key::Environments, "environments", "", Shape::FileOnly),
        (Key::Mounts, "mounts", "--mount", Shape::List),
        (Key::Variables, "variables", "--env-var", Shape::Pairs),
        (Key::EnvFiles, "env_files", "--env-file", Shape::List),
        (Key::Memory, "memory", "--memory", Shape::Single),
        (Key::Cpus, "cpus", "--cpus", Shape::Single),
        (Key::Processes, "processes", "", Shape::Single),
        (Key::Disk, "disk", "", Shape::Single),
        (Key::Files, "files", "", Shape::Single),
        (Key::Timeout, "timeout", "--timeout", Shape::Single),
        (Key::MaxTimeout, "max_timeout", "", Shape::Single),
        (
            Key::MaxSessions,
            "max_sessions",
            "--max-sessions",
            Shape::Single,
        ),
        (
            Key::IdleTimeout,
            "idle_timeout",
            "--idle-timeout",
            Shape::Single,
        ),
        (Key::Pool, "pool", "", Shape::Single),
        (Key::PoolMaxAge, "pool_max_age", "", Shape::Single),
        (Key::PoolCreations, "pool_creations", "", Shape::Single),
        (Key::Backend, "backend", "--backend", Shape::Single),
        (Key::Runtime, "runtime", "--runtime", Shape::Single),
        (
            Key::ContainerTag,
            "container_tag",
            "--container-tag",
            Shape::Single,
        ),
        (Key::Undo, "undo", "--undo", Shape::Single),
        (
            Key::UndoCheckpoints,
            "undo_checkpoints",
            "--undo-checkpoints",
            Shape::Single,
        ),
        (Key::UndoFiles, "undo_files", "--undo-files", Shape::Single),
        (
            Key::ExploreParallel,
            "explore_parallel",
            "--explore-parallel",
            Shape::Single,
        ),
        (Key::MaxRunning, "max_running", "", Shape::Single),
        (Key::QuotaSessions, "quota_sessions", "", Shape::Single),
        (Key::QuotaMemory, "quota_memory", "", Shape::Single),
        (Key::QuotaCpu, "quota_cpu", "", Shape::Single),
        (Key::QuotaCpuWindow, "quota_cpu_window", "", Shape::Single),
        (Key::QuotaCells, "quota_cells", "", Shape::Single),
        (Key::QuotaStarts, "quota_starts", "", Shape::Single),
        (Key::QuotaStored, "quota_stored", "", Shape::Single),
        (
            Key::FamilyMemory,
            "family_memory",
            "--family-memory",
            Shape::Single,
        ),
        (
            Key::AllowNetwork,
            "allow_network",
            "--allow-network",
            Shape::Single,
        ),
        (
            Key::AllowedDomains,
            "allowed_domains",
            "--allowed-domain",
            Shape::Phrases,
        ),
        (
            Key::DeniedDomains,
            "denied_domains",
            "--denied-domain",
            Shape::Phrases,
        ),
        (Key::Secrets, "secrets", "--secret", Shape::Phrases),
        (
            Key::NetworkConnections,
            "network_connections",
            "",
            Shape::Single,
        ),
        (
            Key::NetworkBandwidth,
            "network_bandwidth",
            "",
            Shape::Single,
        ),
        (
            Key::NetworkQuestions,
            "network_questions",
            "",
            Shape::Single,
        ),
        (
            Key::InstallPackages,
            "install_packages",
            "--install-packages",
            Shape::Single,
        ),
        (Key::PackageSize, "package_size", "", Shape::Single),
        (Key::PackageDisk, "package_disk", "", Shape::Single),
        (Key::PackageMemory, "package_memory", "", Shape::Single),
        (
            Key::PackageStoreSize,
            "package_store_size",
            "",
            Shape::Single,
        ),
        (Key::PackageTimeout, "package_timeout", "", Shape::Single),
        (Key::Approvals, "approvals", "", Shape::FileOnly),
        (
            Key::ApproveTools,
            "approve_tools",
            "--approve-tools",
            Shape::Single,
        ),
        (
            Key::ApproveShell,
            "approve_shell",
            "--approve-shell",
            Shape::Single,
        ),
        (
            Key::ApprovePackages,
            "approve_packages",
            "--approve-packages",
            Shape::Single,
        ),
        (
            Key::ApproveDomains,
            "approve_domains",
            "--approve-domains",
            Shape::Single,
        ),
        (Key::ApprovalTimeout, "approval_timeout", "", Shape::Single),
        (
            Key::RememberApprovals,
            "remember_approvals",
            "--remember-approvals",
            Shape::Single,
        ),
        (Key::PackageIndex, "package_index", "", Shape::Single),
        (
            Key::PackageTrustedHosts,
            "package_trusted_hosts",
            "",
            Shape::List,
        ),
        (Key::Listen, "listen", "--listen", Shape::Single),
        (Key::PublicUrl, "public_url", "--public-url", Shape::Single),
        (
            Key::AllowedHosts,
            "allowed_hosts",
            "--allowed-host",
            Shape::List,
        ),
        (
            Key::AllowedOrigins,
            "allowed_origins",
            "--allowed-origin",
            Shape::List,
        ),
        (Key::TlsCert, "tls_cert", "--tls-cert", Shape::Single),
        (Key::TlsKey, "tls_key", "--tls-key", Shape::Single),
        (
            Key::MaxConnections,
            "max_connections",
            "--max-connections",
            Shape::Single,
        ),
        (Key::MaxWait, "max_wait", "--max-wait", Shape::Single),
        (
            Key::KeepSessions,
            "keep_sessions",
            "--keep-sessions",
            Shape::Single,
        ),
        (Key::Keeper, "keeper", "--keeper", Shape::Single),
        (Key::Profile, "profile", "--profile", Shape::Single),
        (Key::AllowedModules, "allowed_modules", "", Shape::List),
        (Key::BlockedModules, "blocked_modules", "", Shape::List),
        (Key::ImagesDir, "images_dir", "--images-dir", Shape::Single),
        (
            Key::SandboxConfig,
            "sandbox_config",
            "--sandbox-config",
            Shape::Single,
        ),
        (
            Key::AllowMissing,
            "allow_missing",
            "--allow-missing",
            Shape::List,
        ),
        (Key::Auth, "auth", "--auth", Shape::Single),
        (Key::DataDir, "data_dir", "", Shape::Single),
        (Key::LogLevel, "log_level", "--log-level", Shape::Single),
        (Key::LogFormat, "log_format", "--log-format", Shape::Single),
        (
            Key::OtlpEndpoint,
            "otlp_endpoint",
            "--otlp-endpoint",
            Shape::Single,
        ),
        (Key::AuditFile, "audit_file", "--audit-file", Shape::Single),
        (Key::AuditSync, "audit_sync", "", Shape::Single),
        (Key::AuditFailure, "audit_failure", "", Shape::Single),
        (Key::AuditFileSize, "audit_file_size", "", Shape::Single),
        (Key::AuditRecords, "audit_records", "", Shape::Single),
        (Key::McpServers, "mcp_servers", "", Shape::FileOnly),
        (
            Key::McpServersFile,
            "mcp_servers_file",
            "--mcp-servers-file",
            Shape::Single,
        ),
        (Key::McpAllowedHosts, "mcp_allowed_hosts", "", Shape::List),
    ];

    /// The name used in the configuration file and in messages.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The name of the environment variable that holds it.
    pub fn variable(self) -> String {
        format!("{PREFIX}{}", self.name().to_ascii_uppercase())
    }

    pub(crate) fn flag(self) -> &'static str {
        self.row().2
    }

    fn shape(self) -> Shape {
        self.row().3
    }

    fn row(self) -> &'static (Key, &'static str, &'static str, Shape) {
        Key::TABLE
            .iter()
            .find(|row| row.0 == self)
            .expect("the table has a row for every key")
    }

    fn from_name(name: &str) -> Option<Key> {
        let name = name.replace('-', "_");
        Key::TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The flags that settings can be written as.
    pub fn flags() -> impl Iterator<Item = &'static str> {
        Key::TABLE
            .iter()
            .map(|row| row.2)
            .filter(|flag| !flag.is_empty())
    }

    /// Other spellings of flags: the names that they have in servers that profiles stand in for.
    pub(crate) const ALIASES: [(Key, &'static str); 3] = [
        (Key::Mounts, "--container-bind"),
        (Key::Variables, "--container-env-var"),
        (Key::EnvFiles, "--container-env-file"),
    ];

    pub(super) fn all() -> impl Iterator<Item = Key> {
        Key::TABLE.iter().map(|row| row.0)
    }

    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        Key::TABLE.iter().map(|row| row.1)
    }
}

const PREFIX: &str = "CELLBLOCK_";

/// Variables with our prefix that are read elsewhere and are no settings.
const OTHER_VARIABLES: [&str; 2] = ["CELLBLOCK_CONFIG", "CELLBLOCK_UV"];

/// What was written for a setting. It has no `Debug`, because it may hold a secret.
#[derive(Clone)]
pub(super) enum Written {
    Nothing,
    Text(String),
    List(Vec<Written>),
    Table(Vec<Member>),
}

/// One entry of a table.
#[derive(Clone)]
pub(super) struct Member {
    pub name: String,
    pub line: Option<u64>,
    pub value: Written,
}

/// Where a setting was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    File { path: PathBuf, line: Option<u64> },
    Variable(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File {
                path,
                line: Some(line),
            } => write!(formatter, "{} line {line}", path.display()),
            Origin::File { path, line: None } => write!(formatter, "{}", path.display()),
            Origin::Variable(name) => formatter.write_str(name),
            Origin::Flag(flag) => formatter.write_str(flag),
        }
    }
}

impl Origin {
    /// The same place, at another line if it is a file.
    pub(super) fn at(&self, line: Option<u64>) -> Origin {
        match self {
            Origin::File { path, line: old } => Origin::File {
                path: path.clone(),
                line: line.or(*old),
            },
            other => other.clone(),
        }
    }
}

/// What one source says about settings.
#[derive(Clone, Default)]
pub(super) struct Layer(Vec<(Key, Origin, Written)>);

impl Layer {
    pub(super) fn of(settings: Vec<(Key, Origin, Written)>) -> Layer {
        Layer(settings)
    }

    /// Adds a setting, which is stronger than those before it.
    pub(super) fn push(&mut self, key: Key, origin: Origin, written: Written) {
        self.0.push((key, origin, written));
    }
}

/// The settings given as flags.
#[derive(Clone, Default)]
pub struct Flags(Layer);

impl Flags {
    /// Adds a flag that was given at most once.
    pub fn single(mut self, key: Key, value: Option<String>) -> Flags {
        if let Some(value) = value {
            self.0
                .0
                .push((key, Origin::Flag(key.flag()), Written::Text(value)));
        }
        self
    }

    /// Adds a flag that can be repeated.
    pub fn repeated(mut self, key: Key, values: Vec<String>) -> Flags {
        if !values.is_empty() {
            let values = values.into_iter().map(Written::Text).collect();
            self.0
                .0
                .push((key, Origin::Flag(key.flag()), Written::List(values)));
        }
        self
    }

    /// Names flags as they were typed. `typed` has every flag of the command line. Where both
    /// spellings of a flag were used, the usual one stands for all its values.
    pub fn as_typed(mut self, typed: &BTreeSet<String>) -> Flags {
        for (key, origin, _) in &mut self.0.0 {
            let alias = Key::ALIASES
                .iter()
                .find(|(known, alias)| known == key && typed.contains(*alias));
            if let Some((_, alias)) = alias
                && !typed.contains(key.flag())
            {
                *origin = Origin::Flag(alias);
            }
        }
        self
    }

    pub(super) fn layer(self) -> Layer {
        self.0
    }

    /// The flags in a form that can be handed to another process.
    pub(super) fn given(&self) -> Vec<(Key, Given)> {
        let text = |written: &Written| match written {
            Written::Text(text) => text.clone(),
            _ => unreachable!("a flag holds a text, or a list of texts"),
        };
        let given = |written: &Written| match written {
            Written::List(values) => Given::Often(values.iter().map(text).collect()),
            single => Given::Once(text(single)),
        };
        self.0
            .0
            .iter()
            .map(|(key, _, written)| (*key, given(written)))
            .collect()
    }
}

impl From<Vec<(Key, Given)>> for Flags {
    fn from(given: Vec<(Key, Given)>) -> Flags {
        given
            .into_iter()
            .fold(Flags::default(), |flags, (key, given)| match given {
                Given::Once(value) => flags.single(key, Some(value)),
                Given::Often(values) => flags.repeated(key, values),
            })
    }
}

/// What was given for a flag. It has no `Debug`, because it may hold a secret.
#[derive(Clone, Serialize, serde::Deserialize)]
pub(super) enum Given {
    Once(String),
    Often(Vec<String>),
}

/// Reads the text of a configuration file.
pub(super) fn from_file(path: &Path, text: &str) -> Result<Layer, ConfigError> {
    let mut layer = Layer::default();
    for member in members_of(path, text)? {
        let origin = Origin::File {
            path: path.to_owned(),
            line: member.line,
        };
        let Some(key) = Key::from_name(&member.name) else {
            return Err(unknown_key(&member.name, origin, Key::names()));
        };
        layer.0.push((key, origin, member.value));
    }
    Ok(layer)
}

/// Reads the text of a YAML file that holds a table.
pub(super) fn members_of(path: &Path, text: &str) -> Result<Vec<Member>, ConfigError> {
    let whole: Written = serde_saphyr::from_str(text).map_err(|error| ConfigError::Yaml {
        path: path.to_owned(),
        line: error
            .location()
            .map(|location| location.line())
            .filter(|line| *line > 0),
        why: with_advice(first_line(&error.to_string())),
    })?;
    match whole {
        Written::Nothing => Ok(Vec::new()),
        Written::Table(members) => Ok(members),
        Written::Text(_) | Written::List(_) => {
            let why = "the file must hold settings as \"key: value\" lines".to_owned();
            Err(ConfigError::Yaml {
                path: path.to_owned(),
                line: Some(1),
                why,
            })
        }
    }
}

/// Reads the settings among environment variables. Returns also the variables with our prefix that are nothing we know.
///
/// Such a variable is refused only when it looks like a mistyped setting. Others can come from elsewhere: Kubernetes sets
/// `CELLBLOCK_SERVICE_HOST` in every pod beside a service called "cellblock".
pub(super) fn from_environment(
    variables: &BTreeMap<String, String>,
) -> Result<(Layer, Vec<String>), ConfigError> {
    let mut layer = Layer::default();
    let mut unknown = Vec::new();
    for (variable, value) in variables
        .iter()
        .filter(|(name, _)| !OTHER_VARIABLES.contains(&name.as_str()))
    {
        let Some(name) = variable.strip_prefix(PREFIX) else {
            continue;
        };
        let origin = Origin::Variable(variable.clone());
        match Key::from_name(&name.to_ascii_lowercase())
            .filter(|key| key.shape() != Shape::FileOnly)
        {
            Some(key) if matches!(key.shape(), Shape::Single | Shape::Phrases) => {
                layer.0.push((key, origin, Written::Text(value.clone())));
            }
            Some(key) => {
                let parts = value
                    .split(',')
                    .map(str::trim)
                    .filter(|part| !part.is_empty());
                layer.0.push((
                    key,
                    origin,
                    Written::List(parts.map(|part| Written::Text(part.to_owned())).collect()),
                ));
            }
            None => match nearest(&name.to_ascii_lowercase(), Key::names()) {
                Some(near) => {
                    let nearest = Some(format!("{PREFIX}{}", near.to_ascii_uppercase()));
                    return Err(ConfigError::UnknownKey {
                        key: variable.clone(),
                        origin,
                        nearest,
                    });
                }
                None => unknown.push(variable.clone()),
            },
        }
    }
    Ok((layer, unknown))
}

/// All sources laid over each other.
pub(super) struct Merged(BTreeMap<Key, Vec<(Origin, Written)>>);

impl Merged {
    /// Lays later layers over earlier ones.
    pub(super) fn from_weakest_to_strongest(layers: impl IntoIterator<Item = Layer>) -> Merged {
        let mut merged: BTreeMap<Key, Vec<(Origin, Written)>> = BTreeMap::new();
        for (key, origin, written) in layers.into_iter().flat_map(|layer| layer.0) {
            let writings = merged.entry(key).or_default();
            if key.shape() != Shape::Pairs {
                writings.clear();
            }
            writings.push((origin, written));
        }
        Merged(merged)
    }

    /// Returns everything written for a key, weakest first. Only pairs can have more than one writing.
    pub(super) fn all(&self, key: Key) -> &[(Origin, Written)] {
        self.0.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Returns the one text written for a key.
    pub(super) fn text(&self, key: Key) -> Result<Option<(&Origin, &str)>, ConfigError> {
        match self.all(key) {
            [] => Ok(None),
            [(_, Written::Nothing), ..] => Ok(None),
            [(origin, Written::Text(text)), ..] => Ok(Some((origin, text))),
            [(origin, _), ..] => Err(wrong_shape(key.name(), origin, "a single value")),
        }
    }

    /// Returns the list of texts written for a key; a single text is a list of one.
    pub(super) fn texts(&self, key: Key) -> Result<Option<(&Origin, Vec<&str>)>, ConfigError> {
        match self.all(key) {
            [] | [(_, Written::Nothing), ..] => Ok(None),
            [(origin, written), ..] => written
                .texts(key.name(), origin)
                .map(|texts| Some((origin, texts))),
        }
    }
}

impl Written {
    /// Returns the texts of a list, or the one text.
    pub(super) fn texts(&self, key: &str, origin: &Origin) -> Result<Vec<&str>, ConfigError> {
        match self {
            Written::Text(text) => Ok(vec![text]),
            Written::Nothing => Ok(Vec::new()),
            Written::Table(_) => Err(wrong_shape(key, origin, "a list")),
            Written::List(items) => items
                .iter()
                .map(|item| match item {
                    Written::Text(text) => Ok(text.as_str()),
                    _ => Err(wrong_shape(key, origin, "a list of single values")),
                })
                .collect(),
        }
    }
}

/// Makes the error for a key that does not exist, with the nearest one that does.
pub(super) fn unknown_key<'a>(
    key: &str,
    origin: Origin,
    known: impl Iterator<Item = &'a str>,
) -> ConfigError {
    let nearest = nearest(&key.to_ascii_lowercase().replace('-', "_"), known).map(str::to_owned);
    ConfigError::UnknownKey {
        key: key.to_owned(),
        origin,
        nearest,
    }
}

/// Makes the error for a value that is a list or table where it should not be, or the other way round.
pub(super) fn wrong_shape(key: &str, origin: &Origin, allowed: &str) -> ConfigError {
    let given = "something of another shape".to_owned();
    ConfigError::Invalid(Box::new(InvalidValue {
        key: key.to_owned(),
        origin: origin.clone(),
        given,
        allowed: allowed.to_owned(),
        why: None,
    }))
}

/// Returns the known name that a mistyped one most likely meant.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Jaro-Winkler over 0.85 takes "memroy" and "max_session" for what they are and leaves "service_host" alone.
    const LOOKS_LIKE: f64 = 0.85;
    known
        .map(|known| (strsim::jaro_winkler(name, known), known))
        .filter(|(similarity, _)| *similarity >= LOOKS_LIKE)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, known)| known)
}

/// Adds what to do about the one mistake that is easily made here and hard to guess from the parser's words.
fn with_advice(why: String) -> String {
    if why.contains("unknown anchor") {
        return format!(
            "{why}; write a text that begins with * in quotes, such as \"*.example.com\""
        );
    }
    why
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Written, D::Error> {
        deserializer.deserialize_any(WrittenVisitor)
    }
}

struct WrittenVisitor;

macro_rules! visit_as_text {
    ($($method:ident: $type:ty),*) => {
        $(fn $method<E>(self, value: $type) -> Result<Written, E> {
            Ok(Written::Text(value.to_string()))
        })*
    };
}

impl<'de> Visitor<'de> for WrittenVisitor {
    type Value = Written;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value, a list or a table")
    }

    visit_as_text!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_none<E>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Written, D::Error> {
        Written::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Written, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(Written::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Written, A::Error> {
        let mut members = Vec::new();
        while let Some((name, value)) = map.next_entry::<Spanned<String>, Written>()? {
            let line = Some(name.referenced.line()).filter(|line| *line > 0);
            members.push(Member {
                name: name.value,
                line,
                value,
            });
        }
        Ok(Written::Table(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<Layer, ConfigError> {
        from_file(Path::new("config.yaml"), text)
    }

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn refusal<T>(result: Result<T, ConfigError>) -> String {
        result.err().expect("it should be refused").to_string()
    }

    #[test]
    fn the_table_has_one_row_for_every_key() {
        for row in Key::TABLE.iter() {
            assert_eq!(Key::from_name(row.1), Some(row.0));
            assert_eq!(
                Key::TABLE
                    .iter()
                    .filter(|other| other.0 == row.0 || other.1 == row.1)
                    .count(),
                1,
                "{}",
                row.1
            );
        }
    }

    #[test]
    fn a_stronger_source_replaces_a_weaker_one() {
        let weak = file("memory: 1G\ncpus: 1\nallowed_dirs: [/a, /b]").unwrap();
        let (middle, _) = from_environment(&variables(&[
            ("CELLBLOCK_MEMORY", "2G"),
            ("CELLBLOCK_ALLOWED_DIRS", "/c, /d"),
        ]))
        .unwrap();
        let strong = Flags::default()
            .single(Key::Memory, Some("3G".to_owned()))
            .layer();
        let merged = Merged::from_weakest_to_strongest([weak, middle, strong]);
        assert_eq!(merged.text(Key::Memory).unwrap().unwrap().1, "3G");
        assert_eq!(merged.text(Key::Cpus).unwrap().unwrap().1, "1");
        assert_eq!(
            merged.texts(Key::AllowedDirs).unwrap().unwrap().1,
            ["/c", "/d"]
        );
        assert!(merged.text(Key::Disk).unwrap().is_none());
    }

    #[test]
    fn variables_of_several_sources_add_up() {
        let weak = file("variables: {A: 1}").unwrap();
        let strong = Flags::default()
            .repeated(Key::Variables, vec!["B=2".to_owned()])
            .layer();
        assert_eq!(
            Merged::from_weakest_to_strongest([weak, strong])
                .all(Key::Variables)
                .len(),
            2
        );
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_the_nearest_name() {
        assert_eq!(
            refusal(file("cpus: 1\n\nmemroy: 2G\n")),
            "config.yaml line 3: there is no setting \"memroy\"; did you mean \"memory\"?"
        );
        assert_eq!(
            refusal(file("zebra: 1")),
            "config.yaml line 1: there is no setting \"zebra\""
        );
        assert!(
            file("idle-timeout: 5m").is_ok(),
            "a hyphen is as good as an underscore"
        );
    }

    #[test]
    fn a_mistyped_variable_is_refused_and_a_foreign_one_is_reported() {
        assert!(
            refusal(from_environment(&variables(&[("CELLBLOCK_MEMROY", "1G")])))
                .contains("CELLBLOCK_MEMORY")
        );
        let foreign = variables(&[
            ("CELLBLOCK_SERVICE_HOST", "10.0.0.1"),
            ("CELLBLOCK_UV", "/bin/uv"),
            ("HOME", "/"),
        ]);
        assert_eq!(
            from_environment(&foreign).unwrap().1,
            ["CELLBLOCK_SERVICE_HOST"]
        );
    }

    #[test]
    fn broken_yaml_is_refused_with_its_line() {
        let message = refusal(file("cpus: 1\nmemory: [1, 2\n"));
        assert!(message.starts_with("config.yaml line "), "{message}");
        assert!(refusal(file("- a\n- b")).contains("key: value"));
        assert!(refusal(file("cpus: 1\ncpus: 2")).contains("line 2"));
    }

    #[test]
    fn a_star_without_quotes_is_refused_with_advice() {
        for text in [
            "cpus: 1\nallowed_domains: [*.example.com]\n",
            "allowed_domains:\n- **.example.com\n",
        ] {
            let message = refusal(file(text));
            assert!(
                message.contains("line 2")
                    && message.ends_with("in quotes, such as \"*.example.com\""),
                "{message}"
            );
        }
        assert!(file("allowed_domains: ['*.example.com']").is_ok()); // control
    }

    #[test]
    fn a_variable_whose_texts_may_hold_commas_is_kept_whole() {
        let set = variables(&[
            ("CELLBLOCK_ALLOWED_DOMAINS", "a:1,2,b"),
            ("CELLBLOCK_MOUNTS", "a:b,c:d"),
        ]);
        let merged = Merged::from_weakest_to_strongest([from_environment(&set).unwrap().0]);
        assert_eq!(
            merged.texts(Key::AllowedDomains).unwrap().unwrap().1,
            ["a:1,2,b"]
        );
        assert_eq!(
            merged.texts(Key::Mounts).unwrap().unwrap().1,
            ["a:b", "c:d"]
        );
    }

    #[test]
    fn an_empty_file_says_nothing() {
        for text in ["", "# only a comment\n", "---\n"] {
            assert!(file(text).unwrap().0.is_empty(), "{text:?}");
        }
    }

    #[test]
    fn a_list_where_one_value_belongs_is_refused() {
        let merged =
            Merged::from_weakest_to_strongest([file("memory: [1G]\nmounts: {a: b}").unwrap()]);
        assert!(refusal(merged.text(Key::Memory)).contains("single value"));
        assert!(refusal(merged.texts(Key::Mounts)).contains("a list"));
    }
}
