//! Fetches a key set from exactly the configured URL.
//!
//! HTTPS only; plain HTTP is allowed where the URL itself names this machine. The name is resolved
//! once, all its addresses are checked, and one of exactly these is dialled. So a name that
//! suddenly resolves to a private network or to a cloud's metadata service cannot be used to reach
//! it. Redirects are not followed. The whole fetch is limited to a few seconds and to
//! `MAX_KEY_SET_BYTES` bytes.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cellblock_egress::address;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{ACCEPT, HOST, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;

use super::keys::{KeySet, NotAKeySet};

/// Large issuers publish a few dozen keys of two kilobytes.
const MAX_KEY_SET_BYTES: usize = 256 << 10;

/// Timeout of the whole fetch, from name resolution to the last byte.
pub(super) const MAX_FETCH_TIME: Duration = Duration::from_secs(5);

/// The URL of a key set, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySetUrl {
    is_secure: bool,
    host: String,
    port: u16,
    /// Host and port as they were written.
    authority: String,
    path: String,
}

impl KeySetUrl {
    /// The form of a URL, for messages.
    pub const ALLOWED: &str = "an address such as https://id.example.com/keys; http:// only with \
                               localhost or a loopback address";

    /// Parses a URL, or returns `None` if it cannot be used.
    pub fn parse(text: &str) -> Option<KeySetUrl> {
        if text.contains('#') || text.contains('@') {
            return None;
        }
        let uri: Uri = text.parse().ok()?;
        let is_secure = match uri.scheme_str()? {
            "https" => true,
            "http" => false,
            _ => return None,
        };
        let authority = uri.authority()?;
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_ascii_lowercase();
        let port = authority.port_u16();
        // A port that is not a number counts as absent for the parser.
        if host.is_empty() || (port.is_none() && authority.as_str().len() != authority.host().len())
        {
            return None;
        }
        let url = KeySetUrl {
            is_secure,
            host,
            port: port.unwrap_or(if is_secure { 443 } else { 80 }),
            authority: authority.as_str().to_owned(),
            path: uri
                .path_and_query()
                .map_or("/", |path| path.as_str())
                .to_owned(),
        };
        (url.is_secure || url.is_this_machine()).then_some(url)
    }

    /// Returns whether the URL itself names this machine, without name resolution.
    fn is_this_machine(&self) -> bool {
        self.host == "localhost"
            || self
                .host
                .parse::<IpAddr>()
                .is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

/// Why a key set could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("its host could not be resolved")]
    Unresolved(#[source] io::Error),
    #[error("its host leads to {0}")]
    Special(&'static str),
    #[error("its host could not be reached")]
    Unreachable(#[source] io::Error),
    #[error("no secure connection could be made")]
    Tls(#[source] io::Error),
    #[error("the exchange failed")]
    Exchange(#[source] hyper::Error),
    #[error("the answer has the status {}", .0.as_u16())]
    Status(StatusCode),
    #[error("the answer is larger than 256 KiB or was cut off")]
    Body,
    #[error(transparent)]
    NotAKeySet(#[from] NotAKeySet),
    #[error("it took too long")]
    TimedOut,
}

/// Fetches the key set of one issuer.
#[derive(Clone)]
pub(super) struct Fetcher {
    pub url: KeySetUrl,
    /// Whether the operator stated that the host is in a private network.
    pub is_private: bool,
    pub tls: Arc<ClientConfig>,
    pub limit: Duration,
}

impl Fetcher {
    pub(super) async fn fetch(&self) -> Result<KeySet, FetchError> {
        tokio::time::timeout(self.limit, self.fetch_without_limit())
            .await
            .unwrap_or(Err(FetchError::TimedOut))
    }

    async fn fetch_without_limit(&self) -> Result<KeySet, FetchError> {
        let stream = self.connect().await?;
        let bytes = if self.url.is_secure {
            let name = ServerName::try_from(self.url.host.clone())
                .map_err(|error| FetchError::Tls(io::Error::other(error)))?;
            let secured = TlsConnector::from(self.tls.clone())
                .connect(name, stream)
                .await
                .map_err(FetchError::Tls)?;
            self.exchange(secured).await?
        } else {
            self.exchange(stream).await?
        };
        Ok(KeySet::from_json(&bytes)?)
    }

    async fn connect(&self) -> Result<TcpStream, FetchError> {
        let found = tokio::net::lookup_host((self.url.host.as_str(), self.url.port)).await;
        let addresses: Vec<SocketAddr> = found.map_err(FetchError::Unresolved)?.collect();
        for address in &addresses {
            objection(address.ip(), self.url.is_this_machine(), self.is_private)
                .map_or(Ok(()), |kind| Err(FetchError::Special(kind)))?;
        }
        TcpStream::connect(addresses.as_slice())
            .await
            .map_err(FetchError::Unreachable)
    }

    async fn exchange(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> Result<Bytes, FetchError> {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(FetchError::Exchange)?;
        let _connection = EndsWithUs(tokio::spawn(connection).abort_handle());
        let request = Request::get(&self.url.path)
            .header(HOST, &self.url.authority)
            .header(ACCEPT, "application/json, application/jwk-set+json")
            .header(USER_AGENT, concat!("cellblock/", env!("CARGO_PKG_VERSION")))
            .body(Empty::<Bytes>::new())
            .expect("the parts come from an address that was parsed");
        let answer = sender
            .send_request(request)
            .await
            .map_err(FetchError::Exchange)?;
        if answer.status() != StatusCode::OK {
            return Err(FetchError::Status(answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_KEY_SET_BYTES)
            .collect()
            .await;
        Ok(body.map_err(|_| FetchError::Body)?.to_bytes())
    }
}

/// Returns the reason not to dial an address, if there is one.
fn objection(address: IpAddr, is_this_machine: bool, is_private: bool) -> Option<&'static str> {
    if is_this_machine {
        return (!address.to_canonical().is_loopback()).then_some("another machine");
    }
    address::special(address).filter(|kind| !(is_private && *kind == address::PRIVATE))
}

/// A connection task that ends when the fetch is done or dropped.
struct EndsWithUs(AbortHandle);

impl Drop for EndsWithUs {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns the TLS configuration, with the root certificates of this machine.
pub(super) fn usual_tls() -> Result<Arc<ClientConfig>, io::Error> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err(io::Error::other(
            "this machine has no list of certificate authorities; install its package \
             ca-certificates",
        ));
    }
    Ok(tls_with(roots))
}

pub(super) fn tls_with(roots: RootCertStore) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider knows both versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::super::tests::RSA_SIGNER;
    use super::*;

    /// A server that answers every request with the same bytes, or never.
    struct Scripted {
        port: u16,
        requests: Arc<AtomicUsize>,
    }

    impl Scripted {
        async fn start(answer: Option<Vec<u8>>, tls: Option<TlsAcceptor>) -> Scripted {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let requests = Arc::new(AtomicUsize::new(0));
            let counter = requests.clone();
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let (answer, tls, counter) = (answer.clone(), tls.clone(), counter.clone());
                    tokio::spawn(async move {
                        match tls {
                            None => serve(stream, answer, counter).await,
                            Some(tls) => {
                                if let Ok(stream) = tls.accept(stream).await {
                                    serve(stream, answer, counter).await;
                                }
                            }
                        }
                    });
                }
            });
            Scripted { port, requests }
        }

        fn url(&self, scheme: &str) -> KeySetUrl {
            KeySetUrl::parse(&format!("{scheme}://localhost:{}/keys", self.port)).unwrap()
        }
    }

    async fn serve(
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        answer: Option<Vec<u8>>,
        counter: Arc<AtomicUsize>,
    ) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => request.push(byte),
                Err(_) => return,
            }
        }
        assert!(
            request.starts_with(b"GET /keys HTTP/1.1\r\n"),
            "{}",
            String::from_utf8_lossy(&request)
        );
        counter.fetch_add(1, Ordering::SeqCst);
        match answer {
            Some(answer) => {
                // A client that has read enough may have disconnected.
                let _ = stream.write_all(&answer).await;
                let _ = stream.shutdown().await;
            }
            None => std::future::pending().await,
        }
    }

    fn answer(status: &str, headers: &str, body: &str) -> Option<Vec<u8>> {
        Some(
            format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\n{headers}\r\n{body}",
                body.len()
            )
            .into_bytes(),
        )
    }

    fn key_set() -> String {
        json!({"keys": [RSA_SIGNER.jwk]}).to_string()
    }

    fn fetcher(url: KeySetUrl) -> Fetcher {
        Fetcher {
            url,
            is_private: false,
            tls: tls_with(RootCertStore::empty()),
            limit: MAX_FETCH_TIME,
        }
    }

    #[tokio::test]
    async fn a_key_set_is_fetched() {
        let server = Scripted::start(answer("200 OK", "", &key_set()), None).await;
        let keys = fetcher(server.url("http")).fetch().await.unwrap();
        assert_eq!(
            keys.find(None, super::super::keys::Algorithm::Rs256),
            Some(&RSA_SIGNER.public)
        );
        assert_eq!(server.requests.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_redirect_is_not_followed() {
        let target = Scripted::start(answer("200 OK", "", &key_set()), None).await;
        let location = format!("Location: http://localhost:{}/keys\r\n", target.port);
        for status in [
            "301 Moved Permanently",
            "302 Found",
            "307 Temporary Redirect",
            "308 Permanent Redirect",
        ] {
            let server = Scripted::start(answer(status, &location, ""), None).await;
            assert!(
                matches!(
                    fetcher(server.url("http")).fetch().await,
                    Err(FetchError::Status(_))
                ),
                "{status}"
            );
        }
        assert_eq!(target.requests.load(Ordering::SeqCst), 0);
    }

    #[tokio::test]
    async fn an_answer_that_is_no_key_set_is_refused() {
        for (status, body) in [
            ("500 Internal Server Error", key_set()),
            ("404 Not Found", key_set()),
            ("204 No Content", String::new()),
        ] {
            let server = Scripted::start(answer(status, "", &body), None).await;
            assert!(
                matches!(
                    fetcher(server.url("http")).fetch().await,
                    Err(FetchError::Status(_))
                ),
                "{status}"
            );
        }
        let page = Scripted::start(answer("200 OK", "", "<html>sign in</html>"), None).await;
        assert!(matches!(
            fetcher(page.url("http")).fetch().await,
            Err(FetchError::NotAKeySet(_))
        ));
        let noise = Scripted::start(Some(b"SSH-2.0-hello\r\n\r\n".to_vec()), None).await;
        assert!(matches!(
            fetcher(noise.url("http")).fetch().await,
            Err(FetchError::Exchange(_))
        ));
        let short = Scripted::start(
            Some(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{".to_vec()),
            None,
        )
        .await;
        assert!(matches!(
            fetcher(short.url("http")).fetch().await,
            Err(FetchError::Body)
        ));
    }

    #[tokio::test]
    async fn a_huge_answer_is_cut_off() {
        let padded = |size: usize| {
            let set = key_set();
            format!("{}{set}", " ".repeat(size - set.len()))
        };
        let largest = Scripted::start(answer("200 OK", "", &padded(MAX_KEY_SET_BYTES)), None).await;
        assert!(fetcher(largest.url("http")).fetch().await.is_ok()); // control
        let larger =
            Scripted::start(answer("200 OK", "", &padded(MAX_KEY_SET_BYTES + 1)), None).await;
        assert!(matches!(
            fetcher(larger.url("http")).fetch().await,
            Err(FetchError::Body)
        ));
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_is_given_up() {
        let server = Scripted::start(None, None).await;
        let impatient = Fetcher {
            limit: Duration::from_millis(50),
            ..fetcher(server.url("http"))
        };
        assert!(matches!(impatient.fetch().await, Err(FetchError::TimedOut)));
        let closed = TcpListener::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let url = KeySetUrl::parse(&format!("http://127.0.0.1:{closed}/keys")).unwrap();
        assert!(matches!(
            fetcher(url).fetch().await,
            Err(FetchError::Unreachable(_))
        ));
    }

    #[tokio::test]
    async fn https_needs_a_certificate_that_is_trusted_and_for_this_name() {
        let start = async |name: &str| {
            let CertifiedKey { cert, signing_key } =
                generate_simple_self_signed([name.to_owned()]).unwrap();
            let config = ServerConfig::builder_with_provider(Arc::new(
                rustls::crypto::ring::default_provider(),
            ))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![cert.der().clone()],
                PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap(),
            )
            .unwrap();
            let mut roots = RootCertStore::empty();
            roots.add(cert.der().clone()).unwrap();
            let server = Scripted::start(
                answer("200 OK", "", &key_set()),
                Some(TlsAcceptor::from(Arc::new(config))),
            )
            .await;
            (server, tls_with(roots))
        };
        let (server, trusting) = start("localhost").await;
        let strange = fetcher(server.url("https"));
        assert!(
            matches!(strange.fetch().await, Err(FetchError::Tls(_))),
            "nobody vouches for it"
        );
        let known = Fetcher {
            tls: trusting.clone(),
            ..strange
        };
        known.fetch().await.unwrap(); // control
        let (other, trusting) = start("other.example.com").await;
        let misled = Fetcher {
            tls: trusting,
            ..fetcher(other.url("https"))
        };
        assert!(
            matches!(misled.fetch().await, Err(FetchError::Tls(_))),
            "it is for another name"
        );
        assert_eq!(other.requests.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn only_addresses_that_can_be_trusted_are_understood() {
        for text in [
            "https://id.example.com/keys",
            "https://id.example.com",
            "https://id.example.com:8443/a/b?c=d",
            "https://10.0.0.1/keys",
            "https://[2001:db8::1]:444/keys",
            "http://localhost:8000/keys",
            "http://127.0.0.1/keys",
            "http://[::1]:8000/keys",
        ] {
            assert!(KeySetUrl::parse(text).is_some(), "{text}");
        }
        for text in [
            "",
            "id.example.com/keys",
            "/keys",
            "http://id.example.com/keys",
            "http://localhost.example.com/keys",
            "http://10.0.0.1/keys",
            "http://[2001:db8::1]/keys",
            "ftp://localhost/keys",
            "file:///etc/passwd",
            "https://user:password@id.example.com/keys",
            "http://localhost@evil.example.com/keys",
            "https://id.example.com/keys#part",
            "https://id.example.com:99999/keys",
            "https://id.example.com:x/keys",
            "https://id.example.com/a b",
            "https://",
        ] {
            assert_eq!(KeySetUrl::parse(text), None, "{text}");
        }
        let url = KeySetUrl::parse("https://ID.example.com:8443/a?b=c").unwrap();
        assert_eq!(
            (url.host.as_str(), url.port, url.path.as_str()),
            ("id.example.com", 8443, "/a?b=c")
        );
        assert_eq!(
            KeySetUrl::parse("https://id.example.com").unwrap().path,
            "/"
        );
    }

    #[test]
    fn an_address_that_is_not_public_is_dialled_only_if_the_operator_says_so() {
        let judged = |text: &str, is_this_machine, is_private| {
            objection(text.parse().unwrap(), is_this_machine, is_private)
        };
        assert_eq!(judged("93.184.215.14", false, false), None);
        for (text, kind) in [
            ("127.0.0.1", "a loopback address"),
            ("::1", "a loopback address"),
            ("10.1.2.3", "a private address"),
            ("fd12::1", "a private address"),
            ("169.254.1.1", "a link-local address"),
            ("::ffff:10.0.0.1", "a private address"),
        ] {
            assert_eq!(judged(text, false, false), Some(kind), "{text}");
        }
        assert!(
            judged("169.254.169.254", false, true).is_some(),
            "metadata of a cloud is never a key server"
        );
        assert!(judged("127.0.0.1", false, true).is_some());
        assert_eq!(judged("10.1.2.3", false, true), None);
        assert_eq!(judged("fd12::1", false, true), None);
        assert_eq!(judged("127.0.0.1", true, false), None);
        assert_eq!(
            judged("93.184.215.14", true, false),
            Some("another machine")
        );
    }
}
