//! One sandbox of the native backend, and the interpreters in it.
//!
//! ```text
//! prepare:      Prepare → Prepared                                    an empty sandbox
//! interpreter:  Fork → Forked, suspended → posture → Release → gate → hello
//! both:         Prepare → Fork → Prepared → Forked → …                memory is copied meanwhile
//! checkpoint:   Checkpoint → Watched → (the driver asks on the channel) → Checkpointed
//! ```
//!
//! An interpreter is a copy of the warm one or of a checkpoint. It is locked down from outside
//! while it is suspended. Its posture is read from the kernel before it runs an instruction of its
//! own, and a fault ends it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use cellblock_egress::gateway::{Blocked, Gateway};
use cellblock_egress::rules::Rules;
use cellblock_jail::cgroup::{self, FamilyGroup, Group};
use cellblock_jail::identity::Identity;
use cellblock_jail::posture::{ExpectedPosture, Posture};
use cellblock_jail::wire::{
    ForkOrigin, Generation, INITIAL_CHECKPOINT, OmittedLayer, Programs, Slot, WardenCommand,
};
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tracing::warn;

use super::jail::Jail;
use super::liveness::{self, HangDetector, ProcessSample};
use super::oom::OomWatch;
use super::side_process::NativeLauncher;
use super::warden::{self, CheckpointState, FamilyNumber, SandboxView, Slots, WardenClient};
use super::{Inner, STEP_TIMEOUT};
use crate::reaction::{CpuWaits, within, within_with};
use crate::sandbox::{
    Asker, CheckpointError, CheckpointId, Exit, ForkTerms, Gauge, Interpreter, Isolation,
    LaunchError, Launcher, MemoryUse, Process, Sandbox, SandboxLimits, SandboxNetwork,
};

/// Number of forks after which the warm interpreter is replaced, so that address layout and hash
/// seed change.
const FORKS_PER_ZYGOTE: u32 = 2_000;
/// Age after which it is replaced for the same reason.
const ZYGOTE_LIFETIME: Duration = Duration::from_secs(6 * 3600);
/// Number of seccomp filters of every session: the jail's, the zygote's wide one and its own final
/// one. The filter that refuses programs is a fourth.
pub(super) const SESSION_FILTERS: u32 = 3;

/// Timeout for a session to reach its branch point. Fork handlers run meanwhile, including those of
/// user code.
const BRANCH_POINT_TIMEOUT: Duration = Duration::from_secs(3);
/// Processes of a sandbox beside its user's: its init, and the snapshot processes (`twin`) of its
/// interpreter and its checkpoints. The number of the user's processes is limited separately
/// (`RLIMIT_NPROC`).
const OWN_PROCESSES: u32 = 128;

/// The checkpoint of a fresh session's initial state.
const INITIAL: CheckpointId = CheckpointId(INITIAL_CHECKPOINT);

/// How a fresh interpreter starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InterpreterStart {
    Plain,
    /// After a rehearsal of its machinery.
    Rehearsed,
    /// After emptying the work folder.
    EmptiedFolder,
}

/// The family that a new sandbox joins.
#[derive(Clone, Copy)]
pub(super) enum FamilyChoice<'a> {
    /// It starts a new family. With `apart` it is the server's own: it has none of the operator's
    /// mounts, and its code may start programs.
    New { apart: bool },
    /// It is for a fork of the session in this sandbox.
    Join(&'a NativeSandbox),
}

impl FamilyChoice<'_> {
    /// Returns whether the sandbox is for the server's own work.
    pub(super) fn is_apart(self) -> bool {
        match self {
            FamilyChoice::New { apart } => apart,
            FamilyChoice::Join(source) => source.apart,
        }
    }
}

/// One sandbox: an init in its namespaces, a control group, and the interpreters forked into it one
/// after another.
pub(super) struct NativeSandbox {
    warden: Arc<WardenClient>,
    slots: Slots,
    slot: Slot,
    /// Shared by all sandboxes whose sessions descend from the same one.
    family: Arc<FamilyNumber>,
    /// The family has none of the operator's mounts.
    apart: bool,
    /// The namespaces in which its interpreters must be. `None` until it is prepared.
    namespaces: Option<Arc<[PathBuf]>>,
    view: watch::Receiver<SandboxView>,
    groups: SandboxCgroups,
    generation: Generation,
    /// The number of the last requested checkpoint.
    checkpoints: u32,
    /// The work folder is not a mount of the operator's.
    owns_work_folder: bool,
    /// It started as a fresh session with its own work folder. Returning to that state needs no
    /// checkpoint: a fresh interpreter is made again.
    began_fresh: bool,
    /// Whether interpreters in it may start programs.
    programs: Programs,
    /// Whether other sandboxes of the backend refuse programs.
    backend_refuses_programs: bool,
    /// The environment variables of a fresh session.
    environment: Arc<Vec<(String, String)>>,
    /// The number of the last launched program.
    side_processes: Arc<AtomicU32>,
    /// The number of the last sweep requested by the sandbox or one of its interpreters.
    sweeps: Arc<AtomicU32>,
    /// The last interpreter, as long as the kernel knows it.
    interpreter: Option<Arc<OwnedFd>>,
    expected: ExpectedPosture,
    host: Posture,
    isolation: Isolation,
    limits: SandboxLimits,
    /// The backend, which makes the sandbox of a fork.
    backend: Weak<Inner>,
    /// The network of the jail, if it has one.
    network: Option<Arc<SandboxNetwork>>,
    gateway: Option<Gateway>,
    /// Initial network rules, if they differ from the default.
    first_rules: Option<Rules>,
    destroyed: bool,
}

/// The control groups of a sandbox.
#[derive(Clone, Default)]
pub(super) struct SandboxCgroups {
    /// Limits the interpreter.
    pub(super) own: Option<Arc<Group>>,
    /// Limits the interpreter and all its forks.
    pub(super) family: Option<Arc<FamilyGroup>>,
}

impl SandboxCgroups {
    fn make(
        tree: &cgroup::CgroupTree,
        slot: Slot,
        limits: &SandboxLimits,
    ) -> io::Result<SandboxCgroups> {
        let family = Arc::new(tree.family(&format!("family-{}", slot.0), limits.family_memory)?);
        let own = Arc::new(family.group(
            &format!("session-{}", slot.0),
            &SandboxCgroups::limits(limits),
        )?);
        Ok(SandboxCgroups {
            own: Some(own),
            family: Some(family),
        })
    }

    /// Makes the groups of a fork, in the family of its source.
    fn join(&self, slot: Slot, limits: &SandboxLimits) -> io::Result<SandboxCgroups> {
        let Some(family) = &self.family else {
            return Ok(SandboxCgroups::default());
        };
        let own =
            Arc::new(family.group(&format!("fork-{}", slot.0), &SandboxCgroups::limits(limits))?);
        Ok(SandboxCgroups {
            own: Some(own),
            family: Some(Arc::clone(family)),
        })
    }

    fn limits(limits: &SandboxLimits) -> cgroup::CgroupLimits {
        cgroup::CgroupLimits {
            memory: limits.memory,
            processes: limits.processes + OWN_PROCESSES,
            cpus: limits.cpus,
        }
    }

    /// Removes them. No process is left in them. A family is removed with its last member.
    pub(super) fn remove(&self) {
        if let Some(group) = &self.own {
            group.remove();
        }
    }
}

impl NativeSandbox {
    /// Starts to make an empty sandbox. Its first interpreter may be requested at once.
    pub(super) async fn begin(
        jail: &Jail,
        slot: Slot,
        limits: &SandboxLimits,
        choice: FamilyChoice<'_>,
        backend: Weak<Inner>,
    ) -> Result<NativeSandbox, LaunchError> {
        let apart = choice.is_apart();
        let family = match choice {
            FamilyChoice::New { .. } => FamilyNumber::take(&jail.families),
            FamilyChoice::Join(source) => Some(Arc::clone(&source.family)),
        };
        let all_taken = || LaunchError::Start {
            why: "all user ids for sessions are in use".to_owned(),
        };
        let family = family.ok_or_else(all_taken)?;
        let view = jail.warden.watch(slot);
        let (uid, gid) = match jail.identity {
            Identity::Block { .. } => (
                jail.identity.on_host(family.id),
                jail.identity.on_host(family.id),
            ),
            Identity::Caller { uid, gid } => (uid, gid),
        };
        let programs = if apart { Programs::Free } else { jail.programs };
        let mut sandbox = NativeSandbox {
            warden: Arc::clone(&jail.warden),
            slots: jail.slots.clone(),
            slot,
            family,
            apart,
            namespaces: None,
            view,
            groups: SandboxCgroups::default(),
            generation: Generation(0),
            checkpoints: INITIAL_CHECKPOINT,
            owns_work_folder: apart || jail.owns_work_folder,
            began_fresh: false,
            programs,
            backend_refuses_programs: jail.programs == Programs::Refused,
            environment: Arc::clone(&jail.variables),
            side_processes: Arc::default(),
            sweeps: Arc::default(),
            interpreter: None,
            expected: ExpectedPosture {
                host_uid: uid,
                host_gid: gid,
                groups_empty: matches!(jail.identity, Identity::Block { .. }),
                seccomp_filters: match programs {
                    _ if jail.leave_out.contains(&OmittedLayer::Seccomp) => 0,
                    Programs::Free => SESSION_FILTERS,
                    Programs::Refused => SESSION_FILTERS + 1,
                },
            },
            host: jail.host.clone(),
            isolation: jail.isolation.clone(),
            limits: limits.clone(),
            backend,
            network: jail.network.clone(),
            gateway: None,
            first_rules: match choice {
                FamilyChoice::New { .. } => None,
                FamilyChoice::Join(source) => Some(source.rules()),
            },
            destroyed: false,
        };
        sandbox.groups = match (choice, jail.instance.tree()) {
            (FamilyChoice::Join(source), _) => {
                source.groups.join(slot, limits).map_err(no_limits)?
            }
            (FamilyChoice::New { .. }, Some(tree)) => {
                SandboxCgroups::make(tree, slot, limits).map_err(no_limits)?
            }
            (FamilyChoice::New { .. }, None) => SandboxCgroups::default(),
        };
        let cgroup_procs = sandbox.open_procs()?;
        let passed: Vec<_> = cgroup_procs.iter().map(AsFd::as_fd).collect();
        let prepare = WardenCommand::Prepare {
            slot,
            family: sandbox.family.id,
            apart,
        };
        sandbox.warden.command(&prepare, &passed).await?;
        Ok(sandbox)
    }

    /// Waits until the sandbox is made. Returns the namespaces in which its interpreters must be.
    pub(super) async fn prepared(&mut self) -> Result<Arc<[PathBuf]>, LaunchError> {
        if let Some(namespaces) = &self.namespaces {
            return Ok(Arc::clone(namespaces));
        }
        let (init, namespaces) = self
            .await_view(|view| view.init.clone().zip(view.prepared.clone()))
            .await?;
        self.check_confinement(&init)?;
        if let Some(network) = &self.network {
            let opened = network.open(self.warden.take_listeners(self.slot));
            let not_opened = |error| LaunchError::Start {
                why: format!("its network could not be opened: {error}"),
            };
            let gateway = opened.map_err(not_opened)?;
            if let Some(rules) = self.first_rules.take() {
                gateway.set_rules(rules);
            }
            self.gateway = Some(gateway);
        }
        self.namespaces = Some(Arc::clone(&namespaces));
        Ok(namespaces)
    }

    /// Returns whether this jail made it.
    pub(super) fn is_of(&self, jail: &Jail) -> bool {
        Arc::ptr_eq(&self.warden, &jail.warden)
    }

    /// Waits until the first process of the family is not stopped, or fails. A stop may be brief.
    async fn await_family(&self) -> Result<(), LaunchError> {
        let init = self.view.borrow().init.clone();
        let mut detector = HangDetector::default();
        // It is the parent of all inits of the family. If it is gone, the warden reports that.
        while let Some(sample) = init
            .as_deref()
            .and_then(|init| liveness::sample_parent(init).ok())
        {
            if !sample.is_stopped() {
                break;
            }
            if let Some(why) = detector.observe(sample, true) {
                let why = format!(
                    "the first process of its sandboxes {why}, and no other can be added to them"
                );
                return Err(LaunchError::Start { why });
            }
            tokio::time::sleep(liveness::SAMPLE_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until the warden reports the wanted state, or a failure.
    async fn await_view<T>(
        &mut self,
        wanted: impl Fn(&SandboxView) -> Option<T>,
    ) -> Result<T, LaunchError> {
        self.await_view_for(STEP_TIMEOUT, wanted).await
    }

    async fn await_view_for<T>(
        &mut self,
        limit: Duration,
        wanted: impl Fn(&SandboxView) -> Option<T>,
    ) -> Result<T, LaunchError> {
        let settled = self
            .view
            .wait_for(|view| view.failed.is_some() || view.destroyed || wanted(view).is_some());
        let view = match within(limit, settled).await {
            None => return Err(LaunchError::TimedOut(limit)),
            Some(Err(_)) => {
                return Err(LaunchError::Start {
                    why: "the jail ended".to_owned(),
                });
            }
            Some(Ok(view)) => view,
        };
        match (wanted(&view), &view.failed) {
            (Some(found), _) => Ok(found),
            (None, Some(why)) => Err(LaunchError::Start { why: why.clone() }),
            (None, None) => Err(LaunchError::Start {
                why: "the sandbox ended while it was made".to_owned(),
            }),
        }
    }

    /// Opens the descriptors through which processes enter the sandbox's control group.
    fn open_procs(&self) -> Result<Vec<OwnedFd>, LaunchError> {
        let Some(group) = &self.groups.own else {
            return Ok(Vec::new());
        };
        group.open_procs().map_err(|error| LaunchError::Start {
            why: format!("its limits could not be opened: {error}"),
        })
    }

    /// Rejects a process that is not in its control group.
    fn check_confinement(&self, process: &OwnedFd) -> Result<(), LaunchError> {
        self.groups
            .own
            .as_ref()
            .map_or(Ok(()), |group| check_group(group, process))
    }

    /// Returns whether the runner must be informed that programs may be started here, although not
    /// elsewhere.
    fn is_exempt(&self) -> bool {
        self.programs == Programs::Free && self.backend_refuses_programs
    }

    /// Makes a fresh interpreter in the sandbox. Its `hello` has not arrived yet.
    pub(super) async fn start_interpreter(
        &mut self,
        how: InterpreterStart,
    ) -> Result<Interpreter, LaunchError> {
        let gate = match how {
            InterpreterStart::Plain if self.is_exempt() => b"o",
            InterpreterStart::Plain => b"g",
            InterpreterStart::Rehearsed => b"p",
            InterpreterStart::EmptiedFolder => b"e",
        };
        self.warden
            .count_fork(FORKS_PER_ZYGOTE, ZYGOTE_LIFETIME)
            .await?;
        let deaths = self.warden.zygote_deaths();
        match self.interpreter_from(ForkOrigin::Zygote, false, gate).await {
            // The warm interpreter has died. The warden has reported that first, so the next fork
            // waits for another one.
            Err(LaunchError::Start { .. }) if self.warden.zygote_deaths() != deaths => {
                self.warden
                    .count_fork(FORKS_PER_ZYGOTE, ZYGOTE_LIFETIME)
                    .await?;
                self.interpreter_from(ForkOrigin::Zygote, false, gate).await
            }
            // A retry does not help: a refused one would be refused again, and a slow one may still
            // arrive.
            made => made,
        }
    }

    /// Makes an interpreter, checks it while it is suspended, and releases it through its gate.
    /// With `keep`, its initial state is kept as a checkpoint.
    async fn interpreter_from(
        &mut self,
        from: ForkOrigin,
        keep: bool,
        gate: &[u8],
    ) -> Result<Interpreter, LaunchError> {
        let failed = |error: io::Error| LaunchError::Start {
            why: error.to_string(),
        };
        let memory = OomWatch::begin(&self.groups, &self.limits);
        self.generation.0 += 1;
        let generation = self.generation;
        let (mut channel, theirs) = UnixStream::pair().map_err(failed)?;
        let theirs = theirs
            .into_std()
            .and_then(|socket| socket.set_nonblocking(false).map(|()| socket));
        let theirs = theirs.map_err(failed)?;
        if generation.0 > 1 {
            self.warden.forget_failure(self.slot);
        }
        let cgroup_procs = self.open_procs()?;
        let passed: Vec<_> = std::iter::once(theirs.as_fd())
            .chain(cgroup_procs.iter().map(AsFd::as_fd))
            .collect();
        let fork = WardenCommand::Fork {
            slot: self.slot,
            generation,
            from,
            keep,
            programs: self.programs,
        };
        self.warden.command(&fork, &passed).await?;
        drop(theirs);
        let process = self
            .await_view(|view| view.interpreter_of(generation))
            .await?;
        self.interpreter = Some(Arc::clone(&process));
        let checked = self.prepared().await.and_then(|namespaces| {
            self.check_confinement(&process)?;
            verify(
                &self.warden,
                &process,
                &self.expected,
                &self.host,
                &namespaces,
            )
        });
        if let Err(error) = checked {
            let _ = rustix::process::pidfd_send_signal(&process, Signal::KILL);
            return Err(error);
        }
        // The interpreter reads this when it is released, and need not wait for it.
        channel.write_all(gate).await.map_err(failed)?;
        self.warden
            .command(
                &WardenCommand::Release {
                    slot: self.slot,
                    generation,
                },
                &[],
            )
            .await?;
        let process = NativeProcess {
            warden: Arc::clone(&self.warden),
            slot: self.slot,
            generation,
            sweeps: Arc::clone(&self.sweeps),
            process,
            init: self.view.borrow().init.clone(),
            files_outlive_it: !self.owns_work_folder,
            view: self.view.clone(),
            memory,
        };
        let beginning = keep.then_some(CheckpointId(INITIAL_CHECKPOINT));
        Ok(Interpreter {
            channel,
            skew: Duration::ZERO,
            process: Box::new(process),
            beginning,
            files_lost: false,
        })
    }

    /// Makes the first, fresh interpreter of the sandbox.
    pub(super) async fn start_session(
        &mut self,
        how: InterpreterStart,
    ) -> Result<Interpreter, LaunchError> {
        let mut interpreter = self.start_interpreter(how).await?;
        self.began_fresh = self.owns_work_folder;
        interpreter.beginning = self.began_fresh.then_some(INITIAL);
        Ok(interpreter)
    }

    /// Waits for the first byte of the runner's `hello`.
    pub(super) async fn await_hello(&self, channel: &UnixStream) -> Result<(), LaunchError> {
        let mut byte = [0];
        let spoke = async {
            loop {
                channel.readable().await?;
                match rustix::net::recv(channel, &mut byte, rustix::net::RecvFlags::PEEK) {
                    Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) => return Ok(()),
                    Err(rustix::io::Errno::AGAIN) => {
                        // Clears the runtime's readiness flag, which was wrong.
                        let _ = channel.try_io(tokio::io::Interest::READABLE, || {
                            Err::<(), _>(io::ErrorKind::WouldBlock.into())
                        });
                    }
                    Err(error) => return Err(io::Error::from(error)),
                }
            }
        };
        match within(STEP_TIMEOUT, spoke).await {
            Some(Ok(())) => Ok(()),
            None => Err(LaunchError::TimedOut(STEP_TIMEOUT)),
            Some(Err(_)) => Err(LaunchError::Start {
                why: "the interpreter ended before it sent `hello`".to_owned(),
            }),
        }
    }

    /// Returns whether the sandbox and its last interpreter, if it had one, still exist.
    pub(super) fn is_alive(&self) -> bool {
        let view = self.view.borrow();
        !view.destroyed && view.end_of(self.generation).is_none()
    }

    /// Returns whether the init of the sandbox hangs, or has ended together with everything in it.
    fn is_lost(&self) -> bool {
        let is_stopped =
            |init: &OwnedFd| ProcessSample::at(init).is_ok_and(ProcessSample::is_stopped);
        self.is_gone() || self.view.borrow().init.as_deref().is_some_and(is_stopped)
    }

    /// Replaces a lost sandbox.
    async fn replace(&mut self, backend: &Inner) -> Result<Interpreter, LaunchError> {
        let (successor, interpreter) = backend.launch_fresh(self.apart).await?;
        std::mem::replace(self, successor).destroy().await;
        Ok(Interpreter {
            files_lost: self.owns_work_folder,
            ..interpreter
        })
    }
}

#[async_trait]
impl Sandbox for NativeSandbox {
    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn restart(&mut self) -> Result<Interpreter, LaunchError> {
        let backend = self.backend()?;
        // Waits for a jail that is being rebuilt or warmed up again.
        backend.prepared().await?;
        if !self.is_gone() {
            let begun = match self.sweep().await {
                Ok(()) => self.start_interpreter(InterpreterStart::Plain).await,
                Err(error) => Err(error),
            };
            match begun {
                Err(_) if self.is_lost() => {}
                begun => return begun,
            }
        }
        self.replace(&backend).await
    }

    async fn checkpoint(
        &mut self,
        traced: oneshot::Sender<()>,
    ) -> Result<CheckpointId, CheckpointError> {
        self.checkpoints += 1;
        let (slot, number) = (self.slot, self.checkpoints);
        let failed = |error: LaunchError| CheckpointError::Failed {
            why: error.to_string(),
        };
        self.warden
            .command(&WardenCommand::Checkpoint { slot, number }, &[])
            .await
            .map_err(failed)?;
        let mut guard = CheckpointGuard {
            warden: Arc::clone(&self.warden),
            slot,
            number,
            done: false,
        };
        self.await_checkpoint(number, |_| true).await?;
        let _ = traced.send(());
        let made = self
            .await_checkpoint(number, |state| *state == CheckpointState::Made)
            .await;
        guard.done = made.is_ok();
        made.map(|()| CheckpointId(number))
    }

    async fn restore(&mut self, checkpoint: CheckpointId) -> Result<Interpreter, LaunchError> {
        if self.is_gone() {
            let why =
                "its sandbox is gone, and with it its files and every state that could be restored"
                    .to_owned();
            return Err(LaunchError::Start { why });
        }
        self.sweep().await?;
        if self.began_fresh && checkpoint == INITIAL {
            return self
                .start_interpreter(InterpreterStart::EmptiedFolder)
                .await;
        }
        let from = ForkOrigin::Checkpoint {
            slot: self.slot,
            number: checkpoint.0,
            last: false,
        };
        self.interpreter_from(from, false, b"u").await
    }

    async fn fork(
        &self,
        checkpoint: CheckpointId,
        terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let backend = self.backend()?;
        // Before taking a permit that others wait for.
        self.await_family().await?;
        let _permit = backend.start_permit().await?;
        let mut sandbox = backend.begin_empty(FamilyChoice::Join(self)).await?;
        let from = ForkOrigin::Checkpoint {
            slot: self.slot,
            number: checkpoint.0,
            last: terms.last,
        };
        let interpreter = sandbox
            .interpreter_from(from, terms.keep_beginning, b"f")
            .await?;
        if terms.last {
            self.warden.forget_checkpoint(self.slot, checkpoint.0);
        }
        Ok((Box::new(sandbox), interpreter))
    }

    fn has(&self, checkpoint: CheckpointId) -> bool {
        let fresh = self.began_fresh && checkpoint == INITIAL;
        let kept =
            fresh || self.view.borrow().checkpoint(checkpoint.0) == Some(&CheckpointState::Made);
        kept && !self.is_gone()
    }

    fn is_gone(&self) -> bool {
        let view = self.view.borrow();
        view.destroyed || view.init.as_deref().is_some_and(liveness::is_exiting)
    }

    fn forget(&self, checkpoint: CheckpointId) {
        self.warden.forget_checkpoint(self.slot, checkpoint.0);
        self.warden.command_now(&WardenCommand::DiscardCheckpoint {
            slot: self.slot,
            number: checkpoint.0,
        });
    }

    fn memory(&self) -> MemoryUse {
        match (&self.groups.own, &self.interpreter) {
            (Some(group), _) => {
                let (now, peak) = group.memory();
                MemoryUse { now, peak }
            }
            (None, Some(process)) => warden::memory_of(process).unwrap_or_default(),
            (None, None) => MemoryUse::default(),
        }
    }

    fn forget_peak(&self) {
        if let Some(group) = &self.groups.own {
            group.forget_peak();
        }
    }

    fn gauge(&self) -> Arc<dyn Gauge> {
        Arc::new(NativeGauge {
            group: self.groups.own.clone(),
            process: self.interpreter.clone(),
        })
    }

    fn launcher(&self) -> Arc<dyn Launcher> {
        Arc::new(NativeLauncher {
            warden: Arc::clone(&self.warden),
            slot: self.slot,
            view: self.view.clone(),
            numbers: Arc::clone(&self.side_processes),
            groups: self.groups.clone(),
            expected: ExpectedPosture {
                seccomp_filters: self.expected.seccomp_filters.min(SESSION_FILTERS),
                ..self.expected
            },
            host: self.host.clone(),
            namespaces: self.namespaces.clone().unwrap_or_default(),
            environment: Arc::clone(&self.environment),
            limits: self.limits.clone(),
        })
    }

    fn rules(&self) -> Rules {
        self.gateway
            .as_ref()
            .map_or_else(Rules::none, Gateway::rules)
    }

    fn set_rules(&self, rules: Rules) {
        if let Some(gateway) = &self.gateway {
            gateway.set_rules(rules);
        }
    }

    fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        if let Some(gateway) = &self.gateway {
            gateway.set_asker(asker);
        }
    }

    fn take_blocked(&self) -> Vec<Blocked> {
        self.gateway
            .as_ref()
            .map(Gateway::take_blocked)
            .unwrap_or_default()
    }

    async fn destroy(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        self.gateway = None;
        if self
            .warden
            .command(&WardenCommand::Destroy { slot: self.slot }, &[])
            .await
            .is_ok()
        {
            let gone = self.view.wait_for(|view| view.destroyed);
            if within(STEP_TIMEOUT, gone).await.is_none() {
                warn!(
                    slot = self.slot.0,
                    "a sandbox did not end; its user id stays taken"
                );
                std::mem::forget(Arc::clone(&self.family));
                return;
            }
        }
        self.groups.remove();
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
        let (slots, family) = (self.slots.clone(), Arc::clone(&self.family));
        self.warden.abandon(
            self.slot,
            self.view.clone(),
            self.groups.clone(),
            slots,
            family,
        );
    }
}

impl NativeSandbox {
    /// Returns the backend, which makes other sandboxes.
    fn backend(&self) -> Result<Arc<Inner>, LaunchError> {
        self.backend.upgrade().ok_or_else(|| LaunchError::Start {
            why: "the server is ending".to_owned(),
        })
    }

    /// Ends every process of the sandbox except its init. Fails early when the init hangs.
    async fn sweep(&mut self) -> Result<(), LaunchError> {
        let number = next_number(&self.sweeps);
        self.warden
            .command(
                &WardenCommand::Sweep {
                    slot: self.slot,
                    number,
                },
                &[],
            )
            .await?;
        // A sweep in progress would end the new interpreter too, and an ended interpreter that was
        // not collected blocks the new one.
        let generation = self.generation;
        let ended = |view: &SandboxView| generation.0 == 0 || view.end_of(generation).is_some();
        let begun = Instant::now();
        loop {
            let swept = |view: &SandboxView| (view.swept >= number && ended(view)).then_some(());
            match self.await_view_for(liveness::SAMPLE_INTERVAL, swept).await {
                Err(LaunchError::TimedOut(_))
                    if begun.elapsed() < STEP_TIMEOUT && !self.is_lost() => {}
                swept => return swept,
            }
        }
    }

    /// Waits until the checkpoint is in the wanted state.
    async fn await_checkpoint(
        &mut self,
        number: u32,
        wanted: impl Fn(&CheckpointState) -> bool,
    ) -> Result<(), CheckpointError> {
        let failed = |why: &str| {
            Err(CheckpointError::Failed {
                why: why.to_owned(),
            })
        };
        let gauge = self.gauge();
        let settled = self.view.wait_for(|view| {
            view.destroyed
                || view.checkpoint(number).is_some_and(|state| {
                    matches!(state, CheckpointState::Failed(_)) || wanted(state)
                })
        });
        match within_with(BRANCH_POINT_TIMEOUT, || gauge.processor_time(), settled).await {
            None => failed("it did not come to its branch point in time"),
            Some(Err(_)) => failed("the jail ended"),
            Some(Ok(view)) => match view.checkpoint(number) {
                Some(CheckpointState::Failed(why)) => failed(why),
                Some(_) => Ok(()),
                None => failed("the sandbox ended"),
            },
        }
    }
}

/// Rejects a process that is not in its control group.
pub(super) fn check_group(group: &Group, process: &OwnedFd) -> Result<(), LaunchError> {
    match warden::host_pid(process).and_then(|pid| group.contains(pid)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(LaunchError::Start {
            why: "it is not under its limits".to_owned(),
        }),
        Err(error) => Err(LaunchError::Start {
            why: format!("its limits could not be checked: {error}"),
        }),
    }
}

/// Compares the kernel's data about a process of a sandbox with the required posture.
pub(super) fn verify(
    warden: &WardenClient,
    process: &OwnedFd,
    expected: &ExpectedPosture,
    host: &Posture,
    namespaces: &[PathBuf],
) -> Result<(), LaunchError> {
    let posture = warden::host_pid(process).and_then(Posture::read);
    let posture = posture.map_err(|error| LaunchError::Start {
        why: format!("its isolation could not be checked: {error}"),
    })?;
    let warm = warden.warm_posture();
    let warm = warm.ok_or_else(|| LaunchError::Start {
        why: "there is no warm interpreter".to_owned(),
    })?;
    match posture.fault(expected, host, &warm, namespaces) {
        None => Ok(()),
        Some(fault) => Err(LaunchError::Start {
            why: format!("its isolation is not as it must be: {fault}"),
        }),
    }
}

/// Reads the kernel's counters of a sandbox: those of its group, or of its interpreter where there
/// is no group.
struct NativeGauge {
    group: Option<Arc<Group>>,
    process: Option<Arc<OwnedFd>>,
}

impl Gauge for NativeGauge {
    fn processor_time(&self) -> Duration {
        let counted = self.group.as_ref().and_then(|group| group.processor_time());
        let of_process = || {
            self.process
                .as_ref()
                .and_then(|process| warden::processor_time_of(process).ok())
        };
        counted.or_else(of_process).unwrap_or_default()
    }

    fn memory(&self) -> u64 {
        match (&self.group, &self.process) {
            (Some(group), _) => group.memory().0,
            (None, Some(process)) => warden::memory_of(process).unwrap_or_default().now,
            (None, None) => 0,
        }
    }

    fn stored(&self) -> u64 {
        self.group
            .as_ref()
            .map_or(0, |group| group.files_in_memory())
    }

    fn cpu_waits(&self) -> CpuWaits {
        CpuWaits::of_processes(
            self.process
                .as_ref()
                .and_then(|process| warden::host_pid(process).ok()),
        )
    }
}

/// Stops tracing an interpreter when a checkpoint is abandoned, and discards the checkpoint if it
/// was made after all.
struct CheckpointGuard {
    warden: Arc<WardenClient>,
    slot: Slot,
    number: u32,
    done: bool,
}

impl Drop for CheckpointGuard {
    fn drop(&mut self) {
        if !self.done {
            let (slot, number) = (self.slot, self.number);
            self.warden
                .command_now(&WardenCommand::CancelCheckpoint { slot, number });
            self.warden
                .command_now(&WardenCommand::DiscardCheckpoint { slot, number });
        }
    }
}

fn no_limits(error: io::Error) -> LaunchError {
    LaunchError::Start {
        why: format!("its limits could not be set: {error}"),
    }
}

struct NativeProcess {
    warden: Arc<WardenClient>,
    slot: Slot,
    generation: Generation,
    sweeps: Arc<AtomicU32>,
    process: Arc<OwnedFd>,
    /// The first process of the sandbox, with which all others end.
    init: Option<Arc<OwnedFd>>,
    /// The work folder is a mount of the operator's.
    files_outlive_it: bool,
    view: watch::Receiver<SandboxView>,
    memory: OomWatch,
}

#[async_trait]
impl Process for NativeProcess {
    fn interrupt(&self) {
        // `exited` reports a process that is gone.
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::INT);
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
        self.warden.command_now(&WardenCommand::Sweep {
            slot: self.slot,
            number: next_number(&self.sweeps),
        });
    }

    async fn exited(&mut self) -> Exit {
        let generation = self.generation;
        let ended = self
            .view
            .wait_for(|view| view.destroyed || view.end_of(generation).is_some())
            .await;
        let gone = Exit::SandboxGone {
            files_kept: self.files_outlive_it,
        };
        let Some(status) = ended.ok().and_then(|view| view.end_of(generation)) else {
            return gone;
        };
        let status = std::os::unix::process::ExitStatusExt::from_raw(status);
        let exit = exit_of(status, || self.memory.exit());
        // The kernel ends an init before it kills the processes of its namespace, and kills the
        // processes of a family in the order of their numbers, an init before its interpreters. So
        // if a process was killed because of that, its init is already exiting.
        match exit {
            Exit::Signal(_) if self.sandbox_ended() => gone,
            Exit::OutOfMemory { limit, .. } if self.sandbox_ended() => Exit::OutOfMemory {
                limit,
                files_kept: self.files_outlive_it,
            },
            Exit::OutOfMemoryOutside { whose, .. } if self.sandbox_ended() => {
                Exit::OutOfMemoryOutside {
                    whose,
                    files_kept: self.files_outlive_it,
                }
            }
            exit => exit,
        }
    }
}

impl NativeProcess {
    fn sandbox_ended(&self) -> bool {
        self.init.as_deref().is_none_or(liveness::is_exiting)
    }
}

pub(super) fn next_number(last: &AtomicU32) -> u32 {
    last.fetch_add(1, Ordering::Relaxed) + 1
}

pub(super) fn exit_of(
    status: std::process::ExitStatus,
    out_of_memory: impl Fn() -> Option<Exit>,
) -> Exit {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) if signal == Signal::KILL.as_raw() => {
            out_of_memory().unwrap_or(Exit::Signal(signal))
        }
        (Some(signal), _) => Exit::Signal(signal),
        (None, Some(code)) => Exit::Code(code),
        (None, None) => Exit::Unknown,
    }
}
