//! The connection to the collector of traces: one request per batch of spans, over HTTP/1.1, with TLS if its address says so.
//!
//! The thread that gathers spans belongs to no runtime, so each request has a small one of its own. A batch goes out every few seconds, and
//! a connection that is made for it cannot be stale.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// How long one batch may take, names and connection included.
pub(super) const LONGEST_EXPORT: Duration = Duration::from_secs(10);

/// A collector answers with next to nothing.
const LARGEST_ANSWER: usize = 64 << 10;

/// Sends batches, and tells the log when that begins to fail and when it works again.
#[derive(Debug)]
pub(super) struct CollectorClient {
    is_failing: AtomicBool,
}

impl CollectorClient {
    pub(super) fn new() -> CollectorClient {
        CollectorClient { is_failing: AtomicBool::new(false) }
    }

    fn tell(&self, sent: &Result<Response<Bytes>, HttpError>) {
        let problem = match sent {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it answered with status {}", response.status().as_u16())),
            Err(error) => Some(error.to_string()),
        };
        match (problem, self.is_failing.load(Ordering::Relaxed)) {
            (Some(problem), false) => tracing::warn!(problem, "the collector takes no spans; they are dropped"),
            (None, true) => tracing::info!("the collector takes spans again"),
            _ => return,
        }
        self.is_failing.fetch_not(Ordering::Relaxed);
    }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = send_and_wait(request);
        self.tell(&sent);
        sent
    }
}

fn send_and_wait(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(async { tokio::time::timeout(LONGEST_EXPORT, send(request)).await });
    // Looking up a name may still wait in a thread; nobody waits for it.
    runtime.shutdown_background();
    answer.map_err(|_| "it did not answer in time")?
}

async fn send(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let address = request.uri().clone();
    let host = address.host().ok_or("its address has no host")?;
    let secure = address.scheme_str() == Some("https");
    let port = address.port_u16().unwrap_or(if secure { 443 } else { 80 });
    // The brackets of an IPv6 address belong to the URL, not to the address.
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((name, port)).await?;
    if secure {
        let name = ServerName::try_from(name.to_owned())?;
        return exchange(TlsConnector::from(trust()?).connect(name, stream).await?, request).await;
    }
    exchange(stream, request).await
}

async fn exchange<S>(stream: S, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the runtime; what went wrong in it shows in the answer.
    tokio::spawn(connection);
    let (mut parts, body) = request.into_parts();
    let host = parts.uri.authority().ok_or("its address has no host")?.as_str().parse()?;
    parts.headers.insert("host", host);
    parts.uri = parts.uri.path_and_query().map_or("/", |path| path.as_str()).parse()?;
    let answer = sender.send_request(Request::from_parts(parts, Full::new(body))).await?;
    let (parts, body) = answer.into_parts();
    let body = Limited::new(body, LARGEST_ANSWER).collect().await?.to_bytes();
    Ok(Response::from_parts(parts, body))
}

/// Trusts the authorities that the machine trusts.
fn trust() -> Result<Arc<ClientConfig>, Box<dyn Error + Send + Sync>> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}
