//! The multiplexed connection to the supervisor of one container, which carries all traffic with
//! the inside.
//!
//! A reader task decodes messages and passes them to the copier of each interpreter; a writer task
//! sends. A copier connects the streams of an interpreter to a real socket and real pipes of this
//! process, so that the code that serves a session sees the same as with a native sandbox: a
//! channel, and two pipes that come with its first frame.
//!
//! Memory is bounded by credits: a stream that sends more than was granted breaks the connection,
//! and so does a frame that is not a message. When the connection ends, so do all of its
//! interpreters, after all received data was passed on.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bollard::container::LogOutput;
use futures_util::{Stream, StreamExt};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf, pipe};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::debug;

use super::engine::AttachedStreams;
use super::messages::{ExitStatus, FailureKind, HostMessage, SlotRequest, SupervisorMessage};
use super::mux::{CHANNEL_CREDIT, MuxDecoder, PIECE, PIPE_CREDIT};
use crate::sandbox::Exit;

/// Timeout for delivering the last output of an interpreter to a slow reader.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum bytes kept of the supervisor's own error output.
const MAX_ERROR_OUTPUT: usize = 4 * 1024;
/// Maximum number of messages queued for a container. A container with a full queue is not reading.
const MAX_OUTGOING: usize = 4096;

/// The connection to one container.
#[derive(Clone)]
pub(super) struct MuxConnection {
    shared: Arc<Shared>,
}

struct Shared {
    next_number: AtomicU32,
    outgoing: mpsc::Sender<Vec<u8>>,
    state: Mutex<State>,
    /// The supervisor's message when everything was ready.
    ready: watch::Sender<Option<Ready>>,
    ended: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    copiers: HashMap<u32, Copier>,
    pipes: HashMap<u32, Inbound<Vec<u8>>>,
    answers: HashMap<u32, oneshot::Sender<Result<RequestAnswer, RequestFailure>>>,
    /// Exits of the programs started beside sessions.
    programs: HashMap<u32, watch::Sender<Option<Exit>>>,
    /// Pipes that the supervisor keeps for programs, by the pipe that represents each of them here.
    program_pipes: HashMap<PipeId, u32>,
    /// Slots and their checkpoints.
    lost_checkpoints: HashSet<(u32, u32)>,
    /// What the supervisor has written to its standard error.
    error_output: String,
}

/// Identifies a pipe of this machine, by device and inode.
type PipeId = (u64, u64);

/// The answer to a request that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestAnswer {
    /// The slot that was found by `FindOwner`. It need not exist.
    pub(super) owner: Option<u32>,
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RequestFailure {
    pub(super) why: String,
    pub(super) kind: FailureKind,
}

/// The supervisor's report about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    /// The landlock version that sessions are confined by; none below one.
    pub(super) landlock: i64,
}

/// The sending end of a stream that comes from inside.
struct Inbound<T> {
    /// The interpreter that it belongs to.
    owner: u32,
    pieces: mpsc::Sender<T>,
    credit: Arc<Credit>,
}

/// Data for the channel of an interpreter.
enum Piece {
    Bytes(Vec<u8>),
    WithPipes(Vec<u8>, [OwnedFd; 2]),
}

/// Copies between the streams of one interpreter and its socket and pipes on this side.
struct Copier {
    channel: Inbound<Piece>,
    /// Bytes that the supervisor accepts from us.
    allowance: Arc<Semaphore>,
    tasks: Vec<JoinHandle<()>>,
    reader: JoinHandle<()>,
    exit: watch::Sender<Option<Exit>>,
}

/// An interpreter's channel and its exit, for the code that serves the session.
pub(super) struct Endpoints {
    pub(super) number: u32,
    pub(super) channel: UnixStream,
    pub(super) exit: watch::Receiver<Option<Exit>>,
}

impl MuxConnection {
    /// Takes over the standard streams of a container and sends the plan.
    pub(super) fn open(attached: AttachedStreams, plan: &Value) -> MuxConnection {
        let (outgoing, to_send) = mpsc::channel(MAX_OUTGOING);
        let shared = Arc::new(Shared {
            next_number: AtomicU32::new(1),
            outgoing,
            state: Mutex::default(),
            ready: watch::Sender::new(None),
            ended: watch::Sender::new(false),
        });
        let AttachedStreams { output, input } = attached;
        // It is the first message, and its receiver is started below.
        let _ = shared.outgoing.try_send(format!("{plan}\n").into_bytes());
        tokio::spawn(write(input, to_send, shared.ended.subscribe()));
        tokio::spawn(read(output, shared.clone()));
        MuxConnection { shared }
    }

    /// Waits until sessions can be made. Returns `None` if the container has ended instead.
    pub(super) async fn ready(&self) -> Option<Ready> {
        let (mut ready, mut ended) = (self.shared.ready.subscribe(), self.shared.ended.subscribe());
        tokio::select! {
            ready = ready.wait_for(Option::is_some) => ready.ok().and_then(|ready| *ready),
            _ = ended.wait_for(|ended| *ended) => None,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        *self.shared.ended.borrow()
    }

    /// Returns the supervisor's output on its standard error.
    pub(super) fn error_output(&self) -> String {
        self.shared.state().error_output.trim().to_owned()
    }

    pub(super) fn has_lost(&self, slot: u32, checkpoint: u32) -> bool {
        self.shared
            .state()
            .lost_checkpoints
            .contains(&(slot, checkpoint))
    }

    /// Makes the endpoints of an interpreter, before it is made.
    pub(super) fn interpreter(&self) -> io::Result<Endpoints> {
        let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let (near, channel) = UnixStream::pair()?;
        let (from_session, to_session) = near.into_split();
        let (inbound, to_write, credit) = Inbound::new(number, CHANNEL_CREDIT);
        let allowance = Arc::new(Semaphore::new(CHANNEL_CREDIT));
        let exit = watch::Sender::new(None);
        let writer = fill_channel(
            number,
            to_session,
            to_write,
            credit,
            self.shared.outgoing.clone(),
        );
        let reader = empty_channel(
            number,
            from_session,
            allowance.clone(),
            self.shared.outgoing.clone(),
        );
        let receiver = exit.subscribe();
        let copier = Copier {
            channel: inbound,
            allowance,
            tasks: vec![tokio::spawn(writer)],
            reader: tokio::spawn(reader),
            exit,
        };
        self.shared.state().copiers.insert(number, copier);
        Ok(Endpoints {
            number,
            channel,
            exit: receiver,
        })
    }

    /// Discards an interpreter that was never made.
    pub(super) fn abandon(&self, number: u32) {
        if let Some(copier) = self.shared.state().copiers.remove(&number) {
            copier.reader.abort();
        }
    }

    /// Sends a request and waits until it is carried out.
    pub(super) async fn request(&self, request: SlotRequest) -> Result<(), String> {
        self.ask(request)
            .await
            .map(drop)
            .map_err(|failure| failure.why)
    }

    /// Sends a request and waits for its answer, or for the kind of its failure.
    pub(super) async fn ask(&self, request: SlotRequest) -> Result<RequestAnswer, RequestFailure> {
        let ended = || RequestFailure {
            why: "the container has ended".to_owned(),
            kind: FailureKind::Other,
        };
        let id = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        self.shared.state().answers.insert(id, sender);
        // Checked after the answer's receiver is registered: a connection that ends now drops it.
        if self.has_ended() {
            return Err(ended());
        }
        self.send(&HostMessage::Request { id, request });
        answer.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Sends a request without waiting for its answer.
    pub(super) fn send_request(&self, request: SlotRequest) {
        self.send(&HostMessage::Request { id: 0, request });
    }

    /// Assigns the number of a program that is about to be started.
    pub(super) fn program(&self) -> (u32, watch::Receiver<Option<Exit>>) {
        let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let exit = watch::Sender::new(None);
        let receiver = exit.subscribe();
        self.shared.state().programs.insert(number, exit);
        (number, receiver)
    }

    /// Sends the standard input of a program that is about to be started.
    pub(super) async fn feed(&self, program: u32, input: &[u8]) {
        // An empty input must be sent too.
        for bytes in std::iter::once(&input[..0]).chain(input.chunks(PIECE)) {
            let piece = HostMessage::Input { program, bytes };
            let _ = self.shared.outgoing.send(piece.encode()).await;
        }
    }

    /// Discards a program that was not started.
    pub(super) fn abandon_program(&self, number: u32) {
        self.shared.state().programs.remove(&number);
    }

    /// Returns the number of the kept pipes that these two descriptors represent.
    pub(super) fn program_pipes(&self, output: &OwnedFd, errors: &OwnedFd) -> Option<u32> {
        let state = self.shared.state();
        let number = |end: &OwnedFd| state.program_pipes.get(&pipe_id(end)?).copied();
        number(output).filter(|_| number(output) == number(errors))
    }

    /// Sends a message. A connection whose queue is full is dead; a caller that must be certain
    /// then uses the engine.
    pub(super) fn send(&self, message: &HostMessage<'_>) {
        self.shared.send(message);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no holder of the connection panics")
    }

    fn send(&self, message: &HostMessage<'_>) {
        if let Err(TrySendError::Full(_)) = self.outgoing.try_send(message.encode()) {
            self.end("it does not read its input any more");
        }
    }

    /// Processes one message. An error breaks the connection.
    fn receive(self: &Arc<Shared>, message: SupervisorMessage) -> Result<(), String> {
        match message {
            SupervisorMessage::Data { stream, bytes } => return self.receive_bytes(stream, bytes),
            SupervisorMessage::Pipes {
                interpreter,
                output,
                errors,
                bytes,
            } => return self.receive_pipes(interpreter, [output, errors], bytes),
            SupervisorMessage::ProgramPipes {
                interpreter,
                pipes,
                bytes,
            } => return self.receive_program_pipes(interpreter, pipes, bytes),
            SupervisorMessage::Credit { interpreter, bytes } => {
                if let Some(copier) = self.state().copiers.get(&interpreter) {
                    let most = CHANNEL_CREDIT.saturating_sub(copier.allowance.available_permits());
                    copier.allowance.add_permits((bytes as usize).min(most));
                }
            }
            SupervisorMessage::Closed { stream } => {
                self.state().pipes.remove(&stream);
            }
            SupervisorMessage::Ready { landlock } => {
                self.ready.send_replace(Some(Ready { landlock }));
            }
            SupervisorMessage::Done { id, owner } => self.answer(id, Ok(RequestAnswer { owner })),
            SupervisorMessage::Failed { id, why, kind } => {
                self.answer(id, Err(RequestFailure { why, kind }));
            }
            SupervisorMessage::Exited { process, status } => self.finish(
                process,
                match status {
                    ExitStatus::Code(code) => Exit::Code(code),
                    ExitStatus::Signal(signal) => Exit::Signal(signal),
                },
            ),
            SupervisorMessage::CheckpointLost { slot, checkpoint } => {
                self.state().lost_checkpoints.insert((slot, checkpoint));
            }
        }
        Ok(())
    }

    fn answer(&self, id: u32, answer: Result<RequestAnswer, RequestFailure>) {
        if let Some(waiting) = self.state().answers.remove(&id) {
            let _ = waiting.send(answer);
        }
    }

    fn receive_bytes(&self, stream: u32, bytes: Vec<u8>) -> Result<(), String> {
        let state = self.state();
        if let Some(pipe) = state.pipes.get(&stream) {
            pipe.credit.take(bytes.len())?;
            pipe.pass_on(bytes)?;
        } else if let Some(copier) = state.copiers.get(&stream) {
            copier.channel.credit.take(bytes.len())?;
            copier.channel.pass_on(Piece::Bytes(bytes))?;
        }
        Ok(())
    }

    /// Makes real pipes for two new streams and passes their reading ends on, together with the
    /// bytes they came with.
    fn receive_pipes(
        &self,
        interpreter: u32,
        streams: [u32; 2],
        bytes: Vec<u8>,
    ) -> Result<(), String> {
        let mut state = self.state();
        let State { copiers, pipes, .. } = &mut *state;
        let Some(copier) = copiers.get_mut(&interpreter) else {
            return Ok(());
        };
        copier.channel.credit.take(bytes.len())?;
        let mut read_ends = Vec::with_capacity(2);
        for stream in streams {
            let (sender, read_end) =
                make_pipe().map_err(|error| format!("a pipe could not be made: {error}"))?;
            let (inbound, to_write, credit) = Inbound::new(interpreter, PIPE_CREDIT);
            copier.tasks.retain(|task| !task.is_finished());
            copier.tasks.push(tokio::spawn(fill_pipe(
                stream,
                sender,
                to_write,
                credit,
                self.outgoing.clone(),
            )));
            pipes.insert(stream, inbound);
            read_ends.push(read_end);
        }
        let read_ends: [OwnedFd; 2] = read_ends.try_into().expect("two pipes were made");
        copier.channel.pass_on(Piece::WithPipes(bytes, read_ends))
    }

    /// Registers two pipes inside that a program is to write to. Their representatives here can
    /// only be held: when the last holder drops them, the pipes are closed inside.
    fn receive_program_pipes(
        self: &Arc<Shared>,
        interpreter: u32,
        pipes: u32,
        bytes: Vec<u8>,
    ) -> Result<(), String> {
        let mut state = self.state();
        let State {
            copiers,
            program_pipes,
            ..
        } = &mut *state;
        let Some(copier) = copiers.get(&interpreter) else {
            drop(state);
            self.send(&HostMessage::ReleaseProgramPipes { pipes });
            return Ok(());
        };
        copier.channel.credit.take(bytes.len())?;
        let failed = |error: io::Error| format!("a pipe could not be made: {error}");
        let (mut ids, mut held, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..2 {
            let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
                .map_err(|error| failed(error.into()))?;
            rustix::io::ioctl_fionbio(&ours, true).map_err(|error| failed(error.into()))?;
            ids.extend(pipe_id(&theirs));
            held.push(pipe::Receiver::from_owned_fd(ours).map_err(failed)?);
            ends.push(theirs);
        }
        program_pipes.extend(ids.iter().map(|id| (*id, pipes)));
        let ends: [OwnedFd; 2] = ends.try_into().expect("two pipes were made");
        copier.channel.pass_on(Piece::WithPipes(bytes, ends))?;
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            for mut end in held {
                // Nothing is ever written to them.
                let _ = end.read(&mut [0]).await;
            }
            shared
                .state()
                .program_pipes
                .retain(|id, _| !ids.contains(id));
            shared.send(&HostMessage::ReleaseProgramPipes { pipes });
        });
        Ok(())
    }

    /// Ends an interpreter: received data is passed on, then its exit is reported.
    fn finish(&self, number: u32, how: Exit) {
        let mut state = self.state();
        if let Some(program) = state.programs.remove(&number) {
            program.send_replace(Some(how));
            return;
        }
        let Some(Copier {
            tasks,
            reader,
            exit,
            ..
        }) = state.copiers.remove(&number)
        else {
            return;
        };
        // When their last sender is gone, the copiers end after passing everything on.
        state.pipes.retain(|_, pipe| pipe.owner != number);
        drop(state);
        reader.abort();
        tokio::spawn(async move {
            let all = async {
                for task in tasks {
                    let _ = task.await;
                }
            };
            let _ = tokio::time::timeout(DRAIN_TIMEOUT, all).await;
            exit.send_replace(Some(how));
        });
    }

    /// Ends everything that uses the connection.
    fn end(&self, why: &str) {
        debug!(why, "the connection to a container has ended");
        let numbers: Vec<u32> = {
            let mut state = self.state();
            state.answers.clear();
            state
                .copiers
                .keys()
                .chain(state.programs.keys())
                .copied()
                .collect()
        };
        self.ended.send_replace(true);
        for number in numbers {
            self.finish(number, Exit::Unknown);
        }
    }
}

impl<T> Inbound<T> {
    fn new(owner: u32, credit: usize) -> (Inbound<T>, mpsc::Receiver<T>, Arc<Credit>) {
        // A piece has at least one byte, so the credit bounds the number of pieces too.
        let (pieces, receiver) = mpsc::channel(credit);
        let credit = Arc::new(Credit(AtomicUsize::new(credit)));
        (
            Inbound {
                owner,
                pieces,
                credit: credit.clone(),
            },
            receiver,
            credit,
        )
    }

    /// Passes a piece to its reader. A piece for a closed reader is dropped.
    fn pass_on(&self, piece: T) -> Result<(), String> {
        match self.pieces.try_send(piece) {
            Err(TrySendError::Full(_)) => Err("it sent more than it was allowed to".to_owned()),
            Ok(()) | Err(TrySendError::Closed(_)) => Ok(()),
        }
    }
}

/// Bytes that may still arrive on a stream.
struct Credit(AtomicUsize);

impl Credit {
    fn take(&self, amount: usize) -> Result<(), String> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(amount)
            });
        taken
            .map(|_| ())
            .map_err(|_| "it sent more than it was allowed to".to_owned())
    }

    fn give(&self, amount: usize) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }
}

async fn write(
    mut input: Pin<Box<dyn AsyncWrite + Send>>,
    mut messages: mpsc::Receiver<Vec<u8>>,
    mut ended: watch::Receiver<bool>,
) {
    let sending = async {
        while let Some(mut bytes) = messages.recv().await {
            // Takes all queued messages, so that a burst is one write.
            while let Ok(more) = messages.try_recv() {
                bytes.extend(more);
            }
            input.write_all(&bytes).await?;
            input.flush().await?;
        }
        Ok::<(), io::Error>(())
    };
    // The reader notices the end of the connection; dropping the input closes the container's
    // standard input.
    tokio::select! {
        _ = sending => {}
        _ = ended.wait_for(|ended| *ended) => {}
    }
}

async fn read(
    mut output: Pin<Box<dyn Stream<Item = Result<LogOutput, bollard::errors::Error>> + Send>>,
    shared: Arc<Shared>,
) {
    let mut decoder = MuxDecoder::default();
    let why = 'connection: loop {
        match output.next().await {
            Some(Ok(LogOutput::StdOut { message } | LogOutput::Console { message })) => {
                decoder.feed(&message);
                loop {
                    match decoder.next() {
                        Ok(Some(frame)) => {
                            let received = SupervisorMessage::decode(frame)
                                .map_err(|error| error.to_string())
                                .and_then(|message| shared.receive(message));
                            if let Err(why) = received {
                                break 'connection why;
                            }
                        }
                        Ok(None) => break,
                        Err(error) => break 'connection error.to_string(),
                    }
                }
            }
            Some(Ok(LogOutput::StdErr { message })) => {
                let mut state = shared.state();
                if state.error_output.len() < MAX_ERROR_OUTPUT {
                    state
                        .error_output
                        .push_str(&String::from_utf8_lossy(&message));
                }
            }
            Some(Ok(LogOutput::StdIn { .. })) => {}
            Some(Err(error)) => break error.to_string(),
            None => break "the stream is over".to_owned(),
        }
    };
    shared.end(&why);
}

/// Copies data from inside to the channel, and returns credit for the bytes taken.
async fn fill_channel(
    number: u32,
    mut channel: OwnedWriteHalf,
    mut pieces: mpsc::Receiver<Piece>,
    credit: Arc<Credit>,
    outgoing: mpsc::Sender<Vec<u8>>,
) {
    while let Some(piece) = pieces.recv().await {
        let (size, written) = match piece {
            Piece::Bytes(bytes) => (bytes.len(), channel.write_all(&bytes).await),
            Piece::WithPipes(bytes, pipes) => (
                bytes.len(),
                send_with_pipes(&mut channel, &bytes, &pipes).await,
            ),
        };
        if written.is_err() {
            return;
        }
        credit.give(size);
        let credit = HostMessage::Credit {
            stream: number,
            bytes: size,
        };
        let _ = outgoing.send(credit.encode()).await;
    }
}

fn pipe_id(end: &OwnedFd) -> Option<PipeId> {
    rustix::fs::fstat(end)
        .ok()
        .map(|found| (found.st_dev, found.st_ino))
}

/// Makes a pipe, and keeps its writing end.
fn make_pipe() -> io::Result<(pipe::Sender, OwnedFd)> {
    let (read_end, write_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&write_end, true)?;
    Ok((pipe::Sender::from_owned_fd(write_end)?, read_end))
}

/// Sends bytes whose first one carries two descriptors.
async fn send_with_pipes(
    channel: &mut OwnedWriteHalf,
    bytes: &[u8],
    pipes: &[OwnedFd; 2],
) -> io::Result<()> {
    let descriptors = [pipes[0].as_fd(), pipes[1].as_fd()];
    let socket: &UnixStream = channel.as_ref();
    let sent = socket
        .async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            Ok(rustix::net::sendmsg(
                socket,
                &[IoSlice::new(bytes)],
                &mut ancillary,
                flags,
            )?)
        })
        .await?;
    channel.write_all(&bytes[sent..]).await
}

/// Copies frames of the host to the inside, within its credit.
async fn empty_channel(
    number: u32,
    mut channel: OwnedReadHalf,
    allowance: Arc<Semaphore>,
    outgoing: mpsc::Sender<Vec<u8>>,
) {
    let mut buffer = vec![0; PIECE];
    while let Ok(size @ 1..) = channel.read(&mut buffer).await {
        let Ok(permits) = allowance.acquire_many(size as u32).await else {
            return;
        };
        permits.forget();
        let data = HostMessage::Data {
            interpreter: number,
            bytes: &buffer[..size],
        };
        if outgoing.send(data.encode()).await.is_err() {
            return;
        }
    }
    let close = HostMessage::CloseChannel {
        interpreter: number,
    };
    let _ = outgoing.send(close.encode()).await;
}

/// Copies text from inside to a pipe, and returns credit for the bytes taken. Text without a reader
/// is dropped, so that its writer is not blocked.
async fn fill_pipe(
    number: u32,
    mut pipe: pipe::Sender,
    mut pieces: mpsc::Receiver<Vec<u8>>,
    credit: Arc<Credit>,
    outgoing: mpsc::Sender<Vec<u8>>,
) {
    let mut is_read = true;
    while let Some(bytes) = pieces.recv().await {
        is_read = is_read && pipe.write_all(&bytes).await.is_ok();
        credit.give(bytes.len());
        let granted = HostMessage::Credit {
            stream: number,
            bytes: bytes.len(),
        };
        let _ = outgoing.send(granted.encode()).await;
    }
}
