//! Patterns: text in which `*` matches any text, including none, also across lines.
//!
//! `\*` is a star and `\\` a backslash, so every text has a pattern that matches it and nothing
//! else.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The longest pattern in bytes. Handwritten patterns are shorter, and for an exact command line of
/// this length it is better to ask again.
const LONGEST: usize = 4096;

/// A text with stars.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Pattern {
    /// The texts between the stars; one more than there are stars.
    pieces: Vec<String>,
}

/// A text that is not a valid pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPattern {
    #[error("a pattern may have {LONGEST} bytes")]
    TooLong,
    #[error("a backslash in a pattern stands before a `*` or another backslash")]
    Backslash,
}

impl Pattern {
    /// The pattern that matches everything.
    pub fn anything() -> Pattern {
        Pattern {
            pieces: vec![String::new(), String::new()],
        }
    }

    /// The pattern that matches this text only.
    pub fn exactly(text: &str) -> Pattern {
        Pattern {
            pieces: vec![text.to_owned()],
        }
    }

    pub fn parse(text: &str) -> Result<Pattern, BadPattern> {
        if text.len() > LONGEST {
            return Err(BadPattern::TooLong);
        }
        let mut pieces = vec![String::new()];
        let mut letters = text.chars();
        while let Some(letter) = letters.next() {
            let literal = match letter {
                // Consecutive stars count as one.
                '*' if pieces.len() > 1 && pieces.last().is_some_and(String::is_empty) => continue,
                '*' => {
                    pieces.push(String::new());
                    continue;
                }
                '\\' => letters
                    .next()
                    .filter(|next| matches!(next, '*' | '\\'))
                    .ok_or(BadPattern::Backslash)?,
                other => other,
            };
            pieces
                .last_mut()
                .expect("there is always one")
                .push(literal);
        }
        Ok(Pattern { pieces })
    }

    pub fn fits(&self, text: &str) -> bool {
        let (first, rest) = self.pieces.split_first().expect("there is always one");
        let Some((last, middle)) = rest.split_last() else {
            return text == first;
        };
        let Some(mut left) = text
            .strip_prefix(first.as_str())
            .and_then(|left| left.strip_suffix(last.as_str()))
        else {
            return false;
        };
        // The earliest match of each piece leaves the most text for the following ones.
        middle.iter().all(|piece| match left.find(piece.as_str()) {
            Some(at) => {
                left = &left[at + piece.len()..];
                true
            }
            None => false,
        })
    }

    /// Returns whether it matches everything.
    pub fn is_anything(&self) -> bool {
        *self == Pattern::anything()
    }

    /// Returns the only text that it matches, if it has no star.
    pub fn text(&self) -> Option<&str> {
        if let [only] = self.pieces.as_slice() {
            Some(only)
        } else {
            None
        }
    }

    /// Returns whether it has a star.
    pub(super) fn is_open(&self) -> bool {
        self.pieces.len() > 1
    }

    /// Returns whether one of its fixed parts contains this text.
    pub(super) fn spells(&self, text: &str) -> bool {
        self.pieces.iter().any(|piece| piece.contains(text))
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> String {
        pattern.to_string()
    }
}

impl TryFrom<String> for Pattern {
    type Error = BadPattern;

    fn try_from(text: String) -> Result<Pattern, BadPattern> {
        Pattern::parse(&text)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, piece) in self.pieces.iter().enumerate() {
            if number > 0 {
                formatter.write_str("*")?;
            }
            formatter.write_str(&piece.replace('\\', r"\\").replace('*', r"\*"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(pattern: &str, text: &str, fits: bool) {
        assert_eq!(
            Pattern::parse(pattern).unwrap().fits(text),
            fits,
            "{pattern:?} and {text:?}"
        );
    }

    #[test]
    fn a_star_stands_for_any_text_and_everything_else_for_itself() {
        check("", "", true);
        check("", "a", false);
        check("*", "", true);
        check("*", "a\nb", true);
        check("create_*", "create_issue", true);
        check("create_*", "recreate_issue", false);
        check("*.example.com", "api.example.com", true);
        check("*.example.com", "example.com", false);
        check("a*b*c", "a-b-b-c", true);
        check("a*b*c", "a-c-b", false);
        check("ab*ba", "aba", false);
        check("a?c", "abc", false);
        check("[a]", "a", false);
    }

    #[test]
    fn a_star_can_be_meant_as_a_star() {
        check(r"rm \*", "rm *", true);
        check(r"rm \*", "rm -rf /", false);
        check(r"a\\b", r"a\b", true);
        for bad in [r"\", r"a\b", r"\n"] {
            assert_eq!(Pattern::parse(bad), Err(BadPattern::Backslash), "{bad:?}");
        }
    }

    #[test]
    fn a_pattern_has_a_longest_length() {
        assert!(Pattern::parse(&"a".repeat(LONGEST)).is_ok());
        assert_eq!(
            Pattern::parse(&"a".repeat(LONGEST + 1)),
            Err(BadPattern::TooLong)
        );
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_as_the_same_pattern(text in r"[ab*.\\]{0,12}") {
            if let Ok(pattern) = Pattern::parse(&text) {
                prop_assert_eq!(Pattern::parse(&pattern.to_string()), Ok(pattern));
            }
        }

        #[test]
        fn an_exact_pattern_fits_its_text_and_no_other(
            text in any::<String>(),
            other in any::<String>(),
        ) {
            let printed = Pattern::parse(&Pattern::exactly(&text).to_string()).unwrap();
            prop_assert!(printed.fits(&text));
            prop_assert_eq!(printed.fits(&other), text == other);
        }

        #[test]
        fn stars_find_what_was_put_in_their_places(
            a in "[ab]{0,3}",
            b in "[ab]{0,3}",
            c in "[ab]{0,3}",
            x in "[ab]{0,4}",
            y in "[ab]{0,4}",
        ) {
            let pattern = Pattern::parse(&format!("{a}*{b}*{c}")).unwrap();
            let text = format!("{a}{x}{b}{y}{c}");
            prop_assert!(pattern.fits(&text));
        }
    }
}
