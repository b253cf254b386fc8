//! Rows about sessions that are copied: forks, undo, and what keeping the past costs.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::memory::MIB;
use super::server::{Server, cellblock, close, printed};
use super::statistics::{in_turn, repeat, report};
use super::{Peers, target};

const FORKS: usize = 40;
const FORKS_AT_ONCE: usize = 16;
const BURSTS: usize = 8;
const UNDOS: usize = 60;
const CELLS: usize = 200;
const CYCLES: usize = 10_000;

/// Time from the call of `fork_session` to the fork's first answer.
pub(super) fn fork_to_first_answer(_: &Peers) -> anyhow::Result<()> {
    println!("\nfork of a live session to the fork's first answer");
    for (what, code, most) in [
        (
            "100 MB of objects and arrays in use",
            "import numpy; x = numpy.ones(100_000_000 // 8)",
            8,
        ),
        (
            "100 MB of small Python objects",
            "x = [str(n) for n in range(1_500_000)]",
            0,
        ),
        (
            "an array of 1 GiB",
            "import numpy; x = numpy.ones((1 << 30) // 8)",
            15,
        ),
    ] {
        let (mut server, _) = Server::start(cellblock("mcp"))?;
        server.execute("source", code)?;
        let sample = repeat(FORKS, || {
            server.wait_until_idle();
            let start = Instant::now();
            server.call(
                "fork_session",
                &json!({ "session_id": "source", "names": ["fork"] }),
            )?;
            let (result, _) = server.execute("fork", "print(len(x) > 0)")?;
            let elapsed = start.elapsed();
            ensure!(
                printed(&result) == Some("True"),
                "unexpected answer: {result}"
            );
            server.call("close_session", &close("fork"))?;
            Ok(elapsed)
        })?;
        report(
            what,
            &sample,
            (most > 0).then(|| Duration::from_millis(most)),
        );
    }
    Ok(())
}

/// Time from one call to the first answers of all its forks.
pub(super) fn many_forks_at_once(_: &Peers) -> anyhow::Result<()> {
    println!("\n{FORKS_AT_ONCE} forks at once to all first answers");
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    server.execute("source", "import numpy; x = 7")?;
    let sample = repeat(BURSTS, || {
        server.wait_until_idle();
        let start = Instant::now();
        let (result, _) = server.call(
            "fork_session",
            &json!({ "session_id": "source", "count": FORKS_AT_ONCE }),
        )?;
        let forks = names(&result)?;
        let calls: Vec<Value> = forks
            .iter()
            .map(|fork| json!({ "code": "print(x)", "session_id": fork }))
            .collect();
        let answers = server.call_all("execute_ipython_cell", &calls)?;
        let elapsed = start.elapsed();
        ensure!(
            answers.iter().all(|answer| printed(answer) == Some("7")),
            "unexpected answers: {answers:?}"
        );
        for fork in &forks {
            server.call("close_session", &close(fork))?;
        }
        Ok(elapsed)
    })?;
    report("cellblock", &sample, Some(Duration::from_millis(120)));
    Ok(())
}

/// What keeping states for undo adds to a small cell, at an agent's pace and back to back.
pub(super) fn cost_of_checkpoints(_: &Peers) -> anyhow::Result<()> {
    println!("\nwhat undo adds to a small cell (`x = n`)");
    for (what, waits, most) in [
        (
            "a caller who waits for an answer before the next call",
            true,
            Some(1.5),
        ),
        ("back to back", false, None),
    ] {
        let mut kept = start_with(&["--undo", "on"])?;
        let mut plain = start_with(&["--undo", "off"])?;
        let cell = |server: &mut Server, number: usize| {
            if waits {
                server.wait_until_idle();
            }
            Ok(server.execute("a", &format!("x = {number}"))?.1)
        };
        for number in 0..20 {
            cell(&mut kept, number)?;
            cell(&mut plain, number)?;
        }
        let mut numbers = (0.., 0..);
        let [with, without] = in_turn(
            CELLS,
            || {
                cell(
                    &mut kept,
                    numbers.0.next().expect("there is always another number"),
                )
            },
            || {
                cell(
                    &mut plain,
                    numbers.1.next().expect("there is always another number"),
                )
            },
        )?;
        println!("    {what}:");
        report("  undo on", &with, None);
        report("  undo off", &without, None);
        let added = (with.median().as_secs_f64() - without.median().as_secs_f64()) * 1000.0;
        match most {
            Some(most) => target(
                "added to the median",
                format!("{added:.2} ms"),
                "≤ 1.5 ms",
                added <= most,
            ),
            None => println!("      added to the median: {added:.2} ms"),
        }
    }
    Ok(())
}

/// Time from the call of `undo` to the session's next answer.
pub(super) fn undo_to_next_answer(_: &Peers) -> anyhow::Result<()> {
    println!("\nundo of a cell to the session's next answer");
    let mut server = start_with(&[])?;
    server.execute("a", "import numpy; x = 0; y = numpy.ones(100_000_000 // 8)")?;
    let sample = repeat(UNDOS, || {
        server.execute("a", "x = 1")?;
        server.wait_until_idle();
        let start = Instant::now();
        server.call("undo", &json!({ "session_id": "a" }))?;
        let (result, _) = server.execute("a", "print(x)")?;
        let elapsed = start.elapsed();
        ensure!(printed(&result) == Some("0"), "unexpected answer: {result}");
        Ok(elapsed)
    })?;
    report("cellblock", &sample, Some(Duration::from_millis(15)));
    Ok(())
}

/// Memory that only a fresh fork has.
pub(super) fn private_memory_of_a_fork(_: &Peers) -> anyhow::Result<()> {
    println!("\nprivate memory of a fresh fork, 100 MB in use by its source");
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    server.execute("source", "import numpy; x = numpy.ones(100_000_000 // 8)")?;
    let mut sizes = Vec::new();
    for _ in 0..5 {
        let before = server.processes();
        server.call(
            "fork_session",
            &json!({ "session_id": "source", "names": ["fork"] }),
        )?;
        server.wait_until_idle();
        let own = server
            .processes()
            .difference(&before)
            .map(|pid| private_bytes(*pid))
            .max()
            .unwrap_or(0);
        sizes.push(own);
        server.call("close_session", &close("fork"))?;
    }
    sizes.sort_unstable();
    let median = sizes[sizes.len() / 2] as f64 / 1e6;
    target(
        "median of five",
        format!("{median:.1} MB"),
        "≤ 5 MB",
        median <= 5.0,
    );
    Ok(())
}

/// Ten thousand forks and ten thousand checkpoints: what is left of them. Takes minutes; only when
/// asked for by name.
pub(super) fn cycles_leave_nothing(_: &Peers) -> anyhow::Result<()> {
    println!("\n{CYCLES} fork/close cycles and {CYCLES} checkpointed cells");
    let mut server = start_with(&[])?;
    let look = |server: &mut Server, what: &str| -> anyhow::Result<[u64; 4]> {
        server.wait_until_idle();
        let processes = server.processes();
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", server.pid()))?.count() as u64;
        let memory = super::memory::of_processes(&processes) / MIB;
        let groups = std::fs::read_to_string("/proc/cgroups").unwrap_or_default();
        let groups = groups.lines().find_map(|line| {
            line.strip_prefix("memory")?
                .split_whitespace()
                .nth(1)?
                .parse()
                .ok()
        });
        let found = [
            processes.len() as u64,
            descriptors,
            groups.unwrap_or(0),
            memory,
        ];
        println!(
            "    {what}: {} processes, {} descriptors, {} control groups, {} MiB",
            found[0], found[1], found[2], found[3]
        );
        Ok(found)
    };
    for number in 0..50 {
        server.execute("a", &format!("x = {number}"))?;
    }
    let before = look(&mut server, "before")?;
    for number in 0..CYCLES {
        server.call(
            "fork_session",
            &json!({ "session_id": "a", "names": ["fork"] }),
        )?;
        if number % 10 == 0 {
            server.execute("fork", "x = 1")?;
        }
        server.call("close_session", &close("fork"))?;
    }
    let forked = look(&mut server, "after the forks")?;
    for number in 0..CYCLES {
        server.execute("a", &format!("x = {number}"))?;
    }
    let after = look(&mut server, "after the cells")?;
    // Groups are counted over the whole machine, and the kernel takes some that were removed
    // earlier down later.
    let grown = (0..3)
        .map(|what| forked[what].max(after[what]).saturating_sub(before[what]))
        .max()
        .unwrap_or(0);
    target(
        "processes, descriptors, control groups",
        format!("{grown} more"),
        "≤ 4 more",
        grown <= 4,
    );
    target(
        "memory",
        format!("{} MiB more", after[3].saturating_sub(before[3])),
        "≤ 64 MiB",
        after[3] <= before[3] + 64,
    );
    Ok(())
}

fn start_with(flags: &[&str]) -> anyhow::Result<Server> {
    let mut command = cellblock("mcp");
    command.args(flags);
    let (mut server, _) = Server::start(command)?;
    server.execute("a", "pass")?;
    Ok(server)
}

fn names(result: &Value) -> anyhow::Result<Vec<String>> {
    let forks = result["structuredContent"]["forks"]
        .as_array()
        .context("no forks in the answer")?;
    Ok(forks
        .iter()
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect())
}

/// Memory that a process shares with nobody. A twin shares all of its with its interpreter.
fn private_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value
            .trim()
            .trim_end_matches("kB")
            .trim()
            .parse::<u64>()
            .ok()
    };
    (field("Private_Clean:").unwrap_or(0) + field("Private_Dirty:").unwrap_or(0)) * 1024
}
