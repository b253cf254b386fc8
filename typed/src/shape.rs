//! Shapes: the constraints of a schema, as far as Python's types can express them.
//!
//! A shape may be wider than its schema, never narrower: the host checks arguments against the
//! schema itself.

use serde_json::{Map, Value};

/// Limit of comparisons when checking whether a default fits. Nested alternatives could otherwise
/// take forever.
const MAX_COMPARISONS: usize = 10_000;

/// A parsed schema: its definitions, of which the first is the schema itself.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Schema {
    pub(crate) definitions: Vec<Definition>,
}

/// A named definition in a schema, which may refer to itself.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Definition {
    /// The name in the schema. Any text.
    pub(crate) name: String,
    pub(crate) shape: Shape,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shape {
    Any,
    Null,
    Boolean,
    Integer(NumberBounds),
    Number(NumberBounds),
    Text(TextRules),
    /// One of these values.
    Choice(Vec<Value>),
    List(Box<Shape>, Lengths),
    Tuple(Vec<Shape>),
    Map {
        keys: Box<Shape>,
        values: Box<Shape>,
    },
    Record(ClassRecord),
    /// One of several shapes, none of which is a union.
    Union(Vec<Shape>),
    /// A definition, by its index.
    Named(usize),
}

/// Limits of a number.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NumberBounds {
    /// Pairs of a Pydantic keyword, such as `ge`, and the limit.
    pub(crate) limits: Vec<(&'static str, Value)>,
}

/// Constraints on a text.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TextRules {
    pub(crate) format: Option<Format>,
    pub(crate) pattern: Option<String>,
    pub(crate) lengths: Lengths,
}

/// Formats that have a Python type. Others are plain text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Date,
    DateTime,
    Uri,
    Uuid,
    Email,
    Binary,
    Base64,
}

impl Format {
    /// Returns whether values of this format stay strings in Python.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, Format::Uri | Format::Email)
    }
}

/// Limits of a length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) least: Option<u64>,
    pub(crate) most: Option<u64>,
}

impl Lengths {
    fn allow(&self, length: usize) -> bool {
        let length = length as u64;
        self.least.is_none_or(|least| length >= least)
            && self.most.is_none_or(|most| length <= most)
    }
}

/// An object with known members: a class.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ClassRecord {
    pub(crate) title: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) members: Vec<Member>,
    pub(crate) others: OtherMembers,
}

/// Whether a schema allows members that it does not name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherMembers {
    Unsaid,
    Forbidden,
    Allowed,
}

/// A member of an object: a field.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Member {
    /// The name in the schema. Any text.
    pub(crate) name: String,
    pub(crate) shape: Shape,
    pub(crate) is_required: bool,
    pub(crate) default: Option<Value>,
    pub(crate) title: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) examples: Vec<Value>,
    pub(crate) is_deprecated: bool,
}

impl Schema {
    pub(crate) fn root(&self) -> &Shape {
        &self.definitions[0].shape
    }

    /// Follows names to the shape that they refer to.
    pub(crate) fn meant<'a>(&'a self, shape: &'a Shape) -> &'a Shape {
        let mut shape = shape;
        // A name may refer to a name, but not in a circle: the reader rejects that.
        while let Shape::Named(place) = shape {
            shape = &self.definitions[*place].shape;
        }
        shape
    }

    /// Returns whether null is a value of this shape by itself.
    pub(crate) fn admits_null(&self, shape: &Shape) -> bool {
        self.meant(shape) == &Shape::Any || self.accepts(shape, &Value::Null)
    }

    /// Returns whether a value fits, as far as shapes can decide. A default that does not fit is
    /// ignored.
    pub(crate) fn accepts(&self, shape: &Shape, value: &Value) -> bool {
        Check {
            schema: self,
            left: MAX_COMPARISONS,
        }
        .accepts(shape, value)
    }

    /// Returns whether a value of this shape is the same in Python and in JSON: not a class, and
    /// not a type for a format.
    pub(crate) fn is_plain(&self, shape: &Shape, value: &Value) -> bool {
        Check {
            schema: self,
            left: MAX_COMPARISONS,
        }
        .is_plain(shape, value)
    }
}

/// A bounded comparison of values with shapes. It returns false when the limit is reached.
struct Check<'a> {
    schema: &'a Schema,
    left: usize,
}

impl Check<'_> {
    fn gives_up(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    fn accepts(&mut self, shape: &Shape, value: &Value) -> bool {
        if self.gives_up() {
            return false;
        }
        match (self.schema.meant(shape), value) {
            (Shape::Any, _) | (Shape::Null, Value::Null) | (Shape::Boolean, Value::Bool(_)) => true,
            (Shape::Integer(bounds), Value::Number(number)) => {
                !number.is_f64() && bounds.allow(number.as_f64())
            }
            (Shape::Number(bounds), Value::Number(number)) => bounds.allow(number.as_f64()),
            // Patterns and formats are not evaluated here, so a text with either does not fit.
            (Shape::Text(rules), Value::String(text)) => {
                rules.format.is_none()
                    && rules.pattern.is_none()
                    && rules.lengths.allow(text.chars().count())
            }
            (Shape::Choice(values), value) => values.contains(value),
            (Shape::List(items, lengths), Value::Array(values)) => {
                lengths.allow(values.len()) && values.iter().all(|value| self.accepts(items, value))
            }
            (Shape::Map { keys, values }, Value::Object(members)) => {
                members.iter().all(|(key, value)| {
                    self.accepts(keys, &Value::String(key.clone())) && self.accepts(values, value)
                })
            }
            (Shape::Record(record), Value::Object(members)) => {
                self.accepts_members(record, members)
            }
            (Shape::Union(shapes), value) => shapes.iter().any(|shape| self.accepts(shape, value)),
            _ => false,
        }
    }

    fn accepts_members(&mut self, record: &ClassRecord, members: &Map<String, Value>) -> bool {
        let known = |name: &str| record.members.iter().find(|member| member.name == name);
        let fits = members.iter().all(|(name, value)| match known(name) {
            Some(member) => self.accepts(&member.shape, value),
            None => record.others == OtherMembers::Allowed,
        });
        fits && record
            .members
            .iter()
            .all(|member| !member.is_required || members.contains_key(&member.name))
    }

    fn is_plain(&mut self, shape: &Shape, value: &Value) -> bool {
        if self.gives_up() {
            return false;
        }
        match (self.schema.meant(shape), value) {
            (Shape::Record(_) | Shape::Tuple(_), _) => false,
            (Shape::List(items, _), Value::Array(values)) => {
                values.iter().all(|value| self.is_plain(items, value))
            }
            (Shape::Map { values: shape, .. }, Value::Object(members)) => {
                members.values().all(|value| self.is_plain(shape, value))
            }
            (Shape::Union(shapes), value) => shapes
                .iter()
                .any(|shape| self.accepts(shape, value) && self.is_plain(shape, value)),
            _ => true,
        }
    }
}

impl NumberBounds {
    fn allow(&self, number: Option<f64>) -> bool {
        let Some(number) = number else { return false };
        self.limits.iter().all(|(word, limit)| {
            let limit = limit.as_f64().unwrap_or(f64::NAN);
            match *word {
                "ge" => number >= limit,
                "gt" => number > limit,
                "le" => number <= limit,
                "lt" => number < limit,
                _ => number % limit == 0.0,
            }
        })
    }
}

/// Combines alternatives: no nested unions, no duplicates, all choices merged into one.
pub(crate) fn union(shapes: Vec<Shape>) -> Shape {
    let mut members: Vec<Shape> = Vec::new();
    let flat = shapes.into_iter().flat_map(|shape| match shape {
        Shape::Union(inner) => inner,
        other => vec![other],
    });
    for shape in flat {
        if shape == Shape::Any {
            return Shape::Any;
        }
        let earlier = members
            .iter()
            .position(|member| matches!(member, Shape::Choice(_)));
        match (shape, earlier.map(|place| &mut members[place])) {
            (Shape::Choice(more), Some(Shape::Choice(values))) => {
                for value in more {
                    if !values.contains(&value) {
                        values.push(value);
                    }
                }
            }
            (shape, _) => {
                if !members.contains(&shape) {
                    members.push(shape);
                }
            }
        }
    }
    match members.len() {
        0 => Shape::Any,
        1 => members.swap_remove(0),
        _ => Shape::Union(members),
    }
}
