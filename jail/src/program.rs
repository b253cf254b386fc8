//! A sequence of system calls that a stopped process makes without further stops.
//!
//! Stopping a process at every system call costs tens of microseconds each time. A program is the
//! same sequence of calls as plain instructions in memory that no other process can access: the
//! process runs it from its first call to the trap at its end, or to the trap after the first call
//! that fails.

use std::io;

use crate::registers::{self, Argument};
use crate::test_switches::TestSwitches;

/// An entry in the table of results, which can be an argument of later steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepResult(u32);

impl From<StepResult> for Argument {
    fn from(outcome: StepResult) -> Argument {
        Argument::Earlier(outcome.0 * 8)
    }
}

impl From<u64> for Argument {
    fn from(value: u64) -> Argument {
        Argument::Value(value)
    }
}

/// The steps of the process.
#[derive(Debug, Default)]
pub(crate) struct SyscallProgram {
    steps: Vec<Step>,
    test_switches: TestSwitches,
}

#[derive(Debug)]
struct Step {
    name: &'static str,
    number: i64,
    arguments: [Argument; 6],
}

/// A program as bytes, and the offset at which each step traps.
pub(crate) struct AssembledProgram {
    pub(crate) code: Vec<u8>,
    traps: Vec<(u64, &'static str)>,
    end: u64,
}

impl SyscallProgram {
    /// Returns an empty program; a test may have steps skipped.
    pub(crate) fn new(test_switches: &TestSwitches) -> SyscallProgram {
        SyscallProgram {
            steps: Vec::new(),
            test_switches: test_switches.clone(),
        }
    }

    /// Adds a call. A failure ends the program.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        number: i64,
        arguments: &[Argument],
    ) -> StepResult {
        let mut all = [Argument::Value(0); 6];
        all[..arguments.len()].copy_from_slice(arguments);
        // `getpid` always succeeds, so it replaces a step that is skipped.
        self.steps.push(Step {
            name,
            number: if self.test_switches.skips(name) {
                libc::SYS_getpid
            } else {
                number
            },
            arguments: all,
        });
        StepResult(self.steps.len() as u32 - 1)
    }

    /// Returns the size of the table of results in bytes.
    pub(crate) fn results(&self) -> usize {
        self.steps.len() * 8
    }

    /// Assembles the program for a table of results at this address.
    pub(crate) fn assemble(&self, results: u64) -> AssembledProgram {
        let mut code = Vec::new();
        let mut traps = Vec::new();
        registers::begin(&mut code, results);
        for (index, step) in self.steps.iter().enumerate() {
            let number = step.number.cast_unsigned();
            registers::call(&mut code, number, &step.arguments, index as u32 * 8);
            traps.push((code.len() as u64, step.name));
        }
        let end = code.len() as u64;
        registers::trap(&mut code);
        AssembledProgram { code, traps, end }
    }
}

/// A call of a program that the kernel refused. The process is stopped after it.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {cause}")]
pub(crate) struct StepError {
    step: &'static str,
    cause: io::Error,
}

impl StepError {
    pub(crate) fn is_cause_of(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<StepError>())
    }
}

impl AssembledProgram {
    /// Interprets a trap by its offset from the start of the code and by the last result.
    pub(crate) fn check_trap(&self, offset: u64, result: i64) -> io::Result<()> {
        if offset == self.end + registers::TRAP_ADVANCE {
            return Ok(());
        }
        let step = self
            .traps
            .iter()
            .find(|(end, _)| offset <= *end)
            .map_or("a step", |(_, name)| name);
        let cause = io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(0));
        Err(io::Error::new(cause.kind(), StepError { step, cause }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The instruction pointer after the trap of a failed step: at the end of the step, or at its
    /// last instruction.
    fn trap_of(assembled: &AssembledProgram, place: usize) -> u64 {
        assembled.traps[place].0 - if cfg!(target_arch = "x86_64") { 0 } else { 4 }
    }

    fn three_steps() -> SyscallProgram {
        let mut program = SyscallProgram::default();
        let first = program.call("first", libc::SYS_getpid, &[]);
        program.call("second", libc::SYS_close, &[first.into()]);
        program.call("third", libc::SYS_close, &[7.into()]);
        program
    }

    #[test]
    fn the_step_that_failed_is_named_with_its_cause() {
        let assembled = three_steps().assemble(0x1000);
        for (place, name) in ["first", "second", "third"].into_iter().enumerate() {
            let error = assembled
                .check_trap(trap_of(&assembled, place), -i64::from(libc::EACCES))
                .unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert!(
                error.to_string().starts_with(&format!("{name}: ")),
                "{error}"
            );
        }
        // Control: the trap at the end is not a failure, whatever the last call returned.
        let end = assembled.code.len() as u64 - if cfg!(target_arch = "x86_64") { 0 } else { 4 };
        assert!(assembled.check_trap(end, -i64::from(libc::EACCES)).is_ok());
        // A trap at any other offset is a failure.
        assert!(assembled.check_trap(end + 100, 0).is_err());
    }

    #[test]
    fn steps_are_written_one_after_another_and_each_has_a_result() {
        let program = three_steps();
        assert_eq!(program.results(), 24);
        let assembled = program.assemble(0x1000);
        let ends: Vec<u64> = assembled.traps.iter().map(|(end, _)| *end).collect();
        assert!(
            ends.is_sorted() && ends[0] > 0 && assembled.end == ends[2],
            "{ends:?}"
        );
        assert_eq!(Argument::from(StepResult(2)), Argument::Earlier(16));
    }

    #[test]
    fn a_step_that_is_skipped_leaves_the_others_where_they_were() {
        let whole = three_steps();
        let mut without = SyscallProgram::new(&TestSwitches {
            skipped_steps: vec!["second".to_owned()],
            ..TestSwitches::default()
        });
        let first = without.call("first", libc::SYS_getpid, &[]);
        without.call("second", libc::SYS_close, &[first.into()]);
        without.call("third", libc::SYS_close, &[7.into()]);
        assert_eq!(without.results(), whole.results());
        let numbers = |program: &SyscallProgram| {
            program
                .steps
                .iter()
                .map(|step| step.number)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            numbers(&whole),
            [libc::SYS_getpid, libc::SYS_close, libc::SYS_close]
        );
        assert_eq!(
            numbers(&without),
            [libc::SYS_getpid, libc::SYS_getpid, libc::SYS_close]
        );
    }
}
