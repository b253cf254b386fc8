//! What a session reaches when an operator lists names, addresses and ports, by whatever program;
//! and everything beside.

use std::net::UdpSocket;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::sync::Arc;
use std::time::Duration;

use cellblock::sandbox::Rules;

use super::{CONNECT, HERE, Web, blocked, names, network, opened};
use crate::support::native::{self, Builder, run};
use crate::support::{is_root, skipped};

#[test]
fn a_listed_name_is_reached_by_every_program_and_others_by_none() {
    run(async {
        let (web, names) = (Web::start(), names());
        let backend = opened(&web, Arc::clone(&names));
        let session = backend.session();
        let port = web.port();
        session.ok(CONNECT).await;
        let ways = [
            (
                "a socket",
                format!("print(connect('web.test', {port}))"),
                "HTTP/1.1 200 OK\n",
            ),
            (
                "urllib",
                format!(
                    "import urllib.request\n\
                     print(urllib.request.urlopen('http://web.test:{port}/').read())"
                ),
                "b'hello'\n",
            ),
            (
                "asyncio",
                format!(
                    "import asyncio\nreader, writer = await asyncio.open_connection('web.test', \
                     {port})\nwriter.write(b'GET /\\r\\n\\r\\n')\nprint(await reader.readline())"
                ),
                "b'HTTP/1.1 200 OK\\r\\n'\n",
            ),
            (
                "another process",
                format!(
                    "import subprocess, sys\ncode = \"import urllib.request; \
                     print(urllib.request.urlopen('http://web.test:{port}/').read())\"\n\
                     print(subprocess.run([sys.executable, '-c', code], capture_output=True, \
                     text=True).stdout, end='')"
                ),
                "b'hello'\n",
            ),
        ];
        for (way, code, expected) in &ways {
            assert_eq!(session.ok(code).await, *expected, "{way}");
        }
        assert_eq!(web.asked(), ways.len());
        let asked = names.asked();

        // A name that exists and is not listed is not even looked up.
        let refused = session
            .execute(&format!("print(connect('other.test', {port}))"))
            .await
            .unwrap();
        assert_eq!(native::printed(&refused), "gaierror\n");
        assert_eq!(names.asked(), asked);
        let told = blocked(&refused);
        assert!(
            told.len() == 1
                && told[0].starts_with("blocked: other.test")
                && told[0].contains("not in the allowed list"),
            "{told:?}"
        );
        // What was told once is not told again.
        assert!(session.execute("pass").await.unwrap().blocked.is_empty());
        backend.end().await;
    });
}

#[test]
fn addresses_ports_and_protocols_that_are_not_listed_are_refused_at_once() {
    run(async {
        let web = Web::start();
        let backend = opened(&web, names());
        let session = backend.session();
        let port = web.port();
        session.ok(CONNECT).await;
        assert_eq!(
            session
                .ok(&format!("print(connect('web.test', {port}))"))
                .await,
            "HTTP/1.1 200 OK\n"
        ); // control
        let other = if port == 9 { 10 } else { 9 };
        for target in [
            format!("'web.test', {other}"),
            format!("'192.0.2.1', {port}"),
            format!("'169.254.169.254', {port}"),
            format!("'2001:db8::1', {port}"),
            format!("'::ffff:192.0.2.1', {port}"),
            "'10.0.0.1', 22".to_owned(),
            "'192.0.2.1', 9, socket.SOCK_DGRAM".to_owned(),
        ] {
            let answer = session.ok(&format!("print(connect({target}))")).await;
            assert!(
                [
                    "ConnectionRefusedError\n",
                    "ConnectionResetError\n",
                    "closed\n"
                ]
                .contains(&answer.as_str()),
                "{target}: {answer}"
            );
        }
        let raw = session
            .ok(
                "try:\n    print(socket.socket(socket.AF_INET, socket.SOCK_RAW, \
                 socket.IPPROTO_ICMP))\nexcept OSError as error:\n    print(type(error).__name__)",
            )
            .await;
        assert_eq!(raw, "PermissionError\n");
        assert_eq!(web.asked(), 1);
        backend.end().await;
    });
}

#[test]
fn a_session_that_may_reach_nothing_has_the_same_dead_end() {
    run(async {
        let session = native::shared().session();
        session.ok(CONNECT).await;
        let web = Web::start();
        for target in [
            format!("'127.0.0.1', {}", web.port()),
            "'192.0.2.1', 80".to_owned(),
            "'web.test', 80".to_owned(),
        ] {
            let answer = session.ok(&format!("print(connect({target}))")).await;
            assert!(
                ["ConnectionRefusedError\n", "OSError\n", "gaierror\n"].contains(&answer.as_str()),
                "{target}: {answer}"
            );
        }
        assert_eq!(web.asked(), 0);
    });
}

#[test]
fn forks_resets_and_undone_sessions_reach_what_their_session_does() {
    run(async {
        let web = Web::start();
        let backend = opened(&web, names());
        let session = backend.session();
        session.ok(CONNECT).await;
        let reach = format!("print(connect('web.test', {}))", web.port());
        let fork = session.fork().await;
        fork.ok("x = 1").await;
        fork.undo(1).await;
        session.close().await;
        assert_eq!(fork.ok(&reach).await, "HTTP/1.1 200 OK\n");
        fork.reset().await;
        fork.ok(CONNECT).await;
        assert_eq!(fork.ok(&reach).await, "HTTP/1.1 200 OK\n");
        backend.end().await;
    });
}

#[test]
fn a_change_of_the_rules_is_felt_at_once_by_one_session_alone() {
    run(async {
        let web = Web::start();
        let backend = opened(&web, names());
        let session = backend.session();
        session.ok(CONNECT).await;
        let reach = format!("print(connect('web.test', {}))", web.port());
        assert_eq!(session.ok(&reach).await, "HTTP/1.1 200 OK\n");
        let (mut other, _interpreter) = backend.backend.launch().await.unwrap();
        assert!(!other.rules().is_empty());
        other.set_rules(Rules::none());
        assert!(other.rules().is_empty());
        assert_eq!(session.ok(&reach).await, "HTTP/1.1 200 OK\n");
        other.destroy().await;
        backend.end().await;
    });
}

#[test]
fn with_every_port_open_any_port_of_a_name_is_reached() {
    run(async {
        let web = Web::start();
        // Listing this machine's loopback by its address is what opens it: no name and no choice of
        // everything does.
        let rules = Rules::parse(&["*.test:*", "127.0.0.1:*"]).unwrap();
        let backend = Builder::new("minimal")
            .network(network(rules, names()))
            .start();
        let session = backend.session();
        session.ok(CONNECT).await;
        for target in ["web.test", "other.test"] {
            assert_eq!(
                session
                    .ok(&format!("print(connect('{target}', {}))", web.port()))
                    .await,
                "HTTP/1.1 200 OK\n"
            );
        }
        // A server of the session's own is its own all the same.
        let own = session
            .ok("listener = socket.create_server(('127.0.0.1', \
                 0))\nprint(socket.create_connection(listener.getsockname()).getpeername() == \
                 listener.getsockname())")
            .await;
        assert_eq!(own, "True\n");
        let nowhere = session
            .execute("print(connect('nowhere.test', 80))")
            .await
            .unwrap();
        assert_ne!(native::printed(&nowhere), "HTTP/1.1 200 OK\n");
        assert!(!nowhere.blocked.is_empty());
        backend.end().await;
    });
}

/// Sends a datagram and waits for an answer; tells what came of it.
const DATAGRAM: &str = "
import errno, socket
def datagram(host, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(20)
        try:
            sender.connect((host, port))
            sender.send(b'hello')
            return sender.recv(100).decode()
        except OSError as error:
            return errno.errorcode.get(error.errno, type(error).__name__)
def make(*what):
    try:
        socket.socket(*what).close()
        return 'made'
    except OSError as error:
        return errno.errorcode[error.errno]
";

#[test]
fn datagrams_do_not_leave_whatever_is_listed() {
    run(async {
        let web = Web::start();
        let port = web.port();
        // At the port that is listed for connections, as QUIC would be.
        let echo = UdpSocket::bind((HERE, port)).unwrap();
        for rules in [
            Rules::parse(&[format!("web.test:{port}"), format!("{HERE}:{port}")]).unwrap(),
            Rules::parse(&["*.test:*", "127.0.0.0/8:*"]).unwrap(),
            Rules::everything(),
        ] {
            let everything = rules.is_everything();
            let backend = Builder::new("minimal")
                .network(network(rules, names()))
                .start();
            let session = backend.session();
            session.ok(CONNECT).await;
            session.ok(DATAGRAM).await;
            if !everything {
                // Control. This machine's loopback is not part of everything.
                assert_eq!(
                    session
                        .ok(&format!("print(connect('web.test', {port}))"))
                        .await,
                    "HTTP/1.1 200 OK\n"
                );
            }
            for target in ["web.test", "127.0.0.1", "192.0.2.1"] {
                assert_eq!(
                    session
                        .ok(&format!("print(datagram('{target}', {port}))"))
                        .await,
                    "ECONNREFUSED\n",
                    "{target}"
                );
            }
            backend.end().await;
        }
        echo.set_nonblocking(true).unwrap();
        assert!(echo.recv(&mut [0; 100]).is_err());
        // Control: a datagram from outside of any sandbox arrives.
        native::outside(&format!(
            "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', \
             ('127.0.0.1', {port}))"
        ));
        echo.set_nonblocking(false).unwrap();
        echo.set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        assert_eq!(echo.recv(&mut [0; 100]).unwrap(), 5);
    });
}

#[test]
fn no_socket_below_tcp_and_udp_can_be_made_even_where_everything_is_open() {
    run(async {
        let backend = Builder::new("minimal")
            .network(network(Rules::everything(), names()))
            .start();
        let session = backend.session();
        session.ok(DATAGRAM).await;
        assert_eq!(
            session
                .ok(
                    "print(make(socket.AF_INET, socket.SOCK_STREAM), make(socket.AF_INET6, \
                     socket.SOCK_DGRAM))"
                )
                .await,
            "made made\n"
        ); // control
        let kinds = [
            "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP",
            "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP",
            "socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6",
            "socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP",
            "socket.AF_PACKET, socket.SOCK_RAW, 0x0300",
            // Netlink about netfilter, and generic netlink.
            "socket.AF_NETLINK, socket.SOCK_RAW, 12",
            "socket.AF_NETLINK, socket.SOCK_RAW, 16",
            "socket.AF_VSOCK, socket.SOCK_STREAM, 0",
        ];
        for kind in kinds {
            let answer = session.ok(&format!("print(make({kind}))")).await;
            assert!(
                [
                    "ENOSYS\n",
                    "EPERM\n",
                    "EACCES\n",
                    "EAFNOSUPPORT\n",
                    "EPROTONOSUPPORT\n"
                ]
                .contains(&answer.as_str()),
                "{kind}: {answer}"
            );
        }
        backend.end().await;
        if !is_root() {
            return skipped("root (the control that raw sockets can be made)");
        }
        let outside = native::outside(&format!(
            "{DATAGRAM}\nprint(make({}), make({}))",
            kinds[0], kinds[4]
        ));
        assert_eq!(outside, "made made\n"); // control
    });
}

#[test]
fn nameless_unix_sockets_of_the_host_are_not_there() {
    run(async {
        let name = format!("cellblock-test-{}", std::process::id());
        let _listener =
            UnixListener::bind_addr(&UnixAddress::from_abstract_name(&name).unwrap()).unwrap();
        let code = format!(
            "
import socket
try:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect('\\0{name}')
    print('connected')
except OSError as error:
    print(type(error).__name__)"
        );
        let backend = Builder::new("minimal")
            .network(network(Rules::everything(), names()))
            .start();
        assert_eq!(
            backend.session().ok(&code).await,
            "ConnectionRefusedError\n"
        );
        assert_eq!(native::outside(&code), "connected\n"); // control
        backend.end().await;
    });
}
