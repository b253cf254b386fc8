//! Questions about names, and addresses to which a listed name must not lead.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cellblock::sandbox::SandboxNetwork;
use cellblock_egress::gateway::Limits;

use super::{CONNECT, HERE, Names, Web, blocked, listed, names, network};
use crate::support::native::{Builder, Native, printed, run};

/// A backend in which `*.test` is listed at one port, and the server's address.
fn wild(port: u16, names: &Arc<Names>) -> Native {
    let rules = listed(&[format!("*.test:{port}"), format!("{HERE}:{port}")]);
    Builder::new("minimal")
        .network(network(rules, Arc::clone(names)))
        .start()
}

/// Asks questions as bytes, so that no library decides what may be asked.
pub(super) const ASK: &str = "
import os, select, socket, struct
def question(name, kind=1, number=1):
    labels = b''.join(bytes([len(label)]) + label.encode() for label in name.split('.'))
    return struct.pack('>6H', number, 0x0100, 1, 0, 0, 0) + labels + struct.pack('>BHH', 0, kind, 1)
def code_of(answer):
    return {0: 'none' if not answer[7] else 'found', 3: 'no such name', 5: 'refused'}[answer[3] & \
    15]
def ask(name, kind=1, server='127.0.0.1'):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(20)
        asker.connect((server, 53))
        asker.send(question(name, kind))
        return code_of(asker.recv(1500))
";

#[test]
fn ten_thousand_names_that_are_not_listed_are_asked_of_nobody_in_no_time() {
    run(async {
        let (web, names) = (Web::start(), names());
        let port = web.port();
        let limits = Limits {
            questions_per_second: 1_000_000,
            ..Limits::default()
        };
        let rules = listed(&[format!("web.test:{port}"), format!("{HERE}:{port}")]);
        let native = Builder::new("minimal")
            .network(SandboxNetwork {
                limits,
                ..network(rules, Arc::clone(&names))
            })
            .start();
        let session = native.session();
        session.ok(CONNECT).await;
        let code = "
found = 0
for number in range(10_000):
    try:
        found += len(socket.getaddrinfo(f'data-{number}.example.org', 443))
    except socket.gaierror:
        pass
print(found)";
        let begun = Instant::now();
        let outcome = session.execute(code).await.unwrap();
        assert_eq!(printed(&outcome), "0\n");
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(names.asked(), 0);
        // Fifty of them are told, and how many there were.
        let told = blocked(&outcome);
        assert_eq!(told.len(), 51);
        assert_eq!(
            told[0],
            "blocked: data-0.example.org (not in the allowed list)"
        );
        assert_eq!(
            told[50],
            "blocked: other targets (too many to list), 9950 times"
        );
        // Control: a listed name is looked up when it is connected to.
        assert_eq!(
            session
                .ok(&format!("print(connect('web.test', {port}))"))
                .await,
            "HTTP/1.1 200 OK\n"
        );
        assert_eq!(names.asked(), 1);
        native.end().await;
    });
}

#[test]
fn a_name_that_spells_a_message_reaches_nobody() {
    run(async {
        let (web, names) = (Web::start(), names());
        let native = wild(web.port(), &names);
        let session = native.session();
        session.ok(CONNECT).await;
        session.ok(ASK).await;
        let long = [
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(40),
        ]
        .join(".");
        for (name, kinds, expected) in [
            (
                format!("{long}.example.org"),
                &[1, 28, 16, 255, 10, 65][..],
                "no such name",
            ),
            // Deeper than the rule, and a name that is a message even to whoever looks at it.
            ("data.web.test".to_owned(), &[1, 16], "no such name"),
            (
                "_secret._udp.web.test".to_owned(),
                &[33, 16],
                "no such name",
            ),
            // A listed name: only its address is answered, and that without a look-up.
            ("web.test".to_owned(), &[28, 16, 255, 10, 65], "none"),
            ("message.test".to_owned(), &[1], "found"),
        ] {
            for kind in kinds {
                let answer = session.ok(&format!("print(ask('{name}', {kind}))")).await;
                assert_eq!(answer.trim(), expected, "{name} {kind}");
            }
        }
        // Whichever server a program asks, it is the same one.
        assert_eq!(
            session
                .ok("print(ask('message.example.org', server='192.0.2.53'))")
                .await,
            "no such name\n"
        );
        assert_eq!(names.asked(), 0);
        assert_eq!(
            session
                .ok(&format!("print(connect('web.test', {}))", web.port()))
                .await,
            "HTTP/1.1 200 OK\n"
        ); // control
        assert_eq!(names.asked(), 1);
        native.end().await;
    });
}

#[test]
fn questions_beyond_the_rate_are_refused_and_those_of_the_next_second_answered() {
    run(async {
        let limits = Limits {
            questions_per_second: 10,
            ..Limits::default()
        };
        let rules = listed(&["web.test"]);
        let native = Builder::new("minimal")
            .network(SandboxNetwork {
                limits,
                ..network(rules, names())
            })
            .start();
        let session = native.session();
        session.ok(ASK).await;
        // All at once, then answers until there is one refusal: by then the rate was exceeded.
        let code = "
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    asker.settimeout(20)
    asker.connect(('127.0.0.1', 53))
    for number in range(500):
        asker.send(question('web.test', number=number))
    answers = []
    while not answers or answers[-1] != 'refused':
        answers.append(code_of(asker.recv(1500)))
    print(answers.count('found') >= 10, len(answers) < 100)";
        assert_eq!(session.ok(code).await, "True True\n");
        // Control: sooner or later there is an answer again.
        let later = "
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    asker.connect(('127.0.0.1', 53))
    answer = None
    while answer != 'found':
        asker.send(question('web.test'))
        if select.select([asker], [], [], 1.5)[0]:
            answer = code_of(asker.recv(1500))
print(answer)";
        assert_eq!(session.ok(later).await, "found\n");
        native.end().await;
    });
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_name_server_that_changes_its_mind_gains_nothing() {
    run(async {
        let web = Web::start();
        let port = web.port();
        // What the second answer leads to would answer too.
        let private = Web::serve(std::net::TcpListener::bind(("127.0.0.2", port)).unwrap());
        let names = names()
            .and("rebinding.test", &[&[HERE], &[address("127.0.0.2")]])
            .and("both.test", &[&[HERE, address("127.0.0.2")]]);
        let native = wild(port, &names);
        let session = native.session();
        session.ok(CONNECT).await;
        let reach = |name: &str| format!("print(connect('{name}', {port}))");
        assert_eq!(
            session.ok(&reach("rebinding.test")).await,
            "HTTP/1.1 200 OK\n"
        ); // control: the first answer
        for name in ["rebinding.test", "rebinding.test", "both.test"] {
            let outcome = session.execute(&reach(name)).await.unwrap();
            assert_eq!(printed(&outcome), "ConnectionResetError\n", "{name}");
            let told = blocked(&outcome);
            assert!(
                told.len() == 1 && told[0].contains("must be in the allowed list as an address"),
                "{told:?}"
            );
        }
        assert_eq!((web.asked(), private.asked()), (1, 0));
        native.end().await;
        // Control: who lists the other address reaches it.
        let rules = listed(&[format!("*.test:{port}"), format!("127.0.0.0/8:{port}")]);
        let native = Builder::new("minimal")
            .network(network(rules, names))
            .start();
        let session = native.session();
        session.ok(CONNECT).await;
        assert_eq!(
            session.ok(&reach("rebinding.test")).await,
            "HTTP/1.1 200 OK\n"
        );
        assert_eq!(private.asked(), 1);
        native.end().await;
    });
}

#[test]
fn a_name_that_moves_is_followed_and_two_names_may_have_one_address() {
    run(async {
        let web = Web::start();
        let port = web.port();
        let moved = Web::serve(std::net::TcpListener::bind(("127.0.0.2", port)).unwrap());
        let names = names().and("moving.test", &[&[HERE], &[address("127.0.0.2")]]);
        let rules = listed(&[format!("*.test:{port}"), format!("127.0.0.0/8:{port}")]);
        let native = Builder::new("minimal")
            .network(network(rules, names))
            .start();
        let session = native.session();
        session.ok(CONNECT).await;
        for name in ["moving.test", "moving.test", "web.test", "other.test"] {
            assert_eq!(
                session
                    .ok(&format!("print(connect('{name}', {port}))"))
                    .await,
                "HTTP/1.1 200 OK\n",
                "{name}"
            );
        }
        assert_eq!((web.asked(), moved.asked()), (3, 1));
        native.end().await;
    });
}

#[test]
fn a_listed_name_that_leads_to_a_special_address_is_refused_in_every_spelling() {
    run(async {
        let web = Web::start();
        let port = web.port();
        let hidden = Web::serve(std::net::TcpListener::bind(("127.0.0.3", port)).unwrap());
        let spellings = [
            "127.0.0.3",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.0.1",
            "100.64.0.1",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:127.0.0.3",
            "::ffff:169.254.169.254",
            "::127.0.0.3",
            "64:ff9b::7f00:3",
            "64:ff9b:1::a9fe:a9fe",
            "2002:7f00:3::1",
            "2001:0:4136:e378:8000:63bf:80ff:fffc",
        ];
        let mut names = names();
        for (number, spelling) in spellings.iter().enumerate() {
            names = names.and(&format!("special-{number}.test"), &[&[address(spelling)]]);
        }
        let native = wild(port, &names);
        let session = native.session();
        session.ok(CONNECT).await;
        assert_eq!(
            session
                .ok(&format!("print(connect('web.test', {port}))"))
                .await,
            "HTTP/1.1 200 OK\n"
        ); // control
        for (number, spelling) in spellings.iter().enumerate() {
            let code = format!("print(connect('special-{number}.test', {port}))");
            let outcome = session.execute(&code).await.unwrap();
            assert_eq!(printed(&outcome), "ConnectionResetError\n", "{spelling}");
            let told = blocked(&outcome);
            let start = format!("blocked: special-{number}.test:{port} (it leads to ");
            assert!(
                told.len() == 1 && told[0].starts_with(&start),
                "{spelling}: {told:?}"
            );
            assert!(
                !told[0].contains(spelling),
                "the address is no business of the inside: {told:?}"
            );
        }
        assert_eq!((web.asked(), hidden.asked()), (1, 0));
        native.end().await;
    });
}
