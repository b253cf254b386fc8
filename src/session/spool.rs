//! The spool: the full text of an execution, for readers who need more than head and tail.
//!
//! Short texts stay in memory. Longer ones go to an unnamed temporary file, which is deleted with
//! its last handle. A spool that is full, or whose disk is full, stops accepting text and reports
//! that; the execution continues.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Limit in bytes for the kept text of one execution.
const MAX_SPOOL_BYTES: u64 = 64 * 1024 * 1024;
/// Texts up to this size need no file. Twenty of them are kept per session.
const IN_MEMORY: usize = 16 * 1024;

/// Collects text while an execution runs.
#[derive(Debug, Default)]
pub(super) struct Spool {
    memory: Vec<u8>,
    file: Option<File>,
    /// Bytes in the file; the rest of the kept text is in memory.
    filed: u64,
    size: u64,
    /// Characters that were written, including those that are not kept.
    chars: u64,
    cut: bool,
}

impl Spool {
    pub(super) fn write(&mut self, text: &str) {
        self.chars += text.chars().count() as u64;
        if self.cut || text.is_empty() {
            return;
        }
        let room = usize::try_from(MAX_SPOOL_BYTES - self.size).unwrap_or(usize::MAX);
        let kept = &text[..text.floor_char_boundary(room)];
        self.cut = kept.len() < text.len();
        if self.store(kept.as_bytes()).is_err() {
            self.memory.truncate(self.memory.len() - kept.len());
            self.cut = true;
            return;
        }
        self.size += kept.len() as u64;
    }

    /// Returns the number of bytes kept so far.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of characters written so far, including those that are not kept.
    pub(super) fn chars(&self) -> u64 {
        self.chars
    }

    /// Reads at most `limit` kept bytes from `offset` on. The range may start or end inside a
    /// character.
    pub(super) fn read_range(&self, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        let left = usize::try_from(self.size.saturating_sub(offset))
            .unwrap_or(usize::MAX)
            .min(limit);
        let from_file = usize::try_from(self.filed.saturating_sub(offset))
            .unwrap_or(usize::MAX)
            .min(left);
        let mut bytes = vec![0; from_file];
        if let (Some(file), 1..) = (&self.file, from_file) {
            file.read_exact_at(&mut bytes, offset)?;
        }
        let start = usize::try_from(offset.saturating_sub(self.filed))
            .unwrap_or(usize::MAX)
            .min(self.memory.len());
        bytes.extend_from_slice(&self.memory[start..start + (left - from_file)]);
        Ok(bytes)
    }

    pub(super) fn finish(mut self) -> io::Result<FullOutput> {
        if self.file.is_some() {
            self.flush()?;
        }
        let text = match self.file {
            Some(file) => Kept::File(file),
            None => Kept::Memory(self.memory),
        };
        Ok(FullOutput {
            text: Arc::new(text),
            total_bytes: self.size,
            cut: self.cut,
        })
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
        if let Some(file) = &self.file {
            // At its offset rather than at the file's end: an earlier attempt may have written a
            // part of it.
            file.write_all_at(&self.memory, self.filed)?;
            self.filed += self.memory.len() as u64;
            self.memory.clear();
        }
        Ok(())
    }
}

/// The full text of an execution.
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

    /// Returns whether the text was longer than the kept part.
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Reads at most `limit` bytes from `offset`. The range may start or end inside a character.
    pub fn read_range(&self, offset: u64, limit: usize) -> io::Result<Vec<u8>> {
        let left = self.total_bytes.saturating_sub(offset);
        let size = usize::try_from(left).unwrap_or(usize::MAX).min(limit);
        match &*self.text {
            Kept::Memory(bytes) => {
                let from = usize::try_from(offset)
                    .unwrap_or(usize::MAX)
                    .min(bytes.len());
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
    fn what_was_written_until_now_is_read_in_ranges_from_file_and_memory() {
        let mut spool = Spool::default();
        let mut all = String::new();
        for (written, offset) in [(10, 4), (20_000, 15_000), (100, 19_990), (20_000, 20_050)] {
            let text = (0..written)
                .map(|number| char::from(b'a' + (number % 26) as u8))
                .collect::<String>();
            spool.write(&text);
            all.push_str(&text);
            assert_eq!(spool.size(), all.len() as u64);
            for (offset, limit) in [
                (0, usize::MAX),
                (offset, 100),
                (all.len() - 1, 5),
                (all.len(), 5),
                (all.len() + 9, 5),
            ] {
                let expected = all
                    .get(offset..all.len().min(offset.saturating_add(limit)))
                    .unwrap_or("");
                assert_eq!(
                    spool.read_range(offset as u64, limit).unwrap(),
                    expected.as_bytes(),
                    "{offset} {limit}"
                );
            }
        }
        assert_eq!(
            spool.finish().unwrap().read_range(0, usize::MAX).unwrap(),
            all.as_bytes()
        );
    }

    #[test]
    fn a_spool_takes_a_bounded_amount_and_says_so() {
        let chunk = "x".repeat(1024 * 1024 + 1);
        let mut spool = Spool::default();
        for _ in 0..65 {
            spool.write(&chunk);
        }
        let full = spool.finish().unwrap();
        assert_eq!(full.total_bytes(), MAX_SPOOL_BYTES);
        assert!(full.is_cut());
    }
}
