//! Human-readable sizes and durations.
//!
//! ```text
//! 512M   2G   2GiB   1.5 GB   1048576        K, M, G, T and KiB … count by 1024, KB … by 1000,
//!                                            without a unit: bytes
//! 90     30s  2m     1h30m    500ms   1d     without a unit: seconds
//! ```
//!
//! Parsing is exact: the number is kept as digits, never as a floating-point value, so nothing is
//! rounded up past a limit.

use std::time::Duration;

/// Why a size or duration could not be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error("it is empty")]
    Empty,
    #[error("it is negative")]
    Negative,
    #[error("it does not start with a number")]
    NotANumber,
    #[error("the unit \"{0}\" is not known")]
    UnknownUnit(String),
    #[error("it is too large")]
    TooLarge,
}

/// Parses a number of bytes.
pub fn parse_size(text: &str) -> Result<u64, QuantityError> {
    let (number, rest) = Decimal::split_from(text)?;
    let unit: u128 = match rest.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(QuantityError::UnknownUnit(rest.trim().to_owned())),
    };
    u64::try_from(number.times(unit)?).map_err(|_| QuantityError::TooLarge)
}

/// Parses a duration; several parts add up, as in `1h30m`.
pub fn parse_duration(text: &str) -> Result<Duration, QuantityError> {
    const SECOND: u128 = 1_000_000_000;
    let mut nanoseconds: u128 = 0;
    let mut rest = text;
    let mut first = true;
    while first || !rest.trim().is_empty() {
        let (number, after_number) = Decimal::split_from(rest)?;
        let after_number = after_number.trim_start();
        let end = after_number
            .find(|letter: char| !letter.is_alphabetic())
            .unwrap_or(after_number.len());
        let (unit, remaining) = after_number.split_at(end);
        let unit = match unit.to_ascii_lowercase().as_str() {
            // A bare number is seconds only when it is the whole text: "1h30" could be minutes or
            // seconds.
            "" if first && remaining.is_empty() => SECOND,
            "ms" => SECOND / 1000,
            "s" | "sec" | "second" | "seconds" => SECOND,
            "m" | "min" | "minute" | "minutes" => 60 * SECOND,
            "h" | "hour" | "hours" => 3600 * SECOND,
            "d" | "day" | "days" => 86_400 * SECOND,
            _ => return Err(QuantityError::UnknownUnit(after_number.trim().to_owned())),
        };
        nanoseconds = nanoseconds
            .checked_add(number.times(unit)?)
            .ok_or(QuantityError::TooLarge)?;
        rest = remaining;
        first = false;
    }
    let seconds = u64::try_from(nanoseconds / SECOND).map_err(|_| QuantityError::TooLarge)?;
    let subsecond =
        u32::try_from(nanoseconds % SECOND).expect("a remainder of a billion fits in 32 bits");
    Ok(Duration::new(seconds, subsecond))
}

/// Formats a size with the largest unit that keeps it readable: `512 MiB`, `1.5 GiB`.
pub fn format_size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_024 => return format!("{bytes} bytes"),
        1_024..1_048_576 => (1u64 << 10, "KiB"),
        1_048_576..1_073_741_824 => (1 << 20, "MiB"),
        1_073_741_824..1_099_511_627_776 => (1 << 30, "GiB"),
        _ => (1 << 40, "TiB"),
    };
    if bytes.is_multiple_of(unit) {
        format!("{} {name}", bytes / unit)
    } else {
        format!("{:.1} {name}", bytes as f64 / unit as f64)
    }
}

/// Formats a duration with the largest unit that divides it: `2 min`, `90 s`, `1 h`.
pub fn format_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match (duration.subsec_millis(), seconds) {
        (0, seconds) if seconds >= 86_400 && seconds.is_multiple_of(86_400) => {
            format!("{} d", seconds / 86_400)
        }
        (0, seconds) if seconds >= 3600 && seconds.is_multiple_of(3600) => {
            format!("{} h", seconds / 3600)
        }
        (0, seconds) if seconds >= 120 && seconds.is_multiple_of(60) => {
            format!("{} min", seconds / 60)
        }
        (0, seconds) => format!("{seconds} s"),
        (_, 0) => format!("{} ms", duration.as_millis()),
        _ => format!("{:.1} s", duration.as_secs_f64()),
    }
}

/// A decimal number as digits: `digits / 10^scale`.
#[derive(Debug, PartialEq, Eq)]
struct Decimal {
    digits: u128,
    scale: u32,
}

impl Decimal {
    /// More digits after the point make no representable difference.
    const MAX_FRACTION_DIGITS: usize = 12;

    /// Parses the number at the start of `text` and returns it with the rest.
    fn split_from(text: &str) -> Result<(Decimal, &str), QuantityError> {
        let text = text.trim_start();
        if text.is_empty() {
            return Err(QuantityError::Empty);
        }
        if text.starts_with('-') {
            return Err(QuantityError::Negative);
        }
        let (whole, rest) = split_digits(text);
        let (fraction, rest) = match rest.strip_prefix('.') {
            Some(after_point) => match split_digits(after_point) {
                ("", _) => return Err(QuantityError::NotANumber),
                (digits, rest) => (digits, rest),
            },
            None => ("", rest),
        };
        if whole.is_empty() {
            return Err(QuantityError::NotANumber);
        }
        let fraction = &fraction[..fraction.len().min(Decimal::MAX_FRACTION_DIGITS)];
        let digits = format!("{whole}{fraction}")
            .parse()
            .map_err(|_| QuantityError::TooLarge)?;
        let scale = u32::try_from(fraction.len()).expect("at most twelve digits are kept");
        Ok((Decimal { digits, scale }, rest))
    }

    /// Multiplies by a unit and truncates the result to an integer.
    fn times(&self, unit: u128) -> Result<u128, QuantityError> {
        let product = self
            .digits
            .checked_mul(unit)
            .ok_or(QuantityError::TooLarge)?;
        Ok(product / 10u128.pow(self.scale))
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    text.split_at(
        text.find(|letter: char| !letter.is_ascii_digit())
            .unwrap_or(text.len()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("1048576", 1 << 20),
            ("17b", 17),
            ("1k", 1 << 10),
            ("512M", 512 << 20),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("2gib", 2 << 30),
            ("2 GiB", 2 << 30),
            ("  2G  ", 2 << 30),
            ("1T", 1 << 40),
            ("1KB", 1_000),
            ("2GB", 2_000_000_000),
            ("1.5G", 3 << 29),
            ("0.5K", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn a_fraction_of_a_byte_is_dropped() {
        assert_eq!(parse_size("1.9"), Ok(1));
        assert_eq!(parse_size("0.0001K"), Ok(0));
    }

    #[test]
    fn sizes_that_cannot_be_read_say_why() {
        for (text, why) in [
            ("", QuantityError::Empty),
            ("   ", QuantityError::Empty),
            ("-1", QuantityError::Negative),
            ("-0", QuantityError::Negative),
            ("G", QuantityError::NotANumber),
            (".5G", QuantityError::NotANumber),
            ("1.G", QuantityError::NotANumber),
            ("much", QuantityError::NotANumber),
            ("2X", QuantityError::UnknownUnit("X".to_owned())),
            ("2 G B", QuantityError::UnknownUnit("G B".to_owned())),
            ("1e9", QuantityError::UnknownUnit("e9".to_owned())),
            ("18446744073709551616", QuantityError::TooLarge),
            ("16777216T", QuantityError::TooLarge),
            (
                "999999999999999999999999999999999999999999",
                QuantityError::TooLarge,
            ),
        ] {
            assert_eq!(parse_size(text), Err(why), "{text:?}");
        }
    }

    #[test]
    fn durations_are_read_with_and_without_units() {
        for (text, milliseconds) in [
            ("0", 0),
            ("30", 30_000),
            ("30s", 30_000),
            ("1.5", 1_500),
            ("0.25s", 250),
            ("500ms", 500),
            ("2m", 120_000),
            ("2 min", 120_000),
            ("1h", 3_600_000),
            ("1h30m", 5_400_000),
            ("1h 30m 5s", 5_405_000),
            ("1d", 86_400_000),
            (" 10 s ", 10_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(milliseconds)),
                "{text:?}"
            );
        }
    }

    #[test]
    fn durations_that_cannot_be_read_say_why() {
        for (text, why) in [
            ("", QuantityError::Empty),
            ("-5s", QuantityError::Negative),
            ("s", QuantityError::NotANumber),
            ("forever", QuantityError::NotANumber),
            ("5 weeks", QuantityError::UnknownUnit("weeks".to_owned())),
            ("1h30", QuantityError::UnknownUnit(String::new())),
            ("99999999999999999999d", QuantityError::TooLarge),
            ("1h-5m", QuantityError::Negative),
        ] {
            assert_eq!(parse_duration(text), Err(why), "{text:?}");
        }
    }

    #[test]
    fn sizes_and_durations_are_written_for_people() {
        assert_eq!(format_size(2 << 30), "2 GiB");
        assert_eq!(format_size(3 << 29), "1.5 GiB");
        assert_eq!(format_size(17), "17 bytes");
        assert_eq!(format_duration(Duration::from_secs(120)), "2 min");
        assert_eq!(format_duration(Duration::from_secs(90)), "90 s");
        assert_eq!(format_duration(Duration::from_millis(250)), "250 ms");
        assert_eq!(format_duration(Duration::from_secs(86_400)), "1 d");
    }

    proptest::proptest! {
        #[test]
        fn reading_never_panics(text in ".{0,40}") {
            let _ = parse_size(&text);
            let _ = parse_duration(&text);
        }

        #[test]
        fn every_number_of_bytes_is_read_back(bytes: u64) {
            proptest::prop_assert_eq!(parse_size(&bytes.to_string()), Ok(bytes));
        }
    }
}
