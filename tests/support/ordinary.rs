//! Somebody who may use an engine and is not root: a member of its group, with the program and a
//! home of their own.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use cellblock::sandbox::container::EngineAddress;

use super::containers::{IMAGE, TestEngine};
use super::server::finished;
use super::{PROGRAM, data_folder};

/// A user and a group that own nothing, and the group of those who may use the engine.
const USER: u32 = 65_534;
const GROUP: u32 = 65_533;

/// An ordinary user of an engine that runs as root, as all engines of tests do.
pub(crate) struct Ordinary {
    home: tempfile::TempDir,
    kind: &'static str,
}

impl Ordinary {
    /// Lets such a user into the engine.
    pub(crate) fn of(engine: &TestEngine) -> Ordinary {
        let EngineAddress::Unix(socket) = &engine.address else {
            panic!("the engine has a socket")
        };
        // The checkout, and the folder of the engine, may lie where such a user cannot go. A socket
        // with another name is the same socket.
        let home = tempfile::Builder::new()
            .prefix("cb-ordinary-")
            .tempdir_in("/tmp")
            .unwrap();
        let ordinary = Ordinary {
            home,
            kind: if engine.is_podman() {
                "podman"
            } else {
                "docker"
            },
        };
        fs::hard_link(socket, ordinary.below("engine.sock")).unwrap();
        chown(ordinary.below("engine.sock"), None, Some(GROUP)).unwrap();
        fs::set_permissions(ordinary.below("engine.sock"), Permissions::from_mode(0o660)).unwrap();
        fs::copy(PROGRAM, ordinary.program()).unwrap();
        // The one that tests share saves a download; without it the program gets its own.
        let _ = fs::copy(data_folder().join("tools/uv"), ordinary.below("uv"));
        for name in ["data", "runtime", "."] {
            let folder = ordinary.below(name);
            fs::create_dir_all(&folder).unwrap();
            chown(&folder, Some(USER), Some(USER)).unwrap();
            fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        }
        ordinary
    }

    fn below(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// The file of the program.
    pub(crate) fn program(&self) -> PathBuf {
        self.below("cellblock")
    }

    /// Runs another program as this user; returns its exit status and what it wrote.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
        finished(
            Command::new(program)
                .args(arguments)
                .stdin(Stdio::null())
                .uid(USER)
                .gid(GROUP),
        )
    }

    /// The program as this user runs it, with sessions in containers of the engine.
    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.program());
        let engine = format!("unix://{}", self.below("engine.sock").display());
        command
            .args([name, "--backend", self.kind, "--container-tag", IMAGE])
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", self.home.path())
            .env("XDG_RUNTIME_DIR", self.below("runtime"))
            .env("CELLBLOCK_DATA_DIR", self.below("data"))
            .envs([("DOCKER_HOST", &engine), ("CONTAINER_HOST", &engine)])
            .current_dir(self.home.path())
            .stdin(Stdio::null())
            .uid(USER)
            .gid(GROUP);
        if self.below("uv").exists() {
            command.env("CELLBLOCK_UV", self.below("uv"));
        }
        command
    }
}
