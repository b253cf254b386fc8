//! Options and results of a tool call.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;

/// Options of one call.
#[derive(Clone, Default)]
pub struct CallOptions {
    /// Idle timeout: how long the server may send nothing. The default comes from the server's
    /// parameters, or else from the limits.
    pub time: Option<Duration>,
    /// Cancels the call and notifies the server.
    pub cancel: CancellationToken,
    /// Receives the progress of the call.
    pub progress: Option<ProgressSink>,
}

/// Callback for the progress of a call. It runs in the task that makes the call and must not block.
pub type ProgressSink = Arc<dyn Fn(CallProgress) + Send + Sync>;

/// Progress of a call, as reported by the server.
#[derive(Debug, Clone, PartialEq)]
pub struct CallProgress {
    pub progress: f64,
    pub total: Option<f64>,
    /// Without control characters, and limited in length.
    pub message: Option<String>,
}

/// Result of a tool, including an error of the tool itself.
#[derive(Debug, Clone, PartialEq)]
pub struct CallReply {
    /// MCP content blocks of any type.
    pub content: Vec<Value>,
    /// `Some(Value::Null)` is a valid result.
    pub structured: Option<Value>,
    pub is_error: bool,
}

/// Error of a call. The messages appear in Python tracebacks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CallError {
    #[error("the server {server} did not answer within {} s", .time.as_secs_f64())]
    Timeout { server: String, time: Duration },
    #[error("the server {server} has no tool {tool:?}{}", suggestion(.nearest))]
    Unknown {
        server: String,
        tool: String,
        nearest: Option<String>,
    },
    #[error(
        "the tool {tool:?} of the server {server} {how} since it was registered, so it is not \
         called; register the server again to use it"
    )]
    ToolChanged {
        server: String,
        tool: String,
        how: &'static str,
    },
    #[error("the arguments do not fit the schema of the tool {tool:?}: {why}")]
    Invalid { tool: String, why: String },
    #[error("the server {server} cannot be reached: {why}")]
    Unavailable { server: String, why: String },
    #[error("the connection to the server {server} was lost during the call, which may have been \
             carried out and is not repeated{}", last(.last_words))]
    Interrupted {
        server: String,
        last_words: Option<String>,
    },
    #[error("the server {server} answered with an error of the protocol: {message} (code {code})")]
    Refused {
        server: String,
        code: i32,
        message: String,
    },
    #[error("the server {server} answered with something that is no result of a tool: {why}")]
    Protocol { server: String, why: &'static str },
    #[error("the answer of the server {server} is larger than {largest} bytes")]
    TooLarge { server: String, largest: usize },
    #[error(
        "the answer of the server {server} holds too many values; ask for fewer at a time, or for \
         text"
    )]
    TooManyValues { server: String },
    #[error("the call was cancelled")]
    Cancelled,
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map(|nearest| format!("; did you mean {nearest:?}?"))
        .unwrap_or_default()
}

fn last(words: &Option<String>) -> String {
    words
        .as_ref()
        .map(|words| format!("; the last that it said: {words}"))
        .unwrap_or_default()
}

/// Error code in the runner's protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallErrorCode {
    Timeout,
    Unknown,
    Invalid,
    Unavailable,
    Protocol,
    TooLarge,
    Cancelled,
}

impl CallError {
    pub fn reason(&self) -> CallErrorCode {
        match self {
            CallError::Timeout { .. } => CallErrorCode::Timeout,
            CallError::Unknown { .. } => CallErrorCode::Unknown,
            CallError::Invalid { .. } => CallErrorCode::Invalid,
            CallError::ToolChanged { .. }
            | CallError::Unavailable { .. }
            | CallError::Interrupted { .. } => CallErrorCode::Unavailable,
            CallError::Refused { .. } | CallError::Protocol { .. } => CallErrorCode::Protocol,
            CallError::TooLarge { .. } | CallError::TooManyValues { .. } => CallErrorCode::TooLarge,
            CallError::Cancelled => CallErrorCode::Cancelled,
        }
    }
}

impl CallErrorCode {
    pub fn as_str(self) -> &'static str {
        match self {
            CallErrorCode::Timeout => "timeout",
            CallErrorCode::Unknown => "unknown",
            CallErrorCode::Invalid => "invalid",
            CallErrorCode::Unavailable => "unavailable",
            CallErrorCode::Protocol => "protocol",
            CallErrorCode::TooLarge => "too_large",
            CallErrorCode::Cancelled => "cancelled",
        }
    }
}

impl CallReply {
    /// Parses the result of `tools/call`.
    pub(crate) fn read(result: Value) -> Result<CallReply, &'static str> {
        let Value::Object(mut result) = result else {
            return Err("it is no object");
        };
        match result.get("resultType").and_then(Value::as_str) {
            None | Some("complete") => {}
            Some("input_required") => return Err("it asks for input, and nobody here gives any"),
            Some("task") => return Err("it is a task, which was not asked for"),
            Some(_) => return Err("it is of a type that is not known"),
        }
        let structured = result.remove("structuredContent");
        let content = match result.remove("content") {
            Some(Value::Array(blocks))
                if blocks
                    .iter()
                    .all(|block| block.get("type").is_some_and(Value::is_string)) =>
            {
                blocks
            }
            None if structured.is_some() => Vec::new(),
            None => return Err("it has no content"),
            Some(_) => return Err("its content is no list of blocks with a type"),
        };
        let is_error = match result.remove("isError") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(is_error)) => is_error,
            Some(_) => return Err("its `isError` is neither true nor false"),
        };
        Ok(CallReply {
            content,
            structured,
            is_error,
        })
    }
}

impl fmt::Debug for CallOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("CallOptions")
            .field("time", &self.time)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_is_read_with_whatever_it_holds() {
        let reply = CallReply::read(json!({
            "content": [{"type": "new"}], "structuredContent": null, "isError": true, "_meta": {},
        }));
        let expected = CallReply {
            content: vec![json!({"type": "new"})],
            structured: Some(Value::Null),
            is_error: true,
        };
        assert_eq!(reply, Ok(expected));
        let reply =
            CallReply::read(json!({"structuredContent": [1], "resultType": "complete"})).unwrap();
        assert_eq!(
            (reply.content.len(), reply.structured, reply.is_error),
            (0, Some(json!([1])), false)
        );
        assert_eq!(
            CallReply::read(json!({"content": []})).unwrap().structured,
            None
        );
    }

    #[test]
    fn what_is_no_result_is_refused() {
        for result in [
            json!(null),
            json!("done"),
            json!({}),
            json!({"content": "text"}),
            json!({"content": [1]}),
            json!({"content": [{"text": "no type"}]}),
            json!({"content": [], "isError": "no"}),
            json!({"resultType": "input_required", "inputRequests": {}}),
            json!({"resultType": "task", "taskId": "x"}),
            json!({"resultType": "surprise", "content": []}),
        ] {
            assert!(CallReply::read(result.clone()).is_err(), "{result}");
        }
    }
}
