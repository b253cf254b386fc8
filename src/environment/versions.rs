//! Ranges of Python versions, in the syntax of `requires-python`: `>=3.11,<3.14`.
//!
//! Only versions of released CPythons are supported: plain numbers, no pre-releases, no letters.

use std::cmp::Ordering;

/// Clauses that a version must all satisfy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VersionRange(Vec<Clause>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Clause {
    comparison: Comparison,
    version: Vec<u32>,
    /// `==3.12.*`: only the numbers before the `*` are compared.
    is_prefix: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    AtLeast,
    AtMost,
    Above,
    Below,
    Equal,
    Unequal,
    Compatible,
}

/// Longer operators first: `>` is a prefix of `>=`.
const SIGNS: [(&str, Comparison); 7] = [
    (">=", Comparison::AtLeast),
    ("<=", Comparison::AtMost),
    ("==", Comparison::Equal),
    ("!=", Comparison::Unequal),
    ("~=", Comparison::Compatible),
    (">", Comparison::Above),
    ("<", Comparison::Below),
];

impl VersionRange {
    /// Parses a range, or returns `None` if it is invalid.
    pub(super) fn parse(text: &str) -> Option<VersionRange> {
        text.split(',')
            .map(|clause| Clause::parse(clause.trim()))
            .collect::<Option<Vec<_>>>()
            .map(VersionRange)
    }

    /// Returns whether a version such as `3.12.4` is in the range.
    pub(super) fn contains(&self, version: &str) -> bool {
        numbers(version).is_some_and(|version| self.0.iter().all(|clause| clause.accepts(&version)))
    }
}

impl Clause {
    fn parse(text: &str) -> Option<Clause> {
        let (sign, comparison) = SIGNS.into_iter().find(|(sign, _)| text.starts_with(sign))?;
        let written = text[sign.len()..].trim();
        let is_equality = matches!(comparison, Comparison::Equal | Comparison::Unequal);
        let (written, is_prefix) = match written.strip_suffix(".*") {
            Some(prefix) if is_equality => (prefix, true),
            Some(_) => return None,
            None => (written, false),
        };
        let version = numbers(written)?;
        // `~=3` is meaningless: there must be a last number that may increase.
        let says_enough = comparison != Comparison::Compatible || version.len() >= 2;
        says_enough.then_some(Clause {
            comparison,
            version,
            is_prefix,
        })
    }

    fn accepts(&self, version: &[u32]) -> bool {
        let order = compare(version, &self.version);
        match self.comparison {
            Comparison::AtLeast => order.is_ge(),
            Comparison::AtMost => order.is_le(),
            Comparison::Above => order.is_gt(),
            Comparison::Below => order.is_lt(),
            Comparison::Equal => self.equals(version),
            Comparison::Unequal => !self.equals(version),
            Comparison::Compatible => {
                order.is_ge()
                    && starts_with(
                        version,
                        &self.version[..self.version.len().saturating_sub(1)],
                    )
            }
        }
    }

    fn equals(&self, version: &[u32]) -> bool {
        if self.is_prefix {
            starts_with(version, &self.version)
        } else {
            compare(version, &self.version).is_eq()
        }
    }
}

fn numbers(version: &str) -> Option<Vec<u32>> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// Compares versions. Missing numbers are zero.
fn compare(left: &[u32], right: &[u32]) -> Ordering {
    let length = left.len().max(right.len());
    let padded = |numbers: &[u32]| {
        (0..length)
            .map(|place| numbers.get(place).copied().unwrap_or(0))
            .collect::<Vec<_>>()
    };
    padded(left).cmp(&padded(right))
}

fn starts_with(version: &[u32], prefix: &[u32]) -> bool {
    (0..prefix.len()).all(|place| version.get(place).copied().unwrap_or(0) == prefix[place])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_must_fulfil_every_clause() {
        for (range, inside, outside) in [
            (">=3.11", "3.11.0", "3.10.9"),
            (">=3.10, <3.13", "3.12.9", "3.13.0"),
            (">3.11", "3.11.2", "3.11.0"),
            ("<=3.12", "3.12.0", "3.12.1"),
            ("==3.12.*", "3.12.4", "3.120.0"),
            ("==3.12.4", "3.12.4", "3.12.5"),
            (">=3.10,!=3.11.*", "3.12.0", "3.11.7"),
            ("~=3.11", "3.14.1", "4.0.0"),
            ("~=3.11.2", "3.11.9", "3.12.0"),
        ] {
            let parsed = VersionRange::parse(range).unwrap();
            assert!(parsed.contains(inside), "{inside} is in {range}");
            assert!(!parsed.contains(outside), "{outside} is not in {range}");
        }
    }

    #[test]
    fn what_is_not_a_range_is_not_guessed_at() {
        for bad in [
            "",
            "3.12",
            ">=",
            ">=3.12rc1",
            ">=3.*",
            "=3.12",
            "~=3",
            ">=3.10,",
            "^3.11",
        ] {
            assert_eq!(VersionRange::parse(bad), None, "{bad:?}");
        }
    }
}
