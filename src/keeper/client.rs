//! The way to sessions that another process keeps.
//!
//! It looks like the sessions themselves. When the keeper has died, the next call starts another
//! one; calls for the sessions that are lost are refused by name until somebody resets or closes
//! them, as for any session that ended.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::link::{Link, Listeners, NoAnswer, Recording};
use super::message::{Answer, Welcome};
use super::seen::Seen;
use super::start::{self, AttachError};
use super::{KeeperSettings, post::KeeperName};
use crate::ops::{self, Body, Host, Io, Op, Reply, Subject, Ticket};
use crate::sandbox::{LaunchError, Preparation, Rules};
use crate::session::{
    Executed, Principal, RecordEnding, Refused, ResetReport, SessionId, SessionInfo, SessionState,
    Which,
};

/// The first wait after a keeper could not be started. Each further failure doubles it.
const FIRST_REST: Duration = Duration::from_millis(500);
const LONGEST_REST: Duration = Duration::from_secs(30);
const NO_KEEPER: &str = "the process that keeps sessions is not there, and could not be started";

/// Sessions that a keeper keeps. Copies share the connection.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Mutex<Arc<KeeperSettings>>,
    link: Mutex<Option<Arc<Link>>>,
    /// Held by whoever connects, and by every call until it is sent: calls are sent in the order in
    /// which they came.
    connecting: tokio::sync::Mutex<Attempts>,
    listeners: Listeners,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Attempts {
    /// The keeper that was there last.
    keeper: String,
    failures: u32,
    /// Nobody tries again before this.
    rest: Option<Instant>,
}

impl Attempts {
    /// Notes that no keeper could be started. Each failure doubles the wait.
    fn failed(&mut self, now: Instant) {
        let rest = FIRST_REST
            .saturating_mul(1 << self.failures.min(10))
            .min(LONGEST_REST);
        self.failures += 1;
        self.rest = Some(now + rest);
    }

    fn rests(&self, now: Instant) -> bool {
        self.rest.is_some_and(|until| now < until)
    }
}

/// Which session a call is about.
type About<'a> = Option<(&'a Principal, &'a SessionId)>;

impl Client {
    pub(super) async fn attach(settings: KeeperSettings) -> Result<Client, AttachError> {
        let (stream, welcome) = start::connect(&settings).await?;
        let waiting = Preparation::Working {
            step: "preparing Python".to_owned(),
            done: 0,
            total: None,
        };
        let shared = Arc::new(Shared {
            settings: Mutex::new(Arc::new(settings)),
            link: Mutex::new(None),
            connecting: tokio::sync::Mutex::default(),
            listeners: Listeners {
                preparation: watch::Sender::new(waiting),
                recording: Arc::default(),
            },
            seen: Mutex::default(),
        });
        shared.welcomed(&welcome, &mut *shared.connecting.lock().await);
        shared.use_link(Link::new(stream, shared.listeners.clone()));
        Ok(Client { shared })
    }

    /// Uses these settings for the next keeper that has to be started.
    pub fn renew(&self, settings: KeeperSettings) {
        *self
            .shared
            .settings
            .lock()
            .expect("nothing panics while it holds the settings") = Arc::new(settings);
    }

    /// Cuts the connection, as a failure would. What runs goes on.
    pub fn leave(&self) {
        if let Some(link) = self.shared.current().as_ref() {
            link.closed.cancel();
        }
    }

    /// Waits until the end of the connection has been noticed.
    #[cfg(test)]
    pub(super) async fn closed(&self) {
        let closed = self
            .shared
            .current()
            .as_ref()
            .expect("there is a connection")
            .closed
            .clone();
        closed.cancelled().await;
    }

    /// The name of the keeper.
    pub fn keeper(&self) -> KeeperName {
        self.shared.settings().name.clone()
    }

    /// Tells why the keeper cannot take work, if it cannot.
    pub fn trouble(&self) -> Option<String> {
        let link = self.shared.open_link()?;
        link.is_silent()
            .then(|| "the process that keeps the sessions does not answer".to_owned())
    }

    /// Returns the connection, making a new one if the keeper is gone. Later calls wait until the
    /// second value is dropped.
    async fn link(&self) -> Result<(Arc<Link>, tokio::sync::MutexGuard<'_, Attempts>), Refused> {
        let mut attempts = self.shared.connecting.lock().await;
        if let Some(link) = self.shared.open_link() {
            return Ok((link, attempts));
        }
        if attempts.rests(Instant::now()) {
            return Err(no_keeper(NO_KEEPER));
        }
        let settings = self.shared.settings();
        match start::connect(&settings).await {
            Ok((stream, welcome)) => {
                self.shared.welcomed(&welcome, &mut attempts);
                let link = Link::new(stream, self.shared.listeners.clone());
                self.shared.use_link(Arc::clone(&link));
                Ok((link, attempts))
            }
            Err(error) => {
                attempts.failed(Instant::now());
                warn!(error = %with_causes(&error), "there is no keeper");
                // A caller has no use for names and paths of this machine.
                Err(no_keeper(NO_KEEPER))
            }
        }
    }

    /// Sends an operation and waits for its reply.
    async fn ask(
        &self,
        owner: &Principal,
        session: Option<&SessionId>,
        op: &Op,
        io: Io<'_>,
    ) -> Result<Reply, Refused> {
        let Io {
            cancel,
            progress,
            body,
            ..
        } = io;
        let about = session.map(|id| (owner, id));
        let (link, answer, trouble) = match body {
            Body::None => loop {
                let (link, order) = self.link().await?;
                self.refuse_lost(about)?;
                let asked = link.ask(owner, op, progress.clone());
                drop(order);
                match asked {
                    // The keeper was gone already, and nothing has happened. The next turn finds
                    // another one, or fails.
                    Err(NoAnswer::NotSent) => continue,
                    Err(other) => break (link, Err(other), None),
                    Ok(asked) => {
                        let answer = asked.answered(cancel, patience(op)).await;
                        break (link, answer, None);
                    }
                }
            },
            Body::Source(mut source) => {
                let (link, order) = self.link().await?;
                self.refuse_lost(about)?;
                drop(order);
                let (answer, trouble) = link.send_file(owner, op, &mut source).await;
                (link, answer, trouble)
            }
            Body::Sink(mut sink) => {
                let (link, order) = self.link().await?;
                self.refuse_lost(about)?;
                drop(order);
                let (answer, trouble) = link.receive_file(owner, op, &mut sink).await;
                if let Some(error) = trouble {
                    return Err(transfer(&error));
                }
                (link, answer, None)
            }
        };
        let reply = self.heard(about, answer);
        match trouble {
            // The sessions know only that the rest did not come.
            Some(error) if !link.is_closed() => Err(transfer(&error)),
            _ => reply,
        }
    }

    fn refuse_lost(&self, about: About<'_>) -> Result<(), Refused> {
        match about {
            Some((owner, id)) if self.shared.seen().is_lost(owner, id) => Err(self.lost(id)),
            _ => Ok(()),
        }
    }

    /// Turns what came back into the answer of a call.
    fn heard(&self, about: About<'_>, answer: Result<Answer, NoAnswer>) -> Result<Reply, Refused> {
        match answer {
            Ok(answer) => answer,
            Err(NoAnswer::Silent { sent }) => Err(Refused::Unresponsive { sent }),
            Err(NoAnswer::TooLarge) => Err(Refused::Transfer {
                why: "the request is too large".to_owned(),
            }),
            Err(NoAnswer::Nonsense) => Err(Refused::Transfer {
                why: "the answer could not be understood".to_owned(),
            }),
            Err(NoAnswer::NotSent | NoAnswer::Lost) => Err(match about {
                Some((owner, id)) => {
                    self.shared.seen().lose(owner, id);
                    self.lost(id)
                }
                None => no_keeper("the process that kept the sessions ended, and they are lost"),
            }),
        }
    }

    fn lost(&self, id: &SessionId) -> Refused {
        let files = self.shared.settings().files_outlive_sessions;
        let what = if files {
            "its variables are lost; files in the working folder are kept"
        } else {
            "its variables and files are lost"
        };
        let why = format!("the process that kept the sessions ended, and {what}");
        Refused::Ended {
            id: id.clone(),
            why,
            undo: false,
        }
    }

    /// Forgets sessions of an owner that have ended unnoticed, when many are remembered.
    async fn check_seen(&self, owner: &Principal) {
        let Some(asked) = self.shared.seen().must_check(owner) else {
            return;
        };
        // What is not known now is found out after a later call.
        let list = Op::from(ops::ListSessions {});
        if let Ok(Reply::ListSessions(all)) = self.ask(owner, None, &list, Io::default()).await {
            self.shared
                .seen()
                .check(owner, &all.iter().map(|info| &info.id).collect(), asked);
        }
    }

    /// Which session an operation is about, as far as that is known here.
    fn session_of(&self, owner: &Principal, op: &Op) -> Option<SessionId> {
        match op.subject() {
            Subject::Session(id) | Subject::Execution(Which::Of(id)) => Some(id.clone()),
            Subject::Handle(handle) | Subject::Execution(Which::This(handle)) => {
                self.shared.seen().session_of(owner, handle)
            }
            Subject::Other => None,
        }
    }

    async fn carry_out(&self, owner: &Principal, op: Op, io: Io<'_>) -> Result<Reply, Refused> {
        if let Some(reply) = self.settle_lost(owner, &op).await? {
            return Ok(reply);
        }
        let session = self.session_of(owner, &op);
        let mut reply = self.ask(owner, session.as_ref(), &op, io).await?;
        self.note(owner, session.as_ref(), &mut reply);
        if let Reply::Execute(_) = reply {
            self.check_seen(owner).await;
        }
        Ok(reply)
    }

    /// Resets or closes a session that was lost with its keeper, which takes no keeper.
    async fn settle_lost(&self, owner: &Principal, op: &Op) -> Result<Option<Reply>, Refused> {
        let (session, reply) = match op {
            Op::Reset(op) => {
                let report = ResetReport {
                    interrupted_running_cell: false,
                    files_kept: self.shared.settings().files_outlive_sessions,
                    had_no_session: true,
                };
                (&op.session, Reply::Reset(report))
            }
            Op::CloseSession(op) => (&op.session, Reply::CloseSession(())),
            _ => return Ok(None),
        };
        drop(self.link().await?);
        Ok(self.shared.seen().forgive(owner, session).then_some(reply))
    }

    /// Remembers which sessions exist, by what a reply proves. A list gets those that were lost.
    fn note(&self, owner: &Principal, session: Option<&SessionId>, reply: &mut Reply) {
        let mut seen = self.shared.seen();
        match (&mut *reply, session) {
            // A reset succeeds without a session, and so does a part of an upload.
            (Reply::Reset(_), _) => {}
            (Reply::Upload(uploaded), _) if !uploaded.finished => {}
            (Reply::CloseSession(()), Some(id)) => seen.forget(owner, id),
            (_, Some(id)) => seen.note(owner, id),
            (_, None) => {}
        }
        match reply {
            Reply::Execute(Executed::Underway(underway)) => {
                seen.note_execution(owner, &underway.handle, &underway.session);
            }
            Reply::Fork(report) => {
                report.forks.iter().for_each(|fork| seen.note(owner, fork));
            }
            Reply::Explore(report) => {
                let kept = report.kept.iter();
                kept.for_each(|(_, session)| seen.note(owner, session));
            }
            Reply::ListSessions(all) => {
                let lost = seen.lost_by(owner);
                all.iter().for_each(|info| seen.note(owner, &info.id));
                all.extend(
                    lost.into_iter()
                        .map(|id| lost_info(id, "the process that kept the sessions ended")),
                );
                all.sort_by(|one, other| one.id.cmp(&other.id));
            }
            _ => {}
        }
    }
}

/// How long the reply to an operation may take while the keeper is well, if that is bounded.
fn patience(op: &Op) -> Option<Duration> {
    match op {
        Op::Execute(op) => op.wait,
        Op::Check(op) => Some(op.wait),
        _ => None,
    }
}

impl Shared {
    fn settings(&self) -> Arc<KeeperSettings> {
        Arc::clone(
            &self
                .settings
                .lock()
                .expect("nothing panics while it holds the settings"),
        )
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<Link>>> {
        self.link
            .lock()
            .expect("nothing panics while it holds the connection")
    }

    fn open_link(&self) -> Option<Arc<Link>> {
        self.current()
            .as_ref()
            .filter(|link| !link.is_closed())
            .map(Arc::clone)
    }

    fn use_link(&self, link: Arc<Link>) {
        *self.current() = Some(Arc::clone(&link));
        let recording = self
            .listeners
            .recording
            .lock()
            .expect("nothing panics while it holds the recorder")
            .clone();
        if let Some(Recording { takes_over, .. }) = recording {
            link.begin_recording(takes_over);
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen
            .lock()
            .expect("nothing panics while it holds what was seen")
    }

    /// Notes which keeper this is and whose sessions it has. Another one than before means that
    /// those are lost.
    fn welcomed(&self, welcome: &Welcome, attempts: &mut Attempts) {
        let mut seen = self.seen();
        if attempts.keeper != welcome.keeper {
            seen.lose_all();
        }
        for resident in &welcome.residents {
            seen.note(&resident.owner, &resident.id);
        }
        *attempts = Attempts {
            keeper: welcome.keeper.clone(),
            ..Attempts::default()
        };
    }
}

fn no_keeper(why: &str) -> Refused {
    Refused::Launch(LaunchError::Start {
        why: why.to_owned(),
    })
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn transfer(error: &io::Error) -> Refused {
    Refused::Transfer {
        why: error.kind().to_string(),
    }
}

impl Host for Client {
    fn submit<'a>(&self, owner: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        let (client, owner) = (self.clone(), owner.clone());
        Ticket::admit(async move { client.carry_out(&owner, op, io).await })
    }

    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.shared.listeners.preparation.subscribe()
    }

    fn record_endings(&self, takes_over: bool, record: RecordEnding) {
        let recording = &self.shared.listeners.recording;
        *recording
            .lock()
            .expect("nothing panics while it holds the recorder") =
            Some(Recording { takes_over, record });
        if let Some(link) = self.shared.open_link() {
            link.begin_recording(takes_over);
        }
    }
}

fn lost_info(id: SessionId, why: &str) -> SessionInfo {
    SessionInfo {
        id,
        state: SessionState::Ended,
        ended: Some(why.to_owned()),
        executions: 0,
        age: Duration::ZERO,
        idle: Duration::ZERO,
        memory: None,
        rules: Rules::none(),
        requested: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_each_failure_the_wait_is_longer_and_never_too_long() {
        let now = Instant::now();
        let mut attempts = Attempts::default();
        assert!(!attempts.rests(now));
        let mut waits = Vec::new();
        for _ in 0..40 {
            attempts.failed(now);
            let wait = attempts.rest.unwrap() - now;
            assert!(attempts.rests(now) && !attempts.rests(now + wait));
            waits.push(wait);
        }
        assert_eq!(waits[..3], [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]);
        assert_eq!(waits[39], LONGEST_REST);
    }
}
