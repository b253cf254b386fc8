//! The end of a connection that leads into the sandbox.
//!
//! Adds three things to a socket. Bytes that were read in order to decide can be read again.
//! Transfers obey the session's meter. And the connection has a [`Fate`]: it may be dropped
//! anywhere, and "refused" must look different from "finished".

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep_until};

use super::meter::Meter;

/// How a connection ends when it is dropped: with a reset, unless it was let through.
#[derive(Clone, Default)]
pub(crate) struct Fate {
    is_own_affair: Arc<AtomicBool>,
}

impl Fate {
    /// Marks the connection as refused or cut off: it is reset, and unsent data is discarded.
    pub(crate) fn reset(&self) {
        self.is_own_affair.store(false, Ordering::SeqCst);
    }

    /// Marks the connection as let through: its peers decide how it ends.
    pub(crate) fn let_through(&self) {
        self.is_own_affair.store(true, Ordering::SeqCst);
    }
}

pub(crate) struct Inside {
    stream: TcpStream,
    read_ahead: Bytes,
    meter: Meter,
    waiting: Option<Pin<Box<Sleep>>>,
    fate: Fate,
}

impl Inside {
    pub(crate) fn new(stream: TcpStream, meter: Meter, fate: Fate) -> Inside {
        Inside {
            stream,
            read_ahead: Bytes::new(),
            meter,
            waiting: None,
            fate,
        }
    }

    /// Puts back bytes that were read, to be read again.
    pub(crate) fn unread(&mut self, bytes: Vec<u8>) {
        self.read_ahead = Bytes::from(bytes);
    }

    pub(crate) fn fate(&self) -> &Fate {
        &self.fate
    }

    /// Waits until the meter allows a transfer, and returns its maximum size.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<Option<usize>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(context));
                self.waiting = None;
            }
            match self.meter.closed_until() {
                Some(until) => self.waiting = Some(Box::pin(sleep_until(until))),
                None => return Poll::Ready(self.meter.largest_piece()),
            }
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if !self.fate.is_own_affair.load(Ordering::SeqCst) {
            // If the kernel refuses, the connection is closed normally, which also ends it.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Inside {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let inside = self.get_mut();
        if inside.read_ahead.has_remaining() {
            let length = inside.read_ahead.len().min(buffer.remaining());
            buffer.put_slice(&inside.read_ahead.split_to(length));
            return Poll::Ready(Ok(()));
        }
        let Some(piece) = ready!(inside.poll_turn(context)) else {
            return Pin::new(&mut inside.stream).poll_read(context, buffer);
        };
        let piece = piece.min(buffer.remaining());
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(piece));
        ready!(Pin::new(&mut inside.stream).poll_read(context, &mut part))?;
        let length = part.filled().len();
        buffer.advance(length);
        inside.meter.count(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Inside {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        let inside = self.get_mut();
        let piece = ready!(inside.poll_turn(context))
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let written = ready!(Pin::new(&mut inside.stream).poll_write(context, &buffer[..piece]))?;
        inside.meter.count(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_write_vectored() {
            return Pin::new(&mut self.get_mut().stream).poll_write_vectored(context, buffers);
        }
        let first = buffers
            .iter()
            .find(|buffer| !buffer.is_empty())
            .map_or(&[][..], |buffer| buffer);
        self.poll_write(context, first)
    }

    fn is_write_vectored(&self) -> bool {
        self.meter.largest_piece().is_none()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}
