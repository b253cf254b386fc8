//! Tests with remote servers: streamable HTTP of both eras, the older event stream, redirects,
//! addresses, and failures.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::IntoFuture;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{any, get, post};
use cellblock_egress::name::HostName;
use cellblock_egress::resolve::{BoxFuture, Resolver};
use futures_util::stream::{self, StreamExt};
use rmcp::model::{
    CallToolRequestParams, CallToolResult, ContentBlock, ErrorData, ListToolsResult,
    PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{RoleServer, ServerHandler};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::fixtures::{ServerScript, call, call_with, name, settings};
use crate::greeting::told;
use crate::{
    AddressPolicy, CallError, CallErrorCode, CallOptions, ConnectError, ConnectSettings, Era,
    Owner, RegisterError, Registry, ServerParams, Upstream,
};

/// A server on this machine, stopped on drop.
struct Local {
    address: SocketAddr,
    task: JoinHandle<io::Result<()>>,
}

impl Drop for Local {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Local {
    async fn serve(router: Router) -> Local {
        Local::serve_at("127.0.0.1:0".parse().unwrap(), router).await
    }

    async fn serve_at(address: SocketAddr, router: Router) -> Local {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        Local {
            address,
            task: tokio::spawn(axum::serve(listener, router).into_future()),
        }
    }

    /// Stops it and waits until its listener is closed.
    async fn end(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }

    fn params(&self, path: &str, more: Value) -> ServerParams {
        let mut params = json!({"url": format!("http://{}{path}", self.address)});
        params
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        ServerParams::parse(&params).unwrap()
    }
}

async fn connect(params: &ServerParams) -> Result<Upstream, ConnectError> {
    Upstream::connect(&name("fixture"), params, &settings()).await
}

/// A server made with rmcp.
#[derive(Clone)]
struct Library {
    headers: Arc<Mutex<Vec<HeaderMap>>>,
}

impl ServerHandler for Library {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}});
        let tools = ["echo", "slow", "steps"].map(|name| {
            Tool::new(
                name,
                "A tool.",
                Arc::new(schema.as_object().unwrap().clone()),
            )
        });
        Ok(ListToolsResult::with_all_items(tools.to_vec()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<rmcp::model::CallToolResponse, ErrorData> {
        if let Some(parts) = context.extensions.get::<axum::http::request::Parts>() {
            self.headers.lock().unwrap().push(parts.headers.clone());
        }
        match &*request.name {
            "slow" => std::future::pending::<()>().await,
            "steps" => {
                let token = context.meta.get_progress_token().unwrap();
                context
                    .peer
                    .notify_progress(ProgressNotificationParam::new(token, 1.0))
                    .await
                    .unwrap();
            }
            _ => {}
        }
        let text = request
            .arguments
            .unwrap_or_default()
            .remove("text")
            .unwrap_or_default();
        let result = CallToolResult::success(vec![ContentBlock::text(
            text.as_str().unwrap_or_default().to_owned(),
        )]);
        Ok(result.into())
    }
}

fn library() -> (Router, Library) {
    let server = Library {
        headers: Arc::default(),
    };
    let made = server.clone();
    let service = StreamableHttpService::new(
        move || Ok(made.clone()),
        Arc::new(LocalSessionManager::default()),
        StreamableHttpServerConfig::default(),
    );
    (Router::new().nest_service("/mcp", service), server)
}

#[tokio::test]
async fn a_server_made_with_a_library_is_called_with_our_headers() {
    let (router, library) = library();
    let server = Local::serve(router).await;
    let params = server.params(
        "/mcp",
        json!({"headers": {"Authorization": "Bearer ${TOKEN}"}}),
    );
    let upstream = connect(&params).await.unwrap();
    assert_eq!(upstream.info().era, Some(Era::Modern));
    let reply = call(&upstream, "echo", json!({"text": "hello"}))
        .await
        .unwrap();
    assert_eq!(reply.content, [json!({"type": "text", "text": "hello"})]);
    let headers = library.headers.lock().unwrap();
    assert_eq!(headers[0]["authorization"], "Bearer hunter2-token");
    assert!(!format!("{upstream:?} {:?}", upstream.info()).contains("hunter2"));
}

#[tokio::test]
async fn calls_over_http_run_at_a_time_and_can_be_cancelled() {
    let (router, _) = library();
    let server = Local::serve(router).await;
    let upstream = connect(&server.params("/mcp", json!({}))).await.unwrap();
    let cancel = CancellationToken::new();
    let options = CallOptions {
        cancel: cancel.clone(),
        ..CallOptions::default()
    };
    let slow = tokio::spawn({
        let upstream = upstream.clone();
        async move { call_with(&upstream, "slow", json!({}), options).await }
    });
    let steps = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&steps);
    let progress: crate::ProgressSink = Arc::new(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
    });
    let options = CallOptions {
        progress: Some(progress),
        ..CallOptions::default()
    };
    call_with(&upstream, "steps", json!({}), options)
        .await
        .unwrap();
    assert_eq!(steps.load(Ordering::SeqCst), 1);
    assert!(!slow.is_finished());
    cancel.cancel();
    assert_eq!(slow.await.unwrap(), Err(CallError::Cancelled));
}

/// A server of the older era, without a library. Its responses are plain JSON.
struct Plain {
    script: Mutex<ServerScript>,
    session: Mutex<usize>,
    largest: usize,
}

fn plain(script: Value) -> Arc<Plain> {
    Arc::new(Plain {
        script: Mutex::new(ServerScript::new(script)),
        session: Mutex::new(0),
        largest: 1_000_000_000,
    })
}

fn plain_router(server: Arc<Plain>) -> Router {
    Router::new()
        .route("/mcp", post(plain_post))
        .with_state(server)
}

async fn plain_post(
    State(server): State<Arc<Plain>>,
    headers: HeaderMap,
    body: String,
) -> Response {
    let message: Value = serde_json::from_str(&body).unwrap();
    let session = *server.session.lock().unwrap();
    let known = headers
        .get("mcp-session-id")
        .map(|value| value.to_str().unwrap().to_owned());
    match message["method"].as_str() {
        Some("server/discover") => {
            return (StatusCode::BAD_REQUEST, "Bad Request: No valid session").into_response();
        }
        Some("initialize") => {}
        _ if known != Some(session.to_string()) => return StatusCode::NOT_FOUND.into_response(),
        _ => {}
    }
    if message["params"]["name"] == "fails" {
        return (StatusCode::INTERNAL_SERVER_ERROR, "oh").into_response();
    }
    let mut answers = server.script.lock().unwrap().answer(&message);
    match answers.pop() {
        None => StatusCode::ACCEPTED.into_response(),
        Some(answer) => {
            assert!(answer.to_string().len() < server.largest);
            let headers = [
                ("content-type", "application/json".to_owned()),
                ("mcp-session-id", session.to_string()),
            ];
            (headers, answer.to_string()).into_response()
        }
    }
}

#[tokio::test]
async fn a_session_that_the_server_forgot_is_begun_anew_and_its_tools_compared() {
    let server = plain(json!({}));
    let local = Local::serve(plain_router(Arc::clone(&server))).await;
    let upstream = connect(&local.params("/mcp", json!({}))).await.unwrap();
    assert_eq!(upstream.info().era, Some(Era::Legacy));
    assert!(call(&upstream, "echo", json!({"text": "a"})).await.is_ok());
    *server.session.lock().unwrap() += 1;
    assert!(call(&upstream, "echo", json!({"text": "b"})).await.is_ok());
    // And with different tools.
    call(&upstream, "change", json!({})).await.unwrap();
    *server.session.lock().unwrap() += 1;
    let error = call(&upstream, "echo", json!({"text": "c"}))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::ToolChanged { .. }), "{error}");
}

#[tokio::test]
async fn answers_over_http_are_bounded_and_fail_alone() {
    let local = Local::serve(plain_router(plain(json!({})))).await;
    let mut settings = settings();
    settings.limits.largest_message = 100_000;
    let upstream = Upstream::connect(
        &name("fixture"),
        &local.params("/mcp", json!({})),
        &settings,
    )
    .await
    .unwrap();
    let error = call(&upstream, "big", json!({"bytes": 200_000}))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), CallErrorCode::TooLarge, "{error}");
    assert!(
        call(&upstream, "big", json!({"bytes": 90_000}))
            .await
            .is_ok()
    );
    let error = call(&upstream, "fails", json!({})).await.unwrap_err();
    assert_eq!(error.reason(), CallErrorCode::Protocol, "{error}");
    assert!(error.to_string().contains("500"), "{error}");
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_told_from_a_call_that_was_lost() {
    let server = plain(json!({}));
    let local = Local::serve(plain_router(Arc::clone(&server))).await;
    let address = local.address;
    let upstream = connect(&local.params("/mcp", json!({}))).await.unwrap();
    local.end().await;
    // Open connections are closed one by one.
    let error = loop {
        match call(&upstream, "echo", json!({})).await {
            Ok(_) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert_eq!(error.reason(), CallErrorCode::Unavailable, "{error}");
    assert!(!error.to_string().contains("/mcp"), "{error}");
    // Control: the server is back at the same address.
    let _local = Local::serve_at(address, plain_router(server)).await;
    while call(&upstream, "echo", json!({})).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn no_redirect_is_followed_and_no_header_goes_elsewhere() {
    let seen: Arc<AtomicUsize> = Arc::default();
    let counted = Arc::clone(&seen);
    let other = Router::new().fallback(any(move || {
        counted.fetch_add(1, Ordering::SeqCst);
        async { "hello" }
    }));
    let other = Local::serve(other).await;
    let target = format!("http://{}/mcp", other.address);
    let local = Router::new()
        .route(
            "/moved",
            any({
                let target = target.clone();
                move || async move { Redirect::temporary(&target) }
            }),
        )
        .route(
            "/found",
            any(move || async move { (StatusCode::FOUND, [("location", target)]) }),
        );
    let local = Local::serve(local).await;
    for (path, kind) in [("/moved", "http"), ("/found", "http"), ("/moved", "sse")] {
        let params = local.params(path, json!({"type": kind, "headers": {"X-Key": "secret"}}));
        let error = connect(&params).await.unwrap_err();
        assert!(
            told(&error).contains("wants to be asked elsewhere"),
            "{path} {kind}: {error}"
        );
    }
    assert_eq!(seen.load(Ordering::SeqCst), 0);
    // Control: a direct request reaches the other server.
    connect(&other.params("/mcp", json!({}))).await.unwrap_err();
    assert!(seen.load(Ordering::SeqCst) > 0);
}

#[tokio::test]
async fn credentials_that_are_refused_are_a_plain_error() {
    let local =
        Local::serve(Router::new().fallback(any(|| async { StatusCode::UNAUTHORIZED }))).await;
    for kind in ["http", "sse"] {
        let params = local.params(
            "/mcp",
            json!({"type": kind, "headers": {"Authorization": "Bearer ${TOKEN}"}}),
        );
        let error = connect(&params).await.unwrap_err();
        assert_eq!(
            told(&error),
            "the server cannot be used: it does not accept the credentials (status 401)"
        );
    }
}

#[tokio::test]
async fn no_error_shows_a_url() {
    let local = Local::serve(Router::new()).await;
    let address = local.address;
    local.end().await;
    for kind in ["http", "sse"] {
        let url = format!("http://{address}/s3cr3t?key=s3cr3t");
        let error = connect(&ServerParams::parse(&json!({"url": url, "type": kind})).unwrap())
            .await
            .unwrap_err();
        let printed = format!("{} {error:?}", told(&error));
        assert!(
            printed.contains("refused") && !printed.contains("s3cr3t"),
            "{printed}"
        );
    }
}

#[tokio::test]
async fn a_server_that_speaks_something_else_is_refused() {
    let page = || async { ([("content-type", "text/html")], "<html>") };
    let local = Local::serve(
        Router::new()
            .route("/page", any(page))
            .route("/none", any(|| async { StatusCode::NOT_FOUND })),
    )
    .await;
    for (path, kind) in [
        ("/page", "http"),
        ("/page", "sse"),
        ("/none", "http"),
        ("/none", "sse"),
    ] {
        assert!(
            connect(&local.params(path, json!({"type": kind})))
                .await
                .is_err(),
            "{path} {kind}"
        );
    }
}

/// Resolves every name to one address.
struct Here;

impl Resolver for Here {
    fn resolve<'a>(&'a self, _name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async { Ok(vec![IpAddr::from([127, 0, 0, 1])]) })
    }
}

fn public_only(allowed: &[&str]) -> ConnectSettings {
    let allowed = allowed.iter().map(|name| (*name).to_owned()).collect();
    ConnectSettings {
        addresses: AddressPolicy::PublicOnly { allowed },
        resolver: Arc::new(Here),
        ..settings()
    }
}

#[tokio::test]
async fn private_addresses_are_dialled_only_for_hosts_that_are_listed() {
    let (router, library) = library();
    // The library accepts only local names, so the test uses one of those.
    let server = Local::serve(router).await;
    let port = server.address.port();
    for (host, kind) in [
        ("127.0.0.1", "http"),
        ("localhost", "http"),
        ("mcp.example.com", "http"),
        ("mcp.example.com", "sse"),
    ] {
        let params =
            ServerParams::parse(&json!({"url": format!("http://{host}:{port}/mcp"), "type": kind}))
                .unwrap();
        let error = Upstream::connect(&name("fixture"), &params, &public_only(&[]))
            .await
            .unwrap_err();
        let error = told(&error);
        assert!(
            error.contains("only public addresses may be used"),
            "{host}: {error}"
        );
    }
    assert!(library.headers.lock().unwrap().is_empty());
    // Control.
    for host in ["127.0.0.1", "localhost"] {
        let params =
            ServerParams::parse(&json!({"url": format!("http://{host}:{port}/mcp")})).unwrap();
        let upstream = Upstream::connect(
            &name("fixture"),
            &params,
            &public_only(&["127.0.0.1", "localhost"]),
        )
        .await
        .unwrap();
        assert!(call(&upstream, "echo", json!({})).await.is_ok(), "{host}");
    }
}

#[tokio::test]
async fn an_owner_has_so_many_servers_and_no_more() {
    let local = Local::serve(plain_router(plain(json!({"list": "pages"})))).await;
    let registry = Registry::new();
    let params = local.params("/mcp", json!({}));
    let owner = Owner::One("alice".to_owned());
    let register = async |owner: &Owner, number: usize| {
        registry
            .register(owner, &name(&format!("s{number}")), &params, &settings())
            .await
    };
    for number in 0..50 {
        register(&owner, number).await.unwrap();
    }
    assert!(matches!(
        register(&owner, 50).await,
        Err(RegisterError::TooMany)
    ));
    // Controls: as a replacement, for another owner, and after one was removed.
    assert!(register(&owner, 49).await.is_ok());
    assert!(register(&Owner::One("bob".to_owned()), 50).await.is_ok());
    assert!(registry.unregister(&owner, "s0"));
    assert!(register(&owner, 50).await.is_ok());
}

/// A server with the older transport.
#[derive(Clone, Default)]
struct Older {
    streams: Arc<Mutex<HashMap<usize, OlderStream>>>,
    endpoint: Option<String>,
}

type OlderStream = (mpsc::UnboundedSender<Value>, Arc<Mutex<ServerScript>>);

impl Older {
    fn router(self) -> Router {
        Router::new()
            .route("/sse", get(older_stream))
            .route("/post/{session}", post(older_post))
            .with_state(self)
    }
}

async fn older_stream(State(server): State<Older>) -> impl IntoResponse {
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut streams = server.streams.lock().unwrap();
    let session = streams.len();
    streams.insert(
        session,
        (sender, Arc::new(Mutex::new(ServerScript::new(json!({}))))),
    );
    let endpoint = server
        .endpoint
        .clone()
        .unwrap_or_else(|| format!("/post/{session}"));
    let first = stream::iter([
        Event::default().comment("hello"),
        Event::default().event("endpoint").data(endpoint),
    ]);
    let messages = stream::unfold(receiver, |mut receiver| async move {
        let message = receiver.recv().await?;
        Some((
            Event::default().event("message").data(message.to_string()),
            receiver,
        ))
    });
    Sse::new(first.chain(messages).map(Ok::<Event, Infallible>))
}

async fn older_post(
    State(server): State<Older>,
    axum::extract::Path(session): axum::extract::Path<usize>,
    body: String,
) -> StatusCode {
    let message: Value = serde_json::from_str(&body).unwrap();
    let (sender, script) = server.streams.lock().unwrap()[&session].clone();
    for answer in script.lock().unwrap().answer(&message) {
        let _ = sender.send(answer);
    }
    StatusCode::ACCEPTED
}

#[tokio::test]
async fn the_older_event_stream_is_spoken() {
    let server = Older::default();
    let local = Local::serve(server.clone().router()).await;
    let mut settings = settings();
    settings.limits.largest_message = 100_000;
    let upstream = Upstream::connect(
        &name("fixture"),
        &local.params("/sse", json!({})),
        &settings,
    )
    .await
    .unwrap();
    assert_eq!(upstream.info().era, Some(Era::Legacy));
    assert_eq!(
        call(&upstream, "echo", json!({"text": "é"}))
            .await
            .unwrap()
            .structured,
        Some(json!({"text": "é"}))
    );
    let error = call(&upstream, "big", json!({"bytes": 200_000}))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), CallErrorCode::TooLarge, "{error}");
    // A stream that ends during a call loses the call, and the next call opens a new stream.
    let lost = tokio::spawn({
        let upstream = upstream.clone();
        async move { call(&upstream, "slow", json!({})).await }
    });
    call(&upstream, "echo", json!({})).await.unwrap();
    server.streams.lock().unwrap().remove(&0);
    let error = lost.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Interrupted { .. }), "{error}");
    server.streams.lock().unwrap().clear();
    assert!(call(&upstream, "echo", json!({})).await.is_ok());
}

#[tokio::test]
async fn an_event_stream_that_sends_us_elsewhere_is_refused() {
    let other = Local::serve(Older::default().router()).await;
    let endpoint = Some(format!("http://{}/post/0", other.address));
    let local = Local::serve(
        Older {
            endpoint,
            ..Older::default()
        }
        .router(),
    )
    .await;
    let error = connect(&local.params("/sse", json!({"headers": {"X-Key": "secret"}})))
        .await
        .unwrap_err();
    assert!(told(&error).contains("another origin"), "{error}");
}

#[tokio::test]
async fn a_server_that_dies_in_the_middle_of_an_answer_loses_only_that_call() {
    let deaths: Arc<AtomicUsize> = Arc::default();
    let server = plain(json!({}));
    let counted = Arc::clone(&deaths);
    let router = Router::new().route(
        "/mcp",
        post(
            move |State(server): State<Arc<Plain>>, headers: HeaderMap, body: String| {
                let counted = Arc::clone(&counted);
                async move {
                    if !body.contains("\"die\"") {
                        return plain_post(State(server), headers, body).await;
                    }
                    counted.fetch_add(1, Ordering::SeqCst);
                    let broken =
                        stream::iter([Ok("{\"jsonrpc\": "), Err(io::Error::other("the end"))]);
                    (
                        [("content-type", "application/json")],
                        Body::from_stream(broken),
                    )
                        .into_response()
                }
            },
        ),
    );
    let local = Local::serve(router.with_state(server)).await;
    let upstream = connect(&local.params("/mcp", json!({}))).await.unwrap();
    let error = call(&upstream, "die", json!({})).await.unwrap_err();
    assert!(matches!(error, CallError::Interrupted { .. }), "{error}");
    assert_eq!(deaths.load(Ordering::SeqCst), 1);
    assert!(call(&upstream, "echo", json!({})).await.is_ok());
}

#[tokio::test]
async fn a_stream_that_ends_without_an_answer_ends_the_call() {
    let router = Router::new().route(
        "/mcp",
        post(
            |State(server): State<Arc<Plain>>, headers: HeaderMap, body: String| async move {
                if !body.contains("\"die\"") {
                    return plain_post(State(server), headers, body).await;
                }
                ([("content-type", "text/event-stream")], ": nothing\n\n").into_response()
            },
        ),
    );
    let local = Local::serve(router.with_state(plain(json!({})))).await;
    let upstream = connect(&local.params("/mcp", json!({}))).await.unwrap();
    let options = CallOptions {
        time: Some(Duration::from_secs(20)),
        ..CallOptions::default()
    };
    let error = call_with(&upstream, "die", json!({}), options)
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::Interrupted { .. }), "{error}");
}
