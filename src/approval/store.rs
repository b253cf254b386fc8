//! The approval store (`ApprovalStore`): permanent grants, in a file owned by the operator.
//!
//! One line per grant, with the name of the owner who gave it; it applies to that owner only. The
//! operator may read and remove lines while the server does not run:
//!
//! ```yaml
//! - {for: "local", allow: {package: "numpy"}}
//! - {for: "local", allow: {server: "github", tool: "create_issue"}, fingerprint: "9f86d081…"}
//! ```
//!
//! A grant for a tool applies to exactly the tool that was inspected: with another definition, or
//! behind another command or address, it is another tool. Lines about tools without a fingerprint
//! are ignored, and are dropped when the file is next written.
//!
//! Nothing is written unless the operator enabled it. The file is replaced as a whole, so that a
//! crash leaves the old one or the new one.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tracing::warn;

use super::shown::quoted;
use super::{BadRule, Effect, Fingerprint, PermissionScope, PolicyRule, Subject};

/// Limit of stored grants; beyond it, an owner who answers "always" is asked again in the next
/// session.
const MAX_KEPT: usize = 10_000;

/// The largest file that is read.
const LARGEST: u64 = 16 << 20;

/// Permanent grants.
#[derive(Debug, Default)]
pub struct ApprovalStore {
    /// `None` when the operator wants nothing stored.
    path: Option<PathBuf>,
    entries: Mutex<Vec<Entry>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    owner: String,
    rule: PolicyRule,
    /// The identity of the tool, if the grant is for one.
    fingerprint: Option<Fingerprint>,
}

impl Entry {
    /// Returns whether a grant for tools is bound to a fingerprint; true for other grants.
    fn is_bound(&self) -> bool {
        !self.rule.is_about_tools() || self.fingerprint.is_some()
    }

    fn allows(&self, scope: &PermissionScope, subject: &Subject) -> bool {
        match scope {
            PermissionScope::Tool { fingerprint, .. } => {
                *fingerprint == self.fingerprint && self.rule.fits(subject)
            }
            PermissionScope::Package { name } => self.rule.fits_package(name),
            PermissionScope::Command { .. } | PermissionScope::Domain { .. } => {
                self.rule.fits(subject)
            }
        }
    }
}

/// Why the store could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ApprovalStoreError {
    #[error("could not use {} for approvals that are remembered", path.display())]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{} is not a list of approvals: {why}", path.display())]
    Form { path: PathBuf, why: String },
    #[error("number {number} in {} is not an approval", path.display())]
    Entry {
        path: PathBuf,
        number: usize,
        #[source]
        cause: BadRule,
    },
}

impl ApprovalStore {
    /// Opens the store at this path. A missing file is an empty store.
    pub fn open(path: &Path) -> Result<ApprovalStore, ApprovalStoreError> {
        let failed = |cause| ApprovalStoreError::File {
            path: path.to_owned(),
            cause,
        };
        let text = match std::fs::metadata(path) {
            Ok(found) if found.len() > LARGEST => {
                return Err(failed(io::ErrorKind::FileTooLarge.into()));
            }
            Ok(_) => std::fs::read_to_string(path).map_err(failed)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut entries = parse(path, &text)?;
        let all = entries.len();
        entries.retain(Entry::is_bound);
        if entries.len() < all {
            warn!(
                ignored = all - entries.len(),
                "remembered approvals of tools that do not say which tool was meant are not \
                 counted; whoever gave them is asked again"
            );
        }
        Ok(ApprovalStore {
            path: Some(path.to_owned()),
            entries: Mutex::new(entries),
        })
    }

    /// Returns whether grants can be stored.
    pub fn is_kept(&self) -> bool {
        self.path.is_some()
    }

    /// The path of the store.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Returns whether this owner has permanently granted everything about a subject.
    pub fn covers(&self, owner: &str, subject: &Subject) -> bool {
        let entries = self.entries();
        let theirs = || entries.iter().filter(|entry| entry.owner == owner);
        let needed = PermissionScope::of(subject);
        !needed.is_empty()
            && needed
                .iter()
                .all(|scope| theirs().any(|entry| entry.allows(scope, subject)))
    }

    /// Stores a permanent grant of an owner for a subject. If it cannot be written, it applies
    /// until this process ends.
    pub fn remember(&self, owner: &str, subject: &Subject) -> Result<(), ApprovalStoreError> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let mut entries = self.entries();
        for scope in PermissionScope::of(subject) {
            let rule = scope.rule();
            let fingerprint = match scope {
                PermissionScope::Tool { fingerprint, .. } => fingerprint,
                _ => None,
            };
            let entry = Entry {
                owner: owner.to_owned(),
                rule,
                fingerprint,
            };
            if !entry.is_bound() || entries.contains(&entry) {
                continue;
            }
            // A grant for the tool's previous identity is replaced.
            entries.retain(|other| other.owner != entry.owner || other.rule != entry.rule);
            if entries.len() < MAX_KEPT {
                entries.push(entry);
            }
        }
        // The lock is held during the write: of two concurrent writers, the second writes both
        // grants.
        write(path, &entries).map_err(|cause| ApprovalStoreError::File {
            path: path.clone(),
            cause,
        })
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse(path: &Path, text: &str) -> Result<Vec<Entry>, ApprovalStoreError> {
    let form = |why: String| ApprovalStoreError::Form {
        path: path.to_owned(),
        why,
    };
    let all: Option<Vec<Value>> = serde_saphyr::from_str(text).map_err(|error| {
        form(
            error
                .to_string()
                .lines()
                .next()
                .unwrap_or_default()
                .to_owned(),
        )
    })?;
    let entry = |(number, value): (usize, Value)| {
        let bad = |cause| ApprovalStoreError::Entry {
            path: path.to_owned(),
            number,
            cause,
        };
        let Value::Object(mut members) = value else {
            return Err(bad(BadRule::Form));
        };
        let Some(Value::String(owner)) = members.remove("for") else {
            return Err(bad(BadRule::Form));
        };
        let fingerprint = match members.remove("fingerprint") {
            None => None,
            Some(Value::String(text)) => {
                Some(Fingerprint::parse(&text).ok_or_else(|| bad(BadRule::Fingerprint))?)
            }
            Some(_) => return Err(bad(BadRule::Fingerprint)),
        };
        let rule = PolicyRule::parse(&Value::Object(members)).map_err(bad)?;
        // Denials belong in the configuration, where they cannot be overlooked.
        if rule.effect == Effect::Allow {
            Ok(Entry {
                owner,
                rule,
                fingerprint,
            })
        } else {
            Err(bad(BadRule::Form))
        }
    };
    (1..).zip(all.unwrap_or_default()).map(entry).collect()
}

fn write(path: &Path, entries: &[Entry]) -> io::Result<()> {
    let mut text =
        "# What was allowed for good, and by whom. Change it while the server does not run.\n"
            .to_owned();
    for Entry {
        owner,
        rule,
        fingerprint,
    } in entries
    {
        let bound = fingerprint
            .as_ref()
            .map(|made| format!(", fingerprint: \"{made}\""))
            .unwrap_or_default();
        let _ = writeln!(text, "- {{for: {}, {rule}{bound}}}", quoted(owner));
    }
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    // Only the owner of the server can read such a file; `persist` replaces it atomically.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use serde_json::Map;

    use super::*;

    fn tool(name: &str) -> Subject {
        made(name, "as it was")
    }

    fn made(name: &str, of: &str) -> Subject {
        let fingerprint = Some(Fingerprint::of(&[of.as_bytes()]));
        Subject::Tool {
            server: "s".to_owned(),
            tool: name.to_owned(),
            arguments: Map::new(),
            fingerprint,
        }
    }

    fn install(requirements: &[&str]) -> Subject {
        Subject::Install {
            requirements: requirements.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn what_was_allowed_for_good_is_there_after_a_restart_for_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("approvals.yaml");
        let store = ApprovalStore::open(&path).unwrap();
        assert!(!store.covers("ann", &tool("t")));
        let hostile = Subject::Shell {
            command: "a: {*} # \"\n\u{202e}'\\".to_owned(),
            kind: "!".to_owned(),
        };
        for subject in [tool("t"), install(&["numpy", "pandas>2"]), hostile.clone()] {
            store.remember("ann \"}", &subject).unwrap();
            store.remember("ann \"}", &subject).unwrap();
        }
        let again = ApprovalStore::open(&path).unwrap();
        for subject in [tool("t"), install(&["pandas", "numpy==1"]), hostile] {
            assert!(again.covers("ann \"}", &subject), "{subject:?}");
            assert!(!again.covers("ben", &subject));
        }
        assert!(
            !again.covers("ann \"}", &tool("u"))
                && !again.covers("ann \"}", &install(&["numpy", "polars"]))
        );
        assert_eq!(
            std::fs::read_to_string(&path).unwrap().lines().count(),
            5,
            "each is written once"
        );
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn without_a_place_nothing_is_remembered() {
        let store = ApprovalStore::default();
        store.remember("ann", &tool("t")).unwrap();
        assert!(!store.covers("ann", &tool("t")) && !store.is_kept());
    }

    #[test]
    fn a_book_that_cannot_be_understood_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("approvals.yaml");
        for bad in [
            "x: 1",
            "- x",
            "- {allow: {tool: t}}",
            "- {for: ann, deny: {tool: t}}",
            "- {for: ann, allow: {tol: t}}",
            "- {for: ann, allow: {tool: t}, fingerprint: 1}",
            "- {for: ann, allow: {tool: t}, fingerprint: abc}",
            "- [",
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(ApprovalStore::open(&path).is_err(), "{bad}");
        }
        std::fs::write(&path, "- {for: ann, allow: {package: '*'}}").unwrap();
        assert!(
            ApprovalStore::open(&path)
                .unwrap()
                .covers("ann", &install(&["anything"]))
        ); // Control, and the operator's own words.
    }

    #[test]
    fn a_tool_that_is_another_one_is_not_covered_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("approvals.yaml");
        let store = ApprovalStore::open(&path).unwrap();
        store.remember("ann", &made("t", "one")).unwrap();
        for store in [store, ApprovalStore::open(&path).unwrap()] {
            assert!(store.covers("ann", &made("t", "one"))); // Control.
            assert!(!store.covers("ann", &made("t", "other")));
        }
        // The previous identity is no longer granted once another one was, even if it comes back.
        let store = ApprovalStore::open(&path).unwrap();
        store.remember("ann", &made("t", "other")).unwrap();
        assert!(
            store.covers("ann", &made("t", "other")) && !store.covers("ann", &made("t", "one"))
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
    }

    #[test]
    fn a_permission_for_a_tool_that_does_not_say_which_is_not_honoured_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("approvals.yaml");
        let old =
            "- {for: ann, allow: {server: s, tool: t}}\n- {for: ann, allow: {package: numpy}}\n";
        std::fs::write(&path, old).unwrap();
        let store = ApprovalStore::open(&path).unwrap();
        let unknown = Subject::Tool {
            server: "s".to_owned(),
            tool: "t".to_owned(),
            arguments: Map::new(),
            fingerprint: None,
        };
        assert!(!store.covers("ann", &tool("t")) && !store.covers("ann", &unknown));
        assert!(store.covers("ann", &install(&["numpy"]))); // Control.
        store.remember("ann", &unknown).unwrap();
        assert!(
            !store.covers("ann", &unknown),
            "nor is what nobody can name remembered"
        );
        assert!(!std::fs::read_to_string(&path).unwrap().contains("tool:"));
    }
}
