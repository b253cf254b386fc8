//! A cell: the data about running code, until its outcome is reported.

use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tracing::warn;

use super::wording::{file_changes, python_error, variable_changes};
use crate::runner_client::{Claim, ClaimedLate, DoneClaim, Pipe};
use crate::sandbox::{Blocked, Exit, Isolation, MemoryUse};
use crate::session::docket::Teller;
use crate::session::images;
use crate::session::kept_outputs::SessionOutputs;
use crate::session::output::{Gathered, Gatherer, Glance, Seen};
use crate::session::state::{Answer, Refusal, Stop};
use crate::session::tools::ToolCalls;
use crate::session::{
    ExecuteRequest, ExecutionId, LateOutput, Others, Outcome, Output, OutputId, OutputPart, Ruling,
    SessionId, Status,
};

/// Code that runs.
pub(super) struct Cell {
    /// Without the code, which has already been sent.
    pub(super) request: ExecuteRequest,
    pub(super) teller: Teller,
    /// SHA-256 of its code.
    pub(super) code: [u8; 32],
    gatherer: Gatherer,
    /// Read position in its text: the part that was already reported while it runs.
    seen: Seen,
    begun_inside: bool,
    done: Option<Box<DoneClaim>>,
}

/// Data about a cell that has ended, in addition to its output.
pub(super) struct Ended {
    pub(super) execution: ExecutionId,
    pub(super) status: Status,
    pub(super) late: Option<LateOutput>,
    pub(super) duration: Duration,
    pub(super) processor_time: Duration,
    pub(super) memory: MemoryUse,
    pub(super) isolation: Isolation,
    pub(super) blocked: Vec<Blocked>,
    pub(super) tool_calls: ToolCalls,
    pub(super) rulings: Vec<Ruling>,
    pub(super) notes: Vec<String>,
}

impl Cell {
    /// Reports that it starts. Returns the cell and its code, which goes to the runner.
    pub(super) fn begin(
        mut request: ExecuteRequest,
        teller: Teller,
        now: Instant,
    ) -> (Cell, String) {
        let code = std::mem::take(&mut request.code);
        teller.begin(now);
        let cell = Cell {
            code: Sha256::digest(&code).into(),
            gatherer: Gatherer::new(request.max_output_chars),
            seen: Seen::default(),
            begun_inside: false,
            done: None,
            request,
            teller,
        };
        (cell, code)
    }

    pub(super) fn take(&mut self, claim: Claim) {
        match claim {
            _ if self.is_over() => {}
            Claim::Started { .. } => self.begun_inside = true,
            Claim::Display {
                bundle,
                display_id,
                update,
                ..
            } => self.gatherer.display(bundle, display_id, update),
            Claim::Value { bundle, .. } => self.gatherer.value(bundle),
            Claim::Clear { wait, .. } => self.gatherer.clear(wait),
            // An end without a start was sent by code of an earlier cell.
            Claim::Done(done) if self.begun_inside => self.done = Some(done),
            _ => {}
        }
    }

    /// Takes text that it printed.
    pub(super) fn print(&mut self, pipe: Pipe, bytes: &[u8]) {
        self.gatherer.text(pipe, bytes);
        if self.teller.is_heard()
            && let Some(line) = self.gatherer.latest_line()
        {
            self.teller.print(line);
        }
    }

    /// Returns the text that it printed since the previous call.
    pub(super) fn look(&mut self, max_chars: usize) -> Glance {
        self.gatherer.glance(&mut self.seen, max_chars)
    }

    pub(super) fn has_begun_inside(&self) -> bool {
        self.begun_inside
    }

    /// Returns whether it has started inside and has not claimed its end.
    pub(super) fn runs_inside(&self) -> bool {
        self.begun_inside && self.done.is_none()
    }

    pub(super) fn is_over(&self) -> bool {
        self.done.is_some()
    }

    /// Returns whether it may have changed the session's state.
    pub(super) fn may_have_changed(&self) -> bool {
        self.done.as_ref().is_none_or(|done| !done.unchanged)
    }

    /// Returns the output that earlier code printed late, as collected by the runner.
    pub(super) fn take_late(&mut self) -> Option<ClaimedLate> {
        self.done.as_mut()?.late.take()
    }

    /// Returns how it ended, or `Err` if it never started.
    pub(super) fn status(
        &self,
        answer: Answer,
        exit: Exit,
        nonsense: &str,
    ) -> Result<Status, Refusal> {
        Ok(match answer {
            Answer::Finished => match self.done.as_ref().and_then(|done| done.error.as_ref()) {
                Some(error) => Status::Raised(python_error(error, self.request.max_output_chars)),
                None => Status::Completed,
            },
            Answer::Stopped(Stop::TimedOut, state) => Status::TimedOut {
                limit: self.request.timeout,
                state,
            },
            Answer::Stopped(Stop::Cancelled, state) => Status::Cancelled { state },
            Answer::InterpreterGone => Status::Died { exit },
            Answer::ProtocolBroken => Status::Nonsense {
                what: nonsense.to_owned(),
            },
            Answer::Reset => Status::Reset,
            Answer::Closed => Status::Closed,
            Answer::Refused(refusal) => return Err(refusal),
        })
    }

    /// Reports the outcome. Images are encoded on another thread while the session continues.
    pub(super) fn tell(self, ended: Ended, session: &SessionId, outputs: &SessionOutputs) {
        let Cell {
            mut gatherer,
            done,
            teller,
            ..
        } = self;
        let (error, variables, files) = done.map_or((None, None, None), |done| {
            (done.error, done.variables, done.files)
        });
        if let Some(error) = error {
            gatherer.traceback(&error.traceback);
        }
        let Gathered {
            mut draft,
            text,
            figures,
        } = gatherer.finish();
        let execution = ended.execution;
        match text {
            Ok(text) => outputs.keep(execution.into(), text),
            Err(error) => {
                warn!(session = session.as_str(), %error, "the whole output could not be kept")
            }
        }
        for (number, figure) in (1..).zip(figures) {
            let part = OutputPart::Figure(number);
            outputs.keep(OutputId { execution, part }, figure);
        }
        let outcome = move |output| Outcome {
            execution,
            status: ended.status,
            output: Output {
                late: ended.late,
                ..output
            },
            duration: ended.duration,
            memory: ended.memory,
            processor_time: ended.processor_time,
            variables: variables.map(variable_changes),
            files: files.map(file_changes),
            isolation: ended.isolation,
            can_undo: 0,
            blocked: ended.blocked,
            tool_calls: ended.tool_calls,
            rulings: ended.rulings,
            notes: ended.notes,
            first_line: String::new(),
            others: Others::default(),
        };
        let images = draft.take_images();
        if images.is_empty() {
            return teller.end(Ok(outcome(draft.finish(Vec::new()))));
        }
        tokio::spawn(async move {
            let developed = images::develop_all(images).await;
            teller.end(Ok(outcome(draft.finish(developed))));
        });
    }
}
