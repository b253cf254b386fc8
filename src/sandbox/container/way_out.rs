//! What containers may reach, and the way out of each.
//!
//! The engine gives no container a network. Where an operator lists something, doors are opened in it from outside (`sandbox::way_out`), before any code of a user runs
//! in there; nothing inside has a right over the network. That needs an engine whose containers are processes of this machine. A server that may not enter them has
//! the engine start a `porter`. Where neither can be done, there is no container, never one that could reach more or less than was listed.
//!
//! A container is one network. Sessions that were forked share it with their source. So all of them reach what each of them may, and what was refused is told to all
//! of them, as something that one of them did. Where a person decides about a connection, the supervisor is asked first whose it is (`Askers`).

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
use cellblock_jail::doors::{DoorsError, Namespace};
use serde_json::json;
use tempfile::NamedTempFile;

use super::line::Line;
use super::porter::{PorterError, Porters};
use super::spec::ContainerBind;
use crate::reaction::within;
use crate::sandbox::way_out::{KNOCK_AT, Unproven, WayOutError};
use crate::sandbox::{Asker, Blocked, LaunchError, LayerKind, Network, Reason, Rules};

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

    /// Opens the way out of a container that runs nothing but our supervisor. `process` is its first one, as the engine of this machine says.
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
            Err(WayOutError::Doors(DoorsError::Forbidden(_))) => {
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
        // What it answers does not matter; what arrives does.
        let (_, gateway) = tokio::join!(line.ask(b'n', 0, order), unproven.heard(KNOCK_PATIENCE));
        Ok(gateway?)
    }

    async fn enter(&self, container: &str, process: Option<i64>) -> Result<Unproven, WayOutError> {
        let process = process
            .and_then(|process| u32::try_from(process).ok())
            .ok_or(DoorsError::Elsewhere)?;
        let namespace = Namespace::of_container(process, container)?;
        self.network.enter(&self.program, namespace).await
    }
}

/// Why a container has no way out.
#[derive(Debug, thiserror::Error)]
enum NoWayOut {
    #[error(transparent)]
    WayOut(#[from] WayOutError),
    #[error(
        "the server may not enter the container's network, and a porter could not open it either"
    )]
    Porter(#[from] PorterError),
}

/// The way out of one container, for all sessions in it.
pub(super) struct WayOut {
    gateway: Gateway,
    /// What a session may reach unless it is told otherwise.
    rules: Rules,
    members: Mutex<BTreeMap<u32, Member>>,
    askers: Arc<Askers>,
}

/// One session's part in it.
#[derive(Default)]
struct Member {
    rules: Rules,
    /// What was refused in the container since this session was told.
    untold: Vec<Blocked>,
}

/// More different things that were refused are not told to a session that did not ask for so long.
const MOST_UNTOLD: usize = 50;

impl WayOut {
    fn members(&self) -> MutexGuard<'_, BTreeMap<u32, Member>> {
        self.members
            .lock()
            .expect("nothing panics while it holds the rules")
    }

    /// Counts one more session, with the rules of the one that it is a fork of.
    pub(super) fn join(&self, member: u32, source: Option<u32>) {
        let rules = source.map_or_else(|| self.rules.clone(), |source| self.rules(source));
        self.set_rules(member, rules);
    }

    /// What a session may reach. Together with its forks it may reach less.
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

    /// Says who decides for this session about names that no rule lists.
    pub(super) fn set_asker(&self, member: u32, asker: Option<Arc<dyn Asker>>) {
        let is_anybody = self.askers.set(member, asker);
        self.gateway
            .set_asker(is_anybody.then(|| Arc::clone(&self.askers) as Arc<dyn Asker>));
    }

    /// From now on this session does not count.
    pub(super) fn leave(&self, member: u32) {
        let mut members = self.members();
        members.remove(&member);
        self.gateway.set_rules(common(&members));
        drop(members);
        self.set_asker(member, None);
    }

    /// Returns what was refused since this session was last told.
    pub(super) fn take_blocked(&self, member: u32) -> Vec<Blocked> {
        let mut members = self.members();
        tell(&mut members, self.gateway.take_blocked());
        members
            .get_mut(&member)
            .map(|member| std::mem::take(&mut member.untold))
            .unwrap_or_default()
    }
}

/// What every one of them may reach.
fn common(members: &BTreeMap<u32, Member>) -> Rules {
    members
        .values()
        .map(|member| member.rules.clone())
        .reduce(|one, other| one.common(&other))
        .unwrap_or_default()
}

/// Lets every session know what was refused. Where there are several, none of them is said to have done it.
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

/// Who may have wanted something that was refused.
const WHOEVER: &str = "this session, or another one that was forked and shares its container";

/// Those who decide for the sessions of one container.
struct Askers {
    line: Line,
    of: Mutex<BTreeMap<u32, Arc<dyn Asker>>>,
}

/// How long the supervisor may take to find out whose a connection is.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);

impl Askers {
    fn of(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<dyn Asker>>> {
        self.of
            .lock()
            .expect("nothing panics while it holds the askers")
    }

    /// Tells whether there is anybody afterwards.
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
                // Nobody is asked about a connection whose session is not known.
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

/// Asks the supervisor which session has made a connection, as its kernel knows.
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
