//! Shell commands: code that may not start programs requests one, the request is approved or
//! refused, and the sandbox launches the program.
//!
//! The code passes the pipes that the command writes to. Its output therefore takes the same path
//! as all output and is not buffered here. When the code stops waiting, or the cell has ended, the
//! command and its process group are interrupted and soon killed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use tracing::debug;

use super::approvals::PendingAction;
use super::host_calls::{CallOrigin, HostCalls};
use crate::approval::Subject;
use crate::runner_client::{ClaimedCommand, HostCallAnswer, OutputPipes};
use crate::sandbox::{Exit, Launcher, Process, ProgramError, ProgramSpec, WORK_FOLDER};
use crate::session::shell::ShellCommand;

/// Concurrent commands of one cell.
const MAX_COMMANDS: usize = 16;
/// How long an interrupted command may take to exit.
const GRACE: Duration = Duration::from_millis(300);

/// A command that waits for approval, with everything that it needs to run. Its text is shown to
/// the person, and the same value is run.
pub(super) struct CommandRequest {
    pub(super) ask: u64,
    pub(super) command: ShellCommand,
    pub(super) outlets: OutputPipes,
}

impl CommandRequest {
    /// Returns the approximate number of bytes that it holds.
    pub(super) fn size(&self) -> usize {
        self.command.text().len() + self.command.input().map_or(0, <[u8]>::len)
    }
}

impl HostCalls {
    /// Handles a command requested by the running cell.
    pub(super) fn asked_to_run(
        &mut self,
        ask: u64,
        claimed: ClaimedCommand,
        caller: &mut CallOrigin<'_>,
    ) {
        let Some(outlets) = claimed.outlets.clone().filter(only_take) else {
            return self.refuse_command(
                ask,
                "invalid",
                "the command came without pipes that it could write to",
            );
        };
        let usual_folder = caller
            .sandbox
            .map_or(WORK_FOLDER, |sandbox| sandbox.work_folder());
        match ShellCommand::new(claimed, usual_folder) {
            Ok(command) => self.consider_command(ask, command, outlets, caller),
            Err(unfit) => self.refuse_command(ask, "invalid", &unfit.to_string()),
        }
    }

    /// Decides about a command by its `kind` and `text`. The value itself is what runs afterwards.
    fn consider_command(
        &mut self,
        ask: u64,
        command: ShellCommand,
        outlets: OutputPipes,
        caller: &mut CallOrigin<'_>,
    ) {
        let subject = Subject::Shell {
            command: command.text(),
            kind: command.kind(),
        };
        self.consider(
            subject,
            PendingAction::Command(Box::new(CommandRequest {
                ask,
                command,
                outlets,
            })),
            caller,
        );
    }

    /// Runs an allowed command.
    pub(super) fn run_command(
        &mut self,
        ask: u64,
        command: ShellCommand,
        outlets: OutputPipes,
        caller: &CallOrigin<'_>,
    ) {
        if self.call_queue.commands() >= MAX_COMMANDS {
            return self.refuse_command(
                ask,
                "budget",
                "too many commands are under way in this session",
            );
        }
        let Some(launcher) = caller.sandbox.map(|sandbox| sandbox.launcher()) else {
            return self.refuse_command(
                ask,
                "unavailable",
                "the sandbox is not there to run commands",
            );
        };
        debug!(session = self.id.as_str(), "code runs a command");
        self.call_queue
            .run(ask, async move { run(&command, launcher, outlets).await });
    }

    /// Answers that a command was not run. The text appears in the traceback.
    pub(super) fn refuse_command(&mut self, ask: u64, reason: &'static str, text: &str) {
        self.call_queue.answer_at_once(ask, refusal(reason, text));
    }
}

fn refusal(reason: &'static str, text: &str) -> HostCallAnswer {
    HostCallAnswer::Refused {
        reason,
        text: text.to_owned(),
    }
}

/// Returns whether both ends are write-only: a program must not read input from the pipe that it
/// writes to.
fn only_take(outlets: &OutputPipes) -> bool {
    outlets.0.iter().all(|end| {
        let flags = rustix::fs::fcntl_getfl(end).unwrap_or(OFlags::RDWR);
        flags & OFlags::RWMODE == OFlags::WRONLY
    })
}

/// Runs a command to its end and returns the answer.
async fn run(
    command: &ShellCommand,
    launcher: Arc<dyn Launcher>,
    outlets: OutputPipes,
) -> HostCallAnswer {
    let mut begun = match launch(command, &*launcher, &outlets).await {
        Ok(process) => Courteous(Some(process)),
        Err(error) => {
            let reason = match &error {
                ProgramError::Missing => "missing",
                ProgramError::Refused { .. } => "refused",
                ProgramError::Unsupported { .. } | ProgramError::Failed { .. } => "unavailable",
            };
            return refusal(reason, &error.to_string());
        }
    };
    // Readers of the other ends must see end of file when the command ends.
    drop(outlets);
    let exited = begun
        .0
        .as_mut()
        .expect("it is there until it is dropped")
        .exited();
    let exit = match command.timeout {
        None => exited.await,
        Some(limit) => match tokio::time::timeout(limit, exited).await {
            Ok(exit) => exit,
            Err(_) => {
                return refusal(
                    "timeout",
                    &format!("the command took longer than {} s", limit.as_secs_f64()),
                );
            }
        },
    };
    let (code, text) = match exit {
        Exit::Code(code) => (code, None),
        Exit::Signal(signal) => (-signal, None),
        Exit::OutOfMemory { limit, .. } => {
            let most = limit / (1024 * 1024);
            (
                -9,
                Some(format!(
                    "the command was ended because the session used more than its {most} MiB of \
                     memory"
                )),
            )
        }
        Exit::OutOfMemoryOutside { whose, .. } => {
            (-9, Some(format!("the command was ended because {whose}")))
        }
        Exit::SandboxGone { .. } | Exit::Unknown => (
            -9,
            Some("the command was ended with its sandbox".to_owned()),
        ),
    };
    HostCallAnswer::Exited { code, text }
}

async fn launch(
    command: &ShellCommand,
    launcher: &dyn Launcher,
    outlets: &OutputPipes,
) -> Result<Box<dyn Process>, ProgramError> {
    let copy = |end: &OwnedFd| end.as_fd().try_clone_to_owned();
    let failed = |error: std::io::Error| ProgramError::Failed {
        why: error.to_string(),
    };
    for words in command.programs() {
        let program = ProgramSpec {
            words,
            folder: command.folder().to_owned(),
            environment: command.environment().to_vec(),
            input: command.input().map(<[u8]>::to_vec),
            output: copy(&outlets.0[0]).map_err(failed)?,
            errors: copy(&outlets.0[1]).map_err(failed)?,
        };
        match launcher.launch(program).await {
            Err(ProgramError::Missing) => {}
            launched => return launched,
        }
    }
    Err(ProgramError::Missing)
}

/// A program that is interrupted before it is killed.
struct Courteous(Option<Box<dyn Process>>);

impl Drop for Courteous {
    fn drop(&mut self) {
        let Some(mut process) = self.0.take() else {
            return;
        };
        process.interrupt();
        // Without a runtime the server is ending, and the program with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(GRACE, process.exited()).await;
            });
        }
    }
}
