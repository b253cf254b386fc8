//! Verifies that files hold an unaltered chain of records.
//!
//! Every line must match its hash, every hash the following line, and the numbers must have no gap.
//! That finds records that were changed, removed, inserted or moved. A truncated end leaves a chain
//! that is valid but short; only a head noted elsewhere reveals it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::chain::{Flaw, Head, Link, MAX_LINE_BYTES, check, is_hash};

/// Facts about the chain from another source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// The record before the first one in the files. Without it the files must begin at record 1.
    pub after: Option<Noted>,
    /// A record that must be in the files.
    pub last: Option<Noted>,
}

/// A noted record: `1234` or `1234:<hash>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Noted {
    pub sequence: u64,
    pub hash: Option<String>,
}

/// A text that is not a noted record.
#[derive(Debug, thiserror::Error)]
#[error("a record is noted as its number, or as its number and its hash with a colon between them")]
pub struct NotNoted;

impl FromStr for Noted {
    type Err = NotNoted;

    fn from_str(text: &str) -> Result<Noted, NotNoted> {
        let (sequence, hash) = match text.split_once(':') {
            Some((sequence, hash)) => (sequence, Some(hash.to_ascii_lowercase())),
            None => (text, None),
        };
        let sequence = sequence.parse().map_err(|_| NotNoted)?;
        if hash.as_deref().is_some_and(|hash| !is_hash(hash)) {
            return Err(NotNoted);
        }
        Ok(Noted { sequence, hash })
    }
}

/// The result of a verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Complete lines.
    pub records: u64,
    pub last: Option<Head>,
    /// The faults; empty when the chain is unaltered. At most [`MAX_FINDINGS`].
    pub findings: Vec<Finding>,
    /// The total number of findings.
    pub found: u64,
}

/// Limit of kept findings. One fault can cause many.
pub const MAX_FINDINGS: usize = 100;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub file: PathBuf,
    pub line: u64,
    pub why: String,
}

/// A file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("could not read {}", path.display())]
pub struct VerifyError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

/// Verifies the chain in `files`, which may be given in any order: their first records determine
/// their sequence.
pub fn verify(files: &[PathBuf], known: &Known) -> Result<Report, VerifyError> {
    let mut walk = Walk::new(known);
    for path in in_order(files)? {
        let lines = Lines::open(&path);
        lines
            .and_then(|lines| walk.file(&path, lines))
            .map_err(|cause| VerifyError { path, cause })?;
    }
    Ok(walk.end())
}

fn in_order(files: &[PathBuf]) -> Result<Vec<PathBuf>, VerifyError> {
    let mut numbered = Vec::new();
    for path in files {
        let first = first_sequence(path).map_err(|cause| VerifyError {
            path: path.clone(),
            cause,
        })?;
        numbered.push((first, path.clone()));
    }
    // A file whose beginning cannot be read keeps its given position among the others like it.
    numbered.sort_by_key(|(first, _)| first.unwrap_or(u64::MAX));
    Ok(numbered.into_iter().map(|(_, path)| path).collect())
}

fn first_sequence(path: &Path) -> io::Result<Option<u64>> {
    let mut lines = Lines::open(path)?;
    Ok(match lines.next_line()? {
        Some(Line::Whole(line)) => check(&line).ok().map(|link| link.head.sequence),
        _ => None,
    })
}

/// The state of a walk along a chain.
struct Walk<'a> {
    known: &'a Known,
    before: Before,
    report: Report,
    /// The position of the last line, for findings about the whole chain.
    place: (PathBuf, u64),
    saw_last: bool,
}

/// The known facts about the record before the next line.
struct Before {
    sequence: u64,
    /// Unknown after an unreadable line.
    hash: Option<String>,
}

impl<'a> Walk<'a> {
    fn new(known: &'a Known) -> Walk<'a> {
        let before = match &known.after {
            Some(after) => Before {
                sequence: after.sequence,
                hash: after.hash.clone(),
            },
            None => Before {
                sequence: 0,
                hash: Some(Head::beginning().hash),
            },
        };
        let report = Report {
            records: 0,
            last: None,
            findings: Vec::new(),
            found: 0,
        };
        Walk {
            known,
            before,
            report,
            place: (PathBuf::new(), 0),
            saw_last: false,
        }
    }

    fn file(&mut self, path: &Path, mut lines: Lines<impl BufRead>) -> io::Result<()> {
        self.place = (path.to_owned(), 0);
        while let Some(line) = lines.next_line()? {
            self.place.1 += 1;
            match line {
                Line::Whole(line) => match check(&line) {
                    Ok(link) => self.link(link),
                    Err(flaw) => self.unreadable(flaw.to_string()),
                },
                Line::TooLong => self.unreadable(Flaw::TooLong.to_string()),
                Line::Unfinished => self
                    .unreadable("it has no end: it was torn, or is just being written".to_owned()),
            }
        }
        Ok(())
    }

    fn link(&mut self, link: Link) {
        let Link { head, previous } = link;
        let expected = self.before.sequence.saturating_add(1);
        if head.sequence > expected && self.report.records == 0 && self.known.after.is_none() {
            self.find(format!(
                "records {expected} to {} are missing before it; if they were put away, say so \
                 with --after {}:{previous}",
                head.sequence - 1,
                head.sequence - 1,
            ));
        } else if head.sequence > expected {
            self.find(format!(
                "records {expected} to {} are missing before it",
                head.sequence - 1
            ));
        } else if head.sequence < expected {
            self.find(format!(
                "it is record {} and follows record {}: it was moved, copied or put in",
                head.sequence, self.before.sequence
            ));
        } else if self
            .before
            .hash
            .as_ref()
            .is_some_and(|hash| *hash != previous)
        {
            self.find(
                "it was written after another record than the one before it: that one was put in \
                 or replaced"
                    .to_owned(),
            );
        }
        self.compare_with_noted(&head);
        self.report.records += 1;
        self.before = Before {
            sequence: head.sequence,
            hash: Some(head.hash.clone()),
        };
        self.report.last = Some(head);
    }

    fn compare_with_noted(&mut self, head: &Head) {
        let Some(noted) = self
            .known
            .last
            .as_ref()
            .filter(|noted| noted.sequence == head.sequence)
        else {
            return;
        };
        self.saw_last = true;
        if noted.hash.as_ref().is_some_and(|hash| *hash != head.hash) {
            self.find(format!(
                "it is not the record {} that was noted: its hash is another",
                noted.sequence
            ));
        }
    }

    /// Reports a line that is not a record. It may stand in the place of one, and the chain is
    /// resumed after it.
    fn unreadable(&mut self, why: String) {
        self.find(why);
        self.before = Before {
            sequence: self.before.sequence.saturating_add(1),
            hash: None,
        };
    }

    fn find(&mut self, why: String) {
        self.report.found += 1;
        if self.report.findings.len() < MAX_FINDINGS {
            self.report.findings.push(Finding {
                file: self.place.0.clone(),
                line: self.place.1,
                why,
            });
        }
    }

    fn end(mut self) -> Report {
        match &self.known.last {
            Some(noted) if !self.saw_last => {
                self.find(format!(
                    "record {} is not in the files: the end was cut off",
                    noted.sequence
                ));
            }
            _ if self.report.records == 0 && self.report.found == 0 => {
                self.find("there is no record".to_owned())
            }
            _ => {}
        }
        self.report
    }
}

/// A line of a file, without its end.
pub enum Line {
    Whole(Vec<u8>),
    /// It is longer than a record can be.
    TooLong,
    /// The file ends before the line does.
    Unfinished,
}

/// The lines of a file, with a limit on the memory of each.
pub struct Lines<R>(R);

impl Lines<BufReader<File>> {
    pub fn open(path: &Path) -> io::Result<Self> {
        File::open(path).map(BufReader::new).map(Lines)
    }
}

impl<R: BufRead> Lines<R> {
    /// Reads the next line, if there is one.
    pub fn next_line(&mut self) -> io::Result<Option<Line>> {
        let mut line = Vec::new();
        let read =
            io::Read::take(&mut self.0, MAX_LINE_BYTES as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(None);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
            return Ok(Some(Line::Whole(line)));
        }
        if read < MAX_LINE_BYTES {
            return Ok(Some(Line::Unfinished));
        }
        self.0.skip_until(b'\n')?;
        Ok(Some(Line::TooLong))
    }
}

#[cfg(test)]
#[path = "verify/tests.rs"]
mod tests;
