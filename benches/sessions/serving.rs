//! `cellblock serve` under test: keys for its callers, and the address that it listens on.

use std::io::{BufRead, BufReader, Lines};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, Command, Stdio};

use anyhow::Context;

use crate::server::cellblock;

/// A key of a caller, and the lines of a configuration that make it known.
pub(crate) struct Key {
    pub(crate) key: String,
    pub(crate) lines: String,
}

pub(crate) fn new_key(name: &str, scopes: &[&str]) -> anyhow::Result<Key> {
    let mut command = cellblock("key");
    command
        .args(["new", name])
        .args(scopes.iter().flat_map(|scope| ["--scope", scope]));
    let text = String::from_utf8(command.output()?.stdout)?;
    let key = text
        .lines()
        .find(|line| line.starts_with("cellblock_"))
        .context("no key was shown")?
        .to_owned();
    let lines = text
        .split_once("api_keys:\n")
        .context("nothing was said about the key")?
        .1
        .to_owned();
    Ok(Key { key, lines })
}

/// The rest of a log. Somebody must read it, or the service waits for room to write.
pub(crate) type Log = Lines<BufReader<ChildStderr>>;

/// Starts a service that listens on a free port.
pub(crate) fn start(mut command: Command) -> anyhow::Result<(Child, SocketAddr, Log)> {
    command
        .args(["--listen", "127.0.0.1:0"])
        .env("RUST_LOG", "info")
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command.spawn().context("could not start a service")?;
    let mut log = BufReader::new(child.stderr.take().context("a service without a log")?).lines();
    let mut heard = Vec::new();
    let address = log.by_ref().map_while(Result::ok).find_map(|line| {
        let address = line
            .split("url=\"http://")
            .nth(1)
            .and_then(|rest| rest.split('/').next())
            .map(str::to_owned);
        heard.push(line);
        address
    });
    let address = address
        .with_context(|| format!("the service does not say where it is: {heard:?}"))?
        .parse()?;
    Ok((child, address, log))
}
