//! Outcomes for the tests of the profiles.

use std::time::Duration;

use rmcp::model::CallToolResult;
use serde_json::{Value, json};

use crate::sandbox::{Isolation, MemoryUse};
use crate::session::{
    ExecutionId, Image, ImageType, Outcome, Output, Part, PythonError, Status, Stream,
};

pub(super) fn outcome(status: Status, parts: Vec<Part>) -> Outcome {
    Outcome {
        execution: ExecutionId(1),
        status,
        output: Output {
            parts,
            ..Output::default()
        },
        duration: Duration::from_millis(1),
        memory: MemoryUse::default(),
        processor_time: Duration::from_millis(1),
        variables: None,
        files: None,
        isolation: Isolation::default(),
        can_undo: 0,
        blocked: Vec::new(),
        notes: Vec::new(),
        tool_calls: Default::default(),
        rulings: Vec::new(),
        first_line: String::new(),
        others: Default::default(),
    }
}

pub(super) fn text(stream: Stream, text: &str) -> Part {
    Part::Text {
        stream,
        text: text.to_owned(),
    }
}

pub(super) fn picture() -> Part {
    Part::Image(Image {
        kind: ImageType::Png,
        bytes: vec![1, 2, 3],
        width: 1,
        height: 1,
        scaled_from: None,
        frames: None,
    })
}

pub(super) fn raised() -> PythonError {
    PythonError {
        name: "ValueError".to_owned(),
        message: "bad".to_owned(),
        traceback: "Traceback\n  line 1\nValueError: bad\n".to_owned(),
        line: Some(1),
    }
}

/// The texts of a result and its pictures as a word, and whether it is an error.
pub(super) fn told(result: &CallToolResult) -> (bool, Vec<String>) {
    let blocks = json!(result.content);
    let blocks = blocks.as_array().cloned().unwrap_or_default();
    let block = |block: &Value| {
        block["text"]
            .as_str()
            .map_or("<picture>".to_owned(), str::to_owned)
    };
    (
        result.is_error == Some(true),
        blocks.iter().map(block).collect(),
    )
}
