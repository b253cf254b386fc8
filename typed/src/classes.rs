//! Classes: plans the classes and aliases of a module for the shapes of a schema, and their names.
//!
//! Classes come before those that use them, except in a recursion. That is allowed because
//! annotations are resolved late. An alias is evaluated where it is defined: one that uses a class
//! still being planned comes after all classes.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use crate::layout::Code;
use crate::literal;
use crate::name::{self, NameScope};
use crate::shape::{
    ClassRecord, Format, Lengths, Member, NumberBounds, OtherMembers, Schema, Shape, TextRules,
    union,
};

/// A choice longer than this on one line gets a name.
const MAX_INLINE_CHOICE_LENGTH: usize = 60;

/// A definition at the top level of a module.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Item {
    Class(Class),
    Alias { name: String, code: Code },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Class {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    pub(crate) body: ClassBody,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ClassBody {
    /// A model with fields. `extra` is Pydantic's setting for unknown members.
    Fields {
        fields: Vec<Field>,
        extra: &'static str,
    },
    /// A model that consists of one value.
    Root(Code),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Field {
    /// The name in the schema.
    pub(crate) original: String,
    pub(crate) kind: Code,
    pub(crate) default: Option<Preset>,
    pub(crate) title: Option<String>,
    pub(crate) examples: Vec<Value>,
    pub(crate) is_deprecated: bool,
    pub(crate) description: Option<String>,
}

/// The default of a field.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Preset {
    Value(Code),
    /// Created anew for each object.
    Made(Code),
}

/// The direction in which values of a schema travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SchemaDirection {
    /// To the server. A member that the schema does not name is most likely a typo.
    In,
    /// From the server. Members that the schema does not name are kept.
    Out,
}

/// The planned content of a module.
#[derive(Debug, Default)]
pub(crate) struct ModulePlan {
    pub(crate) items: Vec<Item>,
    pub(crate) names: NameScope,
    /// The names that annotations use and that must be imported.
    pub(crate) uses: BTreeSet<&'static str>,
    /// Classes by their content, so that equal ones are shared.
    known: HashMap<String, String>,
}

/// The kind of definition that `Result` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResultKind {
    Class,
    Alias,
}

impl ModulePlan {
    pub(crate) fn new() -> ModulePlan {
        let used = name::USED_NAMES.iter().map(|name| (*name).to_owned());
        ModulePlan {
            names: NameScope::without(used),
            ..ModulePlan::default()
        }
    }

    /// Plans `Params`, which is always a class.
    pub(crate) fn add_params(
        &mut self,
        schema: &Schema,
        others_of_a_map: OtherMembers,
        description: String,
    ) {
        let mut planner = Planner::new(self, schema, SchemaDirection::In);
        let body = match schema.meant(schema.root()) {
            Shape::Record(record) => planner.fields(record, "Params"),
            Shape::Map { .. } | Shape::Any | Shape::Null => ClassBody::Fields {
                fields: Vec::new(),
                extra: SchemaDirection::In.extra(others_of_a_map),
            },
            shape => {
                planner.root_is_a_class = false;
                ClassBody::Root(planner.kind(shape, "Params"))
            }
        };
        let class = Class {
            name: "Params".to_owned(),
            description: Some(description),
            body,
        };
        let late = std::mem::take(&mut planner.late);
        let is_root = matches!(class.body, ClassBody::Root(_));
        self.uses
            .insert(if is_root { "RootModel" } else { "Model" });
        self.finish(Item::Class(class), late, is_root);
    }

    /// Plans `Result`: a class for an object, otherwise an alias. With `member`, it is that member
    /// of the object.
    pub(crate) fn add_result(
        &mut self,
        schema: &Schema,
        member: Option<&str>,
        description: String,
    ) -> ResultKind {
        let mut planner = Planner::new(self, schema, SchemaDirection::Out);
        let root = schema.meant(schema.root());
        let inner = match (root, member) {
            (Shape::Record(record), Some(name)) => record
                .members
                .iter()
                .find(|member| member.name == name)
                .map_or(root, |member| &member.shape),
            _ => root,
        };
        planner.root_is_a_class = matches!(inner, Shape::Record(_)) && std::ptr::eq(root, inner);
        let item = match inner {
            Shape::Record(record) => {
                let description = Some(record.description.clone().unwrap_or(description));
                let body = planner.fields(record, "Result");
                Item::Class(Class {
                    name: "Result".to_owned(),
                    description,
                    body,
                })
            }
            shape => Item::Alias {
                name: "Result".to_owned(),
                code: planner.kind(shape, "Result"),
            },
        };
        let late = std::mem::take(&mut planner.late);
        let is_class = matches!(item, Item::Class(_));
        if is_class {
            self.uses.insert("Model");
        }
        self.finish(item, late, !is_class);
        if is_class {
            ResultKind::Class
        } else {
            ResultKind::Alias
        }
    }

    /// Adds the last item. An item that is evaluated where it is defined comes after everything
    /// that it may use.
    fn finish(&mut self, item: Item, late: Vec<Item>, is_evaluated: bool) {
        if is_evaluated {
            self.items.extend(late);
            self.items.push(item);
        } else {
            self.items.push(item);
            self.items.extend(late);
        }
    }
}

impl SchemaDirection {
    fn extra(self, others: OtherMembers) -> &'static str {
        match (others, self) {
            (OtherMembers::Forbidden, _) | (OtherMembers::Unsaid, SchemaDirection::In) => "forbid",
            (OtherMembers::Allowed, _) | (OtherMembers::Unsaid, SchemaDirection::Out) => "allow",
        }
    }
}

/// The planning state of a definition.
#[derive(Clone)]
enum Progress {
    Untouched,
    /// Being planned. Contains the name of its class, if it is one.
    Begun(Option<String>),
    Planned(Code),
}

struct Planner<'p> {
    plan: &'p mut ModulePlan,
    schema: &'p Schema,
    direction: SchemaDirection,
    progress: Vec<Progress>,
    /// Whether references to the root may refer to a class.
    root_is_a_class: bool,
    /// Aliases that must come after all classes.
    late: Vec<Item>,
    /// Whether, since this was last cleared, something was used that is not yet defined at the
    /// current position.
    used_unfinished: bool,
}

impl<'p> Planner<'p> {
    fn new(
        plan: &'p mut ModulePlan,
        schema: &'p Schema,
        direction: SchemaDirection,
    ) -> Planner<'p> {
        let progress = vec![Progress::Untouched; schema.definitions.len()];
        Planner {
            plan,
            schema,
            direction,
            progress,
            root_is_a_class: true,
            late: Vec::new(),
            used_unfinished: false,
        }
    }

    fn uses(&mut self, name: &'static str) -> &'static str {
        self.plan.uses.insert(name);
        name
    }

    /// Returns the annotation for a shape. `hint` is the preferred name of a class for it.
    fn kind(&mut self, shape: &Shape, hint: &str) -> Code {
        match shape {
            Shape::Any => Code::text(self.uses("Any")),
            Shape::Null => Code::text("None"),
            Shape::Boolean => Code::text("bool"),
            Shape::Integer(bounds) => self.restricted(Code::text("int"), limits(bounds)),
            Shape::Number(bounds) => self.restricted(Code::text("float"), limits(bounds)),
            Shape::Text(rules) => self.text(rules),
            Shape::Choice(values) => self.choice(values, hint),
            Shape::List(items, allowed) => {
                let items = self.kind(items, &format!("{hint}Item"));
                self.restricted(Code::subscript("list", vec![items]), lengths(allowed))
            }
            Shape::Tuple(items) => {
                let items = items
                    .iter()
                    .map(|item| self.kind(item, &format!("{hint}Item")))
                    .collect();
                Code::subscript("tuple", items)
            }
            Shape::Map { keys, values } => {
                let keys = self.kind(keys, &format!("{hint}Key"));
                let values = self.kind(values, &format!("{hint}Value"));
                Code::subscript("dict", vec![keys, values])
            }
            Shape::Record(record) => Code::text(self.class(record, hint)),
            Shape::Union(members) => self.union(members, hint),
            Shape::Named(place) => self.definition(*place),
        }
    }

    fn restricted(&mut self, kind: Code, rules: Vec<Code>) -> Code {
        if rules.is_empty() {
            return kind;
        }
        self.uses("Field");
        Code::subscript(
            self.uses("Annotated"),
            vec![kind, Code::call("Field", rules)],
        )
    }

    fn text(&mut self, rules: &TextRules) -> Code {
        let name = match rules.format {
            None => "str",
            Some(Format::Date) => {
                self.uses("dt");
                "dt.date"
            }
            Some(Format::DateTime) => self.uses("AwareDatetime"),
            Some(Format::Uri) => self.uses("Url"),
            Some(Format::Uuid) => self.uses("UUID"),
            Some(Format::Email) => self.uses("Email"),
            Some(Format::Binary) => "bytes",
            Some(Format::Base64) => self.uses("Base64"),
        };
        let kind = Code::text(name);
        if rules.format.is_some_and(|format| !format.is_text()) {
            return kind;
        }
        let mut metadata = Vec::new();
        let lengths = lengths(&rules.lengths);
        if !lengths.is_empty() {
            metadata.push(Code::call(self.uses("Field"), lengths));
        }
        if let Some(pattern) = &rules.pattern {
            metadata.push(Code::call(
                self.uses("Pattern"),
                vec![Code::text(literal::string(pattern))],
            ));
        }
        if metadata.is_empty() {
            return kind;
        }
        metadata.insert(0, kind);
        Code::subscript(self.uses("Annotated"), metadata)
    }

    fn choice(&mut self, values: &[Value], hint: &str) -> Code {
        let is_literal = |value: &Value| match value {
            Value::Number(number) => !number.is_f64(),
            Value::Array(_) | Value::Object(_) => false,
            _ => true,
        };
        let code = if values.iter().all(is_literal) {
            Code::subscript(
                self.uses("Literal"),
                values.iter().map(literal::value).collect(),
            )
        } else {
            let kind = if values.iter().all(Value::is_number) {
                "float"
            } else {
                self.uses("Any")
            };
            let values = Code::list("[", values.iter().map(literal::value).collect(), "]");
            let one_of = Code::call(self.uses("OneOf"), vec![values]);
            Code::subscript(self.uses("Annotated"), vec![Code::text(kind), one_of])
        };
        if code.flat().chars().count() <= MAX_INLINE_CHOICE_LENGTH {
            return code;
        }
        let key = code.flat();
        if let Some(name) = self.plan.known.get(&key) {
            return Code::text(name.clone());
        }
        let name = self.take_name(hint);
        self.plan.known.insert(key, name.clone());
        self.plan.items.push(Item::Alias {
            name: name.clone(),
            code,
        });
        Code::text(name)
    }

    fn union(&mut self, members: &[Shape], hint: &str) -> Code {
        let discriminator = discriminator(self.schema, members);
        let (nulls, others): (Vec<&Shape>, Vec<&Shape>) =
            members.iter().partition(|member| **member == Shape::Null);
        let kinds: Vec<Code> = others
            .iter()
            .map(|member| self.kind(member, &branch_hint(member, hint)))
            .collect();
        let mut distinct: Vec<Code> = Vec::new();
        for kind in kinds {
            if !distinct.contains(&kind) {
                distinct.push(kind);
            }
        }
        let code = match (discriminator, distinct.len()) {
            (Some(name), 2..) => {
                self.uses("Field");
                let key = Code::after("discriminator=", Code::text(literal::string(name)));
                Code::subscript(
                    self.uses("Annotated"),
                    vec![Code::Union(distinct), Code::call("Field", vec![key])],
                )
            }
            (_, 1) => distinct.swap_remove(0),
            _ => Code::Union(distinct),
        };
        if nulls.is_empty() {
            code
        } else {
            either(code, Code::text("None"))
        }
    }

    fn definition(&mut self, place: usize) -> Code {
        match self.progress[place].clone() {
            Progress::Planned(code) => {
                self.used_unfinished |= self.late.iter().any(|item| is_named(item, &code));
                code
            }
            Progress::Begun(Some(class)) => {
                self.used_unfinished = true;
                Code::text(class)
            }
            // An alias cannot contain itself.
            Progress::Begun(None) => Code::text(self.uses("Any")),
            Progress::Untouched if place == 0 => self.root(),
            Progress::Untouched => {
                let code = self.plan_definition(place);
                self.progress[place] = Progress::Planned(code.clone());
                code
            }
        }
    }

    /// Returns the annotation for a reference to the whole schema: its class, which comes last.
    fn root(&mut self) -> Code {
        if !self.root_is_a_class {
            return Code::text(self.uses("Any"));
        }
        self.used_unfinished = true;
        Code::text(if self.direction == SchemaDirection::In {
            "Params"
        } else {
            "Result"
        })
    }

    fn plan_definition(&mut self, place: usize) -> Code {
        let definition = &self.schema.definitions[place];
        if let Shape::Record(record) = &definition.shape {
            let name = self.take_name(&definition.name);
            self.progress[place] = Progress::Begun(Some(name.clone()));
            return Code::text(self.add_class(record, name));
        }
        self.progress[place] = Progress::Begun(None);
        let before = std::mem::replace(&mut self.used_unfinished, false);
        let code = self.kind(&definition.shape, &definition.name);
        let is_late = std::mem::replace(&mut self.used_unfinished, before);
        self.used_unfinished |= is_late;
        if let Code::Text(_) = code {
            return code;
        }
        let name = self.take_name(&definition.name);
        let alias = Item::Alias {
            name: name.clone(),
            code,
        };
        if is_late {
            self.late.push(alias)
        } else {
            self.plan.items.push(alias)
        }
        Code::text(name)
    }

    /// Returns the class for an object that is described inline. Equal objects share a class.
    fn class(&mut self, record: &ClassRecord, hint: &str) -> String {
        let key = format!("{:?} {record:?}", self.direction);
        if let Some(name) = self.plan.known.get(&key) {
            return name.clone();
        }
        let name = self.take_name(hint);
        let name = self.add_class(record, name);
        self.plan.known.insert(key, name.clone());
        name
    }

    fn add_class(&mut self, record: &ClassRecord, name: String) -> String {
        self.uses("Model");
        let body = self.fields(record, &name);
        let class = Class {
            name: name.clone(),
            description: record.description.clone(),
            body,
        };
        self.plan.items.push(Item::Class(class));
        name
    }

    fn take_name(&mut self, hint: &str) -> String {
        let name = name::class(hint);
        let is_unfit = name::USED_NAMES.contains(&name.as_str()) || name::is_builtin(&name);
        let name = if is_unfit { name + "Model" } else { name };
        let is_like_an_input =
            self.direction == SchemaDirection::Out && self.plan.names.holds(&name);
        let name = if is_like_an_input && !name.starts_with("Result") {
            format!("Result{name}")
        } else {
            name
        };
        self.plan.names.take_class(&name)
    }

    fn fields(&mut self, record: &ClassRecord, class: &str) -> ClassBody {
        // A class used by `Params` or `Result` is named after its field. Others get the name of
        // their class as a prefix if they would be unclear.
        let hint = |member: &Member| match class {
            "Params" | "Result" => member.name.clone(),
            _ if name::class(&member.name).len() < 4 => format!("{class}_{}", member.name),
            _ => member.name.clone(),
        };
        let fields = record
            .members
            .iter()
            .map(|member| self.field(member, &hint(member)))
            .collect();
        ClassBody::Fields {
            fields,
            extra: self.direction.extra(record.others),
        }
    }

    fn field(&mut self, member: &Member, hint: &str) -> Field {
        let (kind, default) = match member.is_required {
            true => self.required(member, hint),
            false => {
                let kind = self.optional(&member.shape, hint);
                let default = self.preset(member, &kind);
                (kind, Some(default))
            }
        };
        let mut description = member.description.clone();
        if let Some(value) = unspoken_default(member, default.as_ref()) {
            let text =
                description.map_or_else(String::new, |text| text.trim_end().to_owned() + "\n\n");
            description = Some(format!("{text}Default: `{value}`"));
        }
        let title = member
            .title
            .clone()
            .filter(|title| !only_repeats(title, &member.name));
        Field {
            original: member.name.clone(),
            kind,
            default,
            title,
            examples: member.examples.clone(),
            is_deprecated: member.is_deprecated,
            description,
        }
    }

    /// Returns the annotation of a field that must be sent. A field with a default need not be set,
    /// and is sent nevertheless.
    fn required(&mut self, member: &Member, hint: &str) -> (Code, Option<Preset>) {
        let kind = self.kind(&member.shape, hint);
        let fits = |value: &&Value| {
            !value.is_null()
                && self.schema.accepts(&member.shape, value)
                && self.schema.is_plain(&member.shape, value)
        };
        match member.default.as_ref().filter(fits) {
            Some(value) if self.direction == SchemaDirection::In => {
                let kind = Code::subscript(
                    self.uses("Annotated"),
                    vec![kind, Code::text(self.uses("Sent"))],
                );
                (kind, Some(Preset::Value(literal::value(value))))
            }
            _ => (kind, None),
        }
    }

    /// Returns the annotation of a field that need not be set. `Null` means that null is a value
    /// that can be sent, `None` that the field is left out.
    fn optional(&mut self, shape: &Shape, hint: &str) -> Code {
        if self.schema.meant(shape) == &Shape::Any {
            return self.kind(shape, hint);
        }
        let null = if self.schema.admits_null(shape) {
            self.uses("Null")
        } else {
            "None"
        };
        match without_null(shape) {
            Some(shape) => either(self.kind(&shape, hint), Code::text(null)),
            None => Code::text(null),
        }
    }

    fn preset(&mut self, member: &Member, kind: &Code) -> Preset {
        let nothing = Preset::Value(Code::text("None"));
        let Some(value) = member
            .default
            .as_ref()
            .filter(|value| self.schema.accepts(&member.shape, value))
        else {
            return nothing;
        };
        if self.schema.is_plain(&member.shape, value) {
            return Preset::Value(literal::value(value));
        }
        // The class is the first part of the annotation, before ` | None`.
        match (self.schema.meant(&member.shape), kind) {
            (Shape::Record(_), Code::Union(kinds)) => {
                let make = Code::call(
                    &format!("{}.model_validate", kinds[0].flat()),
                    vec![literal::value(value)],
                );
                Preset::Made(Code::after("lambda: ", make))
            }
            _ => nothing,
        }
    }
}

/// Returns a default that a field has but that its source does not show.
fn unspoken_default<'a>(member: &'a Member, preset: Option<&Preset>) -> Option<&'a Value> {
    let value = member.default.as_ref().filter(|value| !value.is_null())?;
    let is_shown = preset.is_some_and(|preset| *preset != Preset::Value(Code::text("None")));
    (!is_shown).then_some(value)
}

/// Returns whether a title only repeats the name, as schema generators write it.
fn only_repeats(title: &str, name: &str) -> bool {
    let letters = |text: &str| {
        text.chars()
            .filter(|letter| letter.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect::<String>()
    };
    letters(title) == letters(name)
}

fn either(kind: Code, other: Code) -> Code {
    match kind {
        Code::Union(mut kinds) => {
            if !kinds.contains(&other) {
                kinds.push(other);
            }
            Code::Union(kinds)
        }
        kind if kind == other => kind,
        kind => Code::Union(vec![kind, other]),
    }
}

/// Returns a shape without null, or `None` if it was only null.
fn without_null(shape: &Shape) -> Option<Shape> {
    match shape {
        Shape::Null => None,
        Shape::Choice(values) => {
            let rest: Vec<Value> = values
                .iter()
                .filter(|value| !value.is_null())
                .cloned()
                .collect();
            (!rest.is_empty()).then_some(Shape::Choice(rest))
        }
        Shape::Union(members) => {
            let rest: Vec<Shape> = members.iter().filter_map(without_null).collect();
            (!rest.is_empty()).then(|| union(rest))
        }
        other => Some(other.clone()),
    }
}

fn is_named(item: &Item, code: &Code) -> bool {
    matches!((item, code), (Item::Alias { name, .. }, Code::Text(text)) if name == text)
}

fn limits(bounds: &NumberBounds) -> Vec<Code> {
    bounds
        .limits
        .iter()
        .map(|(word, limit)| Code::after(format!("{word}="), literal::value(limit)))
        .collect()
}

fn lengths(lengths: &Lengths) -> Vec<Code> {
    let limit =
        |word: &str, limit: Option<u64>| limit.map(|limit| Code::text(format!("{word}={limit}")));
    limit("min_length", lengths.least)
        .into_iter()
        .chain(limit("max_length", lengths.most))
        .collect()
}

/// Returns the name for a class of one of several objects: after its distinguishing member, if
/// there is one.
fn branch_hint(shape: &Shape, hint: &str) -> String {
    let Shape::Record(record) = shape else {
        return hint.to_owned();
    };
    let constant = record
        .members
        .iter()
        .find_map(|member| match &member.shape {
            Shape::Choice(values) if member.is_required => match values.as_slice() {
                [Value::String(text)] if text.is_ascii() && text.len() <= 40 => Some(text.clone()),
                _ => None,
            },
            _ => None,
        });
    match (constant, &record.title) {
        (Some(constant), _) => format!("{hint}_{constant}"),
        (None, Some(title)) => title.clone(),
        (None, None) => match record.members.iter().find(|member| member.is_required) {
            Some(member) => format!("{hint}_with_{}", member.name),
            None => hint.to_owned(),
        },
    }
}

/// Finds a discriminator: a member that is required in each object, with texts that no other object
/// has.
fn discriminator<'a>(schema: &'a Schema, members: &'a [Shape]) -> Option<&'a str> {
    let objects = members.iter().filter(|member| **member != Shape::Null);
    let records = objects.map(|member| match schema.meant(member) {
        Shape::Record(record) => Some(record),
        _ => None,
    });
    let records: Vec<&ClassRecord> = records.collect::<Option<_>>()?;
    let (first, _) = records.split_first().filter(|(_, rest)| !rest.is_empty())?;
    let tells_apart = |name: &str| {
        let mut seen: Vec<&Value> = Vec::new();
        name::is_plain_field(name)
            && records
                .iter()
                .all(|record| match texts_of(schema, record, name) {
                    Some(values) if !values.iter().any(|value| seen.contains(&value)) => {
                        seen.extend(values);
                        true
                    }
                    _ => false,
                })
    };
    first
        .members
        .iter()
        .map(|member| member.name.as_str())
        .find(|name| tells_apart(name))
}

/// Returns the texts that a required member may have, if it is a choice of texts.
fn texts_of<'a>(schema: &'a Schema, record: &'a ClassRecord, name: &str) -> Option<&'a [Value]> {
    let member = record
        .members
        .iter()
        .find(|member| member.name == name && member.is_required)?;
    match schema.meant(&member.shape) {
        Shape::Choice(values) if values.iter().all(Value::is_string) => Some(values),
        _ => None,
    }
}
