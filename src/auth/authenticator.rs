//! Authentication: takes a request's headers, returns a caller.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use rustls::ClientConfig;
use serde_json::{Map, Value, json};
use tracing::{debug, info};

use super::api_key::{self, ApiKey};
use super::caller::{Caller, Scope};
use super::claims::{self, Expected};
use super::denied::Denied;
use super::development::{self, DevelopmentClaims};
use super::fetch::{self, Fetcher, MAX_FETCH_TIME};
use super::key_server::{KeyServer, NoKey};
use super::keys::{Algorithm, KeySet, PublicKey};
use super::settings::{
    AuthPlan, AuthSettings, AuthSetupError, Issuer, KeySource, MayNotListen, plan,
};
use super::token::{Fault, Token};

/// Authenticates callers. Cheap to clone; clones share their keys.
#[derive(Clone)]
pub struct Authenticator(Arc<Inner>);

struct Inner {
    mode: Mode,
    issuers: Vec<Verifier>,
    api_keys: Vec<ApiKey>,
}

enum Mode {
    Off,
    Development {
        /// The path of the token.
        token: PathBuf,
    },
    Given,
}

/// An issuer of tokens, with the keys to check them.
struct Verifier {
    name: String,
    audiences: Vec<String>,
    algorithms: Vec<Algorithm>,
    principal: Option<String>,
    keys: Keys,
}

enum Keys {
    Given(KeySet),
    Published(KeyServer),
}

/// Why a token is rejected.
enum Refusal {
    Fault(Fault),
    Away,
}

impl Authenticator {
    /// Reads keys, creates the files of development mode, and rejects settings that are weak or
    /// contradictory.
    pub async fn from_settings(settings: &AuthSettings) -> Result<Authenticator, AuthSetupError> {
        let inner = match plan(settings)? {
            AuthPlan::Off => Inner {
                mode: Mode::Off,
                issuers: Vec::new(),
                api_keys: Vec::new(),
            },
            AuthPlan::Development { issuer, audiences } => {
                develop(settings, issuer, audiences).await?
            }
            AuthPlan::Given { issuers } => Inner {
                mode: Mode::Given,
                issuers: verifiers(issuers, &settings.shown).await?,
                api_keys: settings.api_keys.clone(),
            },
        };
        Ok(Authenticator(Arc::new(inner)))
    }

    /// Authenticates the caller. A token is taken from exactly one `Authorization` header and from
    /// nowhere else.
    pub async fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, Denied> {
        if matches!(self.0.mode, Mode::Off) {
            return Ok(Caller::local());
        }
        let token = bearer_token(headers)?;
        let checked = if api_key::looks_like_a_key(token) {
            api_key::find(&self.0.api_keys, token).ok_or(Refusal::Fault(Fault::UnknownApiKey))
        } else {
            self.check(token).await
        };
        checked.map_err(|refusal| match refusal {
            Refusal::Fault(fault) => {
                debug!(fault = fault.name(), "token refused");
                Denied::BadToken
            }
            Refusal::Away => Denied::Unavailable,
        })
    }

    /// Returns whether `address` may be listened on. Without authentication, only this machine may
    /// call.
    pub fn may_listen(&self, address: IpAddr) -> Result<(), MayNotListen> {
        match self.0.mode {
            _ if address.to_canonical().is_loopback() => Ok(()),
            Mode::Given => Ok(()),
            Mode::Off => Err(MayNotListen::Off(address)),
            Mode::Development { .. } => Err(MayNotListen::Development(address)),
        }
    }

    /// The file that holds the token of development mode, to be shown to the operator.
    pub fn development_token(&self) -> Option<&Path> {
        match &self.0.mode {
            Mode::Development { token } => Some(token),
            Mode::Off | Mode::Given => None,
        }
    }

    /// Returns the metadata of the resource at `resource` (RFC 9728): the issuers of tokens, and
    /// the scopes to request initially.
    pub fn metadata(&self, resource: &str) -> Value {
        let servers: Vec<&str> = self
            .0
            .issuers
            .iter()
            .map(|issuer| issuer.name.as_str())
            .filter(|name| name.contains("://"))
            .collect();
        let mut document = Map::from_iter([
            ("resource".to_owned(), json!(resource)),
            ("resource_name".to_owned(), json!("Cellblock")),
            (
                "scopes_supported".to_owned(),
                json!([Scope::Execute.name()]),
            ),
            ("bearer_methods_supported".to_owned(), json!(["header"])),
        ]);
        // If the list is present, it must not be empty.
        if !servers.is_empty() {
            document.insert("authorization_servers".to_owned(), json!(servers));
        }
        Value::Object(document)
    }

    async fn check(&self, text: &str) -> Result<Caller, Refusal> {
        let token = Token::parse(text)?;
        let name = token
            .claims
            .get("iss")
            .and_then(Value::as_str)
            .ok_or(Fault::Issuer)?;
        // Before the signature is checked, the token's issuer is used only to select the keys, and
        // only among the issuers that the operator trusts.
        let issuer = self
            .0
            .issuers
            .iter()
            .find(|issuer| issuer.name == name)
            .ok_or(Fault::UnknownIssuer)?;
        if !issuer.algorithms.contains(&token.algorithm) {
            return Err(Fault::Algorithm.into());
        }
        let key = issuer
            .keys
            .find(token.key_id.as_deref(), token.algorithm)
            .await?;
        if !key.verify(token.algorithm, token.message, &token.signature) {
            return Err(Fault::Signature.into());
        }
        let expected = Expected {
            issuer: &issuer.name,
            audiences: &issuer.audiences,
            principal: issuer.principal.as_deref(),
        };
        Ok(claims::judge(&token.claims, expected, SystemTime::now())?)
    }
}

impl fmt::Debug for Authenticator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Authenticator")
    }
}

impl Keys {
    async fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Result<PublicKey, Refusal> {
        match self {
            Keys::Given(set) => set
                .find(None, algorithm)
                .cloned()
                .ok_or(Fault::UnknownKey.into()),
            Keys::Published(server) => {
                server.find(id, algorithm).await.map_err(|none| match none {
                    NoKey::Unknown => Fault::UnknownKey.into(),
                    NoKey::Away => Refusal::Away,
                })
            }
        }
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        Refusal::Fault(fault)
    }
}

/// Returns the token of a request. With two headers, another reader of the same request might use
/// the other one.
fn bearer_token(headers: &HeaderMap) -> Result<&str, Denied> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(Denied::NoToken)?;
    if values.next().is_some() {
        return Err(Denied::BadToken);
    }
    let text = value.to_str().map_err(|_| Denied::BadToken)?.trim();
    let (scheme, token) = text.split_once(' ').unwrap_or((text, ""));
    let token = token.trim_start();
    match scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() {
        true => Ok(token),
        false => Err(Denied::NoToken),
    }
}

async fn develop(
    settings: &AuthSettings,
    issuer: String,
    audiences: Vec<String>,
) -> Result<Inner, AuthSetupError> {
    let folder = settings.development_dir.clone();
    refuse_shown(&folder, &settings.shown)?;
    let token = folder.join(development::TOKEN);
    let (name, names) = (issuer.clone(), audiences.clone());
    // Generating an RSA key keeps a core busy for a while.
    let prepared = tokio::task::spawn_blocking(move || {
        development::prepare(
            &folder,
            &DevelopmentClaims {
                issuer: &name,
                audiences: &names,
            },
            SystemTime::now(),
        )
    });
    let key = prepared
        .await
        .expect("preparing does not panic")
        .map_err(AuthSetupError::Development)?;
    info!(file = %token.display(), "callers need the token of development mode, which is in a \
                                    file");
    let keys = Keys::Given(KeySet::of_one(key));
    let verifier = Verifier {
        name: issuer,
        audiences,
        algorithms: vec![Algorithm::Rs256],
        principal: None,
        keys,
    };
    Ok(Inner {
        mode: Mode::Development { token },
        issuers: vec![verifier],
        api_keys: Vec::new(),
    })
}

async fn verifiers(
    issuers: Vec<Issuer>,
    shown: &[PathBuf],
) -> Result<Vec<Verifier>, AuthSetupError> {
    let fetches = issuers
        .iter()
        .any(|issuer| matches!(issuer.keys, KeySource::Server { .. }));
    // Without a key server the system's root certificates are not needed.
    let tls = if fetches {
        Some(fetch::usual_tls().map_err(AuthSetupError::NoAuthorities)?)
    } else {
        None
    };
    let mut verifiers = Vec::new();
    for Issuer {
        name,
        keys,
        audiences,
        algorithms,
        principal,
    } in issuers
    {
        let keys = match (keys, &tls) {
            (KeySource::File(path), _) => given_key(&name, path, &algorithms, shown).await?,
            (KeySource::Server { url, is_private }, Some(tls)) => {
                let fetcher = Fetcher {
                    url,
                    is_private,
                    tls: Arc::<ClientConfig>::clone(tls),
                    limit: MAX_FETCH_TIME,
                };
                Keys::Published(KeyServer::new(name.clone(), Arc::new(fetcher)))
            }
            (KeySource::Server { .. }, None) => {
                unreachable!("there is a server, so authorities were read")
            }
        };
        verifiers.push(Verifier {
            name,
            audiences,
            algorithms,
            principal,
            keys,
        });
    }
    Ok(verifiers)
}

async fn given_key(
    issuer: &str,
    path: PathBuf,
    algorithms: &[Algorithm],
    shown: &[PathBuf],
) -> Result<Keys, AuthSetupError> {
    refuse_shown(&path, shown)?;
    let issuer = issuer.to_owned();
    let text = match tokio::fs::read_to_string(&path).await {
        Ok(text) => text,
        Err(cause) => {
            return Err(AuthSetupError::Unreadable {
                path,
                issuer,
                cause,
            });
        }
    };
    let key = match PublicKey::from_pem(&text) {
        Ok(key) => key,
        Err(cause) => {
            return Err(AuthSetupError::PublicKey {
                path,
                issuer,
                cause,
            });
        }
    };
    match algorithms.iter().find(|algorithm| !key.fits(**algorithm)) {
        Some(algorithm) => Err(AuthSetupError::Misfit {
            issuer,
            algorithm: *algorithm,
        }),
        None => Ok(Keys::Given(KeySet::of_one(key))),
    }
}

/// Rejects a file or folder that code inside, or a client that uploads files, could read or
/// replace.
fn refuse_shown(path: &Path, shown: &[PathBuf]) -> Result<(), AuthSetupError> {
    let real = real_path(path);
    // A link matters as much as the file: code that can replace it chooses another file.
    let beside = path.parent().map(real_path);
    let reaches = |folder: &&PathBuf| {
        real.starts_with(folder)
            || folder.starts_with(&real)
            || beside
                .as_ref()
                .is_some_and(|beside| beside.starts_with(folder))
    };
    match shown.iter().find(reaches) {
        Some(shown) => Err(AuthSetupError::Shown {
            path: path.to_owned(),
            shown: shown.clone(),
        }),
        None => Ok(()),
    }
}

/// Returns a path free of links, even if its last parts do not exist yet.
fn real_path(path: &Path) -> PathBuf {
    path.canonicalize()
        .unwrap_or_else(|_| match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => real_path(parent).join(name),
            _ => path.to_owned(),
        })
}
