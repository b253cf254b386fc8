//! Host paths that sessions must not read, or not change, although they lie in a folder that
//! sessions see.
//!
//! A mount covers each of them inside. The kernel attaches such a mount to the file, so it is lost
//! when a process on the host replaces the file, as most editors do. `Replacements` notifies a
//! backend when that happens, and the backend updates its sandboxes.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

pub use cellblock_jail::wire::{Mask, MaskRule};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::net::unix::pipe::Receiver;

/// A host path that is protected from sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMask {
    /// Absolute, without links.
    pub host: PathBuf,
    pub rule: MaskRule,
}

/// Returns the paths inside at which masked paths are visible: in every shown folder that contains
/// them, given as its host path and its path inside, unless another folder is shown there instead.
pub fn inside(masks: &[HostMask], shown: &[(&Path, &Path)]) -> Vec<Mask> {
    let mut places = Vec::new();
    for HostMask { host, rule } in masks {
        for (folder, place) in shown {
            let Ok(rest) = host.strip_prefix(folder) else {
                continue;
            };
            let seen = place.join(rest);
            let is_covered = shown.iter().any(|(_, other)| {
                other != place && other.starts_with(place) && seen.starts_with(other)
            });
            if rest.as_os_str().is_empty() || is_covered {
                continue;
            }
            places.push(Mask {
                inside: seen,
                rule: *rule,
            });
        }
    }
    places
}

/// Notifies when a masked path has become a different file.
pub struct Replacements {
    /// Not a pipe, but read and polled like one.
    events: Receiver,
    names: BTreeSet<OsString>,
}

impl Replacements {
    /// Watches the folders of the masked paths.
    pub fn watch(masks: &[HostMask]) -> io::Result<Replacements> {
        let descriptor = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let changes =
            WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO;
        for folder in masks
            .iter()
            .filter_map(|mask| mask.host.parent())
            .collect::<BTreeSet<_>>()
        {
            match inotify::add_watch(&descriptor, folder, changes | WatchFlags::ONLYDIR) {
                // There is nothing to protect.
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let names = masks
            .iter()
            .filter_map(|mask| Some(mask.host.file_name()?.to_owned()))
            .collect();
        Ok(Replacements {
            events: Receiver::from_owned_fd_unchecked(descriptor)?,
            names,
        })
    }

    /// Returns when one of them was replaced, created or removed.
    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            self.events.readable().await?;
            let mut is_ours = false;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = inotify::Reader::new(self.events.as_fd(), &mut buffer);
            loop {
                match reader.next() {
                    Ok(event) => {
                        let name = event
                            .file_name()
                            .map(|name| std::ffi::OsStr::from_bytes(name.to_bytes()));
                        // If events were lost, or a folder is gone, any masked path may be
                        // affected.
                        is_ours |= event
                            .events()
                            .intersects(ReadFlags::QUEUE_OVERFLOW | ReadFlags::IGNORED)
                            || name.is_some_and(|name| self.names.contains(name));
                    }
                    Err(Errno::AGAIN) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            // Confirms that nothing is left to read. An event that arrives at this moment is not
            // parsed, so it counts as ours.
            is_ours |= self.events.try_read(&mut [0; 4096]).is_ok();
            if is_ours {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(host: &str, shown: &[(&str, &str)]) -> Vec<String> {
        let masks = [HostMask {
            host: host.into(),
            rule: MaskRule::Hidden,
        }];
        let shown: Vec<(&Path, &Path)> = shown
            .iter()
            .map(|(host, inside)| (Path::new(*host), Path::new(*inside)))
            .collect();
        inside(&masks, &shown)
            .iter()
            .map(|mask| mask.inside.display().to_string())
            .collect()
    }

    #[test]
    fn a_path_is_masked_wherever_it_is_seen() {
        assert_eq!(seen("/space/.env", &[("/space", "/work")]), ["/work/.env"]);
        let parent = [("/home/me/space", "/work"), ("/home/me", "/work/home")];
        assert_eq!(
            seen("/home/me/space/.env", &parent),
            ["/work/.env", "/work/home/space/.env"]
        );
        assert_eq!(
            seen("/elsewhere/.env", &[("/space", "/work")]),
            Vec::<String>::new()
        );
        assert_eq!(
            seen("/space-2/.env", &[("/space", "/work")]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_path_that_another_folder_covers_is_not_seen() {
        let shown = [("/space", "/work"), ("/data", "/work/sub")];
        assert_eq!(seen("/space/sub/key", &shown), Vec::<String>::new());
        assert_eq!(seen("/data/key", &shown), ["/work/sub/key"]); // control
        assert_eq!(
            seen("/space", &shown),
            Vec::<String>::new(),
            "a shown folder itself is never masked"
        );
    }

    #[tokio::test]
    async fn every_way_to_put_another_file_in_place_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".env");
        let masks = [HostMask {
            host: path.clone(),
            rule: MaskRule::EnvironmentFile,
        }];
        let mut replacements = Replacements::watch(&masks).unwrap();
        std::fs::write(folder.path().join("other"), "").unwrap();
        std::fs::write(&path, "A=1").unwrap();
        replacements.next().await.unwrap();
        std::fs::rename(folder.path().join("other"), &path).unwrap();
        replacements.next().await.unwrap();
        std::fs::remove_file(&path).unwrap();
        replacements.next().await.unwrap();
        // Control: another file, and a write into the same file, are not reported.
        std::fs::write(folder.path().join("other"), "").unwrap();
        let nothing = tokio::time::timeout(std::time::Duration::ZERO, replacements.next()).await;
        assert!(nothing.is_err());
    }
}
