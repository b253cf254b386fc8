//! The daemon's main loop: accepts frontends, answers operators, and decides when to exit.
//!
//! It exits when it has neither a frontend nor a session, when an operator requests it, and on a
//! signal. Its socket is removed first, so that no frontend connects to a daemon that exits.

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

use super::frame::{self, FrameKind, IpcError};
use super::frame_sender::{FrameSender, frame_sender};
use super::frontend_connection::FrontendConnection;
use super::message::{
    DaemonHello, DaemonStatus, FromDaemon, HelloPurpose, PROTOCOL, StopReply, ToDaemon, Welcome,
};
use super::socket::{self, DaemonSocket};
use super::{SessionHost, start::HANDSHAKE_TIMEOUT};
use crate::session::RecorderId;

/// How long sending the last replies may take after everything has ended.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of the first frontend that connects.
const FIRST_FRONTEND: u64 = 1;
const READ_BUFFER: usize = 64 * 1024;

/// What a daemon reports about itself.
pub struct DaemonInfo {
    /// The digest of the settings it was started with.
    pub settings: String,
    pub build: String,
}

/// Why a daemon exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitReason {
    /// It had neither a frontend nor a session.
    Unused,
    /// An operator stopped it.
    Stopped,
    /// A signal of this name.
    Signal(&'static str),
}

/// Serves sessions until there is neither a frontend nor a session, an operator stops the daemon,
/// or `signal` completes. Everything has ended when it returns.
pub async fn serve(
    socket: DaemonSocket,
    host: Arc<dyn SessionHost>,
    info: DaemonInfo,
    signal: impl Future<Output = &'static str>,
) -> ExitReason {
    let daemon = Arc::new(Daemon {
        host,
        info,
        instance: random_id(),
        started: Instant::now(),
        frontends: watch::Sender::new(0),
        in_flight: watch::Sender::new(0),
        next_frontend: AtomicU64::new(FIRST_FRONTEND),
        stop: CancellationToken::new(),
        closing: CancellationToken::new(),
    });
    let mut connections = JoinSet::new();
    let ended = daemon
        .accept_connections(socket, &mut connections, signal)
        .await;
    info!(reason = ?ended, "the session daemon exits");
    daemon.host.shut_down().await;
    let mut in_flight = daemon.in_flight.subscribe();
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, in_flight.wait_for(|count| *count == 0)).await;
    daemon.closing.cancel();
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    ended
}

/// Tells the waiting frontend why this daemon cannot serve sessions.
pub async fn report_startup_failure(socket: DaemonSocket, why: String) {
    let report = async {
        let mut stream = socket.accept().await.ok()?;
        let hello = frame::read(&mut stream).await.ok()??;
        let _: ToDaemon = frame::decode(&hello.payload).ok()?;
        let welcome = Welcome {
            protocol: PROTOCOL,
            build: String::new(),
            settings: String::new(),
            instance: String::new(),
            process: std::process::id(),
            residents: Vec::new(),
            unfit: Some(why),
        };
        send_and_close(stream, &FromDaemon::Welcome(welcome))
            .await
            .ok()
    };
    let _ = tokio::time::timeout(HANDSHAKE_TIMEOUT, report).await;
}

struct Daemon {
    host: Arc<dyn SessionHost>,
    info: DaemonInfo,
    instance: String,
    started: Instant,
    frontends: watch::Sender<usize>,
    in_flight: watch::Sender<usize>,
    next_frontend: AtomicU64,
    stop: CancellationToken,
    closing: CancellationToken,
}

impl Daemon {
    async fn accept_connections(
        self: &Arc<Daemon>,
        socket: DaemonSocket,
        connections: &mut JoinSet<()>,
        signal: impl Future<Output = &'static str>,
    ) -> ExitReason {
        let mut signal = pin!(signal);
        let mut session_count = self.host.session_count();
        // The frontend that started this daemon may connect after an operator who asks for its
        // status. One that has not connected before the deadline is gone.
        let mut awaited = true;
        let deadline = self.started + HANDSHAKE_TIMEOUT;
        loop {
            awaited = awaited && self.next_frontend.load(Ordering::Relaxed) == FIRST_FRONTEND;
            if !awaited && connections.is_empty() && *session_count.borrow_and_update() == 0 {
                match socket.pending() {
                    Some(stream) => drop(connections.spawn(Arc::clone(self).handle(stream))),
                    None => return ExitReason::Unused,
                }
            }
            tokio::select! {
                accepted = socket.accept() => match accepted {
                    Ok(stream) => drop(connections.spawn(Arc::clone(self).handle(stream))),
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                () = tokio::time::sleep_until(deadline), if awaited => awaited = false,
                _ = connections.join_next(), if !connections.is_empty() => {}
                Ok(()) = session_count.changed() => {}
                () = self.stop.cancelled() => return ExitReason::Stopped,
                name = &mut signal => return ExitReason::Signal(name),
            }
        }
    }

    /// Reads what a client wants, and does it.
    async fn handle(self: Arc<Daemon>, mut stream: UnixStream) {
        if !socket::is_same_user(&stream) {
            warn!("a process of another user was refused");
            return;
        }
        let hello = match tokio::time::timeout(HANDSHAKE_TIMEOUT, hello(&mut stream)).await {
            Ok(Ok(hello)) => hello,
            Ok(Err(error)) => return debug!(%error, "handshake failed"),
            Err(_) => return debug!("handshake timed out"),
        };
        let served = match hello.purpose {
            HelloPurpose::Serve if hello.protocol == PROTOCOL => self.serve(stream).await,
            HelloPurpose::Serve => {
                send_and_close(stream, &FromDaemon::Welcome(self.welcome(false))).await
            }
            HelloPurpose::Status => {
                send_and_close(stream, &FromDaemon::Status(self.status())).await
            }
            HelloPurpose::Stop { now } => self.stop_on_request(stream, now).await,
        };
        if let Err(error) = served {
            warn!(%error, "a connection to the session daemon failed");
        }
    }

    async fn serve(&self, stream: UnixStream) -> Result<(), IpcError> {
        let (reader, writer) = stream.into_split();
        let (frames, writer) = frame_sender(writer);
        let writing = tokio::spawn(writer.run());
        let recorder = RecorderId(self.next_frontend.fetch_add(1, Ordering::Relaxed));
        let connection = FrontendConnection::new(
            Arc::clone(&self.host),
            frames.clone(),
            self.in_flight.clone(),
            recorder,
        );
        let _close = connection.closed.clone().drop_guard();
        self.frontends.send_modify(|count| *count += 1);
        info!("a frontend connected");
        for frame in frame::encode(
            0,
            FrameKind::Message,
            &FromDaemon::Welcome(self.welcome(true)),
        )? {
            let _ = frames.send(frame).await;
        }
        let mut reader = BufReader::with_capacity(READ_BUFFER, reader);
        let served = tokio::select! {
            served = connection.serve(&mut reader) => served,
            () = self.report_preparation(&frames) => Ok(()),
            () = self.closing.cancelled() => Ok(()),
        };
        self.frontends.send_modify(|count| *count -= 1);
        info!("a frontend disconnected");
        // The last replies are sent before the connection ends.
        connection.close();
        drop((connection, frames));
        if self.closing.is_cancelled() {
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, writing).await;
        } else {
            writing.abort();
        }
        served
    }

    /// Reports the progress of the preparation, now and whenever it changes.
    async fn report_preparation(&self, frames: &FrameSender) {
        let mut preparation = self.host.preparation();
        preparation.mark_changed();
        while preparation.changed().await.is_ok() {
            let message = FromDaemon::Preparation(preparation.borrow_and_update().clone());
            for frame in frame::encode(0, FrameKind::Message, &message)
                .into_iter()
                .flatten()
            {
                let _ = frames.send(frame).await;
            }
        }
        std::future::pending().await
    }

    async fn stop_on_request(&self, stream: UnixStream, now: bool) -> Result<(), IpcError> {
        let running = self
            .host
            .residents()
            .iter()
            .filter(|resident| resident.running)
            .count();
        if running > 0 && !now {
            return send_and_close(stream, &FromDaemon::Stop(StopReply::Busy { running })).await;
        }
        // When the operator's command sees the end of this connection, the socket is removed and
        // everything has ended.
        let sent = send(&stream, &FromDaemon::Stop(StopReply::Stopping)).await;
        self.stop.cancel();
        self.closing.cancelled().await;
        sent
    }

    fn welcome(&self, with_residents: bool) -> Welcome {
        Welcome {
            protocol: PROTOCOL,
            build: self.info.build.clone(),
            settings: self.info.settings.clone(),
            instance: self.instance.clone(),
            process: std::process::id(),
            residents: if with_residents {
                self.host.residents()
            } else {
                Vec::new()
            },
            unfit: None,
        }
    }

    fn status(&self) -> DaemonStatus {
        let residents = self.host.residents();
        DaemonStatus {
            protocol: PROTOCOL,
            build: self.info.build.clone(),
            process: std::process::id(),
            age: self.started.elapsed(),
            sessions: residents.len(),
            running: residents.iter().filter(|resident| resident.running).count(),
            frontends: *self.frontends.borrow(),
        }
    }
}

async fn hello(stream: &mut UnixStream) -> Result<DaemonHello, IpcError> {
    let first = frame::read(stream).await?.ok_or(IpcError::Truncated)?;
    match frame::decode(&first.payload)? {
        ToDaemon::Hello(hello) => Ok(hello),
        _ => Err(IpcError::Unexpected("a hello must be the first")),
    }
}

/// Sends a message and closes the connection.
async fn send_and_close(stream: UnixStream, message: &FromDaemon) -> Result<(), IpcError> {
    send(&stream, message).await
}

async fn send(stream: &UnixStream, message: &FromDaemon) -> Result<(), IpcError> {
    for frame in frame::encode(0, FrameKind::Message, message)? {
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            stream.writable().await.map_err(IpcError::Connection)?;
            match stream.try_write(rest) {
                Ok(size) => rest = &rest[size..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(IpcError::Connection(error)),
            }
        }
    }
    Ok(())
}

fn random_id() -> String {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
