//! Rows about sessions in containers. They need an engine, as `DOCKER_HOST` and the like name it,
//! and an image.
//!
//! `BENCH_IMAGE` names the image; without it, and without an engine, the rows say so and measure
//! nothing. What is compared is measured in turn, in the same image.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;

use crate::server::{Server, cellblock, close, printed};
use crate::statistics::{in_milliseconds, in_turn, repeat, report};
use crate::{Peers, target};

const CELLS: usize = 300;
const STARTS: usize = 8;
const TRANSIENT_RUNS: usize = 20;
/// Containers that wait, here and there.
pub(crate) const POOL: &str = "4";
/// How long it takes to make a container, and more.
const REST: Duration = Duration::from_secs(2);

/// The image, if there is an engine that has it.
fn image() -> Option<String> {
    let image = std::env::var("BENCH_IMAGE").ok()?;
    let known = Command::new("docker")
        .args(["image", "inspect", &image])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    known.is_ok_and(|status| status.success()).then_some(image)
}

fn server(image: &str, pool: &str) -> anyhow::Result<Server> {
    let mut command = cellblock("mcp");
    command
        .args(["--backend", "docker", "--container-tag", image])
        .env("CELLBLOCK_POOL", pool);
    Ok(Server::start(command)?.0)
}

pub(crate) fn cells_in_a_container(_: &Peers) -> anyhow::Result<()> {
    println!("\ncell round trip `print(n)` in a container");
    let Some(image) = image() else {
        return nothing();
    };
    let mut server = server(&image, "0")?;
    server.execute("default", "pass")?;
    server.wait_until_idle();
    let mut number = 0;
    let ours = repeat(CELLS, || {
        number += 1;
        let (result, elapsed) = server.execute("default", &format!("print({number})"))?;
        ensure!(
            printed(&result) == Some(number.to_string().as_str()),
            "unexpected answer: {result}"
        );
        Ok(elapsed)
    })?;
    report(
        "persistent session on Docker",
        &ours,
        Some(Duration::from_millis(4)),
    );
    Ok(())
}

pub(crate) fn cold_container(_: &Peers) -> anyhow::Result<()> {
    println!("\na session in a new container, to its first result, against `docker run`");
    let Some(image) = image() else {
        return nothing();
    };
    let mut server = server(&image, "0")?;
    server.execute("first", "pass")?;
    let mut number = 0;
    let session = || {
        number += 1;
        let id = format!("s{number}");
        let (_, elapsed) = server.execute(&id, "print(1)")?;
        server.call("close_session", &close(&id))?;
        Ok(elapsed)
    };
    let run = || {
        let start = Instant::now();
        let status = Command::new("docker")
            .args([
                "run",
                "--rm",
                "--network",
                "none",
                &image,
                "python3",
                "-c",
                "print(1)",
            ])
            .stdout(Stdio::null())
            .status()?;
        ensure!(status.success(), "docker run failed");
        Ok(start.elapsed())
    };
    let [ours, theirs] = in_turn(STARTS, session, run)?;
    report("new session", &ours, None);
    report("docker run IMAGE python3 -c 'print(1)'", &theirs, None);
    let times = ours.median().as_secs_f64() / theirs.median().as_secs_f64();
    target(
        "ratio of the medians",
        format!("{times:.2} ×"),
        "≤ 1.2 ×",
        times <= 1.2,
    );
    Ok(())
}

/// One call of `execute-transient` in a container that waited, beside the server whose tool it is.
pub(crate) fn transient_runs(peers: &Peers) -> anyhow::Result<()> {
    println!(
        "\nprofile python-docker-mcp on Docker: one call to its result, in a container that waited"
    );
    let Some(image) = image() else {
        return nothing();
    };
    // Both have the same image, one that suits the other server.
    let image = match &peers.python_docker_mcp {
        Some(peer) => peer.image(&image)?,
        None => image,
    };
    let mut command = cellblock("mcp");
    command.args([
        "--profile",
        "python-docker-mcp",
        "--backend",
        "docker",
        "--container-tag",
        &image,
    ]);
    command.env("CELLBLOCK_POOL", POOL);
    let (mut server, _) = Server::start(command)?;
    let call = json!({"code": "print(1)"});
    let run = |server: &mut Server| {
        // Containers that wait are made in the background; the next caller comes when that is done.
        std::thread::sleep(REST);
        let (result, elapsed) = server.call("execute-transient", &call)?;
        let text = result["content"][0]["text"].as_str().unwrap_or_default();
        ensure!(
            text.starts_with("Execution Result:\n\n1\n"),
            "unexpected answer: {result}"
        );
        Ok(elapsed)
    };
    run(&mut server)?;
    let ours = match &peers.python_docker_mcp {
        None => repeat(TRANSIENT_RUNS, || run(&mut server))?,
        Some(peer) => {
            let (mut other, _) = Server::start(peer.command(&image)?)?;
            run(&mut other)?;
            let [ours, theirs] = in_turn(TRANSIENT_RUNS, || run(&mut server), || run(&mut other))?;
            report("python-docker-mcp 0.2.5", &theirs, None);
            let times = theirs.median().as_secs_f64() / ours.median().as_secs_f64();
            target(
                "ratio of the medians",
                format!("{times:.1} ×"),
                "≥ 20 ×",
                times >= 20.0,
            );
            ours
        }
    };
    report("transient run", &ours, Some(Duration::from_millis(30)));
    println!("    longest: {}", in_milliseconds(ours.high()));
    Ok(())
}

fn nothing() -> anyhow::Result<()> {
    println!("    not measured (BENCH_IMAGE names no image of an engine that answers)");
    Ok(())
}
