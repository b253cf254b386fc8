//! `cellblock serve` as its operators start it: a process, an address, a token in a file.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::server::{Errors, MINIMAL, TEST_TIMEOUT, finished, program};
use super::{ends_within, is_root};

/// What is waited for in the log.
const NEWS: [&str; 4] = [
    "serving MCP over HTTP",
    "development mode, with a token",
    "the settings were",
    "the approvals were not",
];

/// Flags of a service whose sessions live inside it and end with it.
pub(crate) const SESSIONS_INSIDE: &[&str] = &["--keep-sessions", "off"];

/// Flags of a server whose sessions outlive it, for the commands of which that is not the default.
pub(crate) const SESSIONS_KEPT: &[&str] = &["--keep-sessions", "on"];

/// A running service with its own session daemon, which is the default. Dropping it asks it to end,
/// waits, and stops its daemon.
pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    /// Lets its bearer do everything.
    pub(crate) token: String,
    keys: HashMap<String, String>,
    told: Receiver<String>,
    log: Option<Errors>,
    /// Declared last: it is dropped after the server has ended.
    daemon: Option<SessionDaemon>,
}

/// The session daemon of a service. Dropping it ends the process with all its sessions.
#[must_use = "dropping it ends the sessions"]
pub(crate) struct SessionDaemon {
    name: String,
    /// Another runtime folder than that of whoever runs the tests.
    runtime_folder: Option<PathBuf>,
}

impl SessionDaemon {
    /// Returns the daemon that services below a folder share, one after the other.
    fn of(folder: &Path) -> SessionDaemon {
        let name = folder.file_name().expect("a folder has a name");
        let name = name.to_string_lossy();
        SessionDaemon {
            // Root shares one runtime folder among all tests, so the name must differ too.
            name: name.chars().filter(char::is_ascii_alphanumeric).collect(),
            runtime_folder: Some(folder.to_owned()),
        }
    }

    pub(crate) fn new() -> SessionDaemon {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        SessionDaemon {
            name: format!("s{}-{number}", std::process::id()),
            runtime_folder: None,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> PathBuf {
        let folder = match &self.runtime_folder {
            Some(folder) if !is_root() => folder.join("cellblock"),
            _ => runtime_folder(),
        };
        // The folder has the name that earlier versions gave it.
        folder.join("keeper").join(format!("{}.socket", self.name))
    }

    fn command(&self) -> Command {
        let mut command = program();
        if let Some(folder) = &self.runtime_folder {
            command.env("XDG_RUNTIME_DIR", folder);
        }
        command
    }
}

impl Drop for SessionDaemon {
    fn drop(&mut self) {
        let Ok(connection) = UnixStream::connect(self.socket()) else {
            // One that was killed leaves its socket, one that ended by itself nothing.
            let _ = fs::remove_file(self.socket());
            return;
        };
        let process = listener(&connection);
        // It would wait for what is said on it.
        drop(connection);
        let Ok(handle) = pidfd_open(process, PidfdFlags::empty()) else {
            return;
        };
        // A test that failed may have stopped it.
        for signal in [Signal::TERM, Signal::CONT] {
            let _ = pidfd_send_signal(&handle, signal);
        }
        let has_ended = ends_within(&handle, TEST_TIMEOUT);
        assert!(
            has_ended || std::thread::panicking(),
            "the session daemon {} lives on",
            self.name
        );
    }
}

/// The process that accepts connections at the other end.
fn listener(connection: &UnixStream) -> Pid {
    let peer = socket_peercred(connection).expect("the kernel knows who listens");
    peer.pid
}

impl Service {
    /// Starts a service on a free port of this machine, in development mode.
    pub(crate) fn start(more: &[&str]) -> Service {
        let mut service = Service::run(SessionDaemon::new(), more, |_| ());
        let file = service.told.recv_timeout(TEST_TIMEOUT).ok();
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
        Service::run(SessionDaemon::new(), more, |command| {
            command.env("CELLBLOCK_AUTH", "off");
        })
    }

    /// Starts a service whose callers have keys, one for each name with the scopes beside it.
    /// `folder` holds its configuration.
    pub(crate) fn with_keys(folder: &Path, callers: &[(&str, &[&str])], more: &[&str]) -> Service {
        Service::with_keys_and(folder, callers, more, &[])
    }

    /// The same, with variables.
    pub(crate) fn with_keys_and(
        folder: &Path,
        callers: &[(&str, &[&str])],
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
        let more = [MINIMAL, more].concat();
        let mut service = Service::run(SessionDaemon::of(folder), &more, |command| {
            command
                .env("CELLBLOCK_CONFIG", configuration)
                .envs(variables.iter().copied());
        });
        service.keys = keys;
        service
    }

    fn run(daemon: SessionDaemon, more: &[&str], prepare: impl FnOnce(&mut Command)) -> Service {
        let mut command = daemon.command();
        command
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--daemon-name",
                &daemon.name,
            ])
            .args(more);
        prepare(&mut command);
        let is_kept = !more.windows(2).any(|flags| flags == SESSIONS_INSIDE);
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
        let line = told.recv_timeout(TEST_TIMEOUT).unwrap_or_default();
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
                daemon: is_kept.then_some(daemon),
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
            .recv_timeout(TEST_TIMEOUT)
            .expect("it says what came of it")
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// The process of the daemon.
    pub(crate) fn daemon_process(&self) -> u32 {
        let daemon = self.daemon.as_ref().expect("sessions are kept");
        let connection = UnixStream::connect(daemon.socket()).expect("there is a daemon");
        listener(&connection).as_raw_nonzero().get() as u32
    }

    /// The key of a caller.
    pub(crate) fn key(&self, name: &str) -> &str {
        &self.keys[name]
    }

    /// Ends the server as the kernel does when memory is short, and waits until it is gone. Its
    /// sessions live on as long as what is returned.
    pub(crate) fn kill(mut self) -> SessionDaemon {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started by us");
        // The daemon may hold its log open; nobody reads that any more.
        self.log = None;
        self.daemon.take().expect("sessions are kept")
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

    /// The descriptors that the server has open, and those of its daemon.
    pub(crate) fn descriptors(&self) -> [usize; 2] {
        [self.process_id(), self.daemon_process()].map(|process| {
            let open = fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
            open.count()
        })
    }

    /// Asks the service to end, waits, ends its daemon, and returns what both wrote to the log.
    pub(crate) fn finish(mut self) -> String {
        self.ask_to_end();
        assert!(
            self.child.wait().expect("it was started by us").success(),
            "a service that is asked to end ends well"
        );
        // The daemon that it started writes to the same log.
        drop(self.daemon.take());
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

/// Where servers of this user have what they need while they run.
pub(crate) fn runtime_folder() -> PathBuf {
    match is_root() {
        true => PathBuf::from("/run/cellblock"),
        false => std::env::var_os("XDG_RUNTIME_DIR").map_or_else(
            || {
                PathBuf::from(format!(
                    "/tmp/cellblock-{}",
                    rustix::process::geteuid().as_raw()
                ))
            },
            |folder| Path::new(&folder).join("cellblock"),
        ),
    }
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
