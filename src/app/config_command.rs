//! `cellblock config …`: checks the configuration and shows the effective settings.
//!
//! Nothing is created or started, so a file can be tested before it is put in place.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::cli::ConfigCommand;
use super::output::say;
use crate::config::{self, Flags, Inspection, ShownSetting};

/// Executes one command and returns its output. Warnings go to standard error.
pub(super) fn execute(
    command: &ConfigCommand,
    named: Option<&Path>,
    flags: Flags,
) -> anyhow::Result<String> {
    let named = match command {
        ConfigCommand::Check { file: Some(file) } => Some(file.as_path()),
        _ => named,
    };
    let inspection = config::inspect(named, flags)?;
    for notice in &inspection.notices {
        say(format_args!("cellblock: warning: {notice}"));
    }
    Ok(match command {
        ConfigCommand::Check { .. } => verdict(&inspection),
        ConfigCommand::Show { json: true } => as_json(&inspection.settings),
        ConfigCommand::Show { json: false } => as_text(&inspection.settings),
    })
}

fn verdict(inspection: &Inspection) -> String {
    match &inspection.file {
        Some(file) => format!("{} can be used\n", file.display()),
        None => {
            "there is no configuration file; what is written elsewhere can be used\n".to_owned()
        }
    }
}

fn as_json(settings: &[ShownSetting]) -> String {
    let setting = |setting: &ShownSetting| {
        let from = if setting.origins.is_empty() {
            json!(["default"])
        } else {
            json!(setting.origins)
        };
        (
            setting.name.to_owned(),
            json!({ "value": setting.value, "from": from }),
        )
    };
    format!(
        "{:#}\n",
        Value::Object(settings.iter().map(setting).collect::<Map<_, _>>())
    )
}

fn as_text(settings: &[ShownSetting]) -> String {
    let row = |setting: &ShownSetting| {
        let from = if setting.origins.is_empty() {
            "default".to_owned()
        } else {
            setting.origins.join(", ")
        };
        [setting.name.to_owned(), value_text(&setting.value), from]
    };
    let rows: Vec<[String; 3]> = settings.iter().map(row).collect();
    let width = |column: usize, most: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .filter(|width| *width <= most)
            .max()
            .unwrap_or(0)
    };
    // A very long value shifts only its own origin.
    let (names, values) = (width(0, usize::MAX), width(1, 40));
    rows.iter()
        .map(|[name, value, from]| format!("{name:names$}  {value:values$}  {from}\n"))
        .collect()
}

fn value_text(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::Array(values) if values.is_empty() => "-".to_owned(),
        Value::Array(values) => values.iter().map(value_text).collect::<Vec<_>>().join(", "),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(name: &'static str, value: Value, origins: &[&str]) -> ShownSetting {
        ShownSetting {
            name,
            value,
            origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
        }
    }

    #[test]
    fn settings_are_columns_or_an_object() {
        let settings = [
            setting("cpus", json!("2"), &[]),
            setting("memory", json!("2 GiB"), &["/etc/c.yaml:3"]),
            setting(
                "variables",
                json!(["A=[hidden]"]),
                &["KERNEL_ENV_A", "--env-var"],
            ),
            setting("workspace", Value::Null, &[]),
        ];
        let text = "cpus       2           default\nmemory     2 GiB       /etc/c.yaml:3\n\
                    variables  A=[hidden]  KERNEL_ENV_A, --env-var\nworkspace  -           \
                    default\n";
        assert_eq!(as_text(&settings), text);
        let json: Value = serde_json::from_str(&as_json(&settings)).unwrap();
        assert_eq!(
            json["memory"],
            json!({"value": "2 GiB", "from": ["/etc/c.yaml:3"]})
        );
        assert_eq!(
            json["workspace"],
            json!({"value": null, "from": ["default"]})
        );
    }
}
