//! Tells a process of the jail that hangs from one that is only slow.
//!
//! The server looks at a process at regular intervals: which state the kernel shows, how much
//! processor time it got, and whether it has answered since the last look. A process that was
//! stopped (SIGSTOP) hangs. So does one that computes for seconds, or sleeps for a minute, without
//! an answer. A process that wants to run and is not scheduled does not: a busy machine must not
//! end anybody's session.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::warden::host_pid;

/// Time between two looks.
pub(super) const INTERVAL: Duration = Duration::from_secs(2);
/// Looks in a row that must find a process stopped. One may be a debugger's, or a whole machine
/// that is about to go on.
const STOPPED_LOOKS: u32 = 2;
/// Processor time without an answer. The longest task of a warden, copying a large memory, takes
/// less.
const LONGEST_COMPUTATION: Duration = Duration::from_secs(20);
/// Looks in a row that must find a silent process asleep. It may wait for a copied process that is
/// not scheduled, so this is a long time.
const ASLEEP_LOOKS: u32 = 30;

/// What one look at a process shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    /// The letter of the kernel for its state.
    state: char,
    processor_time: Duration,
}

impl Look {
    /// Looks at a process now.
    pub(super) fn at(process: &OwnedFd) -> io::Result<Look> {
        Look::parse(&stat_of(process)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Reads a line of the form `pid (name) state … utime stime …`.
    fn parse(stat: &str) -> Option<Look> {
        let fields: Vec<&str> = fields_after_name(stat)?.collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        // utime and stime are the fields 14 and 15 of the line, counted in hundredths of a second.
        let processor_time = Duration::from_millis((ticks(11)? + ticks(12)?) * 10);
        Some(Look {
            state: fields.first()?.chars().next()?,
            processor_time,
        })
    }

    /// Whether a signal has stopped it.
    pub(super) fn is_stopped(self) -> bool {
        self.state == 'T'
    }
}

/// Reads what the kernel tells about a process in one line: `pid (name) state …`.
pub(super) fn stat_of(process: &OwnedFd) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{}/stat", host_pid(process)?))
}

/// The fields of such a line from the third on. The name may hold anything, also brackets and spaces.
pub(super) fn fields_after_name(stat: &str) -> Option<impl Iterator<Item = &str>> {
    stat.rsplit_once(')')
        .map(|(_, fields)| fields.split_whitespace())
}

/// Whether a process has exited or is about to: the kernel has begun to end it, and everything in
/// its pid namespace if it is the first process there.
pub(super) fn is_exiting(process: &OwnedFd) -> bool {
    // A server without descriptors cannot look. Then only the end itself counts.
    has_exited(process) || stat_of(process).is_ok_and(|stat| shows_end(&stat))
}

/// Whether such a line is of a process that exits, or that was killed and has not run since.
fn shows_end(stat: &str) -> bool {
    const PF_EXITING: u64 = 0x4;
    const SIGKILL: u64 = 1 << 8;
    // The flags are the ninth field of the line, the pending signals the 31st. The name was the
    // second.
    let fields: Vec<&str> = fields_after_name(stat).into_iter().flatten().collect();
    let has = |index: usize, bits: u64| {
        fields
            .get(index)
            .and_then(|field| field.parse::<u64>().ok())
            .is_some_and(|found| found & bits != 0)
    };
    has(6, PF_EXITING) || has(28, SIGKILL)
}

/// Looks at the parent of a process now.
pub(super) fn look_at_parent(process: &OwnedFd) -> io::Result<Look> {
    let stat = stat_of(process)?;
    let parent = fields_after_name(&stat)
        .and_then(|mut fields| fields.nth(1))
        .ok_or(io::ErrorKind::InvalidData)?;
    Look::parse(&fs::read_to_string(format!("/proc/{parent}/stat"))?)
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Whether a process has exited. The first of a pid namespace exits after all others in it.
pub(super) fn has_exited(process: &OwnedFd) -> bool {
    let mut events = [PollFd::new(process, PollFlags::IN)];
    let now = rustix::event::Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    rustix::event::poll(&mut events, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// What the looks at one process amount to.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    stopped: u32,
    asleep: u32,
    /// Processor time when it last answered.
    at_answer: Duration,
}

impl Pulse {
    /// Takes one look into account. Returns why the process is taken for hung, if it is. A process
    /// that is never asked counts as answering.
    pub(super) fn take(&mut self, look: Look, has_answered: bool) -> Option<&'static str> {
        self.stopped = if look.is_stopped() {
            self.stopped + 1
        } else {
            0
        };
        if self.stopped >= STOPPED_LOOKS {
            return Some("was stopped");
        }
        if has_answered {
            (self.asleep, self.at_answer) = (0, look.processor_time);
            return None;
        }
        self.asleep = if look.state == 'S' {
            self.asleep + 1
        } else {
            0
        };
        if self.asleep >= ASLEEP_LOOKS {
            return Some("waits and does not answer");
        }
        let computed = look.processor_time.saturating_sub(self.at_answer);
        (computed >= LONGEST_COMPUTATION).then_some("computes and does not answer")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(state: char, seconds: u64) -> Look {
        Look {
            state,
            processor_time: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn state_and_processor_time_are_read_behind_any_name() {
        let line = "42 (a) b (c) T 1 42 42 0 -1 1077936128 5 0 0 0 150 25 0 0 20 0 1 0 1 2 3";
        assert_eq!(
            Look::parse(line),
            Some(Look {
                state: 'T',
                processor_time: Duration::from_millis(1750)
            })
        );
        assert_eq!(Look::parse("nonsense"), None);
    }

    #[test]
    fn a_stopped_process_hangs_at_the_second_look() {
        let mut pulse = Pulse::default();
        assert_eq!(pulse.take(look('T', 0), false), None);
        assert_eq!(pulse.take(look('T', 0), false), Some("was stopped"));
        // Also one that is never asked.
        let mut unasked = Pulse::default();
        assert_eq!(unasked.take(look('T', 0), true), None);
        assert_eq!(unasked.take(look('T', 0), true), Some("was stopped"));
    }

    #[test]
    fn a_process_that_was_continued_in_time_goes_on() {
        let mut pulse = Pulse::default();
        for _ in 0..10 {
            assert_eq!(pulse.take(look('T', 0), false), None);
            assert_eq!(pulse.take(look('S', 0), true), None);
        }
    }

    #[test]
    fn a_starved_process_is_never_hung() {
        let mut pulse = Pulse::default();
        for _ in 0..10_000 {
            assert_eq!(pulse.take(look('R', 1), false), None);
        }
    }

    #[test]
    fn a_process_that_computes_for_ever_hangs_and_one_that_answers_does_not() {
        let mut pulse = Pulse::default();
        assert_eq!(pulse.take(look('R', 19), false), None);
        assert_eq!(
            pulse.take(look('R', 21), false),
            Some("computes and does not answer")
        );
        let mut answering = Pulse::default();
        assert!((0..100).all(|second| answering.take(look('R', second * 5), true).is_none()));
    }

    #[test]
    fn a_process_that_sleeps_for_a_minute_hangs() {
        let mut pulse = Pulse::default();
        let looks = (1..).find(|_| pulse.take(look('S', 0), false).is_some());
        assert_eq!(looks, Some(ASLEEP_LOOKS));
    }

    #[test]
    fn a_process_that_was_killed_and_has_not_run_since_is_about_to_end() {
        let line = |flags: u64, pending: u64| {
            format!(
                "42 (a) b (c) R 1 42 42 0 -1 {flags} 5 0 0 0 1 2 0 0 20 0 1 0 1 2 3 4 5 6 7 8 9 {pending} 0 0 0"
            )
        };
        assert!(!shows_end(&line(0x400100, 0)));
        assert!(shows_end(&line(0x400104, 0)));
        assert!(shows_end(&line(0x400100, 0x100)));
        assert!(
            !shows_end(&line(0x400100, 0x2)),
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
