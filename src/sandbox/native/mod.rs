//! The native backend: sandboxes made of Linux namespaces, interpreters forked from a warm one.
//!
//! `jail` stands the processes of the jail up and knows what they enforce, `warden` speaks with them, `instance` keeps what must be found
//! again after a crash. `sandbox` makes one sandbox and checks each interpreter in it against the kernel, `errand` starts programs beside them; `pool` keeps some ready. This
//! file joins them into a backend.

mod errand;
mod instance;
mod jail;
mod pool;
mod sandbox;
mod warden;

use std::any::Any;
use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
pub use cellblock_jail::wire::Programs;
use cellblock_jail::wire::{Bind, LeftOut, OperatorMount};
use cellblock_jail::{cgroup, root};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use self::jail::Jail;
pub use self::jail::trial;
use self::pool::{Lack, Pool};
use self::sandbox::{Fresh, Kin, NativeSandbox};
use super::{Backend, Interpreter, LaunchError, LayerKind, Network, Preparation, Sandbox, SandboxLimits};

/// The working folder inside, for whoever describes a sandbox to a caller.
pub const WORK_FOLDER: &str = root::WORK;

/// How long any single step of a launch may take. The slowest, a fork while the machine is busy, takes milliseconds.
const STEP_LIMIT: Duration = Duration::from_secs(10);
/// How long a warm interpreter may take to import its packages on a slow disk.
const WARM_LIMIT: Duration = Duration::from_secs(120);
/// How long the pool waits before it makes up for what was taken: whoever took it needs the processor more.
const COURTESY: Duration = Duration::from_millis(15);
/// How long the pool rests after a sandbox could not be made.
const REST: Duration = Duration::from_secs(1);

/// What the native backend needs to know.
#[derive(Debug, Clone)]
pub struct NativeSettings {
    /// The program to start as the jail's guardian: this server's own binary.
    pub guardian: PathBuf,
    pub runtime_dir: PathBuf,
    pub limits: SandboxLimits,
    /// The workspace and the other mounts, with their places inside.
    pub mounts: Vec<OperatorMount>,
    /// Variables that the operator gives to sessions.
    pub variables: Vec<(String, String)>,
    pub allow_missing: BTreeSet<LayerKind>,
    /// Whether the code of sessions may start programs. Work of the server's own always may.
    pub programs: Programs,
    /// Warm sessions kept ready.
    pub pool: usize,
    /// Empty sandboxes kept ready for when the warm ones are used up.
    pub empty: usize,
    /// Layers a test leaves out.
    pub leave_out: Vec<LeftOut>,
    /// Steps of the lock-down that a test leaves out.
    pub skipped_steps: Vec<String>,
}

/// The Python environment as the jail needs it.
pub struct WarmEnvironment {
    pub binds: Vec<Bind>,
    pub python: String,
    pub arguments: Vec<String>,
    /// The environment of the interpreter itself, the operator's variables not included.
    pub variables: Vec<(String, String)>,
    pub preload: Vec<String>,
    /// One session is wanted soon; nothing is done that pays off only with many.
    pub quick: bool,
    /// What sandboxes can reach; nothing without.
    pub network: Option<Network>,
    /// Whatever keeps the environment from being removed; held as long as the jail stands.
    pub held: Vec<Box<dyn Any + Send + Sync>>,
}

/// Sandboxes made of namespaces.
pub struct NativeBackend {
    inner: Arc<Inner>,
    /// Prepares, then keeps the pool full.
    background: Mutex<Option<JoinHandle<()>>>,
}

struct Inner {
    /// Itself, for sandboxes that need another one for a fork.
    this: Weak<Inner>,
    settings: NativeSettings,
    preparation: watch::Sender<Preparation>,
    jail: OnceLock<Jail>,
    pool: Pool,
}

impl NativeBackend {
    /// Starts to prepare in the background, and returns at once. `environment` does the first part and tells its steps on `preparation`.
    pub fn start<F>(settings: NativeSettings, preparation: watch::Sender<Preparation>, environment: F) -> NativeBackend
    where
        F: Future<Output = Result<WarmEnvironment, String>> + Send + 'static,
    {
        let inner = Arc::new_cyclic(|this| Inner {
            this: Weak::clone(this),
            settings,
            preparation,
            jail: OnceLock::new(),
            pool: Pool::default(),
        });
        let background = Arc::clone(&inner);
        let background = tokio::spawn(async move {
            let prepared = async {
                let environment = environment.await?;
                background.build(environment).await.map_err(|error| error.to_string())
            };
            match prepared.await {
                Ok(()) => {
                    background.preparation.send_replace(Preparation::Ready);
                    background.keep_pool_full().await;
                }
                Err(why) => {
                    warn!(%why, "the native backend is not ready");
                    background.preparation.send_replace(Preparation::Failed { why });
                }
            }
        });
        NativeBackend { inner, background: Mutex::new(Some(background)) }
    }
}

#[async_trait]
impl Backend for NativeBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.inner.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        self.inner.prepared().await?;
        let (sandbox, interpreter) = match self.inner.pool.take_warm() {
            Some(member) => member,
            None => self.inner.make(Fresh::AtOnce).await?,
        };
        Ok((Box::new(sandbox), interpreter))
    }

    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        if self.inner.settings.mounts.is_empty() && self.inner.settings.programs == Programs::Free {
            return self.launch().await;
        }
        self.inner.prepared().await?;
        let mut sandbox = self.inner.make_empty(Kin::Nobody { apart: true }).await?;
        let interpreter = sandbox.start_session(Fresh::AtOnce).await?;
        Ok((Box::new(sandbox), interpreter))
    }

    async fn shut_down(&self) {
        self.inner.pool.close();
        let background = self.background.lock().expect("no holder of the task panics").take();
        if let Some(background) = background {
            // A jail that was only half standing goes with the task that built it.
            background.abort();
            let _ = background.await;
        }
        if let Some(jail) = self.inner.jail.get() {
            jail.end().await;
        }
    }
}

impl Inner {
    async fn build(&self, environment: WarmEnvironment) -> Result<(), LaunchError> {
        self.tell("starting the sandbox");
        let jail = Jail::stand(&self.settings, environment).await?;
        let jail = self.jail.get_or_init(|| jail);
        self.tell("warming up Python");
        // The first sandbox is made while Python imports.
        let (warmed, empty) = tokio::join!(jail.warden.warm(WARM_LIMIT), self.make_empty(Kin::Nobody { apart: false }));
        warmed.map_err(|why| LaunchError::Start { why })?;
        self.pool.add_empty(empty?);
        let limits = jail.instance.tree().map_or("rlimits", cgroup::Tree::kind);
        info!(identity = ?jail.identity, limits, "the native backend is ready");
        Ok(())
    }

    /// Waits for the end of the preparation.
    async fn prepared(&self) -> Result<(), LaunchError> {
        let mut preparation = self.preparation.subscribe();
        let settled = preparation.wait_for(|state| !matches!(state, Preparation::Working { .. })).await;
        match settled.as_deref() {
            Ok(Preparation::Ready) => Ok(()),
            Ok(Preparation::Failed { why }) => Err(LaunchError::Preparation { why: why.clone() }),
            _ => Err(LaunchError::Preparation { why: "the server is ending".to_owned() }),
        }
    }

    fn tell(&self, step: &str) {
        self.preparation.send_replace(Preparation::Working { step: step.to_owned(), done: 0, total: None });
    }

    async fn keep_pool_full(&self) {
        while !self.pool.is_closed() {
            let made = match self.pool.lack(self.settings.pool, self.settings.empty) {
                Some(Lack::Warm) => self.make(Fresh::Primed).await.map(|member| self.pool.add_warm(member)),
                Some(Lack::Empty) => {
                    self.make_empty(Kin::Nobody { apart: false }).await.map(|sandbox| self.pool.add_empty(sandbox))
                }
                None => {
                    self.pool.taken().await;
                    tokio::time::sleep(COURTESY).await;
                    continue;
                }
            };
            if let Err(error) = made
                && !self.pool.is_closed()
            {
                warn!(%error, "no sandbox could be made for the pool");
                tokio::time::sleep(REST).await;
            }
        }
    }

    async fn make(&self, how: Fresh) -> Result<(NativeSandbox, Interpreter), LaunchError> {
        let mut sandbox = self.empty_sandbox().await?;
        let interpreter = sandbox.start_session(how).await?;
        Ok((sandbox, interpreter))
    }

    /// Takes an empty sandbox that waits, or makes one.
    async fn empty_sandbox(&self) -> Result<NativeSandbox, LaunchError> {
        match self.pool.take_empty() {
            Some(sandbox) => Ok(sandbox),
            None => self.make_empty(Kin::Nobody { apart: false }).await,
        }
    }

    async fn make_empty(&self, kin: Kin<'_>) -> Result<NativeSandbox, LaunchError> {
        let jail = self.jail.get().ok_or_else(|| LaunchError::Preparation { why: "it is not finished".to_owned() })?;
        let slot = jail
            .slots
            .take()
            .ok_or_else(|| LaunchError::Start { why: "all numbers for sandboxes are in use".to_owned() })?;
        NativeSandbox::prepare(jail, slot, &self.settings.limits, kin, Weak::clone(&self.this)).await
    }
}
