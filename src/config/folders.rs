//! Cellblock's private folders, and the folders shared with a sandbox.
//!
//! `data_dir` and `runtime_dir` choose; `make_private` and `make_shared` create. Folders that a
//! sandbox may write must never overlap with those that the host trusts: `overlap` checks it.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// Facts about the machine and the process, read once.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MachineFacts {
    pub cores: usize,
    pub user_id: u32,
    pub current_dir: PathBuf,
    pub temporary_dir: PathBuf,
}

/// Returns the default folder for environments and tools.
pub(super) fn default_data_dir(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    let base = || {
        absolute_variable(variables, "XDG_DATA_HOME")
            .or_else(|| absolute_variable(variables, "HOME").map(|home| home.join(".local/share")))
    };
    given_by_systemd(variables, "STATE_DIRECTORY")
        .or_else(|| base().map(|base| base.join("cellblock")))
}

/// Returns the default path of the configuration file.
pub(super) fn default_config_file(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    absolute_variable(variables, "XDG_CONFIG_HOME")
        .or_else(|| absolute_variable(variables, "HOME").map(|home| home.join(".config")))
        .map(|base| base.join("cellblock/config.yaml"))
}

/// Returns the folder for sockets and sandbox roots while the server runs.
pub(super) fn runtime_dir(variables: &BTreeMap<String, String>, machine: &MachineFacts) -> PathBuf {
    if let Some(given) = given_by_systemd(variables, "RUNTIME_DIRECTORY") {
        return given;
    }
    if machine.user_id == 0 {
        return PathBuf::from("/run/cellblock");
    }
    match absolute_variable(variables, "XDG_RUNTIME_DIR") {
        Some(base) => base.join("cellblock"),
        None => machine
            .temporary_dir
            .join(format!("cellblock-{}", machine.user_id)),
    }
}

/// Makes a path absolute without accessing the file system: relative to `base`, with `~/`, `.` and
/// `..` resolved.
pub(super) fn absolute(written: &str, base: &Path, home: Option<&str>) -> PathBuf {
    let path = match (written.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => Path::new(home).join(rest),
        _ if written == "~" && home.is_some() => PathBuf::from(home.unwrap_or_default()),
        _ => base.join(written),
    };
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                clean.pop();
            }
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

/// Returns whether one of two folders contains the other. Both must be absolute and free of links.
pub(super) fn overlap(one: &Path, other: &Path) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// Creates a folder that only this user can enter, or checks that an existing one is ours and not a
/// link.
///
/// Below a shared temporary folder another user could have created it first, or put a link in its
/// place. Choosing another name then would hide the server from its own commands, so that is an
/// error with a remedy.
pub(super) fn make_private(path: &Path, user_id: u32) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(path)?;
    if !found.is_dir() {
        return Err(io::Error::other(
            "it is not a folder; set XDG_RUNTIME_DIR to a folder that is yours alone",
        ));
    }
    if found.uid() != user_id {
        let why = "it belongs to another user; set XDG_RUNTIME_DIR to a folder that is yours alone";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    if found.mode() & 0o077 != 0 {
        std::fs::set_permissions(path, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Creates a folder if it is missing and returns its path free of links.
pub(super) fn make_shared(path: &Path) -> io::Result<PathBuf> {
    std::fs::create_dir_all(path)?;
    existing_folder(path)
}

/// Returns the path of an existing folder free of links.
pub(super) fn existing_folder(path: &Path) -> io::Result<PathBuf> {
    let real = path.canonicalize()?;
    if !real.is_dir() {
        return Err(io::Error::new(
            io::ErrorKind::NotADirectory,
            "it is not a folder",
        ));
    }
    Ok(real)
}

/// The folder that systemd has created for a unit with `RuntimeDirectory=cellblock` or
/// `StateDirectory=cellblock`. Another name belongs to a unit that is not ours alone.
fn given_by_systemd(variables: &BTreeMap<String, String>, name: &str) -> Option<PathBuf> {
    let folders = variables.get(name)?.split(':').map(PathBuf::from);
    folders
        .filter(|folder| folder.is_absolute())
        .find(|folder| folder.ends_with("cellblock"))
}

fn absolute_variable(variables: &BTreeMap<String, String>, name: &str) -> Option<PathBuf> {
    // The XDG specification requires that a relative path is ignored.
    variables
        .get(name)
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn machine(user_id: u32) -> MachineFacts {
        MachineFacts {
            cores: 2,
            user_id,
            current_dir: "/here".into(),
            temporary_dir: "/tmp".into(),
        }
    }

    #[test]
    fn the_data_folder_follows_xdg_then_home() {
        let chosen = |pairs: &[(&str, &str)]| default_data_dir(&variables(pairs));
        assert_eq!(
            chosen(&[("XDG_DATA_HOME", "/x"), ("HOME", "/h")]),
            Some("/x/cellblock".into())
        );
        assert_eq!(
            chosen(&[("XDG_DATA_HOME", "relative"), ("HOME", "/h")]),
            Some("/h/.local/share/cellblock".into())
        );
        assert_eq!(
            chosen(&[("HOME", "/h")]),
            Some("/h/.local/share/cellblock".into())
        );
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn the_runtime_folder_depends_on_who_runs_us() {
        assert_eq!(
            runtime_dir(
                &variables(&[("XDG_RUNTIME_DIR", "/run/user/7")]),
                &machine(0)
            ),
            Path::new("/run/cellblock")
        );
        assert_eq!(
            runtime_dir(
                &variables(&[("XDG_RUNTIME_DIR", "/run/user/7")]),
                &machine(7)
            ),
            Path::new("/run/user/7/cellblock")
        );
        assert_eq!(
            runtime_dir(&variables(&[]), &machine(7)),
            Path::new("/tmp/cellblock-7")
        );
    }

    #[test]
    fn folders_that_systemd_has_made_for_the_unit_come_first() {
        let given = variables(&[
            ("RUNTIME_DIRECTORY", "/run/other:/run/cellblock"),
            ("XDG_RUNTIME_DIR", "/run/user/7"),
        ]);
        assert_eq!(
            runtime_dir(&given, &machine(7)),
            Path::new("/run/cellblock")
        );
        let given = variables(&[("STATE_DIRECTORY", "/var/lib/cellblock"), ("HOME", "/h")]);
        assert_eq!(default_data_dir(&given), Some("/var/lib/cellblock".into()));
        // Control: folders of a unit that also runs something else are ignored.
        let others = variables(&[
            ("RUNTIME_DIRECTORY", "/run/other"),
            ("STATE_DIRECTORY", "/var/lib/other"),
            ("HOME", "/h"),
        ]);
        assert_eq!(
            runtime_dir(&others, &machine(7)),
            Path::new("/tmp/cellblock-7")
        );
        assert_eq!(
            default_data_dir(&others),
            Some("/h/.local/share/cellblock".into())
        );
    }

    #[test]
    fn paths_are_made_absolute_without_the_file_system() {
        for (written, expected) in [
            ("a/b", "/here/a/b"),
            ("/a/./b", "/a/b"),
            ("../x", "/x"),
            ("/../../x", "/x"),
            (".", "/here"),
            ("~/x", "/h/x"),
            ("~", "/h"),
            ("~other/x", "/here/~other/x"),
        ] {
            assert_eq!(
                absolute(written, Path::new("/here"), Some("/h")),
                Path::new(expected),
                "{written:?}"
            );
        }
    }

    #[test]
    fn folders_overlap_when_one_holds_the_other() {
        assert!(overlap(Path::new("/a"), Path::new("/a/b")));
        assert!(overlap(Path::new("/a/b"), Path::new("/a")));
        assert!(overlap(Path::new("/"), Path::new("/a")));
        assert!(!overlap(Path::new("/a"), Path::new("/ab")));
    }

    #[test]
    fn a_private_folder_is_closed_to_others() {
        let base = tempfile::tempdir().unwrap();
        let user_id = rustix::process::geteuid().as_raw();
        let path = base.path().join("deep/private");
        make_private(&path, user_id).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        make_private(&path, user_id).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        let refused = make_private(&path, user_id + 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(
            refused.to_string().contains("set XDG_RUNTIME_DIR"),
            "{refused}"
        );
    }

    #[test]
    fn a_link_does_not_pass_for_a_private_folder() {
        let base = tempfile::tempdir().unwrap();
        let link = base.path().join("link");
        std::os::unix::fs::symlink(base.path(), &link).unwrap();
        assert!(make_private(&link, rustix::process::geteuid().as_raw()).is_err());
    }
}
