//! Containers made inside the test process, by an engine that `tests/support/engine` starts.
//!
//! A machine on which that cannot be done skips the tests, aloud.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock::app::OwnSupplies;
use cellblock::sandbox::container::{
    ContainerBackend, ContainerBind, ContainerNetwork, ContainerSettings, EngineAddress,
    EngineKind, PoolSettings,
};
use cellblock::sandbox::{Backend, Preparation, SandboxLimits, SandboxNetwork};
use cellblock::session::{Approvals, SessionSettings, Sessions};
use cellblock_jail::wire::Programs;
use rustix::fs::FlockOperation;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::native::{ROOMY, Session};

/// The image that the script makes: Debian with Python and without IPython.
pub(crate) const IMAGE: &str = "cellblock-test:python";

/// An archive that holds nothing.
const NOTHING: [u8; 10_240] = [0; 10_240];

/// An engine that runs for the tests.
pub(crate) struct TestEngine {
    pub(crate) kind: EngineKind,
    pub(crate) address: EngineAddress,
    /// Keeps the engine from ending, if others use it too.
    _in_use: Option<File>,
}

/// Returns Docker, or says that the test is skipped.
pub(crate) fn docker() -> Option<&'static TestEngine> {
    static DOCKER: OnceLock<Result<TestEngine, String>> = OnceLock::new();
    found(DOCKER.get_or_init(|| start(EngineKind::Docker, "docker")))
}

/// Returns Podman, or says that the test is skipped.
pub(crate) fn podman() -> Option<&'static TestEngine> {
    static PODMAN: OnceLock<Result<TestEngine, String>> = OnceLock::new();
    found(PODMAN.get_or_init(|| start(EngineKind::Podman, "podman")))
}

fn found(engine: &'static Result<TestEngine, String>) -> Option<&'static TestEngine> {
    engine.as_ref().map_err(|why| super::skipped(why)).ok()
}

/// Where the engines have their data.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine")
}

/// The program that starts them.
pub(crate) fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/engine")
}

/// The files of the image, which are there once an engine was started.
pub(crate) fn archive() -> PathBuf {
    folder().join("python.tar")
}

fn start(kind: EngineKind, word: &str) -> Result<TestEngine, String> {
    std::fs::create_dir_all(folder()).map_err(|error| error.to_string())?;
    let in_use = File::create(folder().join("users")).map_err(|error| error.to_string())?;
    rustix::fs::flock(&in_use, FlockOperation::LockShared).map_err(|error| error.to_string())?;
    let run = Command::new(script())
        .arg(word)
        .arg(folder())
        .output()
        .map_err(|error| format!("bash ({error})"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let Some(socket) = text(&run.stdout)
        .strip_prefix("unix://")
        .map(PathBuf::from)
        .filter(|_| run.status.success())
    else {
        return Err(text(&run.stderr));
    };
    Ok(TestEngine {
        kind,
        address: EngineAddress::Unix(socket),
        _in_use: Some(in_use),
    })
}

impl TestEngine {
    /// An engine that the test itself keeps running.
    pub(crate) fn new(kind: EngineKind, address: EngineAddress) -> TestEngine {
        TestEngine {
            kind,
            address,
            _in_use: None,
        }
    }

    pub(crate) fn is_podman(&self) -> bool {
        self.kind == EngineKind::Podman
    }

    /// Runs the engine's own command line against it: another witness than ours.
    #[track_caller]
    pub(crate) fn command(&self, arguments: &[&str]) -> String {
        self.run(arguments)
            .unwrap_or_else(|errors| panic!("{arguments:?} failed: {errors}"))
    }

    /// The same, for what may be gone by now.
    pub(crate) fn try_command(&self, arguments: &[&str]) -> Option<String> {
        self.run(arguments).ok()
    }

    /// Returns what the command printed, or its errors.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let output = Command::new("docker")
            .arg("-H")
            .arg(self.address.to_string())
            .args(arguments)
            .output();
        let output = output.expect("the engine's command line runs");
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).expect("text"))
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// The runtimes that the engine knows, in one line.
    pub(crate) fn runtimes(&self) -> String {
        self.command(&["info", "--format", "{{.Runtimes}}"])
    }

    /// The identities of all containers that the engine knows.
    pub(crate) fn containers(&self) -> Vec<String> {
        self.command(&["ps", "--all", "--no-trunc", "--quiet"])
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// The running containers that may use exactly so much memory.
    pub(crate) fn containers_with_memory(&self, memory: u64) -> Vec<String> {
        let running = self.command(&["ps", "--no-trunc", "--quiet"]);
        let has = |id: &&str| {
            // It may end while we look.
            let arguments = ["inspect", "--format", "{{.HostConfig.Memory}}", id];
            self.try_command(&arguments)
                .is_some_and(|found| found.trim() == memory.to_string())
        };
        running.lines().filter(has).map(str::to_owned).collect()
    }

    /// Makes an image like that of the tests, in which a script takes the place of Python.
    pub(crate) fn import_with_python(&self, name: &str, script: &str) {
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        std::fs::write(file.path(), script).expect("it can be written to");
        let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(file.path(), everybody).expect("it is ours");
        let container = self.command(&["create", "--network", "none", IMAGE, "true"]);
        let container = container.trim();
        self.command(&[
            "cp",
            &file.path().to_string_lossy(),
            &format!("{container}:/usr/local/bin/python3"),
        ]);
        self.command(&["commit", container, name]);
        self.command(&["rm", container]);
    }

    /// Makes an image of nothing.
    pub(crate) fn import(&self, name: &str) {
        let archive = folder().join("nothing.tar");
        std::fs::write(&archive, NOTHING).expect("the folder can be written to");
        self.command(&["import", &archive.to_string_lossy(), name]);
    }

    /// Makes an image of nothing that says it is for a machine of this kind.
    pub(crate) fn load_for(&self, name: &str, architecture: &str) {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let write = |file: &str, bytes: &[u8]| {
            std::fs::write(folder.path().join(file), bytes).expect("the folder can be written to");
        };
        let digest: String = Sha256::digest(NOTHING)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let layers = json!({"type": "layers", "diff_ids": [format!("sha256:{digest}")]});
        let config =
            json!({"architecture": architecture, "os": "linux", "config": {}, "rootfs": layers});
        let manifest =
            json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
        write("layer.tar", &NOTHING);
        write("config.json", config.to_string().as_bytes());
        write("manifest.json", manifest.to_string().as_bytes());
        let archive = folder.path().join("image.tar");
        let mut tar = Command::new("tar");
        tar.arg("-cf").arg(&archive).arg("-C").arg(folder.path());
        assert!(
            tar.args(["manifest.json", "config.json", "layer.tar"])
                .status()
                .expect("tar runs")
                .success()
        );
        self.command(&["load", "--input", &archive.to_string_lossy()]);
    }

    /// The container that a session is in: the one whose first process has the session's pid
    /// namespace.
    pub(crate) async fn container_of(&self, session: &Session) -> String {
        let namespace = session
            .ok("import os; print(os.readlink('/proc/self/ns/pid'))")
            .await;
        let is_it = |id: &String| {
            let Some(pid) = self.try_command(&["inspect", "--format", "{{.State.Pid}}", id]) else {
                return false;
            };
            let found = std::fs::read_link(format!("/proc/{}/ns/pid", pid.trim()));
            found.is_ok_and(|found| found.to_string_lossy() == namespace.trim())
        };
        self.containers()
            .into_iter()
            .find(is_it)
            .expect("the session is in a container of this engine")
    }

    /// Like `native::shared`: the backend that most tests share.
    pub(crate) fn shared(&'static self) -> &'static Containers {
        static DOCKER: OnceLock<Containers> = OnceLock::new();
        static PODMAN: OnceLock<Containers> = OnceLock::new();
        let place = if self.kind == EngineKind::Docker {
            &DOCKER
        } else {
            &PODMAN
        };
        place.get_or_init(|| self.build().start())
    }

    /// A backend like `shared`, to be changed.
    pub(crate) fn build(&self) -> Builder {
        Builder {
            settings: ContainerSettings {
                masks: Vec::new(),
                kind: self.kind,
                address: self.address.clone(),
                credentials: Vec::new(),
                image: IMAGE.to_owned(),
                runtime: None,
                runtime_dir: super::native::runtime_folder(),
                limits: ROOMY,
                limits_apart: ROOMY,
                binds: Vec::new(),
                variables: vec![("GIVEN".to_owned(), "by the operator".to_owned())],
                pool: PoolSettings {
                    size: 0,
                    max_age: Duration::from_secs(600),
                    creations: 2,
                },
                network: None,
                packages: None,
                programs: Programs::Free,
                preload: Vec::new(),
            },
            sessions: SessionSettings {
                max_sessions: 500,
                ..SessionSettings::default()
            },
        }
    }
}

/// What a backend should be like.
pub(crate) struct Builder {
    pub(crate) settings: ContainerSettings,
    sessions: SessionSettings,
}

impl Builder {
    pub(crate) fn limits(mut self, limits: SandboxLimits) -> Builder {
        self.sessions.memory_limit = Some(limits.memory);
        self.settings.limits = limits;
        self
    }

    pub(crate) fn pool(mut self, size: usize, max_age: Duration) -> Builder {
        self.settings.pool = PoolSettings {
            size,
            max_age,
            creations: 2,
        };
        self
    }

    pub(crate) fn bind(mut self, bind: ContainerBind) -> Builder {
        self.settings.binds.push(bind);
        self
    }

    /// Lets sessions reach what this lists, and shows them these files.
    pub(crate) fn network(mut self, network: SandboxNetwork, files: &[ContainerBind]) -> Builder {
        let program = PathBuf::from(super::PROGRAM);
        self.settings.network = Some(ContainerNetwork {
            network,
            program,
            files: files.to_vec(),
            held: None,
        });
        self
    }

    pub(crate) fn variables(mut self, variables: Vec<(String, String)>) -> Builder {
        self.settings.variables.extend(variables);
        self
    }

    /// Registers the server in another place than all others.
    pub(crate) fn runtime_dir(mut self, folder: &Path) -> Builder {
        self.settings.runtime_dir = folder.to_owned();
        self
    }

    /// Has the kernel refuse programs to sessions, and these approvals decide about those that they
    /// ask for.
    pub(crate) fn refuse_programs(mut self, approvals: Approvals) -> Builder {
        self.settings.programs = Programs::Refused;
        self.approvals(approvals)
    }

    pub(crate) fn approvals(mut self, approvals: Approvals) -> Builder {
        self.sessions.approvals = approvals.into();
        self
    }

    pub(crate) fn image(mut self, image: &str) -> Builder {
        self.settings.image = image.to_owned();
        self
    }

    pub(crate) fn address(mut self, address: EngineAddress) -> Builder {
        self.settings.address = address;
        self
    }

    pub(crate) fn runtime(mut self, runtime: &str) -> Builder {
        self.settings.runtime = Some(runtime.to_owned());
        self
    }

    /// Starts it. Sessions wait until it is ready.
    pub(crate) fn start(self) -> Containers {
        let working = Preparation::Working {
            step: "preparing".to_owned(),
            done: 0,
            total: None,
        };
        let supplies = Arc::new(OwnSupplies {
            data_dir: super::data_folder(),
        });
        // Also outside of an async test the backend's tasks find the runtime.
        let _entered = super::native::runtime().enter();
        let backend = ContainerBackend::start(self.settings, supplies, watch::Sender::new(working));
        let backend = Arc::new(backend.expect("the runtime folder can be used"));
        Containers {
            sessions: Sessions::new(Arc::clone(&backend) as Arc<dyn Backend>, self.sessions),
            backend,
        }
    }
}

/// A backend with its sessions.
pub(crate) struct Containers {
    pub(crate) sessions: Sessions,
    pub(crate) backend: Arc<ContainerBackend>,
}

impl Containers {
    pub(crate) fn session(&self) -> Session {
        Session::new(&self.sessions)
    }

    /// What separates a session, as its results tell: one line per layer.
    pub(crate) async fn isolation(&self) -> String {
        self.session().isolation().await
    }

    /// Ends the backend and everything it made.
    pub(crate) async fn end(&self) {
        self.sessions.shut_down().await;
    }
}
