//! The sources of settings, and their precedence.
//!
//! A file, the environment and the flags are each converted into the same form: keys with the
//! written values and their origins. The layers are then merged. This module does not interpret
//! values; `checks` does.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::table::{Key, Spelling, Values};
use super::{ConfigError, InvalidValue};

const PREFIX: &str = "CELLBLOCK_";

/// The end of a warning about a former name.
pub(crate) const FORMER_NAME_ENDS: &str = "the former name works in this release only";

/// Variables with our prefix that are read elsewhere and are not settings.
const OTHER_VARIABLES: [&str; 2] = ["CELLBLOCK_CONFIG", "CELLBLOCK_UV"];

/// The written value of a setting. It has no `Debug`, because it may hold a secret.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum WrittenValue {
    Nothing,
    Text(String),
    List(Vec<WrittenValue>),
    Table(Vec<WrittenMember>),
}

/// One entry of a table.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct WrittenMember {
    pub name: String,
    pub line: Option<u64>,
    pub value: WrittenValue,
}

/// Where a setting was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    File { path: PathBuf, line: Option<u64> },
    Variable(String),
    Flag(&'static str),
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SettingOrigin::File {
                path,
                line: Some(line),
            } => write!(formatter, "{} line {line}", path.display()),
            SettingOrigin::File { path, line: None } => write!(formatter, "{}", path.display()),
            SettingOrigin::Variable(name) => formatter.write_str(name),
            SettingOrigin::Flag(flag) => formatter.write_str(flag),
        }
    }
}

impl SettingOrigin {
    /// Returns the same origin, at another line if it is a file.
    pub(super) fn at(&self, line: Option<u64>) -> SettingOrigin {
        match self {
            SettingOrigin::File { path, line: old } => SettingOrigin::File {
                path: path.clone(),
                line: line.or(*old),
            },
            other => other.clone(),
        }
    }
}

/// The settings of one source.
#[derive(Clone, Default)]
pub(super) struct SettingsLayer {
    settings: Vec<(Key, SettingOrigin, WrittenValue)>,
    former_names: Vec<FormerNameUse>,
}

/// A setting that was written under a former name.
#[derive(Clone)]
struct FormerNameUse {
    key: Key,
    origin: SettingOrigin,
    /// As it was written.
    former: String,
    /// How the same source writes it now.
    name: String,
}

impl SettingsLayer {
    pub(super) fn of(settings: Vec<(Key, SettingOrigin, WrittenValue)>) -> SettingsLayer {
        SettingsLayer {
            settings,
            former_names: Vec::new(),
        }
    }

    /// Adds a setting, which takes precedence over earlier ones.
    pub(super) fn push(&mut self, key: Key, origin: SettingOrigin, written: WrittenValue) {
        self.settings.push((key, origin, written));
    }

    /// Adds a setting under the name that was used for it.
    fn push_as(
        &mut self,
        (key, spelling): (Key, Spelling),
        written_name: &str,
        origin: SettingOrigin,
        value: WrittenValue,
    ) {
        if spelling == Spelling::Former {
            let name = match &origin {
                SettingOrigin::File { .. } => key.name().to_owned(),
                SettingOrigin::Variable(_) => variable_name(key.name()),
                SettingOrigin::Flag(_) => key.flag_name().to_owned(),
            };
            self.former_names.push(FormerNameUse {
                key,
                origin: origin.clone(),
                former: written_name.to_owned(),
                name,
            });
        }
        self.push(key, origin, value);
    }

    /// Returns a warning for each setting that was written under a former name. Rejects a setting
    /// that has different values under its names.
    pub(super) fn former_names(&self) -> Result<Vec<String>, ConfigError> {
        let warning = |used: &FormerNameUse| {
            let of_key = self.settings.iter().filter(|(key, ..)| *key == used.key);
            let mut values = of_key.map(|(_, _, value)| value);
            let first = values.next();
            if values.any(|value| Some(value) != first) {
                return Err(ConfigError::FormerName {
                    origin: used.origin.clone(),
                    former: used.former.clone(),
                    name: used.name.clone(),
                });
            }
            let (former, name) = (&used.former, &used.name);
            let warning = format!("{former} is now called {name}; {FORMER_NAME_ENDS}");
            Ok(match &used.origin {
                origin @ SettingOrigin::File { .. } => format!("{origin}: {warning}"),
                _ => warning,
            })
        };
        self.former_names.iter().map(warning).collect()
    }
}

/// The settings given as flags.
#[derive(Clone, Default)]
pub struct Flags(SettingsLayer);

impl Flags {
    /// Adds a flag that can be given once.
    pub fn single(mut self, key: Key, value: Option<String>) -> Flags {
        self.add(key, key.flag_name(), value.map(WrittenValue::Text));
        self
    }

    /// Adds a flag that can be repeated.
    pub fn repeated(mut self, key: Key, values: Vec<String>) -> Flags {
        self.add(key, key.flag_name(), list_of(values));
        self
    }

    /// Adds the values of a flag that is the setting's own or a former one.
    pub fn given_as(mut self, key: Key, flag: &'static str, values: Vec<String>) -> Flags {
        let value = if key.row().is_list() {
            list_of(values)
        } else {
            values.into_iter().next().map(WrittenValue::Text)
        };
        self.add(key, flag, value);
        self
    }

    fn add(&mut self, key: Key, flag: &'static str, value: Option<WrittenValue>) {
        if let Some(value) = value {
            let spelling = key.flag_spelling(flag);
            self.0
                .push_as((key, spelling), flag, SettingOrigin::Flag(flag), value);
        }
    }

    /// Names flags in origins as they were typed. `typed` has every flag of the command line. If
    /// both spellings of a flag were used, its main name is reported for all its values.
    pub fn as_typed(mut self, typed: &BTreeSet<String>) -> Flags {
        for (key, origin, _) in &mut self.0.settings {
            let flag = key.row().flag.as_ref();
            if *origin == SettingOrigin::Flag(key.flag_name())
                && let Some(alias) = flag.and_then(|flag| flag.alias)
                && typed.contains(alias)
                && !typed.contains(key.flag_name())
            {
                *origin = SettingOrigin::Flag(alias);
            }
        }
        self
    }

    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<Key> {
        let settings = self.0.settings.iter();
        settings.map(|(key, _, _)| *key).collect()
    }

    pub(super) fn layer(self) -> SettingsLayer {
        self.0
    }

    /// Returns the flags in a form that can be passed to another process.
    pub(super) fn given(&self) -> Vec<(Key, FlagValue)> {
        let text = |written: &WrittenValue| match written {
            WrittenValue::Text(text) => text.clone(),
            _ => unreachable!("a flag holds a text, or a list of texts"),
        };
        let given = |written: &WrittenValue| match written {
            WrittenValue::List(values) => FlagValue::Often(values.iter().map(text).collect()),
            single => FlagValue::Once(text(single)),
        };
        self.0
            .settings
            .iter()
            .map(|(key, _, written)| (*key, given(written)))
            .collect()
    }
}

impl From<Vec<(Key, FlagValue)>> for Flags {
    fn from(given: Vec<(Key, FlagValue)>) -> Flags {
        given
            .into_iter()
            .fold(Flags::default(), |flags, (key, given)| match given {
                FlagValue::Once(value) => flags.single(key, Some(value)),
                FlagValue::Often(values) => flags.repeated(key, values),
            })
    }
}

fn list_of(values: Vec<String>) -> Option<WrittenValue> {
    let values: Vec<_> = values.into_iter().map(WrittenValue::Text).collect();
    (!values.is_empty()).then_some(WrittenValue::List(values))
}

/// The value of a flag. It has no `Debug`, because it may hold a secret.
#[derive(Clone, Serialize, serde::Deserialize)]
pub(super) enum FlagValue {
    Once(String),
    Often(Vec<String>),
}

/// Parses a configuration file.
pub(super) fn from_file(path: &Path, text: &str) -> Result<SettingsLayer, ConfigError> {
    let mut layer = SettingsLayer::default();
    for member in members_of(path, text)? {
        let origin = SettingOrigin::File {
            path: path.to_owned(),
            line: member.line,
        };
        let Some(found) = Key::from_name(&member.name) else {
            return Err(unknown_key(&member.name, origin, Key::names()));
        };
        layer.push_as(found, &member.name, origin, member.value);
    }
    Ok(layer)
}

/// Parses a YAML file that holds a table.
pub(super) fn members_of(path: &Path, text: &str) -> Result<Vec<WrittenMember>, ConfigError> {
    let whole: WrittenValue = serde_saphyr::from_str(text).map_err(|error| ConfigError::Yaml {
        path: path.to_owned(),
        line: error
            .location()
            .map(|location| location.line())
            .filter(|line| *line > 0),
        why: with_advice(first_line(&error.to_string())),
    })?;
    match whole {
        WrittenValue::Nothing => Ok(Vec::new()),
        WrittenValue::Table(members) => Ok(members),
        WrittenValue::Text(_) | WrittenValue::List(_) => {
            let why = "the file must hold settings as \"key: value\" lines".to_owned();
            Err(ConfigError::Yaml {
                path: path.to_owned(),
                line: Some(1),
                why,
            })
        }
    }
}

/// Reads the settings among environment variables. Also returns the unknown variables with our
/// prefix.
///
/// Such a variable is rejected only if it looks like a mistyped setting. Others can have another
/// purpose: Kubernetes sets `CELLBLOCK_SERVICE_HOST` in every pod beside a service called
/// "cellblock".
pub(super) fn from_environment(
    variables: &BTreeMap<String, String>,
) -> Result<(SettingsLayer, Vec<String>), ConfigError> {
    let mut layer = SettingsLayer::default();
    let mut unknown = Vec::new();
    for (variable, value) in variables
        .iter()
        .filter(|(name, _)| !OTHER_VARIABLES.contains(&name.as_str()))
    {
        let Some(name) = variable.strip_prefix(PREFIX) else {
            continue;
        };
        let origin = SettingOrigin::Variable(variable.clone());
        match Key::from_name(&name.to_ascii_lowercase())
            .filter(|(key, _)| key.row().values != Values::FileOnly)
        {
            Some(found) if !matches!(found.0.row().values, Values::List | Values::Pairs) => {
                layer.push_as(found, variable, origin, WrittenValue::Text(value.clone()));
            }
            Some(found) => {
                let parts = value
                    .split(',')
                    .map(str::trim)
                    .filter(|part| !part.is_empty());
                let parts = parts.map(|part| WrittenValue::Text(part.to_owned()));
                layer.push_as(found, variable, origin, WrittenValue::List(parts.collect()));
            }
            None => match nearest(&name.to_ascii_lowercase(), Key::names()) {
                Some(near) => {
                    let nearest = Some(variable_name(near));
                    return Err(ConfigError::UnknownKey {
                        key: variable.clone(),
                        origin,
                        nearest,
                    });
                }
                None => unknown.push(variable.clone()),
            },
        }
    }
    Ok((layer, unknown))
}

/// Returns the name of the variable of a setting.
fn variable_name(name: &str) -> String {
    format!("{PREFIX}{}", name.to_ascii_uppercase())
}

/// All sources, merged.
pub(super) struct Merged(BTreeMap<Key, Vec<(SettingOrigin, WrittenValue)>>);

impl Merged {
    /// Merges layers; later ones take precedence.
    pub(super) fn from_weakest_to_strongest(
        layers: impl IntoIterator<Item = SettingsLayer>,
    ) -> Merged {
        let mut merged: BTreeMap<Key, Vec<(SettingOrigin, WrittenValue)>> = BTreeMap::new();
        for (key, origin, written) in layers.into_iter().flat_map(|layer| layer.settings) {
            let writings = merged.entry(key).or_default();
            if key.row().values != Values::Pairs {
                writings.clear();
            }
            writings.push((origin, written));
        }
        Merged(merged)
    }

    /// Returns everything written for a key, lowest precedence first. Only pairs can have more than
    /// one source.
    pub(super) fn all(&self, key: Key) -> &[(SettingOrigin, WrittenValue)] {
        self.0.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Returns the single text written for a key.
    pub(super) fn text(&self, key: Key) -> Result<Option<(&SettingOrigin, &str)>, ConfigError> {
        match self.all(key) {
            [] => Ok(None),
            [(_, WrittenValue::Nothing), ..] => Ok(None),
            [(origin, WrittenValue::Text(text)), ..] => Ok(Some((origin, text))),
            [(origin, _), ..] => Err(wrong_shape(key.name(), origin, "a single value")),
        }
    }

    /// Returns the list of texts written for a key; a single text is a list of one.
    pub(super) fn texts(
        &self,
        key: Key,
    ) -> Result<Option<(&SettingOrigin, Vec<&str>)>, ConfigError> {
        match self.all(key) {
            [] | [(_, WrittenValue::Nothing), ..] => Ok(None),
            [(origin, written), ..] => written
                .texts(key.name(), origin)
                .map(|texts| Some((origin, texts))),
        }
    }
}

impl WrittenValue {
    /// Returns the texts of a list, or the one text.
    pub(super) fn texts(
        &self,
        key: &str,
        origin: &SettingOrigin,
    ) -> Result<Vec<&str>, ConfigError> {
        match self {
            WrittenValue::Text(text) => Ok(vec![text]),
            WrittenValue::Nothing => Ok(Vec::new()),
            WrittenValue::Table(_) => Err(wrong_shape(key, origin, "a list")),
            WrittenValue::List(items) => items
                .iter()
                .map(|item| match item {
                    WrittenValue::Text(text) => Ok(text.as_str()),
                    _ => Err(wrong_shape(key, origin, "a list of single values")),
                })
                .collect(),
        }
    }
}

/// Returns the error for an unknown key, with the nearest known one.
pub(super) fn unknown_key<'a>(
    key: &str,
    origin: SettingOrigin,
    known: impl Iterator<Item = &'a str>,
) -> ConfigError {
    let nearest = nearest(&key.to_ascii_lowercase().replace('-', "_"), known).map(str::to_owned);
    ConfigError::UnknownKey {
        key: key.to_owned(),
        origin,
        nearest,
    }
}

/// Returns the error for a list or table in the place of a single value, or the reverse.
pub(super) fn wrong_shape(key: &str, origin: &SettingOrigin, allowed: &str) -> ConfigError {
    let given = "something of another shape".to_owned();
    ConfigError::Invalid(Box::new(InvalidValue {
        key: key.to_owned(),
        origin: origin.clone(),
        given,
        allowed: allowed.to_owned(),
        why: None,
    }))
}

/// Returns the most likely known name for a mistyped one.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Jaro-Winkler over 0.85 recognizes "memroy" and "max_session", and does not match
    // "service_host".
    const LOOKS_LIKE: f64 = 0.85;
    known
        .map(|known| (strsim::jaro_winkler(name, known), known))
        .filter(|(similarity, _)| *similarity >= LOOKS_LIKE)
        .max_by(|left, right| left.0.total_cmp(&right.0))
        .map(|(_, known)| known)
}

/// Adds advice for a common mistake that is hard to recognize from the parser's message.
fn with_advice(why: String) -> String {
    if why.contains("unknown anchor") {
        return format!(
            "{why}; write a text that begins with * in quotes, such as \"*.example.com\""
        );
    }
    why
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

impl<'de> Deserialize<'de> for WrittenValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WrittenValue, D::Error> {
        deserializer.deserialize_any(WrittenVisitor)
    }
}

struct WrittenVisitor;

macro_rules! visit_as_text {
    ($($method:ident: $type:ty),*) => {
        $(fn $method<E>(self, value: $type) -> Result<WrittenValue, E> {
            Ok(WrittenValue::Text(value.to_string()))
        })*
    };
}

impl<'de> Visitor<'de> for WrittenVisitor {
    type Value = WrittenValue;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value, a list or a table")
    }

    visit_as_text!(
        visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128,
        visit_f64: f64, visit_str: &str
    );

    fn visit_unit<E>(self) -> Result<WrittenValue, E> {
        Ok(WrittenValue::Nothing)
    }

    fn visit_none<E>(self) -> Result<WrittenValue, E> {
        Ok(WrittenValue::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<WrittenValue, D::Error> {
        WrittenValue::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<WrittenValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(WrittenValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WrittenValue, A::Error> {
        let mut members = Vec::new();
        while let Some((name, value)) = map.next_entry::<Spanned<String>, WrittenValue>()? {
            let line = Some(name.referenced.line()).filter(|line| *line > 0);
            members.push(WrittenMember {
                name: name.value,
                line,
                value,
            });
        }
        Ok(WrittenValue::Table(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<SettingsLayer, ConfigError> {
        from_file(Path::new("config.yaml"), text)
    }

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn refusal<T>(result: Result<T, ConfigError>) -> String {
        result.err().expect("it should be refused").to_string()
    }

    #[test]
    fn a_stronger_source_replaces_a_weaker_one() {
        let weak = file("memory: 1G\ncpus: 1\nallowed_dirs: [/a, /b]").unwrap();
        let (middle, _) = from_environment(&variables(&[
            ("CELLBLOCK_MEMORY", "2G"),
            ("CELLBLOCK_ALLOWED_DIRS", "/c, /d"),
        ]))
        .unwrap();
        let strong = Flags::default()
            .single(Key::Memory, Some("3G".to_owned()))
            .layer();
        let merged = Merged::from_weakest_to_strongest([weak, middle, strong]);
        assert_eq!(merged.text(Key::Memory).unwrap().unwrap().1, "3G");
        assert_eq!(merged.text(Key::Cpus).unwrap().unwrap().1, "1");
        assert_eq!(
            merged.texts(Key::AllowedDirs).unwrap().unwrap().1,
            ["/c", "/d"]
        );
        assert!(merged.text(Key::Disk).unwrap().is_none());
    }

    #[test]
    fn variables_of_several_sources_add_up() {
        let weak = file("variables: {A: 1}").unwrap();
        let strong = Flags::default()
            .repeated(Key::Variables, vec!["B=2".to_owned()])
            .layer();
        assert_eq!(
            Merged::from_weakest_to_strongest([weak, strong])
                .all(Key::Variables)
                .len(),
            2
        );
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_the_nearest_name() {
        assert_eq!(
            refusal(file("cpus: 1\n\nmemroy: 2G\n")),
            "config.yaml line 3: there is no setting \"memroy\"; did you mean \"memory\"?"
        );
        assert_eq!(
            refusal(file("zebra: 1")),
            "config.yaml line 1: there is no setting \"zebra\""
        );
        assert!(
            file("idle-timeout: 5m").is_ok(),
            "a hyphen is as good as an underscore"
        );
    }

    #[test]
    fn a_mistyped_variable_is_refused_and_a_foreign_one_is_reported() {
        assert!(
            refusal(from_environment(&variables(&[("CELLBLOCK_MEMROY", "1G")])))
                .contains("CELLBLOCK_MEMORY")
        );
        let foreign = variables(&[
            ("CELLBLOCK_SERVICE_HOST", "10.0.0.1"),
            ("CELLBLOCK_UV", "/bin/uv"),
            ("HOME", "/"),
        ]);
        assert_eq!(
            from_environment(&foreign).unwrap().1,
            ["CELLBLOCK_SERVICE_HOST"]
        );
    }

    #[test]
    fn broken_yaml_is_refused_with_its_line() {
        let message = refusal(file("cpus: 1\nmemory: [1, 2\n"));
        assert!(message.starts_with("config.yaml line "), "{message}");
        assert!(refusal(file("- a\n- b")).contains("key: value"));
        assert!(refusal(file("cpus: 1\ncpus: 2")).contains("line 2"));
    }

    #[test]
    fn a_star_without_quotes_is_refused_with_advice() {
        for text in [
            "cpus: 1\nallowed_domains: [*.example.com]\n",
            "allowed_domains:\n- **.example.com\n",
        ] {
            let message = refusal(file(text));
            assert!(
                message.contains("line 2")
                    && message.ends_with("in quotes, such as \"*.example.com\""),
                "{message}"
            );
        }
        assert!(file("allowed_domains: ['*.example.com']").is_ok()); // control
    }

    #[test]
    fn a_variable_whose_texts_may_hold_commas_is_kept_whole() {
        let set = variables(&[
            ("CELLBLOCK_ALLOWED_DOMAINS", "a:1,2,b"),
            ("CELLBLOCK_MOUNTS", "a:b,c:d"),
        ]);
        let merged = Merged::from_weakest_to_strongest([from_environment(&set).unwrap().0]);
        assert_eq!(
            merged.texts(Key::AllowedDomains).unwrap().unwrap().1,
            ["a:1,2,b"]
        );
        assert_eq!(
            merged.texts(Key::Mounts).unwrap().unwrap().1,
            ["a:b", "c:d"]
        );
    }

    #[test]
    fn an_empty_file_says_nothing() {
        for text in ["", "# only a comment\n", "---\n"] {
            assert!(file(text).unwrap().settings.is_empty(), "{text:?}");
        }
    }

    #[test]
    fn a_list_where_one_value_belongs_is_refused() {
        let merged =
            Merged::from_weakest_to_strongest([file("memory: [1G]\nmounts: {a: b}").unwrap()]);
        assert!(refusal(merged.text(Key::Memory)).contains("single value"));
        assert!(refusal(merged.texts(Key::Mounts)).contains("a list"));
    }
}
