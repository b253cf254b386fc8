//! Disks that are full or read-only, and files that are gone or torn.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, mount_remount};
use serde_json::json;
use tempfile::TempDir;

use super::{Home, Scene, readiness, wait_for};
use crate::http::client::Raw;
use crate::support::server::{Era, MINIMAL, Server, data_dir, finished, program_below};
use crate::support::service::Service;
use crate::support::{SmallDisk, data_folder};

#[test]
fn a_temporary_folder_without_bytes_or_inodes_costs_no_answer() {
    for options in ["size=64k", "size=64k,nr_inodes=2"] {
        let Some(disk) = SmallDisk::new(options) else {
            return;
        };
        disk.fill();
        assert!(
            fs::write(disk.path().join("more"), [0; 4096]).is_err(),
            "the control: it is full"
        );
        let scene = Scene::of(Home::Inside, &[], |mut command| {
            command.env("TMPDIR", disk.path());
            command
        });
        assert_eq!(scene.text("a", "x = 1; x"), "1");
        let long = scene.text("a", "for number in range(200_000): print(number)");
        assert!(long.contains("199999") && long.len() < 100_000, "{long}");
        assert_eq!(scene.text("a", "x"), "1", "the session lives");
        scene.finish();
    }
}

#[test]
fn a_data_folder_that_is_read_only_is_named_at_the_start() {
    let Some(disk) = SmallDisk::new("size=1m") else {
        return;
    };
    let start = || {
        let mut command = program_below(disk.path());
        command
            .env("CELLBLOCK_UV", "/bin/false")
            .args(["run", "-c", "1"])
            .args(MINIMAL);
        finished(&mut command)
    };
    let (_, _, errors) = start();
    assert!(!errors.contains("Read-only"), "the control: {errors}");
    // What the control has made would be used again.
    let again = SmallDisk::new("size=1m").expect("there was one");
    mount_remount(again.path(), MountFlags::RDONLY, c"").unwrap();
    let mut command = program_below(again.path());
    command.args(["run", "-c", "1"]).args(MINIMAL);
    let (status, _, errors) = finished(&mut command);
    assert_ne!(status, Some(0));
    assert!(errors.contains("Read-only file system"), "{errors}");
}

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

/// A service whose audit log is on a disk of its own.
fn audited(folder: &Path, disk: &SmallDisk, failure: &str) -> Service {
    let log = disk.path().join("audit.jsonl");
    let more = ["--audit-file", log.to_str().unwrap()];
    Service::with_keys_and(
        folder,
        CALLERS,
        &more,
        &[("CELLBLOCK_AUDIT_FAILURE", failure)],
    )
}

fn verify(disk: &SmallDisk) -> String {
    let log = disk.path().join("audit.jsonl");
    let (status, printed, errors) = finished(
        program_below(disk.path())
            .args(["audit", "verify"])
            .arg(&log),
    );
    assert_eq!(status, Some(0), "{printed}{errors}");
    fs::read_to_string(log).unwrap()
}

#[tokio::test]
async fn a_full_audit_disk_refuses_calls_and_recovers_with_space() {
    let Some(disk) = SmallDisk::new("size=256k") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let service = audited(folder.path(), &disk, "refuse");
    wait_for("a service that is ready", || {
        (readiness(service.address).0 == 200).then_some(())
    });
    let mut alice = Raw::with_key(&service, "alice").await;
    let mut run = async || {
        alice
            .result(
                "execute_ipython_cell",
                json!({"code": "6 * 7", "session_id": "a"}),
            )
            .await
    };
    assert_eq!(run().await["structuredContent"]["text"], "42");
    let ballast = disk.fill();
    // What is left of the last page of the log is used first.
    let mut refused = run().await;
    for _ in 0..100 {
        if refused["isError"] == true {
            break;
        }
        refused = run().await;
    }
    assert!(
        refused
            .to_string()
            .contains("the server cannot record what is done"),
        "{refused}"
    );
    let (status, why) = readiness(service.address);
    assert!(status == 503 && why.contains("audit"), "{status} {why}");
    fs::remove_file(ballast).unwrap();
    // The log tries a disk that failed again at regular intervals.
    wait_for("a service that is ready again", || {
        (readiness(service.address).0 == 200).then_some(())
    });
    assert_eq!(
        run().await["structuredContent"]["text"],
        "42",
        "it recovers by itself"
    );
    tokio::task::spawn_blocking(move || service.finish())
        .await
        .unwrap();
    assert!(verify(&disk).contains("\"unrecorded\""));
}

#[tokio::test]
async fn a_full_audit_disk_stops_nobody_where_the_operator_chose_to_continue() {
    let Some(disk) = SmallDisk::new("size=256k") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let service = audited(folder.path(), &disk, "continue");
    let mut alice = Raw::with_key(&service, "alice").await;
    let ballast = disk.fill();
    for number in 0..100 {
        let code = format!("{number} + 1");
        let told = alice
            .result(
                "execute_ipython_cell",
                json!({"code": code, "session_id": "a"}),
            )
            .await;
        assert_eq!(
            told["structuredContent"]["text"],
            (number + 1).to_string(),
            "{told}"
        );
    }
    fs::remove_file(ballast).unwrap();
    let told = alice
        .result(
            "execute_ipython_cell",
            json!({"code": "6 * 7", "session_id": "a"}),
        )
        .await;
    assert_eq!(told["structuredContent"]["text"], "42");
    tokio::task::spawn_blocking(move || service.finish())
        .await
        .unwrap();
    assert!(
        verify(&disk).contains("\"unrecorded\""),
        "the gap is in the log"
    );
}

/// A data folder whose environment `minimal` and whose runner can be damaged. Files are shared with
/// the folder of all tests, and replaced instead of changed.
struct Data(TempDir);

impl Data {
    fn new() -> Data {
        data_dir();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Ordinary users' sessions must get through to what is shown to them.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let environments = folder.path().join("environments");
        fs::create_dir(&environments).unwrap();
        let minimal = the_one_in(&data_folder().join("environments"), "minimal-");
        let copied = Command::new("cp")
            .arg("-al")
            .arg(&minimal)
            .arg(&environments)
            .status()
            .unwrap();
        assert!(copied.success());
        replace(
            &environments
                .join(minimal.file_name().unwrap())
                .join("in-use.lock"),
            b"",
        );
        symlink(data_folder().join("tools"), folder.path().join("tools")).unwrap();
        Data(folder)
    }

    fn environment(&self) -> PathBuf {
        the_one_in(&self.0.path().join("environments"), "minimal-")
    }

    /// A server that cannot build environments.
    fn server(&self) -> Server {
        let mut command = program_below(self.0.path());
        command
            .env("CELLBLOCK_UV", "/bin/false")
            .args(["mcp", "--keep-sessions", "off"])
            .args(MINIMAL);
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    }
}

fn the_one_in(folder: &Path, prefix: &str) -> PathBuf {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut found = entries.filter(|path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with(prefix)
    });
    found
        .next()
        .unwrap_or_else(|| panic!("{prefix} is in {}", folder.display()))
}

/// Puts another file in the place of one that may be shared.
fn replace(path: &Path, content: &[u8]) {
    fs::remove_file(path).unwrap();
    fs::write(path, content).unwrap();
}

/// Breaks an environment before a server starts, and mends it while it runs.
#[track_caller]
fn check_broken(broken: impl Fn(&Path) -> PathBuf) {
    let data = Data::new();
    let path = broken(&data.environment());
    let kept = data.0.path().join("kept");
    fs::rename(&path, &kept).unwrap();
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        fs::write(&path, "{\"format\": 2, \"name\": \"mini").unwrap();
    }
    let server = data.server();
    let run = || server.call("execute_ipython_cell", json!({"code": "6 * 7"}));
    let refused = run();
    assert!(refused.is_error(), "{}", refused.text());
    assert!(
        refused.text().contains("could not be prepared") || refused.text().contains("Python"),
        "{}",
        refused.text()
    );
    if path.is_file() {
        fs::remove_file(&path).unwrap();
    }
    fs::rename(&kept, &path).unwrap();
    // A preparation that failed is tried again; a call may still be told of the last failure.
    wait_for("a server that works once its environment is whole", || {
        (run().text() == "42").then_some(())
    });
    server.finish();
}

#[test]
fn an_environment_without_python_is_refused_and_works_once_it_is_mended() {
    check_broken(|environment| environment.join("tree/bin/python"));
}

#[test]
fn an_environment_without_ipython_is_refused_and_works_once_it_is_mended() {
    check_broken(|environment| {
        the_one_in(&environment.join("tree/lib"), "python").join("site-packages/IPython")
    });
}

#[test]
fn an_environment_whose_description_is_torn_is_refused_and_works_once_it_is_mended() {
    check_broken(|environment| environment.join("cellblock-environment.json"));
}

#[test]
fn a_torn_runner_is_replaced() {
    let data = Data::new();
    assert_eq!(
        data.server()
            .call("execute_ipython_cell", json!({"code": "6 * 7"}))
            .text(),
        "42"
    ); // control
    let runner = fs::read_dir(data.0.path().join("runner"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let file = the_one_in(&runner.join("cellblock_runner/__pycache__"), "serve.");
    let whole = fs::read(&file).unwrap();
    replace(&file, &whole[..whole.len() / 2]);
    let server = data.server();
    let told = server.call("execute_ipython_cell", json!({"code": "6 * 7"}));
    assert_eq!((told.is_error(), told.text()), (false, "42"));
    assert!(fs::read(&file).unwrap() == whole, "it is whole again");
    server.finish();
}
