//! Questions of the running cell: taken, worked on beside everything else, answered exactly once.
//!
//! Each question that needs work has a task of its own, which ends with the cell. Answers leave one after another, and only while the channel takes them: code that
//! asks and does not read the answers fills nothing but its own channel. What may wait is bounded in number and in bytes.

use std::collections::{HashMap, VecDeque};
use std::io;

use cellblock_json::Excess;
use serde_json::{Value, json};
use tokio::task::{AbortHandle, JoinSet};
use tracing::debug;

use super::approvals::Wanted;
use super::{Driver, RequestId, Running, Task};
use crate::approval::{Fingerprint, Subject};
use crate::runner_client::{LARGEST_FRAME, Question};
use crate::session::install::{self, InstallError, InstallRequest, Installed};
use crate::session::tools::{
    Begun, CallEnd, ToolCall, ToolCalls, ToolReason, ToolRefused, ToolReply,
};

/// Installations of one cell that are under way at the same time.
const MOST_INSTALLATIONS: usize = 8;
/// Calls of tools that are under way at the same time. Others wait for them.
const MOST_CALLS: usize = 64;
/// Calls that one cell may make in all.
const MOST_CALLS_OF_A_CELL: u64 = 10_000;
/// Bytes of calls that wait.
const MOST_WAITING_BYTES: usize = 64 * 1024 * 1024;
/// Answers that wait because the code does not read. More means that it never will.
const MOST_UNREAD: usize = 2 * MOST_CALLS_OF_A_CELL as usize;
/// What an answer has beside the result of a tool.
const FRAME_RESERVE: usize = 4096;

/// What running code has asked for.
#[derive(Default)]
pub(super) struct Questions {
    tasks: JoinSet<Answered>,
    /// What is being worked on, by the number of its question.
    open: HashMap<u64, Open>,
    /// Calls that wait for a place, the oldest first.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// Answers that needed no work.
    ready: VecDeque<Answered>,
    /// Calls that the cell has made.
    asked: u64,
    calls: ToolCalls,
}

struct Open {
    task: AbortHandle,
    /// The call, when it is one.
    call: Option<Begun>,
    /// A command, which has bounds of its own.
    is_command: bool,
}

struct Waiting {
    ask: u64,
    call: ToolCall,
    size: usize,
}

/// The answer to a question.
pub(super) struct Answered {
    ask: u64,
    frame: Value,
    /// Folders of packages that the session has from now on.
    packages: Vec<String>,
    /// How a call ended, when it was one that had begun.
    ended: Option<CallEnd>,
}

impl Questions {
    /// Waits for the next answer; for ever when nothing was asked.
    pub(super) async fn next(&mut self) -> Answered {
        if let Some(answered) = self.ready.pop_front() {
            return answered;
        }
        while let Some(ended) = self.tasks.join_next().await {
            match ended {
                Ok(answered) => return answered,
                // One that was given up has been answered, or nobody waits for it.
                Err(error) if error.is_cancelled() => {}
                Err(error) => {
                    let broken = self
                        .open
                        .iter()
                        .find(|(_, open)| open.task.id() == error.id());
                    if let Some((&ask, _)) = broken {
                        return Answered::failed(ask);
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// Begins to count the calls of a cell.
    pub(super) fn begin_cell(&mut self) {
        (self.asked, self.calls) = (0, ToolCalls::default());
    }

    /// Gives up what is being answered; nobody waits for it any more. Returns the calls that the cell has made.
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

    fn note_at_once(&mut self, call: &ToolCall, reason: ToolReason) {
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
        work: impl Future<Output = Answered> + Send + 'static,
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

    /// Counts the commands that are under way.
    pub(super) fn commands(&self) -> usize {
        self.open.values().filter(|open| open.is_command).count()
    }

    /// Runs a command beside everything else.
    pub(super) fn run(&mut self, ask: u64, work: impl Future<Output = Value> + Send + 'static) {
        let task = self
            .tasks
            .spawn(async move { Answered::plain(ask, work.await) });
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
    pub(super) fn answer_at_once(&mut self, ask: u64, frame: Value) {
        self.ready.push_back(Answered::plain(ask, frame));
    }

    /// Stops to work on a question, and has it answered.
    fn withdraw(&mut self, ask: u64) {
        let refused = ToolRefused::new(
            ToolReason::Cancelled,
            "the call was given up by the code that made it",
        );
        if let Some(Open { task, call, .. }) = self.open.remove(&ask) {
            task.abort();
            self.note(call, CallEnd::Refused(ToolReason::Cancelled));
            self.ready
                .push_back(Answered::plain(ask, refused_frame(ask, &refused)));
        } else if let Some(place) = self.waiting.iter().position(|waiting| waiting.ask == ask) {
            let Waiting { call, size, .. } =
                self.waiting.remove(place).expect("it was found there");
            self.waiting_bytes -= size;
            self.note_at_once(&call, ToolReason::Cancelled);
            self.ready
                .push_back(Answered::plain(ask, refused_frame(ask, &refused)));
        }
    }
}

impl Answered {
    fn plain(ask: u64, frame: Value) -> Answered {
        Answered {
            ask,
            frame,
            packages: Vec::new(),
            ended: None,
        }
    }

    /// The answer to a question whose work broke off in a way that it should not.
    fn failed(ask: u64) -> Answered {
        let refused = ToolRefused::new(
            ToolReason::Other,
            "the server failed to do this; its log says more",
        );
        Answered {
            ended: Some(CallEnd::Refused(refused.reason)),
            ..Answered::plain(ask, refused_frame(ask, &refused))
        }
    }
}

impl Driver {
    /// Takes a question of the running cell. Each is answered exactly once, as long as the cell runs.
    pub(super) fn asked(&mut self, id: RequestId, ask: u64, question: Question) {
        if !matches!(&self.running, Some(Running { id: running, task: Task::Cell { .. }, .. }) if *running == id)
        {
            return;
        }
        if self.questions.knows(ask) || self.parking.knows(ask) {
            return self.broken("a question was asked under the number of another".to_owned());
        }
        if self.questions.ready.len() >= MOST_UNREAD {
            return self.broken("the answers to too many questions were not read".to_owned());
        }
        match question {
            Question::Install { requirements, upgrade } => {
                if let Err(error) = install::check_bounds(&requirements) {
                    return self.refuse_question(ask, &error.to_string());
                }
                self.consider(Subject::Install { requirements }, Wanted::Install { ask, upgrade });
            }
            Question::CallTool { server, tool, arguments, size } => {
                self.asked_to_call(ask, ToolCall { server, tool, arguments, fingerprint: None }, size);
            }
            Question::Shell(command) => self.asked_to_run(ask, *command),
            Question::Withdraw { of } => {
                if !self.withdraw_parked(of) {
                    self.questions.withdraw(of);
                }
                let frame = json!({"type": "answer", "ask": ask, "ok": true});
                self.questions.ready.push_back(Answered::plain(ask, frame));
                self.call_those_that_wait();
            }
            Question::TooMuch(Excess::Depth(_)) => self.refuse_question(
                ask,
                "the arguments are nested more than 100 levels deep; send a flatter value, or JSON in a text",
            ),
            Question::TooMuch(Excess::Memory(_)) => self.refuse_question(
                ask,
                "the arguments hold more values than a call may have; send fewer at a time, or JSON in a text",
            ),
            Question::Unknown => self.refuse_question(ask, "this server does not know that question"),
        }
    }

    /// Sends an answer. What it says of the session is noted first.
    pub(super) fn answer_question(&mut self, answered: Answered) {
        let Answered {
            ask,
            frame,
            packages,
            ended,
        } = answered;
        let open = self.questions.open.remove(&ask);
        if let (Some(Open { call, .. }), Some(ended)) = (open, ended) {
            self.questions.note(call, ended);
        }
        if !packages.is_empty() {
            self.have(&packages);
        }
        self.send(&frame, b"");
        self.call_those_that_wait();
    }

    pub(super) fn install_packages(&mut self, ask: u64, requirements: Vec<String>, upgrade: bool) {
        let Some(installer) = self.settings.packages.0.clone() else {
            return self.refuse_question(ask, "packages cannot be installed on this server");
        };
        if self.questions.installations() >= MOST_INSTALLATIONS {
            return self
                .refuse_question(ask, "too many installations are under way in this session");
        }
        debug!(session = self.id.as_str(), "code asks for packages");
        let request = InstallRequest {
            requirements,
            upgrade,
            has: self.shared.facts().packages.clone(),
        };
        self.questions.work(ask, None, async move {
            match installer.install(request, &|_| ()).await {
                Ok(Installed { paths, text }) => {
                    let frame = json!({"type": "answer", "ask": ask, "ok": true, "text": text, "paths": paths});
                    Answered { packages: paths, ..Answered::plain(ask, frame) }
                }
                Err(error) => Answered::plain(ask, not_installed_frame(ask, &error)),
            }
        });
    }

    fn asked_to_call(&mut self, ask: u64, call: ToolCall, size: usize) {
        let questions = &mut self.questions;
        questions.asked += 1;
        if questions.asked > MOST_CALLS_OF_A_CELL {
            let why = format!(
                "this cell has made {MOST_CALLS_OF_A_CELL} calls, which is all that one cell may make"
            );
            return self.refuse_call(ask, &call, &ToolRefused::new(ToolReason::Budget, why));
        }
        if questions.waiting_bytes + size > MOST_WAITING_BYTES {
            let why = "too many large calls wait at the same time; await some of them before you start others";
            return self.refuse_call(ask, &call, &ToolRefused::new(ToolReason::Budget, why));
        }
        // Nobody is asked about what the session was not granted, which looks like what is not there.
        let fingerprint = match self.tool_as_it_is(&call) {
            Ok(fingerprint) => fingerprint,
            Err(refused) => return self.refuse_call(ask, &call, &refused),
        };
        let ToolCall {
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
            Wanted::Call { ask, size },
        );
    }

    /// Returns what a tool is at this moment, if this session was granted it and it is there.
    fn tool_as_it_is(&self, call: &ToolCall) -> Result<Option<Fingerprint>, ToolRefused> {
        let ToolCall { server, tool, .. } = call;
        let (Some(broker), Some(customer)) = (&self.settings.tools.0, &self.customer) else {
            return Err(ToolRefused::no_server(server));
        };
        let grants = &self.deliveries.grants;
        if grants.allow_all_of(server) {
            return broker.fingerprint(&customer.owner, server, tool);
        }
        let packages = broker.packages(&customer.owner);
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
        // What the broker says of a tool that is not there may name others, which are none of this session's business.
        if !grants.allow(server, tool) {
            return Err(ToolRefused::no_tool(server, tool));
        }
        broker
            .fingerprint(&customer.owner, server, tool)
            .map_err(|refused| match refused.reason {
                ToolReason::Unknown => ToolRefused::no_tool(server, tool),
                _ => refused,
            })
    }

    /// Puts a call that may be made behind those that wait for a place.
    pub(super) fn line_up_call(&mut self, ask: u64, call: ToolCall, size: usize) {
        self.questions
            .waiting
            .push_back(Waiting { ask, call, size });
        self.questions.waiting_bytes += size;
        self.call_those_that_wait();
    }

    /// Begins calls as long as there is a place.
    fn call_those_that_wait(&mut self) {
        while self.questions.calls_under_way() < MOST_CALLS
            && let Some(Waiting { ask, call, size }) = self.questions.waiting.pop_front()
        {
            self.questions.waiting_bytes -= size;
            self.call_tool(ask, call);
        }
    }

    fn call_tool(&mut self, ask: u64, call: ToolCall) {
        let (Some(broker), Some(customer)) = (self.settings.tools.0.clone(), &self.customer) else {
            let refused = ToolRefused::no_server(&call.server);
            return self.refuse_call(ask, &call, &refused);
        };
        let Some(Running {
            task: Task::Cell { teller, .. },
            ..
        }) = &self.running
        else {
            return;
        };
        debug!(session = self.id.as_str(), "code calls a tool");
        let (owner, session, crier) = (customer.owner.clone(), self.id.clone(), teller.crier());
        let begun = Begun::now(&call);
        self.questions.work(ask, Some(begun), async move {
            let result = broker
                .call(&owner, &session, call, &|news| crier.say(news))
                .await;
            let (frame, ended) = result_frame(ask, result);
            Answered {
                ended: Some(ended),
                ..Answered::plain(ask, frame)
            }
        });
    }

    pub(super) fn refuse_call(&mut self, ask: u64, call: &ToolCall, refused: &ToolRefused) {
        self.questions.note_at_once(call, refused.reason);
        self.questions
            .ready
            .push_back(Answered::plain(ask, refused_frame(ask, refused)));
    }

    pub(super) fn refuse_question(&mut self, ask: u64, why: &str) {
        let frame = not_installed_frame(ask, &InstallError::Refused(why.to_owned()));
        self.questions.ready.push_back(Answered::plain(ask, frame));
    }
}

fn not_installed_frame(ask: u64, error: &InstallError) -> Value {
    json!({"type": "answer", "ask": ask, "ok": false, "text": format!("{error}\n"), "paths": []})
}

fn refused_frame(ask: u64, refused: &ToolRefused) -> Value {
    let ToolRefused { reason, text } = refused;
    json!({"type": "answer", "ask": ask, "ok": false, "reason": reason.word(), "text": text})
}

/// Returns the answer with the result of a tool, if it fits into a frame.
fn result_frame(ask: u64, result: Result<ToolReply, ToolRefused>) -> (Value, CallEnd) {
    let ended = CallEnd::of(&result);
    match result {
        Ok(ToolReply {
            content,
            structured,
            is_error,
        }) => {
            let frame = json!({
                "type": "answer", "ask": ask, "ok": true,
                "content": content, "structured": structured, "is_error": is_error,
            });
            if written_size(&frame) <= LARGEST_FRAME - FRAME_RESERVE {
                return (frame, ended);
            }
            let why = "the result of the tool is larger than a session can be sent";
            let refused = ToolRefused::new(ToolReason::TooLarge, why);
            (
                refused_frame(ask, &refused),
                CallEnd::Refused(refused.reason),
            )
        }
        Err(refused) => (refused_frame(ask, &refused), ended),
    }
}

/// Returns how many bytes a value has as JSON, without writing them anywhere.
fn written_size(value: &Value) -> usize {
    struct Counter(usize);
    impl io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    serde_json::to_writer(&mut counter, value).expect("a JSON value can be written");
    counter.0
}
