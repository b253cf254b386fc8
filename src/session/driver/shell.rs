//! The driver's part in shell commands: code that may start no programs asks for one, somebody decides, the sandbox launches it.
//!
//! The code hands over the pipes that the command writes to, so that its output takes the way of all output and nobody here holds any of it. When the code does
//! not wait any more, or the cell has ended, the command is interrupted and soon ended, with all of its group.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use serde_json::{Value, json};
use tracing::debug;

use super::Driver;
use super::approvals::Wanted;
use crate::approval::Subject;
use crate::runner_client::{ClaimedCommand, Outlets};
use crate::sandbox::{Exit, Launcher, Process, Program, ProgramError, WORK_FOLDER};
use crate::session::shell::ShellCommand;

/// Commands of one cell that are under way at the same time.
const MOST_COMMANDS: usize = 16;
/// How long an interrupted command may take to end by itself.
const GRACE: Duration = Duration::from_millis(300);

/// A command that waits to be allowed, with all that it needs to run. What was shown is its text; what runs is the same value.
pub(super) struct CommandWanted {
    pub(super) ask: u64,
    pub(super) command: ShellCommand,
    pub(super) outlets: Outlets,
}

impl CommandWanted {
    /// Bytes that it holds, about.
    pub(super) fn size(&self) -> usize {
        self.command.text().len() + self.command.input().map_or(0, <[u8]>::len)
    }
}

impl Driver {
    /// Takes a command that the running cell wants to have run.
    pub(super) fn asked_to_run(&mut self, ask: u64, claimed: ClaimedCommand) {
        let Some(outlets) = claimed.outlets.clone().filter(only_take) else {
            return self.refuse_command(
                ask,
                "invalid",
                "the command came without pipes that it could write to",
            );
        };
        let usual_folder = self
            .sandbox
            .as_ref()
            .map_or(WORK_FOLDER, |sandbox| sandbox.work_folder());
        match ShellCommand::new(claimed, usual_folder) {
            Ok(command) => self.consider_command(ask, command, outlets),
            Err(unfit) => self.refuse_command(ask, "invalid", &unfit.to_string()),
        }
    }

    /// Decides about a command by its `kind` and `text`. What is then run is the value itself.
    fn consider_command(&mut self, ask: u64, command: ShellCommand, outlets: Outlets) {
        let subject = Subject::Shell {
            command: command.text(),
            kind: command.kind(),
        };
        self.consider(
            subject,
            Wanted::Command(Box::new(CommandWanted {
                ask,
                command,
                outlets,
            })),
        );
    }

    /// Runs a command that may run.
    pub(super) fn run_command(&mut self, ask: u64, command: ShellCommand, outlets: Outlets) {
        if self.questions.commands() >= MOST_COMMANDS {
            return self.refuse_command(
                ask,
                "budget",
                "too many commands are under way in this session",
            );
        }
        let Some(launcher) = self.sandbox.as_ref().map(|sandbox| sandbox.launcher()) else {
            return self.refuse_command(
                ask,
                "unavailable",
                "the sandbox is not there to run commands",
            );
        };
        debug!(session = self.id.as_str(), "code runs a command");
        self.questions.run(
            ask,
            async move { run(ask, &command, launcher, outlets).await },
        );
    }

    /// Answers that a command was not run. The text is for whoever reads the traceback.
    pub(super) fn refuse_command(&mut self, ask: u64, reason: &str, text: &str) {
        self.questions
            .answer_at_once(ask, refusal(ask, reason, text));
    }
}

fn refusal(ask: u64, reason: &str, text: &str) -> Value {
    json!({"type": "answer", "ask": ask, "ok": false, "reason": reason, "text": text})
}

/// Tells whether both are ends that can be written to and not read: a program must not take orders from where it writes to.
fn only_take(outlets: &Outlets) -> bool {
    outlets.0.iter().all(|end| {
        let flags = rustix::fs::fcntl_getfl(end).unwrap_or(OFlags::RDWR);
        flags & OFlags::RWMODE == OFlags::WRONLY
    })
}

/// Runs a command to its end and returns the answer.
async fn run(
    ask: u64,
    command: &ShellCommand,
    launcher: Arc<dyn Launcher>,
    outlets: Outlets,
) -> Value {
    let mut begun = match launch(command, &*launcher, &outlets).await {
        Ok(process) => Courteous(Some(process)),
        Err(error) => {
            let reason = match &error {
                ProgramError::Missing => "missing",
                ProgramError::Refused { .. } => "refused",
                ProgramError::Unsupported { .. } | ProgramError::Failed { .. } => "unavailable",
            };
            return refusal(ask, reason, &error.to_string());
        }
    };
    // What reads the other ends must see their end with that of the command.
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
                    ask,
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
                    "the command was ended because the session used more than its {most} MiB of memory"
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
    json!({"type": "answer", "ask": ask, "ok": true, "code": code, "text": text})
}

async fn launch(
    command: &ShellCommand,
    launcher: &dyn Launcher,
    outlets: &Outlets,
) -> Result<Box<dyn Process>, ProgramError> {
    let copy = |end: &OwnedFd| end.as_fd().try_clone_to_owned();
    let failed = |error: std::io::Error| ProgramError::Failed {
        why: error.to_string(),
    };
    for words in command.programs() {
        let program = Program {
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

/// A program that is asked to end before it is made to.
struct Courteous(Option<Box<dyn Process>>);

impl Drop for Courteous {
    fn drop(&mut self) {
        let Some(mut process) = self.0.take() else {
            return;
        };
        process.interrupt();
        // Without a runtime the server is ending, and everything with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(GRACE, process.exited()).await;
            });
        }
    }
}
