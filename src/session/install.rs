//! Packages for sessions: what is asked, what is given, and who does it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::driver::Job;
use super::manager::Sessions;
use super::{Asking, Decision, Principal, Refused, Ruling, SessionId};

/// What is to be installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstallRequest {
    /// As pip takes them, unchecked.
    pub requirements: Vec<String>,
    /// Also when a version is there that would do.
    pub upgrade: bool,
    /// The folders of packages that the session has already.
    pub has: Vec<String>,
}

/// What was installed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Installed {
    /// Folders as they are seen inside.
    pub paths: Vec<String>,
    /// What the installer says, for a reader.
    pub text: String,
}

/// Why nothing was installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum InstallError {
    /// It is not allowed, or not understood.
    #[error("{0}")]
    Refused(String),
    /// The resolver's own words.
    #[error("{0}")]
    Failed(String),
}

/// Installs packages where sandboxes can see them.
pub trait Installer: Send + Sync {
    /// Installs what is asked for; `tell` is told each step in a sentence.
    fn install<'a>(
        &'a self,
        request: InstallRequest,
        tell: &'a (dyn Fn(String) + Send + Sync),
    ) -> Pin<Box<dyn Future<Output = Result<Installed, InstallError>> + Send + 'a>>;
}

/// Requirements of one installation, and bytes of each, as the installer takes them.
const MOST_REQUIREMENTS: usize = 100;
const LONGEST_REQUIREMENT: usize = 500;

/// Refuses what no installer takes, so that nobody is asked about it and nothing large waits for an
/// answer.
pub(super) fn check_bounds(requirements: &[String]) -> Result<(), InstallError> {
    if requirements.len() > MOST_REQUIREMENTS {
        let count = requirements.len();
        return Err(InstallError::Refused(format!(
            "{count} requirements are too many; at most {MOST_REQUIREMENTS} can be installed at once"
        )));
    }
    match requirements.iter().map(String::len).max() {
        Some(length) if length > LONGEST_REQUIREMENT => Err(InstallError::Refused(format!(
            "a requirement of {length} characters is too long; the limit is {LONGEST_REQUIREMENT}"
        ))),
        _ => Ok(()),
    }
}

/// Where sessions get packages, if anywhere.
#[derive(Clone, Default)]
pub struct Source(pub Option<Arc<dyn Installer>>);

impl fmt::Debug for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.0.is_some() {
            "Source(an installer)"
        } else {
            "Source(nothing)"
        })
    }
}

/// Whether a person allows an installation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Whether somebody can be asked.
    pub asking: Asking,
    /// What they have answered to the question that was asked before.
    pub answer: Option<Decision>,
}

/// Modules of added packages that were imported before, from elsewhere. As the runner claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LoadedModules {
    pub(super) all: Vec<String>,
    /// Those of them that every session begins with.
    pub(super) preloaded: Vec<String>,
}

/// What an installation did to a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallReport {
    pub text: String,
    /// Modules of these packages that were imported before, from elsewhere.
    pub loaded: Vec<String>,
    /// Those of them that every session begins with. For the others a reset is needed to use the new ones.
    #[serde(default)]
    pub preloaded: Vec<String>,
    /// What a person has decided about it.
    #[serde(default)]
    pub ruling: Option<Ruling>,
}

impl Sessions {
    /// Installs packages into a session, which is made if need be. What a person must allow first is refused with the question.
    pub async fn install(
        &self,
        owner: &Principal,
        id: &SessionId,
        requirements: Vec<String>,
        leave: Leave,
        cancel: CancellationToken,
        tell: &(dyn Fn(String) + Send + Sync),
    ) -> Result<InstallReport, Refused> {
        let installer = self.packages().0.ok_or(Refused::NoPackages)?;
        check_bounds(&requirements).map_err(Refused::Install)?;
        let entry = self.find_or_create(owner, id)?;
        let Leave { asking, answer } = leave;
        let ruling =
            self.leave_to_install((owner, id), &entry.shared, &requirements, asking, answer)?;
        // What cannot start has no use for packages, and says why.
        if entry.shared.facts().state == "starting" {
            let (reply, answer) = oneshot::channel();
            let started = self
                .ask(
                    &entry,
                    Job::Packages {
                        paths: Vec::new(),
                        reply,
                    },
                    answer,
                    &cancel,
                )
                .await;
            started.unwrap_or_else(|silence| Err(self.explained(owner, id, silence)))?;
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
            .ask(&entry, Job::Packages { paths, reply }, answer, &cancel)
            .await;
        let LoadedModules {
            all: loaded,
            preloaded,
        } = added.unwrap_or_else(|silence| Err(self.explained(owner, id, silence)))?;
        note_requested(&mut entry.shared.facts().requested, requirements);
        Ok(InstallReport {
            text,
            loaded,
            preloaded,
            ruling,
        })
    }
}

/// Requirements that are remembered of one session. Whoever asks for more has them installed all the same.
const MOST_REMEMBERED: usize = 500;

fn note_requested(known: &mut Vec<String>, requirements: Vec<String>) {
    for requirement in requirements {
        if known.len() < MOST_REMEMBERED && !known.contains(&requirement) {
            known.push(requirement);
        }
    }
}
