//! Expands variables of the host in parameters, and masks their values in output.
//!
//! `${NAME}` is replaced in every text when a connection is made. All unknown names are reported
//! together. The values are remembered as secrets: [`SecretMask`] removes them from everything that
//! a server sends.
//!
//! Errors and logs are masked more strictly than results. They lose every whole header and
//! environment variable. Results are data that users work with, so only values of `${NAME}` are
//! removed, except those of variables that every program inherits: `${HOME}/notes` is not secret,
//! and a server that lists files must be able to report their paths.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use cellblock_egress::secrets::HiddenValues;
use serde_json::Value;

use crate::child::INHERITED;

/// Replacement for a secret.
const HIDDEN: &str = "[hidden]";
/// Minimum length of a masked value. Masking every `1` in a text would reveal more about the value
/// than it hides.
const MIN_MASKED: usize = 4;

/// Variables of the host. `Debug` prints no value.
#[derive(Clone, Default)]
pub struct Variables(Arc<BTreeMap<String, String>>);

impl Variables {
    pub fn new(variables: impl IntoIterator<Item = (String, String)>) -> Variables {
        Variables(Arc::new(variables.into_iter().collect()))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

impl fmt::Debug for Variables {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Variables({})", self.0.len())
    }
}

/// An expanded value, and the mask for its secrets.
pub(crate) struct Filled<T> {
    pub(crate) value: T,
    pub(crate) mask: SecretMask,
}

/// Names of variables that are used but not set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "these variables are not set where the server runs: {}; set them in its environment (\"env\" \
     of the client's configuration) or in \
     the file .env of the workspace, and start it again",
    .names.join(", ")
)]
pub struct MissingVariables {
    pub names: Vec<String>,
}

/// Expands everything that `write` requests, then reports all missing variables together.
pub(crate) fn fill<T>(
    host: &Variables,
    write: impl FnOnce(&mut Fill<'_>) -> T,
) -> Result<Filled<T>, MissingVariables> {
    let mut fill = Fill {
        host,
        missing: BTreeSet::new(),
        secrets: BTreeSet::new(),
        values: BTreeSet::new(),
    };
    let value = write(&mut fill);
    if !fill.missing.is_empty() {
        return Err(MissingVariables {
            names: fill.missing.into_iter().collect(),
        });
    }
    Ok(Filled {
        value,
        mask: SecretMask::new(fill.secrets, &fill.values),
    })
}

/// Expansion state: texts are expanded and secrets collected.
pub(crate) struct Fill<'a> {
    host: &'a Variables,
    missing: BTreeSet<String>,
    secrets: BTreeSet<String>,
    /// The secrets that are also masked in results.
    values: BTreeSet<String>,
}

impl Fill<'_> {
    /// Expands a text. Only the values of variables are secret.
    pub(crate) fn text(&mut self, text: &str) -> String {
        let mut filled = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, name, after)) = next_variable(rest) {
            filled.push_str(before);
            match self.host.get(name) {
                Some(value) => {
                    filled.push_str(value);
                    self.secrets.insert(value.to_owned());
                    if !INHERITED.contains(&name) {
                        // Programs often strip the line ending that a value was stored with.
                        self.values.insert(value.trim().to_owned());
                    }
                }
                None => {
                    self.missing.insert(name.to_owned());
                }
            }
            rest = after;
        }
        filled.push_str(rest);
        filled
    }

    /// Expands a text that is secret as a whole.
    pub(crate) fn secret(&mut self, text: &str) -> String {
        let filled = self.text(text);
        self.secrets.insert(filled.clone());
        filled
    }
}

pub(crate) fn has_variables(text: &str) -> bool {
    next_variable(text).is_some()
}

/// Returns the text before the next variable, its name, and the text after it.
fn next_variable(text: &str) -> Option<(&str, &str, &str)> {
    let mut from = 0;
    while let Some(found) = text[from..].find("${") {
        let start = from + found;
        let name = &text[start + 2..];
        let length = name
            .bytes()
            .take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
            .count();
        if length > 0 && name[length..].starts_with('}') {
            return Some((&text[..start], &name[..length], &name[length + 1..]));
        }
        from = start + 2;
    }
    None
}

/// Masks secrets in a server's output.
#[derive(Clone, Default)]
pub(crate) struct SecretMask {
    secrets: Arc<[String]>,
    values: HiddenValues,
}

impl SecretMask {
    fn new(secrets: BTreeSet<String>, values: &BTreeSet<String>) -> SecretMask {
        let mut secrets: Vec<String> = secrets
            .into_iter()
            .filter(|value| value.len() >= MIN_MASKED)
            .collect();
        // Longest first, so that of two overlapping secrets no part remains.
        secrets.sort_by_key(|value| std::cmp::Reverse(value.len()));
        SecretMask {
            secrets: secrets.into(),
            values: HiddenValues::new(values.iter().map(String::as_str), HIDDEN),
        }
    }

    /// Returns a text for errors and logs with all secrets masked.
    pub(crate) fn hide(&self, text: &str) -> String {
        let text = self.secrets.iter().fold(text.to_owned(), |text, secret| {
            if text.contains(secret.as_str()) {
                text.replace(secret.as_str(), HIDDEN)
            } else {
                text
            }
        });
        self.values.hide(&text).unwrap_or(text)
    }

    /// Masks the values of variables in every text of a result, in all their encodings. A result
    /// without such values stays unchanged.
    pub(crate) fn hide_within(&self, result: &mut Value) {
        match result {
            Value::String(text) => {
                if let Some(hidden) = self.values.hide(text) {
                    *text = hidden;
                }
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.hide_within(item)),
            Value::Object(members) => {
                members
                    .values_mut()
                    .for_each(|member| self.hide_within(member));
                let names: Vec<(String, String)> = members
                    .keys()
                    .filter_map(|name| Some((name.clone(), self.values.hide(name)?)))
                    .collect();
                for (name, hidden) in names {
                    if let Some(member) = members.remove(&name) {
                        members.insert(hidden, member);
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

impl fmt::Debug for SecretMask {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Mask({})", self.secrets.len())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn host() -> Variables {
        Variables::new(
            [("A", "alpha"), ("B_2", "beta"), ("EMPTY", "")]
                .map(|(name, value)| (name.to_owned(), value.to_owned())),
        )
    }

    fn filled(text: &str) -> Result<String, MissingVariables> {
        fill(&host(), |fill| fill.text(text)).map(|filled| filled.value)
    }

    #[test]
    fn variables_are_filled_anywhere_in_a_text() {
        for (text, expected) in [
            ("${A}", "alpha"),
            ("x${A}y${B_2}z", "xalphaybetaz"),
            ("${A}${A}", "alphaalpha"),
            ("${EMPTY}", ""),
            ("$A ${} ${A ${-} $${A} }", "$A ${} ${A ${-} $alpha }"),
            ("é${A}é", "éalphaé"),
            ("", ""),
        ] {
            assert_eq!(filled(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn a_value_is_not_filled_again() {
        let host = Variables::new([
            ("A".to_owned(), "${B}".to_owned()),
            ("B".to_owned(), "b".to_owned()),
        ]);
        assert_eq!(fill(&host, |fill| fill.text("${A}")).unwrap().value, "${B}");
    }

    #[test]
    fn all_missing_names_are_reported_at_once_and_no_value() {
        let error = filled("${A} ${NO} ${NEITHER} ${NO}").unwrap_err();
        assert_eq!(error.names, ["NEITHER", "NO"]);
        assert!(!format!("{error} {error:?}").contains("alpha"));
    }

    #[test]
    fn what_was_filled_in_is_taken_out_of_texts() {
        let Filled { mask, .. } = fill(&host(), |fill| {
            (fill.text("key=${A}"), fill.secret("Bearer ${B_2}"))
        })
        .unwrap();
        assert_eq!(
            mask.hide("alpha, beta, Bearer beta, gamma"),
            "[hidden], [hidden], [hidden], gamma"
        );
        // Control: without a mask the text is unchanged.
        assert_eq!(SecretMask::default().hide("alpha"), "alpha");
        assert!(!format!("{mask:?} {:?}", host()).contains("alpha"));
    }

    #[test]
    fn values_of_variables_are_taken_out_of_results_and_nothing_else_is() {
        let variables = [
            ("KEY", "k-12345678\n"),
            ("SHORT", "seven77"),
            ("HOME", "/home/somebody"),
        ];
        let host =
            Variables::new(variables.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let write = |fill: &mut Fill<'_>| {
            (
                fill.secret("Bearer ${KEY}"),
                fill.text("${SHORT} ${HOME}"),
                fill.secret("written out"),
            )
        };
        let mask = fill(&host, write).unwrap().mask;
        let mut result = json!({
            "content": [
                {"type": "text", "text": "{\"key\": \"Bearer k-12345678\"}"},
                {"resource": {"text": "ak%2D12345678z"}},
            ],
            "structuredContent": {
                "k-12345678": ["ay0xMjM0NTY3OA==", 12345678, null],
                "path": "/home/somebody/seven77", "other": "written out",
            },
        });
        mask.hide_within(&mut result);
        let expected = json!({
            "content": [
                {"type": "text", "text": "{\"key\": \"Bearer [hidden]\"}"},
                {"resource": {"text": "a[hidden]z"}},
            ],
            "structuredContent": {
                "[hidden]": ["[hidden]A==", 12345678, null],
                "path": "/home/somebody/seven77", "other": "written out",
            },
        });
        assert_eq!(result, expected);
        // Errors are masked more strictly.
        assert_eq!(
            mask.hide("/home/somebody, seven77, written out"),
            "[hidden], [hidden], [hidden]"
        );
    }
}
