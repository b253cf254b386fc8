//! Claims: messages of the runner, typed and bounded.
//!
//! Unknown types and members are ignored, so that a newer runner can send more. Text that is only
//! displayed is cut to its limit; a list that is too long is cut and the rest counted. A frame that
//! cannot be parsed is a protocol error.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cellblock_json::{Budget, Excess, MAX_DEPTH};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::frame::{Frame, FrameError};

/// Entries kept of a file list.
pub const MAX_LISTED: usize = 1000;
/// Bytes kept of a file version.
const MAX_VERSION_LENGTH: usize = 100;
/// Entries kept of each list of changes.
const MAX_CHANGES: usize = 50;
/// Bytes kept of names, types and shapes.
const MAX_NAME_LENGTH: usize = 256;
/// Bytes kept of a path; the kernel accepts no longer ones.
const MAX_PATH_LENGTH: usize = 4096;
/// Bytes kept of an exception's message and of a reason for failure.
const MAX_MESSAGE_LENGTH: usize = 16 * 1024;
/// Bytes kept of a traceback before the caller's own limit cuts it further.
const MAX_TRACEBACK_LENGTH: usize = 1024 * 1024;
/// Representations of the same content in one bundle.
const MAX_KINDS: usize = 32;
/// Entries kept of the list of things that a copy lost.
const MAX_LOSSES: usize = 50;
/// Bytes kept of each entry, and of the reason why files were left alone.
const MAX_LOSS_LENGTH: usize = 200;
/// Limits for the contents of a header. The lists that a runner makes are short; only tool
/// arguments may be long.
const HEADER: Budget = Budget {
    depth: MAX_DEPTH,
    memory: 16 * 1024 * 1024,
};

/// One message of the runner. Any part of it may be false.
#[derive(Debug, Clone, PartialEq)]
pub enum Claim {
    Hello {
        version: u32,
        python: String,
        marker: [u8; 16],
        copy: CopyReport,
    },
    Started {
        id: u64,
        rotated: bool,
    },
    Display {
        id: u64,
        bundle: Bundle,
        display_id: Option<String>,
        update: bool,
    },
    Value {
        id: u64,
        bundle: Bundle,
    },
    Clear {
        id: u64,
        wait: bool,
    },
    Done(Box<DoneClaim>),
    FileData {
        id: u64,
        bytes: Vec<u8>,
    },
    FileEnd {
        id: u64,
        size: u64,
        /// For a partial read: the size of the whole file, and a text that differs when the file
        /// has changed.
        total: u64,
        version: String,
    },
    FileList {
        id: u64,
        entries: Vec<ClaimedFile>,
        omitted: u64,
    },
    Written {
        id: u64,
        size: u64,
    },
    Failed {
        id: u64,
        reason: FileFailure,
        message: String,
    },
    /// The interpreter has reached its branch point and continues.
    Branched {
        id: u64,
        branched: Branched,
    },
    /// The packages were added to the session. Some of their modules were already imported from
    /// elsewhere.
    PackagesAdded {
        id: u64,
        loaded: Vec<String>,
        /// The subset that every session starts with.
        preloaded: Vec<String>,
    },
    /// The packages of MCP servers were written to the working folder.
    ToolsWritten {
        id: u64,
    },
    /// Code in a cell makes a host call. Every call is answered.
    Ask {
        /// The execution.
        id: u64,
        ask: u64,
        question: HostCall,
    },
    /// A type that this version does not know.
    Unknown,
}

impl Claim {
    /// Returns the request that it refers to, if any.
    pub fn request(&self) -> Option<u64> {
        match self {
            Claim::Started { id, .. }
            | Claim::Display { id, .. }
            | Claim::Value { id, .. }
            | Claim::Clear { id, .. }
            | Claim::FileData { id, .. }
            | Claim::FileEnd { id, .. }
            | Claim::FileList { id, .. }
            | Claim::Written { id, .. }
            | Claim::Failed { id, .. }
            | Claim::Branched { id, .. }
            | Claim::PackagesAdded { id, .. }
            | Claim::ToolsWritten { id }
            | Claim::Ask { id, .. } => Some(*id),
            Claim::Done(done) => Some(done.id),
            Claim::Hello { .. } | Claim::Unknown => None,
        }
    }
}

/// Host calls that code in a cell can make.
#[derive(Debug, Clone, PartialEq)]
pub enum HostCall {
    Install {
        requirements: Vec<String>,
        upgrade: bool,
    },
    /// Calls a tool of another MCP server.
    CallTool {
        server: String,
        tool: String,
        arguments: Map<String, Value>,
        /// Size in bytes of the frame.
        size: usize,
    },
    /// Starts a program, because the code itself may not.
    Shell(Box<ClaimedCommand>),
    /// The answer to that call is not needed any more.
    Withdraw {
        of: u64,
    },
    /// A call with arguments that are nested too deeply, or have too many values, to be parsed.
    TooMuch(Excess),
    Unknown,
}

/// A command that code wants to run. It is complete, never cut: the command that is approved is the
/// one that runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClaimedCommand {
    /// A line for the shell; without it, `words` are used.
    pub line: Option<String>,
    /// A program and its arguments.
    pub words: Vec<String>,
    /// Its standard input; empty if `None`.
    pub input: Option<String>,
    /// Its starting folder.
    pub folder: String,
    /// Differences between its variables and those of a fresh session.
    pub environment: BTreeMap<String, Option<String>>,
    /// Timeout in seconds.
    pub timeout: Option<f64>,
    /// Its output pipes, if they were sent along.
    pub outlets: Option<OutputPipes>,
}

/// Two descriptors from inside, for standard output and error. Each is a pipe; which end of it is
/// not known.
#[derive(Debug, Clone)]
pub struct OutputPipes(pub Arc<[OwnedFd; 2]>);

impl PartialEq for OutputPipes {
    fn eq(&self, other: &OutputPipes) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Claims about a copy when it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Branched {
    /// The things that it lacks.
    pub lost: Vec<String>,
    /// It has everything that a fork needs, and nothing in the session runs in the background:
    /// until the next request to the session, the copy is identical to the session.
    pub whole: bool,
}

/// Claims of a copied interpreter about what it has from the original. Empty for a fresh
/// interpreter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// Short texts such as "2 threads".
    pub lost: Vec<String>,
    pub files: Option<CopiedFiles>,
    /// Why files were left alone.
    pub why: Option<String>,
    /// It had files of the original mapped in its memory until it sent this.
    pub mapped: bool,
    /// Modules among `GENERATORS` whose global random generator continues from a seed.
    pub seeded: Vec<&'static str>,
}

/// Modules with a process-wide random generator.
const GENERATORS: [&str; 3] = ["numpy.random", "random", "torch.random"];

/// What a copy did with the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopiedFiles {
    Restored,
    LeftAlone,
    Shared,
}

impl CopiedFiles {
    fn from_word(word: &str) -> Option<CopiedFiles> {
        match word {
            "restored" => Some(CopiedFiles::Restored),
            "left alone" => Some(CopiedFiles::LeftAlone),
            "shared" => Some(CopiedFiles::Shared),
            _ => None,
        }
    }
}

/// The same content in several representations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bundle {
    pub texts: BTreeMap<String, String>,
    pub blobs: Vec<(String, Vec<u8>)>,
}

/// The end of a cell.
#[derive(Debug, Clone, PartialEq)]
pub struct DoneClaim {
    pub id: u64,
    pub error: Option<ClaimedError>,
    pub variables: Option<Changes<ClaimedVariable>>,
    pub files: Option<Changes<ClaimedFile>>,
    /// The cell certainly changed nothing.
    pub unchanged: bool,
    /// Output of earlier code since the last cell.
    pub late: Option<ClaimedLate>,
}

/// Text printed by earlier code. `omitted` counts older characters that were dropped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ClaimedLate {
    pub text: String,
    pub omitted: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
#[derive(Default)]
pub struct ClaimedError {
    pub name: String,
    pub message: String,
    pub traceback: String,
    pub line: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, bound = "T: Deserialize<'de> + Default")]
pub struct Changes<T> {
    pub created: Vec<T>,
    pub changed: Vec<T>,
    pub deleted: Vec<String>,
    pub omitted: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ClaimedVariable {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub shape: Option<String>,
    pub size: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ClaimedFile {
    pub path: String,
    pub size: u64,
}

/// Reason why a file could not be sent or stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileFailure {
    Missing,
    NotAFile,
    Exists,
    Outside,
    TooLarge,
    NoSpace,
    Denied,
    #[default]
    Other,
}

impl FileFailure {
    fn from_word(word: &str) -> FileFailure {
        match word {
            "missing" => FileFailure::Missing,
            "not_a_file" => FileFailure::NotAFile,
            "exists" => FileFailure::Exists,
            "outside" => FileFailure::Outside,
            "too_large" => FileFailure::TooLarge,
            "no_space" => FileFailure::NoSpace,
            "denied" => FileFailure::Denied,
            _ => FileFailure::Other,
        }
    }
}

/// All members that any frame may have. Each frame uses a few of them.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Header {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<u64>,
    seq: Option<u32>,
    python: String,
    marker: String,
    rotated: bool,
    data: BTreeMap<String, Value>,
    blobs: Vec<BlobHeader>,
    display_id: Option<String>,
    update: bool,
    wait: bool,
    status: String,
    error: Option<ClaimedError>,
    variables: Option<Changes<ClaimedVariable>>,
    files: Option<Files>,
    unchanged: bool,
    late: Option<ClaimedLate>,
    lost: Vec<String>,
    whole: bool,
    mapped: bool,
    seeded: Vec<String>,
    loaded: Vec<String>,
    preloaded: Vec<String>,
    ask: Option<u64>,
    what: String,
    requirements: Vec<String>,
    options: BTreeMap<String, Value>,
    server: String,
    tool: String,
    arguments: Map<String, Value>,
    /// Why the arguments are missing.
    #[serde(skip)]
    cut: Option<Excess>,
    of: Option<u64>,
    command: Option<String>,
    words: Vec<String>,
    stdin: Option<String>,
    folder: String,
    environment: BTreeMap<String, Option<String>>,
    timeout: Option<f64>,
    why: Option<String>,
    size: u64,
    total: u64,
    /// A number in `hello`, a text at the end of a partial read.
    #[serde(rename = "version")]
    spoken: Option<Spoken>,
    entries: Vec<ClaimedFile>,
    omitted: u64,
    reason: String,
    message: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Spoken {
    Number(u32),
    Text(String),
}

/// The member `files` is a list of changes at the end of a cell, and a word in `hello`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Files {
    Changes(Changes<ClaimedFile>),
    Word(String),
}

#[derive(Deserialize)]
struct BlobHeader {
    mime: String,
    size: u64,
}

/// Parses a frame as a claim, with its `seq` if it has a position among the pipes' bytes.
pub(super) fn read(frame: Frame) -> Result<(Claim, Option<u32>), FrameError> {
    let header = parse_header(&frame.header)?;
    let kind = header
        .kind
        .as_deref()
        .ok_or_else(|| wrong("it has no type"))?;
    let id = || header.id.ok_or_else(|| wrong("it has no id"));
    let seq = header.seq;
    let claim = match kind {
        "hello" => Claim::Hello {
            version: match header.spoken {
                Some(Spoken::Number(version)) => version,
                _ => 0,
            },
            python: shortened(header.python, MAX_NAME_LENGTH),
            marker: read_marker(&header.marker)
                .ok_or_else(|| wrong("its marker is not 32 hexadecimal digits"))?,
            copy: CopyReport {
                lost: bounded_losses(header.lost),
                files: match header.files {
                    Some(Files::Word(word)) => CopiedFiles::from_word(&word),
                    _ => None,
                },
                why: header
                    .why
                    .map(|why| shortened(without_controls(why), MAX_LOSS_LENGTH)),
                mapped: header.mapped,
                seeded: GENERATORS
                    .into_iter()
                    .filter(|name| header.seeded.iter().any(|said| said == name))
                    .collect(),
            },
        },
        "started" => Claim::Started {
            id: id()?,
            rotated: header.rotated,
        },
        "display" => Claim::Display {
            id: id()?,
            display_id: header.display_id.map(|id| shortened(id, MAX_NAME_LENGTH)),
            update: header.update,
            bundle: bundle(header.data, header.blobs, &frame.payload)?,
        },
        "value" => Claim::Value {
            id: id()?,
            bundle: bundle(header.data, header.blobs, &frame.payload)?,
        },
        "clear" => Claim::Clear {
            id: id()?,
            wait: header.wait,
        },
        "done" => Claim::Done(Box::new(DoneClaim {
            id: id()?,
            error: match header.status.as_str() {
                "ok" => None,
                "error" => Some(bounded_error(header.error.unwrap_or_default())),
                _ => return Err(wrong("its status is neither ok nor error")),
            },
            variables: header.variables.map(bounded_variables),
            files: match header.files {
                Some(Files::Changes(changes)) => Some(bounded_files(changes)),
                Some(Files::Word(_)) => return Err(wrong("its files are a word")),
                None => None,
            },
            unchanged: header.unchanged,
            late: header.late,
        })),
        "file_data" => Claim::FileData {
            id: id()?,
            bytes: frame.payload.into(),
        },
        "file_end" => Claim::FileEnd {
            id: id()?,
            size: header.size,
            total: header.total,
            version: match header.spoken {
                Some(Spoken::Text(version)) => {
                    shortened(without_controls(version), MAX_VERSION_LENGTH)
                }
                _ => String::new(),
            },
        },
        "file_list" => {
            let mut entries = header.entries;
            let left_out = entries.len().saturating_sub(MAX_LISTED) as u64;
            entries.truncate(MAX_LISTED);
            Claim::FileList {
                id: id()?,
                entries,
                omitted: header.omitted.saturating_add(left_out),
            }
        }
        "written" => Claim::Written {
            id: id()?,
            size: header.size,
        },
        "failed" => Claim::Failed {
            id: id()?,
            reason: FileFailure::from_word(&header.reason),
            message: shortened(header.message, MAX_MESSAGE_LENGTH),
        },
        "packages_added" => Claim::PackagesAdded {
            id: id()?,
            loaded: bounded_losses(header.loaded),
            preloaded: bounded_losses(header.preloaded),
        },
        "tools_written" => Claim::ToolsWritten { id: id()? },
        "ask" => {
            let ask = header.ask.ok_or_else(|| wrong("it has no number"))?;
            let question = match header.what.as_str() {
                "install" => {
                    let upgrade = header
                        .options
                        .get("upgrade")
                        .and_then(Value::as_bool)
                        .unwrap_or(false);
                    HostCall::Install {
                        requirements: header.requirements,
                        upgrade,
                    }
                }
                "call_tool" => match header.cut {
                    Some(excess) => HostCall::TooMuch(excess),
                    None => HostCall::CallTool {
                        server: header.server,
                        tool: header.tool,
                        arguments: header.arguments,
                        size: frame.header.len(),
                    },
                },
                "shell" => HostCall::Shell(Box::new(ClaimedCommand {
                    line: header.command,
                    words: header.words,
                    input: header.stdin,
                    folder: header.folder,
                    environment: header.environment,
                    timeout: header.timeout,
                    outlets: None,
                })),
                "withdraw" => HostCall::Withdraw {
                    of: header.of.ok_or_else(|| wrong("it withdraws nothing"))?,
                },
                _ => HostCall::Unknown,
            };
            Claim::Ask {
                id: id()?,
                ask,
                question,
            }
        }
        "branched" => {
            let branched = Branched {
                lost: bounded_losses(header.lost),
                whole: header.whole,
            };
            Claim::Branched {
                id: id()?,
                branched,
            }
        }
        _ => Claim::Unknown,
    };
    Ok((claim, seq))
}

fn wrong(why: &str) -> FrameError {
    FrameError::Header {
        why: why.to_owned(),
    }
}

fn parse_header(bytes: &[u8]) -> Result<Header, FrameError> {
    // The parser would also accept an array of the members' values.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(wrong("not an object"));
    }
    if let Err(excess) = HEADER.check(bytes) {
        // Arguments that are too deep or too many are the user's values and not a protocol
        // violation.
        let cut: Result<Header, _> =
            serde_json::from_slice(&without_lone_surrogates(&without_insides(bytes)));
        return match cut {
            Ok(header) if header.what == "call_tool" => Ok(Header {
                cut: Some(excess),
                ..header
            }),
            _ => Err(FrameError::Header {
                why: excess.to_string(),
            }),
        };
    }
    let first = match serde_json::from_slice(bytes) {
        Ok(header) => return Ok(header),
        Err(error) => error,
    };
    // Python strings may contain half of a surrogate pair, which JSON can represent and UTF-8
    // cannot. That is the user's text and not a protocol violation.
    if let Cow::Owned(repaired) = without_lone_surrogates(bytes)
        && let Ok(header) = serde_json::from_slice(&repaired)
    {
        return Ok(header);
    }
    // Only the position is reported: the parser's text may quote the header, which contains user
    // data.
    Err(FrameError::Header {
        why: format!("not readable at byte {}", first.column()),
    })
}

/// Empties every list and object inside a header. The members that determine the kind of frame are
/// outside of them.
fn without_insides(bytes: &[u8]) -> Vec<u8> {
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    let mut kept = Vec::new();
    for &byte in bytes {
        let is_closing = !in_string && matches!(byte, b'}' | b']');
        if is_closing {
            depth = depth.saturating_sub(1);
        }
        if depth < 2 {
            kept.push(byte);
        }
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            _ => {}
        }
    }
    kept
}

/// Replaces each escaped half of a surrogate pair that lacks the other half.
fn without_lone_surrogates(bytes: &[u8]) -> Cow<'_, [u8]> {
    let unit = |at: usize| -> Option<u16> {
        let escape = bytes.get(at..at + 6)?;
        if !escape.starts_with(b"\\u") {
            return None;
        }
        u16::from_str_radix(str::from_utf8(&escape[2..]).ok()?, 16).ok()
    };
    let mut repaired = Cow::Borrowed(bytes);
    let mut at = 0;
    while let Some(offset) = bytes
        .get(at..)
        .and_then(|rest| rest.iter().position(|byte| *byte == b'\\'))
    {
        at += offset;
        at += match unit(at) {
            Some(0xd800..=0xdbff) if matches!(unit(at + 6), Some(0xdc00..=0xdfff)) => 12,
            Some(0xd800..=0xdfff) => {
                repaired.to_mut()[at..at + 6].copy_from_slice(b"\\ufffd");
                6
            }
            Some(_) => 6,
            // Any other escape is two bytes; the second may be a backslash that starts no escape.
            None => 2,
        };
    }
    repaired
}

fn read_marker(text: &str) -> Option<[u8; 16]> {
    let digits = text.as_bytes();
    if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    Some(u128::from_str_radix(text, 16).ok()?.to_be_bytes())
}

fn bundle(
    data: BTreeMap<String, Value>,
    blobs: Vec<BlobHeader>,
    payload: &[u8],
) -> Result<Bundle, FrameError> {
    let mut bundle = Bundle::default();
    for (mime, value) in data.into_iter().take(MAX_KINDS) {
        let text = match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        bundle.texts.insert(shortened(mime, MAX_NAME_LENGTH), text);
    }
    let mut rest = payload;
    let many = blobs.len() > MAX_KINDS;
    for blob in blobs.into_iter().take(MAX_KINDS) {
        let size = usize::try_from(blob.size).map_err(|_| FrameError::Payload)?;
        let (bytes, later) = rest.split_at_checked(size).ok_or(FrameError::Payload)?;
        bundle
            .blobs
            .push((shortened(blob.mime, MAX_NAME_LENGTH), bytes.to_vec()));
        rest = later;
    }
    if !rest.is_empty() && !many {
        return Err(FrameError::Payload);
    }
    Ok(bundle)
}

fn bounded_error(error: ClaimedError) -> ClaimedError {
    ClaimedError {
        name: shortened(error.name, MAX_NAME_LENGTH),
        message: shortened_and_marked(error.message, MAX_MESSAGE_LENGTH),
        traceback: shortened_in_the_middle(error.traceback, MAX_TRACEBACK_LENGTH),
        line: error.line,
    }
}

fn bounded_variables(changes: Changes<ClaimedVariable>) -> Changes<ClaimedVariable> {
    bounded(changes, |variable| ClaimedVariable {
        name: shortened(variable.name, MAX_NAME_LENGTH),
        kind: shortened(variable.kind, MAX_NAME_LENGTH),
        shape: variable
            .shape
            .map(|shape| shortened(shape, MAX_NAME_LENGTH)),
        size: variable.size,
    })
}

fn bounded_files(changes: Changes<ClaimedFile>) -> Changes<ClaimedFile> {
    bounded(changes, |file| ClaimedFile {
        path: shortened(file.path, MAX_PATH_LENGTH),
        size: file.size,
    })
}

fn bounded<T>(mut changes: Changes<T>, entry: impl Fn(T) -> T) -> Changes<T> {
    let all = changes.created.len() + changes.changed.len() + changes.deleted.len();
    changes.created.truncate(MAX_CHANGES);
    changes.changed.truncate(MAX_CHANGES);
    changes.deleted.truncate(MAX_CHANGES);
    let kept = changes.created.len() + changes.changed.len() + changes.deleted.len();
    Changes {
        created: changes.created.into_iter().map(&entry).collect(),
        changed: changes.changed.into_iter().map(&entry).collect(),
        deleted: changes
            .deleted
            .into_iter()
            .map(|name| shortened(name, MAX_PATH_LENGTH))
            .collect(),
        omitted: changes.omitted.saturating_add((all - kept) as u64),
    }
}

fn bounded_losses(mut losses: Vec<String>) -> Vec<String> {
    losses.truncate(MAX_LOSSES);
    losses
        .into_iter()
        .map(|loss| shortened(without_controls(loss), MAX_LOSS_LENGTH))
        .collect()
}

fn without_controls(text: String) -> String {
    text.replace(char::is_control, " ")
}

fn shortened(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.shrink_to_fit();
        text.push('…');
    }
    text
}

/// Keeps the start of a text that people read, and appends how much is missing.
fn shortened_and_marked(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let (head, rest) = text.split_at(text.floor_char_boundary(most));
    format!("{head} [… {} characters cut here …]", rest.chars().count())
}

/// Keeps both ends: a traceback names the caller first and the error last.
fn shortened_in_the_middle(text: String, most: usize) -> String {
    if text.len() <= most {
        return text;
    }
    let head = text.floor_char_boundary(most / 2);
    let tail = text.ceil_char_boundary(text.len() - most / 2);
    let cut = text[head..tail].chars().count();
    format!(
        "{}\n[… {cut} characters cut here …]\n{}",
        &text[..head],
        &text[tail..]
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use bytes::Bytes;
    use serde_json::json;

    use super::*;
    use crate::runner_client::frame::Decoder;

    fn claim(header: Value, payload: &[u8]) -> Result<Claim, FrameError> {
        let frame = Frame {
            header: header.to_string().into(),
            payload: payload.to_vec().into(),
        };
        read(frame).map(|(claim, _)| claim)
    }

    fn done(header: Value) -> DoneClaim {
        match claim(header, b"") {
            Ok(Claim::Done(done)) => *done,
            other => panic!("expected the end of a cell, got {other:?}"),
        }
    }

    #[test]
    fn a_hello_needs_a_whole_marker() {
        let marker = "000102030405060708090a0b0c0d0e0f";
        let hello = claim(
            json!({"type": "hello", "version": 2, "python": "3.12", "marker": marker}),
            b"",
        )
        .unwrap();
        let bytes = std::array::from_fn(|index| index as u8);
        let copy = CopyReport::default();
        assert_eq!(
            hello,
            Claim::Hello {
                version: 2,
                python: "3.12".to_owned(),
                marker: bytes,
                copy
            }
        );
        for wrong in [
            "",
            "00",
            "+00102030405060708090a0b0c0d0e0f",
            "zz0102030405060708090a0b0c0d0e0f",
        ] {
            assert!(
                claim(json!({"type": "hello", "marker": wrong}), b"").is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_copy_tells_what_it_lacks_within_bounds() {
        let marker = "000102030405060708090a0b0c0d0e0f";
        let copy = |members: Value| {
            let mut header =
                json!({"type": "hello", "version": 2, "python": "3.12", "marker": marker});
            header
                .as_object_mut()
                .unwrap()
                .extend(members.as_object().unwrap().clone());
            match claim(header, b"").unwrap() {
                Claim::Hello { copy, .. } => copy,
                other => panic!("{other:?}"),
            }
        };
        let copied = copy(json!({"lost": ["2 threads", "1\nconnection"],
                "files": "left alone", "why": "too large"}));
        assert_eq!(copied.lost, ["2 threads", "1 connection"]);
        assert_eq!(copied.seeded, [""; 0]);
        assert_eq!(
            copy(json!({"seeded": ["random", "x\n", "random"]})).seeded,
            ["random"]
        );
        assert_eq!(
            (copied.files, copied.why.as_deref()),
            (Some(CopiedFiles::LeftAlone), Some("too large"))
        );
        assert_eq!(
            copy(json!({"files": "restored", "why": null})).files,
            Some(CopiedFiles::Restored)
        );
        assert_eq!(
            copy(json!({"files": "shared"})).files,
            Some(CopiedFiles::Shared)
        );
        assert_eq!(copy(json!({"files": "eaten"})).files, None);
        let many = copy(json!({"lost": vec!["x".repeat(1000); 80]})).lost;
        assert!(many.len() == 50 && many.iter().all(|text| text.len() < 210));
        for whole in [false, true] {
            let parsed = claim(
                json!({"type": "branched", "id": 3, "lost": ["1 pipe"], "whole": whole}),
                b"",
            );
            let branched = Branched {
                lost: vec!["1 pipe".to_owned()],
                whole,
            };
            assert_eq!(parsed, Ok(Claim::Branched { id: 3, branched }));
        }
        assert!(
            claim(json!({"type": "branched", "lost": []}), b"").is_err(),
            "it must say what it answers"
        );
    }

    #[test]
    fn a_cell_has_changed_something_unless_the_runner_says_otherwise() {
        assert!(!done(json!({"type": "done", "id": 1, "status": "ok"})).unchanged);
        assert!(
            done(json!({"type": "done", "id": 1, "status": "ok", "unchanged": true})).unchanged
        );
    }

    #[test]
    fn a_cell_may_bring_late_text_of_earlier_code() {
        assert_eq!(
            done(json!({"type": "done", "id": 1, "status": "ok"})).late,
            None
        );
        let late = json!({"text": "late", "omitted": 3});
        let late = done(json!({"type": "done", "id": 1, "status": "ok", "late": late})).late;
        assert_eq!(
            late,
            Some(ClaimedLate {
                text: "late".to_owned(),
                omitted: 3
            })
        );
        assert!(
            claim(
                json!({"type": "done", "id": 1, "status": "ok", "files": "shared"}),
                b""
            )
            .is_err()
        );
    }

    #[test]
    fn unknown_types_and_members_are_passed_over() {
        assert_eq!(
            claim(json!({"type": "later", "x": [1]}), b"zzz"),
            Ok(Claim::Unknown)
        );
        let clear = claim(
            json!({"type": "clear", "id": 4, "wait": true, "novel": {}}),
            b"",
        );
        assert_eq!(clear, Ok(Claim::Clear { id: 4, wait: true }));
    }

    #[test]
    fn a_header_that_is_not_as_described_is_refused() {
        for header in [
            json!([]),
            json!({}),
            json!({"type": 5}),
            json!({"type": "done", "id": -1}),
            json!({"type": "clear"}),
        ] {
            assert!(
                matches!(claim(header.clone(), b""), Err(FrameError::Header { .. })),
                "{header}"
            );
        }
        assert!(claim(json!({"type": "done", "id": 1, "status": "great"}), b"").is_err());
        let not_json = Frame {
            header: "{\"type\":".into(),
            payload: Bytes::new(),
        };
        assert!(read(not_json).is_err());
    }

    #[test]
    fn the_place_of_a_frame_is_read() {
        let frame = |header: Value| Frame {
            header: header.to_string().into(),
            payload: Bytes::new(),
        };
        assert_eq!(
            read(frame(json!({"type": "clear", "id": 1, "seq": 9})))
                .unwrap()
                .1,
            Some(9)
        );
        assert_eq!(
            read(frame(json!({"type": "clear", "id": 1}))).unwrap().1,
            None
        );
    }

    #[test]
    fn blobs_are_cut_from_the_payload_and_must_fill_it() {
        let header = |size: u64| {
            json!({"type": "value", "id": 1,
                "data": {"text/plain": "x", "application/json": {"a": 1}},
                "blobs": [{"mime": "image/png", "size": 2}, {"mime": "image/jpeg", "size": size}]})
        };
        let Ok(Claim::Value { bundle, .. }) = claim(header(3), b"aabbb") else {
            panic!("a value was sent")
        };
        assert_eq!(bundle.blobs[1], ("image/jpeg".to_owned(), b"bbb".to_vec()));
        assert_eq!(bundle.texts["application/json"], "{\"a\":1}");
        assert_eq!(claim(header(2), b"aabbb"), Err(FrameError::Payload));
        assert_eq!(claim(header(4), b"aabbb"), Err(FrameError::Payload));
        assert_eq!(claim(header(u64::MAX), b"aabbb"), Err(FrameError::Payload));
    }

    #[test]
    fn long_lists_are_cut_and_counted() {
        let many = (0..80)
            .map(|number| json!({"name": format!("v{number}"), "type": "int"}))
            .collect::<Vec<_>>();
        let done = done(
            json!({"type": "done", "id": 1, "status": "ok", "files": null,
            "variables": {"created": many, "changed": [], "deleted": [], "omitted": 5}}),
        );
        let variables = done.variables.unwrap();
        assert_eq!((variables.created.len(), variables.omitted), (50, 35));
        assert_eq!(done.files, None);
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let done = done(json!({"type": "done", "id": 1, "status": "error", "error":
            {"name": "ä".repeat(1000), "message": "m".repeat(100_000),
                "traceback": "t".repeat(3_000_000), "line": 3}}));
        let error = done.error.unwrap();
        assert!(error.name.len() < 300 && error.name.ends_with('…'));
        assert!(
            error.message.len() < 20_000
                && error.message.ends_with("[… 83616 characters cut here …]")
        );
        assert!(
            error.traceback.len() < 1_100_000
                && error
                    .traceback
                    .contains("\n[… 1951424 characters cut here …]\n")
        );
        assert_eq!(error.line, Some(3));
    }

    #[test]
    fn a_call_whose_arguments_are_too_deep_is_a_question_and_other_depths_are_a_breach() {
        let claimed = |levels: usize, what: &str| {
            let value = format!("{}\"]\\\"{{[\"{}", "[".repeat(levels), "]".repeat(levels));
            let header = format!(
                r#"{{"type":"ask","id":1,"ask":2,"what":"{what}","server":"s","arguments":{{"a":{value},"b":1}},"tool":"t"}}"#
            );
            read(Frame {
                header: header.into(),
                payload: Bytes::new(),
            })
        };
        assert!(matches!(
            claimed(100, "call_tool"),
            Ok((
                Claim::Ask {
                    question: HostCall::CallTool { .. },
                    ..
                },
                _
            ))
        ));
        for levels in [127, 1000, 100_000] {
            let ask = Claim::Ask {
                id: 1,
                ask: 2,
                question: HostCall::TooMuch(Excess::Depth(MAX_DEPTH)),
            };
            assert_eq!(
                claimed(levels, "call_tool").map(|(claim, _)| claim),
                Ok(ask),
                "{levels}"
            );
            assert!(claimed(levels, "install").is_err(), "{levels}");
        }
    }

    #[test]
    fn a_header_that_would_take_much_memory_is_refused_and_a_long_text_is_not() {
        let many = format!("[{}0]", r#"{"":0},"#.repeat(100_000));
        let claimed = |header: String| {
            read(Frame {
                header: header.into(),
                payload: Bytes::new(),
            })
        };
        for member in ["data", "options", "novel"] {
            let header =
                format!(r#"{{"type":"value","id":1,"{member}":{{"application/json":{many}}}}}"#);
            let Err(FrameError::Header { why }) = claimed(header) else {
                panic!("{member} was read")
            };
            assert!(why.contains("16384 KiB"), "{why}");
        }
        let header =
            json!({"type": "value", "id": 1, "data": {"application/json": many.repeat(10)}})
                .to_string();
        assert!(
            matches!(claimed(header), Ok((Claim::Value { .. }, None))),
            "the control: as text it is no structure"
        );
        // Arguments are the user's. Only they are refused, also with half a surrogate pair beside
        // them.
        let header = format!(
            r#"{{"type":"ask","id":1,"ask":2,"what":"call_tool","arguments":{{"a":{many}}},"tool":"\ud800","seq":3}}"#
        );
        let question = HostCall::TooMuch(Excess::Memory(HEADER.memory));
        assert_eq!(
            claimed(header),
            Ok((
                Claim::Ask {
                    id: 1,
                    ask: 2,
                    question
                },
                Some(3)
            ))
        );
    }

    #[test]
    fn half_a_surrogate_pair_is_replaced() {
        let text = |escaped: &str| {
            let header =
                format!(r#"{{"type":"failed","id":1,"reason":"missing","message":"{escaped}"}}"#);
            match read(Frame {
                header: header.into(),
                payload: Bytes::new(),
            }) {
                Ok((
                    Claim::Failed {
                        message,
                        reason: FileFailure::Missing,
                        ..
                    },
                    _,
                )) => message,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(text(r"a\ud800b"), "a\u{fffd}b");
        assert_eq!(text(r"\udc00\ud800"), "\u{fffd}\u{fffd}");
        assert_eq!(text(r"\ud83d\ude00 \ud83d"), "😀 \u{fffd}");
        assert_eq!(text(r"\\ud800 \ud800"), "\\ud800 \u{fffd}");
    }

    fn golden(name: &str) -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("runner/frames")
            .join(name);
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    fn decoded(bytes: &[u8]) -> Result<Frame, FrameError> {
        let mut decoder = Decoder::default();
        decoder.feed(bytes);
        let frame = decoder.next()?.expect("a golden file holds a whole frame");
        assert!(decoder.is_empty(), "a golden file holds one frame");
        Ok(frame)
    }

    #[test]
    fn golden_frames_are_read_and_written_as_the_runner_does() {
        let manifest: Value = serde_json::from_slice(&golden("manifest.json")).unwrap();
        let frames = manifest["frames"].as_array().unwrap();
        assert!(frames.len() >= 14, "every type has a golden frame");
        for entry in frames {
            let name = entry["name"].as_str().unwrap();
            let frame = decoded(&golden(&format!("{name}.bin"))).unwrap();
            assert_eq!(
                serde_json::from_slice::<Value>(&frame.header).unwrap(),
                entry["header"],
                "{name}"
            );
            let payload = frame
                .payload
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>();
            assert_eq!(payload, entry["payload"], "{name}");
            let mut written = Vec::new();
            crate::runner_client::encode(&entry["header"], &frame.payload, &mut written);
            let again = decoded(&written).unwrap();
            assert_eq!(
                serde_json::from_slice::<Value>(&again.header).unwrap(),
                entry["header"],
                "{name}"
            );
            let from_host = [
                "execute",
                "read_file",
                "list_files",
                "write_begin",
                "write_data",
                "write_end",
                "branch",
                "packages",
                "tools",
                "answer",
            ];
            let question = match name {
                "ask_call_tool" => {
                    let arguments = entry["header"]["arguments"].as_object().unwrap().clone();
                    let (server, tool, size) = (
                        "filesystem".to_owned(),
                        "read-file".to_owned(),
                        frame.header.len(),
                    );
                    Some(HostCall::CallTool {
                        server,
                        tool,
                        arguments,
                        size,
                    })
                }
                "ask_withdraw" => Some(HostCall::Withdraw { of: 3 }),
                "ask_shell" => Some(HostCall::Shell(Box::new(ClaimedCommand {
                    line: Some("ls -l $HOME | żółw".to_owned()),
                    folder: "/work".to_owned(),
                    environment: [
                        ("A".to_owned(), Some("1".to_owned())),
                        ("LANG".to_owned(), None),
                    ]
                    .into(),
                    ..ClaimedCommand::default()
                }))),
                "ask_shell_words" => Some(HostCall::Shell(Box::new(ClaimedCommand {
                    words: vec!["perl".to_owned(), "-w".to_owned()],
                    input: Some("print 1;\n".to_owned()),
                    folder: "/tmp".to_owned(),
                    timeout: Some(2.5),
                    ..ClaimedCommand::default()
                }))),
                _ => None,
            };
            if let Some(expected) = question {
                let Claim::Ask { question, .. } = read(frame.clone()).unwrap().0 else {
                    panic!("{name}")
                };
                assert_eq!(question, expected, "{name}");
            }
            let known = !matches!(read(frame).unwrap().0, Claim::Unknown);
            assert_eq!(
                known,
                !from_host.contains(&entry["header"]["type"].as_str().unwrap()),
                "{name}"
            );
        }
    }

    #[test]
    fn golden_broken_frames_are_refused() {
        let names = [
            "header_empty",
            "header_longer_than_frame",
            "header_not_an_object",
            "header_not_json",
            "header_not_utf8",
            "length_too_large",
            "length_too_small",
            "no_type",
            "type_not_text",
        ];
        for name in names {
            let bytes = golden(&format!("broken/{name}.bin"));
            assert!(decoded(&bytes).and_then(read).is_err(), "{name}");
        }
    }
}
