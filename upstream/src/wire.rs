//! Parses one message of a server, with limits.
//!
//! rmcp determines the type of a result by trying all result types. That makes several copies of a
//! large result, and fails entirely on an unknown kind of content. So tool results are passed on as
//! raw JSON; rmcp parses only what it needs itself for a connection (the handshake, the list of
//! tools).

use cellblock_json::{Budget, Decoding, Excess, MAX_DEPTH};
use rmcp::RoleClient;
use rmcp::model::{
    CustomResult, ErrorCode, ErrorData, JsonRpcMessage, NumberOrString, RequestId, ServerResult,
};
use rmcp::service::RxJsonRpcMessage;
use serde_json::Value;

/// A message from a server.
pub(crate) type Message = RxJsonRpcMessage<RoleClient>;

/// Code of our own error that replaces an oversized response.
const TOO_LARGE: ErrorCode = ErrorCode(-31_950);
/// Code of our own error that replaces a response that would take too much memory.
const TOO_MANY_VALUES: ErrorCode = ErrorCode(-31_952);
/// Code of our own error that replaces an unreadable response.
const UNREADABLE: ErrorCode = ErrorCode(-31_951);

/// Limits on a message, in addition to its size. rmcp tries several types on the messages that it
/// parses, and keeps copies meanwhile.
const MESSAGE: Budget = Budget {
    depth: MAX_DEPTH,
    memory: 24 * 1024 * 1024,
};

/// Notifications that are used here.
const WANTED: [&str; 4] = [
    "notifications/cancelled",
    "notifications/progress",
    "notifications/subscriptions/acknowledged",
    "notifications/tools/list_changed",
];

/// Parses a message like `read`, but a large one outside the runtime's worker threads.
pub(crate) fn reading(bytes: impl AsRef<[u8]> + Send + 'static) -> Decoding<Option<Message>> {
    let is_small = cellblock_json::is_small(bytes.as_ref());
    cellblock_json::decoding(is_small, bytes, |bytes| read(bytes.as_ref()))
}

/// Parses a message. Returns `None` for anything else, and for messages that are not used here.
///
/// A response that is not JSON, is nested deeper than 127 levels, or would take too much memory
/// becomes an error; otherwise its caller would wait forever.
pub(crate) fn read(bytes: &[u8]) -> Option<Message> {
    if let Some(refused) = excess(bytes) {
        return refused;
    }
    let Ok(mut value) = serde_json::from_slice::<Value>(bytes) else {
        return unreadable(bytes);
    };
    let object = value.as_object_mut()?;
    if let Some(method) = object.get("method").and_then(Value::as_str) {
        let is_request = object.contains_key("id");
        return if is_request || WANTED.contains(&method) {
            serde_json::from_value(value).ok()
        } else {
            None
        };
    }
    let is_for_rmcp = object.get("result").is_some_and(|result| {
        ["capabilities", "supportedVersions", "tools"]
            .iter()
            .any(|key| result.get(key).is_some())
            || result
                .pointer("/_meta/io.modelcontextprotocol~1subscriptionId")
                .is_some()
    });
    if is_for_rmcp && let Ok(message) = serde_json::from_value::<Message>(value.clone()) {
        return Some(message);
    }
    let object = value.as_object_mut()?;
    let id = object.get("id").and_then(id_of);
    if let Some(result) = object.remove("result") {
        return Some(JsonRpcMessage::response(
            ServerResult::CustomResult(CustomResult(result)),
            id?,
        ));
    }
    let error = object.remove("error")?;
    let code = error
        .get("code")
        .and_then(Value::as_i64)
        .and_then(|code| i32::try_from(code).ok())
        .unwrap_or_default();
    let message = error
        .get("message")
        .and_then(Value::as_str)
        .unwrap_or("an error without a message")
        .to_owned();
    let data = error.get("data").cloned();
    Some(JsonRpcMessage::error(
        ErrorData::new(ErrorCode(code), message, data),
        id,
    ))
}

/// Returns the replacement for a response that is nested too deeply or contains too many values, or
/// `None` if it is within the limits.
pub(crate) fn excess(bytes: &[u8]) -> Option<Option<Message>> {
    match MESSAGE.check(bytes) {
        Ok(_) => None,
        Err(Excess::Depth(_)) => Some(unreadable(bytes)),
        Err(excess @ Excess::Memory(_)) => {
            tracing::warn!(%excess, "an MCP server sent a message that holds too much");
            Some(id_in(bytes).map(|id| {
                refusal(
                    id,
                    TOO_MANY_VALUES,
                    format!("the answer is refused: {excess}"),
                )
            }))
        }
    }
}

/// Returns the replacement for an oversized response.
pub(crate) fn too_large(id: RequestId, largest: usize) -> Message {
    refusal(
        id,
        TOO_LARGE,
        format!("the answer has more than {largest} bytes"),
    )
}

fn refusal(id: RequestId, code: ErrorCode, text: String) -> Message {
    JsonRpcMessage::error(ErrorData::new(code, text, None), Some(id))
}

fn id_in(bytes: &[u8]) -> Option<RequestId> {
    let mut finder = IdFinder::default();
    finder.feed(bytes);
    finder.found()
}

pub(crate) fn is_too_large(error: &ErrorData) -> bool {
    error.code == TOO_LARGE
}

/// Returns the replacement for an unreadable response.
pub(crate) fn unreadable(bytes: &[u8]) -> Option<Message> {
    id_in(bytes).map(|id| refusal(id, UNREADABLE, "the answer cannot be read".to_owned()))
}

pub(crate) fn has_too_many_values(error: &ErrorData) -> bool {
    error.code == TOO_MANY_VALUES
}

pub(crate) fn is_unreadable(error: &ErrorData) -> bool {
    error.code == UNREADABLE
}

fn id_of(id: &Value) -> Option<RequestId> {
    match id {
        Value::Number(number) => number.as_i64().map(NumberOrString::Number),
        Value::String(text) => Some(NumberOrString::String(text.as_str().into())),
        _ => None,
    }
}

/// Finds the `id` of a message that is discarded while it is read.
///
/// It keeps only a few bytes, whatever the size of the message, and parses just enough JSON to
/// identify the outermost `id`.
#[derive(Default)]
pub(crate) struct IdFinder {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    /// Whether the next string at the top level is a key.
    expects_key: bool,
    place: Place,
    text: Vec<u8>,
    found: Option<RequestId>,
}

#[derive(Default, PartialEq)]
enum Place {
    #[default]
    Elsewhere,
    Key,
    /// After the key `id`.
    Id,
}

/// Our own ids are never longer.
const MAX_ID_LENGTH: usize = 64;

impl IdFinder {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.step(*byte));
    }

    pub(crate) fn found(&self) -> Option<RequestId> {
        self.found.clone()
    }

    fn step(&mut self, byte: u8) {
        if self.in_string {
            self.step_in_string(byte);
            return;
        }
        match byte {
            b'"' => {
                self.in_string = true;
                if self.depth == 1 && self.expects_key {
                    self.place = Place::Key;
                    self.text.clear();
                } else if self.place == Place::Id {
                    self.keep(byte);
                }
            }
            b'{' | b'[' => {
                self.depth += 1;
                self.expects_key = self.depth == 1;
            }
            b'}' | b']' => {
                self.finish_value();
                self.depth = self.depth.saturating_sub(1);
            }
            b',' => self.finish_value(),
            b':' => {}
            byte if self.place == Place::Id && !byte.is_ascii_whitespace() => self.keep(byte),
            _ => {}
        }
    }

    fn step_in_string(&mut self, byte: u8) {
        let ends = byte == b'"' && !self.is_escaped;
        self.is_escaped = byte == b'\\' && !self.is_escaped;
        match self.place {
            Place::Key if ends => {
                self.expects_key = false;
                self.place = if self.text == b"id" {
                    Place::Id
                } else {
                    Place::Elsewhere
                };
                self.text.clear();
            }
            Place::Key | Place::Id => self.keep(byte),
            Place::Elsewhere => {}
        }
        self.in_string = !ends;
    }

    fn keep(&mut self, byte: u8) {
        if self.text.len() < MAX_ID_LENGTH {
            self.text.push(byte);
        }
    }

    fn finish_value(&mut self) {
        if self.depth != 1 {
            return;
        }
        if self.place == Place::Id {
            self.found = serde_json::from_slice(&self.text)
                .ok()
                .as_ref()
                .and_then(id_of);
            self.place = Place::Elsewhere;
        }
        self.expects_key = true;
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{ServerNotification, ServerRequest};

    use super::*;

    #[test]
    fn an_answer_that_nobody_can_read_is_an_error_and_the_depth_is_that_of_the_parser() {
        let deep = |levels: usize| {
            format!(
                r#"{{"text":"]\"[","result":{}1{},"id":"a"}}"#,
                "[".repeat(levels),
                "]".repeat(levels)
            )
        };
        for (levels, is_too_deep) in [(1, false), (126, false), (127, true), (100_000, true)] {
            let text = deep(levels);
            assert_eq!(
                serde_json::from_str::<Value>(&text).is_err(),
                is_too_deep,
                "{levels}"
            );
            assert_eq!(excess(text.as_bytes()).is_some(), is_too_deep, "{levels}");
            let is_error = matches!(
                read(text.as_bytes()),
                Some(JsonRpcMessage::Error(error)) if is_unreadable(&error.error)
            );
            assert_eq!(is_error, is_too_deep, "{levels}");
        }
        assert!(read(b"no JSON at all").is_none());
    }

    #[test]
    fn an_answer_that_would_take_much_memory_is_an_error_and_spoils_no_other() {
        let answer = |count: usize| {
            let many = r#"{"":0},"#.repeat(count);
            format!(
                r#"{{"jsonrpc":"2.0","id":7,"result":{{"content":[],"structuredContent":[{many}0]}}}}"#
            )
        };
        let Some(JsonRpcMessage::Error(error)) = read(answer(2_000_000).as_bytes()) else {
            panic!("it was read")
        };
        assert!(has_too_many_values(&error.error), "{:?}", error.error);
        assert_eq!(error.id, Some(NumberOrString::Number(7)));
        assert!(
            matches!(
                read(answer(10_000).as_bytes()),
                Some(JsonRpcMessage::Response(_))
            ),
            "the control"
        );
        let long = format!(r#"{{"id":7,"result":{}}}"#, Value::from(answer(1_000_000)));
        assert!(
            matches!(read(long.as_bytes()), Some(JsonRpcMessage::Response(_))),
            "the control: a text of that size"
        );
        // Messages that are not responses are dropped.
        let many = r#"{"":0},"#.repeat(100_000);
        assert!(
            read(format!(r#"{{"method":"notifications/progress","params":[{many}0]}}"#).as_bytes())
                .is_none()
        );
    }

    #[test]
    fn results_of_tools_are_handed_on_as_they_are() {
        let result =
            r#"{"content":[{"type":"hologram","x":1}],"structuredContent":null,"action":"accept"}"#;
        let message =
            read(format!(r#"{{"jsonrpc":"2.0","id":7,"result":{result}}}"#).as_bytes()).unwrap();
        let JsonRpcMessage::Response(response) = message else {
            panic!("{message:?}")
        };
        assert_eq!(response.id, NumberOrString::Number(7));
        let ServerResult::CustomResult(found) = response.result else {
            panic!("{:?}", response.result)
        };
        assert_eq!(found.0, serde_json::from_str::<Value>(result).unwrap());
    }

    #[test]
    fn what_rmcp_needs_is_read_by_it() {
        let list = r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"a","inputSchema":{"type":"object"}}]}}"#;
        let JsonRpcMessage::Response(response) = read(list.as_bytes()).unwrap() else {
            panic!("no response")
        };
        assert!(matches!(response.result, ServerResult::ListToolsResult(_)));
        // One tool without a schema: rmcp rejects it, but the list is still delivered.
        let list = r#"{"jsonrpc":"2.0","id":1,"result":{"tools":[{"name":"a"}]}}"#;
        let JsonRpcMessage::Response(response) = read(list.as_bytes()).unwrap() else {
            panic!("no response")
        };
        assert!(matches!(response.result, ServerResult::CustomResult(_)));
    }

    #[test]
    fn what_nobody_reads_is_dropped() {
        let progress = r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":2}}"#;
        let Some(JsonRpcMessage::Notification(kept)) = read(progress.as_bytes()) else {
            panic!("dropped")
        };
        assert!(matches!(
            kept.notification,
            ServerNotification::ProgressNotification(_)
        ));
        let ping = r#"{"jsonrpc":"2.0","id":"a","method":"ping"}"#;
        let Some(JsonRpcMessage::Request(kept)) = read(ping.as_bytes()) else {
            panic!("dropped")
        };
        assert!(matches!(kept.request, ServerRequest::PingRequest(_)));
        for line in [
            r#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}"#,
            "Server started on stdio",
            "[1,2]",
            "{}",
            r#"{"jsonrpc":"2.0","id":null,"result":{}}"#,
            "\u{feff}",
            "",
        ] {
            assert!(read(line.as_bytes()).is_none(), "{line}");
        }
        assert!(read(&[0xff, 0xfe, b'{']).is_none());
    }

    #[test]
    fn an_error_of_any_shape_reaches_its_request() {
        for (error, code, text) in [
            (r#"{"code":-32601,"message":"no"}"#, -32601, "no"),
            (r#"{"code":1e99}"#, 0, "an error without a message"),
            (r#""broken""#, 0, "an error without a message"),
        ] {
            let message = read(format!(r#"{{"id":"x","error":{error}}}"#).as_bytes()).unwrap();
            let JsonRpcMessage::Error(found) = message else {
                panic!("{message:?}")
            };
            assert_eq!((found.error.code.0, &*found.error.message), (code, text));
            assert_eq!(found.id, Some(NumberOrString::String("x".into())));
        }
    }

    #[test]
    fn the_outermost_id_is_found_wherever_it_is() {
        let number = |number| Some(NumberOrString::Number(number));
        for (text, expected) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{"id":8}}"#, number(7)),
            (
                r#"{"result":{"id":8,"a":["id",9]},"jsonrpc":"2.0","id" : 12 }"#,
                number(12),
            ),
            (r#"{"result":"\"id\":3,\\","id":4}"#, number(4)),
            (
                r#"{"x":"id","id":"a\"b"}"#,
                Some(NumberOrString::String("a\"b".into())),
            ),
            (r#"{"result":[{"id":1}]}"#, None),
            (r#"{"id":null}"#, None),
            (r#"["id",5]"#, None),
            (r#"{"id":7"#, None),
        ] {
            let mut finder = IdFinder::default();
            text.as_bytes()
                .chunks(3)
                .for_each(|chunk| finder.feed(chunk));
            assert_eq!(finder.found(), expected, "{text}");
        }
    }
}
