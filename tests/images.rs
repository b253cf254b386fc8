//! Images for sessions in containers, built by the program with a real engine from a base made of
//! Debian packages, and looked at with the engine's own command line.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::Value;

use crate::support::containers::{self, IMAGE, TestEngine};
use crate::support::native::run;
use crate::support::server::{TEST_TIMEOUT, finished, program_below};
use crate::support::{data_folder, skipped};

/// Small packages of nothing but Python, which nothing else in the image needs.
const SMALL: [&str; 2] = ["six", "iniconfig"];

/// Held by whoever builds and removes images of Docker: while an image is removed, what it has in
/// common with another one that is being built may go with it.
static BUILDS: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    BUILDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `cellblock image …` with an engine of the tests. The engine is found as its users find it.
fn image(engine: &TestEngine, arguments: &[&str]) -> Command {
    let mut command = program_below(&data_folder());
    let variable = if engine.is_podman() {
        "CONTAINER_HOST"
    } else {
        "DOCKER_HOST"
    };
    let kind = if engine.is_podman() {
        "podman"
    } else {
        "docker"
    };
    command
        .env(variable, engine.address.to_string())
        .arg("image")
        .args(arguments)
        .args(["--engine", kind]);
    command
}

/// `cellblock image build` on the base of the tests, with little in it.
fn build(engine: &TestEngine, tag: &str, arguments: &[&str]) -> Command {
    let mut command = image(
        engine,
        &["build", "--base", IMAGE, "--no-science", "--tag", tag],
    );
    command.args(arguments);
    command
}

#[track_caller]
fn succeeded(command: &mut Command) -> String {
    let (status, output, errors) = finished(command);
    assert_eq!(status, Some(0), "{errors}");
    output
}

/// Runs Python in a container of an image, without a network, and returns what it prints.
fn python(engine: &TestEngine, options: &[&str], image: &str, code: &str) -> String {
    // Podman asks for more open files and processes than a machine may have to give.
    let limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=512:512"];
    let mut arguments = vec!["run", "--rm", "--network", "none"];
    arguments.extend(limits);
    arguments.extend(options);
    arguments.extend([image, "python3", "-c", code]);
    engine.command(&arguments).trim().to_owned()
}

fn layers(engine: &TestEngine, image: &str) -> Vec<String> {
    let text = engine.command(&[
        "image",
        "inspect",
        "--format",
        "{{json .RootFS.Layers}}",
        image,
    ]);
    serde_json::from_str(&text).expect("a list")
}

const LENT_RIGHTS: &str = "
import os, stat
paths = (os.path.join(folder, name) for folder, _, names in os.walk('/') if not \
folder.startswith('/proc') for name in names)
print(sum(1 for path in paths if os.lstat(path).st_mode & 0o6000 and \
stat.S_ISREG(os.lstat(path).st_mode)))
";

/// Builds an image, looks at it from inside, builds it again, lists it and removes it.
fn an_image_goes_its_way(engine: &'static TestEngine) {
    let tag = "cellblock-test-way:1";
    // A run that was cut off may have left it.
    finished(&mut image(engine, &["remove", tag]));
    let packages = [
        "--packages",
        SMALL[0],
        SMALL[1],
        "--uid",
        "4321",
        "--gid",
        "5432",
    ];
    let told = succeeded(&mut build(engine, tag, &packages));
    assert!(
        told.starts_with("cellblock-test-way:1 is ready: Python 3."),
        "{told}"
    );

    let facts = "import os, six, iniconfig, IPython, pydantic; print(os.getuid(), os.getgid(), \
                 os.getcwd(), six.__file__)";
    let seen = python(engine, &[], tag, facts);
    assert!(
        seen.starts_with("4321 5432 /work /opt/venv/lib/python3.") && seen.ends_with("/six.py"),
        "{seen}"
    );
    let cached = "import six, os; print(os.path.exists(six.__cached__))";
    assert_eq!(python(engine, &["--read-only"], tag, cached), "True");
    assert_eq!(python(engine, &["--user", "0"], tag, LENT_RIGHTS), "0");
    assert_ne!(
        python(engine, &["--user", "0"], IMAGE, LENT_RIGHTS),
        "0",
        "the base has some"
    ); // control
    let home = "import os, pwd; open(os.path.expanduser('~/x'), 'w'); open('x', 'w'); \
                print(pwd.getpwuid(4321).pw_name)";
    assert_eq!(python(engine, &[], tag, home), "cellblock");

    let before = layers(engine, tag);
    let again = succeeded(&mut build(engine, tag, &packages));
    assert!(again.contains("is there already"), "{again}");
    let other = succeeded(&mut build(engine, tag, &["--packages", SMALL[0]]));
    assert!(
        other.contains("is ready"),
        "another wish is another image: {other}"
    );
    assert_ne!(layers(engine, tag), before);

    let listed: Value =
        serde_json::from_str(&succeeded(&mut image(engine, &["list", "--json"]))).unwrap();
    let is_it = |image: &&Value| {
        image["tags"]
            .as_array()
            .unwrap()
            .iter()
            .any(|name| name.as_str().unwrap().ends_with(tag))
    };
    let listed = listed
        .as_array()
        .unwrap()
        .iter()
        .find(is_it)
        .expect("it is listed")
        .clone();
    let installed: Vec<&str> = listed["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    assert!(
        installed.iter().any(|name| name.starts_with("six==")),
        "{installed:?}"
    );
    assert!(
        !installed.iter().any(|name| name.starts_with("iniconfig")),
        "{installed:?}"
    );

    assert_eq!(
        succeeded(&mut image(engine, &["remove", tag])),
        format!("removed {tag}\n")
    );
    let (status, _, errors) = finished(&mut image(engine, &["remove", tag]));
    assert_eq!(status, Some(2));
    assert!(errors.contains("there is no image"), "{errors}");
}

#[test]
fn an_image_is_built_by_docker_and_runs_without_rights() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let _alone = alone();
    an_image_goes_its_way(docker);
}

#[test]
fn an_image_is_built_by_podman_and_runs_without_rights() {
    let Some(podman) = containers::podman() else {
        return;
    };
    // The usual runtime of Podman runs no step of a build where control groups of both versions are
    // mounted.
    let (_, _, errors) = finished(&mut build(podman, "cellblock-test-trial:1", &[]));
    if errors.contains("cgroups in hybrid mode not supported") {
        return skipped("a runtime of Podman that can build on this machine");
    }
    podman.command(&["rmi", "--force", "cellblock-test-trial:1"]);
    an_image_goes_its_way(podman);
}

#[test]
fn the_same_wish_gives_the_same_layers_when_everything_is_done_again() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let _alone = alone();
    let tags = ["cellblock-test-first:1", "cellblock-test-second:1"];
    let made = tags.map(|tag| {
        succeeded(&mut build(
            docker,
            tag,
            &["--no-cache", "--packages", SMALL[0]],
        ));
        layers(docker, tag)
    });
    assert_eq!(made[0], made[1]);
    let other = "cellblock-test-third:1";
    succeeded(&mut build(
        docker,
        other,
        &[
            "--no-cache",
            "--packages",
            SMALL[1],
            "--uid",
            "33",
            "--gid",
            "33",
        ],
    ));
    assert_ne!(layers(docker, other), made[0]); // control
    // Debian has a user of this number already. It keeps its name and moves.
    let user = "import os, pwd; user = pwd.getpwuid(os.getuid()); print(user.pw_name, user.pw_dir)";
    assert_eq!(python(docker, &[], other, user), "www-data /home/cellblock");
    for tag in tags.into_iter().chain([other]) {
        docker.command(&["rmi", "--force", tag]);
    }
}

#[test]
fn a_session_runs_in_an_image_that_was_built() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let _alone = alone();
    let tag = "cellblock-test-session:1";
    succeeded(&mut build(docker, tag, &["--packages", SMALL[0]]));
    let containers = docker.build().image(tag).start();
    run(async {
        let session = containers.session();
        let seen = session
            .ok("import six, sys, IPython; print(six.__name__, sys.prefix, IPython.__file__)")
            .await;
        assert!(seen.starts_with("six /opt/venv /opt/venv/lib/"), "{seen}");
        containers.end().await;
    });
    docker.command(&["rmi", "--force", tag]);
}

#[test]
fn the_recipe_is_printed_and_nothing_is_built() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let tag = "cellblock-test-printed:1";
    let text = succeeded(&mut build(
        docker,
        tag,
        &["--dockerfile", "--packages", SMALL[0], "--uid", "77"],
    ));
    assert!(
        text.contains("\nFROM sha256:")
            && text.contains("\nUSER 77:77\n")
            && text.contains("six=="),
        "{text}"
    );
    assert_eq!(docker.command(&["images", "--quiet", tag]), "");
    let root = succeeded(&mut build(docker, tag, &["--dockerfile", "--root"]));
    assert!(root.contains("\nUSER 0:0\nENTRYPOINT"), "{root}");
}

#[test]
fn what_cannot_be_built_is_told_with_a_cure() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let _alone = alone();
    let empty = "cellblock-test-empty:1";
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("empty.tar");
    std::fs::write(&archive, [0; 10_240]).unwrap();
    docker.command(&["import", archive.to_str().unwrap(), empty]);
    let nowhere = format!("unix://{}", folder.path().join("no.sock").display());
    let on = |base: &str, packages: &str| {
        image(docker, &["build", "--base", base, "--packages", packages])
    };
    let mut without_engine = on(IMAGE, "six");
    without_engine.env("DOCKER_HOST", nowhere);
    for (command, words) in [
        (&mut without_engine, ["cannot be reached", "DOCKER_HOST"]),
        // Nobody listens on this port: no question leaves the machine.
        (
            &mut on("localhost:1/missing:1", "six"),
            ["localhost:1/missing:1", "--base"],
        ),
        (
            &mut on(empty, "six"),
            ["no program called python3 or python", "--base"],
        ),
        (
            &mut on(IMAGE, "pywin32"),
            ["Only wheels are taken", "pywin32"],
        ),
        (
            &mut on(IMAGE, "./folder"),
            ["./folder", "cannot be installed"],
        ),
        (&mut on("Not A Name", "six"), ["--base", "lower-case"]),
    ] {
        let (status, output, errors) = finished(command);
        assert_eq!((status, output.as_str()), (Some(2), ""), "{errors}");
        assert!(
            words.iter().all(|word| errors.contains(word)),
            "{words:?} in {errors}"
        );
    }
    docker.command(&["rmi", "--force", empty]);
}

#[test]
fn an_image_of_somebody_else_is_not_removed() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let (status, _, errors) = finished(&mut image(docker, &["remove", IMAGE]));
    assert_eq!(status, Some(2));
    assert!(errors.contains("was not made by cellblock"), "{errors}");
    assert_ne!(docker.command(&["images", "--quiet", IMAGE]), "");
}

#[test]
fn a_build_that_is_cancelled_leaves_no_container_and_no_image() {
    let Some(docker) = containers::docker() else {
        return;
    };
    let _alone = alone();
    let (base, tag, user) = (
        "cellblock-test-slow:1",
        "cellblock-test-cancelled:1",
        "61234",
    );
    // A run that was cut off may have left these.
    docker.try_command(&["rm", "--force", "cellblock-test-slow"]);
    docker.try_command(&["rmi", "--force", base]);
    // A base in which the last step of a build never ends.
    let slow = "import glob\nfor file in glob.glob('/usr/lib/python3*/py_compile.py'): open(file, \
                'w').write('import time; time.sleep(600)')";
    docker.command(&[
        "run",
        "--name",
        "cellblock-test-slow",
        "--network",
        "none",
        IMAGE,
        "python3",
        "-c",
        slow,
    ]);
    docker.command(&["commit", "cellblock-test-slow", base]);
    docker.command(&["rm", "cellblock-test-slow"]);

    let arguments = [
        "build",
        "--base",
        base,
        "--no-science",
        "--tag",
        tag,
        "--uid",
        user,
    ];
    let mut child = image(docker, &arguments)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map(|line| line.unwrap());
    let mut before = Vec::new();
    let begun = lines.by_ref().any(|line| {
        before.push(line);
        before
            .last()
            .is_some_and(|line| line.contains("building (RUN)"))
    });
    assert!(begun, "the step did not begin: {before:?}");
    let steps = || {
        let all = docker.command(&["ps", "--all", "--no-trunc", "--format", "{{.Command}}"]);
        all.lines().filter(|command| command.contains(user)).count()
    };
    until("its container runs", || steps() == 1);
    let process = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(process, rustix::process::Signal::INT).unwrap();
    let last: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(
        last.iter()
            .any(|line| line.contains("cancelled") || line.contains("interrupted")),
        "{last:?}"
    );
    until("its container is gone", || steps() == 0);
    assert_eq!(docker.command(&["images", "--quiet", tag]), "");
    docker.command(&["rmi", "--force", base]);
}

/// Asks until it is so. Each question takes the engine a while, so that nothing spins.
#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{what}");
    }
}
