//! A real OpenID provider on loopback (the npm package oidc-provider), whose tokens and keys are
//! not of our making.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::LazyLock;

use cellblock::auth::{
    Algorithm, AuthSettings, Authenticator, Denied, Issuer, IssuerVariables, KeySetUrl, KeySource,
    Scope, require,
};
use serde_json::{Value, json};

use super::{authenticate, bearer};
use crate::support::server::finished;
use crate::support::skipped;

const RESOURCE: &str = "https://cellblock.example.com/mcp";
const ELLIPTIC: &str = "https://cellblock.example.com/elliptic";

/// The provider, which ends with its standard input.
struct Provider {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    issuer: String,
    keys: String,
}

impl Provider {
    /// Starts it, or says what is missing.
    fn start() -> Option<Provider> {
        let Some(folder) = &*INSTALLED else {
            skipped("node, npm and its package registry");
            return None;
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/auth/provider.mjs");
        let mut process = Command::new("node")
            .arg(script)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("node was there a moment ago");
        let (input, output) = (
            process.stdin.take(),
            BufReader::new(process.stdout.take().unwrap()),
        );
        let mut provider = Provider {
            process,
            input,
            output,
            issuer: String::new(),
            keys: String::new(),
        };
        let greeting = provider.answer();
        provider.issuer = greeting["issuer"].as_str().unwrap().to_owned();
        provider.keys = greeting["jwks_uri"].as_str().unwrap().to_owned();
        Some(provider)
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).expect("the provider answers with JSON")
    }

    fn ask(&mut self, request: &Value) -> Value {
        writeln!(self.input.as_mut().unwrap(), "{request}").unwrap();
        self.answer()
    }

    fn token(&mut self, client: &str, resource: &str, scope: &str) -> String {
        let answer = self.ask(&json!({"client": client, "resource": resource, "scope": scope}));
        answer["access_token"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"))
            .to_owned()
    }

    fn settings(&self, audience: &str, algorithm: Algorithm) -> AuthSettings {
        let issuer = Issuer {
            name: self.issuer.clone(),
            keys: KeySource::Server {
                url: KeySetUrl::parse(&self.keys).unwrap(),
                is_private: false,
            },
            audiences: vec![audience.to_owned()],
            algorithms: vec![algorithm],
            principal: None,
        };
        AuthSettings {
            issuers: vec![issuer],
            ..AuthSettings::default()
        }
    }

    fn stop(&mut self) {
        self.input = None;
        self.process.wait().unwrap();
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Tests that start at once install it once.
static INSTALLED: LazyLock<Option<PathBuf>> = LazyLock::new(installed);

/// Returns a folder with the provider in it, made once, or nothing when there is no node or no
/// registry answers.
fn installed() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("oidc-provider");
    let complete = folder.join("complete");
    if complete.exists() {
        return Some(folder);
    }
    let has = |program: &str| {
        Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .status()
            .is_ok()
    };
    if !has("node") || !has("npm") {
        return None;
    }
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("package.json"), r#"{"private": true}"#).unwrap();
    let mut install = Command::new("npm");
    install.args([
        "install",
        "--silent",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "oidc-provider@9",
    ]);
    if finished(install.current_dir(&folder)).0 != Some(0) {
        return None;
    }
    fs::write(complete, "").unwrap();
    Some(folder)
}

#[tokio::test]
async fn tokens_of_a_real_provider_are_understood() {
    let Some(mut provider) = Provider::start() else {
        return;
    };
    let authenticator =
        Authenticator::from_settings(&provider.settings(RESOURCE, Algorithm::Rs256))
            .await
            .unwrap();
    let alice = provider.token("alice", RESOURCE, "python:execute packages:install");
    let caller = authenticator.authenticate(&bearer(&alice)).await.unwrap();
    assert_eq!(caller.principal, format!("{} sub:alice", provider.issuer));
    assert!(caller.expires.is_some());
    assert_eq!(require(&caller, Scope::Install), Ok(()));
    assert_eq!(require(&caller, Scope::Admin).unwrap_err().status(), 403);
    let bob = authenticator
        .authenticate(&bearer(&provider.token("bob", RESOURCE, "sessions:read")))
        .await
        .unwrap();
    assert_ne!(bob.principal, caller.principal);
    assert_eq!(require(&bob, Scope::Execute).unwrap_err().status(), 403);

    let elsewhere = provider.token("alice", "https://other.example.com/mcp", "python:execute");
    assert_eq!(
        authenticator.authenticate(&bearer(&elsewhere)).await,
        Err(Denied::BadToken),
        "it is for somebody else"
    );
    let elliptic = provider.token("alice", ELLIPTIC, "python:execute");
    assert_eq!(
        authenticator.authenticate(&bearer(&elliptic)).await,
        Err(Denied::BadToken)
    );
    let settings = provider.settings(ELLIPTIC, Algorithm::Es256);
    assert!(authenticate(&settings, &elliptic).await.is_ok()); // control
    let confused = AuthSettings {
        issuers: vec![Issuer {
            algorithms: vec![Algorithm::Rs256],
            ..settings.issuers[0].clone()
        }],
        ..settings
    };
    assert_eq!(
        authenticate(&confused, &elliptic).await,
        Err(Denied::BadToken),
        "the operator wants RS256"
    );
    let metadata = authenticator.metadata(RESOURCE);
    assert_eq!(metadata["authorization_servers"], json!([provider.issuer]));
}

#[tokio::test]
async fn the_documented_variables_name_a_real_provider() {
    let Some(mut provider) = Provider::start() else {
        return;
    };
    let variables = IssuerVariables {
        jwks_uri: Some(provider.keys.clone()),
        issuer: Some(provider.issuer.clone()),
        audience: Some(RESOURCE.to_owned()),
        ..IssuerVariables::default()
    };
    let settings = AuthSettings {
        variables,
        ..AuthSettings::default()
    };
    let token = provider.token("alice", RESOURCE, "python:execute");
    assert!(authenticate(&settings, &token).await.is_ok());
    let variables = IssuerVariables {
        audience: None,
        ..settings.variables.clone()
    };
    let other = AuthSettings {
        variables,
        ..AuthSettings::default()
    };
    assert_eq!(
        authenticate(&other, &token).await,
        Err(Denied::BadToken),
        "the usual audience is another one"
    );
}

#[tokio::test]
async fn keys_that_a_real_provider_replaces_or_takes_away_are_noticed() {
    let Some(mut provider) = Provider::start() else {
        return;
    };
    let settings = provider.settings(RESOURCE, Algorithm::Rs256);
    let early = Authenticator::from_settings(&settings).await.unwrap();
    let old = provider.token("alice", RESOURCE, "python:execute");
    assert!(early.authenticate(&bearer(&old)).await.is_ok());
    provider.ask(&json!({"rotate": true}));
    let new = provider.token("alice", RESOURCE, "python:execute");
    let late = Authenticator::from_settings(&settings).await.unwrap();
    assert!(late.authenticate(&bearer(&new)).await.is_ok());
    assert_eq!(
        late.authenticate(&bearer(&old)).await,
        Err(Denied::BadToken),
        "its key is no longer published"
    );
    provider.stop();
    assert!(
        late.authenticate(&bearer(&new)).await.is_ok(),
        "keys are kept while their server is away"
    );
    assert_eq!(
        authenticate(&settings, &new).await,
        Err(Denied::Unavailable),
        "without keys nobody is let in"
    );
}
