//! The network rules of containers, and the network of each.
//!
//! The engine gives no container a network. Where an operator lists destinations, listeners
//! (`doors`) are opened in the container from outside (`sandbox::way_out`) before any user code
//! runs in it; nothing inside has any right over the network. This requires an engine whose
//! containers are processes of this machine. A server that may not enter them has the engine start
//! a `porter`. Where neither is possible, no container is made: there is never one that could reach
//! more or less than was listed.
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
use serde_json::json;
use tempfile::NamedTempFile;

use super::line::Line;
use super::porter::{PorterError, Porters};
use super::spec::ContainerBind;
use crate::reaction::within;
use crate::sandbox::way_out::{KNOCK_AT, Unproven, WayOutError};
use crate::sandbox::{Asker, Blocked, LaunchError, LayerKind, Network, Reason, Rules};

/// Timeout for the token from inside. It takes a millisecond once Python runs.
const KNOCK_PATIENCE: Duration = Duration::from_secs(10);

/// Programs query the servers named in this file; in a network where every address is local, that
/// is us. Otherwise engines write a file of their own, based on that of the host, with search
/// domains that would be added to every name.
const NAME_SERVERS: &str = "nameserver 127.0.0.1\noptions attempts:1 timeout:5\n";
const NAME_SERVERS_INSIDE: &str = "/etc/resolv.conf";

/// The network of a backend's containers.
#[derive(Debug, Clone)]
pub struct ContainerNetwork {
    pub network: Network,
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
        line: &Line,
        porters: &Porters,
    ) -> Result<WayOut, LaunchError> {
        let gateway = self.gateway(container, process, line, porters).await;
        let gateway = gateway.map_err(|error| LaunchError::LayerMissing {
            kind: LayerKind::Network,
            why: format!("{:#}", anyhow::Error::new(error)),
        })?;
        let askers = Arc::new(Askers {
            line: line.clone(),
            of: Mutex::default(),
        });
        Ok(WayOut {
            gateway,
            rules: self.network.rules.clone(),
            members: Mutex::default(),
            askers,
        })
    }

    async fn gateway(
        &self,
        container: &str,
        process: Option<i64>,
        line: &Line,
        porters: &Porters,
    ) -> Result<Gateway, NoWayOut> {
        let unproven = match self.enter(container, process).await {
            Err(WayOutError::Doors(NetnsError::Forbidden(_))) => {
                let doors = porters
                    .open(&self.program, container, &self.network.doors())
                    .await?;
                self.network.unproven(doors)?
            }
            entered => entered?,
        };
        let order = json!({
            "word": unproven.word(),
            "address": KNOCK_AT.ip().to_string(),
            "port": KNOCK_AT.port(),
        });
        // Its answer does not matter; the arriving token does.
        let (_, gateway) = tokio::join!(line.ask(b'n', 0, order), unproven.heard(KNOCK_PATIENCE));
        Ok(gateway?)
    }

    async fn enter(&self, container: &str, process: Option<i64>) -> Result<Unproven, WayOutError> {
        let process = process
            .and_then(|process| u32::try_from(process).ok())
            .ok_or(NetnsError::Elsewhere)?;
        let namespace = Namespace::of_container(process, container)?;
        self.network.enter(&self.program, namespace).await
    }
}

/// Why the network of a container could not be opened.
#[derive(Debug, thiserror::Error)]
enum NoWayOut {
    #[error(transparent)]
    WayOut(#[from] WayOutError),
    #[error(
        "the server may not enter the container's network, and a porter could not open it either"
    )]
    Porter(#[from] PorterError),
}

/// The network of one container, for all sessions in it.
pub(super) struct WayOut {
    gateway: Gateway,
    /// The default rules of a session.
    rules: Rules,
    members: Mutex<BTreeMap<u32, Member>>,
    askers: Arc<Askers>,
}

/// The part of one session in it.
#[derive(Default)]
struct Member {
    rules: Rules,
    /// Refused connections in the container that were not yet reported to this session.
    untold: Vec<Blocked>,
}

/// Maximum number of different refusals kept for a session until it asks; further ones are dropped.
const MOST_UNTOLD: usize = 50;

impl WayOut {
    fn members(&self) -> MutexGuard<'_, BTreeMap<u32, Member>> {
        self.members
            .lock()
            .expect("nothing panics while it holds the rules")
    }

    /// Adds one more session, with the rules of the one that it is a fork of.
    pub(super) fn join(&self, member: u32, source: Option<u32>) {
        let rules = source.map_or_else(|| self.rules.clone(), |source| self.rules(source));
        self.set_rules(member, rules);
    }

    /// Returns the rules of a session. Together with its forks it may reach less.
    pub(super) fn rules(&self, member: u32) -> Rules {
        self.members()
            .get(&member)
            .map_or(&self.rules, |member| &member.rules)
            .clone()
    }

    pub(super) fn set_rules(&self, member: u32, rules: Rules) {
        let mut members = self.members();
        members.entry(member).or_default().rules = rules;
        self.gateway.set_rules(common(&members));
    }

    /// Sets who decides for this session about names that no rule lists.
    pub(super) fn set_asker(&self, member: u32, asker: Option<Arc<dyn Asker>>) {
        let is_anybody = self.askers.set(member, asker);
        self.gateway
            .set_asker(is_anybody.then(|| Arc::clone(&self.askers) as Arc<dyn Asker>));
    }

    /// Removes this session.
    pub(super) fn leave(&self, member: u32) {
        let mut members = self.members();
        members.remove(&member);
        self.gateway.set_rules(common(&members));
        drop(members);
        self.set_asker(member, None);
    }

    /// Returns the connections refused since the last call for this session.
    pub(super) fn take_blocked(&self, member: u32) -> Vec<Blocked> {
        let mut members = self.members();
        tell(&mut members, self.gateway.take_blocked());
        members
            .get_mut(&member)
            .map(|member| std::mem::take(&mut member.untold))
            .unwrap_or_default()
    }
}

/// Returns the destinations that every one of them may reach.
fn common(members: &BTreeMap<u32, Member>) -> Rules {
    members
        .values()
        .map(|member| member.rules.clone())
        .reduce(|one, other| one.common(&other))
        .unwrap_or_default()
}

/// Records refused connections for every session. Where there are several, none of them is named as
/// the origin.
fn tell(members: &mut BTreeMap<u32, Member>, blocked: Vec<Blocked>) {
    let is_shared = members.len() > 1;
    for Blocked {
        target,
        reason,
        times,
    } in blocked
    {
        let reason = if is_shared {
            Reason::Told(format!("{reason}; {WHOEVER}"))
        } else {
            reason
        };
        for member in members.values_mut() {
            let untold = &mut member.untold;
            let known = untold
                .iter()
                .position(|known| known.target == target && known.reason == reason);
            match known {
                Some(known) => untold[known].times = untold[known].times.saturating_add(times),
                None if untold.len() < MOST_UNTOLD => {
                    untold.push(Blocked {
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
const WHOEVER: &str = "this session, or another one that was forked and shares its container";

/// The askers of the sessions of one container.
struct Askers {
    line: Line,
    of: Mutex<BTreeMap<u32, Arc<dyn Asker>>>,
}

/// Timeout for the supervisor to find the owner of a connection.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);

impl Askers {
    fn of(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<dyn Asker>>> {
        self.of
            .lock()
            .expect("nothing panics while it holds the askers")
    }

    /// Returns whether any asker is set afterwards.
    fn set(&self, member: u32, asker: Option<Arc<dyn Asker>>) -> bool {
        let mut of = self.of();
        match asker {
            Some(asker) => of.insert(member, asker),
            None => of.remove(&member),
        };
        !of.is_empty()
    }
}

impl Asker for Askers {
    fn may_allow(&self, name: &HostName) -> bool {
        self.of().values().any(|asker| asker.may_allow(name))
    }

    fn ask(&self, name: &HostName, port: u16, from: SocketAddr) -> BoxFuture<'static, bool> {
        let (line, name, askers) = (self.line.clone(), name.clone(), self.of().clone());
        Box::pin(async move {
            let asker = match askers.len() {
                0 | 1 => askers.values().next(),
                // A connection whose session is unknown is not put to any asker.
                _ => owner(&line, from)
                    .await
                    .and_then(|member| askers.get(&member)),
            };
            match asker {
                Some(asker) if asker.may_allow(&name) => asker.ask(&name, port, from).await,
                _ => false,
            }
        })
    }
}

/// Asks the supervisor which session made a connection, according to its kernel.
async fn owner(line: &Line, from: SocketAddr) -> Option<u32> {
    let order = json!({"address": from.ip().to_canonical().to_string(), "port": from.port()});
    let told = within(OWNER_PATIENCE, line.carry_out(b'v', 0, order))
        .await?
        .ok()?;
    told["member"]
        .as_u64()
        .and_then(|member| u32::try_from(member).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(list: &[&str]) -> Rules {
        Rules::parse(list).unwrap()
    }

    fn member(rules: Rules) -> Member {
        Member {
            rules,
            untold: Vec::new(),
        }
    }

    #[test]
    fn sessions_of_one_container_reach_what_each_of_them_may() {
        let all = rules(&["a.test", "b.test", "c.test"]);
        let mut members = BTreeMap::from([(1, member(all.clone()))]);
        assert_eq!(common(&members), all); // control
        members.insert(2, member(rules(&["a.test", "b.test"])));
        assert_eq!(common(&members), rules(&["a.test", "b.test"]));
        members.insert(3, member(rules(&["b.test", "c.test"])));
        assert_eq!(common(&members), rules(&["b.test"]));
        members.insert(4, member(Rules::none()));
        assert!(common(&members).is_empty());
    }

    #[test]
    fn what_was_refused_is_told_to_every_session_and_put_down_to_none_of_several() {
        let refused = |target: &str| Blocked {
            target: target.to_owned(),
            reason: Reason::NotListed,
            times: 1,
        };
        let told = |members: &mut BTreeMap<u32, Member>, number: u32| -> Vec<String> {
            members
                .get_mut(&number)
                .unwrap()
                .untold
                .drain(..)
                .map(|each| each.to_string())
                .collect()
        };
        let mut members = BTreeMap::from([(1, member(Rules::none()))]);
        tell(&mut members, vec![refused("a.test")]);
        assert_eq!(
            told(&mut members, 1),
            ["blocked: a.test (not in the allowed list)"]
        ); // control
        members.insert(2, member(Rules::none()));
        tell(&mut members, vec![refused("a.test"), refused("b.test")]);
        tell(&mut members, vec![refused("a.test")]);
        let expected = [
            format!("blocked: a.test (not in the allowed list; {WHOEVER}), 2 times"),
            format!("blocked: b.test (not in the allowed list; {WHOEVER})"),
        ];
        assert_eq!(told(&mut members, 1), expected);
        assert_eq!(told(&mut members, 2), expected);
        tell(
            &mut members,
            (0..100)
                .map(|number| refused(&number.to_string()))
                .collect(),
        );
        assert_eq!(told(&mut members, 2).len(), MOST_UNTOLD);
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
