//! Where an engine listens: what its own program would use, read from the same variables and files.
//!
//! For Docker that is `DOCKER_HOST`, then the context that `DOCKER_CONTEXT` or the client's configuration names, then the socket of the machine,
//! then the user's own. For Podman it is `CONTAINER_HOST`, then the user's own socket, then that of the machine.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::EngineKind;

/// Where an engine listens.
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

impl fmt::Display for EngineAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineAddress::Unix(path) => write!(formatter, "unix://{}", path.display()),
            EngineAddress::Tcp(address) | EngineAddress::Tls { address, .. } | EngineAddress::Ssh(address) => {
                formatter.write_str(address)
            }
        }
    }
}

/// Why it is not known where an engine listens.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    #[error(
        "\"{written}\" ({origin}) is not the address of an engine, such as unix:///run/docker.sock, tcp://host:2376 or ssh://user@host"
    )]
    NotAnAddress { written: String, origin: String },
    #[error("there is no Docker context \"{name}\" ({origin}); \"docker context ls\" lists those that there are")]
    NoContext { name: String, origin: String },
    #[error("could not read {}, which says which Docker engine is used", file.display())]
    Unreadable {
        file: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{} is not what Docker writes there", file.display())]
    NotUnderstood {
        file: PathBuf,
        #[source]
        cause: serde_json::Error,
    },
}

impl EngineAddress {
    /// Finds out where the engine of a kind listens. Whether anybody answers there is another question.
    pub fn find(kind: EngineKind, variables: &BTreeMap<String, String>) -> Result<EngineAddress, AddressError> {
        let variable = |name: &str| variables.get(name).map(String::as_str).filter(|value| !value.is_empty());
        if let Some(written) = variable(kind.variable()) {
            return parse(written, kind.variable(), variable_certificates(variables));
        }
        if kind == EngineKind::Docker
            && let Some(address) = of_context(variables)?
        {
            return Ok(address);
        }
        let own = variable("XDG_RUNTIME_DIR").map(PathBuf::from);
        let candidates = match kind {
            EngineKind::Docker => {
                [Some(PathBuf::from("/var/run/docker.sock")), own.map(|folder| folder.join("docker.sock"))]
            }
            EngineKind::Podman => {
                [own.map(|folder| folder.join("podman/podman.sock")), Some(PathBuf::from("/run/podman/podman.sock"))]
            }
        };
        let mut candidates: Vec<PathBuf> = candidates.into_iter().flatten().collect();
        let found = candidates.iter().position(|path| path.exists()).unwrap_or(0);
        Ok(EngineAddress::Unix(candidates.swap_remove(found)))
    }
}

/// Reads an address. Over TCP it is TLS if there are certificates for it.
fn parse(written: &str, origin: &str, certificates: Option<PathBuf>) -> Result<EngineAddress, AddressError> {
    let refused = || AddressError::NotAnAddress { written: written.to_owned(), origin: origin.to_owned() };
    let (scheme, rest) = written.split_once("://").ok_or_else(refused)?;
    if rest.is_empty() || rest.contains(char::is_whitespace) {
        return Err(refused());
    }
    match (scheme, certificates) {
        ("unix", _) if rest.starts_with('/') => Ok(EngineAddress::Unix(PathBuf::from(rest))),
        ("tcp" | "http" | "https", Some(certificates)) => {
            Ok(EngineAddress::Tls { address: format!("tcp://{rest}"), certificates })
        }
        ("tcp" | "http", None) => Ok(EngineAddress::Tcp(format!("tcp://{rest}"))),
        ("ssh", _) => Ok(EngineAddress::Ssh(written.to_owned())),
        _ => Err(refused()),
    }
}

/// Returns the folder of the certificates that variables ask for, if they ask for TLS.
fn variable_certificates(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    let given = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    given("DOCKER_TLS_VERIFY").or(given("DOCKER_TLS"))?;
    given("DOCKER_CERT_PATH").map(PathBuf::from).or_else(|| client_folder(variables))
}

/// The folder where Docker's client keeps its configuration.
fn client_folder(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    let given = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    given("DOCKER_CONFIG").map(PathBuf::from).or_else(|| given("HOME").map(|home| Path::new(home).join(".docker")))
}

#[derive(Deserialize)]
struct ClientConfiguration {
    #[serde(rename = "currentContext")]
    current_context: Option<String>,
}

#[derive(Deserialize)]
struct Context {
    #[serde(rename = "Endpoints", default)]
    endpoints: BTreeMap<String, Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    #[serde(rename = "Host")]
    host: Option<String>,
}

/// Returns the address in the context that is in use, unless it is the default one, which has none.
fn of_context(variables: &BTreeMap<String, String>) -> Result<Option<EngineAddress>, AddressError> {
    let Some(folder) = client_folder(variables) else { return Ok(None) };
    let configuration = folder.join("config.json");
    let (name, origin) = match variables.get("DOCKER_CONTEXT").filter(|name| !name.is_empty()) {
        Some(name) => (Some(name.clone()), "DOCKER_CONTEXT".to_owned()),
        None => {
            let read: Option<ClientConfiguration> = read(&configuration)?;
            (read.and_then(|read| read.current_context), configuration.display().to_string())
        }
    };
    let Some(name) = name.filter(|name| !name.is_empty() && name != "default") else { return Ok(None) };
    // The client names the folder of a context by the hash of its name.
    let hash: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    let context: Option<Context> = read(&folder.join("contexts/meta").join(&hash).join("meta.json"))?;
    let endpoint = context.and_then(|mut context| context.endpoints.remove("docker"));
    let Some(host) = endpoint.and_then(|endpoint| endpoint.host).filter(|host| !host.is_empty()) else {
        return Err(AddressError::NoContext { name, origin });
    };
    let certificates = folder.join("contexts/tls").join(&hash).join("docker");
    let certificates = Some(certificates).filter(|folder| folder.join("cert.pem").is_file());
    parse(&host, &format!("the context {name}"), certificates).map(Some)
}

fn read<T: for<'de> Deserialize<'de>>(file: &Path) -> Result<Option<T>, AddressError> {
    match std::fs::read(file) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|cause| AddressError::NotUnderstood { file: file.to_owned(), cause }),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(cause) => Err(AddressError::Unreadable { file: file.to_owned(), cause }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(kind: EngineKind, variables: &[(&str, &str)]) -> Result<EngineAddress, String> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        EngineAddress::find(kind, &variables).map_err(|error| error.to_string())
    }

    fn unix(path: &str) -> Result<EngineAddress, String> {
        Ok(EngineAddress::Unix(PathBuf::from(path)))
    }

    /// Docker's client folder with one context called `far`.
    fn client_folder_with(host: &str, current: Option<&str>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let hash = "512eea46ceb3921dff4363c7069d89d4964d1d9fccaa0f411851a7aa60a5c868";
        let meta = folder.path().join("contexts/meta").join(hash);
        std::fs::create_dir_all(&meta).unwrap();
        let text = serde_json::json!({"Name": "far", "Metadata": {}, "Endpoints": {"docker": {"Host": host}}});
        std::fs::write(meta.join("meta.json"), text.to_string()).unwrap();
        if let Some(current) = current {
            let text = serde_json::json!({"auths": {}, "currentContext": current}).to_string();
            std::fs::write(folder.path().join("config.json"), text).unwrap();
        }
        let tls = folder.path().join("contexts/tls").join(hash).join("docker");
        (folder, tls)
    }

    #[test]
    fn a_variable_names_the_engine() {
        let docker = |host: &str| find(EngineKind::Docker, &[("DOCKER_HOST", host)]);
        assert_eq!(docker("unix:///run/x.sock"), unix("/run/x.sock"));
        assert_eq!(docker("tcp://far:2375"), Ok(EngineAddress::Tcp("tcp://far:2375".to_owned())));
        assert_eq!(docker("ssh://me@far"), Ok(EngineAddress::Ssh("ssh://me@far".to_owned())));
        for bad in ["far:2375", "unix://x.sock", "fd://", "npipe:////./pipe/docker", "tcp://"] {
            assert!(docker(bad).unwrap_err().contains("DOCKER_HOST"), "{bad}");
        }
        assert_eq!(find(EngineKind::Podman, &[("CONTAINER_HOST", "unix:///p")]), unix("/p"));
        assert_ne!(find(EngineKind::Podman, &[("DOCKER_HOST", "unix:///p")]), unix("/p"));
    }

    #[test]
    fn certificates_make_tcp_tls() {
        let tls = |folder: &str| {
            Ok(EngineAddress::Tls { address: "tcp://far:2376".to_owned(), certificates: PathBuf::from(folder) })
        };
        let host = ("DOCKER_HOST", "tcp://far:2376");
        let verify = ("DOCKER_TLS_VERIFY", "1");
        assert_eq!(find(EngineKind::Docker, &[host, verify, ("DOCKER_CERT_PATH", "/c")]), tls("/c"));
        assert_eq!(find(EngineKind::Docker, &[host, verify, ("HOME", "/h")]), tls("/h/.docker"));
        let without = find(EngineKind::Docker, &[host, ("DOCKER_CERT_PATH", "/c")]);
        assert_eq!(without, Ok(EngineAddress::Tcp("tcp://far:2376".to_owned())));
    }

    #[test]
    fn a_context_names_the_engine_and_a_variable_wins_over_it() {
        let (folder, tls) = client_folder_with("tcp://far:2376", Some("far"));
        let home = ("DOCKER_CONFIG", folder.path().to_str().unwrap());
        assert_eq!(find(EngineKind::Docker, &[home]), Ok(EngineAddress::Tcp("tcp://far:2376".to_owned())));
        std::fs::create_dir_all(&tls).unwrap();
        std::fs::write(tls.join("cert.pem"), "").unwrap();
        let expected = EngineAddress::Tls { address: "tcp://far:2376".to_owned(), certificates: tls };
        assert_eq!(find(EngineKind::Docker, &[home]), Ok(expected));
        assert_eq!(find(EngineKind::Docker, &[home, ("DOCKER_HOST", "unix:///x")]), unix("/x"));
        let default = find(EngineKind::Docker, &[home, ("DOCKER_CONTEXT", "default")]).unwrap();
        assert!(matches!(default, EngineAddress::Unix(_)), "the default context has no address of its own");
        let missing = find(EngineKind::Docker, &[home, ("DOCKER_CONTEXT", "near")]).unwrap_err();
        assert!(missing.contains("\"near\"") && missing.contains("DOCKER_CONTEXT"), "{missing}");
    }

    #[test]
    fn a_context_may_be_chosen_for_one_command() {
        let (folder, _) = client_folder_with("ssh://me@far", None);
        let variables = [("DOCKER_CONFIG", folder.path().to_str().unwrap()), ("DOCKER_CONTEXT", "far")];
        assert_eq!(find(EngineKind::Docker, &variables), Ok(EngineAddress::Ssh("ssh://me@far".to_owned())));
    }

    #[test]
    fn a_configuration_that_is_not_understood_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{").unwrap();
        let told = find(EngineKind::Docker, &[("DOCKER_CONFIG", folder.path().to_str().unwrap())]).unwrap_err();
        assert!(told.contains("config.json"), "{told}");
    }

    #[test]
    fn the_users_own_socket_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let own = ("XDG_RUNTIME_DIR", folder.path().to_str().unwrap());
        let socket = folder.path().join("podman/podman.sock");
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        std::fs::write(&socket, "").unwrap();
        assert_eq!(find(EngineKind::Podman, &[own]), Ok(EngineAddress::Unix(socket)));
    }
}
