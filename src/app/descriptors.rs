//! The limit of open files, and the number of sessions that it allows.
//!
//! The native backend needs descriptors in two processes, this one and the warden, which has the
//! same limit. With too low a limit sessions would fail one by one and late, so the limit is
//! checked at startup.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The minimum for starting a session: an interpreter finds its channel and the namespaces that it
/// enters at descriptor numbers from 1,000 up (`jail::twin`).
const LEAST: u64 = 1_024;
/// Descriptors needed by a server and its warden beside their sessions, including the warden's
/// reserve.
const OWN: u64 = 184;
/// Descriptors per session in the warden: its namespaces, root, rules, sockets and processes. In
/// the server a session needs fewer.
const PER_SESSION: u64 = 11;

/// Raises the soft limit of this process to the hard limit, and returns it.
pub(super) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    // On failure the lower limit stays and fewer sessions fit.
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How to raise the limit.
const CURE: &str = "raise it where this program is started, for example with `ulimit -Hn 4096`, \
    `LimitNOFILE=4096` in a systemd unit, or `--ulimit nofile=4096` for a container";

/// Rejects a limit that is too low for a single session.
pub(super) fn check(limit: u64) -> anyhow::Result<()> {
    anyhow::ensure!(
        limit >= LEAST,
        "only {limit} files may be open at once, and sessions need a limit of at least {LEAST}; \
         {CURE}"
    );
    Ok(())
}

/// Returns the number of native sessions that fit.
pub(super) fn fitting(limit: u64) -> usize {
    match limit {
        ..LEAST => 0,
        limit => usize::try_from((limit - OWN) / PER_SESSION).unwrap_or(usize::MAX),
    }
}

/// Returns one line about the limit and whether it is enough for `wanted` sessions.
pub(super) fn summary(limit: u64, wanted: usize) -> String {
    let limit_text = if limit == u64::MAX {
        "no limit".to_owned()
    } else {
        format!("{limit} at once")
    };
    match fitting(limit) {
        0 => format!("{limit_text}, too few for any session, which need at least {LEAST}; {CURE}"),
        fitting if fitting < wanted => {
            format!(
                "{limit_text}, enough for {fitting} sessions of the {wanted} in max_sessions; \
                 {CURE}"
            )
        }
        _ => format!("{limit_text}, enough for the {wanted} sessions of max_sessions"),
    }
}

/// Returns the number of sessions allowed, with a warning when it is lower than `wanted`.
pub(super) fn sessions_within(limit: u64, wanted: usize) -> usize {
    let fitting = fitting(limit);
    if fitting < wanted {
        let needed = OWN + PER_SESSION * wanted as u64;
        tracing::warn!(
            fitting,
            max_sessions = wanted,
            needed,
            "fewer sessions than max_sessions are allowed, because too few files may be open at \
             once; raise the limit of \
             open files (RLIMIT_NOFILE)"
        );
    }
    fitting.min(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_too_low_is_refused_with_a_cure() {
        for limit in [0, 32, 512, LEAST - 1] {
            let refusal = check(limit).unwrap_err().to_string();
            assert!(
                refusal.contains(&format!("only {limit} files")) && refusal.contains("ulimit -Hn"),
                "{refusal}"
            );
        }
        assert!(check(LEAST).is_ok() && check(u64::MAX).is_ok()); // control
    }

    #[test]
    fn sessions_are_bounded_by_what_the_limit_allows() {
        assert_eq!(sessions_within(1_024, 250), 76);
        assert_eq!(sessions_within(1_024, 64), 64);
        assert_eq!(sessions_within(u64::MAX, 10_000), 10_000);
        assert_eq!(sessions_within(0, 5), 0);
    }

    #[test]
    fn a_limit_is_told_with_what_it_is_enough_for() {
        assert_eq!(
            summary(4_096, 64),
            "4096 at once, enough for the 64 sessions of max_sessions"
        );
        assert!(
            summary(1_024, 250)
                .starts_with("1024 at once, enough for 76 sessions of the 250 in max_sessions; ")
        );
        assert!(summary(512, 1).starts_with("512 at once, too few for any session"));
        assert!(summary(u64::MAX, 64).starts_with("no limit, enough"));
    }
}
