//! Which settings sessions depend on, so that a server can tell by name what its keeper was started
//! with differently.
//!
//! Every setting belongs to exactly one of three kinds: a keeper's sessions depend on it
//! (`described`), a server hands it to the keeper whenever it connects (`HANDED_OVER`), or only
//! servers need it (`SERVER_ONLY`). A new field of `Settings` does not compile until it is placed
//! here, and a test goes through the names of all settings.

use sha2::{Digest, Sha256};

use crate::config::{
    Approvals, BackendChoice, Containers, Network, PackageIndex, Packages, Settings, Undo,
};
use crate::sandbox::SandboxLimits;

/// Settings that only servers need. They change without the sessions.
#[cfg(test)]
const SERVER_ONLY: &[&str] = &[
    "allowed_dirs",
    "timeout",
    "max_timeout",
    "listen",
    "public_url",
    "allowed_hosts",
    "allowed_origins",
    "tls_cert",
    "tls_key",
    "max_connections",
    "max_wait",
    "keep_sessions",
    "keeper",
    "profile",
    "allowed_modules",
    "blocked_modules",
    "images_dir",
    "auth",
    "log_level",
    "log_format",
    "otlp_endpoint",
    "audit_file",
    "audit_sync",
    "audit_failure",
    "audit_file_size",
    "audit_records",
];

/// Settings that a server hands to its keeper when it connects. They hold at once.
#[cfg(test)]
const HANDED_OVER: &[&str] = &[
    "max_running",
    "quota_sessions",
    "quota_memory",
    "quota_cpu",
    "quota_cpu_window",
    "quota_cells",
    "quota_starts",
    "quota_stored",
    "approvals",
    "approve_tools",
    "approve_packages",
    "approval_timeout",
    "remember_approvals",
    "mcp_servers",
    "mcp_servers_file",
    "mcp_allowed_hosts",
];

/// Settings that sessions depend on: their names, and what they say. Several names stand together
/// where they have one meaning.
fn described(settings: &Settings) -> Vec<(&'static str, String)> {
    // Without `..`: whoever adds a setting decides here what it is.
    let Settings {
        workspace,
        environment,
        environments: _, // The chosen one counts.
        mounts,
        masks,
        variables,
        limits:
            SandboxLimits {
                memory,
                family_memory,
                cpus,
                processes,
                disk,
                files,
            },
        max_sessions,
        idle_timeout,
        pool,
        backend,
        undo,
        explore_parallel,
        network:
            Network {
                rules,
                secrets,
                limits: network_limits,
            },
        packages:
            Packages {
                allowed,
                size,
                store_size,
                timeout: package_timeout,
                memory: package_memory,
                disk: package_disk,
            },
        approvals:
            Approvals {
                policy,
                timeout: _,
                remember: _,
            },
        package_index: PackageIndex { url, trusted_hosts },
        allow_missing,
        data_dir,
        // Handed over.
        max_running: _,
        quotas: _,
        upstreams: _,
        // For servers only.
        allowed_dirs: _,
        timeout: _,
        max_timeout: _,
        service: _,
        profile: _,
        allowed_modules: _,
        blocked_modules: _,
        images_dir: _,
        auth: _,
        log_filter: _,
        log_format: _,
        traces: _,
        audit: _,
        keep_sessions: _,
        keeper: _,
        // Not settings.
        described: _,
        runtime_dir: _,
        notices: _,
        hand_over: _,
        secret_files: _,
    } = settings;
    let mut all = vec![
        ("workspace", format!("{workspace:?}")),
        ("environment", environment.to_string()),
        ("environments", format!("{:?}", settings.environment_spec())),
        ("mounts", format!("{mounts:?} {masks:?}")),
        (
            "variables, env_files",
            format!("{:?}", variables.iter().collect::<Vec<_>>()),
        ),
        ("memory", memory.to_string()),
        ("family_memory", family_memory.to_string()),
        ("cpus", cpus.to_string()),
        ("processes", processes.to_string()),
        ("disk", disk.to_string()),
        ("files", files.to_string()),
        ("max_sessions", max_sessions.to_string()),
        ("idle_timeout", format!("{idle_timeout:?}")),
        ("pool", pool.to_string()),
        ("explore_parallel", explore_parallel.to_string()),
        (
            "allow_network, allowed_domains, denied_domains, sandbox_config",
            format!("{rules:?}"),
        ),
        (
            "network_connections, network_bandwidth, network_questions",
            format!("{network_limits:?}"),
        ),
        ("install_packages", allowed.to_string()),
        ("package_size", size.to_string()),
        ("package_disk", package_disk.to_string()),
        ("package_memory", package_memory.to_string()),
        ("package_store_size", store_size.to_string()),
        ("package_timeout", format!("{package_timeout:?}")),
        ("package_index", format!("{url:?}")),
        ("package_trusted_hosts", format!("{trusted_hosts:?}")),
        ("approve_shell", policy.shell_is_open().to_string()),
        ("approve_domains", policy.opens_domains().to_string()),
        ("allow_missing", format!("{allow_missing:?}")),
        ("data_dir", format!("{data_dir:?}")),
    ];
    let (kept, undo_files) = match undo {
        Undo::Off => (None, None),
        Undo::On { checkpoints, files } => (Some(*checkpoints), Some(*files)),
    };
    all.push(("undo", (*undo != Undo::Off).to_string()));
    all.push(("undo_checkpoints", format!("{kept:?}")));
    all.push(("undo_files", format!("{undo_files:?}")));
    let containers = match backend {
        BackendChoice::Native => None,
        BackendChoice::Containers(choice) => Some(choice),
    };
    let of = |text: &dyn Fn(&Containers) -> String| containers.map(text).unwrap_or_default();
    all.push((
        "backend",
        of(&|choice| {
            format!(
                "{:?} {:?} {:?}",
                choice.kind, choice.address, choice.credentials
            )
        }),
    ));
    all.push(("container_tag", of(&|choice| choice.image.clone())));
    all.push(("runtime", of(&|choice| format!("{:?}", choice.runtime))));
    all.push((
        "pool_max_age",
        of(&|choice| format!("{:?}", choice.pool_max_age)),
    ));
    all.push((
        "pool_creations",
        of(&|choice| choice.pool_creations.to_string()),
    ));
    let mut hash = Sha256::new();
    for secret in secrets {
        hash.update(format!("{secret:?}"));
        secret.compare(|value| hash.update(value));
    }
    all.push(("secrets", hex(hash)));
    all
}

/// Returns what a keeper's settings are compared by: one line for each, with its name and a digest
/// of what it says.
pub(super) fn digests(settings: &Settings) -> String {
    let line = |(name, says): (&str, String)| {
        format!("{name}={}\n", &hex(Sha256::new().chain_update(says))[..32])
    };
    described(settings).into_iter().map(line).collect()
}

fn hex(hash: Sha256) -> String {
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::approval;
    use crate::config::tests_support::settings_below;
    use crate::config::{Key, Variables};
    use crate::keeper::different_settings;

    /// Names what differs after a change.
    fn differs(change: &dyn Fn(&mut Settings)) -> Vec<String> {
        let settings = settings_below(Path::new("/base"));
        let mut other = settings.clone();
        change(&mut other);
        different_settings(&digests(&settings), &digests(&other))
    }

    #[test]
    fn every_setting_is_of_exactly_one_kind() {
        let settings = settings_below(Path::new("/base"));
        let compared: Vec<&str> = described(&settings)
            .iter()
            .flat_map(|(names, _)| names.split(", "))
            .collect();
        for name in Key::names() {
            let kinds = [SERVER_ONLY, HANDED_OVER, &compared]
                .map(|kind| kind.iter().filter(|known| **known == name));
            let count: usize = kinds.into_iter().map(Iterator::count).sum();
            assert_eq!(
                count, 1,
                "`{name}` must be compared, handed over, or for servers only"
            );
        }
        for name in SERVER_ONLY.iter().chain(HANDED_OVER).chain(&compared) {
            assert!(
                Key::names().any(|known| known == *name),
                "there is no setting `{name}`"
            );
        }
    }

    #[test]
    fn what_sessions_depend_on_is_named_when_it_differs() {
        assert_eq!(differs(&|settings| settings.limits.memory += 1), ["memory"]);
        assert_eq!(
            differs(&|settings| settings.max_sessions += 1),
            ["max_sessions"]
        );
        let index = |settings: &mut Settings| {
            settings.package_index.url = Some("https://index.test".to_owned())
        };
        assert_eq!(differs(&index), ["package_index"]);
        let variables = |value: &str| {
            let mut variables = Variables::default();
            variables.set("TOKEN".to_owned(), value.to_owned());
            variables
        };
        assert_eq!(
            differs(&|settings| settings.variables = variables("one")),
            ["variables, env_files"]
        );
        let shell = approval::Defaults {
            shell: approval::Effect::Ask,
            ..approval::Defaults::default()
        };
        let changed = differs(&|settings| settings.approvals.policy = approval::Policy::new(shell));
        assert_eq!(changed, ["approve_shell"]);
        assert_eq!(differs(&|settings| settings.undo = Undo::Off)[0], "undo");
    }

    #[test]
    fn what_only_servers_need_and_what_they_hand_over_does_not_differ() {
        let tools = approval::Defaults {
            tools: approval::Effect::Ask,
            ..approval::Defaults::default()
        };
        let nothing: Vec<String> = Vec::new();
        assert_eq!(
            differs(&|settings| settings.approvals.policy = approval::Policy::new(tools)),
            nothing
        );
        assert_eq!(
            differs(&|settings| settings.log_filter = Some("debug".to_owned())),
            nothing
        );
        assert_eq!(
            differs(&|settings| settings.timeout = std::time::Duration::from_secs(7)),
            nothing
        );
        assert_eq!(
            differs(&|settings| settings.quotas.sessions = Some(2)),
            nothing
        );
        assert_eq!(differs(&|settings| settings.max_running = 1), nothing);
    }
}
