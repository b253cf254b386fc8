//! Settings as `cellblock config show` prints them: the effective values, and where they were
//! written.
//!
//! Values are those that a server would use, after all sources were merged and checked. No value
//! that can be a secret is shown: variables and MCP servers by name, secrets by name and hosts,
//! URLs without user names and queries.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::checks::PASSED_ON;
use super::layers::{Merged, SettingOrigin};
use super::quantity::{format_duration, format_size};
use super::table::Key;
use super::{BackendChoice, ContainerChoice, Settings, UndoSettings};
use crate::audit::{AuditSettings, OnFailure, Sync};
use crate::auth::{AuthChoice, AuthSettings, IssuerVariables};
use crate::sandbox::LayerKind;
use crate::sandbox::container::EngineKind;

/// The placeholder for hidden values.
const HIDDEN: &str = "[hidden]";

/// One setting.
#[derive(Debug, Clone, PartialEq)]
pub struct ShownSetting {
    pub name: &'static str,
    /// A text, a list of texts, or null if it is not set.
    pub value: Value,
    /// Where it was written, lowest precedence first; empty for a default.
    pub origins: Vec<String>,
}

/// Variables of other programs that serve as the default of a setting, highest precedence first.
const FOLLOWED: [(Key, &str); 7] = [
    (Key::LogLevel, "RUST_LOG"),
    (Key::OtlpEndpoint, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    (Key::OtlpEndpoint, "OTEL_EXPORTER_OTLP_ENDPOINT"),
    (Key::Auth, "MCP_JWKS_URI"),
    (Key::Auth, "MCP_PUBLIC_KEY_PATH"),
    (Key::DataDir, "STATE_DIRECTORY"),
    (Key::DataDir, "XDG_DATA_HOME"),
];

/// The effective value of a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SettingValue {
    Nothing,
    Size(u64),
    Duration(Duration),
    Text(String),
    List(Vec<String>),
}

impl SettingValue {
    fn shown(self) -> Value {
        match self {
            SettingValue::Nothing => Value::Null,
            SettingValue::Size(bytes) => json!(format_size(bytes)),
            SettingValue::Duration(duration) => json!(format_duration(duration)),
            SettingValue::Text(text) => json!(text),
            SettingValue::List(texts) => json!(texts),
        }
    }
}

/// Lists all settings by name.
pub(super) fn settings(
    settings: &Settings,
    written: &Merged,
    variables: &BTreeMap<String, String>,
) -> Vec<ShownSetting> {
    let mut keys: Vec<Key> = Key::all().collect();
    keys.sort_by_key(|key| key.name());
    let show = |key: Key| {
        let value = match value(settings, key) {
            SettingValue::Nothing => as_written(written, key),
            value => value,
        };
        let value = value.shown();
        let origins = origins(settings, written, variables, key, &value);
        ShownSetting {
            name: key.name(),
            value,
            origins,
        }
    };
    keys.into_iter().map(show).collect()
}

fn origins(
    settings: &Settings,
    written: &Merged,
    variables: &BTreeMap<String, String>,
    key: Key,
    value: &Value,
) -> Vec<String> {
    let place = |origin: &SettingOrigin| match origin {
        SettingOrigin::File {
            path,
            line: Some(line),
        } => format!("{}:{line}", path.display()),
        // The default settings of a profile have its flag as their origin.
        SettingOrigin::Flag("--profile") if key != Key::Profile => {
            format!("profile {}", settings.profile.name())
        }
        origin => origin.to_string(),
    };
    let mut origins: Vec<String> = Vec::new();
    if key == Key::Variables {
        origins.extend(
            variables
                .keys()
                .filter(|name| name.starts_with(PASSED_ON))
                .cloned(),
        );
        origins.extend(
            written
                .all(Key::EnvFiles)
                .iter()
                .map(|(origin, _)| place(origin)),
        );
    }
    origins.extend(written.all(key).iter().map(|(origin, _)| place(origin)));
    if origins.is_empty() && !value.is_null() {
        let is_set = |name: &str| {
            variables
                .get(name)
                .is_some_and(|value| !value.trim().is_empty())
        };
        let followed = FOLLOWED
            .iter()
            .find(|(followed, name)| *followed == key && is_set(name));
        origins.extend(followed.map(|(_, name)| (*name).to_owned()));
    }
    origins
}

/// Returns the value of a setting without its secrets. It is `Nothing` if other settings disable
/// it, or if its value was merged into theirs.
pub(crate) fn value(settings: &Settings, key: Key) -> SettingValue {
    let limits = &settings.limits;
    let (network, service) = (&settings.network, &settings.service);
    let approve = settings.approvals.policy.defaults();
    let containers = |value: &dyn Fn(&ContainerChoice) -> SettingValue| match &settings.backend {
        BackendChoice::Native => SettingValue::Nothing,
        BackendChoice::Containers(choice) => value(choice),
    };
    let undo = |value: &dyn Fn(usize, u64) -> SettingValue| match settings.undo {
        UndoSettings::Off => SettingValue::Nothing,
        UndoSettings::On { checkpoints, files } => value(checkpoints, files),
    };
    let audit = |value: &dyn Fn(&AuditSettings) -> SettingValue| match &settings.audit {
        None => SettingValue::Nothing,
        Some(log) => value(&log.settings),
    };
    match key {
        Key::Workspace => path(&settings.workspace),
        Key::AllowedDirs => list(settings.allowed_dirs.iter().map(|folder| folder.display())),
        Key::Environment => text(&settings.environment),
        Key::Environments => list(settings.environments.keys()),
        Key::Mounts => list(settings.mounts.iter().map(|mount| {
            let end = if mount.writable { "" } else { ":ro" };
            format!("{}:{}{end}", mount.host.display(), mount.inside.display())
        })),
        Key::Variables => list(
            settings
                .variables
                .iter()
                .map(|(name, _)| format!("{name}={HIDDEN}")),
        ),
        Key::Memory => size(limits.memory),
        Key::FamilyMemory => size(limits.family_memory),
        Key::Cpus => text(limits.cpus),
        Key::Processes => text(limits.processes),
        Key::Disk => size(limits.disk),
        Key::Files => text(limits.files),
        Key::Timeout => duration(settings.timeout),
        Key::MaxTimeout => duration(settings.max_timeout),
        Key::MaxSessions => text(settings.max_sessions),
        Key::IdleTimeout => duration(settings.idle_timeout),
        Key::Pool => text(settings.pool),
        Key::PoolMaxAge => containers(&|choice| duration(choice.pool_max_age)),
        Key::PoolCreations => containers(&|choice| text(choice.pool_creations)),
        Key::Backend => text(match &settings.backend {
            BackendChoice::Native => "native",
            BackendChoice::Containers(ContainerChoice {
                kind: EngineKind::Docker,
                ..
            }) => "docker",
            BackendChoice::Containers(ContainerChoice {
                kind: EngineKind::Podman,
                ..
            }) => "podman",
        }),
        Key::Runtime => containers(&|choice| optional(&choice.runtime, text)),
        Key::ContainerTag => containers(&|choice| text(&choice.image)),
        Key::Undo => switch(settings.undo != UndoSettings::Off),
        Key::UndoCheckpoints => undo(&|checkpoints, _| text(checkpoints)),
        Key::UndoFiles => undo(&|_, files| size(files)),
        Key::ExploreParallel => text(settings.explore_parallel),
        Key::MaxRunning => text(settings.max_running),
        Key::QuotaSessions => optional(&settings.quotas.sessions, text),
        Key::QuotaMemory => optional(&settings.quotas.memory, |bytes| size(*bytes)),
        Key::QuotaCpu => optional(&settings.quotas.processor_time, |time| duration(*time)),
        Key::QuotaCpuWindow => duration(settings.quotas.processor_window),
        Key::QuotaCells => optional(&settings.quotas.cells_per_minute, text),
        Key::QuotaStarts => optional(&settings.quotas.starts_per_minute, text),
        Key::QuotaStored => optional(&settings.quotas.stored, |bytes| size(*bytes)),
        Key::AllowNetwork => text(match &network.rules {
            rules if rules.is_everything() => "all",
            rules if rules.is_empty() => "none",
            _ => "listed",
        }),
        // The hosts of secrets are among them.
        Key::AllowedDomains => list(network.rules.iter().filter(|rule| !rule.is_denial())),
        Key::DeniedDomains => list(network.rules.iter().filter(|rule| rule.is_denial())),
        Key::Secrets => list(network.secrets.iter().map(|secret| {
            let hosts: Vec<String> = secret.hosts().iter().map(ToString::to_string).collect();
            format!("{}={HIDDEN}@{}", secret.name(), hosts.join(","))
        })),
        Key::NetworkConnections => text(network.limits.connections),
        Key::NetworkBandwidth => size(network.limits.bytes_per_second),
        Key::NetworkQuestions => text(network.limits.questions_per_second),
        Key::InstallPackages => switch(settings.packages.allowed),
        Key::PackageSize => size(settings.packages.size),
        Key::PackageDisk => size(settings.packages.disk),
        Key::PackageMemory => size(settings.packages.memory),
        Key::PackageStoreSize => size(settings.packages.store_size),
        Key::PackageTimeout => duration(settings.packages.timeout),
        Key::PackageIndex => optional(&settings.package_index.url, |url| {
            text(without_secrets(url))
        }),
        Key::PackageTrustedHosts => list(&settings.package_index.trusted_hosts),
        Key::Approvals => match settings.approvals.policy.rules() {
            0 => SettingValue::Nothing,
            rules => text(format!("{rules} rules")),
        },
        Key::ApproveTools => text(approve.tools.name()),
        Key::ApproveShell => text(approve.shell.name()),
        Key::ApprovePackages => text(approve.packages.name()),
        Key::ApproveDomains => text(approve.domains.name()),
        Key::ApprovalTimeout => duration(settings.approvals.timeout),
        Key::RememberApprovals => switch(settings.approvals.remember),
        Key::Listen => text(service.listen),
        Key::PublicUrl => optional(&service.public_url, |url| text(without_secrets(url))),
        Key::AllowedOrigins => list(&service.allowed_origins),
        Key::TlsCert => optional(&service.tls, |files| text(files.certificates.display())),
        Key::TlsKey => optional(&service.tls, |files| text(files.key.display())),
        Key::MaxConnections => text(service.max_connections),
        Key::MaxWait => duration(service.max_wait),
        Key::KeepSessions => match settings.keep_sessions {
            Some(keep) => switch(keep),
            None => text("on for serve, else off"),
        },
        Key::DaemonName => match &settings.daemon_name {
            Some(name) => text(name),
            None => text("the name of the command"),
        },
        Key::Profile => text(settings.profile.name()),
        Key::AllowedModules => list(&settings.allowed_modules),
        Key::BlockedModules => list(&settings.blocked_modules),
        Key::ImagesDir => text(settings.images_dir.display()),
        Key::AllowMissing => list(settings.allow_missing.iter().copied().map(LayerKind::name)),
        Key::Auth => text(auth(&settings.auth)),
        Key::DataDir => text(settings.data_dir.display()),
        Key::LogLevel => optional(&settings.log_filter, text),
        Key::LogFormat => text(settings.log_format.name()),
        Key::OtlpEndpoint => optional(&settings.traces, |url| text(without_secrets(url))),
        Key::AuditFile => optional(&settings.audit, |log| text(log.file.display())),
        Key::AuditSync => audit(&|audit| match audit.sync {
            Sync::Always => text("always"),
            Sync::Interval => text("interval"),
        }),
        Key::AuditFailure => audit(&|audit| match audit.failure {
            OnFailure::Refuse => text("refuse"),
            OnFailure::Continue => text("continue"),
        }),
        Key::AuditFileSize => audit(&|audit| size(audit.turn_over_at)),
        Key::AuditRecords => audit(&|audit| text(audit.records_per_hour)),
        Key::McpServers => list(settings.upstreams.servers.keys()),
        Key::McpAllowedHosts => list(&settings.upstreams.allowed_hosts),
        // Files and lists that were merged into other settings, and hold no secrets themselves.
        Key::EnvFiles | Key::AllowedHosts | Key::SandboxConfig | Key::McpServersFile => {
            SettingValue::Nothing
        }
    }
}

/// Returns the written value of a setting that holds no secret.
fn as_written(written: &Merged, key: Key) -> SettingValue {
    match (written.text(key), written.texts(key)) {
        (Ok(Some((_, single))), _) => text(single),
        (_, Ok(Some((_, several)))) => list(several),
        _ => SettingValue::Nothing,
    }
}

/// Describes the authentication. Issuers and key owners are listed by name; the keys themselves are
/// not stored.
fn auth(settings: &AuthSettings) -> String {
    match settings.choice {
        AuthChoice::Off => return "off".to_owned(),
        AuthChoice::Development => return "development".to_owned(),
        AuthChoice::Usual => {}
    }
    let issuers = settings
        .issuers
        .iter()
        .map(|issuer| format!("issuer {}", issuer.name));
    let keys = settings
        .api_keys
        .iter()
        .map(|key| format!("API key of {}", key.name));
    let mut callers: Vec<String> = issuers.chain(keys).collect();
    if settings.variables != IssuerVariables::default() {
        let issuer = settings.variables.issuer.as_deref().map(without_secrets);
        callers.push(format!(
            "issuer {}",
            issuer.as_deref().unwrap_or("of the MCP_ variables")
        ));
    }
    if callers.is_empty() {
        "development".to_owned()
    } else {
        callers.join(", ")
    }
}

/// Removes the parts of a URL that can hold a secret: user name, password and query.
fn without_secrets(url: &str) -> String {
    let (url, query) = match url.split_once('?') {
        Some((url, _)) => (url, format!("?{HIDDEN}")),
        None => (url, String::new()),
    };
    let Some((scheme, rest)) = url.split_once("://") else {
        return HIDDEN.to_owned();
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    match host.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{HIDDEN}@{host}{path}{query}"),
        None => format!("{scheme}://{host}{path}{query}"),
    }
}

fn text(value: impl Display) -> SettingValue {
    SettingValue::Text(value.to_string())
}

fn list<T: Display>(values: impl IntoIterator<Item = T>) -> SettingValue {
    SettingValue::List(values.into_iter().map(|value| value.to_string()).collect())
}

fn optional<'a, T>(value: &'a Option<T>, show: impl Fn(&'a T) -> SettingValue) -> SettingValue {
    value.as_ref().map_or(SettingValue::Nothing, show)
}

fn path(value: &Option<PathBuf>) -> SettingValue {
    optional(value, |path| text(path.display()))
}

fn size(bytes: u64) -> SettingValue {
    SettingValue::Size(bytes)
}

fn duration(value: Duration) -> SettingValue {
    SettingValue::Duration(value)
}

fn switch(is_on: bool) -> SettingValue {
    text(if is_on { "on" } else { "off" })
}

#[cfg(test)]
mod tests {
    use super::super::checks::tests::{Case, case};
    use super::*;

    fn shown(case: Case) -> BTreeMap<&'static str, (Value, Vec<String>)> {
        let settings = case.shown();
        settings
            .into_iter()
            .map(|setting| (setting.name, (setting.value, setting.origins)))
            .collect()
    }

    #[test]
    fn each_value_is_shown_with_the_place_that_won() {
        let shown = shown(
            case()
                .yaml("cpus: 1\nmemory: 1G\ntimeout: 5m\n")
                .variable("CELLBLOCK_MEMORY", "2G")
                .variable("RUST_LOG", "debug")
                .flag(Key::Timeout, "30s"),
        );
        let check = |name: &str, value: Value, origins: &[&str]| {
            let origins = origins
                .iter()
                .map(|origin| (*origin).to_owned())
                .collect::<Vec<_>>();
            assert_eq!(shown[name], (value, origins), "{name}");
        };
        check("cpus", json!("1"), &["/etc/cellblock/config.yaml:1"]);
        check("memory", json!("2 GiB"), &["CELLBLOCK_MEMORY"]);
        check("timeout", json!("30 s"), &["--timeout"]);
        check("log_level", json!("debug"), &["RUST_LOG"]);
        check("max_sessions", json!("64"), &[]);
        check("workspace", Value::Null, &[]);
        assert_eq!(shown.len(), Key::names().count(), "every setting is shown");
    }

    #[test]
    fn what_a_profile_brings_along_is_told_as_such() {
        let shown = shown(case().yaml("profile: pyexec\ncpus: 1"));
        assert_eq!(
            shown["memory"],
            (json!("512 MiB"), vec!["profile pyexec".to_owned()])
        );
        assert_eq!(shown["profile"].1, ["/etc/cellblock/config.yaml:1"]);
        assert_eq!(shown["cpus"].1, ["/etc/cellblock/config.yaml:2"]);
    }

    #[test]
    fn no_secret_is_shown() {
        const SECRET: &str = "sk-0123456789-canary";
        let yaml = format!(
            "variables: {{TOKEN: {SECRET}}}\npackage_index: \
             https://me:{SECRET}@index.test/simple?token={SECRET}\n\
             mcp_servers: {{github: {{command: run, env: {{KEY: {SECRET}}}}}}}\n\
             secrets: [{{name: API, env: VALUE, hosts: [api.example.com]}}]\n"
        );
        let case = case()
            .yaml(&yaml)
            // A secret whose value code inside could see would be rejected.
            .variable("VALUE", &format!("{SECRET}-of-the-api"))
            .variable("KERNEL_ENV_OTHER", SECRET)
            .variable(
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                &format!("https://me:{SECRET}@collector.test"),
            );
        let shown = shown(case);
        assert!(!format!("{shown:?}").contains(SECRET), "{shown:?}");
        assert_eq!(
            shown["variables"].0,
            json!(["OTHER=[hidden]", "TOKEN=[hidden]"])
        );
        assert_eq!(
            shown["variables"].1,
            ["KERNEL_ENV_OTHER", "/etc/cellblock/config.yaml:1"]
        );
        assert_eq!(shown["secrets"].0, json!(["API=[hidden]@api.example.com"]));
        assert_eq!(
            shown["package_index"].0,
            json!("https://[hidden]@index.test/simple?[hidden]")
        );
        assert_eq!(shown["mcp_servers"].0, json!(["github"]));
        assert_eq!(
            shown["otlp_endpoint"].0,
            json!("https://[hidden]@collector.test/v1/traces")
        );
    }
}
