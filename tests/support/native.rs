//! Native sandboxes made inside the test process.
//!
//! All tests share one runtime, because the tasks of a backend end with the runtime that started them, and most share one backend, `shared`.
//! A test that weakens, fills or breaks a backend makes its own with `Builder`.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock::app::{Warmth, prepare_environment};
use cellblock::environment::{self, EnvironmentSpec};
use cellblock::sandbox::native::{NativeBackend, NativeSettings};
use cellblock::sandbox::{Backend, LaunchError, Preparation, SandboxLimits};
use cellblock::session::{
    ExecuteRequest, InsidePath, Outcome, Part, Principal, Refused, SessionId, SessionSettings, Sessions, Status, Stream,
};
use cellblock_jail::wire::{Bind, LeftOut, OperatorMount};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The limits of `shared`: enough for every test that is not about limits.
pub(crate) const ROOMY: SandboxLimits =
    SandboxLimits { memory: 512 << 20, cpus: 2.0, processes: 64, disk: 64 << 20, files: 4_000 };

/// Runs a test on the runtime that all tests share.
pub(crate) fn run<F: Future>(test: F) -> F::Output {
    runtime().block_on(test)
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime starts")
    })
}

/// The backend that most tests share, with the environment `default`.
pub(crate) fn shared() -> &'static Native {
    static SHARED: OnceLock<Native> = OnceLock::new();
    SHARED.get_or_init(|| Builder::new("default").start())
}

/// The first part of making a backend: what it should be like.
pub(crate) struct Builder {
    environment: &'static str,
    settings: NativeSettings,
    binds: Vec<Bind>,
    runner: Option<PathBuf>,
}

impl Builder {
    /// A backend like `shared`, with the environment of this name.
    pub(crate) fn new(environment: &'static str) -> Builder {
        Builder {
            environment,
            settings: NativeSettings {
                guardian: PathBuf::from(super::PROGRAM),
                runtime_dir: runtime_folder(),
                limits: ROOMY,
                mounts: Vec::new(),
                variables: vec![("GIVEN".to_owned(), "by the operator".to_owned())],
                allow_missing: BTreeSet::new(),
                pool: 0,
                empty: 0,
                leave_out: Vec::new(),
            },
            binds: Vec::new(),
            runner: None,
        }
    }

    /// Shows another folder in the place of the runner.
    pub(crate) fn runner(mut self, folder: &Path) -> Builder {
        self.runner = Some(folder.to_owned());
        self
    }

    pub(crate) fn limits(mut self, limits: SandboxLimits) -> Builder {
        self.settings.limits = limits;
        self
    }

    pub(crate) fn leave_out(mut self, layers: &[LeftOut]) -> Builder {
        self.settings.leave_out = layers.to_vec();
        self
    }

    pub(crate) fn pool(mut self, members: usize) -> Builder {
        self.settings.pool = members;
        self
    }

    pub(crate) fn mount(mut self, mount: OperatorMount) -> Builder {
        self.settings.mounts.push(mount);
        self
    }

    /// Shows a host folder inside in the way the environment is shown: read-only.
    pub(crate) fn bind(mut self, bind: Bind) -> Builder {
        self.binds.push(bind);
        self
    }

    /// Starts it. Sessions wait until it is ready.
    pub(crate) fn start(self) -> Native {
        let working = Preparation::Working { step: "preparing".to_owned(), done: 0, total: None };
        let preparation = watch::Sender::new(working);
        let (spec, binds, runner) = (spec(self.environment), self.binds, self.runner);
        let told = preparation.clone();
        let warm = async move {
            let mut warm = prepare_environment(spec, super::data_folder(), Warmth::Full, told).await?;
            warm.binds.extend(binds);
            for bind in &mut warm.binds {
                if let (true, Some(runner)) = (bind.inside == Path::new(environment::RUNNER_INSIDE), &runner) {
                    bind.host = runner.clone();
                }
            }
            Ok(warm)
        };
        let settings = self.settings;
        // Also outside of an async test the backend's tasks find the runtime.
        let _entered = runtime().enter();
        let backend: Arc<dyn Backend> = Arc::new(NativeBackend::start(settings, preparation, warm));
        let many = SessionSettings { max_sessions: 500, ..SessionSettings::default() };
        Native { sessions: Sessions::new(Arc::clone(&backend), many), backend }
    }
}

/// Runtime files of this test process; a start-up sweep of one backend must see the locks of the others, so they share a folder.
fn runtime_folder() -> PathBuf {
    // Below the data folder, but one per user: the folder is private.
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("runtime-{}", rustix::process::geteuid().as_raw()))
}

fn spec(name: &str) -> EnvironmentSpec {
    EnvironmentSpec::built_in().into_iter().find(|spec| spec.name.as_str() == name).expect("a built-in environment")
}

/// Builds the environment of this name if need be, and returns the interpreter it is made from: Python outside of any sandbox.
pub(crate) fn host_python(name: &str) -> PathBuf {
    let spec = spec(name);
    // A thread of its own, because the caller may already be inside the runtime.
    let built = std::thread::spawn(move || {
        run(async move { environment::ensure(&spec, &super::data_folder(), &|_| {}).await })
    });
    built.join().expect("the builder does not panic").expect("the environment can be built").base_executable
}

/// A backend with its sessions.
pub(crate) struct Native {
    pub(crate) sessions: Sessions,
    pub(crate) backend: Arc<dyn Backend>,
}

impl Native {
    /// A new session.
    pub(crate) fn session(&self) -> Session {
        Session::new(&self.sessions)
    }

    /// Waits for the end of the preparation and returns why it failed, if it did.
    pub(crate) async fn failure(&self) -> Option<String> {
        match self.backend.launch().await {
            Ok((mut sandbox, _)) => {
                sandbox.destroy().await;
                None
            }
            Err(LaunchError::Preparation { why }) => Some(why),
            Err(other) => Some(other.to_string()),
        }
    }

    /// Ends the backend and everything it made.
    pub(crate) async fn end(&self) {
        self.sessions.shut_down().await;
    }
}

/// One session of a test. It is closed when the last copy of the value is dropped.
#[derive(Clone)]
pub(crate) struct Session {
    sessions: Sessions,
    pub(crate) id: SessionId,
    _closed_at_the_end: Arc<Closer>,
}

struct Closer {
    sessions: Sessions,
    id: SessionId,
}

impl Drop for Closer {
    fn drop(&mut self) {
        let (sessions, id) = (self.sessions.clone(), self.id.clone());
        runtime().spawn(async move { sessions.close(&Principal::local(), &id).await });
    }
}

impl Session {
    /// A session of a name that no other test uses, not started yet.
    pub(crate) fn new(sessions: &Sessions) -> Session {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = SessionId::from_str(&format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed))).expect("a plain name");
        let closer = Closer { sessions: sessions.clone(), id: id.clone() };
        Session { sessions: sessions.clone(), id, _closed_at_the_end: Arc::new(closer) }
    }

    /// Runs code and returns what came of it.
    pub(crate) async fn execute(&self, code: &str) -> Result<Outcome, Refused> {
        self.execute_with(code, Duration::from_secs(60), CancellationToken::new()).await
    }

    pub(crate) async fn execute_with(
        &self,
        code: &str,
        timeout: Duration,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        let request = ExecuteRequest { code: code.to_owned(), timeout, max_output_chars: 10_000_000 };
        self.sessions.execute(&Principal::local(), &self.id, request, cancel).await
    }

    /// Runs code that must end well, and returns what it printed.
    pub(crate) async fn ok(&self, code: &str) -> String {
        let outcome = self.execute(code).await.unwrap_or_else(|refused| panic!("refused: {refused}\n{code}"));
        assert_eq!(outcome.status, Status::Completed, "{}\n{code}", everything(&outcome));
        printed(&outcome)
    }

    /// Runs an expression and reads its value as JSON.
    pub(crate) async fn json(&self, code: &str) -> serde_json::Value {
        let text = self.ok(code).await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("no JSON ({error}): {text}"))
    }

    pub(crate) async fn reset(&self) {
        self.sessions.reset(&Principal::local(), &self.id).await.expect("a reset works");
    }

    pub(crate) async fn upload(&self, path: &str, bytes: &[u8]) -> Result<u64, Refused> {
        self.sessions.write_file(&Principal::local(), &self.id, &inside(path), &mut &bytes[..], true).await
    }

    pub(crate) async fn download(&self, path: &str, limit: u64) -> Result<Vec<u8>, Refused> {
        let mut bytes = Vec::new();
        self.sessions.read_file(&Principal::local(), &self.id, &inside(path), limit, &mut bytes).await?;
        Ok(bytes)
    }

    pub(crate) async fn close(&self) {
        // Closing twice is harmless.
        let _ = self.sessions.close(&Principal::local(), &self.id).await;
    }

    /// The interpreter's number on the host, found through the kernel: a word that only this session has in its memory would be a claim,
    /// so the session is asked for its namespaces, and the host looks for the process that has them.
    pub(crate) async fn host_pid(&self) -> u32 {
        let namespace = self.ok("import os; print(os.readlink('/proc/self/ns/pid'), os.getpid())").await;
        let (namespace, inner) = namespace.trim().split_once(' ').expect("two words");
        let inner: u32 = inner.parse().expect("a number");
        processes()
            .into_iter()
            .find(|process| {
                process.inner == Some(inner)
                    && std::fs::read_link(format!("/proc/{}/ns/pid", process.pid))
                        .is_ok_and(|found| found.to_string_lossy() == namespace)
            })
            .expect("the interpreter is a process of the host")
            .pid
    }
}

pub(crate) fn inside(path: &str) -> InsidePath {
    InsidePath::from_str(path).expect("a path below the working folder")
}

/// What the code printed and returned, without tracebacks.
pub(crate) fn printed(outcome: &Outcome) -> String {
    text_of(outcome, |stream| stream != Stream::Traceback)
}

/// All text of an outcome.
pub(crate) fn everything(outcome: &Outcome) -> String {
    text_of(outcome, |_| true)
}

fn text_of(outcome: &Outcome, wanted: impl Fn(Stream) -> bool) -> String {
    let texts = outcome.output.parts.iter().filter_map(|part| match part {
        Part::Text { stream, text } if wanted(*stream) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}

/// Runs code with the Python of the host, outside of any sandbox: the control of a refusal.
pub(crate) fn outside(code: &str) -> String {
    let output =
        Command::new(host_python("minimal")).args(["-I", "-c", code]).output().expect("the host's Python runs");
    assert!(output.status.success(), "{}\n{code}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Paths of the host that exist as long as a session's interpreter and its limits do.
pub(crate) fn traces_of(pid: u32) -> Vec<PathBuf> {
    let mut traces = vec![PathBuf::from(format!("/proc/{pid}"))];
    traces.extend(control_groups(pid));
    traces
}

/// The folders of the control groups that were made for a process.
pub(crate) fn control_groups(pid: u32) -> Vec<PathBuf> {
    let membership = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("the process lives");
    let mut folders = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        if !path.contains("/cellblock-") {
            continue;
        }
        let mut places = controllers.split(',').map(|controller| format!("/sys/fs/cgroup/{controller}{path}"));
        folders.extend(places.find(|place| PathBuf::from(place).exists()).map(PathBuf::from));
    }
    folders
}

/// A process of the host.
#[derive(Debug)]
pub(crate) struct HostProcess {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// Its number in the innermost pid namespace.
    pub(crate) inner: Option<u32>,
    /// How many pid namespaces deep it is.
    pub(crate) depth: usize,
}

impl HostProcess {
    /// Whether it is a warm interpreter: Python in the warden's own pid namespace.
    pub(crate) fn is_zygote(&self) -> bool {
        self.depth == own_depth() + 1 && self.name != "cb-warden"
    }
}

/// How many pid namespaces deep this test process is.
pub(crate) fn own_depth() -> usize {
    let own = std::process::id();
    processes().into_iter().find(|process| process.pid == own).expect("this process lives").depth
}

/// The processes that see a folder: all of one backend's, when the folder was bound into its sandboxes.
pub(crate) fn marked_processes(folder: &Path) -> Vec<HostProcess> {
    let name = folder.file_name().expect("a folder with a name").to_string_lossy().into_owned();
    let sees = |process: &HostProcess| {
        std::fs::read_to_string(format!("/proc/{}/mountinfo", process.pid)).is_ok_and(|mounts| mounts.contains(&name))
    };
    processes().into_iter().filter(sees).collect()
}

/// Every process the host can see now.
pub(crate) fn processes() -> Vec<HostProcess> {
    let numbers = std::fs::read_dir("/proc").expect("/proc is readable").flatten();
    numbers
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let field =
                |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
            Some(HostProcess {
                pid,
                name: field("Name")?.to_owned(),
                depth: field("NSpid").map_or(1, |numbers| numbers.split_whitespace().count()),
                inner: field("NSpid").and_then(|numbers| numbers.split_whitespace().last()?.parse().ok()),
            })
        })
        .collect()
}
