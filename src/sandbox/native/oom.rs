//! Which memory limit was reached, when the kernel killed a process of a sandbox.
//!
//! ```text
//! the machine, or a control group that the server is in
//!   └─ a family: a session with its checkpoints and forks
//!        └─ a session
//! ```
//!
//! The kernel counts a kill in the group of the chosen process, and the shortage in the group whose
//! limit was reached. Without control groups for sessions, only the kills around this server are
//! known.

use cellblock_jail::cgroup::{self, OutOfMemory};

use super::sandbox::SandboxCgroups;
use crate::sandbox::{Exit, OuterMemory, SandboxLimits};

/// A baseline for later comparison, and the groups it covers.
pub(super) struct OomWatch {
    groups: SandboxCgroups,
    memory: u64,
    family_memory: u64,
    before: OomCounts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OomCounts {
    /// Counts of the session's group, and whether its family has ever reached its limit.
    SandboxCgroups {
        own: OutOfMemory,
        is_family_full: bool,
    },
    /// Kills around this process.
    Around(u64),
}

/// Where memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OomCause {
    Session,
    Family,
    Machine,
}

impl OomWatch {
    /// Takes the baseline.
    pub(super) fn begin(groups: &SandboxCgroups, limits: &SandboxLimits) -> OomWatch {
        OomWatch {
            groups: groups.clone(),
            memory: limits.memory,
            family_memory: limits.family_memory,
            before: count(groups),
        }
    }

    /// Returns the exit of a process that was killed, if memory has run out since the baseline.
    pub(super) fn exit(&self) -> Option<Exit> {
        // Only a process ended; the folder belongs to its sandbox.
        let files_kept = true;
        Some(match oom_cause(self.before, count(&self.groups))? {
            OomCause::Session => Exit::OutOfMemory {
                limit: self.memory,
                files_kept,
            },
            OomCause::Family => Exit::OutOfMemoryOutside {
                whose: OuterMemory::Family {
                    limit: self.family_memory,
                },
                files_kept,
            },
            OomCause::Machine => Exit::OutOfMemoryOutside {
                whose: OuterMemory::Machine,
                files_kept,
            },
        })
    }
}

fn count(groups: &SandboxCgroups) -> OomCounts {
    match &groups.own {
        Some(own) => OomCounts::SandboxCgroups {
            own: own.out_of_memory(),
            is_family_full: groups
                .family
                .as_ref()
                .is_some_and(|family| family.out_of_memory().is_at_own_limit()),
        },
        None => OomCounts::Around(cgroup::kills_around_this_process()),
    }
}

fn oom_cause(before: OomCounts, now: OomCounts) -> Option<OomCause> {
    match (before, now) {
        (
            OomCounts::SandboxCgroups { own: before, .. },
            OomCounts::SandboxCgroups {
                own: now,
                is_family_full,
            },
        ) => {
            if now.happened_since(before) {
                Some(OomCause::Session)
            } else if !now.happened_outside_since(before) {
                None
            } else if is_family_full {
                Some(OomCause::Family)
            } else {
                Some(OomCause::Machine)
            }
        }
        (OomCounts::Around(before), OomCounts::Around(now)) if now > before => {
            Some(OomCause::Machine)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_limit_that_was_met_is_the_reason() {
        let groups = |kills, at_own_limit, is_family_full| OomCounts::SandboxCgroups {
            own: OutOfMemory::new(kills, at_own_limit),
            is_family_full,
        };
        let before = groups(1, false, false);
        for (now, expected) in [
            (groups(1, false, false), None),
            (groups(1, false, true), None),
            (groups(2, true, false), Some(OomCause::Session)),
            (groups(2, true, true), Some(OomCause::Session)),
            (groups(2, false, true), Some(OomCause::Family)),
            (groups(2, false, false), Some(OomCause::Machine)),
        ] {
            assert_eq!(oom_cause(before, now), expected, "{now:?}");
        }
        assert_eq!(
            oom_cause(OomCounts::Around(3), OomCounts::Around(4)),
            Some(OomCause::Machine)
        );
        assert_eq!(
            oom_cause(OomCounts::Around(3), OomCounts::Around(3)),
            None,
            "a kill by hand is not counted"
        );
    }
}
