//! The host uids of sessions.
//!
//! A server that runs as root owns a block of unprivileged uids that nothing else on the host uses:
//! number 0 of the block is the warden, number *n + 1* is family *n*: one session and everything
//! that was forked from it. A server that runs as an unprivileged user has only that user's uid,
//! and its sessions share it. A session is never host uid 0.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::wire::FamilyId;

/// The first uid of all blocks. It is above the ranges that distributions and systemd assign (up to
/// 1,879,048,191) and below 2³¹, which old programs treat as negative.
const FIRST_UID: u32 = 1_900_000_000;
/// Uids in a block: the warden and 1,023 families.
const BLOCK_SIZE: u32 = 1024;
/// Number of servers that can run at the same time.
const BLOCK_COUNT: u32 = 64;

/// The uid and gid of a session inside, whatever it is outside.
pub const INSIDE_ID: u32 = 1000;

/// The identity of sessions on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Identity {
    /// Each family of sessions has its own uid from this block.
    Block { first: u32, count: u32 },
    /// Every session runs as the user of the server.
    Caller { uid: u32, gid: u32 },
}

impl Identity {
    /// Returns the uid of a family's sessions in the warden's user namespace.
    pub fn in_warden(self, family: FamilyId) -> u32 {
        match self {
            Identity::Block { .. } => family.0 + 1,
            Identity::Caller { .. } => 0,
        }
    }

    /// Returns the host uid of the sessions of a family.
    pub fn on_host(self, family: FamilyId) -> u32 {
        match self {
            Identity::Block { first, .. } => first + self.in_warden(family),
            Identity::Caller { uid, .. } => uid,
        }
    }

    /// Returns the number of families that can have an identity, which is the limit of sandboxes.
    pub fn slots(self) -> u32 {
        match self {
            Identity::Block { count, .. } => count - 1,
            Identity::Caller { .. } => BLOCK_SIZE - 1,
        }
    }

    /// Returns the lines for the warden's `uid_map` and `gid_map`.
    pub(crate) fn maps(self) -> (String, String) {
        match self {
            Identity::Block { first, count } => {
                let line = format!("0 {first} {count}\n");
                (line.clone(), line)
            }
            Identity::Caller { uid, gid } => (format!("0 {uid} 1\n"), format!("0 {gid} 1\n")),
        }
    }
}

/// An identity, reserved for the lifetime of this value.
#[derive(Debug)]
pub struct IdentityLease {
    pub identity: Identity,
    /// Locked while the server lives, so that no other server takes the same block.
    _lock: Option<File>,
}

impl IdentityLease {
    /// Reserves a free block of uids when running as root, otherwise uses the caller's own uid.
    pub fn take(runtime: &Path) -> io::Result<IdentityLease> {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        if !uid.is_root() {
            return Ok(IdentityLease {
                identity: Identity::Caller {
                    uid: uid.as_raw(),
                    gid: gid.as_raw(),
                },
                _lock: None,
            });
        }
        let folder = runtime.join("uids");
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&folder)?;
        for number in 0..BLOCK_COUNT {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(folder.join(number.to_string()))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    return Ok(IdentityLease {
                        identity: Identity::Block {
                            first: FIRST_UID + number * BLOCK_SIZE,
                            count: BLOCK_SIZE,
                        },
                        _lock: Some(file),
                    });
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!(
            "all {BLOCK_COUNT} blocks of user ids are in use by other servers"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_of_a_block_have_distinct_host_uids_and_none_is_the_warden() {
        let identity = Identity::Block {
            first: 1_900_000_000,
            count: 4,
        };
        let uids: Vec<u32> = (0..identity.slots())
            .map(|family| identity.on_host(FamilyId(family)))
            .collect();
        assert_eq!(uids, [1_900_000_001, 1_900_000_002, 1_900_000_003]);
    }

    #[test]
    fn no_block_contains_root_or_a_number_that_looks_negative() {
        let last = u64::from(FIRST_UID) + u64::from(BLOCK_SIZE) * u64::from(BLOCK_COUNT);
        const { assert!(FIRST_UID > 0) };
        assert!(last < 1 << 31);
    }

    #[test]
    fn an_ordinary_caller_is_the_only_id_in_its_map() {
        let identity = Identity::Caller { uid: 1234, gid: 99 };
        assert_eq!(
            identity.maps(),
            ("0 1234 1\n".to_owned(), "0 99 1\n".to_owned())
        );
        assert_eq!(identity.on_host(FamilyId(3)), 1234);
    }
}
