//! Masks over the operator's folders in containers: binds over binds.
//!
//! Over each masked path the engine mounts an unreadable empty file, an empty folder, or the path
//! itself read-only. Parent folders are bound onto themselves, so that code cannot rename them.
//! Nothing can be mounted into a running container, so a container is ended when a process on the
//! host replaces a file that it must not see.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::ContainerBind;
use super::tenancy::Tenancy;
use crate::sandbox::masks::{self, HostMask, Mask, MaskRule};

/// Identity of a file, by device and inode.
type Stamp = Option<(u64, u64)>;

/// The masks of a server's containers.
pub(super) struct Masks {
    masks: Vec<HostMask>,
    /// An empty file and an empty folder on the engine's machine.
    file: PathBuf,
    folder: PathBuf,
    /// The files that containers cover.
    covered: Mutex<HashMap<PathBuf, Stamp>>,
}

impl Masks {
    /// Makes the file and the folder that cover masked paths.
    pub(super) fn new(masks: Vec<HostMask>, tenancy: &Tenancy) -> io::Result<Masks> {
        let (file, folder) = (tenancy.file("masked"), tenancy.file("masked-folder"));
        if !masks.is_empty() {
            fs::write(&file, "")?;
            fs::set_permissions(&file, Permissions::from_mode(0o000))?;
            DirBuilder::new().mode(0o555).create(&folder)?;
        }
        Ok(Masks {
            masks,
            file,
            folder,
            covered: Mutex::default(),
        })
    }

    pub(super) fn host_masks(&self) -> &[HostMask] {
        &self.masks
    }

    /// Returns the binds that cover masked paths in `binds`, for the files as they are now.
    pub(super) fn binds(&self, binds: &[ContainerBind]) -> io::Result<Vec<ContainerBind>> {
        let mut all = Vec::new();
        for HostMask { host, rule } in &self.masks {
            if *rule == MaskRule::EnvironmentFile {
                make_empty_file(host)?;
            }
            self.covered().insert(host.clone(), stamp(host));
        }
        let shown: Vec<(&Path, &Path)> = binds
            .iter()
            .map(|bind| (bind.host.as_path(), bind.inside.as_path()))
            .collect();
        for mask in masks::inside(&self.masks, &shown) {
            self.add(&mask, binds, &mut all)?;
        }
        Ok(all)
    }

    fn add(
        &self,
        mask: &Mask,
        binds: &[ContainerBind],
        all: &mut Vec<ContainerBind>,
    ) -> io::Result<()> {
        let shown_by = binds
            .iter()
            .filter(|bind| mask.inside.starts_with(&bind.inside));
        let Some(bind) = shown_by.max_by_key(|bind| bind.inside.components().count()) else {
            return Ok(());
        };
        let rest = mask
            .inside
            .strip_prefix(&bind.inside)
            .expect("the bind shows the path");
        let place = |rest: &Path, host: &Path, writable: bool| ContainerBind {
            host: host.to_owned(),
            inside: bind.inside.join(rest),
            writable,
        };
        let mut here = PathBuf::new();
        for part in rest.parent().into_iter().flat_map(Path::components) {
            here.push(part);
            let held = place(&here, &bind.host.join(&here), bind.writable);
            if !held.host.is_dir() {
                return Ok(());
            }
            if !all.contains(&held) {
                all.push(held);
            }
        }
        let host = bind.host.join(rest);
        let found = match host.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        if found.is_symlink() {
            // The engine would follow it, and code could replace the link.
            return Err(io::Error::other(
                "a protected file of the workspace is a link; put the file in its place",
            ));
        }
        all.push(match mask.rule {
            MaskRule::EnvironmentFile if found.is_dir() => place(rest, &host, bind.writable),
            MaskRule::ReadOnly => place(rest, &host, false),
            MaskRule::EnvironmentFile | MaskRule::Hidden if found.is_dir() => {
                place(rest, &self.folder, false)
            }
            MaskRule::EnvironmentFile | MaskRule::Hidden => place(rest, &self.file, false),
        });
        Ok(())
    }

    /// Returns whether a covered file was replaced.
    pub(super) fn are_stale(&self) -> bool {
        let mut covered = self.covered();
        let is_stale = covered.iter().any(|(host, before)| stamp(host) != *before);
        if is_stale {
            covered.clear();
        }
        is_stale
    }

    fn covered(&self) -> MutexGuard<'_, HashMap<PathBuf, Stamp>> {
        self.covered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stamp(path: &Path) -> Stamp {
    path.symlink_metadata()
        .ok()
        .map(|found| (found.dev(), found.ino()))
}

/// Makes an empty file that belongs to the owner of its folder, unless the path exists: a mount can
/// only cover an existing path.
fn make_empty_file(path: &Path) -> io::Result<()> {
    let options = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .to_owned();
    match options.open(path) {
        Ok(_) => {
            let folder = path.parent().unwrap_or(Path::new("/")).metadata()?;
            // Only root can change the owner, and only root makes files for others.
            let _ = std::os::unix::fs::lchown(path, Some(folder.uid()), Some(folder.gid()));
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        base: tempfile::TempDir,
        tenancy: Tenancy,
    }

    impl Case {
        fn new() -> Case {
            let base = tempfile::tempdir().unwrap();
            fs::create_dir_all(base.path().join("space/a/b")).unwrap();
            fs::write(base.path().join("space/a/b/key"), "secret").unwrap();
            let tenancy = Tenancy::register(base.path()).unwrap();
            Case { base, tenancy }
        }

        fn path(&self, path: &str) -> PathBuf {
            self.base.path().join(path)
        }

        fn masks(&self, rules: &[(&str, MaskRule)]) -> Masks {
            let masks = rules.iter().map(|(path, rule)| HostMask {
                host: self.path(path),
                rule: *rule,
            });
            Masks::new(masks.collect(), &self.tenancy).unwrap()
        }

        fn binds(&self, masks: &Masks) -> Vec<(String, String, bool)> {
            let space = ContainerBind {
                host: self.path("space"),
                inside: "/work".into(),
                writable: true,
            };
            let told = |bind: &ContainerBind| {
                let host = bind
                    .host
                    .strip_prefix(self.base.path())
                    .unwrap()
                    .display()
                    .to_string();
                let host = if bind.host == self.tenancy.file("masked") {
                    "the mask".to_owned()
                } else {
                    host
                };
                (host, bind.inside.display().to_string(), bind.writable)
            };
            masks.binds(&[space]).unwrap().iter().map(told).collect()
        }
    }

    fn bind(host: &str, inside: &str, writable: bool) -> (String, String, bool) {
        (host.to_owned(), inside.to_owned(), writable)
    }

    #[test]
    fn the_file_of_variables_is_covered_and_made_where_there_is_none() {
        let case = Case::new();
        let masks = case.masks(&[("space/.env", MaskRule::EnvironmentFile)]);
        let covered = case.binds(&masks);
        assert_eq!(covered, [bind("the mask", "/work/.env", false)]);
        assert_eq!(fs::read(case.path("space/.env")).unwrap(), b"");
        fs::write(case.path("space/.env"), "A=1").unwrap();
        assert_eq!(case.binds(&masks), covered);
        assert_eq!(
            fs::read(case.path("space/.env")).unwrap(),
            b"A=1",
            "one that is there stays as it is"
        );
        assert!(
            !masks.are_stale(),
            "words that are written into the same file are hidden"
        );
        fs::write(case.path("new"), "A=2").unwrap();
        fs::rename(case.path("new"), case.path("space/.env")).unwrap();
        assert!(masks.are_stale());
        assert!(!masks.are_stale(), "containers are ended once");
    }

    #[test]
    fn folders_on_the_way_are_held() {
        let case = Case::new();
        let held = [
            bind("space/a", "/work/a", true),
            bind("space/a/b", "/work/a/b", true),
        ];
        let read_only = case.binds(&case.masks(&[("space/a/b/key", MaskRule::ReadOnly)]));
        assert_eq!(
            read_only,
            [&held[..], &[bind("space/a/b/key", "/work/a/b/key", false)]].concat()
        );
    }

    #[test]
    fn what_is_not_there_needs_no_cover() {
        let case = Case::new();
        assert!(
            case.binds(&case.masks(&[("space/x/y", MaskRule::Hidden)]))
                .is_empty()
        );
        assert!(!case.path("space/x").exists());
    }

    #[test]
    fn a_link_cannot_be_covered() {
        let case = Case::new();
        std::os::unix::fs::symlink("a/b/key", case.path("space/.env")).unwrap();
        let masks = case.masks(&[("space/.env", MaskRule::EnvironmentFile)]);
        let space = ContainerBind {
            host: case.path("space"),
            inside: "/work".into(),
            writable: true,
        };
        assert!(
            masks
                .binds(&[space])
                .unwrap_err()
                .to_string()
                .contains("link")
        );
    }

    #[test]
    fn a_folder_of_that_name_is_used_and_held() {
        let case = Case::new();
        fs::create_dir(case.path("space/.env")).unwrap();
        let masks = case.masks(&[("space/.env", MaskRule::EnvironmentFile)]);
        assert_eq!(case.binds(&masks), [bind("space/.env", "/work/.env", true)]);
    }
}
