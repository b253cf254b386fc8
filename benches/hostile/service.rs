//! The server under test: `cellblock serve` in one process, with three callers.

use std::fs;
use std::net::SocketAddr;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::server::cellblock;
use crate::serving;

/// A caller.
#[derive(Clone, Copy)]
pub(crate) enum Key {
    Neighbour,
    /// May run code.
    Attacker,
    /// May only look.
    Reader,
}

const CALLERS: [(&str, &str); 3] = [
    ("neighbour", "python:execute"),
    ("attacker", "python:execute"),
    ("reader", "sessions:read"),
];

/// What the kernel counts processor time in, for user space, on every architecture that we run on.
const TICKS_PER_SECOND: u64 = 100;

/// An MCP server whose one tool answers with many small objects.
const MANY_VALUES: &str = r#"
import json, sys
tool = {
    "name": "many",
    "description": "Many values.",
    "inputSchema": {"type": "object", "properties": {}},
}
results = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "many", "version": "1"},
    },
    "tools/list": {"tools": [tool]},
    "tools/call": {"content": [], "structuredContent": {"rows": [{"": 0}] * 2_000_000}},
}
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = results.get(message["method"])
        answer = (
            {"error": {"code": -32601, "message": "no such method"}}
            if result is None else {"result": result}
        )
        print(
            json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}, separators=(",", ":")),
            flush=True,
        )
"#;

/// A running server. Dropping it ends it.
pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    keys: Vec<String>,
    _folder: TempDir,
}

impl Service {
    /// Starts a server with more lines in its configuration.
    pub(crate) fn start(settings: &str) -> anyhow::Result<Service> {
        let folder = tempfile::tempdir()?;
        let (mut keys, mut lines) = (Vec::new(), String::from("auth:\n  api_keys:\n"));
        for (name, scope) in CALLERS {
            let made = serving::new_key(name, &[scope])?;
            lines += &made.lines;
            keys.push(made.key);
        }
        let script = folder.path().join("many.py");
        fs::write(&script, MANY_VALUES)?;
        lines += &settings.replace("SCRIPT", &script.display().to_string());
        let config = folder.path().join("config.yaml");
        fs::write(&config, lines)?;
        let mut command = cellblock("serve");
        // One process holds everything that the server is, so that there is one figure for its
        // memory.
        command
            .args([
                "--keep-sessions",
                "off",
                "--environment",
                "minimal",
                "--config",
            ])
            .arg(&config);
        let (child, address, log) = serving::start(command)?;
        std::thread::spawn(move || log.for_each(drop));
        Ok(Service {
            child,
            address,
            keys,
            _folder: folder,
        })
    }

    pub(crate) fn key(&self, key: Key) -> &str {
        &self.keys[key as usize]
    }

    fn status(&self, name: &str) -> anyhow::Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .context("the server has ended")?;
        Ok(value.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
    }

    /// Memory of the server now, without the sandboxes.
    pub(crate) fn memory(&self) -> anyhow::Result<u64> {
        self.status("VmRSS:")
    }

    /// The most that it had since `forget_peak`.
    pub(crate) fn peak(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    pub(crate) fn forget_peak(&self) -> anyhow::Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5")
            .context("the peak cannot be reset")
    }

    /// Processor time of the server, without the sandboxes.
    pub(crate) fn processor(&self) -> anyhow::Result<Duration> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<&str> = text
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        ensure!(
            fields.len() > 12,
            "the kernel does not say how long the server ran"
        );
        let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        Ok(Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}
