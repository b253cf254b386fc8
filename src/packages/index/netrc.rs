//! Host passwords from the file `.netrc`, which pip and uv read too.
//!
//! ```text
//! machine index.example.com login me password secret
//! ```
//!
//! Only entries that name a host are used; the entry `default` would send a password to hosts that
//! it was never meant for.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;

/// User name and password of each host, percent-encoded for a URL.
pub(super) type Passwords = HashMap<String, String>;

/// Maximum size of the file.
const LARGEST: u64 = 1 << 20;

/// Reads the file that `variables` name, or the one in the home directory. A missing file gives no
/// passwords.
pub(super) fn read(variables: &BTreeMap<String, String>) -> Passwords {
    let value = |name: &str| variables.get(name).filter(|value| !value.is_empty());
    let named = value("NETRC").map(PathBuf::from);
    let Some(path) = named.or_else(|| value("HOME").map(|home| PathBuf::from(home).join(".netrc")))
    else {
        return Passwords::new();
    };
    let is_small = fs::metadata(&path).is_ok_and(|found| found.is_file() && found.len() <= LARGEST);
    fs::read_to_string(path)
        .ok()
        .filter(|_| is_small)
        .map(|text| passwords_in(&text))
        .unwrap_or_default()
}

fn passwords_in(text: &str) -> Passwords {
    let text = without_macros(text);
    let mut words = text.split_whitespace();
    let mut found = Passwords::new();
    let mut entry = Entry::default();
    while let Some(word) = words.next() {
        match word {
            "machine" => {
                std::mem::replace(&mut entry, Entry::of(words.next())).put_into(&mut found)
            }
            "default" => std::mem::take(&mut entry).put_into(&mut found),
            "login" => entry.login = words.next(),
            "password" => entry.password = words.next(),
            "account" => drop(words.next()),
            _ => {}
        }
    }
    entry.put_into(&mut found);
    found
}

#[derive(Default)]
struct Entry<'a> {
    host: Option<&'a str>,
    login: Option<&'a str>,
    password: Option<&'a str>,
}

impl<'a> Entry<'a> {
    fn of(host: Option<&'a str>) -> Entry<'a> {
        Entry {
            host,
            ..Entry::default()
        }
    }

    /// Adds the entry if it has a password. The first entry of a host takes precedence.
    fn put_into(self, found: &mut Passwords) {
        if let (Some(host), Some(password)) = (self.host, self.password) {
            let credentials = format!(
                "{}:{}",
                encoded(self.login.unwrap_or_default()),
                encoded(password)
            );
            found
                .entry(host.to_ascii_lowercase())
                .or_insert(credentials);
        }
    }
}

/// Removes comments and macros. A macro ends at the next empty line.
fn without_macros(text: &str) -> String {
    let mut in_macro = false;
    let mut kept = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        in_macro = if in_macro {
            !line.is_empty()
        } else {
            line.split_whitespace().next() == Some("macdef")
        };
        if !in_macro && !line.starts_with('#') {
            kept.push(line);
        }
    }
    kept.join("\n")
}

/// Percent-encodes every character that has a special meaning in a URL.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| {
            if plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_however_they_are_spread_over_lines() {
        let text = "# mine\nmachine A.example login me password p@ss\nmachine b.example\n  login \
                    you\n  account x\n  password y\n\
                    machine c.example login nobody\nmachine a.example login other password other\n\
                    macdef init\nmachine d.example login x password x\n\nmachine e.example \
                    password only\n\
                    default login anyone password anything";
        let expected = [
            ("a.example", "me:p%40ss"),
            ("b.example", "you:y"),
            ("e.example", ":only"),
        ];
        let expected =
            expected.map(|(host, credentials)| (host.to_owned(), credentials.to_owned()));
        assert_eq!(passwords_in(text), Passwords::from(expected));
    }

    #[test]
    fn the_file_is_the_one_that_is_named_or_the_one_at_home() {
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("named");
        fs::write(
            folder.path().join(".netrc"),
            "machine home.example password a",
        )
        .unwrap();
        fs::write(&named, "machine named.example password a").unwrap();
        let home = ("HOME".to_owned(), folder.path().display().to_string());
        let named = ("NETRC".to_owned(), named.display().to_string());
        let hosts = |variables: Vec<(String, String)>| {
            read(&variables.into_iter().collect())
                .into_keys()
                .collect::<Vec<_>>()
        };
        assert_eq!(hosts(vec![home.clone()]), ["home.example"]);
        assert_eq!(hosts(vec![home, named]), ["named.example"]);
        assert!(hosts(Vec::new()).is_empty());
    }
}
