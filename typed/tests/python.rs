//! Generated packages as Python sees them.
//!
//! `rows.json` holds a case for every row of the mapping from schemas to types: what a tool takes
//! and refuses, what it sends, what it returns. Each is run with Pydantic and the runner's own
//! code. `snapshots` holds tools and the text of their modules; UPDATE_SNAPSHOTS=1 writes it anew.
//! `real` holds what twelve servers from npm and PyPI list.

mod oracle;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use cellblock_typed::{Package, ServerName, ToolSchema, generate, index};
use oracle::{Oracle, files};
use serde_json::{Value, json};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(name)
}

fn read(path: &Path) -> Value {
    let text =
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A tool as servers list it.
fn listed(tool: &Value) -> ToolSchema {
    let text = |key: &str| tool.get(key).and_then(Value::as_str).map(str::to_owned);
    ToolSchema {
        name: text("name").expect("a tool has a name"),
        title: text("title"),
        description: text("description"),
        input: tool["inputSchema"].clone(),
        output: tool.get("outputSchema").cloned(),
    }
}

fn package(server: &str, tools: &[ToolSchema]) -> Package {
    generate(&ServerName::new(server).unwrap(), tools).unwrap()
}

/// The servers whose lists are kept, by name.
fn real_servers() -> Vec<(String, Vec<ToolSchema>)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder("real"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let server = |path: &PathBuf| {
        let tools = read(path).as_array().unwrap().iter().map(listed).collect();
        (
            path.file_stem().unwrap().to_string_lossy().into_owned(),
            tools,
        )
    };
    paths.iter().map(server).collect()
}

#[test]
fn every_row_of_the_mapping_does_what_it_says() {
    let Some(mut python) = Oracle::with_pydantic() else {
        return;
    };
    let rows = read(&folder("rows.json"));
    let rows = rows.as_array().unwrap();
    let tool = |(number, row): (usize, &Value)| ToolSchema {
        name: format!("row-{number}"),
        title: None,
        description: Some(row["row"].as_str().unwrap().to_owned()),
        input: row["input"].clone(),
        output: row.get("output").cloned(),
    };
    let tools: Vec<ToolSchema> = rows.iter().enumerate().map(tool).collect();
    let package = package("rows", &tools);
    assert_eq!(package.notes, []);
    let files = files(&package);
    assert_eq!(
        python.ask(json!({"do": "parse", "files": files})),
        json!([])
    );
    assert_eq!(python.ask(json!({"do": "load", "files": files})), json!([]));
    for (number, row) in rows.iter().enumerate() {
        let module = format!("mcptools.rows.row_{number}");
        let tool = format!("row-{number}");
        let request =
            json!({"do": "row", "files": files, "module": module, "tool": tool, "row": row});
        assert_eq!(python.ask(request), json!([]), "{}", row["row"]);
    }
}

#[test]
fn a_row_that_is_wrong_is_noticed() {
    let Some(mut python) = Oracle::with_pydantic() else {
        return;
    };
    let input = json!({"type": "object", "properties": {"a-b": {"type": "integer"}}});
    let tool = ToolSchema {
        name: "row-0".to_owned(),
        title: None,
        description: None,
        input,
        output: None,
    };
    let files = files(&package("rows", &[tool]));
    let mut check = |row: Value| {
        let module = "mcptools.rows.row_0";
        python.ask(json!({
            "do": "row", "files": files, "module": module, "tool": "row-0", "row": row
        }))
    };
    let right =
        json!({"accepts": [{"set": {"a_b": 1}, "sends": {"a-b": 1}}], "refuses": [{"a_b": "x"}]});
    assert_eq!(check(right), json!([])); // Control.
    for wrong in [
        json!({"accepts": [{"set": {"a_b": 1}, "sends": {"a_b": 1}}], "refuses": []}),
        json!({"accepts": [{"set": {"a_b": "x"}, "sends": {"a-b": "x"}}], "refuses": []}),
        json!({"accepts": [], "refuses": [{"a_b": 1}]}),
        json!({"accepts": [], "refuses": [], "classes": ["Missing"]}),
    ] {
        assert_eq!(
            check(wrong.clone()).as_array().map(Vec::len),
            Some(1),
            "{wrong}"
        );
    }
}

#[test]
fn every_tool_of_real_servers_has_a_module_that_loads() {
    let Some(mut python) = Oracle::with_pydantic() else {
        return;
    };
    let mut count = 0;
    for (server, tools) in real_servers() {
        let package = package(&server, &tools);
        assert_eq!(
            (package.tools.len(), &package.notes[..]),
            (tools.len(), &[][..]),
            "{server}"
        );
        let files = files(&package);
        assert_eq!(
            python.ask(json!({"do": "parse", "files": files})),
            json!([]),
            "{server}"
        );
        assert_eq!(
            python.ask(json!({"do": "load", "files": files})),
            json!([]),
            "{server}"
        );
        count += tools.len();
    }
    assert!(count > 100, "the lists were read");
}

#[test]
fn type_checkers_find_nothing_in_modules_of_real_servers() {
    let Some(python) = oracle::python_with("mypy") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let packages: Vec<Package> = real_servers()
        .iter()
        .map(|(server, tools)| package(server, tools))
        .collect();
    let index = index(&packages.iter().collect::<Vec<_>>());
    for file in packages
        .iter()
        .flat_map(|package| &package.files)
        .chain([&index])
    {
        let path = folder.path().join(&file.path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &file.text).unwrap();
    }
    let checked = |extra: &str| {
        fs::write(folder.path().join("user.py"), extra).unwrap();
        let mut command = std::process::Command::new(&python);
        command.args([
            "-m",
            "mypy",
            "--strict",
            "--no-incremental",
            "--follow-imports=silent",
            "-p",
            "mcptools",
            "-m",
            "user",
        ]);
        let paths = std::env::join_paths([folder.path(), &oracle::runner()]).unwrap();
        let output = command
            .env("MYPYPATH", paths)
            .current_dir(folder.path())
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let right = "from mcptools.memory import create_relations as tool\n\n\
                 tool.run(tool.Params(relations=[tool.RelationsItem(from_=\"a\", to=\"b\", \
                 relationType=\"c\")]))\n";
    assert!(checked(right).starts_with("Success"), "{}", checked(right));
    let wrong = "from mcptools.memory.search_nodes import Params, run\n\nrun(Params(query=1))\n";
    assert!(
        checked(wrong).contains("user.py:3: error"),
        "{}",
        checked(wrong)
    ); // Control.
}

#[test]
fn modules_are_the_text_that_was_reviewed() {
    let mut python = Oracle::plain();
    let mut paths: Vec<PathBuf> = fs::read_dir(folder("snapshots"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "json")
    });
    paths.sort();
    assert!(paths.len() >= 4, "the snapshots were found");
    for path in paths {
        let tools: Vec<ToolSchema> = read(&path).as_array().unwrap().iter().map(listed).collect();
        let package = package("example", &tools);
        assert_eq!(
            python.ask(json!({"do": "parse", "files": files(&package)})),
            json!([]),
            "{}",
            path.display()
        );
        let made =
            |file: &cellblock_typed::GeneratedFile| format!("# {}\n{}", file.path, file.text);
        let text = package
            .files
            .iter()
            .chain([&index(&[&package])])
            .map(made)
            .collect::<Vec<_>>()
            .join("\n\n");
        let expected = path.with_extension("txt");
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            fs::write(&expected, &text).unwrap();
        }
        let reviewed = fs::read_to_string(&expected).unwrap_or_default();
        assert!(
            text == reviewed,
            "{} is not what is generated now:\n{text}",
            expected.display()
        );
    }
}

#[test]
fn names_that_python_and_pydantic_use_are_not_given_away() {
    let Some(mut python) = Oracle::with_pydantic() else {
        return;
    };
    let facts = python.ask(json!({"do": "facts"}));
    let names = |key: &str| -> BTreeSet<String> {
        facts[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap().to_owned())
            .collect()
    };
    let properties: serde_json::Map<String, Value> = names("model")
        .union(&names("keywords"))
        .map(|name| (name.clone(), json!({"type": "string"})))
        .collect();
    let definitions: serde_json::Map<String, Value> = names("builtins")
        .into_iter()
        .map(|name| {
            (
                name,
                json!({"type": "object", "properties": {"x": {"type": "integer"}}}),
            )
        })
        .collect();
    let uses: Vec<Value> = definitions
        .keys()
        .map(|name| json!({"$ref": format!("#/$defs/{name}")}))
        .collect();
    let mut properties = properties;
    properties.insert("all_of_them".to_owned(), json!({"anyOf": uses}));
    let input = json!({"type": "object", "properties": properties, "$defs": definitions});
    let tool = ToolSchema {
        name: "t".to_owned(),
        title: None,
        description: None,
        input,
        output: None,
    };
    let package = package("s", &[tool]);
    let files = files(&package);
    assert_eq!(python.ask(json!({"do": "load", "files": files})), json!([]));
    let text = &package.files[1].text;
    for name in names("model").union(&names("keywords")) {
        assert!(
            !text.contains(&format!("\n    {name}:")),
            "{name} is a field"
        );
    }
    for name in names("builtins") {
        assert!(
            !text.contains(&format!("class {name}(")),
            "{name} is a class"
        );
    }
}
