//! `cellblock key …`: API keys from the command line.
//!
//! The key itself is printed once and not stored. The operator hands it to a caller and adds the
//! printed lines with its hash to the configuration.

use std::io::Write;

use anyhow::bail;

use super::cli::KeyCommand;
use crate::auth::{ApiKey, NewKey, Scope};

/// Executes one command and writes its result to `output`.
pub(super) fn execute(command: &KeyCommand, output: &mut dyn Write) -> anyhow::Result<()> {
    let KeyCommand::New { name, scopes } = command;
    if !ApiKey::is_name(name) {
        bail!(
            "a key cannot be called \"{name}\"; allowed: {}",
            ApiKey::NAME_ALLOWED
        );
    }
    let key = NewKey::generate()?;
    output.write_all(lines(name, scopes, &key).as_bytes())?;
    Ok(())
}

fn lines(name: &str, scopes: &[String], key: &NewKey) -> String {
    let usual = [Scope::Execute.name().to_owned()];
    let scopes = if scopes.is_empty() { &usual } else { scopes };
    format!(
        "The key, which is shown only this once:\n\n{}\n\nWhat the server must know, for its \
         configuration file:\n\n\
         auth:\n  api_keys:\n    - name: \"{name}\"\n      hash: {}\n      scopes: [{}]\n",
        key.reveal(),
        key.hash(),
        scopes
            .iter()
            .map(|scope| format!("\"{scope}\""))
            .collect::<Vec<_>>()
            .join(", "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(name: &str, scopes: &[&str]) -> anyhow::Result<String> {
        let scopes = scopes.iter().map(|scope| (*scope).to_owned()).collect();
        let mut output = Vec::new();
        execute(
            &KeyCommand::New {
                name: name.to_owned(),
                scopes,
            },
            &mut output,
        )?;
        Ok(String::from_utf8(output)?)
    }

    #[test]
    fn a_key_is_printed_once_with_the_lines_about_its_hash() {
        let text = printed("ci", &[]).unwrap();
        let key = text
            .lines()
            .find(|line| line.starts_with("cellblock_"))
            .unwrap();
        assert_eq!(text.matches(key).count(), 1);
        assert!(
            text.contains("    - name: \"ci\"\n      hash: sha256:"),
            "{text}"
        );
        assert!(
            text.ends_with("      scopes: [\"python:execute\"]\n"),
            "{text}"
        );
        assert_ne!(text, printed("ci", &[]).unwrap(), "every key is new");
    }

    #[test]
    fn the_scopes_are_those_that_were_asked_for() {
        let text = printed("watch", &["sessions:read", "admin"]).unwrap();
        assert!(
            text.ends_with("      scopes: [\"sessions:read\", \"admin\"]\n"),
            "{text}"
        );
    }

    #[test]
    fn a_name_that_could_not_be_written_down_is_refused() {
        assert!(
            printed("a\"\nb", &[])
                .unwrap_err()
                .to_string()
                .contains("1 to 64 letters")
        );
    }
}
