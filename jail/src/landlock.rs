//! The second file-system boundary: rules that hold even if a mount is wrong.
//!
//! They restrict only writing. If a rule covers reading or truncation, the kernel walks up to the
//! root at every open of a file, which made opens 1.4 × as slow; decision 36 has the figures.
//!
//! The init of a sandbox creates the rules, because only it is in the sandbox's mounts; each
//! interpreter applies them to itself.

use std::os::fd::OwnedFd;

use landlock::{
    ABI, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};

/// The first kernel interface, Linux 5.13.
const OLDEST_ABI: ABI = ABI::V1;

/// Folders a session may write to.
const WRITABLE_FOLDERS: [&str; 3] = [crate::root::WORK, "/tmp", "/dev/shm"];
/// Devices a session may write to.
const WRITABLE_DEVICES: [&str; 6] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/tty",
    TERMINALS,
];
/// The sandbox's own pseudo-terminals, in a folder in which no file can be created.
const TERMINALS: &str = "/dev/pts";

/// Why the rules could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    #[error("could not make the landlock rules")]
    Ruleset(#[from] landlock::RulesetError),
    #[error("could not open a path for the landlock rules")]
    Path(#[from] landlock::PathFdError),
    #[error("this kernel has no landlock")]
    Absent,
}

/// Creates the rules for the mounts of this process: write in three folders, signal and connect to
/// abstract sockets only within the session.
pub(crate) fn ruleset() -> Result<OwnedFd, LandlockError> {
    let written =
        |version: ABI| AccessFs::from_write(version) & !BitFlags::from(AccessFs::Truncate);
    let newest = written(ABI::V5);
    let device: BitFlags<AccessFs> = AccessFs::WriteFile | AccessFs::IoctlDev;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(written(OLDEST_ABI))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(newest)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?
        .create()?
        .set_compatibility(CompatLevel::BestEffort);
    for folder in WRITABLE_FOLDERS {
        rules = rules.add_rule(PathBeneath::new(PathFd::new(folder)?, newest))?;
    }
    for path in WRITABLE_DEVICES {
        rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, device))?;
    }
    Option::<OwnedFd>::from(rules).ok_or(LandlockError::Absent)
}
