//! The daemon's socket, in a folder that only its user can enter.
//!
//! A frontend that finds no listener binds the socket itself and passes it to the daemon that it
//! starts, so it can connect at once without waiting for the daemon. Frontends that start at the
//! same time are serialised by a lock on the folder. A daemon that exits removes its socket before
//! it closes it, so a frontend that finds no socket, or one without a listener, may replace it.

use std::fmt;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::FlockOperation;
use tokio::net::{UnixListener, UnixStream};

/// The folder was named by an earlier version, whose daemons may still run and whose servers may
/// still look for one. With the same path both find each other and report the other's protocol
/// version; with another path each would start a second daemon and miss the first one's sessions.
const FOLDER: &str = "keeper";
const EXTENSION: &str = "socket";
/// Connections that may wait to be accepted; the kernel has a limit of its own.
const BACKLOG: i32 = 4096;
/// Characters of a name. With it the path of a socket must have fewer than 108 bytes.
const MAX_NAME_LENGTH: usize = 32;

/// The name of a daemon. Servers that use the same name share its sessions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DaemonName(String);

impl DaemonName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DaemonName {
    type Err = InvalidDaemonName;

    fn from_str(text: &str) -> Result<DaemonName, InvalidDaemonName> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if text.is_empty() || text.len() > MAX_NAME_LENGTH || !text.bytes().all(allowed) {
            return Err(InvalidDaemonName);
        }
        Ok(DaemonName(text.to_owned()))
    }
}

impl fmt::Display for DaemonName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// A text that is not a valid name of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name of a session daemon is 1 to {MAX_NAME_LENGTH} letters, digits, `_` or `-`")]
pub struct InvalidDaemonName;

/// Where the socket of one daemon is.
#[derive(Debug, Clone)]
pub(super) struct SocketPath {
    folder: PathBuf,
    socket: PathBuf,
}

/// The exclusive right to start daemons of a folder. Dropping it releases the lock.
pub(super) struct StartLock {
    _folder: File,
}

impl SocketPath {
    pub(super) fn new(runtime_dir: &Path, name: &DaemonName) -> SocketPath {
        let folder = socket_folder(runtime_dir);
        let socket = folder.join(format!("{name}.{EXTENSION}"));
        SocketPath { folder, socket }
    }

    /// Connects to the listening daemon; `None` if there is none.
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

    /// Waits until no other frontend starts a daemon.
    pub(super) async fn lock(&self) -> io::Result<StartLock> {
        let folder = self.folder.clone();
        let wait = move || {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)?;
            let file = File::open(&folder)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(StartLock { _folder: file })
        };
        tokio::task::spawn_blocking(wait)
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Binds the socket and replaces one that is there. The caller has found no listener.
    pub(super) fn bind(&self, _lock: &StartLock) -> io::Result<net::UnixListener> {
        match fs::remove_file(&self.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = net::UnixListener::bind(&self.socket)?;
        fs::set_permissions(&self.socket, Permissions::from_mode(0o600))?;
        Ok(listener)
    }
}

/// Returns the folder of the sockets of all daemons.
pub(crate) fn socket_folder(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(FOLDER)
}

/// Returns the names of all daemons that have a socket, running or not.
pub fn daemons_in(runtime_dir: &Path) -> Vec<DaemonName> {
    let Ok(entries) = fs::read_dir(socket_folder(runtime_dir)) else {
        return Vec::new();
    };
    let name = |path: PathBuf| -> Option<DaemonName> {
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

/// Returns the names of the daemons that listen, without waiting for a reply of any.
pub async fn listening_daemons(runtime_dir: &Path) -> Vec<DaemonName> {
    let mut listening = Vec::new();
    for name in daemons_in(runtime_dir) {
        // An error other than a missing listener is one of a socket that is in use.
        if !matches!(
            SocketPath::new(runtime_dir, &name).connect().await,
            Ok(None)
        ) {
            listening.push(name);
        }
    }
    listening
}

/// The socket on which a daemon accepts connections. Dropping it removes it from the folder.
pub struct DaemonSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

/// Why a process cannot be a daemon.
#[derive(Debug, thiserror::Error)]
#[error("this command is for the server itself, which starts it when it is needed")]
pub struct SocketNotInherited;

impl DaemonSocket {
    /// Takes over the socket that the frontend has put in the place of standard output, and
    /// replaces standard output by `/dev/null`.
    pub fn inherited() -> Result<net::UnixListener, SocketNotInherited> {
        let listener = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)
            .map_err(|_| SocketNotInherited)?;
        if !rustix::net::sockopt::socket_acceptconn(&listener).unwrap_or(false) {
            return Err(SocketNotInherited);
        }
        let null = File::options()
            .write(true)
            .open("/dev/null")
            .map_err(|_| SocketNotInherited)?;
        rustix::stdio::dup2_stdout(&null).map_err(|_| SocketNotInherited)?;
        Ok(net::UnixListener::from(listener))
    }

    /// Must be called within a runtime.
    pub fn new(listener: net::UnixListener) -> io::Result<DaemonSocket> {
        listener.set_nonblocking(true)?;
        // A client asks the kernel for the process that listens. That was the frontend; calling
        // `listen` again makes it this process.
        rustix::net::listen(&listener, BACKLOG)?;
        let address = listener.local_addr()?;
        let path = address
            .as_pathname()
            .ok_or_else(|| io::Error::other("the socket has no path"))?
            .to_owned();
        let inode = fs::symlink_metadata(&path)?.ino();
        Ok(DaemonSocket {
            listener: UnixListener::from_std(listener)?,
            path,
            inode,
        })
    }

    pub(super) async fn accept(&self) -> io::Result<UnixStream> {
        self.listener.accept().await.map(|(stream, _)| stream)
    }

    /// Returns a connection that is in the backlog. Asks the kernel, because the runtime learns of
    /// new connections with a delay.
    pub(super) fn pending(&self) -> Option<UnixStream> {
        use rustix::net::SocketFlags;
        let stream =
            rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
                .ok()?;
        UnixStream::from_std(net::UnixStream::from(stream)).ok()
    }
}

impl Drop for DaemonSocket {
    fn drop(&mut self) {
        // Before the listener is closed: after that the path may be another daemon's.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns whether the process at the other end belongs to the same user.
pub(super) fn is_same_user(stream: &UnixStream) -> bool {
    stream
        .peer_cred()
        .is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw())
}
