//! Servers for tests.
//!
//! `ServerScript` is a small server without a library: it sends exactly what a test requires, right
//! or wrong. It runs as a child process, which is this test program started again with only
//! `child_server`, or behind HTTP (`tests/web.rs`).

use std::io::{BufRead, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::{
    CallOptions, CallReply, ConnectSettings, ServerName, ServerParams, Upstream, Variables,
    WrapperCommand, exec_with_parent,
};

/// Variable that contains a child's script.
const SCRIPT: &str = "CELLBLOCK_FIXTURE";

/// Behaviour of a server. It is JSON, because it is passed in an environment variable.
pub(crate) struct ServerScript {
    settings: Value,
    /// Number of starts of all servers that share a directory.
    starts: usize,
    is_changed: bool,
}

impl ServerScript {
    pub(crate) fn new(settings: Value) -> ServerScript {
        let starts = settings["folder"].as_str().map_or(1, |folder| {
            let path = PathBuf::from(folder).join("starts");
            let mut text = std::fs::read_to_string(&path).unwrap_or_default();
            text.push('x');
            std::fs::write(&path, &text).unwrap();
            text.len()
        });
        ServerScript {
            settings,
            starts,
            is_changed: false,
        }
    }

    fn is(&self, name: &str) -> bool {
        self.settings[name] == true
    }

    fn is_modern(&self) -> bool {
        self.is("modern") || (self.is("modern_when_restarted") && self.starts > 1)
    }

    /// Answers a message with any number of messages.
    pub(crate) fn answer(&mut self, message: &Value) -> Vec<Value> {
        let (method, id) = (
            message["method"].as_str().unwrap_or_default(),
            &message["id"],
        );
        let reply = |result: Value| vec![json!({"jsonrpc": "2.0", "id": id, "result": result})];
        let refuse = |code: i64, text: &str| {
            vec![json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})]
        };
        match method {
            "server/discover" if self.is_modern() => reply(json!({
                "resultType": "complete", "supportedVersions": ["2026-07-28"],
                "capabilities": {"tools": {"listChanged": true}},
                "ttlMs": 0, "cacheScope": "private",
                "_meta": {
                    "io.modelcontextprotocol/serverInfo": {"name": "fixture", "version": "1"},
                },
            })),
            "initialize" if !self.is_modern() => reply(json!({
                "protocolVersion": "2025-11-25", "capabilities": {"tools": {"listChanged": true}},
                "serverInfo": {"name": "fixture", "version": "1"},
            })),
            "subscriptions/listen" => vec![json!({
                "jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged",
                "params": {
                    "notifications": {"toolsListChanged": true},
                    "_meta": {"io.modelcontextprotocol/subscriptionId": id},
                },
            })],
            "tools/list" => self.list(message, &reply),
            "tools/call" => self.call(message, &reply, &refuse),
            "notifications/cancelled" => {
                self.note("cancelled", &message["params"]["requestId"].to_string());
                Vec::new()
            }
            _ if id.is_null() => Vec::new(),
            // A client's response to our request.
            "" => vec![json!({
                "jsonrpc": "2.0", "id": message["id"].as_i64().unwrap() - 1000,
                "result": {"content": [], "structuredContent": message},
            })],
            _ => refuse(-32601, "Method not found"),
        }
    }

    fn list(&self, message: &Value, reply: &dyn Fn(Value) -> Vec<Value>) -> Vec<Value> {
        let cursor = message["params"]["cursor"].as_str().unwrap_or("0");
        match self.settings["list"].as_str() {
            Some("repeat") => return reply(json!({"tools": [], "nextCursor": "again"})),
            Some("endless") => {
                let next = cursor.parse::<usize>().unwrap() + 1;
                return reply(json!({"tools": [], "nextCursor": next.to_string()}));
            }
            Some("huge") => {
                let tool = json!({
                    "name": format!("t{cursor}"), "description": "x".repeat(100_000),
                    "inputSchema": {"type": "object"},
                });
                let next = cursor.parse::<usize>().unwrap() + 1;
                return reply(json!({"tools": [tool], "nextCursor": next.to_string()}));
            }
            Some("wrong") => return reply(json!({"tools": "none"})),
            Some("pages") => {
                let names = ["echo", "slow", "die"];
                let place: usize = cursor.parse().unwrap();
                let mut page = json!({"tools": [tool(names[place], &json!({"type": "object"}))]});
                if place + 1 < names.len() {
                    page["nextCursor"] = json!((place + 1).to_string());
                }
                return reply(page);
            }
            _ => {}
        }
        let object = json!({"type": "object"});
        let echo = json!({
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
        });
        let changed = json!({"type": "object", "properties": {"text": {"type": "number"}}});
        let is_changed = self.is_changed || (self.is("changes_when_restarted") && self.starts > 1);
        let mut tools = vec![
            tool("echo", if is_changed { &changed } else { &echo }),
            tool("ev\u{202e}il", &object),
            json!({"name": "no schema"}),
        ];
        let names = [
            "slow",
            "die",
            "big",
            "progress",
            "wrong",
            "fails",
            "refuses",
            "environment",
            "change",
            "ask",
            "ticks",
            "pid",
            "input",
            "notes",
            "leaks",
            "deep",
        ];
        tools.extend(
            names
                .iter()
                .filter(|name| !(is_changed && **name == "pid"))
                .map(|name| tool(name, &object)),
        );
        let more = self.settings["more"].as_u64().unwrap_or(0);
        tools.extend((0..more).map(|number| tool(&format!("more_{number}"), &echo)));
        reply(json!({
            "tools": tools, "resultType": "complete", "ttlMs": 60_000, "cacheScope": "private",
        }))
    }

    fn call(
        &mut self,
        message: &Value,
        reply: &dyn Fn(Value) -> Vec<Value>,
        refuse: &dyn Fn(i64, &str) -> Vec<Value>,
    ) -> Vec<Value> {
        let arguments = &message["params"]["arguments"];
        let structured = |value: Value| {
            reply(json!({"content": [], "structuredContent": value, "resultType": "complete"}))
        };
        match message["params"]["name"].as_str().unwrap() {
            "slow" => {
                self.note("slow", &message["id"].to_string());
                Vec::new()
            }
            "die" => {
                eprintln!("fatal: the key {} is wrong", key());
                std::process::exit(3);
            }
            "big" => {
                let text =
                    "x".repeat(usize::try_from(arguments["bytes"].as_u64().unwrap()).unwrap());
                reply(json!({"content": [{"type": "text", "text": text}]}))
            }
            "progress" => {
                let token = &message["params"]["_meta"]["progressToken"];
                let mut messages: Vec<Value> = [1, 3, 2, 4]
                    .map(|step| {
                        json!({
                            "jsonrpc": "2.0", "method": "notifications/progress",
                            "params": {
                                "progressToken": token, "progress": step, "total": 4,
                                "message": format!("step\n{step}{}", key()),
                            },
                        })
                    })
                    .to_vec();
                if arguments["end"] == true {
                    messages.extend(reply(json!({"content": []})));
                }
                messages
            }
            "deep" => {
                let levels = usize::try_from(arguments["levels"].as_u64().unwrap()).unwrap();
                let value = (0..levels).fold(json!(1), |inner, _| json!([inner]));
                structured(value)
            }
            "wrong" => reply(json!({"content": "not a list"})),
            "fails" => reply(
                json!({"content": [{"type": "text", "text": "no such file"}], "isError": true}),
            ),
            "refuses" => refuse(-32000, &format!("the key {} is wrong\nreally", key())),
            "leaks" => reply(json!({
                "content": [
                    {
                        "type": "text",
                        "text": format!("the key is {} of {} letters", key(), key().len()),
                    },
                    {
                        "type": "resource",
                        "resource": {
                            "uri": "x://y", "text": format!("{{\"key\":\"{}\"}}", key()),
                        },
                    },
                ],
                "structuredContent": {"headers": [key()]}, "isError": true,
            })),
            "environment" => structured(json!(
                std::env::vars().collect::<std::collections::BTreeMap<_, _>>()
            )),
            "change" => {
                self.is_changed = true;
                let mut messages =
                    vec![json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})];
                messages.extend(reply(json!({"content": []})));
                messages
            }
            "ask" => {
                let id = message["id"].as_i64().unwrap() + 1000;
                vec![json!({
                    "jsonrpc": "2.0", "id": id,
                    "method": arguments["method"], "params": arguments["params"],
                })]
            }
            "ticks" => {
                let token = message["params"]["_meta"]["progressToken"].clone();
                std::thread::spawn(move || {
                    for step in 1.. {
                        let params = json!({"progressToken": token, "progress": step});
                        println!(
                            "{}",
                            json!({
                                "jsonrpc": "2.0", "method": "notifications/progress",
                                "params": params,
                            })
                        );
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                });
                Vec::new()
            }
            "pid" => structured(json!(std::process::id())),
            "input" => reply(
                json!({"resultType": "input_required", "inputRequests": {}, "requestState": "x"}),
            ),
            "notes" => structured(json!(self.settings["folder"].as_str().map(|folder| {
                std::fs::read_to_string(
                    PathBuf::from(folder).join(arguments["name"].as_str().unwrap()),
                )
                .unwrap_or_default()
            }))),
            _ => structured(arguments.clone()),
        }
    }

    fn note(&self, name: &str, text: &str) {
        if let Some(folder) = self.settings["folder"].as_str() {
            std::fs::write(PathBuf::from(folder).join(name), text).unwrap();
        }
    }
}

/// Returns the server's credential, if a test set one.
fn key() -> String {
    std::env::var("KEY").unwrap_or_default()
}

fn tool(name: &str, input: &Value) -> Value {
    json!({"name": name, "description": format!("Does {name}.{}", key()), "inputSchema": input})
}

/// Returns parameters that start this program as a server with a script.
pub(crate) fn child(script: Value) -> ServerParams {
    child_with(script, json!({}))
}

/// Like `child`, with additional environment variables.
pub(crate) fn child_with(script: Value, mut environment: Value) -> ServerParams {
    environment[SCRIPT] = json!(script.to_string());
    ServerParams::parse(&json!({
        "command": std::env::current_exe().unwrap(),
        "args": ["--exact", "fixtures::child_server", "--nocapture"],
        "env": environment,
    }))
    .unwrap()
}

pub(crate) fn settings() -> ConnectSettings {
    let variables = [
        ("PATH", std::env::var("PATH").unwrap()),
        ("TOKEN", "hunter2-token".to_owned()),
        ("OTHER", "never-given".to_owned()),
    ];
    ConnectSettings::new(Variables::new(
        variables.map(|(name, value)| (name.to_owned(), value)),
    ))
}

pub(crate) fn name(name: &str) -> ServerName {
    ServerName::new(name).unwrap()
}

pub(crate) async fn connect(params: &ServerParams) -> Upstream {
    Upstream::connect(&name("fixture"), params, &settings())
        .await
        .unwrap()
}

pub(crate) async fn call(
    upstream: &Upstream,
    tool: &str,
    arguments: Value,
) -> Result<CallReply, crate::CallError> {
    call_with(upstream, tool, arguments, CallOptions::default()).await
}

pub(crate) async fn call_with(
    upstream: &Upstream,
    tool: &str,
    arguments: Value,
    options: CallOptions,
) -> Result<CallReply, crate::CallError> {
    let Value::Object(arguments) = arguments else {
        panic!("arguments are an object")
    };
    upstream.call(tool, arguments, options).await
}

/// Calls `pid` to find out which process responds.
pub(crate) async fn process(upstream: &Upstream) -> u64 {
    call(upstream, "pid", json!({}))
        .await
        .unwrap()
        .structured
        .unwrap()
        .as_u64()
        .unwrap()
}

pub(crate) fn is_alive(process: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // A zombie waits to be reaped, and is dead when its last thread is.
    let is_zombie = stat
        .rsplit(") ")
        .next()
        .is_none_or(|rest| rest.is_empty() || rest.starts_with('Z'));
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count);
    !is_zombie || threads > 1
}

pub(crate) async fn until_dead(process: u64) {
    while is_alive(process) {
        tokio::task::yield_now().await;
    }
}

/// Not a test: the server, when this program is started as one.
#[test]
fn child_server() {
    let Ok(text) = std::env::var(SCRIPT) else {
        return;
    };
    // In the wrapper, this name is an argument for later.
    if std::env::args().any(|argument| argument == "--") {
        return;
    }
    let settings: Value = serde_json::from_str(&text).unwrap();
    let mut script = ServerScript::new(settings.clone());
    let mut output = std::io::stdout();
    // The test runner may have written the beginning of a line.
    output.write_all(b"\n").unwrap();
    if let Some(time) = script.settings["starts_after_milliseconds"].as_u64() {
        std::thread::sleep(std::time::Duration::from_millis(time));
    }
    if script.is("garbage") {
        output
            .write_all(b"Listening on stdio\n{\"half\": \n[]\n\xff\xfe\n")
            .unwrap();
    }
    if script.is("ends_at_once") {
        eprintln!("cannot find the module `left-pad`");
        std::process::exit(1);
    }
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let message: Value = serde_json::from_str(&line).unwrap();
        if message["method"] == "server/discover" {
            if script.is("dies_when_probed") {
                std::process::exit(1);
            }
            if script.is("silent_when_probed") {
                continue;
            }
        }
        for answer in script.answer(&message) {
            writeln!(output, "{answer}").unwrap();
        }
        output.flush().unwrap();
    }
    if script.is("ignores_the_end") {
        std::thread::park();
    }
}

/// Not a test: the wrapper through which a program is started.
#[test]
fn wrapper() {
    let mut arguments = std::env::args_os()
        .skip_while(|argument| argument != "--")
        .skip(1)
        .peekable();
    if arguments.peek().is_none() {
        return;
    }
    eprintln!("{}", exec_with_parent(arguments));
}

pub(crate) fn wrapper_command() -> WrapperCommand {
    let arguments = ["--exact", "fixtures::wrapper", "--nocapture", "--"];
    WrapperCommand {
        program: std::env::current_exe().unwrap(),
        arguments: arguments.map(Into::into).to_vec(),
    }
}

/// Not a test: a process that has a server and is killed.
#[test]
fn host() {
    let Ok(wrapped) = std::env::var("CELLBLOCK_FIXTURE_HOST") else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut settings = settings();
        settings.wrapper = (wrapped == "wrapped").then(wrapper_command);
        let upstream = Upstream::connect(
            &name("fixture"),
            &child(json!({"ignores_the_end": true})),
            &settings,
        )
        .await
        .unwrap();
        println!("\nserver {}", process(&upstream).await);
        std::future::pending::<()>().await;
    });
}
