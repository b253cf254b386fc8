//! The native backend: sandboxes made of Linux namespaces, interpreters forked from a warm one.
//!
//! ```text
//! launch ── from the pool, or made now:  Prepare → cgroup → Proceed → Fork → cgroup → gate → hello → posture
//! ```
//!
//! `warden` speaks with the jail's processes, `instance` keeps what must be found again after a crash. This file puts sandboxes together and
//! checks each of them against the kernel before a session may use it.
//!
//! Nothing that ran a user's code returns to the pool, and a pool member that died is never handed out.

mod instance;
mod warden;

use std::any::Any;
use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_jail::cgroup::{self, Group};
use cellblock_jail::identity::{Identity, IdentityLease};
use cellblock_jail::posture::{Expected, Posture};
use cellblock_jail::wire::{
    Bind, Command, Generation, LeftOut, OperatorMount, ResourceLimit, Scratch, Setup, Slot, ZygoteCommand,
};
use cellblock_jail::{probe, root};
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use self::instance::Instance;
use self::warden::{Slots, View, Warden};
use super::{
    Backend, Exit, Interpreter, Isolation, LaunchError, Layer, LayerKind, MemoryUse, Preparation, Process, Sandbox,
    SandboxLimits,
};

/// How long any single step of a launch may take. The slowest, a fork while the machine is busy, takes milliseconds.
const STEP_LIMIT: Duration = Duration::from_secs(10);
/// How long a warm interpreter may take to import its packages on a slow disk.
const WARM_LIMIT: Duration = Duration::from_secs(120);
/// Forks after which the warm interpreter is replaced, so that address layout and hash seed change.
const FORKS_PER_ZYGOTE: u32 = 2_000;
/// Every session has two: the zygote's wide one and its own closing one.
const FILTERS: u32 = 2;
/// Descriptors a session may have open at once.
const OPEN_FILES: u64 = 4_096;

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
    /// Warm sessions kept ready.
    pub pool: usize,
    /// Layers a test leaves out.
    pub leave_out: Vec<LeftOut>,
}

/// The Python environment as the jail needs it.
pub struct WarmEnvironment {
    pub binds: Vec<Bind>,
    pub python: String,
    pub arguments: Vec<String>,
    /// The environment of the interpreter itself, the operator's variables not included.
    pub variables: Vec<(String, String)>,
    pub preload: Vec<String>,
    /// Whatever keeps the environment from being removed; held as long as the jail stands.
    pub held: Box<dyn Any + Send + Sync>,
}

/// Sandboxes made of namespaces.
pub struct NativeBackend {
    inner: Arc<Inner>,
}

struct Inner {
    settings: NativeSettings,
    preparation: watch::Sender<Preparation>,
    jail: OnceLock<Jail>,
    pool: Mutex<VecDeque<(NativeSandbox, Interpreter)>>,
    pool_changed: Notify,
    closing: watch::Sender<bool>,
}

/// What exists once the preparation is done.
struct Jail {
    warden: Arc<Warden>,
    slots: Slots,
    instance: Instance,
    identity: Identity,
    isolation: Isolation,
    /// The server's own posture: what a session must differ from.
    host: Posture,
    _lease: IdentityLease,
    _environment: Box<dyn Any + Send + Sync>,
}

impl Jail {
    /// Starts the jail's processes, all but the warm interpreter. Refuses when a layer is missing that must not be.
    async fn stand(settings: &NativeSettings, environment: WarmEnvironment) -> Result<Jail, LaunchError> {
        let failed =
            |attempt: &'static str| move |error: io::Error| LaunchError::Start { why: format!("{attempt}: {error}") };
        let instance =
            Instance::register(&settings.runtime_dir).map_err(failed("the runtime folder cannot be used"))?;
        let lease = IdentityLease::take(&settings.runtime_dir).map_err(failed("no user ids for sessions"))?;
        let identity = lease.identity;
        let (isolation, leave_out) = Jail::plan_isolation(settings, identity, instance.cgroup_failure());
        if let Some((kind, why)) = isolation.first_unallowed(&settings.allowed_to_be_missing()) {
            return Err(LaunchError::LayerMissing { kind, why: why.to_owned() });
        }
        let setup = Setup {
            identity,
            binds: environment.binds,
            mounts: settings.mounts.clone(),
            scratch: Scratch {
                bytes: settings.limits.disk,
                files: settings.limits.files,
                shared_memory: settings.limits.memory / 2,
            },
            zygote: ZygoteCommand {
                program: environment.python,
                arguments: environment.arguments,
                environment: environment.variables,
                preload: environment.preload,
                session_environment: settings.variables.clone(),
            },
            rlimits: settings.rlimits(instance.tree().is_some()),
            cgroups: instance.tree().map(cgroup::Tree::folders).unwrap_or_default(),
            leave_out,
        };
        let warden = Warden::start(&settings.guardian, &setup, instance.tree())
            .await
            .map_err(failed("the jail did not start"))?;
        warden.ready(STEP_LIMIT).await.map_err(|why| LaunchError::Start { why })?;
        let host = Posture::read(std::process::id()).map_err(failed("the kernel does not tell about processes"))?;
        Ok(Jail {
            warden: Arc::new(warden),
            slots: Slots::new(identity.slots()),
            instance,
            identity,
            isolation,
            host,
            _lease: lease,
            _environment: environment.held,
        })
    }

    /// Ends everything that lives in the jail, and removes its traces.
    async fn end(&self) {
        // With its lifeline cut, the guardian ends everything and removes the control groups.
        self.warden.end().await;
        self.instance.remove();
    }

    /// Finds out which layers this machine can enforce, and which must be left out.
    fn plan_isolation(
        settings: &NativeSettings,
        identity: Identity,
        no_cgroup: Option<&str>,
    ) -> (Isolation, Vec<LeftOut>) {
        let mut isolation = Isolation::default();
        let mut leave_out = settings.leave_out.clone();
        let enforced = |how: &str| Layer::Enforced { how: how.to_owned() };
        let namespaces = probe::user_namespaces();
        isolation.record(
            LayerKind::Namespaces,
            if namespaces.works {
                enforced("user, mount, pid, network, ipc, uts and cgroup namespaces")
            } else {
                Layer::Missing { why: with_cure(&namespaces) }
            },
        );
        isolation.record(
            LayerKind::Identity,
            match identity {
                Identity::Block { .. } => enforced("each session is a host user of its own"),
                Identity::Caller { .. } => Layer::Reduced {
                    how: "sessions run as the server's own unprivileged user".to_owned(),
                    why: "only a server started by root can give each session a user of its own".to_owned(),
                },
            },
        );
        isolation.record(LayerKind::Privileges, enforced("no capability, no_new_privs"));
        for (kind, left_out, finding, how) in [
            (LayerKind::SystemCalls, LeftOut::Seccomp, probe::seccomp(), "seccomp allowlist"),
            (LayerKind::Landlock, LeftOut::Landlock, probe::landlock(), "landlock"),
        ] {
            let layer = if leave_out.contains(&left_out) {
                Layer::Missing { why: "it was left out".to_owned() }
            } else if finding.works {
                enforced(how)
            } else {
                leave_out.push(left_out);
                Layer::Missing { why: with_cure(&finding) }
            };
            isolation.record(kind, layer);
        }
        isolation.record(LayerKind::Network, enforced("an empty network namespace"));
        isolation.record(
            LayerKind::Resources,
            match no_cgroup {
                None => enforced("control groups for memory, CPU time and processes"),
                Some(why) => Layer::Reduced {
                    how: "limits per process (rlimits) and fixed-size file systems".to_owned(),
                    why: why.to_owned(),
                },
            },
        );
        (isolation, leave_out)
    }
}

impl NativeSettings {
    /// The layers that may be missing: by the operator's leave, or left out by a test.
    fn allowed_to_be_missing(&self) -> BTreeSet<LayerKind> {
        let left_out = self.leave_out.iter().map(|left_out| match left_out {
            LeftOut::Seccomp => LayerKind::SystemCalls,
            LeftOut::Landlock => LayerKind::Landlock,
            LeftOut::ReadOnlyMounts => LayerKind::Namespaces,
        });
        self.allow_missing.iter().copied().chain(left_out).collect()
    }

    fn rlimits(&self, has_control_groups: bool) -> Vec<ResourceLimit> {
        use rustix::process::Resource;
        let limit = |resource: Resource, value: u64| ResourceLimit { resource: resource as u32, value };
        let mut limits = vec![
            // One, not zero: with zero the kernel still hands a crash to the host's handler when that is a program.
            limit(Resource::Core, 1),
            limit(Resource::Nofile, OPEN_FILES),
            limit(Resource::Fsize, self.limits.disk),
            limit(Resource::Nproc, u64::from(self.limits.processes)),
        ];
        if !has_control_groups {
            limits.push(limit(Resource::Data, self.limits.memory));
        }
        limits
    }
}

/// Makes one empty sandbox and takes it away again, to find out what this machine enforces. Missing layers are part of the answer.
pub async fn trial(mut settings: NativeSettings) -> Result<Isolation, LaunchError> {
    settings.allow_missing = LayerKind::ALL.into_iter().collect();
    // No interpreter is started, so none need exist.
    let nothing = WarmEnvironment {
        binds: Vec::new(),
        python: String::new(),
        arguments: Vec::new(),
        variables: Vec::new(),
        preload: Vec::new(),
        held: Box::new(()),
    };
    let jail = Jail::stand(&settings, nothing).await?;
    let slot = jail.slots.take().expect("a fresh jail has free slots");
    let tried = NativeSandbox::prepare(&jail, slot, &settings).await;
    let isolation = match tried {
        Ok(mut sandbox) => {
            sandbox.destroy().await;
            Ok(sandbox.isolation.clone())
        }
        Err(error) => Err(error),
    };
    jail.end().await;
    isolation
}

impl NativeBackend {
    /// Starts to prepare in the background, and returns at once. `environment` does the first part and tells its steps on `preparation`.
    pub fn start<F>(settings: NativeSettings, preparation: watch::Sender<Preparation>, environment: F) -> NativeBackend
    where
        F: Future<Output = Result<WarmEnvironment, String>> + Send + 'static,
    {
        let inner = Arc::new(Inner {
            settings,
            preparation,
            jail: OnceLock::new(),
            pool: Mutex::new(VecDeque::new()),
            pool_changed: Notify::new(),
            closing: watch::Sender::new(false),
        });
        let background = Arc::clone(&inner);
        tokio::spawn(async move {
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
        NativeBackend { inner }
    }
}

#[async_trait]
impl Backend for NativeBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.inner.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        self.inner.prepared().await?;
        if let Some((sandbox, interpreter)) = self.inner.take_from_pool() {
            return Ok((Box::new(sandbox), interpreter));
        }
        let (sandbox, interpreter) = self.inner.make(Prime::No).await?;
        Ok((Box::new(sandbox), interpreter))
    }

    async fn shut_down(&self) {
        self.inner.closing.send_replace(true);
        self.inner.pool.lock().expect("no holder of the pool panics").clear();
        if let Some(jail) = self.inner.jail.get() {
            jail.end().await;
        }
    }
}

/// Whether a fresh interpreter runs through its machinery once before it is handed out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Prime {
    Yes,
    No,
}

impl Inner {
    async fn build(&self, environment: WarmEnvironment) -> Result<(), LaunchError> {
        self.tell("starting the sandbox");
        let jail = Jail::stand(&self.settings, environment).await?;
        self.tell("warming up Python");
        jail.warden.warm(WARM_LIMIT).await.map_err(|why| LaunchError::Start { why })?;
        info!(identity = ?jail.identity, limits = jail.instance.tree().map_or("rlimits", cgroup::Tree::kind), "the native backend is ready");
        self.jail.set(jail).unwrap_or_else(|_| unreachable!("the backend is built once"));
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

    fn jail(&self) -> Result<&Jail, LaunchError> {
        self.jail.get().ok_or_else(|| LaunchError::Preparation { why: "it is not finished".to_owned() })
    }

    fn take_from_pool(&self) -> Option<(NativeSandbox, Interpreter)> {
        let member = loop {
            let (sandbox, interpreter) = self.pool.lock().expect("no holder of the pool panics").pop_front()?;
            if sandbox.is_alive() {
                break (sandbox, interpreter);
            }
        };
        self.pool_changed.notify_one();
        Some(member)
    }

    async fn keep_pool_full(&self) {
        let mut closing = self.closing.subscribe();
        loop {
            while self.pool.lock().expect("no holder of the pool panics").len() < self.settings.pool {
                if *closing.borrow() {
                    return;
                }
                match self.make(Prime::Yes).await {
                    Ok(member) => {
                        // Under the pool's lock, so that a member cannot slip in behind a shut-down.
                        let mut pool = self.pool.lock().expect("no holder of the pool panics");
                        if !*closing.borrow() {
                            pool.push_back(member);
                        }
                    }
                    Err(_) if *closing.borrow() => return,
                    Err(error) => {
                        warn!(%error, "no sandbox could be made for the pool");
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                }
            }
            tokio::select! {
                () = self.pool_changed.notified() => {}
                _ = closing.changed() => return,
            }
        }
    }

    async fn make(&self, prime: Prime) -> Result<(NativeSandbox, Interpreter), LaunchError> {
        let jail = self.jail()?;
        let slot = jail
            .slots
            .take()
            .ok_or_else(|| LaunchError::Start { why: "all user ids for sessions are in use".to_owned() })?;
        let mut sandbox = NativeSandbox::prepare(jail, slot, &self.settings).await?;
        let interpreter = sandbox.start_interpreter(prime).await?;
        Ok((sandbox, interpreter))
    }
}

fn with_cure(finding: &probe::Finding) -> String {
    match &finding.cure {
        Some(cure) => format!("{}; cure: {cure}", finding.what),
        None => finding.what.clone(),
    }
}

/// One sandbox: an init in its namespaces, a control group, and the interpreters forked into it one after another.
struct NativeSandbox {
    warden: Arc<Warden>,
    slots: Slots,
    slot: Slot,
    view: watch::Receiver<View>,
    group: Option<Arc<Group>>,
    generation: Generation,
    /// The number of the last sweep asked for, by the sandbox or by one of its interpreters.
    sweeps: Arc<AtomicU32>,
    /// The last interpreter, for as long as the kernel knows it.
    interpreter: Option<Arc<OwnedFd>>,
    expected: Expected,
    host: Posture,
    isolation: Isolation,
    memory_limit: u64,
    destroyed: bool,
}

impl NativeSandbox {
    async fn prepare(jail: &Jail, slot: Slot, settings: &NativeSettings) -> Result<NativeSandbox, LaunchError> {
        let view = jail.warden.watch(slot);
        let (uid, gid) = match jail.identity {
            Identity::Block { .. } => (jail.identity.on_host(slot), jail.identity.on_host(slot)),
            Identity::Caller { uid, gid } => (uid, gid),
        };
        let mut sandbox = NativeSandbox {
            warden: Arc::clone(&jail.warden),
            slots: jail.slots.clone(),
            slot,
            view,
            group: None,
            generation: Generation(0),
            sweeps: Arc::default(),
            interpreter: None,
            expected: Expected {
                host_uid: uid,
                host_gid: gid,
                groups_empty: matches!(jail.identity, Identity::Block { .. }),
                seccomp_filters: if settings.leave_out.contains(&LeftOut::Seccomp) { 0 } else { FILTERS },
            },
            host: jail.host.clone(),
            isolation: jail.isolation.clone(),
            memory_limit: settings.limits.memory,
            destroyed: false,
        };
        if let Some(tree) = jail.instance.tree() {
            let limits = cgroup::Limits {
                memory: settings.limits.memory,
                // Init counts too.
                processes: settings.limits.processes + 1,
                cpus: settings.limits.cpus,
            };
            let group = tree.group(&format!("session-{}", slot.0), Some(&limits));
            let group =
                group.map_err(|error| LaunchError::Start { why: format!("its limits could not be set: {error}") })?;
            sandbox.group = Some(Arc::new(group));
        }
        sandbox.warden.command(&Command::Prepare { slot }, &[]).await?;
        let init = sandbox.await_view(|view| view.init.clone()).await?;
        sandbox.confine(&init)?;
        sandbox.warden.command(&Command::Proceed { slot }, &[]).await?;
        sandbox.await_view(|view| view.prepared.then_some(())).await?;
        Ok(sandbox)
    }

    /// Waits until the warden has told what is asked for, or that it failed.
    async fn await_view<T>(&mut self, wanted: impl Fn(&View) -> Option<T>) -> Result<T, LaunchError> {
        let settled = self.view.wait_for(|view| view.failed.is_some() || view.destroyed || wanted(view).is_some());
        let view = match tokio::time::timeout(STEP_LIMIT, settled).await {
            Err(_) => return Err(LaunchError::TimedOut(STEP_LIMIT)),
            Ok(Err(_)) => return Err(LaunchError::Start { why: "the jail ended".to_owned() }),
            Ok(Ok(view)) => view,
        };
        match (wanted(&view), &view.failed) {
            (Some(found), _) => Ok(found),
            (None, Some(why)) => Err(LaunchError::Start { why: why.clone() }),
            (None, None) => Err(LaunchError::Start { why: "the sandbox ended while it was made".to_owned() }),
        }
    }

    /// Puts a process into the sandbox's control group.
    fn confine(&self, process: &OwnedFd) -> Result<(), LaunchError> {
        let Some(group) = &self.group else { return Ok(()) };
        let confined = warden::host_pid(process).and_then(|pid| group.add(pid));
        confined.map_err(|error| LaunchError::Start { why: format!("it could not be put under its limits: {error}") })
    }

    async fn start_interpreter(&mut self, prime: Prime) -> Result<Interpreter, LaunchError> {
        self.generation.0 += 1;
        let generation = self.generation;
        let (ours, theirs) =
            std::os::unix::net::UnixStream::pair().map_err(|error| LaunchError::Start { why: error.to_string() })?;
        let started = async {
            ours.set_nonblocking(true)?;
            UnixStream::from_std(ours)
        };
        let mut channel = started.await.map_err(|error: io::Error| LaunchError::Start { why: error.to_string() })?;
        let out_of_memory_before = self.group.as_ref().map_or(0, |group| group.out_of_memory_kills());
        self.warden.count_fork(FORKS_PER_ZYGOTE).await;
        self.warden.command(&Command::Fork { slot: self.slot, generation }, &[theirs.as_fd()]).await?;
        drop(theirs);
        let forked = self.await_view(|view| view.interpreter_of(generation)).await;
        if let Err(LaunchError::TimedOut(_)) = forked {
            self.warden.replace_zygote();
        }
        let process = forked?;
        self.interpreter = Some(Arc::clone(&process));
        self.confine(&process)?;
        let gate: &[u8] = if prime == Prime::Yes { b"p" } else { b"g" };
        channel.write_all(gate).await.map_err(|error| LaunchError::Start { why: error.to_string() })?;
        self.await_lock_down(&channel, generation).await?;
        self.verify(&process)?;
        let process = NativeProcess {
            warden: Arc::clone(&self.warden),
            slot: self.slot,
            generation,
            sweeps: Arc::clone(&self.sweeps),
            process,
            view: self.view.clone(),
            group: self.group.clone(),
            out_of_memory_before,
            memory_limit: self.memory_limit,
        };
        Ok(Interpreter { channel, process: Box::new(process) })
    }

    /// Waits for the first byte of the runner's `hello`, which it says when it is locked down.
    async fn await_lock_down(&mut self, channel: &UnixStream, generation: Generation) -> Result<(), LaunchError> {
        let mut byte = [0];
        let spoke = async {
            loop {
                channel.readable().await?;
                match rustix::net::recv(channel, &mut byte, rustix::net::RecvFlags::PEEK) {
                    Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) => return Ok(()),
                    Err(rustix::io::Errno::AGAIN) => {
                        // Lets the runtime know that the readiness was false.
                        let _ = channel
                            .try_io(tokio::io::Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
                    }
                    Err(error) => return Err(io::Error::from(error)),
                }
            }
        };
        match tokio::time::timeout(STEP_LIMIT, spoke).await {
            Ok(Ok(())) => Ok(()),
            Err(_) => Err(LaunchError::TimedOut(STEP_LIMIT)),
            Ok(Err(_)) => {
                let ended = self.await_view(|view| view.end_of(generation)).await;
                let words = ended.map(|(_, words)| words).unwrap_or_default();
                Err(LaunchError::Start { why: format!("the interpreter did not enter its sandbox: {words}") })
            }
        }
    }

    /// Compares what the kernel says about the interpreter with what must be true.
    fn verify(&self, process: &OwnedFd) -> Result<(), LaunchError> {
        let posture = warden::host_pid(process).and_then(Posture::read);
        let posture = posture
            .map_err(|error| LaunchError::Start { why: format!("its isolation could not be checked: {error}") })?;
        match posture.fault(&self.expected, &self.host) {
            None => Ok(()),
            Some(fault) => Err(LaunchError::Start { why: format!("its isolation is not as it must be: {fault}") }),
        }
    }

    fn is_alive(&self) -> bool {
        let view = self.view.borrow();
        !view.destroyed && view.end_of(self.generation).is_none()
    }
}

#[async_trait]
impl Sandbox for NativeSandbox {
    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn restart(&mut self) -> Result<Interpreter, LaunchError> {
        let number = next_number(&self.sweeps);
        self.warden.command(&Command::Sweep { slot: self.slot, number }, &[]).await?;
        // A sweep that is still on its way would end the new interpreter too.
        self.await_view(|view| (view.swept >= number).then_some(())).await?;
        self.start_interpreter(Prime::No).await
    }

    fn memory(&self) -> MemoryUse {
        match (&self.group, &self.interpreter) {
            (Some(group), _) => {
                let (now, peak) = group.memory();
                MemoryUse { now, peak }
            }
            (None, Some(process)) => warden::memory_of(process).unwrap_or_default(),
            (None, None) => MemoryUse::default(),
        }
    }

    fn forget_peak(&self) {
        if let Some(group) = &self.group {
            group.forget_peak();
        }
    }

    async fn destroy(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        if self.warden.command(&Command::Destroy { slot: self.slot }, &[]).await.is_ok() {
            let gone = self.view.wait_for(|view| view.destroyed);
            if tokio::time::timeout(STEP_LIMIT, gone).await.is_err() {
                warn!(slot = self.slot.0, "a sandbox did not end; its user id stays taken");
                return;
            }
        }
        if let Some(group) = &self.group {
            group.remove();
        }
        self.warden.forget(self.slot);
        self.slots.give_back(self.slot);
    }
}

impl Drop for NativeSandbox {
    fn drop(&mut self) {
        if self.destroyed {
            return;
        }
        self.destroyed = true;
        self.warden.abandon(self.slot, self.view.clone(), self.group.clone(), self.slots.clone());
    }
}

struct NativeProcess {
    warden: Arc<Warden>,
    slot: Slot,
    generation: Generation,
    sweeps: Arc<AtomicU32>,
    process: Arc<OwnedFd>,
    view: watch::Receiver<View>,
    group: Option<Arc<Group>>,
    out_of_memory_before: u64,
    memory_limit: u64,
}

#[async_trait]
impl Process for NativeProcess {
    fn interrupt(&self) {
        // A process that is gone is told by `exited`.
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::INT);
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
        self.warden.command_now(&Command::Sweep { slot: self.slot, number: next_number(&self.sweeps) });
    }

    async fn exited(&mut self) -> Exit {
        let generation = self.generation;
        let ended = self.view.wait_for(|view| view.destroyed || view.end_of(generation).is_some()).await;
        let Some((status, _)) = ended.ok().and_then(|view| view.end_of(generation)) else {
            return Exit::Unknown;
        };
        let status = std::os::unix::process::ExitStatusExt::from_raw(status);
        exit_of(status, || {
            let kills = self.group.as_ref().map_or(0, |group| group.out_of_memory_kills());
            (kills > self.out_of_memory_before).then_some(self.memory_limit)
        })
    }
}

fn next_number(last: &AtomicU32) -> u32 {
    last.fetch_add(1, Ordering::Relaxed) + 1
}

fn exit_of(status: std::process::ExitStatus, out_of_memory: impl Fn() -> Option<u64>) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) if signal == Signal::KILL.as_raw() => match out_of_memory() {
            Some(limit) => Exit::OutOfMemory { limit },
            None => Exit::Signal(signal),
        },
        (Some(signal), _) => Exit::Signal(signal),
        (None, Some(code)) => Exit::Code(code),
        (None, None) => Exit::Unknown,
    }
}

/// The working folder inside, for whoever describes a sandbox to a caller.
pub const WORK_FOLDER: &str = root::WORK;
