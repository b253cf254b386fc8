//! Callers: who is let in, what each may do, and that nobody sees what is another's.

use serde_json::{Value, json};

use super::client::{Raw, call, head, initialize, legacy};
use crate::support::service::Service;

const ALICE_AND_BOB: &[(&str, &[&str])] = &[
    (
        "alice",
        &["python:execute", "packages:install", "mcp:register"],
    ),
    ("bob", &["python:execute", "packages:install"]),
    ("reader", &["sessions:read"]),
    ("installer", &["packages:install"]),
    ("operator", &["admin"]),
];

fn service(folder: &tempfile::TempDir) -> Service {
    Service::with_keys(folder.path(), ALICE_AND_BOB, &[])
}

#[tokio::test]
async fn a_caller_without_a_token_is_told_where_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let address = service.address;
    let metadata = format!("http://{address}/.well-known/oauth-protected-resource/mcp");
    let mut nobody = Raw::connect(address).await;
    for (method, path) in [
        ("POST", "/mcp"),
        ("GET", "/mcp"),
        ("DELETE", "/mcp"),
        ("GET", "/metrics"),
        ("GET", "/sessions/a/files"),
    ] {
        let answer = nobody.ask(method, path, "", b"").await;
        assert_eq!(answer.status, 401, "{method} {path}");
        assert!(
            answer
                .head
                .contains(&format!("resource_metadata=\"{metadata}\"")),
            "{}",
            answer.head
        );
        let body: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(
            body,
            json!({"error": "invalid_token", "error_description": "Authentication required"})
        );
    }
    for path in [
        "/.well-known/oauth-protected-resource",
        "/.well-known/oauth-protected-resource/mcp",
    ] {
        let answer = nobody.ask("GET", path, "", b"").await;
        let document: Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(
            (answer.status, &document["resource"]),
            (200, &json!(format!("http://{address}/mcp")))
        );
    }
    for path in ["/healthz", "/nowhere"] {
        assert_ne!(
            nobody.ask("GET", path, "", b"").await.status,
            401,
            "{path} has nothing to hide"
        );
    }
    let in_the_address = format!(
        "/metrics?access_token={0}&token={0}",
        service.key("operator")
    );
    assert_eq!(
        nobody.ask("GET", &in_the_address, "", b"").await.status,
        401,
        "a token has no place in an address"
    );
    let twice = format!(
        "authorization: Bearer {0}\r\nauthorization: Bearer {0}\r\n",
        service.key("operator")
    );
    assert_eq!(nobody.ask("GET", "/metrics", &twice, b"").await.status, 401);
    let mut operator = Raw::with_key(&service, "operator").await;
    assert_eq!(
        operator.ask("GET", "/metrics", "", b"").await.status,
        200,
        "the control"
    );
}

#[tokio::test]
async fn every_route_and_tool_needs_its_scope() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let session = json!({"session_id": "a"});
    let tools = [
        (
            "execute_ipython_cell",
            json!({"code": "1", "session_id": "a"}),
            "python:execute",
        ),
        (
            "check_execution",
            json!({"session_id": "a", "wait": 0}),
            "python:execute",
        ),
        (
            "install_package",
            json!({"package_name": "-x", "session_id": "a"}),
            "packages:install",
        ),
        ("reset", session.clone(), "python:execute"),
        ("undo", session.clone(), "python:execute"),
        ("list_checkpoints", session.clone(), "sessions:read"),
        ("fork_session", session.clone(), "python:execute"),
        (
            "explore",
            json!({"session_id": "a", "variants": [{"name": "v", "code": "1"}]}),
            "python:execute",
        ),
        (
            "upload_file",
            json!({"relpath": "f", "text": "x", "session_id": "a"}),
            "python:execute",
        ),
        (
            "download_file",
            json!({"relpath": "f", "session_id": "a"}),
            "sessions:read",
        ),
        ("list_sessions", json!({}), "sessions:read"),
        ("close_session", session, "python:execute"),
        (
            "register_mcp_server",
            json!({"server_name": "a", "server_params": {"command": "x"}}),
            "mcp:register",
        ),
        ("list_mcp_servers", json!({}), "sessions:read"),
        (
            "unregister_mcp_server",
            json!({"server_name": "a"}),
            "mcp:register",
        ),
        ("no_such_tool", json!({}), "sessions:read"),
    ];
    let may = |caller: &str, scope: &str| match caller {
        "operator" => true,
        "alice" => scope != "admin",
        "reader" => scope == "sessions:read",
        "installer" => scope == "packages:install",
        _ => unreachable!("it is one of the four"),
    };
    for caller in ["alice", "reader", "installer", "operator"] {
        let mut client = Raw::with_key(&service, caller).await;
        for (tool, arguments, scope) in &tools {
            client.call(tool, arguments.clone()).await;
            let answer = client.answer().await;
            let allowed = may(caller, scope);
            assert_eq!(
                answer.status == 403,
                !allowed,
                "{caller} {tool}: {answer:?}"
            );
            if !allowed {
                assert!(
                    answer.head.contains("error=\"insufficient_scope\""),
                    "{}",
                    answer.head
                );
                assert!(
                    answer.head.contains(&format!("required scope: {scope}")),
                    "{}",
                    answer.head
                );
            }
        }
        for (method, path, scope) in [
            ("GET", "/metrics", "admin"),
            ("GET", "/sessions/a/files", "sessions:read"),
            ("GET", "/sessions/a/files/f", "sessions:read"),
            ("HEAD", "/sessions/a/files/f", "sessions:read"),
            ("PUT", "/sessions/a/files/f", "python:execute"),
        ] {
            let answer = client.ask(method, path, "", b"").await;
            assert_eq!(
                answer.status == 403,
                !may(caller, scope),
                "{caller} {method} {path}: {answer:?}"
            );
        }
    }
}

/// An answer with the name of the session taken out, so that answers about two sessions can be
/// compared.
fn without(answer: (u16, String), session: &str) -> (u16, String) {
    (answer.0, answer.1.replace(session, "SESSION"))
}

#[tokio::test]
async fn what_is_another_callers_looks_like_what_was_never_there() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let (mut alice, mut bob) = (
        Raw::with_key(&service, "alice").await,
        Raw::with_key(&service, "bob").await,
    );
    let result = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "open('f', 'w').write('mine')\nx = 1"}),
        )
        .await;
    let hers = result["structuredContent"]["session_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let never = "s-00000000000000000000000000";
    assert_eq!(hers.len(), never.len());

    for (tool, more) in [
        ("check_execution", json!({"wait": 0})),
        ("reset", json!({})),
        ("undo", json!({})),
        ("list_checkpoints", json!({})),
        ("fork_session", json!({})),
        ("explore", json!({"variants": [{"name": "v", "code": "x"}]})),
        ("download_file", json!({"relpath": "f"})),
        ("close_session", json!({})),
    ] {
        let mut answers = Vec::new();
        for session in [hers.as_str(), never] {
            let mut arguments = more.clone();
            arguments["session_id"] = json!(session);
            bob.call(tool, arguments).await;
            let answer = bob.answer().await;
            answers.push(without((answer.status, answer.body), session));
        }
        assert_eq!(answers[0], answers[1], "{tool}");
    }
    for (method, path) in [("GET", "files"), ("GET", "files/f"), ("HEAD", "files/f")] {
        let mut answers = Vec::new();
        for session in [hers.as_str(), never] {
            let answer = bob
                .ask(method, &format!("/sessions/{session}/{path}"), "", b"")
                .await;
            answers.push(without((answer.status, answer.body), session));
        }
        assert_eq!(answers[0], answers[1], "{method} {path}");
        assert_eq!(answers[0].0, 404, "{method} {path}");
    }
    let listed = bob.result("list_sessions", json!({})).await;
    assert_eq!(listed["structuredContent"]["sessions"], json!([]));

    let untouched = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "x, open('f').read()", "session_id": hers}),
        )
        .await;
    assert_eq!(
        untouched["structuredContent"]["text"], "(1, 'mine')",
        "and nothing that he tried had an effect"
    );
}

#[tokio::test]
async fn a_session_that_was_made_without_a_name_is_named_in_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let mut alice = Raw::with_key(&service, "alice").await;
    let named = |result: &Value| {
        let text = result["content"][0]["text"].as_str().unwrap();
        let (_, rest) = text
            .rsplit_once("Session: ")
            .unwrap_or_else(|| panic!("no session in {text:?}"));
        rest.split_once(' ').unwrap().0.to_owned()
    };
    let first = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "x = 1\nprint('hi')"}),
        )
        .await;
    let session = named(&first);
    assert_eq!(
        first["content"][0]["text"].as_str().unwrap().lines().next(),
        Some("hi")
    );
    let second = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "x", "session_id": session}),
        )
        .await;
    assert_eq!(
        second["content"][0]["text"], "1",
        "who knows the name is not told it"
    );
    let sent = alice
        .result("upload_file", json!({"relpath": "f", "text": "data"}))
        .await;
    let read = json!({"code": "open('f').read()", "session_id": named(&sent)});
    assert_eq!(
        alice.result("execute_ipython_cell", read).await["content"][0]["text"],
        "'data'"
    );
    // The session is made before the requirement is looked at.
    let refused = alice
        .result("install_package", json!({"package_name": "-x"}))
        .await;
    assert_eq!(refused["isError"], true);
    let kept = json!({"code": "1", "session_id": named(&refused)});
    assert_eq!(
        alice.result("execute_ipython_cell", kept).await["content"][0]["text"],
        "1"
    );
    let mut unlucky = Raw::with_key(&service, "bob").await;
    let refused = unlucky
        .result(
            "execute_ipython_cell",
            json!({"code": "1", "allowed_domains": ["a.example"]}),
        )
        .await;
    let text = refused["content"][0]["text"].as_str().unwrap();
    let listed = unlucky.result("list_sessions", json!({})).await;
    let made = listed["structuredContent"]["sessions"]
        .as_array()
        .unwrap()
        .len();
    assert_eq!(
        (&refused["isError"], text.contains("Session: ")),
        (&json!(true), made == 1),
        "{text}"
    );
}

#[tokio::test]
async fn two_callers_may_use_one_name_for_two_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    for (caller, number) in [("alice", 1), ("bob", 2)] {
        let mut client = Raw::with_key(&service, caller).await;
        client
            .result(
                "execute_ipython_cell",
                json!({"code": format!("x = {number}"), "session_id": "a"}),
            )
            .await;
    }
    for (caller, number) in [("alice", "1"), ("bob", "2")] {
        let mut client = Raw::with_key(&service, caller).await;
        let result = client
            .result(
                "execute_ipython_cell",
                json!({"code": "x", "session_id": "a"}),
            )
            .await;
        assert_eq!(result["structuredContent"]["text"], number, "{caller}");
    }
}

#[tokio::test]
async fn a_connection_of_an_older_client_belongs_to_whoever_opened_it() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let (status, said) = legacy(&service, "alice", "POST", "", &initialize()).await;
    assert_eq!(status, 200, "{said}");
    let id = said
        .lines()
        .find_map(|line| line.strip_prefix("mcp-session-id: "))
        .expect("it has a name")
        .to_owned();
    let hers = format!("mcp-session-id: {id}\r\nmcp-protocol-version: 2025-11-25\r\n");
    let never = format!(
        "mcp-session-id: {}\r\nmcp-protocol-version: 2025-11-25\r\n",
        "0".repeat(id.len())
    );
    let list = br#"{"jsonrpc":"2.0","id":2,"method":"tools/list"}"#;
    assert_eq!(
        legacy(&service, "alice", "POST", &hers, list).await.0,
        200,
        "the control"
    );
    for method in ["POST", "GET", "DELETE"] {
        let body: &[u8] = if method == "POST" { list } else { b"" };
        let tried = legacy(&service, "bob", method, &hers, body).await;
        assert_eq!(tried.0, 404, "{method}");
        let body_of = |said: &str| said.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
        assert_eq!(
            body_of(&tried.1),
            body_of(&legacy(&service, "bob", method, &never, body).await.1),
            "{method}"
        );
    }
    assert_eq!(
        legacy(&service, "alice", "POST", &hers, list).await.0,
        200,
        "and it is still hers"
    );
    assert_eq!(legacy(&service, "alice", "DELETE", &hers, b"").await.0, 204);
    assert_eq!(legacy(&service, "alice", "POST", &hers, list).await.0, 404);
}

#[tokio::test]
async fn names_and_origins_are_checked_on_every_route() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let mut operator = Raw::with_key(&service, "operator").await;
    for path in [
        "/mcp",
        "/metrics",
        "/healthz",
        "/readyz",
        "/sessions/a/files",
        "/.well-known/oauth-protected-resource",
        "/nowhere",
    ] {
        for more in [
            "host: evil.test\r\n",
            "host: localhost\r\norigin: https://evil.test\r\n",
            "host: localhost\r\norigin: null\r\n",
        ] {
            let answer = operator.ask("GET", path, more, b"").await;
            assert_eq!(answer.status, 403, "{path} {more}");
            assert!(!answer.head.contains("access-control"), "{}", answer.head);
        }
        let good = operator
            .ask(
                "GET",
                path,
                "host: localhost\r\norigin: http://localhost\r\n",
                b"",
            )
            .await;
        assert_ne!(good.status, 403, "{path}");
    }
}

#[tokio::test]
async fn what_is_ambiguous_or_malformed_is_answered_and_refused() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let mut alice = Raw::with_key(&service, "alice").await;
    let good = call("list_sessions", json!({}));
    let request = async |client: &mut Raw, more: &str, body: &str| {
        let authorization = format!(
            "authorization: Bearer {}\r\ncontent-length: {}\r\n{more}",
            service.key("alice"),
            body.len()
        );
        client
            .write(head("list_sessions", &authorization) + body)
            .await;
        client.answer().await
    };
    assert_eq!(
        request(&mut alice, "", &good).await.status,
        200,
        "the control"
    );
    for (body, code) in [
        (good.replacen("\"id\":1", "\"id\":1,\"id\":2", 1), -32700),
        (format!("[{good}]"), -32600),
        ("{".to_owned(), -32700),
        ("".to_owned(), -32600),
        (good.replacen("2.0", "1.0", 1), -32600),
        (
            good.replacen("\"arguments\":{}", "\"arguments\":[1]", 1),
            -32602,
        ),
    ] {
        let answer = request(&mut alice, "", &body).await;
        let said: Value =
            serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("{answer:?}"));
        assert_eq!(
            (answer.status, &said["error"]["code"]),
            (400, &json!(code)),
            "{body}"
        );
    }
    let answer = request(
        &mut alice,
        "mcp-param-session-id: b\r\n",
        &call("reset", json!({"session_id": "a"})),
    )
    .await;
    assert_eq!(answer.status, 400, "header and body disagree: {answer:?}");
}

#[tokio::test]
async fn who_may_call_can_change_while_the_server_runs() {
    let folder = tempfile::tempdir().unwrap();
    let service = service(&folder);
    let status = async |caller: &str| {
        Raw::with_key(&service, caller)
            .await
            .ask("GET", "/sessions/a/files", "", b"")
            .await
            .status
    };
    assert_eq!((status("alice").await, status("bob").await), (404, 404));

    let configuration = folder.path().join("config.yaml");
    let before = std::fs::read_to_string(&configuration).unwrap();
    let (first, rest) = before.split_once("    - name: \"bob\"").unwrap();
    let others = rest.split_once("    - name: \"reader\"").unwrap().1;
    std::fs::write(
        &configuration,
        format!("{first}    - name: \"reader\"{others}"),
    )
    .unwrap();
    assert!(
        service
            .read_again()
            .contains("the settings were read again")
    );
    assert_eq!(
        (status("alice").await, status("bob").await),
        (404, 401),
        "his key is good no more"
    );

    std::fs::write(&configuration, "auth: {api_keys: nonsense}").unwrap();
    assert!(
        service
            .read_again()
            .contains("the settings were not read again")
    );
    assert_eq!(
        (status("alice").await, status("bob").await),
        (404, 401),
        "what makes no sense changes nothing"
    );
}

#[tokio::test]
async fn everything_that_reaches_a_session_is_recorded_and_nothing_of_what_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.jsonl");
    let service = Service::with_keys(
        folder.path(),
        ALICE_AND_BOB,
        &["--audit-file", log.to_str().unwrap()],
    );
    let mut alice = Raw::with_key(&service, "alice").await;
    let secret = "canary-in-code";
    let cell =
        json!({"code": format!("print('{secret}')"), "session_id": "a", "allowed_domains": []});
    alice.result("execute_ipython_cell", cell).await;
    alice
        .ask("PUT", "/sessions/a/files/f", "", secret.as_bytes())
        .await;
    alice.ask("GET", "/sessions/a/files/f", "", b"").await;
    alice
        .result("fork_session", json!({"session_id": "a"}))
        .await;
    alice
        .result("close_session", json!({"session_id": "a"}))
        .await;
    let mut nobody = Raw::connect(service.address).await;
    nobody
        .ask(
            "GET",
            "/metrics",
            "authorization: Bearer canary-in-token\r\n",
            b"",
        )
        .await;
    let said = service.finish();
    let records = std::fs::read_to_string(&log).unwrap();
    for kind in [
        "server_started",
        "session_created",
        "execution",
        "tool_call",
        "file",
        "session_ended",
        "authentication_refused",
        "server_stopped",
    ] {
        assert!(
            records.contains(&format!("\"{kind}\"")),
            "{kind} is not in {records}"
        );
    }
    assert!(records.contains("key:alice"), "{records}");
    for text in [&records, &said] {
        assert!(!text.contains("canary"), "{text}");
    }
    let mut verify = crate::support::server::program();
    verify.args(["audit", "verify"]).arg(&log);
    let (status, output, errors) = crate::support::server::finished(&mut verify);
    assert_eq!(status, Some(0), "{output}{errors}");
}

#[tokio::test]
async fn a_caller_may_narrow_what_its_session_reaches_and_never_widen_it() {
    let folder = tempfile::tempdir().unwrap();
    let more = ["--allowed-domain", "*.example.test"];
    let service = Service::with_keys(folder.path(), ALICE_AND_BOB, &more);
    let mut alice = Raw::with_key(&service, "alice").await;
    let mut run = async |rules: Value| {
        alice
            .result(
                "execute_ipython_cell",
                json!({"code": "1", "session_id": "a", "allowed_domains": rules}),
            )
            .await
    };
    assert_eq!(
        run(json!(["api.example.test"])).await["structuredContent"]["text"],
        "1",
        "the control"
    );
    for beyond in [
        json!(["example.org"]),
        json!(["*.example.test:8443"]),
        json!(["10.0.0.0/8"]),
    ] {
        let refused = run(beyond.clone()).await;
        assert_eq!(refused["isError"], true, "{beyond}: {refused}");
    }
    let listed = alice.result("list_sessions", json!({})).await;
    assert_eq!(
        listed["structuredContent"]["sessions"][0]["network"],
        json!(["api.example.test"])
    );
}
