//! The server under test: `cellblock serve` as it is by default, with a daemon, undo, an audit log
//! and some callers.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::server::cellblock;
use crate::serving::{self, Key, new_key};

/// How long a call waits for its cell, so that short cells go on after their calls.
const MAX_WAIT: &str = "1s";
/// Little, so that using all of it does not take long.
const MEMORY: &str = "256M";
/// Enough for a session and forks of forks of it.
const FAMILY_MEMORY: &str = "4G";

pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) keys: Vec<String>,
    folder: TempDir,
    daemon: String,
}

impl Service {
    /// Starts a server for so many callers.
    pub(crate) fn start(callers: usize) -> anyhow::Result<Service> {
        let folder = tempfile::tempdir()?;
        for name in ["audit", "runtime", "temporary"] {
            let folder = folder.path().join(name);
            fs::create_dir(&folder)?;
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        }
        // One session must be able to write more records in an hour than it usually may.
        let mut settings = String::from("audit_records: 100000000\nauth:\n  api_keys:\n");
        let mut keys = Vec::new();
        for number in 0..callers {
            let Key { key, lines } = new_key(
                &format!("c{number}"),
                &["python:execute", "packages:install"],
            )?;
            settings += &lines;
            keys.push(key);
        }
        fs::write(folder.path().join("config.yaml"), settings)?;
        let daemon = format!("soak-{}", std::process::id());
        let mut command = in_folder(cellblock("serve"), folder.path());
        command.args(["--environment", "minimal", "--daemon-name", &daemon]);
        command.args([
            "--max-wait",
            MAX_WAIT,
            "--memory",
            MEMORY,
            "--family-memory",
            FAMILY_MEMORY,
            "--config",
        ]);
        command
            .arg(folder.path().join("config.yaml"))
            .arg("--audit-file")
            .arg(folder.path().join("audit/audit.jsonl"));
        let (child, address, log) = serving::start(command)?;
        std::thread::spawn(move || {
            // A call that its client has given up is an error to the MCP library.
            let is_known =
                |line: &str| line.contains("failed to send pending response during drain");
            for line in log.map_while(Result::ok).filter(|line| !is_known(line)) {
                if line.contains(" WARN ") || line.contains(" ERROR ") {
                    println!("log: {line}");
                }
            }
        });
        Ok(Service {
            child,
            address,
            keys,
            folder,
            daemon,
        })
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// Where all its files are.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process that keeps the sessions.
    pub(crate) fn daemon(&self) -> anyhow::Result<u32> {
        let output = in_folder(cellblock("daemon"), self.folder.path())
            .args(["status", "--json"])
            .output()?;
        let daemons: Vec<Value> = serde_json::from_slice(&output.stdout)?;
        let own = daemons
            .iter()
            .find(|daemon| daemon["name"] == self.daemon.as_str())
            .context("no daemon")?;
        Ok(own["process"]
            .as_u64()
            .context("a daemon is a process")?
            .try_into()?)
    }

    /// Verifies the chain of the audit log with the program's own command; returns what it says.
    pub(crate) fn verify_audit(&self) -> anyhow::Result<String> {
        let mut files: Vec<_> = fs::read_dir(self.folder.path().join("audit"))?
            .flatten()
            .map(|file| file.path())
            .collect();
        files.retain(|file| file.to_string_lossy().contains("audit.jsonl"));
        let output = cellblock("audit").arg("verify").args(files).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{text}");
        Ok(text.trim().to_owned())
    }

    /// Asks the server to end and waits until it has.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    /// Files of the server in its folders for temporary files, sockets and locks.
    pub(crate) fn files(&self) -> Vec<String> {
        fn below(folder: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                match entry.file_type() {
                    Ok(kind) if kind.is_dir() => below(&entry.path(), found),
                    _ => found.push(entry.path().display().to_string()),
                }
            }
        }
        let mut found = Vec::new();
        for name in ["temporary", "runtime"] {
            below(&self.folder.path().join(name), &mut found);
        }
        found
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
        let _ = in_folder(cellblock("daemon"), self.folder.path())
            .args(["stop", "--now", &self.daemon])
            .output();
    }
}

/// Gives a command folders of its own for temporary files, sockets and locks.
fn in_folder(mut command: Command, folder: &Path) -> Command {
    command
        .env("TMPDIR", folder.join("temporary"))
        .env("XDG_RUNTIME_DIR", folder.join("runtime"));
    command
}
