//! The whole gateway with real sockets: listeners on loopback, a real DNS server, real TLS, and a
//! network in which every address is a server of the test, so that the dialled addresses can be
//! compared with the allowed ones.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, RecordType};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, UdpSocket};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::authority::TrustRoots;
use crate::dial::tests::{OneServer, Script};
use crate::secrets::Secret;

/// The gateway of one session, seen from inside.
struct World {
    gateway: Gateway,
    door: SocketAddr,
    name_server: SocketAddr,
    targets: Arc<Mutex<HashMap<SocketAddr, SocketAddr>>>,
    resolver: Arc<Script>,
    network: Arc<OneServer>,
}

/// The configuration of a `World`.
struct Plan {
    rules: Rules,
    script: Script,
    limits: Limits,
    vault: Vault,
}

/// Returns rules, and a resolver with an ordinary address for every name of the tests.
fn plan(rules: &[&str]) -> Plan {
    let script = Script::default()
        .answer("example.com", &[&["93.184.215.14"]])
        .answer("example.org", &[&["93.184.215.14"]])
        .answer("api.example.com", &[&["93.184.215.20"]]);
    Plan {
        rules: Rules::parse(rules).unwrap(),
        script,
        limits: Limits::default(),
        vault: Vault::none(),
    }
}

impl Plan {
    fn limits(mut self, limits: Limits) -> Plan {
        self.limits = limits;
        self
    }

    fn script(mut self, script: Script) -> Plan {
        self.script = script;
        self
    }

    /// Starts the gateway, with `server` behind every address.
    fn open(self, server: &Server) -> World {
        self.open_with(server, None)
    }

    fn open_with(self, server: &Server, authority: Option<Arc<Authority>>) -> World {
        let listener = StandardTcpListener::bind("127.0.0.1:0").unwrap();
        let questions = StandardUdpSocket::bind("[::]:0").unwrap();
        let door = listener.local_addr().unwrap();
        let name_server =
            SocketAddr::from(([127, 0, 0, 1], questions.local_addr().unwrap().port()));
        let targets = Arc::<Mutex<HashMap<SocketAddr, SocketAddr>>>::default();
        let known = Arc::clone(&targets);
        let target_of: TargetOf =
            Box::new(move |stream| Ok(known.lock().unwrap()[&stream.peer_addr()?]));
        let openings = vec![
            Opening::Names(questions),
            Opening::Connections(listener, target_of),
        ];
        let (resolver, network) = (
            Arc::new(self.script),
            Arc::new(OneServer::at(server.address)),
        );
        let dialer = Dialer::over(Arc::clone(&resolver) as _, Arc::clone(&network) as _);
        let gateway = Gateway::open_over(
            openings,
            self.rules,
            Arc::new(self.vault),
            authority,
            self.limits,
            dialer,
        )
        .unwrap();
        World {
            gateway,
            door,
            name_server,
            targets,
            resolver,
            network,
        }
    }
}

impl World {
    /// Queries the address of a name. `Err` is the response code of a refusal.
    async fn address(&self, name: &str) -> Result<Ipv4Addr, ResponseCode> {
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(self.name_server).await.unwrap();
        ask(&client, name).await
    }

    /// Connects to a name as programs do: resolves it, then connects to the address.
    async fn connect(&self, name: &str, port: u16) -> TcpStream {
        self.connect_to(SocketAddr::new(
            self.address(name).await.unwrap().into(),
            port,
        ))
        .await
    }

    /// Connects to an address. That always succeeds; the test is what happens next.
    async fn connect_to(&self, target: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        self.targets
            .lock()
            .unwrap()
            .insert(socket.local_addr().unwrap(), target);
        socket.connect(self.door).await.unwrap()
    }

    fn blocked(&self) -> Vec<String> {
        self.gateway
            .take_blocked()
            .iter()
            .map(Blocked::to_string)
            .collect()
    }

    fn dialled(&self) -> Vec<String> {
        self.network
            .dialled
            .lock()
            .unwrap()
            .iter()
            .map(SocketAddr::to_string)
            .collect()
    }
}

async fn ask(client: &UdpSocket, name: &str) -> Result<Ipv4Addr, ResponseCode> {
    let mut question = Message::query();
    question.add_query(Query::query(
        Name::from_ascii(format!("{name}.")).unwrap(),
        RecordType::A,
    ));
    client.send(&question.to_vec().unwrap()).await.unwrap();
    let mut buffer = [0; 512];
    let length = client.recv(&mut buffer).await.unwrap();
    let answer = Message::from_vec(&buffer[..length]).unwrap();
    assert_eq!(answer.metadata.id, question.metadata.id);
    match answer.answers.first().map(|record| &record.data) {
        Some(RData::A(A(address))) => Ok(*address),
        _ => Err(answer.metadata.response_code),
    }
}

/// A server that counts its connections.
struct Server {
    address: SocketAddr,
    seen: Arc<AtomicUsize>,
    _task: JoinSet<()>,
}

impl Server {
    async fn start<F, Fut>(serve: F) -> Server
    where
        F: Fn(TcpStream) -> Fut + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&seen);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                connections.spawn(serve(stream));
            }
        });
        Server {
            address,
            seen,
            _task: tasks,
        }
    }

    /// Echoes all data as it arrives.
    async fn echo() -> Server {
        Server::start(|mut stream| async move {
            let (mut read, mut write) = stream.split();
            let _ = tokio::io::copy(&mut read, &mut write).await;
            let _ = write.shutdown().await;
        })
        .await
    }

    /// Answers every HTTP request with this response.
    async fn http(response: &'static str) -> Server {
        Server::start(move |mut stream| async move {
            let mut head = Vec::new();
            while let Ok(byte) = stream.read_u8().await {
                head.push(byte);
                if head.ends_with(b"\r\n\r\n") {
                    stream.write_all(response.as_bytes()).await.unwrap();
                    head.clear();
                }
            }
        })
        .await
    }

    /// Sends a greeting over TLS, with a certificate for these names. Also returns a client
    /// configuration that trusts it.
    async fn tls(names: &[&str]) -> (Server, Arc<ClientConfig>) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let certified = rcgen::generate_simple_self_signed(names).unwrap();
        let certificate = certified.cert.der().clone();
        let key = PrivateKeyDer::Pkcs8(certified.signing_key.serialize_der().into());
        let provider = || Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap();
        let server = server
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(server));
        let server = Server::start(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let _ = stream.write_all(GREETING).await;
                let _ = stream.shutdown().await;
            }
        })
        .await;
        let mut roots = RootCertStore::empty();
        roots.add(certificate).unwrap();
        (server, client_trusting(roots))
    }

    fn connections_seen(&self) -> usize {
        self.seen.load(Ordering::SeqCst)
    }
}

const GREETING: &[u8] = b"hello from the server";

fn client_trusting(roots: RootCertStore) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    Arc::new(client.with_root_certificates(roots).with_no_client_auth())
}

/// Connects over TLS with this server name and returns the received greeting.
async fn greeting(
    stream: TcpStream,
    client: &Arc<ClientConfig>,
    name: &str,
) -> io::Result<Vec<u8>> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut stream = TlsConnector::from(Arc::clone(client))
        .connect(name, stream)
        .await?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await?;
    Ok(text)
}

/// Sends a word and checks that it is echoed. A reset connection returns `ConnectionReset`.
async fn echoes(stream: &mut TcpStream) -> Result<(), io::ErrorKind> {
    let exchange = async {
        stream.write_all(b"word").await?;
        let mut word = [0; 4];
        stream.read_exact(&mut word).await?;
        assert_eq!(&word, b"word");
        Ok(())
    };
    exchange
        .await
        .map_err(|error: io::Error| match error.kind() {
            // The writer may see the reset first.
            io::ErrorKind::BrokenPipe => io::ErrorKind::ConnectionReset,
            kind => kind,
        })
}

const RESET: Result<(), io::ErrorKind> = Err(io::ErrorKind::ConnectionReset);

/// Sends bytes and returns everything received until the end.
async fn converse(mut stream: TcpStream, request: &[u8]) -> io::Result<String> {
    stream.write_all(request).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8(answer).unwrap())
}

#[tokio::test]
async fn a_listed_name_is_reached_at_its_ports_only() {
    let server = Server::echo().await;
    let world = plan(&["example.com:7000"]).open(&server);
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        Ok(())
    ); // control
    assert_eq!(world.dialled(), ["93.184.215.14:7000"]);
    assert_eq!(
        echoes(&mut world.connect("example.com", 7001).await).await,
        RESET
    );
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:7001 (not in the allowed list)"]
    );
    assert_eq!(server.connections_seen(), 1);
}

#[tokio::test]
async fn a_name_that_is_not_listed_does_not_exist_and_the_result_says_why() {
    let server = Server::echo().await;
    let world = plan(&["example.com", "*.example.com"]).open(&server);
    assert!(world.address("example.com").await.is_ok()); // control
    assert!(world.address("api.example.com").await.is_ok());
    for name in [
        "example.org",
        "deep.api.example.com",
        "example.com.example.org",
    ] {
        assert_eq!(world.address(name).await, Err(ResponseCode::NXDomain));
        assert_eq!(
            world.blocked(),
            [format!("blocked: {name} (not in the allowed list)")]
        );
    }
}

#[tokio::test]
async fn ten_thousand_names_that_are_not_listed_are_asked_of_nobody() {
    let server = Server::echo().await;
    let limits = Limits {
        questions_per_second: u32::MAX,
        ..Limits::default()
    };
    let world = plan(&["example.com:7000"]).limits(limits).open(&server);
    let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    client.connect(world.name_server).await.unwrap();
    for number in 0..10_000 {
        assert_eq!(
            ask(&client, &format!("secret{number}.example.org")).await,
            Err(ResponseCode::NXDomain)
        );
    }
    assert_eq!(world.resolver.times_asked(), 0);
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        Ok(())
    );
    assert_eq!(world.resolver.times_asked(), 1); // control: a listed name is asked for, once
    let blocked = world.blocked();
    assert_eq!(blocked.len(), 51);
    assert_eq!(
        blocked[50],
        "blocked: other targets (too many to list), 9950 times"
    );
}

#[tokio::test]
async fn questions_beyond_the_rate_are_refused() {
    let server = Server::echo().await;
    let limits = Limits {
        questions_per_second: 5,
        ..Limits::default()
    };
    let world = plan(&["example.com"]).limits(limits).open(&server);
    let mut answers = Vec::new();
    for _ in 0..10 {
        answers.push(world.address("example.com").await);
    }
    assert!(answers[0].is_ok()); // control
    assert!(answers.contains(&Err(ResponseCode::Refused)), "{answers:?}");
}

#[tokio::test]
async fn an_address_is_reached_only_if_it_is_listed_as_one() {
    let server = Server::echo().await;
    let world = plan(&[
        "example.com:7000",
        "192.168.1.0/24:7000",
        "[2001:db8::1]:7000",
    ])
    .open(&server);
    for target in [
        "192.168.1.5:7000",
        "[::ffff:192.168.1.5]:7000",
        "[2001:db8::1]:7000",
    ] {
        assert_eq!(
            echoes(&mut world.connect_to(target.parse().unwrap()).await).await,
            Ok(()),
            "{target}"
        ); // control
    }
    assert!(world.blocked().is_empty());
    for target in [
        "93.184.215.14:7000",
        "169.254.169.254:7000",
        "198.18.9.9:7000",
        "192.168.1.5:22",
        "[2001:db8::2]:7000",
    ] {
        assert_eq!(
            echoes(&mut world.connect_to(target.parse().unwrap()).await).await,
            RESET,
            "{target}"
        );
        assert_eq!(
            world.blocked(),
            [format!("blocked: {target} (not in the allowed list)")]
        );
    }
    assert_eq!(server.connections_seen(), 3);
}

#[tokio::test]
async fn a_name_that_leads_to_a_special_address_is_refused() {
    let server = Server::echo().await;
    for address in [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "::ffff:10.1.2.3",
        "64:ff9b::a01:203",
        "2002:a01:203::",
        "::1",
        "9.9.9.9",
    ] {
        let script = || Script::default().answer("example.com", &[&["93.184.215.14", address]]);
        let world = plan(&["example.com:7000"]).script(script()).open(&server);
        assert_eq!(
            echoes(&mut world.connect("example.com", 7000).await).await,
            RESET,
            "{address}"
        );
        assert!(world.dialled().is_empty());
        let blocked = world.blocked();
        assert!(
            blocked[0].starts_with("blocked: example.com:7000 (it leads to "),
            "{blocked:?}"
        );
        assert!(!blocked[0].contains(address), "{blocked:?}");
    }
    assert_eq!(server.connections_seen(), 0);
    let script = Script::default().answer("example.com", &[&["93.184.215.14", "1.1.1.1"]]);
    let world = plan(&["example.com:7000"]).script(script).open(&server);
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        Ok(())
    ); // control
}

#[tokio::test]
async fn a_name_server_that_flips_its_answer_gains_nothing() {
    let server = Server::echo().await;
    let script = Script::default().answer(
        "example.com",
        &[&["93.184.215.14"], &["127.0.0.1"], &["93.184.215.15"]],
    );
    let world = plan(&["example.com:7000"]).script(script).open(&server);
    let outcomes = [
        echoes(&mut world.connect("example.com", 7000).await).await,
        echoes(&mut world.connect("example.com", 7000).await).await,
        echoes(&mut world.connect("example.com", 7000).await).await,
    ];
    assert_eq!(outcomes, [Ok(()), RESET, Ok(())]);
    assert_eq!(
        world.dialled(),
        ["93.184.215.14:7000", "93.184.215.15:7000"]
    );
}

#[tokio::test]
async fn a_name_that_cannot_be_resolved_is_reset_and_said() {
    let server = Server::echo().await;
    let world = plan(&["**.example.com:7000"]).open(&server);
    assert_eq!(
        echoes(&mut world.connect("gone.example.com", 7000).await).await,
        RESET
    );
    assert_eq!(
        world.blocked(),
        ["blocked: gone.example.com:7000 (could not be resolved: there is no such name)"]
    );
    assert_eq!(
        echoes(&mut world.connect("api.example.com", 7000).await).await,
        Ok(())
    ); // control
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_said() {
    let nobody = Server {
        address: closed_port().await,
        seen: Arc::default(),
        _task: JoinSet::new(),
    };
    let world = plan(&["example.com:7000"]).open(&nobody);
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        RESET
    );
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:7000 (could not be reached: connection refused)"]
    );
}

/// Returns an address without a listener.
async fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

#[tokio::test]
async fn tls_must_ask_openly_for_the_name_it_connects_to() {
    let (server, client) = Server::tls(&["example.com", "example.org"]).await;
    let world = plan(&["example.com"]).open(&server);
    let greeted = greeting(
        world.connect("example.com", 443).await,
        &client,
        "example.com",
    )
    .await;
    assert_eq!(greeted.unwrap(), GREETING); // control
    // Both names have the same address, and the server would serve both.
    assert!(
        greeting(
            world.connect("example.com", 443).await,
            &client,
            "example.org"
        )
        .await
        .is_err()
    );
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:443 (the TLS client asks for example.org)"]
    );
    let mut without = ClientConfig::clone(&client);
    without.enable_sni = false;
    assert!(
        greeting(
            world.connect("example.com", 443).await,
            &Arc::new(without),
            "example.com"
        )
        .await
        .is_err()
    );
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:443 (the TLS client does not say which name it wants)"]
    );
    assert_eq!(server.connections_seen(), 1);
}

#[tokio::test]
async fn what_is_not_tls_does_not_pass_at_the_port_of_tls() {
    let (server, _) = Server::tls(&["example.com"]).await;
    let world = plan(&["example.com"]).open(&server);
    let answer = converse(
        world.connect("example.com", 443).await,
        b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
    )
    .await;
    assert_eq!(answer.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:443 (only TLS may pass at this port)"]
    );
    assert_eq!(server.connections_seen(), 0);
}

#[tokio::test]
async fn a_hidden_name_does_not_pass() {
    let (server, client) = Server::tls(&["example.com"]).await;
    let world = plan(&["example.com"]).open(&server);
    let hello = first_bytes(client, "example.com");
    let mut stream = world.connect("example.com", 443).await;
    stream.write_all(&hello).await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), 22); // control: the server's hello
    let answer = converse(
        world.connect("example.com", 443).await,
        &with_encrypted_hello(hello),
    )
    .await;
    assert_eq!(answer.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    let expected = "blocked: example.com:443 (the TLS client hides the name it wants (encrypted \
                    client hello))";
    assert_eq!(world.blocked(), [expected]);
    assert_eq!(server.connections_seen(), 1);
}

/// Returns the ClientHello of a TLS client.
fn first_bytes(client: Arc<ClientConfig>, name: &str) -> Vec<u8> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut connection = rustls::ClientConnection::new(client, name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

/// Appends an empty extension of that type to a ClientHello, and adjusts the three lengths around
/// it.
fn with_encrypted_hello(mut hello: Vec<u8>) -> Vec<u8> {
    let mut grow = |at: usize| {
        let length = u16::from_be_bytes([hello[at], hello[at + 1]]) + 4;
        hello[at..at + 2].copy_from_slice(&length.to_be_bytes());
    };
    grow(3); // of the record
    grow(7); // of the message, without its first byte
    let session = 43;
    let suites = session + 1 + usize::from(hello[session]);
    let methods = suites + 2 + usize::from(u16::from_be_bytes([hello[suites], hello[suites + 1]]));
    let extensions = methods + 1 + usize::from(hello[methods]);
    let length = u16::from_be_bytes([hello[extensions], hello[extensions + 1]]) + 4;
    hello[extensions..extensions + 2].copy_from_slice(&length.to_be_bytes());
    hello.extend([0xfe, 0x0d, 0, 0]);
    hello
}

#[tokio::test]
async fn a_hello_in_many_small_pieces_is_still_read() {
    let (server, client) = Server::tls(&["example.com"]).await;
    let world = plan(&["example.com"]).open(&server);
    let mut stream = world.connect("example.com", 443).await;
    stream.set_nodelay(true).unwrap();
    for piece in first_bytes(client, "example.com").chunks(20) {
        stream.write_all(piece).await.unwrap();
    }
    assert_eq!(stream.read_u8().await.unwrap(), 22);
}

#[tokio::test]
async fn every_request_of_plain_http_must_be_for_the_name() {
    let server = Server::http("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    let world = plan(&["example.com"]).open(&server);
    let request =
        b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\nGET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
    let answer = converse(world.connect("example.com", 80).await, request)
        .await
        .unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}"); // control
    assert!(answer.contains("HTTP/1.1 403 Forbidden\r\n"), "{answer}");
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:80 (the request is for example.org:80)"]
    );
}

#[tokio::test]
async fn where_a_server_redirects_to_is_a_new_decision() {
    let server = Server::http(
        "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\nConnection: \
         close\r\nContent-Length: 0\r\n\r\n",
    )
    .await;
    let world = plan(&["example.com"]).open(&server);
    let request = b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n";
    let answer = converse(world.connect("example.com", 80).await, request)
        .await
        .unwrap();
    assert!(
        answer.contains("Location: http://169.254.169.254/latest"),
        "{answer}"
    ); // control
    let request = b"GET /latest HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n";
    let answer = converse(
        world
            .connect_to("169.254.169.254:80".parse().unwrap())
            .await,
        request,
    )
    .await;
    assert_eq!(answer.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(
        world.blocked(),
        ["blocked: 169.254.169.254:80 (not in the allowed list)"]
    );
}

#[tokio::test]
async fn new_rules_hold_at_once_and_end_what_they_do_not_allow() {
    let server = Server::echo().await;
    let world = plan(&["example.com:7000", "api.example.com:7000", "10.0.0.1:7000"]).open(&server);
    let mut kept = world.connect("api.example.com", 7000).await;
    let mut ended = world.connect("example.com", 7000).await;
    let mut address = world.connect_to("10.0.0.1:7000".parse().unwrap()).await;
    for stream in [&mut kept, &mut ended, &mut address] {
        assert_eq!(echoes(stream).await, Ok(())); // control
    }
    let rules = Rules::parse(&["api.example.com:7000", "example.org:7000"]).unwrap();
    world.gateway.set_rules(rules.clone());
    assert_eq!(world.gateway.rules(), rules);
    assert_eq!(
        ended.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(
        address.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(echoes(&mut kept).await, Ok(()));
    assert_eq!(
        world.address("example.com").await,
        Err(ResponseCode::NXDomain)
    );
    assert_eq!(
        echoes(&mut world.connect("example.org", 7000).await).await,
        Ok(())
    );
    let blocked = world.blocked();
    assert!(
        blocked.contains(&"blocked: example.com:7000 (no longer in the allowed list)".to_owned()),
        "{blocked:?}"
    );
    assert!(
        blocked.contains(&"blocked: 10.0.0.1:7000 (no longer in the allowed list)".to_owned()),
        "{blocked:?}"
    );
}

#[tokio::test]
async fn a_rule_for_an_address_that_goes_ends_what_a_name_made_of_it() {
    let server = Server::echo().await;
    let script = Script::default()
        .answer("example.com", &[&["10.0.0.1"]])
        .answer("api.example.com", &[&["1.1.1.1"]]);
    let world = plan(&["**.example.com:7000", "example.com:7000", "10.0.0.0/8:7000"])
        .script(script)
        .open(&server);
    let mut private = world.connect("example.com", 7000).await;
    let mut public = world.connect("api.example.com", 7000).await;
    assert_eq!(
        (echoes(&mut private).await, echoes(&mut public).await),
        (Ok(()), Ok(()))
    ); // control
    world
        .gateway
        .set_rules(Rules::parse(&["**.example.com:7000", "example.com:7000"]).unwrap());
    assert_eq!(
        private.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(echoes(&mut public).await, Ok(()));
}

#[tokio::test]
async fn two_sessions_have_two_lists_at_the_same_moment() {
    let server = Server::echo().await;
    let first = plan(&["example.com:7000"]).open(&server);
    let second = plan(&["example.org:7000"]).open(&server);
    assert_eq!(
        echoes(&mut first.connect("example.com", 7000).await).await,
        Ok(())
    );
    assert_eq!(
        echoes(&mut second.connect("example.org", 7000).await).await,
        Ok(())
    );
    assert!(first.address("example.org").await.is_err());
    assert!(second.address("example.com").await.is_err());
    // The first session's address for its name means nothing, or another name, in the second.
    let address = first.address("example.com").await.unwrap();
    assert_eq!(second.address("example.org").await.unwrap(), address);
}

#[tokio::test]
async fn more_connections_than_the_limit_are_reset() {
    let server = Server::echo().await;
    let limits = Limits {
        connections: 1,
        ..Limits::default()
    };
    let world = plan(&["example.com:7000"]).limits(limits).open(&server);
    let mut first = world.connect("example.com", 7000).await;
    assert_eq!(echoes(&mut first).await, Ok(()));
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        RESET
    );
    assert_eq!(
        world.blocked(),
        ["blocked: example.com:7000 (more than 1 connections at a time)"]
    );
    drop(first);
    drop(world.gateway.shared.places.acquire().await.unwrap());
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        Ok(())
    ); // control
}

#[tokio::test]
async fn all_connections_together_keep_to_the_rate() {
    let server = Server::echo().await;
    let limits = Limits {
        bytes_per_second: 1_000_000,
        ..Limits::default()
    };
    let world = plan(&["example.com:7000"]).limits(limits).open(&server);
    let exchange = async |mut stream: TcpStream| {
        let sent = vec![7; 200_000];
        let (mut read, mut write) = stream.split();
        let mut received = vec![0; sent.len()];
        let (written, filled) =
            tokio::join!(write.write_all(&sent), read.read_exact(&mut received));
        written.unwrap();
        filled.unwrap();
        assert!(sent == received); // control: limited is not lost
    };
    let (first, second) = (
        world.connect("example.com", 7000).await,
        world.connect("example.com", 7000).await,
    );
    let start = std::time::Instant::now();
    tokio::join!(exchange(first), exchange(second));
    // 800,000 bytes: out and back, twice. A tenth of a second is credit, and the last bytes are
    // counted only after they were transferred.
    assert!(
        start.elapsed() >= Duration::from_millis(500),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn one_half_of_a_connection_may_end_before_the_other() {
    let server = Server::start(|mut stream| async move {
        let mut request = Vec::new();
        stream.read_to_end(&mut request).await.unwrap();
        stream
            .write_all(format!("got {} bytes", request.len()).as_bytes())
            .await
            .unwrap();
    })
    .await;
    let world = plan(&["example.com:7000"]).open(&server);
    let mut stream = world.connect("example.com", 7000).await;
    stream.write_all(&[1; 70_000]).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert_eq!(answer, "got 70000 bytes");
}

#[tokio::test]
async fn a_reset_of_one_side_is_a_reset_for_the_other() {
    let (tell, told) = tokio::sync::oneshot::channel();
    let tell = Mutex::new(Some(tell));
    let server = Server::start(move |mut stream| {
        let tell = tell.lock().unwrap().take();
        async move {
            let first = stream.read_u8().await.unwrap();
            if first == b'r' {
                stream.set_zero_linger().unwrap();
                return;
            }
            stream.write_u8(first).await.unwrap();
            let next = stream.read_u8().await.map_err(|error| error.kind());
            tell.unwrap().send(next).unwrap();
        }
    })
    .await;
    let world = plan(&["example.com:7000"]).open(&server);
    let mut stream = world.connect("example.com", 7000).await;
    stream.write_u8(b'x').await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x'); // control
    stream.set_zero_linger().unwrap();
    drop(stream);
    assert_eq!(told.await.unwrap(), Err(io::ErrorKind::ConnectionReset));
    let mut stream = world.connect("example.com", 7000).await;
    stream.write_u8(b'r').await.unwrap();
    assert_eq!(
        stream.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
}

#[tokio::test]
async fn dropping_the_gateway_ends_everything() {
    let server = Server::echo().await;
    let world = plan(&["example.com:7000"]).open(&server);
    let mut stream = world.connect("example.com", 7000).await;
    assert_eq!(echoes(&mut stream).await, Ok(())); // control
    let World { gateway, door, .. } = world;
    drop(gateway);
    assert_eq!(
        stream.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(
        TcpStream::connect(door).await.unwrap_err().kind(),
        io::ErrorKind::ConnectionRefused
    );
}

#[tokio::test]
async fn without_restrictions_every_name_and_port_is_open_and_nothing_is_looked_at() {
    let (server, client) = Server::tls(&["example.com", "example.org"]).await;
    let mut plan = plan(&[]);
    plan.rules = Rules::everything();
    let world = plan.open(&server);
    for (name, port, said) in [
        ("example.com", 443, "example.org"),
        ("example.org", 80, "example.org"),
        ("api.example.com", 22, "example.com"),
    ] {
        assert_eq!(
            greeting(world.connect(name, port).await, &client, said)
                .await
                .unwrap(),
            GREETING
        );
    }
    let stream = world.connect_to("10.0.0.1:8443".parse().unwrap()).await;
    assert_eq!(
        greeting(stream, &client, "example.com").await.unwrap(),
        GREETING
    );
    let stream = world.connect_to("127.0.0.1:8443".parse().unwrap()).await;
    assert!(greeting(stream, &client, "example.com").await.is_err());
    assert_eq!(
        world.blocked(),
        ["blocked: 127.0.0.1:8443 (it leads to this machine's loopback)"]
    );
}

#[tokio::test]
async fn what_passed_without_a_look_ends_when_there_are_restrictions() {
    let server = Server::echo().await;
    let mut plan = plan(&[]);
    plan.rules = Rules::everything();
    let world = plan.open(&server);
    let mut unseen = world.connect("example.com", 443).await;
    let mut other = world.connect("example.com", 7000).await;
    assert_eq!(
        (echoes(&mut unseen).await, echoes(&mut other).await),
        (Ok(()), Ok(()))
    ); // control
    world
        .gateway
        .set_rules(Rules::parse(&["example.com:443,7000"]).unwrap());
    assert_eq!(
        unseen.read_u8().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(echoes(&mut other).await, Ok(())); // at this port the name is sufficient
}

#[tokio::test]
async fn tls_ends_here_for_a_name_that_has_a_secret_and_for_no_other() {
    let (server, client) = Server::tls(&["example.com", "api.example.com"]).await;
    let secret = Secret::parse("TOKEN=env:TOKEN@api.example.com", |_| {
        Some("value-of-the-secret".to_owned())
    })
    .unwrap();
    let mut plan = plan(&["example.com", "api.example.com:443,8443"]);
    plan.vault = Vault::new(vec![secret]).unwrap();
    let authority = Arc::new(Authority::new(&plan.vault, TrustRoots::system()).unwrap());
    let mut roots = RootCertStore::empty();
    roots
        .add(
            rustls::pki_types::pem::PemObject::from_pem_slice(
                authority.certificate_pem().as_bytes(),
            )
            .unwrap(),
        )
        .unwrap();
    let inside = client_trusting(roots);
    let world = plan.open_with(&server, Some(authority));
    let handshake = async |stream, client: &Arc<ClientConfig>, name: &str| {
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::clone(client))
            .connect(name, stream)
            .await
            .map(drop)
    };
    for port in [443, 8443] {
        handshake(
            world.connect("api.example.com", port).await,
            &inside,
            "api.example.com",
        )
        .await
        .unwrap();
        assert!(
            handshake(
                world.connect("api.example.com", port).await,
                &client,
                "api.example.com"
            )
            .await
            .is_err()
        );
    }
    handshake(
        world.connect("example.com", 443).await,
        &client,
        "example.com",
    )
    .await
    .unwrap(); // control: the server's own
    assert!(
        handshake(
            world.connect("example.com", 443).await,
            &inside,
            "example.com"
        )
        .await
        .is_err()
    );
}

#[tokio::test]
async fn a_name_that_has_a_secret_can_still_speak_something_else_at_other_ports() {
    let server = Server::start(|mut stream| async move {
        stream.write_all(GREETING).await.unwrap();
        stream.shutdown().await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let secret = Secret::parse("TOKEN=env:TOKEN@api.example.com", |_| {
        Some("value-of-the-secret".to_owned())
    })
    .unwrap();
    let mut plan = plan(&["api.example.com:7000"]);
    plan.vault = Vault::new(vec![secret]).unwrap();
    let authority = Arc::new(Authority::new(&plan.vault, TrustRoots::system()).unwrap());
    let world = plan.open_with(&server, Some(authority));
    // Both when the client sends first and when it waits for the server.
    assert_eq!(
        converse(world.connect("api.example.com", 7000).await, b"EHLO")
            .await
            .unwrap()
            .as_bytes(),
        GREETING
    );
    assert_eq!(
        converse(world.connect("api.example.com", 7000).await, b"")
            .await
            .unwrap()
            .as_bytes(),
        GREETING
    );
}

#[tokio::test]
async fn the_door_of_one_port_takes_the_address_from_the_connection() {
    let server = Server::echo().await;
    let listener = StandardTcpListener::bind("[::]:0").unwrap();
    let door = listener.local_addr().unwrap().port();
    let rules = Rules::parse(&["127.9.8.7:7000"]).unwrap();
    let Opening::Connections(listener, target) = Opening::of(Door::Port(7000, listener)) else {
        panic!()
    };
    let network = Arc::new(OneServer::at(server.address));
    let dialer = Dialer::over(Arc::new(Script::default()), Arc::clone(&network) as _);
    let openings = vec![Opening::Connections(listener, target)];
    let vault = Arc::new(Vault::none());
    let gateway =
        Gateway::open_over(openings, rules, vault, None, Limits::default(), dialer).unwrap();
    assert_eq!(
        echoes(&mut TcpStream::connect(("127.9.8.7", door)).await.unwrap()).await,
        Ok(())
    ); // control
    assert_eq!(
        *network.dialled.lock().unwrap(),
        ["127.9.8.7:7000".parse().unwrap()]
    );
    assert_eq!(
        echoes(&mut TcpStream::connect(("127.9.8.6", door)).await.unwrap()).await,
        RESET
    );
    assert_eq!(
        gateway.take_blocked()[0].to_string(),
        "blocked: 127.9.8.6:7000 (not in the allowed list)"
    );
}

/// Set when another test runs this one in a namespace. Without it, that test does nothing.
const IN_DEAD_END: &str = "CELLBLOCK_TEST_IN_DEAD_END";

/// Creates a namespace in which every address is local, like a session's, and runs one test of this
/// program in it.
#[test]
fn in_a_dead_end_every_address_is_a_door() {
    const DEAD_END: &str = "ip link set lo up && ip route add local default dev lo && ip -6 route \
                            add local default dev lo \
                            && exec \"$0\" --exact gateway::tests::what_happens_in_a_dead_end";
    let program = std::env::current_exe().unwrap();
    let unshare = |command: &[&str]| {
        let mut unshare = std::process::Command::new("unshare");
        unshare.env(IN_DEAD_END, "yes");
        unshare
            .args(["--user", "--map-root-user", "--net", "--"])
            .args(command)
            .arg(&program)
            .output()
    };
    if !unshare(&["sh", "-c", "ip link set lo up"]).is_ok_and(|tried| tried.status.success()) {
        eprintln!("skipped: needs unshare, ip and user namespaces");
        return;
    }
    let output = unshare(&["sh", "-c", DEAD_END]).unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[tokio::test]
async fn what_happens_in_a_dead_end() {
    if std::env::var_os(IN_DEAD_END).is_none() {
        return;
    }
    let server = Server::echo().await;
    let doors = [
        Door::Names(StandardUdpSocket::bind("[::]:53").unwrap()),
        Door::Port(7000, StandardTcpListener::bind("[::]:7000").unwrap()),
    ];
    let rules = Rules::parse(&[
        "example.com:7000",
        "192.168.1.0/24:7000",
        "[2001:db8::1]:7000",
    ])
    .unwrap();
    let script = Script::default().answer("example.com", &[&["93.184.215.14"]]);
    let network = Arc::new(OneServer::at(server.address));
    let dialer = Dialer::over(Arc::new(script), Arc::clone(&network) as _);
    let doors = doors.map(Opening::of).into();
    let gateway = Gateway::open_over(
        doors,
        rules,
        Arc::new(Vault::none()),
        None,
        Limits::default(),
        dialer,
    )
    .unwrap();
    // A connected socket accepts a response only from the address it queried.
    for name_server in [
        "8.8.8.8:53",
        "127.0.0.53:53",
        "[2001:4860:4860::8888]:53",
        "[::1]:53",
    ] {
        let name_server: SocketAddr = name_server.parse().unwrap();
        let client = UdpSocket::bind(if name_server.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        })
        .await
        .unwrap();
        client.connect(name_server).await.unwrap();
        assert_eq!(
            ask(&client, "example.com").await,
            Ok(Ipv4Addr::new(198, 18, 0, 1)),
            "{name_server}"
        );
        assert_eq!(
            ask(&client, "example.org").await,
            Err(ResponseCode::NXDomain)
        );
    }
    for target in ["198.18.0.1:7000", "192.168.1.5:7000", "[2001:db8::1]:7000"] {
        assert_eq!(
            echoes(&mut TcpStream::connect(target).await.unwrap()).await,
            Ok(()),
            "{target}"
        ); // control
    }
    let dialled = [
        "93.184.215.14:7000",
        "192.168.1.5:7000",
        "[2001:db8::1]:7000",
    ]
    .map(|target| target.parse().unwrap());
    assert_eq!(*network.dialled.lock().unwrap(), dialled);
    for target in [
        "198.18.0.2:7000",
        "93.184.215.14:7000",
        "[2001:db8::2]:7000",
    ] {
        assert_eq!(
            echoes(&mut TcpStream::connect(target).await.unwrap()).await,
            RESET,
            "{target}"
        );
    }
    // A port without a listener.
    assert_eq!(
        TcpStream::connect("198.18.0.1:22")
            .await
            .unwrap_err()
            .kind(),
        io::ErrorKind::ConnectionRefused
    );
    assert_eq!(gateway.take_blocked().len(), 4);
}

/// An approver for names below `example.org`, whose decisions the test makes.
struct Person {
    asked: tokio::sync::mpsc::UnboundedSender<(String, u16, tokio::sync::oneshot::Sender<bool>)>,
}

type Questions =
    tokio::sync::mpsc::UnboundedReceiver<(String, u16, tokio::sync::oneshot::Sender<bool>)>;

impl Asker for Person {
    fn may_allow(&self, name: &HostName) -> bool {
        name.to_string().ends_with("example.org")
    }

    fn ask(&self, name: &HostName, port: u16, _from: SocketAddr) -> BoxFuture<'static, bool> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let _ = self.asked.send((name.to_string(), port, reply));
        Box::pin(async { answer.await.unwrap_or(false) })
    }
}

impl World {
    fn with_a_person(&self) -> Questions {
        let (asked, questions) = tokio::sync::mpsc::unbounded_channel();
        self.gateway.set_asker(Some(Arc::new(Person { asked })));
        questions
    }
}

#[tokio::test]
async fn a_connection_to_a_name_that_is_not_listed_is_held_until_somebody_has_decided() {
    let server = Server::echo().await;
    let world = plan(&["example.com:7000"]).open(&server);
    assert_eq!(
        world.address("example.org").await,
        Err(ResponseCode::NXDomain),
        "nobody can be asked"
    );
    let mut questions = world.with_a_person();
    let mut stream = world.connect("example.org", 7000).await;
    let (name, port, reply) = questions.recv().await.unwrap();
    assert_eq!((name.as_str(), port), ("example.org", 7000));
    assert_eq!(
        (server.connections_seen(), world.resolver.times_asked()),
        (0, 0),
        "nothing goes out before the answer"
    );
    reply.send(true).unwrap();
    assert_eq!(echoes(&mut stream).await, Ok(()));
    assert_eq!(
        world.gateway.rules(),
        Rules::parse(&["example.com:7000"]).unwrap(),
        "it holds for this connection"
    );
    let mut other = world.connect("example.org", 7000).await;
    let (.., reply) = questions.recv().await.unwrap();
    reply.send(false).unwrap();
    assert_eq!(echoes(&mut other).await, RESET);
    assert_eq!(
        world.blocked(),
        [
            "blocked: example.org (not in the allowed list)",
            "blocked: example.org:7000 (not in the allowed list)",
        ]
    );
    assert_eq!(
        echoes(&mut stream).await,
        Ok(()),
        "the one that was allowed goes on"
    );
    assert_eq!(
        echoes(&mut world.connect("example.com", 7000).await).await,
        Ok(())
    );
    assert!(
        questions.try_recv().is_err(),
        "what is listed needs no answer"
    );
}

#[tokio::test]
async fn what_a_person_allows_still_leads_to_no_special_address_and_to_nothing_denied() {
    let server = Server::echo().await;
    let script = Script::default().answer("inside.example.org", &[&["10.1.2.3"]]);
    let world = plan(&["example.com:7000", "!denied.example.org"])
        .script(script)
        .open(&server);
    let mut questions = world.with_a_person();
    let mut stream = world.connect("inside.example.org", 7000).await;
    questions.recv().await.unwrap().2.send(true).unwrap();
    assert_eq!(echoes(&mut stream).await, RESET);
    assert_eq!(
        world.address("denied.example.org").await,
        Err(ResponseCode::NXDomain)
    );
    assert_eq!(
        world.address("example.net").await,
        Err(ResponseCode::NXDomain),
        "nobody would allow it"
    );
    assert!(questions.try_recv().is_err());
    assert_eq!(server.connections_seen(), 0);
}

#[tokio::test]
async fn so_many_connections_are_held_and_the_rest_is_refused() {
    let server = Server::echo().await;
    let world = plan(&["example.com:7000"]).open(&server);
    let mut questions = world.with_a_person();
    let mut held = Vec::new();
    let mut replies = Vec::new();
    for _ in 0..MAX_HELD {
        held.push(world.connect("example.org", 7000).await);
        replies.push(questions.recv().await.unwrap().2);
    }
    assert_eq!(
        echoes(&mut world.connect("example.org", 7000).await).await,
        RESET
    );
    drop(replies);
    for stream in &mut held {
        assert_eq!(
            echoes(stream).await,
            RESET,
            "an asker that is gone allows nothing"
        );
    }
    let mut next = world.connect("example.org", 7000).await; // control: there is room again
    questions.recv().await.unwrap().2.send(true).unwrap();
    assert_eq!(echoes(&mut next).await, Ok(()));
}
