//! Settings for network access, and the secrets that are inserted at the egress proxy.
//!
//! ```text
//! allowed_domains ─┐
//! hosts of secrets ┼─▶ permitted, or everything with "all" ──▶ minus denied_domains = Rules
//! allow_network  ──┘
//! ```
//!
//! A secret's value is looked up here and goes straight into a [`Secret`], which never shows it. No
//! message repeats the text written for a secret, because it may be the value itself, put in the
//! wrong place.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use cellblock_egress::gateway::Limits;
use cellblock_egress::name::HostName;
use cellblock_egress::rules::{RuleError, Rules};
use cellblock_egress::secrets::{Secret, SecretError, Vault};

use super::{Check, has_default, invalid, within};
use crate::config::layers::{self, SettingOrigin, WrittenMember, WrittenValue};
use crate::config::quantity::parse_size;
use crate::config::table::{Key, Values};
use crate::config::{ConfigError, NetworkSettings, SandboxVariables, dotenv};

/// Why a secret was rejected. It never contains the value.
#[derive(Debug, thiserror::Error)]
pub enum SecretProblem {
    #[error(transparent)]
    Refused(#[from] SecretError),
    #[error("secret {name}: the variable {variable}, which should hold its value, is not set")]
    NotSet { name: String, variable: String },
    #[error(
        "secret {name}: \"env\" takes the name of a variable: letters, digits and \"_\", and no \
         digit at its start"
    )]
    NotAVariable { name: String },
    #[error(
        "secret {name}: its value is also in the variable {variable}, which code inside sees; take \
         it out of there"
    )]
    Shown { name: String, variable: String },
    #[error("it has no name; write it as {{name: …, env: VARIABLE, hosts: [api.example.com]}}")]
    Unnamed,
    #[error("secret {name}: it needs either \"env\", the name of a variable, or \"file\", a path")]
    Source { name: String },
    #[error("secret {name}: it needs \"hosts\", the names that its value may be sent to")]
    NoHosts { name: String },
}

/// The secrets, each with its origin.
pub(super) struct Secrets(Vec<Found>);

struct Found {
    secret: Secret,
    origin: SettingOrigin,
    number: usize,
    /// The file that contains the value.
    file: Option<PathBuf>,
}

/// The operator's choice about the network as a whole.
#[derive(Clone, Copy)]
enum Choice {
    None,
    Listed,
    All,
}

/// A parsed description of a secret.
struct Description {
    name: String,
    source: Source,
    /// Hosts and, if there is one, the header, in the syntax of the flag.
    place: String,
}

enum Source {
    Variable(String),
    File(PathBuf),
}

const RULE_ALLOWED: &str = "a name such as example.com, *.example.com (one more label) or \
                            **.example.com (one or more), an address, or a \
                            range such as 192.168.1.0/24; behind it ports other than 80 and 443, \
                            such as :8443, :8000,8443, :8000-8010 or :*";

/// The port at which a secret's host is reachable although it is not listed: HTTPS, where values
/// are inserted.
const SECRET_PORT: u16 = 443;

impl Check<'_> {
    /// Reads the network rules. The hosts of `secrets` are allowed.
    pub(super) fn network(
        &self,
        secrets: &Secrets,
        notices: &mut Vec<String>,
    ) -> Result<NetworkSettings, ConfigError> {
        let listed = self.allowed_domains()?;
        let permitted = match self.choice()? {
            Some(Choice::All) => {
                if !listed.is_empty() {
                    notices
                        .push("allowed_domains adds nothing beside allow_network: all".to_owned());
                }
                Rules::everything().under_denials_of(&listed)
            }
            Some(Choice::None) => {
                self.refuse_to_contradict_none(&listed, secrets)?;
                listed
            }
            Some(Choice::Listed) | None => with_hosts(&listed, secrets)?,
        };
        let rules = self.without_denied_domains(&permitted)?;
        notices.extend(secrets.unreachable(&rules));
        let secrets = secrets.0.iter().map(|found| found.secret.clone()).collect();
        Ok(NetworkSettings {
            rules,
            secrets,
            limits: self.network_limits()?,
        })
    }

    /// Reads all secrets and looks up their values: variables in `surroundings`, the server's own
    /// environment, and files.
    pub(super) fn secrets(
        &self,
        surroundings: &BTreeMap<String, String>,
    ) -> Result<Secrets, ConfigError> {
        let mut secrets: Vec<Found> = Vec::new();
        for (origin, written) in self.written.all(Key::Secrets) {
            for (index, item) in secret_items(origin, written)?.iter().enumerate() {
                let number = index + 1;
                let refuse = |cause| ConfigError::Secret {
                    origin: origin.clone(),
                    number,
                    cause,
                };
                let description = match item {
                    WrittenValue::Text(text) => {
                        self.described_by_text(origin, text).map_err(refuse)?
                    }
                    WrittenValue::Table(members) => {
                        self.described_by_table(origin, number, members)?
                    }
                    WrittenValue::Nothing | WrittenValue::List(_) => {
                        return Err(layers::wrong_shape(
                            Key::Secrets.name(),
                            origin,
                            "a list of texts or tables",
                        ));
                    }
                };
                let secret = description.look_up(surroundings).map_err(refuse)?;
                if secrets
                    .iter()
                    .any(|other| other.secret.name() == secret.name())
                {
                    return Err(refuse(
                        SecretError::Twice {
                            name: secret.name().into(),
                        }
                        .into(),
                    ));
                }
                secrets.push(Found {
                    secret,
                    origin: origin.clone(),
                    number,
                    file: description.file(),
                });
            }
        }
        Ok(Secrets(secrets))
    }

    fn allowed_domains(&self) -> Result<Rules, ConfigError> {
        let Some((origin, rules)) = self.rule_texts(Key::AllowedDomains)? else {
            return Ok(Rules::none());
        };
        Rules::parse(&rules).map_err(|error| invalid_rule(Key::AllowedDomains, origin, error))
    }

    fn without_denied_domains(&self, permitted: &Rules) -> Result<Rules, ConfigError> {
        let Some((origin, rules)) = self.rule_texts(Key::DeniedDomains)? else {
            return Ok(permitted.clone());
        };
        permitted
            .deny(&rules)
            .map_err(|error| invalid_rule(Key::DeniedDomains, origin, error))
    }

    /// Returns the rules of a list as they were written. In a variable they are separated by
    /// commas, and so are their ports.
    fn rule_texts(&self, key: Key) -> Result<Option<(&SettingOrigin, Vec<String>)>, ConfigError> {
        let Some((origin, texts)) = self.written.texts(key)? else {
            return Ok(None);
        };
        let texts = match (origin, &texts[..]) {
            (SettingOrigin::Variable(_), [whole]) => phrases(whole, |part| !is_port(part)),
            _ => texts.into_iter().map(str::to_owned).collect(),
        };
        Ok(Some((origin, texts)))
    }

    fn choice(&self) -> Result<Option<Choice>, ConfigError> {
        self.value(Key::AllowNetwork, |text| {
            match text.trim().to_ascii_lowercase().as_str() {
                "none" => Ok(Choice::None),
                "listed" => Ok(Choice::Listed),
                "all" => Ok(Choice::All),
                _ => Err(None),
            }
        })
    }

    /// Rejects "none" together with a setting that opens the network: only the operator knows which
    /// was meant.
    fn refuse_to_contradict_none(
        &self,
        listed: &Rules,
        secrets: &Secrets,
    ) -> Result<(), ConfigError> {
        let rule = listed
            .iter()
            .find(|rule| !rule.is_denial())
            .zip(self.written.all(Key::AllowedDomains).first());
        let (other, reason) = match (rule, secrets.0.first()) {
            (Some((rule, (origin, _))), _) => (
                Key::AllowedDomains,
                format!("{origin}: allowed_domains lists {rule}"),
            ),
            (None, Some(Found { secret, origin, .. })) => {
                let host = secret
                    .hosts()
                    .first()
                    .map(HostName::as_str)
                    .unwrap_or_default();
                (
                    Key::Secrets,
                    format!(
                        "{origin}: the secret {} opens the way to {host}",
                        secret.name()
                    ),
                )
            }
            (None, None) => return Ok(()),
        };
        match self.written.text(Key::AllowNetwork)? {
            Some((origin, text)) => {
                let allowed = format!(
                    "listed or all beside {0}, or none and an empty {0}",
                    other.name()
                );
                Err(invalid(
                    Key::AllowNetwork.name(),
                    origin,
                    text,
                    &allowed,
                    Some(reason),
                ))
            }
            None => Ok(()),
        }
    }

    fn network_limits(&self) -> Result<Limits, ConfigError> {
        let values = Key::NetworkBandwidth.row().values;
        let Values::Size(least, most) = values else {
            unreachable!("the bandwidth is a size")
        };
        let allowed = format!("{} per second, or 0 for no limit", values.allowed());
        let bandwidth = self.read(Key::NetworkBandwidth, &allowed, |text| {
            match parse_size(text) {
                Ok(0) => Ok(0),
                reading => within(reading, &(least..=most)),
            }
        })?;
        Ok(Limits {
            connections: self.number(Key::NetworkConnections)?,
            bytes_per_second: has_default(bandwidth),
            questions_per_second: self.number(Key::NetworkQuestions)?,
        })
    }

    /// Parses `NAME=env:VARIABLE@hosts[:Header]` or `NAME=file:PATH@…`.
    fn described_by_text(
        &self,
        origin: &SettingOrigin,
        text: &str,
    ) -> Result<Description, SecretProblem> {
        let parts = text.trim().split_once('=').and_then(|(name, rest)| {
            let (source, place) = rest.rsplit_once('@')?;
            let (kind, source) = source
                .split_once(':')
                .filter(|(_, source)| !source.is_empty())?;
            Some((name, kind, source, place))
        });
        let Some((name, kind, source, place)) = parts else {
            return Err(SecretError::Form.into());
        };
        let source = match kind {
            "env" => Source::Variable(source.to_owned()),
            "file" => Source::File(self.at_its_place(origin, source)),
            _ => return Err(SecretError::Form.into()),
        };
        Description {
            name: name.to_owned(),
            source,
            place: place.to_owned(),
        }
        .checked()
    }

    /// Reads `{name, env or file, hosts, header}`.
    fn described_by_table(
        &self,
        origin: &SettingOrigin,
        number: usize,
        members: &[WrittenMember],
    ) -> Result<Description, ConfigError> {
        const KNOWN: [&str; 5] = ["name", "env", "file", "hosts", "header"];
        let mut written: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for member in members {
            let origin = origin.at(member.line);
            let key = format!("secrets.{}", member.name);
            if !KNOWN.contains(&member.name.as_str()) {
                return Err(layers::unknown_key(&member.name, origin, KNOWN.into_iter()));
            }
            let texts = member.value.texts(&key, &origin)?;
            if member.name != "hosts" && texts.len() > 1 {
                return Err(layers::wrong_shape(&key, &origin, "a single value"));
            }
            written.insert(&member.name, texts);
        }
        let line = members.first().and_then(|member| member.line);
        self.described_by(origin, &written)
            .map_err(|cause| ConfigError::Secret {
                origin: origin.at(line),
                number,
                cause,
            })
    }

    fn described_by(
        &self,
        origin: &SettingOrigin,
        written: &BTreeMap<&str, Vec<&str>>,
    ) -> Result<Description, SecretProblem> {
        let single = |key: &str| written.get(key).and_then(|texts| texts.first()).copied();
        let name = single("name").ok_or(SecretProblem::Unnamed)?.to_owned();
        let source = match (single("env"), single("file")) {
            (Some(variable), None) => Source::Variable(variable.to_owned()),
            (None, Some(path)) if !path.is_empty() => Source::File(self.at_its_place(origin, path)),
            _ => return Err(SecretProblem::Source { name }),
        };
        let place = place(
            &name,
            written.get("hosts").map_or(&[], Vec::as_slice),
            single("header"),
        )?;
        Description {
            name,
            source,
            place,
        }
        .checked()
    }
}

impl Secrets {
    /// Ensures that no value enters the sandbox as a variable. A variable with the name of a secret
    /// is dropped, with a notice: code inside can write one source of such variables, and must not
    /// be able to prevent the server from starting.
    pub(super) fn keep_out_of(
        &self,
        variables: &mut SandboxVariables,
        notices: &mut Vec<String>,
    ) -> Result<(), ConfigError> {
        for Found {
            secret,
            origin,
            number,
            ..
        } in &self.0
        {
            let refuse = |cause| ConfigError::Secret {
                origin: origin.clone(),
                number: *number,
                cause,
            };
            let name = secret.name();
            if variables.remove(name) {
                notices.push(format!(
                    "the variable {name} is not used: {name} is also a secret, whose placeholder \
                     code inside sees"
                ));
            }
            let vault = Vault::new(vec![secret.clone()]).map_err(|cause| refuse(cause.into()))?;
            if let Some((variable, _)) = variables
                .iter()
                .find(|(_, value)| vault.mask(value) != *value)
            {
                return Err(refuse(SecretProblem::Shown {
                    name: name.to_owned(),
                    variable: variable.to_owned(),
                }));
            }
        }
        Ok(())
    }

    /// Returns the files that hold values.
    pub(super) fn into_files(self) -> Vec<PathBuf> {
        self.0.into_iter().filter_map(|found| found.file).collect()
    }

    /// Returns notices for secrets that can never be inserted, because their host is denied.
    fn unreachable<'a>(&'a self, rules: &'a Rules) -> impl Iterator<Item = String> + 'a {
        let uses = self.0.iter().flat_map(|found| {
            found
                .secret
                .hosts()
                .iter()
                .map(|host| (found.secret.name(), host))
        });
        uses.filter(|(_, host)| !rules.lists_name(host))
            .map(|(name, host)| {
                format!("the secret {name} cannot be used at {host}, which is denied")
            })
    }
}

impl Description {
    /// Rejects parts that would be ambiguous when they are joined again or looked up.
    fn checked(self) -> Result<Description, SecretProblem> {
        if !dotenv::is_variable_name(&self.name) {
            return Err(SecretError::Name.into());
        }
        match &self.source {
            Source::Variable(variable) if !dotenv::is_variable_name(variable) => {
                Err(SecretProblem::NotAVariable { name: self.name })
            }
            _ => Ok(self),
        }
    }

    fn look_up(&self, surroundings: &BTreeMap<String, String>) -> Result<Secret, SecretProblem> {
        let (kind, source) = match &self.source {
            Source::Variable(variable) => ("env", variable.clone()),
            Source::File(path) => ("file", path.to_string_lossy().into_owned()),
        };
        let text = format!("{}={kind}:{source}@{}", self.name, self.place);
        Secret::parse(&text, |variable| surroundings.get(variable).cloned()).map_err(|error| {
            match error {
                SecretError::NotSet { .. } => SecretProblem::NotSet {
                    name: self.name.clone(),
                    variable: source,
                },
                other => other.into(),
            }
        })
    }

    fn file(self) -> Option<PathBuf> {
        match self.source {
            Source::File(path) => Some(path),
            Source::Variable(_) => None,
        }
    }
}

/// Adds the hosts of secrets to the listed ones.
fn with_hosts(listed: &Rules, secrets: &Secrets) -> Result<Rules, ConfigError> {
    let mut rules = listed.clone();
    for Found { secret, origin, .. } in &secrets.0 {
        for host in secret
            .hosts()
            .iter()
            .filter(|host| !listed.allows_name(host, SECRET_PORT))
        {
            let texts: Vec<String> = rules
                .iter()
                .map(ToString::to_string)
                .chain([format!("{host}:{SECRET_PORT}")])
                .collect();
            rules =
                Rules::parse(&texts).map_err(|error| invalid_rule(Key::Secrets, origin, error))?;
        }
    }
    Ok(rules)
}

fn invalid_rule(key: Key, origin: &SettingOrigin, error: RuleError) -> ConfigError {
    invalid(
        key.name(),
        origin,
        &error.rule,
        RULE_ALLOWED,
        Some(error.problem.to_string()),
    )
}

/// Returns the secrets of one source, each a text or a table.
fn secret_items(
    origin: &SettingOrigin,
    written: &WrittenValue,
) -> Result<Vec<WrittenValue>, ConfigError> {
    match (origin, written) {
        (_, WrittenValue::Nothing) => Ok(Vec::new()),
        (_, WrittenValue::List(items)) => Ok(items.clone()),
        (SettingOrigin::Variable(_), WrittenValue::Text(whole)) => {
            Ok(phrases(whole, |part| part.contains('='))
                .into_iter()
                .map(WrittenValue::Text)
                .collect())
        }
        (_, WrittenValue::Text(_)) => Ok(vec![written.clone()]),
        (_, WrittenValue::Table(_)) => Err(layers::wrong_shape(
            Key::Secrets.name(),
            origin,
            "a list of texts or tables",
        )),
    }
}

/// Splits a variable at its commas, except where the following part does not start a new phrase.
fn phrases(whole: &str, begins: impl Fn(&str) -> bool) -> Vec<String> {
    let mut phrases: Vec<String> = Vec::new();
    for part in whole
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        match phrases.last_mut() {
            Some(phrase) if !begins(part) => {
                phrase.push(',');
                phrase.push_str(part);
            }
            _ => phrases.push(part.to_owned()),
        }
    }
    phrases
}

/// Returns whether this can only be a port or a range of ports: no rule is a bare number.
fn is_port(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'-')
}

/// Formats hosts and a header in the syntax of the flag, and rejects parts that contain its
/// separators.
fn place(name: &str, hosts: &[&str], header: Option<&str>) -> Result<String, SecretProblem> {
    if hosts.is_empty() {
        return Err(SecretProblem::NoHosts {
            name: name.to_owned(),
        });
    }
    let name: Arc<str> = name.into();
    for host in hosts {
        let refuse = |cause| SecretError::Host {
            name: name.clone(),
            host: (*host).to_owned(),
            cause,
        };
        HostName::parse(host).map_err(refuse)?;
    }
    match header {
        Some(header) if header.contains(['@', ':']) => Err(SecretError::Header {
            name,
            header: header.to_owned(),
        }
        .into()),
        Some(header) => Ok(format!("{}:{header}", hosts.join(","))),
        None => Ok(hosts.join(",")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{Case, case};
    use super::*;
    use crate::config::{PackageSettings, Settings};

    const VALUE: &str = "sk-0123456789-canary";

    /// A case with a secret's value in the server's own environment.
    fn with_value() -> Case {
        case().variable("API_KEY", VALUE)
    }

    fn allows(settings: &Settings, name: &str, port: u16) -> bool {
        settings
            .network
            .rules
            .allows_name(&HostName::parse(name).unwrap(), port)
    }

    fn allows_address(settings: &Settings, address: &str, port: u16) -> bool {
        settings
            .network
            .rules
            .allows_address(address.parse().unwrap(), port)
    }

    fn rules(settings: &Settings) -> Vec<String> {
        settings
            .network
            .rules
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    /// Returns the complete error, with its causes.
    fn refusal(case: Case) -> String {
        format!(
            "{:#}",
            anyhow::Error::from(case.result().expect_err("it should be refused"))
        )
    }

    #[test]
    fn nothing_is_reachable_unless_somebody_says_so() {
        for closed in [
            case(),
            case().flag(Key::AllowNetwork, "none"),
            case().flag(Key::AllowNetwork, "listed"),
        ] {
            let settings = closed.settings();
            assert!(settings.network.rules.is_empty() && settings.network.secrets.is_empty());
        }
        let open = case()
            .flags(Key::AllowedDomains, &["example.com"])
            .settings();
        assert!(allows(&open, "example.com", 443) && !open.network.rules.is_empty()); // control
    }

    #[test]
    fn lists_of_the_older_program_work_as_written() {
        let settings = case()
            .flags(
                Key::AllowedDomains,
                &["example.com", "192.0.2.7", "192.168.1.0/24"],
            )
            .settings();
        assert!(allows(&settings, "example.com", 443) && allows(&settings, "example.com", 80));
        assert!(
            allows_address(&settings, "192.0.2.7", 443)
                && allows_address(&settings, "192.168.1.200", 80)
        );
        assert!(
            !allows(&settings, "www.example.com", 443)
                && !allows_address(&settings, "192.168.2.1", 443)
        );
    }

    #[test]
    fn rules_are_the_same_in_the_file_in_a_variable_and_as_flags() {
        let expected = [
            "*.example.com:8000,8443",
            "[2001:db8::1]:8080-8090",
            "192.0.2.7",
        ];
        let yaml = "allowed_domains:\n- '*.example.com:8000,8443'\n- '[2001:db8::1]:8080-8090'\n- \
                    192.0.2.7\n";
        let variable = "*.example.com:8000,8443, [2001:db8::1]:8080-8090,192.0.2.7,";
        for case in [
            case().yaml(yaml),
            case().variable("CELLBLOCK_ALLOWED_DOMAINS", variable),
            case().flags(Key::AllowedDomains, &expected),
        ] {
            assert_eq!(rules(&case.settings()), expected);
        }
        assert_eq!(
            rules(&case().yaml("allowed_domains: example.com").settings()),
            ["example.com"]
        );
    }

    #[test]
    fn a_stronger_list_replaces_a_weaker_one_and_an_empty_variable_closes() {
        let file = || case().yaml("allowed_domains: [weak.example.com]");
        assert_eq!(
            rules(
                &file()
                    .flags(Key::AllowedDomains, &["strong.example.com"])
                    .settings()
            ),
            ["strong.example.com"]
        );
        assert!(
            file()
                .variable("CELLBLOCK_ALLOWED_DOMAINS", "")
                .settings()
                .network
                .rules
                .is_empty()
        );
        assert!(!file().settings().network.rules.is_empty()); // control
    }

    #[test]
    fn a_wrong_rule_is_refused_with_its_place_and_what_to_write() {
        let refusal = case()
            .yaml("cpus: 1\nallowed_domains: [example.com, 'https://example.com/a']")
            .refusal();
        let start = "/etc/cellblock/config.yaml line 2: allowed_domains cannot \
                     be \"https://example.com/a\" (a rule is a name, not an \
                     address of a page: write example.com); allowed: a name such as example.com, \
                     *.example.com";
        assert!(refusal.starts_with(start), "{refusal}");
        let flag = case().flags(Key::DeniedDomains, &["10.0.0.1/8"]).refusal();
        assert!(
            flag.starts_with("--denied-domain: denied_domains cannot be \"10.0.0.1/8\" (")
                && flag.contains("10.0.0.0/8"),
            "{flag}"
        );
        let number = case()
            .variable("CELLBLOCK_ALLOWED_DOMAINS", "8443,example.com")
            .refusal();
        assert!(
            number.starts_with("CELLBLOCK_ALLOWED_DOMAINS: allowed_domains cannot be \"8443\""),
            "{number}"
        );
        assert!(
            case()
                .flags(Key::AllowedDomains, &["*"])
                .refusal()
                .contains("allow the network `all`")
        );
        assert!(
            case()
                .yaml("allowed_domains: {example.com: 443}")
                .refusal()
                .contains("a list")
        );
        case()
            .flags(Key::AllowedDomains, &["example.com", "10.0.0.0/8"])
            .settings(); // control
    }

    #[test]
    fn what_is_denied_wins_over_everything_that_is_allowed() {
        let listed = || case().flags(Key::AllowedDomains, &["*.example.com", "192.168.1.0/24"]);
        let all = || case().flag(Key::AllowNetwork, "all");
        for open in [listed().settings(), all().settings()] {
            assert!(
                allows(&open, "ads.example.com", 443) && allows_address(&open, "192.168.1.9", 80)
            ); // control
        }
        let denied = ["ads.example.com", "192.168.1.9"];
        for closed in [
            listed().flags(Key::DeniedDomains, &denied),
            all().flags(Key::DeniedDomains, &denied),
        ] {
            let closed = closed.settings();
            assert!(
                !allows(&closed, "ads.example.com", 443)
                    && !allows_address(&closed, "192.168.1.9", 80)
            );
            assert!(
                allows(&closed, "api.example.com", 443)
                    && allows_address(&closed, "192.168.1.8", 80)
            );
        }
        let marked = all()
            .flags(Key::AllowedDomains, &["!ads.example.com"])
            .settings();
        assert!(!allows(&marked, "ads.example.com", 443) && allows(&marked, "api.example.com", 22));
        let variable = all()
            .variable(
                "CELLBLOCK_DENIED_DOMAINS",
                "ads.example.com:80,443,b.example.com",
            )
            .settings();
        assert!(
            !allows(&variable, "ads.example.com", 443) && allows(&variable, "ads.example.com", 22)
        );
        assert!(!allows(&variable, "b.example.com", 22));
    }

    #[test]
    fn the_choice_of_everything_is_a_word_of_its_own() {
        let all = case().flag(Key::AllowNetwork, "all").settings();
        assert!(all.network.rules.is_everything() && all.notices.is_empty());
        assert!(
            case()
                .yaml("allow_network: ALL")
                .settings()
                .network
                .rules
                .is_everything()
        );
        let both = case()
            .flag(Key::AllowNetwork, "all")
            .flags(Key::AllowedDomains, &["example.com"])
            .settings();
        assert!(both.network.rules.is_everything());
        assert_eq!(
            both.notices,
            ["allowed_domains adds nothing beside allow_network: all"]
        );
        assert_eq!(
            case().variable("CELLBLOCK_ALLOW_NETWORK", "some").refusal(),
            "CELLBLOCK_ALLOW_NETWORK: allow_network cannot be \"some\"; allowed: none, listed or \
             all"
        );
    }

    #[test]
    fn none_beside_a_list_is_refused_with_both_places() {
        let list = || case().yaml("cpus: 1\nallowed_domains: ['!a.example.com', example.com]");
        assert_eq!(
            list().flag(Key::AllowNetwork, "none").refusal(),
            "--allow-network: allow_network cannot be \"none\" (/etc/cellblock/config.yaml line 2: \
             allowed_domains lists example.com); \
             allowed: listed or all beside allowed_domains, or none and an empty allowed_domains"
        );
        assert!(allows(
            &list().flag(Key::AllowNetwork, "listed").settings(),
            "example.com",
            443
        )); // control
        for agreeing in [
            list()
                .variable("CELLBLOCK_ALLOWED_DOMAINS", "")
                .flag(Key::AllowNetwork, "none"),
            case()
                .flags(Key::AllowedDomains, &["!example.com"])
                .flag(Key::AllowNetwork, "none"),
            case()
                .flags(Key::DeniedDomains, &["example.com"])
                .flag(Key::AllowNetwork, "none"),
        ] {
            assert!(agreeing.settings().network.rules.is_empty());
        }
        let secret = with_value().flags(Key::Secrets, &["TOKEN=env:API_KEY@api.example.com"]);
        assert!(
            secret
                .flag(Key::AllowNetwork, "none")
                .refusal()
                .contains("(--secret: the secret TOKEN opens the way to api.example.com)")
        );
    }

    #[test]
    fn a_secret_opens_the_way_to_its_hosts_for_https_only() {
        let settings = with_value()
            .flags(
                Key::Secrets,
                &["TOKEN=env:API_KEY@api.example.com,b.example.com:Authorization"],
            )
            .settings();
        assert_eq!(
            settings
                .network
                .secrets
                .iter()
                .map(Secret::name)
                .collect::<Vec<_>>(),
            ["TOKEN"]
        );
        assert_eq!(
            rules(&settings),
            ["api.example.com:443", "b.example.com:443"]
        );
        let listed = with_value()
            .flags(Key::AllowedDomains, &["*.example.com"])
            .flags(Key::Secrets, &["TOKEN=env:API_KEY@api.example.com"])
            .settings();
        assert_eq!(
            rules(&listed),
            ["*.example.com"],
            "what is listed need not be added"
        );
        let open = with_value()
            .flag(Key::AllowNetwork, "all")
            .flags(Key::Secrets, &["T=env:API_KEY@api.example.com"]);
        assert!(open.settings().network.rules.is_everything());
    }

    #[test]
    fn a_secret_for_a_denied_host_is_told_of() {
        let secret = || with_value().flags(Key::Secrets, &["TOKEN=env:API_KEY@api.example.com"]);
        let settings = secret()
            .flags(Key::DeniedDomains, &["**.example.com"])
            .settings();
        assert!(!allows(&settings, "api.example.com", 443));
        assert_eq!(
            settings.notices,
            ["the secret TOKEN cannot be used at api.example.com, which is denied"]
        );
        assert!(secret().settings().notices.is_empty()); // control
    }

    #[test]
    fn a_missing_variable_is_named() {
        let secret = ["TOKEN=env:API_KEY@api.example.com"];
        assert_eq!(
            refusal(case().flags(Key::Secrets, &secret)),
            "--secret: number 1 of secrets cannot be used: secret TOKEN: the variable API_KEY, \
             which should hold its value, is not set"
        );
        with_value().flags(Key::Secrets, &secret).settings(); // control
    }

    #[test]
    fn secrets_are_the_same_in_the_file_in_a_variable_and_as_flags() {
        let table = "secrets:\n- {name: ONE, env: API_KEY, hosts: [a.example.com, b.example.com], \
                     header: Authorization}\n\
                     - TWO=env:API_KEY@c.example.com\n";
        let texts = [
            "ONE=env:API_KEY@a.example.com,b.example.com:Authorization",
            "TWO=env:API_KEY@c.example.com",
        ];
        let expected = format!(
            "{:?}",
            with_value()
                .flags(Key::Secrets, &texts)
                .settings()
                .network
                .secrets
        );
        assert!(
            expected.contains("ONE")
                && expected.contains("authorization")
                && expected.contains("c.example.com")
        );
        for case in [
            with_value().yaml(table),
            with_value().variable("CELLBLOCK_SECRETS", &texts.join(",")),
        ] {
            assert_eq!(format!("{:?}", case.settings().network.secrets), expected);
        }
        let one_host = "secrets: [{name: ONE, env: API_KEY, hosts: a.example.com}]";
        assert_eq!(
            rules(&with_value().yaml(one_host).settings()),
            ["a.example.com:443"]
        );
    }

    #[test]
    fn a_mistake_in_a_secret_is_told_with_its_place_and_without_what_was_written() {
        for (text, told) in [
            (
                "sk-0123456789-canary",
                "a secret is written NAME=env:VARIABLE@host",
            ),
            (
                "TOKEN=sk-0123456789-canary@api.example.com",
                "a secret is written",
            ),
            (
                "TOKEN=env:sk-0123456789-canary@api.example.com",
                "secret TOKEN: \"env\" takes the name of a variable",
            ),
            (
                "sk-0123456789-canary=env:API_KEY@api.example.com",
                "the name of a secret becomes a variable",
            ),
            (
                "TOKEN=env:API_KEY@192.0.2.1",
                "secret TOKEN: \"192.0.2.1\" is not the name of a host",
            ),
            (
                "TOKEN=env:API_KEY@api.example.com:443",
                "secret TOKEN: \"443\" is not a header",
            ),
            (
                "TOKEN=env:SHORT@api.example.com",
                "secret TOKEN: the value must have",
            ),
            (
                "TOKEN=file:gone@api.example.com",
                "secret TOKEN: its file could not be read",
            ),
            (
                "FIRST=env:API_KEY@api.example.com",
                "secret FIRST is given twice",
            ),
        ] {
            let case = with_value().variable("SHORT", "canary");
            let refusal =
                refusal(case.flags(Key::Secrets, &["FIRST=env:API_KEY@api.example.com", text]));
            assert!(
                refusal.starts_with(&format!(
                    "--secret: number 2 of secrets cannot be used: {told}"
                )),
                "{refusal}"
            );
            assert!(!refusal.contains("canary"), "{refusal}");
        }
    }

    #[test]
    fn a_mistake_in_a_table_of_a_secret_is_told_with_its_line() {
        let said =
            |members: &str| refusal(with_value().yaml(&format!("secrets:\n  - {{{members}}}\n")));
        let place = "/etc/cellblock/config.yaml line 2: ";
        for (members, told) in [
            (
                "env: API_KEY, hosts: [a.example.com]",
                "number 1 of secrets cannot be used: it has no name",
            ),
            (
                "name: A, hosts: [a.example.com]",
                "number 1 of secrets cannot be used: secret A: it needs either",
            ),
            (
                "name: A, env: API_KEY, file: x, hosts: [a.example.com]",
                "number 1 of secrets cannot be used: secret A: it needs either",
            ),
            (
                "name: A, env: API_KEY",
                "number 1 of secrets cannot be used: secret A: it needs \"hosts\"",
            ),
            (
                "name: A, env: API_KEY, hosts: ['a.example.com:443']",
                "number 1 of secrets cannot be used: secret A: \"a.example.com:443\" is not",
            ),
            (
                "name: A, env: API_KEY, hosts: ['x@a.example.com']",
                "number 1 of secrets cannot be used: secret A: \"x@a.example.com\" is not",
            ),
            (
                "name: A, env: API_KEY, hosts: [a.example.com], header: 'X@b.example.com'",
                "number 1 of secrets cannot be used: secret A: \"X@b.example.com\" is not",
            ),
            (
                "name: 'A=env:B@c', env: API_KEY, hosts: [a.example.com]",
                "number 1 of secrets cannot be used: the name of a secret",
            ),
            (
                "name: A, value: canary, hosts: [a.example.com]",
                "there is no setting \"value\"",
            ),
            (
                "name: [A, B], env: API_KEY, hosts: [a.example.com]",
                "secrets.name cannot be",
            ),
        ] {
            let refusal = said(members);
            assert!(
                refusal.starts_with(&format!("{place}{told}")),
                "{members}: {refusal}"
            );
            assert!(!refusal.contains("canary"), "{refusal}");
        }
        assert!(
            refusal(with_value().yaml("secrets: {A: B}")).contains("a list of texts or tables")
        );
        with_value()
            .yaml("secrets:\n  - {name: A, env: API_KEY, hosts: [a.example.com]}\n")
            .settings(); // control
    }

    #[test]
    fn a_secret_can_be_in_a_file_that_is_relative_to_where_it_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |mode| {
            use std::os::unix::fs::PermissionsExt;
            std::fs::write(folder.path().join("token"), VALUE).unwrap();
            std::fs::set_permissions(
                folder.path().join("token"),
                std::fs::Permissions::from_mode(mode),
            )
            .unwrap();
            let mut case = case();
            case.sources.machine.current_dir = folder.path().to_owned();
            case.flags(Key::Secrets, &["TOKEN=file:./token@api.example.com"])
        };
        let settings = write(0o600).settings();
        assert_eq!(settings.secret_files, [folder.path().join("token")]);
        assert!(!format!("{settings:?}").contains("canary"));
        let open = refusal(write(0o644));
        assert!(
            open.contains("secret TOKEN: other users may read or change its file")
                && !open.contains("canary"),
            "{open}"
        );
        let elsewhere =
            case().yaml("secrets: [{name: TOKEN, file: token, hosts: [api.example.com]}]");
        assert!(
            refusal(elsewhere).contains("secret TOKEN: its file could not be read"),
            "it is beside the configuration file"
        );
    }

    #[test]
    fn the_value_of_a_secret_never_becomes_a_variable_inside() {
        let secret = |case: Case| case.flags(Key::Secrets, &["TOKEN=env:API_KEY@api.example.com"]);
        let same_name = secret(with_value())
            .variable("KERNEL_ENV_TOKEN", VALUE)
            .settings();
        assert_eq!(same_name.variables.get("TOKEN"), None);
        assert_eq!(
            same_name.notices,
            [
                "the variable TOKEN is not used: TOKEN is also a secret, whose placeholder code \
                 inside sees"
            ]
        );
        let other_name = refusal(
            secret(with_value()).flags(Key::Variables, &[&format!("OTHER=Bearer {VALUE}")]),
        );
        assert_eq!(
            other_name,
            "--secret: number 1 of secrets cannot be used: secret TOKEN: its value is also in the \
             variable OTHER, which code inside sees; \
             take it out of there"
        );
        let unrelated = secret(with_value())
            .flags(Key::Variables, &["OTHER=Bearer"])
            .settings(); // control
        assert_eq!(
            (unrelated.variables.get("OTHER"), unrelated.notices.len()),
            (Some("Bearer"), 0)
        );
    }

    #[test]
    fn printing_settings_shows_no_value_of_a_secret() {
        let settings = with_value()
            .flags(Key::Secrets, &["TOKEN=env:API_KEY@api.example.com"])
            .settings();
        let printed = format!("{settings:?}");
        assert!(
            printed.contains("TOKEN")
                && printed.contains("api.example.com")
                && !printed.contains("canary")
        );
    }

    #[test]
    fn one_session_has_limits_of_its_own() {
        let limits = |yaml: &str| {
            let limits = case().yaml(yaml).settings().network.limits;
            (
                limits.connections,
                limits.bytes_per_second,
                limits.questions_per_second,
            )
        };
        assert_eq!(limits(""), (256, 0, 100));
        assert_eq!(
            limits("network_connections: 10000\nnetwork_bandwidth: 10M\nnetwork_questions: 1"),
            (10_000, 10 << 20, 1)
        );
        assert_eq!(limits("network_bandwidth: 0"), (256, 0, 100));
        for (key, wrong, allowed) in [
            ("network_connections", "0", "a number from 1 to 10000"),
            ("network_connections", "10001", "a number from 1 to 10000"),
            ("network_questions", "0", "a number from 1 to 10000"),
            (
                "network_bandwidth",
                "1023",
                "a size such as 512M or 2GiB, from 1 KiB to 1 TiB per second, or 0 for no limit",
            ),
        ] {
            let refusal = case().yaml(&format!("{key}: {wrong}")).refusal();
            let expected = format!(
                "/etc/cellblock/config.yaml line 1: {key} cannot be \"{wrong}\"; allowed: {allowed}"
            );
            assert_eq!(refusal, expected);
        }
        assert!(
            case()
                .variable("CELLBLOCK_NETWORK_BANDWIDTH", "fast")
                .refusal()
                .contains("does not start with a number")
        );
    }

    #[test]
    fn packages_can_be_installed_unless_that_is_switched_off() {
        let usual = PackageSettings {
            allowed: true,
            size: 10 << 30,
            store_size: 20 << 30,
            timeout: Duration::from_secs(900),
            memory: 6 << 30,
            disk: 4 << 30,
        };
        assert_eq!(case().settings().packages, usual);
        for off in [
            case().yaml("install_packages: off"),
            case().flag(Key::InstallPackages, "off"),
        ] {
            assert_eq!(
                off.settings().packages,
                PackageSettings {
                    allowed: false,
                    ..usual
                }
            );
        }
        let changed = case()
            .yaml("package_size: 100M\npackage_store_size: 2G\npackage_timeout: 1m")
            .settings()
            .packages;
        let timeout = Duration::from_secs(60);
        assert_eq!(
            changed,
            PackageSettings {
                size: 100 << 20,
                store_size: 2 << 30,
                timeout,
                ..usual
            }
        );
        let disk = case().yaml("package_disk: 1G").settings().packages;
        assert_eq!(
            (disk.disk, disk.memory),
            (1 << 30, 3 << 30),
            "files are memory there"
        );
        let settings = case()
            .yaml("package_disk: 1G\npackage_memory: 512M\nmemory: 1G\nfiles: 200")
            .settings();
        let own = settings.packages.sandbox_limits(&settings.limits);
        assert_eq!(
            (own.disk, own.memory, own.family_memory, own.files),
            (1 << 30, 512 << 20, 512 << 20, 200)
        );
        assert_eq!(settings.limits.memory, 1 << 30, "sessions have theirs");
        assert!(
            case()
                .yaml("package_store_size: 1K")
                .refusal()
                .contains("package_store_size")
        );
        assert!(
            case()
                .flag(Key::InstallPackages, "perhaps")
                .refusal()
                .contains("allowed: on or off")
        );
        assert!(
            case()
                .yaml("package_size: 1K")
                .refusal()
                .contains("from 1 MiB to 16 TiB")
        );
        assert!(
            case()
                .yaml("package_timeout: 0")
                .refusal()
                .contains("from 1 s to 1 d")
        );
    }
}
