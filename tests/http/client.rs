//! Clients as they should not be: each writes exactly the bytes that its test shows.

use std::net::SocketAddr;
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::server::TEST_TIMEOUT;
use crate::support::service::Service;

/// A connection whose bytes are written by hand.
pub(crate) struct Raw {
    stream: TcpStream,
    /// A line for the head of every call, if any.
    authorization: String,
}

/// An answer: its status and what followed the head.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// In lower case.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Raw {
        Raw {
            stream: TcpStream::connect(address).await.unwrap(),
            authorization: String::new(),
        }
    }

    /// Connects to a service whose callers need a token.
    pub(crate) async fn with_token(service: &Service) -> Raw {
        let authorization = format!("authorization: Bearer {}\r\n", service.token);
        Raw {
            authorization,
            ..Raw::connect(service.address).await
        }
    }

    /// Closes the connection, and waits until the server has closed it too.
    pub(crate) async fn vanish(self) {
        let ours = self.stream.local_addr().unwrap().port();
        drop(self.stream);
        let deadline = Instant::now() + TEST_TIMEOUT;
        while is_connected_to(ours) {
            assert!(Instant::now() < deadline, "the server holds the connection");
            tokio::task::yield_now().await;
        }
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Writes as much as the other side takes; tells whether that was all.
    pub(crate) async fn write_if_it_can(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).await.is_ok()
    }

    /// Calls a tool as clients do since 2026-07-28.
    pub(crate) async fn call(&mut self, tool: &str, arguments: Value) {
        let session = arguments["session_id"]
            .as_str()
            .map(|id| format!("mcp-param-session-id: {id}\r\n"));
        let body = call(tool, arguments);
        let more = format!("content-length: {}\r\n{}", body.len(), self.authorization)
            + &session.unwrap_or_default();
        self.write(head(tool, &more) + &body).await;
    }

    /// Connects with a key.
    pub(crate) async fn with_key(service: &Service, caller: &str) -> Raw {
        let authorization = format!("authorization: Bearer {}\r\n", service.key(caller));
        Raw {
            authorization,
            ..Raw::connect(service.address).await
        }
    }

    /// Sends a request of any kind and waits for its answer.
    pub(crate) async fn ask(
        &mut self,
        method: &str,
        path: &str,
        more: &str,
        body: &[u8],
    ) -> Answer {
        let host = if more.contains("host:") {
            ""
        } else {
            "host: localhost\r\n"
        };
        let length = if body.is_empty() && method != "PUT" {
            String::new()
        } else {
            format!("content-length: {}\r\n", body.len())
        };
        self.write(format!(
            "{method} {path} HTTP/1.1\r\n{host}{}{length}{more}\r\n",
            self.authorization
        ))
        .await;
        self.write(body).await;
        if method == "HEAD" {
            self.head_only().await
        } else {
            self.answer().await
        }
    }

    /// Calls a tool and returns its result.
    pub(crate) async fn result(&mut self, tool: &str, arguments: Value) -> Value {
        self.call(tool, arguments).await;
        let answer = self.answer().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        serde_json::from_str::<Value>(&answer.body).expect("an answer is JSON")["result"].take()
    }

    /// Calls a tool for a person who can be shown forms, and returns the result. `more` is what a
    /// call has that goes on.
    pub(crate) async fn result_with_a_person(
        &mut self,
        tool: &str,
        arguments: Value,
        more: Value,
    ) -> Value {
        let session = arguments["session_id"]
            .as_str()
            .map(|id| format!("mcp-param-session-id: {id}\r\n"));
        let mut params = json!({"name": tool, "arguments": arguments, "_meta": meta()});
        params["_meta"]["io.modelcontextprotocol/clientCapabilities"] =
            json!({"elicitation": {"form": {}}});
        params
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().cloned().unwrap_or_default());
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
            .to_string();
        let lines = format!("content-length: {}\r\n{}", body.len(), self.authorization)
            + &session.unwrap_or_default();
        self.write(head(tool, &lines) + &body).await;
        let answer = self.answer().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        serde_json::from_str::<Value>(&answer.body).expect("an answer is JSON")["result"].take()
    }

    /// Sends a message of any kind and returns its result.
    pub(super) async fn rpc(&mut self, method: &str, mut params: Value) -> Value {
        let name = params["uri"]
            .as_str()
            .map(|uri| format!("mcp-name: {uri}\r\n"))
            .unwrap_or_default();
        params["_meta"] = meta();
        let body =
            json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
        let head = format!(
            "content-type: application/json\r\naccept: application/json, text/event-stream\r\n\
             mcp-protocol-version: 2026-07-28\r\nmcp-method: {method}\r\n{name}"
        );
        let answer = self.ask("POST", "/mcp", &head, body.as_bytes()).await;
        let mut message: Value =
            serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{answer:?}"));
        message["result"].take()
    }

    async fn head_only(&mut self) -> Answer {
        let mut read = Vec::new();
        while !read.ends_with(b"\r\n\r\n") {
            assert_ne!(
                self.stream.read_buf(&mut read).await.unwrap(),
                0,
                "the answer was cut"
            );
        }
        let head = String::from_utf8_lossy(&read).to_ascii_lowercase();
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|word| word.parse().ok())
            .expect("an answer has a status");
        Answer {
            status,
            head,
            body: String::new(),
        }
    }

    /// Waits for one answer with a known length.
    pub(crate) async fn answer(&mut self) -> Answer {
        let mut read = Vec::new();
        let end = loop {
            match read.windows(4).position(|window| window == b"\r\n\r\n") {
                Some(end) => break end + 4,
                None => {
                    assert_ne!(
                        self.stream.read_buf(&mut read).await.unwrap(),
                        0,
                        "{}",
                        String::from_utf8_lossy(&read)
                    )
                }
            }
        };
        let head = String::from_utf8_lossy(&read[..end]).to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let is_bare = head.contains(" 304 ") || head.contains(" 204 ");
        let length: usize = length
            .or(is_bare.then_some(0))
            .unwrap_or_else(|| panic!("an answer without a length: {head}"));
        while read.len() < end + length {
            assert_ne!(
                self.stream.read_buf(&mut read).await.unwrap(),
                0,
                "the answer was cut"
            );
        }
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|word| word.parse().ok())
            .expect("an answer has a status");
        Answer {
            status,
            head,
            body: String::from_utf8_lossy(&read[end..]).into_owned(),
        }
    }

    /// Waits until the other side closes the connection; returns what it said before.
    pub(crate) async fn end(&mut self) -> String {
        let mut read = Vec::new();
        // A connection can also end by a reset.
        let _ = self.stream.read_to_end(&mut read).await;
        String::from_utf8_lossy(&read).into_owned()
    }
}

/// The head of a call, with more lines of the caller's.
pub(crate) fn head(tool: &str, more: &str) -> String {
    format!(
        "POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         accept: application/json, text/event-stream\r\nmcp-protocol-version: \
         2026-07-28\r\nmcp-method: tools/call\r\n\
         mcp-name: {tool}\r\n{more}\r\n"
    )
}

/// The body of a call.
pub(crate) fn call(tool: &str, arguments: Value) -> String {
    let params = json!({"name": tool, "arguments": arguments, "_meta": meta()});
    json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string()
}

/// What every message since 2026-07-28 says of itself.
fn meta() -> Value {
    json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    })
}

/// The first message of a client before 2026-07-28.
pub(crate) fn initialize() -> Vec<u8> {
    let params = json!({
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "t", "version": "1"},
    });
    json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
        .to_string()
        .into_bytes()
}

/// What every request of such a client has in its head.
const LEGACY: &str =
    "content-type: application/json\r\naccept: application/json, text/event-stream\r\n";

/// Sends one request of an older client on a connection of its own, and returns its status and
/// everything that was answered.
pub(crate) async fn legacy(
    service: &Service,
    caller: &str,
    method: &str,
    more: &str,
    body: &[u8],
) -> (u16, String) {
    let mut client = begin_legacy(service, caller, method, more, body).await;
    let said = client.end().await;
    let status = said
        .split(' ')
        .nth(1)
        .and_then(|word| word.parse().ok())
        .expect("an answer has a status");
    (status, said)
}

/// Sends one request of an older client on a connection of its own, and returns before it is
/// answered.
pub(crate) async fn begin_legacy(
    service: &Service,
    caller: &str,
    method: &str,
    more: &str,
    body: &[u8],
) -> Raw {
    let mut client = Raw::with_key(service, caller).await;
    let length = format!("content-length: {}\r\nconnection: close\r\n", body.len());
    let authorization = client.authorization.clone();
    client
        .write(format!(
            "{method} /mcp HTTP/1.1\r\nhost: localhost\r\n{authorization}{LEGACY}{length}{more}\r\n"
        ))
        .await;
    client.write(body).await;
    client
}

/// Tells whether a process of this machine has a connection whose other end has this port.
fn is_connected_to(port: u16) -> bool {
    const ESTABLISHED: &str = "01";
    const CLOSE_WAIT: &str = "08";
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let remote = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        // Number, local address, remote address, state.
        let fields: Vec<_> = line.split_whitespace().collect();
        fields[2].ends_with(&remote) && [ESTABLISHED, CLOSE_WAIT].contains(&fields[3])
    })
}
