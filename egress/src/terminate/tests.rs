//! Tests with real TLS on both sides, over loopback: a client that trusts the session's CA, this
//! code, and a host with its own CA.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Body, Frame};
use hyper::client::conn::http1;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::authority::TrustRoots;
use crate::secrets::Secret;

const API: &str = "api.example.com";
const VALUE: &str = "sk/canary+0123 456789";
/// `Basic` credentials of `user:` and the value.
const BASIC_VALUE: &str = "Basic dXNlcjpzay9jYW5hcnkrMDEyMyA0NTY3ODk=";

type Handler = dyn Fn(Request<Bytes>) -> Response<Chunks> + Send + Sync;

/// A body in chunks that stay separate on the wire, or one that a test sends step by step.
enum Chunks {
    Ready(VecDeque<Bytes>),
    Sent(mpsc::Receiver<Bytes>),
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let next = match &mut *self {
            Chunks::Ready(chunks) => Poll::Ready(chunks.pop_front()),
            Chunks::Sent(receiver) => receiver.poll_recv(context),
        };
        next.map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}

fn chunks(parts: &[&[u8]]) -> Response<Chunks> {
    Response::new(Chunks::Ready(
        parts
            .iter()
            .map(|part| Bytes::copy_from_slice(part))
            .collect(),
    ))
}

/// Echoes the request: the target, every header and the body.
fn echo(request: Request<Bytes>) -> Response<Chunks> {
    let mut text = format!("{} {}\n", request.method(), request.uri()).into_bytes();
    for (name, value) in request.headers() {
        text.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\n"].concat());
    }
    text.extend_from_slice(b"\n");
    text.extend_from_slice(request.body());
    let mut response = chunks(&[&text]);
    if let Some(value) = request.headers().get(header::AUTHORIZATION) {
        response.headers_mut().insert("x-seen", value.clone());
    }
    response
}

/// The host: TLS with a certificate of its own CA, and a record of received requests.
struct TrueHost {
    authority_pem: String,
    address: std::net::SocketAddr,
    arrived: Arc<Mutex<Vec<Request<Bytes>>>>,
    connections: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl TrueHost {
    async fn start(
        handler: impl Fn(Request<Bytes>) -> Response<Chunks> + Send + Sync + 'static,
    ) -> TrueHost {
        let (authority_pem, server) = own_certificate();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let arrived: Arc<Mutex<Vec<Request<Bytes>>>> = Arc::default();
        let connections: Arc<AtomicUsize> = Arc::default();
        let mut tasks = JoinSet::new();
        let handler: Arc<Handler> = Arc::new(handler);
        tasks.spawn(accept_all(
            listener,
            TlsAcceptor::from(server),
            handler,
            arrived.clone(),
            connections.clone(),
        ));
        TrueHost {
            authority_pem,
            address,
            arrived,
            connections,
            _tasks: tasks,
        }
    }

    fn trust(&self) -> TrustRoots {
        TrustRoots::system_and(self.authority_pem.as_bytes()).unwrap()
    }

    fn last(&self) -> Request<Bytes> {
        lock(&self.arrived)
            .last()
            .cloned()
            .expect("a request arrived")
    }
}

async fn accept_all(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    handler: Arc<Handler>,
    arrived: Arc<Mutex<Vec<Request<Bytes>>>>,
    connections: Arc<AtomicUsize>,
) {
    let mut tasks = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        connections.fetch_add(1, Ordering::SeqCst);
        stream.set_nodelay(true).unwrap();
        let (acceptor, handler, arrived) = (acceptor.clone(), handler.clone(), arrived.clone());
        tasks.spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else {
                return;
            };
            let service = service_fn(move |request: Request<Incoming>| {
                let (handler, arrived) = (handler.clone(), arrived.clone());
                async move {
                    let (parts, body) = request.into_parts();
                    let request = Request::from_parts(parts, body.collect().await?.to_bytes());
                    lock(&arrived).push(request.clone());
                    Ok::<_, hyper::Error>(handler(request))
                }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .with_upgrades()
                .await;
        });
    }
}

/// Returns a CA in PEM form and a server with a certificate that it signed.
fn own_certificate() -> (String, Arc<ServerConfig>) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec![API.to_owned()])
        .unwrap()
        .signed_by(&key, &authority)
        .unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let server =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)
            .unwrap();
    (authority.pem(), Arc::new(server))
}

/// The session's side: its vault and CA, and the recorded notes.
struct Session {
    vault: Arc<Vault>,
    authority: Arc<Authority>,
    dial: Arc<Dial>,
    notes: Arc<Mutex<Vec<String>>>,
}

impl Session {
    fn new(host: &TrueHost) -> Session {
        Session::with(host, host.trust(), &["KEY=env:X@api.example.com"])
    }

    fn with(host: &TrueHost, trust: TrustRoots, secrets: &[&str]) -> Session {
        let parse = |text: &&str| Secret::parse(text, |_| Some(VALUE.to_owned())).unwrap();
        let vault = Arc::new(Vault::new(secrets.iter().map(parse).collect()).unwrap());
        let authority = Arc::new(Authority::new(&vault, trust).unwrap());
        let address = host.address;
        let dial: Arc<Dial> = Arc::new(move || {
            Box::pin(async move {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(stream)
            })
        });
        Session {
            vault,
            authority,
            dial,
            notes: Arc::default(),
        }
    }

    fn placeholder(&self, index: usize) -> String {
        self.vault.variables()[index].1.clone()
    }

    /// Opens a TCP connection that is served as one to the API host.
    async fn open(&self) -> TcpStream {
        self.open_and_serve().await.0
    }

    async fn open_and_serve(&self) -> (TcpStream, JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let inside = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (vault, authority, dial, notes) = (
            self.vault.clone(),
            self.authority.clone(),
            self.dial.clone(),
            self.notes.clone(),
        );
        let served = tokio::spawn(async move {
            let notes: Arc<NoteSink> = Arc::new(move |note| lock(&notes).push(note.to_string()));
            serve(
                stream,
                &HostName::parse(API).unwrap(),
                443,
                &vault,
                &authority,
                dial,
                notes,
            )
            .await
        });
        (inside, served)
    }

    /// Connects like a program inside that trusts the session's CA.
    async fn connect(&self) -> http1::SendRequest<Full<Bytes>> {
        let stream = connect_tls(
            self.open().await,
            &self.authority.certificate_pem(),
            API,
            &[],
        )
        .await
        .unwrap();
        http_over(stream).await
    }

    async fn ask(&self, request: Request<Full<Bytes>>) -> Answer {
        ask(&mut self.connect().await, request).await
    }
}

async fn connect_tls(
    stream: TcpStream,
    trusted_pem: &str,
    name: &str,
    protocols: &[&[u8]],
) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(trusted_pem.as_bytes()).unwrap())
        .unwrap();
    let mut client =
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
    client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    TlsConnector::from(Arc::new(client))
        .connect(ServerName::try_from(name.to_owned()).unwrap(), stream)
        .await
}

async fn http_over(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> http1::SendRequest<Full<Bytes>> {
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    sender
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

async fn ask(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Answer {
    sender.ready().await.unwrap();
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: parts.status,
        headers: parts.headers,
        body: String::from_utf8_lossy(&body).into_owned(),
    }
}

fn get(target: &str) -> request::Builder {
    Request::get(target).header(header::HOST, API)
}

fn post(content_type: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let request = Request::post("/")
        .header(header::HOST, API)
        .header(header::CONTENT_TYPE, content_type);
    request.body(Full::new(body.into())).unwrap()
}

fn empty() -> Full<Bytes> {
    Full::default()
}

#[tokio::test]
async fn the_value_arrives_at_the_host_and_its_echo_does_not_come_inside() {
    let host = TrueHost::start(echo).await;
    let session = Session::new(&host);
    let key = session.placeholder(0);
    let request =
        get(&format!("/a?key={key}")).header(header::AUTHORIZATION, format!("Bearer {key}"));
    let answer = session.ask(request.body(empty()).unwrap()).await;

    let arrived = host.last();
    assert_eq!(
        arrived.headers()[header::AUTHORIZATION],
        format!("Bearer {VALUE}")
    );
    assert_eq!(arrived.uri(), "/a?key=sk%2Fcanary%2B0123%20456789");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["x-seen"], format!("Bearer {key}"));
    assert!(
        answer
            .body
            .contains(&format!("authorization: Bearer {key}\n")),
        "{}",
        answer.body
    );
    assert!(
        answer.body.starts_with(&format!("GET /a?key={key}\n")),
        "{}",
        answer.body
    );
    assert!(!answer.body.contains("canary"), "{}", answer.body);

    // The host really echoes: without the gateway, the value comes back.
    let stream = TcpStream::connect(host.address).await.unwrap();
    let mut direct = http_over(
        connect_tls(stream, &host.authority_pem, API, &[])
            .await
            .unwrap(),
    )
    .await;
    let answer = ask(
        &mut direct,
        get("/").header("x-key", VALUE).body(empty()).unwrap(),
    )
    .await;
    assert!(answer.body.contains(VALUE));
}

#[tokio::test]
async fn bodies_and_basic_credentials_are_filled_by_their_kind() {
    let host = TrueHost::start(echo).await;
    let session = Session::new(&host);
    let key = session.placeholder(0);
    let cases = [
        (
            "application/json",
            format!(r#"{{"key": "{key}"}}"#),
            format!(r#"{{"key": "{VALUE}"}}"#),
        ),
        (
            "application/x-www-form-urlencoded",
            format!("key={key}"),
            "key=sk%2Fcanary%2B0123%20456789".to_owned(),
        ),
        ("text/plain", key.clone(), VALUE.to_owned()),
        ("application/octet-stream", key.clone(), key.clone()),
    ];
    let mut sender = session.connect().await;
    for (content_type, inside, outside) in cases {
        let answer = ask(&mut sender, post(content_type, inside)).await;
        assert_eq!(host.last().body(), &outside, "{content_type}");
        assert_eq!(
            host.last().headers()[header::CONTENT_LENGTH],
            outside.len().to_string()
        );
        assert!(!answer.body.contains("canary"), "{}", answer.body);
    }
    let credentials = crate::secrets::base64_for_tests(&format!("user:{key}"));
    let request = get("/").header(header::AUTHORIZATION, format!("Basic {credentials}"));
    let answer = ask(&mut sender, request.body(empty()).unwrap()).await;
    assert_eq!(host.last().headers()[header::AUTHORIZATION], BASIC_VALUE);
    let masked = answer.headers["x-seen"].to_str().unwrap();
    assert!(
        masked.starts_with("Basic dXNlcj") && masked.contains(&key),
        "{masked}"
    );
}

#[tokio::test]
async fn a_large_body_streams_as_it_is() {
    let host =
        TrueHost::start(|request| chunks(&[request.body().len().to_string().as_bytes()])).await;
    let session = Session::new(&host);
    let key = session.placeholder(0);
    let text = |length: usize| format!("{key}{}", " ".repeat(length - key.len()));
    session
        .ask(post("text/plain", text(MAX_FILLED_BODY_BYTES)))
        .await;
    // Control: the largest body that is searched.
    assert!(host.last().body().starts_with(VALUE.as_bytes()));
    let larger = text(MAX_FILLED_BODY_BYTES + 1);
    let answer = session.ask(post("text/plain", larger.clone())).await;
    assert_eq!(answer.body, larger.len().to_string());
    assert_eq!(host.last().body(), &larger);
}

#[tokio::test]
async fn an_echo_is_masked_across_every_border_between_chunks_and_in_base64() {
    let base64 = crate::secrets::base64_for_tests(&format!("user:{VALUE}"));
    let spellings = [
        VALUE.to_owned(),
        "sk%2fcanary%2B0123+456789".to_owned(),
        r"sk\/canary+0123 456789".to_owned(),
        base64,
    ];
    let host = TrueHost::start(|request| {
        let number = |part: &str| part.parse::<usize>().unwrap();
        let (border, text) = request.uri().path()[1..]
            .split_once('/')
            .map(|(border, _)| (number(border), request.body()))
            .unwrap();
        chunks(&[b"<", &text[..border], &text[border..], b">"])
    })
    .await;
    let session = Session::new(&host);
    let mut sender = session.connect().await;
    for text in &spellings {
        for border in 0..text.len() {
            let request = Request::post(format!("/{border}/"))
                .header(header::HOST, API)
                .body(Full::from(text.clone()))
                .unwrap();
            let answer = ask(&mut sender, request).await;
            assert!(
                answer.body.starts_with('<') && answer.body.ends_with('>'),
                "{}",
                answer.body
            );
            assert!(
                answer.body.contains(&session.placeholder(0)) && !answer.body.contains(&text[8..]),
                "{}",
                answer.body
            );
        }
    }
    // Other text comes back unchanged.
    let request = Request::post("/3/")
        .header(header::HOST, API)
        .body(Full::from("sk/canary+0123"))
        .unwrap();
    assert_eq!(ask(&mut sender, request).await.body, "<sk/canary+0123>");
}

#[tokio::test]
async fn a_placeholder_of_another_host_is_left_alone_and_noted() {
    let host = TrueHost::start(echo).await;
    let secrets = [
        "KEY=env:X@api.example.com:X-Key",
        "OTHER=env:X@other.example.com",
    ];
    let session = Session::with(&host, host.trust(), &secrets);
    let (key, other) = (session.placeholder(0), session.placeholder(1));
    let request = get("/")
        .header("x-key", &key)
        .header("x-other", &other)
        .header("x-third", &key);
    session.ask(request.body(empty()).unwrap()).await;
    let arrived = host.last();
    assert_eq!(arrived.headers()["x-key"], VALUE); // control
    assert_eq!(arrived.headers()["x-other"], other);
    assert_eq!(arrived.headers()["x-third"], key);
    let noted = [
        "secret OTHER does not belong to this host",
        "secret KEY may only stand in the header x-key",
    ];
    assert_eq!(*lock(&session.notes), noted);
}

#[tokio::test]
async fn a_client_that_does_not_trust_the_authority_or_names_another_host_fails() {
    let host = TrueHost::start(echo).await;
    let session = Session::new(&host);
    let pem = session.authority.certificate_pem();
    assert!(
        connect_tls(session.open().await, &host.authority_pem, API, &[])
            .await
            .is_err()
    );
    let (stream, served) = session.open_and_serve().await;
    assert!(
        connect_tls(stream, &pem, "other.example.com", &[])
            .await
            .is_err()
    );
    assert_eq!(
        served.await.unwrap().unwrap_err().kind(),
        io::ErrorKind::PermissionDenied
    );
    assert!(
        connect_tls(session.open().await, &pem, API, &[b"h2"])
            .await
            .is_err()
    );
    assert!(
        connect_tls(session.open().await, &pem, API, &[b"h2", b"http/1.1"])
            .await
            .is_ok()
    ); // control
}

#[tokio::test]
async fn a_host_that_cannot_be_verified_gets_nothing() {
    let host = TrueHost::start(echo).await;
    let impostor = TrueHost::start(echo).await;
    for (trusted, status) in [
        (&host, StatusCode::OK),
        (&impostor, StatusCode::BAD_GATEWAY),
    ] {
        let session = Session::with(&host, trusted.trust(), &["KEY=env:X@api.example.com"]);
        let answer = session
            .ask(
                get("/")
                    .header("x-key", session.placeholder(0))
                    .body(empty())
                    .unwrap(),
            )
            .await;
        assert_eq!(answer.status, status, "{}", answer.body);
    }
    assert_eq!(lock(&host.arrived).len(), 1);
}

#[tokio::test]
async fn a_second_request_for_another_host_is_refused_and_ends_the_connection() {
    let host = TrueHost::start(echo).await;
    let session = Session::new(&host);
    let mut sender = session.connect().await;
    for _ in 0..3 {
        assert_eq!(
            ask(&mut sender, get("/").body(empty()).unwrap())
                .await
                .status,
            200
        ); // control
    }
    assert_eq!(host.connections.load(Ordering::SeqCst), 1);
    let fronted = Request::get("/")
        .header(header::HOST, "other.example.com")
        .body(empty())
        .unwrap();
    let answer = ask(&mut sender, fronted).await;
    assert_eq!(answer.status, 403);
    assert_eq!(
        answer.body,
        "This connection is for api.example.com: the request names another host.\n"
    );
    assert!(sender.ready().await.is_err());
    assert_eq!(lock(&host.arrived).len(), 3);
}

#[tokio::test]
async fn every_way_to_name_another_host_is_refused() {
    let host = TrueHost::start(echo).await;
    let session = Session::new(&host);
    let cases = [
        ("GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "200"),
        ("GET / HTTP/1.1\r\nHost: API.example.com:443\r\n\r\n", "200"),
        (
            "GET https://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "200",
        ),
        (
            "GET / HTTP/1.1\r\nHost: api.example.com:8443\r\n\r\n",
            "403",
        ),
        ("GET / HTTP/1.1\r\nHost: 192.0.2.1\r\n\r\n", "403"),
        (
            "GET https://other.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "403",
        ),
        (
            "GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "403",
        ),
        (
            "CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
            "403",
        ),
        (
            "GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: other.example.com\r\n\r\n",
            "400",
        ),
        ("GET / HTTP/1.1\r\n\r\n", "400"),
    ];
    for (request, status) in cases {
        let mut stream = connect_tls(
            session.open().await,
            &session.authority.certificate_pem(),
            API,
            &[],
        )
        .await
        .unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer[9..], status.as_bytes(), "{request}");
    }
    let arrived = lock(&host.arrived);
    assert_eq!(
        arrived
            .iter()
            .map(|request| &request.headers()[header::HOST])
            .collect::<Vec<_>>(),
        [API; 3]
    );
}

#[tokio::test]
async fn what_could_hide_a_value_is_not_asked_for_and_refused_if_it_comes() {
    let host = TrueHost::start(|request| {
        let mut response = chunks(&[b"body"]);
        match request.uri().path() {
            "/gzip" => drop(
                response
                    .headers_mut()
                    .insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip")),
            ),
            "/identity" => drop(response.headers_mut().insert(
                header::CONTENT_ENCODING,
                HeaderValue::from_static("Identity"),
            )),
            _ => *response.status_mut() = StatusCode::PARTIAL_CONTENT,
        }
        response
    })
    .await;
    let session = Session::new(&host);
    let mut sender = session.connect().await;
    for (target, status) in [("/gzip", 502), ("/identity", 200), ("/part", 502)] {
        let request = get(target)
            .header(header::ACCEPT_ENCODING, "gzip, br")
            .header(header::RANGE, "bytes=0-3");
        let answer = ask(&mut sender, request.body(empty()).unwrap()).await;
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(host.last().headers()[header::ACCEPT_ENCODING], "identity");
        assert!(!host.last().headers().contains_key(header::RANGE));
    }
}

#[tokio::test]
async fn the_reason_phrase_of_an_answer_does_not_come_inside() {
    let host = TrueHost::start(|_| {
        let mut response = chunks(&[b"body"]);
        response
            .extensions_mut()
            .insert(hyper::ext::ReasonPhrase::from_static(b"canary"));
        response
    })
    .await;
    let session = Session::new(&host);
    for (stream, pem, has_canary) in [
        (
            session.open().await,
            session.authority.certificate_pem(),
            false,
        ),
        (
            TcpStream::connect(host.address).await.unwrap(),
            host.authority_pem.clone(),
            true,
        ), // control
    ] {
        let mut stream = connect_tls(stream, &pem, API, &[]).await.unwrap();
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.contains("body") && answer.contains("canary") == has_canary,
            "{answer}"
        );
    }
}

#[tokio::test]
async fn an_answer_streams_while_the_host_still_speaks() {
    let (speaker, receiver) = mpsc::channel(1);
    let receiver = Mutex::new(Some(receiver));
    let host =
        TrueHost::start(move |_| Response::new(Chunks::Sent(lock(&receiver).take().unwrap())))
            .await;
    let session = Session::new(&host);
    let mut sender = session.connect().await;
    let mut body = sender
        .send_request(get("/").body(empty()).unwrap())
        .await
        .unwrap()
        .into_body();
    for event in ["data: one\n\n", "data: two\n\n"] {
        speaker.send(Bytes::from(event)).await.unwrap();
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_data().unwrap(),
            event
        );
    }
    drop(speaker);
    assert!(body.frame().await.is_none());
}

#[tokio::test]
async fn a_host_that_closes_after_each_answer_is_connected_to_again() {
    let host = TrueHost::start(|request| {
        let mut response = echo(request);
        response
            .headers_mut()
            .insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    })
    .await;
    let session = Session::new(&host);
    let mut sender = session.connect().await;
    for connections in 1..4 {
        assert_eq!(
            ask(&mut sender, get("/").body(empty()).unwrap())
                .await
                .status,
            200
        );
        assert_eq!(host.connections.load(Ordering::SeqCst), connections);
    }
}

#[tokio::test]
async fn a_refused_dial_is_told() {
    let host = TrueHost::start(echo).await;
    let mut session = Session::new(&host);
    assert_eq!(
        session.ask(get("/").body(empty()).unwrap()).await.status,
        200
    ); // control
    session.dial =
        Arc::new(|| Box::pin(async { Err(io::Error::other("not in the allowed list")) }));
    let answer = session.ask(get("/").body(empty()).unwrap()).await;
    assert_eq!(answer.status, 502);
    assert_eq!(
        answer.body,
        "api.example.com could not be reached: not in the allowed list.\n"
    );
}

#[tokio::test]
async fn the_answer_to_head_keeps_its_length() {
    let host = TrueHost::start(|_| {
        let mut response = chunks(&[]);
        response
            .headers_mut()
            .insert(header::CONTENT_LENGTH, HeaderValue::from_static("1234"));
        response
    })
    .await;
    let request = Request::head("/")
        .header(header::HOST, API)
        .body(empty())
        .unwrap();
    let answer = Session::new(&host).ask(request).await;
    assert_eq!(
        (answer.status, &answer.headers[header::CONTENT_LENGTH]),
        (StatusCode::OK, &HeaderValue::from_static("1234"))
    );
}

#[tokio::test]
async fn a_websocket_is_filled_at_its_beginning_and_masked_afterwards() {
    let host = TrueHost::start(|mut request| {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            let mut question = [0; 5];
            stream.read_exact(&mut question).await.unwrap();
            let answer = format!("{} {VALUE}", String::from_utf8_lossy(&question));
            stream
                .write_all(&[&[0x81, answer.len() as u8], answer.as_bytes()].concat())
                .await
                .unwrap();
        });
        let mut response = chunks(&[]);
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        ask_for_websocket(response.headers_mut());
        response
    })
    .await;
    let session = Session::new(&host);
    let key = session.placeholder(0);
    let request = get("/")
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_EXTENSIONS, "permessage-deflate")
        .header(header::AUTHORIZATION, &key);
    let response = session
        .connect()
        .await
        .send_request(request.body(empty()).unwrap())
        .await
        .unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(host.last().headers()[header::AUTHORIZATION], VALUE);
    assert!(
        !host
            .last()
            .headers()
            .contains_key(header::SEC_WEBSOCKET_EXTENSIONS)
    );

    let mut stream = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    stream.write_all(b"hello").await.unwrap();
    let mut frame = Vec::new();
    stream.read_to_end(&mut frame).await.unwrap();
    assert_eq!(frame[0], 0x81);
    assert_eq!(String::from_utf8_lossy(&frame[2..]), format!("hello {key}"));
}
