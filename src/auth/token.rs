//! A token taken apart: JSON Web Tokens in compact form (RFC 7519, RFC 7515).
//!
//! Pure, and strict: one spelling of base64, no name twice in an object, no header that asks for more than a signature. Nothing here is
//! believed yet. `claims` judges what is said, once `keys` has checked by whom.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cellblock_json::Budget;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::keys::Algorithm;

/// No issuer needs more, and every byte is decoded before anything is known about the sender.
pub(super) const LARGEST_TOKEN: usize = 16 << 10;

/// Ids of keys are short; a long one would only be compared for nothing.
const LONGEST_KEY_ID: usize = 256;
/// What each part may hold, long before anybody knows who sent it.
const TOKEN: Budget = Budget {
    depth: 32,
    memory: 256 * 1024,
};

/// Names in the header of which each means that the token brings its own key, must be understood in ways that we do not, or is packed.
const REFUSED_IN_HEADER: [&str; 10] = [
    "crit", "jwk", "jku", "x5u", "x5c", "zip", "enc", "epk", "cty", "b64",
];

/// What a token may say about its own type: nothing, or that it is a token for access. One of another type, such as a notice of
/// logging out, is signed by the same key and means something else.
const TYPES: [&str; 3] = ["jwt", "at+jwt", "application/at+jwt"];

/// What is wrong with a token. It is for the log, not for the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    TooLong,
    Malformed,
    /// The header holds something that is refused.
    Header,
    Algorithm,
    UnknownIssuer,
    UnknownKey,
    Signature,
    Issuer,
    Audience,
    Expired,
    /// It is not valid yet, or was made in the future.
    Early,
    /// A time is missing or is no time.
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

/// A token whose signature nobody has checked. It has no `Debug`, because it may be good.
pub(super) struct Token<'a> {
    pub algorithm: Algorithm,
    pub key_id: Option<String>,
    pub claims: Map<String, Value>,
    /// What was signed.
    pub message: &'a [u8],
    pub signature: Vec<u8>,
}

impl Token<'_> {
    /// Takes a token apart, or says why it is none.
    pub(super) fn parse(text: &str) -> Result<Token<'_>, Fault> {
        if text.len() > LARGEST_TOKEN {
            return Err(Fault::TooLong);
        }
        let (message, signature) = text.rsplit_once('.').ok_or(Fault::Malformed)?;
        let (header, claims) = message.split_once('.').ok_or(Fault::Malformed)?;
        // An encrypted token has five parts, so that what would be its claims holds dots, which are no base64.
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
        Some(Value::String(id)) if id.len() <= LONGEST_KEY_ID => Some(id.clone()),
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

/// An object that has no name twice. With two, another reader of the same token might believe the other one.
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
