//! Calls of tools: each is carried out against the sessions, and what came of it is rendered.
//!
//! A caller waits for code at most as long as the operator allows. What takes longer goes on, and
//! `check_execution`, or a task for clients that know tasks, tells how. A cancelled call is
//! interrupted; one whose answer nobody waits for any more is not.

use std::error::Error;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{CallToolResponse, CallToolResult, ProgressNotificationParam};
use rmcp::service::RequestContext;
use tokio::io::AsyncWriteExt;

use super::arguments::{Call, Source, Target};
use super::asking::Way;
use super::desk::{Job, Kind, Place};
use super::host_files::{Capped, HostFileError, HostFiles, Overwrite};
use super::missing_modules::{self, missing_module};
use super::progress::Reporter;
use super::render::Occasion;
use super::resuming::{Manner, Question, installed_or_asked};
use super::{Front, Server, Shared, compare, render, servers, tasks};
use crate::ops::{self, HostExt, Io};
use crate::session::install::{InstallReport, Leave};
use crate::session::servers::ServerRequest;
use crate::session::{
    Checked, Decision, ExecuteRequest, Executed, ExploreRequest, InsidePath, News, Outcome,
    Principal, RecorderId, Refused, SessionId, Which,
};

/// Calls of one owner carried out at once. Each may hold an output in memory; a client with more
/// than this under way has lost count.
pub(super) const MOST_CALLS: usize = 256;

/// How long an installation takes at most, as far as its progress is told.
const INSTALL_TIME: Duration = Duration::from_secs(300);

/// The largest file that a result holds. A model reads less, and larger files have a route of their
/// own.
pub(super) const LARGEST_INLINE: u64 = 1024 * 1024;

/// Why a call was given up by this room.
#[derive(Debug, thiserror::Error)]
pub(super) enum GivenUp {
    #[error(
        "{MOST_CALLS} of your calls are being carried out. Nothing was executed. Try again when \
         one of them has been answered"
    )]
    Busy,
    #[error("the call was cancelled; what it had begun may have taken effect")]
    Cancelled,
    #[error(
        "work that was begun earlier in `{0}` is still under way, and this took too long to wait \
         for it. It was interrupted; see `check_execution`"
    )]
    DeskTaken(SessionId),
}

/// Somebody else closed it, it ended, or it never was.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no session `{0}`, so there was nothing to close. `list_sessions` shows the existing \
     ones"
)]
struct NothingToClose(SessionId);

/// A copy between host and sandbox that failed outside the session.
#[derive(Debug, thiserror::Error)]
#[error("the file could not be written completely, and what was written has been removed")]
struct WriteFailed(#[source] std::io::Error);

impl Server {
    /// Carries out one call of a tool of the default profile.
    pub(super) async fn carry_out(
        &self,
        owner: &Principal,
        call: Call,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let _place = match self.place(owner) {
            Ok(place) => place,
            Err(busy) => return render::refused(&busy).into(),
        };
        match call {
            // Execution listens for cancellation itself, because it has an outcome to tell.
            Call::Execute {
                session,
                code,
                timeout,
                max_output_chars,
                rules,
            } => {
                let asking = Way::of(context).asking();
                let request = ExecuteRequest {
                    code,
                    timeout,
                    max_output_chars,
                    asking,
                    rules,
                    recorder: RecorderId::default(),
                };
                self.execute(owner, &session, request, context).await
            }
            Call::Check {
                session,
                wait,
                interrupt,
            } => self.check(owner, &session, wait, interrupt, context).await,
            Call::Install {
                session,
                requirements,
            } => {
                self.install(owner, session, requirements, None, context)
                    .await
            }
            other => self.carry_out_short(owner, other, context).await.into(),
        }
    }

    /// Carries out whatever never becomes a task and never asks anybody.
    async fn carry_out_short(
        &self,
        owner: &Principal,
        call: Call,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let sessions = &self.shared.sessions;
        match call {
            Call::Execute { .. } | Call::Check { .. } | Call::Install { .. } => {
                unreachable!("it is carried out above")
            }
            Call::Reset { session } => {
                let reset = or_cancelled(
                    context,
                    sessions.run(
                        owner,
                        ops::Reset {
                            session: session.clone(),
                        },
                    ),
                );
                match tokio::time::timeout(self.shared.max_wait, reset).await {
                    Ok(done) => answer(done, |report| {
                        render::reset(&session, &report, &sessions.preparation().borrow())
                    }),
                    // The session itself goes on with it.
                    Err(_) => render::resetting(&session, self.being_prepared()),
                }
            }
            Call::Undo { session, cells } => {
                let done = or_cancelled(
                    context,
                    sessions.run(
                        owner,
                        ops::Undo {
                            session: session.clone(),
                            cells,
                        },
                    ),
                )
                .await;
                answer(done, |report| render::undone(&session, &report))
            }
            Call::Checkpoints { session } => match sessions
                .run(
                    owner,
                    ops::ListCheckpoints {
                        session: session.clone(),
                    },
                )
                .await
            {
                Ok(checkpoints) => render::checkpoints(&session, &checkpoints),
                Err(refused) => render::refused(&refused),
            },
            Call::Fork { session, request } => {
                let done = or_cancelled(
                    context,
                    sessions.run(
                        owner,
                        ops::Fork {
                            session: session.clone(),
                            request,
                        },
                    ),
                )
                .await;
                answer(done, |report| render::forked(&session, &report))
            }
            Call::Explore {
                session,
                variants,
                timeout,
                keep,
                replace,
            } => {
                let max_output_chars = self.shared.most_compared_chars;
                let request = ExploreRequest {
                    variants,
                    timeout,
                    max_output_chars,
                    keep,
                    replace,
                    recorder: RecorderId::default(),
                };
                self.explore(owner, session, request, context).await
            }
            Call::Upload {
                session,
                relpath,
                source,
                overwrite,
            } => {
                let done = or_cancelled(
                    context,
                    self.upload(owner, &session, &relpath, source, overwrite),
                )
                .await;
                answer(done, |bytes| {
                    render::transfer(&session, relpath.as_str(), bytes, render::Direction::In)
                })
            }
            Call::Download {
                session,
                relpath,
                target: Target::Local { path, overwrite },
            } => {
                let overwrite = if overwrite {
                    Overwrite::Allowed
                } else {
                    Overwrite::Refused
                };
                let done = or_cancelled(
                    context,
                    self.download(owner, &session, &relpath, path.clone(), overwrite),
                )
                .await;
                let direction = render::Direction::Out { local_path: &path };
                answer(done, |bytes| {
                    render::transfer(&session, relpath.as_str(), bytes, direction)
                })
            }
            Call::Download {
                session,
                relpath,
                target: Target::Inline,
            } => {
                let mut bytes = Vec::new();
                let read = sessions.run_with(
                    owner,
                    ops::ReadFile {
                        session: session.clone(),
                        path: relpath.clone(),
                        limit: LARGEST_INLINE,
                    },
                    Io::sink(&mut bytes),
                );
                let done = or_cancelled(context, read).await;
                answer(done, |_| render::inline_file(&session, &relpath, &bytes))
            }
            Call::List => match sessions.run(owner, ops::ListSessions {}).await {
                Ok(list) => render::sessions(&list),
                Err(refused) => render::refused(&refused),
            },
            Call::Close { session } => {
                let closing = async {
                    sessions
                        .run(
                            owner,
                            ops::CloseSession {
                                session: session.clone(),
                            },
                        )
                        .await
                        .map_err(|refused| match refused {
                            Refused::Unknown { id } => NothingToClose(id).into(),
                            other => Box::<dyn Error + Send + Sync>::from(other),
                        })
                };
                let done = or_cancelled(context, closing).await;
                answer(done, |()| render::closed(&session, self.shared.work_folder))
            }
            Call::Register { name, params } => {
                let request = ServerRequest {
                    name,
                    params,
                    trust: self.shared.front.trust(),
                };
                let done = or_cancelled(
                    context,
                    sessions.run(owner, ops::RegisterServer { server: request }),
                )
                .await;
                answer(done, |server| servers::registered(&server))
            }
            Call::Servers => match sessions.run(owner, ops::ListServers {}).await {
                Ok(list) => servers::listed(&list),
                Err(refused) => render::refused(&refused),
            },
            Call::Unregister { name } => {
                let done = or_cancelled(
                    context,
                    sessions.run(owner, ops::UnregisterServer { name: name.clone() }),
                )
                .await;
                answer(done, |()| servers::unregistered(&name))
            }
        }
    }

    /// Names the session in the answer to a call that named none, where each such call makes one.
    pub(super) async fn naming(
        &self,
        owner: &Principal,
        session: &SessionId,
        response: CallToolResponse,
    ) -> CallToolResponse {
        let result = match (self.shared.front, response) {
            (Front::Http, CallToolResponse::Complete(result)) => result,
            (_, response) => return response,
        };
        // A refused call may have made its session before, or not.
        let exists = match &result.structured_content {
            Some(_) => true,
            None => {
                let sessions = self
                    .shared
                    .sessions
                    .run(owner, ops::ListSessions {})
                    .await
                    .unwrap_or_default();
                sessions.iter().any(|known| known.id == *session)
            }
        };
        if exists {
            render::naming(session, result).into()
        } else {
            result.into()
        }
    }

    async fn execute(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExecuteRequest,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let max_wait = self.shared.max_wait;
        let knows_tasks = tasks::are_known_to(context);
        let wait = if knows_tasks {
            tasks::PATIENCE.min(max_wait)
        } else {
            max_wait
        };
        let max_chars = request.max_output_chars;
        let told = self
            .begin(owner, session, request, Some(wait), context)
            .await
            .map(|executed| match executed {
                Executed::Finished(outcome) => Checked::Finished {
                    session: session.clone(),
                    outcome,
                    again: false,
                },
                Executed::Underway(underway) => Checked::Underway(underway),
            });
        let manner = Manner {
            wait,
            max_chars,
            as_task: knows_tasks,
            is_check: false,
        };
        self.answer_or_ask(owner, session, told, manner, context)
            .await
    }

    /// Runs code until it has finished, the caller's patience has ended or the server is about to.
    async fn begin(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        context: &RequestContext<RoleServer>,
    ) -> Result<Executed, Refused> {
        let Shared {
            sessions, draining, ..
        } = &*self.shared;
        let (news, max_chars) = (News::default(), request.max_output_chars);
        let reporter = Reporter::new(sessions.preparation(), request.timeout, &news);
        let execution = sessions.run_with(
            owner,
            ops::Execute {
                session: session.clone(),
                request,
                wait,
            },
            Io {
                cancel: context.ct.clone(),
                progress: news,
                ..Io::default()
            },
        );
        tokio::select! {
            // First: the end of the connection, which follows, would interrupt the code.
            biased;
            // The code goes on; whoever asks the next server hears how.
            () = draining.cancelled() => {
                self.may_promise()?;
                self.look(owner, session, max_chars).await.ok_or(Refused::ShuttingDown)
            }
            executed = with_progress(execution, reporter, context) => executed,
        }
    }

    /// Runs code to its end. For tools whose callers have no way to ask later.
    pub(super) async fn run_to_end(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExecuteRequest,
        context: &RequestContext<RoleServer>,
    ) -> Result<Outcome, Refused> {
        let manner = Manner {
            wait: Duration::MAX,
            max_chars: request.max_output_chars,
            as_task: false,
            is_check: false,
        };
        let told = match self.begin(owner, session, request, None, context).await? {
            Executed::Finished(outcome) => return Ok(*outcome),
            Executed::Underway(underway) => Ok(Checked::Underway(underway)),
        };
        match self.ask_meanwhile(owner, told, manner, context).await? {
            Checked::Finished { outcome, .. } => Ok(*outcome),
            Checked::Underway(_) | Checked::Nothing => Err(Refused::ShuttingDown),
        }
    }

    /// Installs packages and waits for the end of it.
    pub(super) async fn install_to_end(
        &self,
        owner: &Principal,
        session: &SessionId,
        requirements: Vec<String>,
        context: &RequestContext<RoleServer>,
    ) -> Result<InstallReport, Refused> {
        let sessions = &self.shared.sessions;
        let mut leave = Leave {
            asking: Way::of(context).asking_meanwhile(),
            answer: None,
        };
        loop {
            let news = News::default();
            let reporter = Reporter::new(sessions.preparation(), INSTALL_TIME, &news);
            let work = sessions.run_with(
                owner,
                ops::Install {
                    session: session.clone(),
                    requirements: requirements.clone(),
                    leave,
                },
                Io {
                    cancel: context.ct.clone(),
                    progress: news,
                    ..Io::default()
                },
            );
            let asked = match with_progress(work, reporter, context).await {
                Err(Refused::Ask { asked, .. }) => asked,
                done => return done,
            };
            leave = match self
                .ask_to_install(session, &requirements, *asked, context)
                .await
            {
                Ok(leave) => leave,
                Err(_) => return Err(Refused::CancelledWhileWaiting),
            };
        }
    }

    /// Says that Python is being prepared, if it is.
    fn being_prepared(&self) -> Option<String> {
        let step = self.shared.sessions.preparation().borrow().step_text();
        step.map(|step| format!("Python is being prepared: {step}"))
    }

    /// Says what a piece of work is at.
    fn at_work(&self, session: &SessionId, job: &Job) -> CallToolResult {
        let news = self
            .being_prepared()
            .unwrap_or_else(|| job.news.borrow().clone());
        render::at_work(session, job.begun.elapsed(), &news)
    }

    /// Takes a place among the calls of an owner, until it is dropped.
    pub(super) fn place(&self, owner: &Principal) -> Result<Place, GivenUp> {
        self.shared.calls.take(owner).ok_or(GivenUp::Busy)
    }

    /// Reports how an execution goes on, without waiting for it.
    pub(super) async fn check_now(
        &self,
        owner: &Principal,
        execution: Which,
        max_chars: usize,
    ) -> Result<Checked, Refused> {
        let check = ops::Check {
            execution,
            wait: Duration::ZERO,
            max_chars,
        };
        self.shared.sessions.run(owner, check).await
    }

    /// Looks at what a session runs, without waiting.
    async fn look(
        &self,
        owner: &Principal,
        session: &SessionId,
        max_chars: usize,
    ) -> Option<Executed> {
        let which = Which::Of(session.clone());
        match self.check_now(owner, which.clone(), max_chars).await {
            Ok(Checked::Underway(underway)) => Some(Executed::Underway(underway)),
            Ok(Checked::Finished { outcome, .. }) => Some(Executed::Finished(outcome)),
            Ok(Checked::Nothing) | Err(_) => None,
        }
    }

    /// Renders an outcome and remembers where the whole of a cut output can be read.
    pub(super) async fn told(
        &self,
        owner: &Principal,
        session: &SessionId,
        outcome: &Outcome,
        occasion: Occasion,
    ) -> CallToolResult {
        if outcome.output.cut_chars > 0 {
            let mut outputs = self
                .shared
                .cut_outputs
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            outputs.remember(owner, session, outcome.execution);
        }
        let mut result = render::execution(session, outcome, occasion);
        if let Some(hint) = self.import_hint(owner, session, outcome).await {
            result = render::with_line(result, &hint);
        }
        if let Some(kind) = self.shared.desk.ended(owner, session) {
            result = render::with_line(result, &render::work_has_ended(kind, session));
        }
        result
    }

    /// Says which package has the module that code did not find, where packages can be installed,
    /// or that an installation has not ended.
    async fn import_hint(
        &self,
        owner: &Principal,
        session: &SessionId,
        outcome: &Outcome,
    ) -> Option<String> {
        let Shared {
            sessions,
            can_install,
            desk,
            ..
        } = &*self.shared;
        let module = missing_module(&outcome.status).filter(|_| *can_install)?;
        if desk.underway(owner, session) == Some(Kind::Installation) {
            return Some(missing_modules::wait(module, session));
        }
        let distribution = missing_modules::distribution(module)?;
        // A session that is busy again has no list of files.
        let own = sessions
            .run(
                owner,
                ops::ListFiles {
                    session: session.clone(),
                },
            )
            .await
            .map(|list| missing_modules::is_among(module, &list.files));
        (!own.unwrap_or(false)).then(|| missing_modules::hint(module, distribution))
    }

    async fn check(
        &self,
        owner: &Principal,
        session: &SessionId,
        wait: Duration,
        interrupt: bool,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let Shared {
            sessions,
            desk,
            most_compared_chars,
            ..
        } = &*self.shared;
        if let Some(mut job) = desk.get(owner, session) {
            if interrupt {
                job.cancel.cancel();
            }
            return match job.result(wait).await {
                Some(result) => {
                    desk.clear(owner, session);
                    result.into()
                }
                None => self.at_work(session, &job).into(),
            };
        }
        let which = Which::Of(session.clone());
        if interrupt
            && let Err(refused) = sessions
                .run(
                    owner,
                    ops::Interrupt {
                        execution: which.clone(),
                    },
                )
                .await
        {
            return render::refused(&refused).into();
        }
        let news = News::default();
        let reporter = Reporter::new(sessions.preparation(), wait, &news);
        let checking = sessions.run_with(
            owner,
            ops::Check {
                execution: which.clone(),
                wait,
                max_chars: *most_compared_chars,
            },
            Io {
                progress: news,
                ..Io::default()
            },
        );
        let told = with_progress(checking, reporter, context).await;
        let manner = Manner {
            wait,
            max_chars: *most_compared_chars,
            as_task: false,
            is_check: true,
        };
        self.answer_or_ask(owner, session, told, manner, context)
            .await
    }

    /// Installs packages. `answer` is a person's, when they were asked before.
    pub(super) async fn install(
        &self,
        owner: &Principal,
        session: SessionId,
        requirements: Vec<String>,
        answer: Option<Decision>,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let mut leave = Leave {
            asking: Way::of(context).asking(),
            answer,
        };
        loop {
            let question = Question::default();
            let done = self
                .install_or_ask(owner, &session, &requirements, leave, &question, context)
                .await;
            let asked = question
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            let Some(asked) = asked else {
                return done.into();
            };
            leave = match self
                .ask_to_install(&session, &requirements, asked, context)
                .await
            {
                Ok(leave) => leave,
                Err(response) => return response,
            };
        }
    }

    async fn install_or_ask(
        &self,
        owner: &Principal,
        session: &SessionId,
        requirements: &[String],
        leave: Leave,
        question: &Question,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let requirements = requirements.to_vec();
        let session = session.clone();
        let question = question.clone();
        let sessions = Arc::clone(&self.shared.sessions);
        let news = News::default();
        let reporter = Reporter::new(sessions.preparation(), INSTALL_TIME, &news);
        let (whose, which, told) = (owner.clone(), session.clone(), news.clone());
        let job = Job::begin(Kind::Installation, &news, |cancel| async move {
            let done = sessions
                .run_with(
                    &whose,
                    ops::Install {
                        session: which.clone(),
                        requirements,
                        leave,
                    },
                    Io {
                        cancel,
                        progress: told,
                        ..Io::default()
                    },
                )
                .await;
            installed_or_asked(&which, done, &question)
        })
        .await;
        self.patiently(owner, session, job, reporter, context).await
    }

    async fn explore(
        &self,
        owner: &Principal,
        session: SessionId,
        request: ExploreRequest,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let sessions = Arc::clone(&self.shared.sessions);
        let most_chars = self.shared.most_compared_chars;
        let news = News::default();
        let reporter = Reporter::new(sessions.preparation(), request.timeout, &news);
        let (whose, which, told) = (owner.clone(), session.clone(), news.clone());
        let job = Job::begin(Kind::Exploration, &news, |cancel| async move {
            match sessions
                .run_with(
                    &whose,
                    ops::Explore {
                        session: which.clone(),
                        request,
                    },
                    Io {
                        cancel,
                        progress: told,
                        ..Io::default()
                    },
                )
                .await
            {
                Ok(report) => compare::comparison(&which, &report, most_chars),
                Err(refused) => render::refused(&refused),
            }
        })
        .await;
        self.patiently(owner, session, job, reporter, context).await
    }

    /// Waits for work as long as a caller waits at most, then puts it on the desk.
    async fn patiently(
        &self,
        owner: &Principal,
        session: SessionId,
        job: Job,
        reporter: Reporter,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResult {
        let mut waited_for = job.clone();
        let work = async {
            tokio::select! {
                result = waited_for.result(self.shared.max_wait) => result,
                () = context.ct.cancelled() => {
                    job.cancel.cancel();
                    job.clone().result(self.shared.max_wait).await
                }
            }
        };
        if let Some(result) = with_progress(Box::pin(work), reporter, context).await {
            return result;
        }
        match self.shared.desk.put(owner, &session, job.clone()) {
            Ok(()) => self.at_work(&session, &job),
            Err(job) => {
                job.cancel.cancel();
                render::refused(&GivenUp::DeskTaken(session))
            }
        }
    }

    pub(super) async fn upload(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        source: Source,
        overwrite: bool,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared {
            sessions, files, ..
        } = &*self.shared;
        match source {
            Source::Local(path) => {
                let file = on_a_thread(files, move |files| files.open(&path)).await?;
                let mut source = Capped::new(tokio::fs::File::from_std(file), files.largest());
                Ok(sessions
                    .run_with(
                        owner,
                        ops::WriteFile {
                            session: session.clone(),
                            path: relpath.clone(),
                            overwrite,
                        },
                        Io::source(&mut source),
                    )
                    .await?)
            }
            Source::Content(bytes) => Ok(sessions
                .run_with(
                    owner,
                    ops::WriteFile {
                        session: session.clone(),
                        path: relpath.clone(),
                        overwrite,
                    },
                    Io::source(bytes.as_slice()),
                )
                .await?),
        }
    }

    /// Copies to the host. Whatever goes wrong on the way, dropping the destination removes what
    /// was written.
    pub(super) async fn download(
        &self,
        owner: &Principal,
        session: &SessionId,
        relpath: &InsidePath,
        local_path: String,
        overwrite: Overwrite,
    ) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let Shared {
            sessions, files, ..
        } = &*self.shared;
        let mut destination =
            on_a_thread(files, move |files| files.create(&local_path, overwrite)).await?;
        let mut sink = tokio::fs::File::from_std(destination.take_file());
        let bytes = sessions
            .run_with(
                owner,
                ops::ReadFile {
                    session: session.clone(),
                    path: relpath.clone(),
                    limit: files.largest(),
                },
                Io::sink(&mut sink),
            )
            .await?;
        // The file's writes happen on another thread; only the flush tells whether they all
        // succeeded.
        sink.flush().await.map_err(WriteFailed)?;
        drop(sink);
        on_a_thread(files, move |_| destination.keep()).await?;
        Ok(bytes)
    }
}

/// Carries a call out and tells its caller how far it has come, if the caller wants to know.
pub(super) async fn with_progress<T>(
    call: impl Future<Output = T>,
    mut reporter: Reporter,
    context: &RequestContext<RoleServer>,
) -> T {
    let Some(token) = context.meta.get_progress_token() else {
        return call.await;
    };
    let mut call = pin!(call);
    loop {
        let report = tokio::select! {
            biased;
            done = &mut call => return done,
            report = reporter.next() => report,
        };
        let parameters = ProgressNotificationParam::new(token.clone(), report.progress)
            .with_message(report.message);
        // A report is sent to its end before the call is looked at again, so that none can follow
        // the answer.
        tokio::select! {
            sent = context.peer.notify_progress(parameters) => {
                if let Err(error) = sent {
                    tracing::debug!(%error, "a progress notification was not sent");
                }
            }
            () = context.ct.cancelled() => return call.await,
        }
    }
}

/// Waits for `work` unless the caller gives up first. Work that is dropped cleans up after itself.
pub(super) async fn or_cancelled<T, E>(
    context: &RequestContext<RoleServer>,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Box<dyn Error + Send + Sync>>
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    tokio::select! {
        done = work => done.map_err(Into::into),
        () = context.ct.cancelled() => Err(GivenUp::Cancelled.into()),
    }
}

fn answer<T>(
    done: Result<T, Box<dyn Error + Send + Sync>>,
    render: impl FnOnce(T) -> CallToolResult,
) -> CallToolResult {
    match done {
        Ok(value) => render(value),
        Err(error) => render::refused(&*error),
    }
}

/// Runs file work where it may wait: a path can lie on a slow or absent network disk.
async fn on_a_thread<T: Send + 'static>(
    files: &HostFiles,
    work: impl FnOnce(HostFiles) -> Result<T, HostFileError> + Send + 'static,
) -> Result<T, HostFileError> {
    let files = files.clone();
    match tokio::task::spawn_blocking(move || work(files)).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is ending and took the work away; nobody waits for an answer any more.
            Err(_) => std::future::pending().await,
        },
    }
}
