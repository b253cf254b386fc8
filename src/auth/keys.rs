//! Public keys, and the signatures that each can check.
//!
//! Only asymmetric algorithms exist here, so no public key can be mistaken for the shared secret of
//! another algorithm. An algorithm accepts only keys of its own type and curve. RSA keys have 2048
//! to 8192 bits.
//!
//! Keys come from a key set (RFC 7517) or a PEM file. Unusable keys of a set are skipped, as the
//! standard requires.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use cellblock_json::Budget;
use ring::signature::{
    self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use rsa::pkcs1;
use rsa::pkcs8::der::{Decode, Document, asn1::ObjectIdentifier};
use rsa::pkcs8::spki::SubjectPublicKeyInfoRef;
use serde_json::Value;

/// A signature algorithm, by its name in RFC 7518 and RFC 8037.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    EdDsa,
}

impl Algorithm {
    pub const ALL: [Algorithm; 9] = [
        Algorithm::Rs256,
        Algorithm::Rs384,
        Algorithm::Rs512,
        Algorithm::Ps256,
        Algorithm::Ps384,
        Algorithm::Ps512,
        Algorithm::Es256,
        Algorithm::Es384,
        Algorithm::EdDsa,
    ];

    /// The allowed names, for messages.
    pub const ALLOWED: &str = "RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384 or EdDSA";

    /// The name used in tokens.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Rs256 => "RS256",
            Algorithm::Rs384 => "RS384",
            Algorithm::Rs512 => "RS512",
            Algorithm::Ps256 => "PS256",
            Algorithm::Ps384 => "PS384",
            Algorithm::Ps512 => "PS512",
            Algorithm::Es256 => "ES256",
            Algorithm::Es384 => "ES384",
            Algorithm::EdDsa => "EdDSA",
        }
    }

    /// Returns the algorithm of a name, which has exactly one spelling.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        Algorithm::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
    }

    fn for_rsa(self) -> Option<&'static RsaParameters> {
        match self {
            Algorithm::Rs256 => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
            Algorithm::Rs384 => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
            Algorithm::Rs512 => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
            Algorithm::Ps256 => Some(&signature::RSA_PSS_2048_8192_SHA256),
            Algorithm::Ps384 => Some(&signature::RSA_PSS_2048_8192_SHA384),
            Algorithm::Ps512 => Some(&signature::RSA_PSS_2048_8192_SHA512),
            Algorithm::Es256 | Algorithm::Es384 | Algorithm::EdDsa => None,
        }
    }
}

/// A key that checks signatures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PublicKey {
    /// Modulus and exponent, without leading zeros.
    Rsa {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
    },
    /// An uncompressed point.
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// Why a file does not contain a usable public key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PublicKeyProblem {
    #[error("it is not a public key in PEM form (BEGIN PUBLIC KEY)")]
    NotPem,
    #[error(
        "it is a private key, which does not belong here; give its public key, and keep the \
         private one elsewhere"
    )]
    Private,
    #[error("it is a certificate; give its public key")]
    Certificate,
    #[error("keys of this type cannot be used; RSA, P-256, P-384 and Ed25519 can")]
    Unknown,
    #[error("an RSA key must have 2048 to 8192 bits")]
    RsaSize,
}

const RSA_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const ELLIPTIC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
const P384: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.34");
const ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");

impl PublicKey {
    /// Parses the text of a PEM file.
    pub(super) fn from_pem(text: &str) -> Result<PublicKey, PublicKeyProblem> {
        if text.contains("PRIVATE KEY-----") {
            return Err(PublicKeyProblem::Private);
        }
        if text.contains("BEGIN CERTIFICATE-----") {
            return Err(PublicKeyProblem::Certificate);
        }
        let (label, document) =
            Document::from_pem(text.trim()).map_err(|_| PublicKeyProblem::NotPem)?;
        match label {
            "PUBLIC KEY" => PublicKey::from_der(document.as_bytes()),
            "RSA PUBLIC KEY" => PublicKey::from_pkcs1(document.as_bytes()),
            _ => Err(PublicKeyProblem::NotPem),
        }
    }

    /// Parses a SubjectPublicKeyInfo (RFC 5280).
    pub(super) fn from_der(bytes: &[u8]) -> Result<PublicKey, PublicKeyProblem> {
        let info =
            SubjectPublicKeyInfoRef::from_der(bytes).map_err(|_| PublicKeyProblem::NotPem)?;
        let key = info
            .subject_public_key
            .as_bytes()
            .ok_or(PublicKeyProblem::Unknown)?;
        let curve = || {
            info.algorithm
                .parameters_oid()
                .map_err(|_| PublicKeyProblem::Unknown)
        };
        match info.algorithm.oid {
            RSA => PublicKey::from_pkcs1(key),
            ELLIPTIC if curve()? == P256 => PublicKey::point(key, 32),
            ELLIPTIC if curve()? == P384 => PublicKey::point(key, 48),
            ED25519 if key.len() == 32 => Ok(PublicKey::Ed25519(key.to_vec())),
            _ => Err(PublicKeyProblem::Unknown),
        }
    }

    fn from_pkcs1(bytes: &[u8]) -> Result<PublicKey, PublicKeyProblem> {
        let key = pkcs1::RsaPublicKey::from_der(bytes).map_err(|_| PublicKeyProblem::NotPem)?;
        PublicKey::rsa(key.modulus.as_bytes(), key.public_exponent.as_bytes())
    }

    fn rsa(modulus: &[u8], exponent: &[u8]) -> Result<PublicKey, PublicKeyProblem> {
        let strip = |bytes: &[u8]| {
            bytes
                .iter()
                .copied()
                .skip_while(|byte| *byte == 0)
                .collect::<Vec<u8>>()
        };
        let (modulus, exponent) = (strip(modulus), strip(exponent));
        // A modulus of 256 bytes whose first bit is not set has fewer than 2048 bits.
        let is_short = modulus.len() == *RSA_BYTES.start() && modulus[0] < 0x80;
        if !RSA_BYTES.contains(&modulus.len()) || is_short {
            return Err(PublicKeyProblem::RsaSize);
        }
        Ok(PublicKey::Rsa { modulus, exponent })
    }

    fn point(bytes: &[u8], size: usize) -> Result<PublicKey, PublicKeyProblem> {
        if bytes.len() != 1 + 2 * size || bytes[0] != 4 {
            return Err(PublicKeyProblem::Unknown);
        }
        Ok(if size == 32 {
            PublicKey::P256(bytes.to_vec())
        } else {
            PublicKey::P384(bytes.to_vec())
        })
    }

    /// Parses one key of a set. Returns `None` if it has another use or an unsupported type.
    fn from_jwk(jwk: &Value) -> Option<PublicKey> {
        let text = |name: &str| jwk.get(name).and_then(Value::as_str);
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name)?).ok();
        match (text("kty")?, text("crv")) {
            ("RSA", _) => PublicKey::rsa(&bytes("n")?, &bytes("e")?).ok(),
            ("EC", Some("P-256")) => {
                Self::point(&[vec![4], bytes("x")?, bytes("y")?].concat(), 32).ok()
            }
            ("EC", Some("P-384")) => {
                Self::point(&[vec![4], bytes("x")?, bytes("y")?].concat(), 48).ok()
            }
            ("OKP", Some("Ed25519")) => bytes("x")
                .filter(|key| key.len() == 32)
                .map(PublicKey::Ed25519),
            _ => None,
        }
    }

    /// Returns whether signatures of `algorithm` can be checked with this key.
    pub(super) fn fits(&self, algorithm: Algorithm) -> bool {
        match self {
            PublicKey::Rsa { .. } => algorithm.for_rsa().is_some(),
            PublicKey::P256(_) => algorithm == Algorithm::Es256,
            PublicKey::P384(_) => algorithm == Algorithm::Es384,
            PublicKey::Ed25519(_) => algorithm == Algorithm::EdDsa,
        }
    }

    /// Returns whether `signature` was made for `message` by the owner of this key. With a key of
    /// another type it returns false.
    pub(super) fn verify(&self, algorithm: Algorithm, message: &[u8], signature: &[u8]) -> bool {
        let check = |method: &'static dyn VerificationAlgorithm, key: &[u8]| {
            self.fits(algorithm)
                && UnparsedPublicKey::new(method, key)
                    .verify(message, signature)
                    .is_ok()
        };
        match self {
            PublicKey::Rsa { modulus, exponent } => algorithm.for_rsa().is_some_and(|method| {
                RsaPublicKeyComponents {
                    n: modulus,
                    e: exponent,
                }
                .verify(method, message, signature)
                .is_ok()
            }),
            PublicKey::P256(point) => check(&signature::ECDSA_P256_SHA256_FIXED, point),
            PublicKey::P384(point) => check(&signature::ECDSA_P384_SHA384_FIXED, point),
            PublicKey::Ed25519(key) => check(&signature::ED25519, key),
        }
    }
}

/// The keys of one issuer.
#[derive(Debug, Clone, Default)]
pub(super) struct KeySet(Vec<Entry>);

#[derive(Debug, Clone)]
struct Entry {
    id: Option<String>,
    /// The only algorithm that the issuer allows for the key, if it is given.
    algorithm: Option<String>,
    key: PublicKey,
}

/// The limits of a key set: a thousand keys.
const KEY_SET: Budget = Budget {
    depth: 32,
    memory: 4 * 1024 * 1024,
};

/// A document that is not a key set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is not a JSON object with a list of \"keys\"")]
pub struct NotAKeySet;

impl KeySet {
    /// Parses a published key set.
    pub(super) fn from_json(bytes: &[u8]) -> Result<KeySet, NotAKeySet> {
        let document: Value = cellblock_json::read(bytes, KEY_SET).map_err(|_| NotAKeySet)?;
        let keys = document
            .get("keys")
            .and_then(Value::as_array)
            .ok_or(NotAKeySet)?;
        Ok(KeySet(keys.iter().filter_map(Entry::from_jwk).collect()))
    }

    /// Creates a set of the single key that an operator gave. It has no id, so a token may name any
    /// id.
    pub(super) fn of_one(key: PublicKey) -> KeySet {
        KeySet(vec![Entry {
            id: None,
            algorithm: None,
            key,
        }])
    }

    /// Finds the key of a token: the one it names or, if it names none, the only one that fits.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<&PublicKey> {
        let mut fitting = self.0.iter().filter(|entry| entry.is_for(algorithm));
        match id {
            Some(id) => fitting
                .find(|entry| entry.id.as_deref() == Some(id))
                .map(|entry| &entry.key),
            None => fitting
                .next()
                .filter(|_| fitting.next().is_none())
                .map(|entry| &entry.key),
        }
    }
}

impl Entry {
    fn from_jwk(jwk: &Value) -> Option<Entry> {
        let is_text_or_absent = |name: &str| jwk.get(name).is_none_or(Value::is_string);
        let is_for_signatures = jwk.get("use").is_none_or(|purpose| purpose == "sig");
        let may_verify = jwk.get("key_ops").is_none_or(|uses| {
            uses.as_array()
                .is_some_and(|uses| uses.iter().any(|operation| operation == "verify"))
        });
        if !is_for_signatures
            || !may_verify
            || !is_text_or_absent("kid")
            || !is_text_or_absent("alg")
        {
            return None;
        }
        let text = |name: &str| jwk.get(name).and_then(Value::as_str).map(str::to_owned);
        Some(Entry {
            id: text("kid"),
            algorithm: text("alg"),
            key: PublicKey::from_jwk(jwk)?,
        })
    }

    fn is_for(&self, algorithm: Algorithm) -> bool {
        self.key.fits(algorithm)
            && self
                .algorithm
                .as_deref()
                .is_none_or(|name| name == algorithm.name())
    }
}
