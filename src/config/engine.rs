//! Finds the container engine in the way of the engines' own command lines.
//!
//! For Docker: `DOCKER_HOST`, then the context of `DOCKER_CONTEXT` or of `~/.docker/config.json`,
//! then the default sockets, that of a rootless daemon first. For Podman: `CONTAINER_HOST` or
//! `DOCKER_HOST`, then the sockets of the user and of the system. Pure except for the files, which
//! are read through a given function.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::checks::NamedFile;
use crate::sandbox::container::{EngineAddress, EngineKind};

/// The socket of the system daemon.
const DOCKER_SOCKET: &str = "/var/run/docker.sock";
const PODMAN_SOCKET: &str = "/run/podman/podman.sock";
/// The context that stands for the default socket.
const DEFAULT_CONTEXT: &str = "default";

/// Why no engine was found.
#[derive(Debug, thiserror::Error)]
pub enum EngineProblem {
    #[error(
        "the address \"{0}\" of the container engine begins with none of unix://, tcp://, http://, \
         https:// and ssh://"
    )]
    Scheme(String),
    #[error("there is no context \"{0}\" of Docker, or it names no address")]
    Context(String),
    #[error("TLS is asked for, and DOCKER_CERT_PATH and HOME are both missing")]
    Certificates,
    #[error("could not read {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Finds the engine. `exists` returns whether a socket is present.
pub(super) fn find(
    kind: EngineKind,
    variables: &BTreeMap<String, String>,
    read: &dyn Fn(NamedFile<'_>) -> io::Result<Option<String>>,
    exists: &dyn Fn(&Path) -> bool,
) -> Result<EngineAddress, EngineProblem> {
    let variable = |name: &str| {
        variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    };
    let runtime = variable("XDG_RUNTIME_DIR").map(PathBuf::from);
    let named = match kind {
        EngineKind::Docker => variable("DOCKER_HOST"),
        EngineKind::Podman => variable("CONTAINER_HOST").or(variable("DOCKER_HOST")),
    };
    let certificates = variable("DOCKER_TLS_VERIFY").map(|_| {
        let home = variable("HOME").map(|home| Path::new(home).join(".docker"));
        variable("DOCKER_CERT_PATH")
            .map(PathBuf::from)
            .or(home)
            .ok_or(EngineProblem::Certificates)
    });
    if let Some(host) = named {
        return address(host, certificates.transpose()?);
    }
    match kind {
        EngineKind::Docker => {
            if let Some(found) = of_context(variables, read)? {
                return Ok(found);
            }
            let rootless = runtime
                .map(|folder| folder.join("docker.sock"))
                .filter(|socket| exists(socket));
            Ok(EngineAddress::Unix(
                rootless.unwrap_or_else(|| PathBuf::from(DOCKER_SOCKET)),
            ))
        }
        EngineKind::Podman => {
            let own = runtime
                .map(|folder| folder.join("podman/podman.sock"))
                .filter(|socket| exists(socket));
            Ok(EngineAddress::Unix(
                own.unwrap_or_else(|| PathBuf::from(PODMAN_SOCKET)),
            ))
        }
    }
}

/// Lists the files that may have registry credentials, highest precedence first.
pub(super) fn credential_files(
    kind: EngineKind,
    variables: &BTreeMap<String, String>,
) -> Vec<PathBuf> {
    let variable = |name: &str| {
        variables
            .get(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let below = |folder: Option<PathBuf>, file: &str| folder.map(|folder| folder.join(file));
    let docker = below(docker_folder(variables), "config.json");
    let podman = match kind {
        EngineKind::Docker => [None, None, None],
        EngineKind::Podman => [
            variable("REGISTRY_AUTH_FILE"),
            below(variable("XDG_RUNTIME_DIR"), "containers/auth.json"),
            below(
                variable("XDG_CONFIG_HOME").or(below(variable("HOME"), ".config")),
                "containers/auth.json",
            ),
        ],
    };
    podman.into_iter().flatten().chain(docker).collect()
}

/// The folder of the Docker command line's settings.
fn docker_folder(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    let variable = |name: &str| {
        variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    };
    variable("DOCKER_CONFIG")
        .map(PathBuf::from)
        .or(variable("HOME").map(|home| Path::new(home).join(".docker")))
}

fn address(host: &str, certificates: Option<PathBuf>) -> Result<EngineAddress, EngineProblem> {
    match (host.split_once("://"), certificates) {
        (Some(("unix", path)), _) => Ok(EngineAddress::Unix(PathBuf::from(path))),
        (Some(("ssh", _)), _) => Ok(EngineAddress::Ssh(host.to_owned())),
        (Some(("tcp" | "http" | "https", _)), Some(certificates)) => Ok(EngineAddress::Tls {
            address: host.to_owned(),
            certificates,
        }),
        (Some(("https", _)), None) => Err(EngineProblem::Certificates),
        (Some(("tcp" | "http", _)), None) => Ok(EngineAddress::Tcp(host.to_owned())),
        _ => Err(EngineProblem::Scheme(host.to_owned())),
    }
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(rename = "currentContext", default)]
    current_context: String,
}

#[derive(Deserialize)]
struct ContextMeta {
    #[serde(rename = "Endpoints", default)]
    endpoints: BTreeMap<String, Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(rename = "Host", default)]
    host: String,
}

/// Reads the address of the current context, if it is not the default one.
fn of_context(
    variables: &BTreeMap<String, String>,
    read: &dyn Fn(NamedFile<'_>) -> io::Result<Option<String>>,
) -> Result<Option<EngineAddress>, EngineProblem> {
    let variable = |name: &str| {
        variables
            .get(name)
            .map(String::as_str)
            .filter(|value| !value.is_empty())
    };
    let Some(folder) = docker_folder(variables) else {
        return Ok(None);
    };
    let text = |path: PathBuf| match read(NamedFile::ByOperator(&path)) {
        Ok(text) => Ok(text),
        Err(cause) => Err(EngineProblem::Unreadable { path, cause }),
    };
    let context = match variable("DOCKER_CONTEXT") {
        Some(context) => context.to_owned(),
        None => {
            let config = text(folder.join("config.json"))?;
            // Validating this file is not our task; a malformed one counts as one without a
            // context.
            let config = config.and_then(|text| serde_json::from_str::<DockerConfig>(&text).ok());
            config
                .map(|config| config.current_context)
                .unwrap_or_default()
        }
    };
    if context.is_empty() || context == DEFAULT_CONTEXT {
        return Ok(None);
    }
    let name: String = Sha256::digest(&context)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let meta = text(folder.join("contexts/meta").join(&name).join("meta.json"))?;
    let meta = meta.and_then(|text| serde_json::from_str::<ContextMeta>(&text).ok());
    let host = meta.and_then(|meta| {
        meta.endpoints
            .get("docker")
            .map(|endpoint| endpoint.host.clone())
    });
    let host = host
        .filter(|host| !host.is_empty())
        .ok_or(EngineProblem::Context(context))?;
    let certificates = folder.join("contexts/tls").join(&name).join("docker");
    let has_certificates = matches!(
        read(NamedFile::ByOperator(&certificates.join("ca.pem"))),
        Ok(Some(_))
    );
    address(&host, has_certificates.then_some(certificates)).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Finds an engine with these variables, files and sockets.
    fn found(
        kind: EngineKind,
        variables: &[(&str, &str)],
        files: &[(&str, &str)],
        sockets: &[&str],
    ) -> Result<EngineAddress, EngineProblem> {
        let variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let read = |file: NamedFile<'_>| {
            let NamedFile::ByOperator(path) = file else {
                unreachable!("no workspace is asked for")
            };
            Ok(files
                .iter()
                .find(|(name, _)| Path::new(name) == path)
                .map(|(_, text)| (*text).to_owned()))
        };
        find(kind, &variables, &read, &|path| {
            sockets.iter().any(|socket| Path::new(socket) == path)
        })
    }

    fn unix(path: &str) -> EngineAddress {
        EngineAddress::Unix(PathBuf::from(path))
    }

    #[test]
    fn without_anything_it_is_the_socket_of_the_system() {
        assert_eq!(
            found(EngineKind::Docker, &[], &[], &[]).unwrap(),
            unix("/var/run/docker.sock")
        );
        assert_eq!(
            found(EngineKind::Podman, &[], &[], &[]).unwrap(),
            unix("/run/podman/podman.sock")
        );
    }

    #[test]
    fn a_rootless_socket_comes_before_that_of_the_system() {
        let runtime = [("XDG_RUNTIME_DIR", "/run/user/7")];
        let sockets = ["/run/user/7/docker.sock", "/run/user/7/podman/podman.sock"];
        assert_eq!(
            found(EngineKind::Docker, &runtime, &[], &sockets).unwrap(),
            unix(sockets[0])
        );
        assert_eq!(
            found(EngineKind::Podman, &runtime, &[], &sockets).unwrap(),
            unix(sockets[1])
        );
        assert_eq!(
            found(EngineKind::Docker, &runtime, &[], &[]).unwrap(),
            unix("/var/run/docker.sock")
        );
    }

    #[test]
    fn an_address_that_was_named_wins() {
        let tcp = EngineAddress::Tcp("tcp://10.0.0.1:2375".to_owned());
        let named = [
            ("DOCKER_HOST", "tcp://10.0.0.1:2375"),
            ("DOCKER_CONTEXT", "other"),
        ];
        assert_eq!(found(EngineKind::Docker, &named, &[], &[]).unwrap(), tcp);
        let ssh = EngineAddress::Ssh("ssh://me@there".to_owned());
        assert_eq!(
            found(
                EngineKind::Docker,
                &[("DOCKER_HOST", "ssh://me@there")],
                &[],
                &[]
            )
            .unwrap(),
            ssh
        );
        let both = [
            ("DOCKER_HOST", "tcp://10.0.0.1:2375"),
            ("CONTAINER_HOST", "unix:///p.sock"),
        ];
        assert_eq!(
            found(EngineKind::Podman, &both, &[], &[]).unwrap(),
            unix("/p.sock")
        );
        assert!(matches!(
            found(EngineKind::Docker, &[("DOCKER_HOST", "there")], &[], &[]),
            Err(EngineProblem::Scheme(_))
        ));
    }

    #[test]
    fn certificates_are_used_when_tls_is_asked_for() {
        let tls = |variables: &[(&str, &str)]| found(EngineKind::Docker, variables, &[], &[]);
        let (host, verify) = (
            ("DOCKER_HOST", "tcp://10.0.0.1:2376"),
            ("DOCKER_TLS_VERIFY", "1"),
        );
        let expected = |folder: &str| EngineAddress::Tls {
            address: host.1.to_owned(),
            certificates: folder.into(),
        };
        assert_eq!(
            tls(&[host, verify, ("HOME", "/h")]).unwrap(),
            expected("/h/.docker")
        );
        assert_eq!(
            tls(&[host, verify, ("DOCKER_CERT_PATH", "/c")]).unwrap(),
            expected("/c")
        );
        assert!(matches!(
            tls(&[host, verify]),
            Err(EngineProblem::Certificates)
        ));
        assert_eq!(tls(&[host]).unwrap(), EngineAddress::Tcp(host.1.to_owned())); // control
    }

    #[test]
    fn credentials_are_where_a_login_leaves_them() {
        let files = |kind, variables: &[(&str, &str)]| {
            let variables = variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            let found = credential_files(kind, &variables);
            found
                .iter()
                .map(|file| file.to_string_lossy().into_owned())
                .collect::<Vec<_>>()
        };
        let home = [("HOME", "/h"), ("XDG_RUNTIME_DIR", "/r")];
        assert_eq!(files(EngineKind::Docker, &home), ["/h/.docker/config.json"]);
        assert_eq!(
            files(EngineKind::Docker, &[("DOCKER_CONFIG", "/d"), home[0]]),
            ["/d/config.json"]
        );
        let podman = [
            "/r/containers/auth.json",
            "/h/.config/containers/auth.json",
            "/h/.docker/config.json",
        ];
        assert_eq!(files(EngineKind::Podman, &home), podman);
        assert_eq!(
            files(EngineKind::Podman, &[("REGISTRY_AUTH_FILE", "/a")]),
            ["/a"]
        );
        assert!(files(EngineKind::Docker, &[]).is_empty());
    }

    #[test]
    fn a_context_names_the_engine() {
        let digest: String = Sha256::digest("there")
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let meta = format!("/h/.docker/contexts/meta/{digest}/meta.json");
        let files = [
            ("/h/.docker/config.json", r#"{"currentContext": "there"}"#),
            (
                meta.as_str(),
                r#"{"Name": "there", "Endpoints": {"docker": {"Host": "ssh://me@there"}}}"#,
            ),
        ];
        let ssh = EngineAddress::Ssh("ssh://me@there".to_owned());
        assert_eq!(
            found(EngineKind::Docker, &[("HOME", "/h")], &files, &[]).unwrap(),
            ssh
        );
        let default = [("HOME", "/h"), ("DOCKER_CONTEXT", "default")];
        assert_eq!(
            found(EngineKind::Docker, &default, &files, &[]).unwrap(),
            unix("/var/run/docker.sock")
        );
        let unknown = [("HOME", "/h"), ("DOCKER_CONTEXT", "nowhere")];
        assert!(matches!(
            found(EngineKind::Docker, &unknown, &files, &[]),
            Err(EngineProblem::Context(_))
        ));
    }
}
