//! Opens every outgoing connection.
//!
//! ```text
//!  name → allowed at this port? → resolve → check EVERY address → connect to one of exactly those
//!  address → listed by a rule?  ─────────────────────────────→ connect to it
//! ```
//!
//! A name is resolved once per connection, and exactly the checked addresses are dialled, so DNS
//! rebinding (a different answer to a second query) has no effect. One bad address among good ones
//! refuses the whole connection: such an answer is an attack or a mistake, and the result should
//! not depend on which of its addresses is tried.
//!
//! Special addresses (private, link-local, metadata, this machine's own, …) are dialled only if a
//! rule lists them as addresses. "Everything" lists them too, with one exception: this machine's
//! loopback. To a program inside, 127.0.0.1 means the sandbox, so a connection that ended at the
//! host's loopback would be an unintended way into the host.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use crate::address;
use crate::name::UrlHost;
use crate::resolve::{BoxFuture, Resolver};
use crate::rules::Rules;

/// Opens another checked connection to the host that a connection from inside is for. Every call is
/// decided anew under the current rules.
pub(crate) type Dial = dyn Fn() -> BoxFuture<'static, io::Result<TcpStream>> + Send + Sync;

/// Opens connections, after checks.
#[derive(Clone)]
pub(crate) struct Dialer {
    resolver: Arc<dyn Resolver>,
    network: Arc<dyn OutboundNetwork>,
}

/// Makes the connections that were decided here. Tests replace it with a recorder.
pub(crate) trait OutboundNetwork: Send + Sync {
    /// Connects to exactly this address.
    fn connect(&self, target: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>>;

    /// Returns the addresses of this machine.
    fn own_addresses(&self) -> io::Result<HashSet<IpAddr>>;
}

/// Reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    #[error("not in the allowed list")]
    NotListed,
    #[error("could not be resolved: {0}")]
    Unresolved(#[source] io::Error),
    #[error("{0}")]
    Special(Objection),
    #[error("could not be reached: {0}")]
    Unreachable(#[source] io::Error),
}

/// The objection to an address. The address itself is not disclosed: our network's layout must not
/// leak into the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Objection {
    /// It is a special or denied address, of this kind.
    #[error("it leads to {0}, which must be in the allowed list as an address")]
    Special(&'static str),
    /// It is an address of this machine.
    #[error(
        "it leads to an address of this machine, which must be in the allowed list as an address"
    )]
    Own,
    /// It is this machine's loopback, which is not part of "everything".
    #[error("it leads to this machine's loopback")]
    Loopback,
}

impl Dialer {
    /// Returns a dialer for this machine's network.
    pub(crate) fn new(resolver: Arc<dyn Resolver>) -> Dialer {
        Dialer::over(resolver, Arc::new(ThisMachine))
    }

    pub(crate) fn over(resolver: Arc<dyn Resolver>, network: Arc<dyn OutboundNetwork>) -> Dialer {
        Dialer { resolver, network }
    }

    /// Connects to `host` at `port` if `rules` allow it. Returns the connection and the address it
    /// was made to.
    pub(crate) async fn dial(
        &self,
        host: &UrlHost,
        port: u16,
        rules: &Rules,
    ) -> Result<(TcpStream, IpAddr), DialError> {
        let addresses = match host {
            UrlHost::Name(name) if rules.allows_name(name, port) => {
                let found = timeout(MAX_RESOLUTION_TIME, self.resolver.resolve(name)).await;
                found
                    .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                    .map_err(DialError::Unresolved)?
            }
            UrlHost::Address(address) if rules.allows_address(*address, port) => vec![*address],
            UrlHost::Name(_) | UrlHost::Address(_) => return Err(DialError::NotListed),
        };
        if addresses.is_empty() {
            return Err(DialError::Unresolved(io::Error::other(
                "the name has no address",
            )));
        }
        let own = self
            .network
            .own_addresses()
            .map_err(DialError::Unreachable)?;
        for address in &addresses {
            objection(*address, port, rules, &own)
                .map_or(Ok(()), |objection| Err(DialError::Special(objection)))?;
        }
        self.connect(addresses, port)
            .await
            .map_err(DialError::Unreachable)
    }

    /// Returns whether `rules` allow a connection that was made to these addresses of `host`.
    pub(crate) fn allows(
        &self,
        host: &UrlHost,
        port: u16,
        dialled: &HashSet<IpAddr>,
        rules: &Rules,
    ) -> bool {
        let is_listed = match host {
            UrlHost::Name(name) => rules.allows_name(name, port),
            UrlHost::Address(address) => rules.allows_address(*address, port),
        };
        let may_stay = |own| {
            dialled
                .iter()
                .all(|address| objection(*address, port, rules, &own).is_none())
        };
        is_listed && (dialled.is_empty() || self.network.own_addresses().is_ok_and(may_stay))
    }

    /// Connects to the first of these addresses that answers. All of them were checked before.
    async fn connect(
        &self,
        mut addresses: Vec<IpAddr>,
        port: u16,
    ) -> io::Result<(TcpStream, IpAddr)> {
        // IPv4 first. An address family that this machine lacks fails at once; one that is broken
        // costs time, and that is more often IPv6.
        addresses.sort_by_key(IpAddr::is_ipv6);
        addresses.dedup();
        let deadline = Instant::now() + MAX_DIAL_TIME;
        let mut failure = io::ErrorKind::TimedOut.into();
        for address in addresses.into_iter().take(MAX_ATTEMPTS) {
            // An IPv4-mapped address is the only form that is the same address twice: the kernel
            // would make an IPv4 connection anyway.
            let address = address.to_canonical();
            let attempt = self.network.connect(SocketAddr::new(address, port));
            let until = deadline.min(Instant::now() + MAX_ATTEMPT_TIME);
            match timeout_at(until, attempt)
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            {
                Ok(stream) => return Ok((stream, address)),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

/// Returns the objection to a connection to `address`, which an allowed name resolved to or which
/// is listed itself. `own` are the addresses of this machine.
pub(crate) fn objection(
    address: IpAddr,
    port: u16,
    rules: &Rules,
    own: &HashSet<IpAddr>,
) -> Option<Objection> {
    if let Some(kind) = rules.refuses_answer(address, port) {
        return Some(Objection::Special(kind));
    }
    let is_loopback = |meaning: IpAddr| meaning.is_loopback() || meaning.is_unspecified();
    if address::meanings(address).any(is_loopback) && !rules.lists_address(address, port) {
        return Some(Objection::Loopback);
    }
    let is_own = address::meanings(address).any(|meaning| own.contains(&meaning));
    (is_own && !rules.allows_address(address, port)).then_some(Objection::Own)
}

/// Timeout for resolution. Resolvers have their own timeout; this is for one that does not.
const MAX_RESOLUTION_TIME: Duration = Duration::from_secs(6);

/// Timeout per address. A handshake to the other side of the world takes half a second.
const MAX_ATTEMPT_TIME: Duration = Duration::from_secs(5);

/// Timeout for all addresses together.
const MAX_DIAL_TIME: Duration = Duration::from_secs(15);

/// Limit of addresses that are tried. All of them are checked.
const MAX_ATTEMPTS: usize = 6;

/// Idle time after which TCP keepalive probes the remote end.
const SILENCE: Duration = Duration::from_secs(60);

struct ThisMachine;

impl OutboundNetwork for ThisMachine {
    fn connect(&self, target: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>> {
        Box::pin(async move {
            let stream = TcpStream::connect(target).await?;
            // Data is forwarded as it arrives. Nagle's algorithm would only add to the delay of the
            // program inside.
            stream.set_nodelay(true)?;
            rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
            rustix::net::sockopt::set_tcp_keepidle(&stream, SILENCE)?;
            Ok(stream)
        })
    }

    fn own_addresses(&self) -> io::Result<HashSet<IpAddr>> {
        let interfaces = nix::ifaddrs::getifaddrs()?;
        Ok(interfaces
            .filter_map(|interface| ip_address(&interface.address?))
            .collect())
    }
}

fn ip_address(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    let v4 = address
        .as_sockaddr_in()
        .map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| {
        address
            .as_sockaddr_in6()
            .map(|address| IpAddr::V6(address.ip()))
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::net::TcpListener;

    use super::*;
    use crate::name::HostName;

    /// A resolver with scripted answers.
    #[derive(Default)]
    pub(crate) struct Script {
        answers: Vec<(&'static str, Vec<Vec<IpAddr>>)>,
        asked: AtomicUsize,
    }

    impl Script {
        /// Answers queries for `name` with these lists of addresses, one after another. The last
        /// one repeats.
        pub(crate) fn answer(mut self, name: &'static str, answers: &[&[&str]]) -> Script {
            let parse = |list: &&[&str]| list.iter().map(|text| text.parse().unwrap()).collect();
            self.answers
                .push((name, answers.iter().map(parse).collect()));
            self
        }

        pub(crate) fn times_asked(&self) -> usize {
            self.asked.load(Ordering::SeqCst)
        }
    }

    impl Resolver for Script {
        fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            let turn = self.asked.fetch_add(1, Ordering::SeqCst);
            let answers = self
                .answers
                .iter()
                .find(|(known, _)| *known == name.as_str())
                .map(|(_, answers)| answers);
            let answer = answers.map(|answers| answers[turn.min(answers.len() - 1)].clone());
            Box::pin(async move {
                answer
                    .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there is no such name"))
            })
        }
    }

    /// A network in which every address is a server of the test, and which records what was
    /// dialled.
    pub(crate) struct OneServer {
        server: SocketAddr,
        pub(crate) dialled: Mutex<Vec<SocketAddr>>,
        dead: Vec<IpAddr>,
    }

    impl OneServer {
        pub(crate) fn at(server: SocketAddr) -> OneServer {
            OneServer {
                server,
                dialled: Mutex::default(),
                dead: Vec::new(),
            }
        }
    }

    impl OutboundNetwork for OneServer {
        fn connect(&self, target: SocketAddr) -> BoxFuture<'static, io::Result<TcpStream>> {
            self.dialled.lock().unwrap().push(target);
            let (server, dead) = (self.server, self.dead.contains(&target.ip()));
            Box::pin(async move {
                if dead {
                    Err(io::ErrorKind::ConnectionRefused.into())
                } else {
                    TcpStream::connect(server).await
                }
            })
        }

        fn own_addresses(&self) -> io::Result<HashSet<IpAddr>> {
            Ok([IpAddr::from([9, 9, 9, 9]), "2620:fe::9".parse().unwrap()].into())
        }
    }

    /// Dials `host` under these rules with a resolver that gives these answers. Returns the result
    /// and the dialled addresses.
    async fn attempt_with(
        rules: &Rules,
        host: &UrlHost,
        port: u16,
        script: Script,
        dead: &[&str],
    ) -> (Result<IpAddr, DialError>, Vec<SocketAddr>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut network = OneServer::at(listener.local_addr().unwrap());
        network.dead = dead.iter().map(|text| text.parse().unwrap()).collect();
        let network = Arc::new(network);
        let dialer = Dialer::over(
            Arc::new(script),
            Arc::clone(&network) as Arc<dyn OutboundNetwork>,
        );
        let outcome = dialer
            .dial(host, port, rules)
            .await
            .map(|(_, address)| address);
        let dialled = network.dialled.lock().unwrap().clone();
        (outcome, dialled)
    }

    async fn attempt(
        rules: &[&str],
        addresses: &[&str],
    ) -> (Result<IpAddr, DialError>, Vec<SocketAddr>) {
        let script = Script::default().answer("api.example.com", &[addresses]);
        attempt_with(
            &Rules::parse(rules).unwrap(),
            &name("api.example.com"),
            443,
            script,
            &[],
        )
        .await
    }

    fn name(text: &str) -> UrlHost {
        UrlHost::Name(HostName::parse(text).unwrap())
    }

    fn special(outcome: &(Result<IpAddr, DialError>, Vec<SocketAddr>)) -> bool {
        matches!(outcome.0, Err(DialError::Special(_))) && outcome.1.is_empty()
    }

    #[tokio::test]
    async fn a_public_address_of_a_listed_name_is_dialled_exactly() {
        let (outcome, dialled) = attempt(&["api.example.com"], &["93.184.215.14"]).await;
        assert_eq!(outcome.unwrap(), IpAddr::from([93, 184, 215, 14]));
        assert_eq!(dialled, ["93.184.215.14:443".parse().unwrap()]);
    }

    #[tokio::test]
    async fn a_name_that_is_not_listed_is_not_even_resolved() {
        let script = Arc::new(Script::default().answer("other.example.com", &[&["93.184.215.14"]]));
        let network = Arc::new(OneServer::at("127.0.0.1:1".parse().unwrap()));
        let dialer = Dialer::over(Arc::clone(&script) as Arc<dyn Resolver>, network);
        let rules = Rules::parse(&["api.example.com"]).unwrap();
        assert!(matches!(
            dialer.dial(&name("other.example.com"), 443, &rules).await,
            Err(DialError::NotListed)
        ));
        assert!(matches!(
            dialer.dial(&name("api.example.com"), 22, &rules).await,
            Err(DialError::NotListed)
        ));
        assert_eq!(script.times_asked(), 0);
        let listed = dialer.dial(&name("api.example.com"), 443, &rules).await;
        assert!(matches!(listed, Err(DialError::Unresolved(_)))); // control: this one was asked for
        assert_eq!(script.times_asked(), 1);
    }

    #[tokio::test]
    async fn a_name_that_resolves_to_a_special_address_is_refused_unless_the_address_is_listed() {
        for (address, listed) in [
            ("127.0.0.1", ["127.0.0.0/8"].as_slice()),
            ("10.0.0.1", &["10.0.0.0/8"]),
            ("192.168.1.5", &["192.168.1.0/24"]),
            ("169.254.169.254", &["169.254.169.254"]),
            ("100.64.0.1", &["100.64.0.0/10"]),
            ("::1", &["::1"]),
            ("fd00::1", &["fd00::/8"]),
            ("::ffff:10.0.0.1", &["10.0.0.0/8"]),
            ("64:ff9b::a00:1", &["64:ff9b::/96", "10.0.0.0/8"]),
            ("2002:a00:1::1", &["2002::/16", "10.0.0.0/8"]),
        ] {
            assert!(
                special(&attempt(&["api.example.com"], &[address]).await),
                "{address}"
            );
            let (outcome, dialled) =
                attempt(&[&["api.example.com"], listed].concat(), &[address]).await;
            assert!(
                outcome.is_ok() && dialled.len() == 1,
                "{address}: {outcome:?}"
            ); // control
        }
    }

    #[tokio::test]
    async fn this_machines_own_addresses_are_special_too() {
        for (own, listed) in [
            ("9.9.9.9", "9.9.9.9"),
            ("2620:fe::9", "2620:fe::9"),
            ("::ffff:9.9.9.9", "9.9.9.9"),
        ] {
            let (outcome, _) = attempt(&["api.example.com"], &[own]).await;
            assert!(
                matches!(outcome, Err(DialError::Special(Objection::Own))),
                "{own}: {outcome:?}"
            );
            assert!(
                attempt(&["api.example.com", listed], &[own])
                    .await
                    .0
                    .is_ok()
            ); // control
        }
    }

    #[tokio::test]
    async fn one_bad_address_among_good_ones_refuses_the_connection() {
        assert!(special(
            &attempt(
                &["api.example.com"],
                &["93.184.215.14", "1.1.1.1", "10.0.0.1"]
            )
            .await
        ));
        assert!(
            attempt(&["api.example.com"], &["93.184.215.14", "1.1.1.1"])
                .await
                .0
                .is_ok()
        ); // control
    }

    #[tokio::test]
    async fn a_denied_address_is_refused_whatever_name_leads_to_it() {
        assert!(special(
            &attempt(&["api.example.com", "!93.184.215.0/24"], &["93.184.215.14"]).await
        ));
        assert!(
            attempt(&["api.example.com", "!93.184.216.0/24"], &["93.184.215.14"])
                .await
                .0
                .is_ok()
        ); // control
    }

    #[tokio::test]
    async fn a_rule_for_another_port_of_an_address_does_not_help() {
        assert!(special(
            &attempt(&["api.example.com", "10.0.0.1:8080"], &["10.0.0.1"]).await
        ));
        assert!(
            attempt(&["api.example.com", "10.0.0.1:443"], &["10.0.0.1"])
                .await
                .0
                .is_ok()
        ); // control
    }

    #[tokio::test]
    async fn an_answer_that_flips_is_checked_each_time_and_never_asked_for_twice() {
        let script = Arc::new(
            Script::default().answer("api.example.com", &[&["93.184.215.14"], &["127.0.0.1"]]),
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let network = Arc::new(OneServer::at(listener.local_addr().unwrap()));
        let dialer = Dialer::over(
            Arc::clone(&script) as Arc<dyn Resolver>,
            Arc::clone(&network) as Arc<dyn OutboundNetwork>,
        );
        let rules = Rules::parse(&["api.example.com"]).unwrap();
        assert!(
            dialer
                .dial(&name("api.example.com"), 443, &rules)
                .await
                .is_ok()
        ); // control
        assert_eq!(script.times_asked(), 1);
        let second = dialer.dial(&name("api.example.com"), 443, &rules).await;
        assert!(matches!(second, Err(DialError::Special(_))));
        assert_eq!(
            *network.dialled.lock().unwrap(),
            ["93.184.215.14:443".parse().unwrap()]
        );
    }

    #[tokio::test]
    async fn the_next_address_is_tried_when_one_does_not_answer() {
        let script = Script::default().answer(
            "api.example.com",
            &[&["2606:4700::1111", "1.1.1.1", "1.0.0.1"]],
        );
        let rules = Rules::parse(&["api.example.com"]).unwrap();
        let (outcome, dialled) = attempt_with(
            &rules,
            &name("api.example.com"),
            443,
            script,
            &["1.1.1.1", "1.0.0.1"],
        )
        .await;
        assert_eq!(
            outcome.unwrap(),
            "2606:4700::1111".parse::<IpAddr>().unwrap()
        );
        assert_eq!(dialled.len(), 3);
    }

    #[tokio::test]
    async fn an_address_is_dialled_only_by_a_rule_for_addresses() {
        let target = UrlHost::Address("192.168.1.7".parse().unwrap());
        let dial = async |rules: &[&str]| {
            attempt_with(
                &Rules::parse(rules).unwrap(),
                &target,
                443,
                Script::default(),
                &[],
            )
            .await
            .0
        };
        assert!(matches!(
            dial(&["**.example.com", "192.168.2.0/24", "192.168.1.7:80"]).await,
            Err(DialError::NotListed)
        ));
        assert!(dial(&["192.168.1.0/24"]).await.is_ok()); // control
    }

    #[tokio::test]
    async fn everything_is_everything_but_the_loopback_of_this_machine() {
        let dial = async |address: &str| {
            let script = Script::default();
            attempt_with(
                &Rules::everything(),
                &UrlHost::Address(address.parse().unwrap()),
                22,
                script,
                &[],
            )
            .await
            .0
        };
        for address in [
            "10.0.0.1",
            "169.254.169.254",
            "9.9.9.9",
            "93.184.215.14",
            "fd00::1",
        ] {
            assert!(dial(address).await.is_ok(), "{address}"); // control
        }
        for address in [
            "127.0.0.1",
            "127.3.4.5",
            "::1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "::",
            "64:ff9b::7f00:1",
        ] {
            assert!(
                matches!(
                    dial(address).await,
                    Err(DialError::Special(Objection::Loopback))
                ),
                "{address}"
            );
        }
        let script = Script::default().answer("rebound.example.com", &[&["127.0.0.1"]]);
        let (outcome, _) = attempt_with(
            &Rules::everything(),
            &name("rebound.example.com"),
            80,
            script,
            &[],
        )
        .await;
        assert!(matches!(
            outcome,
            Err(DialError::Special(Objection::Loopback))
        ));
    }

    #[test]
    fn this_machine_knows_its_own_addresses() {
        let own = ThisMachine.own_addresses().unwrap();
        assert!(own.iter().any(IpAddr::is_loopback), "{own:?}");
    }

    #[tokio::test]
    async fn the_network_of_this_machine_connects() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap();
        let dialer = Dialer::new(Arc::new(
            Script::default().answer("local.example.com", &[&["127.0.0.1"]]),
        ));
        let rules = Rules::parse(&[
            format!("local.example.com:{}", target.port()),
            format!("{target}"),
        ])
        .unwrap();
        let (stream, address) = dialer
            .dial(&name("local.example.com"), target.port(), &rules)
            .await
            .unwrap();
        assert_eq!(
            (stream.peer_addr().unwrap(), address),
            (target, target.ip())
        );
    }
}
