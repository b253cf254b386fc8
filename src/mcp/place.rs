//! Places in a line: each waits until all before it are over.
//!
//! A place is over when it is dropped. If it is dropped while it still waits, whoever is behind it
//! waits for what it has waited for: giving up a place lets nobody pass those before it.

use tokio::sync::oneshot;

/// Comes when a place is over.
pub(crate) struct End(oneshot::Receiver<End>);

impl End {
    /// Tells whether nobody would have to wait for this any more.
    pub(crate) fn is_over(&mut self) -> bool {
        loop {
            match self.0.try_recv() {
                // The place was given up; those before it are still there.
                Ok(before) => *self = before,
                Err(oneshot::error::TryRecvError::Empty) => return false,
                Err(oneshot::error::TryRecvError::Closed) => return true,
            }
        }
    }
}

/// A place in a line.
pub(crate) struct Place {
    before: Option<End>,
    /// Dropped, it wakes the next.
    over: Option<oneshot::Sender<End>>,
}

impl Place {
    /// Makes the next place in a line, and the end for which the one behind it waits.
    pub(crate) fn after(before: Option<End>) -> (Place, End) {
        // Places that were given up are passed over now, so that they never become a long chain.
        let before = before.and_then(|mut end| (!end.is_over()).then_some(end));
        let (over, end) = oneshot::channel();
        (
            Place {
                before,
                over: Some(over),
            },
            End(end),
        )
    }

    /// Waits until all places before are over.
    pub(crate) async fn come(&mut self) {
        while let Some(End(before)) = &mut self.before {
            self.before = before.await.ok();
        }
    }

    /// Goes on as if the places before were over.
    pub(crate) fn pass(&mut self) {
        self.before = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let (Some(before), Some(over)) = (self.before.take(), self.over.take()) {
            // Nobody may be behind.
            let _ = over.send(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_place_that_is_given_up_lets_nobody_pass_those_before_it() {
        let (first, end) = Place::after(None);
        let (second, end) = Place::after(Some(end));
        let (mut third, mut end) = Place::after(Some(end));
        // It is given up in the middle of its wait.
        let waits = tokio::spawn(async move {
            let mut second = second;
            second.come().await;
        });
        tokio::task::yield_now().await;
        waits.abort();
        assert!(waits.await.is_err());
        let come = tokio::spawn(async move {
            third.come().await;
            third
        });
        // The clock goes on only when nothing else can happen.
        tokio::time::sleep(std::time::Duration::from_secs(3600)).await;
        assert!(!come.is_finished());
        assert!(!end.is_over());
        drop(first);
        drop(come.await.unwrap());
        assert!(end.is_over());
    }

    #[test]
    fn many_places_that_are_given_up_cost_nothing() {
        let (first, mut end) = Place::after(None);
        for _ in 0..1_000_000 {
            let (given_up, next) = Place::after(Some(end));
            drop(given_up);
            end = next;
        }
        assert!(!end.is_over());
        drop(first);
        assert!(end.is_over());
    }
}
