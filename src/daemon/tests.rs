//! A frontend and a daemon in one process, with sessions that do as they are told.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::file_stream::{CHUNK, WINDOW};
use super::frame::{self, FrameKind, IpcError, IpcFrame, MAX_FRAME_BYTES, MessageAssembler};
use super::message::{
    DaemonHello, DaemonStatus, FromDaemon, HelloPurpose, PROTOCOL, ReplyResult, RequestRef,
    StopReply, ToDaemon, Welcome,
};
use super::serve::ExitReason;
use super::socket::SocketPath;
use super::start::{AttachError, query_status, request_stop};
use super::{DaemonClient, DaemonInfo, DaemonSettings, DaemonSocket, SessionHost, attach, serve};
use crate::approval::{ApprovalAnswer as PersonAnswer, Defaults, Effect, Policy, PolicyRule};
use crate::ops::{self, Host, HostExt, Io, Op, Reply, Ticket, golden};
use crate::sandbox::{Preparation, Rules};
use crate::session::install::{InstallApproval, InstallReport};
use crate::session::servers::{
    Registrar, ServerReport, ServerRequest, ServerSetup, ServerState, ServerTool, Trust,
};
use crate::session::{
    ApprovalId, ApprovalSetup, CheckpointInfo, DecideReport, DecidedBy, Decision, ExecuteRequest,
    ExecutionEnded, ExecutionHandle, ExecutionId, ExecutionRef, ExecutionReport, FileList,
    FileNote, FileRange, ForkNames, InsidePath, Ledger, LimitSetup, Load, Outcome, Output,
    Principal, ProgressChannel, Quotas, RecorderId, Refused, ResetReport, Ruling, SessionId,
    SessionState, SessionSummary, Slice, Status as CellStatus, StatusKind, UploadPart, Uploaded,
};

// Codec.

async fn read_all(bytes: &[u8]) -> Result<Vec<IpcFrame>, IpcError> {
    let mut source = bytes;
    let mut frames = Vec::new();
    while let Some(frame) = frame::read(&mut source).await? {
        frames.push(frame);
    }
    Ok(frames)
}

fn owner() -> Principal {
    Principal("ann".to_owned())
}

fn id(name: &str) -> SessionId {
    name.parse().unwrap()
}

fn path(text: &str) -> InsidePath {
    text.parse().unwrap()
}

fn request(code: &str) -> ExecuteRequest {
    ExecuteRequest {
        code: code.to_owned(),
        timeout: Duration::from_secs(9),
        max_output_chars: 100,
        asking: crate::session::Approver::Person,
        rules: None,
        recorder: Default::default(),
    }
}

const DECISION: Decision = Decision {
    id: ApprovalId(5),
    answer: PersonAnswer::Session,
};
const APPROVAL: InstallApproval = InstallApproval {
    asking: crate::session::Approver::Person,
    answer: Some(DECISION),
};

fn handle() -> ExecutionHandle {
    "0123456789abcdef0123456789abcdef".parse().unwrap()
}

fn hello(protocol: u32, purpose: HelloPurpose) -> DaemonHello {
    DaemonHello {
        protocol,
        build: "test".to_owned(),
        settings: "s".to_owned(),
        purpose,
    }
}

fn welcome(protocol: u32) -> Welcome {
    let residents = vec![SessionSummary {
        owner: owner(),
        id: id("a"),
        running: true,
    }];
    let (build, settings, instance) = ("test".to_owned(), "s".to_owned(), "k".to_owned());
    Welcome {
        protocol,
        build,
        settings,
        instance,
        process: 1,
        residents,
        unfit: None,
    }
}

/// Writes a value, reads it back and writes it again: both writings must be the same.
async fn survives<T: Serialize + serde::de::DeserializeOwned>(value: &T) {
    let first = frame::encode(7, FrameKind::Message, value)
        .unwrap()
        .concat();
    let frames = read_all(&first).await.unwrap();
    let [frame] = frames.as_slice() else {
        panic!("it is one frame")
    };
    assert_eq!((frame.id, frame.kind), (7, FrameKind::Message));
    let back: T = frame::decode(&frame.payload).unwrap();
    assert_eq!(
        frame::encode(7, FrameKind::Message, &back)
            .unwrap()
            .concat(),
        first
    );
}

#[tokio::test]
async fn every_message_arrives_as_it_was_sent() {
    for (op, _) in golden::examples() {
        let owner = owner();
        let asking = RequestRef::Request {
            owner: &owner,
            op: &op,
        };
        let call = frame::encode(1, FrameKind::Message, &asking).unwrap();
        let ToDaemon::Request { op: back, .. } =
            frame::decode(&read_all(&call.concat()).await.unwrap()[0].payload).unwrap()
        else {
            panic!("a borrowed operation is written like an owned one");
        };
        assert_eq!(back.name(), op.name());
        let op = Box::new(op);
        survives(&ToDaemon::Request { owner, op }).await;
    }
    for message in [
        ToDaemon::Hello(hello(PROTOCOL, HelloPurpose::Stop { now: true })),
        ToDaemon::EndOfFile,
        ToDaemon::FileFailed,
        ToDaemon::Credit(3),
        ToDaemon::Cancel,
        ToDaemon::Forget,
    ] {
        survives(&message).await;
    }
    let status = DaemonStatus {
        protocol: 1,
        build: "b".to_owned(),
        process: 2,
        age: Duration::from_secs(3),
        sessions: 4,
        running: 5,
        frontends: 6,
    };
    for message in [
        FromDaemon::Welcome(welcome(PROTOCOL)),
        FromDaemon::Status(status),
        FromDaemon::Stop(StopReply::Busy { running: 2 }),
        FromDaemon::Preparation(Preparation::Failed {
            why: "no".to_owned(),
        }),
        FromDaemon::Progress("a line".to_owned()),
        FromDaemon::Credit(1),
    ] {
        survives(&message).await;
    }
}

#[tokio::test]
async fn a_connection_that_ends_within_a_frame_is_an_error_and_between_frames_none() {
    let whole = frame::encode(
        1,
        FrameKind::Message,
        &ToDaemon::Hello(hello(1, HelloPurpose::Serve)),
    )
    .unwrap()
    .concat();
    for size in 1..whole.len() {
        assert!(
            matches!(read_all(&whole[..size]).await, Err(IpcError::Truncated)),
            "{size}"
        );
    }
    assert_eq!(read_all(&[]).await.unwrap(), []);
    assert_eq!(read_all(&whole).await.unwrap().len(), 1); // control
}

#[tokio::test]
async fn a_frame_that_is_too_large_or_of_no_kind_is_refused_before_it_is_read() {
    let mut whole = frame::encode_raw(1, FrameKind::Chunk, &vec![0; MAX_FRAME_BYTES]);
    assert_eq!(read_all(&whole).await.unwrap().len(), 1); // control
    whole[..4].copy_from_slice(&(MAX_FRAME_BYTES as u32 + 1).to_be_bytes());
    assert!(matches!(
        read_all(&whole[..13]).await,
        Err(IpcError::FrameTooLarge(_))
    ));
    let mut unknown = frame::encode_raw(1, FrameKind::Chunk, b"x");
    unknown[4] = 9;
    assert!(matches!(
        read_all(&unknown).await,
        Err(IpcError::UnknownKind(9))
    ));
}

#[test]
fn messages_of_every_version_keep_their_names_on_the_wire() {
    let purposes = [
        (HelloPurpose::Serve, json!("Serve")),
        (HelloPurpose::Status, json!("Status")),
        (
            HelloPurpose::Stop { now: true },
            json!({"Stop": {"now": true}}),
        ),
    ];
    for (purpose, expected) in purposes {
        let hello = ToDaemon::Hello(hello(7, purpose));
        let fields = json!({"protocol": 7, "build": "test", "settings": "s", "purpose": expected});
        assert_eq!(
            serde_json::to_value(hello).unwrap(),
            json!({"Hello": fields})
        );
    }
    let status = DaemonStatus {
        protocol: 7,
        build: "test".to_owned(),
        process: 2,
        age: Duration::from_secs(3),
        sessions: 4,
        running: 5,
        frontends: 6,
    };
    let replies = [
        (
            FromDaemon::Welcome(Welcome {
                residents: Vec::new(),
                ..welcome(7)
            }),
            json!({"Welcome": {
                "protocol": 7, "build": "test", "settings": "s", "keeper": "k", "process": 1,
                "residents": [], "unfit": null,
            }}),
        ),
        (
            FromDaemon::Status(status),
            json!({"Status": {
                "protocol": 7, "build": "test", "process": 2, "age": {"secs": 3, "nanos": 0},
                "sessions": 4, "running": 5, "fronts": 6,
            }}),
        ),
        (
            FromDaemon::Stop(StopReply::Stopping),
            json!({"Stop": "Stopping"}),
        ),
        (
            FromDaemon::Stop(StopReply::Busy { running: 2 }),
            json!({"Stop": {"Busy": {"running": 2}}}),
        ),
    ];
    for (reply, expected) in replies {
        assert_eq!(serde_json::to_value(reply).unwrap(), expected);
    }
}

#[tokio::test]
async fn a_newer_peer_may_say_more_and_an_older_one_less() {
    #[derive(Serialize)]
    struct Newer {
        protocol: u32,
        build: String,
        settings: String,
        keeper: String,
        process: u32,
        mood: String,
    }
    let newer = Newer {
        protocol: 9,
        build: "b".to_owned(),
        settings: "s".to_owned(),
        keeper: "k".to_owned(),
        process: 1,
        mood: "good".to_owned(),
    };
    let bytes = rmp_serde::to_vec_named(&newer).unwrap();
    let read: Welcome = frame::decode(&bytes).unwrap();
    assert_eq!(
        (read.protocol, read.residents.len(), read.unfit),
        (9, 0, None)
    );
    // control
    assert!(frame::decode::<Welcome>(&rmp_serde::to_vec_named("nonsense").unwrap()).is_err());
}

#[tokio::test]
async fn a_large_message_comes_in_parts_and_lets_others_through() {
    let text = "x".repeat(3 * MAX_FRAME_BYTES);
    let parts = frame::encode(1, FrameKind::Reply, &text).unwrap();
    let other = frame::encode(2, FrameKind::Reply, &"short").unwrap();
    assert!(parts.len() > 3 && parts.iter().all(|part| part.len() <= MAX_FRAME_BYTES + 13));
    let (first, rest) = parts.split_first().unwrap();
    let mixed = [first.clone(), other.concat(), rest.concat()].concat();
    let mut assembler = MessageAssembler::default();
    let mut whole = Vec::new();
    for frame in read_all(&mixed).await.unwrap() {
        whole.extend(assembler.add(frame).unwrap());
    }
    assert_eq!(
        whole
            .iter()
            .map(|frame| (frame.id, frame.kind))
            .collect::<Vec<_>>(),
        [(2, FrameKind::Reply), (1, FrameKind::Reply)]
    );
    assert_eq!(frame::decode::<String>(&whole[1].payload).unwrap(), text);
}

// A frontend and a daemon.

/// Sessions that do as the code says, and remember what was done to them.
struct Puppet {
    files: Mutex<HashMap<String, Vec<u8>>>,
    session_count: watch::Sender<usize>,
    running: AtomicUsize,
    /// Lets `wait` go on.
    gate: Semaphore,
    cancelled: AtomicUsize,
    dropped: watch::Sender<usize>,
    /// Calls that have begun.
    begun: watch::Sender<usize>,
    /// Bytes that a reader has been given.
    given: watch::Sender<usize>,
    shut: AtomicUsize,
    /// Code in the order in which it came.
    order: Mutex<Vec<String>>,
    ledger: Arc<Ledger>,
}

impl Puppet {
    fn new() -> Arc<Puppet> {
        Arc::new(Puppet {
            files: Mutex::default(),
            session_count: watch::Sender::new(0),
            running: AtomicUsize::new(0),
            gate: Semaphore::new(0),
            cancelled: AtomicUsize::new(0),
            dropped: watch::Sender::new(0),
            begun: watch::Sender::new(0),
            given: watch::Sender::new(0),
            shut: AtomicUsize::new(0),
            order: Mutex::default(),
            ledger: Arc::new(Ledger::new()),
        })
    }

    fn file(&self, name: &str) -> Option<Vec<u8>> {
        self.files.lock().unwrap().get(name).cloned()
    }
}

async fn reaches(watched: &watch::Sender<usize>, count: usize) {
    let mut watched = watched.subscribe();
    tokio::time::timeout(
        Duration::from_secs(60),
        watched.wait_for(|now| *now >= count),
    )
    .await
    .unwrap()
    .unwrap();
}

/// Notices a future that is dropped before its end.
struct Watched<'a>(&'a Puppet, bool);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        if !self.1 {
            self.0.dropped.send_modify(|count| *count += 1);
        }
    }
}

fn finished(note: &str) -> ExecutionReport {
    let outcome = Box::new(Outcome {
        execution: ExecutionId(1),
        status: CellStatus::Completed,
        output: Output::default(),
        duration: Duration::ZERO,
        memory: Default::default(),
        processor_time: Duration::from_millis(3),
        variables: None,
        files: None,
        isolation: Default::default(),
        can_undo: 0,
        tool_calls: Default::default(),
        rulings: Vec::new(),
        blocked: Vec::new(),
        notes: vec![note.to_owned().into()],
        first_line: String::new(),
        others: Default::default(),
    });
    ExecutionReport::Finished {
        session: SessionId::default_session(),
        outcome,
        again: false,
    }
}

fn note(executed: ExecutionReport) -> String {
    match executed {
        ExecutionReport::Finished { mut outcome, .. } => outcome.notes.remove(0).text,
        unfinished => panic!("it has not finished: {unfinished:?}"),
    }
}

fn server_request(name: &str, params: Value) -> ServerRequest {
    ServerRequest {
        name: name.to_owned(),
        params,
        trust: Trust::Local,
    }
}

/// Approvals of every kind.
fn approval_setup() -> ApprovalSetup {
    let mut policy = Policy::new(Defaults {
        tools: Effect::Ask,
        ..Defaults::default()
    });
    policy.add(
        PolicyRule::parse(&json!({"deny": {"server": "files", "tool": "a*\\*"}})).unwrap(),
        "line 3",
    );
    ApprovalSetup {
        policy,
        store: Some("/data/approvals.yaml".into()),
        timeout: Duration::from_secs(7),
    }
}

/// A server with one tool, and one that was left out.
fn server_report(name: &str) -> ServerReport {
    let tool = ServerTool {
        name: "read-note".to_owned(),
        module: "read_note".to_owned(),
        summary: "Reads a note.".to_owned(),
        disabled: None,
    };
    ServerReport {
        name: name.to_owned(),
        package: name.to_owned(),
        transport: "stdio".to_owned(),
        registrar: Registrar::Owner,
        state: ServerState::Connected,
        tools: vec![tool],
        notes: vec!["the tool \"x\" is left out: its name is odd".to_owned()],
    }
}

impl Host for Arc<Puppet> {
    fn submit<'a>(&self, _: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        let puppet = Arc::clone(self);
        Ticket::admit(async move { puppet.answer(op, io).await })
    }
}

impl Puppet {
    async fn answer(&self, op: Op, io: Io<'_>) -> Result<Reply, Refused> {
        let transfer = |error: io::Error| Refused::Transfer {
            why: error.kind().to_string(),
        };
        Ok(match op {
            Op::Execute(op) => Reply::Execute(self.execute(op.request, io).await?),
            Op::Check(_) => Reply::Check(ExecutionReport::Nothing),
            Op::Decide(op) => {
                let ruling = |decision: Decision| Ruling {
                    kind: "tool".to_owned(),
                    digest: decision.id.0.to_string(),
                    line: "line".to_owned(),
                    by: DecidedBy::Person(decision.answer),
                };
                Reply::Decide(DecideReport {
                    session: id("a"),
                    rulings: op.decisions.into_iter().map(ruling).collect(),
                })
            }
            Op::Interrupt(_) => Reply::Interrupt(()),
            Op::Reset(_) => Reply::Reset(ResetReport {
                interrupted_running_cell: true,
                files_kept: true,
                had_no_session: false,
            }),
            Op::Undo(op) => return Err(Refused::UndoOff { id: op.session }),
            Op::SetLimits(op) if op.setup.max_running == 3 => Reply::SetLimits(()),
            Op::SetLimits(_) => return Err(Refused::ShuttingDown),
            Op::ListCheckpoints(_) => Reply::ListCheckpoints(vec![CheckpointInfo {
                cells_back: 1,
                before: "x = 1".to_owned(),
                age: Duration::from_secs(2),
            }]),
            Op::Fork(op) => {
                return Err(Refused::CannotCopy {
                    id: op.session,
                    why: "it is a puppet".to_owned(),
                });
            }
            Op::Explore(_) => {
                return Err(Refused::Explore {
                    why: "it is a puppet".to_owned(),
                });
            }
            Op::Install(op) => {
                assert_eq!(op.approval, APPROVAL);
                Reply::Install(InstallReport {
                    text: op.requirements.join(" "),
                    loaded: Vec::new(),
                    preloaded: Vec::new(),
                    ruling: None,
                })
            }
            Op::RegisterServer(ops::RegisterServer { server }) => {
                if server.params.get("command").is_none() || server.trust == Trust::Remote {
                    return Err(Refused::Server {
                        why: "it has no command".to_owned(),
                    });
                }
                Reply::RegisterServer(server_report(&server.name))
            }
            Op::SetServers(op) if op.setup.servers.is_empty() => return Err(Refused::NoServers),
            Op::SetServers(_) => Reply::SetServers(()),
            Op::SetApprovals(op) if op.setup == approval_setup() => Reply::SetApprovals(()),
            Op::SetApprovals(_) => {
                return Err(Refused::Approvals {
                    why: "others".to_owned(),
                });
            }
            Op::UnregisterServer(op) if op.name == "notes" => Reply::UnregisterServer(()),
            Op::UnregisterServer(op) => {
                return Err(Refused::Server {
                    why: format!("there is no server {:?}", op.name),
                });
            }
            Op::ListServers(_) => Reply::ListServers(vec![server_report("notes")]),
            Op::WriteFile(op) => {
                let mut watched = Watched(self, false);
                self.begun.send_modify(|count| *count += 1);
                if op.path.as_str() == "refused" {
                    watched.1 = true;
                    return Err(Refused::ClosedWhileWaiting);
                }
                let mut bytes = Vec::new();
                let read = io.body.into_source().read_to_end(&mut bytes).await;
                watched.1 = true;
                read.map_err(transfer)?;
                let size = bytes.len() as u64;
                self.files
                    .lock()
                    .unwrap()
                    .insert(op.path.to_string(), bytes);
                Reply::WriteFile(size)
            }
            Op::ReadFile(op) => {
                let mut watched = Watched(self, false);
                let bytes = self
                    .file(op.path.as_str())
                    .ok_or(Refused::Unknown { id: op.session });
                let bytes = bytes.inspect_err(|_| watched.1 = true)?;
                let mut sink = io.body.into_sink();
                for piece in bytes.chunks(CHUNK) {
                    sink.write_all(piece).await.map_err(transfer)?;
                    self.given.send_modify(|given| *given += piece.len());
                }
                watched.1 = true;
                Reply::ReadFile(bytes.len() as u64)
            }
            Op::ReadFileRange(op) => {
                let bytes = self
                    .file(op.path.as_str())
                    .ok_or(Refused::Unknown { id: op.session })?;
                let part = &bytes[op.offset as usize..][..op.length.unwrap() as usize];
                let mut sink = io.body.into_sink();
                sink.write_all(part).await.map_err(transfer)?;
                Reply::ReadFileRange(FileRange {
                    total: bytes.len() as u64,
                    sent: part.len() as u64,
                    version: "1".to_owned(),
                })
            }
            Op::ListFiles(_) => {
                let files = self.files.lock().unwrap();
                let note = |(path, bytes): (&String, &Vec<u8>)| FileNote {
                    path: path.clone(),
                    size: bytes.len() as u64,
                };
                Reply::ListFiles(FileList {
                    files: files.iter().map(note).collect(),
                    omitted: 0,
                })
            }
            Op::Upload(op) => {
                let mut bytes = Vec::new();
                let read = io.body.into_source().read_to_end(&mut bytes).await;
                let mut files = self.files.lock().unwrap();
                let file = files.entry(op.path.to_string()).or_default();
                file.append(&mut bytes);
                read.map_err(transfer)?;
                Reply::Upload(Uploaded {
                    size: file.len() as u64,
                    finished: op.part.last,
                })
            }
            Op::UploadSize(op) => {
                Reply::UploadSize(self.file(op.path.as_str()).map(|bytes| bytes.len() as u64))
            }
            Op::GetLoad(_) => Reply::GetLoad(Load {
                sessions: *self.session_count.borrow(),
                running: 0,
                waiting: 0,
            }),
            Op::ListSessions(_) => Reply::ListSessions(Vec::new()),
            Op::CloseSession(op) => return Err(Refused::Unknown { id: op.session }),
            Op::OutputSize(op) => {
                Reply::OutputSize((op.output == ExecutionId(1).into()).then_some(5))
            }
            Op::ReadOutput(op) => Reply::ReadOutput(match op.output.execution {
                ExecutionId(1) => Some(Slice {
                    bytes: b"hello"[op.offset as usize..][..op.length].to_vec(),
                    total: 5,
                    kept_in_part: false,
                }),
                ExecutionId(2) => return Err(transfer(io::ErrorKind::NotFound.into())),
                _ => None,
            }),
        })
    }

    async fn execute(
        &self,
        request: ExecuteRequest,
        io: Io<'_>,
    ) -> Result<ExecutionReport, Refused> {
        let mut watched = Watched(self, false);
        self.order.lock().unwrap().push(request.code.clone());
        self.begun.send_modify(|count| *count += 1);
        let answer = match request.code.as_str() {
            "wait" => {
                io.progress.send_replace("waiting".to_owned());
                tokio::select! {
                    permit = self.gate.acquire() => {
                        permit.unwrap().forget();
                        Ok(finished("waited"))
                    }
                    () = io.cancel.cancelled() => {
                        self.cancelled.fetch_add(1, Ordering::Relaxed);
                        Ok(finished("cancelled"))
                    }
                }
            }
            "refuse" => Err(Refused::ClosedWhileWaiting),
            "open" => {
                self.session_count.send_modify(|count| *count += 1);
                Ok(finished("opened"))
            }
            "rules" => Ok(finished(&request.rules.map_or(
                "none".to_owned(),
                |rules| {
                    rules
                        .iter()
                        .map(ToString::to_string)
                        .collect::<Vec<_>>()
                        .join(" ")
                },
            ))),
            code => Ok(finished(code)),
        };
        watched.1 = true;
        answer
    }
}

#[async_trait]
impl SessionHost for Arc<Puppet> {
    fn residents(&self) -> Vec<SessionSummary> {
        let running = self.running.load(Ordering::Relaxed) > 0;
        let resident = |number| SessionSummary {
            owner: owner(),
            id: id(&format!("resident-{number}")),
            running,
        };
        (0..*self.session_count.borrow()).map(resident).collect()
    }

    fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    fn session_count(&self) -> watch::Receiver<usize> {
        self.session_count.subscribe()
    }

    async fn shut_down(&self) {
        self.shut.fetch_add(1, Ordering::Relaxed);
        self.session_count.send_replace(0);
    }
}

const PART: UploadPart = UploadPart {
    offset: 0,
    last: false,
    overwrite: true,
};

/// A daemon in this process.
struct Scene {
    folder: Arc<tempfile::TempDir>,
    puppet: Arc<Puppet>,
    signal: Option<oneshot::Sender<()>>,
    serving: JoinHandle<ExitReason>,
}

impl Scene {
    async fn new() -> Scene {
        Scene::in_folder(Arc::new(tempfile::tempdir().unwrap())).await
    }

    async fn in_folder(folder: Arc<tempfile::TempDir>) -> Scene {
        let path = SocketPath::new(folder.path(), &"test".parse().unwrap());
        let lock = path.lock().await.unwrap();
        let socket = DaemonSocket::new(path.bind(&lock).unwrap()).unwrap();
        let puppet = Puppet::new();
        let (signal, signalled) = oneshot::channel();
        let info = DaemonInfo {
            settings: "s".to_owned(),
            build: "test".to_owned(),
        };
        let host: Arc<dyn SessionHost> = Arc::new(puppet.clone());
        let serving = tokio::spawn(serve(socket, host, info, async move {
            match signalled.await {
                Ok(()) => "SIGTERM",
                Err(_) => std::future::pending().await,
            }
        }));
        Scene {
            folder,
            puppet,
            signal: Some(signal),
            serving,
        }
    }

    fn settings(&self) -> DaemonSettings {
        settings(self.folder.path())
    }

    async fn client(&self) -> DaemonClient {
        attach(&self.settings()).await.unwrap()
    }

    /// Ends the daemon as `kill -9` would: nobody is told, and the kernel closes what was open.
    async fn kill(self) -> Arc<tempfile::TempDir> {
        self.serving.abort();
        assert!(self.serving.await.is_err());
        self.folder
    }

    async fn exit_reason(self) -> ExitReason {
        tokio::time::timeout(Duration::from_secs(60), self.serving)
            .await
            .unwrap()
            .unwrap()
    }
}

/// A program that is no daemon: where one must be started, attaching fails.
fn settings(folder: &std::path::Path) -> DaemonSettings {
    DaemonSettings {
        runtime_dir: folder.to_owned(),
        name: "test".parse().unwrap(),
        program: "/bin/false".into(),
        arguments: Vec::new(),
        hand_over: Vec::new(),
        digest: "s".to_owned(),
        files_outlive_sessions: false,
    }
}

async fn execute(
    client: &DaemonClient,
    session: &str,
    code: &str,
) -> Result<ExecutionReport, Refused> {
    execute_with(
        client,
        session,
        code,
        CancellationToken::new(),
        ProgressChannel::default(),
    )
    .await
}

async fn execute_with(
    client: &DaemonClient,
    session: &str,
    code: &str,
    cancel: CancellationToken,
    news: ProgressChannel,
) -> Result<ExecutionReport, Refused> {
    client
        .run_with(
            &owner(),
            ops::Execute {
                session: id(session),
                request: request(code),
                wait: None,
            },
            Io {
                cancel,
                progress: news,
                ..Io::default()
            },
        )
        .await
}

#[tokio::test]
async fn every_kind_of_answer_comes_back() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let (owner, session) = (owner(), id("a"));
    assert_eq!(note(execute(&client, "a", "hello").await.unwrap()), "hello");
    assert!(matches!(
        execute(&client, "a", "refuse").await,
        Err(Refused::ClosedWhileWaiting)
    ));
    assert!(
        client
            .run(
                &owner,
                ops::Reset {
                    session: session.clone()
                }
            )
            .await
            .unwrap()
            .interrupted_running_cell
    );
    assert!(matches!(
        client
            .run(
                &owner,
                ops::Undo {
                    session: session.clone(),
                    cells: 1
                }
            )
            .await,
        Err(Refused::UndoOff { .. })
    ));
    assert_eq!(
        client
            .run(
                &owner,
                ops::ListCheckpoints {
                    session: session.clone()
                }
            )
            .await
            .unwrap()[0]
            .before,
        "x = 1"
    );
    let rules = Rules::parse(&["example.com", "!ads.example.com"]).unwrap();
    let narrowed = ExecuteRequest {
        rules: Some(rules),
        ..request("rules")
    };
    let told = client
        .run_with(
            &owner,
            ops::Execute {
                session: session.clone(),
                request: narrowed,
                wait: None,
            },
            Io {
                cancel: CancellationToken::new(),
                progress: ProgressChannel::default(),
                ..Io::default()
            },
        )
        .await;
    assert_eq!(note(told.unwrap()), "example.com !ads.example.com");
    assert_eq!(note(execute(&client, "a", "rules").await.unwrap()), "none"); // control
    let names = ForkNames::Named(vec![id("b")]);
    assert!(matches!(
        client
            .run(
                &owner,
                ops::Fork {
                    session: session.clone(),
                    request: names.into()
                }
            )
            .await,
        Err(Refused::CannotCopy { .. })
    ));
    let requirements = vec!["one".to_owned(), "two".to_owned()];
    let installed = client
        .run_with(
            &owner,
            ops::Install {
                session: session.clone(),
                requirements,
                approval: APPROVAL,
            },
            Io {
                cancel: CancellationToken::new(),
                progress: ProgressChannel::default(),
                ..Io::default()
            },
        )
        .await;
    assert_eq!(installed.unwrap().text, "one two");
    let decided = client
        .run(
            &owner,
            ops::Decide {
                execution: handle(),
                decisions: vec![DECISION],
                asked_by: "".to_owned(),
            },
        )
        .await
        .unwrap();
    assert_eq!(
        (decided.session, decided.rulings[0].by),
        (id("a"), DecidedBy::Person(PersonAnswer::Session))
    );
    let request = server_request("notes", json!({"command": "x", "env": {"A": "b"}}));
    assert_eq!(
        client
            .run(&owner, ops::RegisterServer { server: request })
            .await
            .unwrap(),
        server_report("notes")
    );
    let request = server_request("notes", json!({}));
    assert!(matches!(
        client
            .run(&owner, ops::RegisterServer { server: request })
            .await,
        Err(Refused::Server { .. })
    ));
    assert!(matches!(
        client
            .run(
                &Principal::operator(),
                ops::SetServers {
                    setup: ServerSetup::default()
                }
            )
            .await,
        Err(Refused::NoServers)
    ));
    let servers = [("notes".to_owned(), json!({"command": "x"}))].into();
    client
        .run(
            &Principal::operator(),
            ops::SetServers {
                setup: ServerSetup {
                    servers,
                    ..ServerSetup::default()
                },
            },
        )
        .await
        .unwrap();
    client
        .run(
            &Principal::operator(),
            ops::SetApprovals {
                setup: approval_setup(),
            },
        )
        .await
        .unwrap();
    let quotas = Quotas {
        cells_per_minute: Some(7),
        ..Quotas::default()
    };
    client
        .run(
            &Principal::operator(),
            ops::SetLimits {
                setup: LimitSetup {
                    quotas,
                    max_running: 3,
                },
            },
        )
        .await
        .unwrap();
    assert!(
        client
            .run(
                &Principal::operator(),
                ops::SetLimits {
                    setup: LimitSetup {
                        quotas,
                        max_running: 4
                    }
                }
            )
            .await
            .is_err()
    ); // control
    let other = ApprovalSetup {
        store: None,
        ..approval_setup()
    };
    assert!(matches!(
        client
            .run(&Principal::operator(), ops::SetApprovals { setup: other })
            .await,
        Err(Refused::Approvals { .. })
    ));
    assert_eq!(
        client.run(&owner, ops::ListServers {}).await.unwrap(),
        [server_report("notes")]
    );
    client
        .run(
            &owner,
            ops::UnregisterServer {
                name: "notes".to_owned(),
            },
        )
        .await
        .unwrap();
    assert!(
        client
            .run(
                &owner,
                ops::UnregisterServer {
                    name: "other".to_owned()
                }
            )
            .await
            .is_err()
    );
    assert!(matches!(
        client
            .run(
                &owner,
                ops::CloseSession {
                    session: session.clone()
                }
            )
            .await,
        Err(Refused::Unknown { .. })
    ));
    assert_eq!(
        client
            .run(
                &owner,
                ops::OutputSize {
                    session: session.clone(),
                    output: ExecutionId(1).into()
                }
            )
            .await
            .unwrap(),
        Some(5)
    );
    assert_eq!(
        client
            .run(
                &owner,
                ops::OutputSize {
                    session: session.clone(),
                    output: ExecutionId(9).into()
                }
            )
            .await
            .unwrap(),
        None
    );
    let slice = client
        .run(
            &owner,
            ops::ReadOutput {
                session: session.clone(),
                output: ExecutionId(1).into(),
                offset: 1,
                length: 3,
            },
        )
        .await
        .unwrap()
        .unwrap();
    assert_eq!((slice.bytes.as_slice(), slice.total), (&b"ell"[..], 5));
    assert!(
        client
            .run(
                &owner,
                ops::ReadOutput {
                    session: session.clone(),
                    output: ExecutionId(2).into(),
                    offset: 0,
                    length: 1
                }
            )
            .await
            .is_err()
    );
    assert!(
        client
            .run(
                &owner,
                ops::ReadOutput {
                    session: session.clone(),
                    output: ExecutionId(9).into(),
                    offset: 0,
                    length: 1
                }
            )
            .await
            .unwrap()
            .is_none()
    );
    let mut preparation = client.preparation();
    preparation
        .wait_for(|told| *told == Preparation::Ready)
        .await
        .unwrap();
    let check = client
        .run(
            &owner,
            ops::Check {
                execution: ExecutionRef::InSession(session),
                wait: Duration::ZERO,
                max_chars: 1,
            },
        )
        .await;
    assert!(matches!(check, Ok(ExecutionReport::Nothing)));
}

#[tokio::test]
async fn many_calls_run_at_once_and_a_slow_one_holds_nobody_up() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let slow = (0..50)
        .map(|_| client.clone())
        .map(|client| tokio::spawn(async move { execute(&client, "a", "wait").await }));
    let slow = slow.collect::<Vec<_>>();
    reaches(&scene.puppet.begun, 50).await;
    for number in 0..100 {
        assert_eq!(
            note(execute(&client, "a", &number.to_string()).await.unwrap()),
            number.to_string()
        );
    }
    scene.puppet.gate.add_permits(50);
    for call in slow {
        assert_eq!(note(call.await.unwrap().unwrap()), "waited");
    }
}

#[tokio::test]
async fn a_cancelled_call_is_interrupted_and_its_news_are_heard() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let (cancel, news) = (CancellationToken::new(), ProgressChannel::default());
    let mut heard = news.subscribe();
    let call = tokio::spawn({
        let (client, cancel) = (client.clone(), cancel.clone());
        async move { execute_with(&client, "a", "wait", cancel, news).await }
    });
    assert_eq!(
        *heard.wait_for(|text| !text.is_empty()).await.unwrap(),
        "waiting"
    );
    cancel.cancel();
    assert_eq!(note(call.await.unwrap().unwrap()), "cancelled");
    assert_eq!(scene.puppet.cancelled.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_is_dropped_and_not_cancelled() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let call = tokio::spawn({
        let client = client.clone();
        async move { execute(&client, "a", "wait").await }
    });
    reaches(&scene.puppet.begun, 1).await;
    call.abort();
    reaches(&scene.puppet.dropped, 1).await;
    assert_eq!(scene.puppet.cancelled.load(Ordering::Relaxed), 0);
    assert_eq!(note(execute(&client, "a", "after").await.unwrap()), "after");
}

#[tokio::test]
async fn when_a_frontend_dies_its_calls_are_dropped_and_the_next_frontend_finds_everything() {
    let scene = Scene::new().await;
    let first = scene.client().await;
    execute(&first, "a", "open").await.unwrap();
    let call = tokio::spawn(async move { execute(&first, "a", "wait").await });
    reaches(&scene.puppet.begun, 2).await;
    call.abort();
    reaches(&scene.puppet.dropped, 1).await;
    assert_eq!(scene.puppet.cancelled.load(Ordering::Relaxed), 0);
    let second = scene.client().await;
    assert_eq!(note(execute(&second, "a", "again").await.unwrap()), "again");
}

#[tokio::test]
async fn files_travel_in_chunks_both_ways() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let content = (0..5_000_001_u32)
        .map(|number| (number % 251) as u8)
        .collect::<Vec<_>>();
    let written = client
        .run_with(
            &owner(),
            ops::WriteFile {
                session: id("a"),
                path: path("big"),
                overwrite: true,
            },
            Io::source(content.as_slice()),
        )
        .await;
    assert_eq!(written.unwrap(), content.len() as u64);
    assert_eq!(scene.puppet.file("big"), Some(content.clone()));
    let mut back = Vec::new();
    assert_eq!(
        client
            .run_with(
                &owner(),
                ops::ReadFile {
                    session: id("a"),
                    path: path("big"),
                    limit: 1 << 40
                },
                Io::sink(&mut back)
            )
            .await
            .unwrap(),
        5_000_001
    );
    assert!(back == content);
    let empty = client
        .run_with(
            &owner(),
            ops::WriteFile {
                session: id("a"),
                path: path("empty"),
                overwrite: true,
            },
            Io::source(&b""[..]),
        )
        .await;
    assert_eq!(
        (empty.unwrap(), scene.puppet.file("empty")),
        (0, Some(Vec::new()))
    );
    let missing = client
        .run_with(
            &owner(),
            ops::ReadFile {
                session: id("a"),
                path: path("none"),
                limit: 1,
            },
            Io::sink(Vec::new()),
        )
        .await;
    assert!(matches!(missing, Err(Refused::Unknown { .. })));
}

#[tokio::test]
async fn a_refused_upload_is_answered_before_its_end() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let (mut source, mut feed) = tokio::io::duplex(1024);
    feed.write_all(b"the rest never comes").await.unwrap();
    let refused = client
        .run_with(
            &owner(),
            ops::WriteFile {
                session: id("a"),
                path: path("refused"),
                overwrite: true,
            },
            Io::source(&mut source),
        )
        .await;
    assert!(matches!(refused, Err(Refused::ClosedWhileWaiting)));
}

#[tokio::test]
async fn files_travel_in_parts_and_what_arrived_before_a_failure_is_kept() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let (owner, session, name) = (owner(), id("a"), path("f"));
    assert_eq!(
        client
            .run(
                &owner,
                ops::UploadSize {
                    session: session.clone(),
                    path: name.clone()
                }
            )
            .await
            .unwrap(),
        None
    );
    let broken = client
        .run_with(
            &owner,
            ops::Upload {
                session: session.clone(),
                path: name.clone(),
                part: PART,
            },
            Io::source(Breaks(false)),
        )
        .await;
    assert!(matches!(
        broken,
        Err(Refused::Transfer { why }) if why == io::ErrorKind::TimedOut.to_string()
    ));
    assert_eq!(
        client
            .run(
                &owner,
                ops::UploadSize {
                    session: session.clone(),
                    path: name.clone()
                }
            )
            .await
            .unwrap(),
        Some(4)
    );
    let last = UploadPart {
        offset: 4,
        last: true,
        overwrite: true,
    };
    let done = client
        .run_with(
            &owner,
            ops::Upload {
                session: session.clone(),
                path: name.clone(),
                part: last,
            },
            Io::source(&b" and half"[..]),
        )
        .await
        .unwrap();
    assert_eq!(
        done,
        Uploaded {
            size: 13,
            finished: true
        }
    );
    let listed = client
        .run(
            &owner,
            ops::ListFiles {
                session: session.clone(),
            },
        )
        .await
        .unwrap();
    assert_eq!(
        listed.files,
        [FileNote {
            path: "f".to_owned(),
            size: 13
        }]
    );
    let mut read = Vec::new();
    let range = client
        .run_with(
            &owner,
            ops::ReadFileRange {
                session: session.clone(),
                path: name.clone(),
                offset: 5,
                length: Some(3),
            },
            Io::sink(&mut read),
        )
        .await
        .unwrap();
    assert_eq!(
        (read.as_slice(), range.total, range.sent),
        (&b"and"[..], 13, 3)
    );
}

/// A source that breaks after its beginning.
struct Breaks(bool);

impl AsyncRead for Breaks {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        if std::mem::replace(&mut self.0, true) {
            return std::task::Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        buffer.put_slice(b"half");
        std::task::Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn half_a_file_is_no_file() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let broken = client
        .run_with(
            &owner(),
            ops::WriteFile {
                session: id("a"),
                path: path("f"),
                overwrite: true,
            },
            Io::source(Breaks(false)),
        )
        .await;
    assert!(matches!(
        broken,
        Err(Refused::Transfer { why }) if why == io::ErrorKind::TimedOut.to_string()
    ));
    assert_eq!(scene.puppet.file("f"), None, "a source that broke");

    let (mut source, mut feed) = tokio::io::duplex(1024);
    let upload = tokio::spawn(async move {
        client
            .run_with(
                &owner(),
                ops::WriteFile {
                    session: id("a"),
                    path: path("f"),
                    overwrite: true,
                },
                Io::source(&mut source),
            )
            .await
    });
    feed.write_all(b"half").await.unwrap();
    reaches(&scene.puppet.begun, 2).await;
    upload.abort();
    reaches(&scene.puppet.dropped, 1).await;
    assert_eq!(scene.puppet.file("f"), None, "a frontend that is gone");
}

#[tokio::test]
async fn a_slow_reader_slows_its_sender_and_nobody_else() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let size = 100 * CHUNK;
    scene
        .puppet
        .files
        .lock()
        .unwrap()
        .insert("big".to_owned(), vec![7; size]);
    let (mut sink, mut end) = tokio::io::duplex(CHUNK);
    let download = tokio::spawn({
        let client = client.clone();
        async move {
            client
                .run_with(
                    &owner(),
                    ops::ReadFile {
                        session: id("a"),
                        path: path("big"),
                        limit: 1 << 40,
                    },
                    Io::sink(&mut sink),
                )
                .await
        }
    });
    // The window, the pipe of this test, and the chunk in the copier's hand.
    reaches(&scene.puppet.given, WINDOW * CHUNK).await;
    for _ in 0..200 {
        assert_eq!(note(execute(&client, "a", "1").await.unwrap()), "1");
    }
    let given = *scene.puppet.given.borrow();
    assert!(given <= (WINDOW + 3) * CHUNK, "{given} bytes are under way");
    let mut read = Vec::new();
    end.read_to_end(&mut read).await.unwrap();
    assert_eq!(
        (read.len(), download.await.unwrap().unwrap()),
        (size, size as u64)
    );
}

#[tokio::test]
async fn sessions_of_a_daemon_that_died_are_lost_by_name_until_they_are_reset() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "seen", "1").await.unwrap();
    execute(&client, "closing", "1").await.unwrap();
    let underway = tokio::spawn({
        let client = client.clone();
        async move { execute(&client, "fresh", "wait").await }
    });
    reaches(&scene.puppet.begun, 3).await;
    let folder = scene.kill().await;
    let refused = underway.await.unwrap().unwrap_err().to_string();
    assert!(
        refused.contains("variables and files are lost"),
        "{refused}"
    );

    let next = Scene::in_folder(folder).await;
    for lost in ["seen", "fresh"] {
        let refused = execute(&client, lost, "1").await.unwrap_err();
        assert!(
            matches!(&refused, Refused::Ended { id: named, .. } if *named == id(lost)),
            "{refused}"
        );
    }
    assert_eq!(note(execute(&client, "other", "1").await.unwrap()), "1"); // control
    let listed = client.run(&owner(), ops::ListSessions {}).await.unwrap();
    assert_eq!(
        listed
            .iter()
            .map(|info| info.id.as_str())
            .collect::<Vec<_>>(),
        ["closing", "fresh", "seen"]
    );
    assert!(listed.iter().all(|info| info.state == SessionState::Ended));
    client
        .run(
            &owner(),
            ops::CloseSession {
                session: id("closing"),
            },
        )
        .await
        .unwrap();
    assert!(
        !client
            .run(
                &owner(),
                ops::Reset {
                    session: id("seen")
                }
            )
            .await
            .unwrap()
            .files_kept
    );
    assert_eq!(note(execute(&client, "seen", "1").await.unwrap()), "1");
    let bob = Principal("bob".to_owned());
    let others = client
        .run_with(
            &bob,
            ops::Execute {
                session: id("fresh"),
                request: request("1"),
                wait: None,
            },
            Io {
                cancel: CancellationToken::new(),
                progress: ProgressChannel::default(),
                ..Io::default()
            },
        )
        .await;
    assert_eq!(note(others.unwrap()), "1", "another owner has lost nothing");
    assert_eq!(next.puppet.shut.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_lost_connection_to_the_same_daemon_loses_no_session() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "a", "open").await.unwrap();
    client.disconnect();
    assert_eq!(
        note(execute(&client, "a", "still there").await.unwrap()),
        "still there"
    );
}

#[tokio::test]
async fn a_daemon_that_cannot_be_started_is_told_without_names_of_this_machine() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "a", "1").await.unwrap();
    let _folder = scene.kill().await;
    client.closed().await;
    let refused = execute(&client, "b", "1").await.unwrap_err();
    assert!(matches!(refused, Refused::Launch(_)), "{refused}");
    assert!(!refused.to_string().contains('/'), "{refused}");
}

#[tokio::test]
async fn a_program_that_is_no_daemon_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(
        attach(&settings(folder.path())).await,
        Err(AttachError::ExitedAtOnce)
    ));
}

/// Answers one connection with `message`, whatever is asked.
async fn impostor(folder: &std::path::Path, message: Option<FromDaemon>) -> JoinHandle<()> {
    let path = SocketPath::new(folder, &"test".parse().unwrap());
    let listener = path.bind(&path.lock().await.unwrap()).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        let mut held = Vec::<UnixStream>::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            if let Some(message) = &message {
                let _ = frame::read(&mut stream).await;
                let frames = frame::encode(0, FrameKind::Message, message)
                    .unwrap()
                    .concat();
                let _ = stream.write_all(&frames).await;
            }
            held.push(stream);
        }
    })
}

#[tokio::test]
async fn a_daemon_of_another_protocol_is_refused_with_the_cure() {
    let folder = tempfile::tempdir().unwrap();
    let _impostor = impostor(
        folder.path(),
        Some(FromDaemon::Welcome(welcome(PROTOCOL + 1))),
    )
    .await;
    let Err(refused) = attach(&settings(folder.path())).await else {
        panic!("it is refused")
    };
    assert!(
        refused.to_string().contains("cellblock daemon stop test"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_frontend_of_another_protocol_is_told_ours_and_nothing_else() {
    let scene = Scene::new().await;
    let _frontend = scene.client().await;
    let path = SocketPath::new(scene.folder.path(), &"test".parse().unwrap());
    let mut stream = path.connect().await.unwrap().unwrap();
    let hello = frame::encode(
        0,
        FrameKind::Message,
        &ToDaemon::Hello(hello(PROTOCOL + 1, HelloPurpose::Serve)),
    )
    .unwrap();
    stream.write_all(&hello.concat()).await.unwrap();
    let answer = frame::read(&mut stream).await.unwrap().unwrap();
    let FromDaemon::Welcome(welcome) = frame::decode(&answer.payload).unwrap() else {
        panic!("it is a welcome")
    };
    assert_eq!((welcome.protocol, welcome.residents.len()), (PROTOCOL, 0));
    assert_eq!(
        frame::read(&mut stream).await.unwrap(),
        None,
        "the connection is closed"
    );
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_says_nothing_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let _impostor = impostor(folder.path(), None).await;
    let Err(refused) = attach(&settings(folder.path())).await else {
        panic!("it is refused")
    };
    assert!(
        matches!(refused, AttachError::Unresponsive { .. }),
        "{refused}"
    );
}

#[tokio::test]
async fn a_daemon_that_is_unfit_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = SocketPath::new(folder.path(), &"test".parse().unwrap());
    let socket = DaemonSocket::new(path.bind(&path.lock().await.unwrap()).unwrap()).unwrap();
    tokio::spawn(super::report_startup_failure(
        socket,
        "there is no uv".to_owned(),
    ));
    let Err(refused) = attach(&settings(folder.path())).await else {
        panic!("it is refused")
    };
    assert!(refused.to_string().contains("there is no uv"), "{refused}");
}

#[tokio::test]
async fn a_frontend_that_talks_nonsense_is_cut_off_and_others_go_on() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let path = SocketPath::new(scene.folder.path(), &"test".parse().unwrap());
    let mut stream = path.connect().await.unwrap().unwrap();
    stream.write_all(&[255; 64]).await.unwrap();
    let mut rest = Vec::new();
    // Closed or reset: what it sent was not read to its end.
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    assert_eq!(note(execute(&client, "a", "1").await.unwrap()), "1");
}

#[tokio::test]
async fn an_operator_sees_and_stops_a_daemon() {
    let scene = Scene::new().await;
    let (runtime, name) = (scene.folder.clone(), "test".parse().unwrap());
    let client = scene.client().await;
    execute(&client, "a", "open").await.unwrap();
    scene.puppet.running.store(1, Ordering::Relaxed);
    let status = query_status(runtime.path(), &name).await.unwrap().unwrap();
    assert_eq!(
        (status.sessions, status.running, status.frontends),
        (1, 1, 1)
    );
    let busy = request_stop(runtime.path(), &name, false).await.unwrap();
    assert_eq!(busy, Some(StopReply::Busy { running: 1 }));
    assert_eq!(
        note(execute(&client, "a", "goes on").await.unwrap()),
        "goes on"
    );
    assert_eq!(
        request_stop(runtime.path(), &name, true).await.unwrap(),
        Some(StopReply::Stopping)
    );
    assert_eq!(
        scene.puppet.shut.load(Ordering::Relaxed),
        1,
        "everything has ended when the operator is told"
    );
    assert_eq!(scene.exit_reason().await, ExitReason::Stopped);
    assert_eq!(super::daemons_in(runtime.path()), [], "the socket is gone");
    assert_eq!(query_status(runtime.path(), &name).await.unwrap(), None);
}

#[tokio::test]
async fn a_daemon_ends_when_it_has_neither_a_frontend_nor_a_session() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "a", "open").await.unwrap();
    drop(client);
    // It stays for its session: another frontend finds it.
    let client = scene.client().await;
    assert_eq!(note(execute(&client, "a", "1").await.unwrap()), "1");
    scene.puppet.session_count.send_replace(0);
    assert_eq!(
        note(execute(&client, "a", "1").await.unwrap()),
        "1",
        "it stays for its frontend"
    );
    drop(client);
    assert_eq!(scene.exit_reason().await, ExitReason::Unused);
}

#[tokio::test]
async fn a_daemon_waits_for_the_frontend_that_started_it_also_when_its_status_is_asked_first() {
    let scene = Scene::new().await;
    let (folder, name) = (scene.folder.clone(), "test".parse().unwrap());
    for _ in 0..3 {
        assert!(
            query_status(folder.path(), &name).await.unwrap().is_some(),
            "it stays for its frontend"
        );
    }
    let client = scene.client().await;
    assert_eq!(note(execute(&client, "a", "1").await.unwrap()), "1");
    drop(client);
    assert_eq!(scene.exit_reason().await, ExitReason::Unused);
}

#[tokio::test]
async fn a_daemon_sees_pending_connections() {
    let folder = tempfile::tempdir().unwrap();
    let path = SocketPath::new(folder.path(), &"test".parse().unwrap());
    let lock = path.lock().await.unwrap();
    let socket = DaemonSocket::new(path.bind(&lock).unwrap()).unwrap();
    assert!(socket.pending().is_none());
    let _frontend = path.connect().await.unwrap().unwrap();
    assert!(socket.pending().is_some());
    assert!(socket.pending().is_none());
}

#[tokio::test]
async fn a_daemon_without_a_frontend_ends_with_its_last_session() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "a", "open").await.unwrap();
    drop(client);
    scene.puppet.session_count.send_replace(0);
    assert_eq!(scene.exit_reason().await, ExitReason::Unused);
}

#[tokio::test]
async fn a_signal_ends_everything_in_good_order() {
    let mut scene = Scene::new().await;
    let client = scene.client().await;
    execute(&client, "a", "open").await.unwrap();
    scene.signal.take().unwrap().send(()).unwrap();
    let (folder, puppet) = (scene.folder.clone(), scene.puppet.clone());
    assert_eq!(scene.exit_reason().await, ExitReason::Signal("SIGTERM"));
    assert_eq!(puppet.shut.load(Ordering::Relaxed), 1);
    assert_eq!(super::daemons_in(folder.path()), []);
}

#[tokio::test]
async fn only_the_owner_can_reach_the_socket_and_a_stale_one_is_replaced() {
    use std::os::unix::fs::PermissionsExt;
    let scene = Scene::new().await;
    let mode = |path: &str| {
        let found = std::fs::metadata(scene.folder.path().join(path)).unwrap();
        found.permissions().mode() & 0o777
    };
    assert_eq!((mode("keeper"), mode("keeper/test.socket")), (0o700, 0o600));
    let folder = scene.kill().await;
    // What `kill -9` leaves: a socket that nobody listens to.
    std::os::unix::net::UnixListener::bind(folder.path().join("keeper/test.socket")).unwrap();
    assert_eq!(super::daemons_in(folder.path()).len(), 1);
    let next = Scene::in_folder(folder).await;
    assert_eq!(
        note(execute(&next.client().await, "a", "1").await.unwrap()),
        "1"
    );
}

#[test]
fn an_answer_that_is_too_large_becomes_a_refusal() {
    let huge = Ok(Reply::ReadOutput(Some(Slice {
        bytes: vec![0; frame::MAX_MESSAGE_BYTES + 1],
        total: 0,
        kept_in_part: false,
    })));
    let written = super::frontend_connection::encoded(1, &huge).concat();
    let answer: ReplyResult = frame::decode(&written[13..]).unwrap();
    assert!(matches!(answer, Err(Refused::Transfer { .. })));
}

#[test]
fn a_name_that_could_be_a_path_is_refused() {
    for good in ["serve", "a-b_C9", &"x".repeat(32)] {
        assert!(good.parse::<super::DaemonName>().is_ok(), "{good}");
    }
    for bad in ["", ".", "..", "a/b", "a b", "ä", &"x".repeat(33)] {
        assert!(bad.parse::<super::DaemonName>().is_err(), "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_reach_the_sessions_in_the_order_in_which_they_were_sent() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    // Some are larger than a frame, and must not be overtaken by small ones.
    let large = "x".repeat(3 * MAX_FRAME_BYTES);
    let codes: Vec<String> = (0..200)
        .map(|number| {
            format!(
                "{number} {}",
                if number % 10 == 0 { large.as_str() } else { "" }
            )
        })
        .collect();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut calls = Vec::new();
    for code in codes.clone() {
        let client = client.clone();
        let mut call = Box::pin(async move { execute(&client, "a", &code).await });
        // With its first step a call is sent. Its answer may be there at once.
        match call.as_mut().poll(&mut context) {
            std::task::Poll::Ready(answer) => drop(answer.unwrap()),
            std::task::Poll::Pending => calls.push(call),
        }
    }
    for call in calls {
        call.await.unwrap();
    }
    assert!(*scene.puppet.order.lock().unwrap() == codes);
}

fn ending(name: &str) -> ExecutionEnded {
    ExecutionEnded {
        name: name.to_owned(),
        owner: owner(),
        session: id("a"),
        code: [7; 32],
        status: StatusKind::Completed,
        duration: Duration::ZERO,
        processor_time: Duration::ZERO,
        memory_peak: 0,
        blocked: Vec::new(),
        tool_calls: Default::default(),
        rulings: Vec::new(),
        taken_over: false,
    }
}

/// Has a client record, and tells what it has recorded.
fn recorded_by(client: &DaemonClient) -> watch::Receiver<Vec<(String, bool)>> {
    let (sender, recorded) = watch::channel(Vec::new());
    let record = move |ended: &ExecutionEnded| {
        sender.send_modify(|all: &mut Vec<(String, bool)>| {
            all.push((ended.name.clone(), ended.taken_over))
        });
    };
    client.record_endings(true, Arc::new(record));
    recorded
}

#[tokio::test]
async fn executions_that_end_are_recorded_by_their_frontend_and_later_by_the_next_one() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    let mut recorded = recorded_by(&client);
    let ledger = &scene.puppet.ledger;
    ledger.enter(RecorderId(1), ending("one"));
    recorded
        .wait_for(|all| *all == [("one".to_owned(), false)])
        .await
        .unwrap();
    // An answer that is sent after the end is heard after it: the call knows that its execution is
    // recorded.
    assert_eq!(note(execute(&client, "a", "hello").await.unwrap()), "hello");
    drop(client);
    let second = scene.client().await;
    // The first frontend may still be leaving; either way the second has it in the end.
    ledger.enter(RecorderId(1), ending("two"));
    let mut recorded = recorded_by(&second);
    recorded
        .wait_for(|all| *all == [("two".to_owned(), true)])
        .await
        .unwrap();
    ledger.enter(RecorderId(2), ending("three"));
    recorded.wait_for(|all| all.len() == 2).await.unwrap();
    assert_eq!(recorded.borrow()[1], ("three".to_owned(), false));
}

#[tokio::test]
async fn a_question_about_a_session_that_does_not_exist_makes_none_known() {
    let scene = Scene::new().await;
    let client = scene.client().await;
    assert_eq!(
        client
            .run(
                &owner(),
                ops::UploadSize {
                    session: id("ghost"),
                    path: path("f")
                }
            )
            .await
            .unwrap(),
        None
    );
    let part = client
        .run_with(
            &owner(),
            ops::Upload {
                session: id("ghost"),
                path: path("f"),
                part: PART,
            },
            Io::source(&b"half"[..]),
        )
        .await
        .unwrap();
    assert!(!part.finished);
    client
        .run(
            &owner(),
            ops::Reset {
                session: id("ghost"),
            },
        )
        .await
        .unwrap();
    execute(&client, "real", "1").await.unwrap();
    let folder = scene.kill().await;
    client.closed().await;
    let _next = Scene::in_folder(folder).await;
    assert_eq!(note(execute(&client, "ghost", "1").await.unwrap()), "1");
    assert!(matches!(
        execute(&client, "real", "1").await,
        Err(Refused::Ended { .. })
    )); // control
}

/// A daemon that says welcome, and then does what the test does with its connection.
async fn silent_daemon(folder: &std::path::Path) -> (DaemonClient, UnixStream) {
    let path = SocketPath::new(folder, &"test".parse().unwrap());
    let lock = path.lock().await.unwrap();
    let socket = DaemonSocket::new(path.bind(&lock).unwrap()).unwrap();
    let settings = settings(folder);
    let attached = tokio::spawn(async move { attach(&settings).await.unwrap() });
    let mut stream = socket.accept().await.unwrap();
    frame::read(&mut stream).await.unwrap().unwrap();
    let welcome = Welcome {
        protocol: PROTOCOL,
        build: "test".to_owned(),
        settings: "s".to_owned(),
        instance: "silent".to_owned(),
        process: 1,
        residents: Vec::new(),
        unfit: None,
    };
    for frame in frame::encode(0, FrameKind::Message, &FromDaemon::Welcome(welcome)).unwrap() {
        stream.write_all(&frame).await.unwrap();
    }
    (attached.await.unwrap(), stream)
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_hangs_is_noticed_and_is_well_again_when_it_answers() {
    let folder = tempfile::tempdir().unwrap();
    let (client, mut stream) = silent_daemon(folder.path()).await;
    let started = tokio::time::Instant::now();
    let wait = Some(Duration::from_secs(1));
    let refused = client
        .run_with(
            &owner(),
            ops::Execute {
                session: id("a"),
                request: request("1"),
                wait,
            },
            Io {
                cancel: CancellationToken::new(),
                progress: ProgressChannel::default(),
                ..Io::default()
            },
        )
        .await;
    assert!(
        matches!(refused, Err(Refused::Unresponsive { sent: true })),
        "{refused:?}"
    );
    assert!(
        started.elapsed() <= Duration::from_secs(3),
        "a call is answered soon after it should have been"
    );
    assert_eq!(
        client.problem(),
        None,
        "the daemon is not given up after a few missed beats"
    );
    assert!(matches!(
        execute(&client, "a", "1").await,
        Err(Refused::Unresponsive { sent: true })
    ));
    assert!(started.elapsed() <= Duration::from_secs(15));
    assert!(client.problem().is_some());
    assert!(matches!(
        client.run(&owner(), ops::ListSessions {}).await,
        Err(Refused::Unresponsive { sent: false })
    ));
    for frame in frame::encode(0, FrameKind::Message, &FromDaemon::Heartbeat).unwrap() {
        stream.write_all(&frame).await.unwrap();
    }
    while client.problem().is_some() {
        tokio::task::yield_now().await;
    }
}
