//! Results as a model reads them: from what happened to content blocks and structured content.
//! Pure, no waiting, no state.
//!
//! The text of an execution is written for a model first: everything the code produced in true
//! order (standard error in its place, images as numbered marks, cuts with their size and where to
//! read the rest), then, when something went wrong, how it ended, what is lost and what to do.
//! Image blocks follow in the order of their marks. The same text and every figure are in the
//! structured content, for clients that show only that.
//!
//! An execution without output reads `(no output)`: an empty text block leaves a model guessing
//! whether the call worked, and some model interfaces refuse empty blocks. `output.chars` is 0
//! then, so a program can still tell.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::{Map, Value, json};

use super::duration::Seconds;
use super::jobs::JobKind;
use super::refusals::{self, ToolWords};
use super::resources;
use crate::sandbox::{Exit, Isolation, LayerState};
use crate::session::tools::{CallEnd, ToolCalls};
use crate::session::{
    CheckpointInfo, ExecutionId, FileChanges, FileNote, FilesCarried, Image, LateOutput, Others,
    Outcome, Output, OutputId, OutputPart, Part, PythonError, SessionId, StateAfter, Status,
    Stream, Uncollected, Underway, Variable, VariableChanges,
};

/// What an execution without output reads.
pub(super) const NO_OUTPUT: &str = "(no output)";

/// Characters of an error and its message after a traceback that was cut.
const MAX_SUMMARY_LENGTH: usize = 200;

/// Results that wait to be collected and are told one by one; the rest is counted.
const MAX_UNCOLLECTED_TOLD: usize = 5;

/// Kinds of failed calls of MCP tools that are told.
const MAX_FAILURES: usize = 5;

/// Why a result is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// To the call that began the execution.
    Answer,
    /// To somebody who asked for a result of the session.
    Check {
        /// It was told before.
        again: bool,
    },
}

/// Renders a finished execution. Every status but `Completed` sets `isError`.
pub(super) fn execution(
    session: &SessionId,
    outcome: &Outcome,
    occasion: Occasion,
) -> CallToolResult {
    let resource = (outcome.output.cut_chars > 0)
        .then(|| resources::output_uri(session, outcome.execution.into()));
    let figures: Vec<String> = (1..=outcome.output.figures)
        .map(|number| {
            let output = OutputId {
                execution: outcome.execution,
                part: OutputPart::Figure(number),
            };
            resources::output_uri(session, output)
        })
        .collect();
    let mut page = Page::default();
    if let Occasion::Check { .. } = occasion {
        page.line(&heading(outcome.execution, &outcome.first_line));
    }
    page.text
        .push_str(&execution_text(outcome, resource.as_deref()));
    for (number, uri) in (1..).zip(&figures) {
        page.line(&format!("[figure {number} as JSON: resource {uri}]"));
    }
    let notes = outcome.notes.iter();
    let mut notes = notes
        .map(|note| refusals::note_told(note, &ToolWords::DEFAULT))
        .collect::<Vec<_>>();
    if occasion == (Occasion::Check { again: true }) {
        page.line(told_before(&outcome.others));
    }
    for line in other_results(session, &outcome.others) {
        page.line(&line);
        notes.push(line);
    }
    let text = page.finish();
    let images: Vec<&Image> = images(&outcome.output).collect();
    let structured = json!({
        "session_id": session.as_str(),
        "execution": outcome.execution.0,
        "status": outcome.status.name(),
        "text": text,
        "images": images
            .iter()
            .map(|image| {
                json!({
                    "mime_type": image.kind.mime(),
                    "width": image.width,
                    "height": image.height,
                })
            })
            .collect::<Vec<_>>(),
        "error": match &outcome.status {
            Status::Raised(error) => error_fields(error),
            _ => Value::Null,
        },
        "duration_ms": outcome.duration.as_micros() as f64 / 1000.0,
        "cpu_ms": outcome.processor_time.as_micros() as f64 / 1000.0,
        "memory_bytes": outcome.memory.now,
        "peak_memory_bytes": outcome.memory.peak,
        "variables": outcome.variables.as_ref().map(variable_fields),
        "files": outcome.files.as_ref().map(file_fields),
        "output": {
            "chars": outcome.output.total_chars,
            "lines": outcome.output.total_lines,
            "cut_chars": outcome.output.cut_chars,
            "resource": resource,
            "figures": figures,
            "late_chars": outcome.output.late.as_ref().map_or(0, |late| late.text.chars().count()),
            "late_omitted_chars": outcome.output.late.as_ref().map_or(0, |late| late.omitted),
        },
        "can_undo": outcome.can_undo,
        "isolation": isolation_fields(&outcome.isolation),
        "blocked": outcome.blocked.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "tool_calls": {"total": outcome.tool_calls.total, "failed": outcome.tool_calls.failed},
        "notes": notes,
    });
    let mut content = vec![ContentBlock::text(text)];
    content.extend(
        images
            .iter()
            .map(|image| ContentBlock::image(STANDARD.encode(&image.bytes), image.kind.mime())),
    );
    finished(
        content,
        structured,
        !matches!(outcome.status, Status::Completed),
    )
}

/// Renders a cell that goes on. Its fields are those of a finished one, without what is not known
/// yet.
pub(super) fn underway(underway: &Underway, occasion: Occasion) -> CallToolResult {
    let session = underway.session.as_str();
    let elapsed = Seconds(whole(underway.elapsed));
    let others = match underway.ahead {
        0 => String::new(),
        1 => " One other is before it.".to_owned(),
        ahead => format!(" {ahead} others are before it."),
    };
    let (status, state) = match (underway.ahead, &underway.waits_for) {
        (0, None) => (
            "running",
            format!("The cell is still running after {elapsed}."),
        ),
        (_, Some(why)) => (
            "waiting",
            format!("The cell has not begun after {elapsed}: {why}.{others}"),
        ),
        (_, None) => (
            "waiting",
            format!("The cell has not begun after {elapsed}.{others}"),
        ),
    };
    let mut page = Page::default();
    if let Occasion::Check { .. } = occasion {
        page.line(&heading(underway.execution, &underway.first_line));
    }
    if underway.omitted > 0 {
        page.line(&format!(
            "[… {} characters of output before this …]",
            underway.omitted
        ));
    }
    page.text.push_str(&underway.text);
    for asked in &underway.approvals {
        page.line(&format!(
            "It waits until a person has allowed this: {}",
            asked.text
        ));
    }
    page.line(&format!(
        "{state} It goes on; call check_execution with session_id \"{session}\" to hear more."
    ));
    let asked = underway
        .approvals
        .iter()
        .map(|asked| format!("waits for approval: {}", asked.text));
    let mut notes = asked.collect::<Vec<_>>();
    for line in other_results(&underway.session, &underway.others) {
        page.line(&line);
        notes.push(line);
    }
    let text = page.finish();
    let structured = json!({
        "session_id": session,
        "execution": underway.execution.0,
        "status": status,
        "text": text,
        "images": [],
        "error": null,
        "duration_ms": underway.elapsed.as_micros() as f64 / 1000.0,
        "variables": null,
        "files": null,
        "output": {"cut_chars": underway.omitted, "resource": null},
        "isolation": {},
        "blocked": [],
        "notes": notes,
    });
    finished(vec![ContentBlock::text(text)], structured, false)
}

/// Says that work other than a cell has ended, to whoever does not ask for it.
pub(super) fn work_has_ended(kind: JobKind, session: &SessionId) -> String {
    format!(
        "The {} that was begun earlier has ended; call check_execution with \
         session_id \"{session}\" to get its result.",
        kind.name()
    )
}

/// Renders work other than a cell that goes on.
pub(super) fn at_work(session: &SessionId, elapsed: Duration, news: &str) -> CallToolResult {
    let session = session.as_str();
    let news = if news.is_empty() {
        String::new()
    } else {
        format!(" ({news})")
    };
    let text = format!(
        "Still at work after {}{news}. It goes on; call check_execution with \
         session_id \"{session}\" to hear more.",
        Seconds(whole(elapsed))
    );
    let structured = json!({"session_id": session, "status": "running", "text": text});
    finished(vec![ContentBlock::text(text)], structured, false)
}

/// Adds the name of the session to a result whose caller does not know it. Some clients show a
/// model the text only.
pub(super) fn naming(session: &SessionId, result: CallToolResult) -> CallToolResult {
    with_line(
        result,
        &format!("Session: {session} (give it as session_id to go on in this session)"),
    )
}

/// Adds a line to the text of a result, in both places.
pub(super) fn with_line(mut result: CallToolResult, line: &str) -> CallToolResult {
    let extended = |text: &str| {
        if text.is_empty() {
            line.to_owned()
        } else {
            format!("{text}\n{line}")
        }
    };
    match result.content.first_mut() {
        Some(ContentBlock::Text(block)) => block.text = extended(&block.text),
        _ => result.content.push(ContentBlock::text(line)),
    }
    if let Some(Value::String(text)) = result
        .structured_content
        .as_mut()
        .and_then(|fields| fields.get_mut("text"))
    {
        *text = extended(text);
    }
    result
}

/// Says which execution a result is about.
fn heading(execution: ExecutionId, first_line: &str) -> String {
    match first_line {
        "" => format!("Execution {}:", execution.0),
        line => format!("Execution {} (`{line}`):", execution.0),
    }
}

fn told_before(others: &Others) -> &'static str {
    match (others.under_way, &others.uncollected[..]) {
        (0, []) => {
            "Nothing runs and no other result waits; this is the result that was told last, again."
        }
        _ => "This result was told before.",
    }
}

/// Says which other results of a session wait, failed ones first, and how many were discarded.
fn other_results(session: &SessionId, others: &Others) -> Vec<String> {
    let mut lines = Vec::new();
    let mut waiting = others.uncollected.iter().collect::<Vec<_>>();
    waiting.sort_by_key(|result| result.failure.is_none());
    let described = waiting.iter().take(MAX_UNCOLLECTED_TOLD).map(|result| {
        let Uncollected {
            execution,
            first_line,
            failure,
        } = result;
        let ended = failure
            .as_ref()
            .map_or("ok".to_owned(), |why| format!("failed ({why})"));
        format!("execution {} `{first_line}`: {ended}", execution.0)
    });
    let more = waiting.len().saturating_sub(MAX_UNCOLLECTED_TOLD);
    let more = (more > 0).then(|| format!("{more} more"));
    let described = described.chain(more).collect::<Vec<_>>().join("; ");
    match waiting.len() {
        0 => {}
        1 => lines.push(format!(
            "1 other result waits to be collected with check_execution (session_id \"{session}\"): \
             {described}."
        )),
        count => lines.push(format!(
            "{count} other results wait to be collected with check_execution \
             (session_id \"{session}\"), the oldest \
             first: {described}."
        )),
    }
    match others.discarded {
        0 => {}
        1 => lines.push(
            "1 earlier result of this session was discarded because it was never \
                         collected."
                .to_owned(),
        ),
        count => lines.push(format!(
            "{count} earlier results of this session were discarded because they \
                           were never collected."
        )),
    }
    lines
}

/// Renders that a session has nothing to tell.
pub(super) fn nothing_to_check(session: &SessionId) -> CallToolResult {
    let text = format!(
        "Session \"{}\" has run nothing that could be told.",
        session.as_str()
    );
    let structured = json!({"session_id": session.as_str(), "status": "idle", "text": text});
    finished(vec![ContentBlock::text(text)], structured, false)
}

/// Nobody reads fractions of a second in a sentence.
fn whole(duration: Duration) -> Duration {
    Duration::from_secs(duration.as_secs())
}

/// The line about what a copy could not take with it; nothing when it has everything.
pub(super) fn not_carried_over(lost: &[String]) -> Option<String> {
    (!lost.is_empty()).then(|| format!("Not carried over: {}.", lost.join(", ")))
}

/// Renders a call that was not carried out, with the chain of reasons in one sentence.
pub(super) fn refused(error: &(dyn std::error::Error + 'static)) -> CallToolResult {
    CallToolResult::error(vec![ContentBlock::text(refusals::error_text(error))])
}

pub(super) fn finished(
    content: Vec<ContentBlock>,
    structured: Value,
    failed: bool,
) -> CallToolResult {
    let mut result = if failed {
        CallToolResult::error(content)
    } else {
        CallToolResult::success(content)
    };
    result.structured_content = Some(structured);
    result
}

fn execution_text(outcome: &Outcome, resource: Option<&str>) -> String {
    let mut page = Page::default();
    let mut image_number = 0;
    for part in &outcome.output.parts {
        match part {
            Part::Text { text, .. } => page.text.push_str(text),
            Part::Cut { chars, lines } => page.line(&cut_mark(*chars, *lines, resource)),
            Part::Image(image) => {
                image_number += 1;
                page.line(&image_mark(image_number, image));
            }
        }
    }
    for blocked in &outcome.blocked {
        page.line(&blocked.to_string());
    }
    if let Some(calls) = failed_calls(&outcome.tool_calls) {
        page.line(&calls);
    }
    if let Some(ending) = ending(outcome) {
        page.line(&ending);
    }
    if let Some(late) = &outcome.output.late {
        page.line(&late_mark(late));
        page.text.push_str(&late.text);
    }
    page.finish()
}

/// The line before text that code of earlier cells has printed.
fn late_mark(late: &LateOutput) -> String {
    let omitted = match late.omitted {
        0 => String::new(),
        omitted => format!("; {omitted} older characters of it were dropped"),
    };
    format!("[Late output, printed by code of earlier cells{omitted}:]")
}

/// Says which calls of MCP tools did not end well; nothing when all did. The code may have kept it
/// to itself.
fn failed_calls(calls: &ToolCalls) -> Option<String> {
    if calls.failed == 0 {
        return None;
    }
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for call in calls
        .noted
        .iter()
        .filter(|call| call.ended != CallEnd::Answered)
    {
        let kind = format!("{}.{} ({})", call.server, call.tool, call.ended.word());
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    // Those behind the first hundred calls are counted only.
    let known: u64 = kinds.iter().map(|(_, count)| count).sum();
    let is_more = kinds.len() > MAX_FAILURES || known < calls.failed;
    let told = kinds
        .into_iter()
        .take(MAX_FAILURES)
        .map(|(kind, count)| match count {
            1 => kind,
            count => format!("{kind} {count} times"),
        });
    let told = told
        .chain(is_more.then(|| "…".to_owned()))
        .collect::<Vec<_>>()
        .join(", ");
    Some(format!(
        "[{} of {} calls of MCP tools failed: {told}]",
        calls.failed, calls.total
    ))
}

/// Text under way. A line of our own never shares a line with the code's output.
#[derive(Default)]
pub(super) struct Page {
    pub(super) text: String,
}

impl Page {
    pub(super) fn line(&mut self, line: &str) {
        self.begin_line();
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Ends the line that was begun, if one was.
    pub(super) fn begin_line(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
    }

    /// Returns the text without the line breaks at its end, or the words for none.
    pub(super) fn finish(mut self) -> String {
        if self.text.trim().is_empty() {
            return NO_OUTPUT.to_owned();
        }
        self.text.truncate(self.text.trim_end_matches('\n').len());
        self.text
    }
}

pub(super) fn cut_mark(chars: u64, lines: u64, resource: Option<&str>) -> String {
    let size = match lines {
        0 | 1 => format!("{chars} characters"),
        _ => format!("{chars} characters, {lines} lines"),
    };
    match resource {
        Some(uri) => {
            format!(
                "[… {size} cut here; print less, raise max_output_chars, or read the resource \
                 {uri} …]"
            )
        }
        None => format!("[… {size} cut here …]"),
    }
}

pub(super) fn image_mark(number: usize, image: &Image) -> String {
    let kind = image.kind.extension();
    let size = format!("{}×{} {kind}", image.width, image.height);
    let scaled = image
        .scaled_from
        .map(|(width, height)| format!(", scaled down from {width}×{height}"));
    let frames = image
        .frames
        .map(|frames| format!(", the first of {frames} frames of an animation"));
    format!(
        "[image {number}: {size}{}{}]",
        scaled.unwrap_or_default(),
        frames.unwrap_or_default()
    )
}

/// Says how an execution ended, what is lost and what to do; nothing when all went well.
fn ending(outcome: &Outcome) -> Option<String> {
    let can_undo = outcome.can_undo;
    Some(match &outcome.status {
        Status::Completed => return None,
        Status::Raised(error) => return untold(error, &outcome.output),
        Status::TimedOut { limit, state } => format!(
            "The execution was stopped because it ran longer than its time-out of {}. {} \
             Run it in smaller steps, or give a larger `timeout`.",
            Seconds(*limit),
            kept_or_lost(*state, can_undo)
        ),
        Status::Cancelled { state } => format!(
            "The execution was cancelled. \
                                                {}",
            kept_or_lost(*state, can_undo)
        ),
        Status::Reset => {
            "The execution was stopped because the session was reset. Variables and imports are \
             gone; files in \
                          the working folder are kept. The session is ready for the next cell."
                .to_owned()
        }
        Status::Closed => {
            "The execution was stopped because the session was closed or the server is ending. Its \
             variables \
                           and files are gone."
                .to_owned()
        }
        Status::Died {
            exit: exit @ Exit::OutOfMemory { limit, .. },
        } => format!(
            "The execution was stopped because it used more than this session's {} of memory. {} \
             Then load the data in smaller parts.",
            bytes_text(*limit),
            if exit.files_kept() {
                lost(can_undo)
            } else {
                LOST_WITH_FILES
            }
        ),
        Status::Died {
            exit: exit @ Exit::OutOfMemoryOutside { whose, .. },
        } => format!(
            "The execution was stopped because {whose}. {} Then load the data in smaller parts, or \
             end sessions that \
             are not needed.",
            if exit.files_kept() {
                lost(can_undo)
            } else {
                LOST_WITH_FILES
            }
        ),
        Status::Died { exit } if !exit.files_kept() => {
            format!(
                "The session is lost: {}. {LOST_WITH_FILES}",
                exit_text(*exit)
            )
        }
        Status::Died { exit } => {
            format!(
                "Python ended while the code ran: {}. {}",
                exit_text(*exit),
                lost(can_undo)
            )
        }
        Status::ProtocolError { what } => {
            format!(
                "Python was ended because it broke the connection to the server ({what}). \
                     {}",
                lost(can_undo)
            )
        }
    })
}

/// Returns what the output does not say about an error. The traceback is normally the last thing in
/// it; where it is missing, or was cut so short that not even the error's name is left, the error
/// must still be the last word. A message that was cut once is not told at length again: one limit
/// holds for all of the text.
pub(super) fn untold(error: &PythonError, output: &Output) -> Option<String> {
    let mut tracebacks = output.parts.iter().filter_map(|part| match part {
        Part::Text {
            stream: Stream::Traceback,
            text,
        } => Some(text),
        _ => None,
    });
    let traceback = error.traceback.clone();
    match tracebacks.clone().next() {
        Some(_) if tracebacks.any(|told| told.contains(&error.name)) => None,
        None if output.cut_chars == 0 && !traceback.trim().is_empty() => Some(traceback),
        _ => Some(brief_summary(error)),
    }
}

/// Names an error with the beginning of its message.
fn brief_summary(error: &PythonError) -> String {
    let whole = summary(error);
    match whole.char_indices().nth(MAX_SUMMARY_LENGTH) {
        Some((end, _)) => format!("{} [… the rest of the message is cut …]", &whole[..end]),
        None => whole,
    }
}

/// What a sandbox that is gone took with it: nothing is left that could be undone.
const LOST_WITH_FILES: &str =
    "Its variables, imports and files are gone. Call `reset` to begin anew.";

/// Says what a dead interpreter took with it, and the ways out.
fn lost(can_undo: u32) -> &'static str {
    match can_undo {
        0 => {
            "Variables and imports of this session are gone; files in the working folder are kept. \
             Call `reset` to \
             start Python anew."
        }
        _ => {
            "Variables and imports of this session are gone; files in the working folder are kept. \
             Call `undo` to get \
             the state before this cell back, or `reset` to start Python anew."
        }
    }
}

fn kept_or_lost(state: StateAfter, can_undo: u32) -> String {
    match state {
        StateAfter::Kept => {
            "Variables and files are kept, with what the code had done until then.".to_owned()
        }
        StateAfter::Lost => format!(
            "The code ignored the interrupt, so Python was killed. {}",
            lost(can_undo)
        ),
    }
}

pub(super) fn exit_text(exit: Exit) -> String {
    match exit {
        Exit::Code(0) => "it left with exit code 0, as `os._exit(0)` does".to_owned(),
        Exit::Code(code) => format!("it left with exit code {code}"),
        Exit::Signal(signal) => match signal_meaning(signal) {
            Some(meaning) => format!("signal {signal}, {meaning}"),
            None => format!("signal {signal}"),
        },
        Exit::OutOfMemory { limit, .. } => {
            format!("it used more than {} of memory", bytes_text(limit))
        }
        Exit::OutOfMemoryOutside { whose, .. } => whose.to_string(),
        Exit::SandboxGone { .. } => {
            "its sandbox was ended from outside, or the jail or the container engine went away"
                .to_owned()
        }
        Exit::Unknown => "the reason is not known".to_owned(),
    }
}

fn signal_meaning(signal: i32) -> Option<&'static str> {
    Some(match signal {
        4 => "SIGILL: an instruction this processor does not have",
        6 => "SIGABRT: a library gave up",
        7 => "SIGBUS: memory that could not be read or written",
        8 => "SIGFPE: an arithmetic fault in native code",
        9 => "SIGKILL: it was killed",
        11 => "SIGSEGV: native code crashed",
        15 => "SIGTERM: it was asked to end",
        24 => "SIGXCPU: it used up its processor time",
        25 => "SIGXFSZ: a file grew too large",
        31 => "SIGSYS: a system call that the sandbox forbids",
        _ => return None,
    })
}

pub(super) fn bytes_text(bytes: u64) -> String {
    const MEBIBYTE: u64 = 1024 * 1024;
    const GIBIBYTE: u64 = 1024 * MEBIBYTE;
    match bytes {
        _ if bytes >= GIBIBYTE && bytes.is_multiple_of(GIBIBYTE) => {
            format!("{} GiB", bytes / GIBIBYTE)
        }
        _ if bytes >= MEBIBYTE => format!("{} MiB", bytes / MEBIBYTE),
        _ => format!("{bytes} bytes"),
    }
}

pub(super) fn summary(error: &PythonError) -> String {
    if error.message.is_empty() {
        error.name.clone()
    } else {
        format!("{}: {}", error.name, error.message)
    }
}

fn images(output: &Output) -> impl Iterator<Item = &Image> {
    output.parts.iter().filter_map(|part| match part {
        Part::Image(image) => Some(image),
        _ => None,
    })
}

fn error_fields(error: &PythonError) -> Value {
    json!({
        "name": error.name,
        "message": error.message,
        "traceback": error.traceback,
        "line": error.line,
    })
}

pub(super) fn variable_fields(changes: &VariableChanges) -> Value {
    let fields = |variable: &Variable| {
        let Variable {
            name,
            kind,
            shape,
            size,
        } = variable;
        json!({"name": name, "type": kind, "shape": shape, "bytes": size})
    };
    json!({
        "created": changes.created.iter().map(fields).collect::<Vec<_>>(),
        "changed": changes.changed.iter().map(fields).collect::<Vec<_>>(),
        "deleted": changes.deleted,
        "omitted": changes.omitted,
    })
}

fn file_fields(changes: &FileChanges) -> Value {
    let fields = |file: &FileNote| json!({"path": file.path, "bytes": file.size});
    json!({
        "created": changes.created.iter().map(fields).collect::<Vec<_>>(),
        "changed": changes.changed.iter().map(fields).collect::<Vec<_>>(),
        "deleted": changes.deleted,
        "omitted": changes.omitted,
    })
}

pub(super) fn carried_fields(files: &FilesCarried) -> Value {
    let (state, why) = match files {
        FilesCarried::Copied => ("copied", None),
        FilesCarried::Restored => ("restored", None),
        FilesCarried::Shared => ("shared", None),
        FilesCarried::LeftAlone { why } => ("left_alone", Some(why)),
    };
    json!({"state": state, "why": why})
}

pub(super) fn checkpoint_fields(checkpoints: &[CheckpointInfo]) -> Vec<Value> {
    let fields = |checkpoint: &CheckpointInfo| {
        let CheckpointInfo {
            cells_back,
            before,
            age,
        } = checkpoint;
        json!({"cells": cells_back, "before": before, "age_seconds": age.as_secs_f64()})
    };
    checkpoints.iter().map(fields).collect()
}

fn isolation_fields(isolation: &Isolation) -> Map<String, Value> {
    let state = |layer: &LayerState| match layer {
        LayerState::Enforced { .. } => "enforced",
        LayerState::Reduced { .. } => "reduced",
        LayerState::Missing { .. } => "missing",
    };
    isolation
        .layers
        .iter()
        .map(|(kind, layer)| (kind.name().to_owned(), Value::from(state(layer))))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tools::tests::assert_valid_output;
    use super::*;
    use crate::sandbox::{Blocked, LayerKind, MemoryUse, OuterMemory, Reason};
    use crate::session::{ExecutionId, ImageType};

    fn outcome(status: Status, parts: Vec<Part>) -> Outcome {
        let chars = |part: &Part| match part {
            Part::Text { text, .. } => text.chars().count() as u64,
            _ => 0,
        };
        Outcome {
            execution: ExecutionId(3),
            status,
            output: Output {
                total_chars: parts.iter().map(chars).sum(),
                total_lines: 1,
                cut_chars: parts
                    .iter()
                    .map(|part| {
                        if let Part::Cut { chars, .. } = part {
                            *chars
                        } else {
                            0
                        }
                    })
                    .sum(),
                parts,
                figures: 0,
                late: None,
            },
            duration: Duration::from_micros(1500),
            memory: MemoryUse { now: 10, peak: 20 },
            processor_time: Duration::from_millis(3),
            variables: None,
            files: None,
            isolation: Isolation::default(),
            can_undo: 0,
            tool_calls: Default::default(),
            rulings: Vec::new(),
            blocked: Vec::new(),
            notes: Vec::new(),
            first_line: String::new(),
            others: Others::default(),
        }
    }

    fn text(stream: Stream, text: &str) -> Part {
        Part::Text {
            stream,
            text: text.to_owned(),
        }
    }

    #[test]
    fn figures_are_named_by_their_resources() {
        let mut outcome = outcome(
            Status::Completed,
            vec![Part::Text {
                stream: Stream::Value,
                text: "Plotly figure".to_owned(),
            }],
        );
        outcome.output.figures = 2;
        let told = rendered(&outcome)["structuredContent"].clone();
        let uri = |number| format!("cellblock://sessions/default/executions/3/figures/{number}");
        assert_eq!(told["output"]["figures"], json!([uri(1), uri(2)]));
        let text = told["text"].as_str().unwrap();
        let expected = format!("\n[figure 2 as JSON: resource {}]", uri(2));
        assert!(text.ends_with(&expected), "{text}");
    }

    #[test]
    fn late_output_follows_the_rest_and_is_marked() {
        let mut outcome = outcome(Status::Completed, vec![text(Stream::Stdout, "mine")]);
        outcome.output.late = Some(LateOutput {
            text: "theirs\n".to_owned(),
            omitted: 0,
        });
        let told = rendered(&outcome);
        let marked = "mine\n[Late output, printed by code of earlier cells:]\ntheirs";
        assert_eq!(told["content"][0]["text"], marked);
        assert_eq!(told["structuredContent"]["output"]["late_chars"], 7);
        outcome.output.late = Some(LateOutput {
            text: "end".to_owned(),
            omitted: 12,
        });
        let told = rendered(&outcome)["structuredContent"].clone();
        let marked = "mine\n[Late output, printed by code of earlier cells; 12 older characters of \
                      it were dropped:]\nend";
        assert_eq!(told["text"], marked);
        assert_eq!(told["output"]["late_omitted_chars"], 12);
    }

    fn image(scaled_from: Option<(u32, u32)>) -> Part {
        Part::Image(Image {
            kind: ImageType::Png,
            bytes: vec![1, 2, 3],
            width: 640,
            height: 480,
            scaled_from,
            frames: None,
        })
    }

    fn error(traceback: &str) -> PythonError {
        PythonError {
            name: "ValueError".to_owned(),
            message: "bad".to_owned(),
            traceback: traceback.to_owned(),
            line: Some(2),
        }
    }

    /// Renders an outcome, checks it against the output schema, and returns it as it goes over the
    /// wire.
    #[track_caller]
    fn rendered(outcome: &Outcome) -> Value {
        let result = serde_json::to_value(execution(
            &"default".parse().unwrap(),
            outcome,
            Occasion::Answer,
        ))
        .unwrap();
        assert_valid_output("execute_ipython_cell", &result["structuredContent"]);
        assert_eq!(
            result["structuredContent"]["text"],
            result["content"][0]["text"]
        );
        result
    }

    #[track_caller]
    fn check_text(outcome: &Outcome, expected: &str) {
        assert_eq!(rendered(outcome)["content"][0]["text"], expected);
    }

    #[track_caller]
    fn check_failure(status: Status, words: &[&str]) {
        let result = rendered(&outcome(status, vec![text(Stream::Stdout, "before\n")]));
        assert_eq!(result["isError"], true);
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(text.starts_with("before\n"), "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
    }

    #[test]
    fn streams_stay_in_their_order_and_are_not_separated() {
        let parts = vec![
            text(Stream::Stdout, "a\n"),
            text(Stream::Stderr, "b\n"),
            text(Stream::Value, "c"),
        ];
        check_text(&outcome(Status::Completed, parts), "a\nb\nc");
    }

    #[test]
    fn a_completed_execution_is_no_error_and_carries_its_figures() {
        let result = rendered(&outcome(
            Status::Completed,
            vec![text(Stream::Stdout, "1\n")],
        ));
        assert_eq!(result["isError"], false);
        let structured = &result["structuredContent"];
        assert_eq!(structured["session_id"], "default");
        assert_eq!(structured["execution"], 3);
        assert_eq!(structured["status"], "ok");
        assert_eq!(structured["duration_ms"], 1.5);
        assert_eq!(structured["memory_bytes"], 10);
        assert_eq!(structured["peak_memory_bytes"], 20);
        assert_eq!(structured["error"], Value::Null);
        assert_eq!(structured["variables"], Value::Null);
        let figures = json!({
            "chars": 2, "lines": 1, "cut_chars": 0, "resource": null, "figures": [],
            "late_chars": 0, "late_omitted_chars": 0,
        });
        assert_eq!(structured["output"], figures);
    }

    #[test]
    fn an_execution_without_output_says_so() {
        check_text(&outcome(Status::Completed, vec![]), "(no output)");
        check_text(
            &outcome(Status::Completed, vec![text(Stream::Stdout, "\n\n")]),
            "(no output)",
        );
        assert_eq!(
            rendered(&outcome(Status::Completed, vec![]))["structuredContent"]["output"]["chars"],
            0
        );
    }

    #[test]
    fn indentation_at_the_start_is_kept() {
        check_text(
            &outcome(Status::Completed, vec![text(Stream::Stdout, "   a\n  b\n")]),
            "   a\n  b",
        );
    }

    #[test]
    fn refused_connections_are_listed_after_what_the_code_printed() {
        let blocked = |target: &str, reason, times| Blocked {
            target: target.to_owned(),
            reason,
            times,
        };
        let mut refused = outcome(Status::Completed, vec![text(Stream::Stdout, "tried")]);
        refused.blocked = vec![blocked("example.org:443", Reason::NotListed, 1)];
        check_text(
            &refused,
            "tried\nblocked: example.org:443 (not in the allowed list)",
        );
        let structured = rendered(&refused)["structuredContent"]["blocked"].clone();
        assert_eq!(
            structured,
            json!(["blocked: example.org:443 (not in the allowed list)"])
        );
    }

    #[test]
    fn notes_are_for_programs_and_cost_the_model_nothing() {
        let mut with_note = outcome(Status::Completed, vec![text(Stream::Stdout, "1")]);
        with_note.notes = vec!["this is a new session".to_owned().into()];
        check_text(&with_note, "1");
        assert_eq!(
            rendered(&with_note)["structuredContent"]["notes"][0],
            "this is a new session"
        );
    }

    #[test]
    fn images_leave_numbered_marks_and_follow_in_order() {
        let parts = vec![
            text(Stream::Stdout, "a"),
            image(None),
            text(Stream::Display, "<Figure>\n"),
            image(Some((4000, 3000))),
            text(Stream::Value, "b"),
        ];
        let result = rendered(&outcome(Status::Completed, parts));
        assert_eq!(
            result["content"][0]["text"],
            "a\n[image 1: 640×480 png]\n<Figure>\n[image 2: 640×480 png, scaled down from \
             4000×3000]\nb"
        );
        assert_eq!(result["content"].as_array().unwrap().len(), 3);
        assert_eq!(
            result["content"][1],
            json!({"type": "image", "data": "AQID", "mimeType": "image/png"})
        );
        let described = json!({"mime_type": "image/png", "width": 640, "height": 480});
        assert_eq!(
            result["structuredContent"]["images"],
            json!([described, described])
        );
    }

    #[test]
    fn an_image_alone_is_output() {
        check_text(
            &outcome(Status::Completed, vec![image(None)]),
            "[image 1: 640×480 png]",
        );
    }

    #[test]
    fn a_cut_says_how_much_and_where_the_rest_is() {
        let parts = vec![
            text(Stream::Stdout, "head"),
            Part::Cut {
                chars: 9000,
                lines: 40,
            },
            text(Stream::Stdout, "tail"),
        ];
        let result = rendered(&outcome(Status::Completed, parts));
        let uri = "cellblock://sessions/default/executions/3/output";
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(
            text.starts_with("head\n[… 9000 characters, 40 lines cut here;"),
            "{text}"
        );
        assert!(text.contains(uri) && text.ends_with("…]\ntail"), "{text}");
        assert_eq!(result["structuredContent"]["output"]["resource"], uri);
        assert_eq!(result["structuredContent"]["output"]["cut_chars"], 9000);
    }

    #[test]
    fn a_traceback_in_the_output_is_not_told_twice() {
        let parts = vec![
            text(Stream::Stdout, "before\n"),
            text(Stream::Traceback, "Traceback …\nValueError: bad\n"),
        ];
        let result = rendered(&outcome(
            Status::Raised(error("Traceback …\nValueError: bad")),
            parts,
        ));
        assert_eq!(result["isError"], true);
        assert_eq!(
            result["content"][0]["text"],
            "before\nTraceback …\nValueError: bad"
        );
        assert_eq!(
            result["structuredContent"]["error"],
            json!({"name": "ValueError", "message": "bad", "traceback": "Traceback …\nValueError: \
                 bad", "line": 2})
        );
    }

    #[test]
    fn an_error_that_is_not_in_the_output_ends_the_text() {
        let parts = || vec![text(Stream::Stdout, "before")];
        check_text(
            &outcome(Status::Raised(error("Traceback\nValueError: bad")), parts()),
            "before\nTraceback\nValueError: bad",
        );
        check_text(
            &outcome(Status::Raised(error("")), parts()),
            "before\nValueError: bad",
        );
    }

    #[test]
    fn an_error_whose_traceback_was_cut_away_is_still_named() {
        let parts = vec![
            Part::Cut {
                chars: 900,
                lines: 9,
            },
            text(Stream::Traceback, "d"),
        ];
        let result = rendered(&outcome(
            Status::Raised(error("Traceback\nValueError: bad")),
            parts,
        ));
        let text = result["content"][0]["text"].as_str().unwrap();
        assert!(text.ends_with("d\nValueError: bad"), "{text}");
    }

    #[test]
    fn a_long_message_is_told_within_the_limit_of_the_text() {
        let long = PythonError {
            message: "x".repeat(5000),
            ..error("Traceback\nValueError: xxx")
        };
        let cut = |head: &str| {
            vec![
                text(Stream::Traceback, head),
                Part::Cut {
                    chars: 900,
                    lines: 9,
                },
                text(Stream::Traceback, "xx"),
            ]
        };
        let mut named = outcome(Status::Raised(long.clone()), cut("ValueError   Traceback"));
        named.output.cut_chars = 900;
        let result = rendered(&named);
        assert!(
            result["content"][0]["text"]
                .as_str()
                .unwrap()
                .ends_with("…]\nxx"),
            "the head has named it: {result}"
        );
        let mut unnamed = outcome(Status::Raised(long), cut("printed"));
        unnamed.output.cut_chars = 900;
        let result = rendered(&unnamed);
        let text = result["content"][0]["text"].as_str().unwrap();
        let last = text.lines().next_back().unwrap();
        assert!(last.starts_with("ValueError: xxx"), "{text}");
        assert!(
            last.ends_with("[… the rest of the message is cut …]") && last.len() < 300,
            "{text}"
        );
    }

    #[test]
    fn a_time_out_says_what_is_kept_or_lost() {
        let limit = Duration::from_secs(120);
        check_failure(
            Status::TimedOut {
                limit,
                state: StateAfter::Kept,
            },
            &[
                "time-out of 2 min",
                "Variables and files are kept",
                "larger `timeout`",
            ],
        );
        check_failure(
            Status::TimedOut {
                limit,
                state: StateAfter::Lost,
            },
            &[
                "time-out of 2 min",
                "ignored the interrupt",
                "are gone",
                "files in the working folder are kept",
                "`reset`",
            ],
        );
    }

    #[test]
    fn what_died_can_be_brought_back_when_there_is_a_checkpoint() {
        let dead = outcome(
            Status::Died {
                exit: Exit::Code(1),
            },
            vec![],
        );
        let told = |can_undo| {
            let dead = Outcome {
                can_undo,
                ..dead.clone()
            };
            let result = serde_json::to_value(execution(
                &"default".parse().unwrap(),
                &dead,
                Occasion::Answer,
            ))
            .unwrap();
            assert_valid_output("execute_ipython_cell", &result["structuredContent"]);
            assert_eq!(result["structuredContent"]["can_undo"], can_undo);
            result["content"][0]["text"].as_str().unwrap().to_owned()
        };
        assert!(
            told(2).contains("Call `undo`") && told(2).contains("`reset`"),
            "{}",
            told(2)
        );
        assert!(
            !told(0).contains("undo") && told(0).contains("`reset`"),
            "{}",
            told(0)
        );
    }

    #[test]
    fn a_cancelled_execution_says_what_is_kept_or_lost() {
        check_failure(
            Status::Cancelled {
                state: StateAfter::Kept,
            },
            &["cancelled", "are kept"],
        );
        check_failure(
            Status::Cancelled {
                state: StateAfter::Lost,
            },
            &["cancelled", "are gone", "`reset`"],
        );
    }

    #[test]
    fn an_execution_whose_session_was_reset_or_closed_says_so() {
        check_failure(
            Status::Reset,
            &[
                "was reset",
                "Variables and imports are gone",
                "are kept",
                "ready",
            ],
        );
        check_failure(
            Status::Closed,
            &["was closed", "variables and files are gone"],
        );
    }

    #[test]
    fn a_dead_interpreter_says_why_and_what_to_do() {
        let died = |exit| Status::Died { exit };
        let out_of_memory = |files_kept| {
            died(Exit::OutOfMemory {
                limit: 512 << 20,
                files_kept,
            })
        };
        check_failure(
            out_of_memory(true),
            &[
                "more than this session's 512 MiB of memory",
                "are gone; files",
                "are kept",
                "`reset`",
                "smaller parts",
            ],
        );
        check_failure(
            out_of_memory(false),
            &[
                "more than this session's 512 MiB of memory",
                "files are gone",
                "`reset`",
                "smaller parts",
            ],
        );
        let outside = |whose, files_kept| died(Exit::OutOfMemoryOutside { whose, files_kept });
        check_failure(
            outside(OuterMemory::Machine, true),
            &[
                "memory of the machine, or of the control group",
                "ran out",
                "are kept",
                "`reset`",
                "smaller parts",
            ],
        );
        check_failure(
            outside(OuterMemory::Family { limit: 1 << 30 }, false),
            &[
                "its checkpoints and its forks together used more than 1024 MiB",
                "files are gone",
                "`reset`",
            ],
        );
        check_failure(
            died(Exit::Signal(11)),
            &["signal 11, SIGSEGV", "are gone", "`reset`"],
        );
        check_failure(
            died(Exit::Signal(31)),
            &["a system call that the sandbox forbids"],
        );
        check_failure(died(Exit::Signal(63)), &["signal 63."]);
        check_failure(died(Exit::Code(0)), &["exit code 0"]);
        check_failure(died(Exit::Code(3)), &["exit code 3"]);
        check_failure(died(Exit::Unknown), &["not known"]);
        let gone = |files_kept| died(Exit::SandboxGone { files_kept });
        check_failure(
            gone(false),
            &[
                "session is lost",
                "engine went away",
                "files are gone",
                "`reset`",
            ],
        );
        check_failure(
            gone(true),
            &[
                "engine went away",
                "files in the working folder are kept",
                "`reset`",
            ],
        );
        check_failure(
            Status::ProtocolError {
                what: "a frame of 9 GiB".to_owned(),
            },
            &["a frame of 9 GiB", "are gone"],
        );
    }

    #[test]
    fn variables_files_and_isolation_are_told() {
        let mut full = outcome(Status::Completed, vec![]);
        full.variables = Some(VariableChanges {
            created: vec![Variable {
                name: "x".to_owned(),
                kind: "ndarray".to_owned(),
                shape: Some("(2, 3)".to_owned()),
                size: Some(48),
            }],
            changed: vec![Variable {
                name: "y".to_owned(),
                kind: "int".to_owned(),
                shape: None,
                size: None,
            }],
            deleted: vec!["z".to_owned()],
            omitted: 4,
        });
        full.files = Some(FileChanges {
            created: vec![FileNote {
                path: "a".to_owned(),
                size: 1,
            }],
            ..FileChanges::default()
        });
        full.isolation.record(
            LayerKind::Network,
            LayerState::Enforced {
                how: "namespace".to_owned(),
            },
        );
        full.isolation.record(
            LayerKind::Landlock,
            LayerState::Missing {
                why: "old kernel".to_owned(),
            },
        );
        let structured = &rendered(&full)["structuredContent"];
        assert_eq!(
            structured["variables"],
            json!({
                "created": [{"name": "x", "type": "ndarray", "shape": "(2, 3)", "bytes": 48}],
                "changed": [{"name": "y", "type": "int", "shape": null, "bytes": null}],
                "deleted": ["z"],
                "omitted": 4,
            })
        );
        assert_eq!(
            structured["files"]["created"],
            json!([{"path": "a", "bytes": 1}])
        );
        assert_eq!(
            structured["isolation"],
            json!({"network": "enforced", "landlock": "missing"})
        );
    }

    fn uncollected(number: u64, first_line: &str, failure: Option<&str>) -> Uncollected {
        let (first_line, failure) = (first_line.to_owned(), failure.map(str::to_owned));
        Uncollected {
            execution: ExecutionId(number),
            first_line,
            failure,
        }
    }

    fn told(outcome: &Outcome, occasion: Occasion) -> String {
        let result =
            serde_json::to_value(execution(&"s".parse().unwrap(), outcome, occasion)).unwrap();
        assert_valid_output("execute_ipython_cell", &result["structuredContent"]);
        result["content"][0]["text"].as_str().unwrap().to_owned()
    }

    #[test]
    fn results_that_wait_are_told_with_the_next_one_failed_ones_first() {
        let mut done = outcome(Status::Completed, vec![text(Stream::Stdout, "D\n")]);
        assert_eq!(told(&done, Occasion::Answer), "D");
        done.others.uncollected = vec![uncollected(
            3,
            "time.sleep(6); 1/0",
            Some("ZeroDivisionError: division by zero"),
        )];
        assert_eq!(
            told(&done, Occasion::Answer),
            "D\n1 other result waits to be collected with check_execution (session_id \"s\"): \
             execution 3 \
             `time.sleep(6); 1/0`: failed (ZeroDivisionError: division by zero)."
        );
        done.others
            .uncollected
            .splice(0..0, (10..16).map(|number| uncollected(number, "x", None)));
        let text = told(&done, Occasion::Answer);
        assert!(text.contains("7 other results wait"), "{text}");
        assert!(
            text.contains("the oldest first: execution 3 `time.sleep(6); 1/0`: failed"),
            "{text}"
        );
        assert!(text.ends_with("execution 13 `x`: ok; 2 more."), "{text}");
        done.others = Others {
            discarded: 2,
            ..Others::default()
        };
        assert!(
            told(&done, Occasion::Answer)
                .contains("2 earlier results of this session were discarded")
        );
        let notes = serde_json::to_value(execution(&"s".parse().unwrap(), &done, Occasion::Answer))
            .unwrap();
        assert_eq!(
            notes["structuredContent"]["notes"]
                .as_array()
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn a_check_says_which_execution_it_tells_about_and_whether_again() {
        let mut done = outcome(Status::Completed, vec![text(Stream::Stdout, "out\n")]);
        done.first_line = "train()".to_owned();
        let heading = "Execution 3 (`train()`):\nout";
        assert_eq!(told(&done, Occasion::Check { again: false }), heading);
        let again = told(&done, Occasion::Check { again: true });
        assert!(
            again.starts_with(heading) && again.ends_with("the result that was told last, again."),
            "{again}"
        );
        done.others.under_way = 1;
        let again = told(&done, Occasion::Check { again: true });
        assert_eq!(
            again,
            format!("{heading}\nThis result was told before."),
            "something runs"
        );
        done.others = Others {
            uncollected: vec![uncollected(4, "x", None)],
            ..Others::default()
        };
        let again = told(&done, Occasion::Check { again: true });
        assert!(
            again.contains("told before") && !again.contains("told last"),
            "something waits: {again}"
        );
        assert!(again.contains("1 other result waits"), "{again}");
    }

    #[test]
    fn a_session_is_named_at_the_end_of_the_text_in_both_places() {
        let session: SessionId = "s-1".parse().unwrap();
        let named = |result| serde_json::to_value(naming(&session, result)).unwrap();
        let line = "Session: s-1 (give it as session_id to go on in this session)";
        let outcome = outcome(
            Status::Completed,
            vec![text(Stream::Stdout, "hi\n"), image(None)],
        );
        let result = named(execution(&session, &outcome, Occasion::Answer));
        assert_eq!(
            result["content"][0]["text"],
            format!("hi\n[image 1: 640×480 png]\n{line}")
        );
        assert_eq!(result["content"][1]["type"], "image");
        assert_eq!(
            result["structuredContent"]["text"],
            result["content"][0]["text"]
        );
        let result = named(finished(
            vec![ContentBlock::text("Copied.")],
            json!({"bytes": 5}),
            false,
        ));
        assert!(
            result["content"][0]["text"]
                .as_str()
                .unwrap()
                .ends_with(&format!(".\n{line}")),
            "{result}"
        );
        assert_eq!(result["structuredContent"].get("text"), None);
        let result = named(refused(&std::io::Error::other("x")));
        assert_eq!(result["content"][0]["text"], format!("x\n{line}"));
    }

    #[test]
    fn a_refusal_tells_its_causes_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("the file could not be read")]
        struct Outer(#[source] std::io::Error);
        let text = |error: &(dyn std::error::Error + 'static)| {
            serde_json::to_value(refused(error)).unwrap()["content"][0]["text"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(
            text(&Outer(std::io::Error::other("disk full"))),
            "the file could not be read: disk full"
        );
        assert_eq!(text(&std::io::Error::other("disk full")), "disk full");
        assert_eq!(refused(&std::io::Error::other("x")).is_error, Some(true));
    }
}
