//! Credentials for image registries, as stored by `docker login` and `podman login`.
//!
//! They are looked up when an image is pulled, because they change; they are sent to the engine
//! with that one request and stored nowhere. Credential helpers (`docker-credential-…`) are called
//! in the same way as Docker calls them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bollard::auth::DockerCredentials;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

/// The registry of image names without one, and its key in credential files.
const HUB: &str = "docker.io";
const HUB_KEY: &str = "https://index.docker.io/v1/";
/// Timeout for a credential helper. It may ask a person.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a helper's answer.
const MAX_ANSWER_BYTES: u64 = 64 * 1024;
/// The user name which marks the secret as a token.
const TOKEN: &str = "<token>";

/// The relevant parts of a credential file.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Book {
    auths: BTreeMap<String, Entry>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
    #[serde(rename = "credHelpers")]
    helpers: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    /// `user:password`, base64-encoded.
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    #[serde(rename = "identitytoken")]
    identity_token: Option<String>,
    #[serde(rename = "registrytoken")]
    registry_token: Option<String>,
}

/// The answer of a credential helper.
#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Username", default)]
    username: String,
    #[serde(rename = "Secret", default)]
    secret: String,
}

/// Finds credentials for the registry of an image, in the first file that has some. An error names
/// the helper that could not be asked.
pub(super) async fn find(
    files: &[PathBuf],
    image: &str,
) -> Result<Option<DockerCredentials>, String> {
    let registry = registry(image);
    for file in files {
        // A file that is missing, or is not a credential file, has none.
        let text = tokio::fs::read_to_string(file).await.unwrap_or_default();
        let Ok(book) = serde_json::from_str::<Book>(&text) else {
            continue;
        };
        if let Some((program, key)) = book.keeper(&registry)
            && let Some(found) = ask(&program, &key).await?
        {
            return Ok(Some(found));
        }
        if let Some(found) = book.written(&registry) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Returns the registry of an image: the part before the first slash, if that is a host name.
fn registry(image: &str) -> String {
    match image.split_once('/') {
        Some((first, _)) if first.contains(['.', ':']) || first == "localhost" => first.to_owned(),
        _ => HUB.to_owned(),
    }
}

/// Returns the keys under which the credentials of a registry are stored.
fn keys(registry: &str) -> Vec<String> {
    let first = if registry == HUB {
        HUB_KEY.to_owned()
    } else {
        registry.to_owned()
    };
    let others = ["", "https://", "http://"].into_iter().flat_map(|scheme| {
        ["", "/", "/v1/", "/v2/"]
            .into_iter()
            .map(move |path| format!("{scheme}{registry}{path}"))
    });
    std::iter::once(first).chain(others).collect()
}

impl Book {
    /// Returns the credential helper of a registry, and the key by which it knows the registry.
    fn keeper(&self, registry: &str) -> Option<(String, String)> {
        let keys = keys(registry);
        let own = keys
            .iter()
            .find_map(|key| Some((self.helpers.get(key)?, key)));
        let (program, key) = own.or_else(|| Some((self.store.as_ref()?, keys.first()?)))?;
        // The name becomes part of a program name, so it must not be a path.
        let is_name = !program.is_empty()
            && program
                .chars()
                .all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter));
        is_name.then(|| (format!("docker-credential-{program}"), key.clone()))
    }

    /// Returns credentials stored in the file itself.
    fn written(&self, registry: &str) -> Option<DockerCredentials> {
        let entry = keys(registry).iter().find_map(|key| self.auths.get(key))?;
        let decoded = entry
            .auth
            .as_deref()
            .and_then(|auth| STANDARD.decode(auth.trim()).ok());
        let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
        let pair = decoded.as_deref().and_then(|text| text.split_once(':'));
        let filled = |text: Option<&str>| {
            text.filter(|text| !text.is_empty())
                .map(|text| text.trim_end_matches('\0').to_owned())
        };
        let found = DockerCredentials {
            username: filled(pair.map(|(user, _)| user).or(entry.username.as_deref())),
            password: filled(
                pair.map(|(_, password)| password)
                    .or(entry.password.as_deref()),
            ),
            identitytoken: filled(entry.identity_token.as_deref()),
            registrytoken: filled(entry.registry_token.as_deref()),
            serveraddress: Some(registry.to_owned()),
            ..DockerCredentials::default()
        };
        let has_some = found.username.is_some()
            || found.identitytoken.is_some()
            || found.registrytoken.is_some();
        has_some.then_some(found)
    }
}

/// Asks a credential helper. It is not an error if it has none for this registry.
async fn ask(program: &str, key: &str) -> Result<Option<DockerCredentials>, String> {
    let failed = |why: String| format!("{program} could not be asked for credentials: {why}");
    let asking = async {
        let mut child = Command::new(program)
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        if let Some(mut input) = child.stdin.take() {
            // A program that does not need its input may have closed it.
            let _ = input.write_all(key.as_bytes()).await;
        }
        let mut said = Vec::new();
        if let Some(output) = child.stdout.take() {
            output
                .take(MAX_ANSWER_BYTES)
                .read_to_end(&mut said)
                .await
                .map_err(|error| failed(error.to_string()))?;
        }
        let status = child
            .wait()
            .await
            .map_err(|error| failed(error.to_string()))?;
        understood(&said, status.success(), key).map_err(failed)
    };
    tokio::time::timeout(TIMEOUT, asking)
        .await
        .unwrap_or_else(|_| Err(failed("it does not answer".to_owned())))
}

fn understood(
    said: &[u8],
    succeeded: bool,
    key: &str,
) -> Result<Option<DockerCredentials>, String> {
    if !succeeded {
        let text = String::from_utf8_lossy(said);
        // All helpers print this text on their standard output.
        return match text.contains("credentials not found") {
            true => Ok(None),
            false => Err(text.trim().chars().take(200).collect()),
        };
    }
    let answer: Answer =
        serde_json::from_slice(said).map_err(|_| "its answer is not understood".to_owned())?;
    let serveraddress = Some(key.to_owned());
    Ok(Some(match answer.username.as_str() {
        TOKEN => DockerCredentials {
            identitytoken: Some(answer.secret),
            serveraddress,
            ..Default::default()
        },
        _ => DockerCredentials {
            username: Some(answer.username),
            password: Some(answer.secret),
            serveraddress,
            ..Default::default()
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book(text: &str) -> Book {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_registry_is_in_the_name_of_an_image() {
        for (image, expected) in [
            ("python", HUB),
            ("python:3.13", HUB),
            ("somebody/python:3.13", HUB),
            ("ghcr.io/somebody/python", "ghcr.io"),
            ("127.0.0.1:5000/python:1", "127.0.0.1:5000"),
            ("localhost/python", "localhost"),
        ] {
            assert_eq!(registry(image), expected, "{image}");
        }
    }

    #[test]
    fn credentials_in_the_file_are_found_under_all_names_of_a_registry() {
        let pair = STANDARD.encode("me:pass:word");
        for key in ["there:5000", "https://there:5000", "https://there:5000/v2/"] {
            let found = book(&format!(
                r#"{{"auths": {{"{key}": {{"auth": "{pair}"}}}}}}"#
            ))
            .written("there:5000")
            .unwrap();
            assert_eq!(
                (found.username.as_deref(), found.password.as_deref()),
                (Some("me"), Some("pass:word")),
                "{key}"
            );
        }
        let hub = book(&format!(
            r#"{{"auths": {{"{HUB_KEY}": {{"auth": "{pair}"}}}}}}"#
        ));
        assert!(hub.written(HUB).is_some());
        // The credentials of another registry are not used.
        assert!(hub.written("there:5000").is_none());
        let token = book(r#"{"auths": {"there": {"identitytoken": "t"}}}"#)
            .written("there")
            .unwrap();
        assert_eq!(token.identitytoken.as_deref(), Some("t"));
        assert!(
            book(r#"{"auths": {"there": {}}}"#)
                .written("there")
                .is_none()
        );
    }

    #[test]
    fn a_program_of_one_registry_comes_before_that_of_all() {
        let both = book(r#"{"credsStore": "all", "credHelpers": {"there": "one"}}"#);
        let keeper = |book: &Book, registry| book.keeper(registry);
        let named = |program: &str, key: &str| Some((program.to_owned(), key.to_owned()));
        assert_eq!(
            keeper(&both, "there"),
            named("docker-credential-one", "there")
        );
        assert_eq!(
            keeper(&both, "elsewhere"),
            named("docker-credential-all", "elsewhere")
        );
        assert_eq!(keeper(&both, HUB), named("docker-credential-all", HUB_KEY));
        assert_eq!(keeper(&book("{}"), "there"), None);
        assert_eq!(
            keeper(&book(r#"{"credsStore": "x/../../bin/sh"}"#), "there"),
            None
        );
    }

    #[test]
    fn an_answer_is_a_pair_a_token_nothing_or_a_failure() {
        let said = |text: &str, succeeded| understood(text.as_bytes(), succeeded, "there");
        let pair = said(
            r#"{"ServerURL": "there", "Username": "me", "Secret": "s"}"#,
            true,
        )
        .unwrap()
        .unwrap();
        assert_eq!(
            (pair.username.as_deref(), pair.password.as_deref()),
            (Some("me"), Some("s"))
        );
        let token = said(r#"{"Username": "<token>", "Secret": "t"}"#, true)
            .unwrap()
            .unwrap();
        assert_eq!(
            (token.username, token.identitytoken.as_deref()),
            (None, Some("t"))
        );
        assert!(
            said("credentials not found in native keychain\n", false)
                .unwrap()
                .is_none()
        );
        assert!(
            said("the keychain is locked", false)
                .unwrap_err()
                .contains("locked")
        );
        assert!(said("hello", true).is_err());
    }
}
