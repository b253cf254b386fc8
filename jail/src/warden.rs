//! The warden, the jail supervisor: pid 1 of the jail's own namespaces. It creates sandboxes and
//! owns them.
//!
//! It is a single event loop over commands from the server, messages from the zygote and from the
//! inits of sandboxes, and exits of interpreters. It makes no decisions of its own; it executes
//! commands and reports the results. It is root in its user namespace and unprivileged on the host.
//!
//! Each sandbox belongs to a family (`family`), which is created with its first sandbox and ended
//! with its last. Every event to the server carries the slot, so that the server can have several
//! commands in flight.
//!
//! The warden traces every snapshot process (`twin`). An interpreter that is to be copied is traced
//! to its fork point one stop at a time, interleaved with all other work: user code controls how
//! long that takes, so the warden never blocks on it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions};

use crate::family::{Family, FamilyReply, OperatorMounts};
use crate::guardian::{self, OpenMounts, OpenedMounts};
use crate::identity::INSIDE_ID;
use crate::init::{InitReport, InitRequest, JOINED_NAMESPACES};
use crate::mask;
use crate::program::StepError;
use crate::root::{self, DetachedMount, JailSetupError};
use crate::seccomp::Filters;
use crate::side_process::{self, LaunchFds, SideProcessSandbox};
use crate::sys::{self, ForkSide};
use crate::twin::{
    ForkPointTracer, LaunchArguments, LockDownSettings, SavedRegisters, StopReason, StopWaiter,
    Twin,
};
use crate::wire::{
    self, FamilyId, ForkOrigin, Generation, INITIAL_CHECKPOINT, OmittedLayer, Programs, Setup,
    Slot, WardenCommand, WardenEvent,
};
use crate::zygote::{Zygote, ZygoteReport};

/// OOM scores. Checkpoints other than the newest are killed first when memory runs out, then live
/// sessions, then anything else. The newest checkpoint is what a session that used too much is
/// restored from.
const OOM_SCORE_ADJ_OF_LIVE: &str = "500";
const OOM_SCORE_ADJ_OF_NEWEST: &str = "0";
const OOM_SCORE_ADJ_OF_OLDER: &str = "1000";

/// Descriptors reserved from new sandboxes. Interpreters, programs and the zygote need some for a
/// short time, and a warden without free descriptors could not serve the existing sandboxes.
const RESERVED_DESCRIPTORS: u64 = 64;
/// Index of the mount namespace in `JOINED_NAMESPACES`.
const MOUNT_NAMESPACE_INDEX: usize = 1;
/// Timeout for an init after the memory of its interpreter is copied. A slower init is short of CPU
/// time and must not delay other sandboxes: its fork is deferred until it is ready.
const INIT_TIMEOUT: Duration = Duration::from_millis(50);

/// Arguments of the warden.
pub(crate) struct WardenStart {
    pub(crate) gate: OwnedFd,
    pub(crate) commands: OwnedFd,
    /// Socket to the guardian for requesting id-mapped mounts; only on a server that runs as root.
    pub(crate) mounts_from_guardian: Option<OwnedFd>,
    /// The read-only mounts, if the guardian was able to open them.
    pub(crate) trees: Option<Vec<DetachedMount>>,
    pub(crate) filters: Filters,
    pub(crate) setup: Setup,
}

struct Sandbox {
    family: FamilyId,
    /// Runs the server's own work, with separate limits and without the operator's mounts.
    apart: bool,
    /// The value of `Warden::masked` when the sandbox was created.
    masked: u32,
    /// The mount namespace that contains the root of its processes.
    mounts: Option<OwnedFd>,
    /// Readable when the init has ended. `None` until the family has made it.
    init: Option<OwnedFd>,
    init_socket: OwnedFd,
    /// Open once the sandbox is ready.
    namespaces: Vec<OwnedFd>,
    /// The root directory of its processes.
    root: Option<OwnedFd>,
    rules: Option<OwnedFd>,
    interpreter: Option<Live>,
    checkpoints: BTreeMap<u32, Twin>,
    /// Programs that the server started, by the server's numbers.
    side_processes: BTreeMap<u32, Pid>,
    /// A fork that is waiting for the init.
    deferred: Option<(WardenCommand, Vec<OwnedFd>)>,
    /// False once the other end of `init_socket` is closed.
    listening: bool,
    /// False once the init has ended. The sandbox is reported as destroyed when no part of it is
    /// left.
    alive: bool,
    /// The server has requested its destruction.
    destroy_requested: bool,
}

/// A live interpreter.
struct Live {
    pid: Pid,
    generation: Generation,
    /// Readable when it has ended.
    handle: OwnedFd,
    /// `None` once a copy has failed. The snapshot process may then have executed code from its
    /// memory, so it was killed.
    twin: Option<Twin>,
    /// Stopped until the server has checked it.
    suspended: bool,
    /// Set while the interpreter is traced to the fork point of this checkpoint.
    fork_tracer: Option<(u32, ForkPointTracer)>,
}

struct Warden {
    setup: Setup,
    filters: Filters,
    lock_down: LockDownSettings,
    /// The same for sandboxes with `apart`.
    lock_down_apart: LockDownSettings,
    /// The pid namespace of which this process is pid 1.
    pid_namespace: OwnedFd,
    families: BTreeMap<FamilyId, Family>,
    commands: OwnedFd,
    mounts_from_guardian: Option<OwnedFd>,
    children: OwnedFd,
    /// Oldest first. The newest warm one forks; older ones are killed once a newer one is warm.
    zygotes: Vec<Zygote>,
    sandboxes: BTreeMap<Slot, Sandbox>,
    /// Counts the masking passes.
    masked: u32,
    /// Snapshot processes that were killed but not yet reaped, and the sandbox whose limits they
    /// count against.
    ending: HashMap<Pid, Slot>,
}

/// Sockets and pidfds that are readable.
struct Ready {
    commands: bool,
    zygotes: Vec<Pid>,
    families: Vec<FamilyId>,
    inits: Vec<Slot>,
    ended_inits: Vec<Slot>,
    ended: Vec<Slot>,
}

/// Runs the warden; never returns.
pub(crate) fn main(start: WardenStart) -> ! {
    let commands = start.commands.try_clone();
    if let (Err(error), Ok(commands)) = (run(start), commands) {
        let _ = wire::send(
            &commands,
            &WardenEvent::WardenFailed {
                why: guardian::error_chain(&error),
            },
            &[],
        );
    }
    sys::exit_now(0);
}

fn run(start: WardenStart) -> Result<(), JailSetupError> {
    let failed =
        |attempt: &'static str| move |cause: io::Error| JailSetupError::new(attempt, cause);
    die_with_guardian()?;
    let mut byte = [0];
    if rustix::io::read(&start.gate, &mut byte)
        .map_err(|cause| JailSetupError::new("could not wait for the id maps", cause))?
        != 1
    {
        return Ok(());
    }
    rustix::thread::set_name(c"cb-warden")
        .map_err(|cause| JailSetupError::new("could not name the warden", cause))?;
    become_warden_root(&start.setup).map_err(failed("could not become root of the jail"))?;
    // The kernel clears the parent death signal when a process changes its user.
    die_with_guardian()?;
    let trees = match start.trees {
        Some(trees) => trees,
        None => root::open_all(&start.setup.binds, &start.setup.test_switches)?,
    };
    let staged = if start.mounts_from_guardian.is_none() {
        root::open_operator_mounts(&start.setup.mounts)?
    } else {
        Vec::new()
    };
    root::become_root(
        &trees,
        &staged,
        &start.setup.shown_limits,
        &start.setup.test_switches,
    )?;
    drop(trees);
    sys::bring_loopback_up().map_err(failed("could not bring up the loopback interface"))?;
    let mut warden = Warden {
        lock_down: lock_down_settings(&start.setup, &start.setup.rlimits, &start.filters),
        lock_down_apart: lock_down_settings(
            &start.setup,
            &start.setup.rlimits_apart,
            &start.filters,
        ),
        pid_namespace: std::fs::File::open("/proc/self/ns/pid")
            .map_err(failed("could not open the pid namespace"))?
            .into(),
        filters: start.filters,
        children: sys::child_signal_descriptor().map_err(failed("could not watch children"))?,
        commands: start.commands,
        mounts_from_guardian: start.mounts_from_guardian,
        zygotes: Vec::new(),
        families: BTreeMap::new(),
        sandboxes: BTreeMap::new(),
        masked: 0,
        ending: HashMap::new(),
        setup: start.setup,
    };
    let own = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
        .map_err(|cause| JailSetupError::new("could not open the warden's own process", cause))?;
    warden
        .report(&WardenEvent::Ready, &[&own])
        .map_err(failed("could not report that the warden is ready"))?;
    drop(own);
    warden
        .serve()
        .map_err(failed("the warden's event loop failed"))
}

/// Returns the settings with which interpreters of this jail enter their sandboxes.
fn lock_down_settings(
    setup: &Setup,
    rlimits: &[wire::ResourceLimit],
    filters: &Filters,
) -> LockDownSettings {
    let last = std::fs::read_to_string("/proc/sys/kernel/cap_last_cap").ok();
    let without_filters = setup.leave_out.contains(&OmittedLayer::Seccomp);
    LockDownSettings {
        rlimits: rlimits
            .iter()
            .map(|limit| limit.within_the_hosts())
            .collect(),
        id: INSIDE_ID,
        closing_filter: if without_filters {
            Vec::new()
        } else {
            filters.closing_bytes()
        },
        no_exec_filter: if without_filters {
            Vec::new()
        } else {
            filters.no_exec_bytes()
        },
        // Fallback: the newest capability known when this was written. The posture check detects a
        // kernel that has more.
        last_capability: last.and_then(|text| text.trim().parse().ok()).unwrap_or(40),
        test_switches: setup.test_switches.clone(),
    }
}

/// Makes the kernel kill this process, and with it its pid namespace, when the guardian is killed.
fn die_with_guardian() -> Result<(), JailSetupError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|cause| JailSetupError::new("could not tie the warden to its guardian", cause))
}

fn become_warden_root(setup: &Setup) -> io::Result<()> {
    let (uid, gid) = (rustix::process::Uid::ROOT, rustix::process::Gid::ROOT);
    if matches!(setup.identity, crate::identity::Identity::Block { .. }) {
        rustix::thread::set_thread_groups(&[])?;
    }
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // The change of user cleared the dumpable flag of this process and of everything forked from
    // it, but it must write the id maps of families.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    Ok(())
}

impl Warden {
    fn report(&self, event: &WardenEvent, descriptors: &[&OwnedFd]) -> io::Result<()> {
        let descriptors: Vec<_> = descriptors
            .iter()
            .map(|descriptor| descriptor.as_fd())
            .collect();
        wire::send(&self.commands, event, &descriptors)
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            // Readiness is recorded first and handled afterwards, because handling changes the
            // table of sandboxes.
            let ready = self.wait_for_something()?;
            for zygote in ready.zygotes {
                self.handle_zygote_report(zygote)?;
            }
            for family in ready.families {
                self.handle_family_reply(family)?;
            }
            for slot in ready.inits {
                self.handle_init_report(slot)?;
            }
            for slot in ready.ended {
                self.interpreter_ended(slot)?;
            }
            for slot in ready.ended_inits {
                self.init_ended(slot)?;
            }
            // Last: a command may consume messages that arrived on other sockets in the meantime.
            if ready.commands {
                match wire::receive_lossy::<WardenCommand>(&self.commands)? {
                    Some((command, Ok(descriptors))) => self.carry_out(command, descriptors)?,
                    Some((command, Err(error))) => self.refuse(&command, &error)?,
                    None => return Ok(()),
                }
            }
            // Always: waiting for a snapshot process drains the signal descriptor, which also
            // covers other children.
            self.collect_children()?;
        }
    }

    fn wait_for_something(&self) -> io::Result<Ready> {
        let listening = || {
            self.sandboxes
                .iter()
                .filter(|(_, sandbox)| sandbox.listening)
        };
        let zygotes = || self.zygotes.iter().filter(|zygote| zygote.listening);
        let mut events = vec![
            PollFd::new(&self.commands, PollFlags::IN),
            PollFd::new(&self.children, PollFlags::IN),
        ];
        events.extend(zygotes().map(|zygote| PollFd::new(&zygote.socket, PollFlags::IN)));
        let families = || self.families.iter().filter(|(_, family)| family.listening);
        events.extend(families().map(|(_, family)| PollFd::new(&family.socket, PollFlags::IN)));
        events.extend(
            listening().map(|(_, sandbox)| PollFd::new(&sandbox.init_socket, PollFlags::IN)),
        );
        let inits = || {
            let standing = self.sandboxes.iter().filter(|(_, sandbox)| sandbox.alive);
            standing.filter_map(|(slot, sandbox)| Some((slot, sandbox.init.as_ref()?)))
        };
        events.extend(inits().map(|(_, init)| PollFd::new(init, PollFlags::IN)));
        let interpreters = || {
            self.sandboxes
                .iter()
                .filter_map(|(slot, sandbox)| Some((slot, sandbox.interpreter.as_ref()?)))
        };
        events.extend(interpreters().map(|(_, live)| PollFd::new(&live.handle, PollFlags::IN)));
        loop {
            match rustix::event::poll(&mut events, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let mut ready = events.iter().map(|event| !event.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        let (commands, _children) = (next(), next());
        Ok(Ready {
            commands,
            zygotes: zygotes()
                .filter(|_| next())
                .map(|zygote| zygote.pid)
                .collect(),
            families: families()
                .filter(|_| next())
                .map(|(family, _)| *family)
                .collect(),
            inits: listening()
                .filter(|_| next())
                .map(|(slot, _)| *slot)
                .collect(),
            ended_inits: inits().filter(|_| next()).map(|(slot, _)| *slot).collect(),
            ended: interpreters()
                .filter(|_| next())
                .map(|(slot, _)| *slot)
                .collect(),
        })
    }

    /// Refuses a command whose descriptors could not be received. Other commands are unaffected.
    fn refuse(&self, command: &WardenCommand, error: &io::Error) -> io::Result<()> {
        let why = format!("the jail cannot take its descriptors: {error}");
        match *command {
            WardenCommand::Prepare { slot, .. } | WardenCommand::Fork { slot, .. } => {
                self.report(&WardenEvent::Failed { slot, why }, &[])
            }
            WardenCommand::StartSideProcess { slot, number, .. } => {
                self.report(&WardenEvent::SideProcessFailed { slot, number, why }, &[])
            }
            // No other command carries descriptors.
            _ => Ok(()),
        }
    }

    /// Sends an event about one sandbox with descriptors. If they cannot be sent, only that sandbox
    /// fails.
    fn report_or_fail(
        &self,
        slot: Slot,
        event: &WardenEvent,
        descriptors: &[&OwnedFd],
    ) -> io::Result<()> {
        match self.report(event, descriptors) {
            Ok(()) => Ok(()),
            // The server has ended.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(error),
            Err(error) => self.report(
                &WardenEvent::Failed {
                    slot,
                    why: error.to_string(),
                },
                &[],
            ),
        }
    }

    fn carry_out(&mut self, command: WardenCommand, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        match command {
            WardenCommand::StartZygote => self.warm(),
            WardenCommand::Prepare {
                slot,
                family,
                apart,
            } => match self.prepare(slot, family, apart, &descriptors) {
                // The family reports when the init exists.
                Ok(()) => Ok(()),
                Err(error) => {
                    self.end_family_without_members(family);
                    self.report(
                        &WardenEvent::Failed {
                            slot,
                            why: guardian::error_chain(&error),
                        },
                        &[],
                    )
                }
            },
            WardenCommand::Sweep { slot, number } => {
                self.request_from_init(slot, &InitRequest::Sweep { number })
            }
            WardenCommand::Fork {
                slot,
                generation,
                from,
                keep,
                programs,
            } => {
                let forked = self.fork(slot, generation, from, programs, &descriptors);
                if let (Err(ForkError::InitNotReady), Some(sandbox)) =
                    (&forked, self.sandboxes.get_mut(&slot))
                {
                    sandbox.deferred = Some((command, descriptors));
                    return Ok(());
                }
                let kept = forked.and_then(|handle| {
                    if keep {
                        self.keep_initial_checkpoint(slot)
                            .map_err(ForkError::Keep)?;
                    }
                    Ok(handle)
                });
                match kept {
                    Ok(handle) => self.report_or_fail(
                        slot,
                        &WardenEvent::Forked { slot, generation },
                        &[&handle],
                    ),
                    Err(error) => self.report(
                        &WardenEvent::Failed {
                            slot,
                            why: guardian::error_chain(&error),
                        },
                        &[],
                    ),
                }
            }
            WardenCommand::Release { slot, generation } => self.release(slot, generation),
            WardenCommand::Checkpoint { slot, number } => match self.begin_checkpoint(slot, number)
            {
                Ok(()) => self.report(&WardenEvent::TracingStarted { slot, number }, &[]),
                Err(why) => self.report(&WardenEvent::CheckpointFailed { slot, number, why }, &[]),
            },
            WardenCommand::CancelCheckpoint { slot, number } => {
                self.cancel_checkpoint(slot, number)
            }
            WardenCommand::DiscardCheckpoint { slot, number } => {
                let forgotten = self
                    .sandboxes
                    .get_mut(&slot)
                    .and_then(|sandbox| sandbox.checkpoints.remove(&number));
                if let Some(twin) = forgotten {
                    end_twin(&mut self.ending, slot, &twin);
                }
                Ok(())
            }
            WardenCommand::StartSideProcess {
                slot,
                number,
                has_input,
            } => {
                let fds = LaunchFds::from_command(descriptors, has_input);
                match fds
                    .ok_or(SideProcessError::Fds)
                    .and_then(|fds| self.start_side_process(slot, number, fds))
                {
                    Ok(handle) => {
                        match self.report(
                            &WardenEvent::SideProcessCreated { slot, number },
                            &[&handle],
                        ) {
                            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => self.report(
                                &WardenEvent::SideProcessFailed {
                                    slot,
                                    number,
                                    why: error.to_string(),
                                },
                                &[],
                            ),
                            sent => sent,
                        }
                    }
                    Err(SideProcessError::Lost(error)) => Err(error),
                    Err(error) => {
                        let why = guardian::error_chain(&error);
                        self.report(&WardenEvent::SideProcessFailed { slot, number, why }, &[])
                    }
                }
            }
            WardenCommand::SignalSideProcess {
                slot,
                number,
                signal,
            } => {
                let process = self
                    .sandboxes
                    .get(&slot)
                    .and_then(|sandbox| sandbox.side_processes.get(&number));
                if let (Some(process), Some(signal)) = (process, Signal::from_named_raw(signal)) {
                    // It is not reaped yet, so its pid is still its own. Until it leads a group it
                    // is the only process.
                    let _ = rustix::process::kill_process(*process, signal);
                    let _ = rustix::process::kill_process_group(*process, signal);
                }
                Ok(())
            }
            WardenCommand::ReapplyMasks => self.reapply_masks(),
            WardenCommand::Destroy { slot } => self.destroy(slot),
            WardenCommand::Ping { number } => self.report(&WardenEvent::Pong { number }, &[]),
        }
    }

    /// Masks replaced files again in every sandbox that is ready. A sandbox that is still starting
    /// is masked when it becomes ready.
    fn reapply_masks(&mut self) -> io::Result<()> {
        self.masked = self.masked.wrapping_add(1);
        let slots: Vec<Slot> = self.sandboxes.keys().copied().collect();
        slots
            .into_iter()
            .try_for_each(|slot| self.mask_sandbox(slot))
    }

    /// Masks the files that were replaced since a sandbox was created, or destroys the sandbox on
    /// failure.
    fn mask_sandbox(&mut self, slot: Slot) -> io::Result<()> {
        let masked = self.masked;
        let stale =
            |sandbox: &&mut Sandbox| sandbox.alive && !sandbox.apart && sandbox.masked != masked;
        let Some(sandbox) = self.sandboxes.get_mut(&slot).filter(stale) else {
            return Ok(());
        };
        // Files are looked up in the first namespace; whether a name can be removed, the kernel
        // decides by the second.
        let namespaces = sandbox
            .mounts
            .as_ref()
            .zip(sandbox.namespaces.get(MOUNT_NAMESPACE_INDEX));
        let Some((original, copy)) = namespaces else {
            return Ok(());
        };
        let Some(family) = self.families.get(&sandbox.family) else {
            return Ok(());
        };
        let covered = [original, copy].into_iter().try_for_each(|mounts| {
            mask::reapply(&self.setup.masks, &family.user_namespace, mounts)
        });
        match covered {
            Ok(()) => {
                sandbox.masked = masked;
                Ok(())
            }
            Err(_) => self.destroy(slot),
        }
    }

    fn request_from_init(&self, slot: Slot, request: &InitRequest) -> io::Result<()> {
        // An init that has just died is reported when it is reaped. A stopped init must not block
        // the warden: the server detects that it does not answer.
        if let Some(sandbox) = self.sandboxes.get(&slot) {
            let _ = wire::send_nonblocking(&sandbox.init_socket, request, &[]);
        }
        Ok(())
    }

    fn warm(&mut self) -> io::Result<()> {
        match Zygote::start(&self.setup, &self.filters) {
            Ok(zygote) => {
                self.zygotes.push(zygote);
                Ok(())
            }
            Err(error) => self.report(
                &WardenEvent::ZygoteEnded {
                    was_warm: false,
                    why: error.to_string(),
                },
                &[],
            ),
        }
    }

    /// Asks the family for an init, after creating the family if this is its first sandbox.
    fn prepare(
        &mut self,
        slot: Slot,
        id: FamilyId,
        apart: bool,
        cgroup_procs: &[OwnedFd],
    ) -> Result<(), JailSetupError> {
        let failed = |cause: io::Error| {
            JailSetupError::new("could not make the sandbox's namespaces", cause)
        };
        self.check_free_descriptors().map_err(failed)?;
        if !self.families.contains_key(&id) {
            let mounts = if apart {
                OperatorMounts::None
            } else {
                self.operator_mounts(id)?
            };
            self.families
                .insert(id, Family::start(&self.setup, id, &mounts)?);
        }
        let family = self
            .families
            .get(&id)
            .ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let (init_socket, theirs) = wire::pair().map_err(failed)?;
        let scratch = if apart {
            self.setup.scratch_apart
        } else {
            self.setup.scratch
        };
        family
            .make_init(slot, scratch, &theirs, cgroup_procs)
            .map_err(failed)?;
        let sandbox = Sandbox {
            family: id,
            apart,
            masked: self.masked,
            mounts: None,
            init: None,
            init_socket,
            namespaces: Vec::new(),
            root: None,
            rules: None,
            interpreter: None,
            checkpoints: BTreeMap::new(),
            side_processes: BTreeMap::new(),
            deferred: None,
            listening: true,
            alive: true,
            destroy_requested: false,
        };
        self.sandboxes.insert(slot, sandbox);
        Ok(())
    }

    /// Refuses another sandbox if it would leave too few descriptors for the existing ones.
    fn check_free_descriptors(&self) -> io::Result<()> {
        // The kernel allocates the lowest free number, so it shows how many are in use.
        let free = rustix::io::fcntl_dupfd_cloexec(&self.commands, 0)?;
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        if free.as_raw_fd() as u64 + RESERVED_DESCRIPTORS >= most {
            return Err(rustix::io::Errno::MFILE.into());
        }
        Ok(())
    }

    fn operator_mounts(&self, family: FamilyId) -> Result<OperatorMounts, JailSetupError> {
        let Some(guardian) = &self.mounts_from_guardian else {
            return Ok(OperatorMounts::Staged);
        };
        if self.setup.mounts.is_empty() {
            return Ok(OperatorMounts::None);
        }
        let failed =
            |cause: io::Error| JailSetupError::new("could not ask the guardian for mounts", cause);
        wire::send(guardian, &OpenMounts { family }, &[]).map_err(failed)?;
        let (OpenedMounts { error }, opened) = wire::receive(guardian)
            .map_err(failed)?
            .ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
        match error {
            Some(why) => Err(JailSetupError::new(
                "could not open the operator's mounts",
                io::Error::other(why),
            )),
            None => Ok(OperatorMounts::Opened(
                self.setup
                    .mounts
                    .iter()
                    .zip(opened)
                    .map(|(mount, opened)| DetachedMount::from_guardian(mount, opened))
                    .collect(),
            )),
        }
    }

    /// Creates an interpreter, stopped and locked down; returns its pidfd.
    fn fork(
        &mut self,
        slot: Slot,
        generation: Generation,
        from: ForkOrigin,
        programs: Programs,
        descriptors: &[OwnedFd],
    ) -> Result<OwnedFd, ForkError> {
        let (channel, cgroup_procs) = descriptors.split_first().ok_or(ForkError::NotReady)?;
        let family = self.family_for(slot, from)?;
        if matches!(from, ForkOrigin::Checkpoint { last: true, .. }) {
            // This fork consumes the checkpoint, so a later retry would have none.
            self.await_init(slot, family)?;
        }
        let mut twin = self.snapshot_from(from, family)?;
        let ready = self.await_init(slot, family).and_then(|()| {
            let sandbox = self.sandboxes.get(&slot).ok_or(ForkError::NotReady)?;
            let root = sandbox.root.as_ref().ok_or(ForkError::NotReady)?;
            Ok((
                sandbox,
                root,
                self.families.get(&family).ok_or(ForkError::NotReady)?,
            ))
        });
        let (sandbox, root, family) = match ready {
            Ok(ready) => ready,
            Err(error) => {
                end_twin(&mut self.ending, slot, &twin);
                return Err(error);
            }
        };
        let launch = LaunchArguments {
            channel,
            cgroup_procs,
            family: matches!(from, ForkOrigin::Zygote).then_some(&family.user_namespace),
            own_pid_namespace: &family.pid_namespace,
            namespaces: &sandbox.namespaces,
            root,
            rules: sandbox.rules.as_ref(),
            programs,
        };
        let settings = if sandbox.apart {
            &self.lock_down_apart
        } else {
            &self.lock_down
        };
        let spawned = twin.spawn(
            &StopWaiter {
                sigchld: &self.children,
            },
            settings,
            &launch,
        );
        let spawned = spawned.and_then(|pid| {
            // From here on it holds the memory of a session and must have no rights outside the
            // family.
            require_family(twin.pid, family)?;
            Ok(pid)
        });
        let spawned = spawned.map_err(ForkError::Enter);
        let made = spawned.and_then(|pid| {
            let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty());
            let handle = handle
                .and_then(|handle| Ok((rustix::io::fcntl_dupfd_cloexec(&handle, 0)?, handle)));
            handle
                .map(|(theirs, ours)| (pid, theirs, ours))
                .map_err(|error| ForkError::Enter(error.into()))
        });
        match made {
            Ok((pid, theirs, handle)) => {
                set_oom_score_adj(pid, OOM_SCORE_ADJ_OF_LIVE);
                let live = Live {
                    pid,
                    generation,
                    handle,
                    twin: Some(twin),
                    suspended: true,
                    fork_tracer: None,
                };
                let sandbox = self.sandboxes.get_mut(&slot).ok_or(ForkError::NotReady)?;
                sandbox.interpreter = Some(live);
                Ok(theirs)
            }
            Err(error) => {
                // Processes that it created share its memory and its tracer, and die with it.
                end_twin(&mut self.ending, slot, &twin);
                Err(error)
            }
        }
    }

    /// Returns the family of a sandbox that can receive an interpreter made from `from`.
    fn family_for(&self, slot: Slot, from: ForkOrigin) -> Result<FamilyId, ForkError> {
        let sandbox = self
            .sandboxes
            .get(&slot)
            .filter(|sandbox| sandbox.interpreter.is_none() && sandbox.alive);
        let sandbox = sandbox.ok_or(ForkError::NotReady)?;
        match from {
            ForkOrigin::Zygote => Ok(sandbox.family),
            ForkOrigin::Checkpoint { slot: source, .. } => {
                let source = self.sandboxes.get(&source).ok_or(ForkError::NoOrigin)?;
                // The kernel would refuse it as well.
                (source.family == sandbox.family)
                    .then_some(sandbox.family)
                    .ok_or(ForkError::OtherFamily)
            }
        }
    }

    /// Waits briefly for the init of a sandbox. The init is created while the memory of its first
    /// interpreter is copied, so it is usually ready by now.
    fn await_init(&mut self, slot: Slot, id: FamilyId) -> Result<(), ForkError> {
        let begun = Instant::now();
        loop {
            let sandbox = self.sandboxes.get(&slot).ok_or(ForkError::NotReady)?;
            if !sandbox.namespaces.is_empty() {
                return Ok(());
            }
            let family = self.families.get(&id).filter(|family| family.listening);
            let family = family
                .filter(|_| sandbox.alive && sandbox.listening)
                .ok_or(ForkError::NotReady)?;
            let left = INIT_TIMEOUT.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(if is_stopped(family.pid) {
                    ForkError::NotReady
                } else {
                    ForkError::InitNotReady
                });
            }
            let mut events = [
                PollFd::new(&family.socket, PollFlags::IN),
                PollFd::new(&sandbox.init_socket, PollFlags::IN),
            ];
            let pause = Timespec {
                tv_sec: 0,
                tv_nsec: left.subsec_nanos().into(),
            };
            match rustix::event::poll(&mut events, Some(&pause)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(ForkError::NotReady),
            }
            let [from_family, from_init] = [0, 1].map(|index| !events[index].revents().is_empty());
            // If the server cannot be reached it has ended, which the next command detects.
            if from_family {
                let _ = self.handle_family_reply(id);
            }
            if from_init {
                let _ = self.handle_init_report(slot);
            }
        }
    }

    /// Creates a process that will exec a program; returns its pidfd.
    fn start_side_process(
        &mut self,
        slot: Slot,
        number: u32,
        fds: LaunchFds,
    ) -> Result<OwnedFd, SideProcessError> {
        let sandbox = self
            .sandboxes
            .get_mut(&slot)
            .filter(|sandbox| sandbox.alive);
        let sandbox = sandbox.ok_or(SideProcessError::NotReady)?;
        let (pid_namespace, namespaces) = sandbox
            .namespaces
            .split_first()
            .ok_or(SideProcessError::NotReady)?;
        let root = sandbox.root.as_ref().ok_or(SideProcessError::NotReady)?;
        // Without the rules, an interpreter could write to the memory of a program that runs as the
        // same user.
        let rules = sandbox.rules.as_ref().ok_or(SideProcessError::NoRules)?;
        let filters =
            (!self.setup.leave_out.contains(&OmittedLayer::Seccomp)).then_some(&self.filters);
        let enter = |namespace: &OwnedFd| {
            rustix::thread::move_into_link_name_space(namespace.as_fd(), None)
        };
        enter(pid_namespace).map_err(|error| SideProcessError::Make(error.into()))?;
        let forked = sys::clone_process(0);
        if let Ok(ForkSide::Child) = &forked {
            let settings = if sandbox.apart {
                &self.lock_down_apart
            } else {
                &self.lock_down
            };
            side_process::main(
                fds,
                &SideProcessSandbox {
                    namespaces,
                    root,
                    rules,
                    filters,
                    settings,
                },
            );
        }
        // Processes created later must not be in the sandbox's pid namespace.
        enter(&self.pid_namespace).map_err(|error| SideProcessError::Lost(error.into()))?;
        let ForkSide::Parent(process) = forked.map_err(SideProcessError::Make)? else {
            unreachable!("the child never returns")
        };
        sandbox.side_processes.insert(number, process);
        set_oom_score_adj(process, OOM_SCORE_ADJ_OF_LIVE);
        rustix::process::pidfd_open(process, PidfdFlags::empty())
            .map_err(|error| SideProcessError::Make(error.into()))
    }

    /// Returns a snapshot process with its own memory, a copy of `from`, in the pid namespace of a
    /// family.
    fn snapshot_from(&mut self, from: ForkOrigin, family: FamilyId) -> Result<Twin, ForkError> {
        let waiter = StopWaiter {
            sigchld: &self.children,
        };
        let copied = match from {
            ForkOrigin::Zygote => {
                let zygote = self
                    .zygotes
                    .iter()
                    .rev()
                    .find_map(|zygote| zygote.twin.as_ref());
                let family = self.families.get(&family).ok_or(ForkError::NotReady)?;
                zygote
                    .ok_or(ForkError::NoOrigin)?
                    .copy_into_family(&waiter, &family.pid_namespace)
            }
            ForkOrigin::Checkpoint { slot, number, last } => {
                let checkpoints = self
                    .sandboxes
                    .get_mut(&slot)
                    .map(|sandbox| &mut sandbox.checkpoints);
                let checkpoints = checkpoints.ok_or(ForkError::NoOrigin)?;
                if last {
                    return checkpoints.remove(&number).ok_or(ForkError::NoOrigin);
                }
                checkpoints
                    .get(&number)
                    .ok_or(ForkError::NoOrigin)?
                    .copy(&waiter, None, false)
            }
        };
        copied.map_err(|error| {
            // The kernel refused a call, so the origin made exactly the calls that it was ordered
            // to make and is stopped after them. It can be copied again once another process is
            // possible.
            if error.raw_os_error() != Some(libc::EAGAIN) && !StepError::is_cause_of(&error) {
                self.end_origin(from);
            }
            ForkError::Copy(error)
        })
    }

    /// Keeps the initial state of a new interpreter, which has not run yet, as a checkpoint.
    fn keep_initial_checkpoint(&mut self, slot: Slot) -> io::Result<()> {
        let waiter = StopWaiter {
            sigchld: &self.children,
        };
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
            return Ok(());
        };
        let twin = sandbox
            .interpreter
            .as_mut()
            .and_then(|live| live.twin.as_ref())
            .ok_or(io::ErrorKind::NotFound)?;
        match twin.copy(&waiter, None, true) {
            Ok(copy) => {
                set_oom_score_adj(copy.pid, OOM_SCORE_ADJ_OF_NEWEST);
                sandbox.checkpoints.insert(INITIAL_CHECKPOINT, copy);
                self.report(
                    &WardenEvent::Checkpointed {
                        slot,
                        number: INITIAL_CHECKPOINT,
                    },
                    &[],
                )
            }
            Err(error) => {
                if let Some(live) = &mut sandbox.interpreter
                    && let Some(twin) = live.twin.take()
                {
                    let _ = rustix::process::kill_process(live.pid, Signal::KILL);
                    end_twin(&mut self.ending, slot, &twin);
                }
                Err(error)
            }
        }
    }

    fn release(&mut self, slot: Slot, generation: Generation) -> io::Result<()> {
        let live = self
            .sandboxes
            .get_mut(&slot)
            .and_then(|sandbox| sandbox.interpreter.as_mut());
        if let Some(live) = live.filter(|live| live.generation == generation && live.suspended) {
            live.suspended = false;
            // If it was killed in the meantime, its exit is reported separately.
            let _ = sys::detach(live.pid);
        }
        Ok(())
    }

    fn begin_checkpoint(&mut self, slot: Slot, number: u32) -> Result<(), String> {
        let live = self
            .sandboxes
            .get_mut(&slot)
            .and_then(|sandbox| sandbox.interpreter.as_mut());
        let live = live
            .filter(|live| !live.suspended)
            .ok_or("it has no interpreter")?;
        if live.twin.is_none() {
            return Err("an earlier copy of it failed".to_owned());
        }
        if live.fork_tracer.is_some() {
            return Err("it is being copied already".to_owned());
        }
        let tracer = ForkPointTracer::begin(live.pid, libc::PTRACE_O_TRACESYSGOOD);
        live.fork_tracer = Some((
            number,
            tracer.map_err(|error| format!("it cannot be watched: {error}"))?,
        ));
        Ok(())
    }

    fn cancel_checkpoint(&mut self, slot: Slot, number: u32) -> io::Result<()> {
        let live = self
            .sandboxes
            .get_mut(&slot)
            .and_then(|sandbox| sandbox.interpreter.as_mut());
        match live {
            Some(Live {
                fork_tracer: Some((watched, tracer)),
                ..
            }) if *watched == number => {
                // If it has just ended, its exit is reported separately.
                let _ = tracer.cancel();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Handles a stop of a traced interpreter: one step closer to its fork point, or at it.
    fn fork_tracer_stopped(&mut self, slot: Slot, stopped: StopReason) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
            return Ok(());
        };
        let Some(live) = &mut sandbox.interpreter else {
            return Ok(());
        };
        let Some((number, tracer)) = &mut live.fork_tracer else {
            return Ok(());
        };
        let number = *number;
        let checkpointed = match tracer.step(stopped) {
            Ok(None) => return Ok(()),
            Ok(Some(saved)) => {
                let waiter = StopWaiter {
                    sigchld: &self.children,
                };
                copy_at(live, &waiter, saved).map_err(|error| {
                    // It may be executing code from its memory.
                    if let Some(twin) = live.twin.take() {
                        end_twin(&mut self.ending, slot, &twin);
                    }
                    format!("its memory could not be copied: {error}")
                })
            }
            Err(error) => {
                let _ = sys::detach(live.pid);
                Err(error.to_string())
            }
        };
        live.fork_tracer = None;
        match checkpointed {
            Ok(twin) => {
                if let Some(newest) = sandbox.checkpoints.values().next_back() {
                    set_oom_score_adj(newest.pid, OOM_SCORE_ADJ_OF_OLDER);
                }
                set_oom_score_adj(twin.pid, OOM_SCORE_ADJ_OF_NEWEST);
                sandbox.checkpoints.insert(number, twin);
                self.report(&WardenEvent::Checkpointed { slot, number }, &[])
            }
            Err(why) => self.report(&WardenEvent::CheckpointFailed { slot, number, why }, &[]),
        }
    }

    /// Handles the exit of an interpreter. Its parent is its snapshot process, which never waits
    /// for it, so the kernel still has its exit status. Once the snapshot process is gone, the
    /// first process of the family reaps it.
    fn interpreter_ended(&mut self, slot: Slot) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
            return Ok(());
        };
        let Some(live) = sandbox.interpreter.take() else {
            return Ok(());
        };
        // If it was reaped already, it died with its snapshot process, which the kernel kills when
        // memory runs out.
        let status = exit_status(live.pid).unwrap_or(libc::SIGKILL);
        if let Some(twin) = &live.twin {
            end_twin(&mut self.ending, slot, twin);
        }
        if let Some((number, _)) = live.fork_tracer {
            self.report(
                &WardenEvent::CheckpointFailed {
                    slot,
                    number,
                    why: "it ended".to_owned(),
                },
                &[],
            )?;
        }
        self.report(
            &WardenEvent::InterpreterExited {
                slot,
                generation: live.generation,
                status,
            },
            &[],
        )?;
        self.report_if_gone(slot)
    }

    /// Handles the exit of a sandbox's init, which takes every process inside with it.
    fn init_ended(&mut self, slot: Slot) -> io::Result<()> {
        if let Some(sandbox) = self.sandboxes.get_mut(&slot) {
            sandbox.alive = false;
        }
        self.destroy(slot)?;
        self.report_if_gone(slot)
    }

    /// Kills an origin that could not be copied: it may be executing code from its memory.
    fn end_origin(&mut self, origin: ForkOrigin) {
        match origin {
            // Its end is reported now and not when it is reaped, so that the server receives it
            // before the failed fork and waits for the next zygote. The loop detects a server that
            // is gone.
            ForkOrigin::Zygote => {
                if let Some(zygote) = self
                    .zygotes
                    .iter_mut()
                    .rev()
                    .find(|zygote| zygote.twin.is_some())
                {
                    let _ = rustix::process::kill_process(zygote.pid, Signal::KILL);
                    zygote.twin = None;
                    zygote.replaced = true;
                    let why = "it could not be copied and was ended".to_owned();
                    let _ = self.report(
                        &WardenEvent::ZygoteEnded {
                            was_warm: true,
                            why,
                        },
                        &[],
                    );
                }
            }
            // Its end is reported when it is reaped.
            ForkOrigin::Checkpoint { slot, number, .. } => {
                let twin = self
                    .sandboxes
                    .get(&slot)
                    .and_then(|sandbox| sandbox.checkpoints.get(&number));
                if let Some(twin) = twin {
                    twin.end();
                }
            }
        }
    }

    fn destroy(&mut self, slot: Slot) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
            return self.report(&WardenEvent::Destroyed { slot }, &[]);
        };
        sandbox.destroy_requested = true;
        sandbox.deferred = None;
        if let Some(init) = &sandbox.init {
            let _ = rustix::process::pidfd_send_signal(init, Signal::KILL);
        }
        let (family, has_init) = (sandbox.family, sandbox.init.is_some());
        let checkpoints = std::mem::take(&mut sandbox.checkpoints);
        if let Some(live) = &sandbox.interpreter {
            let _ = rustix::process::kill_process(live.pid, Signal::KILL);
        }
        for twin in checkpoints.into_values() {
            end_twin(&mut self.ending, slot, &twin);
        }
        if !has_init
            && !self.is_needed_beside(family, slot)
            && let Some(family) = self.families.get(&family)
        {
            family.end();
        }
        Ok(())
    }

    fn handle_zygote_report(&mut self, pid: Pid) -> io::Result<()> {
        let Some(index) = self.zygotes.iter().position(|zygote| zygote.pid == pid) else {
            return Ok(());
        };
        let zygote = &mut self.zygotes[index];
        let report = match wire::receive::<ZygoteReport>(&zygote.socket) {
            Ok(Some((report, _))) => report,
            // Its end is reported when it is reaped as a child. An unreadable message means that it
            // is broken.
            Ok(None) | Err(_) => {
                zygote.listening = false;
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                return Ok(());
            }
        };
        match report {
            ZygoteReport::Warm { objects } => {
                let (waiter, quick) = (
                    StopWaiter {
                        sigchld: &self.children,
                    },
                    self.setup.zygote.quick,
                );
                let parked = self.zygotes[index].park(&waiter, &objects, quick);
                let parked = parked
                    .and_then(|()| Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?));
                let handle = match parked {
                    Ok(handle) => handle,
                    Err(error) => {
                        let _ = rustix::process::kill_process(pid, Signal::KILL);
                        let zygote = &mut self.zygotes[index];
                        // Its end is reported here, with the reason.
                        (zygote.twin, zygote.replaced) = (None, true);
                        let why = format!("the warm interpreter could not be parked: {error}");
                        return self.report(
                            &WardenEvent::ZygoteEnded {
                                was_warm: false,
                                why,
                            },
                            &[],
                        );
                    }
                };
                // Copies of the older zygotes survive; this process becomes the parent of these
                // orphans.
                for older in &mut self.zygotes[..index] {
                    older.replaced = true;
                    let _ = rustix::process::kill_process(older.pid, Signal::KILL);
                }
                self.report(&WardenEvent::ZygoteReady, &[&handle])
            }
        }
    }

    fn handle_family_reply(&mut self, id: FamilyId) -> io::Result<()> {
        let Some(family) = self.families.get_mut(&id) else {
            return Ok(());
        };
        match wire::receive_lossy::<FamilyReply>(&family.socket) {
            Ok(Some((FamilyReply::Made { slot }, handles))) => {
                let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
                    return Ok(());
                };
                let handles = handles.and_then(|mut handles| {
                    let init = handles.pop().ok_or(io::ErrorKind::InvalidData)?;
                    Ok((init.try_clone()?, init))
                });
                match handles {
                    Ok((theirs, init)) => {
                        if sandbox.destroy_requested {
                            let _ = rustix::process::pidfd_send_signal(&init, Signal::KILL);
                        }
                        sandbox.init = Some(init);
                        self.report_or_fail(slot, &WardenEvent::InitCreated { slot }, &[&theirs])
                    }
                    // Its init ends when its socket is closed, which happens here.
                    Err(error) => {
                        sandbox.alive = false;
                        self.report(
                            &WardenEvent::Failed {
                                slot,
                                why: error.to_string(),
                            },
                            &[],
                        )?;
                        self.report_if_gone(slot)
                    }
                }
            }
            Ok(Some((FamilyReply::Failed { slot, why }, _))) => {
                if let Some(sandbox) = self.sandboxes.get_mut(&slot) {
                    sandbox.alive = false;
                }
                let why = format!("could not make the sandbox's namespaces: {why}");
                self.report(&WardenEvent::Failed { slot, why }, &[])?;
                self.report_if_gone(slot)
            }
            // Its end is reported when it is reaped as a child.
            Ok(None) | Err(_) => {
                family.listening = false;
                family.end();
                Ok(())
            }
        }
    }

    fn handle_init_report(&mut self, slot: Slot) -> io::Result<()> {
        let Some(sandbox) = self.sandboxes.get_mut(&slot) else {
            return Ok(());
        };
        let report = match wire::receive_lossy::<InitReport>(&sandbox.init_socket) {
            Ok(Some((report, Ok(descriptors)))) => Ok(Some((report, descriptors))),
            Ok(Some((_, Err(error)))) => {
                let why = format!("the jail cannot take its descriptors: {error}");
                self.destroy(slot)?;
                return self.report(&WardenEvent::Failed { slot, why }, &[]);
            }
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        };
        match report {
            Ok(Some((InitReport::ListenersOpened { kinds }, sockets))) => self.report_or_fail(
                slot,
                &WardenEvent::ListenersOpened { slot, kinds },
                &sockets.iter().collect::<Vec<_>>(),
            ),
            Ok(Some((InitReport::Ready, mut descriptors))) => {
                sandbox.rules = if descriptors.len() > JOINED_NAMESPACES.len() + 2 {
                    descriptors.pop()
                } else {
                    None
                };
                sandbox.mounts = descriptors.pop();
                sandbox.root = descriptors.pop();
                let namespaces = descriptors
                    .iter()
                    .map(identity_of)
                    .collect::<io::Result<_>>();
                sandbox.namespaces = descriptors;
                let deferred = sandbox.deferred.take();
                match namespaces {
                    Ok(namespaces) => {
                        self.mask_sandbox(slot)?;
                        self.report(&WardenEvent::Prepared { slot, namespaces }, &[])?;
                    }
                    Err(error) => {
                        return self.report(
                            &WardenEvent::Failed {
                                slot,
                                why: error.to_string(),
                            },
                            &[],
                        );
                    }
                }
                deferred.map_or(Ok(()), |(fork, descriptors)| {
                    self.carry_out(fork, descriptors)
                })
            }
            Ok(Some((InitReport::Swept { number }, _))) => {
                self.report(&WardenEvent::Swept { slot, number }, &[])
            }
            Ok(Some((InitReport::Failed { why }, _))) => {
                self.report(&WardenEvent::Failed { slot, why }, &[])
            }
            // Its end is reported when it is reaped as a child.
            Ok(None) | Err(_) => {
                sandbox.listening = false;
                Ok(())
            }
        }
    }

    fn collect_children(&mut self) -> io::Result<()> {
        // The descriptor is only a wake-up; one signal may cover several children.
        let mut note = [0u8; 128];
        while rustix::io::read(&self.children, &mut note).is_ok() {}
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let stopped = StopReason::from_status(status.as_raw());
            if let Some((slot, number)) = self.side_process_of(pid) {
                if stopped == StopReason::Exited {
                    self.side_process_ended(slot, number, status.as_raw())?;
                }
            } else if let Some(slot) = self.slot_where(|live| live.pid == pid) {
                // Exits of interpreters are detected by their pidfds.
                let is_traced = |live: &Live| live.fork_tracer.is_some();
                if stopped != StopReason::Exited
                    && self.sandboxes[&slot]
                        .interpreter
                        .as_ref()
                        .is_some_and(is_traced)
                {
                    self.fork_tracer_stopped(slot, stopped)?;
                }
            } else if stopped != StopReason::Exited {
                // A snapshot process that changed state unexpectedly.
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            } else if let Some(slot) = self.ending.remove(&pid) {
                self.report_if_gone(slot)?;
            } else if let Some(index) = self.zygotes.iter().position(|zygote| zygote.pid == pid) {
                let zygote = self.zygotes.remove(index);
                if !zygote.replaced {
                    let why = zygote.read_stderr();
                    self.report(
                        &WardenEvent::ZygoteEnded {
                            was_warm: zygote.twin.is_some(),
                            why,
                        },
                        &[],
                    )?;
                }
            } else if let Some(id) = self.family_of(pid) {
                self.family_ended(id)?;
            } else if let Some(slot) =
                self.slot_where(|live| live.twin.as_ref().is_some_and(|twin| twin.pid == pid))
            {
                // If the OOM killer took the snapshot process, it took the interpreter too, whose
                // exit is reported separately. An interpreter that lost only its snapshot process
                // continues but can no longer be copied.
                if let Some(live) = self
                    .sandboxes
                    .get_mut(&slot)
                    .and_then(|sandbox| sandbox.interpreter.as_mut())
                {
                    live.twin = None;
                }
            } else {
                self.checkpoint_ended(pid)?;
            }
        }
        Ok(())
    }

    fn slot_where(&self, wanted: impl Fn(&Live) -> bool) -> Option<Slot> {
        let mut all = self.sandboxes.iter();
        all.find(|(_, sandbox)| sandbox.interpreter.as_ref().is_some_and(&wanted))
            .map(|(slot, _)| *slot)
    }

    fn side_process_of(&self, pid: Pid) -> Option<(Slot, u32)> {
        self.sandboxes.iter().find_map(|(slot, sandbox)| {
            let (number, _) = sandbox
                .side_processes
                .iter()
                .find(|(_, process)| **process == pid)?;
            Some((*slot, *number))
        })
    }

    fn side_process_ended(&mut self, slot: Slot, number: u32, status: i32) -> io::Result<()> {
        if let Some(sandbox) = self.sandboxes.get_mut(&slot) {
            sandbox.side_processes.remove(&number);
        }
        self.report(
            &WardenEvent::SideProcessEnded {
                slot,
                number,
                status,
            },
            &[],
        )?;
        self.report_if_gone(slot)
    }

    fn checkpoint_ended(&mut self, pid: Pid) -> io::Result<()> {
        let lost = self.sandboxes.iter_mut().find_map(|(slot, sandbox)| {
            let number = sandbox
                .checkpoints
                .iter()
                .find(|(_, twin)| twin.pid == pid)
                .map(|(number, _)| *number)?;
            sandbox.checkpoints.remove(&number);
            Some((*slot, number))
        });
        match lost {
            Some((slot, number)) => self.report(&WardenEvent::CheckpointLost { slot, number }, &[]),
            None => Ok(()),
        }
    }

    /// Reports that a sandbox is destroyed, once its init, its interpreter, its programs
    /// (`side_processes`) and all its snapshot processes are gone.
    fn report_if_gone(&mut self, slot: Slot) -> io::Result<()> {
        let gone = self.sandboxes.get(&slot).is_some_and(|sandbox| {
            !sandbox.alive
                && sandbox.interpreter.is_none()
                && sandbox.checkpoints.is_empty()
                && sandbox.side_processes.is_empty()
        });
        if !gone || self.ending.values().any(|of| *of == slot) {
            return Ok(());
        }
        let Some(id) = self.sandboxes.get(&slot).map(|sandbox| sandbox.family) else {
            return Ok(());
        };
        match self.families.get(&id) {
            // The last sandbox is gone only when its family is; the family's uid may then be
            // reused.
            Some(family) if !self.is_needed_beside(id, slot) => {
                family.end();
                Ok(())
            }
            _ => {
                self.sandboxes.remove(&slot);
                self.report(&WardenEvent::Destroyed { slot }, &[])
            }
        }
    }

    /// Returns whether a sandbox other than this one needs its family. A sandbox that is being
    /// destroyed and has no init does not: a first process that was stopped would never create that
    /// init.
    fn is_needed_beside(&self, id: FamilyId, slot: Slot) -> bool {
        let needs = |sandbox: &Sandbox| {
            sandbox.family == id && !(sandbox.destroy_requested && sandbox.init.is_none())
        };
        self.sandboxes
            .iter()
            .any(|(other, sandbox)| *other != slot && needs(sandbox))
    }

    fn family_of(&self, first: Pid) -> Option<FamilyId> {
        self.families
            .iter()
            .find(|(_, family)| family.pid == first)
            .map(|(id, _)| *id)
    }

    /// Handles the exit of a family's first process: no process of the family is left.
    fn family_ended(&mut self, id: FamilyId) -> io::Result<()> {
        self.families.remove(&id);
        let members: Vec<Slot> = self
            .sandboxes
            .iter()
            .filter(|(_, sandbox)| sandbox.family == id)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in members {
            // Exits of existing inits are detected by their pidfds.
            if let Some(sandbox) = self
                .sandboxes
                .get_mut(&slot)
                .filter(|sandbox| sandbox.init.is_none())
            {
                sandbox.alive = false;
            }
            self.report_if_gone(slot)?;
        }
        Ok(())
    }

    /// Ends a family whose first sandbox could not be created.
    fn end_family_without_members(&self, id: FamilyId) {
        if !self.sandboxes.values().any(|sandbox| sandbox.family == id)
            && let Some(family) = self.families.get(&id)
        {
            family.end();
        }
    }
}

/// Kills a snapshot process and records whose limits it counts against until it is reaped.
fn end_twin(ending: &mut HashMap<Pid, Slot>, slot: Slot, twin: &Twin) {
    // If its exit was already observed it has been reaped, and must not be waited for again.
    if rustix::process::test_kill_process(twin.pid).is_ok() {
        twin.end();
        ending.insert(twin.pid, slot);
    }
}

/// Copies an interpreter that is at its fork point and resumes it, whether or not the copy
/// succeeded.
fn copy_at(live: &mut Live, waiter: &StopWaiter<'_>, saved: SavedRegisters) -> io::Result<Twin> {
    #[cfg(all(feature = "test-support", debug_assertions))]
    if live.twin.take_if(|twin| twin.hand_over()).is_some() {
        saved.resume_parent(live.pid)?;
        return Err(io::Error::other("its twin was handed over"));
    }
    let copied = match &live.twin {
        Some(twin) => twin.copy(waiter, Some(saved.clone()), true),
        None => Err(io::Error::other("its twin has ended")),
    };
    saved.resume_parent(live.pid)?;
    copied
}

/// Sets `oom_score_adj` of a process. It matters only when memory runs out, so a failure is
/// ignored.
fn set_oom_score_adj(process: Pid, value: &str) {
    let _ = std::fs::write(
        format!("/proc/{}/oom_score_adj", process.as_raw_pid()),
        value,
    );
}

/// Why an interpreter could not be created.
#[derive(Debug, thiserror::Error)]
enum ForkError {
    #[error("its source does not exist")]
    NoOrigin,
    #[error("its sandbox is not ready")]
    NotReady,
    #[error("the first process of its sandbox is not ready yet")]
    InitNotReady,
    #[error("its sandbox belongs to another family")]
    OtherFamily,
    #[error("its memory could not be copied")]
    Copy(#[source] io::Error),
    #[error("it could not enter its sandbox")]
    Enter(#[source] io::Error),
    #[error("its initial checkpoint could not be made")]
    Keep(#[source] io::Error),
}

/// Returns whether a process is stopped.
fn is_stopped(process: Pid) -> bool {
    stat_after_name(process).is_some_and(|stat| stat.trim_start().starts_with('T'))
}

/// Returns the part of `/proc/PID/stat` behind the process name, which may contain anything,
/// including brackets and spaces.
fn stat_after_name(process: Pid) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_pid())).ok()?;
    Some(stat.rsplit_once(')')?.1.to_owned())
}

/// Why a program could not be started.
#[derive(Debug, thiserror::Error)]
enum SideProcessError {
    #[error("its descriptors are incomplete")]
    Fds,
    #[error("its sandbox is not ready")]
    NotReady,
    #[error("programs can be kept apart from the code of a session only where there is landlock")]
    NoRules,
    #[error("its process could not be made")]
    Make(#[source] io::Error),
    /// The warden is in a foreign pid namespace and must not continue.
    #[error("the warden could not return to its own pid namespace")]
    Lost(#[source] io::Error),
}

/// Returns the kernel's name for an open namespace.
fn identity_of(namespace: &OwnedFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", namespace.as_raw_fd()))
}

/// Refuses a snapshot process that is not in the user namespace of its family, whatever program it
/// ran.
fn require_family(twin: Pid, family: &Family) -> io::Result<()> {
    let entered = std::fs::read_link(format!("/proc/{}/ns/user", twin.as_raw_pid()))?;
    if entered == identity_of(&family.user_namespace)? {
        Ok(())
    } else {
        Err(io::Error::other(
            "its twin is not in the user namespace of its family",
        ))
    }
}

/// Reads the wait status of an ended process that its parent has not waited for.
fn exit_status(process: Pid) -> Option<i32> {
    let stat = stat_after_name(process)?;
    let mut fields = stat.split_whitespace();
    // Field 3 of the line is the state, the last field is the status.
    matches!(fields.next()?, "Z" | "X").then_some(())?;
    fields.next_back()?.parse().ok()
}
