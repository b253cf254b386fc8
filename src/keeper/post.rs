//! Where a keeper is found: a socket in a folder that only its user can enter.
//!
//! A front that finds nobody there binds the socket itself and hands it to the keeper that it
//! starts, so that it can connect at once and nothing has to be waited for. Fronts that start at
//! the same moment take turns; the turn is a lock on the folder. A keeper that leaves removes its
//! socket before it closes it: whoever finds no socket, or one that nobody listens to, may put
//! another in its place.

use std::fmt;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::FlockOperation;
use tokio::net::{UnixListener, UnixStream};

const FOLDER: &str = "keeper";
const EXTENSION: &str = "socket";
/// Connections that may wait to be accepted; the kernel has a limit of its own.
const BACKLOG: i32 = 4096;
/// Characters of a name. With it the path of a socket must have fewer than 108 bytes.
const LONGEST_NAME: usize = 32;

/// A keeper's name. Servers that name the same one have the same sessions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeeperName(String);

impl KeeperName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for KeeperName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<KeeperName, NameError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if text.is_empty() || text.len() > LONGEST_NAME || !text.bytes().all(allowed) {
            return Err(NameError);
        }
        Ok(KeeperName(text.to_owned()))
    }
}

impl fmt::Display for KeeperName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A text that names no keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a keeper's name is 1 to {LONGEST_NAME} letters, digits, `_` or `-`")]
pub struct NameError;

/// The place of one keeper.
#[derive(Debug, Clone)]
pub(super) struct Place {
    folder: PathBuf,
    socket: PathBuf,
}

impl Place {
    pub(super) fn new(runtime_dir: &Path, name: &KeeperName) -> Place {
        let folder = runtime_dir.join(FOLDER);
        let socket = folder.join(format!("{name}.{EXTENSION}"));
        Place { folder, socket }
    }

    /// Connects to whoever listens there; `None` when nobody does.
    pub(super) async fn connect(&self) -> io::Result<Option<UnixStream>> {
        match UnixStream::connect(&self.socket).await {
            Ok(stream) => Ok(Some(stream)),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits until nobody else starts a keeper. The turn ends when the file is dropped.
    pub(super) async fn turn(&self) -> io::Result<File> {
        let folder = self.folder.clone();
        let wait = move || {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)?;
            let turn = File::open(&folder)?;
            rustix::fs::flock(&turn, FlockOperation::LockExclusive)?;
            Ok(turn)
        };
        tokio::task::spawn_blocking(wait)
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Takes the place. Whoever calls this has the turn and has found that nobody listens.
    pub(super) fn bind(&self, _turn: &File) -> io::Result<net::UnixListener> {
        match fs::remove_file(&self.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = net::UnixListener::bind(&self.socket)?;
        fs::set_permissions(&self.socket, Permissions::from_mode(0o600))?;
        Ok(listener)
    }
}

/// Names the keepers that have a socket, alive or not.
pub fn keepers_in(runtime_dir: &Path) -> Vec<KeeperName> {
    let Ok(entries) = fs::read_dir(runtime_dir.join(FOLDER)) else {
        return Vec::new();
    };
    let name = |path: PathBuf| -> Option<KeeperName> {
        let is_socket = path
            .extension()
            .is_some_and(|extension| extension == EXTENSION);
        is_socket
            .then(|| path.file_stem()?.to_str()?.parse().ok())
            .flatten()
    };
    let mut names = entries
        .filter_map(|entry| name(entry.ok()?.path()))
        .collect::<Vec<_>>();
    names.sort();
    names
}

/// A keeper's own hold on its place.
pub struct Post {
    listener: UnixListener,
    socket: PathBuf,
    inode: u64,
}

/// Why a process is no keeper.
#[derive(Debug, thiserror::Error)]
#[error("this command is for the server itself, which starts it when it is needed")]
pub struct NotHandedOver;

impl Post {
    /// Takes over the socket that the front has put in the place of standard output, and leaves
    /// nothing there.
    pub fn handed_over() -> Result<net::UnixListener, NotHandedOver> {
        let listener = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)
            .map_err(|_| NotHandedOver)?;
        if !rustix::net::sockopt::socket_acceptconn(&listener).unwrap_or(false) {
            return Err(NotHandedOver);
        }
        let nothing = File::options()
            .write(true)
            .open("/dev/null")
            .map_err(|_| NotHandedOver)?;
        rustix::stdio::dup2_stdout(&nothing).map_err(|_| NotHandedOver)?;
        Ok(net::UnixListener::from(listener))
    }

    /// Takes the post. Needs a runtime.
    pub fn new(listener: net::UnixListener) -> io::Result<Post> {
        listener.set_nonblocking(true)?;
        // Whoever connects asks the kernel for the process that listens. That was the front; from
        // now on it is this one.
        rustix::net::listen(&listener, BACKLOG)?;
        let address = listener.local_addr()?;
        let socket = address
            .as_pathname()
            .ok_or_else(|| io::Error::other("the socket has no name"))?
            .to_owned();
        let inode = fs::symlink_metadata(&socket)?.ino();
        Ok(Post {
            listener: UnixListener::from_std(listener)?,
            socket,
            inode,
        })
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// A connection that was made and not accepted yet. Asks the kernel, because the runtime hears
    /// of connections only after a while.
    pub(super) fn waiting(&self) -> Option<UnixStream> {
        use rustix::net::SocketFlags;
        let stream =
            rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
                .ok()?;
        UnixStream::from_std(net::UnixStream::from(stream)).ok()
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        // Before the listener is closed: from then on the place may be another's.
        if fs::symlink_metadata(&self.socket).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.socket);
        }
    }
}

/// Tells whether a process of the same user is at the other end.
pub(super) fn is_ours(stream: &UnixStream) -> bool {
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}
