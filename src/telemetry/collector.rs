//! The connection to the trace collector: one request per batch of spans, over HTTP/1.1, with TLS
//! if its URL requires it.
//!
//! The thread that collects spans belongs to no runtime, so each request creates a small one. A
//! batch is sent every few seconds, and a connection opened for it cannot be stale.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
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

/// Timeout of one batch, including name resolution and connect.
pub(super) const MAX_EXPORT_TIME: Duration = Duration::from_secs(10);

/// The response of a collector is nearly empty.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Sends batches, and logs when exports start to fail and when they succeed again.
#[derive(Debug)]
pub(super) struct CollectorClient {
    is_failing: AtomicBool,
    /// The TLS trust configuration, created on first use.
    trust: OnceLock<Arc<ClientConfig>>,
}

impl CollectorClient {
    pub(super) fn new() -> CollectorClient {
        CollectorClient {
            is_failing: AtomicBool::new(false),
            trust: OnceLock::new(),
        }
    }

    fn send_and_wait(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let answer = runtime
            .block_on(async { tokio::time::timeout(MAX_EXPORT_TIME, self.send(request)).await });
        // A name lookup may still block in a thread, which is not waited for.
        runtime.shutdown_background();
        answer.map_err(|_| "it did not answer in time")?
    }

    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let address = request.uri().clone();
        let host = address.host().ok_or("its address has no host")?;
        let secure = address.scheme_str() == Some("https");
        let port = address.port_u16().unwrap_or(if secure { 443 } else { 80 });
        // The brackets of an IPv6 address belong to the URL, not to the address.
        let name = host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((name, port)).await?;
        if !secure {
            return exchange(stream, request).await;
        }
        let name = ServerName::try_from(name.to_owned())?;
        let trust = self.trust.get_or_init(|| trust(machine_roots())).clone();
        exchange(
            TlsConnector::from(trust).connect(name, stream).await?,
            request,
        )
        .await
    }

    fn tell(&self, sent: &Result<Response<Bytes>, HttpError>) {
        let problem = match sent {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!(
                "it answered with status {}",
                response.status().as_u16()
            )),
            Err(error) => Some(error.to_string()),
        };
        match (problem, self.is_failing.load(Ordering::Relaxed)) {
            (Some(problem), false) => {
                tracing::warn!(problem, "the collector takes no spans; they are dropped")
            }
            (None, true) => tracing::info!("the collector takes spans again"),
            _ => return,
        }
        self.is_failing.fetch_not(Ordering::Relaxed);
    }
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = self.send_and_wait(request);
        self.tell(&sent);
        sent
    }
}

async fn exchange<S>(stream: S, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the runtime; its errors appear in the response.
    tokio::spawn(connection);
    let (mut parts, body) = request.into_parts();
    let host = parts
        .uri
        .authority()
        .ok_or("its address has no host")?
        .as_str()
        .parse()?;
    parts.headers.insert("host", host);
    parts.uri = parts
        .uri
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .parse()?;
    let answer = sender
        .send_request(Request::from_parts(parts, Full::new(body)))
        .await?;
    let (parts, body) = answer.into_parts();
    let body = Limited::new(body, MAX_ANSWER_BYTES)
        .collect()
        .await?
        .to_bytes();
    Ok(Response::from_parts(parts, body))
}

/// The root certificates of the machine.
fn machine_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn trust(roots: RootCertStore) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("the provider has the usual versions");
    Arc::new(config.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ServerConfig, ServerConnection, StreamOwned};

    use super::*;

    /// Answers every request over TLS; returns its URL and the certificate to trust.
    fn secure_collector() -> (String, CertificateDer<'static>) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let certificate = made.cert.der().clone();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let config = config
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .unwrap();
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!(
            "https://localhost:{}/v1/traces",
            listener.local_addr().unwrap().port()
        );
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let connection = ServerConnection::new(config.clone()).unwrap();
                let mut reader = BufReader::new(StreamOwned::new(connection, stream.unwrap()));
                let mut line = String::new();
                // A client that does not trust the certificate disconnects here.
                if reader.read_line(&mut line).is_ok_and(|read| read > 0) {
                    let answer = format!(
                        "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{}",
                        line.trim().len(),
                        line.trim()
                    );
                    reader.get_mut().write_all(answer.as_bytes()).unwrap();
                }
            }
        });
        (address, certificate)
    }

    fn send(client: &CollectorClient, address: &str) -> Result<Response<Bytes>, HttpError> {
        client.send_and_wait(
            Request::post(address)
                .body(Bytes::from_static(b"spans"))
                .unwrap(),
        )
    }

    #[test]
    fn a_collector_behind_tls_is_spoken_to_only_if_it_is_trusted() {
        let (address, certificate) = secure_collector();
        let trusting = CollectorClient::new();
        let mut roots = RootCertStore::empty();
        roots.add(certificate).unwrap();
        trusting.trust.set(trust(roots)).unwrap();
        let answer = send(&trusting, &address).unwrap();
        assert_eq!(answer.body().as_ref(), b"POST /v1/traces HTTP/1.1");
        let refused = send(&CollectorClient::new(), &address)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("certificate"), "{refused}");
    }

    #[test]
    fn what_fails_is_told_once_and_so_is_its_end() {
        let client = CollectorClient::new();
        let gone = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/", gone.local_addr().unwrap());
        drop(gone);
        for _ in 0..2 {
            client.tell(&send(&client, &address));
            assert!(client.is_failing.load(Ordering::Relaxed));
        }
        client.tell(&Ok(Response::new(Bytes::new())));
        assert!(!client.is_failing.load(Ordering::Relaxed));
        let refused = Response::builder().status(401).body(Bytes::new()).unwrap();
        client.tell(&Ok(refused));
        assert!(client.is_failing.load(Ordering::Relaxed));
    }
}
