//! One container, and the sessions in it.
//!
//! A container is made for one session. Forks of that session run in it too, as members of its
//! family, because an interpreter cannot be copied into another container. The container is removed
//! with its last member.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tracing::warn;

use super::engine::Engine;
use super::facts::{self, Fate, Mark, Meter};
use super::line::{Fault, FaultKind, Line};
use super::porter::Porters;
use super::spec::{self, User};
use super::way_out::{ContainerNetwork, WayOut};
use crate::reaction::within;
use crate::sandbox::{
    Asker, Blocked, CheckpointError, CheckpointId, Exit, ForkTerms, Gauge, Interpreter, Isolation,
    LaunchError, Launcher, Layer, LayerKind, MemoryUse, Process, Program, ProgramError, Rules,
    Sandbox, SandboxLimits,
};

// These timeouts mean "it does not react": time in which the machine was busy does not count
// (`reaction`).

/// Timeout for the supervisor to carry out an order. The slowest, ending a fork bomb, takes three
/// seconds.
const ORDER_PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for an interpreter to end before its container is killed, with its whole family. The
/// supervisor needs milliseconds, or seconds on a busy machine.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for an interpreter to reach its branch point.
const BRANCH_PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for a removal by the engine.
pub(super) const REMOVAL_PATIENCE: Duration = Duration::from_secs(20);

/// Maximum delay of one stream of an interpreter relative to another: a few microseconds due to the
/// order in which the supervisor reads, or a round trip to the engine when a stream has used up its
/// credit.
const LARGEST_SKEW: Duration = Duration::from_secs(1);

/// The initial state of a session: a fresh interpreter and an empty folder. It needs no copy.
const BEGINNING: CheckpointId = CheckpointId(0);

/// How a fresh interpreter starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fresh {
    AtOnce,
    /// After a hidden rehearsal cell, when there is time for one.
    Primed,
    /// With its folder emptied.
    Emptied,
}

impl Fresh {
    fn gate(self) -> &'static str {
        match self {
            Fresh::AtOnce => "g",
            Fresh::Primed => "p",
            Fresh::Emptied => "e",
        }
    }
}

/// Properties shared by all containers of a backend.
#[derive(Clone)]
pub(super) struct House {
    pub(super) limits: SandboxLimits,
    pub(super) has_user_namespace: bool,
    /// A runtime other than that of ordinary containers, whose processes look different to the
    /// kernel.
    pub(super) runtime: Option<String>,
    /// The working folder is not a folder of the operator's.
    pub(super) owns_work_folder: bool,
    /// Destinations that sessions may reach; `None` for no network.
    pub(super) network: Option<ContainerNetwork>,
    /// Open the listeners of containers that the server may not enter.
    pub(super) porters: Arc<Porters>,
}

impl std::fmt::Debug for House {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The network settings hold secrets.
        formatter
            .debug_struct("House")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// A running container.
pub(super) struct Container {
    id: String,
    engine: Engine,
    line: Line,
    meter: Arc<Meter>,
    fate: watch::Receiver<Fate>,
    house: Arc<House>,
    isolation: Isolation,
    way_out: Option<WayOut>,
    members: AtomicU32,
    next_member: AtomicU32,
    removed: AtomicBool,
    maker: Arc<dyn Maker>,
}

/// Makes containers for sessions whose own is gone.
#[async_trait]
pub(super) trait Maker: Send + Sync {
    async fn another(&self) -> Result<(ContainerSandbox, Interpreter), LaunchError>;
}

/// The inputs for starting a container that the engine has created.
pub(super) struct Made<'a> {
    pub(super) engine: &'a Engine,
    pub(super) house: Arc<House>,
    pub(super) name: &'a str,
    pub(super) id: String,
    /// The request sent to the engine.
    pub(super) body: &'a ContainerCreateBody,
    pub(super) user: User,
    /// The first task of its warm process.
    pub(super) plan: &'a Value,
    pub(super) fate: watch::Receiver<Fate>,
    pub(super) maker: Arc<dyn Maker>,
}

impl Container {
    /// Starts and checks a container. The first session can be requested at once; it waits until
    /// Python is warm.
    pub(super) async fn start(made: Made<'_>) -> Result<Arc<Container>, LaunchError> {
        let Made {
            engine,
            house,
            name,
            id,
            body,
            user,
            plan,
            fate,
            maker,
        } = made;
        let failed = |why: String| LaunchError::Start { why };
        let begun = async {
            let attached = engine
                .attach(&id)
                .await
                .map_err(|error| failed(error.to_string()))?;
            // The plan is sent early and waits for the container: the engine reports the start only
            // later.
            let line = Line::open(attached, plan);
            engine
                .start(&id)
                .await
                .map_err(|error| failed(error.to_string()))?;
            let made = engine
                .inspect(&id)
                .await
                .map_err(|error| failed(with(error.to_string(), &line.complaints())))?;
            if let Some(what) = spec::verify(body, &made) {
                return Err(failed(format!(
                    "the engine made another container than it was asked for: {what}"
                )));
            }
            let named = engine
                .is_local()
                .then(|| made.state.as_ref().and_then(|state| state.pid))
                .flatten();
            let process = facts::local_process(&id, named).filter(|_| house.runtime.is_none());
            if let Some(what) =
                process.and_then(|process| facts::fault_of(process, user, house.has_user_namespace))
            {
                return Err(failed(format!(
                    "the container is not as it must be: {what}"
                )));
            }
            let way_out = match &house.network {
                Some(network) => Some(network.open(&id, named, &line, &house.porters).await?),
                None => None,
            };
            Ok((line, process, way_out))
        };
        match begun.await {
            Ok((line, process, way_out)) => {
                let meter = Arc::new(Meter::new(engine, &id, process, fate.clone()));
                let isolation = house.isolation(user, process.is_some());
                Ok(Arc::new(Container {
                    id,
                    engine: engine.clone(),
                    line,
                    meter,
                    fate,
                    house,
                    isolation,
                    way_out,
                    members: AtomicU32::new(0),
                    next_member: AtomicU32::new(1),
                    removed: AtomicBool::new(false),
                    maker,
                }))
            }
            Err(error) => {
                warn!(container = name, %error, "a container was not started");
                engine.remove(&id).await;
                Err(error)
            }
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.line.has_ended() && !self.fate.borrow().died
    }

    /// Returns whether the files of the working folder still exist. They are removed with the
    /// container, unless the folder is the operator's.
    fn has_files(&self) -> bool {
        self.is_alive() || !self.house.owns_work_folder
    }

    /// Returns the exit of a process killed because memory ran out. The kernel may have killed the
    /// first process too, and thereby the container.
    fn out_of_memory(&self) -> Exit {
        Exit::OutOfMemory {
            limit: self.house.limits.memory,
            files_kept: self.has_files(),
        }
    }

    /// Makes the first session in a new container.
    pub(super) async fn first_session(
        self: &Arc<Container>,
        how: Fresh,
        patience: Duration,
    ) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        self.members.fetch_add(1, Ordering::Relaxed);
        let mut sandbox = self.sandbox(self.isolation.clone(), None, spec::WORK);
        let begun = sandbox.begin(how);
        let interpreter = match within(patience, begun).await {
            Some(begun) => begun?,
            None => return Err(LaunchError::TimedOut(patience)),
        };
        if let Some(ready) = self.line.ready().await {
            sandbox
                .isolation
                .record(LayerKind::Landlock, landlock(ready.landlock));
        }
        Ok((sandbox, interpreter))
    }

    /// Makes the slot of one more session, which may be a fork of another.
    fn sandbox(
        self: &Arc<Container>,
        isolation: Isolation,
        source: Option<u32>,
        work: &str,
    ) -> ContainerSandbox {
        let member = self.next_member.fetch_add(1, Ordering::Relaxed);
        let has_its_own = source.is_some() && self.house.owns_work_folder;
        if let Some(way_out) = &self.way_out {
            way_out.join(member, source);
        }
        ContainerSandbox {
            container: self.clone(),
            member,
            work: if has_its_own {
                format!("{}/{member}", spec::FORKS)
            } else {
                work.to_owned()
            },
            isolation,
            checkpoints: Mutex::default(),
            next_checkpoint: 1,
            destroyed: false,
        }
    }

    /// Sends an order and waits for it, up to `ORDER_PATIENCE`.
    async fn order(&self, kind: u8, number: u32, order: Value) -> Result<(), String> {
        match within(ORDER_PATIENCE, self.line.ask(kind, number, order)).await {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(with(why, &self.line.complaints())),
            None => Err("the container does not answer".to_owned()),
        }
    }

    /// Makes an interpreter by an order.
    async fn interpreter(
        self: &Arc<Container>,
        kind: u8,
        member: u32,
        mut order: Value,
        beginning: Option<CheckpointId>,
        patience: Duration,
    ) -> Result<Interpreter, LaunchError> {
        let failed = |why: String| LaunchError::Start { why };
        let ends = self
            .line
            .interpreter()
            .map_err(|error| failed(error.to_string()))?;
        order["interpreter"] = json!(ends.number);
        let mark = self.meter.mark();
        let made = within(patience, self.line.ask(kind, member, order)).await;
        let made = made.unwrap_or_else(|| Err("the container does not answer".to_owned()));
        if let Err(why) = made {
            self.line.abandon(ends.number);
            return Err(failed(with(why, &self.line.complaints())));
        }
        let process = ContainerProcess {
            container: self.clone(),
            number: ends.number,
            exit: ends.exit,
            told: None,
            killed: Arc::default(),
            mark,
        };
        Ok(Interpreter {
            channel: ends.channel,
            skew: LARGEST_SKEW,
            process: Box::new(process),
            beginning,
            files_lost: false,
        })
    }

    /// Sets the container's memory limit to the sum of its members' limits, capped by the family's.
    async fn fit_memory(&self) {
        let limits = &self.house.limits;
        let members = u64::from(self.members.load(Ordering::Relaxed).max(1));
        let bytes = limits
            .memory
            .saturating_mul(members)
            .min(limits.family_memory.max(limits.memory));
        if self.removed.load(Ordering::Relaxed) {
            return;
        }
        // A failure is not fatal: the family has less memory than it may have, and is notified when
        // it runs out.
        if let Err(error) = self
            .engine
            .set_memory(&self.id, i64::try_from(bytes).unwrap_or(i64::MAX))
            .await
        {
            warn!(%error, "the memory of a container was not changed");
        }
    }

    /// Removes the container and waits until the engine no longer lists it. Removing twice is
    /// harmless.
    pub(super) async fn remove(&self) {
        self.meter.close();
        if self.removed.swap(true, Ordering::Relaxed) {
            return;
        }
        if tokio::time::timeout(REMOVAL_PATIENCE, self.engine.remove_wholly(&self.id))
            .await
            .is_err()
        {
            warn!("a container could not be removed");
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.meter.close();
        // Without a runtime the server has ended; the container ends with its standard input.
        if !self.removed.load(Ordering::Relaxed)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let (engine, id) = (self.engine.clone(), self.id.clone());
            runtime.spawn(async move { engine.remove(&id).await });
        }
    }
}

impl House {
    /// Returns the layers that separate the sessions of a container from the host, and how each was
    /// verified.
    fn isolation(&self, user: User, was_read: bool) -> Isolation {
        let vouched = if was_read {
            "read from the kernel"
        } else {
            "as the engine says"
        };
        let enforced = |how: String| Layer::Enforced { how };
        let runtime = self
            .runtime
            .as_deref()
            .unwrap_or("the engine's usual runtime");
        let mut isolation = Isolation::default();
        isolation.record(
            LayerKind::Namespaces,
            enforced(format!(
                "a container of its own ({runtime}, {vouched}); its forks share the container and \
                 are separate processes in it"
            )),
        );
        isolation.record(
            LayerKind::Identity,
            enforced(if self.has_user_namespace {
                "a user of the engine's user namespace".to_owned()
            } else {
                format!(
                    "the host user {}, who is in no other container; forks share it",
                    user.uid
                )
            }),
        );
        isolation.record(
            LayerKind::Privileges,
            enforced(format!("no capability, no_new_privs ({vouched})")),
        );
        isolation.record(
            LayerKind::SystemCalls,
            enforced(match &self.runtime {
                Some(runtime) => {
                    format!("the runtime {runtime}, with Cellblock's list for it to apply")
                }
                None => format!("Cellblock's list of system calls ({vouched})"),
            }),
        );
        isolation.record(LayerKind::Landlock, landlock(0));
        isolation.record(
            LayerKind::Network,
            enforced(match self.network {
                None => "no network but an empty loopback".to_owned(),
                Some(_) => {
                    "an empty network namespace, whose doors Cellblock answers; forks share them"
                        .to_owned()
                }
            }),
        );
        isolation.record(
            LayerKind::Resources,
            enforced(
                "control groups for memory, CPU time and processes, shared with its forks"
                    .to_owned(),
            ),
        );
        isolation
    }
}

/// Returns the layer for this version of landlock, which the supervisor reported before any user
/// code ran.
fn landlock(version: i64) -> Layer {
    let read_only = "a root file system that cannot be written to".to_owned();
    match version {
        6.. => Layer::Enforced {
            how: "landlock for files and signals, also between forks".to_owned(),
        },
        1..=5 => Layer::Enforced {
            how: "landlock for files".to_owned(),
        },
        _ => Layer::Reduced {
            how: read_only,
            why: "there is no landlock where the container runs".to_owned(),
        },
    }
}

fn with(why: String, complaints: &str) -> String {
    match complaints.lines().last() {
        Some(last) if !last.is_empty() => format!("{why} ({last})"),
        _ => why,
    }
}

/// The slot of one session in a container.
pub(super) struct ContainerSandbox {
    container: Arc<Container>,
    member: u32,
    /// Its working folder. The supervisor assigns that of a fork.
    work: String,
    isolation: Isolation,
    checkpoints: Mutex<HashSet<CheckpointId>>,
    next_checkpoint: u32,
    destroyed: bool,
}

/// Timeout for Python in a container to become warm.
const WARM_PATIENCE: Duration = Duration::from_secs(120);

impl ContainerSandbox {
    pub(super) fn is_alive(&self) -> bool {
        self.container.is_alive()
    }

    async fn begin(&mut self, how: Fresh) -> Result<Interpreter, LaunchError> {
        let order = json!({"gate": how.gate(), "work": spec::WORK});
        let beginning = self.container.house.owns_work_folder.then_some(BEGINNING);
        // Python may still be importing.
        self.container
            .interpreter(b'b', self.member, order, beginning, WARM_PATIENCE)
            .await
    }

    fn leave_network(&self) {
        if let Some(way_out) = &self.container.way_out {
            way_out.leave(self.member);
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, HashSet<CheckpointId>> {
        self.checkpoints
            .lock()
            .expect("nothing panics while it holds the checkpoints")
    }
}

#[async_trait]
impl Sandbox for ContainerSandbox {
    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn restart(&mut self) -> Result<Interpreter, LaunchError> {
        if self.is_alive() {
            match self.begin(Fresh::AtOnce).await {
                // The old interpreter could not be ended, so the container was killed.
                Err(_) if !self.is_alive() => {}
                begun => return begun,
            }
        }
        // The container and its files are gone; nothing can be kept.
        let (successor, interpreter) = self.container.maker.another().await?;
        *self = successor;
        Ok(Interpreter {
            files_lost: self.container.house.owns_work_folder,
            ..interpreter
        })
    }

    fn memory(&self) -> MemoryUse {
        self.container.meter.use_of_memory()
    }

    fn forget_peak(&self) {
        self.container.meter.forget_peak();
    }

    fn gauge(&self) -> Arc<dyn Gauge> {
        self.container.meter.clone()
    }

    async fn checkpoint(
        &mut self,
        told: oneshot::Sender<()>,
    ) -> Result<CheckpointId, CheckpointError> {
        let checkpoint = CheckpointId(self.next_checkpoint);
        self.next_checkpoint += 1;
        let given_up = GiveUp {
            container: self.container.clone(),
            member: self.member,
            checkpoint,
            done: false,
        };
        // The stream preserves order, so the supervisor expects the copy before the interpreter is
        // asked for it.
        let made = self
            .container
            .line
            .ask(b'c', self.member, json!({"checkpoint": checkpoint.0}));
        match within(BRANCH_PATIENCE, begun_then(made, told)).await {
            Some(Ok(())) => {
                let mut given_up = given_up;
                given_up.done = true;
                self.kept().insert(checkpoint);
                Ok(checkpoint)
            }
            Some(Err(why)) => Err(CheckpointError::Failed { why }),
            None => Err(CheckpointError::Failed {
                why: "the session did not come to its branch point".to_owned(),
            }),
        }
    }

    async fn restore(&mut self, checkpoint: CheckpointId) -> Result<Interpreter, LaunchError> {
        if checkpoint == BEGINNING
            && self.container.house.owns_work_folder
            && !self.kept().contains(&checkpoint)
        {
            return self.begin(Fresh::Emptied).await;
        }
        let order = json!({"checkpoint": checkpoint.0});
        self.container
            .interpreter(b'u', self.member, order, None, ORDER_PATIENCE)
            .await
    }

    async fn fork(
        &self,
        checkpoint: CheckpointId,
        _terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let container = &self.container;
        container.members.fetch_add(1, Ordering::Relaxed);
        let fork = container.sandbox(self.isolation.clone(), Some(self.member), &self.work);
        container.fit_memory().await;
        let order = json!({
            "of": self.member,
            "checkpoint": checkpoint.0,
            "folder": container.house.owns_work_folder,
        });
        let made = container
            .interpreter(b'f', fork.member, order, None, ORDER_PATIENCE)
            .await;
        Ok((Box::new(fork), made?))
    }

    fn has(&self, checkpoint: CheckpointId) -> bool {
        let is_there = self.kept().contains(&checkpoint)
            && !self.container.line.has_lost(self.member, checkpoint.0);
        self.container.is_alive() && (is_there || checkpoint == BEGINNING)
    }

    fn forget(&self, checkpoint: CheckpointId) {
        if self.kept().remove(&checkpoint) {
            forget(&self.container, self.member, checkpoint);
        }
    }

    fn work_folder(&self) -> &str {
        &self.work
    }

    fn rules(&self) -> Rules {
        self.container
            .way_out
            .as_ref()
            .map_or_else(Rules::none, |way_out| way_out.rules(self.member))
    }

    fn set_rules(&self, rules: Rules) {
        if let Some(way_out) = &self.container.way_out {
            way_out.set_rules(self.member, rules);
        }
    }

    fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        if let Some(way_out) = &self.container.way_out {
            way_out.set_asker(self.member, asker);
        }
    }

    fn take_blocked(&self) -> Vec<Blocked> {
        self.container
            .way_out
            .as_ref()
            .map_or_else(Vec::new, |way_out| way_out.take_blocked(self.member))
    }

    fn launcher(&self) -> Arc<dyn Launcher> {
        Arc::new(ContainerLauncher {
            container: self.container.clone(),
            member: self.member,
        })
    }

    async fn destroy(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        self.leave_network();
        if self.container.members.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.container.remove().await;
            return;
        }
        match self.container.order(b'x', self.member, json!({})).await {
            Ok(()) => self.container.fit_memory().await,
            // The rest of the family cannot be served any more either.
            Err(_) => self.container.engine.kill(&self.container.id).await,
        }
    }
}

impl Drop for ContainerSandbox {
    fn drop(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        self.leave_network();
        if self.container.members.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.container
                .line
                .say(b'x', self.member, json!({"ask": 0}).to_string().as_bytes());
        }
        // The container itself is removed with its last owner.
    }
}

/// Starts programs beside one session, through the supervisor.
struct ContainerLauncher {
    container: Arc<Container>,
    member: u32,
}

#[async_trait]
impl Launcher for ContainerLauncher {
    async fn launch(&self, program: Program) -> Result<Box<dyn Process>, ProgramError> {
        let Program {
            words,
            folder,
            environment,
            input,
            output,
            errors,
        } = program;
        let line = &self.container.line;
        let failed = |why: &str| ProgramError::Failed {
            why: why.to_owned(),
        };
        let outlets = line
            .outlets(&output, &errors)
            .ok_or_else(|| failed("its pipes are not those of the session"))?;
        let mark = self.container.meter.mark();
        let (number, exit) = line.program();
        // From here on, dropping this value ends the program, also when the caller is cancelled.
        let process = ContainerProgram {
            container: self.container.clone(),
            number,
            exit,
            mark,
        };
        if let Some(input) = &input {
            line.feed(number, input).await;
        }
        let order = json!({
            "program": number,
            "outlets": outlets,
            "words": words,
            "folder": folder,
            "environment": environment,
            "input": input.map(|input| input.len()),
        });
        match within(ORDER_PATIENCE, line.carry_out(b'g', self.member, order)).await {
            Some(Ok(_)) => Ok(Box::new(process)),
            Some(Err(Fault { why, kind })) => Err(match kind {
                FaultKind::Missing => ProgramError::Missing,
                FaultKind::Refused => ProgramError::Refused { why },
                FaultKind::Unsupported => ProgramError::Unsupported { why },
                FaultKind::Other => ProgramError::Failed { why },
            }),
            None => Err(failed("the container does not answer")),
        }
    }
}

/// A program started by the supervisor. Dropping it ends it with its process group.
struct ContainerProgram {
    container: Arc<Container>,
    number: u32,
    exit: watch::Receiver<Option<Exit>>,
    mark: Mark,
}

#[async_trait]
impl Process for ContainerProgram {
    fn interrupt(&self) {
        self.container.line.say(b'i', self.number, b"");
    }

    fn kill(&self) {
        self.container.line.say(b'k', self.number, b"");
    }

    async fn exited(&mut self) -> Exit {
        let exit = match self.exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            Err(_) => Exit::Unknown,
        };
        let may_be_memory = matches!(exit, Exit::Signal(9) | Exit::Unknown);
        if may_be_memory && self.container.meter.ran_out_since(self.mark).await {
            return self.container.out_of_memory();
        }
        exit
    }
}

impl Drop for ContainerProgram {
    fn drop(&mut self) {
        if self.exit.borrow().is_none() {
            self.kill();
        }
        self.container.line.abandon_program(self.number);
    }
}

/// Starts to wait, then signals that it does.
async fn begun_then<T>(work: impl Future<Output = T>, told: oneshot::Sender<()>) -> T {
    let mut work = std::pin::pin!(work);
    let mut told = Some(told);
    std::future::poll_fn(move |context| {
        let polled = work.as_mut().poll(context);
        if let Some(told) = told.take() {
            // The receiver is gone if the attempt was abandoned.
            let _ = told.send(());
        }
        polled
    })
    .await
}

fn forget(container: &Container, member: u32, checkpoint: CheckpointId) {
    let order = json!({"ask": 0, "checkpoint": checkpoint.0});
    container
        .line
        .say(b'o', member, order.to_string().as_bytes());
}

/// Discards an abandoned checkpoint, also if it was made after all.
struct GiveUp {
    container: Arc<Container>,
    member: u32,
    checkpoint: CheckpointId,
    done: bool,
}

impl Drop for GiveUp {
    fn drop(&mut self) {
        if !self.done {
            forget(&self.container, self.member, self.checkpoint);
        }
    }
}

/// An interpreter in a container.
struct ContainerProcess {
    container: Arc<Container>,
    number: u32,
    exit: watch::Receiver<Option<Exit>>,
    told: Option<Exit>,
    killed: Arc<AtomicBool>,
    mark: Mark,
}

impl ContainerProcess {
    /// Determines the exit of an interpreter from the data of the kernel and the engine.
    async fn judge(&self, exit: Exit) -> Exit {
        let may_be_memory =
            matches!(exit, Exit::Signal(9) | Exit::Unknown) && !self.killed.load(Ordering::Relaxed);
        if may_be_memory && self.container.meter.ran_out_since(self.mark).await {
            return self.container.out_of_memory();
        }
        match exit {
            Exit::Unknown if self.killed.load(Ordering::Relaxed) => Exit::Signal(9),
            // The container was ended from outside, or the engine, which carries the stream, is
            // gone.
            Exit::Unknown if !self.container.is_alive() => Exit::SandboxGone {
                files_kept: self.container.has_files(),
            },
            other => other,
        }
    }
}

#[async_trait]
impl Process for ContainerProcess {
    fn interrupt(&self) {
        self.container.line.say(b'i', self.number, b"");
    }

    fn kill(&self) {
        self.killed.store(true, Ordering::Relaxed);
        self.container.line.say(b'k', self.number, b"");
        let (engine, id, mut exit) = (
            self.container.engine.clone(),
            self.container.id.clone(),
            self.exit.clone(),
        );
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if within(KILL_PATIENCE, exit.wait_for(Option::is_some))
                    .await
                    .is_none()
                {
                    engine.kill(&id).await;
                }
            });
        }
    }

    async fn exited(&mut self) -> Exit {
        if let Some(exit) = self.told {
            return exit;
        }
        let exit = match self.exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            Err(_) => Exit::Unknown,
        };
        let exit = self.judge(exit).await;
        self.told = Some(exit);
        exit
    }
}
