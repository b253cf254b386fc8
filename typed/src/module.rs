//! The text of a tool's module.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::classes::{Class, ClassBody, Field, Item, ModulePlan, Preset, ResultKind};
use crate::layout::{Code, WIDTH, annotated};
use crate::literal;
use crate::name;

/// The tool that a module is for.
pub(crate) struct ModuleSubject<'a> {
    pub(crate) server: &'a str,
    pub(crate) package: &'a str,
    pub(crate) tool: &'a str,
    pub(crate) module: &'a str,
    pub(crate) description: &'a str,
    pub(crate) result: Option<ResultKind>,
    /// Whether the result is a member of the object that the server sends.
    pub(crate) is_wrapped: bool,
}

/// Names by the Python module that they are imported from.
const HOMES: [(&str, &[&str]); 4] = [
    ("typing", &["Annotated", "Any", "Literal"]),
    ("uuid", &["UUID"]),
    (
        "cellblock_runner.mcptools",
        &[
            "Base64",
            "Email",
            "Model",
            "Null",
            "OneOf",
            "Pattern",
            "Reply",
            "Sent",
            "Url",
            "call",
            "call_async",
        ],
    ),
    ("pydantic", &["AwareDatetime", "Field", "RootModel"]),
];

/// Returns the text of the module.
pub(crate) fn text(subject: &ModuleSubject<'_>, plan: &ModulePlan) -> String {
    let names = plan.names.clone().into_set();
    let needs_nothing = needs_nothing(plan);
    let items: Vec<String> = plan
        .items
        .iter()
        .map(|item| item_text(item, &names))
        .collect();
    let body = items.join("\n\n") + "\n\n" + &functions(subject, needs_nothing);
    let body = body.trim_start_matches('\n');
    let mut uses = plan.uses.clone();
    uses.extend(["call", "call_async"]);
    if subject.result.is_none() {
        uses.insert("Reply");
    }
    if body.contains(" Field(") {
        uses.insert("Field");
    }
    let imports = imports(&uses);
    let exports = if subject.result.is_some() {
        r#""Params", "Result", "run", "run_async""#
    } else {
        r#""Params", "run", "run_async""#
    };
    format!(
        "{}\n{imports}\n__all__ = [{exports}]\n\n\n{body}",
        front_page(subject, plan, &names)
    )
}

/// Returns whether the tool can be called without arguments.
fn needs_nothing(plan: &ModulePlan) -> bool {
    params(plan).is_some_and(|fields| fields.iter().all(|field| field.default.is_some()))
}

fn params(plan: &ModulePlan) -> Option<&[Field]> {
    plan.items.iter().find_map(|item| match item {
        Item::Class(Class {
            name,
            body: ClassBody::Fields { fields, .. },
            ..
        }) if name == "Params" => Some(fields.as_slice()),
        _ => None,
    })
}

fn front_page(subject: &ModuleSubject<'_>, plan: &ModulePlan, names: &BTreeSet<String>) -> String {
    let ModuleSubject {
        server,
        package,
        tool,
        module,
        ..
    } = subject;
    let arguments = params(plan).map_or_else(
        || "...".to_owned(),
        |fields| {
            let originals: Vec<&str> = fields.iter().map(|field| field.original.as_str()).collect();
            let python = name::fields(&originals, names);
            let required = fields
                .iter()
                .zip(python)
                .filter(|(field, _)| field.default.is_none());
            required
                .map(|(_, name)| name + "=...")
                .collect::<Vec<_>>()
                .join(", ")
        },
    );
    let text = format!(
        "The tool `{tool}` of the MCP server `{server}`.\n\nFor example:\n\n    from \
         mcptools.{package}.{module} import Params, run\n\n    run(Params({arguments}))"
    );
    literal::docstring(&text, 0, WIDTH)
}

fn imports(uses: &BTreeSet<&'static str>) -> String {
    let lines = |modules: &[&str]| {
        let homes = HOMES.iter().filter(|(module, _)| modules.contains(module));
        let line = |(module, names): &(&str, &[&str])| {
            let used: Vec<Code> = names
                .iter()
                .filter(|name| uses.contains(*name))
                .map(|name| Code::text(*name))
                .collect();
            match used.is_empty() {
                true => String::new(),
                false => import(module, used),
            }
        };
        homes.map(line).collect::<String>()
    };
    let dates = if uses.contains("dt") {
        "import datetime as dt\n"
    } else {
        ""
    };
    let standard = format!("{dates}{}", lines(&["typing", "uuid"]));
    let separator = if standard.is_empty() { "" } else { "\n" };
    let others = lines(&["cellblock_runner.mcptools", "pydantic"]);
    format!("from __future__ import annotations\n\n{standard}{separator}{others}")
}

/// Returns an import, with brackets only if it takes several lines.
pub(crate) fn import(module: &str, names: Vec<Code>) -> String {
    let flat = names.iter().map(Code::flat).collect::<Vec<_>>().join(", ");
    let line = format!("from {module} import {flat}");
    if line.chars().count() <= WIDTH {
        return line + "\n";
    }
    let lines: String = names
        .iter()
        .map(|name| format!("    {},\n", name.flat()))
        .collect();
    format!("from {module} import (\n{lines})\n")
}

fn item_text(item: &Item, names: &BTreeSet<String>) -> String {
    match item {
        Item::Alias { name, code } => code.broken(0, &format!("{name} = "), "") + "\n",
        Item::Class(class) => class_text(class, names),
    }
}

fn class_text(class: &Class, names: &BTreeSet<String>) -> String {
    let description = class
        .description
        .as_deref()
        .map(str::trim)
        .filter(|text| !text.is_empty());
    let (head, body) = match &class.body {
        ClassBody::Root(code) => (
            Code::subscript("RootModel", vec![code.clone()]).broken(
                0,
                &format!("class {}(", class.name),
                "):\n",
            ),
            String::new(),
        ),
        ClassBody::Fields { fields, extra } => (
            format!("class {}(Model, extra=\"{extra}\"):\n", class.name),
            fields_text(fields, names),
        ),
    };
    let description = description.or(body
        .is_empty()
        .then_some("An object without members of its own."));
    let documentation = description.map(|text| literal::described(text, 4, WIDTH));
    let separator = if documentation.is_some() && !body.is_empty() {
        "\n"
    } else {
        ""
    };
    format!(
        "{head}{}{separator}{body}",
        documentation.unwrap_or_default()
    )
}

fn fields_text(fields: &[Field], names: &BTreeSet<String>) -> String {
    let originals: Vec<&str> = fields.iter().map(|field| field.original.as_str()).collect();
    let python = name::fields(&originals, names);
    let mut text = String::new();
    let mut was_documented = false;
    for (field, name) in fields.iter().zip(python) {
        if was_documented {
            text.push('\n');
        }
        text += &annotated(4, &name, &field.kind, field_value(field, &name).as_ref());
        let description = field
            .description
            .as_deref()
            .filter(|description| !description.trim().is_empty());
        text += &description
            .map(|text| literal::described(text, 4, WIDTH))
            .unwrap_or_default();
        was_documented = description.is_some();
    }
    text
}

/// Returns the value of a field in its class: its default, and its metadata for Pydantic.
fn field_value(field: &Field, name: &str) -> Option<Code> {
    let mut facts: Vec<Code> = Vec::new();
    let mut fact = |word: &str, value: Code| facts.push(Code::after(format!("{word}="), value));
    let text = |text: &str| Code::text(literal::string(text));
    if field.original != name {
        fact("validation_alias", text(&field.original));
        fact("serialization_alias", text(&field.original));
    }
    if let Some(title) = &field.title {
        fact("title", text(title));
    }
    if !field.examples.is_empty() {
        fact(
            "examples",
            literal::value(&Value::Array(field.examples.clone())),
        );
    }
    if field.is_deprecated {
        fact("deprecated", Code::text("True"));
    }
    let default = match &field.default {
        Some(Preset::Value(value)) if facts.is_empty() => return Some(value.clone()),
        Some(Preset::Value(value)) => Some(("default", value)),
        Some(Preset::Made(value)) => Some(("default_factory", value)),
        None => None,
    };
    if let Some((word, value)) = default {
        facts.insert(0, Code::after(format!("{word}="), value.clone()));
    }
    (!facts.is_empty()).then(|| Code::call("Field", facts))
}

fn functions(subject: &ModuleSubject<'_>, needs_nothing: bool) -> String {
    let params = if needs_nothing {
        "params: Params | None = None"
    } else {
        "params: Params"
    };
    let returned = if subject.result.is_some() {
        "Result"
    } else {
        "Reply"
    };
    let run = documentation(subject);
    let run_async = literal::docstring(
        "Does what `run` does, and lets other tasks go on meanwhile.",
        4,
        WIDTH,
    );
    format!(
        "def run({params}) -> {returned}:\n{run}{}\n\nasync def run_async({params}) -> \
         {returned}:\n{run_async}{}",
        call(subject, "call"),
        call(subject, "await call_async"),
    )
}

fn documentation(subject: &ModuleSubject<'_>) -> String {
    let what = match subject.description.trim() {
        "" => format!("Calls the tool `{}`.", subject.tool),
        text => text.to_owned(),
    };
    let what = literal::cleaned(&what);
    let text = match subject.result {
        Some(_) => what,
        None => format!(
            "{what}\n\nReturns its text; `.content` has pictures, sounds, resources and links too."
        ),
    };
    literal::docstring(&text, 4, WIDTH)
}

fn call(subject: &ModuleSubject<'_>, function: &str) -> String {
    let text = |text: &str| Code::text(literal::string(text));
    let mut arguments = vec![
        text(subject.server),
        text(subject.tool),
        Code::text("params"),
    ];
    if subject.result.is_some() {
        arguments.push(Code::text("Result"));
    }
    if subject.is_wrapped {
        arguments.push(Code::text("wrapped=True"));
    }
    let call = Code::call(function, arguments);
    match subject.result {
        Some(ResultKind::Alias) => {
            format!(
                "    {}\n    return result\n",
                call.broken(4, "result: Result = ", "")
            )
        }
        _ => format!("    {}\n", call.broken(4, "return ", "")),
    }
}
