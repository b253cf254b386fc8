//! DNS server for the sandbox.
//!
//! Answers for listed names come from the table of [`crate::names`]. Any other name does not exist.
//! No other server is ever queried: there is no resolver in this file, so a query cannot carry data
//! out, whatever name it contains.
//!
//! ```text
//!  listed name, A                        its address
//!  listed name, any other type           no records: the address is the only way to connect
//!  any other name                        NXDOMAIN, and a note for the user
//!  too many queries in a second          REFUSED, then no response
//! ```
//!
//! Programs may query any server, because every address is local in the namespace. They drop a
//! response that comes from another address than the one they queried, so every response is sent
//! from exactly that address.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::UdpSocket as StandardUdpSocket;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{DNSClass, RData, Record, RecordType};
use nix::libc::{in_pktinfo, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
    sockopt,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::name::HostName;
use crate::names::Names;

/// The socket for DNS queries, in the namespace of one session.
pub(crate) struct NameServer {
    socket: UdpSocket,
    rate: Rate,
}

/// Decides which names resolve.
pub(crate) trait Listed: Send + Sync {
    /// Returns whether the name may resolve inside.
    fn lists(&self, name: &HostName) -> bool;

    /// Receives each query for a name that is not listed. `attempt` is false for a query that
    /// accompanies another one.
    fn refused(&self, name: &HostName, attempt: bool);
}

impl NameServer {
    /// Takes a dual-stack socket, or an IPv4 one where the kernel has no IPv6. Fails if responses
    /// could not be sent from the queried address.
    pub(crate) fn new(
        socket: StandardUdpSocket,
        questions_per_second: u32,
    ) -> io::Result<NameServer> {
        socket.set_nonblocking(true)?;
        // The kernel then reports the destination address of each query.
        if socket.local_addr()?.is_ipv4() {
            setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
        } else {
            // A query over IPv4 has an IPv4-mapped address here.
            setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
            // Without this, an IPv6 address that is local only by a route cannot be the source of a
            // response.
            rustix::net::sockopt::set_ipv6_freebind(&socket, true)?;
        }
        Ok(NameServer {
            socket: UdpSocket::from_std(socket)?,
            rate: Rate::new(questions_per_second),
        })
    }

    /// Answers queries until it is dropped.
    pub(crate) async fn serve(mut self, names: Arc<Names>, listed: Arc<dyn Listed>) {
        let mut buffer = [0; MAX_QUESTION_BYTES];
        loop {
            let question = match self.receive(&mut buffer).await {
                Ok(question) => question,
                Err(error) => {
                    tracing::debug!(%error, "a question for a name could not be read");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            let verdict = self.rate.verdict(Instant::now());
            let Some(answer) = question
                .bytes
                .and_then(|bytes| answer(bytes, verdict, &names, listed.as_ref()))
            else {
                continue;
            };
            if let Err(error) = self.send(&answer, question.asker, question.asked).await {
                tracing::debug!(%error, "an answer about a name could not be sent");
            }
        }
    }

    async fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<Question<'a>> {
        let descriptor = self.socket.as_raw_fd();
        let (length, asker, asked) = self
            .socket
            .async_io(Interest::READABLE, || {
                let mut control = nix::cmsg_space!(in6_pktinfo);
                let mut slices = [IoSliceMut::new(buffer)];
                // Without MSG_TRUNC, so that the length of an oversized datagram is the whole
                // buffer.
                let received = recvmsg::<SockaddrStorage>(
                    descriptor,
                    &mut slices,
                    Some(&mut control),
                    MsgFlags::empty(),
                )?;
                let asked = received
                    .cmsgs()?
                    .find_map(Asked::of)
                    .ok_or(io::ErrorKind::InvalidData)?;
                Ok((
                    received.bytes,
                    received.address.ok_or(io::ErrorKind::InvalidData)?,
                    asked,
                ))
            })
            .await?;
        let bytes = (length < MAX_QUESTION_BYTES).then(|| &buffer[..length]);
        Ok(Question {
            bytes,
            asker,
            asked,
        })
    }

    async fn send(&self, answer: &[u8], asker: SockaddrStorage, asked: Asked) -> io::Result<()> {
        let descriptor = self.socket.as_raw_fd();
        self.socket
            .async_io(Interest::WRITABLE, || {
                let source = [match &asked {
                    Asked::V4(asked) => ControlMessage::Ipv4PacketInfo(asked),
                    Asked::V6(asked) => ControlMessage::Ipv6PacketInfo(asked),
                }];
                sendmsg(
                    descriptor,
                    &[IoSlice::new(answer)],
                    &source,
                    MsgFlags::empty(),
                    Some(&asker),
                )?;
                Ok(())
            })
            .await
    }
}

/// The address that was queried, in the form that the kernel accepts as the source of a response.
enum Asked {
    V4(in_pktinfo),
    V6(in6_pktinfo),
}

impl Asked {
    /// The response may use any interface: the namespace has only one.
    fn of(message: ControlMessageOwned) -> Option<Asked> {
        match message {
            ControlMessageOwned::Ipv4PacketInfo(asked) => Some(Asked::V4(in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: asked.ipi_addr,
                ..asked
            })),
            ControlMessageOwned::Ipv6PacketInfo(asked) => Some(Asked::V6(in6_pktinfo {
                ipi6_ifindex: 0,
                ..asked
            })),
            _ => None,
        }
    }
}

/// Size limit of a query. One name needs 271 bytes; EDNS options add some.
const MAX_QUESTION_BYTES: usize = 1232;

/// Time to live of an answer. The address stays the same, but the rules may change.
const SECONDS_KEPT: u32 = 30;

/// Delay after a failed read, so that a persistent failure does not keep a CPU busy.
const PAUSE: Duration = Duration::from_millis(10);

struct Question<'a> {
    /// The query, or `None` if it was too long.
    bytes: Option<&'a [u8]>,
    asker: SockaddrStorage,
    asked: Asked,
}

/// Returns the response to a query, or `None` if there is none to send.
fn answer(
    question: &[u8],
    verdict: Verdict,
    names: &Names,
    listed: &dyn Listed,
) -> Option<Vec<u8>> {
    if verdict == Verdict::Ignore {
        return None;
    }
    let question = Message::from_vec(question).ok()?;
    if question.metadata.message_type != MessageType::Query {
        return None;
    }
    let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
    answer.metadata.recursion_desired = question.metadata.recursion_desired;
    answer.metadata.recursion_available = true;
    answer.edns = question.edns.as_ref().map(|_| Edns::new());
    answer.metadata.response_code = match question.queries.as_slice() {
        _ if verdict == Verdict::Refuse => ResponseCode::Refused,
        _ if question.metadata.op_code != OpCode::Query => ResponseCode::NotImp,
        [query] => records(query, names, listed, &mut answer),
        _ => ResponseCode::FormErr,
    };
    // The question is repeated because clients compare it, but never more than one: the response
    // must not grow beyond the query.
    answer.queries.extend(question.queries.into_iter().take(1));
    answer.to_vec().ok()
}

/// Adds the records that answer `query` to `answer`, and returns the response code.
fn records(
    query: &Query,
    names: &Names,
    listed: &dyn Listed,
    answer: &mut Message,
) -> ResponseCode {
    if query.query_class() != DNSClass::IN {
        return ResponseCode::Refused;
    }
    // A name that is not a host name (for example a service with underscores) cannot be listed.
    let Ok(name) = HostName::parse(&query.name().to_ascii()) else {
        return ResponseCode::NXDomain;
    };
    if !listed.lists(&name) {
        // Programs query both families at once, which is one attempt. Other types are not an
        // attempt to connect.
        match query.query_type() {
            RecordType::A => listed.refused(&name, true),
            RecordType::AAAA => listed.refused(&name, false),
            _ => {}
        }
        return ResponseCode::NXDomain;
    }
    if query.query_type() != RecordType::A {
        return ResponseCode::NoError;
    }
    let Some(address) = names.address_of(&name) else {
        return ResponseCode::ServFail;
    };
    answer.answers.push(Record::from_rdata(
        query.name().clone(),
        SECONDS_KEPT,
        RData::A(A(address)),
    ));
    ResponseCode::NoError
}

/// Counts the queries of each second.
struct Rate {
    per_second: u32,
    second: Option<Instant>,
    seen: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Answer,
    Refuse,
    Ignore,
}

impl Rate {
    fn new(per_second: u32) -> Rate {
        Rate {
            per_second,
            second: None,
            seen: 0,
        }
    }

    /// Decides how to handle a query that arrives now. A refusal costs as much as an answer, so
    /// refusals are limited too.
    fn verdict(&mut self, now: Instant) -> Verdict {
        if self
            .second
            .is_none_or(|second| now.duration_since(second) >= Duration::from_secs(1))
        {
            (self.second, self.seen) = (Some(now), 0);
        }
        self.seen = self.seen.saturating_add(1);
        match self.seen {
            seen if seen <= self.per_second => Verdict::Answer,
            seen if seen <= self.per_second.saturating_mul(2) => Verdict::Refuse,
            _ => Verdict::Ignore,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::str::FromStr;
    use std::sync::Mutex;

    use hickory_proto::rr::Name;

    use super::*;

    /// Lists all names under example.com and records the others.
    #[derive(Default)]
    struct ExampleOnly(Mutex<Vec<(String, bool)>>);

    impl Listed for ExampleOnly {
        fn lists(&self, name: &HostName) -> bool {
            name.as_str() == "example.com" || name.as_str().ends_with(".example.com")
        }

        fn refused(&self, name: &HostName, attempt: bool) {
            self.0.lock().unwrap().push((name.to_string(), attempt));
        }
    }

    fn question(name: &str, kind: RecordType) -> Message {
        let mut question = Message::query();
        question.metadata.recursion_desired = true;
        question.add_query(Query::query(Name::from_str(name).unwrap(), kind));
        question
    }

    fn ask(question: &Message, listed: &ExampleOnly) -> Option<Message> {
        let bytes = answer(
            &question.to_vec().unwrap(),
            Verdict::Answer,
            &Names::default(),
            listed,
        )?;
        Some(Message::from_vec(&bytes).unwrap())
    }

    fn addresses(answer: &Message) -> Vec<Ipv4Addr> {
        let address = |record: &Record| match record.data {
            RData::A(A(address)) => address,
            ref other => panic!("{other:?}"),
        };
        answer.answers.iter().map(address).collect()
    }

    #[test]
    fn a_listed_name_has_one_address_and_no_records_of_other_types() {
        let listed = ExampleOnly::default();
        let answer = ask(&question("API.Example.com.", RecordType::A), &listed).unwrap();
        assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
        assert_eq!(addresses(&answer), [Ipv4Addr::new(198, 18, 0, 1)]);
        assert_eq!(
            answer.queries,
            question("API.Example.com.", RecordType::A).queries
        );
        for kind in [
            RecordType::AAAA,
            RecordType::HTTPS,
            RecordType::SVCB,
            RecordType::TXT,
            RecordType::ANY,
            RecordType::CNAME,
        ] {
            let answer = ask(&question("api.example.com.", kind), &listed).unwrap();
            assert_eq!(
                (answer.metadata.response_code, answer.answers.len()),
                (ResponseCode::NoError, 0),
                "{kind}"
            );
        }
        assert!(listed.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_name_that_is_not_listed_does_not_exist_and_is_noted_once_per_attempt() {
        let listed = ExampleOnly::default();
        for kind in [
            RecordType::A,
            RecordType::AAAA,
            RecordType::TXT,
            RecordType::PTR,
        ] {
            let answer = ask(&question("data.example.org.", kind), &listed).unwrap();
            assert_eq!(
                (answer.metadata.response_code, answer.answers.len()),
                (ResponseCode::NXDomain, 0),
                "{kind}"
            );
        }
        let name = || "data.example.org".to_owned();
        assert_eq!(*listed.0.lock().unwrap(), [(name(), true), (name(), false)]);
        assert_eq!(
            ask(&question("example.com.", RecordType::A), &listed)
                .unwrap()
                .answers
                .len(),
            1
        ); // control
    }

    #[test]
    fn what_is_no_question_gets_no_answer_or_a_refusal() {
        let listed = ExampleOnly::default();
        let mut response = question("example.com.", RecordType::A);
        response.metadata.message_type = MessageType::Response;
        assert!(ask(&response, &listed).is_none());
        assert!(
            answer(
                b"\x00\x01nonsense",
                Verdict::Answer,
                &Names::default(),
                &listed
            )
            .is_none()
        );
        let mut two = question("example.com.", RecordType::A);
        two.add_query(Query::query(
            Name::from_str("www.example.com.").unwrap(),
            RecordType::A,
        ));
        assert_eq!(
            ask(&two, &listed).unwrap().metadata.response_code,
            ResponseCode::FormErr
        );
        let mut update = question("example.com.", RecordType::A);
        update.metadata.op_code = OpCode::Status;
        assert_eq!(
            ask(&update, &listed).unwrap().metadata.response_code,
            ResponseCode::NotImp
        );
        let mut chaos = question("example.com.", RecordType::A);
        chaos.queries[0].set_query_class(DNSClass::CH);
        assert_eq!(
            ask(&chaos, &listed).unwrap().metadata.response_code,
            ResponseCode::Refused
        );
        assert_eq!(
            ask(&question("example.com.", RecordType::A), &listed)
                .unwrap()
                .answers
                .len(),
            1
        ); // control
    }

    #[test]
    fn answers_stay_small_even_for_the_longest_name() {
        let label = "a".repeat(60);
        let name = format!("{label}.{label}.{label}.{}.example.com.", "b".repeat(50));
        let mut asked = question(&name, RecordType::A);
        asked.edns = Some(Edns::new());
        let bytes = answer(
            &asked.to_vec().unwrap(),
            Verdict::Answer,
            &Names::default(),
            &ExampleOnly::default(),
        )
        .unwrap();
        assert!(bytes.len() <= 512, "{}", bytes.len());
        let answer = Message::from_vec(&bytes).unwrap();
        assert_eq!(answer.answers.len(), 1);
        assert!(answer.edns.is_some());
    }

    #[test]
    fn questions_beyond_the_rate_are_refused_and_then_ignored_until_the_next_second() {
        let mut rate = Rate::new(2);
        let start = Instant::now();
        let verdicts: Vec<Verdict> = (0..6).map(|_| rate.verdict(start)).collect();
        use Verdict::{Answer, Ignore, Refuse};
        assert_eq!(verdicts, [Answer, Answer, Refuse, Refuse, Ignore, Ignore]);
        assert_eq!(rate.verdict(start + Duration::from_secs(1)), Answer); // control
    }

    #[test]
    fn a_refused_question_says_so() {
        let asked = question("example.com.", RecordType::A).to_vec().unwrap();
        let (names, listed) = (Names::default(), ExampleOnly::default());
        let refused = answer(&asked, Verdict::Refuse, &names, &listed).unwrap();
        assert_eq!(
            Message::from_vec(&refused).unwrap().metadata.response_code,
            ResponseCode::Refused
        );
        assert!(answer(&asked, Verdict::Ignore, &names, &listed).is_none());
        assert!(answer(&asked, Verdict::Answer, &names, &listed).is_some()); // control
    }

    #[tokio::test]
    async fn an_answer_comes_from_the_address_that_was_asked() {
        for (listening, asked) in [
            ("[::]:0", ["127.0.0.1", "127.9.8.7", "[::1]"].as_slice()),
            ("0.0.0.0:0", &["127.0.0.1", "127.9.8.7"]),
        ] {
            check_source_of_answers(StandardUdpSocket::bind(listening).unwrap(), asked).await;
        }
    }

    async fn check_source_of_answers(socket: StandardUdpSocket, addresses_asked: &[&str]) {
        let port = socket.local_addr().unwrap().port();
        let server = NameServer::new(socket, 100).unwrap();
        let serving = tokio::spawn(server.serve(Arc::default(), Arc::new(ExampleOnly::default())));
        let asked = question("example.com.", RecordType::A).to_vec().unwrap();
        for address in addresses_asked {
            let target: SocketAddr = format!("{address}:{port}").parse().unwrap();
            let client = UdpSocket::bind(if target.is_ipv4() {
                "127.0.0.1:0"
            } else {
                "[::1]:0"
            })
            .await
            .unwrap();
            client.send_to(&asked, target).await.unwrap();
            let mut buffer = [0; 512];
            let (length, from) = client.recv_from(&mut buffer).await.unwrap();
            assert_eq!(from, target);
            assert_eq!(
                addresses(&Message::from_vec(&buffer[..length]).unwrap()),
                [Ipv4Addr::new(198, 18, 0, 1)]
            );
        }
        serving.abort();
    }

    #[tokio::test]
    async fn a_question_that_is_too_long_is_dropped_and_the_next_one_is_answered() {
        let socket = StandardUdpSocket::bind("[::]:0").unwrap();
        let target: SocketAddr = format!("127.0.0.1:{}", socket.local_addr().unwrap().port())
            .parse()
            .unwrap();
        let serving = tokio::spawn(
            NameServer::new(socket, 100)
                .unwrap()
                .serve(Arc::default(), Arc::new(ExampleOnly::default())),
        );
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let mut long = question("long.example.com.", RecordType::A)
            .to_vec()
            .unwrap();
        long.resize(4000, 0);
        client.send_to(&long, target).await.unwrap();
        client
            .send_to(
                &question("short.example.com.", RecordType::A)
                    .to_vec()
                    .unwrap(),
                target,
            )
            .await
            .unwrap();
        let mut buffer = [0; 512];
        let length = client.recv(&mut buffer).await.unwrap();
        let answer = Message::from_vec(&buffer[..length]).unwrap();
        assert_eq!(answer.queries[0].name().to_ascii(), "short.example.com.");
        serving.abort();
    }
}
