//! MCP over HTTP: one endpoint, both protocol eras.
//!
//! ```text
//! request of a known caller → body (bounded, read strictly) → scope → owner of the connection
//!   → rmcp → answer or stream
//! ```
//!
//! A body costs its caller's share of the bytes under way before it is read. After its first 64 KiB
//! the scope is checked if they say what the message is about, and a caller who may only look sends
//! no more than that.
//!
//! Since 2026-07-28 every request stands alone, and whoever closes its stream cancels it. Older
//! clients open a connection with `initialize` and name it in each request; a stream that breaks
//! cancels nothing, and what was missed is sent again on a new one. The library does both. This
//! file closes what it leaves open: who may use a connection, how many there are, what is
//! malformed, which right a request needs, and that a stream ends with the token that opened it.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::http::{HeaderName, Method, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use rmcp::ServerHandler;
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorCode, JsonRpcMessage, ProtocolVersion,
};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::Server;
use super::arrivals::Arrival;
use super::bodies::{Bodies, BodyBytes, Crowded};
use super::connections::Connections;
use super::toolbox::Toolbox;
use super::tools::session_as_written;
use super::turns::{Turn, Turns};
use super::wire::{self, Rejection, read_message};
use crate::auth::{Caller, Scope, require};

/// Bytes in one body: room for the largest cell, and for nothing much larger. Files have routes of
/// their own.
pub const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;

/// Bytes of a message that runs nothing. Also the bytes after which a longer one is looked at for
/// the first time.
const SMALL_BODY: usize = 64 * 1024;

/// Bytes of all bodies under way; one caller may have a third of them.
const ALL_BODIES: usize = 128 * 1024 * 1024;

/// How long the rest of a body that was refused may take.
const DISCARDING: Duration = Duration::from_secs(5);

/// How often a stream without news says that it is alive.
const BETWEEN_SIGNS_OF_LIFE: Duration = Duration::from_secs(15);

const CONNECTION: HeaderName = HeaderName::from_static("mcp-session-id");

/// How connections of older clients are kept.
#[derive(Debug, Clone)]
pub struct Keeping {
    /// A connection that is not used for so long is forgotten.
    pub idle: Duration,
    /// Where they are written down, so that the next server goes on with them.
    pub folder: Option<PathBuf>,
}

/// What a request needs, by the message in it. A message that needs nothing is open to every known
/// caller.
type ScopeOf = Arc<dyn Fn(&ClientJsonRpcMessage) -> Option<Scope> + Send + Sync>;

/// Whatever answers messages.
pub trait Handler: ServerHandler + Clone + Send + Sync + 'static {}

impl<H: ServerHandler + Clone + Send + Sync + 'static> Handler for H {}

/// The endpoint, over whatever answers the messages. Cheap to clone.
pub struct Endpoint<H> {
    service: StreamableHttpService<H, LocalSessionManager>,
    library: Arc<LocalSessionManager>,
    connections: Arc<Connections>,
    bodies: Arc<Bodies>,
    scope_of: ScopeOf,
    turns: Arc<Mutex<Turns>>,
}

impl<H> Clone for Endpoint<H> {
    fn clone(&self) -> Endpoint<H> {
        let Endpoint {
            service,
            library,
            connections,
            bodies,
            scope_of,
            turns,
        } = self;
        Endpoint {
            service: service.clone(),
            library: library.clone(),
            connections: connections.clone(),
            bodies: bodies.clone(),
            scope_of: scope_of.clone(),
            turns: turns.clone(),
        }
    }
}

impl Endpoint<Server> {
    /// Makes the endpoint of our own tools.
    pub fn of(server: Server, keeping: Keeping, end: CancellationToken) -> Endpoint<Server> {
        let toolbox = server.shared.toolbox.clone();
        Endpoint::new(
            server,
            move |message| scope_of(&*toolbox, message),
            keeping,
            end,
        )
    }
}

impl<H: Handler> Endpoint<H> {
    /// Makes the endpoint of any handler. The conformance tests have one of their own. `end` closes
    /// all streams.
    pub fn new(
        handler: H,
        scope_of: impl Fn(&ClientJsonRpcMessage) -> Option<Scope> + Send + Sync + 'static,
        keeping: Keeping,
        end: CancellationToken,
    ) -> Endpoint<H> {
        let mut library = LocalSessionManager::default();
        library.session_config.keep_alive = Some(keeping.idle);
        let library = Arc::new(library);
        let connections = Arc::new(Connections::new(keeping.folder, keeping.idle));
        let mut config = StreamableHttpServerConfig::default()
            .with_json_response(true)
            .with_sse_keep_alive(Some(BETWEEN_SIGNS_OF_LIFE))
            .with_max_request_body_bytes(MAX_BODY_BYTES)
            .with_cancellation_token(end)
            // Names and origins are checked before a request comes here, and on every other route
            // too.
            .disable_allowed_hosts()
            .disable_allowed_origins();
        config.session_store = Some(connections.clone());
        let service =
            StreamableHttpService::new(move || Ok(handler.clone()), library.clone(), config);
        let (bodies, scope_of) = (Bodies::new(ALL_BODIES), Arc::new(scope_of) as ScopeOf);
        Endpoint {
            service,
            library,
            connections,
            bodies,
            scope_of,
            turns: Arc::default(),
        }
    }

    /// Answers one request. Its extensions hold the caller.
    pub async fn answer(&self, mut request: Request<Body>) -> Response<Body> {
        let Some(caller) = request.extensions().get::<Caller>().cloned() else {
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        };
        if stands_alone(&request) {
            // Such a request belongs to no connection, whatever it says.
            request.headers_mut().remove(CONNECTION);
        } else if let Some(id) = request.headers().get(CONNECTION)
            && !self
                .connections
                .belongs_to(id.as_bytes(), &caller.principal)
        {
            // The same words that the library has for an unknown one.
            return (StatusCode::NOT_FOUND, "Not Found: Session not found").into_response();
        }
        let Admitted {
            request,
            opens,
            bytes,
        } = match self.admit(request, &caller).await {
            Ok(admitted) => admitted,
            Err(refused) => return refused,
        };
        let closes = request
            .headers()
            .get(CONNECTION)
            .filter(|_| request.method() == Method::DELETE)
            .cloned();
        let mut response = self.service.handle(request).await;
        if let Some(id) = response.headers().get(CONNECTION).filter(|_| opens) {
            self.connections
                .give(&String::from_utf8_lossy(id.as_bytes()), &caller.principal);
        }
        if let Some(id) = closes {
            self.connections
                .forget(&String::from_utf8_lossy(id.as_bytes()));
            if response.status() == StatusCode::ACCEPTED {
                // Some clients take any other success for a failure.
                *response.status_mut() = StatusCode::NO_CONTENT;
            }
        }
        response.map(|body| until(body, caller.expires, bytes))
    }

    /// Reads the message of a request and decides whether it may go on.
    async fn admit(
        &self,
        request: Request<Body>,
        caller: &Caller,
    ) -> Result<Admitted, Response<Body>> {
        if request.method() != Method::POST {
            return match require(caller, Scope::Read) {
                Ok(()) => Ok(Admitted {
                    request,
                    opens: false,
                    bytes: None,
                }),
                Err(denied) => Err(denied.into_response()),
            };
        }
        let (mut parts, body) = request.into_parts();
        // Later requests wait for it until this one has been read, not until it has been answered.
        let arrival = parts.extensions.remove::<Arrival>();
        let (body, bytes) = self.whole(body, caller).await?;
        let rejected = |rejection: Rejection| {
            let is_unknown = rejection.code == ErrorCode::METHOD_NOT_FOUND.0;
            let status = if is_unknown {
                StatusCode::NOT_FOUND
            } else {
                StatusCode::BAD_REQUEST
            };
            (
                status,
                [(header::CONTENT_TYPE, "application/json")],
                rejection.line(),
            )
                .into_response()
        };
        let message = match wire::reading(body.clone()).await {
            Ok(Some(message)) => message,
            Ok(None) => {
                let text = "the body holds no message that can be answered";
                return Err(rejected(Rejection::new(
                    Value::Null,
                    ErrorCode::INVALID_REQUEST,
                    text,
                )));
            }
            Err(rejection) => return Err(rejected(rejection)),
        };
        if let Some(turn) = self.turn(arrival, caller, &message).await {
            parts.extensions.insert(turn);
        }
        if let Some(scope) = (self.scope_of)(&message) {
            require(caller, scope).map_err(IntoResponse::into_response)?;
        }
        let opens = matches!(&message, JsonRpcMessage::Request(request)
            if matches!(request.request, ClientRequest::InitializeRequest(_)));
        if opens {
            // What a client says of itself is kept for as long as its connection.
            if body.len() > SMALL_BODY {
                return Err(too_large(SMALL_BODY));
            }
            self.has_room(caller).await?;
        }
        Ok(Admitted {
            request: Request::from_parts(parts, Body::from(body)),
            opens,
            bytes: Some(bytes),
        })
    }

    /// Reads a body. What is left of one that is refused is thrown away while the answer is on its
    /// way: a client that still writes would not see an answer on a connection that was closed.
    async fn whole(
        &self,
        mut body: Body,
        caller: &Caller,
    ) -> Result<(Bytes, BodyBytes), Response<Body>> {
        let read = self.gather(&mut body, caller).await;
        if read.is_err() {
            tokio::spawn(tokio::time::timeout(DISCARDING, discard(body)));
        }
        read
    }

    /// Reads a body within the caller's share of all bytes under way.
    async fn gather(
        &self,
        body: &mut Body,
        caller: &Caller,
    ) -> Result<(Bytes, BodyBytes), Response<Body>> {
        let announced = body
            .size_hint()
            .exact()
            .map_or(0, |size| usize::try_from(size).unwrap_or(usize::MAX));
        if announced > MAX_BODY_BYTES {
            return Err(too_large(MAX_BODY_BYTES));
        }
        let only_looks = ![Scope::Execute, Scope::Install, Scope::Register]
            .iter()
            .any(|scope| caller.scopes.allow(*scope));
        let expected = if only_looks {
            announced.min(SMALL_BODY)
        } else {
            announced
        };
        let mut bytes = self.bodies.begin(&caller.principal);
        bytes.grow(expected).map_err(crowded)?;
        let mut whole = Vec::with_capacity(expected);
        while let Some(frame) = body.frame().await {
            let unread = |_| {
                (
                    StatusCode::BAD_REQUEST,
                    "the body could not be read to its end",
                )
                    .into_response()
            };
            let Ok(data) = frame.map_err(unread)?.into_data() else {
                continue;
            };
            if whole.len() + data.len() > MAX_BODY_BYTES {
                return Err(too_large(MAX_BODY_BYTES));
            }
            let is_new = whole.len() <= SMALL_BODY;
            bytes.grow(whole.len() + data.len()).map_err(crowded)?;
            whole.extend_from_slice(&data);
            if is_new && whole.len() > SMALL_BODY {
                if let Some(scope) = self.scope_of_beginning(&whole) {
                    require(caller, scope).map_err(IntoResponse::into_response)?;
                }
                if only_looks {
                    return Err(too_large(SMALL_BODY));
                }
            }
        }
        Ok((whole.into(), bytes))
    }

    /// Returns what a message needs of which only the beginning is known, if that says enough. It
    /// is looked at again when all of it is there.
    fn scope_of_beginning(&self, beginning: &[u8]) -> Option<Scope> {
        let cellblock_json::Peeked { method, name } = cellblock_json::peek(beginning);
        let message =
            json!({"jsonrpc": "2.0", "id": 0, "method": method?, "params": {"name": name?}})
                .to_string();
        (self.scope_of)(&read_message(message.as_bytes()).ok()??)
    }

    /// Gives a call its turn at the session that it names: on one connection in the order in which
    /// requests were sent, otherwise in the order in which they were complete. A call that names
    /// none means a new session, or the only one that its tool knows.
    async fn turn(
        &self,
        arrival: Option<Arrival>,
        caller: &Caller,
        message: &ClientJsonRpcMessage,
    ) -> Option<Turn> {
        let JsonRpcMessage::Request(request) = message else {
            return None;
        };
        let ClientRequest::CallToolRequest(call) = &request.request else {
            return None;
        };
        let session = session_as_written(call.params.arguments.as_ref());
        let next = || {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = turns.next(&caller.principal, session.unwrap_or_default());
            if session.is_none() {
                turn.brief()
            } else {
                turn
            }
        };
        Some(match arrival {
            Some(arrival) => arrival.in_order(next).await,
            None => next(),
        })
    }

    async fn has_room(&self, caller: &Caller) -> Result<(), Response<Body>> {
        if self.connections.has_room(&caller.principal) {
            return Ok(());
        }
        // The library ends connections by itself when they have not been used for long.
        let living = self.library.sessions.read().await;
        self.connections
            .forget_all_but(|id| living.contains_key(id));
        if self.connections.has_room(&caller.principal) {
            return Ok(());
        }
        let text = "too many connections are open; close one or try again later";
        Err((
            StatusCode::TOO_MANY_REQUESTS,
            [(header::RETRY_AFTER, "60")],
            text,
        )
            .into_response())
    }
}

/// Tells whether a request is of the revision without connections.
fn stands_alone(request: &Request<Body>) -> bool {
    let version = request
        .headers()
        .get("mcp-protocol-version")
        .and_then(|version| version.to_str().ok());
    version.is_some_and(|version| version >= ProtocolVersion::V_2026_07_28.as_str())
}

/// The one table of what messages need. What only asks how to go on is open to every known caller.
fn scope_of(toolbox: &dyn Toolbox, message: &ClientJsonRpcMessage) -> Option<Scope> {
    let JsonRpcMessage::Request(request) = message else {
        return None;
    };
    match &request.request {
        // An unknown tool is answered as such to whoever may see anything.
        ClientRequest::CallToolRequest(call) => Some(
            toolbox
                .find(&call.params.name)
                .map_or(Scope::Read, |tool| tool.scope),
        ),
        ClientRequest::InitializeRequest(_)
        | ClientRequest::PingRequest(_)
        | ClientRequest::DiscoverRequest(_)
        | ClientRequest::ListToolsRequest(_)
        | ClientRequest::ListPromptsRequest(_)
        | ClientRequest::GetPromptRequest(_) => None,
        ClientRequest::UpdateTaskRequest(_) | ClientRequest::CancelTaskRequest(_) => {
            Some(Scope::Execute)
        }
        _ => Some(Scope::Read),
    }
}

/// A request that may go on.
struct Admitted {
    request: Request<Body>,
    /// It opens a connection.
    opens: bool,
    /// What its body holds of the caller's share, if it has one.
    bytes: Option<BodyBytes>,
}

/// Reads what is left of a body, up to the size of the largest, and keeps nothing.
async fn discard(mut body: Body) {
    let mut left = MAX_BODY_BYTES;
    while left > 0 {
        let Some(Ok(frame)) = body.frame().await else {
            return;
        };
        left = left.saturating_sub(frame.data_ref().map_or(1, |data| data.len().max(1)));
    }
}

fn too_large(most: usize) -> Response<Body> {
    let text = match most {
        SMALL_BODY => format!(
            "such a message may have {most} bytes; only one that runs something may have more"
        ),
        _ => format!("a message may have {most} bytes"),
    };
    (StatusCode::PAYLOAD_TOO_LARGE, text).into_response()
}

fn crowded(by: Crowded) -> Response<Body> {
    let (status, text) = match by {
        Crowded::ByCaller => (
            StatusCode::TOO_MANY_REQUESTS,
            "too many bytes of your messages are under way; wait for some to be answered",
        ),
        Crowded::ByOthers => (
            StatusCode::SERVICE_UNAVAILABLE,
            "too many bytes of messages are under way; try again in a moment",
        ),
    };
    (status, [(header::RETRY_AFTER, "1")], text).into_response()
}

/// Ends a stream when the proof of identity that opened it stops being good, and gives the bytes of
/// its request back with it.
fn until<B>(body: B, expires: Option<SystemTime>, bytes: Option<BodyBytes>) -> Body
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    // What is whole already is only being written.
    if body.is_end_stream()
        || body.size_hint().exact().is_some()
        || (expires.is_none() && bytes.is_none())
    {
        return Body::new(body);
    }
    let left = |expires: SystemTime| {
        expires
            .duration_since(SystemTime::now())
            .unwrap_or_default()
    };
    let end = expires.map(|expires| Box::pin(tokio::time::sleep(left(expires))));
    Body::new(Until {
        body: Box::pin(body),
        end,
        _bytes: bytes,
    })
}

struct Until<B> {
    body: Pin<Box<B>>,
    end: Option<Pin<Box<Sleep>>>,
    _bytes: Option<BodyBytes>,
}

impl<B: HttpBody<Data = Bytes>> HttpBody for Until<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self
            .end
            .as_mut()
            .is_some_and(|end| end.as_mut().poll(context).is_ready())
        {
            return Poll::Ready(None);
        }
        self.body.as_mut().poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::McpSettings;
    use super::super::tools::{self, Catalogue};
    use super::*;

    /// A stream that says one thing and then nothing more.
    struct Talks(bool);

    impl HttpBody for Talks {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            if std::mem::take(&mut self.0) {
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data: 1\n\n")))))
            } else {
                Poll::Pending
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_when_the_token_that_opened_it_does() {
        let expires = SystemTime::now() + Duration::from_secs(60);
        let started = tokio::time::Instant::now();
        let said = until(Talks(true), Some(expires), None)
            .collect()
            .await
            .unwrap()
            .to_bytes();
        assert_eq!(said, "data: 1\n\n");
        assert!(
            (59..=61).contains(&started.elapsed().as_secs()),
            "{:?}",
            started.elapsed()
        );
        let endless = tokio::time::timeout(
            Duration::from_secs(3600),
            until(Talks(true), None, None).collect(),
        )
        .await;
        assert!(endless.is_err(), "the control: without an end it goes on");
    }

    #[tokio::test]
    async fn an_answer_that_is_whole_is_written_to_its_end() {
        let long_ago = SystemTime::now() - Duration::from_secs(60);
        assert_eq!(
            until(Body::from("whole"), Some(long_ago), None)
                .collect()
                .await
                .unwrap()
                .to_bytes(),
            "whole"
        );
    }

    #[test]
    fn every_tool_names_its_scope_and_looking_needs_less_than_doing() {
        let catalogue = Catalogue::new(&McpSettings::default());
        let needs =
            |text: &str| scope_of(&catalogue, &read_message(text.as_bytes()).unwrap().unwrap());
        let call = |tool: &str| {
            needs(&format!(
                r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}"}}}}"#
            ))
        };
        for (tool, scope) in tools::tests::scopes() {
            assert_eq!(call(tool), Some(scope));
        }
        assert_eq!(call("no_such_tool"), Some(Scope::Read));
        assert_eq!(
            needs(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#),
            None
        );
        assert_eq!(
            needs(r#"{"jsonrpc":"2.0","id":1,"method":"resources/list"}"#),
            Some(Scope::Read)
        );
        assert_eq!(
            needs(r#"{"jsonrpc":"2.0","id":1,"method":"what/ever"}"#),
            Some(Scope::Read)
        );
    }

    #[derive(Clone)]
    struct Silent;

    impl ServerHandler for Silent {}

    fn endpoint() -> Endpoint<Silent> {
        let catalogue = Catalogue::new(&McpSettings::default());
        let keeping = Keeping {
            idle: Duration::from_secs(60),
            folder: None,
        };
        Endpoint::new(
            Silent,
            move |message| scope_of(&catalogue, message),
            keeping,
            CancellationToken::new(),
        )
    }

    fn caller(principal: &str, scopes: &[Scope]) -> Caller {
        Caller {
            principal: principal.to_owned(),
            scopes: scopes.iter().copied().collect(),
            expires: None,
        }
    }

    /// A body that comes in pieces of 32 KiB, and counts how many were taken.
    struct Pieces(Bytes, Arc<std::sync::atomic::AtomicUsize>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            let size = self.0.len().min(32 * 1024);
            self.1.fetch_add(size, std::sync::atomic::Ordering::Relaxed);
            Poll::Ready((size > 0).then(|| Ok(Frame::data(self.0.split_to(size)))))
        }
    }

    /// Posts a message and returns the answer and how many bytes of the message were taken.
    async fn post(
        endpoint: &Endpoint<Silent>,
        caller: &Caller,
        message: String,
    ) -> (Response<Body>, usize) {
        let taken = Arc::default();
        let body = Body::new(Pieces(message.into(), Arc::clone(&taken)));
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        request.extensions_mut().insert(caller.clone());
        let response = endpoint.answer(request).await;
        (response, taken.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn cell(first: &str, code: usize) -> String {
        let code = "x".repeat(code);
        let params = format!(r#"{{{first}"arguments":{{"code":"{code}"}}}}"#);
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#)
    }

    #[tokio::test]
    async fn whoever_may_only_look_sends_little_and_the_scope_is_checked_before_the_rest_is_read() {
        let endpoint = endpoint();
        let (reads, runs) = (caller("r", &[Scope::Read]), caller("x", &[Scope::Execute]));
        let named = cell(r#""name":"execute_ipython_cell","#, 4 << 20);
        let (refused, taken) = post(&endpoint, &reads, named.clone()).await;
        assert_eq!(refused.status(), StatusCode::FORBIDDEN);
        assert!(taken <= 2 * SMALL_BODY, "{taken} bytes were read");
        // A message that does not say soon what it wants is not read either.
        let (refused, taken) = post(&endpoint, &reads, cell("", 4 << 20)).await;
        assert_eq!(refused.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert!(taken <= 2 * SMALL_BODY, "{taken} bytes were read");
        // The controls: short messages of the one, long messages of the other.
        let (looked, _) = post(&endpoint, &reads, cell(r#""name":"list_sessions","#, 1000)).await;
        assert_ne!(looked.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert_ne!(looked.status(), StatusCode::FORBIDDEN);
        let size = named.len();
        let (ran, taken) = post(&endpoint, &runs, named).await;
        assert_eq!(taken, size);
        assert!(
            ![StatusCode::FORBIDDEN, StatusCode::PAYLOAD_TOO_LARGE].contains(&ran.status()),
            "{ran:?}"
        );
    }

    #[tokio::test]
    async fn bodies_under_way_are_bounded_for_each_caller() {
        let endpoint = endpoint();
        let (greedy, other) = (
            caller("a", &[Scope::Execute]),
            caller("b", &[Scope::Execute]),
        );
        let unfinished = || {
            let announced = http_body_util::StreamBody::new(futures_util::stream::pending::<
                Result<Frame<Bytes>, axum::Error>,
            >());
            let mut request = Request::new(Body::new(Announced(announced, 8 << 20)));
            *request.method_mut() = Method::POST;
            request.extensions_mut().insert(greedy.clone());
            let endpoint = endpoint.clone();
            Box::pin(async move { endpoint.answer(request).await })
        };
        let mut waiting = (0..200).map(|_| unfinished()).collect::<Vec<_>>();
        let mut refused = Vec::new();
        waiting.retain_mut(
            |answer| match futures_util::FutureExt::now_or_never(answer) {
                Some(response) => {
                    refused.push(response);
                    false
                }
                None => true,
            },
        );
        assert_eq!(
            waiting.len(),
            5,
            "as many as have room in a third of 128 MiB"
        );
        for response in &refused {
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        }
        let (served, _) = post(&endpoint, &other, cell(r#""name":"reset","#, 1 << 20)).await;
        assert_ne!(
            served.status(),
            StatusCode::SERVICE_UNAVAILABLE,
            "the control: another caller"
        );
        drop(waiting);
        assert!(
            futures_util::FutureExt::now_or_never(unfinished()).is_none(),
            "what was given up is given back"
        );
    }

    /// A body with a `Content-Length`.
    struct Announced<B>(B, u64);

    impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Announced<B> {
        type Data = Bytes;
        type Error = B::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
            Pin::new(&mut self.0).poll_frame(context)
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.1)
        }
    }

    #[tokio::test]
    async fn what_a_client_says_of_itself_is_short() {
        let endpoint = endpoint();
        let greeting = |name: usize| {
            let info = json!({"name": "n".repeat(name), "version": "1"});
            let params =
                json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info});
            json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).to_string()
        };
        let runs = caller("x", &[Scope::Execute]);
        assert_eq!(
            post(&endpoint, &runs, greeting(100_000)).await.0.status(),
            StatusCode::PAYLOAD_TOO_LARGE
        );
        assert_ne!(
            post(&endpoint, &runs, greeting(10)).await.0.status(),
            StatusCode::PAYLOAD_TOO_LARGE
        );
    }
}
