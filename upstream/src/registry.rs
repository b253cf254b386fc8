//! The registered servers and their owners.
//!
//! A server belongs to one owner or, if the operator configured it, to everyone. Servers of other
//! owners are invisible, including their existence. Registering a name again replaces the server at
//! once; the old connection is closed when its calls have ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cellblock_typed::{Package, ServerName};
use tokio::sync::watch;

use crate::greeting::ConnectError;
use crate::params::ServerParams;
use crate::upstream::{ConnectSettings, Upstream, UpstreamInfo};

/// Maximum number of servers of one owner. Each may be a process.
const MAX_SERVERS: usize = 50;
/// Timeout for running calls of a replaced server.
const PATIENCE: Duration = Duration::from_secs(5);

/// Owner of a server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// The operator's, for everyone.
    Everyone,
    One(String),
}

/// Error while registering a server.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    #[error(
        "the server {name} would have the Python name {python} of the server {other}; choose \
         another name"
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
    #[error("there are {MAX_SERVERS} servers already; unregister one first")]
    TooMany,
    #[error("could not connect to the server {name}")]
    Connect {
        name: ServerName,
        #[source]
        cause: ConnectError,
    },
}

/// All servers. Clones share the same registry.
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

    /// Connects to a server and registers it. A server of the same name is replaced.
    ///
    /// The old server stays until the new one is connected. If that fails, it is kept.
    pub async fn register(
        &self,
        owner: &Owner,
        name: &ServerName,
        params: &ServerParams,
        settings: &ConnectSettings,
    ) -> Result<Upstream, RegisterError> {
        // Check before a program is started that could not be registered.
        may_join(&self.servers(), owner, name)?;
        let connected = Upstream::connect(name, params, settings).await;
        let upstream = connected.map_err(|cause| RegisterError::Connect {
            name: name.clone(),
            cause,
        })?;
        let replaced = {
            let mut servers = self.servers();
            // Another server may have been registered meanwhile.
            may_join(&servers, owner, name)?;
            servers.insert((owner.clone(), name.clone()), upstream.clone())
        };
        self.tell();
        retire(replaced);
        Ok(upstream)
    }

    /// Removes a server. Returns whether it existed.
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

    /// Removes all servers of an owner.
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

    /// Returns information about the servers that `owner` can use, ordered by name.
    pub fn list(&self, owner: &str) -> Vec<UpstreamInfo> {
        self.of(owner).iter().map(Upstream::info).collect()
    }

    /// Returns the server that `owner` refers to by a name.
    pub fn find(&self, owner: &str, name: &str) -> Option<Upstream> {
        self.of(owner)
            .into_iter()
            .find(|server| server.name().as_str() == name)
    }

    /// Returns the generated Python packages of all servers that `owner` can use, ordered by name.
    pub fn packages_of(&self, owner: &str) -> Vec<Arc<Package>> {
        self.of(owner)
            .iter()
            .map(|server| Arc::clone(server.package()))
            .collect()
    }

    /// Returns a version number that changes with every change of the registry.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.version.subscribe()
    }

    /// Closes all connections and waits until their programs have exited.
    pub async fn close(&self) {
        let servers: Vec<Upstream> = std::mem::take(&mut *self.servers()).into_values().collect();
        self.tell();
        let closing: Vec<_> = servers
            .into_iter()
            .map(|server| tokio::spawn(async move { server.close().await }))
            .collect();
        for task in closing {
            // If the task panicked, there is nothing left to wait for.
            let _ = task.await;
        }
    }

    /// Returns the servers of everyone and of `owner`. If two have the same Python name, the
    /// operator's takes precedence.
    fn of(&self, owner: &str) -> Vec<Upstream> {
        let servers = self.servers();
        let mut found: BTreeMap<&str, &Upstream> = BTreeMap::new();
        for ((whose, name), server) in servers.iter().rev() {
            match whose {
                Owner::One(one) if one != owner => {}
                // `Everyone` sorts before all owners, so it comes last here and overwrites.
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
    if is_new && count >= MAX_SERVERS {
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
