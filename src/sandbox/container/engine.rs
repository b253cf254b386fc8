//! The engine client: its address, and the few requests we make. Only this file and the modules
//! below it use the API. `images` builds, pulls and removes images, `probe` inspects the
//! contents of one, `credentials` finds registry credentials, `ssh` and `tls` reach remote engines.

mod credentials;
mod dial;
mod images;
mod probe;
mod ssh;
mod tls;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::errors::Error;
use bollard::models::{
    ContainerCreateBody, ContainerInspectResponse, ContainerUpdateBody, EventMessage, ImageInspect,
    SystemInfo, VolumeCreateRequest,
};
use bollard::query_parameters::{
    AttachContainerOptionsBuilder, CreateContainerOptionsBuilder, EventsOptionsBuilder,
    InspectContainerOptions, KillContainerOptionsBuilder, ListContainersOptionsBuilder,
    ListVolumesOptionsBuilder, RemoveContainerOptionsBuilder, RemoveVolumeOptions,
    StartContainerOptions, StatsOptionsBuilder,
};
use bollard::{API_DEFAULT_VERSION, Docker};
use futures_util::stream::{Stream, StreamExt};
use tokio::io::AsyncWrite;
use tracing::debug;

pub use self::images::{BuildFailure, BuildNews, Building, ImageFacts};
pub use self::probe::{ImageProbe, ImageProbeError};
use self::ssh::SshErrors;

/// Timeout for one request to the engine; pulling and following events are exempt.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Engines repeat the request in their error message; this many characters of it are reported.
const MAX_REFUSAL_LENGTH: usize = 400;

/// Pauses after each failed attempt to remove a container, in milliseconds.
pub(super) const REMOVAL_PAUSES: [u64; 5] = [50, 100, 200, 400, 800];

/// The engine that makes sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Docker,
    Podman,
}

impl EngineKind {
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Docker => "Docker",
            EngineKind::Podman => "Podman",
        }
    }

    /// Returns the environment variable with its address.
    pub(super) fn variable(self) -> &'static str {
        match self {
            EngineKind::Docker => "DOCKER_HOST",
            EngineKind::Podman => "CONTAINER_HOST",
        }
    }
}

/// The address of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineAddress {
    Unix(PathBuf),
    Tcp(String),
    /// With the folder that holds `ca.pem`, `cert.pem` and `key.pem`.
    Tls {
        address: String,
        certificates: PathBuf,
    },
    Ssh(String),
}

impl EngineAddress {
    /// Returns whether the engine's containers are processes of this machine, as far as the address
    /// shows. Only then listeners can be opened in their networks, and they can see folders of the
    /// server.
    pub fn is_local(&self) -> bool {
        matches!(self, EngineAddress::Unix(_))
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineAddress::Unix(path) => write!(formatter, "unix://{}", path.display()),
            EngineAddress::Tcp(address)
            | EngineAddress::Tls { address, .. }
            | EngineAddress::Ssh(address) => formatter.write_str(address),
        }
    }
}

/// A failure of the engine.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    #[error("{} cannot be reached at {address}: {why}; start it, or name another one with \
             {}", kind.name(), kind.variable())]
    Unreachable {
        kind: EngineKind,
        address: String,
        why: String,
    },
    #[error("there is no {0}")]
    Missing(String),
    #[error(
        "the engine has no room left on its disk; remove images or containers there that nobody \
         needs"
    )]
    DiskFull,
    #[error("the engine refused: {0}")]
    Refused(String),
    #[error("it is in use: {0}")]
    InUse(String),
    #[error("the engine did not answer in time")]
    Silent,
}

/// The two directions of a container's standard streams.
pub(super) struct AttachedStreams {
    pub(super) output: Pin<Box<dyn Stream<Item = Result<LogOutput, Error>> + Send>>,
    pub(super) input: Pin<Box<dyn AsyncWrite + Send>>,
}

/// A container that the engine lists.
pub(super) struct ListedContainer {
    pub(super) id: String,
    pub(super) labels: HashMap<String, String>,
}

/// A volume that the engine lists.
pub(super) struct ListedVolume {
    pub(super) name: String,
    pub(super) labels: HashMap<String, String>,
}

/// An engine that has answered once. Cheap to clone; each request has its own connection.
#[derive(Clone)]
pub struct Engine {
    kind: EngineKind,
    address: EngineAddress,
    docker: Docker,
    /// Files that may contain credentials for registries.
    credentials: Vec<PathBuf>,
}

impl Engine {
    /// Connects and negotiates the API version.
    pub async fn connect(kind: EngineKind, address: &EngineAddress) -> Result<Engine, EngineError> {
        let unreachable = |why: String| EngineError::Unreachable {
            kind,
            address: address.to_string(),
            why,
        };
        let seconds = TIMEOUT.as_secs();
        let mut ssh_errors = None;
        let docker = match address {
            EngineAddress::Unix(path) => {
                Docker::connect_with_unix(&path.to_string_lossy(), seconds, API_DEFAULT_VERSION)
            }
            EngineAddress::Tcp(address) => {
                Docker::connect_with_http(address, seconds, API_DEFAULT_VERSION)
            }
            EngineAddress::Tls {
                address,
                certificates,
            } => Ok(tls::client(address, certificates, seconds)
                .map_err(|problem| unreachable(describe(&problem)))?),
            EngineAddress::Ssh(address) => {
                let (docker, errors) = ssh::client(address, seconds).map_err(unreachable)?;
                ssh_errors = Some(errors);
                Ok(docker)
            }
        }
        .map_err(|error| unreachable(describe(&error)))?;
        match docker.negotiate_version().await {
            Ok(docker) => Ok(Engine {
                kind,
                address: address.clone(),
                docker,
                credentials: Vec::new(),
            }),
            Err(error) => Err(unreachable(reason(&error, ssh_errors.as_ref()).await)),
        }
    }

    /// Sets the credential files. The first one with credentials for an image's registry is used.
    #[must_use]
    pub fn with_credentials(self, files: &[PathBuf]) -> Engine {
        Engine {
            credentials: files.to_vec(),
            ..self
        }
    }

    pub(super) fn is_local(&self) -> bool {
        self.address.is_local()
    }

    pub(super) async fn info(&self) -> Result<SystemInfo, EngineError> {
        self.docker
            .info()
            .await
            .map_err(|error| self.failure(error, "such question"))
    }

    pub(super) async fn image(&self, name: &str) -> Result<ImageInspect, EngineError> {
        self.docker
            .inspect_image(name)
            .await
            .map_err(|error| self.failure(error, &format!("image {name}")))
    }

    pub(super) async fn create(
        &self,
        name: &str,
        body: &ContainerCreateBody,
    ) -> Result<String, EngineError> {
        let options = CreateContainerOptionsBuilder::default().name(name).build();
        let image = body.image.clone().unwrap_or_default();
        let made = self
            .docker
            .create_container(Some(options), body.clone())
            .await;
        Ok(made
            .map_err(|error| self.failure(error, &format!("image {image}")))?
            .id)
    }

    pub(super) async fn attach(&self, id: &str) -> Result<AttachedStreams, EngineError> {
        let options = AttachContainerOptionsBuilder::default()
            .stdin(true)
            .stdout(true)
            .stderr(true)
            .stream(true)
            .build();
        let attached = self.docker.attach_container(id, Some(options)).await;
        let attached = attached.map_err(|error| self.failure(error, "such container"))?;
        Ok(AttachedStreams {
            output: attached.output,
            input: attached.input,
        })
    }

    pub(super) async fn start(&self, id: &str) -> Result<(), EngineError> {
        let started = self
            .docker
            .start_container(id, None::<StartContainerOptions>)
            .await;
        started.map_err(|error| self.failure(error, "such container"))
    }

    pub(super) async fn inspect(&self, id: &str) -> Result<ContainerInspectResponse, EngineError> {
        let inspected = self
            .docker
            .inspect_container(id, None::<InspectContainerOptions>)
            .await;
        inspected.map_err(|error| self.failure(error, "such container"))
    }

    /// Kills a container. One that has already ended is not an error.
    pub(super) async fn kill(&self, id: &str) {
        let options = KillContainerOptionsBuilder::default()
            .signal("SIGKILL")
            .build();
        let _ = self.docker.kill_container(id, Some(options)).await;
    }

    /// Ends and removes a container. One that is gone, or is being removed, is not an error. An
    /// engine that has just restarted may still be busy with it, so failed attempts are retried.
    pub(super) async fn remove(&self, id: &str) {
        for pause in REMOVAL_PAUSES {
            let options = RemoveContainerOptionsBuilder::default()
                .force(true)
                .v(true)
                .build();
            match self.docker.remove_container(id, Some(options)).await {
                Ok(())
                | Err(Error::DockerResponseServerError {
                    status_code: 404 | 409,
                    ..
                }) => return,
                Err(error) => debug!(container = id, %error, "the container could not be removed"),
            }
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Removes a container and waits until the engine no longer knows it: one that removes itself
    /// at this moment is still known for a while.
    pub(super) async fn remove_wholly(&self, id: &str) {
        self.remove(id).await;
        while self.knows(id).await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Returns whether the engine still knows a container. An unreachable engine counts as not
    /// knowing it.
    async fn knows(&self, id: &str) -> bool {
        !matches!(
            self.inspect(id).await,
            Err(EngineError::Missing(_) | EngineError::Unreachable { .. })
        )
    }

    pub(super) async fn set_memory(&self, id: &str, bytes: i64) -> Result<(), EngineError> {
        let update = ContainerUpdateBody {
            memory: Some(bytes),
            memory_swap: Some(bytes),
            ..Default::default()
        };
        self.docker
            .update_container(id, update)
            .await
            .map_err(|error| self.failure(error, "such container"))
    }

    /// Lists containers that have this label with this value.
    pub(super) async fn list(
        &self,
        label: &str,
        value: &str,
    ) -> Result<Vec<ListedContainer>, EngineError> {
        self.list_of(HashMap::from([("label", vec![format!("{label}={value}")])]))
            .await
    }

    /// Lists containers of an image that have this label with this value.
    pub(super) async fn list_of_image(
        &self,
        label: &str,
        value: &str,
        image: &str,
    ) -> Result<Vec<ListedContainer>, EngineError> {
        let label = ("label", vec![format!("{label}={value}")]);
        self.list_of(HashMap::from([label, ("ancestor", vec![image.to_owned()])]))
            .await
    }

    async fn list_of(
        &self,
        filters: HashMap<&str, Vec<String>>,
    ) -> Result<Vec<ListedContainer>, EngineError> {
        let options = ListContainersOptionsBuilder::default()
            .all(true)
            .filters(&filters)
            .build();
        let listed = self
            .docker
            .list_containers(Some(options))
            .await
            .map_err(|error| self.failure(error, "list"))?;
        let known = listed.into_iter().filter_map(|each| {
            Some(ListedContainer {
                id: each.id?,
                labels: each.labels.unwrap_or_default(),
            })
        });
        Ok(known.collect())
    }

    /// Creates a volume, or finds the one of this name.
    pub(super) async fn volume(
        &self,
        name: &str,
        labels: HashMap<String, String>,
    ) -> Result<(), EngineError> {
        let request = VolumeCreateRequest {
            name: Some(name.to_owned()),
            labels: Some(labels),
            ..Default::default()
        };
        match self.docker.create_volume(request).await {
            // Podman rejects all but one of several simultaneous creations.
            Err(_) if self.docker.inspect_volume(name).await.is_ok() => Ok(()),
            made => made
                .map(drop)
                .map_err(|error| self.failure(error, "such volume")),
        }
    }

    /// Lists volumes that have this label with this value.
    pub(super) async fn volumes(
        &self,
        label: &str,
        value: &str,
    ) -> Result<Vec<ListedVolume>, EngineError> {
        let filters = HashMap::from([("label", vec![format!("{label}={value}")])]);
        let options = ListVolumesOptionsBuilder::default()
            .filters(&filters)
            .build();
        let listed = self
            .docker
            .list_volumes(Some(options))
            .await
            .map_err(|error| self.failure(error, "list"))?;
        let volumes = listed.volumes.unwrap_or_default().into_iter();
        Ok(volumes
            .map(|each| ListedVolume {
                name: each.name,
                labels: each.labels,
            })
            .collect())
    }

    /// Removes a volume, unless a container uses it. Returns whether it was removed.
    pub(super) async fn remove_volume(&self, name: &str) -> bool {
        self.docker
            .remove_volume(name, None::<RemoveVolumeOptions>)
            .await
            .is_ok()
    }

    /// Follows the events of containers that have this label with this value.
    pub(super) fn events(
        &self,
        label: &str,
        value: &str,
    ) -> Pin<Box<dyn Stream<Item = Result<EventMessage, Error>> + Send>> {
        let filters = HashMap::from([
            ("type", vec!["container".to_owned()]),
            ("label", vec![format!("{label}={value}")]),
        ]);
        Box::pin(self.docker.events(Some(
            EventsOptionsBuilder::default().filters(&filters).build(),
        )))
    }

    /// Follows the resource use of a container, about once a second: memory, bytes of files in
    /// memory, CPU time in nanoseconds.
    pub(super) fn usage(&self, id: &str) -> Pin<Box<dyn Stream<Item = (u64, u64, u64)> + Send>> {
        let options = StatsOptionsBuilder::default().stream(true).build();
        Box::pin(
            self.docker
                .stats(id, Some(options))
                .filter_map(async |stats| {
                    let stats = stats.ok()?;
                    let memory = stats.memory_stats?;
                    let detail = |name: &str| {
                        memory
                            .stats
                            .as_ref()
                            .and_then(|all| all.get(name))
                            .copied()
                            .unwrap_or(0)
                    };
                    let cached = detail("inactive_file") + detail("active_file");
                    let used = memory.usage.unwrap_or(0).saturating_sub(cached);
                    let time = stats
                        .cpu_stats
                        .and_then(|cpu| cpu.cpu_usage)
                        .and_then(|usage| usage.total_usage)
                        .unwrap_or(0);
                    Some((used, detail("shmem"), time))
                }),
        )
    }

    fn failure(&self, error: Error, thing: &str) -> EngineError {
        match error {
            Error::DockerResponseServerError {
                status_code: 404,
                message,
            } if !message.contains("runtime") => EngineError::Missing(thing.to_owned()),
            Error::DockerResponseServerError { message, .. }
            | Error::DockerStreamError { error: message } => {
                let short = message.chars().take(MAX_REFUSAL_LENGTH).collect();
                if message.contains("no space left") {
                    EngineError::DiskFull
                } else {
                    EngineError::Refused(short)
                }
            }
            Error::RequestTimeoutError => EngineError::Silent,
            other => EngineError::Unreachable {
                kind: self.kind,
                address: self.address.to_string(),
                why: describe(&other),
            },
        }
    }
}

/// Returns why the engine could not be reached. With `ssh` in between, its own message is the most
/// precise.
async fn reason(error: &Error, ssh_errors: Option<&SshErrors>) -> String {
    let said = match ssh_errors {
        Some(ssh_errors) => ssh_errors.message().await,
        None => None,
    };
    said.unwrap_or_else(|| describe(error))
}

/// Returns why an attempt failed, in one line. The HTTP client wraps the reason in several generic
/// errors, so for those only the innermost cause is returned.
fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let texts: Vec<String> = causes.map(ToString::to_string).collect();
    let is_http = matches!(
        error.downcast_ref::<Error>(),
        Some(Error::HyperLegacyError { .. })
    );
    match texts.last() {
        Some(innermost) if is_http => innermost.clone(),
        _ => texts.join(": "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_engine_that_cannot_be_reached_is_told_without_the_layers_of_the_http_client() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("engine.sock");
        // There is no listener any more.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let refused = Engine::connect(EngineKind::Docker, &EngineAddress::Unix(socket)).await;
        let Err(EngineError::Unreachable { why, .. }) = refused else {
            panic!("there is no engine")
        };
        assert_eq!(why, "Connection refused (os error 111)");
    }

    #[test]
    fn other_errors_are_told_with_their_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("ca.pem cannot be used")]
        struct Outer(#[source] std::io::Error);
        let inner = std::io::Error::other("it holds no certificate");
        assert_eq!(
            describe(&Outer(inner)),
            "ca.pem cannot be used: it holds no certificate"
        );
    }
}
