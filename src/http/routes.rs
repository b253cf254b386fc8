//! The table of paths, and the checks before each.
//!
//! | path | access |
//! |---|---|
//! | `/mcp` | a caller; `mcp::http` decides what the message needs |
//! | `/sessions/{id}/files` | a caller with `sessions:read` |
//! | `/sessions/{id}/files/{path}` | a caller with `sessions:read`; `python:execute` to write |
//! | `/metrics` | a caller with `admin` |
//! | `/.well-known/oauth-protected-resource…` | public: it names the issuers of tokens |
//! | `/healthz`, `/readyz` | public: they contain no data about callers |
//!
//! Names and origins are checked before all of them.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse;
use axum::routing::{any, get};
use serde_json::Value;

use super::connections::Peer;
use super::files;
use super::guard::Allowed;
use super::table::OpenConnection;
use crate::audit::{Audit, AuthenticationRefused, Event};
use crate::auth::{Authenticator, Caller, Denied, Scope, require};
use crate::mcp::http::{Endpoint, Handler};
use crate::ops::{self, Host, HostExt};
use crate::session::Principal;
use crate::telemetry::{Health, Metrics};

/// The path of the protected-resource metadata; the path of the endpoint may follow.
const METADATA: &str = "/.well-known/oauth-protected-resource";

/// The endpoint's path.
pub const ENDPOINT: &str = "/mcp";

/// How long a browser may cache a preflight response.
const PREFLIGHT_AGE: HeaderValue = HeaderValue::from_static("600");

/// Everything that routes need.
pub struct Routes<H> {
    pub endpoint: Endpoint<H>,
    pub allowed: Allowed,
    pub authenticator: Authenticator,
    /// The URL by which callers know this server, without a path: `https://cells.example.com`.
    pub public_url: String,
    /// Sessions whose files have routes, and whose number is among the metrics.
    pub sessions: Option<Arc<dyn Host>>,
    pub health: Health,
    pub metrics: Metrics,
    pub audit: Audit,
}

#[derive(Clone)]
struct Doors {
    allowed: Arc<Allowed>,
    authenticator: Authenticator,
    metadata_url: Arc<str>,
    metrics: Metrics,
    audit: Audit,
}

impl<H: Handler> Routes<H> {
    /// Creates the router.
    pub fn router(self) -> Router {
        let Routes {
            endpoint,
            allowed,
            authenticator,
            public_url,
            sessions,
            health,
            metrics,
            audit,
        } = self;
        let doors = Doors {
            allowed: Arc::new(allowed),
            authenticator: authenticator.clone(),
            metadata_url: format!("{public_url}{METADATA}{ENDPOINT}").into(),
            metrics: metrics.clone(),
            audit,
        };
        let counted = sessions.clone();
        let closed = Router::new()
            .route(
                ENDPOINT,
                any(move |request: Request| async move { endpoint.answer(request).await }),
            )
            .route(
                "/metrics",
                get(move |request: Request| figures(request, metrics, counted)),
            )
            .merge(sessions.map(files::routes).unwrap_or_default())
            .layer(middleware::from_fn_with_state(doors.clone(), identified));
        let resource = format!("{public_url}{ENDPOINT}");
        let metadata =
            move || async move { json(StatusCode::OK, &authenticator.metadata(&resource)) };
        Router::new()
            .route(METADATA, get(metadata.clone()))
            .route(&format!("{METADATA}{ENDPOINT}"), get(metadata))
            .route("/healthz", get(|| async { "ok\n" }))
            .route(
                "/readyz",
                get(move || async move { readiness(health.ready()) }),
            )
            .merge(closed)
            .fallback(|| async {
                (
                    StatusCode::NOT_FOUND,
                    "there is nothing here; MCP is at /mcp\n",
                )
            })
            .layer(middleware::from_fn_with_state(doors, guarded))
    }
}

impl Doors {
    /// Records a rejected caller, without any content of its request.
    fn turned_away(&self, denied: &Denied, peer: Option<Peer>) {
        self.metrics.authenticated("refused");
        let peer = peer.map(|Peer(address)| address.ip().to_string().into());
        let reason = denied.to_string();
        let details = AuthenticationRefused {
            reason: reason.clone().into(),
            peer,
        };
        self.audit.note(Event::new(details).denied(reason));
    }
}

/// Checks names and origins, and adds the CORS headers for listed origins.
async fn guarded(State(doors): State<Doors>, request: Request, next: Next) -> Response<Body> {
    if let Err(refusal) = doors.allowed.check(request.uri(), request.headers()) {
        tracing::warn!(%refusal, "a request was refused by its names");
        doors.metrics.request("refused", refusal.status().as_u16());
        return (refusal.status(), format!("{refusal}\n")).into_response();
    }
    let route = route_of(request.uri().path());
    let origin = doors.allowed.listed_origin(request.headers()).cloned();
    let mut response = match &origin {
        Some(_) if is_preflight(&request) => preflight(),
        _ => next.run(request).await,
    };
    doors.metrics.request(route, response.status().as_u16());
    let headers = response.headers_mut();
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("mcp-session-id, www-authenticate"),
        );
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    response
}

/// The name of a route in metrics. All unknown paths share one name.
fn route_of(path: &str) -> &'static str {
    match path {
        ENDPOINT => ENDPOINT,
        "/metrics" => "/metrics",
        "/healthz" => "/healthz",
        "/readyz" => "/readyz",
        path if path.starts_with("/sessions/") => "/sessions",
        path if path.starts_with(METADATA) => METADATA,
        _ => "other",
    }
}

fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight() -> Response<Body> {
    const HEADERS: HeaderValue = HeaderValue::from_static(
        "authorization, content-type, accept, last-event-id, mcp-session-id, mcp-protocol-version, \
         mcp-method, mcp-name, \
         mcp-param-session-id, content-range, range, if-range, if-none-match",
    );
    let headers: [(HeaderName, HeaderValue); 3] = [
        (
            header::ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, POST, PUT, DELETE"),
        ),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, HEADERS),
        (header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// Identifies the caller, or responds with a challenge that states where to get a token.
async fn identified(
    State(doors): State<Doors>,
    mut request: Request,
    next: Next,
) -> Response<Body> {
    let peer = request.extensions().get::<Peer>().copied();
    let caller = match doors.authenticator.authenticate(request.headers()).await {
        Ok(caller) => caller,
        Err(denied) => {
            tracing::warn!(
                status = denied.status().as_u16(),
                "a request without a good token was refused"
            );
            doors.turned_away(&denied, peer);
            return challenged(
                json(denied.status(), &denied.body()),
                &denied,
                &doors.metadata_url,
            );
        }
    };
    doors.metrics.authenticated("accepted");
    if let Some(connection) = request.extensions().get::<OpenConnection>() {
        connection.authenticated();
    }
    // No later handler needs the token, and a removed header cannot be passed on.
    request.headers_mut().remove(header::AUTHORIZATION);
    request.extensions_mut().insert(caller);
    let response = next.run(request).await;
    match response.extensions().get::<Denied>().cloned() {
        Some(denied) => {
            doors.turned_away(&denied, peer);
            challenged(response, &denied, &doors.metadata_url)
        }
        None => response,
    }
}

fn challenged(mut response: Response<Body>, denied: &Denied, metadata_url: &str) -> Response<Body> {
    match denied.challenge(metadata_url) {
        Some(challenge) => drop(
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, challenge),
        ),
        // The signing keys are currently unavailable, which is not the caller's fault.
        None => drop(
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("5")),
        ),
    }
    response
}

async fn figures(
    request: Request,
    metrics: Metrics,
    sessions: Option<Arc<dyn Host>>,
) -> Response<Body> {
    let Some(caller) = request.extensions().get::<Caller>().cloned() else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    drop(request);
    match require(&caller, Scope::Admin) {
        Ok(()) => {
            if let Some(sessions) = sessions {
                let load = sessions
                    .run(&Principal::operator(), ops::GetLoad {})
                    .await
                    .unwrap_or_default();
                metrics.sessions_live(load.sessions);
                metrics.queue_length(load.waiting);
            }
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], metrics.render()).into_response()
        }
        Err(denied) => denied.into_response(),
    }
}

fn readiness(ready: Result<(), Vec<String>>) -> Response<Body> {
    match ready {
        Ok(()) => "ready\n".into_response(),
        Err(reasons) => {
            (StatusCode::SERVICE_UNAVAILABLE, reasons.join("\n") + "\n").into_response()
        }
    }
}

pub(crate) fn json(status: StatusCode, value: &Value) -> Response<Body> {
    (
        status,
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
}
