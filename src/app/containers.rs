//! The container backend: converts the operator's settings into those of the backend.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use async_trait::async_trait;
use cellblock_jail::wire::Bind;
use tokio::sync::watch;

use super::network::EgressSetup;
use super::packages::PackageService;
use super::{StartMode, approvals, programs};
use crate::config::{ContainerChoice, Settings};
use crate::environment::supplies;
use crate::sandbox::container::{
    BundledFiles, ContainerBackend, ContainerBind, ContainerNetwork, ContainerPackages,
    ContainerSettings, PoolSettings, WORK_FOLDER,
};
use crate::sandbox::{Backend, Preparation, SandboxNetwork};

/// Starts the container backend.
pub(super) fn backend(
    settings: &Settings,
    choice: &ContainerChoice,
    mode: StartMode,
    packages: Option<&PackageService>,
) -> anyhow::Result<Arc<dyn Backend>> {
    let preparation = watch::Sender::new(Preparation::Working {
        step: "preparing containers".to_owned(),
        done: 0,
        total: None,
    });
    let supplies = Arc::new(OwnSupplies {
        data_dir: settings.data_dir.clone(),
    });
    let asked_ports = if settings.approvals.policy.opens_domains() {
        BTreeSet::from(approvals::PORTS)
    } else {
        BTreeSet::new()
    };
    let index_ports = packages
        .map(|_| PackageService::usual_ports())
        .unwrap_or_default();
    let mut egress =
        EgressSetup::new(settings, asked_ports.union(&index_ports).copied().collect())?;
    let mut containers = container_settings(settings, choice, mode);
    containers.variables.append(&mut egress.variables);
    let is_open = !settings.network.rules.is_empty() || !asked_ports.is_empty();
    let network = egress
        .network
        .take()
        .map(|network| container_network(network, egress))
        .transpose()?;
    let with_ports = |ports: &BTreeSet<u16>| {
        let mut network = network.clone()?;
        network.network.ports = ports.clone();
        Some(network)
    };
    containers.network = with_ports(&asked_ports).filter(|_| is_open);
    containers.packages = packages
        .zip(with_ports(&index_ports))
        .map(|(packages, network)| ContainerPackages {
            shown: vec![shown(packages.store_to_show())],
            tools: vec![shown(packages.tools_to_show())],
            network,
            ports: packages.ports(),
        });
    if containers.network.is_some() && !choice.address.is_local() {
        bail!(
            "the engine at {} is not on this machine, so nobody could hold its containers to \
             allowed domains and secrets; \
             leave them out, or use an engine of this machine or --backend native",
            choice.address
        );
    }
    let started = ContainerBackend::start(containers, supplies, preparation);
    Ok(Arc::new(
        started.context("the runtime folder cannot be used")?,
    ))
}

/// Converts a host path that containers may see.
fn shown(bind: Bind) -> ContainerBind {
    ContainerBind {
        host: bind.host,
        inside: bind.inside,
        writable: false,
    }
}

/// Adds the container-specific parts to the egress settings.
fn container_network(
    network: SandboxNetwork,
    egress: EgressSetup,
) -> anyhow::Result<ContainerNetwork> {
    Ok(ContainerNetwork {
        network,
        program: std::env::current_exe().context("could not find this program")?,
        files: egress.binds.into_iter().map(shown).collect(),
        held: egress.certificates,
    })
}

/// Converts the operator's settings into those of the backend.
fn container_settings(
    settings: &Settings,
    choice: &ContainerChoice,
    mode: StartMode,
) -> ContainerSettings {
    let workspace = settings.workspace.iter().map(|folder| ContainerBind {
        host: folder.clone(),
        inside: PathBuf::from(WORK_FOLDER),
        writable: true,
    });
    let mounts = settings.mounts.iter().map(|mount| ContainerBind {
        host: mount.host.clone(),
        inside: Path::new(WORK_FOLDER).join(&mount.inside),
        writable: mount.writable,
    });
    ContainerSettings {
        kind: choice.kind,
        address: choice.address.clone(),
        credentials: choice.credentials.clone(),
        image: choice.image.clone(),
        runtime: choice.runtime.clone(),
        runtime_dir: settings.runtime_dir.clone(),
        limits: settings.limits.clone(),
        limits_apart: settings.packages.sandbox_limits(&settings.limits),
        binds: workspace.chain(mounts).collect(),
        masks: if choice.address.is_local() {
            settings.masks.clone()
        } else {
            Vec::new()
        },
        variables: settings
            .variables
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        pool: PoolSettings {
            size: if mode == StartMode::OneShot {
                0
            } else {
                settings.pool
            },
            max_age: choice.pool_max_age,
            creations: choice.pool_creations,
        },
        network: None,
        packages: None,
        programs: programs(settings),
        preload: settings.environment_spec().preload.clone(),
    }
}

/// Files for containers, from our own binary and the package index.
pub struct OwnSupplies {
    pub data_dir: PathBuf,
}

#[async_trait]
impl BundledFiles for OwnSupplies {
    fn runner(&self) -> Vec<(String, Vec<u8>)> {
        supplies::runner()
    }

    async fn ipython(&self, python: &str) -> Result<PathBuf, String> {
        supplies::ipython(&self.data_dir, python)
            .await
            .map_err(|error| format!("{:#}", anyhow::Error::new(error)))
    }
}
