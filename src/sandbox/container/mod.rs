//! Sandboxes in containers, made by Docker, Podman or any engine with a compatible API.
//!
//! ```text
//! server ── engine API ── engine ── container           one per session and its forks
//!    └── one stream (stdin and stdout) ── supervisor (our Python, first process)
//!                                           ├─ warm process
//!                                           └─ subreaper ─ interpreter, checkpoints, forks
//! ```
//!
//! `engine` is the API client. `spec` builds the container configuration and checks the result;
//! `profile` is the seccomp profile. `image` inspects the image and adds our runner beside it.
//! `mux_connection` carries all traffic with the supervisor over one stream: `mux` splits it into
//! frames, `messages` has their meaning. `sandbox` is one container and its sessions. `id_mapped`
//! makes folders of other owners appear as the session's. `facts` come from the kernel or the
//! engine. `pool` keeps containers ready. `tenancy` finds containers left by dead servers. `check`
//! has the findings for `doctor`. `egress` opens a container's network to the destinations that an
//! operator lists, through a helper container (`netns_helper`) where the server itself lacks the
//! permission.
//!
//! No container that runs a user's code ever has a network with a route to anything, a capability,
//! a device, the engine's socket, or a host folder that the operator did not name. The only
//! exception is package folders, which are read-only. The engine's file copying into and out of
//! containers is not used.

mod check;
mod egress;
mod engine;
mod facts;
mod id_mapped;
mod image;
mod masks;
mod messages;
mod mux;
mod mux_connection;
mod netns_helper;
mod pool;
mod profile;
mod sandbox;
mod spec;
mod tenancy;

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

pub use self::check::{EngineFinding, Examined, FindingState, examine};
pub use self::egress::ContainerNetwork;
pub use self::engine::{
    BuildFailure, BuildNews, Building, Engine, EngineAddress, EngineError, EngineKind, ImageFacts,
    ImageProbe, ImageProbeError,
};
use self::facts::ContainerFate;
use self::id_mapped::IdMapped;
pub use self::image::BundledFiles;
use self::image::{ImageInspection, PreparedImage, fresh_number};
use self::masks::Masks;
use self::messages::FreshStart;
use self::netns_helper::NetnsHelpers;
use self::pool::ContainerPool;
pub use self::pool::PoolSettings;
use self::sandbox::{
    Container, ContainerContext, ContainerMaker, ContainerSandbox, CreatedContainer,
};
pub use self::spec::{ContainerBind, WORK as WORK_FOLDER};
use self::spec::{
    LABEL_PLACE, LABEL_ROLE, LABEL_SERVER, ROLE_NETNS_HELPER, ROLE_SESSION, SessionContainer, User,
};
use self::tenancy::Tenancy;
pub use self::tenancy::remove_left_containers;
use super::masks::{HostMask, Replacements};
use super::{Backend, Interpreter, LaunchError, Preparation, Sandbox, SandboxLimits};

/// Timeout for making a session in a new container, from its creation to a warm Python.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(180);
/// Delay before a failed preparation is retried, unless a caller asks earlier.
const RETRY_DELAY: Duration = Duration::from_secs(10);
/// Time that a session request waits for the retry of a failed preparation.
const RETRY_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval for checking members of the pool.
const POOL_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Interval for listing this server's containers at the engine.
const INVENTORY_INTERVAL: Duration = Duration::from_secs(15);

/// First host uid for sessions, where the engine has no user namespace. No system assigns these
/// numbers.
pub const FIRST_USER: u32 = 0x7000_0000;
/// User of a session inside a user namespace.
const NAMESPACED_USER: User = User {
    uid: 1000,
    gid: 1000,
};

/// Settings of the container backend.
#[derive(Debug, Clone)]
pub struct ContainerSettings {
    pub kind: EngineKind,
    pub address: EngineAddress,
    /// Files that may contain credentials for the registry of the image.
    pub credentials: Vec<PathBuf>,
    /// The image's name.
    pub image: String,
    /// A runtime other than the engine's default, such as `runsc`.
    pub runtime: Option<String>,
    /// Where this server registers, so that other servers know it is alive.
    pub runtime_dir: PathBuf,
    pub limits: SandboxLimits,
    /// Limits of containers for the server's own work.
    pub limits_apart: SandboxLimits,
    pub binds: Vec<ContainerBind>,
    /// Paths in them that sessions must not read or change.
    pub masks: Vec<HostMask>,
    /// Environment variables that the operator gives to sessions.
    pub variables: Vec<(String, String)>,
    pub pool: PoolSettings,
    /// Destinations that sessions may reach; `None` for no network.
    pub network: Option<ContainerNetwork>,
    /// How packages get into containers; `None` disables them.
    pub packages: Option<ContainerPackages>,
    /// Whether sessions may start programs freely or need approval for each.
    pub programs: Programs,
    /// Modules that pooled containers import in advance, if the image has them.
    pub preload: Vec<String>,
}

/// Additions to containers for installing packages into sessions.
#[derive(Debug, Clone)]
pub struct ContainerPackages {
    /// Folders of the server that every container shows, read-only.
    pub shown: Vec<ContainerBind>,
    /// Additional folders of a container that is made for an installation.
    pub tools: Vec<ContainerBind>,
    /// Destinations that such a container may reach.
    pub network: ContainerNetwork,
    /// Ports of the package index, as far as they are known when a container is made.
    pub ports: Arc<Mutex<BTreeSet<u16>>>,
}

/// The use of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Sessions,
    /// The server's own work: nothing of the operator's is shown, and packages can be fetched.
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
    bundled_files: Arc<dyn BundledFiles>,
    preparation: watch::Sender<Preparation>,
    /// Set when the preparation succeeds. Later engine failures do not clear it.
    prepared: RwLock<Option<Arc<PreparedBackend>>>,
    tenancy: Tenancy,
    masks: Masks,
    known: Mutex<HashMap<String, Known>>,
    /// Held for reading while a container is created, and for writing while looking for unknown
    /// containers.
    creations: tokio::sync::RwLock<()>,
    pool: ContainerPool,
    /// Requests a retry of the preparation.
    again: Notify,
    /// Held while the preparation is repeated.
    preparing: tokio::sync::Mutex<()>,
}

/// A container of this server, while its fate is being followed.
struct Known {
    fate: watch::Sender<ContainerFate>,
    /// `None` while it is being started.
    container: Option<Weak<Container>>,
}

impl Known {
    /// Returns whether the container is still in use.
    fn is_needed(&self) -> bool {
        let is_alive = |container: &Weak<Container>| {
            container
                .upgrade()
                .is_some_and(|container| container.is_alive())
        };
        self.fate.receiver_count() > 0 && self.container.as_ref().is_none_or(is_alive)
    }
}

/// State available after the preparation.
struct PreparedBackend {
    engine: Engine,
    image: PreparedImage,
    context: Arc<ContainerContext>,
    /// The seccomp profile in the form this engine accepts.
    seccomp: String,
    /// Why the engine cannot show folders of the server, if it cannot.
    blind: Option<String>,
}

impl ContainerBackend {
    /// Starts the preparation in the background, and returns at once.
    pub fn start(
        settings: ContainerSettings,
        bundled_files: Arc<dyn BundledFiles>,
        preparation: watch::Sender<Preparation>,
    ) -> std::io::Result<ContainerBackend> {
        let tenancy = Tenancy::register(&settings.runtime_dir)?;
        let masks = Masks::new(settings.masks.clone(), &tenancy)?;
        let inner = Arc::new_cyclic(|this| Inner {
            this: Weak::clone(this),
            settings,
            bundled_files,
            preparation,
            prepared: RwLock::new(None),
            tenancy,
            masks,
            known: Mutex::default(),
            creations: tokio::sync::RwLock::default(),
            pool: ContainerPool::default(),
            again: Notify::new(),
            preparing: tokio::sync::Mutex::default(),
        });
        let background = vec![tokio::spawn(inner.clone().prepare_until_it_works())];
        Ok(ContainerBackend {
            inner,
            background: Mutex::new(background),
        })
    }

    /// Returns the number of containers waiting in the pool.
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
        // Also waits for an engine that is coming back.
        self.inner.prepared().await?;
        let (sandbox, interpreter) = match self.inner.pool.take(&self.inner.settings.pool) {
            Some(member) => member,
            None => self.inner.made(Purpose::Sessions).await?,
        };
        Ok((Box::new(sandbox), interpreter))
    }

    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let prepared = self.inner.prepared().await?;
        if let (Some(_), Some(why)) = (&self.inner.settings.packages, &prepared.blind) {
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
        // A container that is being made at this moment has our label.
        if let Some(prepared) = self.inner.prepared_now() {
            self.inner.remove_own(&prepared.engine).await;
        }
        self.inner.tenancy.end();
    }
}

/// Makes a replacement for a container.
struct ReplacementMaker {
    inner: Weak<Inner>,
    purpose: Purpose,
}

#[async_trait]
impl ContainerMaker for ReplacementMaker {
    async fn replacement(&self) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let ending = || LaunchError::Start {
            why: "the server is ending".to_owned(),
        };
        let inner = self.inner.upgrade().ok_or_else(ending)?;
        inner.made(self.purpose).await
    }
}

impl Inner {
    fn prepared_now(&self) -> Option<Arc<PreparedBackend>> {
        self.prepared
            .read()
            .expect("no holder of the lock panics")
            .clone()
    }

    /// Prepares, with retries; then keeps the pool full and listens to the engine.
    async fn prepare_until_it_works(self: Arc<Inner>) {
        loop {
            match self.prepare().await {
                Ok(prepared) => break self.set_prepared(prepared),
                Err(why) => {
                    warn!(%why, "the container backend is not ready");
                    self.preparation.send_replace(Preparation::Failed { why });
                }
            }
            let _ = tokio::time::timeout(RETRY_DELAY, self.again.notified()).await;
        }
        info!(
            engine = self.settings.kind.name(),
            image = %self.settings.image,
            "the container backend is ready"
        );
        self.preparation.send_replace(Preparation::Ready);
        tokio::join!(self.listen(), self.keep_pool_full(), self.keep_masked());
    }

    /// Ends containers that see a file which replaced a masked one.
    async fn keep_masked(&self) {
        let masks = self.masks.host_masks();
        if masks.is_empty() {
            return;
        }
        let watched = async {
            let mut replacements = Replacements::watch(masks)?;
            loop {
                if self.masks.are_stale()
                    && let Some(prepared) = self.prepared_now()
                {
                    warn!(
                        "a protected file of the workspace was replaced; the containers that could \
                         see it are ended"
                    );
                    self.remove_own(&prepared.engine).await;
                }
                replacements.next().await?;
            }
        };
        let stopped: Result<std::convert::Infallible, io::Error> = watched.await;
        let Err(error) = stopped;
        warn!(%error, "protected files are not watched: one that is replaced is seen by sessions \
                       that run");
    }

    fn set_prepared(&self, prepared: PreparedBackend) {
        *self.prepared.write().expect("no holder of the lock panics") = Some(Arc::new(prepared));
    }

    /// Prepares again, unless another call has done so since `failed` was current: the engine may
    /// have come back without the image or the volume.
    async fn prepare_again(&self, failed: &Arc<PreparedBackend>) -> Option<Arc<PreparedBackend>> {
        let _turn = self.preparing.lock().await;
        if let Some(now) = self.prepared_now().filter(|now| !Arc::ptr_eq(now, failed)) {
            return Some(now);
        }
        let prepared = self.prepare().await;
        // A preparation that has succeeded once remains valid; the next caller gets its error from
        // the engine itself.
        self.preparation.send_replace(Preparation::Ready);
        self.set_prepared(prepared.ok()?);
        self.prepared_now()
    }

    /// Makes a container with a session in it for a waiting caller.
    async fn made(&self, purpose: Purpose) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let prepared = self.prepared().await?;
        match self.make(&prepared, FreshStart::Immediate, purpose).await {
            Err(first @ LaunchError::Start { .. }) => match self.prepare_again(&prepared).await {
                Some(prepared) => self.make(&prepared, FreshStart::Immediate, purpose).await,
                None => Err(first),
            },
            made => made,
        }
    }

    async fn prepare(&self) -> Result<PreparedBackend, String> {
        let settings = &self.settings;
        self.report(&format!("connecting to {}", settings.kind.name()), 0, None);
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
        let look = ImageInspection {
            engine: &engine,
            bundled_files: &*self.bundled_files,
            tenancy: &self.tenancy,
            labels: self.labels("helper"),
            seccomp: &seccomp,
            report: &|step, done, total| self.report(step, done, total),
        };
        let image = image::prepare(&look, &settings.image).await?;
        self.tenancy.sweep_volumes(&engine, &image.runner).await;
        let blind = self.look_for_folders(&engine, &image, &seccomp).await;
        let netns_helpers = NetnsHelpers::new(
            engine.clone(),
            self.tenancy.file("porter"),
            self.labels(ROLE_NETNS_HELPER),
        );
        let context = ContainerContext {
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
            netns_helpers: Arc::new(netns_helpers),
        };
        Ok(PreparedBackend {
            engine,
            image,
            context: Arc::new(context),
            seccomp,
            blind,
        })
    }

    /// Checks whether the engine sees the folders that containers are to show. It does not if the
    /// server is in a container itself, or the engine in a virtual machine. Returns why not;
    /// sessions then have no packages.
    async fn look_for_folders(
        &self,
        engine: &Engine,
        image: &PreparedImage,
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
                warn!(%error, "packages cannot be installed: the engine does not show folders of \
                               this server");
                Some(format!(
                    "packages cannot be brought into containers, because the engine cannot show \
                     folders of this server ({error}); \
                     install them into the image instead"
                ))
            }
        }
    }

    /// Rejects folders of the operator in which sessions could not work. Sessions are never root
    /// and have one user, and folders appear as theirs only if this server is root.
    fn check_folders(&self) -> Result<(), String> {
        let user = self.user(false, &self.settings.binds);
        let unusable = self
            .settings
            .binds
            .iter()
            .find(|bind| !id_mapped::is_usable(bind, user));
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
        warn!(folder = %bind.host.display(), %whose, "sessions in containers could not use a \
             folder");
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
            "{place} belongs to {whose}, and sessions in containers, which are never root and have \
             one user, could not {use_it}. Give it \
             to the user that sessions are to be (chown -R {uid}:{uid}), allow everybody to \
             {use_it}, run the server as root, or use \
             --backend native"
        ))
    }

    /// Rejects rules that cannot be enforced, before anything is made. Whether a container enforces
    /// them is tested in each container.
    fn check_network(&self, engine: &Engine) -> Result<(), String> {
        if self.settings.network.is_none() || engine.is_local() {
            return Ok(());
        }
        let way = "leave allowed domains and secrets out, or use an engine of this machine or \
                   --backend native";
        Err(format!(
            "what sessions may reach cannot be enforced: the engine is on another machine; {way}"
        ))
    }

    /// Returns the seccomp profile as the engine accepts it: as text, or as a file on the engine's
    /// machine.
    fn seccomp(&self) -> Result<String, String> {
        match (self.settings.kind, &self.settings.address) {
            (EngineKind::Docker, _) => Ok(profile::text(self.settings.programs)),
            (EngineKind::Podman, EngineAddress::Unix(_)) => {
                let file = self
                    .tenancy
                    .keep("seccomp.json", &profile::text(self.settings.programs));
                file.map_err(|error| format!("the list of system calls cannot be written: {error}"))
            }
            (EngineKind::Podman, _) => Err(
                "Podman takes the list of system calls only as a file of its own machine; use it \
                 over a Unix socket, or use Docker"
                    .to_owned(),
            ),
        }
    }

    /// Returns the plan for the warm process of a container. A pooled one imports the modules that
    /// sessions usually need, and rehearses.
    fn plan(&self, how: FreshStart, purpose: Purpose) -> serde_json::Value {
        let has_time = how == FreshStart::Primed;
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
        let mut plan = json!({
            "environment": variables,
            "preload": preload,
            "rehearse": has_time,
            "folders": [cellblock_jail::root::HOME],
            "programs": if may_start_programs { "free" } else { "refused" },
        });
        if !may_start_programs {
            plan["program_filters"] = json!(cellblock_jail::seccomp::program_filters());
        }
        plan
    }

    /// Returns the user of a container's sessions. The owner of the operator's folder takes
    /// precedence if there is one, because sessions must be able to work in it.
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

    fn report(&self, step: &str, done: u64, total: Option<u64>) {
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

    /// Waits for the preparation to finish. A failed one is retried first.
    async fn prepared(&self) -> Result<Arc<PreparedBackend>, LaunchError> {
        if let Some(prepared) = self.prepared_now() {
            return Ok(prepared);
        }
        let mut preparation = self.preparation.subscribe();
        if matches!(
            &*preparation.borrow_and_update(),
            Preparation::Failed { .. }
        ) {
            self.again.notify_one();
            let _ = tokio::time::timeout(RETRY_TIMEOUT, preparation.changed()).await;
        }
        let settled = preparation
            .wait_for(|state| !matches!(state, Preparation::Working { .. }))
            .await;
        match settled.as_deref() {
            Ok(Preparation::Failed { why }) => Err(LaunchError::Preparation { why: why.clone() }),
            Ok(_) => self.prepared_now().ok_or_else(|| LaunchError::Preparation {
                why: "it is not finished".to_owned(),
            }),
            Err(_) => Err(LaunchError::Preparation {
                why: "the server is ending".to_owned(),
            }),
        }
    }

    /// Returns the operator's folders that a container shows.
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

    /// Returns everything of the host that a container shows: the operator's folders, the files for
    /// its network, and packages.
    fn shown(
        &self,
        prepared: &PreparedBackend,
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
        if let (Some(packages), None) = (&self.settings.packages, &prepared.blind) {
            shown.extend(packages.shown.iter().cloned());
            if purpose == Purpose::OwnWork {
                shown.extend(packages.tools.iter().cloned());
            }
        }
        Ok(shown)
    }

    /// Makes the operator's folders appear as the user's in what a container shows. The mounts must
    /// exist until it has started.
    fn with_mapped_ids(
        &self,
        prepared: &PreparedBackend,
        purpose: Purpose,
        user: User,
        shown: Vec<ContainerBind>,
    ) -> std::io::Result<(Vec<ContainerBind>, IdMapped)> {
        let ContainerContext {
            has_user_namespace, ..
        } = *prepared.context;
        if !prepared.engine.is_local() || has_user_namespace {
            return Ok((shown, IdMapped::default()));
        }
        let name = format!("mount-{:016x}", fresh_number());
        let binds = self.binds(purpose);
        let mounts = IdMapped::mount(binds, user, |index| {
            self.tenancy.file(&format!("{name}-{index}"))
        })?;
        Ok((mounts.translate(shown, binds), mounts))
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
        prepared: &PreparedBackend,
        how: FreshStart,
        purpose: Purpose,
    ) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        let user = self.user(prepared.context.has_user_namespace, self.binds(purpose));
        let network = self.network(purpose);
        let shown = self.shown(prepared, purpose, network.as_ref());
        let (shown, mounts) = shown
            .and_then(|shown| self.with_mapped_ids(prepared, purpose, user, shown))
            .map_err(|error| LaunchError::Start {
                why: error.to_string(),
            })?;
        let body = spec::session(SessionContainer {
            image: &prepared.image.image,
            // Podman has one runtime for all containers, which was checked before. It accepts any
            // other name here, and reports none.
            runtime: self
                .settings
                .runtime
                .as_deref()
                .filter(|_| self.settings.kind == EngineKind::Docker),
            limits: self.limits(purpose),
            binds: &shown,
            user,
            volume: &prepared.image.volume,
            command: prepared.image.command.clone(),
            labels: self.labels(ROLE_SESSION),
            seccomp: &prepared.seccomp,
            can_count_files: self.settings.kind == EngineKind::Docker,
        });
        let name = format!("cellblock-{:016x}", fresh_number());
        let (id, followed) =
            self.create(&prepared.engine, &name, &body)
                .await
                .map_err(|error| LaunchError::Start {
                    why: error.to_string(),
                })?;
        let context = match purpose {
            Purpose::Sessions => prepared.context.clone(),
            Purpose::OwnWork => {
                let limits = self.limits(purpose).clone();
                Arc::new(ContainerContext {
                    limits,
                    owns_work_folder: true,
                    network,
                    ..(*prepared.context).clone()
                })
            }
        };
        let plan = self.plan(how, purpose);
        let maker = Arc::new(ReplacementMaker {
            inner: self.this.clone(),
            purpose,
        });
        let made = CreatedContainer {
            engine: &prepared.engine,
            context,
            name: &name,
            id: id.clone(),
            body: &body,
            user,
            plan: &plan,
            fate: followed,
            maker,
        };
        let container = Container::start(made).await?;
        drop(mounts);
        if let Some(known) = self.known().get_mut(&id) {
            known.container = Some(Arc::downgrade(&container));
        }
        container.first_session(how, LAUNCH_TIMEOUT).await
    }

    /// Creates a container and registers it as known.
    async fn create(
        &self,
        engine: &Engine,
        name: &str,
        body: &ContainerCreateBody,
    ) -> Result<(String, watch::Receiver<ContainerFate>), EngineError> {
        let _creation = self.creations.read().await;
        let id = engine.create(name, body).await?;
        let fate = watch::Sender::new(ContainerFate::default());
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

    /// Refills the pool, several containers at a time.
    async fn keep_pool_full(&self) {
        let settings = self.settings.pool;
        let mut making = FuturesUnordered::new();
        let mut rests = false;
        while !self.pool.is_closed() {
            self.pool.remove_stale(&settings);
            while !rests && self.pool.reserve(&settings) {
                making.push(async {
                    let prepared = self.prepared().await?;
                    self.make(&prepared, FreshStart::Primed, Purpose::Sessions)
                        .await
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
                () = tokio::time::sleep(POOL_CHECK_INTERVAL) => rests = false,
            }
        }
    }

    /// Follows the engine's events about our containers. Never returns in normal operation.
    async fn listen(&self) {
        loop {
            let Ok(prepared) = self.prepared().await else {
                return;
            };
            let engine = &prepared.engine;
            let mut events = engine.events(LABEL_SERVER, self.tenancy.server());
            let mut inventories = tokio::time::interval(INVENTORY_INTERVAL);
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
            // The engine has disconnected; it may come back.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Removes containers of this server that are not needed: those whose sessions were lost with
    /// their engine, and those whose removal the engine did not receive or could not finish.
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

    /// Removes all remaining containers of this server. An engine answers "in progress" for a
    /// removal that may still fail, so the containers are listed again.
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
