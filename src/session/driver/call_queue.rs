//! Queue of the host calls of the running cell: accepted, handled concurrently, answered exactly
//! once.
//!
//! Each call that needs work has its own task, which ends with the cell. Answers are sent one after
//! another, and only while the channel accepts them: code that calls and does not read the answers
//! fills only its own channel. The queue is bounded in number and in bytes.

use std::collections::{HashMap, VecDeque};

use cellblock_json::Excess;
use tokio::task::{AbortHandle, JoinSet};
use tracing::debug;

use super::approvals::PendingAction;
use super::host_calls::{CallOrigin, HostCalls};
use crate::approval::{Fingerprint, Subject};
use crate::runner_client::{HostCall, HostCallAnswer, Request};
use crate::session::install::{self, InstallError, InstallRequest, Installed};
use crate::session::tools::{
    Begun, CallEnd, ToolCalls, ToolReason, ToolRefused, ToolReply, UpstreamToolCall,
};

/// Concurrent installations of one cell.
const MAX_INSTALLATIONS: usize = 8;
/// Concurrent tool calls. Further calls are queued.
const MAX_CALLS: usize = 64;
/// Tool calls that one cell may make in total.
const MAX_CALLS_OF_A_CELL: u64 = 10_000;
/// Total bytes of queued calls.
const MAX_WAITING_BYTES: usize = 64 * 1024 * 1024;
/// Queued answers that the code has not read. Beyond this limit it never will.
const MAX_UNREAD: usize = 2 * MAX_CALLS_OF_A_CELL as usize;

/// Host calls of the running code.
#[derive(Default)]
pub(super) struct CallQueue {
    tasks: JoinSet<CallAnswer>,
    /// Calls in progress, by their number.
    open: HashMap<u64, Open>,
    /// Queued calls, the oldest first.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Answers that needed no work.
    ready: VecDeque<CallAnswer>,
    /// Number of tool calls that the cell has made.
    asked: u64,
    calls: ToolCalls,
}

struct Open {
    task: AbortHandle,
    /// The tool call, if it is one.
    call: Option<Begun>,
    /// Whether it is a command, which has limits of its own.
    is_command: bool,
}

struct Waiting {
    ask: u64,
    call: UpstreamToolCall,
    size: usize,
}

/// The answer to a host call.
pub(super) struct CallAnswer {
    ask: u64,
    request: Request,
    /// Package folders that the session has from now on.
    packages: Vec<String>,
    /// How a tool call ended, if it had started.
    ended: Option<CallEnd>,
}

impl CallQueue {
    /// Waits for the next answer. Pending forever if there are no calls.
    pub(super) async fn next(&mut self) -> CallAnswer {
        if let Some(answered) = self.ready.pop_front() {
            return answered;
        }
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(answered) => return answered,
                // A cancelled call has already been answered, or its answer is not needed.
                Err(error) if error.is_cancelled() => {}
                Err(error) => {
                    let broken = self
                        .open
                        .iter()
                        .find(|(_, open)| open.task.id() == error.id());
                    if let Some((&ask, _)) = broken {
                        return CallAnswer::failed(ask);
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// Resets the call counter for a new cell.
    pub(super) fn begin_cell(&mut self) {
        (self.asked, self.calls) = (0, ToolCalls::default());
    }

    /// Cancels all calls in progress, because their answers are not needed any more. Returns the
    /// tool calls that the cell has made.
    pub(super) fn clear(&mut self) -> ToolCalls {
        self.tasks.abort_all();
        self.tasks = JoinSet::new();
        self.ready.clear();
        for (_, open) in std::mem::take(&mut self.open) {
            self.note(open.call, CallEnd::Refused(ToolReason::Cancelled));
        }
        for Waiting { call, .. } in std::mem::take(&mut self.waiting) {
            self.note_at_once(&call, ToolReason::Cancelled);
        }
        self.waiting_bytes = 0;
        std::mem::take(&mut self.calls)
    }

    fn note(&mut self, begun: Option<Begun>, ended: CallEnd) {
        if let Some(begun) = begun {
            self.calls.note(begun, ended);
        }
    }

    fn note_at_once(&mut self, call: &UpstreamToolCall, reason: ToolReason) {
        self.calls.note(Begun::now(call), CallEnd::Refused(reason));
    }

    fn installations(&self) -> usize {
        self.open
            .values()
            .filter(|open| open.call.is_none() && !open.is_command)
            .count()
    }

    fn calls_under_way(&self) -> usize {
        self.open
            .values()
            .filter(|open| open.call.is_some())
            .count()
    }

    fn knows(&self, ask: u64) -> bool {
        self.open.contains_key(&ask) || self.waiting.iter().any(|waiting| waiting.ask == ask)
    }

    fn work(
        &mut self,
        ask: u64,
        call: Option<Begun>,
        work: impl Future<Output = CallAnswer> + Send + 'static,
    ) {
        let task = self.tasks.spawn(work);
        self.open.insert(
            ask,
            Open {
                task,
                call,
                is_command: false,
            },
        );
    }

    /// Returns the number of commands in progress.
    pub(super) fn commands(&self) -> usize {
        self.open.values().filter(|open| open.is_command).count()
    }

    /// Runs a command concurrently.
    pub(super) fn run(
        &mut self,
        ask: u64,
        work: impl Future<Output = HostCallAnswer> + Send + 'static,
    ) {
        let task = self
            .tasks
            .spawn(async move { CallAnswer::plain(ask, work.await) });
        self.open.insert(
            ask,
            Open {
                task,
                call: None,
                is_command: true,
            },
        );
    }

    /// Answers without any work.
    pub(super) fn answer_at_once(&mut self, ask: u64, answer: HostCallAnswer) {
        self.ready.push_back(CallAnswer::plain(ask, answer));
    }

    /// Records the answer to a call. Returns the frame to send, and package folders that the
    /// session has from now on.
    pub(super) fn close(&mut self, answered: CallAnswer) -> (Request, Vec<String>) {
        let open = self.open.remove(&answered.ask);
        if let (Some(Open { call, .. }), Some(ended)) = (open, answered.ended) {
            self.note(call, ended);
        }
        (answered.request, answered.packages)
    }

    /// Cancels a call and answers it.
    fn withdraw(&mut self, ask: u64) {
        let refused = ToolRefused::new(
            ToolReason::Cancelled,
            "the call was given up by the code that made it",
        );
        if let Some(Open { task, call, .. }) = self.open.remove(&ask) {
            task.abort();
            self.note(call, CallEnd::Refused(ToolReason::Cancelled));
            self.answer_at_once(ask, not_called(refused));
        } else if let Some(place) = self.waiting.iter().position(|waiting| waiting.ask == ask) {
            let Waiting { call, size, .. } =
                self.waiting.remove(place).expect("it was found there");
            self.waiting_bytes -= size;
            self.note_at_once(&call, ToolReason::Cancelled);
            self.answer_at_once(ask, not_called(refused));
        }
    }
}

impl CallAnswer {
    fn plain(ask: u64, answer: HostCallAnswer) -> CallAnswer {
        CallAnswer {
            ask,
            request: answer.to(ask),
            packages: Vec::new(),
            ended: None,
        }
    }

    /// Builds the answer with the result of a tool, if that fits into a frame.
    fn of_call(ask: u64, result: Result<ToolReply, ToolRefused>) -> CallAnswer {
        let ended = CallEnd::of(&result);
        let ToolReply {
            content,
            structured,
            is_error,
        } = match result {
            Ok(reply) => reply,
            Err(refused) => return CallAnswer::not_called(ask, refused),
        };
        let result = HostCallAnswer::ToolResult {
            content,
            structured,
            is_error,
        };
        let answered = CallAnswer {
            ended: Some(ended),
            ..CallAnswer::plain(ask, result)
        };
        if answered.request.fits_a_frame() {
            return answered;
        }
        let why = "the result of the tool is larger than a session can be sent";
        CallAnswer::not_called(ask, ToolRefused::new(ToolReason::TooLarge, why))
    }

    fn not_called(ask: u64, refused: ToolRefused) -> CallAnswer {
        CallAnswer {
            ended: Some(CallEnd::Refused(refused.reason)),
            ..CallAnswer::plain(ask, not_called(refused))
        }
    }

    /// Builds the answer to a call whose task failed unexpectedly.
    fn failed(ask: u64) -> CallAnswer {
        let refused = ToolRefused::new(
            ToolReason::Other,
            "the server failed to do this; its log says more",
        );
        CallAnswer::not_called(ask, refused)
    }
}

impl HostCalls {
    /// Handles a host call of the running cell. Each call is answered exactly once while the cell
    /// runs. An error is a protocol violation.
    pub(super) fn asked(
        &mut self,
        ask: u64,
        question: HostCall,
        caller: &mut CallOrigin<'_>,
    ) -> Result<(), String> {
        if self.call_queue.knows(ask) || self.pending.knows(ask) {
            return Err("a question was asked under the number of another".to_owned());
        }
        if self.call_queue.ready.len() >= MAX_UNREAD {
            return Err("the answers to too many questions were not read".to_owned());
        }
        match question {
            HostCall::Install {
                requirements,
                upgrade,
            } => match install::check_bounds(&requirements) {
                Err(error) => self.refuse_host_call(ask, &error.to_string()),
                Ok(()) => self.consider(
                    Subject::Install { requirements },
                    PendingAction::Install { ask, upgrade },
                    caller,
                ),
            },
            HostCall::CallTool {
                server,
                tool,
                arguments,
                size,
            } => {
                self.asked_to_call(
                    ask,
                    UpstreamToolCall {
                        server,
                        tool,
                        arguments,
                        fingerprint: None,
                    },
                    size,
                    caller,
                );
            }
            HostCall::Shell(command) => self.asked_to_run(ask, *command, caller),
            HostCall::Withdraw { of } => {
                if !self.withdraw_pending(of, caller) {
                    self.call_queue.withdraw(of);
                }
                self.call_queue
                    .answer_at_once(ask, HostCallAnswer::Withdrawn {});
                self.start_waiting_calls(caller);
            }
            HostCall::TooMuch(Excess::Depth(_)) => self.refuse_host_call(
                ask,
                "the arguments are nested more than 100 levels deep; send a flatter value, or JSON \
                 in a text",
            ),
            HostCall::TooMuch(Excess::Memory(_)) => self.refuse_host_call(
                ask,
                "the arguments hold more values than a call may have; send fewer at a time, or \
                 JSON in a text",
            ),
            HostCall::Unknown => {
                self.refuse_host_call(ask, "this server does not know that question")
            }
        }
        Ok(())
    }

    pub(super) fn install_packages(&mut self, ask: u64, requirements: Vec<String>, upgrade: bool) {
        let Some(installer) = self.packages.0.clone() else {
            return self.refuse_host_call(ask, "packages cannot be installed on this server");
        };
        if self.call_queue.installations() >= MAX_INSTALLATIONS {
            return self
                .refuse_host_call(ask, "too many installations are under way in this session");
        }
        debug!(session = self.id.as_str(), "code asks for packages");
        let request = InstallRequest {
            requirements,
            upgrade,
            has: self.shared.facts().packages.clone(),
        };
        self.call_queue.work(ask, None, async move {
            match installer.install(request, &|_| ()).await {
                Ok(Installed { paths, text }) => {
                    let answer = HostCallAnswer::Installed {
                        text,
                        paths: paths.clone(),
                    };
                    CallAnswer {
                        packages: paths,
                        ..CallAnswer::plain(ask, answer)
                    }
                }
                Err(error) => CallAnswer::plain(ask, not_installed(&error)),
            }
        });
    }

    fn asked_to_call(
        &mut self,
        ask: u64,
        call: UpstreamToolCall,
        size: usize,
        caller: &mut CallOrigin<'_>,
    ) {
        let call_queue = &mut self.call_queue;
        call_queue.asked += 1;
        if call_queue.asked > MAX_CALLS_OF_A_CELL {
            let why = format!(
                "this cell has made {MAX_CALLS_OF_A_CELL} calls, which is all that one cell may \
                 make"
            );
            return self.refuse_call(ask, &call, ToolRefused::new(ToolReason::Budget, why));
        }
        if call_queue.waiting_bytes + size > MAX_WAITING_BYTES {
            let why = "too many large calls wait at the same time; await some of them before you \
                       start others";
            return self.refuse_call(ask, &call, ToolRefused::new(ToolReason::Budget, why));
        }
        // No approval is requested for a tool that the session was not granted. Such a tool looks
        // the same as one that does not exist.
        let fingerprint = match self.tool_as_it_is(&call) {
            Ok(fingerprint) => fingerprint,
            Err(refused) => return self.refuse_call(ask, &call, refused),
        };
        let UpstreamToolCall {
            server,
            tool,
            arguments,
            ..
        } = call;
        self.consider(
            Subject::Tool {
                server,
                tool,
                arguments,
                fingerprint,
            },
            PendingAction::Call { ask, size },
            caller,
        );
    }

    /// Returns the current fingerprint of a tool, if the tool exists and was granted to this
    /// session.
    fn tool_as_it_is(&self, call: &UpstreamToolCall) -> Result<Option<Fingerprint>, ToolRefused> {
        let UpstreamToolCall { server, tool, .. } = call;
        let (Some(broker), Some(owner)) = (&self.tools.0, &self.owner) else {
            return Err(ToolRefused::no_server(server));
        };
        let grants = &self.deliveries.grants;
        if grants.allow_all_of(server) {
            return broker.fingerprint(owner, server, tool);
        }
        let packages = broker.packages(owner);
        let package = packages
            .iter()
            .find(|package| package.server.as_str() == server);
        let mut granted = package
            .iter()
            .flat_map(|package| &package.tools)
            .map(|tool| &tool.original);
        if !granted.any(|tool| grants.allow(server, tool)) {
            return Err(ToolRefused::no_server(server));
        }
        // The broker's error about a missing tool may name other tools, which this session must not
        // learn.
        if !grants.allow(server, tool) {
            return Err(ToolRefused::no_tool(server, tool));
        }
        broker
            .fingerprint(owner, server, tool)
            .map_err(|refused| match refused.reason {
                ToolReason::Unknown => ToolRefused::no_tool(server, tool),
                _ => refused,
            })
    }

    /// Queues an allowed call.
    pub(super) fn enqueue_call(
        &mut self,
        ask: u64,
        call: UpstreamToolCall,
        size: usize,
        caller: &CallOrigin<'_>,
    ) {
        self.call_queue
            .waiting
            .push_back(Waiting { ask, call, size });
        self.call_queue.waiting_bytes += size;
        self.start_waiting_calls(caller);
    }

    /// Starts queued calls up to the limit.
    pub(super) fn start_waiting_calls(&mut self, caller: &CallOrigin<'_>) {
        while self.call_queue.calls_under_way() < MAX_CALLS
            && let Some(Waiting { ask, call, size }) = self.call_queue.waiting.pop_front()
        {
            self.call_queue.waiting_bytes -= size;
            self.call_tool(ask, call, caller);
        }
    }

    fn call_tool(&mut self, ask: u64, call: UpstreamToolCall, caller: &CallOrigin<'_>) {
        let (Some(broker), Some(owner)) = (self.tools.0.clone(), self.owner.clone()) else {
            let refused = ToolRefused::no_server(&call.server);
            return self.refuse_call(ask, &call, refused);
        };
        let Some(cell) = caller.cell() else { return };
        debug!(session = self.id.as_str(), "code calls a tool");
        let (session, progress) = (self.id.clone(), cell.reporter.progress_sender());
        let begun = Begun::now(&call);
        self.call_queue.work(ask, Some(begun), async move {
            let result = broker
                .call(&owner, &session, call, &|message| progress.send(message))
                .await;
            CallAnswer::of_call(ask, result)
        });
    }

    pub(super) fn refuse_call(&mut self, ask: u64, call: &UpstreamToolCall, refused: ToolRefused) {
        self.call_queue.note_at_once(call, refused.reason);
        self.call_queue.answer_at_once(ask, not_called(refused));
    }

    pub(super) fn refuse_host_call(&mut self, ask: u64, why: &str) {
        let refused = InstallError::Refused(why.to_owned());
        self.call_queue.answer_at_once(ask, not_installed(&refused));
    }
}

fn not_installed(error: &InstallError) -> HostCallAnswer {
    HostCallAnswer::NotInstalled {
        text: format!("{error}\n"),
    }
}

fn not_called(ToolRefused { reason, text }: ToolRefused) -> HostCallAnswer {
    HostCallAnswer::Refused {
        reason: reason.word(),
        text,
    }
}
