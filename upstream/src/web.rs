//! HTTP requests to remote servers.
//!
//! There is one client per server. It does not follow redirects: a server that moved must be
//! registered again, and a header for one host is never sent to another. Body sizes are limited.
//! TLS trusts the machine's certificates (including `SSL_CERT_FILE`).

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock_egress::resolve::Resolver;
use http::{HeaderMap, HeaderName, HeaderValue};
use reqwest::redirect;
use rustls::{ClientConfig, RootCertStore};

use crate::addresses::{AddressPolicy, CheckedNames};

/// Timeout for establishing a connection. The timeout for the whole handshake is longer.
const MAX_DIAL_TIME: Duration = Duration::from_secs(10);

/// Error of a request to a remote server.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The text is a short summary, because the causes are details of the library.
    #[error("{}", told(.0))]
    Request(reqwest::Error),
    #[error("it answered with the status {0}")]
    Status(u16),
    #[error("it wants to be asked elsewhere (status {0}); register the address that it moved to")]
    Moved(u16),
    #[error("it does not accept the credentials (status {0})")]
    Refused(u16),
    #[error("its answer has more than {0} bytes")]
    TooLarge(usize),
    #[error("its answer is of a type that is not known")]
    ContentType,
    #[error("its event stream names no address to post to")]
    NoEndpoint,
    #[error("its event stream names an address of another origin to post to")]
    ForeignEndpoint,
}

impl WebError {
    /// Wraps an error without its URL, which may contain secrets.
    pub(crate) fn request(error: reqwest::Error) -> WebError {
        WebError::Request(error.without_url())
    }

    /// Returns whether the request cannot have reached the server.
    pub(crate) fn is_before_the_server(&self) -> bool {
        matches!(self, WebError::Request(error) if error.is_connect())
    }
}

/// Returns a short description of a failed request.
fn told(error: &reqwest::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    match () {
        () if error.is_timeout() => "it did not answer in time".to_owned(),
        () if error.is_connect() => format!("no connection could be made: {innermost}"),
        () => "the connection broke".to_owned(),
    }
}

/// A client for one server.
#[derive(Clone)]
pub(crate) struct Web {
    client: reqwest::Client,
    pub(crate) largest: usize,
}

/// Error while creating a client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the value of the header {name:?} cannot be sent")]
    Header { name: String },
    #[error("the TLS library could not be set up")]
    Tls(#[source] rustls::Error),
    #[error("the HTTP library could not be set up")]
    Http(#[source] reqwest::Error),
}

impl Web {
    pub(crate) fn new(
        headers: impl IntoIterator<Item = (String, String)>,
        policy: &AddressPolicy,
        resolver: &Arc<dyn Resolver>,
        largest: usize,
    ) -> Result<Web, ClientError> {
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls()?)
            .redirect(redirect::Policy::none())
            .connect_timeout(MAX_DIAL_TIME)
            .referer(false)
            .default_headers(header_map(headers)?)
            .user_agent(concat!("cellblock/", env!("CARGO_PKG_VERSION")));
        if let AddressPolicy::PublicOnly { .. } = policy {
            // No proxy: it would resolve the name again by itself.
            let names = CheckedNames {
                policy: policy.clone(),
                resolver: Arc::clone(resolver),
            };
            builder = builder.no_proxy().dns_resolver(names);
        }
        let client = builder.build().map_err(ClientError::Http)?;
        Ok(Web { client, largest })
    }

    pub(crate) fn request(&self, method: http::Method, url: &str) -> reqwest::RequestBuilder {
        self.client.request(method, url)
    }
}

/// Sends a request. Redirects and authorization failures are errors.
pub(crate) async fn send(request: reqwest::RequestBuilder) -> Result<reqwest::Response, WebError> {
    let response = request.send().await.map_err(WebError::request)?;
    match response.status().as_u16() {
        status @ 300..=399 => Err(WebError::Moved(status)),
        status @ (401 | 403) => Err(WebError::Refused(status)),
        _ => Ok(response),
    }
}

/// Reads a body up to a maximum size.
pub(crate) async fn body(
    mut response: reqwest::Response,
    largest: usize,
) -> Result<Vec<u8>, WebError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(WebError::request)? {
        if body.len() + chunk.len() > largest {
            return Err(WebError::TooLarge(largest));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

pub(crate) fn is_type(response: &reqwest::Response, kind: &str) -> bool {
    let found = response
        .headers()
        .get(http::header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    found
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .eq_ignore_ascii_case(kind)
}

fn header_map(
    headers: impl IntoIterator<Item = (String, String)>,
) -> Result<HeaderMap, ClientError> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let pair = (
            HeaderName::from_bytes(name.as_bytes()),
            HeaderValue::from_str(&value),
        );
        let (Ok(header), Ok(mut value)) = pair else {
            return Err(ClientError::Header { name });
        };
        value.set_sensitive(true);
        map.append(header, value);
    }
    Ok(map)
}

/// Returns the TLS settings. Reading the machine's certificates takes some milliseconds, so they
/// are read once.
fn tls() -> Result<ClientConfig, ClientError> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let roots = ROOTS.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        let (added, _ignored) =
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if added == 0 {
            tracing::warn!(
                "this machine has no certificates that TLS could trust; MCP servers with https \
                 cannot be reached"
            );
        }
        Arc::new(roots)
    });
    let config =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(ClientError::Tls)?;
    Ok(config
        .with_root_certificates(Arc::clone(roots))
        .with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_cannot_be_sent_is_named_without_its_value() {
        let error =
            header_map([("X-Key".to_owned(), "secret\nInjected: 1".to_owned())]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the value of the header \"X-Key\" cannot be sent"
        );
        // Control.
        let map = header_map([("X-Key".to_owned(), "secret".to_owned())]).unwrap();
        assert_eq!(map["x-key"], "secret");
        assert!(!format!("{map:?}").contains("secret"));
    }
}
