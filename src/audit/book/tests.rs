//! Tests with a log in its own folder, and with one whose disk fails on demand.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::super::event::{Digest, QuotaRefused, SessionEnded};
use super::super::sink::{FileSink, Syncing};
use super::super::verify::{Known, Noted, verify};
use super::super::{Audit, AuditError};
use super::*;

struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        Place {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("audit.jsonl")
    }

    fn open(&self) -> Result<Book, AuditError> {
        self.open_with(AuditSettings::default())
    }

    fn open_with(&self, settings: AuditSettings) -> Result<Book, AuditError> {
        let (sink, found) = FileSink::open(&self.path())?;
        let book = Book::new(Box::new(sink), found, settings);
        book.begin().unwrap();
        Ok(book)
    }

    fn records(&self) -> Vec<Value> {
        records(&self.path())
    }

    /// All files of the log, without the lock and the torn lines.
    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let is_log = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            !name.ends_with(".lock") && !name.contains(".torn-")
        };
        entries.filter(is_log).collect()
    }

    #[track_caller]
    fn assert_whole(&self) {
        let report = verify(&self.files(), &Known::default()).unwrap();
        assert_eq!(report.findings, [], "{report:?}");
    }
}

fn records(path: &Path) -> Vec<Value> {
    fs::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn kinds(records: &[Value]) -> Vec<&str> {
    records
        .iter()
        .map(|record| record["kind"].as_str().unwrap())
        .collect()
}

fn call(session: &str) -> Event {
    Event::new(QuotaRefused {
        quota: "cells".into(),
        retry_after: None,
    })
    .by("anna")
    .in_session(session)
}

#[test]
fn a_log_goes_on_with_its_chain_when_it_is_opened_again() {
    let place = Place::new();
    let book = place.open().unwrap();
    book.record(call("s1"), Instant::now()).unwrap();
    let head = book.head();
    drop(book);
    let book = place.open().unwrap();
    assert_eq!(book.head(), head);
    book.record(call("s2"), Instant::now()).unwrap();
    let records = place.records();
    assert_eq!(
        kinds(&records),
        ["log_begun", "quota_refused", "quota_refused"]
    );
    assert_eq!(records[2]["previous"], head.hash.as_str());
    assert_eq!(records[2]["sequence"], 3);
    place.assert_whole();
}

#[test]
fn one_log_has_one_writer() {
    let place = Place::new();
    let book = place.open().unwrap();
    assert!(matches!(place.open(), Err(AuditError::InUse { .. })));
    drop(book);
    place.open().unwrap(); // control
}

#[test]
fn a_file_or_folder_that_others_can_write_is_refused() {
    let place = Place::new();
    drop(place.open().unwrap()); // control
    assert_eq!(
        fs::metadata(place.path()).unwrap().permissions().mode() & 0o777,
        0o600
    );
    for mode in [0o620, 0o602] {
        fs::set_permissions(place.path(), fs::Permissions::from_mode(mode)).unwrap();
        assert!(
            matches!(place.open(), Err(AuditError::Untrusted { .. })),
            "{mode:o}"
        );
    }
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o640)).unwrap();
    drop(place.open().unwrap());
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(place.open(), Err(AuditError::Untrusted { .. })));
    fs::set_permissions(place.folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    drop(place.open().unwrap());
}

#[test]
fn a_link_or_a_device_in_its_place_is_refused() {
    let place = Place::new();
    symlink(place.folder.path().join("elsewhere"), place.path()).unwrap();
    assert!(matches!(place.open(), Err(AuditError::Open { .. })));
    fs::remove_file(place.path()).unwrap();
    drop(place.open().unwrap()); // control
    assert!(FileSink::open(Path::new("/dev/null")).is_err());
}

#[test]
fn a_torn_line_is_set_aside_and_the_chain_goes_on() {
    let place = Place::new();
    let book = place.open().unwrap();
    book.record(call("s1"), Instant::now()).unwrap();
    drop(book);
    let whole = fs::read(place.path()).unwrap();
    let torn = b"{\"sequence\":3,\"time\":\"20";
    fs::write(place.path(), [whole.as_slice(), torn].concat()).unwrap();
    let book = place.open().unwrap();
    book.record(call("s2"), Instant::now()).unwrap();
    let records = place.records();
    assert_eq!(
        kinds(&records),
        ["log_begun", "quota_refused", "torn_line", "quota_refused"]
    );
    let details = &records[2]["details"];
    assert_eq!(details["bytes"], torn.len());
    assert_eq!(
        details["digest"],
        serde_json::to_value(Digest::of(torn)).unwrap()
    );
    let aside = place
        .folder
        .path()
        .join(details["set_aside"].as_str().unwrap());
    assert_eq!(fs::read(aside).unwrap(), torn);
    place.assert_whole();
}

#[test]
fn a_log_can_be_torn_at_any_byte_and_again_and_again() {
    let place = Place::new();
    drop(place.open().unwrap());
    let whole = fs::read(place.path()).unwrap();
    for length in 0..whole.len() {
        let place = Place::new();
        fs::write(place.path(), &whole[..length]).unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o600)).unwrap();
        drop(place.open().unwrap());
        // Torn again, at the same record.
        let bytes = fs::read(place.path()).unwrap();
        fs::write(place.path(), [&bytes, &whole[..20]].concat()).unwrap();
        drop(place.open().unwrap());
        place.assert_whole();
    }
}

#[test]
fn a_log_whose_last_record_was_changed_is_not_gone_on_with() {
    let place = Place::new();
    let book = place.open().unwrap();
    book.record(call("s1"), Instant::now()).unwrap();
    drop(book);
    let text = fs::read_to_string(place.path()).unwrap();
    fs::write(place.path(), text.replace("anna", "otto")).unwrap();
    let Err(AuditError::Damaged { why, .. }) = place.open() else {
        panic!("it was opened")
    };
    assert!(why.contains("changed"), "{why}");
    fs::write(place.path(), text).unwrap();
    place.open().unwrap(); // control
}

#[test]
fn large_files_are_turned_over_and_the_chain_goes_through_all_of_them() {
    let place = Place::new();
    let settings = AuditSettings {
        turn_over_at: 2_000,
        ..AuditSettings::default()
    };
    let book = place.open_with(settings).unwrap();
    for _ in 0..20 {
        book.record(call("s1"), Instant::now()).unwrap();
    }
    drop(book);
    let files = place.files();
    assert!(files.len() > 4, "{files:?}");
    for file in &files {
        assert!(fs::metadata(file).unwrap().len() <= 2_000, "{file:?}");
    }
    place.assert_whole();
    let present = place.records();
    assert_eq!(present[0]["kind"], "log_continued");
    let before = records(
        &place
            .folder
            .path()
            .join(present[0]["details"]["after"].as_str().unwrap()),
    );
    assert_eq!(present[0]["previous"], before.last().unwrap()["hash"]);
    let without_one: Vec<PathBuf> = files
        .iter()
        .filter(|file| !file.ends_with("audit.jsonl.000000000001"))
        .cloned()
        .collect();
    assert_eq!(without_one.len() + 1, files.len());
    let report = verify(&without_one, &Known::default()).unwrap();
    assert!(report.findings[0].why.contains("--after"), "{report:?}");
    let first = records(&place.folder.path().join("audit.jsonl.000000000001"));
    let last = first.last().unwrap();
    let note = format!("{}:{}", last["sequence"], last["hash"].as_str().unwrap());
    let known = Known {
        after: Some(note.parse().unwrap()),
        last: None,
    };
    assert_eq!(verify(&without_one, &known).unwrap().findings, []);
    drop(place.open_with(settings).unwrap());
    place.assert_whole();
}

#[test]
fn a_log_whose_present_file_was_put_away_goes_on_after_the_newest_numbered_one() {
    let place = Place::new();
    let settings = AuditSettings {
        turn_over_at: 1_000,
        ..AuditSettings::default()
    };
    let book = place.open_with(settings).unwrap();
    (0..5).for_each(|_| book.record(call("s1"), Instant::now()).unwrap());
    drop(book);
    fs::remove_file(place.path()).unwrap();
    let book = place.open().unwrap();
    assert_eq!(kinds(&place.records()), ["log_continued"]);
    drop(book);
    place.assert_whole();
}

#[test]
fn a_crash_while_turning_over_leaves_a_log_that_goes_on() {
    let place = Place::new();
    let settings = AuditSettings {
        turn_over_at: 1_500,
        ..AuditSettings::default()
    };
    drop(place.open_with(settings).unwrap());
    // The state after step 2: the current file has its number too, and the next one has its first
    // record.
    fs::hard_link(
        place.path(),
        place.folder.path().join("audit.jsonl.000000000001"),
    )
    .unwrap();
    fs::write(
        place.folder.path().join("audit.jsonl.next"),
        "a record that nobody was promised\n",
    )
    .unwrap();
    let book = place.open_with(settings).unwrap();
    (0..5).for_each(|_| book.record(call("s1"), Instant::now()).unwrap());
    drop(book);
    assert_eq!(
        place.records()[0]["details"]["after"],
        "audit.jsonl.000000000001",
        "it was turned over"
    );
    place.assert_whole();
}

#[test]
fn a_file_that_cannot_be_turned_over_grows_on() {
    let place = Place::new();
    let settings = AuditSettings {
        turn_over_at: 1_000,
        ..AuditSettings::default()
    };
    fs::write(
        place.folder.path().join("audit.jsonl.000000000001"),
        "somebody else's\n",
    )
    .unwrap();
    fs::write(place.path(), "").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(
        place.open_with(settings),
        Err(AuditError::Damaged { .. } | AuditError::Untrusted { .. })
    ));
    fs::remove_file(place.folder.path().join("audit.jsonl.000000000001")).unwrap();
    let book = place.open_with(settings).unwrap();
    fs::write(
        place.folder.path().join("audit.jsonl.000000000001"),
        "somebody else's\n",
    )
    .unwrap();
    (0..5).for_each(|_| book.record(call("s1"), Instant::now()).unwrap());
    drop(book);
    assert_eq!(place.records().len(), 6);
    assert_eq!(
        verify(&[place.path()], &Known::default()).unwrap().findings,
        []
    );
}

#[test]
fn a_flood_is_cut_off_and_summed_up_and_others_are_recorded() {
    let place = Place::new();
    let settings = AuditSettings {
        records_per_hour: 10,
        ..AuditSettings::default()
    };
    let book = place.open_with(settings).unwrap();
    let now = Instant::now();
    (0..1_000).for_each(|_| book.record(call("loud"), now).unwrap());
    book.record(call("quiet"), now).unwrap();
    let records = place.records();
    assert_eq!(records.len(), 1 + 10 + 1 + 1);
    assert_eq!(
        (&records[11]["kind"], &records[11]["details"]["count"]),
        (&"suppressed".into(), &0.into())
    );
    assert_eq!(records[12]["session"], "quiet");
    book.tick(now + Duration::from_secs(3601));
    let records = place.records();
    let last = records.last().unwrap();
    assert_eq!(
        (&last["session"], &last["principal"]),
        (&"loud".into(), &"anna".into())
    );
    assert_eq!(last["details"]["count"], 990);
    book.record(call("loud"), now + Duration::from_secs(3602))
        .unwrap();
    assert_eq!(place.records().len(), records.len() + 1);
    place.assert_whole();
}

#[test]
fn what_was_suppressed_is_told_when_the_log_is_closed() {
    let place = Place::new();
    let settings = AuditSettings {
        records_per_hour: 1,
        ..AuditSettings::default()
    };
    let audit = Audit::open(&place.path(), settings).unwrap();
    (0..5).for_each(|_| audit.record(call("loud")).unwrap());
    drop(audit);
    let records = place.records();
    assert_eq!(records.last().unwrap()["details"]["count"], 4);
}

#[test]
fn a_file_that_was_moved_away_or_cut_under_us_stops_new_work() {
    for harm in [
        (|path| fs::rename(path, path.with_extension("moved")).unwrap()) as fn(&Path),
        |path| fs::write(path, "").unwrap(),
    ] {
        let place = Place::new();
        let book = place.open().unwrap();
        book.tick(Instant::now());
        book.record(call("s1"), Instant::now()).unwrap(); // control
        harm(&place.path());
        book.tick(Instant::now());
        assert!(book.failing().is_some());
        assert!(book.record(call("s1"), Instant::now()).is_err());
    }
}

/// A file whose disk can be full or reject writes.
struct Faulty {
    file: FileSink,
    faults: Arc<Faults>,
}

#[derive(Default)]
struct Faults {
    full: AtomicBool,
    unsynced: AtomicBool,
    syncs: AtomicU64,
}

impl Sink for Faulty {
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.faults.full.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.file.append(line)
    }

    fn length(&self) -> u64 {
        self.file.length()
    }

    fn turn_over(&mut self, first_sequence: u64, line: &[u8]) -> io::Result<()> {
        self.file.turn_over(first_sequence, line)
    }

    fn name_when_turned_over(&self, first_sequence: u64) -> String {
        self.file.name_when_turned_over(first_sequence)
    }

    fn syncing(&self) -> Syncing {
        let (faults, real) = (self.faults.clone(), self.file.syncing());
        Arc::new(move || {
            faults.syncs.fetch_add(1, Ordering::SeqCst);
            if faults.unsynced.load(Ordering::SeqCst) {
                Err(io::Error::other("the disk is broken"))
            } else {
                real()
            }
        })
    }

    fn look(&self) -> io::Result<()> {
        self.file.look()
    }
}

fn faulty(place: &Place, settings: AuditSettings) -> (Book, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    let (file, found) = FileSink::open(&place.path()).unwrap();
    let book = Book::new(
        Box::new(Faulty {
            file,
            faults: faults.clone(),
        }),
        found,
        settings,
    );
    book.begin().unwrap();
    (book, faults)
}

#[test]
fn while_the_disk_is_full_work_is_refused_and_it_recovers_when_there_is_space() {
    let place = Place::new();
    let (book, faults) = faulty(&place, AuditSettings::default());
    book.record(call("s1"), Instant::now()).unwrap();
    faults.full.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        assert!(book.record(call("s1"), Instant::now()).is_err());
        book.tick(Instant::now());
    }
    assert!(book.failing().is_some());
    faults.full.store(false, Ordering::SeqCst);
    book.tick(Instant::now());
    assert_eq!(book.failing(), None, "nobody had to call for it");
    book.record(call("s1"), Instant::now()).unwrap();
    let records = place.records();
    assert_eq!(
        kinds(&records),
        ["log_begun", "quota_refused", "unrecorded", "quota_refused"]
    );
    assert_eq!(records[2]["details"]["count"], 3);
    place.assert_whole();
}

#[test]
fn a_session_over_its_limit_is_refused_too_while_the_disk_is_full() {
    let place = Place::new();
    let (book, faults) = faulty(
        &place,
        AuditSettings {
            records_per_hour: 1,
            ..AuditSettings::default()
        },
    );
    (0..3).for_each(|_| book.record(call("loud"), Instant::now()).unwrap()); // control
    faults.full.store(true, Ordering::SeqCst);
    assert!(book.record(call("quiet"), Instant::now()).is_err());
    assert!(book.record(call("loud"), Instant::now()).is_err());
}

#[test]
fn an_operator_can_choose_to_go_on_without_records() {
    let place = Place::new();
    let (book, faults) = faulty(
        &place,
        AuditSettings {
            failure: OnFailure::Continue,
            ..AuditSettings::default()
        },
    );
    faults.full.store(true, Ordering::SeqCst);
    book.record(call("s1"), Instant::now()).unwrap();
    assert!(book.failing().is_some());
    faults.full.store(false, Ordering::SeqCst);
    book.record(call("s2"), Instant::now()).unwrap();
    let records = place.records();
    assert_eq!(
        kinds(&records),
        ["log_begun", "unrecorded", "quota_refused"]
    );
    assert_eq!(
        (&records[1]["details"]["count"], &records[2]["session"]),
        (&1.into(), &"s2".into())
    );
    place.assert_whole();
}

#[test]
fn new_work_is_refused_while_records_fail_unless_the_operator_goes_on_without_them() {
    for (failure, must_refuse) in [(OnFailure::Refuse, true), (OnFailure::Continue, false)] {
        let place = Place::new();
        let (book, faults) = faulty(
            &place,
            AuditSettings {
                failure,
                ..AuditSettings::default()
            },
        );
        let audit = super::super::Audit::over(book, Vec::new());
        assert_eq!(audit.refuses(), None);
        faults.full.store(true, Ordering::SeqCst);
        audit.note(call("s1"));
        assert!(audit.failing().is_some());
        assert_eq!(audit.refuses().is_some(), must_refuse);
    }
}

#[test]
fn after_a_disk_lost_what_it_was_given_nothing_is_accepted_any_more() {
    let place = Place::new();
    let (book, faults) = faulty(&place, AuditSettings::default());
    book.record(call("s1"), Instant::now()).unwrap();
    faults.unsynced.store(true, Ordering::SeqCst);
    book.tick(Instant::now());
    faults.unsynced.store(false, Ordering::SeqCst);
    book.tick(Instant::now());
    assert!(book.record(call("s1"), Instant::now()).is_err());
    assert!(book.failing().is_some_and(|why| why.contains("broken")));
    drop(book);
    place
        .open()
        .unwrap()
        .record(call("s1"), Instant::now())
        .unwrap();
}

#[test]
fn always_means_on_the_disk_before_the_answer_and_once_a_second_means_later() {
    let place = Place::new();
    let (book, faults) = faulty(
        &place,
        AuditSettings {
            sync: Sync::Always,
            ..AuditSettings::default()
        },
    );
    let before = faults.syncs.load(Ordering::SeqCst);
    book.record(call("s1"), Instant::now()).unwrap();
    assert_eq!(faults.syncs.load(Ordering::SeqCst), before + 1);
    faults.unsynced.store(true, Ordering::SeqCst);
    assert!(book.record(call("s1"), Instant::now()).is_err());

    let place = Place::new();
    let (book, faults) = faulty(&place, AuditSettings::default());
    let before = faults.syncs.load(Ordering::SeqCst);
    book.record(call("s1"), Instant::now()).unwrap();
    assert_eq!(faults.syncs.load(Ordering::SeqCst), before);
    book.tick(Instant::now());
    book.tick(Instant::now());
    assert_eq!(
        faults.syncs.load(Ordering::SeqCst),
        before + 1,
        "nothing new needs no order to the disk"
    );
}

#[test]
fn many_callers_at_once_make_one_chain() {
    let place = Place::new();
    let book = Arc::new(
        place
            .open_with(AuditSettings {
                sync: Sync::Always,
                ..AuditSettings::default()
            })
            .unwrap(),
    );
    let start = Arc::new(Barrier::new(8));
    let callers: Vec<_> = (0..8)
        .map(|number| {
            let (book, start) = (book.clone(), start.clone());
            std::thread::spawn(move || {
                start.wait();
                (0..20).for_each(|_| {
                    book.record(call(&number.to_string()), Instant::now())
                        .unwrap()
                });
            })
        })
        .collect();
    callers
        .into_iter()
        .for_each(|caller| caller.join().unwrap());
    assert_eq!(place.records().len(), 161);
    place.assert_whole();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn waiting_for_the_disk_works_in_tasks_of_a_runtime() {
    let place = Place::new();
    let settings = AuditSettings {
        sync: Sync::Always,
        ..AuditSettings::default()
    };
    let audit = Audit::open(&place.path(), settings).unwrap();
    let writer = audit.clone();
    tokio::spawn(async move { writer.record(call("s1")) })
        .await
        .unwrap()
        .unwrap();
    assert_eq!(audit.head().unwrap().sequence, 2);
}

#[test]
fn a_log_that_is_off_accepts_everything_and_has_no_head() {
    let audit = Audit::off();
    audit
        .record(Event::new(SessionEnded {
            reason: "idle".into(),
        }))
        .unwrap();
    assert_eq!(
        (audit.is_on(), audit.head(), audit.failing()),
        (false, None, None)
    );
}

#[test]
fn a_cut_end_shows_when_the_head_was_noted() {
    let place = Place::new();
    let book = place.open().unwrap();
    (0..3).for_each(|_| book.record(call("s1"), Instant::now()).unwrap());
    let head = book.head();
    drop(book);
    let known = |hash| Known {
        after: None,
        last: Some(Noted {
            sequence: head.sequence,
            hash,
        }),
    };
    let whole = fs::read(place.path()).unwrap();
    let findings = |known: &Known| verify(&[place.path()], known).unwrap().findings;
    assert_eq!(findings(&known(Some(head.hash.clone()))), []);
    assert_eq!(findings(&known(None)), []);
    assert!(
        findings(&known(Some("0".repeat(64))))[0]
            .why
            .contains("hash")
    );
    let cut = whole[..whole.len() - 1]
        .iter()
        .rposition(|byte| *byte == b'\n')
        .unwrap();
    fs::write(place.path(), &whole[..=cut]).unwrap();
    assert_eq!(
        findings(&Known::default()),
        [],
        "by itself it is a whole chain"
    ); // control
    assert!(
        findings(&known(Some(head.hash.clone())))[0]
            .why
            .contains("cut off")
    );
    assert!(findings(&known(None))[0].why.contains("cut off"));
}
