//! The second file-system boundary: rules that stay true even if a mount were wrong.
//!
//! They are about writing alone. The kernel walks up to the root for every open of a file whose
//! reading or truncation a rule is about, which made opens 1.4 × as slow; decision 36 has the figures.
//!
//! The init of a sandbox makes the rules, because only it stands in the sandbox's mounts; each interpreter enters them itself.

use std::os::fd::OwnedFd;

use landlock::{
    ABI, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};

/// The first kernel interface, Linux 5.13.
const OLDEST: ABI = ABI::V1;

/// Folders a session may write to.
const WRITABLE: [&str; 3] = [crate::root::WORK, "/tmp", "/dev/shm"];
/// Devices a session may write to.
const WRITABLE_DEVICES: [&str; 6] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/tty",
    TERMINALS,
];
/// The sandbox's own pseudo-terminals, in a folder in which nothing can be made.
const TERMINALS: &str = "/dev/pts";

/// Why there are no rules.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    #[error("could not make the landlock rules")]
    Ruleset(#[from] landlock::RulesetError),
    #[error("could not open a path for the landlock rules")]
    Path(#[from] landlock::PathFdError),
    #[error("this kernel has no landlock")]
    Absent,
}

/// Makes the rules for the mounts this process sees: write in three folders, signal and connect by
/// abstract name only within the session.
pub(crate) fn ruleset() -> Result<OwnedFd, LandlockError> {
    let written =
        |version: ABI| AccessFs::from_write(version) & !BitFlags::from(AccessFs::Truncate);
    let newest = written(ABI::V5);
    let device: BitFlags<AccessFs> = AccessFs::WriteFile | AccessFs::IoctlDev;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(written(OLDEST))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(newest)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?
        .create()?
        .set_compatibility(CompatLevel::BestEffort);
    for folder in WRITABLE {
        rules = rules.add_rule(PathBeneath::new(PathFd::new(folder)?, newest))?;
    }
    for path in WRITABLE_DEVICES {
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, device))?;
    }
    Option::<OwnedFd>::from(rules).ok_or(LandlockError::Absent)
}
