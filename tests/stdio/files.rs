//! Files between the host and a session: what moves, what is refused, and that nothing half-done
//! stays.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::support::server::{MINIMAL, Server, Session};

struct Desk {
    /// Holds the allowed directory and, beside it, one that is not allowed.
    folder: tempfile::TempDir,
    server: Server,
}

impl Desk {
    fn new() -> Desk {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("allowed")).unwrap();
        fs::create_dir(folder.path().join("other")).unwrap();
        fs::write(folder.path().join("other/secret"), "secret").unwrap();
        let allowed = folder.path().join("allowed");
        let server =
            Server::start(&[MINIMAL, &["--allowed-dir", allowed.to_str().unwrap()]].concat());
        Desk { folder, server }
    }

    fn allowed(&self) -> std::path::PathBuf {
        self.folder.path().join("allowed")
    }
}

#[track_caller]
fn upload(
    session: &Session<'_>,
    local: impl AsRef<Path>,
    relpath: &str,
) -> crate::support::server::ToolResult {
    session.call(
        "upload_file",
        json!({"relpath": relpath, "local_path": local.as_ref().to_str().unwrap()}),
    )
}

#[track_caller]
fn download(
    session: &Session<'_>,
    relpath: &str,
    local: impl AsRef<Path>,
) -> crate::support::server::ToolResult {
    session.call(
        "download_file",
        json!({"relpath": relpath, "local_path": local.as_ref().to_str().unwrap()}),
    )
}

#[test]
fn files_of_every_size_arrive_unchanged_in_both_directions() {
    let desk = Desk::new();
    let session = desk.server.session();
    for (name, size) in [
        ("empty", 0),
        ("small", 1),
        ("page", 4096),
        ("chunk", 262_145),
        ("large", 9_000_001),
    ] {
        let bytes: Vec<u8> = (0..size)
            .map(|number: usize| (number % 251) as u8)
            .collect();
        fs::write(desk.allowed().join(name), &bytes).unwrap();
        let relpath = format!("deep/er/{name}");
        let result = upload(&session, desk.allowed().join(name), &relpath);
        assert_eq!(result.structured()["bytes"], size, "{}", result.text());
        assert_eq!(
            session.text(&format!("import os; os.path.getsize('{relpath}')")),
            size.to_string()
        );
        let back = format!("back/{name}");
        assert!(!download(&session, &relpath, &back).is_error());
        assert_eq!(
            fs::read(desk.allowed().join(back)).unwrap(),
            bytes,
            "{name}"
        );
    }
}

#[test]
fn host_paths_outside_the_allowed_directories_are_refused_whatever_their_form() {
    let desk = Desk::new();
    let session = desk.server.session();
    let other = desk.folder.path().join("other");
    fs::write(desk.allowed().join("fine"), "fine").unwrap();
    symlink(other.join("secret"), desk.allowed().join("link")).unwrap();
    symlink(&other, desk.allowed().join("folder-link")).unwrap();
    assert!(!upload(&session, "fine", "control").is_error()); // control
    for (local, words) in [
        (other.join("secret").to_str().unwrap(), vec!["not within"]),
        ("/etc/passwd", vec!["not within"]),
        ("../other/secret", vec![".."]),
        (
            desk.allowed().join("../other/secret").to_str().unwrap(),
            vec![".."],
        ),
        ("link", vec!["links are not followed"]),
        ("folder-link/secret", vec!["links are not followed"]),
        ("missing", vec!["does not exist"]),
        (".", vec!["directory"]),
        ("a\nb", vec!["control characters"]),
    ] {
        let result = upload(&session, local, "uploaded");
        result.assert_refused(&words);
        assert!(!result.text().contains("secret\n"));
    }
    assert_eq!(
        session.text("import os; sorted(os.listdir())"),
        "['control']"
    );

    session.text("open('out', 'w').write('new'); None");
    for (local, words) in [
        (other.join("planted").to_str().unwrap(), vec!["not within"]),
        ("folder-link/planted", vec!["links are not followed"]),
        ("link", vec!["link"]),
        (".bashrc", vec!["protected"]),
        (".git/hooks/pre-commit", vec!["protected"]),
        (".GIT/config", vec!["protected"]),
        ("fine", vec!["exists already"]),
    ] {
        download(&session, "out", local).assert_refused(&words);
    }
    assert_eq!(
        fs::read_to_string(desk.allowed().join("fine")).unwrap(),
        "fine"
    );
    assert_eq!(fs::read_dir(&other).unwrap().count(), 1);
    let replaced = session.call(
        "download_file",
        json!({"relpath": "out", "local_path": "fine", "overwrite": true}),
    );
    assert!(!replaced.is_error(), "{}", replaced.text());
    assert_eq!(
        fs::read_to_string(desk.allowed().join("fine")).unwrap(),
        "new"
    );
    let names: Vec<_> = fs::read_dir(desk.allowed())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 3, "no temporary file stays: {names:?}");
}

#[test]
fn paths_inside_that_leave_the_working_folder_or_are_no_files_are_refused() {
    let desk = Desk::new();
    let session = desk.server.session();
    fs::write(desk.allowed().join("file"), "file").unwrap();
    session.text(
        "import os\nos.mkdir('folder'); os.mkfifo('fifo'); os.symlink('/etc/passwd', \
                  'link'); os.symlink('/etc', 'etc')\nopen('real', 'w').write('r'); None",
    );
    for (relpath, words) in [
        ("missing", vec!["no such file"]),
        ("folder", vec!["not a regular file"]),
        ("fifo", vec!["not a regular file"]),
        ("link", vec!["`link`"]),
        ("etc/passwd", vec!["`etc/passwd`"]),
        ("../etc/passwd", vec![".."]),
        ("/etc/passwd", vec!["absolute"]),
    ] {
        download(&session, relpath, "got").assert_refused(&words);
        assert!(!desk.allowed().join("got").exists(), "{relpath}");
    }
    assert!(!download(&session, "real", "got").is_error()); // control
    for (relpath, words) in [
        ("real", vec!["exists already"]),
        ("folder", vec!["`folder`"]),
        ("etc/planted", vec!["`etc/planted`"]),
        ("../planted", vec![".."]),
        ("/tmp/planted", vec!["absolute"]),
        ("a//b", vec!["empty part"]),
    ] {
        upload(&session, "file", relpath).assert_refused(&words);
    }
    let replaced = session.call(
        "upload_file",
        json!({"relpath": "real", "local_path": "file", "overwrite": true}),
    );
    assert!(!replaced.is_error(), "{}", replaced.text());
    assert_eq!(session.text("open('real').read()"), "'file'");
}

#[test]
fn a_host_fifo_or_directory_is_refused_without_waiting() {
    let desk = Desk::new();
    let session = desk.server.session();
    assert!(
        Command::new("mkfifo")
            .arg(desk.allowed().join("fifo"))
            .status()
            .unwrap()
            .success()
    );
    upload(&session, "fifo", "a").assert_refused(&["not a regular file"]);
    upload(&session, "/dev/null", "a").assert_refused(&["not within"]);
}

#[test]
fn without_an_allowed_directory_nothing_of_the_host_moves() {
    let server = Server::start(MINIMAL);
    let session = server.session();
    session.text("open('a', 'w').write('a'); None");
    upload(&session, "/etc/passwd", "b").assert_refused(&["may not use any files"]);
    download(&session, "a", "/tmp/a").assert_refused(&["may not use any files"]);
}

#[test]
fn uploaded_modes_are_plain_whatever_they_were() {
    use std::os::unix::fs::PermissionsExt;
    let desk = Desk::new();
    let session = desk.server.session();
    fs::write(desk.allowed().join("tool"), "x").unwrap();
    fs::set_permissions(
        desk.allowed().join("tool"),
        fs::Permissions::from_mode(0o6755),
    )
    .unwrap();
    assert!(!upload(&session, "tool", "tool").is_error());
    assert_eq!(
        session.text("import os; oct(os.stat('tool').st_mode & 0o7000)"),
        "'0o0'"
    );
}
