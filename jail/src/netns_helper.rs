//! Helper process (`cb-netns-helper`) in a container's network, started there by an engine, for a
//! server that may not enter the network itself.
//!
//! ```text
//! server                                    cb-netns-helper, a fresh process of the same binary
//!  │ listens on a Unix socket                  │ was started in the container's network
//!  │◄─────── a shared secret ──────────────────│ connects
//!  │──────── wanted listeners ────────────────►│ refuses if this is the server's network, or
//!  │                                           │ any other interface than loopback is up
//!  │◄─────── sockets, or an error ─────────────│ makes every address local, opens the
//!  │                                           │ listeners, exits
//! ```
//!
//! A process that could connect to that socket could send the server its own listeners. So the
//! socket is in a folder that only the server's user can enter, each helper has its own, only one
//! connection is accepted on it, and the connection must begin with the secret. Every message on it
//! is of bounded size and has a timeout.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use crate::netns_listeners::{
    self, NamespaceId, NetnsAccess, NetnsError, OPEN_TIMEOUT, OpenRequest,
};
use crate::network::{EgressPorts, ListenerKind};
use crate::{sys, wire};

/// The argument that makes the server's binary a netns helper. The path of the socket follows.
pub const ARGUMENT: &str = "--cellblock-jail-netns-helper";
/// The environment variable with its secret. The arguments of a process are readable by all users.
pub const SECRET_VARIABLE: &str = "CELLBLOCK_NETNS_HELPER_SECRET";

/// Timeout for the connection of a helper. An engine starts it in the meantime.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// The socket on which the server waits for one helper.
#[derive(Debug)]
pub struct HelperSocket {
    socket: OwnedFd,
    path: PathBuf,
    secret: String,
}

/// The first message of a helper.
#[derive(Serialize, Deserialize)]
struct Greeting {
    secret: String,
}

impl HelperSocket {
    /// Opens the socket at a new path, in a folder that only the server's user can enter, for a
    /// helper that has the secret.
    pub fn open(path: &Path, secret: &str) -> io::Result<HelperSocket> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let socket = packet_socket()?;
        // Through the folder's descriptor, because socket addresses are short.
        let folder = File::open(folder)?;
        let address = Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(name);
        rustix::net::bind(&socket, &SocketAddrUnix::new(address)?)?;
        let listening = HelperSocket {
            socket,
            path: path.to_owned(),
            secret: secret.to_owned(),
        };
        // The helper is root without rights over files, or root of a user namespace. No other user
        // can reach this file.
        fs::set_permissions(path, Permissions::from_mode(0o666))?;
        rustix::net::listen(&listening.socket, 1)?;
        Ok(listening)
    }

    /// Waits for the helper and makes it open the listeners.
    pub fn receive_listeners(
        &self,
        wanted: &EgressPorts,
    ) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsError> {
        let attempt = || NetnsError::failed("receive a reply from the netns helper");
        let helper = self.accept().map_err(attempt())?;
        let server = NamespaceId::of_own_network()
            .map_err(NetnsError::failed("look at the server's network"))?;
        let request = OpenRequest {
            access: NetnsAccess::Joined { server },
            ports: wanted.clone(),
        };
        wire::send(&helper, &request, &[]).map_err(attempt())?;
        let reply = wire::receive(&helper)
            .and_then(|heard| heard.ok_or_else(ended))
            .map_err(attempt())?;
        netns_listeners::check_reply(reply, wanted)
    }

    /// Accepts one connection, if it begins with the secret.
    fn accept(&self) -> io::Result<OwnedFd> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(CONNECT_TIMEOUT))?;
        let accept = || rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC);
        let helper = rustix::io::retry_on_intr(accept)?;
        sockopt::set_socket_timeout(&helper, sockopt::Timeout::Recv, Some(OPEN_TIMEOUT))?;
        match wire::receive::<Greeting>(&helper)?.ok_or_else(ended)? {
            (Greeting { secret }, descriptors)
                if secret == self.secret && descriptors.is_empty() =>
            {
                Ok(helper)
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the connection does not begin with the secret",
            )),
        }
    }

    /// Stops accepting. A helper that has already connected is still served; a waiting call
    /// returns.
    pub fn close(&self) {
        // The kernel refuses this only for a descriptor that is not such a socket.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for HelperSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn ended() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

fn packet_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Opens listeners in this process's network and sends them to the socket named by the second
/// argument.
pub fn main() -> ExitCode {
    netns_listeners::exit_code(serve())
}

fn serve() -> io::Result<()> {
    rustix::thread::set_name(c"cb-netns-helper")?;
    let path = std::env::args_os()
        .nth(2)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let secret = std::env::var(SECRET_VARIABLE).map_err(io::Error::other)?;
    let server = packet_socket()?;
    rustix::net::connect(&server, &SocketAddrUnix::new(Path::new(&path))?)?;
    sockopt::set_socket_timeout(&server, sockopt::Timeout::Recv, Some(OPEN_TIMEOUT))?;
    wire::send(&server, &Greeting { secret }, &[])?;
    netns_listeners::serve(&server)
}

/// The files that a process of a program needs, in addition to the program itself.
#[derive(Debug, PartialEq, Eq)]
pub struct Libraries {
    /// The dynamic loader; a program without one needs no other files either.
    pub loader: Option<PathBuf>,
    pub shared: Vec<PathBuf>,
}

impl Libraries {
    /// Returns the files of this process.
    pub fn own() -> io::Result<Libraries> {
        let maps = fs::read_to_string("/proc/self/maps")?;
        Ok(Libraries::of(
            &maps,
            &std::env::current_exe()?,
            sys::loader_address(),
        ))
    }

    /// Finds the files in a list of mappings in the kernel's format. A file that was replaced since
    /// then is returned in its current version: a new process loads that one.
    fn of(maps: &str, program: &Path, loader_address: u64) -> Libraries {
        let mappings = || maps.lines().filter_map(Mapping::read);
        let holds_loader = |mapping: &Mapping<'_>| mapping.addresses.contains(&loader_address);
        let loader = mappings()
            .find(holds_loader)
            .map(|mapping| mapping.file.to_owned());
        let mut shared: Vec<PathBuf> = Vec::new();
        for Mapping { file, .. } in mappings().filter(|mapping| mapping.is_code) {
            if file != program
                && Some(file) != loader.as_deref()
                && !shared.iter().any(|known| known == file)
            {
                shared.push(file.to_owned());
            }
        }
        Libraries { loader, shared }
    }
}

/// One line of the list: a mapped part of a file.
struct Mapping<'a> {
    addresses: std::ops::Range<u64>,
    is_code: bool,
    file: &'a Path,
}

impl Mapping<'_> {
    /// Parses a line. Returns `None` for memory without a file.
    fn read(line: &str) -> Option<Mapping<'_>> {
        // address-address rights offset device inode      path
        let (fields, path) = line.split_at(line.find('/')?);
        let mut fields = fields.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let is_code = fields.next()?.contains('x');
        let file = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
        Some(Mapping {
            addresses: number(start)?..number(end)?,
            is_code,
            file,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::netns_listeners::OpenReply;

    const MAPS: &str = "\
55d0c8a00000-55d0c8b00000 r--p 00000000 fd:01 11 /home/a b/cellblock (deleted)
55d0c8b00000-55d0c9000000 r-xp 00100000 fd:01 11 /home/a b/cellblock (deleted)
55d0ca000000-55d0ca100000 rw-p 00000000 00:00 0  [heap]
7f1000000000-7f1000100000 r--p 00000000 fd:01 21 /usr/lib/locale/C.utf8/LC_CTYPE
7f1000200000-7f1000300000 r-xp 00000000 fd:01 22 /usr/lib/x86_64-linux-gnu/libc-2.31.so
7f1000300000-7f1000400000 r--p 00100000 fd:01 22 /usr/lib/x86_64-linux-gnu/libc-2.31.so
7f1000500000-7f1000600000 r-xp 00000000 fd:01 23 /usr/lib/x86_64-linux-gnu/libgcc_s.so.1
7f1000600000-7f1000700000 r-xp 00100000 fd:01 22 /usr/lib/x86_64-linux-gnu/libc-2.31.so
7f1000800000-7f1000801000 r--p 00000000 fd:01 24 /usr/lib/x86_64-linux-gnu/ld-2.31.so
7f1000801000-7f1000820000 r-xp 00001000 fd:01 24 /usr/lib/x86_64-linux-gnu/ld-2.31.so
7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0  [stack]
7ffd00022000-7ffd00024000 r-xp 00000000 00:00 0  [vdso]
nonsense
";

    #[test]
    fn loader_and_libraries_are_read_from_the_list_of_mappings() {
        let program = Path::new("/home/a b/cellblock");
        let folder = Path::new("/usr/lib/x86_64-linux-gnu");
        let expected = Libraries {
            loader: Some(folder.join("ld-2.31.so")),
            shared: vec![folder.join("libc-2.31.so"), folder.join("libgcc_s.so.1")],
        };
        assert_eq!(Libraries::of(MAPS, program, 0x7f10_0080_0000), expected);
        // A statically linked program.
        let alone = MAPS.lines().take(3).collect::<Vec<_>>().join("\n");
        assert_eq!(
            Libraries::of(&alone, program, 0),
            Libraries {
                loader: None,
                shared: Vec::new()
            }
        );
    }

    #[test]
    fn the_libraries_of_this_process_are_there() {
        let Libraries { loader, shared } = Libraries::own().unwrap();
        assert!(
            loader.iter().chain(&shared).all(|file| file.is_file()),
            "{loader:?} {shared:?}"
        );
        assert_eq!(loader.is_some(), !shared.is_empty());
    }

    fn helper_socket(folder: &tempfile::TempDir) -> Arc<HelperSocket> {
        Arc::new(HelperSocket::open(&folder.path().join("socket"), "right").unwrap())
    }

    fn wanted() -> EgressPorts {
        EgressPorts::Ports(vec![443])
    }

    /// Connects, runs `speak`, and returns the server's result.
    fn result_of(speak: impl FnOnce(&OwnedFd)) -> Result<Vec<(ListenerKind, OwnedFd)>, NetnsError> {
        let folder = tempfile::tempdir().unwrap();
        let listening = helper_socket(&folder);
        let helper = packet_socket().unwrap();
        rustix::net::connect(
            &helper,
            &SocketAddrUnix::new(folder.path().join("socket")).unwrap(),
        )
        .unwrap();
        let server = thread::spawn({
            let listening = listening.clone();
            move || listening.receive_listeners(&wanted())
        });
        speak(&helper);
        drop(helper);
        server.join().unwrap()
    }

    fn greet(helper: &OwnedFd, secret: &str) {
        wire::send(
            helper,
            &Greeting {
                secret: secret.to_owned(),
            },
            &[],
        )
        .unwrap();
    }

    fn answer(helper: &OwnedFd, kinds: Vec<ListenerKind>, sockets: usize) {
        let (
            OpenRequest {
                access,
                ports: asked,
            },
            _,
        ) = wire::receive(helper).unwrap().unwrap();
        assert_eq!(
            (access, asked),
            (
                NetnsAccess::Joined {
                    server: NamespaceId::of_own_network().unwrap()
                },
                wanted()
            )
        );
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        wire::send(
            helper,
            &OpenReply::Opened(kinds),
            &vec![socket.as_fd(); sockets],
        )
        .unwrap();
    }

    #[test]
    fn a_helper_that_sends_the_secret_hands_over_the_listeners() {
        let taken = result_of(|helper| {
            greet(helper, "right");
            answer(helper, vec![ListenerKind::Dns, ListenerKind::Port(443)], 2);
        });
        let kinds: Vec<ListenerKind> = taken.unwrap().into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, [ListenerKind::Dns, ListenerKind::Port(443)]);
    }

    #[test]
    fn any_other_message_is_refused() {
        let is_refused = |what: &str, speak: fn(&OwnedFd)| {
            assert!(
                matches!(result_of(speak), Err(NetnsError::Failed { .. })),
                "{what}"
            );
        };
        is_refused("nothing", |_| {});
        is_refused("another secret", |helper| greet(helper, "wrong"));
        is_refused("no message", |helper| {
            rustix::net::send(helper, b"{", rustix::net::SendFlags::empty()).unwrap();
        });
        is_refused("too much", |helper| {
            sockopt::set_socket_send_buffer_size(helper, 1 << 20).unwrap();
            // It may not fit into the kernel's socket buffer, which is equally good.
            let _ = rustix::net::send(helper, &[b' '; 170_000], rustix::net::SendFlags::empty());
        });
        is_refused("a greeting with a socket", |helper| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            wire::send(
                helper,
                &Greeting {
                    secret: "right".to_owned(),
                },
                &[socket.as_fd()],
            )
            .unwrap();
        });
        is_refused("the end", |helper| greet(helper, "right"));
        is_refused("fewer listeners", |helper| {
            greet(helper, "right");
            answer(helper, vec![ListenerKind::Dns], 1);
        });
        is_refused("another listener", |helper| {
            greet(helper, "right");
            answer(helper, vec![ListenerKind::Dns, ListenerKind::Port(80)], 2);
        });
        is_refused("fewer sockets", |helper| {
            greet(helper, "right");
            answer(helper, vec![ListenerKind::Dns, ListenerKind::Port(443)], 1);
        });
    }

    #[test]
    fn a_closed_socket_serves_an_earlier_connection_and_waits_for_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let listening = helper_socket(&folder);
        let helper = packet_socket().unwrap();
        rustix::net::connect(
            &helper,
            &SocketAddrUnix::new(folder.path().join("socket")).unwrap(),
        )
        .unwrap();
        greet(&helper, "right");
        listening.close();
        assert!(listening.accept().is_ok());
        assert!(listening.accept().is_err());
        drop(listening);
        assert!(!folder.path().join("socket").exists());
    }

    #[test]
    fn a_helper_in_the_servers_own_network_changes_nothing() {
        let (server, helper) = wire::pair().unwrap();
        let own = NamespaceId::of_own_network().unwrap();
        wire::send(
            &server,
            &OpenRequest {
                access: NetnsAccess::Joined { server: own },
                ports: wanted(),
            },
            &[],
        )
        .unwrap();
        netns_listeners::serve(&helper).unwrap();
        let reply = wire::receive(&server).unwrap().unwrap();
        assert!(matches!(
            netns_listeners::check_reply(reply, &wanted()),
            Err(NetnsError::Shared)
        ));
    }
}
