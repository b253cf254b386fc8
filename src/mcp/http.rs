//! MCP over HTTP: one endpoint, both protocol eras.
//!
//! ```text
//! request of a known caller → body (bounded, read strictly) → scope → owner of the connection → rmcp → answer or stream
//! ```
//!
//! Since 2026-07-28 every request stands alone, and whoever closes its stream cancels it. Older clients open a connection with
//! `initialize` and name it in each request; a stream that breaks cancels nothing, and what was missed is sent again on a new one. The
//! library does both. This file closes what it leaves open: who may use a connection, how many there are, what is malformed, which
//! right a request needs, and that a stream ends with the token that opened it.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use axum::body::Body;
use axum::http::{HeaderName, Method, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use rmcp::ServerHandler;
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ErrorCode, JsonRpcMessage, ProtocolVersion};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::Value;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use super::Server;
use super::connections::Connections;
use super::toolbox::Toolbox;
use super::wire::{Rejection, read_message};
use crate::auth::{Caller, Scope, require};
use crate::http::routes::forbidden;

/// Bytes in one body: room for the largest cell, and for nothing much larger. Files have routes of their own.
pub const LARGEST_BODY: usize = 8 * 1024 * 1024;

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

/// What a request needs, by the message in it. A message that needs nothing is open to every known caller.
type ScopeOf = Arc<dyn Fn(&ClientJsonRpcMessage) -> Option<Scope> + Send + Sync>;

/// Whatever answers messages.
pub trait Handler: ServerHandler + Clone + Send + Sync + 'static {}

impl<H: ServerHandler + Clone + Send + Sync + 'static> Handler for H {}

/// The endpoint, over whatever answers the messages. Cheap to clone.
pub struct Endpoint<H> {
    service: StreamableHttpService<H, LocalSessionManager>,
    library: Arc<LocalSessionManager>,
    connections: Arc<Connections>,
    scope_of: ScopeOf,
}

impl<H> Clone for Endpoint<H> {
    fn clone(&self) -> Endpoint<H> {
        let Endpoint { service, library, connections, scope_of } = self;
        Endpoint {
            service: service.clone(),
            library: library.clone(),
            connections: connections.clone(),
            scope_of: scope_of.clone(),
        }
    }
}

impl Endpoint<Server> {
    /// Makes the endpoint of our own tools.
    pub fn of(server: Server, keeping: Keeping, end: CancellationToken) -> Endpoint<Server> {
        let toolbox = server.shared.toolbox.clone();
        Endpoint::new(server, move |message| scope_of(&*toolbox, message), keeping, end)
    }
}

impl<H: Handler> Endpoint<H> {
    /// Makes the endpoint of any handler. The conformance tests have one of their own. `end` closes all streams.
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
            .with_max_request_body_bytes(LARGEST_BODY)
            .with_cancellation_token(end)
            // Names and origins are checked before a request comes here, and on every other route too.
            .disable_allowed_hosts()
            .disable_allowed_origins();
        config.session_store = Some(connections.clone());
        let service = StreamableHttpService::new(move || Ok(handler.clone()), library.clone(), config);
        Endpoint { service, library, connections, scope_of: Arc::new(scope_of) }
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
            && !self.connections.belongs_to(id.as_bytes(), &caller.principal)
        {
            // The same words that the library has for an unknown one.
            return (StatusCode::NOT_FOUND, "Not Found: Session not found").into_response();
        }
        let (request, opens) = match self.admit(request, &caller).await {
            Ok(admitted) => admitted,
            Err(refused) => return refused,
        };
        let closes = request.headers().get(CONNECTION).filter(|_| request.method() == Method::DELETE).cloned();
        let mut response = self.service.handle(request).await;
        if let Some(id) = response.headers().get(CONNECTION).filter(|_| opens) {
            self.connections.give(&String::from_utf8_lossy(id.as_bytes()), &caller.principal);
        }
        if let Some(id) = closes {
            self.connections.forget(&String::from_utf8_lossy(id.as_bytes()));
            if response.status() == StatusCode::ACCEPTED {
                // Some clients take any other success for a failure.
                *response.status_mut() = StatusCode::NO_CONTENT;
            }
        }
        response.map(|body| until(body, caller.expires))
    }

    /// Reads the message of a request and decides whether it may go on. Tells also whether it opens a connection.
    async fn admit(&self, request: Request<Body>, caller: &Caller) -> Result<(Request<Body>, bool), Response<Body>> {
        if request.method() != Method::POST {
            return match require(caller, Scope::Read) {
                Ok(()) => Ok((request, false)),
                Err(denied) => Err(forbidden(denied)),
            };
        }
        let (parts, body) = request.into_parts();
        let bytes = whole(body).await?;
        let rejected = |rejection: Rejection| {
            let is_unknown = rejection.code == ErrorCode::METHOD_NOT_FOUND.0;
            let status = if is_unknown { StatusCode::NOT_FOUND } else { StatusCode::BAD_REQUEST };
            (status, [(header::CONTENT_TYPE, "application/json")], rejection.line()).into_response()
        };
        let message = match read_message(&bytes) {
            Ok(Some(message)) => message,
            Ok(None) => {
                let text = "the body holds no message that can be answered";
                return Err(rejected(Rejection::new(Value::Null, ErrorCode::INVALID_REQUEST, text)));
            }
            Err(rejection) => return Err(rejected(rejection)),
        };
        if let Some(scope) = (self.scope_of)(&message) {
            require(caller, scope).map_err(forbidden)?;
        }
        let opens = matches!(&message, JsonRpcMessage::Request(request)
            if matches!(request.request, ClientRequest::InitializeRequest(_)));
        if opens {
            self.has_room(caller).await?;
        }
        Ok((Request::from_parts(parts, Body::from(bytes)), opens))
    }

    async fn has_room(&self, caller: &Caller) -> Result<(), Response<Body>> {
        if self.connections.has_room(&caller.principal) {
            return Ok(());
        }
        // The library ends connections by itself when they have not been used for long.
        let living = self.library.sessions.read().await;
        self.connections.forget_all_but(|id| living.contains_key(id));
        if self.connections.has_room(&caller.principal) {
            return Ok(());
        }
        let text = "too many connections are open; close one or try again later";
        Err((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "60")], text).into_response())
    }
}

/// Tells whether a request is of the revision without connections.
fn stands_alone(request: &Request<Body>) -> bool {
    let version = request.headers().get("mcp-protocol-version").and_then(|version| version.to_str().ok());
    version.is_some_and(|version| version >= ProtocolVersion::V_2026_07_28.as_str())
}

/// The one table of what messages need. What only asks how to go on is open to every known caller.
fn scope_of(toolbox: &dyn Toolbox, message: &ClientJsonRpcMessage) -> Option<Scope> {
    let JsonRpcMessage::Request(request) = message else { return None };
    match &request.request {
        // An unknown tool is answered as such to whoever may see anything.
        ClientRequest::CallToolRequest(call) => {
            Some(toolbox.find(&call.params.name).map_or(Scope::Read, |tool| tool.scope))
        }
        ClientRequest::InitializeRequest(_)
        | ClientRequest::PingRequest(_)
        | ClientRequest::DiscoverRequest(_)
        | ClientRequest::ListToolsRequest(_)
        | ClientRequest::ListPromptsRequest(_)
        | ClientRequest::GetPromptRequest(_) => None,
        ClientRequest::UpdateTaskRequest(_) | ClientRequest::CancelTaskRequest(_) => Some(Scope::Execute),
        _ => Some(Scope::Read),
    }
}

async fn whole(body: Body) -> Result<Bytes, Response<Body>> {
    match Limited::new(body, LARGEST_BODY).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let text = format!("a message may have {LARGEST_BODY} bytes");
            Err((StatusCode::PAYLOAD_TOO_LARGE, text).into_response())
        }
        Err(_) => Err((StatusCode::BAD_REQUEST, "the body could not be read to its end").into_response()),
    }
}

/// Ends a stream when the proof of identity that opened it stops being good.
fn until<B>(body: B, expires: Option<SystemTime>) -> Body
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    match expires {
        // What is whole already is only being written.
        Some(expires) if !body.is_end_stream() && body.size_hint().exact().is_none() => {
            let left = expires.duration_since(SystemTime::now()).unwrap_or_default();
            Body::new(Until { body: Box::pin(body), end: Box::pin(tokio::time::sleep(left)) })
        }
        _ => Body::new(body),
    }
}

struct Until<B> {
    body: Pin<Box<B>>,
    end: Pin<Box<Sleep>>,
}

impl<B: HttpBody<Data = Bytes>> HttpBody for Until<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if self.end.as_mut().poll(context).is_ready() {
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
    use super::super::tools::{Catalogue, ToolName};
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
        let said = until(Talks(true), Some(expires)).collect().await.unwrap().to_bytes();
        assert_eq!(said, "data: 1\n\n");
        assert!((59..=61).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
        let endless = tokio::time::timeout(Duration::from_secs(3600), until(Talks(true), None).collect()).await;
        assert!(endless.is_err(), "the control: without an end it goes on");
    }

    #[tokio::test]
    async fn an_answer_that_is_whole_is_written_to_its_end() {
        let long_ago = SystemTime::now() - Duration::from_secs(60);
        assert_eq!(until(Body::from("whole"), Some(long_ago)).collect().await.unwrap().to_bytes(), "whole");
    }

    #[test]
    fn every_tool_names_its_scope_and_looking_needs_less_than_doing() {
        let catalogue = Catalogue::new(&McpSettings::default());
        let needs = |text: &str| scope_of(&catalogue, &read_message(text.as_bytes()).unwrap().unwrap());
        let call = |tool: &str| {
            needs(&format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}"}}}}"#))
        };
        for tool in ToolName::ALL {
            assert_eq!(call(tool.as_str()), Some(tool.scope()));
        }
        assert_eq!(call("no_such_tool"), Some(Scope::Read));
        assert_eq!(needs(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#), None);
        assert_eq!(needs(r#"{"jsonrpc":"2.0","id":1,"method":"resources/list"}"#), Some(Scope::Read));
        assert_eq!(needs(r#"{"jsonrpc":"2.0","id":1,"method":"what/ever"}"#), Some(Scope::Read));
    }
}
