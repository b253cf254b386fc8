//! MCP servers elsewhere, as small as they can be: HTTP with or without TLS, one request for each
//! connection.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::network::HERE;
use crate::network::https::{Heard, read_request};

/// A server on the loopback interface that remembers what it was asked. Its threads end with the
/// test process.
pub(super) struct Elsewhere {
    pub(super) address: SocketAddr,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Elsewhere {
    /// Serves answers that are written out, head and all.
    pub(super) fn serve(
        tls: Option<ServerConfig>,
        answer: impl Fn(&Heard) -> String + Send + Sync + 'static,
    ) -> Elsewhere {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let elsewhere = Elsewhere {
            address: listener.local_addr().unwrap(),
            heard: Arc::default(),
        };
        let (heard, tls, answer) = (
            Arc::clone(&elsewhere.heard),
            tls.map(Arc::new),
            Arc::new(answer),
        );
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (heard, tls, answer) = (Arc::clone(&heard), tls.clone(), Arc::clone(&answer));
                thread::spawn(move || {
                    let answer = answer.as_ref();
                    // The connection is closed when the exchange has ended, however it did.
                    let _ended = match tls {
                        None => exchange(stream, &heard, answer).map(drop),
                        Some(config) => exchange_with_tls(stream, config, &heard, answer),
                    };
                });
            }
        });
        elsewhere
    }

    /// Serves one tool, `echo`.
    pub(super) fn with_echo(tls: Option<ServerConfig>) -> Elsewhere {
        Elsewhere::serve(tls, mcp)
    }

    pub(super) fn url(&self, scheme: &str) -> String {
        format!("{scheme}://localhost:{}/mcp", self.address.port())
    }

    pub(super) fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }

    /// How often a method was called.
    pub(super) fn count(&self, method: &str) -> usize {
        self.heard()
            .iter()
            .filter(|request| method_of(request).1 == method)
            .count()
    }
}

/// Returns an answer with a body of JSON.
pub(super) fn answer(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n{body}",
        body.len()
    )
}

/// Answers as an MCP server of the older era does that has one tool, `echo`.
pub(super) fn mcp(request: &Heard) -> String {
    let (message, method) = method_of(request);
    let result = match method.as_str() {
        "initialize" => {
            json!({
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "elsewhere", "version": "1"},
            })
        }
        "tools/list" => {
            let properties = json!({"text": {"type": "string"}});
            let schema = json!({"type": "object", "properties": properties, "required": ["text"]});
            json!({"tools": [
                {"name": "echo", "description": "Says it back.", "inputSchema": schema}
            ]})
        }
        "tools/call" => {
            let text = message["params"]["arguments"]["text"]
                .as_str()
                .unwrap_or_default();
            json!({"content": [{"type": "text", "text": format!("elsewhere: {text}")}]})
        }
        _ if message["id"].is_null() => {
            let status = if request.head.starts_with("POST") {
                "202 Accepted"
            } else {
                "405 Method Not Allowed"
            };
            return answer(status, "");
        }
        _ => {
            let error = json!({"code": -32601, "message": "there is no such method"});
            return answer(
                "200 OK",
                &json!({"jsonrpc": "2.0", "id": message["id"], "error": error}).to_string(),
            );
        }
    };
    answer(
        "200 OK",
        &json!({"jsonrpc": "2.0", "id": message["id"], "result": result}).to_string(),
    )
}

/// Returns the message of a request, if there is one, and its method.
pub(super) fn method_of(request: &Heard) -> (Value, String) {
    let message: Value = serde_json::from_str(&request.body).unwrap_or_default();
    let method = message["method"].as_str().unwrap_or_default().to_owned();
    (message, method)
}

fn exchange_with_tls(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    heard: &Mutex<Vec<Heard>>,
    answer: &dyn Fn(&Heard) -> String,
) -> Option<()> {
    let mut stream = exchange(
        StreamOwned::new(ServerConnection::new(config).ok()?, stream),
        heard,
        answer,
    )?;
    stream.conn.send_close_notify();
    stream.flush().ok()
}

fn exchange<S: Read + Write>(
    stream: S,
    heard: &Mutex<Vec<Heard>>,
    answer: &dyn Fn(&Heard) -> String,
) -> Option<S> {
    let mut stream = BufReader::new(stream);
    let request = read_request(&mut stream)?;
    let text = answer(&request);
    heard.lock().unwrap().push(request);
    let mut stream = stream.into_inner();
    stream
        .write_all(text.as_bytes())
        .and_then(|()| stream.flush())
        .ok()?;
    Some(stream)
}
