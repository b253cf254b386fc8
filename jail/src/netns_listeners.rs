//! Egress listeners in a network namespace that we did not create: that of a container.
//!
//! An engine gives a container a network namespace with only a loopback interface. For our own
//! sandboxes init opens the listeners from inside (`network`). For containers it is done here from
//! outside, so that no process inside ever has rights over the network:
//!
//! ```text
//! server                                    cb-listeners, a fresh process of the same binary
//!  │ pins the container's namespace           │
//!  │──────── namespace, wanted listeners ────►│ enters the user namespace that owns it, if
//!  │                                          │ that is a different one, then the namespace
//!  │                                          │ refuses if any other interface than the
//!  │                                          │ loopback interface is up
//!  │◄─────── sockets, or an error ────────────│ makes every address local, opens the
//!  │                                          │ listeners, exits
//! ```
//!
//! It is a separate process, because a server thread that had entered the namespace could not be
//! trusted to be back. It lives for milliseconds and leaves nothing behind: a socket belongs to the
//! namespace in which it was created, whichever process holds it.
//!
//! If the server may not enter the namespace, an engine that may starts such a process in it
//! (`netns_helper`). It does the same, except that it is already inside.
//!
//! Whether a container's programs use this kernel's network at all cannot be seen from here: some
//! runtimes bring their own network stack. A caller must receive data through the listeners before
//! it relies on them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::network::{self, EgressPorts, ListenerKind};
use crate::{sys, wire};

/// The argument that selects this mode of the server's binary.
pub const ARGUMENT: &str = "--cellblock-jail-netns-listeners";

/// Timeout for opening the listeners. It takes milliseconds.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Length of a container id, in hexadecimal digits. A shorter name could be part of another.
const CONTAINER_ID_LENGTH: usize = 64;

/// Why the listeners could not be opened in a container's network.
#[derive(Debug, thiserror::Error)]
pub enum NetnsError {
    #[error("the container is not a process of this machine, as far as can be told")]
    Elsewhere,
    #[error(
        "the server may not enter the container's network; only root may, or the user whom a \
         rootless engine belongs to"
    )]
    Forbidden(#[source] io::Error),
    #[error("the container has no network of its own")]
    Shared,
    #[error("the container's network leads elsewhere: {} is up", .0.join(", "))]
    Interfaces(Vec<String>),
    #[error("could not {attempt}")]
    Failed {
        attempt: String,
        #[source]
        cause: io::Error,
    },
}

impl NetnsError {
    pub(crate) fn failed(attempt: &str) -> impl FnOnce(io::Error) -> NetnsError {
        let attempt = attempt.to_owned();
        move |cause| NetnsError::Failed { attempt, cause }
    }
}

/// A network namespace other than the server's own, held open so that it cannot be replaced.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl Namespace {
    /// Pins the network namespace of a container's first process. The engine provides both
    /// arguments and may be on another machine: there the pid means nothing here, or a different
    /// process.
    pub fn of_container(process: u32, container: &str) -> Result<Namespace, NetnsError> {
        let number = i32::try_from(process)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(NetnsError::Elsewhere)?;
        // While this process lives, its pid is not reused. That it lived all the time is checked
        // last.
        let held = rustix::process::pidfd_open(number, PidfdFlags::empty())
            .map_err(|_| NetnsError::Elsewhere)?;
        let folder = format!("/proc/{process}");
        let groups =
            fs::read_to_string(format!("{folder}/cgroup")).map_err(|_| NetnsError::Elsewhere)?;
        if !is_in_cgroup_of(&groups, container) {
            return Err(NetnsError::Elsewhere);
        }
        let opened =
            File::open(format!("{folder}/ns/net")).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => NetnsError::Forbidden(error),
                _ => NetnsError::Elsewhere,
            })?;
        if has_ended(&held).map_err(NetnsError::failed("look at the container's first process"))? {
            return Err(NetnsError::Elsewhere);
        }
        Namespace::new(OwnedFd::from(opened))
    }

    /// Wraps a namespace that the caller knows to be the right one.
    pub fn new(network: OwnedFd) -> Result<Namespace, NetnsError> {
        let own = NamespaceId::of_own_network()
            .map_err(NetnsError::failed("look at the server's network"))?;
        if NamespaceId::of(&network)
            .map_err(NetnsError::failed("look at the container's network"))?
            == own
        {
            return Err(NetnsError::Shared);
        }
        Ok(Namespace(network))
    }
}

/// The kernel's identity of a namespace. It is the same for all observers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamespaceId {
    device: u64,
    file: u64,
}

impl NamespaceId {
    fn of(namespace: impl AsFd) -> io::Result<NamespaceId> {
        let found = rustix::fs::fstat(namespace)?;
        Ok(NamespaceId {
            device: found.st_dev,
            file: found.st_ino,
        })
    }

    pub(crate) fn of_own_network() -> io::Result<NamespaceId> {
        NamespaceId::of(File::open("/proc/thread-self/ns/net")?)
    }
}

/// Returns whether a list of control groups, in the kernel's format, contains one of this
/// container.
fn is_in_cgroup_of(groups: &str, container: &str) -> bool {
    let is_digit = |letter: char| letter.is_ascii_digit() || ('a'..='f').contains(&letter);
    container.len() == CONTAINER_ID_LENGTH
        && container.chars().all(is_digit)
        && groups
            .split(|letter| !is_digit(letter))
            .any(|part| part == container)
}

fn has_ended(process: &OwnedFd) -> io::Result<bool> {
    let mut events = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    Ok(rustix::io::retry_on_intr(|| rustix::event::poll(&mut events, Some(&at_once)))? > 0)
}

/// The request to the process that opens the listeners.
#[derive(Serialize, Deserialize)]
pub(crate) struct OpenRequest {
    pub(crate) access: NetnsAccess,
    pub(crate) ports: EgressPorts,
}

/// How that process gets into the container's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NetnsAccess {
    /// It enters; the request carries the namespace.
    Join,
    /// It was started inside. It must not be in the server's own network.
    Joined { server: NamespaceId },
}

/// Its reply. Errors of the kernel are sent as errno values.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OpenReply {
    /// Carries the sockets.
    Opened(Vec<ListenerKind>),
    Forbidden(i32),
    Shared,
    Interfaces(Vec<String>),
    Failed(String, i32),
}

/// Opens listeners in a namespace, in a process of `program`, which is the binary of this server.
/// Waits for that process.
///
/// The namespace must have no other egress and must not contain user code yet. A namespace in
/// which this failed is closed, but cannot be used.
pub fn open(
    program: &Path,
    namespace: &Namespace,
    ports: &EgressPorts,
) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsError> {
    let attempt = || NetnsError::failed("start the process that opens listeners");
    let (ours, theirs) = wire::pair().map_err(attempt())?;
    let mut child = Command::new(program)
        .arg(ARGUMENT)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(attempt())?;
    let answer = request(&ours, namespace, ports);
    drop(ours);
    reap(&mut child, answer.is_err());
    check_reply(
        answer.map_err(NetnsError::failed(
            "receive a reply from the process that opens listeners",
        ))?,
        ports,
    )
}

fn request(
    helper: &OwnedFd,
    namespace: &Namespace,
    ports: &EgressPorts,
) -> io::Result<(OpenReply, Vec<OwnedFd>)> {
    sockopt::set_socket_timeout(helper, sockopt::Timeout::Recv, Some(OPEN_TIMEOUT))?;
    wire::send(
        helper,
        &OpenRequest {
            access: NetnsAccess::Join,
            ports: ports.clone(),
        },
        &[namespace.0.as_fd()],
    )?;
    wire::receive(helper)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Checks the reply: exactly the requested listeners, or the error.
pub(crate) fn check_reply(
    (reply, sockets): (OpenReply, Vec<OwnedFd>),
    wanted: &EgressPorts,
) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsError> {
    match reply {
        OpenReply::Opened(kinds)
            if kinds == wanted.listener_kinds() && kinds.len() == sockets.len() =>
        {
            Ok(kinds.into_iter().zip(sockets).collect())
        }
        OpenReply::Opened(_) => Err(NetnsError::failed("take over the listeners")(
            io::ErrorKind::InvalidData.into(),
        )),
        OpenReply::Forbidden(code) => {
            Err(NetnsError::Forbidden(io::Error::from_raw_os_error(code)))
        }
        OpenReply::Shared => Err(NetnsError::Shared),
        OpenReply::Interfaces(names) => Err(NetnsError::Interfaces(names)),
        OpenReply::Failed(attempt, code) => Err(NetnsError::Failed {
            attempt,
            cause: io::Error::from_raw_os_error(code),
        }),
    }
}

/// Waits for the process to exit, and kills it first if it hangs.
fn reap(child: &mut Child, hangs: bool) {
    if hangs {
        // It may have exited in the meantime.
        let _ = child.kill();
    }
    let _ = child.wait();
}

/// Opens the listeners that the server requests on standard input, once.
pub fn main() -> ExitCode {
    let server = sys::take_stdin();
    exit_code(
        rustix::thread::set_name(c"cb-listeners")
            .map_err(io::Error::from)
            .and_then(|()| serve(&server)),
    )
}

/// Reports the error of this process, if there was one.
pub(crate) fn exit_code(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed, and then `eprintln!` would panic.
            let _ = writeln!(
                io::stderr(),
                "cellblock: listeners were not opened: {error}"
            );
            ExitCode::FAILURE
        }
    }
}

/// Executes the single request of the server and replies to it.
pub(crate) fn serve(server: &OwnedFd) -> io::Result<()> {
    let Some((OpenRequest { access, ports }, descriptors)) = wire::receive(server)? else {
        return Ok(());
    };
    match join_and_open(access, descriptors.first(), &ports) {
        Ok((kinds, sockets)) => {
            let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
            wire::send(server, &OpenReply::Opened(kinds), &sockets)
        }
        Err(reply) => wire::send(server, &reply, &[]),
    }
}

fn join_and_open(
    access: NetnsAccess,
    namespace: Option<&OwnedFd>,
    ports: &EgressPorts,
) -> Result<(Vec<ListenerKind>, Vec<OwnedFd>), OpenReply> {
    let step = |attempt: &'static str| {
        move |error: io::Error| OpenReply::Failed(attempt.to_owned(), errno_of(&error))
    };
    match access {
        NetnsAccess::Join => join(namespace).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => OpenReply::Forbidden(errno_of(&error)),
            _ => step("enter the container's network")(error),
        })?,
        NetnsAccess::Joined { server } => {
            if NamespaceId::of_own_network().map_err(step("look at the container's network"))?
                == server
            {
                return Err(OpenReply::Shared);
            }
        }
    }
    // Before anything is changed: this network may be in use.
    let interfaces =
        network::other_interfaces().map_err(step("list the interfaces of the container"))?;
    if !interfaces.is_empty() {
        return Err(OpenReply::Interfaces(interfaces));
    }
    sys::bring_loopback_up().map_err(step("bring up the loopback interface"))?;
    enable_ipv6();
    let opened = network::open(ports).map_err(step("open the egress listeners"))?;
    network::verify_isolated(Some(ports)).map_err(step("check the network"))?;
    Ok(opened)
}

fn join(namespace: Option<&OwnedFd>) -> io::Result<()> {
    let namespace = namespace.ok_or(io::ErrorKind::InvalidData)?;
    let owner = sys::owning_user_namespace(namespace)?;
    // That of a rootless engine. Its owner has every right inside and none outside.
    if NamespaceId::of(&owner)? != NamespaceId::of(File::open("/proc/self/ns/user")?)? {
        move_into_link_name_space(owner.as_fd(), Some(LinkNameSpaceType::User))?;
    }
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Engines disable IPv6 if they assign no such address. If it cannot be enabled, the kernel refuses
/// all of it, which is equally closed.
fn enable_ipv6() {
    let _ = fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "0");
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINER: &str = "730210fb17a151013c159a287df4113cbc89879306bd09eeefe1a83100321a07";

    #[test]
    fn a_container_is_known_by_its_control_group() {
        for groups in [
            format!("9:pids:/docker/{CONTAINER}\n1:cpu:/\n"),
            format!("0::/system.slice/docker-{CONTAINER}.scope\n"),
            format!(
                "0::/user.slice/user-1000.slice/user@1000.service/user.slice/\
                 libpod-{CONTAINER}.scope/container\n"
            ),
            format!("0::/../../machine.slice/libpod-{CONTAINER}.scope\n"),
        ] {
            assert!(is_in_cgroup_of(&groups, CONTAINER), "{groups}");
        }
        let other = CONTAINER.replace('7', "8");
        assert!(!is_in_cgroup_of(
            &format!("0::/docker/{other}\n"),
            CONTAINER
        ));
        assert!(
            !is_in_cgroup_of(&format!("0::/docker/{CONTAINER}0\n"), CONTAINER),
            "part of a longer name"
        );
        assert!(!is_in_cgroup_of("0::/\n", ""));
        assert!(
            !is_in_cgroup_of(&format!("0::/docker/{CONTAINER}\n"), &CONTAINER[..12]),
            "a short name is no proof"
        );
    }

    #[test]
    fn a_process_that_is_not_the_containers_is_not_entered() {
        let own = std::process::id();
        for (process, container) in [
            (own, CONTAINER),
            (0, CONTAINER),
            (u32::MAX, CONTAINER),
            (own, ""),
        ] {
            assert!(
                matches!(
                    Namespace::of_container(process, container),
                    Err(NetnsError::Elsewhere)
                ),
                "{process}"
            );
        }
    }

    #[test]
    fn the_servers_own_network_is_never_touched() {
        let own = OwnedFd::from(File::open("/proc/self/ns/net").unwrap());
        assert!(matches!(Namespace::new(own), Err(NetnsError::Shared)));
    }

    #[test]
    fn a_process_that_ended_is_seen_to_have_ended() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let held =
            rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert!(!has_ended(&held).unwrap()); // control
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_ended(&held).unwrap());
    }
}
