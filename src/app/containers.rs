//! The container backend: the operator's settings turned into what it needs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use async_trait::async_trait;
use tokio::sync::watch;

use super::Warmth;
use crate::config::{Containers, Settings};
use crate::environment::supplies;
use crate::sandbox::container::{
    ContainerBackend, ContainerBind, ContainerSettings, PoolSettings, Supplies, WORK_FOLDER,
};
use crate::sandbox::{Backend, Preparation};

/// Starts the backend that makes containers.
pub(super) fn backend(settings: &Settings, choice: &Containers, warmth: Warmth) -> anyhow::Result<Arc<dyn Backend>> {
    if !settings.network.rules.is_empty() || !settings.network.secrets.is_empty() {
        bail!(
            "sessions in containers have no way out to the network yet, so allowed domains and secrets cannot be kept; \
             leave them out, or use --backend native"
        );
    }
    let preparation =
        watch::Sender::new(Preparation::Working { step: "preparing containers".to_owned(), done: 0, total: None });
    let supplies = Arc::new(OwnSupplies { data_dir: settings.data_dir.clone() });
    let started = ContainerBackend::start(container_settings(settings, choice, warmth), supplies, preparation);
    Ok(Arc::new(started.context("the runtime folder cannot be used")?))
}

/// Makes settings of the backend from those of the operator.
fn container_settings(settings: &Settings, choice: &Containers, warmth: Warmth) -> ContainerSettings {
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
        image: choice.image.clone(),
        runtime: choice.runtime.clone(),
        runtime_dir: settings.runtime_dir.clone(),
        limits: settings.limits.clone(),
        binds: workspace.chain(mounts).collect(),
        variables: settings.variables.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        pool: PoolSettings {
            size: if warmth == Warmth::OneShot { 0 } else { settings.pool },
            max_age: choice.pool_max_age,
            creations: choice.pool_creations,
        },
        preload: Vec::new(),
        quick: warmth == Warmth::OneShot,
    }
}

/// Supplies from our own binary and the package index.
pub struct OwnSupplies {
    pub data_dir: PathBuf,
}

#[async_trait]
impl Supplies for OwnSupplies {
    fn runner(&self) -> Vec<(String, Vec<u8>)> {
        supplies::runner()
    }

    async fn ipython(&self, python: &str) -> Result<PathBuf, String> {
        supplies::ipython(&self.data_dir, python).await.map_err(|error| format!("{:#}", anyhow::Error::new(error)))
    }
}
