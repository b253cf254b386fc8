//! Stream format for a tree that comes out of a sandbox. It contains only plain files.
//!
//! ```text
//! {"path": "polars/__init__.py", "size": 5, "program": false}⏎
//! x = 1
//! {"end": 1}⏎
//! ```
//!
//! Each header is one line, followed by `size` bytes of content. The last line has the number of
//! files. A common archive format is avoided on purpose: this one cannot express a link, a device,
//! an owner or a second size, so no reader can be misled by one.
//!
//! The stream is a claim. Paths are checked before a file is created; counts and sizes are checked
//! while the stream is read. A failure leaves nothing behind that is used later.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Maximum length of a header: a path may have 1,024 bytes, and JSON may need six for each.
const MAX_HEADER_LENGTH: u64 = 8 * 1024;
const MAX_PATH_LENGTH: usize = 1024;
const DEEPEST_PATH: usize = 64;

/// Limits on one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    pub files: u64,
    pub bytes: u64,
}

/// Error of a rejected stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error("the package has a file that cannot be kept: \"{}\" {why}", path.escape_debug())]
    Path { path: String, why: &'static str },
    #[error("the package has more than {0} files")]
    TooManyFiles(u64),
    #[error("the package is larger than {}", mebibytes(*.0))]
    TooLarge(u64),
    #[error("what came out of the installer is not a package: {0}")]
    Malformed(&'static str),
    #[error("could not write the package")]
    Files(#[from] io::Error),
}

pub(super) fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

/// Metadata of one file in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StreamEntry {
    pub(super) size: u64,
    pub(super) program: bool,
    /// SHA-256 of the content, or `None` if the content was not read.
    pub(super) content: Option<[u8; 32]>,
    /// Change time (ctime) in seconds and nanoseconds, or zero if it was not requested. No program
    /// can set this time.
    pub(super) changed: (i64, i64),
}

/// All files of a tree by path.
pub(super) type TreeListing = BTreeMap<String, StreamEntry>;

/// Returns the hash of a listing: paths, sizes and kinds, and contents where they are known.
pub(super) fn hash_of(listing: &TreeListing) -> String {
    let mut hash = Sha256::new();
    for (path, entry) in listing {
        // Paths contain no NUL, so two different listings never give the same bytes.
        hash.update(path.as_bytes());
        hash.update([0, u8::from(entry.program)]);
        hash.update(entry.size.to_be_bytes());
        hash.update(entry.content.unwrap_or_default());
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Returns the hash of a listing's change times.
pub(super) fn stamp_of(listing: &TreeListing) -> String {
    let mut hash = Sha256::new();
    for (
        path,
        StreamEntry {
            changed: (seconds, nanoseconds),
            ..
        },
    ) in listing
    {
        hash.update(path.as_bytes());
        hash.update([0]);
        hash.update(seconds.to_be_bytes());
        hash.update(nanoseconds.to_be_bytes());
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    path: String,
    size: u64,
    program: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct End {
    end: u64,
}

/// Writes the files of a stream below `folder` and returns what was written. `folder` must be empty
/// and inaccessible to others.
///
/// Every file becomes readable by all and writable by none.
pub(super) fn unpack(
    stream: impl Read,
    folder: &Path,
    bounds: Bounds,
) -> Result<TreeListing, StreamError> {
    let mut stream = BufReader::with_capacity(1 << 16, stream);
    let mut listing = TreeListing::new();
    let mut left = bounds.bytes;
    loop {
        let line = header_line(&mut stream)?;
        if let Ok(End { end }) = serde_json::from_slice(&line) {
            return finish(stream, listing, end);
        }
        let header: Header = serde_json::from_slice(&line)
            .map_err(|_| StreamError::Malformed("a header cannot be read"))?;
        let refused = |why| StreamError::Path {
            path: header.path.clone(),
            why,
        };
        check_path(&header.path).map_err(refused)?;
        if listing.len() as u64 >= bounds.files {
            return Err(StreamError::TooManyFiles(bounds.files));
        }
        left = left
            .checked_sub(header.size)
            .ok_or(StreamError::TooLarge(bounds.bytes))?;
        let content = write_file(&mut stream, &folder.join(&header.path), &header)?;
        let entry = StreamEntry {
            size: header.size,
            program: header.program,
            content: Some(content),
            changed: (0, 0),
        };
        listing.insert(header.path, entry);
    }
}

fn header_line(stream: &mut impl BufRead) -> Result<Vec<u8>, StreamError> {
    let mut line = Vec::new();
    stream
        .by_ref()
        .take(MAX_HEADER_LENGTH)
        .read_until(b'\n', &mut line)?;
    match line.pop() {
        Some(b'\n') => Ok(line),
        Some(_) if line.len() as u64 + 1 == MAX_HEADER_LENGTH => {
            Err(StreamError::Malformed("a header is too long"))
        }
        _ => Err(StreamError::Malformed("it ends in the middle")),
    }
}

fn finish(
    mut stream: impl Read,
    listing: TreeListing,
    count: u64,
) -> Result<TreeListing, StreamError> {
    if count != listing.len() as u64 {
        return Err(StreamError::Malformed(
            "the number of files is not what it says",
        ));
    }
    if listing.is_empty() {
        return Err(StreamError::Malformed("it holds no files"));
    }
    match stream.read(&mut [0])? {
        0 => Ok(listing),
        _ => Err(StreamError::Malformed("something follows its end")),
    }
}

fn check_path(path: &str) -> Result<(), &'static str> {
    if path.is_empty() || path.len() > MAX_PATH_LENGTH {
        return Err("has no name, or one that is too long");
    }
    if path.contains(char::is_control) {
        return Err("has a control character in its name");
    }
    if path.starts_with('/') {
        return Err("is not below the package's folder");
    }
    let mut depth = 0;
    for part in path.split('/') {
        match part {
            ".." | "." | "" => return Err("is not below the package's folder"),
            _ if part.len() > 255 => return Err("has a name that is too long"),
            _ => depth += 1,
        }
    }
    if depth > DEEPEST_PATH {
        Err("lies too deep")
    } else {
        Ok(())
    }
}

/// Creates one file, which must not exist, from the next bytes of the stream. Returns the hash of
/// its content.
fn write_file(
    stream: &mut impl Read,
    path: &Path,
    header: &Header,
) -> Result<[u8; 32], StreamError> {
    let twice = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory => StreamError::Path {
            path: header.path.clone(),
            why: "comes twice, or once as a file and once as a folder",
        },
        _ => StreamError::Files(error),
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(twice)?;
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(twice)?;
    let mut hash = Sha256::new();
    let mut left = header.size;
    let mut buffer = [0; 1 << 14];
    while left > 0 {
        let wanted = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let count = stream.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(StreamError::Malformed("it ends in the middle"));
        }
        hash.update(&buffer[..count]);
        file.write_all(&buffer[..count])?;
        left -= count as u64;
    }
    file.set_permissions(Permissions::from_mode(if header.program {
        0o555
    } else {
        0o444
    }))?;
    Ok(hash.finalize().into())
}

/// Lists the files below `folder`. Fails on anything other than plain files and directories.
pub(super) fn list(folder: &Path, with_contents: bool) -> io::Result<TreeListing> {
    let mut listing = TreeListing::new();
    let mut folders = vec![String::new()];
    while let Some(prefix) = folders.pop() {
        for entry in fs::read_dir(folder.join(&prefix))? {
            let entry = entry?;
            let name = entry
                .file_name()
                .into_string()
                .map_err(|_| io::Error::other("a name is not UTF-8"))?;
            let path = if prefix.is_empty() {
                name
            } else {
                format!("{prefix}/{name}")
            };
            let found = entry.metadata()?;
            if found.is_dir() {
                folders.push(path);
            } else if found.is_file() {
                let content = if with_contents {
                    Some(hash_file(&entry.path())?)
                } else {
                    None
                };
                let program = found.permissions().mode() & 0o111 != 0;
                let changed = (found.ctime(), found.ctime_nsec());
                listing.insert(
                    path,
                    StreamEntry {
                        size: found.len(),
                        program,
                        content,
                        changed,
                    },
                );
            } else {
                return Err(io::Error::other(
                    "it holds something that is neither a file nor a folder",
                ));
            }
        }
    }
    Ok(listing)
}

fn hash_file(path: &Path) -> io::Result<[u8; 32]> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.finalize().into()),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const ROOMY: Bounds = Bounds {
        files: 100,
        bytes: 1 << 20,
    };

    /// Returns the stream of these files as a correct installer writes it.
    pub(crate) fn stream(files: &[(&str, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (path, content) in files {
            let header = serde_json::json!({
                "path": path, "size": content.len(), "program": path.starts_with("bin/"),
            });
            bytes.extend(format!("{header}\n{content}").into_bytes());
        }
        bytes.extend(format!("{{\"end\": {}}}\n", files.len()).into_bytes());
        bytes
    }

    fn unpack_into(
        bytes: &[u8],
        bounds: Bounds,
    ) -> (tempfile::TempDir, Result<TreeListing, StreamError>) {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("deep/tree");
        fs::create_dir_all(&place).unwrap();
        let result = unpack(bytes, &place, bounds);
        (folder, result)
    }

    #[track_caller]
    fn refusal(bytes: &[u8]) -> String {
        let (folder, result) = unpack_into(bytes, ROOMY);
        let said = result.expect_err("it should be refused").to_string();
        let outside: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(outside, ["deep"], "nothing was written elsewhere");
        assert_eq!(fs::read_dir(folder.path().join("deep")).unwrap().count(), 1);
        said
    }

    #[test]
    fn files_arrive_with_their_bytes_and_without_the_right_to_change_them() {
        let (folder, result) = unpack_into(
            &stream(&[("a/b.py", "x = 1\n"), ("bin/run", "#!x"), ("empty", "")]),
            ROOMY,
        );
        let listing = result.unwrap();
        let place = folder.path().join("deep/tree");
        assert_eq!(fs::read_to_string(place.join("a/b.py")).unwrap(), "x = 1\n");
        let mode =
            |path: &str| fs::metadata(place.join(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!(
            [mode("a/b.py"), mode("bin/run"), mode("empty")],
            [0o444, 0o555, 0o444]
        );
        let found = list(&place, true).unwrap();
        assert_eq!(
            hash_of(&found),
            hash_of(&listing),
            "what was read back is what was written"
        );
        let before = stamp_of(&found);
        fs::set_permissions(place.join("empty"), Permissions::from_mode(0o444)).unwrap();
        assert_ne!(
            stamp_of(&list(&place, true).unwrap()),
            before,
            "the kernel saw that, although nothing is different"
        );
    }

    #[test]
    fn a_path_cannot_leave_the_tree() {
        for path in [
            "/etc/passwd",
            "../x",
            "../../x",
            "a/../../x",
            "a/..",
            ".",
            "./x",
            "a//b",
            "a/",
            "",
            "a\0b",
            "a\nb",
        ] {
            assert!(
                refusal(&stream(&[(path, "x")])).contains("cannot be kept"),
                "{path:?}"
            );
        }
        refusal(&stream(&[(
            "a/".repeat(100).as_str().trim_end_matches('/'),
            "x",
        )]));
        refusal(&stream(&[("x".repeat(256).as_str(), "x")]));
        refusal(&stream(&[("x/".repeat(600).as_str(), "x")]));
        for path in ["..a/b..", "a/...", ".hidden", "a\\b", "ä/ö"] {
            unpack_into(&stream(&[(path, "x")]), ROOMY)
                .1
                .unwrap_or_else(|why| panic!("{path:?}: {why}")); // control
        }
    }

    #[test]
    fn a_file_comes_once_and_is_no_folder() {
        for files in [
            [("a", "1"), ("a", "2")],
            [("a", "1"), ("a/b", "2")],
            [("a/b", "1"), ("a", "2")],
        ] {
            assert!(refusal(&stream(&files)).contains("twice"), "{files:?}");
        }
        unpack_into(&stream(&[("a/b", "1"), ("a/c", "2")]), ROOMY)
            .1
            .unwrap(); // control
    }

    #[test]
    fn count_and_size_are_bounded_before_anything_is_read() {
        let bounds = Bounds {
            files: 2,
            bytes: 10,
        };
        let check = |files: &[(&str, &str)]| unpack_into(&stream(files), bounds).1;
        assert!(check(&[("a", "12345"), ("b", "12345")]).is_ok()); // control
        assert!(matches!(
            check(&[("a", ""), ("b", ""), ("c", "")]),
            Err(StreamError::TooManyFiles(2))
        ));
        assert!(matches!(
            check(&[("a", "12345"), ("b", "123456")]),
            Err(StreamError::TooLarge(10))
        ));
        let boast = b"{\"path\":\"a\",\"size\":18446744073709551615,\"program\":false}\nx";
        assert!(matches!(
            unpack_into(boast, bounds).1,
            Err(StreamError::TooLarge(10))
        ));
    }

    #[test]
    fn whatever_is_not_the_whole_stream_is_refused() {
        let whole = stream(&[("a", "hello")]);
        unpack_into(&whole, ROOMY).1.unwrap(); // control
        for end in 0..whole.len() {
            refusal(&whole[..end]);
        }
        refusal(&[whole.as_slice(), b"x"].concat());
        refusal(&stream(&[]));
        refusal(b"{\"path\":\"a\",\"size\":0,\"program\":false}\n{\"end\":2}\n");
        refusal(format!("{{\"path\":\"{}", "a".repeat(20_000)).as_bytes());
    }

    #[test]
    fn a_header_says_nothing_but_path_size_and_kind() {
        let with = |members: &str| {
            format!("{{\"path\":\"a\",\"size\":1{members}}}\nx{{\"end\":1}}\n").into_bytes()
        };
        unpack_into(&with(",\"program\":false"), ROOMY).1.unwrap(); // control
        for more in [
            "",
            ",\"program\":1",
            ",\"program\":false,\"link\":\"/etc/passwd\"",
            ",\"program\":false,\"mode\":3565",
            ",\"program\":false,\"size\":2",
            ",\"program\":false,\"path\":\"../b\"",
        ] {
            assert!(
                refusal(&with(more)).contains("a header cannot be read"),
                "{more}"
            );
        }
    }

    #[test]
    fn a_listing_that_differs_in_anything_has_another_name() {
        let entry = |size, program, content| StreamEntry {
            size,
            program,
            content,
            changed: (0, 0),
        };
        let one = |path: &str, entry| hash_of(&TreeListing::from([(path.to_owned(), entry)]));
        let base = one("a", entry(1, false, Some([1; 32])));
        assert_eq!(base, one("a", entry(1, false, Some([1; 32]))));
        for other in [
            one("b", entry(1, false, Some([1; 32]))),
            one("a", entry(2, false, Some([1; 32]))),
            one("a", entry(1, true, Some([1; 32]))),
            one("a", entry(1, false, Some([2; 32]))),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn a_listing_refuses_links() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "x").unwrap();
        assert_eq!(list(folder.path(), false).unwrap().len(), 1); // control
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("link")).unwrap();
        list(folder.path(), false).unwrap_err();
    }
}
