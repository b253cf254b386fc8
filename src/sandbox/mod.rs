//! Sandboxes: the isolated places that sessions run in.
//!
//! A `Backend` makes sandboxes; a `Sandbox` holds files and at most one interpreter. This module
//! exposes facts from the kernel or engine (alive, exit, memory) and the isolation that was
//! enforced. Messages of the runner inside travel on the interpreter's channel and are not
//! interpreted here.
//!
//! A sandbox that has run a user's code is destroyed, never handed to another session.

pub mod container;
pub mod egress;
#[cfg(any(test, all(feature = "test-support", debug_assertions)))]
pub mod fake;
pub mod isolation;
pub mod masks;
pub mod native;

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
pub use egress::SandboxNetwork;
pub use isolation::{Isolation, LayerKind, LayerState};
pub use native::WORK_FOLDER;

/// Makes sandboxes.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Returns the progress of the one-time work before the first sandbox: the environment and the
    /// warm interpreter.
    fn preparation(&self) -> watch::Receiver<Preparation>;

    /// Makes a sandbox with a fresh interpreter in it. Waits for the preparation if necessary.
    async fn launch(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Makes a sandbox like `launch`, but without anything of the operator's: no workspace, no
    /// mounts. It is for the server's own work, which nothing else may see or touch.
    async fn launch_apart(&self) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Destroys everything this backend made. Called once, when the server stops.
    async fn shut_down(&self);
}

/// Progress of the one-time preparation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Preparation {
    /// In progress; `step` is a sentence for a person, such as "installing numpy".
    Working {
        step: String,
        done: u64,
        total: Option<u64>,
    },
    Ready,
    /// It failed. It is retried after a pause, and when a session is requested.
    Failed {
        why: String,
    },
}

impl Preparation {
    /// Returns the current step, with its count if it has one; `None` if no work is in progress.
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
    /// Returns the layers that separate this sandbox from the host.
    fn isolation(&self) -> &Isolation;

    /// Ends the current interpreter and every process it left behind, then starts a fresh one.
    /// Files are kept, unless the sandbox itself was lost and is replaced; see
    /// `Interpreter::files_lost`.
    async fn restart(&mut self) -> Result<Interpreter, LaunchError>;

    /// Reads the current memory use of the sandbox, and the peak since the last `forget_peak`, from
    /// the kernel.
    fn memory(&self) -> MemoryUse;

    /// Starts a new measurement of the peak.
    fn forget_peak(&self);

    /// Returns a reader of the sandbox's resource use, which works while the sandbox itself is
    /// borrowed. It is valid until the sandbox is destroyed or its interpreter is replaced.
    fn gauge(&self) -> Arc<dyn Gauge>;

    /// Copies the running interpreter. The copy is suspended until it is forked or restored; the
    /// interpreter itself continues.
    ///
    /// When `told` fires, the interpreter is traced and must be asked on its channel to go to its
    /// branch point, where the copy is made. If it does not arrive in time, it is left alone and
    /// the attempt fails.
    async fn checkpoint(
        &mut self,
        told: oneshot::Sender<()>,
    ) -> Result<CheckpointId, CheckpointError>;

    /// Ends the current interpreter, if any, and every process it left behind, and replaces it with
    /// a copy of the checkpoint. The checkpoint is kept.
    async fn restore(&mut self, checkpoint: CheckpointId) -> Result<Interpreter, LaunchError>;

    /// Makes another sandbox, as separate from this one as from any other, whose interpreter is a
    /// copy of the checkpoint.
    async fn fork(
        &self,
        checkpoint: CheckpointId,
        terms: ForkTerms,
    ) -> Result<(Box<dyn Sandbox>, Interpreter), LaunchError>;

    /// Returns whether the checkpoint still exists. The kernel ends the oldest ones when memory
    /// runs out.
    fn has(&self, checkpoint: CheckpointId) -> bool;

    /// Returns whether the sandbox was ended from outside, together with its files and checkpoints.
    /// `restart` replaces it.
    fn is_gone(&self) -> bool {
        false
    }

    /// Discards a checkpoint and frees its memory. A checkpoint that no longer exists is not an
    /// error.
    fn forget(&self, checkpoint: CheckpointId);

    /// Returns a launcher of programs in the sandbox, which works while the sandbox itself is
    /// borrowed. It is valid until the sandbox is destroyed. The default launcher rejects every
    /// program.
    fn launcher(&self) -> Arc<dyn Launcher> {
        Arc::new(NoLauncher)
    }

    /// Returns the path of the working folder inside.
    fn work_folder(&self) -> &str {
        WORK_FOLDER
    }

    /// Returns the network rules of the sandbox.
    fn rules(&self) -> Rules;

    /// Changes the network rules at once, including for open connections. Destinations that the
    /// backend was not set up for stay closed.
    fn set_rules(&self, rules: Rules);

    /// Sets who decides about names that no rule lists, while connections to them wait. Initially
    /// there is no asker. A backend without a gateway ignores this.
    fn set_asker(&self, _asker: Option<Arc<dyn Asker>>) {}

    /// Returns the connections refused since the last call.
    fn take_blocked(&self) -> Vec<Blocked>;

    /// Ends every process and removes every file. Returns when nothing is left; destroying twice is
    /// harmless. Forks are not affected.
    async fn destroy(&mut self);
}

/// Identifies a checkpoint within its sandbox. Later ones have larger numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointId(pub u32);

/// Options for a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkTerms {
    /// Keep the initial state of the fork as a checkpoint.
    pub keep_beginning: bool,
    /// The checkpoint is not needed afterwards and is discarded. Otherwise it is kept.
    pub last: bool,
}

/// Why a running interpreter could not be copied. The interpreter continues unaffected.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CheckpointError {
    #[error("sessions cannot be copied here: {why}")]
    Unsupported { why: String },
    #[error("the session could not be copied: {why}")]
    Failed { why: String },
}

/// A running interpreter inside a sandbox.
pub struct Interpreter {
    /// Carries frames; see `runner/PROTOCOL.md`. The gate is open; the `hello` frame has not been
    /// read yet.
    pub channel: UnixStream,
    /// Maximum delay between the channel and the pipes for data that was written in sequence. Zero
    /// when the interpreter writes into them directly.
    pub skew: Duration,
    pub process: Box<dyn Process>,
    /// A checkpoint of its initial state, files included, if there is one.
    pub beginning: Option<CheckpointId>,
    /// It replaces an interpreter whose sandbox was lost together with its files.
    pub files_lost: bool,
}

/// The main process of an interpreter, or of a launched program, as the host sees it.
#[async_trait]
pub trait Process: Send + Sync {
    /// Asks the running code, or a program and its whole process group, to stop (SIGINT).
    fn interrupt(&self);

    /// Ends the interpreter and everything it started, or a program and its whole process group.
    /// Files are kept.
    fn kill(&self);

    /// Waits for the exit. Returns at once when called again afterwards.
    async fn exited(&mut self) -> Exit;
}

/// Starts programs in a sandbox, beside its interpreter. A program has the limits of the session,
/// and the session's code cannot reach into it.
#[async_trait]
pub trait Launcher: Send + Sync {
    /// Starts a program, and returns when it is running. The program and its process group end when
    /// the value is dropped.
    async fn launch(&self, program: ProgramSpec) -> Result<Box<dyn Process>, ProgramError>;
}

/// The launcher of a backend that does not start programs.
struct NoLauncher;

#[async_trait]
impl Launcher for NoLauncher {
    async fn launch(&self, _program: ProgramSpec) -> Result<Box<dyn Process>, ProgramError> {
        Err(ProgramError::Unsupported {
            why: "this kind of sandbox starts none beside a session".to_owned(),
        })
    }
}

/// A program to start.
#[derive(Debug)]
pub struct ProgramSpec {
    /// The program and its arguments. Without a slash it is searched for in `PATH`.
    pub words: Vec<String>,
    /// Its working directory, as a path inside.
    pub folder: String,
    /// Changes to the environment of a fresh session; `None` removes a variable.
    pub environment: Vec<(String, Option<String>)>,
    /// Standard input; empty if `None`.
    pub input: Option<Vec<u8>>,
    /// Standard output.
    pub output: OwnedFd,
    pub errors: OwnedFd,
}

/// Why a program was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    #[error("there is no such program")]
    Missing,
    /// The kernel's error text.
    #[error("the program could not be started: {why}")]
    Refused { why: String },
    #[error("programs cannot be started here: {why}")]
    Unsupported { why: String },
    #[error("the program could not be started safely: {why}")]
    Failed { why: String },
}

/// Which memory limit was reached, when it was not the sandbox's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OuterMemory {
    /// The limit of the session with its checkpoints and forks.
    Family { limit: u64 },
    /// The machine's memory, or the limit of a control group that contains the server.
    Machine,
}

impl std::fmt::Display for OuterMemory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            OuterMemory::Family { limit } => write!(
                formatter,
                "the session, its checkpoints and its forks together used more than {} MiB of \
                 memory",
                limit >> 20
            ),
            OuterMemory::Machine => formatter.write_str(
                "the memory of the machine, or of the control group that the server is in, ran out",
            ),
        }
    }
}

/// How an interpreter ended, according to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// The sandbox exceeded its memory limit and the kernel chose this process.
    OutOfMemory {
        limit: u64,
        /// The sandbox continues without it, or its working folder is the operator's.
        files_kept: bool,
    },
    /// A memory limit outside its sandbox was reached, and the kernel chose this process.
    OutOfMemoryOutside {
        whose: OuterMemory,
        /// As above.
        files_kept: bool,
    },
    /// Its whole sandbox was ended from outside, or the jail or engine that made it is gone.
    SandboxGone {
        /// The working folder is the operator's and outlives sandboxes.
        files_kept: bool,
    },
    /// The kernel no longer has the exit status.
    Unknown,
}

impl Exit {
    /// Returns whether the files of the working folder still exist.
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
    /// The maximum since the last `forget_peak`; zero where the kernel does not report it.
    pub peak: u64,
}

/// Reads the resource use of a sandbox from the kernel.
pub trait Gauge: Send + Sync {
    /// Returns the CPU time used since the sandbox was made. It never decreases while the sandbox
    /// exists; zero when it is gone.
    fn processor_time(&self) -> Duration;

    /// Returns the bytes of memory in use, including files in its own folders.
    fn memory(&self) -> u64;

    /// Returns the bytes of files in its own folders, without those of the operator. Zero without
    /// control groups.
    fn stored(&self) -> u64;

    /// Returns how long the threads of its interpreter have waited for a CPU. Empty where this is
    /// unknown.
    fn cpu_waits(&self) -> CpuWaits {
        CpuWaits::default()
    }
}

/// Limits of every sandbox of a backend.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxLimits {
    pub memory: u64,
    /// Limit for a session, its checkpoints and all its forks together; at least `memory`.
    pub family_memory: u64,
    pub cpus: f64,
    pub processes: u32,
    /// Bytes in the private working folder, and the same again in the temporary folder.
    pub disk: u64,
    /// Files and folders in each of them.
    pub files: u64,
}

/// Why a sandbox could not be made.
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
