//! Messages as they are written: strict reading, the same for every transport.
//!
//! The library reads leniently: it takes the last of two equal keys, a request with wrong
//! parameters for an unknown method, and a cursor it cannot read for none. What is ambiguous is
//! refused here, with an answer, before the library sees it.

use cellblock_json::{Budget, Decoding, ReadError};
use rmcp::model::{ClientJsonRpcMessage, ErrorCode, JsonRpcMessage, RequestId};
use serde_json::{Map, Value, json};

use super::has_wrong_params;

/// What a message may hold. Long texts are code; no tool takes long lists. The library decodes each
/// message once more, so this bounds what it does too.
pub(super) const MESSAGE: Budget = Budget {
    depth: 64,
    memory: 4 * 1024 * 1024,
};

/// Where a request that stands alone says which revision of the protocol it speaks.
const PROTOCOL_VERSION: &str = "io.modelcontextprotocol/protocolVersion";

/// A message that is answered here and goes no further.
#[derive(Debug, PartialEq)]
pub(super) struct Rejection {
    /// Null when the id of the message could not be read.
    pub(super) id: Value,
    pub(super) code: i32,
    pub(super) text: String,
}

impl Rejection {
    pub(super) fn new(id: Value, code: ErrorCode, text: impl Into<String>) -> Rejection {
        Rejection {
            id,
            code: code.0,
            text: text.into(),
        }
    }

    /// The answer, as one line of JSON.
    pub(super) fn line(&self) -> Vec<u8> {
        let message = json!({
            "jsonrpc": "2.0",
            "id": self.id,
            "error": {"code": self.code, "message": self.text},
        });
        format!("{message}\n").into_bytes()
    }
}

/// What became of a message.
pub(super) type Read = Result<Option<ClientJsonRpcMessage>, Rejection>;

/// Reads one message as `read_message` does, a large one away from the workers of the runtime.
pub(super) fn reading(line: impl AsRef<[u8]> + Send + 'static) -> Decoding<Read> {
    let is_small = cellblock_json::is_small(line.as_ref());
    cellblock_json::decoding(is_small, line, |line| read_message(line.as_ref()))
}

/// Reads one message. Nothing is answered to an empty one, and to notifications and responses of
/// the wrong shape: JSON-RPC allows no answer.
pub(super) fn read_message(line: &[u8]) -> Read {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    let line = line
        .strip_prefix(BYTE_ORDER_MARK)
        .unwrap_or(line)
        .trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let value = cellblock_json::read_strict(line, MESSAGE).map_err(|error| {
        let text = match error {
            ReadError::Excess(excess) => format!("the message is refused: {excess}"),
            ReadError::Json(error) => format!("the message is not valid JSON: {error}"),
        };
        Rejection::new(Value::Null, ErrorCode::PARSE_ERROR, text)
    })?;
    let invalid = |id: Value, text: &str| Err(Rejection::new(id, ErrorCode::INVALID_REQUEST, text));
    let message = match &value {
        Value::Object(message) => message,
        Value::Array(_) => {
            return invalid(
                Value::Null,
                "batches are not supported; send one message at a time",
            );
        }
        _ => return invalid(Value::Null, "a message is a JSON object"),
    };
    let is_answer = message.contains_key("result") || message.contains_key("error");
    let id = match message.get("id") {
        None => None,
        Some(id) if serde_json::from_value::<RequestId>(id.clone()).is_ok() => Some(id.clone()),
        Some(_) if is_answer => return Ok(None),
        Some(_) => return invalid(Value::Null, "an id is a string or a whole number"),
    };
    let known_id = || id.clone().unwrap_or(Value::Null);
    if message
        .get("jsonrpc")
        .is_none_or(|version| version != "2.0")
    {
        return invalid(known_id(), "\"jsonrpc\" must be \"2.0\"");
    }
    match message.get("method") {
        Some(Value::String(_)) => {}
        Some(_) => return invalid(known_id(), "\"method\" must be a string"),
        None if is_answer => {}
        None => return invalid(known_id(), "\"method\" is missing"),
    }
    if message
        .get("params")
        .is_some_and(|params| !params.is_object())
    {
        return match id {
            Some(id) => Err(Rejection::new(
                id,
                ErrorCode::INVALID_PARAMS,
                "\"params\" must be an object",
            )),
            None => Ok(None),
        };
    }
    // The library takes a cursor it cannot read for none at all, and would answer with the first
    // page.
    let cursor = message
        .get("params")
        .and_then(|params| params.get("cursor"));
    if let (Some(id), Some(cursor)) = (&id, cursor)
        && is_list(message)
        && !cursor.is_string()
    {
        return Err(Rejection::new(
            id.clone(),
            ErrorCode::INVALID_PARAMS,
            "the cursor in params must be a string",
        ));
    }
    let stands_alone = stands_alone(message);
    match serde_json::from_value::<ClientJsonRpcMessage>(value) {
        Ok(JsonRpcMessage::Request(request)) => match has_wrong_params(&request.request) {
            // In the new era nothing begins a connection, and a request that lacks what that takes
            // does not mean to.
            Some(_) if stands_alone && request.request.method() == "initialize" => Err(
                Rejection::new(known_id(), ErrorCode::METHOD_NOT_FOUND, "initialize"),
            ),
            Some(error) => Err(Rejection::new(known_id(), error.code, error.message)),
            None => Ok(Some(JsonRpcMessage::Request(request))),
        },
        Ok(message) => Ok(Some(message)),
        Err(_) if id.is_some() && !is_answer => invalid(known_id(), "the message is no request"),
        Err(_) => Ok(None),
    }
}

/// Tells whether a request says by itself that it is of the era in which each one does.
fn stands_alone(message: &Map<String, Value>) -> bool {
    let version = message
        .get("params")
        .and_then(|params| params.get("_meta")?.get(PROTOCOL_VERSION)?.as_str());
    version.is_some_and(|version| version >= "2026-07-28")
}

fn is_list(message: &serde_json::Map<String, Value>) -> bool {
    message
        .get("method")
        .and_then(Value::as_str)
        .is_some_and(|method| method.ends_with("/list"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_rejected(line: &str, id: Value, code: i32, words: &str) {
        let rejection = read_message(line.as_bytes()).expect_err("the line should be rejected");
        assert_eq!(
            (rejection.id, rejection.code),
            (id, code),
            "{}",
            rejection.text
        );
        assert!(
            rejection.text.contains(words),
            "{words:?} is not in {:?}",
            rejection.text
        );
    }

    #[test]
    fn empty_lines_and_answers_of_no_use_are_passed_over() {
        for line in [
            "",
            "  \r",
            "\u{feff}",
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"x"}}"#,
        ] {
            assert!(matches!(read_message(line.as_bytes()), Ok(None)), "{line}");
        }
        let notification = r#"{"jsonrpc":"2.0","method":"notifications/initialized","params":[]}"#;
        assert!(matches!(read_message(notification.as_bytes()), Ok(None)));
    }

    #[test]
    fn a_sound_request_is_read_also_with_carriage_return_and_byte_order_mark() {
        for line in [
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\r",
            "\u{feff}{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"tools/list\",\"params\":{}}",
        ] {
            assert!(
                matches!(
                    read_message(line.as_bytes()),
                    Ok(Some(JsonRpcMessage::Request(_)))
                ),
                "{line}"
            );
        }
    }

    #[test]
    fn what_is_no_json_is_a_parse_error_without_id() {
        for line in ["garbage", "{\"jsonrpc\":", "{} {}", "\"\\ud800\""] {
            check_rejected(line, Value::Null, -32700, "not valid JSON");
        }
        assert_eq!(read_message(b"{\"a\":\"\xff\"}").unwrap_err().code, -32700);
    }

    #[test]
    fn deeply_nested_json_is_refused_without_harm() {
        check_rejected(
            &"[".repeat(100_000),
            Value::Null,
            -32700,
            "nested deeper than 64",
        );
    }

    #[test]
    fn batches_are_refused_clearly() {
        check_rejected(
            r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#,
            Value::Null,
            -32600,
            "batches are not supported",
        );
        check_rejected("[]", Value::Null, -32600, "batches");
    }

    #[test]
    fn messages_of_the_wrong_shape_are_invalid_requests() {
        check_rejected("5", Value::Null, -32600, "a JSON object");
        check_rejected("{}", Value::Null, -32600, "jsonrpc");
        check_rejected(
            r#"{"jsonrpc":"1.0","id":4,"method":"ping"}"#,
            json!(4),
            -32600,
            "jsonrpc",
        );
        check_rejected(
            r#"{"jsonrpc":"2.0","id":4,"method":7}"#,
            json!(4),
            -32600,
            "method",
        );
        check_rejected(r#"{"jsonrpc":"2.0","id":4}"#, json!(4), -32600, "method");
    }

    #[test]
    fn ids_are_strings_or_whole_numbers() {
        for id in ["1.5", "null", "true", "[1]", "{}"] {
            let line = format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#);
            check_rejected(&line, Value::Null, -32600, "an id is");
        }
    }

    #[test]
    fn wrongly_typed_parameters_of_a_known_method_are_invalid_parameters() {
        for (method, params) in [
            ("tools/call", "5"),
            ("tools/call", "{}"),
            ("tools/call", r#"{"name":5}"#),
            ("tools/call", r#"{"name":"reset","arguments":[1]}"#),
            ("tools/list", r#"{"cursor":5}"#),
            ("resources/read", r#"{"uri":5}"#),
            ("initialize", "{}"),
        ] {
            let line =
                format!(r#"{{"jsonrpc":"2.0","id":"x","method":"{method}","params":{params}}}"#);
            check_rejected(&line, json!("x"), -32602, "params");
        }
    }

    #[test]
    fn a_request_that_stands_alone_cannot_begin_a_connection() {
        let greeting = |version: &str| {
            let params = json!({"_meta": {PROTOCOL_VERSION: version}});
            json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}).to_string()
        };
        check_rejected(&greeting("2025-11-25"), json!(1), -32602, "params"); // control
        check_rejected(&greeting("2026-07-28"), json!(1), -32601, "initialize");
    }

    #[test]
    fn unknown_methods_are_left_to_the_handler() {
        let line = br#"{"jsonrpc":"2.0","id":1,"method":"what/ever","params":{"a":1}}"#;
        assert!(matches!(
            read_message(line),
            Ok(Some(JsonRpcMessage::Request(_)))
        ));
    }

    #[test]
    fn a_rejection_is_one_line_with_an_explicit_id() {
        let line = Rejection::new(Value::Null, ErrorCode::PARSE_ERROR, "a\nb").line();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let value: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(
            value,
            json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "a\nb"}})
        );
    }

    #[test]
    fn the_same_key_twice_is_refused_at_every_level() {
        for twice in [
            r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/list"}"#,
            concat!(
                r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","#,
                r#""params":{"name":"reset","arguments":{"a":1,"a":2}}}"#
            ),
            r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":[{"b":1,"\u0062":2}]}}"#,
        ] {
            check_rejected(twice, Value::Null, -32700, "the same key twice");
        }
        let once = r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":[{"b":1},{"b":2}]}}"#;
        assert!(matches!(read_message(once.as_bytes()), Ok(Some(_))));
    }

    #[test]
    fn a_message_that_would_take_much_memory_is_refused_before_it_is_decoded() {
        let call = |count: usize| {
            let many = r#"{"":0},"#.repeat(count);
            format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"x":[{many}0]}}}}"#)
        };
        check_rejected(
            &call(1_000_000),
            Value::Null,
            -32700,
            "more than 4096 KiB of memory",
        );
        assert!(read_message(call(1000).as_bytes()).is_ok(), "the control");
        let long =
            json!({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"x": call(1_000_000)}})
                .to_string();
        assert!(
            read_message(long.as_bytes()).is_ok(),
            "the control: as text it is no structure"
        );
    }

    #[test]
    fn nesting_is_read_up_to_the_edge_and_refused_beyond() {
        let nested = |levels: usize| {
            let list = format!("{}{}", "[".repeat(levels), "]".repeat(levels));
            format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"x":{list}}}}}"#)
        };
        assert!(read_message(nested(MESSAGE.depth - 2).as_bytes()).is_ok());
        assert!(read_message(nested(MESSAGE.depth - 1).as_bytes()).is_err());
    }
}
