//! Streamable HTTP transport for rmcp, with limits.
//!
//! rmcp implements the protocol: sessions, headers, matching of responses to requests. This module
//! does the network I/O.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::stream::{BoxStream, StreamExt};
use http::{HeaderName, HeaderValue, Method, StatusCode};
use rmcp::model::{
    ClientJsonRpcMessage, ClientRequest, ErrorData, RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::streamable_http_client::{
    SseError, StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;

use crate::events;
use crate::web::{self, Web, WebError};
use crate::wire;

const SESSION: &str = "mcp-session-id";
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

type CallFailure = StreamableHttpError<WebError>;
type Headers = HashMap<HeaderName, HeaderValue>;

impl StreamableHttpClient for Web {
    type Error = WebError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _token: Option<String>,
        headers: Headers,
    ) -> Result<StreamableHttpPostResponse, CallFailure> {
        let body = serde_json::to_vec(&message)?;
        let request = self.with_headers(Method::POST, &uri, session.as_deref(), headers);
        let request = request.header(http::header::CONTENT_TYPE, JSON).body(body);
        let response = web::send(request).await.map_err(CallFailure::Client)?;
        let status = response.status();
        let asked = asked(&message);
        match () {
            () if status == StatusCode::ACCEPTED || status == StatusCode::NO_CONTENT => {
                Ok(StreamableHttpPostResponse::Accepted)
            }
            () if status == StatusCode::NOT_FOUND && session.is_some() => {
                Err(CallFailure::SessionExpired)
            }
            () if !status.is_success() => self.failed(response, &message, session.is_some()).await,
            // A notification has no response, whatever the server returns.
            () if asked.is_none() => Ok(StreamableHttpPostResponse::Accepted),
            () if web::is_type(&response, EVENTS) => {
                let session = session_of(&response);
                Ok(StreamableHttpPostResponse::Sse(
                    self.events(response),
                    session,
                ))
            }
            () if web::is_type(&response, JSON) => self.answered(response, asked).await,
            () => Err(CallFailure::Client(WebError::ContentType)),
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        _token: Option<String>,
        headers: Headers,
    ) -> Result<(), CallFailure> {
        let request = self.with_headers(Method::DELETE, &uri, Some(&session), headers);
        web::send(request)
            .await
            .map(drop)
            .map_err(CallFailure::Client)
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        _token: Option<String>,
        headers: Headers,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, CallFailure> {
        let mut request = self.with_headers(Method::GET, &uri, session.as_deref(), headers);
        if let Some(last_event) = last_event {
            request = request.header("last-event-id", last_event);
        }
        let response = web::send(request).await.map_err(CallFailure::Client)?;
        match response.status() {
            status if status.is_success() && web::is_type(&response, EVENTS) => {
                Ok(self.events(response))
            }
            // All of these mean that there is no such stream. Only this error stops rmcp from
            // retrying forever.
            status if status.is_client_error() || status.is_success() => {
                Err(CallFailure::ServerDoesNotSupportSse)
            }
            status => Err(CallFailure::Client(WebError::Status(status.as_u16()))),
        }
    }
}

impl Web {
    fn with_headers(
        &self,
        method: Method,
        uri: &str,
        session: Option<&str>,
        headers: Headers,
    ) -> reqwest::RequestBuilder {
        let accept = if method == Method::GET {
            EVENTS.to_owned()
        } else {
            format!("{JSON}, {EVENTS}")
        };
        let mut request = self
            .request(method, uri)
            .header(http::header::ACCEPT, accept);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        match session {
            Some(session) => request.header(SESSION, session),
            None => request,
        }
    }

    fn events(&self, response: reqwest::Response) -> BoxStream<'static, Result<Sse, SseError>> {
        events::of(response, self.largest)
            .map(|event| event.map_err(|error| SseError::Body(Box::new(error))))
            .boxed()
    }

    async fn answered(
        &self,
        response: reqwest::Response,
        asked: Option<RequestId>,
    ) -> Result<StreamableHttpPostResponse, CallFailure> {
        let session = session_of(&response);
        let message = match (web::body(response, self.largest).await, asked) {
            (Ok(body), _) => wire::reading(body).await,
            (Err(WebError::TooLarge(largest)), Some(id)) => Some(wire::too_large(id, largest)),
            (Err(error), _) => return Err(CallFailure::Client(error)),
        };
        let message = message.ok_or_else(|| {
            CallFailure::UnexpectedServerResponse("the answer is no message".into())
        })?;
        Ok(StreamableHttpPostResponse::Json(message, session))
    }

    /// Handles an error status. A protocol error has a body with the reason.
    async fn failed(
        &self,
        response: reqwest::Response,
        message: &ClientJsonRpcMessage,
        has_session: bool,
    ) -> Result<StreamableHttpPostResponse, CallFailure> {
        let status = response.status();
        let is_json = web::is_type(&response, JSON);
        let body = web::body(response, MAX_REFUSAL_BYTES)
            .await
            .unwrap_or_default();
        let said = match wire::read(&body) {
            Some(ServerJsonRpcMessage::Error(error)) if is_json => Some(error.error),
            _ => None,
        };
        // Servers of the older era reject the probe for the newer one in many different ways.
        let is_probe = matches!(
            message,
            ClientJsonRpcMessage::Request(request)
                if matches!(request.request, ClientRequest::DiscoverRequest(_))
        );
        let error = match said {
            Some(error) => error,
            None if is_probe && !has_session && status.is_client_error() => {
                ErrorData::invalid_request("refused", None)
            }
            None => return Err(CallFailure::Client(WebError::Status(status.as_u16()))),
        };
        Ok(StreamableHttpPostResponse::Json(
            ServerJsonRpcMessage::error(error, asked(message)),
            None,
        ))
    }
}

/// Maximum size of an error body, which is a short text.
const MAX_REFUSAL_BYTES: usize = 64 * 1024;

/// Returns the id of the request, if it expects a response.
fn asked(message: &ClientJsonRpcMessage) -> Option<RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    }
}

fn session_of(response: &reqwest::Response) -> Option<String> {
    response
        .headers()
        .get(SESSION)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned)
}
