//! The layers that separate a sandbox from the host.
//!
//! A layer is enforced, replaced by a named weaker one, or missing. A missing layer prevents the
//! launch unless the operator has allowed its absence by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The layers a sandbox may have, in the order `doctor` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerKind {
    /// User, mount, pid, network, ipc, uts and cgroup namespaces.
    Namespaces,
    /// A host uid of its own that owns nothing else.
    Identity,
    /// No capability, and no way to gain one.
    Privileges,
    /// Only listed system calls.
    SystemCalls,
    /// A second file-system boundary that holds even if the mounts did not.
    Landlock,
    /// No network but an empty loopback.
    Network,
    /// Memory, CPU time and processes are limited for the whole sandbox.
    Resources,
}

impl LayerKind {
    pub const ALL: [LayerKind; 7] = [
        LayerKind::Namespaces,
        LayerKind::Identity,
        LayerKind::Privileges,
        LayerKind::SystemCalls,
        LayerKind::Landlock,
        LayerKind::Network,
        LayerKind::Resources,
    ];

    /// Returns the name used in configuration, in results and by `doctor`.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Namespaces => "namespaces",
            LayerKind::Identity => "identity",
            LayerKind::Privileges => "privileges",
            LayerKind::SystemCalls => "system-calls",
            LayerKind::Landlock => "landlock",
            LayerKind::Network => "network",
            LayerKind::Resources => "resources",
        }
    }

    pub fn from_name(name: &str) -> Option<LayerKind> {
        LayerKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The state of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum LayerState {
    Enforced {
        how: String,
    },
    /// A weaker mechanism is in place, and is named.
    Reduced {
        how: String,
        why: String,
    },
    Missing {
        why: String,
    },
}

/// Every layer of one sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    pub layers: BTreeMap<LayerKind, LayerState>,
}

impl Isolation {
    pub fn record(&mut self, kind: LayerKind, layer: LayerState) {
        self.layers.insert(kind, layer);
    }

    /// Returns the first layer that is missing without the operator's permission.
    pub fn first_unallowed(
        &self,
        allowed_missing: &BTreeSet<LayerKind>,
    ) -> Option<(LayerKind, &str)> {
        LayerKind::ALL
            .into_iter()
            .find_map(|kind| match self.layers.get(&kind) {
                Some(LayerState::Missing { why }) if !allowed_missing.contains(&kind) => {
                    Some((kind, why.as_str()))
                }
                None if !allowed_missing.contains(&kind) => Some((kind, "it was never set up")),
                _ => None,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_enforced() -> Isolation {
        let mut isolation = Isolation::default();
        for kind in LayerKind::ALL {
            isolation.record(
                kind,
                LayerState::Enforced {
                    how: "somehow".to_owned(),
                },
            );
        }
        isolation
    }

    #[test]
    fn a_missing_layer_is_refused_unless_it_was_allowed_by_name() {
        for kind in LayerKind::ALL {
            let mut isolation = all_enforced();
            assert_eq!(isolation.first_unallowed(&BTreeSet::new()), None);
            isolation.record(
                kind,
                LayerState::Missing {
                    why: "the kernel is old".to_owned(),
                },
            );
            assert_eq!(
                isolation.first_unallowed(&BTreeSet::new()),
                Some((kind, "the kernel is old"))
            );
            assert_eq!(isolation.first_unallowed(&BTreeSet::from([kind])), None);
            let another = LayerKind::ALL
                .into_iter()
                .find(|other| *other != kind)
                .unwrap();
            assert!(
                isolation
                    .first_unallowed(&BTreeSet::from([another]))
                    .is_some()
            );
        }
    }

    #[test]
    fn a_reduced_layer_is_told_and_not_refused() {
        let mut isolation = all_enforced();
        isolation.record(
            LayerKind::Resources,
            LayerState::Reduced {
                how: "rlimits".to_owned(),
                why: "no cgroup".to_owned(),
            },
        );
        assert_eq!(isolation.first_unallowed(&BTreeSet::new()), None);
    }

    #[test]
    fn a_layer_that_nobody_set_up_is_missing() {
        let mut isolation = all_enforced();
        isolation.layers.remove(&LayerKind::Landlock);
        assert_eq!(
            isolation.first_unallowed(&BTreeSet::new()),
            Some((LayerKind::Landlock, "it was never set up"))
        );
    }

    #[test]
    fn every_layer_is_found_by_its_name() {
        for kind in LayerKind::ALL {
            assert_eq!(LayerKind::from_name(kind.name()), Some(kind));
        }
        assert_eq!(LayerKind::from_name("everything"), None);
    }
}
