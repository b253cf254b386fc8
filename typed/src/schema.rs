//! Reads JSON Schema, draft-07 and 2020-12, into shapes.
//!
//! A schema is untrusted. Reading it is bounded in depth and in work, fetches nothing, and rejects
//! references that cannot be followed: to another document, to a missing target, or to itself.
//! Constraints that Python's types cannot express (`not`, `if`, `contains` …) are left to the
//! host's check.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::shape::{
    ClassRecord, Definition, Format, Lengths, Member, NumberBounds, OtherMembers, Schema, Shape,
    TextRules, union,
};

/// Limit of nested shapes. Python's own parser fails at 200 brackets, of which a shape needs up to
/// three.
const DEEPEST: usize = 40;
/// Limit of schema parts that are visited or copied. A few references to references could otherwise
/// produce any number of them. The largest known schemas of real servers need a twentieth of it,
/// and it takes some milliseconds.
const MAX_WORK: usize = 50_000;
/// Limit of members, values or alternatives in one part of a schema. They are compared with each
/// other.
const WIDEST: usize = 1000;
/// The largest integer that every JSON reader represents exactly. Generators write it for "no
/// limit".
const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;

/// Reason why a schema cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    #[error("it is neither an object nor a truth value")]
    NotASchema,
    #[error("it refers to another document, {reference:?}, and nothing is fetched")]
    RemoteReference { reference: String },
    #[error("it refers to {reference:?}, which is not there")]
    MissingReference { reference: String },
    #[error("its reference {reference:?} leads back to itself")]
    CircularReference { reference: String },
    #[error("it is nested more than {DEEPEST} levels deep")]
    TooDeep,
    #[error("it has more than {MAX_WORK} parts")]
    TooMuch,
    #[error("it has {count} members, values or alternatives in one place, and may have {WIDEST}")]
    TooWide { count: usize },
}

type Read<T> = Result<T, SchemaError>;
type Object = Map<String, Value>;

/// Reads a schema. `name` is the name of its root.
pub(crate) fn read(schema: &Value, name: &str) -> Read<Schema> {
    let mut reader = Reader::new(schema);
    reader.begin("", name);
    let shape = reader.shape(schema, 0)?;
    reader.finish(0, shape);
    let definitions = reader
        .definitions
        .into_iter()
        .map(|definition| definition.expect("each was read to its end"));
    let schema = Schema {
        definitions: definitions.collect(),
    };
    refuse_circles(&schema)?;
    Ok(schema)
}

/// Rejects a name that refers to itself, through other names or as one of its own alternatives: it
/// has no meaning.
fn refuse_circles(schema: &Schema) -> Read<()> {
    // The definitions that a definition refers to directly, with nothing around the reference.
    let bare = |shape: &Shape| -> Vec<usize> {
        let place = |shape: &Shape| {
            if let Shape::Named(place) = shape {
                Some(*place)
            } else {
                None
            }
        };
        match shape {
            Shape::Union(members) => members.iter().filter_map(place).collect(),
            shape => place(shape).into_iter().collect(),
        }
    };
    let next: Vec<Vec<usize>> = schema
        .definitions
        .iter()
        .map(|definition| bare(&definition.shape))
        .collect();
    for (start, definition) in schema.definitions.iter().enumerate() {
        let mut reached = vec![false; next.len()];
        let mut waiting = next[start].clone();
        while let Some(place) = waiting.pop() {
            if place == start {
                return Err(SchemaError::CircularReference {
                    reference: definition.name.clone(),
                });
            }
            if !std::mem::replace(&mut reached[place], true) {
                waiting.extend(&next[place]);
            }
        }
    }
    Ok(())
}

struct Reader<'a> {
    root: &'a Value,
    /// The document's own URI. References to it stay within the document.
    id: &'a str,
    /// In draft-07, the siblings of a reference are ignored.
    ignores_siblings: bool,
    definitions: Vec<Option<Definition>>,
    names: Vec<String>,
    places: HashMap<String, usize>,
    work: usize,
}

impl<'a> Reader<'a> {
    fn new(root: &'a Value) -> Reader<'a> {
        let text = |key: &str| root.get(key).and_then(Value::as_str).unwrap_or_default();
        let ignores_siblings = ["draft-03", "draft-04", "draft-06", "draft-07"]
            .iter()
            .any(|draft| text("$schema").contains(draft));
        let (definitions, names, places) = (Vec::new(), Vec::new(), HashMap::new());
        Reader {
            root,
            id: text("$id").trim_end_matches('#'),
            ignores_siblings,
            definitions,
            names,
            places,
            work: 0,
        }
    }

    fn begin(&mut self, pointer: &str, name: &str) -> usize {
        self.definitions.push(None);
        self.names.push(name.to_owned());
        let place = self.definitions.len() - 1;
        self.places.insert(pointer.to_owned(), place);
        place
    }

    fn finish(&mut self, place: usize, shape: Shape) {
        self.definitions[place] = Some(Definition {
            name: self.names[place].clone(),
            shape,
        });
    }

    fn shape(&mut self, schema: &Value, depth: usize) -> Read<Shape> {
        self.count(depth, 1)?;
        let object = match schema {
            Value::Bool(_) => return Ok(Shape::Any),
            Value::Object(object) => object,
            _ => return Err(SchemaError::NotASchema),
        };
        if let Some(reference) = reference(object) {
            let siblings = constraints_beside(object, "$ref");
            if self.ignores_siblings || siblings.is_empty() {
                return self.named(reference, depth);
            }
        }
        if object.contains_key("$ref") || object.contains_key("allOf") {
            let merged = self.merged(object, depth)?;
            if let Some(only) = only_reference(&merged) {
                return self.named(only, depth);
            }
            return self.shape(&Value::Object(merged), depth + 1);
        }
        if let Some(alternatives) = alternatives(object) {
            return self.alternatives(object, alternatives, depth);
        }
        let shape = self.one_kind(object, depth)?;
        let is_nullable = object.get("nullable") == Some(&Value::Bool(true));
        Ok(if is_nullable {
            union(vec![shape, Shape::Null])
        } else {
            shape
        })
    }

    fn count(&mut self, depth: usize, parts: usize) -> Read<()> {
        self.work += parts;
        match () {
            () if depth > DEEPEST => Err(SchemaError::TooDeep),
            () if self.work > MAX_WORK => Err(SchemaError::TooMuch),
            () => Ok(()),
        }
    }

    fn refuse_wide(count: usize) -> Read<()> {
        if count > WIDEST {
            Err(SchemaError::TooWide { count })
        } else {
            Ok(())
        }
    }

    /// Reads the target of a reference, once.
    fn named(&mut self, reference: &str, depth: usize) -> Read<Shape> {
        let pointer = self.pointer(reference)?;
        if let Some(place) = self.places.get(&pointer) {
            return Ok(Shape::Named(*place));
        }
        let target = self.target(&pointer, reference)?;
        let name = pointer
            .rsplit('/')
            .next()
            .unwrap_or_default()
            .replace("~1", "/")
            .replace("~0", "~");
        let place = self.begin(&pointer, &name);
        let shape = self.shape(target, depth + 1)?;
        self.finish(place, shape);
        Ok(Shape::Named(place))
    }

    /// Returns the place in this document that a reference points to.
    fn pointer(&self, reference: &str) -> Read<String> {
        let remote = || SchemaError::RemoteReference {
            reference: reference.to_owned(),
        };
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        if !document.is_empty() && document != self.id {
            return Err(remote());
        }
        Ok(percent_decoded(fragment))
    }

    fn target(&self, pointer: &str, reference: &str) -> Read<&'a Value> {
        let found = match pointer {
            "" => Some(self.root),
            pointer if pointer.starts_with('/') => self.root.pointer(pointer),
            anchor => self.anchored(anchor),
        };
        found.ok_or_else(|| SchemaError::MissingReference {
            reference: reference.to_owned(),
        })
    }

    /// Finds a definition by its anchor.
    fn anchored(&self, anchor: &str) -> Option<&'a Value> {
        let bare = |definition: &Value| {
            let text = |key: &str| definition.get(key).and_then(Value::as_str);
            text("$anchor").or_else(|| text("$dynamicAnchor")) == Some(anchor)
                || text("$id").and_then(|id| id.strip_prefix('#')) == Some(anchor)
        };
        let definitions = ["$defs", "definitions"]
            .iter()
            .filter_map(|key| self.root.get(key)?.as_object());
        std::iter::once(self.root)
            .chain(definitions.flat_map(Map::values))
            .find(|definition| bare(definition))
    }

    /// Merges a schema and everything that also applies to it (`allOf`, a reference with siblings)
    /// into one.
    fn merged(&mut self, object: &Object, depth: usize) -> Read<Object> {
        self.count(depth, parts(object))?;
        let mut merged = object.clone();
        drop_references(&mut merged);
        let parts = merged.remove("allOf");
        let parts = parts
            .as_ref()
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice);
        let own = reference(object).map(|reference| json!({"$ref": reference}));
        // A single reference without other constraints stays a reference and keeps its name.
        let all: Vec<&Value> = own.iter().chain(parts).collect();
        if let [Value::Object(only)] = all.as_slice()
            && constraints_beside(&merged, "").is_empty()
            && let Some(reference) = only_reference(only)
        {
            merged.insert("$ref".to_owned(), json!(reference));
            return Ok(merged);
        }
        for part in all {
            let Value::Object(part) = part else { continue };
            let mut part = part.clone();
            if let Some(reference) = reference(&part) {
                let target = self.target(&self.pointer(reference)?, reference)?;
                let siblings = constraints_beside(&part, "$ref");
                let Value::Object(target) = target else {
                    continue;
                };
                let target = self.merged(target, depth + 1)?;
                part = siblings;
                merge(&mut part, &target);
            } else if part.contains_key("allOf") {
                part = self.merged(&part, depth + 1)?;
            }
            // Resolves a part that is only a reference.
            while let Some(reference) = reference(&part).map(str::to_owned) {
                let target = self.target(&self.pointer(&reference)?, &reference)?;
                drop_references(&mut part);
                let Value::Object(target) = target else { break };
                let target = self.merged(target, depth + 1)?;
                self.count(depth, 1)?;
                merge(&mut part, &target);
            }
            merge(&mut merged, &part);
        }
        Ok(merged)
    }

    fn alternatives(
        &mut self,
        object: &Object,
        (key, branches): (&str, &[Value]),
        depth: usize,
    ) -> Read<Shape> {
        Self::refuse_wide(branches.len())?;
        self.count(depth, parts(object))?;
        let mut base = object.clone();
        base.remove(key);
        base.remove("discriminator");
        // A branch that only adds requirements on members does not change the type.
        if has_type(&base) && branches.iter().all(only_demands) {
            return self.shape(&Value::Object(base), depth + 1);
        }
        let constraints = constraints_beside(&base, "");
        let says_only_its_type = constraints.keys().all(|key| key == "type");
        let mut shapes = Vec::new();
        for branch in branches
            .iter()
            .filter(|branch| **branch != Value::Bool(false))
        {
            let shape = match branch {
                Value::Object(branch) if !says_only_its_type || !says_its_type(branch) => {
                    self.count(depth, parts(&constraints) + parts(branch))?;
                    let both = json!({"allOf": [constraints, branch]});
                    self.shape(&both, depth + 1)?
                }
                branch => self.shape(branch, depth + 1)?,
            };
            shapes.push(shape);
        }
        if object.get("nullable") == Some(&Value::Bool(true)) {
            shapes.push(Shape::Null);
        }
        Ok(union(shapes))
    }

    /// Reads a schema without references, and without alternatives other than those of its type.
    fn one_kind(&mut self, object: &Object, depth: usize) -> Read<Shape> {
        if let Some(value) = object.get("const") {
            return Ok(Shape::Choice(vec![value.clone()]));
        }
        if let Some(Value::Array(values)) = object.get("enum")
            && !values.is_empty()
        {
            Self::refuse_wide(values.len())?;
            let mut distinct: Vec<Value> = Vec::new();
            for value in values {
                if !distinct.contains(value) {
                    distinct.push(value.clone());
                }
            }
            return Ok(Shape::Choice(distinct));
        }
        match object.get("type") {
            Some(Value::String(kind)) => self.of_type(kind, object, depth),
            Some(Value::Array(kinds)) => {
                let kinds = kinds.iter().filter_map(Value::as_str);
                let shapes = kinds
                    .map(|kind| self.of_type(kind, object, depth))
                    .collect::<Read<Vec<_>>>()?;
                Ok(union(shapes))
            }
            _ => match implied_type(object) {
                Some(kind) => self.of_type(kind, object, depth),
                None => Ok(Shape::Any),
            },
        }
    }

    fn of_type(&mut self, kind: &str, object: &Object, depth: usize) -> Read<Shape> {
        Ok(match kind {
            "null" => Shape::Null,
            "boolean" => Shape::Boolean,
            "integer" => Shape::Integer(bounds(object, Whole::Yes)),
            "number" => Shape::Number(bounds(object, Whole::No)),
            "string" => Shape::Text(text_rules(object)),
            "array" => self.array(object, depth)?,
            "object" => self.object(object, depth)?,
            _ => Shape::Any,
        })
    }

    fn array(&mut self, object: &Object, depth: usize) -> Read<Shape> {
        let lengths = lengths(object, "minItems", "maxItems");
        let (first, rest) = match (object.get("prefixItems"), object.get("items")) {
            (Some(Value::Array(first)), rest) => (first.as_slice(), rest),
            (_, Some(Value::Array(first))) => (first.as_slice(), object.get("additionalItems")),
            (_, rest) => (&[][..], rest),
        };
        let shapes = first
            .iter()
            .map(|item| self.shape(item, depth + 1))
            .collect::<Read<Vec<_>>>()?;
        let count = first.len() as u64;
        let is_closed =
            matches!(rest, None | Some(Value::Bool(false))) || lengths.most == Some(count);
        let is_tuple = is_closed
            && lengths.least.is_none_or(|least| least == count)
            && lengths.most.is_none_or(|most| most == count);
        if count > 0 && is_tuple {
            return Ok(Shape::Tuple(shapes));
        }
        let rest = match rest {
            Some(Value::Bool(false)) => None,
            Some(rest) => Some(self.shape(rest, depth + 1)?),
            None => Some(Shape::Any),
        };
        Ok(Shape::List(
            Box::new(union(shapes.into_iter().chain(rest).collect())),
            lengths,
        ))
    }

    fn object(&mut self, object: &Object, depth: usize) -> Read<Shape> {
        let properties = object.get("properties").and_then(Value::as_object);
        let required: Vec<&str> = match object.get("required") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let has_members =
            properties.is_some_and(|properties| !properties.is_empty()) || !required.is_empty();
        let others = match object
            .get("additionalProperties")
            .or(object.get("unevaluatedProperties"))
        {
            None => OtherMembers::Unsaid,
            Some(Value::Bool(false)) if object.contains_key("patternProperties") => {
                OtherMembers::Allowed
            }
            Some(Value::Bool(false)) => OtherMembers::Forbidden,
            Some(_) => OtherMembers::Allowed,
        };
        if !has_members && (others != OtherMembers::Forbidden) {
            return self.map(object, depth);
        }
        let members = self.members(properties, &required, depth)?;
        let text = |key: &str| object.get(key).and_then(Value::as_str).map(str::to_owned);
        Ok(Shape::Record(ClassRecord {
            title: text("title"),
            description: text("description"),
            members,
            others,
        }))
    }

    /// Reads members, required ones first, in the order of `required`.
    fn members(
        &mut self,
        properties: Option<&Object>,
        required: &[&str],
        depth: usize,
    ) -> Read<Vec<Member>> {
        let nothing = Map::new();
        let properties = properties.unwrap_or(&nothing);
        Self::refuse_wide(properties.len().max(required.len()))?;
        let mut names: Vec<&str> = Vec::new();
        for name in required
            .iter()
            .copied()
            .chain(properties.keys().map(String::as_str))
        {
            if !names.contains(&name) && properties.get(name) != Some(&Value::Bool(false)) {
                names.push(name);
            }
        }
        let mut members = Vec::new();
        for name in names {
            let schema = properties.get(name).unwrap_or(&Value::Bool(true));
            members.push(self.member(name, schema, required.contains(&name), depth)?);
        }
        Ok(members)
    }

    fn member(
        &mut self,
        name: &str,
        schema: &Value,
        is_required: bool,
        depth: usize,
    ) -> Read<Member> {
        let text = |key: &str| {
            schema
                .get(key)
                .and_then(Value::as_str)
                .filter(|text| !text.trim().is_empty())
                .map(str::to_owned)
        };
        let examples = schema
            .get("examples")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        Ok(Member {
            name: name.to_owned(),
            shape: self.shape(schema, depth + 1)?,
            is_required,
            default: schema.get("default").cloned(),
            title: text("title"),
            description: text("description"),
            examples,
            is_deprecated: schema.get("deprecated") == Some(&Value::Bool(true)),
        })
    }

    /// Reads an object of which only the values have a type.
    fn map(&mut self, object: &Object, depth: usize) -> Read<Shape> {
        let mut values = Vec::new();
        if let Some(patterns) = object.get("patternProperties").and_then(Value::as_object) {
            for schema in patterns.values() {
                values.push(self.shape(schema, depth + 1)?);
            }
        }
        match object.get("additionalProperties") {
            Some(Value::Bool(false)) => {}
            Some(schema) => values.push(self.shape(schema, depth + 1)?),
            None => values.push(Shape::Any),
        }
        let keys = match object.get("propertyNames") {
            Some(names) => self.shape(names, depth + 1)?,
            None => Shape::Any,
        };
        let is_text = |value: &Value| value.is_string();
        let keys = match keys {
            Shape::Text(rules) if rules.format.is_none() => Shape::Text(rules),
            Shape::Choice(choices) if choices.iter().all(is_text) => Shape::Choice(choices),
            _ => Shape::Text(TextRules::default()),
        };
        Ok(Shape::Map {
            keys: Box::new(keys),
            values: Box::new(union(values)),
        })
    }
}

/// The keywords for references. The second and third are for schemas that extend each other, which
/// tools do not do.
const REFERENCES: [&str; 3] = ["$ref", "$recursiveRef", "$dynamicRef"];

fn reference(object: &Object) -> Option<&str> {
    REFERENCES
        .iter()
        .find_map(|key| object.get(*key).and_then(Value::as_str))
}

fn drop_references(object: &mut Object) {
    object.retain(|key, _| !REFERENCES.contains(&key.as_str()));
}

/// Returns the reference of a schema that has no other constraints.
fn only_reference(object: &Object) -> Option<&str> {
    reference(object).filter(|_| constraints_beside(object, "$ref").is_empty())
}

/// Keywords that describe a value without restricting it, or that belong to the document.
const ANNOTATIONS: [&str; 18] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
    "$recursiveAnchor",
    "$dynamicAnchor",
];

/// Returns the constraints of a schema, without `word`, descriptions and definitions.
fn constraints_beside(object: &Object, word: &str) -> Object {
    let is_meant = |key: &str| key == word || word == "$ref" && REFERENCES.contains(&key);
    let is_constraint =
        |key: &str| !is_meant(key) && !ANNOTATIONS.contains(&key) && !key.starts_with("x-");
    object
        .iter()
        .filter(|(key, _)| is_constraint(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

fn alternatives(object: &Object) -> Option<(&'static str, &[Value])> {
    let list = |key: &'static str| match object.get(key) {
        Some(Value::Array(branches)) if !branches.is_empty() => Some((key, branches.as_slice())),
        _ => None,
    };
    list("anyOf").or_else(|| list("oneOf"))
}

/// Returns whether a branch has a type of its own, so that an outer type adds nothing.
fn says_its_type(branch: &Object) -> bool {
    has_type(branch)
        || ["$ref", "anyOf", "oneOf", "allOf"]
            .iter()
            .any(|key| branch.contains_key(*key))
}

/// Returns the number of parts of a schema, which is the cost of copying it.
fn parts(object: &Object) -> usize {
    fn of(value: &Value) -> usize {
        match value {
            Value::Array(items) => 1 + items.iter().map(of).sum::<usize>(),
            Value::Object(members) => parts(members),
            _ => 1,
        }
    }
    1 + object.values().map(of).sum::<usize>()
}

fn has_type(object: &Object) -> bool {
    [
        "type",
        "properties",
        "enum",
        "const",
        "items",
        "prefixItems",
    ]
    .iter()
    .any(|key| object.contains_key(*key))
}

/// Returns whether a branch restricts a value without giving it a type.
fn only_demands(branch: &Value) -> bool {
    const DEMANDS: [&str; 10] = [
        "required",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "minProperties",
        "maxProperties",
        "type",
    ];
    let Value::Object(branch) = branch else {
        return false;
    };
    let constraints = constraints_beside(branch, "");
    let is_object = branch.get("type").is_none_or(|kind| kind == "object");
    is_object
        && !constraints.is_empty()
        && constraints
            .keys()
            .all(|key| DEMANDS.contains(&key.as_str()))
        && constraints.keys().any(|key| key != "type")
}

/// Returns the type that the keywords of a schema imply.
fn implied_type(object: &Object) -> Option<&'static str> {
    const WORDS: [(&str, &[&str]); 4] = [
        (
            "object",
            &[
                "properties",
                "required",
                "additionalProperties",
                "patternProperties",
                "propertyNames",
            ],
        ),
        (
            "array",
            &[
                "items",
                "prefixItems",
                "minItems",
                "maxItems",
                "uniqueItems",
            ],
        ),
        ("string", &["pattern", "minLength", "maxLength"]),
        (
            "number",
            &[
                "minimum",
                "maximum",
                "exclusiveMinimum",
                "exclusiveMaximum",
                "multipleOf",
            ],
        ),
    ];
    WORDS
        .iter()
        .find(|(_, words)| words.iter().any(|word| object.contains_key(*word)))
        .map(|(kind, _)| *kind)
}

/// Merges the constraints of `other` into `object`. Where both have a keyword, both apply if that
/// can be expressed, otherwise the first does.
fn merge(object: &mut Object, other: &Object) {
    for (key, theirs) in other {
        let Some(ours) = object.get(key) else {
            object.insert(key.clone(), theirs.clone());
            continue;
        };
        let both = match (key.as_str(), ours, theirs) {
            (
                "properties" | "$defs" | "definitions",
                Value::Object(ours),
                Value::Object(theirs),
            ) => merged_members(ours, theirs),
            ("required", Value::Array(ours), Value::Array(theirs)) => {
                let more = theirs.iter().filter(|name| !ours.contains(name));
                Value::Array(ours.iter().chain(more).cloned().collect())
            }
            ("enum", Value::Array(ours), Value::Array(theirs)) => Value::Array(
                ours.iter()
                    .filter(|value| theirs.contains(value))
                    .cloned()
                    .collect(),
            ),
            ("type", ours, theirs) => common_type(ours, theirs),
            ("additionalProperties", Value::Bool(true), theirs) => theirs.clone(),
            ("minimum" | "exclusiveMinimum" | "minLength" | "minItems", ours, theirs)
                if ours.as_f64() < theirs.as_f64() =>
            {
                theirs.clone()
            }
            ("maximum" | "exclusiveMaximum" | "maxLength" | "maxItems", ours, theirs)
                if ours.as_f64() > theirs.as_f64() =>
            {
                theirs.clone()
            }
            _ => continue,
        };
        object.insert(key.clone(), both);
    }
}

fn merged_members(ours: &Object, theirs: &Object) -> Value {
    let mut all = ours.clone();
    for (name, schema) in theirs {
        let both = match ours.get(name) {
            Some(own) if own == schema || schema == &Value::Bool(true) => own.clone(),
            Some(Value::Object(own)) => {
                let mut both = own.clone();
                // The description stays outside, where the field reads it.
                both.retain(|key, _| {
                    matches!(
                        key.as_str(),
                        "description" | "title" | "default" | "examples" | "deprecated"
                    )
                });
                both.insert("allOf".to_owned(), json!([own, schema]));
                Value::Object(both)
            }
            _ => schema.clone(),
        };
        all.insert(name.clone(), both);
    }
    Value::Object(all)
}

fn common_type(ours: &Value, theirs: &Value) -> Value {
    let list = |kinds: &Value| match kinds {
        Value::Array(kinds) => kinds.clone(),
        other => vec![other.clone()],
    };
    let (first, second) = (list(ours), list(theirs));
    let narrower = |kind: &Value| match kind.as_str() {
        _ if second.contains(kind) => Some(kind.clone()),
        Some("number") if second.contains(&json!("integer")) => Some(json!("integer")),
        Some("integer") if second.contains(&json!("number")) => Some(kind.clone()),
        _ => None,
    };
    let mut both: Vec<Value> = first.iter().filter_map(narrower).collect();
    match both.len() {
        0 => ours.clone(),
        1 => both.remove(0),
        _ => Value::Array(both),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Whole {
    Yes,
    No,
}

fn bounds(object: &Object, whole: Whole) -> NumberBounds {
    let number = |key: &str| {
        object
            .get(key)
            .and_then(Value::as_f64)
            .filter(|number| number.abs() < MAX_SAFE_INTEGER)
    };
    // Before draft-06 these two were booleans that changed the meaning of the limit.
    let is_exclusive = |key: &str| object.get(key) == Some(&Value::Bool(true));
    let lowest = if is_exclusive("exclusiveMinimum") {
        "gt"
    } else {
        "ge"
    };
    let highest = if is_exclusive("exclusiveMaximum") {
        "lt"
    } else {
        "le"
    };
    let words = [
        (lowest, "minimum"),
        ("gt", "exclusiveMinimum"),
        (highest, "maximum"),
        ("lt", "exclusiveMaximum"),
    ];
    let mut limits: Vec<(&'static str, Value)> = Vec::new();
    for (word, key) in words {
        if let Some(limit) = number(key) {
            let limit = rounded(limit, word, whole, &object[key]);
            limits.push((word, limit));
        }
    }
    if whole == Whole::Yes
        && let Some(step) = object
            .get("multipleOf")
            .and_then(Value::as_u64)
            .filter(|step| *step > 1)
    {
        limits.push(("multiple_of", json!(step)));
    }
    NumberBounds { limits }
}

/// Rounds the limit of an integer to an integer.
fn rounded(limit: f64, word: &str, whole: Whole, as_written: &Value) -> Value {
    if whole == Whole::No {
        return as_written.clone();
    }
    let rounded = if matches!(word, "ge" | "lt") {
        limit.ceil()
    } else {
        limit.floor()
    };
    json!(rounded as i64)
}

fn text_rules(object: &Object) -> TextRules {
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    let format = match text("format") {
        Some("date") => Some(Format::Date),
        Some("date-time") => Some(Format::DateTime),
        Some("uri" | "url") => Some(Format::Uri),
        Some("uuid") => Some(Format::Uuid),
        Some("email") => Some(Format::Email),
        Some("binary") => Some(Format::Binary),
        Some("byte" | "base64") => Some(Format::Base64),
        _ if text("contentEncoding") == Some("base64") => Some(Format::Base64),
        _ => None,
    };
    TextRules {
        format,
        pattern: text("pattern").map(str::to_owned),
        lengths: lengths(object, "minLength", "maxLength"),
    }
}

fn lengths(object: &Object, least: &str, most: &str) -> Lengths {
    // Some generators write 1.0.
    let number = |key: &str| {
        let number = object.get(key)?.as_f64()?;
        (0.0..MAX_SAFE_INTEGER)
            .contains(&number)
            .then_some(number as u64)
    };
    Lengths {
        least: number(least).filter(|least| *least > 0),
        most: number(most),
    }
}

fn percent_decoded(fragment: &str) -> String {
    let bytes = fragment.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = (bytes[at] == b'%')
            .then(|| fragment.get(at + 1..at + 3))
            .flatten();
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(schema: Value) -> SchemaError {
        read(&schema, "Params").expect_err("it cannot be read")
    }

    fn in_a_member(schema: Value) -> Value {
        json!({"type": "object", "properties": {"x": schema}, "$defs": {"A": {"type": "string"}}})
    }

    #[test]
    fn a_reference_to_another_document_is_refused_and_one_to_this_is_followed() {
        for reference in [
            "https://example.com/x.json",
            "file:///etc/passwd",
            "other.json#/A",
            "//host/x",
            "./x",
        ] {
            let expected = SchemaError::RemoteReference {
                reference: reference.to_owned(),
            };
            assert_eq!(failure(in_a_member(json!({"$ref": reference}))), expected);
            assert_eq!(
                failure(in_a_member(
                    json!({"allOf": [{"$ref": reference}, {"type": "string"}]})
                )),
                expected
            );
        }
        assert!(read(&in_a_member(json!({"$ref": "#/$defs/A"})), "Params").is_ok()); // Control.
    }

    #[test]
    fn a_reference_to_nowhere_or_to_itself_is_refused() {
        let missing = SchemaError::MissingReference {
            reference: "#/$defs/B".to_owned(),
        };
        assert_eq!(failure(in_a_member(json!({"$ref": "#/$defs/B"}))), missing);
        let circle = json!({
            "$ref": "#/$defs/A",
            "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}
        });
        assert!(matches!(
            failure(circle),
            SchemaError::CircularReference { .. }
        ));
        assert!(matches!(
            failure(json!({"$ref": "#"})),
            SchemaError::CircularReference { .. }
        ));
        let own_branch = json!({"anyOf": [{"$ref": "#"}, {"type": "string"}]});
        assert!(matches!(
            failure(own_branch),
            SchemaError::CircularReference { .. }
        ));
        let member =
            json!({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "string"}]});
        assert!(read(&member, "Params").is_ok()); // Control.
    }

    #[test]
    fn depth_has_a_limit() {
        let nested = |depth: usize| {
            (0..depth).fold(
                json!({"type": "string"}),
                |inner, _| json!({"type": "array", "items": inner}),
            )
        };
        assert!(read(&nested(DEEPEST - 1), "Params").is_ok()); // Control.
        assert_eq!(failure(nested(DEEPEST + 1)), SchemaError::TooDeep);
    }

    #[test]
    fn a_few_references_cannot_make_endless_work() {
        let doubling = |levels: usize| {
            let mut definitions = Map::new();
            for level in 0..levels {
                let next = json!({"$ref": format!("#/$defs/d{}", level + 1)});
                let both = json!({"allOf": [
                    {"properties": {"a": next}},
                    {"properties": {"a": {"allOf": [next, next]}}}
                ]});
                definitions.insert(format!("d{level}"), both);
            }
            definitions.insert(
                format!("d{levels}"),
                json!({"type": "object", "properties": {"z": {"type": "integer"}}}),
            );
            json!({"allOf": [{"$ref": "#/$defs/d0"}], "$defs": definitions, "type": "object"})
        };
        assert!(read(&doubling(2), "Params").is_ok()); // Control.
        assert!(matches!(
            failure(doubling(30)),
            SchemaError::TooMuch | SchemaError::TooDeep
        ));
        let itself = json!({"allOf": [{"$ref": "#"}], "type": "object"});
        assert!(matches!(
            failure(itself),
            SchemaError::TooDeep | SchemaError::TooMuch
        ));
    }

    #[test]
    fn width_has_a_limit() {
        let values = |count: usize| {
            (0..count)
                .map(|number| json!(number.to_string()))
                .collect::<Vec<_>>()
        };
        let members = |count: usize| {
            (0..count)
                .map(|number| (number.to_string(), json!({})))
                .collect::<Map<_, _>>()
        };
        let wide = |count: usize| {
            let branches = vec![json!({"type": "string"}); count];
            [
                json!({"enum": values(count)}),
                json!({"properties": members(count)}),
                json!({"anyOf": branches}),
            ]
        };
        for (fits, does_not) in wide(WIDEST).into_iter().zip(wide(WIDEST + 1)) {
            assert!(read(&fits, "Params").is_ok()); // Control.
            assert_eq!(
                failure(does_not),
                SchemaError::TooWide { count: WIDEST + 1 }
            );
        }
    }

    #[test]
    fn what_is_no_schema_is_refused() {
        for wrong in [
            json!(null),
            json!("string"),
            json!([]),
            json!({"properties": {"x": 1}}),
        ] {
            assert_eq!(failure(wrong), SchemaError::NotASchema);
        }
    }
}
