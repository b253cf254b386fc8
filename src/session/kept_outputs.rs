//! Full outputs of executions, kept for readers who need the text that was cut from a result.
//!
//! They are bounded in number and bytes per session, and in bytes for the whole server. The oldest
//! output is dropped first. For the server's limit, it is the oldest output of the session that
//! keeps the most, so that one session cannot displace the outputs of others. Long outputs are
//! files in the temporary folder, which may be in memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::OutputId;
use super::spool::FullOutput;

/// Limits per session: number of outputs, and their bytes, which is two of the largest.
const MAX_OUTPUTS: usize = 20;
const MAX_BYTES_OF_SESSION: u64 = 128 * 1024 * 1024;
/// Limit in bytes for all sessions together.
const MAX_BYTES_OF_SERVER: u64 = 1024 * 1024 * 1024;

/// The outputs of all sessions.
pub(super) struct KeptOutputs {
    most_of_session: u64,
    most_of_server: u64,
    sessions: Mutex<Vec<Weak<Own>>>,
}

impl Default for KeptOutputs {
    fn default() -> KeptOutputs {
        KeptOutputs::bounded(MAX_BYTES_OF_SESSION, MAX_BYTES_OF_SERVER)
    }
}

#[derive(Default)]
struct Own(Mutex<VecDeque<(OutputId, FullOutput)>>);

impl Own {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(OutputId, FullOutput)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        self.lock()
            .iter()
            .map(|(_, output)| output.total_bytes())
            .sum()
    }
}

impl KeptOutputs {
    fn bounded(most_of_session: u64, most_of_server: u64) -> KeptOutputs {
        KeptOutputs {
            most_of_session,
            most_of_server,
            sessions: Mutex::default(),
        }
    }

    /// Creates the output store of one session.
    pub(super) fn of_session(self: &Arc<KeptOutputs>) -> SessionOutputs {
        let own = Arc::new(Own::default());
        self.lock().push(Arc::downgrade(&own));
        SessionOutputs {
            all: Arc::clone(self),
            own,
        }
    }

    fn make_room(&self) {
        let mut sessions = self.lock();
        sessions.retain(|session| session.strong_count() > 0);
        let live: Vec<Arc<Own>> = sessions.iter().filter_map(Weak::upgrade).collect();
        let mut kept: Vec<(u64, Arc<Own>)> =
            live.into_iter().map(|own| (own.bytes(), own)).collect();
        while kept.iter().map(|(bytes, _)| bytes).sum::<u64>() > self.most_of_server {
            let Some((bytes, largest)) = kept.iter_mut().max_by_key(|(bytes, _)| *bytes) else {
                return;
            };
            largest.lock().pop_front();
            *bytes = largest.bytes();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Own>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The outputs kept for one session.
pub(super) struct SessionOutputs {
    all: Arc<KeptOutputs>,
    own: Arc<Own>,
}

impl SessionOutputs {
    /// Keeps an output, and drops older ones if necessary.
    pub(super) fn keep(&self, id: OutputId, output: FullOutput) {
        self.own.lock().push_back((id, output));
        while self.own.lock().len() > MAX_OUTPUTS || self.own.bytes() > self.all.most_of_session {
            self.own.lock().pop_front();
        }
        self.all.make_room();
    }

    pub(super) fn find(&self, wanted: OutputId) -> Option<FullOutput> {
        self.own
            .lock()
            .iter()
            .find(|(id, _)| *id == wanted)
            .map(|(_, output)| output.clone())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.own.bytes()
    }

    /// Takes over the outputs of another session.
    pub(super) fn take_over(&self, other: &SessionOutputs) {
        let taken = std::mem::take(&mut *other.own.lock());
        for (id, output) in taken {
            self.keep(id, output);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExecutionId;
    use super::super::spool::Spool;
    use super::*;

    fn id(number: u64) -> OutputId {
        ExecutionId(number).into()
    }

    fn output(bytes: usize) -> FullOutput {
        let mut spool = Spool::default();
        spool.write(&"x".repeat(bytes));
        spool.finish().unwrap()
    }

    /// Returns which of the first `count` outputs are kept, by number.
    fn kept(session: &SessionOutputs, count: u64) -> Vec<u64> {
        (0..count)
            .filter(|number| session.find(id(*number)).is_some())
            .collect()
    }

    #[test]
    fn a_session_keeps_a_bounded_number_of_outputs_and_of_bytes() {
        let all = Arc::new(KeptOutputs::bounded(100, 1000));
        let session = all.of_session();
        for number in 0..3 {
            session.keep(id(number), output(33));
        }
        assert_eq!(
            (kept(&session, 3), session.bytes()),
            (vec![0, 1, 2], 99),
            "control"
        );
        session.keep(id(3), output(34));
        assert_eq!((kept(&session, 4), session.bytes()), (vec![1, 2, 3], 100));
        session.keep(id(4), output(101));
        assert_eq!(kept(&session, 5), [0; 0], "more than all that it may keep");
        for number in 0..22 {
            session.keep(id(number), output(1));
        }
        assert_eq!(kept(&session, 22), (2..22).collect::<Vec<_>>());
    }

    #[test]
    fn beyond_the_bound_of_the_server_the_session_that_keeps_most_gives_way() {
        let all = Arc::new(KeptOutputs::bounded(100, 150));
        let (small, large) = (all.of_session(), all.of_session());
        small.keep(id(0), output(40));
        for number in 0..2 {
            large.keep(id(number), output(50));
        }
        assert_eq!(
            (kept(&small, 1), kept(&large, 2)),
            (vec![0], vec![0, 1]),
            "control"
        );
        small.keep(id(1), output(11));
        assert_eq!((kept(&small, 2), kept(&large, 2)), (vec![0, 1], vec![1]));
        // The bytes of a session are released when the session is gone.
        drop(large);
        let other = all.of_session();
        other.keep(id(0), output(99));
        assert_eq!((kept(&small, 2), kept(&other, 1)), (vec![0, 1], vec![0]));
    }

    #[test]
    fn outputs_are_taken_over_by_another_session() {
        let all = Arc::new(KeptOutputs::bounded(100, 150));
        let (one, other) = (all.of_session(), all.of_session());
        one.keep(id(7), output(3));
        other.take_over(&one);
        assert_eq!((one.bytes(), other.bytes()), (0, 3));
        assert_eq!(other.find(id(7)).unwrap().read_range(0, 9).unwrap(), b"xxx");
    }
}
