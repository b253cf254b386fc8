//! The multiplexed connection to the supervisor of one container, which carries all traffic with
//! the inside.
//!
//! A reader task decodes messages and passes them to the copiers (`Pump`) of interpreters; a writer
//! task sends. Each copier connects the stream to a real socket or pipe of this process, so that
//! the code that serves a session sees the same as with a native sandbox: a channel, and two pipes
//! that come with its first frame.
//!
//! Memory is bounded by credits: a strand that sends more than was granted breaks the connection.
//! When the connection ends, so do all of its interpreters, after all received data was passed on.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bollard::container::LogOutput;
use cellblock_json::Budget;
use futures_util::{Stream, StreamExt};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf, pipe};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::debug;

use super::engine::Attached;
use super::strands::{self, CHANNEL_CREDIT, Decoder, Message, PIECE, PIPE_CREDIT};
use crate::sandbox::Exit;

/// Timeout for delivering the last output of an interpreter to a slow reader.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Maximum bytes kept of the supervisor's own error output.
const COMPLAINTS: usize = 4 * 1024;
/// Maximum number of messages queued for a container. A container with a full queue is not reading.
const MOST_OUTGOING: usize = 4096;
/// Limits for the JSON of an order or an answer of the supervisor, which are short.
const WORDS: Budget = Budget {
    depth: 8,
    memory: 64 * 1024,
};

/// The connection to one container.
#[derive(Clone)]
pub(super) struct Line {
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
    interpreters: HashMap<u32, Pump>,
    pipes: HashMap<u32, Strand<Vec<u8>>>,
    answers: HashMap<u32, oneshot::Sender<Result<Value, Fault>>>,
    /// Exits of the programs started beside sessions.
    programs: HashMap<u32, watch::Sender<Option<Exit>>>,
    /// Pipes inside, by the pipe that represents each of them here.
    outlets: HashMap<PipeId, u32>,
    lost_checkpoints: HashSet<(u32, u32)>,
    complaints: String,
}

/// Identifies a pipe of this machine, by device and inode.
type PipeId = (u64, u64);

/// Why an order was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) why: String,
    pub(super) kind: FaultKind,
}

/// The kind of failure reported by the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// There is no such program.
    Missing,
    /// The kernel does not start the program.
    Refused,
    Unsupported,
    Other,
}

impl FaultKind {
    fn of(word: &str) -> FaultKind {
        match word {
            "missing" => FaultKind::Missing,
            "refused" => FaultKind::Refused,
            "unsupported" => FaultKind::Unsupported,
            _ => FaultKind::Other,
        }
    }
}

/// The supervisor's report about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    /// The landlock version that sessions are confined by; none below one.
    pub(super) landlock: i64,
}

/// The sending end of a strand that comes from inside.
struct Strand<T> {
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

/// One interpreter as seen by the connection.
struct Pump {
    channel: Strand<Piece>,
    /// Bytes that the supervisor accepts from us.
    allowance: Arc<Semaphore>,
    tasks: Vec<JoinHandle<()>>,
    reader: JoinHandle<()>,
    exit: watch::Sender<Option<Exit>>,
}

/// An interpreter's channel and its exit, for the code that serves the session.
pub(super) struct Ends {
    pub(super) number: u32,
    pub(super) channel: UnixStream,
    pub(super) exit: watch::Receiver<Option<Exit>>,
}

impl Line {
    /// Takes over the standard streams of a container and sends the plan.
    pub(super) fn open(attached: Attached, plan: &Value) -> Line {
        let (outgoing, to_send) = mpsc::channel(MOST_OUTGOING);
        let shared = Arc::new(Shared {
            next_number: AtomicU32::new(1),
            outgoing,
            state: Mutex::default(),
            ready: watch::Sender::new(None),
            ended: watch::Sender::new(false),
        });
        let Attached { output, input } = attached;
        // It is the first message, and its receiver is started below.
        let _ = shared.outgoing.try_send(format!("{plan}\n").into_bytes());
        tokio::spawn(write(input, to_send, shared.ended.subscribe()));
        tokio::spawn(read(output, shared.clone()));
        Line { shared }
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
    pub(super) fn complaints(&self) -> String {
        self.shared.state().complaints.trim().to_owned()
    }

    pub(super) fn has_lost(&self, member: u32, checkpoint: u32) -> bool {
        self.shared
            .state()
            .lost_checkpoints
            .contains(&(member, checkpoint))
    }

    /// Makes the two ends of an interpreter, before it is made.
    pub(super) fn interpreter(&self) -> io::Result<Ends> {
        let number = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let (near, channel) = UnixStream::pair()?;
        let (from_session, to_session) = near.into_split();
        let (strand, to_write, credit) = Strand::new(number, CHANNEL_CREDIT);
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
        let pump = Pump {
            channel: strand,
            allowance,
            tasks: vec![tokio::spawn(writer)],
            reader: tokio::spawn(reader),
            exit,
        };
        self.shared.state().interpreters.insert(number, pump);
        Ok(Ends {
            number,
            channel,
            exit: receiver,
        })
    }

    /// Discards an interpreter that was never made.
    pub(super) fn abandon(&self, number: u32) {
        if let Some(pump) = self.shared.state().interpreters.remove(&number) {
            pump.reader.abort();
        }
    }

    /// Sends an order and waits for its answer.
    pub(super) async fn ask(&self, kind: u8, number: u32, order: Value) -> Result<(), String> {
        self.carry_out(kind, number, order)
            .await
            .map(drop)
            .map_err(|fault| fault.why)
    }

    /// Sends an order and waits for its answer, or for the kind of its failure.
    pub(super) async fn carry_out(
        &self,
        kind: u8,
        number: u32,
        mut order: Value,
    ) -> Result<Value, Fault> {
        let ended = || Fault {
            why: "the container has ended".to_owned(),
            kind: FaultKind::Other,
        };
        let ask = self.shared.next_number.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        order["ask"] = json!(ask);
        self.shared.state().answers.insert(ask, tell);
        // Checked after the answer's receiver is registered: a connection that ends now drops it.
        if self.has_ended() {
            return Err(ended());
        }
        self.say(kind, number, order.to_string().as_bytes());
        told.await.unwrap_or_else(|_| Err(ended()))
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
        for piece in std::iter::once(&input[..0]).chain(input.chunks(PIECE)) {
            let _ = self
                .shared
                .outgoing
                .send(strands::encode(b't', program, piece))
                .await;
        }
    }

    /// Discards a program that was not started.
    pub(super) fn abandon_program(&self, number: u32) {
        self.shared.state().programs.remove(&number);
    }

    /// Returns the number of the pipes inside that these two descriptors represent.
    pub(super) fn outlets(&self, output: &OwnedFd, errors: &OwnedFd) -> Option<u32> {
        let state = self.shared.state();
        let number = |end: &OwnedFd| state.outlets.get(&pipe_id(end)?).copied();
        number(output).filter(|_| number(output) == number(errors))
    }

    /// Sends an order that has no answer. A connection whose queue is full is dead; a caller that
    /// must be certain then uses the engine.
    pub(super) fn say(&self, kind: u8, number: u32, rest: &[u8]) {
        if let Err(TrySendError::Full(_)) = self
            .shared
            .outgoing
            .try_send(strands::encode(kind, number, rest))
        {
            self.shared.end("it takes no orders any more");
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of the line panics")
    }

    /// Processes one message. An error breaks the connection.
    fn receive(self: &Arc<Shared>, message: Message) -> Result<(), String> {
        let Message { kind, number, rest } = message;
        match kind {
            b'd' => self.receive_bytes(number, rest),
            b'p' => self.receive_pipes(number, &rest),
            b'q' => self.receive_outlets(number, &rest),
            b'w' => {
                if let (Some(pump), Some(amount)) = (
                    self.state().interpreters.get(&number),
                    strands::number_at(&rest, 0),
                ) {
                    let most = CHANNEL_CREDIT.saturating_sub(pump.allowance.available_permits());
                    pump.allowance.add_permits((amount as usize).min(most));
                }
                Ok(())
            }
            b'h' => {
                self.state().pipes.remove(&number);
                Ok(())
            }
            _ => self.receive_words(kind, number, &rest),
        }
    }

    fn receive_words(self: &Arc<Shared>, kind: u8, number: u32, rest: &[u8]) -> Result<(), String> {
        let words: Value = cellblock_json::read(rest, WORDS)
            .map_err(|_| "it sent words that are no JSON, or too many".to_owned())?;
        match kind {
            b'r' => {
                let landlock = words["landlock"].as_i64().unwrap_or(0);
                self.ready.send_replace(Some(Ready { landlock }));
            }
            b'a' => {
                if let Some(answer) = self.state().answers.remove(&number) {
                    let why = words["why"]
                        .as_str()
                        .unwrap_or("it did not say why")
                        .to_owned();
                    let kind = FaultKind::of(words["kind"].as_str().unwrap_or_default());
                    let _ = answer.send(if words["ok"] == true {
                        Ok(words)
                    } else {
                        Err(Fault { why, kind })
                    });
                }
            }
            b'e' => {
                let part = |name: &str| {
                    words[name]
                        .as_i64()
                        .and_then(|value| i32::try_from(value).ok())
                };
                let exit = match (part("code"), part("signal")) {
                    (Some(code), _) => Exit::Code(code),
                    (None, Some(signal)) => Exit::Signal(signal),
                    (None, None) => Exit::Unknown,
                };
                self.finish(number, exit);
            }
            b'l' => {
                let checkpoint = words["checkpoint"]
                    .as_u64()
                    .and_then(|value| u32::try_from(value).ok());
                self.state()
                    .lost_checkpoints
                    .extend(checkpoint.map(|checkpoint| (number, checkpoint)));
            }
            // A newer supervisor may send more kinds.
            _ => {}
        }
        Ok(())
    }

    fn receive_bytes(&self, number: u32, bytes: Vec<u8>) -> Result<(), String> {
        let state = self.state();
        if let Some(pipe) = state.pipes.get(&number) {
            pipe.credit.take(bytes.len())?;
            pipe.pass_on(bytes)?;
        } else if let Some(pump) = state.interpreters.get(&number) {
            pump.channel.credit.take(bytes.len())?;
            pump.channel.pass_on(Piece::Bytes(bytes))?;
        }
        Ok(())
    }

    /// Makes real pipes for two new strands and passes their reading ends on, together with the
    /// bytes they came with.
    fn receive_pipes(&self, number: u32, rest: &[u8]) -> Result<(), String> {
        let (Some(out), Some(err)) = (strands::number_at(rest, 0), strands::number_at(rest, 4))
        else {
            return Err("it announced pipes without numbers".to_owned());
        };
        let bytes = rest[8..].to_vec();
        let mut state = self.state();
        let State {
            interpreters,
            pipes,
            ..
        } = &mut *state;
        let Some(pump) = interpreters.get_mut(&number) else {
            return Ok(());
        };
        pump.channel.credit.take(bytes.len())?;
        let mut read_ends = Vec::with_capacity(2);
        for strand in [out, err] {
            let (sender, read_end) =
                make_pipe().map_err(|error| format!("a pipe could not be made: {error}"))?;
            let (sending, to_write, credit) = Strand::new(number, PIPE_CREDIT);
            pump.tasks.retain(|task| !task.is_finished());
            pump.tasks.push(tokio::spawn(fill_pipe(
                strand,
                sender,
                to_write,
                credit,
                self.outgoing.clone(),
            )));
            pipes.insert(strand, sending);
            read_ends.push(read_end);
        }
        let read_ends: [OwnedFd; 2] = read_ends.try_into().expect("two pipes were made");
        pump.channel.pass_on(Piece::WithPipes(bytes, read_ends))
    }

    /// Registers two pipes inside that a program is to write to. Their representatives here can
    /// only be held: when the last holder drops them, the pipes are closed inside.
    fn receive_outlets(self: &Arc<Shared>, number: u32, rest: &[u8]) -> Result<(), String> {
        let Some(outlets) = strands::number_at(rest, 0) else {
            return Err("it announced pipes of a program without a number".to_owned());
        };
        let bytes = rest[4..].to_vec();
        let mut state = self.state();
        let State {
            interpreters,
            outlets: known,
            ..
        } = &mut *state;
        let Some(pump) = interpreters.get(&number) else {
            drop(state);
            self.release(outlets);
            return Ok(());
        };
        pump.channel.credit.take(bytes.len())?;
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
        known.extend(ids.iter().map(|id| (*id, outlets)));
        let ends: [OwnedFd; 2] = ends.try_into().expect("two pipes were made");
        pump.channel.pass_on(Piece::WithPipes(bytes, ends))?;
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            for mut end in held {
                // Nothing is ever written to them.
                let _ = end.read(&mut [0]).await;
            }
            shared.state().outlets.retain(|id, _| !ids.contains(id));
            shared.release(outlets);
        });
        Ok(())
    }

    fn release(&self, outlets: u32) {
        if let Err(TrySendError::Full(_)) =
            self.outgoing.try_send(strands::encode(b'y', outlets, b""))
        {
            self.end("it takes no orders any more");
        }
    }

    /// Ends an interpreter: received data is passed on, then its exit is reported.
    fn finish(&self, number: u32, how: Exit) {
        let mut state = self.state();
        if let Some(program) = state.programs.remove(&number) {
            program.send_replace(Some(how));
            return;
        }
        let Some(Pump {
            tasks,
            reader,
            exit,
            ..
        }) = state.interpreters.remove(&number)
        else {
            return;
        };
        // When their last sender is gone, the copiers end after passing everything on.
        state.pipes.retain(|_, strand| strand.owner != number);
        drop(state);
        reader.abort();
        tokio::spawn(async move {
            let all = async {
                for task in tasks {
                    let _ = task.await;
                }
            };
            let _ = tokio::time::timeout(LAST_WORDS, all).await;
            exit.send_replace(Some(how));
        });
    }

    /// Ends everything that uses the connection.
    fn end(&self, why: &str) {
        debug!(why, "the line to a container has ended");
        let numbers: Vec<u32> = {
            let mut state = self.state();
            state.answers.clear();
            state
                .interpreters
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

impl<T> Strand<T> {
    fn new(owner: u32, credit: usize) -> (Strand<T>, mpsc::Receiver<T>, Arc<Credit>) {
        // A piece has at least one byte, so the credit bounds the number of pieces too.
        let (pieces, receiver) = mpsc::channel(credit);
        let credit = Arc::new(Credit(AtomicUsize::new(credit)));
        (
            Strand {
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

/// Bytes that may still arrive on a strand.
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
    let mut decoder = Decoder::default();
    let why = 'line: loop {
        match output.next().await {
            Some(Ok(LogOutput::StdOut { message } | LogOutput::Console { message })) => {
                decoder.feed(&message);
                loop {
                    match decoder.next() {
                        Ok(Some(message)) => {
                            if let Err(why) = shared.receive(message) {
                                break 'line why;
                            }
                        }
                        Ok(None) => break,
                        Err(broken) => break 'line broken.to_string(),
                    }
                }
            }
            Some(Ok(LogOutput::StdErr { message })) => {
                let mut state = shared.state();
                if state.complaints.len() < COMPLAINTS {
                    state
                        .complaints
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
        let _ = outgoing.send(strands::encode_credit(number, size)).await;
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
        if outgoing
            .send(strands::encode(b'd', number, &buffer[..size]))
            .await
            .is_err()
        {
            return;
        }
    }
    let _ = outgoing.send(strands::encode(b'h', number, b"")).await;
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
        let _ = outgoing
            .send(strands::encode_credit(number, bytes.len()))
            .await;
    }
}
