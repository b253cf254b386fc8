//! The way to sessions that another process keeps.
//!
//! It looks like the sessions themselves. When the keeper has died, the next call starts another one; calls for the sessions that are lost are refused by name until somebody
//! resets or closes them, as for any session that ended.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::link::{Link, Listeners, NoAnswer, Recording, Wishes};
use super::message::{Answer, Call, Welcome};
use super::seen::Seen;
use super::start::{self, AttachError};
use super::{KeeperSettings, post::KeeperName};
use crate::sandbox::{LaunchError, Preparation, Rules};
use crate::session::install::{InstallReport, Leave};
use crate::session::servers::{ServerReport, ServerRequest, ServerSetup};
use crate::session::{
    ApprovalSetup, Checked, CheckpointInfo, Decided, Decision, ExecuteRequest, Executed,
    ExecutionHandle, ExecutionId, ExploreReport, ExploreRequest, FileList, FileRange, ForkReport,
    ForkRequest, InsidePath, LimitSetup, Load, News, Principal, RecordEnding, Refused, ResetReport,
    SessionAccess, SessionId, SessionInfo, Slice, UndoReport, UploadPart, Uploaded, Which, Word,
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

    async fn ask<T: DeserializeOwned>(
        &self,
        about: About<'_>,
        call: Call,
        wishes: Wishes,
    ) -> Result<T, Refused> {
        loop {
            let (link, order) = self.link().await?;
            self.refuse_lost(about)?;
            let asked = link.ask(&call, wishes.news.clone());
            drop(order);
            match asked {
                // The keeper was gone already, and nothing has happened. The next turn finds another one, or fails.
                Err(NoAnswer::NotSent) => continue,
                Err(other) => return self.heard(about, Err(other)),
                Ok(asked) => {
                    let answer =
                        self.heard(about, asked.answered(wishes.cancel, wishes.wait).await);
                    return match about {
                        Some((owner, id)) if !wishes.proves_nothing => {
                            self.noted(owner, id, answer)
                        }
                        _ => answer,
                    };
                }
            }
        }
    }

    async fn ask_plainly<T: DeserializeOwned>(
        &self,
        about: About<'_>,
        call: Call,
    ) -> Result<T, Refused> {
        self.ask(about, call, Wishes::default()).await
    }

    fn refuse_lost(&self, about: About<'_>) -> Result<(), Refused> {
        match about {
            Some((owner, id)) if self.shared.seen().is_lost(owner, id) => Err(self.lost(id)),
            _ => Ok(()),
        }
    }

    /// Turns what came back into the answer of a call.
    fn heard<T>(
        &self,
        about: About<'_>,
        answer: Result<Answer<T>, NoAnswer>,
    ) -> Result<T, Refused> {
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

    /// Remembers that a session exists, if what was asked of it succeeded.
    fn noted<T>(
        &self,
        owner: &Principal,
        id: &SessionId,
        answer: Result<T, Refused>,
    ) -> Result<T, Refused> {
        if answer.is_ok() {
            self.shared.seen().note(owner, id);
        }
        answer
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
        let call = Call::List {
            owner: owner.clone(),
        };
        // What is not known now is found out after a later call.
        if let Ok(all) = self.ask_plainly::<Vec<SessionInfo>>(None, call).await {
            self.shared
                .seen()
                .check(owner, &all.iter().map(|info| &info.id).collect(), asked);
        }
    }

    /// Which session an execution belongs to, if that is known here.
    fn session_of(&self, owner: &Principal, which: &Which) -> Option<SessionId> {
        match which {
            Which::Of(id) => Some(id.clone()),
            Which::This(handle) => self.shared.seen().session_of(owner, handle),
        }
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

    /// Notes which keeper this is and whose sessions it has. Another one than before means that those are lost.
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

#[async_trait]
impl SessionAccess for Client {
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

    async fn execute(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        cancel: CancellationToken,
        news: News,
    ) -> Result<Executed, Refused> {
        let call = Call::Execute {
            owner: owner.clone(),
            id: id.clone(),
            request,
            wait,
        };
        let wishes = Wishes {
            news: Some(news),
            cancel: Some(cancel),
            wait,
            ..Wishes::default()
        };
        let executed = self.ask(Some((owner, id)), call, wishes).await?;
        if let Executed::Underway(underway) = &executed {
            self.shared
                .seen()
                .note_execution(owner, &underway.handle, &underway.session);
        }
        self.check_seen(owner).await;
        Ok(executed)
    }

    async fn check(
        &self,
        owner: &Principal,
        which: &Which,
        wait: Duration,
        max_chars: usize,
        news: News,
    ) -> Result<Checked, Refused> {
        let call = Call::Check {
            owner: owner.clone(),
            which: which.clone(),
            wait,
            max_chars,
        };
        let session = self.session_of(owner, which);
        let about = session.as_ref().map(|id| (owner, id));
        self.ask(
            about,
            call,
            Wishes {
                news: Some(news),
                wait: Some(wait),
                ..Wishes::default()
            },
        )
        .await
    }

    async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
        _how: Word,
    ) -> Result<Decided, Refused> {
        let session = self.session_of(owner, &Which::This(handle.clone()));
        let about = session.as_ref().map(|id| (owner, id));
        self.ask_plainly(
            about,
            Call::Decide {
                owner: owner.clone(),
                handle: handle.clone(),
                decisions,
            },
        )
        .await
    }

    async fn stop(&self, owner: &Principal, which: &Which) -> Result<(), Refused> {
        let session = self.session_of(owner, which);
        let about = session.as_ref().map(|id| (owner, id));
        self.ask_plainly(
            about,
            Call::Stop {
                owner: owner.clone(),
                which: which.clone(),
            },
        )
        .await
    }

    async fn reset(&self, owner: &Principal, id: &SessionId) -> Result<ResetReport, Refused> {
        drop(self.link().await?);
        if self.shared.seen().forgive(owner, id) {
            let files_kept = self.shared.settings().files_outlive_sessions;
            return Ok(ResetReport {
                interrupted_running_cell: false,
                files_kept,
                had_no_session: true,
            });
        }
        let call = Call::Reset {
            owner: owner.clone(),
            id: id.clone(),
        };
        self.ask(
            Some((owner, id)),
            call,
            Wishes {
                proves_nothing: true,
                ..Wishes::default()
            },
        )
        .await
    }

    async fn undo(
        &self,
        owner: &Principal,
        id: &SessionId,
        cells: u32,
    ) -> Result<UndoReport, Refused> {
        self.ask_plainly(
            Some((owner, id)),
            Call::Undo {
                owner: owner.clone(),
                id: id.clone(),
                cells,
            },
        )
        .await
    }

    async fn checkpoints(
        &self,
        owner: &Principal,
        id: &SessionId,
    ) -> Result<Vec<CheckpointInfo>, Refused> {
        self.ask_plainly(
            Some((owner, id)),
            Call::Checkpoints {
                owner: owner.clone(),
                id: id.clone(),
            },
        )
        .await
    }

    async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ForkRequest,
    ) -> Result<ForkReport, Refused> {
        let call = Call::Fork {
            owner: owner.clone(),
            id: id.clone(),
            request,
        };
        let report: ForkReport = self.ask_plainly(Some((owner, id)), call).await?;
        let mut seen = self.shared.seen();
        report.forks.iter().for_each(|fork| seen.note(owner, fork));
        drop(seen);
        Ok(report)
    }

    async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        news: News,
    ) -> Result<ExploreReport, Refused> {
        let call = Call::Explore {
            owner: owner.clone(),
            id: id.clone(),
            request,
        };
        let wishes = Wishes {
            news: Some(news),
            cancel: Some(cancel),
            ..Wishes::default()
        };
        let report: ExploreReport = self.ask(Some((owner, id)), call, wishes).await?;
        let mut seen = self.shared.seen();
        report
            .kept
            .iter()
            .for_each(|(_, session)| seen.note(owner, session));
        drop(seen);
        Ok(report)
    }

    async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        leave: Leave,
        cancel: CancellationToken,
        news: News,
    ) -> Result<InstallReport, Refused> {
        let call = Call::Install {
            owner: owner.clone(),
            id: id.clone(),
            requirements,
            leave,
        };
        self.ask(
            Some((owner, id)),
            call,
            Wishes {
                news: Some(news),
                cancel: Some(cancel),
                ..Wishes::default()
            },
        )
        .await
    }

    async fn register_server(
        &self,
        owner: &Principal,
        request: ServerRequest,
    ) -> Result<ServerReport, Refused> {
        self.ask_plainly(
            None,
            Call::RegisterServer {
                owner: owner.clone(),
                request,
            },
        )
        .await
    }

    async fn set_up_servers(&self, setup: ServerSetup) -> Result<(), Refused> {
        self.ask_plainly(None, Call::SetUpServers { setup }).await
    }

    async fn set_up_approvals(&self, setup: ApprovalSetup) -> Result<(), Refused> {
        self.ask_plainly(None, Call::SetUpApprovals { setup }).await
    }

    async fn set_up_limits(&self, setup: LimitSetup) -> Result<(), Refused> {
        self.ask_plainly(None, Call::SetUpLimits { setup }).await
    }

    async fn unregister_server(&self, owner: &Principal, name: &str) -> Result<(), Refused> {
        let call = Call::UnregisterServer {
            owner: owner.clone(),
            name: name.to_owned(),
        };
        self.ask_plainly(None, call).await
    }

    async fn servers(&self, owner: &Principal) -> Result<Vec<ServerReport>, Refused> {
        self.ask_plainly(
            None,
            Call::Servers {
                owner: owner.clone(),
            },
        )
        .await
    }

    async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let (link, _) = self.link().await?;
        self.refuse_lost(Some((owner, id)))?;
        let call = Call::WriteFile {
            owner: owner.clone(),
            id: id.clone(),
            path: path.clone(),
            overwrite,
        };
        let (answer, trouble) = link.send_file(&call, source).await;
        let answer = self.noted(owner, id, self.heard(Some((owner, id)), answer));
        match trouble {
            // The sessions know only that the rest did not come.
            Some(error) if !link.is_closed() => Err(transfer(&error)),
            _ => answer,
        }
    }

    async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        let (link, _) = self.link().await?;
        self.refuse_lost(Some((owner, id)))?;
        let call = Call::ReadFile {
            owner: owner.clone(),
            id: id.clone(),
            path: path.clone(),
            limit,
        };
        match link.receive_file(&call, sink).await {
            (_, Some(error)) => Err(transfer(&error)),
            (answer, None) => self.noted(owner, id, self.heard(Some((owner, id)), answer)),
        }
    }

    async fn read_file_range(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        offset: u64,
        length: Option<u64>,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<FileRange, Refused> {
        let (link, _) = self.link().await?;
        self.refuse_lost(Some((owner, id)))?;
        let call = Call::ReadFileRange {
            owner: owner.clone(),
            id: id.clone(),
            path: path.clone(),
            offset,
            length,
        };
        match link.receive_file(&call, sink).await {
            (_, Some(error)) => Err(transfer(&error)),
            (answer, None) => self.noted(owner, id, self.heard(Some((owner, id)), answer)),
        }
    }

    async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused> {
        self.ask_plainly(
            Some((owner, id)),
            Call::ListFiles {
                owner: owner.clone(),
                id: id.clone(),
            },
        )
        .await
    }

    async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused> {
        let (link, _) = self.link().await?;
        self.refuse_lost(Some((owner, id)))?;
        let call = Call::Upload {
            owner: owner.clone(),
            id: id.clone(),
            path: path.clone(),
            part,
        };
        let (answer, trouble) = link.send_file(&call, source).await;
        // The session need not exist before the file is complete.
        let finished = matches!(answer, Ok(Ok(Uploaded { finished: true, .. })));
        let answer = self.heard(Some((owner, id)), answer);
        if finished {
            self.shared.seen().note(owner, id);
        }
        match trouble {
            Some(error) if !link.is_closed() => Err(transfer(&error)),
            _ => answer,
        }
    }

    async fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        let call = Call::Uploaded {
            owner: owner.clone(),
            id: id.clone(),
            path: path.clone(),
        };
        // About nothing: the session need not exist.
        self.ask_plainly::<Option<u64>>(None, call)
            .await
            .ok()
            .flatten()
    }

    async fn load(&self) -> Load {
        self.ask_plainly(None, Call::Load).await.unwrap_or_default()
    }

    async fn list(&self, owner: &Principal) -> Result<Vec<SessionInfo>, Refused> {
        let mut all: Vec<SessionInfo> = self
            .ask_plainly(
                None,
                Call::List {
                    owner: owner.clone(),
                },
            )
            .await?;
        let lost = self.shared.seen().lost_by(owner);
        for info in &all {
            self.shared.seen().note(owner, &info.id);
        }
        all.extend(
            lost.into_iter()
                .map(|id| lost_info(id, "the process that kept the sessions ended")),
        );
        all.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(all)
    }

    async fn close(&self, owner: &Principal, id: &SessionId) -> Result<(), Refused> {
        drop(self.link().await?);
        if self.shared.seen().forgive(owner, id) {
            return Ok(());
        }
        self.ask_plainly::<()>(
            Some((owner, id)),
            Call::Close {
                owner: owner.clone(),
                id: id.clone(),
            },
        )
        .await?;
        self.shared.seen().forget(owner, id);
        Ok(())
    }

    async fn output_size(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
    ) -> Option<u64> {
        let call = Call::OutputSize {
            owner: owner.clone(),
            id: id.clone(),
            execution,
        };
        // About nothing: a session that has no output need not exist.
        self.ask_plainly::<Option<u64>>(None, call)
            .await
            .ok()
            .flatten()
    }

    async fn read_output(
        &self,
        owner: &Principal,
        id: &SessionId,
        execution: ExecutionId,
        offset: u64,
        length: usize,
    ) -> Option<io::Result<Slice>> {
        let call = Call::ReadOutput {
            owner: owner.clone(),
            id: id.clone(),
            execution,
            offset,
            length,
        };
        let read: Option<Result<Slice, String>> = self.ask_plainly(None, call).await.ok().flatten();
        read.map(|read| read.map_err(io::Error::other))
    }
}

fn lost_info(id: SessionId, why: &str) -> SessionInfo {
    SessionInfo {
        id,
        state: "ended",
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
