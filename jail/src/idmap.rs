//! Operator folders that appear as owned by the session, on a server that runs as root.
//!
//! A session's uid owns nothing on the host, so it could not write to an operator's folder. An
//! id-mapped mount shows the folder's owner as that session's uid, in both directions, only for
//! this mount.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::mount::MountAttrFlags;
use rustix::process::{Signal, WaitOptions};

use crate::root::{self, DetachedMount, JailSetupError};
use crate::sys::{self, ForkSide, MountAttr};
use crate::wire::OperatorMount;

/// From `linux/mount.h`.
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;

/// A user and a group.
pub type Ids = (u32, u32);

/// Opens one operator mount so that the owner of the host path appears as `host_id`.
pub(crate) fn open(mount: &OperatorMount, host_id: u32) -> Result<DetachedMount, JailSetupError> {
    let attempt = || {
        format!(
            "could not give the session the folder mounted at {}",
            mount.inside.display()
        )
    };
    let tree = root::open_tree(&mount.host, &mount.inside, root::operator_attributes(mount))?;
    map_owner(&tree, &mount.host, (host_id, host_id))
        .map_err(|cause| JailSetupError::new(attempt(), cause))?;
    Ok(tree)
}

/// Checks whether a folder can be shown as owned by another user.
pub fn check(folder: &Path, user: Ids) -> io::Result<()> {
    mapped(folder, user).map(drop)
}

/// Mounts a folder at a second path, where its owner appears as `user`, until that mount is
/// removed.
pub fn attach(folder: &Path, place: &Path, user: Ids) -> io::Result<()> {
    root::attach(mapped(folder, user)?.as_mount(), &place.to_string_lossy())
}

fn mapped(folder: &Path, user: Ids) -> io::Result<DetachedMount> {
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    let tree = root::open_tree(folder, folder, attributes).map_err(JailSetupError::into_cause)?;
    map_owner(&tree, folder, user)?;
    Ok(tree)
}

/// Makes the owner of a host path appear as `user` in a detached mount of it.
fn map_owner(tree: &DetachedMount, host: &Path, user: Ids) -> io::Result<()> {
    let owner = fs::metadata(host)?;
    let namespace = user_namespace((owner.uid(), owner.gid()), user)?;
    let change = MountAttr {
        attr_set: MOUNT_ATTR_IDMAP,
        userns_fd: namespace.as_raw_fd() as u64,
        ..MountAttr::default()
    };
    sys::mount_setattr(tree.as_mount(), &change)
}

/// Creates a user namespace that only carries a map: the ids of `owner` in it are those of `user`
/// outside.
fn user_namespace(owner: Ids, user: Ids) -> io::Result<OwnedFd> {
    let (gate, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let child = match sys::clone_process(libc::CLONE_NEWUSER)? {
        ForkSide::Child => {
            drop(held);
            // Waits until the parent has opened the namespace and closes its end.
            let _ = rustix::io::read(&gate, &mut [0u8; 1]);
            sys::exit_now(0);
        }
        ForkSide::Parent(pid) => pid,
    };
    let folder = format!("/proc/{}", child.as_raw_pid());
    let opened = fs::write(
        format!("{folder}/uid_map"),
        format!("{} {} 1\n", owner.0, user.0),
    )
    .and_then(|()| {
        fs::write(
            format!("{folder}/gid_map"),
            format!("{} {} 1\n", owner.1, user.1),
        )
    })
    .and_then(|()| fs::File::open(format!("{folder}/ns/user")));
    drop(held);
    let _ = rustix::process::kill_process(child, Signal::KILL);
    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    opened.map(OwnedFd::from)
}
