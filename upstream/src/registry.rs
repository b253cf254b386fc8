//! Which servers there are, and whose they are.
//!
//! A server belongs to one owner or, when the operator gave it, to everybody. Nobody sees the servers of another owner, not even that they exist. A new server takes the place of
//! one of the same name at once; the old connection is closed when its calls have ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cellblock_typed::{Package, ServerName};
use tokio::sync::watch;

use crate::greeting::ConnectError;
use crate::params::ServerParams;
use crate::upstream::{Settings, Upstream, UpstreamInfo};

/// Each may be a process.
const MOST_SERVERS: usize = 50;
/// How long the calls of a server that was replaced may go on.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whose a server is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// The operator's, for everybody.
    Everyone,
    One(String),
}

/// Why a server is not registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error(
        "the server {name} would have the Python name {python} of the server {other}; choose another name"
    )]
    SameName {
        name: ServerName,
        python: String,
        other: ServerName,
    },
    #[error(
        "there is a server {name} of the operator, which cannot be replaced; choose another name"
    )]
    Operators { name: ServerName },
    #[error("there are {MOST_SERVERS} servers already; unregister one first")]
    TooMany,
    #[error("could not connect to the server {name}")]
    Connect {
        name: ServerName,
        #[source]
        cause: ConnectError,
    },
}

/// All servers. Clones are the same registry.
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

struct Inner {
    servers: Mutex<BTreeMap<(Owner, ServerName), Upstream>>,
    version: watch::Sender<u64>,
}

impl Default for Registry {
    fn default() -> Registry {
        Registry(Arc::new(Inner {
            servers: Mutex::default(),
            version: watch::Sender::new(0),
        }))
    }
}

impl Registry {
    pub fn new() -> Registry {
        Registry::default()
    }

    /// Connects to a server and registers it, in place of one of the same name.
    ///
    /// What was there before stays until the new one is connected, and if that fails.
    pub async fn register(
        &self,
        owner: &Owner,
        name: &ServerName,
        params: &ServerParams,
        settings: &Settings,
    ) -> Result<Upstream, RegisterError> {
        // Before a program is started that nobody may keep.
        may_join(&self.servers(), owner, name)?;
        let connected = Upstream::connect(name, params, settings).await;
        let upstream = connected.map_err(|cause| RegisterError::Connect {
            name: name.clone(),
            cause,
        })?;
        let replaced = {
            let mut servers = self.servers();
            // Meanwhile another one may have come.
            may_join(&servers, owner, name)?;
            servers.insert((owner.clone(), name.clone()), upstream.clone())
        };
        self.tell();
        retire(replaced);
        Ok(upstream)
    }

    /// Forgets a server. Returns whether there was one.
    pub fn unregister(&self, owner: &Owner, name: &str) -> bool {
        let key = self
            .servers()
            .keys()
            .find(|(found, server)| found == owner && server.as_str() == name)
            .cloned();
        let removed = key.and_then(|key| self.servers().remove(&key));
        let was_there = removed.is_some();
        if was_there {
            self.tell();
        }
        retire(removed);
        was_there
    }

    /// Forgets all servers of an owner.
    pub fn unregister_all(&self, owner: &Owner) {
        let removed: Vec<Upstream> = self
            .servers()
            .extract_if(.., |(found, _), _| found == owner)
            .map(|(_, server)| server)
            .collect();
        if !removed.is_empty() {
            self.tell();
        }
        removed.into_iter().for_each(|server| retire(Some(server)));
    }

    /// Returns what is known about the servers that `owner` can use, in the order of their names.
    pub fn list(&self, owner: &str) -> Vec<UpstreamInfo> {
        self.of(owner).iter().map(Upstream::info).collect()
    }

    /// Returns the server that `owner` means by a name.
    pub fn find(&self, owner: &str, name: &str) -> Option<Upstream> {
        self.of(owner)
            .into_iter()
            .find(|server| server.name().as_str() == name)
    }

    /// Returns the Python of all servers that `owner` can use, in the order of their names.
    pub fn packages_of(&self, owner: &str) -> Vec<Arc<Package>> {
        self.of(owner)
            .iter()
            .map(|server| Arc::clone(server.package()))
            .collect()
    }

    /// Returns a number that is another one after every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.version.subscribe()
    }

    /// Closes all connections and waits until the programs behind them are gone.
    pub async fn close(&self) {
        let servers: Vec<Upstream> = std::mem::take(&mut *self.servers()).into_values().collect();
        self.tell();
        let closing: Vec<_> = servers
            .into_iter()
            .map(|server| tokio::spawn(async move { server.close().await }))
            .collect();
        for task in closing {
            // A task that panicked has closed nothing more.
            let _ = task.await;
        }
    }

    /// Returns the servers of everybody and of `owner`. Where both have a Python name, the operator's is meant.
    fn of(&self, owner: &str) -> Vec<Upstream> {
        let servers = self.servers();
        let mut found: BTreeMap<&str, &Upstream> = BTreeMap::new();
        for ((whose, name), server) in servers.iter().rev() {
            match whose {
                Owner::One(one) if one != owner => {}
                // `Everyone` is sorted before all others, and so comes last here.
                _ => {
                    found.insert(name.python(), server);
                }
            }
        }
        found.into_values().cloned().collect()
    }

    fn servers(&self) -> MutexGuard<'_, BTreeMap<(Owner, ServerName), Upstream>> {
        self.0
            .servers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.0.version.send_modify(|version| *version += 1);
    }
}

fn may_join(
    servers: &BTreeMap<(Owner, ServerName), Upstream>,
    owner: &Owner,
    name: &ServerName,
) -> Result<(), RegisterError> {
    let visible = servers
        .keys()
        .filter(|(found, _)| found == owner || *found == Owner::Everyone);
    for (found, other) in visible.filter(|(_, other)| other.python() == name.python()) {
        if found != owner {
            return Err(RegisterError::Operators {
                name: other.clone(),
            });
        }
        if other != name {
            return Err(RegisterError::SameName {
                name: name.clone(),
                python: name.python().to_owned(),
                other: other.clone(),
            });
        }
    }
    let is_new = !servers.contains_key(&(owner.clone(), name.clone()));
    let count = servers.keys().filter(|(found, _)| found == owner).count();
    if is_new && count >= MOST_SERVERS {
        Err(RegisterError::TooMany)
    } else {
        Ok(())
    }
}

fn retire(server: Option<Upstream>) {
    if let Some(server) = server {
        tokio::spawn(async move { server.retire(PATIENCE).await });
    }
}
