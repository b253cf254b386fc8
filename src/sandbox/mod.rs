//! Sandboxes: the isolated places that sessions run in.
//!
//! A `Backend` makes sandboxes; a `Sandbox` holds files and at most one interpreter. Two kinds of knowledge leave this room: facts
//! from the kernel or engine (alive, exit, memory) and the isolation that was enforced. What the runner inside says travels on the
//! interpreter's channel and is nobody's business here.
//!
//! A sandbox that has run a user's code is destroyed, never handed to another session.

pub mod container;
pub mod fake;
pub mod isolation;
pub mod masks;
pub mod native;
pub mod way_out;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use async_trait::async_trait;
pub use cellblock_egress::gateway::{Asker, Blocked, Reason};
pub use cellblock_egress::rules::{Rule, Rules};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use crate::reaction::CpuWaits;
pub use isolation::{Isolation, Layer, LayerKind};
pub use native::WORK_FOLDER;
pub use way_out::Network;

/// Makes sandboxes.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Follows the work that must be done once before the first sandbox: the environment, the warm interpreter.
    fn preparation(&self) -> watch::Receiver<Preparation>;

    /// Makes a sandbox with a fresh interpreter in it, waiting for the preparation if need be.
    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Makes a sandbox like `launch` that shows nothing of the operator's: no workspace, no mounts. It is for work of the server's own, which nobody
    /// else may see or touch.
    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Destroys everything this backend made. Called once, when the server ends.
    async fn shut_down(&self);
}

/// How far the one-time work has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Preparation {
    /// Still at work; `step` is a sentence for a person, such as "installing numpy".
    Working {
        step: String,
        done: u64,
        total: Option<u64>,
    },
    Ready,
    /// It failed. It is tried again after a pause, and when somebody asks for a session.
    Failed {
        why: String,
    },
}

impl Preparation {
    /// Says which step it is at, with its count if it has one; nothing when it is not at work.
    pub fn step_text(&self) -> Option<String> {
        match self {
            Preparation::Working {
                step,
                done,
                total: Some(total),
            } => Some(format!("{step}, {done} of {total}")),
            Preparation::Working { step, .. } => Some(step.clone()),
            Preparation::Ready | Preparation::Failed { .. } => None,
        }
    }
}

/// One isolated place: files, limits, and at most one interpreter.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Tells what separates this sandbox from the host.
    fn isolation(&self) -> &Isolation;

    /// Ends the current interpreter and every process it left behind, then starts a fresh one. Files stay, unless the sandbox itself
    /// was lost and another one takes its place; the interpreter says so.
    async fn restart(&mut self) -> Result<Interpreter, LaunchError>;

    /// Reads from the kernel how much memory the sandbox holds now and held at most since the last `forget_peak`.
    fn memory(&self) -> MemoryUse;

    /// Starts a new measurement of the peak.
    fn forget_peak(&self);

    /// Returns what reads the sandbox's use from the kernel, also while somebody else holds the sandbox. It is good until the sandbox is destroyed
    /// or its interpreter is another one.
    fn gauge(&self) -> Arc<dyn Gauge>;

    /// Copies the interpreter while it lives. The copy stands still until it is forked or restored; the interpreter itself goes on.
    ///
    /// When `told` fires, the interpreter is watched and must be asked on its channel to come to its branch point; the copy is made there. An
    /// interpreter that does not come there in time is left alone, and the attempt fails.
    async fn checkpoint(
        &mut self,
        told: oneshot::Sender<()>,
    ) -> Result<CheckpointId, CheckpointError>;

    /// Ends the current interpreter, if any, and every process it left behind, and puts a copy of the checkpoint in its place. The checkpoint
    /// stays.
    async fn restore(&mut self, checkpoint: CheckpointId) -> Result<Interpreter, LaunchError>;

    /// Makes another sandbox, as separate from this one as from any other, whose interpreter is a copy of the checkpoint.
    async fn fork(
        &self,
        checkpoint: CheckpointId,
        terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Tells whether the checkpoint is still there; the kernel ends the oldest ones when memory runs out.
    fn has(&self, checkpoint: CheckpointId) -> bool;

    /// Tells whether the sandbox was ended from outside, and its files and checkpoints with it.
    /// `restart` puts another one in its place.
    fn is_gone(&self) -> bool {
        false
    }

    /// Gives a checkpoint and its memory up. One that is gone already is no error.
    fn forget(&self, checkpoint: CheckpointId);

    /// Returns what starts programs in the sandbox, also while somebody else holds the sandbox. It is good until the sandbox is destroyed. Where a backend has
    /// nothing of the kind, it starts none.
    fn launcher(&self) -> Arc<dyn Launcher> {
        Arc::new(NoLauncher)
    }

    /// Returns the working folder as it is seen inside.
    fn work_folder(&self) -> &str {
        WORK_FOLDER
    }

    /// Tells what can be reached from inside.
    fn rules(&self) -> Rules;

    /// Changes what can be reached from inside, at once, also for connections that are open. What the backend was not made for stays closed.
    fn set_rules(&self, rules: Rules);

    /// Says who decides about names that no rule lists, while connections to them wait. Nobody at first, and nobody ever where a backend has no gateway.
    fn set_asker(&self, _asker: Option<Arc<dyn Asker>>) {}

    /// Returns the connections that were refused since this was last asked.
    fn take_blocked(&self) -> Vec<Blocked>;

    /// Ends every process and removes every file. Returns when nothing is left; destroying twice is harmless. Forks live on.
    async fn destroy(&mut self);
}

/// Names a checkpoint within its sandbox. Later ones have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId(pub u32);

/// How a fork is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkTerms {
    /// The fork's beginning is kept as a checkpoint.
    pub keep_beginning: bool,
    /// Nobody needs the checkpoint afterwards; it is gone then. Otherwise it stays.
    pub last: bool,
}

/// Why a live interpreter could not be copied. It goes on as if nothing had been asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CheckpointError {
    #[error("sessions cannot be copied here: {why}")]
    Unsupported { why: String },
    #[error("the session could not be copied: {why}")]
    Failed { why: String },
}

/// A live interpreter inside a sandbox.
pub struct Interpreter {
    /// Frames travel here; see `runner/PROTOCOL.md`. The gate is open; the `hello` frame has not been read yet.
    pub channel: UnixStream,
    /// How long after each other the channel and the pipes may bring what was written one after the other. Zero when the interpreter itself writes into them.
    pub skew: Duration,
    pub process: Box<dyn Process>,
    /// A checkpoint of the state in which it begins, files included, if there is one.
    pub beginning: Option<CheckpointId>,
    /// It takes the place of one whose sandbox was lost, and with it the files.
    pub files_lost: bool,
}

/// The main process of an interpreter, or of a program that was launched, as the host sees it.
#[async_trait]
pub trait Process: Send + Sync {
    /// Asks the running code, or a program with all of its group, to stop (SIGINT).
    fn interrupt(&self);

    /// Ends the interpreter and everything it started, or a program with all of its group. Files stay.
    fn kill(&self);

    /// Waits for the end. Answers at once when called again afterwards.
    async fn exited(&mut self) -> Exit;
}

/// Starts programs in a sandbox, beside its interpreter. A program has the limits of the session, and nothing that the session's code could reach into.
#[async_trait]
pub trait Launcher: Send + Sync {
    /// Starts a program, and returns when it has begun. It ends, with the processes of its group, when the value is dropped.
    async fn launch(&self, program: Program) -> Result<Box<dyn Process>, ProgramError>;
}

/// The launcher of a backend that has none.
struct NoLauncher;

#[async_trait]
impl Launcher for NoLauncher {
    async fn launch(&self, _program: Program) -> Result<Box<dyn Process>, ProgramError> {
        Err(ProgramError::Unsupported {
            why: "this kind of sandbox starts none beside a session".to_owned(),
        })
    }
}

/// A program that is to be started.
#[derive(Debug)]
pub struct Program {
    /// Itself and its arguments. Without a slash it is looked for in the variable `PATH`.
    pub words: Vec<String>,
    /// Where it begins, as it is seen inside.
    pub folder: String,
    /// How its variables differ from those that a fresh session has; `None` takes one away.
    pub environment: Vec<(String, Option<String>)>,
    /// What it reads; nothing without.
    pub input: Option<Vec<u8>>,
    /// What it writes to.
    pub output: OwnedFd,
    pub errors: OwnedFd,
}

/// Why a program was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("there is no such program")]
    Missing,
    /// In the kernel's words.
    #[error("the program could not be started: {why}")]
    Refused { why: String },
    #[error("programs cannot be started here: {why}")]
    Unsupported { why: String },
    #[error("the program could not be started safely: {why}")]
    Failed { why: String },
}

/// Whose memory ran out, when it was not the sandbox's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OuterMemory {
    /// That of the session with its checkpoints and forks.
    Family { limit: u64 },
    /// That of the machine, or of a control group that the server is in.
    Machine,
}

impl std::fmt::Display for OuterMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OuterMemory::Family { limit } => write!(
                formatter,
                "the session, its checkpoints and its forks together used more than {} MiB of memory",
                limit >> 20
            ),
            OuterMemory::Machine => formatter.write_str(
                "the memory of the machine, or of the control group that the server is in, ran out",
            ),
        }
    }
}

/// How an interpreter ended, as the kernel tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// The sandbox used more memory than it may and the kernel chose this process.
    OutOfMemory {
        limit: u64,
        /// The sandbox goes on without it, or its working folder is the operator's.
        files_kept: bool,
    },
    /// Memory ran out further out than its sandbox, and the kernel chose this process.
    OutOfMemoryOutside {
        whose: OuterMemory,
        /// As above.
        files_kept: bool,
    },
    /// Its whole sandbox was ended from outside, or the jail or engine that made it went away.
    SandboxGone {
        /// The working folder is the operator's and outlives sandboxes.
        files_kept: bool,
    },
    /// The kernel no longer knows.
    Unknown,
}

impl Exit {
    /// Tells whether the files of the working folder are still there after it.
    pub fn files_kept(self) -> bool {
        match self {
            Exit::OutOfMemory { files_kept, .. }
            | Exit::OutOfMemoryOutside { files_kept, .. }
            | Exit::SandboxGone { files_kept } => files_kept,
            Exit::Code(_) | Exit::Signal(_) | Exit::Unknown => true,
        }
    }
}

/// Bytes of memory held by a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    pub now: u64,
    /// The most since the last `forget_peak`; zero where the kernel does not tell.
    pub peak: u64,
}

/// Reads from the kernel what a sandbox uses.
pub trait Gauge: Send + Sync {
    /// Returns processor time used since the sandbox was made. It never falls while the sandbox lives; zero when it is gone.
    fn processor_time(&self) -> Duration;

    /// Returns the bytes of memory that it holds now, files in its own folders included.
    fn memory(&self) -> u64;

    /// Returns the bytes of files in its own folders. Folders of the operator are not its own. Zero where no control group counts.
    fn stored(&self) -> u64;

    /// Returns how long the threads of its interpreter have waited for a processor. Nothing where
    /// that cannot be told.
    fn cpu_waits(&self) -> CpuWaits {
        CpuWaits::default()
    }
}

/// Limits every sandbox of a backend gets.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxLimits {
    pub memory: u64,
    /// What a session, its checkpoints and all its forks may hold together; at least `memory`.
    pub family_memory: u64,
    pub cpus: f64,
    pub processes: u32,
    /// Bytes in the private working folder, and again in the temporary folder.
    pub disk: u64,
    /// Files and folders in each of them.
    pub files: u64,
}

/// Why no sandbox could be made.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
pub enum LaunchError {
    #[error("its preparation failed: {why}")]
    Preparation { why: String },
    #[error("the isolation layer \"{}\" cannot be enforced here: {why}", kind.name())]
    LayerMissing { kind: LayerKind, why: String },
    #[error("the sandbox could not be started: {why}")]
    Start { why: String },
    #[error("the sandbox did not start within {}", humantime(*.0))]
    TimedOut(Duration),
    #[error("the server is busy with starting other sessions; try again in a minute")]
    Busy,
}

fn humantime(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}
