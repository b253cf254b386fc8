//! Settings for authentication.
//!
//! The table `auth` of the file is checked here, entry by entry. The `MCP_` variables are taken
//! unchecked: they may have been set for other programs, so a server on standard input alone must
//! not fail because of them. `auth::Authenticator` checks them when it is created.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Check, invalid, table};
use crate::auth::{
    Algorithm, ApiKey, AuthChoice, AuthSettings, Issuer, IssuerVariables, KeyHash, KeySetUrl,
    KeySource, Scope,
};
use crate::config::layers::{self, SettingOrigin, WrittenMember, WrittenValue};
use crate::config::table::Key;
use crate::config::{ConfigError, folders};

const CHOICES: &str = "development, off, or a table with issuers and api_keys";

impl Check<'_> {
    /// Reads the authentication settings. Files of development mode are in `data_dir` unless the
    /// operator sets another path.
    pub(super) fn auth(
        &self,
        surroundings: &BTreeMap<String, String>,
        data_dir: &Path,
    ) -> Result<AuthSettings, ConfigError> {
        let mut auth = AuthSettings {
            variables: self.issuer_variables(surroundings),
            development_dir: data_dir.join("auth"),
            ..AuthSettings::default()
        };
        match self.written.all(Key::Auth) {
            [] | [(_, WrittenValue::Nothing), ..] => {}
            [(origin, WrittenValue::Table(members)), ..] => {
                self.auth_table(origin, members, &mut auth)?
            }
            [(origin, WrittenValue::Text(text)), ..] => {
                auth.choice = match text.trim().to_ascii_lowercase().as_str() {
                    // YAML parses the bare word as a boolean, so it may arrive as false.
                    "off" | "false" => AuthChoice::Off,
                    "development" => AuthChoice::Development,
                    _ => return Err(invalid(Key::Auth.name(), origin, text, CHOICES, None)),
                };
            }
            [(origin, WrittenValue::List(_)), ..] => {
                return Err(layers::wrong_shape(Key::Auth.name(), origin, CHOICES));
            }
        }
        Ok(auth)
    }

    fn issuer_variables(&self, surroundings: &BTreeMap<String, String>) -> IssuerVariables {
        let variable = |name: &str| {
            surroundings
                .get(name)
                .filter(|value| !value.trim().is_empty())
                .cloned()
        };
        IssuerVariables {
            jwks_uri: variable("MCP_JWKS_URI"),
            issuer: variable("MCP_ISSUER"),
            audience: variable("MCP_AUDIENCE"),
            algorithm: variable("MCP_ALGORITHM"),
            public_key_path: variable("MCP_PUBLIC_KEY_PATH")
                .map(|path| folders::absolute(&path, self.current_dir, self.home)),
        }
    }

    fn auth_table(
        &self,
        origin: &SettingOrigin,
        members: &[WrittenMember],
        auth: &mut AuthSettings,
    ) -> Result<(), ConfigError> {
        for member in members {
            let origin = origin.at(member.line);
            let key = format!("auth.{}", member.name);
            match member.name.replace('-', "_").as_str() {
                "issuers" => {
                    for (origin, members) in tables(&key, &origin, &member.value)? {
                        auth.issuers.push(self.issuer(&key, &origin, members)?);
                    }
                }
                "api_keys" => {
                    for (origin, members) in tables(&key, &origin, &member.value)? {
                        auth.api_keys.push(api_key(&key, &origin, members)?);
                    }
                }
                "development_dir" => {
                    let text = single(&key, &origin, &member.value)?;
                    auth.development_dir = self.absolute(&key, &origin, text)?;
                }
                other => {
                    let known = ["issuers", "api_keys", "development_dir"].into_iter();
                    return Err(layers::unknown_key(other, origin, known));
                }
            }
        }
        Ok(())
    }

    /// Reads `{issuer, jwks_uri or public_key, audience, algorithms, principal, private_network}`.
    fn issuer(
        &self,
        place: &str,
        origin: &SettingOrigin,
        members: &[WrittenMember],
    ) -> Result<Issuer, ConfigError> {
        const KNOWN: [&str; 7] = [
            "issuer",
            "jwks_uri",
            "public_key",
            "audience",
            "algorithms",
            "principal",
            "private_network",
        ];
        let written = Entry::read(place, origin, members, &KNOWN)?;
        let name = written.needed("issuer")?;
        if !Issuer::is_name(name) {
            return Err(written.refuse("issuer", name, Issuer::NAME_ALLOWED));
        }
        let audiences = written.texts("audience")?;
        if audiences.is_empty() || audiences.iter().any(|audience| audience.trim().is_empty()) {
            return Err(written.refuse(
                "audience",
                "",
                "the name of this server in tokens, or a list of names",
            ));
        }
        Ok(Issuer {
            name: name.to_owned(),
            keys: self.key_source(&written)?,
            audiences: audiences.into_iter().map(str::to_owned).collect(),
            algorithms: algorithms(&written)?,
            principal: principal(&written)?,
        })
    }

    fn key_source(&self, written: &Entry<'_>) -> Result<KeySource, ConfigError> {
        let is_private = match written
            .single("private_network")?
            .map(str::to_ascii_lowercase)
            .as_deref()
        {
            None | Some("off" | "false") => false,
            Some("on" | "true") => true,
            Some(other) => return Err(written.refuse("private_network", other, "on or off")),
        };
        match (written.single("jwks_uri")?, written.single("public_key")?) {
            (Some(text), None) => match KeySetUrl::parse(text) {
                Some(url) => Ok(KeySource::Server { url, is_private }),
                None => Err(written.refuse("jwks_uri", text, KeySetUrl::ALLOWED)),
            },
            (None, Some(path)) => {
                let key = format!("{}.public_key", written.place);
                Ok(KeySource::File(self.absolute(
                    &key,
                    &written.origin("public_key"),
                    path,
                )?))
            }
            (Some(_), Some(path)) => {
                Err(written.refuse("public_key", path, "nothing beside jwks_uri"))
            }
            (None, None) => Err(written.refuse(
                "jwks_uri",
                "",
                "the address of the issuer's keys, or public_key, the path of its one key",
            )),
        }
    }
}

fn algorithms(written: &Entry<'_>) -> Result<Vec<Algorithm>, ConfigError> {
    let names = written.texts("algorithms")?;
    if names.is_empty() {
        return Ok(vec![Algorithm::Rs256]);
    }
    let parse = |name: &str| {
        Algorithm::from_name(name)
            .ok_or_else(|| written.refuse("algorithms", name, Algorithm::ALLOWED))
    };
    names.into_iter().map(parse).collect()
}

fn principal(written: &Entry<'_>) -> Result<Option<String>, ConfigError> {
    let is_claim = |name: &str| {
        (1..=128).contains(&name.len())
            && name
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b':')
    };
    match written.single("principal")? {
        Some(name) if !is_claim(name) => Err(written.refuse(
            "principal",
            name,
            "the name of a claim such as sub, without spaces and colons",
        )),
        name => Ok(name.map(str::to_owned)),
    }
}

/// Reads `{name, hash, scopes}`.
fn api_key(
    place: &str,
    origin: &SettingOrigin,
    members: &[WrittenMember],
) -> Result<ApiKey, ConfigError> {
    let written = Entry::read(place, origin, members, &["name", "hash", "scopes"])?;
    let name = written.needed("name")?;
    if !ApiKey::is_name(name) {
        return Err(written.refuse("name", name, ApiKey::NAME_ALLOWED));
    }
    // The written text is not repeated: it may be the key itself, put in the wrong place.
    let hash = KeyHash::parse(written.needed("hash")?)
        .ok_or_else(|| written.refuse("hash", "…", KeyHash::ALLOWED))?;
    let allowed = format!("one or more of {}", Scope::ALL.map(Scope::name).join(", "));
    let names = written.texts("scopes")?;
    if names.is_empty() {
        return Err(written.refuse("scopes", "", &allowed));
    }
    let parse =
        |name: &str| Scope::from_name(name).ok_or_else(|| written.refuse("scopes", name, &allowed));
    let scopes: Vec<Scope> = names.into_iter().map(parse).collect::<Result<_, _>>()?;
    Ok(ApiKey {
        name: name.to_owned(),
        hash,
        scopes: scopes.into_iter().collect(),
    })
}

/// The members of one table of a list, each known and given at most once.
struct Entry<'a> {
    place: &'a str,
    origin: SettingOrigin,
    members: &'a [WrittenMember],
}

impl<'a> Entry<'a> {
    fn read(
        place: &'a str,
        origin: &SettingOrigin,
        members: &'a [WrittenMember],
        known: &[&'static str],
    ) -> Result<Entry<'a>, ConfigError> {
        match members
            .iter()
            .find(|member| !known.contains(&member.name.as_str()))
        {
            Some(other) => Err(layers::unknown_key(
                &other.name,
                origin.at(other.line),
                known.iter().copied(),
            )),
            None => Ok(Entry {
                place,
                origin: origin.clone(),
                members,
            }),
        }
    }

    fn member(&self, name: &str) -> Option<&'a WrittenMember> {
        self.members.iter().find(|member| member.name == name)
    }

    fn origin(&self, name: &str) -> SettingOrigin {
        self.origin
            .at(self.member(name).and_then(|member| member.line))
    }

    fn single(&self, name: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(member) = self.member(name) else {
            return Ok(None);
        };
        single(
            &format!("{}.{name}", self.place),
            &self.origin(name),
            &member.value,
        )
        .map(Some)
    }

    fn needed(&self, name: &str) -> Result<&'a str, ConfigError> {
        self.single(name)?
            .ok_or_else(|| self.refuse(name, "", "a text; it must be there"))
    }

    fn texts(&self, name: &str) -> Result<Vec<&'a str>, ConfigError> {
        let Some(member) = self.member(name) else {
            return Ok(Vec::new());
        };
        member
            .value
            .texts(&format!("{}.{name}", self.place), &self.origin(name))
    }

    fn refuse(&self, name: &str, given: &str, allowed: &str) -> ConfigError {
        invalid(
            &format!("{}.{name}", self.place),
            &self.origin(name),
            given,
            allowed,
            None,
        )
    }
}

fn tables<'a>(
    key: &str,
    origin: &SettingOrigin,
    written: &'a WrittenValue,
) -> Result<Vec<(SettingOrigin, &'a [WrittenMember])>, ConfigError> {
    let items = match written {
        WrittenValue::Nothing => return Ok(Vec::new()),
        WrittenValue::List(items) => items,
        WrittenValue::Text(_) | WrittenValue::Table(_) => {
            return Err(layers::wrong_shape(key, origin, "a list of tables"));
        }
    };
    let entry = |item: &'a WrittenValue| {
        let members = table(key, origin, item)?;
        Ok((
            origin.at(members.first().and_then(|member| member.line)),
            members,
        ))
    };
    items.iter().map(entry).collect()
}

fn single<'a>(
    key: &str,
    origin: &SettingOrigin,
    written: &'a WrittenValue,
) -> Result<&'a str, ConfigError> {
    match written {
        WrittenValue::Text(text) => Ok(text),
        WrittenValue::Nothing | WrittenValue::List(_) | WrittenValue::Table(_) => {
            Err(layers::wrong_shape(key, origin, "a single value"))
        }
    }
}

/// Returns the folders that code inside or clients can reach, from which no key may be read.
pub(in crate::config) fn shown_folders(settings: &crate::config::Settings) -> Vec<PathBuf> {
    let mounts = settings.mounts.iter().map(|mount| &mount.host);
    settings
        .workspace
        .iter()
        .chain(&settings.allowed_dirs)
        .chain(mounts)
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::case;
    use super::*;

    const HASH: &str = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn auth(yaml: &str) -> AuthSettings {
        case().yaml(yaml).settings().auth
    }

    fn refusal(yaml: &str) -> String {
        case().yaml(yaml).refusal()
    }

    #[test]
    fn nothing_written_is_the_usual_choice() {
        let auth = auth("cpus: 1");
        assert_eq!(auth.choice, AuthChoice::Usual);
        assert_eq!((auth.issuers.len(), auth.api_keys.len()), (0, 0));
        assert_eq!(auth.variables, IssuerVariables::default());
        assert_eq!(
            auth.development_dir,
            Path::new("/home/me/.local/share/cellblock/auth")
        );
    }

    #[test]
    fn one_word_chooses_development_or_nothing_at_all() {
        for (text, choice) in [
            ("auth: off", AuthChoice::Off),
            ("auth: \"Off\"", AuthChoice::Off),
            ("auth: development", AuthChoice::Development),
        ] {
            assert_eq!(auth(text).choice, choice, "{text}");
        }
        for text in ["auth: on", "auth: none", "auth: [off]"] {
            assert!(
                refusal(text).contains("development, off, or a table"),
                "{text}"
            );
        }
        let off = case()
            .yaml("auth: development")
            .variable("CELLBLOCK_AUTH", "off")
            .settings()
            .auth;
        assert_eq!(
            off.choice,
            AuthChoice::Off,
            "a variable is stronger than the file"
        );
    }

    #[test]
    fn issuers_and_keys_are_read_from_a_table() {
        let auth = auth(&format!(
            "auth:\n  development_dir: dev\n  issuers:\n  - issuer: https://id.example.com\n    \
             jwks_uri: https://id.example.com/keys\n    \
             audience: https://cellblock.example.com/mcp\n  - issuer: partner\n    public_key: \
             partner.pem\n    audience: [a, b]\n    \
             algorithms: [ES256, EdDSA]\n    principal: email\n  api_keys:\n  - name: ci\n    \
             hash: {HASH}\n    scopes: [python:execute, admin]\n"
        ));
        let [first, second] = &auth.issuers[..] else {
            panic!("there are two issuers")
        };
        assert_eq!(
            *first,
            Issuer {
                name: "https://id.example.com".to_owned(),
                keys: KeySource::Server {
                    url: KeySetUrl::parse("https://id.example.com/keys").unwrap(),
                    is_private: false
                },
                audiences: vec!["https://cellblock.example.com/mcp".to_owned()],
                algorithms: vec![Algorithm::Rs256],
                principal: None,
            }
        );
        assert_eq!(
            second.keys,
            KeySource::File("/etc/cellblock/partner.pem".into())
        );
        assert_eq!(second.audiences, ["a", "b"]);
        assert_eq!(second.algorithms, [Algorithm::Es256, Algorithm::EdDsa]);
        assert_eq!(second.principal.as_deref(), Some("email"));
        assert_eq!(auth.development_dir, Path::new("/etc/cellblock/dev"));
        let [key] = &auth.api_keys[..] else {
            panic!("there is one key")
        };
        assert_eq!(
            (key.name.as_str(), key.hash),
            ("ci", KeyHash::parse(HASH).unwrap())
        );
        assert_eq!(
            key.scopes,
            [Scope::Execute, Scope::Admin].into_iter().collect()
        );
    }

    /// An issuer written in one line, with one member replaced or, without a value, omitted.
    fn issuer(member: &str, value: Option<&str>) -> String {
        let mut members = vec![
            ("issuer", "https://id"),
            ("jwks_uri", "https://id/keys"),
            ("audience", "us"),
        ];
        members.retain(|(name, _)| *name != member);
        members.extend(value.map(|value| (member, value)));
        let members: Vec<String> = members
            .iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect();
        format!("auth: {{issuers: [{{{}}}]}}", members.join(", "))
    }

    #[test]
    fn an_issuer_is_whole_or_refused() {
        assert_eq!(
            auth(&issuer("algorithms", Some("PS256"))).issuers[0].algorithms,
            [Algorithm::Ps256]
        ); // control
        for (member, value, words) in [
            ("issuer", None, "auth.issuers.issuer"),
            ("issuer", Some("'a b'"), "without spaces"),
            ("audience", None, "auth.issuers.audience"),
            ("audience", Some("[]"), "auth.issuers.audience"),
            ("audience", Some("['']"), "auth.issuers.audience"),
            ("jwks_uri", None, "or public_key"),
            (
                "jwks_uri",
                Some("http://id.example.com/keys"),
                "http:// only with",
            ),
            (
                "jwks_uri",
                Some("ftp://id.example.com/keys"),
                "an address such as",
            ),
            ("public_key", Some("key.pem"), "nothing beside jwks_uri"),
            ("algorithms", Some("[RS256, HS256]"), "cannot be \"HS256\""),
            ("algorithms", Some("none"), "cannot be \"none\""),
            ("algorithms", Some("rs256"), "cannot be \"rs256\""),
            ("principal", Some("'a:b'"), "the name of a claim"),
            ("private_network", Some("perhaps"), "on or off"),
            ("audiance", Some("x"), "did you mean \"audience\"?"),
        ] {
            let message = refusal(&issuer(member, value));
            assert!(message.contains(words), "{member}: {message}");
            assert!(
                message.starts_with("/etc/cellblock/config.yaml line 1"),
                "{message}"
            );
        }
    }

    #[test]
    fn a_key_server_in_a_private_network_is_named_as_such() {
        let is_private = |value| match &auth(&issuer("private_network", value)).issuers[0].keys {
            KeySource::Server { is_private, .. } => *is_private,
            KeySource::File(_) => panic!("it is a server"),
        };
        assert_eq!(
            (
                is_private(None),
                is_private(Some("on")),
                is_private(Some("off"))
            ),
            (false, true, false)
        );
    }

    #[test]
    fn an_api_key_is_whole_or_refused() {
        let yaml = |name: &str, hash: &str, scopes: &str| {
            format!("auth: {{api_keys: [{{name: {name}, hash: '{hash}', scopes: {scopes}}}]}}")
        };
        assert_eq!(auth(&yaml("ci", HASH, "sessions:read")).api_keys.len(), 1); // control
        assert!(refusal(&yaml("'a b'", HASH, "admin")).contains("1 to 64 letters"));
        assert!(refusal(&yaml("ci", HASH, "[]")).contains("one or more of python:execute"));
        assert!(refusal(&yaml("ci", HASH, "[root]")).contains("cannot be \"root\""));
        let message = refusal(&yaml("ci", "cellblock_canary", "admin"));
        assert!(
            message.contains("cellblock key new") && !message.contains("canary"),
            "{message}"
        );
        assert!(refusal("auth: {api_keys: {name: ci}}").contains("a list of tables"));
        assert!(refusal("auth: {keys: []}").contains("there is no setting \"keys\""));
    }

    #[test]
    fn the_variables_of_one_issuer_are_kept_as_they_are() {
        let auth = case()
            .variable("MCP_JWKS_URI", "nonsense")
            .variable("MCP_ISSUER", "")
            .variable("MCP_AUDIENCE", "us")
            .variable("MCP_PUBLIC_KEY_PATH", "keys/public.pem")
            .settings()
            .auth;
        assert_eq!(
            auth.variables,
            IssuerVariables {
                jwks_uri: Some("nonsense".to_owned()),
                issuer: None,
                audience: Some("us".to_owned()),
                algorithm: None,
                public_key_path: Some("/here/keys/public.pem".into()),
            }
        );
        let auth = case()
            .variable("MCP_ISSUER", "https://id")
            .variable("MCP_ALGORITHM", "ES256")
            .settings()
            .auth;
        assert_eq!(
            auth.variables,
            IssuerVariables {
                issuer: Some("https://id".to_owned()),
                algorithm: Some("ES256".to_owned()),
                ..IssuerVariables::default()
            }
        );
    }
}
