//! The order in which requests of one connection have arrived.
//!
//! Requests of an HTTP/2 connection are answered in tasks of their own, and tasks begin in any
//! order. The connection itself sees their heads in order, so it gives each request an `Arrival`;
//! whoever cares for the order waits until the requests before are that far too. A request whose
//! body is slow does not hold up others for long: the order is that of complete requests.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

/// How long a request that is complete waits for those before it on its connection. Their bodies
/// usually came in the same packet and only their tasks are late; one that is longer under way is
/// not complete.
const LATE: Duration = Duration::from_millis(50);

/// Numbers the requests of one connection.
#[derive(Default)]
pub(super) struct Arrivals {
    last: Mutex<Option<oneshot::Receiver<()>>>,
}

impl Arrivals {
    /// Notes that the head of a request has arrived.
    pub(super) fn next(&self) -> Arrival {
        let (over, end) = oneshot::channel();
        let before = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(end);
        Arrival(Arc::new(Mutex::new(Some(Place { before, over }))))
    }
}

/// A request's place among those of its connection. It is over when it is dropped, whether it was
/// used or not.
#[derive(Clone)]
pub(crate) struct Arrival(Arc<Mutex<Option<Place>>>);

struct Place {
    before: Option<oneshot::Receiver<()>>,
    /// Dropped, it wakes the next.
    over: oneshot::Sender<()>,
}

impl Arrival {
    /// Does `work` after that of the requests before, unless one of those is late.
    pub(crate) async fn in_order<T>(&self, work: impl FnOnce() -> T) -> T {
        let place = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Place { before, over }) = place else { return work() };
        if let Some(before) = before {
            // An end that was dropped is an end.
            let _ = tokio::time::timeout(LATE, before).await;
        }
        let done = work();
        drop(over);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_taken_in_the_order_of_their_heads_however_their_tasks_begin() {
        let arrivals = Arrivals::default();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let mut waiting: Vec<(usize, Arrival)> = (0..100).map(|number| (number, arrivals.next())).collect();
        waiting.reverse();
        let mut tasks = tokio::task::JoinSet::new();
        for (number, arrival) in waiting {
            let taken = Arc::clone(&taken);
            tasks.spawn(async move { arrival.in_order(|| taken.lock().unwrap().push(number)).await });
        }
        tasks.join_all().await;
        assert_eq!(*taken.lock().unwrap(), (0..100).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_body_is_slow_holds_up_others_for_a_moment_only() {
        let arrivals = Arrivals::default();
        let slow = arrivals.next();
        let started = tokio::time::Instant::now();
        assert_eq!(arrivals.next().in_order(|| 7).await, 7);
        assert_eq!(arrivals.next().in_order(|| 8).await, 8);
        assert_eq!(started.elapsed(), LATE, "the third waits for the second only");
        drop(slow);
    }

    #[tokio::test]
    async fn a_request_that_is_dropped_lets_the_next_one_go() {
        let arrivals = Arrivals::default();
        drop(arrivals.next());
        assert_eq!(arrivals.next().in_order(|| 7).await, 7);
    }
}
