//! Variables of the host, filled into parameters, and what must not be seen of them afterwards.
//!
//! `${NAME}` is replaced when a connection is made, in every text. Names that are not known are reported, all at once. What was filled in is
//! remembered as secret: [`Mask`] takes it out of everything that a server says.
//!
//! Errors and logs lose more than results do. There, every whole header and variable of an environment is hidden. Results are data that somebody works
//! with, so only values of `${NAME}` are taken out of them, not of those that every program inherits: `${HOME}/notes` is no secret, and a server
//! that lists files must be able to say where they are.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use cellblock_egress::secrets::Hidden;
use serde_json::Value;

use crate::child::INHERITED;

/// What stands where a secret was.
const HIDDEN: &str = "[hidden]";
/// Shorter values are not looked for: taking every `1` out of a text would say more about the value than it hides.
const SHORTEST_MASKED: usize = 4;

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

/// Something filled in, and the mask for what that was.
pub(crate) struct Filled<T> {
    pub(crate) value: T,
    pub(crate) mask: Mask,
}

/// Names that are asked for and are not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "these variables are not set where the server runs: {}; set them in its environment (\"env\" of the client's configuration) or in \
     the file .env of the workspace, and start it again",
    .names.join(", ")
)]
pub struct MissingVariables {
    pub names: Vec<String>,
}

/// Fills in whatever `write` asks for, and then tells whether all of it was there.
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
        mask: Mask::new(fill.secrets, &fill.values),
    })
}

/// Texts on their way to being filled in.
pub(crate) struct Fill<'a> {
    host: &'a Variables,
    missing: BTreeSet<String>,
    secrets: BTreeSet<String>,
    /// The secrets that are not in results either.
    values: BTreeSet<String>,
}

impl Fill<'_> {
    /// Fills in a text. Only what comes from variables is secret.
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
                        // Whoever uses a value often takes the line end away that it was stored with.
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

    /// Fills in a text that is secret as a whole.
    pub(crate) fn secret(&mut self, text: &str) -> String {
        let filled = self.text(text);
        self.secrets.insert(filled.clone());
        filled
    }
}

pub(crate) fn has_variables(text: &str) -> bool {
    next_variable(text).is_some()
}

/// Returns what is before the next variable, its name, and what follows.
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

/// Takes secrets out of what a server says.
#[derive(Clone, Default)]
pub(crate) struct Mask {
    secrets: Arc<[String]>,
    values: Hidden,
}

impl Mask {
    fn new(secrets: BTreeSet<String>, values: &BTreeSet<String>) -> Mask {
        let mut secrets: Vec<String> = secrets
            .into_iter()
            .filter(|value| value.len() >= SHORTEST_MASKED)
            .collect();
        // The longest first, so that of two that overlap nothing is left.
        secrets.sort_by_key(|value| std::cmp::Reverse(value.len()));
        Mask {
            secrets: secrets.into(),
            values: Hidden::new(values.iter().map(String::as_str), HIDDEN),
        }
    }

    /// Returns a sentence for errors and logs without secrets.
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

    /// Takes the values of variables out of every text in a result, however they are spelled. What has none stays as it is.
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

impl fmt::Debug for Mask {
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
        // The control: without a mask all of it is there.
        assert_eq!(Mask::default().hide("alpha"), "alpha");
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
            "content": [{"type": "text", "text": "{\"key\": \"Bearer k-12345678\"}"}, {"resource": {"text": "ak%2D12345678z"}}],
            "structuredContent": {"k-12345678": ["ay0xMjM0NTY3OA==", 12345678, null], "path": "/home/somebody/seven77", "other": "written out"},
        });
        mask.hide_within(&mut result);
        let expected = json!({
            "content": [{"type": "text", "text": "{\"key\": \"Bearer [hidden]\"}"}, {"resource": {"text": "a[hidden]z"}}],
            "structuredContent": {"[hidden]": ["[hidden]A==", 12345678, null], "path": "/home/somebody/seven77", "other": "written out"},
        });
        assert_eq!(result, expected);
        // Errors lose more.
        assert_eq!(
            mask.hide("/home/somebody, seven77, written out"),
            "[hidden], [hidden], [hidden]"
        );
    }
}
