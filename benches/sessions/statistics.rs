//! Samples of durations: collecting, summing up, printing.

use std::time::Duration;

/// Durations of the same thing, measured again and again.
#[derive(Default)]
pub(crate) struct Sample(Vec<Duration>);

impl Sample {
    pub(crate) fn add(&mut self, duration: Duration) {
        let place = self.0.partition_point(|other| *other <= duration);
        self.0.insert(place, duration);
    }

    pub(crate) fn median(&self) -> Duration {
        self.at(0.5)
    }

    /// The duration that 99 of 100 do not exceed; with fewer than a hundred it is the longest.
    pub(crate) fn high(&self) -> Duration {
        self.at(0.99)
    }

    fn at(&self, share: f64) -> Duration {
        let place = (self.0.len() as f64 * share).ceil() as usize;
        self.0[place.clamp(1, self.0.len()) - 1]
    }
}

/// Measures `count` times.
pub(crate) fn repeat(
    count: usize,
    mut measure: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<Sample> {
    let mut sample = Sample::default();
    for _ in 0..count {
        sample.add(measure()?);
    }
    Ok(sample)
}

/// Measures two things in turn, so that a machine that slows down slows both.
pub(crate) fn in_turn(
    count: usize,
    mut one: impl FnMut() -> anyhow::Result<Duration>,
    mut other: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<[Sample; 2]> {
    let mut samples = [Sample::default(), Sample::default()];
    for _ in 0..count {
        samples[0].add(one()?);
        samples[1].add(other()?);
    }
    Ok(samples)
}

/// Prints a line about a sample, with a verdict on its median if there is a target.
pub(crate) fn report(what: &str, sample: &Sample, target: Option<Duration>) {
    let [median, high] = [sample.median(), sample.high()].map(in_milliseconds);
    let figures = format!(
        "{what}: median {median}, p99 {high} (of {})",
        sample.0.len()
    );
    match target {
        None => println!("    {figures}"),
        Some(target) => {
            let verdict = if sample.median() <= target {
                "✓"
            } else {
                "✗ MISSED"
            };
            println!(
                "  {verdict} {figures} (target ≤ {})",
                in_milliseconds(target)
            );
        }
    }
}

pub(crate) fn in_milliseconds(duration: Duration) -> String {
    let milliseconds = duration.as_secs_f64() * 1000.0;
    if milliseconds < 100.0 {
        format!("{milliseconds:.2} ms")
    } else {
        format!("{milliseconds:.0} ms")
    }
}
