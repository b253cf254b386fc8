//! The names of the settings that differ between two processes.
//!
//! The rows of `config` state which settings a daemon's sessions depend on and which a reload
//! applies. A server compares the former with those of the daemon it connects to, and reports after
//! a reload which other settings have changed.

use sha2::{Digest, Sha256};

use crate::config::{self, BackendChoice, Key, Settings, TakesEffect};
use crate::sandbox::masks::{HostMask, MaskRule};

/// Returns the text that daemons' settings are compared by: one line per setting that sessions
/// depend on, with its name and a digest of its value.
pub(super) fn digests(settings: &Settings) -> String {
    let line = |key: Key| {
        let digest = hex(Sha256::new().chain_update(meaning(settings, key)));
        format!("{}={}\n", key.name(), &digest[..32])
    };
    Key::all()
        .filter(|key| key.row().takes_effect == TakesEffect::NewSessions)
        .map(line)
        .collect()
}

/// Returns the settings that differ and that a reload does not apply.
pub(super) fn changed_beyond_reload(before: &Settings, now: &Settings) -> Vec<&'static str> {
    Key::all()
        .filter(|key| key.row().takes_effect != TakesEffect::Reload)
        .filter(|key| meaning(before, *key) != meaning(now, *key))
        .map(Key::name)
        .collect()
}

/// Returns the full value of a setting, secrets included. Settings that are merged into one value
/// differ together.
fn meaning(settings: &Settings, key: Key) -> String {
    match key {
        Key::Environments => format!("{:?}", settings.environment_spec()),
        Key::Variables | Key::EnvFiles => {
            format!("{:?}", settings.variables.iter().collect::<Vec<_>>())
        }
        Key::SandboxConfig => {
            let of_workspace = |mask: &&HostMask| mask.rule == MaskRule::EnvironmentFile;
            let masks = settings.masks.iter().filter(|mask| !of_workspace(mask));
            format!("{:?}", masks.collect::<Vec<_>>())
        }
        Key::PackageIndex => format!("{:?}", settings.package_index.url),
        Key::Backend => match &settings.backend {
            BackendChoice::Native => String::new(),
            BackendChoice::Containers(choice) => {
                let (kind, address) = (&choice.kind, &choice.address);
                format!("{kind:?} {address:?} {:?}", choice.credentials)
            }
        },
        // The rest of the policy can change without new sandboxes.
        Key::ApproveShell => settings.approvals.policy.shell_is_open().to_string(),
        Key::ApproveDomains => settings.approvals.policy.opens_domains().to_string(),
        Key::Secrets => {
            let mut hash = Sha256::new();
            for secret in &settings.network.secrets {
                hash.update(format!("{secret:?}"));
                secret.compare(|value| hash.update(value));
            }
            hex(hash)
        }
        key => format!("{:?}", config::value(settings, key)),
    }
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
    use crate::auth::AuthChoice;
    use crate::config::Values;
    use crate::config::tests_support::{settings_below, settings_of};
    use crate::config::{SandboxVariables, UndoSettings};
    use crate::daemon::different_settings;

    /// Returns the settings that differ after a change.
    fn differs(change: &dyn Fn(&mut Settings)) -> Vec<String> {
        let settings = settings_below(Path::new("/base"));
        let mut other = settings.clone();
        change(&mut other);
        different_settings(&digests(&settings), &digests(&other))
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
            let mut variables = SandboxVariables::default();
            variables.set("TOKEN".to_owned(), value.to_owned());
            variables
        };
        assert_eq!(
            differs(&|settings| settings.variables = variables("one")),
            ["env_files", "variables"]
        );
        let shell = approval::Defaults {
            shell: approval::Effect::Ask,
            ..approval::Defaults::default()
        };
        let changed = differs(&|settings| settings.approvals.policy = approval::Policy::new(shell));
        assert_eq!(changed, ["approve_shell"]);
        assert_eq!(
            differs(&|settings| settings.undo = UndoSettings::Off)[0],
            "undo"
        );
    }

    /// Returns a value other than the default.
    fn other_value(key: Key) -> Option<String> {
        let row = key.row();
        match row.values {
            Values::Size(_, most) | Values::Time(_, most) | Values::Number(_, most) => {
                Some(most.to_string())
            }
            Values::Words(words) => {
                let default = row.default.written();
                let other = words.iter().rev().find(|word| Some(**word) != default);
                other.map(|word| format!("'{word}'"))
            }
            _ => None,
        }
    }

    #[test]
    fn every_setting_that_sessions_depend_on_is_compared() {
        let base = Path::new("/base");
        let usual = digests(&settings_below(base));
        let mut compared = 0;
        for key in Key::all() {
            let differs = match (key, other_value(key)) {
                // An engine would have to be found, and these have no effect without one.
                (Key::Backend | Key::PoolMaxAge | Key::PoolCreations, _) | (_, None) => continue,
                (_, Some(value)) => {
                    let other = settings_of(base, &format!("{}: {value}", key.name()));
                    different_settings(&usual, &digests(&other))
                }
            };
            let is_named = differs.iter().any(|name| name == key.name());
            let depends = key.row().takes_effect == TakesEffect::NewSessions;
            assert_eq!(is_named, depends, "{}", key.name());
            compared += 1;
        }
        assert!(compared > 40, "{compared}");
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

    #[test]
    fn what_a_reload_does_not_take_over_is_named() {
        let before = settings_below(Path::new("/base"));
        let changed = |change: &dyn Fn(&mut Settings)| {
            let mut now = before.clone();
            change(&mut now);
            changed_beyond_reload(&before, &now)
        };
        let nothing: [&str; 0] = [];
        assert_eq!(changed(&|_| {}), nothing);
        assert_eq!(changed(&|settings| settings.max_running += 1), nothing);
        assert_eq!(
            changed(&|settings| settings.service.allowed_origins.clear()),
            nothing
        );
        assert_eq!(
            changed(&|settings| settings.auth.choice = AuthChoice::Off),
            nothing
        );
        // A difference below the precision with which sizes are displayed.
        assert_eq!(changed(&|settings| settings.limits.memory += 1), ["memory"]);
        let timeout = std::time::Duration::from_secs(7);
        assert_eq!(changed(&|settings| settings.timeout = timeout), ["timeout"]);
        assert_eq!(
            changed(&|settings| settings.service.listen.set_port(7)),
            ["listen"]
        );
    }
}
