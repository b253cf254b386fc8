//! The connection: reads the channel and the pipes, writes frames, yields events in order.
//!
//! All reads and writes are non-blocking per call, never only by a flag on the descriptor: a pipe's
//! read end may be shared with code inside, which could clear such a flag and block a thread of
//! ours forever.
//!
//! Where the bytes are relayed to us, the streams (the channel and the two pipes) may be slightly
//! out of step (`skew`). A stream that must be checked is then awaited for that long before it
//! counts as empty. Forged markers therefore delay only the forger's own text.
//!
//! `next` may be dropped at any await: bytes that were read stay in the connection.
//!
//! Nothing from inside blocks a worker of the runtime. A large header is decoded on another thread
//! while later input waits, and after `MAX_READ` bytes the task yields to others.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use cellblock_json::Decoding;
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Receiver;
use tokio::time::Sleep;

use super::claim::{self, Claim, CopyReport, HostCall, OutputPipes};
use super::frame::{self, Decoder, Frame, FrameError};
use super::merge::{Merger, Need, Pipe};
use super::request::Request;
use crate::reaction::within;

/// The supported version of `runner/PROTOCOL.md`.
const VERSION: u32 = 2;
/// Size of one read. This is the usual size of a pipe, so one call empties a full pipe.
const CHUNK: usize = 64 * 1024;
/// Bytes that are read before the task yields, even without an event. Markers alone do not make an
/// event.
const MAX_READ: usize = 1024 * 1024;
/// Bytes accounted per frame in addition to its size.
const FRAME_COST: usize = 1024;
/// Pipes of earlier cells that are still read, so that processes left behind neither block nor die.
/// Older ones are closed.
const MAX_RETIRED: usize = 16;
/// Bytes read from each stream after the end of the interpreter: all that a pipe can hold. A
/// process that was left behind may keep writing forever.
const DRAIN_LIMIT: usize = 1024 * 1024;
/// Received descriptors whose frames have not been reported yet: several threads of a cell may
/// request commands at once.
const MAX_DESCRIPTORS: usize = 64;
/// File system type of pipes made by `pipe`. A named pipe could be on a file system that the user
/// controls.
const PIPE_FILE_SYSTEM: u64 = 0x5049_5045;

/// Input from inside, in order.
#[derive(Debug, PartialEq)]
pub enum RunnerEvent {
    Text {
        pipe: Pipe,
        bytes: Vec<u8>,
    },
    Claim(Claim),
    /// Output of a process started by an earlier cell to that cell's pipes. It has no position in
    /// the order.
    Stray {
        pipe: Pipe,
        bytes: Vec<u8>,
    },
    /// Everything in the send queue has been written. A sender of many frames can continue now.
    Sent,
    /// The peer is gone and all its output has been reported.
    Closed,
}

/// Reason why the connection failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("unexpected descriptors")]
    Descriptors,
    #[error("the first frame was not `hello`")]
    NoHello,
    #[error("the runner uses protocol version {found}, and the server version {VERSION}")]
    Version { found: u32 },
    #[error("the runner closed the channel before `hello`")]
    Gone,
    #[error("timed out after {} s in the middle of a frame", FRAME_TIMEOUT.as_secs())]
    FrameTimeout,
    #[error("the channel failed")]
    Channel(#[from] io::Error),
}

/// How long a started frame may make no progress. The runner writes frames in one go; only other
/// code writes a partial one.
const FRAME_TIMEOUT: Duration = Duration::from_secs(5);

/// The host's end of one interpreter's channel and pipes.
pub struct Connection {
    channel: UnixStream,
    decoder: Decoder,
    /// Received descriptors whose frame has not been read yet.
    descriptors: VecDeque<OwnedFd>,
    pipes: [Option<PipeEnd>; 2],
    retired: VecDeque<(Pipe, PipeEnd)>,
    /// Data read from a retired pipe that was not reported yet.
    stray: Option<(Pipe, Vec<u8>)>,
    merger: Merger,
    /// A frame with a large header, and the claim that is being decoded from it. Nothing else is
    /// read meanwhile, to keep the order.
    decoding: Option<(Frame, Decoding<Read>)>,
    /// Bytes that may be read before the task yields.
    left: usize,
    /// The claim that waits until the text before it has been reported.
    pending: Option<Claim>,
    outgoing: Vec<u8>,
    sent: usize,
    buffer: Box<[u8]>,
    ending: Ending,
    /// Timeout of an unfinished frame, restarted with every byte of it.
    frame_timeout: Option<Pin<Box<dyn Future<Output = Option<()>> + Send>>>,
    copy: CopyReport,
    /// The largest delay between streams for data written one after the other.
    skew: Duration,
    /// Whether the needed stream is late.
    late: LateStream,
}

/// The claim in a frame, and its sequence number.
type Read = Result<(Claim, Option<u32>), FrameError>;

/// Result of a step.
enum Step {
    Event(RunnerEvent),
    /// Nothing more can be done without waiting.
    Wait,
    /// The step read its maximum. There may be more.
    Paused,
}

/// Whether the connection waits for a stream that is behind another one.
enum LateStream {
    No,
    /// Waiting until then.
    Awaited(Pin<Box<Sleep>>),
    /// The wait timed out.
    TimedOut,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Open,
    /// The channel is closed; this many bytes may still be read from the pipes.
    Draining {
        left: [usize; 2],
    },
    Over,
}

impl Connection {
    /// Takes over the channel of a new interpreter and waits for its `hello`. The caller limits
    /// the time. `skew` is zero if the interpreter itself writes to the channel and the pipes.
    pub async fn open(channel: UnixStream, skew: Duration) -> Result<Connection, ConnectionError> {
        let mut connection = Connection {
            channel,
            decoder: Decoder::default(),
            descriptors: VecDeque::new(),
            pipes: [None, None],
            retired: VecDeque::new(),
            stray: None,
            merger: Merger::new([0; 16]),
            decoding: None,
            left: MAX_READ,
            pending: None,
            outgoing: Vec::new(),
            sent: 0,
            buffer: vec![0; CHUNK].into_boxed_slice(),
            ending: Ending::Open,
            frame_timeout: None,
            copy: CopyReport::default(),
            skew,
            late: LateStream::No,
        };
        match connection.next().await? {
            RunnerEvent::Claim(Claim::Hello {
                version: VERSION,
                marker,
                copy,
                ..
            }) => {
                connection.merger = Merger::new(marker);
                connection.copy = copy;
                connection.adopt_pipes()?;
                Ok(connection)
            }
            RunnerEvent::Claim(Claim::Hello { version, .. }) => {
                Err(ConnectionError::Version { found: version })
            }
            RunnerEvent::Closed => Err(ConnectionError::Gone),
            _ => Err(ConnectionError::NoHello),
        }
    }

    /// Returns the claims of a copied interpreter about its restored state, from its `hello`.
    pub fn copy_report(&self) -> &CopyReport {
        &self.copy
    }

    /// Sends one frame. Bytes that the socket does not accept at once are written during `next`.
    pub fn send(&mut self, request: &Request, payload: &[u8]) -> Result<(), ConnectionError> {
        if self.sent == self.outgoing.len() {
            self.outgoing.clear();
            self.sent = 0;
        }
        frame::encode(request, payload, &mut self.outgoing);
        match write_some(&self.channel, &mut self.outgoing, &mut self.sent) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns whether frames are still queued. In that case `next` will yield `Sent`.
    pub fn is_sending(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Waits for the next event.
    pub async fn next(&mut self) -> Result<RunnerEvent, ConnectionError> {
        std::future::poll_fn(|context| {
            let polled = self.poll_next(context);
            if polled.is_pending() {
                self.left = MAX_READ;
            }
            polled
        })
        .await
    }

    /// Returns the next event that needs no waiting. After `hang_up` there always is one, and
    /// `Closed` is the last.
    pub fn next_now(&mut self) -> Result<Option<RunnerEvent>, ConnectionError> {
        loop {
            if let Some((frame, _)) = self.decoding.take() {
                let read = cellblock_json::decode_now(|| claim::read(frame));
                if let Some(event) = self.take_claim(read)? {
                    return Ok(Some(event));
                }
            }
            match self.step()? {
                Step::Event(event) => return Ok(Some(event)),
                Step::Wait if self.decoding.is_none() => return Ok(None),
                Step::Wait => {}
                Step::Paused => self.left = MAX_READ,
            }
        }
    }

    /// Returns output that processes of earlier cells have written so far, at most one piece per
    /// pipe.
    pub fn strays_now(&mut self) -> Vec<(Pipe, Vec<u8>)> {
        let mut strays = Vec::from_iter(self.stray.take());
        let Connection {
            retired,
            buffer,
            merger,
            ..
        } = self;
        retired.retain_mut(|(pipe, end)| match end.read(buffer) {
            Ok(0) => false,
            Ok(size) => {
                strays.push((*pipe, merger.without_markers(&buffer[..size])));
                true
            }
            Err(_) => true,
        });
        strays
    }

    /// Stops listening: after the output written so far, `next` yields `Closed` and never waits
    /// again.
    pub fn hang_up(&mut self) -> Result<(), ConnectionError> {
        let mut left = DRAIN_LIMIT;
        while self.ending == Ending::Open && left > 0 {
            match receive(&self.channel, &mut self.buffer, &mut self.descriptors) {
                Ok(Received::Bytes(0)) => break,
                Ok(Received::Bytes(size)) => self.decoder.feed(&self.buffer[..size]),
                Ok(Received::WrongDescriptors) => return Err(ConnectionError::Descriptors),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
            left = left.saturating_sub(CHUNK);
        }
        self.end();
        Ok(())
    }

    fn end(&mut self) {
        if self.ending == Ending::Open {
            self.ending = Ending::Draining {
                left: [DRAIN_LIMIT; 2],
            };
        }
        self.outgoing.clear();
        self.sent = 0;
    }

    fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<RunnerEvent, ConnectionError>> {
        loop {
            if let Some((_, decoding)) = &mut self.decoding {
                if let Poll::Ready(read) = decoding.as_mut().poll(context) {
                    self.decoding = None;
                    if let Some(event) = self.take_claim(read)? {
                        return Poll::Ready(Ok(event));
                    }
                } else if self.is_sending() && self.poll_write(context)?.is_ready() {
                    return Poll::Ready(Ok(RunnerEvent::Sent));
                } else {
                    return Poll::Pending;
                }
            }
            match self.step()? {
                Step::Event(event) => return Poll::Ready(Ok(event)),
                Step::Wait if self.decoding.is_some() => continue,
                Step::Wait => {}
                Step::Paused => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
            if self.is_sending() && self.poll_write(context)?.is_ready() {
                return Poll::Ready(Ok(RunnerEvent::Sent));
            }
            // Data behind a pending frame stays in the channel, because its amount is unknown.
            let mut progress = self.pending.is_none() && self.poll_channel(context)?.is_ready();
            for pipe in Pipe::BOTH {
                progress |= self.poll_pipe(pipe, context).is_ready();
            }
            let has_stray = self.poll_retired(context);
            if progress {
                self.late = LateStream::No;
            }
            if progress || has_stray {
                continue;
            }
            if let LateStream::Awaited(until) = &mut self.late
                && until.as_mut().poll(context).is_ready()
            {
                self.late = LateStream::TimedOut;
                continue;
            }
            return self.poll_frame_timeout(context);
        }
    }

    /// Fails when an unfinished frame has made no progress for too long.
    fn poll_frame_timeout(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<RunnerEvent, ConnectionError>> {
        if self.ending != Ending::Open || self.decoder.is_empty() {
            self.frame_timeout = None;
            return Poll::Pending;
        }
        // On a busy machine the runner may be descheduled in the middle of a frame.
        let frame_timeout = self
            .frame_timeout
            .get_or_insert_with(|| Box::pin(within(FRAME_TIMEOUT, std::future::pending())));
        frame_timeout
            .as_mut()
            .poll(context)
            .map(|_| Err(ConnectionError::FrameTimeout))
    }

    /// Does everything that needs no waiting, until there is an event or enough was read.
    fn step(&mut self) -> Result<Step, ConnectionError> {
        loop {
            if let Some((pipe, bytes)) = self.merger.pop() {
                return Ok(Step::Event(RunnerEvent::Text { pipe, bytes }));
            }
            if let Some((pipe, bytes)) = self.stray.take() {
                return Ok(Step::Event(RunnerEvent::Stray { pipe, bytes }));
            }
            if self.left == 0 {
                return Ok(Step::Paused);
            }
            match self.merger.need() {
                Some(Need::Pipe(pipe)) => {
                    if self.read_pipe_now(pipe) == 0 {
                        if self.pipes[pipe as usize].is_some() && self.waits_for_late() {
                            return Ok(Step::Wait);
                        }
                        self.merger.report_empty(Need::Pipe(pipe));
                    }
                    continue;
                }
                Some(Need::Channel) => {
                    if let Some(event) = self.take_frame()? {
                        return Ok(Step::Event(event));
                    }
                    if self.decoding.is_some() {
                        return Ok(Step::Wait);
                    }
                    if self.pending.is_none() && !self.read_channel_now()? {
                        if self.waits_for_late() {
                            return Ok(Step::Wait);
                        }
                        self.merger.report_empty(Need::Channel);
                    }
                    continue;
                }
                None => {}
            }
            if let Some(claim) = self.pending.take() {
                self.merger.pass();
                return self.event_of(claim).map(Step::Event);
            }
            if let Some(event) = self.take_frame()? {
                return Ok(Step::Event(event));
            }
            if self.decoding.is_some() {
                return Ok(Step::Wait);
            }
            if self.pending.is_some() {
                continue;
            }
            match self.ending {
                Ending::Open => return Ok(Step::Wait),
                Ending::Over => return Ok(Step::Event(RunnerEvent::Closed)),
                Ending::Draining { .. } => {
                    let read = Pipe::BOTH.map(|pipe| self.read_pipe_now(pipe));
                    if read == [0, 0] {
                        self.merger.finish();
                        self.ending = Ending::Over;
                    }
                }
            }
        }
    }

    /// Returns whether a stream that has no data now may still deliver some.
    fn waits_for_late(&mut self) -> bool {
        if self.skew.is_zero() || self.ending != Ending::Open {
            return false;
        }
        match self.late {
            LateStream::No => {
                self.late = LateStream::Awaited(Box::pin(tokio::time::sleep(self.skew)));
                true
            }
            LateStream::Awaited(_) => true,
            LateStream::TimedOut => false,
        }
    }

    /// Reads the next whole frame. A frame with a position in the text becomes `pending`; any other
    /// is an event at once.
    ///
    /// A frame with a large header is decoded on another thread.
    fn take_frame(&mut self) -> Result<Option<RunnerEvent>, ConnectionError> {
        let Some(frame) = self.decoder.next()? else {
            return Ok(None);
        };
        self.left = self.left.saturating_sub(FRAME_COST);
        if cellblock_json::is_small(&frame.header) {
            return self.take_claim(claim::read(frame));
        }
        let decoding = cellblock_json::decoding(false, frame.clone(), claim::read);
        self.decoding = Some((frame, decoding));
        Ok(None)
    }

    fn take_claim(&mut self, read: Read) -> Result<Option<RunnerEvent>, ConnectionError> {
        let (claim, seq) = self.check_descriptors(read?)?;
        match seq {
            Some(seq) => {
                self.merger.expect(seq);
                self.pending = Some(claim);
                Ok(None)
            }
            None => self.event_of(claim).map(Some),
        }
    }

    fn check_descriptors(
        &mut self,
        (claim, seq): (Claim, Option<u32>),
    ) -> Result<(Claim, Option<u32>), ConnectionError> {
        let takes_descriptors = matches!(
            claim,
            Claim::Hello { .. }
                | Claim::Started { rotated: true, .. }
                | Claim::Ask {
                    question: HostCall::Shell(_),
                    ..
                }
        );
        // Descriptors arrive together with the first bytes of their frame, so those of a later
        // frame leave bytes in the decoder.
        if !takes_descriptors && !self.descriptors.is_empty() && self.decoder.is_empty() {
            return Err(ConnectionError::Descriptors);
        }
        Ok((claim, seq))
    }

    fn event_of(&mut self, mut claim: Claim) -> Result<RunnerEvent, ConnectionError> {
        match &mut claim {
            Claim::Started { rotated: true, .. } => self.adopt_pipes()?,
            Claim::Ask {
                question: HostCall::Shell(command),
                ..
            } => {
                if let (Some(output), Some(errors)) =
                    (self.descriptors.pop_front(), self.descriptors.pop_front())
                {
                    command.outlets = Some(OutputPipes(Arc::new([output, errors])));
                }
            }
            _ => {}
        }
        Ok(RunnerEvent::Claim(claim))
    }

    /// Replaces the pipes with the two descriptors that came with a frame.
    fn adopt_pipes(&mut self) -> Result<(), ConnectionError> {
        let (Some(out), Some(err)) = (self.descriptors.pop_front(), self.descriptors.pop_front())
        else {
            return Err(ConnectionError::Descriptors);
        };
        let new = [Some(PipeEnd::new(out)?), Some(PipeEnd::new(err)?)];
        self.merger.rotate();
        let old = std::mem::replace(&mut self.pipes, new);
        self.retired.extend(
            Pipe::BOTH
                .into_iter()
                .zip(old)
                .filter_map(|(pipe, end)| Some((pipe, end?))),
        );
        while self.retired.len() > MAX_RETIRED {
            self.retired.pop_front();
        }
        Ok(())
    }

    /// Reads a pipe without waiting and returns the number of bytes. After the end of the
    /// interpreter, only the remaining allowance is read.
    fn read_pipe_now(&mut self, pipe: Pipe) -> usize {
        if matches!(self.ending, Ending::Draining { left } if left[pipe as usize] == 0) {
            return 0;
        }
        let Some(end) = &mut self.pipes[pipe as usize] else {
            return 0;
        };
        let size = match end.read(&mut self.buffer) {
            Ok(0) => {
                self.pipes[pipe as usize] = None;
                0
            }
            Ok(size) => {
                self.feed(pipe, size);
                size
            }
            Err(_) => 0,
        };
        if let Ending::Draining { left } = &mut self.ending {
            left[pipe as usize] = if size == 0 {
                0
            } else {
                left[pipe as usize].saturating_sub(size)
            };
        }
        size
    }

    /// Passes bytes read from a pipe to the merger.
    fn feed(&mut self, pipe: Pipe, size: usize) {
        self.left = self.left.saturating_sub(size);
        self.merger.feed(pipe, &self.buffer[..size]);
    }

    /// Passes bytes read from the channel to the decoder.
    fn feed_decoder(&mut self, size: usize) {
        self.left = self.left.saturating_sub(size);
        self.decoder.feed(&self.buffer[..size]);
    }

    /// Reads the channel without waiting. Returns whether there were any bytes.
    fn read_channel_now(&mut self) -> Result<bool, ConnectionError> {
        if self.ending != Ending::Open {
            return Ok(false);
        }
        match receive(&self.channel, &mut self.buffer, &mut self.descriptors) {
            Ok(Received::Bytes(0)) => {
                self.end();
                Ok(false)
            }
            Ok(Received::Bytes(size)) => {
                self.feed_decoder(size);
                Ok(true)
            }
            Ok(Received::WrongDescriptors) => Err(ConnectionError::Descriptors),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        loop {
            ready!(self.channel.poll_write_ready(context))?;
            let write = || write_some(&self.channel, &mut self.outgoing, &mut self.sent);
            match self.channel.try_io(Interest::WRITABLE, write) {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    fn poll_channel(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        loop {
            ready!(self.channel.poll_read_ready(context))?;
            let read = || receive(&self.channel, &mut self.buffer, &mut self.descriptors);
            match self.channel.try_io(Interest::READABLE, read) {
                Ok(Received::Bytes(0)) => self.end(),
                Ok(Received::Bytes(size)) => {
                    self.feed_decoder(size);
                    self.frame_timeout = None;
                }
                Ok(Received::WrongDescriptors) => {
                    return Poll::Ready(Err(ConnectionError::Descriptors));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Poll::Ready(Err(error.into())),
            }
            return Poll::Ready(Ok(()));
        }
    }

    fn poll_pipe(&mut self, pipe: Pipe, context: &mut Context<'_>) -> Poll<()> {
        let Some(end) = &mut self.pipes[pipe as usize] else {
            return Poll::Pending;
        };
        match end.poll_read(context, &mut self.buffer) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(0) => {
                self.pipes[pipe as usize] = None;
                Poll::Ready(())
            }
            Poll::Ready(size) => {
                self.feed(pipe, size);
                Poll::Ready(())
            }
        }
    }

    /// Reads one piece of output of processes of earlier cells. Returns whether there is one to
    /// report.
    fn poll_retired(&mut self, context: &mut Context<'_>) -> bool {
        let mut index = 0;
        while self.stray.is_none()
            && let Some((pipe, end)) = self.retired.get_mut(index)
        {
            match end.poll_read(context, &mut self.buffer) {
                Poll::Pending => index += 1,
                Poll::Ready(0) => drop(self.retired.remove(index)),
                Poll::Ready(size) => {
                    self.left = self.left.saturating_sub(size);
                    self.stray = Some((*pipe, self.merger.without_markers(&self.buffer[..size])));
                }
            }
        }
        self.stray.is_some()
    }
}

/// Writes as much as the socket accepts now. For a peer that is gone, everything is discarded; the
/// end is noticed by reading.
fn write_some(channel: &UnixStream, outgoing: &mut Vec<u8>, sent: &mut usize) -> io::Result<()> {
    while *sent < outgoing.len() {
        match rustix::net::send(
            channel,
            &outgoing[*sent..],
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        ) {
            Ok(size) => *sent += size,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => *sent = outgoing.len(),
            Err(error) => return Err(error.into()),
        }
    }
    outgoing.clear();
    outgoing.shrink_to(CHUNK);
    *sent = 0;
    Ok(())
}

enum Received {
    /// Zero bytes mean the end of the channel.
    Bytes(usize),
    WrongDescriptors,
}

/// Reads bytes and descriptors from the channel.
fn receive(
    channel: &UnixStream,
    buffer: &mut [u8],
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<Received> {
    // Space for one more than any frame carries: too many are noticed, and none is lost silently.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match rustix::net::recvmsg(channel, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(Received::Bytes(0)),
            Err(error) => return Err(error.into()),
        }
    };
    let held = descriptors.len();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = ancillary {
            descriptors.extend(received);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC)
        || descriptors.len() > held + 2
        || descriptors.len() > MAX_DESCRIPTORS
        || !descriptors.iter().all(is_pipe)
    {
        return Ok(Received::WrongDescriptors);
    }
    Ok(Received::Bytes(message.bytes))
}

fn is_pipe(descriptor: &OwnedFd) -> bool {
    rustix::fs::fstatfs(descriptor).is_ok_and(|found| found.f_type as u64 == PIPE_FILE_SYSTEM)
}

/// The read end of a pipe.
struct PipeEnd {
    receiver: Receiver,
    /// Whether the kernel supports non-blocking behaviour per read of a pipe (Linux 6.4 and later).
    waits_never: bool,
}

impl PipeEnd {
    /// Takes a descriptor that must be a pipe's read end.
    fn new(descriptor: OwnedFd) -> Result<PipeEnd, ConnectionError> {
        let receiver =
            Receiver::from_owned_fd(descriptor).map_err(|_| ConnectionError::Descriptors)?;
        Ok(PipeEnd {
            receiver,
            waits_never: true,
        })
    }

    /// Reads the available bytes. Zero means the end.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match read_once(&self.receiver, self.waits_never, buffer) {
                Err(Errno::OPNOTSUPP) if self.waits_never => self.use_own_flags(),
                read => return Ok(read?),
            }
        }
    }

    /// Prepares for a kernel without non-blocking behaviour per read: reopens the pipe, so that its
    /// flags are not shared. Where that is not permitted either (an unprivileged server whose
    /// sessions have other uids), the shared flag is used.
    fn use_own_flags(&mut self) {
        self.waits_never = false;
        let path = format!("/proc/self/fd/{}", self.receiver.as_raw_fd());
        let flags =
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
        if let Ok(own) = rustix::fs::open(path, flags, rustix::fs::Mode::empty())
            && let Ok(own) = Receiver::from_owned_fd(own)
        {
            self.receiver = own;
        }
    }

    /// Waits until the pipe is readable, and reads it. A pipe that fails counts as ended.
    fn poll_read(&mut self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<usize> {
        loop {
            if ready!(self.receiver.poll_read_ready(context)).is_err() {
                return Poll::Ready(0);
            }
            let waits_never = self.waits_never;
            let read = || Ok(read_once(&self.receiver, waits_never, buffer)?);
            match self.receiver.try_io(read) {
                Ok(size) => return Poll::Ready(size),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error)
                    if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) && waits_never =>
                {
                    self.use_own_flags()
                }
                Err(_) => return Poll::Ready(0),
            }
        }
    }
}

fn read_once(receiver: &Receiver, waits_never: bool, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        let read = if waits_never {
            // The largest offset means the pipe's current position.
            rustix::io::preadv2(
                receiver,
                &mut [IoSliceMut::new(buffer)],
                u64::MAX,
                ReadWriteFlags::NOWAIT,
            )
        } else {
            rustix::io::read(receiver, &mut *buffer)
        };
        if read != Err(Errno::INTR) {
            return read;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use serde_json::json;
    use tokio::io::AsyncWriteExt;

    use super::*;

    const SECRET: &str = "30313233343536373839616263646566";

    /// The runner's end.
    struct Inside {
        channel: UnixStream,
        pipes: [io::PipeWriter; 2],
    }

    fn send_with(
        channel: &UnixStream,
        header: serde_json::Value,
        descriptors: &[std::os::fd::BorrowedFd<'_>],
    ) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage};
        let mut bytes = Vec::new();
        frame::encode(&header, b"", &mut bytes);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        let sent = rustix::net::sendmsg(
            channel,
            &[io::IoSlice::new(&bytes)],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn marker(seq: u32, kind: u8) -> Vec<u8> {
        [
            b"\0\x1bCB0123456789abcdef",
            &seq.to_be_bytes()[..],
            &[kind, b'\n'],
        ]
        .concat()
    }

    impl Inside {
        fn write(&mut self, pipe: Pipe, bytes: &[u8]) {
            self.pipes[pipe as usize].write_all(bytes).unwrap();
        }

        fn mark(&mut self, seq: u32, kind: u8) {
            for pipe in Pipe::BOTH {
                self.write(pipe, &marker(seq, kind));
            }
        }

        async fn say(&mut self, header: serde_json::Value) {
            let mut bytes = Vec::new();
            frame::encode(&header, b"", &mut bytes);
            self.channel.write_all(&bytes).await.unwrap();
        }
    }

    async fn connect() -> (Connection, Inside) {
        connect_with(Duration::ZERO).await
    }

    /// Connects to an interpreter whose streams may be out of step by `skew`.
    async fn connect_with(skew: Duration) -> (Connection, Inside) {
        let (host, channel) = UnixStream::pair().unwrap();
        let (out, out_writer) = io::pipe().unwrap();
        let (err, err_writer) = io::pipe().unwrap();
        send_with(
            &channel,
            json!({"type": "hello", "version": 2, "marker": SECRET}),
            &[out.as_fd(), err.as_fd()],
        );
        (
            Connection::open(host, skew).await.unwrap(),
            Inside {
                channel,
                pipes: [out_writer, err_writer],
            },
        )
    }

    fn text(pipe: Pipe, text: &str) -> RunnerEvent {
        RunnerEvent::Text {
            pipe,
            bytes: text.as_bytes().to_vec(),
        }
    }

    #[tokio::test]
    async fn text_and_frames_come_in_their_order_although_the_frame_is_seen_first() {
        let (mut connection, mut inside) = connect().await;
        inside.write(Pipe::Err, b"first");
        inside.mark(1, b'P');
        inside.write(Pipe::Out, b"second");
        inside.mark(2, b'F');
        inside
            .say(json!({"type": "clear", "id": 1, "seq": 2, "wait": false}))
            .await;
        inside.write(Pipe::Out, b"third");
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Err, "first"));
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Out, "second"));
        assert_eq!(
            connection.next().await.unwrap(),
            RunnerEvent::Claim(Claim::Clear { id: 1, wait: false })
        );
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Out, "third"));
    }

    /// Writes a text before a marker and one behind it; the second copy of the marker arrives later
    /// than the text. Returns the events for both.
    async fn events_out_of_step(skew: Duration) -> [RunnerEvent; 2] {
        let (mut connection, mut inside) = connect_with(skew).await;
        inside.write(Pipe::Out, &marker(1, b'P'));
        inside.write(Pipe::Out, b"second");
        let later = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            inside.write(Pipe::Err, b"first");
            inside.write(Pipe::Err, &marker(1, b'P'));
        };
        let heard = async {
            [
                connection.next().await.unwrap(),
                connection.next().await.unwrap(),
            ]
        };
        tokio::join!(later, heard).1
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_out_of_step_is_waited_for_and_one_that_cannot_be_is_not() {
        let (first, second) = (text(Pipe::Err, "first"), text(Pipe::Out, "second"));
        assert_eq!(
            events_out_of_step(Duration::from_secs(1)).await,
            [first, second]
        );
        let (first, second) = (text(Pipe::Err, "first"), text(Pipe::Out, "second"));
        assert_eq!(events_out_of_step(Duration::ZERO).await, [second, first]); // control
    }

    #[tokio::test(start_paused = true)]
    async fn a_forged_marker_is_waited_for_no_longer_than_streams_can_be_out_of_step() {
        let (mut connection, mut inside) = connect_with(Duration::from_secs(1)).await;
        inside.write(Pipe::Out, &marker(77, b'P'));
        inside.write(Pipe::Out, b"text");
        let begun = tokio::time::Instant::now();
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Out, "text"));
        assert!(
            begun.elapsed() <= Duration::from_millis(1100),
            "{:?}",
            begun.elapsed()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn while_a_frame_waits_for_its_place_what_follows_it_stays_in_the_channel() {
        // Without a skew nothing waits; this is the control.
        for skew in [Duration::from_secs(1), Duration::ZERO] {
            let (mut connection, mut inside) = connect_with(skew).await;
            // Its markers never arrive.
            inside
                .say(json!({"type": "clear", "id": 1, "seq": 77, "wait": false}))
                .await;
            let mut sent = 0;
            let flood = async {
                while sent < 16 << 20 {
                    inside.channel.write_all(&[0; CHUNK]).await.unwrap();
                    sent += CHUNK;
                }
                std::future::pending::<()>().await;
            };
            let event = tokio::select! {
                event = connection.next() => event.unwrap(),
                () = flood => unreachable!("it waits"),
            };
            assert_eq!(
                event,
                RunnerEvent::Claim(Claim::Clear { id: 1, wait: false })
            );
            assert!(sent <= 1 << 20, "{sent} bytes were taken in the meantime");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn half_a_frame_ends_the_conversation_and_a_slow_one_does_not() {
        let (mut connection, mut inside) = connect().await;
        let mut frame = Vec::new();
        frame::encode(
            &json!({"type": "written", "id": 1, "size": 3, "replaced": false}),
            b"",
            &mut frame,
        );
        let slowly = async {
            for piece in frame.chunks(20) {
                inside.channel.write_all(piece).await.unwrap();
                tokio::time::sleep(FRAME_TIMEOUT / 2).await;
            }
        };
        let (_, heard) = tokio::join!(slowly, connection.next());
        assert!(matches!(
            heard.unwrap(),
            RunnerEvent::Claim(Claim::Written { id: 1, .. })
        ));
        inside.channel.write_all(&frame[..5]).await.unwrap();
        assert!(matches!(
            connection.next().await,
            Err(ConnectionError::FrameTimeout)
        ));
    }

    #[tokio::test]
    async fn new_pipes_take_the_place_of_the_old_and_the_old_are_told_apart() {
        let (mut connection, mut inside) = connect().await;
        let (out, mut new_out) = io::pipe().unwrap();
        let (err, _new_err) = io::pipe().unwrap();
        send_with(
            &inside.channel,
            json!({"type": "started", "id": 2, "seq": 1, "rotated": true}),
            &[out.as_fd(), err.as_fd()],
        );
        assert_eq!(
            connection.next().await.unwrap(),
            RunnerEvent::Claim(Claim::Started {
                id: 2,
                rotated: true
            })
        );
        new_out.write_all(&marker(1, b'F')).unwrap();
        new_out.write_all(b"of this cell").unwrap();
        assert_eq!(
            connection.next().await.unwrap(),
            text(Pipe::Out, "of this cell")
        );
        inside.write(
            Pipe::Err,
            &[&marker(9, b'P')[..], b"of an earlier cell"].concat(),
        );
        let stray = RunnerEvent::Stray {
            pipe: Pipe::Err,
            bytes: b"of an earlier cell".to_vec(),
        };
        assert_eq!(connection.next().await.unwrap(), stray);
        inside.write(Pipe::Out, b"more of it");
        assert_eq!(
            connection.strays_now(),
            [(Pipe::Out, b"more of it".to_vec())]
        );
        assert_eq!(connection.strays_now(), []);
        assert_eq!(connection.retired.len(), 2);
        drop(inside.pipes);
        new_out.write_all(b"more").unwrap();
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Out, "more"));
    }

    #[tokio::test]
    async fn descriptors_that_are_no_pipes_or_too_many_or_uninvited_break_the_conversation() {
        let file = tempfile::tempfile().unwrap();
        let (reader, _writer) = io::pipe().unwrap();
        let pipe = reader.as_fd();
        let started =
            |rotated: bool| json!({"type": "started", "id": 2, "seq": 1, "rotated": rotated});
        let cases = [
            (started(true), vec![file.as_fd(), file.as_fd()]),
            (started(true), vec![pipe, pipe, pipe]),
            (started(true), vec![pipe; 8]),
            (started(true), vec![pipe]),
            (started(false), vec![pipe, pipe]),
        ];
        for (header, descriptors) in cases {
            let (mut connection, inside) = connect().await;
            send_with(&inside.channel, header, &descriptors);
            assert!(
                matches!(connection.next().await, Err(ConnectionError::Descriptors)),
                "{}",
                descriptors.len()
            );
        }
        let (mut connection, inside) = connect().await;
        send_with(&inside.channel, started(true), &[pipe, pipe]);
        assert!(
            connection.next().await.is_ok(),
            "the control: two pipes are what the frame brings"
        );
    }

    #[tokio::test]
    async fn a_pipe_whose_flags_were_changed_from_inside_does_not_hold_a_thread() {
        let (host, channel) = UnixStream::pair().unwrap();
        let (out, _out_writer) = io::pipe().unwrap();
        let (err, _err_writer) = io::pipe().unwrap();
        send_with(
            &channel,
            json!({"type": "hello", "version": 2, "marker": SECRET}),
            &[out.as_fd(), err.as_fd()],
        );
        let mut connection = Connection::open(host, Duration::ZERO).await.unwrap();
        rustix::fs::fcntl_setfl(&out, rustix::fs::OFlags::empty()).unwrap();
        // On older kernels the pipe would have to be reopened first, which happens at the first
        // read.
        assert_eq!(connection.read_pipe_now(Pipe::Out), 0);
    }

    /// A value whose header is too large to be decoded in place.
    fn large_value(seq: u32) -> serde_json::Value {
        json!({"type": "value", "id": 1, "seq": seq, "data": {"text/plain": "x".repeat(200_000)}})
    }

    fn kind(event: &RunnerEvent) -> &'static str {
        match event {
            RunnerEvent::Text { .. } => "text",
            RunnerEvent::Stray { .. } => "stray",
            RunnerEvent::Claim(Claim::Value { .. }) => "value",
            RunnerEvent::Claim(Claim::Clear { .. }) => "clear",
            RunnerEvent::Claim(_) => "other claim",
            RunnerEvent::Sent => "sent",
            RunnerEvent::Closed => "closed",
        }
    }

    #[tokio::test]
    async fn a_large_header_is_decoded_elsewhere_and_keeps_its_place() {
        let (mut connection, mut inside) = connect().await;
        inside.write(Pipe::Out, b"before");
        inside.mark(1, b'F');
        inside.write(Pipe::Out, b"after");
        inside.mark(2, b'F');
        let says = async {
            inside.say(large_value(1)).await;
            inside
                .say(json!({"type": "clear", "id": 1, "seq": 2}))
                .await;
        };
        let hears = async {
            let mut heard = Vec::new();
            for _ in 0..4 {
                heard.push(connection.next().await.unwrap());
            }
            heard
        };
        let heard = tokio::join!(says, hears).1;
        assert_eq!(
            heard.iter().map(kind).collect::<Vec<_>>(),
            ["text", "value", "text", "clear"]
        );
    }

    #[tokio::test]
    async fn a_large_header_that_is_being_decoded_is_told_before_the_end() {
        let (mut connection, mut inside) = connect().await;
        inside.mark(1, b'F');
        inside.write(Pipe::Out, b"after");
        let says = async {
            inside.say(large_value(1)).await;
            drop(inside);
        };
        // The frame has arrived completely, and its decoding has started and not ended: this
        // runtime has one thread, and it is not free in between.
        let hears = std::future::poll_fn(|context| match connection.poll_next(context) {
            Poll::Ready(event) => panic!("{event:?} came too early"),
            Poll::Pending if connection.decoding.is_some() => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        });
        tokio::join!(says, hears);
        connection.hang_up().unwrap();
        let events = std::iter::from_fn(|| {
            connection
                .next_now()
                .unwrap()
                .filter(|event| *event != RunnerEvent::Closed)
        });
        assert_eq!(
            events.map(|event| kind(&event)).collect::<Vec<_>>(),
            ["value", "text"]
        );
    }

    /// Markers that contradict each other: reading them yields no text, however many there are.
    fn contradictions(pipe: Pipe) -> Vec<u8> {
        let seq = if pipe == Pipe::Out { 1 } else { 5 };
        marker(seq, b'P').repeat(CHUNK / 26)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_flood_of_markers_lets_other_tasks_have_their_turn_and_ends_with_the_interpreter() {
        let (mut connection, inside) = connect().await;
        let Inside { channel, pipes } = inside;
        let end = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let writers = pipes.into_iter().zip(Pipe::BOTH).map(|(mut writer, pipe)| {
            let end = end.clone();
            std::thread::spawn(move || {
                let markers = contradictions(pipe);
                while !end.load(std::sync::atomic::Ordering::Relaxed)
                    && writer.write_all(&markers).is_ok()
                {}
            })
        });
        let writers = writers.collect::<Vec<_>>();
        // The only worker reads markers, and still has time for another task.
        let reads = tokio::spawn(async move {
            let heard = tokio::select! {
                heard = connection.next() => Some(heard),
                () = async { for _ in 0..20 { tokio::task::yield_now().await } } => None,
            };
            assert!(heard.is_none(), "markers are no event: {heard:?}");
            connection
        });
        let mut connection = reads.await.unwrap();
        // Processes left behind keep writing after the end, and the end is still reported.
        drop(channel);
        connection.hang_up().unwrap();
        while connection.next_now().unwrap() != Some(RunnerEvent::Closed) {}
        end.store(true, std::sync::atomic::Ordering::Relaxed);
        drop(connection);
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap());
    }

    #[tokio::test]
    async fn a_flood_of_text_lets_other_tasks_have_their_turn() {
        let (mut connection, mut inside) = connect().await;
        // Text of both pipes alternates, so that one is always needed before the other may proceed.
        let flood = |from: u32, pipe: Pipe| {
            let pieces = (from..from + 100).map(|seq| match (seq % 2 == 0, pipe) {
                (true, Pipe::Out) | (false, Pipe::Err) => {
                    [&[b'x'; 500][..], &marker(seq, b'P')].concat()
                }
                _ => marker(seq, b'P'),
            });
            pieces.collect::<Vec<_>>().concat()
        };
        let mut seq = 1;
        let mut write_100 = |inside: &mut Inside| {
            Pipe::BOTH
                .into_iter()
                .for_each(|pipe| inside.write(pipe, &flood(seq, pipe)));
            seq += 100;
        };
        write_100(&mut inside);
        let mut reported = 0;
        let reads = async {
            loop {
                if let RunnerEvent::Text { bytes, .. } = connection.next().await.unwrap() {
                    reported += bytes.len();
                    if reported % (100 * 500) == 0 {
                        write_100(&mut inside);
                    }
                }
            }
        };
        tokio::select! {
            biased;
            () = reads => {}
            () = tokio::task::yield_now() => {}
        }
        assert!(
            (1..=4 * MAX_READ).contains(&reported),
            "{reported} bytes were reported in one turn"
        );
    }

    #[tokio::test]
    async fn what_was_written_before_the_end_is_told_before_the_end() {
        let (mut connection, mut inside) = connect().await;
        inside.write(Pipe::Out, b"last words");
        drop(inside);
        assert_eq!(
            connection.next().await.unwrap(),
            text(Pipe::Out, "last words")
        );
        assert_eq!(connection.next().await.unwrap(), RunnerEvent::Closed);
    }

    #[tokio::test]
    async fn hanging_up_tells_what_is_there_and_does_not_wait() {
        let (mut connection, mut inside) = connect().await;
        inside.write(Pipe::Out, b"a");
        inside.say(json!({"type": "later"})).await;
        connection.hang_up().unwrap();
        assert_eq!(
            connection.next().await.unwrap(),
            RunnerEvent::Claim(Claim::Unknown)
        );
        assert_eq!(connection.next().await.unwrap(), text(Pipe::Out, "a"));
        assert_eq!(connection.next().await.unwrap(), RunnerEvent::Closed);
    }

    #[tokio::test]
    async fn a_large_frame_leaves_while_the_other_side_reads() {
        let (mut connection, mut inside) = connect().await;
        connection
            .send(
                &Request::Execute { id: 1, seed: None },
                &vec![b'x'; 4_000_000],
            )
            .unwrap();
        assert!(connection.is_sending());
        let reader = tokio::spawn(async move {
            let mut bytes = vec![0; 4_000_000];
            tokio::io::AsyncReadExt::read_exact(&mut inside.channel, &mut bytes)
                .await
                .unwrap();
            inside
        });
        assert_eq!(connection.next().await.unwrap(), RunnerEvent::Sent);
        assert!(!connection.is_sending());
        drop(reader.await.unwrap());
        assert_eq!(connection.next().await.unwrap(), RunnerEvent::Closed);
    }

    #[tokio::test]
    async fn a_greeting_of_another_version_or_another_frame_is_refused() {
        for (header, expected) in [
            (
                json!({"type": "hello", "version": 3, "marker": SECRET}),
                "version 3",
            ),
            (json!({"type": "clear", "id": 1}), "not `hello`"),
        ] {
            let (host, mut channel) = UnixStream::pair().unwrap();
            let mut bytes = Vec::new();
            frame::encode(&header, b"", &mut bytes);
            channel.write_all(&bytes).await.unwrap();
            let Err(error) = Connection::open(host, Duration::ZERO).await else {
                panic!("{header} was accepted")
            };
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
