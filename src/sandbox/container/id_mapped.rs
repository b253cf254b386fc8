//! The operator's folders that belong to another user than the session's, such as root.
//!
//! A server that runs as root shows such a folder at a path of its own, where an id-mapped mount
//! makes the owner appear as the session's user. The engine binds that path. A started container
//! has its own mount, so the path is then removed. Later removals of files by path therefore cannot
//! reach the operator's files there.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::mount::UnmountFlags;
use tracing::warn;

use super::ContainerBind;
use super::spec::User;

/// Mounts that exist until a container has started.
#[derive(Default)]
pub(super) struct IdMapped {
    folders: Vec<Folder>,
}

struct Folder {
    host: PathBuf,
    place: PathBuf,
}

impl IdMapped {
    /// Mounts every folder of another owner. Where the mount fails, a folder that `user` can use as
    /// it is stays without one. `place` returns unused paths.
    pub(super) fn mount(
        binds: &[ContainerBind],
        user: User,
        place: impl Fn(usize) -> PathBuf,
    ) -> io::Result<IdMapped> {
        let mut mapped = IdMapped::default();
        for bind in binds {
            let found = fs::metadata(&bind.host)?;
            if !found.is_dir() || found.uid() == user.uid {
                continue;
            }
            // Mount points for other mounts are made beforehand. The engine, which is root, could
            // not make them in this mount, because root is not mapped to a user there.
            for below in binds
                .iter()
                .filter_map(|other| other.inside.strip_prefix(&bind.inside).ok())
            {
                cellblock_jail::root::make_folder(&bind.host, below)?;
            }
            let folder = Folder {
                host: bind.host.clone(),
                place: place(mapped.folders.len()),
            };
            // The directory below the mount is inaccessible to everyone. An engine that does not
            // see this server's mounts shows that directory, and sessions fail instead of working
            // in an empty folder.
            DirBuilder::new().mode(0o000).create(&folder.place)?;
            match cellblock_jail::idmap::attach(&folder.host, &folder.place, (user.uid, user.gid)) {
                Ok(()) => mapped.folders.push(folder),
                Err(error) => {
                    fs::remove_dir(&folder.place)?;
                    if !user.may_use(&found, bind.writable) {
                        return Err(error);
                    }
                }
            }
        }
        Ok(mapped)
    }

    /// Replaces the paths of these folders, and of paths below them, in what a container shows.
    /// `binds` are the operator's folders: one of them may lie in another and have a different
    /// owner.
    pub(super) fn translate(
        &self,
        mut shown: Vec<ContainerBind>,
        binds: &[ContainerBind],
    ) -> Vec<ContainerBind> {
        for bind in &mut shown {
            let around = binds
                .iter()
                .map(|bind| &bind.host)
                .filter(|host| bind.host.starts_with(host));
            let Some(nearest) = around.max_by_key(|host| host.as_os_str().len()) else {
                continue;
            };
            let mapped = self.folders.iter().find(|folder| folder.host == *nearest);
            if let Some((folder, below)) = mapped.zip(bind.host.strip_prefix(nearest).ok()) {
                // An empty rest would end the path with a slash.
                let is_itself = below.as_os_str().is_empty();
                bind.host = if is_itself {
                    folder.place.clone()
                } else {
                    folder.place.join(below)
                };
            }
        }
        shown
    }
}

impl Drop for IdMapped {
    fn drop(&mut self) {
        for folder in &self.folders {
            if let Err(error) = remove(&folder.place) {
                warn!(place = %folder.place.display(), %error, "a mount is left");
            }
        }
    }
}

/// Returns whether `user` can use a folder as it is, or could if it appeared as theirs.
pub(super) fn is_usable(bind: &ContainerBind, user: User) -> bool {
    // The engine rejects a missing folder.
    let Ok(found) = fs::metadata(&bind.host) else {
        return true;
    };
    let owner = User {
        uid: found.uid(),
        gid: found.gid(),
    };
    let may_be_mapped = || cellblock_jail::idmap::check(&bind.host, (user.uid, user.gid)).is_ok();
    user.may_use(&found, bind.writable)
        || found.is_dir() && owner.may_use(&found, bind.writable) && may_be_mapped()
}

/// Removes a mount and its mount point. The mounted files are kept: only an empty folder is
/// removed.
pub(super) fn remove(place: &Path) -> io::Result<()> {
    // If nothing was mounted, or the mount is still there, the next step reports it.
    let _ = rustix::mount::unmount(place, UnmountFlags::DETACH);
    fs::remove_dir(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(host: &str) -> ContainerBind {
        ContainerBind {
            host: host.into(),
            inside: "/work".into(),
            writable: true,
        }
    }

    #[test]
    fn what_lies_in_a_mapped_folder_is_shown_through_its_mount() {
        let folders = vec![Folder {
            host: "/data".into(),
            place: "/run/place".into(),
        }];
        let mapped = IdMapped { folders };
        let binds = [bind("/data"), bind("/data/own"), bind("/data2")];
        for (host, shown) in [
            ("/data", "/run/place"),
            ("/data/.env", "/run/place/.env"),
            ("/data/own", "/data/own"),
            ("/data/own/.env", "/data/own/.env"),
            ("/data2/x", "/data2/x"),
            ("/elsewhere", "/elsewhere"),
        ] {
            let translated = mapped.translate(vec![bind(host)], &binds);
            assert_eq!(translated[0].host.as_os_str(), shown, "{host}");
        }
        std::mem::forget(mapped);
    }
}
