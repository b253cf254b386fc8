//! Doors that are opened from outside, in networks that somebody else made. No engine is needed: a
//! namespace of the test's own is all that an engine gives.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use cellblock::sandbox::egress::{EgressError, TOKEN_ADDRESS};
use cellblock_egress::gateway::Gateway;
use cellblock_jail::netns_listeners::{Namespace, NetnsError};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::questions::ASK;
use super::{CONNECT, HERE, Names, Web, listed, names, network};
use crate::support::native::run;
use crate::support::{PROGRAM, is_root, skipped};

/// Longer than anything here takes; only a fault lasts so long.
const LIMIT: Duration = Duration::from_secs(20);

/// Reads a line of code, runs it, writes what it printed.
const INTERPRETER: &str = "
import contextlib, io, json, sys
space = {}
for line in sys.stdin:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(json.loads(line), space)
    print(json.dumps(printed.getvalue()), flush=True)
";

/// A Python in a network namespace of its own, as an engine makes it for a container without a
/// network.
struct Inside {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

/// How a namespace is made.
#[derive(Debug, Clone, Copy)]
enum Owner {
    /// By root: the namespace belongs to the machine, and what runs in it has no capability.
    Machine,
    /// By an ordinary user: it belongs to a user namespace, and what runs in it is root in there
    /// without a capability.
    UserNamespace,
}

impl Inside {
    /// `None` where such a namespace cannot be made; says so.
    async fn start(owner: Owner) -> Option<Inside> {
        Inside::start_with(owner, "--bounding-set=-all").await
    }

    async fn start_with(owner: Owner, capabilities: &str) -> Option<Inside> {
        let namespaces: &[&str] = match owner {
            Owner::Machine if !is_root() => {
                skipped("root (a network namespace without a user namespace)");
                return None;
            }
            Owner::Machine => &["--net"],
            Owner::UserNamespace => &["--user", "--map-root-user", "--net"],
        };
        let mut child = Command::new("unshare")
            .args(namespaces)
            .args(["setpriv", "--no-new-privs", capabilities])
            .args(["python3", "-c", INTERPRETER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut inside = Inside {
            child,
            input,
            output: BufReader::new(output).lines(),
        };
        if inside.try_say("print('here')").await.as_deref() != Some("here\n") {
            skipped("unshare, setpriv and python3, and namespaces of an ordinary user");
            return None;
        }
        inside.say(CONNECT).await;
        inside.say(ASK).await;
        Some(inside)
    }

    async fn try_say(&mut self, code: &str) -> Option<String> {
        self.input
            .write_all(format!("{}\n", json!(code)).as_bytes())
            .await
            .ok()?;
        let line = tokio::time::timeout(LIMIT, self.output.next_line())
            .await
            .expect("it answers")
            .ok()??;
        serde_json::from_str::<Value>(&line)
            .ok()?
            .as_str()
            .map(str::to_owned)
    }

    /// Runs code inside and returns what it printed.
    async fn say(&mut self, code: &str) -> String {
        self.try_say(code).await.expect("the inside is alive")
    }

    fn namespace(&self) -> Namespace {
        let process = self.child.id().expect("it lives");
        let opened = File::open(format!("/proc/{process}/ns/net")).unwrap();
        Namespace::new(OwnedFd::from(opened)).unwrap()
    }

    async fn knock(&mut self, word: &str) {
        self.say(&knock_with(word)).await;
    }

    /// Opens a way out to a server as `web.test`, at its own port.
    async fn open(&mut self, web: &Web, resolver: &Arc<Names>) -> Gateway {
        let rules = listed(&[
            format!("web.test:{}", web.port()),
            format!("{HERE}:{}", web.port()),
        ]);
        self.open_to(&network(rules, Arc::clone(resolver))).await
    }

    async fn open_to(&mut self, network: &cellblock::sandbox::SandboxNetwork) -> Gateway {
        let unverified = network
            .enter(PROGRAM.as_ref(), self.namespace())
            .await
            .unwrap();
        self.knock(unverified.token()).await;
        unverified.verify(LIMIT).await.unwrap()
    }

    /// Connects to a name as programs do: asks for its address, then connects to that.
    async fn connect(&mut self, name: &str, port: u16) -> String {
        self.say(&format!(
            "address = address_of('{name}')\nprint(connect(address, {port}) if address else 'no \
             such name')"
        ))
        .await
    }
}

/// Code that says a word at a door.
fn knock_with(word: &str) -> String {
    let (address, port) = (TOKEN_ADDRESS.ip(), TOKEN_ADDRESS.port());
    format!(
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'{word}', ('{address}', {port}))"
    )
}

/// The address in the answer about a name. Not from the system's library: the list of name servers
/// is a file of the host here.
const ADDRESS_OF: &str = "
def address_of(name):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.settimeout(20)
        asker.connect(('127.0.0.1', 53))
        asker.send(question(name))
        answer = asker.recv(1500)
        return socket.inet_ntoa(answer[-4:]) if code_of(answer) == 'found' else None
";

const REFUSED: [&str; 3] = [
    "ConnectionRefusedError\n",
    "ConnectionResetError\n",
    "closed\n",
];

#[test]
fn from_a_network_that_was_opened_from_outside_listed_names_are_reached_and_nothing_else() {
    run(async {
        for owner in [Owner::Machine, Owner::UserNamespace] {
            let Some(mut inside) = Inside::start(owner).await else {
                continue;
            };
            let (web, names) = (Web::start(), names());
            let port = web.port();
            // Control: before, there is nothing at all.
            assert_eq!(
                inside
                    .say(&format!("print(connect('192.0.2.1', {port}))"))
                    .await,
                "OSError\n",
                "{owner:?}"
            );
            let gateway = inside.open(&web, &names).await;
            inside.say(ADDRESS_OF).await;
            assert_eq!(
                inside.connect("web.test", port).await,
                "HTTP/1.1 200 OK\n",
                "{owner:?}"
            ); // control
            assert_eq!((web.asked(), names.asked()), (1, 1));

            assert_eq!(inside.connect("other.test", port).await, "no such name\n");
            for target in [
                format!("address_of('web.test'), {}", if port == 9 { 10 } else { 9 }),
                format!("'192.0.2.1', {port}"),
                format!("'169.254.169.254', {port}"),
                format!("'2001:db8::1', {port}"),
                "'10.0.0.1', 22".to_owned(),
                "'2001:db8::1', 22".to_owned(),
            ] {
                let answer = inside.say(&format!("print(connect({target}))")).await;
                assert!(
                    REFUSED.contains(&answer.as_str()),
                    "{owner:?} {target}: {answer}"
                );
            }
            assert_eq!((web.asked(), names.asked()), (1, 1));
            let told: Vec<_> = gateway
                .take_blocked()
                .iter()
                .map(ToString::to_string)
                .collect();
            assert!(
                told.iter()
                    .any(|line| line.starts_with("blocked: other.test ")),
                "{told:?}"
            );
            assert!(
                told.iter()
                    .any(|line| line.starts_with(&format!("blocked: 192.0.2.1:{port} "))),
                "{told:?}"
            );
        }
    });
}

#[test]
fn every_port_of_a_listed_name_is_reached_where_all_are_listed() {
    run(async {
        let Some(mut inside) = Inside::start(Owner::UserNamespace).await else {
            return;
        };
        let servers = [Web::start(), Web::start()];
        let _gateway = inside
            .open_to(&network(
                listed(&["web.test:*".to_owned(), format!("{HERE}:*")]),
                names(),
            ))
            .await;
        inside.say(ADDRESS_OF).await;
        for web in &servers {
            assert_eq!(
                inside.connect("web.test", web.port()).await,
                "HTTP/1.1 200 OK\n"
            );
            let raw = inside
                .say(&format!("print(connect('192.0.2.1', {}))", web.port()))
                .await;
            assert!(REFUSED.contains(&raw.as_str()), "{raw}");
            assert_eq!(web.asked(), 1);
        }
    });
}

#[test]
fn doors_are_not_relied_on_before_the_right_word_came_through_them() {
    run(async {
        let (Some(mut inside), Some(mut stranger)) = (
            Inside::start(Owner::UserNamespace).await,
            Inside::start(Owner::UserNamespace).await,
        ) else {
            return;
        };
        let enter = async |inside: &Inside| {
            network(listed(&["web.test"]), names())
                .enter(PROGRAM.as_ref(), inside.namespace())
                .await
                .unwrap()
        };
        let moment = Duration::from_millis(300);
        // The inside of a runtime with a network of its own is as far from these doors as another
        // namespace.
        let unverified = enter(&inside).await;
        assert!(
            stranger
                .say(&attempt(&knock_with(unverified.token())))
                .await
                .contains("unreachable")
        );
        inside.knock("another-word").await;
        assert!(matches!(
            unverified.verify(moment).await,
            Err(EgressError::TokenNotReceived)
        ));
        // Control.
        let unverified = enter(&stranger).await;
        stranger.knock("another-word").await;
        stranger.knock(unverified.token()).await;
        assert!(unverified.verify(LIMIT).await.is_ok());
    });
}

#[test]
fn a_network_that_leads_elsewhere_is_refused_and_left_as_it_is() {
    run(async {
        let Some(mut inside) =
            Inside::start_with(Owner::UserNamespace, "--bounding-set=+all").await
        else {
            return;
        };
        let interface = "import subprocess\nprint(subprocess.run('ip link add other type dummy || \
                         ip link add other type bridge', shell=True).returncode)";
        if inside.say(interface).await != "0\n" {
            return skipped("ip, and a kernel with dummy interfaces or bridges");
        }
        let wanted = network(listed(&["web.test"]), names());
        inside
            .say("subprocess.run(['ip', 'link', 'set', 'other', 'up'], check=True)")
            .await;
        let refused = wanted
            .enter(PROGRAM.as_ref(), inside.namespace())
            .await
            .err()
            .unwrap();
        assert!(
            matches!(
                &refused,
                EgressError::Doors(NetnsError::Interfaces(names)) if names == &["other"]
            ),
            "{refused:?}"
        );
        let routes = "print(subprocess.run(['ip', 'route', 'show', 'table', 'local'], \
                      capture_output=True, text=True).stdout.count('local default'))";
        assert_eq!(inside.say(routes).await, "0\n");
        // Control: the same with the interface down.
        inside
            .say("subprocess.run(['ip', 'link', 'set', 'other', 'down'], check=True)")
            .await;
        assert!(
            wanted
                .enter(PROGRAM.as_ref(), inside.namespace())
                .await
                .is_ok()
        );
        assert_eq!(inside.say(routes).await, "1\n");
    });
}

#[test]
fn who_has_no_right_to_a_network_is_told_so() {
    run(async {
        let Some(inside) = Inside::start(Owner::Machine).await else {
            return;
        };
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("without-rights");
        let script = format!(
            "#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=-all {PROGRAM} \"$@\"\n"
        );
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(
            &program,
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        let wanted = network(listed(&["web.test"]), names());
        let refused = wanted
            .enter(&program, inside.namespace())
            .await
            .err()
            .unwrap();
        assert!(
            matches!(refused, EgressError::Doors(NetnsError::Forbidden(_))),
            "{refused:?}"
        );
        assert!(
            wanted
                .enter(PROGRAM.as_ref(), inside.namespace())
                .await
                .is_ok()
        ); // control
    });
}

#[test]
fn code_that_is_root_inside_changes_neither_routes_nor_doors() {
    /// What would open or close the network.
    const ATTEMPTS: [&str; 4] = [
        "subprocess.run(['ip', 'route', 'del', 'local', 'default', 'dev', 'lo', 'table', 'local'], \
         check=True)",
        "subprocess.run(['ip', 'route', 'add', '203.0.113.0/24', 'dev', 'lo'], check=True)",
        "subprocess.run(['ip', 'link', 'set', 'lo', 'down'], check=True)",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)",
    ];
    run(async {
        for owner in [Owner::Machine, Owner::UserNamespace] {
            let Some(mut inside) = Inside::start(owner).await else {
                continue;
            };
            let web = Web::start();
            let gateway = inside.open(&web, &names()).await;
            inside.say(ADDRESS_OF).await;
            inside.say("import os, subprocess").await;
            assert_eq!(inside.say("print(os.getuid())").await, "0\n");
            for code in ATTEMPTS {
                assert_ne!(
                    inside.say(&attempt(code)).await,
                    "done\n",
                    "{owner:?} {code}"
                );
            }
            // The doors are taken, with every option that shares an address.
            let taken = format!(
                "thief = socket.socket()\nfor option in (socket.SO_REUSEADDR, \
                 socket.SO_REUSEPORT):\n    thief.setsockopt(socket.SOL_SOCKET, option, \
                 1)\nthief.bind((address_of('web.test'), {}))\nthief.listen()",
                web.port()
            );
            assert!(
                inside.say(&attempt(&taken)).await.contains("in use"),
                "{owner:?}"
            );
            assert_eq!(
                inside.connect("web.test", web.port()).await,
                "HTTP/1.1 200 OK\n",
                "{owner:?}"
            );
            drop(gateway);
        }
        // Control: with capabilities, all of it can be done.
        let Some(mut inside) =
            Inside::start_with(Owner::UserNamespace, "--bounding-set=+all").await
        else {
            return;
        };
        let _gateway = inside.open(&Web::start(), &names()).await;
        inside.say("import os, subprocess").await;
        for code in ATTEMPTS {
            if !std::path::Path::new("/sbin/ip").exists() && code.contains("'ip'") {
                skipped("ip");
                continue;
            }
            assert_eq!(inside.say(&attempt(code)).await, "done\n", "{code}");
        }
    });
}

#[test]
fn what_is_open_in_one_network_is_closed_in_another() {
    run(async {
        let (Some(mut one), Some(mut other)) = (
            Inside::start(Owner::UserNamespace).await,
            Inside::start(Owner::UserNamespace).await,
        ) else {
            return;
        };
        let (web, names) = (Web::start(), names());
        let port = web.port();
        let _gateway = one.open(&web, &names).await;
        let _closed = other
            .open_to(&network(
                listed(&[format!("nowhere.test:{port}")]),
                Arc::clone(&names),
            ))
            .await;
        one.say(ADDRESS_OF).await;
        let address = one.say("print(address_of('web.test'), end='')").await;
        assert_eq!(
            one.say(&format!("print(connect('{address}', {port}))"))
                .await,
            "HTTP/1.1 200 OK\n"
        ); // control
        let answer = other
            .say(&format!("print(connect('{address}', {port}))"))
            .await;
        assert!(REFUSED.contains(&answer.as_str()), "{answer}");
        assert_eq!(other.say("print(ask('web.test'))").await, "no such name\n");
        assert_eq!(web.asked(), 1);
    });
}

/// Code that says whether something could be done.
fn attempt(code: &str) -> String {
    let body: String = code.lines().map(|line| format!("    {line}\n")).collect();
    format!("try:\n{body}    print('done')\nexcept Exception as error:\n    print(error)")
}
