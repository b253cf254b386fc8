//! Turns: calls reach a session in the order in which they were sent.
//!
//! The MCP library answers each request in a task of its own, and tasks begin in any order. A
//! client that sends two cells without waiting means them in that order, so the transport, which
//! sees the order, gives each call a turn, and the call waits for it. A turn is over when the call
//! is on its way to its session, not when it is answered: sessions keep their own queues. A call is
//! on its way after its first step, because whatever holds the sessions puts it into their queue,
//! or on the wire to them, without waiting.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use super::place::{End, Place};

/// Sessions remembered before those without a call under way are forgotten.
const MAX_REMEMBERED: usize = 256;

/// Gives out turns.
#[derive(Default)]
pub(super) struct Turns {
    /// The end of the last turn of each caller's sessions, by the name that the caller wrote.
    last: HashMap<(String, String), End>,
}

impl Turns {
    /// Returns the next turn at this session.
    pub(super) fn next(&mut self, caller: &str, session: &str) -> Turn {
        if self.last.len() >= MAX_REMEMBERED {
            self.last.retain(|_, end| !end.is_over());
        }
        let line = (caller.to_owned(), session.to_owned());
        let (place, end) = Place::after(self.last.remove(&line));
        self.last.insert(line, end);
        Turn {
            place: Arc::new(Mutex::new(Some(place))),
            is_brief: false,
        }
    }
}

/// A call's turn. It is over when it is dropped, whether it was used or not.
#[derive(Clone)]
pub(super) struct Turn {
    place: Arc<Mutex<Option<Place>>>,
    /// It is over after the first step of any call.
    is_brief: bool,
}

/// How much of a call belongs to its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    /// Its first step puts it into the session's queue.
    FirstStep,
    /// It reaches the session only after some work of its own.
    Whole,
    /// As the first step, but it must not wait long for others: it is what ends them.
    FirstStepSoon,
}

/// How long a call that ends others waits for a transfer before it.
const SOON: Duration = Duration::from_secs(1);

impl Turn {
    /// For a call that may mean another session than the next one does: it holds up nobody for
    /// longer than its first step.
    pub(super) fn brief(self) -> Turn {
        Turn {
            is_brief: true,
            ..self
        }
    }

    /// Runs a call when its turn has come.
    pub(super) async fn run<F: Future>(&self, extent: Extent, call: F) -> F::Output {
        let mut place = self
            .place
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(place) = &mut place {
            match extent {
                Extent::FirstStepSoon
                    if tokio::time::timeout(SOON, place.come()).await.is_err() =>
                {
                    place.pass()
                }
                Extent::FirstStepSoon => {}
                Extent::FirstStep | Extent::Whole => place.come().await,
            }
        }
        let mut call = pin!(call);
        if extent != Extent::Whole || self.is_brief {
            // Constrained, the step might end before the call is on its way.
            let first_step = poll_fn(|context| {
                Poll::Ready(pin!(tokio::task::unconstrained(call.as_mut())).poll(context))
            })
            .await;
            drop(place);
            return match first_step {
                Poll::Ready(output) => output,
                Poll::Pending => call.await,
            };
        }
        let output = call.await;
        drop(place);
        output
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Starts the calls in the opposite order and returns the order in which they began.
    async fn begun(calls: Vec<(&str, Extent)>) -> Vec<usize> {
        let mut turns = Turns::default();
        let begun = Arc::new(Mutex::new(Vec::new()));
        let mut running: Vec<_> = calls
            .into_iter()
            .enumerate()
            .map(|(number, (session, extent))| (number, turns.next("ann", session), extent))
            .collect();
        running.reverse();
        let mut tasks = tokio::task::JoinSet::new();
        for (number, turn, extent) in running {
            let begun = Arc::clone(&begun);
            tasks.spawn(async move {
                let call = async {
                    begun.lock().unwrap().push(number);
                    tokio::task::yield_now().await;
                };
                turn.run(extent, call).await;
            });
        }
        tasks.join_all().await;
        Arc::into_inner(begun).unwrap().into_inner().unwrap()
    }

    #[tokio::test]
    async fn calls_to_one_session_begin_in_the_order_in_which_they_came() {
        let calls = vec![
            ("a", Extent::FirstStep),
            ("a", Extent::Whole),
            ("a", Extent::FirstStepSoon),
            ("a", Extent::FirstStep),
        ];
        assert_eq!(begun(calls).await, [0, 1, 2, 3]);
    }

    #[tokio::test]
    async fn sessions_do_not_wait_for_one_another() {
        let mut turns = Turns::default();
        let held = turns.next("ann", "a");
        assert_eq!(
            turns
                .next("ann", "b")
                .run(Extent::FirstStep, async { 7 })
                .await,
            7
        );
        assert_eq!(
            turns
                .next("bob", "a")
                .run(Extent::FirstStep, async { 7 })
                .await,
            7
        );
        drop(held);
    }

    #[tokio::test]
    async fn a_call_that_never_runs_lets_the_next_one_go() {
        let mut turns = Turns::default();
        drop(turns.next("ann", "a"));
        assert_eq!(
            turns
                .next("ann", "a")
                .run(Extent::FirstStep, async { 7 })
                .await,
            7
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_given_up_while_it_waits_lets_nobody_pass_those_before_it() {
        let mut turns = Turns::default();
        let (transfer, given_up, next) = (
            turns.next("ann", "a"),
            turns.next("ann", "a"),
            turns.next("ann", "a"),
        );
        let transfer = tokio::spawn(async move {
            transfer
                .run(Extent::Whole, tokio::time::sleep(2 * SOON))
                .await
        });
        let given_up = tokio::spawn(async move { given_up.run(Extent::FirstStep, async {}).await });
        tokio::task::yield_now().await;
        given_up.abort();
        next.run(Extent::FirstStep, async {
            assert!(transfer.is_finished(), "the transfer was first")
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_ends_others_does_not_wait_long_for_them() {
        let mut turns = Turns::default();
        let transfer = turns.next("ann", "a");
        let reset = turns.next("ann", "a");
        let stuck = tokio::spawn(async move {
            transfer
                .run(Extent::Whole, std::future::pending::<()>())
                .await
        });
        reset.run(Extent::FirstStepSoon, async {}).await;
        stuck.abort();
    }

    #[tokio::test]
    async fn a_brief_turn_is_over_after_the_first_step_of_any_call() {
        let mut turns = Turns::default();
        let transfer = turns.next("ann", "").brief();
        let next = turns.next("ann", "");
        let stuck = tokio::spawn(async move {
            transfer
                .run(Extent::Whole, std::future::pending::<()>())
                .await
        });
        assert_eq!(next.run(Extent::Whole, async { 7 }).await, 7);
        stuck.abort();
    }

    #[tokio::test]
    async fn sessions_without_a_call_under_way_are_forgotten() {
        let mut turns = Turns::default();
        let _held = turns.next("ann", "held");
        for number in 0..10 * MAX_REMEMBERED {
            drop(turns.next("ann", &number.to_string()));
        }
        assert!(turns.last.len() <= MAX_REMEMBERED);
        assert!(
            turns
                .last
                .contains_key(&("ann".to_owned(), "held".to_owned()))
        );
    }
}
