//! What Cellblock is compared with: the same interpreter without a sandbox, and ipybox where it is installed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use cellblock::config::{self, Flags};
use cellblock::environment;
use tempfile::TempDir;

/// The interpreter and the packages of the sandboxes, on the host.
pub(crate) struct PlainPython {
    folder: TempDir,
}

impl PlainPython {
    /// Makes a virtual environment around the packages of the environment that sandboxes use. Its links are for this side of the wall.
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
        let home = built.record.executable.parent().context("an interpreter without a folder")?;
        fs::write(folder.path().join("pyvenv.cfg"), format!("home = {}\n", home.display()))?;
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
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
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
        Some(Ipybox { program, workspace: tempfile::tempdir().ok()? }).filter(|found| found.program.is_file())
    }

    /// Returns the command that starts its server.
    pub(crate) fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.program);
        command.arg("--workspace").arg(self.workspace.path());
        Ok(command)
    }
}
