//! The real addresses of a name.
//!
//! Only [`crate::dial`] resolves, and only names that the rules allow: a name that is not listed
//! never leaves the machine. The answer is not trusted either: the dialer checks every address in
//! it.
//!
//! The machine's own settings apply (`/etc/resolv.conf`, `/etc/hosts`). They are read again when
//! they change, because a server outlives many networks. Aliases (CNAME) are followed, both address
//! families are queried, and answers are cached for their TTL, a minute at most.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::system_conf::read_system_conf;

use crate::name::HostName;

/// A boxed future, as traits and closures return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Resolves names to addresses.
pub trait Resolver: Send + Sync {
    /// Returns all addresses of `name`, of both families, in no particular order. The text of an
    /// error can be shown to the user.
    fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// Resolves with the settings of this machine.
#[derive(Default)]
pub struct SystemResolver {
    current: Mutex<Option<Current>>,
}

impl SystemResolver {
    /// Returns a resolver that reads the machine's settings on first use.
    pub fn new() -> SystemResolver {
        SystemResolver::default()
    }

    /// Returns a resolver for the current settings.
    fn current(&self) -> io::Result<Arc<TokioResolver>> {
        let settings = Settings::now();
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(current) = current
            .as_ref()
            .filter(|current| current.settings == settings)
        {
            return Ok(Arc::clone(&current.resolver));
        }
        let (config, options) = read_system_conf().unwrap_or_else(|error| {
            // A machine without DNS servers can still have a hosts file.
            tracing::debug!(%error, "no name servers are set up");
            (ResolverConfig::default(), ResolverOpts::default())
        });
        let resolver = Arc::new(build(config, options)?);
        *current = Some(Current {
            settings,
            resolver: Arc::clone(&resolver),
        });
        Ok(resolver)
    }
}

impl Resolver for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move { lookup(&*self.current()?, name).await })
    }
}

async fn lookup(resolver: &TokioResolver, name: &HostName) -> io::Result<Vec<IpAddr>> {
    match tokio::time::timeout(MAX_ANSWER_TIME, resolver.lookup_ip(question(name))).await {
        Ok(Ok(found)) => Ok(found.iter().collect()),
        Ok(Err(error)) if error.is_nx_domain() => Err(io::Error::new(
            io::ErrorKind::NotFound,
            "there is no such name",
        )),
        Ok(Err(error)) if error.is_no_records_found() => Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the name has no address",
        )),
        Ok(Err(error)) => {
            // The text of the cause can contain the addresses of our DNS servers, so it is only
            // logged.
            tracing::debug!(%error, "a name could not be resolved");
            Err(io::Error::other("the name servers gave no answer"))
        }
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the name servers did not answer in time",
        )),
    }
}

/// Timeout of a query, over all servers and retries. Programs give up on a connection after about
/// ten seconds.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(5);

/// Timeout per DNS server before the next one is queried.
const MAX_ATTEMPT_TIME: Duration = Duration::from_secs(2);

/// Limit for the TTL of an answer: rules apply to what a name means now.
const MAX_KEPT_TIME: Duration = Duration::from_secs(60);

/// Limit for the TTL of a negative answer, so that a newly created name is soon visible.
const MAX_KEPT_ABSENCE_TIME: Duration = Duration::from_secs(5);

struct Current {
    settings: Settings,
    resolver: Arc<TokioResolver>,
}

/// Modification times of the settings files.
#[derive(PartialEq)]
struct Settings([Option<SystemTime>; 2]);

impl Settings {
    fn now() -> Settings {
        let written = |path| {
            std::fs::metadata(path)
                .and_then(|file| file.modified())
                .ok()
        };
        Settings(["/etc/resolv.conf", "/etc/hosts"].map(written))
    }
}

/// Returns the name to query.
///
/// The trailing dot disables the machine's search list: `example.com` is never
/// `example.com.corp.example`. A single-label name is queried without it, since such names have a
/// meaning only through that list.
fn question(name: &HostName) -> String {
    if name.as_str().contains('.') {
        format!("{name}.")
    } else {
        name.to_string()
    }
}

fn build(config: ResolverConfig, mut options: ResolverOpts) -> io::Result<TokioResolver> {
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.timeout = options.timeout.min(MAX_ATTEMPT_TIME);
    options.positive_max_ttl = Some(MAX_KEPT_TIME);
    options.negative_max_ttl = Some(MAX_KEPT_ABSENCE_TIME);
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    *builder.options_mut() = options;
    builder.build().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hickory_proto::op::{Message, OpCode, ResponseCode};
    use hickory_proto::rr::rdata::{A, AAAA, CNAME};
    use hickory_proto::rr::{Name as DnsName, RData, Record, RecordType};
    use hickory_resolver::config::NameServerConfig;
    use tokio::net::UdpSocket;

    use super::*;

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    #[tokio::test]
    async fn a_name_of_the_hosts_file_is_found() {
        let addresses = SystemResolver::new()
            .resolve(&name("localhost"))
            .await
            .unwrap();
        assert!(!addresses.is_empty());
        assert!(addresses.iter().all(IpAddr::is_loopback), "{addresses:?}");
    }

    #[tokio::test]
    async fn a_name_that_cannot_exist_is_an_error_that_can_be_shown() {
        let error = SystemResolver::new()
            .resolve(&name("nothing.invalid"))
            .await
            .unwrap_err();
        assert!(
            error.to_string().starts_with("the name")
                || error.to_string().starts_with("there is no"),
            "{error}"
        );
    }

    /// Starts a DNS server that answers with these records (owner, type, value) and counts the
    /// queries. Returns a resolver that uses it.
    async fn resolver_of(
        records: &'static [(&'static str, RecordType, &'static str)],
        seconds_kept: u32,
    ) -> (TokioResolver, Arc<AtomicUsize>) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let questions = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&questions);
        tokio::spawn(async move {
            let mut buffer = [0; 1500];
            loop {
                let (length, client) = socket.recv_from(&mut buffer).await.unwrap();
                counter.fetch_add(1, Ordering::SeqCst);
                let answer = answer(
                    Message::from_vec(&buffer[..length]).unwrap(),
                    records,
                    seconds_kept,
                );
                socket
                    .send_to(&answer.to_vec().unwrap(), client)
                    .await
                    .unwrap();
            }
        });
        let mut server = NameServerConfig::udp(address.ip());
        server.connections[0].port = address.port();
        let config = ResolverConfig::from_parts(None, vec![], vec![server]);
        (build(config, ResolverOpts::default()).unwrap(), questions)
    }

    /// Answers as a recursive DNS server does: with the whole chain of aliases.
    fn answer(
        question: Message,
        records: &[(&str, RecordType, &str)],
        seconds_kept: u32,
    ) -> Message {
        let query = question.queries[0].clone();
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.metadata.recursion_available = true;
        answer.add_query(query.clone());
        let mut owner = query.name().to_ascii().to_lowercase();
        while let Some((_, _, alias)) = records
            .iter()
            .find(|(name, kind, _)| *name == owner && *kind == RecordType::CNAME)
        {
            let alias_name = DnsName::from_ascii(alias).unwrap();
            let rdata = RData::CNAME(CNAME(alias_name));
            answer.add_answer(Record::from_rdata(
                DnsName::from_ascii(&owner).unwrap(),
                seconds_kept,
                rdata,
            ));
            owner = (*alias).to_owned();
        }
        let known = records.iter().any(|(name, _, _)| *name == owner);
        for (name, kind, value) in records
            .iter()
            .filter(|(name, kind, _)| *name == owner && *kind == query.query_type())
        {
            let rdata = match *kind {
                RecordType::A => RData::A(A(value.parse().unwrap())),
                _ => RData::AAAA(AAAA(value.parse().unwrap())),
            };
            answer.add_answer(Record::from_rdata(
                DnsName::from_ascii(name).unwrap(),
                seconds_kept,
                rdata,
            ));
        }
        answer.metadata.response_code = if known {
            ResponseCode::NoError
        } else {
            ResponseCode::NXDomain
        };
        answer
    }

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn aliases_are_followed_to_all_addresses_of_both_families() {
        let (resolver, _) = resolver_of(
            &[
                ("www.example.com.", RecordType::CNAME, "edge.example.net."),
                ("edge.example.net.", RecordType::CNAME, "inner.example.org."),
                ("inner.example.org.", RecordType::A, "93.184.215.14"),
                ("inner.example.org.", RecordType::A, "10.0.0.1"),
                ("inner.example.org.", RecordType::AAAA, "64:ff9b::a00:1"),
            ],
            60,
        )
        .await;
        let mut found = lookup(&resolver, &name("www.example.com")).await.unwrap();
        found.sort();
        assert_eq!(
            found,
            addresses(&["10.0.0.1", "93.184.215.14", "64:ff9b::a00:1"])
        );
    }

    #[tokio::test]
    async fn an_answer_is_kept_as_long_as_it_says() {
        let records = &[
            ("example.com.", RecordType::A, "93.184.215.14"),
            ("example.com.", RecordType::AAAA, "2606:4700::1"),
        ];
        for (seconds_kept, expected) in [(0, 4), (60, 2)] {
            let (resolver, questions) = resolver_of(records, seconds_kept).await;
            lookup(&resolver, &name("example.com")).await.unwrap();
            lookup(&resolver, &name("example.com")).await.unwrap();
            assert_eq!(
                questions.load(Ordering::SeqCst),
                expected,
                "kept for {seconds_kept} s"
            );
        }
    }

    #[tokio::test]
    async fn a_name_that_does_not_exist_and_one_without_addresses_are_told_apart() {
        let (resolver, _) = resolver_of(&[("text.example.com.", RecordType::TXT, "")], 60).await;
        let text = async |text: &str| {
            lookup(&resolver, &name(text))
                .await
                .unwrap_err()
                .to_string()
        };
        assert_eq!(text("gone.example.com").await, "there is no such name");
        assert_eq!(text("text.example.com").await, "the name has no address");
    }

    #[test]
    fn a_search_list_extends_only_names_of_one_label() {
        assert_eq!(question(&name("example.com")), "example.com.");
        assert_eq!(question(&name("intranet")), "intranet");
    }

    #[tokio::test]
    async fn settings_that_did_not_change_are_not_read_again() {
        let resolver = SystemResolver::new();
        assert!(Arc::ptr_eq(
            &resolver.current().unwrap(),
            &resolver.current().unwrap()
        ));
        resolver.current.lock().unwrap().as_mut().unwrap().settings = Settings([None, None]);
        let before = Arc::clone(&resolver.current.lock().unwrap().as_ref().unwrap().resolver);
        assert!(!Arc::ptr_eq(&before, &resolver.current().unwrap()));
    }
}
