//! The egress side of containers: their network rules, and the network of each.
//!
//! The engine gives no container a network. Where an operator lists destinations, listeners are
//! opened in the container from outside (`sandbox::egress`) before any user code runs in it;
//! nothing inside has any right over the network. This requires an engine whose containers are
//! processes of this machine. A server that may not enter them has the engine start a helper
//! container (`netns_helper`). Where neither is possible, no container is made: there is never one
//! that could reach more or less than was listed.
//!
//! A container is one network, which forked sessions share with their source. So all of them can
//! reach only what every one of them may, and a refused connection is reported to all of them as
//! made by one of them. Where a person decides about a connection, the supervisor is asked first
//! which session made it (`Askers`).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cellblock_egress::gateway::Gateway;
use cellblock_egress::name::HostName;
use cellblock_egress::resolve::BoxFuture;
use cellblock_jail::netns_listeners::{Namespace, NetnsError};
use tempfile::NamedTempFile;

use super::messages::SlotRequest;
use super::mux_connection::MuxConnection;
use super::netns_helper::{NetnsHelperError, NetnsHelpers};
use super::spec::ContainerBind;
use crate::reaction::within;
use crate::sandbox::egress::{EgressError, TOKEN_ADDRESS, UnverifiedListeners};
use crate::sandbox::{Asker, Blocked, LaunchError, LayerKind, Reason, Rules, SandboxNetwork};

/// Timeout for the token from inside. It takes a millisecond once Python runs.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Programs query the servers named in this file; in a network where every address is local, that
/// is us. Otherwise engines write a file of their own, based on that of the host, with search
/// domains that would be added to every name.
const NAME_SERVERS: &str = "nameserver 127.0.0.1\noptions attempts:1 timeout:5\n";
const NAME_SERVERS_INSIDE: &str = "/etc/resolv.conf";

/// The network of a backend's containers.
#[derive(Debug, Clone)]
pub struct ContainerNetwork {
    pub network: SandboxNetwork,
    /// The binary of this server, which also runs as the process that opens the listeners.
    pub program: PathBuf,
    /// Files that programs inside need to use the network, such as certificates.
    pub files: Vec<ContainerBind>,
    /// One of those files, which is removed with the backend.
    pub held: Option<Arc<NamedTempFile>>,
}

impl ContainerNetwork {
    /// Returns the files that containers see because of the network; writes ours.
    pub(super) fn files(&self, folder: &Path) -> io::Result<Vec<ContainerBind>> {
        // All servers write the same contents, so the file may stay.
        let path = folder.join("resolv.conf");
        let mut file = NamedTempFile::new_in(folder)?;
        file.write_all(NAME_SERVERS.as_bytes())?;
        file.as_file()
            .set_permissions(fs::Permissions::from_mode(0o644))?;
        file.persist(&path)?;
        let own = ContainerBind {
            host: path,
            inside: PathBuf::from(NAME_SERVERS_INSIDE),
            writable: false,
        };
        Ok(self.files.iter().cloned().chain([own]).collect())
    }

    /// Opens the network of a container that runs only our supervisor. `process` is its first
    /// process, as reported by the engine of this machine.
    pub(super) async fn open(
        &self,
        container: &str,
        process: Option<i64>,
        connection: &MuxConnection,
        netns_helpers: &NetnsHelpers,
    ) -> Result<ContainerEgress, LaunchError> {
        let gateway = self
            .gateway(container, process, connection, netns_helpers)
            .await;
        let gateway = gateway.map_err(|error| LaunchError::LayerMissing {
            kind: LayerKind::Network,
            why: format!("{:#}", anyhow::Error::new(error)),
        })?;
        let askers = Arc::new(Askers {
            connection: connection.clone(),
            of: Mutex::default(),
        });
        Ok(ContainerEgress {
            gateway,
            rules: self.network.rules.clone(),
            slots: Mutex::default(),
            askers,
        })
    }

    async fn gateway(
        &self,
        container: &str,
        process: Option<i64>,
        connection: &MuxConnection,
        netns_helpers: &NetnsHelpers,
    ) -> Result<Gateway, ContainerEgressError> {
        let unverified = match self.enter(container, process).await {
            Err(EgressError::Doors(NetnsError::Forbidden(_))) => {
                let listeners = netns_helpers
                    .open(&self.program, container, &self.network.listeners())
                    .await?;
                self.network.unverified(listeners)?
            }
            entered => entered?,
        };
        let request = SlotRequest::SendToken {
            token: unverified.token().to_owned(),
            address: TOKEN_ADDRESS.ip().to_string(),
            port: TOKEN_ADDRESS.port(),
        };
        // Its answer does not matter; the arriving token does.
        let (_, gateway) = tokio::join!(
            connection.request(request),
            unverified.verify(TOKEN_TIMEOUT)
        );
        Ok(gateway?)
    }

    async fn enter(
        &self,
        container: &str,
        process: Option<i64>,
    ) -> Result<UnverifiedListeners, EgressError> {
        let process = process
            .and_then(|process| u32::try_from(process).ok())
            .ok_or(NetnsError::Elsewhere)?;
        let namespace = Namespace::of_container(process, container)?;
        self.network.enter(&self.program, namespace).await
    }
}

/// Why the network of a container could not be opened.
#[derive(Debug, thiserror::Error)]
enum ContainerEgressError {
    #[error(transparent)]
    Egress(#[from] EgressError),
    #[error(
        "the server may not enter the container's network, and a helper container could not open \
         it either"
    )]
    Helper(#[from] NetnsHelperError),
}

/// The network of one container, for all sessions in it.
pub(super) struct ContainerEgress {
    gateway: Gateway,
    /// The default rules of a session.
    rules: Rules,
    slots: Mutex<BTreeMap<u32, SlotRules>>,
    askers: Arc<Askers>,
}

/// The rules of the session in one slot.
#[derive(Default)]
struct SlotRules {
    rules: Rules,
    /// Refused connections in the container that were not yet reported to this session.
    unreported: Vec<Blocked>,
}

/// Maximum number of different refusals kept for a session until it asks; further ones are dropped.
const MAX_UNREPORTED: usize = 50;

impl ContainerEgress {
    fn slots(&self) -> MutexGuard<'_, BTreeMap<u32, SlotRules>> {
        self.slots
            .lock()
            .expect("nothing panics while it holds the rules")
    }

    /// Adds one more session, with the rules of the one that it is a fork of.
    pub(super) fn join(&self, slot: u32, source: Option<u32>) {
        let rules = source.map_or_else(|| self.rules.clone(), |source| self.rules(source));
        self.set_rules(slot, rules);
    }

    /// Returns the rules of a session. Together with its forks it may reach less.
    pub(super) fn rules(&self, slot: u32) -> Rules {
        self.slots()
            .get(&slot)
            .map_or(&self.rules, |slot| &slot.rules)
            .clone()
    }

    pub(super) fn set_rules(&self, slot: u32, rules: Rules) {
        let mut slots = self.slots();
        slots.entry(slot).or_default().rules = rules;
        self.gateway.set_rules(common(&slots));
    }

    /// Sets who decides for this session about names that no rule lists.
    pub(super) fn set_asker(&self, slot: u32, asker: Option<Arc<dyn Asker>>) {
        let has_askers = self.askers.set(slot, asker);
        self.gateway
            .set_asker(has_askers.then(|| Arc::clone(&self.askers) as Arc<dyn Asker>));
    }

    /// Removes this session.
    pub(super) fn leave(&self, slot: u32) {
        let mut slots = self.slots();
        slots.remove(&slot);
        self.gateway.set_rules(common(&slots));
        drop(slots);
        self.set_asker(slot, None);
    }

    /// Returns the connections refused since the last call for this session.
    pub(super) fn take_blocked(&self, slot: u32) -> Vec<Blocked> {
        let mut slots = self.slots();
        record(&mut slots, self.gateway.take_blocked());
        slots
            .get_mut(&slot)
            .map(|slot| std::mem::take(&mut slot.unreported))
            .unwrap_or_default()
    }
}

/// Returns the destinations that every one of them may reach.
fn common(slots: &BTreeMap<u32, SlotRules>) -> Rules {
    slots
        .values()
        .map(|slot| slot.rules.clone())
        .reduce(|one, other| one.common(&other))
        .unwrap_or_default()
}

/// Records refused connections for every session. Where there are several, none of them is named as
/// the origin.
fn record(slots: &mut BTreeMap<u32, SlotRules>, blocked: Vec<Blocked>) {
    let is_shared = slots.len() > 1;
    for Blocked {
        target,
        reason,
        times,
    } in blocked
    {
        let reason = if is_shared {
            Reason::Told(format!("{reason}; {POSSIBLE_ORIGINS}"))
        } else {
            reason
        };
        for slot in slots.values_mut() {
            let unreported = &mut slot.unreported;
            let known = unreported
                .iter()
                .position(|known| known.target == target && known.reason == reason);
            match known {
                Some(known) => {
                    unreported[known].times = unreported[known].times.saturating_add(times)
                }
                None if unreported.len() < MAX_UNREPORTED => {
                    unreported.push(Blocked {
                        target: target.clone(),
                        reason: reason.clone(),
                        times,
                    });
                }
                None => {}
            }
        }
    }
}

/// Describes the possible origins of a refused connection.
const POSSIBLE_ORIGINS: &str =
    "this session, or another one that was forked and shares its container";

/// The askers of the sessions of one container.
struct Askers {
    connection: MuxConnection,
    of: Mutex<BTreeMap<u32, Arc<dyn Asker>>>,
}

/// Timeout for the supervisor to find the owner of a connection.
const OWNER_TIMEOUT: Duration = Duration::from_secs(5);

impl Askers {
    fn of(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<dyn Asker>>> {
        self.of
            .lock()
            .expect("nothing panics while it holds the askers")
    }

    /// Returns whether any asker is set afterwards.
    fn set(&self, slot: u32, asker: Option<Arc<dyn Asker>>) -> bool {
        let mut of = self.of();
        match asker {
            Some(asker) => of.insert(slot, asker),
            None => of.remove(&slot),
        };
        !of.is_empty()
    }
}

impl Asker for Askers {
    fn may_allow(&self, name: &HostName) -> bool {
        self.of().values().any(|asker| asker.may_allow(name))
    }

    fn ask(&self, name: &HostName, port: u16, from: SocketAddr) -> BoxFuture<'static, bool> {
        let (connection, name, askers) = (self.connection.clone(), name.clone(), self.of().clone());
        Box::pin(async move {
            let asker = match askers.len() {
                0 | 1 => askers.values().next(),
                // A connection whose session is unknown is not put to any asker.
                _ => owner(&connection, from)
                    .await
                    .and_then(|slot| askers.get(&slot)),
            };
            match asker {
                Some(asker) if asker.may_allow(&name) => asker.ask(&name, port, from).await,
                _ => false,
            }
        })
    }
}

/// Asks the supervisor which session made a connection, according to its kernel.
async fn owner(connection: &MuxConnection, from: SocketAddr) -> Option<u32> {
    let request = SlotRequest::FindOwner {
        address: from.ip().to_canonical().to_string(),
        port: from.port(),
    };
    let answer = within(OWNER_TIMEOUT, connection.ask(request)).await?.ok()?;
    answer.owner
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(list: &[&str]) -> Rules {
        Rules::parse(list).unwrap()
    }

    fn slot(rules: Rules) -> SlotRules {
        SlotRules {
            rules,
            unreported: Vec::new(),
        }
    }

    #[test]
    fn sessions_of_one_container_reach_what_each_of_them_may() {
        let all = rules(&["a.test", "b.test", "c.test"]);
        let mut slots = BTreeMap::from([(1, slot(all.clone()))]);
        assert_eq!(common(&slots), all); // control
        slots.insert(2, slot(rules(&["a.test", "b.test"])));
        assert_eq!(common(&slots), rules(&["a.test", "b.test"]));
        slots.insert(3, slot(rules(&["b.test", "c.test"])));
        assert_eq!(common(&slots), rules(&["b.test"]));
        slots.insert(4, slot(Rules::none()));
        assert!(common(&slots).is_empty());
    }

    #[test]
    fn what_was_refused_is_told_to_every_session_and_put_down_to_none_of_several() {
        let refused = |target: &str| Blocked {
            target: target.to_owned(),
            reason: Reason::NotListed,
            times: 1,
        };
        let told = |slots: &mut BTreeMap<u32, SlotRules>, number: u32| -> Vec<String> {
            slots
                .get_mut(&number)
                .unwrap()
                .unreported
                .drain(..)
                .map(|each| each.to_string())
                .collect()
        };
        let mut slots = BTreeMap::from([(1, slot(Rules::none()))]);
        record(&mut slots, vec![refused("a.test")]);
        assert_eq!(
            told(&mut slots, 1),
            ["blocked: a.test (not in the allowed list)"]
        ); // control
        slots.insert(2, slot(Rules::none()));
        record(&mut slots, vec![refused("a.test"), refused("b.test")]);
        record(&mut slots, vec![refused("a.test")]);
        let expected = [
            format!("blocked: a.test (not in the allowed list; {POSSIBLE_ORIGINS}), 2 times"),
            format!("blocked: b.test (not in the allowed list; {POSSIBLE_ORIGINS})"),
        ];
        assert_eq!(told(&mut slots, 1), expected);
        assert_eq!(told(&mut slots, 2), expected);
        record(
            &mut slots,
            (0..100)
                .map(|number| refused(&number.to_string()))
                .collect(),
        );
        assert_eq!(told(&mut slots, 2).len(), MAX_UNREPORTED);
    }

    #[test]
    fn programs_inside_ask_nobody_but_us_for_names() {
        let folder = tempfile::tempdir().unwrap();
        let certificates = ContainerBind {
            host: "/c.pem".into(),
            inside: "/etc/ssl/cellblock.pem".into(),
            writable: false,
        };
        let network = ContainerNetwork {
            network: crate::sandbox::egress::tests::closed(),
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
