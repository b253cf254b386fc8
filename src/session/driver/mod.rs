//! The driver: the task that owns a session.
//!
//! It feeds events (a command, an event from the runner, a process exit, a deadline) to the `state`
//! machine and carries out the actions that the machine returns. Facts come from the process and
//! the clock. Messages from the runner only fill in results and end a request early.
//!
//! No step waits for the inside. Starting, restarting and copying are futures that the loop polls
//! beside everything else, so `reset`, `close` and cancellation take effect at once.
//!
//! The driver owns the loop and is composed of parts, each with its own fields: `launch` has the
//! sandbox and the work on it, `requests` the running request, `branches` the history and its
//! copies, `network` the network rules, `host_calls` the calls from running code to the host. A
//! part returns results and does not access another part.

mod approvals;
mod branches;
mod branching;
mod call_queue;
mod cell;
mod deliveries;
mod forks;
mod host_calls;
mod launch;
mod network;
mod requests;
mod shared;
mod shell;
mod transfers;
mod wording;

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use self::branches::{Branches, Product};
use self::call_queue::CallAnswer;
use self::cell::{Cell, CellEnd};
pub(super) use self::forks::{ForkedSession, ForksWanted, UnstartedFork};
use self::host_calls::{CallOrigin, HostCalls};
use self::launch::{Finished, Inheritance, Launch, Live};
use self::network::{ConnectionRequest, SessionNetwork};
pub(super) use self::requests::{FileData, ReadExtent, SessionJob};
use self::requests::{Running, Task, Transfer};
pub(super) use self::shared::SharedSession;
use self::transfers::{DownloadTransfer, Listing, PackageFolders, UploadTransfer};
use self::wording::ended_by;
use super::accounts::{Accounts, Metered};
use super::executions::ExecutionReporter;
use super::late::LateText;
use super::output::OutputDelta;
use super::scheduler::{FairScheduler, Overloaded, RunPermit};
use super::state::{
    Action, Machine, RequestEnd, RequestId, RequestKind, RequestRefusal, SessionEvent, State,
};
use super::tools::ToolCalls;
use super::{
    Decision, ExecuteRequest, ExecutionEnded, ExecutionId, Ledger, OutcomeNote, Principal, Refused,
    Remedy, ResetReport, Retry, Ruling, SessionId, SessionSettings, StateAfter, Status, UndoPolicy,
    UndoReport, WorkFolder,
};
use crate::reaction::{CpuAccount, ReactionLimit};
use crate::runner_client::{self, Claim, Connection, CopyReport, HostCall, Request};
use crate::sandbox::{Backend, Exit, LaunchError, Rules, Sandbox};

/// Files up to this size are staged in memory.
pub(super) const STAGED_IN_MEMORY: usize = 1024 * 1024;
/// How long code may take to react when it is interrupted a second time at the end of the grace
/// period. It may have missed the first interrupt: Python does not check for signals between its
/// last instruction and the system call in which it blocks.
const SECOND_INTERRUPT_TIMEOUT: Duration = Duration::from_millis(250);
/// How long a file transfer may make no progress.
const FILE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the kernel may take to report the exit of an interpreter whose channel is closed.
const EXIT_TIMEOUT: Duration = Duration::from_millis(800);
/// Pending events that are processed when the running code reaches its deadline.
const MAX_HEARD_AT_ONCE: usize = 1000;
/// Late output may use 1/`LATE_SHARE` of the characters allowed for a cell's own output, so that it
/// does not displace that output.
const LATE_SHARE: usize = 4;
/// Timeouts are capped at this, which is as good as unlimited, so that arithmetic on instants does
/// not overflow.
const MAX_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// Requests that other tasks send to a driver.
pub(super) enum DriverCommand {
    Submit(RequestId, SessionJob),
    Cancel(RequestId),
    /// Requests the running cell's output since the previous request; `None` if no cell runs.
    ReadNewOutput {
        request: RequestId,
        max_chars: usize,
        reply: oneshot::Sender<Option<OutputDelta>>,
    },
    /// Delivers decisions on approval requests of the running cell. The reply contains the rulings.
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
    /// Replaces the session's interpreter and sandbox with a fork. The fork is returned if that is
    /// not possible now.
    Adopt {
        fork: Box<UnstartedFork>,
        note: String,
        reply: oneshot::Sender<Result<(), Box<UnstartedFork>>>,
    },
    /// Ends the session and hands over its interpreter and sandbox, if they are alive and idle.
    Surrender(oneshot::Sender<Option<Box<UnstartedFork>>>),
    /// Ends the session. CallAnswer when all resources are released.
    Shutdown(oneshot::Sender<()>),
}

/// Origin of a session's first interpreter.
pub(super) enum SessionOrigin {
    /// A fresh session for the server's internal work.
    Hidden {
        backend: Arc<dyn Backend>,
        rules: Rules,
    },
    Launch(Arc<dyn Backend>),
    /// A fork that is still being made. The note is added to the first outcome.
    Fork {
        fork: oneshot::Receiver<Box<UnstartedFork>>,
        note: Option<String>,
    },
    /// A fork that is compared with others. All of them use this seed, so they draw the same random
    /// numbers.
    Variant {
        fork: oneshot::Receiver<Box<UnstartedFork>>,
        seed: u64,
    },
}

/// Owner and accounts of a session, where they count.
pub(super) struct QuotaScope {
    pub(super) owner: Principal,
    /// The session under whose id its executions are recorded. For a variant, this is the session
    /// it was copied from.
    pub(super) session: SessionId,
    pub(super) accounts: Arc<Accounts>,
    pub(super) scheduler: FairScheduler,
    pub(super) ledger: Arc<Ledger>,
}

/// Reports how a session ended to the manager, before pending callers are answered.
pub(super) type OnGone = Box<dyn FnOnce(Option<String>) + Send>;

/// Initial values of a session.
pub(super) struct DriverSetup {
    pub(super) id: SessionId,
    /// `None` for the server's internal work, which counts against no quota.
    pub(super) quota_scope: Option<QuotaScope>,
    pub(super) origin: SessionOrigin,
    pub(super) settings: SessionSettings,
    pub(super) numbers: Arc<AtomicU64>,
    pub(super) shared: Arc<SharedSession>,
}

/// Runs a session until it is gone.
pub(super) async fn drive(
    beginning: DriverSetup,
    commands: mpsc::Receiver<DriverCommand>,
    on_gone: OnGone,
) {
    let DriverSetup {
        id,
        quota_scope,
        origin,
        settings,
        numbers,
        shared,
    } = beginning;
    let seed = if let SessionOrigin::Variant { seed, .. } = origin {
        Some(seed)
    } else {
        None
    };
    let note = match &origin {
        SessionOrigin::Launch(_) => Some(
            match settings.work_folder {
                WorkFolder::Private => {
                    "This is a new session: no variables or files from before exist."
                }
                WorkFolder::Shared => "This is a new session: no variables from before exist.",
            }
            .to_owned(),
        ),
        SessionOrigin::Fork { note, .. } => note.clone(),
        SessionOrigin::Hidden { .. } | SessionOrigin::Variant { .. } => None,
    };
    let machine = Machine::new(settings.undo != UndoPolicy::Off);
    // A session that was a variant before already has facts.
    shared.facts().state = machine.state().shown();
    let owner = quota_scope.as_ref().map(|quota_scope| &quota_scope.owner);
    let branches = Branches::new(&id, &settings, &shared, &numbers);
    let host_calls = HostCalls::new(&id, owner, &settings, &shared, &numbers);
    let driver = Driver {
        id,
        quota_scope,
        metered: None,
        spent_before: Duration::ZERO,
        permit: None,
        overloaded: None,
        machine,
        settings,
        numbers,
        commands,
        shared,
        waiting: HashMap::new(),
        running: None,
        live: None,
        launch: Launch::first(origin),
        branches,
        ended: None,
        nonsense: String::new(),
        exit: Exit::Unknown,
        notes: note.into_iter().map(OutcomeNote::from).collect(),
        late: LateText::default(),
        seed,
        host_calls,
        network: SessionNetwork::new(),
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

struct Driver {
    id: SessionId,
    quota_scope: Option<QuotaScope>,
    /// Measures the resource usage of the sandbox.
    metered: Option<Metered>,
    /// Processor time that the sandbox had used when the running cell started.
    spent_before: Duration,
    /// The run permit of the cell, or its ticket in the run queue.
    permit: Option<RunPermit>,
    /// Reason why the last request for a ticket was refused.
    overloaded: Option<Overloaded>,
    settings: SessionSettings,
    /// Source of frame numbers.
    numbers: Arc<AtomicU64>,
    commands: mpsc::Receiver<DriverCommand>,
    shared: Arc<SharedSession>,
    machine: Machine,
    waiting: HashMap<RequestId, SessionJob>,
    running: Option<Running>,
    live: Option<Live>,
    launch: Launch,
    branches: Branches,
    /// Reason why the interpreter ended, as the end of "this session ended because …".
    ended: Option<String>,
    nonsense: String,
    exit: Exit,
    /// Notes to add to the next outcome.
    notes: Vec<OutcomeNote>,
    /// Output that code of earlier cells printed late, for the next outcome.
    late: LateText,
    /// Seed given before each cell to random generators that the code has not seeded.
    seed: Option<u64>,
    host_calls: HostCalls,
    network: SessionNetwork,
    resets: Vec<(oneshot::Sender<Result<ResetReport, Refused>>, bool)>,
    closers: Vec<oneshot::Sender<()>>,
    expired: bool,
}

/// Event that woke the loop.
enum Wake {
    Command(Option<DriverCommand>),
    Runner(Result<runner_client::RunnerEvent, runner_client::ConnectionError>),
    Exit(Exit),
    Finished(Finished),
    /// The sandbox is ready to copy the interpreter, or will not copy it.
    Watched(bool),
    /// A host call of the running cell has its answer.
    CallAnswer(CallAnswer),
    /// Code tries to connect to a name that no rule lists.
    NameWanted(ConnectionRequest),
    /// Servers were registered or removed.
    ToolsChanged,
    /// The queued cell received its run permit.
    RunPermit,
    Time,
}

impl Driver {
    async fn run(mut self, on_gone: OnGone) {
        info!(session = self.id.as_str(), "session begins");
        while self.machine.state() != State::Gone {
            match self.wake().await {
                Wake::Command(Some(command)) => self.command(command),
                Wake::Command(None) => self.happen(SessionEvent::ShutdownAsked),
                Wake::Runner(Ok(event)) => self.heard(event),
                Wake::Runner(Err(error)) => self.broken(error.to_string()),
                Wake::Exit(exit) => self.exited(exit),
                Wake::Finished(finished) => self.finished_work(finished),
                Wake::Watched(watched) => self.watched(watched),
                Wake::CallAnswer(answered) => self.answer_call(answered),
                Wake::NameWanted(wanted) => self.wants_name(wanted),
                Wake::ToolsChanged => self.give_tools(),
                Wake::RunPermit => self.happen(SessionEvent::PermitGranted),
                Wake::Time => self.time(),
            }
        }
        self.shut_down(on_gone).await;
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
        let permit = self.permit.as_mut().filter(|permit| !permit.is_granted());
        tokio::select! {
            command = self.commands.recv() => Wake::Command(command),
            event = async { connection.expect("guarded").next().await },
                if connection.is_some() => Wake::Runner(event),
            exit = async { process.expect("guarded").exited().await }, if process.is_some() => {
                Wake::Exit(exit)
            }
            finished = self.launch.next() => Wake::Finished(finished),
            watched = self.branches.watched() => Wake::Watched(watched),
            // Answers are only taken while the channel accepts them; until then they stay queued.
            answered = self.host_calls.call_queue.next(), if can_answer => {
                Wake::CallAnswer(answered)
            }
            wanted = self.network.next() => Wake::NameWanted(wanted),
            () = self.host_calls.deliveries.changed(), if is_idle => Wake::ToolsChanged,
            () = async { permit.expect("guarded").granted().await }, if permit.is_some() => {
                Wake::RunPermit
            }
            () = tokio::time::sleep_until(moment) => Wake::Time,
        }
    }

    /// Returns the next deadline, independent of any incoming event.
    fn next_moment(&self) -> Instant {
        let running = match &self.running {
            Some(running) if running.is_paused() => self.host_calls.due(),
            running => running.as_ref().map(|running| running.deadline),
        };
        let exit = self
            .live
            .as_ref()
            .and_then(|live| live.connection.as_ref().err().copied());
        let expiry = match self.machine.state() {
            State::Idle | State::Ended => {
                Some(self.shared.facts().last_used + self.settings.idle_timeout.min(MAX_TIMEOUT))
            }
            _ => None,
        };
        [running, exit, expiry, self.branches.answer_due()]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or_else(|| Instant::now() + MAX_TIMEOUT)
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
        if self.branches.answer_due().is_some_and(|due| due <= now) {
            return self.copied();
        }
        if self.running.as_ref().is_some_and(Running::is_paused) {
            if self.host_calls.due().is_some_and(|due| due <= now) {
                let (host_calls, mut caller) = self.host_calls();
                host_calls.expire(&mut caller);
            }
            return;
        }
        if let Some(running) = &mut self.running {
            if running.deadline > now {
                return;
            }
            match (&running.task, self.machine.state()) {
                (Task::Cell(_), State::Running { stopping: None, .. }) => {
                    self.happen(SessionEvent::TimeIsUp)
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
                    let account = cpu_account(self.launch.sandbox());
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
                        let limit = SECOND_INTERRUPT_TIMEOUT.min(self.settings.grace);
                        running.reaction = Some(ReactionLimit::begin(limit, account));
                        running.deadline = now + limit;
                        live.process.interrupt();
                        return;
                    }
                    self.ended = Some(
                        "its code ignored the interrupt and Python was stopped; variables are \
                         gone, files in the working folder \
                         are kept"
                            .to_owned(),
                    );
                    self.happen(SessionEvent::GraceIsOver);
                }
                _ => self.broken(format!(
                    "no progress with a file for {} s",
                    FILE_TIMEOUT.as_secs()
                )),
            }
            return;
        }
        if matches!(self.machine.state(), State::Idle | State::Ended) && self.next_moment() <= now {
            self.expired = true;
            self.happen(SessionEvent::ShutdownAsked);
        }
    }

    fn command(&mut self, command: DriverCommand) {
        self.shared.touch();
        match command {
            // A file list is informational, so it is refused rather than queued behind a cell.
            DriverCommand::Submit(_, SessionJob::List { reply }) if self.machine.has_cell() => {
                let running = Refused::CellRunning {
                    id: self.id.clone(),
                    then: Retry::ListFiles,
                };
                let _ = reply.send(Err(running));
            }
            DriverCommand::Submit(id, job) => {
                let kind = job.kind();
                self.waiting.insert(id, job);
                self.happen(SessionEvent::Submitted(id, kind));
            }
            DriverCommand::Cancel(id) => self.happen(SessionEvent::CancelAsked(id)),
            DriverCommand::ReadNewOutput {
                request,
                max_chars,
                reply,
            } => self.look(request, max_chars, reply),
            DriverCommand::Decide {
                request,
                decisions,
                reply,
            } => {
                let is_running = self
                    .running
                    .as_ref()
                    .is_some_and(|running| running.id == request);
                let decisions = if is_running { decisions } else { Vec::new() };
                let (host_calls, mut caller) = self.host_calls();
                let _ = reply.send(host_calls.decide(decisions, &mut caller));
            }
            DriverCommand::Reset(reply) => {
                let interrupted = self.cell().is_some();
                self.resets.push((reply, interrupted));
                self.hear_the_rest();
                self.happen(SessionEvent::ResetAsked);
            }
            DriverCommand::Undo { cells, reply } => self.undo(cells, reply),
            DriverCommand::Adopt { fork, note, reply } => self.adopt(fork, note, reply),
            DriverCommand::Surrender(reply) => {
                let given = self.surrender();
                self.happen(SessionEvent::ShutdownAsked);
                let _ = reply.send(given);
            }
            DriverCommand::Shutdown(reply) => {
                self.closers.push(reply);
                self.hear_the_rest();
                self.happen(SessionEvent::ShutdownAsked);
            }
        }
    }

    /// Feeds an event to the machine and carries out its actions.
    fn happen(&mut self, event: SessionEvent) {
        let actions = self.machine.next(event);
        // Publish first: a caller that receives an answer must find the state that the answer
        // describes.
        self.publish();
        for action in actions {
            match action {
                Action::RequestPermit => self.request_permit(),
                Action::Start(id) => self.start(id),
                Action::Copy => self.copy(None),
                Action::Fork(id) => self.fork(id),
                Action::Interrupt => self.interrupt(),
                Action::Kill => self.kill(),
                Action::Answer(id, answer) => self.answer(id, answer),
                Action::Restart => self.restart(),
                Action::Replace => self.replace(),
                Action::RefuseReplacement => self.branches.refuse_replacement(),
            }
        }
        // A run permit is held only for a cell.
        match self.machine.state() {
            State::Running {
                kind: RequestKind::Cell,
                ..
            } => {}
            State::Waiting => {
                if let Some(SessionJob::Execute { reporter, .. }) =
                    self.machine.first().and_then(|id| self.waiting.get(&id))
                {
                    reporter.hold();
                }
            }
            _ => self.permit = None,
        }
    }

    /// Requests a run permit for the next cell. The server's internal work needs none.
    fn request_permit(&mut self) {
        // Release the previous cell's permit first. The next in the queue may be this session.
        self.permit = None;
        let asked = self
            .quota_scope
            .as_ref()
            .map(|quota_scope| quota_scope.scheduler.ask(&quota_scope.owner));
        match asked.transpose() {
            Ok(permit) => {
                let is_granted = permit.as_ref().is_none_or(RunPermit::is_granted);
                self.permit = permit;
                if is_granted {
                    self.happen(SessionEvent::PermitGranted);
                }
            }
            Err(overloaded) => {
                self.overloaded = Some(overloaded);
                self.happen(SessionEvent::PermitRefused);
            }
        }
    }

    /// Publishes the session's state.
    fn publish(&self) {
        let state = self.machine.state();
        let mut facts = self.shared.facts();
        facts.state = state.shown();
        facts.ended = if state == State::Ended {
            self.ended.clone()
        } else {
            None
        };
    }

    fn start(&mut self, id: RequestId) {
        match self.waiting.remove(&id) {
            Some(SessionJob::Execute { request, reporter }) => {
                self.start_cell(id, request, reporter)
            }
            Some(SessionJob::Write {
                path,
                overwrite,
                source,
                reply,
            }) => self.start_transfer(
                id,
                UploadTransfer::begin(id, path, overwrite, source, reply),
            ),
            Some(SessionJob::Read { path, what, reply }) => {
                self.start_transfer(id, DownloadTransfer::begin(id, path, what, reply));
            }
            Some(SessionJob::List { reply }) => self.start_transfer(id, Listing::begin(id, reply)),
            Some(SessionJob::Packages { paths, reply }) => {
                self.start_transfer(id, PackageFolders::begin(id, paths, reply));
            }
            // Forks are started by another action of the machine.
            Some(SessionJob::Fork { .. }) | None => {}
        }
    }

    fn start_cell(
        &mut self,
        id: RequestId,
        mut request: ExecuteRequest,
        reporter: ExecutionReporter,
    ) {
        if let Some(Err(refused)) = request.rules.take().map(|rules| self.narrow(rules)) {
            reporter.end(Err(refused));
            return self.happen(SessionEvent::Declined(id));
        }
        if let Some(sandbox) = self.launch.sandbox() {
            sandbox.forget_peak();
            self.spent_before = sandbox.gauge().processor_time();
        }
        self.shared.facts().executions += 1;
        let now = Instant::now();
        let deadline = now + request.timeout.min(MAX_TIMEOUT);
        let (cell, code) = Cell::begin(request, reporter, now);
        let sandbox = self.launch.sandbox();
        self.notes.extend(self.branches.begin_cell(&code, sandbox));
        self.host_calls.begin_cell();
        let task = Task::Cell(Box::new(cell));
        self.running = Some(Running::new(id, task, now, deadline));
        self.give_tools();
        let seed = self.seed;
        self.send(&Request::Execute { id, seed }, code.as_bytes());
    }

    fn start_transfer(&mut self, id: RequestId, begun: (Request, Box<dyn Transfer>)) {
        let (now, (request, transfer)) = (Instant::now(), begun);
        let task = Task::Transfer(transfer);
        self.running = Some(Running::new(id, task, now, now + FILE_TIMEOUT));
        self.give_tools();
        self.send(&request, b"");
        self.send_file();
    }

    /// Sends the modules of the MCP servers that the session may use, unless it already has them.
    fn give_tools(&mut self) {
        let delivery = self.host_calls.deliver(self.settings.work_folder);
        self.notes
            .extend(delivery.notes.into_iter().map(OutcomeNote::from));
        for (request, payload) in delivery.frames {
            self.send(&request, &payload);
        }
    }

    /// Restores the session's packages in a fresh interpreter. The runner handles this before any
    /// later request.
    fn give_packages_again(&mut self) {
        let paths = self.shared.facts().packages.clone();
        if !paths.is_empty() {
            let id = self.numbers.fetch_add(1, Ordering::Relaxed);
            self.send(&Request::Packages { id, paths }, b"");
        }
    }

    /// Returns the host-call part together with the running cell, which is lent to it.
    fn host_calls(&mut self) -> (&mut HostCalls, CallOrigin<'_>) {
        let caller = CallOrigin {
            is_stopping: self.is_stopping(),
            running: self.running.as_mut(),
            sandbox: self.launch.sandbox(),
        };
        (&mut self.host_calls, caller)
    }

    fn is_stopping(&self) -> bool {
        matches!(
            self.machine.state(),
            State::Running {
                stopping: Some(_),
                ..
            }
        )
    }

    /// Handles a host call of the running cell.
    fn asked(&mut self, id: RequestId, ask: u64, question: HostCall) {
        let is_running = self
            .running
            .as_ref()
            .is_some_and(|running| running.id == id);
        if !is_running || self.cell().is_none() {
            return;
        }
        let (host_calls, mut caller) = self.host_calls();
        if let Err(what) = host_calls.asked(ask, question, &mut caller) {
            self.broken(what);
        }
    }

    fn answer_call(&mut self, answered: CallAnswer) {
        let (host_calls, mut caller) = self.host_calls();
        let request = host_calls.answered(answered, &mut caller);
        self.send(&request, b"");
    }

    fn wants_name(&mut self, wanted: ConnectionRequest) {
        // A caller that narrowed this session's network did so on purpose, so no approval is
        // requested.
        if self.network.is_narrowed() {
            let _ = wanted.reply.send(false);
            return;
        }
        let (host_calls, mut caller) = self.host_calls();
        host_calls.wants_name(wanted, &mut caller);
    }

    fn cell(&self) -> Option<&Cell> {
        self.running.as_ref().and_then(Running::cell)
    }

    /// Reports the output of the running cell. If the receiver is gone, the output counts as
    /// unread.
    fn look(
        &mut self,
        request: RequestId,
        max_chars: usize,
        reply: oneshot::Sender<Option<OutputDelta>>,
    ) {
        let cell = match &mut self.running {
            Some(running) if running.id == request && !reply.is_closed() => running.cell_mut(),
            _ => None,
        };
        let delta = cell.map(|cell| cell.look(max_chars));
        let _ = reply.send(delta);
    }

    fn fork(&mut self, id: RequestId) {
        let Some(SessionJob::Fork { wanted, reply }) = self.waiting.remove(&id) else {
            return;
        };
        self.branches.begin_forking(id, reply);
        self.copy(Some(wanted));
    }

    /// Sends a frame. A closed channel drops it; the exit is noticed elsewhere.
    fn send(&mut self, request: &Request, payload: &[u8]) {
        if let Some(Live {
            connection: Ok(connection),
            ..
        }) = &mut self.live
            && let Err(error) = connection.send(request, payload)
        {
            debug!(session = self.id.as_str(), %error, "a frame could not be sent");
        }
    }

    /// Sends the next chunks of an upload while the socket accepts them without blocking.
    fn send_file(&mut self) {
        loop {
            if let Some(Live {
                connection: Ok(connection),
                ..
            }) = &self.live
                && connection.is_sending()
            {
                return;
            }
            let Some(Running {
                task: Task::Transfer(transfer),
                deadline,
                ..
            }) = &mut self.running
            else {
                return;
            };
            match transfer.next_frame() {
                Ok(None) => return,
                Ok(Some((request, chunk))) => {
                    *deadline = Instant::now() + FILE_TIMEOUT;
                    self.send(&request, &chunk);
                }
                // Our own staging file cannot be read. Without `write_end` the runner discards the
                // file, and it accepts no other request.
                Err(error) => {
                    return self.broken(format!(
                        "an upload could not be continued: {}",
                        error.kind()
                    ));
                }
            }
        }
    }

    /// Asks the running code to stop. A signal sent before the code has started inside would be
    /// lost; in that case `take` sends it when the code starts.
    fn interrupt(&mut self) {
        let (host_calls, mut caller) = self.host_calls();
        host_calls.give_up(&mut caller);
        let Some(running) = &mut self.running else {
            return;
        };
        running.deadline = Instant::now() + self.settings.grace;
        running.reaction = Some(ReactionLimit::begin(
            self.settings.grace,
            cpu_account(self.launch.sandbox()),
        ));
        if let Some(live) = &self.live
            && running.cell().is_none_or(Cell::has_begun_inside)
        {
            live.process.interrupt();
        }
    }

    /// Kills the interpreter and takes the output that it has written so far.
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
        let copies = self.branches.reset();
        // Drop the connection first: later messages of the old interpreter are irrelevant.
        self.live = None;
        self.launch.restart(copies);
    }

    fn finished_work(&mut self, finished: Finished) {
        match finished {
            Finished::Started(sandbox, live) => self.started(sandbox, live),
            Finished::Copied(sandbox, copy) => self.made(sandbox, Product::Copy(copy)),
            Finished::Forked(sandbox, forks) => self.made(sandbox, Product::Forks(forks)),
        }
    }

    fn started(&mut self, sandbox: Option<Box<dyn Sandbox>>, live: Result<Box<Live>, LaunchError>) {
        self.launch.give_back(sandbox);
        match live {
            Ok(live) => {
                self.inherit(&live.inheritance);
                self.host_calls.deliveries.forget();
                let carried = match &live.connection {
                    Ok(connection) => connection.copy_report().clone(),
                    Err(_) => CopyReport::default(),
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
                self.launch.failure = None;
                self.shared.facts().failure = None;
                self.replaced(&carried);
                let sandbox = self.launch.sandbox();
                let (copied, notes) = self.branches.keep_beginning(beginning, &carried, sandbox);
                self.notes.extend(notes);
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
                    let note = format!(
                        "Python was started anew: variables from before the reset are gone, \
                         {files}."
                    );
                    self.notes = vec![note.into()];
                }
                self.happen(SessionEvent::Started { copied });
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
                self.launch.failure = Some(error);
                self.happen(SessionEvent::StartFailed);
            }
        }
    }

    /// Takes over the state that a copy inherits from its source, and applies the network rules to
    /// the new sandbox.
    fn inherit(&mut self, inheritance: &Inheritance) {
        let Some(sandbox) = self.launch.sandbox() else {
            return;
        };
        // Drop the old meter first, so that its last reading is taken.
        self.metered = None;
        self.metered = self.quota_scope.as_ref().map(|quota_scope| {
            let number = self.numbers.fetch_add(1, Ordering::Relaxed);
            quota_scope
                .accounts
                .follow(&quota_scope.owner, number, sandbox.gauge())
        });
        if !inheritance.packages.is_empty() {
            self.shared.facts().packages = inheritance.packages.clone();
        }
        self.shared.facts().granted.inherit(&inheritance.granted);
        let deliveries = &mut self.host_calls.deliveries;
        deliveries.inherit(inheritance.grants.clone(), inheritance.tools);
        self.shared.facts().grants = deliveries.grants.clone();
        let asks = self
            .quota_scope
            .is_some()
            .then_some(&self.settings.approvals);
        self.network
            .attach(sandbox, inheritance.ceiling.as_ref(), asks);
        self.shared.facts().rules = sandbox.rules();
    }

    /// Returns the state that a copy inherits.
    fn inheritance(&self) -> Inheritance {
        let facts = self.shared.facts();
        Inheritance {
            packages: facts.packages.clone(),
            ceiling: self.network.ceiling().cloned(),
            granted: facts.granted.clone(),
            grants: Some(self.host_calls.deliveries.grants.clone()),
            tools: self.host_calls.deliveries.has_any(),
        }
    }

    fn narrow(&mut self, rules: Rules) -> Result<(), Refused> {
        let sandbox = self.launch.sandbox();
        self.network.narrow(rules, sandbox)?;
        if let Some(sandbox) = sandbox {
            self.shared.facts().rules = sandbox.rules();
        }
        Ok(())
    }

    fn exited(&mut self, exit: Exit) {
        let Some(mut live) = self.live.take() else {
            return;
        };
        // The main process is gone; kill the processes that it started.
        live.process.kill();
        if let Ok(connection) = &mut live.connection {
            self.last_words(connection);
        }
        info!(session = self.id.as_str(), ?exit, "interpreter ended");
        self.exit = exit;
        self.ended = Some(ended_by(exit));
        if matches!(exit, Exit::SandboxGone { .. }) || !exit.files_kept() {
            // The kept states were lost with the sandbox.
            self.branches.clear();
        }
        self.happen(SessionEvent::InterpreterGone);
        // The runner can no longer answer, but a copy that was already made is still valid.
        if self.branches.answer_due().is_some() {
            self.copied();
        }
    }

    /// Takes the output of the running request so far, because its interpreter is about to be
    /// killed from outside.
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

    /// Processes events that have already arrived. A server that wakes up late finds the answer and
    /// the expired deadline together, and the answer came first.
    fn hear_what_has_come(&mut self) {
        for _ in 0..MAX_HEARD_AT_ONCE {
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

    /// Takes the output that was written before the end. It is complete when this returns, without
    /// waiting.
    fn last_words(&mut self, connection: &mut Connection) {
        if connection.hang_up().is_err() {
            return;
        }
        while let Ok(Some(event)) = connection.next_now() {
            match event {
                runner_client::RunnerEvent::Closed => return,
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
            "its Python process did not keep to the protocol ({what}) and was stopped; variables \
             are gone, files in the \
             working folder are kept"
        ));
        self.nonsense = what;
        self.happen(SessionEvent::ProtocolBroken);
    }

    fn heard(&mut self, event: runner_client::RunnerEvent) {
        match event {
            runner_client::RunnerEvent::Closed => {
                if let Some(live) = &mut self.live {
                    live.connection = Err(Instant::now() + EXIT_TIMEOUT);
                }
            }
            runner_client::RunnerEvent::Sent => self.send_file(),
            event => {
                self.take(event);
                if let Some(running) = self.running.as_ref().filter(|running| running.is_over()) {
                    let id = running.id;
                    if running.has_changed() {
                        self.branches.changed();
                        self.happen(SessionEvent::Changed);
                    }
                    self.happen(SessionEvent::Finished(id));
                }
            }
        }
    }

    /// Takes a part of the running request's result. Text that belongs to no running cell is late
    /// output; other events that belong to no running request are dropped.
    fn take(&mut self, event: runner_client::RunnerEvent) {
        if let runner_client::RunnerEvent::Claim(Claim::Branched { id, branched }) = event {
            return self.branched(id, branched);
        }
        if let runner_client::RunnerEvent::Claim(Claim::Ask { id, ask, question }) = event {
            return self.asked(id, ask, question);
        }
        if let runner_client::RunnerEvent::Claim(claim) = &event {
            let (is_delivery, note) = self.host_calls.deliveries.delivered(claim);
            self.notes.extend(note.map(OutcomeNote::from));
            if is_delivery || self.branches.declined(claim) {
                return;
            }
        }
        let running = self.running.as_mut();
        match event {
            runner_client::RunnerEvent::Stray { pipe, bytes } => self.late.write(pipe, &bytes),
            runner_client::RunnerEvent::Text { pipe, bytes } => {
                match running.and_then(Running::cell_mut) {
                    Some(cell) if cell.runs_inside() => cell.print(pipe, &bytes),
                    _ => self.late.write(pipe, &bytes),
                }
            }
            runner_client::RunnerEvent::Claim(claim) => {
                let begins = matches!(claim, Claim::Started { .. });
                let taken = running.map_or(Ok(()), |running| running.take(claim));
                if begins && self.is_stopping() && self.cell().is_some_and(Cell::runs_inside) {
                    // It was asked to stop before it started, when a signal would have been lost.
                    self.live.iter().for_each(|live| live.process.interrupt());
                }
                if let Err(what) = taken {
                    self.broken(what);
                }
            }
            runner_client::RunnerEvent::Sent | runner_client::RunnerEvent::Closed => {}
        }
    }

    fn answer(&mut self, id: RequestId, answer: RequestEnd) {
        self.shared.facts().last_used = Instant::now();
        if let Some((reply, forked)) = self.branches.end_forking(id) {
            return self.answer_fork(answer, reply, forked);
        }
        if let Some(job) = self.waiting.remove(&id) {
            job.refuse(self.refusal(answer));
            return;
        }
        let Some(running) = self.running.take_if(|running| running.id == id) else {
            return;
        };
        let calls = self.host_calls.end_cell();
        let (begun, is_over) = (running.begun, running.is_over());
        match running.task {
            Task::Cell(cell) => match cell.status(answer, self.exit, &self.nonsense) {
                Ok(status) => self.report(id, begun, *cell, status, calls),
                Err(_) => cell.reporter.end(Err(self.refusal(answer))),
            },
            Task::Transfer(transfer) => {
                let ended = match answer {
                    RequestEnd::Finished | RequestEnd::Stopped(_, StateAfter::Kept) if is_over => {
                        Ok(())
                    }
                    answer => Err(self.transfer_refusal(answer)),
                };
                let packages = transfer.answer(ended);
                self.shared.add_packages(&packages);
            }
        }
    }

    /// Records and reports the outcome of a cell.
    fn report(
        &mut self,
        id: RequestId,
        begun: Instant,
        mut cell: Cell,
        status: Status,
        (tool_calls, rulings): (ToolCalls, Vec<Ruling>),
    ) {
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
        if let Some(late) = cell.take_late() {
            self.late.add(&late.text, late.omitted);
        }
        let late = self.late.take(cell.request.max_output_chars / LATE_SHARE);
        let sandbox = self.launch.sandbox();
        let memory = sandbox.map(|sandbox| sandbox.memory()).unwrap_or_default();
        self.shared.facts().memory = Some(memory.now);
        let spent = sandbox.map(|sandbox| sandbox.gauge().processor_time());
        let isolation = sandbox.map(|sandbox| sandbox.isolation().clone());
        let blocked = sandbox.map(|sandbox| sandbox.take_blocked());
        let ended = CellEnd {
            execution: ExecutionId(id),
            late,
            duration: begun.elapsed(),
            // There is nothing to compare if the sandbox is gone or was replaced.
            processor_time: spent.unwrap_or_default().saturating_sub(self.spent_before),
            memory,
            isolation: isolation.unwrap_or_default(),
            blocked: blocked.unwrap_or_default(),
            tool_calls,
            rulings,
            notes: self.notes_for(&status),
            status,
        };
        // Record before the caller is answered, and even if the outcome is never collected.
        if let Some(QuotaScope {
            owner,
            session,
            ledger,
            ..
        }) = &self.quota_scope
        {
            let ended = ExecutionEnded {
                name: ledger.name_of(id),
                owner: owner.clone(),
                session: session.clone(),
                code: cell.code,
                status: ended.status.kind(),
                duration: ended.duration,
                processor_time: ended.processor_time,
                memory_peak: ended.memory.peak,
                blocked: ended.blocked.clone(),
                tool_calls: ended.tool_calls.clone(),
                rulings: ended.rulings.clone(),
                taken_over: false,
            };
            ledger.enter(cell.request.recorder, ended);
        }
        debug!(
            session = self.id.as_str(),
            outcome = ended.status.name(),
            elapsed_ms = ended.duration.as_millis(),
            "execution finished"
        );
        cell.tell(ended, &self.id, &self.shared.outputs);
    }

    /// Returns the notes for an outcome.
    fn notes_for(&mut self, status: &Status) -> Vec<OutcomeNote> {
        let mut notes = std::mem::take(&mut self.notes);
        let state_is_lost = matches!(
            status,
            Status::Died { .. }
                | Status::ProtocolError { .. }
                | Status::TimedOut {
                    state: StateAfter::Lost,
                    ..
                }
                | Status::Cancelled {
                    state: StateAfter::Lost
                }
        );
        if state_is_lost {
            self.branches.changed();
            notes.extend(self.branches.drop_lost(self.launch.sandbox()));
            if self.branches.can_undo_last() {
                notes.push(OutcomeNote {
                    text: "The state before this cell can be restored.".to_owned(),
                    remedy: Some(Remedy::Undo),
                });
            }
        }
        notes
    }

    fn refusal(&self, answer: RequestEnd) -> Refused {
        let ended = || {
            // A sandbox without an interpreter can also end, and no event reports that.
            let gone = self
                .launch
                .sandbox()
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
                undo: !gone && self.branches.can_undo(),
            }
        };
        match answer {
            RequestEnd::Refused(RequestRefusal::Busy) => Refused::Busy {
                waiting: super::state::MAX_WAITING,
            },
            RequestEnd::Refused(RequestRefusal::Overloaded) => {
                let Overloaded {
                    waiting,
                    retry_after,
                } = self.overloaded.expect("it is noted before it is told");
                Refused::Overloaded {
                    waiting,
                    retry_after,
                }
            }
            RequestEnd::Refused(RequestRefusal::CellRunning) => Refused::CellRunning {
                id: self.id.clone(),
                then: Retry::Fork,
            },
            RequestEnd::Refused(RequestRefusal::Cancelled) => Refused::CancelledWhileWaiting,
            RequestEnd::Refused(RequestRefusal::StartFailed) => self
                .launch
                .failure
                .clone()
                .map_or_else(ended, Refused::Launch),
            RequestEnd::Refused(RequestRefusal::Reset) => Refused::ResetWhileWaiting,
            RequestEnd::Refused(RequestRefusal::Closed) => Refused::ClosedWhileWaiting,
            _ => ended(),
        }
    }

    fn transfer_refusal(&self, answer: RequestEnd) -> Refused {
        match answer {
            RequestEnd::Reset => Refused::ResetDuringTransfer,
            RequestEnd::Closed => Refused::ClosedWhileWaiting,
            answer => self.refusal(answer),
        }
    }

    /// Releases all resources. The manager removes the session before requests that arrived too
    /// late are answered.
    async fn shut_down(mut self, on_gone: OnGone) {
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
        // A session that is gone has nothing to undo.
        self.branches.forget_history();
        on_gone(why);
        self.commands.close();
        while let Some(command) = self.commands.recv().await {
            match command {
                DriverCommand::Submit(_, job) => {
                    let answer = if self.launch.failure.is_some() {
                        RequestRefusal::StartFailed
                    } else {
                        RequestRefusal::Ended
                    };
                    job.refuse(self.refusal(RequestEnd::Refused(answer)));
                }
                // Their senders learn from the dropped channel that the session is gone. A fork is
                // destroyed or returned.
                DriverCommand::Cancel(_)
                | DriverCommand::ReadNewOutput { .. }
                | DriverCommand::Decide { .. }
                | DriverCommand::Undo { .. }
                | DriverCommand::Surrender(_) => {}
                DriverCommand::Adopt { fork, reply, .. } => drop(reply.send(Err(fork))),
                DriverCommand::Reset(reply) => self.resets.push((reply, false)),
                DriverCommand::Shutdown(reply) => self.closers.push(reply),
            }
        }
        for (reply, _) in self.resets.drain(..) {
            let _ = reply.send(Err(Refused::Unknown {
                id: self.id.clone(),
            }));
        }
        self.branches.end();
        self.live = None;
        self.metered = None;
        self.launch.destroy().await;
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
