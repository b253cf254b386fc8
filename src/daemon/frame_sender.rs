//! Sends frames to the other side of a connection.
//!
//! The caller writes a frame directly if none is queued and the kernel has room. Otherwise the
//! frame is queued for a task that writes queued frames in the order in which they were sent. So
//! the usual call needs no switch to another task, and no caller blocks:
//!
//! 1. `waiting` has the frames that are queued or being written by the task, and changes only under
//!    its lock.
//! 2. A frame is written directly only if there are none, and under the same lock. So there is one
//!    writer at a time, and no frame overtakes another.
//! 3. The part of a frame that the kernel did not accept is queued under that lock, before any
//!    other frame.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError};

use super::frame::EncodedFrame;

/// Frames that may be queued. Beyond that senders wait, because the other side is slow.
const MAX_FRAMES: usize = 64;
/// Frames that are written in one go.
const MAX_AT_ONCE: usize = 64;

/// The sending side of a connection. Clones share it.
#[derive(Clone)]
pub(super) struct FrameSender {
    socket: Arc<OwnedWriteHalf>,
    /// Permits for queued frames.
    room: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
    /// Notifies the writer of a queued frame, and of the end of the last sender.
    wake: Arc<Wake>,
}

#[derive(Default)]
struct Waiting {
    queue: VecDeque<Queued>,
    /// Frames that the task is writing.
    in_progress: usize,
    is_closed: bool,
}

/// Wakes the task when a frame is queued, and when the last sender is dropped.
#[derive(Default)]
struct Wake(Arc<Notify>);

impl Drop for Wake {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// A permit to queue a frame. It is released when the frame has been written.
pub(super) type QueuePermit = OwnedSemaphorePermit;

/// A queued frame, and its permit, if it needed one.
struct Queued {
    frame: EncodedFrame,
    _permit: Option<QueuePermit>,
}

/// The connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnectionClosed;

/// Why a frame was not sent at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TrySendError {
    /// The queue is full; the frame is returned.
    Full(EncodedFrame),
    Closed,
}

/// Writes queued frames.
pub(super) struct FrameWriter {
    socket: Arc<OwnedWriteHalf>,
    room: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
    notify: Arc<Notify>,
    senders: Weak<Wake>,
}

/// Creates the sending side of a connection, and the writer that must run for it.
pub(super) fn frame_sender(socket: OwnedWriteHalf) -> (FrameSender, FrameWriter) {
    let (socket, waiting) = (Arc::new(socket), Arc::<Mutex<Waiting>>::default());
    let (room, wake) = (Arc::new(Semaphore::new(MAX_FRAMES)), Arc::<Wake>::default());
    let writer = FrameWriter {
        socket: Arc::clone(&socket),
        room: room.clone(),
        waiting: Arc::clone(&waiting),
        notify: Arc::clone(&wake.0),
        senders: Arc::downgrade(&wake),
    };
    (
        FrameSender {
            socket,
            room,
            waiting,
            wake,
        },
        writer,
    )
}

impl FrameSender {
    /// Sends a frame, and waits while the queue is full.
    pub(super) async fn send(&self, frame: EncodedFrame) -> Result<(), ConnectionClosed> {
        let permit = self
            .room
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| ConnectionClosed)?;
        self.put(frame, Some(permit))
    }

    /// Sends a frame unless the queue is full; then the frame is returned.
    pub(super) fn try_send(&self, frame: EncodedFrame) -> Result<(), TrySendError> {
        match self.room.clone().try_acquire_owned() {
            Ok(permit) => self
                .put(frame, Some(permit))
                .map_err(|ConnectionClosed| TrySendError::Closed),
            Err(TryAcquireError::NoPermits) => Err(TrySendError::Full(frame)),
            Err(TryAcquireError::Closed) => Err(TrySendError::Closed),
        }
    }

    /// Sends a frame whatever the length of the queue, and never waits, so frames keep the order of
    /// the calls. For frames that are bounded by other means: requests, whose number per caller is
    /// limited, and short messages.
    pub(super) fn push(&self, frame: EncodedFrame) -> Result<(), ConnectionClosed> {
        self.put(frame, None)
    }

    /// Returns the permits, for a caller that cannot `await` one. It passes its frame to `put`.
    pub(super) fn room(&self) -> Arc<Semaphore> {
        self.room.clone()
    }

    pub(super) fn put(
        &self,
        mut frame: EncodedFrame,
        permit: Option<QueuePermit>,
    ) -> Result<(), ConnectionClosed> {
        let mut waiting = locked(&self.waiting);
        if waiting.is_closed {
            return Err(ConnectionClosed);
        }
        if waiting.queue.is_empty() && waiting.in_progress == 0 {
            match self.socket.try_write(&frame) {
                Ok(size) if size == frame.len() => return Ok(()),
                Ok(size) => drop(frame.drain(..size)),
                // No room, or an error, which the writer will report.
                Err(_) => {}
            }
        }
        waiting.queue.push_back(Queued {
            frame,
            _permit: permit,
        });
        drop(waiting);
        self.wake.0.notify_one();
        Ok(())
    }
}

impl FrameWriter {
    /// Writes until the last sender is dropped or the connection fails.
    pub(super) async fn run(self) -> io::Result<()> {
        loop {
            // Read before the queue: a frame that is sent later wakes this task again.
            let can_end = self.senders.strong_count() == 0;
            let batch: Vec<Queued> = {
                let mut waiting = locked(&self.waiting);
                let size = waiting.queue.len().min(MAX_AT_ONCE);
                waiting.in_progress = size;
                waiting.queue.drain(..size).collect()
            };
            for queued in &batch {
                self.write(&queued.frame).await?;
            }
            locked(&self.waiting).in_progress = 0;
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

impl Drop for FrameWriter {
    fn drop(&mut self) {
        // Senders that wait for a permit must fail.
        self.room.close();
        let mut waiting = locked(&self.waiting);
        waiting.is_closed = true;
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
    fn frames() -> Vec<EncodedFrame> {
        (0..500)
            .map(|number| vec![b'a' + (number % 26) as u8; 1 + (number * 7_919) % 60_000])
            .collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn frames_keep_their_order_and_are_whole_however_slow_the_reader_is() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (_reader, writer) = ours.into_split();
        let (frame_sender, writer) = frame_sender(writer);
        let writing = tokio::spawn(writer.run());
        let sending = tokio::spawn(async move {
            for frame in frames() {
                frame_sender.send(frame).await.unwrap();
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
        let (frame_sender, writer) = frame_sender(writer);
        let writing = tokio::spawn(writer.run());
        let frame = || vec![0; 100_000];
        let mut taken = 0;
        while frame_sender.try_send(frame()).is_ok() {
            taken += 1;
            tokio::task::yield_now().await;
            assert!(taken < 1_000, "the queue is not bounded");
        }
        assert!(matches!(
            frame_sender.try_send(frame()),
            Err(TrySendError::Full(_))
        ));
        assert_eq!(
            frame_sender.push(frame()),
            Ok(()),
            "what is pushed needs no permit"
        );
        drop(theirs);
        assert!(
            writing.await.unwrap().is_err(),
            "the writer notices the end"
        );
        assert_eq!(frame_sender.send(frame()).await, Err(ConnectionClosed));
    }
}
