//! What sandboxes may reach: the operator's settings turned into what the backend needs.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use cellblock_egress::authority::{Authority, Trust};
use cellblock_egress::resolve::SystemResolver;
use cellblock_egress::secrets::Vault;
use cellblock_jail::wire::Bind;
use tempfile::NamedTempFile;

use crate::config::Settings;
use crate::sandbox::Network;

/// Where programs inside find the authorities that they may trust, ours among them.
const CERTIFICATES_INSIDE: &str = "/etc/ssl/cellblock.pem";
/// The variables by which programs are told where that is.
const CERTIFICATE_VARIABLES: [&str; 6] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
];
/// Where systems keep all their authorities in one file.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The ways out of all sandboxes, and what the inside has to know about them.
#[derive(Default)]
pub(super) struct WayOut {
    pub(super) network: Option<Network>,
    /// Variables of sessions: a placeholder for each secret, and where certificates are.
    pub(super) variables: Vec<(String, String)>,
    pub(super) binds: Vec<Bind>,
    /// Must exist whenever a jail is built.
    pub(super) certificates: Option<Arc<NamedTempFile>>,
}

impl WayOut {
    /// Prepares the way out. `ports` are those of what the sandboxes that install packages may reach.
    pub(super) fn new(settings: &Settings, ports: BTreeSet<u16>) -> anyhow::Result<WayOut> {
        let rules = settings.network.rules.clone();
        if rules.is_empty() && ports.is_empty() {
            return Ok(WayOut::default());
        }
        let vault =
            Vault::new(settings.network.secrets.clone()).context("the secrets cannot be used")?;
        let mut way_out = WayOut {
            variables: vault.variables(),
            ..WayOut::default()
        };
        let authority = if vault.is_empty() {
            None
        } else {
            Some(way_out.trust_ours(&vault, &settings.runtime_dir)?)
        };
        way_out.network = Some(Network {
            rules,
            ports,
            vault: Arc::new(vault),
            authority,
            limits: settings.network.limits,
            resolver: Arc::new(SystemResolver::new()),
        });
        Ok(way_out)
    }

    /// Makes an authority for the hosts that have a secret, and has the inside trust it beside those of this system.
    fn trust_ours(&mut self, vault: &Vault, folder: &Path) -> anyhow::Result<Arc<Authority>> {
        let authority = Authority::new(vault, Trust::system())
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
