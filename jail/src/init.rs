//! The first process of a sandbox.
//!
//! The first process of a family creates it, in new namespaces that belong to the family's user
//! namespace. It mounts the private parts of the sandbox, creates the user namespace of the
//! session, drops all its rights, and then only waits: it reaps orphans, and on request of the
//! warden kills every other process. As pid 1 of the pid namespace it cannot be killed from inside,
//! and its own exit kills every process in the namespace.
//!
//! ```text
//! init                              warden
//!  │ control group, network          │
//!  │───────── "opened" + sockets ───►│   if there is egress
//!  │ mounts, rules                   │
//!  │ user namespace with its map     │
//!  │ lock-down                       │
//!  │── "ready" + namespaces, rules ─►│
//!  │◄──────── "sweep" ───────────────│   any number of times
//!  │───────── "swept" ──────────────►│
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountAttrFlags;
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use seccompiler::SeccompAction;
use serde::{Deserialize, Serialize};

use crate::identity::INSIDE_ID;
use crate::network::{self, EgressPorts, ListenerKind};
use crate::root::{self, JailSetupError};
use crate::test_switches::TestSwitches;
use crate::wire::{self, Mask, OmittedLayer, OperatorMount, Scratch};
use crate::{landlock, mask, sys};

/// Messages from init to the warden.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum InitReport {
    /// Carries the sockets.
    ListenersOpened {
        kinds: Vec<ListenerKind>,
    },
    /// Carries the namespaces that interpreters join, in the order of `JOINED_NAMESPACES`, their
    /// root directory, its mount namespace, and the landlock rules unless a test left them out.
    Ready,
    Swept {
        number: u32,
    },
    Failed {
        why: String,
    },
}

/// Messages from the warden to init.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum InitRequest {
    Sweep { number: u32 },
}

/// Arguments of init.
pub(crate) struct InitStart {
    pub(crate) warden: OwnedFd,
    /// The descriptors of the sandbox's control group, if a process may enter it by itself.
    pub(crate) cgroup_procs: Vec<OwnedFd>,
    /// The mounts in the family's root that belong to this sandbox.
    pub(crate) mounts: Vec<OperatorMount>,
    /// The protected paths in them.
    pub(crate) masks: Vec<Mask>,
    pub(crate) scratch: Scratch,
    pub(crate) private_work_folder: bool,
    pub(crate) egress: Option<EgressPorts>,
    /// The pid of the first process after init.
    pub(crate) first_process: u32,
    pub(crate) leave_out: Vec<OmittedLayer>,
    pub(crate) test_switches: TestSwitches,
}

/// The namespaces an interpreter joins: the pid namespace for its children, then the others, the
/// user namespace last. It creates its own cgroup namespace.
pub(crate) const JOINED_NAMESPACES: [&str; 6] = ["pid", "mnt", "net", "ipc", "uts", "user"];

/// Runs init; never returns.
pub(crate) fn main(mut start: InitStart) -> ! {
    let mut kept = vec![0, 1, 2, start.warden.as_raw_fd()];
    kept.extend(start.cgroup_procs.iter().map(AsRawFd::as_raw_fd));
    sys::close_all_but(&kept);
    let status = match build(&mut start) {
        Ok(_mounts) => {
            serve_requests(&start.warden);
            0
        }
        Err(error) => {
            let why = crate::guardian::error_chain(&error);
            let _ = wire::send(&start.warden, &InitReport::Failed { why }, &[]);
            1
        }
    };
    sys::exit_now(status);
}

#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error(transparent)]
    Root(#[from] JailSetupError),
    #[error("could not {0}")]
    Step(&'static str, #[source] io::Error),
    #[error(transparent)]
    Landlock(#[from] landlock::LandlockError),
    #[error("could not load the seccomp filter of the sandbox's init")]
    Seccomp(#[source] seccompiler::Error),
}

fn step<T, E: Into<io::Error>>(
    attempt: &'static str,
    result: Result<T, E>,
) -> Result<T, InitError> {
    result.map_err(|cause| InitError::Step(attempt, cause.into()))
}

fn build(start: &mut InitStart) -> Result<Mounts, InitError> {
    step("name init", rustix::thread::set_name(c"cb-init"))?;
    // Taken, so that the descriptors are closed as soon as they have been used.
    step(
        "enter the control group",
        crate::cgroup::enter(&std::mem::take(&mut start.cgroup_procs)),
    )?;
    step(
        "make a cgroup namespace",
        sys::unshare(UnshareFlags::NEWCGROUP),
    )?;
    step(
        "set the host name",
        rustix::system::sethostname(b"cellblock"),
    )?;
    step("bring up the loopback interface", sys::bring_loopback_up())?;
    if let Some(ports) = &start.egress {
        let (kinds, sockets) = step("open the egress listeners", network::open(ports))?;
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        step(
            "hand over the egress listeners",
            wire::send(
                &start.warden,
                &InitReport::ListenersOpened { kinds },
                &sockets,
            ),
        )?;
    }
    step(
        "check the network",
        network::verify_isolated(start.egress.as_ref()),
    )?;

    // The /proc of the family's root shows no process. A handle to it is kept for two kernel
    // settings; the new one is mounted over it.
    let outer_proc = step(
        "open the outer /proc",
        rustix::fs::open(
            "/proc",
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        ),
    )?;
    set_first_pid(&outer_proc, start.first_process);
    let processes = step("make a /proc", root::process_file_system())?;
    step("mount /proc", root::attach(&processes, "/proc"))?;
    if !start.test_switches.mounts_writable() {
        step("cover the rest of /proc", root::cover_proc())?;
    }
    mount_scratch(start)?;
    if let Some(terminals) = step("make pseudo-terminals", root::terminals())? {
        step(
            "mount the pseudo-terminals",
            root::attach(&terminals, "/dev/pts"),
        )?;
    }
    root::place_staged_mounts(&start.mounts)?;
    mask::apply(&start.masks)?;
    let rules = if start.leave_out.contains(&OmittedLayer::Landlock) {
        None
    } else {
        Some(landlock::ruleset()?)
    };
    let mounts = step("hide the table of mounts", Mounts::leave())?;

    // Every mount above belongs to the family's user namespace. From here on this process, and
    // every interpreter that joins it, is in a user namespace that owns none of them.
    make_user_namespace()?;
    // Afterwards, because the kernel does not create a user namespace for a process in a chroot.
    step("take the root of the sandbox", mounts.enter_root())?;
    forbid_user_namespaces(&outer_proc)?;
    drop(outer_proc);
    let namespaces = JOINED_NAMESPACES.map(|name| File::open(format!("/proc/self/ns/{name}")));
    let namespaces = step(
        "open the namespaces",
        namespaces.into_iter().collect::<io::Result<Vec<_>>>(),
    )?;

    step("give up capabilities", give_up_capabilities())?;
    // Otherwise a session with the same uid could read this process's memory, which is a copy of
    // the warden's.
    step(
        "become unreadable",
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    seccompiler::apply_filter(&own_filter()).map_err(InitError::Seccomp)?;
    let passed = namespaces
        .iter()
        .map(AsFd::as_fd)
        .chain([mounts.root.as_fd(), mounts.namespace.as_fd()])
        .chain(rules.iter().map(AsFd::as_fd));
    step(
        "report",
        wire::send(
            &start.warden,
            &InitReport::Ready,
            &passed.collect::<Vec<_>>(),
        ),
    )?;
    Ok(mounts)
}

/// The mounts of the sandbox, in a mount namespace that contains no process.
///
/// The kernel shows a process the table of its mount namespace, as far as it is below the process's
/// root: `/proc/PID/mountinfo`, with the host paths from which folders were mounted. Here every
/// process is in a copy of the sandbox's mount namespace and has its root in the original. So it
/// reads an empty table, whichever process it asks about, and uses the same files.
pub(crate) struct Mounts {
    root: OwnedFd,
    /// The mounts are destroyed with their namespace.
    namespace: File,
}

impl Mounts {
    /// Leaves the current mount namespace for a copy.
    fn leave() -> io::Result<Mounts> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open("/", flags, Mode::empty())?;
        let namespace = File::open("/proc/self/ns/mnt")?;
        sys::unshare(UnshareFlags::NEWNS)?;
        Ok(Mounts { root, namespace })
    }

    fn enter_root(&self) -> io::Result<()> {
        enter_root(&self.root)
    }
}

/// Makes a folder the root of this process.
pub(crate) fn enter_root(root: &OwnedFd) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    Ok(rustix::process::chroot(".")?)
}

/// Creates the session's user namespace and maps the family's only user into it.
fn make_user_namespace() -> Result<(), InitError> {
    // The files below are accessible only if this process is dumpable.
    step(
        "become readable",
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable),
    )?;
    step("make a user namespace", sys::unshare(UnshareFlags::NEWUSER))?;
    let map = format!("{INSIDE_ID} {INSIDE_ID} 1\n");
    // The kernel requires this of a process that maps its own group.
    step(
        "give up the right to change groups",
        std::fs::write("/proc/self/setgroups", "deny"),
    )?;
    step(
        "map the session's user",
        std::fs::write("/proc/self/uid_map", &map),
    )?;
    step(
        "map the session's group",
        std::fs::write("/proc/self/gid_map", &map),
    )
}

fn mount_scratch(start: &InitStart) -> Result<(), InitError> {
    let bytes = start.scratch.bytes.to_string();
    let files = start.scratch.files.to_string();
    let shared = start.scratch.shared_memory.to_string();
    let owner = INSIDE_ID.to_string();
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let folder = |mode: &str, size: &str| {
        let options = [
            ("mode", mode),
            ("size", size),
            ("nr_inodes", files.as_str()),
            ("uid", owner.as_str()),
            ("gid", owner.as_str()),
        ];
        root::memory_file_system(&options, attributes)
    };
    let temporary = step("make /tmp", folder("1777", &bytes))?;
    step("mount /tmp", root::attach(&temporary, "/tmp"))?;
    step(
        "make the home folder",
        rustix::fs::mkdir(root::HOME, Mode::from(0o700)),
    )?;
    let shm = step("make /dev/shm", folder("1777", &shared))?;
    step("mount /dev/shm", root::attach(&shm, "/dev/shm"))?;
    if start.private_work_folder {
        let work = step("make the working folder", folder("0755", &bytes))?;
        step("mount the working folder", root::attach(&work, root::WORK))?;
    }
    Ok(())
}

/// Makes pids start at a different number in each sandbox: libraries detect a fork by a changed
/// pid.
fn set_first_pid(outer_proc: &OwnedFd, first: u32) {
    let last = rustix::fs::openat(
        outer_proc,
        "sys/kernel/ns_last_pid",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    // A kernel without this setting starts all sandboxes at the same pid; state that must differ is
    // renewed in any case.
    if let Ok(last) = last {
        let _ = File::from(last).write_all((first - 1).to_string().as_bytes());
    }
}

/// A second guard in addition to the seccomp filter: the kernel itself allows zero user namespaces
/// below this one.
fn forbid_user_namespaces(outer_proc: &OwnedFd) -> Result<(), InitError> {
    let path = "sys/user/max_user_namespaces";
    let limit = rustix::fs::openat(
        outer_proc,
        path,
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let limit = step("open the limit of user namespaces", limit)?;
    step("forbid user namespaces", File::from(limit).write_all(b"0"))
}

pub(crate) fn give_up_capabilities() -> io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // An older kernel does not know the newest capabilities.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}

/// Allows the few calls that init needs from now on.
fn own_filter() -> seccompiler::BpfProgram {
    let calls = [
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_ppoll,
        libc::SYS_rt_sigaction,
        libc::SYS_kill,
        libc::SYS_exit_group,
        libc::SYS_rt_sigreturn,
        libc::SYS_close,
        libc::SYS_brk,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_restart_syscall,
        libc::SYS_fcntl,
    ];
    let mut rules: std::collections::BTreeMap<i64, Vec<seccompiler::SeccompRule>> =
        calls.map(|call| (call, Vec::new())).into();
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_poll, Vec::new());
    let arch = seccompiler::TargetArch::try_from(std::env::consts::ARCH)
        .expect("Cellblock is built for x86-64 and aarch64 only");
    seccompiler::SeccompFilter::new(
        rules,
        SeccompAction::KillProcess,
        SeccompAction::Allow,
        arch,
    )
    .and_then(TryInto::try_into)
    .expect("a plain list of calls compiles")
}

/// Executes requests until the warden is gone. The kernel reaps orphans whose parent becomes pid 1.
fn serve_requests(warden: &OwnedFd) {
    let mut sweeping = None;
    sys::ignore_sigchld();
    loop {
        if let Some(number) = sweeping.filter(|_| is_swept()) {
            sweeping = None;
            if wire::send(warden, &InitReport::Swept { number }, &[]).is_err() {
                return;
            }
        }
        let mut events = [PollFd::new(warden, PollFlags::IN)];
        // While sweeping, poll: the last interpreter is reaped by its parent, the zygote, which
        // this process cannot wait for.
        let pause = sweeping.map(|_| rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 500_000,
        });
        match rustix::event::poll(&mut events, pause.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        match wire::receive::<InitRequest>(warden) {
            Ok(Some((InitRequest::Sweep { number }, _))) => {
                // One pass is enough even against a fork bomb: the kernel signals all processes
                // under one lock, and a fork in progress fails if a signal is pending.
                let _ = sys::signal_all(libc::SIGKILL);
                sweeping = Some(number);
            }
            Ok(None) | Err(_) => return,
        }
    }
}

/// Returns whether no other process is left, and kills any that is: a process that was entering the
/// sandbox could not be killed before it had become the session's user.
fn is_swept() -> bool {
    sys::signal_all(libc::SIGKILL).is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}
