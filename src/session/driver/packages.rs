//! The driver's part in packages: what a session has been given, and what its code asks for.
//!
//! A session has a package because its folder is on the path of its Python. So the memory of a session says which it has, copies have them too,
//! and an undo takes them back. What is kept here is for the one case in which memory is lost on purpose: a reset gives the packages again.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use serde_json::json;
use tracing::debug;

use super::{Driver, RequestId, Running, Task};
use crate::runner_client::Question;
use crate::session::install::{InstallError, InstallRequest, Installed};

/// Questions of one cell that are being answered at the same time.
const MOST_QUESTIONS: usize = 8;

/// Installations that running code has asked for.
#[derive(Default)]
pub(super) struct Questions(Vec<Pin<Box<dyn Future<Output = Answered> + Send>>>);

pub(super) struct Answered {
    ask: u64,
    installed: Result<Installed, InstallError>,
}

impl Questions {
    /// Waits for the next answer; for ever when nothing was asked.
    pub(super) async fn next(&mut self) -> Answered {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Answered> {
        let mut ready = None;
        self.0.retain_mut(|question| {
            ready.is_some()
                || match question.as_mut().poll(context) {
                    Poll::Ready(answered) => {
                        ready = Some(answered);
                        false
                    }
                    Poll::Pending => true,
                }
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    }

    /// Gives up what is being answered; nobody waits for it any more.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Driver {
    /// Takes a question of the running cell. Each is answered exactly once, as long as the cell runs.
    pub(super) fn asked(&mut self, id: RequestId, ask: u64, question: Question) {
        if !matches!(&self.running, Some(Running { id: running, task: Task::Cell { .. }, .. }) if *running == id) {
            return;
        }
        let refuse = |driver: &mut Driver, why: &str| {
            driver.answer_question(Answered { ask, installed: Err(InstallError::Refused(why.to_owned())) });
        };
        match (question, self.settings.packages.0.clone()) {
            (Question::Install { .. }, _) if self.questions.0.len() >= MOST_QUESTIONS => {
                refuse(self, "too many installations are under way in this session");
            }
            (Question::Install { requirements, upgrade }, Some(installer)) => {
                debug!(session = self.id.as_str(), "code asks for packages");
                let request = InstallRequest { requirements, upgrade, has: self.shared.facts().packages.clone() };
                self.questions.0.push(Box::pin(async move {
                    Answered { ask, installed: installer.install(request, &|_| ()).await }
                }));
            }
            (Question::Install { .. }, None) => refuse(self, "packages cannot be installed on this server"),
            (Question::Unknown, _) => refuse(self, "this server does not know that question"),
        }
    }

    pub(super) fn answer_question(&mut self, answered: Answered) {
        let ask = answered.ask;
        let frame = match answered.installed {
            Ok(Installed { paths, text }) => {
                self.have(&paths);
                json!({"type": "answer", "ask": ask, "ok": true, "text": text, "paths": paths})
            }
            Err(error) => json!({"type": "answer", "ask": ask, "ok": false, "text": format!("{error}\n"), "paths": []}),
        };
        self.send(&frame, b"");
    }

    /// Notes what the session has from now on, the latest first.
    pub(super) fn have(&mut self, paths: &[String]) {
        let packages = &mut self.shared.facts().packages;
        packages.retain(|path| !paths.contains(path));
        packages.splice(0..0, paths.iter().cloned());
    }

    /// Gives a fresh interpreter what the session had. The runner does it before anything that is sent later.
    pub(super) fn give_packages_again(&mut self) {
        let packages = self.shared.facts().packages.clone();
        if !packages.is_empty() {
            let id = self.numbers.fetch_add(1, Ordering::Relaxed);
            let frame = json!({"type": "packages", "id": id, "paths": packages});
            self.send(&frame, b"");
        }
    }
}
