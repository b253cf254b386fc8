//! The environment variables that a sandbox sees.

use std::collections::BTreeMap;
use std::fmt;

/// Names and values of the sandbox's variables. `Debug` prints names only, because values are often
/// secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SandboxVariables(BTreeMap<String, String>);

impl SandboxVariables {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Adds a variable, replacing an earlier one of the same name.
    pub fn set(&mut self, name: String, value: String) {
        self.0.insert(name, value);
    }

    /// Removes a variable and returns whether it existed.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    pub fn as_map(&self) -> &BTreeMap<String, String> {
        &self.0
    }
}

impl fmt::Debug for SandboxVariables {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_map()
            .entries(self.0.keys().map(|name| (name, Redacted)))
            .finish()
    }
}

struct Redacted;

impl fmt::Debug for Redacted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("[redacted]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printing_variables_shows_names_and_no_values() {
        let mut variables = SandboxVariables::default();
        variables.set("TOKEN".to_owned(), "hunter2".to_owned());
        assert_eq!(format!("{variables:?}"), r#"{"TOKEN": [redacted]}"#);
        assert_eq!(variables.get("TOKEN"), Some("hunter2"));
        assert!(variables.remove("TOKEN") && !variables.remove("TOKEN"));
        assert_eq!(variables.get("TOKEN"), None);
    }
}
