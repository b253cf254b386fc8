//! Finds the keeper of a server, or starts one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tracing::{info, warn};

use super::frame::{self, FrameError, Kind};
use super::message::{
    FromFront, FromKeeper, Hello, PROTOCOL, Purpose, Status, StopAnswer, Welcome,
};
use super::post::{self, KeeperName, Place};
use super::{Client, KeeperSettings};

/// How long the other side may take to say who it is. A keeper answers at once; a stopped or broken
/// one never.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// How often a keeper may close the door just when a front comes.
const MOST_ATTEMPTS: usize = 3;

/// Why a server has no keeper.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("the keeper's socket cannot be used")]
    Socket(#[source] io::Error),
    #[error("the keeper could not be started")]
    Start(#[source] io::Error),
    #[error("the keeper ended as soon as it was started; its reason is in the log")]
    EndedAtOnce,
    #[error("the keeper cannot keep sessions: {0}")]
    Unfit(String),
    #[error(
        "the keeper `{name}` (process {process}) does not answer. End it, or stop it with \
         `cellblock keeper stop {name} --now`"
    )]
    Silent { name: KeeperName, process: i32 },
    #[error("the socket of the keeper `{name}` belongs to another user's process")]
    Stranger { name: KeeperName },
    #[error(
        "the keeper `{name}` is of version {theirs} (protocol {protocol}), which this program \
         cannot speak with. Stop it, and its \
         sessions, with `cellblock keeper stop {name}`; then start this server again"
    )]
    Protocol {
        name: KeeperName,
        theirs: String,
        protocol: u32,
    },
    #[error("the keeper said what makes no sense")]
    Nonsense,
}

/// Finds the keeper of these settings, or starts one, and returns the way to its sessions.
pub async fn attach(settings: &KeeperSettings) -> Result<Client, AttachError> {
    Client::attach(settings.clone()).await
}

/// Asks a keeper how it is; `None` when there is none.
pub async fn ask_status(
    runtime_dir: &std::path::Path,
    name: &KeeperName,
) -> Result<Option<Status>, AttachError> {
    match ask(runtime_dir, name, Purpose::Status).await? {
        Some((FromKeeper::Status(status), _)) => Ok(Some(status)),
        Some(_) => Err(AttachError::Nonsense),
        None => Ok(None),
    }
}

/// Asks a keeper to end, and waits until it has; `None` when there is none.
pub async fn ask_to_stop(
    runtime_dir: &std::path::Path,
    name: &KeeperName,
    now: bool,
) -> Result<Option<StopAnswer>, AttachError> {
    match ask(runtime_dir, name, Purpose::Stop { now }).await? {
        Some((FromKeeper::Stop(answer), mut stream)) => {
            if answer == StopAnswer::Stopping {
                // It closes the connection when everything has ended.
                while let Ok(Some(_)) = frame::read(&mut stream).await {}
            }
            Ok(Some(answer))
        }
        Some(_) => Err(AttachError::Nonsense),
        None => Ok(None),
    }
}

async fn ask(
    runtime_dir: &std::path::Path,
    name: &KeeperName,
    purpose: Purpose,
) -> Result<Option<(FromKeeper, UnixStream)>, AttachError> {
    let place = Place::new(runtime_dir, name);
    let Some(stream) = place.connect().await.map_err(AttachError::Socket)? else {
        return Ok(None);
    };
    let hello = hello(String::new(), purpose);
    match greet(stream, name, hello).await? {
        Some(answer) => Ok(Some(answer)),
        None => Ok(None),
    }
}

/// Returns a connection to a keeper that has said welcome. Starts a keeper if need be.
pub(super) async fn connect(
    settings: &KeeperSettings,
) -> Result<(UnixStream, Welcome), AttachError> {
    let place = Place::new(&settings.runtime_dir, &settings.name);
    if let Some(found) = find(&place, settings).await? {
        return Ok(found);
    }
    let turn = place.turn().await.map_err(AttachError::Socket)?;
    for _ in 0..MOST_ATTEMPTS {
        if let Some(found) = find(&place, settings).await? {
            return Ok(found);
        }
        if place
            .connect()
            .await
            .map_err(AttachError::Socket)?
            .is_some()
        {
            // It was about to leave when we came, and somebody is there again.
            continue;
        }
        let listener = place.bind(&turn).map_err(AttachError::Socket)?;
        start(settings, listener)
            .await
            .map_err(AttachError::Start)?;
        return find(&place, settings)
            .await?
            .ok_or(AttachError::EndedAtOnce);
    }
    Err(AttachError::EndedAtOnce)
}

/// Connects to the keeper that is there, if one is and has something to say.
async fn find(
    place: &Place,
    settings: &KeeperSettings,
) -> Result<Option<(UnixStream, Welcome)>, AttachError> {
    let Some(stream) = place.connect().await.map_err(AttachError::Socket)? else {
        return Ok(None);
    };
    let hello = hello(settings.digest.clone(), Purpose::Serve);
    let Some((answer, stream)) = greet(stream, &settings.name, hello).await? else {
        return Ok(None);
    };
    let FromKeeper::Welcome(welcome) = answer else {
        return Err(AttachError::Nonsense);
    };
    if let Some(why) = welcome.unfit {
        return Err(AttachError::Unfit(why));
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
            keeper = settings.name.as_str(),
            settings = different.join("; "),
            "sessions are kept with earlier values of these settings; `cellblock keeper stop {}` \
             ends them, and the present values hold from then on",
            settings.name
        );
    }
    info!(
        keeper = settings.name.as_str(),
        process = welcome.process,
        sessions = welcome.residents.len(),
        "attached"
    );
    Ok(Some((stream, welcome)))
}

/// Names the settings that differ. Each side has a line for each setting: its name, `=`, and a
/// digest.
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

fn hello(settings: String, purpose: Purpose) -> Hello {
    Hello {
        protocol: PROTOCOL,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        settings,
        purpose,
    }
}

/// Says hello and returns the answer; `None` when the other side closes the connection instead.
async fn greet(
    mut stream: UnixStream,
    name: &KeeperName,
    hello: Hello,
) -> Result<Option<(FromKeeper, UnixStream)>, AttachError> {
    if !post::is_ours(&stream) {
        return Err(AttachError::Stranger { name: name.clone() });
    }
    let process = stream
        .peer_cred()
        .ok()
        .and_then(|peer| peer.pid())
        .unwrap_or_default();
    let exchange = async {
        for frame in frame::write(0, Kind::Message, &FromFront::Hello(hello))? {
            stream
                .write_all(&frame)
                .await
                .map_err(FrameError::Connection)?;
        }
        let mut assembly = frame::Assembly::default();
        while let Some(frame) = frame::read(&mut stream).await? {
            if let Some(whole) = assembly.add(frame)? {
                return frame::content::<FromKeeper>(&whole.payload).map(Some);
            }
        }
        Ok(None)
    };
    match tokio::time::timeout(HELLO_LIMIT, exchange).await {
        Ok(Ok(Some(answer))) => Ok(Some((answer, stream))),
        // It was there and is not any more.
        Ok(Ok(None) | Err(FrameError::Connection(_) | FrameError::Truncated)) => Ok(None),
        Ok(Err(_)) => Err(AttachError::Nonsense),
        Err(_) => Err(AttachError::Silent {
            name: name.clone(),
            process,
        }),
    }
}

/// Starts a keeper: its standard output is the socket, its standard input what it must know, its
/// log goes where ours goes.
async fn start(
    settings: &KeeperSettings,
    listener: std::os::unix::net::UnixListener,
) -> io::Result<()> {
    let mut child = tokio::process::Command::new(&settings.program)
        .args(&settings.arguments)
        .stdin(Stdio::piped())
        .stdout(OwnedFd::from(listener))
        .spawn()?;
    let mut input = child.stdin.take().expect("it was asked for");
    let handed = input.write_all(&settings.hand_over).await;
    drop(input);
    let name = settings.name.clone();
    info!(
        keeper = name.as_str(),
        process = child.id(),
        "a keeper was started"
    );
    // It must not stay a zombie as long as this server lives.
    tokio::spawn(async move {
        if let Ok(status) = child.wait().await {
            info!(keeper = name.as_str(), %status, "the keeper has ended");
        }
    });
    handed
}
