//! Native sandboxes created inside the test process.
//!
//! All tests share one runtime, because the tasks of a backend end with the runtime that started
//! them, and most share one backend, `shared`. A test that weakens, fills or breaks a backend
//! creates its own with `Builder`.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cellblock::app::{StartMode, prepare_environment};
use cellblock::environment;
use cellblock::sandbox::native::{NativeBackend, NativeSettings, Programs, TestSwitches};
use cellblock::sandbox::{Backend, LaunchError, Preparation, SandboxLimits, SandboxNetwork};
use cellblock::session::{
    Approver, CheckpointInfo, ExecuteRequest, ExploreReport, ExploreRequest, ForkNames, ForkReport,
    InsidePath, Outcome, Part, Principal, ProgressChannel, Refused, ResetReport, SessionId,
    SessionSettings, SessionState, Sessions, Status, Stream, UndoReport,
};
use cellblock_jail::posture::{NAMESPACES, Posture};
use cellblock_jail::wire::{Bind, OmittedLayer, OperatorMount};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The limits of `shared`: enough for every test that is not about limits.
pub(crate) const ROOMY: SandboxLimits = SandboxLimits {
    memory: 512 << 20,
    family_memory: 1 << 30,
    cpus: 2.0,
    processes: 64,
    disk: 64 << 20,
    files: 4_000,
};

/// Runs a test on the runtime that all tests share.
pub(crate) fn run<F: Future>(test: F) -> F::Output {
    runtime().block_on(test)
}

pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .expect("a runtime starts")
    })
}

/// The backend that most tests share, with the environment `default`.
pub(crate) fn shared() -> &'static Native {
    static SHARED: OnceLock<Native> = OnceLock::new();
    SHARED.get_or_init(|| Builder::new("default").start())
}

/// The settings of a backend that is not started yet.
pub(crate) struct Builder {
    environment: &'static str,
    settings: NativeSettings,
    sessions: SessionSettings,
    binds: Vec<Bind>,
    runner: Option<PathBuf>,
    network: Option<SandboxNetwork>,
}

impl Builder {
    /// A backend like `shared`, with this environment.
    pub(crate) fn new(environment: &'static str) -> Builder {
        Builder {
            environment,
            settings: NativeSettings {
                masks: Vec::new(),
                guardian: PathBuf::from(super::PROGRAM),
                runtime_dir: runtime_folder(),
                limits: ROOMY,
                limits_apart: ROOMY,
                mounts: Vec::new(),
                variables: vec![("GIVEN".to_owned(), "by the operator".to_owned())],
                allow_missing: BTreeSet::new(),
                programs: Programs::Free,
                pool: 0,
                empty: 0,
                test_switches: TestSwitches::default(),
            },
            sessions: SessionSettings {
                max_sessions: 500,
                ..SessionSettings::default()
            },
            binds: Vec::new(),
            runner: None,
            network: None,
        }
    }

    /// Changes the session settings of the server.
    pub(crate) fn sessions(mut self, change: impl FnOnce(&mut SessionSettings)) -> Builder {
        change(&mut self.sessions);
        self
    }

    pub(crate) fn limits(mut self, limits: SandboxLimits) -> Builder {
        self.sessions.memory_limit = Some(limits.memory);
        self.settings.limits = limits;
        self
    }

    /// Leaves out one step of the lock-down of every interpreter.
    pub(crate) fn skip_step(mut self, name: &str) -> Builder {
        let skipped = &mut self.settings.test_switches.skipped_steps;
        skipped.push(name.to_owned());
        self
    }

    pub(crate) fn leave_out(mut self, layers: &[OmittedLayer]) -> Builder {
        self.settings.test_switches.layers_left_out = layers.to_vec();
        self
    }

    /// Leaves the mounts writable that are read-only by default.
    pub(crate) fn mounts_writable(mut self, writable: bool) -> Builder {
        self.settings.test_switches.mounts_writable = writable;
        self
    }

    /// Makes the kernel refuse to start programs for the code of sessions.
    pub(crate) fn refuse_programs(mut self) -> Builder {
        self.settings.programs = Programs::Refused;
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

    /// Adds variables to every session.
    pub(crate) fn variables(mut self, variables: Vec<(String, String)>) -> Builder {
        self.settings.variables.extend(variables);
        self
    }

    pub(crate) fn network(mut self, network: SandboxNetwork) -> Builder {
        self.network = Some(network);
        self
    }

    /// Mounts a host folder inside like the environment: read-only.
    pub(crate) fn bind(mut self, bind: Bind) -> Builder {
        self.binds.push(bind);
        self
    }

    /// Starts it. Sessions wait until it is ready.
    pub(crate) fn start(self) -> Native {
        let working = Preparation::Working {
            step: "preparing".to_owned(),
            done: 0,
            total: None,
        };
        let preparation = watch::Sender::new(working);
        let (spec, binds, runner, network) = (
            super::environment_spec(self.environment),
            self.binds,
            self.runner,
            self.network,
        );
        let progress = preparation.clone();
        let warm = move || {
            let (spec, progress) = (spec.clone(), progress.clone());
            let (binds, runner, network) = (binds.clone(), runner.clone(), network.clone());
            async move {
                let mut warm =
                    prepare_environment(spec, super::data_folder(), StartMode::Full, progress)
                        .await?;
                warm.binds.extend(binds);
                warm.network = network;
                for bind in &mut warm.binds {
                    if let (true, Some(runner)) = (
                        bind.inside == Path::new(environment::RUNNER_INSIDE),
                        &runner,
                    ) {
                        bind.host = runner.clone();
                    }
                }
                Ok(warm)
            }
        };
        let (settings, sessions) = (self.settings, self.sessions);
        // The backend's tasks find the runtime also outside of an async test.
        let _entered = runtime().enter();
        let backend: Arc<dyn Backend> = Arc::new(NativeBackend::start(settings, preparation, warm));
        Native {
            sessions: Sessions::new(Arc::clone(&backend), sessions),
            backend,
        }
    }
}

/// Runtime files of this test process; a start-up sweep of one backend must see the locks of the
/// others, so they share a folder.
pub(crate) fn runtime_folder() -> PathBuf {
    // Below the data folder, but one per user: the folder is private.
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("runtime-{}", rustix::process::geteuid().as_raw()))
}

/// Builds this environment if required, and returns its base interpreter: Python outside of any
/// sandbox.
pub(crate) fn host_python(name: &str) -> PathBuf {
    let spec = super::environment_spec(name);
    // A separate thread, because the caller may already be inside the runtime.
    let built = std::thread::spawn(move || {
        run(async move { environment::ensure(&spec, &super::data_folder(), &|_| {}).await })
    });
    built
        .join()
        .expect("the builder does not panic")
        .expect("the environment can be built")
        .base_executable
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

    /// Ends the backend and everything it created.
    pub(crate) async fn end(&self) {
        self.sessions.shut_down().await;
    }
}

/// One session of a test. It is closed when the last copy of the value is dropped.
#[derive(Clone)]
pub(crate) struct Session {
    sessions: Sessions,
    pub(crate) id: SessionId,
    closed_at_the_end: Arc<Closer>,
}

struct Closer {
    sessions: Sessions,
    id: SessionId,
    /// A name that was released may belong to another session by now.
    is_closed: AtomicBool,
}

impl Drop for Closer {
    fn drop(&mut self) {
        if self.is_closed.load(Ordering::Relaxed) {
            return;
        }
        let (sessions, id) = (self.sessions.clone(), self.id.clone());
        runtime().spawn(async move { sessions.close(&Principal::local(), &id).await });
    }
}

impl Session {
    /// A session of a name that no other test uses, not started yet.
    pub(crate) fn new(sessions: &Sessions) -> Session {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = SessionId::from_str(&format!("test-{}", NEXT.fetch_add(1, Ordering::Relaxed)))
            .expect("a plain name");
        Session::existing(sessions, id)
    }

    /// A session that exists already, such as a fork.
    pub(crate) fn existing(sessions: &Sessions, id: SessionId) -> Session {
        let closer = Closer {
            sessions: sessions.clone(),
            id: id.clone(),
            is_closed: AtomicBool::new(false),
        };
        Session {
            sessions: sessions.clone(),
            id,
            closed_at_the_end: Arc::new(closer),
        }
    }

    /// Runs code and returns its outcome.
    pub(crate) async fn execute(&self, code: &str) -> Result<Outcome, Refused> {
        self.execute_with(code, Duration::from_secs(60), CancellationToken::new())
            .await
    }

    pub(crate) async fn execute_with(
        &self,
        code: &str,
        timeout: Duration,
        cancel: CancellationToken,
    ) -> Result<Outcome, Refused> {
        let request = ExecuteRequest {
            code: code.to_owned(),
            timeout,
            max_output_chars: 10_000_000,
            asking: Approver::Nobody,
            rules: None,
            recorder: Default::default(),
        };
        self.sessions
            .execute(&Principal::local(), &self.id, request, cancel)
            .await
    }

    /// Runs code that must complete, and returns its output.
    pub(crate) async fn ok(&self, code: &str) -> String {
        let outcome = self
            .execute(code)
            .await
            .unwrap_or_else(|refused| panic!("refused: {refused}\n{code}"));
        assert_eq!(
            outcome.status,
            Status::Completed,
            "{}\n{code}",
            everything(&outcome)
        );
        printed(&outcome)
    }

    /// Runs an expression and reads its value as JSON.
    pub(crate) async fn json(&self, code: &str) -> serde_json::Value {
        let text = self.ok(code).await;
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("no JSON ({error}): {text}"))
    }

    /// Returns the isolation of the session as reported in its results: one line per layer.
    pub(crate) async fn isolation(&self) -> String {
        let outcome = self
            .execute("pass")
            .await
            .expect("the session takes the cell");
        let layers = outcome.isolation.layers.iter();
        layers
            .map(|(kind, layer)| format!("{}: {layer:?}\n", kind.name()))
            .collect()
    }

    pub(crate) async fn reset(&self) -> ResetReport {
        self.try_reset().await.expect("a reset works")
    }

    pub(crate) async fn try_reset(&self) -> Result<ResetReport, Refused> {
        self.sessions.reset(&Principal::local(), &self.id).await
    }

    pub(crate) async fn upload(&self, path: &str, bytes: &[u8]) -> Result<u64, Refused> {
        self.sessions
            .write_file(
                &Principal::local(),
                &self.id,
                &inside(path),
                &mut &bytes[..],
                true,
            )
            .await
    }

    pub(crate) async fn download(&self, path: &str, limit: u64) -> Result<Vec<u8>, Refused> {
        let mut bytes = Vec::new();
        self.sessions
            .read_file(
                &Principal::local(),
                &self.id,
                &inside(path),
                limit,
                &mut bytes,
            )
            .await?;
        Ok(bytes)
    }

    pub(crate) async fn close(&self) {
        self.closed_at_the_end
            .is_closed
            .store(true, Ordering::Relaxed);
        // Closing twice is harmless.
        let _ = self.sessions.close(&Principal::local(), &self.id).await;
    }

    /// Makes forks and returns the report of what they lack.
    pub(crate) async fn try_forks(
        &self,
        count: u32,
    ) -> Result<(Vec<Session>, ForkReport), Refused> {
        let report = self
            .sessions
            .fork(&Principal::local(), &self.id, ForkNames::Count(count))
            .await?;
        let forks = report
            .forks
            .iter()
            .map(|id| Session::existing(&self.sessions, id.clone()))
            .collect();
        Ok((forks, report))
    }

    pub(crate) async fn forks(&self, count: u32) -> (Vec<Session>, ForkReport) {
        self.try_forks(count)
            .await
            .unwrap_or_else(|refused| panic!("no forks: {refused}"))
    }

    pub(crate) async fn fork(&self) -> Session {
        self.forks(1).await.0.remove(0)
    }

    pub(crate) async fn try_undo(&self, cells: u32) -> Result<UndoReport, Refused> {
        self.sessions
            .undo(&Principal::local(), &self.id, cells)
            .await
    }

    pub(crate) async fn undo(&self, cells: u32) -> UndoReport {
        self.try_undo(cells)
            .await
            .unwrap_or_else(|refused| panic!("nothing is undone: {refused}"))
    }

    pub(crate) fn checkpoints(&self) -> Vec<CheckpointInfo> {
        self.sessions
            .checkpoints(&Principal::local(), &self.id)
            .expect("undo is on")
    }

    pub(crate) async fn explore(&self, request: ExploreRequest) -> Result<ExploreReport, Refused> {
        self.sessions
            .explore(
                &Principal::local(),
                &self.id,
                request,
                CancellationToken::new(),
                ProgressChannel::default(),
            )
            .await
    }

    /// Waits until a cell runs in the session.
    pub(crate) async fn runs(&self) {
        let is_running = || {
            let all = self.sessions.list(&Principal::local());
            all.iter()
                .any(|info| info.id == self.id && info.state == SessionState::Running)
        };
        while !is_running() {
            tokio::task::yield_now().await;
        }
    }

    /// Waits until the session is not being copied: a cell that changes nothing runs after the copy
    /// of the one before, and needs none.
    pub(crate) async fn settle(&self) {
        self.ok("pass").await;
    }

    /// Checks that every process in the session's pid namespace is locked down, as the host sees
    /// it.
    pub(crate) async fn assert_locked_down(&self) {
        let interpreter = self.host_pid().await;
        self.settle().await;
        assert_locked_down(interpreter, &OURS);
    }

    /// The stopped processes that hold this session's states: its twin and its checkpoints. Only
    /// root can determine their owner.
    pub(crate) async fn twins(&self) -> Vec<Twin> {
        let interpreter = self.host_pid().await;
        self.settle().await;
        twins_of(&control_groups(interpreter))
    }

    /// Returns the interpreter's pid on the host: that of the process to which the kernel
    /// attributes the pid namespace and the inner pid that the session reports.
    pub(crate) async fn host_pid(&self) -> u32 {
        let namespace = self
            .ok("import os; print(os.readlink('/proc/self/ns/pid'), os.getpid())")
            .await;
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

/// Expected lock-down of the processes of a sandbox, on any backend.
pub(crate) struct LockDown {
    /// Namespaces that are not the host's.
    pub(crate) namespaces: &'static [&'static str],
    pub(crate) filters: u32,
}

/// The native lock-down: the filter of the sandbox and the closing one.
pub(crate) const OURS: LockDown = LockDown {
    namespaces: &NAMESPACES,
    filters: 2,
};

/// Checks that every process in the pid namespace of `interpreter` is locked down.
pub(crate) fn assert_locked_down(interpreter: u32, expected: &LockDown) {
    let namespace = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let wanted = namespace(interpreter).expect("the interpreter lives");
    let own = Posture::read(std::process::id()).expect("this process may look at itself");
    let members = processes()
        .into_iter()
        .filter(|process| namespace(process.pid).as_ref() == Some(&wanted));
    let mut count = 0;
    // Only root may read everything about an init, which is not dumpable.
    for process in members.filter(|process| super::is_root() || process.name != "cb-init") {
        // A child of the session may exit meanwhile.
        let Ok(posture) = Posture::read(process.pid) else {
            continue;
        };
        count += 1;
        assert!(
            posture.uids.iter().chain(&posture.gids).all(|id| *id != 0),
            "{process:?}: {posture:?}"
        );
        assert_eq!(posture.capabilities, [0; 5], "{process:?}");
        assert!(posture.no_new_privs, "{process:?}");
        assert_eq!(posture.seccomp, 2, "{process:?}");
        let filters = posture.seccomp_filters;
        assert!(
            filters >= expected.filters || process.name == "cb-init",
            "{process:?}: {posture:?}"
        );
        for name in expected.namespaces {
            assert_ne!(
                posture.namespaces[*name], own.namespaces[*name],
                "{name} of {process:?}"
            );
        }
    }
    assert!(count > 0, "the interpreter at least was looked at");
}

/// A stopped process outside of all sandboxes.
#[derive(Debug)]
pub(crate) struct Twin {
    pub(crate) pid: u32,
    /// The kernel's state letter: `t` is stopped by a tracer.
    pub(crate) state: char,
    pub(crate) tracer: u32,
}

/// The twins in these control groups.
pub(crate) fn twins_of(groups: &[PathBuf]) -> Vec<Twin> {
    let members: BTreeSet<u32> = groups
        .iter()
        .filter_map(|group| std::fs::read_to_string(group.join("cgroup.procs")).ok())
        .flat_map(|text| {
            text.lines()
                .filter_map(|line| line.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect();
    let outside = own_depth() + 2;
    let is_twin = |process: &HostProcess| {
        members.contains(&process.pid) && process.depth == outside && process.name == "cb-twin"
    };
    processes()
        .into_iter()
        .filter(is_twin)
        .filter_map(|process| Twin::read(process.pid))
        .collect()
}

impl Twin {
    /// Reads a process again; returns `None` when it has ended.
    pub(crate) fn read(pid: u32) -> Option<Twin> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        Some(Twin {
            pid,
            state: field("State:")?.chars().next()?,
            tracer: field("TracerPid:")?.parse().ok()?,
        })
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state == 't' && self.tracer != 0
    }
}

pub(crate) fn inside(path: &str) -> InsidePath {
    InsidePath::from_str(path).expect("a path below the working folder")
}

/// Returns what the code printed and returned, without tracebacks.
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
    let output = Command::new(host_python("minimal"))
        .args(["-I", "-c", code])
        .output()
        .expect("the host's Python runs");
    assert!(
        output.status.success(),
        "{}\n{code}",
        String::from_utf8_lossy(&output.stderr)
    );
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
    control_groups_of(pid, "/cellblock-")
}

/// Returns the control group folders of a process whose path contains `name`.
pub(crate) fn control_groups_of(pid: u32, name: &str) -> Vec<PathBuf> {
    let membership =
        std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("the process lives");
    let mut folders = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        if !path.contains(name) {
            continue;
        }
        let mut places = controllers
            .split(',')
            .map(|controller| format!("/sys/fs/cgroup/{controller}{path}"));
        folders.extend(
            places
                .find(|place| PathBuf::from(place).exists())
                .map(PathBuf::from),
        );
    }
    folders
}

/// A process of the host.
#[derive(Debug)]
pub(crate) struct HostProcess {
    pub(crate) pid: u32,
    pub(crate) name: String,
    /// Its pid in the innermost pid namespace.
    pub(crate) inner: Option<u32>,
    /// The number of pid namespaces that it is nested in.
    pub(crate) depth: usize,
    pub(crate) parent: u32,
}

impl HostProcess {
    /// Returns whether it is a warm interpreter: Python in the warden's own pid namespace.
    pub(crate) fn is_zygote(&self) -> bool {
        self.depth == own_depth() + 1 && !self.name.starts_with("cb-")
    }
}

/// The number of pid namespaces that this test process is nested in.
pub(crate) fn own_depth() -> usize {
    let own = std::process::id();
    processes()
        .into_iter()
        .find(|process| process.pid == own)
        .expect("this process lives")
        .depth
}

/// The processes that see a folder: all of one backend's, if the folder was mounted in its
/// sandboxes.
pub(crate) fn marked_processes(folder: &Path) -> Vec<HostProcess> {
    let name = folder
        .file_name()
        .expect("a folder with a name")
        .to_string_lossy()
        .into_owned();
    // Sessions have no mount table, but the processes that created them have one.
    let all = processes();
    let parents: std::collections::HashMap<u32, u32> =
        all.iter().map(|each| (each.pid, each.parent)).collect();
    let shows = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))
            .is_ok_and(|mounts| mounts.contains(&name))
    };
    let sees = |process: &HostProcess| {
        std::iter::successors(Some(process.pid), |pid| parents.get(pid).copied())
            .any(|pid| shows(&pid))
    };
    let seeing: Vec<bool> = all.iter().map(sees).collect();
    all.into_iter()
        .zip(seeing)
        .filter_map(|(process, sees)| sees.then_some(process))
        .collect()
}

/// Every process the host can see now.
pub(crate) fn processes() -> Vec<HostProcess> {
    let numbers = std::fs::read_dir("/proc")
        .expect("/proc is readable")
        .flatten();
    numbers
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter_map(|pid| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let field = |name: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                    .map(str::trim)
            };
            Some(HostProcess {
                pid,
                name: field("Name")?.to_owned(),
                parent: field("PPid")?.parse().ok()?,
                depth: field("NSpid").map_or(1, |numbers| numbers.split_whitespace().count()),
                inner: field("NSpid")
                    .and_then(|numbers| numbers.split_whitespace().last()?.parse().ok()),
            })
        })
        .collect()
}
