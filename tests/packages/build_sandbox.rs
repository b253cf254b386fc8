//! A stand-in for the installer's sandbox: a process in a folder of its own. It isolates nothing.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use cellblock::packages::{BuildSandbox, BuildSandboxes, PackageError};
use tokio::process::Command;

/// Makes folders with processes in them, and keeps the folders until it is dropped, so that a test
/// can look around.
pub(crate) struct Plain {
    uv: PathBuf,
    python: PathBuf,
    folders: Arc<Mutex<Vec<Arc<tempfile::TempDir>>>>,
}

struct PlainBuildSandbox {
    uv: PathBuf,
    python: PathBuf,
    folder: Arc<tempfile::TempDir>,
}

impl Plain {
    pub(crate) fn new(uv: &Path, python: &Path) -> Plain {
        Plain {
            uv: uv.to_owned(),
            python: python.to_owned(),
            folders: Arc::default(),
        }
    }

    /// How many were opened so far.
    pub(crate) fn opened(&self) -> usize {
        self.folders.lock().unwrap().len()
    }

    /// Tells whether a file of this name lies directly in or beside a working folder.
    pub(crate) fn left_behind(&self, name: &str) -> bool {
        let folders = self.folders.lock().unwrap();
        folders.iter().any(|folder| {
            [folder.path(), folder.path().parent().unwrap()]
                .iter()
                .any(|place| place.join(name).exists())
        })
    }
}

#[async_trait]
impl BuildSandboxes for Plain {
    async fn open(&self, _: &[String]) -> Result<Box<dyn BuildSandbox>, PackageError> {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        self.folders.lock().unwrap().push(Arc::clone(&folder));
        Ok(Box::new(PlainBuildSandbox {
            uv: self.uv.clone(),
            python: self.python.clone(),
            folder,
        }))
    }
}

#[async_trait]
impl BuildSandbox for PlainBuildSandbox {
    fn uv(&self) -> String {
        self.uv.display().to_string()
    }

    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PackageError> {
        std::fs::write(self.folder.path().join(name), content).map_err(broken)
    }

    async fn run(&mut self, code: &str, time: Duration) -> Result<String, PackageError> {
        std::fs::write(self.folder.path().join("cell.py"), code).map_err(broken)?;
        let running = Command::new(&self.python)
            .args(["-I", "cell.py"])
            .current_dir(self.folder.path())
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .kill_on_drop(true)
            .output();
        let done = tokio::time::timeout(time, running)
            .await
            .map_err(|_| PackageError::TimedOut { time })?;
        let done = done.map_err(broken)?;
        Ok(String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
    }

    async fn take(&mut self, name: &str, limit: u64) -> Result<File, PackageError> {
        let file = File::open(self.folder.path().join(name)).map_err(broken)?;
        if file.metadata().map_err(broken)?.len() > limit {
            return Err(PackageError::TooLarge { limit });
        }
        Ok(file)
    }
}

fn broken(error: std::io::Error) -> PackageError {
    PackageError::BuildSandbox {
        why: error.to_string(),
    }
}
