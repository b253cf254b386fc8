//! What a session reaches when an operator opens something, and what it does not.
//!
//! Servers are on this machine's loopback interface; names are ours. `reach` is about names,
//! addresses, ports and other protocols, `tls` about HTTPS and the programs that speak it,
//! `questions` about DNS and what its answers may lead to, `limits` about rules that change and
//! about what one session may use up. `containers` opens the networks of others from outside,
//! `engines` those of real containers. `program` does the same with the built program and its
//! flags. `https` is a server with a certificate.

mod containers;
mod engines;
pub(crate) mod https;
mod limits;
mod program;
mod questions;
mod reach;
mod tls;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::future::Future;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use cellblock::sandbox::Rules;
use cellblock::sandbox::SandboxNetwork;
use cellblock::session::Outcome;
use cellblock_egress::gateway::Limits;
use cellblock_egress::name::HostName;
use cellblock_egress::resolve::Resolver;
use cellblock_egress::secrets::Vault;

use crate::support::native::{Builder, Native};

/// Where servers of these tests are.
pub(crate) const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A server that answers every connection with one line of HTTP, and remembers what it was sent.
pub(crate) struct Web {
    address: SocketAddr,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Web {
    pub(crate) fn start() -> Web {
        Web::serve(TcpListener::bind((HERE, 0)).unwrap())
    }

    pub(crate) fn serve(listener: TcpListener) -> Web {
        let address = listener.local_addr().unwrap();
        let heard = Arc::<Mutex<Vec<String>>>::default();
        let hears = Arc::clone(&heard);
        thread::spawn(move || {
            for mut connection in listener.incoming().flatten() {
                hears.lock().unwrap().push(String::new());
                let mut buffer = [0; 4096];
                let length = connection.read(&mut buffer).unwrap_or(0);
                let text = String::from_utf8_lossy(&buffer[..length]);
                hears
                    .lock()
                    .unwrap()
                    .last_mut()
                    .expect("it was just begun")
                    .push_str(&text);
                let _ = connection.write_all(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
                );
            }
        });
        Web { address, heard }
    }

    pub(crate) fn address(&self) -> IpAddr {
        self.address.ip()
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many connections there were.
    pub(crate) fn asked(&self) -> usize {
        self.heard.lock().unwrap().len()
    }

    /// The first bytes of each connection.
    pub(crate) fn heard(&self) -> Vec<String> {
        self.heard.lock().unwrap().clone()
    }
}

/// Listens on a well-known port of an address of the loopback interface that nobody uses there. Not
/// everybody may.
pub(crate) fn listen_at(port: u16) -> Option<TcpListener> {
    let addresses = (1..=254).map(|last| Ipv4Addr::new(127, 77, 0, last));
    for address in addresses {
        match TcpListener::bind((address, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
            listener => return Some(listener.unwrap()),
        }
    }
    panic!("all addresses are in use");
}

/// Knows the names of these tests, and counts questions.
#[derive(Default)]
pub(crate) struct Names {
    /// What is answered, one after another; the last answer stays.
    known: Mutex<HashMap<String, VecDeque<Vec<IpAddr>>>>,
    asked: AtomicUsize,
}

impl Names {
    /// Knows this name too.
    pub(crate) fn and(self: Arc<Self>, name: &str, answers: &[&[IpAddr]]) -> Arc<Names> {
        let answers = answers.iter().map(|answer| answer.to_vec()).collect();
        self.known.lock().unwrap().insert(name.to_owned(), answers);
        self
    }

    /// How many questions this resolver was asked.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Resolver for Names {
    fn resolve<'a>(
        &'a self,
        name: &'a HostName,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut known = self.known.lock().unwrap();
        let found = known
            .get_mut(name.as_str())
            .and_then(|answers| match answers.len() {
                0 | 1 => answers.front().cloned(),
                _ => answers.pop_front(),
            });
        Box::pin(async move { found.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
}

/// Knows `web.test` and `other.test`.
pub(crate) fn names() -> Arc<Names> {
    Arc::new(Names::default())
        .and("web.test", &[&[HERE]])
        .and("other.test", &[&[HERE]])
}

pub(crate) fn network(rules: Rules, resolver: Arc<Names>) -> SandboxNetwork {
    SandboxNetwork {
        rules,
        ports: BTreeSet::new(),
        vault: Arc::new(Vault::none()),
        authority: None,
        limits: Limits::default(),
        resolver,
    }
}

pub(crate) fn listed<S: AsRef<str>>(rules: &[S]) -> Rules {
    Rules::parse(rules).unwrap()
}

/// A backend from which a server can be reached as `web.test`.
fn opened(web: &Web, resolver: Arc<Names>) -> Native {
    let port = web.port();
    let rules = listed(&[format!("web.test:{port}"), format!("{HERE}:{port}")]);
    Builder::new("minimal")
        .network(network(rules, resolver))
        .start()
}

/// What was refused while a cell ran, as its result tells it.
pub(crate) fn blocked(outcome: &Outcome) -> Vec<String> {
    outcome.blocked.iter().map(ToString::to_string).collect()
}

/// Tries to connect; prints what came of it and whether that took no time.
const CONNECT: &str = "
import socket, time
def connect(host, port, kind=socket.SOCK_STREAM):
    begun = time.monotonic()
    try:
        with socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET, kind) as connection:
            connection.settimeout(20)
            connection.connect((host, port))
            connection.send(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
            answer = connection.recv(100).split(b'\\r')[0].decode() or 'closed'
    except OSError as error:
        answer = type(error).__name__
    return answer if time.monotonic() - begun < 10 else f'{answer}, too late'
";
