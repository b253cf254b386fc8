//! What the way out costs: the first byte, the throughput, the start of a session; and what a
//! package costs the second time.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use crate::server::{Server, cellblock, close, printed};
use crate::statistics::{in_milliseconds, repeat, report};
use crate::{FIRST_CELL, Peers, new_sessions, target};

const CONNECTIONS: usize = 300;
const DOWNLOAD: usize = 512 << 20;
const NEW_SESSIONS: usize = 40;
/// Pure Python, without dependencies, on every index.
const SMALL_PACKAGE: &str = "humanize";

/// Answers on loopback: a byte, or very many. Returns its port.
fn web() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        let zeros = vec![0; 1 << 20];
        for mut connection in listener.incoming().flatten() {
            let mut request = [0; 1];
            if connection.set_nodelay(true).is_err() || connection.read_exact(&mut request).is_err()
            {
                continue;
            }
            let pieces = if request == *b"1" { 0 } else { DOWNLOAD >> 20 };
            let _ = connection.write_all(b"x");
            for _ in 0..pieces {
                if connection.write_all(&zeros).is_err() {
                    break;
                }
            }
        }
    });
    Ok(port)
}

/// Prints the median of the microseconds to the first byte, and the megabytes per second of one
/// download.
fn client(port: u16) -> String {
    format!(
        "import socket, statistics, time
def connect(request):
    connection = socket.create_connection(('127.0.0.1', {port}))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(request)
    assert connection.recv(1) == b'x'
    return connection
times = []
for _ in range({CONNECTIONS}):
    begun = time.perf_counter()
    connection = connect(b'1')
    times.append(time.perf_counter() - begun)
    connection.close()
connection, buffer, size = connect(b'2'), bytearray(1 << 20), 0
begun = time.perf_counter()
while received := connection.recv_into(buffer):
    size += received
print(statistics.median(times) * 1e6, size / (time.perf_counter() - begun) / 1e6)"
    )
}

fn figures(text: &str) -> anyhow::Result<(f64, f64)> {
    let (first, second) = text
        .trim()
        .split_once(' ')
        .with_context(|| format!("unexpected answer: {text}"))?;
    Ok((first.parse()?, second.parse()?))
}

pub(crate) fn first_byte_and_throughput(peers: &Peers) -> anyhow::Result<()> {
    println!("\na connection through the gateway, over a direct one (loopback)");
    let port = web()?;
    let code = client(port);
    let direct = figures(&peers.plain.output(&code)?)?;
    let mut command = cellblock("mcp");
    command.args(["--allowed-domain", &format!("127.0.0.1:{port}")]);
    let (mut server, _) = Server::start(command)?;
    server.execute("a", FIRST_CELL)?;
    let (result, _) = server.execute("a", &code)?;
    let through = figures(printed(&result).context("the session did not reach the server")?)?;
    println!(
        "    direct: first byte after {:.0} µs, {:.0} MB/s",
        direct.0, direct.1
    );
    println!(
        "    through the gateway: first byte after {:.0} µs, {:.0} MB/s",
        through.0, through.1
    );
    let added = (through.0 - direct.0) / 1e3;
    target(
        "added to the first byte",
        format!("{added:.2} ms"),
        "≤ 1 ms",
        added <= 1.0,
    );
    target(
        "one download",
        format!("{:.0} MB/s", through.1),
        "≥ 200 MB/s",
        through.1 >= 200.0,
    );
    Ok(())
}

pub(crate) fn cost_of_a_network_list(_: &Peers) -> anyhow::Result<()> {
    println!("\nnew session to first result with a network list, pool empty");
    let without = new_sessions("0", &["--install-packages", "off"], NEW_SESSIONS)?;
    report("no network", &without, None);
    let with = new_sessions(
        "0",
        &[
            "--install-packages",
            "off",
            "--allowed-domain",
            "example.com",
        ],
        NEW_SESSIONS,
    )?;
    report("two ports and names", &with, None);
    let added = with.median().saturating_sub(without.median());
    target(
        "added to the median",
        in_milliseconds(added),
        "≤ 3 ms",
        added <= Duration::from_millis(3),
    );
    Ok(())
}

pub(crate) fn installing_what_is_known(_: &Peers) -> anyhow::Result<()> {
    println!("\n`install_package` of a pure Python wheel that the store has");
    let wish = |session: &str| json!({ "package_name": SMALL_PACKAGE, "session_id": session });
    let start = || -> anyhow::Result<Server> {
        let (mut server, _) = Server::start(cellblock("mcp"))?;
        server.execute("a", FIRST_CELL)?;
        Ok(server)
    };
    let (first, elapsed) = start()?.call("install_package", &wish("a"))?;
    if first["isError"] == true {
        println!("    not measured: {}", first["content"][0]["text"]);
        return Ok(());
    }
    println!(
        "    the first time, or with a store that has it: {}",
        in_milliseconds(elapsed)
    );
    let fresh = repeat(5, || {
        let mut server = start()?;
        let begun = Instant::now();
        let (result, _) = server.call("install_package", &wish("a"))?;
        ensure!(result["isError"] == false, "unexpected answer: {result}");
        Ok(begun.elapsed())
    })?;
    report(
        "in a server that must ask the index which version",
        &fresh,
        Some(Duration::from_millis(300)),
    );
    let mut server = start()?;
    server.call("install_package", &wish("a"))?;
    let mut number = 0;
    let again = repeat(20, || {
        number += 1;
        let session = format!("s{number}");
        server.execute(&session, "pass")?;
        let (_, elapsed) = server.call("install_package", &wish(&session))?;
        server.call("close_session", &close(&session))?;
        Ok(elapsed)
    })?;
    report(
        "in another session of the same server",
        &again,
        Some(Duration::from_millis(300)),
    );
    Ok(())
}
