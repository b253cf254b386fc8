//! A backend without any isolation, for tests.
//!
//! Its interpreter is a task that speaks the runner's protocol over a real socket and real pipes
//! and runs one command per line:
//!
//! | command | does |
//! |---|---|
//! | `print X`, `err X`, `value X` | writes a line to standard output or error, returns a value |
//! | `display ID X`, `update ID X`, `clear`, `picture BASE64` | rich output |
//! | `set NAME X`, `get NAME` | sets a variable, prints it or raises `NameError` |
//! | `raise X` | ends the cell with a `ValueError` |
//! | `sleep SECONDS` | waits; an interrupt raises `KeyboardInterrupt` |
//! | `ignore-interrupt` | waits for ever |
//! | `miss-interrupt` | waits, and raises `KeyboardInterrupt` only at the second interrupt |
//! | `stop-after SECONDS` | raises `KeyboardInterrupt` that long after an interrupt |
//! | `burn SECONDS` | reports that much more CPU time as used |
//! | `flood N` | prints N numbered lines |
//! | `exit N`, `crash`, `oom` | ends the interpreter |
//! | `exit-later N` | ends the interpreter after the end of the cell |
//! | `oom everywhere` | ends the interpreter, and the files are lost |
//! | `garbage`, `unknown`, `done-twice`, `other-done` | sends bad messages on the channel |
//! | `forge SEQ` | writes a forged marker into a pipe |
//! | `late X` | prints after the end of the cell |
//! | `mute` | answers nothing after this cell |
//! | `keep NAME X`, `file NAME` | writes a file, prints one or raises `FileNotFoundError` |
//! | `set refuse-tools` | from now on reports that packages of MCP servers could not be written |
//! | `lose X` | has state that a copy will lack |
//! | `stand` | never reaches its branch point any more |
//! | `decline` | answers every copy request that it cannot be copied |
//! | `call SERVER TOOL JSON` | calls a tool, prints the answer; an interrupt cancels and raises |
//! | `calls N SERVER TOOL JSON` | makes N calls at once, prints the count of each kind of answer |
//! | `forget SERVER TOOL` | calls a tool, cancels the call, and prints both answers |
//! | `ask JSON` | sends a host call with these members, and prints the answer |
//! | `ask-on JSON` | the same without waiting for the answer |
//! | `run LINE` | requests a shell command that writes to its own pipes, prints the answer |
//! | `run-on LINE` | the same without waiting for the answer |
//! | `float(NAME` | returns the value of a variable as a number, or raises |
//!
//! A copy of an interpreter has its variables and files. Cells that only print are reported to
//! change nothing.
//!
//! It reports every layer of isolation as missing, because that is true, and must never run
//! anything but these commands.

mod programs;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use cellblock_egress::gateway::Blocked;
use cellblock_egress::name::HostName;
use cellblock_egress::rules::Rules;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Sender;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use self::programs::Launched;
use super::{
    Asker, Backend, CheckpointError, CheckpointId, Exit, ForkTerms, Gauge, Interpreter, Isolation,
    LaunchError, Launcher, LayerKind, LayerState, MemoryUse, OuterMemory, Preparation, Process,
    Sandbox,
};
use crate::reaction::CpuWaits;

const MARKER: [u8; 16] = *b"fake interpreter";

/// The checkpoint of a sandbox's initial state.
const BEGINNING: CheckpointId = CheckpointId(0);

/// Timeout for an interpreter to reach its branch point.
const BRANCH_PATIENCE: Duration = Duration::from_secs(5);

/// Makes sandboxes without isolation.
pub struct FakeBackend {
    preparation: watch::Sender<Preparation>,
    world: Arc<World>,
}

/// State shared by all sandboxes of a backend.
#[derive(Default)]
struct World {
    /// Number of sandboxes that were made and not destroyed.
    alive: AtomicUsize,
    numbers: AtomicU64,
    copying: Mutex<FakeCopying>,
    /// By the number of their sandbox and their own.
    checkpoints: Mutex<BTreeMap<(u64, CheckpointId), Snapshot>>,
    made: AtomicUsize,
    memory_of_checkpoint: AtomicU64,
    keeps_beginnings: AtomicBool,
    /// Rules of a fresh sandbox.
    rules: Mutex<Rules>,
    /// Bytes used by each interpreter.
    memory_of_interpreter: AtomicU64,
    launched: Arc<Launched>,
    /// Refused connections, returned by the next query.
    blocked: Mutex<Vec<Blocked>>,
    /// Milliseconds of each second that interpreters wait for a CPU, and since when.
    starved: Mutex<Option<(u32, tokio::time::Instant)>>,
    /// The asker of the newest sandbox.
    asker: Mutex<Option<Arc<dyn Asker>>>,
}

/// The behaviour of copying.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FakeCopying {
    #[default]
    Works,
    /// As on a machine that does not support it.
    Unsupported,
    /// Each attempt fails.
    Fails,
    /// Copies are made, but only this many forks from now on succeed.
    Forks(usize),
    /// Copies are made, but none can be restored.
    NoReturn,
}

/// A copy of an interpreter.
#[derive(Debug, Clone, Default)]
struct Snapshot {
    variables: BTreeMap<String, String>,
    files: BTreeMap<PathBuf, Vec<u8>>,
    lost: Vec<String>,
    /// The members of the frame that requested it.
    asked: Value,
}

impl FakeBackend {
    /// Returns a backend that is ready.
    pub fn new() -> FakeBackend {
        FakeBackend {
            preparation: watch::Sender::new(Preparation::Ready),
            world: Arc::default(),
        }
    }

    /// Returns a backend whose preparation does not finish until `prepare` is called.
    pub fn unprepared() -> FakeBackend {
        let working = Preparation::Working {
            step: "preparing".to_owned(),
            done: 0,
            total: None,
        };
        FakeBackend {
            preparation: watch::Sender::new(working),
            world: Arc::default(),
        }
    }

    /// Ends the preparation.
    pub fn prepare(&self, preparation: Preparation) {
        self.preparation.send_replace(preparation);
    }

    /// Returns the number of existing sandboxes.
    pub fn sandboxes(&self) -> usize {
        self.world.alive.load(Ordering::SeqCst)
    }

    /// Returns the command lines of all launched programs.
    pub fn launched(&self) -> Vec<Vec<String>> {
        self.world.launched.all()
    }

    /// Returns the number of programs that have not ended.
    pub fn programs(&self) -> usize {
        self.world.launched.alive()
    }

    /// Sets the behaviour of copying from now on.
    pub fn set_copying(&self, copying: FakeCopying) {
        *self
            .world
            .copying
            .lock()
            .expect("nothing panics while it holds the switch") = copying;
    }

    /// Makes fresh sessions start with a checkpoint of their initial state.
    pub fn keep_beginnings(&self) {
        self.world.keeps_beginnings.store(true, Ordering::SeqCst);
    }

    /// Sets the rules of fresh sandboxes from now on.
    pub fn set_rules(&self, rules: Rules) {
        *self
            .world
            .rules
            .lock()
            .expect("nothing panics while it holds the rules") = rules;
    }

    /// Makes the newest sandbox connect to a name that no rule lists. Returns whether the asker
    /// allowed it.
    pub async fn connect(&self, name: &str, port: u16) -> bool {
        let asker = self
            .world
            .asker
            .lock()
            .expect("nothing panics while it holds the asker")
            .clone();
        let name = HostName::parse(name).expect("a test knows names");
        match asker.filter(|asker| asker.may_allow(&name)) {
            Some(asker) => asker.ask(&name, port, ([127, 0, 0, 1], 1024).into()).await,
            None => false,
        }
    }

    /// Makes interpreters wait for a CPU, for this many milliseconds of each second from now on.
    pub fn starve(&self, milliseconds: u32) {
        let since = tokio::time::Instant::now();
        *self
            .world
            .starved
            .lock()
            .expect("nothing panics while it holds the waits") = Some((milliseconds, since));
    }

    /// Makes the next queried sandbox report a refused connection.
    pub fn block(&self, blocked: Blocked) {
        self.world
            .blocked
            .lock()
            .expect("nothing panics while it holds the refusals")
            .push(blocked);
    }

    /// Returns the number of existing copies.
    pub fn checkpoints(&self) -> usize {
        self.world.checkpoints().len()
    }

    /// Returns the number of copies that were made, including discarded ones.
    pub fn checkpoints_made(&self) -> usize {
        self.world.made.load(Ordering::SeqCst)
    }

    /// Removes the oldest copies, as a kernel without memory does.
    pub fn take_oldest_checkpoints(&self, count: usize) {
        let mut checkpoints = self.world.checkpoints();
        for _ in 0..count {
            checkpoints.pop_first();
        }
    }

    /// Sets the memory use of each interpreter, in addition to its files and copies.
    pub fn set_memory_of_interpreter(&self, bytes: u64) {
        self.world
            .memory_of_interpreter
            .store(bytes, Ordering::SeqCst);
    }

    /// Sets the memory use of each copy.
    pub fn set_memory_of_checkpoint(&self, bytes: u64) {
        self.world
            .memory_of_checkpoint
            .store(bytes, Ordering::SeqCst);
    }
}

impl Default for FakeBackend {
    fn default() -> FakeBackend {
        FakeBackend::new()
    }
}

#[async_trait]
impl Backend for FakeBackend {
    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.preparation.subscribe()
    }

    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let mut preparation = self.preparation.subscribe();
        let done = preparation
            .wait_for(|state| !matches!(state, Preparation::Working { .. }))
            .await;
        if let Ok(Preparation::Failed { why }) = done.as_deref() {
            return Err(LaunchError::Preparation { why: why.clone() });
        }
        drop(done);
        let keeps = self.world.keeps_beginnings.load(Ordering::SeqCst);
        World::sandbox(&self.world, None, keeps.then(Snapshot::default))
    }

    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        self.launch().await
    }

    async fn shut_down(&self) {}
}

impl World {
    fn checkpoints(&self) -> MutexGuard<'_, BTreeMap<(u64, CheckpointId), Snapshot>> {
        self.checkpoints
            .lock()
            .expect("nothing panics while it holds the copies")
    }

    /// Makes a sandbox with a fresh interpreter, or with one that has the state of a copy.
    fn sandbox(
        world: &Arc<World>,
        copy: Option<&Snapshot>,
        beginning: Option<Snapshot>,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let files = tempfile::tempdir().map_err(start_failed)?;
        let mut isolation = Isolation::default();
        for kind in LayerKind::ALL {
            isolation.record(
                kind,
                LayerState::Missing {
                    why: "the fake backend isolates nothing".to_owned(),
                },
            );
        }
        let birth = match copy {
            Some(copy) => copy.carry_to(files.path()).map_err(start_failed)?,
            None => Birth::default(),
        };
        let used = Arc::new(Mutex::new(Duration::ZERO));
        let (mut interpreter, process) = start(files.path(), birth, used.clone())?;
        world.alive.fetch_add(1, Ordering::SeqCst);
        let number = world.numbers.fetch_add(1, Ordering::SeqCst);
        let rules = world
            .rules
            .lock()
            .expect("nothing panics while it holds the rules")
            .clone();
        let sandbox = FakeSandbox {
            number,
            files: Some(files),
            isolation,
            process,
            world: world.clone(),
            next_checkpoint: 1,
            used,
            rules: Mutex::new(rules),
        };
        if let Some(beginning) = beginning {
            world.checkpoints().insert((number, BEGINNING), beginning);
            interpreter.beginning = Some(BEGINNING);
        }
        Ok((Box::new(sandbox), interpreter))
    }

    /// Returns whether one more fork can be made.
    fn may_fork(&self) -> bool {
        match &mut *self
            .copying
            .lock()
            .expect("nothing panics while it holds the switch")
        {
            FakeCopying::Forks(0) => false,
            FakeCopying::Forks(left) => {
                *left -= 1;
                true
            }
            _ => true,
        }
    }
}

fn start_failed(error: io::Error) -> LaunchError {
    LaunchError::Start {
        why: error.to_string(),
    }
}

/// The initial state of an interpreter.
#[derive(Default)]
struct Birth {
    variables: BTreeMap<String, String>,
    lost: Vec<String>,
    /// What its `hello` frame reports about files.
    greeting: Option<(&'static str, Option<&'static str>)>,
}

impl Snapshot {
    /// Fills the folder of another sandbox.
    fn carry_to(&self, folder: &Path) -> io::Result<Birth> {
        if self.asked["work_is_shared"] == true {
            return Ok(self.birth("shared", None));
        }
        self.write(folder)?;
        Ok(self.birth("restored", None))
    }

    /// Restores the folder it was taken from.
    fn put_back(&self, folder: &Path) -> io::Result<Birth> {
        let size = self
            .files
            .values()
            .map(|bytes| bytes.len() as u64)
            .sum::<u64>();
        if size > self.asked["undo_files"].as_u64().unwrap_or(0) {
            return Ok(self.birth("left alone", Some("the working folder holds too much")));
        }
        for path in read_files(folder)?
            .into_keys()
            .filter(|path| !self.files.contains_key(path))
        {
            fs::remove_file(folder.join(path))?;
        }
        self.write(folder)?;
        Ok(self.birth("restored", None))
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        for (path, bytes) in &self.files {
            let path = folder.join(path);
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(path, bytes)?;
        }
        Ok(())
    }

    fn birth(&self, files: &'static str, why: Option<&'static str>) -> Birth {
        Birth {
            variables: self.variables.clone(),
            lost: self.lost.clone(),
            greeting: Some((files, why)),
        }
    }
}

fn read_files(folder: &Path) -> io::Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(folder.join(&inner))? {
            let entry = entry?;
            let path = inner.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                folders.push(path);
            } else {
                files.insert(path, fs::read(entry.path())?);
            }
        }
    }
    Ok(files)
}

struct FakeSandbox {
    number: u64,
    files: Option<TempDir>,
    isolation: Isolation,
    process: FakeProcess,
    world: Arc<World>,
    next_checkpoint: u32,
    /// CPU time that its interpreters report as used.
    used: Arc<Mutex<Duration>>,
    rules: Mutex<Rules>,
}

/// The resource use of a sandbox, as set by its interpreter.
struct FakeGauge {
    used: Arc<Mutex<Duration>>,
    world: Arc<World>,
    files: Option<PathBuf>,
}

impl Gauge for FakeGauge {
    fn processor_time(&self) -> Duration {
        *self
            .used
            .lock()
            .expect("nothing panics while it holds the time")
    }

    fn memory(&self) -> u64 {
        self.world.memory_of_interpreter.load(Ordering::SeqCst) + self.stored()
    }

    fn stored(&self) -> u64 {
        let files = self
            .files
            .as_deref()
            .and_then(|folder| read_files(folder).ok())
            .unwrap_or_default();
        files.values().map(|bytes| bytes.len() as u64).sum()
    }

    fn cpu_waits(&self) -> CpuWaits {
        let starved = *self
            .world
            .starved
            .lock()
            .expect("nothing panics while it holds the waits");
        let waited = |(milliseconds, since): (u32, tokio::time::Instant)| {
            since.elapsed() * milliseconds / 1000
        };
        starved
            .map(waited)
            .map_or_else(CpuWaits::default, CpuWaits::of_one)
    }
}

impl FakeSandbox {
    /// Ends the interpreter and returns the folder of its successor.
    async fn end_interpreter(&mut self) -> Result<&Path, LaunchError> {
        self.process.kill();
        self.process.exited().await;
        let files = self.files.as_ref().ok_or(LaunchError::Start {
            why: "the sandbox is destroyed".to_owned(),
        })?;
        Ok(files.path())
    }

    fn copy_of(&self, checkpoint: CheckpointId) -> Result<Snapshot, LaunchError> {
        let copy = self
            .world
            .checkpoints()
            .get(&(self.number, checkpoint))
            .cloned();
        copy.ok_or(LaunchError::Start {
            why: "there is no such copy".to_owned(),
        })
    }
}

#[async_trait]
impl Sandbox for FakeSandbox {
    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn restart(&mut self) -> Result<Interpreter, LaunchError> {
        let used = self.used.clone();
        let (interpreter, process) = start(self.end_interpreter().await?, Birth::default(), used)?;
        self.process = process;
        Ok(interpreter)
    }

    fn memory(&self) -> MemoryUse {
        let copies = self
            .world
            .checkpoints()
            .keys()
            .filter(|(sandbox, _)| *sandbox == self.number)
            .count() as u64;
        let now = 1024 + copies * self.world.memory_of_checkpoint.load(Ordering::SeqCst);
        MemoryUse {
            now,
            peak: now + 1024,
        }
    }

    fn forget_peak(&self) {}

    fn gauge(&self) -> Arc<dyn Gauge> {
        let files = self.files.as_ref().map(|folder| folder.path().to_owned());
        Arc::new(FakeGauge {
            used: self.used.clone(),
            world: self.world.clone(),
            files,
        })
    }

    async fn checkpoint(
        &mut self,
        told: oneshot::Sender<()>,
    ) -> Result<CheckpointId, CheckpointError> {
        let failed = |why: &str| CheckpointError::Failed {
            why: why.to_owned(),
        };
        let copying = *self
            .world
            .copying
            .lock()
            .expect("nothing panics while it holds the switch");
        match copying {
            FakeCopying::Works | FakeCopying::Forks(_) | FakeCopying::NoReturn => {}
            FakeCopying::Unsupported => {
                return Err(CheckpointError::Unsupported {
                    why: "the switch says so".to_owned(),
                });
            }
            FakeCopying::Fails => return Err(failed("the switch says so")),
        }
        let arrivals = self.process.arrivals.clone();
        let mut arrivals = arrivals.lock().await;
        let _ = told.send(());
        let snapshot = tokio::select! {
            snapshot = arrivals.recv() => snapshot.ok_or_else(|| failed("the interpreter ended"))?,
            _ = self.process.exited() => return Err(failed("the interpreter ended")),
            () = tokio::time::sleep(BRANCH_PATIENCE) => return Err(failed("it did not come to its \
                 branch point in time")),
        };
        let checkpoint = CheckpointId(self.next_checkpoint);
        self.next_checkpoint += 1;
        self.world.made.fetch_add(1, Ordering::SeqCst);
        self.world
            .checkpoints()
            .insert((self.number, checkpoint), snapshot);
        Ok(checkpoint)
    }

    async fn restore(&mut self, checkpoint: CheckpointId) -> Result<Interpreter, LaunchError> {
        let copy = self.copy_of(checkpoint)?;
        let returns = *self
            .world
            .copying
            .lock()
            .expect("nothing panics while it holds the switch");
        let used = self.used.clone();
        let folder = self.end_interpreter().await?;
        if returns == FakeCopying::NoReturn {
            return Err(LaunchError::Start {
                why: "the switch says so".to_owned(),
            });
        }
        let birth = copy.put_back(folder).map_err(start_failed)?;
        let (interpreter, process) = start(folder, birth, used)?;
        self.process = process;
        Ok(interpreter)
    }

    async fn fork(
        &self,
        checkpoint: CheckpointId,
        terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError> {
        let copy = self.copy_of(checkpoint)?;
        if terms.last {
            self.forget(checkpoint);
        }
        if !self.world.may_fork() {
            return Err(LaunchError::Start {
                why: "there is no room for one more".to_owned(),
            });
        }
        let (fork, interpreter) = World::sandbox(
            &self.world,
            Some(&copy),
            terms.keep_beginning.then(|| copy.clone()),
        )?;
        fork.set_rules(self.rules());
        Ok((fork, interpreter))
    }

    fn has(&self, checkpoint: CheckpointId) -> bool {
        self.world
            .checkpoints()
            .contains_key(&(self.number, checkpoint))
    }

    fn forget(&self, checkpoint: CheckpointId) {
        self.world.checkpoints().remove(&(self.number, checkpoint));
    }

    fn launcher(&self) -> Arc<dyn Launcher> {
        self.world.launched.clone()
    }

    fn rules(&self) -> Rules {
        self.rules
            .lock()
            .expect("nothing panics while it holds the rules")
            .clone()
    }

    fn set_rules(&self, rules: Rules) {
        *self
            .rules
            .lock()
            .expect("nothing panics while it holds the rules") = rules;
    }

    fn set_asker(&self, asker: Option<Arc<dyn Asker>>) {
        *self
            .world
            .asker
            .lock()
            .expect("nothing panics while it holds the asker") = asker;
    }

    fn take_blocked(&self) -> Vec<Blocked> {
        std::mem::take(
            &mut *self
                .world
                .blocked
                .lock()
                .expect("nothing panics while it holds the refusals"),
        )
    }

    async fn destroy(&mut self) {
        self.process.kill();
        self.process.exited().await;
        self.world
            .checkpoints()
            .retain(|(sandbox, _), _| *sandbox != self.number);
        if self.files.take().is_some() {
            self.world.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The host's control over the task that plays the interpreter.
#[derive(Clone)]
struct FakeProcess {
    interrupt: Arc<Notify>,
    kill: Arc<Notify>,
    exit: watch::Receiver<Option<Exit>>,
    /// Snapshots of the interpreter at its branch points.
    arrivals: Arc<tokio::sync::Mutex<mpsc::Receiver<Snapshot>>>,
}

#[async_trait]
impl Process for FakeProcess {
    fn interrupt(&self) {
        self.interrupt.notify_one();
    }

    fn kill(&self) {
        self.kill.notify_one();
    }

    async fn exited(&mut self) -> Exit {
        self.exit
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|exit| *exit)
            .unwrap_or(Exit::Unknown)
    }
}

/// Starts a task that plays an interpreter.
fn start(
    files: &Path,
    birth: Birth,
    used: Arc<Mutex<Duration>>,
) -> Result<(Interpreter, FakeProcess), LaunchError> {
    let (host, channel) = UnixStream::pair().map_err(start_failed)?;
    let (out, out_writer) = io::pipe().map_err(start_failed)?;
    let (err, err_writer) = io::pipe().map_err(start_failed)?;
    let mut hello = json!({
        "type": "hello", "version": 2, "python": "fake",
        "marker": format!("{:032x}", u128::from_be_bytes(MARKER)),
    });
    if let Some((files, why)) = birth.greeting {
        hello["lost"] = json!(birth.lost);
        hello["files"] = json!(files);
        hello["why"] = json!(why);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [out.as_fd(), err.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(
        &channel,
        &[io::IoSlice::new(&frame(&hello, b""))],
        &mut control,
        SendFlags::empty(),
    )
    .map_err(|error| start_failed(error.into()))?;

    let (exit_sender, exit) = watch::channel(None);
    let (branch_point, arrivals) = mpsc::channel(1);
    let arrivals = Arc::new(tokio::sync::Mutex::new(arrivals));
    let process = FakeProcess {
        interrupt: Arc::default(),
        kill: Arc::default(),
        exit,
        arrivals,
    };
    let mut script = Script {
        channel,
        pipes: [
            Sender::from_owned_fd(out_writer.into()).map_err(start_failed)?,
            Sender::from_owned_fd(err_writer.into()).map_err(start_failed)?,
        ],
        interrupt: process.interrupt.clone(),
        files: files.to_owned(),
        used,
        variables: birth.variables,
        branch_point,
        lost: Vec::new(),
        stands: false,
        declines: false,
        modules: Vec::new(),
        upload: None,
        seq: 0,
        last_pipe: 0,
        muted: false,
        asked: 0,
    };
    let kill = process.kill.clone();
    tokio::spawn(async move {
        let exit = tokio::select! {
            exit = script.serve() => exit,
            () = kill.notified() => Exit::Signal(9),
        };
        drop(script);
        exit_sender.send_replace(Some(exit));
    });
    Ok((
        Interpreter {
            channel: host,
            skew: Duration::ZERO,
            process: Box::new(process.clone()),
            beginning: None,
            files_lost: false,
        },
        process,
    ))
}

fn frame(header: &Value, payload: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let length = 4 + header.len() + payload.len();
    [
        &(length as u32).to_be_bytes(),
        &(header.len() as u32).to_be_bytes(),
        header.as_bytes(),
        payload,
    ]
    .concat()
}

/// Returns the host call for `SERVER TOOL JSON`.
fn tool_call(text: &str) -> Value {
    let mut words = text.splitn(3, ' ');
    let mut word = || words.next().unwrap_or_default();
    let (server, tool, arguments) = (word(), word(), word());
    let arguments = serde_json::from_str::<Value>(arguments).unwrap_or_else(|_| json!({}));
    json!({"what": "call_tool", "server": server, "tool": tool, "arguments": arguments})
}

/// Returns the host call for a shell command. Newlines in a command are written `\\n`.
fn shell_command(line: &str) -> Value {
    let folder = super::WORK_FOLDER;
    json!({
        "what": "shell", "command": line.replace("\\n", "\n"),
        "folder": folder, "environment": {}, "with_pipes": true,
    })
}

/// The interpreter's side of the channel.
struct Script {
    channel: UnixStream,
    pipes: [Sender; 2],
    interrupt: Arc<Notify>,
    files: PathBuf,
    used: Arc<Mutex<Duration>>,
    variables: BTreeMap<String, String>,
    branch_point: mpsc::Sender<Snapshot>,
    lost: Vec<String>,
    stands: bool,
    /// Answers that it cannot be copied.
    declines: bool,
    /// Modules of the server that is being delivered.
    modules: Vec<String>,
    upload: Option<(PathBuf, bool, Vec<u8>)>,
    seq: u32,
    last_pipe: usize,
    muted: bool,
    /// The number of the last host call.
    asked: u64,
}

/// Why a cell did not finish.
enum Interruption {
    Exit(Exit),
    Raised { name: &'static str, message: String },
}

impl From<io::Error> for Interruption {
    fn from(_: io::Error) -> Interruption {
        Interruption::Exit(Exit::Code(1))
    }
}

impl Script {
    async fn serve(&mut self) -> Exit {
        loop {
            match self.answer_one().await {
                Ok(()) => {}
                Err(Interruption::Exit(exit)) => return exit,
                Err(Interruption::Raised { .. }) => return Exit::Code(1),
            }
        }
    }

    async fn answer_one(&mut self) -> Result<(), Interruption> {
        let (header, payload) = self.read_frame().await?;
        let id = &header["id"];
        let path = || self.files.join(header["path"].as_str().unwrap_or_default());
        match header["type"].as_str() {
            _ if self.muted => Ok(()),
            Some("execute") => {
                let seed = header
                    .get("seed")
                    .map_or("none".to_owned(), Value::to_string);
                self.variables.insert("seed".to_owned(), seed);
                self.execute(id, &String::from_utf8_lossy(&payload)).await
            }
            Some("list_files") => {
                self.list_files(id, header["limit"].as_u64().unwrap_or(0) as usize)
                    .await
            }
            Some("read_file") if header.get("offset").is_some() => {
                let number = |name: &str| header[name].as_u64().unwrap_or(0) as usize;
                self.read_part(id, path(), number("offset"), number("length"))
                    .await
            }
            Some("read_file") => {
                self.read_file(id, path(), header["limit"].as_u64().unwrap_or(0))
                    .await
            }
            Some("write_begin") => {
                self.upload = Some((path(), header["overwrite"] == true, Vec::new()));
                Ok(())
            }
            Some("write_data") => {
                if let Some((_, _, bytes)) = &mut self.upload {
                    bytes.extend(payload);
                }
                Ok(())
            }
            Some("write_end") => self.write_file(id).await,
            Some("branch") => self.branch(&header).await,
            Some("tools") => self.take_tools(&header, &payload).await,
            Some("packages") => {
                self.say(
                    json!({"type": "packages_added", "id": id, "loaded": []}),
                    b"",
                )
                .await
            }
            _ => Ok(()),
        }
    }

    async fn read_frame(&mut self) -> Result<(Value, Vec<u8>), Interruption> {
        let length = self.channel.read_u32().await? as usize;
        let header_length = self.channel.read_u32().await? as usize;
        let mut body = vec![0; length - 4];
        self.channel.read_exact(&mut body).await?;
        let payload = body.split_off(header_length);
        Ok((
            serde_json::from_slice(&body).map_err(io::Error::from)?,
            payload,
        ))
    }

    /// Sends a host call. Returns its number.
    async fn ask(&mut self, id: &Value, members: Value) -> Result<u64, Interruption> {
        self.asked += 1;
        let mut header = json!({"type": "ask", "id": id, "ask": self.asked});
        header
            .as_object_mut()
            .expect("it is one")
            .extend(members.as_object().cloned().unwrap_or_default());
        if header["with_pipes"] == true {
            self.say_with_pipes(header).await?;
        } else {
            self.say_in_order(header).await?;
        }
        Ok(self.asked)
    }

    /// Waits for an answer and returns its contents.
    async fn answer(&mut self) -> Result<Value, Interruption> {
        loop {
            let (mut header, _) = self.read_frame().await?;
            if header["type"] == "answer" {
                header
                    .as_object_mut()
                    .expect("it has members")
                    .remove("type");
                return Ok(header);
            }
        }
    }

    async fn call(&mut self, id: &Value, members: Value) -> Result<(), Interruption> {
        let ask = self.ask(id, members).await?;
        let interrupt = self.interrupt.clone();
        let answer = tokio::select! {
            answer = self.answer() => Some(answer?),
            () = interrupt.notified() => None,
        };
        match answer {
            Some(answer) => self.write(0, &format!("{answer}\n")).await,
            None => {
                self.ask(id, json!({"what": "withdraw", "of": ask})).await?;
                Err(Interruption::Raised {
                    name: "KeyboardInterrupt",
                    message: String::new(),
                })
            }
        }
    }

    async fn call_many(
        &mut self,
        id: &Value,
        count: usize,
        members: &Value,
    ) -> Result<(), Interruption> {
        let mut kinds = BTreeMap::<String, usize>::new();
        for _ in 0..count {
            self.ask(id, members.clone()).await?;
        }
        for _ in 0..count {
            let answer = self.answer().await?;
            let kind = answer["reason"].as_str().unwrap_or("answered").to_owned();
            *kinds.entry(kind).or_default() += 1;
        }
        self.write(0, &format!("{kinds:?}\n")).await
    }

    async fn forget(&mut self, id: &Value, members: Value) -> Result<(), Interruption> {
        let of = self.ask(id, members).await?;
        self.ask(id, json!({"what": "withdraw", "of": of})).await?;
        for _ in 0..2 {
            let answer = self.answer().await?;
            self.write(0, &format!("{answer}\n")).await?;
        }
        Ok(())
    }

    /// Writes packages of MCP servers into the working folder, and removes them.
    async fn take_tools(&mut self, header: &Value, payload: &[u8]) -> Result<(), Interruption> {
        let folder = self.files.join("mcptools");
        let Some(server) = header["server"].as_str() else {
            if let Some(servers) = header["servers"].as_array() {
                for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
                    let is_named = servers
                        .iter()
                        .any(|server| entry.file_name().to_str() == server.as_str());
                    if entry.path().is_dir() && !is_named {
                        fs::remove_dir_all(entry.path())?;
                    }
                }
            }
            fs::create_dir_all(&folder)?;
            fs::write(folder.join("__init__.py"), payload)?;
            let id = &header["id"];
            return match self.variables.contains_key("refuse-tools") {
                true => {
                    self.say(
                        json!({
                            "type": "failed", "id": id,
                            "reason": "no_space", "message": "no room",
                        }),
                        b"",
                    )
                    .await
                }
                false => {
                    self.say(json!({"type": "tools_written", "id": id}), b"")
                        .await
                }
            };
        };
        let files = header["modules"].as_array().cloned().unwrap_or_default();
        if files.is_empty() {
            let _ = fs::remove_dir_all(folder.join(server));
            return Ok(());
        }
        fs::create_dir_all(folder.join(server))?;
        let mut rest = payload;
        for file in &files {
            let (bytes, later) = rest.split_at(file["size"].as_u64().unwrap_or(0) as usize);
            let name = file["name"].as_str().unwrap_or_default();
            fs::write(folder.join(server).join(name), bytes)?;
            self.modules.push(name.to_owned());
            rest = later;
        }
        if header["last"] == true {
            let known = std::mem::take(&mut self.modules);
            for entry in fs::read_dir(folder.join(server))?.flatten() {
                if !known
                    .iter()
                    .any(|name| entry.file_name().to_str() == Some(name))
                {
                    fs::remove_file(entry.path())?;
                }
            }
        }
        Ok(())
    }

    /// Reaches the branch point, and continues.
    async fn branch(&mut self, asked: &Value) -> Result<(), Interruption> {
        if self.stands {
            return Ok(());
        }
        if self.declines {
            let failed = json!({
                "type": "failed", "id": asked["id"],
                "reason": "other", "message": "no copy today",
            });
            return self.say(failed, b"").await;
        }
        let files = read_files(&self.files)?;
        let lost = self.lost.clone();
        let snapshot = Snapshot {
            variables: self.variables.clone(),
            files,
            lost: lost.clone(),
            asked: asked.clone(),
        };
        // The receiver is gone if the attempt was abandoned.
        let _ = self.branch_point.try_send(snapshot);
        let whole = lost.is_empty();
        self.say(
            json!({"type": "branched", "id": asked["id"], "lost": lost, "whole": whole}),
            b"",
        )
        .await
    }

    async fn say(&mut self, header: Value, payload: &[u8]) -> Result<(), Interruption> {
        Ok(self.channel.write_all(&frame(&header, payload)).await?)
    }

    async fn mark(&mut self, kind: u8) -> Result<u32, Interruption> {
        self.seq += 1;
        self.write_marker(0, self.seq, kind).await?;
        self.write_marker(1, self.seq, kind).await?;
        Ok(self.seq)
    }

    async fn write_marker(&mut self, pipe: usize, seq: u32, kind: u8) -> Result<(), Interruption> {
        let marker = [b"\0\x1bCB", &MARKER[..], &seq.to_be_bytes(), &[kind, b'\n']].concat();
        Ok(self.pipes[pipe].write_all(&marker).await?)
    }

    async fn write(&mut self, pipe: usize, text: &str) -> Result<(), Interruption> {
        if self.last_pipe != pipe {
            self.mark(b'P').await?;
            self.last_pipe = pipe;
        }
        Ok(self.pipes[pipe].write_all(text.as_bytes()).await?)
    }

    async fn say_in_order(&mut self, mut header: Value) -> Result<(), Interruption> {
        header["seq"] = json!(self.mark(b'F').await?);
        self.say(header, b"").await
    }

    /// Sends a message with the pipes that this interpreter writes to.
    async fn say_with_pipes(&mut self, mut header: Value) -> Result<(), Interruption> {
        header["seq"] = json!(self.mark(b'F').await?);
        let bytes = frame(&header, b"");
        let pipes = [self.pipes[0].as_fd(), self.pipes[1].as_fd()];
        let sent = self.channel.async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&pipes));
            let bytes = [io::IoSlice::new(&bytes)];
            Ok(rustix::net::sendmsg(
                &self.channel,
                &bytes,
                &mut control,
                SendFlags::empty(),
            )?)
        });
        let sent = sent.await?;
        Ok(self.channel.write_all(&bytes[sent..]).await?)
    }

    async fn execute(&mut self, id: &Value, code: &str) -> Result<(), Interruption> {
        self.say_in_order(json!({"type": "started", "id": id, "rotated": false}))
            .await?;
        let (mut late, mut twice, mut exit) = (None, false, None);
        let (mut error, mut claimed_late) = (Value::Null, Value::Null);
        let mut unchanged = true;
        for (number, line) in code.lines().enumerate() {
            let (command, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
            unchanged &= matches!(command, "" | "print" | "err" | "value" | "get" | "file");
            match command {
                "late" => late = Some(rest.to_owned()),
                "late-claim" => claimed_late = json!({"text": rest, "omitted": 2}),
                "done-twice" => twice = true,
                "exit-later" => exit = rest.parse().ok(),
                _ => match self.run(id, command, rest).await {
                    Ok(()) => {}
                    Err(Interruption::Raised { name, message }) => {
                        let traceback = format!("line {}\n{name}: {message}", number + 1);
                        error = json!({
                            "name": name, "message": message,
                            "traceback": traceback, "line": number + 1,
                        });
                        break;
                    }
                    Err(exit) => return Err(exit),
                },
            }
        }
        let status = if error.is_null() { "ok" } else { "error" };
        let none = json!({"created": [], "changed": [], "deleted": [], "omitted": 0});
        let mut done = json!({
            "type": "done", "id": id, "status": status,
            "error": error, "variables": none, "files": none,
        });
        if unchanged {
            done["unchanged"] = json!(true);
        }
        if !claimed_late.is_null() {
            done["late"] = claimed_late;
        }
        self.say_in_order(done.clone()).await?;
        if twice {
            self.say_in_order(done).await?;
        }
        if let Some(text) = late {
            self.pipes[0].write_all(text.as_bytes()).await?;
        }
        if let Some(code) = exit {
            return Err(Interruption::Exit(Exit::Code(code)));
        }
        Ok(())
    }

    async fn run(&mut self, id: &Value, command: &str, rest: &str) -> Result<(), Interruption> {
        let display = |update: bool| {
            let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
            json!({
                "type": "display", "id": id, "data": {"text/plain": text},
                "blobs": [], "display_id": name, "update": update,
            })
        };
        match command {
            "" => Ok(()),
            "print" => self.write(0, &format!("{rest}\n")).await,
            "err" => self.write(1, &format!("{rest}\n")).await,
            "value" => {
                self.say_in_order(
                    json!({"type": "value", "id": id, "data": {"text/plain": rest}, "blobs": []}),
                )
                .await
            }
            "display" => self.say_in_order(display(false)).await,
            "update" => self.say_in_order(display(true)).await,
            "picture" => {
                self.say_in_order(
                    json!({"type": "display", "id": id, "data": {"image/png": rest}, "blobs": []}),
                )
                .await
            }
            "clear" => {
                self.say_in_order(json!({"type": "clear", "id": id, "wait": false}))
                    .await
            }
            "set" => {
                let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
                self.variables.insert(name.to_owned(), text.to_owned());
                Ok(())
            }
            "get" => match self.variables.get(rest).cloned() {
                Some(text) => self.write(0, &format!("{text}\n")).await,
                None => Err(Interruption::Raised {
                    name: "NameError",
                    message: format!("name '{rest}' is not defined"),
                }),
            },
            "keep" => {
                let (name, text) = rest.split_once(' ').unwrap_or((rest, ""));
                Ok(fs::write(self.files.join(name), text)?)
            }
            "file" => match fs::read_to_string(self.files.join(rest)) {
                Ok(text) => self.write(0, &format!("{text}\n")).await,
                Err(_) => Err(Interruption::Raised {
                    name: "FileNotFoundError",
                    message: rest.to_owned(),
                }),
            },
            "lose" => {
                self.lost.push(rest.to_owned());
                Ok(())
            }
            "stand" => {
                self.stands = true;
                Ok(())
            }
            "decline" => {
                self.declines = true;
                Ok(())
            }
            "call" => self.call(id, tool_call(rest)).await,
            "calls" => {
                let (count, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                self.call_many(id, count.parse().unwrap_or(0), &tool_call(rest))
                    .await
            }
            "forget" => self.forget(id, tool_call(rest)).await,
            "ask" => {
                self.call(id, serde_json::from_str(rest).unwrap_or_default())
                    .await
            }
            "run" => self.call(id, shell_command(rest)).await,
            "run-on" => self.ask(id, shell_command(rest)).await.map(drop),
            "ask-on" => self
                .ask(id, serde_json::from_str(rest).unwrap_or_default())
                .await
                .map(drop),
            // The end of `float(` on the line before.
            ")" => Ok(()),
            _ if command.starts_with("float(") => {
                let name = &command["float(".len()..];
                let raised = |name, message: String| Err(Interruption::Raised { name, message });
                match self.variables.get(name).map(|text| text.parse::<f64>()) {
                    Some(Ok(number)) => {
                        let data = json!({"text/plain": format!("{number:?}")});
                        self.say_in_order(
                            json!({"type": "value", "id": id, "data": data, "blobs": []}),
                        )
                        .await
                    }
                    Some(Err(_)) => {
                        raised("ValueError", format!("could not convert '{name}' to float"))
                    }
                    None => raised("NameError", format!("name '{name}' is not defined")),
                }
            }
            "raise" => Err(Interruption::Raised {
                name: "ValueError",
                message: rest.to_owned(),
            }),
            "sleep" => {
                let interrupt = self.interrupt.clone();
                tokio::select! {
                    () = tokio::time::sleep(
                        Duration::from_secs_f64(rest.parse().unwrap_or(0.0))
                    ) => Ok(()),
                    () = interrupt.notified() => Err(Interruption::Raised {
                        name: "KeyboardInterrupt",
                        message: String::new(),
                    }),
                }
            }
            "burn" => {
                let time = Duration::from_secs_f64(rest.parse().unwrap_or(0.0));
                *self
                    .used
                    .lock()
                    .expect("nothing panics while it holds the time") += time;
                Ok(())
            }
            "ignore-interrupt" => std::future::pending().await,
            "miss-interrupt" => {
                let interrupt = self.interrupt.clone();
                interrupt.notified().await;
                interrupt.notified().await;
                Err(Interruption::Raised {
                    name: "KeyboardInterrupt",
                    message: String::new(),
                })
            }
            "stop-after" => {
                self.interrupt.clone().notified().await;
                tokio::time::sleep(Duration::from_secs_f64(rest.parse().unwrap_or(0.0))).await;
                Err(Interruption::Raised {
                    name: "KeyboardInterrupt",
                    message: String::new(),
                })
            }
            "mute" => {
                self.muted = true;
                Ok(())
            }
            "flood" => {
                for number in 0..rest.parse().unwrap_or(0) {
                    self.write(0, &format!("line {number}\n")).await?;
                }
                Ok(())
            }
            "exit" => Err(Interruption::Exit(Exit::Code(rest.parse().unwrap_or(0)))),
            "crash" => Err(Interruption::Exit(Exit::Signal(11))),
            "oom" if rest == "outside" => {
                let whose = OuterMemory::Machine;
                Err(Interruption::Exit(Exit::OutOfMemoryOutside {
                    whose,
                    files_kept: true,
                }))
            }
            "oom" => {
                let files_kept = rest != "everywhere";
                Err(Interruption::Exit(Exit::OutOfMemory {
                    limit: 512 * 1024 * 1024,
                    files_kept,
                }))
            }
            "garbage" => Ok(self.channel.write_all(b"\xff\xff\xff\xffgarbage").await?),
            "unknown" => self.say(json!({"type": "from-the-future"}), b"?").await,
            "other-done" => {
                self.say_in_order(json!({"type": "done", "id": 0, "status": "ok"}))
                    .await
            }
            "forge" => self.write_marker(0, rest.parse().unwrap_or(0), b'F').await,
            _ => Err(Interruption::Raised {
                name: "SyntaxError",
                message: format!("unknown command {command}"),
            }),
        }
    }

    async fn read_file(
        &mut self,
        id: &Value,
        path: PathBuf,
        limit: u64,
    ) -> Result<(), Interruption> {
        let failed =
            |reason: &str| json!({"type": "failed", "id": id, "reason": reason, "message": ""});
        let Ok(bytes) = std::fs::read(&path) else {
            return self
                .say(
                    failed(if path.exists() {
                        "not_a_file"
                    } else {
                        "missing"
                    }),
                    b"",
                )
                .await;
        };
        if bytes.len() as u64 > limit {
            return self.say(failed("too_large"), b"").await;
        }
        for chunk in bytes.chunks(256 * 1024) {
            self.say(json!({"type": "file_data", "id": id}), chunk)
                .await?;
        }
        self.say(
            json!({"type": "file_end", "id": id, "size": bytes.len()}),
            b"",
        )
        .await
    }

    async fn read_part(
        &mut self,
        id: &Value,
        path: PathBuf,
        offset: usize,
        length: usize,
    ) -> Result<(), Interruption> {
        let Ok(bytes) = std::fs::read(&path) else {
            let failed = json!({"type": "failed", "id": id, "reason": "missing", "message": ""});
            return self.say(failed, b"").await;
        };
        let start = offset.min(bytes.len());
        let part = &bytes[start..bytes.len().min(start.saturating_add(length))];
        for chunk in part.chunks(256 * 1024) {
            self.say(json!({"type": "file_data", "id": id}), chunk)
                .await?;
        }
        let version = bytes.iter().fold(bytes.len() as u64, |sum, byte| {
            sum.wrapping_mul(31) + u64::from(*byte)
        });
        let end = json!({
            "type": "file_end", "id": id, "size": part.len(),
            "total": bytes.len(), "version": version.to_string(),
        });
        self.say(end, b"").await
    }

    async fn list_files(&mut self, id: &Value, limit: usize) -> Result<(), Interruption> {
        let files = read_files(&self.files)?;
        let entries = files
            .iter()
            .map(|(path, bytes)| json!({"path": path.to_string_lossy(), "size": bytes.len()}));
        let entries = entries.take(limit).collect::<Vec<_>>();
        let omitted = files.len() - entries.len();
        self.say(
            json!({"type": "file_list", "id": id, "entries": entries, "omitted": omitted}),
            b"",
        )
        .await
    }

    async fn write_file(&mut self, id: &Value) -> Result<(), Interruption> {
        let Some((path, overwrite, bytes)) = self.upload.take() else {
            return Ok(());
        };
        if path.exists() && !overwrite {
            return self
                .say(
                    json!({"type": "failed", "id": id, "reason": "exists", "message": ""}),
                    b"",
                )
                .await;
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let replaced = path.exists();
        std::fs::write(&path, &bytes)?;
        self.say(
            json!({"type": "written", "id": id, "size": bytes.len(), "replaced": replaced}),
            b"",
        )
        .await
    }
}
