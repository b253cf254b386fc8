//! Tests of the whole module with generated tokens: accepted ones, and every way to be rejected.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RsaKeyPair};
use rsa::pkcs8::{EncodePrivateKey, EncodePublicKey, LineEnding};
use rsa::traits::PublicKeyParts;
use serde_json::{Map, Value, json};

use super::claims::{self, Expected};
use super::keys::{KeySet, PublicKey};
use super::token::{Fault, MAX_TOKEN_BYTES, Token};
use super::*;

/// A key pair that signs tokens, generated once for all tests: generating an RSA key takes a while.
pub(super) struct Signer {
    pub private: Private,
    pub public: PublicKey,
    /// The public key as an issuer publishes it, without an id.
    pub jwk: Value,
}

pub(super) enum Private {
    Rsa(RsaKeyPair),
    Elliptic(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

pub(super) static RSA: LazyLock<rsa::RsaPrivateKey> = LazyLock::new(|| rsa_key(2048));
pub(super) static RSA_SIGNER: LazyLock<Signer> = LazyLock::new(|| rsa_signer(&RSA));
pub(super) static P256: LazyLock<Signer> =
    LazyLock::new(|| elliptic(&signature::ECDSA_P256_SHA256_FIXED_SIGNING, "P-256", 32));
pub(super) static P384: LazyLock<Signer> =
    LazyLock::new(|| elliptic(&signature::ECDSA_P384_SHA384_FIXED_SIGNING, "P-384", 48));
pub(super) static ED25519: LazyLock<Signer> = LazyLock::new(|| {
    let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
    let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
    let public = pair.public_key().as_ref().to_vec();
    let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": encode(&public)});
    Signer {
        public: PublicKey::Ed25519(public),
        private: Private::Ed25519(pair),
        jwk,
    }
});

fn rsa_key(bits: usize) -> rsa::RsaPrivateKey {
    rsa::RsaPrivateKey::new(&mut rsa::rand_core::OsRng, bits).unwrap()
}

fn rsa_signer(key: &rsa::RsaPrivateKey) -> Signer {
    let public = key.to_public_key();
    let jwk = json!({
        "kty": "RSA",
        "n": encode(public.n().to_bytes_be()),
        "e": encode(public.e().to_bytes_be())
    });
    Signer {
        private: Private::Rsa(
            RsaKeyPair::from_pkcs8(key.to_pkcs8_der().unwrap().as_bytes()).unwrap(),
        ),
        public: PublicKey::from_der(public.to_public_key_der().unwrap().as_bytes()).unwrap(),
        jwk,
    }
}

fn elliptic(method: &'static signature::EcdsaSigningAlgorithm, curve: &str, size: usize) -> Signer {
    let random = SystemRandom::new();
    let document = EcdsaKeyPair::generate_pkcs8(method, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(method, document.as_ref(), &random).unwrap();
    let point = pair.public_key().as_ref().to_vec();
    let jwk = json!({
        "kty": "EC",
        "crv": curve,
        "x": encode(&point[1..=size]),
        "y": encode(&point[1 + size..])
    });
    let public = if size == 32 {
        PublicKey::P256(point)
    } else {
        PublicKey::P384(point)
    };
    Signer {
        private: Private::Elliptic(pair),
        public,
        jwk,
    }
}

impl Signer {
    /// Signs a message with `algorithm`, or with an algorithm of the key if `algorithm` is for
    /// other keys.
    pub(super) fn sign(&self, algorithm: Algorithm, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.private {
            Private::Elliptic(pair) => pair.sign(&random, message).unwrap().as_ref().to_vec(),
            Private::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
            Private::Rsa(pair) => {
                let padding: &dyn signature::RsaEncoding = match algorithm {
                    Algorithm::Rs384 => &signature::RSA_PKCS1_SHA384,
                    Algorithm::Rs512 => &signature::RSA_PKCS1_SHA512,
                    Algorithm::Ps256 => &signature::RSA_PSS_SHA256,
                    Algorithm::Ps384 => &signature::RSA_PSS_SHA384,
                    Algorithm::Ps512 => &signature::RSA_PSS_SHA512,
                    _ => &signature::RSA_PKCS1_SHA256,
                };
                let mut signature = vec![0; pair.public().modulus_len()];
                pair.sign(padding, &random, message, &mut signature)
                    .unwrap();
                signature
            }
        }
    }

    /// Creates a token with exactly this header and these claims.
    pub(super) fn token(&self, header: &Value, claims: &Value) -> String {
        let algorithm = header["alg"]
            .as_str()
            .and_then(Algorithm::from_name)
            .unwrap_or(Algorithm::Rs256);
        let message = format!(
            "{}.{}",
            encode(header.to_string()),
            encode(claims.to_string())
        );
        let signature = self.sign(algorithm, message.as_bytes());
        format!("{message}.{}", encode(signature))
    }
}

pub(super) fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

const ISSUER: &str = "https://id.example.com";
const AUDIENCE: &str = "https://cellblock.example.com/mcp";

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

/// Claims that are valid for an hour.
pub(super) fn good_claims() -> Value {
    json!({
        "iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "scope": "openid python:execute",
        "iat": now(), "nbf": now(), "exp": now() + 3600,
    })
}

/// The same with one claim changed.
fn with(claim: &str, value: Value) -> Value {
    let mut claims = good_claims();
    claims[claim] = value;
    claims
}

fn rs256() -> Value {
    json!({"alg": "RS256", "typ": "JWT"})
}

pub(super) fn bearer(token: &str) -> HeaderMap {
    HeaderMap::from_iter([(
        AUTHORIZATION,
        HeaderValue::from_str(&format!("Bearer {token}")).unwrap(),
    )])
}

/// A folder with the public keys of all signers in PEM form.
struct Pems {
    folder: tempfile::TempDir,
}

impl Pems {
    fn new() -> Pems {
        Pems {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn rsa(&self) -> PathBuf {
        self.write(
            "rsa.pem",
            &RSA.to_public_key()
                .to_public_key_pem(LineEnding::LF)
                .unwrap(),
        )
    }
}

fn issuer(name: &str, key: PathBuf) -> Issuer {
    Issuer {
        name: name.to_owned(),
        keys: KeySource::File(key),
        audiences: vec![AUDIENCE.to_owned()],
        algorithms: vec![Algorithm::Rs256],
        principal: None,
    }
}

fn settings(issuers: Vec<Issuer>) -> AuthSettings {
    AuthSettings {
        issuers,
        ..AuthSettings::default()
    }
}

async fn authenticator(issuers: Vec<Issuer>) -> Authenticator {
    Authenticator::from_settings(&settings(issuers))
        .await
        .unwrap()
}

/// One issuer with the RSA key of all tests.
async fn usual() -> Authenticator {
    authenticator(vec![issuer(ISSUER, Pems::new().rsa())]).await
}

#[tokio::test]
async fn a_good_token_says_who_is_calling_and_for_how_long() {
    let caller = usual()
        .await
        .authenticate(&bearer(&RSA_SIGNER.token(&rs256(), &good_claims())))
        .await
        .unwrap();
    assert_eq!(caller.principal, "https://id.example.com sub:alice");
    assert_eq!(caller.scopes, [Scope::Execute].into_iter().collect());
    let rest = caller
        .expires
        .unwrap()
        .duration_since(SystemTime::now())
        .unwrap();
    assert!(
        (Duration::from_secs(3590)..Duration::from_secs(3610)).contains(&rest),
        "{rest:?}"
    );
}

#[tokio::test]
async fn the_token_comes_from_exactly_one_header() {
    let authenticator = usual().await;
    let token = RSA_SIGNER.token(&rs256(), &good_claims());
    let outcome = async |values: &[String]| {
        let pairs = values
            .iter()
            .map(|value| (AUTHORIZATION, HeaderValue::from_str(value).unwrap()));
        authenticator
            .authenticate(&pairs.fold(HeaderMap::new(), |mut headers, (name, value)| {
                headers.append(name, value);
                headers
            }))
            .await
            .map(|_| ())
    };
    for scheme in ["Bearer", "bearer", "BEARER", "bEaReR"] {
        assert_eq!(
            outcome(&[format!("{scheme} {token}")]).await,
            Ok(()),
            "{scheme}"
        );
    }
    assert_eq!(outcome(&[format!("Bearer   {token}")]).await, Ok(()));
    assert_eq!(outcome(&[]).await, Err(Denied::NoToken));
    for value in [
        String::new(),
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        token.clone(),
        format!("Basic {token}"),
    ] {
        assert_eq!(
            outcome(std::slice::from_ref(&value)).await,
            Err(Denied::NoToken),
            "{value}"
        );
    }
    let twice = [format!("Bearer {token}"), format!("Bearer {token}")];
    assert_eq!(outcome(&twice).await, Err(Denied::BadToken));
    for value in [
        format!("Bearer {token}, Bearer {token}"),
        format!("Bearer {token} {token}"),
        format!("Bearer \"{token}\""),
    ] {
        assert_eq!(outcome(&[value]).await, Err(Denied::BadToken));
    }
    let mut others = HeaderMap::new();
    for name in [
        "x-forwarded-user",
        "x-authorization",
        "proxy-authorization",
        "cookie",
    ] {
        others.insert(
            name,
            HeaderValue::from_str(&format!("Bearer {token}")).unwrap(),
        );
    }
    assert_eq!(
        authenticator.authenticate(&others).await,
        Err(Denied::NoToken)
    );
    let strange = HeaderMap::from_iter([(
        AUTHORIZATION,
        HeaderValue::from_bytes(b"Bearer \xff").unwrap(),
    )]);
    assert_eq!(
        authenticator.authenticate(&strange).await,
        Err(Denied::BadToken)
    );
}

#[tokio::test]
async fn a_token_of_another_key_issuer_or_purpose_is_refused() {
    let stranger = rsa_signer(&rsa_key(2048));
    let authenticator = usual().await;
    let refused = async |token: String| {
        authenticator.authenticate(&bearer(&token)).await == Err(Denied::BadToken)
    };
    assert!(
        refused(stranger.token(&rs256(), &good_claims())).await,
        "another key"
    );
    assert!(
        refused(RSA_SIGNER.token(&rs256(), &with("iss", json!("https://evil.example.com")))).await,
        "another issuer"
    );
    assert!(
        refused(RSA_SIGNER.token(&rs256(), &with("iss", json!("https://id.example.com/")))).await,
        "nearly the issuer"
    );
    assert!(
        refused(RSA_SIGNER.token(&rs256(), &with("aud", json!("https://other.example.com")))).await,
        "another audience"
    );
    assert!(
        refused(RSA_SIGNER.token(&rs256(), &with("exp", json!(now() - 10)))).await,
        "expired"
    );
    assert!(
        refused(RSA_SIGNER.token(&json!({"alg": "RS512"}), &good_claims())).await,
        "another algorithm"
    );
    let token = RSA_SIGNER.token(&rs256(), &good_claims());
    let (message, signature) = token.rsplit_once('.').unwrap();
    let other = RSA_SIGNER.token(&rs256(), &with("sub", json!("bob")));
    assert!(
        refused(format!("{}.{signature}", other.rsplit_once('.').unwrap().0)).await,
        "claims of another token"
    );
    assert!(refused(format!("{message}.")).await, "no signature");
    assert!(authenticator.authenticate(&bearer(&token)).await.is_ok()); // control
}

#[tokio::test]
async fn a_changed_letter_spoils_a_token() {
    let authenticator = usual().await;
    let token = RSA_SIGNER.token(&rs256(), &good_claims());
    assert!(authenticator.authenticate(&bearer(&token)).await.is_ok()); // control
    for place in 0..token.len() {
        for other in ["A", "B", "_", "."] {
            if &token[place..=place] == other {
                continue;
            }
            let changed = format!("{}{other}{}", &token[..place], &token[place + 1..]);
            assert_eq!(
                authenticator.authenticate(&bearer(&changed)).await,
                Err(Denied::BadToken),
                "{place} {other}"
            );
        }
        let shorter = format!("{}{}", &token[..place], &token[place + 1..]);
        assert_eq!(
            authenticator.authenticate(&bearer(&shorter)).await,
            Err(Denied::BadToken),
            "{place}"
        );
    }
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(
        text in "[ -~]{0,80}",
        header in "\\PC{0,40}",
        claims in "\\PC{0,40}",
    ) {
        let _ = Token::parse(&text);
        let _ = parse(&header, &claims);
        let _ = KeySet::from_json(claims.as_bytes());
        let _ = PublicKey::from_pem(&text);
        let _ = KeySetUrl::parse(&text);
        let _ = KeyHash::parse(&claims);
    }
}

#[tokio::test]
async fn two_issuers_may_each_have_an_alice() {
    let pems = Pems::new();
    let other = rsa_signer(&rsa_key(2048));
    let pem = {
        let PublicKey::Rsa { modulus, exponent } = &other.public else {
            panic!("it is an RSA key")
        };
        let number = rsa::BigUint::from_bytes_be;
        let key = rsa::RsaPublicKey::new(number(modulus), number(exponent)).unwrap();
        key.to_public_key_pem(LineEnding::LF).unwrap()
    };
    let second = "https://other.example.com";
    let authenticator = authenticator(vec![
        issuer(ISSUER, pems.rsa()),
        issuer(second, pems.write("other.pem", &pem)),
    ])
    .await;
    let ours = authenticator
        .authenticate(&bearer(&RSA_SIGNER.token(&rs256(), &good_claims())))
        .await
        .unwrap();
    let claims = with("iss", json!(second));
    let theirs = authenticator
        .authenticate(&bearer(&other.token(&rs256(), &claims)))
        .await
        .unwrap();
    assert_eq!(theirs.principal, "https://other.example.com sub:alice");
    assert_ne!(ours.principal, theirs.principal);
    // Neither can sign for the other.
    for token in [
        other.token(&rs256(), &good_claims()),
        RSA_SIGNER.token(&rs256(), &claims),
    ] {
        assert_eq!(
            authenticator.authenticate(&bearer(&token)).await,
            Err(Denied::BadToken)
        );
    }
}

/// Checks claims at a fixed time, second 1,000,000.
fn judged(claims: Value) -> Result<Caller, Fault> {
    let audiences = [AUDIENCE.to_owned(), "second".to_owned()];
    let expected = Expected {
        issuer: ISSUER,
        audiences: &audiences,
        principal: None,
    };
    let Value::Object(claims) = claims else {
        panic!("claims are an object")
    };
    claims::judge(
        &claims,
        expected,
        UNIX_EPOCH + Duration::from_secs(1_000_000),
    )
}

fn fixed(claim: &str, value: Option<Value>) -> Value {
    let mut claims = json!({"iss": ISSUER, "aud": AUDIENCE, "exp": 1_000_100, "sub": "alice"});
    match value {
        Some(value) => claims[claim] = value,
        None => drop(claims.as_object_mut().unwrap().remove(claim)),
    }
    claims
}

#[test]
fn a_claim_of_a_strange_kind_is_refused_and_never_taken_for_absent() {
    let strange = [
        Value::Null,
        json!(true),
        json!({}),
        json!([]),
        json!([1]),
        json!([null]),
        json!("1000100"),
        json!(""),
        json!(-1),
        json!(-1e300),
        json!(1e300),
        json!(u64::MAX),
        json!(1_000_100_000_000_u64),
        json!("x".repeat(1000)),
        json!("\u{7}"),
    ];
    assert!(judged(fixed("exp", Some(json!(1_000_100)))).is_ok()); // control
    for (claim, fault) in [
        ("iss", Fault::Issuer),
        ("aud", Fault::Audience),
        ("exp", Fault::Time),
        ("nbf", Fault::Time),
        ("iat", Fault::Time),
        ("sub", Fault::Subject),
    ] {
        // A subject may be a text of digits.
        for value in strange
            .iter()
            .filter(|value| claim != "sub" || **value != json!("1000100"))
        {
            assert_eq!(
                judged(fixed(claim, Some(value.clone()))),
                Err(fault),
                "{claim}: {value}"
            )
        }
    }
    for claim in ["scope", "scp"] {
        for value in strange
            .iter()
            .filter(|value| !value.is_string() && **value != json!([]))
        {
            assert_eq!(
                judged(fixed(claim, Some(value.clone()))),
                Err(Fault::Scope),
                "{claim}: {value}"
            );
        }
    }
}

#[test]
fn what_must_be_there_is_missed() {
    for (claim, outcome) in [
        ("iss", Err(Fault::Issuer)),
        ("aud", Err(Fault::Audience)),
        ("exp", Err(Fault::Time)),
        ("sub", Err(Fault::Subject)),
        ("nbf", Ok(())),
        ("iat", Ok(())),
        ("scope", Ok(())),
    ] {
        assert_eq!(judged(fixed(claim, None)).map(|_| ()), outcome, "{claim}");
    }
}

#[test]
fn times_are_honoured_to_the_second() {
    for (claim, value, outcome) in [
        ("exp", json!(999_996), Ok(())),
        ("exp", json!(999_995), Err(Fault::Expired)),
        ("exp", json!(0), Err(Fault::Expired)),
        ("exp", json!(1_000_000.5), Ok(())),
        ("exp", json!(1e6), Ok(())),
        ("exp", json!(253_402_300_799_u64), Ok(())),
        ("exp", json!(253_402_300_800_u64), Err(Fault::Time)),
        ("nbf", json!(1_000_060), Ok(())),
        ("nbf", json!(1_000_061), Err(Fault::Early)),
        ("nbf", json!(1_000_060.5), Err(Fault::Early)),
        ("iat", json!(1_000_060), Ok(())),
        ("iat", json!(1_000_061), Err(Fault::Early)),
        ("iat", json!(0), Ok(())),
    ] {
        assert_eq!(
            judged(fixed(claim, Some(value.clone()))).map(|_| ()),
            outcome,
            "{claim}: {value}"
        );
    }
}

#[test]
fn the_audience_may_be_one_name_or_a_list() {
    for (value, outcome) in [
        (json!(AUDIENCE), Ok(())),
        (json!("second"), Ok(())),
        (json!([AUDIENCE]), Ok(())),
        (json!(["else", "second"]), Ok(())),
        (json!(["else"]), Err(Fault::Audience)),
        (json!([AUDIENCE, 7]), Err(Fault::Audience)),
        (json!([[AUDIENCE]]), Err(Fault::Audience)),
        (json!(format!("{AUDIENCE} second")), Err(Fault::Audience)),
        (json!(AUDIENCE.to_uppercase()), Err(Fault::Audience)),
    ] {
        assert_eq!(
            judged(fixed("aud", Some(value.clone()))).map(|_| ()),
            outcome,
            "{value}"
        );
    }
}

#[test]
fn scopes_come_as_text_or_list_under_either_name() {
    let scopes = |name: &str, value: Value| judged(fixed(name, Some(value))).unwrap().scopes;
    let both: Scopes = [Scope::Execute, Scope::Install].into_iter().collect();
    for name in ["scope", "scp"] {
        assert_eq!(
            scopes(name, json!("openid python:execute  packages:install")),
            both,
            "{name}"
        );
        assert_eq!(
            scopes(name, json!(["python:execute", "email", "packages:install"])),
            both,
            "{name}"
        );
        assert_eq!(
            scopes(name, json!("Python:Execute python:execute2")),
            Scopes::default(),
            "{name}"
        );
        assert_eq!(scopes(name, json!([])), Scopes::default(), "{name}");
    }
    let mut claims = fixed("scope", Some(json!("python:execute")));
    claims["scp"] = json!("admin");
    assert_eq!(
        judged(claims).unwrap().scopes,
        [Scope::Execute].into_iter().collect(),
        "scope is stronger"
    );
}

#[test]
fn the_principal_is_a_person_and_only_else_a_program() {
    let principal = |pairs: &[(&str, &str)]| {
        let mut claims = fixed("sub", None);
        pairs
            .iter()
            .for_each(|(name, value)| claims[*name] = json!(value));
        judged(claims).map(|caller| caller.principal)
    };
    let named = |text: &str| Ok(format!("{ISSUER} {text}"));
    assert_eq!(principal(&[("sub", "alice")]), named("sub:alice"));
    assert_eq!(
        principal(&[("client_id", "alice")]),
        named("client_id:alice")
    );
    // Two people who use one program are two callers.
    assert_eq!(
        principal(&[("sub", "alice"), ("client_id", "app")]),
        named("sub:alice")
    );
    assert_eq!(
        principal(&[("sub", "bob"), ("client_id", "app")]),
        named("sub:bob")
    );
    for pairs in [
        &[][..],
        &[("sub", "")],
        &[("sub", " ")],
        &[("sub", ""), ("client_id", "app")],
        &[("azp", "app")],
    ] {
        assert_eq!(principal(pairs), Err(Fault::Subject), "{pairs:?}");
    }
    let Value::Object(claims) = fixed("email", Some(json!("a@example.com"))) else {
        panic!("claims are an object")
    };
    let audiences = [AUDIENCE.to_owned()];
    let at = UNIX_EPOCH + Duration::from_secs(1_000_000);
    let by = |claim| {
        let expected = Expected {
            issuer: ISSUER,
            audiences: &audiences,
            principal: Some(claim),
        };
        claims::judge(&claims, expected, at).map(|caller| caller.principal)
    };
    assert_eq!(by("email"), named("email:a@example.com"));
    assert_eq!(
        by("oid"),
        Err(Fault::Subject),
        "the claim that was chosen, or nobody"
    );
}

fn parse(header: &str, claims: &str) -> Result<(), Fault> {
    Token::parse(&format!(
        "{}.{}.{}",
        encode(header),
        encode(claims),
        encode("signature")
    ))
    .map(|_| ())
}

#[test]
fn a_header_asks_for_a_signature_and_for_nothing_else() {
    for header in [
        r#"{"alg":"RS256"}"#,
        r#"{"alg":"ES256","kid":"","typ":"at+jwt"}"#,
        r#"{"alg":"PS512","kid":"a","typ":"JWT","x5t":"thumb"}"#,
        r#"{"alg":"EdDSA","typ":"application/AT+JWT"}"#,
    ] {
        assert_eq!(parse(header, "{}"), Ok(()), "{header}");
    }
    for name in [
        "crit", "jwk", "jku", "x5u", "x5c", "zip", "enc", "epk", "cty", "b64",
    ] {
        for value in ["[]", "null", "\"DEF\"", "{}"] {
            let header = format!(r#"{{"alg":"RS256","{name}":{value}}}"#);
            assert_eq!(parse(&header, "{}"), Err(Fault::Header), "{header}");
        }
    }
    for (name, value) in [
        ("typ", "\"logout+jwt\""),
        ("typ", "\"dpop+jwt\""),
        ("typ", "null"),
        ("typ", "7"),
        ("kid", "null"),
        ("kid", "7"),
        ("kid", "[\"a\"]"),
    ] {
        let header = format!(r#"{{"alg":"RS256","{name}":{value}}}"#);
        assert_eq!(parse(&header, "{}"), Err(Fault::Header), "{header}");
    }
    let long = format!(r#"{{"alg":"RS256","kid":"{}"}}"#, "x".repeat(257));
    assert_eq!(parse(&long, "{}"), Err(Fault::Header));
}

#[test]
fn an_algorithm_that_is_no_signature_by_a_key_pair_does_not_exist() {
    for name in [
        "none", "None", "NONE", "", "HS256", "HS384", "HS512", "rs256", "RS256 ", "ES256K",
        "RSA-OAEP", "dir", "RS1",
    ] {
        let header = json!({"alg": name}).to_string();
        assert_eq!(parse(&header, "{}"), Err(Fault::Algorithm), "{header}");
    }
    for header in [
        "{}",
        r#"{"alg":null}"#,
        r#"{"alg":["RS256"]}"#,
        r#"{"ALG":"RS256"}"#,
    ] {
        assert_eq!(parse(header, "{}"), Err(Fault::Algorithm), "{header}");
    }
}

#[test]
fn a_token_has_one_spelling() {
    let (header, claims, signature) = (encode(r#"{"alg":"RS256"}"#), encode("{}"), encode("s"));
    let malformed = |text: String| {
        assert!(
            matches!(Token::parse(&text), Err(Fault::Malformed)),
            "{text}"
        )
    };
    assert!(Token::parse(&format!("{header}.{claims}.{signature}")).is_ok()); // control
    for text in ["", ".", "..", "...", "a", "a.b", "a.b.c"] {
        malformed(text.to_owned());
    }
    malformed(format!("{header}.{claims}"));
    malformed(format!(
        "{header}.{claims}.{signature}.{signature}.{signature}"
    ));
    malformed(format!("{header}.{claims}.{signature}="));
    malformed(format!("{header}.{claims}.{signature}\n"));
    malformed(format!(" {header}.{claims}.{signature}"));
    malformed(format!("{header}.{claims}.c+//"));
    // The last letter of "cw" has unused bits; only one of the spellings has them at zero.
    assert_eq!(signature, "cw");
    malformed(format!("{header}.{claims}.cx"));
    for bad in [
        "[]",
        "7",
        "null",
        "\"text\"",
        "{",
        "{}{}",
        "{'a':1}",
        "\u{feff}{}",
        r#"{"exp":1e999}"#,
    ] {
        malformed(format!("{header}.{}.{signature}", encode(bad)));
        malformed(format!("{}.{claims}.{signature}", encode(bad)));
    }
    malformed(format!(
        "{header}.{}.{signature}",
        encode([b'{', 0xff, b'}'])
    ));
}

#[test]
fn a_name_that_occurs_twice_is_refused() {
    assert_eq!(
        parse(r#"{"alg":"RS256","kid":"a"}"#, r#"{"aud":"a","sub":"b"}"#),
        Ok(())
    ); // control
    assert_eq!(
        parse(r#"{"alg":"RS256","alg":"ES256"}"#, "{}"),
        Err(Fault::Malformed)
    );
    assert_eq!(
        parse(r#"{"alg":"RS256"}"#, r#"{"aud":"a","aud":"b"}"#),
        Err(Fault::Malformed)
    );
    assert_eq!(
        parse(r#"{"alg":"RS256"}"#, r#"{"aud":"a","\u0061ud":"b"}"#),
        Err(Fault::Malformed)
    );
}

#[test]
fn a_token_is_at_most_16_kib() {
    let start = format!("{}.{}.", encode(r#"{"alg":"RS256"}"#), encode("{}"));
    let of_length = |length: usize| format!("{start}{}", "A".repeat(length - start.len()));
    assert!(!matches!(
        Token::parse(&of_length(MAX_TOKEN_BYTES)),
        Err(Fault::TooLong)
    )); // control
    assert!(matches!(
        Token::parse(&of_length(MAX_TOKEN_BYTES + 1)),
        Err(Fault::TooLong)
    ));
}

fn set(keys: &[Value]) -> KeySet {
    KeySet::from_json(json!({"keys": keys}).to_string().as_bytes()).unwrap()
}

fn with_id(jwk: &Value, id: &str) -> Value {
    let mut jwk = jwk.clone();
    jwk["kid"] = json!(id);
    jwk
}

#[test]
fn a_key_is_found_by_its_id_or_because_it_is_the_only_one() {
    let keys = set(&[
        with_id(&RSA_SIGNER.jwk, "a"),
        with_id(&P256.jwk, "b"),
        with_id(&P384.jwk, "b"),
    ]);
    assert_eq!(
        keys.find(Some("a"), Algorithm::Rs256),
        Some(&RSA_SIGNER.public)
    );
    assert_eq!(keys.find(Some("b"), Algorithm::Es256), Some(&P256.public));
    assert_eq!(keys.find(Some("b"), Algorithm::Es384), Some(&P384.public));
    assert_eq!(
        keys.find(Some("a"), Algorithm::Es256),
        None,
        "the type must fit"
    );
    assert_eq!(keys.find(Some("c"), Algorithm::Rs256), None);
    assert_eq!(keys.find(Some(""), Algorithm::Rs256), None);
    assert_eq!(
        keys.find(None, Algorithm::Rs256),
        Some(&RSA_SIGNER.public),
        "the only one that fits"
    );
    let two = set(&[with_id(&RSA_SIGNER.jwk, "a"), with_id(&RSA_SIGNER.jwk, "b")]);
    assert_eq!(
        two.find(None, Algorithm::Rs256),
        None,
        "one of two is a guess"
    );
}

#[test]
fn a_published_key_is_used_only_for_what_it_is_meant_for() {
    let usable = |name: &str, value: Value| {
        let mut jwk = RSA_SIGNER.jwk.clone();
        jwk[name] = value;
        set(&[jwk]).find(None, Algorithm::Rs256).is_some()
    };
    for (name, value) in [
        ("use", json!("sig")),
        ("alg", json!("RS256")),
        ("key_ops", json!(["verify"])),
        ("x5t", json!("y")),
    ] {
        assert!(usable(name, value.clone()), "{name}: {value}");
    }
    for (name, value) in [
        ("use", json!("enc")),
        ("use", json!(null)),
        ("alg", json!("RS512")),
        ("alg", json!("RSA-OAEP")),
        ("alg", json!(7)),
        ("key_ops", json!(["encrypt"])),
        ("key_ops", json!("verify")),
        ("kid", json!(7)),
        ("kty", json!("oct")),
        ("kty", json!("EC")),
        ("n", json!("AQAB")),
        ("n", json!("!")),
        ("e", json!(null)),
    ] {
        assert!(!usable(name, value.clone()), "{name}: {value}");
    }
    for text in ["", "[]", "{}", r#"{"keys":{}}"#, "<html>"] {
        assert!(KeySet::from_json(text.as_bytes()).is_err(), "{text}");
    }
    assert!(
        KeySet::from_json(br#"{"keys":[7,null,{}]}"#).is_ok(),
        "what we do not understand is left out"
    );
}

async fn refused_setup(issuer: Issuer) -> String {
    let error = Authenticator::from_settings(&settings(vec![issuer]))
        .await
        .unwrap_err();
    format!("{:#}", anyhow::Error::new(error))
}

#[tokio::test]
async fn a_weak_or_unfit_public_key_keeps_the_server_from_starting() {
    let pems = Pems::new();
    assert!(
        Authenticator::from_settings(&settings(vec![issuer(ISSUER, pems.rsa())]))
            .await
            .is_ok()
    ); // control
    let weak = rsa_key(1024)
        .to_public_key()
        .to_public_key_pem(LineEnding::LF)
        .unwrap();
    let private = RSA.to_pkcs8_pem(LineEnding::LF).unwrap();
    for (text, words) in [
        (weak.as_str(), "2048 to 8192 bits"),
        (private.as_str(), "it is a private key"),
        (
            "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
            "it is a certificate",
        ),
        (
            "-----BEGIN PUBLIC KEY-----\nMAA=\n-----END PUBLIC KEY-----\n",
            "not a public key",
        ),
        ("hello", "not a public key"),
        ("", "not a public key"),
    ] {
        let message = refused_setup(issuer(ISSUER, pems.write("bad.pem", text))).await;
        assert!(message.contains(words), "{message}");
    }
    assert!(
        refused_setup(issuer(ISSUER, pems.folder.path().join("gone.pem")))
            .await
            .contains("could not be read")
    );
    let unfit = Issuer {
        algorithms: vec![Algorithm::Rs256, Algorithm::Es256],
        ..issuer(ISSUER, pems.rsa())
    };
    assert!(
        refused_setup(unfit)
            .await
            .contains("does not fit the algorithm ES256")
    );
}

#[tokio::test]
async fn a_key_that_sandboxes_could_replace_keeps_the_server_from_starting() {
    let pems = Pems::new();
    let path = pems.rsa();
    let outcome = async |shown: PathBuf| {
        let settings = AuthSettings {
            shown: vec![shown],
            ..settings(vec![issuer(ISSUER, path.clone())])
        };
        Authenticator::from_settings(&settings).await.map(|_| ())
    };
    let folder = pems.folder.path().canonicalize().unwrap();
    assert!(matches!(
        outcome(folder.clone()).await,
        Err(AuthSetupError::Shown { .. })
    ));
    outcome(folder.join("elsewhere")).await.unwrap(); // control
    let development = async |shown: PathBuf| {
        let settings = AuthSettings {
            shown: vec![shown],
            development_dir: folder.join("deep/auth"),
            ..AuthSettings::default()
        };
        Authenticator::from_settings(&settings).await.map(|_| ())
    };
    for shown in ["", "deep", "deep/auth", "deep/auth/more"] {
        assert!(
            matches!(
                development(folder.join(shown)).await,
                Err(AuthSetupError::Shown { .. })
            ),
            "{shown}"
        );
    }
    assert!(!folder.join("deep").exists(), "nothing was made");
}

#[tokio::test]
async fn keys_of_every_type_can_be_given_as_files() {
    let pems = Pems::new();
    // The fixed prefixes that RFC 5480 and RFC 8410 define, before the key itself.
    let p256 = [
        &hex("3059301306072a8648ce3d020106082a8648ce3d030107034200")[..],
        point(&P256),
    ]
    .concat();
    let p384 = [
        &hex("3076301006072a8648ce3d020106052b81040022036200")[..],
        point(&P384),
    ]
    .concat();
    let ed25519 = [&hex("302a300506032b6570032100")[..], point(&ED25519)].concat();
    for (signer, bytes, algorithm) in [
        (&*P256, p256, Algorithm::Es256),
        (&*P384, p384, Algorithm::Es384),
        (&*ED25519, ed25519, Algorithm::EdDsa),
    ] {
        let lines = base64::engine::general_purpose::STANDARD.encode(bytes);
        let pem = format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            wrapped(&lines)
        );
        let issuer = Issuer {
            algorithms: vec![algorithm],
            ..issuer(ISSUER, pems.write("key.pem", &pem))
        };
        let authenticator = authenticator(vec![issuer]).await;
        let token = signer.token(&json!({"alg": algorithm.name()}), &good_claims());
        assert!(
            authenticator.authenticate(&bearer(&token)).await.is_ok(),
            "{algorithm:?}"
        );
        let confused = signer.token(&rs256(), &good_claims());
        assert_eq!(
            authenticator.authenticate(&bearer(&confused)).await,
            Err(Denied::BadToken)
        );
    }
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|place| u8::from_str_radix(&text[place..place + 2], 16).unwrap())
        .collect()
}

fn point(signer: &Signer) -> &[u8] {
    match &signer.public {
        PublicKey::P256(bytes) | PublicKey::P384(bytes) | PublicKey::Ed25519(bytes) => bytes,
        PublicKey::Rsa { .. } => panic!("it is no point"),
    }
}

fn wrapped(text: &str) -> String {
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .map(|line| std::str::from_utf8(line).unwrap())
        .collect();
    lines.join("\n")
}

#[tokio::test]
async fn only_callers_that_can_be_told_apart_may_come_from_other_machines() {
    let folder = tempfile::tempdir().unwrap();
    let base = AuthSettings {
        development_dir: folder.path().join("auth"),
        ..AuthSettings::default()
    };
    let key = ApiKey {
        name: "ci".to_owned(),
        hash: NewKey::generate().unwrap().hash(),
        scopes: [Scope::Execute].into_iter().collect(),
    };
    let of = async |settings: AuthSettings| Authenticator::from_settings(&settings).await.unwrap();
    let off = of(AuthSettings {
        choice: AuthChoice::Off,
        ..base.clone()
    })
    .await;
    let development = of(base.clone()).await;
    let keys = of(AuthSettings {
        api_keys: vec![key],
        ..base.clone()
    })
    .await;
    let tokens = usual().await;
    for text in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
        let address: IpAddr = text.parse().unwrap();
        for authenticator in [&off, &development, &keys, &tokens] {
            assert_eq!(authenticator.may_listen(address), Ok(()), "{text}");
        }
    }
    for text in [
        "0.0.0.0",
        "::",
        "192.168.1.1",
        "203.0.113.7",
        "fe80::1",
        "::ffff:10.0.0.1",
    ] {
        let address: IpAddr = text.parse().unwrap();
        assert_eq!(off.may_listen(address), Err(MayNotListen::Off(address)));
        assert_eq!(
            development.may_listen(address),
            Err(MayNotListen::Development(address))
        );
        assert_eq!(
            (keys.may_listen(address), tokens.may_listen(address)),
            (Ok(()), Ok(())),
            "{text}"
        );
    }
    assert_eq!(
        off.authenticate(&HeaderMap::new()).await,
        Ok(Caller::local())
    );
    assert_eq!(
        keys.authenticate(&HeaderMap::new()).await,
        Err(Denied::NoToken)
    );
}

#[tokio::test]
async fn metadata_names_the_issuers_that_have_an_address() {
    let pems = Pems::new();
    let authenticator = authenticator(vec![
        issuer(ISSUER, pems.rsa()),
        issuer("partner", pems.rsa()),
    ])
    .await;
    assert_eq!(
        authenticator.metadata(AUDIENCE),
        json!({
            "resource": AUDIENCE,
            "resource_name": "Cellblock",
            "authorization_servers": [ISSUER],
            "scopes_supported": ["python:execute"],
            "bearer_methods_supported": ["header"],
        })
    );
    let off = AuthSettings {
        choice: AuthChoice::Off,
        ..AuthSettings::default()
    };
    let metadata = Authenticator::from_settings(&off)
        .await
        .unwrap()
        .metadata("http://127.0.0.1:8000/mcp");
    assert_eq!(metadata["resource"], "http://127.0.0.1:8000/mcp");
    assert_eq!(metadata.get("authorization_servers"), None);
}

/// Captures the log.
#[derive(Clone, Default)]
struct Kept(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_token_key_or_claim_is_written_anywhere() {
    let kept = Kept::default();
    let writer = kept.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let _log = tracing::subscriber::set_default(subscriber);
    let pems = Pems::new();
    let key = NewKey::generate().unwrap();
    let described = ApiKey {
        name: "ci".to_owned(),
        hash: key.hash(),
        scopes: Scopes::everything(),
    };
    let settings = AuthSettings {
        api_keys: vec![described],
        ..settings(vec![issuer(ISSUER, pems.rsa())])
    };
    let authenticator = Authenticator::from_settings(&settings).await.unwrap();
    let canary = with("sub", json!("canary-subject"));
    let mut expired = canary.clone();
    expired["exp"] = json!(1);
    let good = RSA_SIGNER.token(&rs256(), &canary);
    let tokens = [
        good,
        RSA_SIGNER.token(&rs256(), &expired),
        "canary.token.text".to_owned(),
    ];
    let stranger = NewKey::generate().unwrap();
    let mut shown = format!("{settings:?} {authenticator:?} {key:?} {:?}", key.hash());
    for token in tokens
        .iter()
        .map(String::as_str)
        .chain([key.reveal(), stranger.reveal()])
    {
        match authenticator.authenticate(&bearer(token)).await {
            Ok(_) => {}
            Err(denied) => {
                let challenge = denied.challenge("https://cellblock.example.com/metadata");
                shown.push_str(&format!(
                    "{denied:?} {denied} {} {challenge:?}",
                    denied.body()
                ));
            }
        }
    }
    let logged = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
    assert!(
        logged.contains("token refused") && logged.contains("expired"),
        "the log was kept: {logged}"
    ); // control
    shown.push_str(&logged);
    let secrets = tokens
        .iter()
        .flat_map(|token| token.split('.'))
        .filter(|part| part.len() > 20);
    let hash = key.hash().to_string();
    for secret in secrets.chain([
        "canary",
        key.reveal(),
        stranger.reveal(),
        hash.trim_start_matches("sha256:"),
    ]) {
        assert!(!shown.contains(secret), "{secret} was written:\n{shown}");
    }
}

#[test]
fn claims_without_a_purpose_of_their_own_change_nothing() {
    let Value::Object(mut claims) = fixed("sub", Some(json!("alice"))) else {
        panic!("claims are an object")
    };
    let audiences = [AUDIENCE.to_owned()];
    let expected = Expected {
        issuer: ISSUER,
        audiences: &audiences,
        principal: None,
    };
    let at = UNIX_EPOCH + Duration::from_secs(1_000_000);
    let before = claims::judge(&claims, expected, at);
    claims.extend(Map::from_iter([
        ("admin".to_owned(), json!(true)),
        ("roles".to_owned(), json!(["admin"])),
        ("permissions".to_owned(), json!(["admin"])),
        ("preferred_username".to_owned(), json!("root")),
    ]));
    assert_eq!(claims::judge(&claims, expected, at), before);
    assert!(before.is_ok()); // control
}
