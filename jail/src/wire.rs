//! Messages between the server, the guardian and the warden, with descriptors attached.
//!
//! The sockets are SOCK_SEQPACKET: one message is one packet, received whole or not at all. Both
//! ends are ours; no data from inside a sandbox passes through here.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::network::{EgressPorts, ListenerKind};
use crate::sysfs::ShownLimits;
use crate::test_switches::TestSwitches;

/// Larger than any message; the largest is `Setup` with its lists of mounts and variables.
const MAX_MESSAGE_BYTES: usize = 160 * 1024;
/// A session has seven namespaces, a ruleset and a channel.
const MAX_DESCRIPTORS: usize = 64;

/// The number of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Slot(pub u32);

/// The number of a family: a session and everything that was forked from it. It also determines
/// their host uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FamilyId(pub u32);

/// Counts the interpreters of one sandbox, so that a late message about an earlier one is not
/// attributed to the current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Generation(pub u32);

/// The first message to a guardian. It receives no other settings. Carries the warden's end of the
/// command socket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Setup {
    pub identity: Identity,
    /// Mounted inside, read-only, in addition to the system folders that `root` chooses.
    pub binds: Vec<Bind>,
    /// Folders and files of the operator, mounted below the working folder.
    pub mounts: Vec<OperatorMount>,
    /// Paths in those mounts that sessions must not read or change.
    pub masks: Vec<Mask>,
    pub scratch: Scratch,
    /// The same for sandboxes with `apart`, which do the server's own work.
    pub scratch_apart: Scratch,
    pub zygote: ZygoteCommand,
    /// Ports of the egress listeners in every sandbox's network; no egress if `None`.
    pub egress: Option<EgressPorts>,
    /// Limits for machines without cgroups, and some that always apply.
    pub rlimits: Vec<ResourceLimit>,
    /// The same for sandboxes with `apart`.
    pub rlimits_apart: Vec<ResourceLimit>,
    /// Limits that are shown in files inside the sandbox.
    pub shown_limits: ShownLimits,
    /// The server's cgroup directories, to be removed when the server is gone.
    pub cgroups: Vec<PathBuf>,
    /// Layers that this machine lacks and that the operator allows to be missing.
    pub leave_out: Vec<OmittedLayer>,
    /// Adds no field to the message in a build without switches.
    #[serde(flatten)]
    pub test_switches: TestSwitches,
}

/// A host path mounted inside at another path, read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    pub host: PathBuf,
    pub inside: PathBuf,
}

/// A host path of the operator, mounted inside with the session as its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorMount {
    pub host: PathBuf,
    pub inside: PathBuf,
    pub writable: bool,
}

/// A path below an operator's mount that is protected from sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mask {
    pub inside: PathBuf,
    pub rule: MaskRule,
}

/// An operation that sessions must not do with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MaskRule {
    /// The host reads settings from this file. It cannot be read, created or replaced. If it does
    /// not exist, an empty file is created, because only an existing name can be protected. A
    /// folder with that name contains no settings; it can be used but not renamed.
    EnvironmentFile,
    /// The path cannot be read.
    Hidden,
    /// The path cannot be changed.
    ReadOnly,
}

/// Sizes of a sandbox's own tmpfs mounts.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Scratch {
    pub bytes: u64,
    pub files: u64,
    pub shared_memory: u64,
}

/// How the warm interpreter is started inside.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ZygoteCommand {
    pub program: String,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    /// Modules imported before the first fork.
    pub preload: Vec<String>,
    /// A single fork is needed soon; skips work that pays off only with many forks.
    pub quick: bool,
    /// Whether the sessions forked from it may start programs. Informs the runner; the kernel
    /// enforces it.
    pub programs: Programs,
    /// The environment of the interpreters forked from it.
    pub session_environment: Vec<(String, String)>,
}

/// A `setrlimit` limit, soft and hard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceLimit {
    /// The kernel's number of the resource.
    pub resource: u32,
    pub value: u64,
}

impl ResourceLimit {
    /// Returns this limit or the host's hard limit, whichever is stricter: only the host could
    /// raise it.
    pub(crate) fn within_the_hosts(self) -> ResourceLimit {
        let most = crate::sys::hard_limit(self.resource).unwrap_or(u64::MAX);
        ResourceLimit {
            value: self.value.min(most),
            ..self
        }
    }
}

/// A layer that can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OmittedLayer {
    Landlock,
    Seccomp,
}

/// Whether an interpreter, and everything that it forks, may start programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Programs {
    #[default]
    Free,
    /// The kernel refuses `execve`; programs are started only by the server, as side processes.
    Refused,
}

/// A side process: a program that the server starts in a sandbox, beside its interpreter. The spec
/// is sent as a memory file, because it may be larger than a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SideProcessSpec {
    /// The program and its arguments. A program without a slash is looked for in `PATH`.
    pub argv: Vec<String>,
    /// The working directory at the start.
    pub folder: String,
    /// The complete environment.
    pub environment: Vec<(String, String)>,
}

/// Status bytes that a side process reports before it execs its program. This one means that it is
/// locked down and waits at its gate.
pub const SIDE_PROCESS_READY: u8 = b's';
/// `execve` failed; the errno follows, in four bytes.
pub const SIDE_PROCESS_EXEC_FAILED: u8 = b'e';
/// The lock-down failed; a text follows.
pub const SIDE_PROCESS_SETUP_FAILED: u8 = b'b';

/// Commands of the server to the warden.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum WardenCommand {
    /// Starts a warm interpreter that replaces the current one, if any.
    StartZygote,
    /// Creates an empty sandbox. Carries the descriptors of its control group. The first sandbox of
    /// a family creates the family. A family with `apart` has none of the operator's mounts, and so
    /// has its own working folders.
    Prepare {
        slot: Slot,
        family: FamilyId,
        apart: bool,
    },
    /// Creates an interpreter; carries its end of the channel and the descriptors of its control
    /// group. It is locked down and stopped until `Release`. With `keep`, its initial state becomes
    /// the checkpoint `INITIAL_CHECKPOINT` of its sandbox.
    Fork {
        slot: Slot,
        generation: Generation,
        from: ForkOrigin,
        keep: bool,
        programs: Programs,
    },
    /// Resumes a new interpreter, which the server has checked by now.
    Release { slot: Slot, generation: Generation },
    /// Traces the interpreter until it is at its fork point, and makes a checkpoint there.
    Checkpoint { slot: Slot, number: u32 },
    /// Stops tracing it.
    CancelCheckpoint { slot: Slot, number: u32 },
    /// Discards a checkpoint.
    DiscardCheckpoint { slot: Slot, number: u32 },
    /// Starts a program beside the interpreter. Carries a `SideProcessSpec`, the pipe on which the
    /// process reports its status, the gate at which it waits for a byte, its standard output and
    /// error, its standard input if it `has_input`, and the descriptors of its control group.
    StartSideProcess {
        slot: Slot,
        number: u32,
        has_input: bool,
    },
    /// Sends a signal to a program and to the process group that it leads. Ignored for a program
    /// that has ended.
    SignalSideProcess {
        slot: Slot,
        number: u32,
        signal: i32,
    },
    /// Kills every process of the sandbox except its init. The number is returned with the answer,
    /// so that an earlier answer is not mistaken for this one.
    Sweep { slot: Slot, number: u32 },
    /// Masks again, in every sandbox, the files that were replaced from outside. A sandbox in which
    /// that fails is destroyed.
    ReapplyMasks,
    /// Destroys the sandbox.
    Destroy { slot: Slot },
    /// Asks for a `Pong`: a heartbeat by which the server detects a warden that hangs.
    Ping { number: u32 },
}

/// The source of an interpreter's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForkOrigin {
    /// The warm interpreter: a fresh session.
    Zygote,
    Checkpoint {
        slot: Slot,
        number: u32,
        /// The checkpoint is not needed afterwards.
        last: bool,
    },
}

/// The number of the checkpoint of an interpreter's initial state. Other checkpoints have larger
/// numbers.
pub const INITIAL_CHECKPOINT: u32 = 0;

/// Events that the warden reports to the server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
pub enum WardenEvent {
    /// The warden has started; carries its own pidfd.
    Ready,
    /// The answer to `Ping`.
    Pong { number: u32 },
    /// The warm interpreter is ready to fork; carries its pidfd.
    ZygoteReady,
    /// The warm interpreter ended; no fork is possible until the next `StartZygote`.
    ZygoteEnded { was_warm: bool, why: String },
    /// An init exists and waits; carries its pidfd.
    InitCreated { slot: Slot },
    /// The egress listeners of the sandbox's network; carries their sockets.
    ListenersOpened {
        slot: Slot,
        kinds: Vec<ListenerKind>,
    },
    /// The sandbox is complete; these are the namespaces that its interpreters must be in.
    Prepared {
        slot: Slot,
        namespaces: Vec<PathBuf>,
    },
    /// An interpreter was created and is stopped; carries its pidfd.
    Forked { slot: Slot, generation: Generation },
    /// An interpreter ended; the status is the kernel's wait status.
    InterpreterExited {
        slot: Slot,
        generation: Generation,
        status: i32,
    },
    /// A process was created that will exec a program; carries its pidfd.
    SideProcessCreated { slot: Slot, number: u32 },
    /// The program's process could not be created.
    SideProcessFailed {
        slot: Slot,
        number: u32,
        why: String,
    },
    /// The program ended; the status is the kernel's wait status.
    SideProcessEnded {
        slot: Slot,
        number: u32,
        status: i32,
    },
    /// The interpreter is traced and may be asked to go to its fork point.
    TracingStarted { slot: Slot, number: u32 },
    /// The checkpoint exists.
    Checkpointed { slot: Slot, number: u32 },
    /// The interpreter continues, and there is no checkpoint.
    CheckpointFailed {
        slot: Slot,
        number: u32,
        why: String,
    },
    /// A checkpoint was lost without a `DiscardCheckpoint`: the kernel needed its memory.
    CheckpointLost { slot: Slot, number: u32 },
    /// No process except the init is left in the sandbox, and every sweep up to this number is
    /// done.
    Swept { slot: Slot, number: u32 },
    /// The sandbox ended and no part of it is left.
    Destroyed { slot: Slot },
    /// A sandbox could not be created, or an interpreter could not be forked.
    Failed { slot: Slot, why: String },
    /// The warden cannot continue.
    WardenFailed { why: String },
}

/// A message, and its descriptors unless this process had no room for them.
pub type Received<M> = (M, io::Result<Vec<OwnedFd>>);

/// Creates a pair of connected packet sockets.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (one, other) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((one, other))
}

/// Sends one message with descriptors.
pub fn send<M: Serialize>(
    socket: impl AsFd,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(socket, message, descriptors, SendFlags::NOSIGNAL)
}

/// Sends like `send`, but fails instead of blocking if the other end does not read.
pub(crate) fn send_nonblocking<M: Serialize>(
    socket: impl AsFd,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    send_with(
        socket,
        message,
        descriptors,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )
}

fn send_with<M: Serialize>(
    socket: impl AsFd,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE_BYTES || descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the message exceeds the size limit",
        ));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "the buffer holds MAX_DESCRIPTORS");
    }
    rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)
    })?;
    Ok(())
}

/// Receives one message with its descriptors; `None` when the other end is closed. A message that
/// lost descriptors is an error.
pub fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    match receive_lossy(socket)? {
        Some((message, descriptors)) => Ok(Some((message, descriptors?))),
        None => Ok(None),
    }
}

/// Receives like `receive`, but returns a message even if this process has no room for its
/// descriptors. The outer error concerns the socket, the inner one the descriptors.
pub fn receive_lossy<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<Received<M>>> {
    // The length is read first: a buffer for the largest message would add to the memory of every
    // process that is forked from this one.
    let look = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, length) = rustix::io::retry_on_intr(|| rustix::net::recv(&socket, &mut [0; 1], look))?;
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message exceeds the size limit",
        ));
    }
    let mut buffer = vec![0; length.max(1)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message was truncated",
        ));
    }
    let descriptors: Vec<OwnedFd> = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Ok(None);
    }
    // The buffer holds as many descriptors as a sender may send, so only this process's own limit
    // truncates them.
    let lost = received.flags.contains(ReturnFlags::CTRUNC);
    let descriptors = if lost {
        Err(rustix::io::Errno::MFILE.into())
    } else {
        Ok(descriptors)
    };
    Ok(Some((
        serde_json::from_slice(&buffer[..received.bytes])?,
        descriptors,
    )))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (one, other) = pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send(
            &one,
            &WardenCommand::Prepare {
                slot: Slot(7),
                family: FamilyId(3),
                apart: true,
            },
            &[writer.as_fd()],
        )
        .unwrap();
        let (message, mut descriptors) = receive::<WardenCommand>(&other).unwrap().unwrap();
        assert!(matches!(
            message,
            WardenCommand::Prepare {
                slot: Slot(7),
                family: FamilyId(3),
                apart: true
            }
        ));
        let mut passed = std::fs::File::from(descriptors.remove(0));
        passed.write_all(b"x").unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn a_closed_socket_is_the_end() {
        let (one, other) = pair().unwrap();
        drop(one);
        assert!(receive::<WardenCommand>(&other).unwrap().is_none());
    }

    #[test]
    fn a_message_without_room_for_its_descriptors_is_still_read() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        const CHILD: &str = "CELLBLOCK_TEST_WITHOUT_DESCRIPTORS";
        if std::env::var_os(CHILD).is_none() {
            // The limit applies to a whole process, so the test runs in its own.
            let name = "wire::tests::a_message_without_room_for_its_descriptors_is_still_read";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let status = child
                .args(["--exact", name, "--test-threads=1"])
                .env(CHILD, "1")
                .status()
                .unwrap();
            assert!(status.success());
            return;
        }
        let (one, other) = pair().unwrap();
        let (_reader, writer) = std::io::pipe().unwrap();
        for _ in 0..2 {
            send(
                &one,
                &WardenCommand::Prepare {
                    slot: Slot(7),
                    family: FamilyId(3),
                    apart: false,
                },
                &[writer.as_fd()],
            )
            .unwrap();
        }
        let limit = getrlimit(Resource::Nofile);
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(0),
                ..limit
            },
        )
        .unwrap();
        let cut = receive_lossy::<WardenCommand>(&other);
        setrlimit(Resource::Nofile, limit).unwrap();
        let whole = receive_lossy::<WardenCommand>(&other);
        assert!(
            matches!(
                cut,
                Ok(Some((WardenCommand::Prepare { slot: Slot(7), .. }, Err(_))))
            ),
            "{cut:?}"
        );
        assert!(
            matches!(whole, Ok(Some((WardenCommand::Prepare { .. }, Ok(_))))),
            "{whole:?}"
        ); // control
    }

    #[test]
    fn a_message_that_is_too_large_is_refused_by_the_sender() {
        let (one, _other) = pair().unwrap();
        let why = "x".repeat(MAX_MESSAGE_BYTES);
        assert!(send(&one, &WardenEvent::WardenFailed { why }, &[]).is_err());
    }
}
