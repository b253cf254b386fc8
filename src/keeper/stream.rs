//! Files in chunks, with as many under way as the receiver has room for.
//!
//! The sender begins with `WINDOW` credits; each chunk costs one, and the receiver gives one back
//! when it has used a chunk up. So a slow receiver slows its sender, holds at most `WINDOW` chunks,
//! and nobody else waits.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::PollSemaphore;

use super::frame::{self, Kind, Written};
use super::outgoing::Outgoing;

/// Bytes of a chunk.
pub(super) const CHUNK: usize = 64 * 1024;
/// Chunks of one file on their way: a mebibyte.
pub(super) const WINDOW: usize = 16;

/// What a receiver is told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    Chunk(Vec<u8>),
    /// The file is complete.
    End,
    /// There will be no more, and the file is not complete.
    Failed,
}

/// Makes the two ends of what arrives: the connection's reader holds the first, whoever uses the
/// file the second.
pub(super) fn arrivals() -> (mpsc::Sender<Arrival>, mpsc::Receiver<Arrival>) {
    // One more for the end.
    mpsc::channel(WINDOW + 1)
}

/// What it means that no more can arrive although no end was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// The answer that follows tells how it ended.
    IsTheEnd,
    /// The sender is gone in the middle.
    IsAFailure,
}

/// A file that arrives, to be read.
pub(super) struct Arriving {
    pub(super) chunks: mpsc::Receiver<Arrival>,
    /// A written credit.
    credit: Written,
    outgoing: Outgoing,
    room: PollSemaphore,
    silence: Silence,
    current: Vec<u8>,
    at: usize,
    owes: bool,
}

impl Arriving {
    /// `credit` is sent for each chunk that was used up.
    pub(super) fn new(
        chunks: mpsc::Receiver<Arrival>,
        credit: Written,
        outgoing: Outgoing,
        silence: Silence,
    ) -> Arriving {
        let room = PollSemaphore::new(outgoing.room());
        Arriving {
            chunks,
            credit,
            outgoing,
            room,
            silence,
            current: Vec::new(),
            at: 0,
            owes: false,
        }
    }
}

impl AsyncRead for Arriving {
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
                if let Some(place) = ready!(this.room.poll_acquire(context)) {
                    let _ = this.outgoing.put(this.credit.clone(), Some(place));
                }
                this.owes = false;
            }
            match ready!(this.chunks.poll_recv(context)) {
                Some(Arrival::Chunk(chunk)) => {
                    (this.current, this.at, this.owes) = (chunk, 0, true)
                }
                Some(Arrival::End) => return Poll::Ready(Ok(())),
                None if this.silence == Silence::IsTheEnd => return Poll::Ready(Ok(())),
                Some(Arrival::Failed) | None => {
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
pub(super) struct Leaving {
    id: u64,
    credit: PollSemaphore,
    permit: Option<OwnedSemaphorePermit>,
    outgoing: Outgoing,
    room: PollSemaphore,
}

impl Leaving {
    pub(super) fn new(id: u64, credit: Arc<Semaphore>, outgoing: Outgoing) -> Leaving {
        let room = PollSemaphore::new(outgoing.room());
        Leaving {
            id,
            credit: PollSemaphore::new(credit),
            permit: None,
            outgoing,
            room,
        }
    }
}

impl AsyncWrite for Leaving {
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
        let place = ready!(this.room.poll_acquire(context)).ok_or_else(gone)?;
        let size = bytes.len().min(CHUNK);
        let chunk = frame::raw(this.id, Kind::Chunk, &bytes[..size]);
        this.outgoing.put(chunk, Some(place)).map_err(|_| gone())?;
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
