//! What the fixture lists, and every answer that is always the same.
//!
//! Names are the suite's. Contents are written as JSON, as its requirements are.

use rmcp::model::{
    CallToolResult, GetPromptResult, Prompt, ReadResourceResult, Resource, ResourceTemplate, Tool,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::fixture::from_json;
use super::questions;

/// A picture of one red dot.
const PICTURE: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAF\
                       BQIAX8jx0gAAAABJRU5ErkJggg==";

/// A recording without a single sample.
const SOUND: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=";

const WITHOUT_ARGUMENTS: [&str; 18] = [
    // The suite takes the first tool for questions that any tool could answer.
    "test_simple_text",
    "failing_job",
    "multi_input",
    "protocol_error_job",
    "test_audio_content",
    "test_elicitation_sep1034_defaults",
    "test_elicitation_sep1330_enums",
    "test_embedded_resource",
    "test_error_handling",
    "test_image_content",
    "test_logging_tool",
    "test_missing_capability",
    "test_multiple_content_types",
    "test_reconnection",
    "test_tool_with_logging",
    "test_tool_with_progress",
    "test_trigger_prompt_change",
    "test_trigger_tool_change",
];

/// All tools, in the order in which they are listed.
pub(super) fn tools() -> Vec<Tool> {
    let plain = WITHOUT_ARGUMENTS.into_iter().chain(questions::tools());
    let plain = plain.map(|name| listed(name, json!({"type": "object", "properties": {}})));
    let given = with_arguments()
        .into_iter()
        .map(|(name, schema)| listed(name, schema));
    plain.chain(given).collect()
}

fn listed(name: &str, schema: Value) -> Tool {
    from_json(json!({
        "name": name,
        "description": format!("Plays the part of {name}"),
        "inputSchema": schema,
    }))
}

fn with_arguments() -> Vec<(&'static str, Value)> {
    let texts = |names: &[&str]| {
        let properties = names
            .iter()
            .map(|name| ((*name).to_owned(), json!({"type": "string"})));
        json!({
            "type": "object",
            "properties": serde_json::Map::from_iter(properties),
            "required": names,
        })
    };
    let seconds = json!({"type": "number", "minimum": 0});
    vec![
        ("confirm_delete", texts(&["filename"])),
        (
            "greet",
            json!({"type": "object", "properties": {"name": {"type": "string"}}}),
        ),
        (
            "slow_compute",
            json!({
                "type": "object",
                "properties": {"seconds": seconds, "label": {"type": "string"}},
            }),
        ),
        ("test_elicitation", texts(&["message"])),
        ("test_sampling", texts(&["prompt"])),
        (
            "test_routed",
            json!({"type": "object", "properties": {"region": {
                "type": "string", "x-mcp-header": "Region",
            }}}),
        ),
        ("json_schema_2020_12_tool", wide_schema()),
    ]
}

/// A schema with the words of 2020-12 that a server might lose on the way.
fn wide_schema() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {"$anchor": "addressDef", "type": "object", "properties": {
            "street": {"type": "string"}, "city": {"type": "string"},
        }}},
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": false,
    })
}

/// A result that is one text.
pub(super) fn text(text: &str) -> CallToolResult {
    complete(json!({"content": [{"type": "text", "text": text}]}))
}

/// The result of a tool that always says the same.
pub(super) fn fixed_result(name: &str) -> Option<CallToolResult> {
    let words = json!({"type": "text", "text": "the tool has run"});
    let picture = json!({"type": "image", "data": PICTURE, "mimeType": "image/png"});
    let embedded = |uri: &str| {
        json!({"type": "resource", "resource": {
            "uri": uri, "mimeType": "text/plain", "text": "what is embedded",
        }})
    };
    let content = match name {
        "test_simple_text" | "test_reconnection" | "json_schema_2020_12_tool" => json!([words]),
        "test_image_content" => json!([picture]),
        "test_audio_content" => json!([{"type": "audio", "data": SOUND, "mimeType": "audio/wav"}]),
        "test_embedded_resource" => json!([embedded("test://embedded-resource")]),
        "test_multiple_content_types" => {
            json!([words, picture, embedded("test://mixed-content-resource")])
        }
        "test_error_handling" => {
            return Some(complete(json!({"content": [words], "isError": true})));
        }
        _ => return None,
    };
    Some(complete(json!({"content": content})))
}

/// Makes a result that needs no further round; the library takes the mark away where an older
/// client would not know it.
fn complete<T: DeserializeOwned>(mut value: Value) -> T {
    value["resultType"] = json!("complete");
    from_json(value)
}

/// All prompts.
pub(super) fn prompts() -> Vec<Prompt> {
    let argument =
        |name: &str| json!({"name": name, "description": "What to put in", "required": true});
    let prompt = |name: &str, arguments: &[&str]| {
        let arguments: Vec<_> = arguments.iter().map(|name| argument(name)).collect();
        from_json(json!({
            "name": name,
            "description": format!("Plays the part of {name}"),
            "arguments": arguments,
        }))
    };
    vec![
        prompt("test_simple_prompt", &[]),
        prompt("test_prompt_with_arguments", &["arg1", "arg2"]),
        prompt("test_prompt_with_embedded_resource", &["resourceUri"]),
        prompt("test_prompt_with_image", &[]),
        prompt("test_input_required_result_prompt", &[]),
    ]
}

/// A prompt that is one message.
pub(super) fn prompt_of(text: &str) -> GetPromptResult {
    complete(json!({"messages": [{"role": "user", "content": {"type": "text", "text": text}}]}))
}

/// A prompt by its name, with the arguments in it.
pub(super) fn prompt(name: &str, arguments: &Value) -> Option<GetPromptResult> {
    let given = |argument: &str| arguments[argument].as_str().unwrap_or_default().to_owned();
    let with_text = |first: Value, text: &str| {
        let messages = [first, json!({"type": "text", "text": text})]
            .map(|content| json!({"role": "user", "content": content}));
        complete(json!({"messages": messages}))
    };
    Some(match name {
        "test_simple_prompt" => prompt_of("a prompt without anything to put in"),
        "test_prompt_with_arguments" => prompt_of(&format!(
            "arg1='{}', arg2='{}'",
            given("arg1"),
            given("arg2")
        )),
        "test_prompt_with_embedded_resource" => {
            let resource = json!({
                "uri": given("resourceUri"), "mimeType": "text/plain", "text": "what is embedded",
            });
            with_text(
                json!({"type": "resource", "resource": resource}),
                "What does the resource say?",
            )
        }
        "test_prompt_with_image" => with_text(
            json!({"type": "image", "data": PICTURE, "mimeType": "image/png"}),
            "What is in the picture?",
        ),
        _ => return None,
    })
}

/// All resources that have an address of their own.
pub(super) fn resources() -> Vec<Resource> {
    let resource = |uri: &str, kind: &str| {
        from_json(
            json!({"uri": uri, "name": uri, "description": "A resource that never \
                 changes", "mimeType": kind}),
        )
    };
    vec![
        resource("test://static-text", "text/plain"),
        resource("test://static-binary", "image/png"),
        resource("test://watched-resource", "text/plain"),
    ]
}

/// The one family of resources.
pub(super) fn templates() -> Vec<ResourceTemplate> {
    let template = json!({"uriTemplate": "test://template/{id}/data", "name": "data by number",
        "description": "Data that tells its number", "mimeType": "application/json"});
    vec![from_json(template)]
}

/// What is at an address, if anything.
pub(super) fn contents(uri: &str) -> Option<ReadResourceResult> {
    let content = match uri {
        "test://static-text" | "test://watched-resource" => {
            json!({"uri": uri, "mimeType": "text/plain", "text": "a text that never changes"})
        }
        "test://static-binary" => json!({"uri": uri, "mimeType": "image/png", "blob": PICTURE}),
        _ => {
            let id = uri
                .strip_prefix("test://template/")?
                .strip_suffix("/data")?;
            json!({
                "uri": uri,
                "mimeType": "application/json",
                "text": json!({"id": id}).to_string(),
            })
        }
    };
    Some(complete(json!({"contents": [content]})))
}
