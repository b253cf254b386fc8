//! The built program as a client meets it: started with pipes, spoken to in JSON lines, watched
//! from outside.
//!
//! `Server` speaks either protocol era and can be shared by threads: every call waits for its own
//! answer. Every line that the program writes to standard output must be a JSON-RPC message; the
//! first one that is not fails whoever waits. Nothing here sleeps: waiting ends with an event, or
//! with `TEST_TIMEOUT`.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::Engine;
use serde_json::{Map, Value, json};

use super::{PROGRAM, configuration, data_folder};

/// Nothing takes this long, not even the first start on a busy machine. Whoever waits longer has
/// found a bug.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The environment without packages but IPython. A server that uses it is ready soonest.
pub(crate) const MINIMAL: &[&str] = &["--environment", "minimal"];

/// What a client since 2026-07-28 says in each request about what it can do.
pub(crate) const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";

/// Where a data folder has the configuration of its programs.
const CONFIGURATION: &str = "configuration";

/// Returns a folder that holds the environments of the tests, built once and kept between runs, and
/// the configuration that describes them.
pub(crate) fn data_dir() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let folder = data_folder();
        let file = folder.join(CONFIGURATION).join("cellblock/config.yaml");
        fs::create_dir_all(file.parent().expect("a file is in a folder"))
            .expect("a folder can be made");
        // In one step: another process of tests may be reading it.
        let written = folder.join(format!("configuration-{}", std::process::id()));
        fs::write(&written, configuration())
            .and_then(|()| fs::rename(&written, &file))
            .expect("a file can be written");
        for name in ["default", "minimal"] {
            let built = program_below(&folder)
                .args(["env", "build", name])
                .output()
                .expect("the program can be run");
            assert!(
                built.status.success(),
                "the environment {name} could not be built: {}",
                text_of(&built.stderr)
            );
        }
        folder
    });
    &FOLDER
}

/// Returns the program with the shared environments and without any setting of whoever runs the
/// tests.
pub(crate) fn program() -> Command {
    program_below(data_dir())
}

/// Returns the program with a data folder of the caller's choice.
pub(crate) fn program_below(data_dir: &Path) -> Command {
    let mut command = Command::new(PROGRAM);
    for (name, _) in std::env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CELLBLOCK_")
            || name_text.starts_with("KERNEL_ENV_")
            || name_text == "RUST_LOG"
        {
            command.env_remove(&name);
        }
    }
    command.envs(folders(data_dir)).stdin(Stdio::null());
    command
}

/// Returns the variables by which the program finds a data folder, and the configuration in there:
/// only the shared folder has one.
pub(crate) fn folders(data_dir: &Path) -> [(&'static str, PathBuf); 2] {
    [
        ("CELLBLOCK_DATA_DIR", data_dir.to_owned()),
        ("XDG_CONFIG_HOME", data_dir.join(CONFIGURATION)),
    ]
}

/// Runs work that waits for another process, such as opening a FIFO, and fails when it takes too
/// long.
#[track_caller]
pub(crate) fn with_timeout<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || sender.send(work()));
    receiver
        .recv_timeout(TEST_TIMEOUT)
        .expect("what was waited for happens")
}

/// Runs a command to its end and returns its exit status, standard output and standard error.
#[track_caller]
pub(crate) fn finished(command: &mut Command) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the program can be run");
    (status.code(), text_of(&stdout), text_of(&stderr))
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// How a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Era {
    /// 2025-11-25 and older: the connection begins with `initialize`.
    Initialize,
    /// 2026-07-28: every request stands alone.
    Stateless,
}

impl Era {
    pub(crate) const BOTH: [Era; 2] = [Era::Initialize, Era::Stateless];
}

/// `cellblock mcp` with a client's hands on its pipes.
pub(crate) struct Server {
    child: Mutex<Child>,
    process_id: u32,
    era: Era,
    input: Mutex<Option<ChildStdin>>,
    heard: Arc<(Mutex<Heard>, Condvar)>,
    errors: Mutex<Option<Errors>>,
    next_id: AtomicU64,
    next_session: AtomicUsize,
    /// The tools that were listed, with the schemas of what they answer.
    schemas: Mutex<HashMap<String, Option<jsonschema::Validator>>>,
}

/// What arrived on standard output.
#[derive(Default)]
struct Heard {
    replies: HashMap<u64, Value>,
    without_id: Vec<Value>,
    notifications: Vec<Value>,
    nonsense: Option<String>,
    ended: bool,
}

impl Server {
    /// One server with every package for all tests that need none of their own.
    pub(crate) fn shared() -> &'static Server {
        static SHARED: LazyLock<Server> = LazyLock::new(|| Server::start(&[]));
        &SHARED
    }

    /// Starts a server of the older era and initializes it.
    pub(crate) fn start(arguments: &[&str]) -> Server {
        Server::start_in(Era::Initialize, arguments)
    }

    pub(crate) fn start_in(era: Era, arguments: &[&str]) -> Server {
        let server = Server::spawn(program().arg("mcp").args(arguments), era);
        server.greet();
        server
    }

    /// Starts any command as a server and says nothing to it yet.
    pub(crate) fn spawn(command: &mut Command, era: Era) -> Server {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program can be run");
        let output = child.stdout.take().expect("standard output was asked for");
        let errors = Errors::of(child.stderr.take().expect("standard error was asked for"));
        let heard = Arc::<(Mutex<Heard>, Condvar)>::default();
        let listener = heard.clone();
        std::thread::spawn(move || listen(BufReader::new(output), &listener));
        Server {
            process_id: child.id(),
            era,
            input: Mutex::new(child.stdin.take()),
            child: Mutex::new(child),
            heard,
            errors: Mutex::new(Some(errors)),
            next_id: AtomicU64::new(1),
            next_session: AtomicUsize::new(1),
            schemas: Mutex::default(),
        }
    }

    /// Does what a client of this era does first, and returns what the server said about itself.
    pub(crate) fn greet(&self) -> Value {
        self.greet_with(json!({}))
    }

    /// The same with a person behind the client, who can be shown forms.
    pub(crate) fn greet_with_a_person(&self) -> Value {
        self.greet_with(json!({"elicitation": {}}))
    }

    fn greet_with(&self, capabilities: Value) -> Value {
        let info = match self.era {
            Era::Initialize => {
                let client = json!({"name": "tests", "version": "1"});
                let parameters = json!({
                    "protocolVersion": "2025-11-25",
                    "capabilities": capabilities,
                    "clientInfo": client,
                });
                let info = self.request("initialize", parameters);
                self.notify("notifications/initialized", json!({}));
                info
            }
            Era::Stateless => self.request("server/discover", json!({})),
        };
        let tools = self.request("tools/list", json!({}));
        let mut schemas = lock(&self.schemas);
        for tool in tools["result"]["tools"]
            .as_array()
            .expect("there is a list of tools")
        {
            let name = tool["name"].as_str().expect("a tool has a name");
            let schema = tool.get("outputSchema").map(|schema| {
                jsonschema::validator_for(schema).unwrap_or_else(|error| panic!("{name}: {error}"))
            });
            schemas.insert(name.to_owned(), schema);
        }
        drop(schemas);
        info
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process_id
    }

    /// Returns a new session of this server.
    pub(crate) fn session(&self) -> Session<'_> {
        let number = self.next_session.fetch_add(1, Ordering::Relaxed);
        Session {
            server: self,
            id: format!("session-{number}"),
        }
    }

    /// Sends one line as it is.
    pub(crate) fn send_line(&self, line: &str) {
        let mut input = lock(&self.input);
        let pipe = input.as_mut().expect("the input is open");
        // A server that has ended cannot be written to; whoever waits for its answer will say so.
        let _ = pipe
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| pipe.flush());
    }

    pub(crate) fn notify(&self, method: &str, parameters: Value) {
        let message =
            json!({"jsonrpc": "2.0", "method": method, "params": self.in_era(parameters)});
        self.send_line(&message.to_string());
    }

    /// Sends a request and waits for the whole answer, a result or an error.
    #[track_caller]
    pub(crate) fn request(&self, method: &str, parameters: Value) -> Value {
        self.begin_request(method, parameters).answer()
    }

    pub(crate) fn begin_request(&self, method: &str, parameters: Value) -> Pending<'_> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let message = json!({
            "jsonrpc": "2.0", "id": id, "method": method, "params": self.in_era(parameters),
        });
        self.send_line(&message.to_string());
        Pending {
            server: self,
            id,
            tool: None,
        }
    }

    /// Calls a tool and waits for its result.
    #[track_caller]
    pub(crate) fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        self.begin(tool, arguments).result()
    }

    /// Calls a tool. Progress notifications carry the request's id as their token.
    pub(crate) fn begin(&self, tool: &str, arguments: Value) -> Pending<'_> {
        let token = self.next_id.load(Ordering::Relaxed);
        let parameters =
            json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": token}});
        Pending {
            tool: Some(tool.to_owned()),
            ..self.begin_request("tools/call", parameters)
        }
    }

    /// Reads a resource and returns its only contents.
    #[track_caller]
    pub(crate) fn read_resource(&self, uri: &str) -> Value {
        let answer = self.request("resources/read", json!({"uri": uri}));
        answer["result"]["contents"][0].clone()
    }

    /// Waits for a notification that `wanted` accepts.
    #[track_caller]
    pub(crate) fn notification(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        self.wait("a notification", |heard| {
            heard
                .notifications
                .iter()
                .find(|message| wanted(message))
                .cloned()
        })
    }

    /// Waits for a form that a person is to fill in.
    #[track_caller]
    pub(crate) fn form(&self) -> Form<'_> {
        let is_form = |message: &Value| message["method"] == "elicitation/create";
        let message = self.wait("a form", |heard| {
            let place = heard.notifications.iter().position(is_form)?;
            Some(heard.notifications.remove(place))
        });
        Form {
            server: self,
            message,
        }
    }

    /// Waits for a form, or for the answer to a request without one.
    #[track_caller]
    pub(crate) fn form_unless(&self, pending: &Pending<'_>) -> Option<Form<'_>> {
        let is_form = |message: &Value| message["method"] == "elicitation/create";
        let message = self.wait("a form or an answer", |heard| {
            match heard.notifications.iter().position(is_form) {
                Some(place) => Some(Some(heard.notifications.remove(place))),
                None => heard.replies.contains_key(&pending.id).then_some(None),
            }
        });
        message.map(|message| Form {
            server: self,
            message,
        })
    }

    /// Counts the forms that nobody has looked at.
    pub(crate) fn forms(&self) -> usize {
        lock(&self.heard.0)
            .notifications
            .iter()
            .filter(|message| message["method"] == "elicitation/create")
            .count()
    }

    /// Waits for the answer to a request that was sent as a line.
    #[track_caller]
    pub(crate) fn reply_to(&self, id: u64) -> Value {
        self.wait("the answer", |heard| heard.replies.remove(&id))
    }

    /// Waits for an error that answers no request in particular.
    #[track_caller]
    pub(crate) fn error_without_id(&self) -> Value {
        self.wait("an error without an id", |heard| heard.without_id.pop())
    }

    /// Closes the server's standard input, as a client does that leaves.
    pub(crate) fn close_input(&self) {
        lock(&self.input).take();
    }

    /// Waits for the end of the process and of everything that it wrote.
    #[track_caller]
    pub(crate) fn ended(&self) -> ExitStatus {
        self.wait("the end of standard output", |heard| {
            heard.ended.then_some(())
        });
        lock(&self.child)
            .wait()
            .expect("the program was started by us")
    }

    /// Closes the input, waits for the end and returns what was written to standard error.
    #[track_caller]
    pub(crate) fn finish(self) -> String {
        self.close_input();
        assert!(
            self.ended().success(),
            "a server whose client leaves ends well"
        );
        let errors = lock(&self.errors).take().expect("it is taken once");
        errors.all()
    }

    /// The server's own memory, as the kernel counts it.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process_id))
            .expect("the server runs");
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS:"))
            .expect("a process has memory");
        line.split_whitespace()
            .nth(1)
            .and_then(|number| number.parse::<u64>().ok())
            .expect("it is a number")
            * 1024
    }

    #[track_caller]
    fn wait<T>(&self, what: &str, mut ready: impl FnMut(&mut Heard) -> Option<T>) -> T {
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut heard = lock(&self.heard.0);
        loop {
            if let Some(line) = &heard.nonsense {
                panic!("standard output must hold nothing but JSON-RPC, but it held {line:?}");
            }
            if let Some(found) = ready(&mut heard) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if heard.ended || left.is_zero() {
                let ended = heard.ended;
                drop(heard);
                let written = lock(&self.errors)
                    .as_ref()
                    .map(|errors| errors.last(ended))
                    .unwrap_or_default();
                match ended {
                    true => {
                        panic!("the server ended before {what} came; its log ends with\n{written}")
                    }
                    false => panic!(
                        "{what} did not come within {TEST_TIMEOUT:?}; the log ends with\n{written}"
                    ),
                }
            }
            heard = self
                .heard
                .1
                .wait_timeout(heard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn in_era(&self, mut parameters: Value) -> Value {
        if self.era == Era::Stateless {
            let meta = parameters
                .as_object_mut()
                .expect("parameters are an object")
                .entry("_meta");
            let meta = meta.or_insert_with(|| Value::Object(Map::new()));
            meta["io.modelcontextprotocol/protocolVersion"] = json!("2026-07-28");
            if meta[CAPABILITIES].is_null() {
                meta[CAPABILITIES] = json!({});
            }
        }
        parameters
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A test that failed may leave a server that no longer listens; it is ours to end.
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        self.input
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if std::thread::panicking() {
            let _ = child.kill();
        }
        let _ = child.wait();
        let nonsense = lock(&self.heard.0).nonsense.take();
        assert!(
            nonsense.is_none() || std::thread::panicking(),
            "standard output held {nonsense:?}"
        );
    }
}

/// What a program writes to its standard error, read as it comes.
pub(crate) struct Errors {
    written: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Errors {
    /// How much of it is shown when a test fails.
    const SHOWN: usize = 8 * 1024;

    pub(crate) fn of(pipe: impl Read + Send + 'static) -> Errors {
        Errors::heard(pipe, |_| ())
    }

    /// Has somebody hear each line.
    pub(crate) fn heard(
        pipe: impl Read + Send + 'static,
        mut hear: impl FnMut(&str) + Send + 'static,
    ) -> Errors {
        let written = Arc::<Mutex<Vec<u8>>>::default();
        let writer = written.clone();
        let reader = std::thread::spawn(move || {
            let mut pipe = BufReader::new(pipe);
            let mut line = Vec::new();
            while let Ok(1..) = pipe.read_until(b'\n', &mut line) {
                lock(&writer).extend_from_slice(&line);
                hear(text_of(&line).trim_end());
                line.clear();
            }
        });
        Errors { written, reader }
    }

    /// Waits until everybody who can write has ended, and returns everything.
    pub(crate) fn all(self) -> String {
        self.reader.join().expect("reading a pipe does not panic");
        text_of(&lock(&self.written))
    }

    /// The end of what was written by now. A daemon may hold the pipe of a program that has ended,
    /// so that the rest is waited for only a moment.
    pub(crate) fn last(&self, has_ended: bool) -> String {
        let deadline = Instant::now() + Duration::from_secs(2);
        while has_ended && !self.reader.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let written = lock(&self.written);
        text_of(&written[written.len().saturating_sub(Errors::SHOWN)..])
    }
}

fn listen(mut output: impl BufRead, heard: &(Mutex<Heard>, Condvar)) {
    let mut line = Vec::new();
    while let Ok(1..) = output.read_until(b'\n', &mut line) {
        let message = serde_json::from_slice::<Value>(&line)
            .ok()
            .filter(|message| message["jsonrpc"] == "2.0");
        let mut heard_now = lock(&heard.0);
        match message {
            Some(message) if message.get("method").is_some() => {
                heard_now.notifications.push(message)
            }
            Some(message) => match message["id"].as_u64() {
                Some(id) => drop(heard_now.replies.insert(id, message)),
                None => heard_now.without_id.push(message),
            },
            None => heard_now.nonsense = Some(text_of(&line)),
        }
        heard.1.notify_all();
        line.clear();
    }
    lock(&heard.0).ended = true;
    heard.1.notify_all();
}

/// A request that may not have been answered yet.
pub(crate) struct Pending<'a> {
    server: &'a Server,
    id: u64,
    tool: Option<String>,
}

impl Pending<'_> {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Tells whether the answer has come by now.
    pub(crate) fn is_answered(&self) -> bool {
        lock(&self.server.heard.0).replies.contains_key(&self.id)
    }

    /// Waits for the whole answer.
    #[track_caller]
    pub(crate) fn answer(&self) -> Value {
        self.server
            .wait("the answer", |heard| heard.replies.remove(&self.id))
    }

    /// Waits for the result of a tool and checks its structured part against the schema that the
    /// server has published.
    #[track_caller]
    pub(crate) fn result(&self) -> ToolResult {
        let answer = self.answer();
        let result = ToolResult(answer["result"].clone());
        assert!(
            result.0.is_object(),
            "the call was answered with a protocol error: {answer}"
        );
        let tool = self.tool.as_deref().expect("only tools have results");
        let schemas = lock(&self.server.schemas);
        let schema = schemas.get(tool).and_then(Option::as_ref);
        if let Some(structured) = result.0.get("structuredContent") {
            let schema = schema.expect("structured content has a schema that was listed");
            let violations = schema
                .iter_errors(structured)
                .map(|error| error.to_string());
            assert_eq!(
                violations.collect::<Vec<_>>(),
                Vec::<String>::new(),
                "in the result of {tool}: {structured}"
            );
        } else {
            assert!(
                result.is_error() || schema.is_none(),
                "a tool with an output schema answers with structured content: {answer}"
            );
        }
        result
    }

    /// Tells the server that the answer is no longer wanted.
    pub(crate) fn cancel(&self) {
        self.server.notify(
            "notifications/cancelled",
            json!({"requestId": self.id, "reason": "a test"}),
        );
    }
}

/// A form that was shown.
pub(crate) struct Form<'a> {
    server: &'a Server,
    message: Value,
}

impl Form<'_> {
    pub(crate) fn text(&self) -> &str {
        self.message["params"]["message"]
            .as_str()
            .expect("a form has words")
    }

    /// The names of its fields.
    pub(crate) fn fields(&self) -> Vec<String> {
        let fields = self.message["params"]["requestedSchema"]["properties"]
            .as_object()
            .expect("a form has fields");
        fields.keys().cloned().collect()
    }

    /// Answers with one decision for everything.
    pub(crate) fn decide(self, decision: &str) {
        self.fill_in(json!({"decision": decision}));
    }

    pub(crate) fn fill_in(self, content: Value) {
        let result = json!({"action": "accept", "content": content});
        let answer = json!({"jsonrpc": "2.0", "id": self.message["id"], "result": result});
        self.server.send_line(&answer.to_string());
    }
}

/// One session of a server, closed when the test is done with it.
pub(crate) struct Session<'a> {
    pub(crate) server: &'a Server,
    pub(crate) id: String,
}

impl<'a> Session<'a> {
    #[track_caller]
    pub(crate) fn run(&self, code: &str) -> ToolResult {
        self.run_with(code, json!({}))
    }

    /// Runs code that must end well, and returns its text.
    #[track_caller]
    pub(crate) fn text(&self, code: &str) -> String {
        let result = self.run(code);
        assert!(!result.is_error(), "{code:?} failed: {}", result.text());
        result.text().to_owned()
    }

    #[track_caller]
    pub(crate) fn run_with(&self, code: &str, arguments: Value) -> ToolResult {
        self.begin(code, arguments).result()
    }

    pub(crate) fn begin(&self, code: &str, arguments: Value) -> Pending<'a> {
        let mut all = json!({"code": code, "session_id": self.id});
        for (name, value) in arguments.as_object().expect("arguments are an object") {
            all[name] = value.clone();
        }
        self.server.begin("execute_ipython_cell", all)
    }

    /// Calls another tool for this session.
    #[track_caller]
    pub(crate) fn call(&self, tool: &str, arguments: Value) -> ToolResult {
        let mut all = json!({"session_id": self.id});
        for (name, value) in arguments.as_object().expect("arguments are an object") {
            all[name] = value.clone();
        }
        self.server.call(tool, all)
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() && lock(&self.server.input).is_some() {
            // The answer may be that there is no such session; that is as good.
            drop(
                self.server
                    .begin("close_session", json!({"session_id": self.id})),
            );
        }
    }
}

/// What a tool answered.
pub(crate) struct ToolResult(pub(crate) Value);

impl ToolResult {
    pub(crate) fn is_error(&self) -> bool {
        self.0["isError"] == true
    }

    /// The text block.
    #[track_caller]
    pub(crate) fn text(&self) -> &str {
        self.0["content"][0]["text"]
            .as_str()
            .expect("the first block is text")
    }

    pub(crate) fn structured(&self) -> &Value {
        &self.0["structuredContent"]
    }

    /// The status of an execution.
    #[track_caller]
    pub(crate) fn status(&self) -> &str {
        self.structured()["status"]
            .as_str()
            .unwrap_or_else(|| panic!("it is no execution: {}", self.0))
    }

    /// The image blocks: MIME type and decoded picture.
    #[track_caller]
    pub(crate) fn images(&self) -> Vec<(String, image::DynamicImage)> {
        let blocks = self.0["content"].as_array().expect("content is a list");
        let images = blocks
            .iter()
            .filter(|block| block["type"] == "image")
            .map(|block| {
                let data = block["data"].as_str().expect("an image has data");
                let bytes = base64::engine::general_purpose::STANDARD
                    .decode(data)
                    .expect("the data is base64");
                let picture = image::load_from_memory(&bytes).expect("the image can be decoded");
                (
                    block["mimeType"]
                        .as_str()
                        .expect("an image has a type")
                        .to_owned(),
                    picture,
                )
            });
        images.collect()
    }

    /// Checks that the call failed with a text that holds all these words.
    #[track_caller]
    pub(crate) fn assert_refused(&self, words: &[&str]) {
        assert!(
            self.is_error(),
            "the call should have been refused: {}",
            self.0
        );
        for word in words {
            assert!(
                self.text().contains(word),
                "{word:?} is not in {:?}",
                self.text()
            );
        }
    }
}

/// A failed test must not make the others fail in its place.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
#[should_panic(expected = "its log ends with\nthe reason")]
fn a_server_that_ends_before_it_answers_is_quoted() {
    let script = "echo the reason >&2; exit 1";
    let server = Server::spawn(Command::new("sh").args(["-c", script]), Era::Initialize);
    server.greet();
}
