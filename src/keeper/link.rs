//! The front's side of one connection: many calls at once, each waiting for its own answer.
//!
//! A call that is dropped is forgotten at the other side too, which for code means that it goes on. When the connection ends, every call that waits learns that its answer is lost.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::frame::{self, Assembly, Frame, FrameError, Kind};
use super::message::{Answer, Asking, Call, FromFront, FromKeeper};
use super::outgoing::{Outgoing, outgoing};
use super::stream::{self, Arrival, Arriving, CHUNK, Leaving, Silence, WINDOW};
use crate::sandbox::Preparation;
use crate::session::News;

/// Bytes that are read at once.
const READ_AT_ONCE: usize = 64 * 1024;

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
}

/// A connection to a keeper.
pub(super) struct Link {
    frames: Outgoing,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
    pub(super) closed: CancellationToken,
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

/// What a call wants beside its answer.
#[derive(Clone, Default)]
pub(super) struct Wishes {
    pub(super) news: Option<News>,
    pub(super) cancel: Option<CancellationToken>,
}

impl Link {
    /// Takes a connection over on which the greetings have been exchanged.
    pub(super) fn new(stream: UnixStream, preparation: watch::Sender<Preparation>) -> Arc<Link> {
        let (reader, writer) = stream.into_split();
        let (frames, writer) = outgoing(writer);
        let link = Arc::new(Link {
            frames,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
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
                read = listen(&reading, &mut reader, &preparation) => read,
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
        link
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Asks, and waits for the answer. A cancelled token is passed on, and the answer is awaited all the same.
    pub(super) async fn ask<T: DeserializeOwned>(
        self: &Arc<Link>,
        call: &Call,
        wishes: Wishes,
    ) -> Result<Answer<T>, NoAnswer> {
        let mut asked = self.begin(call, wishes.news, None, None).await?;
        if let Some(cancel) = wishes.cancel {
            tokio::select! {
                biased;
                answer = &mut asked.answer => return asked.understand(answer),
                () = cancel.cancelled() => asked.say(&FromFront::Cancel).await,
            }
        }
        asked.answered().await
    }

    /// Asks for something to be done with a file, and sends the file. The second result tells what was wrong with the source.
    pub(super) async fn send_file<T: DeserializeOwned>(
        self: &Arc<Link>,
        call: &Call,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> (Result<Answer<T>, NoAnswer>, Option<io::Error>) {
        let credit = Arc::new(Semaphore::new(WINDOW));
        let mut asked = match self.begin(call, None, None, Some(Arc::clone(&credit))).await {
            Ok(asked) => asked,
            Err(error) => return (Err(error), None),
        };
        let mut leaving = Leaving::new(asked.number, credit, self.frames.clone());
        let sent = tokio::select! {
            sent = copy(source, &mut leaving) => sent,
            answer = &mut asked.answer => return (asked.understand(answer), None),
        };
        let trouble = match sent {
            Ok(_) => {
                asked.say(&FromFront::NoMore).await;
                None
            }
            Err(error) => {
                asked.say(&FromFront::SourceFailed).await;
                Some(error)
            }
        };
        (asked.answered().await, trouble)
    }

    /// Asks for a file and writes it to `sink`. The second result tells what was wrong with the sink.
    pub(super) async fn receive_file<T: DeserializeOwned>(
        self: &Arc<Link>,
        call: &Call,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> (Result<Answer<T>, NoAnswer>, Option<io::Error>) {
        let (sender, chunks) = stream::arrivals();
        let asked = match self.begin(call, None, Some(sender), None).await {
            Ok(asked) => asked,
            Err(error) => return (Err(error), None),
        };
        let credit = frame::write(asked.number, Kind::Message, &FromFront::Credit(1)).expect("it is short").remove(0);
        let mut arriving = Arriving::new(chunks, credit, self.frames.clone(), Silence::IsTheEnd);
        let written = async {
            copy(&mut arriving, sink).await?;
            sink.flush().await
        };
        match written.await {
            Ok(()) => (asked.answered().await, None),
            Err(error) => (Err(NoAnswer::Lost), Some(error)),
        }
    }

    async fn begin(
        self: &Arc<Link>,
        call: &Call,
        news: Option<News>,
        chunks: Option<mpsc::Sender<Arrival>>,
        credit: Option<Arc<Semaphore>>,
    ) -> Result<Asked, NoAnswer> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let frames = frame::write(number, Kind::Message, &Asking::Request(call)).map_err(|_| NoAnswer::TooLarge)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut waiting = self.waiting();
            if waiting.closed {
                return Err(NoAnswer::NotSent);
            }
            waiting.calls.insert(number, Pending { answer: sender, news, chunks, credit });
        }
        let asked = Asked { link: Arc::clone(self), number, answer };
        for (at, frame) in frames.into_iter().enumerate() {
            if self.frames.send(frame).await.is_err() {
                return Err(if at == 0 { NoAnswer::NotSent } else { NoAnswer::Lost });
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
        self.waiting.lock().expect("nothing panics while it holds the calls")
    }

    fn hear(&self, id: u64, message: FromKeeper, preparation: &watch::Sender<Preparation>) -> Result<(), FrameError> {
        match message {
            FromKeeper::Preparation(told) => drop(preparation.send_replace(told)),
            FromKeeper::News(text) => {
                if let Some(news) = self.waiting().calls.get(&id).and_then(|call| call.news.as_ref()) {
                    news.send_replace(text);
                }
            }
            FromKeeper::Credit(amount) => {
                if let Some(credit) = self.waiting().calls.get(&id).and_then(|call| call.credit.as_ref()) {
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
        let Some(chunks) = waiting.calls.get(&id).and_then(|call| call.chunks.as_ref()) else { return Ok(()) };
        match chunks.try_send(Arrival::Chunk(chunk)) {
            Err(mpsc::error::TrySendError::Full(_)) => Err(FrameError::OutOfTurn("more chunks than credits")),
            _ => Ok(()),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

/// Takes what the keeper says to where it belongs, until the connection ends.
async fn listen(
    link: &std::sync::Weak<Link>,
    reader: &mut BufReader<OwnedReadHalf>,
    preparation: &watch::Sender<Preparation>,
) -> Result<(), FrameError> {
    let mut assembly = Assembly::default();
    while let Some(frame) = frame::read(reader).await? {
        let Some(Frame { id, kind, payload }) = assembly.add(frame)? else { continue };
        let Some(link) = link.upgrade() else { return Ok(()) };
        match kind {
            Kind::Chunk => link.arrived(id, payload)?,
            Kind::Message => link.hear(id, frame::content(&payload)?, preparation)?,
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
struct Asked {
    link: Arc<Link>,
    number: u64,
    answer: oneshot::Receiver<Vec<u8>>,
}

impl Asked {
    async fn answered<T: DeserializeOwned>(mut self) -> Result<Answer<T>, NoAnswer> {
        let answer = (&mut self.answer).await;
        self.understand(answer)
    }

    fn understand<T: DeserializeOwned>(
        &self,
        answer: Result<Vec<u8>, oneshot::error::RecvError>,
    ) -> Result<Answer<T>, NoAnswer> {
        let payload = answer.map_err(|_| NoAnswer::Lost)?;
        frame::content(&payload).map_err(|error| {
            warn!(%error, "an answer of the keeper could not be understood");
            NoAnswer::Nonsense
        })
    }

    async fn say(&self, message: &FromFront) {
        for frame in frame::write(self.number, Kind::Message, message).into_iter().flatten() {
            let _ = self.link.frames.send(frame).await;
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.link.waiting().calls.remove(&self.number).is_none() {
            return;
        }
        let frame = frame::write(self.number, Kind::Message, &FromFront::Forget).expect("it is short").remove(0);
        if let Err(mpsc::error::TrySendError::Full(frame)) = self.link.frames.try_send(frame) {
            let frames = self.link.frames.clone();
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move { frames.send(frame).await });
            }
        }
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
