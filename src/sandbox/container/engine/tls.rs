//! An engine over TLS, verified against `ca.pem` only, not against the system's trusted roots.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bollard::Docker;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use super::dial::{self, Dialling};

/// The default port of engines with TLS.
const USUAL_PORT: u16 = 2376;

/// Why no connection can be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum TlsProblem {
    #[error("its address is not of the form tcp://host:port")]
    Address,
    #[error("{} cannot be used: {why}", path.display())]
    File { path: PathBuf, why: String },
    #[error("the certificate and the key of this side do not fit: {0}")]
    Pair(rustls::Error),
    #[error(transparent)]
    Client(#[from] bollard::errors::Error),
}

/// Makes a client for an engine, with the `ca.pem`, `cert.pem` and `key.pem` of a folder.
pub(super) fn client(
    address: &str,
    certificates: &Path,
    seconds: u64,
) -> Result<Docker, TlsProblem> {
    let (host, port) = place(address).ok_or(TlsProblem::Address)?;
    let name = ServerName::try_from(host.clone()).map_err(|_| TlsProblem::Address)?;
    let connector = TlsConnector::from(Arc::new(settings(certificates)?));
    let dial = move || -> Dialling {
        let (connector, name, host) = (connector.clone(), name.clone(), host.clone());
        Box::pin(async move {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let mut secured = connector.connect(name, stream).await?;
            let (ours, mut theirs) = UnixStream::pair()?;
            // When one side closes, the task ends and closes the other.
            tokio::spawn(
                async move { tokio::io::copy_bidirectional(&mut theirs, &mut secured).await },
            );
            Ok(ours)
        })
    };
    Ok(dial::client(dial, seconds)?)
}

/// Splits `tcp://host:port`; an IPv6 address is in brackets.
fn place(address: &str) -> Option<(String, u16)> {
    let (_, rest) = address.split_once("://")?;
    let rest = rest.trim_end_matches('/');
    let (host, port) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':')?)),
        None => rest
            .split_once(':')
            .map_or((rest, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(USUAL_PORT), |port| port.parse().ok())?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

fn settings(folder: &Path) -> Result<ClientConfig, TlsProblem> {
    let file = |name: &str| folder.join(name);
    let unusable = |path: PathBuf, why: String| TlsProblem::File { path, why };
    let certificates = |path: PathBuf| -> Result<Vec<CertificateDer<'static>>, TlsProblem> {
        let read =
            CertificateDer::pem_file_iter(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match read {
            Ok(found) if !found.is_empty() => Ok(found),
            Ok(_) => Err(unusable(path, "it holds no certificate".to_owned())),
            Err(error) => Err(unusable(path, error.to_string())),
        }
    };
    let mut authorities = RootCertStore::empty();
    let path = file("ca.pem");
    for certificate in certificates(path.clone())? {
        authorities
            .add(certificate)
            .map_err(|error| unusable(path.clone(), error.to_string()))?;
    }
    let own = certificates(file("cert.pem"))?;
    let path = file("key.pem");
    let key =
        PrivateKeyDer::from_pem_file(&path).map_err(|error| unusable(path, error.to_string()))?;
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_root_certificates(authorities)
                .with_client_auth_cert(own, key)
        })
        .map_err(TlsProblem::Pair)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        let found = |address: &str| place(address).map(|(host, port)| format!("{host} {port}"));
        assert_eq!(found("tcp://there:1234").as_deref(), Some("there 1234"));
        assert_eq!(found("https://there/").as_deref(), Some("there 2376"));
        assert_eq!(found("tcp://[fd00::1]:1").as_deref(), Some("fd00::1 1"));
        assert_eq!(found("tcp://[fd00::1]").as_deref(), Some("fd00::1 2376"));
        for bad in [
            "there:1",
            "tcp://",
            "tcp://there:port",
            "tcp://[fd00::1]x",
            "tcp://there:70000",
        ] {
            assert_eq!(found(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let told = || settings(folder.path()).unwrap_err().to_string();
        assert!(told().contains("ca.pem"), "{}", told());
        std::fs::write(folder.path().join("ca.pem"), "nothing").unwrap();
        assert!(
            told().contains("ca.pem cannot be used: it holds no certificate"),
            "{}",
            told()
        );
    }
}
