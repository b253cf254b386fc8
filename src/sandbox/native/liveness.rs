//! Distinguishes a hung process of the jail from one that is only slow.
//!
//! The server samples a process at regular intervals: its state in the kernel, its CPU time, and
//! whether it has answered since the last sample. A process that was stopped (SIGSTOP) counts as
//! hung. So does one that computes for seconds, or sleeps for a minute, without an answer. A
//! runnable process that is not scheduled does not: a busy machine must not end a session.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::warden::host_pid;

/// Time between two samples.
pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// Consecutive samples that must find a process stopped. A single one may be due to a debugger, or
/// to a suspended machine that is about to resume.
const STOPPED_SAMPLES: u32 = 2;
/// CPU time without an answer. The longest task of a warden, copying a large memory, takes less.
const MAX_COMPUTATION_TIME: Duration = Duration::from_secs(20);
/// Consecutive samples that must find a silent process asleep. It may wait for a copied process
/// that is not scheduled, so this is long.
const ASLEEP_SAMPLES: u32 = 30;

/// One sample of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessSample {
    /// The kernel's letter for its state.
    state: char,
    processor_time: Duration,
}

impl ProcessSample {
    /// Samples a process.
    pub(super) fn at(process: &OwnedFd) -> io::Result<ProcessSample> {
        ProcessSample::parse(&stat_of(process)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses a line of the form `pid (name) state … utime stime …`.
    fn parse(stat: &str) -> Option<ProcessSample> {
        let fields: Vec<&str> = fields_after_name(stat)?.collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        // utime and stime are fields 14 and 15 of the line, in hundredths of a second.
        let processor_time = Duration::from_millis((ticks(11)? + ticks(12)?) * 10);
        Some(ProcessSample {
            state: fields.first()?.chars().next()?,
            processor_time,
        })
    }

    /// Returns whether a signal has stopped it.
    pub(super) fn is_stopped(self) -> bool {
        self.state == 'T'
    }
}

/// Reads the kernel's one-line status of a process: `pid (name) state …`.
pub(super) fn stat_of(process: &OwnedFd) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{}/stat", host_pid(process)?))
}

/// Returns the fields of such a line from the third on. The name may contain anything, including
/// brackets and spaces.
pub(super) fn fields_after_name(stat: &str) -> Option<impl Iterator<Item = &str>> {
    stat.rsplit_once(')')
        .map(|(_, fields)| fields.split_whitespace())
}

/// Returns whether a process has exited or is about to: the kernel has started to end it, and
/// everything in its pid namespace if it is the first process there.
pub(super) fn is_exiting(process: &OwnedFd) -> bool {
    // A server without free descriptors cannot read the status. Then only the exit itself counts.
    has_exited(process) || stat_of(process).is_ok_and(|stat| is_exiting_by_stat(&stat))
}

/// Returns whether such a line belongs to a process that is exiting, or that was killed and has not
/// run since.
fn is_exiting_by_stat(stat: &str) -> bool {
    const PF_EXITING: u64 = 0x4;
    /// Bit `SIGKILL - 1` of a signal set.
    const SIGKILL_BIT: u64 = 1 << 8;
    // The flags are field 9 of the line, the pending signals field 31. The name is field 2.
    let fields: Vec<&str> = fields_after_name(stat).into_iter().flatten().collect();
    let has = |index: usize, bits: u64| {
        fields
            .get(index)
            .and_then(|field| field.parse::<u64>().ok())
            .is_some_and(|found| found & bits != 0)
    };
    has(6, PF_EXITING) || has(28, SIGKILL_BIT)
}

/// Samples the parent of a process.
pub(super) fn sample_parent(process: &OwnedFd) -> io::Result<ProcessSample> {
    let stat = stat_of(process)?;
    let parent = fields_after_name(&stat)
        .and_then(|mut fields| fields.nth(1))
        .ok_or(io::ErrorKind::InvalidData)?;
    ProcessSample::parse(&fs::read_to_string(format!("/proc/{parent}/stat"))?)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns whether a process has exited. The first of a pid namespace exits after all others in it.
pub(super) fn has_exited(process: &OwnedFd) -> bool {
    let mut events = [PollFd::new(process, PollFlags::IN)];
    let now = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut events, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// The result of the samples of one process.
#[derive(Debug, Default)]
pub(super) struct HangDetector {
    stopped: u32,
    asleep: u32,
    /// CPU time at its last answer.
    at_answer: Duration,
}

impl HangDetector {
    /// Takes one sample into account. Returns why the process is considered hung, if it is. A
    /// process that is never pinged counts as answering.
    pub(super) fn observe(
        &mut self,
        sample: ProcessSample,
        has_answered: bool,
    ) -> Option<&'static str> {
        self.stopped = if sample.is_stopped() {
            self.stopped + 1
        } else {
            0
        };
        if self.stopped >= STOPPED_SAMPLES {
            return Some("was stopped");
        }
        if has_answered {
            (self.asleep, self.at_answer) = (0, sample.processor_time);
            return None;
        }
        self.asleep = if sample.state == 'S' {
            self.asleep + 1
        } else {
            0
        };
        if self.asleep >= ASLEEP_SAMPLES {
            return Some("waits and does not answer");
        }
        let computed = sample.processor_time.saturating_sub(self.at_answer);
        (computed >= MAX_COMPUTATION_TIME).then_some("computes and does not answer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(state: char, seconds: u64) -> ProcessSample {
        ProcessSample {
            state,
            processor_time: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn state_and_processor_time_are_read_behind_any_name() {
        let line = "42 (a) b (c) T 1 42 42 0 -1 1077936128 5 0 0 0 150 25 0 0 20 0 1 0 1 2 3";
        assert_eq!(
            ProcessSample::parse(line),
            Some(ProcessSample {
                state: 'T',
                processor_time: Duration::from_millis(1750)
            })
        );
        assert_eq!(ProcessSample::parse("nonsense"), None);
    }

    #[test]
    fn a_stopped_process_hangs_at_the_second_sample() {
        let mut detector = HangDetector::default();
        assert_eq!(detector.observe(sample('T', 0), false), None);
        assert_eq!(detector.observe(sample('T', 0), false), Some("was stopped"));
        // Also one that is never pinged.
        let mut unasked = HangDetector::default();
        assert_eq!(unasked.observe(sample('T', 0), true), None);
        assert_eq!(unasked.observe(sample('T', 0), true), Some("was stopped"));
    }

    #[test]
    fn a_process_that_was_continued_in_time_goes_on() {
        let mut detector = HangDetector::default();
        for _ in 0..10 {
            assert_eq!(detector.observe(sample('T', 0), false), None);
            assert_eq!(detector.observe(sample('S', 0), true), None);
        }
    }

    #[test]
    fn a_starved_process_is_never_hung() {
        let mut detector = HangDetector::default();
        for _ in 0..10_000 {
            assert_eq!(detector.observe(sample('R', 1), false), None);
        }
    }

    #[test]
    fn a_process_that_computes_for_ever_hangs_and_one_that_answers_does_not() {
        let mut detector = HangDetector::default();
        assert_eq!(detector.observe(sample('R', 19), false), None);
        assert_eq!(
            detector.observe(sample('R', 21), false),
            Some("computes and does not answer")
        );
        let mut answering = HangDetector::default();
        assert!((0..100).all(|second| answering.observe(sample('R', second * 5), true).is_none()));
    }

    #[test]
    fn a_process_that_sleeps_for_a_minute_hangs() {
        let mut detector = HangDetector::default();
        let samples = (1..).find(|_| detector.observe(sample('S', 0), false).is_some());
        assert_eq!(samples, Some(ASLEEP_SAMPLES));
    }

    #[test]
    fn a_process_that_was_killed_and_has_not_run_since_is_about_to_end() {
        let line = |flags: u64, pending: u64| {
            format!(
                "42 (a) b (c) R 1 42 42 0 -1 {flags} 5 0 0 0 1 2 0 0 20 0 1 0 1 2 3 4 5 6 7 8 9 \
                 {pending} 0 0 0"
            )
        };
        assert!(!is_exiting_by_stat(&line(0x400100, 0)));
        assert!(is_exiting_by_stat(&line(0x400104, 0)));
        assert!(is_exiting_by_stat(&line(0x400100, 0x100)));
        assert!(
            !is_exiting_by_stat(&line(0x400100, 0x2)),
            "another signal is not an end"
        );
    }

    #[test]
    fn a_process_that_lives_is_not_exiting_and_one_that_was_killed_is() {
        use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(!is_exiting(&handle) && !has_exited(&handle)); // control
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        rustix::process::waitid(WaitId::Pid(pid), ended).unwrap();
        assert!(
            is_exiting(&handle) && has_exited(&handle),
            "a zombie has exited"
        );
        child.wait().unwrap();
        assert!(is_exiting(&handle), "so has one that is gone");
    }
}
