//! Why a request was denied, and the HTTP response for it.
//!
//! All faults of a token look the same to its sender: distinguishing them would help only an
//! attacker who tries tokens. The log has the kind of fault.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{self, HeaderValue};
use serde_json::{Value, json};

use super::caller::{Caller, Scope, Scopes};

/// A request that is denied because of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// There is no bearer token.
    #[error("there is no bearer token")]
    NoToken,
    /// The token is not valid.
    #[error("the bearer token is not good")]
    BadToken,
    /// The token may be valid, but the keys to check it are unavailable. It is never accepted
    /// unchecked.
    #[error("the keys to check tokens with cannot be had")]
    Unavailable,
    /// The caller is known, but lacks a scope.
    #[error("the scope {} is missing", needed.name())]
    MissingScope {
        needed: Scope,
        /// The caller's scopes, so that a new token can be requested that has both.
        held: Scopes,
    },
}

/// Checks that `caller` may do something that needs `scope`.
pub fn require(caller: &Caller, scope: Scope) -> Result<(), Denied> {
    if caller.scopes.allow(scope) {
        return Ok(());
    }
    Err(Denied::MissingScope {
        needed: scope,
        held: caller.scopes,
    })
}

/// The response for a request that is denied. The challenge is added later, by the outer layer of
/// the service, which finds the `Denied` in it.
impl IntoResponse for Denied {
    fn into_response(self) -> Response<Body> {
        let content_type = [(header::CONTENT_TYPE, "application/json")];
        let body = self.body().to_string();
        let mut response = (self.status(), content_type, body).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

impl Denied {
    /// The status of the response.
    pub fn status(&self) -> StatusCode {
        match self {
            Denied::NoToken | Denied::BadToken => StatusCode::UNAUTHORIZED,
            Denied::MissingScope { .. } => StatusCode::FORBIDDEN,
            Denied::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The body of the response.
    pub fn body(&self) -> Value {
        json!({"error": self.error(), "error_description": self.description()})
    }

    /// The value of `WWW-Authenticate`: the error, the scopes to request, and the URL of the
    /// metadata that names the issuers. `None` where a new token would not help.
    pub fn challenge(&self, metadata_url: &str) -> Option<HeaderValue> {
        let scopes = match self {
            Denied::NoToken | Denied::BadToken => Scope::Execute.name().to_owned(),
            Denied::MissingScope { needed, held } => wanted(*needed, *held),
            Denied::Unavailable => return None,
        };
        let text = format!(
            "Bearer error=\"{}\", error_description=\"{}\", scope=\"{scopes}\", \
             resource_metadata=\"{}\"",
            self.error(),
            self.description(),
            quotable(metadata_url)
        );
        HeaderValue::from_str(&text).ok()
    }

    fn error(&self) -> &'static str {
        match self {
            Denied::NoToken | Denied::BadToken => "invalid_token",
            Denied::MissingScope { .. } => "insufficient_scope",
            Denied::Unavailable => "temporarily_unavailable",
        }
    }

    fn description(&self) -> String {
        match self {
            Denied::NoToken | Denied::BadToken => "Authentication required".to_owned(),
            Denied::MissingScope { needed, .. } => format!("Required scope: {}", needed.name()),
            Denied::Unavailable => {
                "Tokens cannot be checked at the moment; try again later".to_owned()
            }
        }
    }
}

/// All scopes that a new token should have: one with the missing scope only would lose the others.
fn wanted(needed: Scope, held: Scopes) -> String {
    let names: Vec<&str> = Scope::ALL
        .into_iter()
        .filter(|scope| *scope == needed || held.contain(*scope))
        .map(Scope::name)
        .collect();
    names.join(" ")
}

/// Removes characters that would end the quoted text. A valid URL contains none of them.
fn quotable(url: &str) -> String {
    url.chars()
        .filter(|letter| letter.is_ascii_graphic() && !matches!(letter, '"' | '\\'))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = "https://cellblock.example.com/.well-known/oauth-protected-resource/mcp";

    fn caller(scopes: &[Scope]) -> Caller {
        Caller {
            principal: "somebody".to_owned(),
            scopes: scopes.iter().copied().collect(),
            expires: None,
        }
    }

    fn challenge(denied: Denied) -> String {
        denied
            .challenge(METADATA)
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    }

    #[test]
    fn a_missing_and_a_bad_token_get_the_same_answer() {
        for denied in [Denied::NoToken, Denied::BadToken] {
            assert_eq!(denied.status(), 401);
            assert_eq!(
                denied.body(),
                json!({"error": "invalid_token", "error_description": "Authentication required"})
            );
            assert_eq!(
                challenge(denied),
                format!(
                    "Bearer error=\"invalid_token\", error_description=\"Authentication \
                     required\", \
                     scope=\"python:execute\", resource_metadata=\"{METADATA}\""
                )
            );
        }
    }

    #[test]
    fn a_missing_scope_is_named_together_with_those_that_are_held() {
        let denied = require(&caller(&[Scope::Execute]), Scope::Install).unwrap_err();
        assert_eq!(denied.status(), 403);
        assert_eq!(
            denied.body(),
            json!({
                "error": "insufficient_scope",
                "error_description": "Required scope: packages:install"
            })
        );
        let challenge = challenge(denied);
        assert!(
            challenge.starts_with("Bearer error=\"insufficient_scope\", "),
            "{challenge}"
        );
        assert!(
            challenge.contains("scope=\"python:execute packages:install\""),
            "{challenge}"
        );
        assert!(challenge.contains(METADATA), "{challenge}");
        require(&caller(&[Scope::Execute, Scope::Install]), Scope::Install).unwrap(); // control
    }

    #[test]
    fn each_scope_allows_itself_and_what_it_implies() {
        for held in Scope::ALL {
            for needed in Scope::ALL {
                let implied = held == needed
                    || held == Scope::Admin
                    || (held == Scope::Execute && needed == Scope::Read);
                assert_eq!(
                    require(&caller(&[held]), needed).is_ok(),
                    implied,
                    "{held:?} for {needed:?}"
                );
            }
        }
        assert!(
            Scope::ALL
                .into_iter()
                .all(|needed| require(&caller(&[]), needed).is_err())
        );
    }

    #[test]
    fn keys_that_cannot_be_had_are_no_fault_of_the_caller() {
        assert_eq!(Denied::Unavailable.status(), 503);
        assert_eq!(
            Denied::Unavailable.body()["error"],
            "temporarily_unavailable"
        );
        assert!(Denied::Unavailable.challenge(METADATA).is_none());
    }

    #[test]
    fn an_address_cannot_break_out_of_its_quotes() {
        let challenge = Denied::NoToken
            .challenge("https://a\", error=\"\r\nX: y\\")
            .unwrap();
        let text = challenge.to_str().unwrap();
        assert!(
            text.ends_with("resource_metadata=\"https://a,error=X:y\""),
            "{text}"
        );
    }
}
