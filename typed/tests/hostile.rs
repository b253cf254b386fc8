//! A server that means harm: whatever it calls things and says about them, the text is Python that
//! does what we wrote.
//!
//! Names, descriptions, enums, defaults, patterns and definitions are put together from pieces that
//! end strings, begin code, hide characters or mean something to Python. The tree of every file is
//! then looked at: see `python/oracle.py`.

mod oracle;

use std::cell::RefCell;

use cellblock_typed::{GenerateError, LeftOut, Note, Package, ServerName, ToolSchema, generate};
use oracle::{Oracle, files};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const PIECES: &[&str] = &[
    "\"",
    "'",
    "\"\"\"",
    "'''",
    "\\",
    "\n",
    "\r",
    "\t",
    "\0",
    "\x0c",
    "\u{2028}",
    "\u{202e}",
    "\u{200b}",
    "\u{feff}",
    "\u{e0041}",
    "#",
    "{",
    "}",
    "${HOME}",
    "(",
    ")]",
    ";",
    " ",
    "import os",
    "__import__('os').system('x')",
    "eval(\"1\")",
    "lambda: 0",
    "@",
    ":=",
    "../",
    "/etc/passwd",
    "\\N{BULLET}",
    "\\x41",
    "class",
    "None",
    "__init__",
    "Params",
    "Result",
    "Model",
    "Field",
    "str",
    "run",
    "self",
    "ﬁle",
    "ｃｌａｓｓ",
    "a",
    "B1",
    "_",
];

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::collection::vec(prop::sample::select(PIECES), 0..5)
            .prop_map(|pieces| pieces.concat()),
        prop::collection::vec(any::<char>(), 0..12)
            .prop_map(|letters| letters.into_iter().collect()),
    ]
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        text().prop_map(Value::from),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    scalar().prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(text(), inner, 0..3).prop_map(|members| json!(members)),
        ]
    })
}

/// What may stand beside a type.
fn words() -> impl Strategy<Value = Map<String, Value>> {
    let formats = &[
        "date",
        "date-time",
        "uri",
        "uuid",
        "email",
        "binary",
        "byte",
    ][..];
    let word = prop_oneof![
        text().prop_map(|text| ("description", json!(text))),
        text().prop_map(|text| ("title", json!(text))),
        text().prop_map(|text| ("pattern", json!(text))),
        text().prop_map(|text| ("format", json!(text))),
        value().prop_map(|value| ("default", value)),
        value().prop_map(|value| ("const", value)),
        prop::collection::vec(value(), 0..4).prop_map(|values| ("enum", json!(values))),
        prop::collection::vec(value(), 0..3).prop_map(|values| ("examples", json!(values))),
        value().prop_map(|value| ("minimum", value)),
        value().prop_map(|value| ("maxLength", value)),
        value().prop_map(|value| ("required", value)),
        prop::collection::vec(text(), 0..3).prop_map(|names| ("required", json!(names))),
        any::<bool>().prop_map(|value| ("deprecated", json!(value))),
        any::<bool>().prop_map(|value| ("nullable", json!(value))),
        prop::sample::select(formats).prop_map(|name| ("format", json!(name))),
    ];
    prop::collection::vec(word, 0..4).prop_map(|words| {
        words
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect()
    })
}

fn schema() -> impl Strategy<Value = Value> {
    let simple = &["string", "integer", "number", "boolean", "null"][..];
    let leaf = (words(), prop::option::of(prop::sample::select(simple)));
    let leaf = leaf.prop_map(|(mut words, kind)| {
        if let Some(kind) = kind {
            words.insert("type".to_owned(), json!(kind));
        }
        Value::Object(words)
    });
    leaf.prop_recursive(4, 24, 4, |inner| {
        let kinds = &[
            "string", "integer", "number", "boolean", "null", "array", "object", "else",
        ][..];
        let properties = prop::collection::btree_map(text(), inner.clone(), 0..4);
        let branches = prop::collection::vec(inner.clone(), 1..4);
        let structure = prop_oneof![
            properties.prop_map(|members| json!({"type": "object", "properties": members})),
            branches
                .clone()
                .prop_map(|branches| json!({"anyOf": branches})),
            branches
                .clone()
                .prop_map(|branches| json!({"oneOf": branches})),
            branches
                .clone()
                .prop_map(|branches| json!({"allOf": branches})),
            branches.prop_map(|items| json!({"type": "array", "prefixItems": items})),
            inner
                .clone()
                .prop_map(|items| json!({"type": "array", "items": items})),
            inner
                .clone()
                .prop_map(|values| json!({"type": "object", "additionalProperties": values})),
            inner.prop_map(|names| json!({"type": "object", "propertyNames": names})),
            prop::collection::vec(prop::sample::select(kinds), 0..3)
                .prop_map(|kinds| json!({"type": kinds})),
            prop::sample::select(&["#", "#/$defs/A", "#/$defs/B"][..])
                .prop_map(|name| json!({"$ref": name})),
        ];
        (words(), structure).prop_map(|(mut words, structure)| {
            words.extend(structure.as_object().cloned().unwrap_or_default());
            Value::Object(words)
        })
    })
}

fn root() -> impl Strategy<Value = Value> {
    let properties = prop::collection::btree_map(text(), schema(), 0..5);
    (properties, schema(), schema(), text()).prop_map(|(properties, first, second, name)| {
        let definitions = json!({"A": first, "B": second, name: true});
        json!({"type": "object", "properties": properties, "$defs": definitions})
    })
}

fn tool() -> impl Strategy<Value = ToolSchema> {
    let output = prop::option::of(prop_oneof![root(), schema()]);
    (
        text(),
        prop::option::of(text()),
        prop::option::of(text()),
        root(),
        output,
    )
        .prop_map(|(name, title, description, input, output)| ToolSchema {
            name,
            title,
            description,
            input,
            output,
        })
}

fn package(tools: &[ToolSchema]) -> Package {
    generate(&ServerName::new("hostile").unwrap(), tools).unwrap()
}

/// Every file is in the folder of the server, under a plain name.
fn assert_in_its_folder(package: &Package) {
    for file in &package.files {
        let name = file
            .path
            .strip_prefix("mcptools/hostile/")
            .and_then(|name| name.strip_suffix(".py"))
            .unwrap();
        let is_plain =
            |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
        assert!(
            !name.is_empty() && name.chars().all(is_plain),
            "{}",
            file.path
        );
    }
    let mut paths: Vec<&str> = package
        .files
        .iter()
        .map(|file| file.path.as_str())
        .collect();
    paths.sort_unstable();
    paths.dedup();
    assert_eq!(paths.len(), package.files.len(), "no file is written twice");
}

#[test]
fn hostile_tools_give_only_expected_code_in_expected_places() {
    let python = RefCell::new(Oracle::plain());
    let config = ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(tools in prop::collection::vec(tool(), 1..4))| {
        let package = package(&tools);
        assert_in_its_folder(&package);
        prop_assert_eq!(&package, &self::package(&tools), "the same tools give the same text");
        let problems = python.borrow_mut().ask(json!({"do": "parse", "files": files(&package)}));
        prop_assert_eq!(problems, json!([]));
    });
}

#[test]
fn hostile_tools_give_modules_that_load() {
    let Some(python) = Oracle::with_pydantic() else {
        return;
    };
    let python = RefCell::new(python);
    let config = ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(tools in prop::collection::vec(tool(), 1..3))| {
        let files = files(&package(&tools));
        let problems = python.borrow_mut().ask(json!({"do": "load", "files": files}));
        prop_assert_eq!(problems, json!([]));
    });
}

#[test]
fn code_that_is_not_ours_would_be_noticed() {
    let mut python = Oracle::plain();
    let ours = "\"\"\"Page.\"\"\"\n\nfrom cellblock_runner.mcptools import Model\n\n\nclass \
                A(Model):\n    x: int = 1\n";
    let mut ask = |text: &str| python.ask(json!({"do": "parse", "files": {"x.py": text}}));
    assert_eq!(ask(ours), json!([])); // Control.
    for theirs in [
        "import os\n",
        "__import__('os')\n",
        "x = eval('1')\n",
        "class B(Model):\n    open('x')\n",
        "def run(x=open): ...\n",
        "while True: pass\n",
        "x = A.__subclasses__()\n",
        "x = [y for y in ()]\n",
        "# \u{202e}\n",
        "größe = 1\n",
    ] {
        assert_ne!(ask(&format!("{ours}\n{theirs}")), json!([]), "{theirs}");
    }
}

fn tool_with(name: &str, input: Value) -> ToolSchema {
    ToolSchema {
        name: name.to_owned(),
        title: None,
        description: None,
        input,
        output: None,
    }
}

#[test]
fn a_tool_that_cannot_be_made_is_left_out_and_the_others_stay() {
    let remote = json!({"type": "object", "properties": {"x": {"$ref": "https://example.com/x"}}});
    let long = "x".repeat(300);
    let tools = [
        tool_with("good", json!({})),
        tool_with("remote", remote.clone()),
        tool_with("good", json!({})),
        tool_with(&long, json!({})),
        ToolSchema {
            output: Some(remote),
            ..tool_with("untyped", json!({}))
        },
    ];
    let package = package(&tools);
    let made: Vec<&str> = package
        .tools
        .iter()
        .map(|tool| tool.original.as_str())
        .collect();
    assert_eq!(made, ["good", "untyped"]);
    let left_out = |name: &str| {
        package.notes.iter().find_map(|note| match note {
            Note::LeftOut { tool, why } if tool == name => Some(why.clone()),
            _ => None,
        })
    };
    assert!(matches!(left_out("remote"), Some(LeftOut::Schema(_))));
    assert_eq!(left_out("good"), Some(LeftOut::Repeated));
    assert_eq!(left_out(&long), Some(LeftOut::LongName { length: 300 }));
    assert!(
        package
            .notes
            .iter()
            .any(|note| matches!(note, Note::Untyped { tool, .. } if tool == "untyped"))
    );
    assert_eq!(package.notes.len(), 4);
}

#[test]
fn the_number_of_tools_and_their_size_have_limits() {
    let server = ServerName::new("s").unwrap();
    let many: Vec<ToolSchema> = (0..1001)
        .map(|number| tool_with(&number.to_string(), json!({})))
        .collect();
    assert_eq!(
        generate(&server, &many),
        Err(GenerateError::TooManyTools { count: 1001 })
    );
    assert_eq!(generate(&server, &many[..20]).unwrap().tools.len(), 20); // Control.
    let large = tool_with("x", json!({"description": "x".repeat(17 * 1024 * 1024)}));
    assert!(matches!(
        generate(&server, &[large]),
        Err(GenerateError::TooLarge { .. })
    ));
}

#[test]
fn a_long_description_is_cut() {
    let tool = ToolSchema {
        description: Some("word ".repeat(100_000)),
        ..tool_with("t", json!({}))
    };
    let text = &package(&[tool]).files[1].text;
    assert!(text.len() < 20_000 && text.contains('…'), "{}", text.len());
}
