//! Requests: the headers of frames that the host sends, with members in the same order as in
//! `runner/frames`.

use std::io;

use serde::Serialize;
use serde_json::Value;

use super::frame::MAX_FRAME_BYTES;

/// The header of a frame for the runner. Code and files are sent as its payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// Runs the payload as a cell.
    Execute {
        id: u64,
        /// Seed for random generators that the code has not seeded.
        #[serde(skip_serializing_if = "Option::is_none")]
        seed: Option<u64>,
    },
    /// Reads a whole file of at most `limit` bytes.
    ReadFile {
        id: u64,
        path: String,
        limit: u64,
    },
    #[serde(rename = "read_file")]
    ReadFilePart {
        id: u64,
        path: String,
        offset: u64,
        length: u64,
    },
    ListFiles {
        id: u64,
        limit: usize,
    },
    WriteBegin {
        id: u64,
        path: String,
        overwrite: bool,
    },
    /// The payload is the next chunk of the file.
    WriteData {
        id: u64,
    },
    WriteEnd {
        id: u64,
    },
    /// Brings the interpreter to the point at which it is copied.
    Branch {
        id: u64,
        /// Bytes of the working folder that are kept with a copy.
        undo_files: u64,
        fork: bool,
        work_is_shared: bool,
    },
    /// Makes the packages in these folders importable.
    Packages {
        id: u64,
        paths: Vec<String>,
    },
    /// Modules of one MCP server; the payload is their text. An empty list removes the server.
    Tools {
        id: u64,
        server: String,
        modules: Vec<ModuleFile>,
        last: bool,
    },
    /// Ends a delivery of modules; the payload is the index of all servers.
    #[serde(rename = "tools")]
    ToolsIndex {
        id: u64,
        /// Servers whose modules stay. `None` leaves files of other sessions in place.
        #[serde(skip_serializing_if = "Option::is_none")]
        servers: Option<Vec<String>>,
    },
    /// Answers a host call of running code. Made by `HostCallAnswer::to`.
    Answer {
        ask: u64,
        ok: bool,
        #[serde(flatten)]
        answer: HostCallAnswer,
    },
}

/// A module whose text is a part of the payload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModuleFile {
    pub name: String,
    pub size: usize,
}

/// The answer to a host call of running code.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HostCallAnswer {
    Withdrawn {},
    Installed {
        text: String,
        paths: Vec<String>,
    },
    NotInstalled {
        text: String,
    },
    ToolResult {
        content: Vec<Value>,
        structured: Option<Value>,
        is_error: bool,
    },
    /// A command has ended; negative codes are signals.
    Exited {
        code: i32,
        text: Option<String>,
    },
    Refused {
        reason: &'static str,
        text: String,
    },
}

impl HostCallAnswer {
    /// Makes the answer to the call with this number.
    pub fn to(self, ask: u64) -> Request {
        let ok = !matches!(
            self,
            HostCallAnswer::NotInstalled { .. } | HostCallAnswer::Refused { .. }
        );
        Request::Answer {
            ask,
            ok,
            answer: self,
        }
    }
}

impl Request {
    /// Returns whether it fits into a frame without a payload. Nothing is written to determine
    /// this.
    pub fn fits_a_frame(&self) -> bool {
        struct Counter(usize);
        impl io::Write for Counter {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 += bytes.len();
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        // The frame also contains the length of the header.
        let mut counter = Counter(4);
        serde_json::to_writer(&mut counter, self)
            .expect("headers are plain structures with text keys");
        counter.0 <= MAX_FRAME_BYTES
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::runner_client::encode;

    /// Compares the frame of a request with the golden one, byte by byte.
    fn check(name: &str, request: &Request, payload: &[u8]) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("runner/frames")
            .join(format!("{name}.bin"));
        let golden = std::fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut written = Vec::new();
        encode(request, payload, &mut written);
        assert_eq!(
            written.escape_ascii().to_string(),
            golden.escape_ascii().to_string(),
            "{name}"
        );
    }

    fn module(name: &str, size: usize) -> ModuleFile {
        ModuleFile {
            name: name.to_owned(),
            size,
        }
    }

    #[test]
    fn requests_about_cells_are_the_golden_frames() {
        let code = "print('zażółć 🐍')\n".as_bytes();
        check("execute", &Request::Execute { id: 1, seed: None }, code);
        check(
            "execute_empty",
            &Request::Execute { id: 2, seed: None },
            b"",
        );
        let seeded = Request::Execute {
            id: 3,
            seed: Some(u64::MAX),
        };
        check("execute_seeded", &seeded, code);
        let branch = Request::Branch {
            id: 5,
            undo_files: 64 * 1024 * 1024,
            fork: true,
            work_is_shared: false,
        };
        check("branch", &branch, b"");
    }

    #[test]
    fn requests_about_files_are_the_golden_frames() {
        let path = "data/wynik.csv".to_owned();
        let whole = Request::ReadFile {
            id: 3,
            path: path.clone(),
            limit: 1024 * 1024,
        };
        check("read_file", &whole, b"");
        let part = Request::ReadFilePart {
            id: 13,
            path,
            offset: 1024 * 1024,
            length: 4096,
        };
        check("read_file_part", &part, b"");
        check(
            "list_files",
            &Request::ListFiles {
                id: 14,
                limit: 1000,
            },
            b"",
        );
        let begin = Request::WriteBegin {
            id: 4,
            path: "nowy/żółw.bin".to_owned(),
            overwrite: false,
        };
        check("write_begin", &begin, b"");
        let bytes = (0..=255).collect::<Vec<u8>>();
        check("write_data", &Request::WriteData { id: 4 }, &bytes);
        check("write_end", &Request::WriteEnd { id: 4 }, b"");
    }

    #[test]
    fn requests_about_packages_and_tools_are_the_golden_frames() {
        let paths = ["/opt/packages/3f1c", "/opt/packages/a07e"]
            .map(str::to_owned)
            .to_vec();
        check("packages", &Request::Packages { id: 7, paths }, b"");
        let tools = Request::Tools {
            id: 8,
            server: "filesystem".to_owned(),
            modules: vec![module("read_file.py", 6), module("__init__.py", 15)],
            last: true,
        };
        check("tools", &tools, "x = 1\n\"\"\"zazółw\"\"\"\n".as_bytes());
        let gone = Request::Tools {
            id: 9,
            server: "memory".to_owned(),
            modules: Vec::new(),
            last: true,
        };
        check("tools_gone", &gone, b"");
        let index = Request::ToolsIndex {
            id: 10,
            servers: Some(vec!["filesystem".to_owned()]),
        };
        check("tools_index", &index, "\"\"\"zazółw\"\"\"\n".as_bytes());
    }

    #[test]
    fn answers_are_the_golden_frames() {
        let installed = HostCallAnswer::Installed {
            text: "Successfully installed polars-1.2.3\n".to_owned(),
            paths: vec!["/opt/packages/3f1c".to_owned()],
        };
        check("answer", &installed.to(1), b"");
        let refused = HostCallAnswer::NotInstalled {
            text: "ERROR: no version of żółw fits\n".to_owned(),
        };
        check("answer_refused", &refused.to(2), b"");
        let exited = HostCallAnswer::Exited {
            code: -2,
            text: None,
        };
        check("answer_shell", &exited.to(5), b"");
    }

    /// The members of values from other servers have no fixed order, so their text may differ.
    #[test]
    fn the_result_of_a_tool_has_the_members_of_the_golden_frame() {
        let manifest = include_str!("../../runner/frames/manifest.json");
        let manifest: Value = serde_json::from_str(manifest).unwrap();
        let frames = manifest["frames"].as_array().unwrap();
        let golden = frames.iter().find(|frame| frame["name"] == "answer_tool");
        let result = HostCallAnswer::ToolResult {
            content: vec![
                json!({"type": "text", "text": "zażółć"}),
                json!({"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png"}),
            ],
            structured: Some(json!({"lines": ["zażółć"]})),
            is_error: false,
        };
        let written = serde_json::to_value(result.to(3)).unwrap();
        assert_eq!(written, golden.unwrap()["header"]);
    }

    #[test]
    fn other_answers_say_what_the_protocol_says() {
        let check = |answer: HostCallAnswer, expected: Value| {
            assert_eq!(serde_json::to_value(answer.to(4)).unwrap(), expected);
        };
        check(
            HostCallAnswer::Withdrawn {},
            json!({"type": "answer", "ask": 4, "ok": true}),
        );
        let refused = HostCallAnswer::Refused {
            reason: "denied",
            text: "no".to_owned(),
        };
        check(
            refused,
            json!({"type": "answer", "ask": 4, "ok": false, "reason": "denied", "text": "no"}),
        );
    }

    #[test]
    fn an_answer_that_is_one_byte_too_large_does_not_fit_a_frame() {
        let answer = |size: usize| {
            HostCallAnswer::NotInstalled {
                text: "x".repeat(size),
            }
            .to(1)
        };
        let around = serde_json::to_vec(&answer(0)).unwrap().len() + 4;
        assert!(answer(MAX_FRAME_BYTES - around).fits_a_frame());
        assert!(!answer(MAX_FRAME_BYTES - around + 1).fits_a_frame());
    }
}
