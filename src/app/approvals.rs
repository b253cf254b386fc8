//! Approvals: the operator's policy, the permanent grants, and the key that seals the state which
//! clients send back.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, ensure};
use tracing::info;
use zeroize::Zeroizing;

use crate::config::{self, Settings};
use crate::mcp::StateKey;
use crate::session::{ApprovalSetup, Approvals};

/// Ports that sandboxes can connect to, beside the listed ones, where a person can be asked about
/// host names.
pub(super) const PORTS: [u16; 2] = [80, 443];

/// The permanent grants, in the data folder.
const STORE: &str = "approvals.yaml";
/// The key shared by servers that share kept sessions, in the data folder.
const KEY: &str = "approvals.key";

/// Creates the initial approval state of sessions.
pub(super) fn approvals(settings: &Settings) -> anyhow::Result<Approvals> {
    let setup = setup(settings);
    if let Some(path) = &setup.store {
        info!(path = %path.display(), "what people allow for good is written to this file");
    }
    Ok(setup.open()?)
}

/// Returns the approval settings.
pub(super) fn setup(settings: &Settings) -> ApprovalSetup {
    let config::ApprovalSettings {
        policy,
        remember,
        timeout,
    } = &settings.approvals;
    let store = remember.then(|| settings.data_dir.join(STORE));
    ApprovalSetup {
        policy: policy.clone(),
        store,
        timeout: *timeout,
    }
}

/// Returns the key that seals states. Where sessions outlive the server, the key does too.
pub(super) fn state_key(settings: &Settings, sessions_are_kept: bool) -> anyhow::Result<StateKey> {
    if !sessions_are_kept {
        return Ok(StateKey::random());
    }
    let path = settings.data_dir.join(KEY);
    kept_key(&path)
        .with_context(|| format!("the key of approvals in {} cannot be used", path.display()))
}

fn kept_key(path: &Path) -> anyhow::Result<StateKey> {
    let mut bytes = Zeroizing::new([0; 32]);
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    match made {
        Ok(mut file) => {
            rustix::rand::getrandom(bytes.as_mut_slice(), rustix::rand::GetRandomFlags::empty())?;
            file.write_all(bytes.as_slice())?;
            file.sync_all()?;
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let mut file = File::open(path)?;
            ensure!(
                file.metadata()?.mode() & 0o077 == 0,
                "others can read it; remove it, and a new one is made"
            );
            file.read_exact(bytes.as_mut_slice())
                .context("it is too short; remove it, and a new one is made")?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(StateKey::new(*bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_kept_key_is_the_same_for_the_next_server_and_nobody_else_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KEY);
        kept_key(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        kept_key(&path).unwrap();
        assert_eq!(
            (std::fs::read(&path).unwrap() == bytes, bytes.len()),
            (true, 32)
        );
        assert_ne!(bytes, [0; 32]);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_key_that_others_can_read_or_that_is_cut_off_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KEY);
        kept_key(&path).unwrap(); // Control.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(kept_key(&path).is_err());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(&path, b"short").unwrap();
        assert!(kept_key(&path).is_err());
    }
}
