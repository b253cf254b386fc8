//! What tools of other MCP servers cost: a call from code, over the same call by a plain client;
//! registering a server; importing what is made of its tools.
//!
//! The other server is `tests/tools/list_server.py`, which does nothing, with lists of tools that
//! real servers have (`typed/tests/real`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::server::{Server, cellblock, printed};
use crate::statistics::{in_milliseconds, repeat, report};
use crate::{FIRST_CELL, Peers, target};

const CALLS: usize = 2_000;
const REGISTRATIONS: usize = 10;
/// What most servers have at most.
const MANY_TOOLS: usize = 30;
const FRESH_SESSIONS: usize = 5;

/// A server that does nothing, with a list of tools.
struct Idle {
    folder: TempDir,
    python: PathBuf,
}

impl Idle {
    fn new(peers: &Peers, tools: &[Value]) -> anyhow::Result<Idle> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("tools.json"), json!(tools).to_string())?;
        Ok(Idle {
            folder,
            python: peers.plain.program(),
        })
    }

    fn arguments(&self) -> [PathBuf; 2] {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/list_server.py");
        [script, self.folder.path().join("tools.json")]
    }

    /// Starts it as any client does; returns it with the time to its greeting.
    fn start(&self) -> anyhow::Result<(Server, Duration)> {
        let mut command = Command::new(&self.python);
        command.args(self.arguments());
        Server::start(command)
    }

    fn registration(&self, name: &str) -> Value {
        json!({
            "server_name": name,
            "server_params": {"command": self.python, "args": self.arguments()},
        })
    }
}

/// The tools of a real server.
fn tools_of(name: &str) -> anyhow::Result<Vec<Value>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("typed/tests/real/{name}.json"));
    Ok(serde_json::from_str(&fs::read_to_string(file)?)?)
}

fn echo() -> Value {
    let schema = json!({
        "type": "object",
        "properties": {"message": {"type": "string"}},
        "required": ["message"],
    });
    json!({"name": "echo", "description": "Says it back.", "inputSchema": schema})
}

fn warm_server() -> anyhow::Result<Server> {
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    server.execute("a", FIRST_CELL)?;
    server.wait_until_idle();
    Ok(server)
}

pub(crate) fn call_from_code(peers: &Peers) -> anyhow::Result<()> {
    println!(
        "\na call of a tool from code in a session, over the same call by a plain client ({CALLS} \
         each)"
    );
    let idle = Idle::new(peers, &[echo()])?;
    let (mut direct, _) = idle.start()?;
    let arguments = json!({"message": "x"});
    let direct = repeat(CALLS, || Ok(direct.call("echo", &arguments)?.1))?;
    report(
        "the server's own time, seen by a plain client",
        &direct,
        None,
    );
    let mut server = warm_server()?;
    server.call("register_mcp_server", &idle.registration("idle"))?;
    let code = format!(
        "import time\nfrom mcptools.idle import echo\nparams = \
         echo.Params(message='x')\necho.run(params)\ntimes = []\n\
         for _ in range({CALLS}):\n    begun = time.perf_counter()\n    echo.run(params)\n    \
         times.append(time.perf_counter() - begun)\n\
         times.sort()\nprint(times[{}] * 1e6, times[{}] * 1e6)",
        CALLS / 2,
        CALLS * 99 / 100
    );
    let (result, _) = server.execute("a", &code)?;
    let text = printed(&result).context("the cell printed nothing")?;
    let (median, high) = text
        .split_once(' ')
        .with_context(|| format!("unexpected answer: {text}"))?;
    let (median, high): (f64, f64) = (median.parse()?, high.parse()?);
    println!(
        "    from code in a session: median {:.2} ms, p99 {:.2} ms",
        median / 1e3,
        high / 1e3
    );
    let added = median / 1e3 - direct.median().as_secs_f64() * 1e3;
    target(
        "added, median",
        format!("{added:.2} ms"),
        "≤ 1 ms",
        added <= 1.0,
    );
    Ok(())
}

pub(crate) fn registering_many_tools(peers: &Peers) -> anyhow::Result<()> {
    println!("\n`register_mcp_server` of a server with {MANY_TOOLS} tools");
    let mut tools = tools_of("chrome_devtools")?;
    tools.truncate(MANY_TOOLS);
    let (own, whole) = registrations(&Idle::new(peers, &tools)?)?;
    let added = whole.saturating_sub(own);
    target(
        "after its own start, median",
        in_milliseconds(added),
        "≤ 500 ms",
        added <= Duration::from_millis(500),
    );
    Ok(())
}

pub(crate) fn registering_large_schemas(peers: &Peers) -> anyhow::Result<()> {
    let tools = tools_of("notion")?;
    println!(
        "\n`register_mcp_server` of Notion's {} tools, {} kB of schemas",
        tools.len(),
        json!(tools).to_string().len() / 1000
    );
    let (_, whole) = registrations(&Idle::new(peers, &tools)?)?;
    target(
        "all of it, median",
        in_milliseconds(whole),
        "≤ 1 s",
        whole <= Duration::from_secs(1),
    );
    Ok(())
}

/// Returns how long a server takes to start by itself, and how long to be registered.
fn registrations(idle: &Idle) -> anyhow::Result<(Duration, Duration)> {
    let own = repeat(REGISTRATIONS, || Ok(idle.start()?.1))?;
    report("the server's own start, seen by a plain client", &own, None);
    let mut server = warm_server()?;
    let whole = repeat(REGISTRATIONS, || {
        let (_, elapsed) = server.call("register_mcp_server", &idle.registration("idle"))?;
        server.call("unregister_mcp_server", &json!({"server_name": "idle"}))?;
        Ok(elapsed)
    })?;
    report("registered", &whole, None);
    Ok((own.median(), whole.median()))
}

pub(crate) fn importing_modules(peers: &Peers) -> anyhow::Result<()> {
    let tools = tools_of("notion")?;
    println!(
        "\nimport of each module of Notion's {} tools, in {FRESH_SESSIONS} fresh sessions",
        tools.len()
    );
    let idle = Idle::new(peers, &tools)?;
    let mut server = warm_server()?;
    let (registered, _) = server.call("register_mcp_server", &idle.registration("idle"))?;
    let modules = registered["structuredContent"]["tools"]
        .as_array()
        .context("no tools were registered")?;
    let modules: Vec<&Value> = modules.iter().map(|tool| &tool["module"]).collect();
    let code = format!(
        "import importlib, json, time\ndef timed(name):\n    begun = time.perf_counter()\n    \
         importlib.import_module('mcptools.idle.' + name)\n    \
         return time.perf_counter() - begun\nprint(*(timed(name) for name in \
         json.loads('''{}''')))",
        json!(modules)
    );
    let mut imports = Vec::new();
    for number in 0..FRESH_SESSIONS {
        let (result, _) = server.execute(&format!("fresh-{number}"), &code)?;
        let text = printed(&result).context("the cell printed nothing")?;
        imports.extend(
            text.split(' ')
                .map(str::parse::<f64>)
                .collect::<Result<Vec<_>, _>>()?,
        );
    }
    ensure!(
        imports.len() == FRESH_SESSIONS * modules.len(),
        "some modules were not imported"
    );
    let mut imports = imports.into_iter().map(Duration::from_secs_f64);
    let count = imports.len();
    let sample = repeat(count, || imports.next().context("they were counted"))?;
    report("one module", &sample, Some(Duration::from_millis(50)));
    Ok(())
}
