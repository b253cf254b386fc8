//! mcp-pyexec: one tool over both transports, with tokens and scopes over the second.

use std::io::{BufReader, Write};
use std::net::TcpListener;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};

use super::{call, exactly, fails, go_through, listed, start, words};
use crate::http::client::Raw;
use crate::network::https::read_request;
use crate::support::server::{MINIMAL, Server};
use crate::support::service::Service;

const EXECUTE: &str = "execute_python";

fn code(code: &str) -> Value {
    json!({"code": code})
}

#[test]
fn the_tool_has_its_name_and_arguments() {
    let server = start("pyexec", MINIMAL);
    assert_eq!(
        listed(&server),
        json!([[EXECUTE, ["code", "session_id"], ["code"]]])
    );
    let all = server.request("tools/list", json!({}));
    assert_eq!(
        all["result"]["tools"][0]["inputSchema"]["properties"]["session_id"]["default"],
        "default"
    );
}

#[test]
fn calls_answer_as_documented() {
    calls(&start("pyexec", &[MINIMAL, &["--timeout", "2s"]].concat()));
}

/// Goes through the calls that the documents show, on any backend, with a time-out of two seconds.
pub(super) fn calls(server: &Server) {
    go_through(
        server,
        vec![
            exactly(EXECUTE, code("2 + 2"), &["4"]),
            exactly(
                EXECUTE,
                code("x = 1"),
                &["✓ Execution successful (no output)"],
            ),
            exactly(EXECUTE, code("print('printed'); x"), &["printed\n1"]),
            exactly(
                EXECUTE,
                json!({"code": "x", "session_id": "default"}),
                &["1"],
            ),
            fails(
                EXECUTE,
                json!({"code": "x", "session_id": "other"}),
                &["NameError", "\nERROR: NameError: "],
            ),
            exactly(
                EXECUTE,
                code("import sys; print('o'); print('e', file=sys.stderr); print('o')"),
                &["o\nERROR: e\no"],
            ),
            fails(
                EXECUTE,
                code("print('before'); 1 / 0"),
                &["before\n", "\nERROR: ZeroDivisionError: division by zero"],
            ),
            fails(EXECUTE, code("  "), &["Error: No Python code provided"]),
            fails(
                EXECUTE,
                code("while True: pass"),
                &["✗ Execution timed out after 2 seconds", "are kept"],
            ),
            exactly(EXECUTE, code("x"), &["1"]),
            words(
                EXECUTE,
                code("print('x' * 3_000_000)"),
                &["xxx", "characters cut here"],
            ),
            fails(
                EXECUTE,
                json!({"code": "1", "session_id": "../../etc"}),
                &["✗ Error: ", "session"],
            ),
            fails(EXECUTE, json!({}), &["✗ Error: ", "\"code\""]),
            fails("other", json!({}), &["Unknown tool: other"]),
            fails(
                EXECUTE,
                code("import os; os._exit(1)"),
                &["✗ Error: Python ended while the code ran"],
            ),
            words(
                EXECUTE,
                code("print('x' in globals())"),
                &["(Python was started anew, because ", "\nFalse"],
            ),
        ],
    );
}

#[test]
fn text_and_pictures_come_in_order() {
    let server = start("pyexec", &[]);
    let draw = "import matplotlib.pyplot as plt\nprint('one'); plt.plot([1]); plt.show(); \
                print('two'); plt.plot([2]); plt.show(); 'three'";
    let (blocks, failed) = call(&server, EXECUTE, code(draw));
    assert!(!failed);
    assert_eq!(blocks, ["one", "<image>", "two", "<image>", "'three'"]);
}

#[test]
fn a_million_characters_pass_and_of_more_the_middle_is_cut() {
    let server = start("pyexec", MINIMAL);
    let print = |text: &str| code(&format!("print({text}, end='')"));
    let (blocks, failed) = call(&server, EXECUTE, print("'x' * 1_000_000"));
    assert!(
        !failed && blocks == ["x".repeat(1_000_000)],
        "{} blocks, the first of {} bytes",
        blocks.len(),
        blocks[0].len()
    ); // control
    let (blocks, failed) = call(&server, EXECUTE, print("'x' * 1_000_000 + 'y'"));
    // Neither letter is in the line that stands for the middle.
    let kept = blocks[0].matches(['x', 'y']).count();
    assert!(
        !failed && kept == 1_000_000 && blocks[0].ends_with('y'),
        "{kept} characters are left"
    );
    assert!(blocks[0].contains(" cut here …]"));
}

#[test]
fn its_usual_limits_hold() {
    let server = start("pyexec", MINIMAL);
    let limit = "int(open('/sys/fs/cgroup/memory.max').read())";
    let (blocks, failed) = call(&server, EXECUTE, code("x = bytearray(700 << 20)"));
    assert!(
        failed && (blocks[0].contains("512 MiB") || blocks[0].contains("MemoryError")),
        "{limit}: {blocks:?}"
    );
    let (blocks, failed) = call(
        &server,
        EXECUTE,
        code("x = bytearray(100 << 20); len(x) >> 20"),
    );
    assert!(
        !failed && blocks[0].ends_with("100"),
        "the control: {blocks:?}"
    );
}

#[tokio::test]
async fn over_http_a_token_is_needed_and_sessions_belong_to_callers() {
    let folder = tempfile::tempdir().unwrap();
    let callers: [(&str, &[&str]); 3] = [
        ("anna", &["python:execute"]),
        ("ben", &["python:execute"]),
        ("cara", &["sessions:read"]),
    ];
    let service = Service::with_keys(folder.path(), &callers, &["--profile", "pyexec"]);
    let mut anna = Raw::with_key(&service, "anna").await;
    let told = anna.result(EXECUTE, code("mine = 'secret'; mine")).await;
    assert_eq!(told["content"][0]["text"], "'secret'");
    assert_eq!(
        anna.result(EXECUTE, code("mine")).await["content"][0]["text"],
        "'secret'"
    ); // control
    let mut ben = Raw::with_key(&service, "ben").await;
    assert_eq!(ben.result(EXECUTE, code("mine")).await["isError"], true);
    let mut cara = Raw::with_key(&service, "cara").await;
    cara.call(EXECUTE, code("1")).await;
    let refused = cara.answer().await;
    assert_eq!(refused.status, 403, "{refused:?}");
    assert!(refused.head.contains("insufficient_scope"), "{refused:?}");
    let mut nobody = Raw::connect(service.address).await;
    nobody.call(EXECUTE, code("1")).await;
    assert_eq!(nobody.answer().await.status, 401);
}

/// An issuer of tokens, whose keys are at an address on loopback.
struct Issuer {
    key: EcdsaKeyPair,
    keys_address: String,
}

impl Issuer {
    const NAME: &str = "https://id.example.com";

    fn start() -> Issuer {
        let (random, method) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let document = EcdsaKeyPair::generate_pkcs8(method, &random).unwrap();
        let key = EcdsaKeyPair::from_pkcs8(method, document.as_ref(), &random).unwrap();
        let point = key.public_key().as_ref();
        let (x, y) = (
            URL_SAFE_NO_PAD.encode(&point[1..33]),
            URL_SAFE_NO_PAD.encode(&point[33..]),
        );
        let keys = json!({"keys": [{"kty": "EC", "crv": "P-256", "kid": "one", "x": x, "y": y}]});
        let (listener, keys) = (TcpListener::bind("127.0.0.1:0").unwrap(), keys.to_string());
        let keys_address = format!("http://{}/keys", listener.local_addr().unwrap());
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{keys}",
            keys.len()
        );
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let mut connection = BufReader::new(connection);
                if read_request(&mut connection).is_some() {
                    // Whoever asked may be gone.
                    let _ = connection.get_mut().write_all(answer.as_bytes());
                }
            }
        });
        Issuer { key, keys_address }
    }

    fn token(&self, issuer: &str, audience: &str, scope: &str) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let claims = json!({
            "iss": issuer, "aud": audience, "sub": "alice", "scope": scope,
            "exp": now.as_secs() + 600,
        });
        let encode = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!(
            "{}.{}",
            encode(json!({"alg": "ES256", "kid": "one"})),
            encode(claims)
        );
        let signature = self.key.sign(&SystemRandom::new(), message.as_bytes());
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature.unwrap()))
    }
}

#[tokio::test]
async fn the_service_takes_the_documented_variables() {
    const AUDIENCE: &str = "https://cellblock.example.com/mcp";
    let issuer = Issuer::start();
    let folder = tempfile::tempdir().unwrap();
    let all = [
        ("MCP_JWKS_URI", issuer.keys_address.as_str()),
        ("MCP_ISSUER", Issuer::NAME),
        ("MCP_AUDIENCE", AUDIENCE),
        ("MCP_ALGORITHM", "ES256"),
    ];
    // The caller with a key is one of the file, which the variables stand beside.
    let callers: [(&str, &[&str]); 1] = [("anna", &["python:execute"])];
    let start = |variables: &[(&str, &str)]| {
        let profile = ["--profile", "pyexec"];
        Service::with_keys_and(folder.path(), &callers, &profile, variables)
    };
    let status = async |service: &mut Service, token: String| {
        service.token = token;
        let mut caller = Raw::with_token(service).await;
        caller.call(EXECUTE, code("6 * 7")).await;
        let answer = caller.answer().await;
        assert_eq!(
            answer.body.contains(r#""text":"42""#),
            answer.status == 200,
            "{answer:?}"
        );
        answer.status
    };
    let mut service = start(&all);
    let other = "https://other.example.com";
    for (name, audience, scope, expected) in [
        (Issuer::NAME, AUDIENCE, "python:execute", 200), // control
        (Issuer::NAME, AUDIENCE, "sessions:read", 403),
        (Issuer::NAME, other, "python:execute", 401),
        (other, AUDIENCE, "python:execute", 401),
    ] {
        let token = issuer.token(name, audience, scope);
        let answered = status(&mut service, token).await;
        assert_eq!(answered, expected, "{name} {audience} {scope}");
    }
    drop(service);
    // Without the algorithm it is RS256, and the same token is refused.
    let mut service = start(&all[..3]);
    let token = issuer.token(Issuer::NAME, AUDIENCE, "python:execute");
    assert_eq!(status(&mut service, token).await, 401);
}
