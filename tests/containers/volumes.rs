//! Volumes that stay on an engine, and those that are removed.

use std::fs::File;
use std::path::Path;

use rustix::fs::FlockOperation;

use super::on_docker;
use crate::support::containers::{IMAGE, TestEngine};

/// Makes a volume with these labels.
fn make(engine: &TestEngine, name: &str, labels: &[(&str, &str)]) -> String {
    let labels: Vec<String> = labels
        .iter()
        .map(|(label, value)| format!("--label=cellblock.{label}={value}"))
        .collect();
    let mut words = vec!["volume", "create"];
    words.extend(labels.iter().map(String::as_str));
    words.push(name);
    engine.command(&words);
    name.to_owned()
}

/// A server of the same place that lives and uses a volume, as others see it.
fn neighbour(runtime_dir: &Path, volume: &str) -> File {
    let path = runtime_dir.join("containers/00000000000000aa");
    std::fs::write(&path, volume).unwrap();
    let file = File::open(path).unwrap();
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    file
}

#[test]
fn volumes_of_earlier_versions_are_removed_unless_somebody_uses_them() {
    on_docker(async |engine| {
        let folder = tempfile::tempdir().unwrap();
        let start = || engine.build().runtime_dir(folder.path()).start();
        let first = start();
        let session = first.session();
        session.ok("1").await;
        let container = engine.container_of(&session).await;
        let label = |of: &str, thing: &str, label: &str| {
            let format = format!("{{{{ index .{of}Labels \"cellblock.{label}\" }}}}");
            engine
                .command(&["inspect", "--format", &format, thing])
                .trim()
                .to_owned()
        };
        let place = label("Config.", &container, "place");
        let current = engine.command(&[
            "inspect",
            "--format",
            "{{ (index .Mounts 0).Name }}",
            &container,
        ]);
        let (current, runner) = (current.trim(), label("", current.trim(), "runner"));
        let image = engine.command(&["image", "inspect", "--format", "{{ .Id }}", IMAGE]);

        let named = |what: &str| format!("cellblock-runner-{place}-{what}");
        let of = |what: &str, more: &[(&str, &str)]| {
            make(
                engine,
                &named(what),
                &[&[("place", place.as_str()), ("role", "runner")], more].concat(),
            )
        };
        let old = of("old", &[("runner", "an-older-one")]);
        let older = of("older", &[]);
        let gone = format!("sha256:{}", "0".repeat(64));
        let for_nothing = of("for-nothing", &[("runner", &runner), ("image", &gone)]);
        let other_image = of(
            "other-image",
            &[("runner", &runner), ("image", image.trim())],
        );
        let in_use = of("in-use", &[("runner", "an-older-one")]);
        let user = engine.command(&[
            "create",
            "--network=none",
            "--volume",
            &format!("{in_use}:/x"),
            IMAGE,
            "true",
        ]);
        let neighbours = of("neighbours", &[("runner", "an-older-one")]);
        let elsewhere = make(
            engine,
            &named("elsewhere"),
            &[("place", "elsewhere"), ("role", "runner")],
        );
        let data = make(engine, &named("data"), &[("place", &place)]);
        let foreign = make(
            engine,
            &format!("{place}-foreign"),
            &[("place", &place), ("role", "runner")],
        );
        let neighbour = neighbour(folder.path(), &neighbours);

        let second = start();
        second.session().ok("1").await;
        let left = engine.command(&["volume", "ls", "--quiet"]);
        let is_left = |name: &str| left.lines().any(|line| line == name);
        for name in [&old, &older, &for_nothing] {
            assert!(!is_left(name), "{name} is still there");
        }
        for name in [
            current,
            &other_image,
            &in_use,
            &neighbours,
            &elsewhere,
            &data,
            &foreign,
        ] {
            assert!(is_left(name), "{name} is gone");
        }

        drop(neighbour);
        engine.command(&["rm", user.trim()]);
        let third = start();
        third.session().ok("1").await;
        let left = engine.command(&["volume", "ls", "--quiet"]);
        assert!(
            !left.contains(&in_use) && !left.contains(&neighbours),
            "{left}"
        );
        assert_eq!(session.ok("print('still there')").await, "still there\n");
        for containers in [first, second, third] {
            containers.end().await;
        }
        for name in [&other_image, &elsewhere, &data, &foreign] {
            engine.command(&["volume", "rm", name]);
        }
    });
}
