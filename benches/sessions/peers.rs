//! What Cellblock is compared with: the same interpreter without a sandbox, and ipybox and
//! python-docker-mcp where they are installed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use cellblock::config::{self, Flags};
use cellblock::environment;
use tempfile::TempDir;

use crate::containers::POOL;

/// What the image of python-docker-mcp is called.
const PEER_IMAGE: &str = "cellblock-bench-peer";
/// The tag that it uses, and the one that it looks for first: without that it builds an image of
/// its own.
const PEER_TAGS: [&str; 2] = ["latest", "0.2.3"];

/// The interpreter and the packages of the sandboxes, on the host.
pub(crate) struct PlainPython {
    folder: TempDir,
}

impl PlainPython {
    /// Makes a virtual environment around the packages of the environment that sandboxes use. Its
    /// links are for this side of the wall.
    pub(crate) fn of_the_environment() -> anyhow::Result<PlainPython> {
        let settings = config::load(None, Flags::default())?;
        let built = environment::list(&settings.data_dir)
            .into_iter()
            .find(|built| built.record.name == settings.environment)
            .context("no environment was built")?;
        let version: Vec<&str> = built.record.python_version.split('.').take(2).collect();
        let packages = format!("lib/python{}/site-packages", version.join("."));
        let folder = tempfile::tempdir()?;
        let make = |path: &str, target: &Path| -> anyhow::Result<()> {
            let place = folder.path().join(path);
            fs::create_dir_all(place.parent().context("a path without a folder")?)?;
            Ok(symlink(target, place)?)
        };
        let home = built
            .record
            .executable
            .parent()
            .context("an interpreter without a folder")?;
        fs::write(
            folder.path().join("pyvenv.cfg"),
            format!("home = {}\n", home.display()),
        )?;
        make("bin/python", &built.record.executable)?;
        make(&packages, &built.directory.join("tree").join(&packages))?;
        Ok(PlainPython { folder })
    }

    /// Returns the interpreter.
    pub(crate) fn program(&self) -> PathBuf {
        self.folder.path().join("bin/python")
    }

    /// Runs one line in a new process; returns the time it took.
    pub(crate) fn run(&self, code: &str) -> anyhow::Result<Duration> {
        crate::timed(Command::new(self.program()).args(["-c", code]))
    }
}

impl PlainPython {
    /// Runs a program in a new process; returns what it printed.
    pub(crate) fn output(&self, code: &str) -> anyhow::Result<String> {
        let output = Command::new(self.program()).args(["-c", code]).output()?;
        anyhow::ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }
}

/// An installation of ipybox.
pub(crate) struct Ipybox {
    program: PathBuf,
    workspace: TempDir,
}

impl Ipybox {
    /// Looks beside the Python that `IPYBOX_PYTHON` names.
    pub(crate) fn find() -> Option<Ipybox> {
        let python = PathBuf::from(std::env::var_os("IPYBOX_PYTHON")?);
        let program = std::path::absolute(python).ok()?.parent()?.join("ipybox");
        Some(Ipybox {
            program,
            workspace: tempfile::tempdir().ok()?,
        })
        .filter(|found| found.program.is_file())
    }

    /// Returns the command that starts its server.
    pub(crate) fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.program);
        command.arg("--workspace").arg(self.workspace.path());
        Ok(command)
    }
}

/// An installation of python-docker-mcp.
pub(crate) struct PythonDockerMcp {
    program: PathBuf,
    home: TempDir,
}

impl PythonDockerMcp {
    /// Looks beside the Python that `PYTHON_DOCKER_MCP_PYTHON` names.
    pub(crate) fn find() -> Option<PythonDockerMcp> {
        let python = PathBuf::from(std::env::var_os("PYTHON_DOCKER_MCP_PYTHON")?);
        let program = std::path::absolute(python)
            .ok()?
            .parent()?
            .join("python-docker-mcp");
        Some(PythonDockerMcp {
            program,
            home: tempfile::tempdir().ok()?,
        })
        .filter(|found| found.program.is_file())
    }

    /// Makes an image of another that this server can use, with `python` and a folder `/app`, and
    /// returns its name.
    pub(crate) fn image(&self, base: &str) -> anyhow::Result<String> {
        let docker = |arguments: &[&str]| {
            let output = Command::new("docker").args(arguments).output()?;
            anyhow::ensure!(
                output.status.success(),
                "docker: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            Ok(String::from_utf8(output.stdout)?.trim().to_owned())
        };
        let change = "command -v python || ln -s \"$(command -v python3)\" /usr/bin/python; mkdir \
                      -p /app && chmod 777 /app";
        let made = docker(&[
            "create",
            "--network",
            "none",
            "--user",
            "0",
            base,
            "sh",
            "-c",
            change,
        ])?;
        docker(&["start", "--attach", &made])?;
        let [name, first] = PEER_TAGS.map(|tag| format!("{PEER_IMAGE}:{tag}"));
        docker(&[
            "commit",
            "--change",
            "USER 1000",
            "--change",
            "WORKDIR /app",
            "--change",
            "ENTRYPOINT []",
            &made,
            &name,
        ])?;
        docker(&["tag", &name, &first])?;
        docker(&["rm", &made])?;
        Ok(name)
    }

    /// Returns the command that starts its server.
    pub(crate) fn command(&self, image: &str) -> anyhow::Result<Command> {
        let file = self.home.path().join("config.yaml");
        let settings =
            format!("docker: {{image: '{image}', network_disabled: true, pool_size: {POOL}}}\n");
        fs::write(&file, settings)?;
        let mut command = Command::new(&self.program);
        command
            .env("HOME", self.home.path())
            .env("PYTHON_DOCKER_MCP_CONFIG", file);
        Ok(command)
    }
}

impl Drop for PythonDockerMcp {
    /// Removes the containers that it leaves behind, and its image.
    fn drop(&mut self) {
        let docker = |arguments: &[&str]| Command::new("docker").args(arguments).output();
        let [latest, first] = PEER_TAGS.map(|tag| format!("{PEER_IMAGE}:{tag}"));
        let left = docker(&[
            "ps",
            "--all",
            "--quiet",
            "--filter",
            &format!("ancestor={latest}"),
        ]);
        let left = left
            .map(|left| String::from_utf8_lossy(&left.stdout).into_owned())
            .unwrap_or_default();
        for container in left.lines() {
            let _ = docker(&["rm", "--force", container]);
        }
        let _ = docker(&["image", "rm", &latest, &first]);
    }
}
