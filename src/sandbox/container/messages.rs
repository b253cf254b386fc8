//! Messages between the host and the supervisor of a container. One enum per direction; they are
//! encoded and decoded here and nowhere else.
//!
//! `runner/cellblock_runner/messages.py` is the other end, `runner/PROTOCOL.md` describes the
//! messages ("Containers"), and both languages read the examples in `runner/frames/containers`.
//! There is no version: the supervisor is always that of this server (`image`).
//!
//! Messages with bytes have frames of their own, all others are JSON in control frames. What the
//! supervisor sends is untrusted: it shares a container with code of the user.

use cellblock_json::Budget;
use serde::{Deserialize, Serialize};

use super::mux::{self, MuxFrame, kind};

/// Limits for the structure of a control message from inside, which is small.
const CONTROL_BUDGET: Budget = Budget {
    depth: 8,
    memory: 64 * 1024,
};

/// A message from the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum HostMessage<'a> {
    /// Bytes for the channel of an interpreter.
    #[serde(skip)]
    Data { interpreter: u32, bytes: &'a [u8] },
    /// This many more bytes may be sent on a stream.
    #[serde(skip)]
    Credit { stream: u32, bytes: usize },
    /// The next part of the standard input of a program that is launched next.
    #[serde(skip)]
    Input { program: u32, bytes: &'a [u8] },
    /// Sends SIGINT to an interpreter, or to a program and its process group.
    Interrupt { process: u32 },
    /// Ends an interpreter and the processes that it left behind, or a program and its group.
    Kill { process: u32 },
    /// Closes the channel of an interpreter.
    CloseChannel { interpreter: u32 },
    /// Closes two pipes that are kept for a program.
    ReleaseProgramPipes { pipes: u32 },
    /// An order that is answered by `Done` or `Failed` with this id. An answer to the id 0 is not
    /// awaited.
    #[serde(skip)]
    Request { id: u32, request: SlotRequest },
}

/// An order to the supervisor that is answered. A slot is the place of one session in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum SlotRequest {
    /// Ends the processes of a slot, which may be new, and starts a fresh interpreter in it.
    Start {
        slot: u32,
        interpreter: u32,
        mode: FreshStart,
        /// The working folder of the session.
        work: String,
    },
    /// Takes the next copy of the slot's interpreter that sends its handshake for this checkpoint.
    ExpectCheckpoint { slot: u32, checkpoint: u32 },
    /// Replaces the interpreter of a slot with a copy of a checkpoint.
    Restore {
        slot: u32,
        interpreter: u32,
        checkpoint: u32,
    },
    /// Starts a copy of a checkpoint in a new slot.
    Fork {
        slot: u32,
        interpreter: u32,
        /// The slot that has the checkpoint.
        source: u32,
        checkpoint: u32,
        /// The new session gets a working folder of its own.
        own_folder: bool,
    },
    /// Ends a checkpoint.
    DiscardCheckpoint { slot: u32, checkpoint: u32 },
    /// Ends every process of a slot and removes its folder.
    EndSlot { slot: u32 },
    /// Starts a program beside the interpreter of a slot.
    Launch {
        slot: u32,
        program: u32,
        /// The kept pipes for its output.
        pipes: u32,
        words: Vec<String>,
        folder: String,
        /// Changes to the environment of a fresh session; `None` removes a variable.
        environment: Vec<(String, Option<String>)>,
        /// The number of bytes of its standard input, which were sent before.
        input: Option<usize>,
    },
    /// Sends a token in one datagram, which shows that a listener belongs to this container.
    SendToken {
        token: String,
        address: String,
        port: u16,
    },
    /// Asks which slot has made the connection from this address and port.
    FindOwner { address: String, port: u16 },
}

/// How a fresh interpreter starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FreshStart {
    Immediate,
    /// After a hidden rehearsal cell, when there is time for one.
    Primed,
    /// With its folder emptied.
    Emptied,
}

/// A message from the supervisor. Its numbers need not exist.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum SupervisorMessage {
    /// Bytes from a channel or a pipe.
    #[serde(skip)]
    Data { stream: u32, bytes: Vec<u8> },
    /// This many bytes for the channel of an interpreter were taken.
    #[serde(skip)]
    Credit { interpreter: u32, bytes: u32 },
    /// Bytes of a channel that came with two new pipes, whose text follows on new streams.
    #[serde(skip)]
    Pipes {
        interpreter: u32,
        output: u32,
        errors: u32,
        bytes: Vec<u8>,
    },
    /// Bytes of a channel that came with two pipes for a program. The supervisor keeps them under
    /// this number until they are released.
    #[serde(skip)]
    ProgramPipes {
        interpreter: u32,
        pipes: u32,
        bytes: Vec<u8>,
    },
    /// The warm process is ready.
    Ready {
        /// The landlock version that sessions are confined by; none below one.
        landlock: i64,
    },
    /// A stream has ended.
    Closed { stream: u32 },
    /// A request was carried out.
    Done {
        id: u32,
        /// The slot that was found by `FindOwner`.
        owner: Option<u32>,
    },
    /// A request was not carried out.
    Failed {
        id: u32,
        why: String,
        kind: FailureKind,
    },
    /// An interpreter or a program has ended. All output of an interpreter was sent before.
    Exited { process: u32, status: ExitStatus },
    /// A checkpoint has ended without a request.
    CheckpointLost { slot: u32, checkpoint: u32 },
}

/// The kind of failure reported by the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FailureKind {
    /// There is no such program.
    Missing,
    /// The kernel does not start the program.
    Refused,
    /// Programs cannot be kept apart from sessions here.
    Unsupported,
    Other,
}

/// How a process ended, as the supervisor reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ExitStatus {
    Code(i32),
    Signal(i32),
}

/// A frame that is not a message of the supervisor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum InvalidMessage {
    #[error("the supervisor sent a frame of the unknown kind {0}")]
    Kind(u8),
    #[error("the supervisor sent a frame of kind {0} with a body of {1} bytes")]
    Length(u8, usize),
    #[error("the supervisor sent a control message that is invalid or too large")]
    Control,
}

impl HostMessage<'_> {
    /// Encodes the message as a frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            HostMessage::Data { interpreter, bytes } => {
                mux::encode(kind::DATA, *interpreter, bytes)
            }
            HostMessage::Credit { stream, bytes } => {
                let amount = u32::try_from(*bytes).expect("credits are small");
                mux::encode(kind::CREDIT, *stream, &amount.to_be_bytes())
            }
            HostMessage::Input { program, bytes } => mux::encode(kind::INPUT, *program, bytes),
            HostMessage::Request { id, request } => control(&Numbered { request, id: *id }),
            HostMessage::Interrupt { .. }
            | HostMessage::Kill { .. }
            | HostMessage::CloseChannel { .. }
            | HostMessage::ReleaseProgramPipes { .. } => control(self),
        }
    }
}

/// A request as it is written.
#[derive(Serialize)]
struct Numbered<'a> {
    #[serde(flatten)]
    request: &'a SlotRequest,
    id: u32,
}

fn control(message: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("texts and numbers can be written as JSON");
    mux::encode(kind::CONTROL, 0, &body)
}

impl SupervisorMessage {
    /// Reads a message from a frame.
    pub(super) fn decode(frame: MuxFrame) -> Result<SupervisorMessage, InvalidMessage> {
        let MuxFrame {
            kind,
            number,
            mut body,
        } = frame;
        let short = InvalidMessage::Length(kind, body.len());
        match kind {
            kind::DATA => Ok(SupervisorMessage::Data {
                stream: number,
                bytes: body,
            }),
            kind::CREDIT if body.len() > 4 => Err(short),
            kind::CREDIT => Ok(SupervisorMessage::Credit {
                interpreter: number,
                bytes: take_number(&mut body).ok_or(short)?,
            }),
            kind::PIPES => {
                let numbers = take_number(&mut body).zip(take_number(&mut body));
                let (output, errors) = numbers.ok_or(short)?;
                Ok(SupervisorMessage::Pipes {
                    interpreter: number,
                    output,
                    errors,
                    bytes: body,
                })
            }
            kind::PROGRAM_PIPES => Ok(SupervisorMessage::ProgramPipes {
                interpreter: number,
                pipes: take_number(&mut body).ok_or(short)?,
                bytes: body,
            }),
            kind::CONTROL => {
                cellblock_json::read(&body, CONTROL_BUDGET).map_err(|_| InvalidMessage::Control)
            }
            unknown => Err(InvalidMessage::Kind(unknown)),
        }
    }
}

/// Removes a number from the beginning of a body.
fn take_number(body: &mut Vec<u8>) -> Option<u32> {
    let number = body.first_chunk().copied().map(u32::from_be_bytes)?;
    body.drain(..4);
    Some(number)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use serde_json::Value;

    use super::super::mux::MuxDecoder;
    use super::*;

    fn folder() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("runner/frames/containers")
    }

    fn golden(name: &str) -> Vec<u8> {
        std::fs::read(folder().join(format!("{name}.bin"))).unwrap()
    }

    /// The names of the examples of one sender.
    fn names(sender: &str) -> BTreeSet<String> {
        let manifest = std::fs::read(folder().join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let entries = manifest["messages"].as_array().unwrap();
        entries
            .iter()
            .filter(|entry| entry["sender"] == sender)
            .map(|entry| entry["name"].as_str().unwrap().to_owned())
            .collect()
    }

    fn from_host() -> Vec<(&'static str, HostMessage<'static>)> {
        let request = |id, request| HostMessage::Request { id, request };
        let start = |mode| {
            let work = "/work".to_owned();
            request(
                8,
                SlotRequest::Start {
                    slot: 1,
                    interpreter: 7,
                    mode,
                    work,
                },
            )
        };
        let launch = |words: &[&str], folder: &str, environment, input| {
            request(
                15,
                SlotRequest::Launch {
                    slot: 1,
                    program: 14,
                    pipes: (1 << 31) + 3,
                    words: words.iter().map(|word| (*word).to_owned()).collect(),
                    folder: folder.to_owned(),
                    environment,
                    input,
                },
            )
        };
        vec![
            (
                "host_data",
                HostMessage::Data {
                    interpreter: 7,
                    bytes: b"frame\0\xff",
                },
            ),
            (
                "host_credit",
                HostMessage::Credit {
                    stream: (1 << 31) + 1,
                    bytes: 65_536,
                },
            ),
            (
                "input",
                HostMessage::Input {
                    program: 9,
                    bytes: "zażółć\n".as_bytes(),
                },
            ),
            (
                "input_empty",
                HostMessage::Input {
                    program: 9,
                    bytes: b"",
                },
            ),
            ("interrupt", HostMessage::Interrupt { process: 7 }),
            ("kill", HostMessage::Kill { process: 7 }),
            (
                "close_channel",
                HostMessage::CloseChannel { interpreter: 7 },
            ),
            (
                "release_program_pipes",
                HostMessage::ReleaseProgramPipes {
                    pipes: (1 << 31) + 3,
                },
            ),
            ("start", start(FreshStart::Immediate)),
            ("start_primed", start(FreshStart::Primed)),
            ("start_emptied", start(FreshStart::Emptied)),
            (
                "expect_checkpoint",
                request(
                    9,
                    SlotRequest::ExpectCheckpoint {
                        slot: 1,
                        checkpoint: 3,
                    },
                ),
            ),
            (
                "restore",
                request(
                    11,
                    SlotRequest::Restore {
                        slot: 1,
                        interpreter: 10,
                        checkpoint: 3,
                    },
                ),
            ),
            (
                "fork",
                request(
                    13,
                    SlotRequest::Fork {
                        slot: 2,
                        interpreter: 12,
                        source: 1,
                        checkpoint: 3,
                        own_folder: true,
                    },
                ),
            ),
            (
                "discard_checkpoint",
                request(
                    0,
                    SlotRequest::DiscardCheckpoint {
                        slot: 1,
                        checkpoint: 3,
                    },
                ),
            ),
            (
                "end_slot",
                request(u32::MAX, SlotRequest::EndSlot { slot: 2 }),
            ),
            (
                "launch",
                launch(
                    &["sh", "-c", "echo 'zażółć'"],
                    "/work",
                    vec![
                        ("A".to_owned(), Some("b".to_owned())),
                        ("HOME".to_owned(), None),
                    ],
                    Some(7),
                ),
            ),
            ("launch_plain", launch(&["true"], "/", Vec::new(), None)),
            (
                "send_token",
                request(
                    16,
                    SlotRequest::SendToken {
                        token: "00ff".to_owned(),
                        address: "127.0.0.1".to_owned(),
                        port: 53,
                    },
                ),
            ),
            (
                "find_owner",
                request(
                    17,
                    SlotRequest::FindOwner {
                        address: "::1".to_owned(),
                        port: 40_000,
                    },
                ),
            ),
        ]
    }

    fn from_supervisor() -> Vec<(&'static str, SupervisorMessage)> {
        let failed = |id, why: &str, kind| SupervisorMessage::Failed {
            id,
            why: why.to_owned(),
            kind,
        };
        let exited = |process, status| SupervisorMessage::Exited { process, status };
        vec![
            (
                "supervisor_data",
                SupervisorMessage::Data {
                    stream: 1 << 31,
                    bytes: b"text\0\xff".to_vec(),
                },
            ),
            (
                "supervisor_credit",
                SupervisorMessage::Credit {
                    interpreter: 7,
                    bytes: 262_144,
                },
            ),
            (
                "pipes",
                SupervisorMessage::Pipes {
                    interpreter: 7,
                    output: 1 << 31,
                    errors: (1 << 31) + 1,
                    bytes: b"hello".to_vec(),
                },
            ),
            (
                "program_pipes",
                SupervisorMessage::ProgramPipes {
                    interpreter: 7,
                    pipes: (1 << 31) + 3,
                    bytes: b"ask".to_vec(),
                },
            ),
            ("ready", SupervisorMessage::Ready { landlock: 6 }),
            (
                "ready_without_landlock",
                SupervisorMessage::Ready { landlock: -1 },
            ),
            ("closed", SupervisorMessage::Closed { stream: 1 << 31 }),
            ("done", SupervisorMessage::Done { id: 8, owner: None }),
            (
                "done_owner",
                SupervisorMessage::Done {
                    id: 17,
                    owner: Some(2),
                },
            ),
            ("failed", failed(8, "OSError: zażółć", FailureKind::Other)),
            (
                "failed_missing",
                failed(15, "there is no such program", FailureKind::Missing),
            ),
            (
                "failed_refused",
                failed(15, "Permission denied", FailureKind::Refused),
            ),
            (
                "failed_unsupported",
                failed(15, "there is no landlock", FailureKind::Unsupported),
            ),
            ("exited_code", exited(7, ExitStatus::Code(3))),
            ("exited_signal", exited(14, ExitStatus::Signal(9))),
            (
                "checkpoint_lost",
                SupervisorMessage::CheckpointLost {
                    slot: 1,
                    checkpoint: 3,
                },
            ),
        ]
    }

    #[test]
    fn messages_of_the_host_are_written_as_the_supervisor_reads_them() {
        let messages = from_host();
        for (name, message) in &messages {
            assert_eq!(message.encode(), golden(name), "{name}");
        }
        let covered = messages.iter().map(|(name, _)| (*name).to_owned());
        assert_eq!(covered.collect::<BTreeSet<_>>(), names("host"));
    }

    #[test]
    fn messages_of_the_supervisor_are_read_as_it_writes_them() {
        let messages = from_supervisor();
        for (name, message) in &messages {
            let mut decoder = MuxDecoder::default();
            decoder.feed(&golden(name));
            let frame = decoder.next().unwrap().unwrap();
            assert_eq!(decoder.next(), Ok(None), "{name}");
            assert_eq!(
                SupervisorMessage::decode(frame).as_ref(),
                Ok(message),
                "{name}"
            );
        }
        let covered = messages.iter().map(|(name, _)| (*name).to_owned());
        assert_eq!(covered.collect::<BTreeSet<_>>(), names("supervisor"));
    }

    #[test]
    fn other_frames_are_refused() {
        let decode = |kind, body: &[u8]| {
            SupervisorMessage::decode(MuxFrame {
                kind,
                number: 1,
                body: body.to_vec(),
            })
        };
        assert!(decode(kind::CREDIT, &[0; 4]).is_ok()); // control
        assert!(decode(kind::PIPES, &[0; 8]).is_ok()); // control
        assert!(decode(kind::PROGRAM_PIPES, &[0; 4]).is_ok()); // control
        for (kind, length) in [
            (kind::CREDIT, 0),
            (kind::CREDIT, 3),
            (kind::CREDIT, 5),
            (kind::PIPES, 7),
            (kind::PROGRAM_PIPES, 3),
        ] {
            assert_eq!(
                decode(kind, &vec![0; length]),
                Err(InvalidMessage::Length(kind, length))
            );
        }
        // What only the host sends, and what nobody sends.
        for kind in [kind::INPUT, 6, 255] {
            assert_eq!(decode(kind, b""), Err(InvalidMessage::Kind(kind)));
        }
    }

    #[test]
    fn control_messages_are_bounded_and_typed() {
        let decode = |body: &str| {
            SupervisorMessage::decode(MuxFrame {
                kind: kind::CONTROL,
                number: 0,
                body: body.as_bytes().to_vec(),
            })
        };
        let closed = r#"{"type":"closed","stream":7}"#;
        assert_eq!(decode(closed), Ok(SupervisorMessage::Closed { stream: 7 })); // control
        // The size of a frame bounds texts.
        let large = format!(
            r#"{{"type":"closed","stream":7,"more":[{}0]}}"#,
            "0,".repeat(CONTROL_BUDGET.memory / 64)
        );
        let deep = format!("{}1{}", "[".repeat(20), "]".repeat(20));
        for body in [
            "",
            "7",
            "{}",
            &closed[..20],
            r#"{"type":"something"}"#,
            // Bytes have frames of their own.
            r#"{"type":"data","stream":7,"bytes":[]}"#,
            r#"{"type":"closed","stream":-1}"#,
            r#"{"type":"closed","stream":4294967296}"#,
            r#"{"type":"exited","process":7,"status":{}}"#,
            r#"{"type":"exited","process":7,"status":{"code":4294967296}}"#,
            r#"{"type":"exited","process":7,"status":{"code":1,"signal":9}}"#,
            r#"{"type":"failed","id":1,"kind":"worse","why":""}"#,
            &large,
            &deep,
        ] {
            assert_eq!(decode(body), Err(InvalidMessage::Control), "{body:.80}");
        }
    }
}
