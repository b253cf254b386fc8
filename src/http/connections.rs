//! Accepts, limits and closes connections.
//!
//! Every wait for the peer has a timeout: for a handshake, for the head of a request, for more of
//! its body, for room to write, for the next request. `table` decides which connection is closed
//! when there are too many.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::Version;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::table::{ConnectionTable, OpenConnection, RequestGuard};
use crate::mcp::arrivals::Arrivals;
use crate::telemetry::Metrics;

/// Timeout for a handshake, and for the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// Timeout for a client that stops sending a body or stops reading a response.
const STALL_TIME: Duration = Duration::from_secs(30);
/// Limit of a request's head, in bytes.
const MAX_HEAD_BYTES: usize = 32 * 1024;
/// Limit of concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 128;
/// Delay before the next accept when no descriptor is left. Connections that close release some.
const OUT_OF_DESCRIPTORS: Duration = Duration::from_millis(100);

/// The settings for new connections and requests. They can be replaced while the server runs.
#[derive(Clone)]
pub struct Reception {
    pub routes: Router,
    pub tls: Option<TlsAcceptor>,
}

/// Serves connections until `stop`, then lets open requests finish for `grace`.
pub async fn serve(
    listener: TcpListener,
    reception: watch::Receiver<Reception>,
    most: usize,
    metrics: Metrics,
    stop: CancellationToken,
    grace: Duration,
) {
    let table = ConnectionTable::new(most);
    let ending = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(OUT_OF_DESCRIPTORS).await;
                continue;
            }
        };
        let Some(place) = table.admit(peer.ip()) else {
            tracing::warn!(most, "a connection was closed because too many are open");
            continue;
        };
        let (reception, watcher, open) =
            (reception.clone(), ending.watcher(), metrics.connection());
        tokio::spawn(async move {
            let served = tokio::select! {
                served = serve_one(
                    stream, Peer(peer), place.0.clone(), reception, watcher
                ) => served,
                () = place.0.over() => Err("it was idle".to_owned()),
            };
            if let Err(error) = served {
                tracing::debug!(error, "a connection ended early");
            }
            drop((open, place));
        });
    }
    drop(listener);
    if tokio::time::timeout(grace, ending.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("requests were still under way when the time to finish them was over");
    }
}

/// The address of the peer. Behind a proxy, this is the proxy's.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// The connection was closed in favour of another one before its request started.
#[derive(Debug, thiserror::Error)]
#[error("the connection was closed before the request began")]
struct ClosedBefore;

async fn serve_one(
    stream: TcpStream,
    peer: Peer,
    connection: OpenConnection,
    reception: watch::Receiver<Reception>,
    watcher: hyper_util::server::graceful::Watcher,
) -> Result<(), String> {
    // A response is one small write; waiting for more data (Nagle) would delay it.
    stream
        .set_nodelay(true)
        .map_err(|error| error.to_string())?;
    let activity = Arc::new(Activity::default());
    let stream = Patient::new(stream, activity.clone());
    let tls = reception.borrow().tls.clone();
    let arrivals = Arrivals::default();
    let service = service_fn(move |request: Request<Incoming>| {
        let begun = connection.begin_request();
        let under_way = begun.map(|guard| UnderWay::new(&activity, request.version(), guard));
        let mut request = request.map(|body| Body::new(Moving::new(body)));
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(connection.clone());
        arrivals.register(&mut request);
        let routes = reception.borrow().routes.clone();
        async move {
            let under_way = under_way.ok_or(ClosedBefore)?;
            let Ok(response) = routes.oneshot(request).await;
            Ok::<_, ClosedBefore>(response.map(|body| Counted {
                body,
                _under_way: under_way,
            }))
        }
    });
    let builder = builder();
    let served = match tls {
        None => {
            watcher
                .watch(
                    builder
                        .serve_connection(TokioIo::new(stream), service)
                        .into_owned(),
                )
                .await
        }
        Some(tls) => {
            let handshake = tokio::time::timeout(HEAD_TIME, tls.accept(stream)).await;
            let stream = handshake
                .map_err(|_| "the handshake took too long")?
                .map_err(|error| error.to_string())?;
            watcher
                .watch(
                    builder
                        .serve_connection(TokioIo::new(stream), service)
                        .into_owned(),
                )
                .await
        }
    };
    served.map_err(|error| error.to_string())
}

fn builder() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .keep_alive_interval(STALL_TIME)
        .keep_alive_timeout(HEAD_TIME);
    builder
}

/// The state of a connection.
#[derive(Default)]
struct Activity {
    requests: AtomicUsize,
    /// A head was read completely since the last check.
    head_complete: AtomicBool,
    /// On such a connection bytes also arrive between requests.
    is_http2: AtomicBool,
}

/// A request whose response has not been written completely.
struct UnderWay {
    activity: Arc<Activity>,
    _guard: RequestGuard,
}

impl UnderWay {
    fn new(activity: &Arc<Activity>, version: Version, guard: RequestGuard) -> UnderWay {
        activity.requests.fetch_add(1, Ordering::Relaxed);
        activity.head_complete.store(true, Ordering::Relaxed);
        if version == Version::HTTP_2 {
            activity.is_http2.store(true, Ordering::Relaxed);
        }
        UnderWay {
            activity: activity.clone(),
            _guard: guard,
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.activity.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A stream with timeouts: for the head of a request that has started, and for a blocked write.
struct Patient {
    stream: TcpStream,
    activity: Arc<Activity>,
    /// Set while a head has started and is not complete.
    head: Option<Pin<Box<Sleep>>>,
    /// Set while a write is blocked.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    /// The timeout also applies to a client that sends nothing at all.
    fn new(stream: TcpStream, activity: Arc<Activity>) -> Patient {
        Patient {
            stream,
            activity,
            head: Some(Box::pin(tokio::time::sleep(HEAD_TIME))),
            stalled: None,
        }
    }

    fn reads_a_head(&self) -> bool {
        self.activity.requests.load(Ordering::Relaxed) == 0
            && !self.activity.is_http2.load(Ordering::Relaxed)
    }

    /// Returns a pending write, or a timeout error once it was blocked too long.
    fn waited<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_TIME)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client reads nothing",
        )))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.activity.head_complete.swap(false, Ordering::Relaxed) {
            self.head = None;
        }
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            if self.reads_a_head() {
                self.head
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(HEAD_TIME)));
            }
            return read;
        }
        let Some(head) = &mut self.head else {
            return Poll::Pending;
        };
        ready!(head.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "no whole request came",
        )))
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.waited(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.waited(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.waited(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.waited(context, shut)
    }
}

/// The body of a response. Its request is open until the body was written or dropped.
struct Counted {
    body: Body,
    _under_way: UnderWay,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that fails when no more data arrives before the timeout.
struct Moving {
    body: Incoming,
    deadline: Pin<Box<Sleep>>,
}

impl Moving {
    fn new(body: Incoming) -> Moving {
        Moving {
            body,
            deadline: Box::pin(tokio::time::sleep(STALL_TIME)),
        }
    }
}

/// The client started a body and stopped sending.
#[derive(Debug, thiserror::Error)]
#[error("nothing more of the body came for {} seconds", STALL_TIME.as_secs())]
struct Stalled;

impl HttpBody for Moving {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                self.deadline.as_mut().reset(Instant::now() + STALL_TIME);
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                ready!(self.deadline.as_mut().poll(context));
                Poll::Ready(Some(Err(Stalled.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
