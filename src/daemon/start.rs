//! Finds the session daemon of a server, or starts one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tracing::{info, warn};

use super::frame::{self, FrameKind, IpcError};
use super::message::{
    DaemonHello, DaemonStatus, FromDaemon, HelloPurpose, PROTOCOL, StopReply, ToDaemon, Welcome,
};
use super::socket::{self, DaemonName, SocketPath};
use super::{DaemonClient, DaemonSettings};

/// Timeout for the first message of the other side. A daemon replies at once; one that is stopped
/// or broken does not reply at all.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How many daemons in a row may exit just when a frontend connects.
const MAX_ATTEMPTS: usize = 3;

/// Why a server could not connect to a session daemon.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("the socket of the session daemon cannot be used")]
    Socket(#[source] io::Error),
    #[error("the session daemon could not be started")]
    Start(#[source] io::Error),
    #[error("the session daemon exited as soon as it was started; its reason is in the log")]
    ExitedAtOnce,
    #[error("the session daemon cannot serve sessions: {0}")]
    CannotServe(String),
    #[error(
        "the session daemon `{name}` (process {process}) does not answer. End it, or stop it with \
         `cellblock daemon stop {name} --now`"
    )]
    Unresponsive { name: DaemonName, process: i32 },
    #[error("the socket of the session daemon `{name}` belongs to a process of another user")]
    OtherUser { name: DaemonName },
    #[error(
        "the session daemon `{name}` has version {theirs} (protocol {protocol}), which this \
         program does not support. Stop it, and its sessions, with `cellblock daemon stop {name}`; \
         then start this server again"
    )]
    Protocol {
        name: DaemonName,
        theirs: String,
        protocol: u32,
    },
    #[error("unexpected reply from the session daemon")]
    UnexpectedReply,
}

/// Finds the daemon of these settings, or starts one, and returns a client of its sessions.
pub async fn attach(settings: &DaemonSettings) -> Result<DaemonClient, AttachError> {
    DaemonClient::attach(settings.clone()).await
}

/// Returns the status of a daemon; `None` if it does not run.
pub async fn query_status(
    runtime_dir: &std::path::Path,
    name: &DaemonName,
) -> Result<Option<DaemonStatus>, AttachError> {
    match ask(runtime_dir, name, HelloPurpose::Status).await? {
        Some((FromDaemon::Status(status), _)) => Ok(Some(status)),
        Some(_) => Err(AttachError::UnexpectedReply),
        None => Ok(None),
    }
}

/// Requests a daemon to stop, and waits until it has exited; `None` if it does not run.
pub async fn request_stop(
    runtime_dir: &std::path::Path,
    name: &DaemonName,
    now: bool,
) -> Result<Option<StopReply>, AttachError> {
    match ask(runtime_dir, name, HelloPurpose::Stop { now }).await? {
        Some((FromDaemon::Stop(answer), mut stream)) => {
            if answer == StopReply::Stopping {
                // The daemon closes the connection when everything has ended.
                while let Ok(Some(_)) = frame::read(&mut stream).await {}
            }
            Ok(Some(answer))
        }
        Some(_) => Err(AttachError::UnexpectedReply),
        None => Ok(None),
    }
}

async fn ask(
    runtime_dir: &std::path::Path,
    name: &DaemonName,
    purpose: HelloPurpose,
) -> Result<Option<(FromDaemon, UnixStream)>, AttachError> {
    let path = SocketPath::new(runtime_dir, name);
    let Some(stream) = path.connect().await.map_err(AttachError::Socket)? else {
        return Ok(None);
    };
    let hello = hello(String::new(), purpose);
    match exchange_hellos(stream, name, hello).await? {
        Some(answer) => Ok(Some(answer)),
        None => Ok(None),
    }
}

/// Returns a connection to a daemon that has accepted this frontend. Starts a daemon if none runs.
pub(super) async fn connect(
    settings: &DaemonSettings,
) -> Result<(UnixStream, Welcome), AttachError> {
    let path = SocketPath::new(&settings.runtime_dir, &settings.name);
    if let Some(found) = find(&path, settings).await? {
        return Ok(found);
    }
    let lock = path.lock().await.map_err(AttachError::Socket)?;
    for _ in 0..MAX_ATTEMPTS {
        if let Some(found) = find(&path, settings).await? {
            return Ok(found);
        }
        if path.connect().await.map_err(AttachError::Socket)?.is_some() {
            // The daemon exited during the handshake, and another one listens already.
            continue;
        }
        let listener = path.bind(&lock).map_err(AttachError::Socket)?;
        start(settings, listener)
            .await
            .map_err(AttachError::Start)?;
        return find(&path, settings)
            .await?
            .ok_or(AttachError::ExitedAtOnce);
    }
    Err(AttachError::ExitedAtOnce)
}

/// Connects to the running daemon, if there is one and it completes the handshake.
async fn find(
    path: &SocketPath,
    settings: &DaemonSettings,
) -> Result<Option<(UnixStream, Welcome)>, AttachError> {
    let Some(stream) = path.connect().await.map_err(AttachError::Socket)? else {
        return Ok(None);
    };
    let hello = hello(settings.digest.clone(), HelloPurpose::Serve);
    let Some((answer, stream)) = exchange_hellos(stream, &settings.name, hello).await? else {
        return Ok(None);
    };
    let FromDaemon::Welcome(welcome) = answer else {
        return Err(AttachError::UnexpectedReply);
    };
    if let Some(why) = welcome.unfit {
        return Err(AttachError::CannotServe(why));
    }
    if welcome.protocol != PROTOCOL {
        let (name, theirs, protocol) = (settings.name.clone(), welcome.build, welcome.protocol);
        return Err(AttachError::Protocol {
            name,
            theirs,
            protocol,
        });
    }
    let different = different_settings(&welcome.settings, &settings.digest);
    if !different.is_empty() {
        warn!(
            daemon = settings.name.as_str(),
            settings = different.join("; "),
            "sessions are kept with earlier values of these settings; `cellblock daemon stop {}` \
             ends them, and the present values hold from then on",
            settings.name
        );
    }
    info!(
        daemon = settings.name.as_str(),
        process = welcome.process,
        sessions = welcome.residents.len(),
        "attached"
    );
    Ok(Some((stream, welcome)))
}

/// Returns the names of the settings that differ. Both texts have one line per setting: its name,
/// `=`, and a digest.
pub fn different_settings(theirs: &str, ours: &str) -> Vec<String> {
    let lines = |text: &str| -> BTreeMap<String, String> {
        let line = |line: &str| {
            line.split_once('=')
                .map(|(name, digest)| (name.to_owned(), digest.to_owned()))
        };
        text.lines().filter_map(line).collect()
    };
    let (theirs, ours) = (lines(theirs), lines(ours));
    let names: BTreeSet<&String> = theirs.keys().chain(ours.keys()).collect();
    names
        .into_iter()
        .filter(|name| theirs.get(*name) != ours.get(*name))
        .cloned()
        .collect()
}

fn hello(settings: String, purpose: HelloPurpose) -> DaemonHello {
    DaemonHello {
        protocol: PROTOCOL,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        settings,
        purpose,
    }
}

/// Sends a hello and returns the reply; `None` if the other side closes the connection instead.
async fn exchange_hellos(
    mut stream: UnixStream,
    name: &DaemonName,
    hello: DaemonHello,
) -> Result<Option<(FromDaemon, UnixStream)>, AttachError> {
    if !socket::is_same_user(&stream) {
        return Err(AttachError::OtherUser { name: name.clone() });
    }
    let process = stream
        .peer_cred()
        .ok()
        .and_then(|peer| peer.pid())
        .unwrap_or_default();
    let exchange = async {
        for frame in frame::encode(0, FrameKind::Message, &ToDaemon::Hello(hello))? {
            stream
                .write_all(&frame)
                .await
                .map_err(IpcError::Connection)?;
        }
        let mut assembler = frame::MessageAssembler::default();
        while let Some(frame) = frame::read(&mut stream).await? {
            if let Some(whole) = assembler.add(frame)? {
                return frame::decode::<FromDaemon>(&whole.payload).map(Some);
            }
        }
        Ok(None)
    };
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, exchange).await {
        Ok(Ok(Some(answer))) => Ok(Some((answer, stream))),
        // The daemon exited meanwhile.
        Ok(Ok(None) | Err(IpcError::Connection(_) | IpcError::Truncated)) => Ok(None),
        Ok(Err(_)) => Err(AttachError::UnexpectedReply),
        Err(_) => Err(AttachError::Unresponsive {
            name: name.clone(),
            process,
        }),
    }
}

/// Starts a daemon: its standard output is the socket, its standard input the handed over settings,
/// and it inherits our log.
async fn start(
    settings: &DaemonSettings,
    listener: std::os::unix::net::UnixListener,
) -> io::Result<()> {
    let mut child = tokio::process::Command::new(&settings.program)
        .args(&settings.arguments)
        .stdin(Stdio::piped())
        .stdout(OwnedFd::from(listener))
        .spawn()?;
    let mut input = child.stdin.take().expect("standard input is a pipe");
    let handed = input.write_all(&settings.hand_over).await;
    drop(input);
    let name = settings.name.clone();
    info!(
        daemon = name.as_str(),
        process = child.id(),
        "a session daemon was started"
    );
    // The process must not stay a zombie while this server runs.
    tokio::spawn(async move {
        if let Ok(status) = child.wait().await {
            info!(daemon = name.as_str(), %status, "the session daemon has exited");
        }
    });
    handed
}
