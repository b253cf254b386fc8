//! The program on the command line: `run`, `doctor`, `env`, help, and mistakes, as root and as an
//! ordinary user.

use std::fs;
use std::io::Write;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use cellblock::environment::{self, EnvironmentSpec, Input};
use serde_json::Value;

use crate::support::server::{Era, Server, data_dir, finished, program, program_below};
use crate::support::{PROGRAM, is_root, skipped};

/// The user that owns nothing. Its number is the same everywhere.
const NOBODY: u32 = 65534;

/// `run` in the environment that starts soonest.
fn run(arguments: &[&str]) -> Command {
    let mut command = program();
    command
        .args(["run", "--environment", "minimal"])
        .args(arguments);
    command
}

/// Leaves out what a run says of itself where a busy machine keeps it waiting.
fn without_progress(errors: &str) -> String {
    let steps = [
        "cellblock: starting the sandbox\n",
        "cellblock: warming up Python\n",
    ];
    errors
        .split_inclusive('\n')
        .filter(|line| !steps.contains(line))
        .collect()
}

#[test]
fn run_takes_code_from_the_line_from_a_file_and_from_standard_input() {
    let (status, output, errors) = finished(&mut run(&["-c", "print('a'); 1 + 1"]));
    assert_eq!(
        (status, output.as_str(), without_progress(&errors).as_str()),
        (Some(0), "a\n2\n", "")
    );

    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.py");
    fs::write(&script, "print('from a file')\n").unwrap();
    assert_eq!(
        finished(&mut run(&[script.to_str().unwrap()])).1,
        "from a file\n"
    );

    let mut child = run(&["-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"print('from a pipe')")
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout),
        (Some(0), b"from a pipe\n".to_vec())
    );

    let (status, output, errors) = finished(&mut run(&[folder
        .path()
        .join("missing.py")
        .to_str()
        .unwrap()]));
    assert_eq!((status, output.as_str()), (Some(2), ""));
    assert!(errors.contains("missing.py"), "{errors}");
}

#[test]
fn the_exit_status_tells_how_the_code_ended() {
    let (status, output, errors) = finished(&mut run(&["-c", "print('before'); 1 / 0"]));
    assert_eq!((status, output.as_str()), (Some(1), "before\n"));
    assert!(errors.contains("ZeroDivisionError"), "{errors}");
    let (status, _, errors) = finished(&mut run(&["--timeout", "1", "-c", "while True: pass"]));
    assert_eq!(status, Some(124), "{errors}");
    assert!(errors.contains("stopped after 1 s"), "{errors}");
    assert_eq!(
        finished(&mut run(&["-c", "import os; os._exit(7)"])).0,
        Some(125)
    );
    let (status, output, errors) = finished(&mut run(&[
        "-c",
        "import sys; print('out'); print('err', file=sys.stderr)",
    ]));
    assert_eq!(
        (status, output.as_str(), without_progress(&errors).as_str()),
        (Some(0), "out\n", "err\n")
    );
}

#[test]
fn images_and_files_of_a_run_are_saved_where_they_are_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let mut command = program();
    let code = "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show(); open('table.csv', \
                'w').write('a,b')";
    command
        .current_dir(folder.path())
        .args(["run", "-c", code, "--output-dir", "plots"]);
    let (status, _, errors) = finished(&mut command);
    assert_eq!(status, Some(0), "{errors}");
    let image = image::open(plots.join("image-1.png")).expect("the plot was saved");
    assert!(image.width() > 100);
    assert_eq!(fs::read_to_string(plots.join("table.csv")).unwrap(), "a,b");
    assert!(errors.contains("image-1.png"), "{errors}");
    // Without a place for them, files are named before they vanish.
    let mut command = run(&["-c", "open('lost.txt', 'w').write('x')"]);
    let (_, _, errors) = finished(command.current_dir(folder.path()));
    assert!(
        errors.contains("lost.txt") && errors.contains("--output-dir"),
        "{errors}"
    );
    assert!(!folder.path().join("lost.txt").exists());
    // What is in a mounted folder does not vanish.
    let code = "open('shared/kept.txt', 'w').write('x'); open('lost.txt', 'w').write('x')";
    let mut command = run(&["-c", code, "--mount", ".:shared"]);
    let (_, _, errors) = finished(command.current_dir(folder.path()));
    assert!(
        errors.contains("lost.txt") && !errors.contains("kept.txt"),
        "{errors}"
    );
    assert!(folder.path().join("kept.txt").exists());
}

#[test]
fn a_run_has_no_network_and_sees_nothing_of_the_user() {
    let code = "import os, socket\nprint(os.environ.get('SECRET_OF_THE_USER'), \
                os.path.exists('/home'), os.getuid() != 0 or 'root inside')\ntry:\n    \
                socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError as error: \
                print('refused')";
    let (_, output, errors) = finished(run(&["-c", code]).env("SECRET_OF_THE_USER", "hush"));
    assert!(
        output.starts_with("None ") && output.ends_with("refused\n"),
        "{output} {errors}"
    );
}

#[test]
fn doctor_tells_what_is_enforced_as_text_and_as_json() {
    let (status, output, errors) = finished(program().arg("doctor"));
    assert_eq!(status, Some(0), "{output} {errors}");
    for word in [
        "namespaces",
        "system-calls",
        "enforced",
        "Sessions can be started.",
    ] {
        assert!(output.contains(word), "{word} is not in {output}");
    }
    let (status, output, errors) = finished(program().args(["doctor", "--json"]));
    assert_eq!(status, Some(0), "{errors}");
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["usable"], true);
    assert!(
        report["layers"]
            .as_object()
            .is_some_and(|layers| layers.len() >= 5),
        "{report}"
    );
}

#[test]
fn environments_are_built_listed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let run = |arguments: &[&str]| finished(program_below(&data).args(arguments));
    assert!(
        run(&["env", "list"])
            .1
            .contains("no environment has been built yet")
    );
    let (status, output, errors) = run(&["env", "build", "minimal"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(
        output.starts_with("minimal is ready: Python 3."),
        "{output}"
    );
    assert_eq!(
        run(&["env", "build", "minimal"]).0,
        Some(0),
        "a second time is harmless"
    );
    let listed: Value = serde_json::from_str(&run(&["env", "list", "--json"]).1).unwrap();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["in_use"]),
        (&Value::from("minimal"), &Value::from(false))
    );
    assert!(run(&["env", "list"]).1.contains("minimal"));
    let (status, output, _) = run(&["env", "remove", "minimal"]);
    assert_eq!(status, Some(0));
    assert!(output.contains("removed minimal"), "{output}");
    let (status, output, errors) = run(&["env", "remove", "minimal"]);
    assert_eq!((status, output.as_str()), (Some(2), ""));
    assert!(
        errors.contains("there is no environment \"minimal\""),
        "{errors}"
    );
    let (status, _, errors) = run(&["env", "build", "mine"]);
    assert_eq!(status, Some(2));
    assert!(errors.contains("--packages"), "{errors}");
}

#[test]
fn a_lock_makes_the_same_environment_again_and_files_say_what_is_in_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).to_str().unwrap().to_owned()
    };
    let run =
        |arguments: &[&str]| finished(program_below(&folder.path().join("data")).args(arguments));
    let requirements = file(
        "requirements.txt",
        "-c constraints.txt\nidna # a small one\n",
    );
    file("constraints.txt", "idna<3.7\n");
    let (status, output, errors) = run(&["env", "build", "first", "--requirements", &requirements]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(
        output.starts_with("first is ready: Python 3.") && output.contains("idna==3.6"),
        "{output}"
    );
    let (status, lock, errors) = run(&["env", "show", "first"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(lock.contains("idna==3.6 \\\n    --hash=sha256:"), "{lock}");

    let (status, _, errors) = run(&[
        "env",
        "build",
        "second",
        "--locked",
        &file("first.lock", &lock),
    ]);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(run(&["env", "show", "second"]).1, lock);
    let code = "import idna; print(idna.__version__)";
    let (_, output, errors) = run(&["run", "--environment", "second", "-c", code]);
    assert_eq!(output, "3.6\n", "{errors}");

    let open = file("open.lock", &lock.replace("idna==3.6", "idna>=3.6"));
    let (status, _, errors) = run(&["env", "build", "third", "--locked", &open]);
    assert_eq!(status, Some(2));
    assert!(
        errors.contains("\"idna>=3.6\" is not an exact version"),
        "{errors}"
    );
}

/// Tests run with fewer packages; this is what users get.
#[test]
fn the_packages_of_the_default_environment_go_together() {
    let [default, _] = EnvironmentSpec::built_in();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("requirements.txt");
    fs::write(&file, default.packages.join("\n")).unwrap();
    let input = Input::Requirements(vec![file]);
    let resolved = crate::support::native::run(environment::resolve(
        &input,
        Some(&default.python),
        data_dir(),
        &|_| (),
    ));
    let chosen = resolved.unwrap().0.text();
    for requirement in &default.packages {
        let package = requirement.split('<').next().unwrap();
        assert!(
            chosen
                .lines()
                .any(|line| line.starts_with(&format!("{package}=="))),
            "{package} is missing: {chosen}"
        );
    }
}

#[test]
fn an_environment_in_use_is_not_removed() {
    let server = crate::support::server::Server::start(&["--environment", "minimal"]);
    assert_eq!(server.session().text("1"), "1");
    let (status, _, errors) = finished(program().args(["env", "remove", "minimal"]));
    assert_eq!(status, Some(2));
    assert!(
        errors.contains("in use") && errors.contains(&server.process_id().to_string()),
        "{errors}"
    );
    assert_eq!(server.session().text("2"), "2");
}

#[test]
fn help_exists_for_every_command() {
    for arguments in [
        &[][..],
        &["mcp"],
        &["run"],
        &["doctor"],
        &["env"],
        &["env", "list"],
        &["env", "build"],
        &["env", "show"],
        &["env", "remove"],
    ] {
        let (status, output, errors) = finished(program().args(arguments).arg("--help"));
        assert_eq!((status, errors.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(output.contains("Usage: cellblock"), "{output}");
    }
    let (status, output, _) = finished(program().arg("--version"));
    assert_eq!(
        (status, output.trim()),
        (Some(0), concat!("cellblock ", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn unknown_settings_are_answered_with_the_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    for (text, words) in [
        ("memroy: 1G\n", ["memroy", "memory"]),
        ("\nidle-timeot: 5m\n", ["idle-timeot", "idle_timeout"]),
        ("timeout: [1]\n", ["timeout", "line 1"]),
        ("{\n", ["config.yaml", "line"]),
    ] {
        fs::write(&file, text).unwrap();
        let (status, output, errors) = finished(run(&["-c", "1"]).arg("--config").arg(&file));
        assert_eq!(
            (status, output.as_str()),
            (Some(2), ""),
            "{text:?}: {errors}"
        );
        assert!(
            words.iter().all(|word| errors.contains(word)),
            "{text:?}: {errors}"
        );
    }
    fs::write(&file, "memory: 1G\ntimeout: 30s\n").unwrap();
    let (status, _, errors) = finished(run(&["-c", "1"]).arg("--config").arg(&file)); // control
    assert_eq!(status, Some(0), "{errors}");
}

#[test]
fn an_ordinary_user_can_do_the_same_without_any_right() {
    if !is_root() {
        // Then all other tests are this test.
        return skipped("root, to become another user");
    }
    // The program may lie where an ordinary user cannot go, so everything is laid out in a folder
    // of its own.
    let folder = tempfile::Builder::new()
        .prefix("cellblock-ordinary-")
        .tempdir_in("/tmp")
        .unwrap();
    chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let copy = folder.path().join("cellblock");
    fs::copy(PROGRAM, &copy).unwrap();
    for name in ["home", "runtime", "workspace"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        chown(folder.path().join(name), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let path = "/usr/local/bin:/usr/bin:/bin";
    let ordinary = |program: &Path| {
        let mut command = Command::new(program);
        command
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir(folder.path())
            .stdin(Stdio::null());
        command
            .env("HOME", folder.path().join("home"))
            .env("XDG_RUNTIME_DIR", folder.path().join("runtime"));
        command
            .env("PATH", path)
            .env_remove("CELLBLOCK_DATA_DIR")
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("XDG_DATA_HOME");
        command
    };
    let mut python = ordinary(Path::new("/usr/bin/env"));
    if finished(python.args([
        "python3",
        "-c",
        "import sys; sys.exit(sys.version_info < (3, 10))",
    ]))
    .0 != Some(0)
    {
        return skipped("a Python 3.10 that an ordinary user can start");
    }
    // The shared uv saves a download; without one the program gets its own.
    let mut uv = data_dir().join("tools/uv");
    if !uv.exists() {
        uv = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|folder| folder.join("uv"))
            .find(|uv| uv.exists())
            .unwrap_or(uv);
    }
    let own_uv = folder.path().join("uv");
    let has_uv = fs::copy(uv, &own_uv).is_ok();
    let cellblock = |arguments: &[&str]| {
        let mut command = ordinary(&copy);
        if has_uv {
            command.env("CELLBLOCK_UV", &own_uv);
        }
        finished(command.args(arguments))
    };

    let (status, output, errors) = cellblock(&["doctor"]);
    if status != Some(0) && output.contains("user namespace") {
        return skipped("user namespaces for ordinary users");
    }
    assert_eq!(status, Some(0), "{output} {errors}");
    let code = "import os; print(os.getuid(), \
                open('/proc/self/status').read().count('CapEff:\\t0000000000000000'))";
    let (status, output, errors) = cellblock(&["run", "--environment", "minimal", "-c", code]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(
        output.trim_end().ends_with(" 1") && !output.starts_with("0 "),
        "no right inside: {output}"
    );
    let arguments = [
        "run",
        "--environment",
        "minimal",
        "--workspace",
        "workspace",
        "-c",
        "open('made', 'w').write('made')",
    ];
    let (status, _, errors) = cellblock(&arguments);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(
        fs::read_to_string(folder.path().join("workspace/made")).unwrap(),
        "made"
    );
    let (status, _, errors) = cellblock(&[
        "run",
        "--environment",
        "minimal",
        "--timeout",
        "1",
        "-c",
        "while True: pass",
    ]);
    assert_eq!(status, Some(124), "{errors}");
    let instances = folder.path().join("runtime/cellblock/instances");
    assert_eq!(
        fs::read_dir(instances).unwrap().count(),
        0,
        "nothing of a finished run stays"
    );
}

/// Other tests have a smaller environment of that name.
#[test]
fn the_environment_that_users_have_by_default_is_warm_and_has_what_it_promises() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("data-of-users");
    let (built, _, errors) = finished(program_below(&folder).args(["env", "build"]));
    assert_eq!(built, Some(0), "{errors}");
    let server = Server::spawn(program_below(&folder).arg("mcp"), Era::Initialize);
    server.greet();
    let session = server.session();
    assert_eq!(
        session
            .text("import sys; [name in sys.modules for name in ('numpy', 'pandas', 'pyarrow')]"),
        "[True, True, True]"
    );
    let modules = "bs4 duckdb httpx jinja2 lxml.etree nbformat networkx openpyxl plotly requests \
                   scipy seaborn sklearn \
                   statsmodels sympy tabulate tqdm yaml";
    let import =
        format!("import importlib\nfor name in '{modules}'.split(): importlib.import_module(name)");
    assert_eq!(session.text(&import), "(no output)");
    let table = "import io, pandas as pd\nfile = io.BytesIO(); pd.DataFrame({'a': ['x', \
                 'y']}).to_parquet(file)";
    session.text(table);
    session.text("kept = 1");
    session.call("undo", serde_json::json!({}));
    assert_eq!(
        session.text("pd.read_parquet(file).a.tolist(), 'kept' in globals()"),
        "(['x', 'y'], False)"
    );
}
