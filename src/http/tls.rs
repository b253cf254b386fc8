//! TLS from files: a certificate chain and its key.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Why TLS cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("{} holds no readable certificates", path.display())]
    Certificates {
        path: PathBuf,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{} holds no readable private key", path.display())]
    Key {
        path: PathBuf,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{} can be read by other users of this machine; take that away with chmod \
             600", path.display())]
    KeyIsOpen { path: PathBuf },
    #[error("the certificate and the key cannot be used together")]
    Pair(#[source] rustls::Error),
}

/// Reads a certificate chain and its key, and creates the TLS acceptor.
pub fn acceptor(certificates: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let chain = read_certificates(certificates).map_err(|cause| TlsError::Certificates {
        path: certificates.to_owned(),
        cause,
    })?;
    let unreadable = |cause| TlsError::Key {
        path: key.to_owned(),
        cause,
    };
    let file = File::open(key).map_err(|cause| unreadable(cause.into()))?;
    if is_open(&file).map_err(|cause| unreadable(cause.into()))? {
        return Err(TlsError::KeyIsOpen {
            path: key.to_owned(),
        });
    }
    let key = PrivateKeyDer::from_pem_reader(BufReader::new(file))
        .map_err(|cause| unreadable(cause.into()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(TlsError::Pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn read_certificates(
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, Box<dyn std::error::Error + Send + Sync>> {
    let chain = CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?;
    if chain.is_empty() {
        Err("it has no certificate".into())
    } else {
        Ok(chain)
    }
}

/// Returns whether others than the owner and the group may read a file. Certificate tools share
/// keys with servers through groups.
fn is_open(file: &File) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata()?.mode() & 0o007 != 0)
}
