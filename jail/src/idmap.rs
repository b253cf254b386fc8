//! Operator folders that belong to the session, on a server that runs as root.
//!
//! A session's uid owns nothing on the host, so it could not write to an operator's folder. An id-mapped mount shows the folder's
//! owner as that session's uid, in both directions, for this mount alone.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rustix::process::{Signal, WaitOptions};

use crate::root::{self, RootError, Tree};
use crate::sys::{self, Forked, MountAttributes};
use crate::wire::OperatorMount;

/// `MOUNT_ATTR_IDMAP` of the kernel.
const IDMAP: u64 = 0x0010_0000;

/// Opens one operator mount so that the owner of the host path appears as `host_id`.
pub(crate) fn open(mount: &OperatorMount, host_id: u32) -> Result<Tree, RootError> {
    let attempt = || {
        format!(
            "could not give the session the folder mounted at {}",
            mount.inside.display()
        )
    };
    let failed = |cause: io::Error| RootError::new(attempt(), cause);
    let owner = fs::metadata(&mount.host).map_err(failed)?;
    let tree = root::open_tree(&mount.host, &mount.inside, root::operator_attributes(mount))?;
    let namespace = user_namespace((owner.uid(), owner.gid()), host_id).map_err(failed)?;
    let change = MountAttributes {
        set: IDMAP,
        user_namespace: namespace.as_raw_fd() as u64,
        ..MountAttributes::default()
    };
    sys::mount_setattr(tree.as_mount(), &change).map_err(failed)?;
    Ok(tree)
}

/// Makes a user namespace that only carries a map: the ids of `owner` in it are `host_id` outside.
fn user_namespace(owner: (u32, u32), host_id: u32) -> io::Result<OwnedFd> {
    let (gate, held) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let child = match sys::clone_process(libc::CLONE_NEWUSER)? {
        Forked::Child => {
            drop(held);
            // Stays until the parent has opened the namespace and closes its end.
            let _ = rustix::io::read(&gate, &mut [0u8; 1]);
            sys::exit_now(0);
        }
        Forked::Parent(pid) => pid,
    };
    let folder = format!("/proc/{}", child.as_raw_pid());
    let opened = fs::write(
        format!("{folder}/uid_map"),
        format!("{} {host_id} 1\n", owner.0),
    )
    .and_then(|()| {
        fs::write(
            format!("{folder}/gid_map"),
            format!("{} {host_id} 1\n", owner.1),
        )
    })
    .and_then(|()| fs::File::open(format!("{folder}/ns/user")));
    drop(held);
    let _ = rustix::process::kill_process(child, Signal::KILL);
    let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
    opened.map(OwnedFd::from)
}
