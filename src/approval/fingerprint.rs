//! Fingerprints: the identity of a tool when it was inspected.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Identifies a tool by its definition and by how its server is reached. Tools that differ in one
/// of them have different fingerprints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Creates a fingerprint from parts; their order matters.
    pub fn of(parts: &[&[u8]]) -> Fingerprint {
        let mut hash = Sha256::new();
        for part in parts {
            // The length prefix ensures that no two lists of parts hash the same bytes.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Fingerprint(
            hash.finalize()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }

    /// Parses the printed form.
    pub(super) fn parse(text: &str) -> Option<Fingerprint> {
        let is_one = text.len() == 64
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_one.then(|| Fingerprint(text.to_owned()))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_tells_its_parts_apart_and_can_be_read_again() {
        let one = Fingerprint::of(&[b"ab", b"c"]);
        assert_ne!(one, Fingerprint::of(&[b"a", b"bc"]));
        assert_ne!(one, Fingerprint::of(&[b"abc"]));
        assert_eq!(Fingerprint::parse(&one.to_string()), Some(one));
        for bad in ["", "ab", &"g".repeat(64), &"A".repeat(64)] {
            assert_eq!(Fingerprint::parse(bad), None, "{bad}");
        }
    }
}
