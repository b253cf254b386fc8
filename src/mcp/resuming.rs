//! Calls whose code waits for a person: asking, and going on with the same execution afterwards.
//!
//! An execution runs once. Whatever happens between the question and its answer (a call that is
//! repeated, a connection that breaks, another server that takes over), the call goes on by the
//! execution's handle, and its code is not started again.

use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    CallToolResponse, ClientResult, ElicitRequest, ErrorData, InputResponses, ServerRequest,
};
use rmcp::service::{PeerRequestOptions, RequestContext, RequestHandle, ServiceError};
use tokio::time::sleep;

use super::asking::{self, Binding, ElicitationMode, Resumption, Titles};
use super::calls::with_progress;
use super::progress::Reporter;
use super::render::Occasion;
use super::{Server, Shared, render, tasks};
use crate::ops::{self, HostExt, Io};
use crate::session::install::InstallApproval;
use crate::session::{
    ApprovalRequest, Decision, ExecutionHandle, ExecutionRef, ExecutionReport, Principal,
    ProgressChannel, Refused, SessionId, Underway,
};

/// How often it is looked whether a question is still open while a person thinks about it.
const BETWEEN_LOOKS: Duration = Duration::from_secs(1);

/// How long the end of code is waited for whose caller has cancelled it.
const UNTIL_STOPPED: Duration = Duration::from_secs(10);

/// How the answer to a call about an execution is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplyMode {
    /// How long the caller waits for code.
    pub(super) wait: Duration,
    pub(super) max_chars: usize,
    /// What takes longer may become a task.
    pub(super) as_task: bool,
    /// The caller asked for a result of the session, so that it must be told which one it is.
    pub(super) is_check: bool,
}

/// What a person said to a form.
enum Said {
    Decided(Vec<Decision>),
    /// What was asked is not open any more; the code goes on.
    Over,
    /// Nobody can be asked now, or nobody waits for the answer.
    Left(Result<ExecutionReport, Refused>),
}

impl Server {
    /// Answers a call about an execution. What a person has to decide is asked first, if the client
    /// can.
    pub(super) async fn answer_or_ask(
        &self,
        owner: &Principal,
        session: &SessionId,
        mut told: Result<ExecutionReport, Refused>,
        mode: ReplyMode,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        if ElicitationMode::of(context) == ElicitationMode::Elicitation {
            told = self.ask_meanwhile(owner, told, mode, context).await;
        }
        match (
            &told,
            ElicitationMode::of(context),
            context.extensions.get::<Binding>(),
        ) {
            (
                Ok(ExecutionReport::Underway(underway)),
                ElicitationMode::InputRequired,
                Some(binding),
            ) if !underway.approvals.is_empty() => self.input_required(underway, binding),
            _ => self.rendered(owner, session, told, mode).await,
        }
    }

    /// Asks by forms while the call waits, as long as there is something to ask and somebody
    /// answers.
    pub(super) async fn ask_meanwhile(
        &self,
        owner: &Principal,
        mut told: Result<ExecutionReport, Refused>,
        mode: ReplyMode,
        context: &RequestContext<RoleServer>,
    ) -> Result<ExecutionReport, Refused> {
        loop {
            let underway = match told {
                Ok(ExecutionReport::Underway(underway)) if !underway.approvals.is_empty() => {
                    underway
                }
                other => return other,
            };
            let news = ProgressChannel::new("waiting for a person's decision".to_owned());
            let reporter = Reporter::new(self.shared.sessions.preparation(), mode.wait, &news);
            let handle = underway.handle.clone();
            let said = with_progress(
                Box::pin(self.elicit(owner, &underway, mode, context)),
                reporter,
                context,
            )
            .await;
            told = match said {
                Said::Decided(decisions) => {
                    self.decide(owner, &handle, decisions, "elicitation", mode, context)
                        .await
                }
                Said::Over => self.go_on(owner, &handle, mode, context).await,
                Said::Left(told) => return told,
            };
        }
    }

    /// Goes on with a call that was answered with a form. Its code is not run again.
    pub(super) async fn resume(
        &self,
        owner: &Principal,
        resumption: Resumption,
        responses: Option<&InputResponses>,
        context: &RequestContext<RoleServer>,
    ) -> CallToolResponse {
        let shown = resumption.asks();
        let decisions = asking::decisions_for(&shown, responses);
        match resumption {
            Resumption::Execution {
                handle, session, ..
            } => {
                let mode = self.reply_mode(context);
                let told = match decisions {
                    Some(decisions) => {
                        self.decide(owner, &handle, decisions, "input_required", mode, context)
                            .await
                    }
                    // Without an answer it is asked again, at once.
                    None => self.go_on(owner, &handle, mode, context).await,
                };
                self.answer_or_ask(owner, &session, told, mode, context)
                    .await
            }
            Resumption::Install {
                session,
                requirements,
                ..
            } => {
                let answer = decisions.and_then(|decisions| decisions.first().copied());
                self.install(owner, session, requirements, answer, context)
                    .await
            }
        }
    }

    /// How a call is answered that says nothing else about it.
    pub(super) fn reply_mode(&self, context: &RequestContext<RoleServer>) -> ReplyMode {
        let Shared {
            max_wait,
            most_compared_chars,
            ..
        } = &*self.shared;
        let as_task = tasks::are_known_to(context);
        let wait = if as_task {
            tasks::PATIENCE.min(*max_wait)
        } else {
            *max_wait
        };
        ReplyMode {
            wait,
            max_chars: *most_compared_chars,
            as_task,
            is_check: false,
        }
    }

    /// Asks for leave to install, by a form. `Ok` has the answer; otherwise the call is answered.
    pub(super) async fn ask_to_install(
        &self,
        session: &SessionId,
        requirements: &[String],
        asked: ApprovalRequest,
        context: &RequestContext<RoleServer>,
    ) -> Result<InstallApproval, CallToolResponse> {
        let asking = ElicitationMode::of(context).asking();
        match (
            ElicitationMode::of(context),
            context.extensions.get::<Binding>(),
        ) {
            (ElicitationMode::InputRequired, Some(binding)) => {
                let (session, requirements) = (session.clone(), requirements.to_vec());
                let resumption = Resumption::Install {
                    session: session.clone(),
                    requirements,
                    ask: asked.id,
                };
                Err(self
                    .shared
                    .seals
                    .input_required(&resumption, &[asked], binding, &session))
            }
            (ElicitationMode::Elicitation, _) => {
                let ids = [asked.id];
                let Ok(mut form) = send_form(session, &[asked], context).await else {
                    return Err(render::refused(&NotAsked).into());
                };
                let decisions = tokio::select! {
                    answer = &mut form.rx => decided(&ids, answer),
                    () = context.ct.cancelled() => None,
                };
                match decisions.as_deref() {
                    Some([decision]) => Ok(InstallApproval {
                        asking,
                        answer: Some(*decision),
                    }),
                    _ => {
                        withdraw(form).await;
                        Err(render::refused(&NotAsked).into())
                    }
                }
            }
            _ => Err(render::refused(&NotAsked).into()),
        }
    }

    fn input_required(&self, underway: &Underway, binding: &Binding) -> CallToolResponse {
        let Underway {
            handle,
            session,
            approvals: asks,
            ..
        } = underway;
        let ids = asks.iter().map(|asked| asked.id).collect();
        let resumption = Resumption::Execution {
            handle: handle.clone(),
            session: session.clone(),
            asks: ids,
        };
        self.shared
            .seals
            .input_required(&resumption, asks, binding, session)
    }

    /// Shows the questions of an execution to a person, and waits for their answer as long as it is
    /// wanted.
    async fn elicit(
        &self,
        owner: &Principal,
        underway: &Underway,
        mode: ReplyMode,
        context: &RequestContext<RoleServer>,
    ) -> Said {
        let Underway {
            handle,
            session,
            approvals: asks,
            ..
        } = underway;
        let ids = asks.iter().map(|asked| asked.id).collect::<Vec<_>>();
        let Ok(mut form) = send_form(session, asks, context).await else {
            return Said::Left(Ok(ExecutionReport::Underway(underway.clone())));
        };
        loop {
            tokio::select! {
                // Draining before the end of the connection, which follows and would stop the code.
                biased;
                answer = &mut form.rx => return match decided(&ids, answer) {
                    Some(decisions) => Said::Decided(decisions),
                    None => Said::Left(Ok(ExecutionReport::Underway(underway.clone()))),
                },
                () = self.shared.draining.cancelled() => {
                    withdraw(form).await;
                    let promised = self.may_promise();
                    let report = promised.map(|()| ExecutionReport::Underway(underway.clone()));
                    return Said::Left(report);
                }
                () = context.ct.cancelled() => {
                    withdraw(form).await;
                    return Said::Left(self.stopped(owner, handle, mode).await);
                }
                () = sleep(BETWEEN_LOOKS) => {}
            }
            let which = ExecutionRef::Handle(handle.clone());
            let told = self.check_now(owner, which.clone(), mode.max_chars).await;
            let is_open = matches!(
                &told,
                Ok(ExecutionReport::Underway(now))
                    if now.approvals.iter().any(|asked| ids.contains(&asked.id))
            );
            if !is_open {
                withdraw(form).await;
                return Said::Over;
            }
        }
    }

    /// Hands answers to the session and waits for what the code does with them.
    async fn decide(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        decisions: Vec<Decision>,
        how: &'static str,
        mode: ReplyMode,
        context: &RequestContext<RoleServer>,
    ) -> Result<ExecutionReport, Refused> {
        self.shared
            .sessions
            .run(
                owner,
                ops::Decide {
                    execution: handle.clone(),
                    decisions,
                    asked_by: how.to_owned(),
                },
            )
            .await?;
        self.go_on(owner, handle, mode, context).await
    }

    /// Waits for an execution that goes on. A cancelled call stops it.
    async fn go_on(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        mode: ReplyMode,
        context: &RequestContext<RoleServer>,
    ) -> Result<ExecutionReport, Refused> {
        let Shared {
            sessions, draining, ..
        } = &*self.shared;
        let which = ExecutionRef::Handle(handle.clone());
        let news = ProgressChannel::default();
        let reporter = Reporter::new(sessions.preparation(), mode.wait, &news);
        let checking = sessions.run_with(
            owner,
            ops::Check {
                execution: which.clone(),
                wait: mode.wait,
                max_chars: mode.max_chars,
            },
            Io {
                progress: news,
                ..Io::default()
            },
        );
        tokio::select! {
            // As above.
            biased;
            () = draining.cancelled() => {
                self.may_promise()?;
                self.check_now(owner, which.clone(), mode.max_chars)
                    .await
            }
            told = with_progress(checking, reporter, context) => told,
            () = context.ct.cancelled() => self.stopped(owner, handle, mode).await,
        }
    }

    /// Stops an execution and waits for its end.
    async fn stopped(
        &self,
        owner: &Principal,
        handle: &ExecutionHandle,
        mode: ReplyMode,
    ) -> Result<ExecutionReport, Refused> {
        let which = ExecutionRef::Handle(handle.clone());
        self.shared
            .sessions
            .run(
                owner,
                ops::Interrupt {
                    execution: which.clone(),
                },
            )
            .await?;
        self.shared
            .sessions
            .run(
                owner,
                ops::Check {
                    execution: which.clone(),
                    wait: UNTIL_STOPPED,
                    max_chars: mode.max_chars,
                },
            )
            .await
    }

    async fn rendered(
        &self,
        owner: &Principal,
        session: &SessionId,
        told: Result<ExecutionReport, Refused>,
        mode: ReplyMode,
    ) -> CallToolResponse {
        let occasion = |again| {
            if mode.is_check {
                Occasion::Check { again }
            } else {
                Occasion::Answer
            }
        };
        match told {
            Ok(ExecutionReport::Finished {
                session,
                outcome,
                again,
            }) => self
                .told(owner, &session, &outcome, occasion(again))
                .await
                .into(),
            Ok(ExecutionReport::Underway(underway)) if mode.as_task => tasks::created(&underway),
            Ok(ExecutionReport::Underway(underway)) => {
                render::underway(&underway, occasion(false)).into()
            }
            Ok(ExecutionReport::Nothing) => render::nothing_to_check(session).into(),
            Err(refused) => render::refused(&refused).into(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("nothing was installed: a person must allow it first, and nobody could be asked")]
struct NotAsked;

/// The answer to a state that is none: nothing runs.
pub(super) fn bad_state(bad: &asking::BadState) -> ErrorData {
    ErrorData::invalid_params(bad.to_string(), None)
}

async fn send_form(
    session: &SessionId,
    asked: &[ApprovalRequest],
    context: &RequestContext<RoleServer>,
) -> Result<RequestHandle<RoleServer>, ServiceError> {
    let request = ServerRequest::ElicitRequest(ElicitRequest::new(asking::form(
        session,
        asked,
        Titles::known_to(context),
    )));
    context
        .peer
        .send_cancellable_request(request, PeerRequestOptions::no_options())
        .await
}

/// Tells the client that the form is not needed any more.
async fn withdraw(form: RequestHandle<RoleServer>) {
    if let Err(error) = form
        .cancel(Some("there is nothing left to decide".to_owned()))
        .await
    {
        tracing::debug!(%error, "a form was not withdrawn");
    }
}

/// Reads the answer to a form. `None` when the client is gone, so that the next one is asked.
fn decided<E>(
    ids: &[crate::session::ApprovalId],
    answer: Result<Result<ClientResult, ServiceError>, E>,
) -> Option<Vec<Decision>> {
    match answer {
        Ok(Ok(ClientResult::ElicitResult(result))) => Some(asking::decisions(ids, Some(&result))),
        Err(_) | Ok(Err(ServiceError::TransportClosed | ServiceError::TransportSend(_))) => None,
        // An error, or something else than an answer, is no permission.
        Ok(_) => Some(asking::decisions(ids, None)),
    }
}
