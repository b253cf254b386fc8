//! Packages for sessions: the installer of `packages`, running in hidden sessions.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_egress::name::{self, UrlHost};
use cellblock_egress::rules::Rules;
use cellblock_jail::wire::Bind;
use futures_util::future::BoxFuture;
use tokio::sync::{OnceCell, watch};

use crate::config::{BackendChoice, Settings};
use crate::environment::{Environment, InstallerTools};
use crate::packages::{
    BuildSandbox, BuildSandboxes, FileHosts, IndexSettings, InstallLimits, Installer,
    PACKAGES_INSIDE, PackageError, PackageRequest, PackageVersion, Requirement, Step, Store,
    TreeName,
};
use crate::sandbox::Exit;
use crate::session::install;
use crate::session::{Hidden, InsidePath, Part, Refused, Sessions, Status, Stream};

/// The path of uv inside. Only hidden sessions can use it.
const TOOLS_INSIDE: &str = "/opt/cellblock/tools";
/// Output limit of an installer's cell. The output is machine-readable, so it must not be
/// truncated.
const MAX_PRINTED: usize = 16 << 20;
/// Grace period between the installation of a package and its use by the session.
const DELIVERY_GRACE: Duration = Duration::from_secs(60);
/// Ports of package indexes without an explicit port, and of most file hosts.
const USUAL_PORTS: [u16; 2] = [80, 443];
/// The folder below the data folder that caches the file hosts of indexes.
const INDEX_MEMORY: &str = "indexes";

/// Installs packages for the sessions of a server.
pub(super) struct PackageService {
    tools: InstallerTools,
    data_dir: PathBuf,
    store: Arc<Store>,
    limits: InstallLimits,
    /// The hosts that sessions may reach, and thus the allowed sources of a requirement with a URL.
    rules: Rules,
    python: Python,
    /// Ports of the index, once it is known.
    ports: Arc<Mutex<BTreeSet<u16>>>,
    /// The index, as resolved by uv.
    index: OnceCell<IndexSettings>,
    /// Created at the first installation, so the index is not contacted before.
    installer: Mutex<Option<Arc<Ready>>>,
    sessions: OnceLock<Sessions>,
}

/// Finds the package installer, configured with the operator's index if there is one.
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

/// An installer with known file hosts.
struct Ready {
    installer: Installer,
    file_hosts: FileHosts,
}

/// The Python of sessions.
enum Python {
    /// That of an environment, known once it is built.
    OfEnvironment(watch::Sender<Option<Facts>>),
    /// That of an image, known once a container was queried.
    OfImage(OnceCell<Facts>),
}

/// What the installer must know about the Python of sessions.
#[derive(Clone)]
struct Facts {
    /// An interpreter of this machine, for uv.
    python: PathBuf,
    present: Vec<PackageVersion>,
}

/// Prints name and version of every package that a session finds, one per line. The first of two
/// versions is the one that is imported.
const LIST_PACKAGES: &str = "
from importlib.metadata import distributions
found = {}
for each in distributions():
    if each.metadata['Name']:
        found.setdefault(each.metadata['Name'].lower(), each.version)
print(*(f'{name}=={version}' for name, version in found.items()), sep='\\n')
";
/// Timeout for that listing, on a slow disk.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);

impl PackageService {
    /// Prepares installation, if the operator has enabled it and the machine supports it.
    pub(super) fn new(settings: &Settings) -> anyhow::Result<Option<Arc<PackageService>>> {
        if !settings.packages.allowed {
            return Ok(None);
        }
        std::fs::create_dir_all(settings.data_dir.join("tools"))?;
        Ok(Some(Arc::new(PackageService {
            tools: tools(settings)?,
            data_dir: settings.data_dir.clone(),
            store: Arc::new(Store::open(&store_folder(settings))?),
            limits: InstallLimits {
                time: settings.packages.timeout,
                bytes: settings.packages.size,
                store: settings.packages.store_size,
                disk: settings.packages.disk,
                ..InstallLimits::default()
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

    /// The ports that every sandbox can connect to, whatever the index is.
    pub(super) fn usual_ports() -> BTreeSet<u16> {
        BTreeSet::from(USUAL_PORTS)
    }

    /// The ports of the index, known before anything is fetched from it.
    pub(super) fn ports(&self) -> Arc<Mutex<BTreeSet<u16>>> {
        Arc::clone(&self.ports)
    }

    /// The package store, which every sandbox must show.
    pub(super) fn store_to_show(&self) -> Bind {
        Bind {
            host: self.store.trees(),
            inside: PathBuf::from(PACKAGES_INSIDE),
        }
    }

    /// The tools, shown in sandboxes that fetch packages.
    pub(super) fn tools_to_show(&self) -> Bind {
        let (host, inside) = self.tools.to_show(&self.data_dir, TOOLS_INSIDE);
        Bind { host, inside }
    }

    /// Sets the environment of sessions, and returns the ports of the index. Queries only uv, not
    /// the index.
    pub(super) async fn know(&self, environment: &Environment) -> BTreeSet<u16> {
        let present = environment
            .packages
            .iter()
            .filter_map(|text| PackageVersion::parse(text))
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

    /// Sets the sessions that the installer works in.
    pub(super) fn work_in(&self, sessions: Sessions) {
        let _ = self.sessions.set(sessions);
    }

    /// Removes packages built for single sessions, which have ended.
    pub(super) fn clean_up(&self) {
        if let Err(error) = self.store.release_all_but(&BTreeSet::new(), Duration::ZERO) {
            tracing::warn!(%error, "a package that was built for one session could not be removed");
        }
    }

    /// Asks uv once which index it uses.
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

    /// Returns the installer, and creates it if needed. Two concurrent callers may both create one,
    /// which is harmless.
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

    /// After a failure: if the index's file hosts came from the cache, the next installation asks
    /// the index again.
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

    /// The packages of a session: those of its environment, and those in the folders added to it.
    fn present(&self, facts: &Facts, folders: &[String]) -> Vec<PackageVersion> {
        let mut present = facts.present.clone();
        // The latest folder comes first and takes precedence.
        for folder in folders.iter().rev() {
            if let Some(tree) = tree_of(folder).and_then(|name| self.store.tree(&name)) {
                let package = PackageVersion::new(&tree.record.package, &tree.record.version);
                present.retain(|other| other.name != package.name);
                present.push(package);
            }
        }
        present
    }

    fn allows(&self, host: &str, port: u16) -> bool {
        match name::parse_authority(host) {
            Ok((UrlHost::Name(name), None)) => self.rules.allows_name(&name, port),
            Ok((UrlHost::Address(address), None)) => self.rules.allows_address(address, port),
            _ => false,
        }
    }

    /// Releases packages whose sessions have ended. Recent installations, which their session may
    /// not have mounted yet, are skipped.
    async fn release(&self, sessions: &Sessions) {
        let used = sessions
            .package_folders()
            .iter()
            .filter_map(|folder| tree_of(folder))
            .collect();
        let (store, grace) = (self.store.clone(), self.limits.time + DELIVERY_GRACE);
        let released =
            tokio::task::spawn_blocking(move || store.release_all_but(&used, grace)).await;
        if let Ok(Err(error)) = released {
            tracing::warn!(%error, "packages of ended sessions could not be released");
        }
    }

    /// Queries a fresh container for the packages of sessions.
    async fn look_at_image(&self, sessions: &Sessions) -> Result<Facts, install::InstallError> {
        let look = async {
            let mut sandbox = HiddenSessions {
                sessions: sessions.clone(),
            }
            .open(&[])
            .await?;
            sandbox.run(LIST_PACKAGES, LISTING_TIMEOUT).await
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
            present: listed.lines().filter_map(PackageVersion::parse).collect(),
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
        let request = PackageRequest {
            requirements,
            upgrade: request.upgrade,
            present: self.present(&facts, &request.has),
        };
        let build_sandboxes = HiddenSessions {
            sessions: sessions.clone(),
        };
        let installed = ready
            .installer
            .install(&request, &build_sandboxes, &|step: Step| {
                tell(step.to_string())
            })
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

impl install::PackageInstaller for PackageService {
    fn install<'a>(
        &'a self,
        request: install::InstallRequest,
        tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<install::Installed, install::InstallError>> {
        Box::pin(self.install_now(request, tell))
    }
}

/// The folder of the package store.
pub(super) fn store_folder(settings: &Settings) -> PathBuf {
    settings.data_dir.join("packages")
}

/// Returns the tree shown at a folder inside.
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

/// Hidden sessions as build sandboxes.
struct HiddenSessions {
    sessions: Sessions,
}

#[async_trait]
impl BuildSandboxes for HiddenSessions {
    async fn open(&self, rules: &[String]) -> Result<Box<dyn BuildSandbox>, PackageError> {
        let rules = Rules::parse(rules).map_err(|error| PackageError::BuildSandbox {
            why: error.to_string(),
        })?;
        Ok(Box::new(HiddenSession(
            self.sessions.hidden(rules).map_err(broken)?,
        )))
    }
}

struct HiddenSession(Hidden);

fn broken(refused: Refused) -> PackageError {
    PackageError::BuildSandbox {
        why: refused.to_string(),
    }
}

fn path(name: &str) -> Result<InsidePath, PackageError> {
    name.parse()
        .map_err(|_| PackageError::Unfitting("a file has a name that no file can have"))
}

#[async_trait]
impl BuildSandbox for HiddenSession {
    fn uv(&self) -> String {
        format!("{TOOLS_INSIDE}/uv")
    }

    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PackageError> {
        self.0
            .write(&path(name)?, &content)
            .await
            .map(drop)
            .map_err(broken)
    }

    async fn run(&mut self, code: &str, time: Duration) -> Result<String, PackageError> {
        let outcome = self
            .0
            .execute(code, time, MAX_PRINTED)
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
            Status::TimedOut { limit, .. } => Err(PackageError::TimedOut { time: limit }),
            Status::Raised(error) => Err(PackageError::BuildSandbox {
                why: format!("{}: {}", error.name, error.message),
            }),
            Status::Died {
                exit: Exit::OutOfMemory { .. },
            } => Err(PackageError::NoMemory),
            other => Err(PackageError::BuildSandbox {
                why: format!("its Python ended ({})", other.name()),
            }),
        }
    }

    async fn take(&mut self, name: &str, limit: u64) -> Result<File, PackageError> {
        self.0
            .read(&path(name)?, limit)
            .await
            .map_err(|refused| match refused {
                Refused::File {
                    reason: crate::runner_client::FileFailure::TooLarge,
                    ..
                } => PackageError::TooLarge { limit },
                other => broken(other),
            })
    }
}
