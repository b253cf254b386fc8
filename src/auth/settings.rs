//! The operator's authentication settings, and the plan derived from them.
//!
//! ```text
//!  auth: {issuers: […], api_keys: […]}  and/or  MCP_JWKS_URI, MCP_PUBLIC_KEY_PATH
//!       →  Given: only tokens and keys of these
//!  auth: development, or nothing at all
//!       →  Development: a token of our own, on loopback
//!  auth: off
//!       →  Off: every caller is the operator, on loopback
//! ```
//!
//! `plan` decides and is pure. Contradictory settings are rejected rather than resolved: only the
//! operator knows which was meant.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use super::api_key::ApiKey;
use super::development::DevelopmentError;
use super::fetch::KeySetUrl;
use super::keys::{Algorithm, PublicKeyProblem};

/// The default audience of tokens, in development and with the `MCP_` variables.
pub const USUAL_AUDIENCE: &str = "mcp-pyexec";

/// The issuer of tokens in development. It is not a URL, so that no client looks for a server
/// there.
const DEVELOPMENT_ISSUER: &str = "cellblock-development";

/// All authentication settings of the operator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuthSettings {
    pub choice: AuthChoice,
    pub issuers: Vec<Issuer>,
    pub api_keys: Vec<ApiKey>,
    /// The variables that describe one issuer, as they were written.
    pub variables: IssuerVariables,
    /// The folder of the files of development mode.
    pub development_dir: PathBuf,
    /// Folders that code inside or clients can reach. No key may be read from there.
    pub shown: Vec<PathBuf>,
}

/// The operator's choice as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AuthChoice {
    /// Tokens and keys if some are configured, else development.
    #[default]
    Usual,
    Development,
    Off,
}

/// An issuer of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issuer {
    /// The value of `iss`.
    pub name: String,
    pub keys: KeySource,
    /// `aud` must contain one of these.
    pub audiences: Vec<String>,
    pub algorithms: Vec<Algorithm>,
    /// The claim that identifies the caller; by default `sub`, else `client_id`.
    pub principal: Option<String>,
}

impl Issuer {
    /// The form of a name, for messages.
    pub const NAME_ALLOWED: &str =
        "1 to 512 letters without spaces, usually an address such as https://id.example.com";

    /// Returns whether an issuer may have this name. It contains no space, so that its end in a
    /// principal is unambiguous.
    pub fn is_name(text: &str) -> bool {
        (1..=512).contains(&text.len())
            && !text.contains(|letter: char| letter.is_whitespace() || letter.is_control())
    }
}

/// The source of an issuer's keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    Server {
        url: KeySetUrl,
        /// Whether it may be in a private network.
        is_private: bool,
    },
    /// A PEM file with one public key.
    File(PathBuf),
}

/// The variables `MCP_JWKS_URI`, `MCP_ISSUER`, `MCP_AUDIENCE`, `MCP_ALGORITHM` and
/// `MCP_PUBLIC_KEY_PATH`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IssuerVariables {
    pub jwks_uri: Option<String>,
    pub issuer: Option<String>,
    pub audience: Option<String>,
    pub algorithm: Option<String>,
    pub public_key_path: Option<PathBuf>,
}

/// Why callers cannot be authenticated with these settings.
#[derive(Debug, thiserror::Error)]
pub enum AuthSetupError {
    #[error("auth is \"{choice}\", but {other}; take one of them away")]
    Contradiction {
        choice: &'static str,
        other: &'static str,
    },
    #[error("{variable} needs MCP_ISSUER beside it: the issuer that tokens must name")]
    NoIssuer { variable: &'static str },
    #[error("MCP_JWKS_URI and MCP_PUBLIC_KEY_PATH are both set; take one of them away")]
    TwoKeySources,
    #[error("{variable} cannot be \"{given}\"; allowed: {allowed}")]
    Variable {
        variable: &'static str,
        given: String,
        allowed: &'static str,
    },
    #[error(
        "MCP_ALGORITHM cannot be \"{given}\" in development, where the key is an RSA key of our \
         own; take it away, or name a key"
    )]
    DevelopmentAlgorithm { given: String },
    #[error("the issuer \"{name}\" is described twice")]
    IssuerTwice { name: String },
    #[error("the API key \"{name}\" is described twice")]
    KeyTwice { name: String },
    #[error("the API keys \"{one}\" and \"{other}\" are the same key")]
    SameKey { one: String, other: String },
    #[error("the public key {} of the issuer \"{issuer}\" cannot be used", path.display())]
    PublicKey {
        path: PathBuf,
        issuer: String,
        #[source]
        cause: PublicKeyProblem,
    },
    #[error("the public key {} of the issuer \"{issuer}\" could not be read", path.display())]
    Unreadable {
        path: PathBuf,
        issuer: String,
        #[source]
        cause: io::Error,
    },
    #[error("the public key of the issuer \"{issuer}\" does not fit the algorithm \
             {}", algorithm.name())]
    Misfit {
        issuer: String,
        algorithm: Algorithm,
    },
    #[error(
        "{} decides who may call, but it lies in or holds {}, which sandboxes or clients can \
         reach. Move it to another folder",
        path.display(), shown.display()
    )]
    Shown { path: PathBuf, shown: PathBuf },
    #[error("development mode cannot be used")]
    Development(#[source] DevelopmentError),
    #[error("keys cannot be fetched over HTTPS")]
    NoAuthorities(#[source] io::Error),
}

/// An address that must not be listened on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MayNotListen {
    #[error(
        "{0} can be reached from other machines, but callers are not checked (auth is off). Listen \
         at 127.0.0.1, or name an issuer or API keys"
    )]
    Off(IpAddr),
    #[error(
        "{0} can be reached from other machines, but auth is in development mode, which is for one \
         machine. Listen at 127.0.0.1, or name an issuer or API keys"
    )]
    Development(IpAddr),
}

/// The decision derived from the settings.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AuthPlan {
    Off,
    Development {
        issuer: String,
        audiences: Vec<String>,
    },
    Given {
        issuers: Vec<Issuer>,
    },
}

/// Derives the plan from the settings, or rejects them. Reads no file.
pub(super) fn plan(settings: &AuthSettings) -> Result<AuthPlan, AuthSetupError> {
    refuse_repetitions(&settings.api_keys)?;
    let from_variables = settings.variables.issuer()?;
    let other = match (
        &from_variables,
        &settings.issuers[..],
        &settings.api_keys[..],
    ) {
        (Some(_), _, _) => Some("MCP_JWKS_URI or MCP_PUBLIC_KEY_PATH names an issuer"),
        (None, [_, ..], _) => Some("an issuer is described"),
        (None, [], [_, ..]) => Some("an API key is described"),
        (None, [], []) => None,
    };
    match (settings.choice, other) {
        (AuthChoice::Off, Some(other)) => Err(AuthSetupError::Contradiction {
            choice: "off",
            other,
        }),
        (AuthChoice::Development, Some(other)) => Err(AuthSetupError::Contradiction {
            choice: "development",
            other,
        }),
        (AuthChoice::Off, None) => Ok(AuthPlan::Off),
        (AuthChoice::Usual | AuthChoice::Development, None) => settings.variables.development(),
        (AuthChoice::Usual, Some(_)) => {
            let issuers: Vec<Issuer> = settings
                .issuers
                .iter()
                .cloned()
                .chain(from_variables)
                .collect();
            let names = || issuers.iter().map(|issuer| &issuer.name);
            match names()
                .enumerate()
                .find(|(place, name)| names().take(*place).any(|other| other == *name))
            {
                Some((_, name)) => Err(AuthSetupError::IssuerTwice { name: name.clone() }),
                None => Ok(AuthPlan::Given { issuers }),
            }
        }
    }
}

fn refuse_repetitions(keys: &[ApiKey]) -> Result<(), AuthSetupError> {
    for (place, key) in keys.iter().enumerate() {
        for other in &keys[..place] {
            if other.name == key.name {
                return Err(AuthSetupError::KeyTwice {
                    name: key.name.clone(),
                });
            }
            if other.hash == key.hash {
                return Err(AuthSetupError::SameKey {
                    one: other.name.clone(),
                    other: key.name.clone(),
                });
            }
        }
    }
    Ok(())
}

impl IssuerVariables {
    /// Returns the issuer that the variables describe, if they name its keys.
    fn issuer(&self) -> Result<Option<Issuer>, AuthSetupError> {
        let (keys, variable) = match (&self.jwks_uri, &self.public_key_path) {
            (None, None) => return Ok(None),
            (Some(_), Some(_)) => return Err(AuthSetupError::TwoKeySources),
            (Some(text), None) => {
                let refused = refused("MCP_JWKS_URI", text, KeySetUrl::ALLOWED);
                let url = KeySetUrl::parse(text).ok_or(refused)?;
                (
                    KeySource::Server {
                        url,
                        is_private: false,
                    },
                    "MCP_JWKS_URI",
                )
            }
            (None, Some(path)) => (KeySource::File(path.clone()), "MCP_PUBLIC_KEY_PATH"),
        };
        let name = self
            .issuer_name()?
            .ok_or(AuthSetupError::NoIssuer { variable })?;
        let algorithm = match &self.algorithm {
            None => Algorithm::Rs256,
            Some(text) => Algorithm::from_name(text)
                .ok_or_else(|| refused("MCP_ALGORITHM", text, Algorithm::ALLOWED))?,
        };
        Ok(Some(Issuer {
            name,
            keys,
            audiences: vec![self.audience()],
            algorithms: vec![algorithm],
            principal: None,
        }))
    }

    /// Returns the plan of development mode, with the values of the variables.
    fn development(&self) -> Result<AuthPlan, AuthSetupError> {
        if let Some(given) = self
            .algorithm
            .clone()
            .filter(|name| name != Algorithm::Rs256.name())
        {
            return Err(AuthSetupError::DevelopmentAlgorithm { given });
        }
        let issuer = self
            .issuer_name()?
            .unwrap_or_else(|| DEVELOPMENT_ISSUER.to_owned());
        Ok(AuthPlan::Development {
            issuer,
            audiences: vec![self.audience()],
        })
    }

    fn issuer_name(&self) -> Result<Option<String>, AuthSetupError> {
        match &self.issuer {
            Some(name) if !Issuer::is_name(name) => {
                Err(refused("MCP_ISSUER", name, Issuer::NAME_ALLOWED))
            }
            name => Ok(name.clone()),
        }
    }

    fn audience(&self) -> String {
        self.audience
            .clone()
            .unwrap_or_else(|| USUAL_AUDIENCE.to_owned())
    }
}

fn refused(variable: &'static str, given: &str, allowed: &'static str) -> AuthSetupError {
    AuthSetupError::Variable {
        variable,
        given: given.to_owned(),
        allowed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::api_key::NewKey;
    use super::super::caller::Scopes;
    use super::*;

    fn key(name: &str) -> ApiKey {
        ApiKey {
            name: name.to_owned(),
            hash: NewKey::generate().unwrap().hash(),
            scopes: Scopes::everything(),
        }
    }

    fn issuer(name: &str) -> Issuer {
        Issuer {
            name: name.to_owned(),
            keys: KeySource::File("/etc/key.pem".into()),
            audiences: vec!["us".to_owned()],
            algorithms: vec![Algorithm::Rs256],
            principal: None,
        }
    }

    fn variables(pairs: &[(&str, &str)]) -> AuthSettings {
        let of = |name: &str| {
            pairs
                .iter()
                .find(|(other, _)| *other == name)
                .map(|(_, value)| (*value).to_owned())
        };
        AuthSettings {
            variables: IssuerVariables {
                jwks_uri: of("MCP_JWKS_URI"),
                issuer: of("MCP_ISSUER"),
                audience: of("MCP_AUDIENCE"),
                algorithm: of("MCP_ALGORITHM"),
                public_key_path: of("MCP_PUBLIC_KEY_PATH").map(PathBuf::from),
            },
            ..AuthSettings::default()
        }
    }

    fn issuers(settings: &AuthSettings) -> Vec<Issuer> {
        match plan(settings).unwrap() {
            AuthPlan::Given { issuers } => issuers,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(settings: &AuthSettings) -> String {
        plan(settings).unwrap_err().to_string()
    }

    #[test]
    fn nothing_at_all_is_development() {
        let usual = AuthPlan::Development {
            issuer: "cellblock-development".to_owned(),
            audiences: vec!["mcp-pyexec".to_owned()],
        };
        assert_eq!(plan(&AuthSettings::default()).unwrap(), usual);
        let chosen = AuthSettings {
            choice: AuthChoice::Development,
            ..AuthSettings::default()
        };
        assert_eq!(plan(&chosen).unwrap(), usual);
        let described = variables(&[
            ("MCP_ISSUER", "https://me"),
            ("MCP_AUDIENCE", "us"),
            ("MCP_ALGORITHM", "RS256"),
        ]);
        let expected = AuthPlan::Development {
            issuer: "https://me".to_owned(),
            audiences: vec!["us".to_owned()],
        };
        assert_eq!(plan(&described).unwrap(), expected);
        assert!(refusal(&variables(&[("MCP_ALGORITHM", "ES256")])).contains("in development"));
    }

    #[test]
    fn an_address_of_keys_selects_production() {
        let given = [
            ("MCP_JWKS_URI", "https://id.example.com/keys"),
            ("MCP_ISSUER", "https://id.example.com"),
        ];
        let [issuer] = &issuers(&variables(&given))[..] else {
            panic!("there is one issuer")
        };
        assert_eq!(issuer.name, "https://id.example.com");
        assert_eq!(
            (&issuer.audiences[..], &issuer.algorithms[..]),
            (&["mcp-pyexec".to_owned()][..], &[Algorithm::Rs256][..])
        );
        let more = [
            &given[..],
            &[("MCP_AUDIENCE", "us"), ("MCP_ALGORITHM", "ES256")],
        ]
        .concat();
        let [issuer] = &issuers(&variables(&more))[..] else {
            panic!("there is one issuer")
        };
        assert_eq!(
            (&issuer.audiences[..], &issuer.algorithms[..]),
            (&["us".to_owned()][..], &[Algorithm::Es256][..])
        );
        let file = variables(&[
            ("MCP_PUBLIC_KEY_PATH", "/key.pem"),
            ("MCP_ISSUER", "https://id.example.com"),
        ]);
        assert_eq!(issuers(&file)[0].keys, KeySource::File("/key.pem".into()));
    }

    #[test]
    fn variables_that_do_not_fit_together_are_refused() {
        let (uri, issuer) = (
            ("MCP_JWKS_URI", "https://id/keys"),
            ("MCP_ISSUER", "https://id"),
        );
        for (given, words) in [
            (&[uri][..], "MCP_JWKS_URI needs MCP_ISSUER"),
            (
                &[("MCP_PUBLIC_KEY_PATH", "/key.pem")],
                "MCP_PUBLIC_KEY_PATH needs MCP_ISSUER",
            ),
            (
                &[uri, issuer, ("MCP_PUBLIC_KEY_PATH", "/key.pem")],
                "both set",
            ),
            (
                &[("MCP_JWKS_URI", "http://id.example.com/keys"), issuer],
                "http:// only with",
            ),
            (
                &[uri, issuer, ("MCP_ALGORITHM", "HS256")],
                "MCP_ALGORITHM cannot be \"HS256\"",
            ),
            (
                &[uri, issuer, ("MCP_ALGORITHM", "none")],
                "MCP_ALGORITHM cannot be \"none\"",
            ),
            (&[uri, ("MCP_ISSUER", "a b")], "without spaces"),
        ] {
            let message = refusal(&variables(given));
            assert!(message.contains(words), "{given:?}: {message}");
        }
        assert_eq!(issuers(&variables(&[uri, issuer])).len(), 1); // control
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let from_variables = variables(&[
            ("MCP_JWKS_URI", "https://id/keys"),
            ("MCP_ISSUER", "https://id"),
        ]);
        let described = AuthSettings {
            issuers: vec![issuer("https://id")],
            ..AuthSettings::default()
        };
        let keys = AuthSettings {
            api_keys: vec![key("ci")],
            ..AuthSettings::default()
        };
        for settings in [&from_variables, &described, &keys] {
            for choice in [AuthChoice::Off, AuthChoice::Development] {
                let message = refusal(&AuthSettings {
                    choice,
                    ..settings.clone()
                });
                assert!(message.contains("take one of them away"), "{message}");
            }
            assert!(matches!(plan(settings), Ok(AuthPlan::Given { .. }))); // control
        }
        let off = AuthSettings {
            choice: AuthChoice::Off,
            ..AuthSettings::default()
        };
        assert_eq!(plan(&off).unwrap(), AuthPlan::Off); // control
    }

    #[test]
    fn nothing_is_described_twice() {
        let two = |one: &str, other: &str| AuthSettings {
            issuers: vec![issuer(one), issuer(other)],
            ..AuthSettings::default()
        };
        assert!(
            refusal(&two("https://a", "https://a")).contains("\"https://a\" is described twice")
        );
        assert_eq!(issuers(&two("https://a", "https://b")).len(), 2); // control
        let both = AuthSettings {
            issuers: vec![issuer("https://id")],
            ..variables(&[
                ("MCP_JWKS_URI", "https://id/keys"),
                ("MCP_ISSUER", "https://id"),
            ])
        };
        assert!(refusal(&both).contains("described twice"));
        let keys = |keys: Vec<ApiKey>| AuthSettings {
            api_keys: keys,
            ..AuthSettings::default()
        };
        assert!(refusal(&keys(vec![key("a"), key("a")])).contains("\"a\" is described twice"));
        let same = ApiKey {
            name: "b".to_owned(),
            ..key("a")
        };
        assert!(
            refusal(&keys(vec![
                ApiKey {
                    name: "a".to_owned(),
                    ..same.clone()
                },
                same
            ]))
            .contains("are the same key")
        );
    }
}
