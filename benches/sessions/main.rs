//! How fast, how small: the figures that Cellblock promises, measured on the real binary.
//!
//! ```text
//! cargo bench --bench sessions                          all rows
//! cargo bench --bench sessions -- cell run              the rows whose names contain one of these
//!                                                       words
//! cargo bench --bench sessions -- cycles                ten thousand forks and checkpoints, in
//!                                                       minutes
//! IPYBOX_PYTHON=venv/bin/python cargo bench …           also the same calls to ipybox, if that
//!                                                       Python has it
//! BENCH_IMAGE=python:3.13-slim cargo bench … container  also sessions in containers, if an engine
//!                                                       has that image
//! PYTHON_DOCKER_MCP_PYTHON=venv/bin/python cargo bench … transient   also python-docker-mcp, if
//!                                                                    that Python has it
//! FASTMCP_PYTHON=venv/bin/python cargo bench … http     also a trivial tool of FastMCP, if that
//!                                                       Python has it
//! ```
//!
//! Every row starts servers of its own and speaks MCP over their standard input and output, as a
//! client does. Where a plain `python -c` does comparable work, it is measured in turn with ours,
//! with the same interpreter and packages. `statistics` computes, `server` is the client, `peers`
//! finds what we compare with, `memory` asks the kernel, `branching` has the rows about copies of
//! sessions, `service` those about `cellblock serve`, which `serving` starts, `containers` those
//! about containers, `ordinary` the one about code that others wrote, `tools` those about tools of
//! other MCP servers.
//!
//! Nothing is asserted: a missed target is printed as such. Machines differ, and a busy one misses
//! everything.

mod branching;
mod containers;
mod http_client;
mod memory;
mod network;
mod ordinary;
mod peers;
mod server;
mod service;
mod serving;
mod statistics;
mod tools;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use self::memory::{MIB, MemoryGroup};
use self::peers::{Ipybox, PlainPython, PythonDockerMcp};
use self::server::{Server, cellblock, close, printed};
use self::statistics::{Sample, in_milliseconds, in_turn, repeat, report};

/// What the warm interpreter has loaded already; anywhere else these imports take most of a second.
const FIRST_CELL: &str = "import numpy, pandas, matplotlib.pyplot; print(1)";

const STARTS: usize = 30;
const NEW_SESSIONS: usize = 60;
const CELLS: usize = 1_000;
const RUNS: usize = 20;
const IDLE_SESSIONS: usize = 50;
const SESSIONS_IN_A_ROW: usize = 200;
const LIVE_SESSIONS: usize = 150;
const TRANSIENT_RUNS: usize = 200;
/// ipybox takes seconds for what others do in milliseconds.
const IPYBOX_STARTS: usize = 2;
const IPYBOX_CELLS: usize = 200;
const PLAIN_RUNS: usize = 7;

/// What a row compares with.
struct Peers {
    plain: PlainPython,
    ipybox: Option<Ipybox>,
    python_docker_mcp: Option<PythonDockerMcp>,
}

type Row = fn(&Peers) -> anyhow::Result<()>;

const ROWS: [(&str, Row); 29] = [
    ("initialize", process_start_to_initialize),
    ("new-session", new_session_to_first_result),
    ("cell", cell_round_trip),
    ("daemon", cost_of_a_daemon),
    ("run", one_shot_run),
    ("idle-memory", memory_of_an_idle_session),
    ("throughput", sessions_in_a_row),
    ("live", live_sessions_in_a_gibibyte),
    ("fork", branching::fork_to_first_answer),
    ("fork-16", branching::many_forks_at_once),
    ("checkpoint", branching::cost_of_checkpoints),
    ("undo", branching::undo_to_next_answer),
    ("fork-memory", branching::private_memory_of_a_fork),
    ("ordinary", ordinary::speed_of_ordinary_code),
    ("network", network::first_byte_and_throughput),
    ("network-start", network::cost_of_a_network_list),
    ("install", network::installing_what_is_known),
    ("http", service::cells_over_http),
    ("http-token", service::cost_of_a_token),
    ("http-memory", service::memory_of_idle_clients),
    ("fairness", service::small_cells_beside_busy_sessions),
    ("container-cell", containers::cells_in_a_container),
    ("container-cold", containers::cold_container),
    ("tool-call", tools::call_from_code),
    ("tool-register", tools::registering_many_tools),
    ("tool-notion", tools::registering_large_schemas),
    ("tool-import", tools::importing_modules),
    ("transient", containers::transient_runs),
    ("transient-native", runs_of_python_docker_mcp),
];

/// Rows that take minutes and are measured only when they are named.
const LONG_ROWS: [(&str, Row); 1] = [("cycles", branching::cycles_leave_nothing)];

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --all-targets` starts this program too, without the optimisations that the
    // figures are about.
    if !words.iter().any(|word| word == "--bench") {
        println!("skipped: needs cargo bench");
        return Ok(());
    }
    let wanted: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    // Builds the Python environment if there is none yet, and warms the machine's caches.
    let status = cellblock("run")
        .args(["-c", FIRST_CELL])
        .stdout(Stdio::null())
        .status();
    let status = status.context("could not start cellblock")?;
    ensure!(
        status.success(),
        "cellblock cannot run Python here; `cellblock doctor` may know why"
    );
    let peers = Peers {
        plain: PlainPython::of_the_environment()?,
        ipybox: Ipybox::find(),
        python_docker_mcp: PythonDockerMcp::find(),
    };
    if peers.ipybox.is_none() {
        println!("ipybox: not measured (IPYBOX_PYTHON names no Python that has it)");
    }
    if peers.python_docker_mcp.is_none() {
        println!(
            "python-docker-mcp: not measured (PYTHON_DOCKER_MCP_PYTHON names no Python that has it)"
        );
    }
    for (name, measure) in ROWS {
        if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
            measure(&peers).with_context(|| format!("the row \"{name}\" could not be measured"))?;
        }
    }
    for (name, measure) in LONG_ROWS {
        if wanted.iter().any(|word| *word == name) {
            measure(&peers).with_context(|| format!("the row \"{name}\" could not be measured"))?;
        }
    }
    Ok(())
}

fn process_start_to_initialize(peers: &Peers) -> anyhow::Result<()> {
    println!("\nprocess start to `initialize` answered");
    let ours = repeat(STARTS, || Ok(Server::start(cellblock("mcp"))?.1))?;
    report("cellblock", &ours, Some(Duration::from_millis(50)));
    let plain = repeat(PLAIN_RUNS, || peers.plain.run("pass"))?;
    report("python -c 'pass'", &plain, None);
    if let Some(ipybox) = &peers.ipybox {
        let theirs = repeat(IPYBOX_STARTS, || Ok(Server::start(ipybox.command()?)?.1))?;
        report("ipybox", &theirs, None);
        ratio("ipybox", &theirs, &ours);
    }
    let ready = repeat(3, || {
        let start = Instant::now();
        let (mut server, _) = Server::start(cellblock("mcp"))?;
        server.execute("a", FIRST_CELL)?;
        Ok(start.elapsed())
    })?;
    report(
        "process start to the first cell's result (waits for the warm-up)",
        &ready,
        None,
    );
    Ok(())
}

/// A transient run is a sandbox made, three cells in it, and the sandbox destroyed.
fn runs_of_python_docker_mcp(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\nprofile python-docker-mcp without containers: one call to its result, one after the \
         other"
    );
    let mut command = cellblock("mcp");
    command.args(["--profile", "python-docker-mcp"]);
    let (mut server, _) = Server::start(command)?;
    let transient = json!({"code": "y = state['x'] + 1; print(y)", "state": {"x": 1}});
    let persistent = json!({"code": "print(1)", "session_id": "s"});
    server.call("execute-transient", &transient)?;
    server.wait_until_idle();
    let runs = repeat(TRANSIENT_RUNS, || {
        Ok(server.call("execute-transient", &transient)?.1)
    })?;
    report("execute-transient", &runs, Some(Duration::from_millis(15)));
    let cells = repeat(TRANSIENT_RUNS, || {
        Ok(server.call("execute-persistent", &persistent)?.1)
    })?;
    report("execute-persistent", &cells, None);
    Ok(())
}

/// Measures the first results of sessions, one after the other, in a server with a pool of this
/// size and with these flags.
fn new_sessions(pool: &str, flags: &[&str], count: usize) -> anyhow::Result<Sample> {
    let mut command = with_setting(cellblock("mcp"), "CELLBLOCK_POOL", pool);
    command.args(flags);
    let (mut server, _) = Server::start(command)?;
    server.execute("first", FIRST_CELL)?;
    let mut number = 0;
    repeat(count, || {
        // The members of the pool are made in the background; the next caller comes when that is
        // done.
        server.wait_until_idle();
        number += 1;
        let id = format!("s{number}");
        let (result, elapsed) = server.execute(&id, FIRST_CELL)?;
        ensure!(printed(&result) == Some("1"), "unexpected answer: {result}");
        server.call("close_session", &close(&id))?;
        Ok(elapsed)
    })
}

fn new_session_to_first_result(peers: &Peers) -> anyhow::Result<()> {
    println!("\nnew session to first result, numpy + pandas + pyplot imported");
    let pooled = new_sessions("2", &[], NEW_SESSIONS)?;
    report(
        "from the warm pool",
        &pooled,
        Some(Duration::from_millis(3)),
    );
    let made = new_sessions("0", &[], NEW_SESSIONS)?;
    report("pool empty", &made, Some(Duration::from_millis(15)));
    let plain = repeat(PLAIN_RUNS, || peers.plain.run(FIRST_CELL))?;
    report("python -c 'import …; print(1)'", &plain, None);
    ratio("python -c", &plain, &pooled);
    if let Some(ipybox) = &peers.ipybox {
        let (mut server, _) = Server::start(ipybox.command()?)?;
        let theirs = repeat(IPYBOX_STARTS, || {
            let start = Instant::now();
            server.call("reset", &json!({}))?;
            server.call("execute_ipython_cell", &json!({ "code": FIRST_CELL }))?;
            Ok(start.elapsed())
        })?;
        report("ipybox reset + import", &theirs, None);
        ratio("ipybox", &theirs, &pooled);
    }
    Ok(())
}

fn cell_round_trip(peers: &Peers) -> anyhow::Result<()> {
    println!("\ncell round trip `print(n)` over MCP stdio");
    let round_trips = |server: &mut Server, cells: usize| {
        let mut lost = 0;
        let mut number = 0;
        let sample = repeat(cells, || {
            number += 1;
            let (result, elapsed) = server.call(
                "execute_ipython_cell",
                &json!({ "code": format!("print({number})") }),
            )?;
            lost += usize::from(printed(&result) != Some(number.to_string().as_str()));
            Ok(elapsed)
        })?;
        anyhow::Ok((sample, lost))
    };
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    server.execute("default", "pass")?;
    server.wait_until_idle();
    let (ours, lost) = round_trips(&mut server, CELLS)?;
    report("cellblock, median", &ours, Some(Duration::from_millis(2)));
    target(
        "cellblock, p99",
        in_milliseconds(ours.high()),
        "≤ 5 ms",
        ours.high() <= Duration::from_millis(5),
    );
    target(
        "cellblock, outputs lost",
        format!("{lost} of {CELLS}"),
        "0",
        lost == 0,
    );
    let plain = repeat(PLAIN_RUNS, || peers.plain.run("print(1)"))?;
    report("python -c 'print(1)', a process each time", &plain, None);
    if let Some(ipybox) = &peers.ipybox {
        let (mut server, _) = Server::start(ipybox.command()?)?;
        let (theirs, lost) = round_trips(&mut server, IPYBOX_CELLS)?;
        report("ipybox", &theirs, None);
        println!("    ipybox, outputs lost: {lost} of {IPYBOX_CELLS}");
        ratio("ipybox", &theirs, &ours);
    }
    Ok(())
}

fn cost_of_a_daemon(_: &Peers) -> anyhow::Result<()> {
    println!("\nthe cell `1` in a session of the server itself, and in one that a daemon keeps");
    let start = |keep: &str| {
        let mut command = cellblock("mcp");
        command.args(["--keep-sessions", keep, "--daemon-name", "benchmark"]);
        let (mut server, _) = Server::start(command)?;
        server.execute("default", "pass")?;
        server.wait_until_idle();
        anyhow::Ok(server)
    };
    let (mut own, mut kept) = (start("off")?, start("on")?);
    let cell = |server: &mut Server| server.execute("default", "1").map(|(_, elapsed)| elapsed);
    let [own, kept] = in_turn(CELLS, || cell(&mut own), || cell(&mut kept))?;
    report("in the server", &own, None);
    report("in a daemon", &kept, None);
    let added = kept.median().saturating_sub(own.median());
    target(
        "added, median",
        in_milliseconds(added),
        "≤ 0.15 ms",
        added <= Duration::from_micros(150),
    );
    cellblock("daemon")
        .args(["stop", "benchmark", "--now"])
        .stdout(Stdio::null())
        .status()?;
    Ok(())
}

fn one_shot_run(peers: &Peers) -> anyhow::Result<()> {
    println!("\n`cellblock run -c 'print(1)'`, no server running");
    let [ours, plain] = in_turn(
        RUNS,
        || timed(cellblock("run").args(["-c", "print(1)"])),
        || peers.plain.run("import IPython; print(1)"),
    )?;
    report("cellblock run", &ours, None);
    report("python -c 'import IPython; print(1)'", &plain, None);
    let times = ours.median().as_secs_f64() / plain.median().as_secs_f64();
    target(
        "ratio of the medians",
        format!("{times:.2} ×"),
        "≤ 1.3 ×",
        times <= 1.3,
    );
    Ok(())
}

fn memory_of_an_idle_session(peers: &Peers) -> anyhow::Result<()> {
    println!("\nextra memory of an idle session, kernel memory included");
    let group = MemoryGroup::make(None);
    let (mut server, _) = start_in(group.as_ref().ok(), "on")?;
    // What only the first session costs, and the pool, are there before the first look.
    for id in ["first", "second"] {
        server.execute(id, FIRST_CELL)?;
    }
    server.wait_until_idle();
    let before = (
        group.as_ref().ok().map(MemoryGroup::used),
        memory::available()?,
    );
    for number in 0..IDLE_SESSIONS {
        server.execute(&format!("s{number}"), FIRST_CELL)?;
    }
    server.wait_until_idle();
    let after = (
        group.as_ref().ok().map(MemoryGroup::used),
        memory::available()?,
    );
    let each = |bytes: u64| bytes as f64 / IDLE_SESSIONS as f64 / MIB as f64;
    let system = each(before.1.saturating_sub(after.1));
    match (&group, before.0, after.0) {
        (Ok(_), Some(before), Some(after)) => {
            let used = each(after.saturating_sub(before));
            target(
                "control group of the whole server",
                format!("{used:.1} MiB"),
                "≤ 8 MB",
                used * 1.048576 <= 8.0,
            );
            println!("    less memory available on the machine: {system:.1} MiB each");
        }
        (Err(why), ..) => {
            println!("    (no control group: {why})");
            target(
                "less memory available on the machine",
                format!("{system:.1} MiB"),
                "≤ 8 MB",
                system * 1.048576 <= 8.0,
            );
        }
        _ => {}
    }
    if let Some(ipybox) = &peers.ipybox {
        let (mut theirs, _) = Server::start(ipybox.command()?)?;
        theirs.call("execute_ipython_cell", &json!({ "code": FIRST_CELL }))?;
        println!(
            "    ipybox, one server with its one session: {} MiB",
            memory::of_processes(&theirs.processes()) / MIB
        );
    }
    Ok(())
}

fn sessions_in_a_row(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\nsessions created, used and closed one after the other, {SESSIONS_IN_A_ROW} in a row"
    );
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    server.execute("first", FIRST_CELL)?;
    server.wait_until_idle();
    let start = Instant::now();
    for number in 0..SESSIONS_IN_A_ROW {
        let id = format!("s{number}");
        let (result, _) = server.execute(&id, FIRST_CELL)?;
        ensure!(printed(&result) == Some("1"), "unexpected answer: {result}");
        server.call("close_session", &close(&id))?;
    }
    let rate = SESSIONS_IN_A_ROW as f64 / start.elapsed().as_secs_f64();
    target(
        "sessions per second",
        format!("{rate:.0}"),
        "≥ 60",
        rate >= 60.0,
    );
    Ok(())
}

fn live_sessions_in_a_gibibyte(_: &Peers) -> anyhow::Result<()> {
    println!(
        "\n{LIVE_SESSIONS} live sessions, each still answering, in 1 GiB with everything that \
         belongs to the server"
    );
    live_sessions("off", 1024)?;
    println!("    with undo, which keeps two states of each, in 2 GiB:");
    live_sessions("on", 2048)
}

fn live_sessions(undo: &str, mebibytes: u64) -> anyhow::Result<()> {
    let group = MemoryGroup::make(Some(mebibytes * MIB));
    let (mut server, _) = start_in(group.as_ref().ok(), undo)?;
    let start = Instant::now();
    for number in 0..LIVE_SESSIONS {
        // A session that was killed because memory ran out, here or later, is one that does not
        // answer below.
        let _ = server.execute(
            &format!("s{number}"),
            &format!("import numpy, pandas; x = {number}"),
        );
    }
    println!("    all made after {:.1} s", start.elapsed().as_secs_f64());
    server.wait_until_idle();
    let mut answered = 0;
    let mut sample = Sample::default();
    for number in 0..LIVE_SESSIONS {
        let Ok((result, elapsed)) = server.execute(&format!("s{number}"), "print(x)") else {
            continue;
        };
        answered += usize::from(printed(&result) == Some(number.to_string().as_str()));
        sample.add(elapsed);
    }
    target(
        "still answering",
        format!("{answered} of {LIVE_SESSIONS}"),
        "all",
        answered == LIVE_SESSIONS,
    );
    ensure!(answered > 0, "no session answered");
    report("their answers", &sample, None);
    let wanted = format!("≤ {mebibytes} MiB");
    match &group {
        Ok(group) => {
            let used = group.peak() / MIB;
            println!(
                "    most memory at any time: {used} MiB; processes killed for want of memory: {}",
                group.kills()
            );
            target(
                "memory now",
                format!("{} MiB", group.used() / MIB),
                &wanted,
                group.kills() == 0,
            );
        }
        Err(why) => {
            let sum = memory::of_processes(&server.processes()) / MIB;
            println!(
                "    (no control group: {why}; the sum over all processes, without what the kernel \
                 holds for them)"
            );
            target(
                "memory now",
                format!("{sum} MiB"),
                &wanted,
                sum <= mebibytes,
            );
        }
    }
    Ok(())
}

/// Starts a server that has room for many sessions, inside a control group if there is one.
fn start_in(group: Option<&MemoryGroup>, undo: &str) -> anyhow::Result<(Server, Duration)> {
    let mut command = match group {
        Some(group) => group.wrap(&cellblock("mcp")),
        None => cellblock("mcp"),
    };
    command.args(["--max-sessions", "200", "--undo", undo]);
    Server::start(command)
}

fn with_setting(mut command: Command, name: &str, value: &str) -> Command {
    command.env(name, value);
    command
}

fn timed(command: &mut Command) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let output = command.output().context("could not start a program")?;
    let elapsed = start.elapsed();
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(elapsed)
}

fn target(what: &str, measured: String, wanted: &str, met: bool) {
    println!(
        "  {} {what}: {measured} (target {wanted})",
        if met { "✓" } else { "✗ MISSED" }
    );
}

fn ratio(whose: &str, theirs: &Sample, ours: &Sample) {
    let times = theirs.median().as_secs_f64() / ours.median().as_secs_f64();
    println!("    {whose} takes {times:.1} × as long (medians)");
}
