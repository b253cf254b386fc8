//! Bandwidth limit of a session.
//!
//! All connections of a session share one meter, and both directions count. Bytes are counted after
//! they were transferred, and the next ones wait until the limit has caught up. So a short burst
//! passes at once, and the average rate holds over any longer time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The shared counter of a session. Without a limit it has no cost.
#[derive(Clone)]
pub(crate) struct Meter(Option<Arc<Account>>);

struct Account {
    bytes_per_second: u64,
    /// The time at which the transferred bytes are within the limit again. In the past while there
    /// is credit.
    paid_until: Mutex<Instant>,
}

/// Unused time that counts as credit, at most.
const CREDIT: Duration = Duration::from_millis(100);

/// Largest number of bytes transferred at once under a limit.
const MAX_PIECE_BYTES: u64 = 64 * 1024;

impl Meter {
    /// Returns a meter with a limit in bytes per second. Zero means no limit.
    pub(crate) fn new(bytes_per_second: u64) -> Meter {
        let account = || {
            Arc::new(Account {
                bytes_per_second,
                paid_until: Mutex::new(Instant::now()),
            })
        };
        Meter((bytes_per_second > 0).then(account))
    }

    /// Returns how many bytes may be transferred at once, or `None` without a limit. This is at
    /// most the share of a tenth of a second, so that connections do not wait long for each other.
    pub(crate) fn largest_piece(&self) -> Option<usize> {
        let account = self.0.as_ref()?;
        usize::try_from((account.bytes_per_second / 10).clamp(1, MAX_PIECE_BYTES)).ok()
    }

    /// Returns the time until which nothing may be transferred, or `None` if transfers are allowed
    /// now.
    pub(crate) fn closed_until(&self) -> Option<Instant> {
        let account = self.0.as_ref()?;
        let paid_until = *account
            .paid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        (paid_until > Instant::now()).then_some(paid_until)
    }

    /// Counts transferred bytes.
    pub(crate) fn count(&self, bytes: usize) {
        let Some(account) = &self.0 else { return };
        let price = Duration::from_secs_f64(bytes as f64 / account.bytes_per_second as f64);
        let mut paid_until = account
            .paid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let earliest = Instant::now().checked_sub(CREDIT).unwrap_or(*paid_until);
        *paid_until = (*paid_until).max(earliest) + price;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_passed_must_be_paid_for_before_more_may_pass() {
        let meter = Meter::new(1000);
        assert!(meter.closed_until().is_none());
        let start = Instant::now();
        meter.count(500);
        assert_eq!(
            meter.closed_until(),
            Some(start + Duration::from_millis(500))
        );
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(meter.closed_until().is_none()); // control
    }

    #[tokio::test(start_paused = true)]
    async fn unused_time_is_credit_for_a_tenth_of_a_second_only() {
        let meter = Meter::new(1000);
        tokio::time::advance(Duration::from_secs(60)).await;
        meter.count(100);
        assert!(meter.closed_until().is_none());
        meter.count(100);
        assert_eq!(
            meter.closed_until(),
            Some(Instant::now() + Duration::from_millis(100))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn copies_share_the_account_and_no_limit_is_no_limit() {
        let meter = Meter::new(1000);
        meter.clone().count(5000);
        assert!(meter.closed_until().is_some());
        assert_eq!(meter.largest_piece(), Some(100));
        let free = Meter::new(0);
        free.count(usize::MAX);
        assert!(free.closed_until().is_none() && free.largest_piece().is_none()); // control
    }
}
