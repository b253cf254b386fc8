//! What separates a sandbox from the host, layer by layer.
//!
//! A layer is enforced, replaced by a named weaker one, or missing. Missing layers refuse the launch unless the operator has
//! allowed their absence by name.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

/// The layers a sandbox may have, in the order `doctor` shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
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

    /// The name used in configuration, in results and by `doctor`.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Layer {
    Enforced {
        how: String,
    },
    /// A weaker means is in place, and is named.
    Reduced {
        how: String,
        why: String,
    },
    Missing {
        why: String,
    },
}

/// Every layer of one sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Isolation {
    pub layers: BTreeMap<LayerKind, Layer>,
}

impl Isolation {
    pub fn record(&mut self, kind: LayerKind, layer: Layer) {
        self.layers.insert(kind, layer);
    }

    /// Returns the first layer that is missing without the operator's leave.
    pub fn first_unallowed(&self, allowed_missing: &BTreeSet<LayerKind>) -> Option<(LayerKind, &str)> {
        LayerKind::ALL.into_iter().find_map(|kind| match self.layers.get(&kind) {
            Some(Layer::Missing { why }) if !allowed_missing.contains(&kind) => Some((kind, why.as_str())),
            None if !allowed_missing.contains(&kind) => Some((kind, "it was never set up")),
            _ => None,
        })
    }
}
