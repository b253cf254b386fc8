//! Packages for sessions: installation requests, their results, and the installer interface.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::driver::SessionJob;
use super::manager::Sessions;
use super::{Approver, Decision, Principal, Refused, Ruling, SessionId, SessionState};

/// An installation request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallRequest {
    /// In pip's syntax, unchecked.
    pub requirements: Vec<String>,
    /// Whether to install even if a suitable version is present.
    pub upgrade: bool,
    /// The package folders that the session already has.
    pub has: Vec<String>,
}

/// Result of an installation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Installed {
    /// Folders as seen from inside.
    pub paths: Vec<String>,
    /// Output of the installer, for the reader.
    pub text: String,
}

/// Reason why nothing was installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum InstallError {
    /// It is not allowed, or not valid.
    #[error("{0}")]
    Refused(String),
    /// The resolver's own message.
    #[error("{0}")]
    Failed(String),
}

/// Installs packages where sandboxes can see them.
pub trait PackageInstaller: Send + Sync {
    /// Installs the requested packages. `tell` receives each step as a sentence.
    fn install<'a>(
        &'a self,
        request: InstallRequest,
        tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Installed, InstallError>>;
}

/// Limits of the installer: requirements per installation, and bytes of each.
const MAX_REQUIREMENTS: usize = 100;
const MAX_REQUIREMENT_LENGTH: usize = 500;

/// Rejects requests that no installer accepts, so that no approval is requested for them and no
/// large request is held.
pub(super) fn check_bounds(requirements: &[String]) -> Result<(), InstallError> {
    if requirements.len() > MAX_REQUIREMENTS {
        let count = requirements.len();
        return Err(InstallError::Refused(format!(
            "{count} requirements are too many; at most {MAX_REQUIREMENTS} can be installed at \
             once"
        )));
    }
    match requirements.iter().map(String::len).max() {
        Some(length) if length > MAX_REQUIREMENT_LENGTH => Err(InstallError::Refused(format!(
            "a requirement of {length} characters is too long; the limit is \
             {MAX_REQUIREMENT_LENGTH}"
        ))),
        _ => Ok(()),
    }
}

/// Source of packages for sessions, if there is one.
#[derive(Clone, Default)]
pub struct PackageSource(pub Option<Arc<dyn PackageInstaller>>);

impl fmt::Debug for PackageSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() {
            "PackageSource(an installer)"
        } else {
            "PackageSource(nothing)"
        })
    }
}

/// Approval of an installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallApproval {
    /// Whether a person can be asked.
    pub asking: Approver,
    /// The answer to the earlier approval request.
    pub answer: Option<Decision>,
}

/// Modules of added packages that were already imported from elsewhere. Claimed by the runner.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LoadedModules {
    pub(super) all: Vec<String>,
    /// The subset that every session starts with.
    pub(super) preloaded: Vec<String>,
}

/// Effect of an installation on a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallReport {
    pub text: String,
    /// Modules of these packages that were already imported from elsewhere.
    pub loaded: Vec<String>,
    /// The subset that every session starts with. For the others, a reset is needed to use the new
    /// versions.
    #[serde(default)]
    pub preloaded: Vec<String>,
    /// The decision of a person about it.
    #[serde(default)]
    pub ruling: Option<Ruling>,
}

impl Sessions {
    /// Installs packages into a session, which is created if necessary. An installation that needs
    /// approval first is refused with the approval request.
    pub async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        approval: InstallApproval,
        cancel: CancellationToken,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<InstallReport, Refused> {
        let installer = self.packages().0.ok_or(Refused::NoPackages)?;
        check_bounds(&requirements).map_err(Refused::Install)?;
        let entry = self.find_or_create(owner, id)?;
        let InstallApproval { asking, answer } = approval;
        let ruling =
            self.approve_install((owner, id), &entry.shared, &requirements, asking, answer)?;
        // A session that cannot start does not need packages, and its error says why.
        if entry.shared.facts().state == SessionState::Starting {
            let (reply, answer) = oneshot::channel();
            let started = self
                .ask(
                    &entry,
                    SessionJob::Packages {
                        paths: Vec::new(),
                        reply,
                    },
                    answer,
                    &cancel,
                )
                .await;
            started.unwrap_or_else(|error| Err(self.explained(owner, id, error)))?;
        }
        let has = entry.shared.facts().packages.clone();
        let request = InstallRequest {
            requirements: requirements.clone(),
            upgrade: false,
            has,
        };
        let installed = tokio::select! {
            installed = installer.install(request, tell) => installed.map_err(Refused::Install)?,
            () = cancel.cancelled() => return Err(Refused::CancelledWhileWaiting),
        };
        let Installed { paths, text } = installed;
        if paths.is_empty() {
            note_requested(&mut entry.shared.facts().requested, requirements);
            return Ok(InstallReport {
                text,
                loaded: Vec::new(),
                preloaded: Vec::new(),
                ruling,
            });
        }
        let (reply, answer) = oneshot::channel();
        let added = self
            .ask(
                &entry,
                SessionJob::Packages { paths, reply },
                answer,
                &cancel,
            )
            .await;
        let LoadedModules {
            all: loaded,
            preloaded,
        } = added.unwrap_or_else(|error| Err(self.explained(owner, id, error)))?;
        note_requested(&mut entry.shared.facts().requested, requirements);
        Ok(InstallReport {
            text,
            loaded,
            preloaded,
            ruling,
        })
    }
}

/// Requirements that are remembered per session. Further requirements are installed but not
/// remembered.
const MAX_REMEMBERED: usize = 500;

fn note_requested(known: &mut Vec<String>, requirements: Vec<String>) {
    for requirement in requirements {
        if known.len() < MAX_REMEMBERED && !known.contains(&requirement) {
            known.push(requirement);
        }
    }
}
