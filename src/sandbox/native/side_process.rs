//! Side processes: programs in a sandbox of the native backend, beside its interpreter.
//!
//! A program is started like an interpreter: the warden makes it, it is locked down, its posture is
//! compared with the required one, and only then it is released (`jail::side_process`). Its
//! arguments are in a file that this process wrote and sealed, so that the approved program is the
//! one that runs.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use async_trait::async_trait;
use cellblock_jail::posture::{ExpectedPosture, Posture};
use cellblock_jail::wire::{
    self, SIDE_PROCESS_EXEC_FAILED, SIDE_PROCESS_READY, SIDE_PROCESS_SETUP_FAILED, Slot,
    WardenCommand,
};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::Signal;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::watch;

use super::STEP_TIMEOUT;
use super::oom::OomWatch;
use super::sandbox::{SandboxCgroups, check_group, exit_of, next_number, verify};
use super::warden::{SandboxView, SideProcessState, WardenClient};
use crate::reaction::within;
use crate::sandbox::{
    Exit, LaunchError, Launcher, Process, ProgramError, ProgramSpec, SandboxLimits,
};

/// Starts programs in one sandbox.
pub(super) struct NativeLauncher {
    pub(super) warden: Arc<WardenClient>,
    pub(super) slot: Slot,
    pub(super) view: watch::Receiver<SandboxView>,
    /// The number of the last program.
    pub(super) numbers: Arc<AtomicU32>,
    pub(super) groups: SandboxCgroups,
    pub(super) expected: ExpectedPosture,
    pub(super) host: Posture,
    /// The namespaces of the sandbox.
    pub(super) namespaces: Arc<[PathBuf]>,
    /// The environment variables of a fresh session.
    pub(super) environment: Arc<Vec<(String, String)>>,
    pub(super) limits: SandboxLimits,
}

fn failed(error: impl ToString) -> ProgramError {
    ProgramError::Failed {
        why: error.to_string(),
    }
}

#[async_trait]
impl Launcher for NativeLauncher {
    async fn launch(&self, program: ProgramSpec) -> Result<Box<dyn Process>, ProgramError> {
        let ProgramSpec {
            words,
            folder,
            environment,
            input,
            output,
            errors,
        } = program;
        let spec = wire::SideProcessSpec {
            argv: words,
            folder,
            environment: changed(&self.environment, environment),
        };
        let spec = sealed(
            c"cellblock-side-process",
            &serde_json::to_vec(&spec).map_err(failed)?,
        )
        .map_err(failed)?;
        let input = input
            .map(|bytes| sealed(c"input", &bytes))
            .transpose()
            .map_err(failed)?;
        let (report, their_report) = io::pipe().map_err(failed)?;
        let (their_gate, gate) = io::pipe().map_err(failed)?;
        let cgroup_procs = match &self.groups.own {
            Some(group) => group.open_procs().map_err(failed)?,
            None => Vec::new(),
        };

        let number = next_number(&self.numbers);
        let mut process = NativeProgram {
            warden: Arc::clone(&self.warden),
            slot: self.slot,
            number,
            view: self.view.clone(),
            memory: OomWatch::begin(&self.groups, &self.limits),
        };
        self.warden.expect_side_process(self.slot, number);
        let mut passed = vec![
            spec.as_fd(),
            their_report.as_fd(),
            their_gate.as_fd(),
            output.as_fd(),
            errors.as_fd(),
        ];
        passed.extend(input.iter().chain(&cgroup_procs).map(AsFd::as_fd));
        let command = WardenCommand::StartSideProcess {
            slot: self.slot,
            number,
            has_input: input.is_some(),
        };
        self.warden
            .command(&command, &passed)
            .await
            .map_err(failed)?;
        drop((
            spec,
            their_report,
            their_gate,
            output,
            errors,
            input,
            cgroup_procs,
        ));

        let handle = process.created().await?;
        let mut report = Receiver::from_owned_fd(report.into()).map_err(failed)?;
        await_ready(&mut report).await?;
        let confined = self
            .groups
            .own
            .as_ref()
            .map_or(Ok(()), |group| check_group(group, &handle));
        confined
            .and_then(|()| {
                verify(
                    &self.warden,
                    &handle,
                    &self.expected,
                    &self.host,
                    &self.namespaces,
                )
            })
            .map_err(refused)?;
        File::from(OwnedFd::from(gate))
            .write_all(b"g")
            .map_err(failed)?;
        await_exec(&mut report).await?;
        Ok(Box::new(process))
    }
}

fn refused(error: LaunchError) -> ProgramError {
    match error {
        LaunchError::Start { why } => ProgramError::Failed { why },
        other => failed(other),
    }
}

/// Returns these variables with changes.
fn changed(
    all: &[(String, String)],
    changes: Vec<(String, Option<String>)>,
) -> Vec<(String, String)> {
    let mut changed: Vec<(String, String)> = Vec::with_capacity(all.len());
    let all = all
        .iter()
        .map(|(name, value)| (name.clone(), Some(value.clone())));
    for (name, value) in all.chain(changes) {
        changed.retain(|(earlier, _)| *earlier != name);
        changed.extend(value.map(|value| (name, value)));
    }
    changed
}

/// Returns an immutable file in memory.
fn sealed(name: &std::ffi::CStr, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.write_all(bytes)?;
    io::Seek::rewind(&mut file)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

async fn within_limit<T>(step: impl Future<Output = io::Result<T>>) -> Result<T, ProgramError> {
    match within(STEP_TIMEOUT, step).await {
        Some(result) => result.map_err(failed),
        None => Err(failed(LaunchError::TimedOut(STEP_TIMEOUT))),
    }
}

/// Waits until the process is locked down and waits at its gate.
async fn await_ready(report: &mut Receiver) -> Result<(), ProgramError> {
    let mut status = [0];
    match within_limit(report.read(&mut status)).await? {
        1 if status[0] == SIDE_PROCESS_READY => Ok(()),
        1 if status[0] == SIDE_PROCESS_SETUP_FAILED => {
            let mut why = String::new();
            within_limit(report.read_to_string(&mut why)).await?;
            Err(ProgramError::Failed { why })
        }
        _ => Err(failed("its process ended before it was ready")),
    }
}

/// Waits until it has become the program; `exec` closes its end of the pipe.
async fn await_exec(report: &mut Receiver) -> Result<(), ProgramError> {
    let mut reply = Vec::new();
    within_limit(report.read_to_end(&mut reply)).await?;
    match reply.split_first() {
        Some((&SIDE_PROCESS_EXEC_FAILED, number)) => {
            let number = number.try_into().map_or(0, i32::from_ne_bytes);
            let error = io::Error::from_raw_os_error(number);
            match error.kind() {
                io::ErrorKind::NotFound => Err(ProgramError::Missing),
                _ => Err(ProgramError::Refused {
                    why: error.to_string(),
                }),
            }
        }
        _ => Ok(()),
    }
}

/// A program that is starting or running. Dropping it ends it.
struct NativeProgram {
    warden: Arc<WardenClient>,
    slot: Slot,
    number: u32,
    view: watch::Receiver<SandboxView>,
    memory: OomWatch,
}

impl NativeProgram {
    /// Waits until its process exists.
    async fn created(&mut self) -> Result<Arc<OwnedFd>, ProgramError> {
        let number = self.number;
        let settled = self.view.wait_for(|view| {
            view.destroyed
                || !matches!(view.side_process(number), Some(SideProcessState::Requested))
        });
        match within(STEP_TIMEOUT, settled).await {
            None => Err(failed(LaunchError::TimedOut(STEP_TIMEOUT))),
            Some(Err(_)) => Err(failed("the jail ended")),
            Some(Ok(view)) => match view.side_process(number) {
                Some(SideProcessState::Created(process)) => Ok(Arc::clone(process)),
                Some(SideProcessState::Failed(why)) => {
                    Err(ProgramError::Unsupported { why: why.clone() })
                }
                _ => Err(failed("its process ended before it was ready")),
            },
        }
    }

    fn signal(&self, signal: Signal) {
        let (slot, number) = (self.slot, self.number);
        self.warden.command_now(&WardenCommand::SignalSideProcess {
            slot,
            number,
            signal: signal.as_raw(),
        });
    }
}

#[async_trait]
impl Process for NativeProgram {
    fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    fn kill(&self) {
        self.signal(Signal::KILL);
    }

    async fn exited(&mut self) -> Exit {
        let number = self.number;
        let ended = self.view.wait_for(|view| {
            view.destroyed || matches!(view.side_process(number), Some(SideProcessState::Ended(_)))
        });
        let status = match ended.await.as_deref().map(|view| view.side_process(number)) {
            Ok(Some(SideProcessState::Ended(status))) => *status,
            _ => return Exit::Unknown,
        };
        exit_of(
            std::os::unix::process::ExitStatusExt::from_raw(status),
            || self.memory.exit(),
        )
    }
}

impl Drop for NativeProgram {
    fn drop(&mut self) {
        let ended = matches!(
            self.view.borrow().side_process(self.number),
            Some(SideProcessState::Ended(_) | SideProcessState::Failed(_))
        );
        if !ended {
            self.kill();
        }
        self.warden.forget_side_process(self.slot, self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn own(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn variables_are_changed_added_and_taken_away() {
        let all = own(&[("PATH", "/bin"), ("HOME", "/home"), ("A", "1"), ("A", "2")]);
        assert_eq!(
            changed(&all, Vec::new()),
            own(&[("PATH", "/bin"), ("HOME", "/home"), ("A", "2")])
        );
        let changes = vec![
            ("PATH".to_owned(), Some("/opt".to_owned())),
            ("HOME".to_owned(), None),
            ("NEW".to_owned(), Some(String::new())),
            ("NEVER".to_owned(), None),
        ];
        assert_eq!(
            changed(&all, changes),
            own(&[("A", "2"), ("PATH", "/opt"), ("NEW", "")])
        );
    }

    #[test]
    fn a_sealed_file_is_read_from_its_beginning_and_cannot_be_changed() {
        let mut file = File::from(sealed(c"test", b"words").unwrap());
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"words");
        assert!(file.write_all(b"others").is_err());
        assert!(file.set_len(1).is_err());
    }
}
