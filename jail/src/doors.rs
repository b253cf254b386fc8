//! Egress listeners (`doors`) in a network namespace that we did not create: that of a container.
//!
//! An engine gives a container a network namespace with only a loopback interface. For our own
//! sandboxes init opens the listeners from inside (`network`). For containers it is done here from
//! outside, so that no process inside ever has rights over the network:
//!
//! ```text
//! server                                    cb-doors, a fresh process of the same binary
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
//! (`porter`). It does the same, except that it is already inside.
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

use crate::network::{self, Door, Doors};
use crate::{sys, wire};

/// The argument that selects this mode of the server's binary.
pub const ARGUMENT: &str = "--cellblock-jail-doors";

/// Timeout for opening the listeners. It takes milliseconds.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Length of a container id, in hexadecimal digits. A shorter name could be part of another.
const DIGITS_OF_A_CONTAINER: usize = 64;

/// Why the listeners could not be opened in a container's network.
#[derive(Debug, thiserror::Error)]
pub enum DoorsError {
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

impl DoorsError {
    pub(crate) fn failed(attempt: &str) -> impl FnOnce(io::Error) -> DoorsError {
        let attempt = attempt.to_owned();
        move |cause| DoorsError::Failed { attempt, cause }
    }
}

/// A network namespace other than the server's own, held open so that it cannot be replaced.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl Namespace {
    /// Pins the network namespace of a container's first process. The engine provides both
    /// arguments and may be on another machine: there the pid means nothing here, or a different
    /// process.
    pub fn of_container(process: u32, container: &str) -> Result<Namespace, DoorsError> {
        let number = i32::try_from(process)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(DoorsError::Elsewhere)?;
        // While this process lives, its pid is not reused. That it lived all the time is checked
        // last.
        let held = rustix::process::pidfd_open(number, PidfdFlags::empty())
            .map_err(|_| DoorsError::Elsewhere)?;
        let folder = format!("/proc/{process}");
        let groups =
            fs::read_to_string(format!("{folder}/cgroup")).map_err(|_| DoorsError::Elsewhere)?;
        if !names_container(&groups, container) {
            return Err(DoorsError::Elsewhere);
        }
        let opened =
            File::open(format!("{folder}/ns/net")).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => DoorsError::Forbidden(error),
                _ => DoorsError::Elsewhere,
            })?;
        if has_ended(&held).map_err(DoorsError::failed("look at the container's first process"))? {
            return Err(DoorsError::Elsewhere);
        }
        Namespace::new(OwnedFd::from(opened))
    }

    /// Wraps a namespace that the caller knows to be the right one.
    pub fn new(network: OwnedFd) -> Result<Namespace, DoorsError> {
        let own = Identity::of_own_network()
            .map_err(DoorsError::failed("look at the server's network"))?;
        if Identity::of(&network).map_err(DoorsError::failed("look at the container's network"))?
            == own
        {
            return Err(DoorsError::Shared);
        }
        Ok(Namespace(network))
    }
}

/// The kernel's identity of a namespace. It is the same for all observers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    device: u64,
    file: u64,
}

impl Identity {
    fn of(namespace: impl AsFd) -> io::Result<Identity> {
        let found = rustix::fs::fstat(namespace)?;
        Ok(Identity {
            device: found.st_dev,
            file: found.st_ino,
        })
    }

    pub(crate) fn of_own_network() -> io::Result<Identity> {
        Identity::of(File::open("/proc/thread-self/ns/net")?)
    }
}

/// Returns whether a list of control groups, in the kernel's format, contains one of this
/// container.
fn names_container(groups: &str, container: &str) -> bool {
    let is_digit = |letter: char| letter.is_ascii_digit() || ('a'..='f').contains(&letter);
    container.len() == DIGITS_OF_A_CONTAINER
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
pub(crate) struct Order {
    pub(crate) entrance: Entrance,
    pub(crate) doors: Doors,
}

/// How that process gets into the container's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Entrance {
    /// It enters; the request carries the namespace.
    Enter,
    /// It was started inside. It must not be in the server's own network.
    Within { server: Identity },
}

/// Its reply. Errors of the kernel are sent as errno values.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Word {
    /// Carries the sockets.
    Opened(Vec<Door>),
    Forbidden(i32),
    Shared,
    Interfaces(Vec<String>),
    Failed(String, i32),
}

/// Opens listeners in a namespace, in a process of `program`, which is the binary of this server.
/// Waits for that process.
///
/// The namespace must have no other way out and must not contain user code yet. A namespace in
/// which this failed is closed, but cannot be used.
pub fn open(
    program: &Path,
    namespace: &Namespace,
    doors: &Doors,
) -> Result<Vec<(Door, OwnedFd)>, DoorsError> {
    let attempt = || DoorsError::failed("start the process that opens doors");
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
    let answer = ask(&ours, namespace, doors);
    drop(ours);
    collect(&mut child, answer.is_err());
    taken_over(
        answer.map_err(DoorsError::failed("hear from the process that opens doors"))?,
        doors,
    )
}

fn ask(helper: &OwnedFd, namespace: &Namespace, doors: &Doors) -> io::Result<(Word, Vec<OwnedFd>)> {
    sockopt::set_socket_timeout(helper, sockopt::Timeout::Recv, Some(LIMIT))?;
    wire::send(
        helper,
        &Order {
            entrance: Entrance::Enter,
            doors: doors.clone(),
        },
        &[namespace.0.as_fd()],
    )?;
    wire::receive(helper)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Checks the reply: exactly the requested listeners, or the error.
pub(crate) fn taken_over(
    (word, sockets): (Word, Vec<OwnedFd>),
    wanted: &Doors,
) -> Result<Vec<(Door, OwnedFd)>, DoorsError> {
    match word {
        Word::Opened(doors) if doors == wanted.kinds() && doors.len() == sockets.len() => {
            Ok(doors.into_iter().zip(sockets).collect())
        }
        Word::Opened(_) => Err(DoorsError::failed("take the doors over")(
            io::ErrorKind::InvalidData.into(),
        )),
        Word::Forbidden(code) => Err(DoorsError::Forbidden(io::Error::from_raw_os_error(code))),
        Word::Shared => Err(DoorsError::Shared),
        Word::Interfaces(names) => Err(DoorsError::Interfaces(names)),
        Word::Failed(attempt, code) => Err(DoorsError::Failed {
            attempt,
            cause: io::Error::from_raw_os_error(code),
        }),
    }
}

/// Waits for the process to exit, and kills it first if it hangs.
fn collect(child: &mut Child, hangs: bool) {
    if hangs {
        // It may have exited in the meantime.
        let _ = child.kill();
    }
    let _ = child.wait();
}

/// Opens the listeners that the server requests on standard input, once.
pub fn main() -> ExitCode {
    let server = sys::take_standard_input();
    told(
        rustix::thread::set_name(c"cb-doors")
            .map_err(io::Error::from)
            .and_then(|()| serve(&server)),
    )
}

/// Reports the error of this process, if there was one.
pub(crate) fn told(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed, and then `eprintln!` would panic.
            let _ = writeln!(io::stderr(), "cellblock: doors were not opened: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Executes the single request of the server and replies to it.
pub(crate) fn serve(server: &OwnedFd) -> io::Result<()> {
    let Some((Order { entrance, doors }, descriptors)) = wire::receive(server)? else {
        return Ok(());
    };
    match enter_and_open(entrance, descriptors.first(), &doors) {
        Ok((doors, sockets)) => {
            let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
            wire::send(server, &Word::Opened(doors), &sockets)
        }
        Err(word) => wire::send(server, &word, &[]),
    }
}

fn enter_and_open(
    entrance: Entrance,
    namespace: Option<&OwnedFd>,
    doors: &Doors,
) -> Result<(Vec<Door>, Vec<OwnedFd>), Word> {
    let step = |attempt: &'static str| {
        move |error: io::Error| Word::Failed(attempt.to_owned(), code_of(&error))
    };
    match entrance {
        Entrance::Enter => enter(namespace).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => Word::Forbidden(code_of(&error)),
            _ => step("enter the container's network")(error),
        })?,
        Entrance::Within { server } => {
            if Identity::of_own_network().map_err(step("look at the container's network"))?
                == server
            {
                return Err(Word::Shared);
            }
        }
    }
    // Before anything is changed: this network may be in use.
    let interfaces =
        network::other_interfaces().map_err(step("list the interfaces of the container"))?;
    if !interfaces.is_empty() {
        return Err(Word::Interfaces(interfaces));
    }
    sys::bring_loopback_up().map_err(step("bring up the loopback interface"))?;
    switch_newer_family_on();
    let opened = network::open(doors).map_err(step("open the ways out"))?;
    network::leads_nowhere(Some(doors)).map_err(step("check the network"))?;
    Ok(opened)
}

fn enter(namespace: Option<&OwnedFd>) -> io::Result<()> {
    let namespace = namespace.ok_or(io::ErrorKind::InvalidData)?;
    let owner = sys::owner_of(namespace)?;
    // That of a rootless engine. Its owner has every right inside and none outside.
    if Identity::of(&owner)? != Identity::of(File::open("/proc/self/ns/user")?)? {
        move_into_link_name_space(owner.as_fd(), Some(LinkNameSpaceType::User))?;
    }
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Engines disable IPv6 if they assign no such address. If it cannot be enabled, the kernel refuses
/// all of it, which is equally closed.
fn switch_newer_family_on() {
    let _ = fs::write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "0");
}

fn code_of(error: &io::Error) -> i32 {
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
            assert!(names_container(&groups, CONTAINER), "{groups}");
        }
        let other = CONTAINER.replace('7', "8");
        assert!(!names_container(
            &format!("0::/docker/{other}\n"),
            CONTAINER
        ));
        assert!(
            !names_container(&format!("0::/docker/{CONTAINER}0\n"), CONTAINER),
            "part of a longer name"
        );
        assert!(!names_container("0::/\n", ""));
        assert!(
            !names_container(&format!("0::/docker/{CONTAINER}\n"), &CONTAINER[..12]),
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
                    Err(DoorsError::Elsewhere)
                ),
                "{process}"
            );
        }
    }

    #[test]
    fn the_servers_own_network_is_never_touched() {
        let own = OwnedFd::from(File::open("/proc/self/ns/net").unwrap());
        assert!(matches!(Namespace::new(own), Err(DoorsError::Shared)));
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
