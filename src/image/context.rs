//! The build context: the files of a build as one tar archive, streamed while it is created.
//!
//! The archive is reproducible: order, times, owners and permissions do not depend on when or where
//! it is created. The science packages are half a gigabyte, so it is never in memory as a whole.
//! The format is POSIX tar. Only the needed part is implemented, and only writing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream;
use tokio::sync::mpsc;

/// The earliest time that every archive format can represent. `prepare.py` uses the same.
const TIME: u64 = 315_532_800;
/// Block size of a tar archive.
const BLOCK: usize = 512;
/// Size of a chunk, and the maximum number of queued chunks.
const PIECE: usize = 256 * 1024;
const WAITING: usize = 4;

/// One entry of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    Folder,
    Text(String),
    /// A host file, its size, and whether it is executable.
    File {
        path: PathBuf,
        size: u64,
        is_program: bool,
    },
    Link(PathBuf),
}

/// The files of a build, by their names in the archive.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Context(Vec<(String, Entry)>);

impl Context {
    pub(super) fn add_text(&mut self, name: &str, text: &str) {
        self.0.push((name.to_owned(), Entry::Text(text.to_owned())));
    }

    /// Adds a directory with everything below it.
    pub(super) fn add_tree(&mut self, name: &str, folder: &Path) -> io::Result<()> {
        self.0.push((name.to_owned(), Entry::Folder));
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let inner = entry
                .file_name()
                .into_string()
                .map_err(|_| io::Error::other("a file's name is not text"))?;
            let inner = format!("{name}/{inner}");
            let found = entry.metadata()?;
            if found.is_dir() {
                self.add_tree(&inner, &entry.path())?;
            } else if found.is_symlink() {
                self.0
                    .push((inner, Entry::Link(std::fs::read_link(entry.path())?)));
            } else {
                let is_program = found.permissions().mode() & 0o100 != 0;
                self.0.push((
                    inner,
                    Entry::File {
                        path: entry.path(),
                        size: found.len(),
                        is_program,
                    },
                ));
            }
        }
        Ok(())
    }

    /// Returns the total size of the files.
    pub(super) fn size(&self) -> u64 {
        let size = |entry: &Entry| match entry {
            Entry::File { size, .. } => *size,
            Entry::Text(text) => text.len() as u64,
            Entry::Folder | Entry::Link(_) => 0,
        };
        self.0.iter().map(|(_, entry)| size(entry)).sum()
    }

    /// Returns the archive in chunks. A separate thread creates it and ends when the reader stops.
    pub(super) fn archive(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::task::spawn_blocking(move || {
            let mut pieces = Pieces {
                waiting: Vec::with_capacity(PIECE),
                sender,
            };
            let written = self.write(&mut pieces).and_then(|()| pieces.flush());
            if let Err(error) = written {
                // The reader must not mistake a partial archive for a complete one. A failed send
                // means that the reader is gone.
                let _ = pieces.sender.blocking_send(Err(error));
            }
        });
        stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|piece| (piece, receiver))
        })
    }

    fn write(mut self, output: &mut dyn Write) -> io::Result<()> {
        self.0.sort_by(|left, right| left.0.cmp(&right.0));
        for (name, entry) in &self.0 {
            write_entry(name, entry, output)?;
        }
        output.write_all(&[0; 2 * BLOCK])
    }
}

fn write_entry(name: &str, entry: &Entry, output: &mut dyn Write) -> io::Result<()> {
    let (kind, mode, size, target) = match entry {
        Entry::Folder => (b'5', 0o755, 0, None),
        Entry::Text(text) => (b'0', 0o644, text.len() as u64, None),
        Entry::File {
            size,
            is_program: true,
            ..
        } => (b'0', 0o755, *size, None),
        Entry::File { size, .. } => (b'0', 0o644, *size, None),
        Entry::Link(target) => (b'2', 0o777, 0, Some(target.as_path())),
    };
    let name = if kind == b'5' {
        format!("{name}/")
    } else {
        name.to_owned()
    };
    let target = target.map_or(&b""[..], |target| target.as_os_str().as_bytes());
    let records = long_records(name.as_bytes(), target);
    if !records.is_empty() {
        output.write_all(&header(
            b"././@PaxHeader",
            b"",
            b'x',
            0o644,
            records.len() as u64,
        ))?;
        output.write_all(&records)?;
        pad(records.len() as u64, output)?;
    }
    output.write_all(&header(name.as_bytes(), target, kind, mode, size))?;
    match entry {
        Entry::Text(text) => output.write_all(text.as_bytes())?,
        Entry::File { path, size, .. } => {
            let copied = io::copy(&mut File::open(path)?.take(*size), output)?;
            if copied != *size {
                return Err(io::Error::other("a file became shorter while it was read"));
            }
        }
        Entry::Folder | Entry::Link(_) => {}
    }
    pad(size, output)
}

/// Fields of a header: offset and length.
const NAME: (usize, usize) = (0, 100);
const MODE: (usize, usize) = (100, 8);
const OWNER: (usize, usize) = (108, 8);
const GROUP: (usize, usize) = (116, 8);
const SIZE: (usize, usize) = (124, 12);
const MODIFIED: (usize, usize) = (136, 12);
const CHECKSUM: (usize, usize) = (148, 8);
const KIND: usize = 156;
const TARGET: (usize, usize) = (157, 100);
const MAGIC: (usize, usize) = (257, 8);

/// Returns extended records for names that do not fit into a header. They precede it.
fn long_records(name: &[u8], target: &[u8]) -> Vec<u8> {
    let mut records = Vec::new();
    for (key, value, fits) in [("path", name, NAME.1), ("linkpath", target, TARGET.1)] {
        if value.len() > fits || !value.is_ascii() {
            records.extend(record(key, value));
        }
    }
    records
}

/// Returns one extended record. It begins with its own length, including the digits of the length.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    [format!("{length} {key}=").as_bytes(), value, b"\n"].concat()
}

fn header(name: &[u8], target: &[u8], kind: u8, mode: u32, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |(start, length): (usize, usize), value: &[u8]| {
        let value = &value[..value.len().min(length)];
        block[start..start + value.len()].copy_from_slice(value);
    };
    put(NAME, name);
    put(MODE, format!("{mode:07o}").as_bytes());
    put(OWNER, b"0000000");
    put(GROUP, b"0000000");
    put(SIZE, format!("{size:011o}").as_bytes());
    put(MODIFIED, format!("{TIME:011o}").as_bytes());
    put(TARGET, target);
    put(MAGIC, b"ustar\x0000");
    // The checksum is computed with its own field as spaces.
    put(CHECKSUM, b"        ");
    put((KIND, 1), &[kind]);
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[CHECKSUM.0..CHECKSUM.0 + 8].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn pad(size: u64, output: &mut dyn Write) -> io::Result<()> {
    let over = (size % BLOCK as u64) as usize;
    if over == 0 {
        Ok(())
    } else {
        output.write_all(&[0; BLOCK][over..])
    }
}

/// Buffers written bytes and sends them in chunks.
struct Pieces {
    waiting: Vec<u8>,
    sender: mpsc::Sender<io::Result<Bytes>>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.waiting.extend_from_slice(bytes);
        if self.waiting.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.waiting, Vec::with_capacity(PIECE));
        self.sender
            .blocking_send(Ok(piece.into()))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::{Command, Stdio};

    use futures_util::StreamExt;

    use super::*;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a".repeat(90)).join("b".repeat(90));
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("ü.txt"), "deep").unwrap();
        std::fs::write(folder.path().join("program"), "x".repeat(700)).unwrap();
        std::fs::set_permissions(
            folder.path().join("program"),
            std::fs::Permissions::from_mode(0o4711),
        )
        .unwrap();
        symlink("/usr/bin/python3", folder.path().join("link")).unwrap();
        symlink("c".repeat(150), folder.path().join("long-link")).unwrap();
        folder
    }

    fn context(folder: &Path) -> Context {
        let mut context = Context::default();
        context.add_tree("packages", folder).unwrap();
        context.add_text("Dockerfile", "FROM x\n");
        context
    }

    fn archive(folder: &Path) -> Vec<u8> {
        let mut bytes = Vec::new();
        context(folder).write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn tar_reads_what_is_written() {
        let folder = folder();
        let target = tempfile::tempdir().unwrap();
        let mut tar = Command::new("tar")
            .arg("-xpf")
            .arg("-")
            .arg("-C")
            .arg(target.path())
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        tar.stdin
            .take()
            .unwrap()
            .write_all(&archive(folder.path()))
            .unwrap();
        assert!(tar.wait().unwrap().success());
        let packages = target.path().join("packages");
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap();
        assert_eq!(
            read(
                packages
                    .join("a".repeat(90))
                    .join("b".repeat(90))
                    .join("ü.txt")
            ),
            "deep"
        );
        assert_eq!(read(packages.join("program")), "x".repeat(700));
        assert_eq!(read(target.path().join("Dockerfile")), "FROM x\n");
        assert_eq!(
            std::fs::read_link(packages.join("link")).unwrap(),
            Path::new("/usr/bin/python3")
        );
        assert_eq!(
            std::fs::read_link(packages.join("long-link")).unwrap(),
            PathBuf::from("c".repeat(150))
        );
        let found = std::fs::metadata(packages.join("program")).unwrap();
        assert_eq!(
            found.permissions().mode() & 0o7777,
            0o755,
            "no right is lent"
        );
        let modified = found
            .modified()
            .unwrap()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        assert_eq!(modified.as_secs(), TIME);
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let (first, second) = (folder(), folder());
        assert!(
            archive(first.path()) == archive(second.path()),
            "neither place nor time nor order matters"
        );
        std::fs::write(second.path().join("program"), "y".repeat(700)).unwrap();
        assert!(
            archive(first.path()) != archive(second.path()),
            "but the content does"
        );
    }

    #[test]
    fn a_record_counts_its_own_digits() {
        assert_eq!(record("path", b"x"), b"9 path=x\n");
        for (value, length) in [(1, 9), (2, 11), (90, 99), (91, 101)] {
            let made = record("path", &vec![b'x'; value]);
            assert_eq!(made.len(), length);
            assert!(made.starts_with(format!("{length} path=x").as_bytes()));
        }
    }

    #[tokio::test]
    async fn the_archive_comes_in_pieces_and_whole() {
        let folder = folder();
        std::fs::write(folder.path().join("large"), vec![7; 3 * PIECE]).unwrap();
        let pieces: Vec<Bytes> = context(folder.path())
            .archive()
            .map(|piece| piece.unwrap())
            .collect()
            .await;
        assert!(pieces.len() > 3, "{} pieces", pieces.len());
        assert!(pieces.concat() == archive(folder.path()));
    }

    #[tokio::test]
    async fn a_file_that_vanishes_is_an_error_and_not_a_shorter_archive() {
        let folder = folder();
        let context = context(folder.path());
        std::fs::remove_file(folder.path().join("program")).unwrap();
        let pieces: Vec<io::Result<Bytes>> = context.archive().collect().await;
        assert!(pieces.last().unwrap().is_err());
    }
}
