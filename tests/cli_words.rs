//! What the command line says, and the status that it ends with: closed pipes, interruptions,
//! mistakes, and the commands about the program itself.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::server::{finished, program, program_below, with_timeout};
use crate::support::{PROGRAM, skipped};

/// The status of a program that SIGPIPE ended, as a shell tells it.
const BROKEN_PIPE: Option<i32> = Some(141);
const INTERRUPTED: Option<i32> = Some(130);

/// A pipe whose reader is gone.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_reader_that_is_gone_ends_a_command_quietly() {
    let lines = "for number in range(200_000): print(number)";
    for arguments in [
        &["env", "show", "minimal"][..],
        &["env", "list"],
        &["packages", "list"],
        &["daemon", "status"],
        &["config", "show"],
        &["completions", "bash"],
        &["version"],
        &["doctor"],
        &["run", "--environment", "minimal", "-c", lines],
    ] {
        let (status, output, errors) = finished(program().args(arguments).stdout(closed_pipe()));
        let errors: Vec<&str> = errors.lines().filter(|line| !is_progress(line)).collect();
        assert_eq!(
            (status, output.as_str(), errors),
            (BROKEN_PIPE, "", vec![]),
            "{arguments:?}"
        );
        let both = program()
            .args(arguments)
            .stdout(closed_pipe())
            .stderr(closed_pipe())
            .status()
            .unwrap();
        assert_eq!(both.code(), BROKEN_PIPE, "{arguments:?} 2>&1");
        assert_eq!(
            finished(program().args(arguments)).0,
            Some(0),
            "{arguments:?}"
        ); // control
    }
}

/// What a run says of itself where a busy machine keeps it waiting.
fn is_progress(line: &str) -> bool {
    [
        "cellblock: starting the sandbox",
        "cellblock: warming up Python",
    ]
    .contains(&line)
}

#[test]
fn a_closed_standard_error_does_not_change_how_a_command_ends() {
    let ends = |arguments: &[&str]| {
        program()
            .args(arguments)
            .stderr(closed_pipe())
            .status()
            .unwrap()
            .code()
    };
    assert_eq!(ends(&["env", "show", "nosuch"]), Some(2));
    assert_eq!(ends(&["nosuch"]), Some(2));
    assert_eq!(
        ends(&[
            "run",
            "--environment",
            "minimal",
            "-c",
            "open('left', 'w').close()"
        ]),
        Some(0)
    );
    // Parts of the program that the server starts. Their input is not a socket, so they fail.
    let parts = [
        cellblock_jail::guardian::ARGUMENT,
        cellblock_jail::netns_listeners::ARGUMENT,
        cellblock_jail::netns_helper::ARGUMENT,
    ];
    for part in parts {
        let mut command = Command::new(PROGRAM);
        let ended = command
            .arg(part)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(closed_pipe())
            .status();
        assert_eq!(ended.unwrap().code(), Some(1), "{part} does not panic");
    }
    let mut wrapper = Command::new(PROGRAM);
    wrapper
        .args([cellblock::app::WRAPPER_ARGUMENT, "/nowhere/server"])
        .stderr(closed_pipe());
    assert_eq!(wrapper.status().unwrap().code(), Some(127));
}

/// A data folder without environments, and an installer that never ends.
struct Unbuilt {
    folder: tempfile::TempDir,
}

impl Unbuilt {
    fn new() -> Unbuilt {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        assert!(
            Command::new("mkfifo")
                .args([file("begun"), file("never")])
                .status()
                .unwrap()
                .success()
        );
        let script = format!(
            "#!/bin/sh\necho begun > {}\nread answer < {}\n",
            file("begun").display(),
            file("never").display()
        );
        fs::write(file("uv"), script).unwrap();
        fs::set_permissions(file("uv"), fs::Permissions::from_mode(0o755)).unwrap();
        Unbuilt { folder }
    }

    /// Starts a command, and returns when it installs.
    fn begin(&self, arguments: &[&str]) -> Child {
        let mut command = program_below(&self.folder.path().join("data"));
        command
            .env("CELLBLOCK_UV", self.folder.path().join("uv"))
            .args(arguments);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let begun = self.folder.path().join("begun");
        with_timeout(move || fs::read(begun).unwrap());
        child
    }
}

#[test]
fn an_interruption_while_an_environment_is_built_is_told_as_such() {
    for arguments in [
        &["run", "--environment", "minimal", "-c", "1"][..],
        &["env", "build", "minimal"],
    ] {
        let unbuilt = Unbuilt::new();
        let child = unbuilt.begin(arguments);
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let ended = with_timeout(move || child.wait_with_output().unwrap());
        let errors = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(
            (ended.status.code(), ended.stdout.len()),
            (INTERRUPTED, 0),
            "{arguments:?}: {errors}"
        );
        assert!(
            errors.ends_with("cellblock: interrupted\n"),
            "{arguments:?}: {errors}"
        );
        let (_, listed, _) =
            finished(program_below(&unbuilt.folder.path().join("data")).args(["env", "list"]));
        assert!(
            listed.starts_with("no environment has been built yet"),
            "{arguments:?} left {listed}"
        );
    }
}

#[test]
fn stopping_a_daemon_that_is_not_there_fails() {
    let (status, output, errors) = finished(program().args(["daemon", "stop", "nosuch"]));
    assert_eq!((status, output.as_str()), (Some(2), ""));
    assert!(
        errors.starts_with("cellblock: there is no session daemon nosuch; "),
        "{errors}"
    );
}

#[test]
fn former_names_work_and_are_warned_about_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    fs::write(&file, "keeper: mine\n").unwrap();
    let mut with_file = program();
    with_file
        .args(["daemon", "status", "--json", "--config"])
        .arg(&file);
    let mut with_variable = program();
    with_variable
        .args(["daemon", "status", "--json"])
        .env("CELLBLOCK_KEEPER", "mine");
    let mut with_command = program();
    with_command.args(["keeper", "status", "--json"]);
    for (mut command, name) in [
        (with_file, "keeper is now called daemon_name;"),
        (
            with_variable,
            "CELLBLOCK_KEEPER is now called CELLBLOCK_DAEMON_NAME;",
        ),
        (
            with_command,
            "cellblock keeper is now called cellblock daemon;",
        ),
    ] {
        let (status, output, errors) = finished(&mut command);
        assert_eq!(status, Some(0), "{errors}");
        assert!(output.starts_with('['), "{output}");
        assert!(errors.contains(name), "{errors}");
        assert_eq!(errors.matches("is now called").count(), 1, "{errors}");
    }
    let (status, _, errors) = finished(program().args(["daemon", "status"])); // control
    assert_eq!((status, errors.contains("is now called")), (Some(0), false));
    let different = ["mcp", "--keeper", "a", "--daemon-name", "b"];
    let (status, output, errors) = finished(program().args(different));
    assert_eq!((status, output.as_str()), (Some(2), ""));
    assert!(
        errors.contains("--keeper is the former name of --daemon-name"),
        "{errors}"
    );
}

#[test]
fn mistakes_name_the_flag_that_was_typed_in_plain_words() {
    let told = |arguments: &[&str]| {
        let (status, output, errors) = finished(program().args(["run", "-c", "1"]).args(arguments));
        assert_eq!(
            (status, output.as_str()),
            (Some(2), ""),
            "{arguments:?}: {errors}"
        );
        errors
    };
    for (flag, value, rest) in [
        (
            "env-var",
            "X",
            "the variable number 1 is refused: it must be KEY=VALUE\n",
        ),
        ("env-file", "/nope", "could not read /nope: no such file\n"),
        (
            "env-file",
            "/",
            "could not read /: it is not a regular file\n",
        ),
        (
            "mount",
            "x",
            "mounts cannot be \"x\" (there is no \":\" between two paths); allowed: ",
        ),
    ] {
        let alias = if flag == "mount" {
            "container-bind".to_owned()
        } else {
            format!("container-{flag}")
        };
        for typed in [format!("--{flag}"), format!("--{alias}")] {
            for arguments in [&[typed.as_str(), value][..], &[&format!("{typed}={value}")]] {
                let errors = told(arguments);
                assert!(
                    errors.starts_with(&format!("cellblock: {typed}: {rest}")),
                    "{arguments:?}: {errors}"
                );
            }
        }
    }
    let (_, _, errors) = finished(program().args(["--config", "/nope.yaml", "env", "list"]));
    assert_eq!(
        errors,
        "cellblock: could not read /nope.yaml: no such file\n"
    );
}

#[test]
fn a_command_that_is_not_known_gets_no_wild_guess() {
    let told = |word: &str| {
        let (status, _, errors) = finished(program().arg(word));
        assert_eq!(status, Some(2));
        errors
    };
    assert!(!told("repl").contains("similar"), "{}", told("repl"));
    assert!(told("serv").contains("'serve'"), "{}", told("serv")); // control
}

#[test]
fn the_version_is_a_word_too() {
    let version = finished(program().arg("--version"));
    assert_eq!(finished(program().arg("version")), version);
    assert_eq!(
        version.1,
        concat!("cellblock ", env!("CARGO_PKG_VERSION"), "\n")
    );
    let broken = finished(program().args(["version", "--config", "/nope.yaml"]));
    assert_eq!(broken, version, "it needs no settings");
}

#[test]
fn a_shell_completes_commands_and_flags() {
    let script = "source <(\"$0\" completions bash) || exit 1
        complete_line() {
            COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _cellblock cellblock \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"
            echo \"${COMPREPLY[@]}\"
        }
        complete_line cellblock conf
        complete_line cellblock config sh
        complete_line cellblock run --mem";
    let (status, output, errors) = finished(Command::new("bash").args(["-c", script, PROGRAM]));
    assert_eq!(
        (status, output.as_str()),
        (Some(0), "config\nshow\n--memory\n"),
        "{errors}"
    );
    for (shell, words) in [
        ("zsh", "#compdef cellblock"),
        ("fish", "complete -c cellblock"),
        ("elvish", "edit:"),
    ] {
        let (status, output, errors) = finished(program().args(["completions", shell]));
        assert_eq!(status, Some(0), "{errors}");
        assert!(
            output.contains(words) && output.contains("doctor"),
            "{shell}"
        );
    }
}

/// `config …` with a file of its own and a home without anything.
fn config(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program_below(&folder.join("data"));
    finished(
        command
            .env("XDG_CONFIG_HOME", folder.join("home"))
            .arg("config")
            .args(arguments),
    )
}

#[test]
fn a_configuration_is_checked_before_it_is_used_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("new.yaml");
    let check = || config(folder.path(), &["check", file.to_str().unwrap()]);
    let (status, _, errors) = check();
    assert_eq!(
        (status, errors),
        (
            Some(2),
            format!(
                "cellblock: could not read {}: no such file\n",
                file.display()
            )
        )
    );
    for (text, words) in [
        (
            "memory: 1G\nmemroy: 2G\n",
            "new.yaml line 2: there is no setting \"memroy\"; did you mean \"memory\"?",
        ),
        (
            "timeout: soon\n",
            "new.yaml line 1: timeout cannot be \"soon\"",
        ),
        ("workspace: data/work\n", "overlaps with"),
        (
            "environment: nosuch\n",
            "there is no environment \"nosuch\"",
        ),
    ] {
        fs::write(&file, text).unwrap();
        let (status, output, errors) = check();
        assert_eq!((status, output.as_str()), (Some(2), ""), "{text}");
        assert!(errors.contains(words), "{errors}");
    }
    fs::write(&file, "workspace: work\nmemory: 1G\n").unwrap();
    let (status, output, errors) = check();
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    assert_eq!(output, format!("{} can be used\n", file.display()));
    let (status, output, errors) = config(folder.path(), &["check"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(
        output.starts_with("there is no configuration file"),
        "{output}"
    );
    let made: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(
        made,
        ["new.yaml"],
        "neither the data folder nor the workspace was made"
    );
}

#[test]
fn settings_are_shown_with_where_they_were_written_and_without_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let text = "memory: 1G\nvariables:\n  TOKEN: sk-canary\ncpus: 1\nprofile: pyexec\n";
    fs::write(&file, text).unwrap();
    let show = |more: &[&str]| {
        let mut command = program_below(&folder.path().join("data"));
        command
            .env("CELLBLOCK_CPUS", "0.5")
            .env("CELLBLOCK_CONFIG", &file);
        let (status, output, errors) = finished(command.args(["config", "show"]).args(more));
        assert_eq!(status, Some(0), "{errors}");
        assert!(
            !output.contains("sk-canary") && !errors.contains("sk-canary"),
            "{output}{errors}"
        );
        output
    };
    let shown: Value = serde_json::from_str(&show(&[
        "--json",
        "--timeout",
        "5s",
        "--container-env-var",
        "A=sk-canary",
    ]))
    .unwrap();
    let place = |line: u32| format!("{}:{line}", file.display());
    for (name, value, from) in [
        ("memory", json!("1 GiB"), json!([place(1)])),
        ("cpus", json!("0.5"), json!(["CELLBLOCK_CPUS"])),
        ("timeout", json!("5 s"), json!(["--timeout"])),
        ("idle_timeout", json!("1 d"), json!(["profile pyexec"])),
        ("max_sessions", json!("64"), json!(["default"])),
        (
            "variables",
            json!(["A=[hidden]", "TOKEN=[hidden]"]),
            json!([place(2), "--container-env-var"]),
        ),
    ] {
        assert_eq!(shown[name], json!({"value": value, "from": from}), "{name}");
    }
    let text = show(&[]);
    let row = text
        .lines()
        .find(|line| line.starts_with("memory "))
        .expect("every setting has a row");
    assert_eq!(
        row.split_whitespace().collect::<Vec<_>>(),
        ["memory", "1", "GiB", &place(1)]
    );
}

#[test]
fn doctor_tells_how_many_files_may_be_open_and_for_how_many_sessions_that_is_enough() {
    let doctor = |limit: &str, more: &[&str]| {
        finished(
            program_after("ulimit -n \"$1\"", limit.as_ref())
                .arg("doctor")
                .args(more),
        )
    };
    let (status, output, errors) = doctor("1024", &[]);
    assert_eq!(status, Some(0), "{output}{errors}");
    assert!(
        output.contains("Open files: 1024 at once, enough for the 64 sessions"),
        "{output}"
    );
    let (_, output, _) = doctor("1024", &["--json"]);
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["open_files"], json!({"limit": 1024, "sessions": 64}));
    let (status, output, _) = doctor("512", &[]);
    assert_eq!(status, Some(1), "{output}");
    assert!(
        output.contains("512 at once, too few for any session")
            && output.contains("cannot be started"),
        "{output}"
    );
}

/// The program, started by a shell that does something first, with `$1` as given.
fn program_after(first: &str, argument: &OsStr) -> Command {
    let mut command = Command::new("/bin/sh");
    for (name, value) in program().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let script = format!("{first} && shift && exec \"$0\" \"$@\"");
    command
        .arg("-c")
        .arg(script)
        .arg(PROGRAM)
        .arg(argument)
        .stdin(Stdio::null());
    command
}

/// A control group around a server, removed when it is dropped.
struct OuterGroup(PathBuf);

impl OuterGroup {
    /// Makes one with this limit of memory, below the group of this process. Returns none where
    /// that cannot be done.
    fn with_memory(bytes: u64) -> Option<OuterGroup> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = |controllers: &str| {
            let line = membership
                .lines()
                .find_map(|line| line.split_once(':')?.1.strip_prefix(controllers))?;
            line.strip_prefix(':')?.strip_prefix('/').map(str::to_owned)
        };
        let (parent, limit) = match own("memory") {
            Some(own) => (
                Path::new("/sys/fs/cgroup/memory").join(own),
                "memory.limit_in_bytes",
            ),
            None => (Path::new("/sys/fs/cgroup").join(own("")?), "memory.max"),
        };
        let group = OuterGroup(parent.join(format!("outer-{}-{bytes}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        // Swap would only make it slow. Not every kernel counts it.
        for swap in ["memory.swap.max", "memory.swappiness"] {
            if group.0.join(swap).exists() {
                let _ = fs::write(group.0.join(swap), "0");
            }
        }
        fs::write(group.0.join(limit), bytes.to_string()).ok()?;
        Some(group)
    }
}

impl Drop for OuterGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_run_that_memory_outside_its_own_limit_has_ended_says_so() {
    let code = "block = b'x' * (700 << 20); print(len(block) >> 20)";
    let run = |limit: u64| {
        let group = OuterGroup::with_memory(limit)?;
        let mut command = program_after("echo $$ > \"$1\"/cgroup.procs", group.0.as_os_str());
        let ended = finished(command.args([
            "run",
            "--environment",
            "minimal",
            "--memory",
            "2G",
            "-c",
            code,
        ]));
        Some(ended)
    };
    let Some((status, output, errors)) = run(400 << 20) else {
        return skipped("the right to make control groups with a limit of memory");
    };
    assert_eq!((status, output.as_str()), (Some(125), ""), "{errors}");
    let told = "the memory of the machine, or of the control group that the server is in, ran out";
    assert!(errors.contains(told), "{errors}");
    let (status, output, errors) = run(4 << 30).unwrap(); // control
    assert_eq!((status, output.as_str()), (Some(0), "700\n"), "{errors}");
}
