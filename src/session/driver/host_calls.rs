//! Calls from running code to the host: installations, tools of other MCP servers, commands and
//! connections, and the modules that provide the tools.
//!
//! `call_queue` handles and answers calls, `approvals` decides and holds calls that a person must
//! decide, `deliveries` sends modules. The calling cell is lent to this part for each step.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::time::Instant;

use super::approvals::PendingApprovals;
use super::call_queue::{CallAnswer, CallQueue};
use super::cell::Cell;
use super::deliveries::Deliveries;
use super::requests::Running;
use super::shared::SharedSession;
use crate::runner_client::Request;
use crate::sandbox::Sandbox;
use crate::session::approvals::{InForce, Ruling};
use crate::session::install::PackageSource;
use crate::session::tools::{ToolCalls, Tools};
use crate::session::{Principal, SessionId, SessionSettings};

/// State of the host calls of this session.
pub(super) struct HostCalls {
    pub(super) id: SessionId,
    /// The principal whose rights a call has; `None` for the server's internal work.
    pub(super) owner: Option<Principal>,
    pub(super) packages: PackageSource,
    pub(super) tools: Tools,
    pub(super) approvals: InForce,
    pub(super) shared: Arc<SharedSession>,
    pub(super) numbers: Arc<AtomicU64>,
    pub(super) call_queue: CallQueue,
    pub(super) pending: PendingApprovals,
    pub(super) deliveries: Deliveries,
}

/// The calling cell, and where it runs.
pub(super) struct CallOrigin<'a> {
    pub(super) running: Option<&'a mut Running>,
    pub(super) sandbox: Option<&'a dyn Sandbox>,
    pub(super) is_stopping: bool,
}

impl CallOrigin<'_> {
    pub(super) fn cell(&self) -> Option<&Cell> {
        self.running.as_ref().and_then(|running| running.cell())
    }
}

impl HostCalls {
    pub(super) fn new(
        id: &SessionId,
        owner: Option<&Principal>,
        settings: &SessionSettings,
        shared: &Arc<SharedSession>,
        numbers: &Arc<AtomicU64>,
    ) -> HostCalls {
        HostCalls {
            id: id.clone(),
            owner: owner.cloned(),
            packages: settings.packages.clone(),
            tools: settings.tools.clone(),
            approvals: settings.approvals.clone(),
            shared: shared.clone(),
            numbers: numbers.clone(),
            call_queue: CallQueue::default(),
            pending: PendingApprovals::default(),
            deliveries: Deliveries::new(&settings.tools),
        }
    }

    /// Resets the call counters for a new cell.
    pub(super) fn begin_cell(&mut self) {
        self.call_queue.begin_cell();
    }

    /// Ends the calls of the cell. Returns the tool calls that it made and the decisions about it.
    pub(super) fn end_cell(&mut self) -> (ToolCalls, Vec<Ruling>) {
        (self.call_queue.clear(), self.pending.clear())
    }

    /// Returns the deadline of the next pending approval.
    pub(super) fn due(&self) -> Option<Instant> {
        self.pending.due()
    }

    /// Records the answer to a call, and returns the frame to send.
    pub(super) fn answered(
        &mut self,
        answered: CallAnswer,
        caller: &mut CallOrigin<'_>,
    ) -> Request {
        let (request, packages) = self.call_queue.close(answered);
        self.shared.add_packages(&packages);
        self.start_waiting_calls(caller);
        request
    }
}
