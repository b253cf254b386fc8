//! Rules that change while a connection is open, rules of two sessions at the same moment, and what
//! one session may use up.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use cellblock::runner_client::{Claim, Connection, Request, RunnerEvent};
use cellblock::sandbox::SandboxNetwork;
use cellblock::sandbox::{Process, Rules, Sandbox};
use cellblock_egress::gateway::Limits;

use super::{CONNECT, HERE, Web, blocked, listed, names, network, opened};
use crate::support::native::{Builder, Native, everything, run};

/// A server that greets and then keeps its connections until they end from the other side. Each end
/// is told.
struct Keeper {
    port: u16,
    ended: Receiver<()>,
}

impl Keeper {
    fn start() -> Keeper {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, ended) = channel();
        thread::spawn(move || {
            for mut connection in listener.incoming().flatten() {
                let tell = tell.clone();
                thread::spawn(move || {
                    let _ = connection.write_all(b"welcome");
                    while let Ok(1..) = connection.read(&mut [0; 100]) {}
                    let _ = tell.send(());
                });
            }
        });
        Keeper { port, ended }
    }

    fn rules(&self) -> Rules {
        listed(&[
            format!("web.test:{}", self.port),
            format!("{HERE}:{}", self.port),
        ])
    }
}

/// A sandbox without a session around it: its rules can be changed, and its interpreter is spoken
/// to while a cell runs.
struct Bare {
    sandbox: Box<dyn Sandbox>,
    /// The interpreter lives as long as this.
    _process: Box<dyn Process>,
    connection: Connection,
}

impl Bare {
    async fn launch(native: &Native) -> Bare {
        let (sandbox, interpreter) = native.backend.launch().await.unwrap();
        let connection = Connection::open(interpreter.channel, interpreter.skew)
            .await
            .unwrap();
        Bare {
            sandbox,
            _process: interpreter.process,
            connection,
        }
    }

    fn begin(&mut self, code: &str) {
        self.connection
            .send(&Request::Execute { id: 1, seed: None }, code.as_bytes())
            .unwrap();
    }

    /// Waits until the cell prints something, and returns it.
    async fn printed(&mut self) -> String {
        loop {
            match self.connection.next().await.unwrap() {
                RunnerEvent::Text { bytes, .. } => return String::from_utf8(bytes).unwrap(),
                RunnerEvent::Claim(Claim::Done(done)) => {
                    panic!("it ended without a word: {:?}", done.error)
                }
                RunnerEvent::Closed => panic!("the interpreter is gone"),
                RunnerEvent::Claim(_) | RunnerEvent::Stray { .. } | RunnerEvent::Sent => {}
            }
        }
    }
}

/// Connects, says so, and waits for the end of the connection.
const STAY: &str = "
import socket
connection = socket.create_connection(('web.test', PORT), 20)
print(connection.recv(100).decode(), flush=True)
connection.settimeout(50)
try:
    print('ended' if not connection.recv(100) else 'heard', flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
";

#[test]
fn new_rules_end_an_open_connection_that_they_do_not_list_and_no_other() {
    run(async {
        let keeper = Keeper::start();
        let native = Builder::new("minimal")
            .network(network(keeper.rules(), names()))
            .start();
        let stay = STAY.replace("PORT", &keeper.port.to_string());
        let (mut changed, mut other) = (Bare::launch(&native).await, Bare::launch(&native).await);
        for bare in [&mut changed, &mut other] {
            bare.begin(&stay);
            assert_eq!(bare.printed().await, "welcome\n");
        }
        // Rules that still list it end nothing.
        let wider = [
            keeper.rules().iter().map(ToString::to_string).collect(),
            vec!["example.org".to_owned()],
        ]
        .concat();
        changed.sandbox.set_rules(listed(&wider));
        assert!(keeper.ended.try_recv().is_err()); // control
        changed.sandbox.set_rules(listed(&["example.org"]));
        assert_eq!(changed.printed().await, "ConnectionResetError\n");
        keeper.ended.recv().unwrap();
        let told: Vec<String> = changed
            .sandbox
            .take_blocked()
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            told,
            [format!(
                "blocked: web.test:{} (no longer in the allowed list)",
                keeper.port
            )]
        );
        // The other sandbox has the same server, the same port and its own rules: its connection
        // stands.
        assert!(keeper.ended.try_recv().is_err());
        assert!(other.sandbox.take_blocked().is_empty());
        changed.sandbox.destroy().await;
        other.sandbox.destroy().await;
        keeper.ended.recv().unwrap(); // control: the end of a sandbox is seen here
        native.end().await;
    });
}

#[test]
fn new_rules_hold_for_the_next_connection() {
    run(async {
        let web = Web::start();
        let native = opened(&web, names());
        let mut bare = Bare::launch(&native).await;
        let rules = bare.sandbox.rules();
        let reach = format!(
            "{CONNECT}\nprint(connect('web.test', {}), flush=True)",
            web.port()
        );
        for (rules, expected) in [
            (rules.clone(), "HTTP/1.1 200 OK\n"),
            (Rules::none(), "gaierror\n"),
            (rules, "HTTP/1.1 200 OK\n"), // control: and back again
        ] {
            bare.sandbox.set_rules(rules);
            bare.begin(&reach);
            assert_eq!(bare.printed().await, expected);
            while !matches!(
                bare.connection.next().await.unwrap(),
                RunnerEvent::Claim(Claim::Done(_))
            ) {}
        }
        bare.sandbox.destroy().await;
        native.end().await;
    });
}

#[test]
fn a_server_that_ends_a_connection_fails_that_one_and_the_next_one_works() {
    run(async {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = listed(&[format!("web.test:{port}"), format!("{HERE}:{port}")]);
        let native = Builder::new("minimal")
            .network(network(rules, names()))
            .start();
        let session = native.session();
        session.ok(CONNECT).await;
        // It ends within the request.
        let ends = thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            let _ = connection.read(&mut [0; 4]);
            listener
        });
        let reach = format!("print(connect('web.test', {port}))");
        let answer = session.ok(&reach).await;
        assert!(
            ["closed\n", "ConnectionResetError\n"].contains(&answer.as_str()),
            "{answer}"
        );
        let _web = Web::serve(ends.join().unwrap());
        assert_eq!(session.ok(&reach).await, "HTTP/1.1 200 OK\n");
        native.end().await;
    });
}

#[test]
fn connections_beyond_the_limit_are_reset_until_one_ends() {
    run(async {
        let keeper = Keeper::start();
        let limits = Limits {
            connections: 3,
            ..Limits::default()
        };
        let native = Builder::new("minimal")
            .network(SandboxNetwork {
                limits,
                ..network(keeper.rules(), names())
            })
            .start();
        let session = native.session();
        let code = format!(
            "
import socket
def greeting():
    try:
        connection = socket.create_connection(('web.test', {}), 20)
        answer = connection.recv(100).decode()
    except ConnectionResetError:
        return 'reset'
    connections.append(connection)
    return answer
connections = []
print(*[greeting() for _ in range(5)])",
            keeper.port
        );
        let outcome = session.execute(&code).await.unwrap();
        assert_eq!(
            everything(&outcome),
            "welcome welcome welcome reset reset\n"
        );
        let line = format!(
            "blocked: web.test:{} (more than 3 connections at a time), 2 times",
            keeper.port
        );
        assert_eq!(blocked(&outcome), [line]);
        // Control: the place of one that ended is free.
        session.ok("connections.pop().close()").await;
        keeper.ended.recv().unwrap();
        assert_eq!(
            session
                .ok("while (answer := greeting()) == 'reset': pass\nprint(answer)")
                .await,
            "welcome\n"
        );
        native.end().await;
    });
}

#[test]
fn a_target_that_was_refused_often_is_told_once_with_its_count() {
    run(async {
        let web = Web::start();
        let port = web.port();
        let native = opened(&web, names());
        let session = native.session();
        session.ok(CONNECT).await;
        let code = format!(
            "for _ in range(3):\n    connect('other.test', {port})\nfor _ in range(4):\n    \
             connect('192.0.2.1', {port})\nconnect('192.0.2.2', {port})"
        );
        let outcome = session.execute(&code).await.unwrap();
        let expected = [
            "blocked: other.test (not in the allowed list), 3 times".to_owned(),
            format!("blocked: 192.0.2.1:{port} (not in the allowed list), 4 times"),
            format!("blocked: 192.0.2.2:{port} (not in the allowed list)"),
        ];
        assert_eq!(blocked(&outcome), expected);
        let reached = session
            .execute(&format!("connect('web.test', {port})"))
            .await
            .unwrap();
        assert!(blocked(&reached).is_empty()); // control
        native.end().await;
    });
}

#[test]
fn two_backends_keep_two_lists_at_the_same_moment() {
    run(async {
        let webs = [Web::start(), Web::start()];
        let ports = webs.each_ref().map(Web::port);
        let names = names();
        let backend = |name: &str, port: u16| {
            let rules = listed(&[format!("{name}:{port}"), format!("{HERE}:{port}")]);
            Builder::new("minimal")
                .network(network(rules, Arc::clone(&names)))
                .start()
        };
        let natives = [
            backend("web.test", ports[0]),
            backend("other.test", ports[1]),
        ];
        let sessions = natives.each_ref().map(Native::session);
        let attempts = async |number: usize| {
            sessions[number].ok(CONNECT).await;
            let [one, two] = ports;
            sessions[number]
                .ok(&format!(
                    "print(connect('web.test', {one}), connect('other.test', {two}))"
                ))
                .await
        };
        for _ in 0..3 {
            let (first, second) = tokio::join!(attempts(0), attempts(1));
            assert_eq!(
                (first.as_str(), second.as_str()),
                ("HTTP/1.1 200 OK gaierror\n", "gaierror HTTP/1.1 200 OK\n")
            );
        }
        assert_eq!(webs.each_ref().map(Web::asked), [3, 3]);
        for native in &natives {
            native.end().await;
        }
    });
}

/// A client outside of any sandbox, for a look at the server of these tests itself.
#[test]
fn the_keeper_tells_of_every_end() {
    let keeper = Keeper::start();
    let mut connection = TcpStream::connect((HERE, keeper.port)).unwrap();
    connection.read_exact(&mut [0; 7]).unwrap();
    assert!(keeper.ended.try_recv().is_err());
    drop(connection);
    keeper.ended.recv().unwrap();
}
