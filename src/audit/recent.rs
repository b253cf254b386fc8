//! The ids of the last recorded executions, read from the end of a log.
//!
//! A server that dies right after it has recorded an execution could not confirm it to the process
//! that holds the sessions. That process reports the execution to the next server, which finds it
//! here and does not record it a second time.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use serde::Deserialize;

use super::sink::newest_archive;

/// Bytes of a log that are read. Confirmations are sent at once, so lost ones belong to the last
/// few records.
const END: u64 = 1 << 20;

#[derive(Deserialize)]
struct Line {
    kind: String,
    details: Details,
}

#[derive(Deserialize)]
struct Details {
    execution: Option<String>,
}

/// Returns the ids of executions in the last records of the log at `path`, the oldest first.
pub(super) fn executions(path: &Path) -> io::Result<Vec<String>> {
    let end = read_end(path, END)?;
    let missing = END - end.len() as u64;
    let before = match newest_archive(path)? {
        Some(archive) if missing > 0 => read_end(&archive, missing)?,
        _ => Vec::new(),
    };
    Ok([before, end]
        .iter()
        .flat_map(|bytes| bytes.split(|byte| *byte == b'\n'))
        .filter_map(execution)
        .collect())
}

/// Returns the id of the execution that a line records. An incomplete line records nothing.
fn execution(line: &[u8]) -> Option<String> {
    let line: Line = serde_json::from_slice(line).ok()?;
    line.details.execution.filter(|_| line.kind == "execution")
}

fn read_end(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::event::{Digest, Event, Execution, ServerStopped};
    use super::super::{Audit, AuditSettings, List};

    fn execution(name: &str) -> Event {
        Event::new(Execution {
            execution: name.into(),
            code: Digest::of(name),
            status: "ok".into(),
            elapsed: Duration::ZERO,
            cpu: None,
            memory_peak: None,
            blocked: List::default(),
            tool_calls: 0,
        })
    }

    #[test]
    fn a_log_that_is_opened_again_knows_its_last_executions_also_from_before_it_was_turned_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let settings = AuditSettings {
            turn_over_at: 2_000,
            ..AuditSettings::default()
        };
        let audit = Audit::open(&path, settings).unwrap();
        assert_eq!(audit.recent_executions(), Vec::<String>::new());
        for number in 0..5 {
            audit.record(execution(&format!("e-{number}"))).unwrap();
            audit
                .record(Event::new(ServerStopped {
                    reason: "e-99".into(),
                }))
                .unwrap();
        }
        drop(audit);
        let known = Audit::open(&path, settings).unwrap().recent_executions();
        assert!(
            known.ends_with(&["e-3".to_owned(), "e-4".to_owned()]),
            "{known:?}"
        );
        assert!(!known.contains(&"e-99".to_owned()), "only executions count");
    }
}
