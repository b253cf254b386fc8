//! The older HTTP transport: an event stream, and messages posted to the URL in its first event.
//!
//! That URL must have the same origin as the stream. Otherwise a server could have our headers sent
//! anywhere.

use std::sync::Arc;

use cellblock_json::Decoding;
use futures_util::stream::{BoxStream, StreamExt};
use http::Method;
use reqwest::Url;
use rmcp::RoleClient;
use rmcp::service::TxJsonRpcMessage;
use rmcp::transport::Transport;
use sse_stream::Sse;

use crate::events;
use crate::web::{self, Web, WebError};
use crate::wire::{self, Message};

pub(crate) struct SseTransport {
    web: Web,
    endpoint: Arc<Url>,
    events: Option<BoxStream<'static, Result<Sse, WebError>>>,
    /// An event that is being decoded. Later events wait, so that messages stay in order.
    reading: Option<Decoding<Option<Message>>>,
}

impl SseTransport {
    /// Opens the stream and waits for the URL to post to.
    pub(crate) async fn open(web: Web, url: &Url) -> Result<SseTransport, WebError> {
        let request = web
            .request(Method::GET, url.as_str())
            .header(http::header::ACCEPT, "text/event-stream");
        let response = web::send(request).await?;
        if !response.status().is_success() {
            return Err(WebError::Status(response.status().as_u16()));
        }
        if !web::is_type(&response, "text/event-stream") {
            return Err(WebError::ContentType);
        }
        let mut events = events::of(response, web.largest);
        while let Some(event) = events.next().await {
            let event = event?;
            if event.event.as_deref() == Some("endpoint") {
                let endpoint = endpoint(url, event.data.as_deref().unwrap_or_default())?;
                return Ok(SseTransport {
                    web,
                    endpoint: Arc::new(endpoint),
                    events: Some(events),
                    reading: None,
                });
            }
        }
        Err(WebError::NoEndpoint)
    }
}

fn endpoint(stream: &Url, named: &str) -> Result<Url, WebError> {
    let endpoint = stream
        .join(named.trim())
        .map_err(|_| WebError::NoEndpoint)?;
    if endpoint.origin() != stream.origin()
        || !endpoint.username().is_empty()
        || endpoint.password().is_some()
    {
        return Err(WebError::ForeignEndpoint);
    }
    Ok(endpoint)
}

impl Transport<RoleClient> for SseTransport {
    type Error = WebError;

    fn send(
        &mut self,
        message: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), WebError>> + Send + 'static {
        let (web, endpoint) = (self.web.clone(), Arc::clone(&self.endpoint));
        async move {
            let body = serde_json::to_vec(&message).unwrap_or_default();
            let request = web
                .request(Method::POST, endpoint.as_str())
                .header(http::header::CONTENT_TYPE, "application/json");
            let response = web::send(request.body(body)).await?;
            match response.status() {
                status if status.is_success() => Ok(()),
                status => Err(WebError::Status(status.as_u16())),
            }
        }
    }

    async fn receive(&mut self) -> Option<Message> {
        loop {
            // This future may be dropped at any await, so the event stays in `self` while it is
            // decoded.
            if let Some(reading) = &mut self.reading {
                let message = reading.await;
                self.reading = None;
                if message.is_some() {
                    return message;
                }
            }
            let Some(Ok(event)) = self.events.as_mut()?.next().await else {
                return None;
            };
            let is_message = event.event.as_deref().is_none_or(|kind| kind == "message");
            self.reading = event.data.filter(|_| is_message).map(wire::reading);
        }
    }

    async fn close(&mut self) -> Result<(), WebError> {
        self.events = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_to_post_to_has_the_origin_of_the_stream() {
        let stream = Url::parse("https://a.example:8443/v1/sse").unwrap();
        for (named, expected) in [
            (
                "/messages?session=1",
                "https://a.example:8443/messages?session=1",
            ),
            ("messages", "https://a.example:8443/v1/messages"),
            ("https://a.example:8443/x", "https://a.example:8443/x"),
        ] {
            assert_eq!(endpoint(&stream, named).unwrap().as_str(), expected);
        }
        for named in [
            "https://b.example/x",
            "http://a.example:8443/x",
            "https://a.example/x",
            "//b.example/x",
            "https://a.example:8443@b.example/x",
            "https://u:p@a.example:8443/x",
            "file:///etc/passwd",
        ] {
            assert!(
                matches!(endpoint(&stream, named), Err(WebError::ForeignEndpoint)),
                "{named}"
            );
        }
    }
}
