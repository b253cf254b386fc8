//! ipybox: the cells, files and texts of both generations.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

use serde_json::{Value, json};

use super::{
    call, exactly, fails, go_through, listed, local_index, start, start_with_index, text, words,
};
use crate::support::server::{MINIMAL, Server, TEST_TIMEOUT, data_dir, finished, folders, program};
use crate::support::{PROGRAM, skipped};

fn cell(code: &str) -> Value {
    json!({"code": code})
}

const EXECUTE: &str = "execute_ipython_cell";

#[test]
fn the_tools_have_their_names_and_arguments() {
    let server = start("ipybox", MINIMAL);
    let tools = listed(&server);
    let expected = json!([
        [
            "register_mcp_server",
            ["server_name", "server_params"],
            ["server_name", "server_params"]
        ],
        ["install_package", ["package_name"], ["package_name"]],
        [
            "execute_ipython_cell",
            ["code", "max_output_chars", "timeout"],
            ["code"]
        ],
        ["reset", [], []],
        [
            "upload_file",
            ["local_path", "relpath"],
            ["relpath", "local_path"]
        ],
        [
            "download_file",
            ["local_path", "relpath"],
            ["relpath", "local_path"]
        ],
    ]);
    assert_eq!(tools, expected);
    let all = server.request("tools/list", json!({}));
    let execute = all["result"]["tools"]
        .as_array()
        .unwrap()
        .iter()
        .find(|tool| tool["name"] == EXECUTE)
        .unwrap();
    let defaults = |name: &str| execute["inputSchema"]["properties"][name]["default"].as_f64();
    assert_eq!(
        (defaults("timeout"), defaults("max_output_chars")),
        (Some(120.0), Some(5000.0))
    );
}

#[test]
fn cells_answer_as_documented() {
    cells(&start("ipybox", MINIMAL));
}

/// Goes through cells and a reset, on any backend.
pub(super) fn cells(server: &Server) {
    let long = "x".repeat(5000) + "\n\n[Output truncated: exceeded 5000 character limit]";
    let with = |code: &str, name: &str, value: Value| {
        let mut arguments = cell(code);
        arguments[name] = value;
        arguments
    };
    go_through(
        server,
        vec![
            exactly(EXECUTE, cell("print('Hello, world!')"), &["Hello, world!"]),
            exactly(EXECUTE, cell("1 + 1"), &["2"]),
            exactly(EXECUTE, cell(""), &[""]),
            exactly(EXECUTE, cell("x = 42"), &[""]),
            exactly(EXECUTE, cell("print(x); x"), &["42\n42"]),
            exactly(
                EXECUTE,
                cell("import sys; print('e', file=sys.stderr); print('o')"),
                &["e\no"],
            ),
            exactly(EXECUTE, cell("!echo from the shell"), &["from the shell"]),
            exactly(
                EXECUTE,
                cell("import asyncio; await asyncio.sleep(0); print('awaited')"),
                &["awaited"],
            ),
            exactly(EXECUTE, cell("print('x' * 6000)"), &[&long]),
            exactly(
                EXECUTE,
                with("print('x' * 10)", "max_output_chars", json!(10)),
                &["xxxxxxxxxx"],
            ),
            exactly(
                EXECUTE,
                with("print('x' * 11)", "max_output_chars", json!(10)),
                &["xxxxxxxxxx\n\n[Output truncated: exceeded 10 character limit]"],
            ),
            exactly(EXECUTE, with("5", "timeout", json!("30")), &["5"]),
            fails(
                EXECUTE,
                cell("print('before'); 1 / 0"),
                &[
                    "Error executing tool execute_ipython_cell: ZeroDivisionError: division by \
                     zero\n",
                    "Traceback (most recent call last)",
                    "\n\nOutput before the error:\nbefore",
                ],
            ),
            fails(
                EXECUTE,
                cell("def f(:"),
                &["Error executing tool execute_ipython_cell: SyntaxError: "],
            ),
            fails(EXECUTE, cell("input()"), &["EOFError"]),
            fails(
                EXECUTE,
                with("print('began')\nwhile True: pass", "timeout", json!(1)),
                &[
                    "tool execute_ipython_cell: Code execution exceeded timeout of 1.00s.",
                    "are kept",
                    "began",
                ],
            ),
            exactly(EXECUTE, cell("x"), &["42"]),
            fails(
                EXECUTE,
                with("1", "timeout", json!(0)),
                &["\"timeout\"", "greater than 0"],
            ),
            fails(
                EXECUTE,
                with("1", "max_output_chars", json!(-1)),
                &["\"max_output_chars\""],
            ),
            fails(
                EXECUTE,
                json!({}),
                &["Error executing tool execute_ipython_cell: ", "\"code\""],
            ),
            fails(EXECUTE, with("1", "time_out", json!(1)), &["\"timeout\"?"]),
            fails("no_such_tool", json!({}), &["Unknown tool: no_such_tool"]),
            exactly("reset", json!({}), &[]),
            fails(EXECUTE, cell("x"), &["NameError: name 'x' is not defined"]),
        ],
    );
}

#[test]
fn a_dead_python_says_so_until_it_is_reset() {
    death_and_reset(&start("ipybox", MINIMAL));
}

pub(super) fn death_and_reset(server: &Server) {
    go_through(
        server,
        vec![
            fails(
                EXECUTE,
                cell("import os; os._exit(3)"),
                &["exit code 3", "gone", "Call `reset`"],
            ),
            fails(EXECUTE, cell("1"), &["ended because", "Call `reset`"]),
            exactly("reset", json!({}), &[]),
            exactly(EXECUTE, cell("1"), &["1"]),
        ],
    );
}

#[test]
fn a_reset_works_while_a_cell_runs_and_before_anything_has() {
    reset_at_any_time(&start("ipybox", MINIMAL));
}

pub(super) fn reset_at_any_time(server: &Server) {
    assert_eq!(call(server, "reset", json!({})), (vec![], false));
    let running = server.begin(
        EXECUTE,
        cell("print('begun', flush=True)\nwhile True: pass"),
    );
    server.notification(|message| {
        message["params"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("begun"))
    });
    assert_eq!(call(server, "reset", json!({})), (vec![], false));
    running
        .result()
        .assert_refused(&["Error executing tool execute_ipython_cell: ", "reset"]);
}

#[test]
fn files_cross_between_allowed_directories_and_the_working_folder() {
    files_cross(|arguments| start("ipybox", &[MINIMAL, arguments].concat()));
}

/// Moves files between this machine and a session, on the backend of a server that is started with
/// these arguments.
pub(super) fn files_cross(start: impl Fn(&[&str]) -> Server) {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(
        folder.path().join("data.bin"),
        (0..=255).collect::<Vec<u8>>(),
    )
    .unwrap();
    fs::write(other.path().join("secret"), "hush").unwrap();
    symlink(other.path().join("secret"), folder.path().join("link")).unwrap();
    let server = start(&["--allowed-dir", folder.path().to_str().unwrap()]);
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let outside = other.path().join("secret").to_str().unwrap().to_owned();
    let pair =
        |relpath: &str, local_path: &str| json!({"relpath": relpath, "local_path": local_path});
    go_through(
        &server,
        vec![
            fails(
                "download_file",
                pair("in/data.bin", &at("x")),
                &["Error executing tool download_file: File not found: in/data.bin"],
            ),
            exactly("upload_file", pair("in/data.bin", &at("data.bin")), &[]),
            exactly(
                EXECUTE,
                cell("len(set(open('in/data.bin', 'rb').read()))"),
                &["256"],
            ),
            exactly("upload_file", pair("./in//data.bin", &at("data.bin")), &[]),
            exactly(
                "download_file",
                pair("in/data.bin", &at("new/out.bin")),
                &[],
            ),
            exactly(
                "download_file",
                pair("in/data.bin", &at("new/out.bin")),
                &[],
            ),
            fails(
                "upload_file",
                pair("x", &at("missing")),
                &["tool upload_file: File not found: "],
            ),
            fails("upload_file", pair("x", &at("new")), &["Not a file: "]),
            fails(
                "upload_file",
                pair("x", &outside),
                &["is not within allowed directories for upload"],
            ),
            fails(
                "upload_file",
                pair("x", &at("link")),
                &["is not within allowed directories for upload"],
            ),
            fails(
                "download_file",
                pair("in/data.bin", &outside),
                &["is not within allowed directories for download"],
            ),
            fails(
                "download_file",
                pair("../up", &at("x")),
                &["Invalid path: escapes root directory"],
            ),
            fails(
                "download_file",
                pair("/etc/passwd", &at("x")),
                &["Invalid path: escapes root directory"],
            ),
            fails(
                "download_file",
                pair("missing", &at("x")),
                &["File not found: missing"],
            ),
            fails("download_file", pair("in", &at("x")), &["Not a file: in"]),
        ],
    );
    assert_eq!(
        fs::read(folder.path().join("new/out.bin")).unwrap(),
        (0..=255).collect::<Vec<u8>>()
    );
    assert_eq!(
        fs::read_to_string(other.path().join("secret")).unwrap(),
        "hush"
    );
}

#[test]
fn without_allowed_directories_no_file_of_the_host_is_touched() {
    let server = start("ipybox", MINIMAL);
    let result = server.call(
        "upload_file",
        json!({"relpath": "x", "local_path": "/etc/hostname"}),
    );
    result.assert_refused(&[
        "Path '/etc/hostname' is not within allowed directories for upload",
        "--allowed-dir",
    ]);
}

#[test]
fn pictures_are_blocks_and_files_that_the_text_lists() {
    let folder = tempfile::tempdir().unwrap();
    let draw = "import matplotlib.pyplot as plt\nfor n in range(2):\n    plt.figure(figsize=(2, \
                1), dpi=100); plt.plot([n]); plt.show()\nprint('drawn')";
    let workspace = folder.path().canonicalize().unwrap();
    let server = start(
        "ipybox",
        &[
            "--workspace",
            workspace.to_str().unwrap(),
            "--images-dir",
            "plots",
        ],
    );
    let result = server.call(EXECUTE, cell(draw));
    assert_eq!(result.images().len(), 2);
    let (before, list) = result
        .text()
        .split_once("\n\nGenerated images:\n\n")
        .expect("the text lists the pictures");
    assert_eq!(before, "drawn");
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 2);
    for line in lines {
        let (name, path) = line
            .strip_prefix("- [")
            .unwrap()
            .strip_suffix(')')
            .unwrap()
            .split_once("](")
            .unwrap();
        assert_eq!(
            path,
            workspace
                .join("plots")
                .join(format!("{name}.png"))
                .to_str()
                .unwrap()
        );
        assert!(image::open(path).is_ok(), "{path}");
    }
    // The limit of characters holds for what the code printed, never for the list.
    let result = server.call(EXECUTE, json!({"code": draw, "max_output_chars": 3}));
    assert!(
        result.text().starts_with(
            "dra\n\n[Output truncated: exceeded 3 character limit]\n\nGenerated images:"
        )
    );
    assert_eq!(
        result
            .text()
            .lines()
            .filter(|line| line.starts_with("- ["))
            .count(),
        2
    );
}

#[test]
fn without_a_workspace_pictures_can_be_downloaded() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(
        "ipybox",
        &["--allowed-dir", folder.path().to_str().unwrap()],
    );
    let told = text(
        &server,
        EXECUTE,
        cell("import matplotlib.pyplot as plt; plt.plot([1]); plt.show()"),
    );
    let path = told
        .split_once("](")
        .unwrap()
        .1
        .trim_end_matches(')')
        .to_owned();
    let local_path = folder.path().join("plot.png");
    text(
        &server,
        "download_file",
        json!({"relpath": path, "local_path": local_path.to_str().unwrap()}),
    );
    assert!(image::open(local_path).is_ok());
}

#[test]
fn packages_are_installed_and_a_failure_is_an_error() {
    let index = local_index();
    packages(&start_with_index("ipybox", &index, |_| {}));
    assert!(
        index.requests().iter().any(|path| path.contains("pure")),
        "the index of the setting was asked"
    );
}

/// Installs packages of the index on this machine, on any backend.
pub(super) fn packages(server: &Server) {
    go_through(
        server,
        vec![
            fails(EXECUTE, cell("import pure"), &["ModuleNotFoundError"]),
            words(
                "install_package",
                json!({"package_name": "pure>=1,<2"}),
                &["pure"],
            ),
            exactly(EXECUTE, cell("import pure; pure.value"), &["1"]),
            exactly("reset", json!({}), &[]),
            exactly(EXECUTE, cell("import pure; pure.value"), &["1"]),
            fails(
                "install_package",
                json!({"package_name": "no-such-package"}),
                &["Error executing tool install_package: "],
            ),
            fails(
                "install_package",
                json!({"package_name": "-r /etc/passwd"}),
                &[
                    "Error executing tool install_package: ",
                    "options are not accepted",
                ],
            ),
        ],
    );
}

#[test]
fn another_server_is_registered_and_its_tools_are_called_from_code() {
    let server = start("ipybox", MINIMAL);
    let variables: serde_json::Map<String, Value> = folders(data_dir())
        .into_iter()
        .map(|(name, path)| (name.to_owned(), json!(path.to_str().unwrap())))
        .collect();
    let params = json!({
        "command": PROGRAM,
        "args": ["mcp", "--profile", "pyexec", "--environment", "minimal"],
        "env": variables,
    });
    go_through(
        &server,
        vec![
            exactly(
                "register_mcp_server",
                json!({"server_name": "inner", "server_params": params}),
                &["execute_python"],
            ),
            exactly(
                EXECUTE,
                cell(
                    "from mcptools.inner import execute_python as \
                     tool\ntool.run(tool.Params(code='6 * 7'))",
                ),
                &["'42'"],
            ),
            exactly(
                EXECUTE,
                cell("import os; 'execute_python.py' in os.listdir('mcptools/inner')"),
                &["True"],
            ),
            exactly("reset", json!({}), &[]),
            fails(EXECUTE, cell("tool"), &["NameError"]), // control: it was reset
            exactly(
                EXECUTE,
                cell(
                    "from mcptools.inner.execute_python import Params, \
                     run\nprint(run(Params(code='6 * 7')))",
                ),
                &["42"],
            ),
            fails(
                "register_mcp_server",
                json!({"server_name": "../x", "server_params": params}),
                &["Error executing tool register_mcp_server: "],
            ),
            fails(
                "register_mcp_server",
                json!({"server_name": "x", "server_params": {}}),
                &["Error executing tool register_mcp_server: "],
            ),
            fails(
                "register_mcp_server",
                json!({"server_name": "x", "server_params": 5}),
                &["server_params must be an object"],
            ),
        ],
    );
}

/// A package whose program is ours, in a folder of its own: no registry is asked.
#[test]
fn a_server_is_registered_through_npx() {
    let version = Command::new("npx").arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        return skipped("npx");
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let script = format!("#!/bin/sh\nexec {PROGRAM} mcp --profile pyexec --environment minimal\n");
    for name in ["node_modules/.bin", "node_modules/inner"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    for (name, text) in [
        (
            "package.json",
            r#"{"private": true, "dependencies": {"inner": "1.0.0"}}"#,
        ),
        (
            "node_modules/inner/package.json",
            r#"{"name": "inner", "version": "1.0.0", "bin": "start"}"#,
        ),
        ("node_modules/inner/start", &script),
    ] {
        fs::write(at(name), text).unwrap();
    }
    let everybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(at("node_modules/inner/start"), everybody).unwrap();
    symlink("../inner/start", at("node_modules/.bin/inner")).unwrap();
    let mut variables: serde_json::Map<String, Value> = folders(data_dir())
        .into_iter()
        .map(|(name, path)| (name.to_owned(), json!(path)))
        .collect();
    variables.insert("npm_config_cache".to_owned(), json!(at("cache")));
    variables.insert("npm_config_offline".to_owned(), json!("true"));
    let register = |package: &str| {
        json!({"server_name": package, "server_params": {
            "command": "npx",
            "args": ["-y", package],
            "cwd": folder.path(),
            "env": variables,
            "connect_timeout": TEST_TIMEOUT.as_secs(),
        }})
    };
    go_through(
        &start("ipybox", MINIMAL),
        vec![
            exactly(
                "register_mcp_server",
                register("inner"),
                &["execute_python"],
            ),
            exactly(
                EXECUTE,
                cell(
                    "from mcptools.inner.execute_python import Params, \
                     run\nprint(run(Params(code='6 * 7')))",
                ),
                &["42"],
            ),
            // Control: a package that the folder does not have.
            fails(
                "register_mcp_server",
                register("absent"),
                &["Error executing tool register_mcp_server: "],
            ),
        ],
    );
}

#[test]
fn options_of_both_generations_reach_the_code() {
    let folder = tempfile::tempdir().unwrap();
    let (space, bound) = (folder.path().join("space"), folder.path().join("bound"));
    fs::create_dir_all(&bound).unwrap();
    fs::create_dir(&space).unwrap();
    fs::write(bound.join("data"), "bound").unwrap();
    fs::write(
        folder.path().join("more.env"),
        "FROM_FILE=file\nBOTH=file\n",
    )
    .unwrap();
    fs::write(
        space.join(".env"),
        "KERNEL_ENV_FROM_DOTENV=dotenv\nOTHER=hidden\n",
    )
    .unwrap();
    let mut command = program();
    command
        .current_dir(folder.path())
        .args([
            "mcp",
            "--profile",
            "ipybox",
            "--environment",
            "minimal",
            "--workspace",
            "space",
        ])
        .args([
            "--container-env-var",
            "BOTH=flag",
            "--container-env-file",
            "more.env",
            "--container-bind",
            "bound:inner",
        ]);
    let server = Server::spawn(&mut command, crate::support::server::Era::Initialize);
    server.greet();
    let code = "import os; print(*(os.environ.get(n) for n in ('FROM_FILE', 'BOTH', 'FROM_DOTENV', \
                'OTHER')), open('inner/data').read())";
    assert_eq!(
        text(&server, EXECUTE, cell(code)),
        "file flag dotenv None bound"
    );
}

#[test]
fn without_a_workspace_code_sees_nothing_of_the_current_folder() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("here"), "x").unwrap();
    let seen = |more: &[&str]| {
        let mut command = program();
        command
            .current_dir(folder.path())
            .args(["mcp", "--profile", "ipybox"])
            .args(MINIMAL)
            .args(more);
        let server = Server::spawn(&mut command, crate::support::server::Era::Initialize);
        server.greet();
        let look = "import os; print(os.getcwd(), os.path.exists('here'))";
        text(&server, EXECUTE, cell(look))
    };
    assert_eq!(seen(&[]), "/work False");
    assert_eq!(seen(&["--workspace", "."]), "/work True"); // control
}

#[test]
fn an_image_without_an_engine_is_told_in_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = program();
    command.env(
        "DOCKER_HOST",
        format!("unix://{}", folder.path().join("no.sock").display()),
    );
    command.args([
        "mcp",
        "--profile",
        "ipybox",
        "--container-tag",
        "mine/science:1",
    ]);
    let server = Server::spawn(&mut command, crate::support::server::Era::Initialize);
    server.greet();
    server
        .call(EXECUTE, cell("1"))
        .assert_refused(&["Error executing tool execute_ipython_cell: no Python could be started"]);
}

#[test]
fn the_sandbox_file_opens_the_network_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sandbox.json");
    fs::write(&file, r#"{"network": {"allowedDomains": ["open.test"]}}"#).unwrap();
    let ask = "import socket\ntry: print(socket.gethostbyname('open.test').split('.')[0])\nexcept \
               OSError as e: print('no', e)";
    let open = start(
        "ipybox",
        &[MINIMAL, &["--sandbox-config", file.to_str().unwrap()]].concat(),
    );
    // Control: the name stands for an address of ours.
    assert_eq!(text(&open, EXECUTE, cell(ask)), "198");
    let closed = start("ipybox", MINIMAL);
    assert!(text(&closed, EXECUTE, cell(ask)).starts_with("no "));
}

#[test]
fn build_and_cleanup_are_commands_here_too() {
    let folder = tempfile::tempdir().unwrap();
    let nowhere = format!("unix://{}", folder.path().join("no.sock").display());
    let (status, _, errors) = finished(
        program()
            .env("DOCKER_HOST", &nowhere)
            .args(["build", "-t", "a/b:c", "-r"]),
    );
    assert_eq!(status, Some(2));
    assert!(errors.contains("Docker cannot be reached"), "{errors}");
    let (status, _, errors) = finished(
        program()
            .env("DOCKER_HOST", &nowhere)
            .args(["cleanup", "-a", "a/b:c"]),
    );
    assert_eq!(status, Some(2));
    assert!(errors.contains("Docker cannot be reached"), "{errors}");
}
