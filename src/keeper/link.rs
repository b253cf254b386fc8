//! The front's side of one connection: many calls at once, each waiting for its own answer.
//!
//! A call that is dropped is forgotten at the other side too, which for code means that it goes on.
//! When the connection ends, every call that waits learns that its answer is lost.
//!
//! Calls are sent in the order in which they begin. A heartbeat tells a keeper that hangs from one
//! that is busy: it answers beats in its reader, whatever its sessions do. While it misses beats,
//! calls are answered without it; when it answers again, the connection goes on.

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

use super::frame::{self, Assembly, Frame, FrameError, Kind};
use super::message::{Answer, Asking, FromFront, FromKeeper};
use super::outgoing::{Outgoing, outgoing};
use super::stream::{self, Arrival, Arriving, CHUNK, Leaving, Silence, WINDOW};
use crate::ops::{News, Op};
use crate::sandbox::Preparation;
use crate::session::{Principal, RecordEnding};

/// Bytes that are read at once.
const READ_AT_ONCE: usize = 64 * 1024;

/// Time between two beats.
const BEAT: Duration = Duration::from_millis(500);
/// A keeper that has missed so many beats in a row does not answer. It answers a beat with one
/// small write, so that it takes more than a busy machine to miss ten seconds of them. A front that
/// was itself stopped counts one.
const MAX_MISSED: u32 = 20;
/// A call that should have been answered this long ago is given up earlier, after so many missed
/// beats.
const OVERDUE: Duration = Duration::from_secs(1);
const MAX_MISSED_OVERDUE: u32 = 2;

/// A call that got no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// The connection was closed before it was sent; nothing of it has happened.
    NotSent,
    /// The connection ended while it waited.
    Lost,
    /// The answer could not be understood.
    Nonsense,
    /// The call is larger than can be sent.
    TooLarge,
    /// The keeper misses its beats.
    Silent {
        /// The call was sent before.
        sent: bool,
    },
}

/// What a connection tells beside answers.
#[derive(Clone)]
pub(super) struct Listeners {
    pub(super) preparation: watch::Sender<Preparation>,
    pub(super) recording: Arc<Mutex<Option<Recording>>>,
}

/// Who records executions that end.
#[derive(Clone)]
pub(super) struct Recording {
    pub(super) takes_over: bool,
    pub(super) record: RecordEnding,
}

/// A connection to a keeper.
pub(super) struct Link {
    frames: Outgoing,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
    pulse: watch::Sender<Pulse>,
    pub(super) closed: CancellationToken,
}

/// What is known of the keeper's heartbeat.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Pulse {
    /// Beats in a row without a word from the keeper.
    missed: u32,
    /// A beat was sent and not answered yet.
    is_awaited: bool,
    /// Something was heard since the last beat.
    was_heard: bool,
}

impl Pulse {
    /// Counts a beat. Returns whether one is to be sent.
    fn beat(&mut self) -> bool {
        self.missed = if self.was_heard || !self.is_awaited {
            0
        } else {
            self.missed.saturating_add(1)
        };
        self.was_heard = false;
        !std::mem::replace(&mut self.is_awaited, true)
    }

    fn hear(&mut self, is_beat: bool) {
        self.missed = 0;
        self.was_heard = true;
        self.is_awaited &= !is_beat;
    }

    fn is_lost(&self) -> bool {
        self.missed >= MAX_MISSED
    }
}

#[derive(Default)]
struct Waiting {
    calls: HashMap<u64, Pending>,
    closed: bool,
}

/// What a call that waits is told through.
struct Pending {
    answer: oneshot::Sender<Vec<u8>>,
    news: Option<News>,
    chunks: Option<mpsc::Sender<Arrival>>,
    credit: Option<Arc<Semaphore>>,
}

impl Link {
    /// Takes a connection over on which the greetings have been exchanged.
    pub(super) fn new(stream: UnixStream, listeners: Listeners) -> Arc<Link> {
        let (reader, writer) = stream.into_split();
        let (frames, writer) = outgoing(writer);
        let link = Arc::new(Link {
            frames,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            pulse: watch::Sender::default(),
            closed: CancellationToken::new(),
        });
        let closed = link.closed.clone();
        tokio::spawn(async move {
            tokio::select! {
                written = writer.run() => drop(written),
                () = closed.cancelled() => {}
            }
            closed.cancel();
        });
        let reading = Arc::downgrade(&link);
        let closed = link.closed.clone();
        tokio::spawn(async move {
            let mut reader = BufReader::with_capacity(READ_AT_ONCE, reader);
            let read = tokio::select! {
                read = listen(&reading, &mut reader, &listeners) => read,
                () = closed.cancelled() => Ok(()),
            };
            if let Err(error) = read {
                warn!(%error, "the connection to the keeper failed");
            }
            closed.cancel();
            if let Some(link) = reading.upgrade() {
                link.close();
            }
        });
        tokio::spawn(keep_time(Arc::downgrade(&link), link.closed.clone()));
        link
    }

    /// Asks the keeper to have executions recorded here.
    pub(super) fn begin_recording(&self, takes_over: bool) {
        self.push(0, &FromFront::Records { takes_over });
    }

    /// Tells whether the keeper has missed too many beats.
    pub(super) fn is_silent(&self) -> bool {
        self.pulse.borrow().is_lost()
    }

    /// Sends a short message at once. A connection that is closed needs none.
    fn push(&self, number: u64, message: &FromFront) {
        for frame in frame::write(number, Kind::Message, message)
            .into_iter()
            .flatten()
        {
            let _ = self.frames.push(frame);
        }
    }

    /// Waits until the keeper has missed too many beats, or fewer of them and an answer is overdue.
    async fn falls_silent(&self, wait: Option<Duration>) {
        let mut pulse = self.pulse.subscribe();
        // The sender is in `self`.
        let lost = async { drop(pulse.wait_for(Pulse::is_lost).await) };
        let overdue = async {
            match wait {
                Some(wait) => tokio::time::sleep(wait.saturating_add(OVERDUE)).await,
                None => std::future::pending().await,
            }
            let mut pulse = self.pulse.subscribe();
            drop(
                pulse
                    .wait_for(|pulse| pulse.missed >= MAX_MISSED_OVERDUE)
                    .await,
            );
        };
        tokio::select! {
            () = lost => {}
            () = overdue => {}
        }
    }

    /// Does `work` unless the keeper falls silent meanwhile.
    async fn unless_silent<T>(&self, work: impl Future<Output = T>) -> Result<T, NoAnswer> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.falls_silent(None) => Err(NoAnswer::Silent { sent: true }),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Sends a call. It is on its way when this returns.
    pub(super) fn ask(
        self: &Arc<Link>,
        owner: &Principal,
        op: &Op,
        news: News,
    ) -> Result<Asked, NoAnswer> {
        self.begin(owner, op, Some(news), None, None)
    }

    /// Asks for something to be done with a file, and sends the file. The second result tells what
    /// was wrong with the source.
    pub(super) async fn send_file(
        self: &Arc<Link>,
        owner: &Principal,
        op: &Op,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> (Result<Answer, NoAnswer>, Option<io::Error>) {
        let credit = Arc::new(Semaphore::new(WINDOW));
        let mut asked = match self.begin(owner, op, None, None, Some(Arc::clone(&credit))) {
            Ok(asked) => asked,
            Err(error) => return (Err(error), None),
        };
        let mut leaving = Leaving::new(asked.number, credit, self.frames.clone());
        let sent = tokio::select! {
            sent = copy(source, &mut leaving) => sent,
            answer = &mut asked.answer => return (asked.understand(answer), None),
            () = self.falls_silent(None) => return (Err(NoAnswer::Silent { sent: true }), None),
        };
        let trouble = match sent {
            Ok(_) => {
                self.push(asked.number, &FromFront::NoMore);
                None
            }
            Err(error) => {
                self.push(asked.number, &FromFront::SourceFailed);
                Some(error)
            }
        };
        (
            asked.answered(CancellationToken::new(), None).await,
            trouble,
        )
    }

    /// Asks for a file and writes it to `sink`. The second result tells what was wrong with the
    /// sink.
    pub(super) async fn receive_file(
        self: &Arc<Link>,
        owner: &Principal,
        op: &Op,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> (Result<Answer, NoAnswer>, Option<io::Error>) {
        let (sender, chunks) = stream::arrivals();
        let asked = match self.begin(owner, op, None, Some(sender), None) {
            Ok(asked) => asked,
            Err(error) => return (Err(error), None),
        };
        let credit = frame::write(asked.number, Kind::Message, &FromFront::Credit(1))
            .expect("it is short")
            .remove(0);
        let mut arriving = Arriving::new(chunks, credit, self.frames.clone(), Silence::IsTheEnd);
        let written = async {
            copy(&mut arriving, sink).await?;
            sink.flush().await
        };
        match self.unless_silent(written).await {
            Ok(Ok(())) => (asked.answered(CancellationToken::new(), None).await, None),
            Ok(Err(error)) => (Err(NoAnswer::Lost), Some(error)),
            Err(silent) => (Err(silent), None),
        }
    }

    fn begin(
        self: &Arc<Link>,
        owner: &Principal,
        op: &Op,
        news: Option<News>,
        chunks: Option<mpsc::Sender<Arrival>>,
        credit: Option<Arc<Semaphore>>,
    ) -> Result<Asked, NoAnswer> {
        if self.is_silent() {
            return Err(NoAnswer::Silent { sent: false });
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let frames = frame::write(number, Kind::Message, &Asking::Request { owner, op })
            .map_err(|_| NoAnswer::TooLarge)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut waiting = self.waiting();
            if waiting.closed {
                return Err(NoAnswer::NotSent);
            }
            waiting.calls.insert(
                number,
                Pending {
                    answer: sender,
                    news,
                    chunks,
                    credit,
                },
            );
        }
        let asked = Asked {
            link: Arc::clone(self),
            number,
            answer,
        };
        for (at, frame) in frames.into_iter().enumerate() {
            if self.frames.push(frame).is_err() {
                return Err(if at == 0 {
                    NoAnswer::NotSent
                } else {
                    NoAnswer::Lost
                });
            }
        }
        Ok(asked)
    }

    /// Ends every call that waits.
    fn close(&self) {
        self.closed.cancel();
        let calls = {
            let mut waiting = self.waiting();
            waiting.closed = true;
            std::mem::take(&mut waiting.calls)
        };
        // Whoever waits for room to send a file must hear of it too.
        for credit in calls.into_values().filter_map(|call| call.credit) {
            credit.close();
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting
            .lock()
            .expect("nothing panics while it holds the calls")
    }

    fn hear(&self, id: u64, message: FromKeeper, listeners: &Listeners) -> Result<(), FrameError> {
        match message {
            FromKeeper::Preparation(told) => drop(listeners.preparation.send_replace(told)),
            FromKeeper::Beat => self.heard(true),
            FromKeeper::Ended { number, ended } => {
                let recording = listeners
                    .recording
                    .lock()
                    .expect("nothing panics while it holds the recorder")
                    .clone();
                // Without a recorder nothing was asked for.
                if let Some(Recording { record, .. }) = recording {
                    record(&ended);
                    self.push(0, &FromFront::Recorded(number));
                }
            }
            FromKeeper::News(text) => {
                if let Some(news) = self
                    .waiting()
                    .calls
                    .get(&id)
                    .and_then(|call| call.news.as_ref())
                {
                    news.send_replace(text);
                }
            }
            FromKeeper::Credit(amount) => {
                if let Some(credit) = self
                    .waiting()
                    .calls
                    .get(&id)
                    .and_then(|call| call.credit.as_ref())
                {
                    stream::give_credit(credit, amount);
                }
            }
            FromKeeper::Welcome(_) | FromKeeper::Status(_) | FromKeeper::Stop(_) => {
                return Err(FrameError::OutOfTurn("a greeting in the middle"));
            }
        }
        Ok(())
    }

    fn arrived(&self, id: u64, chunk: Vec<u8>) -> Result<(), FrameError> {
        let waiting = self.waiting();
        let Some(chunks) = waiting.calls.get(&id).and_then(|call| call.chunks.as_ref()) else {
            return Ok(());
        };
        match chunks.try_send(Arrival::Chunk(chunk)) {
            Err(mpsc::error::TrySendError::Full(_)) => {
                Err(FrameError::OutOfTurn("more chunks than credits"))
            }
            _ => Ok(()),
        }
    }
}

impl Link {
    /// Notes that the keeper lives.
    fn heard(&self, is_beat: bool) {
        self.pulse.send_if_modified(|pulse| {
            let was_lost = pulse.is_lost();
            pulse.hear(is_beat);
            if was_lost {
                info!("the keeper answers again");
            }
            was_lost
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// Sends beats and counts those that are missed, until the connection ends.
async fn keep_time(link: Weak<Link>, closed: CancellationToken) {
    let mut beats = tokio::time::interval(BEAT);
    // A front that could not run for a while has no right to complain of the keeper.
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = beats.tick() => {}
            () = closed.cancelled() => return,
        }
        let Some(link) = link.upgrade() else { return };
        let (mut must_send, mut is_new) = (false, false);
        link.pulse.send_modify(|pulse| {
            let was_lost = pulse.is_lost();
            must_send = pulse.beat();
            is_new = pulse.is_lost() && !was_lost;
        });
        if is_new {
            error!(
                "the keeper does not answer; its sessions are lost if it is ended, and go on if it \
                 recovers"
            );
        }
        if must_send {
            link.push(0, &FromFront::Beat);
        }
    }
}

/// Takes what the keeper says to where it belongs, until the connection ends.
async fn listen(
    link: &Weak<Link>,
    reader: &mut BufReader<OwnedReadHalf>,
    listeners: &Listeners,
) -> Result<(), FrameError> {
    let mut assembly = Assembly::default();
    while let Some(frame) = frame::read(reader).await? {
        let Some(link) = link.upgrade() else {
            return Ok(());
        };
        link.heard(false);
        let Some(Frame { id, kind, payload }) = assembly.add(frame)? else {
            continue;
        };
        match kind {
            Kind::Chunk => link.arrived(id, payload)?,
            Kind::Message => link.hear(id, frame::content(&payload)?, listeners)?,
            Kind::Answer => {
                if let Some(call) = link.waiting().calls.remove(&id) {
                    // Whoever asked may have gone away in this moment.
                    let _ = call.answer.send(payload);
                }
            }
            Kind::Part => unreachable!("parts are put together first"),
        }
    }
    Ok(())
}

/// A call that was sent. Dropped without its answer, it is forgotten at the other side.
pub(super) struct Asked {
    link: Arc<Link>,
    number: u64,
    answer: oneshot::Receiver<Vec<u8>>,
}

impl Asked {
    /// Waits for the answer. A cancelled token is passed on, and the answer is awaited all the
    /// same. A keeper that is well answers within `wait`.
    pub(super) async fn answered(
        mut self,
        cancel: CancellationToken,
        wait: Option<Duration>,
    ) -> Result<Answer, NoAnswer> {
        let link = Arc::clone(&self.link);
        let mut silence = pin!(link.falls_silent(wait));
        tokio::select! {
            biased;
            answer = &mut self.answer => return self.understand(answer),
            () = cancel.cancelled() => self.link.push(self.number, &FromFront::Cancel),
            () = &mut silence => return Err(NoAnswer::Silent { sent: true }),
        }
        tokio::select! {
            biased;
            answer = &mut self.answer => self.understand(answer),
            () = &mut silence => Err(NoAnswer::Silent { sent: true }),
        }
    }

    fn understand(
        &self,
        answer: Result<Vec<u8>, oneshot::error::RecvError>,
    ) -> Result<Answer, NoAnswer> {
        let payload = answer.map_err(|_| NoAnswer::Lost)?;
        frame::content(&payload).map_err(|error| {
            warn!(%error, "an answer of the keeper could not be understood");
            NoAnswer::Nonsense
        })
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.link.waiting().calls.remove(&self.number).is_none() {
            return;
        }
        self.link.push(self.number, &FromFront::Forget);
    }
}

/// Copies in pieces of a chunk's size.
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
    fn a_keeper_is_silent_after_so_many_missed_beats_and_not_after_one_word() {
        let mut pulse = Pulse::default();
        assert!(pulse.beat(), "the first beat is sent");
        for _ in 0..MAX_MISSED - 1 {
            assert!(!pulse.beat(), "one beat at a time is on its way");
            assert!(!pulse.is_lost());
        }
        let mut heard = pulse;
        heard.hear(false);
        heard.beat();
        assert!(!heard.is_lost(), "any word counts");
        pulse.beat();
        assert!(pulse.is_lost());
        pulse.hear(true);
        assert!(
            !pulse.is_lost() && pulse.beat(),
            "it is well again, and asked again"
        );
    }

    #[test]
    fn a_keeper_that_answers_misses_nothing_however_long_nothing_else_is_said() {
        let mut pulse = Pulse::default();
        for _ in 0..10 * MAX_MISSED {
            assert!(pulse.beat());
            pulse.hear(true);
            assert_eq!(pulse.missed, 0);
        }
    }
}
