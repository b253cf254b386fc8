//! Frames on their way to the other side of a connection.
//!
//! A frame is written at once by whoever sends it, when nothing waits before it and the kernel has room. Otherwise it is queued for a task that writes what waits, in
//! the order in which it was sent. So the usual call costs no switch to another task, and nobody blocks:
//!
//! 1. `waiting` counts frames that are queued or being written by the task, and changes only under its lock.
//! 2. Only where it is zero a frame is written directly, under the same lock. So there is one writer at a time, and no frame overtakes another.
//! 3. What the kernel did not take of a frame is queued under that lock, before any other frame can be.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc::{self, error::TrySendError};

use super::frame::Written;

/// Frames that may wait. Whoever has more waits, and the other side is slow.
const MOST_FRAMES: usize = 64;
/// Frames that are written in one go.
const MOST_AT_ONCE: usize = 64;

/// The way out. Copies share it.
#[derive(Clone)]
pub(super) struct Outgoing {
    socket: Arc<OwnedWriteHalf>,
    queue: mpsc::Sender<Written>,
    waiting: Arc<Mutex<usize>>,
}

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone;

/// Writes what is queued.
pub(super) struct Writer {
    socket: Arc<OwnedWriteHalf>,
    queue: mpsc::Receiver<Written>,
    waiting: Arc<Mutex<usize>>,
}

/// Makes the way out of a connection, and what must run for it.
pub(super) fn outgoing(socket: OwnedWriteHalf) -> (Outgoing, Writer) {
    let (sender, queue) = mpsc::channel(MOST_FRAMES);
    let (socket, waiting) = (Arc::new(socket), Arc::<Mutex<usize>>::default());
    let writer = Writer { socket: Arc::clone(&socket), queue, waiting: Arc::clone(&waiting) };
    (Outgoing { socket, queue: sender, waiting }, writer)
}

impl Outgoing {
    /// Sends a frame, and waits as long as too many wait already.
    pub(super) async fn send(&self, frame: Written) -> Result<(), Gone> {
        let place = self.queue.reserve().await.map_err(|_| Gone)?;
        self.put(place, frame);
        Ok(())
    }

    /// Sends a frame unless too many wait already; then it is given back.
    pub(super) fn try_send(&self, frame: Written) -> Result<(), TrySendError<Written>> {
        match self.queue.try_reserve() {
            Ok(place) => self.put(place, frame),
            Err(TrySendError::Full(())) => return Err(TrySendError::Full(frame)),
            Err(TrySendError::Closed(())) => return Err(TrySendError::Closed(frame)),
        }
        Ok(())
    }

    /// The queue, for whoever reserves a place in it without an `await`. What takes a place must go through `queued`.
    pub(super) fn queue(&self) -> mpsc::Sender<Written> {
        self.queue.clone()
    }

    /// Counts the frame that `send` puts into the queue.
    pub(super) fn queued<E>(&self, send: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut waiting = locked(&self.waiting);
        send()?;
        *waiting += 1;
        Ok(())
    }

    fn put(&self, place: mpsc::Permit<'_, Written>, mut frame: Written) {
        let mut waiting = locked(&self.waiting);
        if *waiting == 0 {
            match self.socket.try_write(&frame) {
                Ok(size) if size == frame.len() => return,
                Ok(size) => drop(frame.drain(..size)),
                // No room now, or none ever again; the writer finds out which.
                Err(_) => {}
            }
        }
        *waiting += 1;
        place.send(frame);
    }
}

impl Writer {
    /// Writes until nobody can send any more or the other side is gone.
    pub(super) async fn run(mut self) -> io::Result<()> {
        let mut batch = Vec::with_capacity(MOST_AT_ONCE);
        while self.queue.recv_many(&mut batch, MOST_AT_ONCE).await > 0 {
            for frame in &batch {
                self.write(frame).await?;
            }
            *locked(&self.waiting) -= batch.len();
            batch.clear();
        }
        Ok(())
    }

    async fn write(&self, mut rest: &[u8]) -> io::Result<()> {
        while !rest.is_empty() {
            match self.socket.try_write(rest) {
                Ok(size) => rest = &rest[size..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.socket.writable().await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn locked(waiting: &Mutex<usize>) -> MutexGuard<'_, usize> {
    waiting.lock().expect("nothing panics while it holds the count")
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;

    use super::*;

    /// Frames of very different sizes, each of one letter.
    fn frames() -> Vec<Written> {
        (0..500).map(|number| vec![b'a' + (number % 26) as u8; 1 + (number * 7_919) % 60_000]).collect()
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
        assert!(matches!(outgoing.try_send(frame()), Err(TrySendError::Full(_))));
        drop(theirs);
        assert!(writing.await.unwrap().is_err(), "the writer notices the end");
        assert_eq!(outgoing.send(frame()).await, Err(Gone));
    }
}
