//! The keeper itself: lets fronts in, answers operators, and knows when to end.
//!
//! It ends when it has neither a front nor a session, when an operator says so, and when a signal
//! does. Its socket goes first, so that no front comes to a closed door.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::desk::Desk;
use super::frame::{self, FrameError, Kind};
use super::message::{
    FromFront, FromKeeper, Hello, PROTOCOL, Purpose, Status, StopAnswer, Welcome,
};
use super::outgoing::{Outgoing, outgoing};
use super::post::{self, Post};
use super::{Kept, start::HELLO_LIMIT};
use crate::session::RecorderId;

/// How long the last answers may take when everything has ended.
const FAREWELL: Duration = Duration::from_secs(2);
/// The number of the first front that comes.
const FIRST_FRONT: u64 = 1;
/// Bytes that are read at once.
const READ_AT_ONCE: usize = 64 * 1024;

/// What a keeper tells of itself.
pub struct Terms {
    /// The digest of the settings it was started with.
    pub settings: String,
    pub build: String,
}

/// Why a keeper ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Nobody needed it any more.
    Unneeded,
    /// An operator stopped it.
    Stopped,
    /// A signal of this name.
    Signal(&'static str),
}

/// Keeps sessions until nobody needs them, an operator stops it, or `signal` comes. Everything has
/// ended when it returns.
pub async fn keep(
    post: Post,
    kept: Arc<dyn Kept>,
    terms: Terms,
    signal: impl Future<Output = &'static str>,
) -> Ended {
    let keeper = Arc::new(Keeper {
        kept,
        terms,
        name: random_name(),
        started: Instant::now(),
        fronts: watch::Sender::new(0),
        underway: watch::Sender::new(0),
        next_front: AtomicU64::new(FIRST_FRONT),
        stop: CancellationToken::new(),
        closing: CancellationToken::new(),
    });
    let mut connections = JoinSet::new();
    let ended = keeper.receive(post, &mut connections, signal).await;
    info!(reason = ?ended, "the keeper ends");
    keeper.kept.shut_down().await;
    let mut underway = keeper.underway.subscribe();
    let _ = tokio::time::timeout(FAREWELL, underway.wait_for(|count| *count == 0)).await;
    keeper.closing.cancel();
    let _ = tokio::time::timeout(FAREWELL, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    ended
}

/// Tells the front that waits why this keeper cannot keep anything.
pub async fn apologise(post: Post, why: String) {
    let told = async {
        let mut stream = post.accept().await.ok()?;
        let hello = frame::read(&mut stream).await.ok()??;
        let _: FromFront = frame::content(&hello.payload).ok()?;
        let welcome = Welcome {
            protocol: PROTOCOL,
            build: String::new(),
            settings: String::new(),
            keeper: String::new(),
            process: std::process::id(),
            residents: Vec::new(),
            unfit: Some(why),
        };
        say(stream, &FromKeeper::Welcome(welcome)).await.ok()
    };
    let _ = tokio::time::timeout(HELLO_LIMIT, told).await;
}

struct Keeper {
    kept: Arc<dyn Kept>,
    terms: Terms,
    name: String,
    started: Instant,
    fronts: watch::Sender<usize>,
    underway: watch::Sender<usize>,
    next_front: AtomicU64,
    stop: CancellationToken,
    closing: CancellationToken,
}

impl Keeper {
    async fn receive(
        self: &Arc<Keeper>,
        post: Post,
        connections: &mut JoinSet<()>,
        signal: impl Future<Output = &'static str>,
    ) -> Ended {
        let mut signal = pin!(signal);
        let mut population = self.kept.population();
        // The front that started it may come later than somebody who asks for its status. One that
        // has not come by then is gone.
        let mut awaited = true;
        let last_moment = self.started + HELLO_LIMIT;
        loop {
            awaited = awaited && self.next_front.load(Ordering::Relaxed) == FIRST_FRONT;
            if !awaited && connections.is_empty() && *population.borrow_and_update() == 0 {
                match post.waiting() {
                    Some(stream) => drop(connections.spawn(Arc::clone(self).meet(stream))),
                    None => return Ended::Unneeded,
                }
            }
            tokio::select! {
                accepted = post.accept() => match accepted {
                    Ok(stream) => drop(connections.spawn(Arc::clone(self).meet(stream))),
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                () = tokio::time::sleep_until(last_moment), if awaited => awaited = false,
                _ = connections.join_next(), if !connections.is_empty() => {}
                Ok(()) = population.changed() => {}
                () = self.stop.cancelled() => return Ended::Stopped,
                name = &mut signal => return Ended::Signal(name),
            }
        }
    }

    /// Finds out what somebody wants who has connected, and does it.
    async fn meet(self: Arc<Keeper>, mut stream: UnixStream) {
        if !post::is_ours(&stream) {
            warn!("another user's process was refused");
            return;
        }
        let hello = match tokio::time::timeout(HELLO_LIMIT, hello(&mut stream)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(error)) => return debug!(%error, "somebody came and did not say hello"),
            Err(_) => return debug!("somebody came and said nothing"),
        };
        let served = match hello.purpose {
            Purpose::Serve if hello.protocol == PROTOCOL => self.serve(stream).await,
            Purpose::Serve => say(stream, &FromKeeper::Welcome(self.welcome(false))).await,
            Purpose::Status => say(stream, &FromKeeper::Status(self.status())).await,
            Purpose::Stop { now } => self.end(stream, now).await,
        };
        if let Err(error) = served {
            warn!(%error, "a connection to the keeper failed");
        }
    }

    async fn serve(&self, stream: UnixStream) -> Result<(), FrameError> {
        let (reader, writer) = stream.into_split();
        let (frames, writer) = outgoing(writer);
        let writing = tokio::spawn(writer.run());
        let recorder = RecorderId(self.next_front.fetch_add(1, Ordering::Relaxed));
        let desk = Desk::new(
            Arc::clone(&self.kept),
            frames.clone(),
            self.underway.clone(),
            recorder,
        );
        let _leave = desk.gone.clone().drop_guard();
        self.fronts.send_modify(|count| *count += 1);
        info!("a front has come");
        for frame in frame::write(0, Kind::Message, &FromKeeper::Welcome(self.welcome(true)))? {
            let _ = frames.send(frame).await;
        }
        let mut reader = BufReader::with_capacity(READ_AT_ONCE, reader);
        let served = tokio::select! {
            served = desk.serve(&mut reader) => served,
            () = self.tell_preparation(&frames) => Ok(()),
            () = self.closing.cancelled() => Ok(()),
        };
        self.fronts.send_modify(|count| *count -= 1);
        info!("a front is gone");
        // The last answers are written before the connection ends.
        desk.leave();
        drop((desk, frames));
        if self.closing.is_cancelled() {
            let _ = tokio::time::timeout(FAREWELL, writing).await;
        } else {
            writing.abort();
        }
        served
    }

    /// Passes on how far the preparation has come, now and whenever that changes.
    async fn tell_preparation(&self, frames: &Outgoing) {
        let mut preparation = self.kept.preparation();
        preparation.mark_changed();
        while preparation.changed().await.is_ok() {
            let told = FromKeeper::Preparation(preparation.borrow_and_update().clone());
            for frame in frame::write(0, Kind::Message, &told).into_iter().flatten() {
                let _ = frames.send(frame).await;
            }
        }
        std::future::pending().await
    }

    async fn end(&self, stream: UnixStream, now: bool) -> Result<(), FrameError> {
        let running = self
            .kept
            .residents()
            .iter()
            .filter(|resident| resident.running)
            .count();
        if running > 0 && !now {
            return say(stream, &FromKeeper::Stop(StopAnswer::Busy { running })).await;
        }
        // The socket is gone, and everything ended, when the operator sees the end of this
        // connection.
        let told = tell(&stream, &FromKeeper::Stop(StopAnswer::Stopping)).await;
        self.stop.cancel();
        self.closing.cancelled().await;
        told
    }

    fn welcome(&self, with_residents: bool) -> Welcome {
        Welcome {
            protocol: PROTOCOL,
            build: self.terms.build.clone(),
            settings: self.terms.settings.clone(),
            keeper: self.name.clone(),
            process: std::process::id(),
            residents: if with_residents {
                self.kept.residents()
            } else {
                Vec::new()
            },
            unfit: None,
        }
    }

    fn status(&self) -> Status {
        let residents = self.kept.residents();
        Status {
            protocol: PROTOCOL,
            build: self.terms.build.clone(),
            process: std::process::id(),
            age: self.started.elapsed(),
            sessions: residents.len(),
            running: residents.iter().filter(|resident| resident.running).count(),
            fronts: *self.fronts.borrow(),
        }
    }
}

async fn hello(stream: &mut UnixStream) -> Result<Hello, FrameError> {
    let first = frame::read(stream).await?.ok_or(FrameError::Truncated)?;
    match frame::content(&first.payload)? {
        FromFront::Hello(hello) => Ok(hello),
        _ => Err(FrameError::OutOfTurn("no hello")),
    }
}

/// Says one thing and closes the connection.
async fn say(stream: UnixStream, message: &FromKeeper) -> Result<(), FrameError> {
    tell(&stream, message).await
}

async fn tell(stream: &UnixStream, message: &FromKeeper) -> Result<(), FrameError> {
    for frame in frame::write(0, Kind::Message, message)? {
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            stream.writable().await.map_err(FrameError::Connection)?;
            match stream.try_write(rest) {
                Ok(size) => rest = &rest[size..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(FrameError::Connection(error)),
            }
        }
    }
    Ok(())
}

fn random_name() -> String {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
