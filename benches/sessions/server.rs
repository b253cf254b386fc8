//! A client of a stdio MCP server, one call at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};

/// A server that ran less than `QUIET` in such a time has nothing left to do in the background.
const LOOK: Duration = Duration::from_millis(25);
const QUIET: Duration = Duration::from_micros(500);

/// A command of the binary under test, or of the one that `CELLBLOCK_BINARY` names.
pub(crate) fn cellblock(command: &str) -> Command {
    let named = std::env::var_os("CELLBLOCK_BINARY");
    let mut program = Command::new(named.unwrap_or_else(|| env!("CARGO_BIN_EXE_cellblock").into()));
    program.arg(command);
    program
}

/// A running server. Dropping it closes its standard input and waits for its end.
pub(crate) struct Server {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    calls: u64,
}

impl Server {
    /// Starts a server; returns it with the time from the start to the answer to `initialize`.
    pub(crate) fn start(mut command: Command) -> anyhow::Result<(Server, Duration)> {
        let start = Instant::now();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("could not start a server")?;
        let requests = child.stdin.take();
        let answers = BufReader::new(
            child
                .stdout
                .take()
                .context("a server without standard output")?,
        );
        let mut server = Server {
            child,
            requests,
            answers,
            calls: 0,
        };
        let client = json!({ "name": "benchmark", "version": "1" });
        let hello =
            json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client });
        server.ask("initialize", &hello)?;
        let elapsed = start.elapsed();
        server.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))?;
        Ok((server, elapsed))
    }

    /// Calls a tool; returns its result and the time it took. A result that is an error fails.
    pub(crate) fn call(
        &mut self,
        tool: &str,
        arguments: &Value,
    ) -> anyhow::Result<(Value, Duration)> {
        let start = Instant::now();
        let result = self.ask(
            "tools/call",
            &json!({ "name": tool, "arguments": arguments }),
        )?;
        let elapsed = start.elapsed();
        if result["isError"] == json!(true) {
            bail!("{tool} failed: {}", result["content"]);
        }
        Ok((result, elapsed))
    }

    /// Calls a tool several times at once; returns the results in the order of the calls.
    pub(crate) fn call_all(&mut self, tool: &str, calls: &[Value]) -> anyhow::Result<Vec<Value>> {
        let first = self.calls + 1;
        for arguments in calls {
            self.calls += 1;
            let parameters = json!({ "name": tool, "arguments": arguments });
            self.send(&json!({
                "jsonrpc": "2.0", "id": self.calls, "method": "tools/call", "params": parameters,
            }))?;
        }
        let mut results = BTreeMap::new();
        while results.len() < calls.len() {
            let mut line = String::new();
            if self
                .answers
                .read_line(&mut line)
                .context("could not read from the server")?
                == 0
            {
                bail!("the server ended instead of answering {tool}");
            }
            let mut message: Value =
                serde_json::from_str(&line).context("the server said what is not JSON")?;
            if let Some(id) = message["id"].as_u64().filter(|id| *id >= first) {
                results.insert(id, message["result"].take());
            }
        }
        Ok(results.into_values().collect())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn execute(
        &mut self,
        session: &str,
        code: &str,
    ) -> anyhow::Result<(Value, Duration)> {
        self.call(
            "execute_ipython_cell",
            &json!({ "code": code, "session_id": session }),
        )
    }

    /// Waits until neither the server nor anything it started does any work.
    pub(crate) fn wait_until_idle(&self) {
        let mut before = self.time_run();
        loop {
            thread::sleep(LOOK);
            let now = self.time_run();
            if now.saturating_sub(before) < QUIET {
                return;
            }
            before = now;
        }
    }

    /// The numbers of the server and of every process that descends from it.
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = process
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
            let parent = status
                .lines()
                .find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
            children.entry(parent.unwrap_or(0)).or_default().push(pid);
        }
        let mut found = BTreeSet::new();
        let mut waiting = vec![self.child.id()];
        while let Some(pid) = waiting.pop() {
            if found.insert(pid) {
                waiting.extend(children.get(&pid).into_iter().flatten());
            }
        }
        found
    }

    /// How long all threads of all these processes have run.
    fn time_run(&self) -> Duration {
        let tasks = self.processes().into_iter().flat_map(|pid| {
            fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten()
        });
        tasks
            .flatten()
            .filter_map(|task| {
                let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
                Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
            })
            .sum()
    }

    fn ask(&mut self, method: &str, parameters: &Value) -> anyhow::Result<Value> {
        self.calls += 1;
        self.send(
            &json!({ "jsonrpc": "2.0", "id": self.calls, "method": method, "params": parameters }),
        )?;
        loop {
            let mut line = String::new();
            if self
                .answers
                .read_line(&mut line)
                .context("could not read from the server")?
                == 0
            {
                bail!("the server ended instead of answering {method}");
            }
            let mut message: Value =
                serde_json::from_str(&line).context("the server said what is not JSON")?;
            // Notifications, such as progress, have no id of ours.
            if message["id"] == json!(self.calls) {
                if message.get("error").is_some() {
                    bail!("{method} was refused: {}", message["error"]);
                }
                return Ok(message["result"].take());
            }
        }
    }

    fn send(&mut self, message: &Value) -> anyhow::Result<()> {
        let requests = self.requests.as_mut().context("the server is ending")?;
        let mut line = message.to_string();
        line.push('\n');
        requests
            .write_all(line.as_bytes())
            .context("could not write to the server")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.child.wait();
    }
}

/// The arguments that close a session.
pub(crate) fn close(session: &str) -> Value {
    json!({ "session_id": session })
}

/// What a cell printed: the last line of the result's text. Before it there may be a note about the
/// session.
pub(crate) fn printed(result: &Value) -> Option<&str> {
    result["content"][0]["text"]
        .as_str()?
        .trim_end()
        .lines()
        .last()
}
