//! The client of a session daemon.
//!
//! It has the interface of the sessions themselves. When the daemon has died, the next call starts
//! another one; calls for the lost sessions are refused by name until they are reset or closed, as
//! for any session that ended.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::daemon_connection::{DaemonConnection, Recording, RpcError, Subscribers};
use super::known_sessions::KnownSessions;
use super::message::{ReplyResult, Welcome};
use super::start::{self, AttachError};
use super::{DaemonSettings, socket::DaemonName};
use crate::ops::{self, Body, Host, Io, Op, OpSubject, Reply, Ticket};
use crate::sandbox::{LaunchError, Preparation, Rules};
use crate::session::{
    ExecutionRef, ExecutionReport, Principal, RecordEnding, Refused, ResetReport, SessionId,
    SessionInfo, SessionState,
};

/// The first delay after a failure to start a daemon. Each further failure doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
const NO_DAEMON: &str = "the session daemon is not running and could not be started";

/// The sessions of a daemon. Clones share the connection.
#[derive(Clone)]
pub struct DaemonClient {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Mutex<Arc<DaemonSettings>>,
    connection: Mutex<Option<Arc<DaemonConnection>>>,
    /// Locked while connecting, and by every call until it is sent: calls are sent in the order in
    /// which they were made.
    connecting: tokio::sync::Mutex<ConnectState>,
    subscribers: Subscribers,
    known_sessions: Mutex<KnownSessions>,
}

#[derive(Default)]
struct ConnectState {
    /// The daemon of the last connection.
    instance: String,
    failures: u32,
    /// No attempt is made before this.
    backoff_until: Option<Instant>,
}

impl ConnectState {
    /// Records that no daemon could be started. Each failure doubles the delay.
    fn failed(&mut self, now: Instant) {
        let backoff = FIRST_BACKOFF
            .saturating_mul(1 << self.failures.min(10))
            .min(MAX_BACKOFF);
        self.failures += 1;
        self.backoff_until = Some(now + backoff);
    }

    fn backs_off(&self, now: Instant) -> bool {
        self.backoff_until.is_some_and(|until| now < until)
    }
}

/// The session of a call.
type About<'a> = Option<(&'a Principal, &'a SessionId)>;

impl DaemonClient {
    pub(super) async fn attach(settings: DaemonSettings) -> Result<DaemonClient, AttachError> {
        let (stream, welcome) = start::connect(&settings).await?;
        let waiting = Preparation::Working {
            step: "preparing Python".to_owned(),
            done: 0,
            total: None,
        };
        let shared = Arc::new(Shared {
            settings: Mutex::new(Arc::new(settings)),
            connection: Mutex::new(None),
            connecting: tokio::sync::Mutex::default(),
            subscribers: Subscribers {
                preparation: watch::Sender::new(waiting),
                recording: Arc::default(),
            },
            known_sessions: Mutex::default(),
        });
        shared.note_welcome(&welcome, &mut *shared.connecting.lock().await);
        shared.use_connection(DaemonConnection::new(stream, shared.subscribers.clone()));
        Ok(DaemonClient { shared })
    }

    /// Uses these settings for the next daemon that has to be started.
    pub fn update_settings(&self, settings: DaemonSettings) {
        *self
            .shared
            .settings
            .lock()
            .expect("nothing panics while it holds the settings") = Arc::new(settings);
    }

    /// Closes the connection, as a failure would. Running code continues.
    pub fn disconnect(&self) {
        if let Some(connection) = self.shared.current().as_ref() {
            connection.closed.cancel();
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

    pub fn daemon_name(&self) -> DaemonName {
        self.shared.settings().name.clone()
    }

    /// Returns why the daemon cannot accept work, if it cannot.
    pub fn problem(&self) -> Option<String> {
        let connection = self.shared.open_connection()?;
        connection
            .is_unresponsive()
            .then(|| "the session daemon does not answer".to_owned())
    }

    /// Returns the connection, or a new one if the daemon is gone. Later calls wait until the
    /// second value is dropped.
    async fn connect(
        &self,
    ) -> Result<
        (
            Arc<DaemonConnection>,
            tokio::sync::MutexGuard<'_, ConnectState>,
        ),
        Refused,
    > {
        let mut state = self.shared.connecting.lock().await;
        if let Some(connection) = self.shared.open_connection() {
            return Ok((connection, state));
        }
        if state.backs_off(Instant::now()) {
            return Err(daemon_unavailable(NO_DAEMON));
        }
        let settings = self.shared.settings();
        match start::connect(&settings).await {
            Ok((stream, welcome)) => {
                self.shared.note_welcome(&welcome, &mut state);
                let connection = DaemonConnection::new(stream, self.shared.subscribers.clone());
                self.shared.use_connection(Arc::clone(&connection));
                Ok((connection, state))
            }
            Err(error) => {
                state.failed(Instant::now());
                warn!(error = %with_causes(&error), "the session daemon is unavailable");
                // Names and paths of this machine are not for callers.
                Err(daemon_unavailable(NO_DAEMON))
            }
        }
    }

    /// Sends an operation and waits for its reply.
    async fn call(
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
        let (connection, answer, problem) = match body {
            Body::None => loop {
                let (connection, order) = self.connect().await?;
                self.refuse_lost(about)?;
                let call = connection.call(owner, op, progress.clone());
                drop(order);
                match call {
                    // The daemon was gone already, and nothing has happened. The next attempt finds
                    // another one, or fails.
                    Err(RpcError::NotSent) => continue,
                    Err(other) => break (connection, Err(other), None),
                    Ok(call) => {
                        let answer = call.reply(cancel, reply_timeout(op)).await;
                        break (connection, answer, None);
                    }
                }
            },
            Body::Source(mut source) => {
                let (connection, order) = self.connect().await?;
                self.refuse_lost(about)?;
                drop(order);
                let (answer, problem) = connection.send_file(owner, op, &mut source).await;
                (connection, answer, problem)
            }
            Body::Sink(mut sink) => {
                let (connection, order) = self.connect().await?;
                self.refuse_lost(about)?;
                drop(order);
                let (answer, problem) = connection.receive_file(owner, op, &mut sink).await;
                if let Some(error) = problem {
                    return Err(transfer(&error));
                }
                (connection, answer, None)
            }
        };
        let reply = self.interpret(about, answer);
        match problem {
            // The sessions know only that the rest of the file did not arrive.
            Some(error) if !connection.is_closed() => Err(transfer(&error)),
            _ => reply,
        }
    }

    fn refuse_lost(&self, about: About<'_>) -> Result<(), Refused> {
        match about {
            Some((owner, id)) if self.shared.known_sessions().is_lost(owner, id) => {
                Err(self.lost(id))
            }
            _ => Ok(()),
        }
    }

    /// Converts the result of a call into its reply.
    fn interpret(
        &self,
        about: About<'_>,
        answer: Result<ReplyResult, RpcError>,
    ) -> Result<Reply, Refused> {
        match answer {
            Ok(answer) => answer,
            Err(RpcError::Unresponsive { sent }) => Err(Refused::Unresponsive { sent }),
            Err(RpcError::TooLarge) => Err(Refused::Transfer {
                why: "the request is too large".to_owned(),
            }),
            Err(RpcError::InvalidReply) => Err(Refused::Transfer {
                why: "the reply could not be decoded".to_owned(),
            }),
            Err(RpcError::NotSent | RpcError::Disconnected) => Err(match about {
                Some((owner, id)) => {
                    self.shared.known_sessions().mark_lost(owner, id);
                    self.lost(id)
                }
                None => daemon_unavailable("the session daemon ended, and its sessions are lost"),
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
        let why = format!("the session daemon ended, and {what}");
        Refused::Ended {
            id: id.clone(),
            why,
            undo: false,
        }
    }

    /// Forgets sessions of an owner that ended without notice, when many are remembered.
    async fn check_known_sessions(&self, owner: &Principal) {
        let Some(listed_at) = self.shared.known_sessions().needs_check(owner) else {
            return;
        };
        // If the list fails, a later call asks again.
        let list = Op::from(ops::ListSessions {});
        if let Ok(Reply::ListSessions(all)) = self.call(owner, None, &list, Io::default()).await {
            self.shared.known_sessions().check(
                owner,
                &all.iter().map(|info| &info.id).collect(),
                listed_at,
            );
        }
    }

    /// Returns the session of an operation, as far as it is known here.
    fn session_of(&self, owner: &Principal, op: &Op) -> Option<SessionId> {
        match op.subject() {
            OpSubject::Session(id) | OpSubject::Execution(ExecutionRef::InSession(id)) => {
                Some(id.clone())
            }
            OpSubject::Handle(handle) | OpSubject::Execution(ExecutionRef::Handle(handle)) => {
                self.shared.known_sessions().session_of(owner, handle)
            }
            OpSubject::Other => None,
        }
    }

    async fn carry_out(&self, owner: &Principal, op: Op, io: Io<'_>) -> Result<Reply, Refused> {
        if let Some(reply) = self.clear_lost_session(owner, &op).await? {
            return Ok(reply);
        }
        let session = self.session_of(owner, &op);
        let mut reply = self.call(owner, session.as_ref(), &op, io).await?;
        self.note_reply(owner, session.as_ref(), &mut reply);
        if let Reply::Execute(_) = reply {
            self.check_known_sessions(owner).await;
        }
        Ok(reply)
    }

    /// Resets or closes a session that was lost with its daemon. The present daemon is not asked.
    async fn clear_lost_session(
        &self,
        owner: &Principal,
        op: &Op,
    ) -> Result<Option<Reply>, Refused> {
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
        drop(self.connect().await?);
        Ok(self
            .shared
            .known_sessions()
            .clear_lost(owner, session)
            .then_some(reply))
    }

    /// Remembers the sessions whose existence a reply proves. Adds the lost ones to a list.
    fn note_reply(&self, owner: &Principal, session: Option<&SessionId>, reply: &mut Reply) {
        let mut known = self.shared.known_sessions();
        match (&mut *reply, session) {
            // A reset succeeds without a session, and so does a part of an upload.
            (Reply::Reset(_), _) => {}
            (Reply::Upload(uploaded), _) if !uploaded.finished => {}
            (Reply::CloseSession(()), Some(id)) => known.remove(owner, id),
            (_, Some(id)) => known.add(owner, id),
            (_, None) => {}
        }
        match reply {
            Reply::Execute(ExecutionReport::Underway(underway)) => {
                known.add_execution(owner, &underway.handle, &underway.session);
            }
            Reply::Fork(report) => {
                report.forks.iter().for_each(|fork| known.add(owner, fork));
            }
            Reply::Explore(report) => {
                let kept = report.kept.iter();
                kept.for_each(|(_, session)| known.add(owner, session));
            }
            Reply::ListSessions(all) => {
                let lost = known.lost_sessions(owner);
                all.iter().for_each(|info| known.add(owner, &info.id));
                all.extend(
                    lost.into_iter()
                        .map(|id| lost_info(id, "the session daemon ended")),
                );
                all.sort_by(|one, other| one.id.cmp(&other.id));
            }
            _ => {}
        }
    }
}

/// Returns the time within which a working daemon replies to an operation, if that is bounded.
fn reply_timeout(op: &Op) -> Option<Duration> {
    match op {
        Op::Execute(op) => op.wait,
        Op::Check(op) => Some(op.wait),
        _ => None,
    }
}

impl Shared {
    fn settings(&self) -> Arc<DaemonSettings> {
        Arc::clone(
            &self
                .settings
                .lock()
                .expect("nothing panics while it holds the settings"),
        )
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<DaemonConnection>>> {
        self.connection
            .lock()
            .expect("nothing panics while it holds the connection")
    }

    fn open_connection(&self) -> Option<Arc<DaemonConnection>> {
        self.current()
            .as_ref()
            .filter(|connection| !connection.is_closed())
            .map(Arc::clone)
    }

    fn use_connection(&self, connection: Arc<DaemonConnection>) {
        *self.current() = Some(Arc::clone(&connection));
        let recording = self
            .subscribers
            .recording
            .lock()
            .expect("nothing panics while it holds the recorder")
            .clone();
        if let Some(Recording { takes_over, .. }) = recording {
            connection.record_endings(takes_over);
        }
    }

    fn known_sessions(&self) -> MutexGuard<'_, KnownSessions> {
        self.known_sessions
            .lock()
            .expect("nothing panics while it holds the known sessions")
    }

    /// Remembers which daemon this is and which sessions it has. If it is not the previous one, the
    /// previous sessions are lost.
    fn note_welcome(&self, welcome: &Welcome, state: &mut ConnectState) {
        let mut known = self.known_sessions();
        if state.instance != welcome.instance {
            known.mark_all_lost();
        }
        for resident in &welcome.residents {
            known.add(&resident.owner, &resident.id);
        }
        *state = ConnectState {
            instance: welcome.instance.clone(),
            ..ConnectState::default()
        };
    }
}

fn daemon_unavailable(why: &str) -> Refused {
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

impl Host for DaemonClient {
    fn submit<'a>(&self, owner: &Principal, op: Op, io: Io<'a>) -> Result<Ticket<'a>, Refused> {
        let (client, owner) = (self.clone(), owner.clone());
        Ticket::admit(async move { client.carry_out(&owner, op, io).await })
    }

    fn preparation(&self) -> watch::Receiver<Preparation> {
        self.shared.subscribers.preparation.subscribe()
    }

    fn record_endings(&self, takes_over: bool, record: RecordEnding) {
        let recording = &self.shared.subscribers.recording;
        *recording
            .lock()
            .expect("nothing panics while it holds the recorder") =
            Some(Recording { takes_over, record });
        if let Some(connection) = self.shared.open_connection() {
            connection.record_endings(takes_over);
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
        let mut state = ConnectState::default();
        assert!(!state.backs_off(now));
        let mut waits = Vec::new();
        for _ in 0..40 {
            state.failed(now);
            let wait = state.backoff_until.unwrap() - now;
            assert!(state.backs_off(now) && !state.backs_off(now + wait));
            waits.push(wait);
        }
        assert_eq!(
            waits[..3],
            [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
        );
        assert_eq!(waits[39], MAX_BACKOFF);
    }
}
