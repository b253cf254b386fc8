//! The room as a client meets it: raw lines over a pair of in-memory pipes, and sessions that
//! answer as the test says.

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{
    AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf,
    WriteHalf,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::tools::tests::assert_valid_output;
use super::*;
use crate::ops::{Op, Reply, Ticket};
use crate::sandbox::fake::FakeBackend;
use crate::sandbox::{Isolation, LaunchError, MemoryUse, Preparation};
use crate::session::install::{InstallError, InstallReport};
use crate::session::servers::{Registrar, ServerReport, ServerState, ServerTool, Trust};
use crate::session::{
    Approver, CheckpointInfo, ExecuteRequest, ExecutionId, ExecutionReport, ExploreReport,
    ExploreRequest, FileList, FileNote, FilesCarried, ForkNames, ForkReport, Outcome, Output, Part,
    PythonError, Refused, ResetReport, SessionSettings, Sessions, Slice, StateAfter, Status,
    Stream, UndoReport, VariantReport,
};

mod approvals;

/// What the answerer of these tests printed for `long`: more than one default slice of a resource.
const LONG_OUTPUT: usize = 300_000;

/// Sessions that obey the words in a cell: `hello` prints, `wait` runs until cancelled, `stubborn`
/// never ends, `long` prints what must be cut, `import x` finds no x, `refuse` is refused, and
/// `slow` takes twelve seconds. Variants obey the same words, one after the other. A session called
/// `stuck` cannot be forked or undone in finite time.
struct FakeSessions {
    preparation: watch::Sender<Preparation>,
    /// Receives the code of each execution when it starts, the name of each other request, and word
    /// of a `wait` that was cancelled.
    started: mpsc::Sender<String>,
}

/// A server with one tool, and one that was left out.
pub(super) fn server_report(name: &str) -> ServerReport {
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

impl Host for Arc<FakeSessions> {
    fn submit<'a>(&self, _: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        let fake = Arc::clone(self);
        Ticket::admit(async move { fake.answer(op, io).await })
    }

    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.preparation.subscribe()
    }
}

impl FakeSessions {
    async fn answer(&self, op: Op, io: Io<'_>) -> Result<Reply, Refused> {
        let failed = |why: String| Refused::Launch(LaunchError::Start { why });
        let checkpoints = || {
            vec![CheckpointInfo {
                cells_back: 3,
                before: "x = 1".to_owned(),
                age: Duration::from_secs(1),
            }]
        };
        Ok(match op {
            Op::Execute(op) => {
                Reply::Execute(self.execute(op.session, op.request, io.cancel).await?)
            }
            Op::Check(_) => Reply::Check(ExecutionReport::Nothing),
            Op::Decide(_) => return Err(Refused::UnknownExecution),
            Op::Interrupt(_) => Reply::Interrupt(()),
            Op::Reset(_) => Reply::Reset(ResetReport {
                interrupted_running_cell: false,
                files_kept: true,
                had_no_session: false,
            }),
            Op::Undo(op) => {
                self.started.try_send("undo".to_owned()).unwrap();
                if op.session.as_str() == "stuck" {
                    std::future::pending::<()>().await;
                }
                Reply::Undo(UndoReport {
                    undone: op.cells,
                    revived: false,
                    lost: vec!["1 connection".to_owned()],
                    files: FilesCarried::Restored,
                    left: checkpoints(),
                    notes: Vec::new(),
                })
            }
            Op::ListCheckpoints(_) => Reply::ListCheckpoints(checkpoints()),
            Op::Fork(op) => {
                self.started.try_send("fork".to_owned()).unwrap();
                let id = op.session;
                if id.as_str() == "stuck" {
                    std::future::pending::<()>().await;
                }
                let forks = match op.request.names {
                    ForkNames::Count(count) => (1..=count)
                        .map(|number| format!("{id}-{number}").parse().unwrap())
                        .collect(),
                    ForkNames::Named(names) => names,
                };
                Reply::Fork(ForkReport {
                    forks,
                    lost: vec![],
                    files: FilesCarried::Copied,
                    notes: vec![],
                })
            }
            Op::Explore(op) => Reply::Explore(self.explore(op.request, io).await),
            Op::Install(op) => {
                io.progress.send_replace("resolving packages".to_owned());
                let install_failed =
                    |why: &str| Err(Refused::Install(InstallError::Failed(why.to_owned())));
                match op.requirements[0].as_str() {
                    "endless" => {
                        io.cancel.cancelled().await;
                        return install_failed("it was interrupted");
                    }
                    "nothing" => return install_failed("No solution found"),
                    _ => Reply::Install(InstallReport {
                        text: format!("Installed {}", op.requirements.join(" ")),
                        loaded: vec!["numpy".to_owned()],
                        preloaded: Vec::new(),
                        ruling: None,
                    }),
                }
            }
            Op::RegisterServer(ops::RegisterServer { server }) => {
                if server.params.get("command").is_none() || server.trust == Trust::Remote {
                    let why = "it has no command".to_owned();
                    return Err(Refused::Server { why });
                }
                Reply::RegisterServer(server_report(&server.name))
            }
            Op::UnregisterServer(op) if op.name == "notes" => Reply::UnregisterServer(()),
            Op::UnregisterServer(op) => {
                let why = format!("there is no server {:?}", op.name);
                return Err(Refused::Server { why });
            }
            Op::ListServers(_) => Reply::ListServers(vec![server_report("notes")]),
            Op::WriteFile(_) => {
                let mut bytes = Vec::new();
                let read = io.body.into_source().read_to_end(&mut bytes).await;
                Reply::WriteFile(read.map_err(|error| failed(error.to_string()))? as u64)
            }
            Op::ReadFile(op) => {
                let mut sink = io.body.into_sink();
                sink.write_all(b"half").await.unwrap();
                if op.path.as_str() == "broken" {
                    return Err(failed("the file went away".to_owned()));
                }
                sink.write_all(b"whole").await.unwrap();
                Reply::ReadFile(9)
            }
            Op::ListFiles(op) => {
                let path = if op.session.as_str() == "own" {
                    "lib/regex.py"
                } else {
                    "data/ä.csv"
                };
                Reply::ListFiles(FileList {
                    files: vec![FileNote {
                        path: path.to_owned(),
                        size: 9,
                    }],
                    omitted: 0,
                })
            }
            Op::ListSessions(_) => Reply::ListSessions(Vec::new()),
            Op::CloseSession(_) => Reply::CloseSession(()),
            Op::OutputSize(op) => Reply::OutputSize(
                (op.output == ExecutionId(1).into()).then_some(LONG_OUTPUT as u64),
            ),
            Op::ReadOutput(op) => {
                let total = LONG_OUTPUT as u64;
                let left = total.saturating_sub(op.offset).min(op.length as u64) as usize;
                let slice = || Slice {
                    bytes: vec![b'x'; left],
                    total,
                    kept_in_part: false,
                };
                Reply::ReadOutput((op.output == ExecutionId(1).into()).then(slice))
            }
            Op::GetLoad(_)
            | Op::SetServers(_)
            | Op::SetApprovals(_)
            | Op::SetLimits(_)
            | Op::ReadFileRange(_)
            | Op::Upload(_)
            | Op::UploadSize(_) => unreachable!("MCP does not use it"),
        })
    }

    async fn execute(
        &self,
        session: SessionId,
        request: ExecuteRequest,
        cancel: CancellationToken,
    ) -> Result<ExecutionReport, Refused> {
        self.started.try_send(request.code.clone()).unwrap();
        let said = |text: &str| Part::Text {
            stream: Stream::Stdout,
            text: text.to_owned(),
        };
        let (status, parts, cut_chars) = match request.code.as_str() {
            "wait" => {
                cancel.cancelled().await;
                self.started
                    .try_send("wait was cancelled".to_owned())
                    .unwrap();
                (
                    Status::Cancelled {
                        state: StateAfter::Kept,
                    },
                    vec![],
                    0,
                )
            }
            "stubborn" => std::future::pending().await,
            "slow" => {
                tokio::time::sleep(Duration::from_secs(12)).await;
                (Status::Completed, vec![said("done")], 0)
            }
            "long" => {
                let cut = LONG_OUTPUT as u64 - 2;
                (
                    Status::Completed,
                    vec![
                        said("a"),
                        Part::Cut {
                            chars: cut,
                            lines: 1,
                        },
                        said("z"),
                    ],
                    cut,
                )
            }
            import if import.starts_with("import ") => {
                let message = format!("No module named '{}'", import.trim_start_matches("import "));
                let (name, traceback) = (
                    "ModuleNotFoundError".to_owned(),
                    format!("ModuleNotFoundError: {message}"),
                );
                let parts = vec![Part::Text {
                    stream: Stream::Traceback,
                    text: traceback.clone(),
                }];
                (
                    Status::Raised(PythonError {
                        name,
                        message,
                        traceback,
                        line: Some(1),
                    }),
                    parts,
                    0,
                )
            }
            "refuse" => {
                return Err(Refused::Launch(LaunchError::Start {
                    why: "no room".to_owned(),
                }));
            }
            _ => (Status::Completed, vec![said("hello\n")], 0),
        };
        let mut preparation = self.preparation.subscribe();
        let settled = |state: &Preparation| !matches!(state, Preparation::Working { .. });
        preparation
            .wait_for(settled)
            .await
            .expect("the sender is ours");
        let outcome = Box::new(Outcome {
            execution: ExecutionId(1),
            status,
            output: Output {
                parts,
                total_chars: 6,
                total_lines: 1,
                cut_chars,
                figures: 0,
                late: None,
            },
            duration: Duration::from_millis(1),
            memory: MemoryUse::default(),
            processor_time: Duration::from_millis(3),
            variables: None,
            files: None,
            isolation: Isolation::default(),
            can_undo: 3,
            tool_calls: Default::default(),
            rulings: Vec::new(),
            blocked: Vec::new(),
            notes: Vec::new(),
            first_line: String::new(),
            others: Default::default(),
        });
        Ok(ExecutionReport::Finished {
            session,
            outcome,
            again: false,
        })
    }

    async fn explore(&self, request: ExploreRequest, io: Io<'_>) -> ExploreReport {
        let (timeout, max_output_chars) = (request.timeout, request.max_output_chars);
        let total = request.variants.len();
        let mut variants = Vec::new();
        for (number, variant) in request.variants.into_iter().enumerate() {
            let cell = ExecuteRequest {
                code: variant.code,
                timeout,
                max_output_chars,
                asking: Approver::Nobody,
                rules: None,
                recorder: Default::default(),
            };
            variants.push(VariantReport {
                name: variant.name,
                ended: self
                    .execute(SessionId::default_session(), cell, io.cancel.clone())
                    .await
                    .map(finished),
                score: None,
            });
            let progress = format!("{} of {total} variants finished", number + 1);
            io.progress.send_replace(progress);
        }
        ExploreReport {
            variants,
            kept: vec![],
            replaced: false,
            notes: vec![],
            lost: vec![],
        }
    }
}

fn finished(executed: ExecutionReport) -> Outcome {
    match executed {
        ExecutionReport::Finished { outcome, .. } => *outcome,
        _ => unreachable!("nobody asked to be answered early"),
    }
}

/// A client that writes and reads lines, and knows nothing of MCP.
struct Client {
    to_server: Option<WriteHalf<DuplexStream>>,
    from_server: Lines<BufReader<ReadHalf<DuplexStream>>>,
    serving: JoinHandle<Result<(), ServeError>>,
    started: mpsc::Receiver<String>,
    preparation: watch::Sender<Preparation>,
    folder: TempDir,
}

impl Client {
    /// A client of sessions that obey the words in a cell.
    fn new() -> Client {
        let (started_sender, started) = mpsc::channel(64);
        let preparation = watch::Sender::new(Preparation::Ready);
        let sessions = FakeSessions {
            preparation: preparation.clone(),
            started: started_sender,
        };
        Client::of(Arc::new(Arc::new(sessions)), started, preparation)
    }

    /// A client of real sessions on a backend that isolates nothing.
    async fn of_real_sessions() -> Client {
        let sessions = Sessions::new(Arc::new(FakeBackend::new()), SessionSettings::default());
        let (_, never) = mpsc::channel(64);
        let mut client = Client::of(
            Arc::new(sessions),
            never,
            watch::Sender::new(Preparation::Ready),
        );
        client.ask(initialize("2025-11-25")).await;
        client
    }

    fn of(
        sessions: Arc<dyn Host>,
        started: mpsc::Receiver<String>,
        preparation: watch::Sender<Preparation>,
    ) -> Client {
        let folder = tempfile::tempdir().unwrap();
        let files = HostFiles::new(&[folder.path().to_owned()], 100).unwrap();
        let server = Server::new(sessions, files, McpSettings::default());
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (reader, writer) = tokio::io::split(far);
        let serving = tokio::spawn(stdio::serve(server, Box::new(reader), Box::new(writer)));
        let (from_server, to_server) = tokio::io::split(near);
        let from_server = BufReader::new(from_server).lines();
        Client {
            to_server: Some(to_server),
            from_server,
            serving,
            started,
            preparation,
            folder,
        }
    }

    /// A client that has opened the connection with `initialize`.
    async fn legacy(version: &str) -> Client {
        let mut client = Client::new();
        let answer = client.ask(initialize(version)).await;
        assert_eq!(answer["result"]["protocolVersion"], version);
        client
            .send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            .await;
        client
    }

    async fn send_line(&mut self, line: &[u8]) {
        let to_server = self.to_server.as_mut().expect("the client has not left");
        to_server.write_all(line).await.unwrap();
        to_server.write_all(b"\n").await.unwrap();
    }

    async fn send(&mut self, message: Value) {
        self.send_line(message.to_string().as_bytes()).await;
    }

    async fn next(&mut self) -> Value {
        let line = self
            .from_server
            .next_line()
            .await
            .unwrap()
            .expect("the server is still there");
        serde_json::from_str(&line).expect("every line is JSON")
    }

    /// Sends a request and returns the next message, which must be its answer.
    async fn ask(&mut self, request: Value) -> Value {
        let id = request["id"].clone();
        self.send(request).await;
        let answer = self.next().await;
        assert_eq!(answer["id"], id, "{answer}");
        answer
    }

    /// Runs a cell and returns its result, which must fit the schema.
    async fn run(&mut self, code: &str) -> Value {
        let result = self.ask(execute(1, code)).await["result"].take();
        assert_valid_output("execute_ipython_cell", &result["structuredContent"]);
        result
    }

    /// Closes the input and returns how serving ended and what else was written.
    async fn leave(mut self) -> (Result<(), ServeError>, Vec<Value>) {
        let mut to_server = self.to_server.take().unwrap();
        to_server.shutdown().await.unwrap();
        let ended = self.serving.await.unwrap();
        let mut rest = Vec::new();
        while let Some(line) = self.from_server.next_line().await.unwrap() {
            rest.push(serde_json::from_str(&line).expect("every line is JSON"));
        }
        (ended, rest)
    }
}

fn initialize(version: &str) -> Value {
    let params = json!({
        "protocolVersion": version,
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    });
    request(0, "initialize", params)
}

fn request(id: i64, method: &str, params: Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

fn modern(id: i64, method: &str, mut params: Value) -> Value {
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
    params["_meta"]["io.modelcontextprotocol/clientCapabilities"] = json!({});
    request(id, method, params)
}

fn execute(id: i64, code: &str) -> Value {
    request(
        id,
        "tools/call",
        json!({"name": "execute_ipython_cell", "arguments": {"code": code}}),
    )
}

fn cancel(id: i64) -> Value {
    json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}})
}

fn call(tool: &str, arguments: Value) -> Value {
    request(
        1,
        "tools/call",
        json!({"name": tool, "arguments": arguments}),
    )
}

fn text(answer: &Value) -> &str {
    answer["result"]["content"][0]["text"]
        .as_str()
        .unwrap_or_else(|| panic!("no text in {answer}"))
}

#[tokio::test]
async fn older_clients_are_served_in_their_own_version() {
    for version in ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"] {
        let mut client = Client::legacy(version).await;
        let answer = client.ask(execute(1, "hello")).await;
        assert_eq!(text(&answer), "hello");
        assert_eq!(answer["result"]["isError"], false);
        assert!(answer["result"]["structuredContent"].is_object());
        assert_eq!(
            answer["result"].get("resultType"),
            None,
            "older protocols have no result type"
        );
        assert_eq!(answer["result"].get("_meta"), None);
        let tools = client.ask(request(2, "tools/list", json!({}))).await;
        assert_eq!(
            tools["result"].get("ttlMs"),
            None,
            "older protocols have no cache hints"
        );
        assert!(client.leave().await.0.is_ok());
    }
}

#[tokio::test]
async fn initialize_tells_who_we_are_and_what_we_can() {
    let mut client = Client::new();
    let result = &client.ask(initialize("2025-11-25")).await["result"];
    assert_eq!(result["serverInfo"]["name"], "cellblock");
    assert_eq!(result["serverInfo"]["title"], "Cellblock");
    assert_eq!(result["serverInfo"]["version"], env!("CARGO_PKG_VERSION"));
    let tasks = json!({"io.modelcontextprotocol/tasks": {}});
    assert_eq!(
        result["capabilities"],
        json!({"tools": {}, "resources": {}, "extensions": tasks})
    );
    assert!(result["instructions"].as_str().unwrap().len() < 600);
}

#[tokio::test]
async fn a_failed_import_names_the_package_unless_the_module_is_the_users_own() {
    let mut client = Client::legacy("2025-11-25").await;
    let told = client.run("import cv2").await;
    let expected = "ModuleNotFoundError: No module named 'cv2'\n`cv2` is not installed here; call \
                    install_package with \
                    package_name \"opencv-python-headless\" and run the cell again.";
    assert_eq!(
        (
            &told["content"][0]["text"],
            &told["structuredContent"]["text"]
        ),
        (&json!(expected), &json!(expected))
    );
    for (session, code, is_offered) in [
        ("a", "import helpers", false),
        ("a", "import regex", true),
        ("own", "import regex", false),
    ] {
        let told = client
            .ask(call(
                "execute_ipython_cell",
                json!({"code": code, "session_id": session}),
            ))
            .await;
        assert_eq!(
            text(&told).contains("install_package"),
            is_offered,
            "{session}: {told}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_import_during_an_installation_is_told_to_wait_for_it() {
    let mut client = Client::legacy("2025-11-25").await;
    let begun = client
        .ask(call(
            "install_package",
            json!({"package_name": "endless", "session_id": "a"}),
        ))
        .await;
    assert!(text(&begun).starts_with("Still at work"), "{begun}");
    let import = |session: &str| {
        call(
            "execute_ipython_cell",
            json!({"code": "import cv2", "session_id": session}),
        )
    };
    let told = client.ask(import("a")).await;
    assert!(text(&told).ends_with(
        "`cv2` is not installed yet: an installation in this session goes on. Call check_execution \
         with session_id \"a\" \
         until it has ended, and run the cell again."
    ), "{told}");
    let elsewhere = client.ask(import("b")).await;
    assert!(
        text(&elsewhere).contains("call install_package"),
        "{elsewhere}"
    );
    let ended = client
        .ask(call(
            "check_execution",
            json!({"session_id": "a", "interrupt": true}),
        ))
        .await;
    assert!(text(&ended).contains("it was interrupted"), "{ended}");
    let told = client.ask(import("a")).await;
    assert!(text(&told).contains("call install_package"), "{told}");
}

#[tokio::test]
async fn a_version_nobody_knows_is_answered_with_one_we_speak() {
    let mut client = Client::new();
    assert_eq!(
        client.ask(initialize("1999-01-01")).await["result"]["protocolVersion"],
        "2025-11-25"
    );
}

#[tokio::test]
async fn a_modern_client_needs_no_opening_and_every_result_names_the_server() {
    let mut client = Client::new();
    let discovered = client.ask(modern(1, "server/discover", json!({}))).await;
    let versions = discovered["result"]["supportedVersions"]
        .as_array()
        .unwrap()
        .clone();
    assert!(versions.contains(&json!("2026-07-28")) && versions.contains(&json!("2025-11-25")));
    let requests = [
        modern(2, "tools/list", json!({})),
        modern(
            3,
            "tools/call",
            json!({"name": "execute_ipython_cell", "arguments": {"code": "hello"}}),
        ),
        modern(
            4,
            "tools/call",
            json!({"name": "execute_ipython_cell", "arguments": {"cod": "hello"}}),
        ),
        modern(5, "resources/list", json!({})),
        modern(6, "resources/templates/list", json!({})),
        modern(
            7,
            "resources/read",
            json!({"uri": "cellblock://sessions/default/executions/1/output"}),
        ),
    ];
    for request in requests {
        let method = request["method"].clone();
        let result = client.ask(request).await["result"].clone();
        assert_eq!(result["resultType"], "complete", "{method}");
        assert_eq!(
            result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"], "cellblock",
            "{method}"
        );
        if method != "tools/call" {
            assert_eq!(result["cacheScope"], "private", "{method}");
            assert!(result["ttlMs"].is_u64(), "{method}");
        }
    }
}

#[tokio::test]
async fn a_modern_request_without_its_metadata_is_refused_by_name() {
    let mut client = Client::new();
    let answer = client.ask(request(1, "tools/list", json!({}))).await;
    assert_eq!(answer["error"]["code"], -32602);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("protocolVersion"),
        "{answer}"
    );
    let mut wrong_version = modern(2, "tools/list", json!({}));
    wrong_version["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] =
        json!("2031-01-01");
    assert_eq!(client.ask(wrong_version).await["error"]["code"], -32022);
    assert!(
        client.ask(modern(3, "tools/list", json!({}))).await["result"].is_object(),
        "the connection goes on"
    );
}

#[tokio::test]
async fn a_client_may_probe_cancel_its_probe_and_then_open_the_old_way() {
    let mut client = Client::new();
    client
        .send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        .await;
    assert!(client.ask(modern(7, "server/discover", json!({}))).await["result"].is_object());
    client.send(cancel(7)).await;
    assert_eq!(
        client.ask(request(8, "ping", json!({}))).await["result"],
        json!({})
    );
    client
        .send(json!({"jsonrpc": "2.0", "id": 99, "result": {}}))
        .await;
    let mut refused = modern(9, "tools/list", json!({}));
    refused["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!("2031-01-01");
    assert_eq!(client.ask(refused).await["error"]["code"], -32022);
    client.send(cancel(9)).await;
    assert_eq!(
        client.ask(initialize("2025-06-18")).await["result"]["protocolVersion"],
        "2025-06-18"
    );
    assert_eq!(text(&client.ask(execute(1, "hello")).await), "hello");
}

#[tokio::test]
async fn bad_lines_are_answered_and_the_connection_goes_on() {
    let mut client = Client::legacy("2025-11-25").await;
    for (line, id, code) in [
        ("this is not JSON", Value::Null, -32700),
        (
            r#"[{"jsonrpc":"2.0","id":5,"method":"ping"}]"#,
            Value::Null,
            -32600,
        ),
        (
            r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#,
            Value::Null,
            -32600,
        ),
        (
            r#"{"jsonrpc":"2.0","id":6,"method":"tools/call","params":{"name":7}}"#,
            json!(6),
            -32602,
        ),
        (
            r#"{"jsonrpc":"2.0","id":7,"method":"no/such/method"}"#,
            json!(7),
            -32601,
        ),
        (
            r#"{"jsonrpc":"2.0","id":8,"method":"tools/call","params":{"name":"nothing"}}"#,
            json!(8),
            -32602,
        ),
        (
            r#"{"jsonrpc":"2.0","id":9,"method":"tools/list","params":{"cursor":"x"}}"#,
            json!(9),
            -32602,
        ),
    ] {
        client.send_line(line.as_bytes()).await;
        let answer = client.next().await;
        assert_eq!(
            (answer["id"].clone(), answer["error"]["code"].clone()),
            (id, json!(code)),
            "{line}"
        );
    }
    assert_eq!(text(&client.ask(execute(10, "hello")).await), "hello");
}

#[tokio::test]
async fn an_over_long_line_is_answered_and_skipped() {
    let mut client = Client::legacy("2025-11-25").await;
    let line = vec![b' '; 17 * 1024 * 1024];
    let mut to_server = client.to_server.take().unwrap();
    let sending = tokio::spawn(async move {
        to_server.write_all(&line).await.unwrap();
        to_server.write_all(b"\n").await.unwrap();
        to_server
    });
    let answer = client.next().await;
    assert_eq!(
        (answer["id"].clone(), answer["error"]["code"].clone()),
        (Value::Null, json!(-32600))
    );
    client.to_server = Some(sending.await.unwrap());
    assert_eq!(text(&client.ask(execute(1, "hello")).await), "hello");
}

#[tokio::test]
async fn what_is_not_declared_does_not_answer() {
    let mut client = Client::legacy("2025-11-25").await;
    let completion = json!({
        "ref": {"type": "ref/prompt", "name": "a"}, "argument": {"name": "a", "value": "b"},
    });
    for (method, params) in [
        ("prompts/get", json!({"name": "a"})),
        ("completion/complete", completion),
        ("logging/setLevel", json!({"level": "info"})),
        (
            "resources/subscribe",
            json!({"uri": "cellblock://sessions/a/executions/1/output"}),
        ),
    ] {
        assert_eq!(
            client.ask(request(1, method, params)).await["error"]["code"],
            -32601,
            "{method}"
        );
    }
    let prompts = client.ask(request(1, "prompts/list", json!({}))).await;
    assert_eq!(
        prompts["result"],
        json!({"prompts": []}),
        "some clients ask without a declaration"
    );
    let task = client
        .ask(request(1, "tasks/get", json!({"taskId": "a"})))
        .await;
    assert_eq!(
        task["error"]["code"], -32021,
        "this client did not say that it knows tasks"
    );
}

#[tokio::test]
async fn two_requests_with_one_id_do_not_lose_an_answer() {
    let mut client = Client::legacy("2025-11-25").await;
    client.send(execute(5, "wait")).await;
    client.started.recv().await.unwrap();
    client.send(request(5, "tools/list", json!({}))).await;
    let answer = client.next().await;
    assert_eq!(
        (answer["id"].clone(), answer["error"]["code"].clone()),
        (Value::Null, json!(-32600))
    );
    client.send(cancel(5)).await;
    assert!(client.ask(request(6, "tools/list", json!({}))).await["result"].is_object());
}

#[tokio::test]
async fn bad_arguments_are_a_tool_result_and_nothing_is_executed() {
    let mut client = Client::legacy("2025-11-25").await;
    let answer = client
        .ask(call(
            "execute_ipython_cell",
            json!({"code": "hello", "time_out": 1}),
        ))
        .await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(
        text(&answer).contains("Did you mean \"timeout\"?"),
        "{answer}"
    );
    assert!(
        client.started.try_recv().is_err(),
        "nothing may be executed"
    );
    client
        .ask(call(
            "execute_ipython_cell",
            json!({"code": "hello", "timeout": 1}),
        ))
        .await;
    assert_eq!(client.started.try_recv().unwrap(), "hello");
}

#[tokio::test]
async fn a_refusal_of_the_session_is_a_tool_result_with_its_reason() {
    let mut client = Client::legacy("2025-11-25").await;
    let answer = client.ask(execute(1, "refuse")).await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(
        text(&answer).ends_with("the sandbox could not be started: no room"),
        "{answer}"
    );
}

#[tokio::test]
async fn an_unknown_tool_is_answered_with_the_nearest_name() {
    let mut client = Client::legacy("2025-11-25").await;
    let answer = client.ask(call("execute_python_cell", json!({}))).await;
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("\"execute_ipython_cell\"?"),
        "{answer}"
    );
}

#[tokio::test]
async fn the_other_tools_answer_in_their_schemas() {
    let mut client = Client::legacy("2025-11-25").await;
    for tool in ["reset", "list_sessions", "close_session"] {
        let answer = client.ask(call(tool, json!({}))).await;
        assert_eq!(answer["result"]["isError"], false, "{answer}");
        assert_valid_output(tool, &answer["result"]["structuredContent"]);
    }
}

#[tokio::test]
async fn sessions_branch_in_both_eras_and_answer_in_their_schemas() {
    let variants = json!([
        {"name": "a", "code": "hello"},
        {"name": "b", "code": "long"},
        {"name": "c", "code": "refuse"},
    ]);
    let calls = [
        ("fork_session", json!({"count": 2})),
        (
            "fork_session",
            json!({"session_id": "s", "names": ["left", "right"]}),
        ),
        ("undo", json!({"cells": 2})),
        ("list_checkpoints", json!({})),
        ("explore", json!({"variants": variants})),
    ];
    let (mut older, mut newer) = (Client::legacy("2025-11-25").await, Client::new());
    for (tool, arguments) in calls {
        let parameters = json!({"name": tool, "arguments": arguments});
        let old = older
            .ask(request(1, "tools/call", parameters.clone()))
            .await;
        let new = newer.ask(modern(1, "tools/call", parameters)).await;
        assert_eq!(old["result"]["isError"], false, "{old}");
        assert_eq!(new["result"]["resultType"], "complete", "{new}");
        assert_valid_output(tool, &old["result"]["structuredContent"]);
        assert_eq!(
            old["result"]["structuredContent"],
            new["result"]["structuredContent"]
        );
    }
}

#[tokio::test]
async fn forks_undone_cells_and_variants_are_told() {
    let mut client = Client::legacy("2025-11-25").await;
    let forked = client
        .ask(call(
            "fork_session",
            json!({"session_id": "s", "names": ["left", "right"]}),
        ))
        .await;
    assert_eq!(
        forked["result"]["structuredContent"]["forks"],
        json!(["left", "right"])
    );
    assert_eq!(forked["result"]["structuredContent"]["source"], "s");
    let undone =
        client.ask(call("undo", json!({"cells": 2}))).await["result"]["structuredContent"].take();
    assert_eq!(
        (&undone["undone"], &undone["not_carried_over"]),
        (&json!(2), &json!(["1 connection"]))
    );
    assert_eq!(
        undone["can_undo"],
        json!([{"cells": 3, "before": "x = 1", "age_seconds": 1.0}])
    );
    assert_eq!(
        client.run("hello").await["structuredContent"]["can_undo"],
        3
    );
    let variants = json!([{"name": "a", "code": "hello"}, {"name": "b", "code": "refuse"}]);
    let explored = client
        .ask(call("explore", json!({"variants": variants})))
        .await;
    let compared = &explored["result"]["structuredContent"]["variants"];
    assert_eq!(
        (&compared[0]["status"], &compared[1]["status"]),
        (&json!("ok"), &json!("refused"))
    );
    assert!(
        text(&explored).contains("--- b ---") && text(&explored).contains("no room"),
        "{explored}"
    );
}

#[tokio::test]
async fn bad_arguments_of_a_branch_are_results_that_say_what_to_do() {
    let mut client = Client::legacy("2025-11-25").await;
    for (tool, arguments, words) in [
        (
            "fork_session",
            json!({"count": 2, "names": ["a"]}),
            "leave one of them out",
        ),
        ("undo", json!({"cells": 0}), "1 to 100"),
        (
            "list_checkpoints",
            json!({"sesion_id": "a"}),
            "\"session_id\"?",
        ),
        ("explore", json!({"variants": []}), "1 to 16"),
    ] {
        let answer = client.ask(call(tool, arguments)).await;
        assert_eq!(answer["result"]["isError"], true, "{answer}");
        assert!(
            text(&answer).contains(words) && text(&answer).contains("Nothing was executed"),
            "{answer}"
        );
    }
    assert!(
        client.started.try_recv().is_err(),
        "nothing reached a session"
    );
}

#[tokio::test]
async fn a_cancelled_exploration_ends_its_variants_and_is_not_answered() {
    let mut client = Client::legacy("2025-11-25").await;
    client
        .send(call(
            "explore",
            json!({"variants": [{"name": "a", "code": "wait"}]}),
        ))
        .await;
    assert_eq!(client.started.recv().await.unwrap(), "wait");
    client.send(cancel(1)).await;
    assert_eq!(client.started.recv().await.unwrap(), "wait was cancelled");
    let (ended, rest) = client.leave().await;
    assert!(ended.is_ok() && rest.is_empty(), "{rest:?}");
}

#[tokio::test]
async fn a_fork_or_an_undo_that_is_cancelled_lets_the_next_call_go() {
    for tool in ["fork_session", "undo"] {
        let mut client = Client::legacy("2025-11-25").await;
        client
            .send(call(tool, json!({"session_id": "stuck"})))
            .await;
        client.started.recv().await.unwrap();
        client.send(cancel(1)).await;
        assert_eq!(text(&client.ask(execute(2, "hello")).await), "hello");
        assert!(
            client.leave().await.1.is_empty(),
            "nothing follows for a cancelled request"
        );
    }
}

#[tokio::test]
async fn calls_that_branch_a_session_keep_their_place_among_the_others() {
    let mut client = Client::legacy("2025-11-25").await;
    let explore = json!({"variants": [{"name": "a", "code": "explored"}]});
    for round in 0..20 {
        let number = |offset: i64| round * 10 + offset;
        let with_id = |id: i64, mut call: Value| {
            call["id"] = json!(id);
            call
        };
        client.send(execute(number(1), "cell")).await;
        client
            .send(with_id(number(2), call("fork_session", json!({}))))
            .await;
        client
            .send(with_id(number(3), call("undo", json!({}))))
            .await;
        client
            .send(with_id(number(4), call("explore", explore.clone())))
            .await;
        client.send(execute(number(5), "last")).await;
        for expected in ["cell", "fork", "undo", "explored", "last"] {
            assert_eq!(client.started.recv().await.unwrap(), expected);
        }
        for _ in 0..5 {
            client.next().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_exploration_with_a_token_counts_its_variants() {
    let mut client = Client::legacy("2025-11-25").await;
    let variants: Vec<Value> = (0..3)
        .map(|number| json!({"name": format!("v{number}"), "code": "slow"}))
        .collect();
    let mut explore = call("explore", json!({"variants": variants}));
    explore["params"]["_meta"] = json!({"progressToken": "p"});
    client.send(explore).await;
    let mut messages: Vec<String> = Vec::new();
    loop {
        let message = client.next().await;
        if message["id"] == 1 {
            break;
        }
        messages.push(message["params"]["message"].as_str().unwrap().to_owned());
    }
    messages.dedup();
    let expected = [
        "running for 5 s (time-out 2 min)",
        "running for 10 s (time-out 2 min)",
        "1 of 3 variants finished",
        "2 of 3 variants finished",
    ];
    assert_eq!(messages, expected);
}

#[tokio::test]
async fn a_cancelled_call_ends_and_is_not_answered() {
    let mut client = Client::legacy("2025-11-25").await;
    client.send(execute(1, "wait")).await;
    client.started.recv().await.unwrap();
    client.send(cancel(1)).await;
    assert_eq!(client.started.recv().await.unwrap(), "wait was cancelled");
    assert_eq!(
        client.ask(request(2, "ping", json!({}))).await["result"],
        json!({})
    );
    let (ended, rest) = client.leave().await;
    assert!(ended.is_ok());
    assert_eq!(
        rest,
        Vec::<Value>::new(),
        "nothing follows for a cancelled request"
    );
}

#[tokio::test]
async fn calls_run_side_by_side() {
    let mut client = Client::legacy("2025-11-25").await;
    client.send(execute(1, "wait")).await;
    client.started.recv().await.unwrap();
    assert_eq!(text(&client.ask(execute(2, "hello")).await), "hello");
}

#[tokio::test(start_paused = true)]
async fn more_calls_than_the_server_takes_are_told_that_it_is_busy() {
    let mut client = Client::legacy("2025-11-25").await;
    for number in 0..MAX_CALLS {
        client.send(execute(100 + number as i64, "wait")).await;
        client.started.recv().await.unwrap();
    }
    let answer = client.ask(execute(1, "hello")).await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(text(&answer).contains("256 of your calls"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_input_cancels_running_calls_and_serving_ends_well() {
    let mut client = Client::legacy("2025-11-25").await;
    client.send(execute(1, "wait")).await;
    client.started.recv().await.unwrap();
    let left_at = tokio::time::Instant::now();
    let (ended, rest) = client.leave().await;
    assert!(ended.is_ok());
    assert!(
        left_at.elapsed() < Duration::from_millis(100),
        "{:?}",
        left_at.elapsed()
    );
    assert_eq!(
        rest.len(),
        1,
        "the cancelled call is still answered: {rest:?}"
    );
    assert_eq!(
        rest[0]["result"]["structuredContent"]["status"],
        "cancelled"
    );
}

#[tokio::test(start_paused = true)]
async fn a_call_that_does_not_end_cannot_hold_the_server() {
    let mut client = Client::legacy("2025-11-25").await;
    client.send(execute(1, "stubborn")).await;
    client.started.recv().await.unwrap();
    let left_at = tokio::time::Instant::now();
    client.to_server.take().unwrap().shutdown().await.unwrap();
    client.serving.await.unwrap().unwrap();
    assert!(
        left_at.elapsed() <= Duration::from_millis(600),
        "{:?}",
        left_at.elapsed()
    );
}

#[tokio::test]
async fn a_client_that_leaves_without_a_word_is_no_failure() {
    let (ended, rest) = Client::new().leave().await;
    assert!(ended.is_ok() && rest.is_empty());
    let mut client = Client::new();
    client.ask(modern(1, "server/discover", json!({}))).await;
    assert!(client.leave().await.0.is_ok());
}

#[tokio::test]
async fn a_client_that_stops_reading_is_no_failure() {
    let mut client = Client::legacy("2025-11-25").await;
    let to_server = client.to_server.take().unwrap();
    let from_server = client.from_server.into_inner().into_inner();
    drop(from_server.unsplit(to_server));
    assert!(client.serving.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_long_call_with_a_token_reports_progress_that_stops_with_the_answer() {
    let mut client = Client::legacy("2025-11-25").await;
    let mut slow = execute(1, "slow");
    slow["params"]["_meta"] = json!({"progressToken": "p"});
    client.send(slow).await;
    let mut messages = Vec::new();
    let mut last = -1.0;
    loop {
        let message = client.next().await;
        if message["id"] == 1 {
            break;
        }
        assert_eq!(message["method"], "notifications/progress");
        assert_eq!(message["params"]["progressToken"], "p");
        let progress = message["params"]["progress"].as_f64().unwrap();
        assert!(progress > last);
        last = progress;
        messages.push(message["params"]["message"].as_str().unwrap().to_owned());
    }
    assert_eq!(
        messages,
        [
            "running for 5 s (time-out 2 min)",
            "running for 10 s (time-out 2 min)"
        ]
    );
    assert_eq!(client.leave().await.1, Vec::<Value>::new());
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_token_reports_nothing() {
    let mut client = Client::legacy("2025-11-25").await;
    assert_eq!(text(&client.ask(execute(1, "slow")).await), "done");
}

#[tokio::test(start_paused = true)]
async fn the_steps_of_the_preparation_are_reported() {
    let mut client = Client::legacy("2025-11-25").await;
    let step = |step: &str, done| Preparation::Working {
        step: step.to_owned(),
        done,
        total: Some(2),
    };
    client.preparation.send_replace(step("installing numpy", 1));
    let mut call = execute(1, "hello");
    call["params"]["_meta"] = json!({"progressToken": 4});
    client.send(call).await;
    assert_eq!(
        client.next().await["params"]["message"],
        "preparing: installing numpy (1 of 2)"
    );
    client.preparation.send_replace(step("starting Python", 2));
    assert_eq!(
        client.next().await["params"]["message"],
        "preparing: starting Python (2 of 2)"
    );
    client.preparation.send_replace(Preparation::Ready);
    let answer = client.next().await;
    assert_eq!((answer["id"].clone(), text(&answer)), (json!(1), "hello"));
}

#[tokio::test]
async fn cut_output_is_listed_and_can_be_read_to_its_end() {
    let mut client = Client::legacy("2025-11-25").await;
    assert_eq!(
        client.ask(request(1, "resources/list", json!({}))).await["result"]["resources"],
        json!([])
    );
    let answer = client.ask(execute(2, "long")).await;
    let uri = answer["result"]["structuredContent"]["output"]["resource"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(text(&answer).contains(&uri));
    let listed = client.ask(request(3, "resources/list", json!({}))).await;
    assert_eq!(listed["result"]["resources"][0]["uri"], uri);
    assert_eq!(listed["result"]["resources"][0]["size"], LONG_OUTPUT);
    let mut read = 0;
    let mut next = uri.clone();
    loop {
        let answer = client
            .ask(request(4, "resources/read", json!({"uri": next})))
            .await;
        let content = &answer["result"]["contents"][0];
        assert_eq!(content["mimeType"], "text/plain");
        let text = content["text"].as_str().unwrap();
        read += text.split("\n[…").next().unwrap().len();
        match content["_meta"]["cellblock/nextOffset"].as_u64() {
            Some(offset) => next = format!("{uri}?offset={offset}"),
            None => break,
        }
    }
    assert_eq!(read, LONG_OUTPUT);
}

#[tokio::test]
async fn a_resource_that_does_not_exist_is_an_invalid_parameter() {
    let mut client = Client::legacy("2025-11-25").await;
    for uri in [
        "cellblock://sessions/default/executions/77/output",
        "file:///etc/passwd",
        "cellblock://sessions/default/executions/1/output?limit=0",
    ] {
        assert_eq!(
            client
                .ask(request(1, "resources/read", json!({"uri": uri})))
                .await["error"]["code"],
            -32602,
            "{uri}"
        );
    }
    let templates = client
        .ask(request(2, "resources/templates/list", json!({})))
        .await;
    assert_eq!(
        templates["result"]["resourceTemplates"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
}

#[tokio::test]
async fn files_are_copied_both_ways_within_the_allowed_directory() {
    let mut client = Client::legacy("2025-11-25").await;
    std::fs::write(client.folder.path().join("in.txt"), "twelve bytes").unwrap();
    let up = client
        .ask(call(
            "upload_file",
            json!({"relpath": "a.txt", "local_path": "in.txt"}),
        ))
        .await;
    assert_valid_output("upload_file", &up["result"]["structuredContent"]);
    assert_eq!(up["result"]["structuredContent"]["bytes"], 12);
    let down = client
        .ask(call(
            "download_file",
            json!({"relpath": "b.txt", "local_path": "new/out.txt"}),
        ))
        .await;
    assert_valid_output("download_file", &down["result"]["structuredContent"]);
    assert_eq!(
        std::fs::read_to_string(client.folder.path().join("new/out.txt")).unwrap(),
        "halfwhole"
    );
    let again = client
        .ask(call(
            "download_file",
            json!({"relpath": "b.txt", "local_path": "new/out.txt"}),
        ))
        .await;
    assert_eq!(again["result"]["isError"], true);
    assert!(text(&again).contains("overwrite"), "{again}");
}

#[tokio::test]
async fn a_path_that_is_not_allowed_is_refused_with_what_is() {
    let mut client = Client::legacy("2025-11-25").await;
    let answer = client
        .ask(call(
            "upload_file",
            json!({"relpath": "a", "local_path": "/etc/hostname"}),
        ))
        .await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(
        text(&answer).contains("/etc/hostname")
            && text(&answer).contains(client.folder.path().to_str().unwrap())
    );
}

#[tokio::test]
async fn a_download_that_fails_halfway_leaves_nothing_on_the_host() {
    let mut client = Client::legacy("2025-11-25").await;
    let answer = client
        .ask(call(
            "download_file",
            json!({"relpath": "broken", "local_path": "out.txt"}),
        ))
        .await;
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(std::fs::read_dir(client.folder.path()).unwrap().count(), 0);
}

// The same wire over real sessions: a few cases that show the hook-up.

#[tokio::test]
async fn variables_stay_between_calls_and_go_at_a_reset() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 5").await;
    assert_eq!(
        client.run("get x").await["structuredContent"]["status"],
        "ok"
    );
    client.ask(call("reset", json!({}))).await;
    let after = client.run("get x").await;
    assert_eq!(after["isError"], true);
    assert_eq!(after["structuredContent"]["error"]["name"], "NameError");
}

#[tokio::test]
async fn what_was_printed_before_an_error_is_kept_and_the_error_is_last() {
    let mut client = Client::of_real_sessions().await;
    let result = client.run("print before\nerr between\nraise broken").await;
    let text = result["content"][0]["text"].as_str().unwrap();
    let positions = ["before", "between", "broken"]
        .map(|word| text.find(word).unwrap_or_else(|| panic!("{text}")));
    assert!(positions.is_sorted(), "{text}");
    assert!(
        text.lines().next_back().unwrap().contains("ValueError"),
        "{text}"
    );
    assert_eq!(result["structuredContent"]["status"], "error");
}

#[tokio::test]
async fn a_dead_interpreter_is_told_and_a_reset_helps() {
    let mut client = Client::of_real_sessions().await;
    let died = client.run("crash").await;
    assert_eq!(died["structuredContent"]["status"], "died");
    let refused = client.ask(execute(2, "print 1")).await;
    assert_eq!(refused["result"]["isError"], true);
    assert!(text(&refused).contains("reset"), "{refused}");
    assert_eq!(
        client.ask(call("reset", json!({}))).await["result"]["isError"],
        false
    );
    assert!(
        client.run("print 1").await["content"][0]["text"]
            .as_str()
            .unwrap()
            .ends_with('1')
    );
}

#[tokio::test]
async fn a_flood_is_cut_and_can_be_read_whole() {
    let mut client = Client::of_real_sessions().await;
    let result = client.run("flood 20000").await;
    let output = &result["structuredContent"]["output"];
    assert!(output["cut_chars"].as_u64().unwrap() > 0, "{output}");
    assert!(
        result["content"][0]["text"]
            .as_str()
            .unwrap()
            .chars()
            .count()
            < 5500
    );
    let uri = output["resource"].as_str().unwrap();
    let answer = client
        .ask(request(2, "resources/read", json!({"uri": uri})))
        .await;
    let content = &answer["result"]["contents"][0];
    assert!(
        content["_meta"]["cellblock/totalBytes"].as_u64().unwrap()
            >= output["chars"].as_u64().unwrap()
    );
    assert!(content["text"].as_str().unwrap().lines().count() > 10_000);
}

#[tokio::test]
async fn a_sleeping_cell_ends_at_its_time_out_and_keeps_its_variables() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 5").await;
    let arguments = json!({"code": "sleep 60", "timeout": 0.05});
    let answer = client.ask(call("execute_ipython_cell", arguments)).await;
    assert_eq!(answer["result"]["structuredContent"]["status"], "timeout");
    assert!(
        text(&answer).contains("Variables and files are kept"),
        "{answer}"
    );
    assert_eq!(client.run("get x").await["isError"], false);
}

#[tokio::test]
async fn a_cancelled_cell_makes_room_for_the_next() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 5").await;
    client.send(execute(2, "sleep 86400")).await;
    client.send(execute(3, "get x")).await;
    client.send(cancel(2)).await;
    // The second cell waits for the first, so its answer shows that the first has ended; the first
    // itself gets none.
    let answer = client.next().await;
    assert_eq!(
        (answer["id"].clone(), answer["result"]["isError"].clone()),
        (json!(3), json!(false)),
        "{answer}"
    );
}

#[tokio::test]
async fn a_file_travels_into_a_session_and_back() {
    let mut client = Client::of_real_sessions().await;
    client.run("print 1").await;
    std::fs::write(client.folder.path().join("in.txt"), "some bytes").unwrap();
    let up = client
        .ask(call(
            "upload_file",
            json!({"relpath": "d/a.txt", "local_path": "in.txt"}),
        ))
        .await;
    assert_eq!(up["result"]["isError"], false, "{up}");
    let down = client
        .ask(call(
            "download_file",
            json!({"relpath": "d/a.txt", "local_path": "out.txt"}),
        ))
        .await;
    assert_eq!(down["result"]["isError"], false, "{down}");
    assert_eq!(
        std::fs::read_to_string(client.folder.path().join("out.txt")).unwrap(),
        "some bytes"
    );
    let missing = client
        .ask(call(
            "download_file",
            json!({"relpath": "none", "local_path": "none.txt"}),
        ))
        .await;
    assert_eq!(missing["result"]["isError"], true);
    assert!(!client.folder.path().join("none.txt").exists());
}

#[tokio::test]
async fn a_closed_session_is_no_longer_listed_as_alive() {
    let mut client = Client::of_real_sessions().await;
    client.run("print 1").await;
    let listed =
        client.ask(call("list_sessions", json!({}))).await["result"]["structuredContent"].take();
    assert_eq!(listed["sessions"][0]["session_id"], "default");
    assert_valid_output("list_sessions", &listed);
    client.ask(call("close_session", json!({}))).await;
    let listed =
        client.ask(call("list_sessions", json!({}))).await["result"]["structuredContent"].take();
    let alive = listed["sessions"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|session| session["state"] != "ended");
    assert_eq!(alive.count(), 0, "{listed}");
}

#[tokio::test]
async fn a_fork_is_a_session_of_its_own() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 5\nlose 2 threads").await;
    let forked = client
        .ask(call("fork_session", json!({"names": ["copy"]})))
        .await;
    assert_eq!(
        forked["result"]["structuredContent"]["forks"],
        json!(["copy"]),
        "{forked}"
    );
    assert_eq!(
        forked["result"]["structuredContent"]["not_carried_over"],
        json!(["2 threads"])
    );
    let in_the_copy = |code: &str| {
        call(
            "execute_ipython_cell",
            json!({"code": code, "session_id": "copy"}),
        )
    };
    assert_eq!(
        client.ask(in_the_copy("set x 6")).await["result"]["isError"],
        false
    );
    assert_eq!(text(&client.ask(in_the_copy("get x")).await), "6");
    assert_eq!(client.run("get x").await["structuredContent"]["text"], "5");
}

#[tokio::test]
async fn cells_are_undone_also_after_python_has_died() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 1\nkeep file one").await;
    assert_eq!(
        client.run("set x 2\nkeep file two").await["structuredContent"]["can_undo"],
        2
    );
    let undone = client.ask(call("undo", json!({}))).await;
    assert_eq!(
        undone["result"]["structuredContent"]["undone"], 1,
        "{undone}"
    );
    assert_eq!(
        client.run("get x\nfile file").await["structuredContent"]["text"],
        "1\none"
    );
    let died = client.run("crash").await;
    assert!(
        died["content"][0]["text"]
            .as_str()
            .unwrap()
            .contains("`undo`"),
        "{died}"
    );
    let listed =
        client.ask(call("list_checkpoints", json!({}))).await["result"]["structuredContent"].take();
    assert_eq!(
        (
            &listed["can_undo"][0]["cells"],
            &listed["can_undo"][0]["before"]
        ),
        (&json!(1), &json!("crash"))
    );
    let undone = client.ask(call("undo", json!({}))).await;
    assert_eq!(
        undone["result"]["structuredContent"]["revived"], true,
        "{undone}"
    );
    assert_eq!(client.run("get x").await["structuredContent"]["text"], "1");
    let refused = client.ask(call("undo", json!({"cells": 50}))).await;
    assert_eq!(refused["result"]["isError"], true);
}

#[tokio::test]
async fn the_best_variant_can_take_the_place_of_the_session() {
    let mut client = Client::of_real_sessions().await;
    client.run("set x 1").await;
    let variants = json!([
        {"name": "low", "code": "set x 2"},
        {"name": "high", "code": "set x 3"},
        {"name": "broken", "code": "raise no"},
    ]);
    let untouched = client
        .ask(call("explore", json!({"variants": variants})))
        .await;
    assert_eq!(
        untouched["result"]["structuredContent"]["kept"],
        json!([]),
        "{untouched}"
    );
    assert_eq!(client.run("get x").await["structuredContent"]["text"], "1");
    let arguments = json!({"variants": variants, "keep": "best", "best_by": "x", "replace": true});
    let explored =
        client.ask(call("explore", arguments)).await["result"]["structuredContent"].take();
    assert_valid_output("explore", &explored);
    assert_eq!(
        (&explored["replaced"], &explored["kept"][0]["variant"]),
        (&json!(true), &json!("high")),
        "{explored}"
    );
    assert_eq!(explored["variants"][1]["score"], 3.0);
    assert_eq!(client.run("get x").await["structuredContent"]["text"], "3");
}
