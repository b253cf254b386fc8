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

use super::table::{Key, Values};
use super::{ConfigError, InvalidValue};

const PREFIX: &str = "CELLBLOCK_";

/// Variables with our prefix that are read elsewhere and are not settings.
const OTHER_VARIABLES: [&str; 2] = ["CELLBLOCK_CONFIG", "CELLBLOCK_UV"];

/// The written value of a setting. It has no `Debug`, because it may hold a secret.
#[derive(Clone)]
pub(super) enum Written {
    Nothing,
    Text(String),
    List(Vec<Written>),
    Table(Vec<Member>),
}

/// One entry of a table.
#[derive(Clone)]
pub(super) struct Member {
    pub name: String,
    pub line: Option<u64>,
    pub value: Written,
}

/// Where a setting was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    File { path: PathBuf, line: Option<u64> },
    Variable(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File {
                path,
                line: Some(line),
            } => write!(formatter, "{} line {line}", path.display()),
            Origin::File { path, line: None } => write!(formatter, "{}", path.display()),
            Origin::Variable(name) => formatter.write_str(name),
            Origin::Flag(flag) => formatter.write_str(flag),
        }
    }
}

impl Origin {
    /// Returns the same origin, at another line if it is a file.
    pub(super) fn at(&self, line: Option<u64>) -> Origin {
        match self {
            Origin::File { path, line: old } => Origin::File {
                path: path.clone(),
                line: line.or(*old),
            },
            other => other.clone(),
        }
    }
}

/// The settings of one source.
#[derive(Clone, Default)]
pub(super) struct Layer(Vec<(Key, Origin, Written)>);

impl Layer {
    pub(super) fn of(settings: Vec<(Key, Origin, Written)>) -> Layer {
        Layer(settings)
    }

    /// Adds a setting, which takes precedence over earlier ones.
    pub(super) fn push(&mut self, key: Key, origin: Origin, written: Written) {
        self.0.push((key, origin, written));
    }
}

/// The settings given as flags.
#[derive(Clone, Default)]
pub struct Flags(Layer);

impl Flags {
    /// Adds a flag that can be given once.
    pub fn single(mut self, key: Key, value: Option<String>) -> Flags {
        if let Some(value) = value {
            self.0
                .0
                .push((key, Origin::Flag(key.flag_name()), Written::Text(value)));
        }
        self
    }

    /// Adds a flag that can be repeated.
    pub fn repeated(mut self, key: Key, values: Vec<String>) -> Flags {
        if !values.is_empty() {
            let values = values.into_iter().map(Written::Text).collect();
            self.0
                .0
                .push((key, Origin::Flag(key.flag_name()), Written::List(values)));
        }
        self
    }

    /// Names flags in origins as they were typed. `typed` has every flag of the command line. If
    /// both spellings of a flag were used, its main name is reported for all its values.
    pub fn as_typed(mut self, typed: &BTreeSet<String>) -> Flags {
        for (key, origin, _) in &mut self.0.0 {
            let flag = key.row().flag.as_ref();
            if let Some(alias) = flag.and_then(|flag| flag.alias)
                && typed.contains(alias)
                && !typed.contains(key.flag_name())
            {
                *origin = Origin::Flag(alias);
            }
        }
        self
    }

    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.0.0.iter().map(|(key, _, _)| *key).collect()
    }

    pub(super) fn layer(self) -> Layer {
        self.0
    }

    /// Returns the flags in a form that can be passed to another process.
    pub(super) fn given(&self) -> Vec<(Key, Given)> {
        let text = |written: &Written| match written {
            Written::Text(text) => text.clone(),
            _ => unreachable!("a flag holds a text, or a list of texts"),
        };
        let given = |written: &Written| match written {
            Written::List(values) => Given::Often(values.iter().map(text).collect()),
            single => Given::Once(text(single)),
        };
        self.0
            .0
            .iter()
            .map(|(key, _, written)| (*key, given(written)))
            .collect()
    }
}

impl From<Vec<(Key, Given)>> for Flags {
    fn from(given: Vec<(Key, Given)>) -> Flags {
        given
            .into_iter()
            .fold(Flags::default(), |flags, (key, given)| match given {
                Given::Once(value) => flags.single(key, Some(value)),
                Given::Often(values) => flags.repeated(key, values),
            })
    }
}

/// The value of a flag. It has no `Debug`, because it may hold a secret.
#[derive(Clone, Serialize, serde::Deserialize)]
pub(super) enum Given {
    Once(String),
    Often(Vec<String>),
}

/// Parses a configuration file.
pub(super) fn from_file(path: &Path, text: &str) -> Result<Layer, ConfigError> {
    let mut layer = Layer::default();
    for member in members_of(path, text)? {
        let origin = Origin::File {
            path: path.to_owned(),
            line: member.line,
        };
        let Some(key) = Key::from_name(&member.name) else {
            return Err(unknown_key(&member.name, origin, Key::names()));
        };
        layer.0.push((key, origin, member.value));
    }
    Ok(layer)
}

/// Parses a YAML file that holds a table.
pub(super) fn members_of(path: &Path, text: &str) -> Result<Vec<Member>, ConfigError> {
    let whole: Written = serde_saphyr::from_str(text).map_err(|error| ConfigError::Yaml {
        path: path.to_owned(),
        line: error
            .location()
            .map(|location| location.line())
            .filter(|line| *line > 0),
        why: with_advice(first_line(&error.to_string())),
    })?;
    match whole {
        Written::Nothing => Ok(Vec::new()),
        Written::Table(members) => Ok(members),
        Written::Text(_) | Written::List(_) => {
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
) -> Result<(Layer, Vec<String>), ConfigError> {
    let mut layer = Layer::default();
    let mut unknown = Vec::new();
    for (variable, value) in variables
        .iter()
        .filter(|(name, _)| !OTHER_VARIABLES.contains(&name.as_str()))
    {
        let Some(name) = variable.strip_prefix(PREFIX) else {
            continue;
        };
        let origin = Origin::Variable(variable.clone());
        match Key::from_name(&name.to_ascii_lowercase())
            .filter(|key| key.row().values != Values::FileOnly)
        {
            Some(key) if !matches!(key.row().values, Values::List | Values::Pairs) => {
                layer.0.push((key, origin, Written::Text(value.clone())));
            }
            Some(key) => {
                let parts = value
                    .split(',')
                    .map(str::trim)
                    .filter(|part| !part.is_empty());
                layer.0.push((
                    key,
                    origin,
                    Written::List(parts.map(|part| Written::Text(part.to_owned())).collect()),
                ));
            }
            None => match nearest(&name.to_ascii_lowercase(), Key::names()) {
                Some(near) => {
                    let nearest = Some(format!("{PREFIX}{}", near.to_ascii_uppercase()));
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

/// All sources, merged.
pub(super) struct Merged(BTreeMap<Key, Vec<(Origin, Written)>>);

impl Merged {
    /// Merges layers; later ones take precedence.
    pub(super) fn from_weakest_to_strongest(layers: impl IntoIterator<Item = Layer>) -> Merged {
        let mut merged: BTreeMap<Key, Vec<(Origin, Written)>> = BTreeMap::new();
        for (key, origin, written) in layers.into_iter().flat_map(|layer| layer.0) {
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
    pub(super) fn all(&self, key: Key) -> &[(Origin, Written)] {
        self.0.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Returns the single text written for a key.
    pub(super) fn text(&self, key: Key) -> Result<Option<(&Origin, &str)>, ConfigError> {
        match self.all(key) {
            [] => Ok(None),
            [(_, Written::Nothing), ..] => Ok(None),
            [(origin, Written::Text(text)), ..] => Ok(Some((origin, text))),
            [(origin, _), ..] => Err(wrong_shape(key.name(), origin, "a single value")),
        }
    }

    /// Returns the list of texts written for a key; a single text is a list of one.
    pub(super) fn texts(&self, key: Key) -> Result<Option<(&Origin, Vec<&str>)>, ConfigError> {
        match self.all(key) {
            [] | [(_, Written::Nothing), ..] => Ok(None),
            [(origin, written), ..] => written
                .texts(key.name(), origin)
                .map(|texts| Some((origin, texts))),
        }
    }
}

impl Written {
    /// Returns the texts of a list, or the one text.
    pub(super) fn texts(&self, key: &str, origin: &Origin) -> Result<Vec<&str>, ConfigError> {
        match self {
            Written::Text(text) => Ok(vec![text]),
            Written::Nothing => Ok(Vec::new()),
            Written::Table(_) => Err(wrong_shape(key, origin, "a list")),
            Written::List(items) => items
                .iter()
                .map(|item| match item {
                    Written::Text(text) => Ok(text.as_str()),
                    _ => Err(wrong_shape(key, origin, "a list of single values")),
                })
                .collect(),
        }
    }
}

/// Returns the error for an unknown key, with the nearest known one.
pub(super) fn unknown_key<'a>(
    key: &str,
    origin: Origin,
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
pub(super) fn wrong_shape(key: &str, origin: &Origin, allowed: &str) -> ConfigError {
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

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Written, D::Error> {
        deserializer.deserialize_any(WrittenVisitor)
    }
}

struct WrittenVisitor;

macro_rules! visit_as_text {
    ($($method:ident: $type:ty),*) => {
        $(fn $method<E>(self, value: $type) -> Result<Written, E> {
            Ok(Written::Text(value.to_string()))
        })*
    };
}

impl<'de> Visitor<'de> for WrittenVisitor {
    type Value = Written;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a value, a list or a table")
    }

    visit_as_text!(
        visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128,
        visit_f64: f64, visit_str: &str
    );

    fn visit_unit<E>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_none<E>(self) -> Result<Written, E> {
        Ok(Written::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Written, D::Error> {
        Written::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Written, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(Written::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Written, A::Error> {
        let mut members = Vec::new();
        while let Some((name, value)) = map.next_entry::<Spanned<String>, Written>()? {
            let line = Some(name.referenced.line()).filter(|line| *line > 0);
            members.push(Member {
                name: name.value,
                line,
                value,
            });
        }
        Ok(Written::Table(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<Layer, ConfigError> {
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
            assert!(file(text).unwrap().0.is_empty(), "{text:?}");
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
