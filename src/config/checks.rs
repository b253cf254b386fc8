//! Checks the written settings and converts them to typed values.
//!
//! `settle` is pure: it takes the sources as values and a function that reads the few files they
//! name. Every error names the setting, where it was written, the given value and what is allowed.
//! A value that may be a misplaced secret is not repeated.
//!
//! `network` has the settings for network access, `auth` those for authentication, `service` those
//! of the HTTP service, `upstream` those for other MCP servers, `watch` those for log, traces and
//! audit, `containers` those for container engines, `approvals` those for approvals. Files that
//! hold secrets are read by the modules that use them.

mod approvals;
pub(super) mod auth;
mod containers;
mod network;
mod service;
mod upstream;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::folders::{self, MachineFacts};
use super::layers::{self, Flags, Merged, SettingOrigin, WrittenMember, WrittenValue};
use super::profiles::{self, Surroundings};
use super::quantity::{format_duration, format_size, parse_duration, parse_size};
use super::table::{Key, MAX_VARIANTS, Values};
use super::{
    ConfigError, InvalidValue, Mount, PackageIndex, PackageSettings, ProfileName, SandboxVariables,
    Settings, SettingsHandOver, UndoSettings, dotenv, in_plain_words,
};
use crate::daemon::DaemonName;
use crate::environment::{EnvironmentName, EnvironmentSpec, PythonRequest, spec};
use crate::quotas::Quotas;
use crate::sandbox::masks::HostMask;
use crate::sandbox::{LayerKind, SandboxLimits};

pub use network::SecretProblem;

/// All sources of settings.
pub(super) struct Sources {
    /// The configuration file's path and text.
    pub file: Option<(PathBuf, String)>,
    /// The server's own environment.
    pub variables: BTreeMap<String, String>,
    pub flags: Flags,
    pub machine: MachineFacts,
}

/// A file that settings name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NamedFile<'a> {
    /// Named by the operator.
    ByOperator(&'a Path),
    /// In the workspace, where code from a sandbox can write other files.
    InWorkspace(&'a Path),
}

/// Reads a file; `None` if it does not exist.
pub(super) type ReadNamedFile<'a> = &'a dyn Fn(NamedFile<'_>) -> io::Result<Option<String>>;

/// Prefix of variables that are passed to the sandbox without the prefix.
pub(super) const PASSED_ON: &str = "KERNEL_ENV_";

/// Checks all sources and returns the settings, together with the merged sources. Accesses only
/// files read through `read` and files that hold secrets, and creates nothing.
pub(super) fn settle(
    sources: Sources,
    read: ReadNamedFile<'_>,
) -> Result<(Settings, Merged), ConfigError> {
    let Sources {
        file,
        variables: surroundings,
        flags,
        machine,
    } = sources;
    let file = file
        .map(|(path, text)| layers::from_file(&path, &text))
        .transpose()?
        .unwrap_or_default();
    let (environment, unknown) = layers::from_environment(&surroundings)?;
    let mut notices: Vec<String> = unknown
        .into_iter()
        .map(|name| format!("the variable {name} is no setting of Cellblock and is ignored"))
        .collect();
    let flags = flags.layer();
    let mut former_names = Vec::new();
    for layer in [&file, &environment, &flags] {
        former_names.extend(layer.former_names()?);
    }
    let mut check = Check {
        written: Merged::from_weakest_to_strongest([
            file.clone(),
            environment.clone(),
            flags.clone(),
        ]),
        current_dir: &machine.current_dir,
        home: surroundings.get("HOME").map(String::as_str),
    };
    let profile = check.profile()?;
    let around = Surroundings {
        variables: &surroundings,
        current_dir: &machine.current_dir,
        read,
        containers: check
            .written
            .text(Key::Backend)?
            .map(|(_, backend)| backend != "native"),
        image: check.written.text(Key::ContainerTag)?.is_some(),
    };
    let usual = profiles::layer(profile, &around, &mut notices)?;
    let (sandbox, protected) = match check.path(Key::SandboxConfig)? {
        Some(path) => profiles::sandbox_config(&path, &around, &mut notices)?,
        None => Default::default(),
    };
    check.written = Merged::from_weakest_to_strongest([usual, sandbox, file, environment, flags]);

    let workspace = check.path(Key::Workspace)?;
    let allowed_dirs = match check.paths(Key::AllowedDirs)? {
        Some(dirs) => dirs.into_iter().map(|(_, dir)| dir).collect(),
        None => workspace.iter().cloned().collect(),
    };
    let (timeout, max_timeout) = check.timeouts()?;
    let cores = machine.cores.max(1);
    let memory = check.size(Key::Memory)?;
    let limits = SandboxLimits {
        memory,
        family_memory: check.family_memory(memory)?,
        cpus: check.cpus(cores as f64)?,
        processes: check.number(Key::Processes)?,
        disk: check.size(Key::Disk)?,
        files: check.number(Key::Files)?,
    };
    let max_sessions = check.number(Key::MaxSessions)?;
    let data_dir = match check.path(Key::DataDir)? {
        Some(dir) => dir,
        None => folders::default_data_dir(&surroundings).ok_or(ConfigError::NoDataDir)?,
    };

    let environments = check.environments()?;
    let in_workspace = workspace_variables(workspace.as_deref(), read, &mut notices);
    let mut variables = check.variables(&in_workspace, &surroundings, read)?;
    let secrets = check.secrets(&surroundings)?;
    secrets.keep_out_of(&mut variables, &mut notices)?;
    let network = check.network(&secrets, &mut notices)?;
    // The server's own environment takes precedence.
    let known = in_workspace
        .into_iter()
        .chain(surroundings.clone())
        .collect();
    let (upstreams, servers_file) = check.upstreams(known, read)?;
    let masks = protected
        .into_iter()
        .filter_map(|(rule, path)| match path.is_absolute() {
            true => Some(HostMask { host: path, rule }),
            // Relative paths in that file start at the working folder. A private working folder
            // contains no host files.
            false => workspace.as_deref().map(|workspace| HostMask {
                host: workspace.join(path),
                rule,
            }),
        });
    let masks = masks.collect();

    let settings = Settings {
        environment: check.environment_name()?,
        described: environments.keys().cloned().collect(),
        environments,
        mounts: check.mounts()?,
        variables,
        timeout,
        max_timeout,
        max_sessions,
        idle_timeout: check.duration(Key::IdleTimeout)?,
        pool: check.number::<usize>(Key::Pool)?.min(max_sessions),
        backend: check.backend(&surroundings, read)?,
        undo: check.undo(workspace.is_some())?,
        explore_parallel: check
            .optional_number(Key::ExploreParallel)?
            .unwrap_or(cores.min(MAX_VARIANTS as usize)),
        max_running: check
            .optional_number(Key::MaxRunning)?
            .unwrap_or(CELLS_PER_CORE * cores),
        quotas: check.quotas()?,
        network,
        packages: check.packages()?,
        approvals: check.approvals()?,
        package_index: check.package_index()?,
        service: check.service()?,
        profile,
        allowed_modules: check.modules(Key::AllowedModules)?,
        blocked_modules: check.modules(Key::BlockedModules)?,
        images_dir: check.images_dir(workspace.as_deref())?,
        allow_missing: check.allow_missing()?,
        auth: check.auth(&surroundings, &data_dir)?,
        runtime_dir: folders::runtime_dir(&surroundings, &machine),
        log_filter: match check.log_level()? {
            Some(level) => Some(level),
            None => surroundings
                .get("RUST_LOG")
                .filter(|filter| !filter.is_empty())
                .cloned(),
        },
        log_format: check.log_format()?,
        traces: check.traces(&surroundings)?,
        audit: check.audit()?,
        workspace,
        allowed_dirs,
        limits,
        data_dir,
        notices,
        former_names,
        upstreams,
        masks,
        secret_files: secrets
            .into_files()
            .into_iter()
            .chain(servers_file)
            .collect(),
        keep_sessions: check.optional_switch(Key::KeepSessions)?,
        daemon_name: check.daemon_name()?,
        hand_over: SettingsHandOver::default(),
    };
    Ok((settings, check.written))
}

/// Concurrent cells per core. Many cells wait for the network or for a file; those that compute
/// share the cores.
const CELLS_PER_CORE: usize = 4;

/// Memory of the programs in the installer's sandbox.
const MEMORY_OF_INSTALLER: u64 = 2 << 30;

/// Reads the `.env` of the workspace, which sessions can neither read nor write. A malformed file
/// does not prevent the server from starting.
fn workspace_variables(
    workspace: Option<&Path>,
    read: ReadNamedFile<'_>,
    notices: &mut Vec<String>,
) -> Vec<(String, String)> {
    let Some(path) = workspace.map(|workspace| workspace.join(".env")) else {
        return Vec::new();
    };
    let parsed = match read(NamedFile::InWorkspace(&path)) {
        Ok(None) => return Vec::new(),
        Ok(Some(text)) => dotenv::parse(&text).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    parsed.unwrap_or_else(|why| {
        notices.push(format!("the workspace's .env is not used: {why}"));
        Vec::new()
    })
}

struct Check<'a> {
    written: Merged,
    current_dir: &'a Path,
    home: Option<&'a str>,
}

impl Check<'_> {
    fn size(&self, key: Key) -> Result<u64, ConfigError> {
        self.optional_size(key).map(has_default)
    }

    fn optional_size(&self, key: Key) -> Result<Option<u64>, ConfigError> {
        let Values::Size(least, most) = key.row().values else {
            unreachable!("{key:?} is a size")
        };
        self.value(key, |text| within(parse_size(text), &(least..=most)))
    }

    fn duration(&self, key: Key) -> Result<Duration, ConfigError> {
        self.optional_duration(key).map(has_default)
    }

    fn optional_duration(&self, key: Key) -> Result<Option<Duration>, ConfigError> {
        let Values::Time(least, most) = key.row().values else {
            unreachable!("{key:?} is a duration")
        };
        let range = Duration::from_secs(least)..=Duration::from_secs(most);
        self.value(key, |text| within(parse_duration(text), &range))
    }

    fn number<N: TryFrom<u64>>(&self, key: Key) -> Result<N, ConfigError> {
        self.optional_number(key).map(has_default)
    }

    fn optional_number<N: TryFrom<u64>>(&self, key: Key) -> Result<Option<N>, ConfigError> {
        let Values::Number(least, most) = key.row().values else {
            unreachable!("{key:?} is a number")
        };
        self.value(key, |text| {
            let number = within(text.trim().parse::<u64>(), &(least..=most))?;
            N::try_from(number).map_err(|_| None)
        })
    }

    fn switch(&self, key: Key) -> Result<bool, ConfigError> {
        self.optional_switch(key).map(has_default)
    }

    fn optional_switch(&self, key: Key) -> Result<Option<bool>, ConfigError> {
        // YAML parses the bare words as booleans, so they may arrive as true and false.
        self.value(key, |text| {
            match text.trim().to_ascii_lowercase().as_str() {
                "on" | "true" => Ok(true),
                "off" | "false" => Ok(false),
                _ => Err(None),
            }
        })
    }

    /// Reads a setting whose row states what is allowed.
    fn value<T>(
        &self,
        key: Key,
        parse: impl Fn(&str) -> Result<T, Option<String>>,
    ) -> Result<Option<T>, ConfigError> {
        self.read(key, &key.row().values.allowed(), parse)
    }

    /// Parses one text, or the default of the setting. The error for a rejected text is complete.
    fn read<T>(
        &self,
        key: Key,
        allowed: &str,
        parse: impl Fn(&str) -> Result<T, Option<String>>,
    ) -> Result<Option<T>, ConfigError> {
        match (self.written.text(key)?, key.row().default.written()) {
            (Some((origin, text)), _) => parse(text)
                .map(Some)
                .map_err(|why| invalid(key.name(), origin, text, allowed, why)),
            (None, Some(default)) => {
                Ok(Some(parse(default).unwrap_or_else(|_| {
                    unreachable!("the default of {key:?} is one of its values")
                })))
            }
            (None, None) => Ok(None),
        }
    }

    /// Returns whether a setting was written in any source.
    fn is_written(&self, key: Key) -> Result<bool, ConfigError> {
        Ok(self.written.text(key)?.is_some())
    }

    /// Returns the error for a value that is valid by itself but conflicts with another one.
    fn invalid(&self, key: Key, allowed: &str) -> ConfigError {
        match self.written.text(key) {
            Ok(Some((origin, text))) => invalid(key.name(), origin, text, allowed, None),
            Ok(None) => unreachable!("only a value that was written is refused"),
            Err(error) => error,
        }
    }

    /// Reads the timeout of cells, and the largest timeout that a caller may request. If only one
    /// of the two is written, it changes the default of the other.
    fn timeouts(&self) -> Result<(Duration, Duration), ConfigError> {
        let (timeout, largest) = (
            self.duration(Key::Timeout)?,
            self.duration(Key::MaxTimeout)?,
        );
        if timeout <= largest {
            return Ok((timeout, largest));
        }
        match (
            self.is_written(Key::Timeout)?,
            self.is_written(Key::MaxTimeout)?,
        ) {
            (true, true) => {
                let allowed = format!("at most max_timeout, which is {}", format_duration(largest));
                Err(self.invalid(Key::Timeout, &allowed))
            }
            (true, false) => Ok((timeout, timeout)),
            (false, _) => Ok((largest, largest)),
        }
    }

    fn cpus(&self, cores: f64) -> Result<f64, ConfigError> {
        let range = 0.05..=cores;
        let most = format!("a number from {} to {}", range.start(), range.end());
        let default = !self.is_written(Key::Cpus)?;
        let cpus = self.read(Key::Cpus, &most, |text| {
            let cpus = text.trim().parse::<f64>();
            within(
                cpus.map(|cpus| if default { cpus.min(cores) } else { cpus }),
                &range,
            )
        });
        cpus.map(has_default)
    }

    /// Reads the memory limit of a session together with its checkpoints and forks. A limit below
    /// the memory of one session would be a second, hidden limit for every session.
    fn family_memory(&self, memory: u64) -> Result<u64, ConfigError> {
        match self.optional_size(Key::FamilyMemory)? {
            None => Ok(2 * memory),
            Some(family) if family >= memory => Ok(family),
            Some(_) => Err(self.invalid(
                Key::FamilyMemory,
                &format!("at least memory, which is {}", format_size(memory)),
            )),
        }
    }

    fn quotas(&self) -> Result<Quotas, ConfigError> {
        Ok(Quotas {
            sessions: self.optional_number(Key::QuotaSessions)?,
            memory: self.optional_size(Key::QuotaMemory)?,
            processor_time: self.optional_duration(Key::QuotaCpu)?,
            processor_window: self.duration(Key::QuotaCpuWindow)?,
            cells_per_minute: self.optional_number(Key::QuotaCells)?,
            starts_per_minute: self.optional_number(Key::QuotaStarts)?,
            stored: self.optional_size(Key::QuotaStored)?,
        })
    }

    fn undo(&self, has_workspace: bool) -> Result<UndoSettings, ConfigError> {
        let checkpoints = self.number(Key::UndoCheckpoints)?;
        // Other people also write to a workspace, and undo would revert their work; the operator
        // must enable that explicitly.
        let files = match self.size(Key::UndoFiles)? {
            _ if has_workspace && !self.is_written(Key::UndoFiles)? => 0,
            files => files,
        };
        Ok(if self.switch(Key::Undo)? {
            UndoSettings::On { checkpoints, files }
        } else {
            UndoSettings::Off
        })
    }

    fn daemon_name(&self) -> Result<Option<DaemonName>, ConfigError> {
        self.read(
            Key::DaemonName,
            "a name of 1 to 32 letters, digits, `_` or `-`",
            |text| text.parse().map_err(|_| None),
        )
    }

    fn packages(&self) -> Result<PackageSettings, ConfigError> {
        let disk = self.size(Key::PackageDisk)?;
        Ok(PackageSettings {
            allowed: self.switch(Key::InstallPackages)?,
            size: self.size(Key::PackageSize)?,
            store_size: self.size(Key::PackageStoreSize)?,
            timeout: self.duration(Key::PackageTimeout)?,
            // Files there are in memory; the remainder is for the programs.
            memory: self
                .optional_size(Key::PackageMemory)?
                .unwrap_or(disk + MEMORY_OF_INSTALLER),
            disk,
        })
    }

    fn path(&self, key: Key) -> Result<Option<PathBuf>, ConfigError> {
        Ok(self
            .paths(key)?
            .and_then(|paths| paths.into_iter().next())
            .map(|(_, path)| path))
    }

    fn paths(&self, key: Key) -> Result<Option<Vec<(String, PathBuf)>>, ConfigError> {
        let Some((origin, texts)) = self.written.texts(key)? else {
            return Ok(None);
        };
        let paths = texts
            .into_iter()
            .map(|text| Ok((text.to_owned(), self.absolute(key.name(), origin, text)?)));
        paths.collect::<Result<_, _>>().map(Some)
    }

    /// Makes a path absolute: relative to the configuration file's folder if it is written there,
    /// otherwise to the current folder at startup.
    fn absolute(
        &self,
        key: &str,
        origin: &SettingOrigin,
        text: &str,
    ) -> Result<PathBuf, ConfigError> {
        if text.is_empty() || text.contains('\0') {
            return Err(invalid(key, origin, text, "a path", None));
        }
        Ok(self.at_its_place(origin, text))
    }

    fn at_its_place(&self, origin: &SettingOrigin, path: &str) -> PathBuf {
        let base = match origin {
            SettingOrigin::File { path, .. } => path.parent().unwrap_or(Path::new("/")),
            SettingOrigin::Variable(_) | SettingOrigin::Flag(_) => self.current_dir,
        };
        folders::absolute(path, base, self.home)
    }

    fn environment_name(&self) -> Result<EnvironmentName, ConfigError> {
        let name = self.read(Key::Environment, EnvironmentName::ALLOWED, |text| {
            EnvironmentName::new(text).ok_or(None)
        });
        name.map(has_default)
    }

    fn environments(&self) -> Result<BTreeMap<EnvironmentName, EnvironmentSpec>, ConfigError> {
        let mut environments: BTreeMap<_, _> = EnvironmentSpec::built_in()
            .into_iter()
            .map(|spec| (spec.name.clone(), spec))
            .collect();
        for (origin, written) in self.written.all(Key::Environments) {
            let members = table(Key::Environments.name(), origin, written)?;
            for member in members {
                let place = format!("environments.{}", member.name);
                let origin = origin.at(member.line);
                let Some(name) = EnvironmentName::new(&member.name) else {
                    return Err(invalid(
                        "environments",
                        &origin,
                        &member.name,
                        EnvironmentName::ALLOWED,
                        None,
                    ));
                };
                let entry = environments
                    .entry(name.clone())
                    .or_insert_with(|| EnvironmentSpec {
                        name,
                        packages: Vec::new(),
                        preload: Vec::new(),
                        python: PythonRequest::Any,
                    });
                self.change_environment(entry, &place, &origin, &member.value)?;
            }
        }
        Ok(environments)
    }

    fn change_environment(
        &self,
        spec: &mut EnvironmentSpec,
        place: &str,
        origin: &SettingOrigin,
        written: &WrittenValue,
    ) -> Result<(), ConfigError> {
        let mut preload_written = false;
        for member in table(place, origin, written)? {
            let origin = origin.at(member.line);
            let key = format!("{place}.{}", member.name);
            let texts = member.value.texts(&key, &origin)?;
            match member.name.as_str() {
                "packages" => {
                    // A custom package list need not contain the built-in preload modules.
                    if !preload_written {
                        spec.preload.clear();
                    }
                    spec.packages = all(
                        &key,
                        &origin,
                        &texts,
                        spec::REQUIREMENT_ALLOWED,
                        spec::is_requirement,
                    )?;
                }
                "preload" => {
                    preload_written = true;
                    spec.preload = all(
                        &key,
                        &origin,
                        &texts,
                        "module names such as numpy",
                        spec::is_module_name,
                    )?;
                }
                "python" => {
                    let [text] = texts[..] else {
                        return Err(layers::wrong_shape(&key, &origin, "a single value"));
                    };
                    let expanded = if text.contains('/') {
                        self.absolute(&key, &origin, text)?
                            .to_string_lossy()
                            .into_owned()
                    } else {
                        text.to_owned()
                    };
                    spec.python = PythonRequest::parse(&expanded).ok_or_else(|| {
                        invalid(&key, &origin, text, PythonRequest::ALLOWED, None)
                    })?;
                }
                other => {
                    let known = ["packages", "preload", "python"].into_iter();
                    return Err(layers::unknown_key(other, origin, known));
                }
            }
        }
        Ok(())
    }

    fn mounts(&self) -> Result<Vec<Mount>, ConfigError> {
        let mut mounts: Vec<Mount> = Vec::new();
        let Some((origin, texts)) = self.written.texts(Key::Mounts)? else {
            return Ok(mounts);
        };
        for text in texts {
            let refuse = |why: &str| {
                invalid(
                    Key::Mounts.name(),
                    origin,
                    text,
                    MOUNT_ALLOWED,
                    Some(why.to_owned()),
                )
            };
            let (rest, writable) = match text.strip_suffix(":ro") {
                Some(rest) => (rest, false),
                None => (text.strip_suffix(":rw").unwrap_or(text), true),
            };
            let (host, inside) = rest
                .rsplit_once(':')
                .ok_or_else(|| refuse("there is no \":\" between two paths"))?;
            let inside = relative_inside(inside).map_err(refuse)?;
            if let Some(other) = mounts
                .iter()
                .find(|other| folders::overlap(&other.inside, &inside))
            {
                return Err(refuse(&format!(
                    "it overlaps with the mount at \"{}\"",
                    other.inside.display()
                )));
            }
            let host = self.absolute(Key::Mounts.name(), origin, host)?;
            mounts.push(Mount {
                host,
                inside,
                writable,
            });
        }
        Ok(mounts)
    }

    /// Collects the variables of the sandbox, lowest precedence first: those passed on from the
    /// workspace's `.env` and from the server's own environment, then the files named by the
    /// operator, then single variables.
    fn variables(
        &self,
        in_workspace: &[(String, String)],
        surroundings: &BTreeMap<String, String>,
        read: ReadNamedFile<'_>,
    ) -> Result<SandboxVariables, ConfigError> {
        let mut variables = SandboxVariables::default();
        let mut pass_on = |name: &str, value: &str| {
            if let Some(inside) = name
                .strip_prefix(PASSED_ON)
                .filter(|inside| dotenv::is_variable_name(inside))
                && !value.contains('\0')
            {
                variables.set(inside.to_owned(), value.to_owned());
            }
        };
        in_workspace
            .iter()
            .for_each(|(name, value)| pass_on(name, value));
        surroundings
            .iter()
            .for_each(|(name, value)| pass_on(name, value));

        let origin = self
            .written
            .texts(Key::EnvFiles)?
            .map(|(origin, _)| origin.clone());
        for (_, path) in self.paths(Key::EnvFiles)?.unwrap_or_default() {
            let unreadable = |cause: io::Error| {
                let origin = origin
                    .clone()
                    .expect("a file that is named was named somewhere");
                ConfigError::NamedFile {
                    origin,
                    path: path.clone(),
                    cause: in_plain_words(cause),
                }
            };
            let text = read(NamedFile::ByOperator(&path)).map_err(unreadable)?;
            let text = text.ok_or_else(|| unreadable(io::ErrorKind::NotFound.into()))?;
            let entries = dotenv::parse(&text).map_err(|cause| ConfigError::EnvFile {
                path: path.clone(),
                cause,
            })?;
            for (name, value) in entries {
                if value.contains('\0') {
                    return Err(unreadable(io::Error::other("a value holds a NUL byte")));
                }
                variables.set(name, value);
            }
        }
        for (origin, written) in self.written.all(Key::Variables) {
            for (name, value) in pairs(origin, written)? {
                variables.set(name, value);
            }
        }
        Ok(variables)
    }

    fn profile(&self) -> Result<ProfileName, ConfigError> {
        let profile = self.value(Key::Profile, |text| {
            ProfileName::from_name(text).ok_or(None)
        });
        profile.map(has_default)
    }

    fn modules(&self, key: Key) -> Result<Vec<String>, ConfigError> {
        let Some((origin, texts)) = self.written.texts(key)? else {
            return Ok(Vec::new());
        };
        all(
            key.name(),
            origin,
            &texts,
            "module names such as math",
            spec::is_module_name,
        )
    }

    /// Reads the folder of images: a folder below the working folder, which may be given by its
    /// host path.
    fn images_dir(&self, workspace: Option<&Path>) -> Result<PathBuf, ConfigError> {
        let Some((origin, text)) = self.written.text(Key::ImagesDir)? else {
            let default = Key::ImagesDir.row().default.written();
            return Ok(PathBuf::from(has_default(default)));
        };
        let below = workspace.and_then(|workspace| {
            self.at_its_place(origin, text)
                .strip_prefix(workspace)
                .ok()
                .map(Path::to_owned)
        });
        let written = match below {
            Some(below) if Path::new(text).is_absolute() => below.to_string_lossy().into_owned(),
            _ => text.to_owned(),
        };
        let allowed = "a folder below the working folder, such as images";
        // Image file names are appended to it.
        if written.len() > MAX_FOLDER_LENGTH {
            return Err(invalid(
                Key::ImagesDir.name(),
                origin,
                text,
                allowed,
                Some("it is too long".to_owned()),
            ));
        }
        relative_inside(&written).map_err(|why| {
            invalid(
                Key::ImagesDir.name(),
                origin,
                text,
                allowed,
                Some(why.to_owned()),
            )
        })
    }

    fn package_index(&self) -> Result<PackageIndex, ConfigError> {
        let url = match self.written.text(Key::PackageIndex)? {
            None => None,
            Some((_, url)) if url.starts_with("https://") || url.starts_with("http://") => {
                Some(url.to_owned())
            }
            // It may hold a password, so it is not repeated.
            Some((origin, _)) => {
                let name = Key::PackageIndex.name();
                return Err(layers::wrong_shape(
                    name,
                    origin,
                    "an address that begins with https:// or http://",
                ));
            }
        };
        let hosts = self.written.texts(Key::PackageTrustedHosts)?;
        let trusted_hosts = hosts
            .map(|(_, hosts)| hosts.into_iter().map(str::to_owned).collect())
            .unwrap_or_default();
        Ok(PackageIndex { url, trusted_hosts })
    }

    fn allow_missing(&self) -> Result<BTreeSet<LayerKind>, ConfigError> {
        let Some((origin, texts)) = self.written.texts(Key::AllowMissing)? else {
            return Ok(BTreeSet::new());
        };
        let allowed = format!(
            "layers out of: {}",
            LayerKind::ALL.map(LayerKind::name).join(", ")
        );
        let parse = |text: &&str| {
            LayerKind::from_name(text)
                .ok_or_else(|| invalid(Key::AllowMissing.name(), origin, text, &allowed, None))
        };
        texts.iter().map(parse).collect()
    }

    fn log_level(&self) -> Result<Option<String>, ConfigError> {
        self.value(Key::LogLevel, |text| {
            let level = match text.to_ascii_lowercase().as_str() {
                // The name that Python programs use.
                "critical" => "error".to_owned(),
                "warning" => "warn".to_owned(),
                level => level.to_owned(),
            };
            match Key::LogLevel.row().values {
                Values::Words(levels) if levels.contains(&level.as_str()) => Ok(level),
                _ => Err(None),
            }
        })
    }
}

/// Limit of a folder's path below the working folder, in bytes.
const MAX_FOLDER_LENGTH: usize = 1000;

const MOUNT_ALLOWED: &str =
    "HOST:RELATIVE or HOST:RELATIVE:ro, where RELATIVE is a path below the working folder";

/// Checks the form of a path below the working folder.
fn relative_inside(text: &str) -> Result<PathBuf, &'static str> {
    let mut path = PathBuf::new();
    if text.contains(char::is_control) {
        return Err("the inside path holds a control character");
    }
    for component in Path::new(text).components() {
        match component {
            Component::Normal(part) if part.len() <= 255 => path.push(part),
            Component::Normal(_) => {
                return Err("a part of the inside path is longer than 255 bytes");
            }
            Component::CurDir => {}
            Component::ParentDir => return Err("the inside path may not hold \"..\""),
            Component::RootDir | Component::Prefix(_) => {
                return Err("the inside path must be relative");
            }
        }
    }
    if path.as_os_str().is_empty() {
        Err("the inside path is empty")
    } else {
        Ok(path)
    }
}

/// Parses variables written as a table or as `KEY=VALUE` texts. No error contains a value.
fn pairs(
    origin: &SettingOrigin,
    written: &WrittenValue,
) -> Result<Vec<(String, String)>, ConfigError> {
    let refuse = |origin: SettingOrigin, name: &str, why: &'static str| ConfigError::Variable {
        origin,
        name: name.to_owned(),
        why,
    };
    let mut pairs: Vec<(SettingOrigin, String, String)> = Vec::new();
    match written {
        WrittenValue::Nothing => {}
        WrittenValue::Table(members) => {
            for member in members {
                let value = match &member.value {
                    WrittenValue::Text(value) => value.clone(),
                    WrittenValue::Nothing => String::new(),
                    _ => {
                        return Err(refuse(
                            origin.at(member.line),
                            &member.name,
                            "its value must be a single text",
                        ));
                    }
                };
                pairs.push((origin.at(member.line), member.name.clone(), value));
            }
        }
        written => {
            for (index, text) in written
                .texts(Key::Variables.name(), origin)?
                .into_iter()
                .enumerate()
            {
                // The text is not repeated: without "=" it may be the secret itself.
                let number = format!("number {}", index + 1);
                let (name, value) = text
                    .split_once('=')
                    .ok_or_else(|| refuse(origin.clone(), &number, "it must be KEY=VALUE"))?;
                pairs.push((origin.clone(), name.to_owned(), value.to_owned()));
            }
        }
    }
    for (origin, name, value) in &pairs {
        if !dotenv::is_variable_name(name) {
            let why = "a name is letters, digits and \"_\", and does not start with a digit";
            return Err(refuse(origin.clone(), name, why));
        }
        if value.contains('\0') {
            return Err(refuse(origin.clone(), name, "its value holds a NUL byte"));
        }
    }
    Ok(pairs
        .into_iter()
        .map(|(_, name, value)| (name, value))
        .collect())
}

fn table<'a>(
    key: &str,
    origin: &SettingOrigin,
    written: &'a WrittenValue,
) -> Result<&'a [WrittenMember], ConfigError> {
    match written {
        WrittenValue::Table(members) => Ok(members),
        WrittenValue::Nothing => Ok(&[]),
        WrittenValue::Text(_) | WrittenValue::List(_) => Err(layers::wrong_shape(
            key,
            origin,
            "a table of \"key: value\" lines",
        )),
    }
}

fn all(
    key: &str,
    origin: &SettingOrigin,
    texts: &[&str],
    allowed: &str,
    fits: fn(&str) -> bool,
) -> Result<Vec<String>, ConfigError> {
    match texts.iter().find(|text| !fits(text)) {
        Some(misfit) => Err(invalid(key, origin, misfit, allowed, None)),
        None => Ok(texts.iter().map(|text| (*text).to_owned()).collect()),
    }
}

fn invalid(
    key: &str,
    origin: &SettingOrigin,
    given: &str,
    allowed: &str,
    why: Option<String>,
) -> ConfigError {
    ConfigError::Invalid(Box::new(InvalidValue {
        key: key.to_owned(),
        origin: origin.clone(),
        given: format!("\"{given}\""),
        allowed: allowed.to_owned(),
        why,
    }))
}

/// Unwraps a value whose setting has a default.
fn has_default<T>(value: Option<T>) -> T {
    value.expect("the row of the setting has a default")
}

/// Checks that a parsed value is inside `range`, or returns the reason why it is rejected.
fn within<T: PartialOrd, E: Display>(
    reading: Result<T, E>,
    range: &RangeInclusive<T>,
) -> Result<T, Option<String>> {
    let value = reading.map_err(|error| Some(error.to_string()))?;
    if range.contains(&value) {
        Ok(value)
    } else {
        Err(None)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::shown::{self, ShownSetting};
    use super::*;

    /// One case: sources in, settings out.
    pub(in crate::config) struct Case {
        pub(super) sources: Sources,
        files: BTreeMap<PathBuf, String>,
    }

    pub(in crate::config) fn case() -> Case {
        let machine = MachineFacts {
            cores: 4,
            user_id: 7,
            current_dir: "/here".into(),
            temporary_dir: "/tmp".into(),
        };
        let variables = BTreeMap::from([("HOME".to_owned(), "/home/me".to_owned())]);
        Case {
            sources: Sources {
                file: None,
                variables,
                flags: Flags::default(),
                machine,
            },
            files: BTreeMap::new(),
        }
    }

    impl Case {
        pub(in crate::config) fn yaml(mut self, text: &str) -> Case {
            self.sources.file = Some(("/etc/cellblock/config.yaml".into(), text.to_owned()));
            self
        }

        pub(in crate::config) fn variable(mut self, name: &str, value: &str) -> Case {
            self.sources
                .variables
                .insert(name.to_owned(), value.to_owned());
            self
        }

        pub(in crate::config) fn flag(mut self, key: Key, value: &str) -> Case {
            self.sources.flags = self.sources.flags.single(key, Some(value.to_owned()));
            self
        }

        /// A flag under another name than its present one.
        fn flag_as(mut self, key: Key, flag: &'static str, value: &str) -> Case {
            let values = vec![value.to_owned()];
            self.sources.flags = self.sources.flags.given_as(key, flag, values);
            self
        }

        pub(in crate::config) fn flags(mut self, key: Key, values: &[&str]) -> Case {
            let values = values.iter().map(|value| (*value).to_owned()).collect();
            self.sources.flags = self.sources.flags.repeated(key, values);
            self
        }

        pub(in crate::config) fn file(mut self, path: &str, text: &str) -> Case {
            self.files.insert(path.into(), text.to_owned());
            self
        }

        pub(in crate::config) fn result(self) -> Result<Settings, ConfigError> {
            self.settled().map(|(settings, _)| settings)
        }

        fn settled(self) -> Result<(Settings, Merged), ConfigError> {
            let files = self.files;
            settle(self.sources, &|file| {
                let (NamedFile::ByOperator(path) | NamedFile::InWorkspace(path)) = file;
                Ok(files.get(path).cloned())
            })
        }

        /// The settings as they are shown.
        pub(in crate::config) fn shown(self) -> Vec<ShownSetting> {
            let variables = self.sources.variables.clone();
            let (settings, written) = self.settled().expect("it should be accepted");
            shown::settings(&settings, &written, &variables)
        }

        pub(in crate::config) fn settings(self) -> Settings {
            self.result().expect("it should be accepted")
        }

        pub(in crate::config) fn refusal(self) -> String {
            self.result().expect_err("it should be refused").to_string()
        }
    }

    fn name(text: &str) -> EnvironmentName {
        EnvironmentName::new(text).unwrap()
    }

    #[test]
    fn without_any_source_the_defaults_hold() {
        let settings = case().settings();
        assert_eq!(settings.workspace, None);
        assert_eq!(settings.allowed_dirs, Vec::<PathBuf>::new());
        assert_eq!(settings.environment, name("default"));
        assert_eq!(settings.environments.len(), 2);
        let limits = SandboxLimits {
            memory: 2 << 30,
            family_memory: 4 << 30,
            cpus: 2.0,
            processes: 256,
            disk: 1 << 30,
            files: 100_000,
        };
        assert_eq!(settings.limits, limits);
        assert_eq!(settings.timeout, Duration::from_secs(120));
        assert_eq!(settings.max_timeout, Duration::from_secs(3600));
        assert_eq!(settings.max_sessions, 64);
        assert_eq!(settings.idle_timeout, Duration::from_secs(3600));
        assert_eq!(settings.pool, 2);
        assert_eq!(
            settings.undo,
            UndoSettings::On {
                checkpoints: 10,
                files: 64 << 20
            }
        );
        assert_eq!((settings.explore_parallel, settings.max_running), (4, 16));
        assert_eq!(settings.quotas, Quotas::default());
        assert_eq!(
            settings.data_dir,
            Path::new("/home/me/.local/share/cellblock")
        );
        assert_eq!(settings.runtime_dir, Path::new("/tmp/cellblock-7"));
        assert!(
            settings.allow_missing.is_empty()
                && settings.mounts.is_empty()
                && settings.notices.is_empty()
        );
    }

    #[test]
    fn a_machine_with_one_core_gets_one() {
        let mut case = case();
        case.sources.machine.cores = 1;
        assert_eq!(case.settings().limits.cpus, 1.0);
    }

    #[test]
    fn a_former_name_works_in_every_source_and_each_use_is_reported_once() {
        let named = |case: Case| {
            let settings = case.settings();
            let name = settings.daemon_name.expect("it was written");
            (name.to_string(), settings.former_names)
        };
        let ends = "the former name works in this release only";
        let in_file =
            format!("/etc/cellblock/config.yaml line 2: keeper is now called daemon_name; {ends}");
        let variable = format!("CELLBLOCK_KEEPER is now called CELLBLOCK_DAEMON_NAME; {ends}");
        let flag = format!("--keeper is now called --daemon-name; {ends}");
        let file = || case().yaml("cpus: 1\nkeeper: a");
        assert_eq!(named(file()), ("a".to_owned(), vec![in_file.clone()]));
        let with_variable = || file().variable("CELLBLOCK_KEEPER", "b");
        let both = vec![in_file.clone(), variable.clone()];
        assert_eq!(named(with_variable()), ("b".to_owned(), both));
        let all = with_variable().flag_as(Key::DaemonName, "--keeper", "c");
        assert_eq!(named(all), ("c".to_owned(), vec![in_file, variable, flag]));
        let present = case().yaml("daemon_name: a");
        assert_eq!(named(present), ("a".to_owned(), vec![])); // control
    }

    #[test]
    fn names_of_one_setting_with_different_values_in_one_source_are_refused() {
        let flags = |former: &str, present: &str| {
            case()
                .flag_as(Key::DaemonName, "--keeper", former)
                .flag(Key::DaemonName, present)
        };
        let variables = |former: &str, present: &str| {
            case()
                .variable("CELLBLOCK_KEEPER", former)
                .variable("CELLBLOCK_DAEMON_NAME", present)
        };
        let files = |former: &str, present: &str| {
            case().yaml(&format!("daemon_name: {present}\nkeeper: {former}"))
        };
        let is = "is the former name of";
        for (refusal, words) in [
            (
                flags("a", "b").refusal(),
                format!("--keeper {is} --daemon-name"),
            ),
            (
                variables("a", "b").refusal(),
                format!("CELLBLOCK_KEEPER {is} CELLBLOCK_DAEMON_NAME"),
            ),
            (
                files("a", "b").refusal(),
                format!("/etc/cellblock/config.yaml line 2: keeper {is} daemon_name"),
            ),
        ] {
            assert!(refusal.contains(&words), "{refusal}");
        }
        // Controls: the same value twice, and a source that wins over another.
        for case in [flags("a", "a"), variables("a", "a"), files("a", "a")] {
            assert_eq!(case.settings().former_names.len(), 1);
        }
        let over_file = case()
            .yaml("keeper: a")
            .variable("CELLBLOCK_DAEMON_NAME", "b");
        let name = over_file.settings().daemon_name.expect("it was written");
        assert_eq!(name.as_str(), "b");
    }

    #[test]
    fn flags_win_over_variables_and_variables_over_the_file() {
        let yaml = "memory: 1G\ncpus: 1\ntimeout: 10";
        let settings = case()
            .yaml(yaml)
            .variable("CELLBLOCK_MEMORY", "2G")
            .variable("CELLBLOCK_CPUS", "1.5")
            .flag(Key::Cpus, "3");
        let settings = settings.settings();
        assert_eq!(
            (settings.limits.memory, settings.limits.cpus),
            (2 << 30, 3.0)
        );
        assert_eq!(settings.timeout, Duration::from_secs(10));
    }

    #[test]
    fn a_refused_value_names_key_place_value_and_range() {
        assert_eq!(
            case().yaml("cpus: 1\nmemory: 2X\n").refusal(),
            "/etc/cellblock/config.yaml line 2: memory cannot be \"2X\" (the unit \"X\" is not \
             known); allowed: a size such as 512M or \
             2GiB, from 64 MiB to 16 TiB"
        );
        assert!(
            case()
                .variable("CELLBLOCK_MEMORY", "1M")
                .refusal()
                .starts_with("CELLBLOCK_MEMORY: memory cannot be \"1M\";")
        );
        assert!(
            case()
                .flag(Key::Cpus, "5")
                .refusal()
                .contains("from 0.05 to 4")
        );
        assert!(
            case()
                .flag(Key::Cpus, "NaN")
                .refusal()
                .starts_with("--cpus: cpus cannot be \"NaN\"")
        );
        assert!(
            case()
                .yaml("max_sessions: 0")
                .refusal()
                .contains("from 1 to 10000")
        );
        assert!(case().yaml("max_sessions: -1").refusal().contains("-1"));
        assert!(case().yaml("max_sessions: many").refusal().contains("many"));
        assert!(
            case()
                .yaml("timeout: 0")
                .refusal()
                .contains("from 1 s to 1 d")
        );
        assert!(
            case()
                .yaml("memory: {a: 1}")
                .refusal()
                .contains("a single value")
        );
    }

    #[test]
    fn a_timeout_beyond_the_largest_is_refused_only_when_both_are_written() {
        assert!(
            case()
                .yaml("timeout: 2m\nmax_timeout: 1m")
                .refusal()
                .contains("max_timeout")
        );
        assert_eq!(
            case().yaml("timeout: 2h").settings().max_timeout,
            Duration::from_secs(7200)
        );
        assert_eq!(
            case().yaml("max_timeout: 1m").settings().timeout,
            Duration::from_secs(60)
        );
    }

    #[test]
    fn relative_paths_start_at_the_file_or_at_the_folder_we_were_started_in() {
        assert_eq!(
            case().yaml("workspace: work").settings().workspace,
            Some("/etc/cellblock/work".into())
        );
        assert_eq!(
            case().flag(Key::Workspace, "work").settings().workspace,
            Some("/here/work".into())
        );
        assert_eq!(
            case()
                .variable("CELLBLOCK_WORKSPACE", "../w")
                .settings()
                .workspace,
            Some("/w".into())
        );
        assert_eq!(
            case().flag(Key::Workspace, "~/w").settings().workspace,
            Some("/home/me/w".into())
        );
        assert_eq!(
            case().flag(Key::DataDir, "/d").settings().data_dir,
            Path::new("/d")
        );
    }

    #[test]
    fn the_workspace_is_allowed_unless_others_are_named() {
        assert_eq!(
            case().flag(Key::Workspace, "w").settings().allowed_dirs,
            [Path::new("/here/w")]
        );
        let named = case()
            .flag(Key::Workspace, "w")
            .flags(Key::AllowedDirs, &["/a", "b"])
            .settings();
        assert_eq!(named.allowed_dirs, [Path::new("/a"), Path::new("/here/b")]);
    }

    #[test]
    fn environments_are_added_and_changed_by_the_file() {
        let yaml = "environment: science\nenvironments:\n  science:\n    packages: [scipy, \
                    'numpy>=2']\n    preload: [scipy]\n    \
                    python: '3.12'\n  default:\n    packages: [polars]\n";
        let settings = case().yaml(yaml).settings();
        let science = &settings.environments[&name("science")];
        assert_eq!(science.packages, ["scipy", "numpy>=2"]);
        assert_eq!(science.python, PythonRequest::Version("3.12".to_owned()));
        let changed = &settings.environments[&name("default")];
        assert_eq!(
            (changed.packages.as_slice(), changed.preload.len()),
            (["polars".to_owned()].as_slice(), 0)
        );
        assert_eq!(
            settings.environments[&name("minimal")].packages,
            ["ipython"]
        );
    }

    #[test]
    fn changing_only_the_python_keeps_the_packages() {
        let settings = case()
            .yaml("environments: {default: {python: 3.13}}")
            .settings();
        let changed = &settings.environments[&name("default")];
        assert_eq!(changed.packages, EnvironmentSpec::built_in()[0].packages);
        assert_eq!(changed.preload.len(), 3);
        assert_eq!(changed.python, PythonRequest::Version("3.13".to_owned()));
    }

    #[test]
    fn mistakes_in_an_environment_are_refused_with_their_place() {
        let refusal = |yaml: &str| case().yaml(yaml).refusal();
        assert!(
            refusal("environments:\n  a:\n    package: [x]")
                .contains("line 3: there is no setting \"package\"; did you mean \"packages\"?")
        );
        assert!(refusal("environments: {A: {}}").contains("lower-case"));
        assert!(
            refusal("environments: {a: {packages: [--index-url=x]}}")
                .contains("environments.a.packages")
        );
        assert!(
            refusal("environments: {a: {preload: ['os;x']}}").contains("environments.a.preload")
        );
        assert!(refusal("environments: {a: {python: 3.9}}").contains("from 3.10 on"));
        assert!(refusal("environments: [a]").contains("table"));
    }

    #[test]
    fn mounts_are_read_with_their_mode() {
        let settings = case()
            .flags(
                Key::Mounts,
                &["data:in/data:ro", "/x:y", "/p:q:rw", "/a:b:c"],
            )
            .settings();
        let mount = |host: &str, inside: &str, writable| Mount {
            host: host.into(),
            inside: inside.into(),
            writable,
        };
        let expected = [
            mount("/here/data", "in/data", false),
            mount("/x", "y", true),
            mount("/p", "q", true),
            mount("/a:b", "c", true),
        ];
        assert_eq!(settings.mounts, expected);
    }

    #[test]
    fn a_mount_that_leaves_the_working_folder_is_refused() {
        for bad in [
            "/x",
            "/x:",
            "/x:/y",
            "/x:../y",
            "/x:a/../../y",
            "/x:.",
            ":y",
            "/x:y\n",
            "/x:ro",
        ] {
            let accepted = case().flags(Key::Mounts, &[bad]).result();
            match bad {
                // The whole text is HOST:RELATIVE here: a folder called "ro" cannot be
                // distinguished from the mode.
                "/x:ro" => assert!(accepted.unwrap_err().to_string().contains("no \":\"")),
                _ => assert!(accepted.is_err(), "{bad:?}"),
            }
        }
        assert!(
            case()
                .flags(Key::Mounts, &["/x:a", "/y:a/b"])
                .refusal()
                .contains("overlaps")
        );
    }

    #[test]
    fn only_marked_variables_of_the_server_reach_the_inside() {
        let settings = case()
            .variable("KERNEL_ENV_TOKEN", "t")
            .variable("AWS_SECRET", "s")
            .variable("KERNEL_ENV_", "x")
            .settings();
        assert_eq!(
            settings.variables.iter().collect::<Vec<_>>(),
            [("TOKEN", "t")]
        );
    }

    #[test]
    fn the_env_file_of_a_relative_workspace_is_found_and_never_overrides_the_real_environment() {
        let dotenv = "KERNEL_ENV_A=file\nKERNEL_ENV_B=file\nOTHER=file\n";
        let settings = case()
            .flag(Key::Workspace, "w")
            .file("/here/w/.env", dotenv)
            .variable("KERNEL_ENV_B", "real")
            .settings();
        assert_eq!(
            settings.variables.iter().collect::<Vec<_>>(),
            [("A", "file"), ("B", "real")]
        );
    }

    #[test]
    fn later_sources_of_variables_win() {
        let case = case()
            .variable("KERNEL_ENV_A", "passed on")
            .variable("KERNEL_ENV_B", "passed on")
            .variable("KERNEL_ENV_C", "passed on")
            .flags(Key::EnvFiles, &["x.env"])
            .file("/here/x.env", "B=from a file\nC=from a file\nD=from a file")
            .yaml("variables: {C: from yaml, E: 5}")
            .flags(Key::Variables, &["E=from a flag", "F=a=b"]);
        let settings = case.settings();
        let expected = [
            ("A", "passed on"),
            ("B", "from a file"),
            ("C", "from yaml"),
            ("D", "from a file"),
            ("E", "from a flag"),
            ("F", "a=b"),
        ];
        assert_eq!(settings.variables.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn refused_variables_never_show_their_value() {
        for bad in ["hunter2", "1A=hunter2", "=hunter2", "A=hunter2\0"] {
            let refusal = case().flags(Key::Variables, &["OK=1", bad]).refusal();
            assert!(
                refusal.starts_with("--env-var: ") && !refusal.contains("hunter2"),
                "{refusal}"
            );
        }
        assert!(
            !case()
                .yaml("variables: {A: [hunter2]}")
                .refusal()
                .contains("hunter2")
        );
        let broken = case()
            .flags(Key::EnvFiles, &["x.env"])
            .file("/here/x.env", "A='hunter2")
            .result()
            .unwrap_err();
        let broken = format!("{:#}", anyhow::Error::from(broken));
        assert!(
            broken.starts_with("could not read variables from /here/x.env: line 1")
                && !broken.contains("hunter2")
        );
    }

    #[test]
    fn printing_settings_shows_no_value_of_a_variable() {
        let settings = case().flags(Key::Variables, &["TOKEN=hunter2"]).settings();
        let printed = format!("{settings:?}");
        assert!(printed.contains("TOKEN") && !printed.contains("hunter2"));
    }

    #[test]
    fn a_missing_file_named_by_the_operator_is_refused_and_a_broken_workspace_file_is_a_notice() {
        assert!(
            case()
                .flags(Key::EnvFiles, &["gone.env"])
                .refusal()
                .contains("/here/gone.env")
        );
        let settings = case()
            .flag(Key::Workspace, "w")
            .file("/here/w/.env", "nonsense")
            .settings();
        assert_eq!(
            settings.notices,
            ["the workspace's .env is not used: line 1: there is no \"=\""]
        );
    }

    #[test]
    fn layers_that_may_be_missing_are_known_by_name() {
        let settings = case()
            .flags(Key::AllowMissing, &["landlock", "resources"])
            .settings();
        assert_eq!(
            settings.allow_missing,
            BTreeSet::from([LayerKind::Landlock, LayerKind::Resources])
        );
        assert_eq!(
            case()
                .variable("CELLBLOCK_ALLOW_MISSING", "landlock,network")
                .settings()
                .allow_missing
                .len(),
            2
        );
        assert!(
            case()
                .flags(Key::AllowMissing, &["everything"])
                .refusal()
                .contains("system-calls")
        );
    }

    #[test]
    fn the_log_follows_the_setting_then_rust_log() {
        assert_eq!(case().settings().log_filter, None);
        assert_eq!(
            case()
                .variable("RUST_LOG", "hyper=off")
                .settings()
                .log_filter
                .as_deref(),
            Some("hyper=off")
        );
        let both = case()
            .variable("RUST_LOG", "hyper=off")
            .flag(Key::LogLevel, "DEBUG")
            .settings();
        assert_eq!(both.log_filter.as_deref(), Some("debug"));
        assert!(
            case()
                .flag(Key::LogLevel, "loud")
                .refusal()
                .contains("error, warn, info, debug, trace")
        );
    }

    #[test]
    fn the_pool_is_never_larger_than_the_number_of_sessions() {
        assert_eq!(case().yaml("max_sessions: 1").settings().pool, 1);
        assert_eq!(case().yaml("pool: 0").settings().pool, 0);
    }

    #[test]
    fn undo_is_written_as_a_word_and_can_be_switched_off_everywhere() {
        for off in [
            case().yaml("undo: off"),
            case().yaml("undo: 'OFF'"),
            case().yaml("undo: false"),
        ] {
            assert_eq!(off.settings().undo, UndoSettings::Off);
        }
        assert_eq!(
            case().variable("CELLBLOCK_UNDO", "off").settings().undo,
            UndoSettings::Off
        );
        assert_eq!(
            case().flag(Key::Undo, "off").settings().undo,
            UndoSettings::Off
        );
        let on = case()
            .yaml("undo: off\nundo_checkpoints: 3\nundo_files: 0")
            .flag(Key::Undo, "on")
            .settings();
        assert_eq!(
            on.undo,
            UndoSettings::On {
                checkpoints: 3,
                files: 0
            }
        );
        let files = |settings: Settings| match settings.undo {
            UndoSettings::On { files, .. } => Some(files),
            UndoSettings::Off => None,
        };
        assert_eq!(files(case().settings()), Some(64 << 20));
        assert_eq!(
            files(case().flag(Key::Workspace, "work").settings()),
            Some(0),
            "a workspace is left alone"
        );
        assert_eq!(
            files(
                case()
                    .flag(Key::Workspace, "work")
                    .flag(Key::UndoFiles, "1M")
                    .settings()
            ),
            Some(1 << 20)
        );
        assert!(
            case()
                .flag(Key::Undo, "maybe")
                .refusal()
                .contains("allowed: on or off")
        );
        assert!(
            case()
                .flag(Key::UndoCheckpoints, "0")
                .refusal()
                .contains("from 1 to 100")
        );
        assert!(
            case()
                .flag(Key::UndoCheckpoints, "101")
                .refusal()
                .contains("from 1 to 100")
        );
        assert!(
            case()
                .flag(Key::UndoFiles, "some")
                .refusal()
                .starts_with("--undo-files: undo_files")
        );
    }

    #[test]
    fn quotas_are_read_and_none_is_so_small_that_nothing_works() {
        let text = "quota_sessions: 5\nquota_memory: 4G\nquota_cpu: 30m\nquota_cpu_window: \
                    6h\nquota_cells: 120\n\
                    quota_starts: 20\nquota_stored: 1G\nmax_running: 0";
        let settings = case().yaml(text).settings();
        let expected = Quotas {
            sessions: Some(5),
            memory: Some(4 << 30),
            processor_time: Some(Duration::from_secs(1800)),
            processor_window: Duration::from_secs(6 * 3600),
            cells_per_minute: Some(120),
            starts_per_minute: Some(20),
            stored: Some(1 << 30),
        };
        assert_eq!((settings.quotas, settings.max_running), (expected, 0));
        for (setting, allowed) in [
            ("quota_sessions: 0", "from 1"),
            ("quota_memory: 1M", "from 64 MiB"),
            ("quota_cpu: 0", "from 1 s"),
            ("quota_cpu_window: 1s", "from 60 s"),
            ("quota_cells: 0", "from 1"),
            ("quota_starts: many", "from 1"),
            ("quota_stored: 1", "from 1 MiB"),
            ("max_running: -1", "from 0"),
        ] {
            let refusal = case().yaml(setting).refusal();
            assert!(refusal.contains(allowed), "{setting}: {refusal}");
        }
        assert_eq!(
            case()
                .variable("CELLBLOCK_QUOTA_CELLS", "7")
                .settings()
                .quotas
                .cells_per_minute,
            Some(7)
        );
    }

    #[test]
    fn variants_run_side_by_side_on_as_many_cores_as_there_are_but_not_on_more_than_sixteen() {
        let with_cores = |cores| {
            let mut case = case();
            case.sources.machine.cores = cores;
            case.settings().explore_parallel
        };
        assert_eq!([0, 1, 3, 64].map(with_cores), [1, 1, 3, 16]);
        assert_eq!(
            case()
                .flag(Key::ExploreParallel, "16")
                .settings()
                .explore_parallel,
            16
        );
        assert!(
            case()
                .flag(Key::ExploreParallel, "17")
                .refusal()
                .contains("from 1 to 16")
        );
        assert!(
            case()
                .flag(Key::ExploreParallel, "0")
                .refusal()
                .contains("from 1 to 16")
        );
    }

    #[test]
    fn a_family_has_twice_the_memory_of_a_session_and_never_less_than_one() {
        assert_eq!(
            case().yaml("memory: 1G").settings().limits.family_memory,
            2 << 30
        );
        assert_eq!(
            case()
                .yaml("memory: 1G\nfamily_memory: 1G")
                .settings()
                .limits
                .family_memory,
            1 << 30
        );
        let refusal = case().yaml("memory: 1G\nfamily_memory: 1023M").refusal();
        assert!(
            refusal.contains(
                "family_memory cannot be \"1023M\"; allowed: at least memory, which is 1 GiB"
            ),
            "{refusal}"
        );
    }

    #[test]
    fn profiles_are_known_by_name() {
        assert_eq!(
            case().flag(Key::Profile, "default").settings().profile,
            ProfileName::Default
        );
        assert!(
            case()
                .flag(Key::Profile, "other")
                .refusal()
                .contains("one of: default")
        );
    }
}
