//! Files in chunks, with credit-based flow control.
//!
//! The sender begins with `WINDOW` credits; each chunk costs one, and the receiver returns one when
//! it has consumed a chunk. So a slow receiver slows its sender, holds at most `WINDOW` chunks, and
//! delays no other request.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::PollSemaphore;

use super::frame::{self, EncodedFrame, FrameKind};
use super::frame_sender::FrameSender;

/// Bytes of a chunk.
pub(super) const CHUNK: usize = 64 * 1024;
/// Chunks of one file in transit: a mebibyte.
pub(super) const WINDOW: usize = 16;

/// What a receiver gets.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FilePart {
    Chunk(Vec<u8>),
    /// The file is complete.
    End,
    /// No more follows, and the file is not complete.
    Failed,
}

/// Creates the channel of a file that is received: the reader of the connection has the sender, the
/// consumer of the file the receiver.
pub(super) fn file_parts() -> (mpsc::Sender<FilePart>, mpsc::Receiver<FilePart>) {
    // One more for the end.
    mpsc::channel(WINDOW + 1)
}

/// What a closed channel without an `End` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EofPolicy {
    /// The reply that follows says how the transfer ended.
    EndsFile,
    /// The sender disconnected before the end.
    Fails,
}

/// A file that is received, to be read.
pub(super) struct FileReader {
    pub(super) chunks: mpsc::Receiver<FilePart>,
    /// An encoded credit.
    credit: EncodedFrame,
    frames: FrameSender,
    room: PollSemaphore,
    eof: EofPolicy,
    current: Vec<u8>,
    at: usize,
    owes: bool,
}

impl FileReader {
    /// `credit` is sent for each chunk that was used up.
    pub(super) fn new(
        chunks: mpsc::Receiver<FilePart>,
        credit: EncodedFrame,
        frames: FrameSender,
        eof: EofPolicy,
    ) -> FileReader {
        let room = PollSemaphore::new(frames.room());
        FileReader {
            chunks,
            credit,
            frames,
            room,
            eof,
            current: Vec::new(),
            at: 0,
            owes: false,
        }
    }
}

impl AsyncRead for FileReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.at == this.current.len() {
            if this.owes {
                // Without a connection nobody needs the credit, and the chunks that are here still
                // count.
                if let Some(permit) = ready!(this.room.poll_acquire(context)) {
                    let _ = this.frames.put(this.credit.clone(), Some(permit));
                }
                this.owes = false;
            }
            match ready!(this.chunks.poll_recv(context)) {
                Some(FilePart::Chunk(chunk)) => {
                    (this.current, this.at, this.owes) = (chunk, 0, true)
                }
                Some(FilePart::End) => return Poll::Ready(Ok(())),
                None if this.eof == EofPolicy::EndsFile => return Poll::Ready(Ok(())),
                Some(FilePart::Failed) | None => {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
                }
            }
        }
        let size = buffer.remaining().min(this.current.len() - this.at);
        buffer.put_slice(&this.current[this.at..this.at + size]);
        this.at += size;
        Poll::Ready(Ok(()))
    }
}

/// A file that is sent by writing it.
pub(super) struct FileWriter {
    id: u64,
    credit: PollSemaphore,
    permit: Option<OwnedSemaphorePermit>,
    frames: FrameSender,
    room: PollSemaphore,
}

impl FileWriter {
    pub(super) fn new(id: u64, credit: Arc<Semaphore>, frames: FrameSender) -> FileWriter {
        let room = PollSemaphore::new(frames.room());
        FileWriter {
            id,
            credit: PollSemaphore::new(credit),
            permit: None,
            frames,
            room,
        }
    }
}

impl AsyncWrite for FileWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        if this.permit.is_none() {
            this.permit = Some(ready!(this.credit.poll_acquire(context)).ok_or_else(gone)?);
        }
        let permit = ready!(this.room.poll_acquire(context)).ok_or_else(gone)?;
        let size = bytes.len().min(CHUNK);
        let chunk = frame::encode_raw(this.id, FrameKind::Chunk, &bytes[..size]);
        this.frames.put(chunk, Some(permit)).map_err(|_| gone())?;
        // It comes back when the receiver says so.
        this.permit.take().expect("it was acquired above").forget();
        Poll::Ready(Ok(size))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Gives a sender credits back, never more than there can be.
pub(super) fn give_credit(credit: &Semaphore, amount: u32) {
    let room = WINDOW.saturating_sub(credit.available_permits());
    credit.add_permits(room.min(amount as usize));
}
