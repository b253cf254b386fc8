//! API keys: long random texts for programs that cannot get tokens.
//!
//! ```text
//!  cellblock_ + 43 letters      256 random bits, shown once, kept by the caller
//!  sha256: + 64 digits          its hash, in the configuration
//! ```
//!
//! A key is generated and never chosen, so it cannot be guessed, and a plain hash of it reveals
//! nothing. A shorter text does not have the form of a key and is rejected before any comparison.
//! All hashes are compared, each in constant time.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::{SecureRandom, SystemRandom};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use zeroize::Zeroizing;

use super::caller::{Caller, Scopes};

/// The prefix of every key, so that a leaked one is recognised.
const PREFIX: &str = "cellblock_";

const RANDOM_BYTES: usize = 32;

const HASH_PREFIX: &str = "sha256:";

/// A key in the operator's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    pub name: String,
    pub hash: KeyHash,
    pub scopes: Scopes,
}

impl ApiKey {
    /// The form of a name, for messages.
    pub const NAME_ALLOWED: &str = "1 to 64 letters, digits, \"-\", \"_\" or \".\"";

    /// Returns whether a key may have this name. It contains no space, so it cannot equal a
    /// principal derived from a token.
    pub fn is_name(text: &str) -> bool {
        (1..=64).contains(&text.len())
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    }
}

/// The hash of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The form of a hash, for messages.
    pub const ALLOWED: &str =
        "\"sha256:\" and 64 hexadecimal digits, as \"cellblock key new\" prints them";

    /// Parses a hash of the configuration.
    pub fn parse(text: &str) -> Option<KeyHash> {
        let digits = text.strip_prefix(HASH_PREFIX)?;
        if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        let mut hash = [0; 32];
        for (place, byte) in hash.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * place..2 * place + 2], 16).ok()?;
        }
        Some(KeyHash(hash))
    }

    fn of(key: &str) -> KeyHash {
        KeyHash(Sha256::digest(key.as_bytes()).into())
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(HASH_PREFIX)?;
        self.0
            .iter()
            .try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("[redacted]")
    }
}

/// A newly generated key.
pub struct NewKey(Zeroizing<String>);

/// The system provided no random numbers.
#[derive(Debug, thiserror::Error)]
#[error("the system gave no random numbers for a key")]
pub struct NoRandomness;

impl NewKey {
    /// Generates a key.
    pub fn generate() -> Result<NewKey, NoRandomness> {
        let mut random = Zeroizing::new([0; RANDOM_BYTES]);
        SystemRandom::new()
            .fill(random.as_mut())
            .map_err(|_| NoRandomness)?;
        let letters = Zeroizing::new(URL_SAFE_NO_PAD.encode(random.as_ref()));
        Ok(NewKey(Zeroizing::new(format!(
            "{PREFIX}{}",
            letters.as_str()
        ))))
    }

    /// The key itself, to be shown once.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The hash for the configuration.
    pub fn hash(&self) -> KeyHash {
        KeyHash::of(&self.0)
    }
}

impl fmt::Debug for NewKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("[redacted]")
    }
}

/// Returns whether a bearer token has the prefix of a key.
pub(super) fn looks_like_a_key(token: &str) -> bool {
    token.starts_with(PREFIX)
}

/// Finds the owner of a key.
pub(super) fn find(keys: &[ApiKey], token: &str) -> Option<Caller> {
    let random = URL_SAFE_NO_PAD.decode(token.strip_prefix(PREFIX)?).ok()?;
    if random.len() != RANDOM_BYTES {
        return None;
    }
    let hash = KeyHash::of(token);
    // No early exit: the duration must reveal neither which key matched nor how much of a hash
    // matched.
    let found = (1_u64..).zip(keys).fold(0, |found, (number, key)| {
        u64::conditional_select(&found, &number, key.hash.0.ct_eq(&hash.0))
    });
    let key = keys.get(usize::try_from(found.checked_sub(1)?).ok()?)?;
    Some(Caller {
        principal: format!("key:{}", key.name),
        scopes: key.scopes,
        expires: None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::caller::Scope;
    use super::*;

    fn described(name: &str, key: &NewKey, scope: Scope) -> ApiKey {
        ApiKey {
            name: name.to_owned(),
            hash: key.hash(),
            scopes: [scope].into_iter().collect(),
        }
    }

    #[test]
    fn a_key_is_known_by_its_hash_and_has_its_own_scopes() {
        let (first, second) = (NewKey::generate().unwrap(), NewKey::generate().unwrap());
        let keys = [
            described("ci", &first, Scope::Execute),
            described("watch", &second, Scope::Read),
        ];
        let caller = |key: &NewKey| find(&keys, key.reveal()).unwrap();
        assert_eq!(caller(&first).principal, "key:ci");
        assert_eq!(
            caller(&first).scopes,
            [Scope::Execute].into_iter().collect()
        );
        assert_eq!(caller(&second).principal, "key:watch");
        assert_eq!(caller(&second).scopes, [Scope::Read].into_iter().collect());
        assert_eq!(caller(&second).expires, None);
        assert_eq!(find(&keys, NewKey::generate().unwrap().reveal()), None);
        assert_eq!(find(&[], first.reveal()), None);
    }

    #[test]
    fn a_key_has_256_bits_and_one_spelling() {
        let key = NewKey::generate().unwrap();
        let text = key.reveal();
        assert_eq!(text.len(), "cellblock_".len() + 43);
        assert!(looks_like_a_key(text));
        let keys = [described("ci", &key, Scope::Execute)];
        assert!(find(&keys, text).is_some()); // control
        for other in [
            &text[..text.len() - 1],
            &format!("{text}A"),
            &text.to_uppercase(),
            &text["cellblock_".len()..],
            "",
        ] {
            assert_eq!(find(&keys, other), None);
        }
    }

    #[test]
    fn something_short_is_no_key_even_if_its_hash_is_listed() {
        for weak in [
            "cellblock_",
            "cellblock_secret",
            "cellblock_AAAAAAAAAAAAAAAAAAAAAA",
        ] {
            let listed = ApiKey {
                name: "weak".to_owned(),
                hash: KeyHash::of(weak),
                scopes: Scopes::everything(),
            };
            assert_eq!(find(&[listed], weak), None, "{weak}");
        }
        let whole = format!("cellblock_{}", "A".repeat(43));
        let listed = ApiKey {
            name: "whole".to_owned(),
            hash: KeyHash::of(&whole),
            scopes: Scopes::everything(),
        };
        assert!(find(&[listed], &whole).is_some()); // control
    }

    #[test]
    fn a_hash_is_written_in_one_way() {
        let hash = NewKey::generate().unwrap().hash();
        let text = hash.to_string();
        assert_eq!(KeyHash::parse(&text), Some(hash));
        assert_eq!(
            KeyHash::parse(&text.to_uppercase().replace("SHA256", "sha256")),
            Some(hash),
            "digits in capitals"
        );
        let digits = text.trim_start_matches("sha256:");
        for wrong in [
            digits,
            &text[..70],
            &format!("{text}0"),
            &format!("md5:{digits}"),
            &format!("sha256:{}", "g".repeat(64)),
            "",
        ] {
            assert_eq!(KeyHash::parse(wrong), None, "{wrong}");
        }
        assert_eq!(KeyHash::parse(&format!("sha256:{}", "é".repeat(32))), None);
    }

    #[test]
    fn two_keys_differ() {
        assert_ne!(
            NewKey::generate().unwrap().reveal(),
            NewKey::generate().unwrap().reveal()
        );
    }

    #[test]
    fn a_name_cannot_be_mistaken_for_a_principal_of_a_token() {
        for name in ["ci", "Team-1_a.b", &"x".repeat(64)] {
            assert!(ApiKey::is_name(name), "{name}");
        }
        for name in ["", "a b", "a:b", "ä", "a\n", &"x".repeat(65)] {
            assert!(!ApiKey::is_name(name), "{name}");
        }
    }
}
