//! The order in which the calls of one connection were sent.
//!
//! Requests of an HTTP/2 connection are handled in separate tasks, and tasks start in any order.
//! The connection itself reads their heads in order, so it gives each request an `Arrival`. A
//! handler that depends on the order waits until the bodies of the earlier requests have been read.
//!
//! A slow body delays only later requests of the same caller for the same session, identified by
//! their heads (`lane`). That wait ends with the body or with its request, so it needs no timeout
//! of its own.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{HeaderMap, Method, Request};

use super::place::{End, Place};

/// Headers that identify the caller, the connection of an older client, and the session.
const LANE_HEADERS: [&str; 3] = ["authorization", "mcp-session-id", "mcp-param-session-id"];

/// Number of lanes remembered before those without an open request are forgotten.
const MAX_REMEMBERED: usize = 256;

/// Orders the requests of one connection.
#[derive(Default)]
pub(crate) struct Arrivals {
    /// The end of the last request in each lane.
    last: Mutex<HashMap<u64, End>>,
    hasher: RandomState,
}

impl Arrivals {
    /// Registers the arrival of a request's head, for the endpoint that reads its body. Only
    /// messages are ordered.
    pub(crate) fn register<B>(&self, request: &mut Request<B>) {
        if let Some(arrival) = self.next(request) {
            request.extensions_mut().insert(arrival);
        }
    }

    fn next<B>(&self, request: &Request<B>) -> Option<Arrival> {
        (request.method() == Method::POST)
            .then(|| self.in_lane(self.lane(request.uri().path(), request.headers())))
    }

    fn in_lane(&self, lane: u64) -> Arrival {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() >= MAX_REMEMBERED {
            last.retain(|_, end| !end.is_over());
        }
        let (place, end) = Place::after(last.remove(&lane));
        last.insert(lane, end);
        Arrival(Arc::new(Mutex::new(Some(place))))
    }

    /// The key of requests whose order matters. A collision of two lanes only makes them wait for
    /// each other.
    fn lane(&self, path: &str, headers: &HeaderMap) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        path.hash(&mut hasher);
        for name in LANE_HEADERS {
            headers.get(name).hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// A request's position in its lane. It ends when it is dropped, whether it was used or not.
#[derive(Clone)]
pub(super) struct Arrival(Arc<Mutex<Option<Place>>>);

impl Arrival {
    /// Does `work` after that of the earlier requests.
    pub(super) async fn in_order<T>(self, work: impl FnOnce() -> T) -> T {
        let place = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut place) = place else {
            return work();
        };
        place.come().await;
        let done = work();
        drop(place);
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(session: &str) -> Request<()> {
        Request::post("/mcp")
            .header("authorization", "ann")
            .header("mcp-param-session-id", session)
            .body(())
            .unwrap()
    }

    fn next(arrivals: &Arrivals, session: &str) -> Arrival {
        arrivals.next(&call(session)).unwrap()
    }

    #[tokio::test]
    async fn requests_are_taken_in_the_order_of_their_heads_however_their_tasks_begin() {
        let arrivals = Arrivals::default();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let mut waiting: Vec<(usize, Arrival)> = (0..100)
            .map(|number| (number, next(&arrivals, "a")))
            .collect();
        waiting.reverse();
        let mut tasks = tokio::task::JoinSet::new();
        for (number, arrival) in waiting {
            let taken = Arc::clone(&taken);
            tasks.spawn(async move {
                arrival
                    .in_order(|| taken.lock().unwrap().push(number))
                    .await
            });
        }
        tasks.join_all().await;
        assert_eq!(*taken.lock().unwrap(), (0..100).collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_body_is_slow_keeps_its_place_and_holds_up_no_other_session_or_caller()
    {
        let arrivals = Arrivals::default();
        let slow = next(&arrivals, "a");
        assert_eq!(next(&arrivals, "b").in_order(|| 7).await, 7);
        let mut of_another = call("a");
        of_another
            .headers_mut()
            .insert("authorization", "bob".parse().unwrap());
        assert_eq!(arrivals.next(&of_another).unwrap().in_order(|| 8).await, 8);
        let later = tokio::spawn(next(&arrivals, "a").in_order(|| 9));
        // The paused clock advances only when all tasks are blocked.
        tokio::time::sleep(std::time::Duration::from_secs(3600)).await;
        assert!(!later.is_finished());
        drop(slow);
        assert_eq!(later.await.unwrap(), 9);
    }

    #[tokio::test]
    async fn a_request_that_is_dropped_lets_the_next_one_go() {
        let arrivals = Arrivals::default();
        drop(next(&arrivals, "a"));
        assert_eq!(next(&arrivals, "a").in_order(|| 7).await, 7);
    }

    #[test]
    fn only_messages_have_an_order() {
        let arrivals = Arrivals::default();
        assert!(
            arrivals
                .next(&Request::get("/mcp").body(()).unwrap())
                .is_none(),
            "it may stay open for ever"
        );
        assert!(
            arrivals
                .next(&Request::put("/sessions/a/files/b").body(()).unwrap())
                .is_none()
        );
    }

    #[test]
    fn lanes_without_a_request_under_way_are_forgotten() {
        let arrivals = Arrivals::default();
        let _held = next(&arrivals, "held");
        for number in 0..10 * MAX_REMEMBERED {
            drop(next(&arrivals, &number.to_string()));
        }
        assert!(arrivals.last.lock().unwrap().len() <= MAX_REMEMBERED);
    }
}
