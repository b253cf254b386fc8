//! A client over HTTP that costs little: one connection kept open, requests of 2026-07-28, no
//! checks of its own.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

const VERSION: &str = "2026-07-28";

/// One connection to a server.
pub(crate) struct HttpClient {
    connection: SendRequest<Full<Bytes>>,
    address: SocketAddr,
    token: Option<String>,
    calls: u64,
}

impl HttpClient {
    pub(crate) async fn connect(
        address: SocketAddr,
        token: Option<&str>,
    ) -> anyhow::Result<HttpClient> {
        let stream = TcpStream::connect(address)
            .await
            .context("nobody listens there")?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // It ends with the sender.
        tokio::spawn(connection);
        Ok(HttpClient {
            connection: sender,
            address,
            token: token.map(str::to_owned),
            calls: 0,
        })
    }

    /// Asks for a page; returns its status.
    pub(crate) async fn get(&mut self, path: &str) -> anyhow::Result<StatusCode> {
        let request = Request::get(path)
            .header(header::HOST, self.address.to_string())
            .body(Full::default())?;
        self.connection.ready().await?;
        let response = self.connection.send_request(request).await?;
        let status = response.status();
        response.into_body().collect().await?;
        Ok(status)
    }

    /// Calls a tool; returns the result and the time from the first byte of the request to the last
    /// of the answer.
    pub(crate) async fn call(
        &mut self,
        tool: &str,
        arguments: &Value,
    ) -> anyhow::Result<(Value, Duration)> {
        self.calls += 1;
        let meta = json!({
            "io.modelcontextprotocol/protocolVersion": VERSION,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
        });
        let parameters = json!({"name": tool, "arguments": arguments, "_meta": meta});
        let body = json!({
            "jsonrpc": "2.0", "id": self.calls, "method": "tools/call", "params": parameters,
        });
        let mut request = Request::post("/mcp")
            .header(header::HOST, self.address.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header("mcp-protocol-version", VERSION)
            .header("mcp-method", "tools/call")
            .header("mcp-name", tool);
        if let Some(session) = arguments["session_id"].as_str() {
            request = request.header("mcp-param-session-id", session);
        }
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Full::from(body.to_string()))?;
        let start = Instant::now();
        self.connection.ready().await?;
        let response = self.connection.send_request(request).await?;
        let status = response.status();
        let answer = response.into_body().collect().await?.to_bytes();
        let elapsed = start.elapsed();
        ensure!(
            status.is_success(),
            "{status}: {}",
            String::from_utf8_lossy(&answer)
        );
        let mut message = message_in(&answer)?;
        if message.get("error").is_some() {
            bail!("{tool} was refused: {}", message["error"]);
        }
        Ok((message["result"].take(), elapsed))
    }
}

/// The answer is JSON, or the last event of a stream.
fn message_in(body: &[u8]) -> anyhow::Result<Value> {
    let text = std::str::from_utf8(body)?;
    let mut events = text
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .map(str::trim);
    let message = events.rfind(|event| !event.is_empty()).unwrap_or(text);
    serde_json::from_str(message).with_context(|| format!("the answer is no message: {text}"))
}
