//! What tools share in how they describe themselves: the entry in the list, parts of schemas, and
//! sentences about the server.

use std::sync::Arc;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};

use super::{SessionArgument, ToolDefinition};
use crate::mcp::{Front, McpSettings, OtherHosts};
use crate::session::SessionId;

/// How a tool presents itself to clients.
pub(super) struct Description {
    pub(super) title: &'static str,
    pub(super) text: String,
    pub(super) input: Value,
    pub(super) output: Value,
    pub(super) effect: ToolEffect,
    pub(super) reach: Reach,
}

/// What a tool does to the world, as far as the protocol can say it.
pub(super) enum ToolEffect {
    ReadsOnly,
    Changes { destructive: bool, idempotent: bool },
}

/// What a tool can reach outside of the server.
pub(super) enum Reach {
    Nothing,
    /// What the operator has opened for code.
    AsCode,
    OtherServers,
}

/// Returns the entry of a tool in the list.
pub(super) fn listed<T: ToolDefinition>(settings: &McpSettings) -> Tool {
    let Description {
        title,
        text,
        input,
        output,
        effect,
        reach,
    } = T::describe(settings);
    let is_open = match reach {
        Reach::Nothing => false,
        Reach::AsCode => {
            !settings.network.is_empty() || settings.other_hosts == OtherHosts::AskedAbout
        }
        Reach::OtherServers => true,
    };
    let input = match (T::SESSION, settings.front) {
        (SessionArgument::Existing, Front::Http) => requiring_session(input),
        _ => input,
    };
    Tool::new(T::ENTRY.name, text, map(input))
        .with_title(title)
        .with_raw_output_schema(Arc::new(map(output)))
        .with_annotations(hints(effect).open_world(is_open))
}

fn requiring_session(mut schema: Value) -> Value {
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let others = required.into_iter().filter(|name| name != "session_id");
    schema["required"] = others.chain([json!("session_id")]).collect();
    schema
}

/// What the descriptions of undo's tools add when the operator does not want it.
pub(super) fn switched_off(settings: &McpSettings) -> &'static str {
    if settings.can_undo {
        ""
    } else {
        " Switched off on this server."
    }
}

/// Says only what differs from the protocol's defaults: a tool changes things, destructively, and
/// not the same twice.
fn hints(effect: ToolEffect) -> ToolAnnotations {
    let hints = ToolAnnotations::new();
    match effect {
        ToolEffect::ReadsOnly => hints.read_only(true),
        ToolEffect::Changes {
            destructive,
            idempotent,
        } => {
            let hints = if destructive {
                hints
            } else {
                hints.destructive(false)
            };
            if idempotent {
                hints.idempotent(true)
            } else {
                hints
            }
        }
    }
}

pub(super) fn transfer_schema() -> Value {
    result_schema(json!({
        "session_id": {"type": "string"},
        "relpath": {"type": "string"},
        "bytes": {"type": "integer"},
    }))
}

/// The fields of `transfer_schema` for a file that was copied.
pub(super) fn transfer_fields(session: &SessionId, relpath: &str, bytes: u64) -> Value {
    json!({"session_id": session.as_str(), "relpath": relpath, "bytes": bytes})
}

pub(super) fn checkpoints_schema() -> Value {
    json!({"type": "array", "description": "Each: cells, before (its first line), age_seconds."})
}

/// What became of the files when a session was copied or brought back.
pub(super) fn files_schema(states: &str) -> Value {
    json!({"type": "object", "description": format!("state ({states}), why")})
}

pub(super) fn timeout_schema(settings: &McpSettings, description: &str) -> Value {
    json!({
        "type": "number", "exclusiveMinimum": 0, "maximum": settings.max_timeout.as_secs_f64(),
        "default": settings.default_timeout.as_secs_f64(), "description": description,
    })
}

/// On HTTP a gateway may route by the session without reading bodies.
pub(super) fn session_schema(settings: &McpSettings) -> Value {
    match settings.front {
        Front::Stdio => json!({"type": "string", "default": SessionId::DEFAULT}),
        Front::Http => json!({"type": "string", "x-mcp-header": "Session-Id"}),
    }
}

pub(super) fn path_schema(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

pub(super) fn overwrite_schema() -> Value {
    json!({"type": "boolean", "default": false, "description": "Replace an existing file."})
}

/// The schema of a result. It does not say that there is nothing else: that costs a model its
/// attention and tells it nothing.
pub(super) fn result_schema(properties: Value) -> Value {
    json!({"type": "object", "properties": properties})
}

/// The schema of arguments. That others are refused is not said thirteen times; whoever tries one
/// is told, with the nearest name.
pub(super) fn object(properties: Value, required: &[&str]) -> Value {
    match required {
        [] => json!({"type": "object", "properties": properties}),
        _ => json!({"type": "object", "properties": properties, "required": required}),
    }
}

fn map(schema: Value) -> JsonObject {
    match schema {
        Value::Object(map) => map,
        _ => unreachable!("schemas are written as objects above"),
    }
}
