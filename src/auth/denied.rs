//! placeholder until merge
use super::{Caller, Scope};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::{Value, json};
#[derive(Debug, Clone)]
pub enum Denied {
    NoToken,
    Scope(Scope),
}
impl Denied {
    pub fn status(&self) -> StatusCode {
        match self {
            Denied::NoToken => StatusCode::UNAUTHORIZED,
            Denied::Scope(_) => StatusCode::FORBIDDEN,
        }
    }
    pub fn body(&self) -> Value {
        json!({})
    }
    pub fn challenge(&self, _metadata_url: &str) -> HeaderValue {
        HeaderValue::from_static("Bearer")
    }
}
pub fn require(caller: &Caller, scope: Scope) -> Result<(), Denied> {
    if caller.scopes.allow(scope) { Ok(()) } else { Err(Denied::Scope(scope)) }
}
#[derive(Clone)]
pub struct Authenticator;
impl Authenticator {
    pub async fn authenticate(&self, _headers: &HeaderMap) -> Result<Caller, Denied> {
        Err(Denied::NoToken)
    }
    pub fn metadata(&self, _resource: &str) -> Value {
        json!({})
    }
}
