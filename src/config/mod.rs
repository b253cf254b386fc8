//! Settings, read from all sources and checked once.
//!
//! ```text
//! (profile  <)  file (YAML)  <  CELLBLOCK_… variables  <  flags
//!      \                 |                  /
//!       layers: one form for all sources, merged by precedence
//!                        |
//!       checks: typed, in range, absolute, or rejected by name   →   Settings
//! ```
//!
//! `table` has one row per setting: its names, allowed values, default, texts, and when a change
//! takes effect.
//!
//! `layers`, `checks`, `quantity` and `dotenv` are pure: they take texts and maps. `load` below is
//! the thin part that reads the real file, environment and machine, and creates the folders that
//! settings name.
//!
//! No other module reads files or the environment for settings. Values of variables for the sandbox
//! are never printed.

mod checks;
#[cfg(test)]
mod documents;
mod dotenv;
pub mod engine;
mod folders;
mod layers;
mod profiles;
pub mod quantity;
mod shown;
mod table;
mod variables;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cellblock_egress::gateway::Limits;
use cellblock_egress::rules::Rules;
use cellblock_egress::secrets::Secret;
use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};

use crate::approval::Policy;
use crate::audit::AuditSettings;
use crate::auth::AuthSettings;
use crate::daemon::DaemonName;
use crate::environment::{self, EnvironmentName, EnvironmentSpec};
use crate::http::{AllowedHost, Origin};
use crate::quotas::Quotas;
use crate::sandbox::container::{EngineAddress, EngineKind, FIRST_USER};
use crate::sandbox::masks::{HostMask, MaskRule};
use crate::sandbox::{LayerKind, SandboxLimits};
use crate::telemetry::LogFormat;
use checks::{NamedFile, Sources};
use folders::MachineFacts;
use layers::Merged;

pub use checks::SecretProblem;
pub use dotenv::DotenvError;
pub(crate) use layers::FORMER_NAME_ENDS;
pub use layers::{Flags, SettingOrigin};
pub use shown::ShownSetting;
pub(crate) use shown::value;
pub use table::Key;
pub(crate) use table::{Commands, TakesEffect, Values};
pub use variables::SandboxVariables;

/// All settings of the operator, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The host folder that becomes the working folder of sessions. Without one each session has a
    /// private folder.
    pub workspace: Option<PathBuf>,
    /// Host folders that files may be uploaded from and downloaded to.
    pub allowed_dirs: Vec<PathBuf>,
    /// The environment of sessions. It has an entry in `environments` once `load` has returned.
    pub environment: EnvironmentName,
    pub environments: BTreeMap<EnvironmentName, EnvironmentSpec>,
    /// Which of them are built in or described in the file; the others are known only because they
    /// were built by hand.
    pub described: BTreeSet<EnvironmentName>,
    pub mounts: Vec<Mount>,
    /// All variables that the operator passes to sandboxes. No others are inherited.
    pub variables: SandboxVariables,
    pub limits: SandboxLimits,
    /// Default timeout of an execution.
    pub timeout: Duration,
    /// The largest timeout that a caller may request.
    pub max_timeout: Duration,
    pub max_sessions: usize,
    /// How long a session may be idle before it ends.
    pub idle_timeout: Duration,
    /// Number of warm sessions kept ready.
    pub pool: usize,
    /// The sandbox technology.
    pub backend: BackendChoice,
    pub undo: UndoSettings,
    /// How many variants of one `explore` run concurrently.
    pub explore_parallel: usize,
    /// Limit of concurrent cells in the whole server; zero is unlimited.
    pub max_running: usize,
    pub quotas: Quotas,
    pub network: NetworkSettings,
    pub packages: PackageSettings,
    pub approvals: ApprovalSettings,
    pub package_index: PackageIndex,
    pub service: ServiceSettings,
    pub profile: ProfileName,
    /// Modules that code may import, in profiles with such lists. If it is not empty, all others
    /// are denied.
    pub allowed_modules: Vec<String>,
    pub blocked_modules: Vec<String>,
    /// Where the profile `ipybox` keeps images, below the working folder.
    pub images_dir: PathBuf,
    /// Isolation layers that may be missing.
    pub allow_missing: BTreeSet<LayerKind>,
    /// Authentication of HTTP callers.
    pub auth: AuthSettings,
    /// The folder of environments, tools and the runner's files.
    pub data_dir: PathBuf,
    /// The folder of sockets and sandbox roots while the server runs; only this user can enter it.
    pub runtime_dir: PathBuf,
    /// The log filter, from `log_level` or `RUST_LOG`.
    pub log_filter: Option<String>,
    pub log_format: LogFormat,
    /// The URL that spans are sent to, with its path. Unset unless the operator names a collector.
    pub traces: Option<String>,
    /// The audit log, if there is one.
    pub audit: Option<AuditLog>,
    /// Tolerated problems found while reading settings, to be logged as warnings once there is a
    /// log.
    pub notices: Vec<String>,
    /// Warnings about settings that were written under former names.
    pub former_names: Vec<String>,
    /// Whether sessions are kept in a session daemon that outlives the server, if it was set.
    pub keep_sessions: Option<bool>,
    /// The name of that session daemon, if it was set.
    pub daemon_name: Option<DaemonName>,
    /// Other MCP servers that sessions may use.
    pub upstreams: UpstreamSettings,
    /// The sources of these settings, for another process that needs the same.
    pub hand_over: SettingsHandOver,
    /// Paths in shown folders that sessions must not read or change.
    pub masks: Vec<HostMask>,
    /// Files that hold secrets. `load` has verified that no sandbox is shown one.
    pub(crate) secret_files: Vec<PathBuf>,
}

impl Settings {
    /// Returns the spec of the chosen environment.
    pub fn environment_spec(&self) -> &EnvironmentSpec {
        self.environments
            .get(&self.environment)
            .expect("load refuses an environment that nobody has described")
    }
}

/// The sandbox technology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendChoice {
    /// Namespaces of this machine's kernel.
    Native,
    Containers(ContainerChoice),
}

/// How containers are created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerChoice {
    pub kind: EngineKind,
    pub address: EngineAddress,
    /// Files that may have credentials for image registries.
    pub credentials: Vec<PathBuf>,
    pub image: String,
    /// A runtime other than the engine's default.
    pub runtime: Option<String>,
    /// How long a pooled container may wait to be used.
    pub pool_max_age: Duration,
    /// How many containers are created concurrently.
    pub pool_creations: usize,
}

/// How many checkpoints of a session are kept for undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UndoSettings {
    On {
        /// Maximum number of checkpoints per session.
        checkpoints: usize,
        /// Bytes of the working folder that are saved with each checkpoint; larger folders are not
        /// saved.
        files: u64,
    },
    Off,
}

/// The hosts that sessions may reach.
#[derive(Debug, Clone)]
pub struct NetworkSettings {
    /// The allowed hosts, including those of secrets, and the denied ones, which take precedence.
    /// Permits nothing by default.
    pub rules: Rules,
    /// Values that never enter the sandbox, each with the hosts it may be sent to. Their names are
    /// unique, and none is the name of a variable in [`Settings::variables`].
    pub secrets: Vec<Secret>,
    /// Network limits of one session.
    pub limits: Limits,
}

/// Other MCP servers, set by the operator.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Names and parameters in the form of client configurations, checked.
    pub servers: BTreeMap<String, serde_json::Value>,
    /// Hosts that callers over HTTP may name although they have no public address.
    pub allowed_hosts: Vec<String>,
    /// The values for `${VAR}`: the environment of this process, and `.env` of the workspace.
    pub variables: BTreeMap<String, String>,
}

// Parameters and variables hold secrets.
impl std::fmt::Debug for UpstreamSettings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&String> = self.servers.keys().collect();
        formatter
            .debug_struct("UpstreamSettings")
            .field("servers", &names)
            .field("allowed_hosts", &self.allowed_hosts)
            .finish()
    }
}

/// Whether and how sessions may install packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackageSettings {
    pub allowed: bool,
    /// Size limit of one installation, in bytes.
    pub size: u64,
    /// Size of the store, in bytes, beyond which unused packages are removed.
    pub store_size: u64,
    /// Timeout of one installation.
    pub timeout: Duration,
    /// Memory limit, in bytes, of the sandbox in which packages are fetched and built, its files
    /// included.
    pub memory: u64,
    /// Limit of files there, in bytes.
    pub disk: u64,
}

impl PackageSettings {
    /// Returns the limits of a sandbox for the server's own work, where sessions have `limits`.
    pub fn sandbox_limits(&self, limits: &SandboxLimits) -> SandboxLimits {
        SandboxLimits {
            memory: self.memory,
            family_memory: self.memory,
            disk: self.disk,
            ..limits.clone()
        }
    }
}

/// Actions of code that need an approval.
#[derive(Debug, Clone, PartialEq)]
pub struct ApprovalSettings {
    pub policy: Policy,
    /// How long to wait for a decision.
    pub timeout: Duration,
    /// Whether a grant can be permanent, stored in a file of the data folder.
    pub remember: bool,
}

/// The package index of sessions, if it is not uv's default.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PackageIndex {
    /// It may hold a password.
    pub url: Option<String>,
    /// Hosts whose certificates are not checked.
    pub trusted_hosts: Vec<String>,
}

impl std::fmt::Debug for PackageIndex {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let url = self.url.as_ref().map(|_| "[redacted]");
        formatter
            .debug_struct("PackageIndex")
            .field("url", &url)
            .field("trusted_hosts", &self.trusted_hosts)
            .finish()
    }
}

/// How `cellblock serve` is reached.
#[derive(Debug, Clone)]
pub struct ServiceSettings {
    pub listen: SocketAddr,
    /// Scheme, host and port by which clients know the server, if they differ from the listen
    /// address.
    pub public_url: Option<String>,
    /// Allowed `Host` names of requests, beside those of this machine.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Origins of pages that may use the server from a browser.
    pub allowed_origins: Vec<Origin>,
    pub tls: Option<TlsFiles>,
    pub max_connections: usize,
    /// How long a call waits for code before its caller gets a handle instead.
    pub max_wait: Duration,
}

/// A certificate chain and its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub certificates: PathBuf,
    pub key: PathBuf,
}

/// Where and how an audit log is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditLog {
    pub file: PathBuf,
    pub settings: AuditSettings,
}

/// A host folder shown below the working folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub host: PathBuf,
    /// Relative, without `..`.
    pub inside: PathBuf,
    pub writable: bool,
}

/// The set of tools shown to clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfileName {
    Default,
    Ipybox,
    PythonDocker,
    CodeExecuter,
    Pyexec,
}

impl ProfileName {
    pub const ALL: [ProfileName; 5] = [
        ProfileName::Default,
        ProfileName::Ipybox,
        ProfileName::PythonDocker,
        ProfileName::CodeExecuter,
        ProfileName::Pyexec,
    ];

    pub fn name(self) -> &'static str {
        match self {
            ProfileName::Default => "default",
            ProfileName::Ipybox => "ipybox",
            ProfileName::PythonDocker => "python-docker-mcp",
            ProfileName::CodeExecuter => "code-executer",
            ProfileName::Pyexec => "pyexec",
        }
    }

    pub fn from_name(name: &str) -> Option<ProfileName> {
        ProfileName::ALL
            .into_iter()
            .find(|profile| profile.name() == name)
    }
}

/// Why settings were rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("could not read {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{origin}: could not read {}", path.display())]
    NamedFile {
        origin: SettingOrigin,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{}: {why}", SettingOrigin::File { path: path.clone(), line: *line })]
    Yaml {
        path: PathBuf,
        line: Option<u64>,
        why: String,
    },
    #[error("{origin}: there is no setting \"{key}\"{}", did_you_mean(nearest.as_deref()))]
    UnknownKey {
        key: String,
        origin: SettingOrigin,
        nearest: Option<String>,
    },
    #[error(
        "{origin}: {former} is the former name of {name}, which is written too, with another \
         value; write only {name}"
    )]
    FormerName {
        origin: SettingOrigin,
        former: String,
        name: String,
    },
    #[error(transparent)]
    Invalid(Box<InvalidValue>),
    #[error("{origin}: the variable {name} is refused: {why}")]
    Variable {
        origin: SettingOrigin,
        name: String,
        why: &'static str,
    },
    #[error("{origin}: number {number} of secrets cannot be used")]
    Secret {
        origin: SettingOrigin,
        number: usize,
        #[source]
        cause: SecretProblem,
    },
    #[error("could not read variables from {}", path.display())]
    EnvFile {
        path: PathBuf,
        #[source]
        cause: DotenvError,
    },
    #[error(
        "there is no environment \"{name}\"; known: {known}. Describe it in the configuration file \
         or build it with \"cellblock env build {name} --packages …\""
    )]
    UnknownEnvironment {
        name: EnvironmentName,
        known: String,
    },
    #[error("the sandbox configuration protects {}, which {why}", path.display())]
    Mask { path: PathBuf, why: &'static str },
    #[error("the container engine cannot be found")]
    Engine(#[from] engine::EngineProblem),
    #[error("there is no place for environments: set HOME, XDG_DATA_HOME or CELLBLOCK_DATA_DIR")]
    NoDataDir,
    #[error("the folder {} of the setting {key} cannot be used", path.display())]
    Folder {
        key: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "the folder {} of the setting {key} cannot be shown to a sandbox for writing: it overlaps \
         with {}, whose files run on the host. \
         Choose another folder, or add \":ro\" to a mount",
        path.display(), trusted.display()
    )]
    Overlap {
        key: &'static str,
        path: PathBuf,
        trusted: PathBuf,
    },
    #[error(
        "the file {} holds a secret, but it lies in {}, which the setting {key} shows to \
         sandboxes. Move it to another folder",
        path.display(), shown.display()
    )]
    SecretShown {
        key: &'static str,
        path: PathBuf,
        shown: PathBuf,
    },
    #[error(
        "the audit log {} lies in {}, which the setting {key} shows to sandboxes or to clients. \
         Move it to another folder",
        path.display(), shown.display()
    )]
    AuditShown {
        key: &'static str,
        path: PathBuf,
        shown: PathBuf,
    },
}

/// A value that a setting cannot have.
#[derive(Debug, thiserror::Error)]
#[error("{origin}: {key} cannot be {given}{}; allowed: {allowed}", in_brackets(why.as_deref()))]
pub struct InvalidValue {
    pub key: String,
    pub origin: SettingOrigin,
    pub given: String,
    pub allowed: String,
    pub why: Option<String>,
}

fn did_you_mean(nearest: Option<&str>) -> String {
    nearest
        .map(|name| format!("; did you mean \"{name}\"?"))
        .unwrap_or_default()
}

fn in_brackets(why: Option<&str>) -> String {
    why.map(|why| format!(" ({why})")).unwrap_or_default()
}

/// Replaces the usual file errors by plainer texts.
fn in_plain_words(error: io::Error) -> io::Error {
    let words = match error.kind() {
        io::ErrorKind::NotFound => "no such file",
        io::ErrorKind::PermissionDenied => "this user may not read it",
        io::ErrorKind::IsADirectory => "it is a folder",
        _ => return error,
    };
    io::Error::new(error.kind(), words)
}

/// Reads the real file, environment and machine, checks everything, and creates the folders that
/// settings name.
///
/// `config_file` is the file named by a flag. It must exist, and so must a file named by
/// `CELLBLOCK_CONFIG`. The file at the default path is optional.
pub fn load(config_file: Option<&Path>, flags: Flags) -> Result<Settings, ConfigError> {
    let file = config_text(config_file, &own_variables(), &current_dir()?)?;
    let hand_over = SettingsHandOver {
        file: file.clone(),
        flags: flags.given(),
    };
    let (settings, _) = read(file, flags, Folders::Made)?;
    Ok(Settings {
        hand_over,
        ..settings
    })
}

/// Checks the settings handed over by another process of this program. The environment and the
/// current folder must be the same as there.
pub fn load_handed_over(hand_over: SettingsHandOver) -> Result<Settings, ConfigError> {
    let SettingsHandOver { file, flags } = hand_over.clone();
    let (settings, _) = read(file, Flags::from(flags), Folders::Made)?;
    Ok(Settings {
        hand_over,
        ..settings
    })
}

/// The effective settings of a configuration, determined without creating anything.
pub struct Inspection {
    /// The configuration file that was read.
    pub file: Option<PathBuf>,
    /// Every setting, by name.
    pub settings: Vec<ShownSetting>,
    /// Tolerated problems.
    pub notices: Vec<String>,
}

/// Reads and checks the same as [`load`], but creates no folder.
pub fn inspect(config_file: Option<&Path>, flags: Flags) -> Result<Inspection, ConfigError> {
    let variables = own_variables();
    let file = config_text(config_file, &variables, &current_dir()?)?;
    let path = file.as_ref().map(|(path, _)| path.clone());
    let (settings, written) = read(file, flags, Folders::LookedAt)?;
    let shown = shown::settings(&settings, &written, &variables);
    Ok(Inspection {
        file: path,
        settings: shown,
        notices: settings
            .former_names
            .into_iter()
            .chain(settings.notices)
            .collect(),
    })
}

/// How missing folders named by settings are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Folders {
    Made,
    LookedAt,
}

fn read(
    file: Option<(PathBuf, String)>,
    flags: Flags,
    folders: Folders,
) -> Result<(Settings, Merged), ConfigError> {
    let (variables, current_dir) = (own_variables(), current_dir()?);
    let machine = MachineFacts {
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        user_id: rustix::process::geteuid().as_raw(),
        temporary_dir: std::env::temp_dir(),
        current_dir,
    };
    let user_id = machine.user_id;
    let sources = Sources {
        file,
        variables,
        flags,
        machine,
    };
    let (mut settings, written) = checks::settle(sources, &read_named_file)?;
    settle_folders(&mut settings, user_id, folders)?;
    know_built_environments(&mut settings)?;
    Ok((settings, written))
}

/// The configuration file and the flags as they were read. Together with the environment, which a
/// child process inherits anyway, they determine all settings.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct SettingsHandOver {
    file: Option<(PathBuf, String)>,
    flags: Vec<(Key, layers::FlagValue)>,
}

impl std::fmt::Debug for SettingsHandOver {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("SettingsHandOver([redacted])")
    }
}

/// The environment. A variable whose name or value is not UTF-8 cannot be one of ours.
fn own_variables() -> BTreeMap<String, String> {
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

/// Returns the files in which the engine's own command line keeps registry credentials.
pub fn engine_credentials(kind: EngineKind) -> Vec<PathBuf> {
    engine::credential_files(kind, &own_variables())
}

/// Finds the container engine that the engine's own command line would use.
pub fn engine_address(kind: EngineKind) -> Result<EngineAddress, engine::EngineProblem> {
    engine::find(kind, &own_variables(), &read_named_file, &Path::exists)
}

fn current_dir() -> Result<PathBuf, ConfigError> {
    std::env::current_dir().map_err(|cause| ConfigError::Unreadable {
        path: PathBuf::from("."),
        cause,
    })
}

fn config_text(
    flag: Option<&Path>,
    variables: &BTreeMap<String, String>,
    current_dir: &Path,
) -> Result<Option<(PathBuf, String)>, ConfigError> {
    let named = flag.map(Path::to_owned).or_else(|| {
        variables
            .get("CELLBLOCK_CONFIG")
            .filter(|path| !path.is_empty())
            .map(PathBuf::from)
    });
    let (path, may_be_missing) = match (named, folders::default_config_file(variables)) {
        (Some(path), _) => (current_dir.join(path), false),
        (None, Some(path)) => (path, true),
        (None, None) => return Ok(None),
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some((path, text))),
        Err(error) if may_be_missing && error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(ConfigError::Unreadable {
            path,
            cause: in_plain_words(cause),
        }),
    }
}

/// A larger file of variables is a mistake or an attack.
const MAX_ENV_FILE_BYTES: u64 = 1 << 20;

fn read_named_file(file: NamedFile<'_>) -> io::Result<Option<String>> {
    let (path, extra, in_workspace) = match file {
        NamedFile::ByOperator(path) => (path, OFlags::empty(), false),
        // Code run by an earlier version could have put a link to a host file here, or a pipe that
        // blocks the reader.
        NamedFile::InWorkspace(path) => (path, OFlags::NOFOLLOW | OFlags::NONBLOCK, true),
    };
    let file = match rustix::fs::openat(
        CWD,
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | extra,
        Mode::empty(),
    ) {
        Ok(descriptor) => File::from(descriptor),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // Code could write to it under its other name.
    if in_workspace && about.nlink() > 1 {
        return Err(io::Error::other("it has more than one name (hard links)"));
    }
    let mut text = String::new();
    let length = file
        .take(MAX_ENV_FILE_BYTES + 1)
        .read_to_string(&mut text)?;
    if length as u64 > MAX_ENV_FILE_BYTES {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    Ok(Some(text))
}

/// Creates the folders that settings name, or only inspects them, and rejects those that must not
/// be shown.
fn settle_folders(
    settings: &mut Settings,
    user_id: u32,
    folders: Folders,
) -> Result<(), ConfigError> {
    fn folder_error(key: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ConfigError {
        let path = path.to_owned();
        move |cause| ConfigError::Folder { key, path, cause }
    }
    let shared = |path: &Path| match folders {
        // A folder that does not exist yet contains no links.
        Folders::LookedAt if !path.exists() => Ok(path.to_owned()),
        Folders::LookedAt => folders::existing_folder(path),
        Folders::Made => folders::make_shared(path),
    };
    settings.data_dir =
        shared(&settings.data_dir).map_err(folder_error("data_dir", &settings.data_dir))?;
    if folders == Folders::Made {
        folders::make_private(&settings.runtime_dir, user_id)
            .map_err(folder_error("runtime_dir", &settings.runtime_dir))?;
    }
    settings.runtime_dir = shared(&settings.runtime_dir)
        .map_err(folder_error("runtime_dir", &settings.runtime_dir))?;
    // Sessions in containers are never root, and could not work in a folder that root created for
    // itself.
    let owner = match settings.backend {
        BackendChoice::Containers(_) if user_id == 0 && folders == Folders::Made => {
            Some(FIRST_USER)
        }
        _ => None,
    };
    let for_sessions = |path: &Path| {
        let is_new = !path.exists();
        let made = shared(path)?;
        if let Some(owner) = owner.filter(|_| is_new) {
            std::os::unix::fs::chown(&made, Some(owner), Some(owner))?;
        }
        io::Result::Ok(made)
    };
    if let Some(workspace) = &mut settings.workspace {
        *workspace = for_sessions(workspace).map_err(folder_error("workspace", workspace))?;
    }
    for directory in &mut settings.allowed_dirs {
        let is_workspace = settings.workspace.as_ref() == Some(directory);
        let real = if is_workspace {
            shared(directory)
        } else {
            folders::existing_folder(directory)
        };
        *directory = real.map_err(folder_error("allowed_dirs", directory))?;
    }
    for mount in &mut settings.mounts {
        let real = if mount.writable {
            for_sessions(&mount.host)
        } else {
            folders::existing_folder(&mount.host)
        };
        mount.host = real.map_err(folder_error("mounts", &mount.host))?;
    }
    resolve_masks(settings)?;
    settings.auth.shown = checks::auth::shown_folders(settings);
    refuse_overlaps(settings)?;
    refuse_shown_secrets(settings)?;
    refuse_shown_audit(settings)
}

/// Resolves the paths that sessions must not read or change, and drops those that are not shown
/// anyway. The file `.env` of the workspace is always among them.
fn resolve_masks(settings: &mut Settings) -> Result<(), ConfigError> {
    let shown: Vec<PathBuf> = settings
        .workspace
        .iter()
        .chain(settings.mounts.iter().map(|mount| &mount.host))
        .cloned()
        .collect();
    let mut masks = Vec::new();
    for HostMask {
        host: written,
        rule,
    } in std::mem::take(&mut settings.masks)
    {
        let Ok(host) = written.canonicalize() else {
            let folder = written
                .parent()
                .and_then(|folder| folder.canonicalize().ok());
            let host = folder
                .zip(written.file_name())
                .map(|(folder, name)| folder.join(name));
            if let Some(host) =
                host.filter(|host| shown.iter().any(|folder| host.starts_with(folder)))
            {
                settings.notices.push(format!(
                    "the sandbox configuration protects {}, which does not exist; until it is made \
                     on this machine, code can make it",
                    written.display()
                ));
                masks.push(HostMask { host, rule });
            }
            continue;
        };
        if shown.contains(&host) {
            let why = "is a folder that sessions are shown as a whole; do not show it, or show it \
                       with \":ro\"";
            return Err(ConfigError::Mask { path: written, why });
        }
        if let Some(folder) = shown.iter().find(|folder| folder.starts_with(&host)) {
            let (path, folder) = (written.display(), folder.display());
            settings.notices.push(format!(
                "the sandbox configuration protects {path}; sessions see nothing of it but \
                 {folder}, which stays as it is"
            ));
        } else if shown.iter().any(|folder| host.starts_with(folder)) {
            masks.push(HostMask { host, rule });
        }
    }
    let environment_file = settings.workspace.iter().map(|folder| folder.join(".env"));
    for host in environment_file {
        masks.retain(|mask| mask.host != host);
        masks.push(HostMask {
            host,
            rule: MaskRule::EnvironmentFile,
        });
    }
    settings.masks = masks;
    Ok(())
}

/// Rejects sandbox-writable folders that overlap with the host's own tools, environments or
/// sockets.
fn refuse_overlaps(settings: &Settings) -> Result<(), ConfigError> {
    let workspace = settings.workspace.iter().map(|path| ("workspace", path));
    let mounts = settings
        .mounts
        .iter()
        .filter(|mount| mount.writable)
        .map(|mount| ("mounts", &mount.host));
    for (key, path) in workspace.chain(mounts) {
        for trusted in [&settings.data_dir, &settings.runtime_dir] {
            if folders::overlap(path, trusted) {
                return Err(ConfigError::Overlap {
                    key,
                    path: path.clone(),
                    trusted: trusted.clone(),
                });
            }
        }
    }
    Ok(())
}

/// Rejects a secret in a file that code inside could read, or that a client could have uploaded.
fn refuse_shown_secrets(settings: &Settings) -> Result<(), ConfigError> {
    let folders = shown_folders(settings);
    for written in &settings.secret_files {
        let unreadable = |cause| ConfigError::Unreadable {
            path: written.clone(),
            cause,
        };
        let real = written.canonicalize().map_err(unreadable)?;
        // A link matters as much as the file: code that can replace it makes the server send
        // another file.
        let folder = written
            .parent()
            .unwrap_or(Path::new("/"))
            .canonicalize()
            .map_err(unreadable)?;
        for place in [real.as_path(), folder.as_path()] {
            if let Some((key, shown)) = folders.iter().find(|(_, shown)| place.starts_with(shown)) {
                return Err(ConfigError::SecretShown {
                    key,
                    path: written.clone(),
                    shown: (*shown).clone(),
                });
            }
        }
    }
    Ok(())
}

/// Rejects an audit log that the audited parties could read, change or replace.
fn refuse_shown_audit(settings: &Settings) -> Result<(), ConfigError> {
    let Some(audit) = &settings.audit else {
        return Ok(());
    };
    // A missing folder is shown to no sandbox; opening the log reports the error.
    let folder = audit.file.parent().unwrap_or(Path::new("/"));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    match shown_folders(settings)
        .into_iter()
        .find(|(_, shown)| folder.starts_with(shown))
    {
        Some((key, shown)) => Err(ConfigError::AuditShown {
            key,
            path: audit.file.clone(),
            shown: shown.clone(),
        }),
        None => Ok(()),
    }
}

/// Returns every folder that code inside or a client can see, with the setting that shows it.
fn shown_folders(settings: &Settings) -> Vec<(&'static str, &PathBuf)> {
    let workspace = settings.workspace.iter().map(|path| ("workspace", path));
    let allowed_dirs = settings
        .allowed_dirs
        .iter()
        .map(|path| ("allowed_dirs", path));
    let mounts = settings.mounts.iter().map(|mount| ("mounts", &mount.host));
    workspace.chain(allowed_dirs).chain(mounts).collect()
}

/// Adds environments that were built by hand and are not described elsewhere.
fn know_built_environments(settings: &mut Settings) -> Result<(), ConfigError> {
    for spec in environment::built_specs(&settings.data_dir) {
        settings
            .environments
            .entry(spec.name.clone())
            .or_insert(spec);
    }
    if settings.environments.contains_key(&settings.environment) {
        return Ok(());
    }
    let known = settings
        .environments
        .keys()
        .map(EnvironmentName::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    Err(ConfigError::UnknownEnvironment {
        name: settings.environment.clone(),
        known,
    })
}

#[cfg(test)]
pub(crate) mod tests_support {
    use super::*;

    /// Returns default settings whose folders all lie below `base`. Creates none of them.
    pub(crate) fn settings_below(base: &Path) -> Settings {
        settings_of(base, "")
    }

    /// Returns the settings of a configuration file in `base`.
    pub(crate) fn settings_of(base: &Path, text: &str) -> Settings {
        let variables = BTreeMap::from([("HOME".to_owned(), base.to_string_lossy().into_owned())]);
        let machine = MachineFacts {
            cores: 1,
            user_id: 1,
            current_dir: base.to_owned(),
            temporary_dir: base.join("temporary"),
        };
        let sources = Sources {
            file: Some((base.join("config.yaml"), text.to_owned())),
            variables,
            flags: Flags::default(),
            machine,
        };
        let (mut settings, _) =
            checks::settle(sources, &|_| Ok(None)).expect("what is written is allowed");
        settings.data_dir = base.join("data");
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::tests_support::settings_below;
    use super::*;

    fn outcome(
        workspace: Option<&Path>,
        mounts: Vec<Mount>,
        base: &Path,
    ) -> Result<(), ConfigError> {
        let mut settings = settings_below(base);
        settings.workspace = workspace.map(Path::to_owned);
        settings.mounts = mounts;
        settle_folders(
            &mut settings,
            rustix::process::geteuid().as_raw(),
            Folders::Made,
        )
    }

    #[test]
    fn a_writable_folder_over_our_own_files_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        let mount = |writable| {
            vec![Mount {
                host: base.clone(),
                inside: "x".into(),
                writable,
            }]
        };
        assert!(matches!(
            outcome(Some(&base), vec![], &base),
            Err(ConfigError::Overlap {
                key: "workspace",
                ..
            })
        ));
        assert!(matches!(
            outcome(Some(&base.join("data/deep")), vec![], &base),
            Err(ConfigError::Overlap { .. })
        ));
        assert!(matches!(
            outcome(None, mount(true), &base),
            Err(ConfigError::Overlap { key: "mounts", .. })
        ));
        outcome(None, mount(false), &base).unwrap();
        outcome(Some(&base.join("work")), vec![], &base).unwrap();
        assert!(base.join("work").is_dir(), "a missing workspace is made");
    }

    #[test]
    fn an_audit_log_that_sandboxes_or_clients_can_reach_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        for folder in ["work", "logs", "readable"] {
            std::fs::create_dir(base.join(folder)).unwrap();
        }
        std::os::unix::fs::symlink(base.join("work"), base.join("link")).unwrap();
        let outcome = |file: &str| {
            let mut settings = settings_below(&base);
            settings.workspace = Some(base.join("work"));
            settings.mounts = vec![Mount {
                host: base.join("readable"),
                inside: "x".into(),
                writable: false,
            }];
            settings.audit = Some(AuditLog {
                file: base.join(file),
                settings: AuditSettings::default(),
            });
            settle_folders(
                &mut settings,
                rustix::process::geteuid().as_raw(),
                Folders::Made,
            )
        };
        outcome("logs/audit.jsonl").unwrap();
        for (file, setting) in [
            ("work/audit.jsonl", "workspace"),
            ("link/audit.jsonl", "workspace"),
            ("readable/audit.jsonl", "mounts"),
        ] {
            let Err(ConfigError::AuditShown { key, .. }) = outcome(file) else {
                panic!("{file} was accepted")
            };
            assert_eq!(key, setting);
        }
    }

    #[test]
    fn looking_at_folders_makes_none_and_refuses_the_same() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        let look = |workspace: &str| {
            let mut settings = settings_below(&base);
            settings.workspace = Some(base.join(workspace));
            settings.allowed_dirs = vec![base.join(workspace)];
            settle_folders(
                &mut settings,
                rustix::process::geteuid().as_raw(),
                Folders::LookedAt,
            )
        };
        look("work").unwrap();
        assert!(matches!(
            look("data/deep"),
            Err(ConfigError::Overlap {
                key: "workspace",
                ..
            })
        ));
        std::fs::write(base.join("file"), "").unwrap();
        assert!(matches!(
            look("file"),
            Err(ConfigError::Folder {
                key: "workspace",
                ..
            })
        ));
        let made: Vec<_> = std::fs::read_dir(&base)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(made, ["file"]);
    }

    #[test]
    fn a_link_does_not_hide_an_overlap() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        std::fs::create_dir(base.join("data")).unwrap();
        std::os::unix::fs::symlink(base.join("data"), base.join("innocent")).unwrap();
        assert!(matches!(
            outcome(Some(&base.join("innocent")), vec![], &base),
            Err(ConfigError::Overlap { .. })
        ));
    }

    #[test]
    fn a_read_only_mount_must_exist_and_a_writable_one_is_made() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        let mount = |name: &str, writable| {
            vec![Mount {
                host: base.join(name),
                inside: "x".into(),
                writable,
            }]
        };
        assert!(matches!(
            outcome(None, mount("missing", false), &base),
            Err(ConfigError::Folder { key: "mounts", .. })
        ));
        outcome(None, mount("made", true), &base).unwrap();
        assert!(base.join("made").is_dir());
    }

    #[test]
    fn a_secret_in_a_folder_that_sandboxes_are_shown_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        for folder in ["shown", "hidden"] {
            std::fs::create_dir(base.join(folder)).unwrap();
            std::fs::write(base.join(folder).join("token"), "sk-0123456789-canary").unwrap();
        }
        std::os::unix::fs::symlink(base.join("shown/token"), base.join("hidden/to_shown")).unwrap();
        std::os::unix::fs::symlink(base.join("hidden/token"), base.join("shown/to_hidden"))
            .unwrap();
        let shown = base.join("shown");
        let key_that_shows = |file: &str, change: &dyn Fn(&mut Settings)| {
            let mut settings = settings_below(&base);
            settings.secret_files = vec![base.join(file)];
            change(&mut settings);
            match settle_folders(
                &mut settings,
                rustix::process::geteuid().as_raw(),
                Folders::Made,
            ) {
                Ok(()) => None,
                Err(ConfigError::SecretShown { key, .. }) => Some(key),
                Err(other) => panic!("{other}"),
            }
        };
        let mount = Mount {
            host: shown.clone(),
            inside: "x".into(),
            writable: false,
        };
        let in_workspace = |settings: &mut Settings| settings.workspace = Some(shown.clone());
        let in_allowed_dir = |settings: &mut Settings| settings.allowed_dirs = vec![shown.clone()];
        let in_mount = |settings: &mut Settings| settings.mounts = vec![mount.clone()];
        for file in ["shown/token", "shown/to_hidden", "hidden/to_shown"] {
            assert_eq!(
                key_that_shows(file, &in_workspace),
                Some("workspace"),
                "{file}"
            );
            assert_eq!(
                key_that_shows(file, &in_allowed_dir),
                Some("allowed_dirs"),
                "{file}"
            );
            assert_eq!(key_that_shows(file, &in_mount), Some("mounts"), "{file}");
            assert_eq!(key_that_shows(file, &|_| {}), None, "{file}"); // control
        }
        assert_eq!(key_that_shows("hidden/token", &in_workspace), None); // control
    }

    #[test]
    fn a_link_a_pipe_or_a_file_of_two_names_in_the_workspace_is_not_read_as_variables() {
        let base = tempfile::tempdir().unwrap();
        let (real, link, pipe) = (
            base.path().join("real"),
            base.path().join("link"),
            base.path().join("pipe"),
        );
        std::fs::write(&real, "A=1").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        rustix::fs::mkfifoat(CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
        assert_eq!(
            read_named_file(NamedFile::InWorkspace(&real))
                .unwrap()
                .as_deref(),
            Some("A=1")
        );
        assert_eq!(
            read_named_file(NamedFile::ByOperator(&link))
                .unwrap()
                .as_deref(),
            Some("A=1")
        );
        assert!(read_named_file(NamedFile::InWorkspace(&link)).is_err());
        assert!(read_named_file(NamedFile::InWorkspace(&pipe)).is_err());
        std::fs::hard_link(&real, base.path().join("other")).unwrap();
        assert!(
            read_named_file(NamedFile::InWorkspace(&real)).is_err(),
            "code could write into it by its other name"
        );
        assert!(read_named_file(NamedFile::ByOperator(&real)).is_ok()); // control
        assert_eq!(
            read_named_file(NamedFile::InWorkspace(&base.path().join("none"))).unwrap(),
            None
        );
    }

    #[test]
    fn paths_to_protect_are_found_where_sessions_see_them() {
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        for folder in ["space/secrets", "data"] {
            std::fs::create_dir_all(base.join(folder)).unwrap();
        }
        for file in ["space/secrets/key", "data/table", "elsewhere"] {
            std::fs::write(base.join(file), "").unwrap();
        }
        std::os::unix::fs::symlink("secrets/key", base.join("space/link")).unwrap();
        std::os::unix::fs::symlink(base.join("elsewhere"), base.join("space/out")).unwrap();
        let resolved = |paths: &[&str]| {
            let mut settings = settings_below(&base);
            settings.workspace = Some(base.join("space"));
            settings.mounts = vec![Mount {
                host: base.join("data"),
                inside: "data".into(),
                writable: false,
            }];
            let masks = paths.iter().map(|path| HostMask {
                host: base.join(path),
                rule: MaskRule::Hidden,
            });
            settings.masks = masks.collect();
            let made = settle_folders(
                &mut settings,
                rustix::process::geteuid().as_raw(),
                Folders::Made,
            );
            made.map(|()| {
                let below =
                    |mask: &HostMask| mask.host.strip_prefix(&base).unwrap().display().to_string();
                (
                    settings.masks.iter().map(below).collect::<Vec<_>>(),
                    settings.notices,
                )
            })
        };
        let masks = |paths: &[&str]| resolved(paths).unwrap().0;
        assert_eq!(masks(&[]), ["space/.env"], "it is always protected");
        assert_eq!(masks(&["space/.env"]), ["space/.env"]);
        assert_eq!(
            masks(&["space/link"]),
            ["space/secrets/key", "space/.env"],
            "a link stands for its file"
        );
        assert_eq!(masks(&["data/table"]), ["data/table", "space/.env"]);
        for unseen in ["elsewhere", "space/out", "missing"] {
            assert_eq!(masks(&[unseen]), ["space/.env"], "{unseen}");
        }
        let (later, notices) = resolved(&["space/later"]).unwrap();
        assert_eq!(
            (&later[..], notices.len()),
            (&["space/later".to_owned(), "space/.env".to_owned()][..], 1)
        );
        let (above, notices) = resolved(&[""]).unwrap();
        assert_eq!(
            (&above[..], notices.len()),
            (&["space/.env".to_owned()][..], 1)
        );
        for whole in ["space", "data"] {
            assert!(
                matches!(resolved(&[whole]), Err(ConfigError::Mask { .. })),
                "{whole}"
            );
        }
    }

    #[test]
    fn a_config_file_that_was_named_must_exist() {
        let base = tempfile::tempdir().unwrap();
        let home = BTreeMap::from([(
            "HOME".to_owned(),
            base.path().to_string_lossy().into_owned(),
        )]);
        assert!(config_text(Some(Path::new("gone.yaml")), &home, base.path()).is_err());
        assert!(config_text(None, &home, base.path()).unwrap().is_none());
        std::fs::write(base.path().join("here.yaml"), "cpus: 1").unwrap();
        assert_eq!(
            config_text(Some(Path::new("here.yaml")), &home, base.path())
                .unwrap()
                .unwrap()
                .1,
            "cpus: 1"
        );
        let mut named = home.clone();
        named.insert("CELLBLOCK_CONFIG".to_owned(), "gone.yaml".to_owned());
        assert!(config_text(None, &named, base.path()).is_err());
    }
}
