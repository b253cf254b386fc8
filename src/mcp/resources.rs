//! Resources: the whole output of an execution, for readers who need what was cut from a result,
//! the JSON of its figures, and the files of sessions.
//!
//! ```text
//! cellblock://sessions/{session_id}/executions/{execution}/output[?offset=BYTES&limit=BYTES]
//! cellblock://sessions/{session_id}/executions/{execution}/figures/{number}[?offset=…&limit=…]
//! cellblock://sessions/{session_id}/files/{path}
//! ```
//!
//! A read answers with one slice of text that starts and ends between characters, and says in its
//! metadata, and in a last line when there is more, how to go on. Only executions whose output was
//! cut are listed, the newest first, and only so many: the rest can still be read by their address
//! for as long as the session keeps them.

use std::collections::VecDeque;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rmcp::model::{MetaObject, Resource, ResourceContents, ResourceTemplate};
use serde_json::Value;

use crate::session::{ExecutionId, InsidePath, OutputId, OutputPart, Principal, SessionId, Slice};

/// The largest file that a result holds. A model reads less, and larger files have a route of their
/// own.
pub(super) const MAX_INLINE_BYTES: u64 = 1024 * 1024;

/// Bytes in one answer unless the reader asks for another number. Large enough for nearly every
/// output, small enough for a context window.
pub(super) const DEFAULT_LIMIT: usize = 256 * 1024;

/// The most a reader may ask for at once.
const MAX_LIMIT_BYTES: usize = 4 * 1024 * 1024;

/// Outputs that are listed. More would bury the newest ones.
const MAX_LISTED: usize = 100;

/// A character is at most four bytes long, so this much on either side of a slice is enough to find
/// its borders.
pub(super) const CHARACTER_MARGIN: usize = 4;

/// The type of a figure's source, as Jupyter and its front ends name it.
const FIGURE: &str = "application/vnd.plotly.v1+json";

const PREFIX: &str = "cellblock://sessions/";

/// What a reader asked for.
#[derive(Debug, PartialEq)]
pub(super) struct Address {
    pub(super) session: SessionId,
    pub(super) output: OutputId,
    pub(super) offset: u64,
    pub(super) limit: usize,
}

/// Why an address leads nowhere.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(super) enum BadAddress {
    #[error(
        "there is no such resource; outputs are at \
         cellblock://sessions/{{session_id}}/executions/{{execution}}/output"
    )]
    Unknown,
    #[error("\"{0}\" is not a parameter of this resource; it takes offset and limit")]
    Parameter(String),
    #[error("{name} must be a whole number of bytes from {least} to {most}")]
    Number {
        name: &'static str,
        least: u64,
        most: u64,
    },
}

/// The file of a session that an address leads to, if it is one of a file.
pub(super) fn file_at(uri: &str) -> Option<(SessionId, InsidePath)> {
    let (session, path) = uri.strip_prefix(PREFIX)?.split_once("/files/")?;
    Some((session.parse().ok()?, percent_decoded(path)?.parse().ok()?))
}

/// The content of a file, as text where it is text.
pub(super) fn file_contents(uri: &str, bytes: &[u8]) -> ResourceContents {
    match std::str::from_utf8(bytes) {
        Ok(text) => ResourceContents::text(text, uri),
        Err(_) => ResourceContents::blob(STANDARD.encode(bytes), uri),
    }
}

/// A file of a session as it is listed.
pub(super) fn listed_file(session: &SessionId, path: &InsidePath, size: u64) -> Resource {
    Resource::new(
        file_uri(session, path),
        format!("{}/{path}", session.as_str()),
    )
    .with_title(format!(
        "File \"{path}\" of session \"{}\"",
        session.as_str()
    ))
    .with_size(size)
}

/// The address of an execution's whole output, or of a figure.
pub(super) fn output_uri(session: &SessionId, output: OutputId) -> String {
    let part = match output.part {
        OutputPart::Text => "output".to_owned(),
        OutputPart::Figure(number) => format!("figures/{number}"),
    };
    format!(
        "{PREFIX}{}/executions/{}/{part}",
        session.as_str(),
        output.execution.0
    )
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(uri: &str) -> Result<Address, BadAddress> {
        let (path, query) = match uri.split_once('?') {
            Some((path, query)) => (path, query),
            None => (uri, ""),
        };
        let rest = path.strip_prefix(PREFIX).ok_or(BadAddress::Unknown)?;
        let parts: Vec<&str> = rest.split('/').collect();
        let (session, execution, part) = match parts[..] {
            [session, "executions", execution, "output"] => (session, execution, OutputPart::Text),
            [session, "executions", execution, "figures", number] => {
                let number = number.parse().map_err(|_| BadAddress::Unknown)?;
                (session, execution, OutputPart::Figure(number))
            }
            _ => return Err(BadAddress::Unknown),
        };
        let mut address = Address {
            session: session.parse().map_err(|_| BadAddress::Unknown)?,
            output: OutputId {
                execution: ExecutionId(execution.parse().map_err(|_| BadAddress::Unknown)?),
                part,
            },
            offset: 0,
            // Half of a figure's JSON is of no use, and none is larger than this.
            limit: match part {
                OutputPart::Text => DEFAULT_LIMIT,
                OutputPart::Figure(_) => MAX_LIMIT_BYTES,
            },
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=').unwrap_or((pair, "")) {
                ("offset", number) => {
                    address.offset = within("offset", number, 0, i64::MAX as u64)?
                }
                ("limit", number) => {
                    address.limit = within("limit", number, 1, MAX_LIMIT_BYTES as u64)? as usize
                }
                (other, _) => return Err(BadAddress::Parameter(other.chars().take(40).collect())),
            }
        }
        Ok(address)
    }
}

fn within(name: &'static str, number: &str, least: u64, most: u64) -> Result<u64, BadAddress> {
    let parsed = number
        .parse()
        .ok()
        .filter(|number| (least..=most).contains(number));
    parsed.ok_or(BadAddress::Number { name, least, most })
}

/// The address of a file in a session's working folder.
pub(super) fn file_uri(session: &SessionId, path: &InsidePath) -> String {
    let mut uri = format!("{PREFIX}{}/files/", session.as_str());
    for byte in path.as_str().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                uri.push(byte as char)
            }
            other => uri.push_str(&format!("%{other:02X}")),
        }
    }
    uri
}

/// Renders one slice. `slice.bytes` starts at `address.offset` and holds up to `limit` bytes and a
/// margin.
pub(super) fn contents(uri: &str, address: &Address, slice: &Slice) -> ResourceContents {
    let (start, end) = borders(&slice.bytes, address.offset, address.limit);
    let mut text = String::from_utf8_lossy(&slice.bytes[start..end]).into_owned();
    let next = address.offset + end as u64;
    let more = next < slice.total;
    // A line of ours would break JSON; there the metadata alone says how to go on.
    let is_json = address.output.part != OutputPart::Text;
    if more && !is_json {
        let path = uri.split('?').next().unwrap_or(uri);
        let left = slice.total - next;
        text.push_str(&format!(
            "\n[… {left} bytes follow; read {path}?offset={next}&limit={} …]",
            address.limit
        ));
    } else if slice.kept_in_part && !is_json {
        text.push_str("\n[… the output was longer; the rest was not kept …]");
    }
    let mut meta = MetaObject::new();
    meta.insert(
        "cellblock/offset".to_owned(),
        Value::from(address.offset + start as u64),
    );
    meta.insert("cellblock/totalBytes".to_owned(), Value::from(slice.total));
    meta.insert(
        "cellblock/nextOffset".to_owned(),
        if more { Value::from(next) } else { Value::Null },
    );
    ResourceContents::TextResourceContents {
        uri: uri.to_owned(),
        mime_type: Some(if is_json { FIGURE } else { "text/plain" }.to_owned()),
        text,
        meta: Some(meta),
    }
}

/// Finds the characters that begin within the first `limit` bytes. A reader that follows
/// `nextOffset` misses none and sees none twice.
fn borders(bytes: &[u8], offset: u64, limit: usize) -> (usize, usize) {
    let continues = |index: usize| {
        bytes
            .get(index)
            .is_some_and(|byte| byte & 0b1100_0000 == 0b1000_0000)
    };
    let forward = |from: usize| {
        let from = from.min(bytes.len());
        (from..=bytes.len())
            .take(CHARACTER_MARGIN)
            .find(|&index| !continues(index))
            .unwrap_or(from)
    };
    let start = if offset == 0 { 0 } else { forward(0) };
    (start, forward(limit).max(start))
}

/// The template of every output's address.
pub(super) fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new(
            "cellblock://sessions/{session_id}/executions/{execution}/output{?offset,limit}",
            "execution-output",
        )
        .with_title("The whole output of an execution")
        .with_description(
            "Text of an execution with what was cut from its result. offset and limit are bytes.",
        )
        .with_mime_type("text/plain"),
        ResourceTemplate::new(
            "cellblock://sessions/{session_id}/executions/{execution}/figures/{number}\
             {?offset,limit}",
            "execution-figure",
        )
        .with_title("The JSON of a Plotly figure")
        .with_description("What Plotly draws a figure from. offset and limit are bytes.")
        .with_mime_type(FIGURE),
        ResourceTemplate::new(
            "cellblock://sessions/{session_id}/files/{+path}",
            "session-file",
        )
        .with_title("A file of a session")
        .with_description("A file in the working folder of a session, as text or bytes."),
    ]
}

/// Executions whose output was cut, the newest last. Belongs to the room because only the room
/// knows what it cut for whom.
#[derive(Debug, Default)]
pub(super) struct CutOutputs {
    kept: VecDeque<(Principal, SessionId, ExecutionId)>,
}

impl CutOutputs {
    pub(super) fn remember(
        &mut self,
        owner: &Principal,
        session: &SessionId,
        execution: ExecutionId,
    ) {
        if self.kept.len() == MAX_LISTED {
            self.kept.pop_front();
        }
        self.kept
            .push_back((owner.clone(), session.clone(), execution));
    }

    /// Returns those of one owner, the newest first.
    pub(super) fn of(&self, owner: &Principal) -> Vec<(SessionId, ExecutionId)> {
        let own = self
            .kept
            .iter()
            .rev()
            .filter(|(whose, _, _)| whose == owner);
        own.map(|(_, session, execution)| (session.clone(), *execution))
            .collect()
    }
}

/// Describes one listed output.
pub(super) fn listed(session: &SessionId, execution: ExecutionId, total: u64) -> Resource {
    Resource::new(
        output_uri(session, execution.into()),
        format!("output-{}-{}", session.as_str(), execution.0),
    )
    .with_title(format!(
        "Output of execution {} in session \"{}\"",
        execution.0,
        session.as_str()
    ))
    .with_mime_type("text/plain")
    .with_size(total)
}

/// Decodes percent-encoding, once.
pub(crate) fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|byte| (byte as char).to_digit(16));
        let (high, low) = (digit(rest.next())?, digit(rest.next())?);
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(offset: u64, limit: usize) -> Address {
        Address {
            session: "a".parse().unwrap(),
            output: ExecutionId(7).into(),
            offset,
            limit,
        }
    }

    /// Reads `whole` as a reader would, slice after slice, and returns the pieces without the lines
    /// that say how to go on.
    fn read_through(whole: &str, limit: usize) -> Vec<String> {
        let mut pieces = Vec::new();
        let mut offset = 0;
        loop {
            let rest = &whole.as_bytes()[offset as usize..];
            let bytes = rest[..rest.len().min(limit + CHARACTER_MARGIN)].to_vec();
            let slice = Slice {
                bytes,
                total: whole.len() as u64,
                kept_in_part: false,
            };
            let ResourceContents::TextResourceContents { text, meta, .. } =
                contents("u", &address(offset, limit), &slice)
            else {
                panic!("outputs are text");
            };
            let next = meta.unwrap()["cellblock/nextOffset"].as_u64();
            pieces.push(match next {
                Some(_) => text[..text.rfind("\n[…").unwrap()].to_owned(),
                None => text,
            });
            match next {
                Some(next) => {
                    assert!(next > offset, "a reader must get on");
                    offset = next;
                }
                None => return pieces,
            }
        }
    }

    #[test]
    fn paths_are_decoded_once() {
        assert_eq!(percent_decoded("a/b%20c%C3%A4").as_deref(), Some("a/b cä"));
        assert_eq!(percent_decoded("%2525").as_deref(), Some("%25"));
        for bad in ["%", "%2", "%zz", "%ff"] {
            assert_eq!(percent_decoded(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_address_and_its_parts_belong_together() {
        let uri = output_uri(&"a".parse().unwrap(), ExecutionId(7).into());
        assert_eq!(uri, "cellblock://sessions/a/executions/7/output");
        assert_eq!(uri.parse(), Ok(address(0, DEFAULT_LIMIT)));
        assert_eq!(format!("{uri}?offset=5&limit=9").parse(), Ok(address(5, 9)));
        assert_eq!(format!("{uri}?limit=9").parse(), Ok(address(0, 9)));
    }

    #[test]
    fn a_figure_is_read_whole_and_as_json() {
        let output = OutputId {
            execution: ExecutionId(7),
            part: OutputPart::Figure(2),
        };
        let uri = output_uri(&"a".parse().unwrap(), output);
        assert_eq!(uri, "cellblock://sessions/a/executions/7/figures/2");
        let address: Address = uri.parse().unwrap();
        assert_eq!((address.output, address.limit), (output, MAX_LIMIT_BYTES));
        for total in [2, 3] {
            let slice = Slice {
                bytes: b"{}".to_vec(),
                total,
                kept_in_part: false,
            };
            let ResourceContents::TextResourceContents {
                text, mime_type, ..
            } = contents(&uri, &address, &slice)
            else {
                panic!("figures are text");
            };
            assert_eq!((text.as_str(), mime_type.as_deref()), ("{}", Some(FIGURE)));
        }
    }

    #[test]
    fn other_addresses_are_unknown() {
        for uri in [
            "",
            "file:///etc/passwd",
            "cellblock://sessions/a",
            "cellblock://sessions/a/executions/x/output",
            "cellblock://sessions/a/executions/-1/output",
            "cellblock://sessions/../executions/1/output",
            "cellblock://sessions/a/executions/1/output/",
            "cellblock://sessions/a/executions/1/input",
        ] {
            assert_eq!(uri.parse::<Address>(), Err(BadAddress::Unknown), "{uri}");
        }
    }

    #[test]
    fn bad_parameters_are_named() {
        let parse = |query: &str| {
            format!("cellblock://sessions/a/executions/7/output?{query}").parse::<Address>()
        };
        assert_eq!(
            parse("page=1"),
            Err(BadAddress::Parameter("page".to_owned()))
        );
        assert_eq!(
            parse("offset=-1"),
            Err(BadAddress::Number {
                name: "offset",
                least: 0,
                most: i64::MAX as u64
            })
        );
        let limit = BadAddress::Number {
            name: "limit",
            least: 1,
            most: MAX_LIMIT_BYTES as u64,
        };
        assert_eq!(parse("limit=0").unwrap_err(), limit);
        assert_eq!(parse("limit=4194305").unwrap_err(), limit);
        assert_eq!(parse("limit=4194304"), Ok(address(0, MAX_LIMIT_BYTES)));
    }

    #[test]
    fn slices_put_together_give_the_whole_whatever_their_size() {
        let whole = "aß€😀z\nnoch ein Stück ☃";
        for limit in 1..=whole.len() + 1 {
            assert_eq!(read_through(whole, limit).concat(), whole, "limit {limit}");
        }
        assert_eq!(read_through(whole, 1000), [whole]);
        assert_eq!(read_through("", 5), [""]);
    }

    #[test]
    fn a_slice_says_how_to_go_on() {
        let slice = Slice {
            bytes: b"abcdef".to_vec(),
            total: 100,
            kept_in_part: false,
        };
        let ResourceContents::TextResourceContents { text, .. } =
            contents("u?limit=4", &address(0, 4), &slice)
        else {
            panic!("outputs are text");
        };
        assert_eq!(text, "abcd\n[… 96 bytes follow; read u?offset=4&limit=4 …]");
    }

    #[test]
    fn an_output_that_was_kept_in_part_says_so_at_its_end() {
        let slice = |kept_in_part| Slice {
            bytes: b"abc".to_vec(),
            total: 3,
            kept_in_part,
        };
        let text = |kept_in_part| match contents("u", &address(0, 10), &slice(kept_in_part)) {
            ResourceContents::TextResourceContents { text, .. } => text,
            _ => panic!("outputs are text"),
        };
        assert!(text(true).contains("was not kept"));
        assert_eq!(text(false), "abc");
    }

    #[test]
    fn an_offset_beyond_the_end_gives_nothing() {
        let slice = Slice {
            bytes: Vec::new(),
            total: 3,
            kept_in_part: false,
        };
        let ResourceContents::TextResourceContents { text, .. } =
            contents("u", &address(50, 10), &slice)
        else {
            panic!("outputs are text");
        };
        assert_eq!(text, "");
    }

    #[test]
    fn the_list_is_bounded_newest_first_and_each_owner_sees_only_theirs() {
        let mut outputs = CutOutputs::default();
        let (alice, bob) = (Principal("alice".to_owned()), Principal("bob".to_owned()));
        let session: SessionId = "a".parse().unwrap();
        outputs.remember(&bob, &session, ExecutionId(1));
        for number in 2..=MAX_LISTED as u64 + 1 {
            outputs.remember(&alice, &session, ExecutionId(number));
        }
        assert_eq!(outputs.of(&alice).len(), MAX_LISTED);
        assert_eq!(outputs.of(&alice)[0].1, ExecutionId(MAX_LISTED as u64 + 1));
        assert_eq!(outputs.of(&bob), [], "the oldest was dropped");
        outputs.remember(&bob, &session, ExecutionId(999));
        assert_eq!(outputs.of(&bob), [(session, ExecutionId(999))]);
    }
}
