//! On-disk cache of the hosts that serve an index's files.
//!
//! A query costs a request to the index, which a session would wait for. The result contains no
//! secret and rarely changes. It is valid for a day and discarded as soon as an installation fails.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::IndexUrl;

/// A package that every index in use has: the runner needs it, so every environment is built with
/// it.
pub(super) const KNOWN_PACKAGE: &str = "ipython";
/// Options that make uv print the URLs of its files.
pub(super) const OPTIONS: [&str; 3] = ["--no-deps", "--format", "pylock.toml"];

/// Time for which a cached entry is valid.
const KEPT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Finds the hosts of all files in a lock file, as `host:port`.
pub(super) fn hosts_in(lock: &str) -> Vec<String> {
    let urls = lock
        .split("url = \"")
        .skip(1)
        .filter_map(|rest| rest.split('"').next());
    let places = urls
        .filter_map(|url| IndexUrl::parse(url).ok())
        .map(|url| url.place());
    let hosts: BTreeSet<String> = places
        .map(|(host, port)| format!("{host}:{port}"))
        .collect();
    hosts.into_iter().collect()
}

/// Returns the cached hosts of an index, unless they are too old.
pub(super) fn recall(memory: &Path, identity: &str) -> Option<Vec<String>> {
    recall_at(memory, identity, SystemTime::now())
}

fn recall_at(memory: &Path, identity: &str, now: SystemTime) -> Option<Vec<String>> {
    let path = place(memory, identity);
    let written = fs::metadata(&path)
        .and_then(|found| found.modified())
        .ok()?;
    // A timestamp in the future is invalid.
    let is_fresh = now.duration_since(written).is_ok_and(|age| age < KEPT_FOR);
    let text = fs::read_to_string(path).ok().filter(|_| is_fresh)?;
    Some(text.lines().map(str::to_owned).collect())
}

/// Caches the hosts of an index. If that fails, the next server queries again.
pub(super) fn remember(memory: &Path, identity: &str, hosts: &[String]) {
    let write = || -> io::Result<()> {
        fs::create_dir_all(memory)?;
        let mut file = tempfile::NamedTempFile::new_in(memory)?;
        hosts.iter().try_for_each(|host| writeln!(file, "{host}"))?;
        file.persist(place(memory, identity))?;
        Ok(())
    };
    if let Err(error) = write() {
        tracing::debug!(%error, "where the index keeps its files could not be remembered");
    }
}

/// Removes the cached entry of an index.
pub(super) fn forget(memory: &Path, identity: &str) {
    let _ = fs::remove_file(place(memory, identity));
}

fn place(memory: &Path, identity: &str) -> PathBuf {
    memory.join(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_of_all_files_of_a_lock_are_found() {
        let lock = "sdist = { url = \"https://files.example/x.tar.gz\" }\nwheels = [{ url \
                    = \"http://f.example:81/x.whl\" }]";
        assert_eq!(hosts_in(lock), ["f.example:81", "files.example:443"]);
    }

    #[test]
    fn what_was_remembered_is_believed_for_a_day_and_of_this_index_only() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("indexes");
        assert_eq!(recall(&memory, "one"), None);
        let hosts = vec!["a.example:443".to_owned(), "b.example:80".to_owned()];
        remember(&memory, "one", &hosts);
        remember(&memory, "none", &[]);
        assert_eq!(recall(&memory, "one"), Some(hosts));
        assert_eq!(recall(&memory, "none"), Some(Vec::new()));
        assert_eq!(recall(&memory, "two"), None);
        assert_eq!(
            recall_at(&memory, "one", SystemTime::now() + KEPT_FOR),
            None
        );
        assert_eq!(
            recall_at(&memory, "one", SystemTime::now() - KEPT_FOR),
            None,
            "a clock was wrong"
        );
        forget(&memory, "one");
        assert_eq!(recall(&memory, "one"), None);
    }
}
