//! A row of system calls that a stopped process makes in one go.
//!
//! Stopping a process at every system call costs tens of microseconds each time. A program is the same row of calls as plain
//! instructions in memory that nobody else can reach: the process runs it from its first call to the trap at its end, or to the trap after
//! the first call that fails.

use std::io;

use crate::registers::{self, Argument};

/// A place in the table of results, to be used as an argument of later steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome(u32);

impl From<Outcome> for Argument {
    fn from(outcome: Outcome) -> Argument {
        Argument::Earlier(outcome.0 * 8)
    }
}

impl From<u64> for Argument {
    fn from(value: u64) -> Argument {
        Argument::Value(value)
    }
}

/// What the process does, step by step.
#[derive(Debug, Default)]
pub(crate) struct Program {
    steps: Vec<Step>,
    /// Names of steps that are left out.
    without: Vec<String>,
}

#[derive(Debug)]
struct Step {
    name: &'static str,
    number: i64,
    arguments: [Argument; 6],
    must_succeed: bool,
}

/// A program as bytes, and where in them each step traps.
pub(crate) struct Assembled {
    pub(crate) code: Vec<u8>,
    traps: Vec<(u64, &'static str)>,
    end: u64,
}

impl Program {
    /// A program that leaves out the steps with these names.
    pub(crate) fn without(names: &[String]) -> Program {
        Program { without: names.to_vec(), ..Program::default() }
    }

    /// Adds a call that must succeed.
    pub(crate) fn call(&mut self, name: &'static str, number: i64, arguments: &[Argument]) -> Outcome {
        self.add(name, number, arguments, true)
    }

    /// Adds a call whose failure is an answer.
    pub(crate) fn attempt(&mut self, name: &'static str, number: i64, arguments: &[Argument]) -> Outcome {
        self.add(name, number, arguments, false)
    }

    fn add(&mut self, name: &'static str, number: i64, arguments: &[Argument], must_succeed: bool) -> Outcome {
        let mut all = [Argument::Value(0); 6];
        all[..arguments.len()].copy_from_slice(arguments);
        if self.without.iter().any(|left_out| left_out == name) {
            // A question that is always answered takes its place.
            self.steps.push(Step { name, number: libc::SYS_getpid, arguments: all, must_succeed });
        } else {
            self.steps.push(Step { name, number, arguments: all, must_succeed });
        }
        Outcome(self.steps.len() as u32 - 1)
    }

    /// Bytes that the table of results needs.
    pub(crate) fn results(&self) -> usize {
        self.steps.len() * 8
    }

    /// Writes the program for a table of results at this address.
    pub(crate) fn assemble(&self, results: u64) -> Assembled {
        let mut code = Vec::new();
        let mut traps = Vec::new();
        registers::begin(&mut code, results);
        for (index, step) in self.steps.iter().enumerate() {
            let number = step.number.cast_unsigned();
            registers::call(&mut code, number, &step.arguments, index as u32 * 8, step.must_succeed);
            traps.push((code.len() as u64, step.name));
        }
        let end = code.len() as u64;
        registers::trap(&mut code);
        Assembled { code, traps, end }
    }
}

impl Assembled {
    /// Judges a trap by where it happened, counted from the beginning of the code, and by the last result.
    pub(crate) fn ended(&self, offset: u64, result: i64) -> io::Result<()> {
        if offset == self.end + registers::TRAP_MOVES {
            return Ok(());
        }
        let step = self.traps.iter().find(|(end, _)| offset <= *end).map_or("a step", |(_, name)| name);
        let cause = io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(0));
        Err(io::Error::new(cause.kind(), format!("{step}: {cause}")))
    }
}
