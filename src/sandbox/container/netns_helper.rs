//! Helper containers that open the listeners of other containers, for a server that may not enter
//! those itself.
//!
//! A user of an engine that runs as root can have it do what the server itself may not: join the
//! network namespace of a container. So the engine starts a helper there. It is this same program;
//! it sends the listeners back and ends (`jail::netns_helper`):
//!
//! ```text
//! server ── engine API ── engine ── container of a session, without a network
//!    │                       └───── helper, in the network of that container
//!    └──────── one socket ──────────┘   carries the listeners back
//! ```
//!
//! Its image is empty. It contains only files of this server that make up the program, including
//! its loader and its libraries, so that no foreign code runs with its two capabilities. It is gone
//! before the first byte is sent through the listeners, and has seen nothing of a user's.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::models::ContainerCreateBody;
use cellblock_jail::netns_helper::{ARGUMENT, HelperSocket, Libraries, SECRET_VARIABLE};
use cellblock_jail::netns_listeners::NetnsError;
use cellblock_jail::network::{EgressPorts, ListenerKind};
use futures_util::{Stream, StreamExt};
use tracing::{debug, warn};

use super::engine::{Engine, EngineError};
use super::image::fresh_number;
use super::sandbox::REMOVAL_TIMEOUT;
use super::spec::{self, ContainerBind};
use crate::sandbox::egress::random_token;

/// The name of the empty image.
const IMAGE: &str = "cellblock-porter";

/// Timeout for a helper, from its start to its end. It takes tenths of a second, most of them spent
/// in the engine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum bytes kept of a helper's output.
const MAX_OUTPUT: usize = 4 * 1024;

/// Paths inside of a helper's files, and of the socket to which it connects.
const LOADER: &str = "/cellblock/loader";
const PROGRAM: &str = "/cellblock/program";
const LIBRARIES: &str = "/cellblock/libraries";
const LODGE: &str = "/cellblock/lodge";

/// Why a helper did not deliver listeners.
#[derive(Debug, thiserror::Error)]
pub(super) enum NetnsHelperError {
    #[error("the files of this program cannot be found")]
    Files(#[source] io::Error),
    #[error("the file of this program cannot be read by everybody; change its rights (chmod a+rx)")]
    Unreadable,
    #[error("the socket at which it is awaited cannot be made")]
    Lodge(#[source] io::Error),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("it did not end within {} s", TIMEOUT.as_secs())]
    Hangs,
    #[error(
        "it brought no listeners{}",
        .said.as_deref().map(|said| format!(" and said: {said}")).unwrap_or_default()
    )]
    Failed {
        said: Option<String>,
        #[source]
        cause: NetnsError,
    },
}

/// Starts helpers through the engine.
pub(super) struct NetnsHelpers {
    engine: Engine,
    /// Prefix of the socket paths (`HelperSocket`). Only this server's user can access them.
    lodges: PathBuf,
    labels: HashMap<String, String>,
    /// Held while looking for the image, so that it is made once.
    looking: tokio::sync::Mutex<()>,
}

impl NetnsHelpers {
    pub(super) fn new(
        engine: Engine,
        lodges: PathBuf,
        labels: HashMap<String, String>,
    ) -> NetnsHelpers {
        NetnsHelpers {
            engine,
            lodges,
            labels,
            looking: tokio::sync::Mutex::default(),
        }
    }

    /// Opens listeners in the network of a running container, by a helper that runs `program`.
    /// Nothing of the helper is left afterwards.
    pub(super) async fn open(
        &self,
        program: &Path,
        container: &str,
        listeners: &EgressPorts,
    ) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsHelperError> {
        let number = fresh_number();
        let token = random_token().map_err(NetnsHelperError::Lodge)?;
        let path = PathBuf::from(format!("{}-{number:016x}", self.lodges.display()));
        let lodge = Arc::new(HelperSocket::open(&path, &token).map_err(NetnsHelperError::Lodge)?);
        let files = HelperFiles::of(program, Libraries::own().map_err(NetnsHelperError::Files)?)?;
        let image = {
            let _alone = self.looking.lock().await;
            self.engine.empty_image(IMAGE).await?
        };
        let body = files.container(&image, container, &path, &token, self.labels.clone());
        let id = self
            .engine
            .create(&format!("cellblock-porter-{number:016x}"), &body)
            .await?;
        let removal = Removal {
            engine: self.engine.clone(),
            id: Some(id.clone()),
        };
        let received = self.received(&id, lodge, listeners.clone()).await;
        removal.done().await;
        received
    }

    /// Starts a helper and waits for its end. By then its listeners have arrived at the socket
    /// (`HelperSocket`), or never will.
    async fn received(
        &self,
        id: &str,
        lodge: Arc<HelperSocket>,
        listeners: EgressPorts,
    ) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsHelperError> {
        let closing = Closing(lodge.clone());
        let waiting = tokio::task::spawn_blocking(move || lodge.receive_listeners(&listeners));
        let attached = self.engine.attach(id).await?;
        self.engine.start(id).await?;
        let said = tokio::time::timeout(TIMEOUT, last_line(attached.output)).await;
        let said = said.map_err(|_| NetnsHelperError::Hangs)?;
        drop(closing);
        let received = waiting
            .await
            .map_err(|error| NetnsHelperError::Lodge(io::Error::other(error)))?;
        debug!(opened = received.is_ok(), "a network helper has ended");
        received.map_err(|cause| NetnsHelperError::Failed { said, cause })
    }
}

/// Closes a socket (`HelperSocket`), so that no thread waits there for a helper that has ended or
/// was never started.
struct Closing(Arc<HelperSocket>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Removes a container, even when the caller no longer waits.
struct Removal {
    engine: Engine,
    id: Option<String>,
}

impl Removal {
    async fn done(mut self) {
        let Some(id) = &self.id else { return };
        // Podman does not remove a container while another one depends on its network.
        if tokio::time::timeout(REMOVAL_TIMEOUT, self.engine.remove_wholly(id))
            .await
            .is_err()
        {
            warn!("a network helper could not be removed");
        }
        self.id = None;
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        if let (Some(id), Ok(runtime)) = (self.id.take(), tokio::runtime::Handle::try_current()) {
            let engine = self.engine.clone();
            runtime.spawn(async move { engine.remove(&id).await });
        }
    }
}

/// Returns the last line that a container writes before it ends. It is an unverified claim of the
/// code inside.
async fn last_line(
    mut output: Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>,
) -> Option<String> {
    let mut said = Vec::new();
    while let Some(Ok(piece)) = output.next().await {
        let piece = piece.into_bytes();
        said.extend_from_slice(&piece[..piece.len().min(MAX_OUTPUT - said.len())]);
    }
    let said = String::from_utf8_lossy(&said);
    said.lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())
        .map(str::to_owned)
}

/// The host files that a helper consists of.
#[derive(Debug, PartialEq, Eq)]
struct HelperFiles {
    program: PathBuf,
    loader: Option<PathBuf>,
    /// With their names inside.
    libraries: Vec<(PathBuf, String)>,
}

impl HelperFiles {
    fn of(
        program: &Path,
        Libraries { loader, shared }: Libraries,
    ) -> Result<HelperFiles, NetnsHelperError> {
        let rights = fs::metadata(program)
            .map_err(NetnsHelperError::Files)?
            .permissions()
            .mode();
        // A helper has no right over files of other owners.
        if rights & 0o005 != 0o005 {
            return Err(NetnsHelperError::Unreadable);
        }
        let mut libraries: Vec<(PathBuf, String)> = Vec::new();
        for library in shared {
            let name = library
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            // There is one path for each name. The loader also takes the first match.
            if !libraries.iter().any(|(_, known)| *known == name) {
                libraries.push((library, name));
            }
        }
        Ok(HelperFiles {
            program: program.to_owned(),
            loader,
            libraries,
        })
    }

    /// Returns the configuration of a helper for a container, with the socket and the token it
    /// connects with.
    fn container(
        &self,
        image: &str,
        container: &str,
        lodge: &Path,
        token: &str,
        labels: HashMap<String, String>,
    ) -> ContainerCreateBody {
        let inside = |name: &str| format!("{LIBRARIES}/{name}");
        let shown = |host: &Path, inside: String| ContainerBind {
            host: host.to_owned(),
            inside: PathBuf::from(inside),
            writable: false,
        };
        let mut binds = vec![
            shown(&self.program, PROGRAM.to_owned()),
            shown(lodge, LODGE.to_owned()),
        ];
        binds.extend(
            self.loader
                .iter()
                .map(|loader| shown(loader, LOADER.to_owned())),
        );
        binds.extend(
            self.libraries
                .iter()
                .map(|(library, name)| shown(library, inside(name))),
        );
        let mut command = vec![PROGRAM, ARGUMENT, LODGE];
        let mut variables = vec![(SECRET_VARIABLE.to_owned(), token.to_owned())];
        if self.loader.is_some() {
            command.splice(..0, [LOADER, "--library-path", LIBRARIES]);
            // A library is requested by a name that may differ from its file name. A loaded library
            // is known by both.
            let all: Vec<String> = self
                .libraries
                .iter()
                .map(|(_, name)| inside(name))
                .collect();
            variables.push(("LD_PRELOAD".to_owned(), all.join(":")));
        }
        let command = command.into_iter().map(str::to_owned).collect();
        spec::netns_helper(spec::NetnsHelper {
            image,
            container,
            binds: &binds,
            command,
            variables,
            labels,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(loader: Option<&str>, shared: &[&str]) -> ContainerCreateBody {
        let libraries = Libraries {
            loader: loader.map(PathBuf::from),
            shared: shared.iter().map(PathBuf::from).collect(),
        };
        let files = HelperFiles::of(Path::new("/bin/sh"), libraries).unwrap();
        files.container(
            "sha256:1",
            "c0ffee",
            Path::new("/run/lodge"),
            "word",
            HashMap::new(),
        )
    }

    /// Returns the mounts of a container, as `host inside`.
    fn shown(body: &ContainerCreateBody) -> Vec<String> {
        let mounts = body.host_config.as_ref().unwrap().mounts.iter().flatten();
        mounts
            .map(|mount| {
                format!(
                    "{} {}",
                    mount.source.as_ref().unwrap(),
                    mount.target.as_ref().unwrap()
                )
            })
            .collect()
    }

    #[test]
    fn a_helper_brings_its_own_loader_and_libraries() {
        let body = body(
            Some("/lib/ld.so"),
            &["/lib/libc-2.31.so", "/lib/libz.so.1", "/other/libz.so.1"],
        );
        let expected = [
            "/bin/sh /cellblock/program",
            "/run/lodge /cellblock/lodge",
            "/lib/ld.so /cellblock/loader",
            "/lib/libc-2.31.so /cellblock/libraries/libc-2.31.so",
            "/lib/libz.so.1 /cellblock/libraries/libz.so.1",
        ];
        assert_eq!(shown(&body), expected);
        assert_eq!(body.entrypoint.unwrap(), ["/cellblock/loader"]);
        let words = [
            "--library-path",
            "/cellblock/libraries",
            "/cellblock/program",
            ARGUMENT,
            "/cellblock/lodge",
        ];
        assert_eq!(body.cmd.unwrap(), words);
        let preloaded =
            "LD_PRELOAD=/cellblock/libraries/libc-2.31.so:/cellblock/libraries/libz.so.1";
        assert_eq!(
            body.env.unwrap(),
            ["CELLBLOCK_NETNS_HELPER_SECRET=word", preloaded]
        );
    }

    #[test]
    fn a_program_that_is_linked_to_nothing_is_started_itself() {
        let body = body(None, &[]);
        assert_eq!(shown(&body).len(), 2);
        assert_eq!(body.entrypoint.unwrap(), ["/cellblock/program"]);
        assert_eq!(body.cmd.unwrap(), [ARGUMENT, "/cellblock/lodge"]);
        assert_eq!(body.env.unwrap(), ["CELLBLOCK_NETNS_HELPER_SECRET=word"]);
    }

    #[test]
    fn a_program_that_others_may_not_read_is_named_as_the_reason() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let of = |rights| {
            fs::set_permissions(file.path(), fs::Permissions::from_mode(rights)).unwrap();
            HelperFiles::of(
                file.path(),
                Libraries {
                    loader: None,
                    shared: Vec::new(),
                },
            )
        };
        assert!(of(0o755).is_ok()); // control
        assert!(matches!(of(0o750), Err(NetnsHelperError::Unreadable)));
    }
}
