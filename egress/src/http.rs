//! Plain HTTP, checked request by request.
//!
//! ```text
//!  inside ──requests──▶ check Host and target ──▶ one connection to the server of this name
//! ```
//!
//! A connection belongs to one name. Servers serve many names and choose by the Host of each
//! request, so every request on a connection, not only the first, must name the connection's own
//! host and port. Any other request is answered with 403 here and the connection ends: no byte of
//! it goes out.
//!
//! Both sides are parsed and rewritten by hyper, so a request that two parsers could split
//! differently does not get through. Data after an upgrade cannot be checked. WebSocket is the only
//! upgrade that passes, because the data after it is not HTTP again (as it is with `h2c`).

use std::error::Error;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1 as client;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::name::{HostName, UrlHost, parse_authority};

/// How a request's host differs from the connection's own name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error("the request does not say which host it is for")]
    Missing,
    #[error("what the request says about its host cannot be read")]
    Unreadable,
    #[error("the request is for {0}:{1}")]
    Other(UrlHost, u16),
    #[error("the request asks for a tunnel")]
    Tunnel,
}

/// The error that ends a connection early.
pub(crate) type ConnectionFailure = Box<dyn Error + Send + Sync>;

/// Forwards requests from `inside` to `upstream`, the server that was dialled for `name` at `port`,
/// until one of them ends.
///
/// `refused` receives every request that is for another host.
pub(crate) async fn serve<I, U>(
    inside: I,
    upstream: U,
    name: &HostName,
    port: u16,
    refused: &(dyn Fn(Mismatch) + Send + Sync),
) -> Result<(), ConnectionFailure>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    U: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, upstream) = client_settings().handshake(TokioIo::new(upstream)).await?;
    let forwarder = Forwarder {
        name,
        port,
        refused,
        state: Mutex::new(State::new(sender)),
    };
    let service = service_fn(|request| forwarder.answer(request));
    let mut inside = pin!(
        server_settings()
            .serve_connection(TokioIo::new(inside), service)
            .with_upgrades()
    );
    let mut upstream = Some(Box::pin(upstream.with_upgrades()));
    let ending = async |upstream: &mut Option<_>| {
        if let Some(upstream) = upstream {
            upstream.await
        } else {
            Ok(())
        }
    };
    loop {
        tokio::select! {
            ended = &mut inside => break ended?,
            _ = ending(&mut upstream), if upstream.is_some() => {
                // The request that waits for a response receives the error.
                upstream = None;
                if forwarder.upstream_ended() {
                    inside.as_mut().graceful_shutdown();
                }
            }
        }
    }
    let Some((inside, upgraded)) = forwarder.state().upgrade.take() else {
        return Ok(());
    };
    let (inside, upgraded, ()) = tokio::try_join!(inside, upgraded, ending(&mut upstream))?;
    let (mut inside, mut upgraded) = (TokioIo::new(inside), TokioIo::new(upgraded));
    tokio::io::copy_bidirectional_with_sizes(&mut inside, &mut upgraded, BUFFER, BUFFER).await?;
    Ok(())
}

/// Size limit of the head of a request or a response. Servers accept 8 to 64 KiB.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Limit of header lines in a head.
const MAX_HEADERS: usize = 200;

/// Buffer limit for a body, per direction.
const BUFFER: usize = 128 * 1024;

/// Timeout for a request head, which includes the idle time between two requests.
const MAX_BACKOFF: Duration = Duration::from_secs(120);

/// The default port of an `http` authority.
const USUAL_PORT: u16 = 80;

fn client_settings() -> client::Builder {
    let mut builder = client::Builder::new();
    builder
        .max_buf_size(BUFFER)
        .max_header_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .preserve_header_case(true);
    builder
}

fn server_settings() -> server::Builder {
    let mut builder = server::Builder::new();
    builder
        .max_buf_size(BUFFER)
        .max_header_size(MAX_HEAD_BYTES)
        .max_headers(MAX_HEADERS)
        .preserve_header_case(true);
    // A client may close its half after the last request. The Date header is the server's.
    builder.half_close(true).auto_date_header(false);
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(MAX_BACKOFF);
    builder
}

/// Forwards the requests of one connection, one after another.
struct Forwarder<'a> {
    name: &'a HostName,
    port: u16,
    refused: &'a (dyn Fn(Mismatch) + Send + Sync),
    state: Mutex<State>,
}

struct State {
    /// The sender to the server. Taken out while a request waits for its response.
    sender: Option<client::SendRequest<Incoming>>,
    has_upstream_ended: bool,
    /// Both ends of an upgraded connection.
    upgrade: Option<(OnUpgrade, OnUpgrade)>,
}

impl State {
    fn new(sender: client::SendRequest<Incoming>) -> State {
        State {
            sender: Some(sender),
            has_upstream_ended: false,
            upgrade: None,
        }
    }
}

type Answer = Response<Either<Incoming, Full<Bytes>>>;

impl Forwarder<'_> {
    async fn answer(&self, request: Request<Incoming>) -> Result<Answer, ConnectionFailure> {
        if let Err(mismatch) = check(&request, self.name, self.port) {
            let sentence = format!(
                "{mismatch}, but this connection is to {}:{}. Other hosts must be in the allowed \
                 list, and need a connection of their own.\n",
                self.name, self.port
            );
            (self.refused)(mismatch);
            return Ok(refusal(sentence));
        }
        let mut sender = self.state().sender.take().ok_or("two requests at a time")?;
        let response = self.exchange(&mut sender, request).await;
        self.state().sender = Some(sender);
        response
    }

    /// Forwards a checked request and returns the server's response.
    async fn exchange(
        &self,
        sender: &mut client::SendRequest<Incoming>,
        mut request: Request<Incoming>,
    ) -> Result<Answer, ConnectionFailure> {
        let upgrade = is_websocket(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let (mut parts, body) = request.into_parts();
        rewrite(&mut parts, self.name, self.port, upgrade.is_some())?;
        sender.ready().await?;
        let mut response = sender
            .send_request(Request::from_parts(parts, body))
            .await?;
        let is_last = self.state().has_upstream_ended || ends_here(&response);
        let switches = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let passes = switches && is_websocket(response.headers());
        remove_hop_by_hop(response.headers_mut());
        *response.version_mut() = Version::HTTP_11;
        match upgrade {
            Some(inside) if passes => {
                self.state().upgrade = Some((inside, hyper::upgrade::on(&mut response)));
                say_websocket(response.headers_mut());
            }
            _ if switches => {
                return Err("the server speaks another protocol without having been asked".into());
            }
            _ if is_last => {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        Ok(response.map(Either::Left))
    }

    /// Records that the server is gone. Returns whether the client connection should be shut down
    /// now; otherwise a pending response announces the end.
    fn upstream_ended(&self) -> bool {
        let mut state = self.state();
        state.has_upstream_ended = true;
        state.sender.is_some() && state.upgrade.is_none()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks that a request is for this name and port, in its Host and its target.
fn check<B>(request: &Request<B>, name: &HostName, port: u16) -> Result<(), Mismatch> {
    if request.method() == Method::CONNECT {
        return Err(Mismatch::Tunnel);
    }
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let host = hosts.next().ok_or(Mismatch::Missing)?;
    if hosts.next().is_some() {
        return Err(Mismatch::Unreadable);
    }
    check_authority(host.to_str().map_err(|_| Mismatch::Unreadable)?, name, port)?;
    match (request.uri().scheme_str(), request.uri().authority()) {
        (None, None) => Ok(()),
        (Some("http"), Some(authority)) => check_authority(authority.as_str(), name, port),
        _ => Err(Mismatch::Unreadable),
    }
}

fn check_authority(text: &str, name: &HostName, port: u16) -> Result<(), Mismatch> {
    let (host, said) = parse_authority(text).map_err(|_| Mismatch::Unreadable)?;
    let said = said.unwrap_or(USUAL_PORT);
    if host == UrlHost::Name(name.clone()) && said == port {
        Ok(())
    } else {
        Err(Mismatch::Other(host, said))
    }
}

/// Rewrites the head of a request from the form for a proxy to the form for a server, and sets the
/// checked host.
fn rewrite(
    parts: &mut request::Parts,
    name: &HostName,
    port: u16,
    is_upgrade: bool,
) -> Result<(), ConnectionFailure> {
    let target = parts
        .uri
        .path_and_query()
        .cloned()
        .ok_or("the request has no target")?;
    parts.uri = Uri::from(target);
    parts.version = Version::HTTP_11;
    remove_hop_by_hop(&mut parts.headers);
    // Hyper asks the client for the body itself, as soon as the server has room for it.
    parts.headers.remove(header::EXPECT);
    let host = if port == USUAL_PORT {
        name.to_string()
    } else {
        format!("{name}:{port}")
    };
    parts
        .headers
        .insert(header::HOST, HeaderValue::from_str(&host)?);
    if is_upgrade {
        say_websocket(&mut parts.headers);
    }
    Ok(())
}

/// Removes hop-by-hop headers (RFC 9110 §7.6.1). Hyper writes its own.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = tokens(headers, header::CONNECTION)
        .filter_map(|name| name.parse().ok())
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "transfer-encoding",
        "upgrade",
    ] {
        headers.remove(name);
    }
}

fn is_websocket(headers: &HeaderMap) -> bool {
    let upgrade: Vec<&str> = tokens(headers, header::UPGRADE).collect();
    matches!(upgrade.as_slice(), [one] if one.eq_ignore_ascii_case("websocket"))
        && tokens(headers, header::CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
}

fn say_websocket(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}

/// Returns whether the server closes the connection after this response.
fn ends_here<B>(response: &Response<B>) -> bool {
    let says = |word: &str| {
        tokens(response.headers(), header::CONNECTION).any(|token| token.eq_ignore_ascii_case(word))
    };
    says("close") || (response.version() == Version::HTTP_10 && !says("keep-alive"))
}

fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|token| !token.is_empty())
}

fn refusal(sentence: String) -> Answer {
    let mut response = Response::new(Either::Right(Full::new(Bytes::from(sentence))));
    *response.status_mut() = StatusCode::FORBIDDEN;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    /// A client and a server with a forwarder between them, for the name `example.com` at port 80.
    struct Line {
        client: DuplexStream,
        server: DuplexStream,
        refused: Arc<Mutex<Vec<Mismatch>>>,
    }

    fn line() -> Line {
        line_for(80)
    }

    fn line_for(port: u16) -> Line {
        let (client, inside) = tokio::io::duplex(16 * 1024);
        let (upstream, server) = tokio::io::duplex(16 * 1024);
        let refused = Arc::<Mutex<Vec<Mismatch>>>::default();
        let notes = Arc::clone(&refused);
        tokio::spawn(async move {
            let note = move |mismatch| notes.lock().unwrap().push(mismatch);
            let _ = serve(
                inside,
                upstream,
                &HostName::parse("example.com").unwrap(),
                port,
                &note,
            )
            .await;
        });
        Line {
            client,
            server,
            refused,
        }
    }

    impl Line {
        async fn say(&mut self, text: &str) {
            self.client.write_all(text.as_bytes()).await.unwrap();
        }

        async fn reply(&mut self, text: &str) {
            self.server.write_all(text.as_bytes()).await.unwrap();
        }

        async fn request(&mut self) -> String {
            head(&mut self.server).await
        }

        async fn response(&mut self) -> String {
            head(&mut self.client).await
        }

        /// Returns everything that the client still receives, up to the end.
        async fn rest(&mut self) -> String {
            let mut text = Vec::new();
            self.client.read_to_end(&mut text).await.unwrap();
            String::from_utf8(text).unwrap()
        }

        /// Returns whether the server receives nothing more before the end.
        async fn server_hears_nothing(&mut self) -> bool {
            let mut text = Vec::new();
            self.server.read_to_end(&mut text).await.unwrap();
            text.is_empty()
        }
    }

    async fn head(stream: &mut DuplexStream) -> String {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            text.push(stream.read_u8().await.unwrap_or_else(|error| {
                panic!("{error} after {:?}", String::from_utf8_lossy(&text))
            }));
        }
        String::from_utf8(text).unwrap()
    }

    /// Sends a whole request and expects that it is refused and that the server receives nothing.
    async fn expect_refusal(request: &str, expected: Mismatch) {
        let mut line = line();
        line.say(request).await;
        let answer = line.rest().await;
        assert!(
            answer.contains(" 403 Forbidden\r\n") && answer.contains("example.com:80"),
            "{request:?}: {answer}"
        );
        assert!(line.server_hears_nothing().await, "{request:?}");
        assert_eq!(*line.refused.lock().unwrap(), [expected]);
    }

    fn other(text: &str, port: u16) -> Mismatch {
        Mismatch::Other(parse_authority(text).unwrap().0, port)
    }

    #[tokio::test]
    async fn requests_for_the_name_pass_one_after_another() {
        let mut line = line();
        for (path, host) in [
            ("/first", "example.com"),
            ("/second?x=1", "EXAMPLE.com:80"),
            ("/third", "example.com."),
        ] {
            line.say(&format!(
                "GET {path} HTTP/1.1\r\nHost: {host}\r\nX-Mark: yes\r\n\r\n"
            ))
            .await;
            let request = line.request().await;
            assert!(
                request.starts_with(&format!("GET {path} HTTP/1.1\r\n")),
                "{request}"
            );
            assert!(
                request.contains("X-Mark: yes\r\n") && request.contains("example.com\r\n"),
                "{request}"
            );
            line.reply("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Answer: yes\r\n\r\nhello")
                .await;
            let response = line.response().await;
            assert!(
                response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains("X-Answer: yes"),
                "{response}"
            );
            let mut body = [0; 5];
            line.client.read_exact(&mut body).await.unwrap();
            assert_eq!(&body, b"hello");
        }
        assert!(line.refused.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_request_for_another_host_is_refused_even_as_the_second_on_its_connection() {
        let mut line = line();
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        line.request().await;
        line.reply("HTTP/1.1 204 No Content\r\n\r\n").await;
        assert!(line.response().await.starts_with("HTTP/1.1 204")); // control
        line.say("GET /secret HTTP/1.1\r\nHost: example.org\r\n\r\n")
            .await;
        let answer = line.rest().await;
        assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{answer}");
        assert!(
            answer.ends_with(
                "the request is for example.org:80, but this connection is to \
                                  example.com:80. Other hosts must be in the allowed list, and \
                                  need a connection of their own.\n"
            ),
            "{answer}"
        );
        assert!(line.server_hears_nothing().await);
        assert_eq!(*line.refused.lock().unwrap(), [other("example.org", 80)]);
    }

    #[tokio::test]
    async fn a_pipelined_request_for_another_host_is_refused() {
        let mut line = line();
        line.say(
            "GET / HTTP/1.1\r\nHost: example.com\r\n\r\nGET / HTTP/1.1\r\nHost: \
                  example.org\r\n\r\n",
        )
        .await;
        line.request().await;
        line.reply("HTTP/1.1 204 No Content\r\n\r\n").await;
        assert!(line.response().await.starts_with("HTTP/1.1 204")); // control
        assert!(line.rest().await.starts_with("HTTP/1.1 403"));
        assert!(line.server_hears_nothing().await);
    }

    #[tokio::test]
    async fn every_way_to_name_another_host_is_refused() {
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: sub.example.com\r\n\r\n",
            other("sub.example.com", 80),
        )
        .await;
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: example.com:8080\r\n\r\n",
            other("example.com", 8080),
        )
        .await;
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n",
            other("169.254.169.254", 80),
        )
        .await;
        expect_refusal("GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", other("[::1]", 80)).await;
        let absolute = "GET http://example.org/ HTTP/1.1\r\nHost: example.com\r\n\r\n";
        expect_refusal(absolute, other("example.org", 80)).await;
        let absolute = "GET http://example.com/ HTTP/1.1\r\nHost: example.org\r\n\r\n";
        expect_refusal(absolute, other("example.org", 80)).await;
        expect_refusal(
            "GET https://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
            Mismatch::Unreadable,
        )
        .await;
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: example.com\r\nHost: example.org\r\n\r\n",
            Mismatch::Unreadable,
        )
        .await;
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: user@example.com\r\n\r\n",
            Mismatch::Unreadable,
        )
        .await;
        expect_refusal(
            "GET / HTTP/1.1\r\nHost: example.com, example.org\r\n\r\n",
            Mismatch::Unreadable,
        )
        .await;
        expect_refusal("GET / HTTP/1.1\r\nHost:\r\n\r\n", Mismatch::Unreadable).await;
        expect_refusal("GET / HTTP/1.1\r\n\r\n", Mismatch::Missing).await;
        expect_refusal("GET / HTTP/1.0\r\n\r\n", Mismatch::Missing).await;
        expect_refusal(
            "CONNECT example.com:80 HTTP/1.1\r\nHost: example.com:80\r\n\r\n",
            Mismatch::Tunnel,
        )
        .await;
    }

    #[tokio::test]
    async fn a_target_in_absolute_form_reaches_the_server_as_a_path() {
        let mut line = line();
        line.say("GET http://example.com:80/a?b HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        assert!(line.request().await.starts_with("GET /a?b HTTP/1.1\r\n"));
    }

    #[tokio::test]
    async fn another_port_than_the_usual_one_must_be_said_and_is_said_again() {
        let mut line = line_for(8080);
        line.say("GET / HTTP/1.1\r\nHost: example.com:8080\r\n\r\n")
            .await;
        assert!(line.request().await.contains("example.com:8080\r\n"));
        line.reply("HTTP/1.1 204 No Content\r\n\r\n").await;
        line.response().await;
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        assert!(line.rest().await.starts_with("HTTP/1.1 403"));
    }

    #[tokio::test]
    async fn headers_between_neighbours_stay_there_and_cannot_take_the_host_away() {
        let mut line = line();
        line.say(
            "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: keep-alive, Host, \
                  X-Private\r\nKeep-Alive: 5\r\nX-Private: 1\r\nTE: gzip\r\nX-Kept: \
                  1\r\n\r\n",
        )
        .await;
        let request = line.request().await.to_lowercase();
        assert!(
            request.contains("\r\nhost: example.com\r\n") && request.contains("\r\nx-kept: 1\r\n"),
            "{request}"
        );
        for gone in ["x-private", "keep-alive", "\r\nte:", "connection"] {
            assert!(!request.contains(gone), "{request}");
        }
        line.reply(
            "HTTP/1.1 200 OK\r\nConnection: X-Inner\r\nX-Inner: 1\r\nX-Outer: \
                    1\r\nContent-Length: 0\r\n\r\n",
        )
        .await;
        let response = line.response().await;
        assert!(
            response.contains("X-Outer: 1") && !response.contains("X-Inner"),
            "{response}"
        );
    }

    #[tokio::test]
    async fn a_request_with_two_lengths_reaches_the_server_with_one() {
        let mut line = line();
        line.say(
            "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 3\r\nTransfer-Encoding: \
             chunked\r\n\r\n0\r\n\r\n",
        )
        .await;
        let request = line.request().await.to_lowercase();
        assert!(
            request.contains("transfer-encoding: chunked") && !request.contains("content-length"),
            "{request}"
        );
    }

    #[tokio::test]
    async fn a_head_that_is_too_large_is_refused() {
        let ask = async |size: usize| {
            let mut line = line();
            let request = format!(
                "GET / HTTP/1.1\r\nHost: example.com\r\nX-Long: {}\r\n\r\n",
                "a".repeat(size)
            );
            let Line { client, server, .. } = &mut line;
            let (_, heard) = tokio::join!(client.write_all(request.as_bytes()), async {
                let mut first = [0; 3];
                server.read_exact(&mut first).await.map(|_| first)
            });
            (heard.is_ok(), line)
        };
        assert!(ask(MAX_HEAD_BYTES / 2).await.0); // control
        let (heard, mut line) = ask(MAX_HEAD_BYTES).await;
        assert!(!heard);
        assert!(line.rest().await.starts_with("HTTP/1.1 431"));
    }

    #[tokio::test]
    async fn bodies_stream_in_both_directions() {
        let mut line = line();
        line.say(
            "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: \
                  chunked\r\n\r\n5\r\nfirst\r\n",
        )
        .await;
        let request = line.request().await.to_lowercase();
        assert!(request.contains("transfer-encoding: chunked"), "{request}");
        let mut chunk = [0; 10];
        line.server.read_exact(&mut chunk).await.unwrap(); // arrives before the rest was sent
        assert_eq!(&chunk, b"5\r\nfirst\r\n");
        line.reply("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n")
            .await;
        assert!(line.response().await.starts_with("HTTP/1.1 200"));
        let mut chunk = [0; 9];
        line.client.read_exact(&mut chunk).await.unwrap();
        assert_eq!(&chunk, b"4\r\npart\r\n");
        line.say("0\r\n\r\n").await;
        let mut end = [0; 5];
        line.server.read_exact(&mut end).await.unwrap();
        line.reply("0\r\n\r\n").await;
        line.client.read_exact(&mut end).await.unwrap();
        assert_eq!(&end, b"0\r\n\r\n");
    }

    #[tokio::test]
    async fn a_websocket_is_copied_and_no_other_upgrade_passes() {
        let mut line = line();
        line.say(
            "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade\r\nUpgrade: \
                  websocket\r\nSec-WebSocket-Key: k\r\n\r\n",
        )
        .await;
        let request = line.request().await.to_lowercase();
        assert!(
            request.contains("upgrade: websocket") && request.contains("connection: upgrade"),
            "{request}"
        );
        line.reply(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: \
                    websocket\r\n\r\nfrom server",
        )
        .await;
        let response = line.response().await.to_lowercase();
        assert!(
            response.starts_with("http/1.1 101") && response.contains("upgrade: websocket"),
            "{response}"
        );
        let mut text = [0; 11];
        line.client.read_exact(&mut text).await.unwrap();
        assert_eq!(&text, b"from server");
        line.say("from client").await;
        line.server.read_exact(&mut text).await.unwrap();
        assert_eq!(&text, b"from client");

        let mut line = self::line();
        line.say(
            "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade, \
                  HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
        )
        .await;
        let request = line.request().await.to_lowercase();
        assert!(
            !request.contains("upgrade") && !request.contains("http2"),
            "{request}"
        );
        line.reply(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        )
        .await;
        assert_eq!(line.rest().await, "");
    }

    #[tokio::test]
    async fn when_the_server_ends_the_connection_the_client_is_told() {
        let mut line = line();
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        line.request().await;
        line.reply("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
            .await;
        let answer = line.rest().await.to_lowercase();
        assert!(
            answer.contains("connection: close") && answer.ends_with("ok"),
            "{answer}"
        );

        let mut line = self::line();
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        line.request().await;
        line.reply("HTTP/1.1 204 No Content\r\n\r\n").await;
        line.response().await;
        line.server.shutdown().await.unwrap(); // between two requests
        assert_eq!(line.rest().await, "");
    }

    #[tokio::test]
    async fn a_body_that_the_server_cuts_off_is_cut_off_for_the_client() {
        let mut line = line();
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        line.request().await;
        line.reply("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\npart\r\n")
            .await;
        line.server.shutdown().await.unwrap();
        let answer = line.rest().await;
        // Without the final chunk, which would mark the body as complete.
        assert!(answer.ends_with("4\r\npart\r\n"), "{answer}");
    }

    #[tokio::test]
    async fn a_body_without_a_length_ends_with_its_connection() {
        let mut line = line();
        line.say("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n")
            .await;
        line.request().await;
        line.reply("HTTP/1.0 200 OK\r\n\r\nall of it").await;
        line.server.shutdown().await.unwrap();
        let answer = line.rest().await;
        assert!(answer.ends_with("9\r\nall of it\r\n0\r\n\r\n"), "{answer}");
    }
}
