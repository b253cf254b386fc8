//! The tools of the default profile: a file for each, and the table of them.
//!
//! The file of a tool has its name, the right that a call needs, its schemas, the reading of its
//! arguments, the operation that it asks for, the rendering of the reply, and its tests. To add a
//! tool: a file here and its row in `TOOLS`; if it needs a new operation, see `crate::ops`.
//!
//! The schemas are written by hand and are the only list of argument names: a call is checked
//! against them before its tool reads the arguments. `schema` has the parts that tools share.
//!
//! A model pays for every byte of this list in every conversation. So output schemas have one
//! level, every field of it is always there, and a field that may be null has no type;
//! `docs/results.md` has the rest.

mod check_execution;
mod close_session;
mod comparison;
mod download_file;
mod execute_ipython_cell;
mod explore;
mod fork_session;
mod install_package;
mod list_checkpoints;
mod list_mcp_servers;
mod list_sessions;
mod register_mcp_server;
mod reset;
mod schema;
mod undo;
mod unregister_mcp_server;
mod upload_file;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use rmcp::model::{CallToolResponse, JsonObject, Tool};
use serde_json::Value;

use super::arguments::{BadArgument, Given, Unnamed, nearest, shortened};
use super::toolbox::{Entry, ToolContext, Toolbox};
use super::{Front, McpSettings, render};
use crate::session::SessionId;
pub(super) use install_package::requirements;
use schema::Description;
pub(super) use upload_file::UploadSource;

/// A tool of the default profile.
trait ToolDefinition: 'static {
    /// What the arguments of a call become: an operation, or what leads to one.
    type Call: Send;

    const ENTRY: Entry;
    const SESSION: SessionArgument;

    fn describe(settings: &McpSettings) -> Description;

    /// Reads the arguments of a call. Refuses everything that the schema would refuse.
    fn parse(arguments: &mut Arguments<'_>) -> Result<Self::Call, BadArgument>;

    /// Carries a call out and renders what came of it.
    fn run(
        call: Self::Call,
        tool_context: ToolContext<'_>,
    ) -> impl Future<Output = CallToolResponse> + Send;
}

/// What a call that has no `session_id` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionArgument {
    /// The tool has no such argument.
    None,
    /// On stdio the session called `default`. On HTTP the call is refused, because callers share
    /// the server.
    Existing,
    /// On stdio the session called `default`, on HTTP a new one, which the result names.
    MayBegin,
}

/// All tools, in the order in which they are listed.
static TOOLS: [ToolRow; 15] = [
    row::<execute_ipython_cell::ExecuteTool>(),
    row::<check_execution::CheckTool>(),
    row::<install_package::InstallTool>(),
    row::<reset::ResetTool>(),
    row::<undo::UndoTool>(),
    row::<list_checkpoints::ListCheckpointsTool>(),
    row::<fork_session::ForkTool>(),
    row::<explore::ExploreTool>(),
    row::<upload_file::UploadTool>(),
    row::<download_file::DownloadTool>(),
    row::<list_sessions::ListSessionsTool>(),
    row::<close_session::CloseTool>(),
    row::<register_mcp_server::RegisterTool>(),
    row::<list_mcp_servers::ListServersTool>(),
    row::<unregister_mcp_server::UnregisterTool>(),
];

/// A definition as a value.
struct ToolRow {
    entry: Entry,
    session: SessionArgument,
    list: fn(&McpSettings) -> Tool,
    /// Reads the arguments and returns the work that is left.
    begin: for<'a> fn(
        Arguments<'_>,
        ToolContext<'a>,
    ) -> Result<BoxFuture<'a, CallToolResponse>, BadArgument>,
}

const fn row<T: ToolDefinition>() -> ToolRow {
    ToolRow {
        entry: T::ENTRY,
        session: T::SESSION,
        list: |settings| schema::listed::<T>(settings),
        begin: |mut arguments, tool_context| {
            let call = T::parse(&mut arguments)?;
            Ok(Box::pin(T::run(call, tool_context)))
        },
    }
}

fn find(name: &str) -> Option<&'static ToolRow> {
    TOOLS.iter().find(|row| row.entry.name == name)
}

/// What calls get that say nothing else, and the most they may ask for.
#[derive(Debug, Clone, Copy)]
struct CallDefaults {
    timeout: Duration,
    max_timeout: Duration,
    max_output_chars: usize,
    max_wait: Duration,
    front: Front,
}

/// The arguments of a call. Their names are known to be in the schema.
struct Arguments<'a> {
    tool: &'static str,
    given: JsonObject,
    session: Option<SessionId>,
    defaults: &'a CallDefaults,
}

impl Arguments<'_> {
    /// Takes an argument out, as it was given or was not.
    fn take(&mut self, name: &'static str) -> Given {
        Given {
            tool: self.tool,
            name,
            value: self.given.remove(name),
        }
    }

    /// Returns the session that the call is about.
    fn session(&self) -> SessionId {
        self.session
            .clone()
            .expect("it is read for every tool that has this argument")
    }

    fn timeout(&mut self) -> Result<Duration, BadArgument> {
        let CallDefaults {
            timeout,
            max_timeout,
            ..
        } = *self.defaults;
        self.take("timeout").timeout(timeout, max_timeout)
    }
}

/// The tools as they are listed to clients.
#[derive(Debug, Clone)]
pub(super) struct Catalogue {
    tools: Arc<Vec<Tool>>,
    defaults: CallDefaults,
}

impl Catalogue {
    pub(super) fn new(settings: &McpSettings) -> Catalogue {
        Catalogue {
            tools: Arc::new(TOOLS.iter().map(|row| (row.list)(settings)).collect()),
            defaults: CallDefaults {
                timeout: settings.default_timeout,
                max_timeout: settings.max_timeout,
                max_output_chars: settings.default_max_output_chars,
                max_wait: settings.max_wait,
                front: settings.front,
            },
        }
    }

    fn get(&self, name: &str) -> &Tool {
        self.tools
            .iter()
            .find(|tool| tool.name == name)
            .expect("every tool is listed")
    }

    /// Checks the names of the arguments and reads the session, which is the same for all tools.
    fn arguments(
        &self,
        tool: &'static str,
        session: SessionArgument,
        mut given: JsonObject,
    ) -> Result<Arguments<'_>, BadArgument> {
        let allowed: Vec<String> = properties(self.get(tool)).keys().cloned().collect();
        if let Some(unknown) = given.keys().find(|name| !allowed.contains(name)) {
            return Err(BadArgument::Unknown {
                tool,
                given: shortened(unknown),
                nearest: nearest(unknown, allowed.iter().map(String::as_str)).map(str::to_owned),
                allowed,
            });
        }
        let unnamed = match (session, self.defaults.front) {
            (SessionArgument::None, _) => None,
            (_, Front::Stdio) => Some(Unnamed::Default),
            (SessionArgument::Existing, Front::Http) => Some(Unnamed::Refused),
            (SessionArgument::MayBegin, Front::Http) => Some(Unnamed::New),
        };
        let session = unnamed
            .map(|unnamed| {
                let written = Given {
                    tool,
                    name: "session_id",
                    value: given.remove("session_id"),
                };
                written.session(unnamed)
            })
            .transpose()?;
        Ok(Arguments {
            tool,
            given,
            session,
            defaults: &self.defaults,
        })
    }

    /// Reads the arguments of a call. Returns the session that it begins without naming it, and the
    /// work that is left.
    fn begin<'a>(
        &self,
        row: &ToolRow,
        given: JsonObject,
        tool_context: ToolContext<'a>,
    ) -> Result<(Option<SessionId>, BoxFuture<'a, CallToolResponse>), BadArgument> {
        let is_named = session_as_written(Some(&given)).is_some();
        let arguments = self.arguments(row.entry.name, row.session, given)?;
        let begins_unnamed = row.session == SessionArgument::MayBegin && !is_named;
        let unnamed = begins_unnamed.then(|| arguments.session());
        Ok((unnamed, (row.begin)(arguments, tool_context)?))
    }
}

#[async_trait]
impl Toolbox for Catalogue {
    fn tools(&self) -> &[Tool] {
        &self.tools
    }

    fn find(&self, name: &str) -> Option<Entry> {
        find(name).map(|row| row.entry)
    }

    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse {
        let row = find(tool.name).expect("the handler has found it");
        let (unnamed, work) = match self.begin(row, arguments, tool_context) {
            Ok(begun) => begun,
            Err(bad) => return render::refused(&bad).into(),
        };
        let _slot = match tool_context.server.call_slot(tool_context.owner) {
            Ok(slot) => slot,
            Err(busy) => return render::refused(&busy).into(),
        };
        let response = work.await;
        match unnamed {
            Some(session) => {
                tool_context
                    .server
                    .naming(tool_context.owner, &session, response)
                    .await
            }
            None => response,
        }
    }
}

/// Returns the session that a call names, unchecked: calls with the same words keep their order.
pub(super) fn session_as_written(arguments: Option<&JsonObject>) -> Option<&str> {
    arguments
        .and_then(|arguments| arguments.get("session_id"))
        .and_then(Value::as_str)
}

fn properties(tool: &Tool) -> &JsonObject {
    tool.input_schema
        .get("properties")
        .and_then(Value::as_object)
        .expect("every input schema here has properties")
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;
    use crate::auth::Scope;
    use crate::mcp::OtherHosts;
    use crate::sandbox::Rules;
    use crate::session::WorkFolder;

    pub(super) fn catalogue() -> Catalogue {
        Catalogue::new(&McpSettings::default())
    }

    /// The names of all tools and the rights that calls need.
    pub(in crate::mcp) fn scopes() -> impl Iterator<Item = (&'static str, Scope)> {
        TOOLS.iter().map(|row| (row.entry.name, row.entry.scope))
    }

    pub(super) fn parse_with<T: ToolDefinition>(
        catalogue: &Catalogue,
        arguments: Value,
    ) -> Result<T::Call, BadArgument> {
        let Value::Object(arguments) = arguments else {
            panic!("arguments are an object")
        };
        let mut arguments = catalogue.arguments(T::ENTRY.name, T::SESSION, arguments)?;
        T::parse(&mut arguments)
    }

    /// Reads arguments as a server with the default settings does.
    pub(super) fn parse<T: ToolDefinition>(arguments: Value) -> Result<T::Call, BadArgument> {
        parse_with::<T>(&catalogue(), arguments)
    }

    #[track_caller]
    pub(super) fn check_refused<T: ToolDefinition>(arguments: Value, words: &[&str]) {
        let text = parse::<T>(arguments)
            .err()
            .expect("the call should be refused")
            .to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        assert!(text.ends_with("Nothing was executed."), "{text:?}");
        assert!(text.len() < 500, "{} bytes", text.len());
    }

    /// Checks that both the parser and the schema accept arguments.
    #[track_caller]
    pub(super) fn check_accepted<T: ToolDefinition>(arguments: Value) {
        let schema = Value::Object(input_schema::<T>());
        assert_eq!(violations(&schema, &arguments, ""), Vec::<String>::new());
        assert!(parse::<T>(arguments).is_ok());
    }

    pub(super) fn input_schema<T: ToolDefinition>() -> JsonObject {
        catalogue().get(T::ENTRY.name).input_schema.as_ref().clone()
    }

    /// Returns the description that clients read.
    pub(super) fn described<T: ToolDefinition>(settings: &McpSettings) -> String {
        Catalogue::new(settings)
            .get(T::ENTRY.name)
            .description
            .clone()
            .unwrap_or_default()
            .into_owned()
    }

    /// The text and the structured content of a result, which fit the schema of its tool.
    #[track_caller]
    pub(super) fn parts<T: ToolDefinition>(result: rmcp::model::CallToolResult) -> (String, Value) {
        let result = serde_json::to_value(result).unwrap();
        assert_eq!(result["isError"], false);
        assert_valid_output(T::ENTRY.name, &result["structuredContent"]);
        (
            result["content"][0]["text"].as_str().unwrap().to_owned(),
            result["structuredContent"].clone(),
        )
    }

    /// Checks a value against the part of JSON Schema that this file uses. Panics on a keyword it
    /// does not know, so that no rule goes unchecked.
    pub(in crate::mcp) fn violations(schema: &Value, value: &Value, at: &str) -> Vec<String> {
        let mut found = Vec::new();
        let schema = schema.as_object().expect("a schema is an object");
        for (keyword, rule) in schema {
            let holds = match keyword.as_str() {
                "description" | "default" => true,
                "type" => match rule.as_str().expect("type is one word, never a list") {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "boolean" => value.is_boolean(),
                    "null" => value.is_null(),
                    "number" => value.is_number(),
                    "integer" => value.is_u64() || value.is_i64(),
                    other => panic!("unknown type {other}"),
                },
                "minimum" => value
                    .as_f64()
                    .is_none_or(|number| number >= rule.as_f64().unwrap()),
                "maximum" => value
                    .as_f64()
                    .is_none_or(|number| number <= rule.as_f64().unwrap()),
                "exclusiveMinimum" => value
                    .as_f64()
                    .is_none_or(|number| number > rule.as_f64().unwrap()),
                "minLength" => value
                    .as_str()
                    .is_none_or(|text| text.chars().count() as u64 >= rule.as_u64().unwrap()),
                "maxLength" => value
                    .as_str()
                    .is_none_or(|text| text.chars().count() as u64 <= rule.as_u64().unwrap()),
                "minItems" => value
                    .as_array()
                    .is_none_or(|items| items.len() as u64 >= rule.as_u64().unwrap()),
                "maxItems" => value
                    .as_array()
                    .is_none_or(|items| items.len() as u64 <= rule.as_u64().unwrap()),
                "required" => rule
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|name| value.get(name.as_str().unwrap()).is_some()),
                "properties" => {
                    for (name, inner) in rule.as_object().unwrap() {
                        if let Some(field) = value.get(name) {
                            found.extend(violations(inner, field, &format!("{at}/{name}")));
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    let known = schema.get("properties").and_then(Value::as_object);
                    let extra = value.as_object().into_iter().flatten();
                    let mut extra = extra
                        .filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)));
                    match rule {
                        Value::Bool(false) => extra.next().is_none(),
                        inner => {
                            found.extend(extra.flat_map(|(name, field)| {
                                violations(inner, field, &format!("{at}/{name}"))
                            }));
                            true
                        }
                    }
                }
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        found.extend(violations(rule, item, &format!("{at}/{index}")));
                    }
                    true
                }
                "anyOf" => rule
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|inner| violations(inner, value, at).is_empty()),
                other => panic!("the validator does not know the keyword {other}"),
            };
            if !holds {
                found.push(format!("{at}: {keyword} {rule} does not hold for {value}"));
            }
        }
        found
    }

    /// Checks a structured result against the output schema of its tool.
    #[track_caller]
    pub(in crate::mcp) fn assert_valid_output(tool: &str, value: &Value) {
        let catalogue = catalogue();
        let schema = catalogue
            .get(tool)
            .output_schema
            .as_deref()
            .expect("every tool has an output schema");
        assert_eq!(
            violations(&Value::Object(schema.clone()), value, ""),
            Vec::<String>::new()
        );
        let named = schema["properties"].as_object().unwrap().keys();
        let missing: Vec<&String> = named
            .filter(|name| value.get(name.as_str()).is_none())
            .collect();
        assert_eq!(
            missing,
            Vec::<&String>::new(),
            "every field is always there"
        );
    }

    #[test]
    fn the_whole_list_of_tools_is_short_enough_for_a_model() {
        // 3,000 tokens: a tokenizer (o200k) makes 2,759 of the 11,791 bytes on stdio, 4.27 bytes
        // each.
        let packages = crate::environment::EnvironmentSpec::built_in()[0].packages_for_code();
        for front in [Front::Stdio, Front::Http] {
            let settings = McpSettings {
                front,
                packages: packages.clone(),
                ..McpSettings::default()
            };
            let catalogue = Catalogue::new(&settings);
            let bytes = serde_json::to_vec(catalogue.tools()).unwrap().len();
            assert!(bytes < 12_500, "{bytes} bytes on {front:?}");
        }
    }

    #[test]
    fn tools_are_listed_in_one_fixed_order() {
        let names: Vec<_> = catalogue()
            .tools()
            .iter()
            .map(|tool| tool.name.to_string())
            .collect();
        let expected = [
            "execute_ipython_cell",
            "check_execution",
            "install_package",
            "reset",
            "undo",
            "list_checkpoints",
            "fork_session",
            "explore",
            "upload_file",
            "download_file",
            "list_sessions",
            "close_session",
            "register_mcp_server",
            "list_mcp_servers",
            "unregister_mcp_server",
        ];
        assert_eq!(names, expected);
        for row in &TOOLS {
            assert_eq!(catalogue().find(row.entry.name), Some(row.entry));
        }
    }

    #[test]
    fn every_schema_has_an_object_root_and_no_list_of_types() {
        fn walk(value: &Value) {
            match value {
                Value::Object(map) => {
                    assert!(!map.get("type").is_some_and(Value::is_array), "{map:?}");
                    map.values().for_each(walk);
                }
                Value::Array(items) => items.iter().for_each(walk),
                _ => {}
            }
        }
        for tool in catalogue().tools() {
            for schema in [&tool.input_schema, tool.output_schema.as_ref().unwrap()] {
                assert_eq!(schema["type"], "object");
                walk(&Value::Object(schema.as_ref().clone()));
            }
            assert!(
                tool.title.is_some() && tool.description.is_some() && tool.annotations.is_some()
            );
        }
    }

    #[test]
    fn only_listing_is_read_only_and_only_code_and_registration_reach_out() {
        let listed = Rules::parse(&["example.com"]).unwrap();
        for (network, other_hosts, is_open) in [
            (Rules::none(), OtherHosts::Closed, false),
            (listed, OtherHosts::Closed, true),
            (Rules::none(), OtherHosts::AskedAbout, true),
        ] {
            let settings = McpSettings {
                network,
                other_hosts,
                ..McpSettings::default()
            };
            for tool in Catalogue::new(&settings).tools() {
                let annotations = tool.annotations.as_ref().unwrap();
                let runs_code = matches!(&*tool.name, "execute_ipython_cell" | "explore");
                let reaches_out = tool.name == "register_mcp_server" || (runs_code && is_open);
                assert_eq!(annotations.open_world_hint, Some(reaches_out));
                let lists = tool.name.starts_with("list_");
                assert_eq!(annotations.read_only_hint, lists.then_some(true));
            }
        }
    }

    #[test]
    fn a_shared_working_folder_is_described_as_one() {
        let described = |work_folder| {
            let settings = McpSettings {
                work_folder,
                ..McpSettings::default()
            };
            let texts = Catalogue::new(&settings);
            let texts = texts.tools().iter();
            texts
                .map(|tool| tool.description.clone().unwrap_or_default())
                .collect::<Vec<_>>()
                .join("\n")
        };
        let (private, shared) = (
            described(WorkFolder::Private),
            described(WorkFolder::Shared),
        );
        assert!(
            private.contains("private to the session")
                && private.contains("deletes its variables and files")
        );
        assert!(
            shared.contains("all sessions share it and its files stay")
                && shared.contains("Files in the current folder stay")
        );
        assert!(!shared.contains("private to the session"));
        assert!(
            private.contains("variables and files. Also after")
                && private.contains("imports and files into")
        );
        assert!(
            shared.contains("files if the folder is small enough")
                && shared.contains("files stay shared")
        );
    }

    #[test]
    fn every_file_is_named_like_its_tool() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/mcp/tools");
        for row in &TOOLS {
            let file = folder.join(format!("{}.rs", row.entry.name));
            assert!(file.is_file(), "{} does not exist", file.display());
        }
    }

    #[test]
    fn the_validator_of_these_tests_finds_violations() {
        let schema = Value::Object(
            catalogue()
                .get("execute_ipython_cell")
                .input_schema
                .as_ref()
                .clone(),
        );
        for arguments in [
            json!({}),
            json!({"code": 1}),
            json!({"code": "", "timeout": 0}),
        ] {
            assert!(
                !violations(&schema, &arguments, "").is_empty(),
                "{arguments}"
            );
        }
        let schema = Value::Object(catalogue().get("explore").input_schema.as_ref().clone());
        let variant = |name: &str| json!({"name": name, "code": ""});
        for variants in [
            json!([]),
            json!(vec![variant("a"); 17]),
            json!([{"name": "a"}]),
            json!([variant(&"a".repeat(41))]),
        ] {
            assert!(
                !violations(&schema, &json!({"variants": variants}), "").is_empty(),
                "{variants}"
            );
        }
    }
}
