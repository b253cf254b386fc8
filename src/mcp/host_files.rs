//! Files of the host that a local caller may name.
//!
//! The operator allows directories; each is opened once, when the server starts, and everything
//! later happens beneath those handles. A path is first compared with the allowed directories as
//! text, then the rest of it is opened by the kernel with "stay beneath, no symbolic links, no
//! magic links", so that neither `..`, nor a link inside, nor a directory swapped at the last
//! moment leads out. An allowed directory itself may be given through a link.
//!
//! Only regular files move. Reading never blocks on a FIFO or a device. Writing goes to a temporary
//! name beside the destination that is renamed into place at the end, so a destination is whole or
//! untouched. Names that make a machine run something (shell start-up files, git and editor
//! folders, client configuration) are never written, and names that usually hold secrets are
//! neither written nor read.
//!
//! Messages name the path the caller gave and the allowed directories, and no other.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use cellblock_typed::is_unseen;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use tokio::io::{AsyncRead, ReadBuf};

/// Names that usually hold secrets. A model should not see them, and nobody should replace them.
/// Compared in lower case.
const SECRET_NAMES: &[&str] = &[
    ".aws",
    ".azure",
    ".docker",
    ".env",
    ".gnupg",
    ".kube",
    ".netrc",
    ".npmrc",
    ".pgpass",
    ".pypirc",
    ".ssh",
    ".git-credentials",
];

/// Names whose content some program runs or obeys. Compared in lower case.
const CONFIGURATION_NAMES: &[&str] = &[
    ".bash_aliases",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".bashrc",
    ".claude",
    ".claude.json",
    ".codex",
    ".config",
    ".cshrc",
    ".cursor",
    ".direnv",
    ".envrc",
    ".git",
    ".gitattributes",
    ".gitconfig",
    ".github",
    ".githooks",
    ".gitmodules",
    ".husky",
    ".idea",
    ".inputrc",
    ".kshrc",
    ".local",
    ".login",
    ".logout",
    ".mcp.json",
    ".pam_environment",
    ".profile",
    ".pythonrc",
    ".pythonrc.py",
    ".tcshrc",
    ".vimrc",
    ".vscode",
    ".windsurf",
    ".xinitrc",
    ".xprofile",
    ".xsession",
    ".zlogin",
    ".zlogout",
    ".zprofile",
    ".zshenv",
    ".zshrc",
    "autostart",
    "claude_desktop_config.json",
    "cron.d",
    "cron.daily",
    "cron.hourly",
    "cron.monthly",
    "cron.weekly",
    "crontab",
    "crontabs",
    "git~1",
    "launchagents",
    "launchdaemons",
    "mcp.json",
    "sitecustomize.py",
    "systemd",
    "usercustomize.py",
];

/// Regular files under these rules only, however a path is written.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// The host's files as far as the operator has allowed them.
#[derive(Clone)]
pub struct HostFiles {
    roots: Arc<Vec<Root>>,
    largest: u64,
}

/// One allowed directory.
struct Root {
    handle: OwnedFd,
    given: PathBuf,
    canonical: PathBuf,
}

/// An allowed directory could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("the allowed directory {} cannot be used", path.display())]
pub struct RootError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

/// Why a file of the host was not touched. The text is written for a model.
#[derive(Debug, thiserror::Error)]
pub(super) enum HostFileError {
    #[error(
        "this server may not use any files of the computer it runs on; its operator can allow \
         directories"
    )]
    NoDirectories,
    #[error("\"{path}\" is not within the directories this server may use: {allowed}")]
    NotAllowed { path: String, allowed: String },
    #[error("\"{path}\" is not a usable path: {why}")]
    Malformed { path: String, why: &'static str },
    #[error("\"{path}\" is protected: this server never {verb} \"{name}\"")]
    Protected {
        path: String,
        name: String,
        verb: &'static str,
    },
    #[error("\"{path}\" does not exist{}", about_home(path))]
    NotFound { path: String },
    #[error("\"{path}\" is {what}, not a regular file")]
    NotAFile { path: String, what: &'static str },
    #[error(
        "\"{path}\" leads through a link or out of the allowed directories ({allowed}); links are \
         not followed"
    )]
    Link { path: String, allowed: String },
    #[error(
        "\"{path}\" exists already; set overwrite to true to replace it, or choose another name"
    )]
    Exists { path: String },
    #[error("\"{path}\" has {size} bytes; this server copies at most {largest}")]
    TooLarge {
        path: String,
        size: u64,
        largest: u64,
    },
    #[error("\"{path}\" could not be {action}")]
    Failed {
        path: String,
        action: &'static str,
        #[source]
        cause: io::Error,
    },
}

/// Says that a path was not read as a shell does.
fn about_home(path: &str) -> &'static str {
    match path.starts_with('~') {
        true => "; `~` does not mean the home directory here, give the path from `/` on",
        false => "",
    }
}

impl fmt::Debug for HostFiles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostFiles({})", self.allowed())
    }
}

impl HostFiles {
    /// Bytes in one file unless the operator says otherwise.
    pub const DEFAULT_LARGEST: u64 = 1024 * 1024 * 1024;

    /// Allows nothing.
    pub fn none() -> HostFiles {
        HostFiles {
            roots: Arc::default(),
            largest: HostFiles::DEFAULT_LARGEST,
        }
    }

    /// Opens the allowed directories. Relative paths of callers are taken below the first.
    pub fn new(directories: &[PathBuf], largest: u64) -> Result<HostFiles, RootError> {
        let open = |path: &PathBuf| -> io::Result<Root> {
            let given = std::path::absolute(path)?;
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let handle = rustix::fs::open(&given, flags, Mode::empty())?;
            Ok(Root {
                handle,
                canonical: given.canonicalize()?,
                given,
            })
        };
        let roots = directories
            .iter()
            .map(|path| {
                open(path).map_err(|cause| RootError {
                    path: path.clone(),
                    cause,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(HostFiles {
            roots: Arc::new(roots),
            largest,
        })
    }

    /// The most bytes one file may have.
    pub(super) fn largest(&self) -> u64 {
        self.largest
    }

    /// Opens a regular file for reading. Never blocks on a FIFO or a device.
    pub(super) fn open(&self, path: &str) -> Result<File, HostFileError> {
        let (root, rest) = self.locate(path)?;
        refuse_protected(path, &rest, SECRET_NAMES, "reads")?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let handle = rustix::fs::openat2(&root.handle, &rest, flags, Mode::empty(), RESOLVE)
            .map_err(|errno| self.explain(path, errno, "opened"))?;
        let status =
            rustix::fs::fstat(&handle).map_err(|errno| self.explain(path, errno, "examined"))?;
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => {}
            other => {
                return Err(HostFileError::NotAFile {
                    path: path.to_owned(),
                    what: kind_text(other),
                });
            }
        }
        let size = status.st_size as u64;
        if size > self.largest {
            return Err(HostFileError::TooLarge {
                path: path.to_owned(),
                size,
                largest: self.largest,
            });
        }
        Ok(File::from(handle))
    }

    /// Prepares a new file: makes the folders on the way and opens a temporary file beside the
    /// destination. Nothing is at the destination until `Destination::keep`.
    pub(super) fn create(
        &self,
        path: &str,
        overwrite: Overwrite,
    ) -> Result<Destination, HostFileError> {
        let (root, rest) = self.locate(path)?;
        refuse_protected(path, &rest, SECRET_NAMES, "writes")?;
        refuse_protected(path, &rest, CONFIGURATION_NAMES, "writes")?;
        let name = rest
            .file_name()
            .expect("locate returns at least one name")
            .to_owned();
        let parents = rest.parent().unwrap_or(Path::new(""));
        let folder = self.make_folders(root, parents, path)?;
        match rustix::fs::statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(status) => match (FileType::from_raw_mode(status.st_mode), overwrite) {
                (FileType::RegularFile, Overwrite::Allowed) => {}
                (FileType::RegularFile, Overwrite::Refused) => {
                    return Err(HostFileError::Exists {
                        path: path.to_owned(),
                    });
                }
                (other, _) => {
                    return Err(HostFileError::NotAFile {
                        path: path.to_owned(),
                        what: kind_text(other),
                    });
                }
            },
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(self.explain(path, errno, "examined")),
        }
        let (temporary, file) =
            open_temporary(&folder).map_err(|errno| self.explain(path, errno, "created"))?;
        Ok(Destination {
            path: path.to_owned(),
            overwrite,
            file: Some(file),
            place: Place {
                folder,
                name,
                temporary,
                renamed: false,
            },
        })
    }

    /// Splits a caller's path into an allowed directory and what lies beneath it: one name or more,
    /// none of them `..`.
    fn locate(&self, path: &str) -> Result<(&Root, PathBuf), HostFileError> {
        let first = self.roots.first().ok_or(HostFileError::NoDirectories)?;
        let malformed = |why| HostFileError::Malformed {
            path: path.to_owned(),
            why,
        };
        if path.chars().any(char::is_control) {
            return Err(malformed("it has control characters"));
        }
        let given = Path::new(path);
        if given
            .components()
            .any(|component| component == Component::ParentDir)
        {
            return Err(malformed("it has \"..\" in it"));
        }
        let (root, rest) = if given.is_absolute() {
            let beneath = |root| beneath(root, given).map(|rest| (root, rest));
            self.roots
                .iter()
                .find_map(beneath)
                .ok_or_else(|| HostFileError::NotAllowed {
                    path: path.to_owned(),
                    allowed: self.allowed(),
                })?
        } else {
            (first, given.to_owned())
        };
        // Collecting the names drops `.` and doubled slashes, which the kernel would accept but our
        // rules about names would not see.
        let rest: PathBuf = rest
            .components()
            .filter(|component| matches!(component, Component::Normal(_)))
            .collect();
        if rest.as_os_str().is_empty() {
            return Err(HostFileError::NotAFile {
                path: path.to_owned(),
                what: "a directory",
            });
        }
        if rest
            .components()
            .any(|component| component.as_os_str().len() > 255)
        {
            return Err(malformed("a part of it is longer than 255 bytes"));
        }
        Ok((root, rest))
    }

    /// Walks to a folder, one name at a time, making what is missing. Each step refuses links, so
    /// the walk cannot leave the root.
    fn make_folders(
        &self,
        root: &Root,
        parents: &Path,
        path: &str,
    ) -> Result<OwnedFd, HostFileError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let step = |folder: &OwnedFd, name: &OsStr| {
            rustix::fs::openat2(folder, name, flags, Mode::empty(), RESOLVE)
        };
        let mut folder = step(&root.handle, OsStr::new("."))
            .map_err(|errno| self.explain(path, errno, "reached"))?;
        for name in parents.components() {
            let name = name.as_os_str();
            let next = match step(&folder, name) {
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o777)) {
                        // Somebody else may have made it in between; the next step finds out what
                        // it is.
                        Ok(()) | Err(Errno::EXIST) => step(&folder, name),
                        Err(errno) => Err(errno),
                    }
                }
                other => other,
            };
            folder = next.map_err(|errno| self.explain(path, errno, "reached"))?;
        }
        Ok(folder)
    }

    fn explain(&self, path: &str, errno: Errno, action: &'static str) -> HostFileError {
        let path = path.to_owned();
        match errno {
            Errno::NOENT => HostFileError::NotFound { path },
            Errno::LOOP | Errno::XDEV => HostFileError::Link {
                path,
                allowed: self.allowed(),
            },
            Errno::NXIO => HostFileError::NotAFile {
                path,
                what: "a socket or a device",
            },
            Errno::ISDIR => HostFileError::NotAFile {
                path,
                what: "a directory",
            },
            Errno::NOTDIR => HostFileError::Malformed {
                path,
                why: "a part of it is not a directory",
            },
            errno => HostFileError::Failed {
                path,
                action,
                cause: errno.into(),
            },
        }
    }

    fn allowed(&self) -> String {
        let names: Vec<String> = self
            .roots
            .iter()
            .map(|root| root.given.display().to_string())
            .collect();
        names.join(", ")
    }
}

/// Whether a file that is already there may be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overwrite {
    Refused,
    Allowed,
}

/// A file under way. Dropping it without `keep` removes the temporary file.
#[derive(Debug)]
pub(super) struct Destination {
    path: String,
    overwrite: Overwrite,
    file: Option<File>,
    place: Place,
}

#[derive(Debug)]
struct Place {
    folder: OwnedFd,
    name: OsString,
    temporary: OsString,
    renamed: bool,
}

impl Destination {
    /// Hands out the temporary file for writing. It can be taken once.
    pub(super) fn take_file(&mut self) -> File {
        self.file
            .take()
            .expect("the file of a destination is taken once")
    }

    /// Puts the file into place. The caller has written all of it.
    pub(super) fn keep(mut self) -> Result<(), HostFileError> {
        let renamed = match self.overwrite {
            Overwrite::Allowed => {
                let Place {
                    folder,
                    name,
                    temporary,
                    ..
                } = &self.place;
                rustix::fs::renameat(folder, temporary, folder, name)
            }
            Overwrite::Refused => self.place.rename_without_replacing(),
        };
        match renamed {
            Ok(()) => {
                self.place.renamed = true;
                Ok(())
            }
            Err(Errno::EXIST) => Err(HostFileError::Exists {
                path: self.path.clone(),
            }),
            Err(errno) => Err(HostFileError::Failed {
                path: self.path.clone(),
                action: "put into place",
                cause: errno.into(),
            }),
        }
    }
}

impl Place {
    fn rename_without_replacing(&self) -> rustix::io::Result<()> {
        let Place {
            folder,
            name,
            temporary,
            ..
        } = self;
        match rustix::fs::renameat_with(folder, temporary, folder, name, RenameFlags::NOREPLACE) {
            // Some file systems cannot rename this way. A hard link also refuses to replace, in one
            // step.
            Err(Errno::INVAL | Errno::NOSYS) => {
                rustix::fs::linkat(folder, temporary, folder, name, AtFlags::empty())?;
                rustix::fs::unlinkat(folder, temporary, AtFlags::empty())
            }
            other => other,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.renamed
            && let Err(errno) =
                rustix::fs::unlinkat(&self.folder, &self.temporary, AtFlags::empty())
            && errno != Errno::NOENT
        {
            tracing::warn!(error = %errno, "a temporary file of an unfinished download could not \
                                            be removed");
        }
    }
}

/// A reader that fails when more than `left` bytes come, so that a growing file ends at the cap and
/// not at the disk's.
#[derive(Debug)]
pub(super) struct Capped<R> {
    inner: R,
    left: u64,
}

impl<R> Capped<R> {
    pub(super) fn new(inner: R, most: u64) -> Capped<R> {
        Capped { inner, left: most }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Capped<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        let read = (buffer.filled().len() - before) as u64;
        match self.left.checked_sub(read) {
            Some(left) => {
                self.left = left;
                Poll::Ready(Ok(()))
            }
            None => {
                buffer.set_filled(before);
                Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::FileTooLarge,
                    "the file is larger than this server copies",
                )))
            }
        }
    }
}

fn beneath(root: &Root, path: &Path) -> Option<PathBuf> {
    let rest = path
        .strip_prefix(&root.given)
        .or_else(|_| path.strip_prefix(&root.canonical));
    rest.ok().map(Path::to_owned)
}

fn refuse_protected(
    path: &str,
    rest: &Path,
    names: &[&str],
    verb: &'static str,
) -> Result<(), HostFileError> {
    match rest
        .components()
        .find(|component| names.contains(&plain_name(component.as_os_str()).as_str()))
    {
        Some(component) => {
            let name = component.as_os_str().to_string_lossy().into_owned();
            Err(HostFileError::Protected {
                path: path.to_owned(),
                name,
                verb,
            })
        }
        None => Ok(()),
    }
}

/// A name as the most forgiving file system would compare it: without case, without characters that
/// nobody sees, without dots and spaces at the end.
fn plain_name(name: &OsStr) -> String {
    let text = String::from_utf8_lossy(name.as_bytes());
    let visible: String = text
        .chars()
        .filter(|character| !is_unseen(*character))
        .collect();
    visible.trim_end_matches(['.', ' ']).to_lowercase()
}

fn open_temporary(folder: &OwnedFd) -> rustix::io::Result<(OsString, File)> {
    /// Tells the temporary files of one process apart; another process has another number in the
    /// name.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    /// Leftovers of a process with our number may be in the way, but hardly this many.
    const ATTEMPTS: usize = 100;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut outcome = Err(Errno::EXIST);
    for _ in 0..ATTEMPTS {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = OsString::from(format!(".cellblock-{}-{number}.part", std::process::id()));
        outcome = rustix::fs::openat(folder, &name, flags, Mode::from_raw_mode(0o666))
            .map(|handle| (name, File::from(handle)));
        if !matches!(outcome, Err(Errno::EXIST)) {
            break;
        }
    }
    outcome
}

fn kind_text(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "something unknown",
    }
}

/// Runs file work where it may wait: a path can lie on a slow or absent network disk.
pub(super) async fn on_a_thread<T: Send + 'static>(
    files: &HostFiles,
    work: impl FnOnce(HostFiles) -> Result<T, HostFileError> + Send + 'static,
) -> Result<T, HostFileError> {
    let files = files.clone();
    match tokio::task::spawn_blocking(move || work(files)).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is ending and took the work away; nobody waits for an answer any more.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;
    use tokio::io::AsyncReadExt;

    use super::*;

    /// An allowed directory, a forbidden one beside it, and the rules for both.
    struct Case {
        base: TempDir,
        files: HostFiles,
    }

    impl Case {
        fn new() -> Case {
            let base = tempfile::tempdir().unwrap();
            for name in ["allowed", "allowed/sub", "outside"] {
                std::fs::create_dir(base.path().join(name)).unwrap();
            }
            std::fs::write(base.path().join("allowed/a.txt"), "inside").unwrap();
            std::fs::write(base.path().join("outside/secret"), "outside").unwrap();
            let files = HostFiles::new(&[base.path().join("allowed")], 1000).unwrap();
            Case { base, files }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.base.path().join(name)
        }

        fn text(&self, name: &str) -> String {
            self.path(name).to_str().unwrap().to_owned()
        }

        fn read(&self, path: &str) -> Result<String, HostFileError> {
            let mut text = String::new();
            self.files.open(path)?.read_to_string(&mut text).unwrap();
            Ok(text)
        }

        fn write(&self, path: &str, overwrite: Overwrite) -> Result<(), HostFileError> {
            let mut destination = self.files.create(path, overwrite)?;
            destination.take_file().write_all(b"new").unwrap();
            destination.keep()
        }

        /// All names in the allowed directory, to show that nothing is left behind.
        fn names(&self, folder: &str) -> Vec<String> {
            let entries = std::fs::read_dir(self.path(folder)).unwrap();
            let mut names: Vec<_> = entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        }
    }

    #[test]
    fn a_file_is_read_by_relative_and_by_absolute_path() {
        let case = Case::new();
        assert_eq!(case.read("a.txt").unwrap(), "inside");
        assert_eq!(
            case.read("./sub/.././a.txt").unwrap_err().to_string(),
            "\"./sub/.././a.txt\" is not a usable path: it has \"..\" in it"
        );
        assert_eq!(case.read(&case.text("allowed/a.txt")).unwrap(), "inside");
        assert_eq!(case.read(&case.text("allowed//./a.txt")).unwrap(), "inside");
    }

    #[test]
    fn a_path_outside_is_refused_and_the_message_lists_what_is_allowed() {
        let case = Case::new();
        let path = case.text("outside/secret");
        let error = case.read(&path).unwrap_err();
        assert!(matches!(error, HostFileError::NotAllowed { .. }), "{error}");
        assert!(
            error.to_string().contains(&path) && error.to_string().contains(&case.text("allowed")),
            "{error}"
        );
        let beside = format!("{}-more/a.txt", case.text("allowed"));
        assert!(
            matches!(case.read(&beside), Err(HostFileError::NotAllowed { .. })),
            "a longer name is another directory"
        );
    }

    #[test]
    fn climbing_out_is_refused() {
        let case = Case::new();
        for path in [
            "../outside/secret",
            "sub/../../outside/secret",
            &case.text("allowed/../outside/secret"),
        ] {
            assert!(
                matches!(case.read(path), Err(HostFileError::Malformed { .. })),
                "{path}"
            );
            assert!(
                matches!(
                    case.write(path, Overwrite::Allowed),
                    Err(HostFileError::Malformed { .. })
                ),
                "{path}"
            );
        }
    }

    #[test]
    fn links_inside_an_allowed_directory_are_not_followed() {
        let case = Case::new();
        symlink(case.path("outside/secret"), case.path("allowed/file-link")).unwrap();
        symlink(case.path("outside"), case.path("allowed/folder-link")).unwrap();
        symlink("a.txt", case.path("allowed/inner-link")).unwrap();
        for path in ["file-link", "folder-link/secret", "inner-link"] {
            assert!(
                matches!(case.read(path), Err(HostFileError::Link { .. })),
                "{path}"
            );
        }
        assert!(case.write("folder-link/new", Overwrite::Allowed).is_err());
        assert!(
            case.write("folder-link/deeper/new", Overwrite::Allowed)
                .is_err()
        );
        assert!(matches!(
            case.write("file-link", Overwrite::Allowed),
            Err(HostFileError::NotAFile { what: "a link", .. })
        ));
        assert_eq!(case.names("outside"), ["secret"]);
        assert_eq!(
            std::fs::read_to_string(case.path("outside/secret")).unwrap(),
            "outside"
        );
    }

    #[test]
    fn a_folder_that_is_swapped_for_a_link_during_opens_never_leads_out() {
        /// Enough that a check before the open, instead of in it, loses the race many times.
        const ATTEMPTS: usize = 20_000;
        let case = Case::new();
        for (folder, text) in [("allowed/real", "inside"), ("elsewhere", "outside")] {
            std::fs::create_dir(case.path(folder)).unwrap();
            std::fs::write(case.path(folder).join("file"), text).unwrap();
        }
        symlink(case.path("elsewhere"), case.path("allowed/link")).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        let (folder, link) = (case.path("allowed/real"), case.path("allowed/link"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(
                        rustix::fs::CWD,
                        &folder,
                        rustix::fs::CWD,
                        &link,
                        RenameFlags::EXCHANGE,
                    )
                    .unwrap();
                }
            });
            let read = (0..ATTEMPTS).filter_map(|_| case.read("real/file").ok());
            let followed = read.filter(|text| text != "inside").count();
            over.store(true, Ordering::Relaxed);
            assert_eq!(followed, 0);
        });
        let either = [case.read("real/file"), case.read("link/file")];
        assert_eq!(
            either.iter().filter(|read| read.is_ok()).count(),
            1,
            "one of the names is the folder, the other the link"
        );
    }

    #[test]
    fn an_allowed_directory_may_be_given_through_a_link() {
        let case = Case::new();
        symlink(case.path("allowed"), case.path("link")).unwrap();
        let files = HostFiles::new(&[case.path("link")], 1000).unwrap();
        files.open(&case.text("link/a.txt")).unwrap();
        files.open(&case.text("allowed/a.txt")).unwrap();
        assert!(files.open(&case.text("outside/secret")).is_err());
    }

    #[test]
    fn a_handle_keeps_its_directory_when_the_name_is_given_to_another() {
        let case = Case::new();
        std::fs::rename(case.path("allowed"), case.path("moved")).unwrap();
        symlink(case.path("outside"), case.path("allowed")).unwrap();
        assert!(matches!(
            case.read(&case.text("allowed/secret")),
            Err(HostFileError::NotFound { .. })
        ));
        assert_eq!(case.read(&case.text("allowed/a.txt")).unwrap(), "inside");
    }

    #[test]
    fn only_regular_files_are_read_and_nothing_blocks() {
        let case = Case::new();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            case.path("allowed/fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        let _listener =
            std::os::unix::net::UnixListener::bind(case.path("allowed/socket")).unwrap();
        for path in ["fifo", "socket", "sub", ".", &case.text("allowed")] {
            let error = case.read(path).unwrap_err();
            assert!(
                matches!(error, HostFileError::NotAFile { .. }),
                "{path}: {error}"
            );
        }
    }

    #[test]
    fn devices_are_refused() {
        let files = HostFiles::new(&[PathBuf::from("/dev")], 1000).unwrap();
        assert!(matches!(
            files.open("null"),
            Err(HostFileError::NotAFile {
                what: "a device",
                ..
            })
        ));
    }

    #[test]
    fn a_missing_file_is_named() {
        let case = Case::new();
        assert_eq!(
            case.read("none.txt").unwrap_err().to_string(),
            "\"none.txt\" does not exist"
        );
        let home = case.read("~/none.txt").unwrap_err().to_string();
        assert!(
            home.starts_with("\"~/none.txt\" does not exist; `~` does not mean the home"),
            "{home}"
        );
    }

    #[test]
    fn a_file_over_the_cap_is_refused_at_once_even_when_it_is_sparse() {
        let case = Case::new();
        File::create(case.path("allowed/exact"))
            .unwrap()
            .set_len(1000)
            .unwrap();
        File::create(case.path("allowed/huge"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        case.files.open("exact").unwrap();
        assert!(matches!(
            case.files.open("huge"),
            Err(HostFileError::TooLarge { largest: 1000, .. })
        ));
    }

    #[tokio::test]
    async fn a_file_that_grows_past_the_cap_ends_in_an_error() {
        let mut text = Vec::new();
        Capped::new(&b"12345"[..], 5)
            .read_to_end(&mut text)
            .await
            .unwrap();
        assert_eq!(text, b"12345");
        let error = Capped::new(&b"123456"[..], 5)
            .read_to_end(&mut Vec::new())
            .await
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_download_makes_the_folders_on_the_way() {
        let case = Case::new();
        case.write("x/y/z.txt", Overwrite::Refused).unwrap();
        assert_eq!(
            std::fs::read_to_string(case.path("allowed/x/y/z.txt")).unwrap(),
            "new"
        );
        assert_eq!(case.names("allowed/x/y"), ["z.txt"]);
    }

    #[test]
    fn a_file_is_replaced_only_when_asked() {
        let case = Case::new();
        assert!(matches!(
            case.write("a.txt", Overwrite::Refused),
            Err(HostFileError::Exists { .. })
        ));
        assert_eq!(case.read("a.txt").unwrap(), "inside");
        case.write("a.txt", Overwrite::Allowed).unwrap();
        assert_eq!(case.read("a.txt").unwrap(), "new");
        assert!(matches!(
            case.write("sub", Overwrite::Allowed),
            Err(HostFileError::NotAFile {
                what: "a directory",
                ..
            })
        ));
    }

    #[test]
    fn a_file_that_appears_during_a_download_is_not_replaced() {
        let case = Case::new();
        let destination = case.files.create("late.txt", Overwrite::Refused).unwrap();
        std::fs::write(case.path("allowed/late.txt"), "theirs").unwrap();
        assert!(matches!(
            destination.keep(),
            Err(HostFileError::Exists { .. })
        ));
        assert_eq!(case.read("late.txt").unwrap(), "theirs");
        assert_eq!(case.names("allowed"), ["a.txt", "late.txt", "sub"]);
    }

    #[test]
    fn an_unfinished_download_leaves_nothing() {
        let case = Case::new();
        let mut destination = case.files.create("part.txt", Overwrite::Refused).unwrap();
        destination.take_file().write_all(b"half").unwrap();
        assert_eq!(
            case.names("allowed").len(),
            3,
            "the temporary file is beside the destination"
        );
        drop(destination);
        assert_eq!(case.names("allowed"), ["a.txt", "sub"]);
    }

    #[test]
    fn protected_names_are_never_written_in_any_case_or_place() {
        let case = Case::new();
        for path in [
            ".bashrc",
            ".BashRC",
            "sub/.zshrc",
            ".ssh/authorized_keys",
            ".git/hooks/pre-commit",
            "project/.GIT/config",
            ".vscode/tasks.json",
            ".cursor/mcp.json",
            "mcp.json",
            "claude_desktop_config.json",
            ".env",
            ".env.",
            ".g\u{200c}it/config",
            "crontab",
            &case.text("allowed/.profile"),
        ] {
            let error = case.write(path, Overwrite::Allowed).unwrap_err();
            assert!(
                matches!(error, HostFileError::Protected { .. }),
                "{path}: {error}"
            );
        }
        assert_eq!(case.names("allowed"), ["a.txt", "sub"]);
        for path in ["bashrc", "git/config", "environment", "my.env", "notes.git"] {
            case.write(path, Overwrite::Refused).unwrap();
        }
    }

    #[test]
    fn secrets_are_not_read_but_other_configuration_is() {
        let case = Case::new();
        std::fs::write(case.path("allowed/.env"), "KEY=1").unwrap();
        std::fs::write(case.path("allowed/.gitconfig"), "[user]").unwrap();
        assert!(matches!(
            case.read(".env"),
            Err(HostFileError::Protected { verb: "reads", .. })
        ));
        assert_eq!(case.read(".gitconfig").unwrap(), "[user]");
    }

    #[test]
    fn without_allowed_directories_nothing_is_reachable() {
        assert!(matches!(
            HostFiles::none().open("/etc/hostname"),
            Err(HostFileError::NoDirectories)
        ));
        assert!(matches!(
            HostFiles::none().create("a", Overwrite::Allowed),
            Err(HostFileError::NoDirectories)
        ));
    }

    #[test]
    fn control_characters_and_over_long_names_are_refused() {
        let case = Case::new();
        for path in ["a\0b", "a\nb", "\u{7f}", &"x".repeat(256)] {
            assert!(
                matches!(
                    case.write(path, Overwrite::Allowed),
                    Err(HostFileError::Malformed { .. })
                ),
                "{path:?}"
            );
        }
        case.write(&"x".repeat(255), Overwrite::Refused).unwrap();
    }

    #[test]
    fn a_later_allowed_directory_is_found_too() {
        let case = Case::new();
        let files = HostFiles::new(&[case.path("allowed"), case.path("outside")], 1000).unwrap();
        files.open(&case.text("outside/secret")).unwrap();
        assert!(HostFiles::new(&[case.path("missing")], 1000).is_err());
    }
}
