//! HTTPS as programs speak it: the name that a client asks for must be the one it connects to,
//! whatever the program is.

use std::process::Command;

use cellblock::session::Outcome;

use super::https::{Heard, Https, Signer};
use super::{Web, blocked, listed, listen_at, names, network};
use crate::support::native::{Builder, Native, Session, printed, run};
use crate::support::skipped;

/// A server at the port of HTTPS, and sessions that reach it as `web.test` and trust it.
struct Place {
    https: Https,
    native: Native,
    signer: Signer,
}

impl Place {
    /// Not everybody may listen on that port.
    fn new() -> Option<Place> {
        let Some(listener) = listen_at(443) else {
            skipped("the right to listen on port 443");
            return None;
        };
        let signer = Signer::new();
        // As good as git's simplest server: it has one branch.
        let answer = |request: &Heard| match request.path() {
            path if path.starts_with("/repository/info/refs") => {
                format!("{}\trefs/heads/main\n", "5".repeat(40))
            }
            path if path.starts_with("/repository/HEAD") => "ref: refs/heads/main\n".to_owned(),
            _ => "hello".to_owned(),
        };
        let https = Https::serve(listener, &signer, &["web.test", "other.test"], answer);
        let address = https.address();
        let names = names()
            .and("web.test", &[&[address]])
            .and("other.test", &[&[address]]);
        let rules = listed(&["web.test".to_owned(), address.to_string()]);
        let native = Builder::new("minimal")
            .network(network(rules, names))
            .start();
        Some(Place {
            https,
            native,
            signer,
        })
    }

    /// A session with the authority's certificate in its working folder.
    async fn session(&self) -> Session {
        let session = self.native.session();
        session.ok(TLS).await;
        session
            .upload("authority.pem", self.signer.pem().as_bytes())
            .await
            .unwrap();
        session
    }
}

/// Connects to a name, then asks for a server's name in TLS and for a host in HTTP.
const TLS: &str = "
import os, shutil, socket, ssl, subprocess, time
def ask(name, server_name, host, text=None):
    context = ssl.create_default_context(cafile='authority.pem')
    context.check_hostname = server_name is not None
    begun = time.monotonic()
    try:
        with socket.create_connection((name, 443), 20) as connection:
            if text is not None:
                connection.sendall(text)
                answer = connection.recv(100)
            else:
                with context.wrap_socket(connection, server_hostname=server_name) as stream:
                    stream.sendall(f'GET / HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n'.encode())
                    answer = stream.recv(1000)
        answer = answer.split(b'\\r')[0].decode() or 'closed'
    except OSError as error:
        answer = type(error).__name__
    return answer if time.monotonic() - begun < 10 else f'{answer}, too late'
def call(*words, **variables):
    if not shutil.which(words[0]):
        return 'missing'
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables})
    return done.stdout.strip() or f'status {done.returncode}'
";

async fn tried(session: &Session, code: &str) -> (String, Vec<String>) {
    let outcome: Outcome = session.execute(code).await.unwrap();
    (printed(&outcome).trim().to_owned(), blocked(&outcome))
}

#[test]
fn https_to_a_listed_name_passes_and_a_client_that_asks_for_another_is_reset() {
    run(async {
        let Some(place) = Place::new() else { return };
        let session = place.session().await;
        let right = tried(&session, "print(ask('web.test', 'web.test', 'web.test'))").await;
        assert_eq!(right, ("HTTP/1.1 200 OK".to_owned(), vec![])); // control
        let urllib = "import urllib.request\nprint(urllib.request.urlopen('https://web.test/', \
                      context=ssl.create_default_context(cafile='authority.pem')).read())";
        assert_eq!(session.ok(urllib).await, "b'hello'\n");
        assert_eq!(place.https.connections(), 2);
        // The server would answer each of these, and its certificate is even good for the first.
        for (code, reason) in [
            (
                "ask('web.test', 'other.test', 'other.test')",
                "the TLS client asks for other.test",
            ),
            (
                "ask('web.test', 'WEB.TEST.example.org', 'web.test')",
                "the TLS client asks for web.test.example.org",
            ),
            (
                "ask('web.test', None, 'web.test')",
                "the TLS client does not say which name it wants",
            ),
            (
                "ask('web.test', '', '', b'GET / HTTP/1.1\\r\\nHost: web.test\\r\\n\\r\\n')",
                "only TLS may pass at this port",
            ),
        ] {
            let (answer, told) = tried(&session, &format!("print({code})")).await;
            assert_eq!(answer, "ConnectionResetError", "{code}");
            assert_eq!(
                told,
                [format!("blocked: web.test:443 ({reason})")],
                "{code}"
            );
        }
        assert_eq!(place.https.connections(), 2);
        place.native.end().await;
    });
}

#[test]
fn a_name_that_shares_its_address_with_a_listed_one_is_not_reached_through_it() {
    run(async {
        let Some(place) = Place::new() else { return };
        let session = place.session().await;
        // By its own name, by the address of the other, and by the address that both have.
        let address = place.https.address();
        let fronts = [
            (
                "other.test",
                "gaierror",
                "blocked: other.test (not in the allowed list)",
            ),
            (
                "web.test",
                "ConnectionResetError",
                "blocked: web.test:443 (the TLS client asks for other.test)",
            ),
        ];
        for (front, expected, line) in fronts {
            let code = format!("print(ask('{front}', 'other.test', 'other.test'))");
            assert_eq!(
                tried(&session, &code).await,
                (expected.to_owned(), vec![line.to_owned()]),
                "{front}"
            );
        }
        assert_eq!(place.https.connections(), 0);
        // Control: the address itself is listed, and whoever lists an address lists all that is
        // there.
        let code = format!("print(ask('{address}', 'other.test', 'other.test'))");
        assert_eq!(
            tried(&session, &code).await,
            ("HTTP/1.1 200 OK".to_owned(), vec![])
        );
        place.native.end().await;
    });
}

#[test]
fn curl_git_wget_and_node_reach_what_is_listed_and_nothing_else() {
    run(async {
        let Some(place) = Place::new() else { return };
        let session = place.session().await;
        let main = format!("{}\trefs/heads/main", "5".repeat(40));
        let fetch = "fetch(process.argv[1]).then(answer => answer.text()).then(console.log)";
        for (program, call, expected) in [
            (
                "curl",
                "call('curl', '-sS', '--cacert', 'authority.pem', '{}/')".to_owned(),
                "hello",
            ),
            (
                "wget",
                "call('wget', '-qO-', '--tries=1', '--ca-certificate=authority.pem', \
                      '{}/')"
                    .to_owned(),
                "hello",
            ),
            (
                "git",
                "call('git', '-c', 'http.sslCAInfo=/work/authority.pem', 'ls-remote', \
                 '{}/repository', 'main')"
                    .to_owned(),
                main.as_str(),
            ),
            (
                "node",
                format!(
                    "call('node', '-e', '{fetch}', '{{}}/', \
                              NODE_EXTRA_CA_CERTS='authority.pem')"
                ),
                "hello",
            ),
        ] {
            let before = place.https.connections();
            let at =
                |name: &str| format!("print({})", call.replace("{}", &format!("https://{name}")));
            let (answer, told) = tried(&session, &at("web.test")).await;
            if answer == "missing" {
                skipped(&format!("{program} on this machine"));
                continue;
            }
            assert_eq!((answer.as_str(), told), (expected, vec![]), "{program}");
            let after = place.https.connections();
            assert!(after > before, "{program}");
            let (answer, told) = tried(&session, &at("other.test")).await;
            assert!(
                answer.starts_with("status ") && answer != "status 0",
                "{program}: {answer}"
            );
            assert!(
                told.iter()
                    .any(|line| line.starts_with("blocked: other.test (")),
                "{program}: {told:?}"
            );
            assert_eq!(place.https.connections(), after, "{program}");
        }
        place.native.end().await;
    });
}

/// Connects and asks with system calls alone; tells the first line of the answer, or the number of
/// the error.
const STATIC_PROGRAM: &str = r#"
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    struct sockaddr_in target = {.sin_family = AF_INET, .sin_port = htons(atoi(words[2]))};
    const char *request = "GET / HTTP/1.1\r\nHost: web.test\r\n\r\n";
    char answer[100] = {0};
    int connection = socket(AF_INET, SOCK_STREAM, 0);
    if (count != 3 || inet_pton(AF_INET, words[1], &target.sin_addr) != 1) return 2;
    if (connect(connection, (struct sockaddr *)&target, sizeof target) ||
        write(connection, request, strlen(request)) < 0 || read(connection, answer, 99) < 0) {
        printf("%s\n", strerror(errno));
        return 1;
    }
    printf("%s\n", answer[0] ? strtok(answer, "\r") : "closed");
    return 0;
}
"#;

#[test]
fn a_static_program_is_held_by_the_same_rules() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (
            folder.path().join("connect.c"),
            folder.path().join("connect"),
        );
        std::fs::write(&source, STATIC_PROGRAM).unwrap();
        let built = Command::new("cc")
            .arg("-static")
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .status();
        if !built.is_ok_and(|status| status.success()) {
            return skipped("a C compiler that makes static programs");
        }
        let web = Web::start();
        let native = super::opened(&web, names());
        let session = native.session();
        session
            .upload("connect", &std::fs::read(&program).unwrap())
            .await
            .unwrap();
        session.ok(TLS).await;
        session
            .ok("os.chmod('connect', 0o755)\naddress = socket.gethostbyname('web.test')")
            .await;
        let port = web.port();
        let reached = tried(
            &session,
            &format!("print(call('./connect', address, '{port}'))"),
        )
        .await;
        assert_eq!(
            reached,
            ("HTTP/1.1 200 OK".to_owned(), vec![]),
            "by the address that stands for the name"
        );
        let refused = tried(
            &session,
            &format!("print(call('./connect', '192.0.2.1', '{port}'))"),
        )
        .await;
        let line = format!("blocked: 192.0.2.1:{port} (not in the allowed list)");
        assert_eq!(refused, ("Connection reset by peer".to_owned(), vec![line]));
        let closed = tried(&session, "print(call('./connect', address, '9'))").await;
        assert_eq!(closed.0, "Connection refused");
        assert_eq!(web.asked(), 1);
        native.end().await;
    });
}

#[test]
fn plain_http_is_for_the_host_of_the_connection_in_every_request() {
    run(async {
        let Some(listener) = listen_at(80) else {
            return skipped("the right to listen on port 80");
        };
        let web = Web::serve(listener);
        let names = names().and("web.test", &[&[web.address()]]);
        let rules = listed(&["web.test".to_owned(), web.address().to_string()]);
        let native = Builder::new("minimal")
            .network(network(rules, names))
            .start();
        let session = native.session();
        let ask = |host: &str| {
            format!(
                "import http.client\nconnection = http.client.HTTPConnection('web.test', \
                 timeout=20)\nconnection.request('GET', '/', headers={{'Host': \
                 '{host}'}})\nprint(connection.getresponse().status)"
            )
        };
        assert_eq!(
            tried(&session, &ask("web.test")).await,
            ("200".to_owned(), vec![])
        ); // control
        let (answer, told) = tried(&session, &ask("other.test")).await;
        assert_eq!(answer, "403");
        assert!(
            told.len() == 1 && told[0].starts_with("blocked: web.test:80 ("),
            "{told:?}"
        );
        assert!(
            web.heard()
                .iter()
                .all(|request| !request.contains("other.test")),
            "{:?}",
            web.heard()
        );
        native.end().await;
    });
}
