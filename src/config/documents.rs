//! The tables of settings in documents: generated, and compared with those in the documents.
//!
//! A table is enclosed by two lines, `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
//! `UPDATE_DOCS=1 cargo test --lib config::documents` rewrites the tables.

use std::path::Path;

use super::table::{Commands, DefaultValue, Key, Setting, TakesEffect, Values};

#[test]
fn the_configuration_document_has_the_table_of_settings() {
    check("docs/configuration.md", "settings", &settings_table());
}

#[test]
fn the_readme_has_the_tables_of_flags() {
    let shared = [Commands::Sandboxes, Commands::Servers, Commands::All];
    // The only flag of servers that is not a setting.
    let config = "| `--config FILE` | Configuration file | see \
                  [configuration](docs/configuration.md) |\n";
    let mcp = flags_table(&shared) + config;
    check("README.md", "flags of mcp", &mcp);
    let serve = flags_table(&[Commands::Service]);
    check("README.md", "flags of serve", &serve);
}

/// Compares a table with the one in a document, or updates it there.
fn check(document: &str, name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
    let text = std::fs::read_to_string(&path).unwrap();
    let marks = (
        format!("<!-- begin: {name} -->\n"),
        format!("<!-- end: {name} -->"),
    );
    let (before, rest) = text.split_once(&marks.0).expect("the table begins");
    let (written, after) = rest.split_once(&marks.1).expect("the table ends");
    // A blank line, because Markdown treats a line directly after a comment as part of it.
    let table = format!("\n{table}\n");
    if written != table && std::env::var_os("UPDATE_DOCS").is_some() {
        let whole = [before, &marks.0, &table, &marks.1, after].concat();
        return std::fs::write(&path, whole).unwrap();
    }
    assert!(
        written == table,
        "{document} differs from the rows; UPDATE_DOCS=1 cargo test --lib config::documents"
    );
}

fn settings_table() -> String {
    let mut table =
        "| key | flag | default | meaning and allowed values | a change holds after |\n\
                     |---|---|---|---|---|\n"
            .to_owned();
    for row in Key::all().map(Key::row) {
        let flag = match (&row.flag, row.values) {
            (Some(flag), _) if row.is_list() => format!("`{}` (repeat)", flag.name),
            (Some(flag), _) => format!("`{}`", flag.name),
            (None, Values::FileOnly) => "– (file only)".to_owned(),
            (None, _) => "–".to_owned(),
        };
        let change = match row.takes_effect {
            TakesEffect::Reload => "reload",
            TakesEffect::Restart => "restart",
            TakesEffect::NewSessions => "new sessions",
        };
        let (default, meaning) = (default(row), with_separators(&row.meaning()));
        table += &format!(
            "| `{}` | {flag} | {default} | {meaning} | {change} |\n",
            row.name
        );
    }
    table
}

fn flags_table(commands: &[Commands]) -> String {
    let mut table = "| flag | meaning | default |\n|---|---|---|\n".to_owned();
    for row in Key::all().map(Key::row) {
        let Some(flag) = row
            .flag
            .as_ref()
            .filter(|flag| commands.contains(&flag.commands))
        else {
            continue;
        };
        let repeat = if row.is_list() {
            "; repeat for more"
        } else {
            ""
        };
        let only = match flag.commands {
            Commands::Servers => "; not for `run`",
            _ => "",
        };
        let value = flag.value.replace('|', r"\|");
        let text = row.text.replace("](", "](docs/");
        let default = default(row);
        table += &format!(
            "| `{} {value}` | {text}{repeat}{only} | {default} |\n",
            flag.name
        );
    }
    table
}

fn default(row: &Setting) -> String {
    let code = |text: &str| match row.values {
        Values::Number(..) => with_separators(text),
        _ => format!("`{text}`"),
    };
    match row.default {
        DefaultValue::Nothing => "none".to_owned(),
        DefaultValue::Value(text) => code(text),
        DefaultValue::Adapted(text, how) => format!("{}, {how}", code(text)),
        DefaultValue::Derived(how) => how.to_owned(),
    }
}

/// Formats numbers with separators: `100000` as `100,000`.
fn with_separators(text: &str) -> String {
    let word = |written: &str| {
        let (word, end) = match written.strip_suffix(';') {
            Some(word) => (word, ";"),
            None => (written, ""),
        };
        if word.len() < 4 || !word.bytes().all(|byte| byte.is_ascii_digit()) {
            return written.to_owned();
        }
        let groups = word.as_bytes().rchunks(3).rev();
        let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
        groups.join(",") + end
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}
