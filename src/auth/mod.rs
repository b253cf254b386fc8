//! Authentication and authorization of callers.
//!
//! ```text
//!  Authorization: Bearer …  →  authenticator ─ API key ─→ api_key: hash known?           ─→ Caller
//!                                   └ token → token: parsed strictly
//!                                             key_server, keys: signed by a known issuer?
//!                                             claims: for us, in time, by whom?          ─→ Caller
//! ```
//!
//! This is the role of a resource server (RFC 6750, RFC 8725, RFC 9068, RFC 9728): it checks tokens
//! and issues none. `settings` has the operator's choices, `development` creates files for one
//! person on one machine, `denied` creates the HTTP responses for denied requests.
//!
//! This is a leaf module: it does not depend on MCP, sessions or HTTP connections. It takes a token
//! only from the one header, never accepts a token because a key is unavailable, and never logs a
//! token, a key or a claim: types that hold one print `[redacted]` or nothing.

mod api_key;
mod authenticator;
mod caller;
mod claims;
mod denied;
mod development;
mod fetch;
mod key_server;
mod keys;
mod settings;
mod token;

#[cfg(test)]
mod attacks;
#[cfg(test)]
mod tests;

pub use api_key::{ApiKey, KeyHash, NewKey, NoRandomness};
pub use authenticator::Authenticator;
pub use caller::{Caller, Scope, Scopes};
pub use denied::{Denied, require};
pub use development::DevelopmentError;
pub use fetch::{FetchError, KeySetUrl};
pub use keys::{Algorithm, NotAKeySet, PublicKeyProblem};
pub use settings::{
    AuthChoice, AuthSettings, AuthSetupError, Issuer, IssuerVariables, KeySource, MayNotListen,
    USUAL_AUDIENCE,
};
