//! The CA that only sandboxes trust, and the CAs that we trust.
//!
//! HTTPS to a host with a secret is terminated here, so a program inside must accept our
//! certificate for that host. There is one [`Authority`] per server. Its key never leaves this
//! process, it is valid for some weeks, and its certificate is *name-constrained*: a client that
//! trusts it trusts it only for the hosts of the vault (and names below them), not for other names
//! or for any address.
//!
//! [`TrustRoots`] is the other side: the roots for verifying the real host. It is created once and
//! shared.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CidrSubnet, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, KeyPair, KeyUsagePurpose, NameConstraints,
    PKCS_ECDSA_P256_SHA256,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::name::HostName;
use crate::secrets::Vault;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// Tolerance for clock differences, as in a sandbox with its own clock.
const VALID_BEFORE: Duration = HOUR;

/// Longer than any session should live.
const AUTHORITY_LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

const LEAF_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

/// A connection that starts with an old certificate still has half of its lifetime.
const LEAF_RENEWED_AFTER: Duration = Duration::from_secs(12 * 60 * 60);

/// The only protocol on both sides: every request in it can be parsed.
const PROTOCOL: &[u8] = b"http/1.1";

/// Signs certificates for the hosts of a vault, and holds the roots for verifying real hosts.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    hosts: Vec<HostName>,
    leaves: Mutex<HashMap<HostName, (Instant, Arc<ServerConfig>)>>,
    trust: TrustRoots,
}

/// The roots for verifying real hosts. Clones share them.
#[derive(Clone)]
pub struct TrustRoots(Arc<ClientConfig>);

/// Reason why there is no authority or no certificate.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("no host has a secret, so there is nothing to sign for")]
    NoHosts,
    #[error("{0} has no secret, so no certificate is made for it")]
    OtherHost(HostName),
    #[error("could not make a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("could not use a certificate")]
    Tls(#[from] rustls::Error),
    #[error("the additional authorities are not certificates in PEM form")]
    Pem(#[from] rustls::pki_types::pem::Error),
}

impl Authority {
    /// Creates an authority with a new key for the hosts of `vault`.
    pub fn new(vault: &Vault, trust: TrustRoots) -> Result<Authority, AuthorityError> {
        let hosts: Vec<HostName> = vault.hosts().cloned().collect();
        if hosts.is_empty() {
            return Err(AuthorityError::NoHosts);
        }
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let issuer = CertifiedIssuer::self_signed(authority_params(&hosts), key)?;
        Ok(Authority {
            issuer,
            hosts,
            leaves: Mutex::default(),
            trust,
        })
    }

    /// Returns the certificate that the sandbox has to trust, in PEM form. It is not secret.
    pub fn certificate_pem(&self) -> String {
        self.issuer.pem()
    }

    /// Returns the TLS server configuration for `name`, a host of the vault. Certificates are
    /// created on demand and cached for some hours.
    pub(crate) fn server(&self, name: &HostName) -> Result<Arc<ServerConfig>, AuthorityError> {
        if !self.hosts.contains(name) {
            return Err(AuthorityError::OtherHost(name.clone()));
        }
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, server)) = leaves
            .get(name)
            .filter(|(made, _)| made.elapsed() < LEAF_RENEWED_AFTER)
        {
            return Ok(server.clone());
        }
        let server = Arc::new(self.sign(name.as_str())?);
        leaves.insert(name.clone(), (Instant::now(), server.clone()));
        Ok(server)
    }

    /// Returns the TLS client configuration for real hosts.
    pub(crate) fn client(&self) -> Arc<ClientConfig> {
        self.trust.0.clone()
    }

    fn sign(&self, name: &str) -> Result<ServerConfig, AuthorityError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let leaf = leaf_params(name)?.signed_by(&key, &self.issuer)?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut server =
            ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_no_client_auth()
                .with_single_cert(vec![leaf.der().clone()], key)?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(server)
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Authority")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

impl TrustRoots {
    /// Trusts the roots of this system. Takes some milliseconds.
    pub fn system() -> TrustRoots {
        TrustRoots::system_and(&[]).expect("the system's roots were read and checked one by one")
    }

    /// Trusts the roots of this system and those in `pem`, for hosts with a private CA.
    pub fn system_and(pem: &[u8]) -> Result<TrustRoots, AuthorityError> {
        let mut roots = RootCertStore::empty();
        let system = rustls_native_certs::load_native_certs();
        for error in &system.errors {
            tracing::warn!(%error, "some of the system's certificate authorities could not be \
                                    read");
        }
        roots.add_parsable_certificates(system.certs);
        for certificate in CertificateDer::pem_slice_iter(pem) {
            roots.add(certificate?)?;
        }
        let mut client =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()?
                .with_root_certificates(roots)
                .with_no_client_auth();
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(TrustRoots(Arc::new(client)))
    }
}

impl fmt::Debug for TrustRoots {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Trust")
    }
}

fn authority_params(hosts: &[HostName]) -> CertificateParams {
    let mut params = valid_for(AUTHORITY_LIFE);
    params
        .distinguished_name
        .push(DnType::CommonName, "Cellblock session authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    // A list of names does not restrict addresses, so without this all addresses would be
    // permitted.
    let addresses = [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    ];
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: hosts
            .iter()
            .map(|host| GeneralSubtree::DnsName(host.to_string()))
            .collect(),
        excluded_subtrees: addresses
            .map(|any| GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(any, 0)))
            .to_vec(),
    });
    params
}

fn leaf_params(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = valid_for(LEAF_LIFE);
    // Not the host name, which may be too long for this field. Clients check only the subject
    // alternative name.
    params
        .distinguished_name
        .push(DnType::CommonName, "Cellblock session");
    params.subject_alt_names = CertificateParams::new(vec![name.to_owned()])?.subject_alt_names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn valid_for(life: Duration) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.not_before = (now - VALID_BEFORE).into();
    params.not_after = (now + life).into();
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::Secret;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ServerConnection};

    fn vault() -> Vault {
        let secret = Secret::parse("KEY=env:X@api.example.com,b.example.com", |_| {
            Some("canary-value".to_owned())
        });
        Vault::new(vec![secret.unwrap()]).unwrap()
    }

    fn authority() -> Authority {
        Authority::new(&vault(), TrustRoots::system()).unwrap()
    }

    fn host(name: &str) -> HostName {
        HostName::parse(name).unwrap()
    }

    /// A client that trusts only `authority`.
    fn client(authority: &Authority, name: &str) -> ClientConnection {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(authority.certificate_pem().as_bytes()).unwrap())
            .unwrap();
        let client =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
        ClientConnection::new(
            Arc::new(client),
            ServerName::try_from(name.to_owned()).unwrap(),
        )
        .unwrap()
    }

    fn handshake(
        mut client: ClientConnection,
        server: Arc<ServerConfig>,
    ) -> Result<(), rustls::Error> {
        let mut server = ServerConnection::new(server).unwrap();
        while client.is_handshaking() {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut &bytes[..]).unwrap();
            server.process_new_packets()?;
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut &bytes[..]).unwrap();
            client.process_new_packets()?;
        }
        Ok(())
    }

    #[test]
    fn a_client_that_trusts_the_authority_accepts_its_hosts() {
        let authority = authority();
        for name in ["api.example.com", "b.example.com"] {
            handshake(
                client(&authority, name),
                authority.server(&host(name)).unwrap(),
            )
            .unwrap();
        }
    }

    #[test]
    fn a_client_that_trusts_another_authority_does_not() {
        let server = authority().server(&host("api.example.com")).unwrap();
        let error = handshake(client(&authority(), "api.example.com"), server).unwrap_err();
        assert!(
            matches!(error, rustls::Error::InvalidCertificate(_)),
            "{error}"
        );
    }

    #[test]
    fn the_authority_is_good_for_its_hosts_only_even_if_it_signs_others() {
        let authority = authority();
        for other in [
            "example.com",
            "other.example.com",
            "api.example.org",
            "192.0.2.1",
            "2001:db8::1",
        ] {
            let server = Arc::new(authority.sign(other).unwrap());
            let error = handshake(client(&authority, other), server).unwrap_err();
            assert!(
                format!("{error:?}").contains("NameConstraintViolation"),
                "{other}: {error:?}"
            );
        }
        // The same signing method, for a host of the list.
        handshake(
            client(&authority, "api.example.com"),
            Arc::new(authority.sign("api.example.com").unwrap()),
        )
        .unwrap();
    }

    #[test]
    fn certificates_are_made_for_hosts_with_a_secret_and_kept() {
        let authority = authority();
        let first = authority.server(&host("api.example.com")).unwrap();
        assert!(Arc::ptr_eq(
            &first,
            &authority.server(&host("api.example.com")).unwrap()
        ));
        assert!(matches!(
            authority.server(&host("other.example.com")),
            Err(AuthorityError::OtherHost(_))
        ));
        assert!(matches!(
            Authority::new(&Vault::none(), TrustRoots::system()),
            Err(AuthorityError::NoHosts)
        ));
    }

    #[test]
    fn debug_output_has_no_key() {
        assert_eq!(
            format!("{:?}", authority()),
            r#"Authority { hosts: [HostName("api.example.com"), HostName("b.example.com")], .. }"#
        );
    }
}
