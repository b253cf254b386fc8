//! Secrets: values that never enter the sandbox.
//!
//! Inside the sandbox a variable holds a *placeholder*, `cellblock-NAME-` and 22 random characters.
//! A program uses it as if it were the value. In requests to the hosts that the secret belongs to,
//! the placeholder is replaced by the value, and in their responses every occurrence of the value
//! becomes the placeholder again.
//!
//! ```text
//!  Secret     as configured by the operator: name, value, hosts, and where the value may appear
//!  Vault      the secrets of a server with their placeholders
//!  Hidden     values without a placeholder, which are only removed from texts
//!  requests   placeholders become values
//!  mask       values become placeholders
//!  encoding   encodings of a value
//! ```
//!
//! A value is inserted only into HTTPS requests, which are terminated here (`terminate`). **In
//! plain HTTP placeholders are not replaced**, since the value must not travel unencrypted. A
//! request to any other host carries the placeholder, which is worthless there.
//!
//! A value is never empty, has no line breaks, and does not appear in `Debug` output or in errors.
//! Its memory is cleared when the last owner is dropped. Copies in buffers of the HTTP and TLS
//! libraries cannot be cleared.

mod encoding;
mod mask;
mod requests;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use hyper::header::{self, HeaderName};
use zeroize::Zeroizing;

use crate::name::{HostName, NameError};
pub(crate) use mask::Masker;
use mask::Patterns;
pub(crate) use requests::{BodyKind, HostSecrets, RequestNote};

/// Minimum length. A shorter value would occur in ordinary text by chance, and could be guessed by
/// observing what is masked.
const MIN_VALUE: usize = 8;

/// Fits into a header line, which has this limit at most servers.
const MAX_VALUE_LENGTH: usize = 8 * 1024;

const MAX_NAME_LENGTH: usize = 100;

/// 22 characters of 6 bits: 132 bits, which cannot be guessed.
const RANDOM_CHARACTERS: usize = 22;

/// The prefix of every placeholder.
const PLACEHOLDER_START: &str = "cellblock-";

/// One secret as the operator configured it. Clones share the value.
#[derive(Clone)]
pub struct Secret {
    name: Arc<str>,
    hosts: Arc<[HostName]>,
    /// The only header that may carry the value. If not set: any header, the path, the query, and
    /// bodies of text.
    header: Option<HeaderName>,
    value: Arc<Zeroizing<String>>,
}

/// Reason why a secret is invalid. Never contains the value, nor text that could be one by mistake.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error(
        "a secret is written NAME=env:VARIABLE@host or NAME=file:/path@host, with `:Header` at the \
         end if only that header may carry it"
    )]
    Form,
    #[error(
        "the name of a secret becomes a variable: use letters, digits and underscores, at most \
         {MAX_NAME_LENGTH}, and no digit at its start"
    )]
    Name,
    #[error("secret {name}: {host:?} is not the name of a host")]
    Host {
        name: Arc<str>,
        host: String,
        #[source]
        cause: NameError,
    },
    #[error(
        "secret {name}: {header:?} is not a header that can carry a secret; a secret belongs to a \
         host at every port"
    )]
    Header { name: Arc<str>, header: String },
    #[error("secret {name}: the variable that holds its value is not set")]
    NotSet { name: Arc<str> },
    #[error("secret {name}: its file could not be read")]
    File {
        name: Arc<str>,
        #[source]
        cause: io::Error,
    },
    #[error(
        "secret {name}: other users may read or change its file; allow only its owner (chmod 600)"
    )]
    FileOpenToOthers { name: Arc<str> },
    #[error("secret {name}: the value must have {MIN_VALUE} to {MAX_VALUE_LENGTH} bytes")]
    Length { name: Arc<str> },
    #[error("secret {name}: the value must be one line of text, without control characters")]
    NotOneLine { name: Arc<str> },
    #[error("secret {name} is given twice")]
    Twice { name: Arc<str> },
    #[error("the system gave no random numbers for placeholders")]
    NoRandomness,
}

impl Secret {
    /// Passes the value to `look`, which compares secrets and must not keep any part of it.
    pub fn compare<R>(&self, look: impl FnOnce(&str) -> R) -> R {
        look(&self.value)
    }

    /// Parses `NAME=env:VARIABLE@host[,host…][:Header]` or `NAME=file:/path@…`, and gets the value:
    /// a variable from `lookup`, a file by reading it (one trailing line break is removed; a file
    /// that other users may read is rejected).
    pub fn parse(
        text: &str,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Secret, SecretError> {
        let (name, rest) = text.split_once('=').ok_or(SecretError::Form)?;
        let (source, place) = rest.rsplit_once('@').ok_or(SecretError::Form)?;
        let (kind, source) = source.split_once(':').ok_or(SecretError::Form)?;
        if source.is_empty() || !matches!(kind, "env" | "file") {
            return Err(SecretError::Form);
        }
        if !is_variable_name(name) {
            return Err(SecretError::Name);
        }
        let name = Arc::<str>::from(name);
        let (hosts, header) = place
            .split_once(':')
            .map_or((place, None), |(hosts, header)| (hosts, Some(header)));
        let hosts = hosts
            .split(',')
            .map(|host| parse_host(&name, host))
            .collect::<Result<_, _>>()?;
        let header = header
            .map(|header| parse_header(&name, header))
            .transpose()?;
        let value = match kind {
            "env" => lookup(source)
                .map(Zeroizing::new)
                .ok_or_else(|| SecretError::NotSet { name: name.clone() })?,
            _ => read_file(&name, Path::new(source))?,
        };
        check_value(&name, &value)?;
        Ok(Secret {
            name,
            hosts,
            header,
            value: Arc::new(value),
        })
    }

    /// Returns the name of the variable that holds the placeholder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the hosts that the value may be sent to.
    pub fn hosts(&self) -> &[HostName] {
        &self.hosts
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Secret")
            .field("name", &self.name)
            .field("hosts", &self.hosts)
            .field("header", &self.header)
            .field("value", &format_args!("[redacted]"))
            .finish()
    }
}

/// The secrets of a server, with placeholders that no other server has. A copy of a session has the
/// same variables in its memory, so it must get the same vault.
#[derive(Default)]
pub struct Vault {
    entries: Vec<Arc<Entry>>,
    hosts: BTreeMap<HostName, Arc<HostSecrets>>,
    all: Arc<Patterns>,
}

struct Entry {
    secret: Secret,
    placeholder: Arc<str>,
}

impl Vault {
    /// Generates new placeholders for `secrets`, whose names must differ.
    pub fn new(secrets: Vec<Secret>) -> Result<Vault, SecretError> {
        let mut entries: Vec<Arc<Entry>> = Vec::new();
        for secret in secrets {
            if entries.iter().any(|entry| entry.secret.name == secret.name) {
                return Err(SecretError::Twice { name: secret.name });
            }
            let placeholder = Arc::from(format!(
                "{PLACEHOLDER_START}{}-{}",
                secret.name,
                random_characters()?
            ));
            entries.push(Arc::new(Entry {
                secret,
                placeholder,
            }));
        }
        let names = entries.iter().flat_map(|entry| entry.secret.hosts.iter());
        let hosts = names
            .map(|name| (name.clone(), Arc::new(HostSecrets::new(name, &entries))))
            .collect();
        let all = Arc::new(patterns(entries.iter()));
        Ok(Vault {
            entries,
            hosts,
            all,
        })
    }

    /// Returns a vault without secrets.
    pub fn none() -> Vault {
        Vault::default()
    }

    /// Returns whether there is no secret at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the variables for the session's environment: names and placeholders.
    pub fn variables(&self) -> Vec<(String, String)> {
        self.entries
            .iter()
            .map(|entry| (entry.secret.name.to_string(), entry.placeholder.to_string()))
            .collect()
    }

    /// Returns whether some secret belongs to the host `name`.
    pub fn has(&self, name: &HostName) -> bool {
        self.hosts.contains_key(name)
    }

    /// Returns the hosts that have a secret, in order.
    pub fn hosts(&self) -> impl Iterator<Item = &HostName> {
        self.hosts.keys()
    }

    /// Returns `text` with every value in it, in any encoding, replaced by its placeholder. For
    /// logs and results.
    pub fn mask(&self, text: &str) -> String {
        String::from_utf8_lossy(&self.all.mask(text.as_bytes())).into_owned()
    }

    /// Returns the data for requests to the host `name`, if it has a secret.
    pub(crate) fn for_host(&self, name: &HostName) -> Option<Arc<HostSecrets>> {
        self.hosts.get(name).cloned()
    }
}

impl fmt::Debug for Vault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_list()
            .entries(self.entries.iter().map(|entry| &entry.secret))
            .finish()
    }
}

/// Values that must not appear in texts, such as credentials of other servers. Clones share them.
#[derive(Clone, Default)]
pub struct HiddenValues(Arc<Patterns>);

impl HiddenValues {
    /// Hides `values` and writes `instead` in their place. Values too short to be distinguished
    /// from ordinary text are left out.
    pub fn new<'a>(values: impl IntoIterator<Item = &'a str>, instead: &str) -> HiddenValues {
        let instead: Arc<str> = Arc::from(instead);
        let long = values.into_iter().filter(|value| value.len() >= MIN_VALUE);
        HiddenValues(Arc::new(Patterns::new(long.map(|value| (value, &instead)))))
    }

    /// Returns `text` without the values, in any encoding, or `None` if it contains none of them.
    pub fn hide(&self, text: &str) -> Option<String> {
        let is_possible = self.0.finds_something(text.as_bytes());
        is_possible.then(|| String::from_utf8_lossy(&self.0.mask(text.as_bytes())).into_owned())
    }
}

impl fmt::Debug for HiddenValues {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Hidden")
    }
}

fn patterns<'a>(entries: impl Iterator<Item = &'a Arc<Entry>>) -> Patterns {
    Patterns::new(entries.map(|entry| (entry.secret.value.as_str(), &entry.placeholder)))
}

fn is_variable_name(name: &str) -> bool {
    name.len() <= MAX_NAME_LENGTH
        && name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && name
            .chars()
            .all(|character| character.is_ascii_alphanumeric() || character == '_')
}

fn parse_host(name: &Arc<str>, host: &str) -> Result<HostName, SecretError> {
    HostName::parse(host).map_err(|cause| SecretError::Host {
        name: name.clone(),
        host: host.to_owned(),
        cause,
    })
}

/// Rejects text that looks like a port, and headers that define the framing of the message.
fn parse_header(name: &Arc<str>, text: &str) -> Result<HeaderName, SecretError> {
    const FRAMING: [HeaderName; 6] = [
        header::HOST,
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::ACCEPT_ENCODING,
    ];
    HeaderName::from_bytes(text.as_bytes())
        .ok()
        .filter(|header| {
            !FRAMING.contains(header) && !text.bytes().all(|byte| byte.is_ascii_digit())
        })
        .ok_or_else(|| SecretError::Header {
            name: name.clone(),
            header: text.to_owned(),
        })
}

fn read_file(name: &Arc<str>, path: &Path) -> Result<Zeroizing<String>, SecretError> {
    let failed = |cause| SecretError::File {
        name: name.clone(),
        cause,
    };
    // Checked before the file is opened, because opening a pipe could block forever.
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a plain file",
        )));
    }
    if metadata.permissions().mode() & 0o027 != 0 {
        return Err(SecretError::FileOpenToOthers { name: name.clone() });
    }
    let file = std::fs::File::open(path).map_err(failed)?;
    // With capacity for the whole value, so that a growing buffer does not leave a copy behind.
    let mut value = Zeroizing::new(String::with_capacity(MAX_VALUE_LENGTH + 64));
    file.take(MAX_VALUE_LENGTH as u64 + 3)
        .read_to_string(&mut value)
        .map_err(failed)?;
    let length = value.strip_suffix('\n').map_or(value.len(), |line| {
        line.strip_suffix('\r').unwrap_or(line).len()
    });
    value.truncate(length);
    Ok(value)
}

fn check_value(name: &Arc<str>, value: &str) -> Result<(), SecretError> {
    if !(MIN_VALUE..=MAX_VALUE_LENGTH).contains(&value.len()) {
        return Err(SecretError::Length { name: name.clone() });
    }
    if value.chars().any(char::is_control) || value.trim() != value {
        return Err(SecretError::NotOneLine { name: name.clone() });
    }
    Ok(())
}

/// Returns random characters that need no encoding anywhere.
fn random_characters() -> Result<String, SecretError> {
    let mut bytes = [0; RANDOM_CHARACTERS];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random
        .fill(&mut bytes)
        .map_err(|_| SecretError::NoRandomness)?;
    let alphabet = base64::alphabet::URL_SAFE.as_str().as_bytes();
    Ok(bytes
        .iter()
        .map(|byte| char::from(alphabet[usize::from(byte & 63)]))
        .collect())
}

/// Encodes text as programs do, for tests of other modules.
#[cfg(test)]
pub(crate) fn base64_for_tests(text: &str) -> String {
    String::from_utf8(encoding::base64(text.as_bytes())).expect("base64 is ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: &str = "sk-0123456789-canary";

    fn lookup(variable: &str) -> Option<String> {
        match variable {
            "KEY" => Some(VALUE.to_owned()),
            "SHORT" => Some("short".to_owned()),
            "LINES" => Some("two lines\nof text".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    fn secret(text: &str) -> Secret {
        Secret::parse(text, lookup).unwrap()
    }

    fn refusal(text: &str) -> String {
        Secret::parse(text, lookup).unwrap_err().to_string()
    }

    fn host(name: &str) -> HostName {
        HostName::parse(name).unwrap()
    }

    #[test]
    fn a_secret_is_read_from_a_variable_for_one_host_or_several() {
        let one = secret("TOKEN=env:KEY@api.example.com");
        assert_eq!(
            (one.name(), one.hosts()),
            ("TOKEN", &[host("api.example.com")][..])
        );
        assert_eq!(**one.value, VALUE);
        assert_eq!(one.header, None);
        let several = secret("TOKEN=env:KEY@API.example.com,b.example.com:Authorization");
        assert_eq!(
            several.hosts(),
            [host("api.example.com"), host("b.example.com")]
        );
        assert_eq!(several.header, Some(header::AUTHORIZATION));
    }

    #[test]
    fn hidden_values_are_taken_out_and_texts_without_them_are_left_alone() {
        let hidden = HiddenValues::new([VALUE, "short"], "[hidden]");
        assert_eq!(
            hidden
                .hide(&format!("a {VALUE} b, {}", base64_for_tests(VALUE)))
                .unwrap(),
            "a [hidden] b, [hidden]k="
        );
        assert_eq!(hidden.hide("a short text, sk-0123456789-canar"), None);
        assert_eq!(HiddenValues::default().hide(VALUE), None);
        assert!(!format!("{hidden:?}").contains("canary"));
    }

    #[test]
    fn a_mistake_is_explained_without_the_value() {
        let cases = [
            ("TOKEN", "a secret is written"),
            ("TOKEN=KEY@api.example.com", "a secret is written"),
            ("TOKEN=env:KEY", "a secret is written"),
            ("TOKEN=env:@api.example.com", "a secret is written"),
            (
                "TOKEN=sk-0123456789-canary@api.example.com",
                "a secret is written",
            ),
            ("2TOKEN=env:KEY@api.example.com", "the name of a secret"),
            ("TO-KEN=env:KEY@api.example.com", "the name of a secret"),
            ("=env:KEY@api.example.com", "the name of a secret"),
            (
                "TOKEN=env:KEY@",
                "secret TOKEN: \"\" is not the name of a host",
            ),
            (
                "TOKEN=env:KEY@*.example.com",
                "secret TOKEN: \"*.example.com\" is not the name of a host",
            ),
            (
                "TOKEN=env:KEY@192.0.2.1",
                "secret TOKEN: \"192.0.2.1\" is not the name of a host",
            ),
            (
                "TOKEN=env:KEY@api.example.com:443",
                "secret TOKEN: \"443\" is not a header",
            ),
            (
                "TOKEN=env:KEY@api.example.com:Host",
                "secret TOKEN: \"Host\" is not a header",
            ),
            (
                "TOKEN=env:KEY@api.example.com:a b",
                "secret TOKEN: \"a b\" is not a header",
            ),
            (
                "TOKEN=env:OTHER@api.example.com",
                "secret TOKEN: the variable",
            ),
            (
                "TOKEN=env:EMPTY@api.example.com",
                "secret TOKEN: the value must have",
            ),
            (
                "TOKEN=env:SHORT@api.example.com",
                "secret TOKEN: the value must have",
            ),
            (
                "TOKEN=env:LINES@api.example.com",
                "secret TOKEN: the value must be one line",
            ),
            (
                "TOKEN=file:/does/not/exist@api.example.com",
                "secret TOKEN: its file could not be read",
            ),
            (
                "TOKEN=file:/dev/null@api.example.com",
                "secret TOKEN: its file could not be read",
            ),
        ];
        for (text, start) in cases {
            let said = refusal(text);
            assert!(said.starts_with(start), "{text}: {said}");
            assert!(
                !said.contains("canary") && !said.contains("two lines") && !said.contains("short"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_file_counts_without_its_line_break_and_only_if_it_is_closed_to_others() {
        let path =
            std::env::temp_dir().join(format!("cellblock-secret-{}", random_characters().unwrap()));
        std::fs::write(&path, format!("{VALUE}\r\n")).unwrap();
        let text = format!("TOKEN=file:{}@api.example.com", path.display());
        let with_mode = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Secret::parse(&text, lookup)
        };
        for open in [0o604, 0o602, 0o620, 0o644, 0o666] {
            assert!(
                matches!(with_mode(open), Err(SecretError::FileOpenToOthers { .. })),
                "{open:o}"
            );
        }
        for closed in [0o600, 0o400, 0o640] {
            assert_eq!(**with_mode(closed).unwrap().value, VALUE);
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn placeholders_are_random_per_vault_and_have_the_name_in_them() {
        let secrets = vec![
            secret("ONE=env:KEY@a.example.com"),
            secret("TWO=env:KEY@b.example.com"),
        ];
        let vault = Vault::new(secrets.clone()).unwrap();
        let variables = vault.variables();
        for ((name, placeholder), expected) in variables.iter().zip(["ONE", "TWO"]) {
            assert_eq!(name, expected);
            let random = placeholder
                .strip_prefix(&format!("cellblock-{name}-"))
                .unwrap();
            assert_eq!(random.len(), 22);
            assert!(random.bytes().all(|byte| {
                base64::alphabet::URL_SAFE
                    .as_str()
                    .as_bytes()
                    .contains(&byte)
            }));
        }
        assert_ne!(variables, Vault::new(secrets).unwrap().variables());
    }

    #[test]
    fn a_vault_knows_its_hosts_and_takes_no_name_twice() {
        let vault = Vault::new(vec![secret("ONE=env:KEY@a.example.com,b.example.com")]).unwrap();
        assert!(vault.has(&host("a.example.com")) && vault.has(&host("b.example.com")));
        assert!(!vault.has(&host("c.example.com")) && !vault.has(&host("x.a.example.com")));
        assert!(!Vault::none().has(&host("a.example.com")) && Vault::none().is_empty());
        let twice = Vault::new(vec![
            secret("ONE=env:KEY@a.example.com"),
            secret("ONE=env:KEY@b.example.com"),
        ]);
        assert_eq!(twice.unwrap_err().to_string(), "secret ONE is given twice");
    }

    #[test]
    fn debug_output_has_no_value_and_logs_are_masked() {
        let secret = secret("TOKEN=env:KEY@api.example.com");
        let vault = Vault::new(vec![secret.clone()]).unwrap();
        for said in [
            format!("{secret:?}"),
            format!("{secret:#?}"),
            format!("{vault:?}"),
        ] {
            assert!(
                said.contains("TOKEN") && said.contains("[redacted]") && !said.contains("canary"),
                "{said}"
            );
        }
        let placeholder = vault.variables()[0].1.clone();
        assert_eq!(
            vault.mask(&format!("got {VALUE}.")),
            format!("got {placeholder}.")
        );
        assert_eq!(vault.mask("got nothing."), "got nothing.");
    }
}
