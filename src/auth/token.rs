//! Parser for JSON Web Tokens in compact form (RFC 7519, RFC 7515).
//!
//! Pure and strict: one spelling of base64, no duplicate names in an object, no header that
//! requires more than a signature. Nothing here is trusted yet. `claims` checks the contents, once
//! `keys` has checked the signature.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cellblock_json::Budget;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::keys::Algorithm;

/// No issuer needs more, and every byte is decoded before the sender is authenticated.
pub(super) const MAX_TOKEN_BYTES: usize = 16 << 10;

/// Key ids are short; comparing a long one would be wasted work.
const MAX_KEY_ID_LENGTH: usize = 256;
/// The limits of each part, which apply before the sender is authenticated.
const TOKEN: Budget = Budget {
    depth: 32,
    memory: 256 * 1024,
};

/// Names in the header that mean that the token contains its own key, needs unsupported processing,
/// or is compressed.
const REFUSED_IN_HEADER: [&str; 10] = [
    "crit", "jwk", "jku", "x5u", "x5c", "zip", "enc", "epk", "cty", "b64",
];

/// The allowed types of a token: none, or an access token. A token of another type, such as a
/// logout token, is signed by the same key and means something else.
const TYPES: [&str; 3] = ["jwt", "at+jwt", "application/at+jwt"];

/// The fault of a token. It is for the log, not for the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    TooLong,
    Malformed,
    /// The header contains a rejected member.
    Header,
    Algorithm,
    UnknownIssuer,
    UnknownKey,
    Signature,
    Issuer,
    Audience,
    Expired,
    /// It is not valid yet, or was issued in the future.
    Early,
    /// A time is missing or malformed.
    Time,
    Subject,
    Scope,
    UnknownApiKey,
}

impl Fault {
    /// A constant word for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Fault::TooLong => "too long",
            Fault::Malformed => "malformed",
            Fault::Header => "header",
            Fault::Algorithm => "algorithm",
            Fault::UnknownIssuer => "unknown issuer",
            Fault::UnknownKey => "unknown key",
            Fault::Signature => "signature",
            Fault::Issuer => "issuer",
            Fault::Audience => "audience",
            Fault::Expired => "expired",
            Fault::Early => "early",
            Fault::Time => "time",
            Fault::Subject => "subject",
            Fault::Scope => "scope",
            Fault::UnknownApiKey => "unknown API key",
        }
    }
}

/// A token whose signature is not checked yet. It has no `Debug`, because it may be valid.
pub(super) struct Token<'a> {
    pub algorithm: Algorithm,
    pub key_id: Option<String>,
    pub claims: Map<String, Value>,
    /// The signed bytes.
    pub message: &'a [u8],
    pub signature: Vec<u8>,
}

impl Token<'_> {
    /// Parses a token, or returns its fault.
    pub(super) fn parse(text: &str) -> Result<Token<'_>, Fault> {
        if text.len() > MAX_TOKEN_BYTES {
            return Err(Fault::TooLong);
        }
        let (message, signature) = text.rsplit_once('.').ok_or(Fault::Malformed)?;
        let (header, claims) = message.split_once('.').ok_or(Fault::Malformed)?;
        // An encrypted token has five parts, so its claims would contain dots, which are not
        // base64.
        let (header, claims) = (object(header)?, object(claims)?);
        let (algorithm, key_id) = read_header(&header)?;
        let signature = URL_SAFE_NO_PAD
            .decode(signature)
            .map_err(|_| Fault::Malformed)?;
        Ok(Token {
            algorithm,
            key_id,
            claims,
            message: message.as_bytes(),
            signature,
        })
    }
}

fn read_header(header: &Map<String, Value>) -> Result<(Algorithm, Option<String>), Fault> {
    if REFUSED_IN_HEADER
        .iter()
        .any(|name| header.contains_key(*name))
    {
        return Err(Fault::Header);
    }
    match header.get("typ") {
        None => {}
        Some(Value::String(name)) if TYPES.contains(&name.to_ascii_lowercase().as_str()) => {}
        Some(_) => return Err(Fault::Header),
    }
    let key_id = match header.get("kid") {
        None => None,
        Some(Value::String(id)) if id.len() <= MAX_KEY_ID_LENGTH => Some(id.clone()),
        Some(_) => return Err(Fault::Header),
    };
    let algorithm = header
        .get("alg")
        .and_then(Value::as_str)
        .and_then(Algorithm::from_name);
    Ok((algorithm.ok_or(Fault::Algorithm)?, key_id))
}

fn object(part: &str) -> Result<Map<String, Value>, Fault> {
    let bytes = URL_SAFE_NO_PAD.decode(part).map_err(|_| Fault::Malformed)?;
    let Members(members) = cellblock_json::read(&bytes, TOKEN).map_err(|_| Fault::Malformed)?;
    Ok(members)
}

/// An object without duplicate names. With duplicates, another parser of the same token might use
/// the other value.
struct Members(Map<String, Value>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Members, D::Error> {
        struct EachOnce;
        impl<'de> Visitor<'de> for EachOnce {
            type Value = Members;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Map::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if members.insert(name, value).is_some() {
                        return Err(A::Error::custom("a name occurs twice"));
                    }
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(EachOnce)
    }
}
