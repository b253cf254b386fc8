//! What containers may reach, and the way out of each.
//!
//! The engine gives no container a network. Where an operator lists something, doors are opened in it from outside (`sandbox::way_out`), before any code of a user runs
//! in there; nothing inside has a right over the network. That needs an engine whose containers are processes of this machine, and the right to enter them; where
//! it cannot be done, there is no container, never one that could reach more or less than was listed.
//!
//! A container is one network. Sessions that were forked share it with their source, and nobody can tell their connections apart. So all of them reach what each of
//! them may, and a connection that was refused is told to whoever asks first.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cellblock_egress::gateway::Gateway;
use cellblock_jail::doors::{DoorsError, Namespace};
use serde_json::json;
use tempfile::NamedTempFile;

use super::line::Line;
use super::spec::ContainerBind;
use crate::sandbox::way_out::{KNOCK_AT, WayOutError};
use crate::sandbox::{Blocked, LaunchError, LayerKind, Network, Rules};

/// How long a word from inside may take. It takes a millisecond once Python runs.
const KNOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Programs ask whom this file names; in a network where every address is local, that is us. Engines write one of their own otherwise, after that of the host, with
/// domains that would be added to every name.
const NAME_SERVERS: &str = "nameserver 127.0.0.1\noptions attempts:1 timeout:5\n";
const NAME_SERVERS_INSIDE: &str = "/etc/resolv.conf";

/// The network of a backend's containers.
#[derive(Debug, Clone)]
pub struct ContainerNetwork {
    pub network: Network,
    /// The binary of this server, a process of which opens the doors.
    pub program: PathBuf,
    /// What programs inside must find to use the network, such as certificates.
    pub files: Vec<ContainerBind>,
    /// A file of those that goes with the backend.
    pub held: Option<Arc<NamedTempFile>>,
}

impl ContainerNetwork {
    /// Returns the files that containers see because of the network; writes ours.
    pub(super) fn files(&self, folder: &Path) -> io::Result<Vec<ContainerBind>> {
        // All servers write the same, so it may stay.
        let path = folder.join("resolv.conf");
        let mut file = NamedTempFile::new_in(folder)?;
        file.write_all(NAME_SERVERS.as_bytes())?;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
        file.persist(&path)?;
        let own = ContainerBind { host: path, inside: PathBuf::from(NAME_SERVERS_INSIDE), writable: false };
        Ok(self.files.iter().cloned().chain([own]).collect())
    }

    /// Opens the way out of a container that runs nothing but our supervisor. `process` is its first one, as the engine of this machine says.
    pub(super) async fn open(&self, container: &str, process: Option<i64>, line: &Line) -> Result<WayOut, LaunchError> {
        let gateway = self.gateway(container, process, line).await.map_err(|error| LaunchError::LayerMissing {
            kind: LayerKind::Network,
            why: format!("{:#}", anyhow::Error::new(error)),
        })?;
        Ok(WayOut { gateway, rules: self.network.rules.clone(), members: Mutex::default() })
    }

    async fn gateway(&self, container: &str, process: Option<i64>, line: &Line) -> Result<Gateway, WayOutError> {
        let process = process.and_then(|process| u32::try_from(process).ok()).ok_or(DoorsError::Elsewhere)?;
        let namespace = Namespace::of_container(process, container)?;
        let unproven = self.network.enter(&self.program, namespace).await?;
        let order = json!({
            "word": unproven.word(),
            "address": KNOCK_AT.ip().to_string(),
            "port": KNOCK_AT.port(),
        });
        // What it answers does not matter; what arrives does.
        let (_, gateway) = tokio::join!(line.ask(b'n', 0, order), unproven.heard(KNOCK_PATIENCE));
        gateway
    }
}

/// The way out of one container, for all sessions in it.
pub(super) struct WayOut {
    gateway: Gateway,
    /// What a session may reach unless it is told otherwise.
    rules: Rules,
    members: Mutex<BTreeMap<u32, Rules>>,
}

impl WayOut {
    fn members(&self) -> MutexGuard<'_, BTreeMap<u32, Rules>> {
        self.members.lock().expect("nothing panics while it holds the rules")
    }

    /// Counts one more session, with the rules of the one that it is a fork of.
    pub(super) fn join(&self, member: u32, source: Option<u32>) {
        let rules = source.map_or_else(|| self.rules.clone(), |source| self.rules(source));
        self.set_rules(member, rules);
    }

    /// What a session may reach. Together with its forks it may reach less.
    pub(super) fn rules(&self, member: u32) -> Rules {
        self.members().get(&member).unwrap_or(&self.rules).clone()
    }

    pub(super) fn set_rules(&self, member: u32, rules: Rules) {
        let mut members = self.members();
        members.insert(member, rules);
        self.gateway.set_rules(common(&members));
    }

    /// From now on this session does not count.
    pub(super) fn leave(&self, member: u32) {
        let mut members = self.members();
        members.remove(&member);
        self.gateway.set_rules(common(&members));
    }

    pub(super) fn take_blocked(&self) -> Vec<Blocked> {
        self.gateway.take_blocked()
    }
}

/// What every one of them may reach.
fn common(members: &BTreeMap<u32, Rules>) -> Rules {
    members.values().cloned().reduce(|one, other| one.common(&other)).unwrap_or_else(Rules::none)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(list: &[&str]) -> Rules {
        Rules::parse(list).unwrap()
    }

    #[test]
    fn sessions_of_one_container_reach_what_each_of_them_may() {
        let all = rules(&["a.test", "b.test", "c.test"]);
        let mut members = BTreeMap::from([(1, all.clone())]);
        assert_eq!(common(&members), all); // control
        members.insert(2, rules(&["a.test", "b.test"]));
        assert_eq!(common(&members), rules(&["a.test", "b.test"]));
        members.insert(3, rules(&["b.test", "c.test"]));
        assert_eq!(common(&members), rules(&["b.test"]));
        members.insert(4, Rules::none());
        assert!(common(&members).is_empty());
    }

    #[test]
    fn programs_inside_ask_nobody_but_us_for_names() {
        let folder = tempfile::tempdir().unwrap();
        let certificates =
            ContainerBind { host: "/c.pem".into(), inside: "/etc/ssl/cellblock.pem".into(), writable: false };
        let network = ContainerNetwork {
            network: crate::sandbox::way_out::tests::closed(),
            program: PathBuf::new(),
            files: vec![certificates.clone()],
            held: None,
        };
        for _ in 0..2 {
            let files = network.files(folder.path()).unwrap();
            assert_eq!(files[0], certificates);
            assert!(files.iter().all(|file| !file.writable));
            assert_eq!(files[1].inside, Path::new("/etc/resolv.conf"));
            assert_eq!(fs::read_to_string(&files[1].host).unwrap(), NAME_SERVERS);
        }
    }
}
