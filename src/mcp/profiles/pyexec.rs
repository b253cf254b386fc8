//! `mcp-pyexec`: one tool, and a result of text and pictures in the order in which they came.
//!
//! A session is what that server's documents say: variables stay between calls with the same
//! `session_id`. Nobody but its owner can name it, whatever it is called. Standard error is marked,
//! as it was.

use std::time::Duration;

use async_trait::async_trait;
use rmcp::model::{CallToolResponse, CallToolResult, ContentBlock, ErrorData, JsonObject, Tool};
use serde_json::json;

use super::super::arguments::{MAX_CODE_BYTES, Unnamed};
use super::super::toolbox::{Entry, Introduction, ToolContext, Toolbox};
use super::super::turns::Extent;
use super::super::{McpSettings, render};
use super::{Ran, Written, failed, schema, telling, unknown_tool};
use crate::auth::Scope;
use crate::session::{Outcome, Part, SessionId, Status, Stream};

/// Characters of output. Above that, that server gave nothing at all; here the middle is cut.
const MAX_OUTPUT: usize = 1_000_000;

const WAY_BACK: &str = "The next call starts Python anew.";

const EXECUTE: Entry = Entry {
    name: "execute_python",
    scope: Scope::Execute,
    extent: Extent::FirstStep,
};

pub(super) struct Pyexec {
    tools: Vec<Tool>,
    timeout: Duration,
}

impl Pyexec {
    pub(super) fn new(settings: &McpSettings) -> Pyexec {
        Pyexec {
            tools: vec![tool()],
            timeout: settings.default_timeout,
        }
    }

    async fn execute(
        &self,
        tool_context: ToolContext<'_>,
        arguments: JsonObject,
    ) -> Result<CallToolResult, String> {
        let _slot = tool_context
            .server
            .call_slot(tool_context.owner)
            .map_err(|busy| format!("✗ Error: {busy}"))?;
        let mut written = Written::new(EXECUTE.name, &self.tools, arguments)
            .map_err(|bad| format!("✗ Error: {bad}"))?;
        let code = written
            .take("code")
            .text(MAX_CODE_BYTES, 0)
            .map_err(|bad| format!("✗ Error: {bad}"))?;
        let session = written
            .take("session_id")
            .session(Unnamed::Default)
            .map_err(|bad| format!("✗ Error: {bad}"))?;
        if code.trim().is_empty() {
            return Err("Error: No Python code provided".to_owned());
        }
        let ran = tool_context
            .run_anew(&session, &code, self.timeout, MAX_OUTPUT)
            .await;
        let Ran { outcome, anew } = ran.map_err(|refused| {
            format!(
                "✗ Error executing code: {}",
                telling::refusal(&refused, WAY_BACK)
            )
        })?;
        Ok(result(&outcome, anew.as_deref()))
    }
}

#[async_trait]
impl Toolbox for Pyexec {
    fn tools(&self) -> &[Tool] {
        &self.tools
    }

    fn find(&self, name: &str) -> Option<Entry> {
        Some(EXECUTE).filter(|entry| entry.name == name)
    }

    async fn call(
        &self,
        tool_context: ToolContext<'_>,
        _tool: Entry,
        arguments: JsonObject,
    ) -> CallToolResponse {
        self.execute(tool_context, arguments)
            .await
            .unwrap_or_else(failed)
            .into()
    }

    fn unknown(&self, name: &str) -> Result<CallToolResponse, ErrorData> {
        Ok(unknown_tool(name))
    }

    fn introduction(&self) -> Option<Introduction> {
        Some(Introduction {
            name: "ipython-executor",
            instructions: None,
        })
    }
}

/// Writes what a cell gave as blocks in its order.
fn result(outcome: &Outcome, anew: Option<&str>) -> CallToolResult {
    let mut blocks = Blocks::default();
    if let Some(anew) = anew {
        blocks.line(anew);
    }
    for part in &outcome.output.parts {
        match part {
            Part::Text { stream, text } => blocks.text(*stream, text),
            Part::Cut { chars, lines } => blocks.line(&render::cut_mark(*chars, *lines, None)),
            Part::Image(image) => blocks.put(telling::image_block(image)),
        }
    }
    for blocked in &outcome.blocked {
        blocks.line(&blocked.to_string());
    }
    match &outcome.status {
        Status::Completed => {}
        Status::Raised(error) => blocks.line(&format!("ERROR: {}", render::summary(error))),
        Status::TimedOut { limit, state } => {
            let after = telling::kept_or_lost(*state, WAY_BACK);
            blocks.line(&format!(
                "✗ Execution timed out after {} seconds. {after}",
                limit.as_secs_f64()
            ));
        }
        other => blocks.line(&format!(
            "✗ Error: {}",
            telling::ending(other, WAY_BACK).unwrap_or_default()
        )),
    }
    let content = blocks.finish();
    match outcome.status {
        Status::Completed => CallToolResult::success(content),
        _ => CallToolResult::error(content),
    }
}

/// Blocks under way.
#[derive(Default)]
struct Blocks {
    done: Vec<ContentBlock>,
    page: render::Page,
    /// The last text was of standard error, so that it is marked already.
    is_marked: bool,
}

impl Blocks {
    fn text(&mut self, stream: Stream, text: &str) {
        let is_error = stream == Stream::Stderr;
        if is_error && !self.is_marked {
            self.page.begin_line();
            self.page.text.push_str("ERROR: ");
        } else if !is_error && self.is_marked {
            self.page.begin_line();
        }
        self.is_marked = is_error;
        self.page.text.push_str(text);
    }

    fn line(&mut self, line: &str) {
        self.is_marked = false;
        self.page.line(line);
    }

    fn put(&mut self, block: ContentBlock) {
        self.flush();
        self.done.push(block);
    }

    fn flush(&mut self) {
        self.is_marked = false;
        let text = std::mem::take(&mut self.page).text;
        if !text.trim().is_empty() {
            self.done.push(ContentBlock::text(text.trim()));
        }
    }

    fn finish(mut self) -> Vec<ContentBlock> {
        self.flush();
        if self.done.is_empty() {
            self.done
                .push(ContentBlock::text("✓ Execution successful (no output)"));
        }
        self.done
    }
}

fn tool() -> Tool {
    Tool::new(
        EXECUTE.name,
        "Runs Python code in a sandbox and returns what it printed, the value of its last \
         expression and its plots, in order. \
         Variables stay for the next call with the same session_id.",
        schema(
            json!({
                "code": {"type": "string", "description": "Python code."},
                "session_id": {
                    "type": "string",
                    "default": SessionId::DEFAULT,
                    "description": "Calls with the same one share variables.",
                },
            }),
            &["code"],
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::examples::{outcome, picture, raised, text, told};
    use super::*;
    use crate::session::StateAfter;

    #[test]
    fn text_and_pictures_keep_their_order() {
        let parts = vec![
            text(Stream::Stdout, "one\n"),
            picture(),
            text(Stream::Stdout, "two\n"),
            picture(),
            picture(),
            text(Stream::Value, "3"),
        ];
        let (failed, blocks) = told(&result(&outcome(Status::Completed, parts), None));
        assert!(!failed);
        assert_eq!(
            blocks,
            ["one", "<picture>", "two", "<picture>", "<picture>", "3"]
        );
    }

    #[test]
    fn standard_error_is_marked_where_it_begins() {
        let parts = vec![
            text(Stream::Stdout, "out"),
            text(Stream::Stderr, "first\n"),
            text(Stream::Stderr, "second"),
            text(Stream::Stdout, "out again"),
        ];
        let (_, blocks) = told(&result(&outcome(Status::Completed, parts), None));
        assert_eq!(blocks, ["out\nERROR: first\nsecond\nout again"]);
    }

    #[test]
    fn nothing_at_all_reads_as_success() {
        let (failed, blocks) = told(&result(&outcome(Status::Completed, vec![]), None));
        assert_eq!(
            (failed, &blocks[..]),
            (
                false,
                &["✓ Execution successful (no output)".to_owned()][..]
            )
        );
    }

    #[test]
    fn failures_end_with_their_reason_and_are_errors() {
        let parts = || {
            vec![
                text(Stream::Stdout, "before\n"),
                text(Stream::Traceback, "trace\n"),
            ]
        };
        let (failed, blocks) = told(&result(&outcome(Status::Raised(raised()), parts()), None));
        assert_eq!(
            (failed, &blocks[0][..]),
            (true, "before\ntrace\nERROR: ValueError: bad")
        );
        let status = Status::TimedOut {
            limit: Duration::from_secs(30),
            state: StateAfter::Kept,
        };
        let (failed, blocks) = told(&result(&outcome(status, vec![]), None));
        assert!(
            failed && blocks[0].starts_with("✗ Execution timed out after 30 seconds. Variables"),
            "{blocks:?}"
        );
    }

    #[test]
    fn a_python_that_was_started_anew_is_told_first() {
        let parts = vec![text(Stream::Stdout, "1\n")];
        let (_, blocks) = told(&result(&outcome(Status::Completed, parts), Some("(anew)")));
        assert_eq!(blocks, ["(anew)\n1"]);
    }
}
