//! Helper process (`porter`) in a container's network, started there by an engine, for a server
//! that may not enter the network itself.
//!
//! ```text
//! server                                    cb-porter, a fresh process of the same binary
//!  │ listens on a socket, the lodge            │ was started in the container's network
//!  │◄─────── a shared secret (`word`) ─────────│ connects
//!  │──────── wanted listeners ────────────────►│ refuses if this is the server's network, or
//!  │                                           │ any other interface than loopback is up
//!  │◄─────── sockets, or an error ─────────────│ makes every address local, opens the
//!  │                                           │ listeners, exits
//! ```
//!
//! A process that could reach the lodge could send the server its own sockets. So the lodge is in a
//! folder that only the server's user can enter, each porter has its own, only one connection is
//! accepted there, and it must begin with the secret. Every message there is of bounded size and
//! has a timeout.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};

use crate::doors::{self, DoorsError, Entrance, Identity, LIMIT, Order};
use crate::network::{Door, Doors};
use crate::{sys, wire};

/// The argument that makes the server's binary a porter. The path of the lodge follows.
pub const ARGUMENT: &str = "--cellblock-jail-porter";
/// The environment variable with its secret. The arguments of a process are readable by all users.
pub const WORD: &str = "CELLBLOCK_PORTER_WORD";

/// Timeout for the connection of a porter. An engine starts it in the meantime.
const PATIENCE: Duration = Duration::from_secs(60);

/// The socket on which the server waits for one porter.
#[derive(Debug)]
pub struct Lodge {
    socket: OwnedFd,
    path: PathBuf,
    word: String,
}

/// The first message of a porter.
#[derive(Serialize, Deserialize)]
struct Greeting {
    word: String,
}

impl Lodge {
    /// Opens a lodge at a new path, in a folder that only the server's user can enter, for a porter
    /// that has the secret.
    pub fn open(path: &Path, word: &str) -> io::Result<Lodge> {
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
        let lodge = Lodge {
            socket,
            path: path.to_owned(),
            word: word.to_owned(),
        };
        // A porter is root without rights over files, or root of a user namespace. No other user
        // can reach this file.
        fs::set_permissions(path, Permissions::from_mode(0o666))?;
        rustix::net::listen(&lodge.socket, 1)?;
        Ok(lodge)
    }

    /// Waits for the porter and makes it open the listeners.
    pub fn doors(&self, wanted: &Doors) -> Result<Vec<(Door, OwnedFd)>, DoorsError> {
        let attempt = || DoorsError::failed("hear from the porter");
        let porter = self.arrival().map_err(attempt())?;
        let server = Identity::of_own_network()
            .map_err(DoorsError::failed("look at the server's network"))?;
        let order = Order {
            entrance: Entrance::Within { server },
            doors: wanted.clone(),
        };
        wire::send(&porter, &order, &[]).map_err(attempt())?;
        let answer = wire::receive(&porter)
            .and_then(|heard| heard.ok_or_else(ended))
            .map_err(attempt())?;
        doors::taken_over(answer, wanted)
    }

    /// Accepts one connection, if it begins with the secret.
    fn arrival(&self) -> io::Result<OwnedFd> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(PATIENCE))?;
        let accept = || rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC);
        let porter = rustix::io::retry_on_intr(accept)?;
        sockopt::set_socket_timeout(&porter, sockopt::Timeout::Recv, Some(LIMIT))?;
        match wire::receive::<Greeting>(&porter)?.ok_or_else(ended)? {
            (Greeting { word }, descriptors) if word == self.word && descriptors.is_empty() => {
                Ok(porter)
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "somebody else has come",
            )),
        }
    }

    /// Stops accepting. A porter that has already connected is still served; a waiting call
    /// returns.
    pub fn close(&self) {
        // The kernel refuses this only for a descriptor that is not such a socket.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for Lodge {
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

/// Opens listeners in this process's network and sends them to the lodge named by the second
/// argument.
pub fn main() -> ExitCode {
    doors::told(serve())
}

fn serve() -> io::Result<()> {
    rustix::thread::set_name(c"cb-porter")?;
    let path = std::env::args_os()
        .nth(2)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let word = std::env::var(WORD).map_err(io::Error::other)?;
    let server = packet_socket()?;
    rustix::net::connect(&server, &SocketAddrUnix::new(Path::new(&path))?)?;
    sockopt::set_socket_timeout(&server, sockopt::Timeout::Recv, Some(LIMIT))?;
    wire::send(&server, &Greeting { word }, &[])?;
    doors::serve(&server)
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
    use crate::doors::Word;

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

    fn lodge(folder: &tempfile::TempDir) -> Arc<Lodge> {
        Arc::new(Lodge::open(&folder.path().join("lodge"), "right").unwrap())
    }

    fn wanted() -> Doors {
        Doors::Ports(vec![443])
    }

    /// Connects, runs `speak`, and returns the server's result.
    fn said(speak: impl FnOnce(&OwnedFd)) -> Result<Vec<(Door, OwnedFd)>, DoorsError> {
        let folder = tempfile::tempdir().unwrap();
        let lodge = lodge(&folder);
        let porter = packet_socket().unwrap();
        rustix::net::connect(
            &porter,
            &SocketAddrUnix::new(folder.path().join("lodge")).unwrap(),
        )
        .unwrap();
        let server = thread::spawn({
            let lodge = lodge.clone();
            move || lodge.doors(&wanted())
        });
        speak(&porter);
        drop(porter);
        server.join().unwrap()
    }

    fn greet(porter: &OwnedFd, word: &str) {
        wire::send(
            porter,
            &Greeting {
                word: word.to_owned(),
            },
            &[],
        )
        .unwrap();
    }

    fn answer(porter: &OwnedFd, doors: Vec<Door>, sockets: usize) {
        let (
            Order {
                entrance,
                doors: asked,
            },
            _,
        ) = wire::receive(porter).unwrap().unwrap();
        assert_eq!(
            (entrance, asked),
            (
                Entrance::Within {
                    server: Identity::of_own_network().unwrap()
                },
                wanted()
            )
        );
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        wire::send(porter, &Word::Opened(doors), &vec![socket.as_fd(); sockets]).unwrap();
    }

    #[test]
    fn a_porter_that_knows_the_word_hands_over_the_doors() {
        let taken = said(|porter| {
            greet(porter, "right");
            answer(porter, vec![Door::Names, Door::Port(443)], 2);
        });
        let kinds: Vec<Door> = taken.unwrap().into_iter().map(|(door, _)| door).collect();
        assert_eq!(kinds, [Door::Names, Door::Port(443)]);
    }

    #[test]
    fn whoever_says_something_else_is_not_believed() {
        let is_refused = |what: &str, speak: fn(&OwnedFd)| {
            assert!(
                matches!(said(speak), Err(DoorsError::Failed { .. })),
                "{what}"
            );
        };
        is_refused("nothing", |_| {});
        is_refused("another word", |porter| greet(porter, "wrong"));
        is_refused("no message", |porter| {
            rustix::net::send(porter, b"{", rustix::net::SendFlags::empty()).unwrap();
        });
        is_refused("too much", |porter| {
            sockopt::set_socket_send_buffer_size(porter, 1 << 20).unwrap();
            // It may not fit into the kernel's socket buffer, which is equally good.
            let _ = rustix::net::send(porter, &[b' '; 170_000], rustix::net::SendFlags::empty());
        });
        is_refused("a greeting with a socket", |porter| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            wire::send(
                porter,
                &Greeting {
                    word: "right".to_owned(),
                },
                &[socket.as_fd()],
            )
            .unwrap();
        });
        is_refused("the end", |porter| greet(porter, "right"));
        is_refused("fewer doors", |porter| {
            greet(porter, "right");
            answer(porter, vec![Door::Names], 1);
        });
        is_refused("another door", |porter| {
            greet(porter, "right");
            answer(porter, vec![Door::Names, Door::Port(80)], 2);
        });
        is_refused("fewer sockets", |porter| {
            greet(porter, "right");
            answer(porter, vec![Door::Names, Door::Port(443)], 1);
        });
    }

    #[test]
    fn a_lodge_that_is_closed_waits_for_nobody_and_hears_whoever_came_before() {
        let folder = tempfile::tempdir().unwrap();
        let lodge = lodge(&folder);
        let porter = packet_socket().unwrap();
        rustix::net::connect(
            &porter,
            &SocketAddrUnix::new(folder.path().join("lodge")).unwrap(),
        )
        .unwrap();
        greet(&porter, "right");
        lodge.close();
        assert!(lodge.arrival().is_ok());
        assert!(lodge.arrival().is_err());
        drop(lodge);
        assert!(!folder.path().join("lodge").exists());
    }

    #[test]
    fn a_porter_in_the_servers_own_network_touches_nothing() {
        let (server, porter) = wire::pair().unwrap();
        let own = Identity::of_own_network().unwrap();
        wire::send(
            &server,
            &Order {
                entrance: Entrance::Within { server: own },
                doors: wanted(),
            },
            &[],
        )
        .unwrap();
        doors::serve(&porter).unwrap();
        let answer = wire::receive(&server).unwrap().unwrap();
        assert!(matches!(
            doors::taken_over(answer, &wanted()),
            Err(DoorsError::Shared)
        ));
    }
}
