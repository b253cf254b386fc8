//! A cell: the data about running code, until its outcome is reported.

use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use tracing::warn;

use super::wording::{file_changes, python_error, variable_changes};
use crate::runner_client::{Claim, ClaimedLate, DoneClaim, Pipe};
use crate::sandbox::{Blocked, Exit, Isolation, MemoryUse};
use crate::session::executions::ExecutionReporter;
use crate::session::images;
use crate::session::kept_outputs::SessionOutputs;
use crate::session::output::{CollectedOutput, OutputCollector, OutputCursor, OutputDelta};
use crate::session::state::{RequestEnd, RequestRefusal, Stop};
use crate::session::tools::ToolCalls;
use crate::session::{
    ExecuteRequest, ExecutionId, LateOutput, Others, Outcome, OutcomeNote, Output, OutputId,
    OutputPart, Ruling, SessionId, Status,
};

/// Code that runs.
pub(super) struct Cell {
    /// Without the code, which has already been sent.
    pub(super) request: ExecuteRequest,
    pub(super) reporter: ExecutionReporter,
    /// SHA-256 of its code.
    pub(super) code: [u8; 32],
    collector: OutputCollector,
    /// Read position in its text: the part that was already reported while it runs.
    cursor: OutputCursor,
    begun_inside: bool,
    done: Option<Box<DoneClaim>>,
}

/// Data about a cell that has ended, in addition to its output.
pub(super) struct CellEnd {
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
    pub(super) notes: Vec<OutcomeNote>,
}

impl Cell {
    /// Reports that it starts. Returns the cell and its code, which goes to the runner.
    pub(super) fn begin(
        mut request: ExecuteRequest,
        reporter: ExecutionReporter,
        now: Instant,
    ) -> (Cell, String) {
        let code = std::mem::take(&mut request.code);
        reporter.begin(now);
        let cell = Cell {
            code: Sha256::digest(&code).into(),
            collector: OutputCollector::new(request.max_output_chars),
            cursor: OutputCursor::default(),
            begun_inside: false,
            done: None,
            request,
            reporter,
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
            } => self.collector.display(bundle, display_id, update),
            Claim::Value { bundle, .. } => self.collector.value(bundle),
            Claim::Clear { wait, .. } => self.collector.clear(wait),
            // An end without a start was sent by code of an earlier cell.
            Claim::Done(done) if self.begun_inside => self.done = Some(done),
            _ => {}
        }
    }

    /// Takes text that it printed.
    pub(super) fn print(&mut self, pipe: Pipe, bytes: &[u8]) {
        self.collector.text(pipe, bytes);
        if self.reporter.has_followers()
            && let Some(line) = self.collector.latest_line()
        {
            self.reporter.print(line);
        }
    }

    /// Returns the text that it printed since the previous call.
    pub(super) fn look(&mut self, max_chars: usize) -> OutputDelta {
        self.collector.delta(&mut self.cursor, max_chars)
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
        answer: RequestEnd,
        exit: Exit,
        nonsense: &str,
    ) -> Result<Status, RequestRefusal> {
        Ok(match answer {
            RequestEnd::Finished => match self.done.as_ref().and_then(|done| done.error.as_ref()) {
                Some(error) => Status::Raised(python_error(error, self.request.max_output_chars)),
                None => Status::Completed,
            },
            RequestEnd::Stopped(Stop::TimedOut, state) => Status::TimedOut {
                limit: self.request.timeout,
                state,
            },
            RequestEnd::Stopped(Stop::Cancelled, state) => Status::Cancelled { state },
            RequestEnd::InterpreterGone => Status::Died { exit },
            RequestEnd::ProtocolBroken => Status::ProtocolError {
                what: nonsense.to_owned(),
            },
            RequestEnd::Reset => Status::Reset,
            RequestEnd::Closed => Status::Closed,
            RequestEnd::Refused(refusal) => return Err(refusal),
        })
    }

    /// Reports the outcome. Images are encoded on another thread while the session continues.
    pub(super) fn tell(self, ended: CellEnd, session: &SessionId, outputs: &SessionOutputs) {
        let Cell {
            mut collector,
            done,
            reporter,
            ..
        } = self;
        let (error, variables, files) = done.map_or((None, None, None), |done| {
            (done.error, done.variables, done.files)
        });
        if let Some(error) = error {
            collector.traceback(&error.traceback);
        }
        let CollectedOutput {
            mut raw,
            text,
            figures,
        } = collector.finish();
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
        let images = raw.take_images();
        if images.is_empty() {
            return reporter.end(Ok(outcome(raw.finish(Vec::new()))));
        }
        tokio::spawn(async move {
            let encoded = images::encode_all(images).await;
            reporter.end(Ok(outcome(raw.finish(encoded))));
        });
    }
}
