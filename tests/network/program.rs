//! The built program with flags about the network: what sessions then reach, what clients are told,
//! and mistakes.
//!
//! The names end in `localhost`, which every resolver knows to be this machine.

use std::net::{IpAddr, Ipv6Addr, TcpListener, UdpSocket};

use serde_json::{Value, json};

use super::Web;
use crate::support::server::{MINIMAL, Server, finished, program};
use crate::support::skipped;

/// Fetches a page; prints it, or why there is none.
const FETCH: &str = "
import socket, urllib.request
def fetch(target):
    try:
        return urllib.request.urlopen(f'http://{target}/', timeout=20).read().decode()
    except OSError as error:
        return type(getattr(error, 'reason', error)).__name__
";

/// What opens a server to whoever finds it by a name that ends in `localhost`.
fn here(web: &Web) -> [String; 2] {
    [
        format!("--allowed-domain=127.0.0.1:{}", web.port()),
        format!("--allowed-domain=[::1]:{}", web.port()),
    ]
}

fn started(flags: &[&str]) -> Server {
    Server::start(&[MINIMAL, flags].concat())
}

/// Calls `fetch` and returns what it returned and what the result says was blocked.
#[track_caller]
fn fetched(server: &Server, target: &str) -> (String, Value) {
    let session = server.session();
    session.text(FETCH);
    let result = session.run(&format!("print(fetch('{target}'))"));
    let blocked = result.structured()["blocked"].clone();
    let page = result.text().lines().next().unwrap_or_default().to_owned();
    (page, blocked)
}

fn description(server: &Server) -> (String, Value) {
    let tools = server.request("tools/list", json!({}));
    let tools = tools["result"]["tools"].as_array().unwrap();
    let tool = tools
        .iter()
        .find(|tool| tool["name"] == "execute_ipython_cell")
        .unwrap();
    (
        tool["description"].as_str().unwrap().to_owned(),
        tool["annotations"]["openWorldHint"].clone(),
    )
}

/// The rules of the one session that a server has, as `list_sessions` tells them.
fn rules(server: &Server) -> Vec<String> {
    let session = server.session();
    session.text("1");
    let all = server.call("list_sessions", json!({}));
    let rules = &all.structured()["sessions"][0]["network"];
    rules
        .as_array()
        .unwrap()
        .iter()
        .map(|rule| rule.as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn without_a_flag_sessions_reach_nothing_and_clients_are_told_so() {
    let web = Web::start();
    let server = started(&[]);
    let (words, open) = description(&server);
    assert!(words.contains("without network"), "{words}");
    assert_eq!(open, false);
    assert!(rules(&server).is_empty());
    let (page, _) = fetched(&server, &format!("127.0.0.1:{}", web.port()));
    assert!(
        ["ConnectionRefusedError", "OSError"].contains(&page.as_str()),
        "{page}"
    );
    assert_eq!(web.asked(), 0);
}

#[test]
fn listed_names_are_reached_and_denied_ones_are_not() {
    let web = Web::start();
    let port = web.port();
    let [v4, v6] = here(&web);
    let allowed = format!("--allowed-domain=*.localhost:{port}");
    let server = started(&[&allowed, &v4, &v6, "--denied-domain", "bad.localhost"]);

    let (words, open) = description(&server);
    assert!(
        words.contains("whose network reaches only")
            && words.contains(&format!("*.localhost:{port}")),
        "{words}"
    );
    assert!(words.contains("bad.localhost"), "{words}");
    assert_eq!(open, true);
    let rules = rules(&server);
    for rule in [format!("*.localhost:{port}"), format!("127.0.0.1:{port}")] {
        assert!(rules.contains(&rule), "{rule} is not in {rules:?}");
    }
    assert!(
        rules.iter().any(|rule| rule.contains("bad.localhost")),
        "{rules:?}"
    );

    assert_eq!(
        fetched(&server, &format!("web.localhost:{port}")),
        ("hello".to_owned(), json!([]))
    ); // control
    assert_eq!(web.asked(), 1);
    for name in ["bad.localhost", "deep.web.localhost", "example.org"] {
        let (page, blocked) = fetched(&server, &format!("{name}:{port}"));
        assert_eq!(page, "gaierror");
        assert_eq!(
            blocked,
            json!([format!("blocked: {name} (not in the allowed list)")])
        );
    }
    assert_eq!(web.asked(), 1);
}

#[test]
fn a_result_names_what_was_blocked() {
    let server = started(&["--allowed-domain", "example.com"]);
    let session = server.session();
    session.text(FETCH);
    let result = session.run("print(fetch('192.0.2.1'), fetch('192.0.2.1:443'))");
    let lines = result.text().lines().skip(1).collect::<Vec<_>>();
    assert_eq!(
        lines,
        [
            "blocked: 192.0.2.1:80 (not in the allowed list)",
            "blocked: 192.0.2.1:443 (not in the allowed list)"
        ]
    );
    assert!(!result.is_error());
}

/// An address of this machine that is not its loopback, if it has one.
fn own_address() -> Option<IpAddr> {
    // Nothing is sent: the kernel only chooses a source for an address that is set aside for
    // examples.
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("198.51.100.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip())
        .filter(|address| !address.is_loopback() && !address.is_unspecified())
}

#[test]
fn with_everything_open_all_is_reached_but_this_machines_loopback_and_what_is_denied() {
    let Some(own) = own_address() else {
        return skipped("an address beside the loopback");
    };
    let web = Web::serve(TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap());
    let port = web.port();
    let denied = format!("{own}:{}", if port == 9 { 10 } else { 9 });
    let server = started(&[
        "--allow-network",
        "all",
        "--denied-domain",
        "bad.localhost",
        "--denied-domain",
        &denied,
    ]);
    let (words, open) = description(&server);
    assert!(words.contains("bad.localhost"), "{words}");
    assert_eq!(open, true);
    assert_eq!(
        fetched(&server, &format!("{own}:{port}")),
        ("hello".to_owned(), json!([]))
    ); // control
    assert_eq!(web.asked(), 1);
    let (_, blocked) = fetched(&server, &format!("web.localhost:{port}"));
    assert_eq!(
        blocked,
        json!([format!(
            "blocked: web.localhost:{port} (it leads to this machine's loopback)"
        )])
    );
    let (_, blocked) = fetched(&server, &denied);
    assert_eq!(
        blocked,
        json!([format!("blocked: {denied} (not in the allowed list)")])
    );
    let (page, _) = fetched(&server, &format!("bad.localhost:{port}"));
    assert_eq!(page, "gaierror");
    assert_eq!(web.asked(), 1);
}

#[test]
fn everything_is_told_as_a_network_without_a_list() {
    let server = started(&["--allow-network", "all"]);
    let (words, open) = description(&server);
    assert!(words.contains("with network"), "{words}");
    assert_eq!(open, true);
    assert_eq!(rules(&server), ["all"]);
}

#[test]
fn a_single_run_has_the_same_flags() {
    let web = Web::start();
    let port = web.port();
    let [v4, v6] = here(&web);
    let code =
        format!("{FETCH}\nprint(fetch('web.localhost:{port}'), fetch('other.example.org:{port}'))");
    let mut command = program();
    command.args(["run", "--environment", "minimal", "-c", &code, &v4, &v6]);
    let (status, output, errors) =
        finished(command.arg(format!("--allowed-domain=web.localhost:{port}")));
    assert_eq!(
        (status, output.as_str()),
        (Some(0), "hello gaierror\n"),
        "{errors}"
    );
    assert!(
        errors.contains("blocked: other.example.org (not in the allowed list)"),
        "{errors}"
    );
}

#[test]
fn mistakes_about_the_network_are_told_before_anything_starts() {
    for (arguments, words) in [
        (
            &["--allowed-domain", "https://example.com/"][..],
            &["--allowed-domain", "https://example.com/"][..],
        ),
        (
            &["--allowed-domain", "exa mple.com"],
            &["--allowed-domain", "exa mple.com"],
        ),
        (
            &["--allowed-domain", "10.0.0.1/8"],
            &["--allowed-domain", "10.0.0.1/8"],
        ),
        (
            &["--allowed-domain", "example.com:0"],
            &["--allowed-domain", "example.com:0"],
        ),
        (
            &["--allowed-domain", "example.com:70000"],
            &["--allowed-domain", "70000"],
        ),
        (
            &["--allowed-domain", "a.*.example.com"],
            &["--allowed-domain", "a.*.example.com"],
        ),
        (&["--allowed-domain", "*"], &["--allowed-domain", "all"]),
        (&["--allowed-domain", ""], &["--allowed-domain"]),
        (
            &[
                "--allowed-domain",
                "example.com",
                "--denied-domain",
                "300.0.0.1/8",
            ],
            &["--denied-domain", "300.0.0.1/8"],
        ),
        (
            &["--allow-network", "some"],
            &["--allow-network", "some", "none, listed or all"],
        ),
        (
            &["--allow-network", "none", "--allowed-domain", "example.com"],
            &["--allow-network", "example.com"],
        ),
        (
            &["--secret", "TOKEN=hush-hush-canary@example.com"],
            &["--secret", "NAME=env:"],
        ),
        (
            &["--secret", "TOKEN=env:NO_SUCH_VARIABLE@example.com"],
            &["--secret", "TOKEN", "not set"],
        ),
        (
            &["--secret", "TOKEN=env:HUSH@*.example.com"],
            &["--secret", "*.example.com"],
        ),
        (
            &["--secret", "TOKEN=env:HUSH@example.com:443"],
            &["--secret", "443"],
        ),
        (
            &["--secret", "TOKEN=env:SHORT@example.com"],
            &["--secret", "TOKEN", "bytes"],
        ),
    ] {
        let mut command = program();
        command
            .env("HUSH", "hush-hush-canary")
            .env("SHORT", "canary")
            .arg("mcp")
            .args(MINIMAL)
            .args(arguments);
        let (status, output, errors) = finished(&mut command);
        assert_eq!(
            (status, output.as_str()),
            (Some(2), ""),
            "{arguments:?}: {errors}"
        );
        for word in words {
            assert!(
                errors.contains(word),
                "{arguments:?}: {word:?} is not in {errors:?}"
            );
        }
        assert!(!errors.contains("canary"), "{arguments:?}: {errors:?}");
    }
    let good = [
        "--allowed-domain",
        "*.example.com:443",
        "--secret",
        "TOKEN=env:HUSH@api.example.com:Authorization",
    ];
    let mut command = program();
    let (status, output, errors) = finished(
        command
            .env("HUSH", "hush-hush-canary")
            .arg("mcp")
            .args(MINIMAL)
            .args(good),
    );
    assert_eq!((status, output.as_str()), (Some(0), ""), "{errors}"); // control
}
