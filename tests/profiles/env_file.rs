//! What code must not read or change in its workspace: the file of variables, and what the sandbox
//! file of ipybox protects. Attacks, with controls.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{call, exactly, fails, go_through, start, text, words};
use crate::support::server::{MINIMAL, Server};

const CELL: &str = "execute_ipython_cell";
const CANARY: &str = "canary-4711-secret";

fn cell(code: &str) -> Value {
    json!({"code": code})
}

/// A workspace with these files.
fn workspace(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    folder
}

fn start_in(space: &Path, more: &[&str]) -> Server {
    start(
        "ipybox",
        &[MINIMAL, &["--workspace", space.to_str().unwrap()], more].concat(),
    )
}

/// Every way that code has to a file of its folder. `NAME` is that file; each line prints what came
/// of it.
const ATTEMPTS: &str = r#"
import ctypes, os, shutil, subprocess
def attempt(what, do):
    try:
        print(what, 'succeeded', repr(do()))
    except (OSError, subprocess.CalledProcessError) as error:
        print(what, 'failed', getattr(error, 'errno', 'program'))
open('mine', 'w').write('MINE=1')
libc = ctypes.CDLL(None, use_errno=True)
def exchange():
    if libc.renameat2(-100, b'mine', -100, b'NAME', 2):
        raise OSError(ctypes.get_errno(), 'renameat2')
def through_link(target):
    os.symlink(target, 'link')
    try:
        return open('link').read()
    finally:
        os.unlink('link')
def through_path():
    place = os.open('NAME', os.O_PATH)
    return open(f'/proc/self/fd/{place}').read()
attempt('read', lambda: open('NAME').read())
attempt('link', lambda: through_link('NAME'))
attempt('absolute', lambda: open('/work/NAME').read())
attempt('cwd', lambda: open('/proc/self/cwd/NAME').read())
attempt('root', lambda: open('/proc/self/root/work/NAME').read())
attempt('path', through_path)
attempt('program', lambda: subprocess.run(['cat', 'NAME'], check=True, capture_output=True).stdout)
attempt('hard link', lambda: os.link('NAME', 'second') or open('second').read())
attempt('copy', lambda: shutil.copy('NAME', 'third') and open('third').read())
attempt('write', lambda: open('NAME', 'w').write('MINE=1'))
attempt('append', lambda: open('NAME', 'a').write('MINE=1'))
attempt('mode', lambda: os.chmod('NAME', 0o777))
attempt('truncate', lambda: os.truncate('NAME', 0))
attempt('exchange', exchange)
attempt('replace', lambda: os.replace('mine', 'NAME'))
attempt('rename', lambda: os.rename('NAME', 'fourth') or os.rename('fourth', 'NAME'))
attempt('remove', lambda: os.unlink('NAME'))
"#;

#[track_caller]
fn attempts(server: &Server, name: &str) -> Vec<String> {
    let told = text(server, CELL, cell(&ATTEMPTS.replace("NAME", name)));
    told.lines().map(str::to_owned).collect()
}

#[test]
fn the_file_of_variables_can_neither_be_read_nor_replaced_by_code() {
    hides_the_file_of_variables(&start_in);
}

/// How a server with a workspace is started.
pub(super) type StartIn<'a> = &'a dyn Fn(&Path, &[&str]) -> Server;

#[track_caller]
pub(super) fn hides_the_file_of_variables(start_in: StartIn<'_>) {
    let line = format!("KEY={CANARY}\nKERNEL_ENV_SEEN=1\n");
    let space = workspace(&[(".env", &line), ("plain", &line)]);
    for flags in [&[][..], &["--sandbox"]] {
        let server = start_in(space.path(), flags);
        let told = attempts(&server, ".env");
        assert_eq!(told.len(), 17, "{told:?}");
        for line in &told {
            assert!(
                line.contains(" failed ") && !line.contains(CANARY),
                "{told:?}"
            );
        }
        assert_eq!(fs::read_to_string(space.path().join(".env")).unwrap(), line);
        go_through(
            &server,
            vec![exactly(
                CELL,
                cell("import os; os.environ['SEEN'], 'KEY' in os.environ"),
                &["('1', False)"],
            )],
        );
        // Another interpreter and another sandbox are no way around.
        text_of_reset(&server);
        assert!(
            attempts(&server, ".env")
                .iter()
                .all(|line| line.contains(" failed "))
        );
    }
    // The control: each attempt succeeds with another file.
    let server = start_in(space.path(), &[]);
    let told = attempts(&server, "plain");
    assert!(
        told.len() == 17 && told.iter().all(|line| line.contains(" succeeded ")),
        "{told:?}"
    );
    assert!(told[0].contains(CANARY), "{told:?}");
}

fn text_of_reset(server: &Server) {
    let (blocks, failed) = call(server, "reset", json!({}));
    assert!(!failed, "{blocks:?}");
}

#[test]
fn a_name_that_is_free_is_taken_before_code_can_take_it() {
    takes_the_name_of_the_file(&start_in);
}

#[track_caller]
pub(super) fn takes_the_name_of_the_file(start_in: StartIn<'_>) {
    let space = workspace(&[]);
    let server = start_in(space.path(), &[]);
    go_through(
        &server,
        vec![
            fails(
                CELL,
                cell("open('.env', 'w').write('KEY=mine')"),
                &["Error"],
            ),
            fails(
                CELL,
                cell("import os; os.symlink('/etc/passwd', '.env')"),
                &["FileExistsError"],
            ),
            exactly(CELL, cell("open('other', 'w').write('x')"), &["1"]), // control
        ],
    );
    assert_eq!(
        fs::read(space.path().join(".env")).unwrap(),
        b"",
        "an empty file holds the name"
    );
}

#[test]
fn a_folder_of_that_name_is_used_and_keeps_its_name() {
    let space = workspace(&[(".env/bin/activate", "x"), ("venv/bin/activate", "x")]);
    let server = start_in(space.path(), &[]);
    go_through(
        &server,
        vec![
            exactly(CELL, cell("open('.env/bin/activate').read()"), &["'x'"]),
            exactly(CELL, cell("open('.env/new', 'w').write('x')"), &["1"]),
            fails(
                CELL,
                cell("import os; os.rename('.env', 'moved')"),
                &["busy"],
            ),
            exactly(CELL, cell("import os; os.rename('venv', 'moved')"), &[""]), // control
        ],
    );
}

#[test]
fn a_file_of_variables_that_is_replaced_outside_is_hidden_again() {
    let space = workspace(&[(".env", "KEY=old\n")]);
    let server = start_in(space.path(), &[]);
    go_through(
        &server,
        vec![fails(
            CELL,
            cell("open('.env').read()"),
            &["PermissionError"],
        )],
    );
    for content in [CANARY, "KEY=another\n"] {
        // As editors do it.
        fs::write(space.path().join(".env.new"), content).unwrap();
        fs::rename(space.path().join(".env.new"), space.path().join(".env")).unwrap();
        // Ends as soon as the new file is hidden.
        let until_hidden =
            "while True:\n    try: open('.env').read()\n    except PermissionError: break";
        go_through(
            &server,
            vec![
                exactly(CELL, cell(until_hidden), &[""]),
                fails(CELL, cell("open('.env', 'w').write('x')"), &["Error"]),
                fails(CELL, cell("import os; os.unlink('.env')"), &["busy"]),
            ],
        );
        assert_eq!(
            fs::read_to_string(space.path().join(".env")).unwrap(),
            content
        );
    }
    // A new session, which may have waited since before, sees it no more than the first.
    text_of_reset(&server);
    go_through(
        &server,
        vec![fails(
            CELL,
            cell("open('.env').read()"),
            &["PermissionError"],
        )],
    );
}

#[test]
fn variables_of_the_file_fill_parameters_of_servers() {
    let space = workspace(&[(".env", "FIXTURE_MODE=pyexec\n")]);
    let server = start_in(space.path(), &[]);
    let register = |variable: &str| {
        let folders = crate::support::server::folders(crate::support::server::data_dir());
        let variables: serde_json::Map<String, Value> = folders
            .into_iter()
            .map(|(name, path)| (name.to_owned(), json!(path.to_str().unwrap())))
            .collect();
        let mode = format!("${{{variable}}}");
        let params = json!({
            "command": crate::support::PROGRAM,
            "args": ["mcp", "--profile", mode, "--environment", "minimal"],
            "env": variables,
        });
        json!({"server_name": "in-ner", "server_params": params})
    };
    go_through(
        &server,
        vec![
            fails(
                "register_mcp_server",
                register("NO_SUCH_MODE"),
                &["NO_SUCH_MODE", "file .env of the workspace"],
            ),
            exactly(
                "register_mcp_server",
                register("FIXTURE_MODE"),
                &[
                    "execute_python",
                    "(\"in-ner\" is no name of a Python package: import from mcptools.in_ner.)",
                ],
            ),
        ],
    );
}

#[test]
fn the_lists_of_the_sandbox_file_hold() {
    holds_the_lists(&start_in);
}

#[track_caller]
pub(super) fn holds_the_lists(start_in: StartIn<'_>) {
    let space = workspace(&[
        ("secrets/key", CANARY),
        ("secrets/open", "seen"),
        ("hidden/deep/file", CANARY),
        ("data/table", "rows"),
        ("free", "x"),
    ]);
    let file = tempfile::tempdir().unwrap();
    let file = file.path().join("sandbox.json");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(
        &file,
        concat!(
            r#"{"filesystem": {"denyRead": [".env", "secrets/key", "hidden/**"], "#,
            r#""denyWrite": ["./data", "free"]}}"#
        ),
    )
    .unwrap();
    for _ in 0..2 {
        let server = start_in(
            space.path(),
            &["--sandbox", "--sandbox-config", file.to_str().unwrap()],
        );
        go_through(
            &server,
            vec![
                fails(
                    CELL,
                    cell("open('secrets/key').read()"),
                    &["PermissionError"],
                ),
                fails(
                    CELL,
                    cell("import os; os.rename('secrets', 'moved')"),
                    &["busy"],
                ),
                fails(
                    CELL,
                    cell("import os; os.link('secrets/key', 'second')"),
                    &["Error"],
                ),
                exactly(CELL, cell("open('secrets/open').read()"), &["'seen'"]),
                exactly(CELL, cell("import os; os.listdir('hidden')"), &["[]"]),
                exactly(CELL, cell("open('data/table').read()"), &["'rows'"]),
                fails(CELL, cell("open('data/table', 'w')"), &["Read-only"]),
                fails(CELL, cell("open('data/new', 'w')"), &["Read-only"]),
                fails(CELL, cell("open('free', 'w')"), &["Read-only"]),
                fails(
                    CELL,
                    cell("import os; os.rename('data', 'moved')"),
                    &["busy"],
                ),
                fails(CELL, cell("import os; os.unlink('free')"), &["busy"]),
                exactly(CELL, cell("open('elsewhere', 'w').write('x')"), &["1"]), // control
            ],
        );
        // A new session after whatever code did in the one before.
        text_of_reset(&server);
        go_through(
            &server,
            vec![fails(
                CELL,
                cell("open('secrets/key').read()"),
                &["PermissionError"],
            )],
        );
    }
    // The control: without the file everything is free.
    let server = start_in(space.path(), &[]);
    go_through(
        &server,
        vec![
            words(CELL, cell("open('secrets/key').read()"), &["canary"]),
            exactly(CELL, cell("import os; os.rename('data', 'moved')"), &[""]),
        ],
    );
}

#[test]
fn a_pattern_that_cannot_be_held_ends_the_start_with_a_sentence() {
    let space = workspace(&[(
        "sandbox.json",
        r#"{"filesystem": {"denyRead": ["**/*.pem"]}}"#,
    )]);
    let mut command = crate::support::server::program();
    command
        .args(["mcp", "--profile", "ipybox", "--sandbox-config"])
        .arg(space.path().join("sandbox.json"));
    let (status, output, errors) = crate::support::server::finished(&mut command);
    assert!(
        status != Some(0) && output.is_empty(),
        "{status:?} {output}"
    );
    assert!(errors.contains("is a pattern"), "{errors}");
}
