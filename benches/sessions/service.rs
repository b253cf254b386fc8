//! Rows about `cellblock serve`: cells over HTTP with one and many clients, what a token costs,
//! what idle clients and sessions cost.
//!
//! Clients share one thread, because the machine's other cores belong to the server. Beside each
//! figure stands FastMCP, which serves a tool that adds two numbers, in the same run, if
//! `FASTMCP_PYTHON` names a Python that has it.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use cellblock::auth::Authenticator;
use cellblock::config::{self, Flags};
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderValue};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::http_client::HttpClient;
use crate::memory::{self, MIB};
use crate::server::{cellblock, printed};
use crate::serving::{self, new_key};
use crate::statistics::{Sample, in_milliseconds, repeat, report};
use crate::{Peers, target};

const CLIENTS: [usize; 3] = [1, 16, 64];
/// How long each number of clients is measured.
const LASTING: Duration = Duration::from_secs(5);
const TOKENS: usize = 200;
const IDLE_CONNECTIONS: usize = 1_000;
const IDLE_SESSIONS: usize = 200;
const BUSY_SESSIONS: usize = 100;
const SMALL_CELLS: usize = 100;

/// What a FastMCP server must do to take part: nothing, quickly.
const FASTMCP: &str = "
import sys
from fastmcp import FastMCP
server = FastMCP('peer')
@server.tool
def add(a: int, b: int) -> int:
    return a + b
server.run(transport='http', host='127.0.0.1', port=int(sys.argv[1]), stateless_http=True, \
json_response=True, show_banner=False, log_level='error')
";

/// One cell after the other from each client, in a session of its own, on a connection that stays
/// open.
pub(crate) fn cells_over_http(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\ncell round trip `print(n)` over HTTP, every client with a session and a connection of \
         its own"
    );
    let runtime = client_runtime()?;
    let service = Service::start("on", &[])?;
    let apart = Service::start("off", &[])?;
    let peer = FastMcp::find()?;
    for clients in CLIENTS {
        let (kept, rate) =
            runtime.block_on(load(clients, |client, all| cells(&service, client, all)))?;
        let wanted = (clients == 1).then_some(Duration::from_millis(3));
        report(&format!("{clients} clients"), &kept, wanted);
        match clients {
            64 => target(
                "cells per second",
                format!("{rate:.0}"),
                "≥ 800",
                rate >= 800.0,
            ),
            _ => println!("    {rate:.0} cells per second"),
        }
        let (inside, rate) =
            runtime.block_on(load(clients, |client, all| cells(&apart, client, all)))?;
        report(
            &format!("{clients} clients, --keep-sessions off"),
            &inside,
            None,
        );
        println!("    {rate:.0} cells per second");
        if let Some(peer) = &peer {
            let (theirs, rate) =
                runtime.block_on(load(clients, |_, all| sums(peer.address, all)))?;
            report(
                &format!("{clients} clients, FastMCP adds two numbers"),
                &theirs,
                None,
            );
            println!("    {rate:.0} calls per second");
        }
    }
    Ok(())
}

/// The whole check of a token that was not seen before, and of one that was.
pub(crate) fn cost_of_a_token(_: &Peers) -> anyhow::Result<()> {
    println!("\nwhat it costs to check a token, in the server's own process");
    let folder = tempfile::tempdir()?;
    let mut settings = config::load(None, Flags::default())?.auth;
    settings.development_dir = folder.path().to_owned();
    let runtime = client_runtime()?;
    let headers = {
        runtime.block_on(Authenticator::from_settings(&settings))?;
        let token = fs::read_to_string(folder.path().join("dev_token.txt"))?;
        HeaderMap::from_iter([(
            AUTHORIZATION,
            HeaderValue::from_str(&format!("Bearer {}", token.trim()))?,
        )])
    };
    let once = |authenticator: &Authenticator| {
        let start = Instant::now();
        let caller = runtime.block_on(authenticator.authenticate(&headers));
        let elapsed = start.elapsed();
        ensure!(caller.is_ok(), "the token of development mode is good");
        Ok(elapsed)
    };
    let first = repeat(TOKENS, || {
        once(&runtime.block_on(Authenticator::from_settings(&settings))?)
    })?;
    report("not seen before", &first, Some(Duration::from_micros(100)));
    let known = runtime.block_on(Authenticator::from_settings(&settings))?;
    let again = repeat(TOKENS, || once(&known))?;
    report("seen before", &again, Some(Duration::from_micros(100)));
    Ok(())
}

/// Memory of the server and of what keeps its sessions, without the sandboxes.
pub(crate) fn memory_of_idle_clients(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\nmemory at {IDLE_CONNECTIONS} idle connections and {IDLE_SESSIONS} idle sessions, \
         without the sandboxes"
    );
    let runtime = client_runtime()?;
    let service = Service::start("on", &["--max-sessions", "256", "--undo", "off"])?;
    runtime.block_on(async {
        let mut idle = Vec::new();
        let mut client = HttpClient::connect(service.address, Some(&service.token)).await?;
        for number in 0..IDLE_SESSIONS {
            client
                .call(
                    "execute_ipython_cell",
                    &json!({"code": "x = 1", "session_id": format!("s{number}")}),
                )
                .await?;
        }
        for _ in 0..IDLE_CONNECTIONS {
            let mut client = HttpClient::connect(service.address, Some(&service.token)).await?;
            ensure!(
                client.get("/healthz").await?.is_success(),
                "every connection was served once"
            );
            idle.push(client);
        }
        let (frontend, daemon) = (
            service.memory(service.child.id()),
            service.daemon().map(|pid| service.memory(pid)),
        );
        let sum = frontend + daemon.unwrap_or(0);
        println!(
            "    frontend {} MiB, daemon {} MiB",
            frontend / MIB,
            daemon.unwrap_or(0) / MIB
        );
        target(
            "together",
            format!("{} MiB", sum / MIB),
            "≤ 120 MB",
            sum <= 120_000_000,
        );
        anyhow::Ok(())
    })
}

/// What one caller's busy sessions cost another caller, whose small cells change state.
pub(crate) fn small_cells_beside_busy_sessions(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\nsmall cells of a caller while another one has {BUSY_SESSIONS} sessions that compute \
         without a pause"
    );
    let runtime = client_runtime()?;
    let folder = tempfile::tempdir()?;
    let (busy, quiet) = (
        new_key("busy", &["python:execute"])?,
        new_key("quiet", &["python:execute"])?,
    );
    let configuration = folder.path().join("config.yaml");
    fs::write(
        &configuration,
        format!("auth:\n  api_keys:\n{}{}", busy.lines, quiet.lines),
    )?;
    let mut command = cellblock("serve");
    command
        .env("CELLBLOCK_CONFIG", configuration)
        .args(["--max-sessions", "128"]);
    let service = Service::run(command, "on")?;
    runtime.block_on(async {
        let mut client = HttpClient::connect(service.address, Some(&quiet.key)).await?;
        client
            .call(
                "execute_ipython_cell",
                &json!({"code": "n = 0", "session_id": "quiet"}),
            )
            .await?;
        let alone = small_cells(&mut client, 0).await?;
        report("alone", &alone, None);
        let mut floods = JoinSet::new();
        let all = Arc::new(Barrier::new(BUSY_SESSIONS + 1));
        for number in 0..BUSY_SESSIONS {
            floods.spawn(compute(
                service.address,
                busy.key.clone(),
                number,
                all.clone(),
            ));
        }
        all.wait().await;
        let beside = small_cells(&mut client, SMALL_CELLS).await?;
        floods.abort_all();
        let wanted = alone.median() * 2 + Duration::from_millis(100);
        report("beside them", &beside, Some(wanted));
        let high = in_milliseconds(alone.high() * 2 + Duration::from_millis(100));
        println!("    twice the p99 alone and 100 ms: {high}");
        anyhow::Ok(())
    })
}

/// Cells that count on from `first`, with a pause after each.
async fn small_cells(client: &mut HttpClient, first: usize) -> anyhow::Result<Sample> {
    let mut sample = Sample::default();
    for number in first + 1..=first + SMALL_CELLS {
        let call = json!({"code": "n += 1; print(n)", "session_id": "quiet"});
        let (result, elapsed) = client.call("execute_ipython_cell", &call).await?;
        ensure!(
            printed(&result) == Some(number.to_string().as_str()),
            "unexpected answer: {result}"
        );
        sample.add(elapsed);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(sample)
}

/// Computes in a session of its own until it is stopped.
async fn compute(
    address: SocketAddr,
    key: String,
    number: usize,
    all: Arc<Barrier>,
) -> anyhow::Result<()> {
    let mut client = HttpClient::connect(address, Some(&key)).await?;
    let session = format!("busy-{number}");
    client
        .call(
            "execute_ipython_cell",
            &json!({"code": "n = 0", "session_id": session}),
        )
        .await?;
    all.wait().await;
    loop {
        let call = json!({"code": "for _ in range(5_000_000): n += 1", "session_id": session});
        client.call("execute_ipython_cell", &call).await?;
    }
}

/// Clients cost little, so one thread is enough for all of them.
fn client_runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Lets so many clients work at once for `LASTING`; returns the time of each call and the calls per
/// second.
async fn load<F>(
    clients: usize,
    client: impl Fn(usize, Arc<Barrier>) -> F,
) -> anyhow::Result<(Sample, f64)>
where
    F: Future<Output = anyhow::Result<Vec<Duration>>> + Send + 'static,
{
    // They begin when all are ready: making sessions is not part of it.
    let all = Arc::new(Barrier::new(clients));
    let mut running = JoinSet::new();
    for number in 0..clients {
        running.spawn(client(number, all.clone()));
    }
    let mut sample = Sample::default();
    let mut calls = 0_u32;
    while let Some(done) = running.join_next().await {
        for elapsed in done?? {
            sample.add(elapsed);
            calls += 1;
        }
    }
    ensure!(calls > 0, "no call was answered");
    Ok((sample, f64::from(calls) / LASTING.as_secs_f64()))
}

/// One client's cells: a session of its own, then `print(n)` until the time is over.
fn cells(
    service: &Service,
    number: usize,
    all: Arc<Barrier>,
) -> impl Future<Output = anyhow::Result<Vec<Duration>>> + use<> {
    let (address, token) = (service.address, service.token.clone());
    async move {
        let mut client = HttpClient::connect(address, Some(&token)).await?;
        let session = format!("client-{number}");
        let run = |code: String| json!({"code": code, "session_id": session});
        client
            .call("execute_ipython_cell", &run("pass".to_owned()))
            .await?;
        all.wait().await;
        let (end, mut times) = (Instant::now() + LASTING, Vec::new());
        while Instant::now() < end {
            let wanted = times.len().to_string();
            let (result, elapsed) = client
                .call("execute_ipython_cell", &run(format!("print({wanted})")))
                .await?;
            ensure!(
                printed(&result) == Some(wanted.as_str()),
                "unexpected answer: {result}"
            );
            times.push(elapsed);
        }
        client
            .call("close_session", &json!({"session_id": session}))
            .await?;
        Ok(times)
    }
}

/// One client's sums.
async fn sums(address: SocketAddr, all: Arc<Barrier>) -> anyhow::Result<Vec<Duration>> {
    let mut client = HttpClient::connect(address, None).await?;
    all.wait().await;
    let (end, mut times) = (Instant::now() + LASTING, Vec::new());
    while Instant::now() < end {
        let (result, elapsed) = client
            .call("add", &json!({"a": times.len(), "b": 1}))
            .await?;
        ensure!(
            result["isError"] != json!(true),
            "unexpected answer: {result}"
        );
        times.push(elapsed);
    }
    Ok(times)
}

/// A running `cellblock serve`. Dropping it ends it, and its daemon.
struct Service {
    child: Child,
    daemon: String,
    address: SocketAddr,
    /// That of development mode; empty in others.
    token: String,
}

impl Service {
    /// Starts a service in development mode.
    fn start(keep_sessions: &str, more: &[&str]) -> anyhow::Result<Service> {
        let mut command = cellblock("serve");
        command.args(more);
        Service::run(command, keep_sessions)
    }

    fn run(mut command: Command, keep_sessions: &str) -> anyhow::Result<Service> {
        // Another daemon of this user is none of our business.
        let daemon = format!("bench-{}-{keep_sessions}", std::process::id());
        let is_development = !command
            .get_envs()
            .any(|(name, _)| name == "CELLBLOCK_CONFIG");
        command
            .args(["--keep-sessions", keep_sessions])
            .env("CELLBLOCK_DAEMON_NAME", &daemon);
        let (child, address, mut log) = serving::start(command)?;
        let mut token = String::new();
        if is_development {
            let mut lines = log.by_ref().map_while(Result::ok);
            let file = lines
                .find_map(|line| Some(line.split("file=").nth(1)?.split(' ').next()?.to_owned()));
            let file = file.context("the service does not say where its token is")?;
            token = fs::read_to_string(file)?.trim().to_owned();
        }
        std::thread::spawn(move || log.for_each(drop));
        Ok(Service {
            child,
            daemon,
            address,
            token,
        })
    }

    /// The process that keeps the sessions.
    fn daemon(&self) -> Option<u32> {
        let output = cellblock("daemon")
            .args(["status", "--json"])
            .output()
            .ok()?;
        let daemons: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).ok()?;
        let own = daemons
            .into_iter()
            .find(|daemon| daemon["name"] == self.daemon.as_str())?;
        own["process"].as_u64()?.try_into().ok()
    }

    fn memory(&self, process: u32) -> u64 {
        memory::resident(process).unwrap_or(0)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
        let _ = cellblock("daemon")
            .args(["stop", "--now", &self.daemon])
            .output();
    }
}

/// A FastMCP server with a tool that adds two numbers.
struct FastMcp {
    child: Child,
    address: SocketAddr,
}

impl FastMcp {
    fn find() -> anyhow::Result<Option<FastMcp>> {
        let Some(python) = std::env::var_os("FASTMCP_PYTHON") else {
            println!("FastMCP: not measured (FASTMCP_PYTHON names no Python that has it)");
            return Ok(None);
        };
        let address = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?;
        let port = address.port().to_string();
        let child = Command::new(python)
            .args(["-c", FASTMCP, &port])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let peer = FastMcp {
            child: child.context("could not start FastMCP")?,
            address,
        };
        let patience = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(address).is_err() {
            ensure!(Instant::now() < patience, "FastMCP does not listen");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Some(peer))
    }
}

impl Drop for FastMcp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
