//! The frontend's side of one connection: many concurrent calls, each waiting for its own reply.
//!
//! A call that is dropped is forgotten at the other side too; for code that means that it
//! continues. When the connection ends, every waiting call fails with a lost reply.
//!
//! Calls are sent in the order in which they begin. A heartbeat distinguishes a daemon that hangs
//! from one that is busy: it replies to heartbeats in its reader, whatever its sessions do. While
//! it misses heartbeats, calls fail without it; when it replies again, the connection continues.

use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::file_stream::{self, CHUNK, EofPolicy, FilePart, FileReader, FileWriter, WINDOW};
use super::frame::{self, FrameKind, IpcError, IpcFrame, MessageAssembler};
use super::frame_sender::{FrameSender, frame_sender};
use super::message::{FromDaemon, ReplyResult, RequestRef, ToDaemon};
use crate::ops::{Op, ProgressChannel};
use crate::sandbox::Preparation;
use crate::session::{Principal, RecordEnding};

const READ_BUFFER: usize = 64 * 1024;

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// A daemon that has missed this many heartbeats in a row is unresponsive. It replies to one with a
/// single small write, so a busy machine alone does not make it miss ten seconds of them. A
/// frontend that was itself stopped counts one.
const MAX_MISSED_HEARTBEATS: u32 = 20;
/// A call whose reply is overdue by this time fails earlier, after fewer missed heartbeats.
const REPLY_GRACE: Duration = Duration::from_secs(1);
const MAX_MISSED_WHEN_OVERDUE: u32 = 2;

/// Why a call has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RpcError {
    /// The connection was closed before the call was sent; it had no effect.
    NotSent,
    /// The connection ended before the reply arrived.
    Disconnected,
    /// The reply could not be decoded.
    InvalidReply,
    /// The call exceeds the size limit of messages.
    TooLarge,
    /// The daemon does not reply to heartbeats.
    Unresponsive {
        /// The call had been sent before.
        sent: bool,
    },
}

/// The receivers of messages that are not replies.
#[derive(Clone)]
pub(super) struct Subscribers {
    pub(super) preparation: watch::Sender<Preparation>,
    pub(super) recording: Arc<Mutex<Option<Recording>>>,
}

/// The recorder of executions that end.
#[derive(Clone)]
pub(super) struct Recording {
    pub(super) takes_over: bool,
    pub(super) record: RecordEnding,
}

/// A connection to a daemon.
pub(super) struct DaemonConnection {
    frames: FrameSender,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
    heartbeat: watch::Sender<Heartbeat>,
    pub(super) closed: CancellationToken,
}

/// The state of the heartbeat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Heartbeat {
    /// Heartbeats in a row during which nothing was received from the daemon.
    missed: u32,
    /// A heartbeat was sent and has no reply yet.
    is_awaited: bool,
    /// Anything was received since the last heartbeat.
    received_any: bool,
}

impl Heartbeat {
    /// Counts a heartbeat. Returns whether one must be sent.
    fn beat(&mut self) -> bool {
        self.missed = if self.received_any || !self.is_awaited {
            0
        } else {
            self.missed.saturating_add(1)
        };
        self.received_any = false;
        !std::mem::replace(&mut self.is_awaited, true)
    }

    fn received(&mut self, is_beat: bool) {
        self.missed = 0;
        self.received_any = true;
        self.is_awaited &= !is_beat;
    }

    fn is_lost(&self) -> bool {
        self.missed >= MAX_MISSED_HEARTBEATS
    }
}

#[derive(Default)]
struct Waiting {
    calls: HashMap<u64, PendingCall>,
    closed: bool,
}

/// Where messages about a waiting call are delivered.
struct PendingCall {
    answer: oneshot::Sender<Vec<u8>>,
    news: Option<ProgressChannel>,
    chunks: Option<mpsc::Sender<FilePart>>,
    credit: Option<Arc<Semaphore>>,
}

impl DaemonConnection {
    /// Takes over a connection after the handshake.
    pub(super) fn new(stream: UnixStream, subscribers: Subscribers) -> Arc<DaemonConnection> {
        let (reader, writer) = stream.into_split();
        let (frames, writer) = frame_sender(writer);
        let connection = Arc::new(DaemonConnection {
            frames,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            heartbeat: watch::Sender::default(),
            closed: CancellationToken::new(),
        });
        let closed = connection.closed.clone();
        tokio::spawn(async move {
            tokio::select! {
                written = writer.run() => drop(written),
                () = closed.cancelled() => {}
            }
            closed.cancel();
        });
        let reading = Arc::downgrade(&connection);
        let closed = connection.closed.clone();
        tokio::spawn(async move {
            let mut reader = BufReader::with_capacity(READ_BUFFER, reader);
            let read = tokio::select! {
                read = receive(&reading, &mut reader, &subscribers) => read,
                () = closed.cancelled() => Ok(()),
            };
            if let Err(error) = read {
                warn!(%error, "the connection to the session daemon failed");
            }
            closed.cancel();
            if let Some(connection) = reading.upgrade() {
                connection.close();
            }
        });
        tokio::spawn(send_heartbeats(
            Arc::downgrade(&connection),
            connection.closed.clone(),
        ));
        connection
    }

    /// Asks the daemon to report ended executions to this frontend for recording.
    pub(super) fn record_endings(&self, takes_over: bool) {
        self.push(0, &ToDaemon::RecordEndings { takes_over });
    }

    /// Returns whether the daemon has missed too many heartbeats.
    pub(super) fn is_unresponsive(&self) -> bool {
        self.heartbeat.borrow().is_lost()
    }

    /// Sends a short message at once. On a closed connection it is dropped.
    fn push(&self, number: u64, message: &ToDaemon) {
        for frame in frame::encode(number, FrameKind::Message, message)
            .into_iter()
            .flatten()
        {
            let _ = self.frames.push(frame);
        }
    }

    /// Waits until the daemon has missed too many heartbeats, or fewer of them and a reply that was
    /// due after `wait` is overdue.
    async fn becomes_unresponsive(&self, wait: Option<Duration>) {
        let mut heartbeat = self.heartbeat.subscribe();
        // The sender is in `self`.
        let lost = async { drop(heartbeat.wait_for(Heartbeat::is_lost).await) };
        let overdue = async {
            match wait {
                Some(wait) => tokio::time::sleep(wait.saturating_add(REPLY_GRACE)).await,
                None => std::future::pending().await,
            }
            let mut heartbeat = self.heartbeat.subscribe();
            drop(
                heartbeat
                    .wait_for(|heartbeat| heartbeat.missed >= MAX_MISSED_WHEN_OVERDUE)
                    .await,
            );
        };
        tokio::select! {
            () = lost => {}
            () = overdue => {}
        }
    }

    /// Runs `work` unless the daemon becomes unresponsive meanwhile.
    async fn unless_unresponsive<T>(&self, work: impl Future<Output = T>) -> Result<T, RpcError> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.becomes_unresponsive(None) => Err(RpcError::Unresponsive { sent: true }),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Sends a call. It has been handed to the kernel or queued when this returns.
    pub(super) fn call(
        self: &Arc<DaemonConnection>,
        owner: &Principal,
        op: &Op,
        news: ProgressChannel,
    ) -> Result<SentCall, RpcError> {
        self.begin(owner, op, Some(news), None, None)
    }

    /// Sends an operation and its file. The second result is the error of the source, if it failed.
    pub(super) async fn send_file(
        self: &Arc<DaemonConnection>,
        owner: &Principal,
        op: &Op,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> (Result<ReplyResult, RpcError>, Option<io::Error>) {
        let credit = Arc::new(Semaphore::new(WINDOW));
        let mut call = match self.begin(owner, op, None, None, Some(Arc::clone(&credit))) {
            Ok(call) => call,
            Err(error) => return (Err(error), None),
        };
        let mut upload = FileWriter::new(call.number, credit, self.frames.clone());
        let sent = tokio::select! {
            sent = copy(source, &mut upload) => sent,
            answer = &mut call.answer => return (call.decode_reply(answer), None),
            () = self.becomes_unresponsive(None) => {
                return (Err(RpcError::Unresponsive { sent: true }), None);
            }
        };
        let problem = match sent {
            Ok(_) => {
                self.push(call.number, &ToDaemon::EndOfFile);
                None
            }
            Err(error) => {
                self.push(call.number, &ToDaemon::FileFailed);
                Some(error)
            }
        };
        (call.reply(CancellationToken::new(), None).await, problem)
    }

    /// Sends an operation and writes the file of its result to `sink`. The second result is the
    /// error of the sink, if it failed.
    pub(super) async fn receive_file(
        self: &Arc<DaemonConnection>,
        owner: &Principal,
        op: &Op,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> (Result<ReplyResult, RpcError>, Option<io::Error>) {
        let (sender, chunks) = file_stream::file_parts();
        let call = match self.begin(owner, op, None, Some(sender), None) {
            Ok(call) => call,
            Err(error) => return (Err(error), None),
        };
        let credit = frame::encode(call.number, FrameKind::Message, &ToDaemon::Credit(1))
            .expect("it is short")
            .remove(0);
        let mut download =
            FileReader::new(chunks, credit, self.frames.clone(), EofPolicy::EndsFile);
        let written = async {
            copy(&mut download, sink).await?;
            sink.flush().await
        };
        match self.unless_unresponsive(written).await {
            Ok(Ok(())) => (call.reply(CancellationToken::new(), None).await, None),
            Ok(Err(error)) => (Err(RpcError::Disconnected), Some(error)),
            Err(unresponsive) => (Err(unresponsive), None),
        }
    }

    fn begin(
        self: &Arc<DaemonConnection>,
        owner: &Principal,
        op: &Op,
        news: Option<ProgressChannel>,
        chunks: Option<mpsc::Sender<FilePart>>,
        credit: Option<Arc<Semaphore>>,
    ) -> Result<SentCall, RpcError> {
        if self.is_unresponsive() {
            return Err(RpcError::Unresponsive { sent: false });
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let frames = frame::encode(
            number,
            FrameKind::Message,
            &RequestRef::Request { owner, op },
        )
        .map_err(|_| RpcError::TooLarge)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut waiting = self.waiting();
            if waiting.closed {
                return Err(RpcError::NotSent);
            }
            waiting.calls.insert(
                number,
                PendingCall {
                    answer: sender,
                    news,
                    chunks,
                    credit,
                },
            );
        }
        let call = SentCall {
            connection: Arc::clone(self),
            number,
            answer,
        };
        for (at, frame) in frames.into_iter().enumerate() {
            if self.frames.push(frame).is_err() {
                return Err(if at == 0 {
                    RpcError::NotSent
                } else {
                    RpcError::Disconnected
                });
            }
        }
        Ok(call)
    }

    /// Ends every waiting call.
    fn close(&self) {
        self.closed.cancel();
        let calls = {
            let mut waiting = self.waiting();
            waiting.closed = true;
            std::mem::take(&mut waiting.calls)
        };
        // An upload that waits for credit must end too.
        for credit in calls.into_values().filter_map(|call| call.credit) {
            credit.close();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting
            .lock()
            .expect("nothing panics while it holds the calls")
    }

    fn dispatch(
        &self,
        id: u64,
        message: FromDaemon,
        subscribers: &Subscribers,
    ) -> Result<(), IpcError> {
        match message {
            FromDaemon::Preparation(news) => drop(subscribers.preparation.send_replace(news)),
            FromDaemon::Heartbeat => self.note_activity(true),
            FromDaemon::ExecutionEnded { number, ended } => {
                let recording = subscribers
                    .recording
                    .lock()
                    .expect("nothing panics while it holds the recorder")
                    .clone();
                // Without a recorder, none was requested.
                if let Some(Recording { record, .. }) = recording {
                    record(&ended);
                    self.push(0, &ToDaemon::Recorded(number));
                }
            }
            FromDaemon::Progress(text) => {
                if let Some(news) = self
                    .waiting()
                    .calls
                    .get(&id)
                    .and_then(|call| call.news.as_ref())
                {
                    news.send_replace(text);
                }
            }
            FromDaemon::Credit(amount) => {
                if let Some(credit) = self
                    .waiting()
                    .calls
                    .get(&id)
                    .and_then(|call| call.credit.as_ref())
                {
                    file_stream::give_credit(credit, amount);
                }
            }
            FromDaemon::Welcome(_) | FromDaemon::Status(_) | FromDaemon::Stop(_) => {
                return Err(IpcError::Unexpected(
                    "a handshake message after the handshake",
                ));
            }
        }
        Ok(())
    }

    fn receive_chunk(&self, id: u64, chunk: Vec<u8>) -> Result<(), IpcError> {
        let waiting = self.waiting();
        let Some(chunks) = waiting.calls.get(&id).and_then(|call| call.chunks.as_ref()) else {
            return Ok(());
        };
        match chunks.try_send(FilePart::Chunk(chunk)) {
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(IpcError::Unexpected("more chunks than credits"))
            }
            _ => Ok(()),
        }
    }
}

impl DaemonConnection {
    /// Records that something was received.
    fn note_activity(&self, is_beat: bool) {
        self.heartbeat.send_if_modified(|heartbeat| {
            let was_lost = heartbeat.is_lost();
            heartbeat.received(is_beat);
            if was_lost {
                info!("the session daemon answers again");
            }
            was_lost
        });
    }
}

impl Drop for DaemonConnection {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// Sends heartbeats and counts those that are missed, until the connection ends.
async fn send_heartbeats(connection: Weak<DaemonConnection>, closed: CancellationToken) {
    let mut beats = tokio::time::interval(HEARTBEAT_INTERVAL);
    // Time during which this frontend was stopped must not count against the daemon.
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beats.tick() => {}
            () = closed.cancelled() => return,
        }
        let Some(connection) = connection.upgrade() else {
            return;
        };
        let (mut must_send, mut is_new) = (false, false);
        connection.heartbeat.send_modify(|heartbeat| {
            let was_lost = heartbeat.is_lost();
            must_send = heartbeat.beat();
            is_new = heartbeat.is_lost() && !was_lost;
        });
        if is_new {
            error!(
                "the session daemon does not answer; its sessions are lost if it is killed, and \
                 continue if it recovers"
            );
        }
        if must_send {
            connection.push(0, &ToDaemon::Heartbeat);
        }
    }
}

/// Delivers messages of the daemon, until the connection ends.
async fn receive(
    connection: &Weak<DaemonConnection>,
    reader: &mut BufReader<OwnedReadHalf>,
    subscribers: &Subscribers,
) -> Result<(), IpcError> {
    let mut assembler = MessageAssembler::default();
    while let Some(frame) = frame::read(reader).await? {
        let Some(connection) = connection.upgrade() else {
            return Ok(());
        };
        connection.note_activity(false);
        let Some(IpcFrame { id, kind, payload }) = assembler.add(frame)? else {
            continue;
        };
        match kind {
            FrameKind::Chunk => connection.receive_chunk(id, payload)?,
            FrameKind::Message => connection.dispatch(id, frame::decode(&payload)?, subscribers)?,
            FrameKind::Reply => {
                if let Some(call) = connection.waiting().calls.remove(&id) {
                    // The caller may have gone away in this moment.
                    let _ = call.answer.send(payload);
                }
            }
            FrameKind::Part => unreachable!("parts were assembled"),
        }
    }
    Ok(())
}

/// A call that was sent. If it is dropped without its reply, the other side forgets it.
pub(super) struct SentCall {
    connection: Arc<DaemonConnection>,
    number: u64,
    answer: oneshot::Receiver<Vec<u8>>,
}

impl SentCall {
    /// Waits for the reply. A cancellation is passed on, and the reply is awaited all the same. A
    /// working daemon replies within `wait`.
    pub(super) async fn reply(
        mut self,
        cancel: CancellationToken,
        wait: Option<Duration>,
    ) -> Result<ReplyResult, RpcError> {
        let connection = Arc::clone(&self.connection);
        let mut silence = pin!(connection.becomes_unresponsive(wait));
        tokio::select! {
            biased;
            answer = &mut self.answer => return self.decode_reply(answer),
            () = cancel.cancelled() => self.connection.push(self.number, &ToDaemon::Cancel),
            () = &mut silence => return Err(RpcError::Unresponsive { sent: true }),
        }
        tokio::select! {
            biased;
            answer = &mut self.answer => self.decode_reply(answer),
            () = &mut silence => Err(RpcError::Unresponsive { sent: true }),
        }
    }

    fn decode_reply(
        &self,
        answer: Result<Vec<u8>, oneshot::error::RecvError>,
    ) -> Result<ReplyResult, RpcError> {
        let payload = answer.map_err(|_| RpcError::Disconnected)?;
        frame::decode(&payload).map_err(|error| {
            warn!(%error, "a reply of the session daemon could not be decoded");
            RpcError::InvalidReply
        })
    }
}

impl Drop for SentCall {
    fn drop(&mut self) {
        if self
            .connection
            .waiting()
            .calls
            .remove(&self.number)
            .is_none()
        {
            return;
        }
        self.connection.push(self.number, &ToDaemon::Forget);
    }
}

/// Copies in pieces of the size of a chunk.
async fn copy(
    source: &mut (impl AsyncRead + Unpin + ?Sized),
    sink: &mut (impl AsyncWrite + Unpin + ?Sized),
) -> io::Result<u64> {
    let mut source = BufReader::with_capacity(CHUNK, source);
    let mut total = 0;
    loop {
        let piece = source.fill_buf().await?;
        if piece.is_empty() {
            return Ok(total);
        }
        sink.write_all(piece).await?;
        let size = piece.len();
        total += size as u64;
        source.consume(size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_unresponsive_after_missed_heartbeats_and_responsive_after_any_message() {
        let mut heartbeat = Heartbeat::default();
        assert!(heartbeat.beat(), "the first beat is sent");
        for _ in 0..MAX_MISSED_HEARTBEATS - 1 {
            assert!(!heartbeat.beat(), "one beat at a time is on its way");
            assert!(!heartbeat.is_lost());
        }
        let mut heard = heartbeat;
        heard.received(false);
        heard.beat();
        assert!(!heard.is_lost(), "any word counts");
        heartbeat.beat();
        assert!(heartbeat.is_lost());
        heartbeat.received(true);
        assert!(
            !heartbeat.is_lost() && heartbeat.beat(),
            "it is well again, and asked again"
        );
    }

    #[test]
    fn a_daemon_that_replies_to_heartbeats_misses_none() {
        let mut heartbeat = Heartbeat::default();
        for _ in 0..10 * MAX_MISSED_HEARTBEATS {
            assert!(heartbeat.beat());
            heartbeat.received(true);
            assert_eq!(heartbeat.missed, 0);
        }
    }
}
