//! Packages for sessions: the installer of `packages`, at work in hidden sessions.

use std::collections::BTreeSet;
use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_egress::name::{self, Host};
use cellblock_egress::rules::Rules;
use cellblock_jail::wire::Bind;
use tokio::sync::{OnceCell, watch};

use crate::config::{BackendChoice, Settings};
use crate::environment::{Environment, InstallerTools};
use crate::packages::{
    FileHosts, IndexSettings, InstallError, Installer, Limits, PACKAGES_INSIDE, Package,
    Requirement, Step, Store, TreeName, Wish, Workshop, Workshops,
};
use crate::sandbox::Exit;
use crate::session::install;
use crate::session::{Hidden, InsidePath, Part, Refused, Sessions, Status, Stream};

/// Where uv is inside. Only hidden sessions can do anything with it.
const TOOLS_INSIDE: &str = "/opt/cellblock/tools";
/// What an installer's cell may print. It is machine-readable, so nothing of it may be cut.
const MOST_PRINTED: usize = 16 << 20;
/// How long after its installation a package may be on its way to its session.
const ON_ITS_WAY: Duration = Duration::from_secs(60);
/// The ports of package indexes that name none, and of most hosts of files.
const USUAL_PORTS: [u16; 2] = [80, 443];
/// The folder below the data folder in which it is remembered where indexes keep their files.
const INDEX_MEMORY: &str = "indexes";

/// Installs packages for the sessions of a server.
pub(super) struct Packages {
    tools: InstallerTools,
    data_dir: PathBuf,
    store: Arc<Store>,
    limits: Limits,
    /// What sessions may reach, and so where a requirement may come from by address.
    rules: Rules,
    python: Python,
    /// Ports of the index, once it is known.
    ports: Arc<Mutex<BTreeSet<u16>>>,
    /// Which index that is, as uv sees it.
    index: OnceCell<IndexSettings>,
    /// Made at the first installation: the index is asked only when somebody wants something of it.
    installer: Mutex<Option<Arc<Ready>>>,
    sessions: OnceLock<Sessions>,
}

/// Finds the package installer, told where packages come from if the operator says so.
fn tools(settings: &Settings) -> anyhow::Result<InstallerTools> {
    let mut tools = InstallerTools::find(&settings.data_dir)?;
    if let Some(url) = &settings.package_index.url {
        for other in ["UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"] {
            tools.variables.remove(other);
        }
        tools
            .variables
            .insert("UV_DEFAULT_INDEX".to_owned(), url.clone());
    }
    if !settings.package_index.trusted_hosts.is_empty() {
        tools.variables.insert(
            "UV_INSECURE_HOST".to_owned(),
            settings.package_index.trusted_hosts.join(" "),
        );
    }
    Ok(tools)
}

/// An installer that knows where files come from.
struct Ready {
    installer: Installer,
    file_hosts: FileHosts,
}

/// The Python of sessions.
enum Python {
    /// That of an environment, known once it is there.
    OfEnvironment(watch::Sender<Option<Facts>>),
    /// That of an image, known once a container was asked.
    OfImage(OnceCell<Facts>),
}

/// What the installer must know about the Python of sessions.
#[derive(Clone)]
struct Facts {
    /// An interpreter of this machine, for uv.
    python: PathBuf,
    present: Vec<Package>,
}

/// Prints name and version of every package that a session finds, a line each. Of two versions the first is the one that is imported.
const LIST_PACKAGES: &str = "
from importlib.metadata import distributions
found = {}
for each in distributions():
    if each.metadata['Name']:
        found.setdefault(each.metadata['Name'].lower(), each.version)
print(*(f'{name}=={version}' for name, version in found.items()), sep='\\n')
";
/// How long that may take on a slow disk.
const LISTING_PATIENCE: Duration = Duration::from_secs(60);

impl Packages {
    /// Prepares installing, if the operator wants it and the machine can.
    pub(super) fn new(settings: &Settings) -> anyhow::Result<Option<Arc<Packages>>> {
        if !settings.packages.allowed {
            return Ok(None);
        }
        std::fs::create_dir_all(settings.data_dir.join("tools"))?;
        Ok(Some(Arc::new(Packages {
            tools: tools(settings)?,
            data_dir: settings.data_dir.clone(),
            store: Arc::new(Store::open(&store_folder(settings))?),
            limits: Limits {
                time: settings.packages.timeout,
                bytes: settings.packages.size,
                store: settings.packages.store_size,
                disk: settings.packages.disk,
                ..Limits::default()
            },
            rules: settings.network.rules.clone(),
            python: match settings.backend {
                BackendChoice::Native => Python::OfEnvironment(watch::Sender::new(None)),
                BackendChoice::Containers(_) => Python::OfImage(OnceCell::new()),
            },
            ports: Arc::default(),
            index: OnceCell::new(),
            installer: Mutex::default(),
            sessions: OnceLock::new(),
        })))
    }

    /// The ports that every sandbox has doors for, whatever the index is.
    pub(super) fn usual_ports() -> BTreeSet<u16> {
        BTreeSet::from(USUAL_PORTS)
    }

    /// The ports of the index, known before anything is fetched from it.
    pub(super) fn ports(&self) -> Arc<Mutex<BTreeSet<u16>>> {
        Arc::clone(&self.ports)
    }

    /// The packages of all sessions, which every sandbox must show.
    pub(super) fn store_to_show(&self) -> Bind {
        Bind {
            host: self.store.trees(),
            inside: PathBuf::from(PACKAGES_INSIDE),
        }
    }

    /// What a sandbox must show in which packages are fetched.
    pub(super) fn tools_to_show(&self) -> Bind {
        let (host, inside) = self.tools.to_show(&self.data_dir, TOOLS_INSIDE);
        Bind { host, inside }
    }

    /// Tells which environment sessions have, and returns the ports at which the index is reached. Asks nobody but uv.
    pub(super) async fn know(&self, environment: &Environment) -> BTreeSet<u16> {
        let present = environment
            .packages
            .iter()
            .filter_map(|text| Package::parse(text))
            .collect();
        let facts = Facts {
            python: environment.base_executable.clone(),
            present,
        };
        let settings = match self.tools.uv_at_hand() {
            Some(uv) => self.index(uv, &facts).await,
            None => Err("there is no uv yet".to_owned()),
        };
        if let Python::OfEnvironment(known) = &self.python {
            known.send_replace(Some(facts));
        }
        match settings {
            Ok(settings) => settings.ports(),
            Err(error) => {
                tracing::debug!(error, "it is not known yet where packages come from");
                BTreeSet::new()
            }
        }
    }

    /// Gives it the sessions in which it works.
    pub(super) fn work_in(&self, sessions: Sessions) {
        let _ = self.sessions.set(sessions);
    }

    /// Removes what belonged to single sessions, which are gone.
    pub(super) fn clean_up(&self) {
        if let Err(error) = self.store.release_all_but(&BTreeSet::new(), Duration::ZERO) {
            tracing::warn!(%error, "a package that was built for one session could not be removed");
        }
    }

    /// Asks uv which index it uses, once.
    async fn index(&self, uv: &Path, facts: &Facts) -> Result<&IndexSettings, String> {
        let ask = || async {
            let mut index = IndexSettings::read(uv, &facts.python, &self.tools.variables)
                .await
                .map_err(with_causes)?;
            index.recall_file_hosts(&self.index_memory());
            Ok(index)
        };
        self.index.get_or_try_init(ask).await
    }

    /// Returns the installer, and makes it if there is none. Two who come at the same moment both make one, which does no harm.
    async fn installer(&self, facts: &Facts) -> Result<Arc<Ready>, install::InstallError> {
        if let Some(ready) = self.ready().clone() {
            return Ok(ready);
        }
        let make = async {
            let uv = self.tools.uv(&self.data_dir).await.map_err(with_causes)?;
            let mut index = self.index(&uv, facts).await?.clone();
            let variables = &self.tools.variables;
            self.ports
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(index.ports());
            let file_hosts = index
                .find_file_hosts(&uv, &facts.python, variables, &self.index_memory())
                .await;
            Ok(Arc::new(Ready {
                installer: Installer::new(Arc::clone(&self.store), index, self.limits),
                file_hosts,
            }))
        };
        let made: Arc<Ready> = make.await.map_err(install::InstallError::Failed)?;
        Ok(Arc::clone(self.ready().insert(made)))
    }

    /// After a failure: if it was only remembered where the index keeps its files, the next installation asks.
    fn doubt(&self, ready: &Ready) {
        if ready.file_hosts == FileHosts::Remembered {
            ready
                .installer
                .index()
                .forget_file_hosts(&self.index_memory());
            self.ready().take();
        }
    }

    fn ready(&self) -> MutexGuard<'_, Option<Arc<Ready>>> {
        self.installer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn index_memory(&self) -> PathBuf {
        self.data_dir.join(INDEX_MEMORY)
    }

    /// What a session has: its environment's packages, and the folders that were added to it.
    fn present(&self, facts: &Facts, folders: &[String]) -> Vec<Package> {
        let mut present = facts.present.clone();
        // The latest comes first and counts.
        for folder in folders.iter().rev() {
            if let Some(tree) = tree_of(folder).and_then(|name| self.store.tree(&name)) {
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

    /// Lets go of packages whose sessions have ended. What was just installed is on its way to a session and is left alone.
    async fn release(&self, sessions: &Sessions) {
        let used = sessions
            .package_folders()
            .iter()
            .filter_map(|folder| tree_of(folder))
            .collect();
        let (store, grace) = (self.store.clone(), self.limits.time + ON_ITS_WAY);
        let released =
            tokio::task::spawn_blocking(move || store.release_all_but(&used, grace)).await;
        if let Ok(Err(error)) = released {
            tracing::warn!(%error, "packages of ended sessions could not be released");
        }
    }

    /// Asks a fresh container what sessions have.
    async fn look_at_image(&self, sessions: &Sessions) -> Result<Facts, install::InstallError> {
        let look = async {
            let mut workshop = HiddenSessions {
                sessions: sessions.clone(),
            }
            .open(&[])
            .await?;
            workshop.run(LIST_PACKAGES, LISTING_PATIENCE).await
        };
        let listed = look
            .await
            .map_err(|error| install::InstallError::Failed(with_causes(error)))?;
        let python = self
            .tools
            .python()
            .await
            .map_err(|error| install::InstallError::Failed(with_causes(error)))?;
        Ok(Facts {
            python,
            present: listed.lines().filter_map(Package::parse).collect(),
        })
    }

    async fn install_now(
        &self,
        request: install::InstallRequest,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<install::Installed, install::InstallError> {
        let ending = || install::InstallError::Failed("the server is ending".to_owned());
        let sessions = self.sessions.get().ok_or_else(ending)?;
        let facts = match &self.python {
            Python::OfEnvironment(known) => {
                let known = known
                    .subscribe()
                    .wait_for(Option::is_some)
                    .await
                    .ok()
                    .and_then(|facts| facts.clone());
                known.ok_or_else(ending)?
            }
            Python::OfImage(known) => known
                .get_or_try_init(|| self.look_at_image(sessions))
                .await?
                .clone(),
        };
        let requirements =
            Requirement::parse_all(&request.requirements, |host, port| self.allows(host, port))
                .map_err(|error| install::InstallError::Refused(error.to_string()))?;
        self.release(sessions).await;
        let ready = self.installer(&facts).await?;
        let wish = Wish {
            requirements,
            upgrade: request.upgrade,
            present: self.present(&facts, &request.has),
        };
        let workshops = HiddenSessions {
            sessions: sessions.clone(),
        };
        let installed = ready
            .installer
            .install(&wish, &workshops, &|step: Step| tell(step.to_string()))
            .await;
        let installed = installed.map_err(|error| {
            self.doubt(&ready);
            install::InstallError::Failed(with_causes(error))
        })?;
        let paths = installed
            .paths
            .iter()
            .map(|path| path.to_string_lossy().into_owned())
            .collect();
        Ok(install::Installed {
            paths,
            text: installed.text,
        })
    }
}

impl install::Installer for Packages {
    fn install<'a>(
        &'a self,
        request: install::InstallRequest,
        tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> Pin<Box<dyn Future<Output = Result<install::Installed, install::InstallError>> + Send + 'a>>
    {
        Box::pin(self.install_now(request, tell))
    }
}

/// Where packages of sessions are kept.
pub(super) fn store_folder(settings: &Settings) -> PathBuf {
    settings.data_dir.join("packages")
}

/// Returns the tree that a folder inside shows.
fn tree_of(folder: &str) -> Option<TreeName> {
    let name = Path::new(folder)
        .file_name()?
        .to_string_lossy()
        .into_owned();
    TreeName::try_from(name).ok()
}

/// Returns an error with its causes.
fn with_causes(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

/// Hidden sessions as workshops.
struct HiddenSessions {
    sessions: Sessions,
}

#[async_trait]
impl Workshops for HiddenSessions {
    async fn open(&self, rules: &[String]) -> Result<Box<dyn Workshop>, InstallError> {
        let rules = Rules::parse(rules).map_err(|error| InstallError::Workshop {
            why: error.to_string(),
        })?;
        Ok(Box::new(HiddenSession(
            self.sessions.hidden(rules).map_err(broken)?,
        )))
    }
}

struct HiddenSession(Hidden);

fn broken(refused: Refused) -> InstallError {
    InstallError::Workshop {
        why: refused.to_string(),
    }
}

fn path(name: &str) -> Result<InsidePath, InstallError> {
    name.parse()
        .map_err(|_| InstallError::Unfitting("a file has a name that no file can have"))
}

#[async_trait]
impl Workshop for HiddenSession {
    fn uv(&self) -> String {
        format!("{TOOLS_INSIDE}/uv")
    }

    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), InstallError> {
        self.0
            .write(&path(name)?, &content)
            .await
            .map(drop)
            .map_err(broken)
    }

    async fn run(&mut self, code: &str, time: Duration) -> Result<String, InstallError> {
        let outcome = self
            .0
            .execute(code, time, MOST_PRINTED)
            .await
            .map_err(broken)?;
        match outcome.status {
            Status::Completed => Ok(outcome
                .output
                .parts
                .iter()
                .filter_map(|part| match part {
                    Part::Text {
                        stream: Stream::Stdout,
                        text,
                    } => Some(text.as_str()),
                    _ => None,
                })
                .collect()),
            Status::TimedOut { limit, .. } => Err(InstallError::TimedOut { time: limit }),
            Status::Raised(error) => Err(InstallError::Workshop {
                why: format!("{}: {}", error.name, error.message),
            }),
            Status::Died {
                exit: Exit::OutOfMemory { .. },
            } => Err(InstallError::NoMemory),
            other => Err(InstallError::Workshop {
                why: format!("its Python ended ({})", other.name()),
            }),
        }
    }

    async fn take(&mut self, name: &str, limit: u64) -> Result<File, InstallError> {
        self.0
            .read(&path(name)?, limit)
            .await
            .map_err(|refused| match refused {
                Refused::File {
                    reason: crate::runner_client::Trouble::TooLarge,
                    ..
                } => InstallError::TooLarge { limit },
                other => broken(other),
            })
    }
}
