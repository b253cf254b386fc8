//! A key server on loopback that does what a test says and counts who asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cellblock::auth::{
    Algorithm, AuthSettings, Authenticator, Denied, Issuer, KeySetUrl, KeySource,
};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::bearer;

const ISSUER: &str = "https://id.example.com";
const AUDIENCE: &str = "https://cellblock.example.com/mcp";

/// An issuer with one key, which it publishes as "known".
struct Signer(EcdsaKeyPair);

impl Signer {
    fn new() -> Signer {
        let random = SystemRandom::new();
        let document =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        Signer(
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random)
                .unwrap(),
        )
    }

    fn key_set(&self) -> String {
        let point = self.0.public_key().as_ref();
        let coordinate = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let (x, y) = (coordinate(&point[1..33]), coordinate(&point[33..]));
        json!({"keys": [{"kty": "EC", "crv": "P-256", "kid": "known", "x": x, "y": y}]}).to_string()
    }

    /// A token that names a key and is good otherwise.
    fn token(&self, key_id: &str) -> String {
        let end = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs()
            + 600;
        let claims = json!({"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": end});
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!(
            "{}.{}",
            encode(&json!({"alg": "ES256", "kid": key_id})),
            encode(&claims)
        );
        let signature = self
            .0
            .sign(&SystemRandom::new(), message.as_bytes())
            .unwrap();
        format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

struct KeyServer {
    port: u16,
    requests: Arc<AtomicUsize>,
}

impl KeyServer {
    async fn answering(body: String) -> KeyServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(AtomicUsize::new(0));
        let counter = requests.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(answer(stream, body.clone()));
            }
        });
        KeyServer { port, requests }
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    async fn authenticator(&self) -> Authenticator {
        let url = KeySetUrl::parse(&format!("http://127.0.0.1:{}/keys", self.port)).unwrap();
        let issuer = Issuer {
            name: ISSUER.to_owned(),
            keys: KeySource::Server {
                url,
                is_private: false,
            },
            audiences: vec![AUDIENCE.to_owned()],
            algorithms: vec![Algorithm::Es256],
            principal: None,
        };
        let settings = AuthSettings {
            issuers: vec![issuer],
            ..AuthSettings::default()
        };
        Authenticator::from_settings(&settings).await.unwrap()
    }
}

async fn answer(mut stream: TcpStream, body: String) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.unwrap());
    }
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
    // Whoever has read enough may be gone.
    let _ = stream
        .write_all(&[head.into_bytes(), body.into_bytes()].concat())
        .await;
}

async fn all_at_once(
    authenticator: &Authenticator,
    tokens: Vec<String>,
) -> Vec<Result<(), Denied>> {
    let mut calls = JoinSet::new();
    for token in tokens {
        let authenticator = authenticator.clone();
        calls.spawn(async move {
            authenticator
                .authenticate(&bearer(&token))
                .await
                .map(|_| ())
        });
    }
    calls.join_all().await
}

#[tokio::test]
async fn callers_who_come_at_once_cost_the_key_server_one_request() {
    let signer = Signer::new();
    let server = KeyServer::answering(signer.key_set()).await;
    let authenticator = server.authenticator().await;
    assert_eq!(
        server.requests(),
        0,
        "keys are fetched when they are needed"
    );
    let outcomes = all_at_once(&authenticator, vec![signer.token("known"); 200]).await;
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn a_flood_of_tokens_that_name_unknown_keys_does_not_reach_the_key_server() {
    let signer = Signer::new();
    let server = KeyServer::answering(signer.key_set()).await;
    let authenticator = server.authenticator().await;
    assert!(
        authenticator
            .authenticate(&bearer(&signer.token("known")))
            .await
            .is_ok()
    ); // control
    let flood = (0..500)
        .map(|number| signer.token(&format!("unknown-{number}")))
        .collect();
    let outcomes = all_at_once(&authenticator, flood).await;
    assert!(
        outcomes
            .iter()
            .all(|outcome| *outcome == Err(Denied::BadToken)),
        "{outcomes:?}"
    );
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn a_token_of_somebody_else_does_not_reach_the_key_server() {
    let signer = Signer::new();
    let server = KeyServer::answering(signer.key_set()).await;
    let authenticator = server.authenticator().await;
    for token in [
        "nonsense",
        "a.b.c",
        "cellblock_nonsense",
        "eyJhbGciOiJub25lIn0.e30.",
    ] {
        assert_eq!(
            authenticator.authenticate(&bearer(token)).await,
            Err(Denied::BadToken)
        );
    }
    assert_eq!(server.requests(), 0);
    let stranger = Signer::new();
    assert_eq!(
        authenticator
            .authenticate(&bearer(&stranger.token("known")))
            .await,
        Err(Denied::BadToken)
    );
    assert!(
        authenticator
            .authenticate(&bearer(&signer.token("known")))
            .await
            .is_ok()
    ); // control
}

#[tokio::test]
async fn keys_that_cannot_be_had_let_nobody_in() {
    let signer = Signer::new();
    let huge = format!("{}{}", " ".repeat(300 << 10), signer.key_set());
    for body in [huge, "<html>".to_owned()] {
        let server = KeyServer::answering(body).await;
        let authenticator = server.authenticator().await;
        let outcomes = all_at_once(&authenticator, vec![signer.token("known"); 50]).await;
        assert!(
            outcomes
                .iter()
                .all(|outcome| *outcome == Err(Denied::Unavailable)),
            "{outcomes:?}"
        );
        assert_eq!(server.requests(), 1);
    }
}
