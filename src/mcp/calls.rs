//! What calls of tools share: a slot for each call, waiting, progress, and running code.
//!
//! A caller waits for code at most as long as the operator allows. What takes longer goes on, and
//! `check_execution`, or a task for clients that know tasks, tells how. A cancelled call is
//! interrupted; one whose answer nobody waits for any more is not.

use std::error::Error;
use std::future::Future;
use std::pin::pin;
use std::sync::PoisonError;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{CallToolResponse, CallToolResult, ProgressNotificationParam};
use rmcp::service::RequestContext;

use super::jobs::{CallSlot, Job, JobKind};
use super::missing_modules::{self, missing_module};
use super::progress::Reporter;
use super::render::Occasion;
use super::resuming::ReplyMode;
use super::{Front, Server, Shared, render};
use crate::ops::{self, HostExt, Io};
use crate::session::{
    ExecuteRequest, ExecutionRef, ExecutionReport, Outcome, Principal, ProgressChannel, Refused,
    SessionId,
};

/// Calls of one owner carried out at once. Each may hold an output in memory; a client with more
/// than this under way has lost count.
pub(super) const MAX_CALLS: usize = 256;

/// Why a call was given up by this room.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallRejected {
    #[error(
        "{MAX_CALLS} of your calls are being carried out. Nothing was executed. Try again when \
         one of them has been answered"
    )]
    Busy,
    #[error("the call was cancelled; what it had begun may have taken effect")]
    Cancelled,
    #[error(
        "work that was begun earlier in `{0}` is still under way, and this took too long to wait \
         for it. It was interrupted; see `check_execution`"
    )]
    JobUnderWay(SessionId),
}

impl Server {
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

    /// Runs code until it has finished, the caller's patience has ended or the server is about to.
    pub(super) async fn begin(
        &self,
        owner: &Principal,
        session: &SessionId,
        request: ExecuteRequest,
        wait: Option<Duration>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ExecutionReport, Refused> {
        let Shared {
            sessions, draining, ..
        } = &*self.shared;
        let (news, max_chars) = (ProgressChannel::default(), request.max_output_chars);
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
        let mode = ReplyMode {
            wait: Duration::MAX,
            max_chars: request.max_output_chars,
            as_task: false,
            is_check: false,
        };
        let told = match self.begin(owner, session, request, None, context).await? {
            ExecutionReport::Finished { outcome, .. } => return Ok(*outcome),
            unfinished => Ok(unfinished),
        };
        match self.ask_meanwhile(owner, told, mode, context).await? {
            ExecutionReport::Finished { outcome, .. } => Ok(*outcome),
            ExecutionReport::Underway(_) | ExecutionReport::Nothing => Err(Refused::ShuttingDown),
        }
    }

    /// Says that Python is being prepared, if it is.
    pub(super) fn being_prepared(&self) -> Option<String> {
        let step = self.shared.sessions.preparation().borrow().step_text();
        step.map(|step| format!("Python is being prepared: {step}"))
    }

    /// Says what a piece of work is at.
    pub(super) fn at_work(&self, session: &SessionId, job: &Job) -> CallToolResult {
        let news = self
            .being_prepared()
            .unwrap_or_else(|| job.news.borrow().clone());
        render::at_work(session, job.begun.elapsed(), &news)
    }

    /// Takes a slot among the calls of an owner, until it is dropped.
    pub(super) fn call_slot(&self, owner: &Principal) -> Result<CallSlot, CallRejected> {
        self.shared.calls.take(owner).ok_or(CallRejected::Busy)
    }

    /// Reports how an execution goes on, without waiting for it.
    pub(super) async fn check_now(
        &self,
        owner: &Principal,
        execution: ExecutionRef,
        max_chars: usize,
    ) -> Result<ExecutionReport, Refused> {
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
    ) -> Option<ExecutionReport> {
        let which = ExecutionRef::InSession(session.clone());
        match self.check_now(owner, which.clone(), max_chars).await {
            Ok(ExecutionReport::Nothing) | Err(_) => None,
            // It is the answer to the call that started the code.
            Ok(ExecutionReport::Finished {
                session, outcome, ..
            }) => Some(ExecutionReport::Finished {
                session,
                outcome,
                again: false,
            }),
            Ok(underway) => Some(underway),
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
        if let Some(kind) = self.shared.jobs.ended(owner, session) {
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
            jobs,
            ..
        } = &*self.shared;
        let module = missing_module(&outcome.status).filter(|_| *can_install)?;
        if jobs.underway(owner, session) == Some(JobKind::Installation) {
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

    /// Waits for work as long as a caller waits at most, then keeps it for `check_execution`.
    pub(super) async fn wait_for_job(
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
        match self.shared.jobs.put(owner, &session, job.clone()) {
            Ok(()) => self.at_work(&session, &job),
            Err(job) => {
                job.cancel.cancel();
                render::refused(&CallRejected::JobUnderWay(session))
            }
        }
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
        () = context.ct.cancelled() => Err(CallRejected::Cancelled.into()),
    }
}

/// Renders a reply, or why there is none.
pub(super) fn answer<T, E>(
    done: Result<T, E>,
    render: impl FnOnce(T) -> CallToolResult,
) -> CallToolResult
where
    E: Into<Box<dyn Error + Send + Sync>>,
{
    match done {
        Ok(value) => render(value),
        Err(error) => render::refused(&*error.into()),
    }
}
