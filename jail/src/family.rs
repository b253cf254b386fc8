//! A family: one session and everything that was forked from it, in its own user namespace.
//!
//! A copy of a session is a copy of its memory, so a process with that memory has to enter the
//! sandbox of the copy. It must not have a right that the session does not have. Therefore each
//! family has a user namespace, a child of the warden's:
//!
//! - It owns the namespaces of all sandboxes of the family, so that rights in it suffice to enter
//!   them.
//! - The first copy of the zygote enters it before it holds any user data. Twins, checkpoints and
//!   interpreters all descend from that copy and can never leave it.
//! - One uid is mapped into it; on a server that runs as root, a uid that no other family has.
//! - Its processes are in their own pid namespace, so that they can see and signal no other
//!   process.
//!
//! ```text
//! warden ──clone, mounts──► (short-lived process) ──clone, user and pid ns──► cb-family
//!   │ id maps, gate                                                           │ pid 1 of the
//!   │                                                                         │ family
//!   │───────── "make" + sockets ─────────────────────────────────────────────►│ clone ──► init
//!   │◄──────── "made" + pidfd ────────────────────────────────────────────────│ of a sandbox
//! ```
//!
//! `cb-family` holds no user memory. No process in the family can open it: it is not dumpable, and
//! its memory belongs to the host's user namespace. When it ends, the kernel kills every process in
//! the family.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::process::{DumpableBehavior, Gid, Pid, PidfdFlags, Signal, Uid, WaitOptions};
use serde::{Deserialize, Serialize};

use crate::guardian;
use crate::identity::INSIDE_ID;
use crate::init;
use crate::root::{self, DetachedMount, JailSetupError};
use crate::sys::{self, ForkSide};
use crate::wire::{self, FamilyId, Scratch, Setup, Slot};

/// Requests of the warden to a family's first process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
enum FamilyRequest {
    /// Creates the init of a sandbox. Carries its socket and the descriptors of its control group.
    Make { slot: Slot, scratch: Scratch },
}

/// Replies of a family's first process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub(crate) enum FamilyReply {
    /// The init exists and waits; carries its pidfd.
    Made {
        slot: Slot,
    },
    Failed {
        slot: Slot,
        why: String,
    },
}

/// Result of creating a family: the pid of its first process, or the reason for a failure.
type StartResult = Result<i32, String>;

/// A family as the warden sees it.
pub(crate) struct Family {
    /// Its first process.
    pub(crate) pid: Pid,
    pub(crate) socket: OwnedFd,
    pub(crate) user_namespace: OwnedFd,
    pub(crate) pid_namespace: OwnedFd,
    /// False once the other end of `socket` is closed.
    pub(crate) listening: bool,
}

/// The operator's mounts that the sandboxes of a family see.
pub(crate) enum OperatorMounts {
    /// Opened for this family by the guardian.
    Opened(Vec<DetachedMount>),
    /// They are in the warden's root, and so in this copy of it.
    Staged,
    /// This family has none.
    None,
}

impl Family {
    /// Creates a family without a sandbox. Returns when its first process runs as the family's
    /// user.
    pub(crate) fn start(
        setup: &Setup,
        id: FamilyId,
        mounts: &OperatorMounts,
    ) -> Result<Family, JailSetupError> {
        let failed =
            |cause: io::Error| JailSetupError::new("could not make the family's namespaces", cause);
        let (socket, theirs) = wire::pair().map_err(failed)?;
        let (gate, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|cause| failed(cause.into()))?;
        let maker = match sys::clone_process(libc::CLONE_NEWNS).map_err(failed)? {
            ForkSide::Child => start_first_process(setup, mounts, &theirs, &gate, held),
            ForkSide::Parent(maker) => maker,
        };
        drop((theirs, gate));
        let started = wire::receive::<StartResult>(&socket);
        let _ = rustix::process::waitpid(Some(maker), WaitOptions::empty());
        let (started, _) = started
            .map_err(failed)?
            .ok_or_else(|| failed(io::ErrorKind::UnexpectedEof.into()))?;
        let pid = started.map_err(|why| failed(io::Error::other(why)))?;
        let pid = Pid::from_raw(pid).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let namespaces = write_maps(pid, setup.identity.in_warden(id));
        match namespaces.and_then(|namespaces| {
            rustix::io::write(&held, b"x")?;
            Ok(namespaces)
        }) {
            Ok((user_namespace, pid_namespace)) => Ok(Family {
                pid,
                socket,
                user_namespace,
                pid_namespace,
                listening: true,
            }),
            Err(error) => {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
                let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
                Err(failed(error))
            }
        }
    }

    /// Requests the init of a sandbox. Never blocks: a first process that was stopped does not
    /// read.
    pub(crate) fn make_init(
        &self,
        slot: Slot,
        scratch: Scratch,
        socket: &OwnedFd,
        cgroup_procs: &[OwnedFd],
    ) -> io::Result<()> {
        let passed: Vec<_> = std::iter::once(socket)
            .chain(cgroup_procs)
            .map(AsFd::as_fd)
            .collect();
        wire::send_nonblocking(
            &self.socket,
            &FamilyRequest::Make { slot, scratch },
            &passed,
        )
    }

    /// Kills every process in the family.
    pub(crate) fn end(&self) {
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
    }
}

/// Writes the id maps of a family's user namespace and opens it and the pid namespace.
fn write_maps(first: Pid, id: u32) -> io::Result<(OwnedFd, OwnedFd)> {
    let folder = format!("/proc/{}", first.as_raw_pid());
    let line = format!("{INSIDE_ID} {id} 1\n");
    std::fs::write(format!("{folder}/uid_map"), &line)?;
    std::fs::write(format!("{folder}/gid_map"), &line)?;
    let open = |name: &str| std::fs::File::open(format!("{folder}/ns/{name}")).map(OwnedFd::from);
    Ok((open("user")?, open("pid")?))
}

/// Arranges the mounts of the family, which still requires the warden's rights, and creates its
/// first process. Never returns.
fn start_first_process(
    setup: &Setup,
    mounts: &OperatorMounts,
    warden: &OwnedFd,
    gate: &OwnedFd,
    held: OwnedFd,
) -> ! {
    let arranged = root::remove_warden_proc().and_then(|()| match mounts {
        OperatorMounts::Opened(trees) => root::stage_mounts(trees),
        OperatorMounts::Staged => Ok(()),
        OperatorMounts::None => {
            root::remove_staged_mounts(setup.mounts.len());
            Ok(())
        }
    });
    let started: StartResult = match arranged {
        Err(error) => Err(guardian::error_chain(&error)),
        // A child of the warden, which reaps it.
        Ok(()) => {
            match sys::clone_process(libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_PARENT)
            {
                Ok(ForkSide::Child) => {
                    drop(held);
                    first_process(setup, matches!(mounts, OperatorMounts::None), warden, gate)
                }
                Ok(ForkSide::Parent(first)) => Ok(first.as_raw_pid()),
                Err(error) => Err(error.to_string()),
            }
        }
    };
    let sent = wire::send(warden, &started, &[]);
    sys::exit_now(i32::from(sent.is_err()));
}

/// Runs the first process.
fn first_process(setup: &Setup, apart: bool, warden: &OwnedFd, gate: &OwnedFd) -> ! {
    let status = match serve(setup, apart, warden, gate) {
        Ok(()) => 0,
        // The warden detects its exit; the error cannot be reported to any other process.
        Err(_) => 1,
    };
    sys::exit_now(status)
}

fn serve(setup: &Setup, apart: bool, warden: &OwnedFd, gate: &OwnedFd) -> io::Result<()> {
    sys::close_all_but(&[0, 1, 2, warden.as_raw_fd(), gate.as_raw_fd()]);
    if rustix::io::read(gate, &mut [0])? != 1 {
        return Ok(());
    }
    rustix::thread::set_name(c"cb-family")?;
    // The capabilities are kept: the kernel clears them when a process leaves user 0, which does
    // not exist in here.
    let (uid, gid) = (Uid::from_raw(INSIDE_ID), Gid::from_raw(INSIDE_ID));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    // Its memory is a copy of the warden's; no process of the family may open it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::ignore_sigchld();
    while let Some((FamilyRequest::Make { slot, scratch }, descriptors)) =
        wire::receive::<FamilyRequest>(warden)?
    {
        match clone_init(setup, apart, slot, scratch, descriptors) {
            Ok(init) => wire::send(warden, &FamilyReply::Made { slot }, &[init.as_fd()])?,
            Err(error) => wire::send(
                warden,
                &FamilyReply::Failed {
                    slot,
                    why: error.to_string(),
                },
                &[],
            )?,
        }
    }
    Ok(())
}

fn clone_init(
    setup: &Setup,
    apart: bool,
    slot: Slot,
    scratch: Scratch,
    descriptors: Vec<OwnedFd>,
) -> io::Result<OwnedFd> {
    let mut descriptors = descriptors.into_iter();
    let init_socket = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
    match sys::clone_process(guardian::NAMESPACES)? {
        ForkSide::Child => init::main(init::InitStart {
            warden: init_socket,
            cgroup_procs: descriptors.collect(),
            mounts: if apart {
                Vec::new()
            } else {
                setup.mounts.clone()
            },
            masks: if apart {
                Vec::new()
            } else {
                setup.masks.clone()
            },
            scratch,
            // Below the smallest pid limit of any kernel, with room for some processes before the
            // next sandbox's pids.
            first_process: 16 + slot.0 % 1024 * 16,
            private_work_folder: apart
                || !setup
                    .mounts
                    .iter()
                    .any(|mount| mount.inside == Path::new(root::WORK)),
            egress: setup.egress.clone(),
            leave_out: setup.leave_out.clone(),
            test_switches: setup.test_switches.clone(),
        }),
        ForkSide::Parent(init) => Ok(rustix::process::pidfd_open(init, PidfdFlags::empty())?),
    }
}
