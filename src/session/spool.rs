//! The spool: the whole text of an execution, for those who want more than head and tail.
//!
//! Short texts stay in memory. Longer ones go to a temporary file without a name, which vanishes with its last handle. A spool that
//! is full, or whose disk is, stops taking text and says so; the execution goes on.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The most text kept of one execution.
const LARGEST_SPOOL: u64 = 64 * 1024 * 1024;
/// Texts up to this size need no file. Twenty of them are kept in a session.
const IN_MEMORY: usize = 16 * 1024;

/// Takes text while an execution runs.
#[derive(Debug, Default)]
pub(super) struct Spool {
    memory: Vec<u8>,
    file: Option<File>,
    size: u64,
    cut: bool,
}

impl Spool {
    pub(super) fn write(&mut self, text: &str) {
        if self.cut || text.is_empty() {
            return;
        }
        let room = usize::try_from(LARGEST_SPOOL - self.size).unwrap_or(usize::MAX);
        let kept = &text[..text.floor_char_boundary(room)];
        self.cut = kept.len() < text.len();
        if self.store(kept.as_bytes()).is_err() {
            self.cut = true;
            return;
        }
        self.size += kept.len() as u64;
    }

    pub(super) fn finish(mut self) -> io::Result<FullOutput> {
        if self.file.is_some() {
            self.flush()?;
        }
        let text = match self.file {
            Some(file) => Kept::File(file),
            None => Kept::Memory(self.memory),
        };
        Ok(FullOutput { text: Arc::new(text), total_bytes: self.size, cut: self.cut })
    }

    fn store(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.memory.extend_from_slice(bytes);
        if self.memory.len() <= IN_MEMORY {
            return Ok(());
        }
        if self.file.is_none() {
            self.file = Some(tempfile::tempfile()?);
        }
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.write_all(&self.memory)?;
            self.memory.clear();
        }
        Ok(())
    }
}

/// The whole text of an execution.
#[derive(Debug, Clone)]
pub struct FullOutput {
    text: Arc<Kept>,
    total_bytes: u64,
    cut: bool,
}

#[derive(Debug)]
enum Kept {
    Memory(Vec<u8>),
    File(File),
}

impl FullOutput {
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Tells whether the text was longer than is kept.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Reads at most `limit` bytes from `offset`. It may begin or end inside a character.
    pub fn read_range(&self, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        let left = self.total_bytes.saturating_sub(offset);
        let size = usize::try_from(left).unwrap_or(usize::MAX).min(limit);
        match &*self.text {
            Kept::Memory(bytes) => {
                let from = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                Ok(bytes[from..from + size].to_vec())
            }
            Kept::File(file) => {
                let mut bytes = vec![0; size];
                file.read_exact_at(&mut bytes, offset)?;
                Ok(bytes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spooled(texts: &[&str]) -> FullOutput {
        let mut spool = Spool::default();
        for text in texts {
            spool.write(text);
        }
        spool.finish().unwrap()
    }

    #[test]
    fn short_and_long_texts_are_read_back_in_ranges() {
        for repeat in [1, 10_000] {
            let text = "0123456789".repeat(repeat);
            let full = spooled(&[&text[..3], &text[3..]]);
            assert_eq!(full.total_bytes(), text.len() as u64);
            assert!(!full.is_cut());
            assert_eq!(full.read_range(0, usize::MAX).unwrap(), text.as_bytes());
            assert_eq!(full.read_range(4, 3).unwrap(), b"456");
            assert_eq!(full.read_range(text.len() as u64, 3).unwrap(), b"");
            assert_eq!(full.read_range(u64::MAX, 3).unwrap(), b"");
        }
    }

    #[test]
    fn a_spool_takes_a_bounded_amount_and_says_so() {
        let chunk = "x".repeat(1024 * 1024 + 1);
        let mut spool = Spool::default();
        for _ in 0..65 {
            spool.write(&chunk);
        }
        let full = spool.finish().unwrap();
        assert_eq!(full.total_bytes(), LARGEST_SPOOL);
        assert!(full.is_cut());
    }
}
