//! `cellblock serve` as its operators start it: a process, an address, a token in a file.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};

use super::server::{PATIENCE, program};

/// Lines within which a service says where it is.
const BEGINNING: usize = 64;

/// A running service. Dropping it asks it to end and waits.
pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    /// Lets its bearer do everything. Empty where nobody needs one.
    pub(crate) token: String,
    log: Option<JoinHandle<String>>,
}

impl Service {
    /// Starts a service on a free port of this machine, in development mode, with sessions that end with it.
    pub(crate) fn start(more: &[&str]) -> Service {
        Service::spawn(program(), more, address_and_token)
    }

    /// Starts such a service for everybody on this machine: for clients that know of no tokens.
    pub(crate) fn without_tokens(more: &[&str]) -> Service {
        let mut command = program();
        command.env("CELLBLOCK_AUTH", "off");
        Service::spawn(command, more, |told| {
            loop {
                let line = told.recv_timeout(PATIENCE).ok()?;
                if let Some(address) = address(&line) {
                    return Some((address, String::new()));
                }
            }
        })
    }

    fn spawn(
        mut command: Command,
        more: &[&str],
        beginning: impl FnOnce(&Receiver<String>) -> Option<(SocketAddr, String)>,
    ) -> Service {
        command.args(["serve", "--listen", "127.0.0.1:0", "--keep-sessions", "off"]).args(more);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the program can be run");
        let log = BufReader::new(child.stderr.take().expect("it is a pipe"));
        let (sender, told) = sync_channel(BEGINNING);
        let log = std::thread::spawn(move || {
            let mut all = String::new();
            for line in log.lines().map_while(Result::ok) {
                // Nobody listens once the beginning has been heard.
                let _ = sender.try_send(line.clone());
                all += &line;
                all.push('\n');
            }
            all
        });
        match beginning(&told) {
            Some((address, token)) => Service { child, address, token, log: Some(log) },
            None => {
                let _ = child.kill();
                panic!("the service did not say where it is: {}", log.join().unwrap_or_default())
            }
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    /// The server's own memory, as the kernel counts it.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
        line.split_whitespace().next().and_then(|number| number.parse::<u64>().ok()).expect("it is a number") * 1024
    }

    /// The descriptors that the server has open.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("the server runs").count()
    }

    /// Asks the service to end, waits, and returns what it wrote to its log.
    pub(crate) fn finish(mut self) -> String {
        self.ask_to_end();
        assert!(self.child.wait().expect("it was started by us").success(), "a service that is asked to end ends well");
        let log = self.log.take().expect("it is taken once");
        log.join().expect("reading a pipe does not panic")
    }

    fn ask_to_end(&self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.log.is_some() {
            self.ask_to_end();
            let _ = self.child.wait();
        }
    }
}

/// The address in a line of the log, if it tells one.
fn address(line: &str) -> Option<SocketAddr> {
    line.split("url=\"http://").nth(1)?.split('/').next()?.parse().ok()
}

/// Reads both from the log: the port is the kernel's choice, and the token is in a file.
fn address_and_token(told: &Receiver<String>) -> Option<(SocketAddr, String)> {
    let (mut address, mut token) = (None, None);
    while address.is_none() || token.is_none() {
        let line = told.recv_timeout(PATIENCE).ok()?;
        address = address.or_else(|| self::address(&line));
        let file = line.split(' ').next_back()?.split('=').nth(1).filter(|path| path.ends_with("/dev_token.txt"));
        token = token.or_else(|| fs::read_to_string(file?).ok());
    }
    Some((address?, token?.trim().to_owned()))
}
