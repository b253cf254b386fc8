//! Settings as a client's configuration writes them: workspace, mounts, variables, limits, and
//! mistakes in them.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::json;

use crate::support::is_root;
use crate::support::server::{Era, MINIMAL, Server, finished, program};

#[test]
fn a_workspace_is_the_working_folder_and_its_files_belong_to_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let owner = if is_root() {
        1234
    } else {
        rustix::process::geteuid().as_raw()
    };
    if is_root() {
        std::os::unix::fs::chown(folder.path(), Some(owner), Some(owner)).unwrap();
    }
    fs::write(folder.path().join("data.csv"), "a,b\n1,2\n").unwrap();
    let path = folder.path().to_str().unwrap();
    let server = Server::start(&[MINIMAL, &["--workspace", path]].concat());
    let session = server.session();
    assert_eq!(session.text("open('data.csv').readline()"), "'a,b\\n'");
    session
        .text("import os; os.makedirs('out/deep'); open('out/deep/made', 'w').write('made'); None");
    let made = folder.path().join("out/deep/made");
    assert_eq!(fs::read_to_string(&made).unwrap(), "made");
    assert_eq!(fs::metadata(&made).unwrap().uid(), owner);
    // The workspace is also where files may be copied from and to.
    assert!(
        !session
            .call(
                "upload_file",
                json!({"relpath": "copy.csv", "local_path": "data.csv"})
            )
            .is_error()
    );
    // Another session sees the same folder.
    assert_eq!(
        server.session().text("open('out/deep/made').read()"),
        "'made'"
    );
    drop(session);
    server.finish();
    assert!(
        made.exists() && folder.path().join("copy.csv").exists(),
        "files of a workspace stay"
    );
}

#[test]
fn private_folders_are_seen_by_their_own_session_only() {
    let server = Server::shared();
    let (one, other) = (server.session(), server.session());
    one.text("open('mine', 'w').write('x'); None");
    assert_eq!(one.text("import os; os.path.exists('mine')"), "True"); // control
    assert_eq!(other.text("import os; os.path.exists('mine')"), "False");
    assert_eq!(
        one.text("open('/tmp/mine', 'w').write('x'); None"),
        "(no output)"
    );
    assert_eq!(other.text("os.path.exists('/tmp/mine')"), "False");
}

#[test]
fn a_mount_is_read_only_when_it_says_so() {
    let (fixed, open) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for folder in [&fixed, &open] {
        fs::write(folder.path().join("data"), "data").unwrap();
    }
    let server = Server::start(
        &[
            MINIMAL,
            &["--mount", &format!("{}:fixed:ro", fixed.path().display())],
            &["--mount", &format!("{}:deep/open", open.path().display())],
        ]
        .concat(),
    );
    let session = server.session();
    assert_eq!(
        session.text("open('fixed/data').read() + open('deep/open/data').read()"),
        "'datadata'"
    );
    session.text("open('deep/open/made', 'w').write('made'); None"); // control
    assert_eq!(
        fs::read_to_string(open.path().join("made")).unwrap(),
        "made"
    );
    session
        .run("open('fixed/made', 'w')")
        .assert_refused(&["OSError", "Read-only file system"]);
    session
        .run("import os; os.remove('fixed/data')")
        .assert_refused(&["Read-only file system"]);
    assert!(!fixed.path().join("made").exists());
}

#[test]
fn the_inside_sees_the_variables_it_was_given_and_none_of_the_servers_own() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("space")).unwrap();
    fs::write(
        folder.path().join("space/.env"),
        "KERNEL_ENV_FROM_DOTENV=dotenv\nHIDDEN=hush\n",
    )
    .unwrap();
    fs::write(folder.path().join("more.env"), "FROM_FILE='file value'\n").unwrap();
    let mut command = program();
    command
        .current_dir(folder.path())
        .args([
            "mcp",
            "--workspace",
            "space",
            "--env-var",
            "FROM_FLAG=a=b",
            "--env-file",
            "more.env",
        ])
        .args(MINIMAL)
        .env("KERNEL_ENV_FROM_SERVER", "server")
        .env("SECRET_OF_THE_SERVER", "hush");
    let server = Server::spawn(&mut command, Era::Initialize);
    server.greet();
    let session = server.session();
    let code = "import os\n[os.environ.get(n) for n in ('FROM_FLAG', 'FROM_FILE', 'FROM_DOTENV', \
                'FROM_SERVER')]";
    assert_eq!(
        session.text(code),
        "['a=b', 'file value', 'dotenv', 'server']"
    );
    let all = session.text(
        "import subprocess; print(sorted(os.environ.items()), \
                            subprocess.run('env', capture_output=True).stdout, \
                            open('/proc/self/environ').read())",
    );
    for hidden in [
        "hush",
        "SECRET_OF_THE_SERVER",
        "HIDDEN",
        "KERNEL_ENV_",
        "CELLBLOCK_",
        "CARGO",
    ] {
        assert!(!all.contains(hidden), "{hidden} is in {all}");
    }
}

#[test]
fn a_default_time_out_comes_from_the_flag() {
    let server = Server::start(&[MINIMAL, &["--timeout", "1s"]].concat());
    server
        .session()
        .run("while True: pass")
        .assert_refused(&["time-out of 1 s"]);
}

#[test]
fn mistakes_in_flags_and_files_are_told_on_standard_error_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let file = file.to_str().unwrap();
    fs::write(file, "workspce: /tmp\n").unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    for (arguments, words) in [
        (vec!["mcp", "--config", file], vec!["workspce", "workspace"]),
        (vec!["mcp", "--config", missing], vec!["missing"]),
        (vec!["mcp", "--memory", "lots"], vec!["--memory", "lots"]),
        (vec!["mcp", "--memory", "0"], vec!["--memory"]),
        (vec!["mcp", "--cpus=-1"], vec!["--cpus"]),
        (vec!["mcp", "--timeout", "0"], vec!["--timeout"]),
        (vec!["mcp", "--max-sessions", "0"], vec!["--max-sessions"]),
        (
            vec!["mcp", "--idle-timeout", "soon"],
            vec!["--idle-timeout"],
        ),
        (
            vec!["mcp", "--profile", "defualt"],
            vec!["--profile", "default"],
        ),
        (
            vec!["mcp", "--environment", "nothing"],
            vec!["nothing", "env build"],
        ),
        (vec!["mcp", "--mount", "/tmp"], vec!["--mount"]),
        (vec!["mcp", "--mount", "/tmp:../up"], vec!["--mount"]),
        (
            vec!["mcp", "--mount", &format!("{missing}:in:ro")],
            vec!["missing"],
        ),
        (vec!["mcp", "--env-var", "NOVALUE"], vec!["--env-var"]),
        (vec!["mcp", "--env-file", missing], vec!["missing"]),
        (vec!["mcp", "--allowed-dir", missing], vec!["missing"]),
        (vec!["mcp", "--no-such-flag"], vec!["--no-such-flag"]),
        (vec!["mpc"], vec!["mpc"]),
    ] {
        let (status, output, errors) = finished(program().args(&arguments));
        assert_eq!(
            (status, output.as_str()),
            (Some(2), ""),
            "{arguments:?}: {errors}"
        );
        for word in words {
            assert!(
                errors.contains(word),
                "{arguments:?}: {word:?} is not in {errors:?}"
            );
        }
    }
    let (status, output, errors) = finished(program().env("CELLBLOCK_MEMRY", "1G").args(["mcp"]));
    assert_eq!((status, output.as_str()), (Some(2), ""), "{errors}");
    assert!(
        errors.contains("CELLBLOCK_MEMRY") && errors.to_lowercase().contains("memory"),
        "{errors}"
    );
    // The control: the same with good settings starts, and ends well when its input is empty.
    let (status, output, errors) =
        finished(program().args(["mcp", "--memory", "1G", "--environment", "minimal"]));
    assert_eq!((status, output.as_str()), (Some(0), ""), "{errors}");
}
