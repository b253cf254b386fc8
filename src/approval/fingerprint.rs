//! Fingerprints: what a tool was when somebody looked at it.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Names everything that makes a tool this tool: its definition and how its server is reached. Two that differ have two fingerprints.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Makes one of parts, each of which counts at its place.
    pub fn of(parts: &[&[u8]]) -> Fingerprint {
        let mut hash = Sha256::new();
        for part in parts {
            // No two lists of parts feed the same bytes.
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

    /// Reads one as it is printed.
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
