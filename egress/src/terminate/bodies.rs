//! Streaming bodies: masked ones, and ones whose beginning was already read.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use crate::secrets::Masker;

/// Any body that is forwarded.
pub(super) type Streamed = BoxBody<Bytes, hyper::Error>;

/// The body of a response, from which values are removed as it streams.
pub(super) struct Masked {
    body: Incoming,
    masker: Masker,
    is_finished: bool,
}

impl Masked {
    pub(super) fn new(body: Incoming, masker: Masker) -> Masked {
        Masked {
            is_finished: body.is_end_stream(),
            body,
            masker,
        }
    }
}

impl Body for Masked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        while !self.is_finished {
            let bytes = match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.masker.push(data),
                    Err(_trailers) => continue,
                },
                // The held bytes may be part of a value, so a failed response ends without them.
                Some(Err(error)) => {
                    self.is_finished = true;
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.is_finished = true;
                    self.masker.finish()
                }
            };
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.is_finished
    }

    /// The length of a masked body is unknown until it has ended.
    fn size_hint(&self) -> SizeHint {
        if self.is_finished {
            SizeHint::with_exact(0)
        } else {
            SizeHint::default()
        }
    }
}

/// A body whose beginning was read in order to inspect it.
pub(super) struct Prefixed {
    beginning: Option<Bytes>,
    rest: Incoming,
}

impl Prefixed {
    pub(super) fn new(beginning: Bytes, rest: Incoming) -> Prefixed {
        Prefixed {
            beginning: Some(beginning),
            rest,
        }
    }
}

impl Body for Prefixed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.beginning.take() {
            Some(beginning) => Poll::Ready(Some(Ok(Frame::data(beginning)))),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }
}
