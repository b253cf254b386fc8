//! The native backend: sandboxes made of Linux namespaces, with interpreters forked from a warm
//! one.
//!
//! `jail` starts the processes of the jail and knows what they enforce; `warden` is the client of
//! their command socket. `instance` records what must be cleaned up after a crash. `groups` finds a
//! place for control groups, if necessary by asking `systemd`. `sandbox` makes one sandbox and
//! checks each interpreter in it against the kernel. `side_process` starts programs beside them.
//! `oom` determines which memory limit was reached. `pool` keeps sandboxes ready. This file
//! joins them into a backend.
//!
//! When a jail ends or hangs (`liveness`), its sandboxes are lost. The loss is reported, the jail
//! is removed, and another one is built; calls wait for it. A failed preparation and a warm
//! interpreter that could not be started are also retried, at the latest when a session is
//! requested.

mod groups;
mod instance;
mod jail;
mod liveness;
mod oom;
mod pool;
mod sandbox;
mod side_process;
mod systemd;
mod warden;

use std::any::Any;
use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, RwLock, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
pub use cellblock_jail::test_switches::TestSwitches;
pub use cellblock_jail::wire::Programs;
use cellblock_jail::wire::{Bind, OperatorMount, WardenCommand};
use cellblock_jail::{cgroup, root};
use tokio::sync::{Notify, Semaphore, SemaphorePermit, watch};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use self::jail::Jail;
pub use self::jail::trial;
use self::pool::{MissingMember, NativePool};
use self::sandbox::{FamilyChoice, InterpreterStart, NativeSandbox};
use super::masks::{HostMask, Replacements};
use super::{
    Backend, Interpreter, LaunchError, LayerKind, Preparation, Sandbox, SandboxLimits,
    SandboxNetwork,
};

/// The working folder inside, for descriptions of a sandbox to a caller.
pub const WORK_FOLDER: &str = root::WORK;

/// Timeout for any single step of a launch. The slowest, a fork, takes milliseconds, but much
/// longer on a busy machine. A hung warden is noticed earlier, by its heartbeat.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for a warm interpreter to import its packages on a slow disk.
const WARM_UP_TIMEOUT: Duration = Duration::from_secs(120);
/// Delay before the pool is refilled, so that refilling does not compete with the session just
/// started.
const POOL_REFILL_DELAY: Duration = Duration::from_millis(15);
/// Delay before the pool retries after a sandbox could not be made.
const POOL_RETRY_BACKOFF: Duration = Duration::from_secs(1);
/// First and longest delay before a failed preparation is retried. Each failure doubles it. A call
/// ends the delay early, but never before the shortest one is over.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// A jail that lived at least this long is replaced at once.
const STABLE_LIFETIME: Duration = Duration::from_secs(10);
/// Time that a call waits for the retry of a failed preparation.
const RETRY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time that the start of a session waits for earlier ones before it is rejected as busy.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of the native backend.
#[derive(Debug, Clone)]
pub struct NativeSettings {
    /// The program to start as the jail's guardian: this server's own binary.
    pub guardian: PathBuf,
    pub runtime_dir: PathBuf,
    pub limits: SandboxLimits,
    /// Limits of sandboxes for the server's own work.
    pub limits_apart: SandboxLimits,
    /// The workspace and the other mounts, with their paths inside.
    pub mounts: Vec<OperatorMount>,
    /// Paths in them that sessions must not read or change.
    pub masks: Vec<HostMask>,
    /// Environment variables that the operator gives to sessions.
    pub variables: Vec<(String, String)>,
    pub allow_missing: BTreeSet<LayerKind>,
    /// Whether the code of sessions may start programs. The server's own work always may.
    pub programs: Programs,
    /// Number of warm sessions kept ready.
    pub pool: usize,
    /// Number of empty sandboxes kept ready for when the warm sessions are used up.
    pub empty: usize,
    pub test_switches: TestSwitches,
}

/// The Python environment as the jail needs it.
pub struct WarmEnvironment {
    pub binds: Vec<Bind>,
    pub python: String,
    pub arguments: Vec<String>,
    /// The environment of the interpreter itself, without the operator's variables.
    pub variables: Vec<(String, String)>,
    pub preload: Vec<String>,
    /// A single session is needed soon; work that pays off only with many sessions is skipped.
    pub quick: bool,
    /// Destinations that sandboxes can reach; `None` for no network.
    pub network: Option<SandboxNetwork>,
    /// Guards that keep the environment from being removed; held as long as the jail exists.
    pub held: Vec<Box<dyn Any + Send + Sync>>,
}

/// Sandboxes made of namespaces.
pub struct NativeBackend {
    inner: Arc<Inner>,
    /// Runs the preparation, then keeps the pool full.
    background: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    /// Itself, for sandboxes that need another one for a fork.
    this: Weak<Inner>,
    settings: NativeSettings,
    preparation: watch::Sender<Preparation>,
    /// The current jail, if there is one.
    jail: RwLock<Option<Arc<Jail>>>,
    pool: NativePool,
    /// Notified when a call waits for a retry.
    again: Notify,
    /// Limits how many sandboxes are made at the same time. More would only slow each other down.
    starts: Semaphore,
}

/// The delay between retries.
struct Backoff(Duration);

impl Backoff {
    const fn new() -> Backoff {
        Backoff(MIN_BACKOFF)
    }

    /// Waits until the next attempt is due, or until a call asks for it.
    async fn wait(&mut self, again: &Notify) {
        tokio::time::sleep(MIN_BACKOFF).await;
        let _ = tokio::time::timeout(self.0 - MIN_BACKOFF, again.notified()).await;
        self.0 = (self.0 * 2).min(MAX_BACKOFF);
    }
}

impl NativeBackend {
    /// Starts the preparation in the background, and returns at once. `environment` does the first
    /// part of each attempt and reports its steps on `preparation`.
    pub fn start<E, F>(
        settings: NativeSettings,
        preparation: watch::Sender<Preparation>,
        environment: E,
    ) -> NativeBackend
    where
        E: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<WarmEnvironment, String>> + Send + 'static,
    {
        let at_once = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
        let inner = Arc::new_cyclic(|this| Inner {
            this: Weak::clone(this),
            settings,
            preparation,
            jail: RwLock::new(None),
            pool: NativePool::default(),
            again: Notify::new(),
            starts: Semaphore::new(2 * at_once),
        });
        let background = Arc::clone(&inner);
        let background = tokio::spawn(async move { background.supervise(environment).await });
        NativeBackend {
            inner,
            background: Mutex::new(Some(background)),
        }
    }
}

#[async_trait]
impl Backend for NativeBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.inner.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        // A member of the pool is valid even while a preparation is repeated.
        let (sandbox, interpreter) = match self.inner.pool.take_warm() {
            Some(member) => member,
            None => self.inner.launch_fresh(false).await?,
        };
        Ok((Box::new(sandbox), interpreter))
    }

    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let settings = &self.inner.settings;
        let is_like_others = settings.mounts.is_empty() && settings.programs == Programs::Free;
        if is_like_others && settings.limits == settings.limits_apart {
            return self.launch().await;
        }
        let (sandbox, interpreter) = self.inner.launch_fresh(true).await?;
        Ok((Box::new(sandbox), interpreter))
    }

    async fn shut_down(&self) {
        self.inner.pool.close();
        let background = self
            .background
            .lock()
            .expect("no holder of the task panics")
            .take();
        if let Some(background) = background {
            // A jail that is still being started ends with the task that starts it.
            background.abort();
            let _ = background.await;
        }
        if let Some(jail) = self.inner.jail() {
            jail.end().await;
        }
    }
}

impl Inner {
    /// Builds a jail and serves from it; builds another one whenever that fails or the jail is
    /// gone.
    async fn supervise<E, F>(&self, environment: E)
    where
        E: Fn() -> F,
        F: Future<Output = Result<WarmEnvironment, String>>,
    {
        let mut backoff = Backoff::new();
        let mut reported = String::new();
        loop {
            let attempt = async {
                let environment = environment().await?;
                self.report_step("starting the sandbox");
                let jail = Jail::start(&self.settings, environment).await;
                jail.map(Arc::new).map_err(|error| error.to_string())
            };
            let (why, lived) = match attempt.await {
                Ok(jail) => self.serve(jail).await,
                Err(why) => (why, None),
            };
            if lived.is_some() {
                error!(%why, "the jail ended with all its sessions; another one is built");
                // Not a failure yet: calls wait for the next jail.
                self.report_step(&format!("{why}; another one is built"));
            } else {
                if why != reported {
                    error!(%why, "no session can be started; the preparation is tried again");
                    reported.clone_from(&why);
                }
                self.preparation.send_replace(Preparation::Failed { why });
            }
            if lived.is_some_and(|lived| lived >= STABLE_LIFETIME) {
                backoff = Backoff::new();
            } else {
                backoff.wait(&self.again).await;
            }
            self.report_step("preparing Python again");
        }
    }

    /// Serves from a jail until it is gone, then removes its remains. Returns why it is gone, and
    /// how long it was ready, if it ever was.
    async fn serve(&self, jail: Arc<Jail>) -> (String, Option<Duration>) {
        let ready = OnceLock::new();
        *self.jail.write().expect("no holder of the jail panics") = Some(Arc::clone(&jail));
        let why = tokio::select! {
            why = jail.warden.ended() => why,
            why = jail.warden.hung() => {
                jail.warden.kill();
                why
            }
            why = self.warm_and_keep(&jail, &ready) => why,
            why = self.keep_masked(&jail) => why,
        };
        *self.jail.write().expect("no holder of the jail panics") = None;
        self.report_step("removing what is left of the sandboxes");
        self.pool.clear();
        jail.end().await;
        (why, ready.get().map(Instant::elapsed))
    }

    /// Covers masked files again in existing sandboxes when the host replaces them. Never returns.
    async fn keep_masked(&self, jail: &Jail) -> String {
        if self.settings.masks.is_empty() {
            return std::future::pending().await;
        }
        let watched = async {
            let mut replacements = Replacements::watch(&self.settings.masks)?;
            loop {
                // Also before the first event: a file may have been replaced before it was watched.
                jail.warden.command_now(&WardenCommand::ReapplyMasks);
                replacements.next().await?;
            }
        };
        let stopped: Result<std::convert::Infallible, io::Error> = watched.await;
        let Err(error) = stopped;
        warn!(%error, "protected files are not watched: one that is replaced is seen by sessions \
                       that run");
        std::future::pending().await
    }

    /// Warms up Python, then keeps it warm and the pool full. Returns only when the warm-up failed.
    async fn warm_and_keep(&self, jail: &Jail, ready: &OnceLock<Instant>) -> String {
        self.report_step("warming up Python");
        // The first sandbox is made while Python imports.
        let (warmed, empty) = tokio::join!(
            jail.warden.warm(WARM_UP_TIMEOUT),
            self.make_empty(FamilyChoice::New { apart: false })
        );
        let empty = match (warmed, empty) {
            (Err(why), _) => return why,
            (_, Err(error)) => return error.to_string(),
            (Ok(()), Ok(empty)) => empty,
        };
        self.pool.add_empty(empty);
        let limits = jail
            .instance
            .tree()
            .map_or("rlimits", cgroup::CgroupTree::kind);
        info!(identity = ?jail.identity, limits, "the native backend is ready");
        let _ = ready.set(Instant::now());
        self.preparation.send_replace(Preparation::Ready);
        tokio::join!(self.keep_pool_full(), self.keep_warm(jail));
        std::future::pending().await
    }

    /// Starts another warm interpreter whenever there is none and none is starting.
    async fn keep_warm(&self, jail: &Jail) {
        loop {
            let mut backoff = Backoff::new();
            let mut why = jail.warden.cold().await;
            error!(%why, "no session can be started; Python is warmed up again");
            loop {
                self.preparation.send_replace(Preparation::Failed { why });
                backoff.wait(&self.again).await;
                self.report_step("warming up Python");
                match jail.warden.warm(WARM_UP_TIMEOUT).await {
                    Ok(()) => break,
                    Err(again) => why = again,
                }
            }
            info!("Python is warm again");
            self.preparation.send_replace(Preparation::Ready);
        }
    }

    fn jail(&self) -> Option<Arc<Jail>> {
        self.jail
            .read()
            .expect("no holder of the jail panics")
            .clone()
    }

    /// Waits for the preparation to finish. A failed one is retried first.
    async fn prepared(&self) -> Result<Arc<Jail>, LaunchError> {
        let ending = || LaunchError::Preparation {
            why: "the server is ending".to_owned(),
        };
        let mut preparation = self.preparation.subscribe();
        let now = preparation.borrow_and_update().clone();
        if now != Preparation::Ready {
            // Ends any delay before the next attempt.
            self.again.notify_one();
        }
        if let Preparation::Failed { .. } = now {
            let _ = tokio::time::timeout(RETRY_TIMEOUT, preparation.changed()).await;
        }
        loop {
            let settled = preparation
                .wait_for(|state| !matches!(state, Preparation::Working { .. }))
                .await;
            if let Preparation::Failed { why } = &*settled.map_err(|_| ending())? {
                return Err(LaunchError::Preparation { why: why.clone() });
            }
            match self.jail() {
                Some(jail) if !jail.warden.has_ended() => return Ok(jail),
                // The jail has just ended.
                _ => preparation.changed().await.map_err(|_| ending())?,
            }
        }
    }

    /// Makes a session in its own sandbox. Retries in another jail if this one ends meanwhile.
    async fn launch_fresh(&self, apart: bool) -> Result<(NativeSandbox, Interpreter), LaunchError> {
        let jail = self.prepared().await?;
        match self.make(InterpreterStart::Plain, apart).await {
            Err(_) if jail.warden.has_ended() => {
                self.prepared().await?;
                self.make(InterpreterStart::Plain, apart).await
            }
            made => made,
        }
    }

    /// Waits until fewer sandboxes are being made.
    async fn start_permit(&self) -> Result<SemaphorePermit<'_>, LaunchError> {
        match tokio::time::timeout(QUEUE_TIMEOUT, self.starts.acquire()).await {
            Ok(permit) => Ok(permit.expect("the semaphore is never closed")),
            Err(_) => Err(LaunchError::Busy),
        }
    }

    fn report_step(&self, step: &str) {
        self.preparation.send_replace(Preparation::Working {
            step: step.to_owned(),
            done: 0,
            total: None,
        });
    }

    async fn keep_pool_full(&self) {
        while !self.pool.is_closed() {
            let made = match self.pool.missing(self.settings.pool, self.settings.empty) {
                Some(MissingMember::Warm) => self
                    .make(InterpreterStart::Rehearsed, false)
                    .await
                    .map(|member| self.pool.add_warm(member)),
                Some(MissingMember::Empty) => self
                    .make_empty(FamilyChoice::New { apart: false })
                    .await
                    .map(|sandbox| self.pool.add_empty(sandbox)),
                None => {
                    self.pool.taken().await;
                    tokio::time::sleep(POOL_REFILL_DELAY).await;
                    continue;
                }
            };
            if let Err(error) = made
                && !self.pool.is_closed()
            {
                warn!(%error, "no sandbox could be made for the pool");
                tokio::time::sleep(POOL_RETRY_BACKOFF).await;
                // Without a warm Python each attempt would fail and log an error.
                let _ = self
                    .preparation
                    .subscribe()
                    .wait_for(|state| *state == Preparation::Ready)
                    .await;
            }
        }
    }

    async fn make(
        &self,
        how: InterpreterStart,
        apart: bool,
    ) -> Result<(NativeSandbox, Interpreter), LaunchError> {
        let _permit = self.start_permit().await?;
        let mut sandbox = if apart {
            self.begin_empty(FamilyChoice::New { apart }).await?
        } else {
            self.empty_sandbox().await?
        };
        let interpreter = sandbox.start_session(how).await?;
        // The permit is held until Python has started, because that is most of the work.
        sandbox.await_hello(&interpreter.channel).await?;
        Ok((sandbox, interpreter))
    }

    /// Takes an empty sandbox from the pool, or starts to make one.
    async fn empty_sandbox(&self) -> Result<NativeSandbox, LaunchError> {
        match self.pool.take_empty() {
            Some(sandbox) => Ok(sandbox),
            None => self.begin_empty(FamilyChoice::New { apart: false }).await,
        }
    }

    async fn make_empty(&self, family: FamilyChoice<'_>) -> Result<NativeSandbox, LaunchError> {
        let mut sandbox = self.begin_empty(family).await?;
        sandbox.prepared().await?;
        Ok(sandbox)
    }

    async fn begin_empty(&self, family: FamilyChoice<'_>) -> Result<NativeSandbox, LaunchError> {
        let jail = self.jail().ok_or_else(|| LaunchError::Preparation {
            why: "it is not finished".to_owned(),
        })?;
        if let FamilyChoice::Join(source) = family
            && !source.is_of(&jail)
        {
            return Err(LaunchError::Start {
                why: "its jail has ended".to_owned(),
            });
        }
        let slot = jail.slots.take().ok_or_else(|| LaunchError::Start {
            why: "all numbers for sandboxes are in use".to_owned(),
        })?;
        let limits = if family.is_apart() {
            &self.settings.limits_apart
        } else {
            &self.settings.limits
        };
        NativeSandbox::begin(&jail, slot, limits, family, Weak::clone(&self.this)).await
    }
}
