//! `cellblock serve` as its operators start it: a process, an address, a token in a file.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::process::{Pid, Signal, kill_process};

use super::server::{Errors, PATIENCE, finished, program};

/// What is waited for in the log.
const NEWS: [&str; 4] = [
    "serving MCP over HTTP",
    "development mode, with a token",
    "the settings were",
    "the approvals were not",
];

/// A running service. Dropping it asks it to end and waits.
pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    /// Lets its bearer do everything.
    pub(crate) token: String,
    keys: HashMap<String, String>,
    told: Receiver<String>,
    log: Option<Errors>,
}

impl Service {
    /// Starts a service on a free port of this machine, in development mode, with sessions that end with it.
    pub(crate) fn start(more: &[&str]) -> Service {
        let mut command = program();
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--keep-sessions", "off"])
            .args(more);
        let mut service = Service::run(command);
        let file = service.told.recv_timeout(PATIENCE).ok();
        let file = file
            .as_deref()
            .and_then(|line| line.split("file=").nth(1)?.split_whitespace().next());
        let token = file.map(|file| {
            fs::read_to_string(file.trim_matches('"')).expect("the token is where the log says")
        });
        service.token = token.expect("it says where its token is").trim().to_owned();
        service
    }

    /// Starts such a service for everybody on this machine: for clients that know of no tokens.
    pub(crate) fn without_tokens(more: &[&str]) -> Service {
        let mut command = program();
        command.env("CELLBLOCK_AUTH", "off");
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--keep-sessions", "off"])
            .args(more);
        Service::run(command)
    }

    /// Starts a service whose callers have keys, one for each name with the scopes beside it. `folder` holds its configuration.
    pub(crate) fn with_keys(
        folder: &Path,
        callers: &[(&str, &[&str])],
        keep_sessions: bool,
        more: &[&str],
    ) -> Service {
        Service::with_keys_and(folder, callers, keep_sessions, more, &[])
    }

    /// The same, with variables.
    pub(crate) fn with_keys_and(
        folder: &Path,
        callers: &[(&str, &[&str])],
        keep_sessions: bool,
        more: &[&str],
        variables: &[(&str, &str)],
    ) -> Service {
        let configuration = folder.join("config.yaml");
        let mut keys = HashMap::new();
        if !configuration.exists() {
            let mut text = "auth:\n  api_keys:\n".to_owned();
            for (name, scopes) in callers {
                let (key, lines) = new_key(name, scopes);
                text += &lines;
                fs::write(folder.join(name), &key).unwrap();
            }
            fs::write(&configuration, text).unwrap();
        }
        for (name, _) in callers {
            keys.insert(
                (*name).to_owned(),
                fs::read_to_string(folder.join(name)).unwrap(),
            );
        }
        let mut command = program();
        command
            .env("CELLBLOCK_CONFIG", configuration)
            .env("XDG_RUNTIME_DIR", folder)
            .envs(variables.iter().copied());
        command.args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--environment",
            "minimal",
            "--keep-sessions",
        ]);
        command
            .arg(if keep_sessions { "on" } else { "off" })
            .args(more);
        // Whoever runs as root shares a runtime folder with all others.
        command.args(["--keeper", &keeper_name(folder)]);
        let mut service = Service::run(command);
        service.keys = keys;
        service
    }

    fn run(mut command: Command) -> Service {
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program can be run");
        let (sender, told) = sync_channel(8);
        let log = Errors::heard(child.stderr.take().expect("it is a pipe"), move |line| {
            if NEWS.iter().any(|news| line.contains(news)) {
                // Nobody waits for more than a few.
                let _ = sender.try_send(line.to_owned());
            }
        });
        let line = told.recv_timeout(PATIENCE).unwrap_or_default();
        let address = line
            .split("http://")
            .nth(1)
            .and_then(|rest| rest.split('/').next()?.parse().ok());
        match address {
            Some(address) => Service {
                child,
                address,
                token: String::new(),
                keys: HashMap::new(),
                told,
                log: Some(log),
            },
            None => {
                let _ = child.kill();
                panic!("the service did not say where it is: {}", log.last(true))
            }
        }
    }

    /// Tells the service to read its settings again, and waits for what it says about them.
    pub(crate) fn read_again(&self) -> String {
        let _ = kill_process(Pid::from_child(&self.child), Signal::HUP);
        self.told
            .recv_timeout(PATIENCE)
            .expect("it says what came of it")
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// The key of a caller.
    pub(crate) fn key(&self, name: &str) -> &str {
        &self.keys[name]
    }

    /// Ends the server as the kernel does when memory is short, and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started by us");
        // What it kept may hold its log open; nobody reads that any more.
        self.log = None;
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    /// The server's own memory, as the kernel counts it.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))
            .expect("the server runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("a process has memory");
        line.split_whitespace()
            .next()
            .and_then(|number| number.parse::<u64>().ok())
            .expect("it is a number")
            * 1024
    }

    /// The descriptors that the server has open.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .expect("the server runs")
            .count()
    }

    /// Asks the service to end, waits, and returns what it wrote to its log.
    pub(crate) fn finish(mut self) -> String {
        self.ask_to_end();
        assert!(
            self.child.wait().expect("it was started by us").success(),
            "a service that is asked to end ends well"
        );
        self.log.take().expect("it is taken once").all()
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

/// The name of the keeper of a test's services.
pub(crate) fn keeper_name(folder: &Path) -> String {
    let name = folder
        .file_name()
        .expect("a folder has a name")
        .to_string_lossy()
        .into_owned();
    name.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// Ends the keeper of a test's services, if it has not ended by itself: one without sessions does.
pub(crate) fn stop_keeper_of(folder: &Path) {
    let mut stop = program();
    stop.env("XDG_RUNTIME_DIR", folder)
        .args(["keeper", "stop", "--now", &keeper_name(folder)]);
    let (ended, _, errors) = finished(&mut stop);
    assert!(
        ended == Some(0) || errors.contains("there is no keeper"),
        "{ended:?}: {errors}"
    );
}

/// Returns a new key and the lines about it for the configuration file.
fn new_key(name: &str, scopes: &[&str]) -> (String, String) {
    let mut command = program();
    command.args(["key", "new", name]);
    for scope in scopes {
        command.args(["--scope", scope]);
    }
    let (status, text, errors) = finished(&mut command);
    assert_eq!(status, Some(0), "{errors}");
    let key = text
        .lines()
        .find(|line| line.starts_with("cellblock_"))
        .expect("the key is shown")
        .to_owned();
    let lines = text
        .split_once("api_keys:\n")
        .expect("and the lines about it")
        .1
        .to_owned();
    (key, lines)
}
