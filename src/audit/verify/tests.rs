//! A small log, damaged in every way that files can be damaged.

use std::fs;

use super::super::chain::{Moment, seal};
use super::super::event::{Event, SessionEnded};
use super::*;

/// The lines of a small log, each with its end.
fn log(records: usize) -> Vec<Vec<u8>> {
    let mut head = Head::beginning();
    let line = |number: usize| {
        let event = Event::new(SessionEnded {
            reason: "idle".into(),
        })
        .in_session(format!("s{number}"));
        let (line, next) = seal(&head, Moment::now(), &event);
        head = next;
        line
    };
    (0..records).map(line).collect()
}

fn report(bytes: &[u8]) -> Report {
    let known = Known::default();
    let mut walk = Walk::new(&known);
    walk.file(Path::new("log"), Lines(bytes)).unwrap();
    walk.end()
}

#[track_caller]
fn assert_found(lines: &[&[u8]], line: u64, why: &str) {
    let report = report(&lines.concat());
    assert!(
        report
            .findings
            .iter()
            .any(|found| found.line == line && found.why.contains(why)),
        "{report:#?}"
    );
}

#[test]
fn no_byte_can_be_changed() {
    let whole = log(3).concat();
    assert_eq!(report(&whole).findings, []); // control
    for at in 0..whole.len() {
        for mask in [0x01, 0x20, 0x80] {
            let mut harmed = whole.clone();
            harmed[at] ^= mask;
            assert!(
                report(&harmed).found > 0,
                "byte {at} was changed with {mask:#x}"
            );
        }
    }
}

#[test]
fn no_byte_can_be_taken_out_or_put_in() {
    let whole = log(2).concat();
    for at in 0..whole.len() {
        let mut harmed = whole.clone();
        harmed.remove(at);
        assert!(report(&harmed).found > 0, "byte {at} was taken out");
        for byte in *b"\n 0" {
            let mut harmed = whole.clone();
            harmed.insert(at, byte);
            assert!(report(&harmed).found > 0, "{byte} was put in at {at}");
        }
    }
}

#[test]
fn lines_that_were_taken_out_moved_copied_or_put_in_are_named() {
    let lines = log(4);
    let [one, two, three, four] = [0, 1, 2, 3].map(|index| lines[index].as_slice());
    assert_found(&[one, three, four], 2, "records 2 to 2 are missing");
    assert_found(&[two, three, four], 1, "records 1 to 1 are missing");
    assert_found(&[one, three, two, four], 2, "missing");
    assert_found(&[one, three, two, four], 3, "moved");
    assert_found(&[one, two, two, three, four], 3, "copied");
    assert_found(&[one, two, b"\n", three], 3, "no whole record");
    assert_found(&[one, two, &three[..40]], 3, "torn");
    assert_found(&[one, &vec![b'x'; 100_000], b"\n", two], 2, "longer");
    assert_found(&[], 0, "no record");
}

#[test]
fn a_record_that_was_rewritten_with_a_hash_of_its_own_is_found_by_the_next() {
    let lines = log(3);
    let first = check(lines[0].strip_suffix(b"\n").unwrap()).unwrap().head;
    let event = Event::new(SessionEnded {
        reason: "a lie".into(),
    });
    let (forged, _) = seal(&first, Moment::now(), &event);
    assert_found(&[&lines[0], &forged, &lines[2]], 3, "replaced");
}

#[test]
fn after_a_line_that_was_changed_the_chain_is_taken_up_again() {
    let mut lines = log(5);
    let middle = lines[2].len() / 2;
    lines[2][middle] ^= 1;
    let report = report(&lines.concat());
    assert_eq!(report.findings.len(), 1, "{report:?}");
    assert_eq!((report.findings[0].line, report.records), (3, 4));
}

#[test]
fn files_may_be_given_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = log(4)
        .iter()
        .enumerate()
        .map(|(number, line)| {
            let path = folder.path().join(number.to_string());
            fs::write(&path, line).unwrap();
            path
        })
        .collect();
    let shuffled = [2, 0, 3, 1].map(|index: usize| paths[index].clone());
    let report = verify(&shuffled, &Known::default()).unwrap();
    assert_eq!(
        (report.findings.len(), report.records),
        (0, 4),
        "{report:?}"
    );
}

#[test]
fn many_findings_are_counted_and_the_first_are_kept() {
    let report = report(&b"x\n".repeat(1_000));
    assert_eq!((report.found, report.findings.len()), (1_000, MAX_FINDINGS));
}

#[test]
fn a_record_is_noted_as_number_or_as_number_and_hash() {
    let hash = "ab".repeat(32);
    assert_eq!(
        "7".parse::<Noted>().unwrap(),
        Noted {
            sequence: 7,
            hash: None
        }
    );
    assert_eq!(
        format!("7:{hash}").parse::<Noted>().unwrap(),
        Noted {
            sequence: 7,
            hash: Some(hash)
        }
    );
    for wrong in ["", "x", "7:", "7:abc", ":ab", "-1"] {
        assert!(wrong.parse::<Noted>().is_err(), "{wrong}");
    }
}

#[test]
fn a_file_that_is_not_there_is_an_error_and_not_a_finding() {
    assert!(verify(&[PathBuf::from("/nowhere/at/all")], &Known::default()).is_err());
}
