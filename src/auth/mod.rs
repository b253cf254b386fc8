//! Who is calling, and what they may do.
//!
//! ```text
//!  Authorization: Bearer …  →  authenticator ─ API key ─→ api_key: hash known?            ─→ Caller
//!                                   └ token → token: taken apart, strictly
//!                                             key_server, keys: signed by a known issuer?
//!                                             claims: for us, in time, by whom?           ─→ Caller
//! ```
//!
//! This is the role of a resource server (RFC 6750, RFC 8725, RFC 9068, RFC 9728): it checks tokens and gives none out. `settings` says what an
//! operator can choose, `development` makes files for one person on one machine, `denied` says no in the words of HTTP.
//!
//! A leaf: it knows nothing of MCP, sessions or HTTP connections. It never takes a token from anywhere but the one header, never lets anybody in
//! because a key could not be had, and never writes a token, a key or a claim to the log: types that hold one print `[redacted]` or nothing.

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
