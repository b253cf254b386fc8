//! Packages for sessions: the installer of `packages`, at work in hidden sessions.

use std::collections::BTreeSet;
use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_egress::name::{self, Host};
use cellblock_egress::rules::Rules;
use cellblock_jail::wire::Bind;
use tokio::sync::{OnceCell, watch};

use crate::config::Settings;
use crate::environment::{Environment, InstallerTools};
use crate::packages::{
    IndexSettings, InstallError, Installer, Limits, PACKAGES_INSIDE, Package, Requirement, Step, Store, TreeName, Wish,
    Workshop, Workshops,
};
use crate::session::install;
use crate::session::{Hidden, InsidePath, Part, Refused, Sessions, Status, Stream};

/// Where uv is inside. Only hidden sessions can do anything with it.
const TOOLS_INSIDE: &str = "/opt/cellblock/tools";
/// What an installer's cell may print. It is machine-readable, so nothing of it may be cut.
const MOST_PRINTED: usize = 16 << 20;
/// The ports of package indexes that name none.
const USUAL_PORTS: [u16; 2] = [80, 443];
/// Variables that hold addresses of indexes.
const INDEX_VARIABLES: [&str; 4] = ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"];

/// Installs packages for the sessions of a server.
pub(super) struct Packages {
    tools: InstallerTools,
    data_dir: PathBuf,
    store: Arc<Store>,
    limits: Limits,
    /// What sessions may reach, and so where a requirement may come from by address.
    rules: Rules,
    /// Known once the environment is there.
    environment: watch::Sender<Option<Facts>>,
    /// Made at the first installation: the index is asked only when somebody wants something of it.
    installer: OnceCell<Installer>,
    sessions: OnceLock<Sessions>,
    private: Mutex<Vec<TreeName>>,
}

/// What the installer must know about the environment of sessions.
#[derive(Clone)]
struct Facts {
    python: PathBuf,
    present: Vec<Package>,
}

impl Packages {
    /// Prepares installing, if the operator wants it and the machine can.
    pub(super) fn new(settings: &Settings) -> anyhow::Result<Option<Arc<Packages>>> {
        if !settings.packages.allowed {
            return Ok(None);
        }
        std::fs::create_dir_all(settings.data_dir.join("tools"))?;
        Ok(Some(Arc::new(Packages {
            tools: InstallerTools::find(&settings.data_dir)?,
            data_dir: settings.data_dir.clone(),
            store: Arc::new(Store::open(&settings.data_dir.join("packages"))?),
            limits: Limits { time: settings.packages.timeout, bytes: settings.packages.size, ..Limits::default() },
            rules: settings.network.rules.clone(),
            environment: watch::Sender::new(None),
            installer: OnceCell::new(),
            sessions: OnceLock::new(),
            private: Mutex::default(),
        })))
    }

    /// The ports on which an index may be reached.
    pub(super) fn ports(&self) -> BTreeSet<u16> {
        let named = INDEX_VARIABLES.iter().filter_map(|name| self.tools.variables.get(*name));
        let named = named.flat_map(|value| value.split_whitespace()).filter_map(port_of);
        USUAL_PORTS.into_iter().chain(named).collect()
    }

    /// What every sandbox must show.
    pub(super) fn binds(&self) -> Vec<Bind> {
        let (host, inside) = self.tools.to_show(&self.data_dir, TOOLS_INSIDE);
        vec![Bind { host: self.store.trees(), inside: PathBuf::from(PACKAGES_INSIDE) }, Bind { host, inside }]
    }

    /// Tells which environment sessions have.
    pub(super) fn know(&self, environment: &Environment) {
        let present = environment.packages.iter().filter_map(|text| Package::parse(text)).collect();
        self.environment.send_replace(Some(Facts { python: environment.base_executable.clone(), present }));
    }

    /// Gives it the sessions in which it works.
    pub(super) fn work_in(&self, sessions: Sessions) {
        let _ = self.sessions.set(sessions);
    }

    /// Removes what belonged to single sessions, which are gone.
    pub(super) fn clean_up(&self) {
        for tree in self.private.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            if let Err(error) = self.store.remove(&tree) {
                tracing::warn!(%error, "a package that was built for one session could not be removed");
            }
        }
    }

    async fn installer(&self, facts: &Facts) -> Result<&Installer, install::InstallError> {
        let make = || async {
            let uv = self.tools.uv(&self.data_dir).await.map_err(with_causes)?;
            let index = IndexSettings::read(&uv, &facts.python, &self.tools.variables).await;
            let index = index.map_err(with_causes)?;
            Ok(Installer::new(Arc::clone(&self.store), index, self.limits))
        };
        self.installer.get_or_try_init(make).await.map_err(install::InstallError::Failed)
    }

    /// What a session has: its environment's packages, and the folders that were added to it.
    fn present(&self, facts: &Facts, folders: &[String]) -> Vec<Package> {
        let mut present = facts.present.clone();
        // The latest comes first and counts.
        for folder in folders.iter().rev() {
            let name = Path::new(folder).file_name().map(|name| name.to_string_lossy().into_owned());
            let tree = name.and_then(|name| TreeName::try_from(name).ok()).and_then(|name| self.store.tree(&name));
            if let Some(tree) = tree {
                let package = Package::new(&tree.record.package, &tree.record.version);
                present.retain(|other| other.name != package.name);
                present.push(package);
            }
        }
        present
    }

    fn allows(&self, host: &str, port: u16) -> bool {
        match name::parse_authority(host) {
            Ok((Host::Name(name), None)) => self.rules.allows_name(&name, port),
            Ok((Host::Address(address), None)) => self.rules.allows_address(address, port),
            _ => false,
        }
    }

    async fn install_now(
        &self,
        request: install::InstallRequest,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<install::Installed, install::InstallError> {
        let facts = self.environment.subscribe().wait_for(Option::is_some).await.ok().and_then(|facts| facts.clone());
        let (Some(facts), Some(sessions)) = (facts, self.sessions.get()) else {
            return Err(install::InstallError::Failed("the server is ending".to_owned()));
        };
        let requirements = Requirement::parse_all(&request.requirements, |host, port| self.allows(host, port))
            .map_err(|error| install::InstallError::Refused(error.to_string()))?;
        let installer = self.installer(&facts).await?;
        let wish = Wish { requirements, upgrade: request.upgrade, present: self.present(&facts, &request.has) };
        let workshops = HiddenSessions { sessions: sessions.clone() };
        let installed = installer.install(&wish, &workshops, &|step: Step| tell(step.to_string())).await;
        let installed = installed.map_err(|error| install::InstallError::Failed(with_causes(error)))?;
        self.private.lock().unwrap_or_else(PoisonError::into_inner).extend(installed.private);
        let paths = installed.paths.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        Ok(install::Installed { paths, text: installed.text })
    }
}

impl install::Installer for Packages {
    fn install<'a>(
        &'a self,
        request: install::InstallRequest,
        tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> Pin<Box<dyn Future<Output = Result<install::Installed, install::InstallError>> + Send + 'a>> {
        Box::pin(self.install_now(request, tell))
    }
}

/// Returns an error with its causes.
fn with_causes(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

/// The port that an address names.
fn port_of(address: &str) -> Option<u16> {
    let authority = address.split_once("://")?.1.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    name::parse_authority(host).ok()?.1
}

/// Hidden sessions as workshops.
struct HiddenSessions {
    sessions: Sessions,
}

#[async_trait]
impl Workshops for HiddenSessions {
    async fn open(&self, rules: &[String]) -> Result<Box<dyn Workshop>, InstallError> {
        let rules = Rules::parse(rules).map_err(|error| InstallError::Workshop { why: error.to_string() })?;
        Ok(Box::new(HiddenSession(self.sessions.hidden(rules).map_err(broken)?)))
    }
}

struct HiddenSession(Hidden);

fn broken(refused: Refused) -> InstallError {
    InstallError::Workshop { why: refused.to_string() }
}

fn path(name: &str) -> Result<InsidePath, InstallError> {
    name.parse().map_err(|_| InstallError::Unfitting("a file has a name that no file can have"))
}

#[async_trait]
impl Workshop for HiddenSession {
    fn uv(&self) -> String {
        format!("{TOOLS_INSIDE}/uv")
    }

    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), InstallError> {
        self.0.write(&path(name)?, &content).await.map(drop).map_err(broken)
    }

    async fn run(&mut self, code: &str, time: Duration) -> Result<String, InstallError> {
        let outcome = self.0.execute(code, time, MOST_PRINTED).await.map_err(broken)?;
        match outcome.status {
            Status::Completed => Ok(outcome
                .output
                .parts
                .iter()
                .filter_map(|part| match part {
                    Part::Text { stream: Stream::Stdout, text } => Some(text.as_str()),
                    _ => None,
                })
                .collect()),
            Status::TimedOut { limit, .. } => Err(InstallError::TimedOut { time: limit }),
            Status::Raised(error) => Err(InstallError::Workshop { why: format!("{}: {}", error.name, error.message) }),
            other => Err(InstallError::Workshop { why: format!("its Python ended ({})", other.name()) }),
        }
    }

    async fn take(&mut self, name: &str, limit: u64) -> Result<File, InstallError> {
        self.0.read(&path(name)?, limit).await.map_err(|refused| match refused {
            Refused::File { reason: crate::runner_client::Trouble::TooLarge, .. } => InstallError::TooLarge { limit },
            other => broken(other),
        })
    }
}
