//! Container engines: where they listen, and what is asked of them. Docker and Podman speak the same API.
//!
//! `address` finds out where an engine listens, as the engine's own program does. `images` asks about images and makes them. `question` runs one
//! program once in a container that can do nothing else. What goes wrong is told in our words, with a cure where there is one.
//!
//! This room decides nothing about sandboxes, and touches no object of the engine that it was not given.

mod address;
mod images;
mod question;

use std::path::PathBuf;
use std::time::Duration;

use bollard::errors::Error;
use bollard::{API_DEFAULT_VERSION, Docker};

pub use self::address::{AddressError, EngineAddress};
pub use self::images::{BuildFailure, BuildNews, Building, ImageFacts};
pub use self::question::{Question, QuestionError};

/// How long one question to the engine may take; fetching and building are no questions.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which engine is meant. They differ in where they listen and what they call themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineKind {
    Docker,
    Podman,
}

impl EngineKind {
    pub const ALL: [EngineKind; 2] = [EngineKind::Docker, EngineKind::Podman];

    /// Its name in sentences.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Docker => "Docker",
            EngineKind::Podman => "Podman",
        }
    }

    /// Its name in settings and flags.
    pub fn word(self) -> &'static str {
        match self {
            EngineKind::Docker => "docker",
            EngineKind::Podman => "podman",
        }
    }

    /// The kind that a setting or a flag names.
    pub fn parse(word: &str) -> Option<EngineKind> {
        EngineKind::ALL.into_iter().find(|kind| kind.word() == word)
    }

    /// The variable that names another engine of this kind.
    pub fn variable(self) -> &'static str {
        match self {
            EngineKind::Docker => "DOCKER_HOST",
            EngineKind::Podman => "CONTAINER_HOST",
        }
    }
}

/// What went wrong with the engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error(
        "{} cannot be reached at {address}: {why}\nStart it, or name another one with {}", kind.name(), kind.variable()
    )]
    Unreachable { kind: EngineKind, address: String, why: String },
    #[error("{address} may not be opened by this user\nJoin the group that owns it, or use an engine without root")]
    Forbidden { address: String },
    #[error("there is no {0}")]
    Missing(String),
    #[error("{0}")]
    InUse(String),
    #[error(
        "the engine has no room left on its disk\nRemove images and containers there that nobody needs, such as with \"docker system prune\""
    )]
    DiskFull,
    #[error("the engine refused: {0}")]
    Refused(String),
    #[error("the engine did not answer in time")]
    Silent,
}

/// An engine that has answered once. Cheap to clone; each request is a connection of its own.
#[derive(Debug, Clone)]
pub struct Engine {
    kind: EngineKind,
    address: EngineAddress,
    docker: Docker,
}

impl Engine {
    /// Connects and finds out which version of the API both know.
    pub async fn connect(kind: EngineKind, address: &EngineAddress) -> Result<Engine, EngineError> {
        let seconds = PATIENCE.as_secs();
        let docker = match address {
            EngineAddress::Unix(path) => {
                Docker::connect_with_unix(&path.to_string_lossy(), seconds, API_DEFAULT_VERSION)
            }
            EngineAddress::Tcp(address) => Docker::connect_with_http(address, seconds, API_DEFAULT_VERSION),
            EngineAddress::Tls { address, certificates } => {
                let file = |name: &str| -> PathBuf { certificates.join(name) };
                let (key, certificate, authority) = (file("key.pem"), file("cert.pem"), file("ca.pem"));
                Docker::connect_with_ssl(address, &key, &certificate, &authority, seconds, API_DEFAULT_VERSION)
            }
            EngineAddress::Ssh(address) => Docker::connect_with_ssh(address, seconds, API_DEFAULT_VERSION, None),
        };
        let failed = |error: Error| failure(kind, address, &error, "such engine");
        let docker = docker.map_err(failed)?.negotiate_version().await.map_err(failed)?;
        Ok(Engine { kind, address: address.clone(), docker })
    }

    pub fn kind(&self) -> EngineKind {
        self.kind
    }

    pub fn address(&self) -> &EngineAddress {
        &self.address
    }

    /// Tells in our words what went wrong. `thing` is what the request was about.
    fn failure(&self, error: &Error, thing: &str) -> EngineError {
        failure(self.kind, &self.address, error, thing)
    }
}

fn failure(kind: EngineKind, address: &EngineAddress, error: &Error, thing: &str) -> EngineError {
    match error {
        Error::DockerResponseServerError { status_code, message } => answered(*status_code, message, thing),
        Error::DockerStreamError { error } => answered(500, error, thing),
        Error::RequestTimeoutError => EngineError::Silent,
        other => {
            let why = with_causes(other);
            if why.contains("Permission denied") {
                EngineError::Forbidden { address: address.to_string() }
            } else {
                EngineError::Unreachable { kind, address: address.to_string(), why }
            }
        }
    }
}

/// What an answer that is not a success means. Engines tell it with a number and a sentence, and both matter.
fn answered(status: u16, message: &str, thing: &str) -> EngineError {
    let is_image_missing = message.contains("No such image") || message.contains("image not known");
    match status {
        _ if message.contains("no space left on device") => EngineError::DiskFull,
        404 if is_image_missing || !message.contains("runtime") => EngineError::Missing(thing.to_owned()),
        409 => EngineError::InUse(message.trim().to_owned()),
        _ => EngineError::Refused(message.trim().to_owned()),
    }
}

/// The error and its causes in one line, none of them twice.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_told_in_our_words() {
        let thing = "image a";
        for (status, message, told) in [
            (404, "No such image: a", EngineError::Missing(thing.to_owned())),
            (500, "write /x: no space left on device", EngineError::DiskFull),
            (
                409,
                "image is being used by 1 container",
                EngineError::InUse("image is being used by 1 container".to_owned()),
            ),
            (500, "broken\n", EngineError::Refused("broken".to_owned())),
            (404, "unknown runtime x", EngineError::Refused("unknown runtime x".to_owned())),
        ] {
            assert_eq!(answered(status, message, thing), told);
        }
    }

    #[tokio::test]
    async fn an_engine_that_is_not_there_is_named_with_the_cure() {
        let folder = tempfile::tempdir().unwrap();
        let address = EngineAddress::Unix(folder.path().join("docker.sock"));
        let told = Engine::connect(EngineKind::Docker, &address).await.unwrap_err().to_string();
        assert!(told.contains("Docker cannot be reached at unix:///") && told.contains("DOCKER_HOST"), "{told}");
        let told = Engine::connect(EngineKind::Podman, &address).await.unwrap_err().to_string();
        assert!(told.contains("Podman") && told.contains("CONTAINER_HOST"), "{told}");
    }

    #[test]
    fn kinds_are_found_by_their_words() {
        assert_eq!(EngineKind::ALL.map(|kind| EngineKind::parse(kind.word())), EngineKind::ALL.map(Some));
        assert_eq!(EngineKind::parse("lxc"), None);
    }
}
