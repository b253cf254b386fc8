//! The audit log as an operator meets it: kept by a server, verified and read on the command line,
//! on disks that are full or read-only.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cellblock::audit::{Audit, AuditSettings, Event, OnFailure, SessionEnded, ToolCall};
use rustix::mount::{MountFlags, mount_remount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::SmallDisk;
use crate::support::server::{Era, Server, finished, program_below};

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn log(&self) -> PathBuf {
        self.0.path().join("audit.jsonl")
    }

    fn program(&self) -> Command {
        program_below(&self.0.path().join("data"))
    }

    /// A server whose installer fails at once: nothing but its log is looked at here.
    fn server(&self) -> Command {
        let mut command = self.program();
        command.env("CELLBLOCK_UV", "/bin/false");
        command
            .args(["mcp", "--environment", "minimal", "--audit-file"])
            .arg(self.log());
        command
    }

    fn verify(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        finished(
            self.program()
                .args(["audit", "verify"])
                .arg(self.log())
                .args(arguments),
        )
    }

    fn records(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.log()).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    fn kinds(&self) -> Vec<String> {
        self.records()
            .iter()
            .map(|record| record["kind"].as_str().unwrap().to_owned())
            .collect()
    }
}

fn call(session: &str) -> Event {
    let details = ToolCall {
        tool: "execute_ipython_cell".into(),
        outcome: cellblock::audit::CallOutcome::Succeeded,
        elapsed: Duration::from_millis(3),
    };
    Event::new(details)
        .by("anna")
        .in_session(session)
        .for_request("r-1")
}

#[test]
fn a_server_records_its_start_and_its_end() {
    let place = Place::new();
    let (status, _, errors) = finished(&mut place.server());
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(
        place.kinds(),
        ["log_begun", "server_started", "server_stopped"]
    );
    assert_eq!(place.records()[2]["details"]["reason"], "end of input");
    assert!(
        errors.contains("audit log closed"),
        "the last head is in the log: {errors}"
    );
    let (status, output, _) = place.verify(&[]);
    assert_eq!(status, Some(0));
    assert!(
        output.starts_with("3 records are as they were written; the last is 3:"),
        "{output}"
    );
}

/// Starts a server and waits until it answers, which it does after it has recorded its start.
fn running(place: &Place) -> Server {
    let server = Server::spawn(&mut place.server(), Era::Initialize);
    server.greet();
    server
}

#[test]
fn what_was_recorded_survives_a_kill_and_the_next_server_goes_on() {
    let place = Place::new();
    let server = running(&place);
    let process = Pid::from_raw(server.process_id() as i32).unwrap();
    kill_process(process, Signal::KILL).unwrap();
    assert_eq!(server.ended().signal(), Some(9));
    assert_eq!(place.kinds(), ["log_begun", "server_started"]);
    // As if it had been killed within a line.
    let mut bytes = fs::read(place.log()).unwrap();
    bytes.extend_from_slice(b"{\"sequence\":3,\"ti");
    fs::write(place.log(), bytes).unwrap();
    assert_eq!(place.verify(&[]).0, Some(1));
    let (status, _, errors) = finished(&mut place.server());
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(
        place.kinds()[2..],
        ["torn_line", "server_started", "server_stopped"]
    );
    assert_eq!(place.verify(&[]).0, Some(0));
}

#[test]
fn a_second_server_does_not_write_into_the_same_log() {
    let place = Place::new();
    let first = running(&place);
    let (status, _, errors) = finished(&mut place.server());
    assert_eq!(status, Some(2));
    assert!(errors.contains("another process"), "{errors}");
    first.finish();
    assert_eq!(finished(&mut place.server()).0, Some(0)); // control
    assert_eq!(place.verify(&[]).0, Some(0));
}

#[test]
fn a_log_that_others_can_write_or_sandboxes_can_see_stops_the_start() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    assert_eq!(finished(&mut place.server()).0, Some(0)); // control
    let (status, _, errors) = finished(
        place
            .server()
            .args(["--workspace"])
            .arg(place.0.path().join("work")),
    );
    assert_eq!(status, Some(0), "{errors}"); // control
    let (status, _, errors) = finished(place.server().args(["--allowed-dir"]).arg(place.0.path()));
    assert_eq!(status, Some(2));
    assert!(errors.contains("allowed_dirs"), "{errors}");
    fs::set_permissions(place.log(), fs::Permissions::from_mode(0o666)).unwrap();
    let (status, _, errors) = finished(&mut place.server());
    assert_eq!(status, Some(2));
    assert!(errors.contains("others can write it"), "{errors}");
}

#[test]
fn verify_names_the_line_and_the_reason() {
    let place = Place::new();
    let audit = Audit::open(&place.log(), AuditSettings::default()).unwrap();
    (0..3).for_each(|_| audit.record(call("s1")).unwrap());
    let head = audit.head().unwrap();
    drop(audit);
    let noted = format!("{}:{}", head.sequence, head.hash);
    assert_eq!(place.verify(&["--last", &noted]).0, Some(0)); // control

    let text = fs::read_to_string(place.log()).unwrap();
    fs::write(place.log(), text.replacen("anna", "otto", 1)).unwrap();
    let (status, output, _) = place.verify(&[]);
    assert_eq!(status, Some(1));
    assert!(output.contains("audit.jsonl:2: it was changed"), "{output}");

    let shortened: String = text
        .lines()
        .take(3)
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(place.log(), shortened).unwrap();
    assert_eq!(
        place.verify(&[]).0,
        Some(0),
        "a cut end cannot be seen from the file alone"
    ); // control
    let (status, output, _) = place.verify(&["--last", &noted, "--json"]);
    assert_eq!(status, Some(1));
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        (&report["whole"], &report["records"]),
        (&false.into(), &3.into())
    );
    assert!(
        report["findings"][0]["why"]
            .as_str()
            .unwrap()
            .contains("cut off"),
        "{report}"
    );

    let (status, _, errors) =
        finished(place.program().args(["audit", "verify", "/nowhere/at/all"]));
    assert_eq!(status, Some(2));
    assert!(errors.contains("/nowhere/at/all"), "{errors}");
}

#[test]
fn show_prints_what_was_asked_for_and_nothing_that_moves_the_cursor() {
    let place = Place::new();
    let audit = Audit::open(&place.log(), AuditSettings::default()).unwrap();
    audit.record(call("s1")).unwrap();
    audit
        .record(call("s2").by("otto").denied("scope python:execute"))
        .unwrap();
    let hostile = "\u{1b}[2J\n{\"sequence\":1}\u{202e}\u{9b}";
    audit
        .record(
            Event::new(SessionEnded {
                reason: hostile.into(),
            })
            .in_session("s2"),
        )
        .unwrap();
    drop(audit);
    let show = |arguments: &[&str]| {
        let (status, output, errors) = finished(
            place
                .program()
                .args(["audit", "show"])
                .arg(place.log())
                .args(arguments),
        );
        assert_eq!(status, Some(0), "{errors}");
        output
    };
    let all = show(&[]);
    assert_eq!(all.lines().count(), 4, "{all}");
    let unseen = |letter: char| (letter.is_control() && letter != '\n') || letter == '\u{202e}';
    assert!(!all.contains(unseen), "{all:?}");
    let denied = show(&["--principal", "otto"]);
    assert_eq!(denied.lines().count(), 1);
    assert!(
        denied.contains("denied rule=\"scope python:execute\" principal=\"otto\" session=\"s2\""),
        "{denied}"
    );
    assert_eq!(show(&["--session", "s2"]).lines().count(), 2);
    let json = show(&["--kind", "session_ended", "--json"]);
    let record: Value = serde_json::from_str(json.trim_end()).unwrap();
    assert_eq!(record["details"]["reason"], hostile);
    let line = fs::read_to_string(place.log())
        .unwrap()
        .lines()
        .last()
        .unwrap()
        .to_owned();
    assert_eq!(
        json.trim_end(),
        line,
        "it is the line itself, which can be verified"
    );
}

#[test]
fn the_log_of_a_server_can_be_json() {
    let place = Place::new();
    let (status, _, errors) = finished(place.server().args(["--log-format", "json"]));
    assert_eq!(status, Some(0), "{errors}");
    assert!(!errors.is_empty());
    for line in errors.lines() {
        let line: Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(
            line["timestamp"].is_string()
                && line["level"].is_string()
                && line["message"].is_string(),
            "{line}"
        );
    }
}

#[test]
fn a_full_disk_refuses_work_loses_nothing_that_was_accepted_and_recovers() {
    let Some(disk) = SmallDisk::new("size=64k") else {
        return;
    };
    let log = disk.path().join("audit.jsonl");
    let audit = Audit::open(&log, AuditSettings::default()).unwrap();
    audit.record(call("s1")).unwrap();
    fs::write(disk.path().join("ballast"), vec![0; 32 << 10]).unwrap();
    let mut accepted = 2;
    while audit.record(call("s1")).is_ok() {
        accepted += 1;
        assert!(accepted < 1_000, "the disk is small");
    }
    assert!(audit.failing().is_some());
    assert!(audit.record(call("s1")).is_err(), "and it stays refused");
    let lines = |path: &Path| fs::read_to_string(path).unwrap().lines().count();
    assert_eq!(lines(&log), accepted, "no half line is left");
    fs::remove_file(disk.path().join("ballast")).unwrap();
    audit.record(call("s1")).unwrap();
    assert_eq!(audit.failing(), None);
    drop(audit);
    assert_eq!(lines(&log), accepted + 2);
    let text = fs::read_to_string(&log).unwrap();
    let note: Value = serde_json::from_str(text.lines().nth(accepted).unwrap()).unwrap();
    assert_eq!(
        (&note["kind"], &note["details"]["count"]),
        (&"unrecorded".into(), &2.into())
    );
    let report = cellblock::audit::verify::verify(&[log], &Default::default()).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn an_operator_who_chose_to_continue_goes_on_with_a_full_disk() {
    let Some(disk) = SmallDisk::new("size=64k") else {
        return;
    };
    let settings = AuditSettings {
        failure: OnFailure::Continue,
        ..AuditSettings::default()
    };
    let audit = Audit::open(&disk.path().join("audit.jsonl"), settings).unwrap();
    (0..1_000).for_each(|_| audit.record(call("s1")).unwrap());
    assert!(audit.failing().is_some());
}

#[test]
fn a_read_only_disk_refuses_the_start() {
    let Some(disk) = SmallDisk::new("size=64k") else {
        return;
    };
    let log = disk.path().join("audit.jsonl");
    drop(Audit::open(&log, AuditSettings::default()).unwrap()); // control
    mount_remount(disk.path(), MountFlags::RDONLY, c"").unwrap();
    assert!(Audit::open(&log, AuditSettings::default()).is_err());
}
