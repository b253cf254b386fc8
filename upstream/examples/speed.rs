//! Measures what this crate adds to a server: to a call, and to a registration.
//!
//!     cargo run --release -p cellblock-upstream --example speed
//!
//! The server is this program, started once more. It measures its own time and says it with every
//! answer.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use cellblock_upstream::{
    CallOptions, ConnectSettings, ServerName, ServerParams, Upstream, Variables,
};
use serde_json::{Value, json};

const CALLS: usize = 3000;
const REGISTRATIONS: usize = 30;
const TOOLS: usize = 30;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if std::env::args().nth(1).as_deref() == Some("serve") {
        return serve();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(measure())
}

fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let begun = Instant::now();
        let message: Value = serde_json::from_str(&line?)?;
        let result = match message["method"].as_str() {
            Some("initialize") => json!({
                "protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                "serverInfo": {"name": "speed", "version": "1"},
            }),
            Some("tools/list") => json!({"tools": (0..TOOLS).map(tool).collect::<Vec<_>>()}),
            Some("tools/call") => json!({"content": [], "structuredContent": {"nanoseconds": 0}}),
            Some("server/discover") => Value::Null,
            _ => continue,
        };
        let mut answer = match result {
            Value::Null => {
                json!({
                    "jsonrpc": "2.0",
                    "id": message["id"],
                    "error": {"code": -32601, "message": "no"},
                })
            }
            result => json!({"jsonrpc": "2.0", "id": message["id"], "result": result}),
        };
        if message["method"] == "tools/call" {
            answer["result"]["structuredContent"]["nanoseconds"] =
                json!(begun.elapsed().as_nanos() as u64);
        }
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

fn tool(number: usize) -> Value {
    let member = |kind: &str| {
        json!({"type": kind, "description": "What this is, in one or two \
         sentences that a model reads."})
    };
    json!({
        "name": format!("tool_{number}"),
        "description": "Does something, and says so in a sentence.\n\nAnd in another one.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "text": member("string"), "count": member("integer"),
                "ratio": member("number"), "flag": member("boolean"),
                "kind": {"enum": ["a", "b", "c"]},
                "list": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": null},
            },
            "required": ["text"],
            "$defs": {"Item": {
                "type": "object",
                "properties": {"x": member("number"), "y": member("number")},
                "required": ["x"],
            }},
        },
        "outputSchema": {
            "type": "object",
            "properties": {"nanoseconds": {"type": "integer"}},
            "required": ["nanoseconds"],
        },
    })
}

async fn measure() -> Result<(), Box<dyn std::error::Error>> {
    let params =
        ServerParams::parse(&json!({"command": std::env::current_exe()?, "args": ["serve"]}))?;
    let settings = ConnectSettings::new(Variables::new(std::env::vars()));
    let name = ServerName::new("speed")?;
    let mut registrations = Vec::new();
    let mut starts = Vec::new();
    for _ in 0..REGISTRATIONS {
        starts.push(start()?);
        let begun = Instant::now();
        let upstream = Upstream::connect(&name, &params, &settings).await?;
        registrations.push(begun.elapsed());
        upstream.close().await;
    }
    tell("start of the server alone", &mut starts);
    tell(
        "start, greeting, list and Python of 30 tools",
        &mut registrations,
    );

    let upstream = Upstream::connect(&name, &params, &settings).await?;
    let mut calls = Vec::new();
    for number in 0..CALLS {
        let arguments = json!({"text": "hello", "count": number})
            .as_object()
            .cloned()
            .unwrap_or_default();
        let begun = Instant::now();
        let reply = upstream
            .call("tool_7", arguments, CallOptions::default())
            .await?;
        let whole = begun.elapsed();
        let own = reply
            .structured
            .and_then(|value| value["nanoseconds"].as_u64())
            .unwrap_or_default();
        calls.push(whole.saturating_sub(Duration::from_nanos(own)));
    }
    tell("one call, over the server's own time", &mut calls);
    let begun = Instant::now();
    let many: Vec<_> = (0..CALLS)
        .map(|_| {
            let upstream = upstream.clone();
            let arguments = json!({"text": "hello"})
                .as_object()
                .cloned()
                .unwrap_or_default();
            tokio::spawn(async move {
                upstream
                    .call("tool_7", arguments, CallOptions::default())
                    .await
            })
        })
        .collect();
    for call in many {
        call.await??;
    }
    println!(
        "{CALLS} calls at a time: {:.0} calls/s",
        CALLS as f64 / begun.elapsed().as_secs_f64()
    );
    upstream.close().await;
    Ok(())
}

/// How long the server takes by itself until it answers.
fn start() -> Result<Duration, Box<dyn std::error::Error>> {
    let begun = Instant::now();
    let mut child = std::process::Command::new(std::env::current_exe()?)
        .arg("serve")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let (mut input, output) = (
        child.stdin.take().ok_or("no input")?,
        child.stdout.take().ok_or("no output")?,
    );
    input.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"server/discover\"}\n")?;
    let mut line = String::new();
    std::io::BufReader::new(output).read_line(&mut line)?;
    let elapsed = begun.elapsed();
    drop(input);
    child.wait()?;
    Ok(elapsed)
}

fn tell(what: &str, times: &mut [Duration]) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!("{what}: p50 {:.0} µs, p99 {:.0} µs", at(0.5), at(0.99));
}
