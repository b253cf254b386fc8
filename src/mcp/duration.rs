//! Durations as people say them.

use std::fmt;
use std::time::Duration;

/// A duration as people say it: `90 s`, `15 min`, `2 h`.
pub(super) struct Seconds(pub(super) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        if self.0.subsec_nanos() > 0 && seconds < 60 {
            let text = format!("{:.3}", self.0.as_secs_f64());
            write!(
                formatter,
                "{} s",
                text.trim_end_matches('0').trim_end_matches('.')
            )
        } else if seconds >= 3600 && seconds.is_multiple_of(3600) {
            write!(formatter, "{} h", seconds / 3600)
        } else if seconds >= 120 && seconds.is_multiple_of(60) {
            write!(formatter, "{} min", seconds / 60)
        } else {
            write!(formatter, "{seconds} s")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_people_say_them() {
        for (duration, text) in [
            (Duration::from_millis(1500), "1.5 s"),
            (Duration::from_secs(90), "90 s"),
            (Duration::from_secs(120), "2 min"),
            (Duration::from_secs(5400), "90 min"),
            (Duration::from_secs(7200), "2 h"),
        ] {
            assert_eq!(Seconds(duration).to_string(), text);
        }
    }
}
