//! The tools of a server, pinned at registration.
//!
//! A tool is *pinned*: its name, descriptions and schemas are hashed. If the server later reports a
//! different definition or no longer has the tool, it is not called until the server is registered
//! again. The approval was for the old tool, not for the new one.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cellblock_typed::ToolSchema;
use jsonschema::{PatternOptions, Validator};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Backtracking limit for patterns in schemas, so that a hostile one cannot use unbounded CPU time.
const MAX_BACKTRACKS: usize = 100_000;
const MAX_PATTERN_BYTES: usize = 1024 * 1024;
/// Limits on a message about invalid arguments.
const MAX_OBJECTION_LENGTH: usize = 600;
const MAX_OBJECTIONS: usize = 3;
/// Maximum length of a name in notes.
const MAX_SHOWN_NAME_LENGTH: usize = 80;

/// Whether a tool can be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolState {
    Ready,
    /// The server's definition differs from the registered one.
    Changed,
    /// The server no longer has it.
    Gone,
}

/// Usable tools, and notes about the others.
pub(crate) struct Readable {
    pub(crate) tools: Vec<ToolSchema>,
    pub(crate) notes: Vec<String>,
}

/// Parses a list of tools. An invalid tool does not affect the others.
pub(crate) fn read(listed: Vec<Value>) -> Readable {
    let mut readable = Readable {
        tools: Vec::new(),
        notes: Vec::new(),
    };
    for value in listed {
        let name = value
            .get("name")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        match tool(value) {
            Ok(tool) => readable.tools.push(tool),
            Err(why) => readable
                .notes
                .push(format!("the tool {} is left out: {why}", shown(&name))),
        }
    }
    readable
}

/// Returns a name in quotes, with all misleading characters escaped.
pub(crate) fn shown(name: &str) -> String {
    format!(
        "{:?}",
        name.chars().take(MAX_SHOWN_NAME_LENGTH).collect::<String>()
    )
}

fn tool(mut value: Value) -> Result<ToolSchema, &'static str> {
    let object = value.as_object_mut().ok_or("it is no object")?;
    let mut text = |key: &str| match object.remove(key) {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let (name, title, description) = (text("name"), text("title"), text("description"));
    let name = name
        .filter(|name| !name.is_empty())
        .ok_or("it has no name")?;
    let input = object
        .remove("inputSchema")
        .filter(Value::is_object)
        .ok_or("it has no input schema")?;
    let output = object.remove("outputSchema").filter(Value::is_object);
    let tool = ToolSchema {
        name,
        title,
        description,
        input,
        output,
    };
    let schemas = std::iter::once(&tool.input).chain(&tool.output);
    match () {
        () if tool
            .name
            .chars()
            .any(|character| character.is_control() || is_unseen(character)) =>
        {
            Err("its name holds characters that are not seen")
        }
        () if [&tool.title, &tool.description]
            .into_iter()
            .flatten()
            .any(|text| misleads(text)) =>
        {
            Err("its description holds characters that are not seen")
        }
        () if schemas.into_iter().any(schema_misleads) => {
            Err("its schema has names or descriptions with characters that are not seen")
        }
        () => Ok(tool),
    }
}

/// Checks the names and descriptions in a schema. Patterns, defaults and similar values may contain
/// any characters: they are not prose.
fn schema_misleads(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => members.iter().any(|(key, value)| {
            let is_prose = matches!(key.as_str(), "description" | "title");
            misleads(key)
                || (is_prose && value.as_str().is_some_and(misleads))
                || schema_misleads(value)
        }),
        Value::Array(items) => items.iter().any(schema_misleads),
        _ => false,
    }
}

fn misleads(text: &str) -> bool {
    let characters: Vec<char> = text.chars().collect();
    characters.iter().enumerate().any(|(place, character)| {
        let is_control = character.is_control() && !matches!(character, '\n' | '\r' | '\t');
        is_control || (is_unseen(*character) && !joins_pictures(&characters, place))
    })
}

/// Returns whether a zero-width joiner joins two emoji into one, which hides nothing.
fn joins_pictures(characters: &[char], place: usize) -> bool {
    let is_picture = |character: &char| {
        matches!(
            character,
            '\u{2190}'..='\u{2bff}' | '\u{fe0f}' | '\u{1f000}'..='\u{1faff}'
        )
    };
    let before = place
        .checked_sub(1)
        .and_then(|before| characters.get(before));
    characters[place] == '\u{200d}'
        && before.is_some_and(is_picture)
        && characters.get(place + 1).is_some_and(is_picture)
}

/// Returns whether a character is invisible or changes the text direction.
fn is_unseen(character: char) -> bool {
    matches!(
        character,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    )
}

/// Tools pinned at registration.
pub(crate) struct PinnedTools(BTreeMap<String, PinnedTool>);

struct PinnedTool {
    digest: [u8; 32],
    arguments: Validator,
    state: Mutex<ToolState>,
}

impl PinnedTools {
    /// Pins the tools. A tool whose schema cannot be compiled is left out, with a note.
    pub(crate) fn new<'a>(
        tools: impl IntoIterator<Item = &'a ToolSchema>,
        notes: &mut Vec<String>,
    ) -> PinnedTools {
        let mut pinned = BTreeMap::new();
        for tool in tools {
            match validator(&tool.input) {
                Ok(arguments) => {
                    let state = Mutex::new(ToolState::Ready);
                    pinned.insert(
                        tool.name.clone(),
                        PinnedTool {
                            digest: digest(tool),
                            arguments,
                            state,
                        },
                    );
                }
                Err(why) => {
                    let why: String = why.chars().take(MAX_OBJECTION_LENGTH).collect();
                    let name = shown(&tool.name);
                    notes.push(format!(
                        "the tool {name} is left out: arguments cannot be checked against its \
                         schema: {why}"
                    ));
                }
            }
        }
        PinnedTools(pinned)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Returns the digest of the registered definition of a tool.
    pub(crate) fn digest(&self, name: &str) -> Option<[u8; 32]> {
        self.0.get(name).map(|tool| tool.digest)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Returns the state of a tool, or `None` if it was never registered.
    pub(crate) fn state(&self, name: &str) -> Option<ToolState> {
        self.0.get(name).map(|tool| *lock(&tool.state))
    }

    /// Returns what is wrong with arguments. The tool must exist.
    pub(crate) fn objection(&self, name: &str, arguments: &Value) -> Option<String> {
        let objections = self.0.get(name)?.arguments.iter_errors(arguments);
        let said: Vec<String> = objections
            .take(MAX_OBJECTIONS)
            .map(|error| {
                let place = error.instance_path().to_string();
                let place = if place.is_empty() {
                    String::new()
                } else {
                    format!("at {place}: ")
                };
                format!("{place}{error}")
                    .chars()
                    .take(MAX_OBJECTION_LENGTH)
                    .collect()
            })
            .collect();
        (!said.is_empty()).then(|| said.join("; "))
    }

    /// Compares the pinned tools with the server's current ones. A tool that differs stays
    /// disabled, even if it changes back.
    ///
    /// Returns the names of the tools that were just disabled.
    pub(crate) fn compare(&self, now: &[ToolSchema]) -> Vec<String> {
        let now: BTreeMap<&str, [u8; 32]> = now
            .iter()
            .map(|tool| (tool.name.as_str(), digest(tool)))
            .collect();
        let mut lost = Vec::new();
        for (name, tool) in &self.0 {
            let state = match now.get(name.as_str()) {
                Some(digest) if *digest == tool.digest => continue,
                Some(_) => ToolState::Changed,
                None => ToolState::Gone,
            };
            let mut current = lock(&tool.state);
            if *current == ToolState::Ready {
                *current = state;
                lost.push(name.clone());
            }
        }
        lost
    }
}

fn lock(state: &Mutex<ToolState>) -> std::sync::MutexGuard<'_, ToolState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn validator(schema: &Value) -> Result<Validator, String> {
    let patterns = PatternOptions::fancy_regex()
        .backtrack_limit(MAX_BACKTRACKS)
        .size_limit(MAX_PATTERN_BYTES);
    let options = jsonschema::options()
        .offline()
        .with_pattern_options(patterns);
    options.build(schema).map_err(|error| error.to_string())
}

/// Returns the hash of a tool's definition. The order of object members does not matter.
fn digest(tool: &ToolSchema) -> [u8; 32] {
    let mut hash = Sha256::new();
    let texts = [
        Some(&tool.name),
        tool.title.as_ref(),
        tool.description.as_ref(),
    ];
    texts.into_iter().for_each(|text| {
        hash_value(
            &text.map_or(Value::Null, |text| Value::String(text.clone())),
            &mut hash,
        )
    });
    hash_value(&tool.input, &mut hash);
    hash_value(tool.output.as_ref().unwrap_or(&Value::Null), &mut hash);
    hash.finalize().into()
}

/// Hashes a value such that two different values never give the same bytes: the kind and length of
/// every part come first.
pub(crate) fn hash_value(value: &Value, hash: &mut Sha256) {
    let mut part = |kind: u8, bytes: &[u8]| {
        hash.update([kind]);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    match value {
        Value::Null => part(b'n', b""),
        Value::Bool(value) => part(b'b', &[u8::from(*value)]),
        Value::Number(number) => part(b'd', number.to_string().as_bytes()),
        Value::String(text) => part(b's', text.as_bytes()),
        Value::Array(items) => {
            part(b'a', &(items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| hash_value(item, hash));
        }
        Value::Object(members) => {
            part(b'o', &(members.len() as u64).to_le_bytes());
            let sorted: BTreeMap<&String, &Value> = members.iter().collect();
            for (key, value) in sorted {
                hash_value(&Value::String(key.clone()), hash);
                hash_value(value, hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn listed(name: &str, description: &str) -> Value {
        json!({"name": name, "description": description, "inputSchema": {"type": "object"}})
    }

    fn schema(input: Value) -> ToolSchema {
        ToolSchema {
            name: "t".to_owned(),
            title: None,
            description: None,
            input,
            output: None,
        }
    }

    fn pin(tool: &ToolSchema) -> PinnedTools {
        let mut notes = Vec::new();
        let pinned = PinnedTools::new([tool], &mut notes);
        assert_eq!(notes, [""; 0]);
        pinned
    }

    #[test]
    fn a_tool_with_unseen_characters_is_left_out_and_the_others_stay() {
        let hostile = [
            listed("ev\u{202e}il", "a"),
            listed("a\u{200b}b", "a"),
            listed("bell\u{7}", "a"),
            listed("line\nbreak", "a"),
            listed("b", "tag \u{e0041}"),
            listed("c", "zero\u{200d}width"),
            listed("d", "escape \u{1b}[2J"),
            json!({
                "name": "e", "inputSchema": {"properties": {"x": {"description": "a\u{2066}b"}}},
            }),
            json!({"name": "f", "inputSchema": {"properties": {"x\u{feff}": {}}}}),
            json!({"name": "", "inputSchema": {}}),
            json!({"name": "g"}),
            json!({"name": "h", "inputSchema": []}),
            json!(7),
        ];
        let count = hostile.len();
        let fine = [
            listed(
                "fine",
                "two\nlines\tand ünïcode 中文 👩\u{200d}💻 ❤\u{fe0f}\u{200d}🔥",
            ),
            json!({
                "name": "pattern",
                "inputSchema": {
                    "properties": {"x": {"pattern": "[\u{200b}]", "default": "\u{1b}"}},
                },
            }),
        ];
        let readable = read(hostile.into_iter().chain(fine).collect());
        let names: Vec<&str> = readable
            .tools
            .iter()
            .map(|tool| tool.name.as_str())
            .collect();
        assert_eq!(names, ["fine", "pattern"]);
        assert_eq!(readable.notes.len(), count);
        assert!(
            !readable
                .notes
                .concat()
                .chars()
                .any(|character| character.is_control() || is_unseen(character)),
            "{:?}",
            readable.notes
        );
    }

    #[test]
    fn arguments_are_checked_by_the_draft_that_the_schema_names() {
        for (schema_of, good, bad) in [
            (
                json!({
                    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
                }),
                json!({"n": 1}),
                json!({"n": "x"}),
            ),
            (
                json!({"properties": {"t": {"prefixItems": [{"type": "string"}]}}}),
                json!({"t": ["a"]}),
                json!({"t": [1]}),
            ),
            (
                json!({
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "properties": {"t": {"items": [{"type": "string"}]}},
                }),
                json!({"t": ["a"]}),
                json!({"t": [1]}),
            ),
            (
                json!({
                    "$defs": {"p": {"type": "number"}},
                    "properties": {"x": {"$ref": "#/$defs/p"}},
                }),
                json!({"x": 1.5}),
                json!({"x": []}),
            ),
            (
                json!({"additionalProperties": false}),
                json!({}),
                json!({"x": 1}),
            ),
        ] {
            let pinned = pin(&schema(schema_of.clone()));
            assert_eq!(pinned.objection("t", &good), None, "{schema_of}");
            assert!(pinned.objection("t", &bad).is_some(), "{schema_of}");
        }
        let pinned = pin(&schema(json!({"properties": {"n": {"type": "integer"}}})));
        assert_eq!(
            pinned.objection("t", &json!({"n": "x"})).unwrap(),
            "at /n: \"x\" is not of type \"integer\""
        );
    }

    #[test]
    fn nothing_is_fetched_for_a_schema() {
        let mut notes = Vec::new();
        let remote =
            schema(json!({"properties": {"x": {"$ref": "http://127.0.0.1:1/schema.json"}}}));
        let pinned = PinnedTools::new([&remote], &mut notes);
        assert!(!pinned.has("t"));
        assert_eq!(notes.len(), 1);
    }

    #[test]
    fn a_pattern_that_never_ends_is_given_up() {
        let pinned = pin(&schema(
            json!({"properties": {"x": {"type": "string", "pattern": "^(?=(a+)+$)(a|aa)+\\1$"}}}),
        ));
        assert!(
            pinned
                .objection("t", &json!({"x": "a".repeat(40) + "!"}))
                .is_some()
        );
    }

    #[test]
    fn a_tool_that_changed_or_vanished_stays_out_of_use() {
        let before = schema(json!({"properties": {"a": {"type": "string"}}, "type": "object"}));
        let same = schema(
            serde_json::from_str(r#"{"type": "object", "properties": {"a": {"type": "string"}}}"#)
                .unwrap(),
        );
        let other_description = ToolSchema {
            description: Some("new".to_owned()),
            ..before.clone()
        };
        let other_schema =
            schema(json!({"properties": {"a": {"type": "number"}}, "type": "object"}));
        let other_output = ToolSchema {
            output: Some(json!({})),
            ..before.clone()
        };
        for (now, expected) in [
            (vec![same.clone()], ToolState::Ready),
            (vec![other_description], ToolState::Changed),
            (vec![other_schema], ToolState::Changed),
            (vec![other_output], ToolState::Changed),
            (vec![], ToolState::Gone),
        ] {
            let pinned = pin(&before);
            assert_eq!(
                pinned.compare(&now).len(),
                usize::from(expected != ToolState::Ready)
            );
            assert_eq!(pinned.state("t"), Some(expected), "{now:?}");
            // After it changes back, it stays disabled: it was not the approved tool all the time.
            assert_eq!(pinned.compare(std::slice::from_ref(&same)).len(), 0);
            assert_eq!(pinned.state("t"), Some(expected));
        }
        assert_eq!(pin(&before).state("u"), None);
    }

    #[test]
    fn values_that_differ_have_digests_that_differ() {
        let digests: Vec<[u8; 32]> = [
            json!(null),
            json!("n"),
            json!([]),
            json!({}),
            json!(["a", "b"]),
            json!(["ab"]),
            json!([["a"], "b"]),
            json!({"a": "b"}),
            json!([0]),
            json!([false]),
            json!(["0"]),
            json!([1]),
            json!([1.0]),
        ]
        .map(|value| digest(&schema(json!({"x": value}))))
        .to_vec();
        for (place, digest) in digests.iter().enumerate() {
            assert!(!digests[..place].contains(digest), "{place}");
        }
    }
}
