//! One container, and the sessions in it.
//!
//! A container is made for one session. Forks of that session run in it too, each in a slot of its
//! own, because an interpreter cannot be copied into another container. The container is removed
//! with its last session.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bollard::models::ContainerCreateBody;
use serde_json::Value;
use tokio::sync::{oneshot, watch};
use tracing::warn;

use super::egress::{ContainerEgress, ContainerNetwork};
use super::engine::Engine;
use super::facts::{self, ContainerFate, ContainerMeter, OutOfMemoryMark};
use super::messages::{FailureKind, FreshStart, HostMessage, SlotRequest};
use super::mux_connection::{Endpoints, MuxConnection, RequestFailure};
use super::netns_helper::NetnsHelpers;
use super::spec::{self, User};
use crate::reaction::within;
use crate::sandbox::{
    Asker, Blocked, CheckpointError, CheckpointId, Exit, ForkTerms, Gauge, Interpreter, Isolation,
    LaunchError, Launcher, LayerKind, LayerState, MemoryUse, Process, ProgramError, ProgramSpec,
    Rules, Sandbox, SandboxLimits,
};

// These timeouts mean "it does not react": time in which the machine was busy does not count
// (`reaction`).

/// Timeout for the supervisor to carry out a request. The slowest, ending a fork bomb, takes three
/// seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for an interpreter to end before its container is killed, with all its sessions. The
/// supervisor needs milliseconds, or seconds on a busy machine.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for an interpreter to reach its branch point.
const BRANCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for a removal by the engine.
pub(super) const REMOVAL_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum delay of one stream of an interpreter relative to another: a few microseconds due to the
/// order in which the supervisor reads, or a round trip to the engine when a stream has used up its
/// credit.
const MAX_SKEW: Duration = Duration::from_secs(1);

/// The initial state of a session: a fresh interpreter and an empty folder. It needs no copy.
const INITIAL_STATE: CheckpointId = CheckpointId(0);

/// Properties shared by all containers of a backend.
#[derive(Clone)]
pub(super) struct ContainerContext {
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
    pub(super) netns_helpers: Arc<NetnsHelpers>,
}

impl std::fmt::Debug for ContainerContext {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The network settings hold secrets.
        formatter
            .debug_struct("ContainerContext")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// A running container.
pub(super) struct Container {
    id: String,
    engine: Engine,
    connection: MuxConnection,
    meter: Arc<ContainerMeter>,
    fate: watch::Receiver<ContainerFate>,
    context: Arc<ContainerContext>,
    isolation: Isolation,
    egress: Option<ContainerEgress>,
    /// The number of sessions in it.
    sessions: AtomicU32,
    next_slot: AtomicU32,
    removed: AtomicBool,
    maker: Arc<dyn ContainerMaker>,
}

/// Makes containers for sessions whose own is gone.
#[async_trait]
pub(super) trait ContainerMaker: Send + Sync {
    async fn replacement(&self) -> Result<(ContainerSandbox, Interpreter), LaunchError>;
}

/// The inputs for starting a container that the engine has created.
pub(super) struct CreatedContainer<'a> {
    pub(super) engine: &'a Engine,
    pub(super) context: Arc<ContainerContext>,
    pub(super) name: &'a str,
    pub(super) id: String,
    /// The request sent to the engine.
    pub(super) body: &'a ContainerCreateBody,
    pub(super) user: User,
    /// The first task of its warm process.
    pub(super) plan: &'a Value,
    pub(super) fate: watch::Receiver<ContainerFate>,
    pub(super) maker: Arc<dyn ContainerMaker>,
}

impl Container {
    /// Starts and checks a container. The first session can be requested at once; it waits until
    /// Python is warm.
    pub(super) async fn start(
        created: CreatedContainer<'_>,
    ) -> Result<Arc<Container>, LaunchError> {
        let CreatedContainer {
            engine,
            context,
            name,
            id,
            body,
            user,
            plan,
            fate,
            maker,
        } = created;
        let failed = |why: String| LaunchError::Start { why };
        let starting = async {
            let attached = engine
                .attach(&id)
                .await
                .map_err(|error| failed(error.to_string()))?;
            // The plan is sent early and waits for the container: the engine reports the start only
            // later.
            let connection = MuxConnection::open(attached, plan);
            engine
                .start(&id)
                .await
                .map_err(|error| failed(error.to_string()))?;
            let made = engine
                .inspect(&id)
                .await
                .map_err(|error| failed(with(error.to_string(), &connection.error_output())))?;
            if let Some(what) = spec::verify(body, &made) {
                return Err(failed(format!(
                    "the engine made another container than it was asked for: {what}"
                )));
            }
            let named = engine
                .is_local()
                .then(|| made.state.as_ref().and_then(|state| state.pid))
                .flatten();
            let process = facts::local_process(&id, named).filter(|_| context.runtime.is_none());
            if let Some(what) = process
                .and_then(|process| facts::fault_of(process, user, context.has_user_namespace))
            {
                return Err(failed(format!(
                    "the container is not as it must be: {what}"
                )));
            }
            let egress = match &context.network {
                Some(network) => Some(
                    network
                        .open(&id, named, &connection, &context.netns_helpers)
                        .await?,
                ),
                None => None,
            };
            Ok((connection, process, egress))
        };
        match starting.await {
            Ok((connection, process, egress)) => {
                let meter = Arc::new(ContainerMeter::new(engine, &id, process, fate.clone()));
                let isolation = context.isolation(user, process.is_some());
                Ok(Arc::new(Container {
                    id,
                    engine: engine.clone(),
                    connection,
                    meter,
                    fate,
                    context,
                    isolation,
                    egress,
                    sessions: AtomicU32::new(0),
                    next_slot: AtomicU32::new(1),
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
        !self.connection.has_ended() && !self.fate.borrow().died
    }

    /// Returns whether the files of the working folder still exist. They are removed with the
    /// container, unless the folder is the operator's.
    fn has_files(&self) -> bool {
        self.is_alive() || !self.context.owns_work_folder
    }

    /// Returns the exit of a process killed because memory ran out. The kernel may have killed the
    /// first process too, and thereby the container.
    fn out_of_memory(&self) -> Exit {
        Exit::OutOfMemory {
            limit: self.context.limits.memory,
            files_kept: self.has_files(),
        }
    }

    /// Makes the first session in a new container.
    pub(super) async fn first_session(
        self: &Arc<Container>,
        mode: FreshStart,
        timeout: Duration,
    ) -> Result<(ContainerSandbox, Interpreter), LaunchError> {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let mut sandbox = self.sandbox(self.isolation.clone(), None, spec::WORK);
        let starting = sandbox.start(mode);
        let interpreter = match within(timeout, starting).await {
            Some(started) => started?,
            None => return Err(LaunchError::TimedOut(timeout)),
        };
        if let Some(ready) = self.connection.ready().await {
            sandbox
                .isolation
                .record(LayerKind::Landlock, landlock(ready.landlock));
        }
        Ok((sandbox, interpreter))
    }

    /// Reserves the slot of one more session, which may be a fork of another.
    fn sandbox(
        self: &Arc<Container>,
        isolation: Isolation,
        source: Option<u32>,
        work: &str,
    ) -> ContainerSandbox {
        let slot = self.next_slot.fetch_add(1, Ordering::Relaxed);
        let has_its_own = source.is_some() && self.context.owns_work_folder;
        if let Some(egress) = &self.egress {
            egress.join(slot, source);
        }
        ContainerSandbox {
            container: self.clone(),
            slot,
            work: if has_its_own {
                format!("{}/{slot}", spec::FORKS)
            } else {
                work.to_owned()
            },
            isolation,
            checkpoints: Mutex::default(),
            next_checkpoint: 1,
            destroyed: false,
        }
    }

    /// Sends a request and waits until it is carried out, up to `REQUEST_TIMEOUT`.
    async fn request(&self, request: SlotRequest) -> Result<(), String> {
        match within(REQUEST_TIMEOUT, self.connection.request(request)).await {
            Some(Ok(())) => Ok(()),
            Some(Err(why)) => Err(with(why, &self.connection.error_output())),
            None => Err("the container does not answer".to_owned()),
        }
    }

    /// Makes an interpreter by the request for its number.
    async fn interpreter(
        self: &Arc<Container>,
        request: impl FnOnce(u32) -> SlotRequest,
        beginning: Option<CheckpointId>,
        timeout: Duration,
    ) -> Result<Interpreter, LaunchError> {
        let failed = |why: String| LaunchError::Start { why };
        let Endpoints {
            number,
            channel,
            exit,
        } = self
            .connection
            .interpreter()
            .map_err(|error| failed(error.to_string()))?;
        let mark = self.meter.mark();
        let made = within(timeout, self.connection.request(request(number))).await;
        let made = made.unwrap_or_else(|| Err("the container does not answer".to_owned()));
        if let Err(why) = made {
            self.connection.abandon(number);
            return Err(failed(with(why, &self.connection.error_output())));
        }
        let process = ContainerProcess {
            container: self.clone(),
            number,
            exit,
            reported: None,
            killed: Arc::default(),
            mark,
        };
        Ok(Interpreter {
            channel,
            skew: MAX_SKEW,
            process: Box::new(process),
            beginning,
            files_lost: false,
        })
    }

    /// Sets the container's memory limit to the sum of its sessions' limits, capped by the limit
    /// for all of them together.
    async fn fit_memory(&self) {
        let limits = &self.context.limits;
        let sessions = u64::from(self.sessions.load(Ordering::Relaxed).max(1));
        let bytes = limits
            .memory
            .saturating_mul(sessions)
            .min(limits.family_memory.max(limits.memory));
        if self.removed.load(Ordering::Relaxed) {
            return;
        }
        // A failure is not fatal: the sessions have less memory than they may have, and are told
        // when it runs out.
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
        if tokio::time::timeout(REMOVAL_TIMEOUT, self.engine.remove_wholly(&self.id))
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

impl ContainerContext {
    /// Returns the layers that separate the sessions of a container from the host, and how each was
    /// verified.
    fn isolation(&self, user: User, was_read: bool) -> Isolation {
        let vouched = if was_read {
            "read from the kernel"
        } else {
            "as the engine says"
        };
        let enforced = |how: String| LayerState::Enforced { how };
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
                    "an empty network namespace, whose listeners Cellblock answers; forks share \
                     them"
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
fn landlock(version: i64) -> LayerState {
    let read_only = "a root file system that cannot be written to".to_owned();
    match version {
        6.. => LayerState::Enforced {
            how: "landlock for files and signals, also between forks".to_owned(),
        },
        1..=5 => LayerState::Enforced {
            how: "landlock for files".to_owned(),
        },
        _ => LayerState::Reduced {
            how: read_only,
            why: "there is no landlock where the container runs".to_owned(),
        },
    }
}

fn with(why: String, error_output: &str) -> String {
    match error_output.lines().last() {
        Some(last) if !last.is_empty() => format!("{why} ({last})"),
        _ => why,
    }
}

/// The slot of one session in a container.
pub(super) struct ContainerSandbox {
    container: Arc<Container>,
    slot: u32,
    /// Its working folder. The supervisor assigns that of a fork.
    work: String,
    isolation: Isolation,
    checkpoints: Mutex<HashSet<CheckpointId>>,
    next_checkpoint: u32,
    destroyed: bool,
}

/// Timeout for Python in a container to become warm.
const WARM_TIMEOUT: Duration = Duration::from_secs(120);

impl ContainerSandbox {
    pub(super) fn is_alive(&self) -> bool {
        self.container.is_alive()
    }

    async fn start(&mut self, mode: FreshStart) -> Result<Interpreter, LaunchError> {
        let slot = self.slot;
        let request = |interpreter| SlotRequest::Start {
            slot,
            interpreter,
            mode,
            work: spec::WORK.to_owned(),
        };
        let beginning = self
            .container
            .context
            .owns_work_folder
            .then_some(INITIAL_STATE);
        // Python may still be importing.
        self.container
            .interpreter(request, beginning, WARM_TIMEOUT)
            .await
    }

    fn leave_network(&self) {
        if let Some(egress) = &self.container.egress {
            egress.leave(self.slot);
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
            match self.start(FreshStart::Immediate).await {
                // The old interpreter could not be ended, so the container was killed.
                Err(_) if !self.is_alive() => {}
                started => return started,
            }
        }
        // The container and its files are gone; nothing can be kept.
        let (successor, interpreter) = self.container.maker.replacement().await?;
        *self = successor;
        Ok(Interpreter {
            files_lost: self.container.context.owns_work_folder,
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
        let abandoned = AbandonedCheckpoint {
            container: self.container.clone(),
            slot: self.slot,
            checkpoint,
            done: false,
        };
        // The stream preserves order, so the supervisor expects the copy before the interpreter is
        // asked for it.
        let made = self
            .container
            .connection
            .request(SlotRequest::ExpectCheckpoint {
                slot: self.slot,
                checkpoint: checkpoint.0,
            });
        match within(BRANCH_TIMEOUT, begun_then(made, told)).await {
            Some(Ok(())) => {
                let mut abandoned = abandoned;
                abandoned.done = true;
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
        if checkpoint == INITIAL_STATE
            && self.container.context.owns_work_folder
            && !self.kept().contains(&checkpoint)
        {
            return self.start(FreshStart::Emptied).await;
        }
        let slot = self.slot;
        let request = |interpreter| SlotRequest::Restore {
            slot,
            interpreter,
            checkpoint: checkpoint.0,
        };
        self.container
            .interpreter(request, None, REQUEST_TIMEOUT)
            .await
    }

    async fn fork(
        &self,
        checkpoint: CheckpointId,
        _terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let container = &self.container;
        container.sessions.fetch_add(1, Ordering::Relaxed);
        let fork = container.sandbox(self.isolation.clone(), Some(self.slot), &self.work);
        container.fit_memory().await;
        let request = |interpreter| SlotRequest::Fork {
            slot: fork.slot,
            interpreter,
            source: self.slot,
            checkpoint: checkpoint.0,
            own_folder: container.context.owns_work_folder,
        };
        let made = container.interpreter(request, None, REQUEST_TIMEOUT).await;
        Ok((Box::new(fork), made?))
    }

    fn has(&self, checkpoint: CheckpointId) -> bool {
        let is_there = self.kept().contains(&checkpoint)
            && !self.container.connection.has_lost(self.slot, checkpoint.0);
        self.container.is_alive() && (is_there || checkpoint == INITIAL_STATE)
    }

    fn forget(&self, checkpoint: CheckpointId) {
        if self.kept().remove(&checkpoint) {
            forget(&self.container, self.slot, checkpoint);
        }
    }

    fn work_folder(&self) -> &str {
        &self.work
    }

    fn rules(&self) -> Rules {
        self.container
            .egress
            .as_ref()
            .map_or_else(Rules::none, |egress| egress.rules(self.slot))
    }

    fn set_rules(&self, rules: Rules) {
        if let Some(egress) = &self.container.egress {
            egress.set_rules(self.slot, rules);
        }
    }

    fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        if let Some(egress) = &self.container.egress {
            egress.set_asker(self.slot, asker);
        }
    }

    fn take_blocked(&self) -> Vec<Blocked> {
        self.container
            .egress
            .as_ref()
            .map_or_else(Vec::new, |egress| egress.take_blocked(self.slot))
    }

    fn launcher(&self) -> Arc<dyn Launcher> {
        Arc::new(ContainerLauncher {
            container: self.container.clone(),
            slot: self.slot,
        })
    }

    async fn destroy(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        self.leave_network();
        if self.container.sessions.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.container.remove().await;
            return;
        }
        let request = SlotRequest::EndSlot { slot: self.slot };
        match self.container.request(request).await {
            Ok(()) => self.container.fit_memory().await,
            // The other sessions cannot be served any more either.
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
        if self.container.sessions.fetch_sub(1, Ordering::Relaxed) > 1 {
            self.container
                .connection
                .send_request(SlotRequest::EndSlot { slot: self.slot });
        }
        // The container itself is removed with its last owner.
    }
}

/// Starts programs beside one session, through the supervisor.
struct ContainerLauncher {
    container: Arc<Container>,
    slot: u32,
}

#[async_trait]
impl Launcher for ContainerLauncher {
    async fn launch(&self, program: ProgramSpec) -> Result<Box<dyn Process>, ProgramError> {
        let ProgramSpec {
            words,
            folder,
            environment,
            input,
            output,
            errors,
        } = program;
        let connection = &self.container.connection;
        let failed = |why: &str| ProgramError::Failed {
            why: why.to_owned(),
        };
        let pipes = connection
            .program_pipes(&output, &errors)
            .ok_or_else(|| failed("its pipes are not those of the session"))?;
        let mark = self.container.meter.mark();
        let (number, exit) = connection.program();
        // From here on, dropping this value ends the program, also when the caller is cancelled.
        let process = ContainerProgram {
            container: self.container.clone(),
            number,
            exit,
            mark,
        };
        if let Some(input) = &input {
            connection.feed(number, input).await;
        }
        let request = SlotRequest::Launch {
            slot: self.slot,
            program: number,
            pipes,
            words,
            folder,
            environment,
            input: input.map(|input| input.len()),
        };
        match within(REQUEST_TIMEOUT, connection.ask(request)).await {
            Some(Ok(_)) => Ok(Box::new(process)),
            Some(Err(RequestFailure { why, kind })) => Err(match kind {
                FailureKind::Missing => ProgramError::Missing,
                FailureKind::Refused => ProgramError::Refused { why },
                FailureKind::Unsupported => ProgramError::Unsupported { why },
                FailureKind::Other => ProgramError::Failed { why },
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
    mark: OutOfMemoryMark,
}

#[async_trait]
impl Process for ContainerProgram {
    fn interrupt(&self) {
        self.container.connection.send(&HostMessage::Interrupt {
            process: self.number,
        });
    }

    fn kill(&self) {
        self.container.connection.send(&HostMessage::Kill {
            process: self.number,
        });
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
        self.container.connection.abandon_program(self.number);
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

fn forget(container: &Container, slot: u32, checkpoint: CheckpointId) {
    container
        .connection
        .send_request(SlotRequest::DiscardCheckpoint {
            slot,
            checkpoint: checkpoint.0,
        });
}

/// Discards an abandoned checkpoint, also if it was made after all.
struct AbandonedCheckpoint {
    container: Arc<Container>,
    slot: u32,
    checkpoint: CheckpointId,
    done: bool,
}

impl Drop for AbandonedCheckpoint {
    fn drop(&mut self) {
        if !self.done {
            forget(&self.container, self.slot, self.checkpoint);
        }
    }
}

/// An interpreter in a container.
struct ContainerProcess {
    container: Arc<Container>,
    number: u32,
    exit: watch::Receiver<Option<Exit>>,
    /// The exit, once it is determined.
    reported: Option<Exit>,
    killed: Arc<AtomicBool>,
    mark: OutOfMemoryMark,
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
        self.container.connection.send(&HostMessage::Interrupt {
            process: self.number,
        });
    }

    fn kill(&self) {
        self.killed.store(true, Ordering::Relaxed);
        self.container.connection.send(&HostMessage::Kill {
            process: self.number,
        });
        let (engine, id, mut exit) = (
            self.container.engine.clone(),
            self.container.id.clone(),
            self.exit.clone(),
        );
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if within(KILL_TIMEOUT, exit.wait_for(Option::is_some))
                    .await
                    .is_none()
                {
                    engine.kill(&id).await;
                }
            });
        }
    }

    async fn exited(&mut self) -> Exit {
        if let Some(exit) = self.reported {
            return exit;
        }
        let exit = match self.exit.wait_for(Option::is_some).await {
            Ok(exit) => exit.unwrap_or(Exit::Unknown),
            Err(_) => Exit::Unknown,
        };
        let exit = self.judge(exit).await;
        self.reported = Some(exit);
        exit
    }
}
