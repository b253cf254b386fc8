//! The guardian, the jail's monitor and outermost process: it starts the warden, and outlives the
//! server just long enough to clean up.
//!
//! It is a separate process because creating namespaces needs a single thread. Its standard input
//! is the lifeline to the server: the first message on it is the `Setup`, and end-of-file means
//! that the server is gone. Then the guardian kills the warden, and every sandbox with it, and
//! removes the server's cgroups.
//!
//! On a server that runs as root the guardian keeps root's rights, because they are required for
//! id-mapped mounts; it makes them when the warden requests it. It never touches anything that a
//! session can write to.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::root::{self, DetachedMount, JailSetupError};
use crate::sys::{self, ForkSide};
use crate::wire::{self, FamilyId, OmittedLayer, Setup, WardenEvent};
use crate::{cgroup, idmap, probe, seccomp, warden};

/// The argument that makes the server's binary a guardian.
pub const ARGUMENT: &str = "--cellblock-jail-guardian";

/// The namespaces that every sandbox has, and that the warden also has.
pub(crate) const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Request of the warden to the guardian, and its reply: the operator's mounts for one family.
#[derive(Serialize, Deserialize)]
pub(crate) struct OpenMounts {
    pub(crate) family: FamilyId,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct OpenedMounts {
    pub(crate) error: Option<String>,
}

/// Runs the guardian until the server or the warden ends.
pub fn main() -> ExitCode {
    let lifeline = sys::take_stdin();
    match run(&lifeline) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed, and then `eprintln!` would panic.
            let _ = writeln!(
                io::stderr(),
                "cellblock: the jail's guardian ended: {error}"
            );
            ExitCode::FAILURE
        }
    }
}

fn run(lifeline: &OwnedFd) -> io::Result<()> {
    rustix::thread::set_name(c"cb-guardian")?;
    // A terminal's interrupt is for the server to handle; it must not kill the jail under it.
    let _ = rustix::process::setsid();
    // systemd asks every process of a unit to exit at the same time. The server shuts the jail down
    // in order; a guardian that exited first would leave its control groups behind. Processes that
    // exec other programs unblock all signals (`sys::unblock_signals`).
    sys::block_termination_signals();
    let Some((setup, mut descriptors)) = wire::receive::<Setup>(lifeline)? else {
        return Ok(());
    };
    if descriptors.is_empty() {
        return Err(io::Error::other("the setup message has no socket"));
    }
    let commands = descriptors.remove(0);
    let filters = seccomp::filters();
    if !setup.leave_out.contains(&OmittedLayer::Seccomp)
        && let Err(error) = seccompiler::apply_filter(&filters.jail)
    {
        return report_error(
            &commands,
            &JailSetupError::new(
                "could not load the jail's seccomp filter",
                io::Error::other(error),
            ),
        );
    }
    let home = cgroup::home(&setup.cgroups);
    if let Err(error) = cgroup::enter(&descriptors) {
        return report_error(
            &commands,
            &JailSetupError::new("could not enter the control group", error),
        );
    }
    drop(descriptors);
    let is_root = matches!(setup.identity, Identity::Block { .. });

    // Root opens the host's folders while it still can; an unprivileged user can do so only inside
    // its own user namespace.
    let opened = if is_root {
        root::open_all(&setup.binds, &setup.test_switches).map(Some)
    } else {
        Ok(None)
    };
    let trees = match opened {
        Ok(trees) => trees,
        Err(error) => return report_error(&commands, &error),
    };

    let (ours, theirs) = wire::pair()?;
    let (gate, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let warden = match sys::clone_process(libc::CLONE_NEWUSER | NAMESPACES) {
        Ok(ForkSide::Child) => {
            drop(ours);
            drop(held);
            warden::main(warden::WardenStart {
                gate,
                commands,
                mounts_from_guardian: is_root.then_some(theirs),
                trees,
                filters,
                setup,
            });
        }
        Ok(ForkSide::Parent(pid)) => pid,
        Err(error) => {
            return send_failure(&commands, refused_namespace().refusal(&error));
        }
    };
    drop(theirs);
    drop(gate);
    let watched = rustix::process::pidfd_open(warden, PidfdFlags::empty())?;
    if let Err(error) = write_maps(warden, setup.identity) {
        let error = JailSetupError::new("could not map the user ids of the sandbox", error);
        report_error(&commands, &error)?;
        return Ok(());
    }
    drop(commands);
    // The warden continues when the gate opens; a byte means that the maps are written.
    rustix::io::write(&held, b"x")?;
    drop(held);

    // The warden of an unprivileged user makes no requests, and its end of this socket is closed.
    let requests = is_root.then_some(ours);
    let outcome = watch(lifeline, requests.as_ref(), &watched, &setup);
    let _ = rustix::process::pidfd_send_signal(&watched, Signal::KILL);
    // The kernel reports the warden's exit only after every process of its pid namespace is gone.
    let _ = rustix::process::waitpid(Some(warden), WaitOptions::empty());
    cgroup::clean_up(&setup.cgroups, home.as_deref());
    outcome
}

/// Reports to the server why there is no jail. If the server is gone, no report is needed.
fn report_error(commands: &OwnedFd, error: &JailSetupError) -> io::Result<()> {
    send_failure(commands, error_chain(error))
}

fn send_failure(commands: &OwnedFd, why: String) -> io::Result<()> {
    match wire::send(commands, &WardenEvent::WardenFailed { why }, &[]) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        sent => sent,
    }
}

/// Finds the namespace that cannot be created when all of them together failed, by creating them
/// one by one.
fn refused_namespace() -> probe::NamespaceKind {
    let flags = |kind: &probe::NamespaceKind| UnshareFlags::from_bits_retain(kind.flag as u32);
    let refused = match sys::clone_process(probe::USER_NAMESPACE.flag) {
        Err(_) => return probe::USER_NAMESPACE,
        Ok(ForkSide::Child) => {
            let refused = probe::OTHER_NAMESPACES
                .iter()
                .position(|kind| sys::unshare(flags(kind)).is_err());
            sys::exit_now(refused.map_or(probe::OTHER_NAMESPACES.len(), |position| position) as i32)
        }
        Ok(ForkSide::Parent(pid)) => {
            match rustix::process::waitpid(Some(pid), WaitOptions::empty()) {
                Ok(Some((_, status))) => status.exit_status(),
                _ => None,
            }
        }
    };
    refused
        .and_then(|position| probe::OTHER_NAMESPACES.get(position as usize))
        .copied()
        .unwrap_or(probe::USER_NAMESPACE)
}

/// Returns the texts of an error and of its causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

fn write_maps(warden: Pid, identity: Identity) -> io::Result<()> {
    let folder = format!("/proc/{}", warden.as_raw_pid());
    let (uids, gids) = identity.maps();
    if matches!(identity, Identity::Caller { .. }) {
        // The kernel requires this for an unprivileged gid map.
        std::fs::write(format!("{folder}/setgroups"), "deny")?;
    }
    std::fs::write(format!("{folder}/uid_map"), uids)?;
    std::fs::write(format!("{folder}/gid_map"), gids)
}

/// Serves the warden's requests until the server or the warden is gone.
fn watch(
    lifeline: &OwnedFd,
    requests: Option<&OwnedFd>,
    warden: &OwnedFd,
    setup: &Setup,
) -> io::Result<()> {
    loop {
        let mut events: Vec<_> = [lifeline, warden]
            .into_iter()
            .chain(requests)
            .map(|socket| PollFd::new(socket, PollFlags::IN))
            .collect();
        match rustix::event::poll(&mut events, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = events
            .iter()
            .map(|event| !event.revents().is_empty())
            .collect();
        let [server_gone, warden_gone] = [ready[0], ready[1]];
        if server_gone || warden_gone {
            return Ok(());
        }
        if let (Some(requests), Some(true)) = (requests, ready.get(2)) {
            let Some((OpenMounts { family }, _)) = wire::receive(requests)? else {
                return Ok(());
            };
            let host_id = setup.identity.on_host(family);
            let opened: Result<Vec<DetachedMount>, JailSetupError> = setup
                .mounts
                .iter()
                .map(|mount| idmap::open(mount, host_id))
                .collect();
            match opened {
                Ok(trees) => {
                    let mounts: Vec<_> = trees.iter().map(|tree| tree.as_mount().as_fd()).collect();
                    // Descriptors that cannot be sent fail only this sandbox, not the jail.
                    if let Err(error) = wire::send(requests, &OpenedMounts { error: None }, &mounts)
                    {
                        wire::send(
                            requests,
                            &OpenedMounts {
                                error: Some(error.to_string()),
                            },
                            &[],
                        )?;
                    }
                }
                Err(error) => wire::send(
                    requests,
                    &OpenedMounts {
                        error: Some(error_chain(&error)),
                    },
                    &[],
                )?,
            }
        }
    }
}
