//! HTTPS on the loopback interface, with an authority that nobody else knows.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// Signs for the servers of a test.
pub(crate) struct Signer {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Signer {
    pub(crate) fn new() -> Signer {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "an authority of tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        Signer {
            issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap(),
        }
    }

    /// What whoever is to trust this authority needs.
    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// The server's side of TLS under these names.
    pub(crate) fn server(&self, names: &[&str]) -> ServerConfig {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names).unwrap();
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap()
    }
}

/// A request as it arrived.
#[derive(Debug, Clone, Default)]
pub(crate) struct Heard {
    /// The line of the request and its headers.
    pub(crate) head: String,
    /// What follows them, of the length that was announced.
    pub(crate) body: String,
}

impl Heard {
    pub(crate) fn path(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or_default()
    }

    /// The value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let is_named = |line: &&str| {
            line.to_lowercase()
                .starts_with(&format!("{}:", name.to_lowercase()))
        };
        let line = self.head.lines().find(is_named)?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

/// A server that answers what a function says, one request per connection.
pub(crate) struct Https {
    address: SocketAddr,
    connections: Arc<Mutex<usize>>,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Https {
    /// Serves `listener` under these names. `answer` returns the body of an answer, which is text.
    pub(crate) fn serve(
        listener: TcpListener,
        signer: &Signer,
        names: &[&str],
        answer: impl Fn(&Heard) -> String + Send + Sync + 'static,
    ) -> Https {
        let address = listener.local_addr().unwrap();
        let config = Arc::new(signer.server(names));
        let https = Https {
            address,
            connections: Arc::default(),
            heard: Arc::default(),
        };
        let (connections, heard) = (Arc::clone(&https.connections), Arc::clone(&https.heard));
        let answer = Arc::new(answer);
        // The threads end with the test process.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                *connections.lock().unwrap() += 1;
                let (config, heard, answer) =
                    (Arc::clone(&config), Arc::clone(&heard), Arc::clone(&answer));
                thread::spawn(move || exchange(stream, config, &heard, answer.as_ref()));
            }
        });
        https
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address.ip()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many connections there were, with TLS or without.
    pub(crate) fn connections(&self) -> usize {
        *self.connections.lock().unwrap()
    }

    /// All requests so far.
    pub(crate) fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }

    /// The last request.
    #[track_caller]
    pub(crate) fn last(&self) -> Heard {
        self.heard().pop().expect("there was a request")
    }
}

/// One connection with one request, if it is TLS at all.
fn exchange(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    heard: &Mutex<Vec<Heard>>,
    answer: &dyn Fn(&Heard) -> String,
) {
    let Ok(tls) = ServerConnection::new(config) else {
        return;
    };
    let mut stream = BufReader::new(StreamOwned::new(tls, stream));
    let Some(request) = read_request(&mut stream) else {
        return;
    };
    let body = answer(&request);
    heard.lock().unwrap().push(request);
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    let mut stream = stream.into_inner();
    let _ = stream
        .write_all(head.as_bytes())
        .and_then(|()| stream.write_all(body.as_bytes()));
    stream.conn.send_close_notify();
    let _ = stream.flush();
}

/// Reads one request, if all of it comes.
pub(crate) fn read_request(stream: &mut impl BufRead) -> Option<Heard> {
    let mut request = Heard::default();
    while !request.head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut request.head).ok()? == 0 {
            return None;
        }
    }
    let length = request
        .header("content-length")
        .and_then(|length| length.parse().ok())
        .unwrap_or(0);
    stream.take(length).read_to_string(&mut request.body).ok()?;
    Some(request)
}
