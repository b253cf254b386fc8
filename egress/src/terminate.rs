//! TLS termination for hosts that have a secret.
//!
//! ```text
//!  program inside ─TLS, certificate of the session's CA─▶ here ─TLS, real host verified─▶ host
//!                  placeholders                          fill ▶                    values
//!                  placeholders                        ◀ mask                      values
//! ```
//!
//! Every request is parsed: its Host must be the connection's name, also for the tenth request on a
//! persistent connection. HTTP/1.1 is the only protocol offered. Bodies stream, except those that
//! may contain a placeholder (a form, JSON, text, up to 1 MiB), which are buffered first. Responses
//! are masked as they stream. That needs plain text, so requests ask for no encoding, and a
//! response that is encoded nevertheless is refused. Range requests are not forwarded, because a
//! value cut in two would not be found.
//!
//! A WebSocket starts as a request, so its headers are filled; messages from the host are masked,
//! messages to the host are copied. Trailers are not forwarded.
//!
//! **Plain HTTP does not come here: in it, placeholders are not replaced**, since a value must not
//! travel unencrypted.

mod bodies;
mod frames;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request;
use hyper::http::uri::PathAndQuery;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, TlsConnector};

use crate::authority::Authority;
use crate::dial::Dial;
use crate::name::{HostName, UrlHost, parse_authority};
use crate::secrets::{BodyKind, HostSecrets, RequestNote, Vault};
use bodies::{Masked, Prefixed, Streamed};

/// Timeout for each TLS handshake. Both take a few packets; the connection waits for them.
const MAX_HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Timeout for the next request on an idle connection, and for the head of a request.
const MAX_WAIT_FOR_REQUEST: Duration = Duration::from_secs(60);

/// Timeout until the pooled connection to the host is ready. It nearly always is.
const MAX_WAIT_FOR_KEPT: Duration = Duration::from_secs(5);

/// Size limit of the head of a request or response.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Size limit of a body that is searched for placeholders.
const MAX_FILLED_BODY_BYTES: usize = 1024 * 1024;

/// Headers that describe one connection and not the message.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Receives notes about requests that use a placeholder in the wrong place.
pub(crate) type NoteSink = dyn Fn(RequestNote) + Send + Sync;

/// Serves one connection from inside, which is for `name` (a host with a secret in `vault`) at
/// `port`, until it ends.
///
/// `inside` is at the first byte of the TLS handshake and must send at once (`TCP_NODELAY`), or
/// every response waits 40 ms for an acknowledgement. `dial` decides anew for each connection to
/// the host. Dropping the future ends all connections.
pub(crate) async fn serve<S>(
    inside: S,
    name: &HostName,
    port: u16,
    vault: &Vault,
    authority: &Authority,
    dial: Arc<Dial>,
    notes: Arc<NoteSink>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let secrets = vault
        .for_host(name)
        .ok_or_else(|| io::Error::other("the host has no secret"))?;
    let inside = in_time(accept(inside, name, authority)).await?;
    let exchange = Arc::new(Exchange {
        name: name.clone(),
        port,
        secrets,
        client: authority.client(),
        dial,
        notes,
        kept: Mutex::default(),
        drivers: Mutex::default(),
        tunnel: Mutex::default(),
    });
    let service = service_fn(|request| {
        let exchange = exchange.clone();
        async move { Ok::<_, std::convert::Infallible>(exchange.answer(request).await) }
    });
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(MAX_WAIT_FOR_REQUEST)
        .max_header_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(inside), service)
        .with_upgrades()
        .await
        .map_err(io::Error::other)?;
    let tunnel = lock(&exchange.tunnel).take();
    match tunnel {
        Some((inside, outside)) => tunnel_between(inside, outside, &exchange.secrets).await,
        None => Ok(()),
    }
}

/// One connection from inside and its state.
struct Exchange {
    name: HostName,
    port: u16,
    secrets: Arc<HostSecrets>,
    client: Arc<ClientConfig>,
    dial: Arc<Dial>,
    notes: Arc<NoteSink>,
    /// The idle connection to the host between two requests.
    kept: Mutex<Option<SendRequest<Streamed>>>,
    /// The tasks that drive connections to the host. They end with this value.
    drivers: Mutex<JoinSet<()>>,
    /// Both ends of a WebSocket after the upgrade.
    tunnel: Mutex<Option<(OnUpgrade, OnUpgrade)>>,
}

/// Reason for a response of ours instead of the host's.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    sentence: String,
    closes: bool,
}

impl Exchange {
    async fn answer(&self, request: Request<Incoming>) -> Response<Streamed> {
        self.forward(request)
            .await
            .unwrap_or_else(Refusal::into_response)
    }

    async fn forward(&self, mut request: Request<Incoming>) -> Result<Response<Streamed>, Refusal> {
        self.check_host(&request)?;
        let upgrade = is_websocket(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let is_head = request.method() == Method::HEAD;
        let request = self.filled(request, upgrade.is_some()).await?;
        let response = self.send(request).await?;
        match (response.status(), upgrade) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(inside)) => self.upgraded(response, inside),
            (StatusCode::SWITCHING_PROTOCOLS, None) => {
                Err(self.bad_answer("changed the protocol without being asked"))
            }
            (StatusCode::PARTIAL_CONTENT, _) => {
                Err(self.bad_answer("sent a part although the whole was asked for"))
            }
            _ => self.masked(response, is_head),
        }
    }

    /// Refuses a request that is not for this connection's name and port, in its target or its
    /// Host.
    fn check_host(&self, request: &Request<Incoming>) -> Result<(), Refusal> {
        let hosts: Vec<_> = request.headers().get_all(header::HOST).iter().collect();
        let [host] = hosts[..] else {
            return Err(Refusal::closing(
                StatusCode::BAD_REQUEST,
                "A request must have one Host header.".to_owned(),
            ));
        };
        let named = [
            host.to_str().ok(),
            request
                .uri()
                .authority()
                .map(|authority| authority.as_str()),
        ];
        let is_ours = |text: &str| match parse_authority(text) {
            Ok((UrlHost::Name(name), port)) => {
                name == self.name && port.unwrap_or(443) == self.port
            }
            _ => false,
        };
        let is_plain = request
            .uri()
            .scheme_str()
            .is_some_and(|scheme| scheme != "https");
        if host.to_str().is_err()
            || is_plain
            || request.method() == Method::CONNECT
            || !named.into_iter().flatten().all(is_ours)
        {
            let sentence = format!(
                "This connection is for {}: the request names another host.",
                self.name
            );
            return Err(Refusal::closing(StatusCode::FORBIDDEN, sentence));
        }
        Ok(())
    }

    fn host_header(&self) -> HeaderValue {
        let text = match self.port {
            443 => self.name.to_string(),
            port => format!("{}:{port}", self.name),
        };
        HeaderValue::try_from(text)
            .expect("a name has only letters, digits, hyphens, underscores and dots")
    }

    /// Returns the request to send to the host, with values inserted.
    async fn filled(
        &self,
        request: Request<Incoming>,
        is_websocket: bool,
    ) -> Result<Request<Streamed>, Refusal> {
        let (mut parts, body) = request.into_parts();
        let mut notes = BTreeSet::new();
        prepare_headers(&mut parts, is_websocket);
        // In our spelling, so that the host cannot interpret it in another way than we did.
        parts.headers.insert(header::HOST, self.host_header());
        let kind = body_kind(&parts.headers);
        self.secrets.fill_headers(&mut parts.headers, &mut notes);
        let uri = self.filled_target(&parts.uri, &mut notes)?;
        let body = self
            .filled_body(kind, body, &mut parts.headers, &mut notes)
            .await?;
        notes.into_iter().for_each(|note| (self.notes)(note));
        let mut filled = Request::new(body);
        *filled.method_mut() = parts.method;
        *filled.uri_mut() = uri;
        *filled.headers_mut() = parts.headers;
        Ok(filled)
    }

    fn filled_target(&self, uri: &Uri, notes: &mut BTreeSet<RequestNote>) -> Result<Uri, Refusal> {
        let target = uri
            .path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/"));
        let target = match self.secrets.fill_target(target.as_str(), notes) {
            Some(filled) => PathAndQuery::try_from(filled).map_err(|_| {
                Refusal::new(
                    StatusCode::URI_TOO_LONG,
                    "The address of the request is too long.".to_owned(),
                )
            })?,
            None => target,
        };
        Ok(Uri::from(target))
    }

    async fn filled_body(
        &self,
        kind: Option<BodyKind>,
        mut body: Incoming,
        headers: &mut HeaderMap,
        notes: &mut BTreeSet<RequestNote>,
    ) -> Result<Streamed, Refusal> {
        let is_too_large = body.size_hint().lower() > MAX_FILLED_BODY_BYTES as u64;
        let Some(kind) = kind.filter(|_| !is_too_large && !body.is_end_stream()) else {
            return Ok(body.boxed());
        };
        let mut gathered = Vec::new();
        while let Some(frame) = body.frame().await {
            let broken = |_| {
                Refusal::closing(
                    StatusCode::BAD_REQUEST,
                    "The body of the request ended early.".to_owned(),
                )
            };
            gathered.extend_from_slice(frame.map_err(broken)?.data_ref().unwrap_or(&Bytes::new()));
            if gathered.len() > MAX_FILLED_BODY_BYTES {
                return Ok(Prefixed::new(gathered.into(), body).boxed());
            }
        }
        let filled = self
            .secrets
            .fill_body(kind, &gathered, notes)
            .unwrap_or(gathered);
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(filled.len()));
        Ok(Full::from(filled).map_err(|never| match never {}).boxed())
    }

    /// Sends over the idle connection or, if there is none or it has ended, over a new one.
    async fn send(&self, mut request: Request<Streamed>) -> Result<Response<Incoming>, Refusal> {
        let kept = lock(&self.kept).take();
        if let Some(mut kept) = kept
            && matches!(timeout(MAX_WAIT_FOR_KEPT, kept.ready()).await, Ok(Ok(())))
        {
            match kept.try_send_request(request).await {
                Ok(response) => {
                    *lock(&self.kept) = Some(kept);
                    return Ok(response);
                }
                // No byte was sent: the host closed the connection at that moment.
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(self.bad_answer("ended the connection without an answer")),
                },
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request).await;
        *lock(&self.kept) = Some(sender);
        response.map_err(|_| {
            self.bad_answer("ended the connection without an answer that could be read")
        })
    }

    async fn connect(&self) -> Result<SendRequest<Streamed>, Refusal> {
        let unreachable = |error: io::Error| {
            Refusal::new(
                StatusCode::BAD_GATEWAY,
                format!("{} could not be reached: {error}.", self.name),
            )
        };
        let stream = (self.dial)().await.map_err(unreachable)?;
        let server = ServerName::try_from(self.name.as_str().to_owned())
            .map_err(|error| unreachable(io::Error::other(error)))?;
        let connector = TlsConnector::from(self.client.clone());
        let stream = in_time(connector.connect(server, stream))
            .await
            .map_err(unreachable)?;
        let (sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_header_size(MAX_HEAD_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| unreachable(io::Error::other(error)))?;
        let mut drivers = lock(&self.drivers);
        while drivers.try_join_next().is_some() {}
        drivers.spawn(async move {
            // A failure is reported to the caller that waits for the response.
            let _ = connection.with_upgrades().await;
        });
        Ok(sender)
    }

    /// Returns the host's response as it is sent inside.
    fn masked(
        &self,
        response: Response<Incoming>,
        is_head: bool,
    ) -> Result<Response<Streamed>, Refusal> {
        let (mut parts, body) = response.into_parts();
        if !body.is_end_stream() && is_encoded(&parts.headers) {
            return Err(self.bad_answer(
                "sent an answer in an encoding in which a secret cannot be looked for",
            ));
        }
        remove_hop_by_hop(&mut parts.headers);
        // Placeholders change the length of the body. The response to HEAD has no body.
        if !is_head {
            parts.headers.remove(header::CONTENT_LENGTH);
        }
        self.secrets.mask_headers(&mut parts.headers);
        // A new response: the extensions of the old one include the reason phrase, in which a host
        // could write anything.
        let mut masked = Response::new(Masked::new(body, self.secrets.masker()).boxed());
        *masked.status_mut() = parts.status;
        *masked.headers_mut() = parts.headers;
        Ok(masked)
    }

    /// Turns the connection into a WebSocket. Its frames are copied once hyper has released both
    /// ends.
    fn upgraded(
        &self,
        mut response: Response<Incoming>,
        inside: OnUpgrade,
    ) -> Result<Response<Streamed>, Refusal> {
        if !is_websocket(response.headers())
            || response
                .headers()
                .contains_key(header::SEC_WEBSOCKET_EXTENSIONS)
        {
            return Err(self.bad_answer("opened a WebSocket in a way that was not asked for"));
        }
        *lock(&self.tunnel) = Some((inside, hyper::upgrade::on(&mut response)));
        let mut headers = std::mem::take(response.headers_mut());
        remove_hop_by_hop(&mut headers);
        self.secrets.mask_headers(&mut headers);
        ask_for_websocket(&mut headers);
        let mut upgraded = Response::new(Empty::new().map_err(|never| match never {}).boxed());
        *upgraded.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        *upgraded.headers_mut() = headers;
        Ok(upgraded)
    }

    fn bad_answer(&self, what: &str) -> Refusal {
        Refusal::new(
            StatusCode::BAD_GATEWAY,
            format!("{} {what}, so there is nothing to pass on.", self.name),
        )
    }
}

impl Refusal {
    fn new(status: StatusCode, sentence: String) -> Refusal {
        Refusal {
            status,
            sentence,
            closes: false,
        }
    }

    /// Returns a refusal after which nothing more is read from this connection.
    fn closing(status: StatusCode, sentence: String) -> Refusal {
        Refusal {
            status,
            sentence,
            closes: true,
        }
    }

    fn into_response(self) -> Response<Streamed> {
        let mut response = Response::new(
            Full::from(self.sentence + "\n")
                .map_err(|never| match never {})
                .boxed(),
        );
        *response.status_mut() = self.status;
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        if self.closes {
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Accepts TLS as `name`, if the client asks for exactly that name.
async fn accept<S>(
    inside: S,
    name: &HostName,
    authority: &Authority,
) -> io::Result<tokio_rustls::server::TlsStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), inside).await?;
    let asked_for = start
        .client_hello()
        .server_name()
        .and_then(|text| HostName::parse(text).ok());
    if asked_for.as_ref() != Some(name) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the TLS client names another host",
        ));
    }
    start
        .into_stream(authority.server(name).map_err(io::Error::other)?)
        .await
}

async fn in_time<T>(handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(MAX_HANDSHAKE_TIME, handshake)
        .await
        .unwrap_or_else(|_| {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the TLS handshake took too long",
            ))
        })
}

/// Prepares a request's headers for the host: no hop-by-hop headers, no encoding, nothing that
/// would prevent values from being found in the response.
fn prepare_headers(parts: &mut request::Parts, is_websocket: bool) {
    let headers = &mut parts.headers;
    remove_hop_by_hop(headers);
    for unwanted in [
        header::RANGE,
        header::IF_RANGE,
        header::EXPECT,
        header::SEC_WEBSOCKET_EXTENSIONS,
    ] {
        headers.remove(unwanted);
    }
    headers.insert(
        header::ACCEPT_ENCODING,
        HeaderValue::from_static("identity"),
    );
    if is_websocket {
        ask_for_websocket(headers);
    }
    parts.version = Version::HTTP_11;
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, header::CONNECTION)
        .filter_map(|token| token.parse().ok())
        .collect();
    // A `Connection` header that names these is an attempt to remove them so that we misread the
    // message.
    let kept = [header::HOST, header::CONTENT_LENGTH];
    for name in named
        .iter()
        .filter(|name| !kept.contains(name))
        .chain(&HOP_BY_HOP)
    {
        headers.remove(name);
    }
}

fn ask_for_websocket(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}

fn is_websocket(headers: &HeaderMap) -> bool {
    tokens(headers, header::CONNECTION).any(|token| token == "upgrade")
        && tokens(headers, header::UPGRADE).eq(["websocket".to_owned()])
}

fn is_encoded(headers: &HeaderMap) -> bool {
    let transfer = tokens(headers, header::TRANSFER_ENCODING).filter(|token| token != "chunked");
    tokens(headers, header::CONTENT_ENCODING)
        .chain(transfer)
        .any(|token| token != "identity")
}

/// Returns how the body encodes its text, if placeholders are replaced in it.
fn body_kind(headers: &HeaderMap) -> Option<BodyKind> {
    if headers.contains_key(header::CONTENT_ENCODING) {
        return None;
    }
    BodyKind::of(headers.get(header::CONTENT_TYPE)?.to_str().ok()?)
}

/// Returns the comma-separated tokens of a header, in lower case.
fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = String> {
    let values = headers
        .get_all(name)
        .into_iter()
        .map(|value| String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase());
    let words: Vec<String> = values
        .flat_map(|value| {
            value
                .split(',')
                .map(|word| word.trim().to_owned())
                .collect::<Vec<_>>()
        })
        .collect();
    words.into_iter().filter(|word| !word.is_empty())
}

/// Copies a WebSocket until the host closes it.
async fn tunnel_between(
    inside: OnUpgrade,
    outside: OnUpgrade,
    secrets: &HostSecrets,
) -> io::Result<()> {
    let (inside, outside) = tokio::try_join!(inside, outside).map_err(io::Error::other)?;
    let (mut from_inside, to_inside) = tokio::io::split(TokioIo::new(inside));
    let (from_outside, mut to_outside) = tokio::io::split(TokioIo::new(outside));
    let outwards = async {
        tokio::io::copy(&mut from_inside, &mut to_outside).await?;
        to_outside.shutdown().await?;
        // The host may still send data.
        std::future::pending::<io::Result<()>>().await
    };
    tokio::select! {
        result = outwards => result,
        result = frames::copy(from_outside, to_inside, secrets.masker()) => result,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
