//! Settings of system programs, copied from the `/etc` of the host.
//!
//! Programs in `/usr` expect some files in `/etc`: port names, files that OpenSSL and Java need to
//! start, targets of links in `/usr`. The warden copies the listed files into the root of
//! sandboxes, once, when the jail starts. A copy costs no mount and does not show files that are
//! added later.
//!
//! Only files that every user of the host may read are copied, even if the server runs as root.
//! Links are copied as links and never followed, so that a listed name cannot lead to a file that
//! is not listed. Files that are not listed are never read: accounts, keys, addresses, and settings
//! in which operators keep credentials.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

/// Files and folders below `/etc`. The first part of a name may end with a star.
const LISTED: [&str; 29] = [
    // Names of numbers.
    "services",
    "protocols",
    "rpc",
    "ethertypes",
    // Identification of the system.
    "os-release",
    "lsb-release",
    "debian_version",
    "timezone",
    // OpenSSL does not start without them. Private keys are in other folders.
    "ssl/openssl.cnf",
    "pki/tls/openssl.cnf",
    "pki/tls/certs",
    "pki/ca-trust/extracted",
    "crypto-policies",
    // Programs that are split over /usr and /etc.
    "java-*",
    "chromium.d",
    "python3.*/sitecustomize.py",
    "R/ldpaths",
    "R/Makeconf",
    "R/Renviron",
    "R/repositories",
    "ImageMagick-*",
    "OpenCL/vendors",
    "X11/rgb.txt",
    "groff",
    "inputrc",
    "locale.alias",
    "magic",
    "magic.mime",
    "terminfo",
];

/// Limits of the copy. The listed folders of a usual system are below one MiB.
const MAX_BYTES: u64 = 8 << 20;
const MAX_FILES: u32 = 2_000;
const MAX_LEVELS: u32 = 8;

/// The remaining limits of the copy.
struct Budget {
    bytes: u64,
    files: u32,
}

/// Copies the listed files that every user may read from one `etc` to another.
pub(crate) fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut budget = Budget {
        bytes: MAX_BYTES,
        files: MAX_FILES,
    };
    for name in LISTED {
        let (first, rest) = name
            .split_once('/')
            .map_or((name, None), |(first, rest)| (first, Some(rest)));
        for first in matching(from, first) {
            let path = rest.map_or(first.clone(), |rest| format!("{first}/{rest}"));
            copy_named(from, to, &path, &mut budget)?;
        }
    }
    Ok(())
}

/// Returns the names in a folder that match a part of a listed name.
fn matching(folder: &Path, part: &str) -> Vec<String> {
    let Some(beginning) = part.strip_suffix('*') else {
        return vec![part.to_owned()];
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.starts_with(beginning)).collect();
    names.sort();
    names
}

/// Copies one listed name. All its parent folders must be folders that every user may enter.
fn copy_named(from: &Path, to: &Path, name: &str, budget: &mut Budget) -> io::Result<()> {
    let (mut source, mut target) = (from.to_owned(), to.to_owned());
    let mut parts: Vec<&str> = name.split('/').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        source.push(part);
        if !source
            .symlink_metadata()
            .is_ok_and(|found| found.is_dir() && is_public(&found))
        {
            return Ok(());
        }
        target.push(part);
    }
    if source.join(last).symlink_metadata().is_err() {
        return Ok(());
    }
    make_folder(&target)?;
    copy_entry(&source.join(last), &target.join(last), budget, MAX_LEVELS)
}

fn copy_entry(source: &Path, target: &Path, budget: &mut Budget, levels: u32) -> io::Result<()> {
    let Ok(found) = source.symlink_metadata() else {
        return Ok(());
    };
    // An existing entry is our own file or a mount.
    if target.symlink_metadata().is_ok_and(|there| !there.is_dir()) || budget.files == 0 {
        return Ok(());
    }
    budget.files -= 1;
    if found.is_symlink() {
        return symlink(fs::read_link(source)?, target);
    }
    if !is_public(&found) {
        return Ok(());
    }
    if found.is_dir() {
        if levels == 0 {
            return Ok(());
        }
        make_folder(target)?;
        let Ok(entries) = fs::read_dir(source) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            copy_entry(
                &entry.path(),
                &target.join(entry.file_name()),
                budget,
                levels - 1,
            )?;
        }
        return Ok(());
    }
    if !found.is_file() || found.len() > budget.bytes {
        return Ok(());
    }
    // The name may refer to another file by now; the opened file is checked again.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let Ok(source) = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(source)
    else {
        return Ok(());
    };
    if source
        .metadata()
        .is_ok_and(|opened| opened.is_file() && is_public(&opened))
    {
        let mut content = Vec::new();
        source.take(budget.bytes).read_to_end(&mut content)?;
        budget.bytes -= content.len() as u64;
        File::create(target)?.write_all(&content)?;
        fs::set_permissions(target, Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// Returns whether every user may read a file, or list and enter a folder.
fn is_public(found: &Metadata) -> bool {
    let needed = if found.is_dir() { 0o005 } else { 0o004 };
    found.permissions().mode() & needed == needed
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, u32)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, mode) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, *name).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(*mode)).unwrap();
        }
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if entry.file_type().unwrap().is_dir() {
                found.extend(
                    names(&entry.path())
                        .iter()
                        .map(|below| format!("{name}/{below}")),
                );
            } else {
                found.push(name);
            }
        }
        found.sort();
        found
    }

    fn copied(from: &tempfile::TempDir) -> (tempfile::TempDir, Vec<String>) {
        let to = tempfile::tempdir().unwrap();
        copy(from.path(), to.path()).unwrap();
        let found = names(to.path());
        (to, found)
    }

    #[test]
    fn listed_files_are_copied_and_no_others() {
        let files = [
            "services",
            "java-17-openjdk/security/java.security",
            "ssl/openssl.cnf",
            "python3.11/sitecustomize.py",
        ];
        let others = [
            "shadow",
            "ssl/private/key.pem",
            "ssh/ssh_host_key",
            "python3.11/debian_config",
            "npmrc",
            "javax",
        ];
        let from = tree(
            &files
                .iter()
                .chain(&others)
                .map(|name| (*name, 0o644))
                .collect::<Vec<_>>(),
        );
        let (to, found) = copied(&from);
        let mut expected = files.map(str::to_owned);
        expected.sort();
        assert_eq!(found, expected);
        assert_eq!(
            fs::read_to_string(to.path().join("services")).unwrap(),
            "services"
        );
    }

    #[test]
    fn a_file_or_folder_that_is_not_for_everybody_is_left_out() {
        let from = tree(&[
            ("services", 0o640),
            ("protocols", 0o644), // control
            ("java-17/management/jmxremote.password", 0o600),
            ("java-17/net.properties", 0o644), // control
            ("java-21/closed/net.properties", 0o644),
        ]);
        let closed = from.path().join("java-21/closed");
        fs::set_permissions(closed, Permissions::from_mode(0o750)).unwrap();
        assert_eq!(copied(&from).1, ["java-17/net.properties", "protocols"]);
    }

    #[test]
    fn links_are_copied_and_not_followed() {
        let from = tree(&[("shadow", 0o644), ("hidden/openssl.cnf", 0o644)]);
        symlink("shadow", from.path().join("services")).unwrap();
        symlink("hidden", from.path().join("ssl")).unwrap();
        let (to, found) = copied(&from);
        assert_eq!(found, ["services"]);
        assert_eq!(
            fs::read_link(to.path().join("services")).unwrap(),
            Path::new("shadow")
        );
    }

    #[test]
    fn no_more_is_copied_than_there_is_room_for() {
        let from = tree(&[("protocols", 0o644)]);
        let large = File::create(from.path().join("services")).unwrap();
        large.set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(copied(&from).1, ["protocols"]);
    }

    #[test]
    fn nothing_that_holds_accounts_keys_or_credentials_is_listed() {
        let never = [
            "passwd",
            "shadow",
            "group",
            "gshadow",
            "sudoers",
            "ssh",
            "ssl/private",
            "pki/tls/private",
            "hostname",
            "hosts",
            "machine-id",
            "fstab",
            "crontab",
            "environment",
            "profile",
            "npmrc",
            "pip.conf",
            "gitconfig",
            "wgetrc",
            "maven",
            "apt",
            "krb5",
            "kubernetes",
            "docker",
            "cloud",
            "systemd",
        ];
        for name in LISTED {
            for forbidden in never {
                let below = |a: &str, b: &str| a == b || a.starts_with(&format!("{b}/"));
                assert!(!below(name, forbidden) && !below(forbidden, name), "{name}");
            }
            let (first, rest) = name.split_once('/').unwrap_or((name, ""));
            assert!(
                !rest.contains('*') && !first.trim_end_matches('*').is_empty(),
                "{name}"
            );
        }
    }
}
