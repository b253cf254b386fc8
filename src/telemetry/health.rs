//! Whether the server can accept work, and if not, why.
//!
//! Liveness and readiness are separate. A process that responds at all is alive; a restart would
//! not make it ready. It is ready when nothing it needs is missing: each part reports when it is
//! not ready, or is queried on demand.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A part that can keep the server from accepting work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HealthPart {
    /// The environment and the warm interpreter.
    Python,
    /// The session daemon.
    SessionDaemon,
    Audit,
    /// Signing keys of the issuers.
    Keys,
    /// The server itself: it is stopping.
    Draining,
}

impl HealthPart {
    /// The name of the part in responses.
    pub fn name(self) -> &'static str {
        match self {
            HealthPart::Python => "python",
            HealthPart::SessionDaemon => "daemon",
            HealthPart::Audit => "audit",
            HealthPart::Keys => "keys",
            HealthPart::Draining => "draining",
        }
    }
}

type Question = Box<dyn Fn() -> Option<String> + Send + Sync>;

/// The state of all parts. Clones share it.
#[derive(Clone, Default)]
pub struct Health(Arc<Inner>);

#[derive(Default)]
struct Inner {
    said: Mutex<BTreeMap<HealthPart, String>>,
    asked: Mutex<BTreeMap<HealthPart, Question>>,
}

impl std::fmt::Debug for Health {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_tuple("Health")
            .field(&self.ready())
            .finish()
    }
}

impl Health {
    /// All parts start as ready.
    pub fn new() -> Health {
        Health::default()
    }

    /// Marks a part as not ready, with the reason.
    pub fn not_ready(&self, part: HealthPart, why: impl Into<String>) {
        self.said().insert(part, why.into());
    }

    /// Marks a part as ready.
    pub fn ready_again(&self, part: HealthPart) {
        self.said().remove(&part);
    }

    /// Registers a check of a part that runs on every readiness query. It returns why the part is
    /// not ready, and must not block.
    pub fn ask(
        &self,
        part: HealthPart,
        question: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) {
        self.0
            .asked
            .lock()
            .expect("nobody panics while holding the questions")
            .insert(part, Box::new(question));
    }

    /// Marks the server as stopping. It does not become ready again.
    pub fn drain(&self) {
        self.not_ready(HealthPart::Draining, "the server is ending");
    }

    /// Returns whether the server can accept work, or all reasons why not, each as `part: reason`.
    pub fn ready(&self) -> Result<(), Vec<String>> {
        let mut reasons = self.said().clone();
        for (part, question) in self
            .0
            .asked
            .lock()
            .expect("nobody panics while holding the questions")
            .iter()
        {
            if let Some(why) = question() {
                reasons.insert(*part, why);
            }
        }
        if reasons.is_empty() {
            return Ok(());
        }
        Err(reasons
            .into_iter()
            .map(|(part, why)| format!("{}: {why}", part.name()))
            .collect())
    }

    fn said(&self) -> MutexGuard<'_, BTreeMap<HealthPart, String>> {
        self.0
            .said
            .lock()
            .expect("nobody panics while holding the reasons")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn every_reason_is_named_until_it_is_gone() {
        let health = Health::new();
        assert_eq!(health.ready(), Ok(()));
        health.not_ready(HealthPart::Python, "preparing Python, step 2 of 5");
        health
            .clone()
            .not_ready(HealthPart::SessionDaemon, "it does not answer");
        let reasons = [
            "python: preparing Python, step 2 of 5",
            "daemon: it does not answer",
        ]
        .map(str::to_owned);
        assert_eq!(health.ready(), Err(reasons.to_vec()));
        health.ready_again(HealthPart::Python);
        health.ready_again(HealthPart::SessionDaemon);
        assert_eq!(health.ready(), Ok(()));
        health.drain();
        assert_eq!(
            health.ready(),
            Err(vec!["draining: the server is ending".to_owned()])
        );
    }

    #[test]
    fn a_part_that_is_asked_answers_for_the_moment() {
        let health = Health::new();
        let failing = Arc::new(AtomicBool::new(true));
        let state = failing.clone();
        health.ask(HealthPart::Audit, move || {
            state
                .load(Ordering::SeqCst)
                .then(|| "no space left".to_owned())
        });
        assert_eq!(health.ready(), Err(vec!["audit: no space left".to_owned()]));
        failing.store(false, Ordering::SeqCst);
        assert_eq!(health.ready(), Ok(()));
    }
}
