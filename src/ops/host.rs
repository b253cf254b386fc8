//! The one interface to sessions: `submit` takes an operation and returns a ticket.

use std::fmt;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Op, Operation, Reply};
use crate::sandbox::Preparation;
use crate::session::{Principal, RecordEnding, RecorderId, Refused};

/// Receives the progress of a call: a sentence, or the latest line of output.
pub type ProgressChannel = watch::Sender<String>;

/// Whatever carries operations out: sessions in this process, a session daemon, or a layer in front
/// of either.
pub trait Host: Send + Sync {
    /// Admits an operation or refuses it, without waiting. Operations on one session are carried
    /// out in the order in which they were submitted.
    fn submit<'a>(&self, owner: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused>;

    /// Follows the work that must be done once before the first session. Operations wait for it.
    fn preparation(&self) -> watch::Receiver<Preparation> {
        watch::Sender::new(Preparation::Ready).subscribe()
    }

    /// Has `record` called for each execution that ends, before its caller gets the result, and
    /// whether or not the result is ever collected.
    ///
    /// With `takes_over`, also for executions of servers that are gone. Each is handed out once, or
    /// again under the same name when a connection broke just then.
    fn record_endings(&self, _takes_over: bool, _record: RecordEnding) {}
}

/// What accompanies an operation and is not part of its value.
#[derive(Default)]
pub struct Io<'a> {
    /// Cancels the operation where it can be cancelled. A reply comes all the same.
    pub cancel: CancellationToken,
    pub progress: ProgressChannel,
    pub body: Body<'a>,
    /// Who records the executions that the operation starts.
    pub recorder: RecorderId,
}

/// The contents of a file that an operation reads or writes.
#[derive(Default)]
pub enum Body<'a> {
    #[default]
    None,
    Source(Box<dyn AsyncRead + Send + Unpin + 'a>),
    Sink(Box<dyn AsyncWrite + Send + Unpin + 'a>),
}

impl<'a> Io<'a> {
    pub fn source(source: impl AsyncRead + Send + Unpin + 'a) -> Io<'a> {
        Io {
            body: Body::Source(Box::new(source)),
            ..Io::default()
        }
    }

    pub fn sink(sink: impl AsyncWrite + Send + Unpin + 'a) -> Io<'a> {
        Io {
            body: Body::Sink(Box::new(sink)),
            ..Io::default()
        }
    }
}

impl<'a> Body<'a> {
    /// Returns the source. A call without one is taken for one with an empty file.
    pub fn into_source(self) -> Box<dyn AsyncRead + Send + Unpin + 'a> {
        match self {
            Body::Source(source) => source,
            Body::None | Body::Sink(_) => Box::new(tokio::io::empty()),
        }
    }

    /// Returns the sink. Without one, what is written is discarded.
    pub fn into_sink(self) -> Box<dyn AsyncWrite + Send + Unpin + 'a> {
        match self {
            Body::Sink(sink) => sink,
            Body::None | Body::Source(_) => Box::new(tokio::io::sink()),
        }
    }
}

/// An operation that was admitted. Awaiting it returns the reply.
///
/// Dropping it discards the reply. Code that was submitted continues.
#[must_use = "files move, and composite operations go on, while the ticket is awaited"]
pub struct Ticket<'a>(Pin<Box<dyn Future<Output = Result<Reply, Refused>> + Send + 'a>>);

impl<'a> Ticket<'a> {
    pub fn new(reply: impl Future<Output = Result<Reply, Refused>> + Send + 'a) -> Ticket<'a> {
        Ticket(Box::pin(reply))
    }

    /// Takes the first step of an operation, up to the first point where it has to wait. By then it
    /// is in the queue of its session, or on the wire to it, or refused.
    pub fn admit(
        work: impl Future<Output = Result<Reply, Refused>> + Send + 'a,
    ) -> Result<Ticket<'a>, Refused> {
        let mut work = Box::pin(work);
        // Constrained, the step might end before the operation is in its queue. Whoever awaits the
        // ticket polls again, so no wake-up is lost.
        let step = pin!(tokio::task::unconstrained(work.as_mut()))
            .poll(&mut Context::from_waker(Waker::noop()));
        match step {
            Poll::Ready(Err(refused)) => Err(refused),
            Poll::Ready(reply) => Ok(Ticket::new(std::future::ready(reply))),
            Poll::Pending => Ok(Ticket(work)),
        }
    }
}

impl Future for Ticket<'_> {
    type Output = Result<Reply, Refused>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for Ticket<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Ticket")
    }
}

/// Typed calls on any host.
pub trait HostExt: Host {
    /// Submits an operation at once, and returns its output when awaited.
    fn run<O: Operation>(
        &self,
        owner: &Principal,
        op: O,
    ) -> impl Future<Output = Result<O::Output, Refused>> + Send {
        self.run_with(owner, op, Io::default())
    }

    /// As `run`, with what accompanies the operation.
    fn run_with<'a, O: Operation>(
        &self,
        owner: &Principal,
        op: O,
        io: Io<'a>,
    ) -> impl Future<Output = Result<O::Output, Refused>> + Send {
        let submitted = self.submit(owner, op.into(), io);
        async move {
            O::output(submitted?.await?).ok_or_else(|| Refused::Transfer {
                why: "the reply belongs to another operation".to_owned(),
            })
        }
    }
}

impl<H: Host + ?Sized> HostExt for H {}
