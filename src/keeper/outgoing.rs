//! Frames on their way to the other side of a connection.
//!
//! A frame is written at once by whoever sends it, when nothing waits before it and the kernel has
//! room. Otherwise it is queued for a task that writes what waits, in the order in which it was
//! sent. So the usual call costs no switch to another task, and nobody blocks:
//!
//! 1. `waiting` knows which frames are queued or being written by the task, and changes only under
//!    its lock.
//! 2. Only where there are none a frame is written directly, under the same lock. So there is one
//!    writer at a time, and no frame overtakes another.
//! 3. What the kernel did not take of a frame is queued under that lock, before any other frame can
//!    be.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError};

use super::frame::Written;

/// Frames that may wait. Whoever has more waits, and the other side is slow.
const MOST_FRAMES: usize = 64;
/// Frames that are written in one go.
const MOST_AT_ONCE: usize = 64;

/// The way out. Copies share it.
#[derive(Clone)]
pub(super) struct Outgoing {
    socket: Arc<OwnedWriteHalf>,
    /// Places for frames that wait.
    room: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
    /// Something waits, or nobody can send any more.
    news: Arc<Wake>,
}

#[derive(Default)]
struct Waiting {
    queue: VecDeque<Queued>,
    /// Frames that the task is writing.
    under_way: usize,
    is_gone: bool,
}

/// Wakes the task when something waits, and when the last sender is gone.
#[derive(Default)]
struct Wake(Arc<Notify>);

impl Drop for Wake {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// A place for a frame that waits. It is free again when the frame has been written.
pub(super) type Place = OwnedSemaphorePermit;

/// A frame that waits, and its place, if it needed one.
struct Queued {
    frame: Written,
    _place: Option<Place>,
}

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

/// Why a frame was not sent at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotSent {
    /// Too many frames wait; this one is given back.
    Full(Written),
    Gone,
}

/// Writes what is queued.
pub(super) struct Writer {
    socket: Arc<OwnedWriteHalf>,
    room: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
    notify: Arc<Notify>,
    senders: Weak<Wake>,
}

/// Makes the way out of a connection, and what must run for it.
pub(super) fn outgoing(socket: OwnedWriteHalf) -> (Outgoing, Writer) {
    let (socket, waiting) = (Arc::new(socket), Arc::<Mutex<Waiting>>::default());
    let (room, news) = (
        Arc::new(Semaphore::new(MOST_FRAMES)),
        Arc::<Wake>::default(),
    );
    let writer = Writer {
        socket: Arc::clone(&socket),
        room: room.clone(),
        waiting: Arc::clone(&waiting),
        notify: Arc::clone(&news.0),
        senders: Arc::downgrade(&news),
    };
    (
        Outgoing {
            socket,
            room,
            waiting,
            news,
        },
        writer,
    )
}

impl Outgoing {
    /// Sends a frame, and waits as long as too many wait already.
    pub(super) async fn send(&self, frame: Written) -> Result<(), Gone> {
        let place = self.room.clone().acquire_owned().await.map_err(|_| Gone)?;
        self.put(frame, Some(place))
    }

    /// Sends a frame unless too many wait already; then it is given back.
    pub(super) fn try_send(&self, frame: Written) -> Result<(), NotSent> {
        match self.room.clone().try_acquire_owned() {
            Ok(place) => self.put(frame, Some(place)).map_err(|Gone| NotSent::Gone),
            Err(TryAcquireError::NoPermits) => Err(NotSent::Full(frame)),
            Err(TryAcquireError::Closed) => Err(NotSent::Gone),
        }
    }

    /// Sends a frame however many wait, and never waits itself: frames that are pushed keep the
    /// order of the calls. For what is bounded by other means: requests, of which each caller has
    /// so many, and short messages.
    pub(super) fn push(&self, frame: Written) -> Result<(), Gone> {
        self.put(frame, None)
    }

    /// The places, for whoever waits for one without an `await`. The frame goes through `put` then.
    pub(super) fn room(&self) -> Arc<Semaphore> {
        self.room.clone()
    }

    pub(super) fn put(&self, mut frame: Written, place: Option<Place>) -> Result<(), Gone> {
        let mut waiting = locked(&self.waiting);
        if waiting.is_gone {
            return Err(Gone);
        }
        if waiting.queue.is_empty() && waiting.under_way == 0 {
            match self.socket.try_write(&frame) {
                Ok(size) if size == frame.len() => return Ok(()),
                Ok(size) => drop(frame.drain(..size)),
                // No room now, or none ever again; the writer finds out which.
                Err(_) => {}
            }
        }
        waiting.queue.push_back(Queued {
            frame,
            _place: place,
        });
        drop(waiting);
        self.news.0.notify_one();
        Ok(())
    }
}

impl Writer {
    /// Writes until nobody can send any more or the other side is gone.
    pub(super) async fn run(self) -> io::Result<()> {
        loop {
            // Asked before the queue is looked at: what is sent after that wakes this task again.
            let can_end = self.senders.strong_count() == 0;
            let batch: Vec<Queued> = {
                let mut waiting = locked(&self.waiting);
                let size = waiting.queue.len().min(MOST_AT_ONCE);
                waiting.under_way = size;
                waiting.queue.drain(..size).collect()
            };
            for queued in &batch {
                self.write(&queued.frame).await?;
            }
            locked(&self.waiting).under_way = 0;
            match (batch.is_empty(), can_end) {
                (true, true) => return Ok(()),
                (true, false) => self.notify.notified().await,
                (false, _) => {}
            }
        }
    }

    async fn write(&self, mut rest: &[u8]) -> io::Result<()> {
        while !rest.is_empty() {
            match self.socket.try_write(rest) {
                Ok(size) => rest = &rest[size..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.writable().await?
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Whoever waits for a place must hear that there will be none.
        self.room.close();
        let mut waiting = locked(&self.waiting);
        waiting.is_gone = true;
        waiting.queue.clear();
    }
}

fn locked(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting
        .lock()
        .expect("nothing panics while it holds the queue")
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;

    use super::*;

    /// Frames of very different sizes, each of one letter.
    fn frames() -> Vec<Written> {
        (0..500)
            .map(|number| vec![b'a' + (number % 26) as u8; 1 + (number * 7_919) % 60_000])
            .collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn frames_keep_their_order_and_are_whole_however_slow_the_reader_is() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (_reader, writer) = ours.into_split();
        let (outgoing, writer) = outgoing(writer);
        let writing = tokio::spawn(writer.run());
        let sending = tokio::spawn(async move {
            for frame in frames() {
                outgoing.send(frame).await.unwrap();
            }
        });
        let expected = frames().concat();
        let mut read = Vec::new();
        let mut buffer = vec![0; 1_000];
        while read.len() < expected.len() {
            let size = theirs.read(&mut buffer).await.unwrap();
            read.extend_from_slice(&buffer[..size]);
        }
        assert!(read == expected);
        sending.await.unwrap();
        writing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_reader_that_does_not_read_stops_the_sender_within_bounds() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_reader, writer) = ours.into_split();
        let (outgoing, writer) = outgoing(writer);
        let writing = tokio::spawn(writer.run());
        let frame = || vec![0; 100_000];
        let mut taken = 0;
        while outgoing.try_send(frame()).is_ok() {
            taken += 1;
            tokio::task::yield_now().await;
            assert!(taken < 1_000, "somebody keeps everything");
        }
        assert!(matches!(outgoing.try_send(frame()), Err(NotSent::Full(_))));
        assert_eq!(
            outgoing.push(frame()),
            Ok(()),
            "what is pushed needs no place"
        );
        drop(theirs);
        assert!(
            writing.await.unwrap().is_err(),
            "the writer notices the end"
        );
        assert_eq!(outgoing.send(frame()).await, Err(Gone));
    }
}
