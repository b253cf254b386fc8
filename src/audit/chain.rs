//! Records as lines, each sealed with a hash that covers the previous line.
//!
//! ```text
//! {"sequence":2,"time":"…","monotonic_ns":…,"kind":"tool_call", … ,"previous":"<hash of 1>"
//!  \____________________________ covered by the hash _____________________________________/
//! ,"hash":"<hash of 2>"}
//! ```
//!
//! The hash is the SHA-256 of the line's own bytes up to the comma before `"hash"`. No canonical
//! form is needed: a verifier hashes the bytes in the file.

use std::time::SystemTime;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::event::{Event, Kind, PolicyDecision, hex};
use super::text::{Text, plain_json};

/// Bytes of the longest line, including its end. Texts and lists are truncated so that no event
/// makes a longer one.
pub const MAX_LINE_BYTES: usize = 16 << 10;

/// The bytes before and after the hash.
const BEFORE_HASH: &[u8] = b",\"hash\":\"";
const AFTER_HASH: &[u8] = b"\"}";
const HASH_LENGTH: usize = 64;

/// The last record of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    pub sequence: u64,
    /// 64 hexadecimal digits, lower case.
    pub hash: String,
}

impl Head {
    /// The head before the first record.
    pub fn beginning() -> Head {
        Head {
            sequence: 0,
            hash: "0".repeat(HASH_LENGTH),
        }
    }
}

/// The time of a record by two clocks: the wall clock, and one that cannot be set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    wall: SystemTime,
    /// Since boot, including suspend.
    monotonic_nanoseconds: u64,
}

impl Moment {
    pub(super) fn now() -> Moment {
        let since_boot = clock_gettime(ClockId::Boottime);
        let nanoseconds = since_boot.tv_sec as u64 * 1_000_000_000 + since_boot.tv_nsec as u64;
        Moment {
            wall: SystemTime::now(),
            monotonic_nanoseconds: nanoseconds,
        }
    }
}

#[derive(Serialize)]
struct Body<'a> {
    sequence: u64,
    time: String,
    monotonic_ns: u64,
    kind: &'static str,
    principal: Option<&'a Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<&'a Text>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request: Option<&'a Text>,
    decision: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'a Text>,
    details: &'a Kind,
    previous: &'a str,
}

/// Returns the line that follows `head`, including its end, and the new head.
pub(super) fn seal(head: &Head, moment: Moment, event: &Event) -> (Vec<u8>, Head) {
    let sequence = head.sequence + 1;
    let (decision, rule) = match &event.decision {
        PolicyDecision::Allowed => ("allowed", None),
        PolicyDecision::Denied { rule } => ("denied", Some(rule)),
    };
    let body = Body {
        sequence,
        time: timestamp(moment.wall),
        monotonic_ns: moment.monotonic_nanoseconds,
        kind: event.kind.name(),
        principal: event.principal.as_ref(),
        session: event.session.as_ref(),
        request: event.request.as_ref(),
        decision,
        rule,
        details: &event.kind,
        previous: &head.hash,
    };
    let mut line = plain_json(&body).expect("texts and numbers have a form in JSON");
    line.pop();
    let hash = hex(&sha2::Sha256::digest(&line));
    line.extend_from_slice(BEFORE_HASH);
    line.extend_from_slice(hash.as_bytes());
    line.extend_from_slice(AFTER_HASH);
    line.push(b'\n');
    debug_assert!(line.len() <= MAX_LINE_BYTES, "{} bytes", line.len());
    (line, Head { sequence, hash })
}

/// The position of a line in the chain; its own hash is correct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub head: Head,
    /// The hash of the previous record.
    pub previous: String,
}

/// A fault of a single line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Flaw {
    #[error("it is longer than a record can be")]
    TooLong,
    #[error("it does not end with its hash, so it is no whole record")]
    NotSealed,
    #[error("it was changed: its hash does not fit its contents")]
    Changed,
    #[error("it has no number or no hash of the record before")]
    NoLink,
}

/// Checks a line, given without its end.
pub(super) fn check(line: &[u8]) -> Result<Link, Flaw> {
    if line.len() >= MAX_LINE_BYTES {
        return Err(Flaw::TooLong);
    }
    let (covered, hash) = split_seal(line).ok_or(Flaw::NotSealed)?;
    if hex(&sha2::Sha256::digest(covered)) != hash {
        return Err(Flaw::Changed);
    }
    #[derive(Deserialize)]
    struct Claims {
        sequence: u64,
        previous: String,
    }
    let claims: Claims = serde_json::from_slice(line).map_err(|_| Flaw::NoLink)?;
    if !is_hash(&claims.previous) {
        return Err(Flaw::NoLink);
    }
    Ok(Link {
        head: Head {
            sequence: claims.sequence,
            hash: hash.to_owned(),
        },
        previous: claims.previous,
    })
}

fn split_seal(line: &[u8]) -> Option<(&[u8], &str)> {
    let rest = line.strip_suffix(AFTER_HASH)?;
    let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(HASH_LENGTH)?)?;
    let covered = rest.strip_suffix(BEFORE_HASH)?;
    let hash = std::str::from_utf8(hash)
        .ok()
        .filter(|hash| is_hash(hash))?;
    Some((covered, hash))
}

/// Returns whether `text` has the form of a hash.
pub(super) fn is_hash(text: &str) -> bool {
    text.len() == HASH_LENGTH
        && text
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Formats a time as RFC 3339 in UTC, to the microsecond.
fn timestamp(time: SystemTime) -> String {
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let (days, second_of_day) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z",
        since.subsec_micros()
    )
}

/// Returns year, month and day of a number of days since 1970.
fn date(mut days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // The calendar repeats after 400 years, so a broken clock costs no more steps than a correct
    // one.
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let mut year = 1970 + days / DAYS_IN_400_YEARS * 400;
    days %= DAYS_IN_400_YEARS;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::event::SessionEnded;
    use super::super::event::tests::one_of_each;
    use super::*;

    fn line_of(event: &Event) -> Vec<u8> {
        seal(&Head::beginning(), Moment::now(), event).0
    }

    #[test]
    fn a_sealed_line_is_right_and_links_to_the_one_before() {
        let event = Event::new(SessionEnded {
            reason: "idle".into(),
        })
        .by("anna")
        .in_session("s1");
        let (first, head) = seal(&Head::beginning(), Moment::now(), &event);
        let (second, next) = seal(&head, Moment::now(), &event);
        let link = check(second.strip_suffix(b"\n").unwrap()).unwrap();
        assert_eq!((link.head, link.previous), (next, head.hash.clone()));
        let link = check(first.strip_suffix(b"\n").unwrap()).unwrap();
        assert_eq!((link.head, link.previous), (head, Head::beginning().hash));
        let value: serde_json::Value = serde_json::from_slice(&first).unwrap();
        assert_eq!(
            (&value["principal"], &value["details"]["reason"]),
            (&"anna".into(), &"idle".into())
        );
        assert!(value["monotonic_ns"].as_u64().unwrap() > 0);
    }

    #[test]
    fn a_record_of_every_kind_is_one_line_within_the_limit() {
        let texts = [
            "\n".repeat(10_000),
            "\u{1b}\"\\\r\u{2028}😀\u{e0041}".repeat(5_000),
            "x".repeat(100_000),
        ];
        for event in texts.iter().flat_map(|text| one_of_each(text)) {
            let line = line_of(&event);
            assert!(
                line.len() <= MAX_LINE_BYTES,
                "{} has {} bytes",
                event.kind.name(),
                line.len()
            );
            assert_eq!(
                line.iter().filter(|byte| **byte < b' ').count(),
                1,
                "only its end is a control character"
            );
            let text = std::str::from_utf8(&line).unwrap();
            assert_eq!(text.chars().filter(|letter| letter.is_control()).count(), 1);
            check(line.strip_suffix(b"\n").unwrap()).unwrap();
        }
    }

    #[test]
    fn a_text_that_imitates_a_seal_is_only_a_text() {
        let forged = format!("x\",\"hash\":\"{}\"}}\n{{\"sequence\":9", "a".repeat(64));
        let event = Event::new(SessionEnded {
            reason: forged.as_str().into(),
        });
        let line = line_of(&event);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(
            check(line.strip_suffix(b"\n").unwrap())
                .unwrap()
                .head
                .sequence,
            1
        );
    }

    #[test]
    fn every_flaw_has_its_name() {
        let line = line_of(&Event::new(SessionEnded {
            reason: "idle".into(),
        }));
        let line = line.strip_suffix(b"\n").unwrap();
        check(line).unwrap(); // control
        let mut changed = line.to_vec();
        changed[20] ^= 1;
        assert_eq!(check(&changed), Err(Flaw::Changed));
        assert_eq!(check(&line[..line.len() - 1]), Err(Flaw::NotSealed));
        assert_eq!(check(b""), Err(Flaw::NotSealed));
        assert_eq!(check(&vec![b'x'; MAX_LINE_BYTES]), Err(Flaw::TooLong));
        let covered = b"{\"sequence\":1";
        let foreign = [
            covered.as_slice(),
            BEFORE_HASH,
            hex(&sha2::Sha256::digest(covered)).as_bytes(),
            AFTER_HASH,
        ]
        .concat();
        assert_eq!(check(&foreign), Err(Flaw::NoLink));
    }

    #[test]
    fn times_are_written_as_dates() {
        let at = |seconds: u64, micros: u64| {
            timestamp(
                SystemTime::UNIX_EPOCH
                    + Duration::from_secs(seconds)
                    + Duration::from_micros(micros),
            )
        };
        assert_eq!(at(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(at(951_782_400, 1), "2000-02-29T00:00:00.000001Z");
        assert_eq!(at(1_709_251_199, 999_999), "2024-02-29T23:59:59.999999Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
        assert_eq!(at(13_569_465_600, 0), "2400-01-01T00:00:00.000000Z");
    }
}
