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

use super::sandbox::Groups;
use crate::sandbox::{Exit, OuterMemory, SandboxLimits};

/// A baseline for later comparison, and the groups it covers.
pub(super) struct MemoryWatch {
    groups: Groups,
    memory: u64,
    family_memory: u64,
    before: Counted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    /// Counts of the session's group, and whether its family has ever reached its limit.
    Groups {
        own: OutOfMemory,
        is_family_full: bool,
    },
    /// Kills around this process.
    Around(u64),
}

/// Where memory ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shortage {
    Session,
    Family,
    Machine,
}

impl MemoryWatch {
    /// Takes the baseline.
    pub(super) fn begin(groups: &Groups, limits: &SandboxLimits) -> MemoryWatch {
        MemoryWatch {
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
        Some(match shortage(self.before, count(&self.groups))? {
            Shortage::Session => Exit::OutOfMemory {
                limit: self.memory,
                files_kept,
            },
            Shortage::Family => Exit::OutOfMemoryOutside {
                whose: OuterMemory::Family {
                    limit: self.family_memory,
                },
                files_kept,
            },
            Shortage::Machine => Exit::OutOfMemoryOutside {
                whose: OuterMemory::Machine,
                files_kept,
            },
        })
    }
}

fn count(groups: &Groups) -> Counted {
    match &groups.own {
        Some(own) => Counted::Groups {
            own: own.out_of_memory(),
            is_family_full: groups
                .family
                .as_ref()
                .is_some_and(|family| family.out_of_memory().is_at_own_limit()),
        },
        None => Counted::Around(cgroup::kills_around_this_process()),
    }
}

fn shortage(before: Counted, now: Counted) -> Option<Shortage> {
    match (before, now) {
        (
            Counted::Groups { own: before, .. },
            Counted::Groups {
                own: now,
                is_family_full,
            },
        ) => {
            if now.happened_since(before) {
                Some(Shortage::Session)
            } else if !now.happened_outside_since(before) {
                None
            } else if is_family_full {
                Some(Shortage::Family)
            } else {
                Some(Shortage::Machine)
            }
        }
        (Counted::Around(before), Counted::Around(now)) if now > before => Some(Shortage::Machine),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_limit_that_was_met_is_the_reason() {
        let groups = |kills, at_own_limit, is_family_full| Counted::Groups {
            own: OutOfMemory::new(kills, at_own_limit),
            is_family_full,
        };
        let before = groups(1, false, false);
        for (now, expected) in [
            (groups(1, false, false), None),
            (groups(1, false, true), None),
            (groups(2, true, false), Some(Shortage::Session)),
            (groups(2, true, true), Some(Shortage::Session)),
            (groups(2, false, true), Some(Shortage::Family)),
            (groups(2, false, false), Some(Shortage::Machine)),
        ] {
            assert_eq!(shortage(before, now), expected, "{now:?}");
        }
        assert_eq!(
            shortage(Counted::Around(3), Counted::Around(4)),
            Some(Shortage::Machine)
        );
        assert_eq!(
            shortage(Counted::Around(3), Counted::Around(3)),
            None,
            "a kill by hand is not counted"
        );
    }
}
