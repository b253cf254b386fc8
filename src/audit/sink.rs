//! The log file: only this process writes it, and a line is appended whole or not at all.
//!
//! ```text
//! audit.jsonl                   the current file
//! audit.jsonl.000000000001      rotated files, named by the number of their first record
//! audit.jsonl.torn-…            an incomplete line left by a crash
//! audit.jsonl.lock              held for as long as the log is open
//! ```
//!
//! Order matters when a file is rotated. (1) The next file is written under another name, with its
//! first record in it and synced to the disk. (2) The current file gets its number as a second
//! name. (3) The next file takes the current name. After a crash in between, the current file is
//! still the current one; the next one is dropped, which cannot contain a caller's record yet, and
//! step 2 finds its work done. If the current file is missing or empty, the chain continues after
//! the newest numbered one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};

use super::AuditError;
use super::chain::{Flaw, Head, Link, MAX_LINE_BYTES, check};
use super::event::{Digest, TornLine};

/// Syncs the written data to the disk.
pub(super) type Syncing = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Stores lines.
pub(super) trait Sink: Send {
    /// Appends a line. After an error no part of it is in the log, or it is removed before the next
    /// line is appended.
    fn append(&mut self, line: &[u8]) -> io::Result<()>;

    /// Returns the size of the current file in bytes.
    fn length(&self) -> u64;

    /// Renames the current file by the number of its first record, and starts the next with `line`.
    /// After an error the current file is still the current one.
    fn turn_over(&mut self, first_sequence: u64, line: &[u8]) -> io::Result<()>;

    /// Returns the name that `turn_over` gives the current file.
    fn name_when_turned_over(&self, first_sequence: u64) -> String;

    /// Returns a function that syncs everything appended so far to the disk.
    fn syncing(&self) -> Syncing;

    /// Checks whether the file is still at its path, with all its contents.
    fn look(&self) -> io::Result<()>;
}

/// The initial state of an opened log.
#[derive(Debug, PartialEq)]
pub(super) struct Found {
    /// The last record so far.
    pub head: Head,
    pub start: Start,
    pub torn: Option<TornLine>,
}

#[derive(Debug, PartialEq)]
pub(super) enum Start {
    /// There was no log.
    New,
    /// The current file has records, starting with this one.
    Within { first_sequence: u64 },
    /// The current file is empty, and a file of this name was rotated before it.
    After { name: String },
}

/// The sink that is a file.
pub(super) struct FileSink {
    path: PathBuf,
    file: Arc<File>,
    length: u64,
    /// There is data beyond `length` that must be removed before the next line.
    is_torn: bool,
    _lock: Lock,
}

/// Locks the file against other servers. Dropping it releases the lock explicitly: closing alone
/// would keep it held while a process that was just forked has a copy of the descriptor.
struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl FileSink {
    /// Opens the file, or creates it, checks who can write it, and finds the end of its chain.
    pub(super) fn open(path: &Path) -> Result<(FileSink, Found), AuditError> {
        let failed = |cause: io::Error| AuditError::Open {
            path: path.to_owned(),
            cause,
        };
        check_folder(path)?;
        let lock = Lock(open_private(&beside(path, ".lock"), OFlags::CREATE).map_err(failed)?);
        match flock(&lock.0, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(AuditError::InUse {
                    path: path.to_owned(),
                });
            }
            Err(error) => return Err(failed(error.into())),
        }
        let mut file = open_private(path, OFlags::CREATE | OFlags::APPEND).map_err(failed)?;
        check_file(path, &file)?;
        match fs::remove_file(beside(path, ".next")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let damaged = |why: String| AuditError::Damaged {
            path: path.to_owned(),
            why,
        };
        let mut end = read_end(&mut file).map_err(failed)?;
        let (head, start) = match end.last.take() {
            Some(last) => {
                let first = read_first(&mut file).map_err(failed)?;
                let first_sequence = first
                    .map_err(|flaw| damaged(format!("its first line is no record: {flaw}")))?
                    .head
                    .sequence;
                let last =
                    last.map_err(|flaw| damaged(format!("its last line is no record: {flaw}")))?;
                (last.head, Start::Within { first_sequence })
            }
            None if end.length > 0 => {
                return Err(damaged(
                    "it holds no line of the length of a record".to_owned(),
                ));
            }
            None => what_was_before(path)?,
        };
        let torn = if end.torn.is_empty() {
            None
        } else {
            Some(set_aside(path, &file, head.sequence + 1, end.length, &end.torn).map_err(failed)?)
        };
        let sink = FileSink {
            path: path.to_owned(),
            file: Arc::new(file),
            length: end.length,
            is_torn: false,
            _lock: lock,
        };
        Ok((sink, Found { head, start, torn }))
    }

    fn mend(&mut self) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.length)?;
            self.is_torn = false;
        }
        Ok(())
    }
}

impl Sink for FileSink {
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        if let Err(error) = (&*self.file).write_all(line) {
            self.is_torn = true;
            // If this fails too, it is retried before the next line.
            let _ = self.mend();
            return Err(error);
        }
        self.length += line.len() as u64;
        Ok(())
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn turn_over(&mut self, first_sequence: u64, line: &[u8]) -> io::Result<()> {
        self.mend()?;
        self.file.sync_data()?;
        let next_path = beside(&self.path, ".next");
        let next = open_private(&next_path, OFlags::CREATE | OFlags::EXCL | OFlags::APPEND)?;
        let put_in_place = || {
            (&next).write_all(line)?;
            next.sync_data()?;
            let archive = self
                .path
                .with_file_name(self.name_when_turned_over(first_sequence));
            // A hard link does not replace an existing name; a rename would.
            match fs::hard_link(&self.path, &archive) {
                Err(error) if !is_same_file(&self.file, &archive) => return Err(error),
                _ => {}
            }
            fs::rename(&next_path, &self.path)?;
            File::open(folder_of(&self.path))?.sync_all()
        };
        if let Err(error) = put_in_place() {
            let _ = fs::remove_file(&next_path);
            return Err(error);
        }
        self.file = Arc::new(next);
        self.length = line.len() as u64;
        Ok(())
    }

    fn name_when_turned_over(&self, first_sequence: u64) -> String {
        archive_name(&self.path, first_sequence)
    }

    fn syncing(&self) -> Syncing {
        let file = self.file.clone();
        Arc::new(move || file.sync_data())
    }

    fn look(&self) -> io::Result<()> {
        if !is_same_file(&self.file, &self.path) {
            return Err(io::Error::other("the file is not in its place any more"));
        }
        if self.file.metadata()?.len() < self.length {
            return Err(io::Error::other("somebody has cut the file"));
        }
        Ok(())
    }
}

fn is_same_file(file: &File, path: &Path) -> bool {
    let (Ok(ours), Ok(there)) = (file.metadata(), fs::symlink_metadata(path)) else {
        return false;
    };
    (ours.dev(), ours.ino()) == (there.dev(), there.ino())
}

/// Opens a file for reading and writing; a new one is accessible to this user only. A link in its
/// place is rejected.
fn open_private(path: &Path, extra: OFlags) -> io::Result<File> {
    // Without NONBLOCK, opening a pipe in its place would block.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | extra;
    Ok(File::from(openat(
        CWD,
        path,
        flags,
        Mode::RUSR | Mode::WUSR,
    )?))
}

fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(ending);
    PathBuf::from(name)
}

const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A user who can write to the folder can replace the file.
fn check_folder(path: &Path) -> Result<(), AuditError> {
    let folder = folder_of(path);
    let about = fs::metadata(folder).map_err(|cause| AuditError::Open {
        path: path.to_owned(),
        cause,
    })?;
    let why = if !about.is_dir() {
        "it is not in a folder"
    } else if about.mode() & OTHERS_WRITE != 0 && about.mode() & STICKY == 0 {
        "others can write its folder"
    } else if about.uid() != 0 && about.uid() != rustix::process::geteuid().as_raw() {
        "its folder belongs to somebody else"
    } else {
        return Ok(());
    };
    Err(AuditError::Untrusted {
        path: path.to_owned(),
        why,
    })
}

fn check_file(path: &Path, file: &File) -> Result<(), AuditError> {
    let about = file.metadata().map_err(|cause| AuditError::Open {
        path: path.to_owned(),
        cause,
    })?;
    let why = if !about.is_file() {
        "it is not a regular file"
    } else if about.mode() & OTHERS_WRITE != 0 {
        "others can write it"
    } else if about.uid() != rustix::process::geteuid().as_raw() {
        "it belongs to somebody else"
    } else {
        return Ok(());
    };
    Err(AuditError::Untrusted {
        path: path.to_owned(),
        why,
    })
}

/// The end of a file.
struct End {
    /// Bytes up to the end of the last complete line.
    length: u64,
    /// The last complete line, if one ends within the bytes that were read.
    last: Option<Result<Link, Flaw>>,
    /// The bytes after it.
    torn: Vec<u8>,
}

fn read_end(file: &mut File) -> io::Result<End> {
    let size = file.metadata()?.len();
    // A complete line and a torn one.
    let from = size.saturating_sub(2 * MAX_LINE_BYTES as u64);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    Read::by_ref(file)
        .take(2 * MAX_LINE_BYTES as u64)
        .read_to_end(&mut bytes)?;
    let Some(line_end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
        // Only the very first line of a file can be torn without another before it.
        let is_first = from == 0 && bytes.len() < MAX_LINE_BYTES;
        let (length, torn) = if is_first {
            (0, bytes)
        } else {
            (size, Vec::new())
        };
        return Ok(End {
            length,
            last: None,
            torn,
        });
    };
    let torn = bytes.split_off(line_end + 1);
    bytes.pop();
    let line_start = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map(|at| at + 1);
    let last = match line_start {
        Some(start) => check(&bytes[start..]),
        None if from == 0 => check(&bytes),
        None => Err(Flaw::TooLong),
    };
    Ok(End {
        length: size - torn.len() as u64,
        last: Some(last),
        torn,
    })
}

fn read_first(file: &mut File) -> io::Result<Result<Link, Flaw>> {
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    Read::by_ref(file)
        .take(MAX_LINE_BYTES as u64)
        .read_to_end(&mut bytes)?;
    Ok(check(
        bytes
            .split(|byte| *byte == b'\n')
            .next()
            .unwrap_or_default(),
    ))
}

/// Digits in the name of a rotated file: enough for a million records a second for ten days, and it
/// still sorts after that.
const DIGITS: usize = 12;

fn archive_name(path: &Path, first_sequence: u64) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("{name}.{first_sequence:0DIGITS$}")
}

/// Returns the newest rotated file.
pub(super) fn newest_archive(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut newest: Option<(u64, String)> = None;
    for entry in fs::read_dir(folder_of(path))? {
        let Ok(name) = entry?.file_name().into_string() else {
            continue;
        };
        let number = name
            .rsplit('.')
            .next()
            .and_then(|number| number.parse().ok());
        let Some(number) = number.filter(|number| archive_name(path, *number) == name) else {
            continue;
        };
        if newest.as_ref().is_none_or(|(known, _)| *known < number) {
            newest = Some((number, name));
        }
    }
    Ok(newest.map(|(_, name)| path.with_file_name(name)))
}

/// Finds the predecessor of an empty file: the newest rotated file, or none.
fn what_was_before(path: &Path) -> Result<(Head, Start), AuditError> {
    let failed = |cause: io::Error| AuditError::Open {
        path: path.to_owned(),
        cause,
    };
    let Some(before) = newest_archive(path).map_err(failed)? else {
        return Ok((Head::beginning(), Start::New));
    };
    let name = before
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let damaged = |why: &str| AuditError::Damaged {
        path: before.clone(),
        why: why.to_owned(),
    };
    let mut file = open_private(&before, OFlags::empty()).map_err(failed)?;
    check_file(&before, &file)?;
    let end = read_end(&mut file).map_err(failed)?;
    match end.last {
        Some(Ok(last)) if end.torn.is_empty() => Ok((last.head, Start::After { name })),
        Some(Err(flaw)) => Err(damaged(&format!("its last line is no record: {flaw}"))),
        _ => Err(damaged("its last line is not whole")),
    }
}

/// Moves an incomplete line out of the log into a separate file: it may be the only trace of the
/// last event.
fn set_aside(
    path: &Path,
    file: &File,
    sequence: u64,
    length: u64,
    torn: &[u8],
) -> io::Result<TornLine> {
    // After several crashes at the same record there are several of them.
    let free = |attempt: u32| {
        let aside = beside(path, &format!(".torn-{sequence:0DIGITS$}-{attempt}"));
        open_private(&aside, OFlags::CREATE | OFlags::EXCL).map(|file| (aside, file))
    };
    let mut attempt = 1;
    let (aside, mut kept) = loop {
        match free(attempt) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 1000 => {
                attempt += 1
            }
            made => break made?,
        }
    };
    kept.write_all(torn)?;
    kept.sync_data()?;
    file.set_len(length)?;
    file.sync_data()?;
    let name = aside
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    Ok(TornLine {
        bytes: torn.len() as u64,
        digest: Digest::of(torn),
        set_aside: name.into(),
    })
}
