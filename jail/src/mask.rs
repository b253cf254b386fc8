//! Files in the operator's folders that a session must not read, or must not change.
//!
//! A mount covers each of them in every sandbox. Processes of that sandbox can neither rename, nor
//! replace, nor remove a mount point, and cannot link to the covered file. Parent folders are bind
//! mounted onto themselves, so that they cannot be renamed either: in the next sandbox the file
//! would have another name, which is not covered.
//!
//! Replacing such a file from outside removes the cover, because the kernel keeps it with the old
//! file. `apply` is then called again in the existing sandboxes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountAttrFlags, MoveMountFlags, OpenTreeFlags};
use rustix::process::{Gid, Uid, WaitOptions, WaitStatus};

use crate::identity::INSIDE_ID;
use crate::root::JailSetupError;
use crate::sys::{self, ForkSide, MountAttr};
use crate::wire::{Mask, MaskRule};

/// An empty file that no user may read. It is in the root of the jail.
pub(crate) const UNREADABLE_FILE: &str = "/var/masked";
/// An empty folder.
const EMPTY_FOLDER: &str = "/var/empty";

/// Covers the existing paths in this mount namespace that are not covered yet.
pub(crate) fn apply(masks: &[Mask]) -> Result<(), JailSetupError> {
    for mask in masks {
        let attempt = || format!("could not protect {}", mask.inside.display());
        apply_one(mask).map_err(|cause| JailSetupError::new(attempt(), cause))?;
    }
    Ok(())
}

/// Covers again the files that were replaced from outside, in the mounts of one sandbox.
pub(crate) fn reapply(masks: &[Mask], family: &OwnedFd, mounts: &OwnedFd) -> io::Result<()> {
    match sys::clone_process(0)? {
        ForkSide::Child => {
            let applied =
                enter(family, mounts).and_then(|()| apply(masks).map_err(io::Error::other));
            sys::exit_now(i32::from(applied.is_err()));
        }
        ForkSide::Parent(child) => {
            match rustix::process::waitpid(Some(child), WaitOptions::empty())? {
                Some((_, status)) if WaitStatus::exit_status(status) == Some(0) => Ok(()),
                _ => Err(io::Error::other("a file could not be covered again")),
            }
        }
    }
}

fn enter(family: &OwnedFd, mounts: &OwnedFd) -> io::Result<()> {
    for namespace in [family, mounts] {
        rustix::thread::move_into_link_name_space(namespace.as_fd(), None)?;
    }
    // A newly created empty file must belong to the family's user. The capabilities are kept: the
    // kernel clears them when a process leaves user 0, which does not exist in here.
    let (uid, gid) = (Uid::from_raw(INSIDE_ID), Gid::from_raw(INSIDE_ID));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

fn apply_one(mask: &Mask) -> io::Result<()> {
    let Some(name) = mask.inside.file_name() else {
        return Err(Errno::INVAL.into());
    };
    let walk = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut here = rustix::fs::openat(CWD, "/", walk | OFlags::DIRECTORY, Mode::empty())?;
    for part in mask.inside.parent().unwrap_or(Path::new("/")).components() {
        let Component::Normal(part) = part else {
            continue;
        };
        here = match rustix::fs::openat(&here, part, walk | OFlags::DIRECTORY, Mode::empty()) {
            Ok(next) if is_mount_root(&next)? => next,
            Ok(next) => cover_with_itself(&next, MountAttrFlags::empty())?,
            // Nothing readable exists there.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
    }
    let found = match rustix::fs::openat(&here, name, walk, Mode::empty()) {
        Err(Errno::NOENT) if mask.rule == MaskRule::EnvironmentFile => {
            let create =
                OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            match rustix::fs::openat(&here, name, create, Mode::from(0o600)) {
                Ok(_) | Err(Errno::EXIST) => rustix::fs::openat(&here, name, walk, Mode::empty())?,
                // The session cannot create it either.
                Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    let is_folder = file_type(&found)?.is_dir();
    match mask.rule {
        MaskRule::EnvironmentFile if is_folder && is_mount_root(&found)? => Ok(()),
        // A virtual environment with that name: it can be used but not renamed.
        MaskRule::EnvironmentFile if is_folder => {
            cover_with_itself(&found, MountAttrFlags::empty()).map(drop)
        }
        MaskRule::ReadOnly if is_mount_root(&found)? && is_read_only(&found)? => Ok(()),
        MaskRule::ReadOnly => {
            cover_with_itself(&found, MountAttrFlags::MOUNT_ATTR_RDONLY).map(drop)
        }
        MaskRule::EnvironmentFile | MaskRule::Hidden => cover_with(
            if is_folder {
                EMPTY_FOLDER
            } else {
                UNREADABLE_FILE
            },
            &found,
        ),
    }
}

fn file_type(place: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(place)?.st_mode))
}

fn is_mount_root(place: &OwnedFd) -> io::Result<bool> {
    let found = rustix::fs::statx(place, "", AtFlags::EMPTY_PATH, StatxFlags::empty())?;
    Ok(found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn is_read_only(place: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::fs::fstatvfs(place)?
        .f_flag
        .contains(rustix::fs::StatVfsMountFlags::RDONLY))
}

/// Mounts a file or folder of the jail's root over a path, unless it is already there.
fn cover_with(cover: &str, place: &OwnedFd) -> io::Result<()> {
    let (cover_is, place_is) = (rustix::fs::stat(cover)?, rustix::fs::fstat(place)?);
    if (cover_is.st_dev, cover_is.st_ino) == (place_is.st_dev, place_is.st_ino) {
        return Ok(());
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = rustix::mount::open_tree(CWD, cover, flags)?;
    attach(
        &copy,
        place,
        MountAttrFlags::MOUNT_ATTR_RDONLY | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// Bind mounts a path onto itself and returns the new mount.
fn cover_with_itself(place: &OwnedFd, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE
        | OpenTreeFlags::AT_EMPTY_PATH;
    let copy = rustix::mount::open_tree(place, "", flags)?;
    attach(&copy, place, attributes)?;
    Ok(copy)
}

fn attach(mount: &OwnedFd, place: &OwnedFd, attributes: MountAttrFlags) -> io::Result<()> {
    if !attributes.is_empty() {
        let change = MountAttr {
            attr_set: u64::from(attributes.bits()),
            ..MountAttr::default()
        };
        sys::mount_setattr(mount, &change)?;
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, "", place, "", flags)?)
}
