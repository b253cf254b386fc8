//! Settings for other MCP servers: those available to all sessions, and the hosts allowed for
//! callers' own servers.
//!
//! The form is that of client configurations: a table of names and parameters, in the file itself
//! or in a separate one. `cellblock_upstream` interprets the parameters; this module only checks
//! before the server starts that all of them are valid. Values may be secrets and are never
//! repeated.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cellblock_upstream::{ServerName, ServerParams};
use serde_json::{Map, Value};

use super::super::layers::{SettingOrigin, WrittenMember, WrittenValue};
use super::super::table::Key;
use super::super::{ConfigError, UpstreamSettings};
use super::{Check, NamedFile, ReadNamedFile, invalid, table};
use crate::approval::registration;

/// Parameters that are numbers of seconds. All others are text, also where YAML would parse a
/// number.
const NUMBERS: [&str; 4] = [
    "timeout",
    "sse_read_timeout",
    "connect_timeout",
    "call_timeout",
];
/// The member of a client's configuration that holds servers.
const IN_FILES: &str = "mcpServers";

impl Check<'_> {
    /// Reads the operator's servers. Also returns the file that some of them are in, because it may
    /// hold secrets.
    pub(super) fn upstreams(
        &self,
        variables: BTreeMap<String, String>,
        read: ReadNamedFile<'_>,
    ) -> Result<(UpstreamSettings, Option<PathBuf>), ConfigError> {
        let mut servers = BTreeMap::new();
        let file = self.path(Key::McpServersFile)?;
        if let (Some(path), Some((origin, written))) =
            (&file, self.written.text(Key::McpServersFile)?)
        {
            let text = read(NamedFile::ByOperator(path))
                .map_err(|cause| ConfigError::Unreadable {
                    path: path.clone(),
                    cause,
                })?
                .ok_or_else(|| {
                    invalid(
                        Key::McpServersFile.name(),
                        origin,
                        written,
                        "a file that exists",
                        None,
                    )
                })?;
            let refuse = |why: String| {
                let allowed = "a JSON file with an object \"mcpServers\" of names and parameters";
                invalid(
                    Key::McpServersFile.name(),
                    origin,
                    written,
                    allowed,
                    Some(why),
                )
            };
            let whole: Value = serde_json::from_str(&text)
                .map_err(|error| refuse(format!("it cannot be read at line {}", error.line())))?;
            let listed = whole.get(IN_FILES).and_then(Value::as_object);
            for (name, params) in
                listed.ok_or_else(|| refuse("there is no such object in it".to_owned()))?
            {
                check(name, params).map_err(refuse)?;
                servers.insert(name.clone(), params.clone());
            }
        }
        for (origin, written) in self.written.all(Key::McpServers) {
            for WrittenMember { name, line, value } in
                table(Key::McpServers.name(), origin, written)?
            {
                let params = json(value);
                check(name, &params).map_err(|why| refused(name, &origin.at(*line), why))?;
                servers.insert(name.clone(), params);
            }
        }
        self.refuse_equal_packages(&servers)?;
        let allowed_hosts = self
            .written
            .texts(Key::McpAllowedHosts)?
            .map(|(_, texts)| texts)
            .unwrap_or_default();
        let allowed_hosts = allowed_hosts.into_iter().map(str::to_owned).collect();
        Ok((
            UpstreamSettings {
                servers,
                allowed_hosts,
                variables,
            },
            file,
        ))
    }

    fn refuse_equal_packages(&self, servers: &BTreeMap<String, Value>) -> Result<(), ConfigError> {
        let mut packages: BTreeMap<String, &str> = BTreeMap::new();
        for name in servers.keys() {
            let package = ServerName::new(name)
                .map(|name| name.python().to_owned())
                .unwrap_or_default();
            if let Some(other) = packages.insert(package, name) {
                let key = if self.written.all(Key::McpServers).is_empty() {
                    Key::McpServersFile
                } else {
                    Key::McpServers
                };
                let origin = &self
                    .written
                    .all(key)
                    .first()
                    .expect("servers come from one of the two")
                    .0;
                let why = format!("its Python package would be that of {other}");
                return Err(refused(name, origin, why));
            }
        }
        Ok(())
    }
}

fn check(name: &str, params: &Value) -> Result<(), String> {
    ServerName::new(name).map_err(|error| format!("the name {name:?} cannot be used: {error}"))?;
    let (params, _) = registration(name, params).map_err(|bad| format!("approval: {bad}"))?;
    ServerParams::parse(&params)
        .map(drop)
        .map_err(|error| error.to_string())
}

fn refused(name: &str, origin: &SettingOrigin, why: String) -> ConfigError {
    let allowed = "`command` with `args`, `env`, `cwd`, or `url` with `headers`, `type`";
    invalid(
        &format!("{}.{name}", Key::McpServers.name()),
        origin,
        "…",
        allowed,
        Some(why),
    )
}

/// Converts a written value to JSON. Texts stay texts, so the value of a variable need not be
/// quoted.
fn json(written: &WrittenValue) -> Value {
    match written {
        WrittenValue::Nothing => Value::Null,
        WrittenValue::Text(text) => Value::String(text.clone()),
        WrittenValue::List(items) => items.iter().map(json).collect(),
        WrittenValue::Table(members) => {
            let member = |member: &WrittenMember| {
                let number = NUMBERS
                    .contains(&member.name.as_str())
                    .then(|| number(&member.value))
                    .flatten();
                (
                    member.name.clone(),
                    number.unwrap_or_else(|| json(&member.value)),
                )
            };
            Value::Object(members.iter().map(member).collect::<Map<_, _>>())
        }
    }
}

fn number(written: &WrittenValue) -> Option<Value> {
    match written {
        WrittenValue::Text(text) => serde_json::from_str(text).ok().filter(Value::is_number),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::case;
    use super::*;

    const SERVERS: &str = "mcp_servers:\n  git:\n    command: uvx\n    args: [mcp-server-git, \
                           --port, 8080]\n    env: {LEVEL: 3, TOKEN: '${GIT_TOKEN}'}\n    \
                           call_timeout: 90\n  web:\n    url: https://example.com/mcp\n    \
                           headers: {Authorization: Bearer canary-1}\n";

    #[test]
    fn servers_are_read_from_the_file_and_texts_stay_texts() {
        let settings = case()
            .yaml(SERVERS)
            .variable("GIT_TOKEN", "canary-2")
            .settings();
        let git = &settings.upstreams.servers["git"];
        let expected = json!({"command": "uvx", "args": ["mcp-server-git", "--port", "8080"],
            "env": {"LEVEL": "3", "TOKEN": "${GIT_TOKEN}"}, "call_timeout": 90});
        assert_eq!(*git, expected);
        assert_eq!(settings.upstreams.variables["GIT_TOKEN"], "canary-2");
        let shown = format!("{settings:?}");
        assert!(
            shown.contains("\"git\", \"web\"") && !shown.contains("canary"),
            "{shown}"
        );
        assert!(case().settings().upstreams.servers.is_empty());
    }

    #[test]
    fn a_file_of_another_client_is_read_and_the_configuration_wins() {
        let text = r#"{"mcpServers": {"git": {"command": "other"}, "time": {"command": "uvx", "args": ["mcp-server-time"]}}, "theme": "dark"}"#;
        let named = || {
            case()
                .yaml(SERVERS)
                .flag(Key::McpServersFile, "clients.json")
        };
        let settings = named().file("/here/clients.json", text).settings();
        let names: Vec<&String> = settings.upstreams.servers.keys().collect();
        assert_eq!(names, ["git", "time", "web"]);
        assert_eq!(settings.upstreams.servers["git"]["command"], "uvx");
        assert!(named().refusal().contains("a file that exists"));
        for (text, word) in [
            ("{", "line 1"),
            ("{}", "no such object"),
            (r#"{"mcpServers": {"a": {"comand": "x"}}}"#, "command"),
        ] {
            let refusal = named().file("/here/clients.json", text).refusal();
            assert!(refusal.contains(word), "{refusal}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_where_it_is_written_and_without_its_values() {
        for (yaml, words) in [
            ("mcp_servers: [a]", ["mcp_servers", "table"]),
            (
                "mcp_servers:\n  a: {command: x, url: 'https://canary'}",
                ["line 2: mcp_servers.a", "both"],
            ),
            (
                "mcp_servers:\n  a: {command: x, arg: [canary]}",
                ["mcp_servers.a", "did you mean `args`"],
            ),
            ("mcp_servers:\n  '../a': {command: x}", ["../a", "name"]),
            (
                "mcp_servers:\n  a-b: {command: x}\n  a_b: {command: x}",
                ["package", "a-b"],
            ),
        ] {
            let refusal = case().yaml(yaml).refusal();
            for word in words {
                assert!(
                    refusal.contains(word) && !refusal.contains("canary"),
                    "{word:?} is not in {refusal:?}"
                );
            }
        }
    }
}
