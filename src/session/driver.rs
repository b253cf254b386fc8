//! The driver: the one task that owns a session.
//!
//! It feeds what happens (a command, an event from the runner, an exit, a moment in time) to the `state` machine and carries out what the
//! machine decides. Facts come from the process and the clock; what the runner says only fills in results and ends a request early.
//!
//! No step waits for the inside: starting, restarting and copying are futures that the loop polls beside everything else, so that `reset`,
//! `close` and cancellation act at once.

mod approvals;
mod branching;
mod packages;
mod questions;
mod shell;
mod tools;

use std::collections::HashMap;
use std::future::Future;
use std::io::{Read, Seek, Write};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use tempfile::SpooledTempFile;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use self::approvals::{ConnectionWanted, NameAsker, Parking};
use self::branching::{Copying, Replacement};
pub(super) use self::branching::{Fork, Forked, ForksWanted};
use self::questions::{Answered, Questions};
use self::tools::Deliveries;
use super::accounts::{Accounts, Metered};
use super::approvals::WaitingInstall;
use super::docket::{Docket, Teller};
use super::history::{History, Undoable};
use super::images;
use super::install::LoadedModules;
use super::kept_outputs::SessionOutputs;
use super::late::LateText;
use super::output::{Gatherer, Glance, Seen, bounded_text};
use super::state::{Action, Answer, Event, Kind, Machine, Refusal, RequestId, State, Stop};
use super::tools::{Grants, ToolCalls};
use super::turns::{Crowded, Turn, Turns};
use super::{
    Decision, ExecuteRequest, ExecutionEnded, ExecutionId, FileChanges, FileList, FileNote,
    InsidePath, Ledger, Others, Outcome, Output, Principal, PythonError, RecorderId, Refused,
    ResetReport, Ruling, SessionId, SessionSettings, StateAfter, Status, Undo, UndoReport,
    Variable, VariableChanges, WorkFolder,
};
use crate::approval::Memory;
use crate::reaction::{CpuAccount, ReactionLimit, within};
use crate::runner_client::{
    self, Carried, Changes, Claim, ClaimedError, ClaimedFile, ClaimedVariable, Connection,
    DoneClaim, MOST_LISTED, Trouble,
};
use crate::sandbox::{
    Backend, CheckpointError, CheckpointId, Exit, Interpreter, LaunchError, Process, Rules, Sandbox,
};

/// Bytes of a file that travel in one frame.
const CHUNK: usize = 256 * 1024;
/// Files up to this size are staged in memory.
pub(super) const STAGED_IN_MEMORY: usize = 1024 * 1024;
/// How long code may take that is interrupted again at the end of its grace. It may not have noticed
/// the first interrupt: Python does not look for signals between its last instruction and the
/// system call in which it waits.
const LAST_CHANCE: Duration = Duration::from_millis(250);
/// How long the runner may show no progress with a file.
const FILE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a fresh interpreter may take to greet. It has been started already; only a broken one needs longer.
const GREETING_PATIENCE: Duration = Duration::from_secs(30);
/// How long the kernel may take to report the exit of an interpreter whose channel is closed.
const EXIT_PATIENCE: Duration = Duration::from_millis(800);
/// Events that are taken when the time for the running code is over.
const MOST_HEARD_AT_ONCE: usize = 1000;
/// Late output may have one part in so many of the characters that a cell's own output may have. It must not hide that.
const LATE_SHARE: usize = 4;
/// A time limit beyond this is none; the clock's arithmetic stays safe.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// Connections that may wait to be looked at. The gateway holds fewer.
const MOST_NAMES_WANTED: usize = 64;

/// What others ask of a session.
pub(super) enum Command {
    Submit(RequestId, Job),
    Cancel(RequestId),
    /// Asks what the running cell printed since this was last asked; nothing when it does not run.
    Look {
        request: RequestId,
        max_chars: usize,
        reply: oneshot::Sender<Option<Glance>>,
    },
    /// Answers questions of the running cell. What was decided comes back.
    Decide {
        request: RequestId,
        decisions: Vec<Decision>,
        reply: oneshot::Sender<Vec<Ruling>>,
    },
    Reset(oneshot::Sender<Result<ResetReport, Refused>>),
    Undo {
        cells: u32,
        reply: oneshot::Sender<Result<UndoReport, Refused>>,
    },
    /// Puts a fork in the place of the session's own interpreter and sandbox. It comes back when that cannot be done now.
    Adopt {
        fork: Box<Fork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<Fork>>>,
    },
    /// Ends the session and gives its interpreter and sandbox away, if they are alive and at rest.
    Surrender(oneshot::Sender<Option<Box<Fork>>>),
    Leave(oneshot::Sender<()>),
}

/// A request and where its answer goes.
pub(super) enum Job {
    Execute {
        request: ExecuteRequest,
        teller: Teller,
    },
    Write {
        path: InsidePath,
        overwrite: bool,
        source: SpooledTempFile,
        reply: oneshot::Sender<Result<u64, Refused>>,
    },
    Read {
        path: InsidePath,
        what: Extent,
        reply: oneshot::Sender<Result<Received, Refused>>,
    },
    List {
        reply: oneshot::Sender<Result<FileList, Refused>>,
    },
    /// Adds folders of packages. The answer names modules that were imported from elsewhere before.
    Packages {
        paths: Vec<String>,
        reply: oneshot::Sender<Result<LoadedModules, Refused>>,
    },
    Fork {
        wanted: ForksWanted,
        reply: oneshot::Sender<Result<Forked, Refused>>,
    },
}

/// How much of a file is wanted.
#[derive(Debug, Clone, Copy)]
pub(super) enum Extent {
    /// All of it, if it is not larger than this.
    Whole {
        limit: u64,
    },
    Part {
        offset: u64,
        length: u64,
    },
}

/// What was read of a file.
pub(super) struct Received {
    pub(super) bytes: SpooledTempFile,
    pub(super) sent: u64,
    /// The size of the whole file, and a text that is another one when the file has changed. As the runner claims, and of a part only.
    pub(super) total: u64,
    pub(super) version: String,
}

impl Job {
    fn kind(&self) -> Kind {
        match self {
            Job::Execute { .. } => Kind::Cell,
            Job::Write { .. } | Job::Read { .. } | Job::List { .. } | Job::Packages { .. } => {
                Kind::File
            }
            Job::Fork { .. } => Kind::Fork,
        }
    }
}

/// Where a session's first interpreter comes from.
pub(super) enum Origin {
    /// A fresh session for work of the server's own.
    Hidden {
        backend: Arc<dyn Backend>,
        rules: Rules,
    },
    Launch(Arc<dyn Backend>),
    /// A fork that is being made. The note is for the reader of the first outcome.
    Fork {
        fork: oneshot::Receiver<Box<Fork>>,
        note: Option<String>,
    },
    /// A fork that is compared with others. They draw the same random numbers, because all have this seed.
    Variant {
        fork: oneshot::Receiver<Box<Fork>>,
        seed: u64,
    },
}

/// What others may see of a session without asking its driver.
pub(super) struct Shared {
    facts: Mutex<Facts>,
    pub(super) outputs: SessionOutputs,
    /// Installations that somebody has to allow first.
    installs: Mutex<Vec<WaitingInstall>>,
    pub(super) docket: Arc<Docket>,
    pub(super) created: Instant,
}

#[derive(Clone)]
pub(super) struct Facts {
    pub(super) state: &'static str,
    pub(super) ended: Option<String>,
    /// Why no interpreter could be started, if that was tried last.
    pub(super) failure: Option<LaunchError>,
    pub(super) executions: u64,
    pub(super) last_used: Instant,
    pub(super) memory: Option<u64>,
    /// What can be undone, the nearest first.
    pub(super) undoable: Vec<Undoable>,
    pub(super) rules: Rules,
    /// Folders of packages that were added to it, the latest first.
    pub(super) packages: Vec<String>,
    /// Requirements that calls installed, or found to be there already.
    pub(super) requested: Vec<String>,
    /// What a person has allowed for this session.
    pub(super) granted: Memory,
    /// Tools of other servers that it may use.
    pub(super) grants: Grants,
}

impl Shared {
    pub(super) fn new(outputs: SessionOutputs) -> Shared {
        let now = Instant::now();
        let facts = Facts {
            state: "starting",
            ended: None,
            failure: None,
            executions: 0,
            last_used: now,
            memory: None,
            undoable: Vec::new(),
            rules: Rules::none(),
            packages: Vec::new(),
            requested: Vec::new(),
            granted: Memory::default(),
            grants: Grants::default(),
        };
        Shared {
            facts: Mutex::new(facts),
            outputs,
            installs: Mutex::default(),
            docket: Arc::default(),
            created: now,
        }
    }

    pub(super) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts
            .lock()
            .expect("nothing panics while it holds the facts")
    }

    pub(super) fn installs(&self) -> MutexGuard<'_, Vec<WaitingInstall>> {
        self.installs
            .lock()
            .expect("nothing panics while it holds the installations")
    }

    /// Notes that somebody has asked for something.
    pub(super) fn touch(&self) {
        self.facts().last_used = Instant::now();
    }

    /// Returns the bytes of outputs that are kept, whole and for somebody to collect.
    pub(super) fn kept_bytes(&self) -> u64 {
        self.outputs.bytes() + self.docket.kept_bytes()
    }
}

/// Whose session it is, as far as that counts.
pub(super) struct Customer {
    pub(super) owner: Principal,
    /// The session under whose name its executions are recorded. For a variant that is the session
    /// that it is a copy of.
    pub(super) session: SessionId,
    pub(super) accounts: Arc<Accounts>,
    pub(super) turns: Turns,
    pub(super) ledger: Arc<Ledger>,
}

/// How a session left, told to the manager before anybody who still waits is answered.
pub(super) type OnGone = Box<dyn FnOnce(Option<String>) + Send>;

/// What a session begins with.
pub(super) struct Beginning {
    pub(super) id: SessionId,
    /// `None` for work of the server's own, which counts against nobody.
    pub(super) customer: Option<Customer>,
    pub(super) origin: Origin,
    pub(super) settings: SessionSettings,
    pub(super) numbers: Arc<AtomicU64>,
    pub(super) shared: Arc<Shared>,
}

/// Runs a session until it is gone.
pub(super) async fn drive(
    beginning: Beginning,
    commands: mpsc::Receiver<Command>,
    on_gone: OnGone,
) {
    let Beginning {
        id,
        customer,
        origin,
        settings,
        numbers,
        shared,
    } = beginning;
    let seed = if let Origin::Variant { seed, .. } = origin {
        Some(seed)
    } else {
        None
    };
    let (future, note): (
        Pin<Box<dyn Future<Output = Finished> + Send>>,
        Option<String>,
    ) = match origin {
        Origin::Launch(backend) => {
            let note = match settings.work_folder {
                WorkFolder::Private => {
                    "This is a new session: no variables or files from before exist."
                }
                WorkFolder::Shared => "This is a new session: no variables from before exist.",
            };
            (Box::pin(launch(backend)), Some(note.to_owned()))
        }
        Origin::Hidden { backend, rules } => (Box::pin(launch_hidden(backend, rules)), None),
        Origin::Fork { fork, note } => (Box::pin(branching::arrive(fork)), note),
        Origin::Variant { fork, .. } => (Box::pin(branching::arrive(fork)), None),
    };
    let machine = Machine::new(settings.undo != Undo::Off);
    // A session that was somebody's variant before has facts already.
    shared.facts().state = machine.state().name();
    let (names_wanted, wanted_names) = mpsc::channel(MOST_NAMES_WANTED);
    let deliveries = Deliveries::new(&settings.tools);
    let driver = Driver {
        id,
        customer,
        metered: None,
        spent_before: Duration::ZERO,
        turn: None,
        crowded: None,
        machine,
        settings,
        numbers,
        commands,
        shared,
        waiting: HashMap::new(),
        running: None,
        live: None,
        sandbox: None,
        work: Some(Work {
            starts_first: true,
            future,
        }),
        history: History::default(),
        copying: None,
        no_copies: None,
        forking: None,
        forked: None,
        replacement: None,
        postponed: Vec::new(),
        ended: None,
        failure: None,
        nonsense: String::new(),
        exit: Exit::Unknown,
        notes: note.into_iter().collect(),
        late: LateText::default(),
        seed,
        questions: Questions::default(),
        parking: Parking::default(),
        names_wanted,
        wanted_names,
        deliveries,
        ceiling: None,
        narrowed: None,
        resets: Vec::new(),
        closers: Vec::new(),
        expired: false,
    };
    driver.run(on_gone).await;
}

fn cpu_account(sandbox: Option<&dyn Sandbox>) -> CpuAccount {
    let gauge = sandbox.map(|sandbox| sandbox.gauge());
    gauge
        .map(|gauge| CpuAccount {
            waits: gauge.cpu_waits(),
            used: gauge.processor_time(),
        })
        .unwrap_or_default()
}

/// Runs futures side by side until each is over.
pub(super) async fn all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut running = futures
        .into_iter()
        .map(|future| (Box::pin(future), None))
        .collect::<Vec<_>>();
    std::future::poll_fn(|context| {
        let mut waiting = false;
        for (future, result) in running.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(value) => *result = Some(value),
                Poll::Pending => waiting = true,
            }
        }
        if waiting {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    })
    .await;
    running
        .into_iter()
        .filter_map(|(_, result)| result)
        .collect()
}

/// Work on the sandbox that the loop does not wait for. It holds the sandbox and gives it back.
struct Work {
    starts_first: bool,
    future: Pin<Box<dyn Future<Output = Finished> + Send>>,
}

/// What came of it.
enum Finished {
    /// An interpreter that was started, or why not; and the sandbox, when there is one.
    Started(Option<Box<dyn Sandbox>>, Result<Box<Live>, LaunchError>),
    Copied(Box<dyn Sandbox>, Result<CheckpointId, CheckpointError>),
    Forked(Box<dyn Sandbox>, Result<Vec<Fork>, String>),
}

impl Finished {
    /// Keeps the sandbox only.
    fn into_sandbox(self) -> Option<Box<dyn Sandbox>> {
        match self {
            Finished::Started(sandbox, _) => sandbox,
            Finished::Copied(sandbox, _) | Finished::Forked(sandbox, _) => Some(sandbox),
        }
    }
}

struct Live {
    process: Box<dyn Process>,
    /// `None` once the channel is closed; then the exit is awaited until the given time.
    connection: Result<Connection, Instant>,
    /// A copy of the state in which it began, until it is in the history.
    beginning: Option<CheckpointId>,
    /// What a copy has from its source.
    inheritance: Inheritance,
    /// The files of the session went with its former sandbox.
    files_lost: bool,
}

/// What a copy takes along that its interpreter does not know.
#[derive(Clone, Default)]
struct Inheritance {
    /// Folders of packages, the latest first.
    packages: Vec<String>,
    /// What the operator allows.
    ceiling: Option<Rules>,
    /// What a person has allowed.
    granted: Memory,
    /// Tools that it may use; `None` when the interpreter is no copy.
    grants: Option<Grants>,
    /// Packages of servers lie in its working folder.
    tools: bool,
}

async fn launch(backend: Arc<dyn Backend>) -> Finished {
    begin(backend.launch().await).await
}

async fn begin(launched: Result<(Box<dyn Sandbox>, Interpreter), LaunchError>) -> Finished {
    match launched {
        Ok((mut sandbox, interpreter)) => match greet(interpreter).await {
            Ok(live) => Finished::Started(Some(sandbox), Ok(live)),
            Err(error) => {
                sandbox.destroy().await;
                Finished::Started(None, Err(error))
            }
        },
        Err(error) => Finished::Started(None, Err(error)),
    }
}

async fn launch_hidden(backend: Arc<dyn Backend>, rules: Rules) -> Finished {
    let launched = begin(backend.launch_apart().await).await;
    if let Finished::Started(Some(sandbox), Ok(_)) = &launched {
        sandbox.set_rules(rules);
    }
    launched
}

async fn restart(mut sandbox: Box<dyn Sandbox>) -> Finished {
    match sandbox.restart().await {
        Ok(interpreter) => {
            let live = greet(interpreter).await;
            Finished::Started(Some(sandbox), live)
        }
        Err(error) => Finished::Started(Some(sandbox), Err(error)),
    }
}

async fn greet(interpreter: Interpreter) -> Result<Box<Live>, LaunchError> {
    match within(
        GREETING_PATIENCE,
        Connection::open(interpreter.channel, interpreter.skew),
    )
    .await
    {
        Some(Ok(connection)) => Ok(Box::new(Live {
            process: interpreter.process,
            connection: Ok(connection),
            beginning: interpreter.beginning,
            inheritance: Inheritance::default(),
            files_lost: interpreter.files_lost,
        })),
        Some(Err(error)) => {
            interpreter.process.kill();
            Err(LaunchError::Start {
                why: error.to_string(),
            })
        }
        None => {
            interpreter.process.kill();
            Err(LaunchError::TimedOut(GREETING_PATIENCE))
        }
    }
}

/// The request that runs.
struct Running {
    id: RequestId,
    task: Task,
    begun: Instant,
    /// When the next patience ends: the time limit, then the grace; for files, the time without progress.
    deadline: Instant,
    /// How long the code may take to react to the interrupt, once it has been asked to stop.
    reaction: Option<ReactionLimit>,
    /// It was interrupted for the last time.
    has_last_chance: bool,
}

/// What is known of a cell that has ended, beside its output.
struct EndedCell {
    code: [u8; 32],
    recorder: RecorderId,
    begun: Instant,
    status: Status,
    done: Option<Box<DoneClaim>>,
    tool_calls: ToolCalls,
    rulings: Vec<Ruling>,
    max_output_chars: usize,
}

enum Task {
    Cell {
        gatherer: Box<Gatherer>,
        begun_inside: bool,
        request: ExecuteRequest,
        /// The SHA-256 of its code, which the request no longer holds.
        code: [u8; 32],
        done: Option<Box<DoneClaim>>,
        teller: Teller,
        /// What was told of its text while it runs.
        seen: Seen,
    },
    Write {
        path: InsidePath,
        source: SpooledTempFile,
        all_sent: bool,
        result: Option<Result<u64, Refused>>,
        reply: oneshot::Sender<Result<u64, Refused>>,
    },
    Packages {
        paths: Vec<String>,
        result: Option<Result<LoadedModules, Refused>>,
        reply: oneshot::Sender<Result<LoadedModules, Refused>>,
    },
    Read {
        path: InsidePath,
        limit: u64,
        received: Received,
        result: Option<Result<(), Refused>>,
        reply: oneshot::Sender<Result<Received, Refused>>,
    },
    List {
        result: Option<Result<FileList, Refused>>,
        reply: oneshot::Sender<Result<FileList, Refused>>,
    },
}

struct Driver {
    id: SessionId,
    customer: Option<Customer>,
    /// Counts what the sandbox uses.
    metered: Option<Metered>,
    /// Processor time that the sandbox had used when the running cell began.
    spent_before: Duration,
    /// The place in which the cell runs, or the ticket with which it waits for one.
    turn: Option<Turn>,
    /// Why there was no ticket, the last time there was none.
    crowded: Option<Crowded>,
    settings: SessionSettings,
    /// Where numbers for frames come from.
    numbers: Arc<AtomicU64>,
    commands: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    machine: Machine,
    waiting: HashMap<RequestId, Job>,
    running: Option<Running>,
    live: Option<Live>,
    /// `None` while some work has it.
    sandbox: Option<Box<dyn Sandbox>>,
    work: Option<Work>,
    history: History,
    copying: Option<Copying>,
    /// Why sessions cannot be copied here, once that is known.
    no_copies: Option<String>,
    /// The request for forks that is being carried out, and what came of it.
    forking: Option<(RequestId, oneshot::Sender<Result<Forked, Refused>>)>,
    forked: Option<Result<Forked, String>>,
    replacement: Option<Replacement>,
    /// What waits for the end of a copy that nobody asked for.
    postponed: Vec<Command>,
    /// Why the interpreter is gone, as the end of "this session ended because …".
    ended: Option<String>,
    failure: Option<LaunchError>,
    nonsense: String,
    exit: Exit,
    /// What the next execution's reader must know.
    notes: Vec<String>,
    /// What code of earlier cells has printed, for the next execution's reader.
    late: LateText,
    /// What random generators that nobody has seeded are given before each cell.
    seed: Option<u64>,
    questions: Questions,
    parking: Parking,
    /// Connections to names that no rule lists, as the gateway reports them.
    wanted_names: mpsc::Receiver<ConnectionWanted>,
    /// What the gateway is given for that.
    names_wanted: mpsc::Sender<ConnectionWanted>,
    deliveries: Deliveries,
    /// What the operator lets sessions reach, once there is a sandbox to tell.
    ceiling: Option<Rules>,
    /// What this session may reach, if somebody has said so.
    narrowed: Option<Rules>,
    resets: Vec<(oneshot::Sender<Result<ResetReport, Refused>>, bool)>,
    closers: Vec<oneshot::Sender<()>>,
    expired: bool,
}

/// What the loop woke up for.
enum Wake {
    Command(Option<Command>),
    Runner(Result<runner_client::Event, runner_client::ConnectionError>),
    Exit(Exit),
    Finished(Finished),
    /// The sandbox watches the interpreter that is to be copied, or will not.
    Told(bool),
    /// A question of the running cell has its answer.
    Answered(Answered),
    /// Code wants to connect to a name that no rule lists.
    NameWanted(ConnectionWanted),
    /// Servers were registered or are gone.
    ToolsChanged,
    /// There is a place for the cell that waits for one.
    Turn,
    Time,
}

impl Driver {
    async fn run(mut self, on_gone: OnGone) {
        info!(session = self.id.as_str(), "session begins");
        while self.machine.state() != State::Gone {
            match self.wake().await {
                Wake::Command(Some(command)) => self.command(command),
                Wake::Command(None) => self.happen(Event::LeaveAsked),
                Wake::Runner(Ok(event)) => self.heard(event),
                Wake::Runner(Err(error)) => self.broken(error.to_string()),
                Wake::Exit(exit) => self.exited(exit),
                Wake::Finished(finished) => self.finished_work(finished),
                Wake::Told(watched) => self.told(watched),
                Wake::Answered(answered) => self.answer_question(answered),
                Wake::NameWanted(wanted) => self.wants_name(wanted),
                Wake::ToolsChanged => self.give_tools(),
                Wake::Turn => self.happen(Event::TurnCame),
                Wake::Time => self.time(),
            }
        }
        self.leave(on_gone).await;
    }

    async fn wake(&mut self) -> Wake {
        let moment = self.next_moment();
        let (process, connection) = match &mut self.live {
            Some(live) => (Some(&mut live.process), live.connection.as_mut().ok()),
            None => (None, None),
        };
        let is_idle = self.machine.state() == State::Idle && connection.is_some();
        let can_answer = connection
            .as_ref()
            .is_some_and(|connection| !connection.is_sending());
        let work = self.work.as_mut();
        let told = self
            .copying
            .as_mut()
            .and_then(|copying| copying.told.as_mut());
        let turn = self.turn.as_mut().filter(|turn| !turn.is_here());
        tokio::select! {
            command = self.commands.recv() => Wake::Command(command),
            event = async { connection.expect("guarded").next().await }, if connection.is_some() => Wake::Runner(event),
            exit = async { process.expect("guarded").exited().await }, if process.is_some() => Wake::Exit(exit),
            finished = async { (&mut work.expect("guarded").future).await }, if work.is_some() => Wake::Finished(finished),
            told = async { told.expect("guarded").await }, if told.is_some() => Wake::Told(told.is_ok()),
            // What the channel does not take is not asked for: answers wait where they are made.
            answered = self.questions.next(), if can_answer => Wake::Answered(answered),
            Some(wanted) = self.wanted_names.recv() => Wake::NameWanted(wanted),
            () = self.deliveries.changed(), if is_idle => Wake::ToolsChanged,
            () = async { turn.expect("guarded").come().await }, if turn.is_some() => Wake::Turn,
            () = tokio::time::sleep_until(moment) => Wake::Time,
        }
    }

    /// Returns when something must happen although nobody says anything.
    fn next_moment(&self) -> Instant {
        let running = match self.parking.holds_the_clock() {
            true => self.parking.due(),
            false => self.running.as_ref().map(|running| running.deadline),
        };
        let exit = self
            .live
            .as_ref()
            .and_then(|live| live.connection.as_ref().err().copied());
        let expiry = match self.machine.state() {
            State::Idle | State::Ended => Some(
                self.shared.facts().last_used + self.settings.idle_timeout.min(LONGEST_TIMEOUT),
            ),
            _ => None,
        };
        [running, exit, expiry, self.answer_due()]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or_else(|| Instant::now() + LONGEST_TIMEOUT)
    }

    fn time(&mut self) {
        let now = Instant::now();
        if let Some(Live {
            connection: Err(until),
            ..
        }) = &self.live
            && *until <= now
        {
            self.exited(Exit::Unknown);
            return;
        }
        if self.answer_due().is_some_and(|due| due <= now) {
            return self.copied();
        }
        if self.parking.holds_the_clock() {
            if self.parking.due().is_some_and(|due| due <= now) {
                self.nobody_answered();
            }
            return;
        }
        if let Some(running) = &mut self.running {
            if running.deadline > now {
                return;
            }
            match (&running.task, self.machine.state()) {
                (Task::Cell { .. }, State::Running { stopping: None, .. }) => {
                    self.happen(Event::TimeIsUp)
                }
                (
                    _,
                    State::Running {
                        stopping: Some(_), ..
                    },
                ) => {
                    self.hear_what_has_come();
                    let (
                        Some(running),
                        State::Running {
                            stopping: Some(_), ..
                        },
                    ) = (&mut self.running, self.machine.state())
                    else {
                        return;
                    };
                    let account = cpu_account(self.sandbox.as_deref());
                    if let Some(left) = running
                        .reaction
                        .as_ref()
                        .and_then(|reaction| reaction.left(&account))
                    {
                        running.deadline = now + left;
                        return;
                    }
                    if !running.has_last_chance
                        && let Some(live) = &self.live
                    {
                        running.has_last_chance = true;
                        let limit = LAST_CHANCE.min(self.settings.grace);
                        running.reaction = Some(ReactionLimit::begin(limit, account));
                        running.deadline = now + limit;
                        live.process.interrupt();
                        return;
                    }
                    self.ended = Some(
                        "its code ignored the interrupt and Python was stopped; variables are gone, files in the working folder \
                         are kept".to_owned(),
                    );
                    self.happen(Event::GraceIsOver);
                }
                _ => self.broken(format!(
                    "no progress with a file for {} s",
                    FILE_PATIENCE.as_secs()
                )),
            }
            return;
        }
        if matches!(self.machine.state(), State::Idle | State::Ended) && self.next_moment() <= now {
            self.expired = true;
            self.happen(Event::LeaveAsked);
        }
    }

    fn command(&mut self, command: Command) {
        self.shared.touch();
        match command {
            // A list is for looking around; nobody wants to wait for a cell with it.
            Command::Submit(_, Job::List { reply }) if self.machine.has_cell() => {
                let running = Refused::CellRunning {
                    id: self.id.clone(),
                    then: "list its files",
                };
                let _ = reply.send(Err(running));
            }
            Command::Submit(id, job) => {
                let kind = job.kind();
                self.waiting.insert(id, job);
                self.happen(Event::Submitted(id, kind));
            }
            Command::Cancel(id) => self.happen(Event::CancelAsked(id)),
            Command::Look {
                request,
                max_chars,
                reply,
            } => self.look(request, max_chars, reply),
            Command::Decide {
                request,
                decisions,
                reply,
            } => {
                let rulings = self.decide(request, decisions);
                let _ = reply.send(rulings);
            }
            Command::Reset(reply) => {
                let interrupted = matches!(
                    self.running,
                    Some(Running {
                        task: Task::Cell { .. },
                        ..
                    })
                );
                self.resets.push((reply, interrupted));
                self.hear_the_rest();
                self.happen(Event::ResetAsked);
            }
            Command::Undo { cells, reply } => self.undo(cells, reply),
            Command::Adopt { fork, note, reply } => self.adopt(fork, note, reply),
            Command::Surrender(reply) => {
                let given = self.surrender();
                self.happen(Event::LeaveAsked);
                let _ = reply.send(given);
            }
            Command::Leave(reply) => {
                self.closers.push(reply);
                self.hear_the_rest();
                self.happen(Event::LeaveAsked);
            }
        }
    }

    /// Lets the machine decide and does what it says.
    fn happen(&mut self, event: Event) {
        let actions = self.machine.next(event);
        // Before anybody gets an answer: who has one finds the state that it tells of.
        self.publish();
        for action in actions {
            match action {
                Action::AskTurn => self.ask_turn(),
                Action::Start(id) => self.start(id),
                Action::Copy => self.copy(None),
                Action::Fork(id) => self.fork(id),
                Action::Interrupt => self.interrupt(),
                Action::Kill => self.kill(),
                Action::Answer(id, answer) => self.answer(id, answer),
                Action::Restart => self.restart(),
                Action::Replace => self.replace(),
                Action::RefuseReplacement => self.refuse_replacement(),
            }
        }
        // Whatever else happened, a place is held for a cell only.
        match self.machine.state() {
            State::Running {
                kind: Kind::Cell, ..
            } => {}
            State::Waiting => {
                if let Some(Job::Execute { teller, .. }) =
                    self.machine.first().and_then(|id| self.waiting.get(&id))
                {
                    teller.hold();
                }
            }
            _ => self.turn = None,
        }
    }

    /// Gets in line for a place in which the next cell can run. Work of the server's own needs none.
    fn ask_turn(&mut self) {
        // The place of the cell before goes to whoever is next; that may be this session.
        self.turn = None;
        let asked = self
            .customer
            .as_ref()
            .map(|customer| customer.turns.ask(&customer.owner));
        match asked.transpose() {
            Ok(turn) => {
                let is_here = turn.as_ref().is_none_or(Turn::is_here);
                self.turn = turn;
                if is_here {
                    self.happen(Event::TurnCame);
                }
            }
            Err(crowded) => {
                self.crowded = Some(crowded);
                self.happen(Event::TurnRefused);
            }
        }
    }

    /// Shows everybody what the session is doing.
    fn publish(&self) {
        let state = self.machine.state();
        let mut facts = self.shared.facts();
        facts.state = state.name();
        facts.ended = if state == State::Ended {
            self.ended.clone()
        } else {
            None
        };
    }

    fn start(&mut self, id: RequestId) {
        let Some(job) = self.waiting.remove(&id) else {
            return;
        };
        let begun = Instant::now();
        let (task, deadline, header, payload) = match job {
            Job::Execute {
                mut request,
                teller,
            } => {
                if let Some(Err(refused)) = request.rules.take().map(|rules| self.narrow(rules)) {
                    teller.end(Err(refused));
                    return self.happen(Event::Declined(id));
                }
                if let Some(sandbox) = &self.sandbox {
                    sandbox.forget_peak();
                    self.spent_before = sandbox.gauge().processor_time();
                }
                self.shared.facts().executions += 1;
                let code = std::mem::take(&mut request.code);
                let digest = Sha256::digest(&code).into();
                self.remember(&code);
                let deadline = begun + request.timeout.min(LONGEST_TIMEOUT);
                let gatherer = Box::new(Gatherer::new(request.max_output_chars));
                teller.begin(begun);
                self.questions.begin_cell();
                let seen = Seen::default();
                let task = Task::Cell {
                    gatherer,
                    begun_inside: false,
                    request,
                    code: digest,
                    done: None,
                    teller,
                    seen,
                };
                let mut header = json!({"type": "execute", "id": id});
                if let Some(seed) = self.seed {
                    header["seed"] = seed.into();
                }
                (task, deadline, header, code.into_bytes())
            }
            Job::Write {
                path,
                overwrite,
                source,
                reply,
            } => {
                let header = json!({"type": "write_begin", "id": id, "path": path.as_str(), "overwrite": overwrite});
                let task = Task::Write {
                    path,
                    source,
                    all_sent: false,
                    result: None,
                    reply,
                };
                (task, begun + FILE_PATIENCE, header, Vec::new())
            }
            Job::Packages { paths, reply } => {
                let header = json!({"type": "packages", "id": id, "paths": paths});
                let task = Task::Packages {
                    paths,
                    result: None,
                    reply,
                };
                (task, begun + FILE_PATIENCE, header, Vec::new())
            }
            // The machine starts it by another action.
            Job::Fork { .. } => return,
            Job::Read { path, what, reply } => {
                let (header, limit) = match what {
                    Extent::Whole { limit } => (
                        json!({"type": "read_file", "id": id, "path": path.as_str(), "limit": limit}),
                        limit,
                    ),
                    Extent::Part { offset, length } => {
                        let (path, kind) = (path.as_str(), "read_file");
                        (
                            json!({"type": kind, "id": id, "path": path, "offset": offset, "length": length}),
                            length,
                        )
                    }
                };
                let bytes = SpooledTempFile::new(STAGED_IN_MEMORY);
                let received = Received {
                    bytes,
                    sent: 0,
                    total: 0,
                    version: String::new(),
                };
                let task = Task::Read {
                    path,
                    limit,
                    received,
                    result: None,
                    reply,
                };
                (task, begun + FILE_PATIENCE, header, Vec::new())
            }
            Job::List { reply } => {
                let header = json!({"type": "list_files", "id": id, "limit": MOST_LISTED});
                (
                    Task::List {
                        result: None,
                        reply,
                    },
                    begun + FILE_PATIENCE,
                    header,
                    Vec::new(),
                )
            }
        };
        self.running = Some(Running {
            id,
            task,
            begun,
            deadline,
            reaction: None,
            has_last_chance: false,
        });
        self.give_tools();
        self.send(&header, &payload);
        self.send_file();
    }

    /// Tells what the running cell has printed. Who went away meanwhile has not seen it.
    fn look(
        &mut self,
        request: RequestId,
        max_chars: usize,
        reply: oneshot::Sender<Option<Glance>>,
    ) {
        let glance = match &mut self.running {
            Some(Running {
                id,
                task: Task::Cell { gatherer, seen, .. },
                ..
            }) if *id == request && !reply.is_closed() => Some(gatherer.glance(seen, max_chars)),
            _ => None,
        };
        let _ = reply.send(glance);
    }

    /// Puts a cell that begins into the history.
    fn remember(&mut self, code: &str) {
        let Undo::On { checkpoints, .. } = self.settings.undo else {
            return;
        };
        self.look_after_copies();
        self.give_up_for_memory();
        let forgotten = self.history.began(code, checkpoints);
        self.forget(forgotten);
        self.show_history();
    }

    fn fork(&mut self, id: RequestId) {
        let Some(Job::Fork { wanted, reply }) = self.waiting.remove(&id) else {
            return;
        };
        self.forking = Some((id, reply));
        self.copy(Some(wanted));
    }

    /// Sends a frame. A channel that is closed takes nothing; the exit is noticed elsewhere.
    fn send(&mut self, header: &serde_json::Value, payload: &[u8]) {
        if let Some(Live {
            connection: Ok(connection),
            ..
        }) = &mut self.live
            && let Err(error) = connection.send(header, payload)
        {
            debug!(session = self.id.as_str(), %error, "a frame could not be sent");
        }
    }

    /// Sends the next chunks of an upload as long as the socket takes them at once.
    fn send_file(&mut self) {
        loop {
            let Some(Running {
                id,
                task:
                    Task::Write {
                        source,
                        all_sent,
                        result,
                        ..
                    },
                deadline,
                ..
            }) = &mut self.running
            else {
                return;
            };
            let sending = matches!(&self.live, Some(Live { connection: Ok(connection), .. }) if connection.is_sending());
            if *all_sent || result.is_some() || sending {
                return;
            }
            let id = *id;
            *deadline = Instant::now() + FILE_PATIENCE;
            let mut chunk = Vec::with_capacity(CHUNK);
            match source.take(CHUNK as u64).read_to_end(&mut chunk) {
                Ok(0) => {
                    *all_sent = true;
                    self.send(&json!({"type": "write_end", "id": id}), b"");
                }
                Ok(_) => self.send(&json!({"type": "write_data", "id": id}), &chunk),
                // Our own staging file cannot be read. Without `write_end` the runner keeps nothing, and cannot be asked anything else.
                Err(error) => {
                    return self.broken(format!(
                        "an upload could not be continued: {}",
                        error.kind()
                    ));
                }
            }
        }
    }

    /// Asks the running code to stop. Before the code has begun inside, a signal would be lost; then `take` sends it when the code begins.
    fn interrupt(&mut self) {
        self.give_up_questions();
        let Some(running) = &mut self.running else {
            return;
        };
        running.deadline = Instant::now() + self.settings.grace;
        running.reaction = Some(ReactionLimit::begin(
            self.settings.grace,
            cpu_account(self.sandbox.as_deref()),
        ));
        if let Some(live) = &self.live
            && !matches!(
                running.task,
                Task::Cell {
                    begun_inside: false,
                    ..
                }
            )
        {
            live.process.interrupt();
        }
    }

    /// Ends the interpreter and takes what it has written until now.
    fn kill(&mut self) {
        let Some(mut live) = self.live.take() else {
            return;
        };
        live.process.kill();
        if let Ok(connection) = &mut live.connection {
            self.last_words(connection);
        }
    }

    fn restart(&mut self) {
        let copies = self.forget_the_past();
        // The connection goes first: what the old interpreter says from now on is of no interest.
        self.live = None;
        let (sandbox, work) = (self.sandbox.take(), self.work.take());
        let future = async move {
            let sandbox = match (sandbox, work) {
                (Some(sandbox), _) => Some(sandbox),
                (None, Some(work)) => work.future.await.into_sandbox(),
                (None, None) => None,
            };
            match sandbox {
                Some(sandbox) => {
                    copies
                        .into_iter()
                        .for_each(|checkpoint| sandbox.forget(checkpoint));
                    restart(sandbox).await
                }
                None => Finished::Started(
                    None,
                    Err(LaunchError::Start {
                        why: "its sandbox is gone".to_owned(),
                    }),
                ),
            }
        };
        self.work = Some(Work {
            starts_first: false,
            future: Box::pin(future),
        });
    }

    fn finished_work(&mut self, finished: Finished) {
        self.work = None;
        match finished {
            Finished::Started(sandbox, live) => self.started(sandbox, live),
            Finished::Copied(sandbox, copy) => self.copy_made(sandbox, copy),
            Finished::Forked(sandbox, forks) => self.forks_made(sandbox, forks),
        }
    }

    fn started(&mut self, sandbox: Option<Box<dyn Sandbox>>, live: Result<Box<Live>, LaunchError>) {
        self.sandbox = sandbox;
        match live {
            Ok(live) => {
                self.inherit(&live.inheritance);
                self.deliveries.forget();
                let carried = match &live.connection {
                    Ok(connection) => connection.carried().clone(),
                    Err(_) => Carried::default(),
                };
                let Live {
                    process,
                    connection,
                    beginning,
                    files_lost,
                    ..
                } = *live;
                let inheritance = Inheritance::default();
                self.live = Some(Live {
                    process,
                    connection,
                    beginning: None,
                    inheritance,
                    files_lost: false,
                });
                (self.ended, self.exit) = (None, Exit::Unknown);
                self.failure = None;
                self.shared.facts().failure = None;
                self.replaced(&carried);
                let copied = self.keep_beginning(beginning, &carried);
                if !self.resets.is_empty() {
                    self.give_packages_again();
                }
                for (reply, interrupted_running_cell) in self.resets.drain(..) {
                    let _ = reply.send(Ok(ResetReport {
                        interrupted_running_cell,
                        files_kept: !files_lost,
                        had_no_session: false,
                    }));
                    let files = if files_lost {
                        "and so are files"
                    } else {
                        "files are kept"
                    };
                    self.notes = vec![format!(
                        "Python was started anew: variables from before the reset are gone, {files}."
                    )];
                }
                self.happen(Event::Started { copied });
            }
            Err(error) => {
                debug!(session = self.id.as_str(), %error, "no interpreter could be started");
                let left = match self.exit.files_kept() {
                    true => "files in the working folder are kept",
                    false => "variables and files are gone",
                };
                self.ended = Some(format!(
                    "Python could not be started again ({error}); {left}"
                ));
                self.replacement_failed(&error);
                for (reply, _) in self.resets.drain(..) {
                    let _ = reply.send(Err(Refused::Launch(error.clone())));
                }
                self.shared.facts().failure = Some(error.clone());
                self.failure = Some(error);
                self.happen(Event::StartFailed);
            }
        }
    }

    /// Takes over what a copy has from its source, and sees to the rules of the sandbox that has just come.
    fn inherit(&mut self, inheritance: &Inheritance) {
        let Some(sandbox) = &self.sandbox else { return };
        // The old one first, so that its last reading is taken.
        self.metered = None;
        self.metered = self.customer.as_ref().map(|customer| {
            let number = self.numbers.fetch_add(1, Ordering::Relaxed);
            customer
                .accounts
                .follow(&customer.owner, number, sandbox.gauge())
        });
        if !inheritance.packages.is_empty() {
            self.shared.facts().packages = inheritance.packages.clone();
        }
        self.shared.facts().granted.inherit(&inheritance.granted);
        self.deliveries
            .inherit(inheritance.grants.clone(), inheritance.tools);
        self.shared.facts().grants = self.deliveries.grants.clone();
        // A fresh sandbox has what the operator allows, no more and no less.
        let allowed = inheritance.ceiling.clone().or(self.ceiling.take());
        self.ceiling = Some(allowed.unwrap_or_else(|| sandbox.rules()));
        if let Some(rules) = &self.narrowed {
            sandbox.set_rules(rules.clone());
        }
        // Also where nobody would be asked now: the policy may be another one tomorrow.
        if self.customer.is_some() {
            let asker = NameAsker::new(&self.settings.approvals, &self.names_wanted);
            sandbox.set_asker(Some(Arc::new(asker)));
        }
        self.shared.facts().rules = sandbox.rules();
    }

    /// Returns what a copy is to take along.
    fn inheritance(&self) -> Inheritance {
        let facts = self.shared.facts();
        Inheritance {
            packages: facts.packages.clone(),
            ceiling: self.ceiling.clone(),
            granted: facts.granted.clone(),
            grants: Some(self.deliveries.grants.clone()),
            tools: self.deliveries.has_any(),
        }
    }

    /// Changes what can be reached, from the cell on that is about to start. Refuses what is beyond
    /// what the operator allows.
    fn narrow(&mut self, rules: Rules) -> Result<(), Refused> {
        let (Some(sandbox), Some(ceiling)) = (&self.sandbox, &self.ceiling) else {
            return Err(Refused::Launch(LaunchError::Start {
                why: "its sandbox is gone".to_owned(),
            }));
        };
        let rules = rules.under_denials_of(ceiling);
        if let Some(rule) = rules.beyond(ceiling) {
            return Err(Refused::BeyondRules {
                rule: rule.to_string(),
            });
        }
        sandbox.set_rules(rules.clone());
        self.shared.facts().rules = sandbox.rules();
        self.narrowed = Some(rules);
        Ok(())
    }

    fn exited(&mut self, exit: Exit) {
        let Some(mut live) = self.live.take() else {
            return;
        };
        // The main process is gone; whatever it started goes with it.
        live.process.kill();
        if let Ok(connection) = &mut live.connection {
            self.last_words(connection);
        }
        info!(session = self.id.as_str(), ?exit, "interpreter ended");
        self.exit = exit;
        self.ended = Some(ended_by(exit));
        if matches!(exit, Exit::SandboxGone { .. }) || !exit.files_kept() {
            // The kept states went with the sandbox.
            self.history.clear();
            self.show_history();
        }
        self.happen(Event::InterpreterGone);
        // Nobody is left to answer; a copy that was made is as good as ever.
        if self.answer_due().is_some() {
            self.copied();
        }
    }

    /// Takes what the running request has written until now, because its interpreter is about to be ended from outside.
    fn hear_the_rest(&mut self) {
        if self.running.is_none() {
            return;
        }
        let Some(mut live) = self.live.take() else {
            return;
        };
        if let Ok(connection) = &mut live.connection {
            self.last_words(connection);
        }
        self.live = Some(live);
    }

    /// Takes what has come already. A server that wakes up late finds the answer and the end of the
    /// time together, and the answer came first.
    fn hear_what_has_come(&mut self) {
        for _ in 0..MOST_HEARD_AT_ONCE {
            let Some(Live {
                connection: Ok(connection),
                ..
            }) = &mut self.live
            else {
                return;
            };
            let mut context = Context::from_waker(Waker::noop());
            let next = std::pin::pin!(connection.next()).poll(&mut context);
            match next {
                Poll::Ready(Ok(event)) => self.heard(event),
                Poll::Ready(Err(error)) => return self.broken(error.to_string()),
                Poll::Pending => return,
            }
            if self.running.is_none() {
                return;
            }
        }
    }

    /// Takes what was written before the end. It is complete when this returns, and nothing waits.
    fn last_words(&mut self, connection: &mut Connection) {
        if connection.hang_up().is_err() {
            return;
        }
        while let Ok(Some(event)) = connection.next_now() {
            match event {
                runner_client::Event::Closed => return,
                event => self.take(event),
            }
        }
    }

    fn broken(&mut self, what: String) {
        warn!(
            session = self.id.as_str(),
            what, "the runner broke the protocol"
        );
        self.ended = Some(format!(
            "its Python process did not keep to the protocol ({what}) and was stopped; variables are gone, files in the \
             working folder are kept"
        ));
        self.nonsense = what;
        self.happen(Event::ProtocolBroken);
    }

    fn heard(&mut self, event: runner_client::Event) {
        match event {
            runner_client::Event::Closed => {
                if let Some(live) = &mut self.live {
                    live.connection = Err(Instant::now() + EXIT_PATIENCE);
                }
            }
            runner_client::Event::Sent => self.send_file(),
            event => {
                self.take(event);
                if let Some(id) = self.finished() {
                    if self.has_changed() {
                        self.changed();
                    }
                    self.happen(Event::Finished(id));
                }
            }
        }
    }

    /// Takes a piece of the running request's result. Text that belongs to no running cell is late, and everything
    /// else that belongs to no running request is dropped.
    fn take(&mut self, event: runner_client::Event) {
        if let runner_client::Event::Claim(Claim::Branched { id, branched }) = event {
            return self.branched(id, branched);
        }
        if let runner_client::Event::Claim(Claim::Ask { id, ask, question }) = event {
            return self.asked(id, ask, question);
        }
        match &event {
            runner_client::Event::Claim(Claim::ToolsWritten { id })
                if self.delivered(*id, None) =>
            {
                return;
            }
            runner_client::Event::Claim(Claim::Failed { id, message, .. })
                if self.declined(*id, message) || self.delivered(*id, Some(message)) =>
            {
                return;
            }
            _ => {}
        }
        let event = match event {
            runner_client::Event::Stray { pipe, bytes } => return self.late.write(pipe, &bytes),
            runner_client::Event::Text { pipe, bytes } if !self.runs_inside() => {
                return self.late.write(pipe, &bytes);
            }
            event => event,
        };
        let Some(running) = &mut self.running else {
            return;
        };
        let id = running.id;
        match (&mut running.task, event) {
            (
                Task::Cell {
                    gatherer, teller, ..
                },
                runner_client::Event::Text { pipe, bytes },
            ) => {
                gatherer.text(pipe, &bytes);
                if teller.is_heard()
                    && let Some(line) = gatherer.latest_line()
                {
                    teller.print(line);
                }
            }
            (
                Task::Cell {
                    gatherer,
                    begun_inside,
                    done,
                    ..
                },
                runner_client::Event::Claim(claim),
            ) if done.is_none() => {
                match claim {
                    Claim::Started { id: claimed, .. } if claimed == id => {
                        *begun_inside = true;
                        if let (
                            State::Running {
                                stopping: Some(_), ..
                            },
                            Some(live),
                        ) = (self.machine.state(), &self.live)
                        {
                            live.process.interrupt();
                        }
                    }
                    Claim::Display {
                        id: claimed,
                        bundle,
                        display_id,
                        update,
                    } if claimed == id => gatherer.display(bundle, display_id, update),
                    Claim::Value {
                        id: claimed,
                        bundle,
                    } if claimed == id => gatherer.value(bundle),
                    Claim::Clear { id: claimed, wait } if claimed == id => gatherer.clear(wait),
                    // An end without a beginning was said by code of an earlier cell.
                    Claim::Done(claim) if claim.id == id && *begun_inside => *done = Some(claim),
                    _ => {}
                }
            }
            (Task::Write { path, result, .. }, runner_client::Event::Claim(claim)) => match claim {
                Claim::Written { id: claimed, size } if claimed == id => *result = Some(Ok(size)),
                Claim::Failed {
                    id: claimed,
                    reason,
                    message,
                } if claimed == id => *result = Some(Err(file_failed(path, reason, message))),
                _ => {}
            },
            (Task::Packages { result, .. }, runner_client::Event::Claim(claim)) => match claim {
                Claim::PackagesAdded {
                    id: claimed,
                    loaded,
                    preloaded,
                } if claimed == id => {
                    *result = Some(Ok(LoadedModules {
                        all: loaded,
                        preloaded,
                    }));
                }
                Claim::Failed {
                    id: claimed,
                    message,
                    ..
                } if claimed == id => {
                    *result = Some(Err(Refused::NotAdded { why: message }));
                }
                _ => {}
            },
            (Task::List { result, .. }, runner_client::Event::Claim(claim)) => match claim {
                Claim::FileList {
                    id: claimed,
                    entries,
                    omitted,
                } if claimed == id => {
                    *result = Some(Ok(file_list(entries, omitted)));
                }
                Claim::Failed {
                    id: claimed,
                    message,
                    ..
                } if claimed == id => {
                    *result = Some(Err(Refused::Transfer {
                        why: bounded_text(&message, 500),
                    }));
                }
                _ => {}
            },
            (
                Task::Read {
                    path,
                    limit,
                    received,
                    result,
                    ..
                },
                runner_client::Event::Claim(claim),
            ) => match claim {
                Claim::FileData { id: claimed, bytes } if claimed == id => {
                    running.deadline = Instant::now() + FILE_PATIENCE;
                    received.sent += bytes.len() as u64;
                    if received.sent > *limit {
                        return self
                            .broken("more bytes of a file were sent than asked for".to_owned());
                    }
                    if let Err(error) = received.bytes.write_all(&bytes) {
                        *result = Some(Err(Refused::Transfer {
                            why: error.kind().to_string(),
                        }));
                    }
                }
                Claim::FileEnd {
                    id: claimed,
                    size: told,
                    total,
                    version,
                } if claimed == id => {
                    (received.total, received.version) = (total, version);
                    // What was read counts. A different claim means that the file is not whole.
                    let whole = told == received.sent;
                    let short = || {
                        file_failed(
                            path,
                            Trouble::Other,
                            "it changed while it was read".to_owned(),
                        )
                    };
                    result.get_or_insert_with(|| if whole { Ok(()) } else { Err(short()) });
                }
                Claim::Failed {
                    id: claimed,
                    reason,
                    message,
                } if claimed == id => *result = Some(Err(file_failed(path, reason, message))),
                _ => {}
            },
            _ => {}
        }
    }

    /// Tells whether a cell has begun inside and has not claimed its end.
    fn runs_inside(&self) -> bool {
        let task = self.running.as_ref().map(|running| &running.task);
        matches!(
            task,
            Some(Task::Cell {
                begun_inside: true,
                done: None,
                ..
            })
        )
    }

    /// Returns the running request when the runner has claimed its end.
    fn finished(&self) -> Option<RequestId> {
        let running = self.running.as_ref()?;
        let finished = match &running.task {
            Task::Cell { done, .. } => done.is_some(),
            Task::Write { result, .. } => result.is_some(),
            Task::Packages { result, .. } => result.is_some(),
            Task::Read { result, .. } => result.is_some(),
            Task::List { result, .. } => result.is_some(),
        };
        finished.then_some(running.id)
    }

    /// Tells whether the request that has just ended may have changed the session's state.
    fn has_changed(&self) -> bool {
        match self.running.as_ref().map(|running| &running.task) {
            Some(Task::Cell {
                done: Some(done), ..
            }) => !done.unchanged,
            Some(Task::Write { result, .. }) => matches!(result, Some(Ok(_))),
            Some(Task::Packages { result, .. }) => matches!(result, Some(Ok(_))),
            Some(Task::Read { .. } | Task::List { .. }) | None => false,
            Some(Task::Cell { done: None, .. }) => true,
        }
    }

    fn answer(&mut self, id: RequestId, answer: Answer) {
        self.shared.facts().last_used = Instant::now();
        if let Some((_, reply)) = self.forking.take_if(|(forking, _)| *forking == id) {
            return self.answer_fork(answer, reply);
        }
        if let Some(job) = self.waiting.remove(&id) {
            refuse(job, self.refusal(answer));
            return;
        }
        let Some(running) = self.running.take_if(|running| running.id == id) else {
            return;
        };
        let tool_calls = self.questions.clear();
        let rulings = self.parking.clear();
        match running.task {
            Task::Cell {
                gatherer,
                request,
                code,
                done,
                teller,
                ..
            } => {
                let Ok(status) = self.status(answer, &request, done.as_deref()) else {
                    teller.end(Err(self.refusal(answer)));
                    return;
                };
                let ExecuteRequest {
                    recorder,
                    max_output_chars,
                    ..
                } = request;
                let begun = running.begun;
                let ended = EndedCell {
                    code,
                    recorder,
                    begun,
                    status,
                    done,
                    tool_calls,
                    rulings,
                    max_output_chars,
                };
                self.report(running.id, ended, *gatherer, teller);
            }
            Task::Write { result, reply, .. } => {
                let _ = reply.send(match (answer, result) {
                    (Answer::Finished | Answer::Stopped(_, StateAfter::Kept), Some(result)) => {
                        result
                    }
                    _ => Err(self.transfer_refusal(answer)),
                });
            }
            Task::Packages {
                paths,
                result,
                reply,
            } => {
                let added = matches!(
                    answer,
                    Answer::Finished | Answer::Stopped(_, StateAfter::Kept)
                );
                let result = result
                    .filter(|_| added)
                    .unwrap_or_else(|| Err(self.transfer_refusal(answer)));
                if result.is_ok() {
                    self.have(&paths);
                }
                let _ = reply.send(result);
            }
            Task::Read {
                mut received,
                result,
                reply,
                ..
            } => {
                let _ = reply.send(match (answer, result) {
                    (Answer::Finished | Answer::Stopped(_, StateAfter::Kept), Some(Ok(()))) => {
                        received.bytes.rewind().map(|()| received).map_err(|error| {
                            Refused::Transfer {
                                why: error.kind().to_string(),
                            }
                        })
                    }
                    (
                        Answer::Finished | Answer::Stopped(_, StateAfter::Kept),
                        Some(Err(refused)),
                    ) => Err(refused),
                    _ => Err(self.transfer_refusal(answer)),
                });
            }
            Task::List { result, reply } => {
                let _ = reply.send(match (answer, result) {
                    (Answer::Finished | Answer::Stopped(_, StateAfter::Kept), Some(result)) => {
                        result
                    }
                    _ => Err(self.transfer_refusal(answer)),
                });
            }
        }
    }

    /// Returns how an execution ended. `Err` when it never began.
    fn status(
        &self,
        answer: Answer,
        request: &ExecuteRequest,
        done: Option<&DoneClaim>,
    ) -> Result<Status, Refusal> {
        Ok(match answer {
            Answer::Finished => match done.and_then(|done| done.error.as_ref()) {
                Some(error) => Status::Raised(python_error(error, request.max_output_chars)),
                None => Status::Completed,
            },
            Answer::Stopped(Stop::TimedOut, state) => Status::TimedOut {
                limit: request.timeout,
                state,
            },
            Answer::Stopped(Stop::Cancelled, state) => Status::Cancelled { state },
            Answer::InterpreterGone => Status::Died { exit: self.exit },
            Answer::ProtocolBroken => Status::Nonsense {
                what: self.nonsense.clone(),
            },
            Answer::Reset => Status::Reset,
            Answer::Closed => Status::Closed,
            Answer::Refused(refusal) => return Err(refusal),
        })
    }

    /// Sends the outcome. Pictures are developed on another thread, and the session goes on meanwhile.
    fn report(&mut self, id: RequestId, ended: EndedCell, mut gatherer: Gatherer, teller: Teller) {
        let EndedCell {
            code,
            recorder,
            begun,
            status,
            mut done,
            tool_calls,
            rulings,
            max_output_chars,
        } = ended;
        if let Some(Live {
            connection: Ok(connection),
            ..
        }) = &mut self.live
        {
            connection
                .strays_now()
                .into_iter()
                .for_each(|(pipe, bytes)| self.late.write(pipe, &bytes));
        }
        if let Some(late) = done.as_mut().and_then(|done| done.late.take()) {
            self.late.add(&late.text, late.omitted);
        }
        let late = self.late.take(max_output_chars / LATE_SHARE);
        let duration = begun.elapsed();
        let execution = ExecutionId(id);
        let (error, variables, files) = match done {
            Some(done) => (
                done.error,
                done.variables.map(variable_changes),
                done.files.map(file_changes),
            ),
            None => (None, None, None),
        };
        if let Some(error) = error {
            gatherer.traceback(&error.traceback);
        }
        let (mut draft, full) = gatherer.finish();
        match full {
            Ok(full) => self.shared.outputs.keep(execution, full),
            Err(error) => {
                warn!(session = self.id.as_str(), %error, "the whole output could not be kept")
            }
        }
        let memory = self
            .sandbox
            .as_ref()
            .map(|sandbox| sandbox.memory())
            .unwrap_or_default();
        self.shared.facts().memory = Some(memory.now);
        let spent = self
            .sandbox
            .as_ref()
            .map(|sandbox| sandbox.gauge().processor_time())
            .unwrap_or_default();
        // A sandbox that is gone, or another one, has nothing to compare.
        let processor_time = spent.saturating_sub(self.spent_before);
        let isolation = self
            .sandbox
            .as_ref()
            .map(|sandbox| sandbox.isolation().clone())
            .unwrap_or_default();
        let blocked = self
            .sandbox
            .as_ref()
            .map(|sandbox| sandbox.take_blocked())
            .unwrap_or_default();
        let notes = self.notes_for(&status);
        // Before the caller hears of it, and whether or not anybody ever asks for the outcome.
        if let Some(Customer {
            owner,
            session,
            ledger,
            ..
        }) = &self.customer
        {
            let ended = ExecutionEnded {
                name: ledger.name_of(id),
                owner: owner.clone(),
                session: session.clone(),
                code,
                status: status.name(),
                duration,
                processor_time,
                memory_peak: memory.peak,
                blocked: blocked.clone(),
                tool_calls: tool_calls.clone(),
                rulings: rulings.clone(),
                taken_over: false,
            };
            ledger.enter(recorder, ended);
        }
        debug!(
            session = self.id.as_str(),
            outcome = status.name(),
            elapsed_ms = duration.as_millis(),
            "execution finished"
        );
        let outcome = move |output| Outcome {
            execution,
            status,
            output: Output { late, ..output },
            duration,
            memory,
            processor_time,
            variables,
            files,
            isolation,
            can_undo: 0,
            blocked,
            tool_calls,
            rulings,
            notes,
            first_line: String::new(),
            others: Others::default(),
        };
        let images = draft.take_images();
        if images.is_empty() {
            return teller.end(Ok(outcome(draft.finish(Vec::new()))));
        }
        tokio::spawn(async move {
            let developed = images::develop_all(images).await;
            teller.end(Ok(outcome(draft.finish(developed))));
        });
    }

    /// Returns what the reader of an outcome must know.
    fn notes_for(&mut self, status: &Status) -> Vec<String> {
        let mut notes = std::mem::take(&mut self.notes);
        let state_is_lost = matches!(
            status,
            Status::Died { .. }
                | Status::Nonsense { .. }
                | Status::TimedOut {
                    state: StateAfter::Lost,
                    ..
                }
                | Status::Cancelled {
                    state: StateAfter::Lost
                }
        );
        if state_is_lost {
            self.history.changed();
            self.look_after_copies();
            notes.append(&mut self.notes);
            if self.history.before(1).is_some() {
                notes.push("`undo` brings back the state before this cell.".to_owned());
            }
        }
        notes
    }

    fn refusal(&self, answer: Answer) -> Refused {
        let ended = || {
            // Also a sandbox without an interpreter may end, which nobody has told.
            let gone = self
                .sandbox
                .as_ref()
                .is_some_and(|sandbox| sandbox.is_gone());
            let exit = Exit::SandboxGone {
                files_kept: self.settings.work_folder == WorkFolder::Shared,
            };
            let why = if gone {
                Some(ended_by(exit))
            } else {
                self.ended.clone()
            };
            Refused::Ended {
                id: self.id.clone(),
                why: why.unwrap_or_else(|| "it was closed".to_owned()),
                undo: !gone && !self.history.undoable().is_empty(),
            }
        };
        match answer {
            Answer::Refused(Refusal::Busy) => Refused::Busy {
                waiting: super::state::MOST_WAITING,
            },
            Answer::Refused(Refusal::Crowded) => {
                let Crowded {
                    waiting,
                    retry_after,
                } = self.crowded.expect("it is noted before it is told");
                Refused::Crowded {
                    waiting,
                    retry_after,
                }
            }
            Answer::Refused(Refusal::CellRunning) => Refused::CellRunning {
                id: self.id.clone(),
                then: "fork",
            },
            Answer::Refused(Refusal::Cancelled) => Refused::CancelledWhileWaiting,
            Answer::Refused(Refusal::StartFailed) => {
                self.failure.clone().map_or_else(ended, Refused::Launch)
            }
            Answer::Refused(Refusal::Reset) => Refused::ResetWhileWaiting,
            Answer::Refused(Refusal::Closed) => Refused::ClosedWhileWaiting,
            _ => ended(),
        }
    }

    fn transfer_refusal(&self, answer: Answer) -> Refused {
        match answer {
            Answer::Reset => Refused::ResetDuringTransfer,
            Answer::Closed => Refused::ClosedWhileWaiting,
            answer => self.refusal(answer),
        }
    }

    /// Gives everything back. The manager forgets the session before those who came too late are answered.
    async fn leave(mut self, on_gone: OnGone) {
        let why = if self.expired {
            let idle = self.settings.idle_timeout.as_secs();
            let lost = match self.settings.work_folder {
                WorkFolder::Private => "its variables and files are gone",
                WorkFolder::Shared => {
                    "its variables are gone, files in the working folder are kept"
                }
            };
            self.ended = Some(format!("it was not used for {idle} s; {lost}"));
            self.ended.clone()
        } else {
            None
        };
        // Nothing that is gone can be undone.
        self.history.clear();
        on_gone(why);
        self.commands.close();
        while let Some(command) = self.commands.recv().await {
            match command {
                Command::Submit(_, job) => {
                    let answer = if self.failure.is_some() {
                        Refusal::StartFailed
                    } else {
                        Refusal::Ended
                    };
                    refuse(job, self.refusal(Answer::Refused(answer)));
                }
                // Their senders learn from the silence that the session is gone; a fork is destroyed or comes back.
                Command::Cancel(_)
                | Command::Look { .. }
                | Command::Decide { .. }
                | Command::Undo { .. }
                | Command::Surrender(_) => {}
                Command::Adopt { fork, reply, .. } => drop(reply.send(Err(fork))),
                Command::Reset(reply) => self.resets.push((reply, false)),
                Command::Leave(reply) => self.closers.push(reply),
            }
        }
        for (reply, _) in self.resets.drain(..) {
            let _ = reply.send(Err(Refused::Unknown {
                id: self.id.clone(),
            }));
        }
        self.postponed.clear();
        self.replacement = None;
        self.give_copying_up();
        self.live = None;
        self.metered = None;
        match self.work.take() {
            // A first start may wait long for the preparation. It is not dropped half-way; what it makes is destroyed.
            Some(work) if work.starts_first => {
                tokio::spawn(async move {
                    if let Some(mut sandbox) = work.future.await.into_sandbox() {
                        sandbox.destroy().await;
                    }
                });
            }
            Some(work) => self.sandbox = work.future.await.into_sandbox(),
            None => {}
        }
        if let Some(mut sandbox) = self.sandbox.take() {
            sandbox.destroy().await;
        }
        for closer in self.closers.drain(..) {
            let _ = closer.send(());
        }
        info!(
            session = self.id.as_str(),
            expired = self.expired,
            "session gone"
        );
    }
}

fn refuse(job: Job, refused: Refused) {
    match job {
        Job::Execute { teller, .. } => teller.end(Err(refused)),
        Job::Write { reply, .. } => drop(reply.send(Err(refused))),
        Job::Read { reply, .. } => drop(reply.send(Err(refused))),
        Job::List { reply } => drop(reply.send(Err(refused))),
        Job::Packages { reply, .. } => drop(reply.send(Err(refused))),
        Job::Fork { reply, .. } => drop(reply.send(Err(refused))),
    }
}

/// Names the files that can be asked for. A name that cannot is counted like one that was left out.
fn file_list(claimed: Vec<ClaimedFile>, omitted: u64) -> FileList {
    let all = claimed.len();
    let files = claimed
        .into_iter()
        .filter(|file| InsidePath::from_str(&file.path).is_ok());
    let mut files = files
        .map(|file| FileNote {
            path: file.path,
            size: file.size,
        })
        .collect::<Vec<_>>();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    FileList {
        omitted: omitted.saturating_add((all - files.len()) as u64),
        files,
    }
}

fn file_failed(path: &InsidePath, reason: Trouble, message: String) -> Refused {
    Refused::File {
        path: path.clone(),
        reason,
        detail: bounded_text(&message, 500),
    }
}

/// Says how an interpreter ended and what is left, as the end of "this session ended because …".
fn ended_by(exit: Exit) -> String {
    let left = match exit.files_kept() {
        true => "variables are gone, files in the working folder are kept",
        false => "variables and files are gone",
    };
    format!("{}; {left}", describe(exit))
}

/// Says how an interpreter ended.
fn describe(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("its Python process ended with exit code {code}"),
        Exit::Signal(9) => "its Python process was killed (signal 9)".to_owned(),
        Exit::Signal(11) => {
            "its Python process crashed (signal 11, a fault in native code)".to_owned()
        }
        Exit::Signal(signal) => format!("its Python process was ended by signal {signal}"),
        Exit::OutOfMemory { limit, .. } => format!(
            "it used more than its {} MiB of memory",
            limit / (1024 * 1024)
        ),
        Exit::OutOfMemoryOutside { whose, .. } => {
            format!("its Python process was killed because {whose}")
        }
        Exit::SandboxGone { .. } => {
            "its sandbox was ended from outside, or the jail or the container engine went away"
                .to_owned()
        }
        Exit::Unknown => "its Python process ended".to_owned(),
    }
}

fn python_error(error: &ClaimedError, max_chars: usize) -> PythonError {
    PythonError {
        name: bounded_text(&error.name, 200),
        message: bounded_text(&error.message, max_chars),
        traceback: bounded_text(&error.traceback, max_chars),
        line: error.line,
    }
}

fn variable_changes(claimed: Changes<ClaimedVariable>) -> VariableChanges {
    let variable = |claimed: ClaimedVariable| Variable {
        name: claimed.name,
        kind: claimed.kind,
        shape: claimed.shape,
        size: claimed.size,
    };
    VariableChanges {
        created: claimed.created.into_iter().map(variable).collect(),
        changed: claimed.changed.into_iter().map(variable).collect(),
        deleted: claimed.deleted,
        omitted: claimed.omitted,
    }
}

fn file_changes(claimed: Changes<ClaimedFile>) -> FileChanges {
    let note = |claimed: ClaimedFile| FileNote {
        path: claimed.path,
        size: claimed.size,
    };
    FileChanges {
        created: claimed.created.into_iter().map(note).collect(),
        changed: claimed.changed.into_iter().map(note).collect(),
        deleted: claimed.deleted,
        omitted: claimed.omitted,
    }
}
