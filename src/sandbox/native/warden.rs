//! The server's end of the jail's command socket. It keeps one view per sandbox, updated from the
//! warden's events.
//!
//! Any task may send commands. A single task reads events and changes views, and all others wait on
//! views. So no answer can be missed, in whatever order events arrive.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram as StdUnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cellblock_jail::cgroup;
use cellblock_jail::guardian;
use cellblock_jail::network::ListenerKind;
use cellblock_jail::posture::Posture;
use cellblock_jail::wire::{self, FamilyId, Generation, Setup, Slot, WardenCommand, WardenEvent};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::watch;
use tracing::{debug, error, warn};

use super::liveness::{self, HangDetector, ProcessSample};
use super::sandbox::SandboxCgroups;
use crate::reaction::within;
use crate::sandbox::{LaunchError, MemoryUse};

/// After this many deaths within a minute, the warm interpreter is not restarted at once.
const MAX_ZYGOTE_DEATHS: usize = 5;
/// Timeout for the processes of a jail to end before they are killed, and again afterwards.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// The known state of one sandbox.
#[derive(Debug, Default)]
pub(super) struct SandboxView {
    pub(super) init: Option<Arc<OwnedFd>>,
    /// The listeners of its network, until they are taken.
    listeners: Vec<(ListenerKind, OwnedFd)>,
    /// The namespaces of the sandbox, once it is complete.
    pub(super) prepared: Option<Arc<[PathBuf]>>,
    pub(super) failed: Option<String>,
    /// The number of the last completed sweep.
    pub(super) swept: u32,
    pub(super) destroyed: bool,
    interpreter: Option<(Generation, Arc<OwnedFd>)>,
    end: Option<(Generation, i32)>,
    checkpoints: BTreeMap<u32, CheckpointState>,
    /// Launched programs that are being waited for.
    side_processes: BTreeMap<u32, SideProcessState>,
}

/// The state of a program launched in a sandbox.
#[derive(Debug, Clone)]
pub(super) enum SideProcessState {
    Requested,
    Created(Arc<OwnedFd>),
    Failed(String),
    /// The kernel's wait status.
    Ended(i32),
}

/// The state of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckpointState {
    /// The interpreter is traced until it reaches its branch point.
    Traced,
    Made,
    Failed(String),
}

impl SandboxView {
    /// Returns the process of the interpreter of this generation, once it was forked.
    pub(super) fn interpreter_of(&self, generation: Generation) -> Option<Arc<OwnedFd>> {
        self.interpreter
            .as_ref()
            .filter(|(found, _)| *found == generation)
            .map(|(_, process)| Arc::clone(process))
    }

    /// Returns the wait status of the interpreter of this generation, once it ended.
    pub(super) fn end_of(&self, generation: Generation) -> Option<i32> {
        self.end
            .filter(|(found, _)| *found == generation)
            .map(|(_, status)| status)
    }

    pub(super) fn side_process(&self, number: u32) -> Option<&SideProcessState> {
        self.side_processes.get(&number)
    }

    pub(super) fn checkpoint(&self, number: u32) -> Option<&CheckpointState> {
        self.checkpoints.get(&number)
    }
}

/// The connection to the jail's processes.
pub(super) struct WardenClient {
    /// A `SOCK_SEQPACKET` socket. tokio has no such type, but it sends and receives like a datagram
    /// socket.
    socket: Arc<UnixDatagram>,
    state: Arc<State>,
    /// Closing it ends the jail.
    lifeline: Mutex<Option<OwnedFd>>,
    guardian: Mutex<Option<tokio::process::Child>>,
    guardian_handle: OwnedFd,
    forks: AtomicU32,
    /// When the current warm interpreter was requested.
    asked: Mutex<Instant>,
}

struct State {
    views: Mutex<HashMap<Slot, watch::Sender<SandboxView>>>,
    /// The posture of the warm interpreter, from which every session's must differ.
    warm: Mutex<Option<Arc<Posture>>>,
    jail: watch::Sender<JailState>,
    /// The warden's process, once it is ready.
    warden: OnceLock<OwnedFd>,
    /// The number of the last heartbeat that was answered.
    answered: AtomicU32,
    /// Number of warm interpreters that have ended.
    zygote_deaths: AtomicU32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum JailState {
    Starting,
    /// The warden is running, and a warm interpreter is starting.
    WarmingUp,
    Warm,
    /// There is no warm interpreter, and none is starting.
    Cold(String),
    /// The warden is gone.
    Ended(String),
}

impl JailState {
    fn failure(&self) -> Option<&str> {
        match self {
            JailState::Cold(why) | JailState::Ended(why) => Some(why),
            JailState::Starting | JailState::WarmingUp | JailState::Warm => None,
        }
    }
}

/// A guardian that has not received its setup. It ends when this value is dropped.
pub(super) struct Guardian {
    child: tokio::process::Child,
    lifeline: OwnedFd,
}

impl Guardian {
    pub(super) fn start(program: &Path) -> io::Result<Guardian> {
        let (lifeline, theirs) = wire::pair()?;
        let child = tokio::process::Command::new(program)
            .arg(guardian::ARGUMENT)
            // Sessions descend from this process, so its memory must not contain the server's
            // environment.
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .current_dir("/")
            .spawn()?;
        Ok(Guardian { child, lifeline })
    }

    /// Returns its process, unless it was already reaped.
    pub(super) fn process(&self) -> io::Result<u32> {
        self.child
            .id()
            .ok_or_else(|| io::Error::other("the jail's guardian ended at once"))
    }
}

impl WardenClient {
    /// Sends the guardian its setup.
    pub(super) async fn start(
        guardian: Guardian,
        setup: &Setup,
        cgroups: Option<&cgroup::CgroupTree>,
    ) -> io::Result<WardenClient> {
        let pid =
            Pid::from_raw(guardian.process()?.cast_signed()).ok_or(io::ErrorKind::NotFound)?;
        let guardian_handle = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        let Guardian { child, lifeline } = guardian;
        let (socket, commands) = wire::pair()?;
        let mut cgroup_procs = Vec::new();
        if let Some(tree) = cgroups {
            cgroup_procs = tree.group(cgroup::WARDEN_GROUP)?.open_procs()?;
        }
        let passed: Vec<_> = std::iter::once(&commands)
            .chain(&cgroup_procs)
            .map(AsFd::as_fd)
            .collect();
        wire::send(&lifeline, setup, &passed)?;
        drop(commands);
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = Arc::new(UnixDatagram::from_std(StdUnixDatagram::from(socket))?);
        let state = Arc::new(State {
            views: Mutex::default(),
            warm: Mutex::default(),
            jail: watch::Sender::new(JailState::Starting),
            warden: OnceLock::new(),
            answered: AtomicU32::new(0),
            zygote_deaths: AtomicU32::new(0),
        });
        tokio::spawn(receive_events(Arc::clone(&socket), Arc::clone(&state)));
        Ok(WardenClient {
            socket,
            state,
            lifeline: Mutex::new(Some(lifeline)),
            guardian: Mutex::new(Some(child)),
            guardian_handle,
            forks: AtomicU32::new(0),
            asked: Mutex::new(Instant::now()),
        })
    }

    /// Waits until the warden is running.
    pub(super) async fn ready(&self, limit: Duration) -> Result<(), String> {
        self.reach(limit, |state| *state != JailState::Starting)
            .await
    }

    /// Starts a warm interpreter and waits until it can fork.
    pub(super) async fn warm(&self, limit: Duration) -> Result<(), String> {
        // Clears an earlier failure, which would otherwise be attributed to this attempt.
        self.state.jail.send_if_modified(|state| {
            let was_cold = matches!(state, JailState::Cold(_));
            if was_cold {
                *state = JailState::WarmingUp;
            }
            was_cold
        });
        let warmed = match self.command(&WardenCommand::StartZygote, &[]).await {
            Ok(()) => self.reach(limit, |state| *state == JailState::Warm).await,
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = &warmed {
            self.state.mark_cold(why);
        }
        warmed
    }

    async fn reach(
        &self,
        limit: Duration,
        wanted: impl Fn(&JailState) -> bool,
    ) -> Result<(), String> {
        let mut jail = self.state.jail.subscribe();
        let settled = jail.wait_for(|state| state.failure().is_some() || wanted(state));
        match within(limit, settled).await {
            None => Err(format!(
                "the jail did not answer within {} s",
                limit.as_secs()
            )),
            Some(Err(_)) => Err("the jail ended".to_owned()),
            Some(Ok(state)) => match state.failure() {
                Some(why) => Err(why.to_owned()),
                None => Ok(()),
            },
        }
    }

    /// Waits until there is no warm interpreter and none is starting. Returns why.
    pub(super) async fn cold(&self) -> String {
        self.failed(|state| matches!(state, JailState::Cold(_)))
            .await
    }

    /// Waits for the end of the jail. Returns why it ended.
    pub(super) async fn ended(&self) -> String {
        self.failed(|state| matches!(state, JailState::Ended(_)))
            .await
    }

    async fn failed(&self, wanted: impl Fn(&JailState) -> bool) -> String {
        let mut jail = self.state.jail.subscribe();
        let state = jail
            .wait_for(wanted)
            .await
            .expect("this value holds the sender");
        state.failure().unwrap_or_default().to_owned()
    }

    /// Returns how many warm interpreters have ended.
    pub(super) fn zygote_deaths(&self) -> u32 {
        self.state.zygote_deaths.load(Ordering::Relaxed)
    }

    /// Returns whether the jail has ended.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&*self.state.jail.borrow(), JailState::Ended(_))
    }

    /// Sends the warden heartbeats at regular intervals, and samples its guardian. Returns when one
    /// of them hangs, with its name and the reason.
    pub(super) async fn hung(&self) -> String {
        let (mut warden_detector, mut guardian_detector) =
            (HangDetector::default(), HangDetector::default());
        let mut asked = 0;
        loop {
            tokio::time::sleep(liveness::SAMPLE_INTERVAL).await;
            // The guardian answers no heartbeats: it only waits for other processes to end.
            if let Ok(sample) = ProcessSample::at(&self.guardian_handle)
                && let Some(why) = guardian_detector.observe(sample, true)
            {
                return format!("the jail's guardian {why}");
            }
            let has_answered = self.state.answered.load(Ordering::Relaxed) == asked;
            if let Some(Ok(sample)) = self.state.warden.get().map(ProcessSample::at)
                && let Some(why) = warden_detector.observe(sample, has_answered)
            {
                return format!("the jail's warden {why}");
            }
            // If the socket is full, earlier commands are still waiting, so the warden counts as
            // silent anyway.
            if has_answered
                && wire::send(
                    &*self.socket,
                    &WardenCommand::Ping { number: asked + 1 },
                    &[],
                )
                .is_ok()
            {
                asked += 1;
            }
        }
    }

    /// Kills the jail's processes.
    pub(super) fn kill(&self) {
        for process in self
            .state
            .warden
            .get()
            .into_iter()
            .chain([&self.guardian_handle])
        {
            // A process that is gone needs no signal.
            let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
        }
    }

    /// Starts a fresh view of a sandbox.
    pub(super) fn watch(&self, slot: Slot) -> watch::Receiver<SandboxView> {
        let (sender, receiver) = watch::channel(SandboxView::default());
        self.views().insert(slot, sender);
        receiver
    }

    /// Returns the posture of the current warm interpreter.
    pub(super) fn warm_posture(&self) -> Option<Arc<Posture>> {
        self.state
            .warm
            .lock()
            .expect("no holder of the posture panics")
            .clone()
    }

    /// Takes the listeners of a sandbox's network.
    pub(super) fn take_listeners(&self, slot: Slot) -> Vec<(ListenerKind, OwnedFd)> {
        let mut listeners = Vec::new();
        if let Some(view) = self.views().get(&slot) {
            view.send_modify(|view| listeners = std::mem::take(&mut view.listeners));
        }
        listeners
    }

    /// Clears the failure of an attempt before the next one.
    pub(super) fn forget_failure(&self, slot: Slot) {
        if let Some(view) = self.views().get(&slot) {
            view.send_modify(|view| view.failed = None);
        }
    }

    pub(super) fn forget(&self, slot: Slot) {
        self.views().remove(&slot);
    }

    fn views(&self) -> std::sync::MutexGuard<'_, HashMap<Slot, watch::Sender<SandboxView>>> {
        self.state
            .views
            .lock()
            .expect("no holder of the views panics")
    }

    pub(super) async fn command(
        &self,
        command: &WardenCommand,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), LaunchError> {
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, || {
                wire::send(&*self.socket, command, descriptors)
            })
            .await;
        sent.map_err(|error| {
            if error.kind() == io::ErrorKind::BrokenPipe {
                self.state.end("the jail ended");
            }
            LaunchError::Start {
                why: format!("the jail does not answer: {error}"),
            }
        })
    }

    /// Sends a command without waiting for room in the socket, for callers that cannot wait.
    pub(super) fn command_now(&self, command: &WardenCommand) {
        match wire::send(&*self.socket, command, &[]) {
            Ok(()) => {}
            // The jail has ended, so the command has no object any more.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => warn!(%error, "a command did not reach the jail"),
        }
    }

    /// Counts a fork, and replaces the warm interpreter after enough of them or when it is old.
    /// Fails if there is no warm interpreter to fork from.
    pub(super) async fn count_fork(&self, most: u32, oldest: Duration) -> Result<(), LaunchError> {
        let age = self
            .asked
            .lock()
            .expect("no holder of the time panics")
            .elapsed();
        if self.forks.fetch_add(1, Ordering::Relaxed) + 1 >= most || age > oldest {
            self.replace_zygote();
        }
        // After a death the next fork waits for the new one.
        self.reach(super::WARM_UP_TIMEOUT, |state| *state == JailState::Warm)
            .await
            .map_err(|why| LaunchError::Start { why })
    }

    /// Starts another warm interpreter; the current one serves until it is ready.
    pub(super) fn replace_zygote(&self) {
        self.forks.store(0, Ordering::Relaxed);
        *self.asked.lock().expect("no holder of the time panics") = Instant::now();
        self.command_now(&WardenCommand::StartZygote);
    }

    /// Removes a discarded checkpoint from the view.
    pub(super) fn forget_checkpoint(&self, slot: Slot, number: u32) {
        if let Some(view) = self.views().get(&slot) {
            view.send_modify(|view| drop(view.checkpoints.remove(&number)));
        }
    }

    /// Adds a program to the view, before it is requested.
    pub(super) fn expect_side_process(&self, slot: Slot, number: u32) {
        if let Some(view) = self.views().get(&slot) {
            view.send_modify(|view| {
                drop(
                    view.side_processes
                        .insert(number, SideProcessState::Requested),
                )
            });
        }
    }

    /// Removes a program from the view.
    pub(super) fn forget_side_process(&self, slot: Slot, number: u32) {
        if let Some(view) = self.views().get(&slot) {
            view.send_modify(|view| drop(view.side_processes.remove(&number)));
        }
    }

    /// Destroys a sandbox that was dropped without being destroyed.
    pub(super) fn abandon(
        self: &Arc<Self>,
        slot: Slot,
        mut view: watch::Receiver<SandboxView>,
        groups: SandboxCgroups,
        slots: Slots,
        family: Arc<FamilyNumber>,
    ) {
        self.command_now(&WardenCommand::Destroy { slot });
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let warden = Arc::clone(self);
        runtime.spawn(async move {
            let _ = view.wait_for(|view| view.destroyed).await;
            groups.remove();
            warden.forget(slot);
            slots.give_back(slot);
            drop(family);
        });
    }

    /// Ends the jail with everything in it, and returns when it is gone.
    pub(super) async fn end(&self) {
        drop(
            self.lifeline
                .lock()
                .expect("no holder of the lifeline panics")
                .take(),
        );
        let guardian = self
            .guardian
            .lock()
            .expect("no holder of the guardian panics")
            .take();
        if let Some(mut guardian) = guardian {
            match tokio::time::timeout(END_TIMEOUT, guardian.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                Ok(status) => warn!(?status, "the jail's guardian did not end well"),
                Err(_) => {
                    error!("the jail's guardian does not end and is killed");
                    self.kill();
                    let _ = guardian.wait().await;
                }
            }
        }
        // A killed guardian has not waited for the warden, whose namespace contains all sandboxes.
        let Some(warden) = self.state.warden.get() else {
            return;
        };
        let gone = async {
            while !liveness::has_exited(warden) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(END_TIMEOUT, gone).await.is_err() {
            error!("the jail's warden does not end");
        }
    }
}

async fn receive_events(socket: Arc<UnixDatagram>, state: Arc<State>) {
    let mut deaths: Vec<Instant> = Vec::new();
    loop {
        let received = socket
            .async_io(Interest::READABLE, || {
                wire::receive_lossy::<WardenEvent>(&*socket)
            })
            .await;
        let (event, descriptors) = match received {
            Ok(Some(message)) => message,
            Ok(None) => break,
            // A jail that ends with unread commands closes its socket this way.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => {
                error!(%error, "invalid message from the jail supervisor");
                break;
            }
        };
        debug!(?event, "event from the jail supervisor");
        if let WardenEvent::ZygoteEnded {
            was_warm: true,
            why,
        } = &event
        {
            state.zygote_deaths.fetch_add(1, Ordering::Relaxed);
            deaths.retain(|death| death.elapsed() < Duration::from_secs(60));
            deaths.push(Instant::now());
            if deaths.len() < MAX_ZYGOTE_DEATHS {
                warn!(%why, "the warm interpreter ended and is started again");
                // Skipped if the death was already noticed and the interpreter given up.
                if state.mark_warming_up() {
                    let _ = wire::send(&*socket, &WardenCommand::StartZygote, &[]);
                }
                continue;
            }
        }
        match descriptors {
            Ok(descriptors) => state.apply(event, descriptors),
            Err(error) => state.apply_without_descriptors(event, &error),
        }
    }
    // First, so that an observer of a sandbox's end sees that the jail ended.
    state.end("the jail ended");
    let mut views = state.views.lock().expect("no holder of the views panics");
    for (_, view) in views.drain() {
        view.send_modify(|view| view.destroyed = true);
    }
}

impl State {
    /// Records that no interpreter is warm. Returns whether one was assumed to be.
    fn mark_warming_up(&self) -> bool {
        self.jail.send_if_modified(|state| {
            let was_warm = *state == JailState::Warm;
            if was_warm {
                *state = JailState::WarmingUp;
            }
            was_warm
        })
    }

    /// Records that there is no warm interpreter and none is starting, unless there is one or the
    /// jail has ended.
    fn mark_cold(&self, why: &str) {
        self.jail.send_if_modified(|state| {
            let fits = matches!(state, JailState::Starting | JailState::WarmingUp);
            if fits {
                *state = JailState::Cold(why.to_owned());
            }
            fits
        });
    }

    /// Records that the jail has ended. The first reason is kept.
    fn end(&self, why: &str) {
        self.jail.send_if_modified(|state| {
            let stood = !matches!(state, JailState::Ended(_));
            if stood {
                *state = JailState::Ended(why.to_owned());
            }
            stood
        });
    }

    /// Applies an event whose descriptors this process has no room for: its operation has failed.
    fn apply_without_descriptors(&self, event: WardenEvent, error: &io::Error) {
        let why = format!("the server cannot take its descriptors: {error}");
        match event {
            WardenEvent::InitCreated { slot }
            | WardenEvent::ListenersOpened { slot, .. }
            | WardenEvent::Forked { slot, .. } => {
                self.apply(WardenEvent::Failed { slot, why }, Vec::new());
            }
            WardenEvent::SideProcessCreated { slot, number } => self.apply(
                WardenEvent::SideProcessFailed { slot, number, why },
                Vec::new(),
            ),
            // A jail whose warden is unknown cannot be monitored.
            WardenEvent::Ready => self.end(&why),
            event => self.apply(event, Vec::new()),
        }
    }

    fn apply(&self, event: WardenEvent, mut descriptors: Vec<OwnedFd>) {
        let change = |slot: Slot, change: &mut dyn FnMut(&mut SandboxView)| {
            if let Some(view) = self
                .views
                .lock()
                .expect("no holder of the views panics")
                .get(&slot)
            {
                view.send_modify(|view| change(view));
            }
        };
        if let WardenEvent::Ready = event {
            if let Some(warden) = descriptors.pop() {
                let _ = self.warden.set(warden);
            }
            self.jail.send_replace(JailState::WarmingUp);
            return;
        }
        if let WardenEvent::ListenersOpened { slot, kinds } = event {
            let mut listeners: Vec<_> = kinds.into_iter().zip(descriptors).collect();
            return change(slot, &mut |view| view.listeners.append(&mut listeners));
        }
        let mut handle = descriptors.pop().map(Arc::new);
        match event {
            WardenEvent::ListenersOpened { .. } | WardenEvent::Ready => {}
            WardenEvent::Pong { number } => self.answered.store(number, Ordering::Relaxed),
            WardenEvent::ZygoteReady => {
                let posture = handle
                    .as_deref()
                    .ok_or_else(|| io::ErrorKind::NotFound.into());
                match posture.and_then(host_pid).and_then(Posture::read) {
                    Ok(posture) => {
                        *self.warm.lock().expect("no holder of the posture panics") =
                            Some(Arc::new(posture));
                        self.jail.send_replace(JailState::Warm);
                    }
                    Err(error) => {
                        self.mark_warming_up();
                        self.mark_cold(&format!(
                            "the kernel does not report the warm interpreter's posture: {error}"
                        ));
                    }
                }
            }
            WardenEvent::ZygoteEnded {
                was_warm: false,
                why,
            } if *self.jail.borrow() == JailState::Warm => {
                // It was to replace one that continues to serve.
                warn!(%why, "the warm interpreter could not be replaced");
            }
            WardenEvent::ZygoteEnded { why, .. } => {
                self.mark_warming_up();
                self.mark_cold(&format!("Python did not start: {why}"));
            }
            WardenEvent::WardenFailed { why } => self.end(&why),
            WardenEvent::InitCreated { slot } => {
                change(slot, &mut |view| view.init = handle.take())
            }
            WardenEvent::Prepared { slot, namespaces } => {
                change(slot, &mut |view| {
                    view.prepared = Some(namespaces.as_slice().into())
                });
            }
            WardenEvent::Forked { slot, generation } => {
                change(slot, &mut |view| {
                    view.interpreter = handle.take().map(|process| (generation, process))
                });
            }
            WardenEvent::InterpreterExited {
                slot,
                generation,
                status,
            } => {
                change(slot, &mut |view| view.end = Some((generation, status)));
            }
            WardenEvent::SideProcessCreated { slot, number } => change(slot, &mut |view| {
                if let (Some(state), Some(process)) =
                    (view.side_processes.get_mut(&number), handle.take())
                {
                    *state = SideProcessState::Created(process);
                }
            }),
            WardenEvent::SideProcessFailed { slot, number, why } => change(slot, &mut |view| {
                if let Some(state) = view.side_processes.get_mut(&number) {
                    *state = SideProcessState::Failed(why.clone());
                }
            }),
            WardenEvent::SideProcessEnded {
                slot,
                number,
                status,
            } => change(slot, &mut |view| {
                if let Some(state) = view.side_processes.get_mut(&number) {
                    *state = SideProcessState::Ended(status);
                }
            }),
            WardenEvent::TracingStarted { slot, number } => {
                change(slot, &mut |view| {
                    drop(view.checkpoints.insert(number, CheckpointState::Traced))
                });
            }
            WardenEvent::Checkpointed { slot, number } => {
                change(slot, &mut |view| {
                    drop(view.checkpoints.insert(number, CheckpointState::Made))
                });
            }
            WardenEvent::CheckpointFailed { slot, number, why } => {
                change(slot, &mut |view| {
                    drop(
                        view.checkpoints
                            .insert(number, CheckpointState::Failed(why.clone())),
                    )
                });
            }
            WardenEvent::CheckpointLost { slot, number } => {
                change(slot, &mut |view| drop(view.checkpoints.remove(&number)));
            }
            WardenEvent::Swept { slot, number } => change(slot, &mut |view| view.swept = number),
            // The first failure is the cause of those that follow.
            WardenEvent::Failed { slot, why } => change(slot, &mut |view| {
                view.failed.get_or_insert_with(|| why.clone());
            }),
            WardenEvent::Destroyed { slot } => change(slot, &mut |view| view.destroyed = true),
        }
    }
}

/// The free slots. A slot is returned only when nothing of its sandbox is left.
#[derive(Clone)]
pub(super) struct Slots(Arc<Mutex<FreeSlots>>);

struct FreeSlots {
    returned: BTreeSet<u32>,
    next: u32,
    count: u32,
}

impl Slots {
    pub(super) fn new(count: u32) -> Slots {
        Slots(Arc::new(Mutex::new(FreeSlots {
            returned: BTreeSet::new(),
            next: 0,
            count,
        })))
    }

    pub(super) fn take(&self) -> Option<Slot> {
        let mut free = self.0.lock().expect("no holder of the slots panics");
        // Fresh numbers first: a used uid stays unused as long as possible.
        if free.next < free.count {
            free.next += 1;
            return Some(Slot(free.next - 1));
        }
        free.returned.pop_first().map(Slot)
    }

    pub(super) fn give_back(&self, slot: Slot) {
        self.0
            .lock()
            .expect("no holder of the slots panics")
            .returned
            .insert(slot.0);
    }
}

/// The number of a family, held by its members. It is freed when the last of them is gone.
pub(super) struct FamilyNumber {
    pub(super) id: FamilyId,
    free: Slots,
}

impl FamilyNumber {
    /// Takes a free number; they are counted like slots.
    pub(super) fn take(free: &Slots) -> Option<Arc<FamilyNumber>> {
        let id = FamilyId(free.take()?.0);
        Some(Arc::new(FamilyNumber {
            id,
            free: free.clone(),
        }))
    }
}

impl Drop for FamilyNumber {
    fn drop(&mut self) {
        self.free.give_back(Slot(self.id.0));
    }
}

/// Returns the pid of a process on the host.
pub(super) fn host_pid(process: &OwnedFd) -> io::Result<u32> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd()))?;
    let number = text
        .lines()
        .find_map(|line| line.strip_prefix("Pid:"))
        .and_then(|number| number.trim().parse().ok());
    // The kernel writes -1 when the process is gone.
    number.ok_or_else(|| io::Error::other("the process is gone"))
}

/// Reads the memory use of one process from the kernel, where there is no control group.
pub(super) fn memory_of(process: &OwnedFd) -> io::Result<MemoryUse> {
    let status = fs::read_to_string(format!("/proc/{}/status", host_pid(process)?))?;
    let kilobytes = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name))?;
        value
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    };
    Ok(MemoryUse {
        now: kilobytes("VmRSS:").unwrap_or(0) * 1024,
        peak: kilobytes("VmHWM:").unwrap_or(0) * 1024,
    })
}

/// Reads the CPU time of one process and its ended children from the kernel, where there is no
/// control group.
pub(super) fn processor_time_of(process: &OwnedFd) -> io::Result<Duration> {
    let stat = liveness::stat_of(process)?;
    // Fields 14 to 17 of the line: own and children's time in user and in kernel mode. The name is
    // field 2.
    let ticks = liveness::fields_after_name(&stat)
        .into_iter()
        .flatten()
        .skip(11)
        .take(4)
        .filter_map(|number| number.parse::<u64>().ok());
    // The kernel reports these times in hundredths of a second on every machine we run on.
    Ok(Duration::from_millis(ticks.sum::<u64>() * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_rests_until_all_others_were_used() {
        let slots = Slots::new(3);
        let first = slots.take().unwrap();
        slots.give_back(first);
        assert_eq!(slots.take(), Some(Slot(1)));
        assert_eq!(slots.take(), Some(Slot(2)));
        assert_eq!(slots.take(), Some(first));
        assert_eq!(slots.take(), None);
    }

    #[test]
    fn this_process_is_found_by_its_descriptor() {
        let pid = rustix::process::getpid();
        let handle =
            rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        assert_eq!(host_pid(&handle).unwrap(), std::process::id());
        assert!(memory_of(&handle).unwrap().now > 0);
        let before = processor_time_of(&handle).unwrap();
        while processor_time_of(&handle).unwrap() == before {}
    }
}
