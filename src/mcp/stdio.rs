//! MCP over standard input and output: one JSON message per line.
//!
//! ```text
//! stdin → lines (bounded) → messages (checked) → rmcp → handler → rmcp → one writer task → stdout
//! ```
//!
//! The library's own line transport leaves gaps that hurt clients, so this room has its own:
//!
//! - A line that is no JSON, a batch, a message of the wrong shape or a line over the cap gets an
//!   answer instead of silence, and an over-long line is skipped without being kept.
//! - Notifications that come before a client has chosen its protocol era (such as the cancellation
//!   of its own probe) are dropped; the library would end the server.
//! - The end of the input cancels every call at once. Answers that are ready within a short time
//!   still go out, then serving ends, and that is success.
//! - A server that is asked to end (`Server::drain`) answers the calls that wait for code; then the
//!   connection ends.
//! - Whole lines only: one task writes, so no cancelled sender leaves half a line.
//! - The process's own standard input and output are moved away first, so that nothing that prints
//!   can disturb the protocol.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cellblock_json::Decoding;
use rmcp::RoleServer;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ClientRequest, ErrorCode, GetMeta, JsonRpcMessage,
    ProtocolVersion, RequestId, ServerJsonRpcMessage,
};
use rmcp::service::{ServerInitializeError, serve_server_with_ct};
use rmcp::transport::Transport;
use rustix::fs::{FileType, Mode, OFlags};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::turns::Turns;
use super::wire::{self, Rejection};
use super::{Server, tools};
use crate::session::SessionId;

/// Bytes in one line. Room for the largest cell even when every character of it is escaped, and for
/// nothing much larger.
const MAX_LINE_LENGTH: usize = 16 * 1024 * 1024;

/// Lines that may wait for a slow reader before those who answer wait too.
const WAITING_LINES: usize = 64;

/// How long answers may still go out after the input ended. A client that closed the pipe seldom
/// reads them, and wants us gone.
const LINGER: Duration = Duration::from_millis(500);

/// How long answers may take when the server is asked to end.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Time between two looks for calls without an answer meanwhile.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);

/// How long lines that wait for the writer may take after that.
const WRITE_OUT: Duration = Duration::from_millis(100);

pub(super) type Reader = Box<dyn AsyncRead + Send + Unpin>;
pub(super) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Why serving ended other than by the client's leaving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("standard input and output could not be taken over")]
    TakeOver(#[source] io::Error),
    #[error("the connection could not be opened")]
    Open(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the connection's task failed")]
    Task(#[source] tokio::task::JoinError),
    #[error("standard output could not be written")]
    Write(#[source] io::Error),
}

/// Serves one client on standard input and output until it closes the input or the server drains.
/// Afterwards the process's own standard input is empty and its standard output is its standard
/// error.
pub async fn serve_stdio(server: Server) -> Result<(), ServeError> {
    let (reader, writer) = take_over_stdio().map_err(ServeError::TakeOver)?;
    serve(server, reader, writer).await
}

/// Serves one client on any pair of byte streams.
pub(super) async fn serve(
    server: Server,
    reader: Reader,
    writer: Writer,
) -> Result<(), ServeError> {
    let connection = CancellationToken::new();
    let (outgoing, lines) = mpsc::channel(WAITING_LINES);
    let mut writing = tokio::spawn(write_lines(writer, lines, connection.clone()));
    let transport = LineTransport {
        lines: Lines::new(reader, MAX_LINE_LENGTH),
        outgoing: Some(outgoing),
        reading: None,
        rejection: None,
        connection: connection.clone(),
        era: Era::Open,
        unanswered: Arc::default(),
        turns: Turns::default(),
    };
    let (draining, unanswered) = (
        server.shared.draining.clone(),
        Arc::clone(&transport.unanswered),
    );
    let opened = tokio::select! {
        opened = serve_server_with_ct(server, transport, connection.clone()) => opened,
        () = draining.cancelled() => Err(ServerInitializeError::Cancelled),
    };
    let ended = match opened {
        Ok(running) => tokio::select! {
            ended = running.waiting() => ended.map(drop).map_err(ServeError::Task),
            () = lingered(&connection) => Ok(()),
            () = drained(&draining, &unanswered) => Ok(()),
        },
        // The client left before it said anything we had to answer.
        Err(ServerInitializeError::ConnectionClosed(_) | ServerInitializeError::Cancelled) => {
            Ok(())
        }
        Err(_) if connection.is_cancelled() => Ok(()),
        Err(error) => Err(ServeError::Open(Box::new(error))),
    };
    connection.cancel();
    let written = match tokio::time::timeout(WRITE_OUT, &mut writing).await {
        Ok(Ok(written)) => written,
        Ok(Err(error)) => return Err(ServeError::Task(error)),
        Err(_) => {
            writing.abort();
            Ok(())
        }
    };
    ended?;
    match written {
        // A client that no longer reads has left; that is no failure of ours.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ServeError::Write(error)),
        _ => Ok(()),
    }
}

async fn lingered(connection: &CancellationToken) {
    connection.cancelled().await;
    tokio::time::sleep(LINGER).await;
}

/// Returns when the server is asked to end and no call waits for an answer, or those that do wait
/// too long.
async fn drained(draining: &CancellationToken, unanswered: &Mutex<HashSet<RequestId>>) {
    draining.cancelled().await;
    let answered = async {
        while !unanswered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
        {
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
    };
    let _ = tokio::time::timeout(LAST_ANSWERS, answered).await;
}

/// Writes whole lines in the order in which they were sent, until all senders are gone or the
/// reader is.
async fn write_lines(
    mut writer: Writer,
    mut lines: mpsc::Receiver<Vec<u8>>,
    connection: CancellationToken,
) -> io::Result<()> {
    let mut written = Ok(());
    while let Some(line) = lines.recv().await {
        written = async {
            writer.write_all(&line).await?;
            if lines.is_empty() {
                writer.flush().await
            } else {
                Ok(())
            }
        }
        .await;
        if written.is_err() {
            // Nobody hears our answers any more, so nothing is worth going on.
            connection.cancel();
            break;
        }
    }
    written
}

/// Whether the client has shown which protocol era it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Era {
    /// Only probes and pings so far.
    Open,
    Chosen,
}

struct LineTransport {
    lines: Lines,
    /// A line that is being decoded. Lines behind it wait, so that messages stay in order.
    reading: Option<Decoding<wire::Read>>,
    outgoing: Option<mpsc::Sender<Vec<u8>>>,
    /// An answer that could not be sent yet: `receive` may be dropped at any of its waits and must
    /// not lose it.
    rejection: Option<Vec<u8>>,
    connection: CancellationToken,
    era: Era,
    /// Ids of requests under way. The library would answer only one of two requests with the same
    /// id.
    unanswered: Arc<Mutex<HashSet<RequestId>>>,
    turns: Turns,
}

impl LineTransport {
    /// Decides about one message: pass it on, drop it, or answer it ourselves.
    fn admit(
        &mut self,
        mut message: ClientJsonRpcMessage,
    ) -> Result<Option<ClientJsonRpcMessage>, Rejection> {
        let mut unanswered = self
            .unanswered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &mut message {
            JsonRpcMessage::Request(request) => {
                if !unanswered.insert(request.id.clone()) {
                    // Answering with that id would end the first request in the client's eyes.
                    let text = format!(
                        "a request with the id {} is still being answered",
                        request.id
                    );
                    return Err(Rejection::new(
                        Value::Null,
                        ErrorCode::INVALID_REQUEST,
                        text,
                    ));
                }
                if chooses_era(&request.request) {
                    self.era = Era::Chosen;
                }
                if let ClientRequest::CallToolRequest(call) = &mut request.request {
                    let session = tools::session_as_written(call.params.arguments.as_ref());
                    let turn = self.turns.next("", session.unwrap_or(SessionId::DEFAULT));
                    call.extensions.insert(turn);
                }
                Ok(Some(message))
            }
            _ if self.era == Era::Open => {
                tracing::debug!("a message before the first request was dropped");
                Ok(None)
            }
            JsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    unanswered.remove(id);
                }
                Ok(Some(message))
            }
            _ => Ok(Some(message)),
        }
    }
}

impl Transport<RoleServer> for LineTransport {
    type Error = io::Error;

    fn send(
        &mut self,
        message: ServerJsonRpcMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let answered = match &message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        if let Some(id) = answered {
            self.unanswered
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(id);
        }
        let line = serde_json::to_vec(&message)
            .map_err(io::Error::other)
            .map(|mut line| {
                line.push(b'\n');
                line
            });
        let outgoing = self.outgoing.clone();
        async move {
            let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the connection is closed");
            outgoing
                .ok_or_else(gone)?
                .send(line?)
                .await
                .map_err(|_| gone())
        }
    }

    /// Returns the next message. Safe to drop while waiting: lines under way and unsent answers
    /// stay in the transport.
    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            if self.rejection.is_some() {
                let Ok(place) = self.outgoing.as_ref()?.reserve().await else {
                    self.connection.cancel();
                    return None;
                };
                place.send(
                    self.rejection
                        .take()
                        .expect("checked above, and nothing else takes it"),
                );
            }
            if let Some(reading) = &mut self.reading {
                let read = reading.await;
                self.reading = None;
                match read
                    .and_then(|message| message.map_or(Ok(None), |message| self.admit(message)))
                {
                    Ok(Some(message)) => return Some(message),
                    Ok(None) => {}
                    Err(rejection) => self.rejection = Some(rejection.line()),
                }
                continue;
            }
            match self.lines.next().await {
                Ok(Some(Line::Whole(line))) => self.reading = Some(wire::reading(line)),
                Ok(Some(Line::TooLong)) => {
                    let text = format!(
                        "the message is longer than {MAX_LINE_LENGTH} bytes and was skipped"
                    );
                    self.rejection =
                        Some(Rejection::new(Value::Null, ErrorCode::INVALID_REQUEST, text).line());
                }
                ended => {
                    if let Err(error) = ended {
                        tracing::warn!(%error, "the connection's input failed");
                    }
                    self.connection.cancel();
                    return None;
                }
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.outgoing = None;
        Ok(())
    }
}

/// Tells whether the library settles on a protocol era when it sees this request. It does not for
/// probes, pings and requests it refuses.
fn chooses_era(request: &ClientRequest) -> bool {
    match request {
        ClientRequest::InitializeRequest(_) => true,
        ClientRequest::PingRequest(_) | ClientRequest::DiscoverRequest(_) => false,
        other => {
            let meta = other.get_meta();
            meta.missing_required_keys(&ProtocolVersion::V_2026_07_28)
                .is_empty()
                && meta
                    .protocol_version()
                    .is_some_and(|version| ProtocolVersion::KNOWN_VERSIONS.contains(&version))
        }
    }
}

/// One line of input.
#[derive(Debug, PartialEq)]
enum Line {
    Whole(Vec<u8>),
    /// A line went over the cap. What is left of it will be skipped.
    TooLong,
}

/// Cuts input into lines and never holds more than one line and one buffer.
struct Lines {
    reader: BufReader<Reader>,
    line: Vec<u8>,
    longest: usize,
    skipping: bool,
}

impl Lines {
    fn new(reader: Reader, longest: usize) -> Lines {
        Lines {
            reader: BufReader::with_capacity(64 * 1024, reader),
            line: Vec::new(),
            longest,
            skipping: false,
        }
    }

    /// Returns the next line, or nothing at the end; a last line needs no line break. Safe to drop
    /// while waiting: `fill_buf` takes nothing from the reader, and between taking and storing
    /// there is no wait.
    async fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let available = self.reader.fill_buf().await?;
            if available.is_empty() {
                let rest = std::mem::take(&mut self.line);
                return Ok((!rest.is_empty()).then_some(Line::Whole(rest)));
            }
            let line_break = available.iter().position(|byte| *byte == b'\n');
            let piece = &available[..line_break.unwrap_or(available.len())];
            let consumed = line_break.map_or(available.len(), |end| end + 1);
            let too_long = !self.skipping && self.line.len() + piece.len() > self.longest;
            if too_long {
                // A fresh vector, so that the memory of the refused line is given back.
                self.line = Vec::new();
            } else if !self.skipping {
                self.line.extend_from_slice(piece);
            }
            self.reader.consume(consumed);
            let was_skipping = self.skipping;
            self.skipping = (was_skipping || too_long) && line_break.is_none();
            if too_long {
                return Ok(Some(Line::TooLong));
            }
            if line_break.is_some() && !was_skipping {
                return Ok(Some(Line::Whole(std::mem::take(&mut self.line))));
            }
        }
    }
}

/// Moves the protocol away from descriptors 0 and 1. What is printed by a library, by a panic or by
/// a child that inherits them goes to standard error, and nobody else can eat the client's
/// messages.
fn take_over_stdio() -> io::Result<(Reader, Writer)> {
    /// Copies must not land on 0, 1 or 2 in case one of those is closed.
    const FIRST_FREE: i32 = 3;
    let input = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), FIRST_FREE)?;
    let output = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), FIRST_FREE)?;
    let nothing = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&nothing)?;
    rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
    Ok((reader_of(input)?, writer_of(output)?))
}

fn reader_of(input: OwnedFd) -> io::Result<Reader> {
    Ok(match kind_of(&input)? {
        FileType::Fifo => match reopened(&input, OFlags::RDONLY) {
            Some(pipe) => Box::new(tokio::net::unix::pipe::Receiver::from_owned_fd(pipe)?),
            None => Box::new(blocking(input)),
        },
        FileType::Socket => Box::new(socket(input)?),
        _ => Box::new(blocking(input)),
    })
}

fn writer_of(output: OwnedFd) -> io::Result<Writer> {
    Ok(match kind_of(&output)? {
        FileType::Fifo => match reopened(&output, OFlags::WRONLY) {
            Some(pipe) => Box::new(tokio::net::unix::pipe::Sender::from_owned_fd(pipe)?),
            None => Box::new(blocking(output)),
        },
        FileType::Socket => Box::new(socket(output)?),
        _ => Box::new(blocking(output)),
    })
}

fn kind_of(descriptor: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(
        rustix::fs::fstat(descriptor)?.st_mode,
    ))
}

/// Opens a pipe once more, without blocking. The flag belongs to the open file, which the parent
/// may share; a file of our own leaves theirs alone. Gives nothing where that is not possible, for
/// example when the pipe belongs to another user.
fn reopened(pipe: &OwnedFd, access: OFlags) -> Option<OwnedFd> {
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    rustix::fs::open(
        path,
        access | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()
}

/// Some clients connect a child by socket pairs. Our end of such a pair is ours alone.
fn socket(descriptor: OwnedFd) -> io::Result<tokio::net::UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(descriptor);
    stream.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(stream)
}

/// Terminals and files: each read and write waits on a thread of its own.
fn blocking(descriptor: OwnedFd) -> tokio::fs::File {
    tokio::fs::File::from_std(std::fs::File::from(descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &'static [u8], longest: usize) -> Lines {
        Lines::new(Box::new(text), longest)
    }

    async fn all(mut lines: Lines) -> Vec<Line> {
        let mut found = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            found.push(line);
        }
        found
    }

    fn whole(text: &str) -> Line {
        Line::Whole(text.as_bytes().to_vec())
    }

    #[tokio::test]
    async fn input_is_cut_at_line_breaks_and_the_last_needs_none() {
        assert_eq!(
            all(lines(b"a\n\nbc\nd", 10)).await,
            [whole("a"), whole(""), whole("bc"), whole("d")]
        );
        assert_eq!(all(lines(b"", 10)).await, []);
    }

    #[tokio::test]
    async fn a_line_over_the_cap_is_reported_once_and_skipped() {
        assert_eq!(
            all(lines(b"12345\n123456\n1\n", 5)).await,
            [whole("12345"), Line::TooLong, whole("1")]
        );
        assert_eq!(all(lines(b"123456", 5)).await, [Line::TooLong]);
    }

    #[tokio::test]
    async fn a_line_far_over_the_cap_is_never_kept() {
        let (mut sender, receiver) = tokio::io::duplex(1000);
        let sending = tokio::spawn(async move {
            for _ in 0..500 {
                sender.write_all(&[b'x'; 1000]).await.unwrap();
            }
            sender.write_all(b"\nok\n").await.unwrap();
        });
        let mut lines = Lines::new(Box::new(receiver), 2000);
        assert_eq!(lines.next().await.unwrap(), Some(Line::TooLong));
        assert_eq!(lines.next().await.unwrap(), Some(whole("ok")));
        assert!(
            lines.line.capacity() <= 4000,
            "{} bytes were kept",
            lines.line.capacity()
        );
        sending.await.unwrap();
    }

    #[tokio::test]
    async fn a_line_survives_a_reader_that_was_dropped_halfway() {
        let (mut sender, receiver) = tokio::io::duplex(1000);
        let mut lines = Lines::new(Box::new(receiver), 100);
        sender.write_all(b"first ").await.unwrap();
        tokio::select! {
            biased;
            line = lines.next() => panic!("there is no whole line yet: {line:?}"),
            () = std::future::ready(()) => {}
        }
        sender.write_all(b"half\n").await.unwrap();
        assert_eq!(lines.next().await.unwrap(), Some(whole("first half")));
    }

    #[tokio::test]
    async fn pipes_sockets_and_files_can_all_carry_the_protocol() {
        let (read_end, write_end) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (left, right) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let pairs: [(OwnedFd, OwnedFd); 3] = [
            (write_end, read_end),
            (left.into(), right.into()),
            (file.reopen().unwrap().into(), file.reopen().unwrap().into()),
        ];
        for (output, input) in pairs {
            let mut writer = writer_of(output).unwrap();
            writer.write_all(b"hello\n").await.unwrap();
            writer.flush().await.unwrap();
            let mut lines = Lines::new(reader_of(input).unwrap(), 100);
            assert_eq!(lines.next().await.unwrap(), Some(whole("hello")));
            drop(writer);
            assert_eq!(lines.next().await.unwrap(), None);
        }
    }
}
