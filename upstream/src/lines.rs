//! Messages as lines, over the pipes of a program.
//!
//! A line that is not a message is skipped: some programs print to standard output. A line that is
//! too long is discarded while it is read, and the request that it answers gets an error.

use std::io;
use std::sync::Arc;

use cellblock_json::{Budget, Decoding, MAX_DEPTH};
use rmcp::RoleClient;
use rmcp::model::RequestId;
use rmcp::service::TxJsonRpcMessage;
use rmcp::transport::Transport;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Mutex;

use crate::child::Child;
use crate::wire::{self, IdFinder, Message};

/// Request id of the era probe. rmcp uses numbers, so its own ids are never strings.
const PROBE: &str = "cellblock-probe";

/// Limits on the response to the probe.
const PROBED: Budget = Budget {
    depth: MAX_DEPTH,
    memory: 512 * 1024,
};

/// Both directions of a program's pipes.
pub(crate) struct PipeLines<R, W> {
    reader: BufReader<R>,
    line: Vec<u8>,
    /// A line that is being decoded. Later lines wait, so that messages stay in order.
    reading: Option<Decoding<Option<Message>>>,
    /// Set while a line is discarded.
    discarded: Option<IdFinder>,
    largest: usize,
    writer: Arc<Mutex<Option<W>>>,
    child: Option<Child>,
}

enum Line {
    /// The line is in `line`.
    Whole,
    TooLong(Option<RequestId>),
    End,
}

impl<R: AsyncRead + Send + Unpin, W: AsyncWrite + Send + Unpin + 'static> PipeLines<R, W> {
    pub(crate) fn new(reader: R, writer: W, largest: usize) -> PipeLines<R, W> {
        PipeLines {
            reader: BufReader::new(reader),
            line: Vec::new(),
            reading: None,
            discarded: None,
            largest,
            writer: Arc::new(Mutex::new(Some(writer))),
            child: None,
        }
    }

    /// Closes the input of a program that never responded, and lets it exit within a time limit:
    /// killing it during a package installation would leave a partial one behind.
    pub(crate) async fn let_finish(mut self) {
        let child = self.child.take();
        drop(self);
        if let Some(mut child) = child {
            child.end_slowly().await;
        }
    }

    /// Stops `child` together with this transport.
    pub(crate) fn with_child(mut self, child: Child) -> PipeLines<R, W> {
        self.child = Some(child);
        self
    }

    /// Probes the server's era. Returns whether it is the newer one, or `None` if the server has
    /// exited.
    ///
    /// The probe runs before rmcp takes over the connection, because rmcp's own probe has a
    /// separate timeout, and would take a late response for the response to another request.
    pub(crate) async fn probe(&mut self, question: &Value) -> Option<bool> {
        let line = json!({
            "jsonrpc": "2.0", "id": PROBE, "method": "server/discover",
            "params": {"_meta": question},
        });
        write(&self.writer, line.to_string().into_bytes())
            .await
            .ok()?;
        loop {
            match self.read_line().await {
                Line::End => return None,
                Line::TooLong(_) => {}
                Line::Whole => {
                    let value: Option<Value> = cellblock_json::read(&self.line, PROBED).ok();
                    self.line.clear();
                    let Some(value) = value else { continue };
                    // Some servers do not return the request id with an error, because they did not
                    // understand the request.
                    if value
                        .get("id")
                        .is_some_and(|id| id == PROBE || id.is_null())
                        || value.get("error").is_some()
                    {
                        return Some(value.pointer("/result/supportedVersions").is_some());
                    }
                }
            }
        }
    }

    /// Reads a line. This is cancel-safe: everything read is kept in `self` before the next await.
    async fn read_line(&mut self) -> Line {
        loop {
            let available = match self.reader.fill_buf().await {
                Ok([]) | Err(_) => return Line::End,
                Ok(available) => available,
            };
            let end = available.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(available.len(), |end| end + 1);
            if let Some(finder) = &mut self.discarded {
                finder.feed(&available[..taken]);
            } else if self.line.len() + taken > self.largest {
                let mut finder = IdFinder::default();
                finder.feed(&self.line);
                finder.feed(&available[..taken]);
                self.discarded = Some(finder);
                self.line = Vec::new();
            } else {
                self.line.extend_from_slice(&available[..taken]);
            }
            self.reader.consume(taken);
            if end.is_some() {
                return self
                    .discarded
                    .take()
                    .map_or(Line::Whole, |finder| Line::TooLong(finder.found()));
            }
        }
    }
}

impl<R: AsyncRead + Send + Unpin, W: AsyncWrite + Send + Unpin + 'static> Transport<RoleClient>
    for PipeLines<R, W>
{
    type Error = io::Error;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let writer = Arc::clone(&self.writer);
        let bytes = serde_json::to_vec(&message).map_err(io::Error::other);
        async move { write(&writer, bytes?).await }
    }

    async fn receive(&mut self) -> Option<Message> {
        loop {
            // This future may be dropped at any await, so the line stays in `self` while it is
            // decoded.
            if let Some(reading) = &mut self.reading {
                let message = reading.await;
                self.reading = None;
                if message.is_some() {
                    return message;
                }
            }
            match self.read_line().await {
                Line::End => return None,
                Line::TooLong(id) => {
                    tracing::warn!(
                        largest = self.largest,
                        "an MCP server sent a message that is too large"
                    );
                    if let Some(id) = id {
                        return Some(wire::too_large(id, self.largest));
                    }
                }
                Line::Whole => self.reading = Some(wire::reading(std::mem::take(&mut self.line))),
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        drop(self.writer.lock().await.take());
        if let Some(mut child) = self.child.take() {
            child.end().await;
        }
        Ok(())
    }
}

/// Writes a line. The lock is held during the write, so that two lines do not mix.
async fn write<W: AsyncWrite + Unpin>(
    writer: &Mutex<Option<W>>,
    mut line: Vec<u8>,
) -> io::Result<()> {
    line.push(b'\n');
    let mut writer = writer.lock().await;
    let writer = writer.as_mut().ok_or(io::ErrorKind::NotConnected)?;
    writer.write_all(&line).await?;
    writer.flush().await
}

#[cfg(test)]
mod tests {
    use rmcp::model::JsonRpcMessage;

    use super::*;

    fn lines(text: &str, largest: usize) -> PipeLines<&[u8], Vec<u8>> {
        PipeLines::new(text.as_bytes(), Vec::new(), largest)
    }

    #[tokio::test]
    async fn garbage_is_passed_over() {
        let mut lines = lines(
            "hello\n\n{\"a\":\n[]\r\n{\"id\":1,\"result\":{}}\r\nlast",
            1000,
        );
        let message = lines.receive().await.unwrap();
        assert!(
            matches!(message, JsonRpcMessage::Response(_)),
            "{message:?}"
        );
        assert!(lines.receive().await.is_none());
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_answers_its_request_and_spoils_no_other() {
        let long = format!("{{\"result\":\"{}\",\"id\":5}}", "x".repeat(50_000));
        let text = format!("{long}\n{{\"id\":6,\"result\":{{}}}}\n");
        let mut small = lines(&text, 10_000);
        let JsonRpcMessage::Error(error) = small.receive().await.unwrap() else {
            panic!("no error")
        };
        assert!(wire::is_too_large(&error.error));
        assert_eq!(error.id, Some(RequestId::Number(5)));
        assert!(small.line.capacity() <= 16_384);
        assert!(matches!(
            small.receive().await.unwrap(),
            JsonRpcMessage::Response(_)
        ));
        // Control: within the limit it is a response.
        assert!(matches!(
            lines(&text, 60_000).receive().await.unwrap(),
            JsonRpcMessage::Response(_)
        ));
    }

    #[tokio::test]
    async fn a_probe_tells_the_eras_apart() {
        for (answer, expected) in [
            (
                r#"{"id":"cellblock-probe","result":{"supportedVersions":["2026-07-28"]}}"#,
                Some(true),
            ),
            (
                r#"{"id":"cellblock-probe","error":{"code":-32601,"message":"no"}}"#,
                Some(false),
            ),
            (
                r#"{"id":"cellblock-probe","error":{"code":-32602,"message":"no"}}"#,
                Some(false),
            ),
            (
                r#"{"id":null,"error":{"code":-32600,"message":"no"}}"#,
                Some(false),
            ),
            (r#"{"id":"cellblock-probe","result":{}}"#, Some(false)),
            (r#"{"id":"other","result":{}}"#, None),
        ] {
            let text = format!("starting\n{{\"method\":\"notifications/message\"}}\n{answer}\n");
            assert_eq!(
                lines(&text, 1000).probe(&json!({})).await,
                expected,
                "{answer}"
            );
        }
    }
}
