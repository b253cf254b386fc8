//! Session data that other tasks can read without asking the driver.

use std::sync::{Arc, Mutex, MutexGuard};

use tokio::time::Instant;

use crate::approval::SessionGrants;
use crate::sandbox::{LaunchError, Rules};
use crate::session::SessionState;
use crate::session::approvals::WaitingInstall;
use crate::session::executions::ExecutionRegistry;
use crate::session::history::Undoable;
use crate::session::kept_outputs::SessionOutputs;
use crate::session::tools::Grants;

/// Session data that other tasks can read without asking the driver.
pub(in crate::session) struct SharedSession {
    facts: Mutex<Facts>,
    pub(in crate::session) outputs: SessionOutputs,
    /// Installations that wait for approval.
    installs: Mutex<Vec<WaitingInstall>>,
    pub(in crate::session) registry: Arc<ExecutionRegistry>,
    pub(in crate::session) created: Instant,
}

#[derive(Clone)]
pub(in crate::session) struct Facts {
    pub(in crate::session) state: SessionState,
    pub(in crate::session) ended: Option<String>,
    /// Why the last attempt to start an interpreter failed, if it did.
    pub(in crate::session) failure: Option<LaunchError>,
    pub(in crate::session) executions: u64,
    pub(in crate::session) last_used: Instant,
    pub(in crate::session) memory: Option<u64>,
    /// States that can be restored, the most recent first.
    pub(in crate::session) undoable: Vec<Undoable>,
    pub(in crate::session) rules: Rules,
    /// Package folders that were added to it, the latest first.
    pub(in crate::session) packages: Vec<String>,
    /// Requirements that calls installed, or that were already present.
    pub(in crate::session) requested: Vec<String>,
    /// Permissions given by a person for this session.
    pub(in crate::session) granted: SessionGrants,
    /// Tools of other servers that it may use.
    pub(in crate::session) grants: Grants,
}

impl SharedSession {
    pub(in crate::session) fn new(outputs: SessionOutputs) -> SharedSession {
        let now = Instant::now();
        let facts = Facts {
            state: SessionState::Starting,
            ended: None,
            failure: None,
            executions: 0,
            last_used: now,
            memory: None,
            undoable: Vec::new(),
            rules: Rules::none(),
            packages: Vec::new(),
            requested: Vec::new(),
            granted: SessionGrants::default(),
            grants: Grants::default(),
        };
        SharedSession {
            facts: Mutex::new(facts),
            outputs,
            installs: Mutex::default(),
            registry: Arc::default(),
            created: now,
        }
    }

    pub(in crate::session) fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts
            .lock()
            .expect("nothing panics while it holds the facts")
    }

    pub(in crate::session) fn installs(&self) -> MutexGuard<'_, Vec<WaitingInstall>> {
        self.installs
            .lock()
            .expect("nothing panics while it holds the installations")
    }

    /// Records that the session was used.
    pub(in crate::session) fn touch(&self) {
        self.facts().last_used = Instant::now();
    }

    /// Records package folders that the session has from now on, the latest first.
    pub(super) fn add_packages(&self, paths: &[String]) {
        let packages = &mut self.facts().packages;
        packages.retain(|path| !paths.contains(path));
        packages.splice(0..0, paths.iter().cloned());
    }

    /// Returns the bytes of kept full outputs and of results kept for collection.
    pub(in crate::session) fn kept_bytes(&self) -> u64 {
        self.outputs.bytes() + self.registry.kept_bytes()
    }
}
