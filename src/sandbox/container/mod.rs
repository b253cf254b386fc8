//! Sandboxes made of containers, by Docker, Podman or whatever speaks their API.
//!
//! ```text
//! server ── engine API ── engine ── container           one per session and its forks
//!    └──────── one stream, its standard input and output ──── supervisor (our Python, first process)
//!                                                               ├─ warm process
//!                                                               └─ steward ─ interpreter, checkpoints, forks
//! ```
//!
//! `engine` speaks the API, `spec` says what a container is and checks what was made, `profile` which system calls it may make, `image` looks at the image and adds
//! our runner beside it. `line` carries everything between here and the supervisor over one stream (`strands`); `sandbox` is one container and its
//! sessions; `facts` come from the kernel or the engine; `pool` keeps some ready; `tenancy` finds what dead servers left; `check` is what `doctor` tells; `way_out` opens a container's network to what an operator lists, with a
//! `porter` where the server itself may not.
//!
//! No container that runs a user's code ever has a network that leads anywhere, a capability, a device, the engine's socket, or a folder of the host that the operator did not name, but for those of packages, which cannot be
//! written to. The engine's copying of files into and out of containers is not used.

mod check;
mod engine;
mod facts;
mod image;
mod line;
mod masks;
mod pool;
mod porter;
mod profile;
mod sandbox;
mod spec;
mod strands;
mod tenancy;
mod way_out;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use cellblock_jail::wire::Programs;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tracing::{info, warn};

pub use self::check::{Examined, Finding, Found, examine};
pub use self::engine::{
    BuildFailure, BuildNews, Building, Engine, EngineAddress, EngineError, EngineKind, ImageFacts,
    Question, QuestionError,
};
use self::facts::Fate;
pub use self::image::Supplies;
use self::image::{Look, Prepared, fresh_number};
use self::masks::Masks;
use self::pool::Pool;
pub use self::pool::PoolSettings;
use self::porter::Porters;
use self::sandbox::{Container, ContainerSandbox, Fresh, House, Made, Maker};
pub use self::spec::{ContainerBind, WORK as WORK_FOLDER};
use self::spec::{LABEL_PLACE, LABEL_ROLE, LABEL_SERVER, ROLE_PORTER, ROLE_SESSION, User, Wanted};
use self::tenancy::Tenancy;
pub use self::tenancy::remove_left_containers;
pub use self::way_out::ContainerNetwork;
use super::masks::{HostMask, Replacements};
use super::{Backend, Interpreter, LaunchError, Preparation, Sandbox, SandboxLimits};

/// How long making a session in a new container may take, from its creation to a warm Python.
const LAUNCH_PATIENCE: Duration = Duration::from_secs(180);
/// How long the backend rests before it tries again what failed, unless somebody asks.
const REST: Duration = Duration::from_secs(10);
/// How long whoever asks for a session waits for another attempt of a preparation that failed.
const SECOND_CHANCE: Duration = Duration::from_secs(15);
/// How often members of the pool are looked at.
const WEEDING: Duration = Duration::from_secs(5);
/// How often the engine is asked which containers of this server it has.
const BETWEEN_INVENTORIES: Duration = Duration::from_secs(15);

/// Numbers of host users that sessions are, where the engine has no user namespace. No system gives these away.
pub const FIRST_USER: u32 = 0x7000_0000;
/// Who a session is inside a user namespace.
const NAMESPACED_USER: User = User {
    uid: 1000,
    gid: 1000,
};

/// What the container backend needs to know.
#[derive(Debug, Clone)]
pub struct ContainerSettings {
    pub kind: EngineKind,
    pub address: EngineAddress,
    /// Files that may have credentials for the registry of the image.
    pub credentials: Vec<PathBuf>,
    /// The image's name.
    pub image: String,
    /// Another runtime than the engine's usual one, such as `runsc`.
    pub runtime: Option<String>,
    /// Where this server registers, so that others know it lives.
    pub runtime_dir: PathBuf,
    pub limits: SandboxLimits,
    /// Limits of containers for work of the server's own.
    pub limits_apart: SandboxLimits,
    pub binds: Vec<ContainerBind>,
    /// What sessions must not read or change in them.
    pub masks: Vec<HostMask>,
    /// Variables that the operator gives to sessions.
    pub variables: Vec<(String, String)>,
    pub pool: PoolSettings,
    /// What sessions may reach; nothing without.
    pub network: Option<ContainerNetwork>,
    /// How packages come into containers; none do without.
    pub packages: Option<ContainerPackages>,
    /// Whether sessions may start programs, or have to ask for each.
    pub programs: Programs,
    /// Modules that containers which wait have imported, as far as the image has them.
    pub preload: Vec<String>,
}

/// What containers have because packages can be installed into sessions.
#[derive(Debug, Clone)]
pub struct ContainerPackages {
    /// Folders of the server that every container shows, read-only.
    pub shown: Vec<ContainerBind>,
    /// What a container shows beside them that is made for an installation.
    pub tools: Vec<ContainerBind>,
    /// What such a container may reach.
    pub network: ContainerNetwork,
    /// Ports of the package index, as far as they are known when a container is made.
    pub ports: Arc<Mutex<BTreeSet<u16>>>,
}

/// Whom a container is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Sessions,
    /// Work of the server's own: nothing of the operator's is shown, and packages can be fetched.
    OwnWork,
}

/// Sandboxes made of containers.
pub struct ContainerBackend {
    inner: Arc<Inner>,
    background: Mutex<Vec<JoinHandle<()>>>,
}

struct Inner {
    /// Itself, for sessions whose container is gone.
    this: Weak<Inner>,
    settings: ContainerSettings,
    supplies: Arc<dyn Supplies>,
    preparation: watch::Sender<Preparation>,
    /// What is known once the preparation has succeeded. Later failures of the engine do not take it away.
    ready: RwLock<Option<Arc<Standing>>>,
    tenancy: Tenancy,
    masks: Masks,
    known: Mutex<HashMap<String, Known>>,
    /// Held by many while they have containers made, and alone by whoever looks for containers that nobody knows.
    creations: tokio::sync::RwLock<()>,
    pool: Pool,
    /// Somebody wants another attempt.
    again: Notify,
    /// Held by whoever prepares once more.
    preparing: tokio::sync::Mutex<()>,
}

/// A container of this server, as long as somebody follows its fate.
struct Known {
    fate: watch::Sender<Fate>,
    /// Not yet there while it is being started.
    container: Option<Weak<Container>>,
}

impl Known {
    /// Tells whether somebody has a use for the container.
    fn is_needed(&self) -> bool {
        let is_alive = |container: &Weak<Container>| {
            container
                .upgrade()
                .is_some_and(|container| container.is_alive())
        };
        self.fate.receiver_count() > 0 && self.container.as_ref().is_none_or(is_alive)
    }
}

/// What exists once the preparation is done.
struct Standing {
    engine: Engine,
    image: Prepared,
    house: Arc<House>,
    /// The list of system calls as this engine takes it.
    seccomp: String,
    /// Why the engine cannot show folders of the server, if it cannot.
    blind: Option<String>,
}

impl ContainerBackend {
    /// Starts to prepare in the background, and returns at once.
    pub fn start(
        settings: ContainerSettings,
        supplies: Arc<dyn Supplies>,
        preparation: watch::Sender<Preparation>,
    ) -> std::io::Result<ContainerBackend> {
        let tenancy = Tenancy::register(&settings.runtime_dir)?;
        let masks = Masks::new(settings.masks.clone(), &tenancy)?;
        let inner = Arc::new_cyclic(|this| Inner {
            this: Weak::clone(this),
            settings,
            supplies,
            preparation,
            ready: RwLock::new(None),
            tenancy,
            masks,
            known: Mutex::default(),
            creations: tokio::sync::RwLock::default(),
            pool: Pool::default(),
            again: Notify::new(),
            preparing: tokio::sync::Mutex::default(),
        });
        let background = vec![tokio::spawn(inner.clone().prepare_until_it_works())];
        Ok(ContainerBackend {
            inner,
            background: Mutex::new(background),
        })
    }

    /// Counts the containers that wait to be used.
    pub fn waiting(&self) -> usize {
        self.inner.pool.len()
    }
}

#[async_trait]
impl Backend for ContainerBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.inner.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        // Whoever waits for the engine to come back waits here too.
        self.inner.prepared().await?;
        let (sandbox, interpreter) = match self.inner.pool.take(&self.inner.settings.pool) {
            Some(member) => member,
            None => self.inner.made(Purpose::Sessions).await?,
        };
        Ok((Box::new(sandbox), interpreter))
    }

    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let standing = self.inner.prepared().await?;
        if let (Some(_), Some(why)) = (&self.inner.settings.packages, &standing.blind) {
            return Err(LaunchError::Start { why: why.clone() });
        }
        let (sandbox, interpreter) = self.inner.made(Purpose::OwnWork).await?;
        Ok((Box::new(sandbox), interpreter))
    }

    async fn shut_down(&self) {
        let waiting = self.inner.pool.close();
        let background = std::mem::take(
            &mut *self
                .background
                .lock()
                .expect("no holder of the tasks panics"),
        );
        for task in background {
            task.abort();
            let _ = task.await;
        }
        let mut removals = tokio::task::JoinSet::new();
        for mut sandbox in waiting {
            removals.spawn(async move { sandbox.destroy().await });
        }
        removals.join_all().await;
        // What was being made at this moment has our label.
        if let Some(standing) = self.inner.standing() {
            self.inner.remove_own(&standing.engine).await;
        }
        self.inner.tenancy.end();
    }
}

/// Makes another container like the one that it is for.
struct Again {
    inner: Weak<Inner>,
    purpose: Purpose,
}

#[async_trait]
impl Maker for Again {
    async fn another(&self) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let ending = || LaunchError::Start {
            why: "the server is ending".to_owned(),
        };
        let inner = self.inner.upgrade().ok_or_else(ending)?;
        inner.made(self.purpose).await
    }
}

impl Inner {
    fn standing(&self) -> Option<Arc<Standing>> {
        self.ready
            .read()
            .expect("no holder of the standing panics")
            .clone()
    }

    /// Prepares, and tries again when that fails; then keeps the pool full and listens to the engine.
    async fn prepare_until_it_works(self: Arc<Inner>) {
        loop {
            match self.prepare().await {
                Ok(standing) => break self.stand(standing),
                Err(why) => {
                    warn!(%why, "the container backend is not ready");
                    self.preparation.send_replace(Preparation::Failed { why });
                }
            }
            let _ = tokio::time::timeout(REST, self.again.notified()).await;
        }
        info!(engine = self.settings.kind.name(), image = %self.settings.image, "the container backend is ready");
        self.preparation.send_replace(Preparation::Ready);
        tokio::join!(self.listen(), self.keep_pool_full(), self.keep_masked());
    }

    /// Ends containers that see a file which was put in the place of one that they must not see.
    async fn keep_masked(&self) {
        let masks = self.masks.host_masks();
        if masks.is_empty() {
            return;
        }
        let watched = async {
            let mut replacements = Replacements::watch(masks)?;
            loop {
                if self.masks.are_stale()
                    && let Some(standing) = self.standing()
                {
                    warn!(
                        "a protected file of the workspace was replaced; the containers that could see it are ended"
                    );
                    self.remove_own(&standing.engine).await;
                }
                replacements.next().await?;
            }
        };
        let stopped: Result<std::convert::Infallible, io::Error> = watched.await;
        let Err(error) = stopped;
        warn!(%error, "protected files are not watched: one that is replaced is seen by sessions that run");
    }

    fn stand(&self, standing: Standing) {
        *self
            .ready
            .write()
            .expect("no holder of the standing panics") = Some(Arc::new(standing));
    }

    /// Prepares once more, unless somebody else has since `failed` was the standing: the engine may have come back without the image or the volume.
    async fn prepare_again(&self, failed: &Arc<Standing>) -> Option<Arc<Standing>> {
        let _turn = self.preparing.lock().await;
        if let Some(now) = self.standing().filter(|now| !Arc::ptr_eq(now, failed)) {
            return Some(now);
        }
        let prepared = self.prepare().await;
        // What has succeeded once stays; whoever asks next is told by the engine itself.
        self.preparation.send_replace(Preparation::Ready);
        self.stand(prepared.ok()?);
        self.standing()
    }

    /// Makes a container with a session in it for somebody who waits.
    async fn made(&self, purpose: Purpose) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let standing = self.prepared().await?;
        match self.make(&standing, Fresh::AtOnce, purpose).await {
            Err(first @ LaunchError::Start { .. }) => match self.prepare_again(&standing).await {
                Some(standing) => self.make(&standing, Fresh::AtOnce, purpose).await,
                None => Err(first),
            },
            made => made,
        }
    }

    async fn prepare(&self) -> Result<Standing, String> {
        let settings = &self.settings;
        self.tell(&format!("connecting to {}", settings.kind.name()), 0, None);
        let engine = Engine::connect(settings.kind, &settings.address)
            .await
            .map_err(|error| error.to_string())?;
        let engine = engine.with_credentials(&settings.credentials);
        let info = engine.info().await.map_err(|error| error.to_string())?;
        let runtime = settings.runtime.as_deref();
        if let Some(missing) =
            runtime.and_then(|runtime| check::missing_runtime(settings.kind, &info, runtime))
        {
            return Err(format!("{}; {}", missing.why, missing.cure));
        }
        self.tenancy.sweep(&engine).await;
        self.check_network(&engine)?;
        if engine.is_local() && !check::has_user_namespace(&info) {
            self.check_folders()?;
        }
        let seccomp = self.seccomp()?;
        let look = Look {
            engine: &engine,
            supplies: &*self.supplies,
            tenancy: &self.tenancy,
            labels: self.labels("helper"),
            seccomp: &seccomp,
            tell: &|step, done, total| self.tell(step, done, total),
        };
        let image = image::prepare(&look, &settings.image).await?;
        self.tenancy.sweep_volumes(&engine, &image.runner).await;
        let blind = self.look_for_folders(&engine, &image, &seccomp).await;
        let porters = Porters::new(
            engine.clone(),
            self.tenancy.file("porter"),
            self.labels(ROLE_PORTER),
        );
        let house = House {
            limits: settings.limits.clone(),
            has_user_namespace: check::has_user_namespace(&info),
            runtime: settings
                .runtime
                .clone()
                .filter(|runtime| !["runc", "crun"].contains(&runtime.as_str())),
            owns_work_folder: !settings
                .binds
                .iter()
                .any(|bind| bind.inside == Path::new(WORK_FOLDER)),
            network: settings.network.clone(),
            porters: Arc::new(porters),
        };
        Ok(Standing {
            engine,
            image,
            house: Arc::new(house),
            seccomp,
            blind,
        })
    }

    /// Finds out whether the engine sees the folders that containers are to show: a server that is in a container itself, or an engine in a virtual machine, has others. Returns
    /// why not. Sessions do without packages then.
    async fn look_for_folders(
        &self,
        engine: &Engine,
        image: &Prepared,
        seccomp: &str,
    ) -> Option<String> {
        let packages = self.settings.packages.as_ref()?;
        let command = image.command.clone();
        let mut body = spec::helper(
            &image.image,
            &image.volume,
            command,
            self.labels("helper"),
            seccomp,
        );
        body.host_config
            .get_or_insert_default()
            .mounts
            .get_or_insert_default()
            .extend(spec::mounts(&packages.shown));
        let name = format!("cellblock-helper-{:016x}", fresh_number());
        match engine.create(&name, &body).await {
            Ok(id) => {
                engine.remove(&id).await;
                None
            }
            Err(error) => {
                warn!(%error, "packages cannot be installed: the engine does not show folders of this server");
                Some(format!(
                    "packages cannot be brought into containers, because the engine cannot show folders of this server ({error}); \
                     install them into the image instead"
                ))
            }
        }
    }

    /// Refuses folders of the operator in which sessions could not work: they are never root, and have one owner.
    fn check_folders(&self) -> Result<(), String> {
        let user = self.user(false, &self.settings.binds);
        let unusable = self.settings.binds.iter().find(|bind| {
            std::fs::metadata(&bind.host).is_ok_and(|found| !user.may_use(&found, bind.writable))
        });
        let Some(bind) = unusable else { return Ok(()) };
        let place = match bind.inside.strip_prefix(WORK_FOLDER) {
            Ok(below) if !below.as_os_str().is_empty() => {
                format!("the folder that is mounted at {}", below.display())
            }
            _ => "the workspace".to_owned(),
        };
        let owner = std::fs::metadata(&bind.host).map_or(0, |found| found.uid());
        let whose = if owner == 0 {
            "root".to_owned()
        } else {
            format!("the user {owner}")
        };
        warn!(folder = %bind.host.display(), %whose, "sessions in containers could not use a folder");
        let use_it = if bind.writable {
            "write to it"
        } else {
            "read it"
        };
        let uid = if user.uid >= FIRST_USER {
            1000
        } else {
            user.uid
        };
        Err(format!(
            "{place} belongs to {whose}, and sessions in containers, which are never root and have one user, could not {use_it}. Give it \
             to the user that sessions are to be (chown -R {uid}:{uid}), allow everybody to {use_it}, or use --backend native"
        ))
    }

    /// Refuses rules that nobody could keep, before anything is made. Whether they are kept in a container is tried in each.
    fn check_network(&self, engine: &Engine) -> Result<(), String> {
        if self.settings.network.is_none() || engine.is_local() {
            return Ok(());
        }
        let way = "leave allowed domains and secrets out, or use an engine of this machine or --backend native";
        Err(format!(
            "what sessions may reach cannot be enforced: the engine is on another machine; {way}"
        ))
    }

    /// Returns the list of system calls as the engine takes it: as text, or as a file of its own machine.
    fn seccomp(&self) -> Result<String, String> {
        match (self.settings.kind, &self.settings.address) {
            (EngineKind::Docker, _) => Ok(profile::text(self.settings.programs)),
            (EngineKind::Podman, EngineAddress::Unix(_)) => {
                let file = self.tenancy.keep("seccomp.json", &profile::text(self.settings.programs));
                file.map_err(|error| format!("the list of system calls cannot be written: {error}"))
            }
            (EngineKind::Podman, _) => Err(
                "Podman takes the list of system calls only as a file of its own machine; use it over a Unix socket, or use Docker"
                    .to_owned(),
            ),
        }
    }

    /// What the warm process of a container does. One that has time imports what sessions usually need, and rehearses.
    fn plan(&self, how: Fresh, purpose: Purpose) -> serde_json::Value {
        let has_time = how == Fresh::Primed;
        let preload: &[String] = if has_time {
            &self.settings.preload
        } else {
            &[]
        };
        let own = [
            ("HOME", cellblock_jail::root::HOME),
            ("LANG", "C.UTF-8"),
            ("TMPDIR", "/tmp"),
            ("USER", "user"),
            ("MPLCONFIGDIR", "/tmp/matplotlib"),
        ];
        let own = own
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let variables: HashMap<String, String> =
            own.chain(self.settings.variables.iter().cloned()).collect();
        let may_start_programs =
            self.settings.programs == Programs::Free || purpose == Purpose::OwnWork;
        json!({
            "environment": variables,
            "preload": preload,
            "rehearse": has_time,
            "folders": [cellblock_jail::root::HOME],
            "programs": if may_start_programs { "free" } else { "refused" },
        })
    }

    /// Decides who the sessions of a container are. A folder of the operator's decides if there is one, because sessions must be able to work in it.
    fn user(&self, has_user_namespace: bool, binds: &[ContainerBind]) -> User {
        if has_user_namespace {
            return NAMESPACED_USER;
        }
        let owner = |bind: &ContainerBind| User::owner_of(&std::fs::metadata(&bind.host).ok()?);
        binds.iter().find_map(owner).unwrap_or_else(|| {
            let id = FIRST_USER + (fresh_number() & 0x00ff_ffff) as u32;
            User { uid: id, gid: id }
        })
    }

    fn tell(&self, step: &str, done: u64, total: Option<u64>) {
        self.preparation.send_replace(Preparation::Working {
            step: step.to_owned(),
            done,
            total,
        });
    }

    fn labels(&self, role: &str) -> HashMap<String, String> {
        let labels = [
            (LABEL_SERVER, self.tenancy.server()),
            (LABEL_PLACE, self.tenancy.place()),
            (LABEL_ROLE, role),
        ];
        labels
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    /// Waits for the end of the preparation. One that has failed gets another chance first.
    async fn prepared(&self) -> Result<Arc<Standing>, LaunchError> {
        if let Some(standing) = self.standing() {
            return Ok(standing);
        }
        let mut preparation = self.preparation.subscribe();
        if matches!(
            &*preparation.borrow_and_update(),
            Preparation::Failed { .. }
        ) {
            self.again.notify_one();
            let _ = tokio::time::timeout(SECOND_CHANCE, preparation.changed()).await;
        }
        let settled = preparation
            .wait_for(|state| !matches!(state, Preparation::Working { .. }))
            .await;
        match settled.as_deref() {
            Ok(Preparation::Failed { why }) => Err(LaunchError::Preparation { why: why.clone() }),
            Ok(_) => self.standing().ok_or_else(|| LaunchError::Preparation {
                why: "it is not finished".to_owned(),
            }),
            Err(_) => Err(LaunchError::Preparation {
                why: "the server is ending".to_owned(),
            }),
        }
    }

    /// Folders of the operator's that a container shows.
    fn binds(&self, purpose: Purpose) -> &[ContainerBind] {
        match purpose {
            Purpose::Sessions => &self.settings.binds,
            Purpose::OwnWork => &[],
        }
    }

    fn network(&self, purpose: Purpose) -> Option<ContainerNetwork> {
        match (purpose, &self.settings.packages) {
            (Purpose::OwnWork, Some(packages)) => {
                let mut network = packages.network.clone();
                network.network.ports.extend(
                    &*packages
                        .ports
                        .lock()
                        .expect("nothing panics while it holds the ports"),
                );
                Some(network)
            }
            _ => self.settings.network.clone(),
        }
    }

    /// What of the host a container shows: folders of the operator's, what its network needs, and packages.
    fn shown(
        &self,
        standing: &Standing,
        purpose: Purpose,
        network: Option<&ContainerNetwork>,
    ) -> std::io::Result<Vec<ContainerBind>> {
        let mut shown = self.binds(purpose).to_vec();
        if let Some(network) = network {
            shown.extend(network.files(self.tenancy.folder())?);
        }
        if purpose == Purpose::Sessions {
            shown.extend(self.masks.binds(self.binds(purpose))?);
        }
        if let (Some(packages), None) = (&self.settings.packages, &standing.blind) {
            shown.extend(packages.shown.iter().cloned());
            if purpose == Purpose::OwnWork {
                shown.extend(packages.tools.iter().cloned());
            }
        }
        Ok(shown)
    }

    fn limits(&self, purpose: Purpose) -> &SandboxLimits {
        match purpose {
            Purpose::Sessions => &self.settings.limits,
            Purpose::OwnWork => &self.settings.limits_apart,
        }
    }

    /// Makes a container with a session in it.
    async fn make(
        &self,
        standing: &Standing,
        how: Fresh,
        purpose: Purpose,
    ) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let user = self.user(standing.house.has_user_namespace, self.binds(purpose));
        let network = self.network(purpose);
        let shown = self.shown(standing, purpose, network.as_ref());
        let shown = shown.map_err(|error| LaunchError::Start {
            why: error.to_string(),
        })?;
        let body = spec::session(Wanted {
            image: &standing.image.image,
            // Podman has one for all containers, which was looked at; it takes any other name for this, and tells none.
            runtime: self
                .settings
                .runtime
                .as_deref()
                .filter(|_| self.settings.kind == EngineKind::Docker),
            limits: self.limits(purpose),
            binds: &shown,
            user,
            volume: &standing.image.volume,
            command: standing.image.command.clone(),
            labels: self.labels(ROLE_SESSION),
            seccomp: &standing.seccomp,
            can_count_files: self.settings.kind == EngineKind::Docker,
        });
        let name = format!("cellblock-{:016x}", fresh_number());
        let (id, followed) =
            self.create(&standing.engine, &name, &body)
                .await
                .map_err(|error| LaunchError::Start {
                    why: error.to_string(),
                })?;
        let house = match purpose {
            Purpose::Sessions => standing.house.clone(),
            Purpose::OwnWork => {
                let limits = self.limits(purpose).clone();
                Arc::new(House {
                    limits,
                    owns_work_folder: true,
                    network,
                    ..(*standing.house).clone()
                })
            }
        };
        let plan = self.plan(how, purpose);
        let maker = Arc::new(Again {
            inner: self.this.clone(),
            purpose,
        });
        let made = Made {
            engine: &standing.engine,
            house,
            name: &name,
            id: id.clone(),
            body: &body,
            user,
            plan: &plan,
            fate: followed,
            maker,
        };
        let container = Container::start(made).await?;
        if let Some(known) = self.known().get_mut(&id) {
            known.container = Some(Arc::downgrade(&container));
        }
        container.first_session(how, LAUNCH_PATIENCE).await
    }

    /// Has a container created, and known from then on.
    async fn create(
        &self,
        engine: &Engine,
        name: &str,
        body: &ContainerCreateBody,
    ) -> Result<(String, watch::Receiver<Fate>), EngineError> {
        let _creation = self.creations.read().await;
        let id = engine.create(name, body).await?;
        let fate = watch::Sender::new(Fate::default());
        let followed = fate.subscribe();
        let mut known = self.known();
        known.retain(|_, known| known.fate.receiver_count() > 0);
        known.insert(
            id.clone(),
            Known {
                fate,
                container: None,
            },
        );
        Ok((id, followed))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known
            .lock()
            .expect("nothing panics while it holds what is known")
    }

    /// Makes up for what was taken from the pool, several at a time.
    async fn keep_pool_full(&self) {
        let settings = self.settings.pool;
        let mut making = FuturesUnordered::new();
        let mut rests = false;
        while !self.pool.is_closed() {
            self.pool.weed(&settings);
            while !rests && self.pool.claim(&settings) {
                making.push(async {
                    let standing = self.prepared().await?;
                    self.make(&standing, Fresh::Primed, Purpose::Sessions).await
                });
            }
            tokio::select! {
                Some(made) = making.next() => {
                    if let Err(error) = &made {
                        warn!(%error, "no container could be made for the pool");
                        rests = true;
                    }
                    self.pool.add(made.ok());
                }
                () = self.pool.changed() => {}
                () = tokio::time::sleep(WEEDING) => rests = false,
            }
        }
    }

    /// Follows what the engine tells about our containers, for ever.
    async fn listen(&self) {
        loop {
            let Ok(standing) = self.prepared().await else {
                return;
            };
            let engine = &standing.engine;
            let mut events = engine.events(LABEL_SERVER, self.tenancy.server());
            let mut inventories = tokio::time::interval(BETWEEN_INVENTORIES);
            loop {
                let event = tokio::select! {
                    event = events.next() => event,
                    _ = inventories.tick() => {
                        self.remove_unneeded(engine).await;
                        continue;
                    }
                };
                let Some(Ok(event)) = event else { break };
                let id = event.actor.and_then(|actor| actor.id).unwrap_or_default();
                let known = self.known();
                let Some(Known { fate, .. }) = known.get(&id) else {
                    continue;
                };
                match event.action.as_deref() {
                    Some("oom") => fate.send_modify(|fate| fate.out_of_memory += 1),
                    Some("die" | "died") => fate.send_modify(|fate| fate.died = true),
                    _ => {}
                }
            }
            // The engine has gone; it may come back.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Removes containers of this server that nobody needs: those whose sessions were lost with the
    /// engine that had them, and those whose removal it did not hear or could not finish.
    async fn remove_unneeded(&self, engine: &Engine) {
        for id in self.unneeded(engine).await {
            info!("a container whose session was lost is removed");
            engine.remove(&id).await;
        }
    }

    async fn unneeded(&self, engine: &Engine) -> Vec<String> {
        let _nobody_creates = self.creations.write().await;
        let Ok(mut listed) = engine.list(LABEL_SERVER, self.tenancy.server()).await else {
            return Vec::new();
        };
        let known = self.known();
        listed.retain(|container| {
            let is_session = container
                .labels
                .get(LABEL_ROLE)
                .is_some_and(|role| role == ROLE_SESSION);
            is_session && !known.get(&container.id).is_some_and(Known::is_needed)
        });
        listed.into_iter().map(|container| container.id).collect()
    }

    /// Removes every container that this server has made and that is still there. An engine answers "in
    /// progress" for a removal that may still fail, so it is asked what is left.
    async fn remove_own(&self, engine: &Engine) {
        for pause in engine::REMOVAL_PAUSES {
            let Ok(listed) = engine.list(LABEL_SERVER, self.tenancy.server()).await else {
                return;
            };
            if listed.is_empty() {
                return;
            }
            let mut removals = tokio::task::JoinSet::new();
            for container in listed {
                let engine = engine.clone();
                removals.spawn(async move { engine.remove(&container.id).await });
            }
            removals.join_all().await;
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }
}
