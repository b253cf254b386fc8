//! Egress: converts the operator's network settings into those of the backend.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use cellblock_egress::authority::{Authority, TrustRoots};
use cellblock_egress::resolve::SystemResolver;
use cellblock_egress::secrets::Vault;
use cellblock_jail::wire::Bind;
use tempfile::NamedTempFile;

use crate::config::Settings;
use crate::sandbox::SandboxNetwork;

/// The CA bundle inside the sandbox, which includes our authority.
const CERTIFICATES_INSIDE: &str = "/etc/ssl/cellblock.pem";
/// Environment variables that point programs to that bundle.
const CERTIFICATE_VARIABLES: [&str; 6] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
];
/// Usual paths of the system's CA bundle.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The egress of all sandboxes, and the variables and mounts it needs inside.
#[derive(Default)]
pub(super) struct EgressSetup {
    pub(super) network: Option<SandboxNetwork>,
    /// Environment variables of sessions: a placeholder for each secret, and the path of the
    /// bundle.
    pub(super) variables: Vec<(String, String)>,
    pub(super) binds: Vec<Bind>,
    /// Must exist whenever a jail is built.
    pub(super) certificates: Option<Arc<NamedTempFile>>,
}

impl EgressSetup {
    /// Prepares the egress. `ports` are the ports that the package-installing sandboxes may reach.
    pub(super) fn new(settings: &Settings, ports: BTreeSet<u16>) -> anyhow::Result<EgressSetup> {
        let rules = settings.network.rules.clone();
        if rules.is_empty() && ports.is_empty() {
            return Ok(EgressSetup::default());
        }
        let vault =
            Vault::new(settings.network.secrets.clone()).context("the secrets cannot be used")?;
        let mut egress = EgressSetup {
            variables: vault.variables(),
            ..EgressSetup::default()
        };
        let authority = if vault.is_empty() {
            None
        } else {
            Some(egress.trust_ours(&vault, &settings.runtime_dir)?)
        };
        egress.network = Some(SandboxNetwork {
            rules,
            ports,
            vault: Arc::new(vault),
            authority,
            limits: settings.network.limits,
            resolver: Arc::new(SystemResolver::new()),
        });
        Ok(egress)
    }

    /// Creates a certificate authority for the hosts that have a secret, and adds it to the
    /// system's authorities in the bundle inside.
    fn trust_ours(&mut self, vault: &Vault, folder: &Path) -> anyhow::Result<Arc<Authority>> {
        let authority = Authority::new(vault, TrustRoots::system())
            .context("no authority for hosts with a secret")?;
        let known = SYSTEM_BUNDLES
            .iter()
            .find_map(|bundle| fs::read(bundle).ok())
            .unwrap_or_default();
        let mut file =
            NamedTempFile::new_in(folder).context("the list of authorities cannot be written")?;
        file.write_all(&known)?;
        file.write_all(b"\n")?;
        file.write_all(authority.certificate_pem().as_bytes())?;
        let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(everybody)?;
        self.binds.push(Bind {
            host: file.path().to_owned(),
            inside: PathBuf::from(CERTIFICATES_INSIDE),
        });
        self.variables.extend(
            CERTIFICATE_VARIABLES.map(|name| (name.to_owned(), CERTIFICATES_INSIDE.to_owned())),
        );
        self.certificates = Some(Arc::new(file));
        Ok(Arc::new(authority))
    }
}
