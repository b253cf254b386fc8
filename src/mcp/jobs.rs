//! Jobs: work that takes longer than its call waits. `check_execution` collects the result.
//!
//! Cells are kept by their sessions, also when this process ends. What is not a cell (an
//! exploration, an installation) is kept here: it goes on in a task of its own, and
//! `check_execution` finds it by its session. One piece of work per session at a time.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use rmcp::model::CallToolResult;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::session::{Principal, ProgressChannel, SessionId};

/// Pieces of work that may be under way at once; more than this and callers wait for their answers.
const MAX_JOBS: usize = 1000;

type Key = (Principal, SessionId);

/// Work that nobody waits for at the moment.
#[derive(Default)]
pub(super) struct Jobs {
    jobs: Mutex<HashMap<Key, Job>>,
}

/// What a piece of work is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JobKind {
    Installation,
    Exploration,
}

impl JobKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            JobKind::Installation => "installation",
            JobKind::Exploration => "exploration",
        }
    }
}

/// One piece of work.
#[derive(Clone)]
pub(super) struct Job {
    kind: JobKind,
    result: watch::Receiver<Option<CallToolResult>>,
    pub(super) news: watch::Receiver<String>,
    pub(super) cancel: CancellationToken,
    pub(super) begun: Instant,
}

impl Job {
    /// Begins the work. `work` gets a token that is cancelled when somebody interrupts it. Its
    /// first step is done before this returns, so that it has its place in the session's queue.
    pub(super) async fn begin<F>(
        kind: JobKind,
        news: &ProgressChannel,
        work: impl FnOnce(CancellationToken) -> F,
    ) -> Job
    where
        F: Future<Output = CallToolResult> + Send + 'static,
    {
        let (sender, result) = watch::channel(None);
        let cancel = CancellationToken::new();
        let mut work = Box::pin(work(cancel.clone()));
        let first_step = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
        match first_step {
            Poll::Ready(done) => drop(sender.send(Some(done))),
            Poll::Pending => drop(tokio::spawn(async move {
                let done = work.await;
                // Nobody needs to listen any more.
                let _ = sender.send(Some(done));
            })),
        }
        Job {
            kind,
            result,
            news: news.subscribe(),
            cancel,
            begun: Instant::now(),
        }
    }

    fn has_ended(&self) -> bool {
        self.result.borrow().is_some()
    }

    /// Waits for the result, at most so long.
    pub(super) async fn result(&mut self, wait: Duration) -> Option<CallToolResult> {
        let ended = self.result.wait_for(Option::is_some);
        match tokio::time::timeout(wait, ended).await {
            Ok(Ok(result)) => result.clone(),
            // The work panicked; whoever waits longer waits for nothing.
            Ok(Err(_)) => Some(super::render::refused(&Vanished)),
            Err(_) => None,
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the work ended without a result; look at the session before you go on")]
struct Vanished;

impl Jobs {
    /// Puts work on the jobs of a session. It comes back when something is there already, or the
    /// jobs is full.
    pub(super) fn put(&self, owner: &Principal, session: &SessionId, job: Job) -> Result<(), Job> {
        let mut jobs = self.jobs();
        let key = (owner.clone(), session.clone());
        let is_taken = jobs.get(&key).is_some_and(|job| !job.has_ended());
        if is_taken || jobs.len() >= MAX_JOBS {
            return Err(job);
        }
        jobs.insert(key, job);
        Ok(())
    }

    pub(super) fn get(&self, owner: &Principal, session: &SessionId) -> Option<Job> {
        self.jobs().get(&(owner.clone(), session.clone())).cloned()
    }

    /// Names the work of a session that has ended and whose result nobody has asked for.
    pub(super) fn ended(&self, owner: &Principal, session: &SessionId) -> Option<JobKind> {
        self.get(owner, session)
            .filter(Job::has_ended)
            .map(|job| job.kind)
    }

    /// Names the work of a session that goes on.
    pub(super) fn underway(&self, owner: &Principal, session: &SessionId) -> Option<JobKind> {
        self.get(owner, session)
            .filter(|job| !job.has_ended())
            .map(|job| job.kind)
    }

    /// Takes finished work off the jobs.
    pub(super) fn clear(&self, owner: &Principal, session: &SessionId) {
        self.jobs().remove(&(owner.clone(), session.clone()));
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<Key, Job>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// CallSlots for calls, so many for each owner.
pub(super) struct CallSlots {
    most: usize,
    taken: Arc<Mutex<HashMap<Principal, usize>>>,
}

impl CallSlots {
    pub(super) fn new(most: usize) -> CallSlots {
        CallSlots {
            most,
            taken: Arc::default(),
        }
    }

    /// Takes a place until the guard is dropped, if one is free.
    pub(super) fn take(&self, owner: &Principal) -> Option<CallSlot> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(owner.clone()).or_default();
        if *count == self.most {
            return None;
        }
        *count += 1;
        Some(CallSlot {
            owner: owner.clone(),
            taken: self.taken.clone(),
        })
    }
}

pub(super) struct CallSlot {
    owner: Principal,
    taken: Arc<Mutex<HashMap<Principal, usize>>>,
}

impl Drop for CallSlot {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.owner) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(taken.remove(&self.owner)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::ContentBlock;
    use tokio::sync::oneshot;

    use super::*;

    fn owner(name: &str) -> Principal {
        Principal(name.to_owned())
    }

    fn session() -> SessionId {
        SessionId::default_session()
    }

    fn said(text: &str) -> CallToolResult {
        CallToolResult::success(vec![ContentBlock::text(text)])
    }

    #[tokio::test(start_paused = true)]
    async fn work_goes_on_until_somebody_asks_for_it() {
        let jobs = Jobs::default();
        let kind = Some(JobKind::Installation);
        let (finish, finished) = oneshot::channel();
        let mut job = Job::begin(
            JobKind::Installation,
            &ProgressChannel::default(),
            |_| async move { finished.await.unwrap() },
        )
        .await;
        assert_eq!(job.result(Duration::from_secs(50)).await, None);
        assert!(jobs.put(&owner("a"), &session(), job).is_ok());
        assert_eq!(
            (
                jobs.underway(&owner("a"), &session()),
                jobs.ended(&owner("a"), &session())
            ),
            (kind, None)
        );
        finish.send(said("done")).unwrap();
        assert!(
            jobs.get(&owner("b"), &session()).is_none(),
            "it belongs to another"
        );
        let mut found = jobs.get(&owner("a"), &session()).unwrap();
        assert_eq!(
            found.result(Duration::ZERO).await,
            None,
            "it has not been polled yet"
        );
        assert_eq!(
            found.result(Duration::from_secs(1)).await,
            Some(said("done"))
        );
        assert_eq!(
            (
                jobs.underway(&owner("a"), &session()),
                jobs.ended(&owner("a"), &session())
            ),
            (None, kind)
        );
        assert_eq!(jobs.ended(&owner("b"), &session()), None);
        jobs.clear(&owner("a"), &session());
        assert!(jobs.get(&owner("a"), &session()).is_none());
    }

    #[tokio::test]
    async fn a_session_has_one_piece_of_work_at_a_time() {
        let jobs = Jobs::default();
        let endless = async || {
            Job::begin(JobKind::Installation, &ProgressChannel::default(), |_| {
                std::future::pending()
            })
            .await
        };
        assert!(jobs.put(&owner("a"), &session(), endless().await).is_ok());
        assert!(jobs.put(&owner("a"), &session(), endless().await).is_err());
        assert!(jobs.put(&owner("b"), &session(), endless().await).is_ok());
    }

    #[tokio::test]
    async fn work_can_be_interrupted() {
        let mut job = Job::begin(
            JobKind::Installation,
            &ProgressChannel::default(),
            |cancel| async move {
                cancel.cancelled().await;
                said("interrupted")
            },
        )
        .await;
        job.cancel.cancel();
        assert_eq!(
            job.result(Duration::from_secs(5)).await,
            Some(said("interrupted"))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_panics_says_so() {
        let mut job = Job::begin(
            JobKind::Installation,
            &ProgressChannel::default(),
            |_| async {
                tokio::task::yield_now().await;
                panic!("as it must")
            },
        )
        .await;
        assert_eq!(
            job.result(Duration::from_secs(5)).await.unwrap().is_error,
            Some(true)
        );
    }

    #[test]
    fn places_are_counted_for_each_owner() {
        let places = CallSlots::new(2);
        let first = places.take(&owner("a")).unwrap();
        let _second = places.take(&owner("a")).unwrap();
        assert!(places.take(&owner("a")).is_none());
        assert!(places.take(&owner("b")).is_some());
        drop(first);
        assert!(places.take(&owner("a")).is_some());
        assert_eq!(
            places.taken.lock().unwrap().len(),
            1,
            "owners without calls are forgotten"
        );
    }
}
