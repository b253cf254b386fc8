//! What all workers did: steps, calls, and what was wrong.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::client::Trouble;
use crate::statistics::in_milliseconds;
use crate::steps::Step;

#[derive(Default)]
pub(crate) struct Tally(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    steps: BTreeMap<Step, Vec<Duration>>,
    calls: Vec<Duration>,
    wrong_answers: usize,
    no_answers: usize,
}

impl Tally {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, step: Step, took: Duration, calls: Vec<Duration>) {
        let mut counts = self.counts();
        counts.steps.entry(step).or_default().push(took);
        counts.calls.extend(calls);
    }

    /// Counts and prints what was wrong.
    pub(crate) fn trouble(&self, place: &str, trouble: &Trouble) {
        match trouble {
            Trouble::WrongAnswer(what) => {
                self.counts().wrong_answers += 1;
                println!("WRONG ANSWER ({place}): {what}");
            }
            Trouble::NoAnswer(what) => {
                self.counts().no_answers += 1;
                println!("NO ANSWER ({place}): {what}");
            }
        }
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.failures() == (0, 0)
    }

    /// Wrong answers, and calls without an answer.
    pub(crate) fn failures(&self) -> (usize, usize) {
        let counts = self.counts();
        (counts.wrong_answers, counts.no_answers)
    }

    pub(crate) fn steps(&self) -> usize {
        self.counts().steps.values().map(Vec::len).sum()
    }

    pub(crate) fn print(&self) {
        let mut counts = self.counts();
        println!("\nsteps: number, median, p99");
        for (step, times) in &mut counts.steps {
            println!("    {:<18}{}", format!("{step:?}"), figures(times));
        }
        println!("    {:<18}{}", "calls of tools", figures(&mut counts.calls));
        println!("wrong answers: {}", counts.wrong_answers);
        println!("calls without an answer: {}", counts.no_answers);
    }
}

fn figures(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let at = |share: f64| {
        times
            .get((times.len() as f64 * share) as usize)
            .copied()
            .map(in_milliseconds)
    };
    format!(
        "{:>8}, {}, {}",
        times.len(),
        at(0.5).unwrap_or_default(),
        at(0.99).unwrap_or_default()
    )
}
