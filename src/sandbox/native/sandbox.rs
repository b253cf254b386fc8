//! One sandbox of the native backend, and the interpreters in it.
//!
//! ```text
//! prepare:            Prepare → cgroup → Proceed → Prepared          an empty sandbox
//! start_interpreter:  Fork → cgroup → gate → lock-down → hello → posture
//! ```
//!
//! The posture is read from the kernel after the lock-down and before a user's first byte; a fault ends the launch.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_jail::cgroup::{self, Group, OutOfMemory};
use cellblock_jail::identity::Identity;
use cellblock_jail::posture::{Expected, Posture};
use cellblock_jail::wire::{Command, Generation, LeftOut, Slot};
use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tracing::warn;

use super::jail::Jail;
use super::warden::{self, Slots, View, Warden};
use super::{NativeSettings, STEP_LIMIT};
use crate::sandbox::{Exit, Interpreter, Isolation, LaunchError, MemoryUse, Process, Sandbox};

/// Forks after which the warm interpreter is replaced, so that address layout and hash seed change.
const FORKS_PER_ZYGOTE: u32 = 2_000;
/// Age after which it is replaced for the same reason.
const AGE_OF_ZYGOTE: Duration = Duration::from_secs(6 * 3600);
/// How long the warm interpreter may take to fork. It does nothing else, and takes milliseconds.
const FORK_LIMIT: Duration = Duration::from_secs(5);
/// Every session has two: the zygote's wide one and its own closing one.
const FILTERS: u32 = 2;

/// Whether a fresh interpreter runs through its machinery once before it is handed out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Prime {
    Yes,
    No,
}

/// One sandbox: an init in its namespaces, a control group, and the interpreters forked into it one after another.
pub(super) struct NativeSandbox {
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
    /// Makes an empty sandbox.
    pub(super) async fn prepare(
        jail: &Jail,
        slot: Slot,
        settings: &NativeSettings,
    ) -> Result<NativeSandbox, LaunchError> {
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
                seccomp_filters: if jail.leave_out.contains(&LeftOut::Seccomp) { 0 } else { FILTERS },
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
        let doors = sandbox.doors()?;
        let passed: Vec<_> = doors.iter().map(AsFd::as_fd).collect();
        sandbox.warden.command(&Command::Prepare { slot }, &passed).await?;
        let init = sandbox.await_view(|view| view.init.clone()).await?;
        sandbox.confine(&init)?;
        sandbox.warden.command(&Command::Proceed { slot }, &[]).await?;
        sandbox.await_view(|view| view.prepared.then_some(())).await?;
        sandbox.check_confinement(&init)?;
        Ok(sandbox)
    }

    /// Waits until the warden has told what is asked for, or that it failed.
    async fn await_view<T>(&mut self, wanted: impl Fn(&View) -> Option<T>) -> Result<T, LaunchError> {
        self.await_view_for(STEP_LIMIT, wanted).await
    }

    async fn await_view_for<T>(
        &mut self,
        limit: Duration,
        wanted: impl Fn(&View) -> Option<T>,
    ) -> Result<T, LaunchError> {
        let settled = self.view.wait_for(|view| view.failed.is_some() || view.destroyed || wanted(view).is_some());
        let view = match tokio::time::timeout(limit, settled).await {
            Err(_) => return Err(LaunchError::TimedOut(limit)),
            Ok(Err(_)) => return Err(LaunchError::Start { why: "the jail ended".to_owned() }),
            Ok(Ok(view)) => view,
        };
        match (wanted(&view), &view.failed) {
            (Some(found), _) => Ok(found),
            (None, Some(why)) => Err(LaunchError::Start { why: why.clone() }),
            (None, None) => Err(LaunchError::Start { why: "the sandbox ended while it was made".to_owned() }),
        }
    }

    /// Opens the ways into the sandbox's control group, where processes enter it by themselves.
    fn doors(&self) -> Result<Vec<OwnedFd>, LaunchError> {
        let Some(group) = &self.group else { return Ok(Vec::new()) };
        group.doors().map_err(|error| LaunchError::Start { why: format!("its limits could not be opened: {error}") })
    }

    /// Refuses a process that is not under its limits, whoever was to put it there.
    fn check_confinement(&self, process: &OwnedFd) -> Result<(), LaunchError> {
        let Some(group) = &self.group else { return Ok(()) };
        match warden::host_pid(process).and_then(|pid| group.holds(pid)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(LaunchError::Start { why: "it is not under its limits".to_owned() }),
            Err(error) => Err(LaunchError::Start { why: format!("its limits could not be checked: {error}") }),
        }
    }

    /// Puts a process into the sandbox's control group, unless it goes there by itself.
    fn confine(&self, process: &OwnedFd) -> Result<(), LaunchError> {
        let Some(group) = self.group.as_ref().filter(|group| !group.has_doors()) else { return Ok(()) };
        let confined = warden::host_pid(process).and_then(|pid| group.add(pid));
        confined.map_err(|error| LaunchError::Start { why: format!("it could not be put under its limits: {error}") })
    }

    /// Forks an interpreter into the sandbox, confines it and checks it.
    pub(super) async fn start_interpreter(&mut self, prime: Prime) -> Result<Interpreter, LaunchError> {
        let out_of_memory_before = self.group.as_ref().map(|group| group.out_of_memory()).unwrap_or_default();
        let (mut channel, process) = match self.fork().await {
            Ok(forked) => forked,
            Err(_) => {
                // The warm interpreter hangs, or has just died: once more with another one.
                self.warden.give_zygote_up();
                self.fork().await?
            }
        };
        let generation = self.generation;
        self.interpreter = Some(Arc::clone(&process));
        self.confine(&process)?;
        let gate: &[u8] = if prime == Prime::Yes { b"p" } else { b"g" };
        channel.write_all(gate).await.map_err(|error| LaunchError::Start { why: error.to_string() })?;
        self.await_lock_down(&channel, generation).await?;
        self.check_confinement(&process)?;
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

    /// Has the warm interpreter fork into the sandbox; the fork waits at its gate.
    async fn fork(&mut self) -> Result<(UnixStream, Arc<OwnedFd>), LaunchError> {
        self.generation.0 += 1;
        let generation = self.generation;
        let (channel, theirs) = UnixStream::pair().map_err(|error| LaunchError::Start { why: error.to_string() })?;
        let theirs = theirs.into_std().and_then(|socket| socket.set_nonblocking(false).map(|()| socket));
        let theirs = theirs.map_err(|error| LaunchError::Start { why: error.to_string() })?;
        self.warden.count_fork(FORKS_PER_ZYGOTE, AGE_OF_ZYGOTE).await;
        self.warden.forget_failure(self.slot);
        let doors = self.doors()?;
        let passed: Vec<_> = std::iter::once(theirs.as_fd()).chain(doors.iter().map(AsFd::as_fd)).collect();
        self.warden.command(&Command::Fork { slot: self.slot, generation }, &passed).await?;
        drop(theirs);
        let forked = self.await_view_for(FORK_LIMIT, |view| view.interpreter_of(generation)).await?;
        Ok((channel, forked))
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

    /// Whether the sandbox and its last interpreter, if it had one, are still there.
    pub(super) fn is_alive(&self) -> bool {
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
    out_of_memory_before: OutOfMemory,
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
            let now = self.group.as_ref()?.out_of_memory();
            now.happened_since(self.out_of_memory_before).then_some(self.memory_limit)
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
