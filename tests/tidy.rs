//! Rules about the tree that no compiler checks.
//!
//! The tree is what a commit would hold: everything that git does not ignore. Each rule names the
//! files that break it. Patterns that must not occur anywhere are put together from pieces, so that
//! this file does not break its own rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::support::server::{finished, program};

struct Source {
    /// Relative to the root of the project.
    path: String,
    text: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every text file of the project.
fn tree() -> Vec<Source> {
    let mut sources = Vec::new();
    let mut folders = vec![root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let relative = path
                .strip_prefix(root())
                .unwrap()
                .to_string_lossy()
                .into_owned();
            let is_made = matches!(
                name.as_str(),
                ".git" | "target" | "__pycache__" | "proptest-regressions"
            ) || matches!(relative.as_str(), "fuzz/corpus" | "fuzz/artifacts");
            if is_made {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                sources.push(Source {
                    path: relative,
                    text,
                });
            }
        }
    }
    assert!(sources.len() > 50, "the walk found the project");
    sources
}

fn rust() -> impl Iterator<Item = Source> {
    tree()
        .into_iter()
        .filter(|source| source.path.ends_with(".rs"))
}

/// Lists the lines for which `breaks` is true.
fn offences(
    sources: impl Iterator<Item = Source>,
    breaks: impl Fn(&str, &str) -> bool,
) -> Vec<String> {
    let lines = |source: &Source| {
        let numbered = source
            .text
            .lines()
            .enumerate()
            .filter(|(_, line)| breaks(&source.path, line));
        numbered
            .map(|(number, line)| format!("{}:{}: {}", source.path, number + 1, line.trim()))
            .collect::<Vec<_>>()
    };
    sources.flat_map(|source| lines(&source)).collect()
}

#[track_caller]
fn assert_none(offences: Vec<String>, rule: &str) {
    assert!(offences.is_empty(), "{rule}\n{}", offences.join("\n"));
}

/// The part of a line that is code: a rule about words of the language does not mean prose.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or(line)
}

#[test]
fn unsafe_code_is_in_one_file() {
    let found = offences(rust(), |path, line| {
        let keyword = ["un", "safe "].concat();
        let block = ["un", "safe{"].concat();
        path != "jail/src/sys.rs"
            && !path.starts_with("tests/")
            && (code(line).contains(&keyword) || code(line).contains(&block))
    });
    assert_none(found, "unsafe code belongs into jail/src/sys.rs");
    let forbid = "#![forbid(unsafe_code)]";
    for entry in [
        "src/lib.rs",
        "src/main.rs",
        "json/src/lib.rs",
        "typed/src/lib.rs",
    ] {
        assert!(
            fs::read_to_string(root().join(entry))
                .unwrap()
                .contains(forbid),
            "{entry} must say {forbid}"
        );
    }
    let sys = fs::read_to_string(root().join("jail/src/sys.rs")).unwrap();
    assert!(sys.contains("unsafe"), "the rule looks at the right file"); // control
}

#[test]
fn test_support_depends_on_debug_assertions() {
    let feature = ["feature = ", "\"test-support\""].concat();
    let mut uses = 0;
    for source in rust() {
        for line in source.text.lines().filter(|line| line.contains(&feature)) {
            uses += 1;
            let both = format!("all({feature}, debug_assertions)");
            assert!(line.contains(&both), "{}: {line}", source.path);
        }
    }
    assert!(uses > 2, "the rule looks at the right files"); // control
}

#[test]
fn every_file_has_a_front_page() {
    let without = rust()
        .filter(|source| !source.text.starts_with("//!"))
        .map(|source| source.path)
        .collect::<Vec<_>>();
    assert_none(without, "a file begins with what it is for (//!)");
    let python = tree()
        .into_iter()
        .filter(|source| source.path.ends_with(".py") && !source.text.trim().is_empty());
    let without = python
        .filter(|source| !source.text.starts_with("\"\"\""))
        .map(|source| source.path)
        .collect::<Vec<_>>();
    assert_none(without, "a Python file begins with what it is for");
}

#[test]
fn nothing_is_left_undone_or_switched_off() {
    let pieces = [
        ("TO", "DO"),
        ("FIX", "ME"),
        ("todo", "!("),
        ("unimplemented", "!("),
        ("#[ig", "nore"),
        ("dbg", "!("),
    ];
    let words = pieces.map(|(start, end)| [start, end].concat());
    let sources = tree()
        .into_iter()
        .filter(|source| source.path.ends_with(".rs") || source.path.ends_with(".py"));
    let found = offences(sources, |_, line| {
        words.iter().any(|word| line.contains(word.as_str()))
    });
    assert_none(found, "unfinished work and ignored tests are not committed");
}

#[test]
fn no_module_is_a_drawer_for_everything() {
    let drawers = [
        "utils", "util", "helpers", "helper", "common", "misc", "types",
    ];
    let found = rust().map(|source| source.path).filter(|path| {
        let stem = Path::new(path)
            .file_stem()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        let folder = Path::new(path)
            .parent()
            .and_then(Path::file_name)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        drawers.contains(&stem.as_str()) || drawers.contains(&folder.as_str())
    });
    assert_none(found.collect(), "find the room that owns it");
}

/// The sources of the program without their tests.
fn program_sources() -> impl Iterator<Item = Source> {
    let is_program = |source: &Source| {
        let folder = source.path.split("src/").next().unwrap_or_default();
        let is_ours = ["", "egress/", "jail/", "json/", "typed/", "upstream/"].contains(&folder);
        is_ours
            && !["/tests.rs", "/fixtures.rs"]
                .iter()
                .any(|end| source.path.ends_with(end))
    };
    rust().filter(is_program).map(|source| {
        // What follows the tests' heading runs in no server.
        let text = source
            .text
            .split("#[cfg(test)]\nmod ")
            .next()
            .unwrap_or_default()
            .to_owned();
        Source { text, ..source }
    })
}

#[test]
fn every_channel_of_the_server_is_bounded() {
    let unbounded = [
        ["unbounded", "_channel"].concat(),
        ["Unbounded", "Sender"].concat(),
        ["mpsc::channel", "()"].concat(),
    ];
    let sources = program_sources().filter(|source| source.path.starts_with("src/"));
    let found = offences(sources, |_, line| {
        unbounded
            .iter()
            .any(|word| code(line).contains(word.as_str()))
    });
    assert_none(
        found,
        "a channel has a bound, so that a slow reader slows its writer",
    );
}

#[test]
fn nothing_panics_because_its_output_is_closed() {
    let prints = [["print", "ln!("].concat(), ["print", "!("].concat()];
    let found = offences(program_sources(), |_, line| {
        prints.iter().any(|word| code(line).contains(word.as_str()))
    });
    assert_none(
        found,
        "these macros panic when the reader is gone; see src/app/output.rs",
    );
    assert!(
        program_sources().count() > 100,
        "the rule looks at the program"
    ); // control
}

#[test]
fn rooms_depend_on_each_other_in_one_direction() {
    // Each row: the room, and the rooms it must not name.
    let walls: &[(&str, &[&str])] = &[
        (
            "src/audit/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::sandbox",
                "crate::config",
                "crate::auth",
            ],
        ),
        (
            "src/telemetry/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::sandbox",
                "crate::config",
                "crate::auth",
            ],
        ),
        (
            "src/ops/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::daemon",
                "crate::http",
                "crate::packages",
                "crate::config",
            ],
        ),
        (
            "src/session/",
            &[
                "crate::mcp",
                "crate::daemon",
                "crate::http",
                "crate::app::",
                "crate::packages",
                "crate::sandbox::native",
            ],
        ),
        (
            "src/sandbox/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::packages",
            ],
        ),
        (
            "src/runner_client/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::sandbox",
            ],
        ),
        (
            "src/packages/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::sandbox",
                "crate::environment",
            ],
        ),
        (
            "src/environment/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::packages",
            ],
        ),
        (
            "src/image/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::session",
                "crate::packages",
                "crate::config",
                "crate::sandbox::native",
            ],
        ),
        (
            "src/config/",
            &["crate::mcp", "crate::app::", "crate::session"],
        ),
        (
            "src/mcp/",
            &[
                "crate::http",
                "crate::daemon",
                "crate::app::",
                "crate::packages",
                "crate::sandbox::native",
                "cellblock_jail",
            ],
        ),
        (
            "src/daemon/",
            &[
                "crate::mcp",
                "crate::app::",
                "crate::packages",
                "crate::config",
                "crate::sandbox::native",
            ],
        ),
        ("egress/", &["cellblock::", "cellblock_jail"]),
        ("jail/", &["cellblock::", "cellblock_egress", "tokio"]),
        (
            "json/",
            &[
                "cellblock::",
                "cellblock_egress",
                "cellblock_jail",
                "std::fs",
                "std::net",
            ],
        ),
        (
            "typed/src/",
            &[
                "cellblock::",
                "cellblock_egress",
                "cellblock_jail",
                "tokio",
                "std::fs",
                "std::net",
            ],
        ),
    ];
    let found = offences(rust(), |path, line| {
        walls.iter().any(|(room, others)| {
            path.starts_with(room) && others.iter().any(|other| code(line).contains(other))
        })
    });
    assert_none(found, "dependencies point one way");
    let outside = offences(rust(), |path, line| {
        path.starts_with("src/") && !path.starts_with("src/mcp/") && code(line).contains("rmcp::")
    });
    assert_none(outside, "only the room mcp knows the MCP library");
}

/// Returns the name of a type that other files can use and that this line defines.
fn type_defined_in(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let (kind, rest) = rest.trim_start().split_once(' ')?;
    let is_type = matches!(kind, "struct" | "enum" | "trait" | "type");
    let end = rest
        .find(|c: char| !c.is_alphanumeric())
        .unwrap_or(rest.len());
    is_type.then_some(&rest[..end])
}

#[test]
fn no_type_has_the_name_of_another() {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in program_sources().filter(|source| !source.path.contains("/tests/")) {
        for name in source.text.lines().filter_map(type_defined_in) {
            let files = places.entry(name.to_owned()).or_default();
            files.insert(source.path.clone());
        }
    }
    assert!(places.len() > 500, "the rule finds types: {}", places.len()); // control
    let twice = places
        .into_iter()
        .filter(|(_, paths)| paths.len() > 1)
        .map(|(name, paths)| format!("{name}: {paths:?}"));
    assert_none(
        twice.collect(),
        "a type that other files can use has a name of its own",
    );
    assert_eq!(type_defined_in("pub(super) enum Kind {"), Some("Kind"));
    assert_eq!(type_defined_in("struct Private;"), None);
}

#[test]
fn no_dependency_is_older_than_its_last_security_fix() {
    /// Name, lowest version, why.
    const LOWEST: [(&str, [u64; 3], &str); 7] = [
        ("rmcp", [3, 8, 0], "several advisories below 3.7"),
        ("tracing-subscriber", [0, 3, 20], "escape codes in logs"),
        ("h2", [0, 4, 16], "empty frames queued without limit"),
        (
            "jsonwebtoken",
            [10, 3, 0],
            "a claim of the wrong type counted as absent",
        ),
        ("idna", [1, 0, 0], "two spellings of one name"),
        ("tokio", [1, 44, 2], "unsound broadcast channel"),
        ("crossbeam-channel", [0, 5, 15], "double free"),
    ];
    const BANNED: [(&str, &str); 3] = [
        ("tar", "no archive is unpacked by the server"),
        ("tokio-tar", "no archive is unpacked by the server"),
        ("openssl-sys", "one TLS library, and it is not this one"),
    ];
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package
                .lines()
                .find_map(|line| line.strip_prefix(&format!("{name} = \"")));
            line.map(|value| value.trim_end_matches('"'))
                .unwrap_or_default()
        };
        versions
            .entry(field("name"))
            .or_default()
            .push(field("version"));
        let source = field("source");
        assert!(
            source.is_empty() || source.starts_with("registry+"),
            "{} comes from {source}",
            field("name")
        );
    }
    assert!(versions.contains_key("rmcp"), "the lock file was read"); // control
    for (name, lowest, why) in LOWEST {
        for version in versions.get(name).into_iter().flatten() {
            let numbers: Vec<u64> = version
                .split(['.', '-', '+'])
                .map_while(|part| part.parse().ok())
                .take(3)
                .collect();
            assert!(
                numbers.as_slice() >= lowest.as_slice(),
                "{name} {version} is below {lowest:?}: {why}"
            );
        }
    }
    for (name, why) in BANNED {
        assert!(!versions.contains_key(name), "{name} is banned: {why}");
    }
}

#[test]
fn every_allowed_system_call_has_a_reason() {
    let text = fs::read_to_string(root().join("jail/src/seccomp.json")).unwrap();
    let lists: Value = serde_json::from_str(&text).unwrap();
    let mut rules = 0;
    let mut stack = vec![&lists];
    while let Some(value) = stack.pop() {
        match value {
            Value::Object(map) if map.contains_key("syscall") => {
                rules += 1;
                let reason = map
                    .get("comment")
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                assert!(reason.len() > 4, "{value} has no reason");
            }
            Value::Object(map) => stack.extend(map.values()),
            Value::Array(items) => stack.extend(items),
            _ => {}
        }
    }
    assert!(rules > 100, "{rules} rules were found");
}

#[test]
fn the_program_carries_every_file_of_the_runner() {
    let list = fs::read_to_string(root().join("src/environment/runner_files.rs")).unwrap();
    let mut files = 0;
    for entry in fs::read_dir(root().join("runner/cellblock_runner")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name == "__pycache__" {
            continue;
        }
        files += 1;
        assert!(
            list.contains(&format!("\"{name}\"")),
            "{name} is not embedded in src/environment/runner_files.rs"
        );
    }
    assert!(files > 5);
}

#[test]
fn tests_that_documents_name_exist() {
    let code: String = rust().map(|source| source.text).collect();
    let list = fs::read_to_string(root().join("docs/migrate/checklist.md")).unwrap();
    // Names of tests are sentences; what else stands between back quotes is shorter or has other
    // letters.
    let is_test = |word: &&str| {
        word.matches('_').count() >= 3
            && word
                .chars()
                .all(|letter| letter == '_' || letter.is_ascii_alphanumeric())
    };
    let named: Vec<&str> = list.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 75, "the list names tests");
    let missing: Vec<&&str> = named
        .iter()
        .filter(|name| !code.contains(&format!("fn {name}(")))
        .collect();
    assert!(missing.is_empty(), "there are no tests called {missing:?}");
}

/// Rows of `docs/migrate/statements.md`: document, statement, verdict, tests.
fn statements() -> Vec<[String; 4]> {
    let text = fs::read_to_string(root().join("docs/migrate/statements.md")).unwrap();
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| line "));
    let cells = |row: &str| {
        let row = row.trim_matches('|').replace("\\|", "¦");
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().to_owned()).collect();
        cells
            .try_into()
            .unwrap_or_else(|cells| panic!("a row has four cells: {cells:?}"))
    };
    rows.map(cells).collect()
}

#[test]
fn every_statement_of_the_five_documents_has_a_verdict_and_a_test() {
    let code: String = rust().map(|source| source.text).collect();
    let rows = statements();
    assert_eq!(rows.len(), 155, "each statement has one row");
    for [_, statement, verdict, tests] in &rows {
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        match verdict.as_str() {
            "works" => assert!(!named.is_empty(), "{statement}: no test shows it"),
            other => {
                let replacement = other
                    .strip_prefix("differs: ")
                    .unwrap_or_else(|| panic!("{statement}: {other}"));
                assert!(
                    replacement.len() > 10 && !named.is_empty(),
                    "{statement}: {other}"
                );
            }
        }
        for name in named {
            assert!(
                code.contains(&format!("fn {name}(")),
                "{statement}: there is no test called {name}"
            );
        }
    }
}

#[test]
fn commands_in_documents_exist() {
    let documents = tree()
        .into_iter()
        .filter(|source| source.path.ends_with(".md"));
    let mut checked = 0;
    for document in documents {
        let mut fenced = false;
        for line in document.text.lines() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
                continue;
            }
            let Some(command) = command_in(line).filter(|_| fenced) else {
                continue;
            };
            let mut words = command
                .split_whitespace()
                .take_while(|word| word.chars().all(|letter| letter.is_ascii_lowercase()));
            let mut path: Vec<&str> = words.by_ref().take(1).collect();
            if matches!(
                path[..],
                ["env"] | ["audit"] | ["config"] | ["image"] | ["key"] | ["daemon"] | ["packages"]
            ) {
                path.extend(words.by_ref().take(1));
            }
            let (status, help, errors) = finished(program().args(&path).arg("--help"));
            assert_eq!(status, Some(0), "{}: {line}: {errors}", document.path);
            let flags = command
                .split_whitespace()
                .take_while(|word| !matches!(*word, "|" | ">" | "&&" | "#"));
            for flag in flags.filter(|word| word.starts_with("--") && word.len() > 2) {
                let name = flag.split('=').next().unwrap_or(flag);
                assert!(
                    help.contains(name),
                    "{}: {line}: there is no flag {name}",
                    document.path
                );
            }
            checked += 1;
        }
    }
    if root().join("README.md").exists() {
        assert!(checked > 0, "the documents show commands");
    }
}

/// What follows the program's name when a line calls it.
fn command_in(line: &str) -> Option<&str> {
    let line = line.trim().trim_start_matches("$ ");
    let built = ["cargo run --release -- ", "cargo run -- ", "cellblock "];
    built.iter().find_map(|start| line.strip_prefix(start))
}

#[test]
fn links_between_documents_lead_somewhere() {
    let documents = tree()
        .into_iter()
        .filter(|source| source.path.ends_with(".md"));
    let mut broken = Vec::new();
    for document in documents {
        let folder = root().join(&document.path).parent().unwrap().to_owned();
        for piece in document.text.split("](").skip(1) {
            let target = piece.split([')', '#', ' ']).next().unwrap_or_default();
            if !target.is_empty()
                && !target.contains("://")
                && !target.starts_with("mailto:")
                && !folder.join(target).exists()
            {
                broken.push(format!("{}: {target}", document.path));
            }
        }
    }
    assert_none(broken, "a link to a file that does not exist");
}

/// Columns of a line of text or code, so that two files fit side by side.
const MAX_COLUMNS: usize = 100;

/// Finds where a raw string begins in a line: behind its `r`, or behind `r#"`.
fn raw_string_in(line: &str) -> Option<usize> {
    let is_word = |character: char| character.is_alphanumeric() || character == '_';
    let begins = |open: &str| {
        let mut places = line.match_indices(open);
        let place = places.find(|(at, _)| !line[..*at].ends_with(is_word))?;
        Some(place.0 + open.len())
    };
    begins("r#\"")
        .or_else(|| begins("r##\""))
        .or_else(|| Some(begins("r\"")? - 1))
}

#[test]
fn rust_is_wrapped() {
    let mut wide = Vec::new();
    for source in rust() {
        let mut is_raw = false;
        for (number, line) in source.text.lines().enumerate() {
            // Text of other languages in raw strings keeps its lines.
            let opens = raw_string_in(line);
            let was_raw = is_raw || opens.is_some();
            let rest = opens.map_or(line, |at| &line[at..]);
            let is_short = opens.is_some() && rest.starts_with('"');
            is_raw = was_raw && !is_short && !rest.contains("\"#");
            if !was_raw && line.chars().count() > MAX_COLUMNS {
                wide.push(format!("{}:{}", source.path, number + 1));
            }
        }
    }
    assert_none(wide, "code and comments have at most 100 columns");
}

#[test]
fn python_of_the_runner_is_wrapped() {
    let mut checked = 0;
    let mut wide = Vec::new();
    for source in tree() {
        if !source.path.starts_with("runner/") || !source.path.ends_with(".py") {
            continue;
        }
        checked += 1;
        for (number, line) in source.text.lines().enumerate() {
            if line.chars().count() > MAX_COLUMNS {
                wide.push(format!("{}:{}", source.path, number + 1));
            }
        }
    }
    assert!(checked > 50, "the rule looks at the runner"); // control
    assert_none(wide, "Python has at most 100 columns");
}

#[test]
fn markdown_is_wrapped() {
    let mut wide = Vec::new();
    for source in tree() {
        if !source.path.ends_with(".md") {
            continue;
        }
        let mut is_code = false;
        for (number, line) in source.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                is_code = !is_code;
            }
            // Tables, code and links cannot be broken.
            let is_fixed =
                is_code || line.starts_with("    ") || line.starts_with('|') || line.contains("](");
            if !is_fixed && line.chars().count() > MAX_COLUMNS {
                wide.push(format!("{}:{}", source.path, number + 1));
            }
        }
    }
    assert_none(wide, "text has at most 100 columns");
}

#[test]
fn paths_in_the_map_exist() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let table = map.split("## Where to change what").nth(1).unwrap();
    let rows = table.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut named = 0;
    let mut missing = Vec::new();
    for row in rows {
        // A name without a folder is in the folder of the path before it.
        let mut folder = root().to_owned();
        for word in row.split('`').skip(1).step_by(2) {
            let is_path = word.contains('/')
                || [".rs", ".py", ".json"]
                    .iter()
                    .any(|end| word.ends_with(end));
            if !is_path {
                continue;
            }
            named += 1;
            let places = [
                root().join(word),
                folder.join(word),
                root().join("src").join(word),
            ];
            let inside = root().join("runner/cellblock_runner").join(word);
            match places
                .into_iter()
                .chain([inside])
                .find(|path| path.exists())
            {
                Some(path) if path.is_dir() => folder = path,
                Some(path) => folder = path.parent().unwrap().to_owned(),
                None => missing.push(format!("{word} in: {row}")),
            }
        }
    }
    assert!(named > 50, "the table was found");
    assert_none(missing, "ARCHITECTURE.md names what is there");
}

#[test]
fn no_file_names_the_machine_it_was_written_on() {
    let patterns = [
        ["/wo", "rk/main"].concat(),
        ["/wo", "rk/shared"].concat(),
        ["/ro", "ot/."].concat(),
        ["/ho", "me/user"].concat(),
        ["/tmp/", "uvb"].concat(),
        ["/tmp/", "cbdata"].concat(),
        ["index.cra", "tes.io"].concat(),
        ["files.python", "hosted.org"].concat(),
        ["pypi.", "org/simple"].concat(),
        ["artifact", "ory"].concat(),
    ];
    let sources = tree()
        .into_iter()
        .filter(|source| !source.path.ends_with("Cargo.lock"));
    let found = offences(sources, |_, line| {
        patterns
            .iter()
            .any(|pattern| line.contains(pattern.as_str()))
    });
    assert_none(found, "a path or host of the machine this was written on");
}

#[test]
fn files_end_with_a_line_break_and_scripts_can_be_run() {
    use std::os::unix::fs::PermissionsExt;
    let ragged = tree().into_iter().filter(|source| {
        let is_text = [".rs", ".py", ".md", ".toml", ".yaml", ".json"]
            .iter()
            .any(|end| source.path.ends_with(end));
        is_text && !source.text.is_empty() && !source.text.ends_with('\n')
    });
    assert_none(
        ragged.map(|source| source.path).collect(),
        "a text file ends with a line break",
    );
    for source in tree()
        .into_iter()
        .filter(|source| source.text.starts_with("#!"))
    {
        let mode = fs::metadata(root().join(&source.path))
            .unwrap()
            .permissions()
            .mode();
        let is_script = !source.text.starts_with("#![");
        assert!(
            !is_script || mode & 0o111 != 0,
            "{} cannot be run",
            source.path
        );
    }
}

#[test]
fn the_python_compiles_for_the_oldest_version_we_support() {
    let python = crate::support::native::host_python("minimal");
    let files: Vec<PathBuf> = tree()
        .into_iter()
        .filter(|source| source.path.starts_with("runner/") && source.path.ends_with(".py"))
        .map(|source| root().join(source.path))
        .collect();
    let check = "import ast, sys\nfor name in sys.argv[1:]: ast.parse(open(name, \
                 encoding='utf-8').read(), name, feature_version=(3, 10))";
    let (status, _, errors) = finished(Command::new(python).args(["-I", "-c", check]).args(files));
    assert_eq!(status, Some(0), "{errors}");
}
